"""Products of many tokens with a matrix in FP8: the tokens are quantized, too, and the tensor cores multiply FP8.

That halves the bytes and doubles the rate of a product. Each token has a scale of its own, and the matrix one for each
row or for all. On Hopper, cuBLAS reaches the memory bandwidth only if each operand has a single scale. So it multiplies
as if there were none, and the kernel after the product applies them: to queries, keys and values, before SwiGLU, or
before the addition to the residual. The kernel before the product quantizes the tokens, and normalizes them, too: the
norm's factor is part of the token's scale.

The tensor cores keep only about 14 bits of a sum ("fast accumulation"), which is faster than adding up in float32 from
time to time. The error is a tenth of that of the rounding to FP8. Explained in chapter 13.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Shaped
from torch import Tensor

from mini_engine.kernels.gemv import let_next_start_and_wait
from mini_engine.quantization import FP8, LARGEST

BLOCK = 1024  # columns of a program of `apply_scales`
FEWEST_ROWS = 16  # with fewer, cuBLAS chooses kernels that take twice as long for small matrices


@dataclass(frozen=True)
class Tokens:
    """Tokens in FP8.

    Attributes:
        q: [rows, In] float8_e4m3fn; the rows after the tokens have any numbers.
        scale: [T] float32, the factor of each token.
    """

    q: Shaped[Tensor, "rows In"]
    scale: Float32[Tensor, " T"]


@dataclass(frozen=True)
class Product:
    """A product to which the scales have not been applied.

    Attributes:
        numbers: [T, Out] bfloat16.
        token_scale: [T] float32.
        row_scale: [Out] float32.
    """

    numbers: Float[Tensor, "T Out"]
    token_scale: Float32[Tensor, " T"]
    row_scale: Float32[Tensor, " Out"]


def multiply(tokens: Tokens, weight: Shaped[Tensor, "Out In"], row_scale: Float32[Tensor, " Out"]) -> Product:
    """Multiply tokens in FP8 by a matrix in FP8.

    Args:
        tokens: In is a multiple of 16.
        weight: contiguous; float8_e4m3fn. Out is a multiple of 16.
        row_scale: of each row of the matrix.
    """
    one = _one(weight.device)
    numbers = torch._scaled_mm(tokens.q, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return Product(numbers[: len(tokens.scale)], tokens.scale, row_scale)


def quantize_tokens(
    x: Float[Tensor, "T In"],
    norm_weight: Float[Tensor, " In"] | None = None,
    eps: float = 0.0,
    *,
    added: Product | None = None,
    pdl: bool = False,
) -> Tokens:
    """Round tokens to float8_e4m3fn, so that the largest number of each becomes 448.

    Args:
        x: contiguous.
        norm_weight: normalize the tokens first (RMSNorm) with this weight; None: do not.
        eps: epsilon of the norm.
        added: add this product to x first, in place.
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
    """
    tokens = _empty_tokens(x, x.shape[1])
    own = (added.numbers, added.token_scale, added.row_scale) if added else (None, None, None)
    _quantize_tokens[(len(x),)](
        x, *own, norm_weight, tokens.q, tokens.scale, eps,
        ADDS=added is not None, COLUMNS=x.shape[1], LARGEST=LARGEST["fp8"], PDL=pdl, **_options(x.shape[1], pdl),
    )  # fmt: skip
    return tokens


def quantize_swiglu(product: Product, *, pdl: bool = False) -> Tokens:
    """Apply scales and SwiGLU to the product with gate and up, and quantize the result.

    Args:
        product: the gate's numbers of each token, then the up projection's.
        pdl: see `quantize_tokens`.
    """
    num_tokens, size = len(product.numbers), product.numbers.shape[1] // 2
    tokens = _empty_tokens(product.numbers, size)
    _quantize_swiglu[(num_tokens,)](
        product.numbers, product.token_scale, product.row_scale, tokens.q, tokens.scale,
        COLUMNS=size, LARGEST=LARGEST["fp8"], PDL=pdl, **_options(size, pdl),
    )  # fmt: skip
    return tokens


def apply_scales(
    product: Product, residual: Float[Tensor, "T Out"] | None = None, *, pdl: bool = False
) -> Float[Tensor, "T Out"]:
    """Return the product with its scales, in place, or add it to the residual stream in place and return that.

    Args:
        product: contiguous numbers.
        residual: contiguous.
        pdl: see `quantize_tokens`.
    """
    numbers = product.numbers
    out = numbers if residual is None else residual
    _apply_scales[(len(numbers), triton.cdiv(numbers.shape[1], BLOCK))](
        numbers, product.token_scale, product.row_scale, out, numbers.shape[1],
        ADDS=residual is not None, BLOCK=BLOCK, PDL=pdl, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def _empty_tokens(like: Tensor, size: int) -> Tokens:
    q = like.new_empty(max(len(like), FEWEST_ROWS), size, dtype=FP8)
    return Tokens(q, like.new_empty(len(like), dtype=torch.float32))


def _options(num_columns: int, pdl: bool) -> dict[str, Any]:
    """Options of a launch whose programs have a whole token each: 8 numbers for each thread and one step, or more."""
    num_warps = max(1, min(16, triton.next_power_of_2(num_columns) // 512))
    return {"num_warps": num_warps} | ({"launch_pdl": True} if pdl else {})


@cache
def _one(device: torch.device) -> Float32[Tensor, "1 1"]:
    return torch.ones(1, 1, device=device)


@no_type_check
@triton.jit
def _quantize_tokens(
    x, product, token_scale, row_scale, norm_weight, q, scale, eps, ADDS: tl.constexpr, COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(COLUMNS))
    exists, place = column < COLUMNS, token * COLUMNS + column
    let_next_start_and_wait(PDL)
    values = tl.load(x + place, mask=exists, other=0.0).to(tl.float32)
    if ADDS:
        numbers = tl.load(product + place, mask=exists, other=0.0).to(tl.float32)
        values += numbers * tl.load(token_scale + token) * tl.load(row_scale + column, mask=exists, other=0.0)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + place, rounded, mask=exists)
        values = rounded.to(tl.float32)
    factor = 1.0
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + eps)
        values *= tl.load(norm_weight + column, mask=exists, other=0.0).to(tl.float32)
    _store_fp8(values, factor, q + place, scale + token, exists, LARGEST)


@no_type_check
@triton.jit
def _quantize_swiglu(
    product, token_scale, row_scale, q, scale, COLUMNS: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(COLUMNS))
    exists, place = column < COLUMNS, token * COLUMNS * 2 + column
    of_gate = tl.load(row_scale + column, mask=exists, other=0.0)
    of_up = tl.load(row_scale + COLUMNS + column, mask=exists, other=0.0)
    let_next_start_and_wait(PDL)
    factor = tl.load(token_scale + token)
    gate = tl.load(product + place, mask=exists, other=0.0).to(tl.float32) * factor * of_gate
    up = tl.load(product + COLUMNS + place, mask=exists, other=0.0).to(tl.float32) * factor * of_up
    values = gate / (1 + tl.exp(-gate)) * up
    _store_fp8(values, 1.0, q + token * COLUMNS + column, scale + token, exists, LARGEST)


@no_type_check
@triton.jit
def _apply_scales(
    product, token_scale, row_scale, out, num_columns, ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists, place = column < num_columns, token * num_columns + column
    of_row = tl.load(row_scale + column, mask=exists, other=0.0)
    let_next_start_and_wait(PDL)
    values = tl.load(product + place, mask=exists, other=0.0).to(tl.float32) * tl.load(token_scale + token) * of_row
    if ADDS:
        values += tl.load(out + place, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=exists)


@no_type_check
@triton.jit
def _store_fp8(values, factor, to_q, to_scale, exists, LARGEST: tl.constexpr):
    """Store a token in FP8, and its scale times a factor that was left out of the values."""
    largest = tl.max(tl.abs(values), 0)
    step = tl.where(largest > 0, largest / LARGEST, 1.0)
    rounded = tl.clamp(values / step, -LARGEST, LARGEST).to(tl.float8e4nv)
    tl.store(to_q, rounded, mask=exists)
    tl.store(to_scale, step * factor)
