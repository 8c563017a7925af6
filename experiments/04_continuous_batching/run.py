"""Static against continuous batching, with and without chunked prefill, while requests arrive one after the other.

    python experiments/04_continuous_batching/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/04_continuous_batching/run.py --predict

Section "policies" compares the policies at one load, section "load" token budgets at several loads, which are fractions
of what the machine can serve. On a CPU the model is the embedded SmolLM2-135M in float32, on a GPU Qwen3-0.6B's shape
in bfloat16 with random weights. The result goes to
experiments/04_continuous_batching/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import figures, results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, random_model
from book.static_batching import make_requests
from book.units import quantity
from mini_engine.bench.workloads import model_shape
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.roofline import Machine, ModelShape, measure_machine, model_step_cost
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler

EXPERIMENT, REPETITIONS = "04_continuous_batching", 3
LOADS, CAPACITY = (50, 100), "load: capacity"  # the loads are in % of the capacity
LOADS_TABLE = "<!-- loads -->", "<!-- end of loads -->"  # where the README has it
SECTIONS = POLICIES, LOAD = "policies", "load"
ASSUMED = Machine("a CPU", "float32", bandwidth=50e9, flops=200e9)  # what the prediction was made for
ASSUMED_GPU = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=790e12)
RATE_OF_ONE = 54.7  # tokens/s of a single request with `flex` on an H200: experiment 06, before this one ran there


@dataclass(frozen=True)
class Workload:
    """Requests of lognormal lengths that arrive as a Poisson process, one of them with a long prompt.

    Attributes:
        num_requests: how many, the long ones included.
        rate: arrivals a second; infinite if all are there at once.
        prompt: median prompt in tokens, and the longest.
        output: median output in tokens, and the longest.
        long_prompt: tokens of the long prompt.
        max_batch_size: requests that run at once.
        budgets: tokens of a step: with chunked prefill, something between, and enough for any prompt.
        attn_backend: of all policies.
        page_size: tokens of a page.
        load_requests: how many the section "load" serves at each load.
        load_output: median output there, and the longest.
        long_every: one prompt in so many is long; None for the one in the middle.
        uncounted: rounds before those that count. `flex` compiles kernels when a kind of step is first needed, and
            which steps there are depends on the times of the steps before.
    """

    num_requests: int
    rate: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    long_prompt: int
    max_batch_size: int
    budgets: tuple[int, ...]
    attn_backend: str
    page_size: int
    load_requests: int
    load_output: tuple[int, int]
    long_every: int | None = None
    uncounted: int = 0

    @property
    def long_index(self) -> int:
        return self.num_requests // 2

    @property
    def chunk(self) -> int:
        return self.budgets[0]


CPU = Workload(
    20, 8.0, (24, 128), (32, 96), 512, max_batch_size=8, budgets=(64, 1024), attn_backend="torch_padded",
    page_size=16, load_requests=13, load_output=(8, 24),
)  # fmt: skip
GPU = Workload(
    40, 80.0, (256, 2048), (32, 96), 16_384, max_batch_size=16, budgets=(512, 2048, 32_768), attn_backend="flex",
    page_size=128, load_requests=24, load_output=(8, 24), uncounted=2,
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """When it arrives, in seconds; its prompt; how many tokens it asks for."""

    arrival: float
    prompt: list[int]
    num_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True)


def arrivals(workload: Workload, vocab_size: int, seed: int = 0) -> list[Request]:
    """The requests in the order in which they arrive, the same for every policy."""
    rng = np.random.default_rng(seed)
    n = workload.num_requests
    times = np.cumsum(rng.exponential(1 / workload.rate, n))

    def lengths(median: int, longest: int) -> np.ndarray:
        return rng.lognormal(np.log(median), 0.7, n).round().clip(2, longest).astype(int)

    prompts, outputs = lengths(*workload.prompt), lengths(*workload.output)
    first, every = (
        (workload.long_index, n) if workload.long_every is None else (workload.long_every // 2, workload.long_every)
    )
    prompts[first::every] = workload.long_prompt
    return [
        Request(float(at), rng.integers(vocab_size, size=prompt).tolist(), int(output))
        for at, prompt, output in zip(times, prompts, outputs, strict=True)
    ]


# For each request, when each of its tokens came: what a policy returns. The clock counts the seconds that steps take,
# and jumps to the next arrival when no request waits or runs.
Times = list[list[float]]


def num_pages(requests: Sequence[Request], max_batch_size: int, page_size: int) -> int:
    """Enough for any batch, so no request is preempted; admission leaves a page free for each running request."""
    pages = sorted(-(-(len(request.prompt) + request.num_tokens) // page_size) for request in requests)
    return sum(pages[-max_batch_size:]) + max_batch_size


def make_engine(model: CausalLM, requests: Sequence[Request], workload: Workload, budget: int) -> LLMEngine:
    """An engine for these requests, whose steps have at most `budget` tokens."""
    config = EngineConfig(
        attn_backend=workload.attn_backend,
        num_pages=num_pages(requests, workload.max_batch_size, workload.page_size),
        page_size=workload.page_size,
        max_batch_size=workload.max_batch_size,
        max_num_batched_tokens=budget,
        max_model_len=max(len(request.prompt) + request.num_tokens for request in requests),
        enable_prefix_caching=False,
        persistent_decode=False,
        warm_up=model.device.type == "cuda",  # compiled kernels are compiled before the first request
    )
    return LLMEngine(model, config)


def make_engines(model: CausalLM, workload: Workload) -> dict[int, LLMEngine]:
    """An engine for each token budget. All have a pool of one size, because kernels are compiled for its size."""
    vocab_size = model.config.vocab_size
    requests = arrivals(workload, vocab_size)
    engines = {
        budget: make_engine(model, requests + arrivals(at_load(workload, math.inf), vocab_size), workload, budget)
        for budget in workload.budgets
    }
    for engine in engines.values():  # a few requests that do not count
        some = (*requests[:2], requests[workload.long_index])
        serve(engine, [replace(request, arrival=0.0, num_tokens=3) for request in some])
    return engines


def serve(engine: LLMEngine, requests: Sequence[Request], static: bool = False) -> Times:
    """Let each request join at the first step after its arrival, if there is room.

    Args:
        engine: the engine.
        requests: in the order of their arrivals.
        static: let requests join only when none is unfinished, at most a full batch of them.
    """
    now, times, arrived = 0.0, [[] for _ in requests], 0  # type: float, Times, int
    while arrived < len(requests) or engine.has_unfinished:
        is_idle = not engine.has_unfinished
        if is_idle:
            now = max(now, requests[arrived].arrival)
        room = engine.config.max_batch_size * is_idle if static else len(requests)
        for request in requests[arrived : arrived + room]:
            if request.arrival > now:
                break
            engine.add_request(str(arrived), request.prompt, request.params)
            arrived += 1
        start = time.perf_counter()
        report = engine.step()
        now += time.perf_counter() - start
        for sampled in report.sampled_by:
            times[int(sampled.request_id)].append(now)
    return times


Serve = Callable[[Sequence[Request]], Times]
ServeInSteps = Callable[[int, Sequence[Request]], Times]  # the first argument is the token budget
Ways = Mapping[str, Callable[[], list[results.Row]]]


def policies(engines: Mapping[int, LLMEngine], workload: Workload) -> dict[str, Serve]:
    """How each policy serves requests."""
    whole, chunked = engines[workload.budgets[-1]], engines[workload.chunk]
    return {
        "static": lambda requests: serve(whole, requests, static=True),
        "continuous": lambda requests: serve(whole, requests),
        "continuous, chunked": lambda requests: serve(chunked, requests),
    }


def gaps(times: Sequence[float]) -> list[float]:
    """Seconds between the tokens of a request."""
    return [later - earlier for earlier, later in pairwise(times)]


def gap_beside(long: int, requests: Sequence[Request], times: Times) -> float:
    """The longest that another request waited for its next token between arrival and first token of the long one."""
    begin, end = requests[long].arrival, times[long][0]
    return max(
        (
            later - earlier
            for index, own in enumerate(times)
            for earlier, later in pairwise(own)
            if index != long and earlier < end and later > begin
        ),
        default=0.0,
    )


def bounds(shape: ModelShape, workload: Workload, requests: Sequence[Request], machine: Machine) -> dict[str, float]:
    """What the machine's rates allow: the seconds of the whole run, of a decode step and of two prompts."""
    dtype_bytes = getattr(torch, machine.dtype).itemsize
    prompts = [len(request.prompt) for request in requests]

    def prefill(length: int) -> float:
        return model_step_cost(shape, length, length, dtype_bytes).seconds(machine)

    kv_len = round(statistics.median(prompts) + statistics.median(r.num_tokens for r in requests) / 2)
    decode = model_step_cost(shape, 1, kv_len, dtype_bytes, workload.max_batch_size).seconds(machine)
    steps = sum(request.num_tokens for request in requests) / workload.max_batch_size
    last = requests[-1].arrival - requests[0].arrival
    return {
        "run": max(last, sum(map(prefill, prompts)) + steps * decode),
        "decode": decode,
        "prompts": sum(map(prefill, prompts)),
        "median": prefill(round(statistics.median(prompts))),
        "long": prefill(workload.long_prompt),
    }


