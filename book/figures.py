"""The style of the book's figures, and the drawings that several chapters use.

Every helper draws on the axes it is given, or on a new figure, and returns the axes:

    figures.show(figures.draw_mask(mask, title="causal"), "Each token sees itself and what came before.")

Figures are SVG. On a page of the site they use the page's ink, paper, and font; on their own, on GitHub or in Jupyter,
they are black on a white card. Only ink and paper follow the color scheme, so the colors of `PALETTE` have a contrast
of at least 3:1 on both papers. They are Okabe and Ito's, which color-blind readers can tell apart, with orange, sky
blue, and yellow darkened. Grays are translucent. Text on a color of `PALETTE` is in `text_on(color)`.
"""

import hashlib
import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.typing import ColorType
from torch import Tensor

from book.display import caption_html
from book.units import number, quantity

if TYPE_CHECKING:
    from mini_engine.roofline import Cost, Machine

PALETTE = ("#0072B2", "#C98500", "#009E73", "#CC79A7", "#3D9AD6", "#D55E00", "#A89200", "#7F7F7F")
INK, PAPER, GRID, HIDDEN = "#222222", "#ffffff", "#7F7F7F59", "#7F7F7F2B"
# Translucent, so that ink is readable on every value, on light paper and on dark; small values show their sign.
AMOUNT = LinearSegmentedColormap.from_list("amount", ["#0072B200", "#0072B2A6"]).with_extremes(bad=HIDDEN)
_SIGNS = [(0.0, "#C98500A6"), (0.5, "#C985001F"), (0.5, "#0072B21F"), (1.0, "#0072B2A6")]
SIGNED = LinearSegmentedColormap.from_list("signed", _SIGNS).with_extremes(bad=HIDDEN)
_WIDTH, _DPI, _PIXELS = 6.0, 160, 600
_FONTS = "'Source Sans 3', 'DejaVu Sans', sans-serif"  # text is laid out in the second, which is wider
_MARKERS = "osD^vPX*"
# Up to this many cells per row, cells have text and borders; with more, both would blur.
_READABLE_CELLS = 24

Values = Tensor | np.ndarray | Sequence[Sequence[float]]


def use_style() -> None:
    """Make the book's style the default of every figure drawn from now on."""
    mpl.rcParams.update(
        {
            "figure.facecolor": PAPER,
            "figure.figsize": (_WIDTH, 3.4),
            "figure.dpi": _DPI,
            "figure.constrained_layout.use": True,
            "figure.constrained_layout.h_pad": 0.1,
            "figure.constrained_layout.w_pad": 0.1,
            "savefig.facecolor": PAPER,
            "font.family": "DejaVu Sans",
            "font.size": 12,
            "axes.titlesize": 13,
            "axes.labelsize": 12,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=PALETTE),
            "grid.color": GRID,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "legend.frameon": False,
            "legend.fontsize": 11,
            "lines.linewidth": 2.2,
            "lines.markersize": 7,
        }
    )


def new(height: float = 3.4, columns: int = 1, rows: int = 1) -> tuple[Figure, np.ndarray]:
    """A figure of the book's width, `height` inches high, and its axes as an array of shape [rows, columns]."""
    use_style()
    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.subplots(rows, columns, squeeze=False)


def to_png(drawn: Axes | Figure) -> bytes:
    """The figure as PNG, the same bytes each time."""
    file = io.BytesIO()
    # Without Software the file names matplotlib's version.
    _figure(drawn).savefig(file, format="png", dpi=_DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return file.getvalue()


def to_svg(drawn: Axes | Figure) -> str:
    """The figure as SVG, the same each time. Its text stays text, and no other figure of a page has its ids."""
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "book"}):
        _figure(drawn).savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue().partition("<svg")[2].partition(">")[2]
    # matplotlib's style sheet would apply to the whole page; comments repeat formulas.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r' (?:d|x|y)="[^"]+"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    svg = re.sub(r"font-family: [^;\"]+;? ?", "", svg).replace(INK, "currentColor")
    # White text is on a color; everything else that is white is paper.
    svg = re.sub(r"<(?!text|tspan)\w+ [^>]*", lambda tag: tag[0].replace(PAPER, f"var(--figure-paper, {PAPER})"), svg)
    name, used = hashlib.sha256(svg.encode()).hexdigest()[:8], set(re.findall(r'(?:url\(|href=")#(\w+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: f' id="f{name}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#f{name}-", svg)
    width, height = _figure(drawn).get_size_inches()
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {72 * width:g} {72 * height:g}" width="{_PIXELS}" height="{_PIXELS * height / width:.0f}" '
        f'stroke-linejoin="round" style="font-family: {_FONTS}">{svg}'
    )


