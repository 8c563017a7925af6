"""The scheduler's decisions, as pure functions: each against its definition."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.policy import admit, fuse, preempt
from tests.test_scheduler import make_sequence

PENDING = st.lists(st.just(1) | st.integers(1, 30), max_size=12)


@given(PENDING, st.integers(0, 40))
def test_fuse_serves_every_decode_and_spends_the_rest_on_the_oldest_prompts(pending, extra):
    budget = len(pending) + extra
    shares = fuse(pending, budget)
    assert all(0 <= share <= n for share, n in zip(shares, pending, strict=True))
    assert all(share == 1 for share, n in zip(shares, pending, strict=True) if n == 1)
    assert sum(shares) == min(budget, sum(pending))  # nothing is left while somebody wants it
    prompts = [(share, n) for share, n in zip(shares, pending, strict=True) if n > 1]
    cut = next((i for i, (share, n) in enumerate(prompts) if share < n), len(prompts))
    assert all(share == 0 for share, _ in prompts[cut + 1 :])
    assert not prompts or prompts[0][0] > 0  # the oldest always gets on


def test_fuse_without_anybody():
    assert fuse([], 4) == []


def by_trying(num_tokens, num_pages, budget, free_pages, free_rows):
    """The most that fit, from the front: every one of them with a first token, all its pages, and a row."""
    fits = [
        n <= free_rows and sum(num_pages[:n]) <= free_pages and (n == 0 or sum(num_tokens[: n - 1]) < budget)
        for n in range(len(num_tokens) + 1)
    ]
    return max(n for n in range(len(fits)) if all(fits[: n + 1]))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=8),
    st.integers(0, 30),
    st.integers(0, 15),
    st.integers(0, 6),
)
def test_admit_takes_all_that_fit_and_overtakes_nobody(waiting, budget, free_pages, free_rows):
    num_tokens, num_pages = [tokens for tokens, _ in waiting], [pages for _, pages in waiting]
    got = admit(num_tokens, num_pages, budget=budget, free_pages=free_pages, free_rows=free_rows)
    assert got == by_trying(num_tokens, num_pages, budget, free_pages, free_rows)


def test_admit_into_a_pool_that_is_owed_pages():
    """Free pages less those kept for the running ones may be fewer than none."""
    assert admit([3], [1], budget=8, free_pages=-2, free_rows=1) == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3))
def test_preempt_sends_the_newest_to_the_head_of_the_queue(lens, num_waiting):
    table = PageTable(50, 2, 5)
    running = [make_sequence(n, 4) for n in lens]
    rows = {s: table.allocate() for s in running}
    for s in running:
        assert table.reserve(rows[s], len(s.token_ids))
        s.num_computed = len(s.token_ids)
        s.append(7)
    waiting = deque(make_sequence(1, 1) for _ in range(num_waiting))
    before, queue = list(running), list(waiting)
    tokens = list(before[-1].token_ids)
    newest = preempt(running, waiting, rows, table)
    assert newest is before[-1] and running == before[:-1] and list(waiting) == [newest, *queue]
    assert set(rows) == set(running)
    assert newest.num_computed == 0 and newest.token_ids == tokens and newest.finish_reason is None
    assert [s.num_computed for s in running] == lens[:-1]
    assert table.refcounts.sum() == sum(-(-n // 2) for n in lens[:-1])
