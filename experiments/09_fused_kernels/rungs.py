"""The rungs of the ladder: ways to compute one decoder layer, each with the list of its kernels, and their costs.

To add a rung, append a `Rung` to `RUNGS`, and what its kernels cost to `kernel_costs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend, create_backend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import split_qkv
from mini_engine.models.linear import linear
from mini_engine.models.llama import LlamaLayer
from mini_engine.parts import Parts, default_parts
from mini_engine.roofline import Cost, ModelShape, decoder_layer_costs, elementwise_cost, linear_cost, norm_cost

PAGE_SIZE = 16


@dataclass
class Step:
    """A decode step over pages in random order.

    Attributes:
        backend: has planned the step.
        batch: the step.
        positions: of its tokens.
        slots: where their keys and values go.
    """

    backend: AttentionBackend
    batch: StepBatch
    positions: Tensor
    slots: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def layout(self) -> str:
        """Of a page."""
        return self.backend.cache.layout


Layer = Callable[[LlamaLayer, Tensor, Tensor, Tensor, Step], Tensor]  # layer, x, cos, sin, step -> x


@dataclass(frozen=True)
class Rung:
    """A way to compute one decoder layer.

    Attributes:
        name: what it adds to the rung before it.
        make: builds the function that computes a layer on a device.
        kernels: in the order in which they run, keys of `kernel_costs`: what is predicted from.
        num_early: how many of them start while the one before still runs, so that their launch takes no time.
        on_cpu: whether it runs on a CPU.
        most_tokens: of a step that it is written for.
    """

    name: str
    make: Callable[[torch.device], Layer]
    kernels: tuple[str, ...]
    num_early: int = 0
    on_cpu: bool = False
    most_tokens: int = 1 << 30


def make_step(
    model: CausalLM, backend: str, num_tokens: int, keys: int, device: torch.device, layout: str = "NHD"
) -> Step:
    """A step of one new token for each request, over random keys and values.

    Args:
        model: whose layers are computed.
        backend: of attention.
        num_tokens: requests.
        keys: of each, the new one included.
        device: where.
        layout: of a page.
    """
    pages_each = -(-keys // PAGE_SIZE)
    cache = PagedKVCache(model.attention_specs, num_tokens * pages_each, PAGE_SIZE, model.dtype, device, layout)
    for pair in cache.layers:
        for tensor in pair:
            tensor.normal_()
    batch = StepBatch.build(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        num_new=None,
        kv_lens=[keys] * num_tokens,
        pages=np.random.default_rng(0).permutation(num_tokens * pages_each),
        page_size=PAGE_SIZE,
        device=device,
    )
    planned = create_backend(backend, model.attention_specs, cache, Parts())
    planned.plan(batch)
    return Step(planned, batch, batch.positions, batch.slot_mapping)


# --- layers -----------------------------------------------------------------------------------------------------------


def separate_projections(device: torch.device) -> Layer:
    """PyTorch's operators, and each projection a product of its own: rows of the packed weights."""
    parts = Parts()

    def run(layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        attention, mlp, spec, eps = layer.attention, layer.mlp, layer.spec, layer.eps
        rows = [spec.num_qo_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        hidden = parts.rms_norm(x, layer.input_norm, eps)
        q, k, v = (
            linear(hidden, weight).unflatten(1, (-1, spec.head_dim)) for weight in attention.qkv.weight.split(rows)
        )
        q = parts.apply_rope(parts.rms_norm(q, attention.q_norm, eps), cos, sin)
        k = parts.apply_rope(parts.rms_norm(k, attention.k_norm, eps), cos, sin)
        x = x + linear(step.backend(spec.layer, q, k, v).flatten(1), attention.o.weight)
        hidden = parts.rms_norm(x, layer.mlp_norm, eps)
        gate, up = (linear(hidden, weight) for weight in mlp.gate_up.weight.chunk(2))
        return x + linear(mlp.activation(gate) * up, mlp.down.weight)

    return run


def packed_projections(parts: Parts) -> Layer:
    """One product for queries, keys and values, and one for gate and up; the rest by these parts."""

    def run(layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        attention, mlp, spec, eps = layer.attention, layer.mlp, layer.spec, layer.eps
        q_and_k, v = split_qkv(linear(parts.rms_norm(x, layer.input_norm, eps), attention.qkv.weight), spec)
        q_and_k = parts.qk_norm(q_and_k, attention.q_norm, attention.k_norm, spec.num_qo_heads, eps)
        q, k = parts.apply_rope(q_and_k, cos, sin).split((spec.num_qo_heads, spec.num_kv_heads), dim=1)
        x = x + linear(step.backend(spec.layer, q, k, v).flatten(1), attention.o.weight)
        hidden = parts.rms_norm(x, layer.mlp_norm, eps)
        return x + parts.gated_mlp(hidden, mlp.gate_up, mlp.down, mlp.activation)

    return run


def flashinfer_parts(device: torch.device) -> Layer:
    """FlashInfer's norms, rotation and activation."""
    return packed_projections(default_parts(device))


def rotated_and_appended(device: torch.device) -> Layer:
    """Besides, one kernel from the projection to attention."""
    from mini_engine.kernels.rotate_and_append import rotate_and_append

    parts = default_parts(device)

    def run(layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        attention, mlp, eps = layer.attention, layer.mlp, layer.eps
        qkv = linear(parts.rms_norm(x, layer.input_norm, eps), attention.qkv.weight)
        norms, pages = (attention.q_norm, attention.k_norm), step.backend.cache.layers[layer.spec.layer]
        q = rotate_and_append(qkv, norms, eps, cos, sin, pages, step.layout, step.slots)
        x = x + linear(step.backend.run(layer.spec.layer, q).flatten(1), attention.o.weight)
        hidden = parts.rms_norm(x, layer.mlp_norm, eps)
        return x + parts.gated_mlp(hidden, mlp.gate_up, mlp.down, mlp.activation)

    return run


def folded(device: torch.device, pdl: bool = False) -> Layer:
    """The norms, the activation and the residual inside the projections: six kernels."""
    from book.kernels.linear_residual import LinearResidual
    from book.kernels.norm_linear import norm_gate_up_silu, norm_linear
    from mini_engine.kernels.rotate_and_append import rotate_and_append

    add = LinearResidual(device)

    def run(layer: LlamaLayer, x: Tensor, cos: Tensor, sin: Tensor, step: Step) -> Tensor:
        attention, mlp, eps = layer.attention, layer.mlp, layer.eps
        qkv = norm_linear(x, layer.input_norm, eps, attention.qkv.weight, pdl=pdl)
        norms, pages = (attention.q_norm, attention.k_norm), step.backend.cache.layers[layer.spec.layer]
        q = rotate_and_append(qkv, norms, eps, cos, sin, pages, step.layout, step.slots)
        x = add(step.backend.run(layer.spec.layer, q).flatten(1), attention.o.weight, x, pdl=pdl)
        inner = norm_gate_up_silu(x, layer.mlp_norm, eps, mlp.gate_up.weight, pdl=pdl)
        return add(inner, mlp.down.weight, x, pdl=pdl)

    return run


def folded_and_early(device: torch.device) -> Layer:
    """The projections begin before the kernel in front of them has ended (programmatic dependent launch)."""
    return folded(device, pdl=torch.cuda.get_device_capability(device) >= (9, 0))


def compiled(device: torch.device) -> Layer:
    """`torch.compile` over PyTorch's operators."""
    from book.kernels.compiled import CompiledLayer

    layer = CompiledLayer()
    return lambda own, x, cos, sin, step: layer(own, x, cos, sin, step.backend)


ROPE = ("rope product",) * 4 + ("rope sum",) * 2  # of queries and keys together
TORCH_MLP = "norm", "gate_up", "silu", "multiply", "down", "residual"
FUSED_MLP = "norm", "gate_up", "silu+multiply", "down", "residual"
ATTENTION = "append", "attention", "o", "residual"
FOLDED = "norm+qkv", "rotate+append", "attention", "o+residual", "norm+gate_up+silu", "down+residual"
RUNGS = [
    Rung(
        "separate projections",
        separate_projections,
        (
            *("norm", "q", "k", "v", "q norm", "k norm"),
            *(f"{name} of {part}" for part in "qk" for name in ROPE),
            *ATTENTION,
            *("norm", "gate", "up", "silu", "multiply", "down", "residual"),
        ),
        on_cpu=True,
    ),
    Rung(
        "packed projections",
        lambda device: packed_projections(Parts()),
        ("norm", "qkv", "q norm", "k norm", "cat", *ROPE, *ATTENTION, *TORCH_MLP),
        on_cpu=True,
    ),
    Rung(
        "FlashInfer's norm, rotation, activation",
        flashinfer_parts,
        ("norm", "qkv", "q norm", "k norm", "rope", *ATTENTION, *FUSED_MLP),
    ),
    Rung(
        "rotate and append",
        rotated_and_appended,
        ("norm", "qkv", "rotate+append", "attention", "o", "residual", *FUSED_MLP),
    ),
    Rung("norm in the product", folded, FOLDED, most_tokens=64),
    Rung("and started early", folded_and_early, FOLDED, num_early=4, most_tokens=64),
    Rung(
        "torch.compile",
        compiled,
        ("norm", "qkv", "norm+rope", "append", "attention", "o", "residual+norm", "gate_up", "silu+multiply", "down",
         "residual"),
        on_cpu=True,
    ),
]  # fmt: skip


# --- costs ------------------------------------------------------------------------------------------------------------


def shape_of(config: ModelConfig) -> ModelShape:
    return ModelShape(
        config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads,
        config.head_dim, config.intermediate_size, config.vocab_size,
    )  # fmt: skip


def kernel_costs(shape: ModelShape, num_tokens: int, keys: int, size: int) -> dict[str, Cost]:
    """Cost of every kernel of a rung, by the name that the rungs use.

    Args:
        shape: of the model.
        num_tokens: requests with one new token each.
        keys: of each.
        size: bytes of a number.
    """
    known = decoder_layer_costs(shape, 1, keys, size, num_tokens)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tables = num_tokens * shape.head_dim * 4  # float32

    def rope_product(n: int) -> Cost:  # half of the heads in, float32 out
        return elementwise_cost(num_tokens * n // 2, 1, 1, size + 4, other_bytes=tables // 2)

    def rope_sum(n: int) -> Cost:
        return elementwise_cost(num_tokens * n // 2, 1, 1, 4 + 4 + size)

    def folded_product(name: str, extra: int) -> Cost:
        return known[name] + Cost(0, extra * size)

    return {
        "norm": known["input_norm"],
        "q": linear_cost(num_tokens, hidden, q, size),
        "k": linear_cost(num_tokens, hidden, kv, size),
        "v": linear_cost(num_tokens, hidden, kv, size),
        "qkv": known["qkv_proj"],
        "q norm": norm_cost(num_tokens, q, size),
        "k norm": norm_cost(num_tokens, kv, size),
        "cat": elementwise_cost(num_tokens * (q + kv), 0, 2, size),
        "rope product": rope_product(q + kv),
        "rope sum": rope_sum(q + kv),
        "rope product of q": rope_product(q),
        "rope sum of q": rope_sum(q),
        "rope product of k": rope_product(kv),
        "rope sum of k": rope_sum(kv),
        "rope": known["rope"],
        "norm+rope": known["rope"],
        "append": known["kv_append"],
        "rotate+append": elementwise_cost(num_tokens * (q + 2 * kv), 7, 2, size, other_bytes=tables),
        "attention": known["attention"],
        "o": known["o_proj"],
        "residual": known["mlp_residual"],
        "residual+norm": elementwise_cost(num_tokens * hidden, 5, 4, size),
        "gate": linear_cost(num_tokens, hidden, inner, size),
        "up": linear_cost(num_tokens, hidden, inner, size),
        "gate_up": known["gate_up_proj"],
        "silu": elementwise_cost(num_tokens * inner, 4, 2, size),
        "multiply": elementwise_cost(num_tokens * inner, 1, 3, size),
        "silu+multiply": known["activation"],
        "down": known["down_proj"],
        "norm+qkv": folded_product("qkv_proj", hidden),
        "o+residual": folded_product("o_proj", num_tokens * hidden),
        "norm+gate_up+silu": folded_product("gate_up_proj", hidden - num_tokens * inner),
        "down+residual": folded_product("down_proj", num_tokens * hidden),
    }


def least_cost(shape: ModelShape, num_tokens: int, keys: int, size: int) -> Cost:
    """Cost of a layer that is one kernel: what comes from memory is read once, and what stays is written once."""
    costs = decoder_layer_costs(shape, 1, keys, size, num_tokens)
    products = [costs[name] for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")]
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    weights = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner + 2 * hidden + 2 * shape.head_dim
    cached = 2 * num_tokens * keys * kv  # the new ones are written, all others read
    flops = sum(cost.flops for cost in products) + costs["attention"].flops
    return Cost(flops, (weights + cached + 2 * num_tokens * hidden) * size)
