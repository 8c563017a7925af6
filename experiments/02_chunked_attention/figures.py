"""Figures of this experiment, drawn from a recorded result.

result = book.results.recorded("02_chunked_attention", "Xeon")
book.figures.show(chunk_size_figure(result), "...")
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from book import figures
from book.results import Result, Row
from book.units import quantity

BOUND = {"memory": "the output alone", "time": "bound"}


def growth_figure(result: Result, work: str, measure: str) -> Axes:
    """Plot how the "memory" or the "time" of one kind of work ("prompt", "piece", "decode") grows with the keys."""
    rows = [row for row in result.rows if row.figure == f"{work}: {measure}"]
    keys = sorted({int(row.case["keys"]) for row in rows})
    lines = {way: [_value(rows, way, count) for count in keys] for way in ("naive", "chunks", "fused")}
    bounds = {int(row.case["keys"]): row.bound for row in rows}
    lines[BOUND[measure]] = [bounds[count] or math.nan for count in keys]
    ylabel, unit = {"memory": ("memory at the peak", "B"), "time": ("time", "s")}[measure]
    ax = figures.draw_lines(keys, lines, xlabel="keys", ylabel=ylabel, log=True)
    ax.yaxis.set_major_formatter(lambda y, _: quantity(y, unit, 1))
    return ax


def chunk_size_figure(result: Result) -> Axes:
    """Plot the speed relative to naive attention for each kind of work and tile size."""
    ax = figures.new(3.8)[1][0, 0]
    sizes: set[int] = set()
    for i, work in enumerate(("prompt", "piece", "decode")):
        rows = [row for row in result.rows if row.figure == f"{work}: time by chunk size"]
        naive = next(row for row in rows if row.case["way"] == "naive")
        points = [(int(row.case["chunk"]), naive.value / row.value) for row in rows if "chunk" in row.case]
        queries, keys = naive.case["queries"], naive.case["keys"]
        label = f"{work}: {queries:,} {'query' if queries == 1 else 'queries'}, {keys:,} keys"
        ax.plot(*zip(*points, strict=True), marker="osD"[i], color=figures.PALETTE[i], label=label)
        sizes |= {size for size, _ in points}
    ax.axhline(1, color=figures.INK, linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(powers := [size for size in sorted(sizes) if math.log2(size) % 2 == 0], [f"{x:,}" for x in powers])
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}" if y >= 1 else f"1/{1 / y:g}")
    ax.set(xlabel="keys per tile", ylabel="times as fast as naive")
    ax.grid(True)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def _value(rows: Sequence[Row], way: str, keys: int) -> float:
    """Return the value, or NaN, which is not drawn, where this way did not run."""
    return next((row.value for row in rows if row.case["way"] == way and row.case["keys"] == keys), math.nan)
