"""The README agrees with the repository: its links, its commands and its chapters."""

import re
from pathlib import Path

import pytest

from book.grading.chapter import load_chapter
from mini_engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"run", "test", "lab", "site", "grade"} <= named <= targets


def test_the_table_lists_the_finished_chapters():
    table = README.split("<!-- chapters")[1].split("<!-- end of chapters -->")[0]
    finished = sorted(path.stem for path in (ROOT / "chapters").glob("*/*.ipynb"))
    assert re.findall(r"chapters/[^/]+/([^/]+)\.ipynb", table) == finished


def test_the_table_counts_the_exercises():
    for count, chapter in re.findall(r"\[(\d+) exercises\]\(chapters/([^/]+)/", README):
        assert int(count) == len(load_chapter(ROOT / "chapters" / chapter).exercises)


def test_modules_of_the_table_exist():
    table = README.split("<!-- chapters")[1].split("<!-- end of chapters -->")[0]
    for module in re.findall(r"`([^`]+)`", table):
        assert (ROOT / "mini_engine" / module).exists(), module


def test_an_experiments_page_says_each_thing_once():
    for file in (ROOT / "experiments").glob("*/README.md"):
        text = file.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.startswith(("## ", "<!-- ", "- **"))]
        assert len(set(lines)) == len(lines), file


@pytest.mark.parametrize("options", re.findall(r"\| `(\w+=[^`]*)` \|", README))
def test_options_beside_a_speed_are_the_engines(options: str) -> None:
    EngineConfig.of(eval(f"dict({options})"))
