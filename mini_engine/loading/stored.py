"""The tensors of a checkpoint, each read from its file when it is looked up."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class StoredTensors(UserDict[str, Any]):
    """The tensors of a checkpoint; each look-up reads one from its file, and nothing is kept.

    So a model that copies one tensor at a time into its parameters never needs memory for a second copy of the model.
    A value is a Tensor, or a `QuantizedTensor` for a matrix that the checkpoint stores in a quantized format.

    Attributes:
        headers: for each name, a tensor on the meta device with the shape that the file's header states, and with its
            dtype (float32 for a QuantizedTensor, and for GGUF, whose tensors are dequantized when they are read).
    """

    def __init__(self, headers: Mapping[str, Tensor], read: Callable[[str], Any]) -> None:
        super().__init__(headers)
        self.headers, self._read = headers, read

    def __getitem__(self, name: str) -> Any:
        return self._read(name)
