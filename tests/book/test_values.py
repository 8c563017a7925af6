"""Numbers in prose that name a row of a record are the record's, and follow it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from book import results, values
from book.__main__ import app
from book.results import Result, Row

ROWS = (
    Row("step", 4.449e-3, "s", 2e-3, "bytes", {"keys": 384, "way": "one kernel"}, (4.4e-3, 4.5e-3)),
    Row("step", 9.02e-3, "s", 2e-3, "bytes", {"keys": 384, "way": "many, in a graph"}),
    Row("rate", 28_948.7, "tokens/s", None, "none: a figure"),
)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book with one experiment on two devices."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chapters").mkdir()
    for device in ("GPU X", "CPU Y"):
        results.write(Result("01_x", device, "2026-01-31", {"torch": "2"}, {}, ROWS), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("stated", "source", "written"),
    [
        ("0.1 ms", "[step; keys 384; one kernel @ GPU]", "4.4 ms"),
        ("1 µs", "[step; one kernel @ gpu x]", "4,449 µs"),
        ("1.0", "[step; 384; many, in a graph @ GPU] in ms", "9.0"),
        ("**1%", "[step; one kernel @ GPU].share", "**45%"),
        ("1.00 ms", "[step; one kernel @ GPU].high", "4.50 ms"),
        ("1.00", "[step; many, in a graph @ GPU] / [step; one kernel @ GPU]", "2.03"),
        ("1 tokens/s", "[rate @ CPU]", "28,949 tokens/s"),
        ("1 µs", "1 / [rate @ 01_x CPU]", "35 µs"),
    ],
)
def test_a_number_is_written_with_its_unit_and_decimals(book: Path, stated: str, source: str, written: str) -> None:
    comment = f"<!-- = {source} -->"
    text = values.refreshed(f"It takes {stated}{comment}, not 7 ms.", "01_x", book)
    assert text == f"It takes {written}{comment}, not 7 ms."
    assert values.refreshed(text, "01_x", book) == text
    assert values.without_sources(text) == f"It takes {written}, not 7 ms."


@pytest.mark.parametrize(
    "source", ["[step @ GPU]", "[step; keys 3 @ GPU]", "[rate]", "[rate @ GPU].bound", "[rate @ GPU] +", "rate"]
)
def test_a_source_that_selects_no_value_is_an_error(book: Path, source: str) -> None:
    with pytest.raises(ValueError):
        values.refreshed(f"1 ms<!-- = {source} -->", "01_x", book)


def test_one_command_refreshes_what_a_new_record_makes_stale(book: Path) -> None:
    readme = book / "experiments" / "01_x" / "README.md"
    readme.write_text("A step takes 4.4 ms<!-- = [step; one kernel @ GPU] -->.\n", encoding="utf-8")
    run = CliRunner().invoke
    assert run(app, ["values", "--check"]).exit_code == 0
    new = Row("step", 7e-3, "s", None, "none", {"way": "one kernel"})
    results.write(Result("01_x", "GPU X", "2026-02-01", {"torch": "2"}, {}, (new,)), book)
    stale = run(app, ["values", "--check"])
    assert stale.exit_code == 1 and "python -m book values" in stale.output
    assert run(app, ["values"]).exit_code == 0
    assert readme.read_text(encoding="utf-8").startswith("A step takes 7.0 ms<!--")
    assert run(app, ["values", "--check"]).exit_code == 0


def test_what_prose_states_is_recorded() -> None:
    root = Path(__file__).resolve().parents[2]
    stale = [str(file) for file in values.texts(root) if values.is_stale(file, root)]
    assert stale == [], "run `python -m book values`"
