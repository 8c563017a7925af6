"""Homework of chapter 11: kernels of a decode step, fused, in Triton.

Each exercise but the first is a function that launches Triton programs of your own.
Write a kernel as a function decorated with `@triton.jit` above or below the exercise.
Without a GPU, Triton's interpreter runs the programs one after the other, and a
`print` inside a kernel shows its tiles. On a GPU they are compiled, and the grader
gives your functions tensors on the GPU. `linear` and its kernel are given: they show
most of the Triton that you need. In addition, `gate_up_silu` needs `tl.exp`, and the
norms need `tl.rsqrt`. For `rotate_and_store` and `split_k_linear` it helps to know that
a grid can have two dimensions, of which the second index is `tl.program_id(1)`; that
`tl.load(slots + token)` loads a single number; and that a kernel may use `if` on a
number. Allocate with `torch.empty` or `new_empty`: `torch.zeros` launches a kernel that
fills the tensor.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from book.triton_lab import DEVICE, tl, triton

ROWS, COLUMNS = 16, 64  # of the weight: the tile of a program, powers of two


class Kernel(NamedTuple):
    """What a kernel reads from memory and writes to it: names of tensors, and bytes."""

    reads: Mapping[str, int]
    writes: Mapping[str, int]


@triton.jit
def linear_kernel(
    x, weight, out, num_tokens, num_rows, K,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # the rows of this program
    is_token, is_row = (token < num_tokens)[:, None], (row < num_rows)[:, None]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = (column < K)[None, :]
        at = token[:, None] * K + column[None, :]
        tokens = tl.load(x + at, mask=is_token & is_column, other=0.0).to(tl.float32)
        at = row[:, None] * K + column[None, :]
        w = tl.load(weight + at, mask=is_row & is_column, other=0.0).to(tl.float32)
        total += tl.sum(tokens[:, None, :] * w[None, :, :], 2)
    at = token[:, None] * num_rows + row[None, :]
    mask = is_token & (row < num_rows)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def linear(
    x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"]
) -> Float[Tensor, "T N"]:
    """Compute `x @ weight.T`, accumulated in float32, with one program per 16 rows."""
    num_tokens, num_columns = x.shape
    out = x.new_empty(num_tokens, len(weight))
    linear_kernel[(triton.cdiv(len(weight), ROWS),)](
        x, weight, out, num_tokens, len(weight), num_columns,
        TOKENS=triton.next_power_of_2(num_tokens), ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return out


def fuse(kernels: Sequence[Kernel], needed: Collection[str]) -> Kernel:
    """Find the reads and writes that are left when consecutive kernels become one.

    A fused kernel keeps its intermediate results on chip. What must hold:
        - It reads a tensor from memory at most once, and only if some kernel reads the
          tensor before any kernel has written it.
        - It writes a tensor if some kernel writes it and it is needed afterwards.
        - A kernel may read and write the same tensor; it reads first.

    Args:
        kernels: in the order in which they run.
        needed: names of the tensors that are read after the last of these kernels.

    Example: a product followed by an addition to x, in place.

        >>> product = Kernel({"h": 2, "W": 50}, {"y": 2})
        >>> addition = Kernel({"x": 2, "y": 2}, {"x": 2})
        >>> fuse([product, addition], needed=["x"])
        Kernel(reads={'h': 2, 'W': 50, 'x': 2}, writes={'x': 2})
    """
    reads: dict[str, int] = {}
    written: dict[str, int] = {}
    for kernel in kernels:
        reads |= {
            name: size for name, size in kernel.reads.items() if name not in written
        }
        written |= kernel.writes
    return Kernel(reads, {name: n for name, n in written.items() if name in needed})


def add_rms_norm(
    x: Float[Tensor, "T D"],
    delta: Float[Tensor, "T D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """Add to the residual stream and normalize the sum, in one launch.

    What must hold:
        - One launch of one kernel, and no other computation, for any T and D.
        - Sum and norm are computed in float32, whatever the dtype of x.
        - Both results have the dtype of x. The inputs are unchanged.
        - x and delta are each read once from memory.

    Args:
        x: the residual stream, contiguous.
        delta: what is added to it, contiguous.
        weight: factors of the norm.
        eps: added to the mean square.

    Returns:
        `x + delta`, and its RMSNorm: each row divided by the square root of its mean
        square plus eps, times the weight.

    Example:

        >>> x, delta = torch.tensor([[[1.0, 6.0]], [[2.0, -2.0]]], device=DEVICE)
        >>> weight = torch.tensor([1.0, 2.0], device=DEVICE)
        >>> total, normed = add_rms_norm(x, delta, weight, eps=0.0)
        >>> total.tolist(), [round(y, 2) for y in normed[0].tolist()]
        ([[3.0, 4.0]], [0.85, 2.26])
    """
    total, normed = torch.empty_like(x), torch.empty_like(x)
    num_columns = x.shape[1]
    _add_rms_norm_kernel[(len(x),)](
        x, delta, weight, eps, total, normed, num_columns,
        WIDTH=triton.next_power_of_2(num_columns),
    )  # fmt: skip
    return total, normed


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, eps, total, normed, num_columns, WIDTH: tl.constexpr
):
    column = tl.arange(0, WIDTH)
    exists = column < num_columns
    at = tl.program_id(0) * num_columns + column
    row = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    row += tl.load(delta + at, mask=exists, other=0.0).to(tl.float32)
    dtype = total.dtype.element_ty
    tl.store(total + at, row.to(dtype), mask=exists)
    # The padding is 0, so it adds nothing to the sum. It must not be counted either.
    factor = tl.rsqrt(tl.sum(row * row, 0) / num_columns + eps)
    w = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(normed + at, (row * factor * w).to(dtype), mask=exists)


def norm_linear(
    x: Float[Tensor, "T K"],
    norm_weight: Float[Tensor, " K"],
    eps: float,
    weight: Float[Tensor, "N K"],
) -> Float[Tensor, "T N"]:
    """Compute `rms_norm(x, norm_weight, eps) @ weight.T` in one launch, for few tokens.

    With the rows of queries, keys and values as `weight` this is a layer's RMSNorm+QKV.
    What must hold:
        - One launch of one kernel, and no other computation.
        - The normalized tokens are not written to memory.
        - All sums are float32; the result has the dtype of x.
        - Each program reads each token once, and the weight is read once by all
          programs together, however many tokens there are.

    Args:
        x: 1 to 8 tokens, contiguous.
        norm_weight: factors of the norm.
        eps: added to the mean square.
        weight: contiguous, in the dtype of x.

    Example: the root mean square of (3, 4) is 3.54. The weight's third row adds both.

        >>> x = torch.tensor([[3.0, 4.0]], device=DEVICE)
        >>> w = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], device=DEVICE)
        >>> y = norm_linear(x, torch.ones_like(x[0]), 0.0, w)
        >>> [round(number, 2) for number in y[0].tolist()]
        [0.85, 1.13, 1.98]
    """
    num_tokens, num_columns = x.shape
    out = x.new_empty(num_tokens, len(weight))
    _norm_linear_kernel[(triton.cdiv(len(weight), ROWS),)](
        x, norm_weight, eps, weight, out, num_tokens, len(weight), num_columns,
        TOKENS=triton.next_power_of_2(num_tokens), ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return out


@triton.jit
def _norm_linear_kernel(
    x, norm_weight, eps, weight, out, num_tokens, num_rows, K,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token, is_row = (token < num_tokens)[:, None], (row < num_rows)[:, None]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = (column < K)[None, :]
        at = token[:, None] * K + column[None, :]
        tokens = tl.load(x + at, mask=is_token & is_column, other=0.0).to(tl.float32)
        squares += tl.sum(tokens * tokens, 1)  # of the tokens themselves
        factors = tl.load(norm_weight + column, mask=column < K, other=0.0)
        tokens *= factors.to(tl.float32)[None, :]
        at = row[:, None] * K + column[None, :]
        w = tl.load(weight + at, mask=is_row & is_column, other=0.0).to(tl.float32)
        total += tl.sum(tokens[:, None, :] * w[None, :, :], 2)
    # 1 / rms is common to a token's row, so it can wait until the sums are complete.
    total *= tl.rsqrt(squares / K + eps)[:, None]
    at = token[:, None] * num_rows + row[None, :]
    mask = is_token & (row < num_rows)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


def gate_up_silu(
    x: Float[Tensor, "T K"], gate_up: Float[Tensor, "I2 K"]
) -> Float[Tensor, "T I"]:
    """Compute `silu(x @ gate.T) * (x @ up.T)` in one launch, for few tokens (SwiGLU).

    What must hold:
        - One launch of one kernel, and no other computation.
        - The two products are not written to memory, and are not rounded before they
          are multiplied.
        - All sums are float32; the result has the dtype of x.
        - The weight is read once by all programs together.

    Args:
        x: 1 to 8 tokens, contiguous.
        gate_up: the I rows of the gate, then the I rows of the up projection.

    Example: gate and up of the token are 1 and 3, and silu(1) = 1 / (1 + exp(-1)).

        >>> x = torch.tensor([[1.0, 3.0]], device=DEVICE)
        >>> y = gate_up_silu(x, torch.eye(2, device=DEVICE))
        >>> round(y.item(), 3)
        2.193
    """
    num_tokens, num_columns = x.shape
    inner = len(gate_up) // 2
    out = x.new_empty(num_tokens, inner)
    _gate_up_silu_kernel[(triton.cdiv(inner, ROWS),)](
        x, gate_up, out, num_tokens, inner, num_columns,
        TOKENS=triton.next_power_of_2(num_tokens), ROWS=ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    return out


@triton.jit
def _gate_up_silu_kernel(
    x, gate_up, out, num_tokens, inner, K,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # of the gate
    is_token, is_row = (token < num_tokens)[:, None], (row < inner)[:, None]
    gate = tl.zeros((TOKENS, ROWS), tl.float32)
    up = tl.zeros((TOKENS, ROWS), tl.float32)
    for first in range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = (column < K)[None, :]
        at = token[:, None] * K + column[None, :]
        tokens = tl.load(x + at, mask=is_token & is_column, other=0.0).to(tl.float32)
        at = row[:, None] * K + column[None, :]
        mask = is_row & is_column
        w = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
        gate += tl.sum(tokens[:, None, :] * w[None, :, :], 2)
        # A program that has a row of the gate has the same row of the up projection.
        w = tl.load(gate_up + inner * K + at, mask=mask, other=0.0).to(tl.float32)
        up += tl.sum(tokens[:, None, :] * w[None, :, :], 2)
    product = gate / (1 + tl.exp(-gate)) * up
    at = token[:, None] * inner + row[None, :]
    mask = is_token & (row < inner)[None, :]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)


def rotate_and_store(
    qkv: Float[Tensor, "T W"],
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    k_pages: Float[Tensor, "P S Hk D"],
    v_pages: Float[Tensor, "P S Hk D"],
    slot_mapping: Int64[Tensor, " T"],
) -> Float[Tensor, "T Hq D"]:
    """Rotate queries and keys, store keys and values in the cache, and return queries.

    The row of a token holds its heads: queries first, then keys, then values,
    each of D numbers: W = (Hq + 2 Hk) D. What must hold:
        - One launch of one kernel, and no other computation.
        - RoPE as in chapter 01: numbers j and j + D/2 of a head are a pair, which
          becomes (a cos - b sin, b cos + a sin). Values are not rotated.
        - The rotation is computed in float32 and rounded once.
        - Nothing else in the cache changes.

    Args:
        qkv: output of the packed projection, contiguous.
        cos: of each token and pair, in float32.
        sin: likewise.
        k_pages: keys of the layer in pages of S slots, contiguous; changed in place.
        v_pages: likewise.
        slot_mapping: slot of each token, page * S + offset in the page.

    Example: one query head, one KV head, and a right angle.

        >>> row = torch.tensor([[1.0, 0.0, 0.0, 2.0, 5.0, 6.0]], device=DEVICE)
        >>> cos, sin = torch.tensor([[[0.0]], [[1.0]]], device=DEVICE)
        >>> k, v = torch.zeros(2, 1, 2, 1, 2, device=DEVICE)  # a page of two slots
        >>> slot = torch.tensor([1], device=DEVICE)
        >>> rotate_and_store(row, cos, sin, k, v, slot)[0, 0].tolist()
        [0.0, 1.0]
        >>> k[0, :, 0].tolist(), v[0, :, 0].tolist()
        ([[0.0, 0.0], [-2.0, 0.0]], [[0.0, 0.0], [5.0, 6.0]])
    """
    _, _, num_kv, head_dim = k_pages.shape
    num_tokens, num_heads = len(qkv), qkv.shape[1] // head_dim
    num_q = num_heads - 2 * num_kv
    q = qkv.new_empty(num_tokens, num_q, head_dim)
    _rotate_and_store_kernel[(num_tokens, num_heads)](
        qkv, cos, sin, k_pages, v_pages, slot_mapping, q, num_q, num_kv,
        HALF=head_dim // 2, WIDTH=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip
    return q


@triton.jit
def _rotate_and_store_kernel(
    qkv, cos, sin, keys, values, slots, q, num_q, num_kv,
    HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, WIDTH)
    exists = pair < HALF
    source = qkv + (token * (num_q + 2 * num_kv) + head) * 2 * HALF + pair
    a = tl.load(source, mask=exists).to(tl.float32)
    b = tl.load(source + HALF, mask=exists).to(tl.float32)
    if head < num_q + num_kv:
        c = tl.load(cos + token * HALF + pair, mask=exists)
        s = tl.load(sin + token * HALF + pair, mask=exists)
        rotated = a * c - b * s
        b = b * c + a * s
        a = rotated
    if head < num_q:
        to = q + (token * num_q + head) * 2 * HALF
    else:
        slot = tl.load(slots + token)  # int64: a pool may exceed 2**31 numbers
        offset = (slot * num_kv + (head - num_q) % num_kv) * 2 * HALF
        to = keys + offset if head < num_q + num_kv else values + offset
    dtype = q.dtype.element_ty
    tl.store(to + pair, a.to(dtype), mask=exists)
    tl.store(to + HALF + pair, b.to(dtype), mask=exists)


def split_k_linear(
    x: Float[Tensor, " K"],
    weight: Float[Tensor, "N K"],
    residual: Float[Tensor, " N"],
    splits: int,
) -> Float[Tensor, " N"]:
    """Compute `residual + weight @ x` with several programs for each block of rows.

    What must hold:
        - At most two launches, and no other computation. In the first, the columns are
          divided into `splits` parts of about the same size, and each part of a block
          of at most 16 rows has a program of its own.
        - The result is bitwise identical in whatever order the programs run.
        - All sums are float32, and the result is rounded once, to the dtype of x. The
          inputs are unchanged.
        - The weight is read once by all programs together.

    Args:
        x: one token, contiguous.
        weight: contiguous, in the dtype of x.
        residual: in the dtype of x.
        splits: parts of the columns, 1 or more; perhaps more than there are columns.

    Example:

        >>> weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=DEVICE)
        >>> ones = torch.ones(3, device=DEVICE)
        >>> residual = torch.tensor([10.0, 20.0], device=DEVICE)
        >>> split_k_linear(ones, weight, residual, splits=2).tolist()
        [16.0, 35.0]
    """
    num_rows, num_columns = weight.shape
    columns = triton.cdiv(num_columns, splits)
    partials = x.new_empty(splits, num_rows, dtype=torch.float32)
    out = torch.empty_like(residual)
    blocks = triton.cdiv(num_rows, ROWS)
    _partial_kernel[(blocks, splits)](
        x, weight, partials, num_rows, num_columns, columns, ROWS=ROWS, COLUMNS=COLUMNS
    )
    _reduce_kernel[(blocks,)](partials, residual, out, num_rows, splits, ROWS=ROWS)
    return out


@triton.jit
def _partial_kernel(
    x, weight, partials, num_rows, K, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, split = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    end = tl.minimum((split + 1) * columns, K)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(split * columns, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at = row[:, None] * K + column[None, :]
        mask = (row < num_rows)[:, None] & (column < end)[None, :]
        w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        token = tl.load(x + column, mask=column < end, other=0.0).to(tl.float32)
        total += tl.sum(w * token[None, :], 1)
    tl.store(partials + split * num_rows + row, total, mask=row < num_rows)


@triton.jit
def _reduce_kernel(partials, residual, out, num_rows, splits, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    total = tl.load(residual + row, mask=exists).to(tl.float32)
    for split in range(splits):  # in the order of the columns, for every row
        total += tl.load(partials + split * num_rows + row, mask=exists)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=exists)
