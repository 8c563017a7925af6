"""A submission: the reader's file, with the reference in the place of all exercises that are not under test."""

import ast
import sys
from collections.abc import Collection
from types import ModuleType, SimpleNamespace
from typing import Any

from book.grading.chapter import Chapter


class Homework(SimpleNamespace):
    """What a check is handed: the submission for its exercise, and the reference for all else."""


class SubmissionError(Exception):
    """The reader's file cannot be read; the message is for the reader."""


def provided(chapter: Chapter) -> dict[str, Any]:
    """Everything that the solution defines in public, imports left out: exercises, and what the reader is given."""
    tree = ast.parse(chapter.solution.read_text(encoding="utf-8"))
    names = {name for statement in tree.body for name in defined_names(statement) if not name.startswith("_")}
    return {name: vars(chapter.reference)[name] for name in names}


def defined_names(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module binds by defining them (an import does not define)."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [
                node.id
                for target in targets
                for node in ast.walk(target)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def load_submission(chapter: Chapter, exercises: Collection[str], source: str, filename: str) -> Homework:
    """Execute the reader's `source` for some exercises: one to be graded, or all that have passed.

    Its definitions of the other exercises are left out and the reference's are put in their place before the first
    line runs, so that an answer which calls (or inherits from) an earlier exercise meets a correct one. Whatever else
    the reader defines or imports stays theirs.

    Raises:
        SubmissionError: a syntax error, an exception while the file is executed, or no definition of an exercise.
    """
    others = {name: value for name, value in provided(chapter).items() if name not in exercises}
    if "\0" in source:
        raise SubmissionError("Your file contains null bytes, as text in UTF-16 does: save it with the encoding UTF-8.")
    try:
        tree = ast.parse(source, filename)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = (getattr(error, "text", None) or "").strip()
        if text.startswith(("%", "!")):
            raise SubmissionError(f"`{text}`{line} is a notebook command: leave it out of homework.py.") from error
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise SubmissionError(f"Your file has a syntax error{line}: {reason}.") from error
    tree.body = [statement for statement in tree.body if not set(defined_names(statement)) & set(others)]

    module = ModuleType("_".join(["homework", chapter.slug, *exercises]))
    sys.modules[module.__name__] = module  # dataclasses look up the module of the class that they decorate
    namespace = vars(module)
    namespace.update(others, __file__=filename)
    try:
        exec(compile(tree, filename, "exec", dont_inherit=True), namespace)
    except SystemExit as error:
        raise SubmissionError("Your file calls sys.exit() outside its functions.") from error
    except BaseException as error:  # pytest.skip() and KeyboardInterrupt, too
        line = f" in line {line_in(error, filename)}" if line_in(error, filename) else ""
        reason = f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")
        raise SubmissionError(f"Your file cannot be imported{line}: {reason}.") from error
    namespace.update(others)  # also over an assignment such as `masked_attention = my_version`
    for exercise in exercises:
        if exercise not in namespace:
            raise SubmissionError(f"Your file does not define {exercise} any more.")
    return Homework(**others, **{exercise: namespace[exercise] for exercise in exercises})


def text_of(error: BaseException, most: int = 2000) -> str:
    """The message of an exception, cut if it is long, or what its `__str__` raised instead."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its __str__ raised {type(failure).__name__})"
    return text if len(text) <= most else f"{text[:most]}…"


def line_in(error: BaseException, filename: str) -> int | None:
    """The last line of `filename` that an exception passed through."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == filename:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
