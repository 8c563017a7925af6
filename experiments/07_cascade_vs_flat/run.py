"""Cascade against flat attention over shared prefixes: one layer's kernels, and the engine's shared-prefix workload.

    python experiments/07_cascade_vs_flat/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/07_cascade_vs_flat/run.py --predict

On a GPU the heads and the model are Qwen3-0.6B's in bfloat16, in pages of 16 tokens. On a CPU a small case in float32
runs both in PyTorch, to show that the script works. The section `hbm` needs Nsight Compute
(`ncu`). The result goes to experiments/07_cascade_vs_flat/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import csv
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, random_model
from mini_engine.attention.backend import create_backend
from mini_engine.attention.cascade import own_pages
from mini_engine.attention.levels import LevelCosts, LevelPlanner
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch, upload_levels
from mini_engine.bench.workloads import SHARED_PREFIX, least_seconds, model_shape
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.roofline import Machine, measure_machine, model_step_cost

EXPERIMENT = "07_cascade_vs_flat"
SECTIONS = KERNELS, HBM, ENGINE = "kernels", "hbm", "engine"
FLAT, CASCADE, WRAPPER, BY_HAND = "flat", "cascade", "MultiLevelCascade", "two levels by hand"
READ_ONCE = "the prefix and each request's own keys, read once at the measured bandwidth"
ONCE = "the prefix and each request's own keys, read once"
ALWAYS = LevelCosts(1.0, 0.0, 0.0, 0.0)  # a level costs nothing: the planner takes every shared page


@dataclass(frozen=True)
class Case:
    """A decode of requests that share a prefix.

    Attributes:
        requests: how many.
        shared: tokens that all of them share.
        own: tokens of each.
    """

    requests: int
    shared: int
    own: int

    @property
    def flat_keys(self) -> int:
        """Keys that flat attention reads."""
        return self.requests * (self.shared + self.own)

    @property
    def cascade_keys(self) -> int:
        """Keys that cascade attention reads."""
        return self.shared + self.requests * self.own


@dataclass(frozen=True)
class Setting:
    """What runs on a kind of device: cases, dtype, query heads, KV heads and head size, and repetitions."""

    cases: tuple[Case, ...]
    dtype: torch.dtype
    heads: tuple[int, int, int]
    repetitions: int

    @property
    def key_bytes(self) -> int:
        """Bytes of the key and the value of one token."""
        _, kv_heads, head_dim = self.heads
        return 2 * kv_heads * head_dim * self.dtype.itemsize


PREFIXES, BATCHES = (1024, 4096, 16_384, 65_536), (8, 16, 64, 256, 512)
SETTINGS = {
    "cpu": Setting((Case(8, 512, 32),), torch.float32, (9, 3, 64), 3),
    "cuda": Setting(
        (
            *(Case(batch, prefix, 128) for prefix in PREFIXES for batch in BATCHES if batch * prefix <= 2**23),
            Case(64, 256, 128),
            Case(256, 256, 128),
            Case(64, 65_536, 256),
        ),
        torch.bfloat16,
        (16, 8, 128),
        5,
    ),
}
COUNTED = (Case(64, 4096, 128), Case(64, 65_536, 128))  # cases whose bytes from HBM a profiler counts
Run = Callable[[], object]


class Step:
    """One decode step over a cache of one layer, whose pages lie in random order.

    Attributes:
        flat: the step without levels.
        cascade: the same step with one level, the shared prefix.
    """

    def __init__(self, case: Case, setting: Setting, device: torch.device, page_size: int) -> None:
        self.setting, self.page_size = setting, page_size
        shared, own = case.shared // page_size, -(-case.own // page_size)
        num_pages = shared + case.requests * own
        q_heads, kv_heads, head_dim = setting.heads
        self.specs = [AttentionSpec(0, q_heads, kv_heads, head_dim, head_dim**-0.5)]
        layout = "HND" if device.type == "cuda" else "NHD"
        self.cache = PagedKVCache(self.specs, num_pages, page_size, setting.dtype, device, layout)
        for tensor in self.cache.layers[0]:
            tensor.normal_()
        pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
        table = PageTable(num_pages, page_size, case.requests, shared + own)
        rows = np.array([table.allocate() for _ in range(case.requests)])
        of_row = [np.append(pages[:shared], pages[shared + i * own : shared + (i + 1) * own]) for i in rows]
        table.table[rows], table.counts[rows] = np.stack(of_row), shared + own
        computed, ones = np.full(case.requests, case.shared + case.own - 1), np.ones(case.requests, dtype=np.int64)
        planner = LevelPlanner(ALWAYS, page_size)
        order, levels = planner.arrange(table, rows, ones, computed, rows + 1)
        arrays: dict[str, Any] = {
            "token_ids": np.zeros(case.requests, dtype=np.int64), "num_new": None, "kv_lens": computed + 1,
            "pages": table.pages_of(rows[order], np.full(case.requests, shared + own)), "page_size": page_size,
            "device": device,
        }  # fmt: skip
        self.flat, self.cascade = (
            StepBatch.build(**arrays),
            StepBatch.build(**arrays, levels=upload_levels(levels, device)),
        )
        self.q = torch.randn(case.requests, q_heads, head_dim, device=device).to(setting.dtype)

    def backend(self, name: str, batch: StepBatch) -> Run:
        """The layer of a backend of ours."""
        backend = create_backend(name, self.specs, self.cache, Parts())
        backend.plan(batch)
        return lambda: backend.run(0, self.q)

    def multi_level_cascade(self) -> Run:
        """FlashInfer's wrapper, which chooses its kernels itself."""
        import flashinfer

        [level], own = self.cascade.levels, own_pages(self.cascade)
        one_each = torch.arange(len(self.q) + 1, dtype=torch.int32)
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, self._workspace(), self.cache.layout)
        wrapper.plan(
            [level.qo_indptr, one_each],
            [level.kv_page_indptr, own.kv_page_indptr],
            [level.kv_page_indices, own.kv_page_indices],
            [level.kv_last_page_len, own.kv_last_page_len],
            *self.setting.heads,
            self.page_size,
            causal=True,
            **self._dtypes,
        )
        return lambda: wrapper.run(self.q, self.cache.layers[0])

    def by_hand(self) -> Run:
        """One prefill call over the prefix without a mask, one decode call over the own keys, and a merge."""
        import flashinfer

        [level], own, layout = self.cascade.levels, own_pages(self.cascade), self.cache.layout
        over_prefix = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace(), layout, backend="fa2")
        over_prefix.plan(
            level.qo_indptr, level.kv_page_indptr, level.kv_page_indices, level.kv_last_page_len, *self.setting.heads,
            self.page_size, causal=False, **self._dtypes,
        )  # fmt: skip
        over_own = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace(), layout)
        over_own.plan(
            own.kv_page_indptr, own.kv_page_indices, own.kv_last_page_len, *self.setting.heads, self.page_size,
            **self._dtypes,
        )  # fmt: skip
        pages = self.cache.layers[0]

        def run() -> torch.Tensor:
            shared = over_prefix.run(self.q, pages, return_lse=True)
            return flashinfer.merge_state(*shared, *over_own.run(self.q, pages, return_lse=True))[0]

        return run

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.setting.dtype, "kv_data_type": self.setting.dtype}

    def _workspace(self) -> torch.Tensor:
        return torch.zeros(2**28, dtype=torch.uint8, device=self.q.device)


