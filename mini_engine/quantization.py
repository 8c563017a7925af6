"""Quantized matrices: fewer bits for each number, and a scale for each tile of numbers.

A number of the matrix is `q * scale + offset`. q has 8 bits (an integer or a float8) or 4, and all numbers of a tile
share a scale, and an offset if the format has them. A tile is a whole matrix, a row, a block of rows and columns, or a
group of neighboring columns in a row. `Format` names such a choice, and `QuantizedTensor` holds one matrix, in the same
form whatever the checkpoint's own layout is. Explained in chapter 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}  # of a symmetric range
GROUPS = (128, 64, 32)  # columns that share a scale in INT4, the largest that divides a row


@dataclass(frozen=True)
class Format:
    """How the numbers of a matrix are stored.

    Attributes:
        kind: "fp8" (e4m3), "int8" or "int4".
        rows: rows of a tile; None: all of a matrix.
        columns: columns of a tile; None: all of a matrix.
        has_offsets: a tile has an offset, so its range need not be symmetric around zero.
    """

    kind: str
    rows: int | None = 1
    columns: int | None = None
    has_offsets: bool = False

    @property
    def bits(self) -> int:
        """Bits of one number, without its share of scales and offsets."""
        return 4 if self.kind == "int4" else 8

    def tiles(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return how many tiles a matrix has along its rows and along its columns; the last ones may be smaller."""
        return ceil(num_rows / (self.rows or num_rows)), ceil(num_columns / (self.columns or num_columns))


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix [Out, In] in a quantized format.

    Attributes:
        format: how it is stored.
        q: [Out, In] float8_e4m3fn for "fp8", otherwise int8; in -8..7 for "int4".
        scale: [tiles, tiles] float32, a factor for each tile.
        offset: [tiles, tiles] float32, added after the scale; None without offsets.
        order: [In] the column of the matrix that column k of q, in the order of the tiles, belongs to; None: k.
    """

    format: Format
    q: Shaped[Tensor, "Out In"]
    scale: Float[Tensor, "TR TC"]
    offset: Float[Tensor, "TR TC"] | None = None
    order: Int[Tensor, " In"] | None = None

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "Out In"]:
        """Return the matrix, computed in float32 (float64 for float64) and rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        matrix = self.q.to(wide) * spread(self.scale.to(wide), self.format, self.shape)
        if self.offset is not None:
            matrix += spread(self.offset.to(wide), self.format, self.shape)
        if self.order is not None:
            matrix = torch.empty_like(matrix).index_copy_(1, self.order, matrix)
        return matrix.to(dtype)


def format_for(method: str, num_columns: int) -> Format:
    """Return the format in which `quantization=method` stores a matrix of a layer.

    FP8 has a scale for each row, as INT8 has. INT4 has a scale and an offset for each group of columns, because with 16
    values, a large number takes the precision of all that share its scale. A group has 128, 64 or 32 columns, the
    most that divide a row; it is the row if none does.

    Args:
        method: "fp8", "int8" or "int4".
        num_columns: columns of the matrix.
    """
    if method != "int4":
        return Format(method)
    return Format("int4", 1, next((group for group in GROUPS if num_columns % group == 0), None), has_offsets=True)


def spread(tiles: Float[Tensor, "TR TC"], form: Format, shape: torch.Size) -> Float[Tensor, "R C"]:
    """Repeat the value of each tile for the rows and columns of the tile.

    An axis with a single tile keeps the size 1, so the result broadcasts to `shape`.

    Args:
        tiles: a value for each tile.
        form: gives the size of a tile.
        shape: of the matrix.
    """
    for axis, size in enumerate((form.rows, form.columns)):
        if tiles.shape[axis] > 1 and size != 1:
            assert size is not None
            tiles = tiles.repeat_interleave(size, dim=axis).narrow(axis, 0, shape[axis])
    return tiles


def quantize(
    matrix: Float[Tensor, "Out In"], form: Format, scale_dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    """Round a matrix to a format: the largest number of a tile becomes the largest that the format has.

    A tile of zeros gets scale 1. A format with offsets maps the smallest and the largest number of a tile to the ends
    of its range.

    Args:
        matrix: finite numbers.
        form: the format. Ragged tiles (a size that does not divide the matrix) are allowed.
        scale_dtype: scales and offsets are rounded to this dtype first, and the numbers relative to them.
    """
    wide, shape = matrix.to(torch.promote_types(matrix.dtype, torch.float32)), matrix.shape

    def rounded(tiles: Tensor) -> Tensor:
        return tiles.to(scale_dtype).float().to(wide.dtype)

    def nonzero(scale: Tensor) -> Tensor:
        return torch.where(rounded(scale) > 0, rounded(scale), 1)

    tiled = _tiles_of(wide, form)
    if form.has_offsets:
        low, high = tiled.amin((1, 3)), tiled.amax((1, 3))
        scale = nonzero((high - low) / (2**form.bits - 1))
        offset = rounded(low + scale * 2 ** (form.bits - 1))
        q = (wide - spread(offset, form, shape)) / spread(scale, form, shape)
        lowest, largest = -(2.0 ** (form.bits - 1)), 2.0 ** (form.bits - 1) - 1
    else:
        scale, offset = nonzero(tiled.abs().amax((1, 3)) / LARGEST[form.kind]), None
        q = wide / spread(scale, form, shape)
        lowest, largest = -LARGEST[form.kind], LARGEST[form.kind]
    q = q.to(FP8) if form.kind == "fp8" else q.round().clamp(lowest, largest).to(torch.int8)
    return QuantizedTensor(form, q, scale.float(), None if offset is None else offset.float())


def _tiles_of(matrix: Tensor, form: Format) -> Float[Tensor, "TR rows TC columns"]:
    """View a matrix as tiles; ragged ones are filled up with numbers that occur in them."""
    for axis, size in enumerate((form.rows, form.columns)):
        missing = -matrix.shape[axis] % (size or matrix.shape[axis])
        if missing:
            last = matrix.narrow(axis, matrix.shape[axis] - 1, 1)
            matrix = torch.cat((matrix, last.expand([missing if i == axis else -1 for i in (0, 1)])), dim=axis)
    tiles = form.tiles(*matrix.shape)
    return matrix.reshape(tiles[0], matrix.shape[0] // tiles[0], tiles[1], matrix.shape[1] // tiles[1])
