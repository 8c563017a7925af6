"""Record what the engine does, step by step, and save it for Perfetto and the book's trace player.

The file is in Chrome's trace format (a JSON object with `traceEvents`): open it at ui.perfetto.dev, or drop it on the
book's trace page. The `args` of each step event hold everything that the player needs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from mini_engine.detokenizer import Detokenizer, special_ids
from mini_engine.engine import LLMEngine
from mini_engine.errors import TraceFileError
from mini_engine.outputs import StepReport
from mini_engine.request import Request

FORMAT = {"format": "mini-engine trace", "version": 2}


@dataclass(frozen=True)
class Work:
    """The tokens of one request that a step computed.

    Attributes:
        request_id: name of the request.
        kind: "decode" is one token after the prompt, "prefill" is all tokens of the request, and "chunk" is some of
            them.
        num_new: tokens computed.
        num_computed: tokens of the request with keys and values in the cache, including the new ones.
    """

    request_id: str
    kind: Literal["prefill", "chunk", "decode"]
    num_new: int
    num_computed: int


@dataclass(frozen=True)
class Token:
    """One sampled token.

    Attributes:
        request_id: name of the request.
        token_id: the token.
        text: text that the token added to the request's output; empty if the trace has no tokenizer.
    """

    request_id: str
    token_id: int
    text: str


@dataclass(frozen=True)
class TraceStep:
    """One call of `LLMEngine.step`.

    Attributes:
        start: when it began, in seconds since the first step began.
        seconds: its duration.
        batch: the launched work, in the order of the StepBatch.
        pages: the pages of each running request while the model ran, in order of position, one group of layers after
            the other; oldest request first.
        arrived: requests that were added since the previous step, and the number of tokens of each prompt.
        admitted: requests that got pages for this step.
        preempted: requests that lost their pages, newest first.
        left: requests that ended between the previous step and this one, because they were aborted, failed, or
            generated a stop string, with their finish reasons.
        outputs: the tokens that were collected.
        ended: requests whose last token is among the outputs, with their finish reasons.
    """

    start: float
    seconds: float
    batch: list[Work]
    pages: dict[str, list[int]]
    arrived: dict[str, int]
    admitted: list[str]
    preempted: list[str]
    left: dict[str, str]
    outputs: list[Token]
    ended: dict[str, str]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computed."""
        return sum(work.num_new for work in self.batch)

    @property
    def num_pages_in_use(self) -> int:
        """Pages that any request owns; shared pages count once."""
        return len({page for pages in self.pages.values() for page in pages})

    @property
    def hits(self) -> dict[str, int]:
        """Tokens of admitted requests that were not computed, because the cache already held their keys and values."""
        shared = {w.request_id: w.num_computed - w.num_new for w in self.batch if w.request_id in self.admitted}
        return {name: count for name, count in shared.items() if count}


