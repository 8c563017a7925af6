"""A decoder layer with quantized weights, for Llama and Qwen3 over FlashInfer: what `fused_layer.py` is for dense ones.

A norm's weight cannot be folded into integers, so the kernels that multiply apply it. With few tokens, a layer is six
launches: four products, attention, and what rotates and appends. In FP8, the kernels between the products quantize
tokens and apply scales. Explained in chapter 13.
"""

from __future__ import annotations

import flashinfer
from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend
from mini_engine.kernels.fp8_products import apply_scales, multiply, quantize_swiglu, quantize_tokens
from mini_engine.kernels.quantized_matmul import GPUKernel
from mini_engine.kernels.quantized_products import MOST_TOKENS, PackedWeight, add_product, gate_up_swiglu, project
from mini_engine.kernels.rotate_and_append import rotate_and_append
from mini_engine.models.base import LanguageModel
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.models.weights import Projection, QuantizedLinear


def packed(projection: Projection) -> PackedWeight | None:
    """Return a projection's matrix as the kernels read it; None if it is not quantized, or has biases or an order."""
    if not isinstance(projection, QuantizedLinear) or projection.bias is not None or projection.order is not None:
        return None
    return projection.kernel.packed if isinstance(projection.kernel, GPUKernel) else None


def computes(model: LanguageModel) -> bool:
    """Return whether every matrix of the model's layers is packed, and gate and up projection in pairs."""
    layers = [layer for layer in model.modules() if isinstance(layer, LlamaLayer)]
    matrices = [
        [packed(own) for own in (layer.mlp.gate_up, layer.attention.qkv, layer.attention.o, layer.mlp.down)]
        for layer in layers
    ]
    return all(own is not None for of_layer in matrices for own in of_layer) and all(
        gate_up is not None and gate_up.half_rows == gate_up.shape[0] // 2 for gate_up, *_ in matrices
    )


class QuantizedLayer:
    """Computes `llama.decoder_layer` over a `PagedBackend`, and overwrites `x` with the result.

    Args:
        model: a model of such layers; `computes` accepts it.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._pdl = flashinfer.utils.device_support_pdl(model.device)

    def __call__(
        self,
        layer: LlamaLayer,
        x: Float[Tensor, "T hidden"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        attend: AttentionBackend,
    ) -> Float[Tensor, "T hidden"]:
        """Compute a layer; the arguments are those of `llama.decoder_layer`, and `x` is changed in place."""
        attention, mlp, index, eps, pdl = layer.attention, layer.mlp, layer.spec.layer, layer.eps, self._pdl
        qkv, o, gate_up, down = map(_packed, (attention.qkv, attention.o, mlp.gate_up, mlp.down))
        norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else None

        def attend_to(product: Tensor) -> Tensor:
            q = rotate_and_append(
                product, norms, eps, cos, sin, attend.cache.layers[index], attend.cache.layout, attend.slot_mapping,
                kv_scales=attend.specs[index].kv_scales, pdl=pdl, next_waits=attend.waits_for_keys,
            )  # fmt: skip
            return attend.run(index, q).flatten(1)

        in_rows = [own.in_rows for own in (qkv, o, gate_up, down)]
        if not any(in_rows) and len(x) <= MOST_TOKENS:
            add_product(x, attend_to(project(x, qkv, eps, layer.input_norm)), o)
            return add_product(x, gate_up_swiglu(x, gate_up, eps, layer.mlp_norm), down)
        if all(in_rows):
            product = multiply(quantize_tokens(x, layer.input_norm, eps, pdl=pdl), qkv.data, qkv.scales)
            out = quantize_tokens(attend_to(apply_scales(product, pdl=pdl)), pdl=pdl)
            product = multiply(out, o.data, o.scales)
            product = multiply(
                quantize_tokens(x, layer.mlp_norm, eps, added=product, pdl=pdl), gate_up.data, gate_up.scales
            )
            product = multiply(quantize_swiglu(product, pdl=pdl), down.data, down.scales)
            return apply_scales(product, x, pdl=pdl)
        norm = layer.parts.rms_norm
        x += attention.o(attend_to(attention.qkv(norm(x, layer.input_norm, eps))))
        x += mlp(norm(x, layer.mlp_norm, eps))
        return x


def _packed(projection: Projection) -> PackedWeight:
    own = packed(projection)
    assert own is not None, "`computes` has refused the model"
    return own
