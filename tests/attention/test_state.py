"""States against masked_attention; merge as an associative, commutative operation with an identity element."""

import math
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.state import AttentionState, attention_state, chunked_attention, merge_all, merge_states

NUM_QUERIES, NUM_HEADS, HEAD_DIM = 2, 4, 3


def assert_same(a: AttentionState, b: AttentionState, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a.out, b.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(a.lse, b.lse, atol=tolerance, rtol=tolerance)


@st.composite
def states(draw: st.DrawFn) -> AttentionState:
    """A state over 0 to 4 random keys with scores of any size, some queries seeing none of them."""
    num_keys, seed = draw(st.integers(0, 4)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(NUM_QUERIES, NUM_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(num_keys, 2, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(NUM_QUERIES, num_keys, generator=generator) < 0.7
    return attention_state(q, k, v, scale=draw(st.sampled_from([0.5, 50.0, 5000.0])), mask=mask)


def empty_state() -> AttentionState:
    shape = (NUM_QUERIES, NUM_HEADS)
    out = torch.zeros(*shape, HEAD_DIM, dtype=torch.float64)
    return AttentionState(out, torch.full(shape, -math.inf, dtype=torch.float64))


@given(a=states(), b=states())
def test_merge_is_commutative(a: AttentionState, b: AttentionState) -> None:
    assert_same(merge_states(a, b), merge_states(b, a))


@given(a=states(), b=states(), c=states())
def test_merge_is_associative(a: AttentionState, b: AttentionState, c: AttentionState) -> None:
    assert_same(merge_states(merge_states(a, b), c), merge_states(a, merge_states(b, c)))


@given(a=states())
def test_an_empty_state_changes_nothing(a: AttentionState) -> None:
    assert_same(merge_states(a, empty_state()), a)
    assert_same(merge_states(empty_state(), a), a)
    assert_same(merge_all([empty_state(), a, empty_state()]), a)


def test_two_empty_states_stay_empty() -> None:
    assert_same(merge_states(empty_state(), empty_state()), empty_state())
    assert_same(merge_all([empty_state()] * 3), empty_state())


@given(parts=st.lists(states(), min_size=1, max_size=6), seed=st.randoms())
def test_merge_all_is_any_order_of_pairwise_merges(parts: list[AttentionState], seed) -> None:
    merged = merge_all(parts)
    seed.shuffle(parts)
    assert_same(merged, reduce(merge_states, parts))


@given(
    n=st.integers(1, 4),
    m=st.integers(0, 9),
    chunk_size=st.integers(1, 10),
    window=st.one_of(st.none(), st.integers(1, 9)),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=100, deadline=None)
def test_chunked_equals_whole(
    n: int, m: int, chunk_size: int, window: int | None, with_bias: bool, softcap: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(m, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    # With fewer keys than queries the first queries see none: their rows are fully masked.
    mask = attention_mask(torch.arange(m - n, m), torch.arange(m), window)
    bias = torch.randn(4, n, m, generator=generator, dtype=torch.float64) if with_bias else None
    options: dict[str, Any] = {"scale": 0.4, "mask": mask, "bias": bias, "softcap": softcap}
    chunked = chunked_attention(q, k, v, chunk_size=chunk_size, **options)
    assert_same(chunked, attention_state(q, k, v, **options))
    torch.testing.assert_close(chunked.out, masked_attention(q, k, v, **options), atol=1e-12, rtol=1e-12)


def test_lse_is_the_logarithm_of_the_sum() -> None:
    q, k = torch.ones(1, 1, 1), torch.tensor([0.0, math.log(3.0)]).view(2, 1, 1)
    v = torch.tensor([4.0, 8.0]).view(2, 1, 1)
    state = attention_state(q, k, v, scale=1.0)
    assert state.lse.item() == pytest.approx(math.log(4.0))
    assert state.out.item() == pytest.approx((1 * 4 + 3 * 8) / 4)


def test_bfloat16_inputs_are_rounded_once_at_the_end() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 16, generator=generator).bfloat16()
    k, v = (torch.randn(200, 2, 16, generator=generator).bfloat16() for _ in range(2))
    chunked = chunked_attention(q, k, v, scale=0.25, chunk_size=3)
    assert chunked.out.dtype == chunked.lse.dtype == torch.float32
    exact = masked_attention(q.double(), k.double(), v.double(), scale=0.25)
    torch.testing.assert_close(chunked.out.double(), exact, atol=1e-5, rtol=0)


def test_chunked_merges_with_the_function_it_is_given() -> None:
    merged: list[AttentionState] = []

    def merge(a: AttentionState, b: AttentionState) -> AttentionState:
        merged.append(b)
        return merge_states(a, b)

    q, k, v = torch.ones(1, 1, 2), torch.ones(7, 1, 2), torch.ones(7, 1, 2)
    chunked_attention(q, k, v, scale=1.0, chunk_size=3, merge=merge)
    assert [round(state.lse.exp().item() / math.exp(2)) for state in merged] == [3, 1]
