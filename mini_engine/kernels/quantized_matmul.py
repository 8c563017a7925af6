"""Products of many tokens with a quantized matrix, on tensor cores, which multiply operands of the same dtype.

`multiply_tiles` converts weights tile by tile in registers, so it still reads few bytes. That pays until the product is
bound by arithmetic. `dequantize` writes the matrix as bfloat16, for the many tokens of prompts. `linear_fp8` leaves the
matrix as it is, quantizes the tokens, and multiplies in FP8. Explained in chapter 13.
"""

from dataclasses import replace
from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.kernels import quantized_gemv as gemv
from mini_engine.kernels.quantized_gemv import PackedWeight, cut_out, first_column, load_items, load_of_tiles
from mini_engine.models.weights import QuantizedLinear
from mini_engine.quantization import FP8, LARGEST

# For each kind, the largest numbers of tokens for the GEMV and for tiles. Neither has been measured yet.
# For 1, 2, and 4 tokens the GEMV executes about 5, 9, and 17 instructions for each weight, and tiles execute about 7
# (counted in the compiled code). While an H100 reads a weight of 4 or 8 bits, it can execute 4 or 9.
# Writing a matrix as bfloat16 and reading it again moves 9 or 5 times the bytes, so 4 passes of 64 tokens move fewer.
MOST_TOKENS = {"int4": (2, 256), "int8": (2, 256), "fp8": (2, 256)}
# A tile is 64 rows, which Hopper's tensor cores multiply at once, by at most 64 tokens. A step is 128 columns. A row is
# split until there are about 384 programs, but not into fewer than 4 steps. The number of tokens does not matter.
ROWS, MOST_TOKENS_OF_TILE, STEP, PROGRAMS, FEWEST_STEPS = 64, 64, 128, 384, 4


def linear(x: Float[Tensor, "T In"], weight: PackedWeight) -> Float[Tensor, "T Out"]:
    """Compute `x @ weight.T` for any number of tokens, with the path that `MOST_TOKENS` names for it.

    Args:
        x: contiguous.
        weight: [Out, In].
    """
    most_gemv, most_tiles = MOST_TOKENS[weight.kind]
    if len(x) <= most_gemv:
        return gemv.quantized_linear(x, weight)
    return multiply_tiles(x, weight) if len(x) <= most_tiles else F.linear(x, dequantize(weight, x.dtype))


class GPUKernel:
    """Multiplies any number of tokens by a `QuantizedLinear`, whose numbers and scales it packs anew."""

    def __init__(self, weight: QuantizedLinear) -> None:
        self._packed = gemv.pack(replace(weight.quantized(), order=None))
        weight.numbers, weight.scale = nn.Buffer(self._packed.data), nn.Buffer(self._packed.scale)
        if self._packed.offset is not None:
            weight.offset = nn.Buffer(self._packed.offset)

    def accepts(self, x: Tensor) -> bool:
        """Return whether the tokens have 16 bits."""
        return x.dtype.itemsize == 2

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        return linear(x.contiguous(), self._packed)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        """Return the matrix, its columns in the order in which they are stored."""
        return dequantize(self._packed, dtype)


def kernel_for(weight: QuantizedLinear) -> GPUKernel | None:
    """Return the kernel for a loaded matrix, or None for sizes that `pack` refuses."""
    multiple = 32 if weight.format.kind == "int4" else 16
    return None if weight.in_features % multiple else GPUKernel(weight)


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> Float[Tensor, "Out In"]:
    """Return the matrix, computed in float32 and rounded once.

    Args:
        weight: [Out, In].
        dtype: of the result.
    """
    num_rows, _ = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    rows = gemv.rows_of_program(weight, 1)
    _dequantize[(triton.cdiv(num_rows, rows),)](
        weight.data, weight.scale, weight.offset, out, num_rows,
        ROWS=rows, num_warps=gemv.num_warps(weight), **weight.constants(),
    )  # fmt: skip
    return out


