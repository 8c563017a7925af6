"""Continuous batching gives every request the tokens that it gets alone, whatever happens around it."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mini_engine.engine import LLMEngine
from mini_engine.errors import RequestError
from mini_engine.models.base import CausalLM
from mini_engine.sampling_params import SamplingParams
from tests.models.families import FAMILIES, our_model, transformers_model
from tests.test_generate import run as run_alone
from tests.test_generate import sequence

# A tokenizer for the tiny models: sixty-one words.
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0")), unk_token="w0"
)


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request) -> CausalLM:
    return our_model(transformers_model(request.param, seed=2, dtype=torch.float64))


def make_engine(model: CausalLM, **options) -> LLMEngine:
    return LLMEngine(model, WORDS, (2,), **options)


def serve(engine: LLMEngine, arrivals: dict[int, list[tuple[str, list[int], SamplingParams]]]) -> dict[str, list[int]]:
    """Step until all requests have ended; each joins before the step it names."""
    outputs: dict[str, list[int]] = defaultdict(list)
    step = 0
    while engine.has_unfinished or any(at >= step for at in arrivals):
        for request in arrivals.get(step, []):
            engine.add_request(*request)
            outputs[request[0]] = []
        for output in engine.step().outputs:
            outputs[output.request_id].append(output.token_id)
        step += 1
    assert engine.page_table.num_free_pages == engine.page_table.num_pages
    return outputs


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_tokens_are_those_of_a_run_alone(model, data):
    requests = [
        (
            f"request {i}",
            data.draw(st.lists(st.integers(3, 60), min_size=1, max_size=20)),
            SamplingParams(
                temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=i, ignore_eos=True,
                max_tokens=data.draw(st.integers(1, 10)), repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            ),
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]  # fmt: skip
    arrivals: dict[int, list] = {}
    for request in requests:
        arrivals.setdefault(data.draw(st.integers(0, 6)), []).append(request)
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    longest = max(-(-(len(prompt) + params.max_tokens) // page_size) for _, prompt, params in requests)
    max_batch_size = data.draw(st.integers(1, 4))
    engine = make_engine(
        model,
        num_pages=longest + data.draw(st.integers(0, 4)),  # so small that preemption happens
        page_size=page_size,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_batch_size + data.draw(st.integers(0, 12)),
    )
    got = serve(engine, arrivals)
    for name, prompt, params in requests:
        assert got[name] == run_alone(model, [sequence(prompt, params, seed=params.seed)])[0]


def test_preemption_happens_in_a_small_pool_and_changes_nothing(model):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 9, 33], [7, 8], [1, 60, 22, 18, 4]]
    engine = make_engine(model, num_pages=9, page_size=2, max_batch_size=3, max_num_batched_tokens=64)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    preempted, got = 0, {str(i): [] for i in range(3)}
    while engine.has_unfinished:
        report = engine.step()
        preempted += len(report.schedule.preempted)
        for output in report.outputs:
            got[output.request_id].append(output.token_id)
    assert preempted >= 2
    assert list(got.values()) == [run_alone(model, [sequence(p, params)])[0] for p in prompts]


def test_bad_requests_are_refused_and_the_others_finish(model):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine = make_engine(model, num_pages=4, page_size=2, max_batch_size=2, max_num_batched_tokens=8)
    engine.add_request("good", [5, 9], params)
    for request_id, prompt, message in (
        ("good", [1], "still running"),
        ("empty", [], "empty"),
        ("alien", [61], "outside 0 to 60"),
        ("long", [1] * 128, "the model takes 128"),
        ("large", [1] * 5, "fill 5 pages"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(request_id, prompt, params)
    engine.add_request("doomed", [4, 4], params)
    engine.step()
    engine.abort("doomed")
    engine.abort("never heard of")
    got = serve(engine, {0: [("late", [7], params)]})
    assert got["late"] == run_alone(model, [sequence([7], params)])[0]


def test_an_engine_without_requests_steps_in_place(model):
    engine = make_engine(model, num_pages=1, page_size=4, max_batch_size=1)
    report = engine.step()
    assert not report.outputs and not engine.has_unfinished
