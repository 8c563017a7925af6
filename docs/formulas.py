"""Set formulas when the site is built: a page needs KaTeX's style sheet and fonts, and no script."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from html import escape, unescape

import quickjs
from bs4 import BeautifulSoup, Tag
from fetch_assets import package_folder

# As Markdown leaves them in a notebook's text, and as `mark` and pymdownx.arithmatex leave them in a page.
IN_TEXT = re.compile(r"\$\$(.+?)\$\$|(\\begin\{(equation|align)\}.+?\\end\{\3\})|\$([^$]+)\$", re.DOTALL)
MARKED = re.compile(r'(?<= class="arithmatex">)\\[(\[](.*?)\\([)\]])(?=</)', re.DOTALL)
SHORT = 24  # characters of TeX
RENDER = """
function render(tex, displayMode) {
  try {
    return JSON.stringify({ html: katex.renderToString(tex, { displayMode }) });
  } catch (error) {
    return JSON.stringify({ error: error.message });
  }
}"""


class FormulaError(Exception):
    """A formula cannot be set; the message says which, and why."""


def mark(text: Tag) -> None:
    """Mark the formulas in a notebook's text, as `pymdownx.arithmatex` does in a Markdown page."""
    for piece in text.find_all(string=IN_TEXT):
        if piece.find_parent(["code", "pre"]) is None:
            html = IN_TEXT.sub(_marked, escape(piece, quote=False))
            piece.replace_with(BeautifulSoup(html, "html.parser"))


def _marked(formula: re.Match[str]) -> str:
    *display, inline = formula.group(1, 2, 4)
    tex = rf"\({inline}\)" if inline else rf"\[{next(filter(None, display))}\]"
    return f'<span class="arithmatex">{tex}</span>'


def insert(html: str, style_sheet: str) -> str:
    """A page with its formulas set, and a link to KaTeX's style sheet if it has any; raises `FormulaError`."""
    render = _renderer()
    if render is None:
        return html
    html, count = MARKED.subn(lambda formula: _set(render, unescape(formula[1]), formula[2] == "]"), html)
    return html.replace("</head>", f'<link rel="stylesheet" href="{style_sheet}"></head>', 1) if count else html


def _set(render: Callable[[str, bool], str], tex: str, display: bool) -> str:
    answer = json.loads(render(tex, display))
    if "error" in answer:
        raise FormulaError(f"the formula ${tex}$ cannot be set: {answer['error']}")
    is_whole = not display and len(tex) <= SHORT  # one line, if it is short enough for a phone
    return answer["html"].replace('class="katex"', 'class="katex whole"', 1) if is_whole else answer["html"]


@functools.cache
def _renderer() -> Callable[[str, bool], str] | None:
    """KaTeX in a JavaScript engine, or None where docs/fetch_assets.py could not fetch it."""
    file = package_folder("katex") / "dist/katex.min.js"
    if not file.exists():
        return None
    context = quickjs.Context()  # a `quickjs.Function` would collect garbage after every call
    context.eval(file.read_text(encoding="utf-8") + RENDER)
    return context.get("render")
