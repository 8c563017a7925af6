"""A projection added to the residual stream in one launch, for few tokens: y = residual + x W^T, with split-K.

The output and down projections have few rows: 1,024 in Qwen3-0.6B, 64 blocks of 16. With one program per block, only
half of a GPU would read the weight. So several programs share a block: each computes a part of the columns and writes
its partial sums, and the program that finishes last adds all of them to the residual. Which program finishes last
changes from run to run, but the order of the additions does not, so the result is the same bit for bit. (Split-K is
often written with atomic additions to the output, which add the partial sums in the order in which they arrive.)
Stream-K (Osama et al. 2023) describes splits of any size, and the fix-up that they require.

Compared with a product and a separate addition, this saves a launch and, in 16-bit dtypes, 4 T hidden bytes for the
product, which is no longer written and read.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from book.kernels.tiles import (
    MAX_TOKENS,
    PROGRAMS,
    Tile,
    load_tile,
    multiply,
    padded_tokens,
    prefetch,
    tile_of_one_token,
)
from mini_engine.models.linear import linear

MAX_BLOCKS = 65_536  # blocks of rows


def linear_residual_reference(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"], residual: Float[Tensor, "T N"]
) -> Float[Tensor, "T N"]:
    """Compute `residual + x @ weight.T` in PyTorch."""
    return residual + linear(x, weight)


class LinearResidual:
    """`linear_residual_reference` in one launch.

    It keeps a counter for each block of rows, which is 0 between launches, so use it on one stream at a time.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._arrivals = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)

    def __call__(
        self,
        x: Float[Tensor, "T K"],
        weight: Float[Tensor, "N K"],
        residual: Float[Tensor, "T N"],
        *,
        pdl: bool = False,
        tile: Tile | None = None,
    ) -> Float[Tensor, "T N"]:
        """Compute `residual + x @ weight.T` for at most `MAX_TOKENS` tokens; for more, call the reference.

        Args:
            x: [T, K] contiguous.
            weight: [N, K] contiguous, in the dtype of x.
            residual: [T, N] contiguous; not changed.
            pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
            tile: the work of a program; None: chosen from the shapes.
        """
        num_tokens, num_columns = x.shape
        num_rows = len(weight)
        if num_tokens > MAX_TOKENS:
            return linear_residual_reference(x, weight, residual)
        tile = tile or default_tile(num_tokens, num_rows, num_columns)
        tiles_per_split = triton.cdiv(triton.cdiv(num_columns, tile.columns), tile.splits)
        splits = triton.cdiv(num_columns, tiles_per_split * tile.columns)  # none of them empty
        out = torch.empty_like(residual)
        partials = x.new_empty(splits, num_tokens, num_rows, dtype=torch.float32) if splits > 1 else out
        _linear_residual_kernel[(triton.cdiv(num_rows, tile.rows), splits)](
            x,
            weight,
            residual,
            out,
            partials,
            self._arrivals,
            num_tokens,
            num_rows,
            K=num_columns,
            TOKENS=padded_tokens(num_tokens),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            COUNT=tiles_per_split * tile.columns,
            SPLITS=splits,
            PDL=pdl,
            num_warps=tile.num_warps,
            **({"launch_pdl": True} if pdl else {}),
        )
        return out


def default_tile(num_tokens: int, num_rows: int, num_columns: int) -> Tile:
    """Choose the tile: whole rows for one token; for several tokens, split-K if there are few blocks of rows."""
    if num_tokens > 1:
        rows, columns = 16 if num_tokens <= 16 else 32, 128
        splits = PROGRAMS // triton.cdiv(num_rows, rows)
        return Tile(rows, columns, splits=max(1, min(splits, num_columns // columns)))
    return tile_of_one_token(num_rows, num_columns)


@no_type_check
@triton.jit
def _linear_residual_kernel(
    x, weight, residual, out, partials, arrivals, num_tokens, num_rows, K: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0), tl.program_id(1)
    row, token = block * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    start = split * COUNT
    column = start + tl.arange(0, COLUMNS)
    is_token = (token < num_tokens)[:, None]
    w = load_tile(weight, row, column, num_rows, K)
    if PDL:
        if COLUMNS < COUNT:
            prefetch(weight, row, start, COUNT, num_rows, K)
        gdc_wait()
        gdc_launch_dependents()

    place = token[:, None] * num_rows + row[None, :]
    mask = is_token & (row < num_rows)[None, :]
    before = tl.load(residual + place, mask=mask, other=0.0)  # loads during the products
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in tl.static_range(0, COUNT, COLUMNS):
        at = first + column
        tokens = tl.load(x + token[:, None] * K + at[None, :], mask=is_token & (at < K)[None, :], other=0.0)
        now = w
        if first + COLUMNS < COUNT:  # loads while this tile is multiplied
            w = load_tile(weight, row, at + COLUMNS, num_rows, K)
        total += multiply(tokens, now, TOKENS)

    is_last = True
    if SPLITS > 1:
        tl.store(partials + split * num_tokens * num_rows + place, total, mask=mask)
        tl.debug_barrier()  # all threads must have stored their sums before the program is counted
        is_last = tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            total = tl.zeros((TOKENS, ROWS), tl.float32)
            for other in range(SPLITS):  # in the order of the columns, whichever program is last
                theirs = partials + other * num_tokens * num_rows + place
                total += tl.load(theirs, mask=mask, other=0.0, cache_modifier=".cg")  # others wrote to L2
            tl.store(arrivals + block, 0)
        total += before.to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
