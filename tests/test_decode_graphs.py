"""A graph is captured for the same levels for which its replays are planned."""

from __future__ import annotations

import pytest
import torch

from mini_engine.batch import StepBatch
from mini_engine.decode_graphs import DecodeGraphs


@pytest.mark.parametrize("groups", [(), (2,), (2, 4), (8,)])
def test_a_graph_is_captured_with_the_levels_of_its_replays(groups: tuple[int, ...]) -> None:
    """A captured step that makes no use of its levels would run kernels that no later plan reaches."""
    planned: list[StepBatch] = []
    graphs = DecodeGraphs(
        [4], lambda batch, rows: (batch.token_ids, torch.zeros(4, 0)), planned.append, page_size=16, pages_per_row=3,
        padding_page=9, padding_row=5, num_buffers=1, device=torch.device("cpu"),
    )  # fmt: skip
    graphs.get(4, groups)
    [batch] = planned
    assert batch.num_sequences == 4 and batch.page_capacity == 12
    assert tuple(level.padded_groups for level in batch.levels) == groups
    assert all(int(level.qo_indptr[-1]) == 4 for level in batch.levels)
