"""The `flex` backend: FlexAttention straight on the paged KV cache.

FlexAttention (Dong et al. 2024) compiles one kernel from a mask and a change of scores, and visits only the blocks of
keys that a `BlockMask` lists. Here these are physical blocks: the whole cache of a layer is one long row of keys, and
the list of a query names the blocks that hold its own sequence, wherever they lie. Nothing is gathered.

The queries of a step are cut into tiles, each of one sequence, so that a tile visits the pages of that sequence alone.
A decode is a tile of one token, with the query heads of a group as its rows: each key is read once for all of them.

Compiled kernels know their shapes. Only two of them change from step to step, the number of tiles of decodes and of
prompts, and both are rounded up: no kernel is compiled because sequences grow, pages move or requests come and go.
Explained in chapters 05 and 06.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, no_type_check

import numpy as np
import torch
import torch._dynamo.config
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mini_engine.attention import masks
from mini_engine.attention.backend import KVCache
from mini_engine.attention.block_mask import list_blocks
from mini_engine.batch import AttentionSpec, StepBatch, to_device
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.physical import first_keys
from mini_engine.parts import Parts

QUERY_BLOCK = 128  # rows of a BlockMask's query block: no tile has more
# torch allows 8 kernels for one function. Kinds of layers times numbers of tiles, over a whole process, are more.
MOST_KERNELS = 256


class Kind(NamedTuple):
    """What distinguishes the attention of two layers for a kernel: layers of one kind share mask and kernel."""

    window: int | None
    softcap: float | None
    alibi_slopes: tuple[float, ...] | None
    group: int  # query heads for each key head

    @classmethod
    def of(cls, spec: AttentionSpec) -> "Kind":
        return cls(spec.window, spec.softcap, spec.alibi_slopes, spec.num_qo_heads // spec.num_kv_heads)


@dataclass(frozen=True)
class QueryTiles:
    """Some of a step's queries, cut into tiles of up to L tokens of one sequence, and the pages of each tile.

    The number of tiles is rounded up; the spare ones hold no query and see no key.

    Attributes:
        tokens: the rows of the step that are in these tiles.
        rows: [R], R = tiles * L: which row of the step stands at each place; any row where none does.
        places: [n] place of each token of `tokens`: undoes `rows`.
        positions: [tiles, L] position of the query at each place, -1 where there is none. Overwritten by steps that
            need no other tiles: a mask reads it when its kernel runs.
        pages: [tiles, W] pages of the tile's sequence; its last one repeated up to the longest sequence's number.
        page_starts: [tiles, W] position of each page's first key; -1 for a repeated page.
        starts: [tiles, pages of the cache] the same by page: position of its first key if the page belongs to the
            tile's sequence, otherwise -1. A page that sequences share has a start in the tiles of each.
    """

    tokens: slice
    rows: Int[Tensor, " R"]
    places: Int[Tensor, " n"]
    positions: Int[Tensor, "tiles L"]
    pages: Int[Tensor, "tiles W"]
    page_starts: Int[Tensor, "tiles W"]
    starts: Int32[Tensor, "tiles pages"]

    @property
    def length(self) -> int:
        """Tokens that a tile has room for, L."""
        return self.positions.shape[1]


# Tiles, and for each kind of layer what the kernel is told about them.
Planned = tuple[QueryTiles, dict[Kind, tuple[BlockMask, masks.ScoreMod | None]]]


class FlexBackend:
    """FlexAttention over the paged cache, on a CPU or a GPU, with every feature of AttentionSpec.

    A kernel is compiled at its first use, which takes seconds, and kept on disk by torch for the next process. Masking,
    softmax and the sum over keys are one kernel, so two parts are bypassed: `masked_attention` and `merge_states`.

    Args:
        specs: one for each layer of the model.
        cache: where keys and values are kept, in layout NHD.
        parts: the engine's replaceable parts.
        compiled: False computes everything in plain PyTorch, slowly: for tests. float64, which the compiled kernels do
            not have, is always computed so.

    Raises:
        ConfigError: if pages, head sizes or the machine do not suit the kernel.
    """

    bypasses: ClassVar[frozenset[str]] = frozenset({"masked_attention", "merge_states"})

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: Parts, compiled: bool = True) -> None:
        keys = cache.layers[0][0]
        self._device = keys.device
        on_gpu = self._device.type == "cuda"
        self._page_size = cache.page_size
        self._num_pages = keys.shape[0]
        self._kv_block = kv_block_size(cache.page_size, on_gpu)
        self._tile_len = 128 if on_gpu else 32  # on a CPU short tiles waste less of the diagonal (measured)
        self._layers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in cache.layers]
        self._parts = parts
        self._score_mods = {kind: _score_mod(kind, keys) for kind in {Kind.of(spec) for spec in specs}}
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, MOST_KERNELS)
        self._attention: Callable = flex_attention
        if compiled and keys.dtype != torch.float64:
            _check_machine(on_gpu, min(spec.head_dim for spec in specs))
            self._attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        else:
            for _, values in cache.layers:
                values.zero_()  # plain PyTorch multiplies every slot of the cache by its weight, 0 or not
        self._num_blocks = self._num_pages * (self._page_size // self._kv_block)
        self._decodes: Planned | None = None
        self._decodes_see: tuple[bytes, bytes] | None = None
        # On a CPU torch would split the keys of a decode by their place in the cache and look for them in every part.
        self._kernel_options = None if on_gpu else {"PARTITION_SIZE": self._num_pages * self._page_size}

    def plan(self, batch: StepBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        self._unwritten = unwritten_slots(batch, self._kv_block)
        first_prompt, end = batch.num_decodes, batch.num_sequences
        self._planned = [self._plan_decodes(batch)] if first_prompt else []
        if first_prompt < end:
            self._planned.append(self._plan(batch, range(first_prompt, end), self._tile_len))

    def _plan_decodes(self, batch: StepBatch) -> Planned:
        """The tiles and masks of the last step as long as they list the right blocks, with the new positions."""
        see = None
        if batch.page_positions is None:
            see = blocks_in_sight(batch, self._kv_block, [kind.window for kind in self._score_mods])
        if self._decodes is None or see is None or see != self._decodes_see:
            self._decodes, self._decodes_see = self._plan(batch, range(batch.num_decodes), 1), see
        tiles, _ = self._decodes
        tiles.positions.view(-1).index_copy_(0, tiles.places, batch.positions[tiles.tokens])
        return self._decodes

    def _plan(self, batch: StepBatch, sequences: range, tile_len: int) -> Planned:
        tiles = cut_into_tiles(batch, sequences, tile_len, self._num_pages)
        return tiles, {kind: (self.block_mask(tiles, kind), self.score_mod(tiles, kind)) for kind in self._score_mods}

    def append(self, spec: AttentionSpec, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        k_cache, v_cache = self._layers[spec.kv_layer]
        self._parts.append_kv(k_cache, v_cache, k, v, self._slot_mapping)
        if self._unwritten is not None:
            v_cache.index_fill_(0, self._unwritten, 0)

    def run(self, spec: AttentionSpec, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        kind = Kind.of(spec)
        k, v = (x.transpose(0, 1)[None] for x in self._layers[spec.kv_layer])
        out = torch.empty_like(q)
        for tiles, mods in self._planned:
            block_mask, score_mod = mods[kind]
            queries = q[tiles.rows].unflatten(0, (-1, tiles.length))
            # A decode's heads become the rows of their key head; a longer tile has rows enough.
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
            out[tiles.tokens] = result.reshape(-1, *q.shape[1:])[tiles.places]
        return out

    def block_mask(self, tiles: QueryTiles, kind: Kind) -> BlockMask:
        """The physical BlockMask of one kind of layer: row b lists the blocks of the cache that tile b visits."""
        blocks_per_page = self._page_size // self._kv_block
        offsets = torch.arange(blocks_per_page, device=self._device)
        # The table of each tile's sequence in blocks: a block is a page, or an equal part of one.
        table = (tiles.pages[:, :, None] * blocks_per_page + offsets).flatten(1)
        first_key = (tiles.page_starts[:, :, None] + offsets * self._kv_block).flatten(1)
        last_key = first_key + self._kv_block - 1
        first_query, last_query = tiles.positions[:, :1], tiles.positions.amax(dim=1, keepdim=True)
        visited, full = self._parts.classify_blocks(first_query, last_query, first_key, last_key, kind.window)
        owned = (tiles.page_starts >= 0).repeat_interleave(blocks_per_page, dim=1)
        visited, full = visited & owned, full & owned
        # The GPU's decode kernel shares a row's keys among thread blocks by its number of partial blocks: full ones
        # would all fall to the last thread block. The CPU's kernel must have the list of full blocks to compile.
        only_partial = self._device.type == "cuda" and tiles.length == 1
        partial_count, partial = self._physical_list(visited if only_partial else visited & ~full, table)
        full_count, full_blocks = (None, None) if only_partial else self._physical_list(full, table)
        mask_mod = in_tiles(self._parts.mask_mod(kind.window), tiles)
        rows = kind.group if tiles.length == 1 else tiles.length
        return BlockMask.from_kv_blocks(
            partial_count,
            partial,
            full_count,
            full_blocks,
            BLOCK_SIZE=(QUERY_BLOCK, self._kv_block),
            mask_mod=self._parts.physical_mask(mask_mod, tiles.starts, self._page_size),
            seq_lengths=(rows, self._num_pages * self._page_size),
            compute_q_blocks=False,
        )

    def _physical_list(
        self, chosen: Bool[Tensor, "tiles n"], table: Int[Tensor, "tiles n"]
    ) -> tuple[Int32[Tensor, "tiles 1 1"], Int32[Tensor, "tiles 1 1 blocks"]]:
        """How many blocks of each tile are chosen, and where in the cache they lie."""
        counts, blocks = list_blocks(chosen[:, None, None])
        return counts, self._parts.physical_blocks(blocks, table, self._num_blocks)

    def score_mod(self, tiles: QueryTiles, kind: Kind) -> masks.ScoreMod | None:
        """What changes the scores of one kind of layer, over rows of tiles and slots; None if nothing does."""
        score_mod = self._score_mods[kind]
        if score_mod is None:
            return None
        return physical_score(score_mod, tiles, self._page_size, kind.group)


def in_tiles(mask_mod: masks.MaskMod, tiles: QueryTiles) -> masks.MaskMod:
    """A mask_mod over positions of queries and keys, as one over rows of tiles and positions of keys.

    Args:
        mask_mod: what a query at one position sees of a key at another.
        tiles: where the queries are.
    """
    positions, tile_len = tiles.positions, tiles.length

    @no_type_check  # traced by the compiler, see masks.py
    def tiled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, positions[b, q_idx % tile_len], kv_idx)

    return tiled


def physical_score(score_mod: masks.ScoreMod, tiles: QueryTiles, page_size: int, group: int) -> masks.ScoreMod:
    """A score_mod over positions in one sequence, as one over rows of tiles and slots of the cache.

    Args:
        score_mod: the score of a query at one position and a key at another.
        tiles: where the queries and their pages are.
        page_size: slots of a page.
        group: query heads for each key head; in tiles of one token they are the rows.
    """
    positions, starts, tile_len = tiles.positions, tiles.starts, tiles.length
    rows = group if tile_len == 1 else 1

    @no_type_check  # traced by the compiler, see masks.py
    def physical(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key_position = starts[b, kv_idx // page_size] + kv_idx % page_size
        return score_mod(score, b, h * rows + q_idx % rows, positions[b, q_idx % tile_len], key_position)

    return physical


def cut_into_tiles(batch: StepBatch, sequences: range, tile_len: int, num_pages: int) -> QueryTiles:
    """Cut the new tokens of some neighbouring sequences into tiles, without a loop over them.

    Args:
        batch: the step.
        sequences: which of its sequences, at least one.
        tile_len: tokens of one tile, L.
        num_pages: pages of the cache.
    """
    device = batch.positions.device
    qo_indptr, page_indptr = batch.qo_indptr.numpy(), batch.kv_page_indptr.numpy()
    chosen = slice(sequences.start, sequences.stop)
    tiles_of = -(-np.diff(qo_indptr)[chosen] // tile_len)
    used = int(tiles_of.sum())
    num_tiles = round_up(used, on_gpu=device.type == "cuda")
    # Spare tiles stand between the others: a CPU's threads take equal runs of tiles, and so get equal work.
    place = np.arange(used) * num_tiles // used
    owner = np.full(num_tiles, sequences.start)
    row = np.zeros(num_tiles, dtype=np.int64)
    count = np.zeros(num_tiles, dtype=np.int64)
    owner[place] = np.repeat(np.arange(sequences.start, sequences.stop), tiles_of)
    index = np.arange(used) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    row[place] = qo_indptr[owner[place]] + index * tile_len
    count[place] = np.minimum(tile_len, qo_indptr[owner[place] + 1] - row[place])

    filled = np.arange(tile_len) < count[:, None]
    num_owned = np.diff(page_indptr)[owner]
    column = np.arange(num_owned.max())
    repeated = np.minimum(column, num_owned[:, None] - 1)
    moved = to_device(
        {
            "rows": np.where(filled, row[:, None] + np.arange(tile_len), 0),
            "filled": filled,
            "places": np.flatnonzero(filled),
            "entry": page_indptr[owner][:, None] + repeated,
            "index": repeated,
            "owned": column < num_owned[:, None],
        },
        device,
    )
    pages = batch.kv_page_indices[moved["entry"]].long()
    page_positions = batch.page_positions
    starts = moved["index"] * batch.page_size if page_positions is None else page_positions[moved["entry"]]
    page_starts = torch.where(moved["owned"], starts, -1)
    return QueryTiles(
        tokens=slice(int(qo_indptr[sequences.start]), int(qo_indptr[sequences.stop])),
        rows=moved["rows"].flatten(),
        places=moved["places"],
        positions=torch.where(moved["filled"], batch.positions[moved["rows"]], -1),
        pages=pages,
        page_starts=page_starts,
        starts=first_keys(pages, page_starts, num_pages),
    )


def blocks_in_sight(batch: StepBatch, kv_block: int, windows: Sequence[int | None]) -> tuple[bytes, bytes]:
    """What the block lists of a step's decodes depend on: two steps that need the same lists have the same bytes.

    A list changes with the pages, and when an end of what the query sees comes into a block or leaves one. Holds as
    long as the sequences have all their pages: where some were given up, the host does not know positions.

    Args:
        batch: the step.
        kv_block: keys in one block.
        windows: of the kinds of layers.
    """
    decodes = batch.num_decodes
    pages = batch.host_page_indices[: batch.kv_page_indptr[decodes]]
    # From its first key on a block is visited, from its last one on it is full; a window ends the one and the other.
    ends = [0, 1] + [end for w in windows if w is not None for end in (-w, 1 - w - kv_block)]
    blocks = np.maximum((batch.kv_lens[:decodes, None].numpy() - 1 + np.array(ends)) // kv_block, -1)
    return blocks.tobytes(), pages.numpy().tobytes()


def round_up(count: int, on_gpu: bool) -> int:
    """Tiles to compute for so many that are filled: few distinct numbers, as each means another compiled kernel.

    A spare tile costs next to nothing on a CPU, where compiling takes seconds. On a GPU the number of tiles also
    decides how many thread blocks share the keys of one tile, so it stays close to the truth.
    """
    smallest, factor = (1, 2) if on_gpu else (32, 4)
    while smallest < count:
        smallest *= factor
    return smallest


def kv_block_size(page_size: int, on_gpu: bool) -> int:
    """Keys in one block of the BlockMask: never more than a page, so that results do not depend on where pages lie.

    Raises:
        ConfigError: if no block fits the page.
    """
    if on_gpu:
        if page_size % 128:
            raise ConfigError(
                f"the flex backend needs pages of 128 tokens, or a multiple, on a GPU; page_size is {page_size}. "
                "Set page_size=128 or use attn_backend='torch'"
            )
        return 128
    if page_size <= 64:
        return page_size
    if page_size % 16:
        raise ConfigError(
            f"the flex backend needs pages of up to 64 tokens or a multiple of 16; page_size is {page_size}. "
            "Set page_size=16 or use attn_backend='torch'"
        )
    return next(size for size in (64, 32, 16) if page_size % size == 0)


def unwritten_slots(batch: StepBatch, block_size: int) -> Int[Tensor, " n"] | None:
    """Slots behind the last key of each block that this step opens; None if there are none.

    The kernel reads the whole block. It gives those slots the weight 0, but 0 times what an earlier owner or nobody
    left there is NaN if that was NaN or infinite. So the backend writes zeros, once for each block.

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
    owner = np.repeat(np.arange(len(kv_lens)), num_slots)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(num_slots) - num_slots, num_slots)
    moved = to_device(
        {
            "entry": page_indptr[owner + 1] - 1,
            "offset": batch.kv_last_page_len.numpy()[owner] + index,
        },
        batch.positions.device,
    )
    return batch.kv_page_indices[moved["entry"]].long() * batch.page_size + moved["offset"]


def _score_mod(kind: Kind, keys: Tensor) -> masks.ScoreMod | None:
    """What changes the scores of one kind of layer, over positions; None if nothing does."""
    score_mods = [] if kind.softcap is None else [masks.soft_cap(kind.softcap)]
    if kind.alibi_slopes is not None:
        dtype = torch.promote_types(keys.dtype, torch.float32)
        score_mods.append(masks.alibi(torch.tensor(kind.alibi_slopes, dtype=dtype, device=keys.device)))
    return masks.compose_scores(*score_mods) if score_mods else None


def _check_machine(on_gpu: bool, head_dim: int) -> None:
    if on_gpu and head_dim < 16:
        raise ConfigError(f"the flex backend needs heads of 16 or more on a GPU, not {head_dim}: use 'torch'")
    if on_gpu:
        return
    if sys.platform == "darwin" or not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        raise ConfigError("torch compiles FlexAttention for CPUs with AVX2 only: use attn_backend='torch' here")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"the flex backend compiles C++ and found no {compiler}: install it or use attn_backend='torch'"
        )
