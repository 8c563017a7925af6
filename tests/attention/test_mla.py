"""Multi-head latent attention: both forms are equal, in every backend that has it, and the others refuse it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.backend import BACKENDS, choose_backend, create_backend
from mini_engine.attention.mla import UpProjections, absorbed_attention, unabsorbed_attention
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec, MLASizes
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.quantization import Format
from mini_engine.sampling_params import SamplingParams
from tests.attention.stepping import full_cache, random_qkv, run_in_steps
from tests.helpers import alone, make_engine, serve
from tests.models.families import our_model, transformers_model

SIZES = MLASizes(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
SPEC = AttentionSpec(0, num_qo_heads=3, num_kv_heads=3, head_dim=10, scale=0.3, mla=SIZES)
SPECS = (SPEC, replace(SPEC, layer=1, window=5), replace(SPEC, layer=2, softcap=2.0, alibi_slopes=(0.5, 0.25, 0.1)))
IN_TORCH = ["torch", "torch_padded", "chunked"]


def up_projections(spec: AttentionSpec, dtype: torch.dtype = torch.float64, device: str = "cpu") -> UpProjections:
    assert spec.mla is not None
    rows = spec.num_qo_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    generator = torch.Generator().manual_seed(spec.layer)
    weight = torch.randn(rows, spec.mla.kv_lora_rank, generator=generator, dtype=torch.float64)
    return UpProjections.of((weight / spec.mla.kv_lora_rank**0.5).to(device, dtype), spec.mla)


def by_definition(spec: AttentionSpec, q: Tensor, latents: Tensor, rotated: Tensor) -> Tensor:
    """Each head with its own key and value, computed from the latents one head at a time."""
    assert spec.mla is not None
    up, positions, outputs = up_projections(spec), torch.arange(len(q)), []
    for head in range(spec.num_qo_heads):
        keys = torch.cat((latents[:, 0] @ up.keys[head].T, rotated[:, 0]), dim=1)
        scores = q[:, head] @ keys.T * spec.scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.alibi_slopes:
            scores = scores - spec.alibi_slopes[head] * (positions[:, None] - positions).double()
        scores = scores.masked_fill(~attention_mask(positions, positions, spec.window), -torch.inf)
        outputs.append(scores.softmax(-1) @ (latents[:, 0] @ up.values[head].T))
    return torch.stack(outputs, dim=1)


@settings(deadline=None)
@given(st.data())
def test_both_forms_are_equal(data: st.DataObject) -> None:
    heads, rank, nope, rope = (data.draw(st.integers(1, 9)) for _ in range(4))
    sizes = MLASizes(rank, nope, rope, v_head_dim=data.draw(st.integers(1, nope + rope)))
    spec = AttentionSpec(0, heads, heads, nope + rope, scale=0.5, mla=sizes)
    m = data.draw(st.integers(1, 9))
    q, latents, rotated = random_qkv(spec, m, torch.float64, seed=m)
    n, up = data.draw(st.integers(1, m)), up_projections(spec)
    mask = attention_mask(torch.arange(m - n, m), torch.arange(m))
    attend = partial(masked_attention, scale=spec.scale, mask=mask)
    entry = up, q[m - n :], latents, rotated
    want = unabsorbed_attention(*entry, attend)
    assert want.shape == (n, heads, sizes.v_head_dim)
    torch.testing.assert_close(absorbed_attention(*entry, attend), want, rtol=0, atol=1e-10)
    torch.testing.assert_close(by_definition(spec, q, latents, rotated)[m - n :], want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", IN_TORCH)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_equals_the_definition_however_it_is_cut(name: str, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 70), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 4) for cut, n in zip(cuts, lens, strict=True)]  # at most five steps
    page_size = data.draw(st.sampled_from([1, 3, 16]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens) + 2)))
    cache = full_cache(SPECS, len(page_order), page_size, torch.float64)
    matrices = {spec.layer: up_projections(spec) for spec in SPECS}
    backend = create_backend(name, SPECS, cache, Parts(), up_projections=matrices)
    steps = run_in_steps(backend, SPECS, lens, cuts, page_order, page_size, torch.float64, oracle=by_definition)
    for _, got, want in steps:
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_a_token_stores_a_latent_and_a_rotated_key() -> None:
    plain = AttentionSpec(1, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=1.0)
    assert (SPEC.entry, SPEC.entry_size, SPEC.value_dim) == (((1, 12), (1, 4)), 16, 5)
    assert (plain.entry, plain.entry_size, plain.value_dim) == (((2, 16), (2, 16)), 64, 16)
    cache = PagedKVCache([SPEC, plain], 3, 4, torch.float32)
    shapes = [[tuple(x.shape) for x in layer] for layer in cache.layers]
    assert shapes == [[(3, 4, 1, 12), (3, 4, 1, 4)], [(3, 4, 2, 16), (3, 4, 2, 16)]]
    assert cache.bytes_per_token == (16 + 64) * 4
    cache.layers[0][0][1] = 7.0
    cache.copy_pages([(1, 2)])
    assert cache.layers[0][0][2].eq(7.0).all() and not cache.layers[0][0][0].any()


OTHERS = [name for name in BACKENDS if name not in (*IN_TORCH, "flashinfer_mla", "triton_mla")]


@pytest.mark.parametrize("name", OTHERS)
def test_other_backends_refuse_it_and_name_one_that_does_not(name: str) -> None:
    cache = PagedKVCache([SPEC], 1, 128, torch.float32)
    with pytest.raises(ConfigError, match=r"use attn_backend='torch'") as refusal:
        create_backend(name, [SPEC], cache, Parts(), up_projections={0: up_projections(SPEC)})
    if "cpu" in BACKENDS[name].devices:
        assert f"the {name} backend does not implement mla, which layer 0 sets" in str(refusal.value)


def test_the_engine_chooses_a_backend_that_has_it() -> None:
    name, _ = choose_backend([SPEC], None, "NHD", torch.float32, torch.device("cpu"))
    assert name == "torch_padded"


def test_matrices_of_other_layers_are_refused() -> None:
    cache = PagedKVCache([SPEC], 1, 16, torch.float64)
    with pytest.raises(ConfigError, match=r"up-projections of the layers \[0\], not \[\]; give model\.up_projections"):
        create_backend("torch", [SPEC], cache, Parts())


# --- in the engine ---------------------------------------------------------------------------------------------------

PROMPT, PARAMS = [5, 9, 33, 7, 8, 20], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_invariant": True, "attn_backend": "auto"}, "batch_invariant backend does not implement mla"),
        ({"attn_backend": "cascade"}, "cascade backend does not implement mla.*use attn_backend='torch'"),
        ({"persistent_decode": True}, "persistent_decode needs a Llama or Qwen3"),
    ],
)
def test_options_without_latents_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(our_model(transformers_model("deepseek_v2")), **options)


def test_latents_may_be_stored_in_float8() -> None:
    """The prompt reads what the cache holds, so chunks and decodes see the same keys as the whole prompt."""
    model = our_model(transformers_model("deepseek_v2", dtype=torch.float64))
    outputs = [
        serve(make_engine(model, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=step), {0: [("a", PROMPT, PARAMS)]})
        for step in (1, 4, 64)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("q_lora_rank", [None, 32])
def test_weights_may_be_quantized_except_the_matrix_that_expands_latents(q_lora_rank: int | None) -> None:
    theirs = transformers_model("deepseek_v2", dtype=torch.float64, q_lora_rank=q_lora_rank)
    names = [name.removesuffix(".weight") for name in theirs.state_dict() if name.endswith("proj.weight")]
    config = replace(ModelConfig.from_hf(theirs.config.to_dict()), formats=dict.fromkeys(names, Format("int8")))
    model = build_model(config, Parts(), torch.float64, "cpu")
    model.load_weights(theirs.state_dict())
    exact = theirs.state_dict()["model.layers.0.self_attn.kv_b_proj.weight"]
    up = model.up_projections[0]
    assert torch.equal(torch.cat((up.keys, up.values), dim=1).flatten(0, 1), exact)
    got = serve(make_engine(model, page_size=4), {0: [("a", PROMPT, PARAMS)]})["a"]
    assert got == alone(model, PROMPT, PARAMS)
