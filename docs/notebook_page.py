"""Turn the page that mkdocs-jupyter renders into one that looks like the rest of the site.

mkdocs-jupyter's HTML brings JupyterLab's style sheets (600 KB a page), scripts from other servers and anchors of its
own. What is kept is the content: text as plain page content, code as the theme's code blocks, outputs as saved.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from html import escape, unescape

from bs4 import BeautifulSoup, Tag
from cell_folds import SETUP, fold_title, is_output_only
from formulas import mark
from mkdocs.structure.toc import AnchorLink, TableOfContents
from slim_svg import slim


def tidy(html: str, resolve: Callable[[str], str]) -> tuple[Tag, TableOfContents]:
    """Rewrite a rendered notebook.

    Args:
        html: what mkdocs-jupyter rendered.
        resolve: maps a relative link of the notebook to a link of the page.

    Returns:
        The page's content and its table of contents.
    """
    soup = BeautifulSoup(html[html.index('<div class="jupyter-wrapper">') :], "html.parser")
    page = soup.new_tag("div", attrs={"class": "notebook"})
    # By name and class: a selector of CSS is matched against every element in Python, ten times as slowly.
    for cell in soup.find_all("div", class_="jp-Cell"):
        if cell.find_parent(class_="jp-Cell") is not None:
            continue  # a code cell is wrapped into a second one
        page.append(_code_cell(soup, cell) if _has_class(cell, "jp-CodeCell") else _text_cell(soup, cell))
    _merge_folds(page)
    ask_once(page)
    hide_outcomes(soup, page)
    for diagram in page.find_all(class_="jp-Mermaid"):
        # The notebook's HTML holds mermaid's text as it is, so the parser takes a line break in it for an element.
        text = unescape(diagram.pre.decode_contents()) if diagram.pre is not None else diagram.get_text()
        diagram.replace_with(_pre(soup, text.strip(), "diagram"))
    for box in page.find_all("div", class_="highlight"):
        if box.pre is not None and box.pre.find("code") is None:  # of a listing, which the notebook's HTML leaves bare
            code = soup.new_tag("code")
            code.extend(list(box.pre.children))
            box.pre.append(code)
    for corner in page.find_all("th"):
        if corner.find(True) is None and not corner.get_text().strip():
            corner.name = "td"
    for table in page.find_all("table"):
        table.wrap(soup.new_tag("div", attrs={"class": "nb-scroll"}))
    for element, attribute in [("a", "href"), ("img", "src")]:
        for tag in page.find_all(element):
            tag[attribute] = resolve(str(tag.get(attribute, "")))
    toc = _anchor_headings(soup, page)
    return page, toc


def _text_cell(soup: BeautifulSoup, cell: Tag) -> Tag:
    text = soup.new_tag("div", attrs={"class": "nb-text"})
    rendered = cell.find(class_="jp-MarkdownOutput")
    if rendered is not None:
        text.extend(list(rendered.children))
        mark(text)
    return text


def _code_cell(soup: BeautifulSoup, cell: Tag) -> Tag:
    result = soup.new_tag("div", attrs={"class": "nb-cell"})
    shown = [_output(soup, output) for output in cell.find_all(class_="jp-OutputArea-output")]
    source = _find_in(cell, "highlight-ipynb", "pre")
    text = source.get_text() if source is not None else ""
    if source is not None and text.strip() and not is_output_only(text):
        title = fold_title(text, draws=any(box.find("svg") or box.find(class_="jp-Mermaid") for box in shown))
        code = soup.new_tag("code")
        code.extend(list(source.children))
        for blank in code.find_all(string=re.compile(r"^\n{3,}$")):
            blank.replace_with("\n\n")
        pre = soup.new_tag("pre")
        pre.append(code)
        box = soup.new_tag("div", attrs={"class": "highlight nb-in"})
        box.append(pre)
        if title == SETUP:
            box.extend(shown)
            shown = []
        result.append(box if title is None else _folded(soup, title, box))
    result.extend(shown)
    for figure in result.find_all("figure"):
        _caption(soup, figure)
    return result


def _folded(soup: BeautifulSoup, title: str, content: Tag) -> Tag:
    details, summary = soup.new_tag("details", attrs={"class": "nb-fold"}), soup.new_tag("summary")
    summary.string = title
    details.extend([summary, content])
    return details


def _merge_folds(page: Tag) -> None:
    """Put code that is folded under the same words, cell after cell, under one fold."""
    for cell in page.find_all("div", class_="nb-cell", recursive=False):
        following = cell.find_next_sibling()
        if following is None or not _has_class(following, "nb-cell"):
            continue
        first, second = (part.find("details", class_="nb-fold", recursive=False) for part in (cell, following))
        if first is None or second is None or len(cell.find_all(recursive=False)) > 1:
            continue
        if first.summary.get_text() == second.summary.get_text():
            second.summary.insert_after(*first.find_all(class_="nb-in", recursive=False))
            cell.decompose()


def ask_once(page: Tag) -> None:
    """Remove a question in italics, "Predict: …?", from the end of a text if the box that follows asks it."""
    for box in page.find_all(class_="prediction"):
        cell = box.find_parent(class_="nb-cell")
        text = cell.find_previous_sibling(class_="nb-text") if cell is not None else None
        if text is None or cell.find_previous_sibling() is not text:
            continue
        paragraph = text.find_all(True, recursive=False)[-1]
        question = paragraph.contents[-1] if paragraph.contents else None
        if isinstance(question, Tag) and question.name == "em" and question.get_text().startswith("Predict:"):
            question.decompose()
            if not paragraph.get_text().strip():
                paragraph.decompose()


def hide_outcomes(soup: BeautifulSoup, page: Tag) -> None:
    """Fold the outputs that answer a question: those between its box and its comparison, if no heading is between them.
    In "Break it" they end at a heading, too. predict.js opens them once the reader has given a number.
    """
    title = ""
    for part in page.find_all(True, recursive=False):
        section, box = part.find("h2"), part.find(class_="prediction")
        title = next(section.stripped_strings) if section is not None else title  # without the anchor's sign
        if box is None:
            continue
        cells, is_answered = [], title == "Break it"
        for following in part.find_next_siblings():
            if following.find(["h2", "h3"]) is not None:
                break
            cells.append(following)
            if following.find(class_="comparison", attrs={"data-name": box["data-name"]}) is not None:
                is_answered = True
                break
        for cell in cells if is_answered else []:
            outputs = cell.find_all(["div", "figure"], class_=["nb-out", "nb-figure"], recursive=False)
            if outputs:
                fold = soup.new_tag("details", attrs={"class": "nb-fold", "data-name": box["data-name"]})
                summary = soup.new_tag("summary")
                summary.string = "The outcome"
                outputs[0].insert_before(fold)
                fold.extend([summary, *outputs])


def _output(soup: BeautifulSoup, output: Tag) -> Tag:
    prediction, comparison = output.find(class_="prediction"), output.find(class_="comparison")
    if prediction is not None:
        prediction["data-search-exclude"] = ""
        return prediction.extract()
    if comparison is not None:  # predict.js opens its fold once the reader has given a number
        comparison["data-search-exclude"] = ""
        return comparison.extract()
    image = output.select_one('img[src^="data:image/svg+xml;base64,"]')
    if image is not None:
        return inline_figure(base64.b64decode(str(image["src"]).partition(",")[2]).decode().strip())
    box = soup.new_tag("div", attrs={"class": "nb-out", "data-search-exclude": ""})
    if "stderr" in str(output.get("data-mime-type", "")):
        box["class"] = "nb-out nb-stderr"
    box.extend(list(output.children))
    for text in box.find_all("pre"):
        start = text.find(string=True)
        if start is not None and start.startswith(" \n"):  # the blank first line of an output that Jupyter hides
            start.replace_with(start[2:])
    return box


def inline_figure(svg: str) -> Tag:
    """A figure that takes ink, paper, and font from its page, which an image cannot."""
    box = BeautifulSoup(f'<figure class="nb-figure" data-search-exclude="">{svg}</figure>', "html.parser").figure
    assert box is not None and box.svg is not None
    slim(box.svg)
    return box.extract()


def describe_figure(figure: Tag, text: str) -> None:
    """Give a figure the text that a screen reader reads in place of its drawing."""
    drawing = figure.select_one("svg")
    if drawing is None:
        raise ValueError(f"the figure {text!r} is no SVG")
    drawing["role"], drawing["aria-label"] = "img", text


def _caption(soup: BeautifulSoup, figure: Tag) -> None:
    """Move the caption of a figure into the figure, and make it the alternative text of the drawing."""
    following = figure.find_next_sibling()
    caption = following.find(class_="figure-caption") if following is not None else None
    if following is None or caption is None:
        return
    describe_figure(figure, caption.get_text().strip())
    text = soup.new_tag("figcaption")
    text.extend(list(caption.children))
    figure.append(text)
    following.decompose()


def _find_in(tag: Tag, outer: str, name: str) -> Tag | None:
    """The first element of a name inside one of the class `outer`."""
    inside = (found.find(name) for found in tag.find_all(class_=outer))
    return next((element for element in inside if element is not None), None)


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
    for heading in page.find_all(["h1", "h2", "h3", "h4"]):
        if heading.find_parent(class_="nb-text") is None:
            continue
        for old in heading.find_all(class_="anchor-link"):
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
