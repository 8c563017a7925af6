"""The `cascade` backend: keys that several requests share are read once for all of them.

In a flat step each request reads all its pages, including those that it shares with others. Cascade attention computes
the attention of all sharers over their common pages in one call, the attention of each request over its remaining pages
in another, and merges the two states. With a tree of prefixes there are several such levels (Ye et al. 2024, "Cascade
Inference"; Ye et al. 2025, section 3.1.2; Juravsky et al. 2024, "Hydragen").

A `LevelPlanner` finds the levels of a step in the page table. It keeps the levels that save time according to
`CascadeCosts`, so a step without long common prefixes is flat: it has no levels. Explained in chapter 09.

The chunks before a request's prompt (chunk memory) are levels, too. Their keys were computed at other positions, so
queries are rotated before they attend to them. Explained in chapter 10.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from mini_engine.attention.backend import AttentionParts, KVCache
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import AttentionState
from mini_engine.attention.torch import SequencePlan, TorchBackend, keys_of_pages
from mini_engine.batch import PrefixLevel, StepBatch
from mini_engine.kv_cache.page_table import PageTable, Rows
from mini_engine.ragged import members
from mini_engine.request import Context, PinnedPages, PlacedChunk, Request
from mini_engine.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables
from mini_engine.transfer import to_device

# Longer than any prefix.
NO_END = np.iinfo(np.int64).max
# Pads the chunk lists of requests that have fewer chunks than others.
NO_CHUNK = PlacedChunk(PinnedPages(np.zeros(0, dtype=np.int32)), (), 0)


# --- what a level costs and saves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CascadeCosts:
    """Coefficients of the time that a level costs and saves in one layer.

    Every page is read from HBM once, with or without a level. A level saves the later reads, which a flat kernel serves
    mostly from the L2 cache. It costs one more launch of attention and one merge. The defaults describe one H200,
    bfloat16, 16 query and 8 KV heads of 128, kernels replayed from a CUDA graph. Experiment 07 fits them (`fit.py`).

    Attributes:
        reread_bandwidth: bytes per second when a kernel reads pages again.
        flops: FLOP per second of attention over shared pages.
        bandwidth: bytes per second of HBM, for the states that are merged.
        level_seconds: time of a level's attention and its merge in addition to their bytes and FLOPs.
    """

    reread_bandwidth: float = 10e12
    flops: float = 340e12
    bandwidth: float = 4.3e12
    level_seconds: float = 5e-6


H200_COSTS = CascadeCosts()


@dataclass(frozen=True)
class LevelCosts:
    """`CascadeCosts` applied to a kind of layer.

    Attributes:
        reread_seconds: time to read one page again.
        compute_seconds: time of one query's attention over one page.
        level_seconds: cost of a level without tokens.
        merge_seconds: cost of merging the states of one token.
    """

    reread_seconds: float
    compute_seconds: float
    level_seconds: float
    merge_seconds: float

    @classmethod
    def of(cls, costs: CascadeCosts, spec: AttentionSpec, cache: KVCache) -> "LevelCosts":
        """Apply the coefficients to a layer over a cache."""
        page_bytes = 2 * cache.page_size * spec.num_kv_heads * spec.head_dim * (spec.kv_dtype or cache.dtype).itemsize
        page_flops = 4 * cache.page_size * spec.num_qo_heads * spec.head_dim
        state_bytes = spec.num_qo_heads * spec.head_dim * cache.dtype.itemsize
        return cls(
            reread_seconds=page_bytes / costs.reread_bandwidth,
            compute_seconds=page_flops / costs.flops,
            level_seconds=costs.level_seconds,
            merge_seconds=3 * state_bytes / costs.bandwidth,  # two are read, one is written
        )

    def saving(self, num_tokens: Int64[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Seconds saved for each page that a request of `num_tokens` queries does not read again.

        The computation of the level is charged in full. With many queries, computing their attention over a page takes
        longer than reading the page again, so the level saves nothing.
        """
        return np.maximum(self.reread_seconds - self.compute_seconds * num_tokens, 0.0)

    def cost(self, num_tokens: int) -> float:
        """Seconds that one level adds to a step of `num_tokens` tokens."""
        return self.level_seconds + self.merge_seconds * num_tokens


