"""The figures of chapters 01 to 07: their arithmetic against the book's, by keyboard and on a phone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from mini_engine.policy import share_budget
from tests.book.site_under_test import PHONE, Tab, needs_browser

PATH = "play/"
FIGURES = ("rope", "softmax", "sampling", "pages", "trio")
pytestmark = needs_browser


@pytest.fixture
def figures(page: sync_api.Page, address: str) -> Iterator[sync_api.Page]:
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + PATH)
    page.wait_for_selector(".trio-figure svg rect")
    yield page
    assert problems == []


def call(page: sync_api.Page, module: str, expression: str) -> Any:
    """An expression over the exports of a figure's module, `m`."""
    return page.evaluate(
        f"async () => {{ const m = await import('../javascripts/figures/{module}.js'); return {expression}; }}"
    )


def says(page: sync_api.Page, name: str) -> str:
    return page.locator(f".{name}-figure .figure-says").inner_text()


def test_online_softmax_equals_softmax_over_the_keys_read(figures: sync_api.Page) -> None:
    scores, values = [0.5, 3.0, -1.0, 2.0], [1.0, 2.0, 3.0, 4.0]
    for read in range(1, 5):
        state = call(figures, "softmax", f"m.online({scores}, {values}, {read})")
        weights = np.exp(scores[:read])
        assert state["output"] == pytest.approx(weights @ values[:read] / weights.sum())
        assert state["max"] == max(scores[:read])
        assert state["sum"] == pytest.approx(weights.sum() / math.exp(state["max"]))


def test_softmax_by_keyboard_ends_at_the_chapters_output(figures: sync_api.Page) -> None:
    figures.get_by_role("slider", name="Keys read").focus()
    figures.keyboard.press("End")
    assert "output 4." in says(figures, "softmax") and "can still hold" in says(figures, "softmax")
    figures.get_by_role("slider", name="Added to every score").press("End")
    assert "output 4." in says(figures, "softmax") and "overflows in float16" in says(figures, "softmax")


def test_the_score_of_a_rotated_pair_depends_on_the_distance_only(figures: sync_api.Page) -> None:
    for pair in range(4):
        scores = call(figures, "rope", f"[[9, 4], [105, 100], [5, 0]].map(([q, k]) => m.score(q, k, {pair}))")
        assert scores == pytest.approx([scores[0]] * 3)
    assert call(figures, "rope", "m.frequency(1)") == pytest.approx(0.1)
    before = says(figures, "rope").partition("the score is ")[2][:5]
    figures.get_by_role("slider", name="Position of the query").press("PageUp")
    assert says(figures, "rope").partition("the score is ")[2][:5] == before


def test_filters_keep_what_the_engine_keeps(figures: sync_api.Page) -> None:
    row = {"tokens": [["a", math.log(0.5)], ["b", math.log(0.25)]], "tail": [[math.log(0.125), 2]]}
    off = {"temperature": 1, "topK": 0, "topP": 1, "minP": 0}
    cases = [({}, [1, 1, 2]), ({"topK": 3}, [1, 1, 1]), ({"topP": 0.6}, [1, 1, 0]), ({"minP": 0.3}, [1, 1, 0])]
    for changed, kept in cases:
        bins = call(figures, "sampling", f"m.filtered({row}, {off | changed})")
        assert [bin["kept"] for bin in bins] == kept
        assert sum(bin["p"] for bin in bins) == pytest.approx(1)
    hot = call(figures, "sampling", f"m.filtered({row}, {off | {'temperature': 2}})")
    weights = np.sqrt([0.5, 0.25, 0.125])
    assert hot[0]["p"] == pytest.approx(weights[0] / (weights @ [1, 1, 2]))


def test_waste_of_pages(figures: sync_api.Page) -> None:
    for size in (1, 16, 2048):
        counted = call(figures, "pages", f"m.paged([17, 32], {size})")
        pages = [-(-17 // size), -(-32 // size)]
        assert counted["pages"] == pages and counted["empty"] == sum(pages) * size - 49
    figures.get_by_role("slider", name="Tokens per page").press("Home")
    assert says(figures, "pages").startswith("0 of")


def test_the_trio_runs_as_in_the_chapter(figures: sync_api.Page) -> None:
    def steps(policy: str, budget: int) -> list[dict[str, int]]:
        ran = call(figures, "trio", f"m.run('{policy}', {budget}, 10)")
        return [{name: n for name, n, _ in step} for step in ran]

    first = [{"A": 3, "B": 2}, {"A": 1, "B": 1}]
    assert steps("separate", 99) == [*first, {"C": 10}, {"A": 1, "B": 1, "C": 1}, {"A": 1}, {"A": 1}]
    assert steps("mixed", 99) == [*first, {"A": 1, "B": 1, "C": 10}, {"A": 1, "C": 1}, {"A": 1}]
    assert steps("mixed", 6)[2:] == [{"A": 1, "B": 1, "C": 4}, {"A": 1, "C": 5}, {"A": 1, "C": 1}, {"C": 1}]
    for pending in ([5, 1, 7, 1], [1, 9], [4, 4, 4]):
        shares = call(figures, "trio", f"m.POLICIES.mixed({pending}, 8)")
        assert shares == share_budget(np.array(pending), 8).tolist()


def test_the_trio_answers_to_its_controls(figures: sync_api.Page) -> None:
    before = says(figures, "trio")
    figures.get_by_label("mixed batches").check()
    assert says(figures, "trio") != before
    figures.get_by_role("slider", name="Token budget").press("Home")
    figures.get_by_role("slider", name="Tokens of C's prompt").press("End")
    assert figures.locator(".trio-figure rect.c").count() > 5


def test_all_fit_a_phone_in_both_schemes(browser: sync_api.Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=PHONE, color_scheme=scheme, has_touch=True)
        tab = Tab(context, address)
        tab.open(PATH)
        for name in FIGURES:
            tab.page.wait_for_selector(f".{name}-figure svg[aria-label]")
        assert tab.report() == []
        context.close()
