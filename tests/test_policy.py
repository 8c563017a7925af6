"""The scheduler's decisions, as functions: each against its definition."""

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.policy import admit, preempt, ready, share_budget
from mini_engine.request import Running
from tests.helpers import make_request

PENDING = st.lists(st.just(1) | st.integers(1, 30), max_size=12)


@given(PENDING, st.integers(0, 40))
def test_share_budget_serves_every_decode_and_spends_the_rest_on_the_oldest_prompts(pending, extra):
    budget = len(pending) + extra
    given_pending = np.array(pending, dtype=np.int64)
    shares = share_budget(given_pending, budget).tolist()
    assert given_pending.tolist() == pending
    assert all(0 <= share <= n for share, n in zip(shares, pending, strict=True))
    assert all(share == 1 for share, n in zip(shares, pending, strict=True) if n == 1)
    assert sum(shares) == min(budget, sum(pending))  # nothing is left while a prompt could use it
    prompts = [(share, n) for share, n in zip(shares, pending, strict=True) if n > 1]
    cut = next((i for i, (share, n) in enumerate(prompts) if share < n), len(prompts))
    assert all(share == 0 for share, _ in prompts[cut + 1 :])
    assert not prompts or prompts[0][0] > 0  # the oldest always makes progress


@given(st.integers(1, 40), st.integers(0, 9), st.integers(-3, 40), st.integers(-3, 9), st.integers(0, 3))
def test_admit_asks_for_a_row_all_pages_and_one_token(num_tokens, num_pages, budget, free_pages, free_rows):
    share = admit(num_tokens, num_pages, budget=budget, free_pages=free_pages, free_rows=free_rows)
    if budget >= 1 and free_rows >= 1 and num_pages <= free_pages:
        assert share == min(num_tokens, budget)
    else:
        assert share == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 2))
def test_preempt_sends_the_newest_to_the_head_of_the_queue(lens, num_waiting, num_output):
    table, running = PageTable(50, 2, 5), Running(5, 20)
    requests = [make_request(list(range(n)), 6, i) for i, n in enumerate(lens)]
    rows = [table.allocate() for _ in lens]
    rows.reverse()  # a row says nothing about age
    for row, request, n in zip(rows, requests, lens, strict=True):
        running.enter(row, request)
        table.take(np.array([row]), np.array([table.pages_for(n)]))
        running.num_computed[row] = n
        for token in range(num_output):
            running.append(np.array([row]), np.array([40 + token]))
    queue = [make_request([1], 1, 9 + i) for i in range(num_waiting)]
    waiting = OrderedDict.fromkeys(queue)
    assert preempt(running, waiting, table) is requests[-1]
    assert list(waiting) == [requests[-1], *queue]
    assert running.requests_of(running.order) == requests[:-1] and running.row_of(requests[-1]) is None
    assert requests[-1].token_ids == [*range(lens[-1]), *range(40, 40 + num_output)]
    assert requests[-1].output_token_ids == [*range(40, 40 + num_output)] and requests[-1].finish_reason is None
    assert running.num_computed[rows[:-1]].tolist() == lens[:-1]
    assert table.refcounts.sum() == sum(-(-n // 2) for n in lens[:-1])
    assert table.num_free_rows == 5 - len(lens) + 1


ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=9)


@given(ROWS)
def test_a_request_is_ready_if_a_token_is_left_and_its_grammar_has_read_all_others(rows):
    columns = [(known + in_flight, known, known + in_flight + left, waits) for known, in_flight, left, waits in rows]
    got = ready(*np.array(columns, dtype=np.int64).reshape(-1, 4).T)
    assert got.dtype == bool and got.tolist() == [
        left > 0 and not (waits and in_flight) for _, in_flight, left, waits in rows
    ]
