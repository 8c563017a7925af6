"""Page selection in Triton: summaries of pages, bounds of scores, the selection, and attention to the selected pages.

All grids depend only on shapes, so CUDA graphs record them. The references are in `attention/page_selection.py`.

The bounds are two matrix products, whose rows are the query heads of a group. They read two vectors of each page, 4 D
bytes in bfloat16 for each KV head, once. The selection finds the smallest bound that is selected bit by bit, with 32
counts of what is not less, where a sort would move all bounds several times. The attention of a decode to one KV head
is split among as many programs as fill the GPU. A second kernel merges their states (chapter 02) in a fixed order.
Explained in chapter 15.
"""

import math
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

if TYPE_CHECKING:
    from mini_engine.attention.page_selection import DecodePages

ROWS = 16  # fewest rows of a matrix product; those after the heads of the group are padding
PAGES, TILE = 64, 64  # pages of a program, and keys of one matrix product
SLOTS = 16  # keys that are compared at once
PROGRAMS = 264  # two for each multiprocessor of an H200
MOST_SPLITS = 32  # of a decode


def summarize_pages(
    k_pages: Float[Tensor, "pages P Hk D"],
    low: Float[Tensor, "pages Hk D"],
    high: Float[Tensor, "pages Hk D"],
    slots: Int64[Tensor, " T"],
) -> None:
    """Compute `page_selection.summarize_pages`; D is a power of two, and contiguous."""
    _, page_size, num_heads, head_dim = k_pages.shape
    _summarize[slots.shape[0], num_heads](
        k_pages, *k_pages.stride()[:3], low, high, slots, num_heads, PAGE=page_size, DIM=head_dim, SLOTS=SLOTS,
        num_warps=2,
    )  # fmt: skip


def bound_scores(
    q: Float[Tensor, "B Hq D"],
    low: Float[Tensor, "pages Hk D"],
    high: Float[Tensor, "pages Hk D"],
    pages: "DecodePages",
) -> Float[Tensor, "B Hk W"]:
    """Compute `page_selection.bound_scores`; D is a power of two, 16 or more, and a group has at most 16 heads."""
    (count, num_qo_heads, head_dim), num_heads = q.shape, low.shape[1]
    bounds = q.new_empty(count, num_heads, pages.width, dtype=torch.float32)
    _bound[triton.cdiv(pages.width, PAGES), num_heads, count](
        q, *q.stride()[:2], low, high, pages.pages, pages.first, pages.kv_lens, bounds, pages.width, num_heads,
        GROUP=num_qo_heads // num_heads, PAGE=pages.page_size, DIM=head_dim, ROWS=ROWS, PAGES=PAGES,
    )  # fmt: skip
    return bounds


def select_pages(bounds: Float[Tensor, "B Hk W"], most: int) -> Int64[Tensor, "B Hk n"]:
    """Compute `page_selection.select_pages` for float32, in order of the index; of equal bounds, the first ones."""
    (count, num_heads, width), most = bounds.shape, min(most, bounds.shape[2])
    selected = bounds.new_empty(count, num_heads, most, dtype=torch.int64)
    _select[(count * num_heads,)](
        bounds.contiguous(), selected, width, most, WIDTH=max(256, triton.next_power_of_2(width)), num_warps=8
    )
    return selected


