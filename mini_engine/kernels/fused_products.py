"""A decoder layer's matrix products for up to 256 tokens, each in one launch with everything between it and the next.

In a decode step each product takes a few microseconds, and each kernel between two products two or three more, mostly
to start and to end. Here the kernels between products are gone. A program keeps its part of the product in registers,
applies the norm's factor, and finishes the work itself: QK-norm, rotation and the append to the KV cache after the
first product, the gated activation after the third, and the residual after the second and the fourth. Rotation and
activation combine two rows of the weight, which are half a head or half of the weight apart, so a program computes a
block of rows and its partner.

A kernel starts while the previous one still runs (programmatic dependent launch), and asks for its part of the weight,
which then moves from HBM to the L2 cache during the end of the previous kernel. Tiles of tokens and weights are copied
to shared memory by TMA, several ahead of the tensor cores.

The norms' weights must have been folded into the products (`LlamaLayer.fold_norms`). Experiment 09 measures what this
gains.
"""

from dataclasses import dataclass
from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class ProductTile:
    """The work of one program.

    Attributes:
        tokens: tokens, at least 64 for Hopper's tensor cores.
        rows: rows of the weight; if the program also computes their partners, as many again.
        columns: columns of both that are copied at a time.
        stages: copies ahead of the tensor cores.
        num_warps: warps that share the work.
    """

    tokens: int
    rows: int
    columns: int
    stages: int
    num_warps: int = 4


def qkv_append(
    x: Float[Tensor, "T hidden"],
    weight: Float[Tensor, "W hidden"],
    norm_weights: tuple[Float[Tensor, " D"], Float[Tensor, " D"]] | None,
    eps: float,
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    pages: tuple[Tensor, Tensor],
    layout: str,
    slot_mapping: Int[Tensor, " T"],
    *,
    pdl: bool = False,
    next_waits: bool = False,
    tile: ProductTile | None = None,
) -> Float[Tensor, "T Hq D"]:
    """Compute queries, keys and values of tokens, rotate them, store keys and values, and return the queries.

    The result is that of `rotate_and_append` after the product.

    Args:
        x: contiguous, not normalized.
        weight: contiguous; rows of the queries, keys and values, head by head.
        norm_weights: as for `rotate_and_append`, as are `eps` to `slot_mapping`.
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
        next_waits: with `pdl`, let the next kernel start early, because it reads no key before it waits for this one.
        tile: the work of a program, with half a head as its rows; None: chosen from the shapes.
    """
    keys, values = pages
    head_axis, token_axis = (2, 1) if layout == "NHD" else (1, 2)
    num_kv_heads, page_size, head_dim = keys.shape[head_axis], keys.shape[token_axis], keys.shape[3]
    num_tokens, hidden_size = x.shape
    num_heads = len(weight) // head_dim
    tile = tile or _tile(head_dim // 2, hidden_size)
    q = x.new_empty(num_tokens, num_heads - 2 * num_kv_heads, head_dim)
    q_weight, k_weight = norm_weights or (weight, weight)  # pointers that are not read
    _qkv_append_kernel[(num_heads, triton.cdiv(num_tokens, tile.tokens))](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.columns]),
        TensorDescriptor.from_tensor(weight, [tile.rows, tile.columns]),
        weight,
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
        num_tokens,
        q.shape[1],
        num_kv_heads,
        HAS_NORM=norm_weights is not None,
        NEXT_WAITS=next_waits,
        **_constants(tile, hidden_size, pdl),
    )
    return q


