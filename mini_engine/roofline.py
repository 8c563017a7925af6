"""The minimum cost of a computation: floating-point operations, bytes moved, and a lower bound on its run time.

A kernel needs at least flops / (FLOP rate) seconds and at least bytes / (memory bandwidth) seconds; the larger of the
two is a lower bound on its run time (Williams, Waterman and Patterson 2009). Every function below counts a multiply and
an add as 2 FLOPs, and one read of each input and one write of each output per kernel, regardless of caches. The FLOPs
of attention leave out softmax, exponentials and comparisons, as PyTorch's own counter does. Explained in chapter 01.
"""

from __future__ import annotations

import platform
import re
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mini_engine.models.linear import linear


@dataclass(frozen=True)
class Machine:
    """The two measured rates that bound every kernel on one device in one dtype.

    Attributes:
        name: a readable name of the device.
        dtype: the dtype of the matrix products, such as "bfloat16".
        bandwidth: bytes per second read from memory.
        flops: floating-point operations per second of a large matrix product.
    """

    name: str
    dtype: str
    bandwidth: float
    flops: float

    @property
    def ridge(self) -> float:
        """The arithmetic intensity at which the two bounds are equal: below it a kernel is memory-bandwidth-bound."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Cost:
    """The operations that a computation must do and the bytes that it must move. Costs add."""

    flops: int | float
    bytes: int | float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)

    @property
    def intensity(self) -> float:
        """The arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.bytes

    def seconds(self, machine: Machine) -> float:
        """Compute the lower bound on the run time."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)

    def is_memory_bound(self, machine: Machine) -> bool:
        return self.intensity < machine.ridge


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer that determine the cost of a step.

    Attributes:
        gated: whether the MLP has a gate. GPT-2's has none.
        window: keys that a query of a layer with a sliding window sees, its own included.
        windowed_layers: number of layers with a sliding window.
        num_experts: experts of a sparse layer.
        experts_per_token: how many of them compute a token.
        expert_size: intermediate size of an expert.
        sparse_layers: number of layers that have experts instead of a dense MLP.
        weight_bytes: bytes of a number of the weights, with its share of scales; None: as of all other numbers.
        kv_bytes: bytes of a number of the KV cache; None: as of all other numbers.
    """

    hidden_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated: bool = True
    window: int | None = None
    windowed_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    sparse_layers: int = 0
    weight_bytes: float | None = None
    kv_bytes: float | None = None


def linear_cost(
    num_tokens: int, in_features: int, out_features: int, dtype_bytes: int, weight_bytes: float | None = None
) -> Cost:
    """Compute the cost of `x @ W.T`, x `[tokens, in]`, W `[out, in]`: all tokens share one read of the weight.

    Args:
        num_tokens: rows of x.
        in_features: columns of x.
        out_features: columns of the result.
        dtype_bytes: bytes of a number of x and of the result.
        weight_bytes: bytes of a number of W; default `dtype_bytes`.
    """
    weight = out_features * in_features * (dtype_bytes if weight_bytes is None else weight_bytes)
    elements = num_tokens * in_features + num_tokens * out_features
    return Cost(2 * num_tokens * in_features * out_features, elements * dtype_bytes + weight)


def elementwise_cost(num_elements: int, flops: int, tensors: int, dtype_bytes: int, other_bytes: int = 0) -> Cost:
    """Compute the cost of an elementwise operation.

    Args:
        num_elements: elements of the result.
        flops: operations per element.
        tensors: number of tensors of this size that are read or written.
        dtype_bytes: bytes per element.
        other_bytes: bytes read in addition to these tensors.
    """
    return Cost(flops * num_elements, tensors * num_elements * dtype_bytes + other_bytes)


def norm_cost(num_tokens: int, hidden_size: int, dtype_bytes: int) -> Cost:
    """Compute the cost of RMSNorm: square, sum, scale and weight each element; read x and the weight, write once."""
    return elementwise_cost(num_tokens * hidden_size, 4, 2, dtype_bytes, other_bytes=hidden_size * dtype_bytes)


def visible_pairs(num_queries: int, num_keys: int, *, causal: bool = True, window: int | None = None) -> int:
    """Count the visible (query, key) pairs, where the queries belong to the last positions of the keys' sequence.

    Args:
        num_queries: queries of one sequence, at most `num_keys` if causal.
        num_keys: keys of that sequence.
        causal: False: every query attends to every key.
        window: number of keys that a query attends to, including its own; only with `causal`.
    """
    if not causal:
        return num_queries * num_keys
    # The first query attends to num_keys - num_queries + 1 keys, and each later one to one more.
    return sum(min(seen, window or seen) for seen in range(num_keys - num_queries + 1, num_keys + 1))


