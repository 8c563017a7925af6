"""Grader of chapter 09. Its oracles are attention over gathered keys, sets of prefixes, and on a GPU FlashInfer."""

import random
from collections import Counter
from collections.abc import Sequence as ListLike
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from book.grading import Exercise, Homework, assert_close, assert_equal, check, require
from book.grading.assertions import CheckFailed
from mini_engine.attention.backend import create_backend
from mini_engine.attention.cascade import own_pages
from mini_engine.attention.levels import LevelCosts, plan_levels
from mini_engine.attention.naive import masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import AttentionState
from mini_engine.batch import PrefixLevel, StepBatch, upload_levels
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts

EXERCISES = [
    Exercise(
        "two_level_attention",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "Which queries see the shared pages, and does any of them need a mask? What remains is ordinary attention "
            "of each request over its own keys.",
            "attention_state takes any number of queries. One call over the shared pages with all of q, one call for "
            "each request with q[b : b + 1] over its own pages, cut to own_lens[b] keys. Then merge_states.",
            "own = one attention_state for each pair of neighbors in own_indptr, their out and lse joined with "
            "torch.cat; shared = attention_state(q, *read_pages(shared_pages), scale=scale); return "
            "merge_states(shared, own).",
        ),
    ),
    Exercise(
        "shared_prefixes",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "Words that begin alike are neighbors in a dictionary. What does the dictionary do with a short word?",
            "Sort the rows lexicographically, once you have replaced the entries after each limit by a number that "
            "is no page. np.lexsort sorts by its last key first. Then compare each row with the one before it.",
            "known = np.where(np.arange(W) < limits[:, None], pages, -1); order = np.lexsort(known.T[::-1]); equal = "
            "neighbors are the same and not -1; np.logical_and.accumulate(equal, axis=1).sum(axis=1) counts up to the "
            "first difference.",
        ),
    ),
    Exercise(
        "find_levels",
        points=8,
        minutes=90,
        difficulty=3,
        part="find_levels",
        hints=(
            "Begin with the outermost level and a cost of 0: who joins, what is a group, and what is its depth? The "
            "next level is the same question about the pages that are left, prefixes - depth. Only then think of cost.",
            "With a cost, a request joins if the level would pay with what this request still shares: more[b] * "
            "saving.sum() over the requests that join. When some do not join, that sum falls, so decide again until "
            "nothing changes. At the end, from the inside out, drop each level that saves too little given the level "
            "inside it.",
            "while True: more = prefixes - depth; joined = more > 0; repeat joined &= more * (saving @ joined) >= cost "
            "until it is stable; stop if saving @ joined == 0; the depth of a group is the smallest prefix of its "
            "requests that joined. Then, from the second innermost outwards, keep a level if saving @ (its pages where "
            "joined & ~joined_of_the_next_kept) >= cost. Last, give requests that are alone the depth of the level "
            "outside.",
        ),
    ),
    Exercise(
        "RadixTree",
        points=8,
        minutes=80,
        difficulty=3,
        hints=(
            "match and insert begin alike: follow the text from the root, edge by edge, and stop at the first page "
            "that differs. Write that walk once, and let it split the edge in which it ends. For evict, ask which page "
            "of the whole tree has to go first, and take one page at a time.",
            "Keep two things on the walk: the edge where you are, and how many pages of the text you have passed. "
            "children[bytes of the next page] is the next edge; count how many of its pages equal the text's. In "
            "split, four links change: the parent's child, the front's parent and child, and the edge's parent.",
            "insert: edge, found = the walk; if fewer pages are found than the text has full ones, table.retain(copies "
            "of the new pages) and hang one Edge below edge. evict: ends = edges without children whose last page has "
            "refcount 1; take the one with the smallest last_use; cut its last page off tokens and pages, or delete it "
            "from its parent's children if it was the only one; table.drop the page.",
        ),
    ),
    Exercise(
        "cascade_attention",
        points=4,
        minutes=30,
        difficulty=3,
        challenge=True,
        hints=(
            "two_level_attention has one group of all requests, and then a group for each. What is a level in general?",
            "A level's groups begin where joined is False. A group reads pages[first][before[first] : depth[first]] "
            "for its first request, and all its queries see those keys. The own pages are one more level.",
            "for level in [*levels, a level in which no request joins and depth is len(pages[b])]: for first, end in "
            "pairwise([*np.flatnonzero(~level.joined), B]): one attention_state of q[first:end]; join the groups of a "
            "level with torch.cat, and the levels with functools.reduce(merge_states, states).",
        ),
    ),
]

OVERFLOW = "exp(LSE) overflows: subtract the larger LSE before you weight two states, as `merge_states` does"
ON_GPU = torch.cuda.is_available() and find_spec("flashinfer") is not None
COMPILING = 300.0  # CPU seconds that FlashInfer may need to compile its kernels
SCALE = 0.4
Lists = ListLike[ListLike[int]]


# What the checks share ----------------------------------------------------------------------------------------------