def gate_up_swiglu(
    x: Float[Tensor, "T hidden"],
    gate_up: Float[Tensor, "I2 hidden"],
    eps: float,
    *,
    pdl: bool = False,
    tile: ProductTile | None = None,
) -> Float[Tensor, "T I"]:
    """Compute `swiglu` of the product with gate and up, of tokens that have not been normalized.

    Args:
        x: contiguous, not normalized.
        gate_up: contiguous; the gate's I rows, then the up projection's.
        eps: epsilon of the norm.
        pdl: as for `qkv_append`.
        tile: the work of a program; `rows` counts the gate's. None: chosen from the shapes.
    """
    (num_tokens, hidden_size), size = x.shape, len(gate_up) // 2
    tile = tile or _tile(64, hidden_size)
    out = x.new_empty(num_tokens, size)
    _gate_up_swiglu_kernel[(triton.cdiv(size, tile.rows), triton.cdiv(num_tokens, tile.tokens))](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.columns]),
        TensorDescriptor.from_tensor(gate_up, [tile.rows, tile.columns]),
        gate_up,
        eps,
        out,
        num_tokens,
        size,
        **_constants(tile, hidden_size, pdl),
    )
    return out


def add_product(
    residual: Float[Tensor, "T N"],
    x: Float[Tensor, "T K"],
    weight: Float[Tensor, "N K"],
    *,
    pdl: bool = False,
    tile: ProductTile | None = None,
) -> Float[Tensor, "T N"]:
    """Add `x @ weight.T` to the residual stream, in place.

    Args:
        residual: contiguous; overwritten.
        x: contiguous.
        weight: contiguous.
        pdl: as for `qkv_append`.
        tile: the work of a program; None: chosen from the shapes.
    """
    (num_tokens, num_columns), num_rows = x.shape, len(weight)
    tile = tile or _tile(32, num_columns)
    _add_product_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(num_tokens, tile.tokens))](
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.columns]),
        TensorDescriptor.from_tensor(weight, [tile.rows, tile.columns]),
        weight,
        residual,
        num_tokens,
        num_rows,
        **_constants(tile, num_columns, pdl),
    )
    return residual


def _tile(rows: int, num_columns: int) -> ProductTile:
    return ProductTile(64, rows, 128 if num_columns % 128 == 0 else 64, stages=4)


def _constants(tile: ProductTile, num_columns: int, pdl: bool) -> dict[str, object]:
    """Return the arguments that all three kernels are compiled for."""
    return {
        "K": num_columns, "TOKENS": tile.tokens, "ROWS": tile.rows, "COLUMNS": tile.columns, "STAGES": tile.stages,
        "PDL": pdl, "num_warps": tile.num_warps, **({"launch_pdl": True} if pdl else {}),
    }  # fmt: skip


@no_type_check
@triton.jit
def _start(
    weight, row, partner, num_rows, K: tl.constexpr, HAS_PARTNER: tl.constexpr, PDL: tl.constexpr,
    NEXT_WAITS: tl.constexpr,
):  # fmt: skip
    """Ask for rows of the weight, and for their partners, then wait for the previous kernel."""
    if PDL:
        if tl.program_id(1) == 0:  # the programs of other tokens need the same rows
            _prefetch(weight, row, num_rows, K)
            if HAS_PARTNER:
                _prefetch(weight, row + partner, num_rows + partner, K)
        if NEXT_WAITS:
            gdc_launch_dependents()
        gdc_wait()


@no_type_check
@triton.jit
def _prefetch(weight, row, num_rows, K: tl.constexpr):
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    for first in tl.static_range(0, K, 8 * LINE):
        column = first + tl.arange(0, 8) * LINE
        exists = (row < num_rows)[:, None] & (column < K)[None, :]
        line = tl.where(exists, row.to(tl.int64)[:, None] * K + column[None, :], 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + line], tl.int32, is_pure=False, pack=1
        )


