"""Decodes by FlashInfer's planned kernel and by TensorRT-LLM's XQA: kernels, plans, the engine, and lines of code.

    python experiments/11_trtllm_decode/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/11_trtllm_decode/run.py --predict

On a GPU the heads and the model are Qwen3-0.6B's in bfloat16 with random weights. On a CPU small cases in float32
compare the CPU's own backends, to show that the script works. The result goes to
experiments/11_trtllm_decode/results/<device>.json, below DIR where one is given. With --change the workloads' rows are
added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import code_lines, ledger, results
from book.experiment import command_line, predicted, record
from book.grading.chapter import load_module
from book.paths import repository_root
from book.random_models import QWEN3_0_6B, random_model
from book.units import quantity
from mini_engine.attention.backend import AttentionBackend, create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.bench.run import pages_needed
from mini_engine.bench.workloads import GPU, LATENCY, LONG_CONTEXT, Workload, least_seconds, num_outputs
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.roofline import Machine, measure_machine

kernels = load_module("experiment_06", Path(__file__).resolve().parents[1] / "06_flashinfer_vs_flex" / "run.py")

EXPERIMENT = "11_trtllm_decode"
SECTIONS = DECODE, PLAN, ENGINE, LINES = "decode", "plan", "engine", "lines"
PAGE_SIZE = 16
WORKLOADS = {"throughput": GPU, "latency": LATENCY, "long-context": LONG_CONTEXT}
READ = "the keys and values of all requests, read once at the measured bandwidth, with queries and output"
STEPS = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
FILES = ("attention/flashinfer.py", "attention/trtllm.py")
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Decodes of one step: `requests` with between `shortest` and `longest` keys each."""

    requests: int
    shortest: int
    longest: int

    @property
    def keys(self) -> str:
        """The lengths as the results name them."""
        return f"{self.longest}" if self.shortest == self.longest else f"{self.shortest} to {self.longest}"

    @property
    def kv_lens(self) -> np.ndarray:
        """Keys of each request, the same in every run."""
        return np.random.default_rng(0).integers(self.shortest, self.longest + 1, self.requests)

    def kv_bytes_per_layer(self, setting: Setting, kv_dtype: torch.dtype) -> int:
        """Keys and values of one layer."""
        _, kv_heads, head_dim = setting.heads
        return 2 * int(self.kv_lens.sum()) * kv_heads * head_dim * kv_dtype.itemsize

    def bytes_per_layer(self, setting: Setting, kv_dtype: torch.dtype) -> int:
        """Keys and values, queries and output of one layer."""
        q_heads, _, head_dim = setting.heads
        of_queries = 2 * self.requests * q_heads * head_dim * setting.dtype.itemsize
        return self.kv_bytes_per_layer(setting, kv_dtype) + of_queries


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        dtype: of queries and output.
        heads: query heads, KV heads, size of a head.
        cases: decodes whose kernels are measured.
        plans: decodes whose plans are measured.
        backends: of ours.
        layouts: of the pages.
        kv_dtypes: dtypes of keys and values.
        repetitions: of each figure; the ways take turns.
        most_bytes: of the keys and values of all layers of a case: enough to leave the L2 cache, not all memory.
    """

    dtype: torch.dtype
    heads: tuple[int, int, int]
    cases: tuple[Case, ...]
    plans: tuple[Case, ...]
    backends: tuple[str, ...]
    layouts: tuple[str, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    repetitions: int
    most_bytes: float


# All equal, up to two million keys in a layer; then lengths as they are in a serving engine.
EQUAL = tuple(
    Case(requests, keys, keys)
    for requests in (1, 8, 64, 256)
    for keys in (128, 1024, 8192, 32_768)
    if requests * keys <= 2**21
)
MIXED = (Case(64, 100, 1600), Case(256, 100, 1600), Case(64, 1000, 16_000))
SETTINGS = {
    "cpu": Setting(
        torch.float32, (4, 2, 16), (Case(1, 64, 64), Case(3, 20, 60)), (Case(3, 20, 60),), ("torch", "torch_padded"),
        ("NHD",), (torch.float32, torch.bfloat16), 3, 1e5,
    ),
    "cuda": Setting(
        torch.bfloat16, (16, 8, 128), EQUAL + MIXED, (Case(1, 1024, 1024), Case(64, 1024, 1024), MIXED[1]),
        ("flashinfer", "flashinfer_trtllm", "flash_decoding"), ("NHD", "HND"),
        (torch.bfloat16, torch.float8_e4m3fn), 5, 4e9,
    ),
}  # fmt: skip


def step_of(case: Case, device: torch.device) -> tuple[StepBatch, int]:
    """A step over pages in random order, as a CUDA graph would replay it, and the number of its pages."""
    counts = -(-case.kv_lens // PAGE_SIZE)
    batch = StepBatch.build(
        token_ids=np.zeros(case.requests, dtype=np.int64),
        num_new=None,
        kv_lens=case.kv_lens,
        pages=np.random.default_rng(0).permutation(int(counts.sum())),
        page_size=PAGE_SIZE,
        page_capacity=case.requests * int(counts.max()) if device.type == "cuda" else None,
        device=device,
    )
    return batch, int(counts.sum())


def layers_of(case: Case, setting: Setting, kv_dtype: torch.dtype) -> int:
    """As many layers as fill `most_bytes`, 2 to 28: each reads keys that no cache holds any more."""
    return max(2, min(28, int(setting.most_bytes // case.bytes_per_layer(setting, kv_dtype))))


def planned_backends(
    case: Case, setting: Setting, layout: str, kv_dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, AttentionBackend]]:
    """Each backend with a plan of the case, over one cache of random keys."""
    q_heads, kv_heads, head_dim = setting.heads
    stored = None if kv_dtype == setting.dtype else kv_dtype
    specs = [
        AttentionSpec(i, q_heads, kv_heads, head_dim, head_dim**-0.5, kv_dtype=stored)
        for i in range(layers_of(case, setting, kv_dtype))
    ]
    batch, num_pages = step_of(case, device)
    cache = PagedKVCache(specs, num_pages, PAGE_SIZE, setting.dtype, device, layout)
    for pair in cache.layers:
        for pages in pair:
            pages.copy_(torch.randn(pages.shape, device=device, dtype=setting.dtype))
    for name in setting.backends:
        backend = create_backend(name, specs, cache, Parts())
        backend.plan(batch)
        yield name, backend


def run_layers(backend: AttentionBackend, case: Case, setting: Setting, device: torch.device) -> Run:
    """A function that attends in every layer once."""
    q_heads, _, head_dim = setting.heads
    q = torch.randn(case.requests, q_heads, head_dim, device=device, dtype=setting.dtype)
    return lambda: [backend.run(layer, q) for layer in range(len(backend.specs))]


def free() -> None:
    """Return the memory of the last case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row(
    figure: str, values: Sequence[float], unit: str, bound: float | None, source: str, case: dict[str, results.Setting]
) -> results.Row:
    """The median of several repetitions, printed."""
    made = results.Row(figure, statistics.median(values), unit, bound, source, case, (min(values), max(values)))
    print(made.cells()[:5], flush=True)
    return made