def decode_steps(requests: Sequence[Request], size: int) -> tuple[int, float]:
    """Count the decode steps of static batches, which take requests in the order of arrival, and of full batches."""
    outputs = [request.num_tokens for request in requests]
    static = sum(max(outputs[begin : begin + size]) for begin in range(0, len(outputs), size))
    return static, sum(outputs) / size


def prediction(shape: ModelShape, workload: Workload, machine: Machine) -> dict[str, str]:
    """Derive what the README predicts: each quantity with its value, from the workload and the machine's rates.

    A static batch is taken to be full and in the order of arrival, and every decode step to cost as much as a full one.
    """
    requests, size = arrivals(workload, shape.vocab_size), workload.max_batch_size
    bound, dtype_bytes = bounds(shape, workload, requests, machine), getattr(torch, machine.dtype).itemsize
    outputs = [request.num_tokens for request in requests]
    static_steps, full_steps = decode_steps(requests, size)
    static, full = (bound["prompts"] + steps * bound["decode"] for steps in (static_steps, full_steps))
    last = requests[-1].arrival - requests[0].arrival
    slow, fast = (sum(outputs) / max(last, seconds) for seconds in (static, full))
    # Both terms count the weights' bytes; arithmetic bounds their sum, so that the bytes do not matter.
    rows = workload.chunk - (size - 1)
    decodes = model_step_cost(shape, 1, workload.prompt[0], dtype_bytes, size - 1)
    chunked = (decodes + model_step_cost(shape, rows, workload.long_prompt // 2, dtype_bytes)).seconds(machine)
    return {
        f"a decode step of {size} sequences": f"{1e3 * bound['decode']:.1f} ms",
        "the median prompt": f"{1e3 * bound['median']:.0f} ms",
        f"the long prompt of {workload.long_prompt} tokens": f"{1e3 * bound['long']:.0f} ms",
        f"a step of {size - 1} decodes and a chunk of {rows} tokens": f"{1e3 * chunked:.0f} ms",
        f"all {len(requests)} prompts": f"{bound['prompts']:.2f} s",
        f"decode steps for {sum(outputs)} tokens, static": f"{static_steps} steps, "
        f"{static_steps * bound['decode']:.1f} s",
        "decode steps for the same tokens, in full batches": f"{full_steps:.0f} steps, "
        f"{full_steps * bound['decode']:.1f} s",
        "offered load": f"{sum(outputs) / last:.0f} tokens/s",
        "throughput, static": f"{slow:.0f} tokens/s",
        "throughput, continuous": f"{fast:.0f} tokens/s, {fast / slow:.1f} times static",
        "throughput, continuous, if requests never ran out": f"{sum(outputs) / full:.0f} tokens/s, "
        f"{static / full:.1f} times static",
        "stall beside the long prompt, in chunks": f"{chunked / bound['long']:.2f} of the stall without chunks",
    }


def gpu_prediction(shape: ModelShape, workload: Workload, machine: Machine) -> dict[str, str]:
    """Derive what the README predicts for a GPU, where the host decides what a step of a few requests takes."""
    requests, size = arrivals(workload, shape.vocab_size), workload.max_batch_size
    tokens, step = sum(request.num_tokens for request in requests), 1 / RATE_OF_ONE
    static, full = decode_steps(requests, size)
    prompt = model_step_cost(shape, workload.long_prompt, workload.long_prompt, 2).seconds(machine)
    chunks = workload.long_prompt // workload.chunk
    return {
        "H200: a step of one request": f"{1e3 * step:.0f} ms",
        f"H200: {tokens:,} tokens": f"{static} steps in static batches, {full:.0f} in full ones",
        "H200: throughput": f"{tokens / static / step:.0f} tokens/s, and {tokens / full / step:.0f} tokens/s in full "
        f"batches, a factor of {static / full:.1f}",
        f"H200: the long prompt of {workload.long_prompt:,} tokens": f"{1e3 * prompt:.0f} ms, or {chunks} steps and "
        f"{chunks * step:.1f} s in chunks",
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share of all values does not exceed."""
    return sorted(values)[int(share * (len(values) - 1))]


def rows_of(
    policy: str, workload: Workload, requests: Sequence[Request], times: Times, bound: dict[str, float]
) -> list[results.Row]:
    """What one policy gave once: all its figures, each beside its bound."""
    case: dict[str, results.Setting] = {"policy": policy}
    first = [own[0] - request.arrival for own, request in zip(times, requests, strict=True)]
    between = [gap for own in times for gap in gaps(own)]
    tokens = sum(map(len, times))
    seconds = max(own[-1] for own in times) - requests[0].arrival
    prompt, step = "its prompt alone at the machine's rates", "a decode step at the machine's rates"
    work = "all arrivals, or all work in full batches at the machine's rates"
    long = workload.long_index
    return [
        results.Row("throughput", tokens / seconds, "tokens/s", tokens / bound["run"], work, case),
        results.Row("TTFT, median", statistics.median(first), "s", bound["median"], prompt, case),
        results.Row("TTFT, slowest", max(first), "s", None, "none: it mostly waits for others", case),
        results.Row("TTFT of the long prompt", first[long], "s", bound["long"], prompt, case),
        results.Row("ITL, median", statistics.median(between), "s", bound["decode"], step, case),
        results.Row("ITL, p99", quantile(between, 0.99), "s", bound["decode"], step, case),
        results.Row(
            "longest ITL beside the long prompt",
            gap_beside(long, requests, times),
            "s",
            bound["decode"],
            step,
            case,
        ),
    ]


def make_model(device: torch.device) -> CausalLM:
    """The embedded model, or on a GPU a larger shape with random weights: speed does not depend on their values."""
    if device.type == "cpu":
        return load_model(open_checkpoint("smollm2-135m-instruct"), Parts(), torch.float32, device)
    return random_model(QWEN3_0_6B, torch.bfloat16, device)


def in_turns(ways: Ways, uncounted: int) -> list[results.Row]:
    """Run each way several times, in turns, in order and in reverse order; the first rounds do not count."""
    runs = defaultdict(list)
    for _ in range(uncounted):
        for way in ways.values():
            way()
    for repetition in range(REPETITIONS):
        for name in list(ways)[:: -1 if repetition % 2 else 1]:
            runs[name].append(ways[name]())
            print(
                name, *(f"{row.figure}: {row.value:.3g} {row.unit}" for row in runs[name][-1][:3]), sep="; ", flush=True
            )
    return [row for name in ways for row in results.median_rows(runs[name])]


def policy_rows(
    model: CausalLM, engines: Mapping[int, LLMEngine], workload: Workload, machine: Machine
) -> list[results.Row]:
    """Serve the same requests by every policy."""
    requests = arrivals(workload, model.config.vocab_size)
    bound = bounds(model_shape(model.config), workload, requests, machine)
    return in_turns(
        {
            name: lambda name=name, own=own: rows_of(name, workload, requests, own(requests), bound)  # type: ignore[misc]
            for name, own in policies(engines, workload).items()
        },
        workload.uncounted,
    )


def at_load(workload: Workload, rate: float) -> Workload:
    """The requests of the section "load", arriving at a rate: every fifth prompt is long."""
    return replace(workload, num_requests=workload.load_requests, rate=rate, output=workload.load_output, long_every=5)


def capacity_ways(shape: ModelShape, workload: Workload, serve: ServeInSteps, machine: Machine) -> Ways:
    """Serve all requests at once, without chunks: how many are done in a second."""
    at_once = at_load(workload, math.inf)
    requests = arrivals(at_once, shape.vocab_size)
    count, bound = len(requests), bounds(shape, at_once, requests, machine)["run"]
    why = "all work in full batches at the machine's rates"

    def capacity() -> list[results.Row]:
        seconds = max(own[-1] for own in serve(workload.budgets[-1], requests))
        return [results.Row(CAPACITY, count / seconds, "requests/s", count / bound, why)]

    return {"all at once": capacity}


def load_ways(shape: ModelShape, workload: Workload, serve: ServeInSteps, capacity: float) -> Ways:
    """Serve the same requests at several loads, in steps of several sizes."""

    def way(load: int, budget: int) -> list[results.Row]:
        requests = arrivals(at_load(workload, load / 100 * capacity), shape.vocab_size)
        return latency_rows(load, budget, requests, serve(budget, requests))

    return {f"{load}%, {budget} tokens": partial(way, load, budget) for load in LOADS for budget in workload.budgets}


def latency_rows(load: int, budget: int, requests: Sequence[Request], times: Times) -> list[results.Row]:
    """Median, 99th percentile and slowest TTFT and ITL."""
    case: dict[str, results.Setting] = {"% of capacity": load, "tokens of a step": budget}
    found = {
        "TTFT": [own[0] - request.arrival for own, request in zip(times, requests, strict=True)],
        "ITL": [gap for own in times for gap in gaps(own)],
    }
    why = "none: it depends on the load"
    return [
        results.Row(f"load: {name}, {label}", quantile(values, share), "s", None, why, case)
        for name, values in found.items()
        for label, share in (("median", 0.5), ("p99", 0.99), ("slowest", 1.0))
    ]


def load_rows(
    model: CausalLM, engines: Mapping[int, LLMEngine], workload: Workload, machine: Machine
) -> list[results.Row]:
    """Measure the capacity, then latencies at several loads."""
    shape = model_shape(model.config)

    def by_engine(budget: int, requests: Sequence[Request]) -> Times:
        return serve(engines[budget], requests)

    [capacity] = in_turns(capacity_ways(shape, workload, by_engine, machine), workload.uncounted)
    return [capacity, *in_turns(load_ways(shape, workload, by_engine, capacity.value), workload.uncounted)]


def replayed(
    shape: ModelShape, workload: Workload, requests: Sequence[Request], budget: int, machine: Machine
) -> Times:
    """Run the scheduler without a model: a step takes as long as a prompt of its tokens at the machine's rates."""
    dtype_bytes, size = getattr(torch, machine.dtype).itemsize, workload.max_batch_size

    @cache
    def seconds(num_tokens: int) -> float:
        return model_step_cost(shape, num_tokens, num_tokens, dtype_bytes).seconds(machine)

    table = PageTable(num_pages(requests, size, workload.page_size), page_size=workload.page_size, max_rows=size)
    scheduler = Scheduler(
        table, max_model_len=max(len(r.prompt) + r.num_tokens for r in requests), max_num_batched_tokens=budget,
        window=None, prefix_sharing=False, parts=Parts(),
    )  # fmt: skip
    running = scheduler.running
    coming = deque(make_requests([r.prompt for r in requests], [r.params for r in requests], max_model_len=2**20))
    now, times = 0.0, [[] for _ in requests]  # type: float, Times
    while coming or scheduler.waiting or len(running):
        if not (scheduler.waiting or len(running)):
            now = max(now, requests[coming[0].arrival].arrival)
        while coming and requests[coming[0].arrival].arrival <= now:
            scheduler.add(coming.popleft())
        schedule = scheduler.schedule()
        assert schedule is not None, "every token is known at once"
        now += seconds(schedule.num_tokens)
        running.num_computed[schedule.rows] += schedule.num_new
        samples = schedule.rows[running.num_computed[schedule.rows] == running.num_scheduled[schedule.rows]]
        running.num_scheduled[samples] += 1
        for request in running.requests_of(samples):
            times[request.arrival].append(now)
        for request in running.requests_of(running.append(samples, np.full(len(samples), 7))):
            scheduler.remove(request)
    return times


def load_prediction(shape: ModelShape, workload: Workload, machine: Machine) -> list[results.Row]:
    """What `load_rows` would find if steps took as long as at the machine's rates."""

    def by_replay(budget: int, requests: Sequence[Request]) -> Times:
        return replayed(shape, workload, requests, budget, machine)

    [[capacity]] = [way() for way in capacity_ways(shape, workload, by_replay, machine).values()]
    ways = load_ways(shape, workload, by_replay, capacity.value)
    return [capacity, *(row for way in ways.values() for row in way())]


def load_table(rows: Sequence[results.Row]) -> str:
    """The capacity, and TTFT and ITL for each load and budget, as Markdown."""
    rows = [row for row in rows if row.figure.startswith("load: ")]
    [capacity] = [row for row in rows if row.figure == CAPACITY]
    figures_of = list(dict.fromkeys(row.figure for row in rows if row is not capacity))
    cells = defaultdict(list)
    for row in rows:
        if row is not capacity:
            cells[tuple(row.case.values())].append(with_spread(row))
    head = ["load", "tokens of a step", *(figure.removeprefix("load: ") for figure in figures_of)]
    lines = [head, ["---"] * len(head), *([f"{load}%", f"{budget:,}", *own] for (load, budget), own in cells.items())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Capacity: {with_spread(capacity)}.\n\n{table}"


def with_spread(row: results.Row) -> str:
    """A median, with the smallest and the largest value if it is one of several."""
    between = "" if row.spread is None else f" ({' to '.join(quantity(end, row.unit) for end in row.spread)})"
    return quantity(row.value, row.unit) + between


def fill_load_tables() -> None:
    """Write the tables of all devices that recorded the section "load" into the README."""
    tables = [
        f"{load_table(result.rows)}\n\n{result.provenance}"
        for result in results.load(EXPERIMENT)
        if any(row.figure == CAPACITY for row in result.rows)
    ]
    results.fill(Path(__file__).with_name("README.md"), LOADS_TABLE, tables)


def draw_policies(result: results.Result) -> Figure:
    """Draw throughput, TTFT and the longest ITL beside the long prompt, by policy, with a color for each policy."""
    names = ["throughput", "TTFT, median", "longest ITL beside the long prompt"]
    return draw_bars(result, names, lambda row: str(row.case["policy"]), colors=figures.PALETTE[:3])


def draw_loads(result: results.Result) -> Figure:
    """Draw the median TTFT and the slowest ITL, by load and token budget."""
    names = ["load: TTFT, median", "load: ITL, slowest"]
    return draw_bars(
        result, names, lambda row: f"{row.case['% of capacity']}%, {row.case['tokens of a step']:,} tokens"
    )


def draw_bars(
    result: results.Result,
    names: Sequence[str],
    label: Callable[[results.Row], str],
    colors: Sequence[ColorType] | None = None,
) -> Figure:
    """Draw the rows of some figures as bars, a panel for each figure.

    `colors` are the colors of a panel's bars.
    """
    rows = {name: [row for row in result.rows if row.figure == name] for name in names}
    figure, axes = figures.new(0.3 + sum(0.9 + 0.4 * len(own) for own in rows.values()), rows=len(names))
    for ax, (name, own) in zip(axes[:, 0], rows.items(), strict=True):
        # A bound on latency is that of an idle engine, which says nothing about a queue or about other prompts.
        limits = [row.bound if name == "throughput" else None for row in own]
        labels, values = [label(row) for row in own], [row.value for row in own]
        unit, title = own[0].unit, name.removeprefix("load: ") + (" (line: bound)" if name == "throughput" else "")
        figures.draw_bars_with_bound(labels, values, limits, unit, ax=ax, title=title, colors=colors)
        ax.set_xticks([])  # the values stand beside the bars
        if ax.get_legend():
            ax.get_legend().remove()  # the title says what the line is
    return figure


def predictions() -> str:
    """Derive the README's predictions: the policies on a CPU and on a GPU, and the loads on a CPU."""
    shape = model_shape(open_checkpoint("smollm2-135m-instruct").config)
    qwen3 = model_shape(ModelConfig.from_hf(QWEN3_0_6B.to_dict()))
    policies = prediction(shape, CPU, ASSUMED) | gpu_prediction(qwen3, GPU, ASSUMED_GPU)
    longest = CPU.output[1] * bounds(shape, CPU, arrivals(CPU, shape.vocab_size), ASSUMED)["decode"]
    policies[f"a static batch of {CPU.output[1]} steps"] = f"{longest:.1f} s"
    return f"{predicted(policies)}\n\n{load_table(load_prediction(shape, CPU, ASSUMED))}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, predictions)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    workload = GPU if device.type == "cuda" else CPU
    model = make_model(device)
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "SmolLM2-135M",
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": workload.attn_backend,
        "requests": workload.num_requests,
        "arrivals a second": workload.rate,
        "long prompt": workload.long_prompt,
        "batch": workload.max_batch_size,
        "chunk": workload.chunk,
        "requests at each load": workload.load_requests,
        "repetitions": REPETITIONS,
    }
    engines = make_engines(model, workload)
    machine = measure_machine(device, model.dtype)
    for section in arguments.only:  # each is written when it is measured
        rows = (policy_rows if section == POLICIES else load_rows)(model, engines, workload, machine)
        result = results.with_recorded(
            results.new_result(EXPERIMENT, rows, parameters, arguments.device), arguments.out
        )
        record(result, arguments.out, {row.figure for row in result.rows if not row.figure.startswith("load: ")})
    if arguments.out is None:
        fill_load_tables()


if __name__ == "__main__":
    main()
