"""Measure multi-head latent attention: bytes of a token, decodes, both forms of prompts, and DeepSeek-V2-Lite.

    python experiments/19_mla/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/19_mla/run.py --predict

On a GPU the sizes are DeepSeek-V2-Lite's, with random weights in bfloat16, which are made on the device. On a CPU small
cases in float32 show that the script works. The result goes to experiments/19_mla/results/<device>.json, below DIR
where one is given. Sections that are not measured again keep their rows.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, record
from book.grading.chapter import load_module
from book.random_models import DEEPSEEK_V2_LITE, random_model
from book.units import quantity
from mini_engine.attention.backend import create_backend
from mini_engine.attention.mla import UpProjections, absorbed_attention, unabsorbed_attention
from mini_engine.attention.mla_paged import FlashInferMLABackend
from mini_engine.attention.naive import sdpa_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.bench.run import pages_needed
from mini_engine.bench.workloads import Workload, num_outputs
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import attention_spec
from mini_engine.parts import Parts
from mini_engine.roofline import Cost, Machine, linear_cost, measure_machine, visible_pairs

kernels = load_module("experiment_06", Path(__file__).resolve().parents[1] / "06_flashinfer_vs_flex" / "run.py")

EXPERIMENT = "19_mla"
SECTIONS = BYTES, DECODE, PROMPTS, ENGINE = "bytes", "decode", "prompts", "engine"
PAGE_SIZE = 64
COUNT = "a count: numbers of a token in all layers, times their bytes"
READ = "the latents and rotated keys of all requests, read once at the measured bandwidth, with queries and output"
COMPUTE = "the FLOPs of this form at the measured rate"
STEP = "the weights that a step's tokens touch, and the mean number of keys, read at the measured bandwidth"
TINY = DeepseekV2Config(
    vocab_size=512, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=2,
    num_experts_per_tok=2, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    max_position_embeddings=4096, architectures=["DeepseekV2ForCausalLM"],
)  # fmt: skip
Run = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        config: the model.
        dtype: of weights, queries and cache.
        requests: numbers of requests of a decode step.
        keys: of each of them.
        prompts: lengths.
        most_bytes: of the latents of all layers of a case: enough to leave the L2 cache, not all memory.
        backends: of the engine.
        workloads: of the engine.
        repetitions: of each figure; the ways take turns.
    """

    config: DeepseekV2Config
    dtype: torch.dtype
    requests: tuple[int, ...]
    keys: int
    prompts: tuple[int, ...]
    most_bytes: float
    backends: tuple[str, ...]
    workloads: dict[str, Workload]
    repetitions: int

    @property
    def spec(self) -> AttentionSpec:
        """The first layer's attention."""
        config = ModelConfig.from_hf(self.config.to_dict())
        return attention_spec(config, 0, config.head_dim**-0.5)


SETTINGS = {
    "cpu": Setting(
        TINY, torch.float32, (1, 3), 200, (64,), 1e5, ("torch_padded",), {"3 requests": Workload(3, (8, 16), (4, 8))}, 3
    ),
    "cuda": Setting(
        DEEPSEEK_V2_LITE, torch.bfloat16, (1, 8, 64), 8192, (1024, 4096), 2e9, ("flashinfer_mla", "triton_mla"),
        {"1 request": Workload(1, (128, 128), (256, 256)), "64 requests": Workload(64, (1024, 1024), (256, 256))}, 5,
    ),
}  # fmt: skip


def row(
    figure: str, values: Sequence[float], unit: str, bound: float | None, source: str, case: dict[str, results.Setting]
) -> results.Row:
    """The median of several repetitions, printed."""
    spread = (min(values), max(values)) if len(values) > 1 else None
    made = results.Row(figure, statistics.median(values), unit, bound, source, case, spread)
    print(made.cells()[:5], flush=True)
    return made


def timed(ways: dict[str, Run], repetitions: int, device: torch.device) -> dict[str, list[float]]:
    """Times of each way, in turns; on a GPU of the replay of a CUDA graph."""
    replays = {way: kernels.captured(run, device) for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repetitions):
        for way, replay in replays.items():
            times[way].append(kernels.seconds(replay, device))
    return times


