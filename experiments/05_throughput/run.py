"""Requests of mixed lengths: the engine beside transformers, padded and with its continuous batching.

    python experiments/05_throughput/run.py [--device cpu|cuda] [--out DIR] [--change "what is new in the engine"]
    python experiments/05_throughput/run.py --predict

On a CPU the model is the embedded SmolLM2-135M in float32 and bfloat16, on a GPU Qwen3-0.6B's shape in bfloat16 with
random weights. The result goes to experiments/05_throughput/results/<device>.json, below DIR where one is given. With
--change our engine's rows are added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, random_model, random_transformers_model
from book.units import quantity
from mini_engine.bench.peers import PEERS, Serve, load_transformers, serve_mini_engine
from mini_engine.bench.run import Measurement, measure, pages_needed
from mini_engine.bench.workloads import CPU, GPU, BenchRequest, Workload, least_seconds, model_shape, num_outputs
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.models import weights
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.roofline import Machine, ModelShape, decoder_layer_costs, linear_cost, measure_machine

MODEL = "smollm2-135m-instruct"
PAGE_SIZE = 128
OURS = "mini_engine, flex"  # the engine of the ledger
STEP_TOKENS = 2048  # most tokens of a step, ours and of transformers' continuous batching


@dataclass(frozen=True)
class Comparison:
    """Engines that serve the same requests in turns.

    Attributes:
        workload: the requests.
        backends: ours.
        peers: whether transformers serves them, too.
        name: of the workload in the table, where there are several.
    """

    workload: Workload
    backends: tuple[str, ...]
    peers: bool = True
    name: str | None = None


# On a GPU the torch backend launches its kernels for each sequence: 256 of them take half a second a step. transformers
# needs seven minutes for the 256 requests, so it is compared on a quarter of them, with outputs half as long.
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
COMPARISONS = {
    "cpu": (Comparison(CPU, ("flex", "torch_padded")),),
    "cuda": (
        Comparison(GPU, ("flex",), peers=False, name="256 requests"),
        Comparison(replace(GPU, num_requests=64, output=(100, 512)), ("flex",), name="64 requests"),
    ),
}
ROUNDS = 3


def make_models(device: torch.device, dtype: torch.dtype) -> tuple[CausalLM, PreTrainedModel]:
    """Ours and transformers': the embedded weights, or on a GPU a larger shape with random ones."""
    if device.type == "cpu":
        ours = load_model(open_checkpoint(MODEL), Parts(), dtype, device)
        return ours, load_transformers(MODEL, dtype, device)
    return random_model(QWEN3_0_6B, dtype, device), random_transformers_model(QWEN3_0_6B, dtype, device)


def make_engine(model: CausalLM, attn_backend: str, requests: Sequence[BenchRequest]) -> LLMEngine:
    """An engine whose pool holds all requests at once: none waits and none is preempted."""
    config = EngineConfig(
        attn_backend=attn_backend,
        num_pages=pages_needed(requests, PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_batch_size=len(requests),
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=False,
        persistent_decode=False,
    )
    return LLMEngine(model, config)


def with_f_linear(serve: Serve) -> Serve:
    """The same engine with the matrix product of `F.linear`, which transformers calls."""

    def run(requests: Sequence[BenchRequest]) -> list[list[int]]:
        with mock.patch.object(weights, "linear", F.linear):
            return serve(requests)

    return run


def compare(
    ours: CausalLM, theirs: PreTrainedModel, comparison: Comparison, requests: Sequence[BenchRequest], rounds: int
) -> list[Measurement]:
    """Each engine serves the same requests, in turns."""
    serve: dict[str, Serve] = {
        f"mini_engine, {backend}": partial(serve_mini_engine, make_engine(ours, backend, requests))
        for backend in comparison.backends
    }
    if ours.device.type == "cpu" and ours.dtype == torch.float32:  # elsewhere `linear` is `F.linear`
        first, serve_first = next(iter(serve.items()))
        serve[f"{first}, F.linear"] = with_f_linear(serve_first)
    if comparison.peers:
        serve |= {name: partial(peer, theirs, STEP_TOKENS) for name, peer in PEERS.items()}
    return measure(serve, requests, rounds)


def rows_of(
    measured: Sequence[Measurement],
    config: ModelConfig,
    machine: Machine,
    requests: Sequence[BenchRequest],
    name: str | None,
) -> list[results.Row]:
    """Tokens/s of each engine beside the bound, how many times ours gives, and how many requests got equal tokens."""
    bound = num_outputs(requests) / least_seconds(config, machine, requests, getattr(torch, machine.dtype).itemsize)
    source = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
    greedy = requests[0][1].temperature == 0
    workload: dict[str, results.Setting] = {"workload": name} if name else {}
    rows: list[results.Row] = []
    for own in measured:
        case = workload | {"engine": own.engine, "dtype": machine.dtype}
        rows.append(results.Row("throughput", own.rate, "tokens/s", bound, source, case, own.spread))
        if own is not measured[0]:
            ratio = measured[0].rate / own.rate
            rows.append(results.Row("flex is faster by", ratio, "times", None, "none: a ratio of two engines", case))
        if own is not measured[0] and greedy:
            all_equal = "all, in exact arithmetic"
            rows.append(results.Row("same tokens as flex", own.equal, "requests", len(requests), all_equal, case))
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

# Assumptions of the README. The prediction for the CPU counts the FLOPs of the matrix products, but no bytes.
ASSUMED = Machine("a CPU", "float32", bandwidth=math.inf, flops=400e9)
H200 = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)
F_LINEAR = 1 / 2  # the share of this rate that `F.linear` reaches in float32
SMALL_BATCH = 1 / 2  # the share that a product of 32 rows and fewer reaches
BFLOAT16 = 2  # a product in bfloat16 is so many times as fast
PADDED_LAYER = 5e-3  # seconds in which a step of `generate` copies a layer's cache and attends with a mask
ATTENTION, SMALL_OPERATORS = 12e-3, 15e-3  # seconds of our step on the CPU
KERNELS, LAUNCH = 500, 20e-6  # of our step on the GPU, and seconds of a launch from Python
RECORDED_STEP = 29e-3  # seconds of our step of 256 requests on the H200


