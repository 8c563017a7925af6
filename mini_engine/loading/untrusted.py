"""Checks of files from strangers, made before a library trusts the sizes in them.

Nothing in a model's folder is ever run or unpickled; these checks keep a damaged or hostile file from taking the
machine's memory instead. A reader of the engine can skip this module.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mini_engine.errors import WeightFileError

TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json")  # that name token ids
REMEDY = "Download or write it again; if this engine converted it, delete it, and the next start converts it again."

# Real configurations and safetensors headers are below 1 MiB, and parsing them takes up to thirty times their size.
MAX_JSON_BYTES = 8 * 2**20
MAX_TOKENIZER_BYTES = 64 * 2**20  # the largest tokenizer.json, Gemma 3's, has 33 MB


def damaged(path: Path, problem: str) -> WeightFileError:
    """Return the error for a file that contradicts itself or cannot be parsed."""
    return WeightFileError(f"{path} is damaged: {problem[:300]}. {REMEDY}")


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        WeightFileError: if the file is too large, is not JSON, is nested too deeply, or is not an object.
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise damaged(path, f"it has more than {limit} bytes")
    try:
        return {**json.loads(content)}  # a TypeError if it is no object
    except (ValueError, TypeError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError, too
        raise damaged(path, f"it is not a JSON object ({str(error)[:100]})") from error


def check_header(path: Path) -> None:
    """Raise WeightFileError if a safetensors file states a longer header than any model has."""
    with path.open("rb") as raw:
        if int.from_bytes(raw.read(8), "little") > min(path.stat().st_size, MAX_JSON_BYTES):
            raise damaged(path, f"its header is longer than the file, or than {MAX_JSON_BYTES} bytes")


def check_token_ids(folder: Path, vocab_size: int) -> None:
    """Raise WeightFileError if a token id is far beyond the vocabulary: the library makes room for all smaller ids.

    Args:
        folder: a model's folder. Files of another form than the library's raise any exception, as they do there.
        vocab_size: the model's; some tokenizers have a few tokens more.
    """
    for path in (folder / name for name in TOKEN_FILES if (folder / name).is_file()):
        content = read_json(path, MAX_TOKENIZER_BYTES)
        ids: Iterable[int] = content.values()
        if path.name == "tokenizer_config.json":
            ids = map(int, content.get("added_tokens_decoder") or ())
        elif path.name == "tokenizer.json":
            vocabulary, added = content["model"]["vocab"], content.get("added_tokens") or ()
            ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else ()), *(token["id"] for token in added)]
        if (largest := max(ids, default=0)) > max(2**20, 2 * vocab_size):
            raise damaged(path, f"it has a token id {largest} in a vocabulary of {vocab_size}")
