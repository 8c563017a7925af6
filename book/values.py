"""Numbers in prose that are read from records: a comment behind a number says which value it is.

    A step takes 445 µs<!-- = [decode step; keys 384; one kernel @ 12_persistent_layer] -->.

The comment is invisible on GitHub, in JupyterLab and on the site. It is arithmetic over values of records. A value is
written as `[figure; case; case @ experiment device]`:

- the figure and the entries of its case that select one row, as the tables of results show them: "keys 384" or "384";
- the experiment, which its own README may omit, and a part of the device's name, which may be omitted if there is one
  record;
- `.bound`, `.share` (of the bound), `.low` or `.high` (ends of the spread) behind the bracket for another number.

The number keeps its unit and its decimals. A number without a unit behind it names it: `<!-- = [...] in ms -->`.
`python -m book values` writes all numbers anew.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from book import results
from book.paths import repository_root

UNITS = {
    **{"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0},
    **{"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    **{"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "tokens/s": 1.0, "%": 0.01},
}
_UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
_STATED = re.compile(
    rf"(?P<number>\d[\d,]*(?:\.(?P<decimals>\d+))?)(?P<behind>[ \N{{NO-BREAK SPACE}}]?(?P<unit>{_UNIT}))?"
    rf"(?P<comment><!-- = (?P<source>.*?)(?: in (?P<other>{_UNIT}))? -->)",
    re.DOTALL,
)
_REFERENCE = re.compile(r"\[([^\]]*)\](?:\.(bound|share|low|high)\b)?")
_ARITHMETIC = {"__builtins__": {}, "min": min, "max": max}


def refreshed(text: str, experiment: str | None = None, root: Path | None = None) -> str:
    """Return a Markdown text with all numbers that name their source as the records have them.

    Args:
        text: the Markdown.
        experiment: the experiment of references that name none.
        root: the repository.

    Raises:
        ValueError: a source selects no row of a record, or several.
    """

    def written(stated: re.Match[str]) -> str:
        value = _evaluate(" ".join(stated["source"].split()), experiment, root)
        scale = UNITS[stated["unit"] or stated["other"] or "s"]
        return f"{value / scale:,.{len(stated['decimals'] or '')}f}{stated['behind'] or ''}{stated['comment']}"

    return _STATED.sub(written, text)


def without_sources(text: str) -> str:
    """Return a text, Markdown or HTML, without the comments that name the sources of its numbers."""
    return re.sub(r"<!-- = .*? -->", "", text, flags=re.DOTALL)


def texts(root: Path) -> Iterator[Path]:
    """Yield the Markdown files whose numbers may name sources."""
    for pattern in ("README.md", "book/README.md", "docs/**/*.md", "experiments/*/README.md", "chapters/*/*.md"):
        yield from sorted(root.glob(pattern))


def refresh(file: Path, root: Path | None = None) -> bool:
    """Write the numbers of a Markdown file as the records have them; return whether one of them was stale."""
    text = _refreshed_file(file, root)
    differs = text != file.read_text(encoding="utf-8")
    if differs:
        file.write_text(text, encoding="utf-8")
    return differs


def is_stale(file: Path, root: Path | None = None) -> bool:
    """Whether a number of a Markdown file differs from the record that it names."""
    return _refreshed_file(file, root) != file.read_text(encoding="utf-8")


def values(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a number is stale.")] = False,
) -> None:
    """Write the numbers in prose that name their source as the records have them."""
    from book import notebooks

    failed = False
    for file in texts(repository_root()):
        try:
            if not (is_stale(file) if check else refresh(file)):
                continue
        except ValueError as error:
            typer.echo(f"{error}: name another row in the text", err=True)
            failed = True
            continue
        typer.echo(f"{file.parent.name}/{file.name}: {'stale' if check else 'refreshed; read what has changed'}")
        failed = failed or check
        if not check and file.with_suffix(".ipynb").exists():
            notebooks.text(file.stem)
    if failed:
        typer.echo("Run `python -m book values` after a new record.", err=True)
        raise typer.Exit(1)


def _refreshed_file(file: Path, root: Path | None) -> str:
    experiment = file.parent.name if file.parent.parent.name == "experiments" else None
    try:
        return refreshed(file.read_text(encoding="utf-8"), experiment, root)
    except ValueError as error:
        raise ValueError(f"{file.parent.name}/{file.name}: {error}") from error


def _evaluate(source: str, experiment: str | None, root: Path | None) -> float:
    """Compute a source such as `[a] / [b @ 09_fused_kernels] - 1`."""
    expression = _REFERENCE.sub(lambda found: repr(_value(found[1], found[2], experiment, root)), source)
    try:
        return float(eval(expression, dict(_ARITHMETIC)))
    except (SyntaxError, NameError, TypeError) as error:
        raise ValueError(f"`{source}` is no arithmetic over values of records: {error}") from error


def _value(selector: str, attribute: str | None, experiment: str | None, root: Path | None) -> float:
    row_text, _, record = selector.partition("@")
    figure, *case = (term.strip() for term in row_text.split(";"))
    name, _, device = record.strip().partition(" ")
    if name and not re.match(r"\d\d_", name):
        name, device = "", f"{name} {device}".strip()
    rows = [
        row
        for result in results.load(name or experiment or "", root)
        if device.lower() in result.device.lower()
        for row in result.rows
        if row.figure == figure and all(_has(row, term) for term in case)
    ]
    if len(rows) != 1:
        raise ValueError(f"[{selector}] selects {len(rows)} rows of the records of {name or experiment}, not one")
    [row] = rows
    low, high = row.spread or (row.value, row.value)
    numbers = {None: row.value, "bound": row.bound, "share": row.share_of_bound, "low": low, "high": high}
    number = numbers[attribute]
    if number is None:
        raise ValueError(f"[{selector}] has no {attribute}")
    return number


def _has(row: results.Row, term: str) -> bool:
    return any(term in (str(value), f"{key} {value}") for key, value in row.case.items())
