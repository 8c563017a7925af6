"""The norm applied after the product: in Triton's interpreter here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from book.kernels import norm_linear as kernels
from book.kernels.tiles import MAX_TOKENS, Tile, padded_tokens

EPS = 1e-6
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
FUNCTIONS = {
    "norm_linear": (kernels.norm_linear, kernels.norm_linear_reference),
    "norm_gate_up_silu": (kernels.norm_gate_up_silu, kernels.norm_gate_up_silu_reference),
}
SHAPES = {  # rows of the weight, hidden size
    "odd": (22, 37),
    "small": (96, 64),
    "several tiles": (40, 600),
    "SmolLM2": (3072, 576),
    "Qwen3": (6144, 1024),
}


def random_inputs(num_tokens: int, shape: tuple[int, int], device: str) -> tuple[torch.Tensor, ...]:
    """Tokens of very different scales, the norm's weight, and a weight."""
    num_rows, num_columns = shape
    generator = torch.Generator().manual_seed(num_tokens + num_rows)
    x = torch.randn(num_tokens, num_columns, generator=generator)
    x = x * torch.logspace(-2, 2, num_tokens)[:, None]
    norm_weight = torch.rand(num_columns, generator=generator) + 0.5
    weight = torch.randn(num_rows, num_columns, generator=generator) / num_columns**0.5
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return tuple(tensor.to(device, dtype) for tensor in (x, norm_weight, weight))


def assert_close_to_float64(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def cases() -> list:
    """Small shapes in the interpreter; on a GPU also the shapes of the models."""
    return [
        pytest.param(device, num_tokens, name, marks=marks)
        for device, marks in (("cpu", INTERPRETED), ("cuda", pytest.mark.gpu))
        for name in list(SHAPES)[: 3 if device == "cpu" else None]
        for num_tokens in ((1, 2, 7, 64, 256) if device == "cuda" else (1, 2, 7, 64, 65))
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("device", "num_tokens", "name"), cases())
def test_equals_the_reference_in_float64(device: str, num_tokens: int, name: str, function: str) -> None:
    x, norm_weight, weight = random_inputs(num_tokens, SHAPES[name], device)
    kernel, reference = FUNCTIONS[function]
    before = x.clone()
    got = kernel(x, norm_weight, EPS, weight)
    assert got.dtype == x.dtype
    assert_close_to_float64(got, reference(x.double(), norm_weight.double(), EPS, weight.double()))
    assert torch.equal(x, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [Tile(16, 16, 1), Tile(32, 128, 8), Tile(16, 64, 2)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_tile_changes_no_result(device: str, tile: Tile, num_tokens: int) -> None:
    x, norm_weight, weight = random_inputs(num_tokens, SHAPES["several tiles"], device)
    for kernel, reference in FUNCTIONS.values():
        want = reference(x.double(), norm_weight.double(), EPS, weight.double())
        assert_close_to_float64(kernel(x, norm_weight, EPS, weight, tile=tile), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_token_does_not_depend_on_the_others(device: str, function: str) -> None:
    """Bit for bit, as long as there are at least two: one token alone is computed without tensor cores."""
    x, norm_weight, weight = random_inputs(9, SHAPES["small"], device)
    kernel, _ = FUNCTIONS[function]
    assert torch.equal(kernel(x, norm_weight, EPS, weight)[3:5], kernel(x[3:5], norm_weight, EPS, weight))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_of_zeros_stays_zero(device: str) -> None:
    _, norm_weight, weight = random_inputs(3, SHAPES["small"], device)
    x = torch.zeros(3, weight.shape[1], dtype=weight.dtype, device=device)
    for kernel, _ in FUNCTIONS.values():
        assert not kernel(x, norm_weight, EPS, weight).any()


def test_few_sizes_are_compiled() -> None:
    assert {padded_tokens(n) for n in range(1, MAX_TOKENS + 1)} == {1, 16, 32, 64}


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_chain_with_programmatic_dependent_launch(num_tokens: int) -> None:
    """Each kernel reads what the previous kernel wrote: captured in a CUDA graph and replayed."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    x, norm_weight, weight = random_inputs(num_tokens, (1024, 1024), "cuda")
    gate_up = random_inputs(num_tokens, (2048, 1024), "cuda")[2]

    def chain(pdl: bool) -> torch.Tensor:
        y = x
        for _ in range(20):
            y = kernels.norm_linear(y, norm_weight, EPS, weight, pdl=pdl)
            y = kernels.norm_gate_up_silu(y, norm_weight, EPS, gate_up, pdl=pdl)
        return y

    want = chain(pdl=False)
    assert torch.equal(chain(pdl=True), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(pdl=True)
    for _ in range(5):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
