"""The reader's progress, in .progress/ beside chapters/: grades, hints, predictions, speed. Git ignores the folder."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from book.grading.chapter import Exercise

if TYPE_CHECKING:  # notebooks import this module, and run no checks
    from book.grading.grade import Result


@dataclass(frozen=True)
class Grade:
    """The last grade of an exercise, and the hash of the homework.py that earned it."""

    passed: bool
    points: float
    part: str | None
    hash: str
    date: str


class ProgressError(Exception):
    """The progress cannot be kept; the message is for the reader."""


class Progress:
    """Reads and writes the reader's progress. Nothing is kept in memory, so several processes can share it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".progress"

    def grades(self, slug: str) -> dict[str, Grade]:
        """The grades of a chapter, by exercise."""
        grades = self._chapter("grades.json", slug)
        return {name: Grade(**entry) for name, entry in grades.items() if _is_grade(entry)}

    def record(self, slug: str, source: str, results: "Iterable[Result]") -> None:
        """Keeps the grades of all exercises that were graded to the end."""
        chapter = self._chapter("grades.json", slug)
        date = time.strftime("%Y-%m-%d %H:%M")
        for result in results:
            if result.complete:
                grade = Grade(result.passed, result.points, result.exercise.part, source_hash(source), date)
                chapter[result.exercise.name] = asdict(grade)
        self._write("grades.json", self._read("grades.json") | {slug: chapter})

    def hints_used(self, slug: str) -> dict[str, int]:
        """How many hints of each exercise have been shown."""
        return {name: used for name, used in self._chapter("hints.json", slug).items() if used in (1, 2, 3)}

    def predictions(self) -> dict[str, float]:
        """The numbers that the reader predicted, by the keys of their questions."""
        return {key: float(value) for key, value in self._read("predictions.json").items() if _is_number(value)}

    def record_prediction(self, key: str, value: float) -> None:
        """Keeps the number that the reader predicted for a question."""
        self._write("predictions.json", self.predictions() | {key: value})

    def next_hint(self, slug: str, exercise: Exercise) -> int:
        """Counts one more hint as used; returns how many are to be shown now."""
        used = self.hints_used(slug)
        used[exercise.name] = min(used.get(exercise.name, 0) + 1, len(exercise.hints))
        self._write("hints.json", self._read("hints.json") | {slug: used})
        return used[exercise.name]

    def speed(self) -> dict[str, Any]:
        """Tokens per second of the engine with the reader's parts and of the reference: reader, reference, date."""
        return self._read("speed.json")

    def record_speed(self, reader: float, reference: float) -> None:
        """Keeps the tokens per second of the engine with the reader's parts and of the reference."""
        self._write("speed.json", {"reader": reader, "reference": reference, "date": time.strftime("%Y-%m-%d")})

    def _chapter(self, name: str, slug: str) -> dict[str, Any]:
        """A chapter's entries; none if the file has something else there."""
        entries = self._read(name).get(slug)
        return entries if isinstance(entries, dict) else {}

    def _read(self, name: str) -> dict[str, Any]:
        """The content of a file. A damaged file is renamed, with a warning, so that the next write does not lose it."""
        file = self.folder / name
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(value, dict):
                return value
            problem = "it is not a JSON object"
        except (FileNotFoundError, NotADirectoryError):
            return {}  # nothing yet, or a folder that cannot be written, as the next write will say
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error)
        with contextlib.suppress(OSError):
            file.replace(file.with_suffix(".damaged"))
        warnings.warn(f"{file} was damaged ({problem}): it is {file.stem}.damaged now, and empty", stacklevel=2)
        return {}

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Raises ProgressError if the folder cannot be written."""
        try:
            self.folder.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
                json.dump(value, file, indent=2)
            os.replace(file.name, self.folder / name)  # a reader of the file sees the old text or the new, never half
        except OSError as error:
            raise ProgressError(
                f"Your progress is not kept: {self.folder} cannot be written ({error.strerror}). Make it a folder "
                "that you can write."
            ) from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e300  # neither NaN nor an integer beyond any float


def _is_grade(entry: Any) -> bool:
    """Whether an entry of the file is a grade: the file may be damaged, or another version's."""
    if not isinstance(entry, dict) or entry.keys() != {field.name for field in fields(Grade)}:
        return False
    texts = (entry["hash"], entry["date"], entry["part"] or "")
    return _is_number(entry["points"]) and isinstance(entry["passed"], bool) and all(isinstance(t, str) for t in texts)


def source_hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
