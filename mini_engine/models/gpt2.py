"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm with biases, an MLP without a gate."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ACTIVATIONS, ModelConfig
from mini_engine.models.layers import DecoderLayer, ModelParts, attention_spec, empty_weight, split_qkv
from mini_engine.models.linear import linear

_CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def gpt2_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPT-2 checkpoint in the form of every other: one set of names, weights as `[out, in]`.

    Checkpoints name their tensors with or without `transformer.` in front. Their projections were written as a 1 x 1
    convolution (Conv1D) and lie as `[in, out]`: they are transposed here, without a copy. The buffers `attn.bias` and
    `attn.masked_bias` hold a causal mask, not weights, and are left out.

    Args:
        tensors: the checkpoint under its own names; all of it is looked up.

    Returns:
        Names without `transformer.`, weights as `[out, in]`.

    Raises:
        ModelLoadError: two tensors get the same name.
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

    def __init__(self, config: ModelConfig, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec, self.eps = spec, config.norm_eps
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm_1, self.norm_1_bias = empty_weight(hidden), empty_weight(hidden)
        self.qkv, self.qkv_bias = empty_weight(3 * hidden, hidden), empty_weight(3 * hidden)
        self.o, self.o_bias = empty_weight(hidden, hidden), empty_weight(hidden)
        self.norm_2, self.norm_2_bias = empty_weight(hidden), empty_weight(hidden)
        self.up, self.up_bias = empty_weight(inner, hidden), empty_weight(inner)
        self.down, self.down_bias = empty_weight(hidden, inner), empty_weight(hidden)

    def forward(self, x: Float[Tensor, "T hidden"], attend: Attend) -> Float[Tensor, "T hidden"]:
        normed = F.layer_norm(x, self.norm_1.shape, self.norm_1, self.norm_1_bias, self.eps)
        q_and_k, v = split_qkv(linear(normed, self.qkv, self.qkv_bias), self.spec)
        q, k = q_and_k.chunk(2, dim=1)
        x = x + linear(attend(self.spec.layer, q, k, v).flatten(1), self.o, self.o_bias)
        normed = F.layer_norm(x, self.norm_2.shape, self.norm_2, self.norm_2_bias, self.eps)
        return x + linear(self.activation(linear(normed, self.up, self.up_bias)), self.down, self.down_bias)

    def destinations(self) -> dict[str, Tensor]:
        return {
            "ln_1.weight": self.norm_1,
            "ln_1.bias": self.norm_1_bias,
            "attn.c_attn.weight": self.qkv,
            "attn.c_attn.bias": self.qkv_bias,
            "attn.c_proj.weight": self.o,
            "attn.c_proj.bias": self.o_bias,
            "ln_2.weight": self.norm_2,
            "ln_2.bias": self.norm_2_bias,
            "mlp.c_fc.weight": self.up,
            "mlp.c_fc.bias": self.up_bias,
            "mlp.c_proj.weight": self.down,
            "mlp.c_proj.bias": self.down_bias,
        }


class GPT2LMHeadModel(CausalLM):
    """The sum of token and position embeddings, layers and final norm; the base class has the LM head."""

    embedding_name, layers_name, norm_name = "wte.weight", "h", "ln_f.weight"

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        divide = config.scale_attn_by_inverse_layer_idx
        layers = range(config.num_hidden_layers)
        specs = tuple(attention_spec(config, i, scale / (i + 1) if divide else scale) for i in layers)
        super().__init__(config, parts, specs)
        self.embed_positions = empty_weight(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(GPT2Layer(config, spec) for spec in specs)
        self.norm, self.norm_bias = empty_weight(config.hidden_size), empty_weight(config.hidden_size)

    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        x = F.embedding(token_ids, self.embed_tokens) + F.embedding(positions, self.embed_positions)
        for layer in self.layers:
            x = layer(x, attend)
        return F.layer_norm(x, self.norm.shape, self.norm, self.norm_bias, self.config.norm_eps)

    def load_weights(self, tensors: Mapping[str, Tensor], headers: Mapping[str, Tensor] | None = None) -> None:
        """Load a checkpoint as the base class does, after `parts.gpt2_weights` has brought it into the common form."""
        rename = self.parts.gpt2_weights
        super().load_weights(rename(tensors), None if headers is None else rename(headers))

    def destinations(self) -> dict[str, Tensor]:
        return {**super().destinations(), "wpe.weight": self.embed_positions, "ln_f.bias": self.norm_bias}
