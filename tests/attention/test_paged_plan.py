"""Every composition of `PagedBackend` without a GPU: which kernel gets which arrays, and how states are merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.cascade import CascadeBackend, own_pages
from mini_engine.attention.flash_decoding import FlashDecodes
from mini_engine.attention.flashinfer import Decodes, FlashInferDecodes
from mini_engine.attention.levels import chunk_levels
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.attention.trtllm import TRTLLMDecodes
from mini_engine.batch import StepBatch, upload_levels
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.request import Context, PinnedPages, PlacedChunk
from mini_engine.rope import RopeConfig
from tests.attention import fake_flashinfer
from tests.attention.fake_flashinfer import Wrapper
from tests.attention.prefix_steps import Step, in_pages, prefixed, steps
from tests.attention.stepping import check_equal, error_of_narrow_keys, narrow

PLAIN = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=64, scale=0.1)
SPECS = (
    PLAIN,
    replace(PLAIN, layer=1, softcap=3.0),
    replace(PLAIN, layer=2, window=5),
    replace(PLAIN, layer=3, alibi_slopes=tuple(alibi_slopes(4).tolist())),
)
DECODES = {"flashinfer": FlashInferDecodes, "trtllm": TRTLLMDecodes, "own": FlashDecodes}
EVERY = pytest.mark.parametrize("decodes", DECODES.values(), ids=DECODES)
with_levels = partial(PagedBackend, levels=True)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch, has_fa3=False)
        patch.setattr("mini_engine.attention.flash_decoding.FlashDecoding", fake_flashinfer.Kernel)
        patch.setattr("mini_engine.attention.flashinfer.WORKSPACE_BYTES", 64)
        patch.setattr("mini_engine.attention.trtllm.SCRATCH_BYTES", 64)
        yield


def caches(step: Step, specs: tuple[AttentionSpec, ...] = SPECS, layout: str = "NHD") -> list[PagedKVCache]:
    """Ours and the reference's, with a page for padding."""
    return [
        PagedKVCache(own, step.num_pages + 1, step.page_size, torch.float64, layout=order)
        for own, order in ((specs, layout), (SPECS, "NHD"))
    ]


@EVERY
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=5)
@given(steps(), st.sampled_from([0.0, 3.0, 1e9]))
def test_equals_flat_attention(fake: None, decodes: type[Decodes], layout: str, step: Step, cost: float) -> None:
    """Up to the rounding of the float32 logarithms that FlashInfer returns."""
    batch = step.batch(*step.plan(in_pages(cost)))
    mine, theirs = caches(step, layout=layout)
    check_equal(batch, with_levels(SPECS, mine, Parts(), decodes=decodes), TorchBackend(SPECS, theirs, Parts()), 1e-6)


@EVERY
@settings(max_examples=5)
@given(steps(), st.sampled_from([0.0, 1e9]))
def test_the_scales_of_narrow_keys_apply_to_levels_too(
    fake: None, decodes: type[Decodes], step: Step, cost: float
) -> None:
    batch, specs = step.batch(*step.plan(in_pages(cost))), narrow(SPECS)
    mine, theirs = caches(step, specs)
    backend = with_levels(specs, mine, Parts(), decodes=decodes)
    assert error_of_narrow_keys(batch, backend, TorchBackend(SPECS, theirs, Parts())) < 1e-6


def padded(step: Step, padding: int) -> StepBatch:
    """The step as a CUDA graph replays it, with rows of padding."""
    batch = step.batch(*step.plan(in_pages(0.0)))
    return StepBatch.build(
        token_ids=[0] * (batch.num_sequences + padding), num_new=None,
        kv_lens=[*batch.kv_lens.tolist(), *[1] * padding],
        pages=[*batch.host_page_indices.tolist(), *[step.num_pages] * padding], page_size=step.page_size,
        levels=batch.levels, page_capacity=40 * (batch.num_sequences + padding),
    )  # fmt: skip


@EVERY
@settings(max_examples=8)
@given(steps(decodes_only=True), st.integers(0, 3))
def test_padding_behind_a_step_changes_nothing(fake: None, decodes: type[Decodes], step: Step, padding: int) -> None:
    """In a graph the levels have a fixed number of groups, and the padding rows are in no group with pages."""
    mine, theirs = caches(step)
    backend = with_levels(SPECS, mine, Parts(), decodes=decodes)
    check_equal(padded(step, padding), backend, TorchBackend(SPECS, theirs, Parts()), 1e-6)


