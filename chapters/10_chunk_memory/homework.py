"""Homework of chapter 10: keys at other positions, attention over chunks, their levels,
and the memory they take.

`chunk_levels` is a part of the engine: once its checks pass, `mini-engine generate
--homework` also uses it to serve a request over chunks. `Stored` and `Level` are given.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/10_chunk_memory

    # the next of three hints for the exercise NAME
    pytest chapters/10_chunk_memory --hint NAME
"""

from collections.abc import Collection
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from mini_engine.attention.state import AttentionState
from mini_engine.errors import ChunkError
from mini_engine.models.base import CausalLM
from mini_engine.request import Context, PlacedChunk
from mini_engine.rope import RopeConfig

KeysAndValues = tuple[Float[Tensor, "m Hk D"], Float[Tensor, "m Hk D"]]


class Stored(NamedTuple):
    """A registered chunk.

    Attributes:
        token_ids: its tokens.
        before: the tokens that it was computed after; empty if it was computed on its
            own, from position 0.
    """

    token_ids: tuple[int, ...]
    before: tuple[int, ...] = ()


class Level(NamedTuple):
    """One level of chunks: groups of neighboring requests, each with a chunk or none.

    Attributes:
        qo_indptr: [G+1] first token of each group, and the number of tokens.
        kv_page_indptr: [G+1] first entry of each group in `kv_page_indices`, and their
            number.
        kv_page_indices: [P] pages of the groups' chunks, of dtype int32.
        kv_last_page_len: [G] keys in the last page of each group, 0 in a group without
            a chunk.
        query_offsets: [T] added to the position of each token's query; any number where
            there is no chunk.
    """

    qo_indptr: Int64[np.ndarray, " G+1"]
    kv_page_indptr: Int64[np.ndarray, " G+1"]
    kv_page_indices: Int32[np.ndarray, " P"]
    kv_last_page_len: Int64[np.ndarray, " G"]
    query_offsets: Int64[np.ndarray, " T"]


def rotate_again(
    x: Float[Tensor, "n H D"], offsets: Int64[Tensor, " n"], rope: RopeConfig
) -> Float[Tensor, "n H D"]:
    """Move cached keys, or queries, to other positions.

    RoPE has already been applied to the vectors, at positions that you do not know and
    do not need. What must hold:
        - Row i becomes what it would have been at its position plus `offsets[i]`.
        - The frequencies of the pairs are `inverse_frequencies(rope)`, from
          `mini_engine.rope`.
        - The result has the dtype of x. It is computed in float32 (float64 if x is in
          float64), and rounded once.
        - x belongs to the caller: do not change it.

    Args:
        x: keys or queries to which RoPE has been applied.
        offsets: positions by which each row moves; a negative number moves it toward
            the front.
        rope: the model's rotary embedding.

    Example: one pair, which RoPE rotates by 1 radian per position.

        >>> rope = RopeConfig(theta=10_000.0, head_dim=2)
        >>> k = torch.tensor([[[1.0, 0.0]]])  # the key at position 0
        >>> rotate_again(k, torch.tensor([2]), rope)  # at position 2: (cos 2, sin 2)
        tensor([[[-0.4161,  0.9093]]])
    """
    raise NotImplementedError


def place_chunks(chunks: ListLike[Stored]) -> tuple[list[int], list[int], list[bool]]:
    """Place registered chunks one after the other, from position 0.

    Args:
        chunks: the chunks before a prompt, in order; a chunk may occur more than
            once.

    Returns:
        Three lists with one entry for each chunk: the position of its first token; its
        query offset, which is added to the position of every query of this request that
        attends to the chunk's stored keys; and whether the chunk is exact, that is,
        whether its stored keys equal the keys of the same tokens in a plain prompt.

    Example: the first chunk has three tokens. The second one was computed after it, the
    third one on its own.

        >>> one, three = Stored((7, 8, 9)), Stored((1, 2))
        >>> two = Stored((4, 5), before=(7, 8, 9))
        >>> place_chunks([one, two, three])
        ([0, 3, 5], [0, 0, -5], [True, True, False])
        >>> place_chunks([two, one])
        ([0, 2], [3, -2], [False, False])
    """
    raise NotImplementedError


