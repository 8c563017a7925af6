"""The page table of the graders: written by its methods only, and otherwise like the engine's."""

import copy

import numpy as np
import pytest

from book.guarded_table import GuardedPageTable
from mini_engine.kv_cache.page_table import PageTable


def used(table: PageTable) -> PageTable:
    """A table after a call of each method that writes."""
    a, b = table.allocate(), table.allocate()
    table.take(np.array([a, b]), np.array([3, 2]))
    table.share(b, table.pages(a)[:2].copy())
    table.replace(b, 2)
    table.drop_front(b, 1)
    table.truncate(a, 2)
    pages = table.claim(2)
    table.retain(pages[:1])
    table.drop(pages)
    table.release(a)
    return table


ARRAYS = ("table", "counts", "refcounts", "generation", "_free_pages")


def test_its_methods_do_what_the_page_table_does() -> None:
    guarded, plain = (used(kind(8, 4, 3)) for kind in (GuardedPageTable, PageTable))
    for name in ARRAYS:
        assert np.array_equal(getattr(guarded, name), getattr(plain, name)), name
    assert guarded.num_free_pages == plain.num_free_pages


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("make", [lambda: GuardedPageTable(8, 4, 3), lambda: used(GuardedPageTable(8, 4, 3))])
def test_nothing_else_writes_to_its_arrays(name: str, make) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(make(), name)[0] = 1


def test_it_is_read_only_after_an_error() -> None:
    table = GuardedPageTable(2, 4, 1)
    with pytest.raises(IndexError):
        table.take(np.array([table.allocate()]), np.array([3]))
    assert not table.refcounts.flags.writeable


def test_a_copy_has_arrays_of_its_own() -> None:
    table = used(GuardedPageTable(8, 4, 3))
    before = table.num_free_pages
    probe = copy.deepcopy(table)
    probe.take(np.array([probe.allocate()]), np.array([1]))
    assert (table.num_free_pages, probe.num_free_pages) == (before, before - 1)
