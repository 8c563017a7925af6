"""Measure a mixture of experts: how many experts a step touches, and what a block and a whole step cost.

    python experiments/20_mixture_of_experts/run.py [--out DIR] [--only ...] [--engines ...]
    python experiments/20_mixture_of_experts/run.py --predict

The shape is that of Qwen3-30B-A3B, with random weights, 61 GB in bfloat16, which are drawn on the device. `routing`
counts experts, `block` measures the mixture of experts of one layer alone, `steps` decode steps of the engine, and
`serving` whole requests, beside vLLM with `--engines mini_engine vllm`, which has to be installed in this Python
environment. On a CPU a tiny model in float32 shows that the script works; only `routing` has its full size there.

The result goes to experiments/20_mixture_of_experts/results/<device>.json, below DIR where one is given. Parts and
engines that are not measured again keep their rows.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, graph_of, predicted, rate_row, record
from book.random_models import QWEN3_30B_A3B, random_model
from book.serving import installed
from book.timing import Timing, measure
from book.units import quantity
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.peers import serve_mini_engine
from mini_engine.bench.workloads import (
    BenchRequest,
    Workload,
    least_seconds,
    model_shape,
    num_outputs,
    with_other_tokens,
)
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import rms_norm
from mini_engine.models.moe import MoE, mix_experts, route
from mini_engine.roofline import Cost, Machine, ModelShape, experts_touched, measure_machine, model_step_cost

EXPERIMENT = "20_mixture_of_experts"
PARTS, ENGINES = ("routing", "block", "steps", "serving"), ("mini_engine", "vllm")
MODELS: dict[str, tuple[str, PretrainedConfig]] = {
    "cuda": ("Qwen3-30B-A3B", QWEN3_30B_A3B),
    "cpu": ("tiny", Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, max_position_embeddings=4096, architectures=["Qwen3MoeForCausalLM"],
    )),
}  # fmt: skip
ROUTED = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens
TOKENS = {"cuda": (1, 8, 64, 256, 2048, 8192), "cpu": (1, 8, 64)}  # of a block
BATCHES = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}
BLOCKS = 4  # whose weights take turns, so that none is in the L2 cache when it is read again
PROMPT = {"cuda": 128, "cpu": 8}
STEPS = {"cuda": 64, "cpu": 4}  # in one timing
ROUNDS = 3
OUTPUT = {"cuda": 128, "cpu": 8}  # tokens of a request in `serving`
LEAST_OF_BLOCK = "the weights of the experts that random tokens touch, the router, and the tokens, each once"
LEAST_OF_STEP = "the least bytes and FLOPs of a step, with the experts that random tokens touch, at measured rates"
LEAST_OF_SERVING = "all prompts at once, then a step for each token, with the experts that random tokens touch"


# --- routing ---------------------------------------------------------------------------------------------------------


def routing_rows(draws: int = 20) -> list[results.Row]:
    """Count the experts that random tokens touch with random routers."""
    config = ModelConfig.from_hf(QWEN3_30B_A3B.to_dict())
    moe, generator = config.moe, torch.Generator().manual_seed(0)
    assert moe is not None
    counts: dict[int, list[int]] = {num_tokens: [] for num_tokens in ROUTED}
    for _ in range(draws):
        router = torch.randn(config.hidden_size, moe.num_experts, generator=generator)
        tokens = torch.randn(max(ROUTED), config.hidden_size, generator=generator)
        _, experts = route(tokens @ router, moe)
        for num_tokens, found in counts.items():
            found.append(len(experts[:num_tokens].unique()))
    rows = []
    for num_tokens, found in counts.items():
        expected = experts_touched(moe.num_experts, moe.num_experts_per_tok, num_tokens)
        why = f"no bound: E(1 - (1 - k/E)^B) is {expected:.1f}"
        case: dict[str, results.Setting] = {"part": "routing", "tokens": num_tokens}
        spread = float(min(found)), float(max(found))
        rows.append(results.Row("experts touched", statistics.mean(found), "experts", None, why, case, spread))
    return rows


# --- one block -------------------------------------------------------------------------------------------------------


def least_block(shape: ModelShape, num_tokens: int, dtype_bytes: int) -> Cost:
    """Compute the cost of a mixture of experts that is one kernel."""
    hidden, pairs = shape.hidden_size, num_tokens * shape.experts_per_token
    of_expert = 3 * hidden * shape.expert_size
    touched = experts_touched(shape.num_experts, shape.experts_per_token, num_tokens)
    numbers = touched * of_expert + shape.num_experts * hidden + 2 * num_tokens * hidden
    return Cost(2 * pairs * of_expert + 2 * num_tokens * hidden * shape.num_experts, numbers * dtype_bytes)


def by_reference(x: Tensor, mlp: MoE, eps: float, norm: Tensor) -> Tensor:
    """Compute the block as the reference does, which calls torch's grouped matmul on a GPU."""
    normed = rms_norm(x, norm, eps)
    reference = getattr(mix_experts, "__wrapped__", mix_experts)
    return x.add_(reference(normed, mlp.router(normed), mlp.gate_up, mlp.down, mlp.moe, mlp.activation))


