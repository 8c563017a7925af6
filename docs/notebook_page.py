"""Turn the page that mkdocs-jupyter renders into one that looks like the rest of the site.

mkdocs-jupyter's HTML brings JupyterLab's style sheets (600 KB a page), scripts from other servers and anchors of its
own. What is kept is the content: text as plain page content, code as the theme's code blocks, outputs as saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

from bs4 import BeautifulSoup, Tag
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
        page.append(_code_cell(soup, cell) if _has_class(cell, "jp-CodeCell") else _text_cell(soup, cell))
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
    box_of_its_own = output.select_one(".prediction, .comparison")
    if box_of_its_own is not None:
        return box_of_its_own.extract()
    box = soup.new_tag("div", attrs={"class": "nb-out", "data-search-exclude": ""})
    if "stderr" in str(output.get("data-mime-type", "")):
        box["class"] = "nb-out nb-stderr"
    for image in output.find_all("img"):
        image["alt"] = "Figure drawn by the cell above"
    if _has_class(output, "jp-RenderedImage"):
        box["class"] = "nb-out nb-figure"
    box.extend(list(output.children))
    return box


def _has_class(tag: Tag, name: str) -> bool:
    return name in (tag.get("class") or [])


def _pre(soup: BeautifulSoup, text: str, css_class: str) -> Tag:
    pre, code = soup.new_tag("pre", attrs={"class": css_class}), soup.new_tag("code")
    code.string = text
    pre.append(code)
    return pre


def _anchor_headings(soup: BeautifulSoup, page: Tag) -> TableOfContents:
    """Give the headings the anchors that Markdown pages have, and list them."""
    used: set[str] = set()
    top: list[AnchorLink] = []
    enclosing: list[AnchorLink] = []  # the chain of headings that the current one stands under
    for heading in page.select(".nb-text :is(h1, h2, h3, h4)"):
        for old in heading.select(".anchor-link"):
            old.decompose()
        title = heading.get_text().strip()
        anchor = _slug(title, used)
        link = AnchorLink(escape(title), anchor, int(heading.name[1]))
        while enclosing and enclosing[-1].level >= link.level:
            enclosing.pop()
        (enclosing[-1].children if enclosing else top).append(link)
        enclosing.append(link)
        heading["id"] = anchor
        permalink = soup.new_tag("a", attrs={"class": "headerlink", "href": f"#{anchor}", "title": "Permanent link"})
        permalink.string = "¶"
        heading.append(permalink)
    return TableOfContents(top)


def _slug(title: str, used: set[str]) -> str:
    """An anchor as Jupyter's readers and Markdown pages write it: lower case, hyphens, a number where it repeats."""
    slug = base = re.sub(r"[\s_]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip())
    number = 1
    while slug in used:
        slug, number = f"{base}_{number}", number + 1
    used.add(slug)
    return slug
