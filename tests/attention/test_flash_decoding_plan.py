"""The flash_decoding backend without a GPU: Python takes the place of the kernel, and reads the same arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import flash_decoding as module
from mini_engine.attention import flashinfer as flashinfer_module
from mini_engine.attention.backend import BACKENDS, create_backend
from mini_engine.attention.flash_decoding import FlashDecodes, PlannedDecode
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBuffers, step_memory
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from tests.attention import fake_flashinfer
from tests.attention.stepping import (
    check_equal,
    decodes,
    error_of_narrow_keys,
    full_cache,
    narrow,
    random_step,
    run_in_steps,
)
from tests.helpers import alone, double_model, make_engine, serve

PLAIN = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
SLOPES = tuple(alibi_slopes(4).tolist())
SPECS = (
    PLAIN,
    replace(PLAIN, layer=1, alibi_slopes=SLOPES),
    replace(PLAIN, layer=2, scale=0.2),
    replace(PLAIN, layer=3, window=21, softcap=2.0),
)


own_decodes = partial(PagedBackend, decodes=FlashDecodes)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    """Naive attention stands in for FlashInfer and Python for the kernel, and a cache on a CPU is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        patch.setattr(module, "FlashDecoding", fake_flashinfer.Kernel)
        patch.setattr(flashinfer_module, "WORKSPACE_BYTES", 64)
        on_cpu = replace(
            BACKENDS["flash_decoding"], devices=("cpu",), dtypes=(torch.float64,), package=None,
            sizes=lambda spec, cache: None,
        )  # fmt: skip
        patch.setitem(BACKENDS, "flash_decoding", on_cpu)
        yield


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=12)
@given(st.data())
def test_equals_naive_attention_however_it_is_cut(fake: None, layout: str, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 30), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 4) for cut, n in zip(cuts, lens, strict=True)]  # at most five steps
    page_size = data.draw(st.sampled_from([16, 32]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens))))
    cache = full_cache(SPECS, len(page_order), page_size, torch.float64, layout=layout)
    backend = create_backend("flash_decoding", SPECS, cache, Parts())
    for _, got, want in run_in_steps(backend, SPECS, lens, cuts, page_order, page_size, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@settings(max_examples=8)
@given(st.data())
def test_pages_may_be_evicted_in_front(fake: None, data: st.DataObject) -> None:
    batch, num_pages = random_step(data, 16, gaps=False, longest=200)
    caches = [PagedKVCache(SPECS, num_pages, 16, torch.float64) for _ in range(2)]
    backend = create_backend("flash_decoding", SPECS, caches[0], Parts())
    check_equal(batch, backend, TorchBackend(SPECS, caches[1], Parts()), 1e-12)


def test_what_a_graph_has_recorded_reads_the_work_of_each_step(fake: None) -> None:
    """It is at the same addresses, whatever the lengths. Layers with the same KV heads and the same window share it."""
    backend = own_decodes(SPECS, PagedKVCache(SPECS, 12, 16, torch.float64), Parts())
    seen, steps = set(), StepBuffers("cpu", step_memory(2, 10, "cpu"))
    for kv_lens, pages in (([1, 1], [11, 11]), ([33, 16], [3, 0, 7, 1]), ([20, 70], [0, 1, 5, 4, 3, 2, 6])):
        backend.plan(decodes(kv_lens, pages, 16, page_capacity=10, into=steps))
        [[(_, first)], [(_, slopes)], [(_, third)], [(_, window)]] = backend._planned.values()
        assert isinstance(first, PlannedDecode) and not isinstance(slopes, PlannedDecode)
        assert first.work is third.work and first.kernel is third.kernel
        works = first.work, window.work
        seen.add(tuple(x.data_ptr() for work in works for x in (work.ranges, work.requests, work.pages)))
        assert first.work.requests[:, 0].tolist() == kv_lens
        assert first.work.pages.tolist() == pages
        assert first.work.ranges[:, 2].sum() == sum(-(-n // 16) for n in kv_lens)
        assert window.work.ranges[:, 2].sum() == sum(-(-n // 16) - max(n - 21, 0) // 16 for n in kv_lens)
    assert len(seen) == 1


def test_an_engine_gives_every_request_the_tokens_that_it_gets_alone(
    fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs: on a CPU they call the function again, over the same padding and the same arrays."""
    monkeypatch.setattr(FlashDecodes, "computes", lambda spec, cache: True)  # of small heads, too
    model = double_model("llama")
    engine = make_engine(
        model, attn_backend="flash_decoding", num_pages=9, page_size=16, max_batch_size=5, max_model_len=48,
        cuda_graph_batch_sizes=(1, 3, 6), enable_prefix_caching=True, max_num_batched_tokens=16,
    )  # fmt: skip
    prompts = {f"{n}": [3 + (5 * n + i) % 50 for i in range(1 + 4 * n)] for n in range(6)}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    arrivals: dict[int, list] = {int(name) // 2: [] for name in prompts}
    for name, prompt in prompts.items():
        arrivals[int(name) // 2].append((name, prompt, params))
    outputs = serve(engine, arrivals)
    assert outputs == {name: alone(model, prompt, params) for name, prompt in prompts.items()}


@pytest.mark.parametrize(
    "other",
    [
        {"alibi_slopes": SLOPES}, {"head_dim": 32}, {"num_qo_heads": 18}, {"kv_dtype": torch.float32},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_flashinfer_decodes_the_layers_that_the_kernel_does_not_compute(fake: None, other: dict) -> None:
    specs = (PLAIN, replace(PLAIN, layer=1, **other))
    mine, theirs = (PagedKVCache(specs, 7, 16, torch.float64) for _ in range(2))
    backend = own_decodes(specs, mine, Parts())
    check_equal(decodes([50, 40], range(7), 16), backend, TorchBackend(specs, theirs, Parts()), 1e-6)
    [[(_, first)], [(_, second)]] = backend._planned.values()
    assert isinstance(first, PlannedDecode) and not isinstance(second, PlannedDecode)


@settings(max_examples=12)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=4), st.integers(1, 95), st.none() | st.just(2.0))
def test_the_kernel_computes_windows_soft_caps_and_heads_of_256(
    fake: None, kv_lens: list[int], window: int, softcap: float | None
) -> None:
    specs = (replace(PLAIN, window=window, softcap=softcap), replace(PLAIN, layer=1, softcap=softcap, head_dim=256))
    mine, theirs = (PagedKVCache(specs, 24, 16, torch.float64) for _ in range(2))
    backend = own_decodes(specs, mine, Parts())
    check_equal(decodes(kv_lens, range(24), 16), backend, TorchBackend(specs, theirs, Parts()), 1e-12)
    assert all(isinstance(decode, PlannedDecode) for [(_, decode)] in backend._planned.values())


def test_the_kernel_computes_layers_with_keys_in_e4m3(fake: None) -> None:
    specs = narrow((PLAIN, replace(PLAIN, layer=1, num_qo_heads=4)))
    wide = tuple(replace(spec, kv_dtype=None, kv_scales=None) for spec in specs)
    mine, theirs = (PagedKVCache(own, 7, 16, torch.float64) for own in (specs, wide))
    backend = own_decodes(specs, mine, Parts())
    batch = decodes([50, 40], range(7), 16)
    assert error_of_narrow_keys(batch, backend, TorchBackend(wide, theirs, Parts())) < 1e-12
    assert all(isinstance(decode, PlannedDecode) for [(_, decode)] in backend._planned.values())
