"""Measure page selection: the attention and the needles that selected pages hold, and the time that they save.

    python experiments/18_page_selection/run.py [--device cpu|cuda] [--out DIR] [--only SECTION ...]
    python experiments/18_page_selection/run.py --predict

What a selection finds depends on a trained model, so `mass` and `needle` run on a CPU, with the embedded model. On a
GPU, `layer` and `engine` have Qwen3-0.6B's shape in bfloat16 with random weights; on a CPU, a tiny shape shows that the
script works. The result goes to experiments/18_page_selection/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, predicted, record
from book.grading.chapter import load_module
from book.prose import text
from book.random_models import QWEN3_0_6B, random_model
from book.units import quantity
from mini_engine import LLM, SamplingParams
from mini_engine.attention.backend import create_backend
from mini_engine.attention.page_selection import (
    DecodePages,
    PageSelection,
    attend_to_pages,
    bound_scores,
    select_pages,
)
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.bench.run import pages_needed
from mini_engine.bench.workloads import Workload, model_shape
from mini_engine.config import EngineConfig
from mini_engine.defaults import specs_of
from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.loading.hub import EMBEDDED_MODEL
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.roofline import Machine, measure_machine, model_step_cost

kernels = load_module("experiment_06", Path(__file__).resolve().parents[1] / "06_flashinfer_vs_flex" / "run.py")

EXPERIMENT = "18_page_selection"
SECTIONS = MASS, NEEDLE, LAYER, ENGINE = "mass", "needle", "layer", "engine"
PAGE_SIZE, DENSE_LAYERS = 16, 2
ORACLE = "the pages that have the most weight, summed over the heads of the group"
DENSE_ANSWERS = "the answers that are right with all keys"
READ = "keys and values that are attended to, summaries and queries, read once at the measured bandwidth"
STEP = "the weights, and the mean number of keys, values and summaries of a step, read at the measured bandwidth"
TINY = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"],
)  # fmt: skip
LONG_QWEN3 = Qwen3Config(**{**QWEN3_0_6B.to_dict(), "max_position_embeddings": 131_072})
Run = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """What is measured on a kind of device.

    Attributes:
        sections: what is measured unless `--only` says otherwise.
        text_tokens: length of the text of `mass`.
        queries: positions of its second half whose queries select pages.
        needles: number of prompts of `needle`.
        needle_tokens: tokens of each of them.
        budgets: of `mass` and `needle`.
        config: the shape of `layer` and `engine`.
        dtype: of its weights, queries and cache.
        requests: of a decode step.
        keys: of each of them.
        fast_budgets: of `layer` and `engine`.
        dense: backends that attend to all keys.
        outputs: tokens that each request of `engine` generates.
        repetitions: of each time.
    """

    sections: tuple[str, ...]
    text_tokens: int
    queries: int
    needles: int
    needle_tokens: int
    budgets: tuple[int, ...]
    config: Qwen3Config
    dtype: torch.dtype
    requests: int
    keys: int
    fast_budgets: tuple[int, ...]
    dense: tuple[str, ...]
    outputs: int
    repetitions: int

    @property
    def spec(self) -> AttentionSpec:
        """A layer's attention."""
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return AttentionSpec(0, *heads, self.config.head_dim, self.config.head_dim**-0.5)

    @property
    def workload(self) -> Workload:
        """The requests of `engine`."""
        return Workload(self.requests, (self.keys, self.keys), (self.outputs, self.outputs))


SETTINGS = {
    "cpu": Setting(
        SECTIONS, 7168, 32, 16, 2000, (64, 128, 256, 512, 1024), TINY, torch.float32, 3, 400, (128,),
        ("torch_padded",), 8, 3,
    ),
    "cuda": Setting(
        (LAYER, ENGINE), 0, 0, 0, 0, (), LONG_QWEN3, torch.bfloat16, 8, 65_536, (1024, 4096),
        ("flashinfer", "flash_decoding"), 64, 3,
    ),
}  # fmt: skip


def row(
    figure: str, values: Sequence[float], unit: str, bound: float | None, source: str, case: dict[str, results.Setting]
) -> results.Row:
    """The median of several values, printed."""
    spread = (min(values), max(values)) if len(values) > 1 else None
    made = results.Row(figure, statistics.median(values), unit, bound, source, case, spread)
    print(made.cells()[:5], flush=True)
    return made


