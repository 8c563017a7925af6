"""Right and wrong answers to the homework of chapter 11. They test its grader."""

import torch
from torch.nn import functional as F

from book.grading import right, solution, wrong
from book.triton_lab import DEVICE, tl, triton

reference = solution("11_fused_kernels")
Kernel, ROWS, COLUMNS = reference.Kernel, reference.ROWS, reference.COLUMNS
power_of_2 = triton.next_power_of_2

# fuse ---------------------------------------------------------------------------------------------------------------


@right("fuse")
def backwards(kernels, needed):
    """From the last kernel to the first: what is written is no longer missing, what is read is."""
    reads, writes = {}, {}
    for kernel in reversed(kernels):
        writes = {**{n: size for n, size in kernel.writes.items() if n in needed}, **writes}
        reads = {n: size for n, size in reads.items() if n not in kernel.writes} | dict(kernel.reads)
    return Kernel(reads, writes)


@wrong("fuse", fails="test_an_intermediate_result")
def sums_of_all(kernels, needed):
    reads, writes = {}, {}
    for kernel in kernels:
        reads |= kernel.reads
        writes |= kernel.writes
    return Kernel(reads, {n: size for n, size in writes.items() if n in needed})


@wrong("fuse", fails="test_an_intermediate_result")
def writes_everything(kernels, needed):
    written = {n: size for kernel in kernels for n, size in kernel.writes.items()}
    return Kernel(reference.fuse(kernels, needed).reads, written)


@wrong("fuse", fails="test_in_place")
def nothing_that_is_ever_written(kernels, needed):
    written = {n for kernel in kernels for n in kernel.writes}
    reads = {n: size for kernel in kernels for n, size in kernel.reads.items() if n not in written}
    return Kernel(reads, reference.fuse(kernels, needed).writes)


@wrong("fuse", fails="test_an_intermediate_that_is_needed")
def intermediates_are_dropped(kernels, needed):
    read_later = {n for kernel in kernels[1:] for n in kernel.reads}
    fused = reference.fuse(kernels, needed)
    return Kernel(fused.reads, {n: size for n, size in fused.writes.items() if n not in read_later})


@wrong("fuse", fails="test_a_dead_write")
def dead_writes_stay(kernels, needed):
    """Only what a later kernel reads is left out."""
    fused = reference.fuse(kernels, needed)
    read = {n for kernel in kernels for n in kernel.reads}
    written = {n: size for kernel in kernels for n, size in kernel.writes.items()}
    return Kernel(fused.reads, fused.writes | {n: size for n, size in written.items() if n not in read})


@wrong("fuse", fails="test_one_kernel")
def the_other_way_round(kernels, needed):
    return reference.fuse(kernels, needed)[::-1]


# add_rms_norm -------------------------------------------------------------------------------------------------------


@triton.jit
def add_norm_kernel(x, delta, weight, eps, total, normed, D, rows, WIDTH: tl.constexpr, BUG: tl.constexpr):
    """The row in tiles of WIDTH, twice: once for the sum of squares, and once for the result."""
    row = tl.program_id(0)
    start = 0 if BUG == "first row" else row * WIDTH if BUG == "stride" else row * D
    column = tl.arange(0, WIDTH)
    exists = column < D
    pad = 1.0 if BUG == "padding" else 0.0
    a = tl.load(x + start + column, mask=exists, other=pad)
    b = tl.load(delta + start + column, mask=exists, other=0.0)
    both = a + b if BUG == "short" or BUG == "short sum" else a.to(tl.float32) + b.to(tl.float32)
    if BUG == "rounded sum":
        both = both.to(total.dtype.element_ty)
    if BUG != "short":
        both = both.to(tl.float32)
    squares = (both * both).to(tl.float32)
    mean = tl.sum(squares, 0) / (WIDTH if BUG == "width" else D)
    if BUG == "eps":
        factor = 1 / (tl.sqrt(mean) + eps)
    elif BUG == "no root":
        factor = 1 / (mean + eps)
    else:
        factor = 1 / tl.sqrt(mean + eps)
    y = both.to(tl.float32) * factor
    if BUG == "rounded norm":
        y = y.to(total.dtype.element_ty).to(tl.float32)
    if BUG != "no weight":
        y = y * tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    dtype = total.dtype.element_ty
    to = row * D + column
    tl.store((x if BUG == "in place" else total) + to, both.to(dtype), mask=exists)
    tl.store(normed + to, y.to(dtype), mask=exists)