# --- finding levels --------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A level that may be used.

    Attributes:
        joined: whether each request belongs to the group of the request before it.
        depth: number of pages of each request in this level and the levels outside it.
    """

    joined: Bool[np.ndarray, " B"]
    depth: Int64[np.ndarray, " B"]


def prefix_order(pages: Int32[np.ndarray, "B W"]) -> Int64[np.ndarray, " B"]:
    """Sort requests lexicographically by their pages, so that the sharers of any prefix become neighbors.

    The sort is stable and compares the pages as strings of bytes, in one call.

    Args:
        pages: the first W pages of each request.
    """
    strings = np.ascontiguousarray(pages).view(np.dtype((np.void, pages.shape[1] * pages.itemsize)))
    return np.argsort(strings.ravel(), kind="stable")


def common_prefixes(pages: Int32[np.ndarray, "B W"], limits: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
    """Count the pages that each request shares with the one before it: their longest common prefix.

    Args:
        pages: the first W pages of each request; entries beyond its limit may be anything.
        limits: [B] pages of each request that may be shared.
    """
    differs = pages[1:] != pages[:-1]
    first = differs.argmax(axis=1)  # 0 also where nothing differs
    first[(first == 0) & ~differs[:, 0]] = pages.shape[1]
    prefixes = np.zeros_like(limits)
    prefixes[1:] = np.minimum(first, np.minimum(limits[1:], limits[:-1]))
    return prefixes


def candidate_levels(
    prefixes: Int64[np.ndarray, " B"], saving: Float[np.ndarray, " B"], cost: float
) -> list[Candidate]:
    """Cut a prefix tree into levels, from the root down, such that each saves at least `cost`.

    A request joins the one before it if the two share at least `need` pages beyond the previous levels. The fewer
    requests join, the more pages each must share for the level to pay off. A group shares the pages that all its
    requests have in common.

    Args:
        prefixes: pages that each request shares with the one before it, in an order that makes sharers neighbors.
        saving: seconds saved for each page that a request does not read again.
        cost: seconds that a level costs.
    """
    depth = np.zeros_like(prefixes)
    levels: list[Candidate] = []
    while True:
        more = prefixes - depth
        joined, need = more > 0, 0
        while True:
            saved_per_page = float(saving @ joined)
            if saved_per_page == 0:
                return levels
            if math.ceil(cost / saved_per_page) <= need:
                break
            need = math.ceil(cost / saved_per_page)
            joined = more >= need
        first = ~joined
        shared = np.minimum.reduceat(np.where(joined, prefixes, NO_END), np.flatnonzero(first))[first.cumsum() - 1]
        depth = np.where(shared < NO_END, shared, depth)
        levels.append(Candidate(joined, depth))


def drop_redundant(levels: list[Candidate], saving: Float[np.ndarray, " B"], cost: float) -> list[Candidate]:
    """Drop levels that do not pay off, given the levels inside them.

    Without a level, its pages move into the groups of the next one, which read them once each. So a level saves only
    the reads of its groups beyond the first.

    Args:
        levels: candidates, outermost first; at least one.
        saving: see `candidate_levels`.
        cost: seconds that a level costs.
    """
    kept = levels[-1:]
    for i in reversed(range(len(levels) - 1)):
        level = levels[i]
        pages = level.depth - levels[i - 1].depth if i else level.depth
        if float(saving @ (pages * (level.joined & ~kept[0].joined))) >= cost:
            kept = [level, *kept]
    return kept


def find_levels(prefixes: Int64[np.ndarray, " B"], saving: Float[np.ndarray, " B"], cost: float) -> list[Candidate]:
    """Find the levels of a prefix tree that pay off, outermost first. See `candidate_levels` for the arguments.

    Groups nest: a request that joins the one before it in a level has joined it in all levels outside.
    """
    candidates = candidate_levels(prefixes, saving, cost)
    return drop_redundant(candidates, saving, cost) if candidates else []


Candidates = Sequence[tuple[Bool[np.ndarray, " B"], Int64[np.ndarray, " B"]]]
FindLevels = Callable[[Int64[np.ndarray, " B"], Float[np.ndarray, " B"], float], Candidates]


def plan_levels(
    pages: Int32[np.ndarray, "B W"],
    limits: Int64[np.ndarray, " B"],
    num_new: Int64[np.ndarray, " B"],
    page_size: int,
    costs: LevelCosts,
    find: FindLevels = find_levels,
) -> tuple[Int64[np.ndarray, " B"], tuple[PrefixLevel, ...]]:
    """Order the requests of a step and find the levels that pay off.

    Args:
        pages: the first pages of each request; entries beyond its limit may be anything.
        limits: [B] pages of each request that may be shared.
        num_new: [B] new tokens of each.
        page_size: keys per page.
        costs: what a level costs and saves.
        find: `find_levels`, or a reader's version of it.

    Returns:
        The index of each request in the new order, decodes first, and the levels, outermost first, on the host. The
        order is unchanged if no level pays off.
    """
    order = prefix_order(pages)
    order = order[np.argsort(num_new[order] > 1, kind="stable")]
    pages, limits, num_new = pages[order], limits[order], num_new[order]
    saving, cost = costs.saving(num_new), costs.cost(int(num_new.sum()))
    found = find(common_prefixes(pages, limits), saving, cost)
    if not found:
        return np.arange(len(order)), ()
    return order, build_levels(found, pages, np.append(0, num_new.cumsum()), page_size)


def build_levels(
    levels: Candidates,
    pages: Int32[np.ndarray, "B W"],
    first_token: Int64[np.ndarray, " B+1"],
    page_size: int,
) -> tuple[PrefixLevel, ...]:
    """Convert levels to CSR form, on the host.

    Args:
        levels: candidates, outermost first.
        pages: the first pages of each request.
        first_token: first token of each request, then the number of tokens.
        page_size: keys per page.
    """
    built = []
    before = np.zeros(len(pages), dtype=np.int64)
    for joined, reached in levels:
        alone = ~joined
        alone[:-1] &= ~joined[1:]
        depth = np.where(alone, before, reached)
        # Neighbors that share nothing in this level form one group without pages.
        begins = ~joined
        begins[1:] &= ~(alone[1:] & alone[:-1])
        rows = np.flatnonzero(begins)
        counts = (depth - before)[rows]
        indptr = _indptr(counts)
        index = _ranges(before[rows], counts)
        built.append(
            PrefixLevel(
                qo_indptr=_host(np.append(first_token[rows], first_token[-1])),
                kv_page_indptr=_host(indptr),
                kv_page_indices=_host(pages[np.repeat(rows, counts), index]),
                kv_last_page_len=_host(np.where(counts, page_size, 0)),
            )
        )
        before = depth
    return tuple(built)


class ChunkLevel(NamedTuple):
    """A level of chunks on the host: groups of neighboring requests, each with one chunk or none.

    Attributes:
        qo_indptr: [G+1] first token of each group, and the number of tokens.
        kv_page_indptr: [G+1] first entry of each group in `kv_page_indices`, and their number.
        kv_page_indices: [P] pages of the groups' chunks.
        kv_last_page_len: [G] keys in the last page of each group, 0 in a group without a chunk.
        query_offsets: [T] offset that is added to the position of each token's query.
    """

    qo_indptr: Int64[np.ndarray, " G+1"]
    kv_page_indptr: Int64[np.ndarray, " G+1"]
    kv_page_indices: Int32[np.ndarray, " P"]
    kv_last_page_len: Int64[np.ndarray, " G"]
    query_offsets: Int64[np.ndarray, " T"]


def chunk_levels(
    contexts: Sequence[Context], num_new: Int64[np.ndarray, " B"], page_size: int
) -> tuple[Int64[np.ndarray, " B"], list[ChunkLevel]]:
    """Order the requests of a step, and turn the chunks before their prompts into levels.

    The states of a request's chunks can be merged in any order. So each request's chunks are sorted by their pages, and
    level i holds the i-th chunk of each request. Requests with the same chunks then share them, even if the chunks are
    at different positions.

    Args:
        contexts: the chunks before the prompt of each request.
        num_new: new tokens of each.
        page_size: keys per page.

    Returns:
        The index of each request in the new order, decodes first, and the levels.
    """
    depth = max(map(len, contexts))
    chunks = [sorted(context, key=_first_page) + [NO_CHUNK] * (depth - len(context)) for context in contexts]
    first_pages = np.array([[_first_page(chunk) for chunk in own] for own in chunks])
    order = np.lexsort((*first_pages.T[::-1], num_new > 1))  # the last key sorts first
    chunks, first_pages, num_new = [chunks[b] for b in order.tolist()], first_pages[order], num_new[order]
    first_token = np.append(0, num_new.cumsum())
    levels = []
    for i in range(depth):
        starts = np.flatnonzero(np.append(True, np.diff(first_pages[:, i]) != 0))
        groups = [chunks[b][i] for b in starts.tolist()]
        lens = np.array([len(chunk.token_ids) for chunk in groups])
        levels.append(
            ChunkLevel(
                qo_indptr=first_token[np.append(starts, len(order))],
                kv_page_indptr=_indptr(-(-lens // page_size)),
                kv_page_indices=np.concatenate([chunk.pinned.pages for chunk in groups]),
                kv_last_page_len=np.where(lens, (lens - 1) % page_size + 1, 0),
                query_offsets=np.repeat([own[i].query_offset for own in chunks], num_new),
            )
        )
    return order, levels


ChunkLevels = Callable[
    [Sequence[Context], Int64[np.ndarray, " B"], int], tuple[Int64[np.ndarray, " B"], Sequence[ChunkLevel]]
]


def context_levels(
    contexts: Sequence[Context],
    num_new: Int64[np.ndarray, " B"],
    page_size: int,
    device: torch.device,
    find: ChunkLevels = chunk_levels,
) -> tuple[Int64[np.ndarray, " B"], tuple[PrefixLevel, ...]]:
    """Order the requests of a step, and upload the levels of the chunks before their prompts.

    Args:
        contexts: the chunks before the prompt of each request.
        num_new: [B] new tokens of each.
        page_size: keys per page.
        device: where the backend needs the pages and the query offsets.
        find: `chunk_levels`, or a reader's version of it.

    Returns:
        The index of each request in the new order, decodes first, and the levels.
    """
    order, found = find(contexts, num_new, page_size)
    levels = [PrefixLevel(**{name: _host(array) for name, array in level._asdict().items()}) for level in found]
    return order, upload(levels, device)


def upload(levels: Sequence[PrefixLevel], device: torch.device) -> tuple[PrefixLevel, ...]:
    """Move the pages and the query offsets of levels to a device, in one copy."""
    arrays = {f"pages {i}": level.kv_page_indices.numpy() for i, level in enumerate(levels)}
    for i, level in enumerate(levels):
        if level.query_offsets is not None:
            arrays[f"offsets {i}"] = level.query_offsets.numpy()
    moved = to_device(arrays, device)
    return tuple(
        replace(level, kv_page_indices=moved[f"pages {i}"], query_offsets=moved.get(f"offsets {i}"))
        for i, level in enumerate(levels)
    )


def _first_page(chunk: PlacedChunk) -> int:
    """The first page of a chunk, which no other chunk has."""
    return int(chunk.pinned.pages[0]) if len(chunk.token_ids) else -1


class LevelPlanner:
    """Orders the requests of a step, and finds the levels of their common prefixes.

    In a step with chunks, only the chunks are levels; common prefixes are not.

    Only pages whose keys come before the first query of every sharer are shared, so a level needs no causal mask. The
    levels are kept for as long as the same requests decode.

    Args:
        costs: what a level costs and saves.
        page_size: keys per page.
        device: where the backend needs the levels' pages.
        find: `find_levels`, or a reader's version of it.
        find_chunks: `chunk_levels`, or a reader's version of it.
    """

    def __init__(
        self,
        costs: LevelCosts,
        page_size: int,
        device: torch.device,
        find: FindLevels = find_levels,
        find_chunks: ChunkLevels = chunk_levels,
    ) -> None:
        self._costs, self._page_size, self._device = costs, page_size, device
        self._find, self._find_chunks = find, find_chunks
        # The last plan, the admissions that it is for, and the pages of its levels with their generations.
        self._order = self._admissions = self._pages = self._generations = np.zeros(0, dtype=np.int64)
        self._levels: tuple[PrefixLevel, ...] = ()

    def arrange(
        self,
        page_table: PageTable,
        rows: Rows,
        num_new: Int64[np.ndarray, " B"],
        num_computed: Int64[np.ndarray, " B"],
        admissions: Int64[np.ndarray, " B"],
        requests: Sequence[Request | None] = (),
    ) -> tuple[Int64[np.ndarray, " B"], tuple[PrefixLevel, ...]]:
        """Choose the order of a step's requests and its levels.

        Args:
            page_table: the pages.
            rows: row of each request; decodes come first.
            num_new: new tokens of each.
            num_computed: tokens of each whose keys are in the cache.
            admissions: number of the admission that filled each row.
            requests: request of each row, whose context is the chunks before its prompt; empty if no request has any.

        Returns:
            For each request of the step its index in `rows`, decodes first, and the levels, outermost first. The order
            is unchanged if no level pays off.
        """
        decodes_only = np.count_nonzero(num_new > 1) == 0
        if not (decodes_only and self._still_holds(page_table, admissions)):
            own = [requests[row].context for row in rows.tolist()] if requests else []
            if any(own):
                self._order, self._levels = context_levels(
                    own, num_new, self._page_size, self._device, self._find_chunks
                )
                self._pages = self._generations = self._order[:0]  # pinned pages do not change
            else:
                self._plan(page_table, rows, num_new, num_computed // self._page_size)
            self._admissions = admissions if decodes_only else admissions[:0]
        return self._order, self._levels

    def forget(self) -> None:
        """Drop the last plan: after an interruption, admissions and generations are counted from the start again."""
        self._admissions = self._admissions[:0]

    def _still_holds(self, page_table: PageTable, admissions: Int64[np.ndarray, " B"]) -> bool:
        """Return whether the same requests decode as in the last step and the levels' pages hold the same keys."""
        return np.array_equal(admissions, self._admissions) and np.array_equal(
            page_table.generation[self._pages], self._generations
        )

    def _plan(
        self, page_table: PageTable, rows: Rows, num_new: Int64[np.ndarray, " B"], limits: Int64[np.ndarray, " B"]
    ) -> None:
        self._order, levels = np.arange(len(rows)), tuple[PrefixLevel, ...]()
        first_pages = np.sort(page_table.table[rows, 0])
        if np.count_nonzero(first_pages[1:] == first_pages[:-1]):
            longest = int(np.partition(limits, -2)[-2])  # no two requests share more
            if longest:
                pages = page_table.table[rows, :longest]
                self._order, levels = plan_levels(pages, limits, num_new, self._page_size, self._costs, self._find)
        self._pages = np.concatenate([self._order[:0], *(level.kv_page_indices.numpy() for level in levels)])
        self._generations = page_table.generation[self._pages]
        self._levels = upload(levels, self._device) if levels else ()


