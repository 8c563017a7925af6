"""One decoder layer, fused step by step: the ladder, a decode step kernel by kernel, memory layouts, tiles, products.

    python experiments/09_fused_kernels/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/09_fused_kernels/run.py --predict

On a GPU the layers have Qwen3-0.6B's shape, in bfloat16 with random weights. On a CPU a tiny model in float32 shows
that the script works. --predict prints the README's tables. The result goes to
experiments/09_fused_kernels/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from rungs import RUNGS, Layer, Rung, Step, kernel_costs, least_cost, make_step, shape_of

from book import results
from book.display import Table
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, random_model
from book.units import quantity
from mini_engine.attention.backend import create_backend
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.linear import linear
from mini_engine.parts import Parts
from mini_engine.roofline import Cost, Machine, linear_cost, measure_machine
from mini_engine.rope import rope_tables

if TYPE_CHECKING:  # Triton is on GPU machines only
    from book.kernels.tiles import Tile

EXPERIMENT = "09_fused_kernels"
SECTIONS = LADDER, KERNELS, LAYOUTS, TILES, PRODUCTS = "ladder", "kernels", "layouts", "tiles", "products"
ONCE = "the weights, the keys and values, and the residual stream in and out, each once at the measured bandwidth"
GRAPH, PYTHON = "CUDA graph", "Python"
PROFILED = "rotate and append", "norm in the product"  # rungs whose kernels are listed one by one
# What the README's prediction, and chapter 11's, assumes of an H200: the rates and the small kernel of experiment 00.
ROOFLINE = results.recorded("00_roofline", "H200")
ASSUMED = Machine(
    "an H200, as in experiment 00", "bfloat16",
    bandwidth=ROOFLINE.find("memory read").value,
    flops=ROOFLINE.find("matrix product", dtype="bfloat16").value,
)  # fmt: skip
ASSUMED_LAUNCH = ROOFLINE.find("one addition").value
# The products of a layer: the library's, each followed by its kernel, and those that finish that work themselves.
FOLLOWED = "qkv", "rotate+append", "o+residual", "gate_up", "silu+multiply", "down+residual"
FINISHED = "norm+qkv", "o+residual", "norm+gate_up+silu", "down+residual"
PRODUCT_TOKENS = 1, 8, 32, 64, 128, 192, 256, 384, 512  # requests of a step
# Not in the README's table: `layer: predicted time` would repeat its Prediction with this run's own rates.
NOT_IN_README = {"tile: rate", "layer: bytes", "layer: predicted time"}
# Kernels that finish the one before them: the second pass of a split product, the merge of split keys.
FINISHING = "splitkreduce", "mergestates"
TINY = Qwen3Config(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4}, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
Run = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        model: its shape.
        dtype: of everything.
        backend: of attention.
        tokens: requests of a step, one new token each.
        keys: of each request, the new token's included.
        repetitions: of each figure; the ways take turns.
    """

    model: PretrainedConfig
    dtype: torch.dtype
    backend: str
    tokens: tuple[int, ...]
    keys: int
    repetitions: int


