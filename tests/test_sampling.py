"""Sampling: filters equal transformers' warpers, samples follow the softmax, and rows ignore each other."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_engine.errors import RequestError
from mini_engine.sampling import (
    SamplingBatch,
    filter_logits,
    gumbel_noise,
    mix32,
    penalize,
    sample,
    sampling_records,
)
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


def build(
    params: Sequence[SamplingParams], seeds: Sequence[int] | None = None, positions: Sequence[int] | None = None
) -> SamplingBatch:
    zeros = [0] * len(params)
    return SamplingBatch.build(params, seeds or zeros, positions or zeros)


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The logits that each row's filters keep, divided by its temperature."""
    batch = build(params)
    scaled = logits / torch.where(batch.temperature == 0, 1, batch.temperature)[:, None]
    return filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p)


@settings(deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 999))
def test_filters_equal_transformers(params, seed):
    logits = random_logits(len(params), seed=seed)
    got = filtered(logits, params)
    for row, own in enumerate(params):
        want = logits[row : row + 1]
        if own.temperature > 0:  # a greedy row takes the largest logit, which every filter keeps
            want = TemperatureLogitsWarper(own.temperature)(None, want)
            if own.top_k:
                want = TopKLogitsWarper(own.top_k)(None, want)
            want = TopPLogitsWarper(own.top_p)(None, want)
            want = MinPLogitsWarper(own.min_p)(None, want)
        assert torch.equal(got[row : row + 1], want), own


def test_a_top_p_of_one_keeps_what_rounding_loses():
    """Tokens too unlikely to change a float32 sum are kept all the same, beside rows with a smaller top_p."""
    logits = torch.tensor([[0.0, -1.0, -30.0, -40.0]]).expand(2, -1)
    params = [SamplingParams(top_k=3, top_p=1.0), SamplingParams(top_k=3, top_p=0.9)]
    kept = filtered(logits, params) > -torch.inf
    assert kept.tolist() == [[True, True, True, False], [True, True, False, False]]


def test_temperature_equals_transformers():
    """The likelihoods of samples at a temperature are those of transformers' scaled logits."""
    logits = random_logits(1, 5, scale=1.0)
    want = TemperatureLogitsWarper(0.7)(None, logits).softmax(-1)[0]
    assert_follows(want, draw(logits, SamplingParams(temperature=0.7), 20_000))


def draw(logits: torch.Tensor, params: SamplingParams, times: int) -> torch.Tensor:
    """How often each token comes up in `times` positions of one request."""
    batch = build([params] * times, seeds=[11] * times, positions=range(times))
    return torch.bincount(sample(logits.expand(times, -1), batch), minlength=logits.shape[-1])


def assert_follows(probabilities: torch.Tensor, counts: torch.Tensor) -> None:
    """Pearson's chi-squared test, at a level that a correct sampler fails for about one seed in ten thousand."""
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
    kept = filtered(logits, [params])
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
@given(st.lists(PARAMS, min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_a_request_ignores_the_other_rows_and_its_own_row(params, dtype, data):
    rows = len(params)
    logits = random_logits(rows).to(dtype)

    def draw(order: Sequence[int]) -> list[int]:
        batch = build([params[i] for i in order], seeds=[7 + i for i in order], positions=[3 + i for i in order])
        return sample(logits[list(order)], batch).tolist()

    together = draw(range(rows))
    order = data.draw(st.permutations(range(rows)))
    assert draw(order) == [together[i] for i in order]
    assert [draw([i])[0] for i in range(rows)] == together


def test_greedy_rows_take_the_largest_beside_sampled_ones():
    logits = random_logits(2)
    batch = build([SamplingParams(temperature=0.0), SamplingParams()], seeds=[1, 1])
    assert sample(logits, batch)[0] == logits[0].argmax()


def test_sampling_leaves_the_models_logits_unchanged():
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, build([SamplingParams(top_k=2), SamplingParams(top_p=0.5)]))
    assert torch.equal(logits, before)


def test_penalties_of_prompt_and_output():
    """Token 0 is in the prompt, 1 twice in the output, 2 in both, 3 in neither; the fifth logit is negative."""
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0, -2.0]])
    in_prompt = torch.tensor([[True, False, True, False, True]])
    counts = torch.tensor([[0, 2, 1, 0, 0]])
    got = penalize(logits, in_prompt, counts, *(torch.tensor([x]) for x in (2.0, 0.25, 0.5)))
    assert got.tolist() == [[1.0, 1.0 - 0.25 - 2 * 0.5, 1.0 - 0.25 - 0.5, 2.0, -4.0]]