def free() -> None:
    """Return the memory of the last case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- (a) bytes -------------------------------------------------------------------------------------------------------


def caches_of(setting: Setting) -> dict[str, int]:
    """Numbers that a token stores in a layer: latents, and keys and values of heads of the same sizes."""
    spec = setting.spec
    assert spec.mla is not None
    head = spec.head_dim + spec.mla.v_head_dim
    return {
        "MLA": spec.entry_size,
        "a key and a value for each head (MHA)": spec.num_qo_heads * head,
        "a key and a value for each 4 heads (GQA)": spec.num_qo_heads // 4 * head,
    }


def byte_rows(setting: Setting) -> list[results.Row]:
    """Bytes of a token in the cache."""
    scale = setting.config.num_hidden_layers * setting.dtype.itemsize
    return [
        row("bytes of a token", [size * scale], "B", None, COUNT, {"cache": name})
        for name, size in caches_of(setting).items()
    ]


# --- (b) decode attention --------------------------------------------------------------------------------------------


def decode_bytes(setting: Setting, requests: int) -> int:
    """Bytes that one layer of a decode step must move."""
    spec = setting.spec
    assert spec.mla is not None
    of_queries = requests * spec.num_qo_heads * (spec.entry_size + spec.mla.kv_lora_rank)
    return (requests * setting.keys * spec.entry_size + of_queries) * setting.dtype.itemsize


def decode_ways(setting: Setting, requests: int, num_layers: int, device: torch.device) -> Iterator[tuple[str, Run]]:
    """Each way to attend to the latents of all layers, over the same caches and pages in random order."""
    spec, counts = setting.spec, -(-setting.keys // PAGE_SIZE)
    assert spec.mla is not None
    rank, scale = spec.mla.kv_lora_rank, spec.scale
    specs = [replace(spec, layer=i) for i in range(num_layers)]
    cache = PagedKVCache(specs, requests * counts, PAGE_SIZE, setting.dtype, device)
    for layer in cache.layers:
        for stored in layer:
            stored.normal_()
    lens = np.full(requests, setting.keys, dtype=np.int32)
    indptr = np.arange(requests + 1, dtype=np.int32) * counts
    host_pages = torch.from_numpy(np.random.default_rng(0).permutation(requests * counts).astype(np.int32))
    pages = host_pages.to(device)
    shapes = ((requests, spec.num_qo_heads, size) for size in (rank, spec.entry_size - rank))
    q, q_rope = (torch.randn(shape, device=device, dtype=setting.dtype) for shape in shapes)
    query = q, q_rope
    from mini_engine.kernels.mla_decode import mla_decode, mla_decode_reference, num_workers, plan_items

    reference = partial(mla_decode_reference, query, pages=pages, kv_lens=lens, page_indptr=indptr, scale=scale)
    yield "torch", lambda: [reference(entry) for entry in cache.layers]
    if device.type == "cpu":
        return
    items = plan_items(lens, indptr, num_workers(device))
    work = {name: torch.from_numpy(x).to(device) for name, x in items.items()}
    yield "Triton", lambda: [mla_decode(query, entry, pages, **work, scale=scale) for entry in cache.layers]
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    entries = [tuple(stored.squeeze(2) for stored in layer) for layer in cache.layers]
    for algorithm in ("fa2", "fa3"):
        workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device=device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=algorithm)
        host = (torch.arange(requests + 1, dtype=torch.int32), torch.from_numpy(indptr), pages, torch.from_numpy(lens))
        wrapper.plan(
            metadata=MLAPlanMetadata.csr(*host), num_heads=spec.num_qo_heads, head_dim_ckv=rank,
            head_dim_kpe=spec.entry_size - rank, page_size=PAGE_SIZE, causal=True, sm_scale=scale,
            q_data_type=setting.dtype, kv_data_type=setting.dtype, query_layout="split", kv_cache_layout="split",
        )  # fmt: skip
        yield f"FlashInfer {algorithm}", partial(_run_wrapper, wrapper, query, entries)


def _run_wrapper(wrapper: object, query: tuple, entries: list[tuple]) -> list:
    return [wrapper.run(query=query, kv_cache=entry) for entry in entries]  # type: ignore[attr-defined]


def decode_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time of one layer of every way, beside the bytes' bound."""
    rows = []
    for requests in setting.requests:
        of_layer = decode_bytes(setting, requests)
        num_layers = max(2, min(27, int(setting.most_bytes // of_layer)))
        times = timed(dict(decode_ways(setting, requests, num_layers, device)), setting.repetitions, device)
        bound = of_layer / machine.bandwidth
        for way, own in times.items():
            named: dict[str, results.Setting] = {"way": way, "requests": requests, "keys": setting.keys}
            rows.append(row("decode: a layer", [x / num_layers for x in own], "s", bound, READ, named))
        free()
    return rows


# --- (c) prompts -----------------------------------------------------------------------------------------------------


def prompt_cost(setting: Setting, form: str, tokens: int) -> Cost:
    """FLOPs of one layer's attention over a whole prompt, from queries and latents to the outputs of the heads.

    In both forms, W_UK and W_UV are multiplied once for each token. The un-absorbed form then computes a pair of query
    and key with heads of its own sizes, and the absorbed form with latents.
    """
    spec = setting.spec
    assert spec.mla is not None
    up = spec.num_qo_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    expansion = linear_cost(tokens, spec.mla.kv_lora_rank, up, setting.dtype.itemsize)
    widths = spec.head_dim + spec.mla.v_head_dim
    if form == "absorbed":
        widths = spec.entry_size + spec.mla.kv_lora_rank
    pairs = 2 * visible_pairs(tokens, tokens) * spec.num_qo_heads * widths
    return Cost(expansion.flops + pairs, expansion.bytes)


class Absorbed(FlashInferMLABackend):
    """FlashInfer's kernels, with whole prompts in the absorbed form, too."""

    def _plan_prompts(self, batch, own):
        return self._plan_chunks(batch, own)


def prompt_ways(setting: Setting, tokens: int, device: torch.device) -> dict[str, Run]:
    """Both forms of one layer's attention over a whole prompt whose latents are in the cache."""
    spec = setting.spec
    assert spec.mla is not None
    rows = spec.num_qo_heads * (spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
    weight = torch.randn(rows, spec.mla.kv_lora_rank, device=device, dtype=setting.dtype) * 0.02
    up = UpProjections.of(weight, spec.mla)
    q = torch.randn(tokens, spec.num_qo_heads, spec.head_dim, device=device, dtype=setting.dtype)
    if device.type == "cpu":
        entry = [torch.randn(tokens, *size, dtype=setting.dtype) for size in spec.entry]
        attend = partial(sdpa_attention, scale=spec.scale, mask=torch.ones(tokens, tokens, dtype=torch.bool).tril())
        return {
            "un-absorbed": lambda: unabsorbed_attention(up, q, *entry, attend),
            "absorbed": lambda: absorbed_attention(up, q, *entry, attend),
        }
    ways: dict[str, Run] = {}
    for form, make in (("un-absorbed", None), ("absorbed", Absorbed)):
        num_pages = -(-tokens // PAGE_SIZE)
        cache = PagedKVCache([spec], num_pages, PAGE_SIZE, setting.dtype, device)
        for stored in cache.layers[0]:
            stored.normal_()
        backend = create_backend("flashinfer_mla", [spec], cache, Parts(), up_projections={0: up})
        if make is not None:
            backend = make([spec], cache, Parts())
            backend.up_projections = {0: up}
        batch = StepBatch.build(
            token_ids=[0] * tokens, num_new=[tokens], kv_lens=[tokens], pages=range(num_pages), page_size=PAGE_SIZE,
            device=device,
        )  # fmt: skip
        backend.plan(batch)
        ways[form] = partial(backend.run, 0, q)
    return ways


def prompt_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time and FLOPs of both forms."""
    rows = []
    for tokens in setting.prompts:
        for form, own in timed(prompt_ways(setting, tokens, device), setting.repetitions, device).items():
            cost = prompt_cost(setting, form, tokens)
            named: dict[str, results.Setting] = {"form": form, "tokens": tokens}
            rows.append(row("prompt: a layer", own, "s", cost.flops / machine.flops, COMPUTE, named))
            rows.append(row("prompt: FLOPs of a layer", [cost.flops], "FLOP", None, "a count", named))
        free()
    return rows


# --- (d) the engine --------------------------------------------------------------------------------------------------


def step_bytes(config: ModelConfig, requests: int, keys: float, itemsize: int) -> float:
    """Bytes that a decode step reads: the weights that its tokens touch if they choose experts at random, and keys."""
    assert config.mla is not None and config.moe is not None
    moe, mla, hidden, heads = config.moe, config.mla, config.hidden_size, config.num_attention_heads
    attention = hidden * (heads * config.head_dim + mla.kv_lora_rank + mla.qk_rope_head_dim + heads * mla.v_head_dim)
    attention += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    touched = moe.num_experts * (1 - (1 - moe.num_experts_per_tok / moe.num_experts) ** requests)
    sparse = 3 * hidden * (touched * moe.moe_intermediate_size + moe.shared_intermediate_size)
    num_sparse, layers = len(moe.sparse_layers), config.num_hidden_layers
    weights = layers * attention + num_sparse * (sparse + hidden * moe.num_experts) + config.vocab_size * hidden
    weights += (layers - num_sparse) * 3 * hidden * config.intermediate_size
    return itemsize * (weights + layers * requests * keys * (mla.kv_lora_rank + mla.qk_rope_head_dim))


def make_engine(model: CausalLM, backend: str, workload: Workload) -> LLMEngine:
    """An engine whose pool holds all requests at once, and whose first step computes all prompts."""
    requests = workload.requests(model.config.vocab_size)
    config = EngineConfig(
        attn_backend=backend,
        num_pages=pages_needed(requests, PAGE_SIZE) + workload.num_requests,
        page_size=PAGE_SIZE,
        max_batch_size=workload.num_requests,
        max_model_len=workload.longest,
        max_num_batched_tokens=sum(len(prompt) for prompt, _ in requests),
        enable_prefix_caching=False,
    )
    return LLMEngine(model, config, parts=model.parts)


def engine_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Output tokens per second of the steps that only decode."""
    model, rows = random_model(setting.config, setting.dtype, device), []
    for name, workload in setting.workloads.items():
        requests = workload.requests(model.config.vocab_size)
        outputs = num_outputs(requests) - len(requests)  # the first ones are sampled by the prompts' steps
        keys = statistics.mean(len(prompt) + params.max_tokens / 2 for prompt, params in requests)
        of_step = step_bytes(model.config, len(requests), keys, setting.dtype.itemsize)
        bound = len(requests) * machine.bandwidth / of_step
        engines = {way: make_engine(model, way, workload) for way in setting.backends}
        rates: dict[str, list[float]] = {way: [] for way in engines}
        for i in range(setting.repetitions + 1):
            for way, engine in engines.items():
                served = kernels.serve(engine, workload, model.config.vocab_size)
                if i:  # the first run is a warm-up
                    rates[way].append(outputs / served.decode_seconds)
        for way, own in rates.items():
            rows.append(row("decode: tokens per second", own, "tokens/s", bound, STEP, {"workload": name, "way": way}))
        del engines, engine
        free()
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

BANDWIDTH, FLOPS = 4.44e12, 800e12  # of an H200: bytes per second, and FLOP per second of a large product in bfloat16
SHARES = {"FlashInfer fa3": 0.75, "Triton": 0.55}  # of the bandwidth, at 64 requests


def predictions() -> str:
    """Derive the README's numbers from the sizes of DeepSeek-V2-Lite and the assumed rates."""
    setting = SETTINGS["cuda"]
    sizes, scale = caches_of(setting), setting.config.num_hidden_layers * setting.dtype.itemsize
    mla, mha, gqa = sizes.values()
    values = {
        "a token, all layers": f"{mla * scale:,} B; MHA {mha * scale:,} B, {mha / mla:.1f} times as many; "
        f"GQA {gqa * scale:,} B, {gqa / mla:.1f} times as many",
    }
    for requests in setting.requests:
        seconds = decode_bytes(setting, requests) / BANDWIDTH
        values[f"a layer, {requests} requests of {setting.keys:,} keys"] = f"{quantity(seconds, 's')} at the bandwidth"
    for way, share in SHARES.items():
        values[f"{way}, {requests} requests"] = f"{quantity(seconds / share, 's')} at {share:.0%} of it"
    for tokens in setting.prompts:
        whole, absorbed = (prompt_cost(setting, form, tokens).flops for form in ("un-absorbed", "absorbed"))
        values[f"prompt of {tokens:,} tokens, un-absorbed"] = quantity(whole, "FLOP")
        values[f"prompt of {tokens:,} tokens, absorbed"] = (
            f"{quantity(absorbed, 'FLOP')}, {absorbed / whole:.1f} times as many"
        )
    config = ModelConfig.from_hf(setting.config.to_dict())
    for name, workload in setting.workloads.items():
        keys = workload.longest - 128
        of_step = step_bytes(config, workload.num_requests, keys, 2)
        rate = workload.num_requests * BANDWIDTH / of_step
        values[f"step of {name}"] = f"{quantity(of_step, 'B')}, at most {rate:,.0f} tokens/s"
    return predicted(values)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    with torch.inference_mode():
        if BYTES in chosen.only:
            rows += byte_rows(setting)
        if DECODE in chosen.only:
            rows += decode_rows(setting, machine, device)
        if PROMPTS in chosen.only:
            rows += prompt_rows(setting, machine, device)
        if ENGINE in chosen.only:
            rows += engine_rows(setting, machine, device)
    parameters: dict[str, results.Setting] = {
        "model": "DeepSeek-V2-Lite's shape, random weights" if device.type == "cuda" else "a tiny DeepSeek-V2",
        "dtype": machine.dtype,
        "page size": PAGE_SIZE,
        "repetitions": setting.repetitions,
    }
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(chosen.only) < set(SECTIONS):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)


if __name__ == "__main__":
    main()
