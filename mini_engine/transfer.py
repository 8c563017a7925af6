"""What a step moves between the host and the device: small arrays in one copy, and the sampled tokens."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from mini_engine.ops import with_kernel


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Move many small arrays to a device in one copy, because each copy to a GPU costs about 10 µs, however small.

    Args:
        arrays: name to array; kept alive by the tensors returned when `device` is the CPU.
        device: the destination.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return unpack(pack(arrays, pin_memory=True).to(device, non_blocking=True), arrays)


def start_copy(tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Start copying a tensor of any size to pinned memory of the host; return it if it is on the host already."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@with_kernel
def copy_pinned(destination: Shaped[Tensor, "*shape"], source: Shaped[Tensor, "*shape"]) -> None:
    """Start copying a few kilobytes from pinned host memory to the GPU, or back.

    Args:
        destination: contiguous, in the dtype of `source`.
        source: contiguous. Pinned memory must stay in use until the copy has ended.
    """
    destination.copy_(source, non_blocking=True)


@with_kernel
def feed_tokens(
    token_ids: Int[Tensor, " T"], token_source: Int[Tensor, " T"], last_token: Int[Tensor, " rows"]
) -> Int[Tensor, " T"]:
    """Return the last token of the row that each token has as its source, or its token id if it has none (-1).

    Args:
        token_ids: token ids that the host knows.
        token_source: row whose last token is wanted instead, or -1.
        last_token: last token of every row.
    """
    # An index of -1 reads the last entry, which is then discarded.
    return torch.where(token_source >= 0, last_token[token_source], token_ids)


@with_kernel
def keep_tokens(
    tokens: Int[Tensor, " R"], rows: Int[Tensor, " R"], last_token: Int[Tensor, " rows"], host: Int[Tensor, " R"]
) -> None:
    """Write a step's sampled tokens to `last_token`, and start copying them to the host.

    Args:
        tokens: the tokens.
        rows: the row of each token, all different.
        last_token: last token of every row; changed in place.
        host: receives the tokens: pinned memory for tokens on a GPU, else `tokens` itself.
    """
    last_token.index_copy_(0, rows, tokens)
    if host is not tokens:
        host.copy_(tokens, non_blocking=True)


def borrow(tensor: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return a view of a tensor on a GPU that does not keep its memory allocated; something else has to."""
    storage = tensor.untyped_storage()
    interface = {"shape": (storage.nbytes(),), "typestr": "|u1", "data": (storage.data_ptr(), False), "version": 2}
    memory = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def capturing() -> Iterator[None]:
    """Keep the garbage collector from running while a CUDA graph is captured.

    It would free graphs of engines that are gone, which CUDA refuses during a capture and then refuses the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def pack(arrays: dict[str, np.ndarray], pin_memory: bool) -> UInt8[Tensor, " bytes"]:
    """Concatenate arrays, each starting at a multiple of 8 bytes.

    Args:
        arrays: name to array, of any shapes.
        pin_memory: use memory that the GPU can read while the host goes on.
    """
    packed = torch.empty(sum(map(_padded, arrays.values())), dtype=torch.uint8, pin_memory=pin_memory)
    # NumPy copies in this thread. torch would divide a large copy among threads on all cores and wait for each of them,
    # for milliseconds if another process has one of the cores.
    memory, start = packed.numpy(), 0
    for array in arrays.values():
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array)
    return packed


def unpack(packed: UInt8[Tensor, " bytes"], arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Return views of the arrays that `pack` concatenated, on whatever device they are now.

    Args:
        packed: the result of `pack`, moved.
        arrays: the packed arrays, for their shapes and dtypes.
    """
    views, start = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views[name] = packed[start : start + array.nbytes].view(dtype).view(array.shape)
        start += _padded(array)
    return views


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // 8) * 8
