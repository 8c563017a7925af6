"""KV memory wasted by reservations and by pages, requests served in the same bytes, and what pages cost attention.

    python experiments/03_paged_vs_contiguous/run.py [--device cpu|cuda] [--out DIR]
    python experiments/03_paged_vs_contiguous/run.py --predict

The memory part computes no model: it drives the engine's own scheduler. The attention part runs the engine's backends,
in SmolLM2-135M's shape in float32 on a CPU, in Qwen3-0.6B's in bfloat16 on a GPU. The result goes to
experiments/03_paged_vs_contiguous/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import figures, results
from book.experiment import command_line, graph_of, in_rounds, predicted, record
from book.static_batching import make_requests
from book.timing import measure
from book.units import quantity
from mini_engine.attention.backend import AttentionBackend, create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.roofline import Machine
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler

MAX_LEN = 2048  # longest prompt and output together
ATTENTION, FROM_GRAPH = "attention of a layer", "attention of a layer, from a CUDA graph"
POOL = 16 * MAX_LEN  # tokens: sixteen reservations of the longest request
PAGE_SIZES = (1, 16, 64, 128)
NUM_REQUESTS = 2000
MAX_ROWS = 256  # requests that run at once
ROUNDS = 3


# Memory ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lognormal:
    """Lengths in tokens, lognormal and cut off at the longest: most are short, a few are very long."""

    median: int
    sigma: float
    longest: int

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return rng.lognormal(np.log(self.median), self.sigma, count).round().clip(1, self.longest)

    @property
    def mean(self) -> float:
        """The mean if nothing is cut off."""
        return self.median * math.exp(self.sigma**2 / 2)

    @property
    def mean_square(self) -> float:
        """The mean of the square if nothing is cut off."""
        return self.median**2 * math.exp(2 * self.sigma**2)


PROMPTS, OUTPUTS = Lognormal(256, 1.0, 1536), Lognormal(128, 0.8, 512)


def request_lengths(num_requests: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) lengths of requests."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (lengths.draw(rng, num_requests) for lengths in (PROMPTS, OUTPUTS))
    return [(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


class Reservations(PageTable):
    """Contiguous memory: a request gets one reservation of neighboring slots, in the first gap that is long enough.

    Args:
        num_tokens: slots of the pool.
        lengths: the size of each reservation, in the order in which the requests are admitted.
    """

    def __init__(self, num_tokens: int, lengths: Sequence[int]) -> None:
        super().__init__(num_tokens, page_size=1, max_rows=MAX_ROWS, max_pages_per_row=1)  # its table stays empty
        self._lengths = deque(lengths)
        self.spans: dict[int, tuple[int, int]] = {}  # row: first slot, and the one after the last

    def allocate(self) -> int:
        """Take a row and its reservation, which holds everything that the request will ever need."""
        start, length = self._gap(self._lengths[0]), self._lengths.popleft()
        assert start is not None, "admitted without a gap"
        row = super().allocate()
        self.spans[row] = (start, start + length)
        self.num_free_pages -= length
        return row

    def missing(self, rows: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, int]:
        return np.zeros(len(rows), dtype=np.int64), 0

    def release(self, row: int) -> None:
        start, end = self.spans.pop(row)
        self.num_free_pages += end - start
        super().release(row)

    def admit(self, num_tokens: int, num_pages: int, *, budget: int, free_pages: int, free_rows: int) -> int:
        """The scheduler's part of that name: a reservation needs a gap of its length, not only as many free slots."""
        return min(num_tokens, budget) if free_rows and self._gap(self._lengths[0]) is not None else 0

    def _gap(self, length: int) -> int | None:
        """The first slot of the first gap of that length."""
        start = 0
        for first, end in sorted(self.spans.values()):
            if first - start >= length:
                break
            start = end
        return start if self.num_pages - start >= length else None


@dataclass(frozen=True)
class Usage:
    """What the pool held, in tokens, on average over the steps in which a request waited for memory.

    Attributes:
        keys: slots with a key in them.
        empty: slots that are reserved and hold none.
        free: slots without an owner that no waiting request could take.
        at_once: requests that ran.
        recomputed: tokens computed again after preemptions, in the whole run.
    """

    keys: float
    empty: float
    free: float
    at_once: float
    recomputed: int


