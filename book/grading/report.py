"""What the reader sees: panels, tables, the engine's diagram; and Gradescope's results.json."""

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from book.grading.chapter import Chapter, Exercise, read_answers
from book.grading.grade import Grading, Result
from book.grading.progress import Grade, Progress, source_hash


def title(chapter: Chapter) -> str:
    """`01_naive_attention` as `01 naive attention`."""
    return chapter.slug.replace("_", " ")


def stars(exercise: Exercise) -> str:
    return "★" * exercise.difficulty + "☆" * (3 - exercise.difficulty)


def failures(grading: Grading) -> list[Panel]:
    """A panel for each exercise that failed; a message that several share is shown once."""
    panels, seen = [], set()
    for result in grading.results:
        if result.failure is None:
            continue
        check, outcome = result.failure
        said = outcome.message, outcome.mistake
        if outcome.status == "unwritten" or said in seen:
            continue
        if outcome.status == "unreadable" or not outcome.detail:
            seen.add(said)
        lines: list[RenderableType] = [Text(outcome.message, style="bold")]
        if outcome.explanation:
            lines.append(Text(outcome.explanation))
        for text in (outcome.detail, _printed(outcome.output)):
            if text:
                lines.append(Padding(Text(text, style="dim"), (1, 0, 0, 0)))
        heading = Text(f" {result.exercise.name} · {check.name} ")
        color = "yellow" if result.right else "red"
        panels.append(Panel(Group(*lines), title=heading, title_align="left", border_style=color))
    return panels


def _printed(output: str, most: int = 12) -> str:
    """The last lines that an answer printed, under a heading."""
    lines = output.splitlines()
    kept = [line[:500] for line in lines[-most:]]
    heading = "Printed:" if len(lines) <= most else f"Printed, the last {most} lines:"
    return "\n".join([heading, *kept]) if lines else ""


def summary(grading: Grading) -> Table:
    """Points per exercise, the first check that failed, and the likely mistake."""
    earned, total = grading.points, grading.chapter.points
    table = Table(
        title=f"Chapter {title(grading.chapter)}: {earned:g} of {total} points", title_justify="left", expand=True
    )
    table.add_column("exercise", no_wrap=True)
    table.add_column("", justify="center", no_wrap=True)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("first failing check and likely mistake", ratio=1, overflow="fold")
    for result in grading.results:
        table.add_row(_name(result.exercise), stars(result.exercise), points(result), _verdict(result))
    return table


def _name(exercise: Exercise) -> Text:
    return Text.assemble(exercise.name, (" challenge", "dim") if exercise.challenge else "")


def points(result: Result) -> str:
    return f"{f'{result.points:g}' if result.complete else '–'} / {result.exercise.points}"


def _verdict(result: Result) -> Text:
    if result.failure is None:
        return Text("passed", style="green") if result.passed else Text("not graded in this run", style="dim")
    check, outcome = result.failure
    if outcome.status == "unwritten":
        return Text("not written yet", style="dim")
    if outcome.status == "unreadable":
        return Text(outcome.message, style="red")
    if result.right:
        return Text.assemble("right, but ", (check.name, "yellow"), f": {outcome.verdict}")
    return Text.assemble((check.name, "red"), f": {outcome.verdict}")


def closing(grading: Grading) -> Text:
    """One line on what to do next."""
    failed = [result for result in grading.results if result.failure]
    if not failed:
        complete = all(result.complete for result in grading.results)
        return Text("All points. `make grade` shows your engine." if complete else "")
    started = [result for result in failed if result.failure and result.failure[1].status != "unwritten"]
    name = (started or failed)[0].exercise.name
    return Text(f"Stuck? pytest chapters/{grading.chapter.slug} --hint {name}", style="dim")


def hint(exercise: Exercise, shown: int) -> Panel:
    """The hints of an exercise up to the one that is new."""
    lines = [Text(text, style="dim" if number < shown else "") for number, text in enumerate(exercise.hints[:shown], 1)]
    left = len(exercise.hints) - shown
    subtitle = f"{left} more" if left else "that was the last; the reference is in solutions/"
    heading = f"{exercise.name}: hint {shown} of {len(exercise.hints)}"
    body = Group(*(Padding(line, (0, 0, int(line is not lines[-1]), 0)) for line in lines))
    return Panel(
        body, title=heading, title_align="left", subtitle=subtitle, subtitle_align="right", border_style="cyan"
    )


