"""Levels of shared pages: found in any prefix tree, worth their cost, and invisible in the results."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.backend import create_backend
from mini_engine.attention.cascade import CascadeBackend, level_planner, own_pages, shared_pages
from mini_engine.attention.levels import (
    H200_COSTS,
    CascadeCosts,
    Level,
    LevelCosts,
    LevelPlanner,
    common_prefixes,
    prefix_order,
)
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import PrefixLevel, StepBatch
from mini_engine.decode_graphs import DecodeGraph, DecodeGraphs
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts, default_parts
from tests.attention.greedy import TINY, check_near_greedy
from tests.attention.prefix_steps import Step, in_pages, prefixed, steps
from tests.attention.stepping import error_of_narrow_keys, full_cache, narrow
from tests.helpers import GREEDY, Arrival, alone, double_model, make_engine, requests, serve
from tests.models.families import our_model, transformers_model

PLAIN = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=0.4)
CAPPED = replace(PLAIN, layer=1, softcap=3.0)
ALIBI = replace(PLAIN, layer=2, alibi_slopes=(0.5, 0.25, 0.1, 0.05))
WINDOW = replace(PLAIN, layer=3, window=5)
SPECS = (PLAIN, CAPPED, ALIBI, WINDOW)
# Either levels cost nothing, so every shared page is in a level, or they cost so much that none pays off.
FREE = CascadeCosts(level_seconds=0.0, bandwidth=np.inf, flops=np.inf)
NEVER = CascadeCosts(level_seconds=1.0)
CPU = torch.device("cpu")


def costs_of(costs: CascadeCosts, page_size: int) -> LevelCosts:
    return LevelCosts.of(costs, PLAIN, page_size, torch.float64)


def groups(level: PrefixLevel) -> list[tuple[range, list[int]]]:
    """The tokens and the pages of each group."""
    token, page = level.qo_indptr.tolist(), level.kv_page_indptr.tolist()
    pages = level.kv_page_indices.tolist()
    return [(range(*token[g : g + 2]), pages[page[g] : page[g + 1]]) for g in range(len(token) - 1)]


@given(steps(), st.sampled_from([0.0, 1.0, 3.0, 8.0, 1e9]))
def test_levels_hold_each_requests_pages_once_and_in_order(step: Step, cost: float) -> None:
    order, levels = step.plan(in_pages(cost))
    new = [step.num_new[b] for b in order]
    assert sorted(order) == list(range(len(step.pages))) and sorted(new, key=lambda n: n > 1) == new
    if not levels:
        assert order == sorted(order)
    batch = step.batch(order, levels)
    first_token = batch.qo_indptr.tolist()
    held: list[list[int]] = [[] for _ in order]
    outside = [range(batch.num_tokens)]
    for level in levels:
        found = groups(level)
        assert found[0][0].start == 0 and found[-1][0].stop == batch.num_tokens
        assert all(a.stop == b.start and len(a) for (a, _), (b, _) in pairwise(found))
        for (tokens, pages), last_page_len in zip(found, level.kv_last_page_len.tolist(), strict=True):
            assert tokens.start in first_token and last_page_len == (step.page_size if pages else 0)
            members = [b for b in range(len(order)) if first_token[b] in tokens]
            for b in members:
                held[b] += pages
            if pages:
                assert len(members) > 1
                assert any(tokens.start in outer and tokens[-1] in outer for outer in outside), "groups nest"
        outside = [tokens for tokens, pages in found if pages]
        assert outside, "a level without pages"
        per_request = [next(len(pages) for tokens, pages in found if t in tokens) for t in first_token[:-1]]
        assert shared_pages(level, batch.qo_indptr.numpy()[:-1]).tolist() == per_request
    own = own_pages(batch) if levels else batch
    indptr, own_indices = own.kv_page_indptr.tolist(), own.kv_page_indices.tolist()
    for b, request in enumerate(order):
        assert len(held[b]) <= step.limits[request], "keys behind a query of a sharer"
        assert held[b] + own_indices[indptr[b] : indptr[b + 1]] == step.pages[request]
    assert torch.equal(own.kv_lens, batch.kv_lens - torch.tensor([len(h) * step.page_size for h in held]))
    assert own.host_page_indices.tolist() == own_indices


@given(steps(decodes_only=True))
def test_without_a_cost_every_shared_page_is_read_once(step: Step) -> None:
    _, levels = step.plan(in_pages(0.0))
    prefixes = {tuple(pages[: i + 1]) for pages, n in zip(step.pages, step.limits, strict=True) for i in range(n)}
    found = [group for level in levels for group in groups(level)]
    not_shared = sum(step.limits) - sum(len(tokens) * len(pages) for tokens, pages in found)
    assert sum(len(pages) for _, pages in found) + not_shared == len(prefixes)


@given(steps(decodes_only=True), st.floats(0.5, 12))
def test_every_level_pays_and_together_they_beat_flat(step: Step, cost: float) -> None:
    _, levels = step.plan(in_pages(cost))
    # The pages of each request in a level and the levels outside it; the tokens at which groups with pages begin.
    depth = [np.zeros(len(step.pages), dtype=int)]
    begins: list[list[int]] = []
    for level in levels:
        depth.append(depth[-1] + shared_pages(level, np.arange(len(step.pages), dtype=np.int32)))
        begins.append([tokens.start for tokens, pages in groups(level) if pages])

    def cost_of(kept: list[int]) -> float:
        """Pages read, plus the levels' cost. The groups inside a dropped level read its pages."""
        reads, done = 0, depth[0]
        for i in kept:
            reads += sum(int(depth[i + 1][b] - done[b]) for b in begins[i])
            done = np.where(depth[i + 1] > depth[i], depth[i + 1], done)
        return reads + sum(step.limits) - int(done.sum()) + cost * len(kept)

    every = list(range(len(levels)))
    for i in every:
        assert cost_of(every) <= cost_of([other for other in every if other != i]) + 1e-9
    assert cost_of(every) <= cost_of([]) + 1e-9


