"""Measure a machine's two rates, then every operator of a decoder layer beside the time those rates allow.

    python experiments/00_roofline/run.py [--device cpu|cuda] [--out DIR]
    python experiments/00_roofline/run.py --predict

On a GPU the layer is Qwen3-0.6B's in bfloat16, on a CPU SmolLM2-135M's in float32. The result goes to
experiments/00_roofline/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, faster, graph_of, predicted, record
from book.units import quantity
from mini_engine.attention.naive import attention_mask, sdpa_attention
from mini_engine.models.linear import linear
from mini_engine.roofline import Cost, Machine, ModelShape, decoder_layer_costs, linear_cost, measure_machine
from mini_engine.rope import RopeConfig, apply_rope, inverse_frequencies, rope_tables

SMOLLM2_135M = ModelShape(576, 30, 9, 3, 64, 1536, 49152)
QWEN3_0_6B = ModelShape(1024, 28, 16, 8, 128, 3072, 151_936)
RUNS = 15  # of each operator in a round
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """One kind of step: `batch_size` sequences of `num_tokens` new tokens each, `kv_len` keys after the step."""

    name: str
    batch_size: int
    num_tokens: int
    kv_len: int


@dataclass(frozen=True)
class Setting:
    """What is measured on one kind of device."""

    shape: ModelShape
    model: str
    dtype: torch.dtype
    cases: tuple[Case, ...]
    rotate_bytes: int  # operands rotate through this much memory, so that none waits in a cache


CPU = Setting(
    SMOLLM2_135M,
    "SmolLM2-135M",
    torch.float32,
    (Case("prefill", 1, 256, 256), Case("decode", 1, 1, 512), Case("decode", 8, 1, 512)),
    2**28,
)
GPU = Setting(
    QWEN3_0_6B,
    "Qwen3-0.6B",
    torch.bfloat16,
    (Case("prefill", 1, 2048, 2048), Case("decode", 1, 1, 2048), Case("decode", 64, 1, 2048)),
    2**29,
)

Operator = Callable[[], object]


def operators(setting: Setting, case: Case, device: torch.device) -> dict[str, Callable[[], Operator]]:
    """For every operator of a layer, and the output projection: how to make one call of it on operands of its own.

    The names are those of `decoder_layer_costs`.
    """
    shape, tokens = setting.shape, case.batch_size * case.num_tokens
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    num_qo_heads, num_kv_heads = shape.num_qo_heads, shape.num_kv_heads

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(setting.dtype)

    def projection(inputs: int, outputs: int, rows: int = tokens) -> Callable[[], Operator]:
        def make() -> Operator:
            x, weight = tensor(rows, inputs), tensor(outputs, inputs)
            return lambda: linear(x, weight)

        return make

    def norm() -> Operator:
        x, weight = tensor(tokens, hidden), tensor(hidden)
        return lambda: F.rms_norm(x, (hidden,), weight, 1e-6)

    def add() -> Operator:
        x, y = tensor(tokens, hidden), tensor(tokens, hidden)
        return lambda: x + y

    def rope() -> Operator:
        x = tensor(tokens, num_qo_heads + num_kv_heads, head_dim)
        positions = torch.arange(case.kv_len - case.num_tokens, case.kv_len).repeat(case.batch_size)
        cos, sin = (t.to(device) for t in rope_tables(positions, inverse_frequencies(RopeConfig(1e6, head_dim))))
        return lambda: apply_rope(x, cos, sin)

    def kv_append() -> Operator:
        caches = [tensor(case.kv_len, num_kv_heads, head_dim) for _ in range(2)]
        new = [tensor(tokens, num_kv_heads, head_dim) for _ in range(2)]
        slots = torch.randperm(case.kv_len, device=device)[:tokens]
        return lambda: [cache.index_copy_(0, slots, x) for cache, x in zip(caches, new, strict=True)]

    def attention() -> Operator:
        scale = head_dim**-0.5
        if case.batch_size == 1:
            q = tensor(case.num_tokens, num_qo_heads, head_dim)
            k, v = (tensor(case.kv_len, num_kv_heads, head_dim) for _ in range(2))
            if case.num_tokens == 1:
                return lambda: sdpa_attention(q, k, v, scale=scale)
            if device.type == "cpu":
                positions = torch.arange(case.kv_len)
                mask = attention_mask(positions[-case.num_tokens :], positions)
                return lambda: sdpa_attention(q, k, v, scale=scale, mask=mask)
            qh, kh, vh = (x.transpose(0, 1)[None] for x in (q, k, v))
            # A mask in memory would rule out the fastest kernel.
            return lambda: F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, scale=scale, enable_gqa=True)
        # A batch of equal lengths: the query heads of a group are the queries of their key head.
        q = tensor(case.batch_size, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
        k, v = (tensor(case.batch_size, num_kv_heads, case.kv_len, head_dim) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(q, k, v, scale=scale)

    def activation() -> Operator:
        gate_up = tensor(tokens, 2 * inner)
        return lambda: F.silu(gate_up[:, :inner]) * gate_up[:, inner:]

    q_size, kv_size = num_qo_heads * head_dim, num_kv_heads * head_dim
    return {
        "input_norm": norm,
        "qkv_proj": projection(hidden, q_size + 2 * kv_size),
        "rope": rope,
        "kv_append": kv_append,
        "attention": attention,
        "o_proj": projection(q_size, hidden),
        "attention_residual": add,
        "mlp_norm": norm,
        "gate_up_proj": projection(hidden, 2 * inner),
        "activation": activation,
        "down_proj": projection(inner, hidden),
        "mlp_residual": add,
        "lm_head": projection(hidden, shape.vocab_size, rows=case.batch_size),
    }


def seconds_per_call(calls: list[Operator], device: torch.device) -> float:
    """Time of one call when the calls of a list run one after the other: the fastest of RUNS, as for the machine."""
    run = graph_of(calls) if device.type == "cuda" else lambda: [call() for call in calls]
    run()
    times = []
    for _ in range(RUNS):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return min(times) / len(calls)


def rotating(make: Callable[[], Operator], cost: Cost, rotate_bytes: int) -> list[Operator]:
    """Calls on as many sets of operands as fill `rotate_bytes`, at most 64.

    64 sets of the smallest operators fit in a cache: there their operands wait in a model too, just written.
    """
    copies = min(64, max(1, -(-rotate_bytes // round(cost.bytes))))
    calls = [make() for _ in range(copies)]
    return calls * max(1, 16 // copies)


def machine_rows(machines: list[Machine]) -> list[results.Row]:
    source = "this is the bound of the others"
    rates = [results.Row("matrix product", m.flops, "FLOP/s", None, source, {"dtype": m.dtype}) for m in machines]
    return [results.Row("memory read", machines[0].bandwidth, "B/s", None, source), *rates]


@dataclass(frozen=True)
class Timed:
    """One operator in one case: what it must do, and the time it took."""

    name: str
    case: Case
    cost: Cost
    seconds: float


def time_operators(setting: Setting, device: torch.device) -> list[Timed]:
    """Every operator of a layer, and the output projection, in every case."""
    shape, size = setting.shape, setting.dtype.itemsize
    timed = []
    for case in setting.cases:
        makers = operators(setting, case, device)
        costs = decoder_layer_costs(shape, case.num_tokens, case.kv_len, size, batch_size=case.batch_size)
        costs |= {"lm_head": linear_cost(case.batch_size, shape.hidden_size, shape.vocab_size, size)}
        for name, cost in costs.items():
            seconds = seconds_per_call(rotating(makers[name], cost, setting.rotate_bytes), device)
            timed.append(Timed(name, case, cost, seconds))
    return timed


def operator_rows(timed: list[Timed], machine: Machine) -> list[results.Row]:
    """Every operator beside its bound, and after each case their sum over a layer."""
    rows = []
    for case in dict.fromkeys(own.case for own in timed):
        labels: dict[str, results.Setting] = {"step": case.name, "batch": case.batch_size}
        labels |= {"tokens": case.num_tokens, "keys": case.kv_len}
        of_case = [own for own in timed if own.case == case]
        for own in of_case:
            source = "bytes / bandwidth" if own.cost.is_memory_bound(machine) else "FLOPs / FLOP rate"
            rows.append(results.Row(own.name, own.seconds, "s", own.cost.seconds(machine), source, labels))
        in_layer = [own for own in of_case if own.name != "lm_head"]
        seconds, bound = sum(own.seconds for own in in_layer), sum(own.cost.seconds(machine) for own in in_layer)
        rows.append(results.Row("layer", seconds, "s", bound, "sum of its operators' bounds", labels))
    return rows


# --- prediction -------------------------------------------------------------------------------------------------------

ASSUMED = Machine("a CPU", "float32", bandwidth=50e9, flops=200e9)  # what the prediction was made for
PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def layer_costs(case: Case, num_tokens: int) -> dict[str, Cost]:
    """The costs of the CPU's layer in a case, but with that many new tokens of each sequence.

    With none, what is left of the products' bytes is the weights, and of attention's bytes the keys and values.
    """
    return decoder_layer_costs(CPU.shape, num_tokens, case.kv_len, CPU.dtype.itemsize, batch_size=case.batch_size)


def total(costs: dict[str, Cost], names: Iterable[str]) -> Cost:
    """Add up the costs of some operators."""
    return sum((costs[name] for name in names), Cost(0, 0))


def predictions() -> str:
    """Derive what the README predicts for the CPU's three steps."""
    prefill, one, eight = CPU.cases
    costs = layer_costs(prefill, prefill.num_tokens)
    products, small = total(costs, PRODUCTS), costs.keys() - {*PRODUCTS, "attention"}
    decode = total(layer_costs(one, one.num_tokens), PRODUCTS)
    weights = total(layer_costs(one, 0), PRODUCTS)
    keys, keys_of_eight = (layer_costs(case, 0)["attention"] for case in (one, eight))
    seconds, seconds_of_eight = ((weights + own).seconds(ASSUMED) for own in (keys, keys_of_eight))
    return predicted(
        {
            f"prefill: {len(PRODUCTS)} products": f"{products.flops / 1e9:.1f} GFLOP on {quantity(weights.bytes, 'B')} "
            f"of weights, {1e3 * products.seconds(ASSUMED):.1f} ms",
            "prefill: attention": f"{costs['attention'].flops / products.flops:.1%} of the products' FLOPs",
            f"prefill: {len(small)} small operators": "bytes that take "
            f"{1e3 * total(costs, small).bytes / ASSUMED.bandwidth:.2f} ms",
            "decode: products": f"{decode.flops / 1e6:.0f} MFLOP",
            "decode: weights, keys and values": f"{1e3 * seconds:.3f} ms, "
            f"{keys.bytes / (weights + keys).bytes:.1%} of it for the keys and values of {one.kv_len} tokens",
            f"decode of {eight.batch_size}": f"{1e3 * seconds_of_eight:.3f} ms, "
            f"{seconds_of_eight / seconds:.1f} times one",
        }
    )


