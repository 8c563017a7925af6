"""A decoder layer in nine launches, four of them matrix products, for Llama and Qwen3 over FlashInfer's attention.

The parts of a layer, each as good as it can be alone, take fourteen. Fused here are what one part hands to the next:
QK-norm, rotation and append are one kernel (`rotate_and_append`), and each residual is added by the matrix product in
front of it, as its C in C + A B. Explained in chapter 11.
"""

from __future__ import annotations

import flashinfer
from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.flashinfer import FlashInferBackend
from mini_engine.attention.spec import Attend
from mini_engine.kernels import fused_ops
from mini_engine.kernels.rotate_and_append import rotate_and_append
from mini_engine.models import llama
from mini_engine.models.linear import linear
from mini_engine.models.llama import LlamaLayer
from mini_engine.models.qwen3 import Qwen3Attention


def decoder_layer(
    layer: LlamaLayer,
    x: Float[Tensor, "T hidden"],
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    attend: Attend,
) -> Float[Tensor, "T hidden"]:
    """Compute `llama.decoder_layer`, and overwrite `x` with the result; other layers than it can fuse are left to that.

    Args:
        layer: its weights, attention and MLP.
        x: the residual stream; changed in place.
        cos: of each token's rotation.
        sin: likewise.
        attend: see `LanguageModel.forward`.
    """
    attention, mlp, spec = layer.attention, layer.mlp, layer.spec
    if not isinstance(attend, FlashInferBackend) or not _fuses(layer):
        return llama.decoder_layer(layer, x, cos, sin, attend)

    norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else None
    pages = attend.cache.layers[spec.kv_layer]
    qkv = linear(fused_ops.rms_norm(x, layer.input_norm, layer.eps), attention.qkv.weight)
    q = rotate_and_append(qkv, norms, layer.eps, cos, sin, pages, attend.cache.layout, attend.slot_mapping)
    x.addmm_(attend.run(spec.layer, q).flatten(1), attention.o.weight.T)
    gate_up = linear(fused_ops.rms_norm(x, layer.mlp_norm, layer.eps), mlp.gate_up.weight)
    return x.addmm_(flashinfer.silu_and_mul(gate_up), mlp.down.weight.T)


def _fuses(layer: LlamaLayer) -> bool:
    """Whether a layer computes what the kernels do, with parts that nobody has replaced."""
    parts, weight = layer.parts, layer.attention.qkv.weight
    return (
        weight.dtype in fused_ops.DTYPES
        and layer.attention.qkv.bias is None
        and layer.spec.kv_dtype is None
        and fused_ops.GATED_ACTIVATIONS.get(layer.mlp.activation) is flashinfer.silu_and_mul
        and parts.rms_norm is fused_ops.rms_norm
        and parts.qk_norm is fused_ops.qk_norm
        and parts.gated_mlp is fused_ops.gated_mlp
        and isinstance(parts.apply_rope, fused_ops.Rotation)
    )
