"""Sampling in float64, one row and one token at a time: the oracle of the samplers; and requests to try it on."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from mini_engine.sampling import MIN_TEMPERATURE, gumbel_noise
from mini_engine.sampling_params import Admission, SamplingParams

END = 3


@st.composite
def params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Any mixture of everything that changes logits."""
    tokens = st.integers(0, vocab_size - 1)

    def maybe(*values: object) -> st.SearchStrategy:
        return st.sampled_from([values[0], *values])

    words = st.lists(tokens, min_size=1, max_size=3)
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0])),
        top_k=draw(maybe(0, 1, 3, 7, vocab_size - 1, vocab_size, 10**12)),
        top_p=draw(maybe(1.0, 0.9, 0.5, 0.01, 0.999)),
        min_p=draw(maybe(0.0, 0.05, 0.5, 1.0)),
        repetition_penalty=draw(maybe(1.0, 1.3, 0.7)),
        presence_penalty=draw(maybe(0.0, 0.5, -2.0)),
        frequency_penalty=draw(maybe(0.0, 0.25, -1.0)),
        min_tokens=draw(maybe(0, 2, 5)),
        logit_bias=draw(maybe(None, {}) | st.dictionaries(tokens, st.sampled_from([-50.0, 1.5, 20.0]), max_size=5)),
        bad_words_token_ids=draw(st.just(()) | st.lists(words, max_size=4)),
        allowed_token_ids=draw(st.none() | st.lists(tokens, min_size=1, max_size=vocab_size)),
    )


@st.composite
def admissions(draw: st.DrawFn, vocab_size: int, max_rows: int = 5) -> list[Admission]:
    """Requests in any rows; some have been preempted and have an output already."""
    tokens = st.integers(0, vocab_size - 1)
    rows = draw(st.lists(st.integers(0, 6), unique=True, min_size=1, max_size=max_rows))
    return [
        Admission(
            row,
            draw(params(vocab_size)),
            draw(st.sampled_from([0, 7, 2**40, -(2**62)])),
            draw(st.lists(tokens, min_size=1, max_size=4)),
            draw(st.just([]) | st.lists(tokens, max_size=40)),
            (END,),
        )
        for row in rows
    ]


def rough_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Logits with ties, and some of -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 3 * 2).round() / 2
    return logits.masked_fill(torch.rand(rows, vocab_size, generator=generator) < 0.1, -torch.inf)


def adjusted(logits: Sequence[float], one: Admission, output: Sequence[int]) -> np.ndarray:
    """Bias, penalties, and forbidden tokens of one row whose output has some tokens so far."""
    params, counts = one.params, Counter(output)
    values = np.array(logits, dtype=np.float64)
    for token, bias in (params.logit_bias or {}).items():
        values[token] += bias
    for token in {*one.prompt_token_ids, *output}:
        value = values[token]
        values[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        values[token] -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
    if params.allowed_token_ids is not None:
        values[[token for token in range(len(values)) if token not in params.allowed_token_ids]] = -math.inf
    if len(output) < params.min_tokens:
        values[list(one.end_token_ids)] = -math.inf
    for *start, last in params.bad_words_token_ids:
        if list(output[len(output) - len(start) :]) == start:
            values[last] = -math.inf
    return values


def kept(values: np.ndarray, one: Admission) -> tuple[set[int], bool]:
    """The tokens that the filters of one row keep, and whether no rounding of a float32 could change them."""
    params = one.params
    if params.temperature < MIN_TEMPERATURE or not np.isfinite(values).any():
        return set(range(len(values))), True
    scaled = values / params.temperature
    best = sorted(scaled, reverse=True)[: params.top_k or len(scaled)]
    weights = [math.exp(value - best[0]) for value in best]
    total, reached, num_kept, is_clear = sum(weights), 0.0, 0, True
    for weight in weights:
        if params.top_p < 1 and num_kept and reached >= params.top_p * total:
            break
        reached += weight
        num_kept += 1
        is_clear &= params.top_p == 1 or abs(reached - params.top_p * total) > 1e-4 * total
    threshold = best[num_kept - 1]
    if params.min_p > 0:
        limit = best[0] + math.log(params.min_p)
        is_clear &= params.min_p == 1 or min(abs(value - limit) for value in scaled) > 1e-4
        threshold = max(threshold, limit)
    return set(np.flatnonzero(scaled >= threshold - 1e-12 * abs(threshold)).tolist()), is_clear


def assert_sampled(token: int, values: np.ndarray, one: Admission, position: int) -> None:
    """The token has the largest sum of scaled logit and noise among those kept; rounding may decide near ties."""
    among, is_clear = kept(values, one)
    if one.params.temperature < MIN_TEMPERATURE:
        assert values[token] >= values.max() - 1e-4, one.params
        return
    noise = gumbel_noise(torch.tensor([one.seed]), torch.tensor([position]), len(values))[0].double().numpy()
    scores = values / one.params.temperature + noise
    if is_clear:
        assert token in among, one.params
        assert scores[token] >= scores[list(among)].max() - 1e-3, one.params
