"""Blocks from the positions at their ends, against every pair of a query and a key."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from mini_engine.attention.block_mask import classify_blocks, list_blocks
from mini_engine.attention.masks import visible
from mini_engine.attention.naive import attention_mask

WINDOWS = st.none() | st.integers(1, 25)
ENDS = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda ends: (ends[0], ends[0] + ends[1]))


@given(st.lists(ENDS, min_size=1, max_size=5), st.lists(ENDS, min_size=1, max_size=5), WINDOWS)
def test_blocks_are_those_that_every_pair_says(queries, keys, window):
    first_query, last_query = torch.tensor(queries)[:, None].unbind(-1)
    first_key, last_key = torch.tensor(keys).unbind(-1)
    visited, full = classify_blocks(first_query, last_query, first_key, last_key, window)
    assert visited.shape == full.shape == (len(queries), len(keys))
    for q, (a, b) in enumerate(queries):
        for k, (c, d) in enumerate(keys):
            dense = attention_mask(torch.arange(a, b + 1), torch.arange(c, d + 1), window)
            assert visited[q, k] == dense.any()
            assert full[q, k] == dense.all()


@given(st.integers(0, 40), st.integers(0, 40), WINDOWS)
def test_visible_is_the_definition(query, key, window):
    mask_mod, nothing = visible(window), torch.tensor(0)
    want = key <= query and (window is None or query - key < window)
    assert bool(mask_mod(nothing, nothing, torch.tensor(query), torch.tensor(key))) == want


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=5))
def test_lists_name_each_chosen_block_once_and_in_order(rows):
    chosen = torch.tensor(rows)[None, :, :]
    counts, blocks = list_blocks(chosen)
    assert blocks.shape == chosen.shape and counts.shape == chosen.shape[:-1]
    for row, count, listed in zip(rows, counts[0].tolist(), blocks[0].tolist(), strict=True):
        assert listed[:count] == [block for block, wanted in enumerate(row) if wanted]
        assert sorted(listed) == list(range(7))


@given(st.integers(1, 40), WINDOWS)
def test_lists_are_those_of_create_block_mask(length, window):
    size = 8
    theirs = create_block_mask(visible(window), 1, 1, length, length, device="cpu", BLOCK_SIZE=size)
    first = torch.arange(0, length, size)
    last = first + size - 1
    visited, full = classify_blocks(first[:, None], last[:, None], first, last, window)
    # What lies behind the last query and key is nobody's, so the last row and column are never full there.
    inside = last < length
    for ours, counts, indices in (
        (visited & ~(full & inside & inside[:, None]), theirs.kv_num_blocks, theirs.kv_indices),
        (full & inside & inside[:, None], theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        num, blocks = list_blocks(ours)
        assert num.tolist() == counts[0, 0].tolist()
        for row, n in enumerate(num.tolist()):
            assert blocks[row, :n].tolist() == indices[0, 0, row, :n].tolist()
