"""Compare the engine with vLLM and SGLang on the same requests, weights and device, in turns.

    python experiments/13_beside_other_engines/run.py [--out DIR] [--workloads NAME ...] [--peers vllm sglang]
    python experiments/13_beside_other_engines/run.py --change "what is new in the engine"
    python experiments/13_beside_other_engines/run.py --predict

The peers have to be installed in this Python environment. On a GPU the model has Qwen3-0.6B's shape and random weights
in bfloat16. They are written to a temporary checkpoint that all engines read. On a CPU a tiny model in float32 shows
that the script works. The result goes to experiments/13_beside_other_engines/results/<device>.json, below DIR where one
is given. With --change our engine's rows are added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.random_models import QWEN3_0_6B, write_checkpoint
from book.units import quantity
from mini_engine.bench.peer_process import PeerOptions, PeerProcess, check_installed
from mini_engine.bench.peers import Serve, serve_mini_engine
from mini_engine.bench.run import SHARE_OF_FREE, SPARE_CACHE, measure, pages_needed
from mini_engine.bench.workloads import NAMED, Workload, least_seconds, model_shape, num_outputs, with_other_tokens
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError
from mini_engine.llm import LLM
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, ModelShape, attention_cost, measure_machine, model_step_cost

EXPERIMENT = "13_beside_other_engines"
PEERS, ROUNDS, PAGE_SIZE, STEP_TOKENS = ("vllm", "sglang"), 3, 16, 32_768
STEPS = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
SHARED = "each shared token computed once and read once a step"


@dataclass(frozen=True)
class Setting:
    """The model and the engines' options on a CPU or a GPU.

    Attributes:
        model: the model's shape.
        dtype: dtype of weights and cache.
        options: options of our engine for each workload.
    """

    model: PretrainedConfig
    dtype: torch.dtype
    options: Mapping[str, Mapping[str, Any]]


SETTINGS = {
    "cpu": Setting(
        Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, architectures=["Qwen3ForCausalLM"],
        ),
        torch.float32,
        {"latency": {"attn_backend": "torch"}, "shared-prefix": {"attn_backend": "torch"}},
    ),
    "cuda": Setting(
        QWEN3_0_6B,
        torch.bfloat16,
        {
            "throughput": {"attn_backend": "flash_decoding"},
            "latency": {"attn_backend": "flash_decoding", "persistent_decode": True},
            "shared-prefix": {"attn_backend": "cascade"},
            "long-context": {"attn_backend": "flash_decoding"},
        },
    ),
}  # fmt: skip


def peer_options(
    folder: Path, shape: ModelConfig, dtype: torch.dtype, device: torch.device, workloads: Sequence[Workload]
) -> PeerOptions:
    """Return the options of all peers, with a KV cache that holds the largest of the workloads."""
    needed = max(pages_needed(own.requests(shape.vocab_size), PAGE_SIZE) for own in workloads)
    num_tokens = round(SPARE_CACHE * needed * PAGE_SIZE)
    unused, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (1, 1)
    return PeerOptions(
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=max(own.longest for own in workloads),
        prefix_sharing=True,
        cache_tokens=num_tokens,
        cache_bytes=num_tokens * kv_bytes_per_token(model_shape(shape), dtype),
        memory_share=SHARE_OF_FREE * unused / total,
    )


def kv_bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def check_room(cache_bytes: int, num_engines: int, free_bytes: int) -> None:
    """Check that all engines' KV caches fit into the device's memory, before minutes are spent on loading the peers.

    Args:
        cache_bytes: the cache of one engine, with room for the largest workload.
        num_engines: our engine and the peers.
        free_bytes: the device's free memory.

    Raises:
        ConfigError: if they do not fit.
    """
    if num_engines * cache_bytes > free_bytes:
        raise ConfigError(
            f"the KV caches of {num_engines} engines take {num_engines * cache_bytes / 1e9:.0f} GB, and "
            f"{free_bytes / 1e9:.0f} GB are free; compare fewer engines (--peers), or smaller workloads (--workloads)"
        )


def load_engine(folder: Path, options: Mapping[str, Any], workload: Workload, vocab_size: int) -> LLM:
    """Load our engine, with a pool that holds all requests of a workload at once."""
    config = EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=pages_needed(workload.requests(vocab_size), PAGE_SIZE) + workload.num_requests,
        max_batch_size=workload.num_requests,
        max_model_len=workload.longest,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=True,
        warm_up=True,
        **{"persistent_decode": False} | options,
    )
    return LLM(str(folder), config)


def workload_rows(
    name: str, workload: Workload, setting: Setting, folder: Path, peers: Mapping[str, Serve], machine: Machine
) -> list[results.Row]:
    """Serve one workload with our engine and the peers, in turns, and return a row for each engine."""
    options = setting.options[name]
    llm = load_engine(folder, options, workload, setting.model.vocab_size)
    shape, requests = llm.model.config, workload.requests(llm.model.config.vocab_size)
    ours = ", ".join(
        ["mini_engine", options["attn_backend"], *(["one kernel"] if "persistent_decode" in options else [])]
    )
    engines: dict[str, Serve] = {ours: partial(serve_mini_engine, llm.engine), **peers}
    for serve in engines.values():  # a whole round, in which engines load or compile kernels for the sizes of its steps
        serve(with_other_tokens(requests, ROUNDS + 1))
    measured = measure(engines, requests, ROUNDS)
    least = least_seconds(shape, machine, requests, setting.dtype.itemsize, workload.shared)
    tokens, rows = num_outputs(requests), []
    for own in measured:
        case: dict[str, results.Setting] = {"workload": name, "engine": own.engine}
        slowest, fastest = own.spread
        if workload.shared:
            rows.append(
                results.Row("time", tokens / own.rate, "s", least, SHARED, case, (tokens / fastest, tokens / slowest))
            )
        else:
            rows.append(results.Row("throughput", own.rate, "tokens/s", tokens / least, STEPS, case, own.spread))
        print(rows[-1].cells()[:5], flush=True)
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=700e12)  # a step of these workloads is memory-bound


def predictions() -> str:
    """Derive the README's predictions for a step; how far the engines differ is an expectation."""
    setting, named = SETTINGS["cuda"], {name: devices["cuda"] for name, devices in NAMED.items()}
    shape, size = model_shape(ModelConfig.from_hf(setting.model.to_dict())), setting.dtype.itemsize
    weights = model_step_cost(shape, 1, 1, size).bytes  # the activations of one token add next to nothing

    def kv_bytes(workload: Workload) -> int:
        """Keys and values that the first decode step reads."""
        num_keys = sum(len(prompt) + 1 for prompt, _ in workload.requests(shape.vocab_size))
        return num_keys * kv_bytes_per_token(shape, setting.dtype)

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
    options.add_argument("--workloads", nargs="+", choices=list(NAMED), help="serve these workloads only")
    options.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="engines to compare ours with")
    options.add_argument("--change", help="add our engine's rows to the ledger: what is new, in a few words")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    for peer in chosen.peers:
        check_installed(peer)
    names = [name for name in setting.options if not chosen.workloads or name in chosen.workloads]
    workloads = {name: NAMED[name][device.type] for name in names}
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as processes:
        folder = Path(temporary)
        shape = write_checkpoint(setting.model, setting.dtype, device, folder)
        free()
        given = peer_options(folder, shape, setting.dtype, device, list(workloads.values()))
        if device.type == "cuda":
            check_room(given.cache_bytes, 1 + len(chosen.peers), torch.cuda.mem_get_info(device)[0])
        peers = {name: processes.enter_context(closing(PeerProcess(name, given))) for name in chosen.peers}
        for name, workload in workloads.items():
            rows += workload_rows(name, workload, setting, folder, peers, machine)
            free()
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "a tiny model",
        "dtype": machine.dtype, "page size of mini_engine": PAGE_SIZE, "rounds": ROUNDS,
        **{name: metadata.version(name) for name in chosen.peers},
    }  # fmt: skip
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if chosen.workloads:
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out, {row.figure for row in result.rows})
    if chosen.change:
        for row in rows:
            if str(row.case["engine"]).startswith("mini_engine"):
                ledger.add(result, row, chosen.change, chosen.out)


def free() -> None:
    """Return the GPU memory of engines and models that are no longer used."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
