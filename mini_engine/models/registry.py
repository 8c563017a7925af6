"""The registry of architectures, and the construction of a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mini_engine.errors import ModelLoadError
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.deepseek_v2 import DeepseekV2ForCausalLM
from mini_engine.models.gemma2 import Gemma2ForCausalLM
from mini_engine.models.gemma3 import Gemma3ForCausalLM
from mini_engine.models.gpt2 import GPT2LMHeadModel
from mini_engine.models.layers import ModelParts
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.mistral import MistralForCausalLM
from mini_engine.models.qwen2 import Qwen2ForCausalLM
from mini_engine.models.qwen3 import Qwen3ForCausalLM
from mini_engine.models.qwen3_moe import Qwen3MoeForCausalLM

FAMILIES: Mapping[str, type[CausalLM]] = {
    family.__name__: family
    for family in (
        LlamaForCausalLM,
        MistralForCausalLM,
        Qwen2ForCausalLM,
        Qwen3ForCausalLM,
        Qwen3MoeForCausalLM,
        Gemma2ForCausalLM,
        Gemma3ForCausalLM,
        DeepseekV2ForCausalLM,
        GPT2LMHeadModel,
    )
}


def build_model(config: ModelConfig, parts: ModelParts, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """Build a model whose parameters have no values yet; `load_weights` fills them.

    Args:
        config: the shape of the model.
        parts: the engine's replaceable parts.
        dtype: dtype of the parameters, a floating-point one.
        device: device of the parameters.

    Raises:
        ModelLoadError: if there is too little memory.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return FAMILIES[config.architecture](config, parts).eval()
    except RuntimeError as error:  # torch raises RuntimeError, or a subclass, when it runs out of memory
        raise ModelLoadError(
            f"{config.architecture} in {dtype} cannot be placed on {device} ({str(error).splitlines()[0]}): "
            "choose a smaller model, a narrower dtype or another device"
        ) from error
    finally:
        torch.set_default_dtype(before)
