"""Building blocks of the model families: norm, gated MLP, and attention around `attend`.

The batch is ragged: `x` is `[T, hidden]`, the tokens of all sequences of a step, laid end to end. A model does not know
where a sequence begins or how its keys are stored. It gets positions and `attend` as arguments.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.models.config import ACTIVATIONS, ModelConfig
from mini_engine.models.weights import Destination, projection

LAYERS = "model.layers"  # what the checkpoints of all families but GPT-2 call them


@runtime_checkable
class ModelParts(Protocol):
    """The parts of the engine that a model calls; `mini_engine.parts.Parts` has them all."""

    def rms_norm(self, *args: Any) -> Tensor: ...
    def qk_norm(self, *args: Any) -> Tensor: ...
    def gated_mlp(self, *args: Any) -> Tensor: ...
    def decoder_layer(self, *args: Any) -> Tensor: ...
    def apply_rope(self, *args: Any, interleaved: bool = False) -> Tensor: ...
    def gpt2_weights(self, *args: Any) -> dict[str, Tensor]: ...


def rms_norm(x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*batch D"]:
    """Scale each row to a root mean square of one, then by `weight` (Zhang and Sennrich 2019, eq. 4).

    Args:
        x: one row for each token (and head).
        weight: one factor for each column, in the dtype of `x` or a wider one.
        eps: added to the mean square, so that the result for a row of zeros is finite.

    Returns:
        The rows in the dtype of `x`, computed in float32 (float64 for float64).
    """
    if x.dtype == weight.dtype:  # even a conversion that does nothing costs host time on a GPU
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def qk_norm(
    q_and_k: Float[Tensor, "T QK D"],
    q_weight: Float[Tensor, " D"],
    k_weight: Float[Tensor, " D"],
    num_qo_heads: int,
    eps: float,
) -> Float[Tensor, "T QK D"]:
    """Normalize each head of the queries and keys of every token by `rms_norm` (QK-norm, Dehghani et al. 2023).

    Args:
        q_and_k: queries, then keys.
        q_weight: one factor for each number of a head of the queries.
        k_weight: one factor for each number of a head of the keys.
        num_qo_heads: number of query heads.
        eps: as for `rms_norm`.

    Returns:
        A new tensor with queries and keys together, because rotating them in one call is cheaper.
    """
    q, k = q_and_k.split((num_qo_heads, q_and_k.shape[1] - num_qo_heads), dim=1)
    return torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)), dim=1)


def gated_mlp(
    x: Float[Tensor, "T hidden"],
    gate_up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Float[Tensor, "T hidden"]:
    """Compute `down(activation(gate(x)) * up(x))`: SwiGLU with SiLU, GeGLU with GELU (Shazeer 2020).

    Args:
        x: the tokens.
        gate_up: projects `[T, hidden]` to `[T, 2 I]`: the gate's `I` numbers of a token, then the up projection's. One
            matrix product computes both. How the matrix is stored is left to the projection.
        down: projects `[T, I]` back to `[T, hidden]`.
        activation: the nonlinearity on the gate.

    Returns:
        One row for each token, in the dtype of `x`.
    """
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(activation(gate) * up)


def attention_spec(config: ModelConfig, layer: int, scale: float) -> AttentionSpec:
    """Describe the attention of one layer. Only a layer of type `sliding_attention` has a window."""
    is_sliding = config.layer_types[layer] == "sliding_attention"
    return AttentionSpec(
        layer=layer,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=scale,
        window=config.sliding_window if is_sliding else None,
        softcap=config.attn_logit_softcapping,
        rope=config.rope_local if is_sliding and config.rope_local else config.rope,
        mla=config.mla,
    )


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
    num_rotated = spec.num_qo_heads + spec.num_kv_heads
    return heads.narrow(1, 0, num_rotated), heads.narrow(1, num_rotated, spec.num_kv_heads)


class DecoderLayer(nn.Module):
    """One layer of a model. A family adds the weights and a `forward`."""

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        self.spec, self.parts, self.eps = spec, parts, config.norm_eps

    @abstractmethod
    def destinations(self) -> dict[str, Destination]:
        """Map the checkpoint name of each tensor of the layer to what it fills."""


class Attention(nn.Module):
    """Projects to queries, keys and values, rotates queries and keys, attends, and projects back."""

    output_bias = True  # the last projection has a bias if the others have; Qwen2's has none

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__()
        self.spec, self.parts, hidden, bias = spec, parts, config.hidden_size, config.attention_bias
        q_rows, kv_rows = spec.num_qo_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        formats, prefix = config.formats, f"{LAYERS}.{spec.layer}.self_attn."
        self.qkv = projection(formats, prefix, hidden, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, bias)
        self.o = projection(formats, prefix, q_rows, {"o_proj": hidden}, bias and self.output_bias)

    def prepare(self, q_and_k: Float[Tensor, "T QK D"]) -> Float[Tensor, "T QK D"]:
        """Change the heads of queries and keys before they are rotated; Llama does nothing."""
        return q_and_k

    def forward(
        self, x: Float[Tensor, "T hidden"], cos: Float[Tensor, "T half"], sin: Float[Tensor, "T half"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        spec = self.spec
        q_and_k, v = split_qkv(self.qkv(x), spec)
        q_and_k = self.parts.apply_rope(self.prepare(q_and_k), cos, sin)
        q, k = q_and_k.narrow(1, 0, spec.num_qo_heads), q_and_k.narrow(1, spec.num_qo_heads, spec.num_kv_heads)
        return self.o(attend(spec.layer, q, k, v).flatten(1))

    def destinations(self) -> dict[str, Destination]:
        return self.qkv.destinations() | self.o.destinations()


class MLP(nn.Module):
    """What a layer computes after attention: a `GatedMLP`, or a mixture of experts."""

    @property
    @abstractmethod
    def input_matrices(self) -> tuple[Tensor, ...]:
        """The matrices that multiply its input, whose last dimension is `hidden`; none may be quantized."""

    @abstractmethod
    def destinations(self) -> dict[str, Destination]:
        """Map the checkpoint name of each of its tensors to what it fills."""


class GatedMLP(MLP):
    """The MLP of a layer: the projections of `gated_mlp`."""

    def __init__(self, config: ModelConfig, layer: int, parts: ModelParts) -> None:
        super().__init__()
        self.parts, self.activation = parts, ACTIVATIONS[config.hidden_act]
        hidden, inner, prefix = config.hidden_size, config.intermediate_size, f"{LAYERS}.{layer}.mlp."
        self.gate_up = projection(config.formats, prefix, hidden, {"gate_proj": inner, "up_proj": inner})
        self.down = projection(config.formats, prefix, inner, {"down_proj": hidden})

    def forward(self, x: Float[Tensor, "T hidden"]) -> Float[Tensor, "T hidden"]:
        return self.parts.gated_mlp(x, self.gate_up, self.down, self.activation)

    @property
    def input_matrices(self) -> tuple[Tensor, ...]:
        return (self.gate_up.weight,)

    def destinations(self) -> dict[str, Destination]:
        return self.gate_up.destinations() | self.down.destinations()


def with_prefix(prefix: str, destinations: Mapping[str, Destination]) -> dict[str, Destination]:
    """Prepend `prefix` to each name."""
    return {prefix + name: tensor for name, tensor in destinations.items()}
