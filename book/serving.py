"""Engines beside each other: each in a process of its own, with weights and keys in given formats.

The rows of experiments 14 and 15. Their bounds count the bytes of the formats.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from importlib import metadata

import torch

from book import results
from book.timing import measure
from mini_engine.bench.peer_process import PeerOptions, PeerProcess
from mini_engine.bench.workloads import Workload, least_seconds, model_shape, num_outputs, with_other_tokens
from mini_engine.errors import PeerError
from mini_engine.models.config import ModelConfig
from mini_engine.quantization import FP8, Format, format_for
from mini_engine.roofline import Machine, ModelShape

NAMES = {"fp8": "FP8", "int8": "INT8", "int4": "INT4"}
GET_READY = "what an engine does to get ready depends on its design"
STEPS = "all prompts at once, then a step for each token of those that still run, in these formats, at measured rates"


@dataclass(frozen=True)
class Stored:
    """How an engine stores weights and keys: `quantization` and `kv_cache_dtype`; None: as the model does."""

    weights: str | None = None
    keys: str | None = None

    def case(self, dtype: str) -> dict[str, results.Setting]:
        """Return the entries of a row's case.

        Args:
            dtype: the model's.
        """
        return {"weights": NAMES.get(self.weights or "", dtype), "keys": NAMES.get(self.keys or "", dtype)}


@dataclass(frozen=True)
class Measured:
    """An engine to be measured.

    Attributes:
        engine: its name for `PeerProcess`.
        options: the formats are added.
        stored: the formats.
        workloads: by name.
        label: its name in the rows; default `engine`.
    """

    engine: str
    options: PeerOptions
    stored: Stored
    workloads: Mapping[str, Workload]
    label: str | None = None


def serve_all(
    engines: Sequence[Measured],
    config: ModelConfig,
    machine: Machine,
    device: torch.device,
    rounds: int,
    of_all: Mapping[str, results.Setting],
    save: Callable[[list[results.Row]], None],
) -> None:
    """Measure engines one after the other, each alone on the device.

    Args:
        engines: the engines.
        config: the shape of the model.
        machine: the device's rates, from `measure_machine`.
        device: the device.
        rounds: how often each workload is served; a row has the fastest, and the slowest and the fastest as its spread.
        of_all: entries of all cases.
        save: called with the rows of each engine, also those measured before it failed.

    Raises:
        PeerError: at the end, if engines failed.
    """
    failures = []
    # A product of quantized weights may run at the rate of FP8, so its bound must.
    with_fp8 = with_fp8_products(machine, device) if any(engine.stored.weights for engine in engines) else machine
    gc.collect()
    torch.cuda.empty_cache()  # so that the engines find all memory free
    for engine in engines:
        rows: list[results.Row] = []
        try:
            for row in _rows(engine, config, with_fp8 if engine.stored.weights else machine, rounds, of_all):
                print(row.cells()[:5], flush=True)
                rows.append(row)
        except PeerError as error:
            print(error, flush=True)
            failures.append(f"{engine.label or engine.engine}, {engine.stored}")
        finally:
            if rows:
                save(rows)
    if failures:
        raise PeerError(f"these engines failed, for the reasons above: {'; '.join(failures)}")


def _rows(
    own: Measured, config: ModelConfig, machine: Machine, rounds: int, of_all: Mapping[str, results.Setting]
) -> Iterator[results.Row]:
    """Start an engine, let it serve its workloads, and yield a row for its start and one for each workload."""
    size, shape = getattr(torch, machine.dtype).itemsize, model_shape(config)
    number, of_keys = weight_bytes(shape, own.stored.weights, size), 1.0 if own.stored.keys else None
    options = replace(own.options, quantization=own.stored.weights, kv_cache_dtype=own.stored.keys)
    case = {**of_all, **own.stored.case(machine.dtype), "engine": own.label or own.engine}
    with closing(PeerProcess(own.engine, options)) as serve:
        yield results.Row("start until ready", serve.ready_seconds, "s", None, GET_READY, case)
        for index, (name, workload) in enumerate(own.workloads.items()):
            requests, seconds = workload.requests(config.vocab_size), []
            for number_of_round in range(rounds):
                outputs = serve(with_other_tokens(requests, 1 + index * rounds + number_of_round))
                assert list(map(len, outputs)) == [request.num_outputs for request in requests]
                seconds.append(serve.seconds)
            least = least_seconds(config, machine, requests, size, weight_bytes=number, kv_bytes=of_keys)
            tokens, of_row = num_outputs(requests), {**case, "workload": name}
            rates = tokens / max(seconds), tokens / min(seconds)
            yield results.Row("throughput", rates[1], "tokens/s", tokens / least, STEPS, of_row, rates)


def weight_bytes(shape: ModelShape, method: str | None, dtype_bytes: int) -> float:
    """Return the bytes of a number of the weights on average, with its share of scales and offsets.

    Args:
        shape: the model.
        method: `quantization`: "fp8", which leaves the LM head as it is, "int8" or "int4", which round it to INT8, or
            None.
        dtype_bytes: bytes of a number that is not quantized.
    """
    if method is None:
        return float(dtype_bytes)
    head = shape.vocab_size, shape.hidden_size
    stored = [(*sizes, format_for(method, sizes[1])) for sizes in matrices(shape)] * shape.num_layers
    stored += [(*head, format_for("int8", head[1]))] if method != "fp8" else []
    total = sum(_stored_bytes(*own, dtype_bytes) for own in stored)
    total += head[0] * head[1] * dtype_bytes if method == "fp8" else 0
    return total / (sum(rows * columns for rows, columns in matrices(shape)) * shape.num_layers + head[0] * head[1])


def matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of a layer with a gated MLP."""
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_qo_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    return [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]


def _stored_bytes(rows: int, columns: int, form: Format, dtype_bytes: int) -> float:
    """Bytes of a quantized matrix: scales of groups have 16 bits if the model has, and those of rows 32."""
    tiles = form.tiles(rows, columns)
    of_scale = 2 if tiles[1] > 1 and dtype_bytes == 2 else 4
    return form.bits * rows * columns / 8 + tiles[0] * tiles[1] * of_scale * (1 + form.has_offsets)


def with_fp8_products(machine: Machine, device: torch.device) -> Machine:
    """Return the machine with the rate of its products in FP8, where it has them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return machine
    side, one = 8192, torch.ones(1, 1, device=device)
    a, b = (torch.randn(side, side, device=device).to(FP8) for _ in range(2))

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    rate = 2 * side**3 / min(measure(product, device="cuda").runs)
    return replace(machine, flops=max(machine.flops, rate))


def installed(*names: str) -> dict[str, str]:
    """Versions of those of these packages that are installed."""
    found = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
