"""The site as a reader's browser shows it: every page of a built site, in headless Chromium.

The site is built from a copy of the tree with one more chapter in it, which holds everything that a chapter may.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

pytest.importorskip("mkdocs", reason="the site needs the packages of the extra [docs]")
pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from book.predictions import Comparison, Prediction, Question

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "chapters/99_sample/"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PHONE = sync_api.ViewportSize(width=390, height=844)
DESKTOP = sync_api.ViewportSize(width=1280, height=800)
QUESTION = Question(
    "99_sample/score_bytes", "How large are the scores?", "GB", 2.147, 1.5, "32 heads × 4,096² scores × 4 B"
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: apt install chromium")


# --- the site under test ---------------------------------------------------------------------------------------------


def sample_notebook() -> nbformat.NotebookNode:
    """One of everything that a chapter may hold."""
    v4 = nbformat.v4

    def shown(html: str) -> nbformat.NotebookNode:
        return v4.new_output("execute_result", {"text/html": html, "text/plain": ""}, execution_count=1)

    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    fence = "```mermaid\nflowchart LR\n  A[scores] --> B[softmax]\n```"
    cells = [
        v4.new_markdown_cell(
            "# 99 Sample: all at once\n\nInline $o = PV$ and [the homework](homework.py), [below](#a-second-part)."
        ),
        v4.new_markdown_cell("$$\\sum_j e^{s_j - m}$$\n\n\\begin{align}\na &= b\n\\end{align}\n\n" + fence),
        v4.new_markdown_cell(
            "## A second part\n\n| a | b |\n|---|---|\n| $x_1$ | " + "wide " * 40 + "|\n\n> Takeaway."
        ),
        v4.new_code_cell("predict('score_bytes', None)", outputs=[shown(Prediction(QUESTION, None)._repr_html_())]),
        v4.new_code_cell("print('x' * 300)", outputs=[v4.new_output("stream", text="x" * 300 + "\n")]),
        v4.new_code_cell("draw()", outputs=[v4.new_output("display_data", {"image/png": pixel, "text/plain": ""})]),
        v4.new_code_cell(
            "mermaid(text)", outputs=[v4.new_output("display_data", {"text/markdown": fence, "text/plain": ""})]
        ),
        v4.new_code_cell("compare('score_bytes', 2.2)", outputs=[shown(Comparison(QUESTION, None, 2.2)._repr_html_())]),
    ]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by `mkdocs build --strict`."""
    tree = tmp_path_factory.mktemp("site")
    for name in ("docs", "chapters", "experiments"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(ROOT / "mkdocs.yml", tree)
    for name in ("book", "mini_engine", ".cache"):
        (ROOT / name).mkdir(exist_ok=True)
        (tree / name).symlink_to(ROOT / name)
    chapter = tree / SAMPLE
    chapter.mkdir()
    nbformat.write(sample_notebook(), chapter / "99_sample.ipynb")
    (chapter / "99_sample.md").write_text("# 99 Sample: all at once\n", encoding="utf-8")
    (chapter / "homework.py").write_text(
        'def scores(q):\n    """All."""\n    raise NotImplementedError\n', encoding="utf-8"
    )
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "SITE_URL": ""}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    built = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    if not (tree / "site" / "assets" / "vendor" / "mermaid").exists():
        pytest.skip("npm is missing or has no network: diagrams and formulas were not built")
    return tree / "site"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[sync_api.Page]:
    page = browser.new_page(viewport=DESKTOP, color_scheme="light")
    page.set_default_timeout(10_000)
    yield page
    page.close()


def pages_of(site: Path) -> list[str]:
    return [file.relative_to(site).as_posix().removesuffix("index.html") for file in sorted(site.rglob("*.html"))]


# --- every page ------------------------------------------------------------------------------------------------------

RENDERED = r"""() => {
    const places = [...document.querySelectorAll(".arithmatex, .nb-text")];
    const math = places.some((place) => /\$|\\[([]/.test(place.textContent));
    return document.readyState === "complete"
        && !document.querySelector("pre.diagram, div.diagram:not(:has(svg))")
        && (!math || document.body.dataset.math === "done");
}"""

PROBLEMS = r"""() => {
    const found = [];
    for (const image of document.images)
        if (!image.complete || image.naturalWidth === 0) found.push(`broken image ${image.src.slice(0, 80)}`);
    for (const formula of document.querySelectorAll(".katex-error"))
        found.push(`formula not understood: ${formula.textContent}`);

    const verbatim = "pre, code, script, style, .katex, svg, .nb-out";
    const formula = /\$[^$\s]([^$]*[^$\s])?\$|\$\$|\\[([]|\\begin\{/;
    const texts = document.createTreeWalker(document.querySelector("article") ?? document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const text = texts.currentNode;
        if (!text.parentElement.closest(verbatim) && formula.test(text.data))
            found.push(`formula left as text: ${text.data.trim().slice(0, 80)}`);
    }

    const width = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth > width) {
        const scrolling = "pre, .md-typeset__scrollwrap, .nb-out, .nb-scroll, .diagram, .step";
        const widest = [...document.querySelectorAll("article *")].find((element) =>
            element.getBoundingClientRect().right > width + 1 && !element.parentElement.closest(scrolling));
        const where = widest?.outerHTML.slice(0, 120);
        found.push(`${document.documentElement.scrollWidth} px wide on a screen of ${width}: ${where}`);
    }
    return found;
}"""


