"""DeepSeek-V2 (DeepSeek-AI 2024): multi-head latent attention, a mixture of experts, and rotations scaled by YaRN."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.mla import UpProjections
from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import DecoderLayer, ModelParts
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer
from mini_engine.models.mla import LatentAttention
from mini_engine.models.moe import MoELayer, moe_destinations
from mini_engine.models.weights import Destination


class DeepseekV2Layer(LlamaLayer):
    """Llama's layer around latent attention."""

    attention_class = LatentAttention  # type: ignore[assignment]  # `decoder_layer` calls it in the same way


class DeepseekV2MoELayer(MoELayer):
    """A layer with latent attention and a mixture of experts."""

    attention_class = LatentAttention  # type: ignore[assignment]


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Llama with DeepSeek-V2's layers, of which the first few are dense."""

    def build_layer(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> DecoderLayer:
        is_sparse = config.moe is not None and spec.layer in config.moe.sparse_layers
        return (DeepseekV2MoELayer if is_sparse else DeepseekV2Layer)(config, spec, parts)

    def destinations_of(self, names: Container[str]) -> dict[str, Destination]:
        return moe_destinations(self, names)

    @property
    def up_projections(self) -> Mapping[int, UpProjections]:
        attentions = (own for own in self.modules() if isinstance(own, LatentAttention))
        return {own.spec.layer: own.up_projections for own in attentions}

    def rotations(
        self, positions: Int[Tensor, " T"]
    ) -> Sequence[tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]]:
        """Compute the rotations as Llama does, times the factor with which YaRN lengthens rotated vectors."""
        rotations, rope = super().rotations(positions), self.config.rope
        if rope is None or rope.length_factor == 1:
            return rotations
        cos, sin = rotations[0]
        return [(cos * rope.length_factor, sin * rope.length_factor)] * len(rotations)
