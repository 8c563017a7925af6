"""Sampling: filters equal transformers' warpers, samples follow the softmax, and rows ignore each other."""

import math
from collections.abc import Sequence
from dataclasses import replace

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

from mini_engine.errors import RequestError
from mini_engine.sampling import (
    SamplingBatch,
    apply_filters,
    gumbel_argmax,
    gumbel_noise,
    mix32,
    penalize_repetition,
    sample,
    sampling_columns,
)
from mini_engine.sampling_params import SamplingParams

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)

PENALIZED = st.builds(
    lambda params, penalty: replace(params, repetition_penalty=penalty), PARAMS, st.sampled_from([1.0, 1.0, 1.5])
)


def random_logits(rows: int, vocab_size: int = 40, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def build(
    params: Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    seen: torch.Tensor | None = None,
    device: str = "cpu",
) -> SamplingBatch:
    zeros = [0] * len(params)
    return SamplingBatch.build(sampling_columns(params), seeds or zeros, positions or zeros, seen, device)


@settings(deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=5), st.integers(0, 999))
def test_filters_equal_transformers(params, seed):
    logits = random_logits(len(params), seed=seed)
    got = apply_filters(logits, build(params))
    for row, own in enumerate(params):
        want = logits[row : row + 1]
        if own.temperature > 0:  # a greedy row takes the largest logit, which every filter keeps
            scaled = TemperatureLogitsWarper(own.temperature)(None, want)
            if own.top_k:
                scaled = TopKLogitsWarper(own.top_k)(None, scaled)
            scaled = TopPLogitsWarper(own.top_p)(None, scaled)
            scaled = MinPLogitsWarper(own.min_p)(None, scaled)
            want = want.masked_fill(scaled == -torch.inf, -torch.inf)
        assert torch.equal(got[row : row + 1], want), own


