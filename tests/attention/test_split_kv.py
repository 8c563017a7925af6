"""The split-KV backend: what the planner guarantees, and equality with the reference however keys are split."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.naive import attention_mask
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.split_kv import SplitKVBackend, WorkPlan, plan_work, smallest_chunk
from mini_engine.attention.state import merge_states
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention.stepping import random_step

PLAIN = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
SPECS = (
    PLAIN,
    replace(PLAIN, layer=1, window=7, softcap=4.0),
    replace(PLAIN, layer=2, num_kv_heads=6, alibi_slopes=(0.5, 0.25, 0.1, 0.05, 0.02, 0.01)),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """`qo_indptr` and `kv_lens` of a step."""
    kv_lens = draw(st.lists(st.integers(1, 300), min_size=1, max_size=6))
    new = [draw(st.integers(1, n)) for n in kv_lens]
    return np.concatenate(([0], np.cumsum(new))), np.array(kv_lens)


def num_tiles(plan: WorkPlan) -> int:
    return len(plan.item_indptr) - 1


@given(steps(), st.integers(1, 60), st.integers(1, 80), st.integers(1, 40), st.none() | st.integers(1, 90))
def test_items_hold_every_visible_key_of_every_query_once(
    step: tuple[np.ndarray, np.ndarray], num_workers: int, tile_len: int, least_keys: int, window: int | None
) -> None:
    qo_indptr, kv_lens = step
    plan = plan_work(qo_indptr, kv_lens, num_workers, tile_len=tile_len, least_keys=least_keys, window=window)
    held = np.zeros((qo_indptr[-1], kv_lens.max()), dtype=int)
    for item, sequence in enumerate(plan.sequences.tolist()):
        tokens = slice(plan.first_tokens[item], plan.end_tokens[item])
        assert qo_indptr[sequence] <= tokens.start < tokens.stop <= qo_indptr[sequence + 1]
        assert tokens.stop - tokens.start <= tile_len
        assert 0 < plan.end_keys[item] - plan.first_keys[item] <= plan.chunk_size
        held[tokens, plan.first_keys[item] : plan.end_keys[item]] += 1
    assert held.max() == 1
    for b, (first, end) in enumerate(pairwise(qo_indptr)):
        keys = torch.arange(int(kv_lens[b]))
        visible = attention_mask(keys[len(keys) - int(end - first) :], keys, window).numpy()
        assert held[first:end, : len(keys)][visible].all() and not held[first:end, len(keys) :].any()
    # The items of a tile are neighbors: their queries are the same, their keys follow one another.
    for first, end in pairwise(plan.item_indptr):
        assert len({*plan.first_tokens[first:end].tolist()}) == 1
        assert (plan.first_keys[first + 1 : end] == plan.end_keys[first : end - 1]).all()


@given(steps(), st.integers(1, 60), st.integers(1, 40))
def test_no_worker_waits_long_for_another(
    step: tuple[np.ndarray, np.ndarray], num_workers: int, least_keys: int
) -> None:
    plan = plan_work(*step, num_workers, tile_len=16, least_keys=least_keys)
    tiles = num_tiles(plan)
    assert len(plan.sequences) <= max(num_workers, tiles)
    assert plan.chunk_size >= least_keys
    if num_workers > tiles and plan.chunk_size > least_keys:
        total = int((plan.end_keys - plan.first_keys).sum())
        assert plan.chunk_size - 1 < total / (num_workers - tiles)  # an equal share, up to one short chunk per tile


@given(st.lists(st.integers(1, 500), min_size=1, max_size=10), st.integers(1, 40), st.integers(1, 50))
def test_the_chunk_is_the_smallest_that_fits(num_keys: list[int], num_workers: int, least: int) -> None:
    keys = np.array(num_keys)
    sizes = range(least, max(least, keys.max()) + 1)
    fitting = [size for size in sizes if sum(-(-n // size) for n in num_keys) <= num_workers]
    assert smallest_chunk(keys, num_workers, least) == (fitting[0] if fitting else sizes[-1])


def test_one_long_sequence_is_split_and_short_ones_are_not() -> None:
    plan = plan_work(np.arange(5), np.array([4000, 90, 80, 70]), 8, tile_len=16)
    assert plan.chunk_size == 800
    assert np.diff(plan.item_indptr).tolist() == [5, 1, 1, 1]
    assert (plan.end_keys - plan.first_keys).tolist() == [800] * 5 + [90, 80, 70]


def test_a_window_leaves_little_to_split() -> None:
    plan = plan_work(np.array([0, 1, 33]), np.array([5000, 5000]), 4, tile_len=16, window=100)
    assert plan.first_keys.tolist() == [4900, 4869, 4885] and plan.end_keys.tolist() == [5000, 4984, 5000]


@settings(max_examples=40)
@given(st.data())
def test_equals_the_reference_however_keys_are_split(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    batch, pool = random_step(data, page_size)
    own, reference = (PagedKVCache(SPECS, pool, page_size, torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for pairs in zip(own.layers, reference.layers, strict=True):
        for mine, theirs in zip(*pairs, strict=True):
            theirs.normal_(generator=generator)
            mine.copy_(theirs)
    backend = SplitKVBackend(
        SPECS, own, Parts(), thread_blocks=data.draw(st.integers(1, 100)), least_keys=data.draw(st.integers(1, 30))
    )
    oracle = TorchBackend(SPECS, reference, Parts())
    backend.plan(batch)
    oracle.plan(batch)
    for spec in SPECS:
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        qkv = torch.randn(batch.num_tokens, sum(heads), 16, generator=generator, dtype=torch.float64).split(heads, 1)
        got, want = backend(spec.layer, *qkv), oracle(spec.layer, *qkv)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
        for mine, theirs in zip(own.layers[spec.layer], reference.layers[spec.layer], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("thread_blocks", "merges"), [(2, 0), (8, 3), (80, 39)])
def test_states_are_merged_by_the_part(thread_blocks: int, merges: int) -> None:
    """One decode of 40 keys: one chunk for each worker of a KV head."""
    calls = []
    parts = replace(Parts(), merge_states=lambda a, b: calls.append(1) or merge_states(a, b))
    backend = SplitKVBackend(
        [PLAIN], PagedKVCache([PLAIN], 10, 4, torch.float64), parts, thread_blocks=thread_blocks, least_keys=1
    )
    backend.plan(StepBatch.build(token_ids=[0], num_new=[1], kv_lens=[40], pages=range(10), page_size=4))
    backend(0, torch.zeros(1, 6, 16).double(), *torch.zeros(2, 1, 2, 16).double())
    assert len(calls) == merges
