"""The levels of a step: keys that several requests share, found in the page table, and the chunks before prompts.

A `LevelPlanner` finds the levels of a step in the page table. It keeps the levels that save time according to
`CascadeCosts`, so a step without long common prefixes is flat: it has no levels. The chunks before a request's prompt
(chunk memory) are levels, too. Everything here runs on the host, in numpy. Explained in chapters 09 and 10; the
attention over levels is in `cascade.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32, Int64

from mini_engine.attention.spec import AttentionSpec
from mini_engine.kv_cache.page_table import PageTable, Rows
from mini_engine.ragged import members
from mini_engine.request import Context, PinnedPages, PlacedChunk

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
    def of(cls, costs: CascadeCosts, spec: AttentionSpec, page_size: int, dtype: torch.dtype) -> "LevelCosts":
        """Apply the coefficients to a layer over a cache of this page size and dtype."""
        page_bytes = page_size * spec.entry_size * (spec.kv_dtype or dtype).itemsize
        page_flops = 4 * page_size * spec.num_qo_heads * spec.head_dim
        state_bytes = spec.num_qo_heads * spec.head_dim * dtype.itemsize
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


class Level(NamedTuple):
    """A level on the host: groups of neighboring requests, whose pages every query of the group attends to.

    Attributes:
        qo_indptr: [G+1] first token of each group, and the number of tokens.
        kv_page_indptr: [G+1] first entry of each group in `kv_page_indices`, and their number.
        kv_page_indices: [P] pages of the groups.
        kv_last_page_len: [G] keys in the last page of each group, 0 in a group without pages.
        query_offsets: [T] offset that is added to the position of each token's query; None if the pages belong to the
            requests.
    """

    qo_indptr: Int[np.ndarray, " G+1"]
    kv_page_indptr: Int[np.ndarray, " G+1"]
    kv_page_indices: Int[np.ndarray, " P"]
    kv_last_page_len: Int[np.ndarray, " G"]
    query_offsets: Int[np.ndarray, " T"] | None = None


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
) -> tuple[Int64[np.ndarray, " B"], tuple[Level, ...]]:
    """Order the requests of a step and find the levels that pay off.

    Args:
        pages: the first pages of each request; entries beyond its limit may be anything.
        limits: [B] pages of each request that may be shared.
        num_new: [B] new tokens of each.
        page_size: keys per page.
        costs: what a level costs and saves.
        find: `find_levels`, or a reader's version of it.

    Returns:
        The index of each request in the new order, decodes first, and the levels, outermost first. The
        order is unchanged if no level pays off.
    """
    order = prefix_order(pages)
    order = order[np.argsort(num_new[order] > 1, kind="stable")]
    levels = prefix_levels(pages[order], limits[order], num_new[order], page_size, costs, find)
    return (order, levels) if levels else (np.arange(len(order)), ())


def prefix_levels(
    pages: Int32[np.ndarray, "B W"],
    limits: Int64[np.ndarray, " B"],
    num_new: Int64[np.ndarray, " B"],
    page_size: int,
    costs: LevelCosts,
    find: FindLevels = find_levels,
) -> tuple[Level, ...]:
    """Find the levels that pay off for requests in an order that makes sharers neighbors; see `plan_levels`."""
    saving, cost = costs.saving(num_new), costs.cost(int(num_new.sum()))
    found = find(common_prefixes(pages, limits), saving, cost)
    return build_levels(found, pages, np.append(0, num_new.cumsum()), page_size) if found else ()


def build_levels(
    levels: Candidates,
    pages: Int32[np.ndarray, "B W"],
    first_token: Int64[np.ndarray, " B+1"],
    page_size: int,
) -> tuple[Level, ...]:
    """Convert levels to CSR form.

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
        indptr = indptr_of(counts)
        index = ranges(before[rows], counts)
        built.append(
            Level(
                qo_indptr=np.append(first_token[rows], first_token[-1]),
                kv_page_indptr=indptr,
                kv_page_indices=pages[np.repeat(rows, counts), index],
                kv_last_page_len=np.where(counts, page_size, 0),
            )
        )
        before = depth
    return tuple(built)