def show(drawn: Axes | Figure, caption: str) -> None:
    """Display a figure, with one line below it that states what the figure shows.

    The PNG is for JupyterLab, which does not show the SVG of a notebook that was run on another machine.
    """
    data = {"image/svg+xml": to_svg(drawn), "image/png": to_png(drawn), "text/plain": f"Figure: {caption}"}
    from IPython.display import display  # experiments draw without it, on a machine that has no notebooks

    display(data, raw=True, metadata={"image/png": {"width": _PIXELS, "alt": caption}})
    display({"text/html": caption_html(caption), "text/plain": caption}, raw=True)


def text_on(color: ColorType) -> str:
    """The color of text on a fill: white or black on an opaque one, ink on one that lets the paper through."""
    red, green, blue, alpha = to_rgba(color)
    if alpha < 1:
        return INK
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if luminance < 0.18 else "black"


def draw_mask(
    mask: Values,
    *,
    ax: Axes | None = None,
    title: str = "",
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    owners: Sequence[int] | None = None,
) -> Axes:
    """A mask [queries, keys]: visible cells in color, hidden ones in gray. `owners[i]` picks the color of query i."""
    values = _array(mask) != 0
    rows, columns = values.shape
    ax = ax or _square_axes(rows, columns)
    colors = [PALETTE[owner % len(PALETTE)] for owner in owners] if owners is not None else [PALETTE[0]] * rows
    image = np.empty((rows, columns, 4))
    image[:] = to_rgba(HIDDEN)
    for row, color in enumerate(colors):
        image[row, values[row]] = to_rgba(color)
    ax.imshow(image, interpolation="none", aspect="equal")
    _cell_borders(ax, rows, columns)
    _cell_labels(ax, rows, columns, queries, keys)
    ax.set(xlabel="key", ylabel="query", title=title)
    return ax


def draw_blocks(mask: Values, block: tuple[int, int], *, ax: Axes | None = None, title: str = "") -> Axes:
    """A mask as a block-sparse kernel computes it, in blocks of `block` queries and keys.

    Blue: visible pairs of partial blocks. Green: full blocks. Orange: hidden pairs, computed because their block is
    visited. Gray: skipped blocks.
    """
    visible = _array(mask) != 0
    rows, columns = visible.shape
    image = np.empty((rows, columns, 4))
    for top in range(0, rows, block[0]):
        for left in range(0, columns, block[1]):
            pairs = np.s_[top : top + block[0], left : left + block[1]]
            seen, inside = PALETTE[2] if visible[pairs].all() else PALETTE[0], visible[pairs].any()
            image[pairs] = to_rgba(PALETTE[1] if inside else HIDDEN)
            image[pairs][visible[pairs]] = to_rgba(seen)
    ax = ax or _square_axes(rows, columns)
    ax.imshow(image, interpolation="none", aspect="auto")
    ax.set_xticks(np.arange(0, columns, block[1]) - 0.5, [])
    ax.set_yticks(np.arange(0, rows, block[0]) - 0.5, [])
    ax.grid(color=PAPER, linewidth=1.2)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(title, fontsize=12)
    return ax


