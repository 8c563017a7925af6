"""Lets pytest grade: `pytest chapters/NN_slug [--solutions] [--hint EXERCISE] [--gradescope FILE] [--submission FILE]`.

A chapter's test_homework.py is collected as exercises with checks. Everything else that pytest runs is left alone.
"""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from book.grading.chapter import Chapter, Check, Exercise, load_chapter
from book.grading.grade import Grading
from book.grading.outcome import Outcome
from book.grading.progress import Progress, ProgressError
from book.grading.report import closing, failures, gradescope, hint, summary


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("homework", "the book's homework")
    group.addoption("--solutions", action="store_true", help="grade the reference answers instead of homework.py")
    group.addoption(
        "--hint", metavar="EXERCISE", help="show the next of three hints for an exercise, and grade nothing"
    )
    group.addoption("--gradescope", metavar="FILE", type=Path, help="write the results as Gradescope's results.json")
    group.addoption("--submission", metavar="FILE", type=Path, help="grade this file instead of homework.py")


class Failed(Exception):
    """A check that did not pass, for pytest to count."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.verdict)
        self.outcome = outcome


class ChapterFile(pytest.File):
    """A test_homework.py. It starts grading when its first check runs."""

    def collect(self) -> Iterator["ExerciseNode"]:
        chapter = load_chapter(self.path.parent)
        self.grading = Grading(chapter, self._graded_file(chapter))
        for exercise in chapter.exercises:
            yield ExerciseNode.from_parent(self, name=exercise.name, exercise=exercise, grading=self.grading)

    def teardown(self) -> None:
        self.grading.close()

    def _graded_file(self, chapter: Chapter) -> Path:
        if self.config.getoption("--solutions"):
            return chapter.solution
        submission: Path | None = self.config.getoption("--submission")
        return submission.resolve() if submission else chapter.homework


class ExerciseNode(pytest.Collector):
    def __init__(self, exercise: Exercise, grading: Grading, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.exercise = exercise
        self.grading = grading

    def collect(self) -> Iterator["CheckItem"]:
        for check in self.grading.chapter.checks_of(self.exercise):
            yield CheckItem.from_parent(self, name=check.name, check=check, grading=self.grading)


class CheckItem(pytest.Item):
    def __init__(self, check: Check, grading: Grading, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.check = check
        self.grading = grading

    def runtest(self) -> None:
        outcome = self.grading.run(self.check)
        if outcome.status == "skipped":
            pytest.skip(outcome.message)
        if not outcome.passed:
            raise Failed(outcome)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if not isinstance(excinfo.value, Failed):
            return str(super().repr_failure(excinfo))
        outcome = excinfo.value.outcome
        return "\n".join(filter(None, [outcome.message, outcome.explanation, outcome.detail, outcome.output]))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.check.exercise}: {self.check.name}"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    if module_path.name == "test_homework.py" and module_path.parents[1].name == "chapters":
        return ChapterFile.from_parent(parent, path=module_path)
    return None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_START] = time.monotonic()
    if config.getoption("--solutions") and config.getoption("--submission"):
        raise pytest.UsageError("Give --solutions or --submission, not both.")
    submission: Path | None = config.getoption("--submission")
    if submission and submission.exists() and not submission.is_file():
        raise pytest.UsageError(f"--submission takes a file: {submission} is none.")
    results: Path | None = config.getoption("--gradescope")
    if results:
        try:
            results.parent.mkdir(parents=True, exist_ok=True)
            results.open("a").close()  # before the work, not after it
        except OSError as error:
            raise pytest.UsageError(f"--gradescope cannot write {results}: {error.strerror}.") from error


_START = pytest.StashKey[float]()
_GRADINGS = pytest.StashKey[list[Grading]]()
_NOT_KEPT = pytest.StashKey[str]()  # why the grades or the results could not be saved


def pytest_collection_finish(session: pytest.Session) -> None:
    items = [item for item in session.items if isinstance(item, CheckItem)]
    gradings = list({id(item.grading): item.grading for item in items}.values())
    session.config.stash[_GRADINGS] = gradings
    if session.config.getoption("--submission") and len(gradings) > 1:
        raise pytest.UsageError("--submission grades one chapter: name it, as in `pytest chapters/01_naive_attention`.")
    if items and len(items) == len(session.items) and session.config.option.tbstyle == "auto":
        session.config.option.tbstyle = "no"  # the summary shows the failures, in fewer words
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.reportchars = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    name = session.config.getoption("--hint")
    if not name:
        return None
    chapters = [grading.chapter for grading in session.config.stash[_GRADINGS]]
    session.config.stash[_GRADINGS] = []
    for chapter in chapters:
        for exercise in chapter.exercises:
            if exercise.name == name:
                try:
                    shown = Progress(chapter.root).next_hint(chapter.slug, exercise)
                except ProgressError as error:
                    raise pytest.UsageError(str(error)) from error
                _console(session.config).print("\n", hint(exercise, shown))
                return True
    names = [exercise.name for chapter in chapters for exercise in chapter.exercises]
    known = (
        f"The exercises are: {', '.join(names)}."
        if names
        else "Name a chapter too: `pytest chapters/NN_slug --hint …`."
    )
    raise pytest.UsageError(f"There is no exercise {name!r}. {known}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    gradings = config.stash.get(_GRADINGS, [])
    for grading in gradings:
        if grading.file == grading.chapter.homework and grading.source is not None:
            try:
                Progress(grading.chapter.root).record(grading.chapter.slug, grading.source, grading.results)
            except ProgressError as error:
                config.stash[_NOT_KEPT] = str(error)
    file: Path | None = config.getoption("--gradescope")
    if file:
        results = gradescope(gradings, time.monotonic() - config.stash[_START])
        try:
            file.write_text(json.dumps(results, indent=2), encoding="utf-8")
        except OSError as error:
            config.stash[_NOT_KEPT] = f"The results are not in {file}: {error.strerror}."
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_terminal_summary(config: pytest.Config) -> None:
    console = _console(config)
    for grading in config.stash.get(_GRADINGS, []):
        if not any(result.outcomes for result in grading.results):
            continue
        console.print()
        for panel in failures(grading) if config.option.tbstyle == "no" else []:
            console.print(panel)
        console.print(summary(grading))
        if grading.file == grading.chapter.homework:
            console.print(closing(grading))
    if _NOT_KEPT in config.stash:
        console.print(config.stash[_NOT_KEPT], style="yellow", markup=False)


def _console(config: pytest.Config) -> Console:
    """A console on pytest's own output, which is not captured; "?" for what its encoding lacks.

    A terminal of fewer than 60 columns breaks the lines of a table, which would otherwise lose its last column.
    """
    writer = config.get_terminal_writer()
    if isinstance(writer._file, io.TextIOWrapper):
        writer._file.reconfigure(errors="replace")
    width = min(120, max(60, writer.fullwidth))
    return Console(file=writer._file, force_terminal=writer.hasmarkup or None, width=width)
