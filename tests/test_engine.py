"""Continuous batching gives every request the tokens that it gets alone, whatever happens around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mini_engine.batch import SamplingBatch
from mini_engine.engine import LLMEngine
from mini_engine.errors import RequestError
from mini_engine.models.base import CausalLM
from mini_engine.sampling import sample
from mini_engine.sampling_params import SamplingParams
from tests.models.families import FAMILIES, ListAttend, our_model, transformers_model
from tests.test_generate import run as run_alone
from tests.test_generate import sequence

# A tokenizer for the tiny models: sixty-one words.
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0")), unk_token="w0"
)
DOUBLES = {family: our_model(transformers_model(family, seed=2, dtype=torch.float64)) for family in FAMILIES}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

Request = tuple[str, list[int], SamplingParams]


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request) -> CausalLM:
    return DOUBLES[request.param]


def make_engine(model: CausalLM, **options) -> LLMEngine:
    return LLMEngine(model, WORDS, (2,), **options)


def serve(
    engine: LLMEngine, arrivals: dict[int, list[Request]], aborts: dict[int, list[str]] | None = None
) -> dict[str, list[int]]:
    """Step until all requests have ended; each joins, and some are aborted, before the step named."""
    outputs: dict[str, list[int]] = defaultdict(list)
    step = 0
    while engine.has_unfinished or any(at >= step for at in arrivals):
        for request in arrivals.get(step, []):
            engine.add_request(*request)
            outputs[request[0]] = []
        for name in (aborts or {}).get(step, []):
            engine.abort(name)
        for output in engine.step().outputs:
            outputs[output.request_id].append(output.token_id)
        step += 1
    assert engine.page_table.num_free_pages == engine.page_table.num_pages
    assert not engine.page_table.refcounts.any()
    return outputs


@torch.inference_mode()
def alone(model: CausalLM, prompt: list[int], params: SamplingParams, window: int | None = None) -> list[int]:
    """One request by itself, by naive attention over every key there is: no pages, no batch, nothing evicted."""
    naive = ListAttend()

    def attend(spec, q, k, v):
        narrow = spec.window if window is None else min(window, spec.window or window)
        return naive(replace(spec, window=narrow), q, k, v)

    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + params.max_tokens:
        naive.step = [(0, computed, len(tokens) - computed)]
        hidden = model(torch.tensor(tokens[computed:]), torch.arange(computed, len(tokens)), attend)
        seen = torch.zeros(1, model.config.vocab_size, dtype=torch.bool)
        seen[0, tokens] = True
        how = SamplingBatch.build([params], [params.seed or 0], [len(tokens)], seen)
        computed = len(tokens)
        tokens.append(int(sample(model.compute_logits(hidden[-1:]), how)))
    return tokens[len(prompt) :]


@st.composite
def requests(draw: st.DrawFn, most: int, longest: int) -> list[Request]:
    """Requests of which many begin like one before them, for any number of tokens, and then diverge."""
    made: list[Request] = []
    for i in range(draw(st.integers(1, most))):
        stem = draw(st.sampled_from([prompt for _, prompt, _ in made])) if made and draw(st.booleans()) else []
        prompt = stem[: draw(st.integers(0, len(stem)))]
        prompt += draw(st.lists(st.integers(3, 60), min_size=0 if prompt else 1, max_size=longest - len(prompt)))
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 1.0])), seed=i, ignore_eos=True,
            max_tokens=draw(st.integers(1, 8)), repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        )  # fmt: skip
        made.append((f"request {i}", prompt, params))
    return made


def check_tokens(
    data: st.DataObject, engine_of: Callable[..., LLMEngine], model: CausalLM, most: int, longest: int
) -> None:
    """Serve random requests by a random engine, some aborted on the way, and compare each with a run alone."""
    all_requests = data.draw(requests(most, longest))
    arrivals: dict[int, list[Request]] = {}
    for request in all_requests:
        arrivals.setdefault(data.draw(st.integers(0, 4)), []).append(request)
    aborts = {data.draw(st.integers(1, 8)): [name] for name, _, _ in all_requests if data.draw(st.integers(0, 4)) == 0}
    aborted = {name for names in aborts.values() for name in names}
    window = data.draw(st.none() | st.integers(1, 12))
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    needed = max(-(-(len(prompt) + params.max_tokens) // page_size) for _, prompt, params in all_requests)
    max_batch_size = data.draw(st.integers(1, 4))
    engine = engine_of(
        num_pages=needed + data.draw(st.integers(0, 4)),  # so small that preemption happens
        page_size=page_size,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_batch_size + data.draw(st.integers(0, 24)),
        sliding_window=window,
        prefix_sharing=data.draw(st.booleans()),
    )
    got = serve(engine, arrivals, aborts)
    for name, prompt, params in all_requests:
        want = alone(model, prompt, params, window)
        assert got[name] == (want[: len(got[name])] if name in aborted else want), name


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(DOUBLES)))
def test_tokens_are_those_of_a_run_alone(data, family):
    """In float64, exactly: any arrivals, chunks, pool and pages, with or without shared prefixes and windows."""
    check_tokens(data, lambda **options: make_engine(DOUBLES[family], **options), DOUBLES[family], most=5, longest=24)


@settings(max_examples=8)
@given(st.data(), st.sampled_from(sorted(DOUBLES)))
def test_flex_too_gives_the_tokens_of_a_run_alone(data, family):
    def engine_of(**options):
        return make_engine(DOUBLES[family], attn_backend="flex", **options)

    check_tokens(data, engine_of, DOUBLES[family], most=3, longest=12)


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
