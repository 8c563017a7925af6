"""Homework of chapter 01: attention for one sequence and for many, RoPE, and costs.

Two of these functions are parts of the engine. Once their checks pass,
`mini-engine generate --homework` runs a real model on your `masked_attention`, your
`apply_rope`, or both.
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
    """Compute attention of n queries over m keys of one sequence, with grouped heads.

    Hk divides Hq, and query head h reads KV head h // (Hq // Hk): with 4 query heads
    and 2 KV heads, heads 0 and 1 read KV head 0, and heads 2 and 3 read KV head 1. Do
    not copy keys or values for each query head.

    The scores q·k are multiplied by `scale`, then soft-capped, then the bias is added,
    and then the mask is applied: softcap * tanh(s / softcap) replaces a score s, a key
    whose `mask` is False gets no weight, and an option that is None is skipped. The
    output is the sum of the values, weighted by the softmax of the scores over the
    keys. A query without any visible key gets the output 0. Its keys may all be hidden
    by the mask, by a bias of -inf, or by both together, and there may be no keys
    (m = 0).

    Compute in float32 (in float64 for float64 inputs) and return the dtype of q. The
    bias may have a wider dtype than q. Do not modify any of the inputs.

    Example: one query and two keys whose scores are 0 and log 3. The attention weights
    are 1/4 and 3/4.

        >>> q = torch.ones(1, 1, 1)
        >>> k = torch.tensor([0.0, math.log(3)]).view(2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(2, 1, 1)
        >>> round(masked_attention(q, k, v, scale=1.0).item(), 4)
        7.0
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    # The query heads of a group get an axis g of their own, so no key is copied.
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k.to(dtype)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype).unflatten(0, (k.shape[1], -1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    # In a row without visible keys, -inf - (-inf) is NaN: set its weights to 0.
    weights = weights.masked_fill(scores == -math.inf, 0.0)
    out = torch.einsum("hgnm,mhd->nhgd", weights, v.to(dtype))
    return out.flatten(1, 2).to(q.dtype)


def ragged_causal_attention(
    q: Float[torch.Tensor, "T Hq D"],
    k: Float[torch.Tensor, "S Hk D"],
    v: Float[torch.Tensor, "S Hk D"],
    qo_indptr: Int[torch.Tensor, " bounds"],
    kv_indptr: Int[torch.Tensor, " bounds"],
    scale: float,
) -> Float[torch.Tensor, "T Hq D"]:
    """Compute causal attention for a ragged batch: concatenated sequences, no padding.

    Sequence b owns the queries from qo_indptr[b] up to, but not including,
    qo_indptr[b + 1], and the keys and values from kv_indptr[b] up to kv_indptr[b + 1].
    Its queries are at the positions of its last keys. It may have more keys than
    queries, because its first keys may come from earlier steps, and it may have no
    queries in this step. Each query attends to the keys of its own sequence up to and
    including its own.

    Return one output row per query, in the order and the dtype of q, and leave q
    unchanged. You may call masked_attention. Compute no scores between sequences: no
    tensor that you make may be larger than q, k or the largest [Hq, n, m] scores of
    any single sequence.

    Example: two sequences. The first has 2 keys and a query for each, the second has 3
    keys and 1 query. All scores are 0, so each output is the mean of the visible
    values: 1, (1 + 2) / 2, and (3 + 4 + 5) / 3.

        >>> q, k = torch.zeros(3, 1, 1), torch.zeros(5, 1, 1)
        >>> v = torch.arange(1.0, 6.0).view(5, 1, 1)
        >>> qo_indptr, kv_indptr = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5])
        >>> out = ragged_causal_attention(q, k, v, qo_indptr, kv_indptr, scale=1.0)
        >>> out.flatten().tolist()
        [1.0, 1.5, 4.0]
    """
    out = torch.empty_like(q)
    for b in range(len(qo_indptr) - 1):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        keys = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        n, m = rows.stop - rows.start, keys.stop - keys.start
        # Query i of n is at position m - n + i: the diagonal ends at the bottom right.
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
        out[rows] = masked_attention(q[rows], k[keys], v[keys], scale=scale, mask=mask)
    return out


def rope_tables(
    positions: Int[torch.Tensor, " T"], inv_freq: Float[torch.Tensor, " half"]
) -> tuple[Float[torch.Tensor, "T half"], Float[torch.Tensor, "T half"]]:
    """Compute the cosine and sine of each token's rotation angles.

    Args:
        positions: position of each token in its own sequence, in any order, with gaps
            and repeats, and without an upper limit.
        inv_freq: radians per position of each pair, [D/2].

    Returns:
        (cos, sin), each [T, D/2], in the dtype of inv_freq.

    Example: at position 3, a pair of frequency pi / 6 is rotated by a right angle.

        >>> cos, sin = rope_tables(torch.tensor([3]), torch.tensor([math.pi / 6]))
        >>> round(sin.item(), 4)
        1.0
    """
    angles = positions[:, None].to(inv_freq.dtype) * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(
    x: Float[torch.Tensor, "T H D"],
    cos: Float[torch.Tensor, "T half"],
    sin: Float[torch.Tensor, "T half"],
    *,
    interleaved: bool = False,
) -> Float[torch.Tensor, "T H D"]:
    """Rotate the pairs of components of every head by each token's angles.

    Pair i of D/2 is (x[i], x[i + D/2]), or (x[2i], x[2i + 1]) if `interleaved`. The
    rotated pair replaces the original pair at the same two places. All heads of a token
    are rotated by the same angles. Leave x itself unchanged.

    Compute in float32 (in float64 for float64 inputs) and return the dtype of x.

    Example: one head of 4 components, whose two pairs are rotated by a right angle.

        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
        >>> cos, sin = torch.zeros(1, 2), torch.ones(1, 2)
        >>> apply_rope(x, cos, sin).flatten().tolist()
        [-3.0, -4.0, 1.0, 2.0]
        >>> apply_rope(x, cos, sin, interleaved=True).flatten().tolist()
        [-2.0, 1.0, -4.0, 3.0]
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[:, None].to(dtype), sin[:, None].to(dtype)  # new axis: heads
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    a, b = a.to(dtype), b.to(dtype)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    # Stacking on a last axis interleaves the halves; concatenation keeps them apart.
    if interleaved:
        return torch.stack(rotated, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def attention_cost(
    num_queries: int,
    num_keys: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
) -> tuple[int, int]:
    """Count the minimum FLOPs and bytes of causal attention in one sequence.

    The queries belong to the last `num_queries` of `num_keys` positions. Count:
        FLOPs: for each query head and each visible (query, key) pair, one dot product
            and one weighted addition of head_dim components. A multiplication and an
            addition are 2 FLOPs. Leave out the softmax.
        Bytes: queries, keys and values are read once, and the output is written once.

    Args:
        num_queries: number of queries, at most num_keys.
        num_keys: number of keys.
        num_qo_heads: query heads, and heads of the output.
        num_kv_heads: heads of the keys and of the values.
        head_dim: components per head.
        dtype_bytes: bytes per component.

    Returns:
        (flops, bytes), both int.

    Example: one query, two keys and one head of one component, in float32. The two
    pairs take 2 * 4 FLOPs; q, two keys, two values and the output take 6 * 4 bytes.

        >>> attention_cost(1, 2, 1, 1, 1, 4)
        (8, 24)
    """
    # The last query sees all keys; each query before it sees one key fewer.
    pairs = num_queries * num_keys - num_queries * (num_queries - 1) // 2
    flops = 4 * pairs * num_qo_heads * head_dim
    components = 2 * head_dim * (num_queries * num_qo_heads + num_keys * num_kv_heads)
    return flops, components * dtype_bytes


def attention_bias(
    query_positions: Int[torch.Tensor, " n"],
    key_positions: Int[torch.Tensor, " m"],
    *,
    window: int | None = None,
    slopes: Float[torch.Tensor, " H"] | None = None,
) -> Float[torch.Tensor, "H n m"]:
    """Express a causal mask, a sliding window and ALiBi as one bias on the scores.

    The distance between a query and a key is the query's position minus the key's. The
    bias is -inf where the query must not attend to the key: where the distance is
    negative, and, with a `window`, where it is `window` or more (a window of 1 leaves
    only the query's own position). Everywhere else it is -slope * distance for each
    head, or 0 without `slopes`.

    Returns:
        float32, [H, n, m]; without slopes H is 1, and all heads share the bias.

    Example: the last of three tokens, with an ALiBi slope of 0.5 and a window of 2.

        >>> positions, slopes = torch.arange(3), torch.tensor([0.5])
        >>> bias = attention_bias(positions[2:], positions, window=2, slopes=slopes)
        >>> bias.flatten().tolist()
        [-inf, -0.5, 0.0]
    """
    distance = query_positions[:, None] - key_positions
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    if slopes is None:
        slopes = torch.zeros(1, device=distance.device)
    return (slopes[:, None, None] * -distance).float().masked_fill(hidden, -math.inf)


def convert_rope_weights(
    weight: Float[torch.Tensor, "rows *columns"],
    *,
    head_dim: int,
    to_interleaved: bool,
    rotary_dim: int | None = None,
) -> Float[torch.Tensor, "rows *columns"]:
    """Challenge: convert a query or key projection to the other RoPE convention.

    Row h * head_dim + c of `weight` produces component c of head h. Reorder the rows so
    that a model with the other pairing computes the same scores: from half-split to
    interleaved, or, if `to_interleaved` is False, from interleaved to half-split.
    `weight` is a matrix [H * head_dim, hidden] or the projection's bias
    [H * head_dim]. Some models rotate only the first `rotary_dim` components of each
    head (None: all of them), and their pairs lie within these; the other components
    stay where they are.

    Return a new tensor of the same dtype, and leave `weight` unchanged.

    Example: one head of 6 components. In the half-split convention its pairs are
    (0, 3), (1, 4) and (2, 5).

        >>> rows = torch.arange(6.0)
        >>> convert_rope_weights(rows, head_dim=6, to_interleaved=True).tolist()
        [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    heads = weight.unflatten(0, (-1, head_dim))
    rotated, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    # Half-split is [2, pairs] in memory, interleaved is [pairs, 2]: a transpose.
    layout = (2, -1) if to_interleaved else (-1, 2)
    rotated = rotated.unflatten(1, layout).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, rest), dim=1).flatten(0, 1)
