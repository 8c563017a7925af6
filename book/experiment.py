"""What every experiment's run.py does around its measurements: choose a device, and record what it found."""

import argparse
from collections.abc import Collection
from pathlib import Path

import torch

from book import results


def command_line(doc: str) -> argparse.ArgumentParser:
    """The options of every run.py: `--device`, and `--out` for a folder to write below instead of the repository.

    Args:
        doc: the module's docstring; its first line becomes the help.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write below this folder instead of the repository")
    return parser


def record(result: results.Result, out: Path | None, in_readme: Collection[str]) -> None:
    """Print a result and write it; in the repository, also fill the table of the experiment's README.

    Args:
        result: what was found.
        out: a folder to write below; None for the repository.
        in_readme: the figures that the README's table shows.
    """
    print(result)
    print(results.write(result, out))
    if out is None:
        results.fill_readme(result.experiment, in_readme)
