"""Attention in chunks of keys beside naive and fused attention: memory and time, from 1,024 to 131,072 keys.

    python experiments/02_chunked_attention/run.py [--device cpu|cuda] [--out DIR] [--predict]

On a GPU the heads are Qwen3-0.6B's in bfloat16, on a CPU SmolLM2-135M's in float32. The result goes to
experiments/02_chunked_attention/results/<device>.json, below DIR where one is given. `--predict` prints what the README
predicts, and stops.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.cpp_extension import CUDA_HOME

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import results
from book.experiment import command_line, in_rounds, predicted, record
from book.memory import measure_memory
from book.units import quantity
from mini_engine.attention.naive import masked_attention, sdpa_attention
from mini_engine.attention.state import chunked_attention
from mini_engine.kernels.flash_decoding import TILE, DecodeWork, FlashDecoding, share_tiles
from mini_engine.roofline import Cost, Machine, attention_cost
from mini_engine.transfer import to_device

LONGEST = 131_072
ROUNDS = 3
PAGE_SIZE, CALLS = 16, 10  # of the decodes by splits: keys per page, and launches that are timed together
READ = "this experiment's memory read"
WAYS = NAIVE, CHUNKS, FUSED = "naive", "chunks", "fused"
EXPERIMENT, BY_CHUNK = "02_chunked_attention", " by chunk size"
BY_SPLITS, SPLITS = "decode: bandwidth by splits", (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 20, 28, 33)
IN_README = {
    "memory read", "matrix product", "prompt: memory", "prompt: time", "piece: time", "decode: time", BY_SPLITS,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Attention of `queries` queries over `keys` keys; every query sees every key."""

    work: str  # "prompt", "piece" or "decode"
    queries: int
    keys: int


@dataclass(frozen=True)
class Setting:
    """What is measured on one kind of device."""

    model: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    chunk_size: int
    timed: tuple[Case, ...]
    counted: tuple[Case, ...]  # too long to run here: memory only
    swept: tuple[Case, ...]  # these run with chunks of many sizes
    most_memory: int  # bytes; naive attention that needs more at its peak is counted, but does not run
    pool_size: int  # operands rotate through this many numbers, so that none waits in a cache

    def cost(self, case: Case) -> Cost:
        """Keys and values read once, scores never in memory: no attention can do with less."""
        heads = self.num_qo_heads, self.num_kv_heads, self.head_dim
        return attention_cost(case.queries, case.keys, *heads, self.dtype.itemsize, causal=False)

    def output_bytes(self, case: Case) -> int:
        return case.queries * self.num_qo_heads * self.head_dim * self.dtype.itemsize


def prompts(*lengths: int) -> list[Case]:
    return [Case("prompt", length, length) for length in lengths]


def pieces(queries: int, *lengths: int) -> list[Case]:
    return [Case("piece", queries, length) for length in lengths]


def decodes(*lengths: int) -> list[Case]:
    return [Case("decode", 1, length) for length in lengths]


LENGTHS = (1024, 8192, 32_768, LONGEST)
CPU = Setting(
    model="SmolLM2-135M",
    num_qo_heads=9,
    num_kv_heads=3,
    head_dim=64,
    dtype=torch.float32,
    chunk_size=256,
    timed=(*prompts(1024, 2048, 4096), *pieces(256, *LENGTHS), *decodes(*LENGTHS)),
    counted=(*prompts(16_384, LONGEST),),
    swept=(*prompts(2048), *pieces(256, 4096), *decodes(16_384)),
    most_memory=2**32,
    pool_size=2**26,
)
GPU = Setting(
    model="Qwen3-0.6B",
    num_qo_heads=16,
    num_kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    chunk_size=1024,
    timed=(*prompts(*LENGTHS), *pieces(2048, *LENGTHS), *decodes(*LENGTHS)),
    counted=(),
    swept=(*prompts(8192), *pieces(2048, 16_384), *decodes(16_384)),
    most_memory=100 * 10**9,
    pool_size=2**30,
)

Operands = tuple[Tensor, Tensor, Tensor]  # q, k, v
Way = Callable[..., object]  # of computing attention: q, k, v -> output or state
Name = str | int  # of a way; a number: chunks of so many keys
Call = Callable[[], object]


def chunks(setting: Setting, *sizes: int) -> dict[Name, Way]:
    scale = setting.head_dim**-0.5
    return {size: partial(chunked_attention, scale=scale, chunk_size=size) for size in sizes}


