"""However the tokens are cut into steps, and whatever runs beside them, the logits are the same."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.models.base import CausalLM
from tests.models.families import FAMILIES, our_model, run_schedule, transformers_model, whole

SEQUENCES = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 60], [1, 2, 3], [5, 6, 7, 8] * 3]


@functools.cache
def model(family: str, dtype: torch.dtype = torch.float64) -> CausalLM:
    return our_model(transformers_model(family, dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode_equals_one_pass_over_everything(family: str) -> None:
    prompts = [(0, 7), (1, 1), (2, 10)]
    decodes = [[(0, 1), (1, 1), (2, 1)], [(2, 1), (0, 1), (1, 1)], [(0, 1)], [(0, 1)], [(0, 1)]]
    steps = run_schedule(model(family), SEQUENCES, [prompts, *decodes])
    for ours, expected in zip(steps, whole(model(family), SEQUENCES), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_one_pass_over_everything(family: str, data: st.DataObject) -> None:
    left = [len(tokens) for tokens in SEQUENCES]
    steps: list[list[tuple[int, int]]] = []
    while any(left):
        pending = [index for index, length in enumerate(left) if length]
        chosen = data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
        step = [(index, data.draw(st.integers(1, left[index]))) for index in chosen]
        for index, length in step:
            left[index] -= length
        steps.append(step)
    for ours, expected in zip(
        run_schedule(model(family), SEQUENCES, steps), whole(model(family), SEQUENCES), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_a_float64_model_are_float64(family: str) -> None:
    assert {logits.dtype for logits in whole(model(family), SEQUENCES)} == {torch.float64}


def test_float64_is_kept_from_end_to_end() -> None:
    """A float32 detour of any size would show: its rounding is 10,000 times the tolerance."""
    theirs = transformers_model("llama", dtype=torch.float64)
    narrow = our_model(theirs.to(torch.float32))
    exact, rounded = whole(model("llama"), SEQUENCES), whole(narrow, SEQUENCES)
    assert all((a - b).abs().max() > 1e-8 for a, b in zip(exact, rounded, strict=True))
