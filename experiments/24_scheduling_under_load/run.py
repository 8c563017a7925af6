"""Compare scheduling policies under load: in virtual time on the real scheduler, and admission on a live server.

    python experiments/24_scheduling_under_load/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/24_scheduling_under_load/run.py --predict

The section `steps` measures what a step costs on this machine. The sections in virtual time use what it has recorded,
so they give the same numbers on every machine that has this record. The result goes to
experiments/24_scheduling_under_load/results/<device>.json, below DIR where one is given. Sections that are not measured
again keep their rows.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.environment import device_name
from book.experiment import command_line, predicted, record
from mini_engine import LLM
from mini_engine.bench.load import VOCABULARY, Arrivals, Objective, Report, Seen, drive, percentiles
from mini_engine.bench.virtual import StepCost, VirtualEngine, VirtualRequest, VirtualRun
from mini_engine.bench.workloads import BenchRequest, Workload
from mini_engine.sampling_params import SamplingParams
from mini_engine.waiting import Fair, FirstComeFirstServed, LongestPrefix, Priority

EXPERIMENT = "24_scheduling_under_load"
STEPS, BUDGET, ARRIVALS, ADMISSION, PRIORITY, FAIRNESS, PREFIX, BLOCKING, LIVE = SECTIONS = (
    "steps", "budget", "arrivals", "admission", "priority", "fairness", "prefix", "blocking", "live",
)  # fmt: skip
MODEL = "smollm2-135m-instruct"
SEEDS, REQUESTS = 9, 400  # rounds in virtual time, and requests of each
STEP_ROUNDS = 5
CLOCKS = {"cpu": time.process_time, "cuda": time.perf_counter}
BURSTY = 0.25  # shape of the gamma distribution of the times between arrivals
NO_BOUND = "no bound: a result in virtual time, with the step cost of section steps"
MEASURED = "no bound: measured here"
UNLIMITED = 10**9
NOT_IN_README = {"TTFT, p90", "ITL, p50", "ITL, p90", "longest TTFT"}


@dataclass(frozen=True)
class Setting:
    """What is served on a kind of device.

    Attributes:
        rows: requests that run at once.
        prompt: fewest and most tokens of a prompt.
        output: fewest and most tokens of an output.
        long: tokens of a long prompt.
        budgets: tokens of a step that are compared.
        objective: what counts for goodput.
        step_sizes: prompt tokens of the steps that are timed.
        options: of the live server.
        live_requests: requests of a live round.
        rounds: live rounds.
    """

    rows: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    long: int
    budgets: tuple[int, ...]
    objective: Objective
    step_sizes: tuple[int, ...]
    options: tuple[str, ...]
    live_requests: int
    rounds: int


SETTINGS = {
    "cpu": Setting(
        8, (16, 96), (8, 48), 1024, (16, 32, 64, 128, 256, 2048), Objective(2.0, 0.15), (16, 64, 128, 256, 512, 1024),
        ("--max-batch-size=8", "--max-model-len=2048", "--no-enable-prefix-caching"), 60, 3,
    ),
    "cuda": Setting(
        64, (128, 1024), (64, 256), 8000, (128, 512, 2048, 8192, 16_384), Objective(1.0, 0.03),
        (64, 256, 1024, 4096, 8000), ("--max-batch-size=64", "--no-enable-prefix-caching"), 512, 3,
    ),
}  # fmt: skip


# --- what a step costs -----------------------------------------------------------------------------------------------


def step_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """Time steps that only decode and steps that compute a prompt, and fit the cost of a step, in each round.

    On a CPU these are the CPU seconds of one thread, which other processes lengthen less than they do elapsed time.
    """
    options = {"max_batch_size": setting.rows, "max_num_batched_tokens": max(*setting.budgets, setting.long)}
    llm = LLM(MODEL, device=device, enable_prefix_caching=False, pipeline_depth=0, **options)
    fits, num_threads = list[StepCost](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timed_steps(llm, setting, time.perf_counter)  # a warm-up
        for _ in range(STEP_ROUNDS):
            fits.append(StepCost.fit(*timed_steps(llm, setting, CLOCKS[device])))
    finally:
        torch.set_num_threads(num_threads)
    return [
        row("fixed cost of a step", [own.fixed for own in fits], "s", {}, MEASURED),
        row("cost of a token in a step", [own.per_token for own in fits], "s", {}, MEASURED),
    ]


def timed_steps(llm: LLM, setting: Setting, clock: Callable[[], float]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of steps: a prompt of each size, and decodes of one request and of a full batch."""
    engine, num_tokens, seconds = llm.engine, list[int](), list[float]()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    batches = [[size] for size in setting.step_sizes] + [[8], [8] * setting.rows]
    for sizes in batches:
        for i, size in enumerate(sizes):
            engine.add_request(f"{i}", [7 + j % 5000 for j in range(size)], params)
        while engine.has_unfinished:
            start = clock()
            report = engine.step()
            num_tokens.append(report.num_tokens)
            seconds.append(clock() - start)
    return np.array(num_tokens), np.array(seconds)


