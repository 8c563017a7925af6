"""A decode step of a few tokens as one kernel, beside the same step as a CUDA graph of a few hundred.

    python experiments/12_persistent_layer/run.py [--out DIR] [--only SECTION ...] [--change "what is new"]
    python experiments/12_persistent_layer/run.py --predict

Measuring needs a Hopper GPU. The result goes to experiments/12_persistent_layer/results/<device>.json, below DIR where
one is given. With --change the workload's rows are added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import LLAMA_3_1_8B, LLAMA_3_2_1B, QWEN3_0_6B, random_model
from book.units import quantity
from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.bench.workloads import LATENCY, least_seconds, model_shape, num_outputs
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.config import ModelConfig
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.transform import bind_layers
from mini_engine.parts import default_parts
from mini_engine.roofline import Machine, measure_machine, model_step_cost

EXPERIMENT = "12_persistent_layer"
SECTIONS = STEP, TOKENS, TRACE, ENGINE = "step", "tokens", "trace", "engine"
CONTEXTS = (128, 384, 512, 513, 1024, 2048, 4096, 8192)  # a KV head of 513 keys has five splits
SHAPES = {"Qwen3-0.6B": QWEN3_0_6B, "Llama-3.2-1B": LLAMA_3_2_1B, "Llama-3.1-8B": LLAMA_3_1_8B}
SEVERAL = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 8))  # requests, and tokens of each
SEVERAL_CONTEXTS = (128, 384, 1024)  # keys of each of several requests
PAGE_SIZE, REPETITIONS, REPLAYS = 16, 7, 20
ONE, MANY = "one kernel", "a graph of many"
READ = "the weights, and the keys and values of the request, read once at the measured bandwidth"
READ_SEVERAL = "the weights, and the keys and values of each request, read once at the measured bandwidth"
READ_AHEAD = "none: weights and keys are read ahead, while a block waits for others"
# The parts of a layer: from which point of which phase to which, numbered as in persistent_batch.cu.
QKV, OUT, GATE_UP, DOWN = range(4)
ATTENDED, MERGED, RECEIVED, PUBLISHED = range(4)
PARTS = {
    "QKV, receive": ((QKV - 1, PUBLISHED), (QKV, RECEIVED)),
    "QKV, multiply": ((QKV, RECEIVED), (QKV, PUBLISHED)),
    "attend": ((QKV, PUBLISHED), (OUT, ATTENDED)),
    "merge": ((OUT, ATTENDED), (OUT, MERGED)),
    "O, receive": ((OUT, MERGED), (OUT, RECEIVED)),
    "O, multiply": ((OUT, RECEIVED), (OUT, PUBLISHED)),
    "gate and up, receive": ((OUT, PUBLISHED), (GATE_UP, RECEIVED)),
    "gate and up, multiply": ((GATE_UP, RECEIVED), (GATE_UP, PUBLISHED)),
    "down, receive": ((GATE_UP, PUBLISHED), (DOWN, RECEIVED)),
    "down, multiply": ((DOWN, RECEIVED), (DOWN, PUBLISHED)),
}


class TracedDecode(PersistentDecode):
    """Notes when each thread block passes each point of a step of two or more tokens."""

    def _constants(self, tokens: int) -> dict[str, int]:
        return super()._constants(tokens) | {"TRACED": 1}

    def passed(self, tokens: int) -> Int64[np.ndarray, "blocks phases points"]:
        """The latest step's trace, in cycles: a block's differences count, because each SM has a clock of its own."""
        constants = self._constants(tokens)
        cycles = np.zeros((constants["BLOCKS"], 4 * constants["LAYERS"] + 1, 4), np.int64)
        if error := self._library(tokens).copy_trace(cycles.ctypes.data_as(ctypes.c_void_p)):
            raise RuntimeError(f"copying the trace failed with CUDA error {error}")
        return cycles


class Ways:
    """A step of a few tokens after some keys, in both ways, captured.

    Args:
        model: the model.
        attn_backend: attention of the graph of many.
        kernel: the class of the one kernel.
    """

    def __init__(
        self, model: LlamaForCausalLM, attn_backend: str, kernel: type[PersistentDecode] = PersistentDecode
    ) -> None:
        self._model, specs = model, model.attention_specs
        self._cache = PagedKVCache(specs, CONTEXTS[-1] // PAGE_SIZE, PAGE_SIZE, model.dtype, model.device)
        for pair in self._cache.layers:
            for tensor in pair:
                tensor.normal_()
        self.persistent = kernel(model, self._cache)
        self._backend = create_backend(attn_backend, specs, self._cache, default_parts(model.device))
        self._forward = bind_layers(model, self._backend)
        self._last_token = torch.zeros(1, dtype=torch.long, device=model.device)

    def captured(self, requests: Sequence[Sequence[int]]) -> dict[str, torch.cuda.CUDAGraph]:
        """The graphs of a step, whose pages are in random order.

        Args:
            requests: the number of keys of each request after each of its tokens.
        """
        free, pages = torch.randperm(self._cache.num_pages), list[Tensor]()
        for lengths in requests:
            own, free = free.tensor_split([-(-max(lengths) // PAGE_SIZE)])
            pages += [own[: -(-length // PAGE_SIZE)] for length in lengths]
        kv_lens = [length for lengths in requests for length in lengths]
        batch = StepBatch.build(
            token_ids=[1] * len(kv_lens), num_new=None, kv_lens=kv_lens, pages=torch.cat(pages).numpy(),
            page_size=PAGE_SIZE, page_capacity=self._cache.num_pages, device=self._model.device,
        )  # fmt: skip
        self._backend.plan(batch)
        self._batch = batch  # the graphs read its arrays

        def many() -> torch.Tensor:
            hidden = self._forward(batch.feed(self._last_token), batch.positions)
            return self._model.compute_logits(hidden)

        runs: dict[str, Callable[[], torch.Tensor]] = {
            ONE: lambda: self.persistent(batch, self._last_token), MANY: many
        }  # fmt: skip
        one, other = (run() for run in runs.values())
        assert (one - other).norm() < 0.05 * other.norm(), "both ways compute the same logits"
        graphs = {}
        for name, run in runs.items():
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                run()
        return graphs


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    """Mean time of some replays, one behind the other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / REPLAYS


