"""Reading safetensors files: a JSON header, then the bytes of the tensors.

The format (https://github.com/huggingface/safetensors, "Format"):

    8 bytes     N, the length of the header, an unsigned little-endian integer
    N bytes     JSON: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}
    the rest    the data; the offsets count from here, the tensors fill it without holes and without overlaps

Nothing in it can be executed. A header can still lie, so every number in it is checked against the size of the file
before it is used: a damaged or hostile file gives `WeightFileError`, in bounded time and memory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mini_engine.errors import WeightFileError
from mini_engine.models.tensors import LazyTensor, read_bytes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# Real headers and configurations stay below 1 MiB. Parsed JSON takes up to some thirty times the size of its text.
MAX_JSON_BYTES = 8 * 2**20
MAX_DIMENSIONS = 8
MAX_SHARDS = 1024


@dataclass(frozen=True)
class TensorEntry:
    """What the header says about one tensor; `begin` and `end` are byte offsets into the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, a part of the file `path`.

    Raises:
        WeightFileError: it is too large, not UTF-8, not JSON, nested too deeply, not an object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    if len(text) > MAX_JSON_BYTES:
        raise _damaged(path, f"its JSON has {len(text)} bytes, more than {MAX_JSON_BYTES}")
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _damaged(path, f"its JSON cannot be read ({error})") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, f"its JSON is a {type(parsed).__name__}, not an object")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; see `parse_json`."""
    try:
        with path.open("rb") as file:
            return parse_json(file.read(MAX_JSON_BYTES + 1), path)
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read ({error.strerror}): check that it is a readable file.") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that a safetensors file lists, checked against the size of the file. No data is read.

    Raises:
        WeightFileError: the file cannot be read, is truncated, or its header contradicts itself or the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise _damaged(path, f"it has {size} bytes, too few for its header")
            header = parse_json(file.read(min(length, MAX_JSON_BYTES + 1)), path)
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read ({error.strerror}): check that it is a readable file.") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its __metadata__ does not map strings to strings")

    data_start = 8 + length
    entries = {name: _entry(path, name, described, data_start) for name, described in header.items()}
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _damaged(path, f"tensor {_short(name)} leaves a hole or overlaps another one")
        position = entry.end
    if position != size:
        raise _damaged(path, f"its tensors end at byte {position}, but it has {size} bytes")
    return entries


def _entry(path: Path, name: str, described: Any, data_start: int) -> TensorEntry:
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"tensor {_short(name)} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(described["dtype"]) if isinstance(described["dtype"], str) else None
    if dtype is None:
        raise _damaged(path, f"tensor {_short(name)} has the unknown dtype {_short(described['dtype'])}")
    shape, offsets = described["shape"], described["data_offsets"]
    if not (_counts(shape) and len(shape) <= MAX_DIMENSIONS and prod(max(n, 1) for n in shape) < 2**62):
        raise _damaged(path, f"tensor {_short(name)} has the impossible shape {_short(shape)}")
    if not (_counts(offsets) and len(offsets) == 2):
        raise _damaged(path, f"tensor {_short(name)} has the impossible data_offsets {_short(offsets)}")
    begin, end = offsets
    if end - begin != prod(shape) * dtype.itemsize:
        raise _damaged(path, f"tensor {_short(name)} of shape {shape} does not fit its data_offsets {_short(offsets)}")
    return TensorEntry(dtype, tuple(shape), data_start + begin, data_start + end)


def _counts(value: Any) -> bool:
    """Whether `value` is a list of integers that are not negative. In Python a bool is an int; here it is not."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file, each read from it when it is asked for.

    Raises:
        WeightFileError: see `read_header`.
    """
    entries = read_header(path)
    return {name: LazyTensor(entry.shape, entry.dtype, partial(_read, path, entry)) for name, entry in entries.items()}


def _read(path: Path, entry: TensorEntry) -> Tensor:
    raw = read_bytes(path, entry.begin, entry.end)
    if entry.dtype is torch.bool:
        return (raw != 0).reshape(entry.shape)  # a byte that is neither 0 nor 1 is no valid bool
    return raw.view(entry.dtype).reshape(entry.shape)


def open_sharded(index_path: Path, shard_path: dict[str, Path]) -> dict[str, LazyTensor]:
    """The tensors of a model that is spread over several files.

    Args:
        index_path: `model.safetensors.index.json`; its "weight_map" maps the name of a tensor to the name of a file.
        shard_path: where the files of those names are; a name that is not among them is refused, so that an index
            cannot point outside its folder.

    Raises:
        WeightFileError: the index is damaged, or names a file or a tensor that is not there.
    """
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise _damaged(index_path, 'its "weight_map" does not map tensor names to file names')
    shards = sorted(set(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        raise _damaged(index_path, f"it names {len(shards)} files, more than {MAX_SHARDS}")
    opened = {}
    for shard in shards:
        if shard not in shard_path:
            raise WeightFileError(
                f"{index_path} names {_short(shard)}, which is no safetensors file in its folder: "
                "download the missing file, or get the model from a source you trust."
            )
        opened[shard] = open_safetensors(shard_path[shard])
    for name, shard in weight_map.items():
        if name not in opened[shard]:
            raise _damaged(index_path, f"tensor {_short(name)} is not in {_short(shard)}")
    return {name: opened[shard][name] for name, shard in weight_map.items()}


def _short(value: Any) -> str:
    """What a file says, cut to a length that fits a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _damaged(path: Path, problem: str) -> WeightFileError:
    return WeightFileError(f"{path} is damaged: {problem}. Download or write it again.")