def attend_to_pages(
    q: Float[Tensor, "B Hq D"],
    k_pages: Float[Tensor, "pages P Hk D"],
    v_pages: Float[Tensor, "pages P Hk D"],
    pages: "DecodePages",
    selected: Int64[Tensor, "B Hk n"],
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "B Hq D"]:
    """Compute `page_selection.attend_to_pages`; the sizes are those of `bound_scores`."""
    (count, num_qo_heads, head_dim), (num_heads, num_selected) = q.shape, selected.shape[1:]
    num_tiles = triton.cdiv(num_selected * pages.page_size, TILE)
    splits = min(triton.cdiv(PROGRAMS, count * num_heads), num_tiles, MOST_SPLITS)
    tiles = triton.cdiv(num_tiles, splits)
    partial = q.new_empty(count, num_qo_heads, splits, head_dim, dtype=torch.float32)
    lse = partial.new_empty(count, num_qo_heads, splits)
    # The softmax is computed with powers of 2. A soft-cap comes between the scale and the softmax.
    _attend[splits, num_heads, count](
        q, *q.stride()[:2], k_pages, v_pages, *k_pages.stride()[:3], pages.pages, pages.first, pages.kv_lens, selected,
        num_selected, partial, lse, scale if softcap else scale * math.log2(math.e), softcap or 0.0, num_heads, splits,
        tiles * TILE, GROUP=num_qo_heads // num_heads, PAGE=pages.page_size, DIM=head_dim, ROWS=ROWS, TILE=TILE,
        CAPPED=softcap is not None,
    )  # fmt: skip
    out = q.new_empty(q.shape)
    _merge[count, num_qo_heads](
        partial, lse, out, num_qo_heads, splits, DIM=head_dim, SPLITS=triton.next_power_of_2(splits)
    )
    return out


@no_type_check
@triton.jit
def _summarize(
    keys, page_stride, slot_stride, head_stride, low, high, slots, num_heads,
    PAGE: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slot, head = tl.load(slots + tl.program_id(0)), tl.program_id(1)
    if slot % PAGE == PAGE - 1:
        page, column = slot // PAGE, tl.arange(0, DIM)
        lows, highs = tl.full((DIM,), float("inf"), tl.float32), tl.full((DIM,), float("-inf"), tl.float32)
        for start in range(0, PAGE, SLOTS):
            offset = tl.minimum(start + tl.arange(0, SLOTS), PAGE - 1)  # the last key again changes nothing
            at = page * page_stride + offset[:, None] * slot_stride + head * head_stride + column[None, :]
            key = tl.load(keys + at).to(tl.float32)
            lows, highs = tl.minimum(lows, tl.min(key, 0)), tl.maximum(highs, tl.max(key, 0))
        to = (page * num_heads + head) * DIM + column
        tl.store(low + to, lows.to(low.dtype.element_ty))
        tl.store(high + to, highs.to(high.dtype.element_ty))


@no_type_check
@triton.jit
def _bound(
    q, q_row, q_head, low, high, pages, first, kv_lens, out, width, num_heads,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    index = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    last = (tl.load(kv_lens + row) - 1) // PAGE
    bounds = tl.where((index == 0) | (index == last), float("inf"), float("-inf"))
    if tl.program_id(0) * PAGES < last:
        column, member = tl.arange(0, DIM)[None, :], tl.arange(0, ROWS)
        is_member, is_full = (member < GROUP)[:, None], (index > 0) & (index < last)
        own = q + row.to(tl.int64) * q_row + (head * GROUP + member)[:, None] * q_head + column
        query = tl.load(own, mask=is_member, other=0.0)
        positive, negative = tl.where(query > 0, query, 0.0), tl.where(query < 0, query, 0.0)
        page = tl.load(pages + tl.load(first + row) + index, mask=is_full, other=0).to(tl.int64)
        at = ((page * num_heads + head) * DIM)[:, None] + column
        lows = tl.load(low + at, mask=is_full[:, None], other=0.0)
        highs = tl.load(high + at, mask=is_full[:, None], other=0.0)
        of_heads = tl.dot(positive.to(query.dtype), tl.trans(highs), input_precision="ieee")
        of_heads = tl.dot(negative.to(query.dtype), tl.trans(lows), of_heads, input_precision="ieee")
        most = tl.max(tl.where(is_member, of_heads, float("-inf")), 0)
        bounds = tl.where(is_full, most, bounds)
    tl.store(out + (row.to(tl.int64) * num_heads + head) * width + index, bounds, mask=index < width)


@no_type_check
@triton.jit
def _select(bounds, out, width, most, WIDTH: tl.constexpr):
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    bits = tl.load(bounds + row * width + index, mask=index < width, other=0.0).to(tl.int32, bitcast=True)
    # Numbers as integers in the same order: the bits of a negative number are flipped, and the sign of all. Places
    # beyond the end are 0, less than any number.
    key = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    key = tl.where(index < width, key, 0)
    found, one = tl.zeros((), tl.uint32), tl.full((), 1, tl.uint32)
    for bit in range(32):  # the smallest selected key, the largest number that enough keys reach: its highest bit first
        trial = (found | (one << (31 - bit))).to(tl.uint32)
        found = tl.where(tl.sum((key >= trial).to(tl.int32), 0) >= most, trial, found)
    left = most - tl.sum((key > found).to(tl.int32), 0)
    is_equal = key == found
    is_selected = (key > found) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= left))
    place = tl.cumsum(is_selected.to(tl.int32), 0) - 1
    tl.store(out + row * most + place, index.to(tl.int64), mask=is_selected)


