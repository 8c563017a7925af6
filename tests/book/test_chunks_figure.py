"""The figure of chapter 10: whatever the order, it shows the positions, offsets and exactness that the engine would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from book.grading import solution
from tests.book.site_under_test import PHONE, Tab, needs_browser

PATH = "chapters/10_chunk_memory/"
CHUNKS = {"A": (40, ""), "B": (24, "A"), "C": (48, "AB"), "D": (32, "")}
pytestmark = needs_browser
answers = solution("10_chunk_memory")


@pytest.fixture
def figure(page: sync_api.Page, address: str) -> Iterator[sync_api.Page]:
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + PATH)
    page.wait_for_selector(".chunks-block")
    yield page
    assert problems == []


def rows(figure: sync_api.Page) -> list[list[str]]:
    found = [row.locator("td").all_inner_texts() for row in figure.locator(".chunks-table tbody tr").all()]
    return [[text.replace("−", "-").removeprefix("+") for text in row] for row in found]


def tokens(names: str) -> tuple[int, ...]:
    return tuple(ord(name) for name in names for _ in range(CHUNKS[name][0]))


def expected(order: str) -> list[list[str]]:
    stored = [answers.Stored(tokens(name), tokens(CHUNKS[name][1])) for name in order]
    placed = zip(order, *answers.place_chunks(stored), strict=True)
    return [
        [name, str(position), str(len(tokens(CHUNKS[name][1]))), str(offset), "exact" if exact else "composed"]
        for name, position, offset, exact in placed
    ]


def says(figure: sync_api.Page) -> str:
    return figure.locator(".chunks-says").inner_text()


def block(figure: sync_api.Page, name: str) -> sync_api.Locator:
    return figure.get_by_role("button", name=f"Chunk {name},")


def drag(figure: sync_api.Page, name: str, share: float) -> None:
    """Drag a chunk until its middle is at a share of the track."""
    block(figure, name).scroll_into_view_if_needed()
    box, track = block(figure, name).bounding_box(), figure.locator(".chunks-track").bounding_box()
    assert box and track
    y = box["y"] + box["height"] / 2
    figure.mouse.move(box["x"] + box["width"] / 2, y)
    figure.mouse.down()
    figure.mouse.move(track["x"] + share * track["width"], y, steps=8)
    figure.mouse.up()


def test_it_begins_with_exact_and_composed_chunks(figure: sync_api.Page) -> None:
    assert rows(figure) == expected("ADB")
    assert {row[-1] for row in rows(figure)} == {"exact", "composed"}
    assert "approximation" in says(figure) and "by 40 positions for D" in says(figure)


def test_chunks_are_dragged_by_mouse(figure: sync_api.Page) -> None:
    drag(figure, "B", 0.3)
    assert rows(figure) == expected("ABD")
    drag(figure, "A", 0.95)
    assert rows(figure) == expected("BDA")
    drag(figure, "D", 0.0)
    assert rows(figure) == expected("DBA")
    lefts = figure.locator(".chunks-block").evaluate_all("(all) => all.map((b) => [b.textContent, b.style.left])")
    assert dict(lefts)["D"] == "0%"


def test_a_chain_is_exact(figure: sync_api.Page) -> None:
    figure.get_by_label("D, computed on its own").uncheck()
    assert rows(figure) == expected("AB")
    figure.get_by_label("C, computed after A B").check()
    assert rows(figure) == expected("ABC") and "Every chunk is exact" in says(figure)
    drag(figure, "C", 0.02)
    assert rows(figure) == expected("CAB") and "approximation" in says(figure)


def test_a_chunk_that_has_not_moved_may_be_composed(figure: sync_api.Page) -> None:
    for name in ("A", "D"):
        figure.locator(".chunks-controls label").filter(has_text=f"{name}, computed").locator("input").uncheck()
    assert rows(figure) == expected("B")
    figure.get_by_label("C, computed after A B").check()
    figure.get_by_label("A, computed on its own").check()
    block(figure, "C").press("End")
    assert rows(figure) == expected("BAC")
    assert "other tokens are in front of C" in says(figure)


def test_it_works_by_keyboard(figure: sync_api.Page) -> None:
    block(figure, "B").focus()
    figure.keyboard.press("ArrowLeft")
    assert rows(figure) == expected("ABD")
    figure.keyboard.press("Home")
    assert rows(figure) == expected("BAD")
    figure.keyboard.press("ArrowRight")
    figure.keyboard.press("ArrowRight")
    figure.keyboard.press("ArrowRight")  # at the end already
    assert rows(figure) == expected("ADB")
    label = block(figure, "B").get_attribute("aria-label")
    assert label == "Chunk B, 3 of 3, position 72, query offset −32, composed"
    figure.get_by_label("C, computed after A B").focus()
    figure.keyboard.press("Space")
    assert rows(figure) == expected("ADBC")


def test_no_chunks_at_all(figure: sync_api.Page) -> None:
    for label in ("A, computed on its own", "B, computed after A", "D, computed on its own"):
        figure.get_by_label(label, exact=True).uncheck()
    assert rows(figure) == [] and "plain prompt" in says(figure)


def test_it_fits_a_phone_in_both_schemes(browser: sync_api.Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=PHONE, color_scheme=scheme, has_touch=True)
        tab = Tab(context, address)
        tab.open(PATH)
        tab.page.wait_for_selector(".chunks-block")
        tab.page.get_by_label("C, computed after A B").tap()
        assert rows(tab.page) == expected("ADBC")
        drag(tab.page, "D", 0.95)
        assert rows(tab.page) == expected("ABCD")
        assert tab.report() == []
        context.close()
