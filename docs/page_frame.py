"""A page around its content: a description, names for its controls, and only the files that it uses."""

from __future__ import annotations

import re
from html import escape, unescape

from bs4 import Tag

FIRST_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
NAVIGATION = re.compile(r"<(/?)nav\b([^>]*)>")
INDENTATION = re.compile(r"<pre\b.*?</pre>|\s*\n\s*", re.DOTALL)
EMPTY_SHAPE = re.compile(r"></(?:path|use|rect|circle|line|polygon)>")
EMPTY_HEADER = re.compile(r"<th([^>]*)></th>")
NESTED = re.compile(r' data-md-level="[1-9]"')
TOC_TOGGLE = re.compile(r'<input[^>]*id="__toc"[^>]*>')
TITLE_OF_MODULE = re.compile(r"<h1[^>]*><code>([^<]+)")
INLINE_CODE = re.compile(r"(?<!<pre>)<code>([^<\n]+)</code>")
SPLIT_BY_BROWSERS = re.compile(  # dates, spaces before units; and, ahead of these, what stays as it is
    r"<(pre|code|svg|script|style)\b.*?</\1>|<[^>]+>"
    r"|\b\d{4}-\d\d-\d\d\b"
    r"|(?<=\d) (?=(?:%|[mµn]?s|[kMGT]?i?B(?:/s)?|[GT]?FLOPs?(?:/s)?|tokens?/s)(?!\w))",
    re.DOTALL,
)
FIGURES = ("softmax", "rope", "sampling", "pages", "trio", "pareto", "csr", "tree", "chunks")
# Scripts and style sheets that few pages use: the class of the elements they are for.
IS_FOR = {"_mkdocstrings": "doc", "trace": "trace-player", "trace_later": "trace-player-later"}
IS_FOR |= {name: f"{name}-figure" for name in FIGURES}
FILE = re.compile(
    rf'<(?:script src|link rel="stylesheet" href)="[^"]*/({"|".join(IS_FOR)})\.(?:js|css)"[^>]*>(?:</script>)?'
)
MOST_CHARACTERS = 200
SHORT_CODE, SHORT_WORD = 12, 32  # characters


def describe(content: str) -> str:
    """The first paragraph of a page as plain text, cut after a word."""
    found = FIRST_PARAGRAPH.search(content)
    text = " ".join(unescape(re.sub(r"<[^>]+>", "", found[1])).split()) if found else ""
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rpartition(" ")[0] + " …"


def keep_together(html: str) -> str:
    """Keep on one line what a browser would break: `h // G`, `--homework`, a date, a number and its unit."""

    def words(code: re.Match[str]) -> str:
        text = code[1]
        if len(unescape(text)) <= SHORT_CODE:
            return f'<code class="whole">{text}</code>' if re.search(r"[ -]", text) else code[0]
        parts = [
            f'<span class="whole">{word}</span>' if "-" in word and len(unescape(word)) <= SHORT_WORD else word
            for word in text.split(" ")
        ]
        return f"<code>{' '.join(parts)}</code>"

    def joined(found: re.Match[str]) -> str:
        if found[0] == " ":
            return "\N{NO-BREAK SPACE}"
        return f'<span class="whole">{found[0]}</span>' if found[0][0].isdigit() else found[0]

    return SPLIT_BY_BROWSERS.sub(joined, INLINE_CODE.sub(words, html))


def break_after_dots(html: str) -> str:
    """Let the title of a module's page break after a dot or an underscore, where a phone is too narrow for it."""
    return TITLE_OF_MODULE.sub(lambda title: re.sub(r"(?<=[._])(?=[^>]+$)", "<wbr>", title[0]), html)


def span_rows(table: Tag) -> None:
    """Say once what the first and the last cell of successive rows of a table repeat."""
    rows = [row.find_all("td") for row in table.find_all("tr")]
    for column in (0, -1):
        above = None
        for row in filter(None, rows):
            cell = row[column]
            if above is not None and cell.decode_contents() == above.decode_contents():
                above["rowspan"] = str(int(str(above.get("rowspan", "1"))) + 1)
                cell.decompose()
            else:
                above = cell


def one_landmark(html: str) -> str:
    """Make the sections inside a navigation groups of it, and not landmarks of their own."""
    is_nested: list[bool] = []  # of each element that is open

    def replaced(tag: re.Match[str]) -> str:
        closes, attributes = tag.groups()
        if not closes:
            is_nested.append(NESTED.search(attributes) is not None)
        nested = is_nested.pop() if closes else is_nested[-1]
        if not nested:
            return tag[0]
        return "</div>" if closes else f'<div role="group"{attributes}>'

    return NAVIGATION.sub(replaced, html)


def complete(html: str, title: str, description: str) -> str:
    """Add to a finished page what a shared link shows of it, name or remove controls, and remove files without use."""
    properties = {"og:type": "article", "og:title": title, "og:description": description}
    tags = "".join(f'<meta property="{name}" content="{escape(value)}">' for name, value in properties.items())
    html = html.replace("</head>", f"{tags}</head>", 1)
    html = html.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
    html = FILE.sub(lambda file: file[0] if re.search(rf'class="{IS_FOR[file[1]]}[" ]', html) else "", html)
    html = INDENTATION.sub(lambda text: "\n" if text[0].isspace() else text[0], EMPTY_SHAPE.sub("/>", html))
    html = EMPTY_HEADER.sub(r"<td\1></td>", one_landmark(html))  # a corner of a table is the header of nothing
    return html if 'for="__toc"' in html else TOC_TOGGLE.sub("", html)
