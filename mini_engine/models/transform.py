"""What is done to a model once, between loading its weights and the first step: transform them, and choose kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mini_engine import ops
from mini_engine.attention.backend import AttentionBackend
from mini_engine.models.base import LanguageModel
from mini_engine.models.config import ACTIVATIONS
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer, PreNormLayer, decoder_layer
from mini_engine.models.qwen3 import Qwen3Layer
from mini_engine.models.qwen3_moe import Qwen3MoeLayer
from mini_engine.models.weights import Linear, Projection

MAX_SAMPLES = 64  # values of each weight that enter a model's identity
Forward = Callable[[Tensor, Tensor], Tensor]  # takes token ids and positions, and returns hidden states


@torch.no_grad()
def prepare_weights(model: LanguageModel) -> None:
    """Set a loaded model's identity, then transform its weights for the kernels that run on its device.

    No step changes a weight, so this is the only place where weights differ from the checkpoint. Only the first call
    after loading does anything.
    """
    if model.identity:
        return
    model.identity = identity_of(model)
    if has_fused_layers(model):
        for layer in model.modules():
            if isinstance(layer, PreNormLayer):
                layer.fold_norms()
    for each in model.modules():
        if isinstance(each, Projection):
            each.prepare(model.dtype)


def bind_layers(model: LanguageModel, backend: AttentionBackend, batch_invariant: bool = False) -> Forward:
    """Choose the function that computes each layer, and return the model's `forward` over this backend.

    The model is unchanged, apart from `prepare_weights`: engines with different backends may share it.

    Args:
        model: the model.
        backend: its attention.
        batch_invariant: whether each product must be computed by kernels that add in the same order for any number of
            tokens.
    """
    prepare_weights(model)
    if not backend.takes_stored_keys:
        return partial(model, attend=backend)
    if has_fused_layers(model):
        fused = ops.load(ops.BATCH_INVARIANT_LAYER if batch_invariant else ops.FUSED_LAYER)
        return partial(model, attend=backend, compute=fused(model))
    if has_plain_layers(model) and ops.load(ops.PACKED_LAYERS)(model):
        return partial(model, attend=backend, compute=ops.load(ops.QUANTIZED_LAYER)(model))
    return partial(model, attend=backend)


def has_fused_layers(model: LanguageModel) -> bool:
    """Return whether `FusedLayer` computes the same as the model's layers."""
    matrices = (own for own in model.modules() if isinstance(own, Projection))
    return has_plain_layers(model) and all(isinstance(own, Linear) for own in matrices)


def has_plain_layers(model: LanguageModel) -> bool:
    """Return whether the layers are Llama's or Qwen3's, or its experts', without biases, windows or replaced parts.

    In float16 the products of tokens that have not been normalized could overflow.
    """
    return (
        isinstance(model, LlamaForCausalLM)
        and all(type(layer) in (LlamaLayer, Qwen3Layer, Qwen3MoeLayer) for layer in model.layers)
        and ops.has_layer_kernels(model.device)
        and model.dtype == torch.bfloat16
        and not model.config.attention_bias
        and "sliding_attention" not in model.config.layer_types
        and ACTIVATIONS[model.config.hidden_act] is ACTIVATIONS["silu"]
        and model.parts.decoder_layer is decoder_layer
        and all(getattr(model.parts, name) is part for name, part in ops.layer_parts(model.device).items())
    )


def identity_of(model: LanguageModel) -> str:
    """Return a digest of a model's layers, and of the names, shapes and some values of its weights.

    It does not depend on the dtype, as long as the dtype represents the checkpoint's values exactly.
    """
    weights = model.state_dict()
    shapes = [(name, tuple(weight.shape)) for name, weight in weights.items()]
    samples = [w.flatten()[:: w.numel() // MAX_SAMPLES + 1].to(torch.float64) for w in weights.values()]
    digest = hashlib.sha256(repr((model.attention_specs, shapes)).encode())
    digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()
