"""Serve a model of 8 billion parameters in FP8, 1,024 tokens in and 1,024 out, with our engine and with vLLM.

    python experiments/15_fp8_8b/run.py [--out DIR] [--keys ...] [--engines ...] [--workloads ...]
    python experiments/15_fp8_8b/run.py --predict

The model has the shape of Llama-3.1-8B, and random weights that each engine rounds to FP8 while it loads them. Keys are
in bfloat16 and in FP8. Each engine runs in a process of its own and has the device to itself. `yaml` is our engine with
the options of llama_8b_flashinfer_trtllm.yaml. vLLM has to be installed in this Python environment; `--engines
mini_engine yaml` does without. On a CPU a tiny model in float32 shows that the script works.

The result goes to experiments/15_fp8_8b/results/<device>.json, below DIR where one is given. What is not measured again
keeps its rows, so keys, engines and workloads can be measured one at a time, on one day. `--checkpoints DIR` keeps the
random weights, 16 GB, for the next run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, record
from book.random_models import LLAMA_3_1_8B, checkpoint
from book.serving import Measured, Stored, installed, matrices, serve_all, weight_bytes
from book.units import quantity
from mini_engine.bench.peer_process import PeerOptions, check_installed
from mini_engine.bench.workloads import LONG_OUTPUT, Workload, least_seconds, model_shape, num_outputs
from mini_engine.config import EngineConfig, read_options
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, measure_machine

EXPERIMENT = "15_fp8_8b"
YAML = Path(__file__).with_name("llama_8b_flashinfer_trtllm.yaml")
ENGINES, ROUNDS, AT_ONCE = ("mini_engine", "vllm", "yaml"), 2, 256  # ours has no other limit by default on a GPU
STORED = {"bfloat16": Stored("fp8"), "fp8": Stored("fp8", "fp8")}
FEW, MANY = "64 requests", "512 requests"
WORKLOADS: dict[str, dict[str, Workload]] = {
    "cuda": {FEW: LONG_OUTPUT, MANY: replace(LONG_OUTPUT, num_requests=512)},
    "cpu": {FEW: Workload(4, (16, 16), (16, 16)), MANY: Workload(8, (16, 16), (16, 16))},
}
MODELS: dict[str, tuple[str, PretrainedConfig]] = {
    "cuda": ("Llama-3.1-8B", LLAMA_3_1_8B),
    "cpu": ("tiny", Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
    )),
}  # fmt: skip


def served(
    folder: Path, keys: Sequence[str], engines: Sequence[str], workloads: Sequence[str], device: str
) -> list[Measured]:
    """The engines to be measured. Many requests are served with FP8 keys, and with engines whose options suit them."""
    measured = []
    for name in keys:
        for engine in engines:
            options = PeerOptions(str(folder))
            if engine == "yaml":
                options = replace(options, config=str(YAML))
            elif engine == "vllm":
                options = replace(options, max_num_seqs=AT_ONCE)
            suits_many = name == "fp8" and engine != "yaml"
            own = {own: WORKLOADS[device][own] for own in workloads if own == FEW or suits_many}
            if own:
                label = "mini_engine, YAML" if engine == "yaml" else engine
                known = "mini_engine" if engine == "yaml" else engine
                measured.append(Measured(known, options, STORED[name], own, label))
    return measured


# --- prediction ------------------------------------------------------------------------------------------------------

# FP8's rate is that of its products of large matrices, as others have published it.
ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=1300e12)


def predictions() -> str:
    """Derive the README's predictions from the bytes of a step in the middle of the outputs."""
    config = ModelConfig.from_hf(LLAMA_3_1_8B.to_dict())
    shape = model_shape(config)
    of_number = weight_bytes(shape, "fp8", 2)
    head = shape.vocab_size * shape.hidden_size
    weights = of_number * (sum(map(math.prod, matrices(shape))) * shape.num_layers + head)
    values = {"weights of a step": f"{quantity(weights, 'B')}, of which {quantity(2 * head, 'B')} are the LM head"}
    for name, keys, of_key in ((FEW, "bfloat16", 2.0), (FEW, "FP8", 1.0), (MANY, "FP8", 1.0)):
        workload = WORKLOADS["cuda"][name]
        running = min(workload.num_requests, AT_ONCE)
        num_keys = running * (workload.prompt[1] + workload.output[1] // 2)
        kv_bytes = num_keys * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * of_key
        seconds = (weights + kv_bytes) / ASSUMED.bandwidth
        values[f"{name}, keys in {keys}: a step of {running}"] = (
            f"{quantity(kv_bytes, 'B')} of keys and values, {quantity(seconds, 's')}, {running / seconds:,.0f} tokens/s"
        )
        least, of_prompts = (
            least_seconds(config, ASSUMED, own.requests(shape.vocab_size), 2, weight_bytes=of_number, kv_bytes=of_key)
            for own in (workload, replace(workload, output=(1, 1)))
        )
        tokens = num_outputs(workload.requests(shape.vocab_size))
        values[f"{name}, keys in {keys}: bound"] = (
            f"{tokens / least:,.0f} tokens/s; prompts take {of_prompts / least:.0%} of the least time"
        )
    return predicted(values)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--keys", nargs="+", choices=list(STORED), default=list(STORED), help="formats of the keys")
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="measure these engines only")
    options.add_argument("--workloads", nargs="+", choices=[FEW, MANY], default=[FEW, MANY], help="and these workloads")
    options.add_argument("--rounds", type=int, default=ROUNDS, help="how often an engine serves a workload")
    options.add_argument("--checkpoints", type=Path, help="keep the random weights in this folder")
    chosen = options.parse_args(arguments)
    device = torch.device(chosen.device)
    name, config = MODELS[device.type]
    if "vllm" in chosen.engines:
        check_installed("vllm")
    EngineConfig.of(
        {key: value for key, value in read_options(YAML).items() if key != "model"}
    )  # refuses a mistake now
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = measure_machine(device, dtype)
    parameters = {"model": name, "rounds": chosen.rounds, "requests at once": AT_ONCE, **installed("vllm")}

    def save(rows: Sequence[results.Row]) -> None:
        result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
        result = results.with_recorded(result, chosen.out, section="keys")
        record(result, chosen.out)

    with checkpoint(name, config, dtype, device, chosen.checkpoints) as (folder, shape):
        engines = served(folder, chosen.keys, chosen.engines, chosen.workloads, device.type)
        serve_all(engines, shape, machine, device, chosen.rounds, {}, save)


if __name__ == "__main__":
    main()
