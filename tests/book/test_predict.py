"""Predictions: asked from the chapter's file, kept for the reader, left out of reproducible outputs."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from book.predictions import (
    Question,
    compare,
    derivation_problems,
    find_question,
    load_questions,
    measured_in,
    predict,
)

QUESTIONS = """
[bytes]
question = "How many bytes?"
unit = "MB"
answer = 12.5
tolerance_factor = 2
why = "a \\"quoted\\" <reason>"

[cells]
question = "How many cells?"
unit = "cells"
answer = 36
tolerance_factor = 1
why = "1 + 2 + … + 8"
"""


@pytest.fixture
def chapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A book with two chapters; the current folder is the first one's, as in a notebook."""
    for name in ("01_first", "02_second"):
        (tmp_path / "chapters" / name).mkdir(parents=True)
        (tmp_path / "chapters" / name / "predictions.toml").write_text(QUESTIONS, encoding="utf-8")
    second = tmp_path / "chapters" / "02_second" / "predictions.toml"
    second.write_text(QUESTIONS + QUESTIONS.replace("[bytes]", "[pages]").split("[cells]")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path / "chapters" / "01_first")
    monkeypatch.delenv("BOOK_PRISTINE", raising=False)
    return tmp_path


def stored(root: Path) -> dict[str, float]:
    return json.loads((root / ".progress" / "predictions.json").read_text(encoding="utf-8"))


def test_none_shows_nothing_and_keeps_nothing(chapter: Path) -> None:
    assert predict("bytes", None).value is None
    assert not (chapter / ".progress").exists()


def test_a_number_is_kept_and_shown_again(chapter: Path) -> None:
    assert predict("bytes", 10).value == 10
    predict("cells", 40)
    assert predict("bytes").value == 10
    assert predict("bytes", 11).value == 11
    assert stored(chapter) == {"01_first/bytes": 11, "01_first/cells": 40}


def test_pristine_outputs_do_not_depend_on_the_reader(chapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = predict("bytes")._repr_html_(), repr(compare("bytes", 12.0))
    predict("bytes", 10)
    assert (predict("bytes")._repr_html_(), repr(compare("bytes", 12.0))) != fresh
    monkeypatch.setenv("BOOK_PRISTINE", "1")
    assert (predict("bytes")._repr_html_(), repr(compare("bytes", 12.0))) == fresh
    predict("bytes", 99)
    assert stored(chapter) == {"01_first/bytes": 10}


def test_the_notebooks_own_chapter_comes_first(chapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_question("bytes").key == "01_first/bytes"
    assert find_question("02_second/bytes").key == "02_second/bytes"
    assert find_question("pages").key == "02_second/pages"  # from another folder: only one chapter asks it
    monkeypatch.chdir(chapter)
    with pytest.raises(KeyError, match=r"01_first/bytes.*02_second/bytes"):
        find_question("bytes")
    with pytest.raises(KeyError, match="no question 'nothing'"):
        find_question("nothing")


def test_the_box_carries_what_the_site_needs(chapter: Path) -> None:
    box = predict("bytes")._repr_html_()
    attributes = dict(re.findall(r'data-(\w+)="([^"]*)"', box))
    assert attributes == {
        "name": "01_first/bytes",
        "unit": "MB",
        "answer": "12.5",
        "tolerance": "2.0",
        "why": "a &quot;quoted&quot; &lt;reason&gt;",
    }
    assert 'class="prediction"' in box and "How many bytes?" in box
    # The answer is data for the site's script, never text that a reader sees before predicting.
    assert "12.5" not in re.sub(r"<[^>]*>", "", box) and "12.5" not in repr(predict("bytes"))


@pytest.mark.parametrize(("value", "agrees"), [(6.25, True), (25, True), (6.2, False), (25.1, False), (12.5, True)])
def test_within_the_factor_on_both_sides(chapter: Path, value: float, agrees: bool) -> None:
    assert find_question("bytes").within(value, 12.5) is agrees
    verdict = repr(compare("bytes", value))
    assert ("Our derivation agrees" in verdict) is agrees
    assert ("Our derivation does not agree" in verdict) is not agrees


def test_a_factor_of_one_asks_for_the_exact_number(chapter: Path) -> None:
    predict("cells", 36)
    assert "Your prediction agrees with the measurement exactly." in repr(compare("cells", 36))
    predict("cells", 37)
    assert "Your prediction does not agree with the measurement exactly." in repr(compare("cells", 36))


def test_comparison_shows_all_three_numbers(chapter: Path) -> None:
    predict("bytes", 10)
    for text in (repr(compare("bytes", 20.0)), compare("bytes", 20.0)._repr_html_()):
        assert "10 MB" in text and "12.50 MB" in text and "20 MB" in text
        assert "× 0.500 of the measurement" in text and "× 0.625 of the measurement" in text


def test_the_numbers_are_folded_until_there_is_a_prediction(chapter: Path) -> None:
    assert '<details class="comparison-answer"><summary>' in compare("bytes", 20.0)._repr_html_()
    predict("bytes", 10)
    assert '<details class="comparison-answer" open>' in compare("bytes", 20.0)._repr_html_()


def test_one_is_not_many(chapter: Path) -> None:
    predict("cells", 1)
    text = repr(compare("cells", 1))
    assert "1 cell  equal to the measurement" in text and "36 cells  × 36 of the measurement" in text
    assert "1 MB" in repr(predict("bytes", 1))


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 10**400])
def test_a_prediction_is_a_positive_number(chapter: Path, value: float) -> None:
    with pytest.raises(ValueError, match="a number above 0 in MB"):
        predict("bytes", value)