def serve(table: PageTable, lengths: Sequence[tuple[int, int]]) -> Usage:
    """Run requests that all wait at the start to their ends: an engine's bookkeeping without its model."""
    scheduler = Scheduler(
        table,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=2048,
        window=None,
        prefix_sharing=False,
        parts=replace(Parts(), admit=table.admit) if isinstance(table, Reservations) else Parts(),
    )
    prompts = [[1] * prompt for prompt, _ in lengths]
    params = [SamplingParams(max_tokens=output, ignore_eos=True) for _, output in lengths]
    for request in make_requests(prompts, params, max_model_len=MAX_LEN):
        scheduler.add(request)
    pool, running = table.num_pages * table.page_size, scheduler.running
    samples, computed = [], 0
    while scheduler.waiting or len(running):
        schedule = scheduler.schedule()
        assert schedule is not None, "every token is known at once"
        rows = schedule.rows
        running.num_computed[rows] += schedule.num_new
        computed += int(schedule.num_new.sum())
        if scheduler.waiting:
            keys = int(running.num_computed[running.order].sum())
            free = table.num_free_pages * table.page_size
            samples.append((keys, pool - free - keys, free, len(running)))
        sampling = rows[running.num_computed[rows] == running.num_scheduled[rows]]
        running.num_scheduled[sampling] += 1
        for request in running.requests_of(running.append(sampling, np.ones(len(sampling), dtype=np.int64))):
            scheduler.remove(request)
    needed = sum(prompt + output - 1 for prompt, output in lengths)  # the last token is never fed back
    keys, empty, free, at_once = np.mean(samples, axis=0).tolist()
    return Usage(keys, empty, free, at_once, computed - needed)


def mean_size(lengths: Sequence[tuple[int, int]]) -> float:
    """Keys of a running request, on average over all steps of all requests: an output of o tokens takes o steps."""
    steps = sum(output for _, output in lengths)
    return sum(output * prompt + output * (output - 1) / 2 for prompt, output in lengths) / steps