def draw_matrix(
    values: Values,
    *,
    ax: Axes | None = None,
    title: str = "",
    digits: int = 2,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    vmax: float | None = None,
    visible: Values | None = None,
) -> Axes:
    """A matrix with its values in the cells: blue grows with the value; where some are negative, orange is below 0.

    `vmax` is the value of the strongest blue (default: the largest), for matrices that the reader compares. A cell that
    is False in `visible` is gray.
    """
    matrix = np.atleast_2d(_array(values))
    height, width = matrix.shape
    ax = ax or _square_axes(height, width)
    gray = ~np.isfinite(matrix) if visible is None else ~np.isfinite(matrix) | (np.atleast_2d(_array(visible)) == 0)
    finite = matrix[np.isfinite(matrix)]
    largest = vmax or (float(np.abs(finite).max()) if finite.size else 1.0)
    signed = bool((finite < 0).any())
    shown, colors = np.ma.masked_array(matrix, gray), SIGNED if signed else AMOUNT
    lowest = -largest if signed else 0
    ax.imshow(shown, cmap=colors, vmin=lowest, vmax=largest or 1.0, interpolation="none", aspect="equal")
    if max(height, width) <= _READABLE_CELLS // 2:
        size = min(12.0, 75 / max(width, height * 0.7))
        for i in range(height):
            for j in range(width):
                text = f"{matrix[i, j]:.{digits}f}" if math.isfinite(matrix[i, j]) else number(matrix[i, j])
                ax.text(j, i, text, ha="center", va="center", fontsize=size)
    _cell_borders(ax, height, width)
    _cell_labels(ax, height, width, rows, columns)
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return ax


def draw_ragged(
    indptr: Sequence[int] | Tensor,
    labels: Sequence[str],
    *,
    ax: Axes | None = None,
    title: str = "",
    tokens: Sequence[str] | None = None,
) -> Axes:
    """Sequences of unequal length laid end to end, above `indptr`: sequence i is cells indptr[i] to indptr[i+1]."""
    bounds = [int(bound) for bound in indptr]
    total = bounds[-1]
    ax = ax or new(1.9)[1][0, 0]
    for owner, (start, end) in enumerate(itertools.pairwise(bounds)):
        color = PALETTE[owner % len(PALETTE)]
        for cell in range(start, end):
            ax.add_patch(Rectangle((cell, 0), 1, 1, facecolor=color, edgecolor=PAPER, linewidth=1.5))
            if total <= _READABLE_CELLS:
                text = tokens[cell] if tokens is not None else str(cell - start)
                ax.text(cell + 0.5, 0.5, text, ha="center", va="center", color=text_on(color), fontsize=11)
        if end > start:
            ax.text((start + end) / 2, 1.15, labels[owner], ha="center", va="bottom", fontsize=11)
    for bound in sorted(set(bounds)):
        ax.plot([bound, bound], [-0.25, 1], color=INK, linewidth=1.5, clip_on=False)
        ax.text(bound, -0.35, str(bound), ha="center", va="top", fontsize=11)
    ax.text(-0.02 * total, -0.35, "indptr", ha="right", va="top", fontsize=11)
    ax.set(xlim=(-0.02 * total, total * 1.02), ylim=(-0.9, 1.7), title=title)
    ax.set_axis_off()
    return ax


def draw_roofline(
    machine: "Machine",
    points: Mapping[str, tuple["Cost", float]],
    *,
    ax: Axes | None = None,
    title: str = "",
) -> Axes:
    """The roofline of a machine, and measured points under it: label -> (cost, measured seconds).

    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009.
    """
    ax = ax or new(3.8)[1][0, 0]
    bandwidth, flops, ridge = machine.bandwidth, machine.flops, machine.ridge
    intensities = [cost.intensity for cost, _ in points.values()] + [ridge]
    left, right = min(intensities) / 4, max(intensities) * 8
    x = np.array([left, ridge, right])
    ax.plot(x, np.minimum(x * bandwidth, flops), color=INK, zorder=1)
    roof, slope = f"compute: {quantity(flops, 'FLOP/s')}", f"memory:\n{quantity(bandwidth, 'B/s')}"
    ax.text(right, flops * 1.15, roof, ha="right", va="bottom", fontsize=11)
    middle = math.sqrt(left * ridge)
    ax.text(middle, middle * bandwidth * 1.5, slope, ha="right", va="bottom", fontsize=11)
    for i, (label, (cost, seconds)) in enumerate(points.items()):
        marker = _MARKERS[i % len(_MARKERS)]
        ax.plot(cost.intensity, cost.flops / seconds, marker, color=PALETTE[i % len(PALETTE)], label=label, zorder=2)
    ax.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", ylabel="FLOP/s", title=title)
    ax.set_ylim(top=flops * 6)
    ax.xaxis.set_major_formatter(lambda x, _: number(x))
    ax.yaxis.set_major_formatter(lambda y, _: quantity(y, "FLOP/s", 1).removesuffix("FLOP/s"))
    ax.grid(True, which="major")
    ax.legend(loc="lower right")
    return ax


