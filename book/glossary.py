"""The book's vocabulary, as docs/glossary.md defines it: each term, its chapter, and the words that it replaces.

    Page
    :   A fixed number of consecutive tokens' keys and values.
    :   *Chapter 6. Also: block (vLLM). Not: sheet.*

`Also` lists other names that readers meet elsewhere, `Not` lists words that the book avoids.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from book.paths import repository_root

_TERM = re.compile(
    r"^(?P<names>\S.*)\n:   (?P<definition>.+(?:\n    .+)*)\n"
    r":   \*Chapter (?P<chapter>\d+)\.(?: Also: (?P<also>.+?)\.)?(?: Not: (?P<avoid>.+?)\.)?\*$",
    re.MULTILINE,
)
_NO_PROSE = re.compile(
    r"\A---\n.*?\n---\n|^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)|\$[^$]*\$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Term:
    """One entry of the glossary.

    Attributes:
        names: the term and its other names.
        definition: the definition, as Markdown.
        chapter: number of the chapter that introduces the term.
        avoid: words that the book does not use for it.
    """

    names: tuple[str, ...]
    definition: str
    chapter: int
    avoid: tuple[str, ...]

    def is_introduced_in(self, markdown: str) -> bool:
        """Whether a chapter sets one of the names in bold type."""
        bold = re.findall(r"\*\*(.+?)\*\*", re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE))
        names = "|".join(map(re.escape, self.names))
        return any(re.search(rf"(?<!\w)(?:{names})", phrase.replace("`", ""), re.IGNORECASE) for phrase in bold)


def load(root: Path | None = None) -> list[Term]:
    """The terms of docs/glossary.md, in its order."""
    text = ((root or repository_root()) / "docs" / "glossary.md").read_text(encoding="utf-8")
    return [
        Term(
            names=(*_names(found["names"]), *_names(found["also"] or "")),
            definition=" ".join(found["definition"].split()),
            chapter=int(found["chapter"]),
            avoid=tuple(found["avoid"].split(", ")) if found["avoid"] else (),
        )
        for found in _TERM.finditer(text.partition("## Terms")[2])
    ]


def _names(text: str) -> list[str]:
    """The names in "Time per output token (TPOT, the average), other name": outside and inside of parentheses."""
    return [name for part in re.split(r"[(),]", text.replace("`", "")) if (name := part.strip())]


def prose(file: Path) -> str:
    """Return the prose of a file: Markdown without code, formulas and comments.

    Args:
        file: a .md or .toml file. TOML counts as prose from beginning to end.
    """
    text = file.read_text(encoding="utf-8")
    return _NO_PROSE.sub(" ", text) if file.suffix == ".md" else text


def avoided_words(text: str, terms: list[Term]) -> list[tuple[str, Term]]:
    """Every word in some prose that the glossary says to avoid, with the term to use in its place."""
    found = []
    for term in terms:
        for word in term.avoid:
            pattern = r"\s+".join(map(re.escape, word.split()))
            found += [(word, term)] * len(re.findall(rf"(?<![\w-]){pattern}(?![\w-])", text, re.IGNORECASE))
    return found