def attention_cost(
    num_queries: int,
    num_keys: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    *,
    causal: bool = True,
    window: int | None = None,
    materialized: bool = False,
    kv_bytes: float | None = None,
) -> Cost:
    """Compute the cost of attention of the last `num_queries` tokens of one sequence over its `num_keys` keys.

    FLOPs: one dot product and one weighted sum of head_dim components for each visible pair and query head, 4 D in all.
    Bytes: queries and output, keys and values, each once; with a window, only the keys that some query attends to.

    Args:
        materialized: the scores go through memory as in `masked_attention`: every pair, visible or not, is computed,
            and its float32 score is written and read twice (scores, then weights).
        kv_bytes: bytes of a number of the keys and values; default `dtype_bytes`.
    """
    pairs = visible_pairs(num_queries, num_keys, causal=causal and not materialized, window=window)
    keys_read = num_keys if window is None or materialized else min(num_keys, window + num_queries - 1)
    keys_and_values = 2 * keys_read * num_kv_heads * head_dim * (dtype_bytes if kv_bytes is None else kv_bytes)
    scores = 4 * 4 * pairs * num_qo_heads if materialized else 0
    queries_and_output = 2 * num_queries * num_qo_heads * head_dim * dtype_bytes
    return Cost(4 * pairs * num_qo_heads * head_dim, queries_and_output + keys_and_values + scores)


