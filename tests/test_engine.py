"""Continuous batching gives every request the tokens that it gets alone, whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.backend import BACKENDS
from mini_engine.batch import StepBatch
from mini_engine.core import Core
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, RequestError, ScheduleError
from mini_engine.executor import LocalExecutor, Ticket
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.outputs import EngineMetrics, StepReport
from mini_engine.parts import Parts
from mini_engine.request import Request, Running
from mini_engine.sampling import SamplingBatch, sample
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.step_input import StepInput
from tests.helpers import (
    GREEDY,
    Arrival,
    adapted_model,
    alone,
    check_nothing_leaked,
    counting_parts,
    double_model,
    let_all_guesses_pay,
    make_engine,
    requests,
    serve,
)
from tests.models.families import FAMILIES, WITHOUT_MLA, our_model, transformers_model

PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def roomy(family: str = "qwen3", **options) -> LLMEngine:
    return make_engine(double_model(family), **{"num_pages": 24, "page_size": 4, "max_batch_size": 4} | options)


# --- the property ----------------------------------------------------------------------------------------------------


DRAFT_MODEL = {"method": "draft_model", "model": "given"}


WINDOWS = st.none() | st.integers(1, 12)


def check_tokens(
    data: st.DataObject,
    family: str,
    attn_backend: str,
    most: int,
    longest: int,
    windows: st.SearchStrategy[int | None] = WINDOWS,
) -> None:
    """Serve random requests by a random engine, some aborted on the way, and compare each with a run alone.

    Some are the next turn of a chat: they begin with the prompt and the output of another request, or a part of them.
    The engine has the book's own model or that of transformers; the run alone has the book's own.
    """
    models = [double_model, adapted_model] if family in WITHOUT_MLA else [double_model]
    model = data.draw(st.sampled_from(models))(family)
    arrivals: dict[int, list[Arrival]] = {}
    all_requests = data.draw(requests(most, longest))
    window = data.draw(windows)
    for name, prompt, params in all_requests:
        arrival = data.draw(st.integers(0, 4))
        arrivals.setdefault(arrival, []).append((name, prompt, params))
        if data.draw(st.integers(0, 2)) == 0:
            text = prompt + alone(double_model(family), prompt, params, window)
            turn = text[: data.draw(st.integers(1, len(text)))] + data.draw(st.lists(st.integers(3, 60), max_size=4))
            arrivals.setdefault(arrival + data.draw(st.integers(0, 12)), []).append((f"after {name}", turn, params))
    all_requests = [request for several in arrivals.values() for request in several]
    aborts: dict[int, list[str]] = {}
    for name, _, _ in all_requests:
        if data.draw(st.integers(0, 4)) == 0:
            aborts.setdefault(data.draw(st.integers(1, 8)), []).append(name)
    aborted = {name for names in aborts.values() for name in names}
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    needed = max(-(-(len(prompt) + params.max_tokens) // page_size) for _, prompt, params in all_requests)
    max_batch_size = data.draw(st.integers(1, 4))
    num_guesses = data.draw(st.integers(0, 5))
    methods = [
        {"method": "ngram", "prompt_lookup_min": 1},
        {"method": "suffix"},
        {"method": "draft_model", "model": "x"},
    ]
    method = data.draw(st.sampled_from(methods))
    guesses = method | {"num_speculative_tokens": num_guesses}
    draft = double_model(data.draw(st.sampled_from(["llama", "qwen3"]))) if num_guesses and "model" in method else None
    engine = make_engine(
        model,
        draft_model=draft,
        attn_backend=attn_backend,
        num_pages=needed + data.draw(st.integers(0, 4)),  # so small that preemption happens
        page_size=page_size,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_batch_size + data.draw(st.integers(0, 24)),
        sliding_window=window,
        enable_prefix_caching=data.draw(st.booleans()),
        pipeline_depth=0 if num_guesses else data.draw(st.sampled_from([0, 1])),
        speculative_config=guesses if num_guesses else None,
        cuda_graph_batch_sizes=data.draw(st.none() | st.lists(st.integers(1, 4))),  # on a CPU only the padding
    )
    let_all_guesses_pay(engine)
    got = serve(engine, arrivals, aborts)
    for name, prompt, params in all_requests:
        limit = len(prompt) + len(got[name]) if name in aborted else None
        assert got[name] == alone(double_model(family), prompt, params, window, limit, guess=got[name]), name


@settings(max_examples=80)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.sampled_from(["torch", "torch_padded", "chunked"]))
def test_tokens_do_not_depend_on_the_schedule(data, family, attn_backend):
    """In float64, exactly: arrivals, chunks, pool, pages, prefixes, windows, depth, guesses, padding, aborts, ends."""
    check_tokens(data, family, attn_backend, most=5, longest=24)


@settings(max_examples=6)
@given(st.data(), st.sampled_from(sorted(WITHOUT_MLA)))
def test_tokens_do_not_depend_on_the_schedule_with_flex(data, family):
    check_tokens(data, family, "flex", most=3, longest=12)


HYBRID = pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
CPU_BACKENDS = ["torch", "torch_padded", "chunked", "cascade", "split_kv"]


@settings(max_examples=80)
@given(st.data(), st.sampled_from(["gemma2", "gemma3_text"]), st.sampled_from(CPU_BACKENDS))
def test_tokens_do_not_depend_on_the_schedule_with_a_page_table_for_each_group_of_layers(data, family, attn_backend):
    check_tokens(data, family, attn_backend, most=5, longest=24, windows=st.none())


@settings(max_examples=4)
@given(st.data(), st.sampled_from(["gemma2", "gemma3_text"]))
def test_tokens_do_not_depend_on_the_schedule_with_flex_and_several_page_tables(data, family):
    check_tokens(data, family, "flex", most=3, longest=12, windows=st.none())


def test_guesses_share_a_page_with_flex():
    """Each is a sequence of its own where a graph computes them, and FlexAttention's cache zeroes unwritten slots."""
    model, prompt = double_model("llama"), [37, 20, 36, 39, 48, 47, 50, 55, 10, 3, 24, 52, 28, 35, 3, 39]
    engine = make_engine(
        model, draft_model=model, attn_backend="flex", num_pages=12, page_size=4, max_batch_size=2, pipeline_depth=0,
        speculative_config=DRAFT_MODEL | {"num_speculative_tokens": 2}, cuda_graph_batch_sizes=[4],
    )  # fmt: skip
    let_all_guesses_pay(engine)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    assert serve(engine, {0: [("a", prompt, params)]})["a"] == alone(model, prompt, params)
    assert engine.metrics.num_accepted_tokens > 0


