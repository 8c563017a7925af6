"""Prefix sharing: sequences that begin with the same tokens own the same pages, until they diverge.

Keys and values depend on the tokens before them and on nothing else, so equal beginnings have equal pages. A page that
several own is never written to: whoever wants to write takes a copy first (Kwon et al. 2023, section 4.4).
Explained in chapter 07.
"""

from collections.abc import Sequence as ListLike

from mini_engine.kv_cache.page_table import PageTable


def share_prefix(table: PageTable, row: int, donor: int, num_tokens: int) -> None:
    """Let a row begin with the pages of another: both own them from now on.

    Args:
        table: the page table.
        row: a row without pages.
        donor: the row whose first tokens are the same, and computed.
        num_tokens: how many are. The page of the last of them is shared too, even if the rest of it differs.
    """
    pages = table.pages(donor)[: table.pages_for(num_tokens)]
    table.table[row, : len(pages)] = pages
    table.counts[row] = len(pages)
    table.refcounts[pages] += 1


def copy_on_write(table: PageTable, row: int, first: int, end: int) -> list[tuple[int, int]] | None:
    """Give a row pages of its own where it is about to write.

    Args:
        table: the page table.
        row: the row that writes.
        first: index of the first token to be written, counted from the start of the row's first page.
        end: index behind the last one; the row has pages for it.

    Returns:
        Pairs (shared page, own page) whose contents must be copied before anything is written. None if too few pages
        are free; then nothing has changed.
    """
    written = range(first // table.page_size, table.pages_for(end))
    shared = [index for index in written if table.refcounts[table.table[row, index]] > 1]
    if len(shared) > len(table.free_pages):
        return None
    copies = []
    for index in shared:
        old, new = int(table.table[row, index]), table.free_pages.pop()
        table.release(old)
        table.refcounts[new] = 1
        table.table[row, index] = new
        copies.append((old, new))
    return copies


def common_prefix(a: ListLike[int], b: ListLike[int]) -> int:
    """How many tokens two sequences have in common before they diverge."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
