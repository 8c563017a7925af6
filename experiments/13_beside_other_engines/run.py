"""Serve the same requests with our engine, vLLM and SGLang, each without options, on the same weights and device.

    python experiments/13_beside_other_engines/run.py [--out DIR] [--models NAME ...] [--workloads NAME ...]
    python experiments/13_beside_other_engines/run.py --engines mini_engine --change "what is new in the engine"
    python experiments/13_beside_other_engines/run.py --predict

The peers have to be installed in this Python environment. The models have published shapes and random weights in
bfloat16, written to a temporary checkpoint that all engines read. Each engine runs in a process of its own and has the
device to itself. On a CPU a tiny model in float32 shows that the script works. The result goes to
experiments/13_beside_other_engines/results/<device>.json, below DIR where one is given. What is not measured again
keeps its rows, so models can be measured one at a time. With --change our engine's rows are added to the ledger,
docs/ledger.json, too.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from importlib import metadata
from pathlib import Path

import torch
from transformers import PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import GEMMA2_2B, LLAMA_3_1_8B, LLAMA_3_2_1B, QWEN3_0_6B, write_checkpoint
from book.units import quantity
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.workloads import NAMED, Workload, least_seconds, model_shape, num_outputs, with_other_tokens
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, ModelShape, attention_cost, measure_machine, model_step_cost

EXPERIMENT = "13_beside_other_engines"
ENGINES, ROUNDS = ("mini_engine", "vllm", "sglang"), 2
# Ours has no other limit by default on a GPU. The peers' own limits differ.
AT_ONCE = 256
STEPS = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
SHARED = "each shared token computed once and read once a step"
MODELS: dict[str, PretrainedConfig] = {
    "Qwen3-0.6B": QWEN3_0_6B, "Llama-3.2-1B": LLAMA_3_2_1B, "Llama-3.1-8B": LLAMA_3_1_8B, "Gemma-2-2B": GEMMA2_2B,
    "tiny": Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
    ),
}  # fmt: skip
BY_DEFAULT = {"cuda": [name for name in MODELS if name != "tiny"], "cpu": ["tiny"]}


def engine_rows(
    model: str, engine: str, folder: Path, shape: ModelConfig, workloads: Mapping[str, Workload], machine: Machine
) -> list[results.Row]:
    """Start an engine without options, let it serve all workloads, and return a row for each, and one for its start."""
    options = PeerOptions(str(folder), max_num_seqs=None if engine == "mini_engine" else AT_ONCE)
    rows, itemsize = [], getattr(torch, machine.dtype).itemsize
    with closing(PeerProcess(engine, options)) as serve:
        case: dict[str, results.Setting] = {"model": model, "engine": engine}
        why = "what an engine does to get ready depends on its design"
        rows.append(results.Row("start until ready", serve.ready_seconds, "s", None, why, case))
        for index, (name, workload) in enumerate(workloads.items()):
            requests, seconds = workload.requests(shape.vocab_size), []
            for number in range(ROUNDS):
                outputs = serve(with_other_tokens(requests, 1 + index * ROUNDS + number))
                assert list(map(len, outputs)) == [request.num_outputs for request in requests]
                seconds.append(serve.seconds)
            least = least_seconds(shape, machine, requests, itemsize, workload.shared)
            case = {"model": model, "workload": name, "engine": engine}
            tokens, best, worst = num_outputs(requests), min(seconds), max(seconds)
            if workload.shared:
                rows.append(results.Row("time", best, "s", least, SHARED, case, (best, worst)))
            else:
                rates = tokens / worst, tokens / best
                rows.append(results.Row("throughput", rates[1], "tokens/s", tokens / least, STEPS, case, rates))
            print(rows[-1].cells()[:5], f"first round {tokens / seconds[0]:,.0f} tokens/s", flush=True)
    return rows


def installed_peers() -> dict[str, str]:
    """Versions of the peers, also of those whose rows were recorded before and are kept."""
    found = {}
    for name in ENGINES[1:]:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# --- prediction ------------------------------------------------------------------------------------------------------

ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)  # a step of these workloads is memory-bound


def kv_bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def predictions() -> str:
    """Derive the README's predictions for a step; how far the engines differ is an expectation."""
    named = {name: devices["cuda"] for name, devices in NAMED.items()}
    shape, dtype = model_shape(ModelConfig.from_hf(QWEN3_0_6B.to_dict())), torch.bfloat16
    size = dtype.itemsize
    weights = model_step_cost(shape, 1, 1, size).bytes  # the activations of one token add next to nothing

    def kv_bytes(workload: Workload) -> int:
        """Keys and values that the first decode step reads."""
        num_keys = sum(len(prompt) + 1 for prompt, _ in workload.requests(shape.vocab_size))
        return num_keys * kv_bytes_per_token(shape, dtype)

    mixed, long_context = kv_bytes(named["throughput"]), kv_bytes(named["long-context"])
    shared = named["shared-prefix"]
    own_keys = shared.prompt[1] + shared.output[1] // 2  # in the middle of the output
    for_each = model_step_cost(shape, 1, shared.shared + own_keys, size, shared.num_requests)
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    prefix_once = attention_cost(shared.num_requests, shared.shared, *heads, size, causal=False) * shape.num_layers
    for_all = model_step_cost(shape, 1, own_keys, size, shared.num_requests) + prefix_once
    return predicted(
        {
            f"throughput: a step of {named['throughput'].num_requests} requests": (
                f"{quantity((mixed + weights) / ASSUMED.bandwidth, 's')}, "
                f"{mixed / (mixed + weights):.0%} of the bytes are keys and values"
            ),
            "shared-prefix: keys of a request": f"{shared.shared:,} of {shared.shared + own_keys:,} in the prefix",
            "shared-prefix: the least time of a step with the prefix read once": (
                f"{for_all.seconds(ASSUMED) / for_each.seconds(ASSUMED):.2f} of that with a read for each request"
            ),
            "long-context: a step": (
                f"{quantity(long_context, 'B')} of keys and values, {quantity(weights, 'B')} of weights"
            ),
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--models", nargs="+", choices=list(MODELS), help="measure these models only")
    options.add_argument("--workloads", nargs="+", choices=list(NAMED), default=list(NAMED), help="and these workloads")
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="and these engines")
    options.add_argument("--change", help="add our engine's rows to the ledger: what is new, in a few words")
    chosen = options.parse_args(arguments)
    device = torch.device(chosen.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for engine in chosen.engines:
        check_installed(engine)
    machine = measure_machine(device, dtype)
    parameters = {"dtype": machine.dtype, "rounds": ROUNDS, "requests at once": AT_ONCE, **installed_peers()}
    for model in chosen.models or BY_DEFAULT[device.type]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            shape = write_checkpoint(MODELS[model], dtype, device, folder)
            gc.collect()
            torch.cuda.empty_cache()
            workloads = {
                name: own
                for name in chosen.workloads
                if (own := NAMED[name][device.type]).longest <= shape.max_position_embeddings
            }
            for engine in chosen.engines:
                rows = engine_rows(model, engine, folder, shape, workloads, machine)
                # Written after each engine, so that nothing is lost if a later one fails.
                result = results.with_recorded(
                    results.new_result(EXPERIMENT, rows, parameters, chosen.device), chosen.out, section="model"
                )
                record(result, chosen.out)
                if chosen.change and engine == "mini_engine":
                    for row in rows:
                        ledger.add(result, row, chosen.change, chosen.out)


if __name__ == "__main__":
    main()
