"""Rotary position embedding (RoPE): rotate each pair of a head's components by an angle proportional to the position.

RoFormer (Su et al. 2021, section 3.2.2) defines the rotation, Chen et al. 2023 the linear scaling of positions, and
the Llama 3.1 release the scaling of the slow pairs only. Explained in chapter 01.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.ops import with_kernel


@dataclass(frozen=True)
class Linear:
    """Divide every frequency by `factor`: position p rotates as far as p / factor did before (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Divide the frequencies of slow pairs by `factor`, keep fast pairs, and blend in between (Llama 3.1).

    A pair is slow if it makes fewer than `low_freq_factor` turns within the model's original context
    (`original_max_position_embeddings` tokens), and fast if it makes more than `high_freq_factor` turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of a model's queries and keys.

    Attributes:
        theta: base of the frequencies; pair i of D / 2 rotates by theta ** (-2 i / D) radians per position.
        head_dim: components of a head that are rotated (D), an even number.
        scaling: how the frequencies are scaled for a longer context; None: not at all.
    """

    theta: float
    head_dim: int
    scaling: Linear | Llama3 | None = None


def inverse_frequencies(config: RopeConfig) -> Float[Tensor, " half"]:
    """Compute the radians per position of each pair, `[D/2]`, float32, fastest pair first."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.theta**exponents
    match config.scaling:
        case None:
            return frequencies
        case Linear(factor):
            return frequencies / factor
        case Llama3(factor, low, high, original_length):
            turns = original_length * frequencies / (2 * math.pi)
            keep = ((turns - low) / (high - low)).clamp(0, 1)  # 0: a slow pair, divided; 1: a fast pair, kept
            return (1 - keep) * frequencies / factor + keep * frequencies


@with_kernel
def rope_tables(
    positions: Int[Tensor, " T"], inv_freq: Float[Tensor, " half"]
) -> tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]:
    """Compute the cosine and sine of each token's angles, in the dtype of `inv_freq`.

    Args:
        positions: position of each token in its own sequence, `[T]`, in any order.
        inv_freq: radians per position of each pair, `[D/2]`, from `inverse_frequencies`.

    Returns:
        (cos, sin), each `[T, D/2]`. Every layer of a model shares them: compute them once per step.
    """
    angles = positions[:, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(
    x: Float[Tensor, "T H D"],
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "T H D"]:
    """Rotate pair i of every head by its angle: (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        x: queries or keys, `[T, H, D]`.
        cos: cosines from `rope_tables`, `[T, D/2]`.
        sin: sines from `rope_tables`, `[T, D/2]`.
        interleaved: pair i is (x[2i], x[2i+1]) as in RoFormer, GPT-J and GGUF's Llama files; otherwise it is
            (x[i], x[i + D/2]) as in GPT-NeoX and transformers' Llama ("half-split"). Weights fit only one of the two.

    Returns:
        `[T, H, D]` in the dtype of x, computed in float32 (float64 for float64).
    """
    cos, sin, out = cos[:, None, :], sin[:, None, :], torch.empty_like(x)
    halves = [(t[..., 0::2], t[..., 1::2]) if interleaved else t.chunk(2, dim=-1) for t in (x, out)]
    (a, b), (out_a, out_b) = halves
    # The tables are float32, so the products are too; each sum is rounded to the dtype of x where it is written.
    torch.sub(a * cos, b * sin, out=out_a)
    torch.add(b * cos, a * sin, out=out_b)
    return out
