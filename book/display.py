"""Small things that a notebook displays: source code of the package, diagrams, and tables."""

import html
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from book.source_width import fit


@dataclass(frozen=True)
class Shown:
    """Something that a notebook displays as Markdown, and a terminal as plain text."""

    markdown: str
    text: str

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.text


def show(thing: ModuleType | type | Callable[..., object], fold: str = "") -> Shown:
    """Show the current source code of a module, class or function, with syntax highlighting.

    Lines are at most 88 columns, which the site shows without scrolling (`source_width.fit`).

    `fold` is the title of a box that hides the source, such as an answer to the homework, until the reader opens it.
    """
    module = inspect.getmodule(thing)
    if module is None:
        raise ValueError(f"{thing!r} has no module to read its source from")
    file, root = Path(str(inspect.getsourcefile(module))).resolve(), Path(__file__).resolve().parents[1]
    path = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
    source = fit(inspect.getsource(thing).rstrip())
    where = path if isinstance(thing, ModuleType) else f"{getattr(thing, '__qualname__', thing)} in {path}"
    title = f"`{path}`" if isinstance(thing, ModuleType) else f"`{getattr(thing, '__qualname__', thing)}` in `{path}`"
    # Four backticks: a docstring may contain a fence of three.
    markdown = f"{title}\n\n````python\n{source}\n````"
    if fold:
        markdown = f"<details>\n<summary>{html.escape(fold)}</summary>\n\n{markdown}\n\n</details>"
    return Shown(markdown, f"# {where}\n{source}")


def mermaid(diagram: str) -> Shown:
    """Show a mermaid diagram that code has generated. A fixed one belongs in a ```mermaid fence of a Markdown cell."""
    diagram = inspect.cleandoc(diagram)
    return Shown(f"```mermaid\n{diagram}\n```", diagram)


def caption_html(caption: str) -> str:
    """Return the caption of a table or a figure as HTML; text in backticks becomes code."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(caption))
    return f'<p class="figure-caption"><em>{text}</em></p>'


@dataclass(frozen=True)
class Table:
    """A table: a header, rows of text, and an optional one-line caption."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{table}\n\n{self.caption}" if self.caption else table

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f'<{tag} style="text-align:left">{html.escape(c)}</{tag}>' for c in cells) + "</tr>"

        body = "".join(line("td", row) for row in self.rows)
        caption = caption_html(self.caption) if self.caption else ""
        return f'<table class="book-table"><thead>{line("th", self.head)}</thead><tbody>{body}</tbody></table>{caption}'

    def __repr__(self) -> str:
        widths = [max(len(row[i]) for row in [self.head, *self.rows]) for i in range(len(self.head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [self.head, *self.rows]
        ]
        return "\n".join([*lines, self.caption] if self.caption else lines)
