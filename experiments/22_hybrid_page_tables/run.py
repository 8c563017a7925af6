"""Measure page tables for groups of layers: how many requests run at once in a pool, and how many tokens they make.

    python experiments/22_hybrid_page_tables/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/22_hybrid_page_tables/run.py --predict

`pool` counts the requests of 8,192 tokens that run at once, for the layers of Gemma 2 2B and Gemma 3 1B: the engine's
scheduler without a model, the same on every device. `engine` serves requests over a small pool: on a GPU by a model of
Gemma 2 2B's shape with random weights in bfloat16, on a CPU by a tiny model with the same pattern of layers in float32.
The result goes to experiments/22_hybrid_page_tables/results/<device>.json, below DIR where one is given. Sections that
are not measured again keep their rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Gemma2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, rate_row, record
from book.random_models import GEMMA2_2B, random_model
from book.units import quantity
from mini_engine.attention.spec import AttentionSpec
from mini_engine.bench.workloads import BenchRequest, Workload, num_outputs, with_other_tokens
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.layer_groups import LayerGroup, layer_groups, one_group, stored_specs
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import page_bytes
from mini_engine.models.base import CausalLM
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler

EXPERIMENT = "22_hybrid_page_tables"
SECTIONS = POOL, ENGINE = "pool", "engine"
TABLES = {"one": True, "one for each group of layers": False}  # and whether the option disables the groups
LENGTH, PAGE_SIZE, BUDGET = 8192, 16, 2048  # tokens of a request, of a page, and of a step
REQUESTS = 48  # of LENGTH tokens, that fill the pool with one page table
BANDWIDTH = 4.44e12  # of an H200 in bytes per second, assumed in the predictions
PACKED = "the bytes of the pool over the bytes that a request holds, without room for a step"
SEEN = "the keys that each layer sees"
NO_BOUND = "no bound: the two tables are compared"


def specs_of(windows: Sequence[int | None], num_heads: int, num_kv_heads: int) -> tuple[AttentionSpec, ...]:
    """Layers with heads of 256 numbers and these windows."""
    return tuple(
        AttentionSpec(layer, num_heads, num_kv_heads, 256, 1 / 16, window=own) for layer, own in enumerate(windows)
    )


MODELS = {
    "Gemma 2 2B": specs_of([4096, None] * 13, 8, 4),
    "Gemma 3 1B": specs_of([None if layer % 6 == 5 else 512 for layer in range(26)], 4, 1),
}
TINY = Gemma2Config(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=256, max_position_embeddings=512,
    architectures=["Gemma2ForCausalLM"],
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What the engine serves on a kind of device.

    Attributes:
        config: the model.
        dtype: of weights and cache.
        workload: the requests. Their length is twice the window.
        at_once: requests that the pool holds with one page table.
        budget: most tokens of a step.
        repetitions: of each figure; the tables take turns.
    """

    config: Gemma2Config
    dtype: torch.dtype
    workload: Workload
    at_once: int
    budget: int
    repetitions: int


SETTINGS = {
    "cpu": Setting(TINY, torch.float32, Workload(32, (448, 448), (64, 64)), 12, 256, 5),
    "cuda": Setting(GEMMA2_2B, torch.bfloat16, Workload(32, (7680, 7680), (512, 512)), 12, 2048, 5),
}


# --- the pool --------------------------------------------------------------------------------------------------------


def groups_of(specs: Sequence[AttentionSpec], disabled: bool) -> tuple[LayerGroup, ...]:
    return one_group(specs) if disabled else layer_groups(specs, LENGTH)


