"""Qwen3's mixture of experts (Yang et al. 2025), such as Qwen3-30B-A3B: Qwen3 with experts instead of dense MLPs."""

from __future__ import annotations

from collections.abc import Container

from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import DecoderLayer, ModelParts
from mini_engine.models.moe import MoELayer, moe_destinations
from mini_engine.models.qwen3 import Qwen3Attention, Qwen3ForCausalLM, Qwen3Layer
from mini_engine.models.weights import Destination


class Qwen3MoeLayer(MoELayer):
    """A layer with Qwen3's attention and a mixture of experts."""

    attention_class = Qwen3Attention


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3, in which some layers, usually all, are sparse."""

    def build_layer(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> DecoderLayer:
        assert config.moe is not None, "this architecture has experts"
        return (Qwen3MoeLayer if spec.layer in config.moe.sparse_layers else Qwen3Layer)(config, spec, parts)

    def destinations_of(self, names: Container[str]) -> dict[str, Destination]:
        return moe_destinations(self, names)
