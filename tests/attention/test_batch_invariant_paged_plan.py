"""`batch_invariant` on a GPU, without a GPU: which kernel computes which token, and what requests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mini_engine.attention import flash_decoding as module
from mini_engine.attention import flashinfer as flashinfer_module
from mini_engine.attention.backend import BACKENDS
from mini_engine.attention.batch_invariant_paged import BatchInvariantPagedBackend, SplitDecodes
from mini_engine.attention.paged import PagedBackend
from mini_engine.batch import StepBatch
from mini_engine.sampling_params import SamplingParams
from tests.attention import fake_flashinfer
from tests.helpers import alone, double_model, let_all_guesses_pay, make_engine, serve

NUM_PROMPT = 17
PARAMS = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    """Naive attention stands in for FlashInfer and Python for the kernel, and a cache on a CPU is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        patch.setattr(module, "FlashDecoding", fake_flashinfer.Kernel)
        patch.setattr(flashinfer_module, "WORKSPACE_BYTES", 64)
        patch.setattr(SplitDecodes, "split", 1)
        patch.setattr(SplitDecodes, "computes", lambda spec, cache: True)  # of small heads, too
        info = BACKENDS["batch_invariant"].on_cuda
        assert info is not None
        on_cpu = replace(
            info, devices=("cpu",), dtypes=(torch.float64,), package=None, sizes=lambda spec, cache: None,
            architectures=None,
        )  # fmt: skip
        patch.setitem(BACKENDS, "invariant_on_cpu", on_cpu)
        yield


def watched(monkeypatch: pytest.MonkeyPatch) -> list[StepBatch]:
    """Collect the steps that the backend plans; those of a graph's capture, too."""
    seen: list[StepBatch] = []
    plan = PagedBackend.plan

    def spy(self: PagedBackend, batch: StepBatch) -> None:
        kept = {name: getattr(batch, name).clone() for name in ("token_ids", "positions", "kv_lens", "qo_indptr")}
        seen.append(replace(batch, **kept))
        plan(self, batch)

    monkeypatch.setattr(PagedBackend, "plan", spy)
    return seen


def engine_of(**options: Any) -> Any:
    return make_engine(
        double_model("llama"), attn_backend="invariant_on_cpu", page_size=16, max_model_len=64, **options
    )


@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 16)], ids=["eager", "graphs"])
@pytest.mark.parametrize("guesses", [False, True])
def test_prompts_and_outputs_have_their_own_kernels(
    fake: None, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], guesses: bool
) -> None:
    """Also in a preempted request, in chunks of a prompt with one token, and in guesses."""
    seen = watched(monkeypatch)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1} if guesses else None
    engine = engine_of(
        num_pages=5, max_batch_size=4, max_num_batched_tokens=13, enable_prefix_caching=True,
        cuda_graph_batch_sizes=sizes, speculative_config=config,
    )  # fmt: skip
    let_all_guesses_pay(engine)
    params = replace(PARAMS, max_tokens=30)
    prompts = {f"{n}": [3 + (i * (n + 1)) % 7 for i in range(NUM_PROMPT)] for n in range(5)}
    outputs = serve(engine, {0: [(name, prompt, params) for name, prompt in prompts.items()]})
    model = double_model("llama")
    assert outputs == {name: alone(model, prompt, params) for name, prompt in prompts.items()}
    assert engine.metrics.preemptions > 0 and bool(engine.metrics.num_accepted_tokens) == guesses
    num_recomputed = 0
    for batch in seen:
        first, last = batch.positions[batch.qo_indptr[:-1]], batch.positions[batch.qo_indptr[1:] - 1]
        is_padding = (batch.kv_lens == 1) & (batch.page_capacity is not None)
        assert bool(((first == last) & (first >= NUM_PROMPT) | is_padding)[: batch.num_decodes].all())
        assert bool((last < NUM_PROMPT)[batch.num_decodes :].all())
        num_recomputed += max(batch.num_decodes - 4, 0)
    assert num_recomputed


def test_only_prompts_are_shared(fake: None) -> None:
    """The pages of an output were computed by another kernel than those of a prompt with the same tokens."""
    engine = engine_of(num_pages=20, max_batch_size=2, enable_prefix_caching=True)
    first = [3 + i % 50 for i in range(20)]
    output = serve(engine, {0: [("first", first, replace(PARAMS, max_tokens=30))]}, empty_cache=False)["first"]
    before = engine.metrics.shared_tokens
    serve(engine, {0: [("second", first + output[:25], PARAMS)]}, empty_cache=False)
    assert engine.metrics.shared_tokens - before == 16  # not the 32 tokens in full pages


def test_prompts_take_flashattention_3_however_short_they_are(fake: None) -> None:
    engine = engine_of(num_pages=20, max_batch_size=2)
    serve(engine, {0: [("a", [5, 6, 7], PARAMS)]})
    backend = engine.backend
    assert isinstance(backend, BatchInvariantPagedBackend)
    assert {name for _, name in backend.wrappers.made} == {"fa3", "flash decoding"}