class Work(NamedTuple):
    """FLOPs of the matrix products: of all prompts, and of all outputs with their logits."""

    prompts: float
    outputs: float

    @property
    def seconds(self) -> float:
        """Seconds at the assumed rate; a step without prompts is a small batch."""
        return (self.prompts + self.outputs / SMALL_BATCH) / ASSUMED.flops


def flops_of_a_token(shape: ModelShape) -> tuple[float, float]:
    """FLOPs of a token's matrix products in all layers, and of its logits."""
    costs = decoder_layer_costs(shape, num_tokens=1, kv_len=1, dtype_bytes=4)
    layer = sum(cost.flops for name, cost in costs.items() if name.endswith("_proj"))
    return shape.num_layers * layer, linear_cost(1, shape.hidden_size, shape.vocab_size, 4).flops


def cpu_prediction(shape: ModelShape, requests: Sequence[BenchRequest]) -> dict[str, str]:
    """Derive the README's predictions for the CPU."""
    prompts, outputs = [len(prompt) for prompt, _ in requests], [params.max_tokens for _, params in requests]
    count, steps = len(requests), max(outputs)
    token, logits = flops_of_a_token(shape)
    work, padded_work = (
        Work(num_in * token, num_out * (token + logits))
        for num_in, num_out in ((sum(prompts), sum(outputs)), (count * max(prompts), count * steps))
    )
    ours, ours_besides = work.seconds, steps * (ATTENTION + SMALL_OPERATORS)
    padded, padded_besides = sum(padded_work) / (F_LINEAR * ASSUMED.flops), steps * shape.num_layers * PADDED_LAYER
    rate, padded_rate = sum(outputs) / (ours + ours_besides), sum(outputs) / (padded + padded_besides)
    # In bfloat16 both call the same product.
    half, padded_half = (own.seconds / BFLOAT16 for own in (work, padded_work))
    whole = (padded_half + padded_besides) / (half + ours_besides)
    return {
        "average prompt and output": f"{statistics.mean(prompts):.0f} and {statistics.mean(outputs):.0f} tokens",
        "a token, and its logits": f"{token / 1e9:.2f} GFLOP, and {logits / 1e9:.2f} GFLOP more",
        "without padding": f"{sum(prompts):,} and {sum(outputs):,} tokens, {sum(work) / 1e12:.1f} TFLOP",
        "with padding": f"{count} × {max(prompts)} and {count} × {steps} tokens, {sum(padded_work) / 1e12:.1f} TFLOP",
        "wasted by padding": f"{1 - sum(work) / sum(padded_work):.0%}",
        "padded `generate`": f"{padded:.1f} s for products at {quantity(F_LINEAR * ASSUMED.flops, 'FLOP/s')}, "
        f"{padded_besides:.0f} s besides, about {round(padded_rate, -1):.0f} tokens/s",
        "transformers' continuous batching": f"{count} times the scores",
        "our engine": f"{sum(work) / ASSUMED.flops:.1f} s for products at the full rate, "
        f"{ours:.1f} s with small batches, {ours_besides:.1f} s besides, about {round(rate, -2):.0f} tokens/s",
        "our engine and padded `generate`": f"{rate / padded_rate:.1f} times as fast",
        "in bfloat16, products alone": f"{padded_half / half:.1f} times as fast",
        "in bfloat16, the rest unchanged": f"{whole:.1f} times as fast",
    }


