"""Rounding a matrix to a format: half a step of its own tile at most, exact where the format holds the numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.quantization import FP8, LARGEST, Format, QuantizedTensor, format_for, quantize, spread

FORMATS = [
    Format("fp8", None, None), Format("fp8"), Format("fp8", 8, 16), Format("int8"), Format("int8", None, None),
    Format("int8", 1, 16), Format("int4"), Format("int4", 1, 16), Format("int4", 1, 16, has_offsets=True),
    Format("int8", 1, None, has_offsets=True),
]  # fmt: skip


def tile_by_tile(stored: QuantizedTensor) -> Tensor:
    """The matrix in float64, number by number."""
    form, (rows, columns) = stored.format, stored.shape
    matrix = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            tile = row // (form.rows or rows), column // (form.columns or columns)
            value = float(stored.q[row, column]) * float(stored.scale[tile])
            matrix[row, column] = value + (float(stored.offset[tile]) if stored.offset is not None else 0.0)
    return matrix


@given(
    st.sampled_from(FORMATS), st.integers(1, 19), st.integers(1, 37), st.integers(0, 2**31),
    st.sampled_from([1e-3, 1.0, 1e3]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_error_is_at_most_half_a_step_of_the_tile(form: Format, rows: int, columns: int, seed: int, size: float):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size
    stored = quantize(matrix, form)
    assert stored.scale.shape == form.tiles(rows, columns) and stored.q.dtype == (
        FP8 if form.kind == "fp8" else torch.int8
    )
    got = stored.dequantize(torch.float64)
    torch.testing.assert_close(got, tile_by_tile(stored), rtol=1e-12, atol=0)
    scale = spread(stored.scale.double(), form, matrix.shape).expand_as(matrix)
    # FP8 has three bits behind the leading one, so half a step is 1/16, and 2^-10 below the normal numbers.
    bound = torch.maximum(matrix.abs() / 16, scale * 2.0**-10) if form.kind == "fp8" else scale / 2
    assert ((got - matrix).abs() <= bound * (1 + 1e-6)).all()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_the_format_holds_is_exact(form: Format) -> None:
    """Rounding twice is rounding once: the numbers of a quantized matrix are stored as they are."""
    once = quantize(torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), form).dequantize(torch.float64)
    twice = quantize(once, form).dequantize(torch.float64)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=1e-7)


def test_the_largest_number_of_a_tile_is_the_largest_of_the_format() -> None:
    matrix = torch.tensor([[0.5, -4.0, 1.0, 2.0]])
    for kind, largest in LARGEST.items():
        stored = quantize(matrix, Format(kind))
        assert stored.q.float().abs().max() == largest and stored.scale.item() == pytest.approx(4 / largest)


def test_a_tile_of_zeros_stays_zero() -> None:
    for form in FORMATS:
        assert not quantize(torch.zeros(3, 32), form).dequantize().any()


def test_offsets_use_the_whole_range() -> None:
    """Between 10 and 17, four bits reach every whole number; a range around zero has steps of more than two."""
    matrix = torch.arange(10.0, 18.0)[None]
    assert torch.equal(quantize(matrix, Format("int4", has_offsets=True)).dequantize().round(), matrix)
    assert not torch.equal(quantize(matrix, Format("int4")).dequantize().round(), matrix)


def test_scales_are_rounded_before_the_numbers() -> None:
    matrix = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    stored = quantize(matrix, Format("int8"), torch.bfloat16)
    assert torch.equal(stored.scale, stored.scale.bfloat16().float())
    step = spread(stored.scale, stored.format, matrix.shape)
    # The largest number may be cut off by the part that the scale lost.
    assert ((stored.dequantize() - matrix).abs() <= step / 2 + matrix.abs() * 2**-8).all()


def test_columns_in_another_order_come_back() -> None:
    matrix, order = torch.randn(3, 8), torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    plain = quantize(matrix[:, order], Format("int8", 1, 4))
    stored = QuantizedTensor(plain.format, plain.q, plain.scale, None, order)
    assert torch.equal(stored.dequantize()[:, order], plain.dequantize())


def test_the_formats_of_the_option() -> None:
    for columns, group in {576: 64, 4096: 128, 96: 32, 48: None}.items():
        assert format_for("int4", columns) == Format("int4", 1, group, has_offsets=True)
    assert format_for("int8", 48) == Format("int8") and format_for("fp8", 4096) == Format("fp8")
