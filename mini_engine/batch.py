"""What one step of the engine computes, described once for every attention method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention computes. Known when the model is built, and fixed from then on.

    Attributes:
        layer: index of the layer in the model.
        kv_layer: index of the layer of the KV cache that it reads and writes.
        num_qo_heads: query (and output) heads.
        num_kv_heads: key and value heads; divides `num_qo_heads` (grouped-query attention).
        head_dim: size of one head.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window: number of keys that a query may see, its own included; None sees all before it.
        softcap: if set, a score s becomes `softcap * tanh(s / softcap)` (Gemma 2).
        alibi_slopes: one slope for each query head; adds `-slope * distance` to the scores (Press et al. 2021).
    """

    layer: int
    kv_layer: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


class Attend(Protocol):
    """What a model calls for attention: the only thing it knows about keys and values."""

    def __call__(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "T Hq D"],
        k: Float[Tensor, "T Hk D"],
        v: Float[Tensor, "T Hk D"],
    ) -> Float[Tensor, "T Hq D"]: ...