@pytest.mark.parametrize("page_capacity", [None, 400])
@pytest.mark.parametrize(
    ("decodes", "flat", "merged"),
    [
        (FlashInferDecodes, ("decode", "decode"), ("decode on CUDA cores", "decode")),
        (TRTLLMDecodes, ("xqa", "xqa"), ("decode on CUDA cores", "xqa")),
        (FlashDecodes, ("flash decoding", "flash decoding"), ("flash decoding", "flash decoding")),
    ],
)
def test_each_layer_runs_on_the_first_kernel_that_supports_it(
    fake: None, decodes: type[Decodes], flat: tuple[str, str], merged: tuple[str, str], page_capacity: int | None
) -> None:
    """A plain layer and one with a window, which has no levels; XQA returns no LSE, so it computes no merged layer."""
    specs, step = (PLAIN, replace(PLAIN, layer=1, window=5)), prefixed(4, 3, 2)
    backend = with_levels(specs, PagedKVCache(specs, step.num_pages, 16, torch.float64), Parts(), decodes=decodes)
    batch = replace(step.batch(*step.plan(in_pages(0.0))), page_capacity=page_capacity)
    for levels, expected in ((batch.levels, merged), ((), flat), (batch.levels, merged)):
        backend.plan(replace(batch, levels=levels))
        name_of = {id(wrapper): name.split(",")[0] for (_, name), wrapper in backend.wrappers.made.items()}
        assert tuple(name_of[id(wrapper)] for [(_, wrapper)] in map(backend._planned.get, backend._kinds)) == expected


def test_a_step_without_levels_merges_nothing(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    step = prefixed(4, 3, 2)
    mine, theirs = caches(step)
    backend = with_levels(SPECS, mine, Parts())
    monkeypatch.setattr(backend.wrappers.flashinfer, "merge_state_in_place", None)
    check_equal(step.batch(list(range(4)), ()), backend, TorchBackend(SPECS, theirs, Parts()), 1e-6)
    assert not any("level" in name for _, name in backend.wrappers.made)


def test_what_a_graph_with_levels_has_recorded_reads_the_pages_of_each_step(fake: None) -> None:
    """Our kernel reads the pages that the levels leave at one address, whatever their number."""
    specs, longest, seen = (PLAIN,), prefixed(4, 3, 4), set()
    cache = PagedKVCache(specs, longest.num_pages + 1, 16, torch.float64)
    backend = with_levels(specs, cache, Parts(), decodes=FlashDecodes)
    for step in (prefixed(4, 5, 1), longest, prefixed(2, 3, 2)):
        batch = padded(step, 4 - len(step.pages))
        backend.plan(batch)
        [(_, decode)] = backend._planned[backend._kinds[0]]
        own = own_pages(batch)
        assert decode.work.pages.tolist() == own.host_page_indices.tolist()
        assert decode.work.requests[:, 0].tolist() == own.kv_lens.tolist()
        seen.add(tuple(x.data_ptr() for x in (decode.work.ranges, decode.work.requests, decode.work.pages)))
    assert len(seen) == 1


def test_levels_are_planned_again_only_when_they_change(fake: None) -> None:
    step = prefixed(4, 3, 2)
    backend = with_levels(SPECS, PagedKVCache(SPECS, step.num_pages, 16, torch.float64), Parts())
    assert backend.planner is not None
    batch = step.batch(*step.plan(in_pages(0.0)))
    Wrapper.plans = 0
    for levels in (batch.levels, batch.levels, (), batch.levels):
        backend.plan(replace(batch, levels=levels))
    assert Wrapper.plans == 2, "once for each kind of layer that has levels"
    backend.plan(replace(batch, levels=(replace(batch.levels[0]),)))
    assert Wrapper.plans == 4


def test_levels_that_return_after_others_are_planned_again(fake: None) -> None:
    """The chunks of a request, for example, have levels of their own between two steps with the same prefix."""
    step = prefixed(4, 3, 2)
    mine, theirs = caches(step)
    backend = with_levels(SPECS, mine, Parts())
    batch = step.batch(*step.plan(in_pages(0.0)))
    backend.plan(batch)
    [outer] = batch.levels
    inner = replace(outer, kv_page_indices=torch.arange(4, 7, dtype=torch.int32))
    backend.plan(replace(batch, levels=(inner, replace(outer, kv_page_indptr=outer.kv_page_indptr * 0))))
    check_equal(batch, backend, TorchBackend(SPECS, theirs, Parts()), 1e-6)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_chunks_at_any_offset_equal_the_reference(fake: None, layout: str) -> None:
    """Decodes and prompts over chunks, one of them without chunks, and the same requests with their chunks moved."""
    specs = tuple(replace(spec, window=None, alibi_slopes=None, rope=RopeConfig(100.0, 64)) for spec in SPECS[:2])
    both = [PagedKVCache(specs, 20, 4, torch.float64, layout=layout) for layout in (layout, "NHD")]
    mine, theirs = with_levels(specs, both[0], Parts()), CascadeBackend(specs, both[1], Parts())
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
    assert with_levels(specs, PagedKVCache(specs, 1, 16, torch.float64), Parts()).planner is None
