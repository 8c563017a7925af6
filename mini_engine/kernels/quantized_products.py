"""Products of a few tokens with a quantized matrix, each with the work after it, as CUDA kernels for Hopper.

For few tokens a product is a read of its weight, and a quantized weight has a half or a quarter of the bytes. Then the
instructions for each weight matter: in the time in which an H200 reads a weight of INT4 it can execute about three. So
numbers are stored in the order in which the tensor cores take them, and one instruction or two make a bfloat16 of each.
As in `gemv.py`, a kernel loads its first weights before it waits for the previous kernel, and applies norm, activation
or residual itself.

The kernels are in `quantized_products.cu`, and the order of the numbers in `quantized.cuh`. `quantized_matmul.py` says
which numbers of tokens they are used for. Explained in chapter 13.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from mini_engine.kernels.nvcc import load_kernel
from mini_engine.quantization import QuantizedTensor

MOST_TOKENS = 64
TILE_ROWS, TILE_COLUMNS, LANE_COLUMNS = 16, 64, 16  # of a tile, and the columns that a thread has of it
KINDS = ("fp8", "int8", "int4")  # `Kind` of the kernels
NONE, NARROW, WIDE = range(3)  # `Groups` of the kernels
WHOLE_ROW = 30  # base-2 logarithm of more columns than a matrix has
STORE, ADD, SWIGLU = range(3)  # `Work` of the kernels


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix [Out, In] as the kernels read it.

    Attributes:
        kind: that of the format.
        shape: rows and columns.
        data: the numbers: uint8, in the order that `quantized.cuh` explains; or [Out, In] float8_e4m3fn, if `in_rows`.
        scales: [Out] float32, a scale for each row; or with groups, int32 [strips, groups, 16], for each row of a strip
            a scale (lower half) and an offset (upper half) in bfloat16.
        group_columns: columns that share a scale; 0: a scale for each row.
        half_rows: from a row of a strip's first half to the same row of its second half. A strip has 16 rows.
        in_rows: whether the numbers are in the order in which cuBLAS multiplies them (`fp8_products.py`), which then
            takes the place of the kernels: FP8 with a scale for each row.
    """

    kind: str
    shape: tuple[int, int]
    data: Shaped[Tensor, "..."]
    scales: Shaped[Tensor, "..."]
    group_columns: int
    half_rows: int
    in_rows: bool

    @property
    def groups(self) -> int:
        """`Groups` of the kernels: wide ones are two tiles or more."""
        if not self.group_columns:
            return NONE
        return NARROW if self.group_columns < min(2 * TILE_COLUMNS, self.shape[1]) else WIDE

    @property
    def num_strips(self) -> int:
        return -(-self.shape[0] // (2 * self.half_rows)) * (self.half_rows // 8)


def pack(weight: QuantizedTensor, *, pairs: bool = False) -> PackedWeight:
    """Arrange a quantized matrix, with a scale for each row, as the kernels read it.

    Scales and offsets of groups are rounded to bfloat16.

    Args:
        weight: its columns are in the matrix's order. Their number is a multiple of 16. All of a row share a scale, or
            16 or a larger power of two.
        pairs: whether a strip has 8 rows of the first half of the matrix and 8 of its second half, as SwiGLU needs gate
            and up projection. A half is then a multiple of 8 rows.

    Raises:
        ValueError: if the sizes do not fit.
    """
    form, (rows, columns) = weight.format, weight.shape
    half = rows // 2 if pairs else 8
    group = form.columns if weight.scale.shape[1] > 1 else columns
    assert group is not None
    is_power = group == columns or (group >= LANE_COLUMNS and group & (group - 1) == 0)
    if form.rows != 1 or weight.order is not None or columns % LANE_COLUMNS or not is_power or half % 8:
        raise ValueError(f"cannot pack a matrix [{rows}, {columns}] with a scale for every {group} columns of a row")
    grouped = weight.scale.shape[1] > 1 or weight.offset is not None
    if grouped:
        offset = torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
        both = torch.stack((weight.scale, offset), 2).bfloat16()  # [rows, groups, 2]
        strips = _in_strips(both.view(torch.int32).squeeze(2), half)  # [blocks, strips, half, 8, groups]
        scales = strips.permute(0, 1, 4, 2, 3).reshape(-1, weight.scale.shape[1], TILE_ROWS).contiguous()
    else:
        scales = weight.scale.float().flatten().contiguous()
    in_rows = form.kind == "fp8" and not grouped and rows % 16 == 0
    data = weight.q.contiguous() if in_rows else _in_tiles(weight.q, form.kind, half)
    return PackedWeight(form.kind, (rows, columns), data, scales, group if grouped else 0, half, in_rows)


def _in_strips(matrix: Shaped[Tensor, "R C"], half: int) -> Shaped[Tensor, "blocks strips 2 8 C"]:
    """Divide rows into strips; missing rows are zeros."""
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % (2 * half)))
    return padded.view(-1, 2, half // 8, 8, matrix.shape[1]).transpose(1, 2)


def _in_tiles(q: Shaped[Tensor, "R C"], kind: str, half: int) -> Shaped[Tensor, " bytes"]:
    """Arrange numbers in tiles, see `quantized.cuh`."""
    strips = _in_strips(F.pad(q.view(torch.int8), (0, -q.shape[1] % TILE_COLUMNS)), half)
    blocks, of_block = strips.shape[:2]
    lanes = strips.view(blocks, of_block, 2, 8, -1, 4, LANE_COLUMNS).permute(0, 1, 4, 3, 5, 2, 6)
    if kind != "int4":  # words of four columns; columns 0 and 1 are bytes 0 and 2
        return lanes.unflatten(-1, (4, 2, 2)).transpose(-1, -2).reshape(-1).view(torch.uint8)
    # Words of eight columns; columns 0 and 1 are numbers 0 and 4. `(pair, column)` becomes `(column, pair)`.
    numbers = (lanes.unflatten(-1, (2, 4, 2)).transpose(-1, -2).reshape(-1, 2) + 8).view(torch.uint8)
    return numbers[:, 0] | numbers[:, 1] << 4


def unpack(weight: PackedWeight) -> Shaped[Tensor, "Out In"]:
    """Return the numbers of a matrix in tiles, those of FP8 as their bytes: the inverse of `pack`."""
    (rows, columns), half = weight.shape, weight.half_rows
    if weight.kind != "int4":
        flat = weight.data.view(torch.int8).view(-1, 4, 2, 2)
    else:
        numbers = torch.stack((weight.data & 15, weight.data >> 4), 1).to(torch.int8) - 8
        flat = numbers.view(-1, 2, 2, 4)
    num_tiles = -(-columns // TILE_COLUMNS)
    lanes = flat.transpose(-1, -2).reshape(-1, half // 8, num_tiles, 8, 4, 2, LANE_COLUMNS)
    return lanes.permute(0, 5, 1, 3, 2, 4, 6).reshape(-1, num_tiles * TILE_COLUMNS)[:rows, :columns].contiguous()


def quantized_linear(x: Float[Tensor, "T In"], weight: PackedWeight) -> Float[Tensor, "T Out"]:
    """Compute `x @ weight.T`. The product is rounded once.

    Args:
        x: contiguous bfloat16, at most MOST_TOKENS tokens.
        weight: [Out, In].
    """
    return _launch(x, weight, x.new_empty(len(x), weight.shape[0]), STORE)


def project(
    x: Float[Tensor, "T In"], weight: PackedWeight, eps: float, norm_weight: Float[Tensor, " In"]
) -> Float[Tensor, "T Out"]:
    """Compute `norm(x) @ weight.T`, where `norm` is RMSNorm.

    Args:
        x: contiguous bfloat16, at most MOST_TOKENS tokens.
        weight: [Out, In].
        eps: epsilon of the norm.
        norm_weight: the norm's weight, which cannot be folded into integers.
    """
    return _launch(x, weight, x.new_empty(len(x), weight.shape[0]), STORE, eps, norm_weight)


def gate_up_swiglu(
    x: Float[Tensor, "T In"], gate_up: PackedWeight, eps: float, norm_weight: Float[Tensor, " In"]
) -> Float[Tensor, "T I"]:
    """Compute `silu(norm(x) @ gate.T) * (norm(x) @ up.T)`, where `norm` is RMSNorm.

    Args:
        x: contiguous bfloat16, at most MOST_TOKENS tokens.
        gate_up: [2 I, In], the gate's rows, then the up projection's, packed as `pairs`.
        eps: epsilon of the norm.
        norm_weight: see `project`.
    """
    assert gate_up.half_rows == gate_up.shape[0] // 2
    return _launch(x, gate_up, x.new_empty(len(x), gate_up.half_rows), SWIGLU, eps, norm_weight)


def add_product(
    residual: Float[Tensor, "T Out"], x: Float[Tensor, "T In"], weight: PackedWeight
) -> Float[Tensor, "T Out"]:
    """Add `x @ weight.T` to the residual stream, in place.

    Args:
        residual: contiguous bfloat16; overwritten.
        x: contiguous, at most MOST_TOKENS tokens.
        weight: [Out, In].
    """
    return _launch(x, weight, residual, ADD)


def dequantize(weight: PackedWeight) -> Float[Tensor, "Out In"]:
    """Return the matrix in bfloat16."""
    if weight.in_rows:
        return (weight.data.float() * weight.scales[:, None]).bfloat16()
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.data.device)
    _call("launch_dequantize", weight, _arguments(out, weight, out, STORE), ())
    return out


def _launch(
    x: Tensor, weight: PackedWeight, out: Tensor, work: int, eps: float = -1.0, norm_weight: Tensor | None = None
) -> Tensor:
    _call("launch_quantized_product", weight, _arguments(x, weight, out, work, eps, norm_weight), (_num_sms(x.device),))
    return out


def _arguments(
    x: Tensor, weight: PackedWeight, out: Tensor, work: int, eps: float = -1.0, norm_weight: Tensor | None = None
) -> "_Arguments":
    is_whole = weight.group_columns >= weight.shape[1]
    log2_group = WHOLE_ROW if is_whole else max(weight.group_columns, 1).bit_length() - 1
    return _Arguments(
        x.data_ptr(), None if norm_weight is None else norm_weight.data_ptr(), weight.data.data_ptr(),
        weight.scales.data_ptr(), out.data_ptr(), len(x), *weight.shape, weight.half_rows, log2_group, work, eps,
    )  # fmt: skip


def _call(function: str, weight: PackedWeight, arguments: "_Arguments", more: tuple[int, ...]) -> None:
    stream = ctypes.c_void_p(torch.cuda.current_stream(weight.data.device).cuda_stream)
    library = _library(weight.kind, weight.groups)
    if error := getattr(library, function)(ctypes.byref(arguments), weight.num_strips, *more, stream):
        raise RuntimeError(f"{function} failed with CUDA error {error}")


@cache
def _library(kind: str, groups: int) -> ctypes.CDLL:
    sizes = {"WEIGHT_KIND": KINDS.index(kind), "WEIGHT_GROUPS": groups}
    return load_kernel(Path(__file__).with_suffix(".cu"), tuple(sizes.items()))


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernels."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("tokens", "norm_weight", "weight", "scales", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_rows", "num_columns", "half_rows", "log2_group")),
        ("work", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]
