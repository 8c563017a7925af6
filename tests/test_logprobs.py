"""Log probabilities are those of transformers' logits, however the engine computes a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine import executor
from mini_engine.engine import LLMEngine
from mini_engine.errors import RequestError
from mini_engine.logprobs import Logprob
from mini_engine.outputs import StepReport
from mini_engine.parts import default_parts
from mini_engine.request import Request
from mini_engine.sampling_params import SamplingParams
from mini_engine.transfer import borrow
from tests.attention.greedy import TINY
from tests.helpers import (
    GREEDY,
    check_nothing_leaked,
    double_model,
    make_engine,
    make_text_engine,
    requests,
    serve,
)
from tests.models.families import FAMILIES, WITHOUT_MLA, our_model, their_logits, transformers_model

PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
# Everything that changes the distribution from which a token is sampled, but not its log probability.
FILTERED = SamplingParams(
    temperature=0.7, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5,
    frequency_penalty=0.2, logit_bias={4: 3.0}, bad_words_token_ids=[[8]], min_tokens=3, seed=4, max_tokens=9,
)  # fmt: skip


@cache
def theirs(family: str, dtype: torch.dtype) -> Any:
    return transformers_model(family, seed=2, dtype=dtype)


@cache
def expected(family: str, token_ids: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Log probabilities by transformers: row p holds those of the token at position p + 1."""
    return their_logits(theirs(family, dtype), token_ids).double().log_softmax(-1)


def check_token(token_ids: Sequence[int], logprobs: Sequence[float], rank: int, num_top: int, want: Tensor) -> None:
    """One token and the likeliest ones; numbers that are almost equal may change places."""
    tolerance, num_top = 2e-5, len(want) if num_top == -1 else num_top
    assert len(token_ids) == len(logprobs) == num_top + 1
    assert len(set(token_ids[1:])) == num_top
    got = torch.tensor(logprobs, dtype=torch.float64)
    torch.testing.assert_close(got, want[list(token_ids)], atol=tolerance, rtol=0)
    torch.testing.assert_close(got[1:], want.topk(num_top).values, atol=tolerance, rtol=0)
    assert (want > got[0] + tolerance).sum() < rank <= (want > got[0] - 2 * tolerance).sum()


def check(request: Request, family: str, num_placed: int = 0, dtype: torch.dtype = torch.float64) -> None:
    """What a request has collected: its parameters say for which positions."""
    params, tokens, num_prompt = request.params, request.token_ids, len(request.prompt_token_ids)
    asked: dict[int, int] = {}
    if params.prompt_logprobs is not None:
        asked |= dict.fromkeys(range(num_placed + 1, num_prompt), params.prompt_logprobs)
    if params.logprobs is not None:
        asked |= dict.fromkeys(range(num_prompt, len(tokens)), params.logprobs)
    # A token computed past an end is dropped; its log probabilities are at a position that is never read.
    assert sorted(p for p in request.logprobs if p < len(tokens)) == sorted(asked)
    want = expected(family, tuple(tokens), dtype)
    for position, num_top in asked.items():
        token_ids, logprobs, rank = request.logprobs[position]
        assert token_ids[0] == tokens[position]
        check_token(token_ids.tolist(), logprobs.tolist(), rank, num_top, want[position - 1])


def run(engine: LLMEngine, arrivals: dict[int, list[tuple[str, list[int], SamplingParams]]]) -> list[Request]:
    """Serve requests, and return them once they have ended."""
    finished: list[Request] = []
    on_step, engine._on_step = engine._on_step, lambda _, report: finished.extend(report.finished)
    try:
        serve(engine, arrivals)
    finally:
        engine._on_step = on_step
    return finished


