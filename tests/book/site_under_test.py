"""The site for the browser tests, built from a copy of the tree with one more chapter in it.

That chapter has one of everything that a chapter may contain.
"""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("mkdocs", reason="the site needs the packages of the extra [docs]")
pytest.importorskip("playwright", reason="the browser tests need the package playwright")

from playwright import sync_api

from book import figures
from book.predictions import Comparison, Prediction, Question

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "chapters/99_sample/"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PHONE = sync_api.ViewportSize(width=390, height=844)
DESKTOP = sync_api.ViewportSize(width=1280, height=800)
CAPTION = "One dot is enough."
OUTCOME = "7 of 8 are wrong"
QUESTION = Question(
    "99_sample/score_bytes", "How large are the scores?", "GB", 2.147, 1.5, "32 heads × 4,096² scores × 4 B"
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: apt install chromium")


def sample_notebook() -> nbformat.NotebookNode:
    """A notebook with one of everything that a chapter may contain."""
    v4 = nbformat.v4

    def shown(html: str) -> nbformat.NotebookNode:
        return v4.new_output("execute_result", {"text/html": html, "text/plain": ""}, execution_count=1)

    dot = figures.new()[1][0, 0]
    dot.plot(0, "o", color=figures.INK)
    fence = "```mermaid\nflowchart LR\n  A[scores] --> B[softmax]\n```"
    cells = [
        v4.new_markdown_cell(
            "# 99 Sample: all at once\n\nInline $o = PV$ and [the homework](homework.py), [below](#a-second-part)."
        ),
        v4.new_markdown_cell("$$\\sum_j e^{s_j - m}$$\n\n\\begin{align}\na &= b\n\\end{align}\n\n" + fence),
        v4.new_markdown_cell(
            "## A second part\n\n| a | b |\n|---|---|\n| $x_1$ | " + "wide " * 40 + "|\n\n> Takeaway."
        ),
        v4.new_markdown_cell("## Break it"),
        v4.new_code_cell("predict('score_bytes', None)", outputs=[shown(Prediction(QUESTION, None)._repr_html_())]),
        v4.new_code_cell("outcome()", outputs=[v4.new_output("stream", text=OUTCOME + "\n")]),
        v4.new_markdown_cell("### What was wrong"),
        v4.new_code_cell("import numpy as np\nimport torch"),
        v4.new_code_cell("print('x' * 300)", outputs=[v4.new_output("stream", text="x" * 300 + "\n")]),
        v4.new_code_cell(
            "draw()",
            outputs=[
                v4.new_output("display_data", {"image/svg+xml": figures.to_svg(dot), "text/plain": ""}),
                v4.new_output("display_data", {"text/html": f'<p class="figure-caption"><em>{CAPTION}</em></p>'}),
            ],
        ),
        v4.new_code_cell(
            "mermaid(text)", outputs=[v4.new_output("display_data", {"text/markdown": fence, "text/plain": ""})]
        ),
        v4.new_code_cell("compare('score_bytes', 2.2)", outputs=[shown(Comparison(QUESTION, None, 2.2)._repr_html_())]),
    ]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


def build_site(tree: Path) -> Path:
    """The site, built by `mkdocs build --strict` from a copy of the book in an empty folder."""
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
    if not (tree / "site" / "assets" / "vendor" / "katex").exists():
        pytest.skip("npm is missing or has no network: diagrams and formulas were not built")
    return tree / "site"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


RENDERED = r"""() => document.readyState === "complete"
    && !document.querySelector("pre.diagram, div.diagram:not(:has(svg))")"""

PROBLEMS = r"""() => {
    const found = [];
    for (const image of document.images)  // one that the reader has not come near is not loaded yet
        if ((image.complete || image.loading !== "lazy") && image.naturalWidth === 0)
            found.push(`broken image ${image.src.slice(0, 80)}`);

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


class Tab:
    """A browser page that records whatever goes wrong while it loads."""

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
        self.page.goto("about:blank")  # ends what the page before still loads, such as a font
        self.problems.clear()
        self.page.goto(self.address + path, wait_until="commit")

    def report(self) -> list[str]:
        try:
            self.page.wait_for_function(RENDERED, timeout=60_000)
        except sync_api.TimeoutError:
            self.problems.append("a diagram stays text")
        return self.problems + self.page.evaluate(PROBLEMS)
