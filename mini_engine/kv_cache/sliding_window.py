"""Sliding window: the oldest pages of a sequence go back to the pool once no query can see them any more.

A sequence of any length then holds the same few pages (Beltagy et al. 2020; Jiang et al. 2023, "Mistral 7B", rolling
buffer cache). Explained in chapter 07.
"""

from mini_engine.kv_cache.page_table import PageTable


def evict_pages(table: PageTable, row: int, first_position: int, next_query: int, window: int) -> int:
    """Give up the oldest pages of a row that lie behind the window of its next query, and so of all later ones.

    Args:
        table: the page table.
        row: the row of the sequence.
        first_position: position of the first token in the row's first page.
        next_query: position of the first token that is not computed yet.
        window: keys that a query may see, its own included.

    Returns:
        How many pages were given up.
    """
    oldest_visible = next_query - window + 1
    num_pages = min(max(oldest_visible - first_position, 0) // table.page_size, int(table.counts[row]))
    kept = table.pages(row)[num_pages:].copy()
    for page in table.pages(row)[:num_pages].tolist():
        table.release(page)
    table.table[row, : len(kept)] = kept
    table.counts[row] = len(kept)
    return num_pages
