"""The `cascade` backend: keys that several requests share are read once for all of them.

In a flat step each request reads all its pages, including those that it shares with others. Cascade attention computes
the attention of all sharers over their common pages in one call, the attention of each request over its remaining pages
in another, and merges the two states. With a tree of prefixes there are several such levels (Ye et al. 2024, "Cascade
Inference"; Ye et al. 2025, section 3.1.2; Juravsky et al. 2024, "Hydragen").

The levels of a step are found on the host (`levels.py`). A step without long common prefixes is flat: it has no
levels. Explained in chapter 09.

The chunks before a request's prompt (chunk memory) are levels, too. Their keys were computed at other positions, so
queries are rotated before they attend to them. Explained in chapter 10.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from mini_engine.attention.backend import AttentionParts, KVCache
from mini_engine.attention.levels import H200_COSTS, CascadeCosts, LevelCosts, LevelPlanner, indptr_of, ranges
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import AttentionState
from mini_engine.attention.torch import SequencePlan, TorchBackend, keys_of_pages
from mini_engine.batch import PrefixLevel, StepBatch
from mini_engine.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables
from mini_engine.transfer import to_device


def shared_pages(level: PrefixLevel, first_token: Int32[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
    """Count the pages of each request that a level holds.

    Args:
        level: a level of a step.
        first_token: [B] first token of each request.
    """
    group = np.searchsorted(level.qo_indptr.numpy(), first_token, side="right") - 1
    return np.diff(level.kv_page_indptr.numpy(), append=level.kv_page_indptr[-1]).astype(np.int64)[group]


def own_pages(batch: StepBatch) -> StepBatch:
    """Return the last level: the same step, with only the pages of each request that no earlier level covers."""
    prefixes = [level for level in batch.levels if level.query_offsets is None]  # chunks have their own pages
    if not prefixes:
        return batch
    shared = np.zeros(batch.num_sequences, dtype=np.int64)
    for level in prefixes:
        shared += shared_pages(level, batch.qo_indptr.numpy()[:-1])
    indptr = batch.kv_page_indptr.numpy()
    counts = np.diff(indptr) - shared
    index = ranges(shared, counts)
    entries = index + np.repeat(indptr[:-1], counts)
    host_pages = batch.host_page_indices.numpy()[entries]
    moved = to_device(
        {"pages": host_pages, "positions": index * batch.page_size, "entries": entries}, batch.kv_page_indices.device
    )
    positions = moved["positions"] if batch.page_positions is None else batch.page_positions[moved["entries"].long()]
    return replace(
        batch,
        levels=(),
        kv_lens=batch.kv_lens - _host(shared * batch.page_size),
        kv_page_indptr=_host(indptr_of(counts)),
        kv_page_indices=moved["pages"],
        host_page_indices=torch.from_numpy(host_pages),
        page_positions=positions,
    )


def level_planner(
    specs: Sequence[AttentionSpec], cache: KVCache, costs: CascadeCosts, parts: AttentionParts
) -> LevelPlanner | None:
    """Build a planner for the layers that can use levels; None if there are none.

    A layer with a window reads only a few of the last pages, which are seldom shared, and must not read the first ones.

    Args:
        specs: one for each layer.
        cache: the KV cache.
        costs: coefficients.
        parts: the engine's replaceable parts.
    """
    able = [spec for spec in specs if spec.window is None]
    if not able:
        return None
    level_costs = LevelCosts.of(costs, able[0], cache.page_size, cache.dtype)
    return LevelPlanner(level_costs, cache.page_size, parts.find_levels, parts.chunk_levels)


class QueryRotation:
    """Rotates the queries of a step for the keys of a level, which were computed at other positions.

    With RoPE, a score depends only on the distance between query and key. So rotating a query by the offset of a level
    has the same effect as rotating all keys of the level back by that offset. Layers without RoPE need no rotation.

    Args:
        specs: one for each layer.
        dtype: dtype of the angles.
        device: device of the queries.
    """

    def __init__(self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies: dict[RopeConfig | None, Tensor] = {
            rope: inverse_frequencies(rope).to(device, dtype) for rope in {spec.rope for spec in specs} if rope
        }
        self._levels: Sequence[PrefixLevel] = ()

    def plan(self, levels: Sequence[PrefixLevel]) -> None:
        """Compute the rotations of a step's levels, once for all layers, unless the levels are unchanged."""
        if levels is self._levels:
            return
        self._levels = levels
        self._tables = [
            {rope: rope_tables(level.query_offsets, inv_freq) for rope, inv_freq in self._frequencies.items()}
            if level.query_offsets is not None
            else {}
            for level in levels
        ]

    def __call__(self, spec: AttentionSpec, level: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        """Rotate a layer's queries for one of the levels; a shared prefix leaves them unchanged."""
        tables = self._tables[level].get(spec.rope)
        return q if tables is None else apply_rope(q, *tables)


class CascadeBackend(TorchBackend):
    """Cascade attention in PyTorch: the reference, on any device, in any dtype, with every feature of AttentionSpec.

    Layers with a window are flat; they cannot be combined with chunks.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache.
        parts: the engine's replaceable parts.
        costs: determine which levels pay off.
    """

    bypasses: ClassVar[frozenset[str]] = (TorchBackend.bypasses | {"masked_attention"}) - {
        "chunk_levels",
        "find_levels",
    }

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        cache: KVCache,
        parts: AttentionParts,
        costs: CascadeCosts = H200_COSTS,
    ) -> None:
        super().__init__(specs, cache, parts)
        self.planner = level_planner(specs, cache, costs, parts)
        self._rotated = QueryRotation(specs, torch.promote_types(cache.dtype, torch.float32), cache.device)

    def plan(self, batch: StepBatch) -> None:
        super().plan(batch)
        self._levels: list[list[SequencePlan]] = []
        if not batch.levels:
            return
        self._rotated.plan(batch.levels)
        before = np.zeros(batch.num_sequences, dtype=np.int64)
        for level in batch.levels:
            self._levels.append(_plan_groups(batch, level, before))
            if level.query_offsets is None:
                before += shared_pages(level, batch.qo_indptr.numpy()[:-1])
        self._own = self._plan_sequences(own_pages(batch), range(batch.num_sequences))

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        spec = self.specs[layer]
        if spec.window is not None or not self._levels:
            return super().run(layer, q)
        states = [self._attend_to_level(spec, level, self._rotated(spec, i, q)) for i, level in enumerate(self._levels)]
        states.append(self._attend_to_level(spec, self._own, q))
        return self._merge_sinks(spec, functools.reduce(self.parts.merge_states, states)).out.to(q.dtype)

    def _attend_to_level(
        self, spec: AttentionSpec, level: list[SequencePlan], q: Float[Tensor, "T Hq D"]
    ) -> AttentionState:
        """Compute the attention of each group's queries over its pages; queries without pages get the empty state."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=dtype)
        lse = torch.full(q.shape[:2], -math.inf, dtype=dtype, device=q.device)
        for group in level:
            state = self._state(spec, group, q[group.tokens])
            out[group.tokens], lse[group.tokens] = state.out, state.lse
        return AttentionState(out, lse)


def _plan_groups(batch: StepBatch, level: PrefixLevel, before: Int64[np.ndarray, " B"]) -> list[SequencePlan]:
    """Plan the groups of a level that have pages, each as one sequence whose queries see all keys.

    Args:
        batch: the step.
        level: one of its levels.
        before: pages of each request in the levels outside this one. They give the positions of the keys. Only ALiBi
            depends on these positions, and chunks do not support ALiBi.
    """
    first_token, first_page = level.qo_indptr.tolist(), level.kv_page_indptr.tolist()
    last_page_lens, qo_indptr = level.kv_last_page_len.tolist(), batch.qo_indptr.numpy()
    plans = []
    # Groups of padding have no pages, and may begin after the last request.
    for g in np.flatnonzero(np.diff(level.kv_page_indptr.numpy())).tolist():
        tokens, entries = slice(*first_token[g : g + 2]), slice(*first_page[g : g + 2])
        num_keys = (entries.stop - entries.start - 1) * batch.page_size + last_page_lens[g]
        start = int(before[np.searchsorted(qo_indptr, tokens.start)]) * batch.page_size
        key_positions = torch.arange(start, start + num_keys, device=batch.positions.device)
        slots = keys_of_pages(level.kv_page_indices[entries].long() * batch.page_size, batch.page_size, num_keys)
        plans.append(SequencePlan(tokens, slots, batch.positions[tokens], key_positions, {None: None}))
    return plans


def _host(array: np.ndarray) -> Int32[Tensor, " n"]:
    return torch.from_numpy(array.astype(np.int32))
