"""Homework of chapter 01: attention for one sequence and for many, RoPE, and what attention costs.

Two of these functions are parts of the engine. Once their checks are green, `mini-engine generate --homework` runs a
real model on your `masked_attention`, your `apply_rope`, or both.

Each function tells what it must do. Write it in place of `raise NotImplementedError`; import what you need, and add
helper functions of your own as you like. Then:

    pytest chapters/01_naive_attention                   # grade your work
    pytest chapters/01_naive_attention --hint NAME       # the next of three hints for the exercise NAME
"""

import math

import torch
from jaxtyping import Bool, Float, Int


def masked_attention(
    q: Float[torch.Tensor, "n Hq D"],
    k: Float[torch.Tensor, "m Hk D"],
    v: Float[torch.Tensor, "m Hk D"],
    *,
    scale: float,
    mask: Bool[torch.Tensor, "n m"] | None = None,
    bias: Float[torch.Tensor, "Hq n m"] | None = None,
    softcap: float | None = None,
) -> Float[torch.Tensor, "n Hq D"]:
    """Attention of n queries over m keys of one sequence, with grouped query heads.

    Hk divides Hq, and query head h reads key head h // (Hq // Hk): with 4 query heads and 2 key heads, heads 0 and 1
    read key head 0, heads 2 and 3 read key head 1. Do not copy a key or a value for each query head.

    The scores are q·k, and then, in this order:
        1. times `scale`;
        2. if `softcap` is given, s becomes softcap * tanh(s / softcap);
        3. plus `bias`, if given;
        4. a key where `mask` is False gets no weight (mask None: every query sees every key).
    The softmax over the keys turns them into weights, the weighted sum of the values is the output. A query that
    sees no key at all gets 0.

    Compute in float32 (in float64 for float64 inputs); return the dtype of q.

    Example: one query and two keys whose scores are 0 and log 3. Their weights are 1/4 and 3/4.

        >>> q = torch.ones(1, 1, 1)
        >>> k = torch.tensor([0.0, math.log(3)]).view(2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(2, 1, 1)
        >>> round(masked_attention(q, k, v, scale=1.0).item(), 4)
        7.0
    """
    raise NotImplementedError


def ragged_causal_attention(
    q: Float[torch.Tensor, "T Hq D"],
    k: Float[torch.Tensor, "S Hk D"],
    v: Float[torch.Tensor, "S Hk D"],
    qo_indptr: Int[torch.Tensor, " bounds"],
    kv_indptr: Int[torch.Tensor, " bounds"],
    scale: float,
) -> Float[torch.Tensor, "T Hq D"]:
    """Causal attention over sequences of unequal length that lie end to end, without padding.

    Sequence b owns the queries qo_indptr[b] to qo_indptr[b + 1] (exclusive) and the keys and values kv_indptr[b] to
    kv_indptr[b + 1]. It has at least as many keys as queries: its queries belong to the last of its keys, the keys
    before them were computed in earlier steps. Each query sees the keys of its own sequence up to and including its
    own. A sequence may have no query in this step.

    Return one output row per query, in the order of q. You may call masked_attention.

    Example: two sequences. The first has 2 keys and a query for each, the second 3 keys and 1 query. All scores are
    0, so every output is the mean of the values that its query sees: 1, (1 + 2) / 2, (3 + 4 + 5) / 3.

        >>> q, k = torch.zeros(3, 1, 1), torch.zeros(5, 1, 1)
        >>> v = torch.arange(1.0, 6.0).view(5, 1, 1)
        >>> qo_indptr, kv_indptr = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5])
        >>> ragged_causal_attention(q, k, v, qo_indptr, kv_indptr, scale=1.0).flatten().tolist()
        [1.0, 1.5, 4.0]
    """
    raise NotImplementedError


def rope_tables(
    positions: Int[torch.Tensor, " T"], inv_freq: Float[torch.Tensor, " half"]
) -> tuple[Float[torch.Tensor, "T half"], Float[torch.Tensor, "T half"]]:
    """The cosine and the sine of the angle of every pair at every token: position * frequency.

    Args:
        positions: the position of each token in its own sequence, in any order, with gaps and repeats.
        inv_freq: radians that each pair turns per position, [D/2].

    Returns:
        (cos, sin), each [T, D/2], in the dtype of inv_freq.

    Example: at position 3 a pair of frequency pi / 6 has turned by a right angle.

        >>> cos, sin = rope_tables(torch.tensor([3]), torch.tensor([math.pi / 6]))
        >>> round(sin.item(), 4)
        1.0
    """
    raise NotImplementedError


def apply_rope(
    x: Float[torch.Tensor, "T H D"],
    cos: Float[torch.Tensor, "T half"],
    sin: Float[torch.Tensor, "T half"],
    *,
    interleaved: bool = False,
) -> Float[torch.Tensor, "T H D"]:
    """Turn every pair (a, b) of every head of token t by its angle: (a cos - b sin, b cos + a sin).

    Pair i of D/2 is (x[i], x[i + D/2]), or with `interleaved` (x[2i], x[2i + 1]). The result stands where the pair
    stood. All heads of a token turn alike. Leave x itself unchanged.

    Compute in float32 (in float64 for float64 inputs); return the dtype of x.

    Example: both pairs of one head of 4 numbers turn by a right angle, (a, b) becomes (-b, a).

        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
        >>> cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
        >>> apply_rope(x, cos, sin).flatten().tolist()
        [-3.0, -4.0, 1.0, 2.0]
        >>> apply_rope(x, cos, sin, interleaved=True).flatten().tolist()
        [-2.0, 1.0, -4.0, 3.0]
    """
    raise NotImplementedError


def attention_cost(
    num_queries: int, num_keys: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype_bytes: int
) -> tuple[int, int]:
    """FLOPs and bytes of causal attention in one sequence, for a kernel that wastes neither.

    The queries are the last `num_queries` of `num_keys` positions. Count:
        FLOPs: for each query head and each (query, key) pair that the causal mask lets through, one dot product and
            one weighted addition of head_dim numbers; a multiplication and an addition are 2 FLOPs. Leave out the
            softmax.
        Bytes: queries, keys and values are read once, the output is written once. Nothing else moves.

    Args:
        num_queries: queries, at most num_keys.
        dtype_bytes: bytes of one number.

    Returns:
        (flops, bytes), whole numbers.

    Example: one query, two keys, one head of one number, in float32. Two pairs make 2 * 4 FLOPs; q, k, k, v, v and
    the output make 6 * 4 bytes.

        >>> attention_cost(1, 2, 1, 1, 1, 4)
        (8, 24)
    """
    raise NotImplementedError


def attention_bias(
    query_positions: Int[torch.Tensor, " n"],
    key_positions: Int[torch.Tensor, " m"],
    *,
    window: int | None = None,
    slopes: Float[torch.Tensor, " H"] | None = None,
) -> Float[torch.Tensor, "H n m"]:
    """Challenge: causal, sliding window and ALiBi as one tensor that is added to the scores.

    The distance of a query from a key is its position minus the key's. The bias is -inf where the query must not see
    the key: where the distance is negative, and with a `window` where it is `window` or more (a window of 1 leaves
    the query itself). Elsewhere it is -slope * distance for each head, or 0 without `slopes`.

    Returns:
        float32, [H, n, m]; H is 1 without slopes, and every head shares it.

    Example: the last of three tokens, with ALiBi of slope 0.5 and a window of 2.

        >>> attention_bias(torch.tensor([2]), torch.arange(3), window=2, slopes=torch.tensor([0.5])).flatten().tolist()
        [-inf, -0.5, 0.0]
    """
    raise NotImplementedError