def chunk_levels(
    contexts: Sequence[Context], num_new: Int64[np.ndarray, " B"], page_size: int
) -> tuple[Int64[np.ndarray, " B"], list[Level]]:
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
            Level(
                qo_indptr=first_token[np.append(starts, len(order))],
                kv_page_indptr=indptr_of(-(-lens // page_size)),
                kv_page_indices=np.concatenate([chunk.pinned.pages for chunk in groups]),
                kv_last_page_len=np.where(lens, (lens - 1) % page_size + 1, 0),
                query_offsets=np.repeat([own[i].query_offset for own in chunks], num_new),
            )
        )
    return order, levels


ChunkLevels = Callable[
    [Sequence[Context], Int64[np.ndarray, " B"], int], tuple[Int64[np.ndarray, " B"], Sequence[Level]]
]


def _first_page(chunk: PlacedChunk) -> int:
    """The first page of a chunk, which no other chunk has."""
    return int(chunk.pinned.pages[0]) if len(chunk.token_ids) else -1


class LevelPlanner:
    """Orders the requests of a step, and finds its levels: the chunks before prompts, and common prefixes.

    Only pages whose keys come before the first query of every sharer are shared, so a level needs no causal mask. The
    levels are kept for as long as the same requests decode.

    Args:
        costs: what a level costs and saves.
        page_size: keys per page.
        find: `find_levels`, or a reader's version of it.
        find_chunks: `chunk_levels`, or a reader's version of it.
    """

    def __init__(
        self,
        costs: LevelCosts,
        page_size: int,
        find: FindLevels = find_levels,
        find_chunks: ChunkLevels = chunk_levels,
    ) -> None:
        self._costs, self._page_size = costs, page_size
        self._find, self._find_chunks = find, find_chunks
        # The last plan, the admissions that it is for, and the pages of its levels with their generations.
        self._order = self._admissions = self._pages = self._generations = np.zeros(0, dtype=np.int64)
        self._levels: tuple[Level, ...] = ()

    def arrange(
        self,
        page_table: PageTable,
        rows: Rows,
        num_new: Int64[np.ndarray, " B"],
        num_keys: Int64[np.ndarray, " B"],
        admissions: Int64[np.ndarray, " B"],
        contexts: Sequence[Context] = (),
    ) -> tuple[Int64[np.ndarray, " B"], tuple[Level, ...]]:
        """Choose the order of a step's requests and its levels.

        Args:
            page_table: the pages.
            rows: row of each request; decodes come first.
            num_new: new tokens of each.
            num_keys: computed keys in each request's own pages.
            admissions: number of the admission that filled each row.
            contexts: the chunks before the prompt of each request; empty if no request has any.

        Returns:
            For each request of the step its index in `rows`, decodes first, and the levels, outermost first. The order
            is unchanged if there are none.
        """
        decodes_only = np.count_nonzero(num_new > 1) == 0
        if not (decodes_only and self._still_holds(page_table, admissions)):
            self._order, self._levels = self._plan(page_table, rows, num_new, num_keys // self._page_size, contexts)
            prefixes = [level.kv_page_indices for level in self._levels if level.query_offsets is None]
            self._pages = np.concatenate([self._order[:0], *prefixes])  # the pages of chunks do not change
            self._generations = page_table.generation[self._pages]
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
        self,
        page_table: PageTable,
        rows: Rows,
        num_new: Int64[np.ndarray, " B"],
        limits: Int64[np.ndarray, " B"],
        contexts: Sequence[Context],
    ) -> tuple[Int64[np.ndarray, " B"], tuple[Level, ...]]:
        """Find the levels. Requests that share a prefix have the same chunks, so sorting by chunks keeps them together.

        First the requests are sorted by their pages, then by their chunks; both sorts are stable.
        """
        order, found, chunks = np.arange(len(rows)), tuple[Level, ...](), list[Level]()
        first_pages = np.sort(page_table.table[rows, 0])
        longest = 0
        if np.count_nonzero(first_pages[1:] == first_pages[:-1]):
            longest = int(np.partition(limits, -2)[-2])  # no two requests share more
        pages = page_table.table[rows, :longest]
        if longest and any(contexts):
            order = prefix_order(pages)
        if any(contexts):
            by_chunks, levels = self._find_chunks(
                [contexts[b] for b in order.tolist()], num_new[order], self._page_size
            )
            order = order[by_chunks]
            chunks = [Level(*(np.asarray(array, dtype=np.int32) for array in level)) for level in levels]
            if longest:
                found = prefix_levels(
                    pages[order], limits[order], num_new[order], self._page_size, self._costs, self._find
                )
        elif longest:
            order, found = plan_levels(pages, limits, num_new, self._page_size, self._costs, self._find)
        return order, (*chunks, *found)


def ranges(starts: Int64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " sum"]:
    """Concatenate the ranges that begin at `starts` and have `counts` numbers each."""
    group, index = members(counts)
    return starts[group] + index


def indptr_of(counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n+1"]:
    return np.append(0, counts.cumsum())
