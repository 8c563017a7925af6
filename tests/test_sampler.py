"""The sampler's state: every mixture of parameters equals the oracle in float64, step after step."""

import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from mini_engine.errors import RequestError
from mini_engine.sampler import Sampler, logprobs_of, pack_bits, unpack_bits
from mini_engine.sampling import SamplingBatch, sample
from mini_engine.sampling_params import (
    MAX_BAD_WORDS,
    MAX_EDITS,
    Admission,
    SamplingParams,
    check_tokens,
    tokenize_bad_words,
)
from tests.sampling_oracle import adjusted, admissions, assert_sampled, kept, rough_logits


@settings(max_examples=40)
@given(st.data(), st.integers(5, 70), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_every_mixture_equals_the_oracle(data, vocab_size, dtype):
    admitted = data.draw(admissions(vocab_size))
    sampler = Sampler(7, vocab_size)
    for row in range(7):  # what earlier requests leave behind
        sampler.enter([Admission(row, SamplingParams(presence_penalty=2.0), 1, range(vocab_size), [1, 2] * 20)])
    sampler.enter(pickle.loads(pickle.dumps(admitted)))
    outputs = {one.row: list(one.output_token_ids) for one in admitted}
    for step in range(4):
        order = data.draw(st.permutations(admitted))
        logits = rough_logits(len(order), vocab_size, step).to(dtype)
        before = logits.clone()
        positions = [len(one.prompt_token_ids) + len(outputs[one.row]) for one in order]
        tokens = sampler.sample(logits, torch.tensor([one.row for one in order]), torch.tensor(positions)).tolist()
        assert torch.equal(logits, before)
        for one, row, position, token in zip(order, logits, positions, tokens, strict=True):
            assert_sampled(token, adjusted(row.tolist(), one, outputs[one.row]), one, position)
            outputs[one.row].append(token)


@settings(max_examples=25)
@given(st.data(), st.integers(5, 70))
def test_a_row_ignores_the_others(data, vocab_size):
    admitted = data.draw(admissions(vocab_size))
    logits = rough_logits(7, vocab_size, 3)

    def tokens_of(order: Sequence[Admission]) -> dict[int, list[int]]:
        sampler = Sampler(7, vocab_size)
        sampler.enter(order)
        drawn: dict[int, list[int]] = {one.row: [] for one in order}
        for step in range(3):
            at = [len(one.prompt_token_ids) + len(one.output_token_ids) + step for one in order]
            rows = torch.tensor([one.row for one in order])
            for one, token in zip(order, sampler.sample(logits[rows], rows, torch.tensor(at)).tolist(), strict=True):
                drawn[one.row].append(token)
        return drawn

    together = tokens_of(admitted)
    assert tokens_of(data.draw(st.permutations(admitted))) == together
    for one in admitted:
        assert tokens_of([one]) == {one.row: together[one.row]}


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.5}, {"presence_penalty": 1.0}]
)
def test_a_row_of_nan_gives_a_token_and_harms_no_other_row(given):
    want = []
    for broken in (False, True):
        sampler = Sampler(3, 40)
        sampler.enter([Admission(row, SamplingParams(**given), row, [1]) for row in range(3)])
        logits = rough_logits(3, 40, 1)
        if broken:
            logits[1] = torch.nan
        tokens = sampler.sample(logits, torch.arange(3), torch.tensor([1, 1, 1]))
        assert 0 <= tokens[1] < 40
        want.append(tokens[[0, 2]].tolist())
    assert want[0] == want[1]


def test_repetition_penalty_equals_transformers():
    logits, penalty = rough_logits(1, 40, 2), 1.3
    sampler = Sampler(1, 40)
    sampler.enter([Admission(0, SamplingParams(repetition_penalty=penalty), 0, [3, 5, 3], [7])])
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[3, 5, 3, 7]]), logits)
    torch.testing.assert_close(sampler.adjust(logits, torch.tensor([0]), torch.tensor([4])), want)


def test_without_adjustments_the_logits_are_not_copied():
    sampler, logits = Sampler(2, 40), rough_logits(2, 40, 0)
    sampler.enter([Admission(0, SamplingParams(), 0, [1]), Admission(1, SamplingParams(top_k=3), 0, [1])])
    assert sampler.adjust(logits, torch.tensor([1, 0]), torch.tensor([1, 1])) is logits


