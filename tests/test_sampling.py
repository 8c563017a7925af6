"""Sampling: filters equal transformers' warpers, samples follow the softmax, and neighbours have no say."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_engine.batch import SamplingBatch
from mini_engine.errors import RequestError
from mini_engine.sampling import filter_logits, gumbel_noise, mix32, penalize_repetition, sample
from mini_engine.sampling_params import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def random_logits(rows: int, vocab_size: int = 40, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@settings(deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 999))
def test_filters_equal_transformers(params, seed):
    logits = random_logits(len(params), seed=seed)
    batch = SamplingBatch.build(params, seeds=[0] * len(params), positions=[0] * len(params))
    got = filter_logits(logits, batch.top_k, batch.top_p, batch.min_p, batch.max_candidates)
    for row, own in enumerate(params):
        want = logits[row : row + 1]
        if own.top_k:
            want = TopKLogitsWarper(own.top_k)(None, want)
        want = TopPLogitsWarper(own.top_p)(None, want)
        want = MinPLogitsWarper(own.min_p)(None, want)
        assert torch.equal(got[row : row + 1], want), own


def test_a_top_p_of_one_keeps_what_rounding_loses():
    """Weights below a float's last digit change no sum; they stay all the same, beside rows that ask for less."""
    logits = torch.tensor([[0.0, -1.0, -30.0, -40.0]]).expand(2, -1)
    params = [SamplingParams(top_k=3, top_p=1.0), SamplingParams(top_k=3, top_p=0.9)]
    batch = SamplingBatch.build(params, seeds=[0, 0], positions=[0, 0])
    kept = filter_logits(logits, batch.top_k, batch.top_p, batch.min_p, batch.max_candidates) > -torch.inf
    assert kept.tolist() == [[True, True, True, False], [True, True, False, False]]


def test_temperature_equals_transformers():
    """The likelihoods of samples at a temperature are those of transformers' scaled logits."""
    logits = random_logits(1, 5, scale=1.0)
    want = TemperatureLogitsWarper(0.7)(None, logits).softmax(-1)[0]
    assert_follows(want, draw(logits, SamplingParams(temperature=0.7), 20_000))


def draw(logits: torch.Tensor, params: SamplingParams, times: int) -> torch.Tensor:
    """How often each token comes up in `times` positions of one request."""
    batch = SamplingBatch.build([params] * times, seeds=[11] * times, positions=list(range(times)))
    return torch.bincount(sample(logits.expand(times, -1), batch), minlength=logits.shape[-1])


def assert_follows(probabilities: torch.Tensor, counts: torch.Tensor) -> None:
    """Pearson's chi-squared test, at a level that a right sampler misses once in about ten thousand seeds."""
    expected = probabilities * counts.sum()
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.6), SamplingParams(min_p=0.2)]
)
def test_samples_follow_the_filtered_softmax(params):
    logits = random_logits(1, 12, seed=5, scale=1.5)
    batch = SamplingBatch.build([params], seeds=[0], positions=[0])
    kept = filter_logits(logits, batch.top_k, batch.top_p, batch.min_p, batch.max_candidates)
    assert_follows(kept.softmax(-1)[0], draw(logits, params, 20_000))


def test_noise_is_standard_gumbel_and_independent():
    noise = gumbel_noise(torch.arange(64), torch.arange(64), 4096)
    assert abs(noise.mean() - 0.57722) < 0.01  # Euler's constant
    assert abs(noise.var() - math.pi**2 / 6) < 0.02
    by_row = torch.corrcoef(noise)
    assert (by_row - torch.eye(64)).abs().max() < 0.1
    assert abs(torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]) < 0.01
    assert noise.isfinite().all()


def test_noise_depends_on_seed_position_and_token_alone():
    seeds, positions = torch.tensor([5, 5, 6, -(2**62)]), torch.tensor([1, 2, 1, 1])
    noise = gumbel_noise(seeds, positions, 1000)
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 700)
        assert torch.equal(noise[row, :700], alone[0])
    assert len({tuple(row[:8].tolist()) for row in noise}) == 4


def test_mix32_is_the_published_function():
    def lowbias32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    inputs = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1, 0x9E3779B9]
    signed = torch.tensor([x - 2**32 if x >= 2**31 else x for x in inputs], dtype=torch.int32)
    assert [x % 2**32 for x in mix32(signed).tolist()] == [lowbias32(x) for x in inputs]


