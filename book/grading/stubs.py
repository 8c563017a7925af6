"""Makes a chapter's homework.py from its solution: signatures and docstrings stay, the work is left to the reader."""

import ast
import doctest
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from book.grading.chapter import read_answers
from book.grading.submission import defined_names

Function = ast.FunctionDef | ast.AsyncFunctionDef


def make_stub(solution: str, exercises: Sequence[str], slug: str) -> str:
    """The text of homework.py for the text of a solution.

    Exercises keep signature and docstring. Other public definitions are kept whole; private ones (a leading
    underscore) and imports only where something kept uses them, the examples of a docstring included.
    """
    source = _Source(solution)
    tree = ast.parse(solution)
    if ast.get_docstring(tree) is None:
        raise ValueError(f"solutions/{slug}.py needs a module docstring: it opens the reader's homework.py")
    body = [
        _Piece(statement, source, exercises)
        for statement in tree.body[1:]
        if not isinstance(statement, ast.Expr | ast.If)  # such as `if __name__ == "__main__":`
    ]
    kept = [piece for piece in body if piece.is_public]
    while more := [piece for piece in body if piece not in kept and piece.names & _used(kept)]:
        kept += more
    pieces = [piece for piece in body if piece in kept]
    used = _used(pieces)

    docstring = source.cut(1, tree.body[0].end_lineno or 1).rstrip().removesuffix('"""').rstrip()
    text = [f'{docstring}\n\n{_HOW_TO.format(slug=slug)}"""\n']
    previous: _Piece | None = None
    for piece in pieces:
        block = piece.code(used)
        text.append("\n" * _blank_lines(previous, piece, source) + block + "\n")
        previous = piece
    return "".join(text)


WIDTH = 88
"""Columns of homework.py that the site shows without scrolling; solutions/ruff.toml formats the solutions to them."""

_HOW_TO = """\
The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/{slug}

    # the next of three hints for the exercise NAME
    pytest chapters/{slug} --hint NAME
"""


