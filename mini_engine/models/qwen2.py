"""Qwen2 (Yang et al. 2024), and Qwen2.5, which has the same architecture: Llama with biases on q, k and v."""

from __future__ import annotations

from mini_engine.models.layers import Attention
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer


class Qwen2Attention(Attention):
    """Llama's attention with biases on the projections to queries, keys and values, but not on the last projection."""

    output_bias = False


class Qwen2Layer(LlamaLayer):
    """Llama's layer around Qwen2's attention."""

    attention_class = Qwen2Attention


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with Qwen2's layers."""

    layer_class = Qwen2Layer
