"""Output tokens per second of the engine beside its bound, and beside its peers: same machine, weights and requests."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from mini_engine.bench import host
from mini_engine.bench.peers import PEERS, MiniEngine, Server, load_transformers
from mini_engine.bench.workloads import CPU, GPU, BenchRequest, Workload, batch_of, least_seconds
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.llm import LLM, pick_device
from mini_engine.loading.checkpoint import open_checkpoint
from mini_engine.parts import Parts
from mini_engine.roofline import measure_machine

WORKLOADS = ("batches", "throughput", "host")
PAGE_SIZE = 128  # of ours: every backend takes it on every device


@dataclass(frozen=True)
class Measurement:
    """How one engine served a workload.

    Attributes:
        engine: its name.
        rate: output tokens per second, the median of the rounds.
        equal: number of requests whose tokens equal those of the first engine of the run.
    """

    engine: str
    rate: float
    equal: int


@dataclass(frozen=True)
class Comparison:
    """How all engines served one workload in one dtype.

    Attributes:
        dtype: of the weights.
        attn_backend: of our engine.
        num_requests: requests of the workload.
        bound: output tokens per second that the machine's measured rates allow.
        machine: name of the device.
        measured: one for each engine, ours first.
    """

    dtype: str
    attn_backend: str
    num_requests: int
    bound: float
    machine: str
    measured: list[Measurement]


def run_bench(
    console: Console,
    *,
    workload: str = "batches",
    model: str = "smollm2-135m-instruct",
    options: Mapping[str, Any] | None = None,
    parts: Parts | None = None,
    peers: Sequence[str] = (),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    batch_sizes: Sequence[int] = (1, 8),
    prompt_tokens: int = 64,
    max_tokens: int = 64,
    rounds: int = 3,
    as_json: bool = False,
) -> None:
    """Run a workload and print a table.

    Args:
        console: where to print.
        workload: "batches" (requests of equal output length), "throughput" (many requests of mixed lengths) or "host"
            (host time per step without a model; the other options do not apply to it).
        model: as for `LLM`.
        options: fields of `EngineConfig` for our engine, other than its dtype.
        parts: our engine's replaceable parts.
        peers: names of PEERS to measure too.
        dtypes: the dtypes to measure in.
        batch_sizes: numbers of requests of "batches".
        prompt_tokens: average tokens of a prompt of "batches".
        max_tokens: tokens of an output of "batches".
        rounds: timed runs of each engine.
        as_json: print one JSON object per line instead of a table.

    Raises:
        ConfigError: for an unknown workload or peer, or impossible sizes.
    """
    if workload not in WORKLOADS:
        raise ConfigError(f"unknown workload {workload!r}; choose one of: {', '.join(WORKLOADS)}")
    if workload == "host":
        host.run_host(console, as_json=as_json)
        return
    if not batch_sizes or min([*batch_sizes, prompt_tokens, max_tokens]) < 1:
        raise ConfigError("batch sizes, prompt tokens and max tokens must be 1 or more")
    workloads = [batch_of(size, prompt_tokens, max_tokens) for size in batch_sizes]
    if workload == "throughput":
        device = EngineConfig.of(options or {}).device
        workloads = [GPU if pick_device(device).type == "cuda" else CPU]
    comparisons = compare(
        console,
        workloads,
        model=model,
        options=options or {},
        parts=parts,
        peers=peers,
        dtypes=dtypes,
        rounds=rounds,
    )
    if as_json:
        for line in json_lines(comparisons):
            console.out(line, highlight=False)
    else:
        console.print(
            comparison_table(comparisons, f"{model}, {comparisons[0].attn_backend}, {comparisons[0].machine}")
        )


def compare(
    console: Console,
    workloads: Sequence[Workload],
    *,
    model: str,
    options: Mapping[str, Any],
    parts: Parts | None,
    peers: Sequence[str],
    dtypes: Sequence[str],
    rounds: int,
) -> list[Comparison]:
    """Serve workloads with our engine and with peers, in every dtype.

    Raises:
        ConfigError: for an unknown peer, no rounds, or requests that are too long or too many for the engine.
    """
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise ConfigError(f"unknown peer {unknown[0]!r}; choose one of: {', '.join(PEERS)}")
    if rounds < 1 or not dtypes:
        raise ConfigError("give at least one round and one dtype")
    most = max(workload.num_requests for workload in workloads)
    configs = [
        EngineConfig.of({"max_batch_size": most, "page_size": PAGE_SIZE} | dict(options) | {"dtype": dtype})
        for dtype in dtypes
    ]
    # Checked before any prompt is built: the sizes come from the command line.
    shape, longest = open_checkpoint(model).config, max(workload.longest for workload in workloads)
    if longest > shape.max_position_embeddings:
        raise ConfigError(
            f"a prompt and its output may have {longest} tokens, and {model} takes {shape.max_position_embeddings}: "
            "choose fewer prompt tokens, or fewer tokens to generate"
        )
    requests = [workload.requests(shape.vocab_size) for workload in workloads]
    comparisons = []
    for config in configs:
        # Room for all requests and no more: on a GPU the peers' caches share the memory with ours.
        num_pages = config.num_pages or max(pages_needed(own, config.page_size) for own in requests)
        llm = LLM(model, replace(config, num_pages=num_pages), parts=parts)
        servers: list[Server] = [MiniEngine(llm.engine)]
        if peers:
            theirs = load_transformers(model, llm.model.dtype, llm.model.device)
            servers += [PEERS[peer](theirs, config.max_num_batched_tokens) for peer in peers]
        machine = measure_machine(llm.model.device, llm.model.dtype)
        for own in requests:
            with console.status(f"{config.dtype}, {len(own)} requests"):
                measured = measure(servers, own, rounds)
            bound = num_outputs(own) / least_seconds(llm.model.config, machine, own, llm.model.dtype.itemsize)
            comparisons.append(Comparison(config.dtype, config.attn_backend, len(own), bound, machine.name, measured))
    return comparisons


def measure(servers: Sequence[Server], requests: Sequence[BenchRequest], rounds: int) -> list[Measurement]:
    """Let servers take turns with the same requests, after a warm-up: all prompts, with a sixteenth of their outputs.

    The warm-up's requests end one after the other as well, so an engine that compiles for a number of running requests
    has compiled by then.
    """
    begun = [
        BenchRequest(prompt, replace(params, max_tokens=max(2, params.max_tokens // 16))) for prompt, params in requests
    ]
    outputs: dict[str, list[list[int]]] = {}

    def run(server: Server, own: Sequence[BenchRequest]) -> None:
        outputs[server.name] = server.serve(own)

    seconds = alternate(
        [partial(run, server, requests) for server in servers], rounds, [partial(run, s, begun) for s in servers]
    )
    first = outputs[servers[0].name]
    for tokens in outputs.values():
        assert [len(own) for own in tokens] == [params.max_tokens for _, params in requests]
    return [
        Measurement(
            server.name,
            num_outputs(requests) / own,
            sum(a == b for a, b in zip(outputs[server.name], first, strict=True)),
        )
        for server, own in zip(servers, seconds, strict=True)
    ]


def alternate(
    runs: Sequence[Callable[[], object]], rounds: int, warm_ups: Sequence[Callable[[], object]] | None = None
) -> list[float]:
    """Return the median seconds of each run: they take turns, so a machine whose speed drifts favors none.

    Args:
        runs: the functions to time.
        rounds: how often each is timed.
        warm_ups: what is called before, untimed; default each run once.
    """
    for warm_up in warm_ups or runs:
        warm_up()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for own, run in zip(seconds, runs, strict=True):
            start = time.perf_counter()
            run()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in seconds]


def num_outputs(requests: Sequence[BenchRequest]) -> int:
    """Count the output tokens of all requests."""
    return sum(params.max_tokens for _, params in requests)


def pages_needed(requests: Sequence[BenchRequest], page_size: int = PAGE_SIZE) -> int:
    """Count the pages that hold all requests at once, to their ends."""
    return sum(-(-(len(prompt) + params.max_tokens) // page_size) for prompt, params in requests)


def json_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """Return one JSON object for each engine, workload and dtype."""
    return [
        json.dumps(
            {
                "dtype": own.dtype,
                "requests": own.num_requests,
                "engine": measurement.engine,
                "tokens_per_s": round(measurement.rate, 1),
                "bound_tokens_per_s": round(own.bound, 1),
                "equal_requests": measurement.equal,
            }
        )
        for own in comparisons
        for measurement in own.measured
    ]


def comparison_table(comparisons: Sequence[Comparison], title: str) -> Table:
    """Return a table with one row for each engine, workload and dtype; `ratio` is our rate over that engine's."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    table.add_column("dtype")
    table.add_column("requests", justify="right")
    table.add_column("engine", no_wrap=True)
    for column in ("tokens/s", "of bound", "equal", "ratio"):
        table.add_column(column, justify="right")
    for own in comparisons:
        for measurement in own.measured:
            table.add_row(
                own.dtype,
                str(own.num_requests),
                measurement.engine,
                f"{measurement.rate:.1f}",
                f"{measurement.rate / own.bound:.0%}",
                f"{measurement.equal} of {own.num_requests}",
                f"{own.measured[0].rate / measurement.rate:.2f}x",
            )
    return table
