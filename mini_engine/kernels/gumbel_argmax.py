"""Sample one token per row in one pass over the logits: temperature, Gumbel noise and argmax in two kernels.

`sampling.sample` is the reference. The noise is computed from the same random bits, so both draw the same token
unless the two largest sums of logit and noise are closer than the rounding errors of float32.

For many rows the arithmetic of the noise takes longer than reading the logits. Most of it is needed only for blocks of
tokens that may hold a better token than all earlier blocks, and an upper bound on the scores, which costs half as much,
identifies them. Of n blocks in random order, about 1 + 1/2 + ... + 1/n need it.
"""

from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor

from mini_engine import sampler as tables
from mini_engine.sampling import RECORD_DTYPE
from mini_engine.sampling_params import MAX_BAD_WORD_LEN

if TYPE_CHECKING:
    from mini_engine.sampler import Sampler

BLOCK = 512  # tokens that one program processes at a time: a power of two, and at most 65,536
NUM_PROGRAMS = 8192  # most programs, if rows are long: enough to fill a GPU several times over
MAX_SPLITS = 512  # programs per row
COUNT_LIMIT = tl.constexpr(2**15 - 1)


def word_of(field: str) -> tl.constexpr:
    """Return the place of a field in a record, in words of 32 bits."""
    return tl.constexpr(RECORD_DTYPE.fields[field][1] // 4)  # type: ignore[index]


RECORD_WORDS = tl.constexpr(tables.RECORD_WORDS)
TEMPERATURE, SEED, FLAGS = word_of("temperature"), word_of("seed"), word_of("flags")
PENALIZED, FILTERED = tl.constexpr(tables.PENALIZED), tl.constexpr(tables.FILTERED)
ADJUSTED = tl.constexpr(tables.ADJUSTED)
RECENT = tl.constexpr(MAX_BAD_WORD_LEN)


def gumbel_argmax(
    sampler: "Sampler",
    logits: Float[Tensor, "R V"],
    rows: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
    adjusted: Float32[Tensor, "R V"],
    maxima: Float32[Tensor, "R blocks"],
    thresholds: Float32[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Draw each row's token from softmax(logits / temperature), or take the largest logit at temperature 0; count it.

    Args:
        sampler: parameters and state of the rows.
        logits: [R, V] float16, bfloat16 or float32; tokens with a logit of -inf are never drawn.
        rows: [R] row of the page table of each row of logits.
        positions: [R] position of the token to sample.
        adjusted: [R, V] read instead, in rows whose logits are adjusted.
        maxima: largest logit of each block of tokens, in rows with a filter.
        thresholds: [R] smallest logit that the filters keep, in rows with a filter.

    Returns:
        [R] token ids, the lowest id if there are ties. NaN logits are never chosen; a row of only NaN gives token 0.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    # Rounded to a power of two, because each value needs its own kernel and a batch may have any number of rows.
    blocks_per_split = triton.next_power_of_2(
        max(triton.cdiv(num_rows * num_blocks, NUM_PROGRAMS), triton.cdiv(num_blocks, MAX_SPLITS))
    )
    num_splits = triton.cdiv(num_blocks, blocks_per_split)
    best_scores = logits.new_empty(num_rows, num_splits, dtype=torch.float32)
    best_tokens = logits.new_empty(num_rows, num_splits, dtype=torch.int32)
    _argmax_of_splits[(num_rows, num_splits)](
        logits,
        logits.stride(0),
        adjusted,
        sampler.records,
        rows,
        positions,
        maxima,
        maxima.shape[1],
        thresholds,
        best_scores,
        best_tokens,
        vocab_size,
        BLOCKS_PER_SPLIT=blocks_per_split,
        BLOCK=BLOCK,
        MAXIMA=min(BLOCK // 128, 16),
        FAST_LOG=logits.is_cuda,  # the interpreter, which runs on a CPU, has no inline assembly
        num_warps=4 if blocks_per_split == 1 else 1,  # the decision to skip a block is cheap within a warp
    )
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    _argmax_of_rows[(num_rows,)](
        best_scores,
        best_tokens,
        tokens,
        num_splits,
        sampler.records,
        rows,
        positions,
        sampler.counts,
        sampler.recent,
        vocab_size,
        MAX_SPLITS=MAX_SPLITS,
        num_warps=1,
    )
    return tokens


@triton.jit
@no_type_check
def load_logits(logits, adjusted, is_adjusted, token, inside, other):
    """Load logits of one row as float32: the adjusted ones if there are any."""
    if is_adjusted:
        loaded = tl.load(adjusted + token, mask=inside, other=other)
    else:
        loaded = tl.load(logits + token, mask=inside, other=other).to(tl.float32)
    return loaded


@triton.jit
@no_type_check
def load_float(word):
    """Load a float32 from a record, which consists of int32."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])  # which are parts of larger tensors
@no_type_check
def _argmax_of_splits(
    logits,
    row_stride,
    adjusted,
    records,
    rows,
    positions,
    maxima,
    num_maxima,
    thresholds,
    best_scores,
    best_tokens,
    vocab_size,
    BLOCKS_PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    MAXIMA: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    """Find the best token of one split of one row."""
    row, split = tl.program_id(0), tl.program_id(1)
    record = records + tl.load(rows + row) * RECORD_WORDS
    flags, temperature = tl.load(record + FLAGS), load_float(record + TEMPERATURE)
    low, high = tl.load(record + SEED).to(tl.uint32), tl.load(record + SEED + 1).to(tl.uint32)
    first = _mix32(low ^ _mix32(high ^ _mix32(tl.load(positions + row).to(tl.uint32))))
    second = _mix32(first + 0x3C6EF372)
    threshold = tl.load(thresholds + row)
    # Scores are in base 2, which does not change the argmax: logit / temperature * log2(e) - log2(exponential).
    scale = 1.4426950408889634 / tl.where(temperature > 0, temperature, 1.0)

    row_logits = logits + row.to(tl.int64) * row_stride
    row_adjusted = adjusted + row.to(tl.int64) * vocab_size
    lane, part = tl.arange(0, BLOCK), tl.arange(0, MAXIMA)
    best = tl.full((), float("-inf"), tl.float32)
    best_token = tl.full((), 0, tl.int32)
    for block in range(BLOCKS_PER_SPLIT):
        start = (split * BLOCKS_PER_SPLIT + block) * BLOCK
        largest = threshold
        if (flags & FILTERED) != 0:
            place = start // 128 + part
            of_blocks = tl.load(maxima + row * num_maxima + place, mask=place < num_maxima, other=float("-inf"))
            largest = tl.max(of_blocks, 0)
        if not (largest < threshold):
            logit = load_logits(
                row_logits,
                row_adjusted,
                (flags & ADJUSTED) != 0,
                start + lane,
                start + lane < vocab_size,
                float("-inf"),
            )
            if (flags & FILTERED) != 0:
                logit = tl.where(logit < threshold, float("-inf"), logit)
            bits = lane.to(tl.uint32)
            bound = logit
            if temperature > 0:
                # The first line of _mix32(token ^ first), where the upper half of a token is the same as its block's.
                same = start.to(tl.uint32) ^ first
                bits = _mix32(_finish_mix32(bits ^ same ^ (same >> 16)) + second) & 0x7FFFFFFF
                # -log2(1 - u) is at least u * log2(e), and u at least bits / 2^31: 31 - log2(log2(e)) = 30.4712.
                bound = logit * scale + 30.48 - _log2(bits.to(tl.float32), FAST_LOG)
            if not (tl.max(bound, 0) <= best):  # or NaN
                score = logit
                if temperature > 0:
                    score = logit * scale - _log2(_exponential(bits, FAST_LOG), FAST_LOG)
                block_best = tl.max(score, 0)  # ignores NaN unless there is nothing else
                if block_best > best:
                    best = block_best
                    # If scores are equal, the lowest token wins, as in torch.argmax.
                    best_token = start + tl.min(tl.where(score == block_best, lane, BLOCK), 0)

    place = row * tl.num_programs(1) + split
    tl.store(best_scores + place, best)
    tl.store(best_tokens + place, best_token)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
@no_type_check
def _argmax_of_rows(
    best_scores,
    best_tokens,
    tokens,
    num_splits,
    records,
    rows,
    positions,
    counts,
    recent,
    vocab_size,
    MAX_SPLITS: tl.constexpr,
):
    """Find the best of the splits of one row, and add the token to the row's output."""
    index, split = tl.program_id(0), tl.arange(0, MAX_SPLITS)
    exists = split < num_splits
    score = tl.load(best_scores + index * num_splits + split, mask=exists, other=float("-inf"))
    candidate = tl.load(best_tokens + index * num_splits + split, mask=exists, other=0x7FFFFFFF)
    is_best = score == tl.max(score, 0)
    token = tl.min(tl.where(is_best, candidate, 0x7FFFFFFF), 0)
    tl.store(tokens + index, token)
    row = tl.load(rows + index)
    tl.store(recent + row * RECENT + tl.load(positions + index) % RECENT, token)
    if (tl.load(records + row * RECORD_WORDS + FLAGS) & PENALIZED) != 0:
        place = counts + row * vocab_size + token
        count = tl.load(place)
        tl.store(place, tl.where(count < COUNT_LIMIT, count + 1, count))


@triton.jit
@no_type_check
def _exponential(bits, FAST_LOG: tl.constexpr):
    """Turn 31 random bits into -log2(1 - u), which is exponentially distributed, for u uniform in (0, 1)."""
    uniform = tl.minimum(bits.to(tl.float32) * 2.0**-31 + 2.0**-32, 1 - 2.0**-24)
    # 1 - u loses mantissa bits of a small u, and small values decide the draw. There, use the series of -log2(1 - u).
    series = 0.2404491734814939 * uniform + 0.28853900817779266
    series = series * uniform + 0.36067376022224085
    series = series * uniform + 0.4808983469629878
    series = series * uniform + 0.7213475204444817
    series = series * uniform + 1.4426950408889634
    return tl.where(uniform < 0.125, series * uniform, -_log2(1.0 - uniform, FAST_LOG))


@triton.jit
@no_type_check
def _log2(x, FAST_LOG: tl.constexpr):
    """Compute log2; if FAST_LOG, in one instruction with an error of 2^-22 (relative; absolute from 0.5 to 2)."""
    if FAST_LOG:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
@no_type_check
def _mix32(x):
    """Scramble unsigned 32-bit integers: `sampling.mix32`."""
    return _finish_mix32(x ^ (x >> 16))


@triton.jit
@no_type_check
def _finish_mix32(x):
    """Compute `_mix32` without its first line."""
    x = x * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
