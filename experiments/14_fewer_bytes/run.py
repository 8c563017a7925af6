"""Measure what quantized weights cost in quality, and what they and FP8 keys gain in speed.

    python experiments/14_fewer_bytes/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/14_fewer_bytes/run.py --only products speed [--formats ...] [--models ...] [--engines ...]
    python experiments/14_fewer_bytes/run.py --predict

On a CPU: `quality` and `speed` of the embedded model. On a GPU: `products`, the time of a product with a matrix in each
format, and `speed`, models of published shapes with random weights, served by our engine and by vLLM, each in a process
of its own. vLLM has to be installed in this Python environment; `--engines mini_engine` does without.

The result goes to experiments/14_fewer_bytes/results/<device>.json, below DIR where one is given. What is not measured
again keeps its rows, so sections and models can be measured one at a time. `--checkpoints DIR` keeps the random weights
for the next run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, graph_of, predicted, rate_row, record, seconds_in_turns
from book.prose import Packed, chunks, perplexity, text
from book.random_models import LLAMA_3_1_8B, QWEN3_0_6B, checkpoint
from book.serving import Measured, Stored, installed, matrices, serve_all, weight_bytes
from book.timing import measure
from book.units import quantity
from mini_engine import LLM
from mini_engine.bench.peer_process import PeerOptions, check_installed
from mini_engine.bench.peers import serve_mini_engine
from mini_engine.bench.workloads import CPU, NAMED, batch_of, least_seconds, model_shape, num_outputs
from mini_engine.errors import PeerError
from mini_engine.gptq import quantize_layers
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.weights import Linear, Projection, projection
from mini_engine.observe.metrics import weight_bytes_per_step
from mini_engine.parts import Parts
from mini_engine.quantization import Format, format_for, quantize
from mini_engine.roofline import Machine, measure_machine

EXPERIMENT, MODEL = "14_fewer_bytes", "smollm2-135m-instruct"
QUALITY, SPEED, PRODUCTS = SECTIONS = ("quality", "speed", "products")
BY_DEFAULT = {"cpu": (QUALITY, SPEED), "cuda": (PRODUCTS, SPEED)}
LENGTH = 512  # tokens of a sequence that perplexity is measured on
PROMPT_TOKENS, MAX_TOKENS, ROUNDS = 64, 64, 5
FORMATS = {
    "FP8": Format("fp8"), "INT8": Format("int8"), "INT8, a scale for each matrix": Format("int8", None, None),
    "INT4, a scale for each row": Format("int4"), "INT4, groups of 64": Format("int4", 1, 64),
    "INT4, groups of 32": Format("int4", 1, 32), "INT4, groups of 64, offsets": Format("int4", 1, 64, True),
    "INT4, groups of 32, offsets": Format("int4", 1, 32, True),
}  # fmt: skip
CALIBRATED = [name for name in FORMATS if name.startswith("INT4")]
# Rows and columns of the matrices of `products`, and bytes of the copies of one: several times an L2 cache.
SHAPES = {"cpu": ((96, 64), (64, 128)), "cuda": ((8192, 8192), (4096, 14_336), (28_672, 4096), (6144, 4096))}
BYTES_OF_COPIES, FEWEST_COPIES = {"cpu": 1e5, "cuda": 3e8}, 4
METHODS = {"bfloat16": None, "FP8": "fp8", "INT8": "int8", "INT4": "int4"}
TOKENS = (1, 8, 16, 64, 256)
LARGEST_ERROR = 0.06  # of a product, relative; FP8 rounds a number by up to 6%, and tokens may be rounded, too
READ = "the matrix with its scales, the tokens and the product, once, at the measured bandwidth"
# What engines in processes of their own serve in `speed`.
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3-0.6B": QWEN3_0_6B, "Llama-3.1-8B": LLAMA_3_1_8B,
    "tiny": Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
    ),
}  # fmt: skip
STORED = {
    "bfloat16": Stored(), "FP8 keys": Stored(keys="fp8"), "FP8": Stored("fp8"), "INT8": Stored("int8"),
    "INT4": Stored("int4"),
}  # fmt: skip
OF_VLLM = ("bfloat16", "FP8 keys", "FP8")
# The larger model's throughput is experiment 15.
ONE_REQUEST = {name: ("latency",) for name in METHODS}
MANY = {"bfloat16": ("latency", "throughput"), "FP8 keys": ("throughput",)}
SERVED: dict[str, dict[str, tuple[str, ...]]] = {
    "Qwen3-0.6B": ONE_REQUEST | MANY, "Llama-3.1-8B": ONE_REQUEST, "tiny": ONE_REQUEST | MANY,
}  # fmt: skip
ENGINES, ROUNDS_OF_ENGINES, AT_ONCE = ("mini_engine", "vllm"), 2, 256  # ours has no other limit by default on a GPU
NO_BOUND = "how well a model predicts a text has no bound that follows from bytes"


def round_layers(model: CausalLM, form: Format) -> None:
    """Replace the matrices of all layers by what a format makes of them, rounded to nearest."""
    for own in model.layers.modules():
        if isinstance(own, Linear):
            rows = own.weight.split(list(own.rows.values()))
            own.weight.copy_(torch.cat([quantize(part, form).dequantize(own.weight.dtype) for part in rows]))


@torch.no_grad()
def quality_rows() -> list[results.Row]:
    """Perplexity of the embedded model with its layers in each format. The LM head keeps its numbers."""
    checkpoint = open_checkpoint(MODEL)
    encode = load_tokenizer(checkpoint).encode
    evaluation, calibration = (chunks(encode(text(name)), LENGTH) for name in ("evaluation", "calibration"))
    rows = []
    for name, form, method in [
        ("as in the checkpoint", None, "nearest"),
        *((name, form, "nearest") for name, form in FORMATS.items()),
        *((name, FORMATS[name], "gptq") for name in CALIBRATED),
    ]:
        model = load_model(checkpoint, Parts(), torch.float32)
        assert isinstance(model, LlamaForCausalLM)
        if form is not None and method == "gptq":
            quantize_layers(model, calibration, lambda columns, own=form: own, Packed(model, LENGTH))
        elif form is not None:
            round_layers(model, form)
        case: dict[str, results.Setting] = {"format": name, "method": method, "bits": round(bits(model, form), 3)}
        rows.append(results.Row("perplexity", perplexity(model, evaluation), "tokens", None, NO_BOUND, case))
        print(rows[-1].cells()[:3], flush=True)
    return rows


def bits(model: CausalLM, form: Format | None) -> float:
    """Bits of a number of the layers on average, with 16 for each scale and offset of a group, and 32 for a row's."""
    if form is None:
        return 16.0
    sizes = [(len(own.weight), own.in_features) for own in model.layers.modules() if isinstance(own, Linear)]
    if not sizes:  # they have been replaced
        sizes = [tuple(own.shape) for name, own in model.destinations().items() if "proj" in name]  # type: ignore[misc]
    total, numbers = 0.0, 0
    for out, columns in sizes:
        tiles = form.tiles(out, columns)
        of_scale = (16 if tiles[1] > 1 else 32) * (1 + form.has_offsets)
        total += form.bits * out * columns + of_scale * tiles[0] * tiles[1]
        numbers += out * columns
    return total / numbers