def add_norm(x, delta, weight, eps, bug="", width=None):
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width = width or power_of_2(x.shape[1])
    add_norm_kernel[(len(x),)](x, delta, weight, eps, total, normed, x.shape[1], len(x), width, bug)
    return (x if bug == "in place" else total), normed


@right("add_rms_norm")
def with_a_square_root(x, delta, weight, eps):
    return add_norm(x, delta, weight, eps)


@triton.jit
def rows_kernel(x, delta, weight, eps, total, normed, D, T, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at, mask = row[:, None] * D + column[None, :], (row < T)[:, None] & (column < D)[None, :]
    both = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + tl.load(delta + at, mask=mask, other=0.0).to(
        tl.float32
    )
    factor = tl.rsqrt(tl.sum(both * both, 1) / D + eps)[:, None]
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(total + at, both.to(total.dtype.element_ty), mask=mask)
    tl.store(normed + at, (both * factor * w).to(total.dtype.element_ty), mask=mask)


@right("add_rms_norm")
def several_rows_in_a_program(x, delta, weight, eps):
    total, normed = torch.empty_like(x), torch.empty_like(x)
    grid = (triton.cdiv(len(x), 4),)
    rows_kernel[grid](x, delta, weight, eps, total, normed, x.shape[1], len(x), 4, power_of_2(x.shape[1]))
    return total, normed


@wrong("add_rms_norm", fails="test_one_row")
def without_the_weight(*args):
    return add_norm(*args, bug="no weight")


@wrong("add_rms_norm", fails="test_one_row")
def without_the_root(*args):
    return add_norm(*args, bug="no root")


@wrong("add_rms_norm", fails="test_rows")
def always_the_first_row(*args):
    return add_norm(*args, bug="first row")


@wrong("add_rms_norm", fails="test_any_width")
def rows_as_wide_as_the_padding(*args):
    return add_norm(*args, bug="stride")


@wrong("add_rms_norm", fails="test_any_width")
def divided_by_the_padded_width(*args):
    return add_norm(*args, bug="width")


@wrong("add_rms_norm", fails="test_any_width")
def padding_of_ones(*args):
    return add_norm(*args, bug="padding")


@wrong("add_rms_norm", fails="test_any_width")
def at_most_1024_columns(*args):
    return add_norm(*args, width=1024)


@wrong("add_rms_norm", fails="test_eps")
def eps_behind_the_root(*args):
    return add_norm(*args, bug="eps")


@wrong("add_rms_norm", fails="test_add_norm_in_16_bits")
def squares_in_16_bits(*args):
    return add_norm(*args, bug="short")


@wrong("add_rms_norm", fails="test_add_norm_in_16_bits")
def added_in_16_bits(*args):
    return add_norm(*args, bug="short sum")


@wrong("add_rms_norm", fails="test_add_norm_in_16_bits")
def norm_of_the_rounded_sum(*args):
    return add_norm(*args, bug="rounded sum")


@wrong("add_rms_norm", fails="test_add_norm_in_16_bits")
def rounded_before_the_weight(*args):
    """As Hugging Face's modules compute it."""
    return add_norm(*args, bug="rounded norm")


@wrong("add_rms_norm", fails="test_one_launch_of_the_norm")
def changes_x(*args):
    return add_norm(*args, bug="in place")


@wrong("add_rms_norm", fails="test_one_launch_of_the_norm")
def in_pytorch(x, delta, weight, eps):
    total = x.float() + delta.float()
    return total.to(x.dtype), F.rms_norm(total, weight.shape, weight.float(), eps).to(x.dtype)


# norm_linear --------------------------------------------------------------------------------------------------------


@triton.jit
def product_kernel(
    x, factors, eps, weight, out, T, N, K, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BUG: tl.constexpr,
):  # fmt: skip
    token, row = tl.arange(0, TOKENS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total, squares = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        has_column = (column < K)[None, :]
        place, has = token[:, None] * K + column[None, :], (token < T)[:, None] & has_column
        tokens = tl.load(x + place, mask=has, other=0.0).to(tl.float32)
        f = tl.load(factors + column, mask=column < K, other=0.0).to(tl.float32)[None, :]
        if BUG == "weighted squares":
            tokens = tokens * f
        if BUG == "last tile":
            squares = tl.sum(tokens * tokens, 1)
        elif BUG == "all tokens":
            squares += tl.sum(tl.sum(tokens * tokens, 1), 0)
        else:
            squares += tl.sum(tokens * tokens, 1)
        if BUG != "weighted squares" and BUG != "no weight":
            tokens = tokens * f
        here = row[:, None] * K + column[None, :]
        w = tl.load(weight + here, mask=(row < N)[:, None] & has_column, other=0.0).to(tl.float32)
        if BUG == "running norm":
            total += tl.sum(tokens[:, None, :] * w[None, :, :], 2) * tl.rsqrt(squares / K + eps)[:, None]
        elif BUG == "short":
            total = (total + tl.sum(tokens[:, None, :] * w[None, :, :], 2)).to(out.dtype.element_ty).to(tl.float32)
        else:
            total += tl.sum(tokens[:, None, :] * w[None, :, :], 2)
    if BUG == "eps":
        total = total * tl.rsqrt(squares / K)[:, None]
    elif BUG == "tile mean":
        total = total * tl.rsqrt(squares / COLUMNS + eps)[:, None]
    elif BUG != "running norm":
        total = total * tl.rsqrt(squares / K + eps)[:, None]
    mask = (token < T)[:, None] & (row < N)[None, :]
    tl.store(out + token[:, None] * N + row[None, :], total.to(out.dtype.element_ty), mask=mask)


def product(x, factors, eps, weight, bug="", rows=ROWS, columns=COLUMNS):
    (num_tokens, num_columns), num_rows = x.shape, len(weight)
    out = x.new_empty(num_tokens, num_rows)
    product_kernel[(triton.cdiv(num_rows, rows),)](
        x, factors, eps, weight, out, num_tokens, num_rows, num_columns, power_of_2(num_tokens), rows, columns, bug
    )
    return out


@right("norm_linear")
def in_other_tiles(*args):
    return product(*args, rows=8, columns=32)


@right("norm_linear")
def whole_rows(x, factors, eps, weight):
    return product(x, factors, eps, weight, rows=4, columns=power_of_2(x.shape[1]))


@wrong("norm_linear", fails="test_one_tile")
def without_norm_weight(*args):
    return product(*args, bug="no weight")


@wrong("norm_linear", fails="test_one_tile")
def squares_after_the_weight(*args):
    return product(*args, bug="weighted squares")


@wrong("norm_linear", fails="test_several_tiles")
def norm_of_the_last_tile(*args):
    return product(*args, bug="last tile")


@wrong("norm_linear", fails="test_several_tiles")
def scaled_before_the_sum_is_complete(*args):
    return product(*args, bug="running norm")


@wrong("norm_linear", fails="test_several_tiles")
def mean_over_a_tile(*args):
    return product(*args, bug="tile mean")


@wrong("norm_linear", fails="test_tokens_of_different_size")
def one_norm_for_all_tokens(*args):
    return product(*args, bug="all tokens")


@wrong("norm_linear", fails="test_eps_of_the_product")
def without_eps(*args):
    return product(*args, bug="eps")


@wrong("norm_linear", fails="test_norm_linear_in_16_bits")
def rounded_in_every_tile(*args):
    return product(*args, bug="short")


@wrong("norm_linear", fails="test_one_launch_of_the_product")
def norm_in_pytorch(x, factors, eps, weight):
    normed = F.rms_norm(x.float(), factors.shape, factors.float(), eps)
    return reference.linear(normed, weight.float()).to(x.dtype)


@wrong("norm_linear", fails="test_reads_of_the_product")
def token_by_token(x, factors, eps, weight):
    """One launch, but the weight is read for each token."""
    out = x.new_empty(len(x), len(weight))
    token_kernel[(triton.cdiv(len(weight), ROWS), len(x))](
        x, factors, eps, weight, out, len(weight), x.shape[1], ROWS, power_of_2(x.shape[1])
    )
    return out


@triton.jit
def token_kernel(x, factors, eps, weight, out, N, K, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    token, row, column = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    a = tl.load(x + token * K + column, mask=column < K, other=0.0).to(tl.float32)
    f = tl.load(factors + column, mask=column < K, other=0.0).to(tl.float32)
    mask = (row < N)[:, None] & (column < K)[None, :]
    w = tl.load(weight + row[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(w * (a * f)[None, :], 1) * tl.rsqrt(tl.sum(a * a, 0) / K + eps)
    tl.store(out + token * N + row, y.to(out.dtype.element_ty), mask=row < N)


# gate_up_silu -------------------------------------------------------------------------------------------------------


@triton.jit
def gated_kernel(
    x, weight, out, T, N, K, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BUG: tl.constexpr
):
    token, row = tl.arange(0, TOKENS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate, up = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at, has = token[:, None] * K + column[None, :], (token < T)[:, None] & (column < K)[None, :]
        a = tl.load(x + at, mask=has, other=0.0).to(tl.float32)[:, None, :]
        if BUG == "interleaved":
            gate_row, up_row = 2 * row, 2 * row + 1
        else:
            gate_row, up_row = row, row + N
        mask = (row < N)[:, None] & (column < K)[None, :]
        gate_w = tl.load(weight + gate_row[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
        up_w = tl.load(weight + up_row[:, None] * K + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if BUG == "every tile":
            part = tl.sum(a * gate_w[None, :, :], 2)
            gate += part / (1 + tl.exp(-part))
        else:
            gate += tl.sum(a * gate_w[None, :, :], 2)
        up += tl.sum(a * up_w[None, :, :], 2)
    if BUG == "short":
        gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
    if BUG == "every tile":
        y = gate * up
    elif BUG == "swapped":
        y = up / (1 + tl.exp(-up)) * gate
    elif BUG == "overflow":
        y = gate * tl.exp(gate) / (1 + tl.exp(gate)) * up
    elif BUG == "sigmoid":
        y = up / (1 + tl.exp(-gate))
    else:
        y = gate * tl.sigmoid(gate) * up
    place = token[:, None] * (2 * N if BUG == "rows of the weight" else N) + row[None, :]
    mask = (token < T)[:, None] & (row < N)[None, :]
    if BUG == "rows of the weight":
        mask = mask & (place < T * N)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def gated(x, weight, bug="", rows=ROWS):
    (num_tokens, num_columns), inner = x.shape, len(weight) // 2
    out = x.new_zeros(num_tokens, inner) if bug == "rows of the weight" else x.new_empty(num_tokens, inner)
    gated_kernel[(triton.cdiv(inner, rows),)](
        x, weight, out, num_tokens, inner, num_columns, power_of_2(num_tokens), rows, COLUMNS, bug
    )
    return out


@right("gate_up_silu")
def with_a_sigmoid(x, weight):
    return gated(x, weight, rows=8)


@wrong("gate_up_silu", fails="test_one_tile_each")
def up_is_activated(x, weight):
    return gated(x, weight, bug="swapped")


@wrong("gate_up_silu", fails="test_one_tile_each")
def sigmoid_for_silu(x, weight):
    return gated(x, weight, bug="sigmoid")


@wrong("gate_up_silu", fails="test_one_tile_each")
def interleaved_rows(x, weight):
    return gated(x, weight, bug="interleaved")


@wrong("gate_up_silu", fails="test_several_tiles_each")
def activated_in_every_tile(x, weight):
    return gated(x, weight, bug="every tile")


@wrong("gate_up_silu", fails="test_large_gates")
def exp_of_the_gate(x, weight):
    return gated(x, weight, bug="overflow")


@wrong("gate_up_silu", fails="test_several_tokens")
def rows_as_wide_as_the_weight(x, weight):
    return gated(x, weight, bug="rows of the weight")


@wrong("gate_up_silu", fails="test_gated_in_16_bits")
def products_are_rounded(x, weight):
    return gated(x, weight, bug="short")


@wrong("gate_up_silu", fails="test_one_launch_of_the_gate")
def activation_in_pytorch(x, weight):
    gate, up = reference.linear(x.float(), weight.float()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


# rotate_and_store ---------------------------------------------------------------------------------------------------


@triton.jit
def store_kernel(
    qkv, cos, sin, keys, values, slots, q, num_q, num_kv, S, HALF: tl.constexpr, WIDTH: tl.constexpr,
    HEADS: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    """One program for each token, with all heads in a tile."""
    token, head, pair = tl.program_id(0), tl.arange(0, HEADS), tl.arange(0, WIDTH)
    num_heads = num_q + 2 * num_kv
    has = (head < num_heads)[:, None] & (pair < HALF)[None, :]
    if BUG == "neighbors":
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + HALF
    source = qkv + (token * num_heads + head)[:, None] * 2 * HALF
    a = tl.load(source + first[None, :], mask=has, other=0.0)
    b = tl.load(source + second[None, :], mask=has, other=0.0)
    if BUG != "short":
        a, b = a.to(tl.float32), b.to(tl.float32)
    angle_of = 0 if BUG == "one angle" else token
    c = tl.load(cos + angle_of * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle_of * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if BUG == "short":
        c, s = c.to(q.dtype.element_ty), s.to(q.dtype.element_ty)
    if BUG == "backwards":
        s = -s
    is_v = (head >= num_q + num_kv)[:, None]
    turned_a, turned_b = a * c - b * s, b * c + a * s
    if BUG == "values too":
        a, b = turned_a, turned_b
    else:
        a, b = tl.where(is_v, a, turned_a), tl.where(is_v, b, turned_b)
    dtype = q.dtype.element_ty
    a, b = a.to(dtype), b.to(dtype)
    to_q = q + (token * num_q + head)[:, None] * 2 * HALF
    is_q = (head < num_q)[:, None] & has
    tl.store(to_q + first[None, :], a, mask=is_q)
    tl.store(to_q + second[None, :], b, mask=is_q)
    slot = tl.load(slots + token)
    if BUG == "one head to a slot":
        at = (slot + (head - num_q) % num_kv)[:, None] * 2 * HALF
    elif BUG == "HND":
        at = ((slot // S * num_kv + (head - num_q) % num_kv) * S + slot % S)[:, None] * 2 * HALF
    else:
        at = (slot * num_kv + (head - num_q) % num_kv)[:, None] * 2 * HALF
    is_k = (head >= num_q)[:, None] & ~is_v & has
    tl.store(keys + at + first[None, :], a, mask=is_k)
    tl.store(keys + at + second[None, :], b, mask=is_k)
    tl.store(values + at + first[None, :], a, mask=is_v & has)
    tl.store(values + at + second[None, :], b, mask=is_v & has)


def store(qkv, cos, sin, keys, values, slots, bug="", width=None):
    _, page_size, num_kv, head_dim = keys.shape
    num_heads = qkv.shape[1] // head_dim
    q = qkv.new_empty(len(qkv), num_heads - 2 * num_kv, head_dim)
    store_kernel[(len(qkv),)](
        qkv, cos, sin, keys, values, slots, q, q.shape[1], num_kv, page_size, head_dim // 2,
        width or power_of_2(head_dim // 2), power_of_2(num_heads), bug,
    )  # fmt: skip
    return q


@right("rotate_and_store")
def all_heads_of_a_token(*args):
    return store(*args)


@wrong("rotate_and_store", fails="test_one_token")
def neighbors_are_pairs(*args):
    return store(*args, bug="neighbors")


@wrong("rotate_and_store", fails="test_one_token")
def values_rotate_too(*args):
    return store(*args, bug="values too")


@wrong("rotate_and_store", fails="test_one_token")
def rotated_backwards(*args):
    return store(*args, bug="backwards")


@wrong("rotate_and_store", fails="test_a_slot")
def a_slot_holds_one_head(*args):
    return store(*args, bug="one head to a slot")


@wrong("rotate_and_store", fails="test_a_slot")
def heads_before_tokens(*args):
    return store(*args, bug="HND")


@wrong("rotate_and_store", fails="test_tokens_in_any_slots")
def the_first_token_s_angle(*args):
    return store(*args, bug="one angle")


@wrong("rotate_and_store", fails="test_head_sizes")
def at_most_32_pairs(*args):
    return store(*args, width=32)


@wrong("rotate_and_store", fails="test_rotated_in_16_bits")
def rotated_in_the_dtype_of_qkv(*args):
    return store(*args, bug="short")


@wrong("rotate_and_store", fails="test_one_launch_of_the_rotation")
def one_launch_for_each_token(qkv, cos, sin, keys, values, slots):
    rows = [
        reference.rotate_and_store(qkv[i : i + 1], cos[i : i + 1], sin[i : i + 1], keys, values, slots[i : i + 1])
        for i in range(len(qkv))
    ]
    return torch.cat(rows)


# split_k_linear -----------------------------------------------------------------------------------------------------


@triton.jit
def arrival_kernel(
    x, weight, residual, out, partials, arrivals, N, K, columns, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    """The program that arrives last adds up the partial sums."""
    block, split = tl.program_id(0), tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    start, has_row = split * columns, row < N
    end = tl.minimum(start + columns, K)
    if BUG == "rest" and split == SPLITS - 1:
        end = K
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        has = column < (K if BUG == "overlap" else end)
        w = tl.load(weight + row[:, None] * K + column[None, :], mask=has_row[:, None] & has[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * tl.load(x + column, mask=has, other=0.0).to(tl.float32)[None, :], 1)
    if BUG == "atomic":
        tl.atomic_add(partials + row, total, mask=has_row)
    else:
        tl.store(partials + split * N + row, total.to(partials.dtype.element_ty), mask=has_row)
    before = tl.load(residual + row, mask=has_row).to(tl.float32)
    if tl.atomic_add(arrivals + block, 1) == SPLITS - 1:
        total = tl.zeros((ROWS,), tl.float32) if BUG == "no residual" else before
        if BUG == "atomic":
            total += tl.load(partials + row, mask=has_row)
            tl.store(partials + row, tl.zeros((ROWS,), tl.float32), mask=has_row)
        else:
            for other in range(SPLITS):
                total += tl.load(partials + other * N + row, mask=has_row).to(tl.float32)
        tl.store((residual if BUG == "in place" else out) + row, total.to(out.dtype.element_ty), mask=has_row)
        tl.store(arrivals + block, 0)


# Zero between launches, like the counters of `book.kernels.linear_residual`.
ARRIVALS = torch.zeros(256, dtype=torch.int32, device=DEVICE)
PARTIALS = torch.zeros(4096, device=DEVICE)


def by_arrival(x, weight, residual, splits, bug="", columns=None, rows=16, tile=32):
    num_rows, num_columns = weight.shape
    columns = columns or triton.cdiv(num_columns, splits)
    dtype = x.dtype if bug == "short" else torch.float32
    partials = PARTIALS if bug == "atomic" else x.new_empty(splits, num_rows, dtype=dtype)
    out = torch.empty_like(residual)
    arrival_kernel[(triton.cdiv(num_rows, rows), splits)](
        x, weight, residual, out, partials, ARRIVALS, num_rows, num_columns, columns, splits, rows, tile, bug
    )
    return residual if bug == "in place" else out


@right("split_k_linear")
def the_last_program_adds(*args):
    return by_arrival(*args)


@wrong("split_k_linear", fails="test_one_split")
def without_the_residual(*args):
    return by_arrival(*args, bug="no residual")


@wrong("split_k_linear", fails="test_splits")
def splits_overlap(*args):
    """Tiles are masked at the end of the columns, and not at the end of the split."""
    return by_arrival(*args, bug="overlap")


@wrong("split_k_linear", fails="test_splits")
def columns_are_left_over(x, weight, residual, splits):
    return by_arrival(x, weight, residual, splits, columns=max(len(x) // splits, 1))


@wrong("split_k_linear", fails="test_parts_of_about_the_same_size")
def the_rest_in_the_last_part(x, weight, residual, splits):
    return by_arrival(x, weight, residual, splits, bug="rest", columns=len(x) // splits)


@wrong("split_k_linear", fails="test_split_k_in_16_bits")
def partial_sums_in_16_bits(*args):
    return by_arrival(*args, bug="short")


@wrong("split_k_linear", fails="test_the_inputs_stay")
def changes_the_residual(*args):
    return by_arrival(*args, bug="in place")


@wrong("split_k_linear", fails="test_the_same_bits_in_any_order")
def added_on_arrival(*args):
    return by_arrival(*args, bug="atomic")


@wrong("split_k_linear", fails="test_programs_of_the_splits")
def one_program_for_each_block(x, weight, residual, splits):
    return by_arrival(x, weight, residual, 1)


@wrong("split_k_linear", fails="test_programs_of_the_splits")
def split_in_pytorch(x, weight, residual, splits):
    parts = [w.float() @ part.float() for w, part in zip(weight.split(64, 1), x.split(64), strict=True)]
    return (residual.float() + torch.stack(parts).sum(0)).to(residual.dtype)


@wrong("split_k_linear", fails="test_programs_of_the_splits")
def partial_sums_from_zeros(x, weight, residual, splits):
    """Every partial sum is written, so filling the tensor first is a launch for nothing."""
    torch.zeros(splits, len(weight), device=x.device)
    return by_arrival(x, weight, residual, splits)
