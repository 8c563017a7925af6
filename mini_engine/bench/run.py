"""Compare the engine's tokens per second with its bound and with peers, on the same machine, weights and requests."""

import datetime
import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_engine.attention.backend import BACKENDS, FLASHINFER
from mini_engine.bench.host import Row, host_rows
from mini_engine.bench.options import BenchOptions
from mini_engine.bench.peer_child import LOADERS
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.peers import PEERS, Serve, load_transformers, serve_mini_engine
from mini_engine.bench.workloads import (
    NAMED,
    BenchRequest,
    Workload,
    batch_of,
    least_seconds,
    num_outputs,
    with_other_tokens,
)
from mini_engine.cli_options import EngineOptions
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.llm import LLM, pick_device
from mini_engine.loading.checkpoint import open_checkpoint
from mini_engine.roofline import device_name, measure_machine
from mini_engine.terminal import printable

PAGE_SIZE = 128  # of our engine on a CPU
SPARE_CACHE = 1.1  # extra space in a peer's KV cache, because it rounds requests up to its own blocks
SHARE_OF_FREE = 0.95  # of the device's free memory that a peer may use
PACKAGES = ("torch", "transformers", "triton", "flashinfer-python")
# The columns that fit into 80 characters; JSON has all columns.
TABLE = (
    "requests", "engine", "seconds", "tokens_per_s", "min_tokens_per_s", "max_tokens_per_s", "bound_tokens_per_s",
    "share_of_bound", "equal",
)  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """The measurement of one engine on a workload.

    Attributes:
        engine: its name.
        rate: output tokens per second, the median of the rounds.
        equal: number of requests whose tokens equal those of the first engine of the run.
        spread: the lowest and the highest rate of the rounds.
    """

    engine: str
    rate: float
    equal: int
    spread: tuple[float, float]


def run_bench(console: Console, engine: EngineOptions, bench: BenchOptions) -> None:
    """Run a workload, print a table or one JSON object per row, and write the results to a file if one is given.

    Raises:
        ConfigError: for a peer that is unknown or not installed, or impossible options.
        PeerError: if a peer fails in its own process.
    """
    if bench.workload == "host":
        title, rows, shown = "Host time per step in µs, without model, kernels and text", host_rows(console), None
    else:
        config = EngineConfig.of(engine.options)
        device = pick_device(config.device)
        if bench.workload == "batches":
            workloads = [batch_of(size, bench.prompt_tokens, bench.max_tokens) for size in bench.batch_size]
        else:
            workloads = [NAMED[bench.workload][device.type]]
        rows, shown = compare(console, engine, workloads, bench.peer, bench.rounds), TABLE
        title = (
            f"{bench.workload}: {engine.model}, {rows[0]['dtype']}, {rows[0]['attn_backend']}, {device_name(device)}"
        )
    if bench.json:
        for row in rows:
            console.out(json.dumps(row), highlight=False)
    else:
        console.print(table(title, rows, shown))
    if bench.out and bench.workload != "host":  # last, so that a file that cannot be written costs no measurement
        write(bench.out, results(engine, bench, device, rows))


