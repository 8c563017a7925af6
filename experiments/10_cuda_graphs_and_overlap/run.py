"""CUDA graphs and overlap: steps launched kernel by kernel, from a graph and in pieces, at pipeline depths 0 and 1.

    python experiments/10_cuda_graphs_and_overlap/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/10_cuda_graphs_and_overlap/run.py --draw | --predict
    python experiments/10_cuda_graphs_and_overlap/run.py --change "what is new in the engine"

On a GPU the model is Qwen3-0.6B's shape in bfloat16 with random weights. On a CPU, where a graph's replay calls the
step's function again, a tiny model shows that the script works. The result goes to
experiments/10_cuda_graphs_and_overlap/results/<device>.json, and the timelines of section "idle" to
timelines/<device>.json, below DIR where one is given. --draw draws the recorded timelines. With --change the workloads'
rows are added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import gc
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from transformers import PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import figures, ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, random_model, write_checkpoint
from book.units import quantity
from mini_engine.attention.paged import PagedBackend
from mini_engine.bench.workloads import GPU, LATENCY, SHARED_PREFIX, Workload, least_seconds, model_shape, num_outputs
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import (
    Machine,
    ModelShape,
    attention_cost,
    decoder_layer_costs,
    linear_cost,
    measure_machine,
    model_step_cost,
)
from mini_engine.sampling_params import SamplingParams

EXPERIMENT = "10_cuda_graphs_and_overlap"
HERE = Path(__file__).resolve().parent
SECTIONS = STEPS, PADDING, PROMPTS, IDLE, ENGINE, START = "steps", "padding", "prompts", "idle", "engine", "start"
STEP_BOUND = "one read of the weights and of all keys and values, at the measured bandwidth"
MIXED_BOUND = "each product and each attention, one after another, at the machine's rates"
NO_BOUND = "none: a count"
NO_START_BOUND = "none: Python, the driver and the disk"
IMAGES, END_OF_IMAGES = "<!-- timelines -->", "<!-- end of timelines -->"
GAP = 5.0  # microseconds: kernels that follow each other more closely are one span of a timeline


@dataclass(frozen=True)
class Way:
    """How decode steps reach the device: from a CUDA graph or kernel by kernel, and the pipeline depth."""

    graph: bool
    depth: int

    def sizes(self, requests: int) -> tuple[int, ...]:
        """Sizes of the graphs of an engine that serves this many requests."""
        return (requests,) if self.graph else ()

    @property
    def case(self) -> dict[str, results.Setting]:
        return {"launch": "graph" if self.graph else "kernel by kernel", "depth": self.depth}


WAYS = [Way(graph, depth) for graph in (False, True) for depth in (0, 1)]


@dataclass(frozen=True)
class Options:
    """What is measured on a kind of device.

    Attributes:
        shape: of the model.
        dtype: of the model.
        attn_backend: of the engine.
        batch_sizes: requests of the steps that are compared in all ways.
        between: requests of the steps that are padded.
        multiples: sizes of the graphs that a step is padded to, as the engine chooses them by default on a GPU.
        prompt: tokens of each prompt.
        prompts: tokens of the prompts that are computed beside decodes.
        beside: requests that decode beside them.
        steps: in one repetition.
        repetitions: of each figure; what is compared takes turns.
        traced: requests of the steps whose timelines are recorded.
    """

    shape: PretrainedConfig
    dtype: torch.dtype
    attn_backend: str
    batch_sizes: tuple[int, ...]
    between: tuple[int, ...]
    multiples: tuple[int, ...]
    prompt: int
    prompts: tuple[int, ...]
    beside: int
    steps: int
    repetitions: int
    traced: tuple[int, ...] = ()


TINY = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
OPTIONS = {
    "cpu": Options(TINY, torch.float32, "torch", (1, 3), (3,), (1, 2, 4, 8), 12, (9,), 2, 3, 3),
    "cuda": Options(
        QWEN3_0_6B,
        torch.bfloat16,
        "flashinfer",
        (1, 2, 4, 8, 16, 32, 64, 128, 256),
        (3, 5, 7, 9, 17, 33, 65, 100, 129, 200, 249),
        (1, 2, 4, *range(8, 257, 8)),
        256,
        (32, 128, 448, 960, 1984, 4032),
        64,
        20,
        5,
        (1, 256),
    ),
}
PAGE_SIZE, WARM_UP = 16, 8
Key = TypeVar("Key")  # of what takes turns
WORKLOADS = {"throughput": GPU, "latency": LATENCY, "shared-prefix": SHARED_PREFIX}
BACKENDS = {"throughput": "flashinfer", "latency": "flashinfer", "shared-prefix": "cascade"}


# --- decode steps ----------------------------------------------------------------------------------------------------


class SteadyDecode:
    """Requests that only decode, on an engine of their own.

    Args:
        model: the model.
        options: what is measured.
        requests: how many run.
        sizes: of the CUDA graphs; none launches kernel by kernel.
        depth: the pipeline depth.
        num_steps: decode steps that the pages have room for.
        spare_rows: requests that may run beside them.
        longest_prompt: most tokens of these.
    """

    def __init__(
        self,
        model: CausalLM,
        options: Options,
        requests: int,
        sizes: Sequence[int],
        depth: int,
        num_steps: int,
        *,
        spare_rows: int = 0,
        longest_prompt: int = 0,
    ) -> None:
        longest = options.prompt + WARM_UP + num_steps + 8
        of_each = (requests, longest), (spare_rows, longest_prompt)
        config = EngineConfig(
            attn_backend=options.attn_backend,
            num_pages=sum(count * (-(-tokens // PAGE_SIZE) + 1) for count, tokens in of_each),
            page_size=PAGE_SIZE,
            max_batch_size=requests + spare_rows,
            max_model_len=max(longest, longest_prompt + 8),
            max_num_batched_tokens=8192,
            pipeline_depth=depth,
            cuda_graph_batch_sizes=tuple(sizes),
            enable_prefix_caching=False,
            persistent_decode=False,
        )
        self.engine = LLMEngine(model, config, parts=model.parts)
        self._device, vocab_size = model.device, model.config.vocab_size
        for i in range(requests):
            params = SamplingParams(temperature=0.6, max_tokens=longest, ignore_eos=True, seed=i)
            prompt = [(i * 37 + j) % min(1000, vocab_size) for j in range(options.prompt)]
            self.engine.add_request(str(i), prompt, params)
        while not self.engine.step().is_decode:
            pass
        self.run(WARM_UP)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    def seconds(self, num_steps: int) -> float:
        """Seconds of a step, in a row of them. One step more is in flight at the start and at the end, at depth 1."""
        self.synchronize()
        self.run(1)
        start = time.perf_counter()
        self.run(num_steps)
        seconds = (time.perf_counter() - start) / num_steps
        assert not self.engine.metrics.finished, "a request has ended: the pages have room for fewer steps"
        return seconds

    def replay_seconds(self, times: int) -> float:
        """Seconds of the device for the graph of a step, replayed without any work of the host in between."""
        replayed: list[torch.cuda.CUDAGraph] = []
        replay = torch.cuda.CUDAGraph.replay

        def remember(graph: torch.cuda.CUDAGraph) -> None:
            replayed.append(graph)
            replay(graph)

        with patch.object(torch.cuda.CUDAGraph, "replay", remember):
            self.run(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replayed[-1].replay()  # the host is ahead from here on
        start.record()
        for _ in range(times):
            replayed[-1].replay()
        end.record()
        self.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def decodes(
    model: CausalLM, options: Options, requests: int, engines: Mapping[Key, tuple[Sequence[int], int]]
) -> dict[Key, SteadyDecode]:
    """For each engine (sizes of its graphs, depth), a steady decode with room for all that is measured of it."""
    num_steps = (options.steps + 1) * (options.repetitions + 1) + 10  # those of the profiler among them
    return {key: SteadyDecode(model, options, requests, *own, num_steps) for key, own in engines.items()}


def in_turns(running: Mapping[Key, SteadyDecode], options: Options) -> dict[Key, list[float]]:
    """Seconds of a step for each of them, and repetition; they take turns."""
    times: dict[Key, list[float]] = {key: [] for key in running}
    for _ in range(options.repetitions):
        for key, decode in running.items():
            times[key].append(decode.seconds(options.steps))
    return times


def step_bound(model: CausalLM, options: Options, requests: int, machine: Machine) -> float:
    """The least seconds of a decode step, in the middle of what is measured."""
    keys = keys_of(options)
    return model_step_cost(model_shape(model.config), 1, keys, model.dtype.itemsize, requests).seconds(machine)


def keys_of(options: Options) -> int:
    """Keys of a request in the middle of what is measured."""
    return options.prompt + WARM_UP + (options.steps + 1) * options.repetitions // 2


def seconds_row(
    figure: str, own: Sequence[float], bound: float | None, source: str, case: dict[str, results.Setting]
) -> results.Row:
    return results.Row(figure, statistics.median(own), "s", bound, source, case, (min(own), max(own)))


def step_rows(model: CausalLM, options: Options, machine: Machine) -> list[results.Row]:
    """Seconds of a step in all ways, for every number of requests; on a GPU also what the launches predict."""
    rows = []
    launch = launch_seconds(model.device) if model.device.type == "cuda" else None
    if launch is not None:
        rows.append(results.Row("host time of a launch", launch, "s", None, "none: Python and the driver", {}))
    for requests in options.batch_sizes:
        running = decodes(model, options, requests, {way: (way.sizes(requests), way.depth) for way in WAYS})
        bound = step_bound(model, options, requests, machine)
        found = [
            seconds_row("step", own, bound, STEP_BOUND, way.case | {"requests": requests})
            for way, own in in_turns(running, options).items()
        ]
        if launch is not None:
            found += launch_rows(running, requests, launch)
        show(found)
        rows += found
        del running
        free_memory()
    return rows


def padding_rows(model: CausalLM, options: Options, machine: Machine) -> list[results.Row]:
    """Seconds of a step from a graph of its own size, and from those that it is padded to."""
    rows = []
    for requests in options.between:
        powers = tuple(2**i for i in range((max(options.between) - 1).bit_length() + 1))
        sizes = {"its own size": (requests,), "multiples of 8": options.multiples, "powers of 2": powers}
        running = decodes(model, options, requests, {name: (own, 1) for name, own in sizes.items()})
        bound = step_bound(model, options, requests, machine)
        for name, own in in_turns(running, options).items():
            rows_run = min(size for size in sizes[name] if size >= requests)
            case: dict[str, results.Setting] = {"graphs": name, "requests": requests, "rows of the graph": rows_run}
            rows.append(seconds_row("padded step", own, bound, STEP_BOUND, case))
        show(rows[-len(sizes) :])
        del running
        free_memory()
    return rows


# --- steps that compute a prompt -------------------------------------------------------------------------------------


LAUNCHED = BY_KERNEL, PIECES, ONE_GRAPH = "kernel by kernel", "pieces", "one graph"


class MixedSteps(SteadyDecode):
    """Requests that decode, and in each step a new prompt beside them.

    Args:
        model: the model.
        options: what is measured.
        tokens: of each prompt.
        launch: one of LAUNCHED.
        num_steps: steps that the pages have room for.
    """

    def __init__(self, model: CausalLM, options: Options, tokens: int, launch: str, num_steps: int) -> None:
        self._num_prompts, self._prompt = 0, [j % min(1000, model.config.vocab_size) for j in range(tokens)]
        sizes = () if launch == BY_KERNEL else (options.beside,)
        with patch.object(PagedBackend, "captures_prompts", launch == ONE_GRAPH):
            super().__init__(model, options, options.beside, sizes, 1, num_steps, spare_rows=4, longest_prompt=tokens)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            params = SamplingParams(temperature=0.6, max_tokens=1, seed=self._num_prompts)
            self._num_prompts += 1
            self.engine.add_request(f"prompt {self._num_prompts}", self._prompt, params)
            self.engine.step()

    def seconds(self, num_steps: int) -> float:
        """Seconds of a step, in a row of them."""
        self.synchronize()
        self.run(2)
        finished, start = self.engine.metrics.finished, time.perf_counter()
        self.run(num_steps)
        seconds = (time.perf_counter() - start) / num_steps
        assert self.engine.metrics.finished - finished == num_steps, "not every step has ended one prompt"
        return seconds


def mixed_seconds(
    shape: ModelShape, requests: int, tokens: int, keys: int, dtype_bytes: int, machine: Machine
) -> float:
    """The least seconds of a step that computes a prompt beside decodes, each operator at its own bound."""
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    layer = decoder_layer_costs(shape, 1, 1, dtype_bytes, requests + tokens)
    layer["attention"] = attention_cost(1, keys, *heads, dtype_bytes) * requests
    layer["attention"] += attention_cost(tokens, tokens, *heads, dtype_bytes)
    lm_head = linear_cost(requests + 1, shape.hidden_size, shape.vocab_size, dtype_bytes)
    return shape.num_layers * sum(cost.seconds(machine) for cost in layer.values()) + lm_head.seconds(machine)


def prompt_rows(model: CausalLM, options: Options, machine: Machine) -> list[results.Row]:
    """Seconds of a step that computes a prompt beside decodes, launched in several ways."""
    rows = []
    launched = LAUNCHED[:2]
    if model.device.type == "cuda":  # the engine's default backend, which a single graph can record
        launched, options = LAUNCHED, replace(options, attn_backend="flash_decoding")
    num_steps = (options.steps + 2) * (options.repetitions + 1) + 10
    for tokens in options.prompts:
        running = {launch: MixedSteps(model, options, tokens, launch, num_steps) for launch in launched}
        shape = model_shape(model.config)
        bound = mixed_seconds(shape, options.beside, tokens, keys_of(options), model.dtype.itemsize, machine)
        for launch, own in in_turns(running, options).items():
            case: dict[str, results.Setting] = {"launch": launch, "prompt": tokens, "decodes": options.beside}
            rows.append(seconds_row("step with a prompt", own, bound, MIXED_BOUND, case))
        show(rows[-len(running) :])
        del running
        free_memory()
    return rows


# --- launches, and when the device works ------------------------------------------------------------------------------


def launch_seconds(device: torch.device, times: int = 2000) -> float:
    """Host seconds of one small operator of torch, whose kernel is shorter than its launch."""
    x = torch.zeros(1, device=device)
    for number in (100, times):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(number):
            x.add_(1.0)
        seconds = (time.perf_counter() - start) / number
    return seconds


def launch_rows(running: Mapping[Way, SteadyDecode], requests: int, launch: float) -> list[results.Row]:
    """Launches of a step, and the step that they predict: the longer of launching and of computing it."""
    rows = []
    ways = {way: profiled(decode, 5) for way, decode in running.items() if way.depth == 1}
    busy = ways[Way(True, 1)].busy
    for way, found in ways.items():
        case = way.case | {"requests": requests}
        rows += [
            results.Row("launches of a step", found.launches, "launches", None, NO_BOUND, case),
            results.Row("kernels of a step", found.kernels, "kernels", None, NO_BOUND, case),
            results.Row(
                "step, predicted", max(found.launches * launch, busy), "s", None,
                "none: the longer of launches x host time of a launch, and the device's time with a graph", case,
            ),
        ]  # fmt: skip
    return rows


@dataclass(frozen=True)
class Profiled:
    """What the profiler saw of some steps. Times in seconds, spans in microseconds from the first step's start.

    Attributes:
        launches: calls of a step that start work on the device.
        kernels: of a step, with copies.
        busy: time of a step in which the device works.
        steps: spans of the host's calls.
        device: spans of the device's work, sorted.
    """

    launches: float
    kernels: float
    busy: float
    steps: list[list[float]]
    device: list[list[float]]

    @property
    def gaps(self) -> list[float]:
        """Microseconds between one piece of the device's work and the next."""
        spans = merged(self.device, 0.0)
        return [after[0] - before[1] for before, after in itertools.pairwise(spans)]

    def idle(self, shortest: float = 0.0) -> float:
        """The share of the device's time, from its first kernel to its last, in gaps that are not shorter."""
        return sum(gap for gap in self.gaps if gap >= shortest) / (self.device[-1][1] - self.device[0][0])


