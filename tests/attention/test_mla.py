"""Multi-head latent attention: both forms are equal, in every backend that has it, and the others refuse it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.backend import BACKENDS, DEEPSEEK_V2, PlannedCache, choose_backend, create_backend
from mini_engine.attention.mla import UpProjections, absorbed_attention, unabsorbed_attention
from mini_engine.attention.mla_paged import FlashInferMLABackend, TritonMLABackend
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec, MLASizes
from mini_engine.batch import StepBatch, StepBuffers, step_memory
from mini_engine.bench.workloads import model_shape
from mini_engine.chunks import ChunkMemory
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.quantization import Format
from mini_engine.sampling_params import SamplingParams
from tests.attention import fake_flashinfer
from tests.attention.greedy import check_greedy
from tests.attention.stepping import full_cache, random_qkv, random_step, recorded, run_in_steps
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


def test_chunk_memory_and_the_benchmark_refuse_latents() -> None:
    model = our_model(transformers_model("deepseek_v2"))
    with pytest.raises(ConfigError, match=r"the model stores latents \(MLA\), which chunks do not support"):
        ChunkMemory(make_engine(model))
    with pytest.raises(ConfigError, match="bounds do not cover latent attention"):
        model_shape(model.config)


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
    assert torch.equal(model.up_projections[0].weight.flatten(0, 1), exact)
    got = serve(make_engine(model, page_size=4), {0: [("a", PROMPT, PARAMS)]})["a"]
    assert got == alone(model, PROMPT, PARAMS)


# --- on FlashInfer, by its stand-in, and on a GPU --------------------------------------------------------------------

PAGED = {"flashinfer_mla": FlashInferMLABackend, "triton_mla": TritonMLABackend}
POWERS = replace(
    SPEC, mla=MLASizes(kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=16, v_head_dim=5), head_dim=22
)


@pytest.mark.parametrize("name", PAGED)
@settings(deadline=None, max_examples=8)
@given(st.data())
def test_plans_for_flashinfer_compute_the_same(name: str, data: st.DataObject) -> None:
    """Decodes, whole prompts and later chunks, which may be in any order behind the decodes."""
    spec, dtype = (SPEC, torch.float64) if name == "flashinfer_mla" else (POWERS, torch.float32)
    batch, num_pages = random_step(data, 4, gaps=False)
    assume(batch.page_positions is None)  # pages are evicted only behind windows, which these backends refuse
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch, has_fa3=data.draw(st.booleans()))
        patch.setattr("mini_engine.attention.flashinfer.WORKSPACE_BYTES", 64)
        properties = SimpleNamespace(multi_processor_count=5)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        mine, theirs = (PagedKVCache([spec], num_pages, 4, dtype) for _ in range(2))
        backend = PAGED[name]([spec], mine, Parts())
        reference = create_backend("torch", [spec], theirs, Parts(), up_projections={0: up_projections(spec, dtype)})
        backend.up_projections = reference.up_projections
        q, *entry = random_qkv(spec, batch.num_tokens, dtype, 1)
        for own, other in zip(mine.layers[0], theirs.layers[0], strict=True):
            own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(2)))
            other.copy_(own)
        for each in (backend, reference):
            each.plan(batch)
        got, want = backend(0, q, *entry), reference(0, q, *entry)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-4)
        for own, other in zip(mine.layers[0], theirs.layers[0], strict=True):
            assert torch.equal(own, other)
        backend.plan(replace(batch, page_capacity=2 * num_pages))  # as a CUDA graph does
        torch.testing.assert_close(backend(0, q, *entry), got, rtol=0, atol=1e-6)


RELEASED = AttentionSpec(0, num_qo_heads=16, num_kv_heads=16, head_dim=192, scale=192**-0.5, mla=DEEPSEEK_V2)


def test_other_sizes_and_layers_are_refused_on_a_gpu() -> None:
    cache = PlannedCache(64, "NHD", torch.bfloat16, torch.device("cuda"))
    info = replace(BACKENDS["flashinfer_mla"], package=None)
    assert info.refusal([RELEASED], cache) is None
    for spec, message in [
        (SPEC, "needs the sizes of DeepSeek-V2"),
        (replace(RELEASED, mla=None), "computes only multi-head latent attention"),
        (replace(RELEASED, kv_dtype=torch.float8_e4m3fn), "does not implement kv_dtype"),
        (replace(RELEASED, window=9), "does not implement window"),
        (replace(RELEASED, num_qo_heads=20), "needs a number of heads that divides 128, not 20"),
    ]:
        refusal = info.refusal([spec], cache)
        assert refusal is not None and message in refusal[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_equals_the_reference_on_a_gpu(name: str, heads: int, page_size: int) -> None:
    """Decodes, a whole prompt, a later chunk and another whole prompt in one step; then the same decodes in a graph."""
    spec = replace(RELEASED, num_qo_heads=heads, num_kv_heads=heads)
    lens, new = [1, 700, 8192, 300, 900, 513], [1, 1, 1, 300, 40, 513]
    counts = [-(-n // page_size) for n in lens]
    generator = torch.Generator().manual_seed(heads)
    pages = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].tolist()
    caches = [
        PagedKVCache([spec], sum(counts) + 2, page_size, dtype, "cuda") for dtype in (torch.bfloat16, torch.float32)
    ]
    for own, other in zip(caches[0].layers[0], caches[1].layers[0], strict=True):
        own.copy_(torch.randn(own.shape, generator=generator).cuda())
        other.copy_(own)
    matrices = [{0: up_projections(spec, cache.dtype, "cuda")} for cache in caches]
    matrices[1] = {0: replace(matrices[0][0], weight=matrices[0][0].weight.float())}
    backends = [
        create_backend(own, [spec], cache, Parts(), up_projections=up)
        for own, cache, up in zip((name, "torch"), caches, matrices, strict=True)
    ]
    step = {"page_size": page_size, "device": "cuda"}
    tokens = [x.cuda().bfloat16() for x in random_qkv(spec, sum(new), torch.float64, 3)]
    batch = StepBatch.build(token_ids=[0] * sum(new), num_new=new, kv_lens=lens, pages=pages, **step)
    for backend in backends:
        backend.plan(batch)
    got, want = backends[0](0, *tokens), backends[1](0, *(x.float() for x in tokens))
    assert float((got.float() - want).norm() / want.norm()) < 2e-2
    for own, other in zip(caches[0].layers[0], caches[1].layers[0], strict=True):
        assert torch.equal(own.float(), other)

    decodes = {"token_ids": [0] * 3, "num_new": None, "kv_lens": lens[:3], "pages": pages[: sum(counts[:3])]}
    memory = StepBuffers("cuda", step_memory(3, 1000, "cuda"))
    batch = StepBatch.build(**decodes, page_size=page_size, page_capacity=1000, into=memory)
    graph, outputs = recorded(backends[0], batch, [[x[:3] for x in tokens]])
    shorter = [1, 650, 5000]
    counts = [-(-n // page_size) for n in shorter]
    decodes |= {"kv_lens": shorter, "pages": pages[-sum(counts) :]}
    torch.cuda.synchronize()
    batch = StepBatch.build(**decodes, page_size=page_size, page_capacity=1000, into=memory)
    for backend in backends:
        backend.plan(batch)
    graph.replay()
    want = backends[1](0, *(x[:3].float() for x in tokens))
    assert float((outputs[0].float() - want).norm() / want.norm()) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["auto", *PAGED, "torch"])
def test_greedy_tokens_on_a_gpu(name: str, options: dict[str, Any]) -> None:
    """Preempted, in chunks, with shared prefixes, and decodes in CUDA graphs."""
    check_greedy(torch.device("cuda"), "deepseek_v2", attn_backend=name, **options)
