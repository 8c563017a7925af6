"""Reading GGUF files: typed metadata, a list of tensors, then their bytes, mostly in quantised blocks.

The format (https://github.com/ggml-org/ggml, docs/gguf.md), version 2 and 3, little-endian:

    "GGUF"  u32 version  u64 number of tensors  u64 number of metadata pairs
    each pair:      string key, u32 type, value        (a string is a u64 length and that many bytes of UTF-8;
                                                         an array is a u32 type, a u64 count and the values)
    each tensor:    string name, u32 number of dimensions, u64 for each (the innermost first), u32 type, u64 offset
    padding to a multiple of "general.alignment" (32 if it is not there), from which the offsets count
    the data; each tensor starts at a multiple of the alignment

Every count, length and offset comes from the file, so each is checked against the size of the file before it is used:
a damaged or hostile file gives `WeightFileError`, in bounded time and memory.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mini_engine.errors import WeightFileError
from mini_engine.models.tensors import read_bytes

# Metadata types. Numbers are described for `struct` and numpy alike.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# Tensor types: name, elements in a block, bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# The largest vocabularies with their merges take some 30 MiB; the reader gives up beyond these.
MAX_HEADER_BYTES = 64 * 2**20
MAX_ITEMS = 2**16  # metadata pairs, or tensors
MAX_STRINGS = 2**20  # in one array


@dataclass(frozen=True)
class GGUFTensor:
    """What the file says about one tensor.

    Attributes:
        type: name of its type, a value of `TENSOR_TYPES`.
        shape: outermost dimension first, as in PyTorch; the file has it the other way round.
        begin, end: byte offsets into the file.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file: metadata (numbers, strings, lists of strings, numpy arrays) and tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def blocks(self, name: str) -> UInt8[Tensor, "blocks bytes"]:
        """The stored bytes of a tensor, one row for each block, read from the file now."""
        tensor = self.tensors[name]
        return read_bytes(self.path, tensor.begin, tensor.end).view(-1, _BLOCK_BYTES[tensor.type])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of `tensor(name)`."""
        return FLOATS.get(self.tensors[name].type, torch.float32)

    def tensor(self, name: str) -> Tensor:
        """A tensor in its shape: F32, F16 and BF16 as stored, quantised types dequantised to float32."""
        info = self.tensors[name]
        return dequantize(info.type, self.blocks(name)).reshape(info.shape)


_BLOCK_BYTES = {name: size for name, _, size in TENSOR_TYPES.values()}


def dequantize_q4_1(blocks: UInt8[Tensor, "N 20"]) -> Float[Tensor, "N 32"]:
    """The 32 numbers that each Q4_1 block stands for, in float32.

    A block is a float16 scale d, a float16 minimum m and 16 bytes. The low four bits of byte i are element i, the high
    four bits element i + 16; an element q stands for d·q + m (ggml, `dequantize_row_q4_1`).
    """
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    low, high = blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4
    return torch.cat([low, high], dim=1) * scale + minimum


def dequantize(type_name: str, blocks: UInt8[Tensor, "blocks bytes"]) -> Tensor:
    """The numbers in stored blocks, flat: a view for F32, F16 and BF16, else float32.

    Q4_1 is spelled out above; the other quantised types are left to the gguf library, which knows their bit patterns.
    """
    if type_name in FLOATS:
        return blocks.flatten().view(FLOATS[type_name])
    if type_name == "Q4_1":
        return dequantize_q4_1(blocks).flatten()
    import gguf  # takes a moment, and only quantised files need it

    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[type_name])).flatten()


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the metadata and the list of tensors of a GGUF file; no tensor is read.

    Raises:
        WeightFileError: the file cannot be read, is no GGUF of version 2 or 3, is truncated, contradicts itself, or
            holds tensors of a type that this reader does not know.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise WeightFileError(f"{path} is empty: download it again.") from error
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read ({error.strerror}): check that it is a readable file.") from error
    with data:
        return _Reader(path, data).read()


class _Reader:
    """A position in the file that never leaves it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def fail(self, problem: str) -> WeightFileError:
        return WeightFileError(f"{self.path} is damaged: {problem}. Download it again.")

    def take(self, size: int) -> int:
        """Step over `size` bytes; returns where they begin."""
        begin = self.position
        if size > min(len(self.data), MAX_HEADER_BYTES) - begin:
            raise self.fail(f"{size} bytes are announced at byte {begin}, more than there are or may be")
        self.position = begin + size
        return begin

    def number(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        begin = self.take(self.number("Q"))
        try:
            return self.data[begin : self.position].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"the text at byte {begin} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        raise self.fail(f"unknown metadata type {kind} at byte {self.position}")

    def array(self, kind: int, count: int) -> list[str] | np.ndarray:
        if kind == STRING and count <= MAX_STRINGS:
            return [self.string() for _ in range(count)]
        if kind in NUMBERS:
            dtype = np.dtype(NUMBERS[kind]).newbyteorder("<")
            begin = self.take(count * dtype.itemsize)
            return np.frombuffer(self.data, dtype, count, begin).copy()
        raise self.fail(f"an array of {count} values of metadata type {kind} at byte {self.position}")

    def tensor_info(self) -> tuple[str, tuple[str, tuple[int, ...], int, int]]:
        """Name, and type, shape, offset and size in bytes of the next tensor in the list."""
        name, num_dims = self.string(), self.number("I")
        if not 1 <= num_dims <= 4:
            raise self.fail(f"tensor {name[:80]!r} has {num_dims} dimensions, not 1 to 4")
        shape = tuple(self.number("Q") for _ in range(num_dims))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in TENSOR_TYPES:
            known = ", ".join(known for known, _, _ in TENSOR_TYPES.values())
            raise WeightFileError(
                f"{self.path}: tensor {name[:80]!r} has the type {kind}, which is unknown or unsupported: "
                f"use a file with {known}."
            )
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block:
            raise self.fail(f"tensor {name[:80]!r} has the impossible shape {shape} for {type_name}")
        return name, (type_name, shape, offset, prod(shape) // block * block_bytes)

    def read(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise WeightFileError(f"{self.path} is no GGUF file: it does not begin with the letters GGUF.")
        self.take(4)
        version = self.number("I")
        if version not in (2, 3):
            raise WeightFileError(
                f"{self.path} says it is GGUF version {version}: only the little-endian versions 2 and 3 are read."
            )
        num_tensors, num_pairs = self.number("Q"), self.number("Q")
        if max(num_tensors, num_pairs) > MAX_ITEMS:
            raise self.fail(f"it announces {num_tensors} tensors and {num_pairs} metadata pairs")

        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string()
            if key in metadata:
                raise self.fail(f"the metadata key {key[:80]!r} occurs twice")
            metadata[key] = self.value(self.number("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise self.fail(f"its alignment is {alignment!r}, not a power of two")

        infos = [self.tensor_info() for _ in range(num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end = data_start
        for name, (type_name, shape, offset, size) in sorted(infos, key=lambda info: info[1][2]):
            begin = data_start + offset
            if name in tensors:
                raise self.fail(f"the tensor {name[:80]!r} occurs twice")
            if offset % alignment or begin < end or begin + size > len(self.data):
                raise self.fail(
                    f"tensor {name[:80]!r} would take {size} bytes from byte {begin} of {len(self.data)}: "
                    "misaligned, over another tensor, or past the end"
                )
            end = begin + size
            tensors[name] = GGUFTensor(type_name, shape, begin, end)
        return GGUFFile(self.path, metadata, tensors)
