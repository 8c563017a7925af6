"""What the engine did, step by step: recorded while it runs, and saved for Perfetto and the book's trace player.

The file is in Chrome's trace format (a JSON object with `traceEvents`): open it at ui.perfetto.dev, or drop it on the
book's trace page. The `args` of each step event hold everything that the player needs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from mini_engine.detokenizer import Detokenizer, special_ids
from mini_engine.engine import LLMEngine
from mini_engine.errors import TraceFileError
from mini_engine.llm import LLM, TextEngine
from mini_engine.outputs import StepReport
from mini_engine.request import FinishReason, Request
from mini_engine.sampling_params import SamplingParams

Kind = Literal["prefill", "chunk", "decode"]
FORMAT = {"format": "mini-engine trace", "version": 1}


@dataclass(frozen=True)
class Work:
    """The tokens of one request that a step computed.

    Attributes:
        request_id: name of the request.
        kind: "decode" is one token after the prompt, "prefill" all tokens that the request has, "chunk" some of them.
        num_new: tokens computed.
        num_computed: tokens of the request with keys and values in the cache, these included.
    """

    request_id: str
    kind: Kind
    num_new: int
    num_computed: int


@dataclass(frozen=True)
class Token:
    """One sampled token.

    Attributes:
        request_id: name of the request.
        token_id: the token.
        text: the text that the request's output grew by; empty if the trace has no tokenizer.
        finish_reason: why the request ended with this token; None if it went on.
    """

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class TraceStep:
    """One call of `LLMEngine.step`.

    Attributes:
        start: when it began, in seconds since the first step began.
        seconds: how long it took.
        batch: what it launched, in the order of its StepBatch.
        pages: the pages of each running request, in order of position, as they were while the model ran; oldest request
            first.
        arrived: requests that were added since the previous step, and the number of tokens of each prompt.
        admitted: requests that got pages for this step.
        preempted: requests that lost their pages, newest first.
        left: requests that ended between the previous step and this one, because they were aborted, failed, or
            contained a stop string.
        outputs: the tokens that were collected.
    """

    start: float
    seconds: float
    batch: list[Work]
    pages: dict[str, list[int]]
    arrived: dict[str, int]
    admitted: list[str]
    preempted: list[str]
    left: dict[str, FinishReason]
    outputs: list[Token]

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
        """Tokens of admitted requests that were not computed, because pages of another request held them."""
        shared = {w.request_id: w.num_computed - w.num_new for w in self.batch if w.request_id in self.admitted}
        return {name: count for name, count in shared.items() if count}

    @property
    def ended(self) -> list[str]:
        """Requests whose last token is among the outputs."""
        return [token.request_id for token in self.outputs if token.finish_reason]


class Trace:
    """The steps of one engine: `LLMEngine(..., on_step=trace.record)`.

    Args:
        tokenizer: turns tokens into text; without one, the trace has token ids only.

    Attributes:
        num_pages: pages of the engine's cache; 0 until the first step.
        page_size: tokens per page; 0 until the first step.
        steps: every step that launched or collected something, or found requests gone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.num_pages = self.page_size = 0
        self.steps: list[TraceStep] = []
        self._zero = 0.0
        self._backend = None if tokenizer is None else tokenizer.backend_tokenizer
        self._special_ids = frozenset[int]() if self._backend is None else special_ids(self._backend)
        self._texts: dict[Request, Detokenizer | None] = {}  # requests that arrived and have not ended
        self._last_arrival = -1

    def record(self, engine: LLMEngine, report: StepReport) -> None:
        """Add a step. The cost does not depend on the number of waiting requests."""
        if not (report.batch or report.sampled_by or report.finished or report.schedule.preempted):
            return
        if not self.steps:
            self.num_pages, self.page_size = engine.page_table.num_pages, engine.page_table.page_size
            self._zero = report.start
        schedule = report.schedule
        arrived = self._arrivals(engine, report)
        self._texts |= {request: self._detokenizer() for request in arrived}
        sampled = set(report.sampled_by)
        step = TraceStep(
            start=report.start - self._zero,
            seconds=report.seconds,
            batch=_works(report),
            pages=self._pages(engine, report),
            arrived={request.request_id: len(request.prompt_token_ids) for request in arrived},
            admitted=[request.request_id for request in schedule.admitted],
            preempted=[request.request_id for request in schedule.preempted],
            left={
                request.request_id: request.finish_reason
                for request in report.finished
                if request in self._texts and request not in sampled and request.finish_reason
            },
            outputs=self._outputs(report),
        )
        for request in report.finished:
            self._texts.pop(request, None)
        self.steps.append(step)

    @property
    def seconds(self) -> float:
        """From the start of the first step to the end of the last."""
        return seconds_of(self.steps)

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
        events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _events(_with_late_ends(self.steps)))
        text = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{events}\n]}}\n'
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise TraceFileError(
                f"cannot write {path}: {error.strerror}; choose a path in a folder of yours"
            ) from error

    def _arrivals(self, engine: LLMEngine, report: StepReport) -> list[Request]:
        """Requests that this step sees for the first time, in order of arrival."""
        new = [request for request in report.schedule.admitted if request.arrival > self._last_arrival]
        for request in reversed(engine.scheduler.waiting):  # new requests are at the end
            if request.arrival <= self._last_arrival:
                break
            new.append(request)
        new.sort(key=_arrival)
        if new:
            self._last_arrival = new[-1].arrival
        return [request for request in new if request not in self._texts]

    def _pages(self, engine: LLMEngine, report: StepReport) -> dict[str, list[int]]:
        """The pages of each request that had some while the model ran."""
        running, table = engine.scheduler.running, engine.page_table
        rows = running.order.tolist()
        pages = {
            request: table.pages(row).tolist()
            for row, request in zip(rows, running.requests_of(running.order), strict=True)
        }
        if report.batch is not None:  # has the pages of requests that have left their rows since
            entries, indices = report.batch.kv_page_indptr.tolist(), report.batch.host_page_indices
            for b, request in enumerate(report.requests):
                if request not in pages:
                    pages[request] = indices[entries[b] : entries[b + 1]].tolist()
        # A request that ended now may have been part of an earlier launch only. It still had its pages in this step,
        # unless pages were short: then its token was collected first, and another request may have taken them.
        before = self.steps[-1].pages if self.steps else {}
        taken = {
            page for request, own in pages.items() for page in {*own}.difference(before.get(request.request_id, ()))
        }
        for request in report.finished:
            own = before.get(request.request_id, [])
            if request in report.sampled_by and request not in pages and taken.isdisjoint(own):
                pages[request] = own
        return {request.request_id: pages[request] for request in sorted(pages, key=_arrival)}

    def _detokenizer(self) -> Detokenizer | None:
        return None if self._backend is None else Detokenizer(self._backend, self._special_ids)

    def _outputs(self, report: StepReport) -> list[Token]:
        last = {request: index for index, request in enumerate(report.sampled_by)}
        return [
            self._output(request, token_id, is_last=bool(request.finish_reason) and last[request] == index)
            for index, (request, token_id) in enumerate(zip(report.sampled_by, report.token_ids.tolist(), strict=True))
        ]

    def _output(self, request: Request, token_id: int, is_last: bool) -> Token:
        detokenizer, text = self._texts.get(request), ""
        if detokenizer is not None:
            if not is_last or request.finish_reason != "stop":  # a token that ends the output is not shown
                text = detokenizer.push(token_id)
            text += detokenizer.finish() if is_last else ""
        return Token(request.request_id, token_id, text, request.finish_reason if is_last else None)


