"""Homework of chapter 09: attention that reads shared pages once, the levels of shared
pages, and a radix tree.

`find_levels` is a part of the engine: once its checks pass, `mini-engine generate
--homework` runs the `cascade` backend on it. `Level`, `Edge`, `Tree` and `ReadPages`
are given. A page is a whole number, as in chapter 06.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/09_cascade_and_prefix_cache

    # the next of three hints for the exercise NAME
    pytest chapters/09_cascade_and_prefix_cache --hint NAME
"""

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from mini_engine.attention.state import AttentionState
from mini_engine.kv_cache.page_table import PageTable

Tokens = Int32[np.ndarray, " n"]
Pages = Int32[np.ndarray, " m"]
# Reads pages from the KV cache: their keys and their values, each [m * page_size, Hk,
# D].
ReadPages = Callable[[Pages], tuple[Tensor, Tensor]]


class Level(NamedTuple):
    """One level of a cascade: groups of requests that share pages, and their depths.

    Requests are in an order that makes sharers neighbors. Requests that join one
    another form a group; a request that does not join the one before it, and that the
    one after it does not join, is alone.

    Attributes:
        joined: whether each request belongs to the group of the request before it;
            False for the first one.
        depth: pages of each request that this level and the levels outside it hold. All
            requests of a group have the same depth. A request that is alone keeps the
            depth that it has in the level outside this one, or 0.
    """

    joined: Bool[np.ndarray, " B"]
    depth: Int64[np.ndarray, " B"]


@dataclass(eq=False)
class Edge:
    """An edge of a radix tree and the node at its end.

    The edge holds consecutive full pages; the node holds the edges that continue them.

    Attributes:
        tokens: [m * page_size] the tokens of its pages.
        pages: [m] its pages.
        parent: the edge before it; None for the root, which has no pages.
        children: the edges below it, by the bytes of the tokens in the first page of
            each.
        last_use: when it was last used; see `Tree.use`.
    """

    tokens: Tokens
    pages: Pages
    parent: "Edge | None" = None
    children: dict[bytes, "Edge"] = field(default_factory=dict)
    last_use: int = 0


class Tree:
    """A radix tree over the pages of a table, still empty: the base of `RadixTree`.

    Args:
        table: the page table. The tree is one more owner of each of its pages.

    Attributes:
        root: the edge where all texts begin. It has no pages.
        time: how many uses there have been.
    """

    def __init__(self, table: PageTable) -> None:
        self.table, self.time = table, 0
        nothing = np.zeros(0, dtype=np.int32)
        self.root = Edge(nothing, nothing)

    def use(self, edge: Edge) -> None:
        """Note that an edge and all edges above it are used now."""
        self.time += 1
        on_path: Edge | None = edge
        while on_path is not None:
            on_path.last_use = self.time
            on_path = on_path.parent

    def edges(self) -> list[Edge]:
        """List all edges with pages, each after its parent."""
        found = list(self.root.children.values())
        for edge in found:
            found += edge.children.values()
        return found


def two_level_attention(
    q: Float[Tensor, "B Hq D"],
    read_pages: ReadPages,
    shared_pages: Pages,
    own_indptr: Int32[np.ndarray, " B+1"],
    own_pages: Pages,
    own_lens: Int32[np.ndarray, " B"],
    *,
    scale: float,
) -> AttentionState:
    """Compute the attention of a step's decodes, reading each shared page once.

    Every request has one query, which sees all keys of the request: first those in the
    shared pages, all of them full, then those in its own pages. What must hold:
        - `read_pages` reads each shared page once, however many requests there are, and
          each own page once.
        - In a request's last own page only the first keys count; the slots after them
          may hold anything, even NaN.
        - There may be no shared pages at all, and some requests may have no own pages.
          Each request has at least one key.

    Args:
        q: one query for each request.
        read_pages: reads pages from the KV cache.
        shared_pages: the pages with which all requests begin; may be empty.
        own_indptr: first entry of each request in `own_pages`, and their number.
        own_pages: the other pages of all requests, one request after the other.
        own_lens: keys of each request in its own pages; 0 if it has none.
        scale: factor of the scores.

    Returns:
        The state over all keys of each request, as `attention_state` computes it.

    Example: every value is its page's number, and all keys are 0, so the output is a
    mean. Pages have two tokens. Both requests share page 5, and the first one also has
    the first token of page 8.

        >>> def read_pages(pages):
        ...     values = torch.from_numpy(pages).repeat_interleave(2).float()
        ...     return torch.zeros(len(values), 1, 1), values[:, None, None]
        >>> lists = [5], [0, 1, 1], [8], [1, 0]
        >>> arrays = (np.array(numbers, dtype=np.int32) for numbers in lists)
        >>> q = torch.zeros(2, 1, 1)
        >>> state = two_level_attention(q, read_pages, *arrays, scale=1.0)
        >>> state.out.flatten().round()
        tensor([6., 5.])
    """
    raise NotImplementedError


