"""Learned sinks: every backend that has them against gpt-oss in transformers, and one merge however keys are split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.backend import BACKENDS, AttentionBackend, PlannedCache, create_backend
from mini_engine.attention.cascade import CascadeBackend
from mini_engine.attention.flash_decoding import FlashDecodes
from mini_engine.attention.flashinfer import Decodes, FlashInferDecodes
from mini_engine.attention.levels import CascadeCosts
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.split_kv import SplitKVBackend
from mini_engine.attention.state import AttentionState, attention_state, merge_states, with_sinks
from mini_engine.attention.torch import ChunkedBackend, TorchBackend
from mini_engine.attention.trtllm import TRTLLMDecodes
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention import fake_flashinfer
from tests.attention.prefix_steps import Step, in_pages, prefixed, steps
from tests.attention.stepping import check_equal, expected, full_cache, random_qkv, run_in_steps
from tests.helpers import GREEDY, double_model, make_engine, serve

FULL = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3, has_sinks=True)
WINDOW = replace(FULL, layer=1, window=5)
PLAIN = replace(FULL, layer=2, has_sinks=False)
SPECS = (FULL, WINDOW, PLAIN)  # gpt-oss alternates the first two
SINKS = {
    0: torch.tensor([-4.0, -1.0, 0.0, 0.5, 2.0, 5.0], dtype=torch.float64),
    1: torch.tensor([3.0, -2.0, 1.0, -torch.inf, 0.0, 7.0], dtype=torch.float64),
}
NAMES = [name for name, info in BACKENDS.items() if "cpu" in info.devices and "has_sinks" in info.features]
FREE = CascadeCosts(level_seconds=0.0, bandwidth=math.inf, flops=math.inf)


def gpt_oss(sinks: Mapping[int, Tensor], spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention of gpt-oss in transformers over one whole sequence, with the masks of transformers."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    if not spec.has_sinks:
        return expected(spec, q, k, v)
    sees = causal_mask_function if spec.window is None else sliding_window_causal_mask_function(spec.window)
    nothing, positions = torch.zeros((), dtype=torch.long), torch.arange(len(q))
    mask = torch.zeros(len(q), len(q), dtype=q.dtype)
    mask.masked_fill_(~sees(nothing, nothing, positions[:, None], positions), -math.inf)
    layer = SimpleNamespace(sinks=sinks[spec.layer], num_key_value_groups=spec.group, training=False)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, _ = eager_attention_forward(layer, *heads_first, mask[None, None], scaling=spec.scale)
    return out[0]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_equals_transformers_however_it_is_cut(name: str, data: st.DataObject) -> None:
    """Prompts, chunks and decodes, on pages in random order."""

    def make(cache: PagedKVCache) -> AttentionBackend:
        return create_backend(name, SPECS, cache, Parts(), SINKS)

    check_steps(make, data)


SPLITTING: dict[str, Callable[..., AttentionBackend]] = {
    "tiles of 3 keys": type("Tiles", (ChunkedBackend,), {"KEY_CHUNK": 3}),
    "splits for few workers": partial(SplitKVBackend, thread_blocks=8, least_keys=1),
    "splits of one key": partial(SplitKVBackend, thread_blocks=1000, least_keys=1),
}


@pytest.mark.parametrize("name", SPLITTING)
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_equals_transformers_however_keys_are_split(name: str, data: st.DataObject) -> None:
    """If a sink were merged once per split, it would count several times."""

    def make(cache: PagedKVCache) -> AttentionBackend:
        backend = SPLITTING[name](SPECS, cache, Parts())
        backend.sinks = SINKS
        return backend

    check_steps(make, data)


def check_steps(make: Callable[[PagedKVCache], AttentionBackend], data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 40), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 4) for cut, n in zip(cuts, lens, strict=True)]  # at most five steps
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens) + 2)))
    backend = make(full_cache(SPECS, len(page_order), page_size, torch.float64))
    options: dict[str, Any] = {"oracle": partial(gpt_oss, SINKS)}
    for _, got, want in run_in_steps(backend, SPECS, lens, cuts, page_order, page_size, torch.float64, **options):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=40)
@given(steps())
def test_levels_of_a_cascade_have_one_sink_together(step: Step) -> None:
    check_cascade(step)


def test_a_level_of_a_long_prefix() -> None:
    assert check_cascade(prefixed(3, 2, 1)) > 0


def check_cascade(step: Step) -> int:
    """Compare with flat attention; return the number of levels."""
    order, levels = step.plan(in_pages(0.0))
    caches = [full_cache(SPECS, step.num_pages, step.page_size, torch.float64) for _ in range(2)]
    cascade, flat = CascadeBackend(SPECS, caches[0], Parts(), FREE), TorchBackend(SPECS, caches[1], Parts())
    cascade.sinks = flat.sinks = SINKS
    check_equal(step.batch(order, levels), cascade, flat, 1e-12)
    return len(levels)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", NAMES)
def test_sinks_in_the_dtype_of_the_model(name: str, dtype: torch.dtype, atol: float) -> None:
    """With several decodes in a step, which `torch_padded` computes in one call."""
    sinks = {layer: own.to(dtype) for layer, own in SINKS.items()}
    wide_sinks = {layer: own.double() for layer, own in sinks.items()}
    backend = create_backend(name, SPECS, full_cache(SPECS, 10, 4, dtype), Parts(), sinks)
    cuts, page_order = [4, 1, 13, 7], [5, 3, 8, 1, 0, 2, 7, 9, 6, 4]
    options: dict[str, Any] = {"oracle": lambda spec, *qkv: gpt_oss(wide_sinks, spec, *(x.double() for x in qkv))}
    for _, got, want in run_in_steps(backend, SPECS, [9, 1, 14, 8], cuts, page_order, 4, dtype, **options):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=atol, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sink", [-torch.inf, 1000.0])
def test_extreme_sinks(name: str, sink: float) -> None:
    """A sink of -inf changes nothing, and a large one takes all the weight."""
    sinks = {layer: torch.full_like(own, sink) for layer, own in SINKS.items()}
    backend = create_backend(name, SPECS, full_cache(SPECS, 8, 4, torch.float64), Parts(), sinks)
    for spec, got, want in run_in_steps(backend, SPECS, [9, 12], [8, 11], range(6), 4, torch.float64):
        nothing = spec.has_sinks and sink > 0
        torch.testing.assert_close(got, torch.zeros_like(want) if nothing else want, atol=1e-12, rtol=0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 2**16))
def test_any_split_of_the_keys_is_as_good_as_one(splits: list[int], seed: int) -> None:
    """Scores with one more column, against states merged with the sinks; some queries see no key."""
    q, k, v = random_qkv(FULL, sum(splits), torch.float64, seed)
    mask = torch.rand(len(q), len(k), generator=torch.Generator().manual_seed(seed)) < 0.6
    pieces = zip(k.split(splits), v.split(splits), mask.split(splits, dim=1), strict=True)
    states = [attention_state(q, keys, values, scale=FULL.scale, mask=seen) for keys, values, seen in pieces]
    merged = with_sinks(reduce(merge_states, states), SINKS[0])
    scores = torch.einsum("nhd,mhd->nhm", q, k.repeat_interleave(FULL.group, 1)) * FULL.scale
    scores = torch.cat((scores.masked_fill(~mask[:, None], -torch.inf), SINKS[0].expand(len(q), -1)[..., None]), -1)
    want = torch.einsum("nhm,mhd->nhd", scores.softmax(-1)[..., :-1], v.repeat_interleave(FULL.group, 1))
    torch.testing.assert_close(merged.out, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(merged.lse, scores.logsumexp(-1), atol=1e-12, rtol=0)


def test_sinks_are_a_state_without_a_value() -> None:
    state = attention_state(*random_qkv(FULL, 4, torch.float64, 0), scale=FULL.scale)
    of_sinks = AttentionState(torch.zeros_like(state.out), SINKS[1].expand_as(state.lse))
    got, want = with_sinks(state, SINKS[1]), merge_states(state, of_sinks)
    torch.testing.assert_close(got.out, want.out, atol=1e-14, rtol=0)
    torch.testing.assert_close(got.lse, want.lse, atol=1e-14, rtol=0)


def test_a_query_without_keys_gets_0_whatever_the_sink() -> None:
    empty = AttentionState(torch.zeros(1, 3, 4), torch.full((1, 3), -torch.inf))
    merged = with_sinks(empty, torch.tensor([-torch.inf, 0.0, torch.inf]))
    assert not merged.out.any() and merged.lse.tolist() == [[-torch.inf, 0.0, torch.inf]]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_which_backends_have_sinks() -> None:
    """Those that return an LSE. XQA returns none, so FlashInfer computes such layers for it."""
    without = {name for name, info in BACKENDS.items() if "has_sinks" not in info.on("cuda").features}
    assert without == {"flex", "batch_invariant", "flashinfer_mla", "triton_mla"} and "batch_invariant" in NAMES
    cache = PlannedCache(16, "NHD", torch.bfloat16, torch.device("cuda"))
    spec = replace(FULL, head_dim=64)
    assert FlashDecodes.computes(spec, cache) and not TRTLLMDecodes.computes(spec, cache)


# --- kernels that know nothing of sinks ------------------------------------------------------------------------------

WIDE = tuple(replace(spec, head_dim=64) for spec in SPECS)  # of a size that FlashInfer supports
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("decodes", [FlashInferDecodes, TRTLLMDecodes, FlashDecodes])
@settings(max_examples=5, deadline=None)
@given(steps(), st.sampled_from([0.0, 1e9]))
def test_sinks_are_merged_after_decodes_prompts_and_levels(decodes: type[Decodes], step: Step, cost: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch, has_fa3=False)
        patch.setattr("mini_engine.attention.flash_decoding.FlashDecoding", fake_flashinfer.Kernel)
        caches = [PagedKVCache(WIDE, step.num_pages + 1, step.page_size, torch.float64) for _ in range(2)]
        mine = PagedBackend(WIDE, caches[0], Parts(), decodes=decodes, levels=True)
        theirs = TorchBackend(WIDE, caches[1], Parts())
        mine.sinks = theirs.sinks = SINKS
        check_equal(step.batch(*step.plan(in_pages(cost))), mine, theirs, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_kernel_equals_the_reference(device: str, head_dim: int) -> None:
    pytest.importorskip("triton")
    from mini_engine.kernels.sinks import merge_sinks

    generator = torch.Generator().manual_seed(head_dim)
    out = torch.randn(7, 6, head_dim, generator=generator)
    lse, sinks = torch.randn(7, 6, generator=generator) * 5, torch.randn(6, generator=generator) * 3
    lse[2, 3], sinks[4] = -torch.inf, -torch.inf
    want = with_sinks(AttentionState(out.double(), lse.double() * math.log(2)), sinks).out
    out[2, 3], want[2, 3] = torch.nan, 0  # without keys
    got = out.to(device)
    merge_sinks(got, lse.to(device), sinks.to(device))
    torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flashinfer", "flash_decoding", "flash_decoding+cascade"])
def test_sinks_on_a_gpu(name: str) -> None:
    """Prompts and decodes of gpt-oss's heads, in bfloat16, against transformers in float64."""
    pytest.importorskip("flashinfer")
    full = AttentionSpec(0, num_qo_heads=64, num_kv_heads=8, head_dim=64, scale=0.125, has_sinks=True)
    specs = (full, replace(full, layer=1, window=128))
    generator = torch.Generator().manual_seed(0)
    sinks = {layer: torch.randn(64, generator=generator, dtype=torch.float64) * 2 for layer in (0, 1)}
    on_gpu = {layer: own.to("cuda", torch.bfloat16) for layer, own in sinks.items()}
    sinks = {layer: own.double().cpu() for layer, own in on_gpu.items()}
    cache = full_cache(specs, 80, 16, torch.bfloat16, device="cuda")
    backend = create_backend(name, specs, cache, Parts(), on_gpu)
    order = torch.randperm(80, generator=generator).tolist()
    options: dict[str, Any] = {"oracle": lambda spec, *qkv: gpt_oss(sinks, spec, *(x.double().cpu() for x in qkv))}
    options["device"] = "cuda"
    lens, cuts = [9, 300, 414, 128], [4, 299, 407, 125]
    for _, got, want in run_in_steps(backend, specs, lens, cuts, order, 16, torch.bfloat16, **options):
        torch.testing.assert_close(got.double().cpu(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("sinks", [{}, {0: SINKS[0]}, {0: SINKS[0], 1: torch.zeros(1)}, {**SINKS, 2: SINKS[0]}])
def test_sinks_must_be_those_of_the_specs(sinks: dict[int, Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"need sinks of the shapes \{0: \(6,\), 1: \(6,\)\} by layer, not"):
        create_backend("torch", SPECS, PagedKVCache(SPECS, 1, 4, torch.float64), Parts(), sinks)


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_gives_the_backend_the_models_sinks(name: str) -> None:
    """A model with sinks of -inf says what the model without sinks says, and other sinks change its tokens."""
    model = double_model("llama")
    requests = [(str(b), [b + 1] * (3 * b + 2), replace(GREEDY, max_tokens=6)) for b in range(3)]

    def tokens(sink: float | None) -> dict[str, list[int]]:
        own, specs = copy(model), model.attention_specs
        if sink is not None:
            sinks = {spec.layer: torch.full((spec.num_qo_heads,), sink) for spec in specs}
            own.__class__ = type("WithSinks", (type(model),), {"sinks": property(lambda self: sinks)})
            own.attention_specs = tuple(replace(spec, has_sinks=True) for spec in specs)
        return serve(make_engine(own, attn_backend=name), {0: requests})

    assert tokens(-torch.inf) == tokens(None) != tokens(1000.0)
