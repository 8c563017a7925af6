"""Definitions at hand: a page's first use of a term links to the glossary and shows the definition on hover."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from bs4 import NavigableString, Tag

ENTRY = re.compile(r"^(?P<name>[^\s:#|<-][^\n]*)\n+:   (?P<text>.+(?:\n    .+)*)", re.MULTILINE)
NOT_HERE = {"a", "code", "pre", "h1", "h2", "h3", "h4", "summary", "button", "svg"}
# Where a word of the glossary means something else.
OTHER_MEANINGS = re.compile(r"page faults?|this page|checks guard|rotary embedding|language model programs", re.I)
NOT_IN = {"prediction", "comparison", "arithmatex", "nb-out", "chapter-card", "trace-player", "trace-player-later"}


@dataclass(frozen=True)
class Entry:
    """Where a term stands in the glossary, and its definition as plain text (empty if it needs a formula)."""

    anchor: str
    definition: str


def read_glossary(file: Path) -> dict[str, Entry]:
    """The entries of a glossary by the spellings of their terms: "Temperature, top-k" is two."""
    entries = {}
    for match in ENTRY.finditer(file.read_text(encoding="utf-8")):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", " ".join(match["text"].split()))
        entry = Entry(anchor_of(match["name"]), "" if "\\" in plain else plain.replace("$", ""))
        for name in re.split(r", | \(|\)", match["name"].replace("`", "")):
            if name:
                entries[name] = entry
    return entries


def anchor_of(name: str) -> str:
    return "term-" + re.sub(r"[^\w]+", "-", unescape(re.sub(r"<[^>]+>|`", "", name)).lower()).strip("-")


def add_anchors(html: str) -> str:
    """Give each term of the rendered glossary its anchor."""
    return re.sub(r"<dt>(.*?)</dt>", lambda m: f'<dt id="{anchor_of(m[1])}">{m[1]}</dt>', html, flags=re.DOTALL)


def link_terms(page: Tag, entries: Mapping[str, Entry], glossary: str) -> None:
    """Link the first use of each term in the paragraphs of a page.

    Args:
        page: the page's content, changed in place.
        entries: as `read_glossary` returns them.
        glossary: the glossary's address, relative to the page.
    """
    left = dict(entries)
    for paragraph in page.select("p, li"):
        if not _is_within(paragraph, page):
            for text in paragraph.find_all(string=True):
                if text.parent is not None and not _is_within(text.parent, page):
                    _link(text, left, glossary)


def _is_within(tag: Tag, page: Tag) -> bool:
    """Whether a tag is, or lies in, something that carries no links to the glossary."""
    for outer in (tag, *tag.parents):
        if outer is page:
            return False
        if outer.name in NOT_HERE or set(outer.get("class") or []).intersection(NOT_IN):
            return True
    return False


def _link(text: NavigableString, left: dict[str, Entry], glossary: str) -> None:
    while left:
        names = "|".join(re.escape(name) for name in sorted(left, key=len, reverse=True))
        others = [span.span() for span in OTHER_MEANINGS.finditer(str(text))]
        uses = re.finditer(rf"(?<![\w-])(?:{names})(?=s?(?![\w-]))", str(text), re.IGNORECASE)
        found = next((use for use in uses if not any(a <= use.start() < b for a, b in others)), None)
        if found is None:
            return
        entry = next(entry for name, entry in left.items() if name.lower() == found[0].lower())
        for name in [name for name, other in left.items() if other == entry]:
            del left[name]
        end = found.end() + str(text)[found.end() :].startswith("s")
        link = Tag(name="a", attrs={"class": "term", "href": f"{glossary}#{entry.anchor}"})
        link.string = str(text)[found.start() : end]
        if entry.definition:
            link["title"] = entry.definition
        before, after = str(text)[: found.start()], NavigableString(str(text)[end:])
        text.replace_with(before, link, after)
        text = after
