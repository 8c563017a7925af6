"""Homework of chapter 05: masks, score functions, and the blocks that a kernel visits.

Two of these functions are parts of the engine. Once their checks pass, the command
`mini-engine generate --homework` runs a real model on your `visible`, your
`classify_blocks`, or both.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/05_flexattention

    # the next of three hints for the exercise NAME
    pytest chapters/05_flexattention --hint NAME
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mini_engine.attention.masks import MaskMod, ScoreMod


def visible(window: int | None) -> MaskMod:
    """Return the mask of a decoder layer: causal, or a causal sliding window.

    A mask_mod(b, h, q_idx, kv_idx) returns whether a query sees a key. q_idx and kv_idx
    are their positions, b is the batch index, and h the query head. All four are
    integer tensors that broadcast, possibly scalars; the result is a bool tensor.
    FlexAttention traces the function and compiles it into a kernel, so it may use
    nothing but tensor operations: no `if`, `and` or `not` on a value that depends on
    positions, and no `.item()`. An `if` on `window` is fine, because `window` is known
    before tracing.

    Args:
        window: number of keys that a query may see, including its own; None for all
            keys up to its own.

    Example: with a window of 2, a query sees its own key and the one before.

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
    raise NotImplementedError


def packed_prefix_lm(
    qo_indptr: Int[Tensor, " B+1"],
    prefix_lens: Int[Tensor, " B"],
) -> MaskMod:
    """Return the mask of a ragged batch of documents, each with a bidirectional prefix.

    T tokens of B documents are packed into one sequence. Document d owns the tokens
    qo_indptr[d] to qo_indptr[d + 1] - 1, and may be empty. A query sees a key if both
    belong to the same document and the key is at or before the query, or among the
    first prefix_lens[d] tokens of the document. Here q_idx and kv_idx are indices of
    tokens in the batch. The function may capture tensors that you compute beforehand.
    The rules of `visible` apply.

    Args:
        qo_indptr: first token of each document, and T.
        prefix_lens: number of tokens at the start of each document that all of its
            tokens see; at most the length of the document.

    Example: documents of two and of three tokens. The first two tokens of the second
    document see each other.

        >>> mask_mod = packed_prefix_lm(torch.tensor([0, 2, 5]), torch.tensor([0, 2]))
        >>> tokens = torch.arange(5)
        >>> mask_mod(torch.tensor(0), torch.tensor(0), tokens[:, None], tokens).int()
        tensor([[1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 1, 1, 0],
                [0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    raise NotImplementedError


def capped_alibi(slopes: Float[Tensor, " H"], cap: float) -> ScoreMod:
    """Return a score_mod that applies a soft-cap and then ALiBi.

    A score_mod(score, b, h, q_idx, kv_idx) takes a scaled score and returns the score
    to use instead. First, cap * tanh(score / cap) keeps it between -cap and cap. Then
    slope * (q_idx - kv_idx) is subtracted, with the slope of query head h. The rules of
    `visible` apply.

    Args:
        slopes: slope of each query head.
        cap: the bound that capped scores approach, above 0.

    Example: a score far below the cap hardly changes. A slope of 0.5 subtracts 1.5 from
    the score of a key three positions back.

        >>> score_mod = capped_alibi(torch.tensor([0.0, 0.5]), cap=50.0)
        >>> score, b, heads = torch.tensor(2.0), torch.tensor(0), torch.arange(2)
        >>> new = score_mod(score, b, heads, torch.tensor(7), torch.tensor(4))
        >>> new.round(decimals=2)
        tensor([2.0000, 0.5000])
    """
    raise NotImplementedError


class Blocks(NamedTuple):
    """Block indices in the form that `BlockMask.from_kv_blocks` takes.

    There are R query blocks and C key blocks. Query block i has kv_num_blocks[i]
    partial blocks, in which some pairs are visible and some are hidden. Their indices
    are the first entries of kv_indices[i], in increasing order. The entries after them
    are not read, but must be valid indices, 0 to C - 1. The other two fields list the
    full blocks, in which every pair is visible, in the same way. A block is in at most
    one list, and in none if all of it is hidden.
    """

    kv_num_blocks: Int32[Tensor, " R"]
    kv_indices: Int32[Tensor, "R C"]
    full_kv_num_blocks: Int32[Tensor, " R"]
    full_kv_indices: Int32[Tensor, "R C"]


def blocks_of_mask(mask: Bool[Tensor, "Q K"], block_size: int) -> Blocks:
    """List the blocks of a mask.

    The mask is divided into squares of block_size queries and block_size keys, starting
    at the top left. A block that extends past the end of the mask is never full: pairs
    outside the mask count as hidden.

    Args:
        mask: True where a query sees a key.
        block_size: number of queries, and also of keys, in a block.

    Example: a causal mask of four tokens in blocks of two. The blocks on the diagonal
    are partial, and key block 0 is full for query block 1. Only the first entries of
    each list of indices count.

        >>> mask = torch.ones(4, 4, dtype=torch.bool).tril()
        >>> blocks = blocks_of_mask(mask, block_size=2)
        >>> blocks.kv_num_blocks.tolist(), blocks.kv_indices[:, 0].tolist()
        ([1, 1], [0, 1])
        >>> blocks.full_kv_num_blocks.tolist(), blocks.full_kv_indices[1, 0].item()
        ([0, 1], 0)
    """
    raise NotImplementedError


def classify_blocks(
    first_query: Int[Tensor, "..."],
    last_query: Int[Tensor, "..."],
    first_key: Int[Tensor, "..."],
    last_key: Int[Tensor, "..."],
    window: int | None,
) -> tuple[Bool[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Classify blocks by the positions at their ends, without evaluating a mask.

    A block consists of queries at consecutive positions, first_query to last_query
    inclusive, and of keys at consecutive positions, first_key to last_key inclusive.
    The mask is that of `visible(window)`.

    Args:
        first_query, last_query, first_key, last_key: integer tensors that broadcast to
            one shape, with one element for each block.
        window: number of keys that a query may see, including its own; None for all
            keys up to its own.

    Returns:
        visited: whether some query of the block sees some key, so it must be visited.
        full: whether every query sees every key, so no mask needs to be evaluated.

    Example: queries 4 to 7 against keys 0 to 3, 4 to 7 and 8 to 11, first causal and
    then with a window of 2.

        >>> q, q_last = torch.tensor(4), torch.tensor(7)
        >>> k, k_last = torch.tensor([0, 4, 8]), torch.tensor([3, 7, 11])
        >>> [x.tolist() for x in classify_blocks(q, q_last, k, k_last, None)]
        [[True, True, False], [True, False, False]]
        >>> [x.tolist() for x in classify_blocks(q, q_last, k, k_last, 2)]
        [[True, True, False], [False, False, False]]
    """
    raise NotImplementedError