def gpu_prediction(shape: ModelShape, all_at_once: Workload, fewer: Workload) -> dict[str, str]:
    """Derive the README's predictions for the H200, with 256 requests and with the 64 of transformers."""
    requests = all_at_once.requests(shape.vocab_size)
    step, steps = KERNELS * LAUNCH, max(params.max_tokens for _, params in requests)
    full_rate, rate = len(requests) / step, num_outputs(requests) / (steps * step)
    # Of the 64 requests only the ranges of their lengths are used.
    longest, tokens = fewer.output[1], fewer.num_requests * statistics.mean(fewer.output)
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * torch.bfloat16.itemsize
    cache = fewer.num_requests * fewer.longest * token_bytes
    copy = 2 * cache / H200.bandwidth  # read and written
    return {
        "H200, a step of our engine": f"{1e3 * step:.0f} ms",
        f"H200, {len(requests)} requests": f"about {round(full_rate, -3):,.0f} tokens/s while all run, "
        f"about {round(rate, -3):,.0f} tokens/s over the run: {rate / full_rate:.2f} of that",
        f"H200, {fewer.num_requests} requests": f"{longest} steps for about {round(tokens, -3):,.0f} tokens, "
        f"about {round(tokens / (longest * RECORDED_STEP), -2):,.0f} tokens/s",
        f"H200, {fewer.num_requests} requests, padded": f"a cache of up to {cache / 1e9:.0f} GB, "
        f"{1e3 * copy:.0f} ms for its copy: a step takes {1 + copy / RECORDED_STEP:.1f} times as long",
    }


def predictions() -> str:
    """Derive the README's predictions for both devices."""
    embedded, qwen3 = open_checkpoint(MODEL).config, ModelConfig.from_hf(QWEN3_0_6B.to_dict())
    all_at_once, fewer = (comparison.workload for comparison in COMPARISONS["cuda"])
    on_cpu = cpu_prediction(model_shape(embedded), CPU.requests(embedded.vocab_size))
    return predicted(on_cpu | gpu_prediction(model_shape(qwen3), all_at_once, fewer))


def main() -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--change", help="add the run to the engine's ledger: what is new, in a few words")
    arguments = options.parse_args()
    device, comparisons = torch.device(arguments.device), COMPARISONS[arguments.device]
    vocab_size = open_checkpoint(MODEL).config.vocab_size if device.type == "cpu" else QWEN3_0_6B.vocab_size
    # On a Hopper GPU torch prefers cuDNN's attention, which plans every new length for tens of milliseconds: each step
    # of transformers is one. Ours does without it, and theirs is served better so.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows: list[results.Row] = []
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "SmolLM2-135M",
        "rounds": ROUNDS,
    }
    for dtype in DTYPES[arguments.device]:
        ours, theirs = make_models(device, dtype)
        machine = measure_machine(device, dtype)
        for comparison in comparisons:
            requests, name = comparison.workload.requests(vocab_size), comparison.name
            sizes = {
                "requests": len(requests),
                "tokens in": sum(len(prompt) for prompt, _ in requests),
                "tokens out": num_outputs(requests),
            }
            parameters |= {f"{name}: {size}" if name else size: count for size, count in sizes.items()}
            measured = compare(ours, theirs, comparison, requests, ROUNDS)
            rows += rows_of(measured, ours.config, machine, requests, name)
    result = results.new_result("05_throughput", rows, parameters, arguments.device)
    record(result, arguments.out, {row.figure for row in rows})
    if arguments.change:
        for row in rows:
            if (
                row.figure == "throughput"
                and row.case["engine"] == OURS
                and row.case.get("workload") == comparisons[0].name
            ):
                ledger.add(result, row, arguments.change, arguments.out)


if __name__ == "__main__":
    main()
