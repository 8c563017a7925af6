"""Checks of files from strangers, made before a library trusts the sizes in them.

Nothing in a model's folder is ever run or unpickled; these checks keep a damaged or hostile file from taking the
machine's memory instead. A reader of the engine can skip this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mini_engine.errors import WeightFileError

MANIFEST = "mini-engine.json"  # in the folder of a model that this engine has converted

# Real configurations and safetensors headers are below 1 MiB, and parsing them takes up to thirty times their size.
MAX_JSON_BYTES = 8 * 2**20
MAX_TOKENIZER_BYTES = 64 * 2**20  # the largest tokenizer.json, Gemma 3's, has 33 MB
MAX_HEADER_BYTES, MAX_HEADER_VALUES = 64 * 2**20, 2**21  # of a GGUF file; twice those of the largest vocabularies


def damaged(path: Path, problem: str) -> WeightFileError:
    """Return the error for a file that contradicts itself or cannot be parsed."""
    return WeightFileError(f"{path} is damaged: {problem[:300]}. {remedy_for(path)}")


def remedy_for(path: Path) -> str:
    """Return what to do about a bad file."""
    folder = path if path.is_dir() else path.parent
    if (folder / MANIFEST).is_file():  # this engine wrote the folder
        return f"Delete the folder {folder}; the next start converts the model again."
    return "Download or write it again."


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        WeightFileError: if the file is too large, is not UTF-8 or JSON, is nested too deeply, or is not an object.
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise damaged(path, f"it has more than {limit} bytes")
    try:
        parsed = json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise damaged(path, f"its JSON cannot be parsed ({str(error)[:100]})") from error
    if not isinstance(parsed, dict):
        raise damaged(path, f"its JSON is a {type(parsed).__name__}, not an object")
    return parsed


def check_header(path: Path) -> None:
    """Raise WeightFileError if a safetensors file states a longer header than any model has."""
    with path.open("rb") as raw:
        if int.from_bytes(raw.read(8), "little") > min(path.stat().st_size, MAX_JSON_BYTES):
            raise damaged(path, f"its header is longer than the file, or than {MAX_JSON_BYTES} bytes")


def check_token_ids(folder: Path, vocab_size: int) -> None:
    """Raise WeightFileError if a token id is far beyond the vocabulary: the library makes room for all smaller ids.

    Args:
        folder: a model's folder.
        vocab_size: the model's; some tokenizers have a few tokens more.
    """
    for name in ("tokenizer.json", "added_tokens.json", "tokenizer_config.json", "vocab.json"):
        if not (folder / name).is_file():
            continue
        content = read_json(folder / name, MAX_TOKENIZER_BYTES)
        model, added = content.get("model"), content.get("added_tokens")
        is_vocabulary = name in ("vocab.json", "added_tokens.json")
        vocabulary = content if is_vocabulary else model.get("vocab") if isinstance(model, Mapping) else None
        ids = [
            *(vocabulary.values() if isinstance(vocabulary, Mapping) else ()),
            *(token.get("id") for token in (added if isinstance(added, list) else ()) if isinstance(token, Mapping)),
            *map(int, filter(str.isdecimal, content.get("added_tokens_decoder") or ())),
        ]
        if (largest := max((i for i in ids if type(i) is int), default=0)) > max(2**20, 2 * vocab_size):
            raise damaged(folder / name, f"it has a token id {largest} in a vocabulary of {vocab_size}")


class BoundedReader(gguf.GGUFReader):
    """A `GGUFReader` that never reads past the file or the limits on a header.

    The library reads every value through `_get` and trusts the counts and lengths in the file, so all checks are here.
    A big-endian file, which the library would read, has absurd counts here and is refused.
    """

    def __init__(self, path: Path) -> None:
        self.limit, self.num_values = MAX_HEADER_BYTES, 0
        super().__init__(path)

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        self.num_values += 1
        if end > min(self.limit, self.data.size) or self.num_values > MAX_HEADER_VALUES:
            raise ValueError(
                f"{count} values at byte {offset} go past the end of the file or of what a header may hold"
            )
        return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _build_tensors(self, start_offs: Any, fields: list[gguf.ReaderField]) -> None:
        self.limit = self.data.size  # the header ends here; tensors may be anywhere after it
        super()._build_tensors(start_offs, fields)