@settings(deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.data())
def test_a_request_ignores_its_neighbours_and_its_row(params, data):
    rows = len(params)
    logits, seeds, positions = random_logits(rows), list(range(7, 7 + rows)), list(range(3, 3 + rows))
    together = sample(logits, SamplingBatch.build(params, seeds, positions))
    order = data.draw(st.permutations(range(rows)))
    shuffled = SamplingBatch.build([params[i] for i in order], [seeds[i] for i in order], [positions[i] for i in order])
    assert sample(logits[list(order)], shuffled).tolist() == together[list(order)].tolist()
    for i in range(rows):
        alone = SamplingBatch.build(params[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        assert sample(logits[i : i + 1], alone).item() == together[i]


def test_greedy_rows_take_the_largest_beside_sampled_ones():
    logits = random_logits(2)
    batch = SamplingBatch.build([SamplingParams(temperature=0.0), SamplingParams()], seeds=[1, 1], positions=[0, 0])
    assert sample(logits, batch)[0] == logits[0].argmax()


def test_repetition_penalty_equals_transformers():
    logits, tokens = random_logits(2), torch.tensor([[3, 5, 3], [0, 1, 39]])
    seen = torch.zeros(2, 40, dtype=torch.bool).scatter_(1, tokens, True)
    penalties = torch.tensor([1.3, 0.8])
    got = penalize_repetition(logits, seen, penalties)
    for row in range(2):
        want = RepetitionPenaltyLogitsProcessor(penalties[row].item())(tokens[row : row + 1], logits[row : row + 1])
        torch.testing.assert_close(got[row], want[0])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.5}, {"min_p": math.nan},
        {"repetition_penalty": 0.0}, {"repetition_penalty": math.nan}, {"max_tokens": 0}, {"seed": 2**63},
        {"stop": ""}, {"stop": ["a", ""]}, {"stop_token_ids": [-1]},
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_the_penalty_counts_where_the_largest_logit_is_taken():
    seen = torch.tensor([[True, False]])
    batch = SamplingBatch.build([SamplingParams(temperature=0.0, repetition_penalty=2.0)], [0], [0], seen)
    assert sample(torch.tensor([[2.0, 1.9]]), batch).tolist() == [1]


def test_filters_see_what_the_temperature_has_made_of_the_logits():
    """At a temperature of 4 the first token has 58 % and top_p = 0.7 keeps a second; at 1 it has 96 %."""
    params = [SamplingParams(temperature=4.0, top_p=0.7)] * 500
    batch = SamplingBatch.build(params, [1] * 500, list(range(500)))
    assert set(sample(torch.tensor([[4.0, 0.0, 0.0]]).expand(500, -1), batch).tolist()) != {0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-300])
def test_a_temperature_next_to_zero_is_greedy(temperature):
    """Divided by it, both logits would be infinite."""
    batch = SamplingBatch.build([SamplingParams(temperature=temperature, top_p=0.9)] * 20, range(20), [0] * 20)
    assert set(sample(torch.tensor([[5e5, 9e5]]).expand(20, -1), batch).tolist()) == {1}


def test_both_halves_of_a_seed_count():
    one, other = gumbel_noise(torch.tensor([1, 1 + 2**32]), torch.tensor([3, 3]), 50)
    assert not torch.equal(one, other)


@pytest.mark.gpu
def test_same_samples_on_the_gpu():
    seeds, positions = torch.arange(32) * 2**40, torch.arange(32)
    host = gumbel_noise(seeds, positions, 50_000)
    device = gumbel_noise(seeds.cuda(), positions.cuda(), 50_000).cpu()
    torch.testing.assert_close(host, device, atol=1e-5, rtol=1e-5)
    params = [SamplingParams(top_k=20, top_p=0.9)] * 32
    logits = random_logits(32, 50_000)
    on_host = sample(logits, SamplingBatch.build(params, seeds.tolist(), positions.tolist()))
    on_device = sample(logits.cuda(), SamplingBatch.build(params, seeds.tolist(), positions.tolist(), device="cuda"))
    assert on_host.tolist() == on_device.tolist()
