"""Homework of chapter 05: masks and scores as functions, and the blocks that a kernel visits.

Two of these functions are parts of the engine. Once their checks are green, `mini-engine generate --homework` runs a
real model on your `visible`, your `classify_blocks`, or both.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mini_engine.attention.masks import MaskMod, ScoreMod


def visible(window: int | None) -> MaskMod:
    """Write the mask of a decoder: causal, or a sliding window.

    A mask_mod(b, h, q_idx, kv_idx) says whether a query sees a key: q_idx and kv_idx are their positions, b is the row
    of the batch, h the query head. All four are tensors of integers that broadcast, down to a single number; the
    result is a tensor of bool. FlexAttention traces the function and makes one kernel of it, so it can hold nothing
    but operations on tensors: no `if`, `and` or `not` on a value that follows from positions, no `.item()`. An `if` on
    `window` is fine: that is known when the mask is made.

    Args:
        window: keys that a query may see, its own included; None for all keys up to its own.

    Example: with a window of 2 a query sees itself and the one before.

        >>> b = h = torch.tensor(0)
        >>> positions = torch.arange(4)
        >>> visible(2)(b, h, positions[:, None], positions).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
        >>> visible(None)(b, h, torch.tensor(900), torch.tensor(3)).item()
        True
    """
    if window is None:
        return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx
    # `&` and not `and`: these are tensors, and the compiler follows no branch.
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx - kv_idx < window)


def packed_prefix_lm(qo_indptr: Int[Tensor, " B+1"], prefix_lens: Int[Tensor, " B"]) -> MaskMod:
    """Write the mask of a flat batch of documents, each with a prefix that all of its tokens see.

    T tokens of B documents lie one document after the other. Document d owns the rows qo_indptr[d] to
    qo_indptr[d + 1] - 1, perhaps none. A query sees a key if both are in one document, and the key stands at or before
    the query or is one of the first prefix_lens[d] tokens of that document. Here q_idx and kv_idx are rows of the flat
    batch. The function may read tensors that you have made before: they are captured. The same rules as for `visible`.

    Args:
        qo_indptr: first row of each document, and T.
        prefix_lens: tokens of each document that all of its tokens see; at most the document's length.

    Example: documents of two and of three tokens; the first two of the second document see each other.

        >>> mask_mod = packed_prefix_lm(torch.tensor([0, 2, 5]), torch.tensor([0, 2]))
        >>> rows = torch.arange(5)
        >>> mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], rows).int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    ids = torch.repeat_interleave(torch.arange(len(prefix_lens)), qo_indptr.diff())
    prefix_end = qo_indptr[:-1] + prefix_lens
    # Within one document rows are in the order of positions, so they can be compared as they are.
    return lambda b, h, q_idx, kv_idx: (
        (ids[q_idx] == ids[kv_idx]) & ((kv_idx <= q_idx) | (kv_idx < prefix_end[ids[kv_idx]]))
    )


def capped_alibi(slopes: Float[Tensor, " H"], cap: float) -> ScoreMod:
    """Write a change of scores: a soft-cap, then ALiBi.

    A score_mod(score, b, h, q_idx, kv_idx) returns the score to use in place of `score`, which is already scaled. In
    this order: the score is kept between -cap and cap by cap * tanh(score / cap); then slope * (q_idx - kv_idx) is
    subtracted, with the slope of the query head h. The same rules as for `visible`.

    Args:
        slopes: one for each query head.
        cap: the bound that scores approach, above 0.

    Example: far below the cap a score stays nearly as it is. Three positions back, slope 0.5 takes 1.5 off.

        >>> score_mod = capped_alibi(torch.tensor([0.0, 0.5]), cap=50.0)
        >>> b, query, key = torch.tensor(0), torch.tensor(7), torch.tensor(4)
        >>> [round(score_mod(torch.tensor(2.0), b, torch.tensor(h), query, key).item(), 2) for h in (0, 1)]
        [2.0, 0.5]
    """
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx)


class Blocks(NamedTuple):
    """The blocks of a mask in the form that `BlockMask.from_kv_blocks` wants, for R rows and C columns of blocks.

    Row i has kv_num_blocks[i] partial blocks: some pair is visible, and some is not. Their columns are the first
    entries of kv_indices[i], in increasing order. What follows them is not read, and must be block numbers all the
    same, 0 to C - 1. The other two list the full blocks, in which every pair is visible, in the same way. A block is
    in one list at most, and in none if all of it is hidden.
    """

    kv_num_blocks: Int32[Tensor, " R"]
    kv_indices: Int32[Tensor, "R C"]
    full_kv_num_blocks: Int32[Tensor, " R"]
    full_kv_indices: Int32[Tensor, "R C"]


