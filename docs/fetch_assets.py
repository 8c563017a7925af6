"""Fetch what draws diagrams and sets formulas, and the fonts: mermaid, KaTeX and others, as npm packages.

    python docs/fetch_assets.py

`mkdocs build` and `mkdocs serve` call this themselves. The packages are unpacked once into `.cache/site-assets/`, which
git ignores; a second call finds them there and needs neither npm nor a network.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "site-assets"

# npm package -> its version and the files that the site needs (glob patterns inside the package)
PACKAGES = {
    "mermaid": ("11.17.2", ("dist/mermaid.min.js", "LICENSE")),
    "katex": ("0.19.1", ("dist/katex.min.css", "dist/katex.min.js", "dist/fonts/*.woff2", "LICENSE")),
    "@fontsource-variable/source-sans-3": (
        "5.3.0",
        ("files/*-latin-wght-*.woff2", "files/*-greek-wght-*.woff2", "LICENSE"),
    ),
    "@fontsource/source-serif-4": ("5.3.1", ("files/*-latin-[46]00-normal.woff2", "LICENSE")),
    "@fontsource-variable/source-code-pro": (
        "5.3.0",
        ("files/*-latin-wght-*.woff2", "files/*-greek-wght-*.woff2", "LICENSE"),
    ),
}


class AssetError(Exception):
    """The packages cannot be fetched; the message says what to do."""


def fetch_assets() -> None:
    """Put every package of `PACKAGES` into the cache; raises `AssetError` where that is impossible."""
    missing = {name: version for name, (version, _) in PACKAGES.items() if not package_folder(name).is_dir()}
    if not missing:
        return
    npm = shutil.which("npm")
    if npm is None:
        raise AssetError(
            "npm is not installed, so diagrams and formulas stay as text. Install it (on Debian: apt install npm) "
            "and build again."
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        for name, version in missing.items():
            packed = subprocess.run(
                [npm, "pack", f"{name}@{version}", "--silent"], cwd=scratch, capture_output=True, text=True, check=False
            )
            if packed.returncode != 0:
                raise AssetError(
                    f"npm could not fetch {name}@{version}; is there a network? {packed.stderr.strip()[-300:]}"
                )
            target = package_folder(name)
            unpacked = Path(scratch, target.name)
            _unpack(Path(scratch, packed.stdout.split()[-1]), unpacked, PACKAGES[name][1])
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                unpacked.rename(target)  # in one step: an interrupted fetch leaves no half of a package
            except OSError:
                if not target.is_dir():  # another build was faster
                    raise


def _unpack(archive_file: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Write the files that match, and nothing outside the folder. (`extract` has its filter from Python 3.11.4 on.)"""
    with tarfile.open(archive_file) as archive:
        for member in archive:
            name = member.name.removeprefix("package/")
            content = archive.extractfile(member) if member.isfile() else None
            if content is None or not any(fnmatch(name, pattern) for pattern in patterns):
                continue
            target = (folder / name).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise AssetError(f"{archive_file.name} wants to write outside its folder: {member.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def package_folder(name: str) -> Path:
    """Where a package of `PACKAGES` lies once it is fetched."""
    return CACHE / f"{name}@{PACKAGES[name][0]}"


def asset_files() -> Iterator[tuple[str, Path]]:
    """Yield (path below the site's `vendor/`, file on disk) for every file that belongs into the site."""
    for name in PACKAGES:
        if name == "mermaid":  # runs when the site is built, as KaTeX's script does
            continue
        folder = package_folder(name)
        for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".js"):
            yield f"{name.rpartition('/')[2]}/{file.relative_to(folder).as_posix()}", file


if __name__ == "__main__":
    try:
        fetch_assets()
    except AssetError as error:
        sys.exit(str(error))
    print(f"{sum(1 for _ in asset_files())} files ready in {CACHE}")
