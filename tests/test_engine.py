"""Continuous batching gives every request the tokens that it gets alone, whatever happens around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mini_engine.attention.backend import BACKENDS
from mini_engine.engine import EngineMetrics, LLMEngine
from mini_engine.errors import ConfigError, RequestError
from mini_engine.models.base import CausalLM, LanguageModel
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.outputs import Piece, StepReport
from mini_engine.parts import Parts
from mini_engine.sampling import SamplingBatch, sample, sampling_columns
from mini_engine.sampling_params import SamplingParams
from mini_engine.sequence import Sequence
from tests.models.families import FAMILIES, ListAttend, our_model, transformers_model
from tests.test_generate import counting_parts, sequence
from tests.test_generate import run as run_alone

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


def make_engine(model: LanguageModel, **options) -> LLMEngine:
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
        penalized = seen if params.repetition_penalty != 1 else None
        how = SamplingBatch.build(sampling_columns([params]), [params.seed or 0], [len(tokens)], penalized)
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


@settings(max_examples=40)
@given(st.data(), st.sampled_from(sorted(DOUBLES)))
def test_tokens_are_those_of_a_run_alone(data, family):
    """In float64, exactly: any arrivals, chunks, pool and pages, with or without shared prefixes and windows."""
    check_tokens(data, lambda **options: make_engine(DOUBLES[family], **options), DOUBLES[family], most=5, longest=24)


@settings(max_examples=5)
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


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attn_backend", ["torch", "chunked"])
def test_tokens_on_the_gpu_are_those_of_a_run_alone_on_the_host(family, attn_backend):
    """In float64, exactly: sampled and greedy, preempted, in chunks and with shared prefixes."""
    theirs = transformers_model(family, seed=2, dtype=torch.float64)
    on_gpu = build_model(ModelConfig.from_hf(theirs.config.to_dict()), Parts(), torch.float64, torch.device("cuda"))
    on_gpu.load_weights(theirs.state_dict())
    engine = make_engine(
        on_gpu, attn_backend=attn_backend, num_pages=12, page_size=2, max_batch_size=3, max_num_batched_tokens=7,
        prefix_sharing=True,
    )  # fmt: skip
    prompts = [[5, 9, 33], [7, 8], [5, 9, 33, 18, 4], [1] * 11]
    all_requests = [
        (str(i), prompt, SamplingParams(temperature=float(i % 2), seed=i, max_tokens=12, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    got = serve(engine, {2 * i: [request] for i, request in enumerate(all_requests)})
    assert engine.metrics.preemptions > 0
    for name, prompt, params in all_requests:
        assert got[name] == alone(DOUBLES[family], prompt, params), name


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
    assert engine.metrics == EngineMetrics()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": -4}, "page_size is -4"),
        ({"max_batch_size": 0}, "max_batch_size is 0; it must be 1 or more"),
        ({"max_num_batched_tokens": 1}, "less than max_batch_size"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be 1 or more"),
        ({"max_num_batched_tokens": -3}, "max_num_batched_tokens is -3; it must be 1 or more"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be 1 or more"),
        ({"max_model_len": 1}, "max_model_len is 1; this model takes 2 to 128"),
        ({"max_model_len": 129}, "max_model_len is 129"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": -1}, "sliding_window is -1"),
        ({"attn_backend": "magic"}, "choose one of"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(DOUBLES["llama"], **{"num_pages": 4, "page_size": 4, "max_batch_size": 2} | options)


def roomy(family: str = "qwen3", **options) -> LLMEngine:
    return make_engine(DOUBLES[family], **{"num_pages": 24, "page_size": 4, "max_batch_size": 4} | options)


def test_a_request_larger_than_the_pool_is_refused_unless_its_window_is_small():
    long = ("long", [5] * 20, GREEDY)
    with pytest.raises(RequestError, match="26 tokens, which fill 7 pages"):
        roomy(num_pages=6).add_request(*long)
    small = {"num_pages": 6, "sliding_window": 4, "max_num_batched_tokens": 8}
    assert serve(roomy(**small), {0: [long]})["long"] == alone(DOUBLES["qwen3"], long[1], GREEDY, window=4)


@pytest.mark.parametrize("attn_backend", ["torch", "flex"])
def test_a_window_holds_few_pages_of_a_long_sequence(attn_backend):
    held = []
    engine = roomy(sliding_window=6, attn_backend=attn_backend, max_num_batched_tokens=8)
    engine.add_request("long", [5, 6, 7] * 10, replace(GREEDY, max_tokens=20))
    sequence = next(iter(engine.request_ids))
    while engine.has_unfinished:
        engine.step()
        held.append(engine.page_table.num_pages - engine.page_table.num_free_pages)
    assert max(held) <= (6 + 8) // 4 + 2 < 50 // 4
    assert sequence.output_token_ids == alone(DOUBLES["qwen3"], [5, 6, 7] * 10, replace(GREEDY, max_tokens=20), 6)


@pytest.mark.parametrize("attn_backend", ["torch", "flex"])
def test_a_page_that_was_evicted_from_one_sequence_serves_the_next(attn_backend):
    """The second request gets the first one's pages, where they now hold other positions."""
    engine = roomy(sliding_window=6, attn_backend=attn_backend)
    for prompt in ([5, 6, 7, 8, 9, 10, 11, 12], [21, 22, 23, 24, 25, 26, 27]):
        assert serve(engine, {0: [("one", prompt, GREEDY)]})["one"] == alone(DOUBLES["qwen3"], prompt, GREEDY, 6)


