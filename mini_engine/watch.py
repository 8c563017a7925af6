"""A live view of the engine in the terminal: who owns which page, who runs, who waits, and what each step does."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence as ListLike

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mini_engine.llm import LLM
from mini_engine.outputs import RequestOutput
from mini_engine.sampling_params import SamplingParams
from mini_engine.trace import Trace, TraceStep, traced_engine

# Told apart on dark and light terminals alike; requests take them in turn.
COLOURS = ("#3b8ea5", "#d9822b", "#4f9d5d", "#b55d9b", "#c9a227", "#5b73c4", "#c4524f", "#2f9e8f", "#8f6fc0", "#93733f")
BARS = "▁▂▃▄▅▆▇█"
LABELLED_ROWS = 8
RATE_STEPS = 16  # tokens/s over so many steps


class Watch:
    """Draws the last step of a trace that is being recorded.

    Args:
        trace: grows by itself; `view` reads what is new.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._seen = 0
        self._order: list[str] = []
        self._computed: dict[str, int] = defaultdict(int)
        self._preemptions: Counter[str] = Counter()
        self._hits = 0
        self._text: dict[str, str] = defaultdict(str)
        self._state: dict[str, str] = {}
        self._news = Text(" ")

    def _take(self, index: int, step: TraceStep) -> None:
        for name in step.aborted:
            self._state[name] = "aborted"
        self._order += [name for name in step.arrived if name not in self._state]
        for name in step.arrived:  # one that has ended may have had the name before
            self._text[name], self._computed[name] = "", 0
        for name in step.waiting:
            self._state[name] = "waiting"
        for name in step.pages:
            self._state[name] = "running"
        for work in step.batch:
            self._computed[work.request_id] = work.num_computed
            self._state[work.request_id] = work.kind if work.num_new == 1 else f"{work.kind} of {work.num_new}"
        for name, count in step.hits.items():
            self._hits += count
            self._tell(index, name, f"begins with {count} tokens that others have computed")
        for output in step.outputs:
            self._text[output.request_id] += output.text
            if output.finish_reason:
                self._state[output.request_id] = "done"
                count = len(step.pages[output.request_id])
                self._tell(index, output.request_id, f"has ended: its {count} pages are free again")
        for name in step.preempted:
            self._computed[name] = 0
            self._preemptions[name] += 1
            self._tell(index, name, "was preempted: older requests get its pages, and it will be computed again")

    def _tell(self, index: int, name: str, what: str) -> None:
        self._news = Text.assemble((f"step {index}: ", "dim"), self._name(name), f" {what}")

    def pages(self, width: int, rows: int) -> Panel:
        """The page grid: a cell for each page of the pool, in the colour of its owner; ×2 is a page that two share.

        Args:
            width: columns of the terminal.
            rows: most lines of cells; what does not fit is counted.
        """
        trace = self._trace
        owner: dict[int, str] = {}
        owners: Counter[int] = Counter()
        for name, pages in trace.steps[-1].pages.items():
            owners.update(pages)
            owner = dict.fromkeys(pages, name) | owner  # a shared page has the colour of its oldest owner
        before = trace.steps[-2].pages if len(trace.steps) > 1 else {}
        owned_before = {page for pages in before.values() for page in pages}
        columns = max(3, width - 4)
        # Otherwise a cell is one column, and has no room.
        labelled = trace.num_pages * 3 <= min(LABELLED_ROWS, rows) * columns
        in_a_row = columns // 3 if labelled else columns
        num_shown = trace.num_pages
        if num_shown > max(1, rows) * in_a_row:
            num_shown = max(1, rows - 1) * in_a_row
        grid = Text()
        for page in range(num_shown):
            if page and page % in_a_row == 0:
                grid.append("\n")
            elif page and labelled:
                grid.append(" ")
            if page not in owner:
                grid.append("··" if labelled else "·", "dim")
            elif labelled:
                new = "" if page in owned_before else " bold underline"
                label = f"×{owners[page]}" if owners[page] > 1 else self._label(owner[page])
                grid.append(f"{label:>2}", f"white on {self._colour(owner[page])}{new}")
            else:
                grid.append("■", self._colour(owner[page]))
        if num_shown < trace.num_pages:
            grid.append(f"\nand {trace.num_pages - num_shown} more", "dim")
        title = Text.assemble(
            ("pages ", "bold"), f"{len(owner)} of {trace.num_pages} in use, {trace.page_size} tokens each"
        )
        return Panel(grid, title=title, title_align="left", border_style="dim", width=width)

    def requests(self, width: int, rows: int) -> Table:
        """The requests: those that run or wait first, then those that ended last, as many as fit.

        Args:
            width: columns of the terminal.
            rows: most requests shown.
        """
        table = Table(box=None, width=width, padding=(0, 1), header_style="dim", show_edge=False)
        table.add_column("", width=4)
        table.add_column("state", width=15, no_wrap=True)
        table.add_column("cached", justify="right", width=6)
        table.add_column("pages", justify="right", width=5)
        table.add_column("preempted", justify="right", width=9)
        table.add_column("text", ratio=1, no_wrap=True)
        pages = self._trace.steps[-1].pages
        running = [name for name in self._order if name in pages and self._state[name] != "done"]
        waiting = self._trace.steps[-1].waiting
        over = [name for name in reversed(self._order) if self._state[name] in ("done", "aborted")]
        for name in [*running, *waiting, *over][:rows]:
            quiet = "dim" if name in over else ""
            tail = " ".join(self._text[name].split())[-max(1, width - 52) :]
            table.add_row(
                self._name(name),
                Text(self._state[name], "yellow" if name in waiting else quiet),
                Text(str(self._computed[name] or ""), quiet),
                Text(str(len(pages[name])) if name in running else "", quiet),
                Text(str(self._preemptions[name] or ""), quiet),
                Text(tail, quiet),
            )
        return table

    def status(self, width: int) -> Text:
        """One line of numbers, one of the last steps' tokens, and the last preemption.

        Args:
            width: columns of the terminal.
        """
        steps = self._trace.steps
        running = sum(name not in steps[-1].ended for name in steps[-1].pages)
        parts = [
            f"step {len(steps) - 1}",
            f"{running} running",
            f"{len(steps[-1].waiting)} waiting",
            f"{sum(self._preemptions.values())} preempted",
            *([f"{self._hits} tokens shared"] if self._hits else []),
            f"{self.tokens_per_second():.0f} tokens/s",
        ]
        counts = [step.num_tokens for step in steps[-(width - 17) :]]
        # On a logarithmic scale: a prompt has a hundred times the tokens of a decode.
        bars = "".join(BARS[min(count.bit_length(), len(BARS)) - 1] for count in counts)
        line = Text("  ·  ").join(Text(part, "bold") for part in parts)
        return Text.assemble(line, "\n", ("tokens per step ", "dim"), (bars, "cyan"), "\n", self._news)

    def view(self, width: int, height: int, with_requests: bool = True) -> RenderableType:
        """The last step, as high as the terminal at most.

        Args:
            width: columns of the terminal.
            height: lines that may be used.
            with_requests: also the table of requests.
        """
        for index, step in enumerate(self._trace.steps[self._seen :], self._seen):
            self._take(index, step)
        self._seen = len(self._trace.steps)
        if not self._trace.steps:
            return Text("The pages of the cache appear here.", "dim")
        status = self.status(width)
        room = height - len(status.wrap(Console(width=width), width)) - 2  # the frame of the grid
        grid = self.pages(width, room - 4 if with_requests else room)
        rows = room - len(str(grid.renderable).splitlines()) - 2
        table: list[RenderableType] = [self.requests(width, max(1, rows)), Text()] if with_requests else []
        return Group(grid, *table, status)

    def tokens_per_second(self) -> float:
        """Tokens sampled per second, over the last steps."""
        last = self._trace.steps[-RATE_STEPS:]
        seconds = last[-1].start + last[-1].seconds - last[0].start
        return sum(len(step.outputs) for step in last) / seconds if seconds else 0.0

    def _label(self, name: str) -> str:
        return name if len(name) <= 2 else str(self._order.index(name) + 1)[-2:]

    def _colour(self, name: str) -> str:
        return COLOURS[self._order.index(name) % len(COLOURS)]

    def _name(self, name: str) -> Text:
        return Text(f"{self._label(name):>3} ", f"bold white on {self._colour(name)}")


