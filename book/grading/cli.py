"""`python -m book stubs` and `python -m book grade`."""

from typing import Annotated

import typer

from book.grading.chapter import ROOT, chapter_folders, find_chapter, load_chapter
from book.grading.grade import Grading
from book.grading.parts import finished_part_names
from book.grading.progress import Progress, ProgressError
from book.grading.report import engine_panel, progress_table, speed_line, summary
from book.grading.stubs import make_stub, write_stub
from mini_engine.terminal import make_console


def stubs(
    chapter: Annotated[str, typer.Argument(help="A chapter: 1, 01 or 01_naive_attention.")],
    force: Annotated[bool, typer.Option(help="Replace a homework.py that was edited; a copy is kept.")] = False,
) -> None:
    """Write a chapter's homework.py from its solution, with the work left to do."""
    try:
        loaded = load_chapter(find_chapter(chapter))
        stub = make_stub(
            loaded.solution.read_text(encoding="utf-8"), [exercise.name for exercise in loaded.exercises], loaded.slug
        )
        print(write_stub(loaded.homework, stub, Progress(ROOT).folder / "old", force=force))
    except (LookupError, FileExistsError) as error:
        print(error)
        raise typer.Exit(2) from error


def grade(
    run: Annotated[bool, typer.Option(help="Grade the homework of every chapter first.")] = False,
) -> None:
    """Show your points in every chapter, and your engine with the parts that you have finished."""
    console, progress = make_console(), Progress(ROOT)
    chapters = [load_chapter(folder) for folder in chapter_folders()]
    problem = None
    for chapter in chapters if run else []:
        with console.status(f"Grading {chapter.slug}"), Grading(chapter, chapter.homework) as grading:
            grading.run_all()
            try:
                progress.record(chapter.slug, grading.source or "", grading.results)
            except ProgressError as error:
                problem = error
                console.print(summary(grading))
    console.print(progress_table(chapters, progress))
    finished = finished_part_names()
    console.print(engine_panel(finished))
    console.print(speed_line(progress.speed(), current=bool(finished)))
    if problem:
        print(problem)
        raise typer.Exit(2)
