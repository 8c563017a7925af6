"""The figure of machine and user rates: its table has what experiment 21 recorded, and the figure shows the table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="the site needs the packages of the extra [docs]")
pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st
from playwright import sync_api

from book import results
from tests.book.site_under_test import DESKTOP, ROOT, Tab, needs_browser

PATH = "play/"
NARROW = sync_api.ViewportSize(width=375, height=812)
BOX = '<div class="pareto-figure"><p>The figure needs JavaScript.</p></div>'
Rates = dict[str, dict[int, float]]


@pytest.fixture(autouse=True)
def docs_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))


def write(root: Path, device: str, engines: dict[str, dict[int, float]]) -> None:
    rows = [
        results.Row("throughput", rate, "tokens/s", None, "none", {
            "section": "pareto", "batch size": size, "model": "m", "dtype": "float32", "engine": engine,
        })
        for engine, rates in engines.items() for size, rate in rates.items()
    ]  # fmt: skip
    other = results.Row("TTFT, p50", 1.0, "s", None, "none", {"section": "rates", "engine": "mini_engine"})
    recorded = results.Result("21_latency_under_load", device, "2026-01-01", {"python": "3"}, {}, [*rows, other])
    results.write(recorded, root)


def read(html: str) -> Rates:
    """The rates in the table of a page."""
    page = BeautifulSoup(html, "html.parser")
    return {
        str(body["data-curve"]): {
            int(str(row["data-batch-size"])): float(str(row["data-rate"])) for row in body.select("[data-batch-size]")
        }
        for body in page.select(".pareto-figure tbody")
    }


SIZES = st.dictionaries(st.integers(1, 512), st.floats(0.01, 1e6), min_size=1)


@given(st.dictionaries(st.sampled_from(["mini_engine", "vllm"]), SIZES, min_size=1), SIZES)
def test_the_table_has_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, on_a: dict[str, dict[int, float]], on_b: dict[int, float]
) -> None:
    import pareto

    root = tmp_path_factory.mktemp("root")
    write(root, "A & B", on_a)
    write(root, "C", {"mini_engine": on_b})
    expected = {f"{engine}, A & B, m in float32": rates for engine, rates in on_a.items()}
    expected["mini_engine, C, m in float32"] = on_b
    html = pareto.fill(f"<h1>One</h1>{BOX}<p>End</p>", root)
    assert read(html) == expected
    for rates in read(html).values():
        assert list(rates) == sorted(rates)
    assert html.startswith("<h1>One</h1>") and html.endswith("<p>End</p>")


def test_a_page_without_the_figure_stays_and_one_without_a_record_says_so(tmp_path: Path) -> None:
    import pareto

    other = BOX.replace("pareto", "trio")
    assert pareto.fill(other, tmp_path) == other
    assert "pareto-figure" not in pareto.fill(BOX, tmp_path)


@pytest.fixture
def figures(page: sync_api.Page, address: str) -> Iterator[sync_api.Page]:
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + PATH)
    page.wait_for_selector(".pareto-figure svg polyline")
    yield page
    assert problems == []


def call(page: sync_api.Page, expression: str, argument: Any = None) -> Any:
    """An expression over the exports `m` of the figure's module, and an argument `a`."""
    return page.evaluate(
        f"async (a) => {{ const m = await import('../javascripts/figures/pareto.js'); return {expression}; }}", argument
    )


def drawn(page: sync_api.Page, html: str, size: int) -> dict[str, Any]:
    """What the figure of a table shows of a batch size: its sentences, marked points, and the diagonal."""
    return call(page, """(() => {
        const box = document.createElement("div");
        box.innerHTML = a.html;
        const { shapes, says } = m.describe(box).draw({ size: a.size });
        const of = (name) => shapes.filter((shape) => shape.tagName === name);
        const numbers = (shape, ...names) => names.map((name) => Number(shape.getAttribute(name)));
        return {
            says: says.split("\\n"),
            marked: of("circle").filter((own) => own.getAttribute("r") === "10").map((own) => numbers(own, "cx", "cy")),
            points: of("circle").map((own) => numbers(own, "cx", "cy")),
            diagonal: of("line").filter((own) => own.classList.contains("outline"))
                .map((own) => numbers(own, "x1", "y1", "x2", "y2"))[0],
        };
    })()""", {"html": html, "size": size})  # fmt: skip


