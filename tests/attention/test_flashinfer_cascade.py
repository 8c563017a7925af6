"""The cascade backend for a GPU without a GPU: the arrays that it passes to FlashInfer, and how states are merged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.cascade import CascadeBackend
from mini_engine.attention.flashinfer_cascade import FlashInferCascadeBackend
from mini_engine.attention.levels import chunk_levels
from mini_engine.attention.naive import alibi_slopes, attention_mask
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import AttentionState, attention_state, merge_states
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch, upload_levels
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.request import Context, PinnedPages, PlacedChunk
from mini_engine.rope import RopeConfig
from tests.attention import fake_flashinfer
from tests.attention.prefix_steps import Step, in_pages, prefixed, steps
from tests.attention.stepping import check_equal

PLAIN = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=0.4)
SPECS = (
    PLAIN,
    replace(PLAIN, layer=1, softcap=3.0),
    replace(PLAIN, layer=2, window=5),
    replace(PLAIN, layer=3, alibi_slopes=tuple(alibi_slopes(4).tolist())),
)


class Level(fake_flashinfer.Wrapper):
    """A prefill without a mask, as the backend plans one for each level; groups may have no pages."""

    plans: int = 0

    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, qo: int, kv: int, dim: int,
        page_size: int, *, causal: bool, **how: Any,
    ) -> None:  # fmt: skip
        Level.plans += not causal
        self.arrays = (qo_indptr.clone(), indptr.clone(), indices.clone(), last_page_len.clone())
        self.page_size, self.how = page_size, {**how, "causal": causal}

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, k_scale: float = 1.0, v_scale: float = 1.0,
        lse: Tensor | None = None, return_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        if self.how["causal"] and not return_lse:
            return super().run(q, pages, out)
        qo_indptr, kv_indptr, indices, last_page_len = self.arrays
        assert lse is not None and lse.shape == q.shape[:2] and len(q) == qo_indptr[-1]
        assert self.how["window_left"] == -1 and self.how["pos_encoding_mode"] == "NONE"
        for g, last in enumerate(last_page_len.tolist()):
            tokens, entries = slice(*qo_indptr[g : g + 2].tolist()), slice(*kv_indptr[g : g + 2].tolist())
            k, v = (x[indices[entries].long()] for x in pages)
            k, v = (x if self.layout == "NHD" else x.transpose(1, 2) for x in (k, v))
            kv_len = max(len(k) - 1, 0) * self.page_size + last
            mask = None
            if self.how["causal"]:
                keys = torch.arange(kv_len)
                mask = attention_mask(keys[kv_len - (tokens.stop - tokens.start) :], keys)
            state = attention_state(
                q[tokens], *(x.flatten(0, 1)[:kv_len] for x in (k, v)), scale=self.how["sm_scale"], mask=mask,
                softcap=self.how["logits_soft_cap"],
            )  # fmt: skip
            out[tokens], lse[tokens] = state.out.to(out.dtype), (state.lse / math.log(2)).to(lse.dtype)
        return out


class Decode(Level):
    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **how: Any) -> None:  # type: ignore[override]
        assert last_page_len.min() >= 1, "every request has pages of its own"
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        super().plan(one_each, indptr, indices, last_page_len, *sizes, causal=True, **how)


def merge_state_in_place(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    natural = math.log(2)
    merged = merge_states(AttentionState(out, lse * natural), AttentionState(other, other_lse * natural))
    out.copy_(merged.out)
    lse.copy_(merged.lse / natural)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        module = fake_flashinfer.install(patch, has_fa3=False)
        module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
        module.BatchPrefillWithPagedKVCacheWrapper = Level  # type: ignore[attr-defined]
        module.merge_state_in_place = merge_state_in_place  # type: ignore[attr-defined]
        yield


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=10)
@given(steps(), st.sampled_from([0.0, 3.0, 1e9]))
def test_equals_flat_attention(fake: None, layout: str, step: Step, cost: float) -> None:
    """Up to the rounding of the float32 logarithms that FlashInfer returns."""
    batch = step.batch(*step.plan(in_pages(cost)))
    mine = PagedKVCache(SPECS, step.num_pages, step.page_size, torch.float64, layout=layout)
    theirs = PagedKVCache(SPECS, step.num_pages, step.page_size, torch.float64)
    check_equal(batch, FlashInferCascadeBackend(SPECS, mine, Parts()), TorchBackend(SPECS, theirs, Parts()), 1e-6)


@settings(max_examples=20)
@given(steps(decodes_only=True), st.integers(0, 3))
def test_padding_behind_a_step_changes_nothing(fake: None, step: Step, padding: int) -> None:
    """In a graph the levels have a fixed number of groups, and the padding rows are in no group with pages."""
    batch = step.batch(*step.plan(in_pages(0.0)))
    size, page_size = batch.num_sequences + padding, step.page_size
    padded = StepBatch.build(
        token_ids=[0] * size, num_new=None, kv_lens=[*batch.kv_lens.tolist(), *[1] * padding], page_size=page_size,
        pages=[*batch.host_page_indices.tolist(), *[step.num_pages] * padding], levels=batch.levels,
        page_capacity=len(batch.host_page_indices) + padding,
    )  # fmt: skip
    mine, theirs = (PagedKVCache(SPECS, step.num_pages + 1, page_size, torch.float64) for _ in range(2))
    check_equal(padded, FlashInferCascadeBackend(SPECS, mine, Parts()), TorchBackend(SPECS, theirs, Parts()), 1e-6)


def test_levels_are_planned_again_only_when_they_change(fake: None) -> None:
    step = prefixed(4, 3, 2)
    backend = FlashInferCascadeBackend(SPECS, PagedKVCache(SPECS, step.num_pages, 16, torch.float64), Parts())
    assert backend.planner is not None
    batch = step.batch(*step.plan(in_pages(0.0)))
    Level.plans = 0
    for levels in (batch.levels, batch.levels, (), batch.levels):
        backend.plan(replace(batch, levels=levels))
    assert Level.plans == 2, "once for each kind of layer that has levels"
    backend.plan(replace(batch, levels=(replace(batch.levels[0]),)))
    assert Level.plans == 4


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_chunks_at_any_offset_equal_the_reference(fake: None, layout: str) -> None:
    """Decodes and prompts over chunks, one of them without chunks, and the same requests with their chunks moved."""
    specs = tuple(replace(spec, window=None, alibi_slopes=None, rope=RopeConfig(100.0, 8)) for spec in SPECS[:2])
    caches = [PagedKVCache(specs, 20, 4, torch.float64, layout=layout) for layout in (layout, "NHD")]
    mine, theirs = FlashInferCascadeBackend(specs, caches[0], Parts()), CascadeBackend(specs, caches[1], Parts())
    pinned = [PinnedPages(np.array(pages, dtype=np.int32)) for pages in ([7, 2], [9], [4, 5, 11])]
    lens, num_new = (6, 4, 9), np.array([1, 1, 1, 5])
    for moved in (0, 3):
        contexts: list[Context] = [
            tuple(PlacedChunk(pinned[i], [0] * lens[i], moved - 2 * place) for place, i in enumerate(order))
            for order in ((0, 1), (2, 1, 0), (), (1,))
        ]
        order, found = chunk_levels(contexts, num_new, 4)
        levels = upload_levels(found, torch.device("cpu"))
        assert len(levels) == 3
        batch = StepBatch.build(
            token_ids=[0] * 8, num_new=num_new[order], kv_lens=[3, 2, 1, 7], pages=[12, 0, 1, 3, 6], page_size=4,
            page_positions=[19, 10, 0, 4, 8], levels=levels,
        )  # fmt: skip
        check_equal(batch, mine, theirs, 1e-6)


@pytest.mark.parametrize("spec", SPECS[2:])
def test_layers_with_a_window_or_alibi_alone_have_no_planner(fake: None, spec: AttentionSpec) -> None:
    specs = (replace(spec, layer=0),)
    assert FlashInferCascadeBackend(specs, PagedKVCache(specs, 1, 16, torch.float64), Parts()).planner is None