def test_a_top_p_of_one_keeps_what_rounding_loses():
    """Tokens too unlikely to change a float32 sum are kept all the same, beside rows with a smaller top_p."""
    logits = torch.tensor([[0.0, -1.0, -30.0, -40.0]]).expand(2, -1)
    params = [SamplingParams(top_k=3, top_p=1.0), SamplingParams(top_k=3, top_p=0.9)]
    kept = apply_filters(logits, build(params)) > -torch.inf
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
    kept = apply_filters(logits, build([params]))
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
@given(st.lists(PENALIZED, min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_a_request_ignores_the_other_rows_and_its_own_row(params, dtype, data):
    rows = len(params)
    logits, seen = random_logits(rows).to(dtype), random_logits(rows, seed=1) > 0

    def draw(order: Sequence[int]) -> list[int]:
        own = [params[i] for i in order]
        penalized = [i for i in order if params[i].repetition_penalty != 1]
        tables = seen[penalized] if penalized else None
        batch = build(own, seeds=[7 + i for i in order], positions=[3 + i for i in order], seen=tables)
        return sample(logits[list(order)], batch).tolist()

    together = draw(range(rows))
    order = data.draw(st.permutations(range(rows)))
    assert draw(order) == [together[i] for i in order]
    assert [draw([i])[0] for i in range(rows)] == together


def test_greedy_rows_take_the_largest_beside_sampled_ones():
    logits = random_logits(2)
    batch = build([SamplingParams(temperature=0.0), SamplingParams()], seeds=[1, 1])
    assert sample(logits, batch)[0] == logits[0].argmax()


def test_repetition_penalty_equals_transformers():
    logits, tokens = random_logits(3), torch.tensor([[3, 5, 3], [0, 0, 0], [0, 1, 39]])
    penalties = [1.3, 1.0, 0.8]
    seen = torch.zeros(2, 40, dtype=torch.bool).scatter_(1, tokens[[0, 2]], True)
    got = penalize_repetition(logits, build([SamplingParams(repetition_penalty=p) for p in penalties], seen=seen))
    for row in range(3):
        want = RepetitionPenaltyLogitsProcessor(penalties[row])(tokens[row : row + 1], logits[row : row + 1])
        torch.testing.assert_close(got[row], want[0])


def test_filters_and_penalties_touch_only_the_rows_that_ask_for_them():
    params = [
        SamplingParams(top_p=0.5), SamplingParams(), SamplingParams(top_k=5, top_p=0.5),
        SamplingParams(temperature=0.0, top_k=99, top_p=0.1, min_p=0.5), SamplingParams(min_p=0.1),
        SamplingParams(top_k=9), SamplingParams(repetition_penalty=1.1), SamplingParams(top_p=0.9, min_p=0.1),
    ]  # fmt: skip
    batch = build(params, seen=torch.ones(1, 40, dtype=torch.bool))
    groups = {group.max_candidates: group.rows.tolist() for group in batch.filters}
    assert groups == {-1: [0, 7], 9: [2, 5], 0: [4]}
    assert batch.penalized_rows.tolist() == [6]
    assert not batch.all_greedy


def test_without_filters_and_penalties_the_logits_are_not_copied():
    logits = random_logits(2)
    batch = build([SamplingParams(), SamplingParams(temperature=0.0, top_k=3)])
    assert apply_filters(logits, batch) is logits
    assert penalize_repetition(logits, batch) is logits


def test_filters_and_penalties_leave_the_models_logits_unchanged():
    logits = random_logits(2)
    before = logits.clone()
    params = [SamplingParams(top_k=2, repetition_penalty=2.0), SamplingParams(top_p=0.5)]
    sample(logits, build(params, seen=torch.ones(1, 40, dtype=torch.bool)))
    assert torch.equal(logits, before)


def test_seen_has_a_row_for_each_penalty():
    penalized = SamplingParams(repetition_penalty=1.1)
    with pytest.raises(ValueError, match="2 rows have a repetition penalty, but seen is None"):
        build([penalized, SamplingParams(), penalized])
    with pytest.raises(ValueError, match="1 rows have a repetition penalty, but seen has 2 rows"):
        build([penalized], seen=torch.zeros(2, 40, dtype=torch.bool))


def test_columns_fit_float32():
    extreme = [
        SamplingParams(temperature=1e300, top_k=2**70, repetition_penalty=1e300),
        SamplingParams(temperature=1e-300, top_p=1e-300, min_p=1e-300, repetition_penalty=1e-300),
    ]
    hot, cold = sampling_columns(extreme)
    assert hot["temperature"] == hot["repetition_penalty"] == torch.finfo(torch.float32).max
    assert hot["top_k"] == 2**31
    assert cold["temperature"] == 0
    assert cold["top_p"] == cold["min_p"] == cold["repetition_penalty"] == torch.finfo(torch.float32).tiny


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
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.5}, {"min_p": math.nan},
        {"repetition_penalty": 0.0}, {"repetition_penalty": math.nan}, {"max_tokens": 0}, {"seed": 2**63},
        {"stop": ""}, {"stop": ["a", ""]}, {"stop_token_ids": [-1]}, {"stop_token_ids": [2**63]},
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_bad_integers_too_long_to_print_are_refused():
    for bad in ({"seed": 10**5000}, {"seed": -(10**5000)}, {"top_k": -(10**5000)}, {"max_tokens": -(10**5000)}):
        with pytest.raises(RequestError, match=next(iter(bad))):
            SamplingParams(**bad)


def test_the_penalty_counts_where_the_largest_logit_is_taken():
    seen = torch.tensor([[True, False]])
    batch = build([SamplingParams(temperature=0.0, repetition_penalty=2.0)], seen=seen)
    assert sample(torch.tensor([[2.0, 1.9]]), batch).tolist() == [1]


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


def random_keys(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return seeds, torch.randint(0, 2**20, (rows,), generator=generator)


def assert_same_draws(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, device: str = "cpu"
) -> None:
    """Compare the kernel with its reference. A draw may differ where rounding decides between two tokens."""
    from mini_engine.kernels.gumbel_argmax import gumbel_argmax as kernel  # needs Triton

    want = gumbel_argmax(logits, temperature, seeds, positions)
    got = kernel(*(x.to(device) for x in (logits, temperature, seeds, positions))).cpu()
    assert got.dtype == torch.int64
    (differing,) = torch.nonzero(got != want, as_tuple=True)
    for row in differing.tolist():
        assert temperature[row] > 0, f"greedy row {row} takes {got[row]}, not {want[row]}"
        noise = gumbel_noise(seeds[[row]], positions[[row]], logits.shape[-1])[0]
        score = logits[row] / temperature[row] + noise
        assert score[want[row]] - score[got[row]] < 1e-4, f"row {row} draws {got[row]}, not {want[row]}"
    assert len(differing) <= 2, "so many near ties are not chance"


KERNEL_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=KERNEL_DEVICES)
def kernel_device(request):
    """Triton's interpreter on a machine without a GPU, the compiled kernel on one with it."""
    pytest.importorskip("triton")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the kernel is compiled")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 1), (1, 3000), (4, 1024), (5, 1025), (3, 2500)])
def test_the_kernel_draws_the_reference_tokens(rows, vocab_size, dtype, kernel_device):
    logits = random_logits(rows, vocab_size).to(dtype)
    temperature = torch.linspace(0, 2, rows) if rows > 1 else torch.tensor([0.6])
    assert_same_draws(logits, temperature, *random_keys(rows), kernel_device)


@pytest.mark.parametrize(("num_programs", "max_splits"), [(1, 256), (8, 256), (10_000, 2)])
def test_the_kernel_splits_rows_among_programs(num_programs, max_splits, kernel_device, monkeypatch):
    from mini_engine.kernels import gumbel_argmax as module

    monkeypatch.setattr(module, "NUM_PROGRAMS", num_programs)
    monkeypatch.setattr(module, "MAX_SPLITS", max_splits)
    assert_same_draws(random_logits(3, 4500), torch.tensor([0.0, 0.6, 1.5]), *random_keys(3), kernel_device)


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0, 3e38])
def test_the_kernel_handles_extreme_logits_and_temperatures(temperature, kernel_device):
    logits = random_logits(6, 2100)
    logits[0] = -torch.inf
    logits[1] = -torch.inf
    logits[1, 2077] = -3.0
    logits[2, 5:] = -torch.inf
    logits[3, [700, 2000]] = torch.inf
    logits[4] *= 1e30 if temperature else 1
    logits[5] = 0
    assert_same_draws(logits, torch.full((6,), temperature), *random_keys(6), kernel_device)


