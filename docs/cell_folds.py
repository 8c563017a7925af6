"""Which cells of a chapter the site folds or hides, so that the argument stands in front of the plumbing."""

from __future__ import annotations

import ast

SHOWN_BY_THEIR_OUTPUT = {"predict", "show", "so_far"}
SETUP = "Imports and setup"


def is_output_only(source: str) -> bool:
    """Whether a cell only calls a helper whose output says everything: a prediction, a listing, the table of speeds."""
    calls = [node.value for node in _statements(source) if isinstance(node, ast.Expr)]
    names = [ast.unparse(call.func).rpartition(".")[2] for call in calls if isinstance(call, ast.Call)]
    return 0 < len(names) == len(_statements(source)) and SHOWN_BY_THEIR_OUTPUT.issuperset(names)


def fold_title(source: str, *, draws: bool) -> str | None:
    """The words under which a cell's code is folded, or None if the page shows the code.

    Args:
        source: the cell's Python.
        draws: whether one of its outputs is a picture.
    """
    statements = _statements(source)
    if draws or (statements and all(_is_drawing_function(node) for node in statements)):
        return "Code of the figure"
    imports = sum(map(_lines, (node for node in statements if isinstance(node, ast.Import | ast.ImportFrom))))
    return SETUP if 0 < sum(map(_lines, statements)) <= 2 * imports else None


def _statements(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except SyntaxError:  # a shell command
        return []


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _is_drawing_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("draw")
