"""Notebooks are written as Markdown (jupytext) and executed into .ipynb with outputs; this keeps each pair in step.

python -m book notebooks new 05 flexattention     a chapter's skeleton
python -m book notebooks build 01                 execute, write the .ipynb
python -m book notebooks text 01                  copy edited prose into the .ipynb; keep its outputs
python -m book notebooks check                    compare every pair; test the outputs and the derivations
python -m book notebooks test                     run every notebook under nbval and compare the outputs
"""

import difflib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from book import values
from book.paths import repository_root
from book.predictions import derivation_problems, load_questions, measured_in
from book.source_width import COLUMNS

# Jupyter's packages are imported where they are used: the grader shares this command line and does not need them.
if TYPE_CHECKING:
    from nbformat import NotebookNode

BLANK = " \n"  # an empty line is not enough
app = typer.Typer(help="Build and check the chapters' notebooks.", no_args_is_help=True)

_METADATA = {
    "jupytext": {"formats": "ipynb,md"},
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_HEADING = re.compile(r"^###? .*$", re.MULTILINE)
_QUESTION = re.compile(r'predict\("(?P<name>\w+)", None\)$')
_BOX = re.compile(r'class="(prediction|comparison)\b')
_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)
_LARGEST_IMAGE = 100_000  # bytes; a phone loads a chapter's figures on a train
_MACHINE_PATH = re.compile(r"(?:/(?:home|root|Users|tmp|var)/|site-packages|ipykernel_\d|[A-Z]:\\)[^\s\"'<]*")
_SLOW_SECONDS = 30.0

_TEMPLATE = """\
---
jupyter:
  jupytext:
    formats: ipynb,md
  kernelspec:
    display_name: Python 3 (ipykernel)
    language: python
    name: python3
---

# {number} {title}

The cost that hurts, in a few sentences and one measured number.

```python tags=["nbval-ignore-output"]
import book

book.setup()
```

## Predict

```python
from book import compare, figures, predict

predict("first_question", None)
```

## Measure

```python
compare("first_question", 2 * 3)
```
"""
_QUESTIONS = """\
[first_question]
question = "How many values does a matrix of 2 by 3 hold?"
unit = "values"
answer = 6
tolerance_factor = 1
why = "2 rows × 3 columns"
"""


def chapter_files(chapter: str, root: Path) -> list[Path]:
    """The Markdown files of one chapter ("1", "01" or its folder's name), or of all."""
    files = sorted(folder / f"{folder.name}.md" for folder in (root / "chapters").iterdir() if folder.is_dir())
    files = [file for file in files if file.exists()]
    if chapter != "all":
        files = [f for f in files if f.stem == chapter or f.stem.split("_")[0] == chapter.zfill(2)]
        if not files:
            raise typer.BadParameter(f"no chapters/{chapter.zfill(2)}_*/ with a Markdown notebook in it")
    return files


def source_of(file: Path) -> "NotebookNode":
    """The notebook that a Markdown file describes: no outputs, the book's metadata, ids that follow from the text."""
    import jupytext  # type: ignore[import-untyped]
    import nbformat

    notebook = jupytext.read(file)
    notebook.metadata = nbformat.from_dict(_METADATA)
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        kept = {name: cell.metadata[name] for name in ("tags", "jupyter") if cell.metadata.get(name)}
        cell.metadata = nbformat.from_dict(kept)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def execute(notebook: "NotebookNode", folder: Path) -> "NotebookNode":
    """Run every cell in `folder`, without the reader's predictions; an error stops it, unless its tag allows it."""
    from nbclient import NotebookClient
    from nbformat import from_dict

    client = NotebookClient(
        notebook,
        timeout=600,  # on a GPU a cell may run an experiment
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],  # the kernel warns of its own transport at every start
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=_environment())
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined_streams(cell.outputs)
            cell.metadata.pop("execution", None)
    # The kernel adds its own version to the metadata; a notebook must not change with a patch release of Python.
    notebook.metadata = from_dict(_METADATA)
    return notebook


def write(notebook: "NotebookNode", file: Path) -> None:
    import nbformat

    for cell in notebook.cells:
        if _is_hidden(cell) and cell.outputs:
            _begin_with_a_blank(cell.outputs[0])
    nbformat.validate(notebook)
    nbformat.write(notebook, file)


def with_outputs_of(saved: "NotebookNode", notebook: "NotebookNode") -> "NotebookNode":
    """Give the code cells of `notebook`, which was not executed, the outputs of those of `saved`.

    Raises:
        ValueError: a code cell was changed, added or removed, so the outputs may be others.
    """
    new, old = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (notebook, saved))
    if _as_lines(new) != _as_lines(old):
        raise ValueError("a code cell has changed")
    for cell, executed in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    return notebook