def compare(
    console: Console, engine: EngineOptions, workloads: Sequence[Workload], peers: Sequence[str] = (), rounds: int = 3
) -> list[Row]:
    """Serve workloads with our engine and with peers.

    Returns:
        A row for each workload and engine. `ratio` is our rate over that engine's. `equal` counts requests with the
        same tokens as ours, and is None if tokens are drawn at random.

    Raises:
        ConfigError: for a peer that is unknown or not installed, or requests that are too long or too many for the
            engine.
        PeerError: if a peer fails in its own process.
    """
    if unknown := [peer for peer in peers if peer not in PEERS | LOADERS]:
        raise ConfigError(f"unknown peer {unknown[0]!r}; choose one of: {', '.join(PEERS | LOADERS)}")
    for peer in peers:
        check_installed(peer)
    config = config_for(engine.options, workloads)
    # Checked before any prompt is built, because the sizes come from the command line.
    checkpoint, longest = open_checkpoint(engine.model), max(workload.longest for workload in workloads)
    shape = checkpoint.config
    if peers and checkpoint.path.is_file():
        raise ConfigError(
            f"{engine.model} is a GGUF file, which the peers do not read: give a folder, or leave out --peer"
        )
    if config.max_model_len is not None and config.max_model_len < longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but a prompt and its output may have {longest} tokens: raise it "
            "or leave it out, or choose fewer prompt tokens or fewer tokens to generate"
        )
    if longest > shape.max_position_embeddings:
        raise ConfigError(
            f"a prompt and its output may have {longest} tokens, but {engine.model} takes only "
            f"{shape.max_position_embeddings}: choose fewer prompt tokens, or fewer tokens to generate"
        )
    requests = [  # other tokens in each workload, so that a prefix cache does not find the previous workload's
        with_other_tokens(workload.requests(shape.vocab_size), index * (rounds + 1))
        for index, workload in enumerate(workloads)
    ]
    # Room for all requests and no more, because on a GPU the peers' caches share the memory with ours.
    num_pages = config.num_pages or max(pages_needed(own, config.page_size or PAGE_SIZE) for own in requests)
    llm = LLM(engine.model, replace(config, num_pages=num_pages), parts=engine.parts)
    machine = measure_machine(llm.model.device, llm.model.dtype)
    serve: dict[str, Serve] = {"mini_engine": partial(serve_mini_engine, llm.engine)}
    rows: list[Row] = []
    with ExitStack() as processes:
        if PEERS.keys() & set(peers):
            theirs = load_transformers(engine.model, llm.model.dtype, llm.model.device)
        for peer in peers:
            if peer in PEERS:
                serve[peer] = partial(PEERS[peer], theirs, llm.config.max_num_batched_tokens)
            else:
                with console.status(f"starting {peer}", spinner="line"):
                    options = peer_options(str(checkpoint.path), llm, longest)
                    serve[peer] = processes.enter_context(closing(PeerProcess(peer, options)))
        for workload, own in zip(workloads, requests, strict=True):
            with console.status(f"{len(own)} requests", spinner="line"):
                measured = measure(serve, own, rounds)
            itemsize, shared = llm.model.dtype.itemsize, workload.shared if config.enable_prefix_caching else 0
            bound = num_outputs(own) / least_seconds(llm.model.config, machine, own, itemsize, shared)
            found = rows_of(measured, workload, own, bound, machine.dtype)
            rows += [row | {"attn_backend": llm.config.attn_backend} for row in found]
    return rows


def config_for(given: Mapping[str, Any], workloads: Sequence[Workload]) -> EngineConfig:
    """Return the engine's options: the given ones override those of the workloads.

    Raises:
        ConfigError: for impossible options.
    """
    most = max(own.at_once or own.num_requests for own in workloads)
    longest = max(own.longest for own in workloads)
    options = EngineConfig.of(given)
    on_gpu = pick_device(options.device).type == "cuda"
    wanted = {
        "max_batch_size": most,
        "max_model_len": longest,
        "page_size": BACKENDS.get(options.attn_backend, FLASHINFER).on("cuda").page_size if on_gpu else PAGE_SIZE,
        "enable_prefix_caching": any(workload.shared for workload in workloads),
    }
    return EngineConfig.of(wanted | dict(given))


def peer_options(folder: str, llm: LLM, longest: int) -> PeerOptions:
    """Return the options for an engine in another process: our model, and a KV cache for as many tokens as ours.

    Args:
        folder: folder of the checkpoint.
        llm: our engine, with its pool allocated.
        longest: most tokens of a prompt and its output together.
    """
    config, share = llm.config, 1.0
    if llm.model.device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(llm.model.device)
        share = SHARE_OF_FREE * free / total
    num_tokens = round(SPARE_CACHE * config.num_pages * config.page_size)
    num_bytes = num_tokens * llm.engine.cache.bytes_per_token * len(llm.engine.layer_groups)
    dtype = str(llm.model.dtype).removeprefix("torch.")
    caches = config.enable_prefix_caching
    return PeerOptions(
        folder, dtype, config.max_batch_size, longest, caches, num_tokens, num_bytes, share,
        quantization=config.quantization,
        kv_cache_dtype={"auto": None, "fp8_e4m3": "fp8"}[config.kv_cache_dtype],
    )  # fmt: skip


