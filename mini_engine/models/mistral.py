"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer; releases after v0.1 have no window."""

from __future__ import annotations

from mini_engine.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama's layers: the windows are in their `AttentionSpec`, which `attend` follows."""
