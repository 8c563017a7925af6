"""Measuring memory: the tensors that a function makes, and how many bytes of them are alive at once."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors that a call made; its inputs are not counted.

    Attributes:
        peak: the most that was alive at once.
        largest: the largest single one.
    """

    peak: int
    largest: int


def measure_memory(fn: Callable[[], object]) -> Memory:
    """Count the tensors that `fn()` makes, on any device, "meta" included, where shapes take no memory and no time.

    What a kernel allocates for itself and frees before it returns is not seen.
    """
    with _Allocations() as allocations:
        fn()
    return Memory(allocations.peak, allocations.largest)


class _Allocations(TorchDispatchMode):
    """Tracks the results of every operator; views and in-place results use a storage that is tracked already."""

    def __init__(self) -> None:
        super().__init__()
        self._alive = self.peak = self.largest = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known and not any(storage is known for known in given):
                    self._made(storage)
        return results

    def _made(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self._alive += size
        self.peak, self.largest = max(self.peak, self._alive), max(self.largest, size)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self._alive -= size