def blocks_of_mask(mask: Bool[Tensor, "Q K"], block_size: int) -> Blocks:
    """List the blocks of a mask.

    The mask is cut into squares of block_size queries and block_size keys, from the top left. A block that reaches
    past the end of the mask is never full: what lies outside counts as hidden.

    Args:
        mask: True where a query sees a key.
        block_size: queries, and keys, of a block.

    Example: a causal mask of four tokens in blocks of two. Row 0 has its diagonal block; row 1 has its diagonal block,
    and block 0 is full. Only the first entries of each row of indices count.

        >>> blocks = blocks_of_mask(torch.ones(4, 4, dtype=torch.bool).tril(), block_size=2)
        >>> blocks.kv_num_blocks.tolist(), [row[0] for row in blocks.kv_indices.tolist()]
        ([1, 1], [0, 1])
        >>> blocks.full_kv_num_blocks.tolist(), blocks.full_kv_indices[1, 0].item()
        ([0, 1], 0)
    """
    num_queries, num_keys = mask.shape
    mask = F.pad(mask, (0, -num_keys % block_size, 0, -num_queries % block_size))
    pairs = mask.unflatten(0, (-1, block_size)).unflatten(-1, (-1, block_size))  # row, query, column, key
    visited, full = pairs.any(3).any(1), pairs.all(3).all(1)
    return Blocks(*_listed(visited & ~full), *_listed(full))


def _listed(chosen: Bool[Tensor, "R C"]) -> tuple[Int32[Tensor, " R"], Int32[Tensor, "R C"]]:
    # Sorted by "not chosen", the chosen come first; a stable sort leaves them in order.
    order = chosen.logical_not().byte().argsort(dim=-1, stable=True)
    return chosen.sum(-1).int(), order.int()


def classify_blocks(
    first_query: Int[Tensor, "..."],
    last_query: Int[Tensor, "..."],
    first_key: Int[Tensor, "..."],
    last_key: Int[Tensor, "..."],
    window: int | None,
) -> tuple[Bool[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Tell what a block holds from the positions at its ends, without asking a mask about any pair.

    A block is a run of queries at the positions first_query, first_query + 1, ... last_query, and a run of keys from
    first_key to last_key, ends included. The mask is that of `visible(window)`.

    Args:
        first_query, last_query, first_key, last_key: tensors of integers that broadcast to one shape: a number for
            each block.
        window: keys that a query may see, its own included; None for all keys up to its own.

    Returns:
        visited: some query of the block sees some key of it, so the kernel must visit it.
        full: every query sees every key, so the kernel need not ask the mask.

    Example: the queries 4 to 7 against the keys 0 to 3, 4 to 7 and 8 to 11, causal and with a window of 2.

        >>> q, q_last = torch.tensor(4), torch.tensor(7)
        >>> k, k_last = torch.tensor([0, 4, 8]), torch.tensor([3, 7, 11])
        >>> [x.tolist() for x in classify_blocks(q, q_last, k, k_last, None)]
        [[True, True, False], [True, False, False]]
        >>> [x.tolist() for x in classify_blocks(q, q_last, k, k_last, 2)]
        [[True, True, False], [False, False, False]]
    """
    # The distances q - k of a block are all whole numbers from `nearest` to `furthest`; visible are 0 to window - 1.
    nearest, furthest = first_query - last_key, last_query - first_key
    visited, full = furthest >= 0, nearest >= 0
    if window is not None:
        visited, full = visited & (nearest < window), full & (furthest < window)
    return visited, full


def blocks_of_documents(qo_indptr: Int[Tensor, " B+1"], block_size: int) -> Blocks:
    """Challenge: list the blocks of a flat batch of causal documents without making its mask.

    T tokens of B documents lie one document after the other; document d owns the rows qo_indptr[d] to
    qo_indptr[d + 1] - 1, perhaps none. A query sees the keys of its own document at or before its own row. The result
    is that of `blocks_of_mask` for this mask. But a mask of 100,000 tokens holds 10 GB: make no tensor with a number
    for each pair of tokens, nor for each token and block.

    Args:
        qo_indptr: first row of each document, and T, at least 1; int32 or int64.
        block_size: queries, and keys, of a block.

    Example: documents of three and of five tokens, in blocks of two. Row 1 holds the last token of the first document,
    which sees block 0. Row 2 holds two of the second, and its keys begin in block 1. Row 3 sees block 2 in full.

        >>> blocks = blocks_of_documents(torch.tensor([0, 3, 8]), block_size=2)
        >>> [row[:n] for row, n in zip(blocks.kv_indices.tolist(), blocks.kv_num_blocks.tolist())]
        [[0], [0, 1], [1, 2], [1, 3]]
        >>> [row[:n] for row, n in zip(blocks.full_kv_indices.tolist(), blocks.full_kv_num_blocks.tolist())]
        [[], [], [], [2]]
    """
    num_tokens = int(qo_indptr[-1])
    first = torch.arange(0, num_tokens, block_size, dtype=qo_indptr.dtype)
    last = first + block_size - 1

    def document_start(row: Int[Tensor, " R"]) -> Int[Tensor, " R"]:
        # With right=True an empty document, whose start is the next one's, is passed over.
        return qo_indptr[torch.searchsorted(qo_indptr, row, right=True) - 1]

    # Keys of earlier blocks are seen by the document that the block begins in: its other documents begin inside it.
    visited = (first <= last[:, None]) & (last >= document_start(first)[:, None])
    # All pairs are visible if even the last query's document begins at or before the first key.
    full = (last <= first[:, None]) & (first >= document_start(last)[:, None]) & (last < num_tokens)[:, None]
    return Blocks(*_listed(visited & ~full), *_listed(full))