def tight_traffic(engine: LLMEngine, family: str, seed: int) -> None:
    """Requests that share prefixes, in a pool so small that some are preempted."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(3, 60, 9).tolist()
    arrivals: dict[int, list[Arrival]] = {}
    for i in range(7):
        prompt = stem[: rng.integers(0, 10)] + rng.integers(3, 60, rng.integers(1, 5)).tolist()
        params = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=int(rng.integers(6, 14)), ignore_eos=True)
        arrivals.setdefault(int(rng.integers(0, 6)), []).append((str(i), prompt, params))
    got = serve(engine, arrivals)
    for name, prompt, params in (request for several in arrivals.values() for request in several):
        assert got[name] == alone(double_model(family), prompt, params, guess=got[name]), name


TIGHT = {
    "num_pages": 14,
    "page_size": 2,
    "max_batch_size": 4,
    "max_num_batched_tokens": 9,
    "enable_prefix_caching": True,
}


# Qwen2 attends as Llama does, and requests of Mistral, whose layers all have windows, have too few pages for this.
CROWDED = pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("qwen2", "mistral")])


@DEPTHS
@CROWDED
def test_preemption_and_sharing_happen_and_change_nothing(family, depth):
    preempted = shared = evicted = 0
    for seed in range(4):
        engine = make_engine(double_model(family), pipeline_depth=depth, **TIGHT)
        tight_traffic(engine, family, seed)
        preempted += engine.metrics.preemptions
        shared += engine.metrics.shared_tokens
        evicted += engine.metrics.evicted_pages
    assert preempted >= 4 and shared >= 4 and evicted >= 4


@pytest.mark.gpu
@DEPTHS
@CROWDED
@pytest.mark.parametrize("attn_backend", ["torch", "torch_padded", "chunked"])
def test_tokens_on_the_gpu_are_those_of_a_run_alone_on_the_host(family, attn_backend, depth):
    """In float64, exactly: sampled and greedy, preempted, in chunks and with shared prefixes, at both depths."""
    theirs = transformers_model(family, seed=2, dtype=torch.float64)
    on_gpu = build_model(ModelConfig.from_hf(theirs.config.to_dict()), Parts(), torch.float64, torch.device("cuda"))
    on_gpu.load_weights(theirs.state_dict())
    engine = make_engine(on_gpu, attn_backend=attn_backend, pipeline_depth=depth, **TIGHT)
    for seed in range(3):
        tight_traffic(engine, family, seed)
    assert engine.metrics.preemptions > 0 and engine.metrics.shared_tokens > 0


@DEPTHS
def test_an_end_found_late_drops_the_token_behind_it(depth):
    """With a depth of 1 the next step is launched before the host sees the end token."""
    model = double_model("qwen3")
    free = alone(model, PROMPTS[0], replace(GREEDY, max_tokens=12))
    params = replace(GREEDY, max_tokens=12, stop_token_ids=[free[3]])
    end = free.index(free[3]) + 1
    engine = roomy(pipeline_depth=depth)
    assert serve(engine, {0: [("a", PROMPTS[0], params)]})["a"] == free[:end]
    # The late token was computed for nothing: one more than the tokens that needed computing.
    assert engine.metrics.computed_tokens == len(PROMPTS[0]) + end - 1 + depth


# --- requests and options that are refused ---------------------------------------------------------------------------


def test_bad_requests_are_refused_and_the_others_finish():
    params = replace(GREEDY, max_tokens=4)
    engine = roomy(num_pages=4, page_size=2, max_batch_size=2, max_num_batched_tokens=8)
    engine.add_request("good", [5, 9], params)
    for request_id, prompt, own, message in (
        ("good", [1], params, "is unfinished"),
        ("empty", [], params, "empty"),
        ("alien", [61], params, "integers from 0 to 60"),
        ("truth", [True, False], params, "integers from 0 to 60"),
        ("long", [1] * 128, params, "the model takes 128"),
        ("large", [1] * 5, params, "fill 5 pages"),
        ("text", [1], replace(params, stop="."), "stop strings"),
        ("several", [1], replace(params, n=2), "one output"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(request_id, prompt, own)
    engine.add_request("doomed", [4, 4], params)
    engine.step()
    engine.abort("doomed")
    engine.abort("never heard of")
    got = serve(engine, {0: [("late", [7], params)]})
    assert got["late"] == alone(engine.model, [7], params)


def test_an_engine_without_requests_steps_in_place():
    engine = roomy()
    report = engine.step()
    assert not report.requests and not report.finished and not engine.has_unfinished
    assert engine.metrics == replace(EngineMetrics(), seconds=engine.metrics.seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1}, "max_model_len is 1; this model takes 2 to 128"),
        ({"max_model_len": 129}, "max_model_len is 129"),
        ({"dtype": "bfloat16"}, "the model is loaded in float64 on cpu; the engine cannot run it with dtype="),
        ({"device": "cuda"}, "device='cuda'"),
        ({"page_size": 2**40}, "takes .* bytes and .* are free"),
        ({"num_pages": 10**14}, "bytes of bookkeeping"),
        ({"num_pages": 10**8}, "takes .* bytes and .* are free"),
        ({"max_batch_size": 10**12, "max_num_batched_tokens": 10**12}, "bytes of bookkeeping"),
    ],
)
def test_options_that_the_model_or_the_machine_does_not_allow_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        roomy(**options)


def test_a_window_of_any_size_is_accepted():
    assert roomy(sliding_window=10**15).config.sliding_window == 128


def test_a_request_larger_than_the_pool_is_refused_unless_its_window_is_small():
    long = ("long", [5] * 20, GREEDY)
    with pytest.raises(RequestError, match="26 tokens, which fill 7 pages"):
        roomy(num_pages=6).add_request(*long)
    small = {"num_pages": 6, "sliding_window": 4, "max_num_batched_tokens": 8}
    assert serve(roomy(**small), {0: [long]})["long"] == alone(double_model("qwen3"), long[1], GREEDY, window=4)


# --- windows, sharing, limits ----------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("attn_backend", ["torch", "flex"])
def test_a_window_holds_few_pages_of_a_long_request(attn_backend, depth):
    held = []
    engine = roomy(sliding_window=6, attn_backend=attn_backend, max_num_batched_tokens=8, pipeline_depth=depth)
    request = engine.add_request("long", [5, 6, 7] * 10, replace(GREEDY, max_tokens=20))
    while engine.has_unfinished:
        engine.step()
        held.append(engine.page_table.num_pages - engine.page_table.num_free_pages)
    assert max(held) <= (6 + 8) // 4 + 2 < 50 // 4
    assert request.output_token_ids == alone(engine.model, [5, 6, 7] * 10, replace(GREEDY, max_tokens=20), 6)


@pytest.mark.parametrize("attn_backend", ["torch", "flex"])
def test_a_page_evicted_from_one_request_serves_the_next(attn_backend):
    """The second request gets the first one's pages, where they now hold other positions."""
    engine = roomy(sliding_window=6, attn_backend=attn_backend)
    for prompt in ([5, 6, 7, 8, 9, 10, 11, 12], [21, 22, 23, 24, 25, 26, 27]):
        want = alone(engine.model, prompt, GREEDY, window=6)
        assert serve(engine, {0: [("a", prompt, GREEDY)]})["a"] == want


