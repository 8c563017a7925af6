"""Qwen3 (Yang et al. 2025): Llama with a norm on each head of the queries and keys (QK-norm, Dehghani et al. 2023)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import Attention, ModelParts
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer
from mini_engine.models.weights import Destination, empty_weight


class Qwen3Attention(Attention):
    """Llama's attention with each head of queries and keys normalized before it is rotated."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.eps = config.norm_eps
        self.q_norm, self.k_norm = empty_weight(spec.head_dim), empty_weight(spec.head_dim)

    def prepare(self, q_and_k: Float[Tensor, "T QK D"]) -> Float[Tensor, "T QK D"]:
        return self.parts.qk_norm(q_and_k, self.q_norm, self.k_norm, self.spec.num_qo_heads, self.eps)

    def destinations(self) -> dict[str, Destination]:
        return {**super().destinations(), "q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}


class Qwen3Layer(LlamaLayer):
    """Llama's layer around Qwen3's attention."""

    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with Qwen3's layers."""

    layer_class = Qwen3Layer
