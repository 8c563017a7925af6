"""The figure of chapter 09: whatever is chosen, the bytes are those of the boxes that it draws."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from tests.book.site_under_test import PHONE, Tab, needs_browser

PATH = "chapters/09_cascade_and_prefix_cache/"
GB = 114_688 / 1e9  # of a token's keys and values
SLIDERS = ("Requests", "Documents", "Tokens of the system prompt", "Tokens of each document", "Own tokens")
SWITCHES = ("Level for the system prompt", "Level for the documents")
pytestmark = needs_browser


@pytest.fixture
def figure(page: sync_api.Page, address: str) -> Iterator[sync_api.Page]:
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + PATH)
    page.wait_for_selector(".tree-figure svg")
    yield page
    assert problems == []


def gigabytes(figure: sync_api.Page) -> list[float]:
    """Flat, and in levels."""
    return [float(text.removesuffix(" GB")) for text in figure.locator(".tree-bars b").all_inner_texts()]


def boxes(figure: sync_api.Page) -> list[int]:
    """How many reads are drawn of the system prompt, the documents, and each request's own tokens."""
    return [figure.locator(f".tree-figure rect.tree-{part}").count() for part in ("system", "document", "own")]


def test_it_begins_with_both_levels(figure: sync_api.Page) -> None:
    flat, read = 12 * (2048 + 4096 + 256), 2048 + 3 * 4096 + 12 * 256
    assert gigabytes(figure) == pytest.approx([flat * GB, read * GB], rel=0.005)
    assert boxes(figure) == [1, 3, 12]
    assert f"{flat / read:.1f} times fewer bytes" in figure.locator(".tree-says").inner_text()


def test_a_level_that_is_switched_off_leaves_its_pages_to_the_next_one(figure: sync_api.Page) -> None:
    figure.locator(".tree-figure").get_by_label(SWITCHES[0]).click()
    assert boxes(figure) == [3, 3, 12]
    assert gigabytes(figure)[1] == pytest.approx((3 * 2048 + 3 * 4096 + 12 * 256) * GB, rel=0.005)
    figure.locator(".tree-figure").get_by_label(SWITCHES[1]).click()
    assert boxes(figure) == [12, 12, 12] and len(set(gigabytes(figure))) == 1
    figure.locator(".tree-figure").get_by_label(SWITCHES[0]).click()
    assert boxes(figure) == [1, 12, 12]


def test_it_works_by_keyboard(figure: sync_api.Page) -> None:
    figure.locator(".tree-figure").get_by_label(SLIDERS[0]).focus()
    figure.keyboard.press("End")
    assert figure.locator(".tree-figure").get_by_label(SLIDERS[0]).get_attribute("aria-valuetext") == "64" and boxes(
        figure
    ) == [1, 3, 64]
    figure.keyboard.press("Tab")
    figure.keyboard.press("Home")
    assert boxes(figure) == [1, 1, 64]
    figure.locator(".tree-figure").get_by_label(SLIDERS[2]).focus()
    figure.keyboard.press("Home")
    assert boxes(figure) == [0, 1, 64]
    figure.locator(".tree-figure").get_by_label(SWITCHES[1]).focus()
    figure.keyboard.press("Space")
    assert boxes(figure) == [0, 64, 64]


def test_it_fits_a_phone_in_both_schemes(browser: sync_api.Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=PHONE, color_scheme=scheme, has_touch=True)
        tab = Tab(context, address)
        tab.open(PATH)
        tab.page.wait_for_selector(".tree-figure svg")
        tab.page.get_by_label(SWITCHES[1]).tap()
        assert boxes(tab.page) == [1, 12, 12]
        assert tab.report() == []
        context.close()