def whole(setting: Setting) -> dict[Name, Way]:
    scale = setting.head_dim**-0.5
    return {NAIVE: partial(masked_attention, scale=scale), FUSED: partial(sdpa_attention, scale=scale)}


def chunk_sizes(case: Case) -> list[int]:
    """16, 64, 256 and so on, and all keys in one chunk."""
    return [*itertools.takewhile(lambda size: size < case.keys, (16 * 4**i for i in itertools.count())), case.keys]


def shapes(setting: Setting, case: Case) -> list[tuple[int, int, int]]:
    """Of q, k and v."""
    keys = case.keys, setting.num_kv_heads, setting.head_dim
    return [(case.queries, setting.num_qo_heads, setting.head_dim), keys, keys]


def operands(setting: Setting, case: Case, pool: Float[Tensor, " numbers"]) -> Iterator[Operands]:
    """Queries, keys and values cut from the pool, from another place each time, around and around."""
    sizes = [math.prod(shape) for shape in shapes(setting, case)]
    for place in itertools.cycle(range(pool.numel() // sum(sizes))):
        parts = pool[place * sum(sizes) :][: sum(sizes)].split(sizes)
        q, k, v = (part.view(shape) for part, shape in zip(parts, shapes(setting, case), strict=True))
        yield q, k, v


def counted_peak(setting: Setting, case: Case, way: Way) -> int:
    """Bytes of the tensors that `way` has alive at once, counted where tensors have shapes and take no room."""
    q, k, v = (torch.empty(shape, dtype=setting.dtype, device="meta") for shape in shapes(setting, case))
    return measure_memory(lambda: way(q, k, v)).peak


def measured_peak(call: Call, device: torch.device) -> int:
    """Bytes that a call has at its peak: by a GPU's allocator, counted on a CPU."""
    if device.type != "cuda":
        return measure_memory(call).peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def seconds_of(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def fastest(
    calls: Mapping[Name, Call], device: torch.device, turns: int = 10, budget: float = 0.8
) -> dict[Name, float]:
    """Seconds of each call: the fastest of its turns, at least one, at most `turns` and what `budget` seconds allow.

    The calls take turns, so that whatever else the machine does falls on all of them.
    """
    best = dict.fromkeys(calls, math.inf)
    begin = time.perf_counter()
    for turn in range(turns):
        spent = time.perf_counter() - begin
        if turn > 0 and spent + spent / turn > budget:
            break
        for name, call in calls.items():
            best[name] = min(best[name], seconds_of(call, device))
    return best


def rows_of(
    setting: Setting, case: Case, candidates: Mapping[Name, Way], pool: Tensor, machine: Machine, suffix: str = ""
) -> list[results.Row]:
    """Memory and time of each candidate, beside the bounds that all of them share.

    Naive attention that would need too much memory is counted, and not timed.
    """
    device, sets, cost = pool.device, operands(setting, case, pool), setting.cost(case)
    peaks: dict[Name, int] = {}
    calls: dict[Name, Call] = {}
    for name, way in candidates.items():
        if name == NAIVE and counted_peak(setting, case, way) > setting.most_memory:
            continue

        def call(way: Way = way) -> object:
            return way(*next(sets))

        # A first call, on which libraries choose their kernels and allocators find their blocks, is not timed.
        peaks[name], calls[name] = measured_peak(call, device), call
    bound_from = "bytes / bandwidth" if cost.is_memory_bound(machine) else "FLOPs / FLOP rate"
    bound, by = cost.seconds(machine), "by the allocator" if device.type == "cuda" else "counted"
    times = fastest(calls, device)
    return [
        *[memory_row(setting, case, name, peak, by, suffix) for name, peak in peaks.items()],
        *[counted_row(setting, case, name, candidates[name]) for name in candidates if name not in calls],
        *[
            results.Row(f"{case.work}: time{suffix}", seconds, "s", bound, bound_from, labels(case, name))
            for name, seconds in times.items()
        ],
    ]


def counted_row(setting: Setting, case: Case, name: Name, way: Way) -> results.Row:
    return memory_row(setting, case, name, counted_peak(setting, case, way), "counted")


def memory_row(setting: Setting, case: Case, name: Name, peak: int, by: str, suffix: str = "") -> results.Row:
    bound = setting.output_bytes(case)
    return results.Row(f"{case.work}: memory{suffix}", peak, "B", bound, f"the output; {by}", labels(case, name))


def labels(case: Case, name: Name) -> dict[str, results.Setting]:
    sizes: dict[str, results.Setting] = {"queries": case.queries, "keys": case.keys}
    return sizes | ({"way": name} if isinstance(name, str) else {"way": CHUNKS, "chunk": name})


def all_rows(setting: Setting, device: torch.device, machine: Machine) -> list[results.Row]:
    pool = torch.randn(setting.pool_size, device=device, dtype=setting.dtype)
    rows = []
    for case in setting.timed:
        candidates = whole(setting) | chunks(setting, setting.chunk_size)
        rows += rows_of(setting, case, candidates, pool, machine)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of one case are too small for the next
    for case in setting.counted:
        ways = {NAIVE: whole(setting)[NAIVE]} | chunks(setting, setting.chunk_size)
        rows += [counted_row(setting, case, name, way) for name, way in ways.items()]
    for case in setting.swept:
        candidates = whole(setting) | chunks(setting, *chunk_sizes(case))
        rows += rows_of(setting, case, candidates, pool, machine, BY_CHUNK)
    return rows


def split_rows(setting: Setting, device: torch.device, machine: Machine) -> list[results.Row]:
    """Bandwidth of a decode over the longest keys, by the number of splits, on the engine's own decode kernel.

    PyTorch chooses the splits of its kernel itself. Ours takes any number of them, and gives each a block for every KV
    head. It needs a Hopper GPU and nvcc; elsewhere there are no rows.
    """
    if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] != 9 or CUDA_HOME is None:
        return []
    heads = setting.num_qo_heads, setting.num_kv_heads, setting.head_dim
    num_pages = LONGEST // PAGE_SIZE
    kernel = FlashDecoding(*heads, PAGE_SIZE, "NHD", setting.dtype, device)
    shape = num_pages, PAGE_SIZE, *heads[1:]
    k, v = (torch.randn(shape, device=device, dtype=setting.dtype) for _ in range(2))
    q = torch.randn(1, heads[0], setting.head_dim, device=device, dtype=setting.dtype)
    out, pages = torch.empty_like(q), torch.arange(num_pages, dtype=torch.int32, device=device)
    kv_lens, indptr = np.array([LONGEST], dtype=np.int32), np.array([0, num_pages], dtype=np.int32)

    def call_with(splits: int) -> Call:
        arrays = share_tiles(kv_lens, indptr, splits)
        padding = np.zeros((kernel.num_ranges - splits, 8), dtype=np.int32)
        arrays["ranges"] = np.concatenate((arrays["ranges"], padding))  # a range without tiles does nothing
        work = DecodeWork(**to_device(arrays, device), pages=pages)

        def call() -> None:
            for _ in range(CALLS):
                kernel(q, (k, v), work, out, setting.head_dim**-0.5)

        return call

    calls: dict[Name, Call] = {splits: call_with(splits) for splits in SPLITS if splits <= kernel.num_ranges}
    for call in calls.values():
        call()
    size = CALLS * (k.nbytes + v.nbytes)  # several times as much as any cache holds
    case: dict[str, results.Setting] = {"keys": LONGEST}
    return [
        results.Row(BY_SPLITS, size / seconds, "B/s", machine.bandwidth, READ, case | {"splits": splits})
        for splits, seconds in fastest(calls, device).items()
    ]


def round_of(setting: Setting, device: torch.device, machine: Machine) -> list[results.Row]:
    return all_rows(setting, device, machine) + split_rows(setting, device, machine)


# --- prediction ------------------------------------------------------------------------------------------------------

ASSUMED = Machine("a CPU", "float32", bandwidth=52e9, flops=215e9)
TENSOR_CORES = Machine("a GPU", "bfloat16", bandwidth=4.3e12, flops=790e12)
CUDA_CORES = replace(TENSOR_CORES, dtype="float32", flops=67e12)
CACHE = 32e6  # bytes of the CPU's last-level cache
CALL, LAUNCH, COPY = 0.8e-6, 10e-6, 1e-6  # seconds: a call on the CPU, a launch on the GPU, a copy to shared memory
STAGES = 12  # tiles of 16 keys that a block of the decode kernel copies ahead; `flash_decoding.cu` for heads of 128

# Read from the code by hand. Bytes for each score: alive at the peak, then read and written by each operator.
NAIVE_ALIVE = 4 + 2 * 4 + 1  # scores; weights before and after masking; mask
TILE_ALIVE = 4 + 4 + 4  # scores, their difference from the LSE, its exponential
NAIVE_TRAFFIC = {"q @ k": 4, "scale": 8, "softmax": 8, "find -inf": 4 + 1, "masked_fill": 4 + 1 + 4, "weights @ v": 4}
LOGSUMEXP = {"maximum": 4, "subtract it": 8, "exp": 8, "sum": 4}
TILE_TRAFFIC = {"q @ k": 4, "scale": 8} | LOGSUMEXP | {"subtract the LSE": 8, "exp of that": 8, "weights @ v": 4}
NAIVE_BYTES, TILE_BYTES = sum(NAIVE_TRAFFIC.values()), sum(TILE_TRAFFIC.values())
MERGED = 2 + 2 + 3  # outputs that a merge reads or writes: each is weighted, and their sum is written
OUTPUTS = 3  # alive beside the scores of a tile
OPERATORS = 21  # that each tile calls, with its merge


def scores(setting: Setting, case: Case) -> int:
    """Number of scores, over all query heads."""
    return setting.num_qo_heads * case.queries * case.keys


def tile_scores(setting: Setting, case: Case) -> int:
    """Number of scores of one tile."""
    return scores(setting, replace(case, keys=setting.chunk_size))


def keys_in_cache(setting: Setting, case: Case, alive: int) -> float:
    """Number of keys whose scores fit in the cache, with `alive` bytes for each score."""
    return CACHE / (alive * scores(setting, replace(case, keys=1)))


def memory_prediction() -> dict[str, str]:
    """Memory of a prompt on the CPU, at the peak."""
    found = {}
    for case in prompts(4096, LONGEST):
        naive = NAIVE_ALIVE * scores(CPU, case)
        tile = TILE_ALIVE * tile_scores(CPU, case) + OUTPUTS * CPU.output_bytes(case)
        found[f"memory, prompt of {case.keys:,} tokens"] = (
            f"naive {quantity(naive, 'B')}, tiles {quantity(tile, 'B')}: "
            f"about m / c = {case.keys // CPU.chunk_size} times less"
        )
    return found


def time_prediction() -> dict[str, str]:
    """The three kinds of work on the CPU: arithmetic, then memory traffic, then calls."""
    prompt, piece, decode = *prompts(4096), *pieces(256, LONGEST), *decodes(LONGEST)
    merges = MERGED * CPU.output_bytes(prompt) * prompt.keys / CPU.chunk_size
    compute = CPU.cost(prompt).flops / ASSUMED.flops
    naive = NAIVE_BYTES * scores(CPU, prompt) / ASSUMED.bandwidth
    tiles = (TILE_BYTES * scores(CPU, prompt) + merges) / ASSUMED.bandwidth

    # A piece: the scores of a tile stay in the cache, so only the inputs and the output go through memory.
    piece_compute, inputs = CPU.cost(piece).flops / ASSUMED.flops, CPU.cost(piece).bytes / ASSUMED.bandwidth
    piece_naive = NAIVE_BYTES * scores(CPU, piece) / ASSUMED.bandwidth
    faster = (piece_compute + inputs + piece_naive) / (piece_compute + inputs)

    bound, num_tiles = CPU.cost(decode).seconds(ASSUMED), LONGEST // CPU.chunk_size
    calls = num_tiles * OPERATORS * CALL
    return {
        "prompt: traffic for each score": f"naive {NAIVE_BYTES} bytes, tiles {TILE_BYTES} bytes",
        f"prompt of {prompt.keys:,} tokens: arithmetic": quantity(compute, "s"),
        "its memory traffic": f"naive {quantity(naive, 's')}, tiles {quantity(tiles, 's')}",
        "both": f"naive {quantity(compute + naive, 's')}, tiles {quantity(compute + tiles, 's')}: "
        f"{(compute + tiles) / (compute + naive):.2f} times as long",
        "piece: scores of a tile": quantity(4 * tile_scores(CPU, piece), "B"),
        "keys from which naive attention exceeds the cache": f"{keys_in_cache(CPU, piece, NAIVE_ALIVE):,.0f}",
        f"piece over {LONGEST:,} keys": f"naive {quantity(piece_compute, 's')} + {quantity(piece_naive, 's')}, "
        f"tiles {quantity(piece_compute + inputs, 's')}: {faster:.1f} times as fast",
        f"decode step with {LONGEST:,} keys": f"scores {quantity(4 * scores(CPU, decode), 'B')}, "
        f"keys and values {quantity(CPU.cost(decode).bytes, 'B')}, read in {quantity(bound, 's')}",
        f"calls of its {num_tiles} tiles": f"{quantity(calls, 's')}, {quantity(OPERATORS * CALL, 's')} for each: "
        f"{(bound + calls) / bound:.1f} times the bound",
    }


def tile_size_prediction() -> dict[str, str]:
    """Limits on the size of a tile on the CPU: merges from below, the cache from above."""
    piece, prompt = *pieces(256, LONGEST), *prompts(2048)
    equal = MERGED * CPU.head_dim * 4 / TILE_BYTES
    most_piece, most_prompt = (keys_in_cache(CPU, case, TILE_ALIVE) for case in (piece, prompt))
    return {
        "tile whose scores cost as much as its merge": f"{equal:.0f} keys",
        f"merges of tiles of {CPU.chunk_size} keys": f"1/{CPU.chunk_size / equal:.0f} of the traffic of the scores",
        "largest tile in the cache": f"{most_piece:,.0f} keys for a piece of {piece.queries} queries, "
        f"{most_prompt:,.0f} for a prompt of {prompt.queries:,}",
    }


def gpu_prediction() -> dict[str, str]:
    """The longest prompt and the longest decode step on the GPU, whose tiles compute in float32."""
    prompt, decode = *prompts(LONGEST), *decodes(LONGEST)
    bound, arithmetic = (GPU.cost(prompt).flops / machine.flops for machine in (TENSOR_CORES, CUDA_CORES))
    traffic = TILE_BYTES * scores(GPU, prompt) / CUDA_CORES.bandwidth
    tile, naive = TILE_ALIVE * tile_scores(GPU, prompt), NAIVE_ALIVE * scores(GPU, prompt)
    num_tiles = LONGEST // GPU.chunk_size
    return {
        f"GPU: bound of a prompt of {LONGEST:,} tokens": quantity(bound, "s"),
        "its tiles": f"{quantity(arithmetic, 's')} for arithmetic, {quantity(traffic, 's')} for scores, together "
        f"{quantity(arithmetic + traffic, 's')}: {(arithmetic + traffic) / bound:.0f} times the bound",
        "its memory": f"tiles {quantity(tile, 'B')}, naive {quantity(naive, 'B')}",
        f"GPU: bound of a decode step with {LONGEST:,} keys": quantity(GPU.cost(decode).seconds(TENSOR_CORES), "s", 4),
        f"launches of its {num_tiles} tiles": quantity(num_tiles * OPERATORS * LAUNCH, "s"),
    }


def split_prediction() -> dict[str, str]:
    """The engine's decode kernel: each split has a thread block for each KV head, and each block reads at one rate."""
    ahead = STAGES * TILE * 2 * GPU.head_dim * GPU.dtype.itemsize  # bytes: keys and values of one head
    block = ahead / COPY
    split, needed = GPU.num_kv_heads * block, math.ceil(TENSOR_CORES.bandwidth / block)
    return {
        "GPU: copied ahead by a block": f"{ahead / 2**10:.0f} KiB, so it reads {quantity(block / 1e12, 'TB/s')}",
        "one split": f"{GPU.num_kv_heads} blocks, {quantity(split / 1e12, 'TB/s')}, "
        f"{100 * split / TENSOR_CORES.bandwidth:.0f}% of the bandwidth",
        "blocks that use all of it": f"{needed}, {math.ceil(needed / GPU.num_kv_heads)} splits",
    }


def predictions() -> str:
    """Derive what the README predicts, in its order."""
    return predicted(
        memory_prediction() | time_prediction() | tile_size_prediction() | gpu_prediction() | split_prediction()
    )


def main() -> None:
    arguments = command_line(__doc__, predictions).parse_args()
    device = torch.device(arguments.device)
    setting = GPU if device.type == "cuda" else CPU
    torch.manual_seed(0)
    # glibc's malloc returns large blocks to the system on every free, and the next one is cleared page by page. Freeing
    # one block of 31 MiB raises the threshold: tensors up to that size reuse memory, as in a program that has run long.
    torch.empty(31 * 2**20, dtype=torch.uint8)
    with torch.inference_mode():
        machine, rows = in_rounds(partial(round_of, setting, device), device, setting.dtype, ROUNDS)
    source, dtype = "this is the bound of the others", machine.dtype
    rates = [
        results.Row("memory read", machine.bandwidth, "B/s", None, source),
        results.Row("matrix product", machine.flops, "FLOP/s", None, source, {"dtype": dtype}),
    ]
    parameters: dict[str, results.Setting] = {"model": setting.model, "dtype": dtype, "chunk_size": setting.chunk_size}
    result = results.new_result(EXPERIMENT, rates + rows, parameters, arguments.device)
    record(result, arguments.out, IN_README)


if __name__ == "__main__":
    main()
