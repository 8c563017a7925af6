"""Matrix products of up to 32 tokens with the bits of cuBLAS's products without split-K, which more tokens take.

With few tokens, cuBLAS's kernels read a weight slowly unless they split its columns, and they start only when the
previous kernel has ended. These start earlier, and keep the order of the sums. The kernel is in `ordered_products.cu`.
Explained in chapter 14.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.kernels.nvcc import load_kernel

MOST_TOKENS = 32
COLUMNS = 64  # a stage of the kernel's ring has so many; `suits` requires whole stages
FEW_WARPS = 256  # with fewer warps of 16 rows, each has 8 rows: about two for each SM


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "out")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "columns")),
    ]


def suits(weight: Float[Tensor, "N K"]) -> bool:
    """Return whether the kernel multiplies by a matrix."""
    return weight.shape[0] % 8 == 0 and weight.shape[1] % COLUMNS == 0


def project(x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"]) -> Float[Tensor, "T N"]:
    """Compute `x @ weight.T`.

    Args:
        x: contiguous, in bfloat16, at most MOST_TOKENS tokens.
        weight: contiguous; see `suits`.
    """
    out = x.new_empty(len(x), len(weight))
    _launch(x, weight, None, out)
    return out


def add_product(
    residual: Float[Tensor, "T N"], x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"]
) -> Float[Tensor, "T N"]:
    """Add `x @ weight.T` to the contiguous `residual` in place, and return it; the sum is rounded once."""
    _launch(x, weight, residual, residual)
    return residual


def _launch(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor) -> None:
    num_rows, num_columns = weight.shape
    rows = 16 if num_rows % 16 == 0 and num_rows >= 16 * FEW_WARPS else 8
    arguments = _Arguments(
        x.data_ptr(), weight.data_ptr(), None if residual is None else residual.data_ptr(), out.data_ptr(), len(x),
        num_rows, num_columns,
    )  # fmt: skip
    stream = torch.cuda.current_stream(x.device).cuda_stream
    if error := _library().launch_ordered_product(ctypes.byref(arguments), rows, ctypes.c_void_p(stream)):
        raise RuntimeError(f"launching the ordered product failed with CUDA error {error}")


@cache  # a step launches four products a layer
def _library() -> ctypes.CDLL:
    return load_kernel(Path(__file__).with_suffix(".cu"), ())
