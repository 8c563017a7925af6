"""Prefix sharing: requests that begin with the same tokens own the same pages, until they diverge.

Keys and values depend only on their own token and those before it, so equal prefixes have equal pages. A page with
several owners is never written to: a request that is about to write takes a copy first (copy on write: Kwon et al.
2023, section 4.4). Explained in chapter 07.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int32

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


def copy_on_write(table: PageTable, row: int, first: int, end: int) -> list[tuple[int, int]]:
    """Give a row its own copies of the shared pages that it is about to write to.

    Args:
        table: the page table, with a free page for each page that the row shares and writes to.
        row: the row that writes.
        first: index of the first token to be written, counted from the start of the row's first page.
        end: one past the index of the last one; the row has pages for it.

    Returns:
        Pairs (shared page, own page) whose contents must be copied before anything is written.
    """
    written = np.arange(first // table.page_size, table.pages_for(end))
    shared = written[table.refcounts[table.pages(row)[written]] > 1]
    return [table.replace(row, index) for index in shared.tolist()]
