"""Measure what quantized weights cost in quality and gain in speed, on the embedded model.

    python experiments/14_fewer_bytes/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/14_fewer_bytes/run.py --predict

The result goes to experiments/14_fewer_bytes/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, rate_row, record, seconds_in_turns
from book.prose import Packed, chunks, perplexity, text
from book.units import quantity
from mini_engine import LLM
from mini_engine.bench.peers import serve_mini_engine
from mini_engine.bench.workloads import CPU, batch_of, least_seconds, model_shape, num_outputs
from mini_engine.gptq import quantize_layers
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.weights import Linear
from mini_engine.observe.metrics import weight_bytes_per_step
from mini_engine.parts import Parts
from mini_engine.quantization import Format, format_for, quantize
from mini_engine.roofline import Machine, ModelShape, measure_machine

EXPERIMENT, MODEL = "14_fewer_bytes", "smollm2-135m-instruct"
QUALITY, SPEED = SECTIONS = ("quality", "speed")
LENGTH = 512  # tokens of a sequence that perplexity is measured on
PROMPT_TOKENS, MAX_TOKENS, ROUNDS = 64, 64, 5
FORMATS = {
    "FP8": Format("fp8"), "INT8": Format("int8"), "INT8, a scale for each matrix": Format("int8", None, None),
    "INT4, a scale for each row": Format("int4"), "INT4, groups of 64": Format("int4", 1, 64),
    "INT4, groups of 32": Format("int4", 1, 32), "INT4, groups of 64, offsets": Format("int4", 1, 64, True),
    "INT4, groups of 32, offsets": Format("int4", 1, 32, True),
}  # fmt: skip
CALIBRATED = [name for name in FORMATS if name.startswith("INT4")]
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


# --- prediction ------------------------------------------------------------------------------------------------------


def predictions() -> str:
    """Derive the README's predictions from the shape of the embedded model."""
    shape = model_shape(open_checkpoint(MODEL).config)
    layers = sum(rows * columns for rows, columns in matrices(shape)) * shape.num_layers
    head = shape.vocab_size * shape.hidden_size
    int4 = 0.0
    for rows, columns in matrices(shape):
        group = format_for("int4", columns).columns
        assert group is not None
        int4 += rows * columns * (4 + 2 * 16 / group) / 8 * shape.num_layers
    ways = {"bfloat16": 2 * (layers + head), "INT8": layers + head, "INT4, and the head in INT8": int4 + head}
    return predicted(
        {
            f"{name}: weights of a token": (
                f"{quantity(size, 'B')}, {ways['bfloat16'] / size:.2f} times fewer than bfloat16"
            )
            for name, size in ways.items()
        }
    )


def matrices(shape: ModelShape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of a layer."""
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_qo_heads * shape.head_dim
    qkv = heads + 2 * shape.num_kv_heads * shape.head_dim
    return [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    chosen = options.parse_args(arguments)
    rows = quality_rows() if QUALITY in chosen.only else []
    if SPEED in chosen.only:
        rows += speed_rows(chosen.device, measure_machine(chosen.device, torch.bfloat16))
    parameters = {"model": MODEL, "length": LENGTH, "rounds": ROUNDS}
    result = results.with_recorded(results.new_result(EXPERIMENT, rows, parameters, chosen.device), chosen.out)
    record(result, chosen.out, {row.figure for row in result.rows})


if __name__ == "__main__":
    main()