def experts_touched(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Compute the expected number of experts that at least one token has, if each token's are chosen at random.

    A token misses a given expert with probability 1 - k/E, and B tokens miss it with probability (1 - k/E)^B.
    """
    return num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)


def decoder_layer_costs(
    shape: ModelShape,
    num_tokens: int,
    kv_len: int,
    dtype_bytes: int,
    batch_size: int = 1,
    *,
    window: int | None = None,
) -> dict[str, Cost]:
    """Compute the cost of each operator of one dense decoder layer, in the order in which they run.

    Args:
        shape: the model.
        num_tokens: new tokens of each sequence: 1 in a decode step, the prompt in a prefill.
        kv_len: keys of each sequence after this step, including those of the new tokens.
        dtype_bytes: bytes per element of weights, activations and cache.
        batch_size: sequences in the step. They share the weights, but no keys or values.
        window: keys that a query sees, its own included; None: all.
    """
    of_attention = attention_costs(shape, num_tokens, kv_len, dtype_bytes, batch_size, window=window)
    return of_attention | mlp_costs(shape, batch_size * num_tokens, dtype_bytes)


def attention_costs(
    shape: ModelShape,
    num_tokens: int,
    kv_len: int,
    dtype_bytes: int,
    batch_size: int = 1,
    *,
    window: int | None = None,
) -> dict[str, Cost]:
    """Compute the cost of each operator of a layer up to its MLP; the arguments are those of `decoder_layer_costs`."""
    tokens, hidden = batch_size * num_tokens, shape.hidden_size
    q_size, kv_size = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    sine_bytes = tokens * shape.head_dim * 4  # float32, shared by all heads
    widths = dtype_bytes, shape.weight_bytes
    attention = attention_cost(num_tokens, kv_len, *heads, dtype_bytes, window=window, kv_bytes=shape.kv_bytes)
    return {
        "input_norm": norm_cost(tokens, hidden, dtype_bytes),
        "qkv_proj": linear_cost(tokens, hidden, q_size + 2 * kv_size, *widths),
        # Each pair of components: 4 multiplications, 2 additions.
        "rope": elementwise_cost(tokens * (q_size + kv_size), 3, 2, dtype_bytes, other_bytes=sine_bytes),
        "kv_append": elementwise_cost(2 * tokens * kv_size, 0, 2, dtype_bytes),
        "attention": attention * batch_size,
        "o_proj": linear_cost(tokens, q_size, hidden, *widths),
        "attention_residual": elementwise_cost(tokens * hidden, 1, 3, dtype_bytes),
    }


def mlp_costs(shape: ModelShape, tokens: int, dtype_bytes: int) -> dict[str, Cost]:
    """Compute the cost of each operator of a dense layer's MLP.

    Args:
        shape: the model.
        tokens: tokens of the step.
        dtype_bytes: see `decoder_layer_costs`.
    """
    hidden, inner, widths = shape.hidden_size, shape.intermediate_size, (dtype_bytes, shape.weight_bytes)
    return {
        "mlp_norm": norm_cost(tokens, hidden, dtype_bytes),
        "gate_up_proj": linear_cost(tokens, hidden, (1 + shape.gated) * inner, *widths),
        # act(gate) * up, an exponential counted as 1.
        "activation": elementwise_cost(tokens * inner, 5, 3, dtype_bytes),
        "down_proj": linear_cost(tokens, inner, hidden, *widths),
        "mlp_residual": elementwise_cost(tokens * hidden, 1, 3, dtype_bytes),
    }


def expert_costs(shape: ModelShape, tokens: int, dtype_bytes: int) -> dict[str, Cost]:
    """Compute the cost of each operator of a sparse layer's mixture of experts: a token has k experts.

    A step reads the weights of the experts that it is expected to touch, each of them once, and each token once.

    Args:
        shape: the model.
        tokens: tokens of the step.
        dtype_bytes: see `decoder_layer_costs`.
    """
    hidden, inner, pairs = shape.hidden_size, shape.expert_size, tokens * shape.experts_per_token
    touched = experts_touched(shape.num_experts, shape.experts_per_token, tokens)
    of_expert = hidden * inner * (dtype_bytes if shape.weight_bytes is None else shape.weight_bytes)
    return {
        "mlp_norm": norm_cost(tokens, hidden, dtype_bytes),
        "router": linear_cost(tokens, hidden, shape.num_experts, dtype_bytes, shape.weight_bytes),
        "gate_up_proj": Cost(
            2 * pairs * hidden * 2 * inner,
            (tokens * hidden + pairs * 2 * inner) * dtype_bytes + touched * 2 * of_expert,
        ),
        "activation": elementwise_cost(pairs * inner, 5, 3, dtype_bytes),
        "down_proj": Cost(2 * pairs * hidden * inner, pairs * (inner + hidden) * dtype_bytes + touched * of_expert),
        # A multiplication by its weight and an addition for each expert, and the addition to the residual stream.
        "mlp_residual": Cost((2 * pairs + tokens) * hidden, (pairs + 2 * tokens) * hidden * dtype_bytes),
    }


def model_step_cost(shape: ModelShape, num_tokens: int, kv_len: int, dtype_bytes: int, batch_size: int = 1) -> Cost:
    """Compute the cost of one step of the whole model, with logits for the last token of each sequence."""
    tokens = batch_size * num_tokens
    sizes = shape, num_tokens, kv_len, dtype_bytes, batch_size
    layers = Cost(0, 0)
    for costs, number in (
        (attention_costs(*sizes), shape.num_layers - shape.windowed_layers),
        (attention_costs(*sizes, window=shape.window), shape.windowed_layers),
        (mlp_costs(shape, tokens, dtype_bytes), shape.num_layers - shape.sparse_layers),
        (expert_costs(shape, tokens, dtype_bytes) if shape.sparse_layers else {}, shape.sparse_layers),
    ):
        layers += sum(costs.values(), Cost(0, 0)) * number
    embedding = elementwise_cost(tokens * shape.hidden_size, 0, 2, dtype_bytes)
    final_norm = norm_cost(batch_size, shape.hidden_size, dtype_bytes)
    lm_head = linear_cost(batch_size, shape.hidden_size, shape.vocab_size, dtype_bytes, shape.weight_bytes)
    return embedding + layers + final_norm + lm_head


def measure_machine(device: torch.device | str, dtype: torch.dtype) -> Machine:
    """Measure the two rates of `device`. Takes the best of several runs, so that no later run beats the bound.

    Bandwidth: summing a buffer many times larger than any cache, a pure read. (The buffer is written first: memory
    that was never written reads as one shared page of zeros, from the cache.) FLOPs: a large square matrix product, in
    the layout that is fastest there.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    buffer = torch.ones(2**29 if on_gpu else 2**26, dtype=torch.float32, device=device)  # 2 GiB, or 256 MiB
    bandwidth = buffer.nbytes / _best_seconds(buffer.sum, device)
    side = 8192 if on_gpu else 1024
    # Random numbers: a GPU multiplies zeros and ones with less power, and therefore faster, than real data.
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    flops = 2 * side**3 / _best_seconds(lambda: linear(a, b), device)
    return Machine(device_name(device), str(dtype).removeprefix("torch."), bandwidth, flops)


def device_name(device: torch.device | str) -> str:
    """Return a readable name: the GPU's, or the processor's with the number of threads that PyTorch uses."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    threads = torch.get_num_threads()
    return f"{short_name(model)}, {threads} thread{'s' if threads != 1 else ''}"


def short_name(processor: str) -> str:
    """Return a processor's name without trademarks and clock rate: "Intel Xeon", not "Intel(R) Xeon(R) @ 2.80GHz"."""
    return re.sub(r"\((R|TM)\)| (CPU|Processor)\b| @.*", "", processor)


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    run()
    if device.type == "cpu":  # other programs use it, too, so the best needs more runs
        return min(timeit.repeat(run, number=1, repeat=30))
    times = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return min(times)
