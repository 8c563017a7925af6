"""The server's page, in a browser: it chats, and it shows what the engine does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from mini_engine import LLM, SamplingParams
from mini_engine.core import NOTHING
from mini_engine.outputs import StepReport
from mini_engine.sampling_params import StructuredOutputsParams
from mini_engine.serving import live
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.snapshot import take_snapshot
from tests.book.site_under_test import DESKTOP, needs_browser
from tests.serving.conftest import MODEL, Served
from tests.serving.test_server import get, until

PHONE = sync_api.ViewportSize(width=375, height=812)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
PASSWORD = "secret"


class Steps:
    """Lets an engine make a number of steps, so that a test decides what is running while it looks at the page."""

    def __init__(self, served: Served) -> None:
        self.left, self._step = 0, served.engine.engine.step
        served.engine.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> StepReport:
        if self.left > 0:
            self.left -= 1
            return self._step()
        time.sleep(0.005)
        return StepReport(NOTHING, [], None, [], NOTHING.rows, [], 0.0, 0.0, 0)


class Tab:
    """The page of a server in a browser, and whatever goes wrong in it."""

    def __init__(self, browser: sync_api.Browser, served: Served, viewport: sync_api.ViewportSize = DESKTOP) -> None:
        self.page, self.problems = browser.new_page(viewport=viewport), list[str]()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request", lambda r: None if r.url.startswith(served.address) else self.problems.append(f"foreign: {r.url}")
        )
        self.page.goto(served.address)

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def ask(self, text: str) -> None:
        self.page.get_by_label("Your message").fill(text)
        self.page.keyboard.press("Enter")

    def pages(self, state: str) -> int:
        """Number of pages that the picture shows in a state."""
        return self.page.locator(f"#pages .{state}").count()

    def total(self, name: str) -> str:
        return self.page.locator("#totals div", has_text=name).locator("dd").inner_text()

    def answers(self) -> list[str]:
        return self.page.locator(".answer .content").all_text_contents()

    @property
    def is_scrolled_sideways(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


def only_says(served: Served, text: str) -> None:
    """Let every answer be this text."""
    served.client.front.default_params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=[text]))


def has_ended(served: Served) -> bool:
    """Whether no request owns a page: all pages are free, or cached in the prefix tree alone."""
    core, tree = served.engine.engine, served.engine.engine.scheduler.prefix_tree
    num_cached = tree.num_evictable if tree else 0
    return not core.has_unfinished and core.page_table.num_free_pages + num_cached == core.page_table.num_pages


@pytest.fixture
def sharing(new_server: Callable[..., Any]) -> Iterator[Served]:
    """A server with a small pool and prefix sharing, whose answers go on until they are as long as they may be."""
    with new_server(num_pages=96, page_size=16, enable_prefix_caching=True, max_batch_size=9) as served:
        served.client.front.default_params = ENDLESS
        yield served


# --- without a browser -----------------------------------------------------------------------------------------------


def test_the_page_is_one_file_and_its_policy_allows_nothing_else(served: Served) -> None:
    status, headers, body = get(served, "/")
    html, policy = body.decode(), headers["content-security-policy"]
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in html.lower()
    for tag in ("style", "script"):
        [text] = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        assert f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert not re.search(r"\s(src|style|on\w+)=", html) and "innerHTML" not in html
    assert get(served, "/", "HEAD")[0] == 200


# --- in a browser ----------------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize(("viewport", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_a_question_is_answered_while_the_picture_shows_its_pages(
    browser: sync_api.Browser, sharing: Served, llm: LLM, viewport: sync_api.ViewportSize, scheme: Any
) -> None:
    steps = Steps(sharing)
    sharing.client.front.default_params = SamplingParams(temperature=0.0, stop=["."])
    with Tab(browser, sharing, viewport) as tab:
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.get_by_text(MODEL).wait_for()
        until(lambda: tab.pages("free") == 96)
        tab.ask("Name a color.")
        steps.left = 4
        until(lambda: tab.total("running") == "1" and bool(tab.answers()) and tab.answers()[0] != "")
        request = next(iter(sharing.engine.engine.requests.values()))
        until(lambda: tab.pages("owned") == -(-(len(request.prompt_token_ids) + 4) // 16))
        assert tab.page.locator("#batch .chip").all_inner_texts() == [str(request.arrival)]
        assert tab.page.locator("#connection").inner_text() == "live" and not tab.is_scrolled_sideways
        steps.left = 10_000
        until(lambda: tab.page.get_by_role("button", name="Send", exact=True).is_enabled() and has_ended(sharing))
        until(lambda: tab.pages("owned") == 0 and tab.pages("cached") > 0)
        until(lambda: "has ended and returned" in tab.page.locator("#news").inner_text())
        assert tab.total("running") == "0" and tab.total("pages in use") == "0" and not tab.is_scrolled_sideways
        [want] = llm.chat([{"role": "user", "content": "Name a color."}], SamplingParams(temperature=0.0, stop=["."]))
        assert tab.answers() == [want.text] and tab.problems == []


@needs_browser
def test_the_conversation_goes_on_and_begins_anew(browser: sync_api.Browser, new_server: Callable[..., Any]) -> None:
    sent = list[list[dict[str, str]]]()
    with new_server() as served, Tab(browser, served) as tab:
        only_says(served, "Fine.")
        tab.page.on(
            "request",
            lambda r: sent.append(json.loads(r.post_data or "")["messages"]) if "chat" in r.url else None,
        )
        question = tab.page.get_by_label("Your message")
        question.fill("Say one")
        tab.page.keyboard.press("Shift+Enter")
        question.press_sequentially("word.")
        assert sent == []
        for text in (None, "Another.", "A third."):
            if text is not None:
                question.fill(text)
            tab.page.keyboard.press("Enter")
            until(lambda: tab.page.get_by_role("button", name="Send", exact=True).is_enabled())
            assert question.input_value() == ""
            if text == "Another.":
                tab.page.get_by_role("button", name="New chat").click()
                assert tab.answers() == []
        first, answer = {"role": "user", "content": "Say one\nword."}, {"role": "assistant", "content": "Fine."}
        assert sent[:2] == [[first], [first, answer, {"role": "user", "content": "Another."}]]
        assert sent[2:] == [[{"role": "user", "content": "A third."}]]
        assert tab.answers() == ["Fine."] and tab.problems == []


@needs_browser
def test_stop_frees_the_request(browser: sync_api.Browser, sharing: Served) -> None:
    steps = Steps(sharing)
    with Tab(browser, sharing) as tab:
        stop = tab.page.get_by_role("button", name="Stop")
        assert stop.is_disabled()
        tab.ask("Count.")
        steps.left = 3
        until(lambda: tab.pages("owned") > 0)
        stop.click()
        tab.page.get_by_text("Stopped.").wait_for()
        until(lambda: has_ended(sharing) and tab.pages("owned") == 0 and tab.total("running") == "0")
        assert stop.is_disabled() and tab.problems == []


@needs_browser
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_eight_examples_share_pages(
    browser: sync_api.Browser, sharing: Served, viewport: sync_api.ViewportSize
) -> None:
    steps = Steps(sharing)
    with Tab(browser, sharing, viewport) as tab:
        tab.page.get_by_role("button", name="Send 8 examples").click()
        until(lambda: len(sharing.engine.engine.requests) == 8)
        steps.left = 12
        until(lambda: steps.left == 0 and tab.total("running") == "8" and all(tab.answers()))
        until(lambda: tab.page.locator("#batch .chip").count() == 8 and len(tab.answers()) == 8)
        refcounts = sharing.engine.engine.page_table.refcounts
        until(lambda: tab.pages("shared") == int((refcounts > 2).sum()) > 10)  # the prefix tree owns them, too
        assert tab.pages("free") == int((refcounts == 0).sum()) and not tab.is_scrolled_sideways
        assert "and shares" in tab.page.locator("#news").inner_text()
        tab.page.locator("#batch li").first.hover()
        row = int(sharing.engine.engine.scheduler.running.order[0])
        until(lambda: tab.pages("marked") == sharing.engine.engine.page_table.counts[row])
        tab.page.get_by_role("button", name="Stop").click()
        until(lambda: has_ended(sharing) and tab.pages("owned") == tab.pages("shared") == 0)
        assert tab.pages("cached") > 10 and tab.problems == []


@needs_browser
def test_requests_that_find_no_room_wait_in_the_queue(
    browser: sync_api.Browser, new_server: Callable[..., Any]
) -> None:
    with new_server(max_batch_size=3) as served, Tab(browser, served) as tab:
        served.client.front.default_params = ENDLESS
        steps = Steps(served)
        tab.page.get_by_role("button", name="Send 8 examples").click()
        until(lambda: len(served.engine.engine.requests) == 8)
        steps.left = 2
        until(lambda: tab.page.locator("#batch .chip").count() == 3 and tab.page.locator("#queue .chip").count() == 5)
        assert tab.total("waiting") == "5"
        tab.page.get_by_role("button", name="Stop").click()
        until(lambda: has_ended(served) and tab.page.locator("#queue .chip").count() == 0)
        assert tab.problems == []


@needs_browser
def test_a_preemption_is_shown(browser: sync_api.Browser, new_server: Callable[..., Any]) -> None:
    options = {"num_pages": 36, "page_size": 16, "enable_prefix_caching": True, "max_batch_size": 8}
    with new_server(**options) as served, Tab(browser, served) as tab:
        served.client.front.default_params = ENDLESS
        steps = Steps(served)
        tab.page.get_by_role("button", name="Send 8 examples").click()
        until(lambda: len(served.engine.engine.requests) == 8)
        while served.engine.engine.metrics.preemptions == 0:
            steps.left = 1
            until(lambda: steps.left == 0)
        until(lambda: "is preempted" in tab.page.locator("#news").inner_text())
        until(lambda: tab.total("preemptions") == str(served.engine.engine.metrics.preemptions))
        assert tab.page.locator("#queue .chip").count() > 0 and tab.problems == []
        tab.page.get_by_role("button", name="Stop").click()
        until(lambda: has_ended(served))


@needs_browser
def test_a_large_pool_is_drawn_in_squares_of_several_pages(
    browser: sync_api.Browser, sharing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "take_snapshot", partial(take_snapshot, max_cells=20))
    steps = Steps(sharing)
    with Tab(browser, sharing) as tab:
        tab.page.get_by_text("a square is 5 pages").wait_for()
        tab.ask("Name a color.")
        steps.left = 3
        until(lambda: tab.pages("owned") > 0)
        assert tab.page.locator("#pages .page").count() == 20 and tab.problems == []


@needs_browser
def test_text_of_the_model_is_shown_as_text(browser: sync_api.Browser, new_server: Callable[..., Any]) -> None:
    text = "<b>bold</b> <img src=x onerror=alert(1)> &amp;"
    with new_server() as served, Tab(browser, served) as tab:
        only_says(served, text)
        tab.ask("<i>Hello</i>")
        until(lambda: tab.answers() == [text])
        assert tab.page.locator(".question").text_content() == "<i>Hello</i>"
        assert tab.page.locator("#log b, #log i, #log img").count() == 0 and tab.problems == []


@needs_browser
def test_an_error_is_shown_in_the_conversation(browser: sync_api.Browser, served: Served) -> None:
    with Tab(browser, served) as tab:
        tab.ask("word " * 2000)
        tab.page.locator(".problem", has_text="tokens").wait_for()
        assert tab.page.get_by_role("button", name="Send", exact=True).is_enabled()


@needs_browser
def test_the_page_asks_for_the_key_of_the_server(browser: sync_api.Browser, new_server: Callable[..., Any]) -> None:
    with new_server(ServerOptions(api_key=PASSWORD)) as served:
        assert get(served, "/")[0] == 200 and get(served, "/events")[0] == 401
        with Tab(browser, served) as tab:
            only_says(served, "Fine.")
            key = tab.page.get_by_role("textbox", name="API key")
            enter = tab.page.get_by_role("button", name="Continue")
            key.fill("wrong")
            enter.click()
            tab.page.get_by_text("does not accept this key").wait_for()
            key.fill(PASSWORD)
            enter.click()
            tab.page.get_by_text(MODEL).wait_for()
            until(lambda: tab.pages("free") > 0 and not key.is_visible())
            tab.ask("Name a color.")
            until(lambda: tab.answers() == ["Fine."])
            stored = tab.page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
            assert stored == ["", 0, 0] and PASSWORD not in tab.page.url
