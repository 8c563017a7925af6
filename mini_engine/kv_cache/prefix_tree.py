"""Prefix tree: finds full pages by their tokens, and keeps them cached after their requests have ended.

Keys and values depend on a token and on all tokens before it, so the pages of all requests form a tree, in which each
path from the root is the beginning of a text. Chains of pages without a branch are merged into one edge, which makes it
a radix tree (Zheng et al. 2024, "SGLang", section 3, RadixAttention). Explained in chapters 07 and 09.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import ROOT, Children, Tokens, match_prefix

Pages = Int32[np.ndarray, " m"]  # as in PageTable, but with another axis name than the n tokens


class Node:
    """An edge of the tree and the node at its end: a run of full pages, and the edges that continue it.

    While a node is in the tree, pages are only appended at its end or split off its front. `PrefixTree` relies on that
    to continue an insertion where an earlier one ended.

    Args:
        parent: the node where the edge begins; None for the root, which has no pages.
        start: pages between the root and the edge.
        tokens: [m * page_size] the tokens of its pages.
        pages: [m] its pages.
        page_size: tokens per page.

    Attributes:
        children: first page of each edge that begins at this node, by the bytes of the tokens in that page.
        num_pages: pages of the edge.
    """

    def __init__(self, parent: "Node | None", start: int, tokens: Tokens, pages: Pages, page_size: int) -> None:
        self.parent, self.start, self.num_pages = parent, start, len(pages)
        self.children: dict[bytes, int] = {}
        self._tokens, self._pages, self._size = tokens, pages, page_size

    @property
    def end(self) -> int:
        """Pages between the root and the node."""
        return self.start + self.num_pages

    @property
    def pages(self) -> Pages:
        return self._pages[: self.num_pages]

    @property
    def path(self) -> Pages:
        """The pages between the root and the node, in order of position."""
        node, path = self, [np.zeros(0, dtype=np.int32)]
        while node.parent is not None:
            path.append(node.pages)
            node = node.parent
        return np.concatenate(path[:0:-1] or path)

    @property
    def key(self) -> bytes:
        """The tokens of the first page, the edge's key in its parent's `children`."""
        return self._tokens[: self._size].tobytes()

    def tokens(self, first: int, end: int) -> Tokens:
        """Return the tokens of pages `first` to `end - 1`, counted from the root."""
        return self._tokens[(first - self.start) * self._size : (end - self.start) * self._size]

    def append(self, tokens: Tokens, pages: Pages) -> None:
        """Append pages. The arrays double when they are full, so the cost of a page does not grow with the edge."""
        end = self.num_pages + len(pages)
        if end > len(self._pages):
            capacity = max(end, 2 * len(self._pages))
            self._tokens = np.resize(self._tokens, capacity * self._size)
            self._pages = np.resize(self._pages, capacity)
        self._tokens[self.num_pages * self._size : end * self._size] = tokens
        self._pages[self.num_pages : end] = pages
        self.num_pages = end

    def split(self, depth: int) -> "Node":
        """Split the edge after the page `depth - 1`, and return the front part. This node keeps the rest."""
        front = Node(self.parent, self.start, self._tokens, self._pages, self._size)
        front.num_pages = depth - self.start
        self._tokens, self._pages = self.tokens(depth, self.end).copy(), self.pages[front.num_pages :].copy()
        self.parent, self.start, self.num_pages = front, depth, len(self._pages)
        front.children[self.key] = int(self._pages[0])
        return front

    def clear(self) -> None:
        """Drop the pages of an edge that is no longer in the tree."""
        self.num_pages = 0
        self._tokens, self._pages = self._tokens[:0], self._pages[:0]


Place = tuple[Node, int]  # a node, and the number of pages between the root and a page boundary on its edge


class PrefixTree:
    """The pages that requests can share: those of running requests and, as a cache, those of earlier requests.

    The tree is an owner of each page in it. A page without another owner is *cached*: it stays until it is evicted to
    make room. The least recently used pages are evicted first, and each text from its end.

    A page may be inserted before its keys are computed, if the step that computes them is launched before, or together
    with, the first step that reads them. Only full pages are inserted, so no page in the tree is written to later.

    Args:
        table: the pages.
        match: `match_prefix`, or a reader's version of it, which finds the edge that continues a path.

    Attributes:
        num_evicted: pages that have been evicted so far.
    """

    def __init__(
        self, table: PageTable, match: Callable[[Children, Tokens, int], Sequence[int]] = match_prefix
    ) -> None:
        self._table, self._match = table, match
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # by the first page of the edge
        # Least recently used first; within a path, the node farthest from the root first.
        self._by_use: OrderedDict[Node, None] = OrderedDict()
        self._refcount_if_cached = np.full(table.num_pages, -1, dtype=np.int32)  # 1 for the tree's pages
        self.num_evicted = 0

    @property
    def pages(self) -> Pages:
        """The pages in the tree, in increasing order."""
        return np.flatnonzero(self._refcount_if_cached == 1).astype(np.int32)

    @property
    def num_evictable(self) -> int:
        """Cached pages: `evict` can return all of them to the pool."""
        return int(np.count_nonzero(self._table.refcounts == self._refcount_if_cached))

    def num_evictable_of(self, pages: Pages) -> int:
        """Count the cached pages among some pages."""
        return int(np.count_nonzero(self._table.refcounts[pages] == self._refcount_if_cached[pages]))

    def match(self, token_ids: Tokens, context: Hashable = ()) -> Pages:
        """Find the pages that hold the first tokens of a prompt.

        Args:
            token_ids: [n] the prompt.
            context: what comes before it. Keys depend on it, so only equal contexts share pages.

        Returns:
            The longest chain of full pages, in order of position. Only `evict` can remove them before a request shares
            them.
        """
        node = self._node_at(*self._walk(token_ids, self._root(context), 0))
        self._use(node)
        return node.path

    def match_len(self, token_ids: Tokens, context: Hashable = ()) -> int:
        """Count the first tokens of a prompt that `match` would find, without marking their pages as used."""
        return self._walk(token_ids, self._root(context), 0)[1] * self._table.page_size

    def insert(self, token_ids: Tokens, pages: Pages, after: Place | None = None, context: Hashable = ()) -> Place:
        """Insert the full pages of a request. If the tree already has pages with the same tokens, it keeps those.

        Args:
            token_ids: [n] the request's tokens, from the first one.
            pages: [m] its pages, from the first one.
            after: the result of the previous call for the same request; the tokens before it are not read again.
            context: as for `match`.

        Returns:
            The place after the last full page.
        """
        size = self._table.page_size
        num_full = len(token_ids) // size
        node, depth = self._walk(token_ids, *self._resume(after, context))
        node = self._node_at(node, depth)
        if depth < num_full:
            new, tokens = pages[depth:num_full], token_ids[depth * size : num_full * size]
            self._table.retain(new)
            self._refcount_if_cached[new] = 1
            if node.parent is None or node.children:
                node = self._add(Node(node, depth, tokens.copy(), new.copy(), size))
            else:
                node.append(tokens, new)
        self._use(node)
        return node, num_full

    def evict(self, num_pages: int) -> int:
        """Return cached pages to the pool.

        Args:
            num_pages: how many pages.

        Returns:
            How many pages were returned: fewer only if there are no more.
        """
        order = self._by_use
        num_freed = num_passed = 0
        while num_freed < num_pages and order:
            node = next(iter(order))
            refcounts = self._table.refcounts[node.pages]
            num_kept = _length_up_to_last(refcounts > 1)
            if not node.children and num_kept < node.num_pages:
                num_kept = max(num_kept, node.num_pages - (num_pages - num_freed))
            elif node.children or num_passed < len(order):  # it is in use, or an edge after it is
                order.move_to_end(node)
                num_passed += 1
                continue
            elif self.num_evictable:
                # Every path ends with pages in use, and the cached pages are before them. They have left a window, or
                # a request computed its own copies of pages that the tree already had. So remove the end of a path
                # from the tree; its request keeps the pages.
                num_kept = _length_up_to_last(refcounts == 1)
            else:
                break
            if num_kept:
                order.move_to_end(self._node_at(node, node.start + num_kept), last=False)
            num_freed += self._remove(node)
            num_passed = 0
        self.num_evicted += num_freed
        return num_freed

    # --- details -----------------------------------------------------------------------------------------------------

    def _walk(self, token_ids: Tokens, node: Node, depth: int) -> Place:
        """Follow the full pages of some tokens from a place on, as far as they are in the tree."""
        size = self._table.page_size
        num_full = len(token_ids) // size
        while True:
            end = min(node.end, num_full)
            if depth < end:
                equal = node.tokens(depth, end) == token_ids[depth * size : end * size]
                first_different = int(equal.argmin())
                if not equal[first_different]:
                    return node, depth + first_different // size
                depth = end
            if depth == num_full:
                return node, depth
            found = self._match({ROOT: node.children}, token_ids[depth * size : (depth + 1) * size], size)
            if len(found) == 0:
                return node, depth
            node = self._nodes[int(found[0])]

    def _root(self, context: Hashable) -> Node:
        if context not in self._roots:
            nothing = np.zeros(0, dtype=np.int32)
            self._roots[context] = Node(None, 0, nothing, nothing, self._table.page_size)
        return self._roots[context]

    def _resume(self, place: Place | None, context: Hashable) -> Place:
        """Return where a place is now; the root if it has been evicted."""
        node, depth = place or (self._root(context), 0)
        while node.start > depth and node.parent is not None:  # the edge was split after the place
            node = node.parent
        return (node, depth) if node.start < depth <= node.end else (self._root(context), 0)

    def _node_at(self, node: Node, depth: int) -> Node:
        """Return the node at a place, and split the edge unless it ends there."""
        if depth == node.end:
            return node
        front = node.split(depth)
        self._nodes[int(node.pages[0])] = node
        return self._add(front)

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        first = int(node.pages[0])
        node.parent.children[node.key] = first
        self._nodes[first] = node
        self._by_use[node] = None
        return node

    def _remove(self, node: Node) -> int:
        """Take an edge without children out of the tree, and return the number of pages that this frees."""
        assert node.parent is not None
        pages, num_free = node.pages, self._table.num_free_pages
        del node.parent.children[node.key], self._nodes[int(pages[0])], self._by_use[node]
        self._refcount_if_cached[pages] = -1
        self._table.drop(pages)
        node.clear()
        if node.parent.parent is None and not node.parent.children:
            self._roots = {context: root for context, root in self._roots.items() if root.children}
        return self._table.num_free_pages - num_free

    def _use(self, node: Node) -> None:
        while node.parent is not None:
            self._by_use.move_to_end(node)
            node = node.parent


def _length_up_to_last(true: Bool[np.ndarray, " n"]) -> int:
    """Return the length of an array up to its last true entry."""
    indices = np.flatnonzero(true)
    return int(indices[-1]) + 1 if len(indices) else 0
