"""Eviction of pages that have left the window: none too early, none too late."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv_cache.sliding_window import pages_to_evict

REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)  # computed, evicted before


@given(REQUESTS, st.integers(1, 5), st.integers(1, 70))
def test_exactly_the_pages_that_no_later_query_sees(requests, page_size, window):
    computed, evicted = (np.array([pair[i] for pair in requests], dtype=np.int64) for i in (0, 1))
    counts = pages_to_evict(computed, evicted, window, page_size)
    assert len(counts) == len(requests)
    for query, first, count in zip(computed.tolist(), evicted.tolist(), counts.tolist(), strict=True):
        visible = range(query - window + 1, query + 1)
        while not any(key in visible or key > query for key in range(first, first + page_size)):
            first, count = first + page_size, count - 1
        assert count == 0


@given(st.integers(1, 5), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_growing_request_keeps_the_pages_of_its_window_and_no_other(page_size, window, chunks):
    computed = evicted = 0
    for chunk in chunks:
        evicted += page_size * int(pages_to_evict(np.array([computed]), np.array([evicted]), window, page_size)[0])
        oldest = max(0, computed - window + 1)
        assert evicted <= oldest < evicted + page_size or evicted == oldest == 0
        computed += chunk
