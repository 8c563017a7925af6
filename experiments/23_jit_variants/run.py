"""Measure one attention variant written twice: for FlexAttention in Python, and for FlashInfer's JIT in C++.

    python experiments/23_jit_variants/run.py [--device cpu|cuda] [--out DIR]
    python experiments/23_jit_variants/run.py --predict

FlashInfer is measured where a GPU, nvcc and ninja are. The result goes to
experiments/23_jit_variants/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a kernel found in a cache would seem to compile at once
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from book import results
from book.experiment import command_line, predicted, record, seconds_in_turns
from book.units import quantity
from mini_engine.attention import masks
from mini_engine.attention.naive import alibi_slopes, attention_scores
from mini_engine.roofline import Cost, Machine, measure_machine, visible_pairs

EXPERIMENT = "23_jit_variants"
CAP, DECAY, WINDOW, SINKS = 20.0, 0.5, 1024, 4
BOUND = "the FLOPs of all pairs that the mask shows, at the measured rate"
COMPILING = "compilers have no bound"
EXACT = "the same in float64 has none"
ROUNDS = 9


@dataclass(frozen=True)
class Shape:
    """One layer's attention over a whole prompt."""

    num_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    dtype: torch.dtype


SHAPES = {
    "cpu": Shape(1024, 8, 4, 64, 128, torch.float32),
    "cuda": Shape(4096, 16, 8, 128, WINDOW, torch.bfloat16),  # Qwen3-0.6B's
}


@dataclass(frozen=True)
class Variant:
    """One variant, in both languages.

    Attributes:
        name: what it is called.
        score_mod: for FlexAttention; None leaves scores as they are.
        mask_mod: for FlexAttention.
        transform: C++ that returns the score of `logits`, the dot product of query and key.
        mask: C++ that returns whether a query sees a key; empty: the kernel's own causal mask.
        tensors: the tensors that the C++ code reads from `params`, by name.
    """

    name: str
    score_mod: masks.ScoreMod | None
    mask_mod: masks.MaskMod
    transform: str = "return logits * params.sm_scale;"
    mask: str = ""
    tensors: tuple[tuple[str, Tensor], ...] = ()


