"""Layer groups: which layers share a page table, and how many requests then fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.spec import AttentionSpec
from mini_engine.kv_cache.layer_groups import MAX_GROUPS, MAX_PADDING, layer_groups, one_group, stored_specs
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import page_bytes
from mini_engine.parts import Parts
from mini_engine.scheduler import Scheduler
from tests.helpers import make_request

GEMMA_2, WINDOW = [4096, None] * 13, 4096  # the 2B model: 26 layers


def specs_of(windows: list[int | None]) -> tuple[AttentionSpec, ...]:
    """The layers of Gemma 2 2B, with these windows."""
    return tuple(AttentionSpec(layer, 8, 4, 256, 1 / 16, window=window) for layer, window in enumerate(windows))


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (GEMMA_2, [13, 13]),
        ([None if layer % 6 == 5 else 512 for layer in range(26)], [4, 4, 4, 4, 4, 4, 2]),  # Gemma 3 1B
        ([None if layer % 6 == 5 else 1024 for layer in range(62)], [10, 10, 10, 10, 10, 10, 2]),  # Gemma 3 27B
        ([128, None] * 12, [12, 12]),  # gpt-oss 20B
        ([128, None, 64, None], [4]),  # two kinds of windows: half of each group would be empty
        ([128, None, 64], [1, 1, 1]),
        ([None, None, None, 128], [4]),
        ([None] + [128] * 8, [9]),  # nine page tables
        ([None] * 4, [4]),
        ([128] * 4, [4]),
        ([8192, None] * 2, [4]),  # the window is as wide as the longest text
    ],
)
def test_the_groups_of_known_models(windows, sizes):
    groups = layer_groups(specs_of(windows), 8192)
    assert [len(group.layers) for group in groups] == sizes


@given(st.lists(st.sampled_from([None, None, 64, 128, 9000]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_and_the_pages_of_all_groups_have_the_same_size(windows):
    specs = specs_of(windows)
    groups = layer_groups(specs, 8192)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(specs)))
    if len(groups) == 1:
        assert groups == one_group(specs)
        return
    first, *others = groups
    assert first.window is None and all(own.window is not None for own in others) and len(groups) <= MAX_GROUPS
    for group in groups:
        assert group.layers == tuple(sorted(group.layers)) and 0 < len(group.layers) <= len(first.layers)
        seen = {None if (window := windows[layer]) is None or window >= 8192 else window for layer in group.layers}
        assert seen == {group.window}
    stored = stored_specs(specs, groups)
    assert len(specs) <= len(stored) <= (1 + MAX_PADDING) * len(specs)
    assert page_bytes(stored, 16, torch.bfloat16) == len(groups) * page_bytes(
        specs[: len(first.layers)], 16, torch.bfloat16
    )


def test_layers_that_store_entries_of_different_sizes_stay_in_one_group():
    specs = specs_of(GEMMA_2)
    wide = replace(specs[0], head_dim=512)
    assert len(layer_groups((wide, *specs[1:]), 8192)) == 1
    assert len(layer_groups((replace(specs[0], kv_dtype=torch.float8_e4m3fn), *specs[1:]), 8192)) == 1


def running_at_once(windows: tuple[int | None, ...], num_pages: int, length: int, page_size: int = 16) -> list[int]:
    """Serve many requests, and return how many of them decode at once and the pages of each."""
    budget, num_groups = 512, len(windows)
    table = PageTable(num_pages * num_groups, page_size, 200, -(-length // page_size), num_groups)
    scheduler = Scheduler(
        table, max_model_len=length, max_num_batched_tokens=budget, window=windows[0], other_windows=windows[1:],
        prefix_sharing=False, parts=Parts(),
    )  # fmt: skip
    for number in range(200):
        scheduler.add(make_request([1] * (length - 20), 20, number))
    running = scheduler.running
    for _ in range(10_000):
        schedule = scheduler.schedule()
        assert schedule is not None and not schedule.preempted
        running.num_computed[schedule.rows] += schedule.num_new
        if schedule.num_tokens == len(schedule.rows):  # all that run decode, and no other fits
            break
    scheduler.reserve(running.order, np.ones(len(running), dtype=np.int64))
    return [int(table.counts[table.rows_of(np.array([row]))].sum()) for row in running.order.tolist()]


def test_requests_of_8k_tokens_hold_three_quarters_of_the_pages_so_a_third_more_fit():
    """Of the layer pattern of Gemma 2, half of the layers have a window of 4,096 keys."""
    length, num_pages = 8192, 512 * 48  # a page of all layers has two pages of the pool
    groups = layer_groups(specs_of(GEMMA_2), length)
    with_groups = running_at_once(tuple(group.window for group in groups), num_pages, length)
    [group] = one_group(specs_of(GEMMA_2))
    without = running_at_once((group.window,), num_pages, length)
    assert Counter(without) == {511: 48}
    assert max(with_groups) <= 0.75 * 2 * 511 + 2
    assert len(with_groups) >= 1.3 * len(without)
