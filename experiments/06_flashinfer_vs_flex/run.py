"""FlashInfer, FlexAttention and PyTorch's SDPA over the same keys: decode, prefill, and the engine's four workloads.

    python experiments/06_flashinfer_vs_flex/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/06_flashinfer_vs_flex/run.py --change "what is new in the engine"
    python experiments/06_flashinfer_vs_flex/run.py --predict

On a GPU the heads and the model are Qwen3-0.6B's in bfloat16 with random weights. On a CPU a small case in float32
compares `flex` with the CPU's own backends, to show that the script works. The result goes to
experiments/06_flashinfer_vs_flex/results/<device>.json, below DIR where one is given. With --change the workloads'
rows are added to the ledger, docs/ledger.json, too.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import ledger, results
from book.experiment import command_line, predicted, record
from book.paths import repository_root
from book.random_models import QWEN3_0_6B, random_model
from book.values import without_sources
from mini_engine.attention.backend import AttentionBackend, create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.bench.run import pages_needed
from mini_engine.bench.workloads import (
    GPU,
    LATENCY,
    LONG_CONTEXT,
    SHARED_PREFIX,
    BenchRequest,
    Workload,
    least_seconds,
    num_outputs,
)
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts, default_parts
from mini_engine.roofline import Cost, Machine, attention_cost, measure_machine
from mini_engine.sampling_params import SamplingParams

EXPERIMENT = "06_flashinfer_vs_flex"
SECTIONS = DECODE, PREFILL, BALANCE, ENGINE, AGREEMENT = "decode", "prefill", "balance", "engine", "agreement"
# Keys of the twelve decodes with which chapter 08 begins, 16 times as long: enough bytes to hide the launch.
RAGGED = tuple(16 * n for n in (443, 279, 519, 293, 160, 372, 945, 662, 139, 146, 470, 389))
STEPS = "all prompts at once, then a step for each token of those that still run, at the machine's rates"
READ = "the keys and values of all requests, read once at the measured bandwidth"
COMPUTE = "the products of all visible pairs at the measured rate"


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        dtype: of everything.
        heads: query heads, KV heads, size of a head.
        decodes: (requests, keys of each).
        prefills: (requests, tokens of each).
        backends: of ours, for the kernels and the engine.
        repetitions: of each figure; backends take turns.
        most_bytes: of the keys and values of all layers of one case: enough to leave the L2 cache, not all memory.
    """

    dtype: torch.dtype
    heads: tuple[int, int, int]
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    backends: tuple[str, ...]
    repetitions: int
    most_bytes: float


