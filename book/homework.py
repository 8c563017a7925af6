"""`mini-engine --homework`: the engine on the reader's own finished parts, compared with the reference."""

from dataclasses import replace

from rich.console import Console

from book.grading.chapter import ROOT
from book.grading.engine import (
    compare_over_chunks,
    compare_with_reference,
    homework_options,
    homework_parts,
    print_parts,
    small_engine,
)
from mini_engine.cli_options import EngineOptions
from mini_engine.errors import ConfigError
from mini_engine.observe.answers import Batch, answer


def with_homework(console: Console, engine: EngineOptions) -> EngineOptions:
    """Return what to run on, with the reader's finished parts and options that suit them.

    Raises:
        ConfigError: if other parts were asked for, or there are no chapters.
    """
    if engine.parts is not None:
        raise ConfigError("--homework and --parts both replace the engine's parts; give one of them")
    if not (ROOT / "chapters").is_dir():
        raise ConfigError(f"--homework needs the book, and {ROOT} has no chapters: run it in a copy of the repository")
    parts = homework_parts(console)
    return replace(engine, parts=parts, options=homework_options(parts) | engine.options)


def answer_and_compare(console: Console, engine: EngineOptions, batch: Batch) -> None:
    """Serve requests on the reader's parts, print the answers, and compare them with the reference's."""
    params = batch.params
    if params.seed is None:  # so that both engines draw the same numbers
        batch = batch._replace(params=replace(params, seed=0))
    print_parts(console, batch.llm)
    mine = small_engine(batch)
    outputs = answer(console, mine, None, batch)
    compare_with_reference(console, engine.model, batch, mine, outputs)
    compare_over_chunks(console, engine.model, batch)
