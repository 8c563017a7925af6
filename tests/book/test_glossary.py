"""The book uses its own vocabulary: a chapter introduces each term, and has no word that the glossary avoids."""

import re
from pathlib import Path

import pytest

from book import glossary
from book.paths import repository_root

ROOT = repository_root()
TERMS = glossary.load()
CHAPTERS = {int(folder.name[:2]): folder for folder in sorted((ROOT / "chapters").glob("[0-9][0-9]_*"))}
TEXTS = sorted(file for name in ("*.md", "predictions.toml") for file in ROOT.glob(f"chapters/*/{name}"))

GLOSSARY = """
## Terms

Inter-token latency (ITL)
:   The time between two
    tokens.
:   *Chapter 7. Also: time per output token (TPOT, its average), `tbt`. Not: pause, long pause.*

Page
:   Tokens' keys.
:   *Chapter 6.*
"""


@pytest.fixture
def terms(tmp_path: Path) -> list[glossary.Term]:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "glossary.md").write_text(GLOSSARY, encoding="utf-8")
    return glossary.load(tmp_path)


def test_an_entry_has_names_a_definition_a_chapter_and_words_to_avoid(terms):
    itl, page = terms
    assert itl.names == ("Inter-token latency", "ITL", "time per output token", "TPOT", "its average", "tbt")
    assert (itl.definition, itl.chapter) == ("The time between two tokens.", 7)
    assert itl.avoid == ("pause", "long pause")
    assert page == glossary.Term(("Page",), "Tokens' keys.", 6, ())


def test_a_term_is_introduced_in_bold_type(terms):
    itl, page = terms
    assert itl.is_introduced_in("the **inter-token latency** is") and itl.is_introduced_in("**ITL**")
    assert page.is_introduced_in("in **pages** of") and page.is_introduced_in("**`Page`**")
    assert not page.is_introduced_in("in pages of") and not page.is_introduced_in("**homepages**")
    assert not page.is_introduced_in("```python\n2**page**2\n```")


def test_words_to_avoid_are_found_in_prose_and_not_in_code(tmp_path: Path, terms):
    notes = tmp_path / "notes.md"
    notes.write_text(
        "A long\nPause. `pause` $pause$ [x](pause.md) 1<!-- = [pause] --> paused\n```python\npause = 1\n```\n"
    )
    assert [word for word, _ in glossary.avoided_words(glossary.prose(notes), terms)] == ["pause", "long pause"]


def test_every_entry_of_the_glossary_is_read():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Terms")[2]
    assert len(TERMS) == text.count("\n:   *Chapter ") == len(re.findall(r"^[^\s:].*\n:   ", text, re.MULTILINE)) > 50
    names = [name.lower() for term in TERMS for name in term.names[:1]]
    assert names == sorted(names, key=lambda name: name.replace("-", " ")), "the terms are not in alphabetical order"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("number", CHAPTERS)
def test_a_chapter_introduces_its_terms(number: int):
    folder = CHAPTERS[number]
    text = (folder / f"{folder.name}.md").read_text(encoding="utf-8")
    missing = [term.names[0] for term in TERMS if term.chapter == number and not term.is_introduced_in(text)]
    assert not missing, f"{folder.name} should introduce in bold type: {', '.join(missing)}"


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_chapter_has_a_word_that_the_glossary_avoids(file: Path):
    found = {f"{word!r}: write {term.names[0]!r}" for word, term in glossary.avoided_words(glossary.prose(file), TERMS)}
    assert not found, "; ".join(sorted(found))
