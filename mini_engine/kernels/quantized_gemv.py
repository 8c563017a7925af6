"""Products of a few tokens with a quantized matrix, in Triton: matrix times vector, without tensor cores.

For few tokens a product is a read of its weights, and a quantized matrix has a half or a quarter of the bytes. As in
`gemv.py`, a program loads its rows of the weight before it waits for the previous kernel, and does the work that
follows the product in registers. Two things differ, because there are more weights to multiply in the same time. Tokens
are an axis of the tiles, so a weight becomes a float once, not once per token. And a scale is not applied to weights
but to sums: a thread multiplies the partial sum of a block, which is what it loads of a row at once.

`pack` arranges integers for that, and `cut_out` turns them into floats with one instruction per weight.
`quantized_matmul.py` computes more tokens. Explained in chapter 13.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Shaped
from torch import Tensor

from mini_engine.kernels.gemv import _let_next_start_and_wait
from mini_engine.quantization import QuantizedTensor

MOST_TOKENS = 8
# A thread multiplies at most 256 weights: 8 rows of 4,096, so each activation is loaded and converted for 8 weights.
# Weights times tokens are at most so many, because sums need registers, too, and more for FP8, which the compiler
# converts all at once. A matrix is divided among 512 programs or more, about four for each processor.
WEIGHTS, PROGRAMS = {"int4": 512, "int8": 512, "fp8": 256}, 512
NUMBERS_OF_WORD = {"int4": 8, "int8": 4, "fp8": 1}  # FP8 is not stored in words


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix [Out, In] as the kernels read it.

    Attributes:
        kind: that of the format.
        data: [Out, In/8] ("int4") or [Out, In/4] ("int8") int32, see `pack`; [Out, In] float8_e4m3fn ("fp8").
        scale: a factor for each tile; float16 for groups of INT4, otherwise float32.
        offset: added after the scale, in the same dtype; None without offsets.
        tile: rows and columns that share a scale.
    """

    kind: str
    data: Shaped[Tensor, "Out words"]
    scale: Float[Tensor, "TR TC"]
    offset: Float[Tensor, "TR TC"] | None
    tile: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.data.shape[1] * NUMBERS_OF_WORD[self.kind]

    def constants(self) -> dict[str, int]:
        """Return the constants that the kernels are compiled for."""
        steps, width = NUMBERS_OF_WORD[self.kind], 8 if self.kind == "fp8" else 4
        columns, (tile_rows, tile_columns) = self.shape[1], self.tile
        span = gcd(128, tile_columns, columns)
        return {
            "COLUMNS": columns, "SPAN": span, "STEPS": steps, "WIDTH": width,
            "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns,
        }  # fmt: skip