def batches(items: list[str], size: int) -> list[list[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


class Tab:
    """A page of the browser that notes whatever goes wrong while it loads."""

    def __init__(self, context: sync_api.BrowserContext, address: str) -> None:
        self.address, self.problems = address, list[str]()
        self.page = context.new_page()
        note = self.problems.append
        self.page.on("console", lambda m: note(f"console: {m.text}") if m.type == "error" else None)
        self.page.on("pageerror", lambda error: note(f"script error: {error}"))
        self.page.on("requestfailed", lambda r: note(f"request failed: {r.url}"))
        self.page.on("response", lambda r: note(f"{r.status}: {r.url}") if r.status >= 400 else None)
        self.page.on(
            "request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else note(f"foreign: {r.url}")
        )

    def open(self, path: str) -> None:
        self.problems.clear()
        self.page.goto(self.address + path, wait_until="commit")

    def report(self) -> list[str]:
        try:
            self.page.wait_for_function(RENDERED, timeout=20_000)
        except sync_api.TimeoutError:
            self.problems.append("a diagram or a formula stays text")
        return self.problems + self.page.evaluate(PROBLEMS)


@needs_browser
def test_every_page_renders_without_a_network_and_fits_a_phone(
    site: Path, address: str, browser: sync_api.Browser
) -> None:
    context = browser.new_context(viewport=PHONE)
    tabs = [Tab(context, address) for _ in range(4)]
    report: dict[str, list[str]] = {}
    for paths in batches(pages_of(site), len(tabs)):
        for tab, path in zip(tabs, paths, strict=False):
            tab.open(path)
        report |= {path: found for tab, path in zip(tabs, paths, strict=False) if (found := tab.report())}
    context.close()
    assert report == {}


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
            if not target.is_file() or unquote(parts.fragment) not in ids:
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []


# --- what a reader does ----------------------------------------------------------------------------------------------


@needs_browser
def test_a_prediction_is_kept_and_ours_shown_only_then(address: str, page: sync_api.Page) -> None:
    page.goto(address + SAMPLE)
    box, comparison = page.locator(".prediction"), page.locator(".comparison")
    field = box.get_by_label("Your prediction")
    assert "2.147" not in box.inner_text() and QUESTION.why not in box.inner_text()

    field.fill("a lot")
    field.press("Enter")
    assert "Give a number" in box.inner_text() and "2.147" not in box.inner_text()

    field.fill("1,800e-3")
    field.press("Enter")
    assert "Give a number" in box.inner_text()

    field.fill("4.294")
    field.press("Enter")
    for text in ("4.294 GB", "2.147 GB", "Yours is 2 × ours", "Further off than a factor of 1.5", QUESTION.why):
        assert text in box.inner_text()
    assert "4.294 GB" in comparison.inner_text()
    assert box.locator("[aria-live=polite]").inner_text().startswith("You")

    page.reload()
    assert field.input_value() == "4.294" and "2.147 GB" in box.inner_text()

    field.fill("2k")
    box.get_by_role("button").click()
    assert "2,000 GB" in box.inner_text() and "4.294" not in box.inner_text()


@needs_browser
def test_without_scripts_our_answer_stays_hidden(browser: sync_api.Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address + SAMPLE)
    text = page.locator(".prediction").inner_text()
    assert QUESTION.question in text and "2.147" not in text and QUESTION.why not in text
    context.close()


@needs_browser
def test_dark_mode_toggles_redraws_diagrams_and_lasts(address: str, page: sync_api.Page) -> None:
    page.goto(address + SAMPLE)
    page.wait_for_selector(".diagram[data-scheme=default] svg")
    page.get_by_title("Switch to dark mode").click()
    page.wait_for_selector("body[data-md-color-scheme=slate] .diagram[data-scheme=slate] svg")
    page.reload()
    page.wait_for_selector("body[data-md-color-scheme=slate] .diagram[data-scheme=slate] svg")


@needs_browser
def test_search_finds_a_glossary_term(address: str, page: sync_api.Page) -> None:
    page.goto(address)
    page.locator(".md-search__input").click()
    page.keyboard.type("FlashInferScheduler")
    page.wait_for_selector(".md-search-result__item a[href*=glossary]")


# --- how pages are made ----------------------------------------------------------------------------------------------


def test_a_chapter_keeps_its_folders_address_and_its_headings(site: Path) -> None:
    text = (site / SAMPLE / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<a href="homework/">the homework</a>', text)
    assert re.search(r'<h2 id="a-second-part">', text)
    assert "make lab" in text and "pytest chapters/99_sample" in text
    assert len(text) < 150_000, "JupyterLab's style sheets are in the page again"


def test_fetching_the_libraries_says_when_npm_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import fetch_assets

    monkeypatch.setattr(fetch_assets, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(fetch_assets.AssetError, match="npm is not installed"):
        fetch_assets.fetch_assets()


def test_the_outline_gives_every_module_a_chapter() -> None:
    outline = tomllib.loads((ROOT / "docs" / "outline.toml").read_text(encoding="utf-8"))["modules"]
    patterns = [pattern for chapter in outline.values() for pattern in chapter]
    files = [file.relative_to(ROOT / "mini_engine").with_suffix("") for file in (ROOT / "mini_engine").rglob("*.py")]
    modules = {".".join(file.parts) for file in files if not file.name.startswith("__")}
    packages = tuple(pattern for pattern in patterns if pattern.endswith("."))
    missing = {name for name in modules if name not in patterns and not name.startswith(packages)}
    assert missing == set(), "name these modules in docs/outline.toml"
    assert {pattern for pattern in patterns if not pattern.endswith(".")} <= modules, "these are no modules any more"
