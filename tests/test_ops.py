"""The tables of kernels: each entry takes the arguments of its reference."""

from __future__ import annotations

import inspect
from importlib.util import find_spec

import pytest
import torch

from mini_engine import ops, rope, transfer
from mini_engine.attention import page_selection, state
from mini_engine.models import moe
from mini_engine.parts import Parts
from tests.attention import fake_flashinfer

REFERENCES = {
    "feed_tokens": transfer.feed_tokens,
    "rope_tables": rope.rope_tables,
    "copy_pinned": transfer.copy_pinned,
    "keep_tokens": transfer.keep_tokens,
    "merge_sinks": state.merge_sinks,
    "summarize_pages": page_selection.summarize_pages,
    "bound_scores": page_selection.bound_scores,
    "select_pages": page_selection.select_pages,
    "attend_to_pages": page_selection.attend_to_pages,
    "mix_experts": moe.mix_experts,
}


@pytest.mark.parametrize("name", ops.STEP_KERNELS)
def test_a_kernel_takes_the_arguments_of_its_reference(name: str) -> None:
    pytest.importorskip("triton")
    own, reference = (
        inspect.signature(f).parameters for f in (ops.load(ops.STEP_KERNELS[name].path), REFERENCES[name])
    )
    assert list(own) == list(reference)


def test_the_parts_of_a_layer_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("flashinfer") is None:
        fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(ops, "has_layer_kernels", lambda device: True)
    assert all(callable(part) and hasattr(Parts(), name) for name, part in ops.layer_parts(torch.device("cpu")).items())


def test_tensors_on_a_cpu_go_to_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "load", lambda path: pytest.fail(path))
    last_token = torch.tensor([7, 8])
    ids = transfer.feed_tokens(torch.tensor([1, 2]), torch.tensor([-1, 0]), last_token)
    assert ids.tolist() == [1, 7]
    transfer.keep_tokens(ids, torch.tensor([1, 0]), last_token, ids)
    assert last_token.tolist() == [7, 1]
    cos, sin = rope.rope_tables(torch.tensor([0]), torch.ones(2))
    assert cos.tolist() == [[1, 1]] and sin.tolist() == [[0, 0]]
