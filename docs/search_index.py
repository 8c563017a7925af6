"""The search index: chapters first, each term of the glossary at its entry, no source code; fetched with a query."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TypedDict

from glossary_terms import Entry

# Beginnings of addresses: what they weigh against one another in the order of the answers.
WEIGHTS = {"chapters/": 8.0, "glossary/": 6.0, "part-": 2.0, "api/": 0.5, "experiments/": 0.7, "results/": 0.5}
WORKER = Path(__file__).resolve().parent / "javascripts" / "search_worker.js"
CODE = re.compile(r"<pre.*?</pre>", re.DOTALL)
ENDS_OF_FORMULA = re.compile(r"\\[()[\]]")
PROSE = re.compile(r"<(?:p|li)>.*?</(?:p|li)>", re.DOTALL)  # and not the cells of tables


class Section(TypedDict, total=False):
    """One entry of the index: a section of a page."""

    location: str
    title: str
    text: str
    boost: float


def defer(site: Path, pages: set[str], entries: Mapping[str, Entry]) -> None:
    """Keep the search away from readers who do not search.

    Every page fetches search_index.json and the theme's worker. That file keeps the settings alone; the sections go to
    sections.json, the theme's worker to worker.js, and docs/javascripts/search_worker.js, which takes the worker's
    place, fetches both with the first query.

    Args:
        site: the folder of a finished build.
        pages: the addresses of the pages in the navigation; no others are found.
        entries: the glossary's terms, each of which becomes an entry of its own.
    """
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    sections = [*_sections(index["docs"], pages), *_terms(entries)]
    for name, content in {"search_index": {**index, "docs": []}, "sections": sections}.items():
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (site / "search" / f"{name}.json").write_text(text, encoding="utf-8")
    [worker] = site.glob("assets/javascripts/workers/search.*.min.js")
    worker.rename(site / "search" / "worker.js")
    shutil.copy(WORKER, worker)


def _sections(sections: list[Section], pages: set[str]) -> Iterator[Section]:
    for section in sections:
        address = section["location"].partition("#")[0]
        if address in pages:
            text = ENDS_OF_FORMULA.sub("", CODE.sub("", section["text"]))
            # The glossary's tables are the names that other engines use.
            prose = [text] if address == "glossary/" else PROSE.findall(text)
            if address.startswith("api/"):
                prose = prose[:1]  # the first line of a docstring
            yield _weighed({**section, "text": "".join(prose)})


def _terms(entries: Mapping[str, Entry]) -> Iterator[Section]:
    for name, entry in entries.items():
        text = f"<p>{escape(entry.definition)}</p>"
        yield _weighed({"location": f"glossary/#{entry.anchor}", "title": name, "text": text})


def _weighed(section: Section) -> Section:
    weight = next((weight for start, weight in WEIGHTS.items() if section["location"].startswith(start)), 1.0)
    return {**section, "boost": weight}
