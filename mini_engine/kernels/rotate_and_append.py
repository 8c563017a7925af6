"""QK-norm, rotation and the append to the KV cache in one launch, between the fused projection and attention.

Without fusion these are five kernels that read and write the same few kilobytes of each token: two norms, a rotation of
queries and keys, a store of keys and a store of values. Here a program loads heads of one token, writes queries to the
tensor that attention reads, and writes keys and values to their slot.

A cache in e4m3 stores keys and values divided by their scales. They are rounded once, from float32; the append without
fusion (`PagedBackend.append`) rounds them to the model's dtype first.

The program can also complete the norm before the projection. That norm multiplies a token by 1 / rms, a factor that can
be applied to the product instead (chapter 11 explains why). The program reads the token again to compute it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Heads of one program: with many tokens more of them, because each program computes the token's norm.
HEADS, HEADS_OF_MANY = 8, 32
MANY_TOKENS = 1024
LARGEST_E4M3 = tl.constexpr(448.0)


def rotate_and_append(
    qkv: Float[Tensor, "T W"],
    norm_weights: tuple[Float[Tensor, " D"], Float[Tensor, " D"]] | None,
    eps: float,
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    pages: tuple[Tensor, Tensor],
    layout: str,
    slot_mapping: Int[Tensor, " T"],
    *,
    kv_scales: tuple[float, float] | None = None,
    tokens: Float[Tensor, "T hidden"] | None = None,
    pdl: bool = False,
    next_waits: bool = False,
    heads: int | None = None,
) -> Float[Tensor, "T Hq D"]:
    """Normalize and rotate queries and keys, store keys and values, and return the queries.

    Args:
        qkv: for each token its queries, keys and values, W = (Hq + 2 Hk) D numbers.
        norm_weights: weights of the norms of queries and of keys; None: no norm.
        eps: epsilon of every norm.
        cos: cosines of each token's rotation.
        sin: its sines.
        pages: the layer's keys and values in the cache, changed in place.
        layout: "NHD" or "HND".
        slot_mapping: slot of each token's key and value.
        kv_scales: see `AttentionSpec`; only for a cache in e4m3.
        tokens: the contiguous inputs of the projection if they have not been normalized; None if they have been.
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
        next_waits: with `pdl`, let the next kernel start early, because it reads no key of this step before it waits
            for this one.
        heads: of one program, a power of two, which decides in what order the norms add; None: by the number of tokens.
    """
    keys, values = pages
    head_axis, token_axis = (2, 1) if layout == "NHD" else (1, 2)
    num_kv_heads, page_size, head_dim = keys.shape[head_axis], keys.shape[token_axis], keys.shape[3]
    num_tokens, num_heads = len(qkv), qkv.shape[1] // head_dim
    q = qkv.new_empty(num_tokens, num_heads - 2 * num_kv_heads, head_dim)
    q_weight, k_weight = norm_weights or (qkv, qkv)  # pointers that are not read
    hidden_size = tokens.shape[1] if tokens is not None else 0
    k_scale, v_scale = kv_scales or (1.0, 1.0)
    if heads is None:
        heads = HEADS if num_tokens < MANY_TOKENS else HEADS_OF_MANY
    _kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        tokens if tokens is not None else qkv,
        qkv,
        qkv.stride(0),
        q_weight,
        k_weight,
        eps,
        cos,
        sin,
        slot_mapping,
        q,
        keys,
        values,
        keys.stride(0),
        keys.stride(token_axis),
        keys.stride(head_axis),
        page_size,
        q.shape[1],
        num_kv_heads,
        1 / k_scale,
        1 / v_scale,
        HAS_NORM=norm_weights is not None,
        HALF=head_dim // 2,
        HEADS=heads,
        HIDDEN=hidden_size,
        IS_E4M3=keys.dtype == torch.float8_e4m3fn,
        PDL=pdl,
        NEXT_WAITS=next_waits,
        **({"launch_pdl": True} if pdl else {}),
    )
    return q


@no_type_check
@triton.jit
def _kernel(
    tokens, qkv, token_stride, q_weight, k_weight, eps, cos, sin, slots, q, keys, values, page_stride, slot_stride,
    head_stride, page_size, num_q, num_kv, k_factor, v_factor, HAS_NORM: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, HIDDEN: tl.constexpr, IS_E4M3: tl.constexpr, PDL: tl.constexpr, NEXT_WAITS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    exists = (head < num_q + 2 * num_kv)[:, None]
    if PDL:
        if NEXT_WAITS:
            gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots + token)
    source = qkv + token * token_stride + head[:, None] * 2 * HALF + column[None, :]
    first = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)

    if HIDDEN:
        token_factor = norm_factor(tokens + token * HIDDEN, eps, HIDDEN)
        first, second = first * token_factor, second * token_factor

    is_q, is_v = (head < num_q)[:, None], (head >= num_q + num_kv)[:, None]
    normed_first, normed_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        factor = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        q_first, q_second = tl.load(q_weight + column), tl.load(q_weight + HALF + column)
        k_first, k_second = tl.load(k_weight + column), tl.load(k_weight + HALF + column)
        normed_first = first * factor * tl.where(is_q, q_first[None, :], k_first[None, :]).to(tl.float32)
        normed_second = second * factor * tl.where(is_q, q_second[None, :], k_second[None, :]).to(tl.float32)
    c = tl.load(cos + token * HALF + column)[None, :].to(tl.float32)
    s = tl.load(sin + token * HALF + column)[None, :].to(tl.float32)
    first = tl.where(is_v, first, normed_first * c - normed_second * s)
    second = tl.where(is_v, second, normed_second * c + normed_first * s)

    dtype = q.dtype.element_ty
    to_q = q + (token * num_q + head[:, None]) * 2 * HALF + column[None, :]
    tl.store(to_q, first.to(dtype), mask=is_q)
    tl.store(to_q + HALF, second.to(dtype), mask=is_q)
    to_slot = (slot // page_size) * page_stride + (slot % page_size) * slot_stride
    kv_head = (head - num_q) % num_kv
    at = to_slot + kv_head[:, None] * head_stride + column[None, :]
    is_k = ~is_q & ~is_v
    if IS_E4M3:
        factor = tl.where(is_v, v_factor, k_factor)
        first, second = saturated(first * factor), saturated(second * factor)
    stored = keys.dtype.element_ty
    tl.store(keys + at, first.to(stored), mask=is_k)
    tl.store(keys + at + HALF, second.to(stored), mask=is_k)
    tl.store(values + at, first.to(stored), mask=is_v & exists)
    tl.store(values + at + HALF, second.to(stored), mask=is_v & exists)


@no_type_check
@triton.jit
def saturated(x):
    """Limit numbers to the range of e4m3, except NaN."""
    return tl.clamp(x, -LARGEST_E4M3, LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL)


@no_type_check
@triton.jit
def norm_factor(x, eps, SIZE: tl.constexpr):
    """Compute 1 / rms(x) for one token of `SIZE` numbers, the factor of RMSNorm without the norm's weight."""
    column = tl.arange(0, triton.next_power_of_2(SIZE))
    values = tl.load(x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