@given(st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=2, max_size=12))
def test_sharers_of_any_prefix_become_neighbors(rows: list[list[int]]) -> None:
    table = np.array(rows, dtype=np.int32)
    ordered = table[prefix_order(table)]
    for width in range(1, 7):
        runs = [tuple(row[:width]) for row in ordered.tolist()]
        assert sum(a != b for a, b in pairwise(runs)) + 1 == len(set(runs))
    limits = np.arange(len(rows)) % 7
    got = common_prefixes(ordered, limits)
    assert got[0] == 0
    for b, (one, other) in enumerate(pairwise(ordered.tolist())):
        equal = next((i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y), 6)
        assert got[b + 1] == min(equal, limits[b], limits[b + 1])


# --- what a level costs ----------------------------------------------------------------------------------------------

HEADS = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=0.1)
H200 = LevelCosts.of(H200_COSTS, HEADS, 16, torch.bfloat16)


@pytest.mark.parametrize(
    ("num_requests", "shared", "saved_us"),
    [
        # Flat decode on tensor cores minus two levels planned by hand, measured on an H200.
        (16, 256, 44 - 22),
        (64, 256, 127 - 38),
        (64, 1024, 454 - 56),
        (256, 256, 485 - 92),
        (256, 1024, 1774 - 163),
        (64, 4096, 1762 - 146),
    ],
)
def test_the_default_costs_predict_what_a_level_saved_on_an_h200(
    num_requests: int, shared: int, saved_us: float
) -> None:
    _, levels = prefixed(num_requests, shared, 8).plan(H200)
    assert [len(pages) for _, pages in groups(levels[0])] == [shared] and len(levels) == 1
    saving = H200.saving(np.ones(num_requests - 1, dtype=np.int64)).sum() * shared - H200.cost(num_requests)
    assert abs(saving * 1e6 - saved_us) < max(0.05 * saved_us, 12)


def test_a_level_that_does_not_pay_is_flat() -> None:
    assert prefixed(2, 4, 2).plan(H200)[1] == () and prefixed(64, 2, 2).plan(H200)[1] == ()
    assert len(prefixed(2, 4, 2).plan(in_pages(3.9))[1]) == 1


def test_prompts_that_are_compute_bound_save_nothing() -> None:
    step = prefixed(8, 256, 40)
    step.num_new = [512] * 8
    step.num_computed = [256 * 16] * 8
    assert H200.saving(np.array([1, 512])).tolist() == [pytest.approx(6.17e-9, rel=0.01), 0.0]
    assert step.plan(H200)[1] == ()


