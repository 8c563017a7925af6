"""A decoder layer in seven launches, or fewer for few tokens, for Llama and Qwen3 over FlashInfer.

Computed part by part, a layer takes fourteen launches, however fast each part is. Here neighboring parts are fused:
QK-norm, rotation and append are one kernel (`rotate_and_append`), and each residual is added by the matrix product
before it, as the C in C + A B. The two norms need no launches. A norm multiplies each token by 1 / rms, which the
kernel after the product applies (`rotate_and_append`, `swiglu`), and each column by a weight, which is folded into the
layer's matrices (`LlamaLayer.fold_norms`; FlashNorm, Graef et al. 2024).

With few tokens, on Hopper, the products also do the work of the kernels after them, so a layer is four products and
attention (`fused_products.suits` says when). With up to four tokens the products are matrix times vector (`gemv.py`),
and one more launch rotates and appends. Explained in chapter 11.

A mixture of experts takes the place of the last two products (`kernels/moe.py`).
"""

from __future__ import annotations

from typing import ClassVar

import flashinfer
import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend
from mini_engine.kernels import gemv
from mini_engine.kernels.fused_products import add_product, gate_up_swiglu, most_tokens, qkv_append
from mini_engine.kernels.moe import add_experts
from mini_engine.kernels.rotate_and_append import rotate_and_append
from mini_engine.kernels.swiglu import swiglu
from mini_engine.models.layers import Attention, GatedMLP
from mini_engine.models.linear import linear
from mini_engine.models.llama import LlamaForCausalLM, PreNormLayer
from mini_engine.models.moe import MoE
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.models.weights import Linear


class FusedLayer:
    """Computes `llama.decoder_layer` over a `PagedBackend` in seven launches, and overwrites `x` with the result.

    `models.transform` decides for which models this is the same, and folds their norms.

    A row has the same bits for any number of tokens if the matrix products do.

    Args:
        model: a model of such layers.
    """

    heads: ClassVar[int | None] = 16  # see `rotate_and_append`

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._pdl = flashinfer.utils.device_support_pdl(model.device)

    def __call__(
        self,
        layer: PreNormLayer,
        x: Float[Tensor, "T hidden"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        attend: AttentionBackend,
    ) -> Float[Tensor, "T hidden"]:
        """Compute a layer; the arguments are those of `llama.decoder_layer`, and `x` is changed in place."""
        attention, mlp, index, eps = layer.attention, layer.mlp, layer.spec.layer, layer.eps
        assert isinstance(mlp, GatedMLP | MoE)
        q = rotate_and_append(
            linear(x, attention.qkv.weight), _norms(attention), eps, cos, sin, attend.cache.layers[index],
            attend.cache.layout, attend.slot_mapping, kv_scales=attend.specs[index].kv_scales, tokens=x, pdl=self._pdl,
            next_waits=attend.waits_for_keys, heads=self.heads,
        )  # fmt: skip
        x.addmm_(attend.run(index, q).flatten(1), attention.o.weight.T)
        if isinstance(mlp, MoE):
            return add_experts(x, mlp, eps, pdl=self._pdl)
        inner = swiglu(linear(x, mlp.gate_up.weight), x, eps, pdl=self._pdl)
        return x.addmm_(inner, mlp.down.weight.T)


class AdaptiveFusedLayer(FusedLayer):
    """Computes the layer in fewer launches for few tokens; the products then add in another order.

    Args:
        model: as for `FusedLayer`.
    """

    heads: ClassVar[int | None] = None

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__(model)
        matrices = [own.weight for own in model.layers.modules() if isinstance(own, Linear)]
        self._most_tokens = most_tokens(matrices, model.config.head_dim) if model.inv_freq.dtype == torch.float32 else 0

    def __call__(
        self,
        layer: PreNormLayer,
        x: Float[Tensor, "T hidden"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        attend: AttentionBackend,
    ) -> Float[Tensor, "T hidden"]:
        """Compute a layer; the arguments are those of `FusedLayer`."""
        if len(x) > max(self._most_tokens, gemv.MOST_TOKENS):
            return super().__call__(layer, x, cos, sin, attend)
        attention, mlp, index, eps = layer.attention, layer.mlp, layer.spec.layer, layer.eps
        assert isinstance(mlp, GatedMLP | MoE)
        norms, pages, layout = _norms(attention), attend.cache.layers[index], attend.cache.layout
        kv_scales = attend.specs[index].kv_scales
        if len(x) <= gemv.MOST_TOKENS:
            pdl = self._pdl
            q = rotate_and_append(
                gemv.project(x, attention.qkv.weight, eps, pdl=pdl), norms, eps, cos, sin, pages, layout,
                attend.slot_mapping, kv_scales=kv_scales, pdl=pdl, next_waits=attend.waits_for_keys,
            )  # fmt: skip
            gemv.add_product(x, attend.run(index, q).flatten(1), attention.o.weight, pdl=pdl)
            if isinstance(mlp, MoE):
                return add_experts(x, mlp, eps, pdl=pdl)
            inner = gemv.gate_up_swiglu(x, mlp.gate_up.weight, eps, pdl=pdl)
            return gemv.add_product(x, inner, mlp.down.weight, pdl=pdl)
        q = qkv_append(
            x, attention.qkv.weight, norms, eps, cos, sin, pages, layout, attend.slot_mapping,
            kv_scales=kv_scales, next_waits=attend.waits_for_keys,
        )  # fmt: skip
        add_product(x, attend.run(index, q).flatten(1), attention.o.weight)
        if isinstance(mlp, MoE):
            return add_experts(x, mlp, eps, pdl=self._pdl)
        return add_product(x, gate_up_swiglu(x, mlp.gate_up.weight, eps), mlp.down.weight)


def _norms(attention: Attention) -> tuple[Tensor, Tensor] | None:
    """The weights of the norms of queries and keys, if the model has them."""
    return (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else None