def recorded_cost(device: str, out: Path | None) -> StepCost:
    """Return the recorded cost of a step on this device."""
    for result in results.load(EXPERIMENT, out):
        if result.device == device_name(device):
            figures = "fixed cost of a step", "cost of a token in a step"
            return StepCost(*(result.find(figure).value for figure in figures))
    raise SystemExit(f"section {STEPS} has no record on this device; measure it first: --only {STEPS}")


# --- workloads -------------------------------------------------------------------------------------------------------


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def workload(setting: Setting, arrivals: Arrivals, count: int = REQUESTS, **changes: object) -> list[VirtualRequest]:
    """Random requests that arrive at random."""
    rng = random.Random(arrivals.seed)
    return [
        replace(VirtualRequest(at, tokens(rng, rng.randint(*setting.prompt)), rng.randint(*setting.output)), **changes)
        for at in arrivals.times(count).tolist()
    ]


def capacity(engine: VirtualEngine, requests: Sequence[VirtualRequest]) -> float:
    """Requests per second if all arrive at once."""
    seen = engine.serve([replace(own, arrival=0.0) for own in requests]).seen
    return len(seen) / max(own.times[-1] for own in seen)


def row(
    figure: str, values: Sequence[float], unit: str, case: dict[str, results.Setting], bound_from: str = NO_BOUND
) -> results.Row:
    """The median of the rounds, with the smallest and the largest."""
    made = results.Row(figure, statistics.median(values), unit, None, bound_from, case, (min(values), max(values)))
    print(made.cells()[:3], flush=True)
    return made


def first(seen: Sequence[Seen], percent: int) -> float:
    """A percentile of the time to first token of the requests that were answered."""
    return percentiles([own.first for own in seen if own.error is None])[(50, 90, 99).index(percent)]


def latency_rows(runs: Sequence[VirtualRun], setting: Setting, case: dict[str, results.Setting]) -> list[results.Row]:
    """TTFT, ITL, and goodput over all requests."""
    reports = [Report.of(run.seen, setting.objective) for run in runs]
    rows = list[results.Row]()
    for i, percent in enumerate((50, 90, 99)):
        rows.append(row(f"TTFT, p{percent}", [own.first[i] for own in reports], "s", case))
    for i, percent in enumerate((50, 90, 99)):
        rows.append(row(f"ITL, p{percent}", [own.between[i] for own in reports], "s", case))
    rows.append(row("goodput", [own.goodput for own in reports], "requests/s", case))
    return rows


# --- sections in virtual time ----------------------------------------------------------------------------------------


def budget_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """Tokens per step: one prompt in ten is long, at 70% of the capacity."""
    cost, rows = recorded_cost(device, out), list[results.Row]()

    def requests(seed: int, rate: float) -> list[VirtualRequest]:
        rng, made = random.Random(seed), workload(setting, Arrivals(rate, seed=seed))
        return [replace(own, prompt=tokens(rng, setting.long)) if rng.random() < 0.1 else own for own in made]

    rate = 0.7 * capacity(VirtualEngine(cost, max_batch_size=setting.rows), requests(0, math.inf))
    for budget in setting.budgets:
        engine = VirtualEngine(cost, max_batch_size=setting.rows, max_num_batched_tokens=budget)
        runs = [engine.serve(requests(seed, rate)) for seed in range(SEEDS)]
        rows += latency_rows(runs, setting, {"tokens of a step": budget})
    return rows


