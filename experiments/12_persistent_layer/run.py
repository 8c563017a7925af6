"""A decode step of one request as one kernel, beside the same step as a CUDA graph of a few hundred.

    python experiments/12_persistent_layer/run.py [--out DIR] [--only SECTION ...] [--change "what is new"]
    python experiments/12_persistent_layer/run.py --predict

Measuring needs a Hopper GPU. The result goes to experiments/12_persistent_layer/results/<device>.json, below DIR where
one is given. With --change the workload's rows are added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, random_model
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
SECTIONS = STEP, ENGINE = "step", "engine"
CONTEXTS = (128, 384, 512, 513, 1024, 2048, 4096, 8192)  # a KV head of 513 keys has five splits
PAGE_SIZE, REPETITIONS, REPLAYS = 16, 7, 20
ONE, MANY = "one kernel", "a graph of many"
READ = "the weights, and the keys and values of the request, read once at the measured bandwidth"


class Ways:
    """A step of one request after some keys, in both ways, captured."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model, specs = model, model.attention_specs
        self._cache = PagedKVCache(specs, CONTEXTS[-1] // PAGE_SIZE, PAGE_SIZE, model.dtype, model.device)
        for pair in self._cache.layers:
            for tensor in pair:
                tensor.normal_()
        self._persistent = PersistentDecode(model, self._cache)
        self._backend = create_backend("flashinfer", specs, self._cache, default_parts(model.device))
        self._forward = bind_layers(model, self._backend)
        self._last_token = torch.zeros(1, dtype=torch.long, device=model.device)

    def captured(self, num_keys: int) -> dict[str, torch.cuda.CUDAGraph]:
        """The graphs of a step whose request then has so many keys, on pages in random order."""
        pages = torch.randperm(self._cache.num_pages)[: -(-num_keys // PAGE_SIZE)]
        batch = StepBatch.build(
            token_ids=[1], num_new=None, kv_lens=[num_keys], pages=pages.numpy(), page_size=PAGE_SIZE,
            page_capacity=self._cache.num_pages, device=self._model.device,
        )  # fmt: skip
        self._backend.plan(batch)

        def many() -> torch.Tensor:
            hidden = self._forward(batch.feed(self._last_token), batch.positions)
            return self._model.compute_logits(hidden)

        runs: dict[str, Callable[[], torch.Tensor]] = {
            ONE: lambda: self._persistent(batch, self._last_token), MANY: many
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


@torch.inference_mode()
def step_rows(model: LlamaForCausalLM, machine: Machine) -> list[results.Row]:
    """Seconds of a step at several context lengths, the two ways in turns."""
    rows, ways = [], Ways(model)
    for num_keys in CONTEXTS:
        graphs = ways.captured(num_keys)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(REPETITIONS):
            for name, graph in graphs.items():
                times[name].append(seconds_of(graph))
        bound = model_step_cost(model_shape(model.config), 1, num_keys, model.dtype.itemsize).seconds(machine)
        for name, own in times.items():
            case: dict[str, results.Setting] = {"keys": num_keys, "way": name}
            rows.append(
                results.Row("decode step", statistics.median(own), "s", bound, READ, case, (min(own), max(own)))
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