def allocations(lengths: Sequence[tuple[int, int]], pool: int = POOL) -> dict[str, Callable[[], PageTable]]:
    """Every way to divide the pool."""
    paged = {
        f"pages of {size}": lambda size=size: PageTable(pool // size, size, MAX_ROWS, -(-MAX_LEN // size))
        for size in PAGE_SIZES
    }
    return {
        "reservations of the maximum": lambda: Reservations(pool, [MAX_LEN] * len(lengths)),
        "reservations of the true length": lambda: Reservations(pool, [prompt + output for prompt, output in lengths]),
        **paged,
    }


def memory_rows(num_requests: int, pool: int = POOL) -> list[results.Row]:
    lengths = request_lengths(num_requests)
    at_once = pool / mean_size(lengths)
    needed = sum(prompt + output - 1 for prompt, output in lengths)  # the last token is never fed back
    waste = "none: 0 would be best"
    rows = []
    for name, make in allocations(lengths, pool).items():
        usage = serve(make(), lengths)
        case: dict[str, results.Setting] = {"memory": name}
        rows += [
            results.Row("slots with keys", usage.keys, "tokens", pool, "the pool", case),
            results.Row("slots reserved, empty", usage.empty, "tokens", None, waste, case),
            results.Row("slots free, of no use", usage.free, "tokens", None, waste, case),
            results.Row("requests at once", usage.at_once, "requests", at_once, "pool / mean keys of one", case),
            results.Row(
                "tokens recomputed", usage.recomputed, "tokens", None, f"{waste}, beside {needed:,} computed once", case
            ),
        ]
    return rows


# Attention ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Decodes of `batch_size` sequences of `kv_len` keys, in the shape of a model."""

    model: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    batch_size: int
    kv_len: int
    num_layers: int  # together more than any cache holds
    page_sizes: dict[str, tuple[int, ...]]  # of each backend

    def specs(self) -> list[AttentionSpec]:
        heads = self.num_qo_heads, self.num_kv_heads, self.head_dim
        return [AttentionSpec(i, *heads, scale=self.head_dim**-0.5) for i in range(self.num_layers)]

    @property
    def bytes_per_layer(self) -> int:
        return self.batch_size * self.kv_len * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


CPU = Setting("SmolLM2-135M", 9, 3, 64, torch.float32, 8, 1024, 24, {"torch": (1, 16, 128), "flex": (16, 128)})
GPU = Setting("Qwen3-0.6B", 16, 8, 128, torch.bfloat16, 32, 2048, 8, {"torch": PAGE_SIZES, "flex": (128,)})


def decode_step(
    setting: Setting, backend: str, page_size: int, scattered: bool, device: torch.device | str
) -> tuple[AttentionBackend, StepBatch]:
    """A backend over a full cache, planned for a decode of every sequence, its pages in random order or side by side.

    The sequences have the same keys whatever their pages. A page as long as a sequence is the contiguous cache.
    """
    num_pages = setting.batch_size * setting.kv_len // page_size
    shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    order = shuffled if scattered else torch.arange(num_pages)
    cache = PagedKVCache(setting.specs(), num_pages, page_size, setting.dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for pair in cache.layers:
        for tensor in pair:
            logical = torch.randn(tensor.shape, generator=generator, device=device).to(setting.dtype)
            tensor[order.to(device)] = logical
    batch = StepBatch.build(
        token_ids=[0] * setting.batch_size,
        num_new=[1] * setting.batch_size,
        kv_lens=[setting.kv_len] * setting.batch_size,
        pages=order.numpy(),
        page_size=page_size,
        device=device,
    )
    made = create_backend(backend, setting.specs(), cache, Parts())
    made.plan(batch)
    return made, batch


def attention_rows(setting: Setting, device: torch.device, machine: Machine, runs: int = 7) -> list[results.Row]:
    """Time of one layer's attention, and of the plan of a step, over one page for each sequence and over many."""
    rows = []
    shape = (setting.batch_size, setting.num_qo_heads, setting.head_dim)
    for backend, page_sizes in setting.page_sizes.items():
        # The smallest pages lie in order too: what it costs to have them, apart from where they are.
        cases = [(setting.kv_len, False), (min(page_sizes), False), *((size, True) for size in page_sizes)]
        for page_size, scattered in cases:
            made, batch = decode_step(setting, backend, page_size, scattered, device)
            q = torch.randn(shape, device=device).to(setting.dtype)

            def layers(made: AttentionBackend = made, q: torch.Tensor = q) -> None:
                for layer in range(setting.num_layers):
                    made.run(layer, q)

            def plan(made: AttentionBackend = made, batch: StepBatch = batch) -> None:
                made.plan(batch)

            with torch.inference_mode():
                calls: dict[str, Callable[[], object]] = {ATTENTION: layers}
                if device.type == "cuda":
                    calls[FROM_GRAPH] = graph_of([layers])
                times = {
                    figure: min(measure(call, runs=runs, device=device.type).runs) / setting.num_layers
                    for figure, call in calls.items()
                }
                plan_time = min(measure(plan, runs=runs).runs)  # host time
            where = "scattered" if scattered else "in order"
            pages = "one a sequence" if page_size == setting.kv_len else f"of {page_size}, {where}"
            case: dict[str, results.Setting] = {"backend": backend, "pages": pages}
            bound = setting.bytes_per_layer / machine.bandwidth
            rows += [
                results.Row(figure, seconds, "s", bound, "K and V / bandwidth", case)
                for figure, seconds in times.items()
            ]
            rows.append(results.Row("plan of a step", plan_time, "s", None, "bookkeeping: moves no keys", case))
    return rows


# Figures --------------------------------------------------------------------------------------------------------------


def draw_memory(result: results.Result) -> Figure:
    """Where the pool went under each allocation, in shares of it; beside it how many requests ran at once."""
    names = [str(row.case["memory"]) for row in result.rows if row.figure == "slots with keys"]
    figure, axes = figures.new(3.6)
    ax, left = axes[0, 0], np.zeros(len(names))
    parts = {"keys": "slots with keys", "reserved, empty": "slots reserved, empty", "free": "slots free, of no use"}
    for (label, part), color in zip(parts.items(), (figures.PALETTE[0], figures.PALETTE[1], figures.GRID), strict=True):
        share = np.array([result.find(part, memory=name).value for name in names]) / int(result.parameters["pool"])
        ax.barh(range(len(names)), share, left=left, color=color, label=label, height=0.65)
        left += share
    for row, name in enumerate(names):
        at_once = result.find("requests at once", memory=name).value
        ax.text(1.02, row, f"{at_once:.0f} at once", va="center", fontsize=11)
    ax.set_yticks(range(len(names)), [name.replace("reservations of the", "reserved:") for name in names])
    ax.invert_yaxis()
    ax.set(xlim=(0, 1), xlabel="share of the pool")
    ax.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    return figure


def draw_indirection(result: results.Result) -> Figure:
    """Attention of one layer over one page for each sequence and over smaller pages, a color for each backend.

    The times are those of CUDA graphs where there are any, and otherwise include the host's.
    """
    figure = FROM_GRAPH if any(row.figure == FROM_GRAPH for row in result.rows) else ATTENTION
    rows = [row for row in result.rows if row.figure == figure]
    labels = []
    for row in rows:
        pages = str(row.case["pages"])
        labels.append(f"{row.case['backend']}, " + (f"pages {pages}" if pages.startswith("of") else "one page each"))
    drawn, axes = figures.new(0.9 + 0.45 * len(rows))
    values, bounds = [row.value for row in rows], [row.bound for row in rows]
    colors = [figures.PALETTE[0 if row.case["backend"] == "torch" else 2] for row in rows]
    figures.draw_bars_with_bound(labels, values, bounds, "s", ax=axes[0, 0], colors=colors)
    return drawn


# Prediction -----------------------------------------------------------------------------------------------------------

# Assumed rates. The prediction is about reading memory, so the rates of arithmetic do not matter.
ASSUMED_CPU = Machine("a CPU", "float32", bandwidth=50e9, flops=math.inf)
ASSUMED_GPU = Machine("an H200", "bfloat16", bandwidth=4.3e12, flops=math.inf)
# How often `torch` moves the bytes of scattered pages, because it gathers them first.
GATHER_MOVES = ("the keys are read", "the cache lines of the copy are read", "they are written", "the copy is read")


def memory_predictions() -> dict[str, str]:
    """Derive the table of the README: slots of a request, requests at once and the share of slots with keys."""
    # A request of o output tokens runs for o steps, so an average over steps weighs it by o.
    grown = OUTPUTS.mean_square / OUTPUTS.mean
    keys = PROMPTS.mean + grown / 2
    slots = {
        "reservations of the maximum": MAX_LEN,
        "reservations of the true length": PROMPTS.mean + grown,
        **{f"pages of {size}": keys + (size - 1) / 2 for size in PAGE_SIZES},  # half of the last page is empty
    }
    return {
        "a prompt and an output": f"{PROMPTS.mean:.0f} and {OUTPUTS.mean:.0f} tokens on average",
        "keys of a running request": f"{PROMPTS.mean:.0f} + {grown / 2:.0f} = {keys:.0f}",
        **{
            name: f"{own:,.0f} slots of a request, {POOL / own:.1f} at once, {keys / own:.1%} of the slots with keys"
            for name, own in slots.items()
        },
    }


def predictions() -> str:
    """Derive the README's predictions for memory, and for attention on both devices."""
    read = CPU.bytes_per_layer / ASSUMED_CPU.bandwidth
    page_size = min(CPU.page_sizes["flex"])
    page = page_size * CPU.num_kv_heads * CPU.head_dim * CPU.dtype.itemsize
    return predicted(
        memory_predictions()
        | {
            "CPU: keys and values of a layer": f"{quantity(CPU.bytes_per_layer, 'B')}, {quantity(read, 's')}",
            "CPU: gathered by torch": f"{len(GATHER_MOVES)} times the bytes, {quantity(len(GATHER_MOVES) * read, 's')}",
            f"CPU: a page of {page_size} tokens for flex": f"{page / 2**10:.0f} contiguous KiB",
            "H200: keys and values of a layer": f"{quantity(GPU.bytes_per_layer, 'B')}, "
            f"{quantity(GPU.bytes_per_layer / ASSUMED_GPU.bandwidth, 's')}",
        }
    )


def main() -> None:
    arguments = command_line(__doc__, predictions).parse_args()
    device = torch.device(arguments.device)
    setting = GPU if device.type == "cuda" else CPU
    machine, measured = in_rounds(partial(attention_rows, setting, device), device, setting.dtype, ROUNDS)
    source = "this is the bound of the attention"
    rows = [
        *memory_rows(NUM_REQUESTS),
        results.Row("memory read", machine.bandwidth, "B/s", None, source),
        *measured,
    ]
    parameters: dict[str, results.Setting] = {
        "pool": POOL,
        "requests": NUM_REQUESTS,
        "longest": MAX_LEN,
        "shape": setting.model,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "decodes": setting.batch_size,
        "keys of each": setting.kv_len,
    }
    result = results.new_result("03_paged_vs_contiguous", rows, parameters, arguments.device)
    shown = ("slots with keys", "requests at once", "tokens recomputed", "memory read", ATTENTION, FROM_GRAPH)
    record(result, arguments.out, shown)


if __name__ == "__main__":
    main()
