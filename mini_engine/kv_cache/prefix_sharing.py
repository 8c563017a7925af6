"""Prefix sharing: requests that begin with the same tokens own the same pages, until they diverge.

Keys and values depend on the tokens before them and on nothing else, so equal prefixes have equal pages. A page with
several owners is never written to: a request that is about to write takes a copy first (copy on write: Kwon et al.
2023, section 4.4). Explained in chapter 07.
"""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Int32

from mini_engine.kv_cache.page_table import PageTable

Tokens = Int32[np.ndarray, " n"]
Children = Mapping[int, Mapping[bytes, int]]
ROOT = -1  # parent of the pages with which requests begin


def match_prefix(children: Children, token_ids: Tokens, page_size: int) -> list[int]:
    """Find the longest chain of full pages that holds the first tokens of a prompt.

    Args:
        children: for each page, and ROOT, the pages that follow it, by the bytes of the tokens that they hold.
        token_ids: [n] int32, the prompt.
        page_size: tokens per page.

    Returns:
        The pages, in order of position.
    """
    pages: list[int] = []
    siblings = children.get(ROOT, {})
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        page = siblings.get(token_ids[start : start + page_size].tobytes())
        if page is None:
            break
        pages.append(page)
        siblings = children.get(page, {})
    return pages


class PrefixIndex:
    """Finds pages by the tokens that they, and all pages before them, hold.

    The index owns no page. A page that is returned to the pool stays in it until the page is indexed again; until then
    its generation shows that the entry is stale.

    Args:
        table: the pages.
        match: `match_prefix`, or a reader's.
    """

    def __init__(self, table: PageTable, match: Callable[[Children, Tokens, int], list[int]] = match_prefix) -> None:
        self._table, self._match = table, match
        self._children: dict[int, dict[bytes, int]] = {ROOT: {}}
        # Where each indexed page is listed, and the generation of the page when it was.
        self._listed: dict[int, tuple[int, bytes]] = {}
        self._generation = np.zeros(table.num_pages, dtype=np.int64)

    def match(self, token_ids: Tokens) -> Int32[np.ndarray, " m"]:
        """The longest chain of full pages in use that holds the first tokens of a prompt."""
        pages = np.array(self._match(self._children, token_ids, self._table.page_size), dtype=np.int32)
        return pages[: int(np.argmin(np.append(self._valid(pages), False)))]

    def insert(self, token_ids: Tokens, pages: Int32[np.ndarray, " m"]) -> None:
        """List the full pages of a request; where equal ones are listed already, those stay.

        Args:
            token_ids: the request's tokens, from the first one.
            pages: its pages, from the first one.
        """
        size, parent = self._table.page_size, ROOT
        for index, own in enumerate(pages[: len(token_ids) // size].tolist()):
            key = token_ids[index * size : (index + 1) * size].tobytes()
            listed = self._children.setdefault(parent, {}).get(key)
            if listed is None or not self._valid(listed):  # perhaps `own` itself, taken from the pool once more
                self._list(own, parent, key)
                listed = own
            parent = listed

    def _valid(self, pages: int | Int32[np.ndarray, " m"]) -> np.bool_ | Bool[np.ndarray, " m"]:
        table = self._table
        return (table.refcounts[pages] > 0) & (table.generation[pages] == self._generation[pages])

    def _list(self, page: int, parent: int, key: bytes) -> None:
        if page in self._listed:  # under what it held before
            before, old_key = self._listed[page]
            if self._children.get(before, {}).get(old_key) == page:
                del self._children[before][old_key]
        self._children[page] = {}
        self._children.setdefault(parent, {})[key] = page
        self._listed[page] = parent, key
        self._generation[page] = self._table.generation[page]


def copy_on_write(table: PageTable, row: int, first: int, end: int) -> list[tuple[int, int]]:
    """Give a row pages of its own where it is about to write.

    Args:
        table: the page table, with a free page for each page that the row shares and writes to.
        row: the row that writes.
        first: index of the first token to be written, counted from the start of the row's first page.
        end: index behind the last one; the row has pages for it.

    Returns:
        Pairs (shared page, own page) whose contents must be copied before anything is written.
    """
    written = np.arange(first // table.page_size, table.pages_for(end))
    shared = written[table.refcounts[table.pages(row)[written]] > 1]
    return [table.replace(row, index) for index in shared.tolist()]
