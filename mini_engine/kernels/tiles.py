"""What the kernels of a projection share: the size of a program's work, its product, and the factor of a norm."""

from dataclasses import dataclass
from typing import no_type_check

import triton
import triton.language as tl

MAX_TOKENS = 64  # of one launch. With more tokens a projection is no longer limited by its weights' bytes.
PROGRAMS = 256  # of a launch, at least, where the weight is large enough: about two on each SM of an H200
ELEMENTS = 16_384  # of the weight, at most, that a program of one token holds in its registers


@dataclass(frozen=True)
class Tile:
    """What one program computes.

    Attributes:
        rows: rows of the weight, a power of two; with several tokens at least 16, which tensor cores need.
        columns: columns of the weight that are loaded at a time, a power of two; with several tokens at least 16.
        num_warps: warps that share the work.
        splits: programs that share a row, each with its part of the columns (split-K).
    """

    rows: int
    columns: int
    num_warps: int = 4
    splits: int = 1


def padded_tokens(num_tokens: int) -> int:
    """Round up the number of tokens to one that a kernel is compiled for: 1, 16, 32 or 64."""
    return 1 if num_tokens == 1 else max(16, triton.next_power_of_2(num_tokens))


def tile_of_one_token(num_rows: int, num_columns: int, projections: int = 1) -> Tile:
    """Choose as many whole rows of each projection as registers hold and `PROGRAMS` leaves, or a part of one row."""
    columns = min(triton.next_power_of_2(num_columns), ELEMENTS // projections)
    rows = min(ELEMENTS // projections // columns, triton.next_power_of_2(triton.cdiv(num_rows, PROGRAMS)))
    return Tile(rows, columns)


@no_type_check
@triton.jit
def load_tile(weight, row, column, num_rows, K: tl.constexpr):
    """Load these rows and columns of a weight `[num_rows, K]`; 0 outside of it. No line is needed a second time."""
    return tl.load(
        weight + row.to(tl.int64)[:, None] * K + column[None, :],
        mask=(row < num_rows)[:, None] & (column < K)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@no_type_check
@triton.jit
def prefetch(weight, row, first, COUNT: tl.constexpr, num_rows, K: tl.constexpr):
    """Start to copy `COUNT` columns of these rows from HBM to the L2 cache, and do not wait; for a GPU only."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements in 128 bytes
    for ahead in tl.static_range(0, COUNT, 16 * LINE):
        column = first + ahead + tl.arange(0, 16) * LINE
        exists = (row < num_rows)[:, None] & (column < K)[None, :] & (column < first + COUNT)[None, :]
        line = tl.where(exists, row.to(tl.int64)[:, None] * K + column[None, :], 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weight + line], tl.int32, is_pure=False, pack=1
        )


@no_type_check
@triton.jit
def multiply(x, w, TOKENS: tl.constexpr):
    """Compute `x @ w.T` in float32, x `[TOKENS, columns]`, w `[rows, columns]`; for one token without tensor cores."""
    if TOKENS == 1:
        return tl.sum(w.to(tl.float32) * x.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(x.to(w.dtype), tl.trans(w), input_precision="ieee")


@no_type_check
@triton.jit
def norm_factor(x, eps, SIZE: tl.constexpr):
    """Compute 1 / rms(x) of one token of `SIZE` numbers: what RMSNorm multiplies it by, before the norm's weight."""
    column = tl.arange(0, triton.next_power_of_2(SIZE))
    values = tl.load(x + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
