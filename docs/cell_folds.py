"""Which cells of a chapter the site folds or hides, so that the argument stands in front of the plumbing."""

from __future__ import annotations

import ast

SHOWN_BY_THEIR_OUTPUT = {"predict", "show", "so_far"}
SETUP = "Imports and setup"
IMPORTS = (ast.Import, ast.ImportFrom)


def is_output_only(source: str) -> bool:
    """Whether a cell only calls a helper whose output says everything: a prediction, a listing, the table of speeds.

    The imports and the text that such a call needs do not count.
    """
    rest = [node for node in _statements(source) if not isinstance(node, IMPORTS) and not _is_text(node)]
    calls = [node.value for node in rest if isinstance(node, ast.Expr)]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls if isinstance(call, ast.Call)]
    return 0 < len(names) == len(rest) and SHOWN_BY_THEIR_OUTPUT.issuperset(names)


def fold_title(source: str, *, draws: bool) -> str | None:
    """The words under which a cell's code is folded, or None if the page shows the code.

    Args:
        source: the cell's Python.
        draws: whether one of its outputs is a picture.
    """
    statements = _statements(source)
    if draws or (statements and all(_is_drawing_function(node) for node in statements)):
        return "Code for the figure"
    imports = sum(map(_lines, (node for node in statements if isinstance(node, IMPORTS))))
    is_short = 0 < sum(map(_lines, statements)) <= 2 * imports
    return SETUP if is_short and not any(map(_is_argument, statements)) else None


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:  # a shell command
        return []


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement gives a name to a text."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_argument(node: ast.stmt) -> bool:
    """Whether a statement defines a function or prints, so that the text refers to it."""
    return any(
        isinstance(part, ast.FunctionDef)
        or (isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "print")
        for part in ast.walk(node)
    )


def _is_drawing_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("draw")
