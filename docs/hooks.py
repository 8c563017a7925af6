"""What mkdocs.yml cannot say: the pages that lie outside docs/, and the navigation over those that exist.

A chapter is finished, and listed, once chapters/NN_slug/NN_slug.ipynb exists. Every page that comes from outside docs/
keeps its path in the repository, so that a relative link works in Jupyter, on GitHub and here alike.
"""

from __future__ import annotations

import ast
import gc
import itertools
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import cards
import formulas
import pareto
from bs4 import BeautifulSoup
from code_colors import merge_colors
from diagrams import DiagramError, draw, insert, sources
from fetch_assets import AssetError, asset_files, fetch_assets
from formulas import FormulaError
from glossary_terms import add_anchors, link_terms, read_glossary
from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import CombinedEvent, event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from notebook_page import describe_figure, inline_figure, tidy
from page_frame import break_after_dots, complete, describe, keep_together, span_rows
from search_index import defer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the book's own package, whether it is installed or not
from book import code_lines, ledger, values  # noqa: E402
from book.grading.parts import engine_diagram, finished_part_names  # noqa: E402
from book.results import results_page_markdown  # noqa: E402

OUTLINE = tomllib.loads((ROOT / "docs" / "outline.toml").read_text(encoding="utf-8"))
SOURCE_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
GLOSSARY = "glossary.md"
TERMS = read_glossary(ROOT / "docs" / GLOSSARY)
WITH_TERMS = {"dataflow.md", "trace.md", "play.md"}  # besides the chapters and the parts
NAVIGATION: set[str] = set()  # addresses of the pages in the navigation of this build
DRAWING = re.compile(r'<p><img alt="([^"]*)" src="([^":]+\.svg)" ?/?></p>')
LINK = re.compile(r"\]\(([^)\s]+)\)")
INTRODUCED_IN = re.compile(r"<em>(Chapter (\d+))")  # the line below a term of the glossary

log = get_plugin_logger("book")


@dataclass(frozen=True)
class Chapter:
    """A finished chapter, seen from the repository's root."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name.partition("_")[0])

    @property
    def notebook(self) -> str:
        return f"chapters/{self.folder.name}/{self.folder.name}.ipynb"

    @property
    def homework(self) -> str | None:
        return _if_exists(f"chapters/{self.folder.name}/homework.py")

    @property
    def experiment(self) -> str | None:
        return _if_exists(f"experiments/{cards.experiment(self.number)}/README.md")

    @property
    def title(self) -> str:
        """The notebook's first heading, less a number that it may carry."""
        text = (self.folder / f"{self.folder.name}.md").read_text(encoding="utf-8")
        heading = re.search(r"^# (.+)$", re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL), re.MULTILINE)
        name = heading.group(1) if heading else self.folder.name
        return re.sub(r"^(chapter )?\d+\s*[.:·—-]?\s*", "", name.strip(), flags=re.IGNORECASE)

    @property
    def label(self) -> str:
        return f"{self.number}. {re.split('[:;]', self.title)[0]}"


class SourcePage(File):
    """A source file shown as a page of its own."""

    def is_documentation_page(self) -> bool:
        return True


def _if_exists(path: str) -> str | None:
    return path if (ROOT / path).exists() else None


def chapters() -> list[Chapter]:
    """The finished chapters, in order."""
    return [
        Chapter(folder)
        for folder in sorted(ROOT.glob("chapters/[0-9][0-9]_*"))
        if (folder / f"{folder.name}.ipynb").exists()
    ]


def experiments() -> list[str]:
    """The page of every experiment, in order."""
    return [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob("experiments/*/README.md"))]


def modules() -> list[str]:
    """The engine's modules, in the order in which the book builds them: `attention.naive`, `rope`, ..."""
    found = []
    for file in sorted((ROOT / "mini_engine").rglob("*.py")):
        name = ".".join(file.relative_to(ROOT / "mini_engine").with_suffix("").parts)
        if not name.rpartition(".")[2].startswith("__"):
            found.append(name)
    return sorted(found, key=lambda name: (module_chapter(name) or 99, name))


def module_chapter(name: str) -> int | None:
    """The number of the chapter that builds a module, if the outline names the module or its package."""
    for named in (name, name.rpartition(".")[0] + "."):
        for number, patterns in OUTLINE["modules"].items():
            if named in patterns:
                return int(number)
    return None


# --- configuration: libraries of the browser, navigation -------------------------------------------------------------


def on_startup(**_: object) -> None:
    """Collect garbage rarely: parsed pages are millions of objects, and each collection would visit them all."""
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    try:
        fetch_assets()
    except AssetError as error:
        log.info(str(error))  # no warning: without npm the book can still be read and checked
    config.nav = _navigation()
    return config


