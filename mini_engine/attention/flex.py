"""The `flex` backend: FlexAttention directly on the paged KV cache.

FlexAttention (Dong et al. 2024) compiles one kernel from a mask and a score_mod, and visits only the blocks of keys
that a `BlockMask` lists. Here these are physical blocks: the kernel reads a layer's whole cache as one sequence of
keys, and the block indices of a query name the blocks that hold its own sequence. Nothing is gathered.

The queries of a step are cut into tiles, each of one sequence, so that a tile visits only the pages of that sequence.
A decode is a tile of one token. The query heads of a group are packed along its query axis, so each key is read once
for all of them.

A compiled kernel is specialized to its shapes. Only two of them change from step to step, the number of decode tiles
and the number of prompt tiles, and both are rounded up: no kernel is compiled because sequences grow, pages move or
requests come and go. Explained in chapters 05 and 06.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, no_type_check

import numpy as np
import torch
import torch._dynamo.config
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mini_engine.attention import masks
from mini_engine.attention.backend import AttentionBackend, AttentionParts, KVCache
from mini_engine.attention.block_mask import first_keys, list_blocks
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.ragged import members
from mini_engine.transfer import to_device

QUERY_BLOCK = 128  # queries in a BlockMask's query block; no tile has more
# torch allows 8 kernels per function by default. A process needs one for each kind of layer and number of tiles.
MAX_KERNELS = 256


@dataclass(frozen=True)
class QueryTiles:
    """Queries of a step, cut into tiles of up to L tokens of one sequence, and the pages of each tile.

    The number of tiles is rounded up. A padding tile holds no query and sees no key.

    The tensors are fixed except `positions`. `FlexBackend.plan` reuses the decode tiles of the last step while they
    list the right blocks, and overwrites `positions` in place, because the compiled masks read that very tensor.

    Attributes:
        tokens: the range of the step's tokens that are in these tiles.
        token_of_slot: [tiles * L] token in each tile slot; padding slots hold an arbitrary valid token.
        slot_of_token: [n] tile slot of each token of `tokens`: the inverse of `token_of_slot`.
        positions: [tiles, L] position of the query in each tile slot, -1 for padding.
        pages: [tiles, W] pages of the tile's sequence; the last page is repeated as padding.
        page_positions: [tiles, W] position of each page's first key, -1 for padding.
        first_keys: [tiles, pages of the cache] position of each page's first key if the page belongs to the tile's
            sequence, otherwise -1. A page that sequences share has a position in the tiles of each.
    """

    tokens: slice
    token_of_slot: Int[Tensor, " slots"]
    slot_of_token: Int[Tensor, " n"]
    positions: Int[Tensor, "tiles L"]
    pages: Int[Tensor, "tiles W"]
    page_positions: Int[Tensor, "tiles W"]
    first_keys: Int32[Tensor, "tiles pages"]

    @property
    def length(self) -> int:
        """Slots of a tile, L."""
        return self.positions.shape[1]


# Tiles, and the kernel's mask and score_mod for each kind of layer.
TilePlan = tuple[QueryTiles, dict[AttentionSpec, tuple[BlockMask, masks.ScoreMod | None]]]


class FlexBackend(AttentionBackend):
    """FlexAttention over the paged cache, on a CPU or a GPU, with softcap, ALiBi and windows.

    A kernel is compiled at its first use, which takes seconds, and torch keeps it on disk for the next process. One
    kernel masks, normalizes and sums, so two parts are bypassed: `masked_attention` and `merge_states`.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, in layout NHD.
        parts: the engine's replaceable parts.
        compiled: False computes everything in plain PyTorch, slowly, for tests. The compiled kernels do not support
            float64, so float64 is always computed that way.

    Raises:
        ConfigError: if torch cannot compile FlexAttention on this machine.
    """

    bypasses: ClassVar[frozenset[str]] = frozenset(
        {"chunk_levels", "find_levels", "masked_attention", "merge_states", "plan_work"}
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts, compiled: bool = True
    ) -> None:
        super().__init__(specs, cache, parts)
        keys = cache.layers[0][0]
        on_gpu = cache.device.type == "cuda"
        self._num_pages = keys.shape[0]
        self._kv_block = kv_block_size(cache.page_size, on_gpu)
        self._tile_len = 128 if on_gpu else 32  # on a CPU short tiles waste less of the diagonal (measured)
        self._layers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in cache.layers]
        # The same memory in FlexAttention's shape, [1, heads, slots, head_dim]. Made once: a view costs host time.
        self._attended = [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in self._layers]
        self._kinds = [spec.kind for spec in specs]
        self._score_mods = {kind: _score_mod(kind, keys) for kind in set(self._kinds)}
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MAX_KERNELS)
        self._attention: Callable = flex_attention
        if compiled and keys.dtype != torch.float64:
            _check_compiler(on_gpu)
            self._attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        else:
            for _, values in cache.layers:
                values.zero_()  # plain PyTorch multiplies every slot of the cache by its weight, even if that is 0
        self._num_blocks = self._num_pages * (self.cache.page_size // self._kv_block)
        self._decodes: TilePlan | None = None
        self._decodes_key: tuple[bytes, bytes] | None = None
        # On a CPU, torch would split a decode's keys by their location in the cache and search every part for them.
        self._kernel_options = None if on_gpu else {"PARTITION_SIZE": self._num_pages * self.cache.page_size}

    def plan(self, batch: StepBatch) -> None:
        """Cut the step's queries into tiles, and build or reuse their masks.

        This is safe while the previous step still runs on the GPU. Arrays that the previous step reads on the device,
        including the decode tiles' positions, are overwritten only by work queued after it on the same stream. On the
        host, each upload has its own pinned buffer (`to_device`), which torch does not reuse until the copy is done.
        """
        self._slot_mapping = batch.slot_mapping
        self._unwritten = unwritten_slots(batch, self._kv_block)
        first_prompt, end = batch.num_decodes, batch.num_sequences
        self._tile_plans = [self._plan_decodes(batch)] if first_prompt else []
        if first_prompt < end:
            self._tile_plans.append(self._plan(batch, range(first_prompt, end), self._tile_len))

    def _plan_decodes(self, batch: StepBatch) -> TilePlan:
        """Return the decodes' tiles and masks, reusing the last step's while their blocks are still right."""
        key = None
        if batch.page_positions is None:
            key = block_indices_key(batch, self._kv_block, [kind.window for kind in self._score_mods])
        if self._decodes is None or key is None or key != self._decodes_key:
            self._decodes, self._decodes_key = self._plan(batch, range(batch.num_decodes), 1), key
        tiles, _ = self._decodes
        tiles.positions.view(-1).index_copy_(0, tiles.slot_of_token, batch.positions[tiles.tokens])
        return self._decodes

    def _plan(self, batch: StepBatch, sequences: range, tile_len: int) -> TilePlan:
        tiles = cut_into_tiles(batch, sequences, tile_len, self._num_pages)
        mods = {}
        for kind, score_mod in self._score_mods.items():
            score_mod = score_mod and physical_score(score_mod, tiles, self.cache.page_size, kind.group)
            mods[kind] = self.block_mask(tiles, kind), score_mod
        return tiles, mods

    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        k_cache, v_cache = self._layers[layer]
        if self._unwritten is not None:  # before the keys of this step, some of which may be behind a shorter sequence
            v_cache.index_fill_(0, self._unwritten, 0)
        self.parts.append_kv(k_cache, v_cache, k, v, self._slot_mapping)

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        spec = self.specs[layer]
        k, v = self._attended[spec.layer]
        parts = []
        for tiles, mods in self._tile_plans:
            block_mask, score_mod = mods[self._kinds[layer]]
            queries = q.index_select(0, tiles.token_of_slot).unflatten(0, (-1, tiles.length))
            # The query heads of a decode are packed along the query axis, grouped by KV head; a longer tile has enough
            # queries without them.
            packed = tiles.length == 1
            queries = queries[:, 0].unflatten(1, (spec.num_kv_heads, -1)) if packed else queries.transpose(1, 2)
            result = self._attention(
                queries,
                k,
                v,
                score_mod=score_mod,
                block_mask=block_mask,
                scale=spec.scale,
                enable_gqa=not packed,
                kernel_options=self._kernel_options,
            )
            if not packed:
                result = result.transpose(1, 2)
            parts.append(result.reshape(-1, *q.shape[1:]).index_select(0, tiles.slot_of_token))
        return parts[0] if len(parts) == 1 else torch.cat(parts)  # decodes come first, as in the step

    def block_mask(self, tiles: QueryTiles, kind: AttentionSpec) -> BlockMask:
        """Return the physical BlockMask of a kind of layer: batch index b lists the blocks that tile b visits."""
        blocks_per_page = self.cache.page_size // self._kv_block
        offsets = torch.arange(blocks_per_page, device=self.cache.device)
        # The page table of each tile's sequence, in blocks: a block is a page or an equal part of one.
        table = (tiles.pages[:, :, None] * blocks_per_page + offsets).flatten(1)
        first_key = (tiles.page_positions[:, :, None] + offsets * self._kv_block).flatten(1)
        last_key = first_key + self._kv_block - 1
        first_query, last_query = tiles.positions[:, :1], tiles.positions.amax(dim=1, keepdim=True)
        visited, full = self.parts.classify_blocks(first_query, last_query, first_key, last_key, kind.window)
        owned = (tiles.page_positions >= 0).repeat_interleave(blocks_per_page, dim=1)
        visited, full = visited & owned, full & owned
        # The GPU's decode kernel divides a tile's keys among thread blocks by its number of partial blocks: all full
        # blocks would go to the last thread block. The CPU's kernel does not compile without full block indices.
        only_partial = self.cache.device.type == "cuda" and tiles.length == 1
        partial_count, partial = self._physical_indices(visited if only_partial else visited & ~full, table)
        full_count, full_blocks = (None, None) if only_partial else self._physical_indices(full, table)
        mask_mod = tiled_mask(self.parts.mask_mod(kind.window), tiles)
        num_queries = kind.group if tiles.length == 1 else tiles.length
        return BlockMask.from_kv_blocks(
            partial_count,
            partial,
            full_count,
            full_blocks,
            BLOCK_SIZE=(QUERY_BLOCK, self._kv_block),
            mask_mod=self.parts.physical_mask(mask_mod, tiles.first_keys, self.cache.page_size),
            seq_lengths=(num_queries, self._num_pages * self.cache.page_size),
            compute_q_blocks=False,
        )

    def _physical_indices(
        self, chosen: Bool[Tensor, "tiles n"], table: Int[Tensor, "tiles n"]
    ) -> tuple[Int32[Tensor, "tiles 1 1"], Int32[Tensor, "tiles 1 1 blocks"]]:
        """Return the number of chosen blocks of each tile, and their physical indices."""
        counts, blocks = list_blocks(chosen[:, None, None])
        return counts, self.parts.physical_blocks(blocks, table, self._num_blocks)


def tiled_mask(mask_mod: masks.MaskMod, tiles: QueryTiles) -> masks.MaskMod:
    """Turn a mask_mod that takes positions of queries into one that takes indices in a tile.

    Args:
        mask_mod: says which keys a query sees, by positions in one sequence.
        tiles: the tiles of the queries.
    """
    positions, tile_len = tiles.positions, tiles.length

    @no_type_check  # traced by the compiler, see masks.py
    def tiled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, positions[b, q_idx % tile_len], kv_idx)

    return tiled


def physical_score(score_mod: masks.ScoreMod, tiles: QueryTiles, page_size: int, group: int) -> masks.ScoreMod:
    """Turn a score_mod that takes positions into one that takes indices in a tile and slots of the cache.

    Args:
        score_mod: the score of a query at one position and a key at another.
        tiles: the tiles of the queries, with their pages.
        page_size: slots of a page.
        group: query heads for each KV head; in tiles of one token these heads are packed as queries.
    """
    positions, page_starts, tile_len = tiles.positions, tiles.first_keys, tiles.length
    heads_per_tile = group if tile_len == 1 else 1

    @no_type_check  # traced by the compiler, see masks.py
    def physical(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key_position = page_starts[b, kv_idx // page_size] + kv_idx % page_size
        head = h * heads_per_tile + q_idx % heads_per_tile
        return score_mod(score, b, head, positions[b, q_idx % tile_len], key_position)

    return physical


def cut_into_tiles(batch: StepBatch, sequences: range, tile_len: int, num_pages: int) -> QueryTiles:
    """Cut the new tokens of some consecutive sequences into tiles, without a loop over them.

    Args:
        batch: the step.
        sequences: which of its sequences, at least one.
        tile_len: slots of one tile, L.
        num_pages: pages of the cache.
    """
    device = batch.positions.device
    qo_indptr, page_indptr = batch.qo_indptr.numpy(), batch.kv_page_indptr.numpy()
    tiles_per_sequence = -(-np.diff(qo_indptr)[sequences.start : sequences.stop] // tile_len)
    own, index_in_sequence = members(tiles_per_sequence)
    num_filled = len(own)
    num_tiles = padded_tile_count(num_filled, on_gpu=device.type == "cuda")
    # Padding tiles are spread evenly: a CPU's threads take equal runs of tiles, so each thread gets equal work.
    filled_tile = np.arange(num_filled) * num_tiles // num_filled
    sequence = np.full(num_tiles, sequences.start)
    first_token = np.zeros(num_tiles, dtype=np.int64)
    num_tokens = np.zeros(num_tiles, dtype=np.int64)
    sequence[filled_tile] = sequences.start + own
    first_token[filled_tile] = qo_indptr[sequence[filled_tile]] + index_in_sequence * tile_len
    num_tokens[filled_tile] = np.minimum(tile_len, qo_indptr[sequence[filled_tile] + 1] - first_token[filled_tile])

    filled = np.arange(tile_len) < num_tokens[:, None]
    page_counts = np.diff(page_indptr)[sequence][:, None]
    column = np.arange(page_counts.max())
    page_index = np.minimum(column, page_counts - 1)
    moved = to_device(
        {
            "token_of_slot": np.where(filled, first_token[:, None] + np.arange(tile_len), 0),
            "filled": filled,
            "slot_of_token": np.flatnonzero(filled),
            "entry": page_indptr[sequence][:, None] + page_index,
            "page_index": page_index,
            "owned": column < page_counts,
        },
        device,
    )
    pages = batch.kv_page_indices[moved["entry"]].long()
    if batch.page_positions is None:
        page_positions = moved["page_index"] * batch.page_size
    else:
        page_positions = batch.page_positions[moved["entry"]]
    page_positions = torch.where(moved["owned"], page_positions, -1)
    return QueryTiles(
        tokens=slice(int(qo_indptr[sequences.start]), int(qo_indptr[sequences.stop])),
        token_of_slot=moved["token_of_slot"].flatten(),
        slot_of_token=moved["slot_of_token"],
        positions=torch.where(moved["filled"], batch.positions[moved["token_of_slot"]], -1),
        pages=pages,
        page_positions=page_positions,
        first_keys=first_keys(pages, page_positions, num_pages),
    )


def block_indices_key(batch: StepBatch, kv_block: int, windows: Sequence[int | None]) -> tuple[bytes, bytes]:
    """Return a key of the decodes' block indices: two steps with equal keys need the same block indices.

    The indices change with the pages, and when an end of the visible range enters a block or leaves one. The key is
    valid while every sequence has all its pages, because the host does not know positions after pages were evicted.

    Args:
        batch: the step.
        kv_block: keys in one block.
        windows: windows of the kinds of layers.
    """
    decodes = batch.num_decodes
    pages = batch.host_page_indices[: batch.kv_page_indptr[decodes]]
    # A block becomes visited when the query reaches its first key and full when it passes its last; a window ends each
    # of these in turn.
    ends = [0, 1] + [end for w in windows if w is not None for end in (-w, 1 - w - kv_block)]
    blocks = np.maximum((batch.kv_lens[:decodes, None].numpy() - 1 + np.array(ends)) // kv_block, -1)
    return blocks.tobytes(), pages.numpy().tobytes()


def padded_tile_count(count: int, on_gpu: bool) -> int:
    """Round a number of tiles up to one of a few sizes, because each size needs a compiled kernel of its own.

    A padding tile costs next to nothing on a CPU, where compiling takes seconds. On a GPU the number of tiles also
    decides how many thread blocks share the keys of one tile, so padding stays below a factor of two.
    """
    smallest, factor = (1, 2) if on_gpu else (32, 4)
    while smallest < count:
        smallest *= factor
    return smallest


def kv_block_size(page_size: int, on_gpu: bool) -> int:
    """Return the keys per block of the BlockMask: at most a page, so results do not depend on where pages are.

    Args:
        page_size: tokens of a page, of a size that the backend accepts (`BACKENDS`).
        on_gpu: whether the kernel runs on a GPU.
    """
    if on_gpu:
        return 128
    return page_size if page_size <= 64 else next(size for size in (64, 32, 16) if page_size % size == 0)


def unwritten_slots(batch: StepBatch, block_size: int) -> Int[Tensor, " n"] | None:
    """Return the slots after the last key of each block that this step starts to fill; None if there are none.

    The kernel reads the whole block. It gives those slots the weight 0, but 0 times NaN or infinity, which a previous
    owner of the page may have left there, is NaN. So the backend writes zeros, once for each block.

    Args:
        batch: the step.
        block_size: keys in one block; divides the page size.
    """
    kv_lens, page_indptr = batch.kv_lens.numpy(), batch.kv_page_indptr.numpy()
    in_block = (kv_lens - 1) % block_size + 1
    opened = in_block <= np.diff(batch.qo_indptr.numpy())
    num_slots = np.where(opened, block_size - in_block, 0)
    if not num_slots.any():
        return None
    owner, index = members(num_slots)
    moved = to_device(
        {
            "entry": page_indptr[owner + 1] - 1,
            "offset": batch.kv_last_page_len.numpy()[owner] + index,
        },
        batch.positions.device,
    )
    return batch.kv_page_indices[moved["entry"]].long() * batch.page_size + moved["offset"]


def _score_mod(kind: AttentionSpec, keys: Tensor) -> masks.ScoreMod | None:
    """Return the score_mod of one kind of layer, in terms of positions; None if scores are unchanged."""
    score_mods = [] if kind.softcap is None else [masks.soft_cap(kind.softcap)]
    if kind.alibi_slopes is not None:
        dtype = torch.promote_types(keys.dtype, torch.float32)
        score_mods.append(masks.alibi(torch.tensor(kind.alibi_slopes, dtype=dtype, device=keys.device)))
    return masks.compose_scores(*score_mods) if score_mods else None


def _check_compiler(on_gpu: bool) -> None:
    """Raise ConfigError if torch cannot compile FlexAttention on this machine."""
    if on_gpu:
        return
    if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        raise ConfigError("torch compiles FlexAttention for CPUs with AVX2 only; use attn_backend='torch' here")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"the flex backend compiles C++ and found no {compiler}; install it or use attn_backend='torch'"
        )
