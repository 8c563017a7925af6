"""Masks against loops over their definitions; composition; scores against naive attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from mini_engine.attention.masks import (
    MaskMod,
    alibi,
    and_masks,
    attention_sinks,
    causal,
    compose_scores,
    document,
    document_ids,
    or_masks,
    prefix_lm,
    sliding_window,
    soft_cap,
)
from mini_engine.attention.naive import alibi_bias, alibi_slopes, attention_mask, masked_attention

LENGTH = 9
INDICES = torch.arange(LENGTH)
ZERO = torch.tensor(0)


def dense(mask_mod: MaskMod) -> Tensor:
    """The mask of every query over every key."""
    mask = mask_mod(ZERO, ZERO, INDICES[:, None], INDICES[None, :])
    return mask.expand(LENGTH, LENGTH)


def by_loops(sees) -> Tensor:
    return torch.tensor([[bool(sees(q, k)) for k in range(LENGTH)] for q in range(LENGTH)])


IDS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3])
DEFINITIONS = [
    (causal, lambda q, k: k <= q),
    (sliding_window(1), lambda q, k: k == q),
    (sliding_window(4), lambda q, k: k in (q, q - 1, q - 2, q - 3)),
    (attention_sinks(3, 2), lambda q, k: k in (q, q - 1, q - 2) or (k in (0, 1) and k <= q)),
    (prefix_lm(4), lambda q, k: k <= q or k in (0, 1, 2, 3)),
    (document(IDS), lambda q, k: IDS[q] == IDS[k]),
]
MASK_MODS = [mask_mod for mask_mod, _ in DEFINITIONS]


@pytest.mark.parametrize(("mask_mod", "sees"), DEFINITIONS)
def test_mask_is_its_definition(mask_mod, sees) -> None:
    assert torch.equal(dense(mask_mod), by_loops(sees))
    assert torch.equal(create_mask(mask_mod, 2, 3, LENGTH, LENGTH, device="cpu")[1, 2], by_loops(sees))


@given(window=st.integers(1, LENGTH + 2))
def test_window_is_that_of_naive_attention(window: int) -> None:
    assert torch.equal(dense(sliding_window(window)), attention_mask(INDICES, INDICES, window))


@given(window=st.integers(1, LENGTH + 2), num_sinks=st.integers(0, LENGTH + 2))
def test_sinks_lie_between_the_window_and_causal(window: int, num_sinks: int) -> None:
    mask, narrow, wide = dense(attention_sinks(window, num_sinks)), dense(sliding_window(window)), dense(causal)
    assert (narrow <= mask).all() and (mask <= wide).all()
    assert num_sinks > 0 or torch.equal(mask, narrow)
    assert num_sinks + window < LENGTH or torch.equal(mask, wide)


@given(st.lists(st.sampled_from(MASK_MODS), min_size=1, max_size=4), st.sampled_from([and_masks, or_masks]))
def test_composition_is_that_of_the_dense_masks(mask_mods: list[MaskMod], compose) -> None:
    stacked = torch.stack([dense(mask_mod) for mask_mod in mask_mods])
    expected = stacked.all(dim=0) if compose is and_masks else stacked.any(dim=0)
    assert torch.equal(dense(compose(*mask_mods)), expected)
    assert torch.equal(dense(compose(*reversed(mask_mods))), expected)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_document_ids_undo_the_indptr(lens: list[int]) -> None:
    indptr = torch.tensor([0, *lens]).cumsum(0)
    assert document_ids(indptr).tolist() == [b for b, n in enumerate(lens) for _ in range(n)]


def scores_of(score_mod, scores: Tensor) -> Tensor:
    """A score_mod over `[H, n, m]` scores."""
    heads = torch.arange(len(scores))[:, None, None]
    return score_mod(scores, ZERO, heads, INDICES[:, None], INDICES[None, :])


def test_alibi_adds_the_bias_of_naive_attention() -> None:
    slopes = alibi_slopes(6)
    got = scores_of(alibi(slopes), torch.ones(6, LENGTH, LENGTH))
    torch.testing.assert_close(got, 1 + alibi_bias(slopes, INDICES, INDICES))


@given(st.floats(-1e4, 1e4), st.floats(0.5, 100))
def test_soft_cap_bounds_the_score_and_keeps_small_ones(score: float, cap: float) -> None:
    got = soft_cap(cap)(torch.tensor(score, dtype=torch.float64), ZERO, ZERO, ZERO, ZERO).item()
    assert math.isclose(got, cap * math.tanh(score / cap), abs_tol=1e-12)
    assert abs(got) <= cap


def test_scores_compose_from_left_to_right() -> None:
    scores = torch.randn(4, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) * 5
    cap, bias = soft_cap(2.0), alibi(alibi_slopes(4))
    expected = 2 * torch.tanh(scores / 2) + alibi_bias(alibi_slopes(4), INDICES, INDICES)
    torch.testing.assert_close(scores_of(compose_scores(cap, bias), scores), expected)
    assert not torch.allclose(scores_of(compose_scores(bias, cap), scores), expected)
    assert torch.equal(scores_of(compose_scores(), scores), scores)


def test_documents_in_one_row_are_as_good_as_apart() -> None:
    """Masks and scores together, in FlexAttention itself, against each document alone."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(LENGTH, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    slopes = alibi_slopes(4).double()
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    got = flex_attention(
        heads_first[0],
        heads_first[1],
        heads_first[2],
        score_mod=compose_scores(soft_cap(4.0), alibi(slopes)),
        block_mask=create_block_mask(and_masks(document(IDS), sliding_window(3)), 1, 1, LENGTH, LENGTH, device="cpu"),
        scale=0.3,
        enable_gqa=True,
    )
    for document_id in range(4):
        rows = document_id == IDS
        own = INDICES[rows]
        alone = masked_attention(
            q[rows],
            k[rows],
            v[rows],
            scale=0.3,
            softcap=4.0,
            bias=alibi_bias(slopes, own, own),
            mask=attention_mask(own, own, 3),
        )
        torch.testing.assert_close(got[0].transpose(0, 1)[rows], alone, atol=1e-12, rtol=0)
