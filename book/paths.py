"""Where the book's files are: found from the folder a notebook runs in."""

from pathlib import Path


def repository_root(start: Path | None = None) -> Path:
    """The folder that holds `chapters/`: the nearest at or above `start` (the current folder), else this package's."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "chapters").is_dir():
            return folder
    return Path(__file__).resolve().parents[1]
