"""The list of chapters: a card for each, with what it teaches and a number that an experiment recorded."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from book.results import recorded
from book.units import quantity

CARDS = {
    entry["chapter"]: entry
    for entry in tomllib.loads((Path(__file__).parent / "cards.toml").read_text(encoding="utf-8"))["cards"]
}


class CardError(Exception):
    """A card names a result that is not recorded; the message says which."""


@dataclass(frozen=True)
class Links:
    """Where a card leads; the addresses are relative to the page that shows it."""

    chapter: str
    homework: str | None
    experiment: str | None


def lesson(chapter: int) -> str:
    """One sentence on what a chapter teaches, empty where the chapter has no card yet."""
    return str(CARDS.get(chapter, {}).get("lesson", ""))


def experiment(chapter: int) -> str | None:
    """The experiment that a chapter's number comes from."""
    return CARDS.get(chapter, {}).get("experiment")


def card(chapter: int, title: str, links: Links) -> str:
    """A card as HTML."""
    entry = CARDS.get(chapter)
    more = [("Homework", links.homework), ("Experiment", links.experiment)]
    listed = " · ".join(f'<a href="{address}">{name}</a>' for name, address in more if address)
    return (
        f'<div class="chapter-card"><p class="card-title"><span>{chapter}</span> '
        f'<a class="card" href="{links.chapter}">{escape(title)}</a></p>'
        f'<p>{escape(lesson(chapter))}</p>{_number(entry) if entry else ""}<p class="card-links">{listed}</p></div>'
    )


def _number(entry: Mapping[str, Any]) -> str:
    """The card's number, read from the recorded result, and its device."""
    try:
        result = recorded(entry["experiment"], entry["device"])
        values = [result.find(**row) for row in entry["rows"]]
    except (KeyError, ValueError) as error:
        raise CardError(f"docs/cards.toml, chapter {entry['chapter']}: {error}") from error
    shown = [quantity(row.value, row.unit).replace(".0 ", " ") for row in values]
    return (
        f'<p class="card-number"><strong>{escape(entry["number"].format(*shown))}</strong> '
        f"{escape(entry['what'])} <small>{escape(result.device)}</small></p>"
    )
