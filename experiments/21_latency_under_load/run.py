"""Measure latency under load: by offered load and by the tokens of a step, a server's cost, rates by batch size.

    python experiments/21_latency_under_load/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
        [--engines mini_engine transformers vllm]
    python experiments/21_latency_under_load/run.py --predict

The server and the load generator (`mini_engine/bench/load.py`) are processes of their own. The section `pareto` has no
server: each engine is a process that gets lists of requests. The result goes to
experiments/21_latency_under_load/results/<device>.json, below DIR where one is given. Sections that are not measured
again keep their rows. `transformers` is the server of the installed transformers, for the section `rates`. `vllm` has
to be installed in this Python environment: its server for `rates`, and the engine alone for `pareto`.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, rate_row, record
from book.random_models import QWEN3_0_6B, checkpoint, random_transformers_model
from mini_engine.bench.load import VOCABULARY, Arrivals, Objective, Report, Seen, drive, token_body
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.workloads import BenchRequest, Workload, least_seconds, num_outputs, with_other_tokens
from mini_engine.defaults import STEP_TOKENS, pick_dtype
from mini_engine.loading.checkpoint import Checkpoint, open_checkpoint
from mini_engine.loading.hub import embedded_folder
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, measure_machine
from mini_engine.sampling_params import SamplingParams

EXPERIMENT = "21_latency_under_load"
SECTIONS = RATES, CHUNKS, STALL, OVERHEAD, PARETO = "rates", "chunks", "stall", "overhead", "pareto"
ENGINES = OURS, TRANSFORMERS, VLLM = "mini_engine", "transformers", "vllm"
ENGINES_OF = {RATES: ENGINES, CHUNKS: (OURS,), STALL: (OURS,), OVERHEAD: (OURS,), PARETO: (OURS, VLLM)}
MODEL = "smollm2-135m-instruct"
OTHER_MODEL = "Qwen3-0.6B's shape with the vocabulary of SmolLM2"
HIGH_LOAD = 0.8
LOADS = 0.4, HIGH_LOAD, 1.2  # of the rate at which the server answers requests that all arrive at once
ROUNDS = 3
NO_BOUND = "a latency under load has no bound but that of an idle server"
CAPACITY = "the rate of requests that all arrive at once"
ALONE = "the engine alone, which gets the same requests as a list"
STEPS = "all prompts at once, then a step for each further token, at the machine's rates"
BodyOf = Callable[[BenchRequest], dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        workload: the requests of the sections `rates` and `chunks`.
        options: of the server.
        objective: what counts for goodput.
        streams: requests that are being answered when a long prompt arrives.
        stream_tokens: tokens of each of these answers, which take longer than a second.
        long: tokens of that prompt.
        chunks: most tokens of a step, in the sections `chunks` and `stall`.
        served: the requests of the section `overhead`.
        at_once: of them that run at once.
        clients: processes of the load generator.
        warm_up: requests before the first measured ones.
        batches: the requests of each batch size of the section `pareto`.
    """

    workload: Workload
    options: tuple[str, ...]
    objective: Objective
    streams: int
    stream_tokens: int
    long: int
    chunks: tuple[int, ...]
    served: Workload
    at_once: int
    clients: int
    warm_up: int
    batches: tuple[Workload, ...]