def block_methods(device: torch.device, hidden: int, dtype: torch.dtype) -> dict[str, Callable[[Tensor, MoE], Tensor]]:
    """How a block can be computed: each function adds it to the residual stream, in place."""
    eps, norm = 1e-6, torch.ones(hidden, dtype=dtype, device=device)
    methods = {"torch": partial(by_reference, eps=eps, norm=norm)}
    if device.type == "cuda":
        from mini_engine.kernels.moe import add_experts

        pdl = torch.cuda.get_device_capability(device)[0] >= 9
        methods = {"Triton": partial(add_experts, eps=eps, pdl=pdl), "torch._grouped_mm": methods["torch"]}
    return methods


@torch.inference_mode()
def block_rows(config: PretrainedConfig, machine: Machine, device: torch.device) -> Iterator[results.Row]:
    """Time the mixture of experts of one layer, with the router, the norm before it, and the residual after it."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size = BLOCKS, 64
    dtype = getattr(torch, machine.dtype)
    model = random_model(small, dtype, device)
    blocks = [layer.mlp for layer in model.layers]
    shape = model_shape(ModelConfig.from_hf(config.to_dict()))
    for num_tokens in TOKENS[device.type]:
        least = least_block(shape, num_tokens, dtype.itemsize).seconds(machine)
        for name, method in block_methods(device, config.hidden_size, dtype).items():
            # As many calls as make the tokens of a block other ones each time, so they touch other experts.
            streams = [torch.randn(num_tokens, config.hidden_size, device=device).to(dtype) for _ in range(2 * BLOCKS)]
            calls = [partial(method, own, blocks[i % BLOCKS]) for i, own in enumerate(streams)]
            timing = measure(graph_of(calls) if device.type == "cuda" else partial(run_all, calls), device=device.type)
            runs = [seconds / len(calls) for seconds in timing.runs]
            case: dict[str, results.Setting] = {"part": "block", "tokens": num_tokens, "method": name}
            spread = min(runs), max(runs)
            median = Timing(tuple(runs)).seconds
            yield results.Row("time of a block", median, "s", least, LEAST_OF_BLOCK, case, spread)


def run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


# --- decode steps ----------------------------------------------------------------------------------------------------


def make_engine(model: Any, device: torch.device) -> LLMEngine:
    """An engine without options, except that it captures the measured batches only, and keeps no prefixes."""
    batches, longest = BATCHES[device.type], PROMPT[device.type] + max(OUTPUT[device.type], num_steps(device.type))
    options: dict[str, Any] = {"max_batch_size": max(batches), "enable_prefix_caching": False}
    options |= {"max_model_len": longest + 8}
    options |= {"cuda_graph_batch_sizes": batches} if device.type == "cuda" else {"num_pages": 512, "page_size": 16}
    return LLMEngine(model, EngineConfig.of(options), parts=model.parts)


def num_steps(device: str) -> int:
    """Steps of a request in `step_rows`: one timing warms up."""
    return (ROUNDS + 1) * STEPS[device] + 4


def step_rows(engine: LLMEngine, config: ModelConfig, machine: Machine, device: torch.device) -> Iterator[results.Row]:
    """Time decode steps of a batch whose requests have equal lengths."""
    steps, prompt, size = STEPS[device.type], PROMPT[device.type], getattr(torch, machine.dtype).itemsize
    for batch in BATCHES[device.type]:
        requests = Workload(batch, (prompt, prompt), (num_steps(device.type),) * 2, temperature=1.0)
        before = engine.metrics.output_tokens
        for i, (tokens, params) in enumerate(requests.requests(config.vocab_size)):
            engine.add_request(str(i), tokens, params)
        while engine.metrics.output_tokens - before < batch:  # every prompt has been computed
            engine.step()
        seconds = []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            for _ in range(steps):
                engine.step()
            seconds.append((time.perf_counter() - start) / steps)
        assert engine.has_unfinished, "no request ends before all steps are measured"
        while engine.has_unfinished:
            engine.step()
        seconds, keys = seconds[1:], prompt + (ROUNDS + 2) * steps // 2
        least = model_step_cost(model_shape(config), 1, keys, size, batch).seconds(machine)
        case: dict[str, results.Setting] = {"part": "steps", "requests": batch, "keys": keys}
        spread = min(seconds), max(seconds)
        yield results.Row("decode step", statistics.median(seconds), "s", least, LEAST_OF_STEP, case, spread)


# --- serving ---------------------------------------------------------------------------------------------------------


def serving_rows(
    serve: Callable[[Sequence[BenchRequest]], float],
    name: str,
    config: ModelConfig,
    machine: Machine,
    device: torch.device,
) -> Iterator[results.Row]:
    """Serve batches of equal requests in several rounds, each with other tokens.

    Args:
        serve: serves requests, and returns the seconds it took.
        name: of the engine.
        config: the model.
        machine: the device's rates.
        device: the device.
    """
    prompt, output = PROMPT[device.type], OUTPUT[device.type]
    for batch in BATCHES[device.type]:
        requests = Workload(batch, (prompt, prompt), (output, output), temperature=1.0).requests(config.vocab_size)
        seconds = [serve(with_other_tokens(requests, i)) for i in range(ROUNDS + 1)][1:]
        case: dict[str, results.Setting] = {"part": "serving", "requests": batch, "engine": name}
        tokens, size = num_outputs(requests), getattr(torch, machine.dtype).itemsize
        bound = tokens / least_seconds(config, machine, requests, size)
        yield rate_row("throughput", tokens, seconds, bound, LEAST_OF_SERVING, case)


def seconds_of(engine: LLMEngine, requests: Sequence[BenchRequest]) -> float:
    start = time.perf_counter()
    serve_mini_engine(engine, requests)
    return time.perf_counter() - start


def vllm_rows(config: PretrainedConfig, machine: Machine, device: torch.device) -> Iterator[results.Row]:
    """Serve with vLLM, which draws the weights itself: a folder with 61 GB of weights would take minutes to read."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        options = PeerOptions(
            folder, machine.dtype, max_num_seqs=max(BATCHES[device.type]), random_weights=True,
            max_model_len=PROMPT[device.type] + OUTPUT[device.type] + 8, enable_prefix_caching=False,
        )  # fmt: skip
        with closing(PeerProcess("vllm", options)) as peer:

            def serve(requests: Sequence[BenchRequest]) -> float:
                peer(requests)
                return peer.seconds

            yield from serving_rows(serve, "vllm", ModelConfig.from_hf(config.to_dict()), machine, device)