def arrival_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """Poisson arrivals and bursts of the same rate, by offered load."""
    engine, rows = VirtualEngine(recorded_cost(device, out), max_batch_size=setting.rows), list[results.Row]()
    most = capacity(engine, workload(setting, Arrivals(math.inf)))
    for load in (0.5, 0.8, 0.95):
        for name, shape in (("Poisson", 1.0), ("bursts", BURSTY)):
            runs = [engine.serve(workload(setting, Arrivals(load * most, shape, seed))) for seed in range(SEEDS)]
            rows += latency_rows(runs, setting, {"load": load, "arrivals": name})
    return rows


def admission_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """A limit on the predicted TTFT, at loads below and above the capacity, with bursts."""
    engine, rows = VirtualEngine(recorded_cost(device, out), max_batch_size=setting.rows), list[results.Row]()
    most = capacity(engine, workload(setting, Arrivals(math.inf)))
    for load in (0.8, 1.5):
        for limit in (None, setting.objective.first):
            several = [workload(setting, Arrivals(load * most, BURSTY, seed)) for seed in range(SEEDS)]
            runs = [engine.serve(own, max_ttft_seconds=limit) for own in several]
            case: dict[str, results.Setting] = {"load": load, "limit": "none" if limit is None else f"{limit:g} s"}
            rows += admission_figures([own.seen for own in runs], setting.objective, case, NO_BOUND)
    return rows


def admission_figures(
    rounds: Sequence[Sequence[Seen]], objective: Objective, case: dict[str, results.Setting], source: str
) -> list[results.Row]:
    """TTFT of what was answered, the share that was refused, and goodput."""
    reports = [Report.of(seen, objective) for seen in rounds]
    refused = [own.num_failed / (own.num_failed + own.num_requests) for own in reports]
    return [
        row("TTFT, p50", [own.first[0] for own in reports], "s", case, source),
        row("TTFT, p99", [own.first[2] for own in reports], "s", case, source),
        row("refused", refused, "of 1", case, source),
        row("goodput", [own.goodput for own in reports], "requests/s", case, source),
    ]


def priority_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """One request in four is urgent, above the capacity for the time of the round."""
    engine, rows = VirtualEngine(recorded_cost(device, out), max_batch_size=setting.rows), list[results.Row]()
    most = capacity(engine, workload(setting, Arrivals(math.inf)))
    for name, policy in (("fcfs", FirstComeFirstServed), ("priority", Priority)):
        urgent, other = list[float](), list[float]()
        for seed in range(SEEDS):
            made = workload(setting, Arrivals(1.1 * most, seed=seed))
            made = [replace(own, priority=int(i % 4 > 0)) for i, own in enumerate(made)]
            seen = engine.serve(made, policy()).seen
            urgent.append(first([own for i, own in enumerate(seen) if i % 4 == 0], 99))
            other.append(first([own for i, own in enumerate(seen) if i % 4], 99))
        case: dict[str, results.Setting] = {"policy": name}
        rows.append(row("TTFT of urgent requests, p99", urgent, "s", case))
        rows.append(row("TTFT of other requests, p99", other, "s", case))
    return rows