def blocks_of_documents(qo_indptr: Int[Tensor, " B+1"], block_size: int) -> Blocks:
    """Challenge: list the blocks of a ragged batch of causal documents, without a mask.

    T tokens of B documents are packed into one sequence. Document d owns the tokens
    qo_indptr[d] to qo_indptr[d + 1] - 1, and may be empty. A query sees the keys of its
    own document at or before its own token. The result is that of `blocks_of_mask` for
    this mask. But the mask of 100,000 tokens takes 10 GB: create no tensor with an
    element for each pair of tokens, nor for each token and block.

    Args:
        qo_indptr: first token of each document, and T, at least 1; int32 or int64.
        block_size: number of queries, and also of keys, in a block.

    Example: documents of three and of five tokens, in blocks of two. Query block 1
    contains the last token of the first document, which sees key block 0. Query block 2
    contains two tokens of the second document, whose keys begin in key block 1. Query
    block 3 sees all of key block 2.

        >>> blocks = blocks_of_documents(torch.tensor([0, 3, 8]), block_size=2)
        >>> partial = zip(blocks.kv_indices, blocks.kv_num_blocks)
        >>> [indices[:n].tolist() for indices, n in partial]
        [[0], [0, 1], [1, 2], [1, 3]]
        >>> full = zip(blocks.full_kv_indices, blocks.full_kv_num_blocks)
        >>> [indices[:n].tolist() for indices, n in full]
        [[], [], [], [2]]
    """
    raise NotImplementedError
