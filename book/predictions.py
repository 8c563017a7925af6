"""Predict before you measure.

A chapter's questions live beside its notebook, in `predictions.toml`:

    [score_bytes]
    question = "How many bytes does the score matrix of 4,096 tokens and 32 heads take in float32?"
    unit = "GB"
    answer = 2.147
    tolerance_factor = 1.5
    why = "32 heads × 4,096 × 4,096 scores × 4 B"

`predict("score_bytes", 2.0)` keeps the reader's number in `.progress/predictions.json`; `predict("score_bytes", None)`
shows the one kept, if any. `compare("score_bytes", measured)` sets prediction, derivation and measurement side by side.
`python -m book notebooks check` fails where a derivation misses the measurement by more than its factor, unless the
entry says why the chapter keeps it: `disagrees = "the copies of K and V, which this count leaves out"`.
With BOOK_PRISTINE=1 in the environment nothing is read or kept, so that saved outputs are the same for everyone.
"""

import html
import math
import os
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from book.grading.progress import Progress, ProgressError
from book.paths import repository_root
from book.units import number

_BOX = "border-left:4px solid #0072B2;padding:0.4em 1em;margin:0.5em 0"
_FOLD = "Show the numbers without a prediction"


@dataclass(frozen=True)
class Question:
    """One entry of a predictions.toml. `key` is unique in the book: chapter folder, slash, name."""

    key: str
    question: str
    unit: str
    answer: float
    tolerance_factor: float
    why: str
    disagrees: str | None = None
    """Why the answer misses the measurement, where it does and the chapter explains it."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.answer) and self.answer > 0):
            raise ValueError(f"{self.key}: answer must be a number above 0, not {self.answer}")
        if not (math.isfinite(self.tolerance_factor) and self.tolerance_factor >= 1):
            raise ValueError(f"{self.key}: tolerance_factor must be at least 1, not {self.tolerance_factor}")
        if self.disagrees is not None and not self.disagrees.strip():
            raise ValueError(f"{self.key}: disagrees must say why the answer misses the measurement")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def within(self, a: float, b: float) -> bool:
        """Whether two values differ by no more than the question's factor."""
        # The last digit of a product must not decide a question whose factor is 1.
        return a > 0 and b > 0 and max(a / b, b / a) <= self.tolerance_factor * (1 + 1e-9)

    def show(self, value: float) -> str:
        if self.unit == "%":
            return f"{number(value, 4)}%"
        words = self.unit.isalpha() and len(self.unit) > 2  # "checks" and not "ms"
        return f"{number(value, 4)} {self.unit.removesuffix('s') if words and value == 1 else self.unit}"


@dataclass(frozen=True)
class Prediction:
    """The box that asks, and shows the reader's number where there is one."""

    question: Question
    value: float | None

    def __repr__(self) -> str:
        q = self.question
        mine = "none yet" if self.value is None else q.show(self.value)
        return f"Predict: {q.question} (in {q.unit})\nYour prediction: {mine}"

    def _repr_html_(self) -> str:
        q = self.question
        data = {
            "name": q.key,
            "unit": q.unit,
            "answer": repr(q.answer),
            "why": q.why,
            "tolerance": repr(q.tolerance_factor),
        }
        attributes = " ".join(f'data-{key}="{html.escape(value)}"' for key, value in data.items())
        if self.value is None:
            yours = (
                f"Write your number in the cell and run it: <code>predict(&quot;{html.escape(q.name)}&quot;, 1)</code>"
            )
        else:
            yours = f"Your prediction: <strong>{html.escape(q.show(self.value))}</strong>"
        factor = "" if q.tolerance_factor == 1 else f", right within a factor of {q.tolerance_factor:g}"
        return (
            f'<div class="prediction" {attributes} style="{_BOX}">'
            f'<p class="prediction-question"><strong>Predict.</strong> {html.escape(q.question)} '
            f"<em>(in {html.escape(q.unit)}{factor})</em></p>"
            f'<p class="prediction-yours">{yours}</p></div>'
        )


