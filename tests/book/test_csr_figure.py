"""The CSR figure of chapter 08: whatever is clicked, the arrays are those of the pages and keys that it shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from book.grading import solution
from tests.book.site_under_test import PHONE, Tab, needs_browser

PATH = "chapters/08_flashinfer/"
pytestmark = needs_browser
csr_from_table = solution("08_flashinfer").csr_from_table

Requests = dict[str, tuple[list[int], int]]  # pages and keys of each
EXAMPLE: Requests = {"A": ([2, 0, 3], 10), "B": ([1], 3), "C": ([5, 4], 8)}


@pytest.fixture
def figure(page: sync_api.Page, address: str) -> Iterator[sync_api.Page]:
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + PATH)
    page.wait_for_selector(".csr-page")
    yield page
    assert problems == []


def arrays(figure: sync_api.Page) -> list[list[int]]:
    rows = figure.locator(".csr-row").all()
    return [[int(text) for text in row.locator(".csr-value").all_inner_texts()] for row in rows]


def expected(requests: Requests) -> list[list[int]]:
    width = max(1, *(len(pages) for pages, _ in requests.values()))
    table = np.array([pages + [99] * (width - len(pages)) for pages, _ in requests.values()], dtype=np.int32)
    kv_lens = np.array([keys for _, keys in requests.values()])
    return [array.tolist() for array in csr_from_table(table, kv_lens, 4)]


def click_page(figure: sync_api.Page, page: int) -> None:
    figure.locator(".csr-page").nth(page).click()


def changed(figure: sync_api.Page) -> list[int]:
    """How many entries of each array are marked as changed."""
    return [row.locator(".csr-changed").count() for row in figure.locator(".csr-row").all()]


def test_it_begins_with_the_example_of_the_chapter(figure: sync_api.Page) -> None:
    assert arrays(figure) == expected(EXAMPLE) == [[0, 3, 4, 6], [2, 0, 3, 1, 5, 4], [2, 3, 4]]
    assert changed(figure) == [0, 0, 0]


def test_a_clicked_page_is_the_last_of_the_chosen_request(figure: sync_api.Page) -> None:
    figure.get_by_role("button", name="Request B").click()
    click_page(figure, 9)
    assert arrays(figure) == expected(EXAMPLE | {"B": ([1, 9], 5)})
    assert changed(figure) == [2, 3, 1]  # all entries after B's old ones
    assert "Page 9 is now B's last page" in figure.locator(".csr-says").inner_text()
    click_page(figure, 7)
    assert arrays(figure) == expected(EXAMPLE | {"B": ([1, 9, 7], 9)})


def test_a_stored_key_changes_one_number_and_needs_room(figure: sync_api.Page) -> None:
    store = figure.get_by_role("button", name="Store a key")
    store.click()
    assert arrays(figure) == expected(EXAMPLE | {"A": ([2, 0, 3], 11)})
    assert changed(figure) == [0, 0, 1] and "slot 14" in figure.locator(".csr-says").inner_text()
    figure.get_by_role("button", name="Request C").click()
    store.click()  # C's last page is full
    assert arrays(figure) == expected(EXAMPLE | {"A": ([2, 0, 3], 11)})
    assert "click a free page" in figure.locator(".csr-says").inner_text()


def test_the_last_page_can_be_taken_back_down_to_none(figure: sync_api.Page) -> None:
    click_page(figure, 0)  # in the middle of A: it stays
    assert arrays(figure) == expected(EXAMPLE)
    click_page(figure, 3)
    assert arrays(figure) == expected(EXAMPLE | {"A": ([2, 0], 8)})
    click_page(figure, 1)
    assert arrays(figure) == expected(EXAMPLE | {"A": ([2, 0], 8), "B": ([], 0)})
    figure.get_by_role("button", name="Start over").click()
    assert arrays(figure) == expected(EXAMPLE)


def test_it_works_by_keyboard(figure: sync_api.Page) -> None:
    figure.get_by_role("button", name="Request A").focus()
    for _ in range(2):
        figure.keyboard.press("Tab")
    figure.keyboard.press("Enter")
    assert figure.get_by_role("button", name="Request C").get_attribute("aria-pressed") == "true"
    figure.locator(".csr-page").nth(0).focus()
    figure.keyboard.press("ArrowDown")
    figure.keyboard.press("ArrowRight")
    figure.keyboard.press("Space")
    assert arrays(figure) == expected(EXAMPLE | {"C": ([5, 4, 7], 9)})
    label = figure.locator(".csr-page").nth(7).get_attribute("aria-label")
    assert label == "Page 7, C's page 3, 1 of 4 slots filled"


def test_it_fits_a_phone_in_both_schemes(browser: sync_api.Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=PHONE, color_scheme=scheme, has_touch=True)
        tab = Tab(context, address)
        tab.open(PATH)
        tab.page.wait_for_selector(".csr-page")
        tab.page.locator(".csr-page").nth(8).tap()
        assert arrays(tab.page) == expected(EXAMPLE | {"A": ([2, 0, 3, 8], 13)})
        assert tab.report() == []
        context.close()