@no_type_check
@triton.jit
def _attend(
    q, q_row, q_head, keys, values, page_stride, slot_stride, head_stride, pages, first, kv_lens, selected,
    num_selected, out, lse, scale, cap, num_heads, splits, keys_of_split,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len, own_pages = tl.load(kv_lens + row), pages + tl.load(first + row)
    chosen = selected + (row * num_heads + head) * num_selected
    column, member = tl.arange(0, DIM)[None, :], tl.arange(0, ROWS)
    is_member, own_head = (member < GROUP)[:, None], head * GROUP + member
    query = tl.load(q + row * q_row + own_head[:, None] * q_head + column, mask=is_member, other=0.0)
    # Relative to the running maximum, in units of log2: the sum of the weights, and the weighted sum of the values.
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM), tl.float32)
    begin = split * keys_of_split
    for start in range(begin, tl.minimum(begin + keys_of_split, num_selected * PAGE), TILE):
        place = start + tl.arange(0, TILE)
        index = tl.load(chosen + place // PAGE, mask=place < num_selected * PAGE, other=0)
        offset = place % PAGE
        is_key = (place < num_selected * PAGE) & (index * PAGE + offset < kv_len)
        page = tl.load(own_pages + index, mask=is_key, other=0).to(tl.int64)
        at = (page * page_stride + offset * slot_stride + head * head_stride)[:, None] + column
        key = tl.load(keys + at, mask=is_key[:, None], other=0.0)
        value = tl.load(values + at, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:  # tanh(x) is 2 sigmoid(2 x) - 1
            scores = cap * 1.4426950408889634 * (2 * tl.sigmoid(2 * scores / cap) - 1)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(new_most == float("-inf"), 0.0, new_most)  # no key yet
        factor, weights = tl.exp2(most - base), tl.exp2(scores - base[:, None])
        total = total * factor + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * factor[:, None], input_precision="ieee")
        most = new_most
    has_keys = total > 0
    divisor = tl.where(has_keys, total, 1.0)
    to = (row * num_heads * GROUP + own_head) * splits + split
    tl.store(out + to[:, None] * DIM + column, mixed / divisor[:, None], mask=is_member)
    tl.store(lse + to, tl.where(has_keys, most + tl.log2(divisor), float("-inf")), mask=member < GROUP)


@no_type_check
@triton.jit
def _merge(partial, lse, out, num_heads, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, DIM)
    is_split = split < splits
    lses = tl.load(lse + at * splits + split, mask=is_split, other=float("-inf"))
    weights = tl.exp2(lses - tl.max(lses, 0))  # the last page is in one of the splits, so the maximum is finite
    states = tl.load(partial + (at * splits + split)[:, None] * DIM + column, mask=is_split[:, None], other=0.0)
    mixed = tl.sum(weights[:, None] * states, 0) / tl.sum(weights, 0)
    tl.store(out + at * DIM + column, mixed.to(out.dtype.element_ty))
