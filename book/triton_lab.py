"""Triton for notebooks and graders. Without a GPU its interpreter runs the programs of a kernel one after the other.

Import `triton` and `tl` from here: Triton reads the variable that selects the interpreter when it is first imported.
"""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("Triton is not installed. It comes with `pip install -r requirements.txt`, on Linux.") from error

__all__ = ["DEVICE", "Launch", "Watch", "tl", "triton", "watch"]

# Operators that allocate or make a view: they launch nothing.
NO_KERNEL = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


@dataclass
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: its name.
        programs: programs of the grid.
        bytes_read: that its programs load, counted in the interpreter only. An element that two programs load counts
            twice, and an atomic operation reads and writes. Masked elements do not count.
        bytes_written: that they store.
        most_read: bytes that one program loads, the one that loads the most.
    """

    kernel: str
    programs: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    most_read: int = 0


@dataclass
class Watch:
    """What ran inside `watch()`.

    Attributes:
        launches: of Triton kernels, in order.
        operators: names of PyTorch's operators that compute something, each at least one kernel.
    """

    launches: list[Launch] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)

    @property
    def num_kernels(self) -> int:
        return len(self.launches) + len(self.operators)

    @property
    def bytes_read(self) -> int:
        return sum(launch.bytes_read for launch in self.launches)

    @property
    def bytes_written(self) -> int:
        return sum(launch.bytes_written for launch in self.launches)


@contextmanager
def watch(seed: int | None = None) -> Iterator[Watch]:
    """Count what is launched, and in the interpreter the bytes that programs load and store.

    Args:
        seed: run the programs of each grid in a random order (in the interpreter only; a GPU has an order of its own).
    """
    found = Watch()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_Operators(found))
        if DEVICE == "cpu":
            for patched in _interpreter_patches(found, None if seed is None else random.Random(seed)):
                enter(patched)
        else:
            enter(_compiled_patch(found))
        yield found


class _Operators(TorchDispatchMode):
    def __init__(self, found: Watch) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_KERNEL:
            self.found.operators.append(name)
        return func(*args, **(kwargs or {}))


def _compiled_patch(found: Watch) -> Any:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def counted(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            found.launches.append(Launch(self.fn.__name__))
        with _disable_current_modes():
            return run(self, *args, grid=grid, warmup=warmup, **options)

    return patch.object(JITFunction, "run", counted)


def _interpreter_patches(found: Watch, order: random.Random | None) -> Iterator[Any]:
    from triton.runtime import interpreter

    builder, call = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    places: list[tuple[int, int, int]] = []
    read_before = 0  # what the programs before this one have read

    def launch(self: Any, *args: Any, **options: Any) -> None:
        found.launches.append(Launch(self.fn.__name__))
        with _disable_current_modes():  # the interpreter copies its arguments
            call(self, *args, **options)

    def set_grid_dim(nx: int, ny: int, nz: int) -> None:
        set_dim(nx, ny, nz)
        places[:] = [(x, y, z) for x in range(nx) for y in range(ny) for z in range(nz)]
        found.launches[-1].programs = len(places)
        if order:
            order.shuffle(places)
        places.reverse()

    def set_grid_idx(x: int, y: int, z: int) -> None:
        nonlocal read_before
        read_before = found.launches[-1].bytes_read
        set_idx(*places.pop())

    def counting(name: str, reads: bool, writes: bool, mask_at: int) -> Any:
        run: Callable[..., Any] = getattr(builder, name)

        def counted(*args: Any) -> Any:
            pointers, mask = args[1 if name == "create_atomic_rmw" else 0], args[mask_at]
            size = int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            current = found.launches[-1]
            current.bytes_read += size * reads
            current.bytes_written += size * writes
            current.most_read = max(current.most_read, current.bytes_read - read_before)
            return run(*args)

        return patch.object(builder, name, counted)

    yield patch.object(interpreter.GridExecutor, "__call__", launch)
    yield patch.object(builder, "set_grid_dim", set_grid_dim)
    yield patch.object(builder, "set_grid_idx", set_grid_idx)
    yield counting("create_masked_load", True, False, 1)
    yield counting("create_masked_store", False, True, 2)
    yield counting("create_atomic_rmw", True, True, 3)
