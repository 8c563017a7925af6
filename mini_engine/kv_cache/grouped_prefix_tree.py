"""Prefix tree for layer groups: which pages of each group hold the first tokens of a prompt.

The tree is that of the first group, whose layers see all keys. Beside each of its pages, it keeps the pages of the
other groups with the same tokens. Their layers have windows, so a request that shares a prefix reads only the last ones
of them. A prefix can be shared as far as each group still has the pages of the window at its end (vLLM: hybrid KV cache
manager). Explained in chapter 15.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Int32

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import Children, Tokens, match_prefix
from mini_engine.kv_cache.prefix_tree import Node, Pages, Place, PrefixTree

PagesOfGroups = Sequence[Int32[np.ndarray, " _"]]  # one array for each group of layers, of different lengths


class GroupedPrefixTree(PrefixTree):
    """A prefix tree whose pages have pages of other groups of layers beside them.

    The tree owns these, too. A page of another group is evicted together with the page that it is beside, or earlier to
    make room. Pages in the middle of an edge are evicted first: they serve only a prompt that is the first to diverge
    there. Pages of the last window of an edge stay as long as the edge. Later prompts diverge at the ends of edges,
    because the first lookup has split the edge where its match ended. If these pages were recycled as soon as they left
    the windows of running requests, no later prompt could share anything (vLLM, issue 48435).

    Args:
        table: the pages of all groups.
        windows: most keys that the layers of each group see, without the first group.
        match: as for `PrefixTree`.
    """

    def __init__(
        self,
        table: PageTable,
        windows: Sequence[int],
        match: Callable[[Children, Tokens, int], Sequence[int]] = match_prefix,
    ) -> None:
        super().__init__(table, match)
        # Pages that the query right after a page boundary sees in each group, if there are as many.
        self._tails = [-(-(window - 1) // table.page_size) for window in windows]
        # [groups, pages] of each page in the tree, the pages beside it; -1 if there is none.
        self._beside = np.full((len(windows), table.num_pages), -1, dtype=np.int32)
        self._thick: dict[Node, None] = {}  # edges that may have pages beside them before the window at their end

    def match_groups(self, token_ids: Tokens, context: Hashable = ()) -> PagesOfGroups:
        """Find the pages of each group that hold the first tokens of a prompt, as far as the next query sees them.

        Args:
            token_ids: [n] the prompt.
            context: as for `match`.

        Returns:
            The pages of each group, in order of position. All groups end at the same page; the first group begins with
            the prompt, and the others with the first page that the query after the last page sees.
        """
        pages = self.match(token_ids, context)
        beside, index = self._beside[:, pages], np.arange(len(pages))
        is_end = np.ones(len(pages), dtype=np.bool_)  # whether the prefix up to and including a page can be shared
        for own, tail in zip(beside, self._tails, strict=True):
            last_missing = np.maximum.accumulate(np.where(own < 0, index, -1))
            is_end &= index - last_missing >= np.minimum(tail, index + 1)
        end = int(index[is_end].max(initial=-1)) + 1
        return [pages[:end], *(own[max(end - tail, 0) : end] for own, tail in zip(beside, self._tails, strict=True))]

    def insert_groups(
        self,
        token_ids: Tokens,
        pages: PagesOfGroups,
        num_evicted: Sequence[int],
        after: Place | None = None,
        context: Hashable = (),
    ) -> Place:
        """Insert the full pages of a request in all groups. Where the tree has a page already, it keeps that page.

        Args:
            token_ids: as for `insert`.
            pages: the pages of each group.
            num_evicted: in each group, pages that the request has had before these; 0 in the first group.
            after: as for `insert`.
            context: as for `insert`.

        Returns:
            The place after the last full page.
        """
        node, end = self.insert(token_ids, pages[0], after, context)
        path = node.path
        for beside, own, first in zip(self._beside, pages[1:], num_evicted[1:], strict=True):
            of_path = path[first:]
            lacks = beside[of_path] < 0
            new = own[: len(of_path)][lacks]
            beside[of_path[lacks]] = new
            self._refcount_if_cached[new] = 1
            self._table.retain(new)
        edge = node
        while edge.parent is not None and edge.end > min(num_evicted[1:]):
            self._thick[edge] = None
            edge = edge.parent
        return node, end

    def evict(self, num_pages: int) -> int:
        """Return cached pages to the pool, first those in the middle of edges.

        Args:
            num_pages: how many pages.

        Returns:
            How many pages were returned: fewer only if there are no more, and more if a page of the first group had
            pages beside it.
        """
        num_freed = 0
        for node in list(self._thick):
            if num_freed >= num_pages:
                break
            num_freed += self._thin(node, num_pages - num_freed)
        self.num_evicted += num_freed
        return num_freed + (super().evict(num_pages - num_freed) if num_freed < num_pages else 0)

    # --- details -----------------------------------------------------------------------------------------------------

    def _thin(self, node: Node, num_pages: int) -> int:
        """Free cached pages of the windowed groups before the last window of an edge; return how many."""
        num_freed, num_left = 0, 0
        for group, tail in enumerate(self._tails):
            pages = node.pages[: max(node.num_pages - tail, 0)]
            pages = pages[self._beside[group, pages] >= 0]
            cached = pages[self._table.refcounts[self._beside[group, pages]] == 1][: num_pages - num_freed]
            self._drop_beside(group, cached)
            num_freed, num_left = num_freed + len(cached), num_left + len(pages) - len(cached)
        if num_left == 0:
            del self._thick[node]
        return num_freed

    def _add(self, node: Node) -> Node:
        self._thick[node] = None  # it may be the front of an edge with such pages
        return super()._add(node)

    def _remove(self, node: Node) -> int:
        pages, num_free = node.pages, self._table.num_free_pages
        super()._remove(node)
        self._thick.pop(node, None)
        for group in range(len(self._tails)):
            self._drop_beside(group, pages)
        return self._table.num_free_pages - num_free

    def _drop_beside(self, group: int, pages: Pages) -> None:
        """Remove the pages of a group beside some pages."""
        own = self._beside[group, pages]
        own = own[own >= 0]
        self._beside[group, pages] = -1
        self._refcount_if_cached[own] = -1
        self._table.drop(own)