def shared_prefixes(
    pages: Int32[np.ndarray, "B W"], limits: Int64[np.ndarray, " B"]
) -> tuple[Int64[np.ndarray, " B"], Int64[np.ndarray, " B"]]:
    """Order requests so that sharers are neighbors, and count what neighbors share.

    Two requests share their first n pages if those are the same pages in the same
    order; equal pages after the first difference do not count. Only the first
    `limits[b]` pages of request b may be shared: the entries after them are stale, or
    pages that this step still writes to. What must hold:
        - In the order that you return, all requests that begin with the same n pages
          are next to each other, for every n. So no page that could be shared is
          missed: the sum of your counts is as large as any order makes it.
        - The arguments belong to the caller: leave them as they are.

    The engine does this for hundreds of requests with thousands of pages, so it has no
    Python loop; the grader allows one.

    Args:
        pages: the first W pages of each request, of which the first `limits[b]` count.
        limits: at most W, 0 for a request that shares nothing.

    Returns:
        The index of each request in the new order, and, in that order, how many pages
        each request shares with the one before it; 0 for the first.

    Example: requests 0 and 2 share two pages. Request 3 has page 7 as well, after
    another one.

        >>> pages = [4, 7, 1], [6, 0, 0], [4, 7, 2], [5, 7, 3]
        >>> limits = np.array([3, 1, 3, 3])
        >>> order, prefixes = shared_prefixes(np.array(pages, dtype=np.int32), limits)
        >>> order.tolist(), prefixes.tolist()
        ([0, 2, 3, 1], [0, 2, 0, 0])
    """
    raise NotImplementedError


def find_levels(
    prefixes: Int64[np.ndarray, " B"], saving: Float[np.ndarray, " B"], cost: float
) -> list[Level]:
    """Find the levels of a cascade that pay off.

    The requests are in an order that makes sharers neighbors, and `prefixes` says what
    neighbors share. A level lets groups of neighbors read pages together. It costs
    `cost` seconds, whatever it holds, and saves `saving[b]` seconds for each page that
    request b does not read again: each page that the level adds to the depth of a
    request that has joined the one before it. What must hold:
        - A group holds all pages that its requests have in common, at least one more
          than the level outside.
        - Groups nest: a request that joins the one before it in a level has joined it
          in all levels outside.
        - Every level pays: removing any one of them would not increase what the levels
          save in all, costs included. Without a level, the groups of the next level
          inside hold its pages too, so only the requests that do not join there read
          those pages again.
        - If levels cost nothing, no page is read twice by requests that could share it
          and whose saving is above 0.
        - No level is missing inside the innermost one: for every n, take the requests
          that have joined there (if there is no level, all) and share at least n pages
          beyond its depth with the one before them. A further level of n pages would
          save n times the sum of their `saving`, and this must not exceed `cost`.

    You need not find the best of all sets of levels. `prefixes` belongs to the caller:
    leave it as it is.

    Args:
        prefixes: [B] pages that each request shares with the one before it, 0 for the
            first.
        saving: [B] seconds for each page that a request does not read again, at least
            0.
        cost: seconds of one level, at least 0.

    Returns:
        The levels, outermost first; an empty list if none pays.

    Example: the four requests of a step. All of them share 3 pages, and the first two
    share 5 more.

        >>> prefixes, saving = np.array([0, 8, 3, 3]), np.ones(4)
        >>> for level in find_levels(prefixes, saving, cost=4.0):
        ...     print(level.joined.tolist(), level.depth.tolist())
        [False, True, True, True] [3, 3, 3, 3]
        [False, True, False, False] [8, 8, 3, 3]
        >>> [level.depth.tolist() for level in find_levels(prefixes, saving, cost=6.0)]
        [[3, 3, 3, 3]]
        >>> find_levels(prefixes, saving, cost=10.0)
        []
    """
    raise NotImplementedError


