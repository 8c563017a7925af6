"""Sample the tokens of a step in four launches, whatever their parameters: the kernels of `Sampler.sample`.

1. Each row that asks for it gets a float32 copy of its logits with bias, penalties, and forbidden tokens. Each row with
   a filter gets the largest logit of each block of 128 tokens, and the block's share of the softmax.
2. One program per row with a filter finds the threshold that top-k, top-p, and min-p together amount to.
3. Gumbel noise and argmax over splits of the rows, without the tokens below the threshold (`gumbel_argmax.py`).
4. Argmax over the splits; the token is counted.

Nothing is sorted. Each of a few candidates is compared with all others. Among many, the threshold is found by bisection
over the integers that order floating-point numbers as their values do: 16 bits for bfloat16, fewer if the candidates
are close together. At least k
logits are as large as the k-th largest block maximum, so the k-th largest logit is, too. All tokens with less than
(1 - top_p) / V of the probability have less than 1 - top_p together, so top-p never needs them.

A row without filters is read from memory once, in the third launch. A row with filters is read once, in the first:
after that, a block is read again only if its maximum reaches the bound or the threshold. With top-k, a few dozen blocks
do. Top-p of a flat distribution without top-k is the slow case: more than CAPACITY candidates make each of the up to 32
rounds of bisection read the row again, from the L2 cache. An adjusted row is also written and read once in float32.
Sums of probabilities are in float32, in an order that depends only on the row. So the kept tokens are those of
`sampling.filter_logits` in float64 unless a cumulative probability is within about 1e-6 of top_p.
"""

from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor

from mini_engine import sampler as tables
from mini_engine.kernels.gumbel_argmax import (
    ADJUSTED,
    FILTERED,
    FLAGS,
    PENALIZED,
    RECENT,
    RECORD_WORDS,
    TEMPERATURE,
    gumbel_argmax,
    load_float,
    load_logits,
    word_of,
)
from mini_engine.sampling_params import MAX_BAD_WORDS, MAX_EDITS

if TYPE_CHECKING:
    from mini_engine.sampler import Sampler

BLOCK = 128  # tokens of a block whose maximum is kept
BLOCKS = 16  # blocks that one program processes at a time
NUM_PROGRAMS = 4096  # most programs of the first launch, if rows are long
CAPACITY = 8192  # candidates of a row that are copied out of it
LISTED = 32  # blocks that the second launch searches for candidates at a time: more than the usual top-k
FEW = 128  # candidates up to which each is compared with all others at once
TILE = 2048  # logits that the second launch processes at a time
EXACT_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits that are zero in float32

TOP_K, TOP_P, MIN_P = word_of("top_k"), word_of("top_p"), word_of("min_p")
REPETITION, PRESENCE = word_of("repetition_penalty"), word_of("presence_penalty")
FREQUENCY = word_of("frequency_penalty")
NUM_EDITS, NUM_BAD_WORDS = word_of("num_edits"), word_of("num_bad_words")
EDITED, MASKED = tl.constexpr(tables.EDITED), tl.constexpr(tables.MASKED)
HAS_BAD_WORDS = tl.constexpr(tables.HAS_BAD_WORDS)
EDITS_OF_ROW, BAD_WORDS_OF_ROW = tl.constexpr(MAX_EDITS), tl.constexpr(MAX_BAD_WORDS)
ANY_TOKEN, NO_TOKEN = tl.constexpr(tables.ANY_TOKEN), tl.constexpr(tables.NO_TOKEN)


