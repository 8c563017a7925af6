"""No text states a number that the records, or the cells of its chapter, do not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from book import results
from book.grading.chapter import load_module
from tests.book.stated_numbers import digest, quantities, values_of

ROOT = Path(__file__).resolve().parents[2]
_KNOWN = tomllib.loads(Path(__file__).with_name("stated_numbers.toml").read_text(encoding="utf-8"))
READ: dict[str, dict[str, str]] = _KNOWN["read"]
"""By experiment and device: the digest of the record from which the reading was written."""
KNOWN: dict[str, dict[str, list[str]]] = _KNOWN["stated"]
"""By experiment or chapter: a reason, and the quantities that are stated for it, which no record and no cell has."""
ASSUMED: dict[str, list[str]] = _KNOWN["assumed"]
"""By experiment: the quantities from which its prediction was made."""
EXPERIMENTS = sorted(path.parent.name for path in ROOT.glob("experiments/*/README.md"))
CHAPTERS = sorted(path.name for path in ROOT.glob("chapters/*") if (path / f"{path.name}.ipynb").exists())

KINDS = ("text/plain", "text/html", "text/markdown")


def allowed(name: str) -> set[str]:
    return {text for texts in KNOWN.get(name, {}).values() for text in texts}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_reading_was_written_from_the_record(experiment: str) -> None:
    now = {result.device: digest(result) for result in results.load(experiment)}
    assert READ.get(experiment) == now, "the record is new: read its README's Reading again, then write down the digest"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_reading_states_what_is_recorded(experiment: str) -> None:
    """In an experiment's reading: of its own records, or of those that it links to, or what its prediction says."""
    text = (ROOT / "experiments" / experiment / "README.md").read_text(encoding="utf-8")
    prediction, _, rest = text.partition("## Method")
    reading = rest.partition("## Reading")[2]
    sources = {experiment, *re.findall(r"\]\(\.\./(\w+)/README\.md", reading)}
    values = [value for source in sources for result in results.load(source) for value in values_of(result)]
    predicted = {quantity.text for quantity in quantities(prediction)}
    stated = list(quantities(reading))
    assert stated
    unknown = {q.text for q in stated if q.text not in predicted and not q.states(values)}
    assert sorted(unknown) == sorted(allowed(experiment))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_prediction_is_computed_by_its_script(experiment: str) -> None:
    """In an experiment's prediction: what `run.py --predict` prints, and what is assumed."""
    run = load_module(f"predictions_of_{experiment}", ROOT / "experiments" / experiment / "run.py")
    text = (ROOT / "experiments" / experiment / "README.md").read_text(encoding="utf-8")
    prediction = text.partition("## Method")[0].partition("## Prediction")[2]
    values = [(q.value, q.unit) for q in quantities(run.predictions().replace("|", " "))]
    unknown = {q.text for q in quantities(prediction) if not q.states(values)}
    assert sorted(unknown) == sorted(ASSUMED.get(experiment, []))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_states_what_a_cell_prints(chapter: str) -> None:
    """In a chapter's prose: what an output shows, or what a question asks."""
    folder = ROOT / "chapters" / chapter
    cells = nbformat.read(folder / f"{chapter}.ipynb", as_version=4).cells
    shown = [
        re.sub(r"<[^>]*>", " ", str(text))
        for cell in cells
        for output in cell.get("outputs", [])
        for text in (output.get("text", ""), *(output.get("data", {}).get(kind, "") for kind in KINDS))
    ]
    questions = (folder / "predictions.toml").read_text(encoding="utf-8")
    values = [(q.value, q.unit) for text in (*shown, questions) for q in quantities(text)]
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    unknown = {q.text for q in quantities(prose) if not q.states(values)}
    assert sorted(unknown) == sorted(allowed(chapter))


def test_known_numbers_belong_to_a_text() -> None:
    assert set(KNOWN) <= {*EXPERIMENTS, *CHAPTERS} and set(READ) == set(EXPERIMENTS)
    assert all(reason.strip() and texts for reasons in KNOWN.values() for reason, texts in reasons.items())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 4.1 ms, not 1.4 to 2.7 s.", ["4.1 ms", "1.4 s", "2.7 s"]),
        ("It reached 302, 357 and 1,552 tokens/s.", ["302 tokens/s", "357 tokens/s", "1,552 tokens/s"]),
        ("4% with pages of 16 and 18% with more, 0.5 to 0.7%", ["4%", "18%", "0.5%", "0.7%"]),
        ("since the 1960s, `4 ms`, $5 s$, and [6 s](7 s)", ["6 s"]),
        ("4 ms\n\n| 5 ms |\n\n6 ms", ["4 ms", "6 ms"]),
    ],
)
def test_quantities_of_a_text(text: str, found: list[str]) -> None:
    assert [quantity.text for quantity in quantities(text)] == found


def test_a_quantity_states_a_value_that_is_rounded_to_it() -> None:
    (quantity,) = quantities("4.1 ms")
    assert quantity.states([(4.149e-3, "s")]) and quantity.states([(4.05e-3, "s")])
    assert not quantity.states([(4.16e-3, "s")]) and not quantity.states([(4.1e-3, "B")])


def test_what_a_record_lets_a_text_state() -> None:
    rows = [
        results.Row("time", 2.0, "s", 1.0, "bytes", spread=(1.5, 2.5)),
        results.Row("rate", 4.0, "tokens/s", None, "none: a figure"),
    ]
    result = results.Result("x", "device", "2026-01-01", {"torch": "1"}, {}, rows)
    found = set(values_of(result))
    assert found == {(2.0, "s"), (1.0, "s"), (1.5, "s"), (2.5, "s"), (0.5, "%"), (4.0, "tokens/s"), (0.25, "s")}


def test_a_digest_changes_with_a_value() -> None:
    def record(*values: float) -> results.Result:
        rows = [results.Row("time", value, "s", None, "none", {"keys": i}) for i, value in enumerate(values)]
        return results.Result("x", "device", "2026-01-01", {"torch": "1"}, {}, rows)

    assert digest(record(1.0, 2.0)) == digest(record(1.0, 2.0)) != digest(record(1.0, 2.1))
