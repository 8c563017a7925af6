"""What the engine did, step by step: recorded while it runs, saved as a file that Perfetto and the book's player show.

The file is in Chrome's trace format (a JSON object with `traceEvents`): open it at ui.perfetto.dev, or drop it on the
book's trace page. The step events carry, as their `args`, all that the player needs.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from mini_engine.engine import LLMEngine
from mini_engine.errors import TraceFileError
from mini_engine.llm import LLM
from mini_engine.outputs import EngineOutput, StepReport
from mini_engine.sampling_params import SamplingParams
from mini_engine.sequence import FinishReason, Sequence

Kind = Literal["prefill", "chunk", "decode"]
FORMAT = {"format": "mini-engine trace", "version": 1}


@dataclass(frozen=True)
class Work:
    """What one step computed of one request.

    Attributes:
        request_id: whose it is.
        kind: "decode" is one token after the prompt, "prefill" all tokens that the request has, "chunk" some of them.
        num_new: tokens computed.
        num_computed: tokens of the request with keys and values in the cache, these included.
    """

    request_id: str
    kind: Kind
    num_new: int
    num_computed: int


@dataclass(frozen=True)
class TraceStep:
    """One step of the engine.

    Attributes:
        start: when it began, in seconds since the first step did.
        seconds: how long it took.
        batch: what it computed, in the order of its StepBatch.
        pages: the pages of each running request, in order of position, as they were while the model ran.
        waiting: requests without pages, in the order in which they will get some.
        arrived: requests seen for the first time, and the tokens of their prompts.
        admitted: requests that got pages for this step.
        preempted: requests that lost theirs, newest first.
        aborted: requests that their clients gave up since the last step.
        outputs: the tokens sampled, their text, and whether they were the last.
    """

    start: float
    seconds: float
    batch: list[Work]
    pages: dict[str, list[int]]
    waiting: list[str]
    arrived: dict[str, int]
    admitted: list[str]
    preempted: list[str]
    aborted: list[str]
    outputs: list[EngineOutput]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed."""
        return sum(work.num_new for work in self.batch)

    @property
    def num_pages_in_use(self) -> int:
        """Pages that any request owns; shared ones count once."""
        return len({page for pages in self.pages.values() for page in pages})

    @property
    def hits(self) -> dict[str, int]:
        """Tokens of admitted requests that need not be computed: another request's pages hold them already."""
        shared = {w.request_id: w.num_computed - w.num_new for w in self.batch if w.request_id in self.admitted}
        return {name: count for name, count in shared.items() if count}

    @property
    def ended(self) -> list[str]:
        """Requests whose last token this step sampled."""
        return [output.request_id for output in self.outputs if output.finish_reason]


