"""Copy a few kilobytes between pinned host memory and the GPU by a kernel.

The GPU's copy engine is a separate unit, so the GPU waits between a kernel and a copy, and again between the copy and
the next kernel. A kernel can read and write pinned memory by itself, and follows the previous kernel as any other does.
Explained in chapter 12.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Int, Shaped
from torch import Tensor

BLOCK = 512  # numbers of one program


def copy_small(destination: Shaped[Tensor, "*shape"], source: Shaped[Tensor, "*shape"]) -> None:
    """Copy on the current stream, without waiting.

    Args:
        destination: contiguous, on the GPU or in pinned memory.
        source: contiguous, in pinned memory or on the GPU, in the dtype of `destination`. Pinned memory must stay in
            use until the copy has ended, because PyTorch's allocator does not know of the copy.
    """
    size = source.numel()
    _copy[(triton.cdiv(size, BLOCK),)](destination, source, size, BLOCK=BLOCK)


def keep_tokens(
    tokens: Int[Tensor, " R"], rows: Int[Tensor, " R"], last_token: Int[Tensor, " rows"], host: Int[Tensor, " R"]
) -> None:
    """Write tokens to `last_token` and to pinned memory, in one launch; see `transfer.keep_tokens`."""
    size = len(tokens)
    _keep[(triton.cdiv(size, BLOCK),)](tokens, rows, last_token, host, size, BLOCK=BLOCK)


@no_type_check
@triton.jit(do_not_specialize=["size"])  # otherwise multiples of 16 are compiled anew, when a step first has one
def _copy(destination, source, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(destination + index, tl.load(source + index, mask=index < size), mask=index < size)


@no_type_check
@triton.jit(do_not_specialize=["size"])
def _keep(tokens, rows, last_token, host, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < size
    token = tl.load(tokens + index, mask=exists)
    tl.store(last_token + tl.load(rows + index, mask=exists), token, mask=exists)
    tl.store(host + index, token, mask=exists)
