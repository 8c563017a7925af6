"""What the site's build adds to pages, and what makes it fail."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs", reason="the site needs the packages of the extra [docs]")

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from book import values
from book.results import results_page_markdown

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks

    return hooks


@pytest.fixture
def config() -> MkDocsConfig:
    config = MkDocsConfig()
    config.load_dict({"site_name": "test"})
    config.validate()
    return config


def page_of(path: str, config: MkDocsConfig) -> Page:
    return Page(None, File(path, None, config.site_dir, use_directory_urls=True), config)


@pytest.mark.parametrize("readme", sorted(ROOT.glob("experiments/*/README.md")), ids=lambda file: file.parent.name)
def test_an_experiments_page_contains_its_own_results_only(
    hooks: ModuleType, config: MkDocsConfig, readme: Path
) -> None:
    markdown = readme.read_text(encoding="utf-8")
    page = page_of(readme.relative_to(ROOT).as_posix(), config)
    assert hooks.on_page_markdown(markdown, page, config, Files([])) == values.without_sources(markdown)


def test_the_results_page_contains_all_results(hooks: ModuleType, config: MkDocsConfig) -> None:
    markdown = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    filled = hooks.on_page_markdown(markdown, page_of("results.md", config), config, Files([]))
    assert results_page_markdown(ROOT) in filled


def test_the_glossary_links_the_chapters_that_exist(hooks: ModuleType, config: MkDocsConfig) -> None:
    html = "<dd><em>Chapter 6. Also: block.</em></dd><dd><em>Chapter 99.</em></dd>"
    found = hooks.on_page_content(html, page_of("glossary.md", config), config, Files([]))
    assert '<em><a href="../chapters/06_paged_kv_cache/">Chapter 6</a>. Also: block.</em>' in found
    assert "<em>Chapter 99.</em>" in found


@pytest.mark.parametrize(("html", "problems"), [("<h1 id='a'>One</h1><h2>Two</h2>", 0), ("<h1>A</h1><h1>B ¶</h1>", 1)])
def test_a_page_with_two_titles_fails_the_build(
    hooks: ModuleType, config: MkDocsConfig, caplog: pytest.LogCaptureFixture, html: str, problems: int
) -> None:
    """`mkdocs build --strict` fails on warnings."""
    with caplog.at_level(logging.WARNING, logger="mkdocs"):
        assert hooks.on_page_content(html, page_of("glossary.md", config), config, Files([])) == html
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == problems
    assert all("glossary.md has 2 headings of level 1" in text and "'A', 'B'" in text for text in messages)


def test_a_formula_that_cannot_be_set_fails_the_build(hooks: ModuleType, config: MkDocsConfig) -> None:
    import fetch_assets

    try:
        fetch_assets.fetch_assets()
    except fetch_assets.AssetError as error:
        pytest.skip(str(error))
    html = r'<span class="arithmatex">\(\frac{a\)</span>'
    with pytest.raises(PluginError, match="formula"):
        hooks.on_post_page(html, page_of("dataflow.md", config), config)