def pages_held(groups: Sequence[LayerGroup]) -> list[int]:
    """Pages of one request of LENGTH tokens at its end, in each group; a window rarely begins with a page."""
    most = -(-LENGTH // PAGE_SIZE)
    return [most if group.window is None else min(most, group.window // PAGE_SIZE + 1) for group in groups]


def pool_of(specs: Sequence[AttentionSpec], groups: Sequence[LayerGroup]) -> int:
    """Pages in a pool of the same bytes, whatever the groups: with one page table, it holds REQUESTS requests."""
    of_page = page_bytes(stored_specs(specs, groups), 1, torch.bfloat16) // len(groups)
    return REQUESTS * LENGTH * page_bytes(specs, 1, torch.bfloat16) // (PAGE_SIZE * of_page)


def requests_at_once(specs: Sequence[AttentionSpec], groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Schedule many requests, and count those that run when all prompts are computed, and the pages of the pool in use.

    Prompts are one page shorter than the longest text, so every request soon has LENGTH tokens.
    """
    window, *others = [group.window for group in groups]
    table = PageTable(pool_of(specs, groups), PAGE_SIZE, 8 * REQUESTS, LENGTH // PAGE_SIZE, len(groups))
    scheduler = Scheduler(
        table, max_model_len=LENGTH, max_num_batched_tokens=BUDGET, window=window,
        other_windows=[own for own in others if own is not None], prefix_sharing=False, parts=Parts(),
    )  # fmt: skip
    params, prompt = SamplingParams(max_tokens=PAGE_SIZE), [0] * (LENGTH - PAGE_SIZE)
    for number in range(8 * REQUESTS):
        scheduler.add(Request(str(number), prompt, params, 0, LENGTH, (), number))
    running = scheduler.running
    while True:
        schedule = scheduler.schedule()
        assert schedule is not None and not schedule.preempted, "no request is preempted while prompts are computed"
        running.num_computed[schedule.rows] += schedule.num_new
        if schedule.num_tokens == len(schedule.rows):  # every request that runs decodes, and no other fits
            break
    scheduler.reserve(running.order, np.ones(len(running), dtype=np.int64))
    return len(running), table.num_pages - table.num_free_pages


def pool_rows() -> list[results.Row]:
    """Requests at once and the bytes of one, with one page table and with one for each group of layers."""
    rows = []
    for model, specs in MODELS.items():
        for tables, disabled in TABLES.items():
            groups = groups_of(specs, disabled)
            num_requests, num_pages = requests_at_once(specs, groups)
            of_page = page_bytes(stored_specs(specs, groups), PAGE_SIZE, torch.bfloat16) // len(groups)
            case: dict[str, results.Setting] = {"model": model, "page tables": tables}
            most, held = pool_of(specs, groups) / sum(pages_held(groups)), num_pages * of_page / num_requests
            seen = sum(min(spec.window or LENGTH, LENGTH) * spec.entry_size * 2 for spec in specs)
            rows.append(results.Row("requests at once", num_requests, "requests", most, PACKED, case))
            rows.append(results.Row("bytes of a request", held, "B", seen, SEEN, case))
    for row in rows:
        print(row.cells()[:5], flush=True)
    return rows


# --- the engine ------------------------------------------------------------------------------------------------------


def make_engine(model: CausalLM, setting: Setting, disabled: bool) -> LLMEngine:
    """An engine whose pool has the same bytes with and without the groups."""
    longest = setting.workload.longest
    config = EngineConfig(
        num_pages=setting.at_once * -(-longest // PAGE_SIZE) + setting.at_once,  # and a page for each, held back
        page_size=PAGE_SIZE,
        max_batch_size=setting.workload.num_requests,
        max_model_len=longest,
        max_num_batched_tokens=setting.budget,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=disabled,
    )
    return LLMEngine(model, config, parts=model.parts)


def serve(engine: LLMEngine, requests: Sequence[BenchRequest]) -> tuple[float, float]:
    """Serve all requests; return the seconds, and how many requests ran in a step on average."""
    running, start = list[int](), time.perf_counter()
    for number, (prompt, params) in enumerate(requests):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished:
        for request in engine.step().finished:
            if request.error:
                raise request.error
        running.append(len(engine.scheduler.running))
    return time.perf_counter() - start, sum(running) / len(running)


def engine_rows(setting: Setting, device: torch.device) -> list[results.Row]:
    """Output tokens per second, prompts included, and the mean number of requests that run in a step."""
    model = random_model(setting.config, setting.dtype, device)
    requests = setting.workload.requests(model.config.vocab_size)
    engines = {tables: make_engine(model, setting, disabled) for tables, disabled in TABLES.items()}
    seconds: dict[str, list[float]] = {tables: [] for tables in engines}
    at_once = dict.fromkeys(engines, 0.0)
    for repetition in range(setting.repetitions + 1):
        turns = list(engines) if repetition % 2 else list(engines)[::-1]
        for tables in turns:
            taken, at_once[tables] = serve(engines[tables], with_other_tokens(requests, repetition))
            if repetition:  # the first run is a warm-up
                seconds[tables].append(taken)
    rows = []
    for tables, own in seconds.items():
        case: dict[str, results.Setting] = {"page tables": tables}
        rows.append(rate_row("engine: output tokens per second", num_outputs(requests), own, None, NO_BOUND, case))
        rows.append(results.Row("engine: requests in a step", at_once[tables], "requests", None, NO_BOUND, case))
    for row in rows:
        print(row.cells()[:5], flush=True)
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------


def predictions() -> str:
    """Derive the README's numbers from the sizes of the models and the assumed bandwidth."""
    values = {}
    for model, specs in MODELS.items():
        [one], groups = pages_held(groups_of(specs, True)), groups_of(specs, False)
        held = pages_held(groups)
        share = sum(held) / len(groups) / one * page_bytes(stored_specs(specs, groups), 1, torch.bfloat16)
        share /= page_bytes(specs, 1, torch.bfloat16)
        values[f"{model}: groups"] = f"{len(groups)} of {len(groups[0].layers)} layers"
        values[f"{model}: a request of {LENGTH:,} tokens"] = (
            f"{quantity(LENGTH * page_bytes(specs, 1, torch.bfloat16), 'B')}; in groups {share:.1%} of it"
        )
        values[f"{model}: requests at once"] = f"{REQUESTS}; in groups at most {REQUESTS / share:.1f}"
    setting, specs = SETTINGS["cuda"], MODELS["Gemma 2 2B"]
    weights = 2 * 2.6e9  # bytes
    seen = sum(min(spec.window or LENGTH, LENGTH) * spec.entry_size * 2 for spec in specs)
    for at_once in (setting.at_once, setting.at_once * 4 // 3):
        seconds = (weights + at_once * seen) / BANDWIDTH
        values[f"a decode step of {at_once} requests"] = (
            f"{quantity(weights + at_once * seen, 'B')}, {quantity(seconds, 's')}, {at_once / seconds:,.0f} tokens/s"
        )
    return predicted(values)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="measure these sections only")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    rows: list[results.Row] = []
    with torch.inference_mode():
        if POOL in chosen.only:
            rows += pool_rows()
        if ENGINE in chosen.only:
            rows += engine_rows(setting, device)
    workload = setting.workload
    parameters: dict[str, results.Setting] = {
        "model of the engine": "Gemma 2 2B's shape, random weights" if device.type == "cuda" else "a tiny Gemma 2",
        "dtype": str(setting.dtype).removeprefix("torch."),
        "page size": PAGE_SIZE,
        "requests of the engine": f"{workload.num_requests} of {workload.prompt[0]} + {workload.output[0]} tokens",
        "window of the engine": setting.config.sliding_window,
        "repetitions": setting.repetitions,
    }
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(chosen.only) < set(SECTIONS):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)


if __name__ == "__main__":
    main()