def attend_to_chunks(
    q: Float[Tensor, "n Hq D"],
    chunks: ListLike[KeysAndValues],
    query_offsets: ListLike[int],
    own: KeysAndValues,
    *,
    rope: RopeConfig,
    scale: float,
) -> AttentionState:
    """Compute the attention of new tokens over chunks and over the request's own keys.

    What must hold:
        - Each chunk acts as if its keys had been computed at its position in this
          request. They were not, but the queries can be rotated instead, by
          `query_offsets`. Do not change the stored keys: other requests share them. `q`
          belongs to the caller: leave it as it is.
        - Every new token sees all keys of all chunks. The n new tokens are the last n
          of the request's own keys, and each sees its own key and all earlier ones.
        - The order in which chunks are given does not matter. There may be none.

    Args:
        q: queries of the new tokens, with RoPE at their true positions.
        chunks: keys and values of each chunk, as stored.
        query_offsets: for each chunk, the number added to the position of a query
            before it attends to the chunk's keys.
        own: the request's own keys and values, m >= n of them, with RoPE at their true
            positions.
        rope: the model's rotary embedding.
        scale: factor of the scores.

    Returns:
        The state over all keys.

    Example: all keys are 0, so the output is a mean of values. The chunk holds 2 and 4.
    The first new token also sees its own value 9, and the second one sees 9 and 1.

        >>> def keys_and_values(*values):
        ...     v = torch.tensor(values)[:, None, None].expand(-1, 1, 2)
        ...     return torch.zeros_like(v), v
        >>> chunk, own = keys_and_values(2.0, 4.0), keys_and_values(9.0, 1.0)
        >>> q, rope = torch.zeros(2, 1, 2), RopeConfig(10_000.0, 2)
        >>> state = attend_to_chunks(q, [chunk], [-7], own, rope=rope, scale=1.0)
        >>> state.out[:, 0, 0].round()
        tensor([5., 4.])
    """
    raise NotImplementedError


def chunk_levels(
    contexts: ListLike[Context], num_new: Int64[np.ndarray, " B"], page_size: int
) -> tuple[Int64[np.ndarray, " B"], list[Level]]:
    """Order the requests of a step, and write their chunks as levels of a cascade.

    A request's context is a tuple of `PlacedChunk`s in the order of their positions.
    From a chunk you need `chunk.pinned.pages`, an array of pages that no other chunk
    has; `len(chunk.token_ids)`, the number of keys in them, at least one; and
    `chunk.query_offset`. In a level, a group of neighboring requests attends to the
    pages of one chunk, which are read once for the whole group. What must hold:
        - Requests with one new token come before all others.
        - Over all levels, each request attends to each chunk of its context once, at
          that chunk's query offset. If a context has a chunk twice, its request attends
          to the chunk twice, at both offsets.
        - Requests that have the same chunks, in whatever order and at whatever offsets,
          share all of them if they all have one new token, or all have more: each chunk
          is read once for all of them.
        - There are as many levels as the longest context has chunks; none if all
          contexts are empty.

    Every request belongs to one group of each level. If its context has no chunk for a
    level, that group has no pages.

    Args:
        contexts: the chunks before each request.
        num_new: [B] new tokens of each request, at least 1.
        page_size: keys per page.

    Returns:
        The index of each request in the new order, and the levels. The tokens of all
        requests follow one another in the new order.

    Example: a chunk of 5 keys in pages 3 and 1. Request 0 has 2 new tokens and no
    chunks. Requests 1 and 2 have the chunk at different positions.

        >>> from mini_engine.request import PinnedPages
        >>> pinned = PinnedPages(np.array([3, 1], dtype=np.int32))
        >>> contexts = [(), *((PlacedChunk(pinned, [0] * 5, o),) for o in (-8, 0))]
        >>> order, levels = chunk_levels(contexts, np.array([2, 1, 1]), page_size=4)
        >>> order.tolist(), len(levels)
        ([1, 2, 0], 1)
        >>> [array.tolist() for array in levels[0]]
        [[0, 2, 4], [0, 2, 2], [3, 1], [1, 0], [-8, 0, 0, 0]]
    """
    raise NotImplementedError


