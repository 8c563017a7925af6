"""The compiled layer equals the layer of parts, and is not compiled again for another number of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from book.kernels.compiled import CompiledLayer
from mini_engine.models.base import CausalLM
from mini_engine.models.llama import decoder_layer
from mini_engine.rope import rope_tables
from tests.models.families import our_model, transformers_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GRAPHS = 2 * 2  # before attention and after it; for one token, and for any other number


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A stand-in that uses all of its arguments and is cheap."""
    group = q.shape[1] // k.shape[1]
    return (q * k.repeat_interleave(group, 1) + (layer + 1) * v.repeat_interleave(group, 1)).contiguous()


def make_inputs(model: CausalLM, num_tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Residual stream, cosines and sines."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, model.config.hidden_size, generator=generator).to(device, model.dtype)
    return x, *rope_tables(torch.arange(num_tokens, device=device) + 5, model.inv_freq)


def assert_layers_are_equal(layer: CompiledLayer, model: CausalLM, num_tokens: int, device: str) -> None:
    """Through all layers of the model, one after the other."""
    with torch.inference_mode():
        x, cos, sin = make_inputs(model, num_tokens, device)
        want = x
        for own in model.layers:
            x = layer(own, x, cos, sin, attend)
            want = decoder_layer(own, want, cos, sin, attend)
    assert x.dtype == want.dtype
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    if device == "cuda":  # in 16 bits: rounded after other operations, on a residual stream that grows
        tolerance = {"atol": 2e-2 * float(want.abs().max()), "rtol": 2e-2}
    torch.testing.assert_close(x, want, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_two_graphs_for_each_half_whatever_the_number_of_tokens(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = our_model(transformers_model("qwen3", seed=2, dtype=dtype, num_hidden_layers=2)).to(device)
    layer = CompiledLayer()
    for num_tokens in (1, 2):
        assert_layers_are_equal(layer, model, num_tokens, device)
    assert compiled_graphs() == GRAPHS
    for num_tokens in (*range(1, 41), 257, 1):
        assert_layers_are_equal(layer, model, num_tokens, device)
    assert compiled_graphs() == GRAPHS


def test_the_first_number_of_tokens_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and guarded as always, but run by PyTorch: no code is generated."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = our_model(transformers_model("llama", seed=2, num_hidden_layers=2, attention_bias=True))
    layer = CompiledLayer()
    for num_tokens in (40, 8, 5, 4, 2, 3, 41, 1):
        assert_layers_are_equal(layer, model, num_tokens, "cpu")
    assert compiled_graphs() == GRAPHS
