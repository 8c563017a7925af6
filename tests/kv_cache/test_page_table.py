"""The page table: no page leaks, none is shared unknowingly, and a converted mask attends to the same keys."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mini_engine.errors import ConfigError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import copy_on_write, share_prefix
from mini_engine.kv_cache.sliding_window import evict_pages

NUM_PAGES, PAGE_SIZE, ROWS = 9, 3, 4


class PageTableMachine(RuleBasedStateMachine):
    """Random allocations, growth, sharing, eviction and erasure, beside a model made of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE, ROWS)
        self.owned: dict[int, list[int]] = {}

    @precondition(lambda self: len(self.owned) < ROWS)
    @rule()
    def allocate(self):
        row = self.table.allocate()
        assert row not in self.owned
        self.owned[row] = []

    @precondition(lambda self: len(self.owned) == ROWS)
    @rule()
    def allocate_too_many(self):
        with pytest.raises(IndexError):
            self.table.allocate()

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), num_tokens=st.integers(0, NUM_PAGES * PAGE_SIZE + 2))
    def reserve(self, data, num_tokens):
        row = data.draw(st.sampled_from(sorted(self.owned)))
        before = list(self.owned[row])
        missing = max(0, -(-num_tokens // PAGE_SIZE) - len(before))
        free = self.table.num_free_pages
        assert self.table.reserve(row, num_tokens) == (missing <= free)
        after = self.table.pages(row).tolist()
        assert after[: len(before)] == before
        assert len(after) - len(before) == (missing if missing <= free else 0)
        in_use = {page for pages in self.owned.values() for page in pages}
        assert not in_use & set(after[len(before) :])
        self.owned[row] = after

    @precondition(lambda self: any(self.owned.values()) and not all(self.owned.values()))
    @rule(data=st.data())
    def share(self, data):
        donor = data.draw(st.sampled_from(sorted(row for row, pages in self.owned.items() if pages)))
        row = data.draw(st.sampled_from(sorted(row for row, pages in self.owned.items() if not pages)))
        num_tokens = data.draw(st.integers(1, len(self.owned[donor]) * PAGE_SIZE))
        share_prefix(self.table, row, donor, num_tokens)
        self.owned[row] = self.owned[donor][: -(-num_tokens // PAGE_SIZE)]

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def write(self, data):
        row = data.draw(st.sampled_from(sorted(row for row, pages in self.owned.items() if pages)))
        before = list(self.owned[row])
        first = data.draw(st.integers(0, len(before) * PAGE_SIZE - 1))
        end = data.draw(st.integers(first + 1, len(before) * PAGE_SIZE))
        written = range(first // PAGE_SIZE, (end - 1) // PAGE_SIZE + 1)
        others = {page for other, pages in self.owned.items() if other != row for page in pages}
        shared = [i for i in written if before[i] in others]
        free = set(self.table.free_pages)
        copies = copy_on_write(self.table, row, first, end)
        if len(shared) > len(free):
            assert copies is None
            return
        assert copies is not None
        after = self.table.pages(row).tolist()
        assert copies == [(before[i], after[i]) for i in shared]
        assert {new for _, new in copies} <= free
        assert all(after[i] not in others for i in written)
        assert [after[i] for i in range(len(after)) if i not in shared] == [
            before[i] for i in range(len(before)) if i not in shared
        ]
        self.owned[row] = after

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), window=st.integers(1, 12))
    def evict(self, data, window):
        row = data.draw(st.sampled_from(sorted(self.owned)))
        first = data.draw(st.integers(0, 5)) * PAGE_SIZE
        query = first + data.draw(st.integers(0, len(self.owned[row]) * PAGE_SIZE))
        behind = [i for i in range(len(self.owned[row])) if query - (first + (i + 1) * PAGE_SIZE - 1) >= window]
        assert evict_pages(self.table, row, first, query, window) == len(behind)
        self.owned[row] = self.owned[row][len(behind) :]

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def erase(self, data):
        row = data.draw(st.sampled_from(sorted(self.owned)))
        self.table.erase(row)
        del self.owned[row]

    @invariant()
    def pages_are_accounted_for(self):
        in_use = {page for pages in self.owned.values() for page in pages}
        owners = [sum(page in pages for pages in self.owned.values()) for page in range(NUM_PAGES)]
        assert self.table.refcounts.tolist() == owners
        assert self.table.num_free_pages == NUM_PAGES - len(in_use)
        for row, pages in self.owned.items():
            assert self.table.pages(row).tolist() == pages
            assert len(set(pages)) == len(pages)

    @invariant()
    def rows_are_gathered_like_a_loop(self):
        rows = sorted(self.owned)
        counts = np.array([len(self.owned[row]) for row in rows], dtype=np.int64)
        expected = [page for row in rows for page in self.owned[row]]
        assert self.table.pages_of(np.array(rows, dtype=np.int64), counts).tolist() == expected


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pages_return_when_the_last_owner_leaves():
    table = PageTable(4, 2, 3)
    first, second = table.allocate(), table.allocate()
    table.reserve(first, 6)
    share_prefix(table, second, first, 4)
    table.erase(first)
    assert table.num_free_pages == 2
    table.erase(second)
    assert table.num_free_pages == 4


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_impossible_sizes_are_refused(bad):
    with pytest.raises(ConfigError, match="1 or more"):
        PageTable(*bad)


def sequences_in_pages(lens, page_size, num_pages, seed=0):
    """A table with a row for each length, random keys and values, and the pool that holds them."""
    generator = torch.Generator().manual_seed(seed)
    table = PageTable(num_pages, page_size, len(lens))
    rows = [table.allocate() for _ in lens]
    for tokens in range(max(lens)):  # grow in turns, so that the pages of a sequence lie apart
        for row, n in zip(rows, lens, strict=True):
            table.reserve(row, min(tokens + 1, n))
    k, v = (torch.randn(len(lens), 2, max(lens), 8, generator=generator) for _ in range(2))
    k_cache, v_cache = torch.zeros(2, 1, 2, num_pages * page_size, 8)
    for b, (row, n) in enumerate(zip(rows, lens, strict=True)):
        table.assign(
            torch.tensor([row]), torch.arange(n)[None], k[b : b + 1, :, :n], v[b : b + 1, :, :n], k_cache, v_cache
        )
    return table, rows, k, v, k_cache, v_cache


def test_assign_puts_tokens_where_the_table_says():
    table, rows, k, _, k_cache, _ = sequences_in_pages([5, 3, 7], page_size=2, num_pages=9)
    for b, (row, n) in enumerate(zip(rows, [5, 3, 7], strict=True)):
        for position in range(n):
            page = table.pages(row)[position // 2]
            assert torch.equal(k_cache[0, :, page * 2 + position % 2], k[b, :, position])


def test_a_flat_prefill_lands_in_the_same_slots():
    lens = [5, 3, 7]
    table, rows, k, v, k_cache, v_cache = sequences_in_pages(lens, page_size=2, num_pages=9)
    flat = [torch.cat([x[b, :, :n] for b, n in enumerate(lens)], dim=1)[None] for x in (k, v)]
    flat_rows = torch.cat([torch.full((n,), row) for row, n in zip(rows, lens, strict=True)])
    positions = torch.cat([torch.arange(n) for n in lens])
    again = [torch.zeros_like(k_cache), torch.zeros_like(v_cache)]
    table.assign_prefill_no_paging(flat_rows, positions, *flat, *again)
    assert torch.equal(again[0], k_cache) and torch.equal(again[1], v_cache)


@pytest.mark.parametrize("window", [None, 4])
def test_a_converted_mask_attends_to_the_same_keys(window):
    """Decode of three sequences: over their own keys with the logical mask, over the whole pool with the physical."""
    lens, page_size, num_pages = [5, 12, 9], 4, 10
    table, rows, k, v, k_cache, v_cache = sequences_in_pages(lens, page_size, num_pages)
    last = torch.tensor(lens) - 1

    def mask_mod(b, h, q_idx, kv_idx):
        visible = kv_idx <= last[b]
        return visible if window is None else visible & (last[b] - kv_idx < window)

    logical = create_block_mask(mask_mod, 3, None, 1, 12, device="cpu", BLOCK_SIZE=(1, page_size))
    physical = table.convert_logical_block_mask(logical, torch.tensor(rows))
    q = torch.randn(3, 2, 1, 8, generator=torch.Generator().manual_seed(9))
    want = flex_attention(q, k, v, block_mask=logical)
    got = flex_attention(q, k_cache.expand(3, -1, -1, -1), v_cache.expand(3, -1, -1, -1), block_mask=physical)
    torch.testing.assert_close(got, want)
    assert torch.equal(physical.kv_num_blocks, logical.kv_num_blocks)  # as sparse as it was


def test_a_converted_mask_lists_the_pages_of_the_logical_blocks():
    """The lists themselves: uncompiled attention asks the mask alone, and never looks at them."""
    table, lens = PageTable(10, 4, 3), [5, 12, 9]
    rows = [table.allocate() for _ in lens]
    for tokens in range(1, 13):  # in turns, so that no row's pages are neighbours
        for row, length in zip(rows, lens, strict=True):
            table.reserve(row, min(tokens, length))
    last = torch.tensor(lens) - 1
    logical = create_block_mask(lambda b, h, q, kv: kv <= last[b], 3, None, 1, 12, device="cpu", BLOCK_SIZE=(1, 4))
    physical = table.convert_logical_block_mask(logical, torch.tensor(rows))
    listed = 0
    for counts, blocks in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert torch.equal(getattr(logical, counts), getattr(physical, counts))
        for b, row in enumerate(rows):
            count = int(getattr(logical, counts)[b, 0, 0])
            want = table.pages(row)[getattr(logical, blocks)[b, 0, 0, :count].numpy()].tolist()
            assert getattr(physical, blocks)[b, 0, 0, :count].tolist() == want
            listed += count
    assert listed == 2 + 3 + 3


def test_a_block_larger_than_a_page_is_refused():
    table = PageTable(4, 4, 1)
    logical = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 1, 8, device="cpu", BLOCK_SIZE=(1, 8))
    with pytest.raises(ConfigError, match="make the mask with"):
        table.convert_logical_block_mask(logical, torch.tensor([0]))