def progress_table(chapters: Sequence[Chapter], progress: Progress) -> Table:
    """All chapters with their exercises: points, whether the grade still holds, hints used."""
    rows = [(chapter, exercise) for chapter in chapters for exercise in chapter.exercises]
    grades = {chapter.slug: progress.grades(chapter.slug) for chapter in chapters}
    earned = sum(grade.points for chapter, exercise in rows if (grade := grades[chapter.slug].get(exercise.name)))
    total = sum(exercise.points for _, exercise in rows)
    table = Table(title=f"Your homework: {earned:g} of {total} points", title_justify="left")
    for column in ("exercise", "", "minutes", "points", "hints", "graded"):
        is_number = column in ("minutes", "points", "hints")
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for chapter in chapters:
        hints = progress.hints_used(chapter.slug)
        now = source_hash(read_answers(chapter.homework)) if chapter.homework.exists() else ""
        table.add_row(Text(title(chapter), style="bold"))
        for exercise in chapter.exercises:
            grade = grades[chapter.slug].get(exercise.name)
            table.add_row(
                _name(exercise),
                stars(exercise),
                str(exercise.minutes),
                f"{f'{grade.points:g}' if grade else '–'} / {exercise.points}",
                str(hints.get(exercise.name, 0) or ""),
                _state(grade, now),
            )
        table.add_section()
    return table


def _state(grade: Grade | None, now: str) -> Text:
    if grade is None:
        return Text("not yet", style="dim")
    if grade.passed:
        mark = Text("✓ ", style="green")
    else:
        mark = Text("✓ right, but misses a requirement, ", style="yellow") if grade.points else Text("✗ ", style="red")
    changed = "" if grade.hash == now else ", homework.py has changed since"
    return Text.assemble(mark, grade.date, (changed, "yellow"))


def engine_panel(done: Collection[str]) -> Panel:
    """The engine from prompt to text, with the reader's finished parts lit."""
    # pytest loads this module before any test; importing the engine takes seconds, and the tests' type checks have to
    # be installed before it.
    from book.grading.parts import PARTS
    from mini_engine.parts import LOADING, STAGES

    lines: list[RenderableType] = []
    for stage in STAGES:
        table = Table.grid(padding=(0, 2))
        for part in (part for part in PARTS if part.stage == stage):
            mine = part.name in done
            style = "bold green" if mine else "dim"
            mark = "●" if mine else "○"
            owner = "yours" if mine else f"chapter {part.chapter.split('_')[0]}"
            table.add_row(*(Text(text, style=style) for text in (mark, part.title, part.module, owner)))
        lines.append(Panel(table, title=stage, title_align="left", border_style="blue", expand=False))
        lines.append(Text("  ↓"))
        if stage == LOADING:
            lines += [Text("prompt", style="bold"), Text("  ↓")]
    lines.append(Text("text", style="bold"))
    heading = f"Your engine: {len([part for part in PARTS if part.name in done])} of {len(PARTS)} parts are yours"
    return Panel(Group(*lines), title=heading, title_align="left", expand=False)


def speed_line(speed: dict[str, Any], *, current: bool) -> Text:
    """The reader's tokens per second beside the reference's; `current`: some part of the reader's counts now."""
    try:
        reader, reference = float(speed["reader"]), float(speed["reference"])
        share = reader / reference
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return Text(
            "mini-engine generate --homework runs the engine on your parts and measures its speed.", style="dim"
        )
    text = f"With your parts: {reader:.1f} tokens/s. The reference: {reference:.1f} tokens/s. You reach {share:.0%}"
    line = Text(f"{text} ({speed.get('date', 'no date')}).")
    return line if current else line.append(" That is old: no part of yours counts now.", style="yellow")


def gradescope(gradings: Sequence[Grading], seconds: float) -> dict[str, Any]:
    """The results in Gradescope's format: one test per exercise."""
    tests = []
    for grading in gradings:
        for result in grading.results:
            tests.append(
                {
                    "number": f"{grading.chapter.number}.{grading.results.index(result) + 1}",
                    "name": result.exercise.name,
                    "score": result.points,
                    "max_score": result.exercise.points,
                    "status": "passed" if result.passed else "failed",
                    "output": _gradescope_output(result),
                    "output_format": "text",
                    "visibility": "visible",
                }
            )
    return {
        "score": sum(grading.points for grading in gradings),
        "execution_time": round(seconds, 1),
        "output": "The first check that fails is shown. An answer that is right but misses a requirement on memory, "
        "dtype or time keeps most of its points.",
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {"max_score": sum(grading.chapter.points for grading in gradings)},
    }


def _gradescope_output(result: Result) -> str:
    if result.failure is None:
        return f"All {len(result.checks)} checks pass." if result.passed else "Not graded in this run."
    check, outcome = result.failure
    lines = [f"{'Right, but ' if result.right else ''}{check.name}: {outcome.message}"]
    lines += [outcome.explanation] if outcome.explanation else []
    lines += [_printed(outcome.output)] if outcome.output else []
    return "\n".join(lines)
