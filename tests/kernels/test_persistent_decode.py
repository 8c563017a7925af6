"""A whole decode step in one kernel: its logits, and the keys and values that it stores, are the model's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from book.random_models import random_model
from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.loading.checkpoint import formats_for
from mini_engine.models.base import CausalLM
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.registry import build_model
from mini_engine.models.weights import Projection
from mini_engine.parts import Parts, default_parts
from mini_engine.quantization import Format
from mini_engine.sampling_params import SamplingParams
from tests.helpers import double_model, make_engine, serve

PAGE = 16
SHAPES = {
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "intermediate_size": 3072},
    "llama": {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64, "intermediate_size": 8192},
}


def model_of(family: str) -> LlamaForCausalLM:
    from transformers import LlamaConfig, Qwen3Config

    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](
        **SHAPES[family], num_hidden_layers=3, num_key_value_heads=8, vocab_size=5001, rope_theta=10_000.0,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = random_model(config, torch.bfloat16, torch.device("cuda"))
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)  # weights of a norm
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_equals_the_model(family: str, layout: str) -> None:
    """After 1 to 5,000 keys on pages in random order: logits, keys and values within the rounding of bfloat16."""
    model = model_of(family)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (
        PagedKVCache(model.attention_specs, 400, PAGE, torch.bfloat16, "cuda", kv_layout)
        for kv_layout in (layout, "NHD")
    )
    for own, reference in zip(mine.layers, theirs.layers, strict=True):
        for x, y in zip(own, reference, strict=True):
            y.copy_(torch.randn(y.shape, generator=generator))
            x.copy_(y if layout == "NHD" else y.transpose(1, 2))
    assert PersistentDecode.accepts(model, model.attention_specs, mine)
    decode = PersistentDecode(model, mine)
    backend = create_backend("torch", model.attention_specs, theirs, Parts())
    last_token = torch.randint(5001, (3,), generator=generator).cuda()
    for step, length in enumerate((1, 2, 16, 17, 127, 129, 384, 640, 2048, 2049, 5000)):
        batch = StepBatch.build(
            token_ids=[step], num_new=None, kv_lens=[length], page_size=PAGE, device="cuda",
            pages=torch.randperm(400, generator=generator)[: -(-length // PAGE)].numpy(),
            token_source=[step % 4 - 1],
        )  # fmt: skip
        got = decode(batch, last_token)
        backend.plan(batch)
        want = model.compute_logits(model(batch.feed(last_token), batch.positions, backend))
        assert (got - want).norm() < 0.02 * want.norm(), length
        slot = batch.slot_mapping
        for own, reference in zip(mine.layers, theirs.layers, strict=True):
            for x, y in zip(own, reference, strict=True):
                stored = (x if layout == "NHD" else x.transpose(1, 2)).flatten(0, 1)[slot]
                expected = y.flatten(0, 1)[slot]
                assert (stored - expected).norm() < 0.02 * expected.norm(), length


def quantized(dense: LlamaForCausalLM, formats: dict[str, Format]) -> tuple[LlamaForCausalLM, CausalLM]:
    """The model in these formats, and in float32 with exactly the numbers that the formats store."""
    parts, tensors = default_parts(dense.device), dict(dense.destinations())
    model = build_model(replace(dense.config, formats=formats), parts, torch.bfloat16, dense.device)
    assert isinstance(model, LlamaForCausalLM)
    model.load_weights(tensors)
    untied = replace(dense.config, tie_word_embeddings=False)  # the embeddings are not quantized
    exact = build_model(untied, Parts(), torch.float32, dense.device)
    exact.load_weights(tensors | {"lm_head.weight": dense.embed_tokens})
    matrices = ([own for own in each.modules() if isinstance(own, Projection)] for each in (model, exact))
    with torch.no_grad():
        for own, other in zip(*matrices, strict=True):
            other.weight.copy_(own.dense(torch.float32))
    return model, exact


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "group"), [("fp8", None), *((m, group) for m in ("int4", "int8") for group in (None, 32, 64, 128))]
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_with_quantized_weights_equals_the_dequantized_model(
    family: str, method: str, group: int | None
) -> None:
    """With a scale for each row, or scales and offsets for groups; norms' weights are not one."""
    dense = model_of(family)
    form = Format(method, 1, group, has_offsets=group is not None)
    of_method = formats_for(method, dense)
    formats = {name: own if name == "lm_head" else form for name, own in of_method.items()}
    model, exact = quantized(dense, formats)
    caches = [PagedKVCache(m.attention_specs, 400, PAGE, m.dtype, "cuda", "NHD") for m in (model, exact)]
    generator = torch.Generator().manual_seed(0)
    for own, reference in zip(*(cache.layers for cache in caches), strict=True):
        for x, y in zip(own, reference, strict=True):
            x.copy_(torch.randn(x.shape, generator=generator))
            y.copy_(x)
    assert PersistentDecode.accepts(model, model.attention_specs, caches[0])
    decode = PersistentDecode(model, caches[0])
    backend = create_backend("torch", exact.attention_specs, caches[1], Parts())
    last_token = torch.randint(5001, (3,), generator=generator).cuda()
    for step, length in enumerate((1, 17, 129, 640, 5000, 384)):
        batch = StepBatch.build(
            token_ids=[step], num_new=None, kv_lens=[length], page_size=PAGE, device="cuda",
            pages=torch.randperm(400, generator=generator)[: -(-length // PAGE)].numpy(), token_source=[step % 4 - 1],
        )  # fmt: skip
        got = decode(batch, last_token)
        backend.plan(batch)
        want = exact.compute_logits(exact(batch.feed(last_token), batch.positions, backend))
        assert (got - want).norm() < 0.02 * want.norm(), length
        slot = batch.slot_mapping
        for own, reference in zip(*(cache.layers for cache in caches), strict=True):
            for x, y in zip(own, reference, strict=True):
                stored, expected = (each.flatten(0, 1)[slot].float() for each in (x, y))
                assert (stored - expected).norm() < 0.02 * expected.norm(), length


@pytest.mark.gpu
def test_layers_of_several_formats_are_refused() -> None:
    dense = model_of("qwen3")
    formats = formats_for("int4", dense) | {"model.layers.1.mlp.down_proj": Format("int8")}
    model, _ = quantized(dense, formats)
    cache = PagedKVCache(model.attention_specs, 40, PAGE, torch.bfloat16, "cuda", "NHD")
    assert not PersistentDecode.accepts(model, model.attention_specs, cache)


@pytest.mark.gpu
def test_an_engine_replays_it_and_gives_nearly_the_same_tokens() -> None:
    """Logits that are close may change places, so tokens agree up to the first such tie."""
    pytest.importorskip("flashinfer")
    model, params = model_of("qwen3"), SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompts = [[i, 7, 40 + i, 11] * (10 * i + 1) for i in range(4)]
    agreed = 0
    engines = [
        make_engine(model, attn_backend="flashinfer", num_pages=200, max_batch_size=2, persistent_decode=persistent)
        for persistent in (True, False)
    ]
    for i, prompt in enumerate(prompts):
        got, want = (serve(engine, {0: [(str(i), prompt, params)]})[str(i)] for engine in engines)
        assert len(got) == len(want) == 64
        agreed += next((j for j, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), 64)
    assert agreed > 64


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8_e4m3"}, {"sliding_window": 16}])
def test_options_that_the_kernel_does_not_know_are_refused(options: dict[str, Any]) -> None:
    pytest.importorskip("flashinfer")
    with pytest.raises(ConfigError, match="persistent_decode needs a Llama or Qwen3"):
        make_engine(model_of("qwen3"), attn_backend="flashinfer", num_pages=200, persistent_decode=True, **options)


def test_a_model_that_does_not_suit_is_refused() -> None:
    with pytest.raises(ConfigError, match="persistent_decode needs a Llama or Qwen3"):
        make_engine(double_model("llama"), persistent_decode=True)