class Trace:
    """The steps of one engine: `LLMEngine(..., on_step=trace.record)`.

    Attributes:
        num_pages: pages of the engine's cache; 0 until the first step.
        page_size: tokens of a page; 0 until the first step.
        steps: every step that computed something.
    """

    def __init__(self) -> None:
        self.num_pages = self.page_size = 0
        self.steps: list[TraceStep] = []
        self._zero = 0.0
        self._open: dict[Sequence, str] = {}  # requests that arrived and have not ended

    def record(self, engine: LLMEngine, report: StepReport) -> None:
        """Add a step that has just been computed. It copies what it keeps."""
        if not self.steps:
            self.num_pages, self.page_size = engine.page_table.num_pages, engine.page_table.page_size
            self._zero = report.start
        names, scheduler, schedule = engine.request_ids, engine.scheduler, report.schedule
        sampled = {output.request_id for output in report.outputs}
        arrived = {name: s.num_prompt_tokens for s, name in names.items() if s not in self._open}
        aborted = sorted(name for s, name in self._open.items() if s not in names)
        step = TraceStep(
            start=report.start - self._zero,
            seconds=report.seconds,
            batch=[
                _work(sequence, num_new, names[sequence], names[sequence] in sampled)
                for sequence, num_new in zip(schedule.sequences, schedule.num_new, strict=True)
            ],
            pages={names[s]: engine.page_table.pages(scheduler.rows[s]).tolist() for s in scheduler.running},
            waiting=[names[s] for s in scheduler.waiting],
            arrived=arrived,
            admitted=[names[s] for s in schedule.admitted],
            preempted=[names[s] for s in schedule.preempted],
            aborted=aborted,
            outputs=report.outputs,
        )
        self._open = {s: name for s, name in names.items() if name not in step.ended}
        self.steps.append(step)

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return self.steps[-1].start + self.steps[-1].seconds if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens sampled per second, over all requests."""
        return sum(len(step.outputs) for step in self.steps) / self.seconds if self.seconds else 0.0

    def summary(self) -> str:
        """One line: what the steps add up to."""
        preemptions = sum(len(step.preempted) for step in self.steps)
        hits = sum(sum(step.hits.values()) for step in self.steps)
        return (
            f"{len(self.steps)} steps in {self.seconds:.1f} s, {self.tokens_per_second:.0f} tokens/s, at most "
            f"{max((step.num_pages_in_use for step in self.steps), default=0)} of {self.num_pages} pages in use, "
            f"{preemptions} preemption{'s' * (preemptions != 1)}" + (f", {hits} tokens shared" if hits else "")
        )

    def save(self, path: Path | str) -> None:
        """Write the trace as Chrome-trace JSON, times in microseconds.

        Raises:
            TraceFileError: if the file cannot be written.
        """
        other = FORMAT | {"num_pages": self.num_pages, "page_size": self.page_size}
        events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(self.steps))
        text = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{events}\n]}}\n'
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise TraceFileError(
                f"cannot write {path}: {error.strerror}; choose a path in a folder of yours"
            ) from error

    @classmethod
    def load(cls, path: Path | str) -> "Trace":
        """Read a trace that `save` wrote.

        Raises:
            TraceFileError: if it is none, or damaged.
        """
        trace = cls()
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            other = _is(data, dict).get("otherData")
            if not isinstance(other, dict) or other.get("format") != FORMAT["format"]:
                raise ValueError("it is not marked as one")
            if other.get("version") != FORMAT["version"]:
                raise ValueError(f"its version is {other.get('version')!r}, and this engine reads {FORMAT['version']}")
            trace.num_pages, trace.page_size = _is(other["num_pages"], int), _is(other["page_size"], int)
            pages: dict[str, list[int]] = {}
            known: set[str] = set()
            for event in _is(data["traceEvents"], list):
                if _is(event, dict).get("cat") == "step":
                    trace.steps.append(step := _step(event, pages, trace.num_pages))
                    pages = step.pages
                    known |= step.arrived.keys()
                    if strangers := _names(step) - known:
                        raise ValueError(f"the request {min(strangers)!r} never arrived")
        except OSError as error:
            raise TraceFileError(f"cannot read {path}: {error.strerror}") from error
        except KeyError as error:
            raise TraceFileError(f"{path} is no trace that can be read: {error} is missing; record it again") from error
        except (ValueError, OverflowError, RecursionError) as error:  # bad JSON and bad UTF-8 are ValueErrors
            raise TraceFileError(f"{path} is no trace that can be read: {error}; record it again") from error
        return trace


def traced_engine(
    llm: LLM, *, num_pages: int, page_size: int = 16, max_num_batched_tokens: int = 2048
) -> tuple[LLMEngine, Trace]:
    """An engine on the model of `llm`, and the trace that it fills.

    Raises:
        ConfigError: for a pool or a step that cannot be.
    """
    trace = Trace()
    engine = llm.make_engine(
        num_pages=num_pages, page_size=page_size, max_num_batched_tokens=max_num_batched_tokens, on_step=trace.record
    )
    return engine, trace


def _work(sequence: Sequence, num_new: int, name: str, sampled: bool) -> Work:
    before = sequence.num_computed - num_new
    kind: Kind = "prefill" if before == 0 and sampled else "chunk"
    if num_new == 1 and before >= sequence.num_prompt_tokens:
        kind = "decode"
    return Work(name, kind, num_new, sequence.num_computed)


# --- an example ------------------------------------------------------------------------------------------------------

PARAGRAPH = (
    "A library keeps its books on shelves of equal length. Once, every reader reserved a whole room for the books that "
    "they might ask for, and most rooms stood half empty. Now a reader gets one shelf at a time, wherever one is free, "
    "and a card says which shelves are theirs, in order. When all shelves are full, the reader who came last puts the "
    "books back, waits by the door, and fetches them again later. Nobody has to leave, and hardly a shelf stands empty."
)
# Step before which it arrives, name, question, most tokens of the answer. Long and short ones, some of them late.
EXAMPLE = (
    (0, "A", "What is the capital of France?", 40),
    (0, "B", f"Summarize this text in two sentences. {PARAGRAPH}", 44),
    (0, "C", "Name three uses of a paperclip.", 56),
    (3, "D", "Write a haiku about a library at night.", 32),
    (3, "E", f"Who has to wait in this story, and why? {PARAGRAPH}", 36),
    (12, "F", "Explain in two sentences why the sky is blue.", 52),
    (20, "G", "Count from one to ten.", 40),
    (34, "H", f"Give this text a title. {PARAGRAPH}", 24),
)


def record_example(llm: LLM, *, num_pages: int, page_size: int, max_num_batched_tokens: int) -> Trace:
    """Serve `EXAMPLE`, greedily, and return its trace. With few pages there are preemptions, with few tokens chunks.

    Raises:
        ConfigError: for a pool or a step that cannot be.
        RequestError: if one of the requests could not fit into the pool even alone.
    """
    engine, trace = traced_engine(
        llm, num_pages=num_pages, page_size=page_size, max_num_batched_tokens=max_num_batched_tokens
    )
    coming = list(EXAMPLE)
    while coming or engine.has_unfinished:
        while coming and (coming[0][0] <= len(trace.steps) or not engine.has_unfinished):
            _, name, question, max_tokens = coming.pop(0)
            prompt = llm.chat_prompt([{"role": "user", "content": question}])
            engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        engine.step()
    return trace


# --- to and from the file --------------------------------------------------------------------------------------------


def _events(steps: list[TraceStep]) -> Iterator[dict[str, Any]]:
    """The events of a trace: track 0 is the engine's, and each request has one of its own."""
    tracks: dict[str, int] = {}
    for step in steps:
        for name in step.arrived:
            tracks.setdefault(name, len(tracks) + 1)
    for title, track in {"steps": 0, **{f"request {name}": track for name, track in tracks.items()}}.items():
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "mini-engine"}}

    pages: dict[str, list[int]] = {}
    waiting_since: dict[str, float] = {}
    end = 0.0
    for index, step in enumerate(steps):
        span = {"ph": "X", "pid": 1, "ts": _us(step.start), "dur": _us(step.seconds)}
        end = _us(step.start + step.seconds)
        yield {"name": f"step {index}", "cat": "step", **span, "tid": 0, "args": _args(step, pages)}
        pages = step.pages
        for name in step.waiting:
            waiting_since.setdefault(name, _us(step.start))
        for name in [*step.admitted, *step.aborted]:
            if name in waiting_since:
                yield _waiting(tracks[name], waiting_since.pop(name), _us(step.start))
        for work in step.batch:
            args = {"new": work.num_new, "computed": work.num_computed}
            yield {"name": work.kind, "cat": "request", **span, "tid": tracks[work.request_id], "args": args}
        moments = [(name, "preempted", _us(step.start)) for name in step.preempted]
        moments += [(name, "admitted", _us(step.start)) for name in step.admitted]
        moments += [(name, "aborted", _us(step.start)) for name in step.aborted]
        moments += [(o.request_id, f"ended: {o.finish_reason}", end) for o in step.outputs if o.finish_reason]
        for name, what, when in moments:
            yield {"ph": "i", "s": "t", "pid": 1, "tid": tracks[name], "ts": when, "name": what, "cat": "request"}
        counters = {
            "pages in use": step.num_pages_in_use,
            "tokens per step": step.num_tokens,
            "running": len(step.pages),
            "waiting": len(step.waiting),
        }
        for name, value in counters.items():
            yield {"ph": "C", "pid": 1, "ts": _us(step.start), "name": name, "args": {name: value}}
    for name, since in waiting_since.items():  # still waiting when the recording ended
        yield _waiting(tracks[name], since, end)