def main() -> None:
    arguments = command_line(__doc__, predictions).parse_args()
    device = torch.device(arguments.device)
    setting = GPU if device.type == "cuda" else CPU
    torch.manual_seed(0)
    dtypes = [setting.dtype, *({torch.float32, torch.bfloat16} - {setting.dtype})]
    machines = [measure_machine(device, dtype) for dtype in dtypes]
    # glibc's malloc returns large blocks to the system on every free, and the next one is cleared page by page. Freeing
    # one block of 31 MiB raises the threshold: operators reuse memory, as in a program that has run for a while.
    torch.empty(31 * 2**20, dtype=torch.uint8)
    with torch.inference_mode():
        one = torch.ones(1, device=device)
        rounds = []
        for _ in range(ROUNDS):
            floor = seconds_per_call([lambda: one + one] * 64, device)
            rounds.append((floor, time_operators(setting, device)))
            machines = [
                faster(own, measure_machine(device, dtype)) for own, dtype in zip(machines, dtypes, strict=True)
            ]
    calling = "nothing to move: what calling an operator costs"
    measured = results.median_rows(
        [
            [results.Row("one addition", floor, "s", None, calling), *operator_rows(timed, machines[0])]
            for floor, timed in rounds
        ]
    )
    rows = [*machine_rows(machines), *measured]
    dtype = str(setting.dtype).removeprefix("torch.")
    result = results.new_result("00_roofline", rows, {"model": setting.model, "dtype": dtype}, arguments.device)
    record(result, arguments.out, {"layer", "memory read", "matrix product"})


if __name__ == "__main__":
    main()
