"""The trace player: what a reader sees at each step is what the trace says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from mini_engine.observe.example import EXAMPLE
from mini_engine.observe.trace import TraceStep
from tests.book.site_under_test import PHONE, ROOT, Tab, needs_browser
from tests.helpers import read_trace

FILE = ROOT / "docs" / "traces" / "example.json"
TRACE = read_trace(FILE)
pytestmark = needs_browser

LABELS = "() => [...document.querySelectorAll('.trace-page')].map((cell) => cell.textContent)"
# The share of each page that is colored as filled, read from its background; 0 for a free page.
FILLED = r"""() => [...document.querySelectorAll(".trace-page")].map((cell) =>
    Number(cell.style.background.match(/\) (?:0%, \S.*?\) )?([\d.]+)%/)?.[1] ?? 0))"""


@pytest.fixture
def player(page: sync_api.Page, address: str) -> Iterator[sync_api.Page]:
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address + "trace/")
    page.wait_for_selector(".trace-page")
    yield page
    assert problems == []


@pytest.mark.parametrize("chapter", ["06_paged_kv_cache", "07_continuous_batching"])
def test_a_chapter_loads_the_player_when_the_reader_asks_for_it(
    page: sync_api.Page, address: str, chapter: str
) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url.rpartition("/")[2]))
    page.goto(f"{address}chapters/{chapter}/")
    page.wait_for_load_state("networkidle")
    assert not {"trace.js", "trace.css", "example.json"}.intersection(fetched)
    page.get_by_role("button", name="Show the recording").click()
    page.wait_for_selector(".trace-player .trace-page")
    assert page.locator(".trace-player .trace-page").count() == TRACE.num_pages


def labels(step: TraceStep, num_pages: int = TRACE.num_pages) -> list[str]:
    """What the page grid must show: the owner of each page."""
    owners = {page: name for name, pages in step.pages.items() for page in pages}
    return [owners.get(page, "") for page in range(num_pages)]


def chips(player: sync_api.Page, queue: str) -> list[str]:
    found: list[str] = player.locator(f".trace-queues span:text-is('{queue}') + div .trace-chip").all_inner_texts()
    return found


def shown(player: sync_api.Page) -> int:
    return int(player.locator(".trace-slider").input_value())


def small_trace(num_pages: int = 3, name: str = "<b>x</b>") -> str:
    """A trace of two steps, written by hand; the request's name must not be read as HTML."""

    def step(index: int, kind: str, new: int, computed: int, arrived: dict[str, int]) -> dict[str, object]:
        args = {"arrived": arrived, "waiting": [], "admitted": list(arrived), "preempted": [], "left": {}, "ended": {}}
        work = {"request_id": name, "kind": kind, "num_new": new, "num_computed": computed}
        output = {"request_id": name, "token_id": 1, "text": "hi "}
        args |= {"pages": {name: [2, 0]} if arrived else {}, "batch": [work], "outputs": [output]}
        return {"ph": "X", "cat": "step", "name": f"step {index}", "ts": index * 10.0, "dur": 9.0, "args": args}

    other = {"format": "mini-engine trace", "version": 2, "num_pages": num_pages, "page_size": 4}
    events = [step(0, "prefill", 6, 6, {name: 6}), step(1, "decode", 1, 7, {})]
    return json.dumps({"traceEvents": events, "otherData": other})


def drop(player: sync_api.Page, name: str, content: str) -> None:
    transfer = player.evaluate_handle(
        """([name, content]) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([content], name));
            return transfer;
        }""",
        [name, content],
    )
    player.dispatch_event("article", "dragover", {"dataTransfer": transfer})
    assert player.locator(".trace-drop").count() == 1
    player.dispatch_event("article", "drop", {"dataTransfer": transfer})
    assert player.locator(".trace-drop").count() == 0


def test_the_example_shows_what_the_page_promises() -> None:
    assert (TRACE.num_pages, TRACE.page_size) == (36, 8)
    assert sum(len(step.preempted) for step in TRACE.steps) == 5
    assert max(step.num_tokens for step in TRACE.steps) == 64
    assert sorted(name for step in TRACE.steps for name in step.ended) == [name for _, name, _, _ in EXAMPLE]


def test_every_step_shows_the_grid_the_queues_and_the_text_of_the_trace(player: sync_api.Page) -> None:
    text = {name: "" for _, name, _, _ in EXAMPLE}
    for index, (step, waiting) in enumerate(zip(TRACE.steps, TRACE.waiting, strict=True)):
        assert shown(player) == index
        assert player.evaluate(LABELS) == labels(step)
        assert chips(player, "Running") == list(step.pages)
        assert chips(player, "Waiting") == waiting
        sentence = player.locator(".trace-says").inner_text()
        assert [f"{name} is preempted" in sentence for name in text] == [name in step.preempted for name in text]
        for token in step.outputs:
            text[token.request_id] += token.text
        player.keyboard.press("ArrowRight")
    rows = player.locator(".trace-text").all_text_contents()
    assert rows == [" ".join(f"|{answer[-300:]}|".split())[1:-1] for answer in text.values()]
    assert player.get_by_label("Forward one step").is_disabled()