class Queue:
    """The waiting requests of each step, derived from what arrived, ran and ended.

    Requests run in order of arrival and only the newest is preempted, so the queue is in order of arrival too.
    """

    def __init__(self) -> None:
        self._open: dict[str, None] = {}

    def after(self, step: TraceStep) -> list[str]:
        """Take the next step, and return the requests that waited while it ran, the next one to be admitted first."""
        for name in step.left:
            self._open.pop(name, None)
        self._open |= dict.fromkeys(step.arrived)
        ended = set(step.ended)
        waiting = [name for name in self._open if name not in step.pages and name not in ended]
        for name in ended:
            self._open.pop(name, None)
        return waiting


def seconds_of(steps: Sequence[TraceStep]) -> float:
    """From the start of the first of some steps to the end of the last."""
    return steps[-1].start + steps[-1].seconds - steps[0].start if steps else 0.0


def tokens_per_second(steps: Sequence[TraceStep]) -> float:
    """Tokens sampled per second in some steps, over all requests."""
    seconds = seconds_of(steps)
    return sum(len(step.outputs) for step in steps) / seconds if seconds else 0.0


def traced_engine(
    llm: LLM, *, num_pages: int, page_size: int = 16, max_num_batched_tokens: int = 2048
) -> tuple[TextEngine, Trace]:
    """Return another engine on the model of `llm`, and the trace that it fills.

    Raises:
        ConfigError: for an impossible pool or step.
    """
    trace = Trace(llm.tokenizer)
    engine = llm.with_options(
        num_pages=num_pages, page_size=page_size, max_num_batched_tokens=max_num_batched_tokens, on_step=trace.record
    )
    return engine, trace


def _arrival(request: Request) -> int:
    return request.arrival


def _works(report: StepReport) -> list[Work]:
    if report.batch is None:
        return []
    columns = report.schedule.num_new.tolist(), report.num_computed.tolist(), report.batch.num_logits.tolist()
    return [
        Work(request.request_id, _kind(request, num_computed - num_new, num_new, num_logits > 0), num_new, num_computed)
        for request, num_new, num_computed, num_logits in zip(report.requests, *columns, strict=True)
    ]


