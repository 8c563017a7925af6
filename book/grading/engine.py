"""The engine on the reader's own parts: which are theirs, whether the output is still right, and how fast they are."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from book.grading.chapter import ROOT
from book.grading.parts import PARTS, changed_since, finished_parts
from book.grading.progress import Progress
from mini_engine import LLM, Parts, RequestOutput, SamplingParams


def homework_parts(console: Console) -> Parts:
    """The reader's finished parts, with the reference for the rest; says so if none is finished or counts no more."""
    mine = finished_parts()
    changed = changed_since()
    for chapter, graded in changed.items():
        console.print(
            f"chapters/{chapter} passed on {graded} and has changed since: run [bold]pytest chapters/{chapter}[/]."
        )
    if not mine and not changed:
        console.print("None is yours yet: a part counts once its grader is green. Begin with `make lab`, chapter 01.")
    return replace(Parts(), **mine)


def print_parts(console: Console, parts: Parts, attn_backend: str, unused: Collection[str]) -> None:
    """Print which parts of the engine are the reader's.

    Args:
        console: where to print.
        parts: the reader's where finished, else the reference.
        attn_backend: name of the attention backend.
        unused: names of the parts that it bypasses.
    """
    table = Table(title="The engine's parts", title_justify="left")
    for column in ("part", "runs on", "from"):
        table.add_column(column)
    for part in PARTS:
        own = getattr(parts, part.name) is not getattr(Parts(), part.name)
        runs_on = "[bold green]yours[/]" if own else "the reference"
        if part.name in unused:
            runs_on = f"[dim]not used by {attn_backend}[/]"
        table.add_row(part.title, runs_on, f"chapters/{part.chapter}" if own else part.module)
    console.print(table)


def compare_with_reference(
    console: Console,
    llm: LLM,
    model: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    outputs: Sequence[RequestOutput],
    tokens_per_second: float,
) -> None:
    """Run the same requests on the reference parts, print both speeds and the first difference, and record the speeds.

    Without a part of the reader's there is nothing to compare.

    Args:
        console: where to print.
        llm: the engine on the reader's parts.
        model: what it was loaded from.
        prompts: the requests.
        params: their parameters.
        outputs: what the reader's parts made of them.
        tokens_per_second: how fast, in decode steps.
    """
    from mini_engine.observe.metrics import Metrics

    if llm.parts == Parts():
        return
    dtype = str(llm.model.dtype).removeprefix("torch.")
    reference = LLM(
        model,
        dtype=dtype,
        device=llm.model.device.type,
        attn_backend=llm.config.attn_backend,
        sliding_window=llm.config.sliding_window,
    )
    metrics, expected = Metrics(reference.model), {}
    for piece in reference.stream_batch(prompts, params):
        metrics.add(piece)
        if piece.output:
            expected[piece.index] = piece.output.token_ids
    wrong = [i for i, output in enumerate(outputs) if output.token_ids != expected[i]]
    if wrong:
        console.print(f"[bold red]Answer {wrong[0] + 1} differs from the reference's[/]: a part of yours is not right.")
    else:
        console.print("[bold green]Every token equals the reference's.[/]")
    console.print(f"Yours: {tokens_per_second:.1f} tokens/s, the reference: {metrics.decode_rate:.1f} tokens/s.")
    Progress(ROOT).record_speed(tokens_per_second, metrics.decode_rate)