def sample(
    sampler: "Sampler", logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Int[Tensor, " R"]:
    """Choose the next token of each row and count it: `Sampler.sample` for the default sampler.

    Args:
        sampler: the parameters and the state of the rows.
        logits: [R, V] float16, bfloat16 or float32, left unchanged.
        rows: [R] row of the page table of each.
        positions: [R] position of the token to sample.

    Returns:
        [R] token ids, the lowest id if there are ties. NaN logits are never chosen; a row of only NaN gives token 0.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return gumbel_argmax(sampler, logits, rows, positions, *adjust_and_filter(sampler, logits, rows, positions))


def adjust(
    sampler: "Sampler", logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> Float32[Tensor, "R V"]:
    """Compute `Sampler.adjust` on a GPU: new logits, with the changes that each row asks for.

    Args:
        sampler: the parameters and the state of the rows.
        logits: [R, V] float16, bfloat16 or float32, left unchanged.
        rows: [R] row of the page table of each.
        positions: [R] position of the token to sample.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    adjusted, _, _ = adjust_and_filter(sampler, logits, rows, positions)
    is_adjusted = (sampler.records[rows, FLAGS.value] & tables.ADJUSTED) != 0
    return torch.where(is_adjusted[:, None], adjusted, logits.float())


def adjust_and_filter(
    sampler: "Sampler", logits: Float[Tensor, "R V"], rows: Int[Tensor, " R"], positions: Int[Tensor, " R"]
) -> tuple[Float32[Tensor, "R V"], Float32[Tensor, "R blocks"], Float32[Tensor, " R"]]:
    """Adjust the logits, and find out which of them the filters keep.

    Args:
        sampler: the parameters and the state of the rows.
        logits: [R, V] with a stride of 1 between tokens, left unchanged.
        rows: [R] row of the page table of each.
        positions: [R] position of the token to sample.

    Returns:
        The adjusted logits, the largest logit of each block, and the smallest logit that the filters keep. The first
        are defined only in rows with an adjustment, the second only in rows with a filter; without one, the last is
        -inf.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    adjusted = logits.new_empty(num_rows, vocab_size, dtype=torch.float32)
    maxima = logits.new_empty(num_rows, num_blocks, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    num_chunks = triton.cdiv(num_blocks, BLOCKS)
    # Rounded to a power of two, because each value needs its own kernel.
    chunks_per_split = triton.next_power_of_2(triton.cdiv(num_rows * num_chunks, NUM_PROGRAMS))
    _adjust_and_summarize[(num_rows, triton.cdiv(num_chunks, chunks_per_split))](
        logits,
        logits.stride(0),
        adjusted,
        sampler.records,
        rows,
        positions,
        sampler.counts,
        sampler.in_prompt,
        sampler.allowed,
        sampler.edits,
        sampler.bad_words,
        sampler.recent,
        maxima,
        sums,
        vocab_size,
        num_blocks,
        CHUNKS=chunks_per_split,
        BLOCKS=BLOCKS,
        BLOCK=BLOCK,
    )
    thresholds = logits.new_empty(num_rows, dtype=torch.float32)
    _find_thresholds[(num_rows,)](
        logits,
        logits.stride(0),
        adjusted,
        sampler.records,
        rows,
        maxima,
        sums,
        torch.empty_like(maxima, dtype=torch.int32),
        logits.new_empty(num_rows, CAPACITY, dtype=torch.float32),
        thresholds,
        vocab_size,
        num_blocks,
        MAX_BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK=BLOCK,
        EXACT_BITS=EXACT_BITS[logits.dtype],
        CAPACITY=CAPACITY,
        FEW=FEW,
        LISTED=LISTED,
        TILE=TILE,
        num_warps=8,
    )
    return adjusted, maxima, thresholds


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])  # which are parts of larger tensors
@no_type_check
def _adjust_and_summarize(
    logits,
    row_stride,
    adjusted,
    records,
    rows,
    positions,
    counts,
    in_prompt,
    allowed,
    edits,
    bad_words,
    recent,
    maxima,
    sums,
    vocab_size,
    num_blocks,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adjust the logits of one split of one row, and summarize its blocks, where the row asks for it."""
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    record = records + row * RECORD_WORDS
    flags = tl.load(record + FLAGS)
    row_logits, row_adjusted = logits + index * row_stride, adjusted + index * vocab_size
    mask_words = (vocab_size + 31) // 32
    row_counts = counts + row * vocab_size
    row_prompt, row_allowed = in_prompt + row * mask_words, allowed + row * mask_words
    row_edits, row_bad_words = edits + row * EDITS_OF_ROW * 3, bad_words + row * BAD_WORDS_OF_ROW * RECENT
    for chunk in range(CHUNKS):
        start = (split * CHUNKS + chunk) * (BLOCKS * BLOCK)
        if (flags & ADJUSTED) != 0:
            token = start + tl.arange(0, BLOCKS * BLOCK)
            inside = token < vocab_size
            logit = tl.load(row_logits + token, mask=inside, other=0.0).to(tl.float32)
            logit = _penalized(logit, token, inside, record, flags, row_counts, row_prompt, row_allowed)
            tl.store(row_adjusted + token, logit, mask=inside)
            end = tl.minimum(start + BLOCKS * BLOCK, vocab_size)
            if (flags & EDITED) != 0:
                tl.debug_barrier()  # other threads may have written the tokens below
                position = tl.load(positions + index)
                _edit(
                    row_logits, row_adjusted, start, end, record, flags,
                    row_counts, row_prompt, row_allowed, row_edits, position, BLOCK,
                )  # fmt: skip
            if (flags & HAS_BAD_WORDS) != 0:
                tl.debug_barrier()
                _ban(row_adjusted, start, end, record, row_bad_words, recent + row * RECENT, tl.load(positions + index))
            tl.debug_barrier()
        if (flags & FILTERED) != 0:
            token = start + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            logit = load_logits(
                row_logits, row_adjusted, (flags & ADJUSTED) != 0, token, token < vocab_size, float("-inf")
            )
            largest = tl.max(logit, 1)  # ignores NaN
            place = start // BLOCK + tl.arange(0, BLOCKS)
            tl.store(maxima + index * num_blocks + place, largest, mask=place < num_blocks)
            if (tl.load(record + TOP_K) == 0) & (load_float(record + TOP_P) < 1):
                scale = 1.4426950408889634 / load_float(record + TEMPERATURE)
                weight = _weight(logit, largest[:, None], scale)
                tl.store(sums + index * num_blocks + place, tl.sum(weight, 1), mask=place < num_blocks)


@triton.jit
@no_type_check
def _penalized(logit, token, inside, record, flags, counts, in_prompt, allowed):
    """Apply a row's penalties and its mask: `sampling.penalize`."""
    if (flags & PENALIZED) != 0:
        count = tl.load(counts + token, mask=inside, other=0).to(tl.float32)
        word = tl.load(in_prompt + token // 32, mask=inside, other=0)
        repetition = load_float(record + REPETITION)
        repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
        logit = tl.where((count > 0) | (((word >> (token % 32)) & 1) != 0), repeated, logit)
        logit -= load_float(record + FREQUENCY) * count
        logit -= tl.where(count > 0, load_float(record + PRESENCE), 0.0)
    if (flags & MASKED) != 0:
        word = tl.load(allowed + token // 32, mask=inside, other=0)
        logit = tl.where(((word >> (token % 32)) & 1) != 0, logit, float("-inf"))
    return logit


@triton.jit
@no_type_check
def _edit(
    logits, adjusted, start, end, record, flags, counts, in_prompt, allowed, edits, position, BLOCK: tl.constexpr
):
    """Adjust the tokens with a bias, or that are forbidden up to a position, again from the start."""
    num_edits = tl.load(record + NUM_EDITS)
    for first in range(0, num_edits, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        edit = edits + slot * 3
        token = tl.load(edit, mask=slot < num_edits, other=NO_TOKEN)
        here = (token >= start) & (token < end)
        logit = tl.load(logits + token, mask=here, other=0.0).to(tl.float32)
        logit += tl.load(edit + 1, mask=here, other=0).to(tl.float32, bitcast=True)
        logit = _penalized(logit, token, here, record, flags, counts, in_prompt, allowed)
        logit = tl.where(position < tl.load(edit + 2, mask=here, other=0), float("-inf"), logit)
        tl.store(adjusted + token, logit, mask=here)


@triton.jit
@no_type_check
def _ban(adjusted, start, end, record, bad_words, recent, position):
    """Forbid the last token of each bad word whose other tokens are the last ones of the output."""
    lane = tl.arange(0, RECENT)
    last = lane == RECENT - 1
    history = tl.load(recent + (position + 1 + lane) % RECENT)  # the oldest first; the last lane is not used
    num_words = tl.load(record + NUM_BAD_WORDS)
    for first in range(0, num_words, 16):
        slot = first + tl.arange(0, 16)
        exists = slot < num_words
        word = tl.load(bad_words + slot[:, None] * RECENT + lane[None, :], mask=exists[:, None], other=NO_TOKEN)
        differs = (word != history[None, :]) & (word != ANY_TOKEN) & (lane < RECENT - 1)[None, :]
        token = tl.max(tl.where(last[None, :], word, NO_TOKEN), 1)
        is_banned = (tl.sum(differs.to(tl.int32), 1) == 0) & exists & (token >= start) & (token < end)
        tl.store(adjusted + token, tl.full((16,), float("-inf"), tl.float32), mask=is_banned)


@triton.jit(do_not_specialize_on_alignment=["rows"])
@no_type_check
def _find_thresholds(
    logits,
    row_stride,
    adjusted,
    records,
    rows,
    maxima,
    sums,
    blocks,
    candidates,
    thresholds,
    vocab_size,
    num_blocks,
    MAX_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT_BITS: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    LISTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the smallest logit that one row's filters keep: -inf if there are none."""
    index = tl.program_id(0).to(tl.int64)
    record = records + tl.load(rows + index).to(tl.int64) * RECORD_WORDS
    flags = tl.load(record + FLAGS)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (flags & FILTERED) != 0:
        row_logits, row_adjusted = logits + index * row_stride, adjusted + index * vocab_size
        row_maxima, row_blocks = maxima + index * num_blocks, blocks + index * num_blocks
        row_candidates = candidates + index * CAPACITY
        is_adjusted = (flags & ADJUSTED) != 0
        shift = tl.where(is_adjusted, 0, EXACT_BITS)  # keys of logits as the model wrote them end in zeros
        top_k, top_p, min_p = tl.load(record + TOP_K), load_float(record + TOP_P), load_float(record + MIN_P)
        temperature = load_float(record + TEMPERATURE)
        scale = 1.4426950408889634 / temperature
        block = tl.arange(0, MAX_BLOCKS)
        exists = block < num_blocks
        maximum = tl.load(row_maxima + block, mask=exists, other=float("-inf"))
        largest = tl.max(maximum, 0)
        if min_p > 0:
            threshold = largest + temperature * tl.log(min_p)
        if ((top_k > 0) | (top_p < 1)) & (largest > float("-inf")):
            high = _key(largest, shift)
            # A logit that the threshold of top-k and top-p cannot be below.
            bound = tl.full((), float("-inf"), tl.float32)
            total = tl.full((), 0.0, tl.float32)
            if top_k == 0:
                of_blocks = tl.load(sums + index * num_blocks + block, mask=exists, other=0.0)
                total = tl.sum(of_blocks * _weight(maximum, largest, scale), 0)
                bound = largest + tl.log2((1.0 - top_p) * total / vocab_size) / scale
            elif top_k <= num_blocks:
                low, highest = _key(tl.min(tl.where(exists, maximum, float("inf")), 0), shift), high
                while low < highest:
                    middle = low + (highest - low + 1) // 2
                    if tl.sum((maximum >= _float(middle, shift)).to(tl.int32), 0) >= top_k:
                        low = middle
                    else:
                        highest = middle - 1
                bound = _float(low, shift)

            has_candidates = exists & (maximum >= bound)
            tl.store(row_blocks + tl.cumsum(has_candidates.to(tl.int32), 0) - 1, block, mask=has_candidates)
            num_listed = tl.sum(has_candidates.to(tl.int32), 0)
            num = tl.full((), 0, tl.int32)
            tl.debug_barrier()
            for first in range(0, num_listed, LISTED):
                which = first + tl.arange(0, LISTED)
                listed = tl.load(row_blocks + which, mask=which < num_listed, other=num_blocks)
                token = tl.reshape(listed[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], (LISTED * BLOCK,))
                logit = load_logits(row_logits, row_adjusted, is_adjusted, token, token < vocab_size, float("nan"))
                is_candidate = logit >= bound
                place = num + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
                tl.store(row_candidates + place, logit, mask=is_candidate & (place < CAPACITY))
                num += tl.sum(is_candidate.to(tl.int32), 0)
            tl.debug_barrier()
            if num <= FEW:
                of_few = _threshold_of_few(row_candidates, num, top_k, top_p, total, largest, scale, FEW)
                threshold = tl.maximum(threshold, of_few)
            else:
                # Candidates that do not fit stay where they are.
                is_copied = num <= CAPACITY
                source = row_adjusted
                if is_copied:
                    source = row_candidates
                else:
                    num = vocab_size
                is_float32 = is_copied | is_adjusted

                low = _key(bound, shift)
                if top_k > 0:
                    low = _bisect(top_k, low, high, shift, source, row_logits, is_float32, num, largest, scale, 0, TILE)
                    # Of the logits equal to the k-th largest, as many count as there is room for.
                    above = _float(low + 1, shift)
                    room = top_k - _mass(above, source, row_logits, is_float32, num, largest, scale, 0, TILE)
                    total = _mass(above, source, row_logits, is_float32, num, largest, scale, 1, TILE)
                    total += room * _weight(_float(low, shift), largest, scale)
                if top_p < 1:
                    low = _bisect(
                        top_p * total, low, high, shift, source, row_logits, is_float32, num, largest, scale, 1, TILE
                    )
                threshold = tl.maximum(threshold, _float(low, shift))
    tl.store(thresholds + index, threshold)


@triton.jit
@no_type_check
def _threshold_of_few(candidates, num, top_k, top_p, total, largest, scale, FEW: tl.constexpr):
    """Return the smallest candidate that top-k and top-p keep; `total` is the mass that top-p divides without top-k."""
    lane = tl.arange(0, FEW)
    exists = lane < num
    logit = tl.load(candidates + lane, mask=exists, other=float("-inf"))
    other = tl.load(candidates + lane, mask=exists, other=float("-inf"))
    is_larger = other[None, :] > logit[:, None]
    kth = tl.full((), float("-inf"), tl.float32)
    weight = _weight(other, largest, scale)
    if top_k > 0:
        rank = tl.sum(is_larger.to(tl.int32), 1)
        kth = tl.min(tl.where(exists & (rank < top_k), logit, float("inf")), 0)
        # Of the logits equal to the k-th largest, as many count as there is room for.
        room = top_k - tl.sum((other > kth).to(tl.int32), 0)
        total = tl.sum(tl.where(other > kth, weight, 0.0), 0) + room * _weight(kth, largest, scale)
    last = kth
    if top_p < 1:
        mass = tl.sum(tl.where(is_larger, weight[None, :], 0.0), 1)
        last = tl.maximum(kth, tl.min(tl.where(exists & (mass < top_p * total), logit, float("inf")), 0))
    return last


@triton.jit
@no_type_check
def _bisect(
    target,
    low,
    high,
    shift,
    values,
    row_logits,
    is_float32,
    num,
    largest,
    scale,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the key of the largest logit from which on the mass reaches the target, between two keys."""
    while low < high:
        middle = low + (high - low + 1) // 2
        mass = _mass(_float(middle, shift), values, row_logits, is_float32, num, largest, scale, WEIGHTED, TILE)
        if mass >= target:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
@no_type_check
def _mass(bound, values, row_logits, is_float32, num, largest, scale, WEIGHTED: tl.constexpr, TILE: tl.constexpr):
    """Return the number of logits from a bound upward, or the sum of their weights."""
    lane = tl.arange(0, TILE)
    mass = tl.zeros((TILE,), tl.float32)
    for first in range(0, num, TILE):
        logit = load_logits(row_logits, values, is_float32, first + lane, first + lane < num, float("nan"))
        weight = tl.full((TILE,), 1.0, tl.float32)
        if WEIGHTED:
            weight = _weight(logit, largest, scale)
        mass += tl.where(logit >= bound, weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
@no_type_check
def _weight(logit, largest, scale):
    """Return exp(logit - largest) at the row's temperature, of which softmax is a multiple; 0 for NaN and -inf."""
    weight = tl.where(logit == largest, 1.0, tl.exp2((logit - largest) * scale))
    return tl.where(logit > float("-inf"), weight, 0.0)


@triton.jit
@no_type_check
def _key(value, shift):
    """Return an integer that orders floats as their values do, without its lowest bits."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) >> shift


@triton.jit
@no_type_check
def _float(key, shift):
    """Return the float of a key."""
    bits = (key << shift).to(tl.int32)
    bits = tl.where(bits < 0, (bits | ((1 << shift) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)