SETTINGS = {
    "cpu": Setting(torch.float32, (9, 3, 64), ((1, 512), (8, 512)), ((1, 256),), ("flex", "torch_padded"), 3, 1e8),
    "cuda": Setting(
        torch.bfloat16,
        (16, 8, 128),
        ((1, 512), (1, 8192), (1, 65_536), (16, 1024), (64, 1024), (64, 8192), (256, 1024), (256, 4096)),
        ((1, 512), (1, 2048), (1, 8192), (4, 4096)),
        ("flex", "flashinfer"),
        5,
        4e9,
    ),
}
WORKLOADS = {"throughput": GPU, "latency": LATENCY, "shared-prefix": SHARED_PREFIX, "long-context": LONG_CONTEXT}
ENGINES = ("flex", "flashinfer", "cascade")
TEXT_MODEL, REFERENCE, NUM_TEXTS, NUM_TOKENS = "smollm2-135m-instruct", "torch", 32, 64
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Attention of one layer: `requests` with `keys` each, `queries` of which are new."""

    requests: int
    keys: int
    queries: int

    def cost(self, heads: tuple[int, int, int], dtype: torch.dtype) -> Cost:
        return attention_cost(self.queries, self.keys, *heads, dtype.itemsize) * self.requests


def layers_of(case: Case, setting: Setting) -> int:
    """As many layers as fill `most_bytes`, 28 at most: each reads keys that no cache holds any more."""
    _, kv_heads, head_dim = setting.heads
    layer_bytes = 2 * case.requests * case.keys * kv_heads * head_dim * setting.dtype.itemsize
    return max(2, min(28, int(setting.most_bytes // layer_bytes)))


def backend_runs(case: Case, setting: Setting, device: torch.device, page_size: int) -> Iterator[tuple[str, Run]]:
    """For each backend of ours a function that attends in every layer once; pages are in random order."""
    q_heads, kv_heads, head_dim = setting.heads
    num_layers = layers_of(case, setting)
    specs = [AttentionSpec(i, q_heads, kv_heads, head_dim, head_dim**-0.5) for i in range(num_layers)]
    pages_each = -(-case.keys // page_size)
    cache = PagedKVCache(specs, case.requests * pages_each, page_size, setting.dtype, device)
    for pair in cache.layers:
        for tensor in pair:
            tensor.normal_()
    batch = StepBatch.build(
        token_ids=np.zeros(case.requests * case.queries, dtype=np.int64),
        num_new=[case.queries] * case.requests,
        kv_lens=[case.keys] * case.requests,
        pages=np.random.default_rng(0).permutation(case.requests * pages_each),
        page_size=page_size,
        device=device,
    )
    q = torch.randn(batch.num_tokens, q_heads, head_dim, device=device).to(setting.dtype)
    for name in setting.backends:
        backend = create_backend(name, specs, cache, Parts())
        backend.plan(batch)
        yield name, run_layers(backend, q, num_layers)


def run_layers(backend: AttentionBackend, q: Tensor, num_layers: int) -> Run:
    def run() -> None:
        for layer in range(num_layers):
            backend.run(layer, q)

    return run


def wrapper_run(
    kv_lens: Sequence[int],
    queries: int,
    num_layers: int,
    setting: Setting,
    device: torch.device,
    algorithm: str,
    layout: str = "NHD",
    split: bool = True,
) -> Run:
    """FlashInfer's prefill over pages of 16 tokens, for decodes and prompts.

    Args:
        kv_lens: keys of each request.
        queries: how many of them are new, the same number for all requests.
        num_layers: layers, with a cache each.
        setting: dtype and heads.
        device: a GPU.
        algorithm: "fa2" or "fa3".
        layout: of the pages, "NHD" or "HND".
        split: whether the plan may split the keys of a request over several thread blocks.
    """
    import flashinfer

    q_heads, kv_heads, head_dim = setting.heads
    page_size, lens = 16, torch.tensor(kv_lens, dtype=torch.int32)
    indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32)
    indptr[1:] = (-(-lens // page_size)).cumsum(0)
    num_pages = int(indptr[-1])
    page = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    shape = (num_pages, *page, head_dim)
    caches = [[torch.randn(shape, device=device, dtype=setting.dtype) for _ in range(2)] for _ in range(num_layers)]
    q = torch.randn(len(kv_lens) * queries, q_heads, head_dim, device=device).to(setting.dtype)
    workspace = torch.empty(2**28, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=algorithm)
    wrapper.plan(
        torch.arange(len(kv_lens) + 1, dtype=torch.int32) * queries,
        indptr,
        torch.randperm(num_pages, device=device).int(),
        (lens - 1) % page_size + 1,
        q_heads, kv_heads, head_dim, page_size, causal=True, q_data_type=setting.dtype, kv_data_type=setting.dtype,
        disable_split_kv=not split,
    )  # fmt: skip

    def run() -> None:
        for k, v in caches:
            wrapper.run(q, (k, v))

    return run


def sdpa_run(case: Case, setting: Setting, device: torch.device) -> Run:
    """PyTorch's SDPA over contiguous keys of equal length: what no paged cache gives it for free."""
    q_heads, kv_heads, head_dim = setting.heads
    shape = (case.requests, kv_heads, case.keys, head_dim)
    caches = [
        [torch.randn(shape, device=device, dtype=setting.dtype) for _ in range(2)]
        for _ in range(layers_of(case, setting))
    ]
    q = torch.randn(case.requests, q_heads, case.queries, head_dim, device=device).to(setting.dtype)

    def run() -> None:
        for k, v in caches:
            F.scaled_dot_product_attention(q, k, v, is_causal=case.queries > 1, enable_gqa=True)

    return run