def speed_rows(device: str, machine: Machine) -> list[results.Row]:
    """Tokens per second of one request and of 32, with the weights in each format, in turns."""
    engines = {
        name: LLM(MODEL, dtype="bfloat16", device=device, quantization=quantization, enable_prefix_caching=False)
        for name, quantization in {"bfloat16": None, "INT8": "int8", "INT4": "int4"}.items()
    }
    rows = []
    for figure, workload in {
        "decode speed": batch_of(1, PROMPT_TOKENS, MAX_TOKENS), "throughput, 32 requests": CPU
    }.items():  # fmt: skip
        requests = workload.requests(engines["bfloat16"].model.config.vocab_size)
        runs = [partial(serve_mini_engine, llm.engine, requests) for llm in engines.values()]
        for (name, llm), seconds in zip(engines.items(), seconds_in_turns(runs, ROUNDS), strict=True):
            size = weight_bytes_per_step(llm.model)
            own = size / weight_bytes_per_step(engines["bfloat16"].model) * 2
            least = least_seconds(llm.model.config, machine, requests, 2, weight_bytes=own)
            case: dict[str, results.Setting] = {"weights": name, "dtype": "bfloat16"}
            why = "weights in this format, and keys and values, over the measured rates"
            tokens = num_outputs(requests)
            rows.append(rate_row(figure, tokens, seconds, tokens / least, why, case))
            if figure == "decode speed":
                rows.append(results.Row("weights read per token", size, "B", size, "every weight once", case))
    return [*rows, *so_far(rows)]


