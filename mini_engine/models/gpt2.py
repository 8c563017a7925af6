"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm with biases, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ACTIVATIONS, ModelConfig
from mini_engine.models.layers import DecoderLayer, ModelParts, attention_spec, empty_weight, split_qkv
from mini_engine.models.linear import linear


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

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """As in the base class, after `parts.gpt2_weights` has renamed and transposed the checkpoint's tensors."""
        super().load_weights(self.parts.gpt2_weights(tensors))

    def destinations(self) -> dict[str, Tensor]:
        return {**super().destinations(), "wpe.weight": self.embed_positions, "ln_f.bias": self.norm_bias}
