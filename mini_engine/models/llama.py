"""Llama (Touvron et al. 2023), and SmolLM2, which has the same architecture.

Each layer normalizes its input, attends, and adds the result to the residual stream; then it does the same with the
gated MLP.
"""

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
    with_prefix,
)
from mini_engine.rope import rope_tables


class LlamaLayer(DecoderLayer):
    """Attention and MLP, each on a normalized input and added to the residual stream (pre-norm, Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        self.parts, self.eps = parts, config.norm_eps
        self.input_norm = empty_weight(config.hidden_size)
        self.attention = Attention(config, spec, parts)
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


class LlamaForCausalLM(CausalLM):
    """Embeddings, layers and final norm; the base class has the LM head."""

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        scale = config.head_dim**-0.5
        specs = tuple(attention_spec(config, layer, scale) for layer in range(config.num_hidden_layers))
        super().__init__(config, parts, specs)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", rotary_frequencies(config), persistent=False)
        self.layers = nn.ModuleList(LlamaLayer(config, spec, parts) for spec in specs)
        self.norm = empty_weight(config.hidden_size)

    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        x = F.embedding(token_ids, self.embed_tokens)
        cos, sin = rope_tables(positions, self.inv_freq)  # once for all layers
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.parts.rms_norm(x, self.norm, self.config.norm_eps)