def profiled(decode: SteadyDecode, num_steps: int) -> Profiled:
    """Profile steps of a steady decode."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    decode.synchronize()
    decode.run(1)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(num_steps):
            with torch.profiler.record_function("step"):
                decode.engine.step()
        decode.synchronize()
    steps, device, launches = [], [], 0
    for event in profile.events():
        span = [event.time_range.start, event.time_range.end]
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if event.name != "step":  # the profiler repeats the host's span there
                device.append(span)
        elif event.name == "step":
            steps.append(span)
        elif re.match(r"cu(da)?(Graph)?(Launch|Memcpy|Memset)\w*$", event.name):
            launches += 1
    first = min(start for start, _ in steps)
    steps, device = ([[a - first, b - first] for a, b in sorted(spans)] for spans in (steps, device))
    busy = sum(b - a for a, b in merged(device, 0.0)) / 1e6 / num_steps
    return Profiled(launches / num_steps, len(device) / num_steps, busy, steps, device)


def merged(spans: Sequence[Sequence[float]], gap: float) -> list[list[float]]:
    """Join sorted spans that overlap, or whose gap is shorter than `gap`."""
    joined: list[list[float]] = []
    for start, end in spans:
        if joined and (start <= joined[-1][1] or start - joined[-1][1] < gap):
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([start, end])
    return joined


def idle_rows(model: CausalLM, options: Options, num_steps: int = 40) -> tuple[list[results.Row], list[dict[str, Any]]]:
    """How much of a steady decode the device waits, in all ways; and the timelines that show it."""
    rows, timelines = [], []
    for requests in options.traced:
        for way in WAYS:
            decode = SteadyDecode(model, options, requests, way.sizes(requests), way.depth, 3 * num_steps)
            wall = decode.seconds(num_steps)
            found = profiled(decode, num_steps)
            case = way.case | {"requests": requests}
            long_gaps = f"none: gaps from {GAP:g} µs on"
            device = decode.replay_seconds(num_steps) if way.graph else found.busy
            rows += [
                results.Row("device idle", found.idle(GAP), "of the time", None, long_gaps, case),
                results.Row("device idle, any gap", found.idle(), "of the time", None, "none: all gaps", case),
                results.Row(
                    "device idle, without the profiler", max(0.0, 1 - device / wall), "of the time", None,
                    "none: a step's time without the profiler, less that of the device alone", case,
                ),
            ]  # fmt: skip
            show(rows[-3:])
            timelines.append(
                {
                    **case,
                    "seconds_per_step": wall,
                    "idle": found.idle(GAP),
                    "steps": [[round(end, 1) for end in span] for span in found.steps],
                    "device": [[round(end, 1) for end in span] for span in merged(found.device, GAP)],
                }
            )
            del decode
            free_memory()
    return rows, timelines


def draw(timelines: Sequence[Mapping[str, Any]], num_steps: int = 8) -> Figure:
    """Host and device in the middle of a recording, one panel for each way."""
    figure, axes = figures.new(1.6 * len(timelines), rows=len(timelines))
    for ax, run in zip(axes[:, 0], timelines, strict=True):
        middle = (len(run["steps"]) - num_steps) // 2
        first, last = run["steps"][middle][0], run["steps"][middle + num_steps - 1][1]
        for lane, (name, color) in enumerate((("device", figures.PALETTE[1]), ("steps", figures.PALETTE[0]))):
            spans = [((a - first) / 1e3, (b - a) / 1e3) for a, b in run[name]]
            style: dict[str, Any] = {"edgecolor": figures.PAPER, "linewidth": 0.5}
            if name == "device":  # thousands of spans, most of them narrower than a pixel: their density is what shows
                style = {"linewidth": 0, "rasterized": True, "snap": False}
            ax.broken_barh(spans, (lane - 0.35, 0.7), facecolor=color, **style)
        ax.set(yticks=[0, 1], yticklabels=["device", "host"], xlabel="ms", xlim=(0, (last - first) / 1e3))
        ax.set_title(f"{run['launch']}, depth {run['depth']}: device idle {run['idle']:.1%}", fontsize=12)
    return figure


def draw_recorded(root: Path = HERE) -> None:
    """Draw the recorded timelines, and show the drawings in the README."""
    parts = []
    for file in sorted((root / "timelines").glob("*.json")):
        recording = json.loads(file.read_text(encoding="utf-8"))
        for requests in dict.fromkeys(run["requests"] for run in recording["runs"]):
            own = [run for run in recording["runs"] if run["requests"] == requests]
            image = f"timeline_{requests}.svg"
            (root / image).write_text(figures.to_svg(draw(own)), encoding="utf-8")
            plural = "request" if requests == 1 else "requests"
            idle = ", ".join(f"{run['launch']} at depth {run['depth']} {run['idle']:.1%}" for run in own)
            caption = f"Eight steps of a steady decode of {requests} {plural}; the device is idle: {idle}."
            parts.append(f"![{caption}]({image})\n\n*{caption} {recording['device']}, {recording['date']}.*")
    results.fill(root / "README.md", (IMAGES, END_OF_IMAGES), parts)


# --- whole workloads --------------------------------------------------------------------------------------------------


def serve(model: CausalLM, name: str, workload: Workload, way: Way) -> float:
    """Seconds to serve a workload, on a new engine whose graphs are captured before."""
    config = EngineConfig(
        attn_backend=BACKENDS[name],
        num_pages=workload.num_requests * (-(-workload.longest // PAGE_SIZE) + 1),
        page_size=PAGE_SIZE,
        max_batch_size=workload.num_requests,
        max_model_len=workload.longest,
        max_num_batched_tokens=8192,
        enable_prefix_caching=bool(workload.shared),
        pipeline_depth=way.depth,
        cuda_graph_batch_sizes=None if way.graph else (),
        persistent_decode=False,
        warm_up=True,
    )
    engine = LLMEngine(model, config, parts=model.parts)
    requests = workload.requests(model.config.vocab_size)
    start = time.perf_counter()
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished:
        engine.step()
    seconds = time.perf_counter() - start
    del engine
    free_memory()
    return seconds


def engine_rows(model: CausalLM, machine: Machine, repetitions: int = 3) -> list[results.Row]:
    """Every workload in all ways, in turns; the first run of each is a warm-up."""
    rows = []
    for name, workload in WORKLOADS.items():
        times: dict[Way, list[float]] = {way: [] for way in WAYS}
        for repetition in range(repetitions + 1):
            for way in WAYS:
                seconds = serve(model, name, workload, way)
                if repetition:
                    times[way].append(seconds)
        requests = workload.requests(model.config.vocab_size)
        least = least_seconds(model.config, machine, requests, model.dtype.itemsize, workload.shared)
        for way, own in times.items():
            case: dict[str, results.Setting] = {
                "workload": name,
                "engine": f"mini_engine, {BACKENDS[name]}",
                **way.case,
            }
            if workload.shared:
                rows.append(seconds_row("time", own, least, "each shared token computed and read once", case))
                continue
            rates = [num_outputs(requests) / one for one in own]
            source = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
            rows.append(
                results.Row(
                    "throughput", statistics.median(rates), "tokens/s", num_outputs(requests) / least, source, case,
                    (min(rates), max(rates)),
                )
            )  # fmt: skip
        show(rows[-len(WAYS) :])
    return rows


# --- start -----------------------------------------------------------------------------------------------------------


def start(folder: Path, device: torch.device, options: Options) -> dict[str, float]:
    """Start an engine in a new process, and return the seconds of each stage up to its first token."""
    dtype = str(options.dtype).removeprefix("torch.")
    command = [sys.executable, str(HERE / "start.py"), str(folder), device.type, dtype, options.attn_backend]
    before = time.monotonic()
    ends = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])
    return {stage: end - begin for begin, (stage, end) in zip([before, *ends.values()], ends.items(), strict=False)}


def start_rows(starts: Sequence[Mapping[str, float]]) -> list[results.Row]:
    """Each stage of some starts, and their sum."""
    stages = {stage: [one[stage] for one in starts] for stage in starts[0]}
    stages["start to first token"] = [sum(one.values()) for one in starts]
    return [seconds_row("start", own, None, NO_START_BOUND, {"stage": stage}) for stage, own in stages.items()]


def show(rows: Sequence[results.Row]) -> None:
    for row in rows:
        print(row.cells()[:5], flush=True)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def write_timelines(result: results.Result, runs: Sequence[Mapping[str, Any]], out: Path | None) -> Path:
    """Write the timelines beside the results."""
    recording = {"device": result.device, "date": result.date, "versions": dict(result.versions), "runs": list(runs)}
    folder = (out / "experiments" / EXPERIMENT if out else HERE) / "timelines"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{re.sub(r'[^a-z0-9]+', '-', result.device.lower()).strip('-')}.json"
    file.write_text(json.dumps(recording) + "\n", encoding="utf-8")
    return file


# --- prediction ------------------------------------------------------------------------------------------------------

ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)
LAUNCH, LAUNCHES = 30e-6, 270  # seconds of a launch, and launches of a step
LAUNCHES_PER_CAPTURE = 2  # of each kernel: to warm up, and to record
MANY_REQUESTS = 100


def padded_seconds(shape: ModelShape, requests: int, rows: int, keys: int, dtype_bytes: int) -> float:
    """The least seconds of a decode step with rows of padding, each of which attends to one key.

    Each operator has its own bound: products of many rows are compute-bound, and attention never is.
    """
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    layer = decoder_layer_costs(shape, 1, 1, dtype_bytes, rows)
    layer["attention"] += attention_cost(1, keys - 1, *heads, dtype_bytes, causal=False) * requests
    lm_head = linear_cost(rows, shape.hidden_size, shape.vocab_size, dtype_bytes)
    return shape.num_layers * sum(cost.seconds(ASSUMED) for cost in layer.values()) + lm_head.seconds(ASSUMED)


def share_in_full_steps(workload: Workload, vocab_size: int) -> float:
    """The share of a workload's tokens that is decoded in steps of more than MANY_REQUESTS requests."""
    outputs = [params.max_tokens for _, params in workload.requests(vocab_size)]
    running = [sum(length > done for length in outputs) for done in range(1, max(outputs))]
    return sum(count for count in running if count > MANY_REQUESTS) / sum(running)


