"""Output tokens per second of the engine beside its bound, and beside its peers: same machine, weights and requests."""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.table import Table

from mini_engine.bench.host import Row, host_rows
from mini_engine.bench.options import BenchOptions
from mini_engine.bench.peers import PEERS, Serve, load_transformers, serve_mini_engine
from mini_engine.bench.workloads import CPU, GPU, BenchRequest, Workload, batch_of, least_seconds, num_outputs
from mini_engine.cli_options import EngineOptions
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.llm import LLM, pick_device
from mini_engine.loading.checkpoint import open_checkpoint
from mini_engine.roofline import device_name, measure_machine

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


def run_bench(console: Console, engine: EngineOptions, bench: BenchOptions) -> None:
    """Run a workload, and print a table, or one JSON object per row.

    Raises:
        ConfigError: for an unknown peer, or impossible options.
    """
    if bench.workload == "host":
        title, rows = "Host time per step in µs, without model, kernels and text", host_rows(console)
    else:
        config = EngineConfig.of(engine.options)
        device = pick_device(config.device)
        workloads = [batch_of(size, bench.prompt_tokens, bench.max_tokens) for size in bench.batch_size]
        if bench.workload == "throughput":
            workloads = [GPU if device.type == "cuda" else CPU]
        rows = compare(console, engine, workloads, bench.peer, bench.rounds)
        title = f"{engine.model}, {config.attn_backend}, {device_name(device)}"
    if bench.json:
        for row in rows:
            console.out(json.dumps(row), highlight=False)
    else:
        console.print(table(title, rows))


def compare(
    console: Console, engine: EngineOptions, workloads: Sequence[Workload], peers: Sequence[str] = (), rounds: int = 3
) -> list[Row]:
    """Serve workloads with our engine and with peers.

    Returns:
        A row for each workload and engine. `ratio` is our rate over that engine's.

    Raises:
        ConfigError: for an unknown peer, or requests that are too long or too many for the engine.
    """
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise ConfigError(f"unknown peer {unknown[0]!r}; choose one of: {', '.join(PEERS)}")
    most = max(workload.num_requests for workload in workloads)
    config = EngineConfig.of({"max_batch_size": most, "page_size": PAGE_SIZE} | engine.options)
    # Checked before any prompt is built: the sizes come from the command line.
    shape, longest = open_checkpoint(engine.model).config, max(workload.longest for workload in workloads)
    if longest > shape.max_position_embeddings:
        raise ConfigError(
            f"a prompt and its output may have {longest} tokens, and {engine.model} takes "
            f"{shape.max_position_embeddings}: choose fewer prompt tokens, or fewer tokens to generate"
        )
    requests = [workload.requests(shape.vocab_size) for workload in workloads]
    # Room for all requests and no more: on a GPU the peers' caches share the memory with ours.
    num_pages = config.num_pages or max(pages_needed(own, config.page_size) for own in requests)
    llm = LLM(engine.model, replace(config, num_pages=num_pages), parts=engine.parts)
    serve: dict[str, Serve] = {"mini_engine": partial(serve_mini_engine, llm.engine)}
    if peers:
        theirs = load_transformers(engine.model, llm.model.dtype, llm.model.device)
        serve |= {peer: partial(PEERS[peer], theirs, config.max_num_batched_tokens) for peer in peers}
    machine = measure_machine(llm.model.device, llm.model.dtype)
    rows: list[Row] = []
    for own in requests:
        with console.status(f"{len(own)} requests", spinner="line"):
            measured = measure(serve, own, rounds)
        bound = num_outputs(own) / least_seconds(llm.model.config, machine, own, llm.model.dtype.itemsize)
        rows += [
            {
                "dtype": machine.dtype,
                "requests": len(own),
                "engine": other.engine,
                "tokens_per_s": round(other.rate, 1),
                "bound_tokens_per_s": round(bound, 1),
                "share_of_bound": round(other.rate / bound, 2),
                "equal_requests": other.equal,
                "ratio": round(measured[0].rate / other.rate, 2),
            }
            for other in measured
        ]
    return rows


def measure(serve: Mapping[str, Serve], requests: Sequence[BenchRequest], rounds: int) -> list[Measurement]:
    """Let engines take turns with the same requests, so a machine whose speed drifts favors none.

    A warm-up comes first: all prompts, with a sixteenth of their outputs. Its requests end one after the other as well,
    so an engine that compiles for a number of running requests has compiled by then.
    """
    begun = [
        BenchRequest(prompt, replace(params, max_tokens=max(2, params.max_tokens // 16))) for prompt, params in requests
    ]
    for own in serve.values():
        own(begun)
    outputs: dict[str, list[list[int]]] = {}
    seconds = defaultdict[str, list[float]](list)
    for name, own in list(serve.items()) * rounds:
        start = time.perf_counter()
        outputs[name] = own(requests)
        seconds[name].append(time.perf_counter() - start)
        assert [len(tokens) for tokens in outputs[name]] == [params.max_tokens for _, params in requests]
    first = next(iter(outputs.values()))
    return [
        Measurement(
            name, num_outputs(requests) / statistics.median(seconds[name]), sum(map(list.__eq__, outputs[name], first))
        )
        for name in serve
    ]


def pages_needed(requests: Sequence[BenchRequest], page_size: int = PAGE_SIZE) -> int:
    """Count the pages that hold all requests at once, to their ends."""
    return sum(-(-(len(prompt) + params.max_tokens) // page_size) for prompt, params in requests)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return a table with a column for each key of the rows."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True)
    for name, value in rows[0].items():
        is_text = isinstance(value, str)
        made.add_column(name.replace("_", " "), justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        made.add_row(*("" if value is None else str(value) for value in row.values()))
    return made