@needs_browser
def test_it_marks_the_points_of_a_batch_size(figures: sync_api.Page, tmp_path: Path) -> None:
    import pareto

    write(tmp_path, "A", {"mini_engine": {1: 200.0, 2: 390.0, 64: 4_000.0}, "vllm": {1: 50.0, 2: 99.0, 64: 3_000.0}})
    write(tmp_path, "B", {"mini_engine": {1: 20.0, 2: 30.0}})
    html = pareto.fill(BOX, tmp_path)

    pair = drawn(figures, html, 2)
    assert pair["says"] == [
        "With a batch size of 2, whose points lie on the gray line:",
        "A (mini_engine, A, m in float32): 390 tokens/s together, 195 tokens/s for each user, 5.13 ms between tokens.",
        "B (vllm, A, m in float32): 99 tokens/s together, 49.5 tokens/s for each user, 20.2 ms between tokens.",
        "C (mini_engine, B, m in float32): 30 tokens/s together, 15 tokens/s for each user, 66.7 ms between tokens.",
    ]
    assert len(pair["points"]) == 8 and len(pair["marked"]) == 3
    x1, y1, x2, y2 = pair["diagonal"]
    for x, y in pair["marked"]:
        assert y == pytest.approx(y1 + (y2 - y1) * (x - x1) / (x2 - x1), abs=0.01)

    most = drawn(figures, html, 64)
    assert most["says"][3] == "C (mini_engine, B, m in float32): not measured." and len(most["marked"]) == 2
    for x, y in most["points"]:
        assert 84 < x < 600 and 40 < y < 370


@needs_browser
def test_an_axis_has_few_ticks_and_all_values(figures: sync_api.Page) -> None:
    for values in ([20.0, 46.0], [100.0], [0.03, 7.0], [17.0, 30_000.0], [1.0, 10.0, 100.0]):
        axis = call(figures, "m.axis(a)", values)
        assert axis["first"] < min(values) and max(values) < axis["last"]
        assert 1 <= len(axis["ticks"]) <= 7
        for tick in axis["ticks"]:
            assert axis["first"] <= tick <= axis["last"]
            assert round(tick / 10 ** math.floor(math.log10(tick) + 1e-9), 6) in (1, 2, 5)
        shares = call(figures, "a.map((value) => m.share(m.axis(a), value))", values)
        assert all(0 < share < 1 for share in shares) and shares == sorted(shares)


@needs_browser
def test_the_page_shows_the_record_by_keyboard(figures: sync_api.Page) -> None:
    import pareto

    recorded = pareto.curves(ROOT)
    sizes = sorted({size for rates in recorded.values() for size in rates})
    slider = figures.get_by_role("slider", name="Batch size")
    slider.focus()
    for key, size in (("Home", sizes[0]), ("ArrowRight", sizes[1]), ("End", sizes[-1])):
        figures.keyboard.press(key)
        assert slider.get_attribute("aria-valuetext") == str(size)
        says = figures.locator(".pareto-figure .figure-says").inner_text().split("\n")[1:]
        for line, (name, rates) in zip(says, recorded.items(), strict=True):
            assert f" ({name}): " in line
            if size in rates:
                stated = float(line.partition(": ")[2].partition(" tokens/s")[0].replace(",", ""))
                assert stated == pytest.approx(rates[size], rel=0.005)
            assert ("not measured" in line) == (size not in rates)


@needs_browser
def test_by_touch_and_in_both_schemes_on_both_widths(browser: sync_api.Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        for size in (DESKTOP, NARROW):
            context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=True)
            tab = Tab(context, address)
            tab.open(PATH)
            tab.page.wait_for_selector(".pareto-figure svg polyline")
            slider = tab.page.get_by_role("slider", name="Batch size")
            slider.scroll_into_view_if_needed()
            box = slider.bounding_box()
            assert box is not None and box["height"] >= 24
            tab.page.touchscreen.tap(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
            assert slider.input_value() == slider.get_attribute("max")
            assert tab.report() == []
            context.close()


@needs_browser
def test_without_scripts_the_table_stays(browser: sync_api.Browser, address: str) -> None:
    import pareto

    context = browser.new_context(viewport=NARROW, java_script_enabled=False)
    page = context.new_page()
    page.goto(address + PATH)
    assert read(page.content()) == pareto.curves(ROOT)
    assert page.locator(".pareto-figure table").is_visible()
    context.close()