def _kind(request: Request, before: int, num_new: int, samples: bool) -> Kind:
    if num_new == 1 and before >= len(request.prompt_token_ids):
        return "decode"
    return "prefill" if before == 0 and samples else "chunk"


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
    """Serve `EXAMPLE` greedily and return its trace. Few pages cause preemptions, few tokens per step cause chunks.

    Raises:
        ConfigError: for an impossible pool or step.
        RequestError: if one of the requests could not fit into the pool even alone.
    """
    text_engine, trace = traced_engine(
        llm, num_pages=num_pages, page_size=page_size, max_num_batched_tokens=max_num_batched_tokens
    )
    engine, coming = text_engine.engine, list(EXAMPLE)
    while coming or engine.has_unfinished:
        while coming and (coming[0][0] <= len(trace.steps) or not engine.has_unfinished):
            _, name, question, max_tokens = coming.pop(0)
            prompt = llm.chat_prompt([{"role": "user", "content": question}])
            engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        engine.step()
    return trace


# --- the file --------------------------------------------------------------------------------------------------------


def _with_late_ends(steps: Sequence[TraceStep]) -> list[TraceStep]:
    """Move the end of a request that contained a stop string to its last token: only the next step has noticed it."""
    resolved = list(steps)
    last: dict[str, int] = {}  # step with the last token of each request
    for index, step in enumerate(steps):
        for name, reason in step.left.items():
            if name in last and reason not in ("abort", "error"):
                earlier = resolved[last[name]]
                at = max(i for i, token in enumerate(earlier.outputs) if token.request_id == name)
                outputs = [replace(t, finish_reason=reason) if i == at else t for i, t in enumerate(earlier.outputs)]
                resolved[last[name]] = replace(earlier, outputs=outputs)
                left = {other: why for other, why in resolved[index].left.items() if other != name}
                resolved[index] = replace(resolved[index], left=left)
        last |= {token.request_id: index for token in step.outputs}
    return resolved


def _events(steps: Sequence[TraceStep]) -> Iterator[dict[str, Any]]:
    """The events of a trace: track 0 is the engine's, and each request has a track of its own."""
    tracks: dict[str, int] = {}
    for step in steps:
        for name in step.arrived:
            tracks.setdefault(name, len(tracks) + 1)
    for title, track in {"steps": 0, **{f"request {name}": track for name, track in tracks.items()}}.items():
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": title}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "mini-engine"}}

    queue = Queue()
    pages: dict[str, list[int]] = {}
    waiting_since: dict[str, float] = {}
    end = 0.0
    for index, step in enumerate(steps):
        waiting = queue.after(step)
        span = {"ph": "X", "pid": 1, "ts": _us(step.start), "dur": _us(step.seconds)}
        end = _us(step.start + step.seconds)
        yield {"name": f"step {index}", "cat": "step", **span, "tid": 0, "args": _args(step, waiting, pages)}
        pages = step.pages
        for name in waiting:
            waiting_since.setdefault(name, _us(step.start))
        for name in [*step.admitted, *step.left]:
            if name in waiting_since:
                yield _waiting(tracks[name], waiting_since.pop(name), _us(step.start))
        for work in step.batch:
            args = {"new": work.num_new, "computed": work.num_computed}
            yield {"name": work.kind, "cat": "request", **span, "tid": tracks[work.request_id], "args": args}
        moments = [(name, "preempted", _us(step.start)) for name in step.preempted]
        moments += [(name, "admitted", _us(step.start)) for name in step.admitted]
        moments += [(name, "aborted", _us(step.start)) for name in step.left]
        moments += [(t.request_id, f"ended: {t.finish_reason}", end) for t in step.outputs if t.finish_reason]
        for name, what, when in moments:
            yield {"ph": "i", "s": "t", "pid": 1, "tid": tracks[name], "ts": when, "name": what, "cat": "request"}
        counters = {
            "pages in use": step.num_pages_in_use,
            "tokens per step": step.num_tokens,
            "running": len(step.pages),
            "waiting": len(waiting),
        }
        for name, value in counters.items():
            yield {"ph": "C", "pid": 1, "ts": _us(step.start), "name": name, "args": {name: value}}
    for name, since in waiting_since.items():  # still waiting when the recording ended
        yield _waiting(tracks[name], since, end)


def _waiting(track: int, start: float, end: float) -> dict[str, Any]:
    span = {"ph": "X", "pid": 1, "tid": track, "ts": start, "dur": round(end - start, 1)}
    return {"name": "waiting", "cat": "request", **span}


def _args(step: TraceStep, waiting: list[str], before: dict[str, list[int]]) -> dict[str, Any]:
    """What the player needs to know of a step; of the pages, only those that differ from the step before."""
    changed = {name: pages for name, pages in step.pages.items() if before.get(name) != pages}
    return {
        "arrived": step.arrived,
        "waiting": waiting,
        "admitted": step.admitted,
        "preempted": step.preempted,
        "aborted": list(step.left),
        "pages": changed | {name: [] for name in before if name not in step.pages},
        "batch": [
            {"id": w.request_id, "kind": w.kind, "new": w.num_new, "computed": w.num_computed} for w in step.batch
        ],
        "outputs": [
            {"id": t.request_id, "token": t.token_id, "text": t.text, "finish": t.finish_reason} for t in step.outputs
        ],
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
