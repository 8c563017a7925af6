"""The site as a reader's browser shows it: every page of a built site, in headless Chromium."""

from __future__ import annotations

import re
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from tests.book.site_under_test import CAPTION, OUTCOME, PHONE, PROBLEMS, QUESTION, ROOT, SAMPLE, Tab, needs_browser


def pages_of(site: Path) -> list[str]:
    return [file.relative_to(site).as_posix().removesuffix("index.html") for file in sorted(site.rglob("*.html"))]


# --- every page ------------------------------------------------------------------------------------------------------


def batches(items: list[str], size: int) -> list[list[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def kind(path: str) -> str:
    """Pages that are generated from one template, with the same scripts, are of one kind; a written page is its own."""
    top = path.partition("/")[0]
    return top if top in ("api", "mini_engine") else "homework" if path.endswith("/homework/") else path


SHOW = """async (address) => {
    const other = new DOMParser().parseFromString(await (await fetch(address)).text(), "text/html");
    const article = document.adoptNode(other.querySelector("article"));
    document.querySelector("article").replaceWith(article);
    return article.querySelector(".katex, .nb-text, pre.diagram, div.diagram") !== null;
}"""


@pytest.fixture(scope="module")
def visits(site: Path, address: str, browser: sync_api.Browser) -> dict[str, list[str]]:
    """What is wrong with each page.

    Every written page is loaded, and one page of each template, which then shows the articles of the others.
    """
    context = browser.new_context(viewport=PHONE)
    tabs = [Tab(context, address) for _ in range(4)]
    found: dict[str, list[str]] = {}
    first = {kind(path): path for path in reversed(pages_of(site))}
    loaded = sorted(first.values())
    for path in sorted(set(pages_of(site)) - set(loaded), key=kind):
        if tabs[0].page.url != address + first[kind(path)]:
            tabs[0].open(first[kind(path)])
            tabs[0].page.wait_for_load_state()
        if tabs[0].page.evaluate(SHOW, address + path):
            loaded.append(path)  # its own scripts and style sheets draw its contents
        else:
            found[path] = tabs[0].problems + tabs[0].page.evaluate(PROBLEMS)
    for paths in batches(loaded, len(tabs)):
        for tab, path in zip(tabs, paths, strict=False):
            tab.open(path)
        for tab, path in zip(tabs, paths, strict=False):
            found[path] = tab.report()
    context.close()
    return found


@needs_browser
def test_every_page_renders_without_a_network_and_fits_a_phone(visits: dict[str, list[str]]) -> None:
    assert {path: problems for path, problems in visits.items() if problems} == {}


class Anchors(HTMLParser):
    """The links of a page, and the ids they may point to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = {""}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif (name == "src" or (name == "href" and tag in ("a", "link"))) and value:
                self.links.append(value)


def test_every_link_inside_the_site_leads_somewhere(site: Path) -> None:
    parsed = {file: Anchors() for file in site.rglob("*.html") if file.name != "404.html"}  # it names the site's root
    for file, anchors in parsed.items():
        anchors.feed(file.read_text(encoding="utf-8"))
    broken = []
    for file, anchors in parsed.items():
        for link in anchors.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            ids = parsed[target].ids if target in parsed else {parts.fragment}
            is_page = not parts.path.endswith(".ipynb")  # a notebook's link that does not lead to its page
            if not is_page or not target.is_file() or unquote(parts.fragment) not in ids:
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []


def test_no_item_of_a_list_is_part_of_the_paragraph_before_it(site: Path) -> None:
    """Python-Markdown, unlike GitHub, needs an empty line between an indented paragraph and the next item."""
    no_prose = re.compile(r"<(pre|script|style|svg)\b.*?</\1>", re.DOTALL)
    pages = {file: no_prose.sub("", file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    item = re.compile(r"^[-*] ", re.MULTILINE)
    assert [str(file.relative_to(site)) for file, html in pages.items() if item.search(html)] == []


# --- what a reader does ----------------------------------------------------------------------------------------------


@needs_browser
def test_a_prediction_is_kept_and_ours_shown_only_then(address: str, page: sync_api.Page) -> None:
    page.goto(address + SAMPLE)
    box, comparison = page.locator(".prediction"), page.locator(".comparison")
    field, numbers = box.get_by_label("Your prediction"), comparison.locator("table")
    outcome = page.get_by_text(OUTCOME)
    assert "2.147" not in box.inner_text() and QUESTION.why not in box.inner_text()
    assert not numbers.is_visible()

    for no_number in ("a lot", "1,800e-3"):
        field.fill(no_number)
        field.press("Enter")
        assert "Give a number" in box.inner_text() and "2.147" not in box.inner_text()
        assert not numbers.is_visible() and not outcome.is_visible()

    field.fill("4.294")
    field.press("Enter")
    for text in ("4.294 GB", "2.147 GB", "Yours is 2 × ours", "Further off than a factor of 1.5", QUESTION.why):
        assert text in box.inner_text()
    assert numbers.is_visible() and "4.294 GB" in numbers.inner_text() and outcome.is_visible()
    assert box.locator("[aria-live=polite]").inner_text().startswith("You")

    page.reload()
    assert not field.is_visible() and "4.294 GB" in box.inner_text() and numbers.is_visible()

    box.get_by_role("button", name="Withdraw").click()
    assert "2.147" not in box.inner_text() and not numbers.is_visible() and not outcome.is_visible()


@needs_browser
def test_a_comparison_takes_the_prediction_or_shows_its_numbers_without_one(address: str, page: sync_api.Page) -> None:
    page.goto(address + SAMPLE)
    box, comparison = page.locator(".prediction"), page.locator(".comparison")
    comparison.get_by_text("Show the numbers").click()
    shown = comparison.inner_text().replace("\xa0", " ")
    assert "2.147 GB" in shown and "none" not in shown
    comparison.get_by_label("Your prediction").fill("2k")
    comparison.get_by_role("button", name="Commit").click()
    assert "2,000 GB" in box.inner_text() and "2,000 GB" in comparison.inner_text()


@needs_browser
def test_without_scripts_our_answer_stays_hidden(browser: sync_api.Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address + SAMPLE)
    text = page.locator(".prediction").inner_text()
    assert QUESTION.question in text and "2.147" not in text and QUESTION.why not in text
    context.close()


@needs_browser
def test_diagrams_are_drawn_without_scripts_in_the_colors_of_the_scheme(
    browser: sync_api.Browser, address: str
) -> None:
    fills = []
    for scripts in (True, False):
        context = browser.new_context(java_script_enabled=scripts, color_scheme="dark")
        page = context.new_page()
        page.goto(address + SAMPLE)
        diagrams = page.locator(".diagram svg")
        assert diagrams.count() == 2 and "scores, softmax" in (diagrams.first.get_attribute("aria-label") or "")
        # Without scripts the page stays light.
        fills.append(diagrams.first.locator("rect").first.evaluate("box => getComputedStyle(box).fill"))
        context.close()
    assert fills[0] != fills[1]


@needs_browser
def test_formulas_are_set_without_scripts(browser: sync_api.Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address + SAMPLE)
    formulas = page.locator("article .katex")
    assert formulas.locator("annotation").all_text_contents() == [
        "o = PV", r"\sum_j e^{s_j - m}", "\\begin{align}\na &= b\n\\end{align}", "x_1"
    ]  # fmt: skip
    assert page.locator("article .katex-display").count() == 2
    context.close()


@needs_browser
def test_dark_mode_toggles_and_lasts(address: str, page: sync_api.Page) -> None:
    page.goto(address + SAMPLE)
    page.get_by_title("Switch to dark mode").click()
    page.wait_for_selector("body[data-md-color-scheme=slate]")
    page.reload()
    page.wait_for_selector("body[data-md-color-scheme=slate]")


@needs_browser
def test_a_phone_lists_the_chapters_sections_and_says_which_is_read(browser: sync_api.Browser, address: str) -> None:
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto(address + "chapters/06_paged_kv_cache/")
    contents = page.locator(".chapter-contents")
    contents.locator("summary").click()
    last = contents.locator("a").last
    title = last.inner_text()
    last.click()
    page.wait_for_function(
        "title => document.querySelector('.chapter-contents summary').textContent === title", arg=title
    )
    assert contents.get_attribute("open") is None and contents.locator("summary").is_visible()

    contents.locator("summary").click()
    contents.locator("a[href='#how-large-is-a-page']").click()
    page.wait_for_function("""() => {
        const [bar, heading] = [".chapter-contents", "#how-large-is-a-page"].map(
            (selector) => document.querySelector(selector).getBoundingClientRect());
        return heading.top >= bar.bottom && heading.bottom <= innerHeight;
    }""")  # the heading is in sight, and not behind the bar
    context.close()


@needs_browser
def test_search_finds_a_glossary_term(address: str, page: sync_api.Page) -> None:
    page.goto(address)
    page.locator(".md-search__input").click()
    page.keyboard.type("FlashInferScheduler")
    page.wait_for_selector(".md-search-result__item a[href*=glossary]")


@needs_browser
def test_the_search_is_fetched_with_the_first_query(address: str, page: sync_api.Page) -> None:
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url.removeprefix(address)))
    page.goto(address, wait_until="networkidle")
    page.locator(".md-search__input").click()
    page.get_by_text("Type to start searching").wait_for()
    assert not {"search/worker.js", "search/sections.json"}.intersection(fetched)
    with page.expect_request("**/search/sections.json"):
        page.keyboard.type("page")
    assert "search/worker.js" in fetched


# --- how pages are made ----------------------------------------------------------------------------------------------


def test_a_chapter_keeps_its_folders_address_and_its_headings(site: Path) -> None:
    text = (site / SAMPLE / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<a href="homework/">the homework</a>', text)
    assert re.search(r'<h2 id="a-second-part">', text)
    assert "make lab" in text and "pytest chapters/99_sample" in text


def test_a_chapter_folds_its_plumbing_and_describes_its_figures(site: Path) -> None:
    text = (site / SAMPLE / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<summary>Imports and setup</summary><div[^>]*><pre><code>", text)
    assert re.search(r"<summary>Code for the figure</summary>", text)
    assert "predict(" not in text.partition("Your prediction")[0].replace("<code>predict(", "")
    drawing = re.search(r'<figure class="nb-figure"[^>]*><svg aria-label="([^"]*)"[^>]* role="img"', text)
    assert drawing and drawing[1] == CAPTION and f"<figcaption><em>{CAPTION}</em></figcaption>" in text
    assert "base64" not in text


def test_the_navigation_is_one_landmark_and_no_header_is_empty(site: Path) -> None:
    for page in site.rglob("index.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.search(r'<nav[^>]* data-md-level="[1-9]"|<th[^>]*></th>', html), page
        for element in ("nav", "div"):
            assert len(re.findall(f"<{element}\\b", html)) == html.count(f"</{element}>"), f"{element} in {page}"


def test_a_figure_of_an_experiment_is_part_of_the_page(site: Path) -> None:
    text = (site / "experiments/05_throughput/index.html").read_text(encoding="utf-8")
    assert re.search(r'<figure class="nb-figure"[^>]*><svg aria-label="Host and device [^"]*"[^>]* role="img"', text)


@needs_browser
def test_figures_follow_the_scheme_and_fit_a_phone(browser: sync_api.Browser, address: str) -> None:
    inks = []
    for scheme, width in (("light", 1280), ("dark", 390)):
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        page = context.new_page()
        page.goto(address + SAMPLE)
        drawing = page.locator(".nb-figure svg")
        text = drawing.locator("text").first
        assert (drawing.bounding_box() or {})["width"] <= width
        inks.append(text.evaluate("text => getComputedStyle(text).fill"))
        context.close()
    assert inks[0] != inks[1]


def test_fetching_the_libraries_says_when_npm_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import fetch_assets

    monkeypatch.setattr(fetch_assets, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fetch_assets.AssetError, match="npm"):
        fetch_assets.fetch_assets()


def test_two_builds_may_fetch_the_libraries_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import fetch_assets

    monkeypatch.setattr(fetch_assets, "CACHE", tmp_path / "cache")
    npm = tmp_path / "npm"  # while it packs, another build ends
    npm.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, tarfile\n"
        f"theirs = pathlib.Path({str(fetch_assets.CACHE)!r}, sys.argv[2])\n"
        "theirs.mkdir(parents=True)\n"
        "(theirs / 'LICENSE').write_text('theirs')\n"
        "with tarfile.open('a.tgz', 'w') as archive:\n"
        "    archive.add(theirs, 'package')\n"
        "print('a.tgz')\n",
        encoding="utf-8",
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fetch_assets.fetch_assets()
    for name in fetch_assets.PACKAGES:
        assert [file.name for file in fetch_assets.package_folder(name).iterdir()] == ["LICENSE"]


def test_the_outline_names_modules_that_exist() -> None:
    outline = tomllib.loads((ROOT / "docs" / "outline.toml").read_text(encoding="utf-8"))["modules"]
    files = [file.relative_to(ROOT / "mini_engine").with_suffix("") for file in (ROOT / "mini_engine").rglob("*.py")]
    named = {name for names in outline.values() for name in names if not name.endswith(".")}
    assert named - {".".join(file.parts) for file in files} == set()
