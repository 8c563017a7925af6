"""Figures: they show the data they were given, as drawings that are the same each time and on any page."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.patches import Rectangle
from matplotlib.typing import ColorType

from book import figures
from mini_engine.roofline import Cost, Machine

MACHINE = Machine("a machine", "float32", bandwidth=2e10, flops=1e11)
CAUSAL = torch.ones(8, 8).tril().bool()


def drawings() -> dict[str, Axes]:
    points = {"decode": (Cost(flops=2e6, bytes=4e6), 3e-4), "prefill": (Cost(flops=2e9, bytes=4e7), 2.4e-2)}
    return {
        "mask": figures.draw_mask(CAUSAL, title="causal"),
        "large mask": figures.draw_mask(torch.ones(300, 300).tril(), owners=[i // 100 for i in range(300)]),
        "blocks": figures.draw_blocks(CAUSAL, (2, 4)),
        "matrix": figures.draw_matrix(torch.linspace(-1, 1, 12).view(3, 4), title="scores"),
        "ragged": figures.draw_ragged([0, 3, 8], ["A", "B"]),
        "roofline": figures.draw_roofline(MACHINE, points),
        "bars": figures.draw_bars_with_bound(["a", "b"], [2e-3, 1e-3], [5e-4, None], "s"),
        "lines": figures.draw_lines([1, 2], {"a": [1, 2], "b": [2, 4]}, xlabel="n", ylabel="s", log=True),
    }


@pytest.mark.parametrize("name", drawings())
def test_drawings_are_repeatable_and_well_formed(name: str) -> None:
    first, second = figures.to_svg(drawings()[name]), figures.to_svg(drawings()[name])
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")


def test_drawings_take_ink_paper_and_font_from_the_page() -> None:
    ax = figures.new()[1][0, 0]
    ax.barh(0, 1, color=figures.PALETTE[0], edgecolor=figures.PAPER)
    ax.text(0.5, 0, "on blue: 0.12345", color="white")
    ax.text(0.5, 1, "on paper")
    svg = figures.to_svg(ax)
    assert "<style" not in svg and "DejaVu" not in svg.partition(">")[2]
    on_blue = re.search(r'<text style="([^"]*)"[^>]*>on blue: 0.12345<', svg)
    on_paper = re.search(r'<text style="([^"]*)"[^>]*>on paper<', svg)
    assert on_blue and "fill: #ffffff" in on_blue[1] and on_paper and "fill: currentColor" in on_paper[1]
    assert not re.search(r"<(?!text)[^>]*#ffffff(?!\))", svg) and figures.INK not in svg


def test_drawings_on_one_page_share_no_id() -> None:
    texts = [figures.to_svg(ax) for ax in drawings().values()]
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in texts]
    assert sum(map(len, ids)) == len(set.union(*ids)) > 0
    for svg, own in zip(texts, ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^)"]*)', svg)) == own


def luminance(color: ColorType) -> float:
    """Relative luminance, WCAG 2.2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(a: ColorType, b: ColorType) -> float:
    lower, higher = sorted((luminance(a), luminance(b)))
    return (higher + 0.05) / (lower + 0.05)


@pytest.mark.parametrize("color", figures.PALETTE)
def test_colors_stand_out_on_both_papers_and_their_text_is_readable(color: str) -> None:
    assert contrast(color, "#fffdfa") >= 3 and contrast(color, "#14181c") >= 3
    assert contrast(color, figures.text_on(color)) >= 4.5


@pytest.mark.parametrize(("paper", "ink"), [("#fffdfa", "#1f2933"), ("#14181c", "#e4e7eb")])
def test_ink_is_readable_on_every_value_of_a_matrix(paper: str, ink: str) -> None:
    fills = [figures.HIDDEN, *(colors(x) for colors in (figures.AMOUNT, figures.SIGNED) for x in (0.0, 0.5, 1.0))]
    for fill in fills:
        *rgb, alpha = to_rgba(fill)
        mixed = tuple(alpha * c + (1 - alpha) * p for c, p in zip(rgb, to_rgb(paper), strict=True))
        assert contrast(mixed, ink) >= 4.5
    assert figures.text_on(figures.HIDDEN) == figures.INK


