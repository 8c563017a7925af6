"""DeepSeek-V2 (DeepSeek-AI 2024): Llama's layers with multi-head latent attention, and rotations scaled by YaRN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.mla import UpProjections
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer
from mini_engine.models.mla import LatentAttention


class DeepseekV2Layer(LlamaLayer):
    """Llama's layer around latent attention."""

    attention_class = LatentAttention  # type: ignore[assignment]  # `decoder_layer` calls it in the same way


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Llama with DeepSeek-V2's layers."""

    layer_class = DeepseekV2Layer

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
