"""The parts that readers of quantized checkpoints share: checked options, checked headers, and unpacking."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Int8, Int32, UInt8
from torch import Tensor

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading.stored import StoredTensors
from mini_engine.loading.untrusted import damaged
from mini_engine.quantization import FP8, Format, QuantizedTensor

USE_ANOTHER = (
    'load the original checkpoint with quantization="int8", or use a checkpoint in INT4, INT8, or FP8 of '
    "compressed-tensors, GPTQ, or AWQ"
)
SCALES = (torch.float32, torch.bfloat16, torch.float16)

# Keys that say how a checkpoint was made, which modules it left dense (the tensors say so, too), or how another library
# should run it.
OF_WRITERS = frozenset({"modules_to_not_convert", "modules_to_convert", "ignored_layers", "backend", "meta", "version"})


class Options:
    """A JSON object of the configuration. Each value is checked when it is read, and the rest by `finish`.

    Args:
        values: the object.
        where: what it is, for messages.
        ignored: keys without effect on the weights.
    """

    def __init__(self, values: object, where: str, ignored: frozenset[str] = OF_WRITERS) -> None:
        if not isinstance(values, Mapping):
            raise ModelLoadError(f"{where} is {repr(values)[:80]}: it must be an object.")
        self.values, self.where, self.known = values, where, set(ignored)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a value of the given type; null is the default.

        Raises:
            ModelLoadError: if it has another type, or is missing without a default.
        """
        self.known.add(key)
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not kind:
            raise self.bad(key, f"it must be of type {kind.__name__}")
        return value

    def choice(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """Return a value that is one of `allowed`; null is the default.

        Raises:
            ModelLoadError: if it is another value.
        """
        self.known.add(key)
        value = default if self.values.get(key) is None else self.values[key]
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise self.bad(key, f"it must be {' or '.join(map(repr, allowed))}; otherwise, {USE_ANOTHER}")
        return value

    def group(self, key: str) -> int | None:
        """Return the columns of a group: a positive number, or None for -1, a whole row.

        Raises:
            ModelLoadError: if it is neither.
        """
        size = self.get(key, int)
        if size < 1 and size != -1:
            raise self.bad(key, "it must be a number of columns, or -1 for a whole row")
        return None if size == -1 else size

    def block(self, key: str) -> tuple[int, int]:
        """Return the rows and the columns of a block.

        Raises:
            ModelLoadError: if the value is missing, or is not two positive numbers.
        """
        self.known.add(key)
        size = self.values.get(key)
        size = size.split("x") if isinstance(size, str) else size
        if isinstance(size, list) and len(size) == 2 and all(re.fullmatch("[1-9][0-9]{0,8}", str(n)) for n in size):
            return int(size[0]), int(size[1])
        raise self.bad(key, "it must be [rows, columns] of a block, such as [128, 128]; no other key implies it")

    def bad(self, key: str, remedy: str) -> ModelLoadError:
        """Return the error for a value."""
        return ModelLoadError(f"{self.where} has {key} = {repr(self.values.get(key))[:80]}: {remedy}.")

    def finish(self) -> None:
        """Raise ModelLoadError if there is a key that was not read and may change the computation."""
        for key in self.values.keys() - self.known:
            if self.values[key] not in (None, False, "", [], {}):
                raise self.bad(key[:80], f"this engine does not know the key; {USE_ANOTHER}")


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix of a checkpoint, its headers checked and its numbers not yet read.

    Attributes:
        name: its module.
        format: its format.
        shape: its rows (outputs) and columns (inputs).
        parts: the last parts of the names of its tensors.
        read: reads it.
    """

    name: str
    format: Format
    shape: tuple[int, int]
    parts: tuple[str, ...]
    read: Callable[[Matrix], QuantizedTensor]


class Parts:
    """The tensors of a checkpoint by module and by the last part of their names, such as "weight_scale".

    Args:
        tensors: all tensors of the checkpoint.
        source: its folder, for messages.
    """

    def __init__(self, tensors: StoredTensors, source: Path) -> None:
        self.tensors, self.source = tensors, source
        self.modules: dict[str, dict[str, Tensor]] = {}
        for name, header in tensors.headers.items():
            module, _, part = name.rpartition(".")
            self.modules.setdefault(module, {})[part] = header

    def check(self, module: str, part: str, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> torch.Size:
        """Return the shape of a tensor from its header. None in `shape` stands for any size above 0.

        Raises:
            ModelLoadError: if the tensor is missing, or has another shape or dtype.
        """
        header, name = self.modules[module].get(part), f"{module}.{part}"[:200]
        needs = f"quantization_config in {self.source}/config.json needs"
        if header is None:
            remedy = "correct it (for example, the list of ignored modules), or write the checkpoint again"
            raise ModelLoadError(f"the checkpoint has no tensor {name}, which {needs}: {remedy}.")
        fits = len(shape) == header.ndim and all(a in (None, b) for a, b in zip(shape, header.shape, strict=True))
        if not fits or 0 in header.shape or header.dtype not in dtypes:
            sizes = ["any" if size is None else size for size in shape]
            found, wanted = f"{header.dtype} {list(header.shape)}", f"{' or '.join(map(str, dtypes))} {sizes}"
            remedy = "correct its numbers of bits, of columns in a group, or of rows and columns in a block"
            raise ModelLoadError(f"tensor {name} is {found}, but {needs} {wanted}: {remedy}.")
        return header.shape

    def check_tiles(self, module: str, part: str, tiles: tuple[int, int], *dtypes: torch.dtype) -> None:
        """Check a tensor with a number for each tile, like `check`; trailing dimensions of size 1 may be missing."""
        header = self.modules[module].get(part)
        ndim = 2 if header is None else header.ndim
        self.check(module, part, tiles[:ndim] if all(size == 1 for size in tiles[ndim:]) else tiles, *dtypes)

    def read(self, module: str, part: str) -> Tensor:
        """Read a tensor."""
        return self.tensors[f"{module}.{part}"]

    def damaged(self, module: str, problem: str) -> WeightFileError:
        """Return the error for a matrix whose tensors contradict each other."""
        return damaged(self.source, f"{module[:200]} {problem}")


def unpack(words: Int32[Tensor, "R W"], bits: int) -> UInt8[Tensor, "R C"]:
    """Unpack 32 / bits unsigned numbers from each word of a row, the lowest bits first.

    Args:
        words: packed numbers.
        bits: 4 or 8.
    """
    octets = words.unsqueeze(-1).view(torch.uint8)  # on a little-endian machine, the lowest bits first
    return (octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1)).flatten(1)


def centered(numbers: UInt8[Tensor, "R C"], bits: int) -> Int8[Tensor, "R C"]:
    """Subtract half of the range of unsigned numbers, so that they fit into an int8."""
    return (numbers.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def group_order(g_idx: Int[Tensor, " In"], group: int | None) -> Int[Tensor, " In"] | None:
    """Return the columns sorted by their groups, or None if they are in this order already.

    Args:
        g_idx: the group of each column.
        group: columns of a group; the last group may be smaller. None: all.

    Raises:
        ValueError: if a group has another number of columns.
    """
    in_order = torch.arange(len(g_idx)) // (group or len(g_idx))
    order = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[order].long(), in_order):
        raise ValueError(f"its groups must be numbered from 0 and have {group or len(g_idx)} columns each")
    return None if torch.equal(g_idx.long(), in_order) else order


def integers(parts: Parts, matrix: Matrix, q: Tensor, scale: Tensor, zeros: Tensor | None) -> QuantizedTensor:
    """Build a matrix of signed integers.

    Args:
        parts: the checkpoint.
        matrix: what its headers say.
        q: [Out, In] int8.
        scale: [tiles, tiles] float32.
        zeros: [tiles, tiles] int8, subtracted from q; None: 0.

    Raises:
        WeightFileError: if a symmetric format has zero points, or its g_idx has groups of unequal sizes.
    """
    offset, order = None, None
    if matrix.format.has_offsets:
        assert zeros is not None
        offset = (-zeros.float() * scale).contiguous()
    elif zeros is not None and zeros.any():
        problem = "has zero points, although the configuration calls it symmetric (or states the wrong version)"
        raise parts.damaged(matrix.name, problem)
    for part in (part for part in matrix.parts if part.endswith("g_idx")):
        try:
            order = group_order(parts.read(matrix.name, part), matrix.format.columns)
        except ValueError as error:
            raise parts.damaged(matrix.name, f"has an unusable {part}: {error}") from error
        q = q if order is None else q[:, order]
    return QuantizedTensor(matrix.format, q.contiguous(), scale.contiguous(), offset, order)


def float8(parts: Parts, name: str, form: Format, scale: str) -> Matrix:
    """Check the headers of a float8 matrix.

    Args:
        parts: the checkpoint.
        name: the matrix's module.
        form: its format.
        scale: the last part of the name of its factors, one for each tile.

    Raises:
        ModelLoadError: if a tensor is missing, or has the wrong shape or dtype.
    """
    shape = parts.check(name, "weight", (None, None), FP8)
    tiles = form.tiles(*shape)
    parts.check_tiles(name, scale, tiles, *SCALES, torch.float8_e8m0fnu)

    def read(matrix: Matrix) -> QuantizedTensor:
        return QuantizedTensor(form, parts.read(name, "weight"), parts.read(name, scale).float().reshape(tiles))

    return Matrix(name, form, (shape[0], shape[1]), ("weight", scale), read)
