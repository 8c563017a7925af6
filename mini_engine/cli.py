"""The command line: `python -m mini_engine generate | chat | bench | trace`."""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from mini_engine.bench.options import BenchOptions
from mini_engine.cli_options import EngineOptions, SamplingOptions, command
from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.terminal import make_console, printable, read_line, show

if TYPE_CHECKING:  # torch and transformers take seconds to import, and `--help` should not wait
    from mini_engine.chat_template import Message
    from mini_engine.llm import LLM, TextEngine
    from mini_engine.observe.metrics import Metrics
    from mini_engine.observe.trace import Trace
    from mini_engine.observe.watch import Watch
    from mini_engine.outputs import RequestOutput
    from mini_engine.sampling_params import SamplingParams

EXAMPLES = [
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a library at night.",
    "Name three uses of a paperclip.",
]
# Few pages, so that requests are preempted, and few tokens in a step, so that prompts are computed in chunks.
SMALL_POOL: dict[str, Any] = {
    "num_pages": 36, "page_size": 8, "max_num_batched_tokens": 64, "enable_prefix_caching": False,
}  # fmt: skip
CHAT_TOKENS = 4096  # most tokens in the pool of a watched chat


Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts to answer; default four examples.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering it.")]
Template = Annotated[Path | None, typer.Option(help="Jinja file to use instead of the model's chat template.")]
Watching = Annotated[bool, typer.Option("--watch", help="Draw the pages of the KV cache and the requests, live.")]
System = Annotated[str | None, typer.Option(help="System message: what the model should know or be.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where to write the trace.")]


def make_app() -> typer.Typer:
    """Return an app without commands, with our settings."""
    about = "An inference engine made to be read: generate text, chat, measure."
    return typer.Typer(help=about, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


app = make_app()


@command(app)
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Prompts = None,
    raw: Raw = False,
    chat_template: Template = None,
    watch: Watching = False,
) -> None:
    """Answer several prompts at once, and report what that cost. Greedy unless --temperature is given."""
    console = make_console()
    batch = load_batch(console, engine, sampling, prompts, raw, chat_template)
    lengths = [len(prompt) + batch.params.max_tokens for prompt in batch.prompts]
    answer(console, *_engine_and_view(engine, batch.llm, lengths, watch), batch)


@command(app)
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: System = None,
    chat_template: Template = None,
    watch: Watching = False,
) -> None:
    """Chat with the model. An empty line or Ctrl-D ends the chat."""
    console = make_console()
    template = _read_template(chat_template)
    llm = engine.load(console)
    params = sampling.params(llm.default_params, temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=512)
    serving, view = _engine_and_view(engine, llm, [CHAT_TOKENS], watch)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    while line := read_line(console, "[bold cyan]you[/] "):
        if not sys.stdin.isatty():  # a typed line is on the screen already
            show(console, line)
        messages.append({"role": "user", "content": line})
        try:
            prompt = llm.chat_prompt(messages, chat_template=template)
            outputs, metrics = stream(console, serving, view, Batch(llm, ["model"], [prompt], params))
        except RequestError as error:
            print_error(error)
            messages.pop()  # the conversation goes on without the message
        else:
            messages.append({"role": "assistant", "content": outputs[0].text})
            show(console, metrics.summary(), "dim")
    console.print()


@command(app)
def bench(engine: EngineOptions, bench: BenchOptions) -> None:
    """Measure tokens/s, and compare them with the upper bound and with other engines in the same run."""
    from mini_engine.bench.run import run_bench

    run_bench(make_console(), engine, bench)


@command(app)
def trace(engine: EngineOptions, out: Out) -> None:
    """Answer four prompts from a small pool of pages, and record every step."""
    from mini_engine.observe.trace import Trace

    console = make_console()
    batch = load_batch(console, engine, SamplingOptions({}), **SMALL_POOL)
    recorded = Trace(batch.llm.tokenizer)
    tracing = batch.llm.with_options(on_step=recorded.record)
    recorded.save(out)  # refuses a bad path before the work starts
    try:
        stream(console, tracing, None, batch)
    finally:  # also after a refused prompt, a closed pipe or Ctrl-C
        save_trace(console, recorded, out)


class Batch(NamedTuple):
    """Requests for one model.

    Attributes:
        llm: the model.
        texts: the prompts as given.
        prompts: their tokens.
        params: the sampling parameters of all requests.
    """

    llm: "LLM"
    texts: list[str]
    prompts: list[list[int]]
    params: "SamplingParams"