def seconds(run: Run, device: torch.device) -> float:
    """Seconds of one call, on a GPU by its own clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(run: Run, device: torch.device) -> Run:
    """Capture the calls in a CUDA graph and return its replay, so that launches from Python take no time.

    On a CPU the function itself is returned.
    """
    for _ in range(3):
        run()  # compiles
    if device.type == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def kernel_rows(section: str, cases: Sequence[Case], setting: Setting, machine: Machine) -> list[results.Row]:
    """Bytes or FLOPs per second of every way, in turns, beside the machine's rate."""
    device = torch.device("cuda" if machine.name.startswith("NVIDIA") else "cpu")
    page_size = 128 if device.type == "cuda" else 16
    rows = []
    for case in cases:
        ways = dict(backend_runs(case, setting, device, page_size))
        if device.type == "cuda":
            num_layers, lens = layers_of(case, setting), [case.keys] * case.requests
            for name in ("fa2", "fa3"):
                ways[f"{name} by hand"] = wrapper_run(lens, case.queries, num_layers, setting, device, name)
        ways["sdpa"] = sdpa_run(case, setting, device)
        times = layer_seconds(ways, layers_of(case, setting), setting, device)
        cost = case.cost(setting.heads, setting.dtype)
        amount, unit = (cost.bytes, "B/s") if section == DECODE else (cost.flops, "FLOP/s")
        bound, source = (machine.bandwidth, READ) if section == DECODE else (machine.flops, COMPUTE)
        for name, own in times.items():
            rates = [amount / one for one in own]
            rows.append(
                results.Row(
                    f"{section}: rate", statistics.median(rates), unit, bound, source,
                    {"way": name, "requests": case.requests, "keys": case.keys}, (min(rates), max(rates)),
                )
            )  # fmt: skip
            print(rows[-1].cells()[:5], flush=True)
        del ways
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def layer_seconds(
    ways: Mapping[str, Run], num_layers: int, setting: Setting, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of a layer for each way and repetition; the ways take turns."""
    replays = {name: captured(run, device) for name, run in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(setting.repetitions):
        for name, replay in replays.items():
            times[name].append(seconds(replay, device) / num_layers)
    return times


def balance_rows(setting: Setting, machine: Machine) -> list[results.Row]:
    """Bytes per second of decodes of unequal lengths: planned in both layouts, and with a thread block each."""
    device, num_layers = torch.device("cuda"), 12
    ways = {
        "planned, NHD": wrapper_run(RAGGED, 1, num_layers, setting, device, "fa2"),
        "planned, HND": wrapper_run(RAGGED, 1, num_layers, setting, device, "fa2", layout="HND"),
        "one block per request, NHD": wrapper_run(RAGGED, 1, num_layers, setting, device, "fa2", split=False),
    }
    _, kv_heads, head_dim = setting.heads
    num_bytes = 2 * sum(RAGGED) * kv_heads * head_dim * setting.dtype.itemsize
    rows = []
    for name, own in layer_seconds(ways, num_layers, setting, device).items():
        rates = [num_bytes / one for one in own]
        rows.append(
            results.Row(
                "balance: rate", statistics.median(rates), "B/s", machine.bandwidth, READ, {"way": name},
                (min(rates), max(rates)),
            )
        )  # fmt: skip
        print(rows[-1].cells()[:5], flush=True)
    return rows


@dataclass(frozen=True)
class Served:
    """How an engine served a workload once: seconds in all, of the steps that only decode, and their KV bytes."""

    seconds: float
    decode_seconds: float
    kv_bytes: float


def serve(engine: LLMEngine, workload: Workload, vocab_size: int) -> Served:
    """Serve a workload with an empty prefix cache, timing its steady decode too."""
    engine.reset_prefix_cache()
    for index, (prompt, params) in enumerate(workload.requests(vocab_size)):
        engine.add_request(str(index), prompt, params)
    begin = start = time.perf_counter()
    decode_seconds = kv_bytes = 0.0
    while engine.has_unfinished:
        report = engine.step()
        now = time.perf_counter()
        if report.is_decode:
            decode_seconds, kv_bytes = decode_seconds + now - start, kv_bytes + report.kv_bytes
        start = now
    return Served(start - begin, decode_seconds, kv_bytes)


def make_engine(model: CausalLM, backend: str, workload: Workload, prefix_sharing: bool) -> LLMEngine:
    """An engine whose pool holds all requests at once."""
    page_size = 128 if backend == "flex" else 16
    config = EngineConfig(
        attn_backend=backend,
        num_pages=pages_needed(workload.requests(model.config.vocab_size), page_size) + workload.num_requests,
        page_size=page_size,
        max_batch_size=workload.num_requests,
        max_model_len=workload.longest,
        max_num_batched_tokens=8192,
        enable_prefix_caching=prefix_sharing,
        persistent_decode=False,
    )
    return LLMEngine(model, config, parts=model.parts)


def engine_rows(
    model: CausalLM,
    setting: Setting,
    machine: Machine,
    workloads: Sequence[str],
    backends: Sequence[str],
    repetitions: int = 3,
) -> list[results.Row]:
    """Every workload with every backend, in turns, beside the bound; the first run of each is a warm-up."""
    rows = []
    for name in workloads:
        workload = WORKLOADS[name]
        requests = workload.requests(model.config.vocab_size)
        tokens = sum(request.params.max_tokens for request in requests)
        engines = {way: make_engine(model, way, workload, bool(workload.shared)) for way in backends}
        served: dict[str, list[Served]] = {way: [] for way in engines}
        for _ in range(repetitions + 1):
            for way, engine in engines.items():
                served[way].append(serve(engine, workload, model.config.vocab_size))
        least = least_seconds(model.config, machine, requests, setting.dtype.itemsize, workload.shared)
        for way, runs in served.items():
            case: dict[str, results.Setting] = {"workload": name, "engine": f"mini_engine, {way}"}
            own = [run.seconds for run in runs[1:]]
            if workload.shared:
                source = "each shared token computed once and read once a step"
                rows.append(results.Row("time", statistics.median(own), "s", least, source, case, (min(own), max(own))))
            else:
                rates = [tokens / one for one in own]
                source = (
                    "all prompts at once, then a step for each token of those that still run, at the machine's rates"
                )
                rows.append(
                    results.Row(
                        "throughput", statistics.median(rates), "tokens/s", tokens / least, source, case,
                        (min(rates), max(rates)),
                    )
                )  # fmt: skip
            print(rows[-1].cells()[:5], flush=True)
            if workload is LONG_CONTEXT:
                rows.append(bandwidth_row(runs[1:], machine, case))
                print(rows[-1].cells()[:5], flush=True)
        del engines
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def bandwidth_row(runs: Sequence[Served], machine: Machine, case: Mapping[str, results.Setting]) -> results.Row:
    """The bytes of keys and values that decodes read per second."""
    rates = [run.kv_bytes / run.decode_seconds for run in runs]
    source = "the measured bandwidth; weights and host time count against it"
    return results.Row(
        "decode: KV bandwidth",
        statistics.median(rates),
        "B/s",
        machine.bandwidth,
        source,
        case,
        (min(rates), max(rates)),
    )


def paragraphs(count: int) -> list[str]:
    """Paragraphs of the chapters, from the first to the last."""
    chapters = sorted((repository_root() / "chapters").glob("*/[0-9]*.md"))
    texts = [without_sources(file.read_text(encoding="utf-8")) for file in chapters]
    prose = [piece for text in texts for piece in text.split("```")[::2]]
    found = [own for piece in prose for own in piece.split("\n\n") if len(own) > 300 and own[0].isalpha()]
    return found[:: len(found) // count][:count]


def agreement_rows(
    model: CausalLM, prompts: Sequence[Sequence[int]], backends: Sequence[str], num_tokens: int
) -> list[results.Row]:
    """Greedy outputs of each backend, all requests at once, beside those of the simplest one."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    longest = max(map(len, prompts)) + num_tokens
    outputs = {}
    for backend in (REFERENCE, *backends):
        page_size = 128 if backend == "flex" else 16
        config = EngineConfig(
            attn_backend=backend, page_size=page_size, num_pages=len(prompts) * -(-longest // page_size) + len(prompts),
            max_batch_size=len(prompts), max_model_len=longest, enable_prefix_caching=False, persistent_decode=False,
        )  # fmt: skip
        engine = LLMEngine(model, config, parts=model.parts)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.has_unfinished:
            report = engine.step()
            for request, token in zip(report.sampled_by, report.token_ids.tolist(), strict=True):
                tokens[int(request.request_id)].append(token)
        outputs[backend] = tokens
    rows, why = [], f"none: the reference is `{REFERENCE}`, which rounds in another order"
    for backend in backends:
        pairs = list(zip(outputs[backend], outputs[REFERENCE], strict=True))
        equal = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), num_tokens) for pair in pairs]
        case: dict[str, results.Setting] = {"engine": f"mini_engine, {backend}"}
        first = statistics.mean(equal) / num_tokens
        rows += [
            results.Row("greedy tokens before the first difference", first, "of all", None, why, case),
            results.Row("equal greedy outputs", equal.count(num_tokens) / len(equal), "of all", None, why, case),
        ]
        print(*(row.cells()[:3] for row in rows[-2:]), flush=True)
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