def problems(file: Path) -> Iterator[str]:
    """What is wrong with the pair of `file` (the Markdown) and its .ipynb: one message each."""
    import nbformat

    partner = file.with_suffix(".ipynb")
    if not partner.exists():
        yield f"{file.name} has no .ipynb: run `python -m book notebooks build {file.stem}`"
        return
    if values.is_stale(file):
        yield f"{file.name}: the records have changed: run `python -m book values`"
    wanted, saved = source_of(file), nbformat.read(partner, as_version=4)
    difference = list(
        difflib.unified_diff(_as_lines(wanted.cells), _as_lines(saved.cells), file.name, partner.name, lineterm="", n=1)
    )
    if difference:
        yield "the pair differs:\n" + "\n".join(difference)
    if saved.metadata != wanted.metadata:
        yield f"{partner.name}: the metadata is not the book's: {dict(saved.metadata)}"
    for index, cell in enumerate(wanted.cells):
        for line in _code_lines(cell):
            if len(line) > COLUMNS:
                yield f"{file.name}, cell {index}: {len(line)} columns of code, at most {COLUMNS}: {line}"
    counts = []
    for index, cell in enumerate(saved.cells):
        if cell.cell_type == "raw":
            yield f"{partner.name}, cell {index} is raw: the header of {file.name} must begin with `jupyter:`"
        if cell.cell_type == "code":
            counts.append(cell.execution_count)
            for problem in _output_problems(cell):
                yield f"{partner.name}, cell {index}: {problem}"
    if counts != list(range(1, len(counts) + 1)):
        yield f"{partner.name}: not executed from top to bottom in a fresh kernel: {counts}"
    for cell in _open_outcomes(saved.cells):
        start = cell.source.partition("\n")[0]
        yield f'the cell `{start}` shows the answer to a question: write ```python jupyter={{"outputs_hidden": true}}'
    questions = file.with_name("predictions.toml")
    if questions.exists():
        outputs = [output for cell in saved.cells for output in cell.get("outputs", [])]
        measured = dict(pair for output in outputs for pair in measured_in(output.get("data", {}).get("text/html", "")))
        for problem in derivation_problems(load_questions(questions), measured):
            yield f"predictions.toml {problem}"


def _is_hidden(cell: "NotebookNode") -> bool:
    return bool(cell.metadata.get("jupyter", {}).get("outputs_hidden", False))


def _begin_with_a_blank(output: "NotebookNode") -> None:
    """Put a blank line before an output, because JupyterLab shows the first line of a hidden one."""
    if output.output_type == "stream":
        output.text = BLANK + output.text.removeprefix(BLANK)
    for kind in ("text/html", "image/svg+xml"):
        if kind in output.get("data", {}):
            output.data[kind] = BLANK + output.data[kind].removeprefix(BLANK)


def _open_outcomes(cells: "list[NotebookNode]") -> "Iterator[NotebookNode]":
    """Yield the cells that show the answer to a question in Jupyter before the reader has run them.

    They are those between a question and its comparison, if no heading is between them. In "Break it" they end at a
    heading, too.
    """
    title = ""
    for i, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            title = next((h for h in reversed(_HEADING.findall(cell.source)) if h.startswith("## ")), title)
        question = _QUESTION.match(cell.source)
        if cell.cell_type != "code" or question is None:
            continue
        following, is_answered = [], title == "## Break it"
        for other in cells[i + 1 :]:
            if other.cell_type == "markdown":
                if _HEADING.search(other.source):
                    break
                continue
            following.append(other)
            if f'compare("{question["name"]}"' in other.source:
                is_answered = True
                break
        yield from (other for other in following if is_answered and _shows(other) and not _is_hidden(other))


def _shows(cell: "NotebookNode") -> bool:
    """Whether a cell has an output other than a question's box, or a comparison, which hides its numbers itself."""
    return any(not _BOX.search(str(output.get("data", ""))) for output in cell.outputs)


def _code_lines(cell: "NotebookNode") -> Iterator[str]:
    """Yield the lines of a code cell, or those inside the fences of a Markdown cell, except mermaid's."""
    if cell.cell_type == "code":
        yield from cell.source.splitlines()
    else:
        for fence in _FENCE.finditer(cell.source):
            if fence["language"] != "mermaid":
                yield from fence["lines"].splitlines()