def draw_bars_with_bound(
    labels: Sequence[str],
    values: Sequence[float],
    bounds: Sequence[float | None],
    unit: str,
    *,
    ax: Axes | None = None,
    title: str = "",
    bound_label: str = "bound",
    colors: Sequence[ColorType] | None = None,
) -> Axes:
    """Horizontal bars, each with a line where its bound is (None: it has none).

    `colors` has one color per bar, for colors that mean something, such as a policy that has several bars. By default
    all bars have the same color.
    """
    ax = ax or new(0.9 + 0.55 * len(labels))[1][0, 0]
    rows = range(len(labels))
    ax.barh(rows, values, color=PALETTE[0] if colors is None else colors, height=0.6)
    furthest = max([*values, *(b for b in bounds if b is not None)])
    drawn = ""
    for row, (value, bound) in enumerate(zip(values, bounds, strict=True)):
        if bound is not None:
            ax.plot([bound, bound], [row - 0.42, row + 0.42], color=INK, linewidth=2.5, label=drawn or bound_label)
            drawn = "_"  # matplotlib leaves labels that begin with an underscore out of the legend
        # The value is to the right of bar and bound, so neither crosses it.
        end = max(value, bound) if bound is not None and bound < value * 1.35 else value
        ax.text(end + furthest * 0.015, row, quantity(value, unit), va="center", ha="left", fontsize=11)
    ax.set_yticks(list(rows), list(labels))
    ax.invert_yaxis()
    ax.set(xlim=(0, furthest * 1.3))
    ax.set_title(title, loc="left" if drawn else "center")
    is_share = unit.startswith("of ")  # the values name the whole
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}" if is_share else quantity(x, unit, 2) if x else "0")
    ax.locator_params(axis="x", nbins=4)
    if drawn:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)  # above the axes, where no bar ends
    return ax


def draw_lines(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    log: bool = False,
    ax: Axes | None = None,
    title: str = "",
) -> Axes:
    """One line for each entry of `lines`, with markers of their own so that color is not needed to tell them apart."""
    ax = ax or new()[1][0, 0]
    for i, (label, y) in enumerate(lines.items()):
        ax.plot(x, y, marker=_MARKERS[i % len(_MARKERS)], color=PALETTE[i % len(PALETTE)], label=label)
    if log:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(list(x), [number(value) for value in x], minor=False)
        low, high = ax.get_ylim()
        if high < 100 * low:  # powers of ten alone would leave most of the axis without a number
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter(lambda y, _: number(y))
        ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.grid(True)
    if len(lines) > 1:
        ax.legend()
    return ax


def _figure(drawn: Axes | Figure) -> Figure:
    figure = drawn if isinstance(drawn, Figure) else drawn.get_figure(root=True)
    assert figure is not None  # Axes made by this module or by the reader belong to a figure.
    return figure


def _array(values: Values) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=float)


def _square_axes(rows: int, columns: int) -> Axes:
    # A wide matrix is a low figure; a tall one stops before it fills a phone's screen.
    return new(min(5.0, max(1.8, 1.0 + _WIDTH * 0.8 * rows / columns)))[1][0, 0]


def _cell_borders(ax: Axes, rows: int, columns: int) -> None:
    if max(rows, columns) <= _READABLE_CELLS * 2:
        ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
        ax.grid(which="minor", color=PAPER, linewidth=1.5)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)


def _cell_labels(
    ax: Axes, rows: int, columns: int, row_labels: Sequence[str] | None, column_labels: Sequence[str] | None
) -> None:
    for labels, count, set_ticks in ((row_labels, rows, ax.set_yticks), (column_labels, columns, ax.set_xticks)):
        if labels is not None:
            set_ticks(range(count), list(labels))
        elif count <= _READABLE_CELLS // 2:
            set_ticks(range(count), [str(i) for i in range(count)])