def decode_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time of one layer for every backend, layout and dtype of the keys, in turns, beside the bytes' bound."""
    rows = []
    for case in setting.cases:
        runs: dict[tuple[str, str, torch.dtype], Run] = {}  # a graph does not keep alive what it reads
        for layout in setting.layouts:
            for kv_dtype in setting.kv_dtypes:
                for name, backend in planned_backends(case, setting, layout, kv_dtype, device):
                    runs[name, layout, kv_dtype] = run_layers(backend, case, setting, device)
        replays = {way: kernels.captured(run, device) for way, run in runs.items()}
        times: dict[tuple[str, str, torch.dtype], list[float]] = {way: [] for way in replays}
        for _ in range(setting.repetitions):
            for way, replay in replays.items():
                times[way].append(kernels.seconds(replay, device) / layers_of(case, setting, way[2]))
        for (name, layout, kv_dtype), own in times.items():
            named: dict[str, results.Setting] = {
                "way": name, "layout": layout, "keys in": str(kv_dtype).removeprefix("torch."),
                "requests": case.requests, "keys": case.keys,
            }  # fmt: skip
            bound = case.bytes_per_layer(setting, kv_dtype) / machine.bandwidth
            rows.append(row("decode: a layer", own, "s", bound, READ, named))
        del replays, runs, backend
        free()
    return rows


def plan_rows(setting: Setting, device: torch.device) -> list[results.Row]:
    """Host time of a plan, which every step needs."""
    rows = []
    for case in setting.plans:
        batch, _ = step_of(case, device)
        backends = dict(planned_backends(case, setting, setting.layouts[0], setting.dtype, device))
        times: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(20):
            for name, backend in backends.items():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                backend.plan(batch)
                times[name].append(time.perf_counter() - start)
        for name, own in times.items():
            named: dict[str, results.Setting] = {"way": name, "requests": case.requests, "keys": case.keys}
            rows.append(row("plan: host time", own, "s", None, "work of the host, which has no roofline", named))
        del backends
        free()
    return rows


