"""A trace accounts for every token and every page of a run, and comes back from its file as it went in."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from mini_engine.engine import LLMEngine
from mini_engine.errors import TraceFileError
from mini_engine.outputs import EngineOutput
from mini_engine.sampling_params import SamplingParams
from mini_engine.trace import Trace, TraceStep, Work
from mini_engine.watch import Watch
from tests.models.families import our_model, transformers_model
from tests.test_engine import DOUBLES, GREEDY, WORDS, make_engine

PROMPTS = {"a": [5, 9, 33], "b": [7, 8], "c": [1, 60, 22, 18, 4], "d": [3] * 9, "gone": [4, 4]}
OUTPUT = 12
PAGE_SIZE, NUM_PAGES = 2, 12


@pytest.fixture(scope="module")
def run() -> tuple[Trace, dict[str, list[int]]]:
    """A run with chunks, preemptions, a late request and an abort: its trace, and what the engine answered."""
    trace = Trace()
    engine = LLMEngine(
        our_model(transformers_model("llama", seed=2, dtype=torch.float64)), WORDS, (), num_pages=NUM_PAGES,
        page_size=PAGE_SIZE, max_batch_size=4, max_num_batched_tokens=7, on_step=trace.record,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    engine.step()  # without requests: nothing to record
    for name, prompt in PROMPTS.items():
        if name != "d":
            engine.add_request(name, prompt, params)
    answers: dict[str, list[int]] = {name: [] for name in PROMPTS}
    while engine.has_unfinished:
        for output in engine.step().outputs:
            answers[output.request_id].append(output.token_id)
        if len(trace.steps) == 3:
            engine.add_request("d", PROMPTS["d"], params)
        if len(trace.steps) == 5:
            engine.abort("gone")
    return trace, answers


def test_the_run_is_worth_recording(run):
    trace, _ = run
    assert {work.kind for step in trace.steps for work in step.batch} == {"prefill", "chunk", "decode"}
    assert sum(len(step.preempted) for step in trace.steps) >= 2


def test_every_token_is_accounted_for(run):
    trace, answers = run
    prompts = {name: n for step in trace.steps for name, n in step.arrived.items()}
    assert prompts == {name: len(prompt) for name, prompt in PROMPTS.items()}
    sampled: dict[str, list[int]] = {name: [] for name in PROMPTS}
    computed = Counter()
    lost = Counter()
    for step in trace.steps:
        for name in step.preempted:
            lost[name] += computed.pop(name)
        for work in step.batch:
            computed[work.request_id] += work.num_new
            assert work.num_computed == computed[work.request_id]
            # In the cache is all that the request has, unless its prompt (or what it had before) is not through yet.
            has = prompts[work.request_id] + len(sampled[work.request_id])
            samples = work.request_id in [output.request_id for output in step.outputs]
            assert work.num_computed == has if samples else work.num_computed < has
        for output in step.outputs:
            sampled[output.request_id].append(output.token_id)
    assert sampled == answers
    # The last token of an answer is never fed back: everything else is computed once, and again after a preemption.
    finished = [name for name in PROMPTS if name != "gone"]
    assert {name: computed[name] for name in finished} == {n: len(PROMPTS[n]) + OUTPUT - 1 for n in finished}
    total = sum(step.num_tokens for step in trace.steps)
    assert total == sum(computed.values()) + sum(lost.values())


def test_every_page_is_accounted_for(run):
    trace, _ = run
    assert (trace.num_pages, trace.page_size) == (NUM_PAGES, PAGE_SIZE)
    for step in trace.steps:
        owned = [page for pages in step.pages.values() for page in pages]
        assert len(owned) == len(set(owned)) == step.num_pages_in_use <= NUM_PAGES
        assert all(0 <= page < NUM_PAGES for page in owned)
        for work in step.batch:
            assert len(step.pages[work.request_id]) >= math.ceil(work.num_computed / PAGE_SIZE)
    for before, after in zip(trace.steps, trace.steps[1:], strict=False):
        for name, pages in before.pages.items():
            gone = name in before.ended or name in after.preempted or name in after.aborted
            # A request keeps its pages, in order, until it ends, gives way or is given up.
            assert name not in after.pages if gone else after.pages[name][: len(pages)] == pages
        assert set(after.pages) - set(before.pages) == set(after.admitted) - set(before.pages)


def test_every_request_waits_runs_and_ends(run):
    trace, _ = run
    waiting: set[str] = set()
    running: set[str] = set()
    for step in trace.steps:
        assert not set(step.arrived) & (waiting | running)
        waiting |= set(step.arrived)
        waiting -= set(step.aborted)
        running -= set(step.aborted) | set(step.preempted)
        waiting |= set(step.preempted)
        assert set(step.admitted) <= waiting
        waiting -= set(step.admitted)
        running |= set(step.admitted)
        assert (set(step.waiting), set(step.pages)) == (waiting, running)
        running -= set(step.ended)
    assert not waiting and not running
    assert [name for step in trace.steps for name in step.aborted] == ["gone"]
    assert Counter(name for step in trace.steps for name in step.ended) == Counter("abcd")


def test_it_comes_back_from_its_file_as_it_went_in(run, tmp_path):
    trace, _ = run
    trace.save(tmp_path / "trace.json")
    back = Trace.load(tmp_path / "trace.json")
    assert (back.num_pages, back.page_size, len(back.steps)) == (NUM_PAGES, PAGE_SIZE, len(trace.steps))
    for ours, theirs in zip(trace.steps, back.steps, strict=True):
        assert theirs.start == pytest.approx(ours.start, abs=1e-6)
        assert theirs.seconds == pytest.approx(ours.seconds, abs=1e-6)
        for field in ("batch", "pages", "waiting", "arrived", "admitted", "preempted", "aborted", "outputs"):
            assert getattr(theirs, field) == getattr(ours, field)


def test_the_file_is_a_chrome_trace(run, tmp_path):
    trace, _ = run
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    required = {"M": {"args"}, "X": {"ts", "dur", "tid", "cat"}, "i": {"ts", "tid", "s", "cat"}, "C": {"ts", "args"}}
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        assert {"ph", "pid", "name"} | required[event["ph"]] <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "X":
            spans.setdefault(event["tid"], []).append((event["ts"], event["dur"]))
    for track in spans.values():  # on a track nothing overlaps, so that a viewer can draw it in one line
        ends = [start + seconds for start, seconds in sorted(track)]
        assert all(end <= start + 0.2 for end, (start, _) in zip(ends, sorted(track)[1:], strict=False))

    titles = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(titles.values()) == {"steps", *(f"request {name}" for name in PROMPTS)}
    assert set(spans) == set(titles)
    counters = [e["args"] for e in events if e["ph"] == "C"]
    for name, values in {
        "pages in use": [step.num_pages_in_use for step in trace.steps],
        "tokens per step": [step.num_tokens for step in trace.steps],
        "running": [len(step.pages) for step in trace.steps],
        "waiting": [len(step.waiting) for step in trace.steps],
    }.items():
        assert [args[name] for args in counters if name in args] == values
    moments = Counter(e["name"] for e in events if e["ph"] == "i")
    assert moments["preempted"] == sum(len(step.preempted) for step in trace.steps)
    assert moments["ended: length"] == 4 and moments["aborted"] == 1
    assert moments["admitted"] == sum(len(step.admitted) for step in trace.steps)
    assert sum(event["dur"] for event in events if event["name"] == "waiting" and event["ph"] == "X") > 0


def test_each_step_s_work_has_the_kind_that_it_is(run):
    trace, _ = run
    prompts = {name: count for step in trace.steps for name, count in step.arrived.items()}
    num_tokens = dict(prompts)
    for step in trace.steps:
        for work in step.batch:
            before = work.num_computed - work.num_new
            kind = "prefill" if before == 0 and work.num_computed == num_tokens[work.request_id] else "chunk"
            if work.num_new == 1 and before >= prompts[work.request_id]:
                kind = "decode"
            assert work.kind == kind, work
        for output in step.outputs:
            num_tokens[output.request_id] += 1


def test_a_summary_by_hand():
    token = EngineOutput("A", "x", 1, None)
    prefill = [Work("A", "prefill", 9, 9)]
    first = TraceStep(0.0, 0.5, prefill, {"A": [0, 1, 2]}, [], {"A": 9, "B": 1}, ["A"], ["B"], [], [token])
    second = TraceStep(0.5, 0.5, [Work("A", "decode", 1, 10)], {"A": [0, 1]}, [], {}, [], [], [], [token])
    trace = Trace()
    trace.num_pages, trace.page_size, trace.steps = 4, 4, [first, second]
    assert trace.summary() == "2 steps in 1.0 s, 2 tokens/s, at most 3 of 4 pages in use, 1 preemption"


def damaged(change):
    """A small trace, saved, with a change made to it."""
    args = {"arrived": {"a": 1}, "waiting": [], "admitted": ["a"], "preempted": [], "aborted": [], "pages": {"a": [0]}}
    args |= {"batch": [{"id": "a", "kind": "prefill", "new": 1, "computed": 1}]}
    args |= {"outputs": [{"id": "a", "token": 7, "text": "x", "finish": None}]}
    event = {"ph": "X", "pid": 1, "tid": 0, "cat": "step", "name": "step 0", "ts": 0.0, "dur": 5.0, "args": args}
    other = {"format": "mini-engine trace", "version": 1, "num_pages": 1, "page_size": 4}
    data = {"traceEvents": [event], "otherData": other}
    change(data, args)
    return json.dumps(data)


def test_a_file_by_hand_is_read(tmp_path):
    (tmp_path / "trace.json").write_text(damaged(lambda data, args: None), encoding="utf-8")
    (step,) = Trace.load(tmp_path / "trace.json").steps
    assert (step.seconds, step.pages, step.num_tokens, step.ended) == (5e-6, {"a": [0]}, 1, [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "utf-8"),
        (b"[1, 2]", "dict is expected"),
        (b"[" * 100_000, "no trace"),
        (b'{"traceEvents": []}', "not marked as one"),
        (damaged(lambda data, args: data["otherData"].update(version=9)), "its version is 9"),
        (damaged(lambda data, args: data["otherData"].pop("page_size")), "'page_size' is missing"),
        (damaged(lambda data, args: data.update(traceEvents={})), "list is expected"),
        (damaged(lambda data, args: args.pop("batch")), "'batch' is missing"),
        (damaged(lambda data, args: args.update(pages={"a": [1]})), "outside 0 to 0"),
        (damaged(lambda data, args: args.update(pages={"a": [True]})), "int is expected"),
        (damaged(lambda data, args: args["batch"][0].update(kind="magic")), "'magic' is none of"),
        (damaged(lambda data, args: args["outputs"][0].update(token="7")), "int is expected"),
        (damaged(lambda data, args: args.update(waiting="a")), "list is expected"),
        (damaged(lambda data, args: data["traceEvents"][0].update(ts=10**400)), "too large"),
        (damaged(lambda data, args: data["traceEvents"][0].update(dur=float("nan"))), "nan is no time"),
        *(
            (damaged(lambda data, args, change=change: args.update(change)), "'z' never arrived")
            for change in (
                {"waiting": ["z"]},
                {"admitted": ["z"]},
                {"preempted": ["z"]},
                {"aborted": ["z"]},
                {"pages": {"z": [0]}},
                {"batch": [{"id": "z", "kind": "chunk", "new": 1, "computed": 1}]},
                {"outputs": [{"id": "z", "token": 7, "text": "x", "finish": None}]},
            )
        ),
    ],
)
def test_a_file_that_is_no_trace_is_a_typed_error(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceFileError, match=message):
        Trace.load(path)


def test_a_name_that_is_given_again_is_another_request(tmp_path):
    trace = Trace()
    engine = make_engine(DOUBLES["llama"], num_pages=8, page_size=4, max_batch_size=2, on_step=trace.record)
    engine.add_request("a", [3, 4, 5], GREEDY)
    engine.step()
    engine.abort("a")
    engine.add_request("a", [9, 8, 7, 6, 5], replace(GREEDY, max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    assert [step.arrived for step in trace.steps] == [{"a": 3}, {"a": 5}, {}]
    assert [step.aborted for step in trace.steps] == [[], ["a"], []]
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").steps[1].aborted == ["a"]
    watch = Watch(trace)
    watch.view(80, 24)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(watch.requests(80, 5))
    (row,) = capture.get().splitlines()[1:]
    assert row.split()[-2:] == "".join(step.outputs[0].text for step in trace.steps[1:]).split()
    assert trace.steps[0].outputs[0].text not in row


def test_steps_that_took_no_time_have_no_rate(tmp_path):
    (tmp_path / "trace.json").write_text(damaged(lambda data, args: data["traceEvents"][0].update(dur=0)))
    trace = Trace.load(tmp_path / "trace.json")
    assert trace.tokens_per_second == 0 and "0 tokens/s" in trace.summary()
    Watch(trace).view(80, 24)


def test_a_path_that_cannot_be_is_a_typed_error(tmp_path):
    with pytest.raises(TraceFileError, match="cannot read"):
        Trace.load(tmp_path / "missing.json")
    with pytest.raises(TraceFileError, match="choose a path in a folder"):
        Trace().save(tmp_path / "no" / "folder" / "trace.json")
