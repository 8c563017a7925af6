"""Attention by its definition, for one sequence: scores, masks, biases, softmax, weighted sum.

Every other attention in this engine is tested against `masked_attention`. Queries and keys are tensors
`[tokens, heads, head_dim]`; nothing here depends on how keys are stored. Explained in chapter 01.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def attention_mask(
    query_positions: Int[Tensor, " n"], key_positions: Int[Tensor, " m"], window: int | None = None
) -> Bool[Tensor, "n m"]:
    """Build the causal mask: a query attends to the keys at or before its own position, and within the window.

    Args:
        query_positions: position of each query in its sequence, `[n]`.
        key_positions: position of each key in the same sequence, `[m]`.
        window: number of keys that a query may attend to, including its own (transformers' convention).

    Returns:
        `[n, m]`, True where the query attends to the key.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def alibi_slopes(num_heads: int) -> Float[Tensor, " H"]:
    """Compute one ALiBi slope for each head (Press et al. 2021, section 3).

    For a power of two, head h of H has the slope 2 ** (-8 (h + 1) / H). Otherwise the slopes of the next smaller
    power of two come first, followed by every other slope of the next larger power (the authors' own code).
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return torch.tensor(slopes)


def alibi_bias(
    slopes: Float[Tensor, " H"], query_positions: Int[Tensor, " n"], key_positions: Int[Tensor, " m"]
) -> Float[Tensor, "H n m"]:
    """Compute ALiBi's bias on the scores: `-slope * (query position - key position)`, for each head."""
    distance = query_positions[:, None] - key_positions[None, :]
    return slopes[:, None, None] * -distance


def attention_scores(
    q: Float[Tensor, "n Hq D"],
    k: Float[Tensor, "m Hk D"],
    *,
    scale: float,
    mask: Bool[Tensor, "n m"] | None = None,
    bias: Float[Tensor, "Hq n m"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "Hk G n m"]:
    """Compute the scores for the softmax, in float32 (float64 for float64 inputs); -inf where a key is masked.

    Query head h reads KV head `h // G`, where `G = Hq // Hk` (grouped-query attention, Ainslie et al. 2023). The group
    is an axis of the queries, so no key is copied. Order: scale, soft-cap, bias, mask.
    """
    num_kv_heads = k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("nhgd,mhd->hgnm", grouped, k.to(dtype)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(dtype).unflatten(0, (num_kv_heads, -1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores


def masked_attention(
    q: Float[Tensor, "n Hq D"],
    k: Float[Tensor, "m Hk D"],
    v: Float[Tensor, "m Hk D"],
    *,
    scale: float,
    mask: Bool[Tensor, "n m"] | None = None,
    bias: Float[Tensor, "Hq n m"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "n Hq D"]:
    """Compute the attention of n queries over m keys of one sequence (Vaswani et al. 2017, section 3.2.1).

    Args:
        q: queries, `[n, Hq, D]`.
        k: keys, `[m, Hk, D]`; Hk divides Hq, and query head h reads KV head `h // (Hq // Hk)`.
        v: values, `[m, Hk, D]`.
        scale: factor on the scores, usually `D ** -0.5`.
        mask: True where a query attends to a key; None: every query attends to every key.
        bias: added to the scaled and soft-capped scores, one for each query head (ALiBi).
        softcap: a score s becomes `softcap * tanh(s / softcap)` (Gemma 2).

    Returns:
        `[n, Hq, D]` in the dtype of q, computed in float32 (float64 for float64). A query without visible keys gets 0.
    """
    scores = attention_scores(q, k, scale=scale, mask=mask, bias=bias, softcap=softcap)
    weights = torch.softmax(scores, dim=-1)
    # The softmax of a row of -inf is NaN; a query without visible keys gives every key the weight 0.
    weights = weights.masked_fill(scores == -math.inf, 0.0)
    out = torch.einsum("hgnm,mhd->nhgd", weights, v.to(weights.dtype))
    return out.reshape(q.shape).to(q.dtype)


def sdpa_attention(
    q: Float[Tensor, "n Hq D"],
    k: Float[Tensor, "m Hk D"],
    v: Float[Tensor, "m Hk D"],
    *,
    scale: float,
    mask: Bool[Tensor, "n m"] | None = None,
    bias: Float[Tensor, "Hq n m"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "n Hq D"]:
    """Compute `masked_attention` with PyTorch's fused kernels, without `[n, m]` scores in memory.

    Falls back to `masked_attention` for a soft-cap, which those kernels do not implement.
    """
    if softcap is not None:
        return masked_attention(q, k, v, scale=scale, mask=mask, bias=bias, softcap=softcap)
    n, num_qo_heads, _ = q.shape
    m, num_kv_heads, _ = k.shape
    attn_mask = mask
    if bias is not None:
        attn_mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, -math.inf)
    keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    if n == 1:
        # Decode: the query heads of a group become the queries of their KV head, so each key is read once.
        queries = q.unflatten(1, (num_kv_heads, -1))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask[:, 0].unflatten(0, (num_kv_heads, -1))
        return fused_attention(queries, keys, values, scale=scale, mask=attn_mask).flatten(1, 2)
    if q.is_cuda and attn_mask is not None:
        # The only fused GPU kernel that accepts a mask needs a KV head for each query head.
        keys, values = (x.repeat_interleave(num_qo_heads // num_kv_heads, dim=1) for x in (keys, values))
    # If the kernel is told that a mask is causal, it skips the masked half. On a CPU, checking costs 2% of what that
    # saves; on a GPU it would make the host wait for the device.
    may_skip = bias is None and n == m and not q.is_cuda
    causal = may_skip and mask is not None and torch.equal(mask, torch.ones_like(mask).tril_())
    attn_mask = None if causal else attn_mask
    out = fused_attention(q.transpose(0, 1)[None], keys, values, scale=scale, mask=attn_mask, causal=causal)
    return out[0].transpose(0, 1)


def fused_attention(
    q: Float[Tensor, "B Hq n D"],
    k: Float[Tensor, "B Hk m D"],
    v: Float[Tensor, "B Hk m D"],
    *,
    scale: float,
    mask: Bool[Tensor, "*mask"] | Float[Tensor, "*mask"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B Hq n D"]:
    """Call PyTorch's fused attention without cuDNN's kernel, which PyTorch would prefer on a Hopper GPU.

    cuDNN builds a plan for every new shape, which takes tens of milliseconds, and every token of a sequence makes a new
    shape. Its output is also not 0 for a query without visible keys. Without cuDNN, long prompts without a mask take up
    to twice as long (experiment 02), but the engine's prompts on a GPU have masks.

    Args:
        q: queries, `[B, Hq, n, D]`.
        k: keys, `[B, Hk, m, D]`; Hk divides Hq.
        v: values, `[B, Hk, m, D]`.
        scale: factor on the scores.
        mask: True where a query attends to a key, or terms to add to the scores; broadcast to `[B, Hq, n, m]`.
        causal: query i attends to keys 0 to i, and there is no mask.
    """
    grouped = q.shape[1] != k.shape[1]
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
