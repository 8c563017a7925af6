"""`mini-engine`: the engine's command line, with `--homework` to run it on the reader's own parts."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from book.grading.chapter import ROOT
from mini_engine import cli
from mini_engine.cli_options import EngineOptions, SamplingOptions, command
from mini_engine.errors import ConfigError
from mini_engine.terminal import make_console

Homework = Annotated[bool, typer.Option("--homework", help="Run on your own finished parts of the engine.")]
app = cli.make_app()


@command(app)
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompts: cli.Prompts = None,
    raw: cli.Raw = False,
    chat_template: cli.Template = None,
    watch: cli.Watching = False,
    homework: Homework = False,
) -> None:
    """Answer several prompts at once, and report what that cost. Greedy unless --temperature is given."""
    console = make_console()
    if homework:
        engine = with_homework(console, engine)
    if watch or not homework:
        cli.generate(engine, sampling, prompts, raw, chat_template, watch)
        if not prompts and not homework:
            console.print(
                "\nNext: [bold]mini-engine chat[/] talks with the model, and [bold]make lab[/] opens the chapters. "
                "In chapter 1 you begin to write this engine."
            )
        return
    from book.grading.engine import compare_over_chunks, compare_with_reference, print_parts, small_engine

    sampling = SamplingOptions({"seed": 0} | sampling)  # so that both engines draw the same numbers
    batch = cli.load_batch(console, engine, sampling, prompts, raw, chat_template)
    print_parts(console, batch.llm)
    mine = small_engine(batch)
    outputs = cli.answer(console, mine, None, batch)
    compare_with_reference(console, engine.model, batch, mine, outputs)
    compare_over_chunks(console, engine.model, batch)


@command(app)
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: cli.System = None,
    chat_template: cli.Template = None,
    watch: cli.Watching = False,
    homework: Homework = False,
) -> None:
    """Chat with the model. An empty line or Ctrl-D ends the chat."""
    cli.chat(with_homework(make_console(), engine) if homework else engine, sampling, system, chat_template, watch)


@command(app)
def trace(engine: EngineOptions, out: cli.Out, homework: Homework = False) -> None:
    """Serve eight requests from a small pool of pages, and record every step."""
    from book.trace_example import record_example

    console = make_console()
    llm = (with_homework(console, engine) if homework else engine).load(console, **cli.SMALL_POOL)
    cli.save_trace(console, record_example(llm), out)


command(app)(cli.bench)


def with_homework(console: Console, engine: EngineOptions) -> EngineOptions:
    """Return what to run on, with the reader's finished parts and options that suit them.

    Raises:
        ConfigError: if other parts were asked for, or there are no chapters.
    """
    if engine.parts is not None:
        raise ConfigError("--homework and --parts both replace the engine's parts; give one of them")
    if not (ROOT / "chapters").is_dir():
        raise ConfigError(f"--homework needs the book, and {ROOT} has no chapters: run it in a copy of the repository")
    from book.grading.engine import homework_options, homework_parts

    parts = homework_parts(console)
    return replace(engine, parts=parts, options=homework_options(parts) | engine.options)


def main() -> None:
    """Run the command line."""
    cli.main(app)


if __name__ == "__main__":
    main()
