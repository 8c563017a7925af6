"""The reader's progress, in .progress/ beside chapters/: grades, hints, speed. Git ignores the folder."""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from book.grading.chapter import Exercise
from book.grading.grade import Result


@dataclass(frozen=True)
class Grade:
    """The last grade of an exercise, and the hash of the homework.py that earned it."""

    passed: bool
    points: float
    part: str | None
    hash: str
    date: str


class Progress:
    """Reads and writes the reader's progress. Nothing is kept in memory, so several processes can share it."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".progress"

    def grades(self, slug: str) -> dict[str, Grade]:
        """The grades of a chapter, by exercise."""
        return {name: Grade(**grade) for name, grade in self._read("grades.json").get(slug, {}).items()}

    def record(self, slug: str, source: str, results: Iterable[Result]) -> None:
        """Keeps the grades of all exercises that were graded to the end."""
        grades = self._read("grades.json")
        chapter = grades.setdefault(slug, {})
        date = time.strftime("%Y-%m-%d %H:%M")
        for result in results:
            if result.complete:
                grade = Grade(result.passed, result.points, result.exercise.part, source_hash(source), date)
                chapter[result.exercise.name] = asdict(grade)
        self._write("grades.json", grades)

    def hints_used(self, slug: str) -> dict[str, int]:
        """How many hints of each exercise have been shown."""
        return self._read("hints.json").get(slug, {})

    def next_hint(self, slug: str, exercise: Exercise) -> int:
        """Counts one more hint as used; returns how many are to be shown now."""
        hints = self._read("hints.json")
        used = hints.setdefault(slug, {})
        used[exercise.name] = min(used.get(exercise.name, 0) + 1, len(exercise.hints))
        self._write("hints.json", hints)
        return used[exercise.name]

    def speed(self) -> dict[str, Any]:
        """Tokens per second of the engine with the reader's parts and of the reference: reader, reference, date."""
        return self._read("speed.json")

    def record_speed(self, reader: float, reference: float) -> None:
        """Keeps the tokens per second of the engine with the reader's parts and of the reference."""
        self._write("speed.json", {"reader": reader, "reference": reference, "date": time.strftime("%Y-%m-%d")})

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}  # nothing yet, or a file that was damaged: grading writes it anew
        return value if isinstance(value, dict) else {}

    def _write(self, name: str, value: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, encoding="utf-8") as file:
            json.dump(value, file, indent=2)
        os.replace(file.name, self.folder / name)  # a reader of the file sees the old text or the new, never half


def source_hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()