def free() -> None:
    """Return the memory of the last case."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- ways to rank pages ----------------------------------------------------------------------------------------------

QUEST, SUMMED, RECENT, RANDOM, BEST = WAYS = (
    "Quest", "Quest, sum of the heads", "first and recent pages", "random pages", "oracle",
)  # fmt: skip


def page_weights(
    q: Float[Tensor, "B Hq D"], k_pages: Float[Tensor, "pages P Hk D"], pages: DecodePages, scale: float
) -> Float[Tensor, "B Hk G W"]:
    """The share of each query head's attention that each page has, with all keys."""
    index = torch.arange(pages.width).expand(len(q), 1, -1)
    keys = k_pages[pages.at(index)[:, 0]].flatten(1, 2)
    scores = torch.einsum("bhgd,bmhd->bhgm", q.unflatten(1, (k_pages.shape[2], -1)), keys) * scale
    exists = torch.arange(scores.shape[-1]) < pages.kv_lens[:, None]
    weights = scores.masked_fill(~exists[:, None, None], -math.inf).softmax(dim=-1)
    return weights.unflatten(-1, (pages.width, -1)).sum(dim=-1)


def ranks(
    way: str, q: Tensor, k_pages: Tensor, summaries: tuple[Tensor, Tensor], pages: DecodePages, scale: float
) -> Float[Tensor, "B Hk W"]:
    """How much each page matters by one of the ways, which all select the first page and the last."""
    bounds = bound_scores(q, *summaries, pages)
    if way == SUMMED:  # the bounds of each head of the groups alone
        alone = q.unflatten(1, (bounds.shape[1], -1)).transpose(1, 2)
        own = torch.stack([bound_scores(head, *summaries, pages) for head in alone.unbind(1)]).sum(dim=0)
    elif way == RECENT:
        own = torch.arange(pages.width, dtype=bounds.dtype).expand_as(bounds)
    elif way == RANDOM:
        own = torch.rand(bounds.shape, generator=torch.Generator().manual_seed(int(pages.kv_lens.sum())))
    elif way == BEST:
        own = page_weights(q, k_pages, pages, scale).sum(dim=2)
    else:
        own = bounds
    return torch.where(bounds.isinf(), bounds, own)


class Ranked(PageSelection):
    """Selects the pages that one of the ways ranks highest."""

    def __init__(self, way: str, specs: Sequence[AttentionSpec], cache: PagedKVCache) -> None:
        super().__init__(specs, cache)
        self._way, self._cache = way, cache

    def rank(self, layer: int, q: Float[Tensor, "B Hq D"]) -> Float[Tensor, "B Hk W"]:
        keys, scale = self._cache.layers[layer][0], self._specs[layer].scale
        return ranks(self._way, q, keys, self._cache.summaries[layer], self._pages, scale)


# --- (a) the attention that the selected pages have ------------------------------------------------------------------


