"""The parts as FlashInfer's kernels equal their references, which compute the shapes that the kernels do not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import reload
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mini_engine import rope
from mini_engine.models import layers
from mini_engine.models.config import ACTIVATIONS
from mini_engine.ops import LAYER_PARTS
from mini_engine.parts import Parts, default_parts
from mini_engine.rope import RopeConfig, inverse_frequencies, rope_tables
from tests.attention import fake_flashinfer
from tests.models.families import our_model, transformers_model, whole

# The kernels round once, the references also after the activation.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """On a CPU the kernels are those of the stand-in."""
    if request.param == "cuda":
        pytest.importorskip("flashinfer")
        yield "cuda"
        return
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        yield "cpu"


@pytest.fixture
def ops(device: str) -> ModuleType:
    from mini_engine.kernels import fused_ops

    return reload(fused_ops)  # it may have been imported with the other FlashInfer


def random(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, atol=TOLERANCE[want.dtype], rtol=TOLERANCE[want.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(5, 1024), (1, 72), (5, 3, 64), (2, 3, 4, 64)])
def test_rms_norm(ops: ModuleType, device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (random(*own, device=device, dtype=dtype) for own in (shape, shape[-1:]))
    before = x.clone()
    assert_close(ops.rms_norm(x, weight, 1e-5), layers.rms_norm(x, weight, 1e-5))
    assert torch.equal(x, before)
    wide = weight.to(torch.promote_types(dtype, torch.float32))
    assert_close(ops.rms_norm(x, wide, 1e-5), layers.rms_norm(x, wide, 1e-5))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_qk_norm_of_heads_inside_a_projection(ops: ModuleType, device: str, head_dim: int, dtype: torch.dtype) -> None:
    q_and_k = random(7, 10, head_dim, device=device, dtype=dtype)[:, :8]  # the last two heads are values
    weights = random(2, head_dim, device=device, dtype=dtype)
    before = q_and_k.clone()
    got, want = (module.qk_norm(q_and_k, *weights, 6, 1e-5) for module in (ops, layers))
    assert_close(got, want)
    assert torch.equal(q_and_k, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(ops: ModuleType, device: str, head_dim: int, dtype: torch.dtype, interleaved: bool) -> None:
    """Two steps, of several layers each: the tables of the first must not be used in the second."""
    rotate = ops.Rotation()
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = inverse_frequencies(RopeConfig(10_000.0, head_dim)).to(device, table_dtype)
    for positions in ([0, 17, 4000], [3, 2, 1]):
        cos, sin = rope_tables(torch.tensor(positions, device=device), frequencies)
        for heads in (5, 3):
            x = random(3, 8, head_dim, device=device, dtype=dtype)[:, :heads]
            before = x.clone()
            want = rope.apply_rope(x, cos, sin, interleaved=interleaved)
            assert_close(rotate(x, cos, sin, interleaved=interleaved), want)
            assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu", "relu"])
def test_gated_mlp(ops: ModuleType, device: str, name: str, dtype: torch.dtype) -> None:
    x = random(5, 64, device=device, dtype=dtype)
    weights = random(192, 64, device=device, dtype=dtype) / 8, random(64, 96, device=device, dtype=dtype) / 10
    gate_up, down = (partial(torch.nn.functional.linear, weight=weight) for weight in weights)
    activation: Callable[[Tensor], Tensor] = ACTIVATIONS[name]
    assert_close(ops.gated_mlp(x, gate_up, down, activation), layers.gated_mlp(x, gate_up, down, activation))


def own_parts(module: ModuleType) -> Parts:
    return replace(Parts(), **{name: getattr(module, name) for name in LAYER_PARTS})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_models_run_on_the_fused_parts(ops: ModuleType, device: str, family: str) -> None:
    """In bfloat16, compared with the same model on the references."""
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, head_dim=64, hidden_size=64)
    tokens = [[5, 9, 33, 4, 60], [8, 3]]
    fused, reference = (our_model(theirs, parts=parts).to(device) for parts in (own_parts(ops), Parts()))
    with torch.device(device):
        logits = zip(whole(fused, tokens), whole(reference, tokens), strict=True)
    for got, want in logits:
        span = want.amax() - want.amin()
        torch.testing.assert_close(got, want, atol=0.03 * float(span), rtol=0)


def test_default_parts_are_the_references_without_a_gpu() -> None:
    assert default_parts(torch.device("cpu")) == Parts()


@pytest.mark.gpu
def test_default_parts_are_fused_on_a_gpu_with_flashinfer() -> None:
    pytest.importorskip("flashinfer")
    parts = default_parts(torch.device("cuda"))
    assert parts.gated_mlp is not Parts().gated_mlp and parts.sample is Parts().sample