def variants(shape: Shape, device: torch.device) -> list[Variant]:
    """Return the plain kernel and four variants of it."""
    slopes, window = alibi_slopes(shape.num_qo_heads).to(device), shape.window

    def decay(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - DECAY * torch.log1p((q_idx - kv_idx).float())

    distance = "float(int(kv_len - qo_len + qo_idx) - int(kv_idx))"
    place = "const uint32_t place = kv_len - qo_len + min(qo_idx, qo_len - 1);"  # tiles are padded with queries
    seen = f"return kv_idx <= place && (place - kv_idx < {window}u || kv_idx < {SINKS}u);"
    return [
        Variant("causal", None, masks.causal),
        Variant(
            "soft-cap",
            masks.soft_cap(CAP),
            masks.causal,
            f"return {CAP}f * math::tanh(float(logits) * float(params.sm_scale) / {CAP}f);",
        ),
        Variant(
            "ALiBi",
            masks.alibi(slopes),
            masks.causal,
            f"return logits * params.sm_scale - params.slopes[qo_head_idx] * {distance};",
            tensors=(("slopes", slopes),),
        ),
        Variant(
            "logarithmic decay",
            decay,
            masks.causal,
            f"return logits * params.sm_scale - {DECAY}f * __logf(1.f + max({distance}, 0.f));",
        ),
        Variant("window and sinks", None, masks.attention_sinks(window, SINKS), mask=f"{place} {seen}"),
    ]


SOURCE = """
struct {name} : AttentionVariantBase {{
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ {name}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = window_left = params.get_kv_len(batch_idx);
    sm_scale_log2 = math::log2e;  // the transform below applies the scale
  }}
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{ {transform} }})
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{ {mask} }})
}};
"""


def oracle(variant: Variant, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The variant in float64, for the last 128 queries: scores, score_mod, mask_mod, softmax."""
    last = torch.arange(len(q) - 128, len(q), device=q.device)
    places = last[:, None], torch.arange(len(k), device=q.device)[None, :]
    scores = attention_scores(q[last].double(), k.double(), scale=scale).flatten(0, 1)  # [Hq, 128, m]
    heads = torch.arange(len(scores), device=q.device)[:, None, None]
    if variant.score_mod is not None:
        scores = variant.score_mod(scores, heads, heads, *places)
    mask = variant.mask_mod(heads, heads, *places)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    values = v.double().repeat_interleave(len(scores) // v.shape[1], dim=1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


Built = tuple[Callable[[], Tensor], float]  # computes [T, Hq, D], and the seconds until the first result


def built(make: Callable[[], Callable[[], Tensor]], device: torch.device) -> Built:
    """Build a kernel and run it once."""
    start = time.perf_counter()
    run = make()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return run, time.perf_counter() - start


def with_flex(variant: Variant, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlexAttention, compiled for this variant alone."""
    torch._dynamo.reset()
    attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    length = len(q)
    blocks = create_block_mask(variant.mask_mod, None, None, length, length, device=q.device)
    own = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def run() -> Tensor:
        out = attention(*own, score_mod=variant.score_mod, block_mask=blocks, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def with_flashinfer(variant: Variant, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Callable[[], Tensor]:
    """FlashInfer's FlashAttention-2 kernel, compiled by nvcc for this variant alone."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    struct = "Variant" + "".join(variant.name.title().split()).replace("-", "")
    source = SOURCE.format(name=struct, transform=variant.transform, mask=variant.mask or "return true;")
    names, tensors = [name for name, _ in variant.tensors], [tensor for _, tensor in variant.tensors]
    size, dtype = q.shape[2], q.dtype
    # Compiled modules are kept by name, so a new name compiles anew.
    arguments = (
        *(f"{struct}_{os.getpid()}", dtype, dtype, dtype, torch.int32, size, size),
        *(names, ["float"] * len(names), ["sm_scale"], ["double"], struct, source),
    )
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device=q.device),
        backend="fa2",
        jit_args=list(arguments),
        variant_owns_mask=bool(variant.mask),  # otherwise interior tiles are computed without the mask
    )
    indptr = torch.tensor([0, len(q)], dtype=torch.int32)
    wrapper.plan(
        indptr,
        indptr,
        q.shape[1],
        k.shape[1],
        size,
        causal=not variant.mask,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    return lambda: wrapper.run(q, k, v, *tensors, scale)


def has_flashinfer(device: torch.device) -> bool:
    """Whether FlashInfer can compile here."""
    return device.type == "cuda" and find_spec("flashinfer") is not None


def rows(shape: Shape, machine: Machine, device: torch.device) -> Iterator[results.Row]:
    """Compile time, run time, and error of each variant and library."""
    generator = torch.Generator(device).manual_seed(0)
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads
    q, k, v = (
        torch.randn(shape.num_tokens, n, shape.head_dim, dtype=shape.dtype, device=device, generator=generator)
        for n in heads
    )
    scale = shape.head_dim**-0.5
    built(partial(with_flex, variants(shape, device)[0], q, k, v, scale), device)  # so that no row starts the compiler
    makers = {"FlexAttention": with_flex} | ({"FlashInfer": with_flashinfer} if has_flashinfer(device) else {})
    runs, cases, bounds = list[Callable[[], Tensor]](), list[dict[str, results.Setting]](), list[float]()
    for variant in variants(shape, device):
        want, bound = oracle(variant, q, k, v, scale), bound_of(variant, shape).seconds(machine)
        for library, make in makers.items():
            run, compiling = built(partial(make, variant, q, k, v, scale), device)
            case: dict[str, results.Setting] = {"variant": variant.name, "library": library}
            yield results.Row("time until the first result", compiling, "s", None, COMPILING, case)
            error = float((run()[-128:].double() - want).abs().max())
            yield results.Row("largest error of the last 128 queries", error, "absolute", None, EXACT, case)
            runs, cases, bounds = [*runs, run], [*cases, case], [*bounds, bound]
    for seconds, case, bound in zip(timed(runs, device), cases, bounds, strict=True):
        spread = min(seconds), max(seconds)
        yield results.Row("run time", statistics.median(seconds), "s", bound, BOUND, case, spread)


def bound_of(variant: Variant, shape: Shape) -> Cost:
    """The FLOPs of all pairs that a variant's mask shows, and the bytes of queries, keys, values and output."""
    pairs = visible_pairs(shape.num_tokens, shape.num_tokens)
    if variant.mask:
        pairs = visible_pairs(shape.num_tokens, shape.num_tokens, window=shape.window)
        pairs += SINKS * (shape.num_tokens - shape.window)
    numbers = 2 * shape.num_tokens * (shape.num_qo_heads + shape.num_kv_heads) * shape.head_dim
    return Cost(4 * pairs * shape.num_qo_heads * shape.head_dim, numbers * shape.dtype.itemsize)


def timed(runs: list[Callable[[], Tensor]], device: torch.device) -> list[list[float]]:
    """Seconds of each run, in turns."""

    def waiting(run: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return call

    return seconds_in_turns([waiting(run) for run in runs], ROUNDS)


def predictions() -> str:
    """The numbers of the README's Prediction."""
    shape = SHAPES["cuda"]
    whole = visible_pairs(shape.num_tokens, shape.num_tokens)
    seen = visible_pairs(shape.num_tokens, shape.num_tokens, window=WINDOW) + SINKS * (shape.num_tokens - WINDOW)
    flops = 4 * shape.num_qo_heads * shape.head_dim * whole
    return predicted(
        {
            "causal: FLOPs of a prompt": quantity(flops, "FLOP"),
            "causal: at 300 TFLOP/s": quantity(flops / 300e12, "s"),
            "window and sinks: share of the pairs": f"{seen / whole:.0%}",
        }
    )


def main(argv: list[str] | None = None) -> None:
    """Measure all variants and record them."""
    arguments = command_line(__doc__ or "", predictions).parse_args(argv)
    device = torch.device(arguments.device)
    shape = SHAPES[device.type]
    machine = measure_machine(device, shape.dtype)
    parameters: dict[str, results.Setting] = {
        "tokens": shape.num_tokens,
        "heads": f"{shape.num_qo_heads} of {shape.head_dim}, {shape.num_kv_heads} KV heads",
        "window": shape.window,
        "dtype": str(shape.dtype).removeprefix("torch."),
    }
    found = []
    for row in rows(shape, machine, device):
        found.append(row)
        print(row.cells()[:5], flush=True)
    record(results.new_result(EXPERIMENT, found, parameters, arguments.device), arguments.out)


if __name__ == "__main__":
    main()
