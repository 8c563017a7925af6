"""Building blocks of the model families: norm, gated MLP, and attention around `attend`.

The batch is ragged: `x` is `[T, hidden]`, the tokens of all sequences of a step one after the other. A model does not
know where a sequence begins or how its keys are stored. It gets positions and `attend` as arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.models.config import ACTIVATIONS, ModelConfig
from mini_engine.models.linear import linear
from mini_engine.rope import inverse_frequencies


@runtime_checkable
class ModelParts(Protocol):
    """The parts of the engine that a model calls; `mini_engine.parts.Parts` has them all."""

    @property
    def rms_norm(self) -> Callable[..., Tensor]: ...
    @property
    def qk_norm(self) -> Callable[..., Tensor]: ...
    @property
    def gated_mlp(self) -> Callable[..., Tensor]: ...
    @property
    def apply_rope(self) -> Callable[..., Tensor]: ...
    @property
    def gpt2_weights(self) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]: ...


def rms_norm(x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*batch D"]:
    """Scale each row to a root mean square of one, then by `weight` (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: one row for each token (and head).
        weight: one factor for each column, in the dtype of `x` or a wider one.
        eps: added to the mean square, so that a row of zeros stays finite.

    Returns:
        The rows in the dtype of `x`, computed in float32 (float64 for float64).
    """
    if x.dtype == weight.dtype:  # on a GPU even a conversion that does nothing costs host time
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def qk_norm(
    q_and_k: Float[Tensor, "T QK D"],
    q_weight: Float[Tensor, " D"],
    k_weight: Float[Tensor, " D"],
    num_qo_heads: int,
    eps: float,
) -> Float[Tensor, "T QK D"]:
    """Normalize every query head and every key head of every token by `rms_norm` (QK-norm, Dehghani et al. 2023).

    Args:
        q_and_k: queries, then keys.
        q_weight: one factor for each number of a query head.
        k_weight: one factor for each number of a key head.
        num_qo_heads: how many of the heads are queries.
        eps: as for `rms_norm`.

    Returns:
        A new tensor: queries and keys stay together, because one rotation of both is cheaper than two.
    """
    q, k = q_and_k.split((num_qo_heads, q_and_k.shape[1] - num_qo_heads), dim=1)
    return torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)


def gated_mlp(
    x: Float[Tensor, "T hidden"],
    gate_up: Float[Tensor, "I2 hidden"],
    down: Float[Tensor, "hidden I"],
    activation: Callable[[Tensor], Tensor],
) -> Float[Tensor, "T hidden"]:
    """Compute `down(activation(gate(x)) * up(x))`: SwiGLU with SiLU, GeGLU with GELU (Shazeer 2020).

    Args:
        x: the tokens.
        gate_up: the gate's `I` rows, then the up projection's `I` rows: one matrix product instead of two.
        down: the projection back to the hidden size.
        activation: the nonlinearity on the gate.

    Returns:
        One row for each token, in the dtype of `x`.
    """
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(activation(gate) * up, down)


def empty_weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Create a parameter without values on the default device; `load_weights` fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def attention_spec(config: ModelConfig, layer: int, scale: float, softcap: float | None = None) -> AttentionSpec:
    """Describe the attention of one layer. Only a layer of type `sliding_attention` has a window."""
    return AttentionSpec(
        layer=layer,
        kv_layer=layer,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=scale,
        window=config.sliding_window if config.layer_types[layer] == "sliding_attention" else None,
        softcap=softcap,
        rope=config.rope,
    )


def rotary_frequencies(config: ModelConfig) -> Float[Tensor, " half"]:
    """Compute the rotation of each pair of a head in radians per position, in float32, on the default device.

    Raises:
        ModelLoadError: if the configuration has no RoPE.
    """
    if config.rope is None:
        raise ModelLoadError(f"{config.architecture} rotates its queries and keys: give its ModelConfig a RopeConfig")
    # Powers on a GPU differ from the CPU's in the last bit: compute them on the CPU, then move them.
    with torch.device("cpu"):
        frequencies = inverse_frequencies(config.rope)
    return frequencies.to(torch.get_default_device())


def split_qkv(
    qkv: Float[Tensor, "T W"], spec: AttentionSpec
) -> tuple[Float[Tensor, "T QK D"], Float[Tensor, "T Hk D"]]:
    """View the output of the fused projection as heads, without a copy.

    Args:
        qkv: for each token its queries, keys and values, W = (Hq + 2 Hk) D numbers.
        spec: number and size of the heads.

    Returns:
        Queries and keys together, `[T, Hq + Hk, D]`, so that one call rotates both; and the values, `[T, Hk, D]`.
    """
    heads = qkv.view(qkv.shape[0], spec.num_qo_heads + 2 * spec.num_kv_heads, spec.head_dim)
    queries_and_keys, values = heads.split((spec.num_qo_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
    return queries_and_keys, values


class DecoderLayer(nn.Module):
    """One layer of a model. A family adds the weights and a `forward`."""

    @abstractmethod
    def destinations(self) -> dict[str, Tensor]:
        """Map the checkpoint name of each tensor of the layer to the parameter (or rows of one) that it fills."""


class Attention(nn.Module):
    """Project to queries, keys and values; rotate queries and keys; attend; project back."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        self.spec, self.parts = spec, parts
        self.q_rows, self.kv_rows = spec.num_qo_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = self.q_rows + 2 * self.kv_rows
        self.qkv = empty_weight(rows, config.hidden_size)
        self.o = empty_weight(config.hidden_size, self.q_rows)
        self.qkv_bias = empty_weight(rows) if config.attention_bias else None
        self.o_bias = empty_weight(config.hidden_size) if config.attention_bias else None

    def forward(
        self,
        x: Float[Tensor, "T hidden"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        attend: Attend,
    ) -> Float[Tensor, "T hidden"]:
        spec = self.spec
        q_and_k, v = split_qkv(linear(x, self.qkv, self.qkv_bias), spec)
        q, k = self.parts.apply_rope(q_and_k, cos, sin).split((spec.num_qo_heads, spec.num_kv_heads), dim=1)
        return linear(attend(spec.layer, q, k, v).flatten(1), self.o, self.o_bias)

    def destinations(self) -> dict[str, Tensor]:
        """As in the base class; the three projections of a checkpoint fill row ranges of one weight."""
        rows = (self.q_rows, self.kv_rows, self.kv_rows)
        found = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), self.qkv.split(rows), strict=True))
        found["o_proj.weight"] = self.o
        if self.qkv_bias is not None and self.o_bias is not None:
            biases = self.qkv_bias.split(rows)
            found |= dict(zip(("q_proj.bias", "k_proj.bias", "v_proj.bias"), biases, strict=True))
            found["o_proj.bias"] = self.o_bias
        return found


class GatedMLP(nn.Module):
    """The weights around `gated_mlp`."""

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        super().__init__()
        self.parts = parts
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_up = empty_weight(2 * config.intermediate_size, config.hidden_size)
        self.down = empty_weight(config.hidden_size, config.intermediate_size)

    def forward(self, x: Float[Tensor, "T hidden"]) -> Float[Tensor, "T hidden"]:
        return self.parts.gated_mlp(x, self.gate_up, self.down, self.activation)

    def destinations(self) -> dict[str, Tensor]:
        gate, up = self.gate_up.chunk(2)
        return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": self.down}


def with_prefix(prefix: str, destinations: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prepend `prefix` to each name."""
    return {prefix + name: tensor for name, tensor in destinations.items()}