# --- prediction ------------------------------------------------------------------------------------------------------

ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)
OF_LAYER = 14e-6  # seconds of a layer's launches, beside what it reads
SHARE = 0.85  # of the bandwidth, that kernels reach with so many bytes


def predictions() -> str:
    """Derive the README's predictions from the bytes and FLOPs of Qwen3-30B-A3B's shape."""
    config = ModelConfig.from_hf(QWEN3_30B_A3B.to_dict())
    shape, moe = model_shape(config), config.moe
    assert moe is not None
    values = {}
    for num_tokens in ROUTED:
        touched = experts_touched(moe.num_experts, moe.num_experts_per_tok, num_tokens)
        values[f"{num_tokens} tokens: experts touched"] = f"{touched:.1f}"
    for num_tokens in TOKENS["cuda"]:
        cost = least_block(shape, num_tokens, 2)
        kind = "bytes" if cost.is_memory_bound(ASSUMED) else "FLOPs"
        least = f"{quantity(cost.bytes, 'B')}, {cost.flops / 1e9:,.1f} GFLOP, {quantity(cost.seconds(ASSUMED), 's')}"
        values[f"{num_tokens} tokens: a block"] = f"{least}, bound by its {kind}"
    for batch in BATCHES["cuda"]:
        keys = PROMPT["cuda"] + (ROUNDS + 2) * STEPS["cuda"] // 2
        cost = model_step_cost(shape, 1, keys, 2, batch)
        least = cost.seconds(ASSUMED)
        expected = least / SHARE + OF_LAYER * shape.num_layers
        values[f"{batch} requests: a decode step"] = (
            f"{quantity(cost.bytes, 'B')}, bound {quantity(least, 's')} ({batch / least:,.0f} tokens/s); "
            f"expected {quantity(expected, 's')}, {least / expected:.0%} of the bound"
        )
    return predicted(values)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="measure these parts only")
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=["mini_engine"], help="of `serving`")
    chosen = options.parse_args(arguments)
    device = torch.device(chosen.device)
    name, hf = MODELS[device.type]
    config = ModelConfig.from_hf(hf.to_dict())
    serves = "serving" in chosen.only
    if serves and "vllm" in chosen.engines:
        check_installed("vllm")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = measure_machine(device, dtype)
    parameters: Mapping[str, results.Setting] = {"model": name, "rounds": ROUNDS, **installed("vllm")}

    def save(rows: Iterator[results.Row] | Sequence[results.Row]) -> None:
        found = []
        for row in rows:
            print(row.cells()[:5], flush=True)
            found.append(row)
        result = results.new_result(EXPERIMENT, found, parameters, chosen.device)
        record(results.with_recorded(result, chosen.out, section="part"), chosen.out)

    if "routing" in chosen.only:
        save(routing_rows())
    if "block" in chosen.only:
        save(block_rows(hf, machine, device))
    if "steps" in chosen.only or (serves and "mini_engine" in chosen.engines):
        engine = make_engine(random_model(hf, dtype, device), device)
        if "steps" in chosen.only:
            save(step_rows(engine, config, machine, device))
        if serves and "mini_engine" in chosen.engines:
            save(serving_rows(partial(seconds_of, engine), "mini_engine", config, machine, device))
        del engine
        gc.collect()
        torch.cuda.empty_cache()  # so that the next engine finds the memory free
    if serves and "vllm" in chosen.engines:
        save(vllm_rows(hf, machine, device))


if __name__ == "__main__":
    main()
