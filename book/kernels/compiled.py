"""A decoder layer compiled by `torch.compile`: everything before attention, and everything after it.

The compiler (Ansel et al. 2024) fuses the elementwise operations between two matrix products into one kernel: norms,
rotation, activation and additions. The products themselves are still computed by cuBLAS, and a norm is not fused into
the product after it, because its sum runs over the whole row. So a layer consists of four products and one or two
kernels between them. Fusing two operations saves a launch and, in 16-bit dtypes, the 4 bytes per token and element that
would be written and read between them.

`attend` stays outside the graphs: its metadata changes in every step, and the compiler cannot trace it.

By default a graph is compiled for the shapes of its first call. Here the number of tokens is symbolic (`dynamic=True`),
and the shapes of the weights are constants, as for all parameters. The weights are arguments, so all layers of a model
share the graphs. Two graphs are enough for all numbers of tokens. torch treats a size of 1 as a constant, because it
broadcasts, so the decode of one request has its own graph; all other numbers of tokens share the second graph.

A graph also has guards on the mode in which its inputs were created. The engine creates all tensors of a step in
`torch.inference_mode()`; mixing modes would compile everything twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.spec import Attend
from mini_engine.models.llama import LlamaLayer
from mini_engine.models.qwen3 import Qwen3Attention


class Kind(NamedTuple):
    """The constants of a graph, besides the shapes of the weights."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: Callable[[Tensor], Tensor]


class CompiledLayer:
    """`models.llama.decoder_layer` as two compiled graphs with `attend` between them, for Llama and Qwen3.

    They compute norms, rotation and gated MLP themselves, so none of the layer's parts is called.
    """

    def __init__(self) -> None:
        self._graphs: dict[Kind, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def __call__(
        self,
        layer: LlamaLayer,
        x: Float[Tensor, "T hidden"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        attend: Attend,
    ) -> Float[Tensor, "T hidden"]:
        """Compute a layer; the arguments are the same as for `decoder_layer`."""
        attention, mlp, spec = layer.attention, layer.mlp, layer.spec
        kind = Kind(spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, layer.eps, mlp.activation)
        if kind not in self._graphs:
            self._graphs[kind] = (
                torch.compile(before_attention(kind), dynamic=True, fullgraph=True),
                torch.compile(after_attention(kind), dynamic=True, fullgraph=True),
            )
        before, after = self._graphs[kind]
        norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else None
        q, k, v = before(x, cos, sin, layer.input_norm, attention.qkv.weight, attention.qkv.bias, norms)
        return after(
            x,
            attend(spec.layer, q, k, v).flatten(1),
            attention.o.weight,
            attention.o.bias,
            layer.mlp_norm,
            mlp.gate_up.weight,
            mlp.down.weight,
        )


def before_attention(kind: Kind) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a function from the residual stream to queries, keys and values: norm, projection, QK-norm, rotation.

    The compiler cannot trace a type checker's wrapper, so no function that it traces has or calls one.
    """

    @no_type_check
    def run(x, cos, sin, norm, qkv_weight, qkv_bias, qk_norms):
        num_rotated = kind.num_qo_heads + kind.num_kv_heads
        qkv = F.linear(F.rms_norm(x, norm.shape, norm, kind.eps), qkv_weight, qkv_bias)
        heads = qkv.view(-1, num_rotated + kind.num_kv_heads, kind.head_dim)
        q, k, v = heads.split((kind.num_qo_heads, kind.num_kv_heads, kind.num_kv_heads), dim=1)
        if qk_norms is not None:
            q, k = (
                F.rms_norm(part, weight.shape, weight, kind.eps) for part, weight in zip((q, k), qk_norms, strict=True)
            )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    @no_type_check
    def rotate(heads, cos, sin):
        (a, b), cos, sin = heads.chunk(2, dim=-1), cos[:, None, :], sin[:, None, :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(heads.dtype)

    return run


def after_attention(kind: Kind) -> Callable[..., Tensor]:
    """Return a function from the output of attention to the residual stream after the layer, MLP included."""

    @no_type_check
    def run(x, attended, o_weight, o_bias, norm, gate_up_weight, down_weight):
        x = x + F.linear(attended, o_weight, o_bias)
        gate, up = F.linear(F.rms_norm(x, norm.shape, norm, kind.eps), gate_up_weight).chunk(2, dim=-1)
        return x + F.linear(kind.activation(gate) * up, down_weight)

    return run
