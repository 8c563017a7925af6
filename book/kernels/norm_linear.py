"""RMSNorm and the projection after it in one launch, optionally with the gated activation, for few tokens.

RMSNorm multiplies a whole row by 1 / rms(x), and a factor that is common to a row can be applied after the product:
norm(x) W^T = (x * norm_weight) W^T / rms(x). So one pass over x computes the product and the sum of squares, and the
normalized row is never written. For T tokens in a 16-bit dtype this saves a launch and 4 T hidden bytes (the normalized
rows, written and read). `norm_gate_up_silu` also keeps gate and up in registers, which saves another launch and another
8 T I bytes. With few tokens both savings are small compared with the weights, which no fusion makes smaller. What
fusion saves is the time between kernels.

That time shrinks further with programmatic dependent launch, available from Hopper on (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"): a kernel starts while the previous one still runs, loads its first
weights, which the previous kernel does not change, and only then waits for x. FlashNorm (Graef et al. 2024) describes
moving the norm's factor after the product.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from book.kernels.tiles import MAX_TOKENS, Tile, load_tile, multiply, padded_tokens, prefetch, tile_of_one_token
from mini_engine.models.layers import rms_norm
from mini_engine.models.linear import linear


def norm_linear(
    x: Float[Tensor, "T K"],
    norm_weight: Float[Tensor, " K"],
    eps: float,
    weight: Float[Tensor, "N K"],
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "T N"]:
    """Compute `rms_norm(x) @ weight.T`; more than `MAX_TOKENS` tokens are left to `norm_linear_reference`.

    Args:
        x: [T, K] contiguous, bfloat16 or float32; the product could overflow float16 before it is scaled.
        norm_weight: [K] weight of the norm.
        eps: epsilon of the norm.
        weight: [N, K] contiguous, in the dtype of x.
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
        tile: the work of a program; None: chosen from the shapes.
    """
    if len(x) > MAX_TOKENS:
        return norm_linear_reference(x, norm_weight, eps, weight)
    return _launch(x, norm_weight, eps, weight, len(weight), False, pdl, tile)


def norm_linear_reference(
    x: Float[Tensor, "T K"], norm_weight: Float[Tensor, " K"], eps: float, weight: Float[Tensor, "N K"]
) -> Float[Tensor, "T N"]:
    """Compute `norm_linear` in PyTorch."""
    return linear(rms_norm(x, norm_weight, eps), weight)


def norm_gate_up_silu(
    x: Float[Tensor, "T K"],
    norm_weight: Float[Tensor, " K"],
    eps: float,
    gate_up: Float[Tensor, "I2 K"],
    *,
    pdl: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "T I"]:
    """Compute `silu(gate) * up` of the normalized tokens, the input of the down projection (SwiGLU, Shazeer 2020).

    A program computes a block of the gate's rows and the same rows of the up projection.

    Args:
        x: as in `norm_linear`.
        norm_weight: as in `norm_linear`.
        eps: as in `norm_linear`.
        gate_up: the gate's I rows, then the up projection's.
        pdl: as in `norm_linear`.
        tile: as in `norm_linear`; `rows` counts the gate's rows.
    """
    if len(x) > MAX_TOKENS:
        return norm_gate_up_silu_reference(x, norm_weight, eps, gate_up)
    return _launch(x, norm_weight, eps, gate_up, len(gate_up) // 2, True, pdl, tile)


def norm_gate_up_silu_reference(
    x: Float[Tensor, "T K"], norm_weight: Float[Tensor, " K"], eps: float, gate_up: Float[Tensor, "I2 K"]
) -> Float[Tensor, "T I"]:
    """Compute `norm_gate_up_silu` in PyTorch."""
    gate, up = norm_linear_reference(x, norm_weight, eps, gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


def default_tile(num_tokens: int, num_rows: int, num_columns: int, gated: bool) -> Tile:
    """Choose the tile: whole rows at once for one token; 128 columns at a time, on tensor cores, for several."""
    if num_tokens > 1:
        return Tile(rows=16 if num_tokens <= 16 else 32, columns=128)
    return tile_of_one_token(num_rows, num_columns, 2 if gated else 1)


def _launch(
    x: Float[Tensor, "T K"],
    norm_weight: Float[Tensor, " K"],
    eps: float,
    weight: Float[Tensor, "rows K"],
    num_outputs: int,
    gated: bool,
    pdl: bool,
    tile: Tile | None,
) -> Float[Tensor, "T N"]:
    num_tokens, num_columns = x.shape
    tile = tile or default_tile(num_tokens, num_outputs, num_columns, gated)
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    _norm_linear_kernel[(triton.cdiv(num_outputs, tile.rows),)](
        x,
        norm_weight,
        eps,
        weight,
        out,
        num_tokens,
        num_outputs,
        K=num_columns,
        TOKENS=padded_tokens(num_tokens),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GATED=gated,
        PDL=pdl,
        num_warps=tile.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


@no_type_check
@triton.jit
def _norm_linear_kernel(
    x, norm_weight, eps, weight, out, num_tokens, num_rows, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    token = tl.arange(0, TOKENS)
    is_token = (token < num_tokens)[:, None]
    w = load_tile(weight, row, column, num_rows, K)
    if GATED:  # the up projection's rows follow the gate's
        up_w = load_tile(weight, num_rows + row, column, 2 * num_rows, K)
    factors = tl.load(norm_weight + column, mask=column < K, other=0.0)
    if PDL:
        if COLUMNS < K:
            prefetch(weight, row, 0, K, num_rows, K)
            if GATED:
                prefetch(weight, num_rows + row, 0, K, 2 * num_rows, K)
        gdc_wait()
        gdc_launch_dependents()

    product = tl.zeros((TOKENS, ROWS), tl.float32)
    up = tl.zeros((TOKENS, ROWS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for first in tl.static_range(0, K, COLUMNS):
        at = first + column
        tokens = tl.load(x + token[:, None] * K + at[None, :], mask=is_token & (at < K)[None, :], other=0.0)
        tokens = tokens.to(tl.float32)
        squares += tl.sum(tokens * tokens, 1)
        tokens = tokens * factors.to(tl.float32)[None, :]
        now = w
        if GATED:
            up_now = up_w
        if first + COLUMNS < K:  # loads while this tile is multiplied
            at = at + COLUMNS
            w = load_tile(weight, row, at, num_rows, K)
            if GATED:
                up_w = load_tile(weight, num_rows + row, at, 2 * num_rows, K)
            factors = tl.load(norm_weight + at, mask=at < K, other=0.0)
        product += multiply(tokens, now, TOKENS)
        if GATED:
            up += multiply(tokens, up_now, TOKENS)

    factor = tl.rsqrt(squares / K + eps)[:, None]
    product = product * factor
    if GATED:
        product = product / (1 + tl.exp(-product)) * (up * factor)
    mask = is_token & (row < num_rows)[None, :]
    tl.store(out + token[:, None] * num_rows + row[None, :], product.to(out.dtype.element_ty), mask=mask)