@pytest.mark.parametrize("end", ["finishes", "is aborted"])
@pytest.mark.parametrize("attn_backend", ["torch", "flex"])
def test_pages_that_are_shared_outlive_the_donor(attn_backend, end):
    model, prompt = DOUBLES["gemma2"], [7, 9, 11, 13, 15, 17, 19]
    engine = roomy("gemma2", prefix_sharing=True, attn_backend=attn_backend)
    engine.add_request("donor", prompt, replace(GREEDY, max_tokens=2))
    engine.step()
    engine.add_request("sharer", [*prompt[:6], 30], GREEDY)
    got = [output.token_id for output in engine.step().outputs if output.request_id == "sharer"]
    assert engine.metrics.shared_tokens == 6
    engine.abort("donor")  # if it has not finished
    assert serve(engine, {0: [("again", prompt, GREEDY)]}).pop("again") == alone(model, prompt, GREEDY)
    assert len(got) == 1 and got[0] == alone(model, [*prompt[:6], 30], GREEDY)[0]


def test_metrics_add_up():
    reports: list[StepReport] = []
    prompts = [[5] * 9, [5] * 9, [5, 5, 5, 7], [8]]
    engine = roomy(prefix_sharing=True, num_pages=8, page_size=2, on_step=lambda _, report: reports.append(report))
    got = engine.generate(prompts, replace(GREEDY, max_tokens=6))
    metrics = engine.metrics
    assert metrics.steps == len(reports)
    assert metrics.seconds == sum(report.seconds for report in reports)
    assert metrics.computed_tokens == sum(report.num_tokens for report in reports)
    assert metrics.output_tokens == sum(len(output.token_ids) for output in got) == 24
    assert metrics.finished == 4
    assert metrics.preemptions == sum(len(report.schedule.preempted) for report in reports) > 0
    assert metrics.shared_tokens > 0
    # Every token but each last one is computed or shared, some more than once.
    assert metrics.computed_tokens + metrics.shared_tokens > sum(len(prompt) + 5 for prompt in prompts)

    one = roomy()
    one.generate([[5] * 9], GREEDY)
    assert one.metrics.computed_tokens == 9 + 5
    assert (one.metrics.steps, one.metrics.preemptions, one.metrics.shared_tokens) == (6, 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_the_tiny_models_depend_on_attention(family):
    """Otherwise none of these tests would notice a key too many or too few."""
    answers = {tuple(alone(DOUBLES[family], [i, i + 7, 9, 9, 9], GREEDY)) for i in range(5, 25)}
    assert len(answers) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_traffic_in_a_tight_pool(family):
    """Preemptions, chunks, copies, evictions: every one of them many times, and the tokens stay."""
    model, preempted, shared = DOUBLES[family], 0, 0
    for seed in range(6):
        random = Random(seed)
        stem = [random.randint(3, 60) for _ in range(7)]
        arrivals: dict[int, list[Request]] = defaultdict(list)
        for i in range(6):
            prompt = stem[: random.randint(0, 7)] + [random.randint(3, 60) for _ in range(random.randint(1, 5))]
            params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=random.randint(4, 8), ignore_eos=True)
            arrivals[random.randint(0, 4)].append((str(i), prompt, params))
        window = (None, None, 7)[seed % 3]
        engine = make_engine(
            model, num_pages=11, page_size=2, max_batch_size=4, max_num_batched_tokens=4 + random.randint(0, 12),
            sliding_window=window, prefix_sharing=seed % 2 == 0,
        )  # fmt: skip
        got = serve(engine, arrivals)
        preempted += engine.metrics.preemptions
        shared += engine.metrics.shared_tokens
        for name, prompt, params in (request for requests in arrivals.values() for request in requests):
            assert got[name] == alone(model, prompt, params, window), (seed, name)
    assert preempted > 5 and shared > 5


