"""Measure what batch invariance costs and gives: tokens per second, and outputs equal to those alone.

    python experiments/16_batch_invariance/run.py [--device cpu|cuda] [--out DIR] [--engines NAME ...]
    python experiments/16_batch_invariance/run.py --predict

Each engine runs twice, in a process of its own: with its own defaults, and with `batch_invariant`. On a GPU the model
has the shape of Qwen3-0.6B and random weights in bfloat16; vLLM has to be installed in this Python environment. On a
CPU it is the embedded SmolLM2-135M-Instruct. The result goes to
experiments/16_batch_invariance/results/<device>.json, below DIR where one is given. Engines that are not measured again
keep their rows.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, write_checkpoint
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.workloads import (
    GPU,
    LATENCY,
    BenchRequest,
    Workload,
    least_seconds,
    num_outputs,
    with_other_tokens,
)  # fmt: skip
from mini_engine.llm import LLM
from mini_engine.loading.hub import EMBEDDED_MODEL
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, measure_machine

EXPERIMENT = "16_batch_invariance"
ENGINES = ("mini_engine", "vllm")
ROUNDS = {"cuda": 2, "cpu": 2}
MODES = {"default": None, "batch-invariant": True}
WORKLOADS: dict[str, dict[str, Workload]] = {
    "cuda": {
        "throughput": GPU,
        "latency": LATENCY,
        "8 requests": Workload(8, (512, 512), (256, 256)),
        "prompts": Workload(128, (2048, 2048), (1, 1)),
    },
    "cpu": {
        "throughput": Workload(16, (16, 64), (16, 48)),
        "latency": Workload(1, (64, 64), (48, 48)),
        "prompts": Workload(4, (256, 256), (1, 1)),
    },
}
# Served one by one, then together, each with the most probable token at each position.
EQUAL = {"cuda": Workload(64, (100, 1024), (128, 128)), "cpu": Workload(16, (16, 64), (32, 32))}
STEPS = "all prompts at once, then a step for each token of those that still run, at the machine's rates"


def equal_outputs(serve: PeerProcess, requests: list[BenchRequest]) -> int:
    """Count the requests that get the same tokens in company and alone."""
    together = serve(requests)
    return sum(serve([request]) == [output] for request, output in zip(requests, together, strict=True))


def rows_of(
    engine: str, mode: str, options: PeerOptions, shape: ModelConfig, device: str, machine: Machine
) -> list[results.Row]:
    """Start an engine and let it serve all workloads."""
    rows, itemsize, named = list[results.Row](), getattr(torch, machine.dtype).itemsize, WORKLOADS[device]
    with closing(PeerProcess(engine, options)) as serve:
        for index, (name, workload) in enumerate(named.items()):
            requests, seconds = workload.requests(shape.vocab_size), list[float]()
            for number in range(ROUNDS[device] + 1):  # the first one warms up
                serve(with_other_tokens(requests, 1 + index * (ROUNDS[device] + 1) + number))
                if number:
                    seconds.append(serve.seconds)
            tokens, least = num_outputs(requests), least_seconds(shape, machine, requests, itemsize)
            if workload.output == (1, 1):
                tokens = sum(len(prompt) for prompt, _ in requests)
            case: dict[str, results.Setting] = {"workload": name, "engine": engine, "mode": mode}
            rates = tokens / max(seconds), tokens / min(seconds)
            rows.append(results.Row("tokens per second", rates[1], "tokens/s", tokens / least, STEPS, case, rates))
            print(rows[-1].cells()[:5], flush=True)
        requests = EQUAL[device].requests(shape.vocab_size)
        case = {"engine": engine, "mode": mode}
        why = "every request, if the bits of a logit did not depend on the other requests"
        equal = equal_outputs(serve, requests)
        rows.append(results.Row("equal outputs", equal, "requests", len(requests), why, case))
        print(rows[-1].cells()[:5], flush=True)
    return rows


def predictions() -> str:
    """Derive the README's predictions from the shares of a step that change."""
    shared, slower = 0.75, 1.02  # attention's share of a step of 256 requests, and its time with splits of 256 keys
    return predicted({
        "throughput": f"{1 / (shared * slower + 1 - shared):.3f} of the default",
        "latency": f"{1440 / 2049:.2f} of the default: a graph of many kernels instead of the persistent kernel",
        "prompts": "1.00 of the default",
        "equal outputs": "all",
    })  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--engines", nargs="+", choices=ENGINES, help="measure these engines only")
    options.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="and these modes")
    chosen = options.parse_args(arguments)
    on_gpu = chosen.device == "cuda"
    engines = chosen.engines or (ENGINES if on_gpu else ENGINES[:1])
    for engine in engines:
        check_installed(engine)
    machine = measure_machine(torch.device(chosen.device), torch.bfloat16)
    parameters: Mapping[str, results.Setting] = {
        "model": "Qwen3-0.6B" if on_gpu else EMBEDDED_MODEL, "dtype": machine.dtype,
        "rounds": ROUNDS[chosen.device],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        if on_gpu:
            model, shape = (
                temporary,
                write_checkpoint(QWEN3_0_6B, torch.bfloat16, torch.device("cuda"), Path(temporary)),
            )
            gc.collect()
            torch.cuda.empty_cache()
        else:
            model, shape = EMBEDDED_MODEL, LLM(EMBEDDED_MODEL, device="cpu").engine.model.config
        for engine in engines:
            for mode in chosen.modes:
                given = PeerOptions(model, "bfloat16", batch_invariant=MODES[mode])
                rows = rows_of(engine, mode, given, shape, chosen.device, machine)
                result = results.new_result(EXPERIMENT, rows, dict(parameters), chosen.device)
                record(results.with_recorded(result, chosen.out, section="engine"), chosen.out)


if __name__ == "__main__":
    main()
