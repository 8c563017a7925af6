"""What the site's hooks decide, without a build: folds, cards, links to the glossary, the search index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs the packages of the extra [docs]")

from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def docs_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))


@pytest.mark.parametrize(
    ("source", "draws", "title"),
    [
        ("import a\nfrom b import c\n\nx = 1", False, "Imports and setup"),
        ("from b import c\n\nx = 1\ny = 2", False, None),
        ("ax.bar(1, 2)", True, "Code for the figure"),
        ("def draw_tree(ax):\n    pass", False, "Code for the figure"),
        ("def softmax(x):\n    pass", False, None),
        ("import a\nimport b\n\nprint(1)", False, None),
        ("import a\nimport b\n\ndef f():\n    pass", False, None),
        ("$ pytest", False, None),
        ("# only a comment", False, None),
    ],
)
def test_the_plumbing_of_a_chapter_is_folded(source: str, draws: bool, title: str | None) -> None:
    from cell_folds import fold_title

    assert fold_title(source, draws=draws) == title


@pytest.mark.parametrize(
    ("source", "is_hidden"),
    [
        ("predict('a', None)", True),
        ("book.show(f)", True),
        ("from a import f\n\nbook.show(f)", True),
        ("title = 'closed'\nbook.show(f, fold=title)", True),
        ("import a", False),
        ("predict('a')\nx = 1", False),
        ("print(1)", False),
    ],
)
def test_cells_that_only_show_something_are_hidden(source: str, is_hidden: bool) -> None:
    from cell_folds import is_output_only

    assert is_output_only(source) is is_hidden


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<p>A page. <em>Predict: how many?</em></p>", "A page."),
        ("<p>A page.</p><p><em>Predict: how many?</em></p>", "A page."),
        ("<p><em>Predict: how many?</em> Count them.</p>", "Predict: how many? Count them."),
        ("<p>A <em>page</em></p>", "A page"),
        ("<p><em>Predict: how many?</em></p><ul><li>a list</li></ul>", "Predict: how many?a list"),
    ],
)
def test_a_question_that_the_box_asks_is_not_asked_twice(text: str, left: str) -> None:
    from notebook_page import ask_once

    box = '<div class="nb-cell"><div class="prediction"><p>Predict. How many?</p></div></div>'
    page = BeautifulSoup(f'<div class="nb-text">{text}</div>{box}', "html.parser")
    ask_once(page)
    assert page.find(class_="nb-text").get_text().strip() == left
    assert "How many?" in page.find(class_="prediction").get_text()


def test_equal_folds_of_successive_cells_are_one_and_a_diagram_keeps_its_line_breaks() -> None:
    from notebook_page import tidy

    def cell(source: str) -> str:
        return f'<div class="jp-Cell jp-CodeCell"><div class="highlight-ipynb"><pre>{source}</pre></div></div>'

    diagram = '<div class="jp-Mermaid"><pre class="mermaid">a["one<br/>two &amp; three"]</pre></div>'
    text = f'<div class="jp-Cell"><div class="jp-MarkdownOutput">{diagram}</div></div>'
    page, _ = tidy(f'<div class="jupyter-wrapper">{cell("import a")}{cell("import b")}{text}</div>', str)

    (fold,) = page.select("details.nb-fold")
    assert [box.get_text().strip() for box in fold.select(".nb-in")] == ["import a", "import b"]
    assert page.select_one("pre.diagram").get_text() == 'a["one<br/>two & three"]'


@pytest.mark.parametrize(
    ("title", "end", "folded"),
    [
        ("Build", '<div class="comparison" data-name="01/four"></div>', ["two", "three"]),
        ("Build", '<div class="comparison" data-name="01/five"></div>', []),
        ("Build", "<h3>Measure</h3>", []),
        ("Break it", "<h3>What was wrong</h3>", ["two", "three"]),
    ],
)
def test_an_outcome_is_folded_until_the_comparison(title: str, end: str, folded: list[str]) -> None:
    from notebook_page import hide_outcomes

    def cell(*outputs: str) -> str:
        return f'<div class="nb-cell"><div class="highlight nb-in">code</div>{"".join(outputs)}</div>'

    parts = [
        f'<div class="nb-text"><h2>{title}<a class="anchor-link">¶</a></h2></div>',
        cell('<div class="nb-out">one</div>'),
        cell('<div class="prediction" data-name="01/four"></div>'),
        cell('<div class="nb-out">two</div>', '<figure class="nb-figure">three</figure>'),
        f'<div class="nb-text">{end}</div>' if "h3" in end else cell(end),
        cell('<div class="nb-out">four</div>'),
    ]
    soup = BeautifulSoup(f"<main>{''.join(parts)}</main>", "html.parser")
    hide_outcomes(soup, soup.main)
    folds = soup.select('details.nb-fold[data-name="01/four"]')
    assert len(folds) == bool(folded)
    assert [output.get_text() for fold in folds for output in fold.find_all(["div", "figure"])] == folded


def test_formulas_of_a_notebook_are_marked_and_code_is_not() -> None:
    from formulas import mark

    html = r"<p>$a &lt; b$ and $$c$$ <code>$d$</code></p>\begin{align}e\end{align}"
    text = BeautifulSoup(html, "html.parser")
    mark(text)
    inline, *display = (rf'<span class="arithmatex">\{tex}</span>' for tex in (
        r"(a &lt; b\)", r"[c\]", r"[\begin{align}e\end{align}\]"
    ))  # fmt: skip
    assert str(text) == f"<p>{inline} and {display[0]} <code>$d$</code></p>{display[1]}"


@pytest.mark.parametrize(
    ("html", "kept"),
    [
        ("<p><code>h // G</code></p>", '<p><code class="whole">h // G</code></p>'),
        ("<p><code>run now --homework</code></p>", '<p><code>run now <span class="whole">--homework</span></code></p>'),
        ("<p>36 % in 3 ms, 2 of 3</p>", "<p>36\N{NO-BREAK SPACE}% in 3\N{NO-BREAK SPACE}ms, 2 of 3</p>"),
        ("<td>2026-11-22</td>", '<td><span class="whole">2026-11-22</span></td>'),
        ('<pre><code>a --b 1 ms</code></pre><i title="1 ms">', '<pre><code>a --b 1 ms</code></pre><i title="1 ms">'),
    ],
)
def test_what_belongs_together_stays_on_one_line(html: str, kept: str) -> None:
    from page_frame import keep_together

    assert keep_together(html) == kept


def test_a_page_links_the_files_of_its_own_figures_only() -> None:
    from page_frame import complete

    def files(name: str) -> str:
        return f'<link rel="stylesheet" href="../s/{name}.css"><script src="../j/{name}.js" type="module"></script>'

    html = f'<head></head><div class="tree-figure"></div>{files("tree")}{files("csr")}{files("book")}'
    page = complete(html, "T", "D")
    assert files("tree") in page and files("book") in page and "csr" not in page


def test_a_page_has_no_indentation_but_that_of_its_code() -> None:
    from page_frame import complete

    code = '<pre class="a">x:\n\n    y</pre>'
    assert complete(f"<p>\n\n  a\n  b</p>{code}", "T", "D") == f"<p>\na\nb</p>{code}"


def test_neighbors_of_one_color_are_one_element_and_text_is_none() -> None:
    from code_colors import merge_colors

    def colored(*pieces: str) -> str:
        spans = [f'<span class="{kind}">{text}</span>' for kind, _, text in map(lambda p: p.partition(":"), pieces)]
        return f"<pre><code>{' '.join(spans)}</code></pre>"

    code = colored("n:x", "o:=", "p:(", "mi:1", "p:)")
    assert merge_colors(code) == (
        '<pre><code>x <span class="p">= (</span> <span class="mi">1</span> <span class="p">)</span></code></pre>'
    )
    assert merge_colors('<p><span class="n">x</span></p>') == '<p><span class="n">x</span></p>'


def test_a_drawing_loses_what_has_no_effect() -> None:
    from slim_svg import slim

    svg = """<svg xmlns="#">
    <style>@keyframes dash{to{top:0;}}.a&gt;b{top:0;}.c{top:1px;}</style>
    <defs><marker id="m1"></marker><marker id="m2"></marker><clippath id="f12345678-pabc"></clippath></defs>
    <g><path class="c" d="M 1.239 2
    L 5 2
    L 5 -3
    z" marker-end="url(#m1)" clip-path="url(#f12345678-pabc)" data-x="1" style="fill: red; top: 0"></path></g>
    <g></g><path d="M 1,2 C 3,4 5,6 7,8 L 7,9" transform="scale(0.1234) translate(0.126 1)"></path>
    <text transform="rotate(-0 1 2)"> <tspan> a</tspan></text>
    </svg>"""
    page = BeautifulSoup(svg, "html.parser")
    assert page.svg is not None
    slim(page.svg)
    assert str(page) == (
        '<svg xmlns="#"><style>.c{top:1px;}</style>'
        '<defs><marker id="m1"></marker><clippath id="f12345678-0"></clippath></defs>'
        '<path class="c" clip-path="url(#f12345678-0)" d="M1.23 2H5V-3z" marker-end="url(#m1)" style="fill:red;top:0">'
        '</path><path d="M1,2C3,4 5,6 7,8L7,9" transform="scale(0.1234) translate(0.12 1)"></path>'
        "<text> <tspan> a</tspan></text></svg>"
    )


def test_the_title_of_a_module_breaks_after_dots_and_underscores() -> None:
    from page_frame import break_after_dots

    title = '<h1 id="kernelsnorm_linear"><code>kernels.norm_linear</code></h1><h2><code>a_b</code></h2>'
    broken = '<h1 id="kernelsnorm_linear"><code>kernels.<wbr>norm_<wbr>linear</code></h1><h2><code>a_b</code></h2>'
    assert break_after_dots(title) == broken


def test_a_bound_that_rows_repeat_is_said_once() -> None:
    from page_frame import span_rows

    rows = [("a", "1", "x"), ("a", "2", "x"), ("b", "2", "x")]
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    table = BeautifulSoup(f"<table><tr><th>f</th><th>v</th><th>w</th></tr>{cells}</table>", "html.parser").table
    assert table is not None
    span_rows(table)

    spans = [[(cell.get_text(), cell.get("rowspan")) for cell in row.find_all("td")] for row in table.find_all("tr")]
    assert spans == [[], [("a", "2"), ("1", None), ("x", "3")], [("2", None)], [("b", None), ("2", None)]]


def test_every_card_has_a_lesson_and_a_recorded_number() -> None:
    import cards

    for chapter, entry in cards.CARDS.items():
        html = cards.card(chapter, "A < B", cards.Links("x/", None, None))
        assert "A &lt; B" in html and "<strong>" in html and len(entry["lesson"]) > 40


def test_a_card_without_its_result_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import cards

    monkeypatch.setitem(cards.CARDS, 1, cards.CARDS[1] | {"rows": [{"figure": "no such figure"}]})
    with pytest.raises(cards.CardError, match="no such figure"):
        cards.card(1, "One", cards.Links("x/", None, None))


GLOSSARY = """# Glossary

Temperature, top-k
:   Divide the logits; keep the `k` most likely.

KV cache
:   Keys and values
    of all tokens.

LSE
:   $\\log \\sum$
"""


def test_the_first_use_of_a_term_is_linked(tmp_path: Path) -> None:
    from glossary_terms import link_terms, read_glossary

    file = tmp_path / "glossary.md"
    file.write_text(GLOSSARY, encoding="utf-8")
    entries = read_glossary(file)
    assert set(entries) == {"Temperature", "top-k", "KV cache", "LSE"} and entries["LSE"].definition == ""
    formula = r'<span class="arithmatex">\(\text{KV cache}\)</span>'
    html = f"<div><p><code>KV cache</code> {formula}</p><p>Two KV caches, a KV cache, the top-kick.</p></div>"
    page = BeautifulSoup(html, "html.parser")
    link_terms(page, entries, "../glossary/")
    [link] = page.select("a.term")
    assert link.get_text() == "KV caches" and link["href"] == "../glossary/#term-kv-cache"
    assert link["title"] == "Keys and values of all tokens."
    assert page.get_text() == BeautifulSoup(html, "html.parser").get_text()


def test_the_search_index_has_prose_of_listed_pages_and_the_terms_apart_from_its_settings(tmp_path: Path) -> None:
    from glossary_terms import Entry
    from search_index import defer

    index, worker = tmp_path / "search/search_index.json", tmp_path / "assets/javascripts/workers/search.0.min.js"
    sections = [
        {"location": "chapters/01/", "title": "One", "text": r"<p>Text \(x\).</p><pre>code</pre> cell <li>Item.</li>"},
        {"location": "mini_engine/x/", "title": "x.py", "text": "<p>Source.</p>"},
    ]
    for file, text in (index, json.dumps({"config": {"lang": ["en"]}, "docs": sections})), (worker, "theirs()"):
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    defer(tmp_path, {"chapters/01/"}, {"KV cache": Entry("term-kv-cache", "Keys & values.")})
    assert json.loads(index.read_text(encoding="utf-8")) == {"config": {"lang": ["en"]}, "docs": []}
    assert (tmp_path / "search/worker.js").read_text(encoding="utf-8") == "theirs()"
    assert "importScripts" in worker.read_text(encoding="utf-8")
    chapter, term = json.loads((tmp_path / "search/sections.json").read_text(encoding="utf-8"))
    assert chapter["text"] == "<p>Text x.</p><li>Item.</li>" and chapter["boost"] > 1
    assert term["location"] == "glossary/#term-kv-cache" and "Keys &amp; values." in term["text"]
