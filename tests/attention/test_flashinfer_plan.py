"""The flashinfer backend without a GPU: the arrays that it passes to FlashInfer, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import flashinfer as module
from mini_engine.attention.backend import BACKENDS, PlannedCache
from mini_engine.attention.flashinfer import LayerKind
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention import fake_flashinfer
from tests.attention.stepping import check_equal, full_cache, random_step, run_in_steps

PLAIN = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
SPECS = (
    PLAIN,
    replace(PLAIN, layer=1, window=5, softcap=4.0),
    replace(PLAIN, layer=2, num_kv_heads=6, alibi_slopes=tuple(alibi_slopes(6).tolist())),
)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    """Naive attention stands in for FlashInfer, and prompts of three new tokens count as long."""
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        patch.setattr(module, "FA3_MIN_TOKENS", 3)
        yield


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=12)
@given(st.data())
def test_equals_naive_attention_however_it_is_cut(fake: None, layout: str, data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 30), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 4) for cut, n in zip(cuts, lens, strict=True)]  # at most five steps
    page_size = data.draw(st.sampled_from([1, 3, 16]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens) + 2)))
    cache = full_cache(SPECS, len(page_order), page_size, torch.float64, layout=layout)
    backend = PagedBackend(SPECS, cache, Parts())
    for _, got, want in run_in_steps(backend, SPECS, lens, cuts, page_order, page_size, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@settings(max_examples=25)
@given(st.data())
def test_pages_may_be_evicted_in_front(fake: None, data: st.DataObject) -> None:
    batch, num_pages = random_step(data, 4, gaps=False, longest=40)
    caches = [PagedKVCache(SPECS, num_pages, 4, torch.float64) for _ in range(2)]
    check_equal(batch, PagedBackend(SPECS, caches[0], Parts()), TorchBackend(SPECS, caches[1], Parts()), 1e-12)


def test_a_gap_between_pages_is_refused_where_it_matters(fake: None) -> None:
    batch = StepBatch.build(token_ids=[0], num_new=[1], kv_lens=[8], pages=[2, 0], page_size=4, page_positions=[0, 12])
    caches = [PagedKVCache([PLAIN], 3, 4, torch.float64) for _ in range(2)]
    check_equal(batch, PagedBackend([PLAIN], caches[0], Parts()), TorchBackend([PLAIN], caches[1], Parts()), 1e-12)
    for spec in (replace(PLAIN, window=5), replace(PLAIN, num_kv_heads=6, alibi_slopes=SPECS[2].alibi_slopes)):
        backend = PagedBackend([spec], PagedKVCache([spec], 3, 4, torch.float64), Parts())
        with pytest.raises(ConfigError, match="count keys"):
            backend.plan(batch)


@pytest.mark.parametrize(
    ("new", "has_fa3", "algorithms"),
    [
        ([1, 1], True, {"decode"}),
        ([1, 2, 2], True, {"decode", "fa2"}),
        ([2, 4], True, {"fa2", "fa3"}),  # no fa3 for ALiBi
        ([1, 2, 4], True, {"decode", "fa2", "fa3"}),
        ([2, 4], False, {"fa2"}),
    ],
)
def test_long_prompts_take_flashattention_3(fake: None, new: list[int], has_fa3: bool, algorithms: set[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch, has_fa3)
        backend = PagedBackend(SPECS, PagedKVCache(SPECS, 9, 4, torch.float64), Parts())
    step = {"token_ids": [0] * sum(new), "num_new": new, "kv_lens": new, "pages": range(len(new)), "page_size": 4}
    backend.plan(StepBatch.build(**step))
    assert {algorithm for _, algorithm in backend.wrappers.made} == algorithms
    assert len({kind for kind, _ in backend.wrappers.made}) == 3


def test_layers_of_one_kind_share_a_plan() -> None:
    assert LayerKind.of(PLAIN) == LayerKind.of(replace(PLAIN, layer=7))
    assert len({LayerKind.of(spec) for spec in SPECS}) == 3


@pytest.mark.parametrize(
    "change", [{"alibi_slopes": (0.5,) * 6}, {"alibi_slopes": SPECS[2].alibi_slopes, "softcap": 3.0}]
)
def test_other_slopes_than_those_of_the_kernels_are_refused(change: dict[str, Any]) -> None:
    spec = replace(PLAIN, num_kv_heads=6, head_dim=64)
    cache = PlannedCache(16, "NHD", torch.bfloat16, torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mini_engine.attention.backend.find_spec", lambda name: object())
        assert BACKENDS["flashinfer"].refusal([replace(spec, alibi_slopes=SPECS[2].alibi_slopes)], cache) is None
        reason, _ = BACKENDS["flashinfer"].refusal([replace(spec, **change)], cache) or ("", None)
    assert "ALiBi" in reason
