"""Merge learned sinks into the output of attention kernels that know nothing of them, from their LSE.

A sink is one more attention state, so it does not matter which kernel computed the keys, in how many splits, or on how
many levels of a cascade. Explained in chapter 15.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


def merge_sinks(out: Float[Tensor, "T Hq D"], lse: Float[Tensor, "T Hq"], sinks: Float[Tensor, " Hq"]) -> None:
    """Compute `state.merge_sinks`."""
    num_tokens, num_heads, head_dim = out.shape
    if num_tokens:
        _merge_sinks[(num_tokens, num_heads)](
            out, lse, sinks, out.stride(0), num_heads, head_dim, BLOCK=triton.next_power_of_2(head_dim), num_warps=1
        )


@no_type_check
@triton.jit
def _merge_sinks(out, lse, sinks, stride, num_heads, head_dim, BLOCK: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    place = out + token * stride + head * head_dim + index
    natural = tl.load(lse + token * num_heads + head) * 0.6931471805599453
    weight = tl.sigmoid(natural - tl.load(sinks + head).to(tl.float32))  # 0 for a token without keys, whose LSE is -inf
    value = tl.load(place, mask=index < head_dim).to(tl.float32)
    tl.store(place, tl.where(weight > 0, weight * value, 0.0), mask=index < head_dim)