@DEPTHS
@pytest.mark.parametrize("end", ["abort", "length"])
def test_shared_pages_outlive_the_request_that_computed_them(depth, end):
    engine = roomy(enable_prefix_caching=True, pipeline_depth=depth)
    prompt = [9, 8, 7, 6, 5, 4, 3, 9, 8, 7]
    engine.add_request("first", prompt, replace(GREEDY, max_tokens=3))
    engine.step()
    second = engine.add_request("second", [*prompt, 11], replace(GREEDY, max_tokens=9))
    engine.step()
    if end == "abort":
        engine.abort("first")
    while engine.has_unfinished:
        engine.step()
    assert engine.metrics.shared_tokens == 10
    assert second.output_token_ids == alone(engine.model, [*prompt, 11], replace(GREEDY, max_tokens=9))
    check_nothing_leaked(engine)


def test_a_page_is_returned_when_the_widest_window_has_passed_it():
    """Gemma 2 has layers with a window of 5, and others that see as far as the engine lets them."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    engine = make_engine(double_model("gemma2"), num_pages=24, page_size=2, max_batch_size=2, sliding_window=12)
    prompt = [5, 6, 7] * 5
    assert serve(engine, {0: [("a", prompt, params)]})["a"] == alone(engine.model, prompt, params, 12)


@DEPTHS
@HYBRID
def test_pages_that_left_the_window_of_some_layers_are_free(family, depth):
    """One of the three layers sees all 60 tokens, the others the last 5."""
    prompt, params = [5, 6, 7] * 13, replace(GREEDY, max_tokens=21)
    options = {"page_size": 2, "max_num_batched_tokens": 8, "pipeline_depth": depth, "num_pages": 40}
    most = {}
    for disabled in (False, True):
        engine = make_engine(double_model(family), disable_hybrid_kv_cache_manager=disabled, **options)
        engine.add_request("long", prompt, params)
        most[disabled], num_bytes = 0, 0
        while engine.has_unfinished:
            report, table = engine.step(), engine.page_table
            most[disabled] = max(most[disabled], table.num_pages - table.num_free_pages)
            num_bytes = max(num_bytes, report.kv_bytes)
        assert len(engine.layer_groups) == (1 if disabled else 3)
        of_layer = 2 * 2 * 16 * 8  # keys and values, heads, their size, bytes of float64
        assert num_bytes == 59 * 3 * of_layer if disabled else 59 * of_layer < num_bytes <= (59 + 2 * 13) * of_layer
        assert serve(engine, {0: [("a", prompt, params)]})["a"] == alone(engine.model, prompt, params)
    assert most[True] in (29, 30) and most[False] <= 30 + 2 * ((5 + 8) // 2 + 2) < 3 * 29  # pages of one layer each


@HYBRID
def test_a_common_beginning_is_shared_although_it_has_left_the_windows(family):
    """A stream of prompts begins alike and fills a small pool again and again; see `test_grouped_prefix_tree.py`."""
    engine = make_engine(
        double_model(family), num_pages=24, page_size=2, max_batch_size=2, max_num_batched_tokens=16,
        enable_prefix_caching=True,
    )  # fmt: skip
    rng, common = np.random.default_rng(3), [7, 9, 11, 13] * 5
    for i in range(12):
        prompt = common + rng.integers(20, 60, 12).tolist()
        before = engine.metrics.shared_tokens
        got = serve(engine, {0: [(str(i), prompt, GREEDY)]}, empty_cache=False)
        assert got[str(i)] == alone(engine.model, prompt, GREEDY)
        assert i < 2 or engine.metrics.shared_tokens - before >= len(common)
    assert engine.metrics.evicted_pages > 2 * engine.page_table.num_pages


def test_the_engine_s_own_limit_ends_an_output():
    engine = roomy(max_model_len=5)
    request = engine.add_request("a", [5, 9, 33], replace(GREEDY, max_tokens=50))
    serve(engine, {})
    assert len(request.output_token_ids) == 2 and request.finish_reason == "length"


def test_requests_without_a_seed_draw_one_each():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    got = serve(roomy(), {0: [("a", [5, 9], params), ("b", [5, 9], params)]})
    assert got["a"] != got["b"]


def test_metrics_add_up():
    engine = roomy(enable_prefix_caching=True)
    arrivals = {0: [(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]}
    got = serve(engine, arrivals)
    metrics = replace(engine.metrics)
    assert metrics.prompt_tokens == sum(map(len, PROMPTS)) and metrics.hit_rate == metrics.evicted_pages == 0
    assert metrics.finished == 4 and metrics.output_tokens == sum(map(len, got.values())) == 24
    assert metrics.computed_tokens == sum(map(len, PROMPTS)) + 4 * 5 and metrics.preemptions == 0
    assert metrics.steps == 6 and metrics.seconds > 0
    for _ in range(2):  # the first call has emptied the cache
        serve(engine, {0: [("again", PROMPTS[2], GREEDY)]}, empty_cache=False)
    assert engine.metrics.shared_tokens == 8 and engine.metrics.hit_rate == 8 / (metrics.prompt_tokens + 18)


@DEPTHS
def test_pages_are_evicted_before_a_request_is_preempted_or_waits(depth):
    """Ten requests one after the other fill the pool with cached pages; two at once then need nearly all of it."""
    engine = roomy(enable_prefix_caching=True, num_pages=12, pipeline_depth=depth)
    for i in range(10):
        serve(engine, {0: [(str(i), [10 + i] * 9, GREEDY)]}, empty_cache=False)
    assert engine.page_table.num_free_pages + engine.scheduler.prefix_tree.num_evictable == 12
    assert engine.page_table.num_free_pages < 4 and engine.metrics.evicted_pages > 12
    got = serve(engine, {0: [(str(i), [30 + i] * 11, replace(GREEDY, max_tokens=11)) for i in range(2)]})
    assert got["1"] == alone(engine.model, [31] * 11, replace(GREEDY, max_tokens=11))
    assert engine.metrics.preemptions == 0


def test_a_step_reports_the_bytes_of_its_keys_and_values():
    engine = roomy()
    engine.add_request("a", [5] * 9, GREEDY)
    per_token = 3 * 2 * 2 * 16 * 8  # layers, keys and values, heads, their size, bytes of float64
    assert [engine.step().kv_bytes for _ in range(2)] == [9 * per_token, 10 * per_token]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_the_tiny_models_depend_on_attention(family):
    """Otherwise the tests of this file could not fail."""
    outputs = {tuple(alone(double_model(family), [first, 9, 33, 7], GREEDY)) for first in (5, 6, 50, 60)}
    assert len(outputs) > 1


# --- when something goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        {"top_p": 1e-50}, {"top_k": 2**63}, {"temperature": 1e-38}, {"temperature": 1e-300, "top_p": 0.9},
        {"temperature": 1e300}, {"repetition_penalty": 1e-46, "top_p": 0.9}, {"repetition_penalty": 1e39, "min_p": 0.1},
    ],
)  # fmt: skip
def test_values_that_float32_cannot_hold_harm_no_other_request(odd):
    engine = roomy()
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "seed": 1} | odd)
    strange = engine.add_request("odd", PROMPTS[2], params)
    assert serve(engine, {0: [("beside", PROMPTS[0], GREEDY)]})["beside"] == alone(engine.model, PROMPTS[0], GREEDY)
    assert len(strange.output_token_ids) == 6
    if odd.get("temperature", 1) < 1 or ("top_p" in odd and "repetition_penalty" not in odd):  # almost greedy
        assert strange.output_token_ids == alone(engine.model, PROMPTS[2], GREEDY)


def test_logits_that_are_not_numbers_end_as_tokens():
    """A broken model writes nonsense; it does not take the engine down."""
    parts = replace(Parts(), sample=lambda logits, batch: sample(torch.full_like(logits, torch.nan), batch))
    params = SamplingParams(top_p=0.9, top_k=5, max_tokens=6, ignore_eos=True)
    got = serve(roomy(parts=parts), {0: [("a", PROMPTS[0], GREEDY), ("b", PROMPTS[1], params)]})
    assert [len(tokens) for tokens in got.values()] == [6, 6]


def failing_sampler(fails: Callable[[SamplingBatch], BaseException | None]) -> Parts:
    def sampler(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if error := fails(batch):
            raise error
        return sample(logits, batch)

    return replace(Parts(), sample=sampler)


@DEPTHS
def test_a_request_whose_sampling_fails_ends_alone(depth):
    """Every step with the seed 13 fails; its request ends with the error, and the others lose nothing."""
    parts = failing_sampler(lambda batch: ArithmeticError("13") if (batch.seeds == 13).any() else None)
    engine = roomy(parts=parts, pipeline_depth=depth, enable_prefix_caching=True)
    good = [engine.add_request(str(i), prompt, replace(GREEDY, seed=i)) for i, prompt in enumerate(PROMPTS)]
    engine.step()
    bad = engine.add_request("bad", PROMPTS[2], replace(GREEDY, seed=13))
    finished: list[Request] = []
    for _ in range(100):
        finished += engine.step().finished
    assert bad.finish_reason == "error" and "ArithmeticError: 13" in str(bad.error)
    assert len(finished) == 5 and set(finished) == {*good, bad}
    for request, prompt in zip(good, PROMPTS, strict=True):
        assert request.output_token_ids == alone(engine.model, prompt, GREEDY) and request.finish_reason == "length"
    check_nothing_leaked(engine)


@DEPTHS
def test_a_step_that_runs_out_of_memory_once_loses_nothing(depth):
    # The requests of the failed step first compute one token each alone: the second failure comes after that.
    failures = iter([False, False, True, *[False] * 5, True])
    parts = failing_sampler(lambda batch: torch.OutOfMemoryError() if next(failures, False) else None)
    engine = roomy(parts=parts, pipeline_depth=depth, enable_prefix_caching=True)
    got = serve(engine, {0: [(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]})
    assert list(got.values()) == [alone(engine.model, prompt, GREEDY) for prompt in PROMPTS]
    assert next(failures, None) is None


def work_of(report: StepReport) -> list[tuple[str, int]]:
    names = [request.request_id for request in report.requests]
    return list(zip(names, report.schedule.num_new.tolist(), strict=True))


@DEPTHS
def test_after_an_error_the_requests_of_the_step_compute_a_token_each_alone(depth):
    """In order, and in chunks if they are long; a waiting request and one that arrives meanwhile join afterwards."""
    failures = iter([False, True])
    parts = failing_sampler(lambda batch: OSError() if next(failures, False) else None)
    engine = roomy(parts=parts, max_num_batched_tokens=8, pipeline_depth=depth)
    prompts = [[5 + i] * n for i, n in enumerate((3, 12, 2))]
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    assert work_of(engine.step()) == [("0", 3), ("1", 5)]
    assert engine.step().schedule.preempted == requests[:2] and engine.metrics.failed_steps == 1
    requests.append(engine.add_request("late", [9], GREEDY))
    steps = [work_of(engine.step()) for _ in range(4)]
    known = 4 - depth  # a token that was on the device is computed again
    assert steps == [[("0", known)], [("1", 8)], [("1", 4)], [("0", known + 1), ("1", 7 - known)]]
    serve(engine, {})
    for request, prompt in zip(requests, [*prompts, [9]], strict=True):
        assert request.output_token_ids == alone(engine.model, prompt, GREEDY)


@DEPTHS
def test_a_suspect_that_is_aborted_makes_room_for_the_next(depth):
    failures = iter([False, True])
    parts = failing_sampler(lambda batch: OSError() if next(failures, False) else None)
    engine = roomy(parts=parts, pipeline_depth=depth)
    for name in "abc":
        engine.add_request(name, [5, 6], GREEDY)
    engine.step()
    engine.step()
    engine.abort("a")
    engine.abort("c")
    assert [name for name, _ in work_of(engine.step())] == ["b"]
    assert serve(engine, {0: [("a", [5, 6], GREEDY)]})["a"] == alone(engine.model, [5, 6], GREEDY)


@DEPTHS
def test_a_step_whose_tokens_cannot_be_read_counts_as_not_launched(depth, monkeypatch):
    engine = roomy(pipeline_depth=depth)
    request = engine.add_request("a", PROMPTS[0], GREEDY)
    collect, failures = engine.executor.collect, iter([False, True])

    def fails_once(launched):
        if next(failures, False):
            raise RuntimeError("the device reports an error")
        return collect(launched)

    monkeypatch.setattr(engine.executor, "collect", fails_once)
    while engine.has_unfinished:
        report = engine.step()
        assert len(report.requests) == len(report.schedule.rows)
        assert (report.step is None) == (len(report.requests) == 0)
    assert next(failures, None) is None
    assert request.output_token_ids == alone(engine.model, PROMPTS[0], GREEDY)


@DEPTHS
def test_an_interrupt_anywhere_in_a_step_loses_no_token(depth, monkeypatch):
    """Ctrl-C at the n-th call inside a step, for one n after the other; the caller keeps stepping."""
    doors = [
        (LocalExecutor, "launch"), (LocalExecutor, "collect"), (LocalExecutor, "_build"), (Scheduler, "schedule"),
        (Scheduler, "reserve"), (Scheduler, "remove"), (Scheduler, "preempt"), (Request, "end_of"), (Core, "end"),
        (LLMEngine, "_report"), (Core, "_launch"), (Core, "_collect"), (Running, "count"),
    ]  # fmt: skip
    arrivals = [(str(i), prompt, replace(GREEDY, max_tokens=5 + i)) for i, prompt in enumerate(PROMPTS)]
    want = {name: alone(double_model("qwen3"), prompt, params) for name, prompt, params in arrivals}
    for owner, name in doors:
        for when in (1, 2, 5, 9):
            for before in (True, False):
                engine = roomy(pipeline_depth=depth, num_pages=9, enable_prefix_caching=True)
                handles = [engine.add_request(*arrival) for arrival in arrivals]
                calls, interrupts = 0, 0
                original = getattr(owner, name)

                def interrupted(*args, _original=original, _before=before, _when=when, **kwargs):
                    nonlocal calls
                    calls += 1
                    if calls == _when and _before:
                        raise KeyboardInterrupt
                    result = _original(*args, **kwargs)
                    if calls == _when:
                        raise KeyboardInterrupt
                    return result

                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, interrupted)
                    for _ in range(80):  # a request that is stuck would never end
                        if not engine.has_unfinished:
                            break
                        try:
                            engine.step()
                        except KeyboardInterrupt:
                            interrupts += 1
                case = f"{name}, call {when}, {'before' if before else 'after'}"
                assert interrupts == (calls >= when), case
                assert not engine.has_unfinished, case
                assert {h.request_id: h.output_token_ids for h in handles} == want, case
                assert {h.finish_reason for h in handles} == {"length"}, case
                check_nothing_leaked(engine)


def interrupt_once(owner: type, name: str, patch: pytest.MonkeyPatch, when: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    def interrupted(*args, **kwargs):
        if when(*args, **kwargs):
            patch.setattr(owner, name, original)
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


@DEPTHS
def test_an_interrupt_while_a_step_is_counted_leaves_its_requests_to_the_next_report(depth, monkeypatch):
    engine = roomy(pipeline_depth=depth)
    request = engine.add_request("a", PROMPTS[0], GREEDY)
    interrupt_once(EngineMetrics, "add", monkeypatch, lambda metrics, report, _: bool(report.finished))
    with pytest.raises(KeyboardInterrupt):
        serve(engine, {})
    assert engine.step().finished == [request] and engine.metrics.finished == 1
    assert request.output_token_ids == alone(engine.model, PROMPTS[0], GREEDY)


@DEPTHS
@pytest.mark.parametrize("second", ["reset", "__init__", "known_tokens"])
def test_a_second_interrupt_while_the_engine_starts_over_loses_no_token(depth, second, monkeypatch):
    engine = roomy(pipeline_depth=depth)
    requests = [engine.add_request(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    engine.step(), engine.step()
    owner = {"reset": LocalExecutor, "__init__": Scheduler, "known_tokens": Running}[second]
    interrupt_once(LocalExecutor, "launch", monkeypatch, lambda *_: True)
    interrupt_once(owner, second, monkeypatch, lambda *_, **__: True)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    serve(engine, {})
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert request.output_token_ids == alone(engine.model, prompt, GREEDY)
    check_nothing_leaked(engine)


def test_end_tokens_of_requests_that_have_left_cost_nothing():
    engine = roomy()
    for ends in (range(100, 400), ()):
        engine.add_request("a", PROMPTS[0], replace(GREEDY, stop_token_ids=tuple(ends)))
        engine.step()
        assert len(engine.scheduler.running.end_tokens) == len(ends)
        serve(engine, {})


def test_a_graph_larger_than_any_step_is_refused():
    with pytest.raises(ConfigError, match="cuda_graph_batch_sizes has 1000000000"):
        roomy(cuda_graph_batch_sizes=(1, 10**9))


def test_a_persistent_kernel_without_a_graph_to_run_in_is_refused(monkeypatch):
    monkeypatch.setattr(PersistentDecode, "accepts", lambda *args: True)
    for options in ({"enforce_eager": True}, {"cuda_graph_batch_sizes": [2, 4]}):
        with pytest.raises(ConfigError, match="persistent_decode takes the place of the CUDA graph"):
            roomy("llama", persistent_decode=True, **options)


def test_scheduling_parts_that_compute_nothing_are_an_error_and_not_a_loop():
    parts = replace(Parts(), admit=lambda num_tokens, num_pages, *, budget, free_pages, free_rows: 0)
    engine = roomy(parts=parts)
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(ScheduleError, match="1 requests wait"):
        engine.step()


def test_a_listener_that_fails_takes_no_token_away():
    def fail(engine: LLMEngine, report: StepReport) -> None:
        raise ZeroDivisionError

    engine = roomy(on_step=fail)
    request = engine.add_request("0", PROMPTS[0], GREEDY)
    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert not engine.has_unfinished and request.finish_reason == "length"
    assert request.output_token_ids == alone(engine.model, PROMPTS[0], GREEDY)
    check_nothing_leaked(engine)


def test_a_listener_may_abort_and_add_requests():
    """A chat whose next turn begins as soon as the last one has ended, while another request is aborted."""
    turns: list[Request] = []

    def next_turn(engine: LLMEngine, report: StepReport) -> None:
        if any(request.request_id == "chat" for request in report.finished) and not turns:
            engine.abort("other")
            turns.append(engine.add_request("chat", PROMPTS[2], GREEDY))

    engine = roomy(on_step=next_turn)
    other = engine.add_request("other", PROMPTS[1], replace(GREEDY, max_tokens=50))
    serve(engine, {0: [("chat", PROMPTS[0], GREEDY)]})
    assert other.finish_reason == "abort" and turns[0].output_token_ids == alone(engine.model, PROMPTS[2], GREEDY)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_warm_up_runs_prompts_and_decodes_of_all_sizes_and_leaves_no_trace(depth, monkeypatch):
    sizes: set[tuple[int, int]] = set()
    build = StepBatch.build

    def recorded(**given):
        batch = build(**given)
        sizes.add((batch.num_sequences, batch.num_tokens))
        return batch

    reports: list[StepReport] = []
    with monkeypatch.context() as patch:
        patch.setattr(StepBatch, "build", recorded)
        engine = roomy(
            max_batch_size=6, max_num_batched_tokens=40, pipeline_depth=depth, enable_prefix_caching=True, warm_up=True,
            on_step=lambda engine, report: reports.append(report),
        )  # fmt: skip
    assert {(1, 40), (1, 1), (2, 2), (4, 4), (6, 6)} <= sizes
    assert engine.metrics == EngineMetrics() and not reports and engine.page_table.num_free_pages == 24
    assert serve(engine, {0: [("0", PROMPTS[0], GREEDY)]})["0"] == alone(engine.model, PROMPTS[0], GREEDY)
    assert reports


def test_the_longest_step_fits_a_pool_that_is_smaller_than_a_step():
    engine = roomy()
    engine._run_longest(replace(engine.config, num_pages=3, max_batch_size=1))


def test_the_step_that_measures_memory_computes_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests must not share pages; otherwise the step would be far smaller than the largest one."""
    sizes: list[tuple[int, int]] = []
    launch = LocalExecutor.launch

    def spied(executor: LocalExecutor, step: StepInput) -> Ticket:
        sizes.append((len(step.rows), len(step.token_ids)))
        return launch(executor, step)

    monkeypatch.setattr(LocalExecutor, "launch", spied)
    options = {"max_batch_size": 4, "max_num_batched_tokens": 64, "page_size": 4, "enable_prefix_caching": True}
    engine = roomy(**options)
    few = 64 // 4 + 4  # pages, as in `measured_pages`
    engine._run_longest(replace(engine.config, num_pages=few))
    assert max(sizes) == (4, 64)
    assert engine.metrics == EngineMetrics()