def _waiting(track: int, start: float, end: float) -> dict[str, Any]:
    span = {"ph": "X", "pid": 1, "tid": track, "ts": start, "dur": round(end - start, 1)}
    return {"name": "waiting", "cat": "request", **span}


def _args(step: TraceStep, before: dict[str, list[int]]) -> dict[str, Any]:
    """What the player needs to know of a step; of the pages, those that are not what they were in the step before."""
    changed = {name: pages for name, pages in step.pages.items() if before.get(name) != pages}
    return {
        "arrived": step.arrived,
        "waiting": step.waiting,
        "admitted": step.admitted,
        "preempted": step.preempted,
        "aborted": step.aborted,
        "pages": changed | {name: [] for name in before if name not in step.pages},
        "batch": [
            {"id": w.request_id, "kind": w.kind, "new": w.num_new, "computed": w.num_computed} for w in step.batch
        ],
        "outputs": [
            {"id": o.request_id, "token": o.token_id, "text": o.text, "finish": o.finish_reason} for o in step.outputs
        ],
    }


def _step(event: dict[str, Any], before: dict[str, list[int]], num_pages: int) -> TraceStep:
    """The inverse of `_args`. Raises KeyError and ValueError for what is none."""
    args = _is(event["args"], dict)
    changed = {_is(name, str): _all(pages, int) for name, pages in _is(args["pages"], dict).items()}
    if any(not 0 <= page < num_pages for pages in changed.values() for page in pages):
        raise ValueError(f"a page is outside 0 to {num_pages - 1}")
    return TraceStep(
        start=_seconds(event["ts"]),
        seconds=_seconds(event["dur"]),
        batch=[
            Work(_is(w["id"], str), _one_of(w["kind"], get_args(Kind)), _is(w["new"], int), _is(w["computed"], int))
            for w in _all(args["batch"], dict)
        ],
        pages={name: pages for name, pages in (before | changed).items() if pages},
        waiting=_all(args["waiting"], str),
        arrived={_is(name, str): _is(count, int) for name, count in _is(args["arrived"], dict).items()},
        admitted=_all(args["admitted"], str),
        preempted=_all(args["preempted"], str),
        aborted=_all(args["aborted"], str),
        outputs=[
            EngineOutput(
                _is(o["id"], str),
                _is(o["text"], str),
                _is(o["token"], int),
                _one_of(o["finish"], (None, *get_args(FinishReason))),
            )
            for o in _all(args["outputs"], dict)
        ],
    )


def _names(step: TraceStep) -> set[str]:
    """The requests that a step speaks of."""
    of_work, of_outputs = ({x.request_id for x in own} for own in (step.batch, step.outputs))
    return of_work | of_outputs | step.pages.keys() | {*step.waiting, *step.admitted, *step.preempted, *step.aborted}


def _seconds(us: Any) -> float:
    if not math.isfinite(_is(us, int, float)):
        raise ValueError(f"{us} is no time")
    return us / 1e6


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _is(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:40]!r} stands where {' or '.join(k.__name__ for k in kinds)} is expected")
    return value


def _all(values: Any, kind: type) -> list[Any]:
    return [_is(value, kind) for value in _is(values, list)]


def _one_of(value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {allowed}")
    return value
