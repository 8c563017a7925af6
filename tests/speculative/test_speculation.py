"""Speculative decoding in the whole engine: the same tokens in fewer steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.errors import ConfigError
from mini_engine.sampling_params import SamplingParams
from mini_engine.speculative.config import SpeculativeConfig
from mini_engine.speculative.drafter import num_accepted
from tests.helpers import double_model, let_all_guesses_pay, make_engine, make_text_engine, serve

CONFIGS = [
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 4, "suffix_min_length": 1},
]
of_every_method = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
# Words that repeat, so that most guesses are right at first, and a model without meaning, so that many are wrong.
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=6), st.integers(0, 5))
def test_guesses_count_up_to_the_first_wrong_one(pairs, num_drafted):
    sampled, drafted = np.array([*pairs, (0, 0)]).T
    num_drafted = min(num_drafted, len(pairs))
    right = [a == b for a, b in pairs[:num_drafted]] + [False]
    assert num_accepted(sampled[None], drafted[None, :-1], np.array([num_drafted])).tolist() == [right.index(False)]


def steps_and_tokens(temperature: float, **options) -> tuple[int, dict[str, list[int]]]:
    engine = make_engine(double_model("llama"), num_pages=100, page_size=4, pipeline_depth=0, **options)
    let_all_guesses_pay(engine)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    tokens = serve(engine, {0: [("a", PROMPT, params), ("b", PROMPT[:3], params)]})
    return engine.metrics.steps, tokens


@of_every_method
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_take_fewer_steps(temperature, config) -> None:
    """The greedy output of a model without meaning soon repeats itself; what it samples does not."""
    steps, tokens = steps_and_tokens(temperature)
    fewer, same = steps_and_tokens(temperature, speculative_config=config)
    assert same == tokens and (fewer < steps or temperature)
    little_room = {"max_batch_size": 2, "max_num_batched_tokens": 3}
    assert steps_and_tokens(temperature, speculative_config=config, **little_room)[1] == tokens


@of_every_method
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=30, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, min_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=30, bad_words=["w9 w9"], ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=30, seed=1, top_k=3, stop_token_ids=[9, 11]),
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0.3, max_tokens=30, seed=2, n=3, ignore_eos=True),
    ],
    ids=str,
)
def test_what_a_request_may_ask_for(params: SamplingParams, config) -> None:
    """Beside another request, whose guesses are computed in the same steps."""
    other = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    want, got = (
        make_text_engine(double_model("qwen3"), pipeline_depth=0, speculative_config=own).generate(
            [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:7]}], [params, other]
        )
        for own in (None, config)
    )
    for one, another in zip(want, got, strict=True):
        assert [own.token_ids for own in one.outputs] == [own.token_ids for own in another.outputs]
        assert [own.finish_reason for own in one.outputs] == [own.finish_reason for own in another.outputs]
        for own, of_guesses in zip(one.outputs, another.outputs, strict=True):
            assert (own.logprobs is None) == (of_guesses.logprobs is None)
            for a, b in zip(own.logprobs or [], of_guesses.logprobs or [], strict=True):
                assert a.keys() == b.keys() and all(np.isclose(a[i].logprob, b[i].logprob) for i in a)


@of_every_method
def test_a_stop_string_ends_the_text_in_the_middle_of_right_guesses(config) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = []
    for own in (None, config):
        engine = make_text_engine(double_model("llama"), pipeline_depth=0, speculative_config=own)
        whole = engine.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0]
        for place in range(3, 40, 4):
            stop = whole.text.split()[place]
            output = engine.generate([{"prompt_token_ids": PROMPT}], replace(params, stop=[stop]))[0].outputs[0]
            assert output.finish_reason == "stop" and output.text == whole.text[: whole.text.index(stop)]
            texts.append((place, output.text, output.token_ids))
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]


def test_impossible_options_are_refused() -> None:
    model = double_model("llama")
    for config, match in [
        ({"method": "magic"}, "choose from ngram, suffix"),
        ({"num_speculative_tokens": 3}, "method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1"),
        ({"method": "ngram", "model": "x"}, "of the method 'draft_model'"),
        ({"method": "ngram", "modell": "x"}, "has no 'modell'"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "more than"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "more than"),
        ({"method": "ngram", "suffix_min_length": 2}, "of the method 'suffix'; leave it out for 'ngram'"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "of the method 'ngram'; leave it out for 'suffix'"),
        ({"method": "suffix", "suffix_min_length": 25}, "more than suffix_decoding_max_tree_depth, 24"),
        ({"method": "suffix", "suffix_min_length": 0}, "at least 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0.0}, "above 0"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, "above 0"),
    ]:
        with pytest.raises(ConfigError, match=match):
            make_engine(model, speculative_config=config)
    with pytest.raises(ConfigError, match="dictionary"):
        SpeculativeConfig.of("ngram")
