"""Block indices from positions at the ends of blocks, and their physical form, against dense masks."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from mini_engine.attention.block_mask import classify_blocks, first_keys, list_blocks, physical_blocks, physical_mask
from mini_engine.attention.masks import and_masks, prefix_lm, visible
from mini_engine.attention.naive import attention_mask

POOL, PAGE = 8, 3
ZERO = torch.tensor(0)
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
    # A block that extends past the last query or key is never full for `create_block_mask`.
    inside = last < length
    for ours, counts, indices in (
        (visited & ~(full & inside & inside[:, None]), theirs.kv_num_blocks, theirs.kv_indices),
        (full & inside & inside[:, None], theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        num, blocks = list_blocks(ours)
        assert num.tolist() == counts[0, 0].tolist()
        for row, n in enumerate(num.tolist()):
            assert blocks[row, :n].tolist() == indices[0, 0, row, :n].tolist()


@st.composite
def tables(draw):
    """The pages of three sequences, a page of one possibly shared by the next, and where each page's keys begin."""
    rows = []
    for _ in range(3):
        pages = draw(st.permutations(range(POOL)))[: draw(st.integers(1, 5))]
        first = draw(st.integers(0, 4)) * PAGE  # pages before it were evicted
        rows.append((pages, [first + i * PAGE for i in range(len(pages))]))
    width = max(len(pages) for pages, _ in rows)
    # After its own pages a row repeats a page or holds any other: only the starts tell which pages are its own.
    table = [pages + [draw(st.sampled_from(range(POOL)))] * (width - len(pages)) for pages, _ in rows]
    starts = [begin + [-1] * (width - len(begin)) for _, begin in rows]
    return rows, torch.tensor(table), torch.tensor(starts)


@given(tables())
def test_first_keys_reads_the_table_backwards(drawn):
    rows, table, starts = drawn
    got = first_keys(table, starts, POOL)
    for b, (pages, begin) in enumerate(rows):
        want = dict(zip(pages, begin, strict=True))
        assert got[b].tolist() == [want.get(page, -1) for page in range(POOL)]


@given(tables(), st.sampled_from([visible(None), visible(1), visible(5), prefix_lm(4)]))
def test_a_physical_mask_shows_each_key_where_it_lies_and_nothing_of_others(drawn, mask_mod):
    rows, table, starts = drawn
    physical = physical_mask(mask_mod, first_keys(table, starts, POOL), PAGE)
    queries, slots = torch.arange(30), torch.arange(POOL * PAGE)
    for b, (pages, begin) in enumerate(rows):
        want = torch.zeros(len(queries), len(slots), dtype=torch.bool)
        for page, first in zip(pages, begin, strict=True):
            positions = first + torch.arange(PAGE)
            want[:, page * PAGE + torch.arange(PAGE)] = mask_mod(ZERO, ZERO, queries[:, None], positions)
        got = physical(torch.tensor(b), ZERO, queries[:, None], slots)
        assert torch.equal(got, want)


def test_a_physical_mask_hands_row_and_head_on():
    mask_mod = and_masks(visible(None), lambda b, h, q_idx, kv_idx: (b == 1) & (h == 2))
    physical = physical_mask(mask_mod, torch.tensor([[0], [0]], dtype=torch.int32), PAGE)
    seen = [(b, h) for b in range(2) for h in range(3) if physical(torch.tensor(b), torch.tensor(h), ZERO, ZERO)]
    assert seen == [(1, 2)]


@given(tables(), st.data())
def test_physical_blocks_are_the_pages_of_the_logical_ones(drawn, data):
    rows, table, _ = drawn
    n = table.shape[1]
    shape = (len(rows), 2, 2, n)
    blocks = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), min_size=12 * n, max_size=12 * n))).view(shape)
    got = physical_blocks(blocks.int(), table, POOL)
    assert got.shape == (*shape[:3], POOL) and got.dtype == torch.int32
    for b in range(len(rows)):
        for place in range(n):
            assert torch.equal(got[b, :, :, place], table[b][blocks[b, :, :, place]].int())
    assert not got[..., n:].any()