# Assumptions of the README.
RIDGE = 180  # FLOPs per byte of an H200
ASSUMED = Machine("an H200", "bfloat16", bandwidth=4.33e12, flops=RIDGE * 4.33e12)
KERNELS_OF_A_LAYER, LAUNCH = 14, 20e-6  # and seconds of a launch from Python
STEP_TOKENS = 2048  # most tokens of a step in `throughput`, when the prediction was made


def num_steps(requests: Sequence[BenchRequest], step_tokens: int) -> int:
    """Count the steps that requests take if all of them fit: decodes first, then prompts in order, in chunks."""
    prompts, outputs = [len(prompt) for prompt, _ in requests], [params.max_tokens for _, params in requests]
    steps = 0
    while any(outputs):
        decoding = [i for i, left in enumerate(outputs) if left and not prompts[i]]
        room = step_tokens - len(decoding)
        for i in decoding:
            outputs[i] -= 1
        for i, left in enumerate(prompts):
            chunk = min(left, room)
            prompts[i], room = left - chunk, room - chunk
            outputs[i] -= 0 < chunk == left  # the end of a prompt gives the first token
        steps += 1
    return steps


def predictions() -> str:
    """Derive the README's predictions for the H200."""
    setting, config = SETTINGS["cuda"], ModelConfig.from_hf(QWEN3_0_6B.to_dict())
    q_heads, _, head_dim = setting.heads

    def cost(num_keys: int, queries: int) -> Cost:
        return Case(1, num_keys, queries).cost(setting.heads, setting.dtype)

    shortest = min(num_keys for _, num_keys in setting.decodes)
    num_bytes = cost(shortest, 1).bytes
    compute_bound = next(n for n in count(1) if not cost(n, n).is_memory_bound(ASSUMED))
    longest = max(n for _, n in setting.prefills)
    factor = cost(longest, longest).flops / (q_heads * longest**2 * head_dim)
    requests = GPU.requests(config.vocab_size)
    tokens, steps = num_outputs(requests), num_steps(requests, STEP_TOKENS)
    device = least_seconds(config, ASSUMED, requests, setting.dtype.itemsize) / steps
    # Some kernels are launched outside of the layers.
    launches = round(KERNELS_OF_A_LAYER * config.num_hidden_layers, -2)
    host = launches * LAUNCH
    total = steps * max(host, device)
    return predicted(
        {
            "decode": f"{cost(longest, 1).intensity:.1f} FLOP per byte, the ridge is at {ASSUMED.ridge:.0f}",
            f"decode of one request of {shortest} keys": f"{num_bytes / 1e6:.0f} MB, "
            f"{1e6 * num_bytes / ASSUMED.bandwidth:.1f} µs",
            "prefill": f"{factor:.1f} n² D FLOPs per query head, "
            f"compute-bound from about {round(compute_bound, -1)} tokens on",
            "`throughput`": f"{steps:,} steps for {tokens:,} tokens",
            "`throughput`, a step": f"{1e3 * device:.0f} ms on the device, "
            f"about {launches} launches in {1e3 * host:.0f} ms",
            "`throughput`, the run": f"{total:.0f} s, about {round(tokens / total, -3):,.0f} tokens/s",
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    options.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="backends of the workloads")
    options.add_argument("--change", help="add the workloads to the engine's ledger: what is new, in a few words")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans every new length for tens of milliseconds
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    if DECODE in chosen.only:
        rows += kernel_rows(DECODE, [Case(b, n, 1) for b, n in setting.decodes], setting, machine)
    if PREFILL in chosen.only:
        rows += kernel_rows(PREFILL, [Case(b, n, n) for b, n in setting.prefills], setting, machine)
    if BALANCE in chosen.only and device.type == "cuda":
        rows += balance_rows(setting, machine)
    if ENGINE in chosen.only and device.type == "cuda":
        model = random_model(QWEN3_0_6B, setting.dtype, device)
        rows += engine_rows(model, setting, machine, chosen.workloads, chosen.engines)
    if AGREEMENT in chosen.only and device.type == "cuda":
        checkpoint = open_checkpoint(TEXT_MODEL)
        encode = load_tokenizer(checkpoint).encode
        model = load_model(checkpoint, default_parts(device), setting.dtype, device)
        rows += agreement_rows(model, [encode(text) for text in paragraphs(NUM_TEXTS)], ENGINES, NUM_TOKENS)
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape" if device.type == "cuda" else "SmolLM2-135M's heads",
        "dtype": machine.dtype,
        "repetitions of a kernel": setting.repetitions,
        "repetitions of a workload": 3,
    }
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(chosen.only) < set(SECTIONS):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)
    if chosen.change:
        for row in rows:
            if "workload" in row.case and row.figure != "decode: KV bandwidth":
                ledger.add(result, row, chosen.change, chosen.out)


if __name__ == "__main__":
    main()