def repeated(run: Run, device: torch.device, times: int = 5) -> Callable[[], float]:
    """A function that runs a layer several times and returns the seconds of one: on a GPU as a CUDA graph's replay."""
    if device.type == "cpu":

        def timed() -> float:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

        return timed
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()

    def replay() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    return replay


def kernel_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Seconds of one layer of every case in every way, in turns, beside the bound."""
    rows = []
    for case in setting.cases:
        step = Step(case, setting, device, page_size=16)
        on_gpu = device.type == "cuda"
        ways = {
            FLAT: step.backend("flashinfer" if on_gpu else "torch", step.flat),
            CASCADE: step.backend("cascade", step.cascade),
        }
        if on_gpu:
            ways |= {WRAPPER: step.multi_level_cascade(), BY_HAND: step.by_hand()}
        tolerance = 2e-2 if on_gpu else 1e-5
        expected = ways[FLAT]()
        for run in ways.values():
            torch.testing.assert_close(run(), expected, atol=tolerance, rtol=tolerance)
        timers = {way: repeated(run, device) for way, run in ways.items()}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(setting.repetitions):
            for way, timer in timers.items():
                times[way].append(timer())
        bound = case.cascade_keys * setting.key_bytes / machine.bandwidth
        for way, own in times.items():
            where: dict[str, results.Setting] = {"way": way, **vars(case)}
            rows.append(
                results.Row(
                    "attention of a layer", statistics.median(own), "s", bound, READ_ONCE, where, (min(own), max(own))
                )
            )
        print(case, {way: f"{statistics.median(own) * 1e6:.1f} us" for way, own in times.items()}, flush=True)
        del step, ways, timers, expected
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return rows


def hbm_bytes(way: str, case: Case) -> float:
    """Bytes that one layer of a case reads from HBM, counted by Nsight Compute, which empties the L2 cache first."""
    ncu = "ncu --profile-from-start off --clock-control none --metrics dram__bytes_read.sum --csv --print-units base"
    layer = [sys.executable, str(Path(__file__).with_name("one_layer.py")), way, *map(str, vars(case).values())]
    report = subprocess.run([*ncu.split(), *layer], check=True, capture_output=True, text=True).stdout
    kernels = csv.DictReader(line for line in report.splitlines() if line.startswith('"'))
    return sum(float(kernel["Metric Value"].replace(",", "")) for kernel in kernels)


def hbm_rows(setting: Setting) -> list[results.Row]:
    """Bytes that a layer reads from HBM, beside those of each key and value once."""
    rows = []
    for case in COUNTED:
        for way in (FLAT, CASCADE):
            where: dict[str, results.Setting] = {"way": way, **vars(case)}
            once = case.cascade_keys * setting.key_bytes
            bytes_read = hbm_bytes(way, case)
            rows.append(results.Row("bytes read from HBM", bytes_read, "B", once, ONCE, where))
            print(rows[-1].cells()[:4], flush=True)
    return rows


# Engines of the shared-prefix workload: backend, and whether requests share pages.
ENGINES = {
    "flat, no prefix cache": ("flashinfer", False),
    "flat, prefix cache": ("flashinfer", True),
    "cascade, prefix cache": ("cascade", True),
}


def make_engine(model: CausalLM, backend: str, prefix_sharing: bool) -> LLMEngine:
    """An engine whose pool holds all requests without sharing."""
    workload, page_size = SHARED_PREFIX, 16
    config = EngineConfig(
        attn_backend=backend,
        num_pages=workload.num_requests * (-(-workload.longest // page_size) + 1),
        page_size=page_size,
        max_batch_size=workload.num_requests,
        max_model_len=workload.longest,
        max_num_batched_tokens=8192,
        enable_prefix_caching=prefix_sharing,
        persistent_decode=False,
    )
    return LLMEngine(model, config, parts=model.parts)


def seconds_to_serve(engine: LLMEngine, vocab_size: int) -> float:
    """Serve the workload once, with an empty prefix cache."""
    engine.reset_prefix_cache()
    requests = SHARED_PREFIX.requests(vocab_size)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - start


def device_seconds(engine: LLMEngine, vocab_size: int, steps: int = 20) -> tuple[float, float]:
    """Of a steady decode step: its seconds, and the seconds that the device computes, as the profiler sees them."""
    for index, (prompt, params) in enumerate(SHARED_PREFIX.requests(vocab_size)):
        engine.add_request(str(index), prompt, params)
    for _ in range(60):
        engine.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for request_id in list(engine.requests):
        engine.abort(request_id)
    return wall, sum(event.device_time_total for event in profile.key_averages()) / 1e6 / steps


def engine_rows(model: CausalLM, machine: Machine, repetitions: int = 3) -> list[results.Row]:
    """The workload with every engine, in turns after a warm-up, and how much of a decode step the device works."""
    engines = {name: make_engine(model, *options) for name, options in ENGINES.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for round_number in range(repetitions + 1):
        for name, engine in engines.items():
            seconds = seconds_to_serve(engine, model.config.vocab_size)
            if round_number:
                times[name].append(seconds)
    requests = SHARED_PREFIX.requests(model.config.vocab_size)
    least = least_seconds(model.config, machine, requests, model.dtype.itemsize, SHARED_PREFIX.shared)
    source = "each shared token computed once and read once a step"
    rows = []
    for name, own in times.items():
        case: dict[str, results.Setting] = {"workload": "shared-prefix", "engine": f"mini_engine, {name}"}
        rows.append(results.Row("time", statistics.median(own), "s", least, source, case, (min(own), max(own))))
        print(rows[-1].cells()[:5], flush=True)
        wall, busy = device_seconds(engines[name], model.config.vocab_size)
        why = "the device's share of a steady decode step; the rest is host time"
        rows.append(results.Row("device busy", busy / wall, "of a step", None, why, case))
        print(rows[-1].cells()[:5], f"{wall * 1e3:.2f} ms a step", flush=True)
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

# Assumptions of the README.
ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)
LEVEL = 12e-6  # seconds that a level adds
FEW = 8  # requests with which flat may win
LAUNCHES, LAUNCH = 400, 20e-6  # of a step, and seconds of a launch from Python
LEVEL_LAUNCHES = 2  # that a level adds to a layer


def predictions() -> str:
    """Derive the README's predictions: the engine's workload halfway through its outputs, and a short prefix."""
    workload, setting = SHARED_PREFIX, SETTINGS["cuda"]
    case = Case(workload.num_requests, workload.shared, workload.prompt[0] + workload.output[0] // 2)
    # A flat kernel takes as long as a level of the cascade costs.
    shared = LEVEL * ASSUMED.bandwidth / setting.key_bytes / FEW - case.own
    shape = model_shape(ModelConfig.from_hf(QWEN3_0_6B.to_dict()))
    kernels = model_step_cost(shape, 1, case.shared + case.own, setting.dtype.itemsize, case.requests).seconds(ASSUMED)
    more = LEVEL_LAUNCHES * shape.num_layers
    return predicted(
        {
            f"keys of {case.requests} requests": f"{case.flat_keys:,} flat, {case.cascade_keys:,} with a cascade: "
            f"{case.flat_keys / case.cascade_keys:.0f} times",
            f"{case.shared:,} tokens in a layer": f"{case.shared * setting.key_bytes / 1e6:.0f} MB",
            f"flat should win with {FEW} requests": f"below some {round(shared, -3):,.0f} shared keys",
            "a flat step of the engine": f"kernels {1e3 * kernels:.1f} ms, launches {1e3 * LAUNCHES * LAUNCH:.1f} ms",
            "a cascade step of the engine": f"{more} launches more: {1e3 * (LAUNCHES + more) * LAUNCH:.1f} ms",
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    options.add_argument("--change", help="add the workload to the engine's ledger: what is new, in a few words")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    if KERNELS in chosen.only:
        rows += kernel_rows(setting, machine, device)
    if HBM in chosen.only and device.type == "cuda":
        rows += hbm_rows(setting)
    if ENGINE in chosen.only and device.type == "cuda":
        rows += engine_rows(random_model(QWEN3_0_6B, setting.dtype, device), machine)
    parameters: dict[str, results.Setting] = {
        "heads": " / ".join(map(str, setting.heads)), "dtype": machine.dtype, "page size": 16,
        "repetitions of a kernel": setting.repetitions, "repetitions of the workload": 3,
    }  # fmt: skip
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(chosen.only) < set(SECTIONS):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)
    if chosen.change:
        for row in rows:
            if row.figure == "time":
                ledger.add(result, row, chosen.change, chosen.out)


if __name__ == "__main__":
    main()
