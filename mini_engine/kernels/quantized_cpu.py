"""PyTorch's kernels for quantized weights on a CPU: for a few tokens in bfloat16, where the weights' bytes limit.

They read the quantized numbers and widen them in registers, so a product takes the time of fewer bytes. With more
tokens, or in another dtype, they are slower than a matrix that is widened first (`QuantizedLinear` does that).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor

from mini_engine.models.weights import QuantizedLinear, unpack

MOST_TOKENS = 8  # with 16, both kernels take longer than a product in bfloat16
GROUPS = (32, 64, 128, 256)  # that PyTorch's INT4 kernel has


class CPUKernel:
    """Multiplies a few tokens by a quantized matrix."""

    def __init__(self, weight: QuantizedLinear, product: Callable[[Tensor], Tensor]) -> None:
        self._weight, self._product = weight, product

    def accepts(self, x: Tensor) -> bool:
        """Return whether the kernel is faster than a dense product of these tokens."""
        return x.dtype == torch.bfloat16 and len(x) <= MOST_TOKENS

    def __call__(self, x: BFloat16[Tensor, "T In"]) -> BFloat16[Tensor, "T Out"]:
        return self._product(x.contiguous())

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        """Return the matrix, its columns in the order in which they are stored."""
        return replace(self._weight.quantized(), order=None).dequantize(dtype)


def kernel_for(weight: QuantizedLinear) -> CPUKernel | None:
    """Return the kernel for a loaded matrix, or None if PyTorch has none for its format and sizes.

    The kernel's own copy of an INT4 matrix has an order that depends on the processor, so it is made here and never
    stored. The matrix itself stays for steps with more tokens.
    """
    (num_rows, columns), groups = (len(weight.numbers), weight.in_features), weight.scale.shape[1]
    scale = weight.scale.to(torch.bfloat16)
    if weight.format.kind == "int8" and groups == 1 and weight.offset is None and columns % 16 == 0:
        return CPUKernel(weight, lambda x: torch._weight_int8pack_mm(x, weight.numbers, scale[:, 0]))
    group = columns // groups
    if weight.format.kind == "int4" and group in GROUPS and columns % group == 0 and num_rows % 16 == 0:
        # The kernel computes (q - 8) * scale + offset, with q in 0..15.
        offset = torch.zeros_like(scale) if weight.offset is None else weight.offset.to(torch.bfloat16)
        pairs = torch.stack((scale, offset), dim=2).transpose(0, 1).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(weight.numbers).int() + 8, 1)
        return CPUKernel(weight, lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, pairs))
    return None
