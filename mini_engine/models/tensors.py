"""Tensors that are read from their file when they are asked for, and not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from mini_engine.errors import WeightFileError


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a weight file: its shape and dtype, known from the file's header, and how to read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def read_bytes(path: Path, begin: int, end: int) -> UInt8[Tensor, " bytes"]:
    """The bytes of a file from `begin` up to `end`, in memory of their own.

    A memory map would save a copy, but it kills the process if the file shrinks, and a machine may refuse to map a file
    that is larger than its memory.

    Raises:
        WeightFileError: the file cannot be read, or has become shorter since its header was read.
    """
    raw = torch.empty(end - begin, dtype=torch.uint8)
    try:
        with path.open("rb") as file:
            file.seek(begin)
            length = file.readinto(raw.numpy().data)
    except OSError as error:
        raise WeightFileError(f"{path} cannot be read ({error.strerror}): check that it is still there.") from error
    if length != len(raw):
        raise WeightFileError(f"{path} became shorter while it was read: write it again.")
    return raw


class LazyTensors(Mapping[str, Tensor]):
    """A mapping from names to tensors that holds none of them: each look-up reads the file again.

    A model that copies one tensor at a time into its parameters therefore never needs a second copy of itself.
    """

    def __init__(self, entries: Mapping[str, LazyTensor]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, name: str) -> Tensor:
        return self.entries[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # the inherited one would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the largest tensor: that of the model, where norms and small tensors may differ."""
        return max(self.entries.values(), key=lambda entry: prod(entry.shape)).dtype

    @property
    def num_elements(self) -> int:
        """Numbers held by all tensors together; reads nothing."""
        return sum(prod(entry.shape) for entry in self.entries.values())