def _navigation() -> list[object]:
    book: list[object] = ["index.md"]
    for part in OUTLINE["parts"]:
        finished = [chapter for chapter in chapters() if chapter.number in part["chapters"]]
        if (ROOT / "docs" / part["page"]).exists():
            entries: list[object] = [part["page"]]
            for chapter in finished:
                entries.append({chapter.label: [chapter.notebook, *filter(None, [chapter.homework])]})
            book.append({part["title"]: entries})
    engine = ["dataflow.md", "trace.md", "play.md", {"API": ["api/index.md", *_api_groups()]}]
    return [
        {"Book": book},
        {"Engine": engine},
        {"Results": ["results.md", "ledger.md", *experiments()]},
        {"Glossary": ["glossary.md"]},
        {"Teach": ["teaching.md", "contributing.md", *filter(None, [_if_exists("book/README.md")])]},
    ]


def _api_groups() -> Iterator[dict[str, list[str]]]:
    """The API pages of each chapter."""
    labels = {chapter.number: chapter.label for chapter in chapters()}
    for number, names in itertools.groupby(modules(), module_chapter):
        yield {labels.get(number or 0, "Other modules"): [f"api/{name}.md" for name in names]}


# --- files -----------------------------------------------------------------------------------------------------------


@event_priority(100)  # before mkdocs-jupyter, which takes over the notebooks
def _add_files(files: Files, config: MkDocsConfig) -> Files:
    for name, asset in asset_files():
        files.append(File.generated(config, f"assets/vendor/{name}", abs_src_path=str(asset)))
    files.append(File.generated(config, "api/index.md", content=_api_index()))
    for name in modules():
        files.append(File.generated(config, f"api/{name}.md", content=_api_page(name)))

    pages = [chapter.notebook for chapter in chapters()]
    pages += experiments()
    pages += [chapter.homework for chapter in chapters() if chapter.homework]
    pages += filter(None, [_if_exists("book/README.md")])
    while pages:
        page = pages.pop(0)
        if files.get_file_from_path(page) is None:
            files.append(_repository_file(config, page))
            pages += _linked_files(page)
    return files


def _repository_file(config: MkDocsConfig, path: str) -> File:
    """A file of the repository, as the site shows it: text as a page, anything else as it is."""
    optional = InclusionLevel.NOT_IN_NAV  # the navigation may leave it out
    if language := SOURCE_LANGUAGES.get(Path(path).suffix):
        return SourcePage.generated(config, path, content=_source_page(path, language), inclusion=optional)
    file = File.generated(config, path, abs_src_path=str(ROOT / path), inclusion=optional)
    if Path(path).name == "README.md":
        # Its address is its folder's, but it does not stand for a whole section of the navigation.
        file.dest_uri, file.name = f"{posixpath.dirname(path)}/index.html", "README"
    return file


def _linked_files(path: str) -> Iterator[str]:
    """The files of the repository that a notebook or a Markdown page links to."""
    if Path(path).suffix not in {".md", ".ipynb"}:
        return
    for link in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), urlsplit(link).path))
        if not target.startswith(("..", "docs/")) and (ROOT / target).is_file():  # docs/ is the site already
            yield target


@event_priority(-100)  # after it
def _shorten_addresses(files: Files, config: MkDocsConfig) -> Files:
    """A chapter's address is its folder's: chapters/01_naive_attention/."""
    for chapter in chapters():
        file = files.get_file_from_path(chapter.notebook)
        assert file is not None
        file.abs_src_path = str(ROOT / chapter.notebook)  # which the wrapper of a generated file forgets
        file.name = "index"
        file.dest_uri = f"{posixpath.dirname(chapter.notebook)}/index.html"
        file.url = f"{posixpath.dirname(chapter.notebook)}/"
        file.abs_dest_path = str(Path(config.site_dir, file.dest_uri))
    return files


on_files = CombinedEvent(_add_files, _shorten_addresses)


def _source_page(path: str, language: str) -> str:
    name, text = Path(path).name, (ROOT / path).read_text(encoding="utf-8").rstrip()
    listing = f"````{language}\n{text}\n````\n"
    chapter = next((c for c in chapters() if c.homework == path), None)
    if chapter is None:
        module = ".".join(Path(path).with_suffix("").parts[1:])
        api = f", explained on its [API page]({posixpath.relpath('api', posixpath.dirname(path))}/{module}.md)"
        about = f"# {name}\n\n`{path}`{api if module in modules() else ''}"
        return f'---\nhide: [navigation, toc]\n---\n\n{about}\n\n<div class="source" markdown>\n{listing}</div>\n'
    return (
        f"# Homework {chapter.number}\n\n"
        f"Write your answers in `{path}`, with any editor. Then grade them:\n\n"
        f"```bash\npytest chapters/{chapter.folder.name}\n```\n\n"
        "With `--hint EXERCISE`, pytest shows the next of three hints; with `--solutions`, it grades the reference.\n\n"
        f"[Back to the chapter]({Path(chapter.notebook).name}){{ .md-button }}\n\n{listing}"
    )