def fairness_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """Tenant a floods with three quarters of the requests at once; tenant b sends at 30% of the capacity."""
    engine, rows = VirtualEngine(recorded_cost(device, out), max_batch_size=setting.rows), list[results.Row]()
    most = capacity(engine, workload(setting, Arrivals(math.inf)))
    for name, policy in (("fcfs", FirstComeFirstServed()), ("fair", Fair(32))):
        flooding, other, rate = list[float](), list[float](), list[float]()
        for seed in range(SEEDS):
            made = workload(setting, Arrivals(math.inf, seed=seed), REQUESTS * 3 // 4, tenant="a")
            made += workload(setting, Arrivals(0.3 * most, seed=seed + 100), REQUESTS // 4, tenant="b")
            made.sort(key=lambda own: own.arrival)
            seen = engine.serve(made, type(policy)(policy.max_overtakes)).seen
            pairs = list(zip(made, seen, strict=True))
            end = min(max(own.times[0] for request, own in pairs if request.tenant == tenant) for tenant in "ab")
            flooding.append(first([own for request, own in pairs if request.tenant == "a"], 50))
            other.append(first([own for request, own in pairs if request.tenant == "b"], 99))
            rate.append(sum(time <= end for own in seen for time in own.times) / end)
        case: dict[str, results.Setting] = {"policy": name}
        rows.append(row("TTFT of the flooding tenant, p50", flooding, "s", case))
        rows.append(row("TTFT of the other tenant, p99", other, "s", case))
        rows.append(row("output of both", rate, "tokens/s", case))
    return rows


def prefix_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """Prompts begin with one of 16 long prefixes, of which the pool holds a few."""
    shared, page = setting.long // 4, 16
    num_pages = (6 * shared + setting.rows * (setting.prompt[1] + setting.output[1])) // page
    engine = VirtualEngine(
        recorded_cost(device, out), num_pages, page, max_batch_size=setting.rows, prefix_sharing=True
    )
    rows = list[results.Row]()

    def requests(rate: float, seed: int) -> list[VirtualRequest]:
        rng = random.Random(seed + 1000)
        prefixes = [tokens(rng, shared) for _ in range(16)]
        made = workload(setting, Arrivals(rate, seed=seed))
        popularity = [1 / (1 + rank) for rank in range(16)]  # Zipf's law
        return [replace(own, prompt=rng.choices(prefixes, popularity)[0] + own.prompt) for own in made]

    rate = 1.2 * capacity(engine, requests(math.inf, 0))
    for bound in (0, 4, 16, UNLIMITED):
        policy = LongestPrefix if bound else FirstComeFirstServed
        several = [requests(rate, seed) for seed in range(SEEDS)]
        runs = [engine.serve(own, policy(bound)) for own in several]
        case: dict[str, results.Setting] = {"policy": "lpm" if bound else "fcfs", "max_overtakes": _bound(bound)}
        prompts = [sum(len(own.prompt) for own in made) for made in several]
        hits = [run.num_shared / count for run, count in zip(runs, prompts, strict=True)]
        rows.append(row("prompt tokens in cached pages", hits, "of 1", case))
        rows += queue_rows(runs, setting, case)
    return rows


def blocking_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """One request in ten needs two thirds of the pool, and blocks those behind it until they may overtake."""
    page, most_tokens = 16, setting.prompt[1] + setting.output[1]
    num_pages = setting.rows * most_tokens // page
    large = 2 * num_pages * page // 3 - setting.output[1]
    engine, rows = VirtualEngine(recorded_cost(device, out), num_pages, page, setting.rows), list[results.Row]()

    def requests(rate: float, seed: int) -> list[VirtualRequest]:
        rng, made = random.Random(seed + 2000), workload(setting, Arrivals(rate, seed=seed))
        return [replace(own, prompt=tokens(rng, large)) if i % 10 == 5 else own for i, own in enumerate(made)]

    rate = 0.95 * capacity(engine, requests(math.inf, 0))
    for bound in (0, 2, 8, 32, UNLIMITED):
        runs = [engine.serve(requests(rate, seed), FirstComeFirstServed(bound)) for seed in range(SEEDS)]
        case: dict[str, results.Setting] = {"max_overtakes": _bound(bound)}
        for name, is_of in (("small", lambda i: i % 10 != 5), ("large", lambda i: i % 10 == 5)):
            of_kind = [[own for i, own in enumerate(run.seen) if is_of(i)] for run in runs]
            for percent in (50, 99):
                values = [first(seen, percent) for seen in of_kind]
                rows.append(row(f"TTFT of {name} requests, p{percent}", values, "s", case))
        rows += queue_rows(runs, setting, case)
    return rows


def queue_rows(runs: Sequence[VirtualRun], setting: Setting, case: dict[str, results.Setting]) -> list[results.Row]:
    """How the queue fares as a whole."""
    reports = [Report.of(run.seen, setting.objective) for run in runs]
    return [
        row("TTFT, p50", [own.first[0] for own in reports], "s", case),
        row("TTFT, p99", [own.first[2] for own in reports], "s", case),
        row("longest TTFT", [max(own.first for own in run.seen) for run in runs], "s", case),
        row("answered", [own.requests_per_second for own in reports], "requests/s", case),
        row("goodput", [own.goodput for own in reports], "requests/s", case),
    ]


def _bound(bound: int) -> results.Setting:
    return "unlimited" if bound == UNLIMITED else bound


# --- a live server ---------------------------------------------------------------------------------------------------


@contextmanager
def server(device: str, *options: str) -> Iterator[str]:
    """Start a server, and yield its address."""
    command = [sys.executable, "-m", "mini_engine", "serve", MODEL, "--port=0", f"--device={device}", *options]
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}  # the other core is for HTTP and the load generator
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | threads) as process:
        assert process.stdout is not None
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"on (http://[\d.:]+)", line)))
        finally:
            process.terminate()


