"""Homework of chapter 13: a scale for each row, zero points for groups, the layout of
an AWQ file, float8 by arithmetic, GPTQ's column loop, and bits under a budget.

None of the exercises is a part of the engine yet. `BITS` is given.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Int8, UInt8
from torch import Tensor

BITS = (2, 3, 4, 8)  # what `choose_bits` may choose from


def quantize_rows(
    matrix: Float[Tensor, "R C"],
) -> tuple[Int8[Tensor, "R C"], Float[Tensor, " R"]]:
    """Quantize a matrix to symmetric INT8, with a scale for each row.

    A number is represented by q * scale. What must hold:
        - q is in -127..127, and each number is rounded to the nearest multiple of its
          row's scale.
        - The largest magnitude of a row has q = 127 or -127.
        - A row of zeros has scale 1.
        - All arithmetic is in float32, whatever the dtype of the matrix.

    Args:
        matrix: finite numbers.

    Returns:
        q in int8, and the scales in float32.

    Example:

        >>> q, scale = quantize_rows(torch.tensor([[127.0, -3.4], [0.0, 0.5]]))
        >>> q.tolist(), [round(s, 4) for s in scale.tolist()]
        ([[127, -3], [0, 127]], [1.0, 0.0039])
    """
    wide = matrix.float()
    largest = wide.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return (wide / scale[:, None]).round().to(torch.int8), scale


def quantize_groups(
    matrix: Float[Tensor, "R C"], group: int
) -> tuple[UInt8[Tensor, "R C"], Float[Tensor, "R G"], UInt8[Tensor, "R G"]]:
    """Quantize a matrix to INT4 with a scale and an integer zero point for each group.

    Each row is divided into groups of neighboring columns. A number is represented by
    (q - zero) * scale. What must hold:
        - q and zero are integers in 0..15.
        - 0.0 is represented exactly, so the range of a group begins at its smallest
          number or at 0, whichever is less, and ends at its largest number or at 0,
          whichever is greater. This range is 15 steps of the scale wide.
        - The zero point is the q that represents 0.0, rounded to the nearest integer.
        - A group of zeros has scale 1 and zero point 0.

    Args:
        matrix: finite numbers, in float32.
        group: columns of a group.

    Returns:
        q in uint8, the scales in float32, and the zero points in uint8.

    Raises:
        ValueError: if the groups do not divide a row.

    Example: from -1 to 2 in 15 steps of 0.2. The second group has no negative number.

        >>> row = torch.tensor([[-1.0, 0.0, 0.35, 2.0, 1.0, 3.0, 2.0, 1.5]])
        >>> q, scale, zero = quantize_groups(row, group=4)
        >>> q.tolist(), zero.tolist()
        ([[0, 5, 7, 15, 5, 15, 10, 8]], [[5, 0]])
    """
    num_rows, num_columns = matrix.shape
    if num_columns % group:
        raise ValueError(f"groups of {group} do not divide {num_columns} columns")
    tiles = matrix.view(num_rows, -1, group)
    low = tiles.amin(dim=2).clamp(max=0)
    high = tiles.amax(dim=2).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 15, 1.0)
    zero = (-low / scale).round()
    # From -1.5 to 13.5, both zero and the largest number are rounded up: 2 + 14 = 16.
    q = ((tiles / scale[:, :, None]).round() + zero[:, :, None]).clamp(0, 15)
    return q.to(torch.uint8).view_as(matrix), scale, zero.to(torch.uint8)


def unpack_awq(
    qweight: Int[Tensor, "K N8"],
    qzeros: Int[Tensor, "G N8"],
    scales: Float[Tensor, "G N"],
) -> Float[Tensor, "N K"]:
    """Read a matrix from the tensors of an AWQ checkpoint.

    The layout:
        - The tensors store the transpose of the matrix: row k belongs to input k,
          column n to output n.
        - A word of 32 bits holds 8 neighboring columns of a row. Nibble i of word j,
          counted from the lowest bits, belongs to column 8 j + [0,2,4,6,1,3,5,7][i].
        - Zero points are stored in the same way, a row for each group of inputs.
        - All groups have the same number of consecutive inputs.
        - A number of the matrix is (q - zero) * scale.

    Args:
        qweight: int32, which has a sign, although the nibbles do not.
        qzeros: int32.
        scales: float16.

    Returns:
        The matrix [outputs, inputs] in float32.

    Example: one input and a group of one. The nibbles are 0 to 7 from the lowest.

        >>> word, zeros = torch.tensor([[[0x76543210]], [[0]]], dtype=torch.int32)
        >>> unpack_awq(word, zeros, torch.ones(1, 8).half())[:, 0].tolist()
        [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]
    """
    # Sorted by the columns that they belong to, the nibbles are these:
    shifts = 4 * torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).argsort()

    def unpacked(words: Tensor) -> Tensor:
        # The shift of a negative word fills up with ones, which the mask removes.
        return (words.long()[:, :, None] >> shifts & 15).flatten(1)

    group = len(qweight) // len(qzeros)
    zero, scale = (
        rows.repeat_interleave(group, dim=0)
        for rows in (unpacked(qzeros), scales.float())
    )
    return ((unpacked(qweight) - zero) * scale).T


def e4m3(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round numbers to float8 e4m3, and return them in float32.

    The format has a sign, 4 exponent bits with bias 7, and 3 mantissa bits. Its finite
    magnitudes are
        - the normal numbers (1 + m / 8) * 2 ** e, for m in 0..7 and e in -6..8, without
          the largest of them, 480, whose code means NaN;
        - the subnormal numbers m / 8 * 2 ** -6, for m in 0..7.
    There is no infinity. What must hold:
        - A number becomes the nearest of these, and of two equally near ones the one
          with an even m.
        - What is larger than 448, infinity included, becomes 448. NaN stays NaN.
        - The sign stays.
        - Arithmetic alone: no float8 tensor, and no Python loop over numbers.

    Args:
        x: float32 of any shape.

    Example: between 16 and 32 the numbers are 2 apart.

        >>> e4m3(torch.tensor([16.5, 17.0, 19.0, -500.0, 0.001])).tolist()
        [16.0, 16.0, 20.0, -448.0, 0.001953125]
    """
    # frexp's mantissa is in [0.5, 1), so its exponent is one more than e.
    exponent = (torch.frexp(x).exponent - 1).clamp(-6, 8)
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    return ((x / step).round() * step).clamp(-448, 448)


