"""Tiny random models of each family, as transformers builds them, and a test's own `attend`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mini_engine.attention.mla import UpProjections, unabsorbed_attention
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 128}

# For each family: its class in transformers and the smallest configuration that has all its traits.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL | {"sliding_window": 5},
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 16},
    "qwen3_moe": SMALL
    | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "gemma2": SMALL
    | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}
    | {"final_logit_softcapping": 1.5, "tie_word_embeddings": False},
    "gemma3_text": SMALL
    | {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}
    | {"rope_theta": 50.0, "rope_local_base_freq": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    | {"tie_word_embeddings": False},
    "deepseek_v2": SMALL
    | {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 12}
    | {"qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1}
    | {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 10},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
    | {"tie_word_embeddings": False},
}
WITHOUT_MLA = [family for family in FAMILIES if family != "deepseek_v2"]
# With tied embeddings a random model repeats its last token, whatever attention returns. So no LM head is tied unless a
# test asks for it.


def transformers_config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model, as transformers sees it."""
    import transformers

    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2"}
    names |= {"qwen3_moe": "Qwen3Moe", "gemma3_text": "Gemma3Text", "deepseek_v2": "DeepseekV2", "gpt2": "GPT2"}
    # End tokens outside the tiny vocabulary would draw a warning.
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    values = copy.deepcopy(ends | FAMILIES[family] | changes)  # transformers changes what it gets
    return getattr(transformers, f"{names[family]}Config")(**values)


def transformers_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of transformers in which every tensor is random, the norms and biases too."""
    import transformers

    config = transformers_config(family, **changes)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if parameter.ndim == 1 and not family.startswith("gemma") and not name.endswith("bias"):  # norms near one
                parameter.add_(1.0)
    return model.to(dtype)


def our_model(theirs: Any, tensors: Mapping[str, Tensor] | None = None, parts: Parts | None = None) -> CausalLM:
    """Our model with the configuration and the weights of `theirs`."""
    config = ModelConfig.from_hf(theirs.config.to_dict())
    model = build_model(config, parts or Parts(), theirs.dtype, "cpu")
    model.load_weights(theirs.state_dict() if tensors is None else tensors)
    return model


def their_logits(theirs: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return theirs(input_ids=torch.tensor([token_ids])).logits[0]


class ListAttend:
    """Attention over keys and values that a list keeps for each sequence: the simplest cache there is.

    Args:
        specs: one for each layer.
        up_projections: those of each layer with MLA, which is computed in the un-absorbed form.
    """

    def __init__(
        self, specs: Sequence[AttentionSpec], up_projections: Mapping[int, UpProjections] | None = None
    ) -> None:
        self.specs, self.up_projections = specs, up_projections or {}
        self.stored: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self.step: list[tuple[int, int, int]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, out, spec = 0, [], self.specs[layer]
        for sequence, start, length in self.step:
            part = slice(rows, rows + length)
            kept = self.stored.setdefault((spec.layer, sequence), [])
            kept.append((k[part], v[part]))
            keys, values = (torch.cat(tensors) for tensors in zip(*kept, strict=True))
            mask = attention_mask(torch.arange(start, start + length), torch.arange(start + length), spec.window)
            attend = partial(masked_attention, scale=spec.scale, mask=mask, softcap=spec.softcap)
            if spec.mla is None:
                out.append(attend(q[part], keys, values))
            else:
                up = self.up_projections[spec.layer]
                out.append(unabsorbed_attention(up, q[part], keys, values, attend))
            rows += length
        return torch.cat(out)


def run_schedule(
    model: CausalLM, sequences: Sequence[Sequence[int]], steps: Sequence[Sequence[tuple[int, int]]]
) -> list[Tensor]:
    """Logits of every token of every sequence, computed by the given steps.

    Args:
        steps: each step is a list of (sequence, number of its next tokens to compute), packed in that order.
    """
    attend = ListAttend(model.attention_specs, model.up_projections)
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        attend.step = [(sequence, done[sequence], length) for sequence, length in step]
        tokens = [t for s, start, length in attend.step for t in sequences[s][start : start + length]]
        positions = [p for _, start, length in attend.step for p in range(start, start + length)]
        with torch.inference_mode():
            hidden = model(torch.tensor(tokens), torch.tensor(positions), attend)
            rows = model.compute_logits(hidden).split([length for _, _, length in attend.step])
        for (sequence, _, length), of_sequence in zip(attend.step, rows, strict=True):
            logits[sequence].append(of_sequence)
            done[sequence] += length
    return [torch.cat(parts) for parts in logits]


def whole(model: CausalLM, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits of every token, all sequences packed into one step."""
    return run_schedule(model, sequences, [[(index, len(tokens)) for index, tokens in enumerate(sequences)]])
