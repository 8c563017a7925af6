"""The start of a step: the token ids in one launch, and the cosines and sines of the rotation in another.

In a captured step of few requests, each launch that is saved counts. Explained in chapter 12.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

BLOCK = 256


def feed_tokens(
    token_ids: Int[Tensor, " T"], token_source: Int[Tensor, " T"], last_token: Int[Tensor, " rows"]
) -> Int[Tensor, " T"]:
    """Compute `transfer.feed_tokens`."""
    out = torch.empty_like(token_ids)
    size = len(token_ids)
    _feed_tokens[(triton.cdiv(size, BLOCK),)](token_ids, token_source, last_token, out, size, BLOCK=BLOCK)
    return out


def rope_tables(
    positions: Int[Tensor, " T"], inv_freq: Float[Tensor, " half"]
) -> tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]:
    """Compute `rope.rope_tables` in float32."""
    cos, sin = (inv_freq.new_empty(len(positions), len(inv_freq)) for _ in range(2))
    size = cos.numel()
    _rope_tables[(triton.cdiv(size, BLOCK),)](positions, inv_freq, cos, sin, size, HALF=len(inv_freq), BLOCK=BLOCK)
    return cos, sin


@no_type_check
@triton.jit(do_not_specialize=["size"])  # otherwise multiples of 16 are compiled anew, when a step first has one
def _feed_tokens(token_ids, token_source, last_token, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < size
    source = tl.load(token_source + index, mask=exists, other=-1)
    token = tl.load(token_ids + index, mask=exists)
    sampled = tl.load(last_token + source, mask=source >= 0, other=0)
    tl.store(out + index, tl.where(source >= 0, sampled, token), mask=exists)


@no_type_check
@triton.jit
def _rope_tables(positions, inv_freq, cos, sin, size, HALF: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < size
    position = tl.load(positions + index // HALF, mask=exists, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + index % HALF)
    tl.store(cos + index, tl.cos(angle), mask=exists)
    tl.store(sin + index, tl.sin(angle), mask=exists)