def multiply_tiles(x: Float[Tensor, "T In"], weight: PackedWeight) -> Float[Tensor, "T Out"]:
    """Compute `x @ weight.T` on tensor cores, from the weight's few bits; weights are rounded to the dtype of x.

    Args:
        x: contiguous.
        weight: [Out, In].
    """
    num_tokens, num_rows = len(x), weight.shape[0]
    tiles, steps = triton.cdiv(num_rows, ROWS), triton.cdiv(weight.shape[1], STEP)
    steps_of_split = triton.cdiv(steps, max(1, min(PROGRAMS // tiles, steps // FEWEST_STEPS)))
    splits = triton.cdiv(steps, steps_of_split)
    sums = x.new_empty(splits, num_tokens, num_rows, dtype=torch.float32 if splits > 1 else x.dtype)
    tokens = min(MOST_TOKENS_OF_TILE, max(16, triton.next_power_of_2(num_tokens)))
    _multiply_tiles[(tiles, triton.cdiv(num_tokens, tokens), splits)](
        x, weight.data, weight.scale, weight.offset, sums, num_tokens, num_rows, steps_of_split,
        ROWS=ROWS, TOKENS=tokens, STEP=STEP, num_stages=4, **weight.constants(),
    )  # fmt: skip
    if splits == 1:
        return sums[0]
    out = x.new_empty(num_tokens, num_rows)
    _add_splits[(triton.cdiv(out.numel(), 1024),)](sums, out, out.numel(), SPLITS=splits, BLOCK=1024)
    return out


def linear_fp8(
    x: Float[Tensor, "T In"], weight: Shaped[Tensor, "Out In"], scale: Float32[Tensor, "TR 1"]
) -> Float[Tensor, "T Out"]:
    """Compute `x @ (weight * scale).T` in FP8, with a scale for each token.

    On Hopper, cuBLAS reaches the memory bandwidth with few tokens only if each matrix has a single scale. So where the
    weight has a single scale, the tokens are multiplied as if they had none, and their scales are applied to the
    product. With a scale for each row of the weight, cuBLAS applies both; that suits many tokens only.

    Args:
        x: contiguous; bfloat16.
        weight: contiguous; float8_e4m3fn. Out and In are multiples of 16.
        scale: [1, 1] for the whole weight, or [Out, 1].
    """
    q, token_scale = quantize_tokens(x)
    if len(scale) > 1:
        return torch._scaled_mm(q, weight.t(), token_scale, scale.view(1, -1), out_dtype=x.dtype)
    return torch._scaled_mm(q, weight.t(), _one(x.device), scale, out_dtype=x.dtype).mul_(token_scale)


@cache
def _one(device: torch.device) -> Float32[Tensor, "1 1"]:
    return torch.ones(1, 1, device=device)


def quantize_tokens(x: Float[Tensor, "T In"]) -> tuple[Shaped[Tensor, "T In"], Float32[Tensor, "T 1"]]:
    """Round tokens to float8_e4m3fn, so that the largest number of each becomes 448; return them and their scales.

    Args:
        x: contiguous.
    """
    q, scale = torch.empty_like(x, dtype=FP8), x.new_empty(len(x), 1, dtype=torch.float32)
    _quantize_tokens[(len(x),)](x, q, scale, COLUMNS=x.shape[1], LARGEST=LARGEST["fp8"])
    return q, scale


@no_type_check
@triton.jit
def _dequantize(
    data, scale, offset, out, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
    STEPS: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    item = tl.arange(0, triton.next_power_of_2(COLUMNS // STEPS))
    loaded = load_items(data, row, exists, item, COLUMNS, STEPS)
    factor = load_of_tiles(scale, row, exists, item, COLUMNS, STEPS, TILE_ROWS, TILE_COLUMNS)[None].to(tl.float32)
    if offset is not None:
        added = load_of_tiles(offset, row, exists, item, COLUMNS, STEPS, TILE_ROWS, TILE_COLUMNS)[None].to(tl.float32)
    place = out + row.to(tl.int64)[None, :, None] * COLUMNS + first_column(item, SPAN, STEPS)[None, None]
    mask = exists[None, :, None] & (item < COLUMNS // STEPS)[None, None]
    for k in tl.static_range(STEPS):
        numbers = _scaled(loaded, k, factor, STEPS)
        if offset is not None:
            numbers += added
        tl.store(place + k * (SPAN // STEPS), numbers.to(out.dtype.element_ty), mask=mask)


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_tiles(
    x, data, scale, offset, sums, num_tokens, num_rows, steps_of_split, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the transposed product of some rows and tokens, STEP columns at a time.

    The weight is the first operand, because Hopper's tensor cores multiply 64 rows of the first operand at once, and
    tokens are often fewer. The second operand may have as few as 8 columns. Numbers k of a step's words make one
    product, because they are in the registers where the tensor cores expect them.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_row, is_token = (row < num_rows)[:, None], (token < num_tokens)[None, :]
    of_row = data + row.to(tl.int64)[:, None] * (COLUMNS // STEPS)
    of_tile = row[:, None] // TILE_ROWS * tl.cdiv(COLUMNS, TILE_COLUMNS)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = tl.program_id(2) * steps_of_split
    for step in range(first, min(first + steps_of_split, tl.cdiv(COLUMNS, STEP))):
        item = step * (STEP // STEPS) + tl.arange(0, STEP // STEPS)
        is_item = item < COLUMNS // STEPS
        loaded = tl.load(of_row + item[None, :], mask=is_row & is_item[None, :], other=0.0)
        column = first_column(item, SPAN, STEPS)
        if TILE_COLUMNS % STEP == 0:
            tile, is_tile = of_tile + step * STEP // TILE_COLUMNS, is_row
        else:
            tile, is_tile = of_tile + column[None, :] // TILE_COLUMNS, is_row & is_item[None, :]
        factor = tl.load(scale + tile, mask=is_tile, other=0.0).to(tl.float32)
        for k in tl.static_range(STEPS):
            place = token[None, :] * COLUMNS + column[:, None] + k * (SPAN // STEPS)
            values = tl.load(x + place, mask=is_token & is_item[:, None], other=0.0)
            numbers = _scaled(loaded, k, factor, STEPS)
            if offset is not None:
                numbers += tl.load(offset + tile, mask=is_tile, other=0.0).to(tl.float32)
            total = tl.dot(numbers.to(values.dtype), values, total)
    place = sums + (tl.program_id(2).to(tl.int64) * num_tokens + token[None, :]) * num_rows + row[:, None]
    tl.store(place, total.to(sums.dtype.element_ty), mask=is_row & is_token)


@no_type_check
@triton.jit
def _add_splits(sums, out, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + split * size + place, mask=place < size, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@no_type_check
@triton.jit
def _scaled(loaded, k: tl.constexpr, factor, STEPS: tl.constexpr):
    """Return numbers k of words, or numbers of FP8, times their scale."""
    if STEPS > 1:
        bits: tl.constexpr = 32 // STEPS
        place: tl.constexpr = k % (STEPS // 2)
        numbers = cut_out(loaded >> 16 if k >= STEPS // 2 else loaded, place, STEPS) * 2.0**127
        unit: tl.constexpr = 2.0 ** (bits * place - 22)  # n * unit is a normal number
        return (numbers - 2.0 ** (bits - 1) * unit) * (factor * (1 / unit))
    else:
        return loaded.to(tl.float32) * factor


@no_type_check
@triton.jit
def _quantize_tokens(x, q, scale, COLUMNS: tl.constexpr, LARGEST: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(COLUMNS))
    values = tl.load(x + token * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    factor = tl.where(largest > 0, largest / LARGEST, 1.0)
    rounded = tl.clamp(values / factor, -LARGEST, LARGEST).to(tl.float8e4nv)
    tl.store(q + token * COLUMNS + column, rounded, mask=column < COLUMNS)
    tl.store(scale + token, factor)