def mass_rows(setting: Setting) -> list[results.Row]:
    """Share of the attention of the selected pages, over layers, heads, and positions of a text."""
    checkpoint = open_checkpoint(EMBEDDED_MODEL)
    model, length = load_model(checkpoint, Parts(), torch.float32, torch.device("cpu")), setting.text_tokens
    prose = text("evaluation") + "\n" + text("calibration")
    token_ids = load_tokenizer(checkpoint)(prose)["input_ids"][:length]
    config = EngineConfig.of({"sparse_attention_config": {"method": "quest", "budget": 2 * PAGE_SIZE}})
    specs, num_pages = specs_of(config, model), -(-length // PAGE_SIZE)
    cache = PagedKVCache(specs, num_pages, PAGE_SIZE, torch.float32)
    backend = create_backend("sparse", specs, cache, Parts())
    batch = StepBatch.build(
        token_ids=token_ids, num_new=[length], kv_lens=[length], pages=range(num_pages), page_size=PAGE_SIZE
    )
    backend.plan(batch)
    positions = torch.linspace(length // 2, length - 1, setting.queries).long()
    queries: dict[int, Tensor] = {}

    def attend(layer: int, q: Tensor, *entry: Tensor) -> Tensor:
        queries[layer] = q[positions].clone()
        return backend(layer, q, *entry)

    model(batch.token_ids, batch.positions, attend)
    lens = positions + 1
    pages = DecodePages(batch.kv_page_indices, torch.zeros_like(lens), lens, PAGE_SIZE, num_pages)
    shares: dict[tuple[str, int], list[float]] = {}
    for spec in specs:
        if spec.key_budget is None:
            continue
        keys, q = cache.layers[spec.layer][0], queries[spec.layer]
        weights = page_weights(q, keys, pages, spec.scale)
        for way in WAYS:
            own = ranks(way, q, keys, cache.summaries[spec.layer], pages, spec.scale)
            for budget in setting.budgets:
                selected = select_pages(own, budget // PAGE_SIZE)[:, :, None].expand(-1, -1, spec.group, -1)
                held = weights.gather(-1, selected).sum(dim=-1)
                shares.setdefault((way, budget), []).append(100 * float(held.mean()))
    means = {case: statistics.mean(own) for case, own in shares.items()}
    return [
        row("attention of the selected pages", [mean], "%", means[BEST, budget], ORACLE,
            {"way": way, "budget": budget, "keys": length})
        for (way, budget), mean in means.items()
    ]  # fmt: skip


# --- (b) needles -----------------------------------------------------------------------------------------------------


def needle_prompts(llm: LLM, setting: Setting) -> list[tuple[list[int], str]]:
    """Texts with a number in them, at depths from the start to the end, and a question at their end."""
    rng, encode = random.Random(0), lambda words: llm.tokenizer(words)["input_ids"]
    prose, made = encode(text("evaluation") + "\n" + text("calibration")), []
    question = encode("\n\nThe magic number of the library is")
    for i in range(setting.needles):
        number = "".join(str(rng.randint(0, 9)) for _ in range(5))
        needle = encode(f"\n\nThe magic number of the library is {number}. Remember it.\n\n")
        room = setting.needle_tokens - len(needle) - len(question)
        start, depth = rng.randint(0, len(prose) - room), int((i + 0.5) / setting.needles * room)
        own = prose[start : start + room]
        made.append((own[:depth] + needle + own[depth:] + question, number))
    return made


def needle_rows(setting: Setting) -> list[results.Row]:
    """Right answers with each way and budget. The first token of an answer is a space; its digits are decodes."""
    longest = setting.needle_tokens + 16
    llm = LLM(
        EMBEDDED_MODEL, device="cpu", dtype="float32", page_size=PAGE_SIZE, max_batch_size=1, max_model_len=longest,
        num_pages=2 * -(-longest // PAGE_SIZE), sparse_attention_config={"method": "quest", "budget": longest + 32},
    )  # fmt: skip
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=6)
    specs, cache, backend = engine.backend.specs, engine.cache, engine.backend
    right: dict[tuple[str, int], int] = {(way, budget): 0 for way in WAYS for budget in setting.budgets}
    right_dense = 0
    for prompt, number in needle_prompts(llm, setting):

        def is_right(prompt: list[int] = prompt, number: str = number) -> bool:
            [output] = llm.generate([prompt], params)  # after the first time, the pages of the prompt are shared
            return output.outputs[0].text.strip().startswith(number)

        backend.selection = PageSelection(specs, cache)
        right_dense += is_right()
        for way, budget in right:
            own = [replace(spec, key_budget=budget if spec.key_budget else None) for spec in specs]
            backend.selection = Ranked(way, own, cache)
            right[way, budget] += is_right()
    print("right with all keys:", right_dense, flush=True)
    return [
        row("right answers", [count], "answers", right_dense or None, DENSE_ANSWERS,
            {"way": way, "budget": budget, "keys": setting.needle_tokens})
        for (way, budget), count in right.items()
    ]  # fmt: skip


# --- (c) a layer's decodes -------------------------------------------------------------------------------------------


def layer_bytes(setting: Setting, budget: int | None) -> int:
    """Bytes that the attention of one layer of a decode step must read and write."""
    spec, keys = setting.spec, setting.keys
    head = spec.num_kv_heads * spec.head_dim
    of_request = 2 * head * keys if budget is None else 2 * head * (min(budget, keys) + -(-keys // PAGE_SIZE))
    of_request += 2 * spec.num_qo_heads * spec.head_dim
    return setting.requests * of_request * setting.dtype.itemsize


def layer_ways(setting: Setting, device: torch.device, num_layers: int) -> Iterator[tuple[str, int | None, Run]]:
    """Every way to attend in all layers: to all keys with each backend, and to selected pages with each budget.

    The parts of page selection are ways, too.
    """
    count = -(-setting.keys // PAGE_SIZE)
    specs = [replace(setting.spec, layer=i) for i in range(num_layers)]
    budgeted = [replace(spec, key_budget=setting.fast_budgets[-1]) for spec in specs]
    cache = PagedKVCache(budgeted, setting.requests * count, PAGE_SIZE, setting.dtype, device)
    for pair in (*cache.layers, *cache.summaries.values()):
        for tensor in pair:
            tensor.normal_()
    batch = StepBatch.build(
        token_ids=[0] * setting.requests, num_new=None, kv_lens=[setting.keys] * setting.requests,
        pages=np.random.default_rng(0).permutation(setting.requests * count), page_size=PAGE_SIZE, device=device,
    )  # fmt: skip
    q = torch.randn(setting.requests, setting.spec.num_qo_heads, setting.spec.head_dim, device=device)
    q = q.to(setting.dtype)
    for name in setting.dense:
        backend = create_backend(name, specs, cache, Parts())
        backend.plan(batch)
        yield f"all keys, {name}", None, kernels.run_layers(backend, q, num_layers)
    pages = DecodePages.of(batch)
    for budget in setting.fast_budgets:
        backend = create_backend("sparse", [replace(spec, key_budget=budget) for spec in specs], cache, Parts())
        backend.plan(batch)
        yield "selected pages", budget, kernels.run_layers(backend, q, num_layers)
        bounds = [bound_scores(q, *cache.summaries[i], pages) for i in range(num_layers)]
        selected = [select_pages(own, budget // PAGE_SIZE) for own in bounds]
        yield "of these, bounds", budget, lambda: [bound_scores(q, *own, pages) for own in cache.summaries.values()]
        yield (
            "of these, selection", budget,
            lambda bounds=bounds, budget=budget: [select_pages(own, budget // PAGE_SIZE) for own in bounds],
        )  # fmt: skip
        yield (
            "of these, attention", budget,
            lambda selected=selected: [
                attend_to_pages(q, *pair, pages, own, setting.spec.scale)
                for pair, own in zip(cache.layers, selected, strict=True)
            ],
        )  # fmt: skip


def layer_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Time of one layer of every way, in turns; on a GPU of replays of a CUDA graph."""
    num_layers = 2  # their keys are many times larger than the L2 cache
    ways = {(way, budget): run for way, budget, run in layer_ways(setting, device, num_layers)}
    replays = {case: kernels.captured(run, device) for case, run in ways.items()}
    times: dict[tuple[str, int | None], list[float]] = {case: [] for case in ways}
    for _ in range(setting.repetitions):
        for case, replay in replays.items():
            times[case].append(kernels.seconds(replay, device) / num_layers)
    rows = []
    for (way, budget), own in times.items():
        is_part = way.startswith("of these")
        bound = None if is_part else layer_bytes(setting, budget) / machine.bandwidth
        case: dict[str, results.Setting] = {"way": way, "requests": setting.requests, "keys": setting.keys}
        case |= {} if budget is None else {"budget": budget}
        rows.append(row("decode: a layer", own, "s", bound, "a part of the row above" if is_part else READ, case))
    free()
    return rows


# --- (d) the engine --------------------------------------------------------------------------------------------------


def step_bytes(setting: Setting, budget: int | None) -> float:
    """Bytes that a decode step in the middle of the outputs must move."""
    shape, keys = model_shape(ModelConfig.from_hf(setting.config.to_dict())), setting.keys + setting.outputs // 2
    dense = model_step_cost(shape, 1, keys, setting.dtype.itemsize, setting.requests).bytes
    if budget is None:
        return dense
    saved = layer_bytes(replace(setting, keys=keys), None) - layer_bytes(replace(setting, keys=keys), budget)
    return dense - (shape.num_layers - DENSE_LAYERS) * saved


def make_engine(model: CausalLM, setting: Setting, way: str, budget: int | None) -> LLMEngine:
    """An engine whose pool holds all requests at once."""
    sparse = {"method": "quest", "budget": budget, "num_dense_layers": DENSE_LAYERS}
    workload = setting.workload
    config = EngineConfig.of({
        "attn_backend": way,
        "num_pages": pages_needed(workload.requests(model.config.vocab_size), PAGE_SIZE) + workload.num_requests,
        "page_size": PAGE_SIZE,
        "max_batch_size": workload.num_requests,
        "max_model_len": workload.longest,
        "max_num_batched_tokens": 16_384,
        "enable_prefix_caching": False,
        "persistent_decode": False,
        "sparse_attention_config": None if budget is None else sparse,
    })  # fmt: skip
    return LLMEngine(model, config, parts=model.parts)


def decode_rate(engine: LLMEngine, workload: Workload) -> float:
    """Tokens per second of the steps in which all requests decode: others still have prompts, or fewer keys."""
    for index, (prompt, params) in enumerate(workload.requests(engine.model.config.vocab_size)):
        engine.add_request(str(index), prompt, params)
    start, steps, seconds = time.perf_counter(), 0, 0.0
    while engine.has_unfinished:
        report = engine.step()
        now = time.perf_counter()
        if report.is_decode and report.num_tokens == workload.num_requests:
            steps, seconds = steps + 1, seconds + now - start
        start = now
    return steps * workload.num_requests / seconds


def engine_rows(setting: Setting, machine: Machine, device: torch.device) -> list[results.Row]:
    """Output tokens per second of decode steps; one engine after another, because each fills the GPU."""
    model, rows = random_model(setting.config, setting.dtype, device), []
    for way, budget in [*((way, None) for way in setting.dense), *(("sparse", own) for own in setting.fast_budgets)]:
        engine = make_engine(model, setting, way, budget)
        rates = [decode_rate(engine, setting.workload) for _ in range(setting.repetitions + 1)]  # the first warms up
        bound = setting.requests * machine.bandwidth / step_bytes(setting, budget)
        case: dict[str, results.Setting] = {"way": way, "requests": setting.requests, "keys": setting.keys}
        case |= {} if budget is None else {"budget": budget}
        rows.append(row("decode: tokens per second", rates[1:], "tokens/s", bound, STEP, case))
        del engine
        free()
    return rows


# --- prediction ------------------------------------------------------------------------------------------------------

BANDWIDTH = 4.44e12  # of an H200, in bytes per second
LAUNCHES = 40e-6  # seconds of a layer's five small kernels, of which the selection sorts


def predictions() -> str:
    """Derive the README's numbers from the sizes and the assumed rates."""
    setting, values = SETTINGS["cuda"], dict[str, str]()
    cpu, dense = SETTINGS["cpu"], layer_bytes(setting, None)
    for budget in cpu.budgets:
        values[f"keys in a budget of {budget}, of {cpu.text_tokens * 3 // 4:,}"] = (
            f"{budget / (cpu.text_tokens * 3 / 4):.1%}"
        )
    values["a layer, all keys"] = f"{quantity(dense, 'B')}, {quantity(dense / BANDWIDTH, 's')}"
    for budget in setting.fast_budgets:
        own = layer_bytes(setting, budget)
        seconds, launched = own / BANDWIDTH, own / BANDWIDTH + LAUNCHES
        values[f"a layer, budget of {budget:,}"] = (
            f"{quantity(own, 'B')}, {quantity(seconds, 's')}, {dense / own:.1f} times fewer; "
            f"{quantity(launched, 's')} with launches, {dense / BANDWIDTH / launched:.1f} times faster"
        )
    for case in (None, *setting.fast_budgets):
        own_step = step_bytes(setting, case)
        name = "all keys" if case is None else f"budget of {case:,}"
        rate = setting.requests * BANDWIDTH / own_step
        values[f"a step, {name}"] = f"{quantity(own_step, 'B')}, at most {rate:,.0f} tokens/s"
    return predicted(values)


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(__doc__, predictions)
    options.add_argument("--only", nargs="+", choices=SECTIONS, help="measure these sections only")
    chosen = options.parse_args(arguments)
    device, setting = torch.device(chosen.device), SETTINGS[chosen.device]
    sections = chosen.only or setting.sections
    machine = measure_machine(device, setting.dtype)
    rows: list[results.Row] = []
    with torch.inference_mode():
        rows += mass_rows(setting) if MASS in sections else []
        rows += needle_rows(setting) if NEEDLE in sections else []
        rows += layer_rows(setting, machine, device) if LAYER in sections else []
        rows += engine_rows(setting, machine, device) if ENGINE in sections else []
    parameters: dict[str, results.Setting] = {
        "model": "Qwen3-0.6B's shape, random weights" if device.type == "cuda" else f"{EMBEDDED_MODEL}; a tiny Qwen3",
        "dtype": machine.dtype,
        "page size": PAGE_SIZE,
        "dense layers": DENSE_LAYERS,
        "repetitions": setting.repetitions,
    }
    result = results.new_result(EXPERIMENT, rows, parameters, chosen.device)
    if set(sections) < set(setting.sections):
        result = results.with_recorded(result, chosen.out)
    record(result, chosen.out)


if __name__ == "__main__":
    main()
