"""The norm and SwiGLU after the product: in Triton's interpreter here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mini_engine.models.layers import rms_norm

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
GPU = pytest.mark.gpu
CASES = [
    pytest.param("cpu", False, marks=INTERPRETED),
    *(pytest.param("cuda", pdl, marks=GPU) for pdl in (False, True)),
]


@pytest.mark.parametrize(("device", "pdl"), CASES)
@pytest.mark.parametrize(("num_tokens", "hidden_size", "size"), [(1, 37, 5), (5, 576, 1536), (3, 64, 1024)])
def test_equals_norm_product_and_activation_in_float64(
    device: str, pdl: bool, num_tokens: int, hidden_size: int, size: int
) -> None:
    from mini_engine.kernels.swiglu import swiglu, swiglu_reference

    generator = torch.Generator().manual_seed(size)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scales = torch.logspace(-3, 3, num_tokens)[:, None]  # the first needs eps
    tokens = (torch.randn(num_tokens, hidden_size, generator=generator) * scales).to(device, dtype)
    weight = (torch.randn(2 * size, hidden_size, generator=generator) / hidden_size**0.5).to(device, dtype)
    gate_up = F.linear(tokens, weight)

    ones = torch.ones(hidden_size, dtype=torch.float64, device=device)
    gate, up = F.linear(rms_norm(tokens.double(), ones, 1e-5), weight.double()).chunk(2, dim=1)
    want = F.silu(gate) * up
    tolerance = 2e-2 if device == "cuda" else 1e-5
    for got in (swiglu(gate_up, tokens, 1e-5, pdl=pdl), swiglu_reference(gate_up, tokens, 1e-5)):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
