"""Attention that a graph has recorded computes every later step of as many tokens or fewer: here without a GPU.

The tests call what was planned first again and again, as a graph replays it, so only memory may change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import flash_decoding, flashinfer
from mini_engine.attention.backend import BACKENDS
from mini_engine.attention.batch_invariant_paged import FA3Prompts, SplitDecodes
from mini_engine.attention.captured import MOST_PROMPTS
from mini_engine.attention.flash_decoding import FlashDecodes
from mini_engine.attention.flashinfer import Decodes, FlashInferDecodes
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.step_graphs import StepGraphs
from tests.attention import fake_flashinfer
from tests.attention.prefix_steps import in_pages, prefixed
from tests.attention.stepping import random_step
from tests.helpers import GREEDY, double_model, make_engine, serve

PLAIN = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
SPECS = (PLAIN, replace(PLAIN, layer=1, window=21, softcap=2.0), replace(PLAIN, layer=2, scale=0.2))


class Invariant(PagedBackend):
    prompts = FA3Prompts


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        patch.setattr(flash_decoding, "FlashDecoding", fake_flashinfer.Kernel)
        patch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
        yield


def addresses(backend: PagedBackend) -> set[int]:
    """Where the kernels of all layers read what to do."""
    found = set()
    for kind in backend._kinds:
        [(_, decode), (_, prefill)] = backend._planned[kind]
        work = decode.work
        found |= {x.data_ptr() for x in (work.ranges, work.requests, work.pages, *prefill.arrays)}
    return found


@pytest.mark.parametrize(
    ("backend_class", "decodes"), [(PagedBackend, FlashDecodes), (Invariant, SplitDecodes)], ids=["auto", "split"]
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_a_recorded_step_computes_other_steps(
    fake: None, layout: str, backend_class: type[PagedBackend], decodes: type[Decodes], data: st.DataObject
) -> None:
    size, seen = 640, set[frozenset[int]]()
    steps = [random_step(data, 16, gaps=False) for _ in range(3)]
    most = max(pages for _, pages in steps)
    mine, theirs = (PagedKVCache(SPECS, most, 16, torch.float64, layout=own) for own in (layout, "NHD"))
    backend, reference = backend_class(SPECS, mine, Parts(), decodes=decodes), TorchBackend(SPECS, theirs, Parts())
    assert backend.captures_steps
    recorded = None
    for batch, _ in steps:
        assert backend.can_capture(batch, size)
        slots = torch.cat([batch.slot_mapping, torch.zeros(size - batch.num_tokens, dtype=torch.int64)])
        backend.plan_captured(batch, slots)
        assert backend.slot_mapping is slots
        recorded = recorded or backend._planned
        backend._planned = recorded
        reference.plan(batch)
        seen.add(frozenset(addresses(backend)))
        for spec in SPECS:
            q = torch.randn(size, 4, 64, dtype=torch.float64)
            for own, other in zip(mine.layers[spec.layer], theirs.layers[spec.layer], strict=True):
                other.normal_()
                own.copy_(other if layout == "NHD" else other.transpose(1, 2))
            got, want = torch.full_like(q, 7.0), reference.run(spec.layer, q[: batch.num_tokens])
            backend.run_into(spec.layer, q, got)
            torch.testing.assert_close(got[: batch.num_tokens], want, atol=1e-9, rtol=0)
            assert (got[batch.num_tokens :] == 7.0).all(), "the padding has no keys"
    assert len(seen) == 1


def test_what_a_graph_cannot_compute(fake: None) -> None:
    def backend_of(*specs: AttentionSpec, decodes: type[Decodes] = FlashDecodes, **options: Any) -> PagedBackend:
        return PagedBackend(specs, PagedKVCache(specs, 50, 16, torch.float64), Parts(), decodes=decodes, **options)

    slopes = replace(PLAIN, alibi_slopes=(0.25, 0.0625, 0.015625, 0.00390625))
    assert backend_of(PLAIN).captures_steps
    assert not backend_of(slopes).captures_steps
    assert not backend_of(replace(PLAIN, has_sinks=True)).captures_steps
    assert not backend_of(replace(PLAIN, kv_dtype=torch.float8_e4m3fn)).captures_steps
    assert not backend_of(PLAIN, decodes=FlashInferDecodes).captures_steps

    def step(prompts: int, pages: int) -> StepBatch:
        return StepBatch.build(
            token_ids=[0] * (2 * prompts), num_new=[2] * prompts, page_size=16, pages=np.arange(pages) % 50,
            kv_lens=[2] * (prompts - 1) + [16 * (pages - prompts + 1)],
        )  # fmt: skip

    backend = backend_of(PLAIN, levels=True)
    assert backend.can_capture(step(MOST_PROMPTS, 50), 2048)
    assert not backend.can_capture(step(MOST_PROMPTS + 1, 50), 2048), "more prompts than a plan has room for"
    assert not backend.can_capture(step(2, 51), 2048), "more pages than the cache has, because some are shared"
    assert not backend.can_capture(step(2, 50), 2049)
    shared = prefixed(4, 3, 2)
    with_levels = shared.batch(*shared.plan(in_pages(0.0)))
    assert with_levels.levels and not backend.can_capture(with_levels, 64)
    assert backend_of(PLAIN).can_capture(with_levels, 64), "a backend without levels"


class Recorder(StepGraphs):
    steps: ClassVar[list[tuple[int, int]]] = []

    def run(self, size: int, token_ids: torch.Tensor, *arrays: torch.Tensor) -> torch.Tensor:
        self.steps.append((len(token_ids), size))
        return super().run(size, token_ids, *arrays)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("speculation", [None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["", "ngram"])
def test_engines_give_every_request_the_same_tokens(
    fake: None, family: str, speculation: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of many lengths, whole and in chunks, beside decodes, in pages that requests share."""
    monkeypatch.setattr("mini_engine.engine.piece_sizes", lambda config, device: (3, 8, 20))
    monkeypatch.setattr("mini_engine.executor.StepGraphs", Recorder)
    monkeypatch.setattr(FlashDecodes, "computes", lambda spec, cache: True)  # of small heads, too
    on_cpu: dict[str, Any] = {"devices": ("cpu",), "dtypes": (torch.float64,), "package": None, "page_size": 16}
    own = replace(BACKENDS["flash_decoding"], **on_cpu, sizes=lambda spec, cache: None)
    monkeypatch.setitem(BACKENDS, "flash_decoding", own)
    Recorder.steps.clear()
    options: dict[str, Any] = {
        "page_size": 16, "max_num_batched_tokens": 24, "max_batch_size": 4, "enable_prefix_caching": True,
        "speculative_config": speculation,
    }  # fmt: skip
    model = double_model(family)
    prompts = [[(7 * i + j * j) % 61 for j in range(n)] for i, n in enumerate((3, 19, 1, 30, 8, 40, 2))]
    prompts.append([*prompts[5][:24], 9])
    arrivals = {3 * i: [(str(i), prompt, GREEDY)] for i, prompt in enumerate(prompts)}
    captured = serve(make_engine(model, attn_backend="flash_decoding", **options), arrivals)
    assert {size for _, size in Recorder.steps} >= {3, 20} and any(own < size for own, size in Recorder.steps)
    assert captured == serve(make_engine(model, attn_backend="torch", **options), arrivals)
