"""Source code in fewer columns: what the book shows of the engine has to fit on its pages."""

import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator

COLUMNS = 88  # of code; the site shows no more without scrolling
_PRAGMA = re.compile(r"\s*# (?:fmt: (?:skip|off|on)|type: ignore.*|noqa.*)$", re.MULTILINE)
_NEW_ITEM = re.compile(r"\s*(?:- |>>> |\.\.\. |`?\w+`?(?:, `?\w+`?)*:(?: |$))")  # and the fields of docstrings


def fit(source: str, columns: int = COLUMNS) -> str:
    """Return source code in at most `columns` columns, as far as its strings allow it.

    Docstrings and comments are filled, a comment at the end of a long line comes before it, and ruff formats the rest.
    Instructions to formatters and type checkers are left out.

    Args:
        source: a module, or a class or a function as it stands in one, with its indentation.
        columns: most columns of a line.
    """
    if all(len(line) <= columns for line in source.splitlines()):
        return source
    text = textwrap.dedent(source)
    indent = source[: source.index(text[0])]
    width = columns - len(indent)
    filled = "\n".join(_fill(_PRAGMA.sub("", text), width))
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(width), "-"]
    run = subprocess.run(command, input=_comments_first(filled, width), capture_output=True, text=True, check=True)
    return textwrap.indent(run.stdout, indent).rstrip()


def _fill(text: str, width: int) -> Iterator[str]:
    """Break the lines of prose that are too long, and carry what does not fit into the lines that continue them."""
    lines, prose = text.splitlines(), _prose(text)
    carried, start = "", ""  # the start is the indentation of the line that follows, with the mark of a comment
    for number, line in enumerate(lines):
        if carried:
            body = line.removeprefix(start)
            continues = number in prose and line.startswith(start) and body[:1] not in ("", " ", '"')
            if continues and not _NEW_ITEM.match(body):
                line = f"{start}{carried} {body}"
            else:
                yield start + carried
            carried = ""
        if line.endswith("---"):  # the rule above a section
            line = line[:width]
        if number in prose and len(line) > width:
            start, following = _start(line), _start(lines[number + 1]) if number + 1 in prose else ""
            if _NEW_ITEM.match(line) or (following.startswith(start) and not start.endswith("# ")):
                start = max(following, start + "    " if _NEW_ITEM.match(line) else start, key=len)
            first, *rest = _wrap(line, width, start)
            for own in rest:
                yield first
                first = own
            line, carried = (first, "") if not rest else ("", first.removeprefix(start))
        if line or not carried:
            yield line
    if carried:
        yield start + carried


def _wrap(line: str, width: int, start: str) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=start, break_long_words=False, break_on_hyphens=False)


def _prose(text: str) -> set[int]:
    """Return the numbers of the lines that belong to docstrings, or are comments."""
    prose: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_comment = token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        if is_comment or (token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""'))):
            prose.update(range(token.start[0] - 1, token.end[0]))
    return prose


def _start(line: str) -> str:
    match = re.match(r"\s*(?:# )?", line)
    assert match is not None
    return match[0]


def _comments_first(text: str, width: int) -> str:
    """Move the comments at the ends of lines that are too long to lines of their own."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or len(token.line.rstrip()) <= width:
            continue
        number, column = token.start[0] - 1, token.start[1]
        line = lines[number]
        if line[:column].strip():
            start = line[: len(line) - len(line.lstrip())]
            comment = _wrap(start + token.string, width, f"{start}# ")
            lines[number] = "\n".join([*comment, line[:column].rstrip()])
    return "\n".join(lines) + "\n"