def load_in_a_process(address: str, requests: Sequence[BenchRequest], arrivals: Arrivals) -> list[Seen]:
    """Drive a load from another process, so that it takes no time from anything else here."""
    import multiprocessing  # a fork would inherit what this process has loaded

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_drive, (address, list(requests), arrivals))


def _drive(address: str, requests: list[BenchRequest], arrivals: Arrivals) -> list[Seen]:
    return asyncio.run(drive(address, requests, arrivals))


def live_rows(setting: Setting, device: str, out: Path | None) -> list[results.Row]:
    """A real server with and without a limit on the predicted TTFT, at 1.5 times what it can answer, in bursts.

    Only the TTFT counts for goodput, because other processes of the machine may lengthen the ITL.
    """
    requests = Workload(setting.live_requests, setting.prompt, setting.output).requests(VOCABULARY)
    rows, rate = list[results.Row](), 0.0
    for limit in (None, setting.objective.first):
        own = () if limit is None else (f"--max-ttft-seconds={limit}",)
        with server(device, *setting.options, *own) as address:
            load_in_a_process(address, requests[:8], Arrivals(math.inf))  # a warm-up
            if not rate:
                seen = load_in_a_process(address, requests, Arrivals(math.inf))
                rate = 1.5 * Report.of(seen, setting.objective).requests_per_second
            rounds = [
                load_in_a_process(address, requests, Arrivals(rate, BURSTY, seed)) for seed in range(setting.rounds)
            ]
        case: dict[str, results.Setting] = {"limit": "none" if limit is None else f"{limit:g} s"}
        rows += admission_figures(rounds, replace(setting.objective, between=math.inf), case, MEASURED)
    return rows


# --- the whole -------------------------------------------------------------------------------------------------------


def predictions() -> str:
    """The numbers of the README's Prediction, for the CPU."""
    setting = SETTINGS["cpu"]
    prompt, output = (sum(own) / 2 for own in (setting.prompt, setting.output))
    return predicted({
        "tokens that the mean request costs its tenant": f"{prompt + 2 * output:.0f}",
        "steps of a long prompt, 64 tokens each, beside seven decodes": f"{math.ceil(setting.long / (64 - 7))}",
        "steps of a long prompt, 256 tokens each, beside seven decodes": f"{math.ceil(setting.long / (256 - 7))}",
    })  # fmt: skip


MEASURE: dict[str, Callable[[Setting, str, Path | None], list[results.Row]]] = {
    STEPS: step_rows, BUDGET: budget_rows, ARRIVALS: arrival_rows, ADMISSION: admission_rows, PRIORITY: priority_rows,
    FAIRNESS: fairness_rows, PREFIX: prefix_rows, BLOCKING: blocking_rows, LIVE: live_rows,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure the chosen sections and record them."""
    parser = command_line(__doc__ or "", predictions)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args(argv)
    setting = SETTINGS[arguments.device]
    parameters: dict[str, results.Setting] = {
        "model": MODEL, "requests": REQUESTS, "seeds": SEEDS, "requests at once": setting.rows,
        "live requests": setting.live_requests, "rounds": setting.rounds, "options": " ".join(setting.options),
        "objective": f"{setting.objective.first:g} s to the first token, {setting.objective.between:g} s per token",
    }  # fmt: skip
    for section in arguments.only:
        rows = MEASURE[section](setting, arguments.device, arguments.out)
        made = [replace(own, case={"section": section, **own.case}) for own in rows]
        result = results.new_result(EXPERIMENT, made, parameters, arguments.device)
        result = results.with_recorded(result, arguments.out, "section")
        record(result, arguments.out, {found.figure for found in result.rows} - NOT_IN_README)


if __name__ == "__main__":
    main()