def test_an_engine_that_is_too_small_for_a_warm_up_starts_without():
    engine = roomy(num_pages=1, page_size=2, max_batch_size=1, warm_up=True)
    assert serve(engine, {0: [("0", [5], replace(GREEDY, max_tokens=1))]})["0"] == alone(
        engine.model, [5], replace(GREEDY, max_tokens=1)
    )


def test_a_warm_up_that_fails_says_why(monkeypatch):
    def fail(self, batch):
        raise OSError("no compiler")

    monkeypatch.setattr("mini_engine.attention.torch.TorchBackend.plan", fail)
    with pytest.raises(RequestError, match="no compiler"):
        roomy(warm_up=True)


@pytest.mark.parametrize("attn_backend", [name for name, info in BACKENDS.items() if "cpu" in info.devices])
def test_the_engine_runs_on_every_part_that_the_backend_does_not_bypass(attn_backend):
    parts, calls = counting_parts()
    prompt = list(range(3, 36)) * 2  # longer than a KV tile of "chunked"
    shared = {0: [("long", prompt, GREEDY)], 1: [("sharer", [*prompt[:11], 50], GREEDY)]}
    tight = {0: [(str(i), [i] * 4, replace(GREEDY, max_tokens=8)) for i in range(2)]}
    for family in ("qwen3", "gpt2"):
        model = our_model(transformers_model(family, seed=2, dtype=torch.float64), parts=parts)
        for arrivals, num_pages, window in ((shared, 50, 66), (tight, 8, 66), (shared, 50, None)):  # None: levels
            engine = make_engine(
                model, attn_backend=attn_backend, parts=parts, num_pages=num_pages, page_size=2, max_batch_size=2,
                enable_prefix_caching=True, sliding_window=window, max_num_batched_tokens=20,
                cuda_graph_batch_sizes=(3,),
            )  # fmt: skip
            got = serve(engine, arrivals)
            for name, tokens, params in [request for several in arrivals.values() for request in several]:
                assert got[name] == alone(double_model(family), tokens, params, window, guess=got[name])
    bypassed = engine.backend.bypasses
    assert bypassed < {field.name for field in fields(Parts)}
    unused = {field.name for field in fields(Parts) if calls[field.name] == 0}
    # Only "chunked" splits keys of so few tokens, no request here has registered chunks before it, and stop strings are
    # the text front end's.
    assert unused <= bypassed | {"merge_states", "chunk_levels", "scan_stop"}


