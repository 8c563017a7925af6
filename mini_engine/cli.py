"""The command line: `python -m mini_engine generate | chat | bench | trace`."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from mini_engine.cli_options import EngineOptions, SamplingOptions, command
from mini_engine.errors import ConfigError, MiniEngineError, RequestError
from mini_engine.terminal import TerminalConsole, make_console, printable, read_line

if TYPE_CHECKING:  # torch and transformers take seconds to import: `--help` should not wait for them
    from mini_engine.chat_template import Message
    from mini_engine.llm import LLM, TextEngine
    from mini_engine.observe.metrics import Metrics
    from mini_engine.outputs import RequestOutput
    from mini_engine.sampling_params import SamplingParams

EXAMPLES = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a library at night.",
    "Name three uses of a paperclip.",
)

Prompts = Annotated[list[str] | None, typer.Argument(help="What to answer. Default four examples.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering it.")]
Template = Annotated[Path | None, typer.Option(help="Jinja file to use instead of the model's chat template.")]
Watch = Annotated[bool, typer.Option("--watch", help="Draw the pages of the KV cache and the requests, live.")]
System = Annotated[str | None, typer.Option(help="What the model should know or be before you speak.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where to write the trace.")]


def make_app() -> typer.Typer:
    """Return an app without commands, with the settings of ours."""
    return typer.Typer(
        help="An inference engine to read: generate text, chat, measure.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
    )


app = make_app()


@command(app)
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Prompts = None,
    raw: Raw = False,
    chat_template: Template = None,
    watch: Watch = False,
) -> None:
    """Answer several prompts at once, and report what that cost. Greedy unless --temperature is given."""
    console = make_console()
    batch = load_batch(console, engine, sampling, prompts, raw, chat_template)
    if not watch:
        answer(console, batch.llm, batch)
        return
    from mini_engine.observe.watch import watch_requests

    outputs, trace = watch_requests(console, batch.llm, batch.prompts, batch.params, **_pool(engine))
    for text, output in zip(batch.texts, outputs, strict=True):
        _print_answer(console, text, output.text)
    console.print(trace.summary(), highlight=False, soft_wrap=True)
    _raise_first_error(outputs)


@command(app)
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: System = None,
    chat_template: Template = None,
    watch: Watch = False,
) -> None:
    """Talk with the model. An empty line or Ctrl-D ends."""
    console = make_console()
    template = _read_template(chat_template)
    llm = engine.load(console)
    params = sampling.params(llm.default_params, temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=512)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if watch:
        from mini_engine.observe.watch import watch_chat

        watch_chat(console, llm, messages, params, template, **_pool(engine))
        return
    while line := read_line(console, "[bold cyan]you[/] "):
        if not sys.stdin.isatty():  # a line that was typed is on the screen already
            console.print(Text(printable(line)), soft_wrap=True)
        messages.append({"role": "user", "content": line})
        try:
            text = _stream_answer(console, llm, llm.chat_prompt(messages, chat_template=template), params)
        except RequestError as error:
            print_error(error)
            messages.pop()  # the conversation goes on without the message
        else:
            messages.append({"role": "assistant", "content": text})
    console.print()


@command(app)
def bench(
    engine: EngineOptions,
    peer: Annotated[list[str] | None, typer.Option(help="Also measure this one. May be given several times.")] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="batches: side by side; throughput: many of mixed lengths; host: the host alone, without a model."
        ),
    ] = "batches",
    batch_size: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Average tokens of a prompt; lengths vary around it.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens of each output.")] = 64,
    rounds: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Measure tokens/s beside the bound, and beside peers in the same run."""
    from mini_engine.bench.run import run_bench

    run_bench(
        make_console(),
        workload=workload,
        model=engine.model,
        options=engine.options,
        parts=engine.parts,
        peers=peer or (),
        dtypes=dtype or ([engine.options["dtype"]] if "dtype" in engine.options else ["float32", "bfloat16"]),
        batch_sizes=batch_size or (1, 8),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        rounds=rounds,
        as_json=json,
    )


@command(app)
def trace(engine: EngineOptions, out: Out) -> None:
    """Serve eight requests from a small pool of pages, and record every step."""
    console = make_console()
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} to write the trace to; create it, or choose another path")
    # Few pages, so that requests are preempted, and few tokens in a step, so that prompts are computed in chunks.
    small = {"num_pages": 36, "page_size": 8, "max_num_batched_tokens": 64}
    llm = engine.load(console, **small)
    from mini_engine.observe.trace import record_example

    with console.status("serving eight requests"):
        recorded = record_example(llm, **{name: getattr(llm.config, name) for name in small})
    recorded.save(out)
    console.print(recorded.summary(), highlight=False, soft_wrap=True)
    console.print(
        Text(f"Written to {printable(str(out))}: open it at ui.perfetto.dev, or in the book's trace player."),
        soft_wrap=True,
    )