def watch_requests(
    console: Console, llm: LLM, prompts: ListLike[list[int]], params: SamplingParams, num_pages: int | None = None
) -> tuple[list[RequestOutput], Trace]:
    """Serve requests by continuous batching and draw every step.

    Args:
        console: where to draw.
        llm: the model.
        prompts: tokens of each request.
        params: for all of them.
        num_pages: pages of `llm.small_page_size` tokens; default as many as all requests together may need.

    Returns:
        One output for each prompt, and the trace of the run.

    Raises:
        ConfigError: for a pool that cannot be.
        RequestError: for a request that cannot be served.
    """
    page_size = llm.small_page_size
    if num_pages is None:
        num_pages = sum(math.ceil(min(len(p) + params.max_tokens, llm.max_model_len) / page_size) for p in prompts)
    engine, trace = traced_engine(llm, num_pages=num_pages, page_size=page_size)
    sequences = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts, 1)]
    watch = Watch(trace)
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        while engine.has_unfinished:
            engine.step()
            if console.is_terminal:
                live.update(watch.view(console.width, console.height - 1), refresh=True)
    return [RequestOutput.of(prompt, sequence) for prompt, sequence in zip(prompts, sequences, strict=True)], trace


def watch_chat(
    console: Console,
    llm: LLM,
    messages: list[dict[str, str]],
    params: SamplingParams,
    chat_template: str | None = None,
    num_pages: int | None = None,
) -> None:
    """Talk with the model over the pages of its cache, on a screen of its own. An empty line ends.

    Args:
        console: the terminal.
        llm: the model.
        messages: of the conversation so far; grows.
        params: for every answer.
        chat_template: a Jinja template; default the model's own.
        num_pages: pages of `llm.small_page_size` tokens; default enough for the model, or for 4,096 tokens if it takes
            more.

    Raises:
        ConfigError: for a pool that cannot be.
        RequestError: for a message that cannot be answered.
    """
    page_size = llm.small_page_size
    engine, trace = traced_engine(
        llm,
        num_pages=math.ceil(min(llm.max_model_len, 4096) / page_size) if num_pages is None else num_pages,
        page_size=page_size,
    )
    watch = Watch(trace)
    conversation = Text()

    def draw() -> None:
        if console.is_terminal:
            below = watch.view(console.width, console.height // 2, with_requests=False)
            height = console.height - 1 - len(console.render_lines(below, console.options))
            lines = conversation.wrap(console, console.width)[-max(1, height) :]
            blank = Text("\n" * max(0, height - len(lines) - 1))
            console.control(Control.home())
            screen.update(Group(*([blank] if blank else []), Text("\n").join(lines), below))

    try:
        with console.screen(hide_cursor=False) as screen:
            for turn in itertools.count(1):
                draw()
                try:
                    line = console.input("\r[bold cyan]you[/] ")
                except EOFError:
                    line = ""
                if not line.strip():
                    return
                messages.append({"role": "user", "content": line})
                conversation.append("you ", "bold cyan").append(f"{line}\n").append("model ", "bold green")
                engine.add_request(str(turn), llm.chat_prompt(messages, chat_template=chat_template), params)
                answer = ""
                while engine.has_unfinished:
                    for output in engine.step().outputs:
                        answer += output.text
                        conversation.append(output.text)
                    draw()
                conversation.append("\n\n")
                messages.append({"role": "assistant", "content": answer})
    finally:
        console.print(conversation)  # the screen is gone, what was said stays
