"""The attention of one layer, and the interface through which a model calls it."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.rope import RopeConfig


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer, fixed when the model is built.

    Attributes:
        layer: index of the layer in the model and in the KV cache.
        num_qo_heads: query (and output) heads.
        num_kv_heads: key and value heads; divides `num_qo_heads` (grouped-query attention).
        head_dim: size of one head.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window: number of keys that a query may see, its own included; None: no limit.
        softcap: if set, a score s becomes `softcap * tanh(s / softcap)` (Gemma 2).
        alibi_slopes: one slope for each query head; adds `-slope * distance` to the scores (Press et al. 2021).
        rope: rotary embedding that the model has already applied to queries and keys; a backend that moves keys to
            other positions needs it to rotate them again. None: no rotary embedding, or an unknown one.
        kv_dtype: dtype in which keys and values are stored; None: the model's.
        kv_scales: (k, v): keys and values are divided by these before they are rounded to `kv_dtype`, and multiplied by
            them when they are read; None: 1 and 1.
        has_sinks: whether each query head has a learned sink (`state.with_sinks`). The sinks are weights of the model,
            `LanguageModel.sinks`, and not part of the spec.
    """

    layer: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    rope: RopeConfig | None = None
    kv_dtype: torch.dtype | None = None
    kv_scales: tuple[float, float] | None = None
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def kind(self) -> "AttentionSpec":
        """The spec without its place in the model: layers of one kind share a plan."""
        return replace(self, layer=0)


@runtime_checkable
class Attend(Protocol):
    """Store a step's keys and values of one layer, and return the attention of its queries.

    This is all that a model knows about keys and values. Every `AttentionBackend` is an `Attend`.

    Args:
        layer: index of the layer in the model and in the KV cache.
        q: [T, Hq, D] queries of all sequences, laid end to end.
        k: [T, Hk, D] their keys.
        v: [T, Hk, D] their values.

    Returns:
        [T, Hq, D] for each query, the attention over the keys of its own sequence that it may see.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "T Hq D"],
        k: Float[Tensor, "T Hk D"],
        v: Float[Tensor, "T Hk D"],
    ) -> Float[Tensor, "T Hq D"]: ...
