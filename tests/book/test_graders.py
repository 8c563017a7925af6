"""The graders are graded: on the reference, on untouched stubs, and on the right and wrong answers in answers/."""

import doctest
import inspect
import os
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from book.grading import Answer, Chapter, Exercise, Homework, load_chapter
from book.grading.chapter import chapter_folders, load_module
from book.grading.outcome import run_checks, run_source
from book.grading.parts import PARTS
from book.grading.stubs import WIDTH, make_stub
from book.grading.submission import provided

SLUGS = [folder.name for folder in chapter_folders()]
FOLDERS = {folder.name: folder for folder in chapter_folders()}


@cache
def chapter(slug: str) -> Chapter:
    return load_chapter(FOLDERS[slug])


@cache
def answers(slug: str) -> dict[str, Answer]:
    file = Path(__file__).parent / "answers" / f"{slug}.py"
    if not file.exists():
        return {}  # which another test reports
    module = load_module(f"answers_{slug}", file)
    return {name: value for name, value in vars(module).items() if isinstance(value, Answer)}


def stub(slug: str) -> str:
    text = chapter(slug).solution.read_text(encoding="utf-8")
    return make_stub(text, [exercise.name for exercise in chapter(slug).exercises], slug)


def first_failure(slug: str, exercise: str, definition: Any) -> str | None:
    """The name of the first check that a definition fails, with the reference for everything else."""
    submission = Homework(**{**provided(chapter(slug)), exercise: definition})
    failure = run_checks(chapter(slug), exercise, submission)
    return failure[0].name if failure else None


EXERCISES = [
    pytest.param(slug, exercise, id=f"{slug}-{exercise.name}") for slug in SLUGS for exercise in chapter(slug).exercises
]
ANSWERS = [
    pytest.param(slug, answer, id=f"{slug}-{answer.exercise}-{name}")
    for slug in SLUGS
    for name, answer in answers(slug).items()
]


@pytest.mark.parametrize(("slug", "exercise"), EXERCISES)
def test_the_reference_earns_the_points(slug: str, exercise: Exercise) -> None:
    failure = run_source(
        chapter(slug), exercise.name, chapter(slug).solution.read_text("utf-8"), str(chapter(slug).solution)
    )
    assert failure is None, failure


@pytest.mark.parametrize(("slug", "exercise"), EXERCISES)
def test_a_fresh_stub_earns_nothing(slug: str, exercise: Exercise) -> None:
    failure = run_source(chapter(slug), exercise.name, stub(slug), "homework.py")
    assert failure is not None and failure[1].status == "unwritten", failure


@pytest.mark.parametrize(("slug", "answer"), ANSWERS)
def test_answers_get_what_they_deserve(slug: str, answer: Answer) -> None:
    """A right answer passes; a wrong one fails first on the check that names its mistake."""
    assert first_failure(slug, answer.exercise, answer.definition) == answer.fails


@pytest.mark.parametrize(("slug", "exercise"), EXERCISES)
def test_there_are_enough_answers(slug: str, exercise: Exercise) -> None:
    mine = [answer for answer in answers(slug).values() if answer.exercise == exercise.name]
    assert len([answer for answer in mine if answer.fails is None]) >= 1, "give a right answer, written differently"
    assert len([answer for answer in mine if answer.fails is not None]) >= 4, "give four plausible wrong answers"


@pytest.mark.parametrize("slug", SLUGS)
def test_answers_belong_to_exercises_and_checks(slug: str) -> None:
    pairs = {(check.exercise, check.name) for check in chapter(slug).checks}
    for name, answer in answers(slug).items():
        assert answer.exercise in {exercise.name for exercise in chapter(slug).exercises}, name
        assert answer.fails is None or (answer.exercise, answer.fails) in pairs, f"{name}: no check {answer.fails}"


@pytest.mark.parametrize(("slug", "exercise"), EXERCISES)
def test_signatures_and_docstrings_are_complete(slug: str, exercise: Exercise) -> None:
    definition = vars(chapter(slug).reference)[exercise.name]
    functions: list[Any] = [definition]
    if isinstance(definition, type):
        methods = vars(definition).items()
        functions = [
            value
            for name, value in methods
            if isinstance(value, FunctionType)
            and value.__module__ == definition.__module__
            and not name.startswith("_")
        ]
    for function in functions:
        signature = inspect.signature(function)
        assert inspect.getdoc(function), f"{function.__qualname__} needs a docstring"
        assert signature.return_annotation is not inspect.Signature.empty, f"{function.__qualname__}: what is returned?"
        for parameter in signature.parameters.values():
            annotated = parameter.annotation is not inspect.Parameter.empty or parameter.name == "self"
            assert annotated, f"{function.__qualname__}: the type of {parameter.name} is missing"
    assert ">>>" in (inspect.getdoc(definition) or ""), "a docstring holds one worked example (>>>)"


@pytest.mark.parametrize("slug", SLUGS)
def test_examples_in_docstrings_are_true(slug: str) -> None:
    results = doctest.testmod(chapter(slug).reference, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


@pytest.mark.parametrize("slug", SLUGS)
def test_every_check_names_a_mistake(slug: str) -> None:
    names = [check.name for check in chapter(slug).checks]
    assert len(names) == len(set(names))
    assert all(check.mistake.strip() and not check.mistake.endswith(".") for check in chapter(slug).checks)


@pytest.mark.parametrize("slug", SLUGS)
def test_a_chapter_has_its_exercises(slug: str) -> None:
    exercises = chapter(slug).exercises
    challenges = [exercise for exercise in exercises if exercise.challenge]
    assert 3 <= len(exercises) - len(challenges) <= 7
    assert challenges == [exercises[-1]], "one challenge, at the end"
    assert all(hint.strip() for exercise in exercises for hint in exercise.hints)


def test_parts_come_from_their_chapters() -> None:
    """Each part whose chapter exists is the work of exactly one exercise of that chapter."""
    found = sorted((exercise.part, slug) for slug in SLUGS for exercise in chapter(slug).exercises if exercise.part)
    assert found == sorted((part.name, part.chapter) for part in PARTS if part.chapter in SLUGS)


@pytest.mark.parametrize("slug", SLUGS)
def test_homework_fits_the_column_of_the_site(slug: str) -> None:
    too_long = [line for line in stub(slug).splitlines() if len(line) > WIDTH]
    assert not too_long, f"lines of more than {WIDTH} columns are cut on the site: {too_long[0]}"


@pytest.mark.skipif("CI" not in os.environ, reason="homework.py is the reader's own; CI looks at the one in git")
@pytest.mark.parametrize("slug", SLUGS)
def test_the_homework_in_git_is_a_fresh_stub(slug: str) -> None:
    assert chapter(slug).homework.read_text("utf-8") == stub(slug), f"run `python -m book stubs {slug} --force`"
