"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm with biases, an MLP without a gate."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.models.base import CausalLM, Stored
from mini_engine.models.config import ACTIVATIONS, ModelConfig
from mini_engine.models.layers import DecoderLayer, ModelParts, split_qkv
from mini_engine.models.weights import Destination, empty_weight, projection

_CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def gpt2_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a GPT-2 checkpoint to the form of the other families: names without a prefix, matrices as `[out, in]`.

    Checkpoints name their tensors with or without the prefix `transformer.`. Their projections were written as 1 x 1
    convolutions (Conv1D) and are stored as `[in, out]`, so they are transposed here, without a copy. The buffers
    `attn.bias` and `attn.masked_bias` hold a causal mask, not weights, and are left out.

    Args:
        tensors: the checkpoint under its own names; every tensor is looked up.

    Returns:
        Names without `transformer.`, weights as `[out, in]`.

    Raises:
        ModelLoadError: if two tensors get the same name.
    """
    found: dict[str, Tensor] = {}
    for full_name in tensors:
        name = full_name.removeprefix("transformer.")
        if _MASK_BUFFER.fullmatch(name):
            continue
        if name in found:
            raise ModelLoadError(
                f"the checkpoint has tensor {name!r} with and without 'transformer.': keep one of them"
            )
        tensor = tensors[full_name]
        found[name] = tensor.t() if _CONV1D.fullmatch(name) and tensor.ndim == 2 else tensor
    return found


class GPT2Layer(DecoderLayer):
    """Attention and MLP, each on a normalized input and added to the residual stream."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.activation = ACTIVATIONS[config.hidden_act]
        hidden, inner = config.hidden_size, config.intermediate_size
        self.norm_1, self.norm_1_bias = empty_weight(hidden), empty_weight(hidden)
        formats, prefix = config.formats, f"h.{spec.layer}."
        self.qkv = projection(formats, prefix, hidden, {"attn.c_attn": 3 * hidden}, bias=True)
        self.o = projection(formats, prefix, hidden, {"attn.c_proj": hidden}, bias=True)
        self.norm_2, self.norm_2_bias = empty_weight(hidden), empty_weight(hidden)
        self.up = projection(formats, prefix, hidden, {"mlp.c_fc": inner}, bias=True)
        self.down = projection(formats, prefix, inner, {"mlp.c_proj": hidden}, bias=True)

    def forward(self, x: Float[Tensor, "T hidden"], attend: Attend) -> Float[Tensor, "T hidden"]:
        normed = F.layer_norm(x, self.norm_1.shape, self.norm_1, self.norm_1_bias, self.eps)
        q_and_k, v = split_qkv(self.qkv(normed), self.spec)
        q, k = q_and_k.chunk(2, dim=1)
        x = x + self.o(attend(self.spec.layer, q, k, v).flatten(1))
        normed = F.layer_norm(x, self.norm_2.shape, self.norm_2, self.norm_2_bias, self.eps)
        return x + self.down(self.activation(self.up(normed)))

    def destinations(self) -> dict[str, Destination]:
        norms: dict[str, Destination] = {"ln_1.weight": self.norm_1, "ln_1.bias": self.norm_1_bias}
        norms |= {"ln_2.weight": self.norm_2, "ln_2.bias": self.norm_2_bias}
        projections = (self.qkv, self.o, self.up, self.down)
        return norms | {name: rows for each in projections for name, rows in each.destinations().items()}


class GPT2LMHeadModel(CausalLM):
    """The sum of token and position embeddings, layers and final norm; the base class has the LM head."""

    embedding_name, layers_name, norm_name = "wte.weight", "h", "ln_f.weight"

    layer_class = GPT2Layer

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        super().__init__(config, parts)
        self.embed_positions = empty_weight(config.max_position_embeddings, config.hidden_size)
        self.norm_bias = empty_weight(config.hidden_size)

    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        x = self.embed(token_ids) + F.embedding(positions, self.embed_positions)
        for layer in self.layers:
            x = layer(x, attend)
        return F.layer_norm(x, self.norm.shape, self.norm, self.norm_bias, self.config.norm_eps)

    def load_weights(self, tensors: Mapping[str, Stored], headers: Mapping[str, Tensor] | None = None) -> None:
        """Load a checkpoint as the base class does, after `parts.gpt2_weights` has converted it to the common form."""
        rename = self.parts.gpt2_weights
        super().load_weights(rename(tensors), None if headers is None else rename(headers))

    def destinations(self) -> dict[str, Destination]:
        return {**super().destinations(), "wpe.weight": self.embed_positions, "ln_f.bias": self.norm_bias}