def test_mask_colors_visible_cells_by_owner_and_hides_the_rest() -> None:
    image = figures.draw_mask(CAUSAL, owners=[0] * 4 + [1] * 4).get_images()[0].get_array()
    assert image is not None
    for query in range(8):
        for key in range(8):
            color = figures.PALETTE[query // 4] if key <= query else figures.HIDDEN
            assert tuple(image[query, key]) == pytest.approx(to_rgba(color))


def test_blocks_tell_skipped_partial_and_full_apart() -> None:
    image = figures.draw_blocks(CAUSAL, (4, 4)).get_images()[0].get_array()
    assert image is not None
    expected = {
        (0, 4): figures.HIDDEN,
        (0, 1): figures.PALETTE[1],
        (1, 0): figures.PALETTE[0],
        (4, 3): figures.PALETTE[2],
    }
    for pair, color in expected.items():
        assert tuple(image[pair]) == pytest.approx(to_rgba(color))


def test_blocks_draw_one_that_the_end_cuts_off() -> None:
    image = figures.draw_blocks(torch.ones(3, 5), (2, 4)).get_images()[0].get_array()
    assert image is not None and image.shape[:2] == (3, 5)


def test_matrix_writes_every_value_and_infinity() -> None:
    values = torch.tensor([[0.5, -torch.inf], [1.25, -0.75]])
    texts = [text.get_text() for text in figures.draw_matrix(values).texts]
    assert texts == ["0.50", "−∞", "1.25", "-0.75"]


def test_matrix_takes_low_precision_and_leaves_text_out_where_it_would_not_be_legible() -> None:
    assert figures.draw_matrix(torch.ones(2, 2, dtype=torch.bfloat16)).texts[0].get_text() == "1.00"
    assert not figures.draw_matrix(np.ones((40, 40))).texts


def test_ragged_marks_every_boundary_and_survives_an_empty_sequence() -> None:
    ax = figures.draw_ragged(torch.tensor([0, 2, 2, 5]), ["A", "empty", "C"])
    texts = [text.get_text() for text in ax.texts]
    assert len(ax.patches) == 5 and {"0", "2", "5", "A", "C"} <= set(texts) and "empty" not in texts


def test_roofline_places_points_by_cost_and_seconds() -> None:
    ax = figures.draw_roofline(MACHINE, {"half": (Cost(flops=1e9, bytes=1e9), 0.1)})
    roof, point = ax.lines
    assert point.get_xydata() == pytest.approx(np.array([[1.0, 1e10]]))
    x, y = np.asarray(roof.get_xydata()).T
    assert y == pytest.approx(np.minimum(x * 2e10, 1e11)) and 5.0 in x  # the ridge: 1e11 / 2e10


def test_bars_draw_a_bound_only_where_there_is_one() -> None:
    ax = figures.draw_bars_with_bound(["a", "b"], [2e-3, 1e-3], [5e-4, None], "s")
    assert [bar.get_width() for bar in ax.patches if isinstance(bar, Rectangle)] == [2e-3, 1e-3]
    assert [np.asarray(line.get_xdata())[0] for line in ax.lines] == [5e-4]
    assert [text.get_text() for text in ax.texts] == ["2 ms", "1 ms"]
    assert figures.draw_bars_with_bound(["a"], [1.0], [None], "s").get_legend() is None


def test_bars_have_one_color_unless_colors_are_given() -> None:
    first, second, third, *_ = figures.PALETTE
    for given, drawn in ((None, (first, first)), ((second, third), (second, third))):
        ax = figures.draw_bars_with_bound(["a", "b"], [2.0, 1.0], [None, None], "s", colors=given)
        assert [bar.get_facecolor() for bar in ax.patches] == [to_rgba(color) for color in drawn]


def test_a_given_axes_is_used() -> None:
    figure, axes = figures.new(columns=2)
    assert figures.draw_mask(CAUSAL, ax=axes[0, 1]) is axes[0, 1]
    assert axes.shape == (1, 2) and len(figure.axes) == 2


def test_show_displays_image_and_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, object]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    figures.show(figures.draw_mask(CAUSAL), "a < b, `code`")
    assert str(shown[0]["image/svg+xml"]).startswith("<svg") and shown[0]["image/png"]
    assert shown[0]["text/plain"] == "Figure: a < b, `code`"
    assert "a &lt; b, <code>code</code>" in str(shown[1]["text/html"])