def make_engine(model: CausalLM, backend: str, workload: Workload, vocab_size: int) -> LLMEngine:
    """An engine whose pool holds all requests at once; on a GPU its decode steps are CUDA graphs."""
    config = EngineConfig(
        attn_backend=backend,
        kv_layout="HND" if model.device.type == "cuda" else "NHD",
        num_pages=pages_needed(workload.requests(vocab_size), PAGE_SIZE) + workload.num_requests,
        page_size=PAGE_SIZE,
        max_batch_size=workload.num_requests,
        max_model_len=workload.longest,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        persistent_decode=False,
    )
    return LLMEngine(model, config, parts=model.parts)


def engine_rows(
    model: CausalLM, setting: Setting, machine: Machine, workloads: Sequence[str], repetitions: int = 3
) -> list[results.Row]:
    """Output tokens per second of every workload, in turns; the first run of each engine is a warm-up."""
    rows, vocab_size = [], model.config.vocab_size
    for name in workloads:
        workload = WORKLOADS[name]
        requests = workload.requests(vocab_size)
        engines = {way: make_engine(model, way, workload, vocab_size) for way in setting.backends}
        served: dict[str, list[Any]] = {way: [] for way in engines}
        for _ in range(repetitions + 1):
            for way, engine in engines.items():
                served[way].append(kernels.serve(engine, workload, vocab_size))
        bound = num_outputs(requests) / least_seconds(model.config, machine, requests, setting.dtype.itemsize)
        for way, runs in served.items():
            named: dict[str, results.Setting] = {"workload": name, "engine": f"mini_engine, {way}"}
            rates = [num_outputs(requests) / run.seconds for run in runs[1:]]
            rows.append(row("throughput", rates, "tokens/s", bound, STEPS, named))
            if workload is LONG_CONTEXT:
                rows.append(kernels.bandwidth_row(runs[1:], machine, named))
        del engines, engine
        free()
    return rows


def line_rows() -> list[results.Row]:
    """Lines of code of the two backends, the second of which builds on the first."""
    why = "a count, without blank lines, comments and docstrings"
    return [
        results.Row(
            "lines of code", code_lines.count((repository_root() / "mini_engine" / name).read_text(encoding="utf-8")),
            "lines", None, why, {"file": name},
        )
        for name in FILES
    ]  # fmt: skip


# --- prediction ------------------------------------------------------------------------------------------------------

MULTIPROCESSORS = 132  # of an H200
SECTOR = 32  # bytes that HBM reads at least


def xqa_splits(requests: int, kv_heads: int) -> int:
    """Thread blocks of XQA that share a request's keys of one KV head, in bfloat16."""
    return max(1, MULTIPROCESSORS // (kv_heads * requests))


def predictions() -> str:
    """Derive the README's predictions: bytes, thread blocks of XQA, and runs of memory in a page."""
    setting = SETTINGS["cuda"]
    _, kv_heads, head_dim = setting.heads
    wide, narrow = setting.kv_dtypes
    case = Case(256, 1024, 1024)
    in_bfloat16, in_e4m3 = (case.bytes_per_layer(setting, dtype) for dtype in (wide, narrow))
    splits = {requests: xqa_splits(requests, kv_heads) for requests in range(1, MULTIPROCESSORS)}
    unsplit = min(requests for requests, count in splits.items() if count == 1)
    blocks = 8 * kv_heads * splits[8]
    token = head_dim * wide.itemsize  # one KV head's key
    return predicted(
        {
            f"keys and values of a layer, {case.requests} requests of {case.longest:,} keys": quantity(
                case.kv_bytes_per_layer(setting, wide), "B"
            ),
            "all bytes of this layer in e4m3": f"{in_e4m3 / in_bfloat16:.3f} of those in bfloat16",
            "splits of XQA": f"{splits[1]} for one request, {splits[8]} for 8, 1 from {unsplit} requests on",
            "8 requests": f"{blocks} thread blocks, {MULTIPROCESSORS - blocks} multiprocessors idle",
            "a page of one KV head, HND": f"{PAGE_SIZE * token / 2**10:g} KiB, {PAGE_SIZE * token / SECTOR:g} sectors",
            "a page of one KV head, NHD": f"{PAGE_SIZE} runs of {token} B, {token / SECTOR:g} sectors each",
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    options.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--change", help="add the workloads to the engine's ledger: what is new, in a few words")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    if DECODE in chosen.only:
        rows += decode_rows(setting, machine, device)
    if PLAN in chosen.only:
        rows += plan_rows(setting, device)
    if ENGINE in chosen.only and device.type == "cuda":
        model = random_model(QWEN3_0_6B, setting.dtype, device)
        rows += engine_rows(model, setting, machine, chosen.workloads)
    if LINES in chosen.only:
        rows += line_rows()
    parameters: dict[str, results.Setting] = {
        "heads": "{} query heads, {} KV heads of {}".format(*setting.heads),
        "dtype": machine.dtype,
        "page size": PAGE_SIZE,
        "repetitions of a kernel": setting.repetitions,
        "repetitions of a workload": 3,
    }
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
