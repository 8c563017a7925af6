"""CUDA graphs of decode steps, and what every capture needs."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from mini_engine.batch import StepBatch
from mini_engine.decode_graphs import DecodeGraphs
from mini_engine.transfer import capturing


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


def test_a_graph_has_the_pages_of_each_group_of_layers_at_addresses_of_their_own() -> None:
    planned: list[StepBatch] = []
    graphs = DecodeGraphs(
        [4], lambda batch, rows: (batch.token_ids, torch.zeros(4, 0)), planned.append, page_size=16, pages_per_row=3,
        padding_page=9, padding_row=5, num_buffers=2, device=torch.device("cpu"), num_layer_groups=2,
    )  # fmt: skip
    graph = graphs.get(4, (2,))
    tokens = {"token_ids": np.array([7, 8]), "token_source": None}
    groups = [
        {"kv_lens": np.array([40, 5]), "pages": np.array([1, 2, 3, 4]), "page_positions": None},
        {"kv_lens": np.array([8, 5]), "pages": np.array([5, 6]), "page_positions": np.array([32, 0])},
    ]
    batch, other = [
        StepBatch.build(
            **graphs.pad(tokens | group, 4),
            num_new=None,
            page_size=16,
            page_capacity=graphs.page_capacity(4),
            into=into,
        )
        for group, into in zip(groups, graphs.buffers[0], strict=True)
    ]
    batch.other_groups = (other,)
    graphs.run(graph, batch, torch.tensor([0, 1]))
    captured, replayed = ([step, *step.other_groups] for step in planned)
    assert len(captured) == len(replayed) == 2 and len(captured[0].levels) == 1 and captured[1].levels == ()
    for before, after in zip(captured, replayed, strict=True):
        assert before.kv_page_indices.data_ptr() == after.kv_page_indices.data_ptr()
        assert before.slot_mapping.data_ptr() == after.slot_mapping.data_ptr()
        assert after.positions.tolist() == [39, 4, 0, 0] and after.page_capacity == 12
    assert replayed[0].kv_page_indices.tolist() == [1, 2, 3, 4, 9, 9]
    assert replayed[1].kv_page_indices.tolist() == [5, 6, 9, 9]
    assert replayed[0].slot_mapping.tolist() == [3 * 16 + 7, 4 * 16 + 4, 9 * 16, 9 * 16]
    assert replayed[1].slot_mapping.tolist() == [5 * 16 + 7, 6 * 16 + 4, 9 * 16, 9 * 16]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_nothing_is_collected_during_a_capture(is_enabled: bool) -> None:
    """Nor afterwards, if nothing was before; a capture that fails changes nothing."""
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        with pytest.raises(KeyError), capturing():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
