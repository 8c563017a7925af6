"""Products with quantized weights on a CPU in bfloat16: PyTorch's kernels for few tokens, dense products for many.

PyTorch's kernels read the quantized numbers and widen them in registers, so with one token a product takes the time of
fewer bytes. With many tokens they are slower than a dense product, and a matrix that is widened first is faster. Where
that begins was measured on an AMD EPYC with 2 threads, for the matrices of SmolLM2-135M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor
from torch.nn import functional as F

from mini_engine.models.weights import QuantizedLinear, unpack

# The most tokens for PyTorch's kernels. Widening INT8 is a single conversion; INT4 is unpacked, scaled, and shifted.
MOST_TOKENS = {"int8": 16, "int4": 128}
GROUPS = (32, 64, 128, 256)  # that PyTorch's INT4 kernel has


class CPUKernel:
    """Multiplies tokens by a quantized matrix."""

    def __init__(self, weight: QuantizedLinear, product: Callable[[Tensor], Tensor]) -> None:
        self._weight, self._product = weight, product

    def accepts(self, x: Tensor) -> bool:
        """Return whether the tokens are in bfloat16: in another dtype, PyTorch's kernels are slow."""
        return x.dtype == torch.bfloat16

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
        of_row = scale[:, 0].contiguous()

        def multiply_int8(x: Tensor) -> Tensor:
            if len(x) <= MOST_TOKENS["int8"]:
                return torch._weight_int8pack_mm(x, weight.numbers, of_row)
            return F.linear(x, weight.numbers.to(x.dtype)).mul_(of_row)  # bfloat16 holds whole numbers up to 256

        return CPUKernel(weight, multiply_int8)
    group = columns // groups
    if weight.format.kind == "int4" and group in GROUPS and columns % group == 0 and num_rows % 16 == 0:
        # The kernel computes (q - 8) * scale + offset, with q in 0..15.
        offset = torch.zeros_like(scale) if weight.offset is None else weight.offset.to(torch.bfloat16)
        pairs = torch.stack((scale, offset), dim=2).transpose(0, 1).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack(weight.numbers).int() + 8, 1)

        def multiply_int4(x: Tensor) -> Tensor:
            if len(x) <= MOST_TOKENS["int4"]:
                return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, pairs)
            return F.linear(x, kernel.dense(x.dtype))

        kernel = CPUKernel(weight, multiply_int4)
        return kernel
    return None