def timed(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, list[float]]:
    """Seconds of a step by each graph, in turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPETITIONS):
        for name, graph in graphs.items():
            times[name].append(seconds_of(graph))
    return times


@torch.inference_mode()
def step_rows(model: LlamaForCausalLM, machine: Machine) -> list[results.Row]:
    """Seconds of a step of one token at several context lengths, in both ways."""
    rows, ways = [], Ways(model, "flashinfer")
    for num_keys in CONTEXTS:
        bound = model_step_cost(model_shape(model.config), 1, num_keys, model.dtype.itemsize).seconds(machine)
        for name, own in timed(ways.captured([[num_keys]])).items():
            case: dict[str, results.Setting] = {"keys": num_keys, "way": name}
            rows.append(
                results.Row("decode step", statistics.median(own), "s", bound, READ, case, (min(own), max(own)))
            )
            print(rows[-1].cells()[:5], flush=True)
    return rows


def key_counts(requests: int, tokens: int, num_keys: int) -> list[list[int]]:
    """Each request's number of keys after each of its tokens: `num_keys` after the last."""
    return [list(range(num_keys - tokens + 1, num_keys + 1))] * requests


@torch.inference_mode()
def token_rows(device: torch.device, machine: Machine) -> list[results.Row]:
    """Seconds of a step of one to eight tokens, in both ways, for models of several sizes."""
    rows = []
    for name, config in SHAPES.items():
        model = random_model(config, torch.bfloat16, device)
        assert isinstance(model, LlamaForCausalLM)
        ways, shape = Ways(model, "flash_decoding"), model_shape(model.config)
        for num_keys in SEVERAL_CONTEXTS:
            for requests, tokens in SEVERAL:
                bound = model_step_cost(shape, tokens, num_keys, model.dtype.itemsize, requests).seconds(machine)
                for way, own in timed(ways.captured(key_counts(requests, tokens, num_keys))).items():
                    case: dict[str, results.Setting] = {
                        "model": name, "requests": requests, "tokens of each": tokens, "keys": num_keys, "way": way,
                    }  # fmt: skip
                    value, spread = statistics.median(own), (min(own), max(own))
                    rows.append(results.Row("step of a few tokens", value, "s", bound, READ_SEVERAL, case, spread))
                    print(rows[-1].cells()[:5], flush=True)
    return rows


