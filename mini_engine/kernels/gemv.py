"""The matrix products of a decoder layer for up to four tokens, in Triton: matrix times vector, without tensor cores.

For so few tokens a product is a read of its weights. A program loads its rows of the weight into registers before it
waits for the previous kernel, whose result it needs only afterwards (programmatic dependent launch). So while one
product ends, the weights of the next are on their way. Then each token is multiplied, and the work that follows is done
in registers: the norm's factor, SwiGLU, or the residual. The norms' weights must have been folded into the products
(`LlamaLayer.fold_norms`).

`fused_products.py` computes more tokens on tensor cores. Explained in chapter 11.
"""

from typing import Any, no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Without tensor cores, an H200 computes about 28e12 multiply-adds a second, and reads 2.1e12 weights of 16 bits: 13 for
# each weight. For four tokens, they and the conversions to float32 take less time than the read.
MOST_TOKENS = 4
ELEMENTS = 8192  # weights that a program holds in the registers of 4 warps, unless a single row has more


def project(
    x: Float[Tensor, "T hidden"], weight: Float[Tensor, "N hidden"], eps: float, *, pdl: bool = False
) -> Float[Tensor, "T N"]:
    """Compute `norm(x) @ weight.T`, where `norm` is RMSNorm without weights. The product is rounded once.

    Args:
        x: contiguous, at most MOST_TOKENS tokens.
        weight: contiguous.
        eps: epsilon of the norm.
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
    """
    out = x.new_empty(len(x), len(weight))
    rows = _rows(x.shape[1])
    _project[(triton.cdiv(len(weight), rows),)](
        x, weight, eps, out, len(x), len(weight), TOKENS=triton.next_power_of_2(len(x)), ROWS=rows, **_sizes(x, pdl)
    )
    return out


def gate_up_swiglu(
    x: Float[Tensor, "T hidden"], gate_up: Float[Tensor, "I2 hidden"], eps: float, *, pdl: bool = False
) -> Float[Tensor, "T I"]:
    """Compute `silu(norm(x) @ gate.T) * (norm(x) @ up.T)`, where `norm` is RMSNorm without weights.

    Args:
        x: contiguous, at most MOST_TOKENS tokens.
        gate_up: contiguous; the gate's I rows, then the up projection's.
        eps: epsilon of the norm.
        pdl: see `project`.
    """
    size = len(gate_up) // 2
    out = x.new_empty(len(x), size)
    rows = max(1, _rows(x.shape[1]) // 2)
    _gate_up_swiglu[(triton.cdiv(size, rows),)](
        x, gate_up, eps, out, len(x), size, TOKENS=triton.next_power_of_2(len(x)), ROWS=rows, **_sizes(x, pdl)
    )
    return out


def add_product(
    residual: Float[Tensor, "T N"], x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], *, pdl: bool = False
) -> Float[Tensor, "T N"]:
    """Add `x @ weight.T` to the residual stream, in place.

    Args:
        residual: contiguous; overwritten.
        x: contiguous, at most MOST_TOKENS tokens.
        weight: contiguous.
        pdl: see `project`.
    """
    rows = _rows(x.shape[1])
    _add_product[(triton.cdiv(len(weight), rows),)](
        residual, x, weight, len(x), len(weight), TOKENS=triton.next_power_of_2(len(x)), ROWS=rows, **_sizes(x, pdl)
    )
    return residual


def _rows(num_columns: int) -> int:
    """Return the number of rows of a weight that one program multiplies."""
    return max(1, ELEMENTS // triton.next_power_of_2(num_columns))


def _sizes(x: Tensor, pdl: bool) -> dict[str, Any]:
    columns = x.shape[1]
    options = {"launch_pdl": True} if pdl else {}
    return {"COLUMNS": columns, "PDL": pdl, "num_warps": 4 if columns <= ELEMENTS else 8} | options


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _project(
    x, weight, eps, out, num_tokens, num_rows, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    loaded = load_rows(weight, row, exists, COLUMNS)
    let_next_start_and_wait(PDL)
    for token in tl.static_range(TOKENS):
        if token < num_tokens:
            values = load_token(x, token, COLUMNS)
            factor = tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + eps)
            product = tl.sum(loaded.to(tl.float32) * values[None, :], 1) * factor
            tl.store(out + token * num_rows + row, product.to(out.dtype.element_ty), mask=exists)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _gate_up_swiglu(
    x, gate_up, eps, out, num_tokens, size, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < size
    of_gate = load_rows(gate_up, row, exists, COLUMNS)
    of_up = load_rows(gate_up, row + size, exists, COLUMNS)
    let_next_start_and_wait(PDL)
    for token in tl.static_range(TOKENS):
        if token < num_tokens:
            values = load_token(x, token, COLUMNS)
            factor = tl.rsqrt(tl.sum(values * values, 0) / COLUMNS + eps)
            gate = tl.sum(of_gate.to(tl.float32) * values[None, :], 1) * factor
            up = tl.sum(of_up.to(tl.float32) * values[None, :], 1) * factor
            result = gate / (1 + tl.exp(-gate)) * up
            tl.store(out + token * size + row, result.to(out.dtype.element_ty), mask=exists)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _add_product(
    residual, x, weight, num_tokens, num_rows, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    loaded = load_rows(weight, row, exists, COLUMNS)
    let_next_start_and_wait(PDL)
    for token in tl.static_range(TOKENS):
        if token < num_tokens:
            values = load_token(x, token, COLUMNS)
            place = residual + token * num_rows + row
            total = tl.load(place, mask=exists, other=0.0).to(tl.float32)
            total += tl.sum(loaded.to(tl.float32) * values[None, :], 1)
            tl.store(place, total.to(residual.dtype.element_ty), mask=exists)


@no_type_check
@triton.jit
def load_rows(weight, row, exists, COLUMNS: tl.constexpr):
    """Load rows of a weight, padded to a power of two with zeros."""
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))
    place = row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    return tl.load(weight + place, mask=exists[:, None] & (column < COLUMNS)[None, :], other=0.0)


@no_type_check
@triton.jit
def load_token(x, token, COLUMNS: tl.constexpr):
    """Load a token as float32, padded to a power of two with zeros."""
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))
    return tl.load(x + token * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)


@no_type_check
@triton.jit
def let_next_start_and_wait(PDL: tl.constexpr):
    """Let the next kernel load its weights, then wait until the previous kernel has written its result.

    The next kernel waits in the same way, so it also waits for what this one waits for.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
