"""Turn the page that mkdocs-jupyter renders into one that looks like the rest of the site.

mkdocs-jupyter's HTML brings JupyterLab's style sheets (600 KB a page), scripts from other servers and anchors of its own. What is
kept is the content: text as plain page content, code as the theme's code blocks, outputs as they were saved.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from bs4 import BeautifulSoup, Tag
from markdown.extensions.toc import slugify, unique
from mkdocs.structure.toc import AnchorLink, TableOfContents


def tidy(html: str, resolve: Callable[[str], str]) -> tuple[str, TableOfContents]:
    """Rewrite a rendered notebook.

    Args:
        html: what mkdocs-jupyter rendered.
        resolve: maps a relative link of the notebook to a link of the page.

    Returns:
        The page's content and its table of contents.
    """
    soup = BeautifulSoup(html[html.index('<div class="jupyter-wrapper">') :], "html.parser")
    page = soup.new_tag("div", attrs={"class": "notebook"})
    for cell in soup.select(".jp-Cell"):
        classes = cell.get("class") or []
        page.append(_code_cell(soup, cell) if "jp-CodeCell" in classes else _text_cell(soup, cell))
    for diagram in page.select(".jp-Mermaid"):
        diagram.replace_with(_pre(soup, diagram.get_text().strip(), "diagram"))
    for table in page.find_all("table"):
        table.wrap(soup.new_tag("div", attrs={"class": "nb-scroll"}))
    for element, attribute in [("a", "href"), ("img", "src")]:
        for tag in page.find_all(element):
            tag[attribute] = resolve(str(tag.get(attribute, "")))
    toc = _anchor_headings(soup, page)
    return str(page), toc


def _text_cell(soup: BeautifulSoup, cell: Tag) -> Tag:
    text = soup.new_tag("div", attrs={"class": "nb-text"})
    rendered = cell.select_one(".jp-MarkdownOutput")
    if rendered is not None:
        text.extend(list(rendered.children))
    return text


def _code_cell(soup: BeautifulSoup, cell: Tag) -> Tag:
    result = soup.new_tag("div", attrs={"class": "nb-cell"})
    source = cell.select_one(".highlight-ipynb pre")
    if source is not None and source.get_text().strip():
        code = soup.new_tag("code")
        code.extend(list(source.children))
        pre = soup.new_tag("pre")
        pre.append(code)
        box = soup.new_tag("div", attrs={"class": "highlight nb-in"})
        box.append(pre)
        result.append(box)
    for output in cell.select(".jp-OutputArea-output"):
        result.append(_output(soup, output))
    return result


def _output(soup: BeautifulSoup, output: Tag) -> Tag:
    prediction = output.select_one(".prediction")
    if prediction is not None:
        return prediction.extract()
    box = soup.new_tag("div", attrs={"class": "nb-out", "data-search-exclude": ""})
    if "stderr" in str(output.get("data-mime-type", "")):
        box["class"] = "nb-out nb-stderr"
    for image in output.find_all("img"):
        if image.get("alt", "").startswith("No description"):
            image["alt"] = "Figure drawn by the cell above"
        if image.parent is not None and "jp-RenderedImage" in (output.get("class") or []):
            box["class"] = "nb-out nb-figure"
    box.extend(list(output.children))
    return box


def _pre(soup: BeautifulSoup, text: str, css_class: str) -> Tag:
    pre, code = soup.new_tag("pre", attrs={"class": css_class}), soup.new_tag("code")
    code.string = text
    pre.append(code)
    return pre


def _anchor_headings(soup: BeautifulSoup, page: Tag) -> TableOfContents:
    """Give the headings the anchors that Markdown pages have, and list them."""
    used: set[str] = set()
    top: list[AnchorLink] = []
    open_links: list[AnchorLink] = []  # the chain of headings that enclose the current one
    for heading in page.select(".nb-text :is(h1, h2, h3, h4)"):
        for old in heading.select(".anchor-link"):
            old.decompose()
        level = int(heading.name[1])
        title = heading.get_text().strip()
        heading["id"] = unique(slugify(title, "-"), used)
        link = AnchorLink(escape(title), heading["id"], level)
        while open_links and open_links[-1].level >= level:
            open_links.pop()
        (open_links[-1].children if open_links else top).append(link)
        open_links.append(link)
        anchor = soup.new_tag("a", attrs={"class": "headerlink", "href": f"#{heading['id']}", "title": "Permanent link"})
        anchor.string = "¶"
        heading.append(anchor)
    return TableOfContents(top)
