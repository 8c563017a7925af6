"""The product of any number of tokens with a quantized matrix on a GPU: one dispatch by format and number of tokens.

For few tokens, the kernels of `quantized_products.py` read the few bytes of the matrix and convert them in registers.
For many, the product is bound by arithmetic, so the matrix is written as bfloat16 once, for all tokens of the step. A
matrix in FP8 with a scale for each row is multiplied in FP8 instead, whatever the number of tokens
(`fp8_products.py`). Explained in chapter 13.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.kernels import fp8_products, quantized_products
from mini_engine.kernels.quantized_products import PackedWeight, pack
from mini_engine.models.weights import QuantizedLinear


def linear(x: Float[Tensor, "T In"], weight: PackedWeight) -> Float[Tensor, "T Out"]:
    """Compute `x @ weight.T` for any number of tokens.

    Args:
        x: contiguous bfloat16.
        weight: [Out, In].
    """
    if weight.in_rows:
        product = fp8_products.multiply(fp8_products.quantize_tokens(x), weight.data, weight.scales)
        return fp8_products.apply_scales(product)
    if len(x) <= quantized_products.MOST_TOKENS:
        return quantized_products.quantized_linear(x, weight)
    return F.linear(x, quantized_products.dequantize(weight))


class GPUKernel:
    """Multiplies any number of tokens by a `QuantizedLinear`, whose numbers and scales it packs anew.

    Attributes:
        packed: the matrix as the kernels read it.
    """

    def __init__(self, weight: QuantizedLinear, packed: PackedWeight) -> None:
        self.packed = packed
        weight.numbers, weight.scale, weight.offset = nn.Buffer(packed.data), nn.Buffer(packed.scales), None

    def accepts(self, x: Tensor) -> bool:
        """Return whether the tokens are in bfloat16."""
        return x.dtype == torch.bfloat16

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        return linear(x.contiguous(), self.packed)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        """Return the matrix, its columns in the order in which they are stored."""
        return quantized_products.dequantize(self.packed).to(dtype)


def kernel_for(weight: QuantizedLinear) -> GPUKernel | None:
    """Return the kernel for a loaded matrix, or None for sizes that `pack` refuses."""
    sizes = list(weight.rows.values())
    pairs = len(sizes) == 2 and sizes[0] == sizes[1] and sizes[0] % 8 == 0  # gate and up projection
    try:
        packed = pack(replace(weight.quantized(), order=None), pairs=pairs)
    except ValueError:
        return None
    return GPUKernel(weight, packed)
