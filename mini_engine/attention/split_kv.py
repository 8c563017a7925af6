"""The `split_kv` backend: load-balanced attention in PyTorch, with a plan like FlashInfer's, on any device.

A GPU computes a step with a fixed number of workers (thread blocks), and the step takes as long as the worker with the
most keys. So the keys of long sequences are split: `plan_work` cuts a step into work items of bounded length, about as
many as there are workers. Each item yields a partial attention state, and the states of the same queries are merged (Ye
et al. 2025, sections 2.2 and 3.3). The plan combines two of FlashInfer's: as in `TwoStageHolisticPlan`, a tile needs no
keys beyond its last query, and the chunk size is found as in `PrefillBinarySearchKVChunkSize`, which counts masked keys
too. Explained in chapter 08.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.backend import AttentionParts, KVCache
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import SequencePlan, TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.ragged import members
from mini_engine.transfer import to_device

THREAD_BLOCKS = 264  # two for each of the 132 multiprocessors of an H200, shared among the KV heads
QUERY_ROWS = 64  # rows of a tile: its queries times the query heads of a group
LEAST_KEYS = 128  # smallest chunk size, as in FlashInfer's planner with pages of 16 tokens


@dataclass(frozen=True)
class WorkPlan:
    """A step's attention as work items: a tile of queries of one sequence, and a range of that sequence's keys.

    Attributes:
        chunk_size: most keys of an item.
        sequences: [N] sequence of each item.
        first_tokens: [N] its first query, as a row of the step.
        end_tokens: [N] one past its last query.
        first_keys: [N] its first key, counted within the sequence.
        end_keys: [N] one past its last key.
        item_indptr: [tiles + 1] first item of each tile of queries, and N. The states of a tile's items are merged.
    """

    chunk_size: int
    sequences: Int[np.ndarray, " N"]
    first_tokens: Int[np.ndarray, " N"]
    end_tokens: Int[np.ndarray, " N"]
    first_keys: Int[np.ndarray, " N"]
    end_keys: Int[np.ndarray, " N"]
    item_indptr: Int[np.ndarray, " indptr"]


def plan_work(
    qo_indptr: Int[np.ndarray, " indptr"],
    kv_lens: Int[np.ndarray, " B"],
    num_workers: int,
    *,
    tile_len: int,
    least_keys: int = 1,
    window: int | None = None,
) -> WorkPlan:
    """Split a step into as many work items as there are workers, each of about the same number of keys.

    The queries of each sequence are cut into tiles. A tile needs the keys from the start of its first query's window to
    its last query, and these keys are cut into chunks. The chunk size is the smallest one that does not make more items
    than workers.

    Args:
        qo_indptr: [B+1] first query of each sequence, and the number of queries.
        kv_lens: [B] keys of each sequence; its queries belong to the last of them.
        num_workers: items that run at the same time. There are more items only if there are more tiles.
        tile_len: most queries of a tile.
        least_keys: smallest chunk size.
        window: keys that a query sees, its own included; None: all keys up to its own.
    """
    tiles_of = -(-np.diff(qo_indptr) // tile_len)
    sequences, index = members(tiles_of)
    first_tokens = qo_indptr[sequences] + index * tile_len
    end_tokens = np.minimum(first_tokens + tile_len, qo_indptr[sequences + 1])
    key_of_first_token = kv_lens[sequences] - qo_indptr[sequences + 1] + first_tokens
    end_keys = key_of_first_token + end_tokens - first_tokens
    first_keys = np.zeros_like(end_keys) if window is None else np.maximum(key_of_first_token + 1 - window, 0)

    chunk_size = smallest_chunk(end_keys - first_keys, num_workers, least_keys)
    items_of = -(-(end_keys - first_keys) // chunk_size)
    tiles, index = members(items_of)
    first_keys = first_keys[tiles] + index * chunk_size
    return WorkPlan(
        chunk_size,
        sequences[tiles],
        first_tokens[tiles],
        end_tokens[tiles],
        first_keys,
        np.minimum(first_keys + chunk_size, end_keys[tiles]),
        np.concatenate(([0], items_of.cumsum())),
    )


def smallest_chunk(num_keys: Int[np.ndarray, " tiles"], num_workers: int, least: int = 1) -> int:
    """Find the smallest chunk size that splits the keys of all tiles into at most `num_workers` chunks.

    A larger chunk never makes more chunks, so the size is found by binary search.

    Args:
        num_keys: [tiles] keys of each tile, at least 1.
        num_workers: most chunks. With more tiles than that, each tile gets a single chunk.
        least: smallest chunk size.
    """
    low, high = least, max(least, int(num_keys.max()))
    while low < high:
        middle = (low + high) // 2
        if (-(-num_keys // middle)).sum() > num_workers:
            low = middle + 1
        else:
            high = middle
    return low


class SplitKVBackend(TorchBackend):
    """Executes the work items one after another, and merges their states with `merge_states`.

    A GPU would execute them at the same time, for each KV head. This is the reference for such kernels, in any dtype.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, in layout NHD.
        parts: the engine's replaceable parts.
        thread_blocks: number of thread blocks that the plan is made for, over all KV heads.
        least_keys: smallest split of the keys.
    """

    bypasses: ClassVar[frozenset[str]] = (TorchBackend.bypasses | {"masked_attention"}) - {"plan_work"}

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        cache: KVCache,
        parts: AttentionParts,
        thread_blocks: int = THREAD_BLOCKS,
        least_keys: int = LEAST_KEYS,
    ) -> None:
        super().__init__(specs, cache, parts)
        self._thread_blocks, self._least_keys = thread_blocks, least_keys
        self._kinds = [spec.kind for spec in specs]

    def plan(self, batch: StepBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        slots, positions = _locate_keys(batch)
        self._tiles = {kind: self._plan_tiles(batch, kind, slots, positions) for kind in set(self._kinds)}

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        spec, out = self.specs[layer], torch.empty_like(q)
        for items in self._tiles[self._kinds[layer]]:
            tokens = items[0].tokens
            states = [self._state(spec, item, q[tokens]) for item in items]
            out[tokens] = self._merge_sinks(spec, reduce(self.parts.merge_states, states)).out.to(q.dtype)
        return out

    def _plan_tiles(
        self, batch: StepBatch, kind: AttentionSpec, slots: Int[Tensor, " keys"], positions: Int[Tensor, " keys"]
    ) -> list[list[SequencePlan]]:
        """Plan the work of one kind of layer and evaluate its masks. Return the work items of each tile of queries.

        Args:
            batch: the step.
            kind: the layers' spec.
            slots: slot of each key of the step.
            positions: position of each.
        """
        plan = self.parts.plan_work(
            batch.qo_indptr.numpy(),
            batch.kv_lens.numpy(),
            max(1, self._thread_blocks // kind.num_kv_heads),
            tile_len=max(1, QUERY_ROWS // kind.group),
            least_keys=self._least_keys,
            window=kind.window,
        )
        mask_mod = self._mask_mods[kind.window]
        nothing = torch.zeros((), dtype=torch.long, device=batch.positions.device)  # no mask depends on row or head
        before = batch.kv_lens.numpy().cumsum() - batch.kv_lens.numpy()  # keys of the sequences before this one
        first_keys = (plan.first_keys + before[plan.sequences]).tolist()
        end_keys = (plan.end_keys + before[plan.sequences]).tolist()
        first_tokens, end_tokens = plan.first_tokens.tolist(), plan.end_tokens.tolist()
        tiles = []
        for first, end in pairwise(plan.item_indptr.tolist()):
            tokens = slice(first_tokens[first], end_tokens[first])
            queries, items = batch.positions[tokens], []
            for item in range(first, end):
                keys = slice(first_keys[item], end_keys[item])
                mask = mask_mod(nothing, nothing, queries[:, None], positions[keys])
                items.append(SequencePlan(tokens, slots[keys], queries, positions[keys], {kind.window: mask}))
            tiles.append(items)
        return tiles


def _locate_keys(batch: StepBatch) -> tuple[Int[Tensor, " keys"], Int[Tensor, " keys"]]:
    """Find the slot and the position of each key of the step, one sequence after the other."""
    sequences, key = members(batch.kv_lens.numpy())
    entries = batch.kv_page_indptr.numpy()[sequences] + key // batch.page_size
    moved = to_device({"entries": entries, "keys": key, "offsets": key % batch.page_size}, batch.positions.device)
    slots = batch.kv_page_indices[moved["entries"]].long() * batch.page_size + moved["offsets"]
    if batch.page_positions is None:
        return slots, moved["keys"]
    return slots, batch.page_positions[moved["entries"]] + moved["offsets"]
