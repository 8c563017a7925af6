"""From the name of an architecture to the class that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from mini_engine.errors import ModelLoadError
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig, unknown_architecture
from mini_engine.models.gemma2 import Gemma2ForCausalLM
from mini_engine.models.gpt2 import GPT2LMHeadModel
from mini_engine.models.layers import ModelParts
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.qwen3 import Qwen3ForCausalLM

FAMILIES: Mapping[str, Callable[[ModelConfig, ModelParts], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
}


def build_model(config: ModelConfig, parts: ModelParts, dtype: torch.dtype, device: torch.device | str) -> CausalLM:
    """A model without values yet: `load_weights` gives it those.

    Args:
        config: the shape of the model.
        parts: the functions that it calls.
        dtype: the dtype of its parameters, of floating point.
        device: where its parameters live.

    Raises:
        ModelLoadError: no such architecture, or not enough memory.
    """
    if config.architecture not in FAMILIES:
        raise unknown_architecture(config.architecture)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return FAMILIES[config.architecture](config, parts).eval()
    except RuntimeError as error:  # torch raises it, or a subclass, where memory runs out
        raise ModelLoadError(
            f"{config.architecture} in {dtype} cannot be placed on {device} ({str(error).splitlines()[0]}): "
            "choose a smaller model, a narrower dtype or another device"
        ) from error
    finally:
        torch.set_default_dtype(before)