def test_a_page_goes_when_the_widest_window_has_passed_it():
    """Gemma 2 has layers with a window of 5, and others that see as far as the engine lets them."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    engine = make_engine(DOUBLES["gemma2"], num_pages=24, page_size=2, max_batch_size=2, sliding_window=12)
    prompt = [5, 6, 7] * 5
    assert serve(engine, {0: [("a", prompt, params)]})["a"] == alone(DOUBLES["gemma2"], prompt, params, 12)


def test_the_engine_s_own_limit_ends_an_output():
    (output,) = roomy(max_model_len=5).generate([[5, 9, 33]], replace(GREEDY, max_tokens=50))
    assert len(output.token_ids) == 2 and output.finish_reason == "length"


def test_requests_without_a_seed_draw_one_each():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = roomy().generate([[5, 9], [5, 9]], params)
    assert first.token_ids != second.token_ids


def test_a_step_reports_the_bytes_of_its_keys_and_values():
    engine = roomy()
    engine.add_request("a", [5] * 9, GREEDY)
    per_token = 3 * 2 * 2 * 16 * 8  # layers, keys and values, heads, their size, bytes of float64
    assert [engine.step().kv_bytes for _ in range(2)] == [9 * per_token, 10 * per_token]


def test_what_was_seen_is_forgotten_with_its_request():
    engine = roomy()
    serve(engine, {0: [("a", [5, 9], replace(GREEDY, repetition_penalty=1.3))]})
    assert not engine._seen


PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]


def whole(pieces: list[Piece]) -> dict[int, list[int]]:
    """The tokens of each prompt; its output comes once, and last, and its text is that of its pieces."""
    tokens = {}
    for index in {piece.index for piece in pieces}:
        own = [piece for piece in pieces if piece.index == index]
        assert [piece.output is not None for piece in own] == [False] * (len(own) - 1) + [True]
        output = own[-1].output
        assert output is not None and output.text == "".join(piece.text for piece in own)
        tokens[index] = output.token_ids
    return tokens


def test_two_streams_on_one_engine_both_get_all_of_theirs():
    engine = roomy(num_pages=8, prefix_sharing=True)
    engine.add_request("beside", PROMPTS[2], GREEDY)
    first = engine.stream_batch(PROMPTS, GREEDY)
    second = engine.stream_batch([PROMPTS[2], PROMPTS[0]], replace(GREEDY, max_tokens=9))
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    turn = 0
    while len(pieces[0]) < 24 or len(pieces[1]) < 18:
        turn += 1
        which = int(turn % 3 == 0)  # one is asked more often than the other
        if piece := next((first, second)[which], None):
            pieces[which].append(piece)
    assert next(first, None) is None and next(second, None) is None
    model = engine.model
    assert whole(pieces[0]) == {i: alone(model, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)}
    longer = replace(GREEDY, max_tokens=9)
    assert whole(pieces[1]) == {i: alone(model, PROMPTS[p], longer) for i, p in enumerate((2, 0))}
    assert not engine.has_unfinished and engine.page_table.num_free_pages == 8
    assert engine.metrics.finished == 7


def test_a_stream_that_is_closed_early_frees_its_pages_and_leaves_the_others():
    engine = roomy(max_batch_size=8, num_pages=40)
    stays, goes = engine.stream_batch(PROMPTS, GREEDY), engine.stream_batch(PROMPTS[:2], GREEDY)
    pieces = [next(stays)]
    next(goes)
    assert len(engine.request_ids) == 6
    goes.close()
    assert len(engine.request_ids) == 4
    pieces += stays
    assert whole(pieces) == {i: alone(engine.model, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)}
    assert engine.page_table.num_free_pages == engine.page_table.num_pages
    text = engine.stream(PROMPTS[0], GREEDY)
    next(text)
    text.close()
    assert not engine.has_unfinished


def test_a_stream_whose_request_is_aborted_ends_with_an_error():
    engine = roomy()
    stream = engine.stream_batch(PROMPTS[:2], GREEDY)
    pieces = [next(stream)]  # of the first; the second's is still to be fetched
    doomed = list(engine.request_ids.values())[1]
    engine.abort(doomed)
    pieces += stream
    assert [piece.index for piece in pieces] == [0, 1, 1, *[0] * 5]
    assert pieces[1].output is None and pieces[1].step is pieces[0].step
    output = pieces[2].output
    assert output is not None and output.finish_reason == "error" and doomed in str(output.error)
    assert whole([piece for piece in pieces if piece.index == 0]) == {0: alone(engine.model, PROMPTS[0], GREEDY)}
    assert not engine.has_unfinished

    stream = engine.stream("w5", GREEDY)
    next(stream)
    engine.abort(next(iter(engine.request_ids.values())))
    with pytest.raises(RequestError, match="was aborted"):
        list(stream)


def test_a_stream_does_not_take_the_name_of_a_request():
    engine = roomy()
    mine = engine.add_request("stream 0", PROMPTS[0], GREEDY)
    (output,) = engine.generate([PROMPTS[1]], GREEDY)
    assert output.token_ids == alone(engine.model, PROMPTS[1], GREEDY)
    assert mine.output_token_ids == alone(engine.model, PROMPTS[0], GREEDY)


def test_bad_prompts_of_a_stream_are_refused_and_the_others_served():
    engine = roomy(num_pages=4)
    bad = [1] * 30, [61], "half \ud83d"
    pieces = list(engine.stream_batch([[], PROMPTS[1], *bad], GREEDY))
    errors = {piece.index: str(piece.output.error) for piece in pieces if piece.output and piece.output.error}
    assert errors.keys() == {0, 2, 3, 4}
    assert "empty" in errors[0] and "pages" in errors[2] and "outside" in errors[3]
    assert "neither valid text nor a list of token ids" in errors[4]
    assert whole([piece for piece in pieces if piece.index == 1]) == {1: alone(engine.model, PROMPTS[1], GREEDY)}


def test_on_step_may_abort_whom_it_likes():
    def abort_all(engine: LLMEngine, report: StepReport) -> None:
        assert {output.request_id for output in report.outputs} <= set(engine.request_ids.values())
        if any(output.finish_reason for output in report.outputs):
            for name in list(engine.request_ids.values()):
                engine.abort(name)

    engine = roomy(on_step=abort_all)
    params = [replace(GREEDY, max_tokens=n) for n in (6, 2)]
    aborted, finished = engine.generate(PROMPTS[:2], params)
    assert aborted.finish_reason == "error" and finished.finish_reason == "length"
    assert engine.page_table.num_free_pages == engine.page_table.num_pages


def test_a_name_may_be_given_again_in_on_step():
    """A chat whose next turn begins as soon as the last one has ended."""

    def next_turn(engine: LLMEngine, report: StepReport) -> None:
        for output in report.outputs:
            if output.finish_reason and not turns:
                engine.abort("chat")
                turns.append(engine.add_request("chat", PROMPTS[2], GREEDY))

    turns: list[Sequence] = []
    engine = roomy(on_step=next_turn)
    serve(engine, {0: [("chat", PROMPTS[0], GREEDY)]})
    assert turns[0].output_token_ids == alone(engine.model, PROMPTS[2], GREEDY)


def test_a_stream_does_not_get_the_tokens_of_another_request_with_its_name():
    engine = roomy()
    stream = engine.stream_batch(PROMPTS[:1], GREEDY)
    next(stream)
    (name,) = engine.request_ids.values()
    engine.abort(name)
    other = engine.add_request(name, PROMPTS[2], GREEDY)
    (end,) = stream
    assert end.output is not None and end.output.finish_reason == "error"
    while engine.has_unfinished:
        engine.step()
    assert other.output_token_ids == alone(engine.model, PROMPTS[2], GREEDY)


@pytest.mark.parametrize(
    "odd",
    [
        {"top_p": 1e-50}, {"top_k": 2**63}, {"temperature": 1e-38}, {"temperature": 1e-300, "top_p": 0.9},
        {"temperature": 1e300}, {"repetition_penalty": 1e-46, "top_p": 0.9}, {"repetition_penalty": 1e39, "min_p": 0.1},
    ],
)  # fmt: skip
def test_values_that_float32_cannot_hold_harm_nobody(odd):
    engine = roomy()
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 1} | odd)
    strange = engine.add_request("odd", PROMPTS[2], params)
    assert serve(engine, {0: [("beside", PROMPTS[0], GREEDY)]})["beside"] == alone(engine.model, PROMPTS[0], GREEDY)
    assert len(strange.output_token_ids) == 6
    if odd.get("temperature", 1) < 1 or ("top_p" in odd and "repetition_penalty" not in odd):  # next to greedy
        assert strange.output_token_ids == alone(engine.model, PROMPTS[2], GREEDY)


def test_logits_that_are_not_numbers_end_as_tokens():
    """A broken model writes nonsense; it does not take the engine down."""
    parts = replace(Parts(), sample=lambda logits, batch: sample(torch.full_like(logits, torch.nan), batch))
    params = [GREEDY, SamplingParams(top_p=0.9, top_k=5, max_tokens=6, ignore_eos=True)]
    outputs = roomy(parts=parts).generate(PROMPTS[:2], params)
    assert [len(output.token_ids) for output in outputs] == [6, 6]


def test_a_sampler_that_fails_once_loses_no_token():
    failures = iter([False, False, True, False, True])

    def sometimes(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if next(failures, False):
            raise KeyboardInterrupt
        return sample(logits, batch)

    engine = roomy(prefix_sharing=True, parts=replace(Parts(), sample=sometimes))
    sequences = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    interrupts = 0
    for _ in range(40):  # a request that is stuck would never end
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert [s.output_token_ids for s in sequences] == [alone(engine.model, prompt, GREEDY) for prompt in PROMPTS]


def test_an_interrupt_between_two_samples_ends_who_has_ended(monkeypatch):
    engine = roomy()
    ends = engine.add_request("ends", PROMPTS[0], replace(GREEDY, max_tokens=2))
    goes_on = engine.add_request("goes on", PROMPTS[1], GREEDY)
    engine.step()

    def interrupted(token_id: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(goes_on, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert list(engine.request_ids) == [goes_on] and ends.finish_reason == "length"
    for _ in range(40):  # a request that is stuck would never end
        engine.step()
    assert goes_on.output_token_ids == alone(engine.model, PROMPTS[1], GREEDY)
    assert ends.output_token_ids == alone(engine.model, PROMPTS[0], replace(GREEDY, max_tokens=2))
    assert engine.page_table.num_free_pages == engine.page_table.num_pages


def test_a_step_that_fails_is_computed_again(monkeypatch):
    """The second and third begin with pages that the failed step should have filled, and with copies it never made."""
    engine = roomy(prefix_sharing=True, max_num_batched_tokens=12)
    requests = [("0", [7] * 9, GREEDY), ("1", [7] * 9, GREEDY), ("2", [*[7] * 6, 8, 9], GREEDY)]
    engine.add_request(*requests[0])
    got: dict[str, list[int]] = defaultdict(list)
    fail = False

    def run(spec, q):
        if fail and spec.layer == 1:
            raise KeyboardInterrupt
        return compute(spec, q)

    compute = engine.backend.run
    monkeypatch.setattr(engine.backend, "run", run)
    for step in range(40):
        if step in (0, 1):
            for request in requests[1 + step : 2 + step]:
                engine.add_request(*request)
        fail = step in (0, 2, 5)
        try:
            for output in engine.step().outputs:
                got[output.request_id].append(output.token_id)
        except KeyboardInterrupt:
            assert fail
    assert engine.metrics.shared_tokens > 0
    assert got == {name: alone(engine.model, prompt, GREEDY) for name, prompt, _ in requests}
    assert engine.page_table.num_free_pages == engine.page_table.num_pages


def test_all_that_share_pages_of_a_failed_step_begin_anew(monkeypatch):
    engine = roomy(prefix_sharing=True)
    for name in "abc":
        engine.add_request(name, PROMPTS[2], GREEDY)
    with monkeypatch.context() as broken:
        broken.setattr(engine.backend, "run", lambda spec, q: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.abort("a")
    got = defaultdict(list)
    for _ in range(40):  # a request that is stuck would never end
        for output in engine.step().outputs:
            got[output.request_id].append(output.token_id)
    assert got == {name: alone(engine.model, PROMPTS[2], GREEDY) for name in "bc"}


def test_a_listener_that_fails_takes_no_token_away():
    def fail(engine: LLMEngine, report: StepReport) -> None:
        raise ZeroDivisionError

    engine = roomy(on_step=fail)
    sequence = engine.add_request("0", PROMPTS[0], GREEDY)
    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.has_unfinished and sequence.finish_reason == "length"
    assert sequence.output_token_ids == alone(engine.model, PROMPTS[0], GREEDY)
    assert engine.page_table.num_free_pages == engine.page_table.num_pages


@pytest.mark.parametrize("attn_backend", list(BACKENDS))
def test_the_engine_runs_on_every_part_that_the_backend_does_not_bypass(attn_backend):
    parts, calls = counting_parts()
    prompt = list(range(3, 36)) * 2  # longer than a chunk of keys of "chunked"
    shared = {0: [("long", prompt, GREEDY)], 1: [("sharer", prompt[:12], GREEDY)]}
    tight = {0: [(str(i), [i] * 4, replace(GREEDY, max_tokens=8)) for i in range(2)]}
    for family in ("llama", "gpt2"):
        model = our_model(transformers_model(family, seed=2, dtype=torch.float64), parts=parts)
        for arrivals, num_pages in ((shared, 50), (tight, 8)):
            engine = make_engine(
                model, attn_backend=attn_backend, parts=parts, num_pages=num_pages, page_size=2, max_batch_size=2,
                prefix_sharing=True, sliding_window=66,
            )  # fmt: skip
            got = serve(engine, arrivals)
            for name, tokens, params in [request for requests in arrivals.values() for request in requests]:
                assert got[name] == alone(DOUBLES[family], tokens, params, window=66)
    bypassed = engine.backend.bypasses
    assert bypassed < {field.name for field in fields(Parts)}
    unused = {name for name, count in calls.items() if count == 0}
    # The torch backend merges only where a sequence is longer than its chunks, 8192 keys; "chunked" has smaller ones.
    assert unused - ({"merge_states"} if attn_backend == "torch" else set()) == bypassed