# --- several threads -------------------------------------------------------------------------------------------------


def test_threads_may_share_an_engine():
    import threading

    engine = roomy(max_batch_size=4, num_pages=60)
    want = {i: alone(engine.model, PROMPTS[i], replace(GREEDY, max_tokens=12)) for i in range(4)}
    wrong: list[str] = []

    def work(i: int) -> None:
        for turn in range(5):
            request = engine.add_request(f"{i} {turn}", PROMPTS[i], replace(GREEDY, max_tokens=12))
            while request.finish_reason is None:
                engine.step()
            if request.output_token_ids != want[i]:
                wrong.append(request.request_id)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    check_nothing_leaked(engine)


def test_a_reset_prefix_cache_matches_nothing():
    model = double_model("llama")
    engine = make_engine(model, page_size=2, num_pages=40, enable_prefix_caching=True)
    prompt = list(range(3, 20))
    first = serve(engine, {0: [("a", prompt, GREEDY)]}, empty_cache=False)
    assert serve(engine, {0: [("b", prompt, GREEDY)]}, empty_cache=False)["b"] == first["a"]
    shared = engine.metrics.shared_tokens
    assert shared
    engine.reset_prefix_cache()
    assert engine.page_table.num_free_pages == 40
    assert serve(engine, {0: [("c", prompt, GREEDY)]})["c"] == first["a"]
    assert engine.metrics.shared_tokens == shared
    engine.add_request("d", prompt, GREEDY)
    with pytest.raises(RequestError, match="unfinished"):
        engine.reset_prefix_cache()


def test_a_seeded_engine_draws_the_same_seeds():
    drawn = [[roomy(seed=seed).add_request("a", [5], GREEDY).seed for _ in range(2)] for seed in (3, 4)]
    assert drawn[0][0] == drawn[0][1] != drawn[1][0] == drawn[1][1]
