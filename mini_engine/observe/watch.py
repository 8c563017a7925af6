"""A live view of the engine in the terminal: the owners of its pages, and its running and waiting requests."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mini_engine.llm import LLM, TextEngine
from mini_engine.observe.trace import Queue, Trace, TraceStep, tokens_per_second
from mini_engine.terminal import printable

# Colors that can be told apart on dark and light terminals; requests take them in turn.
COLORS = ("#3b8ea5", "#d9822b", "#4f9d5d", "#b55d9b", "#c9a227", "#5b73c4", "#c4524f", "#2f9e8f", "#8f6fc0", "#93733f")
RATE_STEPS = 16  # the steps over which tokens/s is averaged


@dataclass
class Shown:
    """The view's record of an unfinished request.

    Attributes:
        label: one or two characters that mark its pages.
        color: color of its pages.
        state: what it did in the latest step.
        computed: tokens with keys and values in the cache.
        preemptions: number of times that it was preempted.
        text: its output so far.
    """

    label: str
    color: str
    state: str = "waiting"
    computed: int = 0
    preemptions: int = 0
    text: str = ""

    @property
    def badge(self) -> Text:
        return Text(f"{self.label:>3} ", f"bold white on {self.color}")


class Watch:
    """Draws the last step of a trace that is being recorded.

    Args:
        trace: the trace, which grows while the engine runs; `view` reads the new steps.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._num_read = 0
        self._numbers = itertools.count()
        self._queue = Queue()
        self._waiting: list[str] = []
        self._requests: dict[str, Shown] = {}
        self._ended: list[str] = []  # in the last step, which still shows their pages
        self._totals = Counter[str]()
        self._news = Text()

    def view(self, width: int, height: int) -> RenderableType:
        """Draw the latest step. If the terminal has too few lines, the last requests are cut off.

        Args:
            width: columns of the terminal.
            height: lines of the terminal; the pages take at most about half of them.
        """
        for index, step in enumerate(self.trace.steps[self._num_read :], self._num_read):
            self._read(index, step)
        self._num_read = len(self.trace.steps)
        if not self.trace.steps:
            return Text("The pages of the cache appear here.", "dim")
        return Group(self.pages(width, height // 2), self.status(), self.requests(width))

    def pages(self, width: int, rows: int) -> Panel:
        """Draw the page grid: one cell per page of the pool, in the color of its owner; ×2 is a page with two owners.

        Args:
            width: columns of the terminal.
            rows: most lines of cells; pages that do not fit are counted.
        """
        num_pages, last = self.trace.num_pages, self.trace.steps[-1]
        owners = Counter(page for pages in last.pages.values() for page in pages)
        # A shared page has the color of its oldest owner.
        owner = {page: self._requests[name] for name in reversed(last.pages) for page in last.pages[name]}
        before = self.trace.steps[-2].pages.values() if len(self.trace.steps) > 1 else ()
        owned_before = {page for pages in before for page in pages}
        columns = max(3, width - 4)
        wide = num_pages * 3 <= columns * rows  # otherwise a cell is one column, too narrow for a label
        num_shown = min(num_pages, (columns // 3 if wide else columns) * rows)
        grid = Text()
        for page in range(num_shown):
            if page not in owner:
                grid.append("··" if wide else "·", "dim")
            elif wide:
                label = f"×{owners[page]}" if owners[page] > 1 else owner[page].label
                new = "" if page in owned_before else " bold underline"
                grid.append(f"{label:>2}", f"white on {owner[page].color}{new}")
            else:
                grid.append("■", owner[page].color)
            grid.append(" " if wide else "")
        grid.append(f" and {num_pages - num_shown} more" if num_shown < num_pages else "", "dim")
        title = f"[bold]pages[/] {len(owner)} of {num_pages} in use, {self.trace.page_size} tokens each"
        return Panel(grid, title=title, title_align="left", border_style="dim", width=width)

    def status(self) -> Text:
        """Return one line of numbers, and the latest event."""
        steps = self.trace.steps
        numbers = (
            f"step {len(steps) - 1}",
            f"{len(steps[-1].pages.keys() - steps[-1].ended.keys())} running",
            f"{len(self._waiting)} waiting",
            *(f"{count} {what}" for what, count in self._totals.items()),
            f"{tokens_per_second(steps[-RATE_STEPS:]):.0f} tokens/s",
        )
        return Text.assemble(("  ·  ".join(numbers), "bold"), "\n", self._news)

    def requests(self, width: int) -> Table:
        """Draw a table of the requests: running, then waiting."""
        table = Table(box=None, width=width, padding=(0, 1), header_style="dim", show_edge=False)
        table.add_column("", width=4)
        table.add_column("state", width=15, no_wrap=True)
        for title in ("cached", "pages", "preempted"):
            table.add_column(title, justify="right", width=len(title))
        table.add_column("text", ratio=1, no_wrap=True)
        pages = self.trace.steps[-1].pages
        for name in [*pages, *self._waiting]:
            own = self._requests[name]
            numbers = (own.computed, len(pages.get(name, ())), own.preemptions)
            tail = printable(" ".join(own.text.split()))[-max(1, width - 52) :]
            table.add_row(own.badge, own.state, *(str(number or "") for number in numbers), Text(tail))
        return table

    def _read(self, index: int, step: TraceStep) -> None:
        """Update the requests with a step."""
        self._waiting = self._queue.after(step)
        for name in [*self._ended, *step.left]:
            self._requests.pop(name, None)
        self._ended = list(step.ended)
        for name in step.arrived:
            number, label = next(self._numbers), printable(name)
            label = label if len(label) <= 2 else str(number + 1)[-2:]
            self._requests[name] = Shown(label, COLORS[number % len(COLORS)])
        preempted = [name for name in step.preempted if name in self._requests]  # a request that fails also leaves
        for name in preempted:
            own = self._requests[name]
            own.state, own.computed, own.preemptions = "waiting", 0, own.preemptions + 1
        for work in step.batch:
            own = self._requests[work.request_id]
            own.state = work.kind if work.num_new == 1 else f"{work.kind} of {work.num_new}"
            own.computed = work.num_computed
        for token in step.outputs:
            self._requests[token.request_id].text += token.text
        self._totals.update({"preempted": len(preempted), "tokens shared": sum(step.hits.values())})
        news = [(name, f"begins with {count} tokens that the cache already has") for name, count in step.hits.items()]
        news += [(name, "has ended: its pages are free again") for name in step.ended]
        news += [(name, "was preempted: it is computed again when pages are free") for name in preempted]
        for name, what in news[-1:]:
            self._news = Text.assemble((f"step {index}: ", "dim"), self._requests[name].badge, f" {what}")


def watched_engine(llm: LLM, lengths: Iterable[int], given: Mapping[str, Any]) -> tuple[TextEngine, Watch]:
    """Return another engine on the model of `llm`, and a view of it.

    Args:
        llm: the model.
        lengths: tokens of each request, output included.
        given: options that may hold `num_pages`, default as many as all requests together may need, and `page_size`,
            default small, so that pages fill up.

    Raises:
        ConfigError: for an impossible pool.
    """
    page_size, longest = given.get("page_size", page_size_of(llm)), llm.config.max_model_len
    assert longest is not None
    # Admission keeps a page free for each request.
    needed = sum(math.ceil(min(length, longest) / page_size) + 1 for length in lengths)
    trace = Trace(llm.tokenizer)
    options = {"num_pages": given.get("num_pages", needed), "page_size": page_size}
    return llm.with_options(on_step=trace.record, **options), Watch(trace)


def page_size_of(llm: LLM) -> int:
    """Return the smallest page size that the model's backend takes and that shows pages filling up."""
    return 128 if llm.config.attn_backend == "flex" and llm.model.device.type == "cuda" else 16