def test_pages_fill_as_their_tokens_are_computed(player: sync_api.Page) -> None:
    for index in range(4):
        step, filled = TRACE.steps[index], player.evaluate(FILLED)
        for work in step.batch:
            tokens = sum(filled[page] for page in step.pages[work.request_id]) / 100 * TRACE.page_size
            assert tokens == pytest.approx(work.num_computed, abs=0.1)
        player.keyboard.press("ArrowRight")


def test_buttons_keys_slider_and_timeline_move_it(player: sync_api.Page) -> None:
    last = len(TRACE.steps) - 1
    player.get_by_label("Forward one step").click()
    player.get_by_label("Forward one step").click()
    assert shown(player) == 2
    player.get_by_label("Back one step").click()
    assert shown(player) == 1 and player.evaluate(LABELS) == labels(TRACE.steps[1])
    player.locator(".trace-stage").focus()
    for key, index in (("End", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowLeft", 0), ("ArrowRight", 1)):
        player.keyboard.press(key)
        assert shown(player) == index
    player.locator(".trace-slider").focus()
    player.keyboard.press("ArrowRight")  # the slider's own key: one step, not two
    assert shown(player) == 2
    box = player.locator(".trace-timeline").bounding_box()
    assert box is not None
    player.locator(".trace-timeline").click(position={"x": box["width"] - 2, "y": 20})
    assert shown(player) == last and player.evaluate(LABELS) == labels(TRACE.steps[last])
    player.get_by_label("First step").click()
    assert shown(player) == 0 and player.get_by_label("Back one step").is_disabled()


def test_space_plays_and_pauses_and_the_end_stops_it(player: sync_api.Page) -> None:
    player.get_by_role("combobox", name="Speed").select_option("fast")
    player.locator(".trace-stage").focus()
    scrolled = player.evaluate("window.scrollY")
    player.keyboard.press(" ")
    player.wait_for_function("document.querySelector('.trace-slider').value > 3")
    player.keyboard.press(" ")
    assert player.get_by_label("Play", exact=True).count() == 1
    assert player.evaluate("window.scrollY") == scrolled
    player.keyboard.press("End")
    player.keyboard.press("ArrowLeft")
    player.get_by_label("Play", exact=True).click()
    player.wait_for_function(
        "document.querySelector('.trace-slider').value === document.querySelector('.trace-slider').max"
    )
    player.get_by_label("Play", exact=True).wait_for()


def test_a_swipe_is_a_step(browser: sync_api.Browser, address: str) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True)
    page = context.new_page()
    page.goto(address + "trace/")
    page.wait_for_selector(".trace-page")
    for start, end, index in ((200, 120, 1), (200, 195, 1), (200, 120, 2), (120, 200, 1)):
        page.dispatch_event(".trace-grid", "pointerdown", {"pointerType": "touch", "clientX": start, "bubbles": True})
        page.dispatch_event(".trace-grid", "pointerup", {"pointerType": "touch", "clientX": end, "bubbles": True})
        assert shown(page) == index
    context.close()


def test_a_trace_of_ones_own_is_dropped_or_chosen(player: sync_api.Page, tmp_path: Path) -> None:
    drop(player, "mine.json", small_trace())
    player.wait_for_selector("text=mine.json")
    assert player.evaluate(LABELS) == ["1", "", "1"]
    assert chips(player, "Running") == ["1"] and player.locator(".trace-player b").count() == 0
    player.keyboard.press("ArrowRight")
    assert "<b>x</b> decodes." in player.locator(".trace-says").inner_text()

    player.get_by_role("button", name="Back to the example").click()
    player.wait_for_function("document.querySelectorAll('.trace-page').length === 36")
    assert player.evaluate(LABELS) == labels(TRACE.steps[0])

    chosen = tmp_path / "chosen.json"
    chosen.write_text(small_trace(num_pages=400, name="x"), encoding="utf-8")
    player.get_by_label("Open your own trace").set_input_files(chosen)
    player.wait_for_selector("text=chosen.json")
    assert player.locator(".trace-page").count() == 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "it is not JSON"),
        ('{"traceEvents": []}', "not written by this engine"),
        ("[]", "not written by this engine"),
        (small_trace().replace('"version": 2', '"version": 1'), "its version is 1"),
        (small_trace(num_pages=2), "its step 0 is damaged"),
        (small_trace().replace('"decode"', '"magic"'), "its step 1 is damaged"),
        (small_trace().replace('"cat": "step"', '"cat": "other"'), "it holds no steps"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_kindly(player: sync_api.Page, content: str, message: str) -> None:
    player.keyboard.press("ArrowRight")
    drop(player, "broken.json", content)
    alert = player.get_by_role("alert")
    alert.get_by_text(message).wait_for()
    assert "broken.json" in alert.inner_text() and "mini-engine trace --out" in alert.inner_text()
    assert shown(player) == 1 and player.evaluate(LABELS) == labels(TRACE.steps[1])  # what was there stays
    drop(player, "good.json", small_trace())
    player.wait_for_selector("text=good.json")
    assert alert.inner_text() == ""


def test_it_fits_a_phone_at_every_kind_of_step_in_both_schemes(browser: sync_api.Browser, address: str) -> None:
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=PHONE, color_scheme=scheme)
        tab = Tab(context, address)
        tab.open("trace/")
        tab.page.wait_for_selector(".trace-page")
        for index in (0, 3, 5, 62, len(TRACE.steps) - 1):
            tab.page.locator(".trace-slider").fill(str(index))
            assert shown(tab.page) == index
            assert tab.report() == []
        context.close()