def int32(values: ListLike[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def indptr_of(counts: ListLike[int]) -> np.ndarray:
    return np.append(0, np.cumsum(counts)).astype(np.int32)


class Cache:
    """Keys and values of a pool of pages, which counts how often each page is read.

    Args:
        num_pages: pages in the pool.
        page_size: tokens of a page.
        requests: the pages and the number of keys of each request; what no request needs is NaN.
    """

    def __init__(self, num_pages: int, page_size: int, requests: ListLike[tuple[ListLike[int], int]]) -> None:
        used = torch.zeros(num_pages * page_size, dtype=torch.bool)
        self.slots = []
        for pages, kv_len in requests:
            slots = torch.tensor([page * page_size + i for page in pages for i in range(page_size)], dtype=torch.long)
            self.slots.append(slots[:kv_len])
            used[slots[:kv_len]] = True
        shape = (num_pages, page_size, 2, 4)
        self.k, self.v = torch.randn(2, *shape, dtype=torch.float64)
        for x in (self.k, self.v):
            x.flatten(0, 1)[~used] = torch.nan
        self.q = torch.randn(len(requests), 4, 4, dtype=torch.float64)
        self.reads: Counter[int] = Counter()

    def read(self, pages: Any) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(np.asarray(pages, dtype=np.int64).reshape(-1))
        self.reads.update(index.tolist())
        return self.k[index].flatten(0, 1), self.v[index].flatten(0, 1)

    def expected(self) -> AttentionState:
        """Plain attention of each request over its gathered keys."""
        outs, lses = [], []
        for q, slots in zip(self.q, self.slots, strict=True):
            k, v = (x.flatten(0, 1)[slots] for x in (self.k, self.v))
            outs.append(masked_attention(q[None], k, v, scale=SCALE))
            scores = torch.einsum("hd,nhd->hn", q, k.repeat_interleave(2, dim=1)) * SCALE
            lses.append(scores.logsumexp(-1))
        return AttentionState(torch.cat(outs), torch.stack(lses))


def assert_state(got: Any, expected: AttentionState) -> None:
    require(isinstance(got, AttentionState), f"your answer should return an AttentionState, not {type(got).__name__}")
    assert_close(got.out, expected.out, atol=1e-9, name="the output")
    assert_close(
        got.lse,
        expected.lse,
        atol=1e-9,
        name="the LSE",
        mistake="the output is right, but the LSE covers only a part of the keys",
    )


def assert_reads(cache: Cache, expected: ListLike[int]) -> None:
    for page in sorted({*expected, *cache.reads}):
        want = list(expected).count(page)
        assert cache.reads[page] == want, f"page {page} is read {cache.reads[page]} times; it should be {want}"


# two_level_attention ------------------------------------------------------------------------------------------------


def two_levels(hw: Homework, shared: ListLike[int], own: Lists, own_lens: ListLike[int], factor: float = 1.0) -> Cache:
    """Requests with shared pages of 4 tokens and pages of their own; checks the state."""
    size = 4
    requests = [([*shared, *pages], len(shared) * size + n) for pages, n in zip(own, own_lens, strict=True)]
    cache = Cache(24, size, requests)
    cache.q *= factor
    indptr, pages = indptr_of([len(x) for x in own]), int32([page for x in own for page in x])
    got = hw.two_level_attention(cache.q, cache.read, int32(shared), indptr, pages, int32(own_lens), scale=SCALE)
    assert_state(got, cache.expected())
    return cache


@check(
    "two_level_attention",
    mistake="all queries see all shared keys, so they need neither a mask nor a loop over requests",
)
def test_shared_pages_alone(hw: Homework) -> None:
    two_levels(hw, [5, 2], [[], [], []], [0, 0, 0])


@check("two_level_attention", mistake="without shared pages, each request attends to its own pages and no others")
def test_own_pages_alone(hw: Homework) -> None:
    two_levels(hw, [], [[7, 3], [1], [4, 9, 6]], [8, 4, 12])


@check("two_level_attention", mistake="weight the two states by their LSEs: use merge_states, not a sum or a mean")
def test_both_levels(hw: Homework) -> None:
    two_levels(hw, [5, 2, 11], [[7, 3], [1], [4, 9, 6]], [8, 4, 12])


@check("two_level_attention", mistake=OVERFLOW)
def test_large_scores_in_both_levels(hw: Homework) -> None:
    two_levels(hw, [5, 2, 11], [[7, 3], [1], [4, 9, 6]], [8, 4, 12], factor=3000.0)


@check("two_level_attention", mistake="in the last own page only the keys up to own_lens[b] count")
def test_a_page_in_part(hw: Homework) -> None:
    two_levels(hw, [5, 2], [[7, 3], [1], [4, 9, 6]], [5, 3, 9])


@check("two_level_attention", mistake="a request without own keys has an empty state, which changes nothing")
def test_some_without_own_pages(hw: Homework) -> None:
    two_levels(hw, [5, 2], [[7], [], [4, 9]], [2, 0, 7])


@check("two_level_attention", mistake="you read the shared pages for each request, which is what a cascade avoids")
def test_each_page_is_read_once(hw: Homework) -> None:
    cache = two_levels(hw, [5, 2], [[7, 3], [1], [4, 9, 6]], [5, 3, 9])
    assert_reads(cache, [5, 2, 7, 3, 1, 4, 9, 6])


@check(
    "two_level_attention",
    mistake="it is right on the CPU but not on the GPU: look at devices and dtypes",
    seconds=COMPILING,
)
def test_flashinfers_cascade(hw: Homework) -> None:
    """In bfloat16 on a GPU, beside FlashInfer's own two-level cascade."""
    if not ON_GPU:
        return
    from flashinfer import MultiLevelCascadeAttentionWrapper

    num_requests, shared, own = 24, 40, 3
    pages = torch.randperm(shared + num_requests * own, dtype=torch.int32)
    k, v = torch.randn(2, len(pages), 16, 4, 128, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(num_requests, 8, 128, device="cuda", dtype=torch.bfloat16)
    indptr, last = indptr_of([own] * num_requests), 5
    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.zeros(2**27, dtype=torch.uint8, device="cuda"), "NHD")
    wrapper.plan(
        [int_tensor([0, num_requests]), int_tensor(range(num_requests + 1))],
        [int_tensor([0, shared]), torch.from_numpy(indptr)],
        [pages[:shared].cuda(), pages[shared:].cuda()],
        [int_tensor([16]), int_tensor([last] * num_requests)],
        8, 4, 128, 16, causal=True, sm_scale=SCALE, q_data_type=torch.bfloat16,
    )  # fmt: skip

    def read(chosen: Any) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(np.asarray(chosen, dtype=np.int64)).cuda()
        return k[index].flatten(0, 1), v[index].flatten(0, 1)

    arrays = pages[:shared].numpy(), indptr, pages[shared:].numpy(), int32([(own - 1) * 16 + last] * num_requests)
    got = hw.two_level_attention(q, read, *arrays, scale=SCALE)
    assert_close(got.out.to(q.dtype), wrapper.run(q, (k, v)), atol=2e-2, rtol=2e-2, name="the output")


def int_tensor(values: ListLike[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


# shared_prefixes ----------------------------------------------------------------------------------------------------


def prefixes_of(hw: Homework, rows: Lists, limits: ListLike[int] | None = None, stale: int = 7) -> None:
    """Check order and counts for any correct order; entries after a row's pages are stale."""
    limits = [len(row) for row in rows] if limits is None else limits
    width = max(len(row) for row in rows)
    pages = int32([[*row, *[stale] * (width - len(row))] for row in rows])
    given, bounds = pages.copy(), np.array(limits, dtype=np.int64)
    got = hw.shared_prefixes(given, bounds)
    is_pair = isinstance(got, tuple) and len(got) == 2
    require(is_pair, f"shared_prefixes should return a tuple of two arrays, the order and the counts, not {got!r}")
    order, counts = (np.asarray(x).tolist() for x in got)
    require((given == pages).all() and bounds.tolist() == list(limits), "you changed an argument")
    assert sorted(order) == list(range(len(rows))), f"the order is {order}; it should name each request once"
    assert len(counts) == len(rows), f"there are {len(counts)} counts for {len(rows)} requests"
    known = [tuple(rows[b][: limits[b]]) for b in order]
    for i, count in enumerate(counts):
        want = 0 if i == 0 else common(known[i - 1], known[i])
        pair = f"{list(known[i - 1])} and {list(known[i])}" if i else "the first request"
        assert count == want, f"the count of {pair} is {count}; it should be {want}"
    distinct = {row[: i + 1] for row in known for i in range(len(row))}
    best = sum(map(len, known)) - len(distinct)
    assert sum(counts) == best, (
        f"in the order {order} neighbors share {sum(counts)} pages; in another order they share {best}"
    )


def common(one: ListLike[int], other: ListLike[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@check("shared_prefixes", mistake="a single request shares nothing, so its count is 0")
def test_one_request(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2]])


@check("shared_prefixes", mistake="count the pages that both have at the same place, from the first one on")
def test_two_neighbors(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2, 9], [4, 2, 8]])
    prefixes_of(hw, [[4, 2, 9], [4, 2, 9]])
    prefixes_of(hw, [[3, 1, 9], [4, 2, 8]])
    prefixes_of(hw, [[0, 3], [0, 5]])  # page 0 is a page like any other


@check("shared_prefixes", mistake="equal pages after the first difference are not shared: their beginnings differ")
def test_behind_a_difference(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2, 9, 6], [4, 3, 9, 6]])