class _Source:
    """Lines of a file, cut by syntax tree nodes. Comments right above a node belong to it."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()

    def first_line(self, node: ast.stmt) -> int:
        decorators = getattr(node, "decorator_list", [])
        line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        while line > 1 and self.lines[line - 2].startswith("#"):
            line -= 1
        return line

    def cut(self, first: int, last: int) -> str:
        return "\n".join(self.lines[first - 1 : last])


class _Piece:
    """A statement at the top of the solution, as the reader gets it."""

    def __init__(self, statement: ast.stmt, source: _Source, exercises: Sequence[str]) -> None:
        self.statement = statement
        self.is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        self.is_exercise = not self.is_import and any(name in exercises for name in defined_names(statement))
        self._source = source

    @property
    def names(self) -> set[str]:
        if isinstance(self.statement, ast.Import | ast.ImportFrom):
            return {(alias.asname or alias.name).split(".")[0] for alias in self.statement.names}
        return set(defined_names(self.statement))

    @property
    def is_public(self) -> bool:
        return not self.is_import and any(not name.startswith("_") for name in self.names)

    @property
    def is_definition(self) -> bool:
        return isinstance(self.statement, Function | ast.ClassDef)

    def visible(self) -> Iterable[ast.AST]:
        """The parts of the syntax tree that the stub keeps."""
        if self.is_import:
            return
        if not (self.is_exercise and isinstance(self.statement, Function | ast.ClassDef)):
            yield self.statement
        elif isinstance(self.statement, ast.ClassDef):
            yield from [*self.statement.bases, *self.statement.keywords, *self.statement.decorator_list]
            yield from _examples(self.statement)
            for member in _members(self.statement):
                yield from _signature(member) if isinstance(member, Function) else [member]
        else:
            yield from _signature(self.statement)

    def code(self, used: set[str]) -> str:
        statement, source = self.statement, self._source
        first = source.first_line(statement)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return _import(statement, used, source)
        if not self.is_exercise or not isinstance(statement, Function | ast.ClassDef):
            return source.cut(first, statement.end_lineno or first)
        if isinstance(statement, ast.ClassDef):
            return self._class(statement, first)
        return self._function(statement, first)

    def _function(self, function: Function, first: int) -> str:
        indent = " " * (function.col_offset + 4)
        if ast.get_docstring(function) is None:
            last = function.body[0].lineno - 1
            while not self._source.lines[last - 1].rstrip().endswith(":"):  # comments above the first line of the body
                last -= 1
        else:
            last = function.body[0].end_lineno or first
        return f"{self._source.cut(first, last)}\n{indent}raise NotImplementedError"

    def _class(self, definition: ast.ClassDef, first: int) -> str:
        body = definition.body[0]
        header_end = body.end_lineno if ast.get_docstring(definition) else definition.lineno
        text = self._source.cut(first, header_end or first)
        for member in _members(definition):
            start = self._source.first_line(member)
            gap = "\n\n" if isinstance(member, Function) or member is _members(definition)[0] else "\n"
            code = (
                self._function(member, start)
                if isinstance(member, Function)
                else self._source.cut(start, member.end_lineno or start)
            )
            text += gap + code
        return text


def _members(definition: ast.ClassDef) -> list[ast.stmt]:
    """The fields and methods of a class that are not private to the solution."""
    return [
        member
        for member in definition.body
        if isinstance(member, Function | ast.AnnAssign | ast.Assign)
        and not any(re.match("_(?!_)", name) for name in defined_names(member))
    ]


def _signature(function: Function) -> list[ast.AST]:
    returns = [function.returns] if function.returns else []
    return [function.args, *function.decorator_list, *returns, *_examples(function)]


def _examples(definition: Function | ast.ClassDef) -> list[ast.AST]:
    """The code of the examples in a docstring."""
    examples = doctest.DocTestParser().get_examples(ast.get_docstring(definition) or "")
    return [ast.parse(example.source) for example in examples]


def _used(pieces: Iterable[_Piece]) -> set[str]:
    """The names that the pieces use as the reader gets them."""
    used = {"annotations"}  # from __future__
    for piece in pieces:
        for node in (node for part in piece.visible() for node in ast.walk(part)):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used.add(node.value)  # an annotation in quotes
    return used


def _import(statement: ast.Import | ast.ImportFrom, used: set[str], source: _Source) -> str:
    """An import with only the names that are used, laid out as ruff does."""
    names = [alias for alias in statement.names if (alias.asname or alias.name).split(".")[0] in used]
    if len(names) == len(statement.names):
        return source.cut(statement.lineno, statement.end_lineno or statement.lineno)
    statement.names = names
    line = ast.unparse(statement)
    if len(line) <= WIDTH:
        return line
    start, _, _ = line.partition(" import ")
    return "\n".join([f"{start} import (", *(f"    {ast.unparse(alias)}," for alias in names), ")"])


def _blank_lines(previous: _Piece | None, piece: _Piece, source: _Source) -> int:
    """Blank lines between two pieces: two around definitions and after imports one, as in the solution elsewhere."""
    if previous is None:
        return 1
    if previous.is_definition or piece.is_definition:
        return 2
    if previous.is_import != piece.is_import:
        return 1
    between = source.lines[previous.statement.end_lineno or 0 : source.first_line(piece.statement) - 1]
    return 1 if "" in between else 0


def write_stub(path: Path, stub: str, backups: Path, *, force: bool) -> str:
    """Writes a stub to `path`; returns a sentence about it. With `force` a file that differs is moved to `backups`.

    Raises:
        FileExistsError: the file differs from the stub, so it may hold the reader's work, and `force` is not given.
    """
    if not path.exists():
        path.write_text(stub, encoding="utf-8")
        return f"Wrote {path}."
    if read_answers(path) == stub:
        return f"{path} is fresh already."
    if not force:
        raise FileExistsError(f"{path} has been edited, and is left alone. --force starts it afresh and keeps a copy.")
    backups.mkdir(parents=True, exist_ok=True)
    backup = backups / f"{path.parent.name}_{time.strftime('%Y%m%d_%H%M%S')}.py"
    path.rename(backup)
    path.write_text(stub, encoding="utf-8")
    return f"Wrote {path} afresh. The old file is {backup}."
