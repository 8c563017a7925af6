"""Layer groups on a GPU: Gemma 2 under load, with a page table for each group and with one for all layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.greedy import check_greedy


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"pipeline_depth": 0}, {"cuda_graph_batch_sizes": []}], ids=str)
@pytest.mark.parametrize("disabled", [False, True], ids=["groups", "one table"])
@pytest.mark.parametrize("backend", ["auto", "flashinfer", "flash_decoding"])
def test_greedy_tokens_are_those_of_the_reference(backend: str, disabled: bool, options: dict[str, Any]) -> None:
    """Through graphs, whose arrays are those of each group, after preemption, and with pages that left the window."""
    pytest.importorskip("flashinfer")
    same = {"attn_backend": backend, "disable_hybrid_kv_cache_manager": disabled}
    check_greedy(torch.device("cuda"), "gemma2", **same, **options)
