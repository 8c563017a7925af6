"""A trace accounts for every token and every page of a run, and its file holds all of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import ValuesView
from dataclasses import replace

import pytest

from mini_engine.errors import TraceFileError
from mini_engine.observe.trace import Queue, Token, Trace, TraceStep, Work, tokens_per_second
from mini_engine.sampling_params import SamplingParams
from tests.helpers import GREEDY, WORDS, double_model, make_engine, make_text_engine, read_trace


def test_the_run_is_worth_recording(run):
    steps = run.trace.steps
    assert {work.kind for step in steps for work in step.batch} == {"prefill", "chunk", "decode"}
    assert sum(len(step.preempted) for step in steps) >= 2


def test_every_token_is_accounted_for(run):
    steps = run.trace.steps
    prompts = {name: n for step in steps for name, n in step.arrived.items()}
    assert prompts == {name: len(prompt) for name, prompt in run.prompts.items()}
    sampled: dict[str, list[int]] = {name: [] for name in run.prompts}
    computed, lost = Counter(), Counter()
    for step in steps:
        for name in step.preempted:
            lost[name] += computed.pop(name)
        for work in step.batch:
            computed[work.request_id] += work.num_new
            assert work.num_computed == computed[work.request_id]
            if run.depth == 0:  # a step samples for the requests whose tokens are all computed
                has = prompts[work.request_id] + len(sampled[work.request_id])
                samples = work.request_id in [token.request_id for token in step.outputs]
                assert work.num_computed == has if samples else work.num_computed < has
        for token in step.outputs:
            sampled[token.request_id].append(token.token_id)
    assert {name: tokens for name, tokens in sampled.items() if tokens} == run.answers
    # The last token of an answer is never fed back; the others are computed once, and again after a preemption.
    expected = {name: len(prompt) + run.num_outputs - 1 for name, prompt in run.prompts.items() if name != "gone"}
    assert {name: computed[name] for name in expected} == expected
    assert sum(step.num_tokens for step in steps) == sum(computed.values()) + sum(lost.values())


def test_the_text_of_the_tokens_is_the_text_of_the_answer(run):
    for name, answer in run.answers.items():
        tokens = [token for step in run.trace.steps for token in step.outputs if token.request_id == name]
        whole = WORDS.decode(run.prompts[name] + answer)
        assert "".join(token.text for token in tokens) == whole.removeprefix(WORDS.decode(run.prompts[name]))


def test_every_page_is_accounted_for(run):
    trace = run.trace
    assert (trace.num_pages, trace.page_size) == (12, 2)
    for step in trace.steps:
        owned = [page for pages in step.pages.values() for page in pages]
        assert len(owned) == len(set(owned)) == step.num_pages_in_use <= trace.num_pages
        assert all(0 <= page < trace.num_pages for page in owned)
        for work in step.batch:
            assert len(step.pages[work.request_id]) >= math.ceil(work.num_computed / trace.page_size)
    for before, after in zip(trace.steps, trace.steps[1:], strict=False):
        for name, pages in before.pages.items():
            gone = name in before.ended or name in after.preempted or name in after.left
            gone |= name in after.ended and name not in after.pages  # at depth 1, before the step was launched
            # A request keeps its pages, in order, until it ends, is preempted or is aborted.
            assert name not in after.pages if gone else after.pages[name][: len(pages)] == pages
        assert set(after.pages) - set(before.pages) == set(after.admitted) - set(before.pages)


def test_every_request_waits_runs_and_ends(run):
    trace = run.trace
    waiting: set[str] = set()
    running: set[str] = set()
    for step, queue in zip(trace.steps, trace.queues(), strict=True):
        assert not set(step.arrived) & (waiting | running)
        waiting |= set(step.arrived)
        waiting -= set(step.left)
        running -= set(step.left) | set(step.preempted)
        waiting |= set(step.preempted)
        assert set(step.admitted) <= waiting
        waiting -= set(step.admitted)
        running |= set(step.admitted)
        if run.depth == 1:  # pages were short, and the end of a request has freed its pages before the launch
            running -= set(step.ended) - set(step.pages)
        assert (set(queue), set(step.pages)) == (waiting, running)
        running -= set(step.ended)
    assert not waiting and not running
    assert [name for step in trace.steps for name in step.left] == ["gone"]
    assert Counter(name for step in trace.steps for name in step.ended) == Counter("abcd")


def test_the_queue_is_the_schedulers():
    """At every step of a run with preemptions, in order."""
    trace, queues = Trace(), []

    def on_step(engine, report):
        trace.record(engine, report)
        queues.append([request.request_id for request in engine.scheduler.waiting])

    engine = make_engine(
        double_model("llama"), num_pages=10, page_size=2, max_batch_size=3, max_num_batched_tokens=5, on_step=on_step
    )
    for index in range(9):
        engine.add_request(str(index), [3 + index] * (1 + index % 4), replace(GREEDY, max_tokens=3 + index))
    while engine.has_unfinished:
        engine.step()
    assert any(step.preempted for step in trace.steps)
    assert trace.queues() == queues


def test_recording_does_not_read_the_queue():
    """Of 1,000 requests, a step looks only at the new ones and at one that it has seen before."""
    trace, looks = Trace(), Counter()

    class Watched(ValuesView):
        def __reversed__(self):
            for name in reversed(self._mapping):
                looks[len(trace.steps)] += 1
                yield self._mapping[name]

    class Requests(dict):
        def values(self):
            return Watched(self)

    def on_step(engine, report):
        requests, engine.core.requests = engine.requests, Requests(engine.requests)
        trace.record(engine, report)
        engine.core.requests = requests

    engine = make_engine(double_model("llama"), num_pages=8, max_batch_size=1, on_step=on_step)
    for index in range(1000):
        engine.add_request(str(index), [5], GREEDY)
    for _ in range(4):
        engine.step()
    assert looks == {0: 1000, 1: 1, 2: 1, 3: 1}
    assert len(trace.steps[0].arrived) == 1000 and [len(queue) for queue in trace.queues()] == [999] * 4


def test_the_file_holds_the_steps(run, tmp_path):
    trace = run.trace
    trace.save(tmp_path / "trace.json")
    saved = read_trace(tmp_path / "trace.json")
    assert (saved.num_pages, saved.page_size, saved.waiting) == (trace.num_pages, trace.page_size, trace.queues())
    for ours, theirs in zip(trace.steps, saved.steps, strict=True):
        assert theirs.start == pytest.approx(ours.start, abs=1e-6)
        assert theirs.seconds == pytest.approx(ours.seconds, abs=1e-6)
        assert replace(theirs, start=ours.start, seconds=ours.seconds) == ours


def test_the_file_is_a_chrome_trace(run, tmp_path):
    trace = run.trace
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    required = {"M": {"args"}, "X": {"ts", "dur", "tid", "cat"}, "i": {"ts", "tid", "s", "cat"}, "C": {"ts", "args"}}
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        assert {"ph", "pid", "name"} | required[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "X":
            spans.setdefault(event["tid"], []).append((event["ts"], event["dur"]))
    for track in spans.values():  # nothing overlaps, so a viewer can draw each track in one line
        ends = [start + seconds for start, seconds in sorted(track)]
        assert all(end <= start + 0.2 for end, (start, _) in zip(ends, sorted(track)[1:], strict=False))

    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(titles.values()) == {"steps", *(f"request {name}" for name in run.prompts)}
    assert set(spans) == set(titles)
    counters = [e["args"] for e in events if e["ph"] == "C"]
    for name, values in {
        "pages in use": [step.num_pages_in_use for step in trace.steps],
        "tokens per step": [step.num_tokens for step in trace.steps],
        "running": [len(step.pages) for step in trace.steps],
        "waiting": [len(queue) for queue in trace.queues()],
    }.items():
        assert [args[name] for args in counters if name in args] == values
    moments = Counter(e["name"] for e in events if e["ph"] == "i")
    assert moments["preempted"] == sum(len(step.preempted) for step in trace.steps)
    assert moments["ended: length"] == 4 and moments["ended: abort"] == 1
    assert moments["admitted"] == sum(len(step.admitted) for step in trace.steps)
    assert sum(event["dur"] for event in events if event["name"] == "waiting" and event["ph"] == "X") > 0


def test_each_step_s_work_has_its_kind(run):
    trace = run.trace
    prompts = {name: len(prompt) for name, prompt in run.prompts.items()}
    num_tokens = dict(prompts)
    for step in trace.steps:
        for work in step.batch if run.depth == 0 else []:
            before = work.num_computed - work.num_new
            kind = "prefill" if before == 0 and work.num_computed == num_tokens[work.request_id] else "chunk"
            if work.num_new == 1 and before >= prompts[work.request_id]:
                kind = "decode"
            assert work.kind == kind, work
        for token in step.outputs:
            num_tokens[token.request_id] += 1


def test_a_summary_by_hand():
    token = Token("A", 1, "x")
    prefill = [Work("A", "prefill", 9, 9)]
    first = TraceStep(0.0, 0.5, prefill, {"A": [0, 1, 2]}, {"A": 9, "B": 1}, ["A"], ["B"], {}, [token], {})
    second = TraceStep(0.5, 0.5, [Work("A", "decode", 1, 10)], {"A": [0, 1]}, {}, [], [], {}, [token], {})
    trace = Trace()
    trace.num_pages, trace.page_size, trace.steps = 4, 4, [first, second]
    assert trace.summary() == "2 steps in 1.0 s, 2 tokens/s, at most 3 of 4 pages in use, 1 preemption"
    assert tokens_per_second([second]) == 2
    assert tokens_per_second([replace(second, seconds=0.0)]) == tokens_per_second([]) == 0


def test_a_name_that_is_given_again_is_another_request(tmp_path):
    trace = Trace(WORDS)
    engine = make_engine(double_model("llama"), num_pages=8, page_size=4, max_batch_size=2, on_step=trace.record)
    engine.add_request("a", [3, 4, 5], GREEDY)
    engine.step()
    engine.abort("a")
    engine.add_request("a", [9, 8, 7, 6, 5], replace(GREEDY, max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    assert [step.arrived for step in trace.steps] == [{"a": 3}, {"a": 5}, {}]
    assert [step.left for step in trace.steps] == [{}, {"a": "abort"}, {}]
    trace.save(tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json").steps[1].left == {"a": "abort"}


def test_a_request_that_never_ran_is_not_recorded():
    trace = Trace()
    engine = make_engine(double_model("llama"), num_pages=8, on_step=trace.record)
    engine.add_request("brief", [3], GREEDY)
    engine.abort("brief")
    engine.add_request("a", [3], replace(GREEDY, max_tokens=1))
    engine.step()
    assert [(step.arrived, step.left, step.ended) for step in trace.steps] == [({"a": 1}, {}, {"a": "length"})]
    assert trace.queues() == [[]]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps_before", range(10))
def test_a_trace_may_begin_while_requests_run(tmp_path, depth, steps_before):
    """In a run with preemptions in which the requests end one after the other."""
    trace, reports = Trace(WORDS), []

    def on_step(engine, report):
        if len(reports) >= steps_before:
            trace.record(engine, report)
        reports.append(report)

    engine = make_engine(double_model("llama"), num_pages=8, page_size=2, pipeline_depth=depth, on_step=on_step)
    for index in range(4):
        engine.add_request(str(index), [5 + index] * 3, replace(GREEDY, max_tokens=3 + 2 * index, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    trace.save(tmp_path / "trace.json")
    saved = read_trace(tmp_path / "trace.json").steps
    recorded = [token for report in reports[steps_before:] for token in report.token_ids.tolist()]
    assert [token.token_id for step in saved for token in step.outputs] == recorded
    arrived = [name for step in saved for name in step.arrived]
    assert len(arrived) == len(set(arrived)) and set(arrived) >= {name for step in saved for name in step.pages}
    assert not trace.queues()[-1] and any(report.schedule.preempted for report in reports)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_with_a_stop_string_leaves(tmp_path, depth):
    """The engine hears of it between two steps."""
    trace = Trace(WORDS)
    engine = make_text_engine(
        double_model("llama"), num_pages=8, page_size=4, pipeline_depth=depth, on_step=trace.record
    )
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    text = engine.generate([[3, 4, 5]], params)[0].text
    trace.steps.clear()
    stop = text.split()[3]
    output = engine.generate([3, 4, 5], replace(params, stop=stop))[0]
    trace.save(tmp_path / "trace.json")
    assert [step.left for step in trace.steps if step.left] == [{"stream 1": "stop"}]
    assert not any(step.ended for step in trace.steps)
    saved = read_trace(tmp_path / "trace.json").steps
    assert [step.left for step in saved if step.left] == [{"stream 1": "stop"}]
    assert sum(len(step.outputs) for step in saved) == len(output.token_ids)


def test_a_failed_request_leaves():
    from mini_engine.parts import Parts
    from mini_engine.sampling import sample

    def fail_for_the_hot(logits, batch):
        if (batch.temperature == 99).any():
            raise ArithmeticError("no")
        return sample(logits, batch)

    trace = Trace()
    engine = make_engine(
        double_model("llama"), replace(Parts(), sample=fail_for_the_hot), trace.record, num_pages=8, page_size=4
    )
    engine.add_request("good", [3, 4], GREEDY)
    engine.add_request("bad", [5, 6], replace(GREEDY, temperature=99.0))
    while engine.has_unfinished:
        engine.step()
    assert [step.left for step in trace.steps if step.left] == [{"bad": "error"}]
    assert [name for step in trace.steps for name in step.ended] == ["good"]


def test_a_path_that_cannot_be_written_is_a_typed_error(tmp_path):
    with pytest.raises(TraceFileError, match="cannot write"):
        Trace().save(tmp_path / "no" / "folder" / "trace.json")


def test_the_queue_keeps_its_order_by_hand():
    queue, step = Queue(), TraceStep(0.0, 0.0, [], {}, {}, [], [], {}, [], {})
    assert queue.after(replace(step, arrived={"x": 1, "y": 1, "z": 1}, pages={"x": [0]})) == ["y", "z"]
    assert queue.after(replace(step, pages={"x": [0], "y": [1]}, ended={"x": "stop"})) == ["z"]
    assert queue.after(replace(step, preempted=["y"])) == ["y", "z"]  # the older request waits in front
    assert queue.after(replace(step, left={"y": "abort"}, arrived={"x": 2})) == ["z", "x"]