@dataclass(frozen=True)
class Comparison:
    """Prediction, derivation and measurement side by side."""

    question: Question
    predicted: float | None
    measured: float

    def _rows(self) -> list[tuple[str, str, str]]:
        q = self.question

        def against(value: float) -> str:
            if self.measured <= 0:
                return ""
            same = value == self.measured
            return "equal to the measurement" if same else f"× {number(value / self.measured)} of the measurement"

        mine = ("your prediction", "none", "") if self.predicted is None else (
            "your prediction", q.show(self.predicted), against(self.predicted)
        )  # fmt: skip
        return [mine, ("our derivation", q.show(q.answer), against(q.answer)), ("measured", q.show(self.measured), "")]

    def _verdict(self) -> str:
        q, sentences = self.question, []
        factor = "exactly" if q.tolerance_factor == 1 else f"within a factor of {q.tolerance_factor:g}"
        for who, value in (("Your prediction", self.predicted), ("Our derivation", q.answer)):
            if value is not None:
                holds = "agrees" if q.within(value, self.measured) else "does not agree"
                sentences.append(f"{who} {holds} with the measurement {factor}.")
        return " ".join(sentences)

    def __repr__(self) -> str:
        rows = [f"{who:<16} {value}  {ratio}".rstrip() for who, value, ratio in self._rows()]
        return "\n".join([self.question.question, *rows, self._verdict(), f"Why: {self.question.why}"])

    def _repr_html_(self) -> str:
        """The numbers are folded as long as nothing is predicted."""
        q = self.question
        data = {"name": q.key, "measured": repr(float(self.measured)), "answer": repr(q.answer), "unit": q.unit}
        data["tolerance"] = repr(q.tolerance_factor)
        attributes = " ".join(f'data-{key}="{html.escape(value)}"' for key, value in data.items())
        classes = ("yours", "derived", "measured")
        rows = "".join(
            f'<tr class="comparison-{name}">'
            + "".join(f'<td style="text-align:left">{html.escape(c)}</td>' for c in row)
            + "</tr>"
            for name, row in zip(classes, self._rows(), strict=True)
        )
        is_open = "" if self.predicted is None else " open"
        return (
            f'<div class="comparison" {attributes} style="{_BOX}"><p>{html.escape(q.question)}</p>'
            f'<details class="comparison-answer"{is_open}><summary>{_FOLD}</summary><div>'
            f'<table><tbody>{rows}</tbody></table><p class="comparison-verdict">{html.escape(self._verdict())}</p>'
            f"<p><em>Why:</em> {html.escape(q.why)}</p></div></details></div>"
        )


def load_questions(file: Path) -> dict[str, Question]:
    """Every question of one predictions.toml, by name."""
    questions = {}
    for name, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
        fields = {"question", "unit", "answer", "tolerance_factor", "why"}
        if set(entry) - {"disagrees"} != fields:
            raise ValueError(
                f"{file.parent.name}/{file.name} [{name}]: needs exactly {sorted(fields)} and perhaps `disagrees`, "
                f"has {sorted(entry)}"
            )
        questions[name] = Question(
            f"{file.parent.name}/{name}", entry["question"], entry["unit"],
            float(entry["answer"]), float(entry["tolerance_factor"]), entry["why"], entry.get("disagrees"),
        )  # fmt: skip
    return questions


def measured_in(output: str) -> Iterator[tuple[str, float]]:
    """Find every `Comparison` in a notebook's saved HTML: the key of its question, and the measurement."""
    for attributes in re.findall(r'<div class="comparison" ([^>]*)>', output):
        data = dict(re.findall(r'data-(\w+)="([^"]*)"', attributes))
        yield html.unescape(data["name"]), float(data["measured"])


def derivation_problems(questions: Mapping[str, Question], measured: Mapping[str, float]) -> Iterator[str]:
    """Name the derivations that miss their measurement, and those that no measurement tests.

    Args:
        questions: the chapter's questions by name, as `load_questions` returns them.
        measured: the measurements by the keys of their questions.
    """
    for question in questions.values():
        if question.key not in measured:
            yield f"[{question.name}] is never compared with a measurement: add `compare({question.name!r}, ...)`"
            continue
        value = measured[question.key]
        if question.disagrees is None and not question.within(question.answer, value):
            yield (
                f"[{question.name}] our derivation is {question.show(question.answer)}, but the measurement is "
                f"{question.show(value)}, further off than a factor of {question.tolerance_factor:g}: correct one of "
                'them, or explain the difference in the text and set `disagrees = "why"` in predictions.toml'
            )


def find_question(name: str) -> Question:
    """The question `name` (or `chapter/name`): from the notebook's own folder, else from the chapter that has it."""
    chapter, _, short = name.rpartition("/")
    own = Path.cwd() / "predictions.toml"
    files = [own] if own.exists() else []
    files += sorted((repository_root() / "chapters").glob("*/predictions.toml"))
    found = {}
    for file in files:
        question = load_questions(file).get(short)
        if question and chapter in ("", file.parent.name):
            if file == own:
                return question
            found[question.key] = question
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise KeyError(f"several chapters ask {name!r}: write one of {sorted(found)}")
    raise KeyError(f"no question {name!r} in {own.parent.name}/predictions.toml or in any other chapter")


def predict(name: str, value: float | None = None) -> Prediction:
    """Ask question `name`; keep `value` (in the question's unit) where one is given, else show the one kept before."""
    question = find_question(name)
    if value is not None and not 0 < value < 1e300:  # neither NaN nor an integer beyond any float
        raise ValueError(f"a prediction is a number above 0 in {question.unit}, not {value}")
    if _pristine():
        return Prediction(question, value)
    progress = Progress(repository_root())
    if value is not None:
        try:
            progress.record_prediction(question.key, float(value))
        except ProgressError as error:
            warnings.warn(str(error), stacklevel=2)
    return Prediction(question, progress.predictions().get(question.key) if value is None else float(value))


def compare(name: str, measured: float) -> Comparison:
    """What the reader predicted for `name`, what we derive, and what was measured (in the question's unit)."""
    question = find_question(name)
    predicted = None if _pristine() else Progress(repository_root()).predictions().get(question.key)
    return Comparison(question, predicted, float(measured))


def _pristine() -> bool:
    return os.environ.get("BOOK_PRISTINE") == "1"
