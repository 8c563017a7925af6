"""Functions that the projection kernels share: a program's tile, and its product."""

from dataclasses import dataclass
from typing import no_type_check

import triton
import triton.language as tl

MAX_TOKENS = 64  # per launch; with more tokens, reading the weights is no longer what limits a projection
PROGRAMS = 256  # fewest programs of a launch, if the weight is large enough: about two for each SM of an H200
ELEMENTS = 16_384  # most elements of the weight that a program for one token holds in registers


@dataclass(frozen=True)
class Tile:
    """The work of one program.

    Attributes:
        rows: rows of the weight, a power of two; for several tokens at least 16, as tensor cores require.
        columns: columns of the weight that are loaded at a time, a power of two; for several tokens at least 16.
        num_warps: warps that share the work.
        splits: programs that share a row, each for a part of the columns (split-K).
    """

    rows: int
    columns: int
    num_warps: int = 4
    splits: int = 1


def padded_tokens(num_tokens: int) -> int:
    """Round up the number of tokens to one that a kernel is compiled for: 1, 16, 32 or 64."""
    return 1 if num_tokens == 1 else max(16, triton.next_power_of_2(num_tokens))


def tile_of_one_token(num_rows: int, num_columns: int, projections: int = 1) -> Tile:
    """Choose a tile that fits in registers: whole rows, few enough for `PROGRAMS` programs, or a part of one row."""
    columns = min(triton.next_power_of_2(num_columns), ELEMENTS // projections)
    rows = min(ELEMENTS // projections // columns, triton.next_power_of_2(triton.cdiv(num_rows, PROGRAMS)))
    return Tile(rows, columns)


@no_type_check
@triton.jit
def load_tile(weight, row, column, num_rows, K: tl.constexpr):
    """Load rows and columns of a weight `[num_rows, K]`, with 0 outside it. Its cache lines are not needed again."""
    return tl.load(
        weight + row.to(tl.int64)[:, None] * K + column[None, :],
        mask=(row < num_rows)[:, None] & (column < K)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@no_type_check
@triton.jit
def prefetch(weight, row, first, COUNT: tl.constexpr, num_rows, K: tl.constexpr):
    """Start copying `COUNT` columns of these rows from HBM to the L2 cache, without waiting; only on a GPU."""
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
    """Compute `x @ w.T` in float32, x `[TOKENS, columns]`, w `[rows, columns]`; one token uses no tensor cores."""
    if TOKENS == 1:
        return tl.sum(w.to(tl.float32) * x.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(x.to(w.dtype), tl.trans(w), input_precision="ieee")