def test_an_outer_level_that_an_inner_one_makes_redundant_is_dropped() -> None:
    """Two documents after a system prompt: the prompt is read twice instead of in a level of its own."""
    system, documents = [0, 1, 2], [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    pages = [[*system, *documents[b % 2], 20 + b] for b in range(8)]
    step = Step(16, 30, pages, [8 * 16 + 3] * 8, [1] * 8)
    order, levels = step.plan(in_pages(5.0))
    assert [pages for _, pages in groups(levels[0])] == [system + document for document in documents]
    assert len(levels) == 1 and order == [0, 2, 4, 6, 1, 3, 5, 7]
    assert len(step.plan(in_pages(2.0))[1]) == 2


# --- the planner's memory --------------------------------------------------------------------------------------------


def decoding_table() -> tuple[PageTable, np.ndarray]:
    """Three rows of 3 pages, of which the first two are shared by rows 0 and 2."""
    table = PageTable(20, 4, 4)
    rows = np.array([table.allocate() for _ in range(3)])
    table.take(rows[:2], np.array([3, 3]))
    table.share(int(rows[2]), table.pages(int(rows[0]))[:2])
    table.take(rows[2:], np.array([1]))
    return table, rows


def test_levels_are_found_once_while_the_same_requests_decode() -> None:
    table, rows = decoding_table()
    planner = LevelPlanner(in_pages(0.0), 4)
    ones, admissions = np.ones(3, dtype=np.int64), np.array([1, 2, 3])

    def arrange(computed: int, admissions: np.ndarray = admissions) -> tuple[Level, ...]:
        return planner.arrange(table, rows, ones, np.full(3, computed), admissions)[1]

    levels = arrange(9)
    assert len(levels) == 1 and levels[0].kv_page_indices.tolist() == table.pages(int(rows[0]))[:2].tolist()
    assert arrange(10) is levels
    assert arrange(10, np.array([1, 2, 4])) is not levels
    levels = arrange(10)
    # Another request gets a page of the level, which is what happens after an eviction.
    table.generation[table.pages(int(rows[0]))[1]] += 1
    assert arrange(11) is not levels


def test_levels_are_found_again_while_prompts_run_and_after() -> None:
    table, rows = decoding_table()
    planner = LevelPlanner(in_pages(0.0), 4)
    admissions = np.array([1, 2, 3])

    def pages(new: list[int], computed: list[int]) -> list[int]:
        levels = planner.arrange(table, rows, np.array(new), np.array(computed), admissions)[1]
        return [len(level.kv_page_indices) for level in levels]

    assert pages([2, 2, 2], [0, 0, 0]) == []
    assert pages([2, 2, 2], [5, 5, 5]) == [1]
    assert pages([2, 2, 2], [9, 9, 9]) == [2]
    assert pages([1, 1, 1], [11, 11, 11]) == [2]
    assert planner.arrange(table, rows[:1], np.array([1]), np.array([11]), admissions[:1])[1] == ()


def test_only_layers_without_a_window_have_levels() -> None:
    cache = PagedKVCache(SPECS, 1, 4, torch.float64)
    assert level_planner([WINDOW], cache, FREE, Parts()) is None
    assert level_planner(SPECS, cache, FREE, Parts()) is not None


# --- attention -------------------------------------------------------------------------------------------------------


def outputs(backend: TorchBackend, batch: StepBatch, data: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    backend.plan(batch)
    return [backend(layer, *qkv) for layer, qkv in enumerate(data)]


@settings(deadline=None, max_examples=60)
@given(steps(), st.sampled_from([FREE, NEVER]), st.sampled_from([3, 8192]))
def test_equals_flat_attention_in_float64(step: Step, costs: CascadeCosts, key_chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    order, levels = step.plan(costs_of(costs, step.page_size))
    assert costs is FREE or levels == ()
    caches = [full_cache(SPECS, step.num_pages, step.page_size, torch.float64) for _ in range(2)]
    for pools in zip(*(cache.layers for cache in caches), strict=True):
        filled = torch.randn(2, *pools[0][0].shape, generator=generator, dtype=torch.float64)
        for pool in pools:
            for x, new in zip(pool, filled, strict=True):
                x.copy_(new)
    backend_class = type("Chunks", (CascadeBackend,), {"KEY_CHUNK": key_chunk})
    cascade = backend_class(SPECS, caches[0], Parts(), costs)
    flat = create_backend("torch", SPECS, caches[1], Parts())
    batch = step.batch(order, levels)
    shapes = [(spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads) for spec in SPECS]
    data = [
        [torch.randn(batch.num_tokens, heads, 8, generator=generator, dtype=torch.float64) for heads in shape]
        for shape in shapes
    ]
    # Flat in the scheduler's order: a request's result does not depend on its place in the step.
    unordered = step.batch(list(range(len(order))), ())
    split = [x.split([step.num_new[b] for b in order]) for qkv in data for x in qkv]
    place = [order.index(b) for b in range(len(order))]
    moved = [torch.cat([pieces[i] for i in place]) for pieces in split]
    expected = outputs(flat, unordered, [moved[3 * i : 3 * i + 3] for i in range(len(SPECS))])
    for got, want in zip(outputs(cascade, batch, data), expected, strict=True):
        pieces = got.split([step.num_new[b] for b in order])
        torch.testing.assert_close(torch.cat([pieces[i] for i in place]), want, atol=1e-12, rtol=0)


def test_pages_of_a_level_are_not_read_for_each_request() -> None:
    """A level's keys are gathered once."""
    step = prefixed(3, 2, 1)
    _, levels = step.plan(costs_of(FREE, 16))
    gathered: list[int] = []

    class Counting(CascadeBackend):
        def _gather(self, spec, sequence, dtype):
            gathered.append(len(sequence.key_positions))
            return super()._gather(spec, sequence, dtype)

    cache = full_cache([PLAIN], step.num_pages, 16, torch.float64, value=0.5)
    backend = Counting([PLAIN], cache, Parts(), FREE)
    backend.plan(step.batch([0, 1, 2], levels))
    backend(0, torch.zeros(3, 4, 8).double(), *torch.zeros(2, 3, 2, 8).double())
    assert gathered == [32, 16, 16, 16]


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@settings(deadline=None, max_examples=15)
@given(
    requests(most=6, longest=40),
    st.integers(0, 1),
    st.integers(24, 60),
    st.integers(8, 40),
    st.none() | st.lists(st.integers(1, 6)),
)
def test_an_engine_with_levels_gives_the_tokens_of_each_request_alone(
    family: str, made: list[Arrival], depth: int, num_pages: int, budget: int, sizes: list[int] | None
) -> None:
    model = double_model(family)
    engine = make_engine(
        model, attn_backend="cascade", page_size=2, num_pages=num_pages, max_batch_size=6, enable_prefix_caching=True,
        max_num_batched_tokens=budget, pipeline_depth=depth, max_model_len=48, cuda_graph_batch_sizes=sizes,
    )  # fmt: skip
    engine.core._planner = level_planner(model.attention_specs, engine.cache, FREE, Parts())
    got = serve(engine, {0: made})
    for name, prompt, params in made:
        assert got[name] == alone(model, prompt, params, limit=48, guess=got[name])


def test_the_requests_of_a_step_are_reported_in_the_order_of_its_levels() -> None:
    """Requests with two prefixes arrive alternately; in each step after their prompts, sharers are neighbors."""
    model = double_model("llama")
    steps: list[tuple[list[str], tuple[Level, ...]]] = []

    def record(engine, report) -> None:
        if report.step is not None:
            steps.append(([request.request_id for request in report.requests], report.step.levels))

    engine = make_engine(
        model, attn_backend="cascade", page_size=2, num_pages=100, max_batch_size=4, enable_prefix_caching=True,
        on_step=record,
    )  # fmt: skip
    engine.core._planner = level_planner(model.attention_specs, engine.cache, FREE, Parts())
    stems = {"a": list(range(3, 12)), "b": list(range(20, 29))}
    made = [(f"{stem}{i}", [*tokens, 40 + i], GREEDY) for i in range(2) for stem, tokens in stems.items()]
    got = serve(engine, {i: [request] for i, request in enumerate(made)})
    assert all(got[name] == alone(model, prompt, GREEDY, guess=got[name]) for name, prompt, _ in made)
    together = [(names, levels) for names, levels in steps if len(names) == 4]
    assert together
    for names, levels in together:
        assert sorted("".join(name[0] for name in names).split("ba")) != ["", "", ""] and levels
        assert [name[0] for name in names] in (list("aabb"), list("bbaa"))


def test_levels_run_in_captured_steps_whose_groups_and_requests_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prefixes, joined and left one after the other: levels of one to three groups, in graphs of 2 and 6."""
    model = double_model("llama")
    replayed: set[tuple[int, int]] = set()

    engine = make_engine(
        model, attn_backend="cascade", page_size=2, num_pages=100, max_batch_size=6, enable_prefix_caching=True,
        cuda_graph_batch_sizes=(2, 6),
    )  # fmt: skip
    run = engine.executor._graphs.run

    def recorded(graph, batch, rows):
        replayed.update((batch.num_sequences, len(level.kv_last_page_len)) for level in batch.levels)
        return run(graph, batch, rows)

    monkeypatch.setattr(engine.executor._graphs, "run", recorded)
    engine.core._planner = level_planner(model.attention_specs, engine.cache, FREE, Parts())
    stems = [list(range(first, first + 9)) for first in (3, 20, 40)]
    params = replace(GREEDY, max_tokens=20)
    made = [(f"{i}", [*stems[i // 2], 50 + i], params) for i in range(6)]
    got = serve(engine, {3 * i: [request] for i, request in enumerate(made)})
    assert got == {name: alone(model, prompt, params, guess=got[name]) for name, prompt, _ in made}
    assert engine.metrics.failed_steps == 0
    assert {groups for _, groups in replayed} >= {1, 2, 3} and {size for size, _ in replayed} == {2, 6}, replayed


# --- on a GPU --------------------------------------------------------------------------------------------------------

# FlashInfer's kernels and the reference round bfloat16 at different places, on unit-normal keys and values.
BF16 = {"atol": 2e-2, "rtol": 0}
WIDE = AttentionSpec(0, num_qo_heads=8, num_kv_heads=4, head_dim=128, scale=0.1)
GPU_SPECS = (
    WIDE,
    replace(WIDE, layer=1, softcap=20.0),
    replace(WIDE, layer=2, window=40),
    replace(WIDE, layer=3, alibi_slopes=tuple(alibi_slopes(8).tolist())),
)


COMPOSED = ("cascade", "flashinfer_trtllm+cascade", "flash_decoding+cascade")


def filled_caches(specs: tuple[AttentionSpec, ...], num_pages: int, layouts: list[str]) -> list[PagedKVCache]:
    """Caches on the GPU with the same random keys and values, one for each layout."""
    caches = [PagedKVCache(specs, num_pages, 16, torch.bfloat16, "cuda", layout) for layout in layouts]
    generator = torch.Generator("cuda").manual_seed(0)
    for pools in zip(*(cache.layers for cache in caches), strict=True):
        shape = num_pages, 16, specs[0].num_kv_heads, specs[0].head_dim
        filled = torch.randn(2, *shape, generator=generator, device="cuda").bfloat16()
        for cache, pool in zip(caches, pools, strict=True):
            for x, new in zip(pool, filled, strict=True):
                x.copy_(new if cache.layout == "NHD" else new.transpose(1, 2))
    return caches


def random_bf16(spec: AttentionSpec, count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads
    return [torch.randn(count, h, spec.head_dim, generator=generator, device="cuda").bfloat16() for h in heads]


def mixed_tree(extra: int = 0) -> Step:
    """Two documents after one system prompt, requests that share nothing, and prompts; `extra` more keys in each."""
    system, documents = list(range(10)), [list(range(10, 30)), list(range(30, 55))]
    stems = [system + documents[0]] * 5 + [system + documents[1]] * 3 + [system] * 2 + [[]] * 2
    new = [1] * 9 + [17, 1, 30]
    fresh, pages, computed = 60, [], []
    for stem, count in zip(stems, new, strict=True):
        computed.append(len(stem) * 16 + 21 + extra)
        own = -(-(computed[-1] + count) // 16) - len(stem)
        pages.append(stem + list(range(fresh, fresh + own)))
        fresh += 8  # the same pages whatever `extra` is
    ordered = sorted(range(len(new)), key=lambda b: new[b] > 1)
    return Step(16, fresh, *([x[b] for b in ordered] for x in (pages, computed, new)))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", COMPOSED)
def test_kernels_with_levels_equal_the_reference(name: str, layout: str) -> None:
    pytest.importorskip("flashinfer")
    step = mixed_tree()
    mine, reference = filled_caches(GPU_SPECS, step.num_pages, [layout, "NHD"])
    backend, flat = create_backend(name, GPU_SPECS, mine, Parts()), TorchBackend(GPU_SPECS, reference, Parts())
    order, levels = step.plan(in_pages(0.0))
    assert len(levels) == 2 and any(not pages for _, pages in groups(levels[0]))
    levels = step.batch(order, levels, "cuda").levels
    # Flat, with levels, with the same levels and more keys, and with the outer level alone.
    for extra, kept in ((0, ()), (0, levels), (1, levels), (2, levels), (3, levels[:1]), (4, ())):
        step = mixed_tree(extra)
        batch = replace(step.batch(order, (), "cuda"), levels=kept)
        backend.plan(batch)
        flat.plan(batch)
        for layer, spec in enumerate(GPU_SPECS):
            q, k, v = random_bf16(spec, batch.num_tokens, 10 * extra + layer)
            torch.testing.assert_close(backend(layer, q, k, v), flat(layer, q, k, v), **BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPOSED)
def test_narrow_keys_with_levels(name: str) -> None:
    pytest.importorskip("flashinfer")
    wide, step = GPU_SPECS[:3], mixed_tree()
    specs = narrow(wide)
    mine = PagedKVCache(specs, step.num_pages, 16, torch.bfloat16, "cuda")
    theirs = PagedKVCache(wide, step.num_pages, 16, torch.float64, "cuda")
    batch = step.batch(*step.plan(in_pages(0.0)), "cuda")
    assert batch.levels
    backend, flat = create_backend(name, specs, mine, Parts()), TorchBackend(wide, theirs, Parts())
    assert error_of_narrow_keys(batch, backend, flat) < 0.1  # queries, weights and outputs are rounded to bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfers_own_cascade_gives_the_same(layout: str) -> None:
    flashinfer = pytest.importorskip("flashinfer")
    step = prefixed(24, 40, 3)
    [cache] = filled_caches((WIDE,), step.num_pages, [layout])
    backend = create_backend("cascade", (WIDE,), cache, Parts())
    batch = step.batch(*step.plan(in_pages(0.0)), "cuda")
    backend.plan(batch)
    q, k, v = random_bf16(WIDE, 24, 1)
    got = backend(0, q, k, v)
    [level], own = batch.levels, own_pages(batch)
    theirs = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"), layout
    )
    both = [(x.qo_indptr, x.kv_page_indptr, x.kv_page_indices, x.kv_last_page_len) for x in (level, own)]
    theirs.plan(
        *map(list, zip(*both, strict=True)), 8, 4, 128, 16,
        causal=True, sm_scale=WIDE.scale, q_data_type=torch.bfloat16,
    )  # fmt: skip
    torch.testing.assert_close(got, theirs.run(q, cache.layers[0]), **BF16)


@pytest.mark.gpu
def test_levels_are_planned_once_on_the_gpu_while_they_stay() -> None:
    pytest.importorskip("flashinfer")
    step = prefixed(8, 4, 2)
    [cache] = filled_caches((WIDE,), step.num_pages, ["NHD"])
    backend = create_backend("cascade", (WIDE,), cache, Parts())
    assert backend.planner is not None
    order, levels = step.plan(in_pages(0.0))
    batch = step.batch(order, levels, "cuda")
    planned: list[Any] = []
    wrapper = backend.wrappers.flashinfer.BatchPrefillWithPagedKVCacheWrapper
    with pytest.MonkeyPatch.context() as patch:
        plan = wrapper.plan
        patch.setattr(wrapper, "plan", lambda *arrays, **how: planned.append(how) or plan(*arrays, **how))
        for kept in (batch.levels, batch.levels, (), batch.levels):
            backend.plan(replace(batch, levels=kept))
        assert len(planned) == 1
        backend.plan(replace(batch, levels=(replace(batch.levels[0]),)))
        assert len(planned) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_captured_step_with_levels_and_padding_equals_the_reference(name: str, layout: str) -> None:
    """One graph for 8 requests, replayed for 5 and for 8 requests with other lengths and other prefixes."""
    pytest.importorskip("flashinfer")
    size, longest = 8, prefixed(8, 40, 4)
    mine, reference = filled_caches((WIDE,), longest.num_pages + 1, [layout, "NHD"])
    backend, flat = create_backend(name, (WIDE,), mine, Parts()), TorchBackend((WIDE,), reference, Parts())

    def padded(step: Step) -> StepBatch:
        batch = step.batch(*step.plan(in_pages(0.0)))
        more = size - batch.num_sequences
        return StepBatch.build(
            token_ids=[0] * size, num_new=None, kv_lens=[*batch.kv_lens.tolist(), *[1] * more], page_size=16,
            pages=[*batch.host_page_indices.tolist(), *[longest.num_pages] * more], page_capacity=size * 44,
            levels=tuple(replace(level, kv_page_indices=level.kv_page_indices.cuda()) for level in batch.levels),
            device="cuda",
        )  # fmt: skip

    data = random_bf16(WIDE, size, 0)
    slots = torch.zeros(size, dtype=torch.long, device="cuda")
    graph = None
    for step in (longest, prefixed(5, 40, 4), prefixed(8, 7, 2), prefixed(3, 20, 1), longest):
        batch = padded(step)
        backend.plan(batch)
        flat.plan(replace(batch, levels=(), page_capacity=None))
        slots.copy_(batch.slot_mapping)
        backend.slot_mapping = slots
        if graph is None:
            backend(0, *data)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = backend(0, *data)
        graph.replay()
        real = len(step.pages)  # all padding rows write to one slot
        torch.testing.assert_close(out[:real], flat(0, *data)[:real], **BF16)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "depth"), [*((name, 1) for name in COMPOSED), ("cascade", 0)])
def test_an_engines_captured_levels_change_no_token(name: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests over a tree of prefixes, which join and leave: most decode steps are replays with levels and padding."""
    pytest.importorskip("flashinfer")
    monkeypatch.setattr(LevelCosts, "of", lambda *_: in_pages(0.0))
    replayed: list[tuple[int, int, int]] = []
    run = DecodeGraphs.run

    def spied(graphs: DecodeGraphs, graph: DecodeGraph, batch: StepBatch, rows: torch.Tensor) -> torch.Tensor:
        replayed.append((batch.num_sequences, len(rows), len(batch.levels)))
        return run(graphs, graph, batch, rows)

    monkeypatch.setattr(DecodeGraphs, "run", spied)
    gpu = torch.device("cuda")
    theirs = transformers_model("qwen3", 2, torch.bfloat16, max_position_embeddings=2048, **TINY["qwen3"])
    model = our_model(theirs, parts=default_parts(gpu)).to(gpu)
    random = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 61, (count,), generator=random).tolist()

    stem = ids(640)
    branches = [stem + ids(320) for _ in range(2)]
    prompts = {str(i): [*(branches[i % 2] if i % 4 else stem), *ids(1 + 5 * i)] for i in range(16)}
    arrivals: dict[int, list[Arrival]] = {}
    for i, (request, prompt) in enumerate(prompts.items()):
        params = replace(GREEDY, max_tokens=12 + 3 * i, ignore_eos=True)
        arrivals.setdefault(0 if i < 3 else 4 + i // 2, []).append((request, prompt, params))
    engine = make_engine(
        model, parts=default_parts(gpu), attn_backend=name, num_pages=800, page_size=16, max_batch_size=16,
        max_num_batched_tokens=2048, enable_prefix_caching=True, pipeline_depth=depth,
    )  # fmt: skip
    outputs = serve(engine, arrivals)
    assert any(levels == 2 for *_, levels in replayed) and any(levels == 1 for *_, levels in replayed)
    assert any(levels and real < size for size, real, levels in replayed)
    check_near_greedy(theirs, prompts, outputs)
