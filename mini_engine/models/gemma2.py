"""Gemma 2 (Gemma Team 2024): four norms per layer, a window in every other layer, soft-caps on scores and logits.

Differences from Llama: embeddings are multiplied by sqrt(hidden size); a norm multiplies by 1 + w, not by w; the MLP is
GeGLU; the outputs of attention and MLP are normalized before they are added; scores are divided by
sqrt(query_pre_attn_scalar); scores and logits are soft-capped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.models.base import Stored
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import Attention, DecoderLayer, GatedMLP, ModelParts, with_prefix
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.weights import Destination, empty_weight


def norm_weight(size: int) -> nn.Parameter:
    """Create a weight for 1 + w, in float32 or wider: bfloat16 would round away most of a small w."""
    return empty_weight(size, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))


class Gemma2Layer(DecoderLayer):
    """Attention and MLP, each with a norm before it and a norm after it."""

    attention_class = Attention

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.input_norm = norm_weight(config.hidden_size)
        self.attention = self.attention_class(config, spec, parts)
        self.post_attention_norm = norm_weight(config.hidden_size)
        self.mlp_norm = norm_weight(config.hidden_size)
        self.mlp = GatedMLP(config, spec.layer, parts)
        self.post_mlp_norm = norm_weight(config.hidden_size)

    def forward(
        self, x: Float[Tensor, "T hidden"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        norm, eps = self.parts.rms_norm, self.eps
        x = x + norm(self.attention(norm(x, self.input_norm, eps), cos, sin, attend), self.post_attention_norm, eps)
        return x + norm(self.mlp(norm(x, self.mlp_norm, eps)), self.post_mlp_norm, eps)

    def destinations(self) -> dict[str, Destination]:
        return {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.post_attention_norm,
            "pre_feedforward_layernorm.weight": self.mlp_norm,
            "post_feedforward_layernorm.weight": self.post_mlp_norm,
            **with_prefix("self_attn.", self.attention.destinations()),
            **with_prefix("mlp.", self.mlp.destinations()),
        }


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Llama with Gemma 2's layers, scaled embeddings and soft-capped logits."""

    layer_class = Gemma2Layer

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        super().__init__(config, parts)
        self.norm = norm_weight(config.hidden_size)
        # The factor is rounded to the model's dtype, as it was in training.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype, device="cpu").item()

    def embed(self, token_ids: Int[Tensor, " T"]) -> Float[Tensor, "T hidden"]:
        return super().embed(token_ids) * self.embedding_scale

    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        logits = super().compute_logits(hidden)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Stored], headers: Mapping[str, Tensor] | None = None) -> None:
        """Load as in the base class, then add the 1 of 1 + w to the norms, once instead of in every step."""
        super().load_weights(tensors, headers)
        for name, weight in self.named_parameters():
            if name.endswith("norm"):
                weight.add_(1)
