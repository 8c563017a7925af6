"""Run one check in this process and describe its outcome in words."""

import errno
import linecache
import random
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from book.grading.assertions import CheckFailed
from book.grading.chapter import Chapter, Check
from book.grading.submission import Homework, SubmissionError, line_in, load_submission, text_of

Status = Literal["passed", "failed", "raised", "unwritten", "unreadable", "timeout", "crashed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a check. Its texts are shown to the reader."""

    status: Status
    message: str = ""
    """What happened, in a sentence."""
    mistake: str = ""
    """The likely cause, in a sentence; empty if `message` is explanation enough. After an exception, which may have
    another cause, it says what the check tests."""
    detail: str = ""
    """The lines of code that led to the failure."""
    output: str = ""
    """The text that the answer printed."""

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def explanation(self) -> str:
        """The mistake, introduced by how certain it is; empty if there is none."""
        if not self.mistake:
            return ""
        return f"{'Likely mistake' if self.status == 'failed' else 'This check looks for a mistake'}: {self.mistake}"

    @property
    def verdict(self) -> str:
        """The text for the summary: the mistake, the message, or both if neither is enough on its own."""
        if self.status == "failed" and self.mistake:
            return self.mistake
        return f"{self.message} {self.explanation}." if self.mistake else self.message


def run_check(chapter: Chapter, check: Check, submission: Homework, filename: str) -> Outcome:
    """Call a check with a submission that was read from `filename`, and turn any exception into an outcome."""
    _reset()
    try:
        check.function(submission)
    except Exception as error:
        return _explain(chapter, check, error, filename)
    except BaseException as error:
        if line_in(error, filename) is None:  # Ctrl-C
            raise
        message = f"Your answer {_stopped_by(error)}; raise an ordinary exception instead."
        return Outcome("raised", message, detail=_detail(chapter, error, filename))
    return Outcome("passed")


def run_checks(
    chapter: Chapter, exercise: str, submission: Homework, filename: str = ""
) -> tuple[Check, Outcome] | None:
    """Run the checks of an exercise in this process. Return the first that fails, or None if all pass."""
    for check in chapter.checks_of(chapter.exercise(exercise)):
        outcome = run_check(chapter, check, submission, filename)
        if not outcome.passed:
            return check, outcome
    return None


def run_source(chapter: Chapter, exercise: str, source: str, filename: str) -> tuple[Check, Outcome] | None:
    """Run the checks on the source text of a homework file. If it cannot be loaded, the first check fails."""
    try:
        submission = load_submission(chapter, [exercise], source, filename)
    except SubmissionError as error:
        return chapter.checks_of(chapter.exercise(exercise))[0], Outcome("unreadable", str(error))
    return run_checks(chapter, exercise, submission, filename)


_SLIPS = (NameError, ImportError, SyntaxError, RecursionError)
"""Exceptions caused by a slip in the code, not by the mistake that the check looks for."""


def _reset() -> None:
    """Give every check the same random numbers and defaults, whatever ran before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)


def _stopped_by(error: BaseException) -> str:
    """Say how an answer tried to end the process: with `sys.exit()`, `pytest.skip()` or a KeyboardInterrupt."""
    return "called sys.exit()" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"


def _explain(chapter: Chapter, check: Check, error: Exception, filename: str) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    line, text = line_in(error, filename), text_of(error)
    if isinstance(error, NotImplementedError) and last.filename == filename:
        return Outcome("unwritten", "Not written yet.")
    detail = _detail(chapter, error, filename)
    if isinstance(error, CheckFailed):
        mistake = check.mistake if error.mistake is None else error.mistake
        return Outcome("failed", _sentence(text), mistake, detail)
    if isinstance(error, AssertionError) and line is None:
        return Outcome("failed", _sentence(text or f"this does not hold: {_code(last)}"), check.mistake, detail)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:  # the latter is torch's
        return Outcome("raised", "Your answer asked for more memory than the grader allows.", check.mistake, detail)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return Outcome("raised", "Your answer printed or wrote more than the grader allows.", check.mistake, detail)
    raised = f"{type(error).__name__}: {text}".removesuffix(": ")
    if line is None:
        message, mistake = _sentence(f"the check could not use what you returned: {raised}"), check.mistake
        if "NoneType" in raised:
            message, mistake = f"{message} Is a `return` missing?", ""
        return Outcome("raised", message, mistake, detail)
    message, mistake = f"Your answer raised {raised} (line {line}).", check.mistake
    if isinstance(error, _SLIPS):
        mistake = ""
    elif isinstance(error, EOFError):
        message, mistake = f"Your answer reads from the keyboard in line {line}, but the grader gives no input.", ""
    elif (
        last.filename == filename
        and _code(last).startswith("raise")
        and all(frame.name != "assert_raises" for frame in frames)
    ):
        message += " This input is valid, so a correct answer does not raise."
    return Outcome("raised", message, mistake, detail)


def _detail(chapter: Chapter, error: BaseException, filename: str) -> str:
    """List the lines of the grader and of the reader's file in the traceback, without the frames of libraries."""
    shown = {filename, str(chapter.folder / "test_homework.py")}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{Path(f.filename).name}:{f.lineno}  {_code(f)}" for f in frames if f.filename in shown]
    return "\n".join(lines if len(lines) <= 8 else [*lines[:4], "…", *lines[-4:]])


def _code(frame: traceback.FrameSummary) -> str:
    """Return the statement that a frame is executing, on one line."""
    first = frame.lineno or 1
    lines = [linecache.getline(frame.filename, number) for number in range(first, (frame.end_lineno or first) + 1)]
    code = " ".join(line.strip() for line in lines)
    return code if len(code) <= 300 else f"{code[:300]}…"


def code_line(filename: str, number: int) -> str:
    """Return a line of a file, preceded by the file's name and the line's number."""
    return f"{Path(filename).name}:{number}  {linecache.getline(filename, number).strip()[:300]}"


def _sentence(text: str) -> str:
    """Capitalize the first word, unless it is a name from the code, and end the text with a period."""
    text = text.strip()
    first = text.partition(" ")[0]
    is_name = any(mark in first for mark in "_([`") or (len(first) == 1 and first != "a")
    return (text if is_name else text[:1].upper() + text[1:]) + ("" if text.endswith((".", "?", "!")) else ".")