def test_a_readers_own_sampler_gets_the_adjusted_logits_and_the_rows_columns():
    seen: list[tuple[torch.Tensor, SamplingBatch]] = []

    def own(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        seen.append((logits, batch))
        return sample(logits, batch)

    sampler = Sampler(4, 6, sample=own)
    sampler.enter(
        [
            Admission(2, SamplingParams(top_k=2, logit_bias={4: 100.0}), 9, [0]),
            Admission(0, SamplingParams(top_p=0.5), 8, [0]),
        ]
    )
    assert sampler.sample(torch.zeros(2, 6), torch.tensor([2, 0]), torch.tensor([5, 6]))[0] in range(6)
    [(logits, batch)] = seen
    assert logits[0].tolist() == [0, 0, 0, 0, 100, 0] and logits[1].tolist() == [0] * 6
    assert batch.top_k.tolist() == [2, 0] and batch.top_p.tolist() == [1.0, 0.5]
    assert batch.seeds.tolist() == [9, 8] and batch.positions.tolist() == [5, 6]


def test_masks_can_be_replaced_between_steps():
    sampler = Sampler(2, 70)
    sampler.enter([Admission(1, SamplingParams(temperature=0.0, allowed_token_ids=[0]), 0, [1])])
    logits, row = torch.arange(70.0)[None], torch.tensor([1])
    assert sampler.sample(logits, row, torch.tensor([1])).tolist() == [0]
    for allowed in ([5, 33], [64], range(69)):
        sampler.allow(row, torch.from_numpy(pack_bits(list(allowed), 70))[None])
        assert sampler.sample(logits, row, torch.tensor([1])).tolist() == [max(allowed)]


@given(st.integers(1, 100), st.data())
def test_bit_masks_hold_any_set(vocab_size, data):
    chosen = data.draw(st.sets(st.integers(0, vocab_size - 1)))
    bits = unpack_bits(torch.from_numpy(pack_bits(sorted(chosen), vocab_size))[None], vocab_size)
    assert set(bits[0].nonzero()[:, 0].tolist()) == chosen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 5, -1])
def test_logprobs_are_those_of_the_models_logits(num_top, dtype):
    logits = torch.randn(130, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.arange(130) % 40
    got = logprobs_of(logits, tokens, num_top)
    want = torch.log_softmax(logits.double(), -1)
    size = 40 if num_top == -1 else num_top
    assert got.token_ids.shape == got.logprobs.shape == (130, size + 1)
    torch.testing.assert_close(got.logprobs.double(), want.gather(-1, got.token_ids), atol=1e-5, rtol=1e-5)
    assert torch.equal(got.token_ids[:, 0], tokens)
    assert torch.equal(got.logprobs[:, 1:], got.logprobs[:, 1:].sort(-1, descending=True).values)
    for row, token in enumerate(tokens.tolist()):
        assert got.ranks[row] == (logits[row] >= logits[row, token]).sum()


def test_the_oracle_itself():
    """Small cases by hand: 1/2, 1/4, 1/8, 1/8."""
    four = np.log([0.5, 0.25, 0.125, 0.125])

    def among(**given: float) -> set[int]:
        return kept(four, Admission(0, SamplingParams(**given), 0, [0]))[0]

    assert among(top_p=0.6) == among(top_k=2) == among(min_p=0.3) == {0, 1}
    assert among(top_k=3) == {0, 1, 2, 3}  # the third and the fourth tie
    assert among(top_k=2, top_p=0.6) == {0}  # 2/3 of what top-k keeps


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("logit_bias", {"logit_bias": {50: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [1, 50]}),
        ("bad_words", {"bad_words_token_ids": [[1, 50]]}),
        ("logprobs", {"logprobs": 51}),
        ("prompt_logprobs", {"prompt_logprobs": 51}),
    ],
)
def test_tokens_that_do_not_exist_are_refused(name, given):
    with pytest.raises(RequestError, match=name):
        check_tokens(SamplingParams(**given), 50)
    check_tokens(SamplingParams(**given), 51)


def test_more_tokens_than_the_tables_hold_are_refused():
    at_most = SamplingParams(logit_bias=dict.fromkeys(range(MAX_EDITS), 1.0), min_tokens=1)
    check_tokens(at_most, 5000, end_token_ids=[3])
    with pytest.raises(RequestError, match="allowed_token_ids"):
        check_tokens(at_most, 5000, end_token_ids=[4999])
    check_tokens(SamplingParams(bad_words_token_ids=[[1, 2]] * MAX_BAD_WORDS), 50)
    for words in ([[1, 2]] * (MAX_BAD_WORDS + 1), [[1] * 33]):
        with pytest.raises(RequestError, match="bad_words"):
            check_tokens(SamplingParams(bad_words_token_ids=words), 50)


def test_bad_words_are_found_at_the_start_and_after_a_space():
    ids = {"bad": [1], " bad": [2], "very bad": [3, 4], " very bad": [5, 4], "x": [6], " x": [7, 6]}
    words = tokenize_bad_words([" bad", "very bad", "x"], lambda text: ids[text])
    assert words == ((1,), (2,), (3, 4), (5, 4), (6,))


def test_parameters_of_the_same_values_are_equal_and_have_a_hash():
    one = SamplingParams(logit_bias={3: 1.0}, stop_token_ids=[5], bad_words_token_ids=[[1, 2]])
    assert one == replace(one) == pickle.loads(pickle.dumps(one)) and len({one, replace(one)}) == 1
