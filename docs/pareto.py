"""The rates that chapter 16's Pareto figure shows, as a table: experiment 21's records by batch size.

The figure's script reads the table and takes its place. Without JavaScript the table stays.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from book import results
from book.units import number, quantity

EXPERIMENT = "21_latency_under_load"
BOX = re.compile(r'<div class="pareto-figure">.*?</div>', re.DOTALL)
HEAD = "batch size", "tokens/s of the machine", "tokens/s of each user", "time between tokens"


def fill(html: str, root: Path) -> str:
    """Put the recorded rates into the boxes of a page that are for the figure.

    Args:
        html: the page.
        root: where experiments/ is.
    """
    return BOX.sub(lambda _: _box(root), html) if BOX.search(html) else html


def curves(root: Path) -> dict[str, dict[int, float]]:
    """Return the recorded tokens/s of each engine, device, and model, by batch size."""
    found = dict[str, dict[int, float]]()
    for result in results.load(EXPERIMENT, root):
        for row in result.rows:
            if row.case.get("section") == "pareto":
                name = f"{row.case['engine']}, {result.device}, {row.case['model']} in {row.case['dtype']}"
                found.setdefault(name, {})[int(row.case["batch size"])] = row.value
    return {name: dict(sorted(rates.items())) for name, rates in found.items()}


def _box(root: Path) -> str:
    bodies = "".join(
        f'<tbody data-curve="{escape(name)}"><tr><th colspan="{len(HEAD)}">{escape(name)}</th></tr>'
        f"{''.join(_row(size, rate) for size, rate in rates.items())}</tbody>"
        for name, rates in curves(root).items()
    )
    if not bodies:
        return "<p>Nothing is recorded yet.</p>"
    head = "".join(f"<th>{text}</th>" for text in HEAD)
    return f'<div class="pareto-figure"><table><thead><tr>{head}</tr></thead>{bodies}</table></div>'


def _row(size: int, rate: float) -> str:
    cells = f"{size}", number(rate), number(rate / size), quantity(size / rate, "s")
    return f'<tr data-batch-size="{size}" data-rate="{rate}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
