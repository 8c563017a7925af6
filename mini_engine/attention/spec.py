"""The attention of one layer, and the interface through which a model calls it."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.rope import RopeConfig


@dataclass(frozen=True)
class MLASizes:
    """Sizes of multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Attributes:
        kv_lora_rank: numbers in the latent of a token, from which each head computes its key and its value.
        qk_nope_head_dim: size of the key of a head that comes from the latent.
        qk_rope_head_dim: size of the rotated key, which all heads share.
        v_head_dim: size of a value.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer, fixed when the model is built.

    Attributes:
        layer: index of the layer in the model and in the KV cache.
        num_qo_heads: query (and output) heads.
        num_kv_heads: key and value heads; divides `num_qo_heads` (grouped-query attention).
        head_dim: size of one head of queries and keys.
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
        mla: sizes of multi-head latent attention; None: the cache stores a key and a value for each KV head.
        key_budget: most keys that a decode attends to in each KV head, in whole pages (`page_selection`); None: all.
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
    mla: MLASizes | None = None
    key_budget: int | None = None

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def entry(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and head size of the two tensors that a token stores in the KV cache.

        They are its keys and values or, with MLA, its latent and its rotated key, which all heads share.
        """
        if self.mla is not None:
            return (1, self.mla.kv_lora_rank), (1, self.mla.qk_rope_head_dim)
        return (self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim)

    @property
    def entry_size(self) -> int:
        """Numbers that a token stores in the KV cache."""
        return sum(heads * size for heads, size in self.entry)

    @property
    def value_dim(self) -> int:
        """Size of one head of values, and of the output."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def kind(self) -> "AttentionSpec":
        """The spec without its place in the model: layers of one kind share a plan."""
        return replace(self, layer=0)


@runtime_checkable
class Attend(Protocol):
    """Store what a step's tokens keep in one layer, and return the attention of its queries.

    This is all that a model knows about the KV cache. Every `AttentionBackend` is an `Attend`.

    Args:
        layer: index of the layer in the model and in the KV cache.
        q: [T, Hq, D] queries of all sequences, laid end to end.
        entry: the two tensors of `AttentionSpec.entry`, one row for each token: keys and values, [T, Hk, D] each, or
            with MLA, latents and rotated keys, [T, 1, kv_lora_rank] and [T, 1, qk_rope_head_dim].

    Returns:
        [T, Hq, Dv] for each query, the attention over the keys of its own sequence that it may see.
    """

    def __call__(
        self, layer: int, q: Float[Tensor, "T Hq D"], *entry: Float[Tensor, "T _ _"]
    ) -> Float[Tensor, "T Hq Dv"]: ...
