"""Masks and block lists over the pool, against dense masks over each sequence, wherever its pages lie."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.masks import and_masks, prefix_lm, visible
from mini_engine.kv_cache.physical import first_keys, physical_blocks, physical_mask

POOL, PAGE = 8, 3
ZERO = torch.tensor(0)


@st.composite
def tables(draw):
    """The pages of three sequences, a page of one perhaps shared by the next, and where each page's keys begin."""
    rows = []
    for _ in range(3):
        pages = draw(st.permutations(range(POOL)))[: draw(st.integers(1, 5))]
        first = draw(st.integers(0, 4)) * PAGE  # pages before it were evicted
        rows.append((pages, [first + i * PAGE for i in range(len(pages))]))
    width = max(len(pages) for pages, _ in rows)
    # Behind its own, a row repeats a page, or holds any other: only the starts say what is its own.
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
