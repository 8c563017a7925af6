"""A decoder layer in seven launches, or five for up to 128 tokens on Hopper, for Llama and Qwen3 over FlashInfer.

Computed part by part, a layer takes fourteen launches, however fast each part is. Here neighboring parts are fused:
QK-norm, rotation and append are one kernel (`rotate_and_append`), and each residual is added by the matrix product
before it, as the C in C + A B. The two norms need no launches. A norm multiplies each token by 1 / rms, which the
kernel after the product applies (`rotate_and_append`, `swiglu`), and each column by a weight, which is folded into the
layer's matrices (`LlamaLayer.fold_norms`; FlashNorm, Graef et al. 2024). With few tokens, on Hopper, the products also
do the work of the kernels after them (`fused_products`), so a layer is four products and attention. Explained in
chapter 11.
"""

from __future__ import annotations

import flashinfer
import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.kernels import fused_ops
from mini_engine.kernels.fused_products import MOST_TOKENS, add_product, gate_up_swiglu, qkv_append
from mini_engine.kernels.rotate_and_append import rotate_and_append
from mini_engine.kernels.swiglu import swiglu
from mini_engine.models import llama
from mini_engine.models.config import ACTIVATIONS
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
    """Compute `llama.decoder_layer`, and overwrite `x` with the result; call the original if it cannot be fused.

    Args:
        layer: its weights, attention and MLP.
        x: the residual stream; changed in place.
        cos: cosines of each token's rotation.
        sin: its sines.
        attend: see `LanguageModel.forward`.
    """
    attention, mlp, spec = layer.attention, layer.mlp, layer.spec
    if not isinstance(attend, PagedBackend) or not _fuses(layer, attend.specs[spec.layer]):
        return llama.decoder_layer(layer, x, cos, sin, attend)

    layer.fold_norms()  # does nothing after the first step
    pdl = flashinfer.utils.device_support_pdl(x.device)
    norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else None
    pages = attend.cache.layers[spec.layer]
    if len(x) <= MOST_TOKENS and _suits_products(layer, cos):
        q = qkv_append(
            x, attention.qkv.weight, norms, layer.eps, cos, sin, pages, attend.cache.layout, attend.slot_mapping,
            next_waits=attend.waits_for_keys,
        )  # fmt: skip
        add_product(x, attend.run(spec.layer, q).flatten(1), attention.o.weight)
        return add_product(x, gate_up_swiglu(x, mlp.gate_up.weight, layer.eps), mlp.down.weight)

    q = rotate_and_append(
        linear(x, attention.qkv.weight), norms, layer.eps, cos, sin, pages, attend.cache.layout, attend.slot_mapping,
        tokens=x, pdl=pdl, next_waits=attend.waits_for_keys,
    )  # fmt: skip
    x.addmm_(attend.run(spec.layer, q).flatten(1), attention.o.weight.T)
    inner = swiglu(linear(x, mlp.gate_up.weight), x, layer.eps, pdl=pdl)
    return x.addmm_(inner, mlp.down.weight.T)


def _fuses(layer: LlamaLayer, stored: AttentionSpec) -> bool:
    """Return whether the kernels compute the same as the layer, and none of its parts has been replaced.

    In float16 the products of tokens that have not been normalized could overflow.

    Args:
        layer: the layer.
        stored: how the backend stores its keys and values, which the engine's options may change.
    """
    parts, weight = layer.parts, layer.attention.qkv.weight
    return (
        weight.dtype == torch.bfloat16
        and layer.attention.qkv.bias is None
        and stored.kv_dtype is None
        and layer.mlp.activation is ACTIVATIONS["silu"]
        and parts.rms_norm is fused_ops.rms_norm
        and parts.qk_norm is fused_ops.qk_norm
        and parts.gated_mlp is fused_ops.gated_mlp
        and isinstance(parts.apply_rope, fused_ops.Rotation)
    )


def _suits_products(layer: LlamaLayer, cos: Tensor) -> bool:
    """Return whether `fused_products` can compute the layer: on Hopper, for most sizes."""
    hidden_size, size = layer.attention.o.weight.shape
    return (
        torch.cuda.get_device_capability(cos.device)[0] == 9
        and cos.dtype == torch.float32
        and layer.spec.head_dim in (64, 128)
        and all(columns % 8 == 0 for columns in (hidden_size, size, layer.mlp.down.weight.shape[1]))
    )