class RadixTree(Tree):
    """The prefix cache: keeps pages after their requests end, and finds them by tokens.

    `Tree` provides the constructor, the attributes `table`, `time` and `root`, and the
    methods `use` and `edges`. A text is found page by page, full pages only; a page has
    `table.page_size` tokens. A key of `children` is `tobytes()` of the tokens in the
    first page of the child. Write the four methods.

    Example: pages of 2 tokens. Two texts share page 0.

        >>> table = PageTable(num_pages=6, page_size=2, max_rows=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.take(np.array([a]), np.array([3]))
        >>> tree, text = RadixTree(table), np.arange(1, 8, dtype=np.int32)
        >>> tree.insert(text, table.pages(a))
        >>> other = np.array([1, 2, 9, 9], dtype=np.int32)
        >>> table.share(b, tree.match(other)), table.take(np.array([b]), np.array([1]))
        (None, None)
        >>> tree.insert(other, table.pages(b))
        >>> [edge.pages.tolist() for edge in tree.edges()], table.refcounts.tolist()
        ([[0], [1, 2], [3]], [3, 2, 2, 2, 0, 0])
        >>> table.release(a)
        >>> tree.evict(1), tree.match(text).tolist(), table.num_free_pages
        (1, [0, 1], 3)
    """

    def split(self, edge: Edge, num_pages: int) -> Edge:
        """Split an edge in two after its first pages.

        A new edge takes the first pages, and the place of the edge among its parent's
        children. The edge itself becomes the rear part: it keeps its children and is
        the only child of the new edge. Both parts have the edge's time of last use.

        Args:
            edge: an edge of the tree, not the root.
            num_pages: pages of the front part, at least 1 and fewer than the edge has.

        Returns:
            The new edge.
        """
        raise NotImplementedError

    def match(self, token_ids: Tokens) -> Pages:
        """Find the longest chain of full pages that holds the first tokens of a text.

        Only the pages that are found count as used: if the chain ends inside an edge,
        the edge is split.

        Args:
            token_ids: [n] the text; it may end inside a page.

        Returns:
            [m] the pages, of dtype int32, in order of position.
        """
        raise NotImplementedError

    def insert(self, token_ids: Tokens, pages: Pages) -> None:
        """Insert the full pages of a text.

        The tree is one more owner of each page that is new to it. If the tree already
        has pages for the beginning of the text, it keeps those and does not take the
        request's pages for the same tokens. The pages that are new become one edge. All
        pages of the text count as used now. Store copies: the arrays belong to the
        caller, who will change them.

        Args:
            token_ids: [n] the text.
            pages: [m] the pages that hold the text, from the first one on, including a
                last page that is not full.
        """
        raise NotImplementedError

    def evict(self, num_pages: int) -> int:
        """Return to the pool up to `num_pages` pages that only the tree owns.

        A page can be evicted if no other page follows it in the tree and its refcount
        is 1. Among the edges whose last page can be evicted, the least recently used
        one loses pages from its end, one after the other; an edge without pages leaves
        the tree. `table.drop` returns pages to the pool.

        Args:
            num_pages: how many pages are needed.

        Returns:
            How many pages were returned: fewer than `num_pages` only if no more can be
            evicted.
        """
        raise NotImplementedError


def cascade_attention(
    q: Float[Tensor, "B Hq D"],
    read_pages: ReadPages,
    pages: ListLike[Pages],
    kv_lens: Int32[np.ndarray, " B"],
    levels: ListLike[Level],
    *,
    page_size: int,
    scale: float,
) -> AttentionState:
    """Challenge: cascade attention over a tree of prefixes, with any number of levels.

    Every request has one query, which sees all keys of the request. The requests are in
    the order of the levels. In each level every group attends to the pages that the
    level adds to its depth, and in the end every request attends to the pages that no
    level holds. What must hold:
        - `read_pages` reads each page of each group once, and each page that no level
          holds once.
        - In a request's last page only the first keys count, as `kv_lens` says; the
          slots after them may hold anything, even NaN. Pages in levels are full.
        - A request may be alone in some levels or in all, and may have no page after
          its levels.

    Args:
        q: one query for each request.
        read_pages: reads pages from the KV cache.
        pages: all pages of each request, in order of position.
        kv_lens: [B] keys of each request, at least 1.
        levels: as `find_levels` returns them; may be empty.
        page_size: keys of a page.
        scale: factor of the scores.

    Returns:
        The state over all keys of each request.

    Example: as in `two_level_attention`, every value is its page's number, all keys are
    0, and pages have two tokens. Both requests share page 5, and the first one also has
    the first token of page 8.

        >>> def read_pages(pages):
        ...     values = torch.from_numpy(pages).repeat_interleave(2).float()
        ...     return torch.zeros(len(values), 1, 1), values[:, None, None]
        >>> pages = [np.array(own, dtype=np.int32) for own in ([5, 8], [5])]
        >>> kv_lens = np.array([3, 2])
        >>> level = Level(joined=np.array([False, True]), depth=np.array([1, 1]))
        >>> q = torch.zeros(2, 1, 1)
        >>> state = cascade_attention(
        ...     q, read_pages, pages, kv_lens, [level], page_size=2, scale=1.0
        ... )
        >>> state.out.flatten().round()
        tensor([6., 5.])
    """
    raise NotImplementedError
