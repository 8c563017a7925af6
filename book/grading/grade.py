"""Grades a chapter: the checks of each exercise in order, up to the first that fails. Demands come last."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from book.grading.chapter import Chapter, Check, Exercise, read_answers
from book.grading.outcome import Outcome
from book.grading.worker import Limits, Worker


@dataclass(frozen=True)
class Result:
    """An exercise with the outcomes of its checks so far, in order."""

    exercise: Exercise
    checks: tuple[Check, ...]
    outcomes: dict[Check, Outcome] = field(default_factory=dict)

    @property
    def failure(self) -> tuple[Check, Outcome] | None:
        """The first check that failed, with its outcome."""
        return next(((check, outcome) for check, outcome in self.outcomes.items() if not outcome.passed), None)

    @property
    def complete(self) -> bool:
        """Whether enough checks ran to tell the points."""
        if self.failure is None:
            return len(self.outcomes) == len(self.checks)
        return self.right or not self.failure[0].is_demand

    @property
    def right(self) -> bool:
        """Whether all checks of the result passed, so that only a demand on memory, dtype or time can be missed."""
        passed = {check for check, outcome in self.outcomes.items() if outcome.passed}
        return all(check.is_demand or check in passed for check in self.checks)

    @property
    def passed(self) -> bool:
        return self.complete and self.failure is None

    @property
    def points(self) -> float:
        """All for an answer that passes, most for a right one that misses a demand, else none."""
        if self.failure is None:
            return self.exercise.points if self.complete else 0
        costs = self.failure[0].costs if self.right else 1.0
        return round(self.exercise.points * (1 - costs), 2)


class Grading:
    """Grades one homework file. Use it as a context manager: leaving it ends the process that runs the checks."""

    def __init__(self, chapter: Chapter, file: Path, limits: Limits | None = None) -> None:
        self.chapter = chapter
        self.file = file
        self.source: str | None = None
        self._unreadable = f"There is no {file.name}; `python -m book stubs {chapter.number}` writes it."
        try:
            self.source = read_answers(file)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._unreadable = f"{file.name} cannot be read: {error.strerror}."
        self.results = [Result(exercise, chapter.checks_of(exercise)) for exercise in chapter.exercises]
        self._worker = Worker(chapter, self.source or "", str(file), limits)

    def __enter__(self) -> "Grading":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._worker.close()

    @property
    def points(self) -> float:
        return round(sum(result.points for result in self.results), 2)

    def run(self, check: Check) -> Outcome:
        """Runs a check, unless an earlier one of its exercise has failed."""
        from mini_engine.terminal import printable  # not when pytest starts: the tests' type checks come first

        result = next(result for result in self.results if result.exercise.name == check.exercise)
        if result.failure:
            return Outcome("skipped", f"{result.failure[0].name} failed before it.")
        outcome = Outcome("unreadable", self._unreadable) if self.source is None else self._worker.run(check)
        # No text from an answer can control a terminal, or has characters that a database of grades refuses.
        texts: dict[str, Any] = {name: printable(text) for name, text in asdict(outcome).items()}
        outcome = Outcome(**texts)
        result.outcomes[check] = outcome
        return outcome

    def run_all(self) -> "Grading":
        for result in self.results:
            for check in result.checks:
                self.run(check)
        return self
