"""Llama (Touvron et al. 2023), and SmolLM2, which has the same architecture.

Each layer normalizes its input, attends, and adds the result to the residual stream. Then it does the same with the
gated MLP instead of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import MLP, Attention, DecoderLayer, GatedMLP, ModelParts, with_prefix
from mini_engine.models.weights import Destination, empty_weight
from mini_engine.rope import RopeConfig, inverse_frequencies, rope_tables


def decoder_layer(
    layer: PreNormLayer,
    x: Float[Tensor, "T hidden"],
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    attend: Attend,
) -> Float[Tensor, "T hidden"]:
    """Compute a layer: attention and MLP, each on a normalized input and added to the residual stream.

    Args:
        layer: its weights, attention and MLP.
        x: the residual stream.
        cos: cosines of each token's rotation.
        sin: its sines.
        attend: see `LanguageModel.forward`.
    """
    norm = layer.parts.rms_norm
    x = x + layer.attention(norm(x, layer.input_norm, layer.eps), cos, sin, attend)
    return x + layer.mlp(norm(x, layer.mlp_norm, layer.eps))


class PreNormLayer(DecoderLayer):
    """Attention and MLP, each on a normalized input and added to the residual stream (pre-norm, Xiong et al. 2020)."""

    attention_class = Attention
    mlp: MLP

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.input_norm = empty_weight(config.hidden_size)
        self.attention = self.attention_class(config, spec, parts)
        self.mlp_norm = empty_weight(config.hidden_size)

    def fold_norms(self) -> None:
        """Multiply the weight of each norm into the matrices after it, and set the weight to one.

        Since (x / rms * norm) W^T = (x / rms) (W * norm)^T, the layer computes the same as before, apart from rounding
        each number of W.
        """
        of_attention = (self.attention.qkv.weight,)
        for norm, matrices in ((self.input_norm, of_attention), (self.mlp_norm, self.mlp.input_matrices)):
            for matrix in matrices:
                matrix.mul_(norm)
            norm.fill_(1)

    def forward(
        self, x: Float[Tensor, "T hidden"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        return self.parts.decoder_layer(self, x, cos, sin, attend)

    def destinations(self) -> dict[str, Destination]:
        return {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            **with_prefix("self_attn.", self.attention.destinations()),
            **with_prefix("mlp.", self.mlp.destinations()),
        }


class LlamaLayer(PreNormLayer):
    """The layer of a dense model, with a gated MLP."""

    mlp: GatedMLP

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.mlp = GatedMLP(config, spec.layer, parts)


class LlamaForCausalLM(CausalLM):
    """Embeddings, layers and final norm; the base class has the LM head."""

    layer_class: type[DecoderLayer] = LlamaLayer

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        super().__init__(config, parts)
        assert config.rope is not None, "this architecture rotates its queries and keys"
        self.inv_freq = self.frequencies(config.rope)

    def frequencies(self, rope: RopeConfig) -> nn.Buffer:
        """Create the buffer of a rotation's frequencies, `[D/2]`."""
        # Powers on a GPU differ from the CPU's in the last bit: compute them on the CPU, then move them.
        with torch.device("cpu"):
            frequencies = inverse_frequencies(rope)
        return nn.Buffer(frequencies.to(self.device), persistent=False)

    def rotations(
        self, positions: Int[Tensor, " T"]
    ) -> Sequence[tuple[Float[Tensor, "T half"], Float[Tensor, "T half"]]]:
        """Return (cos, sin) of each token's rotation for each layer, computed once for all layers that share them."""
        return [rope_tables(positions, self.inv_freq)] * len(self.layers)

    def forward(
        self,
        token_ids: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        attend: Attend,
        compute: Callable[..., Float[Tensor, "T hidden"]] | None = None,
    ) -> Float[Tensor, "T hidden"]:
        """Run the layers and the final norm.

        Args:
            token_ids: as for every `LanguageModel`.
            positions: the same.
            attend: the same.
            compute: computes each layer, with the arguments of `decoder_layer`, instead of the layer itself.
        """
        x = self.embed(token_ids)
        for layer, (cos, sin) in zip(self.layers, self.rotations(positions), strict=True):
            x = compute(layer, x, cos, sin, attend) if compute else layer(x, cos, sin, attend)
        return self.parts.rms_norm(x, self.norm, self.config.norm_eps)