@torch.inference_mode()
def trace_rows(model: LlamaForCausalLM) -> list[results.Row]:
    """Mean seconds of the parts of a layer in one kernel, over its blocks and all layers but the first."""
    rows, ways = [], Ways(model, "flash_decoding", TracedDecode)
    assert isinstance(ways.persistent, TracedDecode)
    layers = 4 * np.arange(1, len(model.layers))  # the first phase of each
    for num_keys in SEVERAL_CONTEXTS:
        for requests in (2, 4, 8):
            seconds = statistics.median(timed(ways.captured(key_counts(requests, 1, num_keys)))[ONE])
            cycles = ways.persistent.passed(requests)
            per_cycle = seconds / (cycles[:, -1, PUBLISHED] - cycles[:, 0, RECEIVED]).mean()
            for part, ((phase, start), (until, end)) in PARTS.items():
                lasted = cycles[:, layers + until, end] - cycles[:, layers + phase, start]
                case: dict[str, results.Setting] = {"requests": requests, "keys": num_keys, "part": part}
                rows.append(
                    results.Row("part of a layer", float(lasted.mean() * per_cycle), "s", None, READ_AHEAD, case)
                )
                print(rows[-1].cells()[:5], flush=True)
    return rows


def engine_rows(model: LlamaForCausalLM, machine: Machine, repetitions: int = 5) -> list[results.Row]:
    """The workload `latency` with and without the persistent kernel, in turns after a warm-up."""
    requests = LATENCY.requests(model.config.vocab_size)
    options = {"attn_backend": "flashinfer", "page_size": PAGE_SIZE, "num_pages": 64, "max_batch_size": 1}
    config = EngineConfig.of(options | {"max_model_len": LATENCY.longest, "enable_prefix_caching": False})
    engines = {
        name: LLMEngine(model, replace(config, persistent_decode=persistent), parts=model.parts)
        for name, persistent in {ONE: True, MANY: False}.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(repetitions + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            for index, (prompt, params) in enumerate(requests):
                engine.add_request(str(index), prompt, params)
            while engine.has_unfinished:
                engine.step()
            if repetition:
                rates[name].append(num_outputs(requests) / (time.perf_counter() - start))
    bound = num_outputs(requests) / least_seconds(model.config, machine, requests, model.dtype.itemsize)
    rows = []
    for name, own in rates.items():
        case: dict[str, results.Setting] = {"workload": "latency", "engine": f"mini_engine, {name}"}
        rows.append(
            results.Row("throughput", statistics.median(own), "tokens/s", bound, READ, case, (min(own), max(own)))
        )
        print(rows[-1].cells()[:5], flush=True)
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

# One request computes too little for the FLOP rate to matter.
ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)
KEYS = 384
PHASES = ("queries, keys and values", "attention", "output projection", "gate and up", "down")
EXCHANGE, COMPUTE = 1e-6, 1e-6  # seconds of each phase
KERNELS_PER_LAYER, KERNEL = 10, 5e-6  # of a graph of many, and seconds of each
MEASURED_KERNELS_PER_LAYER = 5  # of the graph that the script measures


def predictions() -> str:
    """Derive the README's predictions: the bytes of a step and the time to read them, one kernel, and many kernels."""
    shape, size = model_shape(ModelConfig.from_hf(QWEN3_0_6B.to_dict())), torch.bfloat16.itemsize
    q_size, kv_size = shape.num_qo_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = size * shape.hidden_size * (2 * q_size + 2 * kv_size + 3 * shape.intermediate_size)
    lm_head = size * shape.hidden_size * shape.vocab_size
    weights, cache = shape.num_layers * layer + lm_head, shape.num_layers * 2 * KEYS * kv_size * size
    bound, read_layer, read_lm_head = (count / ASSUMED.bandwidth for count in (weights + cache, layer, lm_head))
    one_layer = len(PHASES) * (EXCHANGE + COMPUTE)
    eight = {
        num_keys: shape.num_layers * max(one_layer, (layer + 8 * 2 * num_keys * kv_size * size) / ASSUMED.bandwidth)
        + read_lm_head
        for num_keys in SEVERAL_CONTEXTS
    }
    one = shape.num_layers * one_layer + read_lm_head
    many, measured = (
        shape.num_layers * kernels * KERNEL + read_lm_head
        for kernels in (KERNELS_PER_LAYER, MEASURED_KERNELS_PER_LAYER)
    )

    def tokens(seconds: float) -> str:
        """The rate at a step of so many seconds, with three digits."""
        return quantity(round(1 / seconds, -1), "tokens/s")

    return predicted(
        {
            "weights": quantity(weights, "B"),
            f"keys and values of {KEYS} tokens": quantity(cache, "B"),
            "reading both": f"{quantity(bound, 's')}, {tokens(bound)}",
            "a layer": f"{quantity(one_layer, 's')}, and {quantity(read_layer, 's', 2)} to read its weights",
            "LM head": quantity(read_lm_head, "s"),
            "one kernel": f"{quantity(one, 's')}, {tokens(one)}, {bound / one:.0%} of the bound",
            "a graph of many": (
                f"{quantity(many, 's')}, {bound / many:.0%} of the bound, {many / one:.1f} times as long as one kernel"
            ),
            f"a graph of {MEASURED_KERNELS_PER_LAYER} kernels per layer": f"{measured * 1e3:.2f} ms",
            **{
                f"eight requests of {num_keys} keys": (
                    f"{quantity(seconds, 's')}, {seconds / one:.2f} times as long as one request, "
                    f"{quantity(round(8 / seconds, -2), 'tokens/s')}"
                )
                for num_keys, seconds in eight.items()
            },
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    options.add_argument("--change", help="add the workload to the engine's ledger: what is new, in a few words")
    chosen = options.parse_args(arguments)
    if chosen.device == "cpu":
        sys.exit("this experiment compares kernels of a GPU: run it on one")
    device = torch.device("cuda")
    model, machine = random_model(QWEN3_0_6B, torch.bfloat16, device), measure_machine(device, torch.bfloat16)
    assert isinstance(model, LlamaForCausalLM)
    rows: list[results.Row] = []
    if STEP in chosen.only:
        rows += step_rows(model, machine)
    if TOKENS in chosen.only:
        rows += token_rows(device, machine)
    if TRACE in chosen.only:
        rows += trace_rows(model)
    if ENGINE in chosen.only:
        rows += engine_rows(model, machine)
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape", "dtype": machine.dtype, "page size": PAGE_SIZE,
        "repetitions of a step": REPETITIONS, "repetitions of the workload": 5,
    }  # fmt: skip
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(chosen.only) < set(SECTIONS):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)
    if chosen.change:
        for row in rows:
            if row.figure == "throughput":
                ledger.add(result, row, chosen.change, chosen.out)


if __name__ == "__main__":
    main()
