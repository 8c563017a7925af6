"""Static against continuous batching, with and without chunked prefill, while requests arrive one after the other.

    python experiments/04_continuous_batching/run.py [--device cpu|cuda] [--out DIR]
    python experiments/04_continuous_batching/run.py --predict

On a CPU the model is the embedded SmolLM2-135M in float32, on a GPU Qwen3-0.6B's shape in bfloat16 with random weights.
The result goes to experiments/04_continuous_batching/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import figures, results
from book.experiment import command_line, record
from book.random_models import QWEN3_0_6B, random_model
from book.static_batching import generate_steps, make_requests
from mini_engine.bench.workloads import model_shape
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.roofline import Machine, ModelShape, measure_machine, model_step_cost
from mini_engine.sampling_params import SamplingParams

PAGE_SIZE = 16
ASSUMED = Machine("a CPU", "float32", bandwidth=50e9, flops=200e9)  # what the prediction was made for


@dataclass(frozen=True)
class Workload:
    """Requests of lognormal lengths that arrive as a Poisson process, one of them with a long prompt.

    Attributes:
        num_requests: how many, the long one included; it arrives in the middle.
        rate: arrivals a second.
        prompt: median prompt in tokens, and the longest.
        output: median output in tokens, and the longest.
        long_prompt: tokens of the long prompt.
        max_batch_size: requests that run at once.
        chunk: tokens of a step with chunked prefill.
    """

    num_requests: int
    rate: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    long_prompt: int
    max_batch_size: int
    chunk: int

    @property
    def long_index(self) -> int:
        return self.num_requests // 2


CPU = Workload(20, 8.0, (24, 128), (32, 96), 512, max_batch_size=8, chunk=64)
GPU = Workload(64, 10.0, (256, 2048), (48, 144), 16_384, max_batch_size=16, chunk=512)


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
    prompts[workload.long_index] = workload.long_prompt
    return [
        Request(float(at), rng.integers(vocab_size, size=prompt).tolist(), int(output))
        for at, prompt, output in zip(times, prompts, outputs, strict=True)
    ]


# For each request, when each of its tokens came: what a policy returns. The clock counts the seconds that steps take,
# and jumps to the next arrival when no request waits or runs.
Times = list[list[float]]


def serve_static(model: CausalLM, requests: Sequence[Request], max_batch_size: int) -> Times:
    """Run the requests that wait as one batch to its end, and then the next batch."""
    now, times = 0.0, [[] for _ in requests]  # type: float, Times
    waiting = deque(enumerate(requests))
    while waiting:
        now = max(now, waiting[0][1].arrival)
        batch: list[int] = []
        while waiting and waiting[0][1].arrival <= now and len(batch) < max_batch_size:
            batch.append(waiting.popleft()[0])
        group = make_requests(
            [requests[index].prompt for index in batch],
            [requests[index].params for index in batch],
            max_model_len=model.config.max_position_embeddings,
        )
        steps = generate_steps(model, group, "torch_padded", Parts())
        start = time.perf_counter()
        for step in steps:
            now += time.perf_counter() - start
            for request, _ in step.new_tokens:
                times[batch[request.arrival]].append(now)
            start = time.perf_counter()
    return times


def serve_continuous(
    model: CausalLM, requests: Sequence[Request], max_batch_size: int, max_num_batched_tokens: int
) -> Times:
    """Let each request join at the first step after its arrival, if there is room."""
    pages = sorted(-(-(len(request.prompt) + request.num_tokens) // PAGE_SIZE) for request in requests)
    config = EngineConfig(
        # Enough for any batch, so no request is preempted; admission leaves a page free for each running request.
        num_pages=sum(pages[-max_batch_size:]) + max_batch_size,
        page_size=PAGE_SIZE,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    engine = LLMEngine(model, config)
    now, times, arrived = 0.0, [[] for _ in requests], 0  # type: float, Times, int
    while arrived < len(requests) or engine.has_unfinished:
        if not engine.has_unfinished:
            now = max(now, requests[arrived].arrival)
        while arrived < len(requests) and requests[arrived].arrival <= now:
            engine.add_request(str(arrived), requests[arrived].prompt, requests[arrived].params)
            arrived += 1
        start = time.perf_counter()
        report = engine.step()
        now += time.perf_counter() - start
        for request in report.sampled_by:
            times[int(request.request_id)].append(now)
    return times


def policies(workload: Workload) -> dict[str, Callable[[CausalLM, Sequence[Request]], Times]]:
    size = workload.max_batch_size
    whole = size * workload.long_prompt  # no step needs more
    return {
        "static": lambda model, requests: serve_static(model, requests, size),
        "continuous": lambda model, requests: serve_continuous(model, requests, size, whole),
        "continuous, chunked": lambda model, requests: serve_continuous(model, requests, size, workload.chunk),
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


def prediction(shape: ModelShape, workload: Workload, machine: Machine) -> dict[str, str]:
    """Derive what the README predicts: each quantity with its value, from the workload and the machine's rates.

    A static batch is taken to be full and in the order of arrival, and every decode step to cost as much as a full one.
    """
    requests, size = arrivals(workload, shape.vocab_size), workload.max_batch_size
    bound, dtype_bytes = bounds(shape, workload, requests, machine), getattr(torch, machine.dtype).itemsize
    outputs = [request.num_tokens for request in requests]
    static_steps = sum(max(outputs[begin : begin + size]) for begin in range(0, len(outputs), size))
    full_steps = sum(outputs) / size
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
        f"{sum(outputs)} tokens: decode steps, static": f"{static_steps}, {static_steps * bound['decode']:.1f} s",
        "the same in full batches": f"{full_steps:.0f}, {full_steps * bound['decode']:.1f} s",
        "offered load": f"{sum(outputs) / last:.0f} tokens/s",
        "throughput, static": f"{slow:.0f} tokens/s",
        "throughput, continuous": f"{fast:.0f} tokens/s, {fast / slow:.1f} times static",
        "throughput, continuous, if requests never ran out": f"{sum(outputs) / full:.0f} tokens/s, "
        f"{static / full:.1f} times static",
        "stall beside the long prompt, in chunks": f"{chunked / bound['long']:.2f} of the stall without chunks",
    }


def rows_of(
    policy: str, workload: Workload, requests: Sequence[Request], times: Times, bound: dict[str, float]
) -> list[results.Row]:
    """What one policy gave: all its figures, each beside its bound."""
    case: dict[str, results.Setting] = {"policy": policy}
    first = [own[0] - request.arrival for own, request in zip(times, requests, strict=True)]
    between = sorted(gap for own in times for gap in gaps(own))
    tokens = sum(map(len, times))
    seconds = max(own[-1] for own in times) - requests[0].arrival
    prompt, step = "its prompt alone at the machine's rates", "a decode step at the machine's rates"
    work = "all arrivals, or all work in full batches at the machine's rates"
    long = workload.long_index
    return [
        results.Row("throughput", tokens / seconds, "tokens/s", tokens / bound["run"], work, case),
        results.Row("first token, median", statistics.median(first), "s", bound["median"], prompt, case),
        results.Row("first token, slowest", max(first), "s", None, "none: it mostly waits for others", case),
        results.Row("first token of the long prompt", first[long], "s", bound["long"], prompt, case),
        results.Row("between tokens, median", statistics.median(between), "s", bound["decode"], step, case),
        results.Row("between tokens, 99 %", between[int(0.99 * len(between))], "s", bound["decode"], step, case),
        results.Row(
            "between tokens beside the long prompt",
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


def measure(model: CausalLM, workload: Workload, machine: Machine) -> list[results.Row]:
    """Serve the same requests by every policy, after a few that do not count."""
    requests = arrivals(workload, model.config.vocab_size)
    bound = bounds(model_shape(model.config), workload, requests, machine)
    warm_up = [replace(r, arrival=0.0, num_tokens=3) for r in (*requests[:2], requests[workload.long_index])]
    rows = []
    for policy, serve in policies(workload).items():
        serve(model, warm_up)
        rows += rows_of(policy, workload, requests, serve(model, requests), bound)
    return rows


def draw_policies(result: results.Result) -> Figure:
    """Draw throughput, TTFT and the longest ITL beside the long prompt, by policy."""
    shown = {
        "throughput": "throughput (line: offered load)",
        "first token, median": "TTFT, median",
        "between tokens beside the long prompt": "longest ITL beside the long prompt",
    }
    figure, axes = figures.new(6.4, rows=len(shown))
    for ax, (name, title) in zip(axes[:, 0], shown.items(), strict=True):
        rows = [row for row in result.rows if row.figure == name]
        labels = [str(row.case["policy"]) for row in rows]
        # A bound on latency is that of an idle engine, which says nothing about a queue or about other prompts.
        limits = [row.bound if name == "throughput" else None for row in rows]
        figures.draw_bars_with_bound(labels, [row.value for row in rows], limits, rows[0].unit, ax=ax, title=title)
        ax.set_xticks([])  # the values stand beside the bars
    axes[0, 0].legend().remove()  # the title says what the line is
    return figure


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--predict", action="store_true", help="print what the README predicts for a CPU, and stop")
    arguments = parser.parse_args()
    if arguments.predict:
        shape = model_shape(open_checkpoint("smollm2-135m-instruct").config)
        print("\n".join(f"| {what} | {value} |" for what, value in prediction(shape, CPU, ASSUMED).items()))
        return
    device = torch.device(arguments.device)
    workload = GPU if device.type == "cuda" else CPU
    model = make_model(device)
    rows = measure(model, workload, measure_machine(device, model.dtype))
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "SmolLM2-135M",
        "dtype": str(model.dtype).removeprefix("torch."),
        "requests": workload.num_requests,
        "arrivals a second": workload.rate,
        "long prompt": workload.long_prompt,
        "batch": workload.max_batch_size,
        "chunk": workload.chunk,
    }
    result = results.new_result("04_continuous_batching", rows, parameters, arguments.device)
    record(result, arguments.out, {row.figure for row in rows})


if __name__ == "__main__":
    main()
