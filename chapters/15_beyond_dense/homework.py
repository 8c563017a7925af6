"""Homework of chapter 15: learned sinks, absorbed latents, the pages of two groups of
layers, their prefix hits, and the selection of pages.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/15_beyond_dense

    # the next of three hints for the exercise NAME
    pytest chapters/15_beyond_dense --hint NAME
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def add_sinks(
    out: Float[Tensor, "n H D"], lse: Float[Tensor, "n H"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "n H D"]:
    """Add a learned sink to attention that was computed without it.

    A learned sink is a logit of a query head. It takes part in the softmax like the
    score of a key, but its value is 0. What must hold:
        - The result is that of one softmax over the scores of all keys and the sink.
        - It holds for scores and sinks of any size, up to 10,000 and more.
        - A query without keys has out = 0 and lse = -inf. Its result is 0.
        - The arguments are not changed.

    Args:
        out: attention over all keys of n queries.
        lse: natural logarithm of the sum of the exponentials of the scores.
        sinks: one logit for each head, in natural units.

    Example: two keys with the score 0 and a sink of 0 share the weight.

        >>> lse = torch.full((1, 1), math.log(2))
        >>> add_sinks(torch.ones(1, 1, 2), lse, torch.zeros(1))
        tensor([[[0.6667, 0.6667]]])
    """
    raise NotImplementedError


def latent_attention(
    q: Float[Tensor, "H NR"],
    latents: Float[Tensor, "m L"],
    rotated: Float[Tensor, "m R"],
    w_uk: Float[Tensor, "H N L"],
    w_uv: Float[Tensor, "H V L"],
) -> Float[Tensor, "H V"]:
    """Compute multi-head latent attention of one query, and expand no key or value.

    The key of head h for token j is w_uk[h] @ latents[j] with rotated[j] appended, and
    its value is w_uv[h] @ latents[j]. What must hold:
        - The result is softmax attention over the m keys, in which a score is the dot
          product of query and key divided by the square root of their size, N + R.
        - The time and the memory per key do not depend on N and V: no key and no value
          of a head is computed.

    Args:
        q: the query of each head; the last R numbers meet `rotated`.
        latents: one for each key, shared by all heads.
        rotated: one rotated key part for each key, shared by all heads.
        w_uk: for each head, the matrix from a latent to N numbers of the key.
        w_uv: for each head, the matrix from a latent to the value.

    Example: with one key, the result is its value.

        >>> ones = torch.ones
        >>> latent_attention(
        ...     ones(1, 3), ones(1, 2), ones(1, 1), ones(1, 2, 2), 3 * ones(1, 1, 2)
        ... )
        tensor([[6.]])
    """
    raise NotImplementedError


class TwoTables:
    """The pages of requests whose layers form two groups, over one pool.

    Layers of the *full* group read all keys. Layers of the *windowed* group read the
    last `window` keys, the query's own included. Each group has a list of pages for
    each request. What must hold after each successful `grow`:
        - The lists are in order of position. The full one begins with position 0 and
          ends with the step's last token.
        - The windowed list ends with the same token. It begins with the first page that
          the step's first query can see.
        - Pages that have left the window are free. The same call may take them.
        - No page is lost, and none has two owners.

    Args:
        num_pages: pages in the pool, numbered from 0.
        page_size: tokens per page.
        window: keys that a query of the windowed group sees, its own included.

    Example: after five tokens, a query at position 5 with a window of 3 sees the keys
    3, 4, and 5, so the windowed group drops its first page.

        >>> tables = TwoTables(num_pages=8, page_size=2, window=3)
        >>> tables.grow("a", 0, 5), tables.num_free
        (True, 2)
        >>> tables.grow("a", 5, 1), tables.num_free
        (True, 3)
        >>> len(tables.full["a"]), len(tables.windowed["a"])
        (3, 2)

    Attributes:
        full: for each running request, the pages of the full group.
        windowed: for each running request, the pages of the windowed group.
    """

    def __init__(self, num_pages: int, page_size: int, window: int) -> None:
        raise NotImplementedError

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        raise NotImplementedError

    def grow(self, request: str, num_computed: int, num_new: int) -> bool:
        """Prepare a step of a request: give it pages for the tokens of the step.

        Args:
            request: its name; a new one begins with num_computed = 0.
            num_computed: tokens whose keys are stored. The step's first query is at
                this position.
            num_new: tokens of the step, at least 1; all their keys are stored.

        Returns:
            Whether there are enough pages. If not, none is taken, but pages that have
            left the window are returned in any case.
        """
        raise NotImplementedError

    def release(self, request: str) -> None:
        """Return all pages of a request that has ended."""
        raise NotImplementedError


def longest_hit(
    full: Sequence[bool], windowed: Sequence[bool], page_size: int, window: int
) -> int:
    """Return how many tokens of a prompt need not be computed, because of cached pages.

    The prompt is cut into pages, and each group of layers caches some of them (see
    `TwoTables`). What must hold:
        - A hit of n tokens is a whole number of pages.
        - The full group has all pages of the hit.
        - The windowed group has all pages of the hit that the query at position n, the
          first one that is computed, can see.
        - The longest hit is returned; 0 if there is none.

    Args:
        full: for each page of the prompt, whether the full group has cached it.
        windowed: the same for the windowed group.
        page_size: tokens per page.
        window: keys that a query of the windowed group sees, its own included.

    Example: the query at position 6 sees the keys from 3 on, so the pages 1 and 2.

        >>> longest_hit([True] * 4, [False, True, True, False], page_size=2, window=4)
        6
    """
    raise NotImplementedError


def select_pages(
    q: Float[Tensor, "Hq D"],
    smallest: Float[Tensor, "P Hk D"],
    largest: Float[Tensor, "P Hk D"],
    budget: int,
) -> Int[Tensor, "Hk n"]:
    """Choose the pages that the query heads of each KV head read.

    For each page and KV head, the smallest and the largest value of each dimension of
    its keys is known. What must hold:
        - The score of a page for one query head is the largest dot product that any key
          between the page's smallest and largest values can have.
        - The score of a page for a KV head is the sum over its query heads, which are
          Hq / Hk consecutive ones.
        - Each KV head gets the pages with the highest scores, and always the last page.
        - They are min(budget, P) pages, in increasing order.

    Args:
        q: one query of each head.
        smallest: the least values of each page's keys.
        largest: the greatest values.
        budget: most pages, at least 1.

    Example: a key of page 0 may have the dot product 6 with this query, one of page 1
    has at most -2, and the last page is always read.

        >>> smallest = torch.tensor([[[-3.0]], [[1.0]], [[0.0]]])
        >>> largest = torch.tensor([[[1.0]], [[4.0]], [[0.0]]])
        >>> select_pages(torch.tensor([[-2.0]]), smallest, largest, budget=2)
        tensor([[0, 2]])
    """
    raise NotImplementedError


class PageScorer:
    """Finds the pages that hold most of the attention, from a summary of each page.

    The keys and the queries are those of the embedded model on a text that you do not
    know. Of 32 to 48 pages, the 8 with the highest scores are read. What must hold:
        - A page's summary has at most 2 D numbers and depends on its keys alone.
        - The scores depend on the arguments only.
        - The share of the attention weights that lies in the 8 pages, averaged over
          layers, heads and queries, is as high as you can make it. It is scored: the
          first page and the last 7 score 0, and the reference scores 1.

    Example: whatever your summaries are, a page that repeats the query's direction is
    better than one that is orthogonal to it.

        >>> keys = torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0], [0.0, 9.0]])
        >>> scorer = PageScorer()
        >>> summaries = scorer.summarize(keys[:, None].expand(-1, 16, -1))
        >>> scores = scorer.scores(torch.tensor([[1.0, 0.0]]), summaries)
        >>> bool(scores[1] > scores[2])
        True
    """

    def summarize(self, keys: Float[Tensor, "P S D"]) -> Float[Tensor, "P n"]:
        """Summarize the keys of each page of one KV head; n is at most 2 D."""
        raise NotImplementedError

    def scores(
        self, q: Float[Tensor, "g D"], summaries: Float[Tensor, "P n"]
    ) -> Float[Tensor, " P"]:
        """Score each page, in order of position, for the g query heads of a KV head.

        Args:
            q: queries, divided by the square root of D: a dot product with a key is its
                score in the softmax.
            summaries: those of all complete pages. The page that is not yet complete is
                read in any case, and counts as one of the 8.
        """
        raise NotImplementedError
