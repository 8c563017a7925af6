"""Notebooks: built from Markdown the same each time, and every way a pair can go wrong is found."""

from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from typer.testing import CliRunner

from book import notebooks
from book.display import mermaid, show
from book.nbval_kernels import start_again
from book.predictions import Comparison, Question

SOURCE = """\
---
jupyter:
  jupytext:
    formats: ipynb,md
  kernelspec:
    display_name: Python 3 (ipykernel)
    language: python
    name: python3
---

# A chapter

Text, and code that is not a cell:

```text
not run
```

```python
from pathlib import Path

print("one")
print(Path.cwd().name)
```

```python tags=["raises-exception"]
1 / 0
```

```python
2 + 2
```

```python
2 + 2
```
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Markdown file of a small chapter beside its executed notebook."""
    folder = tmp_path_factory.mktemp("book") / "chapters" / "07_tiny"
    folder.mkdir(parents=True)
    file = folder / "07_tiny.md"
    file.write_text(SOURCE, encoding="utf-8")
    notebooks.write(notebooks.execute(notebooks.source_of(file), folder), file.with_suffix(".ipynb"))
    return file


@pytest.fixture
def pair(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that pair for a test to spoil; the book's root is the current folder."""
    folder = tmp_path / "chapters" / "07_tiny"
    folder.mkdir(parents=True)
    for file in (built, built.with_suffix(".ipynb")):
        (folder / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    return folder / built.name


def spoil(pair: Path, cell: int, **changes: object) -> None:
    file = pair.with_suffix(".ipynb")
    notebook = nbformat.read(file, as_version=4)
    notebook.cells[cell].update(nbformat.from_dict(changes))
    nbformat.write(notebook, file)


def test_cells_run_in_the_chapters_folder_and_keep_their_outputs(built: Path) -> None:
    cells = nbformat.read(built.with_suffix(".ipynb"), as_version=4).cells
    assert [cell.cell_type for cell in cells] == ["markdown", "code", "code", "code", "code"]
    assert [output.text for output in cells[1].outputs] == ["one\n07_tiny\n"]  # one stream, however it arrived
    assert cells[2].outputs[0].ename == "ZeroDivisionError"
    assert cells[3].outputs[0].data["text/plain"] == "4"
    assert not list(notebooks.problems(built))


def test_building_twice_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.ipynb"
    notebooks.write(notebooks.execute(notebooks.source_of(built), built.parent), again)
    assert again.read_bytes() == built.with_suffix(".ipynb").read_bytes()


def test_prose_is_copied_without_executing(pair: Path) -> None:
    partner = pair.with_suffix(".ipynb")
    before = nbformat.read(partner, as_version=4)
    pair.write_text(SOURCE.replace("# A chapter", "# Another chapter"), encoding="utf-8")
    assert CliRunner().invoke(notebooks.app, ["text", "07"]).exit_code == 0
    after = nbformat.read(partner, as_version=4)
    assert after.cells[0].source.startswith("# Another chapter")
    assert after.cells[1:] == before.cells[1:]
    assert not list(notebooks.problems(pair))


@pytest.mark.parametrize(
    ("heading", "between", "output", "hidden", "found"),
    [
        ("## Build", "Think.", "4", False, ["1 + 3"]),
        ("## Build", "Think.", "4", True, []),
        ("## Build", "Think.", '<div class="comparison">', False, []),
        ("## Build", "### Measure", "4", False, []),
        ("## Break it", "### What was wrong", "4", False, ["1 + 3"]),
    ],
)
def test_an_outcome_is_hidden_until_the_comparison(
    heading: str, between: str, output: str, hidden: bool, found: list[str]
) -> None:
    def code(source: str, output: str, *, hidden: bool = False) -> nbformat.NotebookNode:
        outputs = [v4.new_output("display_data", {"text/html": output})]
        return v4.new_code_cell(source, outputs=outputs, metadata={"jupyter": {"outputs_hidden": hidden}})

    cells = [
        v4.new_markdown_cell(heading),
        code("5", "5"),
        code('predict("four", None)', '<div class="prediction" data-name="four">'),
        code("1 + 3", output, hidden=hidden),
        v4.new_markdown_cell(between),
        code('compare("four", 4)', '<div class="comparison">'),
        code("2 + 2", "4"),
    ]
    assert [cell.source for cell in notebooks._open_outcomes(cells)] == found


def test_a_hidden_output_begins_with_a_blank_line(tmp_path: Path) -> None:
    """JupyterLab shows the first line of an output that it hides."""
    outputs = [
        v4.new_output("stream", text="4\n"),
        v4.new_output("display_data", {"text/html": "<b>4</b>"}),
        v4.new_output("display_data", {"image/svg+xml": "<svg></svg>", "text/plain": "four"}),
    ]
    cells = [v4.new_code_cell("f()", outputs=[output]) for output in outputs]
    for hidden in (False, True, True):  # the second time changes nothing
        for cell in cells:
            cell.metadata = nbformat.from_dict({"jupyter": {"outputs_hidden": hidden}})
        notebooks.write(v4.new_notebook(cells=cells), tmp_path / "hidden.ipynb")
        stream, table, figure = (cell.outputs[0] for cell in nbformat.read(tmp_path / "hidden.ipynb", 4).cells)
        blank = " \n" if hidden else ""
        assert stream.text == f"{blank}4\n"
        assert table.data["text/html"] == f"{blank}<b>4</b>"
        assert figure.data["image/svg+xml"] == f"{blank}<svg></svg>" and figure.data["text/plain"] == "four"


def test_a_changed_cell_has_to_be_executed(pair: Path) -> None:
    before = pair.with_suffix(".ipynb").read_bytes()
    pair.write_text(SOURCE.replace("1 / 0", "2 / 0"), encoding="utf-8")
    result = CliRunner().invoke(notebooks.app, ["text", "07"])
    assert result.exit_code == 1 and "a code cell has changed" in result.output
    assert pair.with_suffix(".ipynb").read_bytes() == before


def test_ids_follow_the_text_of_the_cell(built: Path) -> None:
    before = notebooks.source_of(built).cells
    built_text = built.read_text(encoding="utf-8")
    changed = built.with_name("changed.md")
    changed.write_text(built_text.replace("not run", "never run"), encoding="utf-8")
    after = notebooks.source_of(changed).cells
    assert before[0].id != after[0].id
    assert [cell.id for cell in before[1:]] == [cell.id for cell in after[1:]]
    assert len({cell.id for cell in before}) == len(before)  # two cells of equal text included


@pytest.mark.parametrize(
    ("cell", "changes", "problem"),
    [
        (0, {"source": "# Another"}, "-# A chapter"),
        (3, {"source": "2 + 3"}, "+2 + 3"),
        (3, {"metadata": {"tags": ["nbval-skip"]}}, "nbval-skip"),
        (3, {"execution_count": None}, "not executed from top to bottom"),
        (3, {"execution_count": 7}, "not executed from top to bottom"),
        (2, {"metadata": {}}, "ZeroDivisionError"),
        (3, {"outputs": [{"output_type": "stream", "name": "stderr", "text": "Warning: x"}]}, "stderr: Warning: x"),
        (3, {"outputs": [{"output_type": "stream", "name": "stdout", "text": "/home/me/x.py"}]}, "/home/me/x.py"),
        (
            3,
            {"outputs": [{"output_type": "display_data", "data": {"image/png": "A" * 140_000}, "metadata": {}}]},
            "100,000",
        ),
        (
            3,
            {"outputs": [{"output_type": "display_data", "data": {"image/svg+xml": "A" * 110_000}, "metadata": {}}]},
            "100,000",
        ),
        (
            3,
            {"outputs": [{"output_type": "display_data", "data": {"text/html": "C:\\Users\\me"}, "metadata": {}}]},
            "path",
        ),
    ],
)
def test_what_went_wrong_is_said(pair: Path, cell: int, changes: dict, problem: str) -> None:
    spoil(pair, cell, **changes)
    assert problem in "\n".join(notebooks.problems(pair))
    checked = CliRunner().invoke(notebooks.app, ["check"])
    assert checked.exit_code == 1 and problem in checked.output


def test_code_wider_than_the_site_shows_is_found(pair: Path) -> None:
    for columns, found in ((88, False), (89, True)):
        pair.write_text(SOURCE.replace("2 + 2", "2 +".ljust(columns - 1) + "2", 1), encoding="utf-8")
        assert (f"{columns} columns of code" in "\n".join(notebooks.problems(pair))) == found


@pytest.mark.parametrize(("language", "found"), [("console", True), ("mermaid", False)])
def test_wide_lines_in_a_text_are_found_except_in_drawings(pair: Path, language: str, found: bool) -> None:
    fence = f"```mermaid\nA\n```\n\nSome text.\n\n```{language}\n{'x' * 89}\n```\n"
    pair.write_text(f"{pair.read_text(encoding='utf-8')}\nSome text:\n\n{fence}\nMore text.\n", encoding="utf-8")
    assert ("89 columns of code" in "\n".join(notebooks.problems(pair))) == found


def test_images_that_hold_the_letters_of_a_path_are_no_path(pair: Path) -> None:
    spoil(pair, 3, outputs=[{"output_type": "display_data", "data": {"image/png": "iVB/tmp/x"}, "metadata": {}}])
    assert not list(notebooks.problems(pair))


def test_a_derivation_that_misses_the_saved_measurement_fails_the_check(pair: Path) -> None:
    question = Question("07_tiny/sum", "What is 2 + 2?", "units", 4.0, 1.5, "addition")
    entry = '[sum]\nquestion = "What is 2 + 2?"\nunit = "units"\nanswer = 4\ntolerance_factor = 1.5\nwhy = "addition"\n'
    file = pair.with_name("predictions.toml")
    for measured, disagrees, exit_code in [(5.0, "", 0), (7.0, "", 1), (7.0, 'disagrees = "a carry"\n', 0)]:
        html = Comparison(question, None, measured)._repr_html_()
        output = {"output_type": "execute_result", "execution_count": 3, "data": {"text/html": html}, "metadata": {}}
        spoil(pair, 3, outputs=[output])
        file.write_text(entry + disagrees, encoding="utf-8")
        checked = CliRunner().invoke(notebooks.app, ["check"])
        assert checked.exit_code == exit_code, checked.output
        assert ("[sum] our derivation is 4 units, but the measurement is 7 units" in checked.output) is (exit_code == 1)


def test_foreign_metadata_and_a_missing_notebook_are_found(pair: Path) -> None:
    file = pair.with_suffix(".ipynb")
    notebook = nbformat.read(file, as_version=4)
    notebook.metadata.kernelspec.name = "my-env"
    nbformat.write(notebook, file)
    assert "metadata" in "\n".join(notebooks.problems(pair))
    file.unlink()
    assert "has no .ipynb" in "\n".join(notebooks.problems(pair))


def test_check_is_silent_about_a_good_pair(pair: Path) -> None:
    checked = CliRunner().invoke(notebooks.app, ["check", "7"])
    assert checked.exit_code == 0 and "agrees" in checked.output


def test_chapters_are_found_by_number_and_name(pair: Path) -> None:
    root = Path.cwd()
    for name in ("7", "07", "07_tiny", "all"):
        assert [file.name for file in notebooks.chapter_files(name, root)] == ["07_tiny.md"]
    assert CliRunner().invoke(notebooks.app, ["check", "8"]).exit_code == 2


def test_a_new_chapter_builds_and_is_never_overwritten(pair: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(notebooks.app, ["new", "8", "next", "--title", "The next"]).exit_code == 0
    assert runner.invoke(notebooks.app, ["new", "8", "next"]).exit_code == 2
    assert runner.invoke(notebooks.app, ["build", "8"]).exit_code == 0
    assert runner.invoke(notebooks.app, ["check"]).exit_code == 0


def test_nbval_fails_when_an_output_changes(pair: Path) -> None:
    """`make notebooks` shows that it passes otherwise."""
    (Path.cwd() / "nbval.cfg").touch()
    spoil(
        pair,
        3,
        outputs=[{"output_type": "execute_result", "execution_count": 3, "data": {"text/plain": "5"}, "metadata": {}}],
    )
    assert CliRunner().invoke(notebooks.app, ["test", "7"]).exit_code == 1


def test_show_gives_the_source_as_it_stands() -> None:
    shown = show(mermaid)
    assert shown.markdown.startswith("`mermaid` in `book/display.py`\n\n````python\ndef mermaid(")
    folded = show(mermaid, fold="Open me").markdown
    assert folded == f"<details>\n<summary>Open me</summary>\n\n{shown.markdown}\n\n</details>"
    assert "`book/notebooks.py`" in show(notebooks).markdown and "def build(" in repr(show(notebooks))


def test_mermaid_is_a_fence() -> None:
    diagram = mermaid("""
        flowchart LR
            a --> b
    """)
    assert diagram.markdown == "```mermaid\nflowchart LR\n    a --> b\n```"


def test_a_kernel_that_dies_while_it_starts_is_started_again() -> None:
    deaths = iter([RuntimeError("Kernel died"), RuntimeError("Kernel died"), None])

    def start(name: str) -> str:
        if death := next(deaths):
            raise death
        return name

    assert start_again(start)("python") == "python"


def test_a_kernel_that_never_starts_is_an_error() -> None:
    def start() -> None:
        raise RuntimeError("Kernel died")

    with pytest.raises(RuntimeError, match="died"):
        start_again(start)()