class Trace:
    """The steps of one engine: `LLMEngine(..., on_step=trace.record)`.

    Args:
        tokenizer: turns tokens into text; without a tokenizer, the trace has only token ids.

    Attributes:
        num_pages: pages of the engine's cache; 0 until the first step.
        page_size: tokens per page; 0 until the first step.
        steps: every step that launched or collected something, or found that requests had left.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.num_pages = self.page_size = 0
        self.steps: list[TraceStep] = []
        self._zero = 0.0
        self._tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
        self._special_ids = frozenset[int]() if self._tokenizer is None else special_ids(self._tokenizer)
        self._unfinished: dict[Request, Detokenizer | None] = {}  # requests that arrived and have not ended

    def record(self, engine: LLMEngine, report: StepReport) -> None:
        """Add a step. The cost does not depend on the number of waiting requests."""
        if not (report.step or report.sampled_by or report.finished or report.schedule.preempted):
            return
        if not self.steps:
            self.num_pages, self.page_size = engine.page_table.num_pages, engine.page_table.page_size
            self._zero = report.start
        arrived = self._arrivals(engine, report)
        for request in arrived:
            self._unfinished[request] = self._tokenizer and Detokenizer(
                self._tokenizer, request.prompt_token_ids, hidden=self._special_ids
            )
        finished = [request for request in report.finished if request in self._unfinished]
        sampled = report.sampled_by
        self.steps.append(
            TraceStep(
                start=report.start - self._zero,
                seconds=report.seconds,
                batch=_works(report),
                pages=_pages(engine, report),
                arrived={request.request_id: len(request.prompt_token_ids) for request in arrived},
                admitted=[request.request_id for request in report.schedule.admitted],
                preempted=[request.request_id for request in report.schedule.preempted],
                left={own.request_id: str(own.finish_reason) for own in finished if own not in sampled},
                outputs=[
                    Token(request.request_id, token_id, self._text(request, token_id))
                    for request, token_id in zip(sampled, report.token_ids.tolist(), strict=True)
                ],
                ended={own.request_id: str(own.finish_reason) for own in finished if own in sampled},
            )
        )
        for request in finished:
            del self._unfinished[request]

    @property
    def seconds(self) -> float:
        """Time from the start of the first step to the end of the last."""
        return self.steps[-1].start + self.steps[-1].seconds if self.steps else 0.0

    def queues(self) -> list[list[str]]:
        """Return the requests that waited during each step, the next one to be admitted first."""
        queue = Queue()
        return [queue.after(step) for step in self.steps]

    def summary(self) -> str:
        """Return one line with the totals of all steps."""
        preemptions = sum(len(step.preempted) for step in self.steps)
        hits = sum(sum(step.hits.values()) for step in self.steps)
        return (
            f"{len(self.steps)} steps in {self.seconds:.1f} s, {tokens_per_second(self.steps):.0f} tokens/s, at most "
            f"{max((step.num_pages_in_use for step in self.steps), default=0)} of {self.num_pages} pages in use, "
            f"{preemptions} preemption{'s' * (preemptions != 1)}" + (f", {hits} tokens shared" if hits else "")
        )

    def save(self, path: Path | str) -> None:
        """Write the trace as Chrome-trace JSON, times in microseconds.

        Raises:
            TraceFileError: if the file cannot be written.
        """
        other = FORMAT | {"num_pages": self.num_pages, "page_size": self.page_size}
        data = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": list(_events(self.steps))}
        try:
            Path(path).write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            raise TraceFileError(f"cannot write {path}: {error.strerror}; choose another path") from error

    def _arrivals(self, engine: LLMEngine, report: StepReport) -> list[Request]:
        """Return the requests that this step sees for the first time, in order of arrival."""
        # A request of a trace that begins while requests run may end in the trace's first step.
        seen = (report.schedule.admitted, report.schedule.preempted, report.requests, report.sampled_by)
        new = {request for requests in seen for request in requests} - self._unfinished.keys()
        for request in reversed(engine.requests.values()):  # new requests are at the end
            if request in self._unfinished:
                break
            new.add(request)
        return sorted(new, key=attrgetter("arrival"))

    def _text(self, request: Request, token_id: int) -> str:
        detokenizer = self._unfinished.get(request)
        # The token that ends an output is not part of its text.
        return "" if detokenizer is None or token_id in request.end_token_ids else detokenizer.push(token_id)


class Queue:
    """The waiting requests of each step, derived from what arrived, ran and ended.

    Requests run in order of arrival and only the newest is preempted, so the queue is in order of arrival too.
    """

    def __init__(self) -> None:
        self._unfinished: dict[str, None] = {}

    def after(self, step: TraceStep) -> list[str]:
        """Take the next step, and return the requests that waited while it ran, the next one to be admitted first."""
        for name in step.left:
            self._unfinished.pop(name, None)
        self._unfinished |= dict.fromkeys(step.arrived)
        for name in step.ended:
            self._unfinished.pop(name, None)
        return [name for name in self._unfinished if name not in step.pages]


def tokens_per_second(steps: Sequence[TraceStep]) -> float:
    """Return the tokens sampled per second in some steps, over all requests."""
    seconds = steps[-1].start + steps[-1].seconds - steps[0].start if steps else 0.0
    return sum(len(step.outputs) for step in steps) / seconds if seconds else 0.0


def _works(report: StepReport) -> list[Work]:
    if report.step is None:
        return []
    columns = (array.tolist() for array in (report.step.num_new, report.step.num_computed, report.step.num_logits))
    works = []
    for request, num_new, num_computed, num_logits in zip(report.requests, *columns, strict=True):
        kind: Literal["prefill", "chunk", "decode"] = "prefill" if num_new == num_computed and num_logits else "chunk"
        if num_new == 1 and num_computed > len(request.prompt_token_ids):
            kind = "decode"
        works.append(Work(request.request_id, kind, num_new, num_computed))
    return works


def _pages(engine: LLMEngine, report: StepReport) -> dict[str, list[int]]:
    """Return the pages of each request that was launched, or that runs without a new token."""
    running, table, pages = engine.scheduler.running, engine.page_table, dict[Request, list[int]]()
    for request, row in zip(running.requests_of(running.order), running.order.tolist(), strict=True):
        pages[request] = [page for own in table.rows_of(np.array([row])).tolist() for page in table.pages(own).tolist()]
    if report.step is not None:  # it has the pages of requests that have left their rows since
        pages |= {request: [] for request in report.requests}
        for group in report.step.groups:
            ends = (-(-group.kv_lens // table.page_size)).cumsum()
            for request, own_pages in zip(report.requests, np.split(group.pages, ends[:-1]), strict=True):
                pages[request] += own_pages.tolist()
    return {request.request_id: pages[request] for request in sorted(pages, key=attrgetter("arrival"))}


# --- the file --------------------------------------------------------------------------------------------------------


def _events(steps: Sequence[TraceStep]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: track 0 is the engine's, and each request has its own track."""
    names = list(dict.fromkeys(name for step in steps for name in step.arrived))
    tracks = {name: track for track, name in enumerate(names, 1)}
    yield _event("M", "process_name", 0, args={"name": "mini-engine"})
    for track, title in enumerate(["steps", *(f"request {name}" for name in names)]):
        yield _event("M", "thread_name", track, args={"name": title})
        yield _event("M", "thread_sort_index", track, args={"sort_index": track})

    queue = Queue()
    before: dict[str, list[int]] = {}  # pages in the previous step
    for index, step in enumerate(steps):
        waiting = queue.after(step)
        start, end = _us(step.start), _us(step.start + step.seconds)
        span = {"ts": start, "dur": _us(step.seconds)}
        args = {name: value for name, value in asdict(step).items() if name not in ("start", "seconds")}
        changed = {name: pages for name, pages in step.pages.items() if before.get(name) != pages}
        args["pages"] = changed | {name: [] for name in before if name not in step.pages}
        before = step.pages
        yield _event("X", f"step {index}", 0, cat="step", **span, args=args | {"waiting": waiting})
        for work in step.batch:
            args = {"new": work.num_new, "computed": work.num_computed}
            yield _event("X", work.kind, tracks[work.request_id], **span, args=args)
        for name in waiting:
            yield _event("X", "waiting", tracks[name], **span)
        moments = [(name, "preempted", start) for name in step.preempted]
        moments += [(name, "admitted", start) for name in step.admitted]
        moments += [(name, f"ended: {reason}", start) for name, reason in step.left.items()]
        moments += [(name, f"ended: {reason}", end) for name, reason in step.ended.items()]
        for name, what, when in moments:
            yield _event("i", what, tracks[name], ts=when, s="t")
        counters = {"pages in use": step.num_pages_in_use, "tokens per step": step.num_tokens}
        counters |= {"running": len(step.pages), "waiting": len(waiting)}
        for name, value in counters.items():
            yield _event("C", name, 0, ts=start, args={name: value})


def _event(phase: str, name: str, track: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": track, "cat": "request", **fields}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
