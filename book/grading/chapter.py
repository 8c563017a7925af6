"""What a chapter's grader declares: exercises and checks."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Exercise:
    """One function or class that the reader writes.

    Args:
        name: its name in homework.py and in the solution.
        points: earned when all checks of the exercise pass. A right answer that fails a check of a demand keeps most.
        minutes: what a reader of the chapter needs, roughly.
        difficulty: 1 (you just read it), 2 (you have to think) or 3 (you will remember this one).
        hints: three, from a nudge to nearly the answer.
        part: the part of the engine that the answer can replace (`book.grading.parts`), if any.
        challenge: True for the optional last exercise.
    """

    name: str
    points: int
    minutes: int
    difficulty: int
    hints: tuple[str, str, str]
    part: str | None = None
    challenge: bool = False

    def __post_init__(self) -> None:
        if self.points <= 0 or self.minutes <= 0 or self.difficulty not in (1, 2, 3):
            raise ValueError(f"{self.name}: points and minutes are positive, difficulty is 1, 2 or 3")
        if len(self.hints) != 3:
            raise ValueError(f"{self.name}: give three hints, not {len(self.hints)}")


@dataclass(frozen=True)
class Check:
    """One mechanism that the grader looks at, made by `@check`."""

    exercise: str
    name: str
    mistake: str
    seconds: float
    costs: float
    function: Callable[..., None]

    def __post_init__(self) -> None:
        if not (self.costs == 1.0 or 0.0 < self.costs < 0.5):
            raise ValueError(f"{self.name}: a check costs all points (1.0) or less than half of them")

    @property
    def is_demand(self) -> bool:
        """Whether a right answer can fail the check: it looks at memory, dtype or time and not at the result."""
        return self.costs < 1.0


def check(
    exercise: str, *, mistake: str, seconds: float = 20.0, costs: float = 1.0
) -> Callable[[Callable[..., None]], Check]:
    """Declare a check of an exercise.

    Args:
        exercise: the name of the exercise.
        mistake: what the reader most likely did wrong when the check fails, in a sentence.
        seconds: CPU time that the check may take.
        costs: share of the points that an answer loses here if it passes all checks of the result. Less than 1 marks a
            demand on memory, dtype or time; such checks run after all others.
    """
    return lambda function: Check(exercise, function.__name__, mistake, seconds, costs, function)


@dataclass(frozen=True)
class Chapter:
    """A chapter with a grader: its folder, exercises, checks and reference answers."""

    folder: Path
    exercises: tuple[Exercise, ...]
    checks: tuple[Check, ...]
    reference: ModuleType

    @property
    def slug(self) -> str:
        return self.folder.name

    @property
    def number(self) -> str:
        return self.slug.split("_")[0]

    @property
    def homework(self) -> Path:
        return self.folder / "homework.py"

    @property
    def root(self) -> Path:
        return self.folder.parents[1]

    @property
    def solution(self) -> Path:
        return self.root / "solutions" / f"{self.slug}.py"

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises)

    def exercise(self, name: str) -> Exercise:
        return next(exercise for exercise in self.exercises if exercise.name == name)

    def checks_of(self, exercise: Exercise) -> tuple[Check, ...]:
        """In file order, demands last, and of these the costliest first."""
        own = (check for check in self.checks if check.exercise == exercise.name)
        return tuple(sorted(own, key=lambda check: -check.costs))


def read_answers(file: Path) -> str:
    """The text of a homework.py. A byte-order mark, or a comment in another encoding, is no obstacle."""
    return file.read_text(encoding="utf-8-sig", errors="replace")


def chapter_folders(root: Path = ROOT) -> list[Path]:
    """The folders of all chapters that have a grader, in order."""
    return sorted(path.parent for path in (root / "chapters").glob("*/test_homework.py"))


def find_chapter(name: str, root: Path = ROOT) -> Path:
    """The folder of the chapter called `name`: a number (`1`, `01`) or a slug (`01_naive_attention`)."""
    folders = sorted(path for path in (root / "chapters").glob("[0-9]*_*") if path.is_dir())
    for folder in folders:
        if name == folder.name or (name.isdigit() and int(name) == int(folder.name.split("_")[0])):
            return folder
    raise LookupError(f"There is no chapter {name!r}. Chapters: {', '.join(folder.name for folder in folders)}.")


def load_module(name: str, path: Path) -> ModuleType:
    """Executes a file as a module. Equal file names in many folders, or names such as 01_x.py, are no obstacle."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module of the class that they decorate
    spec.loader.exec_module(module)
    return module


@cache  # loaded once, so that its classes are the same everywhere
def solution(slug: str, root: Path = ROOT) -> ModuleType:
    """The module of reference answers to a chapter, such as `solution("01_naive_attention")`."""
    return load_module(f"solution_{slug}", root / "solutions" / f"{slug}.py")


def load_chapter(folder: Path) -> Chapter:
    """Reads the grader and the reference answers of the chapter in `folder`; a ValueError says what was forgotten."""
    folder = folder.resolve()
    reference = solution(folder.name, folder.parents[1])
    grader: dict[str, Any] = vars(load_module(f"grader_{folder.name}", folder / "test_homework.py"))
    exercises = tuple(grader["EXERCISES"])
    checks = tuple(value for value in grader.values() if isinstance(value, Check))
    names = {exercise.name for exercise in exercises}
    for exercise in exercises:
        if exercise.name not in vars(reference):
            raise ValueError(f"{folder.name}: the solution does not define the exercise {exercise.name}")
        if all(check.exercise != exercise.name or check.is_demand for check in checks):
            raise ValueError(f"{folder.name}: the exercise {exercise.name} has no check of its result")
    if unknown := {check.exercise for check in checks} - names:
        raise ValueError(f"{folder.name}: there are checks for {sorted(unknown)}, which EXERCISES does not list")
    return Chapter(folder, exercises, checks, reference)
