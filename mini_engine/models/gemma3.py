"""Gemma 3 (Gemma Team 2025), without images: Gemma 2 with QK-norm in place of soft-caps, and two rotations.

Five of six layers have a window. They rotate queries and keys by the frequencies of a small base. Every sixth layer
sees all keys, and the base of its frequencies is 100 times as large, because it has to tell apart more positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.config import ModelConfig
from mini_engine.models.gemma2 import Gemma2ForCausalLM, Gemma2Layer, norm_weight
from mini_engine.models.layers import ModelParts
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.rope import rope_tables


class Gemma3Attention(Qwen3Attention):
    """Qwen3's attention, with norms that multiply by 1 + w."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.q_norm, self.k_norm = norm_weight(spec.head_dim), norm_weight(spec.head_dim)


class Gemma3Layer(Gemma2Layer):
    """Gemma 2's layer around Gemma 3's attention."""

    attention_class = Gemma3Attention


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with Gemma 3's layers, and another rotation in layers with a window."""

    layer_class = Gemma3Layer

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        super().__init__(config, parts)
        assert config.rope_local is not None, "this architecture has another rotation in layers with a window"
        self.local_inv_freq = self.frequencies(config.rope_local)

    def rotations(
        self, positions: Int[Tensor, " T"]
    ) -> Sequence[tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]]:
        local, everywhere = (rope_tables(positions, own) for own in (self.local_inv_freq, self.inv_freq))
        return [local if kind == "sliding_attention" else everywhere for kind in self.config.layer_types]