class ChunkStore:
    """The bookkeeping of a chunk memory: its chunks, their users, and what to evict.

    A chunk is *in use* from `begin` to `end` of a request over it. Adding a chunk,
    adding it again, and beginning a request over it each count as a *use*.

    Example: a store of 10 pages.

        >>> store = ChunkStore(max_pages=10)
        >>> store.add("a", 4), store.add("b", 3), store.add("c", 3)
        ([], [], [])
        >>> store.begin(["a"])
        >>> store.add("d", 4)  # a is in use; of the others, b was used before c
        ['b', 'c']
        >>> store.names, store.num_pages
        (['a', 'd'], 8)
        >>> try:
        ...     store.add("e", 7)
        ... except ChunkError:
        ...     print("a is in use")
        a is in use
    """

    def __init__(self, max_pages: int) -> None:
        """Create an empty store.

        Args:
            max_pages: the most pages that all chunks together may take.
        """
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        """The names of all chunks, the least recently used one first."""
        raise NotImplementedError

    @property
    def num_pages(self) -> int:
        """Pages that all chunks take together."""
        raise NotImplementedError

    def add(self, name: str, num_pages: int, keep: Collection[str] = ()) -> list[str]:
        """Add a chunk, and evict others if there is no room for it.

        The least recently used chunk is evicted first, then the next, until the new
        one fits. Chunks in use are never evicted, nor are those in `keep`, after which
        the new chunk is computed. Adding a chunk that is in the store already, with the
        same `num_pages` as before, only counts as a use.

        Args:
            name: its name.
            num_pages: pages that it takes.
            keep: names of chunks that must not be evicted.

        Returns:
            The names of the evicted chunks, in the order of eviction.

        Raises:
            ChunkError: if no allowed eviction makes room. Then nothing has changed.
        """
        raise NotImplementedError

    def begin(self, names: ListLike[str]) -> None:
        """Begin a request over some chunks, which uses them in the order given.

        Args:
            names: names of the chunks; a name may occur more than once.

        Raises:
            KeyError: if a chunk is not in the store. Then nothing has changed.
        """
        raise NotImplementedError

    def end(self, names: ListLike[str]) -> None:
        """End a request that began with these names.

        Other requests may still use the same chunks.

        Args:
            names: as in `begin`.
        """
        raise NotImplementedError


def recompute(
    model: CausalLM,
    token_ids: Int64[Tensor, " n"],
    keys: ListLike[Float[Tensor, "n Hk D"]],
    values: ListLike[Float[Tensor, "n Hk D"]],
    chosen: Int64[Tensor, " c"],
) -> tuple[list[Float[Tensor, "n Hk D"]], list[Float[Tensor, "n Hk D"]]]:
    """Challenge: recompute tokens of a composed context, with all earlier ones in view.

    The chosen tokens run through the model in one call, without any other tokens. In
    each layer their new keys and values replace the stored ones, and then each chosen
    token attends to all tokens up to itself: to the new keys of chosen tokens, and to
    the stored keys of the others. The tensors belong to the caller: do not change them.

    Args:
        model: the model; `model(token_ids, positions, attend)` runs its layers, and
            calls `attend(layer, q, k, v)` once in each, with RoPE applied to q and k.
            `model.attention_specs[layer].scale` is the factor of the scores. No layer
            has a window or a soft-cap.
        token_ids: the tokens of the context, at positions 0 to n - 1.
        keys: their stored keys in each layer, at these positions.
        values: their stored values in each layer.
        chosen: positions of the tokens to recompute, ascending.

    Returns:
        The keys and the values of all n tokens in each layer, the new ones included.

    Example: a model of one layer, in which a token's key is 0 and its value is the
    token's id.

        >>> from types import SimpleNamespace
        >>> class Toy:
        ...     attention_specs = [SimpleNamespace(scale=1.0)]
        ...     def __call__(self, token_ids, positions, attend):
        ...         x = token_ids[:, None, None].double()
        ...         return attend(0, 0 * x, 0 * x, x)
        >>> stored = [torch.zeros(3, 1, 1, dtype=torch.float64)]
        >>> token_ids, chosen = torch.tensor([5, 6, 7]), torch.tensor([1])
        >>> _, values = recompute(Toy(), token_ids, stored, stored, chosen)
        >>> values[0].flatten().tolist()
        [0.0, 6.0, 0.0]
    """
    raise NotImplementedError
