"""Rotary position embedding (RoPE): rotate each pair of a head's components by an angle proportional to the position.

RoFormer (Su et al. 2021, section 3.2.2) defines the rotation, Chen et al. 2023 the linear scaling of positions, and
the Llama 3.1 release and YaRN (Peng et al. 2023) the scaling of the slow pairs only. Explained in chapter 01.
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
class Yarn:
    """Divide the frequencies of slow pairs by `factor`, as `Llama3` does, and sharpen the softmax (Peng et al. 2023).

    A pair is slow if it makes fewer than `beta_slow` turns within the model's original context, and fast if it makes
    more than `beta_fast` turns. The pairs between them are blended by their index.

    Attributes:
        factor: the context is this many times as long as the original one.
        original_max_position_embeddings: tokens of the original context.
        beta_fast: see above.
        beta_slow: see above.
        mscale: DeepSeek's coefficient of the length of rotated vectors; None: 1.
        mscale_all_dim: DeepSeek's coefficient of the length of whole queries and keys; None: they keep their length.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def magnitude(self, mscale: float) -> float:
        """Return the factor by which YaRN lengthens both queries and keys (section 3.4)."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


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
    scaling: Linear | Llama3 | Yarn | None = None

    @property
    def length_factor(self) -> float:
        """Factor on rotated vectors, 1 without YaRN. The coefficients of DeepSeek-V2 are equal, so it is 1 there."""
        yarn = self.scaling
        if not isinstance(yarn, Yarn):
            return 1.0
        if yarn.mscale is None or yarn.mscale_all_dim is None:
            return yarn.magnitude(1.0)
        return yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """Factor on the scores, 1 unless YaRN lengthens whole queries and keys."""
        yarn = self.scaling
        if not isinstance(yarn, Yarn) or yarn.mscale_all_dim is None:
            return 1.0
        return yarn.magnitude(yarn.mscale_all_dim) ** 2


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
        case Yarn(factor, original_length, fast, slow):
            pairs = config.head_dim // 2
            # The pairs that make that many turns, as real numbers.
            first, last = (
                pairs * math.log(original_length / (2 * math.pi * turns), config.theta) for turns in (fast, slow)
            )
            first, last = max(math.floor(first), 0), min(math.ceil(last), config.head_dim - 1)
            slowness = ((torch.arange(pairs) - first) / max(last - first, 0.001)).clamp(0, 1)
            return slowness * frequencies / factor + (1 - slowness) * frequencies


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