class Batch(NamedTuple):
    """Requests for one model.

    Attributes:
        llm: the model.
        texts: the prompts, as they were given.
        prompts: their tokens.
        params: the sampling parameters of all.
    """

    llm: "LLM"
    texts: list[str]
    prompts: list[list[int]]
    params: "SamplingParams"


def load_batch(
    console: TerminalConsole,
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: Prompts,
    raw: bool,
    chat_template: Path | None,
) -> Batch:
    """Check the arguments of `generate`, load the model, and tokenize the prompts.

    Raises:
        RequestError: for an empty prompt, or a template that is not a text file.
    """
    texts = prompts or list(EXAMPLES)
    if empty := [number for number, text in enumerate(texts, 1) if not text.strip()]:
        raise RequestError(f"prompt {empty[0]} is empty; give it some text")
    template = _read_template(chat_template)
    llm = engine.load(console)
    params = sampling.params(llm.default_params, temperature=0.0, max_tokens=96)
    if raw:
        tokens = [llm.tokens_of(text) for text in texts]
    else:
        tokens = [llm.chat_prompt([{"role": "user", "content": text}], chat_template=template) for text in texts]
    return Batch(llm, texts, tokens, params)


def answer(console: TerminalConsole, engine: "TextEngine", batch: Batch) -> "list[RequestOutput]":
    """Serve requests, and print the answers as they are generated and what they cost.

    Returns:
        The outputs, in order.

    Raises:
        RequestError: the error of the first request that could not be served; the others have been.
    """
    from mini_engine.observe.metrics import Metrics
    from mini_engine.roofline import measure_machine

    answers = [""] * len(batch.texts)
    outputs: dict[int, RequestOutput] = {}
    model = batch.llm.model
    metrics = Metrics(model)
    with Live(console=console, refresh_per_second=12, transient=True, vertical_overflow="visible") as live:
        for piece in engine.stream_batch(batch.prompts, batch.params):
            answers[piece.index] += piece.text
            metrics.add(piece)
            if piece.output:
                outputs[piece.index] = piece.output
                if not console.is_terminal:
                    _print_answer(console, batch.texts[piece.index], answers[piece.index])
            live.update(_view(console, batch.texts, answers, metrics))
    if console.is_terminal:
        for text, own in zip(batch.texts, answers, strict=True):
            _print_answer(console, text, own)
    console.print(metrics.table(measure_machine(model.device, model.dtype)))
    in_order = [outputs[index] for index in range(len(outputs))]
    _raise_first_error(in_order)
    return in_order


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
        if error.filename is not None or sys.stdout is None:
            raise
        # What could not be written is still in the stream, and Python writes it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(f"cannot write to standard output: {error.strerror}")
        sys.exit(1)


def _pool(engine: EngineOptions) -> dict[str, int]:
    """Return the size of the pool, as far as it was given."""
    return {name: engine.options[name] for name in ("num_pages", "page_size") if name in engine.options}


def _raise_first_error(outputs: "list[RequestOutput]") -> None:
    for output in outputs:
        if output.error:
            raise output.error


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bad UTF-8, or a null byte in the path
        raise RequestError(f"cannot read the chat template {path}: {error}; give a Jinja file") from error


def _stream_answer(console: TerminalConsole, llm: "LLM", prompt: list[int], params: "SamplingParams") -> str:
    """Print an answer as it is generated, and how fast that was."""
    text = ""
    start, first, num_tokens = time.perf_counter(), 0.0, 0
    console.print("[bold green]model[/] ", end="")
    for piece in llm.stream_batch([prompt], params):
        if piece.output and piece.output.error:
            console.print()
            raise piece.output.error
        first = first or time.perf_counter() - start
        num_tokens += piece.num_tokens
        text += piece.text
        console.print(printable(piece.text), end="", markup=False, highlight=False, soft_wrap=True)
    rate = num_tokens / (time.perf_counter() - start)
    console.print(f"\n[dim]{num_tokens} tokens, {rate:.0f} tokens/s, first after {first * 1e3:.0f} ms[/]")
    return text


def _view(console: TerminalConsole, texts: list[str], answers: list[str], metrics: "Metrics") -> Group:
    height = max(3, (console.height - 4) // len(texts) - 2)
    panels = []
    for text, own in zip(texts, answers, strict=True):
        lines = Text(printable(own.strip()) or "...").wrap(console, console.width - 4)[-height:]
        title = Text(printable(text), style="bold cyan")
        panels.append(Panel(Text("\n").join(lines), title=title, title_align="left"))
    return Group(*panels, Text(metrics.progress(len(texts)), style="dim"))


def _print_answer(console: TerminalConsole, text: str, own: str) -> None:
    console.print(Rule(Text(printable(text), style="bold cyan"), align="left", style="dim"))
    console.print(Text(printable(own.strip())))
    console.print()


if __name__ == "__main__":
    main()
