"""A live view of the engine in the terminal: owners of pages, states of requests, and the work of each step."""

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

from mini_engine.chat_template import Message
from mini_engine.errors import RequestError
from mini_engine.llm import LLM
from mini_engine.observe.trace import Queue, Trace, TraceStep, tokens_per_second, traced_engine
from mini_engine.outputs import RequestOutput
from mini_engine.sampling_params import SamplingParams
from mini_engine.terminal import printable, read_line

# Distinguishable on dark and light terminals; requests take them in turn.
COLORS = ("#3b8ea5", "#d9822b", "#4f9d5d", "#b55d9b", "#c9a227", "#5b73c4", "#c4524f", "#2f9e8f", "#8f6fc0", "#93733f")
BARS = "▁▂▃▄▅▆▇█"
LABELLED_ROWS = 8
RATE_STEPS = 16  # the steps over which tokens/s is averaged
CHAT_TOKENS = 4096  # that the pool of a watched chat holds at most


class Watch:
    """Draws the last step of a trace that is being recorded.

    Args:
        trace: it grows while the engine runs; `view` reads the new steps.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._seen = 0
        self._queue = Queue()
        self._waiting: list[str] = []
        self._order: list[str] = []
        self._computed: dict[str, int] = defaultdict(int)
        self._preemptions: Counter[str] = Counter()
        self._hits = 0
        self._text: dict[str, str] = defaultdict(str)
        self._state: dict[str, str] = {}
        self._news = Text(" ")

    def _take(self, index: int, step: TraceStep) -> None:
        self._waiting = self._queue.after(step)
        for name, reason in step.left.items():
            self._state[name] = {"abort": "aborted", "error": "failed"}.get(reason, "done")
        self._order += [name for name in step.arrived if name not in self._state]
        for name in step.arrived:  # an earlier request may have had the name
            self._text[name], self._computed[name] = "", 0
        for name in self._waiting:
            self._state[name] = "waiting"
        for name in step.pages:
            self._state[name] = "running"
        for work in step.batch:
            self._computed[work.request_id] = work.num_computed
            self._state[work.request_id] = work.kind if work.num_new == 1 else f"{work.kind} of {work.num_new}"
        for name, count in step.hits.items():
            self._hits += count
            self._tell(index, name, f"begins with {count} tokens that other requests have computed")
        for token in step.outputs:
            self._text[token.request_id] += token.text
            if token.finish_reason:
                self._state[token.request_id] = "done"
                count = len(step.pages.get(token.request_id, ()))
                self._tell(index, token.request_id, f"has ended: its {count} pages are free again")
        for name in step.preempted:
            self._computed[name] = 0
            self._preemptions[name] += 1
            self._tell(index, name, "was preempted: older requests get its pages, and it is computed again later")

    def _tell(self, index: int, name: str, what: str) -> None:
        self._news = Text.assemble((f"step {index}: ", "dim"), self._name(name), f" {what}")

    def pages(self, width: int, rows: int) -> Panel:
        """Draw the page grid: one cell per page of the pool, in the color of its owner; ×2 is a page with two owners.

        Args:
            width: columns of the terminal.
            rows: most lines of cells; pages that do not fit are counted.
        """
        trace = self._trace
        owner: dict[int, str] = {}
        owners: Counter[int] = Counter()
        for name, pages in trace.steps[-1].pages.items():
            owners.update(pages)
            owner = dict.fromkeys(pages, name) | owner  # a shared page has the color of its oldest owner
        before = trace.steps[-2].pages if len(trace.steps) > 1 else {}
        owned_before = {page for pages in before.values() for page in pages}
        columns = max(3, width - 4)
        # Otherwise a cell is one column wide, too narrow for a label.
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
                grid.append(f"{label:>2}", f"white on {self._color(owner[page])}{new}")
            else:
                grid.append("■", self._color(owner[page]))
        if num_shown < trace.num_pages:
            grid.append(f"\nand {trace.num_pages - num_shown} more", "dim")
        title = Text.assemble(
            ("pages ", "bold"), f"{len(owner)} of {trace.num_pages} in use, {trace.page_size} tokens each"
        )
        return Panel(grid, title=title, title_align="left", border_style="dim", width=width)

    def requests(self, width: int, rows: int) -> Table:
        """Draw a table of the requests, as many as fit: running, then waiting, then the latest to end.

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
        over = [name for name in reversed(self._order) if self._state[name] in ("done", "aborted", "failed")]
        for name in [*running, *self._waiting, *over][:rows]:
            state = self._state[name]
            quiet = "dim" if state in ("done", "aborted", "failed") else ""
            tail = printable(" ".join(self._text[name].split()))[-max(1, width - 52) :]
            table.add_row(
                self._name(name),
                Text(state, "yellow" if state == "waiting" else quiet),
                Text(str(self._computed[name] or ""), quiet),
                Text(str(len(pages[name])) if name in running else "", quiet),
                Text(str(self._preemptions[name] or ""), quiet),
                Text(tail, quiet),
            )
        return table

    def status(self, width: int) -> Text:
        """Return one line of numbers, one of the latest steps' tokens, and the latest event.

        Args:
            width: columns of the terminal.
        """
        steps = self._trace.steps
        running = sum(name not in steps[-1].ended for name in steps[-1].pages)
        parts = [
            f"step {len(steps) - 1}",
            f"{running} running",
            f"{len(self._waiting)} waiting",
            f"{sum(self._preemptions.values())} preempted",
            *([f"{self._hits} tokens shared"] if self._hits else []),
            f"{tokens_per_second(steps[-RATE_STEPS:]):.0f} tokens/s",
        ]
        counts = [step.num_tokens for step in steps[-(width - 17) :]]
        # On a logarithmic scale, because a prompt has a hundred times the tokens of a decode.
        bars = "".join(BARS[min(count.bit_length(), len(BARS)) - 1] for count in counts)
        line = Text("  ·  ").join(Text(part, "bold") for part in parts)
        return Text.assemble(line, "\n", ("tokens per step ", "dim"), (bars, "cyan"), "\n", self._news)

    def view(self, width: int, height: int, with_requests: bool = True) -> RenderableType:
        """Draw the latest step, no higher than the terminal.

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

    def _label(self, name: str) -> str:
        shown = printable(name)
        return shown if len(shown) <= 2 else str(self._order.index(name) + 1)[-2:]

    def _color(self, name: str) -> str:
        return COLORS[self._order.index(name) % len(COLORS)]

    def _name(self, name: str) -> Text:
        return Text(f"{self._label(name):>3} ", f"bold white on {self._color(name)}")


def watch_requests(
    console: Console,
    llm: LLM,
    prompts: ListLike[list[int]],
    params: SamplingParams,
    num_pages: int | None = None,
    page_size: int | None = None,
) -> tuple[list[RequestOutput], Trace]:
    """Serve requests by continuous batching and draw the pages after every step that gives tokens.

    Args:
        console: where to draw.
        llm: the model.
        prompts: tokens of each request.
        params: for all of them.
        num_pages: pages of the pool; default as many as all requests together may need.
        page_size: tokens of a page; default small, so that pages fill up.

    Returns:
        One output for each prompt, and the trace of the run. A request that cannot be served has
        `finish_reason="error"`.

    Raises:
        ConfigError: for an impossible pool.
    """
    page_size = page_size or page_size_of(llm)
    if num_pages is None:
        lengths = [min(len(prompt) + params.max_tokens, _max_model_len(llm)) for prompt in prompts]
        num_pages = sum(math.ceil(length / page_size) + 1 for length in lengths)  # admission leaves a page for each
    engine, trace = traced_engine(llm, num_pages=num_pages, page_size=page_size)
    names = [str(i) for i in range(1, len(prompts) + 1)]
    watch, outputs = Watch(trace), dict[int, RequestOutput]()
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
        drawn = 0
        for piece in engine.stream_batch(prompts, params, names):
            if piece.output:
                outputs[piece.index] = piece.output
            if console.is_terminal and len(trace.steps) > drawn:  # a step has several pieces
                drawn = len(trace.steps)
                live.update(watch.view(console.width, console.height - 1), refresh=True)
    return [outputs[index] for index in range(len(prompts))], trace


def watch_chat(
    console: Console,
    llm: LLM,
    messages: list[Message],
    params: SamplingParams,
    chat_template: str | None = None,
    num_pages: int | None = None,
    page_size: int | None = None,
) -> None:
    """Chat with the model over a view of its pages, on a screen of its own. An empty line ends the chat.

    Args:
        console: the terminal.
        llm: the model.
        messages: the conversation so far; new messages are appended.
        params: for every answer.
        chat_template: a Jinja template; default the model's own.
        num_pages: pages of the pool; default enough for the longest conversation, or for 4,096 tokens if the model
            takes more.
        page_size: tokens of a page; default small, so that pages fill up.

    Raises:
        ConfigError: for an impossible pool.
        RequestError: if the input cannot be read. A message that cannot be answered is dropped, and the chat goes on.
    """
    page_size = page_size or page_size_of(llm)
    engine, trace = traced_engine(
        llm,
        num_pages=math.ceil(min(_max_model_len(llm), CHAT_TOKENS) / page_size) if num_pages is None else num_pages,
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
                line = read_line(console, "\r[bold cyan]you[/] ")
                if not line:
                    return
                messages.append({"role": "user", "content": line})
                conversation.append("you ", "bold cyan").append(f"{printable(line)}\n").append("model ", "bold green")
                answer = ""
                try:
                    prompt = llm.chat_prompt(messages, chat_template=chat_template)
                    for piece in engine.stream_batch([prompt], params, [str(turn)]):
                        if piece.output and piece.output.error:
                            raise piece.output.error
                        answer += piece.text
                        conversation.append(printable(piece.text))
                        draw()
                except RequestError as error:
                    conversation.append(f"error: {printable(str(error))}", "bold red")
                    messages.pop()  # the conversation goes on without the message
                else:
                    messages.append({"role": "assistant", "content": answer})
                conversation.append("\n\n")
    finally:
        console.print(conversation)  # the screen is gone, the conversation remains


def page_size_of(llm: LLM) -> int:
    """Return the smallest page size that the model's backend takes and that shows pages filling up."""
    return 128 if llm.config.attn_backend == "flex" and llm.model.device.type == "cuda" else 16


def _max_model_len(llm: LLM) -> int:
    assert llm.config.max_model_len is not None
    return llm.config.max_model_len
