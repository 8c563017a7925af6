"""SwiGLU (Shazeer 2020) in one launch, for a product of tokens that have not been normalized.

The norm before the product multiplies a token by 1 / rms, a factor that can be applied to the product instead
(chapter 11 explains why). So a program here reads the token again, computes the factor, and multiplies gate and
up by it. A separate launch for the norm would write the normalized tokens, and the product would read them again.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_wait

from mini_engine.kernels.rotate_and_append import norm_factor

# Outputs of one program: with many tokens more of them, because each program computes the token's norm.
BLOCK, BLOCK_OF_MANY = 1024, 4096
MANY_TOKENS = 1024


def swiglu(
    gate_up: Float[Tensor, "T I2"], tokens: Float[Tensor, "T hidden"], eps: float, *, pdl: bool = False
) -> Float[Tensor, "T I"]:
    """Compute `silu(gate / rms) * (up / rms)`, with the rms of each token.

    Args:
        gate_up: contiguous; for each token the gate's I numbers, then the up projection's.
        tokens: contiguous, not normalized.
        eps: epsilon of the norm.
        pdl: launch before the previous kernel has ended; needs a GPU of compute capability 9.0 or higher.
    """
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    block = BLOCK if num_tokens < MANY_TOKENS else BLOCK_OF_MANY
    _swiglu_kernel[(num_tokens, triton.cdiv(size, block))](
        gate_up,
        tokens,
        eps,
        out,
        size,
        HIDDEN=tokens.shape[1],
        BLOCK=block,
        PDL=pdl,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def swiglu_reference(
    gate_up: Float[Tensor, "T I2"], tokens: Float[Tensor, "T hidden"], eps: float
) -> Float[Tensor, "T I"]:
    """Compute `swiglu` in PyTorch."""
    factor = torch.rsqrt(tokens.float().square().mean(1, keepdim=True) + eps)
    gate, up = (gate_up * factor).chunk(2, dim=1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@no_type_check
@triton.jit
def _swiglu_kernel(gate_up, tokens, eps, out, size, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * size + column, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (token * 2 + 1) * size + column, mask=column < size, other=0.0).to(tl.float32)
    factor = norm_factor(tokens + token * HIDDEN, eps, HIDDEN)
    gate, up = gate * factor, up * factor
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + token * size + column, result.to(out.dtype.element_ty), mask=column < size)
