"""Eviction behind a window: no page too early, none too late."""

from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.sliding_window import evict_pages


@given(st.integers(1, 5), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_growing_row_holds_the_pages_of_its_window_and_no_other(page_size, window, chunks):
    """Each page that is held has a key that the next query or a later one sees, and no such page is missing."""
    table = PageTable(120, page_size, 1)
    row = table.allocate()
    first_position = computed = 0
    owned: dict[int, int] = {}  # block number in the sequence -> page
    for chunk in chunks:
        first_position += evict_pages(table, row, first_position, computed, window) * page_size
        assert table.reserve(row, computed + chunk - first_position)
        needed = {key // page_size for key in range(max(0, computed - window + 1), computed + chunk)}
        held = range(first_position // page_size, first_position // page_size + len(table.pages(row)))
        assert set(held) == needed
        pages = dict(zip(held, table.pages(row).tolist(), strict=True))
        assert all(pages[block] == owned[block] for block in pages.keys() & owned.keys())
        assert table.num_free_pages == 120 - len(pages)
        owned = pages
        computed += chunk


def test_a_row_gives_up_no_more_pages_than_it_has():
    table = PageTable(4, 2, 1)
    row = table.allocate()
    assert evict_pages(table, row, 0, 100, 1) == 0
    table.reserve(row, 4)
    assert evict_pages(table, row, 0, 100, 1) == 2
    assert table.num_free_pages == 4
