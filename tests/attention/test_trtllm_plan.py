"""The flashinfer_trtllm backend without a GPU: the tables that it passes to FlashInfer, and what it logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import flashinfer as flashinfer_module
from mini_engine.attention import trtllm as module
from mini_engine.attention.backend import BACKENDS, create_backend
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.attention.trtllm import TRTLLMDecodes
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from tests.attention import fake_flashinfer
from tests.attention.stepping import (
    E4M3,
    check_equal,
    decodes,
    error_of_narrow_keys,
    full_cache,
    narrow,
    random_step,
    run_in_steps,
)  # fmt: skip
from tests.helpers import alone, double_model, make_engine, serve

PLAIN = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
SPECS = (PLAIN, replace(PLAIN, layer=1, window=5))


trtllm_decodes = partial(PagedBackend, decodes=TRTLLMDecodes)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    """Naive attention stands in for FlashInfer, and a cache on a CPU is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        patch.setattr(module, "SCRATCH_BYTES", 64)
        patch.setattr(flashinfer_module, "WORKSPACE_BYTES", 64)
        on_cpu = replace(
            BACKENDS["flashinfer_trtllm"], devices=("cpu",), dtypes=(torch.float64,), package=None,
            sizes=lambda spec, cache: None,
        )  # fmt: skip
        patch.setitem(BACKENDS, "flashinfer_trtllm", on_cpu)
        yield


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=12)
@given(st.data())
def test_equals_naive_attention_however_it_is_cut(fake: None, layout: str, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 30), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 4) for cut, n in zip(cuts, lens, strict=True)]  # at most five steps
    page_size = data.draw(st.sampled_from([1, 3, 16]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens))))  # page 0 is always in use
    cache = full_cache(SPECS, len(page_order), page_size, torch.float64, layout=layout)
    backend = create_backend("flashinfer_trtllm", SPECS, cache, Parts())
    for _, got, want in run_in_steps(backend, SPECS, lens, cuts, page_order, page_size, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@settings(max_examples=20)
@given(st.data())
def test_pages_may_be_evicted_in_front(fake: None, data: st.DataObject) -> None:
    batch, num_pages = random_step(data, 4, gaps=False, longest=40)
    caches = [PagedKVCache(SPECS, num_pages, 4, torch.float64) for _ in range(2)]
    backend = create_backend("flashinfer_trtllm", SPECS, caches[0], Parts())
    check_equal(batch, backend, TorchBackend(SPECS, caches[1], Parts()), 1e-12)


def test_what_a_graph_has_recorded_reads_the_tables_of_each_step(fake: None) -> None:
    """The tensors stay where they are, and are as wide as the longest request can become."""
    cache = full_cache(SPECS, 12, 4, torch.float64, value=0.5)
    backend = trtllm_decodes(SPECS, cache, Parts())
    seen = set()
    for kv_lens, pages in (([1, 1], [11, 11]), ([13, 4], [3, 0, 7, 1, 2]), ([5, 20], [0, 1, 5, 4, 3, 2, 6])):
        backend.plan(decodes(kv_lens, pages, 4, page_capacity=10))
        [[(_, first)], [(_, second)]] = backend._planned.values()
        assert first.tables is second.tables
        table, lens = first.tables.pages, first.tables.kv_lens
        seen.add((table.data_ptr(), lens.data_ptr()))
        assert table.shape == (2, 5) and lens.tolist() == kv_lens
        counts = [-(-n // 4) for n in kv_lens]
        assert table[0, : counts[0]].tolist() == pages[: counts[0]]
        assert table[1, : counts[1]].tolist() == pages[counts[0] : sum(counts)]
    assert len(seen) == 1


@pytest.mark.parametrize("sizes", [None, (1, 3, 6)])
def test_an_engine_gives_every_request_the_tokens_that_it_gets_alone(fake: None, sizes: tuple[int, ...] | None) -> None:
    """With graphs too: on a CPU they call the function again, over the same padding and the same tables."""
    model = double_model("llama")
    engine = make_engine(
        model, attn_backend="flashinfer_trtllm", num_pages=14, page_size=4, max_batch_size=5, max_model_len=40,
        cuda_graph_batch_sizes=sizes, enable_prefix_caching=True, max_num_batched_tokens=16,
    )  # fmt: skip
    prompts = {f"{n}": [3 + (5 * n + i) % 50 for i in range(1 + 2 * n)] for n in range(8)}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    arrivals = {int(name) // 2: [] for name in prompts}
    for name, prompt in prompts.items():
        arrivals[int(name) // 2].append((name, prompt, params))
    outputs = serve(engine, arrivals)
    assert outputs == {name: alone(model, prompt, params) for name, prompt in prompts.items()}


@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_trtllm"])
@settings(max_examples=10)
@given(st.data())
def test_narrow_keys_are_divided_by_their_scales(fake: None, name: str, data: st.DataObject) -> None:
    batch, num_pages = random_step(data, 16, gaps=False, longest=60)
    layout = data.draw(st.sampled_from(["NHD", "HND"]))
    mine = PagedKVCache(narrow(SPECS), num_pages, 16, torch.float64, layout=layout)
    theirs = PagedKVCache(SPECS, num_pages, 16, torch.float64)
    make = trtllm_decodes if name == "flashinfer_trtllm" else PagedBackend
    error = error_of_narrow_keys(batch, make(narrow(SPECS), mine, Parts()), TorchBackend(SPECS, theirs, Parts()))
    assert error < 1e-12


def test_the_option_of_narrow_keys_reaches_the_cache(fake: None) -> None:
    options = {"attn_backend": "flashinfer_trtllm", "num_pages": 14, "kv_cache_dtype": "fp8_e4m3"}
    engine = make_engine(double_model("llama"), **options)
    assert {x.dtype for pair in engine.cache.layers for x in pair} == {E4M3}
    serve(engine, {0: [("a", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))]})
    with pytest.raises(ConfigError, match="kv_dtype"):
        make_engine(double_model("llama"), **options | {"attn_backend": "flex"})


def test_what_computes_a_layer_is_logged_once(fake: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="mini_engine.attention")
    backend = trtllm_decodes(SPECS, PagedKVCache(SPECS, 9, 4, torch.float64), Parts())
    for _ in range(3):
        backend.plan(StepBatch.build(token_ids=[0] * 3, num_new=[1, 2], kv_lens=[9, 2], pages=range(4), page_size=4))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages)) + 1  # the tables of both kinds of layers have one shape
    assert sum(message.startswith("xqa for LayerKind") for message in messages) == 2
    assert sum(message.startswith("fa2 for LayerKind") for message in messages) == 2
    assert "keys [9, 4, 2, 16] NHD, torch.float64" in messages[0]
    assert messages.count("table of pages [1, 3], lengths [1]") == 2


@pytest.mark.parametrize("architecture", [9, 10, 12])
def test_the_kernel_is_that_of_the_gpu(architecture: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch, architecture=architecture)
        patch.setattr(module, "SCRATCH_BYTES", 64)
        backend = trtllm_decodes([PLAIN], PagedKVCache([PLAIN], 2, 16, torch.float64), Parts())
        backend.plan(decodes([17], range(2), 16))
        [(_, kernel)] = backend.wrappers.made
    assert kernel == ("trtllm-gen" if architecture == 10 else "xqa")