def gptq_columns(
    matrix: Float[Tensor, "Out In"],
    hessian: Float[Tensor, "In In"],
    scale: Float[Tensor, "Out G"],
    damping: float = 0.01,
) -> Int8[Tensor, "Out In"]:
    """Round a matrix to symmetric INT4 column by column, as GPTQ does.

    Column i is rounded to the nearest multiple of its group's scale, with q in -7..7.
    Then the columns that are not rounded yet change. Of all changes of these columns,
    theirs is the one that makes the sum of the squared errors of `x @ matrix.T` over
    the calibration tokens x least, given the columns that are rounded already. With H
    the damped Hessian of the columns that are not rounded yet, column i included, an
    error of e in column i (what it was, less what it became) changes column j by

        -e * inverse(H)[i, j] / inverse(H)[i, i]        (for all j > i)

    What must hold:
        - The damped Hessian has `damping` times the mean of the Hessian's diagonal
          added to each number of its diagonal. Its inverse exists.
        - The inputs are unchanged.
        - It inverts or factorizes a few matrices in all, and not one for each column.

    Args:
        matrix: the weight.
        hessian: the sum of x x^T over the calibration tokens.
        scale: of each row and group. The groups divide the columns evenly.
        damping: see above.

    Returns:
        q in int8.

    Example: three inputs that are nearly equal in every token. To nearest, the row
    would become 0, 0, 0.

        >>> tokens = torch.ones(9, 3) + 0.01 * torch.eye(3).repeat(3, 1)
        >>> row, one = torch.full((1, 3), 0.4), torch.ones(1, 1)
        >>> gptq_columns(row, tokens.T @ tokens, one).tolist()
        [[0, 1, 0]]
    """
    num_columns = matrix.shape[1]
    group = num_columns // scale.shape[1]
    left, h = matrix.float().clone(), hessian.double().clone()
    h.diagonal().add_(damping * hessian.double().diagonal().mean())
    # Row i of the upper Cholesky factor of the inverse is row i of the inverse that is
    # left after columns 0 to i - 1, divided by the root of its number on the diagonal.
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True).float()
    q = torch.empty_like(matrix, dtype=torch.int8)
    for i in range(num_columns):
        own = scale[:, i // group]
        q[:, i] = (left[:, i] / own).round().clamp(-7, 7)
        error = left[:, i] - q[:, i] * own
        left[:, i + 1 :] -= torch.outer(error / upper[i, i], upper[i, i + 1 :])
    return q


def choose_bits(
    sizes: Sequence[int], measure: Callable[[Sequence[int]], float], budget: int
) -> list[int]:
    """Choose the bits of each matrix of a model under a budget.

    A matrix of n numbers takes n * bits; scales take the same with all bits and do not
    count. What must hold:
        - Each matrix has 2, 3, 4 or 8 bits (`BITS`), and all of them together take at
          most `budget` bits.
        - `measure` is called at most 4 times for each matrix. In a real model a call
          takes seconds.
        - The loss of the choice is as small as you can make it. It is scored: the same
          bits for all matrices score 0, and the reference scores 1.

    Args:
        sizes: how many numbers each matrix has; up to 20 matrices.
        measure: takes the bits of each matrix, and returns the mean loss of a token
            (the logarithm of the perplexity) of the model with its matrices rounded so.
        budget: in bits.

    Raises:
        ValueError: if the matrices do not fit even with 2 bits.

    Example: the second matrix matters 50 times as much as the others.

        >>> def measure(bits):
        ...     return sum(c * 4.0**-b for c, b in zip([1, 50, 1], bits, strict=True))
        >>> choose_bits([100, 100, 100], measure, budget=1200)
        [3, 4, 4]
    """
    count = len(sizes)
    # What each matrix costs alone. Losses of several matrices do not quite add up, but
    # that they do is the best guess which so few calls allow.
    of_none = measure([8] * count)
    plans: list[tuple[int, float, list[int]]] = [(0, 0.0, [])]  # size, loss, bits
    left = sum(sizes)
    for i, size in enumerate(sizes):
        left -= size
        longer = []
        for bits in BITS:
            alone = of_none
            if bits < 8:
                alone = measure([bits if k == i else 8 for k in range(count)])
            for used, loss, chosen in plans:
                added = loss + alone - of_none
                longer.append((used + size * bits, added, [*chosen, bits]))
        # Keep a plan if the rest fits behind it, and no smaller plan has less loss.
        plans, least = [], float("inf")
        for plan in sorted(longer):
            if plan[0] + min(BITS) * left <= budget and plan[1] < least:
                plans.append(plan)
                least = plan[1]
    if not plans:
        raise ValueError(f"even with {min(BITS)} bits they take more than {budget}")
    return plans[-1][2]
