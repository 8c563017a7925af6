"""A projection added to the residual stream, with split-K: in the interpreter here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from book.kernels.linear_residual import LinearResidual, default_tile, linear_residual_reference
from book.kernels.tiles import Tile

# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = {  # rows and columns of the weight
    "odd": (22, 37),
    "small": (48, 300),
    "many splits": (16, 700),
    "SmolLM2's output": (576, 576),
    "SmolLM2's down": (576, 1536),
    "Qwen3's output": (1024, 2048),
    "Qwen3's down": (1024, 3072),
}
SPLIT = Tile(rows=16, columns=32, splits=5)


def random_inputs(num_tokens: int, shape: tuple[int, int], device: str) -> tuple[torch.Tensor, ...]:
    """Tokens, weight and residual."""
    num_rows, num_columns = shape
    generator = torch.Generator().manual_seed(num_tokens + num_rows)
    x = torch.randn(num_tokens, num_columns, generator=generator)
    weight = torch.randn(num_rows, num_columns, generator=generator) / num_columns**0.5
    residual = torch.randn(num_tokens, num_rows, generator=generator)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return tuple(tensor.to(device, dtype) for tensor in (x, weight, residual))


def assert_close_to_float64(got: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-4
    want = linear_residual_reference(*(tensor.double() for tensor in inputs))
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def cases() -> list:
    """Small shapes in the interpreter; on a GPU also the shapes of the models."""
    return [
        pytest.param(device, num_tokens, name, marks=marks)
        for device, marks in (("cpu", INTERPRETED), ("cuda", pytest.mark.gpu))
        for name in list(SHAPES)[: 3 if device == "cpu" else None]
        for num_tokens in ((1, 2, 7, 64, 256) if device == "cuda" else (1, 2, 7, 64, 65))
    ]


@pytest.mark.parametrize(("device", "num_tokens", "name"), cases())
def test_equals_the_reference_in_float64(device: str, num_tokens: int, name: str) -> None:
    inputs = random_inputs(num_tokens, SHAPES[name], device)
    before = [tensor.clone() for tensor in inputs]
    got = LinearResidual(device)(*inputs)
    assert got.dtype == inputs[0].dtype
    assert_close_to_float64(got, inputs)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "tile", [Tile(16, 16, 1), Tile(16, 64, 2, splits=2), SPLIT, Tile(32, 256, 8, splits=9)], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_tile_changes_no_result(device: str, tile: Tile, num_tokens: int) -> None:
    inputs = random_inputs(num_tokens, SHAPES["small"], device)
    assert_close_to_float64(LinearResidual(device)(*inputs, tile=tile), inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_calls_leave_the_counters_at_zero(device: str) -> None:
    """Calls of one object, with different shapes."""
    add = LinearResidual(device)
    for num_tokens, name in ((3, "small"), (2, "many splits"), (64, "small"), (3, "small")):
        inputs = random_inputs(num_tokens, SHAPES[name], device)
        assert_close_to_float64(add(*inputs, tile=SPLIT), inputs)
        assert not add._arrivals.any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    """Bit for bit, for 2 to 16 tokens, which use the same tile."""
    x, weight, residual = random_inputs(9, SHAPES["many splits"], device)
    add = LinearResidual(device)
    assert torch.equal(add(x, weight, residual)[3:5], add(x[3:5], weight, residual[3:5]))


def test_few_rows_are_split() -> None:
    """Where the rows alone make too few programs. For one token nothing is split; programs take fewer rows instead."""
    assert default_tile(8, 1024, 3072).splits == 4
    assert default_tile(8, 8192, 1024).splits == 1
    assert default_tile(8, 16, 256).splits == 2  # of at least one load each
    assert default_tile(1, 1024, 3072) == Tile(4, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64])
def test_runs_are_equal_bit_for_bit_whichever_program_comes_last(num_tokens: int) -> None:
    inputs = random_inputs(num_tokens, SHAPES["Qwen3's down"], "cuda")
    add = LinearResidual("cuda")
    want = add(*inputs, tile=Tile(16, 64, splits=12))
    for _ in range(200):
        assert torch.equal(add(*inputs, tile=Tile(16, 64, splits=12)), want)
    assert not add._arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_a_chain_with_programmatic_dependent_launch(num_tokens: int) -> None:
    """Each kernel reads what the previous kernel wrote: captured in a CUDA graph and replayed."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    x, weight, _ = random_inputs(num_tokens, (1024, 1024), "cuda")
    add = LinearResidual("cuda")

    def chain(pdl: bool) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = add(y, weight, x, pdl=pdl)
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