# --- attention over levels -------------------------------------------------------------------------------------------


def shared_pages(level: PrefixLevel, first_token: Int32[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
    """Count the pages of each request that a level holds.

    Args:
        level: a level of a step.
        first_token: [B] first token of each request.
    """
    group = np.searchsorted(level.qo_indptr.numpy(), first_token, side="right") - 1
    return np.diff(level.kv_page_indptr.numpy(), append=level.kv_page_indptr[-1]).astype(np.int64)[group]


def usable_levels(batch: StepBatch) -> tuple[PrefixLevel, ...]:
    """Return the levels of a step, or none if they are prefixes and requests have lost pages."""
    of_chunks = all(level.query_offsets is not None for level in batch.levels)
    return batch.levels if of_chunks or batch.page_positions is None else ()


def own_pages(batch: StepBatch) -> StepBatch:
    """Return the last level: the same step, with only the pages of each request that no earlier level covers."""
    if all(level.query_offsets is not None for level in batch.levels):  # chunks have their own pages
        return batch
    shared = np.zeros(batch.num_sequences, dtype=np.int64)
    for level in batch.levels:
        shared += shared_pages(level, batch.qo_indptr.numpy()[:-1])
    indptr = batch.kv_page_indptr.numpy()
    counts = np.diff(indptr) - shared
    index = _ranges(shared, counts)
    host_pages = batch.host_page_indices.numpy()[index + np.repeat(indptr[:-1], counts)]
    moved = to_device({"pages": host_pages, "positions": index * batch.page_size}, batch.kv_page_indices.device)
    return replace(
        batch,
        levels=(),
        kv_lens=batch.kv_lens - _host(shared * batch.page_size),
        kv_page_indptr=_host(_indptr(counts)),
        kv_page_indices=moved["pages"],
        host_page_indices=torch.from_numpy(host_pages),
        page_positions=moved["positions"],
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
    level_costs = LevelCosts.of(costs, able[0], cache)
    return LevelPlanner(level_costs, cache.page_size, cache.device, parts.find_levels, parts.chunk_levels)


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

    Layers with a window and steps with requests that have lost pages are flat; neither can be combined with chunks.

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
        levels = usable_levels(batch)
        if not levels:
            return
        self._rotated.plan(levels)
        before = np.zeros(batch.num_sequences, dtype=np.int64)
        for level in levels:
            self._levels.append(_plan_groups(batch, level, before))
            before += shared_pages(level, batch.qo_indptr.numpy()[:-1])
        self._own = self._plan_sequences(own_pages(batch), range(batch.num_sequences))

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        spec = self.specs[layer]
        if spec.window is not None or not self._levels:
            return super().run(layer, q)
        states = [self._attend_to_level(spec, level, self._rotated(spec, i, q)) for i, level in enumerate(self._levels)]
        states.append(self._attend_to_level(spec, self._own, q))
        return functools.reduce(self.parts.merge_states, states).out.to(q.dtype)

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
    first_request = np.searchsorted(batch.qo_indptr.numpy(), level.qo_indptr.numpy()[:-1])
    starts = (before[first_request] * batch.page_size).tolist()
    plans = []
    for g, last_page_len in enumerate(level.kv_last_page_len.tolist()):
        tokens, entries = slice(*first_token[g : g + 2]), slice(*first_page[g : g + 2])
        if entries.stop == entries.start:
            continue
        num_keys = (entries.stop - entries.start - 1) * batch.page_size + last_page_len
        key_positions = torch.arange(starts[g], starts[g] + num_keys, device=batch.positions.device)
        slots = keys_of_pages(level.kv_page_indices[entries].long() * batch.page_size, batch.page_size, num_keys)
        plans.append(SequencePlan(tokens, slots, batch.positions[tokens], key_positions, {None: None}))
    return plans


def _ranges(starts: Int64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " sum"]:
    """Concatenate the ranges that begin at `starts` and have `counts` numbers each."""
    group, index = members(counts)
    return starts[group] + index


def _indptr(counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n+1"]:
    return np.append(0, counts.cumsum())


def _host(array: np.ndarray) -> Int32[Tensor, " n"]:
    return torch.from_numpy(array.astype(np.int32))
