"""Draw mermaid diagrams when the site is built, in the colors of whichever scheme the reader has chosen.

Mermaid runs in a headless browser, once for all diagrams that are new; drawings are kept in `.cache/diagrams/`. A
drawing names no colors but the custom properties of stylesheets/diagrams.css.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from html import escape, unescape
from pathlib import Path

from bs4 import BeautifulSoup
from fetch_assets import CACHE, package_folder
from slim_svg import slim

DIAGRAM = re.compile(r'<pre class="diagram"><code>(.*?)</code></pre>', re.DOTALL)
WIDTH = re.compile(r"max-width: ([\d.]+)px")
SMALLEST = 0.7  # of a drawing's own size: there its text has 10.5 px
DRAWINGS = CACHE.parent / "diagrams"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Mermaid computes with colors, so it gets some that stand for the properties.
COLORS = {
    "#1f2933": "ink", "#52606d": "line", "#eef4f5": "fill", "#2b6f77": "edge", "#f7f5f0": "group", "#fdf3dc": "note",
}  # fmt: skip
SETTINGS = {
    "startOnLoad": False,
    "theme": "base",
    "fontFamily": "'Source Sans 3', sans-serif",
    "flowchart": {"useMaxWidth": True, "curve": "basis", "padding": 12, "wrappingWidth": 220},
    "sequence": {"actorMargin": 16, "width": 120},
    "themeVariables": {
        "fontSize": "15px",
        "primaryColor": "#eef4f5",
        "primaryTextColor": "#1f2933",
        "primaryBorderColor": "#2b6f77",
        "lineColor": "#52606d",
        "textColor": "#1f2933",
        "titleColor": "#1f2933",
        "clusterBkg": "#f7f5f0",
        "clusterBorder": "#52606d",
        "edgeLabelBackground": "#f7f5f0",
        "noteBkgColor": "#fdf3dc",
        "noteTextColor": "#1f2933",
        "noteBorderColor": "#52606d",
        "actorBkg": "#eef4f5",
        "actorBorder": "#2b6f77",
        "actorTextColor": "#1f2933",
        "signalColor": "#52606d",
        "signalTextColor": "#1f2933",
        "labelBoxBkgColor": "#f7f5f0",
        "labelTextColor": "#1f2933",
        "loopTextColor": "#1f2933",
    },
}
PAGE = """<!doctype html><meta charset="utf-8">
<style>@font-face {{ font-family: "Source Sans 3"; font-weight: 200 900; src: url("{font}"); }}
body {{ font-family: "Source Sans 3"; width: 1000px; }}</style>
<script src="{mermaid}"></script>
<script type="module">
const sources = {sources};
mermaid.initialize({settings});
await document.fonts.load("15px 'Source Sans 3'");
for (const [name, source] of Object.entries(sources)) {{
  const box = document.createElement("figure");
  box.id = name;
  try {{
    box.innerHTML = (await mermaid.render("d" + name, source)).svg;
  }} catch (error) {{
    box.textContent = error.message;
  }}
  document.body.append(box);
}}
</script>"""


class DiagramError(Exception):
    """Diagrams cannot be drawn; the message says why."""


def sources(html: str) -> list[str]:
    """The diagrams of a page, as mermaid's text."""
    return [unescape(source) for source in DIAGRAM.findall(html)]


def draw(texts: Iterable[str]) -> None:
    """Draw the diagrams that are not in the cache; raises `DiagramError` where that is impossible."""
    missing = {_name(text): text for text in texts if not _file(text).exists()}
    if not missing:
        return
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise DiagramError("no Chromium found, so diagrams stay as text: on Debian, apt install chromium")
    DRAWINGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch, "diagrams.html")
        page.write_text(
            PAGE.format(
                font=_uri("@fontsource-variable/source-sans-3", "files/source-sans-3-latin-wght-normal.woff2"),
                mermaid=_uri("mermaid", "dist/mermaid.min.js"),
                sources=json.dumps(missing).replace("</", "<\\/"),
                settings=json.dumps(SETTINGS),
            ),
            encoding="utf-8",
        )
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        flags += [f"--user-data-dir={scratch}/profile", "--virtual-time-budget=60000", "--dump-dom"]
        done = subprocess.run(
            [browser, *flags, page.as_uri()], capture_output=True, text=True, check=False, timeout=180
        )
    drawn = BeautifulSoup(done.stdout, "html.parser")
    for name, text in missing.items():
        figure = drawn.find(id=name)
        svg = figure.find("svg") if figure is not None else None
        if svg is None:
            reason = figure.get_text() if figure is not None else done.stderr[-300:]
            raise DiagramError(f"mermaid cannot draw {text[:60]!r}: {reason}")
        slim(svg)
        svg["role"] = "img"
        labels = [" ".join(label.get_text(" ").split()) for label in svg.select("foreignObject, text")]
        svg["aria-label"] = "Diagram: " + ", ".join(dict.fromkeys(filter(None, labels)))
        _file(text).write_text(_with_properties(str(svg)), encoding="utf-8")


def insert(html: str) -> str:
    """A page with its drawings in place of mermaid's text, as far as they are drawn."""

    def drawing(match: re.Match[str]) -> str:
        file = _file(unescape(match[1]))
        if not file.exists():
            return match[0]
        return f'<div class="diagram">{WIDTH.sub(_at_least, file.read_text(encoding="utf-8"), count=1)}</div>'

    return DIAGRAM.sub(drawing, html)


def _at_least(width: re.Match[str]) -> str:
    """A drawing's own width, and the width below which it is scrolled and not made smaller."""
    return f"max-width: {width[1]}px; min-width: {SMALLEST * float(width[1]):.0f}px"


def _with_properties(svg: str) -> str:
    for color, name in COLORS.items():
        svg = re.sub(color, f"var(--diagram-{name})", svg, flags=re.IGNORECASE)
    return svg


def _name(text: str) -> str:
    """A name that changes with whatever the drawing depends on."""
    version = package_folder("mermaid").name
    slimmed_by = Path(__file__).with_name("slim_svg.py").read_text(encoding="utf-8")
    return "g" + hashlib.sha256(f"{version}{SETTINGS}{slimmed_by}{text}".encode()).hexdigest()[:16]


def _file(text: str) -> Path:
    return DRAWINGS / f"{_name(text)}.svg"


def _uri(package: str, file: str) -> str:
    path = package_folder(package) / file
    if not path.exists():
        raise DiagramError("the packages of docs/fetch_assets.py are missing, so diagrams stay as text")
    return escape(path.as_uri())