def load_batch(
    console: Console,
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: list[str] | None = None,
    raw: bool = False,
    chat_template: Path | None = None,
    **defaults: Any,
) -> Batch:
    """Check the arguments of `generate`, load the model, and tokenize the prompts.

    Raises:
        RequestError: for an empty prompt, or a template that is not a text file.
    """
    texts = prompts or EXAMPLES
    if empty := [number for number, text in enumerate(texts, 1) if not text.strip()]:
        raise RequestError(f"prompt {empty[0]} is empty; give it some text")
    template = _read_template(chat_template)
    llm = engine.load(console, **defaults)
    params = sampling.params(llm.default_params, temperature=0.0, max_tokens=96)
    if raw:
        tokens = [llm.tokens_of(text) for text in texts]
    else:
        tokens = [llm.chat_prompt([{"role": "user", "content": text}], chat_template=template) for text in texts]
    return Batch(llm, texts, tokens, params)


def stream(
    console: Console, engine: "TextEngine", watch: "Watch | None", batch: Batch
) -> "tuple[list[RequestOutput], Metrics]":
    """Serve requests and print the answers in order: as they are generated, or at the end if `watch` draws the engine.

    Returns:
        The outputs, in order, and the cost of the run.

    Raises:
        RequestError: the error of the first request that could not be served, after all others have been served.
    """
    from mini_engine.observe.metrics import Metrics

    metrics = Metrics()
    outputs: dict[int, RequestOutput] = {}
    texts = [""] * len(batch.texts)  # not printed yet

    def print_answers() -> Iterator[None]:
        """Print the answers in order; yield wherever the text of the current one is not complete yet."""
        for index, title in enumerate(batch.texts):
            console.print(Rule(Text(printable(title), style="bold cyan"), align="left", style="dim"))
            while index not in outputs:
                show(console, texts[index], end="")
                texts[index] = ""
                yield
            show(console, texts[index], end="\n\n")

    printing = print_answers()
    next(printing)
    live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop")
    with live if watch else nullcontext():
        for piece in engine.stream_batch(batch.prompts, batch.params):
            metrics.add(piece)
            texts[piece.index] += piece.text
            if piece.output:
                outputs[piece.index] = piece.output
            if watch is None:
                next(printing, None)
            elif console.is_terminal:
                live.update(watch.view(console.width, console.height - 1), refresh=True)
    next(printing, None)
    for index, output in sorted(outputs.items()):
        if output.error:
            raise RequestError(f"prompt {index + 1}: {output.error}") from output.error
    return [outputs[index] for index in range(len(outputs))], metrics


def answer(console: Console, engine: "TextEngine", watch: "Watch | None", batch: Batch) -> "list[RequestOutput]":
    """Serve requests, and print the answers and their cost.

    Returns:
        The outputs, in order.

    Raises:
        RequestError: the error of the first request that could not be served, after all others have been served.
    """
    from mini_engine.roofline import measure_machine

    outputs, metrics = stream(console, engine, watch, batch)
    model = batch.llm.model
    console.print(metrics.table(model, measure_machine(model.device, model.dtype), engine.engine))
    if watch:
        show(console, watch.trace.summary())
    return outputs


def save_trace(console: Console, recorded: "Trace", out: Path) -> None:
    """Write a trace, and print its totals."""
    recorded.save(out)
    show(console, recorded.summary())
    show(console, f"Written to {out}: open it at ui.perfetto.dev, or in the book's trace player.")


def print_error(error: Exception | str) -> None:
    """Print a message on standard error."""
    message = Text.assemble(("error: ", "bold red"), printable(str(error)))
    make_console(stderr=True).print(message, soft_wrap=True)


def main(app: typer.Typer = app) -> None:
    """Run a command line; an error that the engine raises on purpose becomes one sentence and exit code 2."""
    make_console()  # for the messages of typer, which writes to the same stream
    try:
        app()
    except MiniEngineError as error:
        print_error(error)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None or error.errno is None or sys.stdout is None:
            raise
        # The unwritten text is still in the stream, and Python would try to write it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(f"cannot write to standard output: {error.strerror}")
        sys.exit(1)


def _engine_and_view(
    engine: EngineOptions, llm: "LLM", lengths: list[int], watch: bool
) -> "tuple[TextEngine, Watch | None]":
    if not watch:
        return llm, None
    from mini_engine.observe.watch import watched_engine

    return watched_engine(llm, lengths, engine.options)


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bad UTF-8, or a null byte in the path
        raise RequestError(f"cannot read the chat template {path}: {error}; give a Jinja file") from error


if __name__ == "__main__":
    main()