def predictions() -> str:
    """Derive those of the README's predictions that follow from shapes, rates and workloads."""
    options = OPTIONS["cuda"]
    shape = model_shape(ModelConfig.from_hf(options.shape.to_dict()))

    def longer(requests: int, rows: int) -> str:
        """How a padded step compares with a step from a graph of its own size."""
        padded, own = (
            padded_seconds(shape, requests, size, keys_of(options), options.dtype.itemsize) for size in (rows, requests)
        )
        return f"{rows / requests:.2f} times the rows, {padded / own - 1:.1%} longer"

    capture = len(options.multiples) * LAUNCHES_PER_CAPTURE * LAUNCHES * LAUNCH
    return predicted(
        {
            **{f"{own} requests padded to {rows}": longer(own, rows) for own, rows in ((9, 16), (129, 256))},
            f"capture of {len(options.multiples)} graphs": quantity(capture, "s", 2),
            f"throughput: tokens decoded in steps of more than {MANY_REQUESTS} requests": (
                f"{share_in_full_steps(GPU, shape.vocab_size):.0%}"
            ),
            "shared-prefix": f"{SHARED_PREFIX.output[1] - 1} decode steps of {SHARED_PREFIX.num_requests} requests",
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, predictions)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    parser.add_argument("--draw", action="store_true", help="only draw the timelines that are recorded")
    parser.add_argument("--change", help="add the workloads to the engine's ledger: what is new, in a few words")
    chosen = parser.parse_args(arguments)
    if chosen.draw:
        draw_recorded()
        return
    device, options = torch.device(chosen.device), OPTIONS[chosen.device]
    model, machine = random_model(options.shape, options.dtype, device), measure_machine(device, options.dtype)
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "a tiny Qwen3", "dtype": machine.dtype,
        "backend": options.attn_backend, "page size": PAGE_SIZE, "prompt of a step": options.prompt,
        "steps in a repetition": options.steps, "repetitions": options.repetitions,
    }  # fmt: skip
    for section in chosen.only:  # each is written when it is measured
        rows: list[results.Row] = []
        timelines: list[dict[str, Any]] = []
        if section == STEPS:
            rows = step_rows(model, options, machine)
        elif section == PADDING:
            rows = padding_rows(model, options, machine)
        elif section == PROMPTS:
            rows = prompt_rows(model, options, machine)
        elif section == IDLE and options.traced:
            rows, timelines = idle_rows(model, options)
        elif section == ENGINE and device.type == "cuda":
            rows = engine_rows(model, machine)
        elif section == START:
            with tempfile.TemporaryDirectory() as folder:
                write_checkpoint(options.shape, options.dtype, device, Path(folder))
                free_memory()
                # The first start compiles what is not on the disk yet.
                starts = [start(Path(folder), device, options) for _ in range(1 + options.repetitions)][1:]
            rows = start_rows(starts)
        if not rows:  # not on this device
            continue
        result = results.with_recorded(results.new_result(EXPERIMENT, rows, parameters, chosen.device), chosen.out)
        record(result, chosen.out)
        if timelines:
            print(write_timelines(result, timelines, chosen.out))
        if chosen.change:
            for row in rows:
                if "workload" in row.case and (row.case["launch"], row.case["depth"]) == ("graph", 1):
                    ledger.add(result, row, chosen.change, chosen.out)


if __name__ == "__main__":
    main()
