"""Measure what each chapter's engine gains, and the engine beside transformers, on the embedded model.

    python experiments/00_engine_so_far/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/00_engine_so_far/run.py --predict

The result goes to experiments/00_engine_so_far/results/<device>.json, below DIR where one is given.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.contiguous import ContiguousKVCache
from book.experiment import command_line, predicted, rate_row, record, seconds_in_turns
from book.static_batching import generate_steps, make_requests
from book.units import quantity
from mini_engine import LLM
from mini_engine.attention.naive import attention_mask, sdpa_attention
from mini_engine.bench.host import Row
from mini_engine.bench.peers import serve_mini_engine
from mini_engine.bench.run import compare, table
from mini_engine.bench.workloads import CPU, BenchRequest, batch_of, least_seconds, model_shape, num_outputs
from mini_engine.cli_options import EngineOptions
from mini_engine.engine import LLMEngine
from mini_engine.loading.checkpoint import open_checkpoint
from mini_engine.observe.metrics import weight_bytes_per_step
from mini_engine.parts import Parts, default_parts
from mini_engine.roofline import Machine, measure_machine

MODEL = "smollm2-135m-instruct"
PROMPT_TOKENS, MAX_TOKENS, ROUNDS = 64, 64, 3
RESERVATIONS = 8
CHAPTERS, KERNELS, PEERS = SECTIONS = ("chapters", "kernels", "peers")


def without_cache(llm: LLM, prompt: list[int]) -> list[int]:
    """Chapter 03's engine: greedy, and every token computes the whole sequence again."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec, positions = llm.model.attention_specs[layer], torch.arange(len(q), device=q.device)
        return sdpa_attention(q, k, v, scale=spec.scale, mask=attention_mask(positions, positions, spec.window))

    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(MAX_TOKENS):
            token_ids = torch.tensor(tokens, device=llm.model.device)
            hidden = llm.model(token_ids, torch.arange(len(tokens), device=llm.model.device), attend)
            tokens.append(int(llm.model.compute_logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


def chapter_rows(device: str, dtype: str) -> list[results.Row]:
    """Tokens/s and bytes per token of chapters 03 to 07, one request, in turns."""
    llm = LLM(MODEL, dtype=dtype, device=device, attn_backend="flex", enable_prefix_caching=False)
    page_size = 128 if device == "cuda" else 16
    paged = llm.with_options(num_pages=RESERVATIONS * 256 // page_size, page_size=page_size).engine
    machine = measure_machine(llm.model.device, llm.model.dtype)
    request = batch_of(1, PROMPT_TOKENS, MAX_TOKENS).requests(llm.model.config.vocab_size)
    prompt = request[0].prompt
    assert without_cache(llm, prompt) == serve_mini_engine(paged, request)[0]  # the same tokens
    runs: list[Callable[[], object]] = [
        lambda: without_cache(llm, prompt),
        lambda: serve_static(llm, request, "torch_padded", 1),
        lambda: serve_static(llm, request, "flex", 1),
        lambda: serve_paged(paged, request, continuous=True),
    ]
    seconds = seconds_in_turns(runs, ROUNDS)
    bound = MAX_TOKENS / least_seconds(llm.model.config, machine, request, llm.model.dtype.itemsize)
    weights = weight_bytes_per_step(llm.model)
    cache = ContiguousKVCache(llm.model.attention_specs, 1, 1, llm.model.dtype)
    # A decode reads the keys and values of the tokens before it: on average the prompt and half of the output.
    keys = cache.bytes_per_token * (PROMPT_TOKENS + MAX_TOKENS // 2)
    needed = "with a cache: weights, and keys and values of all tokens, over the measured rates"
    least = "what a token needs: every weight once, and with a cache the keys and values before it"
    rows = []
    # Pages cost one request nothing to schedule: chapters 06 and 07 are the same engine here.
    for chapter, own, size in (
        (3, seconds[0], weights),
        *((chapter, seconds[min(chapter - 3, 3)], weights + keys) for chapter in (4, 5, 6, 7)),
    ):
        case: dict[str, results.Setting] = {"chapter": chapter, "dtype": dtype}
        rows.append(rate_row(results.ENGINE_SPEED, MAX_TOKENS, own, bound, needed, case))
        rows.append(results.Row(results.ENGINE_BYTES, size, "B", size, least, case))
    return rows


def serve_static(llm: LLM, requests: Sequence[BenchRequest], attn_backend: str, reservations: int) -> int:
    """Serve as many requests at a time as have a reservation, in chapter 04's loop. Returns the tokens generated."""
    tokens = 0
    for first in range(0, len(requests), reservations):
        prompts, params = zip(*requests[first : first + reservations], strict=True)
        group = make_requests(prompts, params, max_model_len=llm.model.config.max_position_embeddings)
        for step in generate_steps(llm.model, group, attn_backend, Parts()):
            tokens += len(step.new_tokens)
    return tokens


def serve_paged(engine: LLMEngine, requests: Sequence[BenchRequest], *, continuous: bool) -> int:
    """Serve over pages. Not continuous: as many requests at a time as fit to their ends; none joins before all end."""
    waiting, tokens = list(requests), 0
    while waiting:
        count, pages = 0, 0
        for prompt, params in waiting:
            pages += engine.page_table.pages_for(len(prompt) + params.max_tokens)
            if pages > engine.page_table.num_pages and not continuous:
                break
            count += 1
        tokens += sum(map(len, serve_mini_engine(engine, waiting[:count])))
        waiting = waiting[count:]
    return tokens


def throughput_rows(device: str, dtype: str) -> list[results.Row]:
    """Tokens/s of chapters 04 to 07 in the memory of eight reservations, in turns."""
    llm = LLM(MODEL, dtype=dtype, device=device, attn_backend="flex", enable_prefix_caching=False)
    requests = CPU.requests(llm.model.config.vocab_size)
    page_size = 128 if device == "cuda" else 16
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
    engine = llm.with_options(num_pages=RESERVATIONS * -(-longest // page_size), page_size=page_size).engine
    runs = {
        4: lambda: serve_static(llm, requests, "torch_padded", RESERVATIONS),
        5: lambda: serve_static(llm, requests, "flex", RESERVATIONS),
        6: lambda: serve_paged(engine, requests, continuous=False),
        7: lambda: serve_paged(engine, requests, continuous=True),
    }
    expected = num_outputs(requests)
    assert all(run() == expected for run in runs.values())
    machine = measure_machine(llm.model.device, llm.model.dtype)
    bound = expected / least_seconds(llm.model.config, machine, requests, llm.model.dtype.itemsize)
    source = "all prompts at once, then a step for each token of those that still run, at the measured rates"
    seconds = seconds_in_turns(list(runs.values()), ROUNDS)
    return [
        rate_row(results.ENGINE_THROUGHPUT, expected, own, bound, source, {"chapter": chapter, "dtype": dtype})
        for chapter, own in zip(runs, seconds, strict=True)
    ]


def kernel_rows() -> list[results.Row]:
    """Tokens/s of chapters 08, 11 and 12 on a GPU in bfloat16, for one request and for many, in turns."""
    parts = default_parts(torch.device("cuda"))
    options = {"attn_backend": "flashinfer", "enable_prefix_caching": False, "persistent_decode": False}
    fused = LLM(MODEL, dtype="bfloat16", device="cuda", parts=parts, **options)
    # Another function than the default is called as it is, not replaced by the fused layer.
    one_by_one = replace(parts, decoder_layer=lambda *args: Parts().decoder_layer(*args))
    plain = LLM(MODEL, fused.given_config, parts=one_by_one)
    requests = CPU.requests(fused.model.config.vocab_size)
    longest = max(len(prompt) + params.max_tokens for prompt, params in requests)
    pages = RESERVATIONS * -(-longest // 16)
    engines = {
        8: plain.with_options(num_pages=pages, page_size=16, cuda_graph_batch_sizes=()).engine,
        11: fused.with_options(num_pages=pages, page_size=16, cuda_graph_batch_sizes=()).engine,
        12: fused.with_options(num_pages=pages, page_size=16).engine,
    }
    machine = measure_machine(fused.model.device, fused.model.dtype)
    weights, itemsize = weight_bytes_per_step(fused.model), fused.model.dtype.itemsize
    cache = ContiguousKVCache(fused.model.attention_specs, 1, 1, fused.model.dtype)
    size = weights + cache.bytes_per_token * (PROMPT_TOKENS + MAX_TOKENS // 2)
    cases: dict[int, dict[str, results.Setting]] = {n: {"chapter": n, "dtype": "bfloat16"} for n in engines}
    rows = [results.Row(results.ENGINE_BYTES, size, "B", size, "as before", case) for case in cases.values()]
    one = batch_of(1, PROMPT_TOKENS, MAX_TOKENS).requests(fused.model.config.vocab_size)
    for figure, some in ((results.ENGINE_SPEED, one), (results.ENGINE_THROUGHPUT, requests)):
        tokens = num_outputs(some)
        runs = [partial(serve_paged, engine, some, continuous=True) for engine in engines.values()]
        assert all(run() == tokens for run in runs)
        bound = tokens / least_seconds(fused.model.config, machine, some, itemsize)
        for case, own in zip(cases.values(), seconds_in_turns(runs, ROUNDS), strict=True):
            rows.append(rate_row(figure, tokens, own, bound, "as before, at the rates in bfloat16", case))
    return rows


def peer_rows(device: str) -> list[results.Row]:
    """The engine and transformers, side by side."""
    console = Console()
    workloads = [batch_of(size, PROMPT_TOKENS, MAX_TOKENS) for size in (1, 8)]
    measured: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        engine = EngineOptions(MODEL, {"dtype": dtype, "device": device})
        measured += compare(console, engine, workloads, ["transformers"], ROUNDS)
    console.print(table(MODEL, measured))
    source = "prefill and decode steps at the measured rates"
    rows = []
    for own in measured:
        case: dict[str, results.Setting] = {"dtype": own["dtype"], "batch": own["requests"]}
        rate, bound = own["tokens_per_s"], own["bound_tokens_per_s"]
        spread = own["min_tokens_per_s"], own["max_tokens_per_s"]
        rows.append(results.Row(own["engine"], rate, "tokens/s", bound, source, case, spread))
    return rows


# --- prediction -------------------------------------------------------------------------------------------------------

ASSUMED = Machine("a CPU", "float32", bandwidth=52e9, flops=215e9)  # what the prediction was made for
ASSUMED_THREADS = 2  # of the engine's matrix-vector product; transformers' runs on one


def predictions() -> str:
    """Derive what the README predicts: one request by FLOPs and bytes, many by how full the batches are."""
    checkpoint, dtype_bytes = open_checkpoint(MODEL), torch.float32.itemsize
    shape, parameters = model_shape(checkpoint.config), sum(t.numel() for t in checkpoint.tensors.headers.values())
    tokens = PROMPT_TOKENS + MAX_TOKENS // 2  # of the sequence, on average
    flops = 2 * parameters * tokens
    recomputed = flops / ASSUMED.flops
    weights = parameters * dtype_bytes
    keys = tokens * shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * dtype_bytes
    cached = (weights + keys) / ASSUMED.bandwidth

    requests = CPU.requests(shape.vocab_size)
    outputs = [params.max_tokens for _, params in requests]
    lengths = [len(prompt) + params.max_tokens for prompt, params in requests]
    steps = [max(outputs[first : first + RESERVATIONS]) for first in range(0, len(outputs), RESERVATIONS)]
    busy = sum(outputs) / (RESERVATIONS * sum(steps))
    at_once = int(RESERVATIONS * max(lengths) / statistics.mean(lengths))
    return predicted(
        {
            "chapter 03: arithmetic of a token": f"{flops / 1e9:.0f} GFLOP, {recomputed:.2f} s, "
            f"{1 / recomputed:.1f} tokens/s",
            "chapter 04: weights, keys and values": f"{quantity(weights, 'B')} and {quantity(keys, 'B', 2)}",
            "chapter 04: a token": f"{quantity(cached, 's')}, {1 / cached:.0f} tokens/s",
            f"a group of {RESERVATIONS}": f"outputs of {statistics.mean(outputs):.0f} tokens on average, "
            f"{statistics.mean(steps):.0f} steps, {1 - busy:.0%} of the batch slots idle",
            "a request": f"{statistics.mean(lengths):.0f} tokens on average, {max(lengths)} the longest",
            "pages": f"{at_once} requests at once instead of {RESERVATIONS}, {at_once / RESERVATIONS:.1f} times",
            "full batches": f"{1 / busy:.1f} times the tokens of a step",
            "pages and full batches": f"{at_once / RESERVATIONS / busy:.1f} times",
            "transformers, one request in float32": f"{ASSUMED_THREADS} threads instead of 1: {ASSUMED_THREADS} times",
        }
    )


def main() -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    arguments = options.parse_args()
    # On a Hopper GPU torch prefers cuDNN's attention, which plans every new length for tens of milliseconds: each step
    # of transformers is one. Ours does without it, and theirs is served better so.
    torch.backends.cuda.enable_cudnn_sdp(False)
    rows: list[results.Row] = []
    if CHAPTERS in arguments.only:
        rows += chapter_rows(arguments.device, "float32") + throughput_rows(arguments.device, "float32")
    if KERNELS in arguments.only and arguments.device == "cuda":
        rows += kernel_rows()
    if PEERS in arguments.only:
        rows += peer_rows(arguments.device)
    parameters: dict[str, results.Setting] = {"model": MODEL, "prompt_tokens": PROMPT_TOKENS}
    parameters |= {"max_tokens": MAX_TOKENS, "rounds": ROUNDS}
    result = results.new_result("00_engine_so_far", rows, parameters, arguments.device)
    if set(arguments.only) < set(SECTIONS):
        result = results.with_recorded(result, arguments.out)
    record(result, arguments.out, {results.ENGINE_SPEED, results.ENGINE_THROUGHPUT, "mini_engine", "transformers"})


if __name__ == "__main__":
    main()