# --- the engine ------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.sampled_from(["torch", "torch_padded", "cascade"]))
def test_any_schedule_gives_the_log_probabilities_of_transformers(
    data: st.DataObject, family: str, attn_backend: str
) -> None:
    """Chunked prompts, shared prefixes, preemption, depth, padding, and requests beside them that ask for none."""
    assume(family in WITHOUT_MLA or attn_backend != "cascade")
    made = data.draw(requests(5, 16))
    wanted = st.none() | st.integers(-1, 61)
    asking = [
        (name, prompt, replace(params, logprobs=data.draw(wanted), prompt_logprobs=data.draw(wanted)))
        for name, prompt, params in made
    ]
    at = [data.draw(st.integers(0, 4)) for _ in made]
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    needed = max(-(-(len(prompt) + params.max_tokens) // page_size) for _, prompt, params in made)
    rows = data.draw(st.integers(1, 4))
    options = {
        "attn_backend": attn_backend,
        "num_pages": needed + data.draw(st.integers(0, 4)), "page_size": page_size, "max_batch_size": rows,
        "max_num_batched_tokens": rows + data.draw(st.integers(0, 12)),
        "enable_prefix_caching": data.draw(st.booleans()), "pipeline_depth": data.draw(st.integers(0, 1)),
        "cuda_graph_batch_sizes": data.draw(st.none() | st.lists(st.integers(1, 4))),
    }  # fmt: skip
    engine = make_engine(double_model(family), **options)
    ended = run(engine, {step: [asking[i] for i in range(len(made)) if at[i] == step] for step in set(at)})
    assert len(ended) == len(made)
    for request in ended:
        check(request, family)
    plain = make_engine(double_model(family), **options)
    want = serve(plain, {step: [made[i] for i in range(len(made)) if at[i] == step] for step in set(at)})
    assert {request.request_id: request.output_token_ids for request in ended} == want


@DEPTHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_filters_and_penalties_change_tokens_and_not_log_probabilities(
    family: str, dtype: torch.dtype, depth: int
) -> None:
    model = our_model(theirs(family, dtype))
    params = [
        replace(FILTERED, logprobs=2, prompt_logprobs=0), replace(GREEDY, logprobs=0, prompt_logprobs=-1),
        replace(FILTERED, logprobs=-1), replace(GREEDY, prompt_logprobs=3),
    ]  # fmt: skip
    engine = make_engine(model, num_pages=24, page_size=4, max_batch_size=4, pipeline_depth=depth)
    for request in run(engine, {0: [(str(i), PROMPTS[i], params[i]) for i in range(4)]}):
        check(request, family, dtype=dtype)


@DEPTHS
def test_preempted_and_sharing_requests_lose_and_repeat_nothing(depth: int) -> None:
    """Requests are preempted in the middle of their prompts and behind them, beside requests that ask for nothing."""
    preempted_in_prompt = preempted_behind = shared = 0

    def watch(_: LLMEngine, report: StepReport) -> None:
        nonlocal preempted_in_prompt, preempted_behind
        for request in report.schedule.preempted:
            if request.params.prompt_logprobs is not None:
                has_all = len(request.prompt_token_ids) - 1 in request.logprobs
                preempted_behind += has_all
                preempted_in_prompt += not has_all and bool(request.logprobs)

    options = {
        "page_size": 1, "max_batch_size": 3, "max_num_batched_tokens": 3,
        "enable_prefix_caching": True, "pipeline_depth": depth,
    }  # fmt: skip
    stem = list(range(3, 13))
    for num_pages in (24, 38):
        engine = make_engine(double_model("qwen3"), num_pages=num_pages, on_step=watch, **options)
        plain = SamplingParams(max_tokens=15, seed=1, ignore_eos=True)
        asking = replace(plain, max_tokens=7, logprobs=1, prompt_logprobs=2)
        # The outputs of the first two take the pages of the third while a token of its prompt is computed in each step.
        made = [("a", [5], plain), ("b", [7, 8], plain), ("c", [*stem, 20], asking), ("d", [*stem, 21], asking)]
        made.append(("e", [*stem, 22], replace(asking, prompt_logprobs=None)))
        served = [engine.add_request(*one) for one in made]
        while engine.has_unfinished:
            engine.step()
        for request in served:
            check(request, "qwen3")
        shared += engine.metrics.shared_tokens
        check_nothing_leaked(engine)
    assert preempted_in_prompt and preempted_behind and shared, (preempted_in_prompt, preempted_behind, shared)


def test_a_prompt_with_log_probabilities_is_computed_and_then_shared() -> None:
    engine = make_engine(double_model("llama"), page_size=2, num_pages=60, enable_prefix_caching=True)
    prompt = list(range(3, 20))
    serve(engine, {0: [("first", prompt, GREEDY)]}, empty_cache=False)
    [asking] = [engine.add_request("asking", prompt, replace(GREEDY, prompt_logprobs=1))]
    serve(engine, {}, empty_cache=False)
    assert engine.metrics.shared_tokens == 0
    check(asking, "llama")
    sampled = engine.add_request("sampled", prompt, replace(GREEDY, logprobs=1))
    serve(engine, {})
    assert engine.metrics.shared_tokens == 16
    check(sampled, "llama")


@DEPTHS
def test_after_a_failed_step_nothing_is_missing(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch or a collect fails: the requests are computed again, one at a time."""
    for name in ("launch", "collect"):
        for fails_at in range(1, 7):
            engine = make_engine(
                double_model("qwen3"), num_pages=24, page_size=4, max_batch_size=4, pipeline_depth=depth,
                max_num_batched_tokens=6, enable_prefix_caching=True,
            )  # fmt: skip
            original, calls = getattr(engine.executor, name), iter(range(1, 1000))

            def fails_once(argument: Any, original: Any = original, calls: Any = calls, at: int = fails_at) -> Any:
                if next(calls) == at:
                    raise RuntimeError("the device reports an error")
                return original(argument)

            monkeypatch.setattr(engine.executor, name, fails_once)
            asking = replace(FILTERED, logprobs=1, prompt_logprobs=1)
            ended = run(engine, {0: [(str(i), prompt, asking) for i, prompt in enumerate(PROMPTS)]})
            assert engine.metrics.failed_steps == 1
            for request in ended:
                check(request, "qwen3")


@DEPTHS
def test_an_interrupt_loses_nothing(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before or after log probabilities are stored."""
    from mini_engine import core

    keep = core.keep_logprobs
    for interrupted_at in range(1, 6):
        for before in (False, True):
            calls = iter(range(1, 1000))

            def interrupted(*args: Any, calls: Any = calls, at: int = interrupted_at, before: bool = before) -> None:
                is_now = next(calls) == at
                if is_now and before:
                    raise KeyboardInterrupt
                keep(*args)
                if is_now:
                    raise KeyboardInterrupt

            engine = make_engine(
                double_model("qwen3"), num_pages=24, page_size=4, max_batch_size=4, pipeline_depth=depth,
                max_num_batched_tokens=6,
            )  # fmt: skip
            monkeypatch.setattr(core, "keep_logprobs", interrupted)
            asking = replace(FILTERED, logprobs=1, prompt_logprobs=1)
            served = [engine.add_request(str(i), prompt, asking) for i, prompt in enumerate(PROMPTS)]
            interrupts = 0
            while engine.has_unfinished:
                try:
                    engine.step()
                except KeyboardInterrupt:
                    interrupts += 1
            assert interrupts == 1
            for request in served:
                check(request, "qwen3")


def test_prompts_longer_than_a_part_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LOGPROB_ROWS", 4)
    engine = make_engine(double_model("llama"), num_pages=24, page_size=4, max_batch_size=2)
    long = [3 + 7 * i % 50 for i in range(30)]
    for request in run(engine, {0: [("a", long, replace(GREEDY, prompt_logprobs=2)), ("b", [5], GREEDY)]}):
        check(request, "llama")


def test_steps_without_such_requests_compute_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps that have a request with log probabilities compute any, and only for its own tokens."""
    num_rows: list[int] = []

    def counted(logits: Tensor, token_ids: Tensor, num_top: int) -> Any:
        num_rows.append(len(logits))
        return original(logits, token_ids, num_top)

    original = executor.logprobs_of
    monkeypatch.setattr(executor, "logprobs_of", counted)
    steps: list[StepReport] = []
    engine = make_engine(
        double_model("llama"), num_pages=24, page_size=4, max_batch_size=4,
        on_step=lambda _, report: steps.append(report),
    )  # fmt: skip
    serve(
        engine,
        {
            0: [("plain", PROMPTS[0], replace(GREEDY, max_tokens=9))],
            2: [("a", PROMPTS[2], replace(GREEDY, logprobs=0, max_tokens=3))],
        },
    )
    assert [bool(report.step.logprobs) for report in steps if report.step] == [2 <= i < 5 for i in range(9)]
    assert num_rows == [1, 1, 1]
    assert engine.scheduler.running.num_asking == 0


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    engine = make_engine(double_model("llama"), num_pages=24, page_size=4)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{name} is 62; the model has 61 tokens"):
            engine.add_request("a", [5], replace(GREEDY, **{name: 62}))
    assert not engine.has_unfinished


# --- text ------------------------------------------------------------------------------------------------------------


def check_dict(of_token: dict[int, Logprob], token_id: int, num_top: int, want: Tensor) -> None:
    """The sampled token and the likeliest, which may include it, in vLLM's form."""
    first, *rest = of_token
    assert first == token_id
    likeliest = want.topk(num_top).indices.tolist()
    assert rest == [i for i in likeliest if i != token_id]
    for i, one in of_token.items():
        assert one.decoded_token == f"w{i}" and abs(one.logprob - want[i]) < 2e-5
        assert one.rank == int((want >= want[i]).sum())


@DEPTHS
@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": True, "page_size": 1, "max_num_batched_tokens": 5}])
def test_outputs_have_the_form_of_vllm(depth: int, options: dict[str, Any]) -> None:
    llm = make_text_engine(
        double_model("qwen3"),
        **{"num_pages": 60, "page_size": 4, "max_batch_size": 3, "pipeline_depth": depth} | options,
    )
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, n=3, logprobs=2, prompt_logprobs=1)
    plain = SamplingParams(temperature=1.0, seed=9, max_tokens=6)
    outputs = llm.generate(PROMPTS, [params, plain, params, plain])
    for output in outputs[1::2]:
        assert output.prompt_logprobs is None
        assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    for prompt, output in zip(PROMPTS[::2], outputs[::2], strict=True):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        assert len({tuple(one.token_ids) for one in output.outputs}) > 1
        for one in output.outputs:
            want = expected("qwen3", (*prompt, *one.token_ids))
            assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
            for position, token_id in enumerate(one.token_ids, len(prompt)):
                check_dict(one.logprobs[position - len(prompt)], token_id, 2, want[position - 1])
            for position in range(1, len(prompt)):
                of_token = output.prompt_logprobs[position]
                assert of_token is not None
                check_dict(of_token, prompt[position], 1, want[position - 1])
            positions = torch.arange(len(prompt) - 1, len(prompt) + len(one.token_ids) - 1)
            assert abs(one.cumulative_logprob - float(want[positions, one.token_ids].sum())) < 1e-4
    streamed = [piece.output for piece in llm.stream_batch(PROMPTS, [params, plain, params, plain]) if piece.output]
    assert sorted(streamed, key=lambda output: PROMPTS.index(output.prompt)) == outputs


@DEPTHS
def test_a_stop_string_cuts_off_log_probabilities_with_their_tokens(depth: int) -> None:
    llm = make_text_engine(double_model("qwen3"), num_pages=60, page_size=4, max_batch_size=3, pipeline_depth=depth)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    [whole] = llm.generate(PROMPTS[0], params)
    stop = f"w{whole.token_ids[4]}"
    assert all(f"w{token_id}" != stop for token_id in whole.token_ids[:4])
    [cut] = llm.generate(PROMPTS[0], replace(params, stop=stop + " "))  # complete with the token after it
    assert cut.finish_reason == "stop" and cut.token_ids == whole.token_ids[:6]
    assert cut.outputs[0].logprobs == whole.outputs[0].logprobs[:6] and cut.prompt_logprobs == whole.prompt_logprobs
    [ended] = llm.generate(PROMPTS[0], replace(params, stop_token_ids=[whole.token_ids[4]]))
    assert ended.token_ids == whole.token_ids[:5] and ended.outputs[0].logprobs == whole.outputs[0].logprobs[:5]


def test_all_tokens_one_token_and_no_text() -> None:
    llm = make_text_engine(double_model("qwen3"), num_pages=60, page_size=4, max_batch_size=3)
    for num_top, num_entries in ((-1, 61), (0, 1)):
        [output] = llm.generate(PROMPTS[0], replace(GREEDY, logprobs=num_top, prompt_logprobs=num_top))
        assert [len(of) for of in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:])] == [num_entries] * 8
    [output] = llm.generate(PROMPTS[0], replace(GREEDY, logprobs=1, detokenize=False))
    assert {one.decoded_token for of in output.outputs[0].logprobs for one in of.values()} == {None}
    [output] = llm.generate(PROMPTS[1], replace(GREEDY, prompt_logprobs=1))
    assert output.prompt_logprobs == [None] and output.outputs[0].logprobs is None


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("attn_backend", ["flashinfer", "flash_decoding"])
def test_captured_steps_give_the_log_probabilities_of_eager_ones(attn_backend: str) -> None:
    """Graphs of several sizes share memory, so logits read too late would be those of another step.

    The requests end one after the other, so the steps replay graph after graph.
    """
    pytest.importorskip("flashinfer")
    gpu = torch.device("cuda")
    theirs = transformers_model("qwen3", seed=2, dtype=torch.bfloat16, **TINY["qwen3"])
    model = our_model(theirs, parts=default_parts(gpu)).to(gpu)
    options = {"parts": default_parts(gpu), "num_pages": 200, "max_batch_size": 8, "attn_backend": attn_backend}
    llm, eager = (make_text_engine(model, enforce_eager=is_eager, **options) for is_eager in (False, True))
    assert len(llm.engine.executor._graphs.sizes) >= 4 and not eager.engine.executor._graphs.sizes
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 61, (7 + 5 * i,), generator=generator).tolist() for i in range(7)]
    asking = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=3)
    params = [replace(asking, max_tokens=6 + 3 * i, logprobs=None if i == 3 else 3) for i in range(7)]
    outputs = llm.generate(prompts, params)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if i == 3:
            assert output.outputs[0].logprobs is None
            continue
        again = eager.generate([prompt + output.token_ids], replace(asking, max_tokens=1, prompt_logprobs=20))[0]
        differences = []
        for token_id, of, want in zip(
            output.token_ids, output.outputs[0].logprobs, again.prompt_logprobs[len(prompt) :], strict=True
        ):
            # The token is the maximum of the very logits of which these are the log probabilities.
            assert of[token_id].logprob == max(one.logprob for one in of.values())
            assert token_id in want
            differences += [abs(one.logprob - want[other].logprob) for other, one in of.items() if other in want]
        # In bfloat16, batches of different sizes round differently.
        assert max(differences) < 0.2 and sum(differences) / len(differences) < 0.04, (i, max(differences))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_borrowed_memory_is_not_kept(dtype: torch.dtype) -> None:
    whole = torch.arange(2**20, device="cuda").to(dtype).view(1024, 1024)
    part = whole[3:, ::2]
    view, want = borrow(part), part.clone()
    assert view.dtype == dtype and view.data_ptr() == part.data_ptr() and torch.equal(view, want)
    allocated = torch.cuda.memory_allocated()
    del whole, part
    assert torch.cuda.memory_allocated() <= allocated - 2**20 * dtype.itemsize
