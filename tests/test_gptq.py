"""GPTQ changes products less than rounding to nearest does, and equals its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from book.prose import Packed
from mini_engine.gptq import DAMPING, gptq, quantize_layers
from mini_engine.models.weights import QuantizedLinear
from mini_engine.quantization import Format, quantize
from tests.models.families import our_model, transformers_model

FORMATS = [Format("int4"), Format("int4", 1, 16), Format("int4", 1, 16, has_offsets=True), Format("int8", 1, 32)]


def tokens(count: int, columns: int, seed: int = 0) -> Tensor:
    """Tokens whose entries depend on each other, and of which the first are the largest: what is rounded first can be
    made up for by all that come later.
    """
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.logspace(1.5, 0, columns)


def by_definition(matrix: Tensor, hessian: Tensor, form: Format) -> Tensor:
    """Optimal brain quantization in the order of the columns: the inverse of H is updated after each column."""
    columns = matrix.shape[1]
    group, w = form.columns or columns, matrix.double().clone()
    h = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(columns)
    inverse, out = torch.linalg.inv(h), torch.empty(matrix.shape, dtype=torch.float64)
    for i in range(columns):
        if i % group == 0:
            tile = quantize(w[:, i : i + group].float(), Format(form.kind, 1, None, form.has_offsets))
        half, offset = 2 ** (form.bits - 1), 0.0 if tile.offset is None else tile.offset.double()[:, 0]
        scale, low = tile.scale.double()[:, 0], -half if form.has_offsets else 1 - half
        out[:, i] = ((w[:, i] - offset) / scale).round().clamp(low, half - 1) * scale + offset
        w -= torch.outer((w[:, i] - out[:, i]) / inverse[i, i], inverse[i])
        inverse -= torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return out


def error(x: Tensor, matrix: Tensor, rounded: Tensor) -> float:
    return float((x.double() @ (matrix.double() - rounded.double()).T).square().sum())


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_it_equals_its_definition(form: Format) -> None:
    matrix, x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)), tokens(200, 96)
    want = by_definition(matrix, x.T @ x, form)
    got = gptq(matrix, x.T @ x, form, torch.float32).dequantize(torch.float64)
    # A number halfway between two steps may be rounded the other way, and those after it then differ.
    assert (got - want).abs().lt(1e-3).double().mean() > 0.9
    assert error(x, matrix, got) == pytest.approx(error(x, matrix, want), rel=0.05)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@given(st.integers(0, 2**31))
@settings(max_examples=8, deadline=None)
def test_products_change_less_than_with_rounding_to_nearest(form: Format, seed: int) -> None:
    matrix, x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)), tokens(200, 64, seed)
    nearest = quantize(matrix, form).dequantize()
    assert error(x, matrix, gptq(matrix, x.T @ x, form, torch.float32).dequantize()) < error(x, matrix, nearest)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_columns_that_do_not_interact_are_rounded_to_nearest(form: Format) -> None:
    matrix = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    got = gptq(matrix, torch.eye(64), form, torch.bfloat16)
    want = quantize(matrix, form, torch.bfloat16)
    assert torch.equal(got.q, want.q) and torch.equal(got.scale, want.scale)


def test_a_column_that_no_token_uses_is_no_problem() -> None:
    x = tokens(50, 32)
    x[:, 7] = 0
    assert gptq(torch.randn(3, 32), x.T @ x, Format("int4", 1, 16), torch.float32).dequantize().isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_a_whole_model(family: str) -> None:
    theirs = transformers_model(family, seed=4)
    text, form = torch.randint(61, (4, 24), generator=torch.Generator().manual_seed(5)), Format("int4", 1, 16)
    positions = torch.arange(24).repeat(4)

    def outputs(calibrated: bool) -> Tensor:
        model = our_model(theirs)
        if calibrated:
            quantize_layers(model, text, lambda columns: form, Packed(model, 24))
            assert sum(isinstance(own, QuantizedLinear) for own in model.modules()) == 4 * 3
        else:
            for weight in model.layers.parameters():
                if weight.ndim == 2:
                    weight.copy_(quantize(weight, form).dequantize())
        with torch.inference_mode():
            return model(text.flatten(), positions, Packed(model, 24))

    model = our_model(theirs)
    with torch.inference_mode():
        want = model(text.flatten(), positions, Packed(model, 24))
    assert (outputs(calibrated=True) - want).square().sum() < (outputs(calibrated=False) - want).square().sum()