def test_records_fit_float32():
    extreme = [
        SamplingParams(temperature=1e300, top_k=2**70, repetition_penalty=1e300),
        SamplingParams(temperature=1.0, top_p=1e-300, min_p=1e-300, repetition_penalty=1e-300),
        SamplingParams(temperature=1e-300, top_p=0.5, top_k=3, min_p=0.5),
    ]
    hot, small, greedy = sampling_records(extreme, [1, -(2**63), 2**63 - 1])
    assert hot["temperature"] == hot["repetition_penalty"] == torch.finfo(torch.float32).max
    assert hot["top_k"] == 2**31 - 1
    assert small["top_p"] == small["min_p"] == small["repetition_penalty"] == torch.finfo(torch.float32).tiny
    assert [record["seed"] for record in (hot, small, greedy)] == [1, -(2**63), 2**63 - 1]
    # A greedy row has no filters, because each of them keeps the largest logit.
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"], greedy["min_p"]) == (0, 0, 1, 0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=3), SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.5), SamplingParams(temperature=1e300),
    ],
)  # fmt: skip
def test_a_row_of_nan_gives_a_token_and_harms_no_other_row(params):
    logits = random_logits(3)
    batch = build([params] * 3, seeds=[1, 2, 3])
    want = sample(logits, batch)
    logits[1] = torch.nan
    got = sample(logits, batch)
    assert 0 <= got[1] < 40
    assert got[[0, 2]].tolist() == want[[0, 2]].tolist()


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -2},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.5}, {"min_p": math.nan},
        {"repetition_penalty": 0.0}, {"repetition_penalty": math.nan}, {"max_tokens": 0}, {"seed": 2**63},
        {"stop": ""}, {"stop": ["a", ""]}, {"stop_token_ids": [-1]}, {"stop_token_ids": [2**63]}, {"n": 0},
        {"presence_penalty": 2.1}, {"frequency_penalty": -2.1}, {"frequency_penalty": math.nan}, {"min_tokens": -1},
        {"min_tokens": 9, "max_tokens": 8}, {"logprobs": -2}, {"prompt_logprobs": -2}, {"logit_bias": {1: math.nan}},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: math.inf}}, {"allowed_token_ids": []}, {"bad_words": [""]},
        {"allowed_token_ids": [-1]}, {"bad_words_token_ids": [[]]}, {"stop": "a", "detokenize": False},
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_other_spellings_mean_the_same():
    plain = SamplingParams()
    assert SamplingParams(top_k=-1) == plain and SamplingParams(seed=-1) == plain
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == plain
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(stop="a").stop == ("a",)


def test_bad_integers_too_long_to_print_are_refused():
    for bad in ({"seed": 10**5000}, {"seed": -(10**5000)}, {"top_k": -(10**5000)}, {"max_tokens": -(10**5000)}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_filters_see_what_the_temperature_has_made_of_the_logits():
    """At a temperature of 4 the first token has 58% and top_p = 0.7 keeps a second; at 1 it has 96%."""
    params = [SamplingParams(temperature=4.0, top_p=0.7)] * 500
    batch = build(params, [1] * 500, range(500))
    assert set(sample(torch.tensor([[4.0, 0.0, 0.0]]).expand(500, -1), batch).tolist()) != {0}


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-300])
def test_a_temperature_next_to_zero_is_greedy(temperature):
    """Divided by it, both logits would be infinite."""
    batch = build([SamplingParams(temperature=temperature, top_p=0.9)] * 20, range(20))
    assert set(sample(torch.tensor([[5e5, 9e5]]).expand(20, -1), batch).tolist()) == {1}


def test_both_halves_of_a_seed_count():
    one, other = gumbel_noise(torch.tensor([1, 1 + 2**32]), torch.tensor([3, 3]), 50)
    assert not torch.equal(one, other)


def test_noise_does_not_depend_on_how_the_vocabulary_is_split():
    seeds, positions = torch.tensor([3, 4, 5]), torch.tensor([0, 1, 2])
    together = gumbel_noise(seeds, positions, 70_000)
    for row in range(3):
        assert torch.equal(gumbel_noise(seeds[[row]], positions[[row]], 70_000)[0], together[row])


@pytest.mark.gpu
def test_noise_on_a_gpu_equals_the_noise_on_a_cpu():
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (32,), generator=generator)
    positions = torch.randint(0, 2**20, (32,), generator=generator)
    device = gumbel_noise(seeds.cuda(), positions.cuda(), 50_000).cpu()
    torch.testing.assert_close(gumbel_noise(seeds, positions, 50_000), device, atol=1e-5, rtol=1e-5)