SETTINGS = {
    "cpu": Setting(TINY, torch.float32, "torch", (1, 3), 20, 3),
    "cuda": Setting(QWEN3_0_6B, torch.bfloat16, "flashinfer", (1, 8, 64, 256), 384, 7),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def seconds(run: Run, device: torch.device) -> float:
    """Seconds of one call, on a GPU by its own clock."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(run: Run, device: torch.device) -> Run:
    """Compile, warm up, and capture in a CUDA graph; return its replay, on a CPU the function itself.

    The replay keeps `run`, and with it the tensors that the graph reads.
    """
    if device.type == "cpu":
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    return lambda kept=run: graph.replay()


def in_turns(runs: Mapping[str, Run], repetitions: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each function and repetition: in order and in reverse order by turns, after a round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repetitions + 1):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            elapsed = seconds(runs[name], device)
            if turn:
                times[name].append(elapsed)
    return times


def row(
    figure: str,
    values: Sequence[float],
    unit: str,
    bound: float | None,
    source: str,
    case: Mapping[str, results.Setting],
) -> results.Row:
    """The median of the repetitions, with the smallest and the largest; printed as soon as it is known."""
    found = results.Row(figure, statistics.median(values), unit, bound, source, case, (min(values), max(values)))
    print(found.cells()[:5], flush=True)
    return found


def launch_seconds(device: torch.device, count: int = 1000) -> list[float]:
    """Seconds of a kernel that does nothing to speak of, in a CUDA graph of dependent kernels (on a CPU: a call)."""
    x = torch.zeros(1, device=device)

    def run() -> None:
        for _ in range(count):
            x.add_(1)

    [times] = in_turns({"": captured(run, device)}, 5, device).values()
    return [one / count for one in times]


# --- the ladder -------------------------------------------------------------------------------------------------------


def through_layers(layer: Layer, model: CausalLM, step: Step) -> Callable[[], Tensor]:
    """A function that computes all layers: each reads other weights, so no cache holds them from the run before."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(step.num_tokens, model.config.hidden_size, generator=generator)
    x = x.to(step.device, model.dtype)
    cos, sin = rope_tables(step.positions, model.inv_freq)

    def run() -> Tensor:
        out = x
        for own in model.layers:
            out = layer(own, out, cos, sin, step)
        return out

    return run


def check_equal(runs: Mapping[str, Callable[[], Tensor]]) -> None:
    """Raise if a rung computes something else than the first one, beyond the rounding of its dtype."""
    outputs = {name: run().double() for name, run in runs.items()}
    first = next(iter(outputs.values()))
    for name, out in outputs.items():
        error = float((out - first).norm() / first.norm())
        if not error < 0.1:
            raise ValueError(f"the rung {name!r} differs from the first one by {error:.1%} of the norm")


def rungs_for(num_tokens: int, device: torch.device) -> list[Rung]:
    return [rung for rung in RUNGS if num_tokens <= rung.most_tokens and (device.type == "cuda" or rung.on_cpu)]


def predicted_seconds(rung: Rung, costs: Mapping[str, Cost], machine: Machine, launch: float) -> float:
    """The bound of each kernel, one after the other, and a kernel that does nothing for each that starts late."""
    return sum(costs[name].seconds(machine) for name in rung.kernels) + launch * (len(rung.kernels) - rung.num_early)


def ladder_rows(model: CausalLM, setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time of a layer on each rung, captured and launched from Python, beside its prediction and its bytes."""
    shape, size = shape_of(model.config), setting.dtype.itemsize
    launches = launch_seconds(device)
    rows = [row("a small kernel in a CUDA graph", launches, "s", None, "no bytes to speak of bound it", {})]
    for num_tokens in setting.tokens:
        step = make_step(model, setting.backend, num_tokens, setting.keys, device)
        rungs = rungs_for(num_tokens, device)
        runs = {rung.name: through_layers(rung.make(device), model, step) for rung in rungs}
        check_equal(runs)
        costs = kernel_costs(shape, num_tokens, setting.keys, size)
        least = least_cost(shape, num_tokens, setting.keys, size)
        ways: dict[str, Mapping[str, Run]] = {
            GRAPH: {name: captured(run, device) for name, run in runs.items()},
            PYTHON: runs,
        }
        if device.type == "cpu":
            del ways[GRAPH]
        for launched, own in ways.items():
            for name, times in in_turns(own, setting.repetitions, device).items():
                case: dict[str, results.Setting] = {"rung": name, "tokens": num_tokens, "launched by": launched}
                layer_times = [one / len(model.layers) for one in times]
                rows.append(row("layer: time", layer_times, "s", least.seconds(machine), ONCE, case))
        for rung in rungs:
            case = {"rung": rung.name, "tokens": num_tokens, "kernels": len(rung.kernels)}
            total = sum((costs[name] for name in rung.kernels), Cost(0, 0))
            predicted = predicted_seconds(rung, costs, machine, statistics.median(launches))
            rows.append(results.Row("layer: bytes", total.bytes, "B", least.bytes, ONCE, case))
            rows.append(results.Row("layer: predicted time", predicted, "s", least.seconds(machine), ONCE, case))
    return rows


def prediction(setting: Setting) -> Table:
    """What the README predicts for an H200, from the kernels' bytes and FLOPs and the assumed rates."""
    shape, size = shape_of(ModelConfig.from_hf(setting.model.to_dict())), setting.dtype.itemsize
    header = ["rung", "kernels", *(f"{n} token{'s' if n > 1 else ''}" for n in setting.tokens)]
    lines = []
    for rung in RUNGS:
        line = [rung.name, str(len(rung.kernels))]
        for n in setting.tokens:
            costs = kernel_costs(shape, n, setting.keys, size)
            time_of = predicted_seconds(rung, costs, ASSUMED, ASSUMED_LAUNCH)
            line.append(quantity(time_of, "s") if n <= rung.most_tokens else "–")
        lines.append(line)
    bounds = [quantity(least_cost(shape, n, setting.keys, size).seconds(ASSUMED), "s") for n in setting.tokens]
    return Table(header, [*lines, ["bound", "", *bounds]])


# --- kernel by kernel -------------------------------------------------------------------------------------------------


def products_prediction(setting: Setting) -> Table:
    """The README's second table: the four products of a layer, with the kernels between them and without."""
    shape, counts = shape_of(ModelConfig.from_hf(setting.model.to_dict())), [n for n in setting.tokens if n > 1]
    rows = []
    for name, kernels, launches in (
        ("the library's, each followed by its kernel", FOLLOWED, len(FOLLOWED)),
        ("products with fused epilogues", FINISHED, 0),  # each starts while the one before still runs
    ):
        times = []
        for count in counts:
            costs = kernel_costs(shape, count, setting.keys, setting.dtype.itemsize)
            times.append(sum(costs[kernel].seconds(ASSUMED) for kernel in kernels) + launches * ASSUMED_LAUNCH)
        rows.append([name, str(len(kernels)), *(quantity(one, "s") for one in times)])
    return Table(["products of a layer", "kernels", *(f"{n} tokens" for n in counts)], rows)


def profiled(run: Run) -> list[tuple[str, float]]:
    """Name and seconds of each kernel that a call runs, in the order in which they begin; copies and fills left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted(
        (e for e in events if not e.name.startswith(("Mem", "Activity"))), key=lambda e: e.time_range.start
    )
    return [(event.name, event.time_range.elapsed_us() / 1e6) for event in kernels]


def by_place(kernels: Sequence[tuple[str, float]], num_layers: int) -> list[tuple[str, float]]:
    """Sum the kernels of all layers by their place in a layer; a kernel that finishes another belongs to it.

    Returns:
        Name and seconds of each place; nothing if the layers differ in their number of kernels.
    """
    joined: list[tuple[str, float]] = []
    for name, elapsed in kernels:
        if joined and any(part in name.lower() for part in FINISHING):
            joined[-1] = joined[-1][0], joined[-1][1] + elapsed
        else:
            joined.append((name, elapsed))
    per_layer, rest = divmod(len(joined), num_layers)
    if rest:
        return []
    return [(joined[i][0], sum(elapsed for _, elapsed in joined[i::per_layer])) for i in range(per_layer)]


def by_name(kernels: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sum the kernels of each name."""
    totals: dict[str, float] = {}
    for name, elapsed in kernels:
        totals[name] = totals.get(name, 0.0) + elapsed
    return list(totals.items())


def short_name(name: str) -> str:
    """A kernel's name without its return type, namespaces and template arguments."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1][:60]


def kernel_rows(model: CausalLM, setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time of each kernel of a decode step, as the profiler records it, beside the bound of its bytes."""
    from mini_engine.sampler import Sampler
    from mini_engine.sampling_params import Admission, SamplingParams

    rows = []
    shape, size, num_layers = shape_of(model.config), setting.dtype.itemsize, len(model.layers)
    for num_tokens in (n for n in setting.tokens if n in (1, 64)):
        step = make_step(model, setting.backend, num_tokens, setting.keys, device)
        costs = kernel_costs(shape, num_tokens, setting.keys, size)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        hidden = torch.randn(num_tokens, shape.hidden_size, device=device).to(setting.dtype)
        logits, sampler = model.compute_logits(hidden), Sampler(num_tokens, shape.vocab_size, device)
        warm = SamplingParams(temperature=0.6)
        sampler.enter([Admission(row, warm, seed=0, prompt_token_ids=[0]) for row in range(num_tokens)])
        all_rows = torch.arange(num_tokens, device=device)
        # The product of 16-bit numbers writes float32.
        head = linear_cost(num_tokens, shape.hidden_size, shape.vocab_size, size) + Cost(0, logits.numel() * (4 - size))
        sampling = Cost(0, logits.nbytes)
        stages: dict[str, tuple[Run, list[tuple[str, Cost]]]] = {
            "embedding": (lambda ids=ids: model.embed(ids), []),
            "final norm": (
                lambda hidden=hidden: model.parts.rms_norm(hidden, model.norm, model.config.norm_eps),
                [("norm", costs["norm"])],
            ),
            "LM head": (
                lambda hidden=hidden: model.compute_logits(hidden),
                [("LM head", head)],
            ),
            "sampler": (
                lambda sampler=sampler, logits=logits, rows=all_rows, ids=ids: sampler.sample(logits, rows, ids),
                [
                    ("adjust and summarize", Cost(0, 0)),  # no row asks for either
                    ("find thresholds", Cost(0, 0)),
                    ("argmax of splits", sampling),
                    ("argmax of rows", Cost(0, 0)),
                ],
            ),
        }
        for rung in rungs_for(num_tokens, device):
            if rung.name in PROFILED:
                run = through_layers(rung.make(device), model, step)
                stages[f"layers: {rung.name}"] = (run, [(name, costs[name] * num_layers) for name in rung.kernels])
        for stage, (run, expected) in stages.items():
            run()
            calls = num_layers if stage.startswith("layers") else 1
            records = [profiled(run) for _ in range(setting.repetitions)]
            places = [by_place(found, calls) for found in records]
            known = all(len(found) == len(expected) for found in places)
            if not known:  # another library version, or a stage that is not itemized: list them by name
                places = [by_name(found) for found in records]
            for index, (name, _) in enumerate(places[0]):
                times = [found[index][1] for found in places if index < len(found)]
                operator, cost = expected[index] if known else ("", Cost(0, 0))
                case: dict[str, results.Setting] = {
                    "tokens": num_tokens, "stage": stage, "operator": operator or "not itemized",
                    "kernel": short_name(name), "calls": calls if known else sum(n == name for n, _ in records[0]),
                }  # fmt: skip
                bound = cost.seconds(machine) or None
                source = "its bytes at the measured bandwidth" if bound else "its bytes are not known or too few"
                rows.append(row("step: kernel", times, "s", bound, source, case))
    return rows


# --- layouts ----------------------------------------------------------------------------------------------------------


def weight_rows(model: CausalLM, setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """The products of queries, keys and values, and of gate and up: packed in one weight each, and apart."""
    rows, shape, size = [], shape_of(model.config), setting.dtype.itemsize
    q_rows, kv_rows = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    pieces = {"qkv": [q_rows, kv_rows, kv_rows], "gate and up": [shape.intermediate_size] * 2}
    for num_tokens in setting.tokens:
        x = torch.randn(num_tokens, shape.hidden_size, device=device).to(setting.dtype)
        for product, sizes in pieces.items():
            packed = [own.attention.qkv.weight if product == "qkv" else own.mlp.gate_up.weight for own in model.layers]
            apart = [weight for own in packed for weight in own.split(sizes)]
            runs = {
                way: captured(lambda x=x, weights=weights: [linear(x, weight) for weight in weights], device)
                for way, weights in (("packed", packed), ("apart", apart))
            }
            bound = linear_cost(num_tokens, shape.hidden_size, sum(sizes), size).seconds(machine)
            for way, times in in_turns(runs, setting.repetitions, device).items():
                case: dict[str, results.Setting] = {"product": product, "weights": way, "tokens": num_tokens}
                own_times = [one / len(packed) for one in times]
                rows.append(row("weights: time of a layer", own_times, "s", bound, "the packed product's bytes", case))
    return rows


def kv_rows(model: CausalLM, setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Attention over the pages, and the append in front of it, in each layout and as one tensor or two."""
    from mini_engine.kernels.rotate_and_append import rotate_and_append

    rows, shape, size = [], shape_of(model.config), setting.dtype.itemsize
    for num_tokens in setting.tokens:
        attends: dict[str, Run] = {}
        appends: dict[str, Run] = {}
        for layout in ("NHD", "HND"):
            for storage in ("(k, v)", "one tensor"):
                step = make_step(model, setting.backend, num_tokens, setting.keys, device, layout)
                cache = step.backend.cache
                if storage == "one tensor":
                    cache.layers[:] = [torch.stack(pair, 1).unbind(1) for pair in cache.layers]
                    step.backend = create_backend(setting.backend, model.attention_specs, cache, Parts())
                    step.backend.plan(step.batch)
                heads = shape.num_qo_heads + 2 * shape.num_kv_heads
                qkv = torch.randn(num_tokens, heads * shape.head_dim, device=device).to(setting.dtype)
                q = qkv[:, : shape.num_qo_heads * shape.head_dim].reshape(num_tokens, -1, shape.head_dim)
                cos, sin = rope_tables(step.positions, model.inv_freq)

                def attend(step: Step = step, q: Tensor = q) -> None:
                    for spec in model.attention_specs:
                        step.backend.run(spec.layer, q)

                def append(step: Step = step, qkv: Tensor = qkv, cos: Tensor = cos, sin: Tensor = sin) -> None:
                    for pages in step.backend.cache.layers:
                        rotate_and_append(qkv, None, 1e-6, cos, sin, pages, step.layout, step.slots)

                name = f"{layout}, {storage}"
                attends[name], appends[name] = captured(attend, device), captured(append, device)
        costs = kernel_costs(shape, num_tokens, setting.keys, size)
        for figure, runs, cost in (
            ("KV layout: attention of a layer", attends, costs["attention"]),
            ("KV layout: rotate and append", appends, costs["rotate+append"]),
        ):
            for layout, times in in_turns(runs, setting.repetitions, device).items():
                case: dict[str, results.Setting] = {"layout": layout, "requests": num_tokens, "keys": setting.keys}
                own = [one / len(model.layers) for one in times]
                source = "its bytes at the measured bandwidth"
                rows.append(row(figure, own, "s", cost.seconds(machine), source, case))
        del attends, appends, runs, step, cache
        gc.collect()
        torch.cuda.empty_cache()
    return rows


# --- tiles ------------------------------------------------------------------------------------------------------------


def fused_products(
    model: CausalLM, num_tokens: int, device: torch.device, pdl: bool
) -> dict[str, tuple[list[Tensor], Callable[..., Tensor]]]:
    """For each fused projection its weights in all layers, and the kernel as a function of a weight and a tile."""
    from book.kernels.linear_residual import LinearResidual
    from book.kernels.norm_linear import norm_gate_up_silu, norm_linear

    layers, shape, eps = list(model.layers), shape_of(model.config), model.config.norm_eps
    add, norm_weight = LinearResidual(device), layers[0].input_norm
    x, attended, inner = (
        torch.randn(num_tokens, size, device=device).to(model.dtype)
        for size in (shape.hidden_size, shape.num_qo_heads * shape.head_dim, shape.intermediate_size)
    )
    return {
        "norm+qkv": (
            [own.attention.qkv.weight for own in layers],
            lambda weight, tile: norm_linear(x, norm_weight, eps, weight, pdl=pdl, tile=tile),
        ),
        "norm+gate_up+silu": (
            [own.mlp.gate_up.weight for own in layers],
            lambda weight, tile: norm_gate_up_silu(x, norm_weight, eps, weight, pdl=pdl, tile=tile),
        ),
        "o+residual": (
            [own.attention.o.weight for own in layers],
            lambda weight, tile: add(attended, weight, x, pdl=pdl, tile=tile),
        ),
        "down+residual": (
            [own.mlp.down.weight for own in layers],
            lambda weight, tile: add(inner, weight, x, pdl=pdl, tile=tile),
        ),
    }


def tiles_to_try(num_tokens: int, num_columns: int, can_split: bool) -> list[Tile]:
    """Whole rows for one token, 128 columns at a time for several; with splits where the kernel takes them."""
    from book.kernels.tiles import ELEMENTS, Tile

    if num_tokens > 1:
        splits = (1, 2, 4, 8) if can_split else (1,)
        return [Tile(rows, 128, warps, s) for rows, warps in ((16, 4), (32, 4), (32, 8)) for s in splits]
    whole = 1 << (num_columns - 1).bit_length()
    tiles = [Tile(rows, whole, warps) for rows in (1, 2, 4, 8, 16) for warps in (4, 8) if rows * whole <= ELEMENTS]
    return tiles + [Tile(8, 1024, 4, s) for s in (2, 3, 4) if can_split and s * 1024 <= num_columns]


def tile_rows(model: CausalLM, setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Bytes per second of the fused projections for several tile sizes, at one token and at eight."""
    rows, pdl = [], torch.cuda.get_device_capability(device) >= (9, 0)
    for num_tokens in (n for n in setting.tokens if n in (1, 8)):
        for product, (weights, kernel) in fused_products(model, num_tokens, device, pdl).items():
            runs: dict[str, Run] = {}
            for t in tiles_to_try(num_tokens, weights[0].shape[1], product.endswith("residual")):

                def run(kernel: Callable[..., Tensor] = kernel, weights: list[Tensor] = weights, t: Tile = t) -> None:
                    for weight in weights:
                        kernel(weight, t)

                runs[f"{t.rows} x {t.columns}, {t.num_warps} warps, {t.splits} splits"] = captured(run, device)
            num_bytes = sum(weight.nbytes for weight in weights)
            for tile, times in in_turns(runs, setting.repetitions, device).items():
                case: dict[str, results.Setting] = {"product": product, "tokens": num_tokens, "tile": tile, "PDL": pdl}
                rates = [num_bytes / one for one in times]
                rows.append(row("tile: rate", rates, "B/s", machine.bandwidth, "the measured bandwidth", case))
    return rows


# --- products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product of all layers, with what follows it.

    Attributes:
        weights: the weight of each layer.
        followed: the library's product and the kernel after it, as a function of a weight.
        finished: the product that finishes the work, as a function of a weight.
    """

    weights: list[Tensor]
    followed: Callable[[Tensor], object]
    finished: Callable[[Tensor], object]


def products_of(model: CausalLM, step: Step) -> dict[str, Product]:
    """The four products of a layer in a decode step."""
    from mini_engine.kernels.fused_products import add_product, gate_up_swiglu, qkv_append
    from mini_engine.kernels.rotate_and_append import rotate_and_append
    from mini_engine.kernels.swiglu import swiglu

    layers, shape, eps = list(model.layers), shape_of(model.config), model.config.norm_eps
    x, residual, attended, inner = (
        torch.randn(step.num_tokens, size, device=step.device).to(model.dtype) / 10
        for size in (*[shape.hidden_size] * 2, shape.num_qo_heads * shape.head_dim, shape.intermediate_size)
    )
    cos, sin = rope_tables(step.positions, model.inv_freq)
    norms = layers[0].attention.q_norm, layers[0].attention.k_norm
    to_cache = norms, eps, cos, sin, step.backend.cache.layers[0], step.layout, step.slots
    early = {"pdl": True, "next_waits": True}
    return {
        "qkv": Product(
            [own.attention.qkv.weight for own in layers],
            lambda weight: rotate_and_append(linear(x, weight), *to_cache, tokens=x, **early),
            lambda weight: qkv_append(x, weight, *to_cache),
        ),
        "o": Product(
            [own.attention.o.weight for own in layers],
            lambda weight: residual.addmm_(attended, weight.T),
            lambda weight: add_product(residual, attended, weight),
        ),
        "gate_up": Product(
            [own.mlp.gate_up.weight for own in layers],
            lambda weight: swiglu(linear(x, weight), x, eps, pdl=True),
            lambda weight: gate_up_swiglu(x, weight, eps),
        ),
        "down": Product(
            [own.mlp.down.weight for own in layers],
            lambda weight: residual.addmm_(inner, weight.T),
            lambda weight: add_product(residual, inner, weight),
        ),
    }


def product_rows(model: CausalLM, setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time of each product of a layer with what follows it, and of all four."""
    rows = []
    for num_tokens in PRODUCT_TOKENS:
        products = products_of(model, make_step(model, setting.backend, num_tokens, setting.keys, device))
        bounds = {}
        for name, product in products.items():
            num_rows, num_columns = product.weights[0].shape
            bounds[name] = linear_cost(num_tokens, num_columns, num_rows, setting.dtype.itemsize).seconds(machine)
        for name, some, bound in (
            *((name, [product], bounds[name]) for name, product in products.items()),
            ("all four", list(products.values()), sum(bounds.values())),
        ):
            runs = {
                "followed": captured(partial(in_all_layers, [(own.followed, own.weights) for own in some]), device),
                "finished": captured(partial(in_all_layers, [(own.finished, own.weights) for own in some]), device),
            }
            for way, times in in_turns(runs, setting.repetitions, device).items():
                case: dict[str, results.Setting] = {"product": name, "tokens": num_tokens, "way": way}
                own_times = [one / len(model.layers) for one in times]
                rows.append(
                    row("product: time", own_times, "s", bound, "its bytes and FLOPs at the measured rates", case)
                )
    return rows


def in_all_layers(calls: Sequence[tuple[Callable[[Tensor], object], list[Tensor]]]) -> None:
    """The products one after another, layer by layer."""
    for weights in zip(*(own for _, own in calls), strict=True):
        for (call, _), weight in zip(calls, weights, strict=True):
            call(weight)


def predictions() -> str:
    """Derive the README's two tables of predictions."""
    setting = SETTINGS["cuda"]
    costs = kernel_costs(shape_of(ModelConfig.from_hf(setting.model.to_dict())), 1, 1, setting.dtype.itemsize)
    products = sum(costs[name].bytes for name in ("qkv", "o", "gate_up", "down"))
    tables = prediction(setting), products_prediction(setting)
    rest = predicted(
        {
            "the four products of a layer, nearly all weights": quantity(products, "B"),
            "memory read": quantity(ASSUMED.bandwidth, "B/s"),
            "matrix product": quantity(ASSUMED.flops, "FLOP/s"),
            "one addition, a kernel that does almost nothing": quantity(ASSUMED_LAUNCH, "s"),
            "the same, of two kernels": quantity(2 * ASSUMED_LAUNCH, "s"),
        }
    )
    return "\n\n".join([*(table.markdown() for table in tables), rest])


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    with torch.inference_mode():
        model = random_model(setting.model, setting.dtype, device)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms near one, or the layers would add next to nothing
                parameter.uniform_(0.5, 1.5)
        if LADDER in chosen.only:
            rows += ladder_rows(model, setting, machine, device)
        if LAYOUTS in chosen.only:
            rows += weight_rows(model, setting, machine, device)
        if device.type == "cuda":
            if KERNELS in chosen.only:
                rows += kernel_rows(model, setting, machine, device)
            if LAYOUTS in chosen.only:
                rows += kv_rows(model, setting, machine, device)
            if TILES in chosen.only:
                rows += tile_rows(model, setting, machine, device)
            if PRODUCTS in chosen.only and torch.cuda.get_device_capability(device)[0] == 9:
                rows += product_rows(model, setting, machine, device)
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "a tiny Qwen3",
        "dtype": machine.dtype,
        "keys of each request": setting.keys,
        "repetitions": setting.repetitions,
    }
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(chosen.only) < set(SECTIONS):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out, {found.figure for found in result.rows} - NOT_IN_README)


if __name__ == "__main__":
    main()
