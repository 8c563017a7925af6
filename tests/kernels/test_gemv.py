"""Each product, compared with the parts that it replaces, in float64: in Triton's interpreter here, on a GPU there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mini_engine.models.layers import rms_norm
from tests.kernels.random_tensors import Random

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = pytest.mark.parametrize(
    ("device", "pdl"),
    [
        pytest.param("cpu", False, marks=INTERPRETED),
        *(pytest.param("cuda", pdl, marks=pytest.mark.gpu) for pdl in (False, True)),
    ],
)
TOKENS = pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
SHAPES = pytest.mark.parametrize(("num_rows", "num_columns"), [(96, 1024), (74, 72), (37, 3072), (5, 9000)])
EPS = 1e-6


def normalized(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.double(), torch.ones(x.shape[1], dtype=torch.float64, device=x.device), EPS)


def assert_close(got: torch.Tensor, want: torch.Tensor, scale: float = 1) -> None:
    tolerance = 2e-2 if got.is_cuda else 1e-4 * scale
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@DEVICES
@TOKENS
@SHAPES
def test_the_projection_of_normalized_tokens(device, pdl, num_tokens, num_rows, num_columns):
    from mini_engine.kernels.gemv import project

    random = Random(num_rows, device)
    x, weight = random.tokens(num_tokens, num_columns), random(num_rows, num_columns) / num_columns**0.5
    assert_close(project(x, weight, EPS, pdl=pdl), F.linear(normalized(x), weight.double()))


@DEVICES
@TOKENS
@SHAPES
@pytest.mark.parametrize("scale", [1, 100])
def test_the_activation_is_that_of_the_products(device, pdl, num_tokens, num_rows, num_columns, scale):
    """With a scale of 100 the exponentials of some gates overflow."""
    from mini_engine.kernels.gemv import gate_up_swiglu

    random = Random(num_rows, device)
    x, weight = random.tokens(num_tokens, num_columns), random(2 * num_rows, num_columns) * (scale / num_columns**0.5)
    gate, up = F.linear(normalized(x), weight.double()).chunk(2, dim=1)
    assert_close(gate_up_swiglu(x, weight, EPS, pdl=pdl), F.silu(gate) * up, scale)


@DEVICES
@TOKENS
@SHAPES
def test_the_product_is_added_in_place(device, pdl, num_tokens, num_rows, num_columns):
    from mini_engine.kernels.gemv import add_product

    random = Random(num_rows, device)
    x, weight = random(num_tokens, num_columns), random(num_rows, num_columns) / num_columns**0.5
    residual = random(num_tokens, num_rows)
    want = residual.double() + F.linear(x.double(), weight.double())
    assert add_product(residual, x, weight, pdl=pdl) is residual
    assert_close(residual, want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_graph_of_products_equals_the_parts_again_and_again(num_tokens: int) -> None:
    """Products that start before the one in front of them has ended still read its result."""
    from mini_engine.kernels.gemv import add_product, gate_up_swiglu

    pdl = torch.cuda.get_device_capability() >= (9, 0)
    random, hidden_size, size = Random(3, "cuda"), 1024, 3072
    gate_ups = [random(2 * size, hidden_size) / hidden_size**0.5 for _ in range(6)]
    downs = [random(hidden_size, size) / size**0.5 for _ in range(6)]
    start, stream = random(num_tokens, hidden_size), random(num_tokens, hidden_size)

    def run() -> None:
        stream.copy_(start)
        for gate_up, down in zip(gate_ups, downs, strict=True):
            add_product(stream, gate_up_swiglu(stream, gate_up, EPS, pdl=pdl), down, pdl=pdl)

    run()
    once, graph = stream.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    want = start.double()
    for gate_up, down in zip(gate_ups, downs, strict=True):
        gate, up = F.linear(normalized(want), gate_up.double()).chunk(2, dim=1)
        want = want + F.linear(F.silu(gate) * up, down.double())
    torch.testing.assert_close(once.double(), want, atol=0.1, rtol=0.05)
    for _ in range(20):
        stream.zero_()
        graph.replay()
        assert torch.equal(stream, once)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mini_engine.kernels import gemv

POINTERS = {"x", "weight", "gate_up", "out", "residual"}
for columns in (1024, 3072, 14336):
    sizes = {"TOKENS": 4, "ROWS": gemv._rows(columns), "COLUMNS": columns, "PDL": True}
    for kernel in (gemv._project, gemv._gate_up_swiglu, gemv._add_product):
        constants = {(i,): sizes[name] for i, name in enumerate(kernel.arg_names) if name in sizes}
        types = {
            name: "*bf16" if name in POINTERS else "constexpr" if name in sizes else "fp32" if name == "eps" else "i32"
            for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=types, constexprs=constants)
        warps = 4 if columns <= gemv.ELEMENTS else 8
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})
        assert "griddepcontrol.wait" in compiled.asm["ptx"] and compiled.asm["cubin"]
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)
