"""Qwen3 (Yang et al. 2025): Llama with a norm on every query and key head (QK-norm, Dehghani et al. 2023)."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import (
    Attention,
    DecoderLayer,
    GatedMLP,
    ModelParts,
    attention_spec,
    empty_weight,
    rotary_frequencies,
    split_qkv,
    with_prefix,
)
from mini_engine.models.linear import linear
from mini_engine.rope import rope_tables


class Qwen3Attention(Attention):
    """As in Llama, but each head of queries and keys is normalized before it is rotated."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.eps = config.norm_eps
        self.q_norm = empty_weight(spec.head_dim)
        self.k_norm = empty_weight(spec.head_dim)

    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        attend: Attend,
    ) -> Float[Tensor, "T hidden"]:
        spec = self.spec
        q_and_k, v = split_qkv(linear(x, self.qkv, self.qkv_bias), spec)
        q_and_k = self.parts.qk_norm(q_and_k, self.q_norm, self.k_norm, spec.num_qo_heads, self.eps)
        q, k = self.parts.apply_rope(q_and_k, cos, sin).split((spec.num_qo_heads, spec.num_kv_heads), dim=1)
        return linear(attend(spec.layer, q, k, v).flatten(1), self.o, self.o_bias)

    def destinations(self) -> dict[str, Tensor]:
        return {**super().destinations(), "q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm}


class Qwen3Layer(DecoderLayer):
    """Llama's layer around Qwen3's attention."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        self.parts, self.eps = parts, config.norm_eps
        self.input_norm = empty_weight(config.hidden_size)
        self.attention = Qwen3Attention(config, spec, parts)
        self.mlp_norm = empty_weight(config.hidden_size)
        self.mlp = GatedMLP(config, parts)

    def forward(
        self, x: Float[Tensor, "T hidden"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        x = x + self.attention(self.parts.rms_norm(x, self.input_norm, self.eps), cos, sin, attend)
        return x + self.mlp(self.parts.rms_norm(x, self.mlp_norm, self.eps))

    def destinations(self) -> dict[str, Tensor]:
        return {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            **with_prefix("self_attn.", self.attention.destinations()),
            **with_prefix("mlp.", self.mlp.destinations()),
        }


class Qwen3ForCausalLM(CausalLM):
    """Embeddings, layers and final norm; the base class has the LM head."""

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        scale = config.head_dim**-0.5
        specs = tuple(attention_spec(config, layer, scale) for layer in range(config.num_hidden_layers))
        super().__init__(config, parts, specs)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)
        self.layers = nn.ModuleList(Qwen3Layer(config, spec, parts) for spec in specs)
        self.norm = empty_weight(config.hidden_size)

    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        x = F.embedding(token_ids, self.embed_tokens)
        cos, sin = rope_tables(positions, self.inv_freq)  # once for all layers
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.parts.rms_norm(x, self.norm, self.config.norm_eps)