def so_far(rows: Sequence[results.Row]) -> list[results.Row]:
    """The rows of INT8 again, under the names that the table of all chapters has."""
    case: dict[str, results.Setting] = {"chapter": 13, "dtype": "bfloat16"}
    names = {
        "decode speed": results.ENGINE_SPEED, "weights read per token": results.ENGINE_BYTES,
        "throughput, 32 requests": results.ENGINE_THROUGHPUT,
    }  # fmt: skip
    return [replace(row, figure=names[row.figure], case=case) for row in rows if row.case["weights"] == "INT8"]


# --- on a GPU --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def product_rows(
    device: torch.device, machine: Machine, rows: int, columns: int, formats: Sequence[str]
) -> tuple[list[results.Row], list[str]]:
    """Time of a product with a matrix in each format, as the engine computes it: through `Projection`.

    Returns:
        A row for each product that is right, and a description of the others.
    """
    torch.manual_seed(0)
    matrix = torch.randn(rows, columns, device=device) / columns**0.5
    measured: list[results.Row] = []
    wrong: list[str] = []
    for name in METHODS:
        if name not in formats:
            continue
        copies = copies_of(matrix, METHODS[name])
        for num_tokens in TOKENS:
            x = torch.randn(num_tokens, columns, device=device, dtype=torch.bfloat16)
            wanted = x.float() @ copies[0].dense(torch.float32).T
            error = ((copies[0](x).float() - wanted).norm() / wanted.norm()).item()
            if not error < LARGEST_ERROR:
                wrong.append(f"{name}, {rows} x {columns}, {num_tokens} tokens: the error is {error:.3f}")
                continue
            seconds = seconds_of([partial(copy, x) for copy in copies], device)
            size = copies[0].num_bytes + 2 * num_tokens * (rows + columns)
            case: dict[str, results.Setting] = {"matrix": f"{rows} x {columns}", "format": name, "tokens": num_tokens}
            spread = min(seconds), max(seconds)
            median = sorted(seconds)[len(seconds) // 2]
            measured.append(results.Row("product", median, "s", size / machine.bandwidth, READ, case, spread))
            print(measured[-1].cells()[:5], flush=True)
    return measured, wrong


def copies_of(matrix: torch.Tensor, method: str | None) -> list[Projection]:
    """Return projections in bfloat16 or a format, all with this matrix, that do not fit in an L2 cache together."""
    rows, columns = matrix.shape
    formats = {} if method is None else {"matrix": format_for(method, columns)}
    copies: list[Projection] = []
    least = BYTES_OF_COPIES[matrix.device.type]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as a model is built
    try:
        while len(copies) < FEWEST_COPIES or sum(copy.num_bytes for copy in copies) < least:
            with matrix.device:
                copies.append(projection(formats, "", columns, {"matrix": rows}))
            copies[-1].destinations()["matrix.weight"].copy_(matrix)
            copies[-1].prepare(torch.bfloat16)
    finally:
        torch.set_default_dtype(before)
    return copies


def seconds_of(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of one of several calls, in a CUDA graph of all of them: the times of several runs."""
    run = graph_of(calls) if device.type == "cuda" else lambda: [call() for call in calls]
    return [seconds / len(calls) for seconds in measure(run, device=device.type).runs]


def served(model: str, folder: Path, engines: Sequence[str], formats: Sequence[str], device: str) -> list[Measured]:
    """The engines, formats and workloads of a model. vLLM does not round weights to INT8 and INT4."""
    measured = []
    for engine in engines:
        options = PeerOptions(str(folder), max_num_seqs=None if engine == "mini_engine" else AT_ONCE)
        for name in STORED:
            names = SERVED[model].get(name, ())
            if name in formats and names and (engine == "mini_engine" or name in OF_VLLM):
                workloads = {workload: NAMED[workload][device] for workload in names}
                measured.append(Measured(engine, options, STORED[name], workloads))
    return measured


# --- prediction ------------------------------------------------------------------------------------------------------


ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)
MEASURED = {"Qwen3-0.6B": 2049, "Llama-3.1-8B": 267}  # tokens/s of one request in bfloat16, from experiment 13


def predictions() -> str:
    """Derive the README's predictions from the shapes of the models."""
    shape = model_shape(open_checkpoint(MODEL).config)
    layers = sum(rows * columns for rows, columns in matrices(shape)) * shape.num_layers
    head = shape.vocab_size * shape.hidden_size
    int4 = 0.0
    for rows, columns in matrices(shape):
        group = format_for("int4", columns).columns
        assert group is not None
        int4 += rows * columns * (4 + 2 * 16 / group) / 8 * shape.num_layers
    ways = {"bfloat16": 2 * (layers + head), "INT8": layers + head, "INT4, and the head in INT8": int4 + head}
    on_cpu = {
        f"{name}: weights of a token": f"{quantity(size, 'B')}, {ways['bfloat16'] / size:.2f} times fewer than bfloat16"
        for name, size in ways.items()
    }
    return predicted(on_cpu | of_gpu())


def of_gpu() -> dict[str, str]:
    """Derive the predictions for a GPU."""
    values = {}
    for name, bytes_of_number in {"bfloat16": 2.0, "FP8 or INT8": 1.0, "INT4": (4 + 2 * 16 / 128) / 8}.items():
        tokens = ASSUMED.ridge * bytes_of_number / 2
        values[f"{name}: tokens whose arithmetic takes as long as reading a matrix"] = f"{tokens:.0f}"
    for model, rate in MEASURED.items():
        shape = model_shape(ModelConfig.from_hf(MODELS[model].to_dict()))
        numbers = sum(map(math.prod, matrices(shape))) * shape.num_layers + shape.vocab_size * shape.hidden_size
        sizes = {name: weight_bytes(shape, method, 2) * numbers for name, method in METHODS.items()}
        rest = 1 / rate - sizes["bfloat16"] / ASSUMED.bandwidth
        for name, size in sizes.items():
            gain = 1 / rate / (rest + size / ASSUMED.bandwidth)
            values[f"{model}, {name}: weights of a token"] = (
                f"{quantity(size, 'B')}; {gain:.2f} times as fast as bfloat16 with {quantity(rest, 's')} for the rest"
            )
    config, throughput = ModelConfig.from_hf(QWEN3_0_6B.to_dict()), NAMED["throughput"]["cuda"]
    requests = throughput.requests(config.vocab_size)
    wide, narrow = (least_seconds(config, ASSUMED, requests, 2, kv_bytes=size) for size in (2.0, 1.0))
    values["throughput, FP8 keys"] = (
        f"at most {num_outputs(requests) / narrow:,.0f} tokens/s, {wide / narrow:.2f} times as many as in bfloat16"
    )
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, help="measure these sections only")
    options.add_argument(
        "--models", nargs="+", choices=list(MODELS), help="serve these, each engine in its own process"
    )
    options.add_argument("--formats", nargs="+", choices=list(STORED), default=list(STORED), help="these formats only")
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="with these engines")
    options.add_argument("--rounds", type=int, default=ROUNDS_OF_ENGINES, help="how often an engine serves a workload")
    options.add_argument("--checkpoints", type=Path, help="keep the random weights in this folder")
    chosen = options.parse_args(arguments)
    device, on_gpu = torch.device(chosen.device), chosen.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32  # of the engines in processes of their own
    sections = chosen.only or BY_DEFAULT[device.type]
    models = chosen.models or ([name for name in MODELS if name != "tiny"] if on_gpu else [])
    if models and SPEED in sections:
        for engine in chosen.engines:
            check_installed(engine)
    parameters: dict[str, results.Setting] = {"model": MODEL, "length": LENGTH, "rounds": ROUNDS}
    if on_gpu or models:
        parameters = {"rounds": chosen.rounds, "requests at once": AT_ONCE, **installed("vllm")}

    def save(rows: Sequence[results.Row]) -> None:
        result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
        result = results.with_recorded(result, chosen.out, section="model")
        record(result, chosen.out)

    wrong: list[str] = []
    if QUALITY in sections:
        save(quality_rows())
    if PRODUCTS in sections:
        machine, rows = measure_machine(device, torch.bfloat16), list[results.Row]()
        for shape in SHAPES[device.type]:
            right, of_shape = product_rows(device, machine, *shape, chosen.formats)
            rows, wrong = rows + right, wrong + of_shape
            if rows:
                save(rows)
    if SPEED in sections and not models:
        save(speed_rows(chosen.device, measure_machine(device, torch.bfloat16)))
    elif SPEED in sections:
        machine = measure_machine(device, dtype)
        for model in models:
            with checkpoint(model, MODELS[model], dtype, device, chosen.checkpoints) as (folder, config):
                engines = served(model, folder, chosen.engines, chosen.formats, device.type)
                try:
                    serve_all(engines, config, machine, device, chosen.rounds, {"model": model}, save)
                except PeerError as error:  # the next model may do better
                    wrong.append(f"{model}: {error}")
    if wrong:
        raise SystemExit(f"these have no rows: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
