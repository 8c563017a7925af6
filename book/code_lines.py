"""How long the engine is: lines of code, without blank lines, comments and docstrings."""

import ast
import io
import tokenize
from pathlib import Path

from book.display import Table
from book.paths import repository_root

# The files that a step passes through.
STEP = (
    "core.py", "recovery.py", "scheduler.py", "policy.py", "request.py", "step_input.py", "batch.py", "executor.py",
    "decode_graphs.py", "sampling.py", "kv_cache/page_table.py", "kv_cache/paged.py",
)  # fmt: skip
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(source: str) -> int:
    """Count the lines of a Python source that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def markdown(root: Path | None = None) -> str:
    """A table of the engine's lines of code: its folders, the step, and the whole."""
    engine = (root or repository_root()) / "mini_engine"
    counts = {str(f.relative_to(engine)): count(f.read_text(encoding="utf-8")) for f in sorted(engine.rglob("*.py"))}
    folders: dict[str, int] = {}
    for name, lines in counts.items():
        folder = name.split("/")[0] + "/" if "/" in name else "top-level files"
        folders[folder] = folders.get(folder, 0) + lines
    rows = [[name, f"{lines:,}"] for name, lines in folders.items()]
    rows.append(["the step: " + ", ".join(f"`{name}`" for name in STEP), f"{sum(counts[name] for name in STEP):,}"])
    rows.append(["all of `mini_engine/`", f"{sum(counts.values()):,}"])
    return Table(["part of the engine", "lines of code"], rows).markdown()
