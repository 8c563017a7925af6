"""Mixture of experts (Shazeer et al. 2017) in place of a layer's MLP: a router chooses a few of many MLPs per token.

A token is computed by k of E experts, so a layer has E / k times the weights that it multiplies a token by. The pairs
(token, expert) are sorted by expert, so each expert multiplies all its tokens at once (a grouped matmul: Gale et al.
2023, MegaBlocks). The matrices of all experts are stacked, in the order gate, up as in a dense MLP. Explained in
chapter 15.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine import ops
from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ACTIVATIONS, ModelConfig, MoEConfig
from mini_engine.models.layers import LAYERS, MLP, GatedMLP, ModelParts, with_prefix
from mini_engine.models.linear import linear
from mini_engine.models.llama import PreNormLayer
from mini_engine.models.weights import Destination, Linear, empty_weight

Multiply = Callable[[Tensor, Tensor], Tensor]  # tokens `[T, In]` and a matrix `[Out, In]` to `[T, Out]`


def route(logits: Float[Tensor, "T E"], moe: MoEConfig) -> tuple[Float[Tensor, "T k"], Int[Tensor, "T k"]]:
    """Choose the experts of each token: those with the k largest logits, and of equal ones the first.

    In bfloat16 equal logits are common. Kernels that round them elsewhere may choose other experts.

    Args:
        logits: the router's.
        moe: how many experts to choose, and how to scale their weights.

    Returns:
        The weight of each chosen expert, in float32 (float64 for float64), and its index, the largest logit first. The
        weights are the softmax over all experts, or over the chosen ones with `norm_topk_prob`, times
        `routed_scaling_factor`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = wide.sort(dim=1, descending=True, stable=True).indices[:, : moe.num_experts_per_tok]
    weights = wide.softmax(dim=1).gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights * moe.routed_scaling_factor, experts


def grouped_linear(
    x: Float[Tensor, "P In"], weight: Float[Tensor, "E Out In"], ends: Int[Tensor, " E"], multiply: Multiply = linear
) -> Float[Tensor, "P Out"]:
    """Multiply rows that are sorted by expert, each by the matrix of its expert.

    In bfloat16 on a GPU, it is one call of torch's grouped matmul, which reads `ends` on the device.

    Args:
        x: the rows.
        weight: one matrix for each expert.
        ends: for each expert, the number of rows up to its last one.
        multiply: multiplies the rows of one expert, elsewhere.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    out, first = x.new_empty(len(x), weight.shape[1]), 0
    for expert, last in enumerate(ends.tolist()):
        if first < last:
            out[first:last] = multiply(x[first:last], weight[expert])
        first = last
    return out


@ops.with_kernel
def mix_experts(
    x: Float[Tensor, "T hidden"],
    logits: Float[Tensor, "T E"],
    gate_up: Float[Tensor, "E I2 hidden"],
    down: Float[Tensor, "E hidden I"],
    moe: MoEConfig,
    activation: Callable[[Tensor], Tensor],
    multiply: Multiply = linear,
) -> Float[Tensor, "T hidden"]:
    """Compute the weighted sum of each token's experts, each of them a gated MLP.

    Args:
        x: the tokens.
        logits: the router's.
        gate_up: for each expert the gate's I rows, then the up projection's.
        down: for each expert the projection back to `hidden`.
        moe: see `route`.
        activation: the nonlinearity on the gate.
        multiply: see `grouped_linear`.

    Returns:
        One row for each token, in the dtype of `x`; weights and sums are in float32 (float64 for float64).
    """
    weights, experts = route(logits, moe)
    by_expert, order = experts.flatten().sort(stable=True)  # pairs: token 0's k experts, token 1's, ...
    ends = torch.searchsorted(by_expert, torch.arange(moe.num_experts, device=x.device), right=True)
    tokens = x[order // moe.num_experts_per_tok]
    gate, up = grouped_linear(tokens, gate_up, ends, multiply).chunk(2, dim=1)
    outputs = grouped_linear(activation(gate) * up, down, ends, multiply)
    of_pairs = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*experts.shape, x.shape[1])
    return (of_pairs * weights[:, :, None]).sum(dim=1).to(x.dtype)


class MoE(MLP):
    """The mixture of experts of a layer: the router, and the stacked matrices of `mix_experts`.

    The shared experts of DeepSeek's models compute every token (Dai et al. 2024, "DeepSeekMoE"), so together they are
    one dense MLP.
    """

    def __init__(self, config: ModelConfig, layer: int, parts: ModelParts) -> None:
        super().__init__()
        assert config.moe is not None, "a sparse layer needs the sizes of its experts"
        self.moe, self.activation = config.moe, ACTIVATIONS[config.hidden_act]
        self.multiply: Multiply = linear
        experts, inner, hidden = config.moe.num_experts, config.moe.moe_intermediate_size, config.hidden_size
        self.router = Linear(hidden, {"gate": experts})
        self.gate_up = empty_weight(experts, 2 * inner, hidden)
        self.down = empty_weight(experts, hidden, inner)
        shared = replace(config, intermediate_size=config.moe.shared_intermediate_size)
        self.shared = GatedMLP(shared, layer, parts) if config.moe.shared_intermediate_size else None

    @property
    def input_matrices(self) -> tuple[Tensor, ...]:
        return self.router.weight, self.gate_up

    def forward(self, x: Float[Tensor, "T hidden"]) -> Float[Tensor, "T hidden"]:
        out = mix_experts(x, self.router(x), self.gate_up, self.down, self.moe, self.activation, self.multiply)
        return out if self.shared is None else out + self.shared(x)

    def destinations(self) -> dict[str, Destination]:
        found = self._dense_destinations()
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            matrices: dict[str, Destination] = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            found |= {f"experts.{index}.{name}.weight": matrix for name, matrix in matrices.items()}
        return found

    def stacked(self) -> dict[str, Destination]:
        """Return `destinations` for a checkpoint whose matrices are stacked, as transformers 5 holds them in memory."""
        stacked: dict[str, Destination] = {"experts.gate_up_proj": self.gate_up, "experts.down_proj": self.down}
        return self._dense_destinations() | stacked

    def _dense_destinations(self) -> dict[str, Destination]:
        """Return the destinations of the matrices that compute every token."""
        shared = {} if self.shared is None else self.shared.destinations()
        return self.router.destinations() | with_prefix("shared_experts.", shared)


class MoELayer(PreNormLayer):
    """A layer whose MLP is a mixture of experts."""

    mlp: MoE

    def __init__(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> None:
        super().__init__(config, spec, parts)
        self.mlp = MoE(config, spec.layer, parts)


def moe_destinations(model: CausalLM, names: Container[str]) -> dict[str, Destination]:
    """Return a model's destinations for a checkpoint with these names, whose experts may be stacked."""
    found = model.destinations()
    for index, layer in enumerate(model.layers):
        prefix = f"{LAYERS}.{index}.mlp."
        if isinstance(layer, MoELayer):
            single, stacked = (with_prefix(prefix, own) for own in (layer.mlp.destinations(), layer.mlp.stacked()))
            if any(name in names for name in stacked.keys() - single.keys()):
                found = {name: filled for name, filled in found.items() if name not in single} | stacked
    return found