def measure(serve: Mapping[str, Serve], requests: Sequence[BenchRequest], rounds: int) -> list[Measurement]:
    """Let engines take turns with the same requests, so that no engine gains if the machine's speed drifts.

    Every second round runs the engines in reverse order.

    A warm-up comes first: all prompts, with a sixteenth of their outputs. Its requests also end one by one, so an
    engine that compiles for each number of running requests has compiled before the first round. Each round has other
    tokens, so that a prefix cache finds what the requests share but not the requests of the previous round.
    """
    begun = [
        BenchRequest(one.prompt, replace(one.params, max_tokens=max(2, one.num_outputs // 16))) for one in requests
    ]
    for own in serve.values():
        own(begun)
    outputs: dict[str, list[list[int]]] = {}
    seconds = defaultdict[str, list[float]](list)
    for number in range(1, rounds + 1):
        asked = with_other_tokens(requests, number)
        for name in list(serve)[:: 1 if number % 2 else -1]:
            own = serve[name]
            start = time.perf_counter()
            outputs[name] = own(asked)
            passed = time.perf_counter() - start
            # Sending the prompts to another process does not count: that process measures its own time.
            seconds[name].append(own.seconds if isinstance(own, PeerProcess) else passed)
            assert [len(tokens) for tokens in outputs[name]] == [params.max_tokens for _, params in requests]
    first, num_tokens = next(iter(outputs.values())), num_outputs(requests)
    return [
        Measurement(
            name,
            num_tokens / statistics.median(seconds[name]),
            sum(map(list.__eq__, outputs[name], first)),
            (num_tokens / max(seconds[name]), num_tokens / min(seconds[name])),
        )
        for name in serve
    ]


def rows_of(
    measured: Sequence[Measurement], workload: Workload, requests: Sequence[BenchRequest], bound: float, dtype: str
) -> list[Row]:
    """Return the rows of `compare` for one workload.

    Args:
        measured: the measurements, ours first.
        workload: the workload.
        requests: its requests.
        bound: the most output tokens per second that the machine allows.
        dtype: dtype of weights and cache.
    """
    return [
        {
            "dtype": dtype,
            "requests": len(requests),
            "engine": own.engine,
            "seconds": float(f"{num_outputs(requests) / own.rate:.4g}"),
            "tokens_per_s": rounded(own.rate),
            "min_tokens_per_s": rounded(own.spread[0]),
            "max_tokens_per_s": rounded(own.spread[1]),
            "bound_tokens_per_s": rounded(bound),
            "share_of_bound": round(own.rate / bound, 2),
            "equal": None if workload.temperature else own.equal,
            "ratio": round(measured[0].rate / own.rate, 2),
        }
        for own in measured
    ]


def pages_needed(requests: Sequence[BenchRequest], page_size: int = PAGE_SIZE) -> int:
    """Count the pages that hold all requests at once, to their ends."""
    return sum(-(-(len(request.prompt) + request.num_outputs) // page_size) for request in requests)


def results(engine: EngineOptions, bench: BenchOptions, device: torch.device, rows: Sequence[Row]) -> dict[str, Any]:
    """Collect the results: measurements and bounds, with the device, the date, the versions and the options.

    Returns:
        A JSON object. Every row has a figure, its unit, its bound, and the lowest and the highest value of the rounds.
    """
    ours = f"mini_engine, {rows[0]['attn_backend']}"
    source = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
    found = []
    for row in rows:
        case = {
            "workload": bench.workload,
            "requests": row["requests"],
            "engine": ours if row["engine"] == "mini_engine" else row["engine"],
            "dtype": row["dtype"],
        }
        rate, bound = row["tokens_per_s"], row["bound_tokens_per_s"]
        spread = [row["min_tokens_per_s"], row["max_tokens_per_s"]]
        tokens = rate * row["seconds"]
        common = {"bound_from": source, "case": case}
        found += [
            {"figure": "throughput", "value": rate, "unit": "tokens/s", "bound": bound, "spread": spread, **common},
            {
                "figure": "time", "value": row["seconds"], "unit": "s", "bound": tokens / bound,
                "spread": [tokens / one for one in reversed(spread)], **common,
            },
        ]  # fmt: skip
    return {
        "experiment": "bench",
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions((*PACKAGES, *bench.peer)),
        "parameters": {"model": engine.model, "rounds": bench.rounds}
        | ({n: getattr(bench, n) for n in ("prompt_tokens", "max_tokens")} if bench.workload == "batches" else {})
        | {name: str(value) for name, value in engine.options.items()},
        "rows": found,
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Write results as JSON.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        # A path that is not UTF-8 has surrogates, which become "\udcff" in JSON.
        text = json.dumps(found, indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace")
        file.write_bytes(text + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; give another file for --out") from error


def rounded(rate: float) -> int | float:
    """Round a rate: to an integer from 1,000 on, to four digits below."""
    return round(rate) if rate >= 1000 else float(f"{rate:.4g}")


def table(title: str, rows: Sequence[Row], columns: Sequence[str] | None = None) -> Table:
    """Return a table with a column for each key of the rows, or for the given keys."""
    made = Table(
        title=Text(printable(title), "table.title"),
        title_justify="left",
        box=None,
        pad_edge=False,
        collapse_padding=True,
    )
    columns = columns or list(rows[0])
    for name in columns:
        is_text = isinstance(rows[0][name], str)
        made.add_column(name.replace("_", " "), justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        made.add_row(*("" if row[name] is None else str(row[name]) for name in columns))
    return made