def _output_problems(cell: "NotebookNode") -> Iterator[str]:
    tags = cell.metadata.get("tags", [])
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            yield f"prints on stderr: {output.text.strip()[:300]}"
        if output.output_type == "error" and "raises-exception" not in tags:
            yield f"fails: {output.ename}: {output.evalue[:300]}"
        data: dict[str, Any] = dict(output.get("data", {}))
        size = max(len(data.pop("image/png", "")) * 3 // 4, len(data.pop("image/svg+xml", "")))
        if size > _LARGEST_IMAGE:
            yield f"a figure of {size:,} bytes: keep it below {_LARGEST_IMAGE:,}, with rasterized=True where needed"
        texts = [output.get("text", ""), output.get("evalue", ""), *map(str, data.values())]
        found = next((match for text in texts if (match := _MACHINE_PATH.search(text))), None)
        if found:
            yield f"shows a path of this machine: {found.group()}"


def _as_lines(cells: "list[NotebookNode]") -> list[str]:
    lines = []
    for cell in cells:
        tags = f" tags={sorted(cell.metadata.tags)}" if cell.metadata.get("tags") else ""
        hidden = " outputs_hidden" if _is_hidden(cell) else ""
        lines += [f"[{cell.cell_type}]{tags}{hidden}", *cell.source.splitlines()]
    return lines


def _joined_streams(outputs: "list[NotebookNode]") -> "list[NotebookNode]":
    # A kernel sends a stream in pieces whose number depends on timing.
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _environment() -> dict[str, str]:
    environment = dict(os.environ, BOOK_PRISTINE="1", PYTHONHASHSEED="0")
    path = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@app.command()
def build(chapter: Annotated[str, typer.Argument(help="01, 01_slug or all")] = "all") -> None:
    """Execute a chapter's Markdown into its .ipynb, with outputs."""
    for file in chapter_files(chapter, repository_root()):
        start = time.perf_counter()
        values.refresh(file)
        write(execute(source_of(file), file.parent), file.with_suffix(".ipynb"))
        seconds = time.perf_counter() - start
        typer.echo(f"{file.stem}: {seconds:.1f} s{'  (aim for less than 30)' if seconds > _SLOW_SECONDS else ''}")
        for problem in problems(file):
            typer.echo(f"  {problem}")


@app.command()
def text(chapter: Annotated[str, typer.Argument(help="01, 01_slug or all")] = "all") -> None:
    """Copy the prose of a chapter's Markdown into its .ipynb, which keeps its outputs: nothing is executed."""
    import nbformat

    for file in chapter_files(chapter, repository_root()):
        partner = file.with_suffix(".ipynb")
        try:
            write(with_outputs_of(nbformat.read(partner, as_version=4), source_of(file)), partner)
        except ValueError as error:
            typer.echo(f"{file.stem}: {error}; run `python -m book notebooks build {file.stem}`", err=True)
            raise typer.Exit(1) from error


@app.command()
def check(chapter: Annotated[str, typer.Argument(help="01, 01_slug or all")] = "all") -> None:
    """Compare each Markdown file with its .ipynb; find cells that did not run, code that is too wide, warnings,
    machine paths, and derivations that miss their measurements."""
    failed = False
    for file in chapter_files(chapter, repository_root()):
        for problem in problems(file):
            failed = True
            typer.echo(f"{file.stem}: {problem}", err=True)
    if failed:
        typer.echo("Run `python -m book notebooks build` where a pair differs.", err=True)
        raise typer.Exit(1)
    typer.echo("every notebook agrees with its Markdown; every derivation agrees with its measurement or says why not")


@app.command()
def test(
    chapter: Annotated[str, typer.Argument(help="01, 01_slug or all")] = "all",
    workers: Annotated[int, typer.Option(help="processes, one notebook each")] = 2,
) -> None:
    """Run the notebooks under nbval: every output is compared, except where a cell is tagged nbval-ignore-output."""
    root = repository_root()
    files = [str(file.with_suffix(".ipynb")) for file in chapter_files(chapter, root)]
    if not files:
        typer.echo("no notebooks yet")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "book.nbval_kernels"]
    command += ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=600"]
    command += [f"--nbval-sanitize-with={root / 'nbval.cfg'}"]
    if min(workers, len(files)) > 1:
        command += ["-n", str(min(workers, len(files))), "--dist=loadfile"]  # a notebook's cells belong together
    # One thread for each worker: two notebooks share two cores.
    environment = _environment() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    raise typer.Exit(subprocess.run([*command, *files], cwd=root, env=environment, check=False).returncode)


@app.command()
def new(number: str, slug: str, title: str = "") -> None:
    """Make a chapter's folder with a Markdown notebook and its questions to start from."""
    folder = repository_root() / "chapters" / f"{number.zfill(2)}_{slug}"
    if folder.exists():
        raise typer.BadParameter(f"chapters/{folder.name} exists already")
    folder.mkdir()
    title = title or slug.replace("_", " ").capitalize()
    (folder / f"{folder.name}.md").write_text(_TEMPLATE.format(number=number.zfill(2), title=title), encoding="utf-8")
    (folder / "predictions.toml").write_text(_QUESTIONS, encoding="utf-8")
    typer.echo(f"chapters/{folder.name}: write {folder.name}.md, then `python -m book notebooks build {number}`")