def pack(weight: QuantizedTensor) -> PackedWeight:
    """Arrange a quantized matrix as the kernels read it.

    FP8 stays as it is. INT4 is stored without a sign, as q + 8, and eight
    numbers make a word of 32 bits. A span of 128 columns (or of a group, if that is smaller) becomes 16 words: number k
    of word w is column 16 k + w. A thread loads a block of four words, w to w + 3. Numbers k of these words belong to
    four neighboring columns, so the thread loads the activations for them at once, and the threads beside it load the
    neighboring activations. No thread needs a number that another thread has loaded. INT8 is stored as q + 128, four
    numbers in a word: number k of word w is column 32 k + w.

    Scales of INT4 groups are rounded to float16, which has three bits more than bfloat16.

    Args:
        weight: its columns are in the matrix's order. The number of columns, and the number that share a scale, are
            multiples of 32 for INT4 and of 16 otherwise.
    """
    form, (rows, columns) = weight.format, weight.shape
    tile = (form.rows or rows, columns if weight.scale.shape[1] == 1 else form.columns or columns)
    multiple = 32 if form.kind == "int4" else 16
    if weight.order is not None or gcd(*tile[1:], columns) % multiple:
        raise ValueError(f"needs columns in order, in groups of a multiple of {multiple}; got {tile[1]} of {columns}")
    data, scale, offset = weight.q.contiguous(), weight.scale.contiguous(), weight.offset
    if form.kind != "fp8":
        steps = NUMBERS_OF_WORD[form.kind]
        numbers = data.view(rows, -1, steps, gcd(128, tile[1], columns) // steps)
        data = torch.zeros_like(numbers[:, :, 0], dtype=torch.int32)
        for k in range(steps):
            data |= (numbers[:, :, k].int() + 2 ** (form.bits - 1)) << form.bits * k
        data = data.flatten(1)
    if form.kind == "int4" and tile[1] < columns:
        scale, offset = scale.half(), None if offset is None else offset.half()
    return PackedWeight(form.kind, data, scale, None if offset is None else offset.contiguous(), tile)


def quantized_linear(x: Float[Tensor, "T In"], weight: PackedWeight, *, pdl: bool = False) -> Float[Tensor, "T Out"]:
    """Compute `x @ weight.T`. The product is rounded once.

    Args:
        x: contiguous, at most MOST_TOKENS tokens.
        weight: [Out, In].
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
    """
    return _launch(x, weight, x.new_empty(len(x), weight.shape[0]), pdl=pdl)


def project(
    x: Float[Tensor, "T In"],
    weight: PackedWeight,
    eps: float,
    norm_weight: Float[Tensor, " In"] | None = None,
    *,
    pdl: bool = False,
) -> Float[Tensor, "T Out"]:
    """Compute `norm(x) @ weight.T`, where `norm` is RMSNorm.

    Args:
        x: contiguous, at most MOST_TOKENS tokens.
        weight: [Out, In].
        eps: epsilon of the norm.
        norm_weight: the norm's weight, which cannot be folded into integers; None: ones.
        pdl: see `quantized_linear`.
    """
    return _launch(x, weight, x.new_empty(len(x), weight.shape[0]), eps, norm_weight, pdl=pdl)


def gate_up_swiglu(
    x: Float[Tensor, "T In"],
    gate_up: PackedWeight,
    eps: float,
    norm_weight: Float[Tensor, " In"] | None = None,
    *,
    pdl: bool = False,
) -> Float[Tensor, "T I"]:
    """Compute `silu(norm(x) @ gate.T) * (norm(x) @ up.T)`, where `norm` is RMSNorm.

    Args:
        x: contiguous, at most MOST_TOKENS tokens.
        gate_up: [2 I, In], the gate's rows, then the up projection's.
        eps: epsilon of the norm.
        norm_weight: see `project`.
        pdl: see `quantized_linear`.
    """
    out = x.new_empty(len(x), gate_up.shape[0] // 2)
    return _launch(x, gate_up, out, eps, norm_weight, gate_up=True, pdl=pdl)


def add_product(
    residual: Float[Tensor, "T Out"], x: Float[Tensor, "T In"], weight: PackedWeight, *, pdl: bool = False
) -> Float[Tensor, "T Out"]:
    """Add `x @ weight.T` to the residual stream, in place.

    Args:
        residual: contiguous; overwritten.
        x: contiguous, at most MOST_TOKENS tokens.
        weight: [Out, In].
        pdl: see `quantized_linear`.
    """
    return _launch(x, weight, residual, add=True, pdl=pdl)


def _launch(
    x: Tensor, weight: PackedWeight, out: Tensor, eps: float | None = None, norm_weight: Tensor | None = None, *,
    gate_up: bool = False, add: bool = False, pdl: bool,
) -> Tensor:  # fmt: skip
    num_tokens, num_rows = out.shape
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    rows = rows_of_program(weight, num_tokens)
    _gemv[(triton.cdiv(weight.shape[0], rows),)](
        x, norm_weight, weight.data, weight.scale, weight.offset, out, eps, num_tokens, num_rows,
        1 if weight.kind == "fp8" else 2,
        TOKENS=triton.next_power_of_2(num_tokens), ROWS=rows, GATE_UP=gate_up, ADD=add, PDL=pdl,
        num_warps=num_warps(weight), **weight.constants(), **options,
    )  # fmt: skip
    return out


def num_warps(weight: PackedWeight) -> int:
    """Return the number of warps of a program: one for each 1,024 columns, at most 8."""
    return max(1, min(8, triton.next_power_of_2(weight.shape[1]) // 1024))


def rows_of_program(weight: PackedWeight, num_tokens: int) -> int:
    """Return the number of rows of a weight that a program reads, a power of two and at least 2."""
    num_rows, num_columns = weight.shape
    of_thread = min(256, WEIGHTS[weight.kind] // triton.next_power_of_2(num_tokens))
    most = of_thread * 32 * num_warps(weight) // triton.next_power_of_2(num_columns)
    return max(2, min(most, triton.next_power_of_2(num_rows // PROGRAMS + 1) // 2))


@no_type_check
@triton.jit(do_not_specialize=["num_tokens"])
def _gemv(
    x, norm_weight, data, scale, offset, out, eps, num_tokens, num_rows, halves, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, GATE_UP: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of a weight. With GATE_UP, each row of the gate is followed by one of the up projection."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < (2 * num_rows if GATE_UP else num_rows)
    of_weight = row // 2 + row % 2 * num_rows if GATE_UP else row
    item = tl.arange(0, triton.next_power_of_2(COLUMNS // STEPS))  # words, or numbers of FP8
    block = tl.arange(0, item.shape[0] // WIDTH)
    loaded = load_items(data, of_weight, exists, item, COLUMNS, STEPS)
    scales = load_of_tiles(scale, of_weight, exists, block, COLUMNS, STEPS * WIDTH, TILE_ROWS, TILE_COLUMNS)
    if offset is not None:
        offsets = load_of_tiles(offset, of_weight, exists, block, COLUMNS, STEPS * WIDTH, TILE_ROWS, TILE_COLUMNS)
    _let_next_start_and_wait(PDL)

    token = tl.arange(0, TOKENS)
    column, is_column = first_column(item, SPAN, STEPS), item < COLUMNS // STEPS
    is_value = (token < num_tokens)[:, None, None] & is_column[None, None]
    products = tl.zeros((TOKENS, ROWS, block.shape[0]), tl.float32)
    sums = tl.zeros((TOKENS, 1, block.shape[0]), tl.float32)
    squares = tl.zeros((TOKENS, 1, block.shape[0]), tl.float32)
    for half in range(halves):  # of a word; the compiler unrolls a loop if it knows the number, and lacks registers
        for k in tl.static_range((STEPS + 1) // 2):
            at = column + (STEPS // 2 * half + k) * (SPAN // STEPS)
            values = tl.load(x + token[:, None, None] * COLUMNS + at[None, None], mask=is_value, other=0.0)
            values = values.to(tl.float32)
            if eps is not None:
                squares += _sum_blocks(values * values, WIDTH)
            if norm_weight is not None:
                values *= tl.load(norm_weight + at, mask=is_column, other=0.0).to(tl.float32)[None, None]
            sums += _sum_blocks(values, WIDTH)
            if STEPS > 1:
                numbers, values = cut_out(loaded, k, STEPS), values * 2.0 ** (96 - 32 // STEPS * k)
            else:
                numbers = loaded.to(tl.float32)
            products += _sum_blocks(numbers * values, WIDTH)
        if STEPS > 1:
            loaded = loaded >> 16
    if STEPS > 1:
        products = products * 2.0**53 - 2.0 ** (32 // STEPS - 1) * sums
    products *= scales[None].to(tl.float32)
    if offset is not None:
        products += sums * offsets[None].to(tl.float32)
    product = tl.sum(products, 2)
    if eps is not None:
        product *= tl.rsqrt(tl.sum(squares, 2) / COLUMNS + eps)
    if GATE_UP:
        gate, up = tl.split(tl.reshape(product, (TOKENS, ROWS // 2, 2)))
        product = gate / (1 + tl.exp(-gate)) * up
        row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    place = out + token[:, None] * num_rows + row[None, :]
    is_result = (token < num_tokens)[:, None] & (row < num_rows)[None, :]
    if ADD:
        product += tl.load(place, mask=is_result, other=0.0).to(tl.float32)
    tl.store(place, product.to(out.dtype.element_ty), mask=is_result)


@no_type_check
@triton.jit
def cut_out(words, k: tl.constexpr, STEPS: tl.constexpr):
    """Return number k of the lower half of words as a float, n * 2^(bits * k - 149), in one instruction.

    A float32 whose exponent bits are zero is a subnormal, and its value is its mantissa times 2^-149. So a number below
    bit 23 needs no conversion: with the other bits cleared, its word is such a float. An activation is multiplied by
    2^(96 - bits * k), which is exact for |x| < 2^32. Its product with the number is n x 2^-53, which is no subnormal
    for |x| > 2^-73.
    """
    bits: tl.constexpr = 32 // STEPS
    return (words & ((2**bits - 1) << bits * k)).to(tl.float32, bitcast=True)


@no_type_check
@triton.jit
def _sum_blocks(items, WIDTH: tl.constexpr):
    """Sum the items of each block, which one thread has in its registers."""
    blocks: tl.constexpr = items.shape[2] // WIDTH
    return tl.sum(tl.reshape(items, (items.shape[0], items.shape[1], blocks, WIDTH)), 3)


@no_type_check
@triton.jit
def load_items(data, row, exists, item, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    """Load words, or numbers of FP8 [1, rows, items]; zeros where there are none."""
    place = row.to(tl.int64)[:, None] * (COLUMNS // STEPS) + item[None, :]
    mask = exists[:, None] & (item < COLUMNS // STEPS)[None, :]
    return tl.load((data + place)[None], mask=mask[None], other=0.0)


@no_type_check
@triton.jit
def load_of_tiles(
    values, row, exists, block, COLUMNS: tl.constexpr, OF_BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load the scale or the offset of each block [rows, blocks]; [rows, 1] if whole rows share one."""
    if TILE_COLUMNS >= COLUMNS:
        return tl.load(values + row // TILE_ROWS, mask=exists, other=0.0)[:, None]
    else:  # the compiler leaves out a branch, but would compile what follows a return
        tile_column = block // (TILE_COLUMNS // OF_BLOCK)
        tile = (row // TILE_ROWS)[:, None] * tl.cdiv(COLUMNS, TILE_COLUMNS) + tile_column[None, :]
        mask = exists[:, None] & (block < COLUMNS // OF_BLOCK)[None, :]
        return tl.load(values + tile, mask=mask, other=0.0)


@no_type_check
@triton.jit
def first_column(item, SPAN: tl.constexpr, STEPS: tl.constexpr):
    """Return the column of the first number of each item, see `pack`."""
    items_of_span: tl.constexpr = SPAN // STEPS
    return item // items_of_span * SPAN + item % items_of_span