@pytest.mark.parametrize("damaged", ["[1", "[" * 100_000, "\0", '{"01_first/bytes": %s}' % ("9" * 5000)])
def test_a_damaged_file_stops_nothing(chapter: Path, damaged: str) -> None:
    predict("cells", 10)
    (chapter / ".progress" / "predictions.json").write_text(damaged, encoding="utf-8")
    with pytest.warns(UserWarning, match="damaged"):
        assert predict("bytes", 11).value == 11
    assert predict("bytes").value == 11
    assert (chapter / ".progress" / "predictions.damaged").read_text(encoding="utf-8") == damaged


@pytest.mark.parametrize("value", ["9" * 400, "NaN", '"10"', "null", "[]"])
def test_values_that_are_no_numbers_are_none(chapter: Path, value: str) -> None:
    (chapter / ".progress").mkdir()
    (chapter / ".progress" / "predictions.json").write_text(f'{{"01_first/bytes": {value}}}', encoding="utf-8")
    assert predict("bytes").value is None


def test_a_folder_that_cannot_be_written_stops_nothing(chapter: Path) -> None:
    (chapter / ".progress").write_text("a file where the folder belongs")
    with pytest.warns(UserWarning, match="not kept"):
        assert predict("bytes", 11).value == 11
    assert predict("bytes").value is None


def test_two_notebooks_may_write_at_once(chapter: Path) -> None:
    """A file that is written is never half: each has a temporary name of its own."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda value: predict("bytes", value), range(1, 101)))
    assert stored(chapter).keys() == {"01_first/bytes"} and len(list((chapter / ".progress").iterdir())) == 1


@pytest.mark.parametrize(("answer", "factor"), [(0, 2), (-1, 2), (1, 0.5), (float("nan"), 2)])
def test_questions_are_checked(answer: float, factor: float) -> None:
    with pytest.raises(ValueError, match="01_first/bytes"):
        Question("01_first/bytes", "?", "MB", answer, factor, "why")


def test_a_question_with_a_missing_or_unknown_field_is_refused(chapter: Path) -> None:
    (Path.cwd() / "predictions.toml").write_text(QUESTIONS.replace("tolerance_factor", "tolerance"), encoding="utf-8")
    with pytest.raises(ValueError, match="needs exactly"):
        predict("bytes")


def test_measurements_are_read_back_from_saved_outputs(chapter: Path) -> None:
    saved = compare("bytes", 12.25)._repr_html_() + predict("bytes")._repr_html_() + compare("cells", 36)._repr_html_()
    assert list(measured_in(saved)) == [("01_first/bytes", 12.25), ("01_first/cells", 36.0)]


def test_a_derivation_that_misses_its_measurement_is_named(chapter: Path) -> None:
    file = Path.cwd() / "predictions.toml"
    questions = load_questions(file)
    assert list(derivation_problems(questions, {"01_first/bytes": 24.9, "01_first/cells": 36})) == []
    (problem,) = derivation_problems(questions, {"01_first/bytes": 25.1, "01_first/cells": 36})
    assert "[bytes]" in problem and "12.50 MB" in problem and "25.10 MB" in problem and "disagrees" in problem
    (problem,) = derivation_problems(questions, {"01_first/bytes": 12.5})
    assert "[cells] is never compared" in problem

    file.write_text(QUESTIONS.replace("[cells]", 'disagrees = "half is padding"\n\n[cells]'), encoding="utf-8")
    questions = load_questions(file)
    assert questions["bytes"].disagrees == "half is padding"
    assert list(derivation_problems(questions, {"01_first/bytes": 25.1, "01_first/cells": 36})) == []


def test_disagrees_needs_a_reason(chapter: Path) -> None:
    with pytest.raises(ValueError, match="disagrees must say why"):
        Question("01_first/bytes", "?", "MB", 1.0, 2.0, "why", disagrees=" ")