SETTINGS = {
    "cpu": Setting(
        Workload(24, (32, 96), (16, 48)), ("--max-batch-size=8", "--max-model-len=2048", "--dtype=bfloat16"),
        Objective(2.0, 0.2), 6, 96, 1536, (2048, 256, 64), Workload(24, (32, 96), (16, 48)), 8, 1, 4,
        tuple(Workload(2**i, (32, 32), (64, 64)) for i in range(5)),
    ),
    "cuda": Setting(
        Workload(512, (128, 1024), (64, 256)), (), Objective(1.0, 0.03), 48, 2048, 8000, (16_384, 2048, 512, 256),
        Workload(1024, (128, 512), (128, 512)), 256, 8, 256,
        tuple(Workload(2**i, (256, 256), (512, 512)) for i in range(9)),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class At:
    """Arrivals at given seconds."""

    seconds: tuple[float, ...]

    def times(self, count: int) -> np.ndarray:
        return np.array(self.seconds[:count])


@dataclass(frozen=True)
class Words:
    """Tokens of a model that are English words, so that outputs are text, too.

    A token without text of its own sends nothing to a client, which then sees a longer time between tokens.

    Attributes:
        of_token: the text of each such token. It is that token wherever it stands.
    """

    of_token: Mapping[int, str]

    @classmethod
    def of_model(cls, folder: Path) -> Words:
        """Find the words of a model's tokenizer: letters after a space, because it splits texts there."""
        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
        return cls({token: " " + own[1:] for own, token in vocabulary.items() if re.fullmatch("Ġ[a-z]+", own)})

    def spelled(self, requests: Iterable[BenchRequest]) -> list[BenchRequest]:
        """Return requests of the same lengths, whose prompts are words."""
        tokens = sorted(self.of_token)
        return [own._replace(prompt=[tokens[token % len(tokens)] for token in own.prompt]) for own in requests]

    def text_body(self, request: BenchRequest) -> dict[str, Any]:
        """Write a request for transformers' server, which takes text, and end tokens and lengths in its own form."""
        config = {"max_new_tokens": request.params.max_tokens, "do_sample": False, "eos_token_id": None}
        prompt = "".join(self.of_token[token] for token in request.prompt)
        return {"prompt": prompt, "generation_config": json.dumps(config), "stream": True}


@contextmanager
def served_model(device: str) -> Iterator[str]:
    """Yield the name or the folder of the model that is served.

    On a GPU that has random weights in the shape of Qwen3-0.6B, but the vocabulary of the embedded model. Tokens that
    are not words have a logit of 0, which is never the highest, because a client does not see tokens without text.
    """
    if device == "cpu":
        yield MODEL
        return
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder())
    shape = Qwen3Config(**QWEN3_0_6B.to_dict() | {"vocab_size": len(tokenizer), "tie_word_embeddings": True})
    model = random_transformers_model(shape, torch.bfloat16, torch.device(device))
    others = torch.ones(len(tokenizer), dtype=torch.bool)
    others[list(Words.of_model(embedded_folder()).of_token)] = False
    model.get_input_embeddings().weight.data[others] = 0.0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        yield folder


@contextmanager
def other_server(command: Sequence[str]) -> Iterator[str]:
    """Start the server of another engine, which has `/health`, and yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", *command, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            while process.poll() is None:
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=60).close()
                    break
                except OSError:  # it does not listen yet
                    time.sleep(0.2)
            else:
                raise RuntimeError(f"the server ended; run it to see why: {' '.join(command)}")
            yield address
        finally:
            process.terminate()


def server_of(engine: str, model: str, device: str, *options: str) -> AbstractContextManager[str]:
    """Start an engine's server with those of our options that it has, too."""
    if engine == OURS:
        return server(model, device, *options)
    if engine == VLLM:
        return other_server(["vllm.entrypoints.openai.api_server", "--model", model, *options])
    own = [option for option in options if option.startswith("--dtype")]
    return other_server(["transformers.cli.transformers", "serve", folder_of(model), "--device", device, *own])


def folder_of(model: str) -> str:
    """Return the folder of a served model."""
    return str(embedded_folder()) if model == MODEL else model


@contextmanager
def server(model: str, device: str, *options: str) -> Iterator[str]:
    """Start our server, and yield its address."""
    command = [sys.executable, "-m", "mini_engine", "serve", model, "--port=0", f"--device={device}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"on (http://[\d.:]+)", line)))
        finally:
            process.terminate()


class Clients:
    """Processes that drive a load, so that it takes no time from anything else here.

    Args:
        count: number of processes; each drives its share of the requests.
    """

    def __init__(self, count: int) -> None:
        import multiprocessing  # a fork would inherit what this process has loaded

        self._count, self._pool = count, multiprocessing.get_context("spawn").Pool(count)
        self._pool.map(str, range(count))  # they have started

    def drive(
        self,
        address: str,
        requests: Sequence[BenchRequest],
        arrivals: Arrivals | At,
        body_of: BodyOf = token_body,
    ) -> list[Seen]:
        """Send all requests when they are due, and return what their clients have seen."""
        times, count = arrivals.times(len(requests)).tolist(), self._count
        start = time.perf_counter() + 0.2
        shares = [(address, list(requests[i::count]), At(tuple(times[i::count])), body_of, start) for i in range(count)]
        return [own for share in self._pool.starmap(_drive, shares) for own in share]

    def close(self) -> None:
        """End the processes."""
        self._pool.terminate()


def _drive(address: str, requests: list[BenchRequest], arrivals: At, body_of: BodyOf, start: float) -> list[Seen]:
    return asyncio.run(drive(address, requests, arrivals, body_of, start))


def row(
    figure: str, values: Sequence[float], unit: str, case: dict[str, results.Setting], bound: float | None = None
) -> results.Row:
    """The median of the rounds, with the smallest and the largest."""
    source = NO_BOUND if bound is None else CAPACITY
    made = results.Row(figure, statistics.median(values), unit, bound, source, case, (min(values), max(values)))
    print(made.cells()[:5], flush=True)
    return made


class Load:
    """Requests that arrive at a server, the same ones in each round apart from their words.

    Args:
        setting: what is measured.
        clients: the load generator.
    """

    def __init__(self, setting: Setting, clients: Clients) -> None:
        self._setting, self._clients = setting, clients
        self.words = Words.of_model(embedded_folder())
        self._requests, self._shifts = setting.workload.requests(VOCABULARY), itertools.count(1)

    def warm_up(self, address: str, body_of: BodyOf = token_body) -> None:
        """Send a few requests at once."""
        self._clients.drive(address, self._next()[: self._setting.warm_up], Arrivals(math.inf), body_of)

    def reports(self, address: str, rate: float, body_of: BodyOf = token_body) -> list[Report]:
        """Send all requests at a rate, once for each round."""
        seen = [self._clients.drive(address, self._next(), Arrivals(rate, seed=i), body_of) for i in range(ROUNDS)]
        found = [Report.of(own, self._setting.objective) for own in seen]
        assert not any(own.num_failed for own in found)
        return found

    def capacities(self, address: str, body_of: BodyOf = token_body) -> list[float]:
        """Measure at which rate the server answers if all requests arrive at once, in each round."""
        return [own.requests_per_second for own in self.reports(address, math.inf, body_of)]

    def _next(self) -> list[BenchRequest]:
        return self.words.spelled(with_other_tokens(self._requests, next(self._shifts)))  # no prefix cache has them


def latency_rows(found: Sequence[Report], case: dict[str, results.Setting], most: float) -> list[results.Row]:
    """The percentiles of TTFT and ITL, and the rate of answers beside the server's capacity."""
    rows = list[results.Row]()
    for i, percent in enumerate((50, 90, 99)):
        rows.append(row(f"TTFT, p{percent}", [own.first[i] for own in found], "s", case))
        rows.append(row(f"ITL, p{percent}", [own.between[i] for own in found], "s", case))
    rows.append(row("answered", [own.requests_per_second for own in found], "requests/s", case, most))
    return rows


def rate_rows(setting: Setting, device: str, engines: Sequence[str]) -> list[results.Row]:
    """Latency and goodput by offered load, as shares of what the first engine can do; the same load for all engines."""
    rows, most = list[results.Row](), 0.0
    with served_model(device) as model, closing(Clients(setting.clients)) as clients:
        load = Load(setting, clients)
        for engine in engines:
            body_of: BodyOf = load.words.text_body if engine == TRANSFORMERS else token_body
            with server_of(engine, model, device, *setting.options) as address:
                load.warm_up(address, body_of)
                most = most or statistics.median(load.capacities(address, body_of))
                for share in LOADS:
                    case: dict[str, results.Setting] = {"load": share, "engine": engine}
                    found = load.reports(address, share * most, body_of)
                    rows += latency_rows(found, case, most)
                    rows.append(row("goodput", [own.goodput for own in found], "requests/s", case, share * most))
    return rows


def chunk_rows(setting: Setting, device: str) -> list[results.Row]:
    """Of our engine: capacity, and latency at a high load, by the most tokens of a step; the same load for all."""
    rows, most = list[results.Row](), 0.0
    with served_model(device) as model, closing(Clients(setting.clients)) as clients:
        load = Load(setting, clients)
        for chunk in setting.chunks:
            with server(model, device, *setting.options, f"--max-num-batched-tokens={chunk}") as address:
                load.warm_up(address)
                capacities = load.capacities(address)
                most = most or statistics.median(capacities)
                case: dict[str, results.Setting] = {"tokens of a step": chunk, "engine": OURS}
                rows.append(row("capacity", capacities, "requests/s", case, most))
                at_load = {"load": HIGH_LOAD, **case}
                rows += latency_rows(load.reports(address, HIGH_LOAD * most), at_load, most)
    return rows


def stall_rows(setting: Setting, device: str) -> list[results.Row]:
    """Of our engine: the longest pause of streams while a long prompt is computed, by the most tokens of a step."""
    rows = list[results.Row]()
    params = SamplingParams(temperature=0.0, max_tokens=setting.stream_tokens, ignore_eos=True)
    requests = [BenchRequest([100 + i] * 16, params) for i in range(setting.streams)]
    requests.append(BenchRequest([7 + i % 5000 for i in range(setting.long)], params))
    requests = Words.of_model(embedded_folder()).spelled(requests)
    with served_model(device) as model, closing(Clients(1)) as clients:
        for chunk in setting.chunks:
            case: dict[str, results.Setting] = {"tokens of a step": chunk, "engine": "mini_engine"}
            options = (*setting.options, f"--max-num-batched-tokens={chunk}", "--no-enable-prefix-caching")
            with server(model, device, *options) as address:
                arrivals = At((*[0.0] * setting.streams, 1.0))
                clients.drive(address, requests, arrivals)  # a warm-up
                seen = [clients.drive(address, requests, arrivals) for _ in range(ROUNDS)]
            gaps = [max(max(own.between) for own in sorted(of, key=lambda own: own.arrival)[:-1]) for of in seen]
            first = [max(of, key=lambda own: own.arrival).first for of in seen]
            rows.append(row("longest pause of a stream", gaps, "s", case))
            rows.append(row("TTFT of the long prompt", first, "s", case))
    return rows


def overhead_rows(setting: Setting, device: str) -> list[results.Row]:
    """Tokens per second of the engine alone, and of all streams of its server."""
    rows, words, shifts = list[results.Row](), Words.of_model(embedded_folder()), itertools.count(1)
    workload = setting.served.requests(VOCABULARY)
    tokens, rounds = num_outputs(workload), range(1 + ROUNDS)  # the first one warms up

    def requests() -> list[BenchRequest]:
        return words.spelled(with_other_tokens(workload, next(shifts)))

    with served_model(device) as model:
        folder = folder_of(model)
        dtype = str(pick_dtype("auto", torch.device(device), open_checkpoint(folder).dtype)).removeprefix("torch.")
        with closing(PeerProcess(OURS, PeerOptions(folder, dtype, max_num_seqs=setting.at_once))) as alone:
            seconds = []
            for _ in rounds:
                alone(requests())
                seconds.append(alone.seconds)
        case: dict[str, results.Setting] = {"streams": setting.at_once, "dtype": dtype}
        rows.append(rate_row("throughput", tokens, seconds[1:], None, NO_BOUND, case | {"way": "the engine alone"}))
        steps = f"--max-num-batched-tokens={STEP_TOKENS[device]}"  # as long as those of the engine alone
        options = f"--dtype={dtype}", f"--max-num-seqs={setting.at_once}", steps
        with server(model, device, *options) as address, closing(Clients(setting.clients)) as clients:
            served = [clients.drive(address, requests(), Arrivals(math.inf)) for _ in rounds]
        errors = {own.error for seen in served for own in seen} - {None}
        assert not errors, errors
        seconds = [max(own.times[-1] for own in seen) for seen in served]
        served_case = case | {"way": "its server"}
        rows.append(rate_row("throughput", tokens, seconds[1:], rows[0].value, ALONE, served_case))
    for made in rows:
        print(made.cells()[:5], flush=True)
    return rows


@contextmanager
def model_of(device: str) -> Iterator[tuple[str, Checkpoint]]:
    """Yield a name and the checkpoint of `pareto`'s model: on a GPU, random weights in the shape of Qwen3-0.6B."""
    if device == "cpu":
        yield MODEL, open_checkpoint(embedded_folder())
        return
    with checkpoint("Qwen3-0.6B", QWEN3_0_6B, torch.bfloat16, torch.device(device)) as (folder, _):
        yield "Qwen3-0.6B's shape", open_checkpoint(folder)


def pareto_rows(setting: Setting, device: str, engines: Sequence[str]) -> list[results.Row]:
    """Tokens per second of all requests together, by batch size. They start together and are equally long."""
    rows, most = list[results.Row](), max(own.num_requests for own in setting.batches)
    with model_of(device) as (name, model):
        dtype, shape = pick_dtype("auto", torch.device(device), model.dtype), model.config
        machine = measure_machine(device, dtype)
        gc.collect()
        torch.cuda.empty_cache()  # by default an engine takes what is free
        for engine in engines:
            options = PeerOptions(str(model.path), machine.dtype, max_num_seqs=most)
            with closing(PeerProcess(engine, options)) as serve:
                shifts = itertools.count(1)
                for batch in setting.batches:
                    requests, seconds = batch.requests(shape.vocab_size), list[float]()
                    for _ in range(1 + ROUNDS):
                        outputs = serve(with_other_tokens(requests, next(shifts)))  # which no prefix cache has
                        assert list(map(len, outputs)) == [request.num_outputs for request in requests]
                        seconds.append(serve.seconds)
                    tokens, least = num_outputs(requests), least_seconds(shape, machine, requests, dtype.itemsize)
                    case: dict[str, results.Setting] = {
                        "batch size": batch.num_requests, "model": name, "dtype": machine.dtype, "engine": engine,
                    }  # fmt: skip
                    # The first round is a warm-up.
                    rows.append(rate_row("throughput", tokens, seconds[1:], tokens / least, STEPS, case))
                    print(rows[-1].cells()[:5], flush=True)
    return rows


ASSUMED = {
    "cpu": Machine("a CPU", "float32", bandwidth=50e9, flops=200e9),
    "cuda": Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12),
}


def predictions() -> str:
    """The numbers of the README's Prediction: steps on a CPU, and the bounds of the section `pareto`."""
    setting, values = SETTINGS["cpu"], dict[str, str]()
    for chunk in setting.chunks:
        values[f"steps of the long prompt, {chunk} tokens each"] = f"{-(-setting.long // (chunk - setting.streams))}"
    shapes = {"cpu": open_checkpoint(embedded_folder()).config, "cuda": ModelConfig.from_hf(QWEN3_0_6B.to_dict())}
    for device, shape in shapes.items():
        machine, batches = ASSUMED[device], SETTINGS[device].batches
        itemsize, count = getattr(torch, machine.dtype).itemsize, batches[-1].num_requests
        one, most = (
            least_seconds(shape, machine, batch.requests(shape.vocab_size), itemsize)
            for batch in (batches[0], batches[-1])
        )
        values[f"time of {count} requests over that of one, bound of {machine.name}"] = f"{most / one:.1f}"
        values[f"tokens/s of {count} requests over those of one, bound of {machine.name}"] = f"{count * one / most:.1f}"
    return predicted(values)


def main(argv: list[str] | None = None) -> None:
    """Measure the chosen sections and record them."""
    parser = command_line(__doc__ or "", predictions)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    with_others = f"{TRANSFORMERS} is measured by {RATES}, {VLLM} by {RATES} and {PARETO}"
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=[OURS], help=with_others)
    arguments = parser.parse_args(argv)
    setting = SETTINGS[arguments.device]
    engines = {section: [own for own in arguments.engines if own in ENGINES_OF[section]] for section in arguments.only}
    for section, own in engines.items():
        if not own:
            parser.error(f"the section {section} measures {' and '.join(ENGINES_OF[section])}: add one to --engines")
    for engine in arguments.engines:
        check_installed(engine)
    parameters: dict[str, results.Setting] = {
        "model": MODEL if arguments.device == "cpu" else OTHER_MODEL, "requests": setting.workload.num_requests,
        "rounds": ROUNDS,
        "options": " ".join(setting.options), "long prompt": setting.long, "streams": setting.streams,
        "objective": f"{setting.objective.first:g} s to the first token, {setting.objective.between:g} s per token",
        "pareto": f"prompts of {setting.batches[0].prompt[1]} tokens, outputs of {setting.batches[0].output[1]}",
    }  # fmt: skip
    with suppress(metadata.PackageNotFoundError):
        parameters[VLLM] = metadata.version(VLLM)
    measure: dict[str, Callable[[], list[results.Row]]] = {
        RATES: lambda: rate_rows(setting, arguments.device, engines[RATES]),
        CHUNKS: lambda: chunk_rows(setting, arguments.device),
        STALL: lambda: stall_rows(setting, arguments.device),
        OVERHEAD: lambda: overhead_rows(setting, arguments.device),
        PARETO: lambda: pareto_rows(setting, arguments.device, engines[PARETO]),
    }
    for section in arguments.only:
        rows = measure[section]()
        made = [results.Row(**{**vars(own), "case": {"section": section, **own.case}}) for own in rows]
        result = results.new_result(EXPERIMENT, made, parameters, arguments.device)
        record(results.with_recorded(result, arguments.out, "section"), arguments.out)


if __name__ == "__main__":
    main()