# --- API -------------------------------------------------------------------------------------------------------------


def _api_index() -> str:
    finished = {chapter.number: chapter for chapter in chapters()}
    entries = []
    for name in modules():
        text = (ROOT / "mini_engine" / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        chapter = finished.get(module_chapter(name) or 0)
        where = f" *Chapter [{chapter.label}](../{chapter.notebook}).*" if chapter else ""
        summary = " ".join(docstring.partition("\n\n")[0].split())
        entries.append(f"[`{name}`]({name}.md)\n:   {summary}{where}\n")
    return f"""# API

The modules of `mini_engine`, in the order in which the book builds them. Shapes are part of the types:
`Float[Tensor, "T H D"]` is a floating-point tensor of `T` tokens, `H` heads and head size `D`, and a letter means the
same number throughout a signature.

{chr(10).join(entries)}
"""


def _api_page(name: str) -> str:
    chapter = next((c for c in chapters() if c.number == module_chapter(name)), None)
    built = f"\n\nBuilt in chapter [{chapter.label}](../{chapter.notebook}).\n" if chapter else ""
    return f"# `{name}`\n\n::: mini_engine.{name}\n{built}"


# --- pages -----------------------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = values.without_sources(markdown)
    if "<!-- chapters" in markdown:
        markdown = re.sub(r"<!-- chapters(?: (\d+) to (\d+))? -->", lambda m: _chapter_cards(page, m), markdown)
    markdown = markdown.replace("<!-- unwritten -->", _unwritten())
    if "<!-- all results -->" in markdown:  # `<!-- results -->` marks an experiment's own tables in its README.md
        markdown = markdown.replace("<!-- all results -->", results_page_markdown(ROOT))
    if "<!-- ledger -->" in markdown:
        markdown = markdown.replace("<!-- ledger -->", ledger.markdown(ROOT))
    if "<!-- code lines -->" in markdown:
        markdown = markdown.replace("<!-- code lines -->", code_lines.markdown(ROOT))
    if "<!-- parts -->" in markdown:
        markdown = markdown.replace("<!-- parts -->", engine_diagram(finished_part_names(ROOT)))
    return markdown


def _chapter_cards(page: Page, marker: re.Match[str]) -> str:
    """The finished chapters between two numbers."""
    first, last = (int(group) if group else bound for group, bound in zip(marker.groups(), (1, 99), strict=True))

    def link(target: str | None) -> str | None:
        """A page's address, from this page: raw HTML is not resolved by MkDocs."""
        if target is None:
            return None
        folder = target.removesuffix(".py") if target.endswith(".py") else posixpath.dirname(target)
        return posixpath.relpath(folder, posixpath.dirname(page.file.dest_uri) or ".") + "/"

    found = []
    for chapter in chapters():
        if first <= chapter.number <= last:
            links = cards.Links(link(chapter.notebook) or "", link(chapter.homework), link(chapter.experiment))
            try:
                found.append(cards.card(chapter.number, chapter.title, links))
            except cards.CardError as error:
                log.warning(str(error))
    return (
        f'<div class="chapter-cards">{"".join(found)}</div>' if found else "Chapters appear here as they are finished."
    )


def _unwritten() -> str:
    """Which chapters of which parts are still to come."""
    finished = {chapter.number for chapter in chapters()}
    parts = []
    for part in OUTLINE["parts"]:
        if missing := [number for number in part["chapters"] if number not in finished]:
            span = f"chapters {missing[0]} to {missing[-1]}" if len(missing) > 1 else f"chapter {missing[0]}"
            parts.append(f"{span} of {part['title']} ({part['topics']})")
    return f"{' and '.join(parts)}.".replace("chapter", "Chapter", 1) if parts else "Nothing: all chapters are here."


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = page.file.src_uri
    if page.url not in NAVIGATION:
        page.meta["search"] = {"exclude": True}  # `defer` would drop what the search plugin reads there
    if path.endswith(".ipynb"):
        html = _chapter_content(html, page, files)
    elif path.startswith("experiments/"):
        html = DRAWING.sub(lambda found: _inlined(ROOT / posixpath.dirname(path) / found[2], unescape(found[1])), html)
    elif path.startswith("api/"):
        html = break_after_dots(html)
    elif path == GLOSSARY:
        folders = {str(chapter.number): posixpath.dirname(chapter.notebook) for chapter in chapters()}
        html = INTRODUCED_IN.sub(
            lambda m: f'<em><a href="../{folders[m[2]]}/">{m[1]}</a>' if m[2] in folders else m[0], add_anchors(html)
        )
    elif path in WITH_TERMS or path.startswith("part-"):
        content = BeautifulSoup(html, "html.parser")
        link_terms(content, TERMS, _glossary_from(page))
        html = str(content)
    if ">where the bound comes from<" in html:
        content = BeautifulSoup(html, "html.parser")
        for head in content.find_all("th", string="where the bound comes from"):
            span_rows(head.find_parent("table"))
        html = str(content)
    html = keep_together(pareto.fill(html, ROOT))
    page.meta.setdefault("description", cards.lesson(_chapter_number(path)) or describe(html))
    titles = re.findall(r"<h1\b.*?</h1>", html, re.DOTALL)
    if len(titles) > 1:
        texts = ", ".join(repr(re.sub(r"<[^>]+>", "", title).removesuffix("¶").strip()) for title in titles)
        log.warning(f"{page.file.src_uri} has {len(titles)} headings of level 1, and a page has one title: {texts}")
    return html


def _inlined(file: Path, text: str) -> str:
    figure = inline_figure(file.read_text(encoding="utf-8"))
    describe_figure(figure, text)
    return str(figure)


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Draw the diagrams of all pages, which are rendered by now and not yet written."""
    pages = [file.page for file in files.documentation_pages() if file.page is not None and file.page.content]
    try:
        draw(text for page in pages for text in sources(page.content or ""))
    except DiagramError as error:
        log.info(str(error))  # no warning: without a browser the book can still be read and checked
    for page in pages:
        page.content = insert(page.content or "")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    try:
        output = formulas.insert(output, get_relative_url("assets/vendor/katex/dist/katex.min.css", page.url))
    except FormulaError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    return complete(output, str(page.title), page.meta.get("description", ""))


@event_priority(-100)  # after the search plugin
def on_post_build(config: MkDocsConfig) -> None:
    defer(Path(config.site_dir), NAVIGATION, TERMS)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    NAVIGATION.clear()
    NAVIGATION.update(page.url for page in nav.pages)


def _chapter_number(path: str) -> int:
    return next((chapter.number for chapter in chapters() if chapter.notebook == path), 0)


def _glossary_from(page: Page) -> str:
    return posixpath.relpath("glossary", posixpath.dirname(page.file.dest_uri) or ".") + "/"


def _chapter_content(html: str, page: Page, files: Files) -> str:
    def resolve(link: str) -> str:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path:
            return link
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), parts.path))
        file = files.get_file_from_path(target.removeprefix("docs/"))
        if file is None:
            log.warning(f"{page.file.src_uri} links to {link}, which is no file of the repository")
            return link
        return file.url_relative_to(page.file) + (f"#{parts.fragment}" if parts.fragment else "")

    notebook, page.toc = tidy(values.without_sources(html), resolve)
    link_terms(notebook, TERMS, _glossary_from(page))
    chapter = next(c for c in chapters() if c.notebook == page.file.src_uri)
    heading, end, rest = merge_colors(str(notebook)).partition("</h1>")
    return _contents(page) + heading + end + _before_chapter(chapter, resolve) + rest + _after_chapter(chapter, resolve)


def _before_chapter(chapter: Chapter, resolve: Callable[[str], str]) -> str:
    homework = f'<a href="{resolve("homework.py")}">Homework</a>' if chapter.homework else ""
    experiment = (
        f'<a href="{resolve(posixpath.relpath(chapter.experiment, "chapters/x"))}">Experiment</a>'
        if chapter.experiment
        else ""
    )
    return f"""
<div class="chapter-bar" data-search-exclude>
<details><summary>Open in Jupyter</summary>
<p>In a copy of the repository, <code>make lab</code> opens JupyterLab in the book. Then open</p>
<pre><code>{chapter.notebook}</code></pre>
<p>Every cell can be run again, and your own predictions are compared with what you measure.</p></details>
{homework}{experiment}</div>"""


def _contents(page: Page) -> str:
    """The chapter's headings, for screens too narrow for the list at the side."""
    headings = page.toc.items[0].children if page.toc.items else []
    links = "".join(
        f'<li class="level-{heading.level}"><a href="{heading.url}">{heading.title}</a></li>'
        for parent in headings
        for heading in (parent, *parent.children)
    )
    return f"""<details class="chapter-contents" data-search-exclude><summary>In this chapter</summary>
<nav aria-label="In this chapter"><ul>{links}</ul></nav></details>"""


def _after_chapter(chapter: Chapter, resolve: Callable[[str], str]) -> str:
    if not chapter.homework:
        return ""
    return f"""
<div class="chapter-end" data-search-exclude>
<p><strong>Your turn.</strong> Write <a href="{resolve("homework.py")}">the homework</a> and grade it:</p>
<pre><code>pytest chapters/{chapter.folder.name}</code></pre></div>"""
