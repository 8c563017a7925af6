"""Fewer elements for the colors of code: one for neighbors of one color, none for what has the color of text."""

from __future__ import annotations

import re

CODE = re.compile(r"<pre>.*?</pre>", re.DOTALL)
# Classes of Pygments, whose colors are in stylesheets/book.css.
TEXT = re.compile(r'<span(?: class="(?:n|w|kc|sa|fm|vm)")?>([^<]*)</span>')
OPERATOR = re.compile(r'<span class="ow?">')  # has the color of punctuation
NEIGHBORS = re.compile(r'(<span class="(\w+)">[^<]*)</span>( *)<span class="\2">')


def merge_colors(html: str) -> str:
    """A page whose code looks the same."""
    return CODE.sub(lambda code: _merged(code[0]), html)


def _merged(code: str) -> str:
    code = OPERATOR.sub('<span class="p">', TEXT.sub(r"\1", code))
    count = 1
    while count:
        code, count = NEIGHBORS.subn(r"\1\3", code)
    return code
