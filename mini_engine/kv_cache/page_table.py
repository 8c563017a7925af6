"""The page table: which page of the KV cache holds which tokens of which request.

The KV cache is one pool of equal pages. A running request owns a row of the table, which lists its pages in order of
position, wherever they are in the pool. Each page counts its owners, so requests can share pages (vLLM: Kwon et al.
2023, section 4; vLLM calls a page a *block*). Explained in chapter 06.
"""

import numpy as np
from jaxtyping import Int, Int32, Int64, Shaped

from mini_engine.errors import check_positive

Rows = Int[np.ndarray, " B"]
Pages = Int32[np.ndarray, " n"]


class PageTable:
    """The pages of up to `max_rows` requests over a pool of `num_pages`.

    All bookkeeping is on the host, in numpy. The methods below are the only way to take a page from the pool or to
    return one; other code reads the arrays and never writes to them.

    Args:
        num_pages: pages in the pool.
        page_size: tokens per page.
        max_rows: requests that can run at once.
        max_pages_per_row: pages that one request can hold; default the whole pool.
        num_groups: groups of layers, in each of which a request has pages of its own (`layer_groups.py`). The request
            in row r owns the rows r, r + max_rows, r + 2 * max_rows, …, one for each group.

    Attributes:
        table: [num_groups * max_rows, max_pages_per_row] row b owns `table[b, :counts[b]]`, in order of position. Later
            entries are stale.
        counts: [num_groups * max_rows] pages of each row.
        refcounts: [num_pages] owners of each page.
        generation: [num_pages] how often each page has been taken from the pool. A page id and its generation together
            identify the page's contents, so a stale reference can be recognized.
        num_free_pages: pages in the pool without an owner.
        num_free_rows: rows without a request.

    Raises:
        ConfigError: for a size that is not a positive integer.
    """

    def __init__(
        self, num_pages: int, page_size: int, max_rows: int, max_pages_per_row: int | None = None, num_groups: int = 1
    ) -> None:
        check_positive(num_pages=num_pages, page_size=page_size, max_rows=max_rows, max_pages_per_row=max_pages_per_row)
        self.num_pages, self.page_size, self.max_rows, self.num_groups = num_pages, page_size, max_rows, num_groups
        width = num_pages if max_pages_per_row is None else min(max_pages_per_row, num_pages)
        self.table = np.zeros((num_groups * max_rows, width), dtype=np.int32)
        self.counts = np.zeros(num_groups * max_rows, dtype=np.int64)
        self.refcounts = np.zeros(num_pages, dtype=np.int32)
        self.generation = np.zeros(num_pages, dtype=np.int64)
        # Both are stacks, because the most recently freed page is the most likely to be in the hardware's caches.
        self._free_pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()
        self._free_rows = list(range(max_rows))[::-1]
        self.num_free_pages = num_pages

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate(self) -> int:
        """Take a row, which has no pages yet. Raises IndexError if no row is free; the scheduler checks first."""
        return self._free_rows.pop()

    def release(self, row: int) -> None:
        """Return a row and its pages. A page goes back to the pool when its last owner returns it."""
        self.truncate(row, 0)
        self._free_rows.append(row)

    def missing(self, rows: Rows, num_tokens: Int[np.ndarray, " B"]) -> tuple[Int64[np.ndarray, " B"], int]:
        """Return how many more pages each row needs to hold `num_tokens` tokens in all, and their sum."""
        lacking = np.maximum(num_tokens - self.counts[rows] * self.page_size, 0)
        if np.count_nonzero(lacking) == 0:
            return lacking, 0
        missing = -(-lacking // self.page_size)
        return missing, int(missing.sum())

    def take(self, rows: Rows, num_pages: Int[np.ndarray, " B"]) -> None:
        """Append `num_pages[b]` free pages to row `rows[b]`, for all rows in one assignment.

        Args:
            rows: distinct rows.
            num_pages: pages for each, 0 or more.

        Raises:
            IndexError: if the pool has fewer pages free; nothing has changed then.
        """
        total = int(num_pages.sum())
        pages = self._pop(total)
        owner = rows.repeat(num_pages)
        # Index of each new page among the new pages of its row.
        index = np.arange(total) - (num_pages.cumsum() - num_pages).repeat(num_pages)
        self.table[owner, self.counts[owner] + index] = pages
        self.counts[rows] += num_pages

    def claim(self, num_pages: int) -> Pages:
        """Take free pages for an owner that is not a row; `drop` returns them.

        Raises:
            IndexError: if the pool has fewer pages free; nothing has changed then.
        """
        return self._pop(num_pages)

    def share(self, row: int, pages: Pages) -> None:
        """Append pages that already have an owner; the row becomes another owner of each.

        Args:
            row: a row.
            pages: distinct pages in use, in order of position.
        """
        count = self.counts[row]
        self.table[row, count : count + len(pages)] = pages
        self.counts[row] = count + len(pages)
        self.retain(pages)

    def replace(self, row: int, index: int) -> tuple[int, int]:
        """Replace one of the row's pages with a free page; the caller copies the contents.

        Args:
            row: a row.
            index: index of the page in the row.

        Returns:
            The old page and the new one.

        Raises:
            IndexError: if no page is free; nothing has changed then.
        """
        new = self._pop(1)
        old = self.table[row, index : index + 1].copy()
        self.table[row, index] = new[0]
        self.drop(old)
        return int(old[0]), int(new[0])

    def drop_front(self, row: int, num_pages: int) -> None:
        """Return a row's first pages; the others move up."""
        dropped = self.table[row, :num_pages].copy()
        kept = self.table[row, num_pages : self.counts[row]].copy()
        self.table[row, : len(kept)] = kept
        self.counts[row] = len(kept)
        self.drop(dropped)

    def drop_fronts(self, rows: Rows, num_pages: Int[np.ndarray, " B"]) -> None:
        """Return the first `num_pages[b]` pages of row `rows[b]`, for all of these distinct rows at once."""
        longest = int(self.counts[rows].max(initial=0))
        held, index, first = self.table[rows, :longest], np.arange(longest), num_pages[:, None]
        dropped = held[index < first]
        self.table[rows, :longest] = held[np.arange(len(rows))[:, None], np.minimum(index + first, longest - 1)]
        self.counts[rows] -= num_pages
        pages, owners = np.unique(dropped, return_counts=True)
        self.refcounts[pages] -= (owners - 1).astype(np.int32)  # rows that share a page may drop it at once
        self.drop(pages)

    def truncate(self, row: int, num_pages: int) -> None:
        """Return all pages of a row after its first `num_pages`."""
        dropped = self.table[row, num_pages : self.counts[row]].copy()
        self.counts[row] = min(num_pages, self.counts[row])
        self.drop(dropped)

    def retain(self, pages: Pages) -> None:
        """Add an owner to each of these distinct pages in use, such as the prefix tree, which has no row."""
        self.refcounts[pages] += 1

    def drop(self, pages: Shaped[np.ndarray, " n"]) -> None:
        """Remove an owner from each of these distinct pages, and free those without owners, the first on top."""
        self.refcounts[pages] -= 1
        freed = pages[self.refcounts[pages] == 0][::-1]
        self._free_pages[self.num_free_pages : self.num_free_pages + len(freed)] = freed
        self.num_free_pages += len(freed)

    def rows_of(self, rows: Rows) -> Int[np.ndarray, " _"]:
        """Return the rows of some requests in all groups, group by group: `rows` itself if there is one group."""
        if self.num_groups == 1:
            return rows
        return np.concatenate([rows + group * self.max_rows for group in range(self.num_groups)])

    def pages(self, row: int) -> Pages:
        """Return the row's pages in order of position: a view, valid until the row changes."""
        return self.table[row, : self.counts[row]]

    def pages_of(self, rows: Rows, counts: Int[np.ndarray, " B"]) -> Pages:
        """Return the first `counts[b]` pages of each row, row by row; a view if there is only one row."""
        if len(rows) == 1:
            return self.table[rows[0], : counts[0]]
        longest = int(counts.max(initial=0))
        return self.table[rows, :longest][np.arange(longest) < counts[:, None]]

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens; the last one may be partly filled."""
        return -(-num_tokens // self.page_size)

    def _pop(self, count: int) -> Pages:
        if count > self.num_free_pages:
            raise IndexError(f"{count} pages needed, {self.num_free_pages} are free")
        self.num_free_pages -= count
        pages = self._free_pages[self.num_free_pages : self.num_free_pages + count][::-1].copy()
        self.refcounts[pages] = 1
        self.generation[pages] += 1
        return pages