def test_the_kernel_takes_the_lowest_of_equal_logits(kernel_device):
    logits = random_logits(4, 3000, scale=0.5).round().to(torch.bfloat16)
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).min() > 1
    assert_same_draws(logits, torch.zeros(4), *random_keys(4), kernel_device)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_kernel_never_draws_nan(temperature, kernel_device):
    from mini_engine.kernels import gumbel_argmax as module

    logits = torch.full((2, 1500), torch.nan, device=kernel_device)
    logits[1, 1234] = 0
    keys = (x.to(kernel_device) for x in random_keys(2))
    tokens = module.gumbel_argmax(logits, torch.full((2,), temperature, device=kernel_device), *keys)
    assert tokens.tolist() == [0, 1234]


def test_the_kernel_reads_rows_that_are_not_contiguous(kernel_device):
    logits = random_logits(3, 1500)
    temperature, keys = torch.tensor([0.0, 0.5, 1.0]), random_keys(3)
    assert_same_draws(logits[:, ::2], temperature, *keys, kernel_device)
    assert_same_draws(logits[:, 3:1100], temperature, *keys, kernel_device)
    assert_same_draws(logits[:1].expand(3, -1), temperature, *keys, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 64])
def test_draws_on_a_gpu_equal_the_reference_for_a_large_vocabulary(rows, dtype):
    logits = random_logits(rows, 151_936).to(dtype)
    temperature = torch.rand(rows, generator=torch.Generator().manual_seed(1)) * 2
    temperature[rows // 2 :: 4] = 0
    assert_same_draws(logits, temperature, *random_keys(rows), "cuda")


@pytest.mark.gpu
def test_noise_on_a_gpu_equals_the_noise_on_a_cpu():
    seeds, positions = random_keys(32)
    device = gumbel_noise(seeds.cuda(), positions.cuda(), 50_000).cpu()
    torch.testing.assert_close(gumbel_noise(seeds, positions, 50_000), device, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_samples_with_filters_and_penalties_are_the_same_on_a_gpu(dtype):
    kinds = [
        SamplingParams(top_k=20, top_p=0.9), SamplingParams(temperature=0.7), SamplingParams(temperature=0.0),
        SamplingParams(min_p=0.05), SamplingParams(top_p=0.8), SamplingParams(top_k=50, repetition_penalty=1.3),
    ]  # fmt: skip
    params, positions = kinds * 6, range(36)
    seeds = [2**40 * i for i in range(36)]
    logits, seen = random_logits(36, 50_000).to(dtype), random_logits(6, 50_000, seed=1) > 1
    on_host = sample(logits, build(params, seeds, positions, seen))
    on_device = sample(logits.cuda(), build(params, seeds, positions, seen.cuda(), "cuda"))
    assert on_host.tolist() == on_device.tolist()