@check("shared_prefixes", mistake="entries after limits[b] do not count, even if they are equal")
def test_stale_entries(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2], [4, 2, 7]], stale=7)
    prefixes_of(hw, [[4, 2, 9], [4, 2, 9]], limits=[3, 1])
    prefixes_of(hw, [[4, 2, 9], [4, 2, 9]], limits=[0, 0])


@check("shared_prefixes", mistake="sharers are not neighbors in your order")
def test_sharers_that_are_apart(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2], [5, 1], [4, 1], [5, 3]])


@check("shared_prefixes", mistake="sorting by the first page alone leaves the sharers of later pages apart")
def test_deeper_sharers(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2, 1], [4, 3, 1], [4, 2, 5], [4, 3, 6], [4, 2, 1]])


@check("shared_prefixes", mistake="a request with a low limit stands between two that share more")
def test_a_low_limit_between(hw: Homework) -> None:
    prefixes_of(hw, [[4, 2, 9, 1], [4, 2, 9, 1], [4, 2, 9, 1]], limits=[4, 1, 4])


@check("shared_prefixes", mistake="for random trees of pages, an order or a count is wrong")
def test_random_pages(hw: Homework) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        rows: list[list[int]] = [[rng.randrange(500)]]
        for _ in range(rng.randrange(1, 12)):
            beginning = rng.choice(rows)
            rows.append(beginning[: rng.randrange(len(beginning) + 1)] + rng.sample(range(300), rng.randrange(1, 5)))
        rng.shuffle(rows)
        prefixes_of(hw, rows, [rng.randrange(len(row) // 2, len(row) + 1) for row in rows], stale=rows[0][0])


# find_levels --------------------------------------------------------------------------------------------------------


def found_levels(
    hw: Homework, prefixes: ListLike[int], cost: float, saving: ListLike[float] | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The levels, after all that must hold for them has been checked."""
    given = np.array(prefixes, dtype=np.int64)
    saves = np.ones(len(given)) if saving is None else np.array(saving, dtype=np.float64)
    got = hw.find_levels(given, saves, cost)
    what = f"find_levels({list(prefixes)}, saving {saves.tolist()}, cost {cost})"
    require(given.tolist() == list(prefixes), "you changed prefixes")
    require(isinstance(got, list), f"{what} should return a list of levels, not {type(got).__name__}")
    levels = [(np.asarray(joined, dtype=bool), np.asarray(depth)) for joined, depth in got]
    check_groups(levels, given, what)
    gain = total_saving(levels, saves, cost)
    for i in range(len(levels)):
        without = total_saving(levels[:i] + levels[i + 1 :], saves, cost)
        assert without <= gain + 1e-9, (
            f"{what}: {len(levels)} levels save {gain:g} in all; without level {i} they would save {without:g}"
        )
    joined, depth = levels[-1] if levels else (np.append(False, given[1:] > 0), np.zeros_like(given))
    more = (given - depth) * joined
    for pages in sorted(set(more.tolist()) - {0}):
        saved = pages * float(saves @ (more >= pages))
        assert saved <= cost + 1e-9, (
            f"{what}: your {len(levels)} levels lack one: {np.sum(more >= pages)} requests share at least {pages} "
            f"more pages with the one before; a further level of {pages} pages would save {saved:g} and cost {cost:g}"
        )
    if cost == 0:
        assert abs(gain - float(saves @ given)) < 1e-9, (
            f"{what}: levels cost nothing and could save {float(saves @ given):g}; yours save {gain:g}"
        )
    return levels


def in_groups(joined: np.ndarray) -> np.ndarray:
    return joined | np.append(joined[1:], False)


def check_groups(levels: list[tuple[np.ndarray, np.ndarray]], prefixes: np.ndarray, what: str) -> None:
    before, outside = np.zeros_like(prefixes), np.ones(len(prefixes), dtype=bool)
    for i, (joined, depth) in enumerate(levels):
        where = f"{what}, level {i}: joined {joined.astype(int).tolist()}, depth {depth.tolist()}: "
        assert joined.shape == depth.shape == prefixes.shape, f"{where}both must have an entry for each request"
        assert not joined[0], f"{where}the first request has none before it that it could join"
        assert joined.any(), f"{where}no request joins, so the level holds nothing"
        assert not (joined & ~outside).any(), (
            f"{where}groups do not nest: a request joins that did not join in the level outside"
        )
        groups = in_groups(joined)
        assert (depth[~groups] == before[~groups]).all(), (
            f"{where}a request that is alone keeps the depth of the level outside"
        )
        for first, end in pairwise([*np.flatnonzero(~joined).tolist(), len(joined)]):
            if end - first > 1:
                want = int(prefixes[first + 1 : end].min())
                if not (depth[first:end] == want).all():
                    raise CheckFailed(
                        f"{where}the requests {first} to {end - 1} have {want} pages in common, which is their depth",
                        "a group's depth is the smallest of what its neighbors share, for all its requests",
                    )
                assert want > before[first], f"{where}a group holds no page that the level outside does not hold"
        before, outside = depth, joined


def total_saving(levels: list[tuple[np.ndarray, np.ndarray]], saving: np.ndarray, cost: float) -> float:
    """Seconds that levels save in all. A level takes over the pages of a level outside it that was left out."""
    before, total = np.zeros(len(saving)), 0.0
    for joined, reached in levels:
        depth = np.where(in_groups(joined), reached, before)
        total += float(saving @ (joined * (depth - before))) - cost
        before = depth
    return total


@check("find_levels", mistake="without a shared page there is no level")
def test_nothing_is_shared(hw: Homework) -> None:
    assert_equal(len(found_levels(hw, [0, 0, 0], 0.0)), 0, name="the number of levels")
    assert_equal(len(found_levels(hw, [0], 1.0)), 0, name="the number of levels for one request")


@check("find_levels", mistake="a group holds all pages that its requests have in common, its first request included")
def test_one_group(hw: Homework) -> None:
    levels = found_levels(hw, [0, 4, 4, 4], 0.0)
    assert_equal([depth.tolist() for _, depth in levels], [[4, 4, 4, 4]], name="the depth of each level")


@check("find_levels", mistake="inside a group there are smaller groups that share more: the next level")
def test_a_level_inside_another(hw: Homework) -> None:
    levels = found_levels(hw, [0, 9, 9, 2, 7, 2], 0.0)
    depths = [depth.tolist() for _, depth in levels]
    assert_equal(depths, [[2] * 6, [9, 9, 9, 7, 7, 2]], name="the depth of each level")


@check("find_levels", mistake="a level whose saving is below its cost does not pay off")
def test_a_level_that_does_not_pay(hw: Homework) -> None:
    assert_equal(len(found_levels(hw, [0, 4, 4], 8.5)), 0, name="the number of levels")
    assert_equal(len(found_levels(hw, [0, 4, 4], 7.5)), 1, name="the number of levels")


@check("find_levels", mistake="a level saves its pages once for each request that has joined: here 3 times 4 pages")
def test_one_group_that_pays(hw: Homework) -> None:
    levels = found_levels(hw, [0, 5, 4, 4], 11.5)
    assert_equal(len(levels), 1, name="the number of levels")
    assert_equal(levels[0][1].tolist(), [4, 4, 4, 4], name="the depth")


@check("find_levels", mistake="one level holds several groups, and pays its cost once for all of them")
def test_two_groups_in_a_level(hw: Homework) -> None:
    levels = found_levels(hw, [0, 8, 0, 5, 5], 14.5)
    assert_equal([depth.tolist() for _, depth in levels], [[8, 8, 5, 5, 5]], name="the depth of each level")


@check(
    "find_levels",
    mistake="when some requests do not join, fewer pay for the level: decide again for the requests that are left",
)
def test_few_pages_do_not_join(hw: Homework) -> None:
    found_levels(hw, [0, 9, 1, 9], 5.0)


@check("find_levels", mistake="weight each request by its saving, instead of counting it as one")
def test_some_save_nothing(hw: Homework) -> None:
    assert_equal(len(found_levels(hw, [0, 6, 6], 5.0, [1.0, 0.0, 0.0])), 0, name="the number of levels")
    assert_equal(len(found_levels(hw, [0, 6, 6], 5.0, [0.0, 0.5, 0.5])), 1, name="the number of levels")


@check("find_levels", mistake="the outer level saves too little: the groups inside it would read its pages once each")
def test_an_outer_level_that_is_redundant(hw: Homework) -> None:
    levels = found_levels(hw, [0, 8, 8, 8, 3, 8, 8, 8], 5.0)
    assert_equal([depth.tolist() for _, depth in levels], [[8] * 8], name="the depth of each level")


@check("find_levels", mistake="if levels cost nothing, every page that could be shared must be in a level")
def test_without_a_cost(hw: Homework) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        found_levels(hw, [0, *(rng.randrange(7) for _ in range(rng.randrange(9)))], 0.0)


@check("find_levels", mistake="for random prefixes and costs, the levels break one of the rules")
def test_random_prefixes(hw: Homework) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        prefixes = [0, *(rng.randrange(rng.choice([2, 5, 12])) for _ in range(rng.randrange(10)))]
        saving = [rng.choice([0.0, 0.3, 1.0, 1.0]) for _ in prefixes]
        found_levels(hw, prefixes, rng.choice([0.5, 1.0, 3.0, 8.0]), saving)


def page_tree(seed: int, page_size: int) -> tuple[list[list[int]], list[int], int]:
    """Decodes whose pages form a random tree: pages and keys of each, and the number of pages."""
    rng, num_pages = random.Random(seed), 0
    rows: list[list[int]] = []
    for _ in range(9):
        shared = rng.choice(rows)[: rng.randrange(1, 9)] if rows else []
        count = rng.randrange(1, 5)
        rows.append(shared[:-1] + list(range(num_pages, num_pages + count)))
        num_pages += count
    placed = rng.sample(range(num_pages), num_pages)
    lens = [len(row) * page_size - rng.randrange(page_size) for row in rows]
    return [[placed[page] for page in row] for row in rows], lens, num_pages


def planned_step(
    hw: Homework, rows: Lists, lens: ListLike[int], page_size: int, device: str
) -> tuple[StepBatch, tuple[PrefixLevel, ...]]:
    limits = np.array([(n - 1) // page_size for n in lens])
    table = np.full((len(rows), int(limits.max())), -1, dtype=np.int32)
    for row, pages, limit in zip(table, rows, limits, strict=True):
        row[:limit] = pages[:limit]
    costs, ones = LevelCosts(1.0, 0.0, 1.5, 0.0), np.ones(len(rows), dtype=np.int64)
    order, levels = plan_levels(table, limits, ones, page_size, costs, hw.find_levels)
    moved = upload_levels(levels, torch.device(device))
    batch = StepBatch.build(
        token_ids=[0] * len(rows),
        num_new=None,
        kv_lens=[lens[b] for b in order],
        pages=[page for b in order for page in rows[b]],
        page_size=page_size,
        device=device,
        levels=moved,
    )
    return batch, moved


@check(
    "find_levels", mistake="the engine's cascade backend gets different results with your levels than without levels"
)
def test_the_engine_runs_on_it(hw: Homework) -> None:
    spec = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=SCALE)
    used = 0
    for seed in range(8):
        rows, lens, num_pages = page_tree(seed, 4)
        batch, levels = planned_step(hw, rows, lens, 4, "cpu")
        used += len(levels)
        cache = PagedKVCache([spec], num_pages, 4, torch.float64)
        for x in cache.layers[0]:
            x.normal_()
        q = torch.randn(len(rows), 4, 8, dtype=torch.float64)
        outs = []
        for name, step in (("cascade", batch), ("torch", replace(batch, levels=()))):
            backend = create_backend(name, [spec], cache, Parts())
            backend.plan(step)
            outs.append(backend.run(0, q))
        assert_close(*outs, atol=1e-9, name="attention over your levels")
    assert used > 8, "your levels are hardly ever used"


@check(
    "find_levels",
    mistake="FlashInfer's kernels get different results with your levels than without levels",
    seconds=COMPILING,
)
def test_flashinfers_kernels_run_on_it(hw: Homework) -> None:
    """In bfloat16 on a GPU: the `cascade` backend on these levels, beside `flashinfer` without levels."""
    if not ON_GPU:
        return
    spec = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    rows, lens, num_pages = page_tree(0, 16)
    batch, levels = planned_step(hw, rows, lens, 16, "cuda")
    cache = PagedKVCache([spec], num_pages, 16, torch.bfloat16, "cuda")
    for x in cache.layers[0]:
        x.normal_()
    q = torch.randn(len(rows), 16, 128, device="cuda", dtype=torch.bfloat16)
    outs = []
    for name, step in (("cascade", batch), ("flashinfer", replace(batch, levels=()))):
        backend = create_backend(name, [spec], cache, Parts())
        backend.plan(step)
        outs.append(backend.run(0, q))
    assert levels and len(own_pages(batch).kv_page_indices) < len(batch.kv_page_indices)
    assert_close(*outs, atol=2e-2, rtol=2e-2, name="attention over your levels")


# RadixTree ----------------------------------------------------------------------------------------------------------


class Cached:
    """A page table and the tree under test; requests arrive, share the pages that the tree finds, and end."""

    def __init__(self, hw: Homework, num_pages: int = 40, page_size: int = 2) -> None:
        self.table = PageTable(num_pages, page_size, 8)
        self.tree = hw.RadixTree(self.table)

    def fill(self, text: ListLike[int], shares: bool = True, changes: bool = True) -> tuple[int, list[int]]:
        """Compute a text, insert it, and leave; returns its row and its pages. `changes`: so do the caller's arrays."""
        table, row, tokens = self.table, self.table.allocate(), int32(text)
        if shares:
            table.share(row, self.match(text))
        table.take(np.array([row]), table.missing(np.array([row]), np.array([len(text)]))[0])
        pages = table.pages(row).copy()
        given = pages.copy(), tokens.copy()
        returned = self.tree.insert(given[1], given[0])
        require(returned is None, f"insert should return nothing, not {returned!r}")
        if changes:
            given[0][:], given[1][:] = -5, -5  # the tree must have copied them
        table.release(row)
        return row, pages.tolist()

    def match(self, text: ListLike[int]) -> np.ndarray:
        found = self.tree.match(int32(text))
        assert isinstance(found, np.ndarray) and found.dtype == np.int32, (
            f"match should return an array of dtype int32, not {getattr(found, 'dtype', type(found).__name__)}"
        )
        return found

    def found(self, text: ListLike[int]) -> list[int]:
        return self.match(text).tolist()

    def edges(self) -> list[list[int]]:
        return sorted(edge.pages.tolist() for edge in self.tree.edges())

    def check_structure(self) -> None:
        """Links, keys and owners."""
        size, in_tree = self.table.page_size, []
        for edge in self.tree.edges():
            pages = edge.pages.tolist()
            assert len(pages), "an edge without pages is in the tree"
            in_tree += pages
            assert len(edge.tokens) == len(pages) * size, f"the edge {pages} has {len(edge.tokens)} tokens"
            assert edge.parent is not None and edge.parent.children.get(edge.tokens[:size].tobytes()) is edge, (
                f"the edge {pages} is not its parent's child under the tokens of its first page"
            )
            assert edge.parent.last_use >= edge.last_use, f"the edge {pages} was used later than its parent"
        assert len(in_tree) == len(set(in_tree)), f"a page is in the tree twice: {sorted(in_tree)}"
        owners = np.zeros(self.table.num_pages, dtype=int)
        for row in range(8):
            owners[self.table.pages(row)] += 1
        owners[in_tree] += 1
        wrong = np.flatnonzero(self.table.refcounts != owners)
        if len(wrong):
            raise CheckFailed(
                f"page {wrong[0]} has {owners[wrong[0]]} owners, the tree included, and its refcount is "
                f"{self.table.refcounts[wrong[0]]}",
                "the tree is one owner of each of its pages, however often a text is inserted",
            )


@check("RadixTree", mistake="in split, four links must change, and the tokens are cut at num_pages * page_size")
def test_split(hw: Homework) -> None:
    tree, size = Cached(hw).tree, 2
    make_edge = type(tree.root)
    behind = make_edge(int32([9, 9]), int32([8]))
    edge = make_edge(int32([1, 2, 3, 4, 5, 6]), int32([4, 5, 6]), tree.root, last_use=3)
    behind.parent = edge
    edge.children[behind.tokens.tobytes()] = behind
    tree.root.children[edge.tokens[:size].tobytes()] = edge
    front = tree.split(edge, 1)
    assert isinstance(front, make_edge), (
        f"split should return the new edge, the front part, not a {type(front).__name__}"
    )
    assert_equal(front.pages.tolist(), [4], name="the pages of the front part")
    assert_equal(front.tokens.tolist(), [1, 2], name="the tokens of the front part")
    assert_equal(edge.pages.tolist(), [5, 6], name="the pages of the edge, now the rear part")
    assert_equal(edge.tokens.tolist(), [3, 4, 5, 6], name="the tokens of the rear part")
    assert list(tree.root.children.values()) == [front], "the front part takes the edge's place among the children"
    assert front.parent is tree.root and edge.parent is front, "the front's parent is the root, the edge's the front"
    assert front.children == {int32([3, 4]).tobytes(): edge}, (
        "the edge is the only child of the front, under the tokens of its first page"
    )
    assert list(edge.children.values()) == [behind] and behind.parent is edge, "the rear part keeps its children"
    assert front.last_use == edge.last_use == 3, "both parts were last used when the edge was"


@check("RadixTree", mistake="in an empty tree nothing is found, so return an empty array of dtype int32")
def test_an_empty_tree(hw: Homework) -> None:
    cached = Cached(hw)
    assert_equal(cached.found([1, 2, 3]), [], name="match in an empty tree")
    assert_equal(cached.found([]), [], name="match of an empty text")


@check(
    "RadixTree", mistake="all full pages of an inserted text are found, but never a page that is filled only in part"
)
def test_a_text_is_found(hw: Homework) -> None:
    cached = Cached(hw)
    _, pages = cached.fill([1, 2, 3, 4, 5, 6, 7], changes=False)
    for length, count in ((7, 3), (6, 3), (5, 2), (1, 0)):
        found = cached.found([1, 2, 3, 4, 5, 6, 7][:length])
        assert_equal(found, pages[:count], name=f"match of its first {length} tokens")
    assert_equal(cached.found([1, 2, 3, 9, 5, 6]), pages[:1], name="match of a text that differs in its second page")
    assert_equal(cached.found([9, 2, 3, 4]), [], name="match of a text that differs in its first token")


@check("RadixTree", mistake="after insert the caller changes its arrays: the tree needs copies of tokens and pages")
def test_the_callers_arrays_change(hw: Homework) -> None:
    cached = Cached(hw)
    _, pages = cached.fill([1, 2, 3, 4, 5, 6])
    assert_equal(cached.found([1, 2, 3, 4, 5, 6]), pages, name="match of the text that was inserted")


@check("RadixTree", mistake="the tree is one more owner of each page that it gets, and of no other page")
def test_the_tree_owns_its_pages(hw: Homework) -> None:
    cached = Cached(hw)
    _, pages = cached.fill([1, 2, 3, 4, 5])
    owners = [int(cached.table.refcounts[page]) for page in pages]
    assert_equal(owners, [1, 1, 0], name="the refcounts after the request has left (its last page is not full)")
    cached.check_structure()


@check("RadixTree", mistake="where two texts diverge, the edge is split, and the new pages become one new edge")
def test_texts_that_diverge(hw: Homework) -> None:
    cached = Cached(hw)
    _, one = cached.fill([1, 2, 3, 4, 5, 6, 7, 8])
    _, two = cached.fill([1, 2, 3, 4, 9, 9, 9, 9])
    assert_equal(two[:2], one[:2], name="the pages that the second text shares")
    assert_equal(cached.edges(), sorted([one[:2], one[2:], two[2:]]), name="the edges")
    _, three = cached.fill([7, 7, 7, 7])
    assert_equal(cached.edges(), sorted([one[:2], one[2:], two[2:], three]), name="the edges")
    for text, pages in (([1, 2, 3, 4, 5, 6, 7, 8], one), ([1, 2, 3, 4, 9, 9, 9, 9], two), ([7, 7, 7, 7], three)):
        assert_equal(cached.found(text), pages, name=f"match of {text}")
    cached.check_structure()


@check(
    "RadixTree", mistake="a longer text continues after the pages that the tree has already, and these stay in the tree"
)
def test_a_text_that_continues(hw: Homework) -> None:
    cached = Cached(hw)
    _, one = cached.fill([1, 2, 3, 4])
    _, two = cached.fill([1, 2, 3, 4, 5, 6, 7, 8])
    assert_equal(cached.found([1, 2, 3, 4, 5, 6, 7, 8]), one + two[2:], name="match of the longer text")
    cached.check_structure()


@check(
    "RadixTree", mistake="pages whose text the tree has already stay in it, and the request's own copies are not taken"
)
def test_the_first_pages_stay(hw: Homework) -> None:
    cached = Cached(hw)
    _, one = cached.fill([1, 2, 3, 4, 5, 6])
    _, two = cached.fill([1, 2, 3, 4, 7, 7], shares=False)
    assert_equal(cached.found([1, 2, 3, 4, 7, 7]), one[:2] + two[2:], name="match of the second text")
    owners = [int(cached.table.refcounts[page]) for page in two]
    assert_equal(owners, [0, 0, 1], name="the refcounts of the second request's pages, after it has left")
    cached.check_structure()


@check(
    "RadixTree", mistake="only the pages that are found count as used: split the edge, and call `use` on its front part"
)
def test_a_match_uses_what_it_finds(hw: Homework) -> None:
    cached = Cached(hw)
    _, pages = cached.fill([1, 2, 3, 4, 5, 6, 7, 8])
    before = cached.tree.time
    cached.match([1, 2, 3, 4, 9, 9])
    used = {edge.pages.tolist()[0]: (edge.pages.tolist(), edge.last_use > before) for edge in cached.tree.edges()}
    assert_equal(
        used.get(pages[0]), (pages[:2], True), name="the edge of the pages that were found, and whether it was used"
    )
    assert_equal(used.get(pages[2]), (pages[2:], False), name="the lower edge, and whether it was used")
    cached.check_structure()


@check("RadixTree", mistake="evict a text from its end, and only as many pages as are needed")
def test_evict_from_the_end(hw: Homework) -> None:
    cached = Cached(hw, num_pages=10)
    _, pages = cached.fill([1, 2, 3, 4, 5, 6, 7, 8])
    assert_equal(cached.tree.evict(1), 1, name="evict(1)")
    assert_equal(cached.found([1, 2, 3, 4, 5, 6, 7, 8]), pages[:3], name="match of the text afterwards")
    assert_equal(cached.table.num_free_pages, 7, name="the number of free pages")
    cached.check_structure()
    assert_equal(cached.tree.evict(9), 3, name="evict(9) with 3 pages in the tree")
    assert_equal(cached.found([1, 2, 3, 4]), [], name="match in a tree that is empty again")
    assert_equal(cached.tree.evict(1), 0, name="evict(1) in an empty tree")
    assert_equal(cached.edges(), [], name="the edges")


@check("RadixTree", mistake="a page that a request owns stays in the tree, and so do the pages in front of it")
def test_pages_in_use_stay(hw: Homework) -> None:
    cached = Cached(hw)
    _, pages = cached.fill([1, 2, 3, 4, 5, 6, 7, 8])
    row = cached.table.allocate()
    cached.table.share(row, cached.match([1, 2, 3, 4]))
    assert_equal(cached.tree.evict(9), 2, name="evict(9), while a request owns the first two of four pages")
    assert_equal(cached.found([1, 2, 3, 4, 5, 6]), pages[:2], name="match afterwards")
    cached.table.release(row)
    assert_equal(cached.tree.evict(9), 2, name="evict(9) after the request has left")
    _, pages = cached.fill([1, 2, 3, 4, 5, 6, 7, 8])
    cached.table.share(row := cached.table.allocate(), int32(pages[:2]))  # without a match: half of an edge
    assert_equal(cached.tree.evict(9), 2, name="evict(9), while a request owns two of the four pages of an edge")
    cached.check_structure()
    cached.table.release(row)


@check("RadixTree", mistake="evict the least recently used edge first, no matter when it was inserted")
def test_the_least_recently_used_goes_first(hw: Homework) -> None:
    cached = Cached(hw)
    _, one = cached.fill([1, 1, 2, 2])
    _, two = cached.fill([3, 3, 4, 4])
    cached.match([1, 1, 2, 2])
    assert_equal(cached.tree.evict(1), 1, name="evict(1)")
    assert_equal(cached.found([3, 3, 4, 4]), two[:1], name="match of the text that was not used again")
    assert_equal(cached.found([1, 1, 2, 2]), one, name="match of the text that was used again")
    cached = Cached(hw)
    _, one = cached.fill([1, 1, 2, 2])
    cached.match([1, 1, 2, 2])
    _, two = cached.fill([3, 3, 4, 4])
    assert_equal(cached.tree.evict(1), 1, name="evict(1)")
    assert_equal(cached.found([1, 1, 2, 2]), one[:1], name="match of a text that was used before the other's insert")
    assert_equal(cached.found([3, 3, 4, 4]), two, name="match of the text that was inserted last")


@check("RadixTree", mistake="evict the pages of branches before the pages that the branches share")
def test_branches_before_the_stem(hw: Homework) -> None:
    cached = Cached(hw)
    _, one = cached.fill([1, 1, 2, 2])
    cached.fill([1, 1, 3, 3])
    assert_equal(cached.tree.evict(2), 2, name="evict(2)")
    assert_equal(cached.found([1, 1, 2, 2]), one[:1], name="match of what both texts begin with")
    cached.check_structure()


@check("RadixTree", mistake="when an edge has left the tree, its parent may be the next: look at all edges again")
def test_evict_up_to_the_root(hw: Homework) -> None:
    cached = Cached(hw)
    cached.fill([1, 1])
    cached.fill([1, 1, 2, 2])
    _, last = cached.fill([7, 7])
    assert_equal(cached.tree.evict(2), 2, name="evict(2)")
    assert_equal(cached.edges(), [last], name="the edges that are left: the text used last")
    cached.check_structure()


@check("RadixTree", mistake="insert counts as a use of the text's pages even if the tree has all of them already")
def test_an_insert_uses_what_is_there(hw: Homework) -> None:
    cached = Cached(hw)
    _, one = cached.fill([1, 1])
    cached.fill([3, 3])
    cached.fill([1, 1], shares=False)
    assert_equal(cached.tree.evict(1), 1, name="evict(1)")
    assert_equal(cached.edges(), [one], name="the edges that are left: the text inserted last")


@check("RadixTree", mistake="over random insertions, matches and evictions, a result or a refcount is wrong")
def test_a_random_life(hw: Homework) -> None:
    """The oracle has a page and a time for each prefix, and evicts the oldest prefix that no other one continues."""
    for seed in range(25):
        rng = random.Random(seed)
        cached = Cached(hw, num_pages=60, page_size=rng.choice([1, 2]))
        size = cached.table.page_size
        page_of: dict[tuple[int, ...], int] = {}
        last_use: dict[tuple[int, ...], int] = {}
        for time in range(16):
            text = [rng.randrange(2) for _ in range(rng.randrange(1, 6 * size))]
            prefixes = [tuple(text[:end]) for end in range(size, len(text) + 1, size)]
            if rng.random() < 0.6 and cached.table.num_free_pages >= 6:
                _, pages = cached.fill(text, shares=rng.random() < 0.7)
                for prefix, page in zip(prefixes, pages, strict=False):
                    page_of.setdefault(prefix, page)
            known = [prefix for prefix in prefixes if prefix in page_of]
            assert_equal(cached.found(text), [page_of[prefix] for prefix in known], name=f"match of {text}")
            last_use |= dict.fromkeys(known, time)
            for _ in range(rng.randrange(3)):
                ends = [p for p in page_of if not any(len(q) > len(p) and q[: len(p)] == p for q in page_of)]
                assert_equal(cached.tree.evict(1), min(1, len(ends)), name="evict(1)")
                if ends:
                    page_of.pop(min(ends, key=lambda prefix: last_use[prefix]))
            in_tree = sorted(page for pages in cached.edges() for page in pages)
            assert_equal(in_tree, sorted(page_of.values()), name="the pages in the tree")
            cached.check_structure()


# cascade_attention --------------------------------------------------------------------------------------------------

Depths = ListLike[tuple[ListLike[int], ListLike[int]]]


def cascade(
    hw: Homework,
    pages: Lists,
    kv_lens: ListLike[int],
    levels: Depths,
    reads: ListLike[int] = (),
    factor: float = 1.0,
) -> None:
    """Requests with pages of 4 tokens; levels as pairs of joined and depth. Checks the state, and what was read."""
    cache = Cache(40, 4, list(zip(pages, kv_lens, strict=True)))
    cache.q *= factor
    built = [hw.Level(np.array(joined, dtype=bool), np.array(depth)) for joined, depth in levels]
    arrays = [int32(own) for own in pages]
    got = hw.cascade_attention(cache.q, cache.read, arrays, int32(kv_lens), built, page_size=4, scale=SCALE)
    assert_state(got, cache.expected())
    if reads:
        assert_reads(cache, reads)


@check("cascade_attention", mistake="without levels each request attends to all its pages, as far as its keys go")
def test_no_levels(hw: Homework) -> None:
    cascade(hw, [[3, 1], [7], [2, 4, 9]], [7, 4, 9], [])


@check(
    "cascade_attention",
    mistake="attend to the pages of the level first, then to each request's own pages, and merge the states",
)
def test_one_level(hw: Homework) -> None:
    cascade(hw, [[3, 1, 5], [3, 1, 6]], [12, 12], [([0, 1], [2, 2])])


@check("cascade_attention", mistake=OVERFLOW)
def test_large_scores_in_a_level(hw: Homework) -> None:
    cascade(hw, [[3, 1, 5], [3, 1, 6]], [12, 12], [([0, 1], [2, 2])], factor=3000.0)


@check(
    "cascade_attention",
    mistake="kv_lens counts all keys: subtract those in the levels to find how many are in the own pages",
)
def test_a_last_page_in_part(hw: Homework) -> None:
    cascade(hw, [[3, 1, 5], [3, 1, 6, 8], [3, 1, 7]], [9, 15, 11], [([0, 1, 1], [2, 2, 2])])


@check("cascade_attention", mistake="a level has several groups, each with queries and pages of its own")
def test_two_groups(hw: Homework) -> None:
    pages = [[3, 1, 5], [3, 1, 6], [8, 2], [8, 4]]
    cascade(hw, pages, [10, 11, 5, 7], [([0, 1, 0, 1], [2, 2, 1, 1])])


@check("cascade_attention", mistake="an inner level holds only the pages after those of the outer one")
def test_two_levels(hw: Homework) -> None:
    pages = [[3, 1, 5, 6], [3, 1, 5, 7], [3, 8], [3, 9]]
    cascade(hw, pages, [14, 15, 6, 7], [([0, 1, 1, 1], [1, 1, 1, 1]), ([0, 1, 0, 0], [3, 3, 1, 1])])


@check("cascade_attention", mistake="you lose a request that is alone in a level, or that has no page after the levels")
def test_alone_and_without_own_pages(hw: Homework) -> None:
    pages = [[3, 1], [3, 1, 5], [7, 2]]
    cascade(hw, pages, [8, 10, 6], [([0, 1, 0], [2, 2, 0])])


@check("cascade_attention", mistake="a group reads its pages once for all its requests")
def test_every_page_is_read_once(hw: Homework) -> None:
    pages = [[3, 1, 5, 6], [3, 1, 5, 7], [3, 8], [3, 9]]
    levels = [([0, 1, 1, 1], [1, 1, 1, 1]), ([0, 1, 0, 0], [3, 3, 1, 1])]
    cascade(hw, pages, [14, 15, 6, 7], levels, reads=[3, 1, 5, 6, 7, 8, 9])


@check("cascade_attention", mistake="on random trees of pages the result differs from plain attention")
def test_random_trees(hw: Homework) -> None:
    for seed in range(20):
        rows, lens, _ = page_tree(seed, 4)
        limits = np.array([(n - 1) // 4 for n in lens])
        width = max(map(len, rows))
        table = int32([[*row, *[-1] * (width - len(row))] for row in rows])
        order, prefixes = hw.shared_prefixes(table, limits)
        cost = [0.0, 1.5][seed % 2]
        levels = [(x.joined, x.depth) for x in hw.find_levels(prefixes, np.ones(len(rows)), cost)]
        cascade(hw, [rows[b] for b in order], [lens[b] for b in order], levels)
