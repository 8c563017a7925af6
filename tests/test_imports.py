"""The import graph of the engine has no circle, not even through an import inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import mini_engine

ROOT = Path(mini_engine.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the engine, by name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, except what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (inner for other in child.orelse for inner in (other, *executed(other)))
        else:
            yield child
            yield from executed(child)


def imported(path: Path, names: set[str]) -> set[str]:
    """Modules that a file imports: each the module itself, not the packages around it, which are empty."""
    found = set()
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & names or {node.module}
    return found


def test_no_module_imports_itself_through_others() -> None:
    files = modules()
    graph = {name: imported(path, set(files)) & set(files) - {"mini_engine"} for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' <- '.join(error.args[1])}") from None


def test_the_engine_does_not_import_the_book() -> None:
    """Only the command line does, for `--homework`, and says so where the book is absent."""
    files = modules()
    importers = {
        name for name, path in files.items() if any(n.split(".")[0] == "book" for n in imported(path, set(files)))
    }
    assert importers <= {"mini_engine.cli_options"}
