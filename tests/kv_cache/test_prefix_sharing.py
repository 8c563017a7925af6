"""Shared pages and their copies, by hand; random traffic is in test_page_table.py."""

from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import common_prefix, copy_on_write, share_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def two_rows(num_tokens: int, num_pages: int = 8, page_size: int = 4) -> tuple[PageTable, int, int]:
    """A table in which the second row begins with the first row's pages for so many tokens."""
    table = PageTable(num_pages, page_size, 2)
    donor, row = table.allocate(), table.allocate()
    table.reserve(donor, 12)
    share_prefix(table, row, donor, num_tokens)
    return table, donor, row


@given(TOKENS, TOKENS, TOKENS)
def test_common_prefix_is_where_two_lists_diverge(prefix, a, b):
    a, b = prefix + a, prefix + b
    length = common_prefix(a, b)
    assert length >= len(prefix) and a[:length] == b[:length]
    assert length in (len(a), len(b)) or a[length] != b[length]


@given(st.integers(0, 12))
def test_sharing_takes_the_page_of_the_last_token_too(num_tokens):
    table, donor, row = two_rows(num_tokens)
    count = -(-num_tokens // 4)
    assert table.pages(row).tolist() == table.pages(donor).tolist()[:count]
    assert table.refcounts[table.pages(donor)].tolist() == [2] * count + [1] * (3 - count)
    assert table.num_free_pages == 5


def test_only_what_is_written_is_copied_and_only_where_it_is_shared():
    table, donor, row = two_rows(10)
    first = table.pages(donor).tolist()
    ((old, new),) = copy_on_write(table, row, 10, 12) or []
    assert old == first[2] and new not in first
    assert table.pages(row).tolist() == [*first[:2], new] and table.pages(donor).tolist() == first
    assert copy_on_write(table, row, 10, 12) == [] == copy_on_write(table, donor, 11, 12)


def test_the_last_writer_needs_no_copy():
    """Two owners, both about to write: the second to ask finds itself alone."""
    table, donor, row = two_rows(10)
    assert len(copy_on_write(table, donor, 10, 11) or []) == 1
    assert copy_on_write(table, row, 10, 11) == []


def test_too_few_free_pages_change_nothing():
    table, donor, row = two_rows(12, num_pages=4)
    before = table.table.copy(), table.refcounts.copy(), list(table.free_pages)
    assert copy_on_write(table, row, 4, 12) is None  # two pages, one free
    assert (before[0] == table.table).all() and (before[1] == table.refcounts).all() and before[2] == table.free_pages
    assert len(copy_on_write(table, row, 8, 12) or []) == 1
    assert table.pages(donor)[2] != table.pages(row)[2]