@no_type_check
@triton.jit
def _products(
    x, weight, token, row, partner, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute tokens times a block of rows, times the rows `partner` further on, and the tokens' sums of squares."""
    own, other = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for column in tl.range(0, K, COLUMNS, num_stages=STAGES):
        tokens = x.load([token, column])
        own = tl.dot(tokens, weight.load([row, column]).T, own)
        other = tl.dot(tokens, weight.load([row + partner, column]).T, other)
        numbers = tokens.to(tl.float32)
        squares += tl.sum(numbers * numbers, 1)
    return own, other, squares


@no_type_check
@triton.jit
def _qkv_append_kernel(
    x, weight, weight_memory, q_weight, k_weight, eps, cos, sin, slots, q, keys, values, page_stride, slot_stride,
    head_stride, page_size, num_tokens, num_q, num_kv, HAS_NORM: tl.constexpr, NEXT_WAITS: tl.constexpr,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head, first_token = tl.program_id(0), tl.program_id(1) * TOKENS
    first_row = head * 2 * ROWS
    _start(weight_memory, first_row + tl.arange(0, ROWS), ROWS, first_row + ROWS, K, True, PDL, NEXT_WAITS)
    first, second, squares = _products(x, weight, first_token, first_row, ROWS, K, TOKENS, ROWS, COLUMNS, STAGES)

    token, column = first_token + tl.arange(0, TOKENS), tl.arange(0, ROWS)
    exists = token < num_tokens
    factor = tl.rsqrt(squares / K + eps)[:, None]
    first, second = first * factor, second * factor
    if head < num_q + num_kv:
        if HAS_NORM:
            norm = q_weight
            if head >= num_q:
                norm = k_weight
            mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * ROWS)
            factor = tl.rsqrt(mean + eps)[:, None]
            first = first * factor * tl.load(norm + column).to(tl.float32)[None, :]
            second = second * factor * tl.load(norm + ROWS + column).to(tl.float32)[None, :]
        at = token[:, None] * ROWS + column[None, :]
        c = tl.load(cos + at, mask=exists[:, None], other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=exists[:, None], other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s

    slot = tl.load(slots + token, mask=exists, other=0)
    to_slot = (slot // page_size) * page_stride + (slot % page_size) * slot_stride
    if head < num_q:
        to = q + (token.to(tl.int64) * num_q + head) * 2 * ROWS
    elif head < num_q + num_kv:
        to = keys + to_slot + (head - num_q) * head_stride
    else:
        to = values + to_slot + (head - num_q - num_kv) * head_stride
    to = to[:, None] + column[None, :]
    tl.store(to, first.to(q.dtype.element_ty), mask=exists[:, None])
    tl.store(to + ROWS, second.to(q.dtype.element_ty), mask=exists[:, None])


@no_type_check
@triton.jit
def _gate_up_swiglu_kernel(
    x, weight, weight_memory, eps, out, num_tokens, size, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_row, first_token = tl.program_id(0) * ROWS, tl.program_id(1) * TOKENS
    row, token = first_row + tl.arange(0, ROWS), first_token + tl.arange(0, TOKENS)
    _start(weight_memory, row, size, size, K, True, PDL, PDL)
    gate, up, squares = _products(x, weight, first_token, first_row, size, K, TOKENS, ROWS, COLUMNS, STAGES)
    factor = tl.rsqrt(squares / K + eps)[:, None]
    gate, up = gate * factor, up * factor
    result = gate / (1 + tl.exp(-gate)) * up
    mask = (token < num_tokens)[:, None] & (row < size)[None, :]
    tl.store(out + token[:, None] * size + row[None, :], result.to(out.dtype.element_ty), mask=mask)


@no_type_check
@triton.jit
def _add_product_kernel(
    x, weight, weight_memory, residual, num_tokens, num_rows, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first_row, first_token = tl.program_id(0) * ROWS, tl.program_id(1) * TOKENS
    row, token = first_row + tl.arange(0, ROWS), first_token + tl.arange(0, TOKENS)
    _start(weight_memory, row, 0, num_rows, K, False, PDL, PDL)
    place = residual + token[:, None] * num_rows + row[None, :]
    mask = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    before = tl.load(place, mask=mask, other=0.0)  # loads during the products
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for column in tl.range(0, K, COLUMNS, num_stages=STAGES):
        total = tl.dot(x.load([first_token, column]), weight.load([first_row, column]).T, total)
    tl.store(place, (total + before.to(tl.float32)).to(residual.dtype.element_ty), mask=mask)
