"""The page table against a model made of plain lists: no page leaks, and none is shared or overwritten unknowingly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mini_engine.errors import ConfigError
from mini_engine.kv_cache.page_table import PageTable

NUM_PAGES, PAGE_SIZE, ROWS = 9, 3, 4


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class PageTableMachine(RuleBasedStateMachine):
    """Random operations, mirrored by a model: the pages of each row, and what they must contain."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_PAGES, PAGE_SIZE, ROWS)
        self.rows: dict[int, list[int]] = {}
        self.contents: dict[int, list[int]] = {}  # of each row, by page
        self.memory = [0] * NUM_PAGES
        self.times_taken = [0] * NUM_PAGES
        self.writes = 0

    def free(self) -> set[int]:
        return set(range(NUM_PAGES)) - {page for pages in self.rows.values() for page in pages}

    def draw_row(self, data: st.DataObject, with_pages: bool = False) -> int:
        return data.draw(st.sampled_from(sorted(row for row, pages in self.rows.items() if pages or not with_pages)))

    def write(self, page: int) -> int:
        self.writes += 1
        self.memory[page] = self.writes
        return self.writes

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule()
    def allocate(self) -> None:
        row = self.table.allocate()
        assert row not in self.rows
        self.rows[row], self.contents[row] = [], []

    @precondition(lambda self: len(self.rows) == ROWS)
    @rule()
    def allocate_too_many(self) -> None:
        with pytest.raises(IndexError):
            self.table.allocate()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """For several rows at once."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        counts = [data.draw(st.integers(0, 3)) for _ in rows]
        free = self.free()
        if sum(counts) > len(free):
            with pytest.raises(IndexError, match=f"{sum(counts)} pages needed, {len(free)} are free"):
                self.table.take(array(*rows), array(*counts))
            return
        self.table.take(array(*rows), array(*counts))
        for row, count in zip(rows, counts, strict=True):
            pages = self.table.pages(row).tolist()
            new = pages[len(pages) - count :]
            assert pages[: len(pages) - count] == self.rows[row] and set(new) <= free
            free -= set(new)
            self.rows[row] = pages
            self.contents[row] += [self.write(page) for page in new]
            for page in new:
                self.times_taken[page] += 1

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Any run of another row's pages, after the pages that the row already has."""
        donor, row = self.draw_row(data, with_pages=True), self.draw_row(data)
        first = data.draw(st.integers(0, len(self.rows[donor])))
        last = data.draw(st.integers(first, len(self.rows[donor])))
        pages = self.rows[donor][first:last]
        if set(pages) & set(self.rows[row]):
            return
        self.table.share(row, np.array(pages, dtype=np.int32))
        self.rows[row] = self.rows[row] + pages
        self.contents[row] = self.contents[row] + self.contents[donor][first:last]

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        row = self.draw_row(data, with_pages=True)
        index = data.draw(st.integers(0, len(self.rows[row]) - 1))
        free = self.free()
        if not free:
            with pytest.raises(IndexError):
                self.table.replace(row, index)
            return
        old, new = self.table.replace(row, index)
        assert old == self.rows[row][index] and new in free
        self.rows[row][index] = new
        self.times_taken[new] += 1
        self.memory[new] = self.memory[old]  # the copy that the caller has to make

    @precondition(lambda self: any(self.rows.values()))
    @rule(data=st.data())
    def write_to_an_own_page(self, data: st.DataObject) -> None:
        row = self.draw_row(data, with_pages=True)
        for index, page in enumerate(self.rows[row]):
            if self.table.refcounts[page] == 1:
                self.contents[row][index] = self.write(page)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop_front(self, data: st.DataObject) -> None:
        row = self.draw_row(data)
        count = data.draw(st.integers(0, len(self.rows[row])))
        self.table.drop_front(row, count)
        self.rows[row], self.contents[row] = self.rows[row][count:], self.contents[row][count:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop_fronts(self, data: st.DataObject) -> None:
        """Rows may drop the same page at once."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, unique=True))
        counts = [data.draw(st.integers(0, len(self.rows[row]))) for row in rows]
        self.table.drop_fronts(array(*rows), array(*counts))
        for row, count in zip(rows, counts, strict=True):
            self.rows[row], self.contents[row] = self.rows[row][count:], self.contents[row][count:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(0, NUM_PAGES))
    def truncate(self, data: st.DataObject, count: int) -> None:
        row = self.draw_row(data)
        self.table.truncate(row, count)
        self.rows[row], self.contents[row] = self.rows[row][:count], self.contents[row][:count]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = self.draw_row(data)
        self.table.release(row)
        del self.rows[row], self.contents[row]

    @invariant()
    def pages_are_accounted_for(self) -> None:
        table = self.table
        owners = [sum(page in pages for pages in self.rows.values()) for page in range(NUM_PAGES)]
        assert table.refcounts.tolist() == owners
        assert table.num_free_pages == owners.count(0)
        assert table.num_free_rows == ROWS - len(self.rows)
        assert table.generation.tolist() == self.times_taken
        for row, pages in self.rows.items():
            assert table.pages(row).tolist() == pages and len(set(pages)) == len(pages)

    @invariant()
    def rows_read_what_they_wrote(self) -> None:
        for row, pages in self.rows.items():
            assert [self.memory[page] for page in pages] == self.contents[row]

    @invariant()
    def rows_are_gathered_like_a_loop(self) -> None:
        rows = sorted(self.rows)
        counts = [max(0, len(self.rows[row]) - row % 2) for row in rows]  # for every second row, all but the last page
        expected = [page for row, count in zip(rows, counts, strict=True) for page in self.rows[row][:count]]
        assert self.table.pages_of(array(*rows), array(*counts)).tolist() == expected

    def teardown(self) -> None:
        """Whatever happened, all pages can be taken once more."""
        for row in self.rows:
            self.table.release(row)
        self.table.take(array(self.table.allocate()), array(NUM_PAGES))
        assert self.table.refcounts.tolist() == [1] * NUM_PAGES and self.table.num_free_pages == 0


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pages_return_when_the_last_owner_leaves():
    table = PageTable(4, 2, 3)
    first, second = table.allocate(), table.allocate()
    table.take(array(first), array(3))
    table.share(second, table.pages(first)[:2])
    table.release(first)
    assert table.num_free_pages == 2
    table.release(second)
    assert table.num_free_pages == 4


@given(st.integers(1, 5), st.integers(0, 6), st.integers(0, 30))
def test_missing_pages_are_those_that_a_length_lacks(page_size, held, num_tokens):
    table = PageTable(80, page_size, 2)
    rows = array(table.allocate(), table.allocate())
    table.take(rows, array(held, 0))
    missing, total = table.missing(rows, array(num_tokens, num_tokens))
    assert total == missing.sum()
    table.take(rows, missing)
    for row in rows.tolist():
        capacity = page_size * int(table.counts[row])
        assert capacity >= num_tokens
        assert capacity - page_size < num_tokens or missing[row] == 0  # and not a page too many
    assert table.pages_for(num_tokens) == missing[1]


def test_a_row_has_no_more_entries_than_its_longest_request():
    assert PageTable(100, 16, 2, max_pages_per_row=7).table.shape == (2, 7)
    assert PageTable(5, 16, 2, max_pages_per_row=7).table.shape == (2, 5)


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, True)])
def test_impossible_sizes_are_refused(bad):
    with pytest.raises(ConfigError, match="1 or more"):
        PageTable(*bad)
