"""Grader of chapter 13. Its oracles are loops in float64, PyTorch's float8, and optimal brain quantization."""

import itertools

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from book.grading import (
    Exercise,
    Homework,
    assert_close,
    assert_equal,
    assert_raises,
    check,
    lines_run,
    require,
)

EXERCISES = [
    Exercise(
        "quantize_rows",
        points=2,
        minutes=10,
        difficulty=1,
        hints=(
            "The chapter did it for a whole matrix. Which of its numbers becomes one for each row?",
            "Reduce along dim=1, and give the scale a second axis where it divides. A row of zeros would divide by 0.",
            "largest = matrix.float().abs().amax(1); scale = torch.where(largest > 0, largest / 127, 1.0); round "
            "matrix.float() / scale[:, None] and convert it to int8.",
        ),
    ),
    Exercise(
        "quantize_groups",
        points=4,
        minutes=25,
        difficulty=2,
        hints=(
            "View the matrix as [rows, groups, columns of a group], and write down the range of one group whose "
            "numbers are all positive. What does its zero point have to be?",
            "low = the least of the smallest number and 0, high likewise; scale = (high - low) / 15. zero is -low / "
            "scale, rounded. Work out q for a range from -1.5 to 13.5.",
            "tiles = matrix.view(R, -1, group); low = tiles.amin(2).clamp(max=0); high = tiles.amax(2).clamp(min=0); "
            "q = (tiles / scale[..., None]).round() + zero[..., None], clamped to 0..15.",
        ),
    ),
    Exercise(
        "unpack_awq",
        points=4,
        minutes=25,
        difficulty=2,
        hints=(
            "Take the word 0x76543210 and write, for each column, which nibble it needs. Is this the list of the "
            "docstring?",
            "Column c of a word needs the nibble i for which [0,2,4,6,1,3,5,7][i] = c. Shift by 4 i, and keep four "
            "bits.",
            "shifts = 4 * torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]).argsort(); (words[:, :, None] >> shifts & "
            "15).flatten(1) has the columns in order. Repeat zeros and scales for the inputs of a group; transpose.",
        ),
    ),
    Exercise(
        "e4m3",
        points=4,
        minutes=30,
        difficulty=2,
        hints=(
            "Between two powers of two, the numbers of the format are equally far apart. How far?",
            "Round x / step to an integer and multiply by step again. step is 2 ** (e - 3), where e is the exponent "
            "of x, but at least -6. torch.round rounds ties to even.",
            "e = (torch.frexp(x).exponent - 1).clamp(-6, 8); step = torch.ldexp(torch.ones_like(x), e - 3); clamp the "
            "result to -448..448.",
        ),
    ),
    Exercise(
        "gptq_columns",
        points=6,
        minutes=60,
        difficulty=3,
        hints=(
            "Begin with the slow version: invert the damped Hessian, round a column, change the later columns as the "
            "docstring says. Which inverse does the next column need?",
            "The inverse for columns i and later is what is left of the one before: subtract outer(column, row) / "
            "diagonal of its first column, and drop that column and row. A Cholesky factorization does just this.",
            "U = torch.linalg.cholesky(torch.linalg.inv(h), upper=True). For each i: round left[:, i] to its group's "
            "scale, error = (left[:, i] - rounded) / U[i, i], left[:, i + 1:] -= torch.outer(error, U[i, i + 1:]).",
        ),
    ),
    Exercise(
        "choose_bits",
        points=4,
        minutes=45,
        difficulty=3,
        challenge=True,
        hints=(
            "Make a table first: the loss with one matrix at 2, 3, 4 or 8 bits, and all others at 8. That takes 3 "
            "calls for each matrix, and one. The rest is a choice of one column in each row of the table.",
            "A greedy choice starts with 2 bits everywhere and buys, again and again, the largest gain per bit. It "
            "comes close. To do better, go through the matrices and keep a list of (size, loss, bits) of plans.",
            "Extend each plan by each of the four choices, sort by size, and drop a plan if a smaller one has less "
            "loss, or if it leaves too little for the rest at 2 bits each. The last plan is the best.",
        ),
    ),
]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def as_tuple(got: object, count: int, what: str) -> tuple:
    require(isinstance(got, tuple) and len(got) == count, f"return a tuple of {count}: {what}")
    assert isinstance(got, tuple)
    for each in got:
        require(isinstance(each, Tensor), f"{what} are tensors, not {type(each).__name__}")
    return got


def assert_dtype(got: Tensor, want: torch.dtype, name: str) -> None:
    require(got.dtype == want, f"{name} has dtype {str(got.dtype)[6:]} instead of {str(want)[6:]}")


# quantize_rows ------------------------------------------------------------------------------------------------------


def assert_rows(hw: Homework, matrix: Tensor) -> None:
    q, scale = as_tuple(hw.quantize_rows(matrix), 2, "q and the scales")
    assert_dtype(q, torch.int8, "q")
    assert_dtype(scale, torch.float32, "the scale")
    wide = matrix.double()
    largest = wide.abs().amax(1)
    want = torch.where(largest > 0, largest / 127, 1.0)
    assert_close(scale.double(), want, rtol=1e-6, atol=0.0, name="the scales")
    require(int(q.min()) >= -127, "q is -128 somewhere: the range is symmetric")
    require(q.shape == matrix.shape, f"q has shape {list(q.shape)}, and the matrix {list(matrix.shape)}")
    distance = ((q * want[:, None] - wide) / want[:, None]).abs()
    assert distance.max() <= 0.5001, f"a number is {distance.max():.2f} steps away from its q; 0.5 is possible"


@check("quantize_rows", mistake="each number becomes the nearest integer multiple of the scale, largest / 127")
def test_a_row(hw: Homework) -> None:
    assert_rows(hw, torch.tensor([[127.0, -3.4, 0.5, 1.5, 2.6, -126.7]]))
    assert_rows(hw, torch.tensor([[-2.0, 0.3, 1.0]]))


@check("quantize_rows", mistake="each row has a scale of its own")
def test_rows(hw: Homework) -> None:
    assert_rows(hw, randn(6, 40, seed=0) * torch.logspace(-3, 3, 6)[:, None])
    assert_rows(hw, randn(5, 5, seed=1) * torch.logspace(-2, 2, 5)[:, None])


@check("quantize_rows", mistake="a row of zeros has scale 1; it must not divide by 0, and its q are 0")
def test_a_row_of_zeros(hw: Homework) -> None:
    assert_rows(hw, torch.tensor([[0.0, 0.0], [1.0, 2.0]]))


@check("quantize_rows", mistake="convert to float32 before you divide: bfloat16 has 8 significant bits")
def test_rows_in_bfloat16(hw: Homework) -> None:
    assert_rows(hw, randn(8, 256, seed=2).bfloat16())


# quantize_groups ----------------------------------------------------------------------------------------------------


def groups_oracle(matrix: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """One group after the other, in float64."""
    rows, columns = matrix.shape
    q, tiles = torch.zeros(rows, columns, dtype=torch.uint8), columns // group
    scale, zero = torch.ones(rows, tiles), torch.zeros(rows, tiles, dtype=torch.uint8)
    for row, tile in itertools.product(range(rows), range(tiles)):
        numbers = matrix[row, tile * group : (tile + 1) * group].double()
        low, high = min(0.0, float(numbers.min())), max(0.0, float(numbers.max()))
        if high > low:
            step = (high - low) / 15
            own = round(-low / step)
            scale[row, tile], zero[row, tile] = step, own
            q[row, tile * group : (tile + 1) * group] = ((numbers / step).round() + own).clamp(0, 15).to(torch.uint8)
    return q, scale, zero


def assert_groups(hw: Homework, matrix: Tensor, group: int) -> None:
    before = matrix.clone()
    q, scale, zero = as_tuple(hw.quantize_groups(matrix, group), 3, "q, the scales and the zero points")
    require(torch.equal(matrix, before), "you changed the matrix")
    for each, dtype, name in ((q, torch.uint8, "q"), (scale, torch.float32, "scale"), (zero, torch.uint8, "zero")):
        assert_dtype(each, dtype, name)
    want = groups_oracle(matrix, group)
    assert_close(scale, want[1], rtol=1e-5, atol=0.0, name="the scales")
    assert_equal(zero, want[2], name="the zero points")
    assert_equal(q, want[0], name="q")


@check("quantize_groups", mistake="a range of 15 steps has 16 values: scale = (high - low) / 15, zero = -low / scale")
def test_one_group(hw: Homework) -> None:
    assert_groups(hw, torch.tensor([[-1.0, 0.0, 0.35, 2.0]]), 4)
    assert_groups(hw, torch.tensor([[-3.1, 0.7, 1.5, 2.9]]), 4)


@check(
    "quantize_groups", mistake="a group is neighboring columns of one row, and has a scale and zero point of its own"
)
def test_several_groups(hw: Homework) -> None:
    sizes = torch.logspace(-2, 2, 24).view(3, 8).T.flip(0).repeat_interleave(4, dim=1)
    assert_groups(hw, torch.tensor([-1.0, 0.33, 1.55, 2.0]).repeat(8, 3) * sizes, 4)


@check("quantize_groups", mistake="the range includes 0, or the zero point of a group of positive numbers is below 0")
def test_numbers_of_one_sign(hw: Homework) -> None:
    assert_groups(hw, randn(4, 16, seed=4).abs() + 1, 8)
    assert_groups(hw, -randn(4, 16, seed=5).abs() - 1, 8)


@check(
    "quantize_groups", mistake="the zero point and the largest number may both be rounded up, to 16: clamp q to 0..15"
)
def test_the_ends_of_the_range(hw: Homework) -> None:
    assert_groups(hw, torch.tensor([[-1.5, 13.5, 3.0, 0.0]]), 4)
    assert_groups(hw, randn(64, 64, seed=6), 16)


@check("quantize_groups", mistake="a group of zeros has scale 1 and zero point 0")
def test_a_group_of_zeros(hw: Homework) -> None:
    assert_groups(hw, torch.tensor([[0.0, 0.0, 1.0, -1.5]]), 2)


@check("quantize_groups", mistake="raise ValueError if the groups do not divide a row")
def test_ragged_groups(hw: Homework) -> None:
    assert_raises(ValueError, hw.quantize_groups, randn(4, 12, seed=7), 8)


# unpack_awq ---------------------------------------------------------------------------------------------------------

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_awq(numbers: Tensor) -> Tensor:
    """Store rows of numbers 0..15 as AWQ does, one nibble after the other."""
    rows, columns = numbers.shape
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for j, i in itertools.product(range(columns // 8), range(8)):
        words[:, j] |= numbers[:, 8 * j + AWQ_ORDER[i]].long() << 4 * i
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def assert_awq(hw: Homework, q: Tensor, zero: Tensor, scales: Tensor) -> None:
    group = len(q) // len(zero)
    want = ((q - zero.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)).T
    got = hw.unpack_awq(pack_awq(q), pack_awq(zero), scales)
    require(isinstance(got, Tensor), f"return a tensor, not {type(got).__name__}")
    assert_dtype(got, torch.float32, "the matrix")
    assert_close(got, want, rtol=1e-6, atol=0.0, name="the matrix")


def numbers(rows: int, columns: int, seed: int, most: int = 16) -> Tensor:
    return torch.randint(most, (rows, columns), generator=torch.Generator().manual_seed(seed))


@check(
    "unpack_awq", mistake="you read the order backwards: nibble i goes to column order[i]. Or the transpose is missing"
)
def test_one_word(hw: Homework) -> None:
    assert_awq(hw, torch.arange(8)[None], torch.zeros(1, 8).long(), torch.ones(1, 8).half())


@check(
    "unpack_awq", mistake="the highest bit of a word is part of a nibble; a shift of an int32 repeats it: mask with 15"
)
def test_the_sign_bit(hw: Homework) -> None:
    assert_awq(hw, torch.arange(8, 16)[None], torch.zeros(1, 8).long(), torch.ones(1, 8).half())


@check(
    "unpack_awq",
    mistake="words are in the order of the columns, and each row is one input: the result is [outputs, inputs]",
)
def test_several_words(hw: Homework) -> None:
    assert_awq(hw, numbers(6, 32, 8), torch.zeros(1, 32).long(), torch.ones(1, 32).half())


@check("unpack_awq", mistake="zero points are stored as they are (not less 1), in the same order as the numbers")
def test_zero_points(hw: Homework) -> None:
    assert_awq(hw, numbers(4, 16, 9), numbers(1, 16, 10), torch.ones(1, 16).half())


@check("unpack_awq", mistake="a group is consecutive inputs: its zero points and scales are repeated for each of them")
def test_groups_of_inputs(hw: Homework) -> None:
    scales = torch.exp2(numbers(3, 16, 13, most=5).float()).half()
    assert_awq(hw, numbers(12, 16, 11), numbers(3, 16, 12), scales)


@check("unpack_awq", mistake="multiply in float32: a product of a float16 scale, rounded to float16, loses bits")
def test_float32(hw: Homework) -> None:
    assert_awq(hw, numbers(64, 64, 14), numbers(2, 64, 15), (randn(2, 64, seed=16).abs() * 0.003).half())


# e4m3 ---------------------------------------------------------------------------------------------------------------


def assert_e4m3(hw: Homework, x: Tensor) -> None:
    before, got = x.clone(), hw.e4m3(x)
    require(torch.equal(x.nan_to_num(), before.nan_to_num()), "you changed x")
    want = x.clone().to(torch.float8_e4m3fn).float()  # saturates
    assert_close(got, want, rtol=0.0, atol=0.0, name="the rounded numbers")


FINITE = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # from 0 to 448


@check("e4m3", mistake="a number of the format stays as it is, whatever its exponent")
def test_numbers_of_the_format(hw: Homework) -> None:
    normal = FINITE[FINITE >= 2**-6]
    assert_e4m3(hw, normal)
    assert_e4m3(hw, -normal)


@check("e4m3", mistake="round to the nearest of 8 numbers between two powers of two (3 mantissa bits, not 2 and not 4)")
def test_the_nearest_number(hw: Homework) -> None:
    assert_e4m3(hw, torch.tensor([1.06, 1.07, 3.3, -3.4, 101.0, 207.9, 0.031, -0.017]))
    assert_e4m3(hw, 0.1 + 80 * randn(999, seed=23).abs().clamp(max=5))


@check("e4m3", mistake="a tie goes to the number whose last mantissa bit is 0, not up and not away from zero")
def test_ties(hw: Homework) -> None:
    normal = FINITE[FINITE >= 2**-6]
    middles = (normal[1:] + normal[:-1]) / 2
    assert_e4m3(hw, torch.cat((middles, -middles)))


@check(
    "e4m3",
    mistake="below 2 ** -6 the numbers are 2 ** -9 apart, down to 0: the exponent ends at -6. And log2(0) is -inf",
)
def test_subnormals(hw: Homework) -> None:
    assert_e4m3(hw, FINITE[FINITE < 2**-6])
    assert_e4m3(hw, torch.linspace(-(2**-6), 2**-6, 301))
    assert_e4m3(hw, torch.tensor([2**-10, 2**-10 * 1.001, 1e-30, 1e-44, 0.0]))


@check("e4m3", mistake="the largest number is 448, and what is larger becomes 448, infinity included; NaN stays NaN")
def test_saturation(hw: Homework) -> None:
    large = torch.tensor([447.0, 448.0, 449.0, 463.0, 465.0, 480.0, 1e4, 3e38, float("inf")])
    assert_e4m3(hw, torch.cat((large, -large, torch.tensor([float("nan")]))))


@check("e4m3", mistake="x may have any shape and size")
def test_any_shape(hw: Homework) -> None:
    for shape in ((), (0,), (2, 3, 4)):
        assert_e4m3(hw, randn(*shape, seed=17))
    assert_e4m3(hw, randn(50_000, seed=18) * torch.exp2(10 * randn(50_000, seed=19)))


class _NoFloat8(TorchDispatchMode):
    """Refuses operators whose result is a float8 tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                require("float8" not in str(result.dtype), f"{func.overloadpacket.__name__} makes a {result.dtype}")
        return results


@check("e4m3", mistake="use arithmetic alone", costs=0.4)
def test_no_float8_tensor(hw: Homework) -> None:
    with _NoFloat8():
        hw.e4m3(randn(16, seed=20))


@check("e4m3", mistake="use no Python loop over numbers", costs=0.3)
def test_no_loop_over_numbers(hw: Homework) -> None:
    counts = [lines_run(hw.e4m3, randn(size, seed=21)) for size in (64, 512)]
    assert counts[1] < 3 * counts[0], f"{counts[1]} lines of Python run for 512 numbers, and {counts[0]} for 64"


# gptq_columns -------------------------------------------------------------------------------------------------------


def by_definition(matrix: Tensor, hessian: Tensor, scale: Tensor, damping: float) -> Tensor:
    """Optimal brain quantization in the order of the columns, in float64: an inverse for each column."""
    columns = matrix.shape[1]
    group, w = columns // scale.shape[1], matrix.double().clone()
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    q = torch.zeros(matrix.shape, dtype=torch.int8)
    for i in range(columns):
        inverse, own = torch.linalg.inv(h[i:, i:]), scale[:, i // group].double()
        q[:, i] = (w[:, i] / own).round().clamp(-7, 7).to(torch.int8)
        w[:, i:] -= torch.outer((w[:, i] - q[:, i] * own) / inverse[0, 0], inverse[0])
    return q


def tokens_like(count: int, columns: int, seed: int) -> Tensor:
    return randn(count, columns, seed=seed) @ (randn(columns, columns, seed=seed + 1) * torch.logspace(1, 0, columns))


def group_scales(matrix: Tensor, group: int) -> Tensor:
    return matrix.view(len(matrix), -1, group).abs().amax(2) / 7


def assert_gptq(
    hw: Homework, matrix: Tensor, hessian: Tensor, scale: Tensor, damping: float = 1e-6, share: float = 0.97
) -> None:
    before = [each.clone() for each in (matrix, hessian, scale)]
    q = hw.gptq_columns(matrix, hessian, scale, damping)
    require(isinstance(q, Tensor), f"return a tensor, not {type(q).__name__}")
    for now, then in zip((matrix, hessian, scale), before, strict=True):
        require(torch.equal(now, then), "you changed an input")
    assert_dtype(q, torch.int8, "q")
    require(q.shape == matrix.shape, f"q has shape {list(q.shape)}, and the matrix {list(matrix.shape)}")
    want = by_definition(matrix, hessian, scale, damping)
    same = float((q == want).double().mean())
    # A number near the middle of two steps may be rounded the other way, and those after it then differ.
    assert same >= share, (
        f"{1 - same:.0%} of q differ from the definition, such as {q[0, :8].tolist()} in the first row"
    )


@check("gptq_columns", mistake="without interaction (a diagonal Hessian) each number is rounded to nearest, in -7..7")
def test_columns_that_do_not_interact(hw: Homework) -> None:
    matrix = randn(4, 16, seed=22)
    assert_gptq(hw, matrix, torch.diag(torch.arange(1.0, 17.0)), group_scales(matrix, 16), share=1.0)


@check("gptq_columns", mistake="follow two columns by hand: the second one makes up for the error of the first one")
def test_two_columns(hw: Homework) -> None:
    x = torch.tensor([[1.0, 1.0], [1.0, 0.9], [0.8, 1.0]])
    for row in ([0.4, 0.4], [0.4, -0.4], [0.3, 2.3], [-1.4, 0.2]):
        assert_gptq(hw, torch.tensor([row]), x.T @ x, torch.ones(1, 1), share=1.0)
    x = torch.tensor([[1.0, 3.0], [1.0, 2.5], [0.5, 2.0]])  # the second is larger, so it changes less
    for row in ([0.4, 0.4], [1.4, -0.3], [-0.45, 0.38]):
        assert_gptq(hw, torch.tensor([row]), x.T @ x, torch.ones(1, 1), share=1.0)


@check(
    "gptq_columns",
    mistake="the inverse for a column is that of the columns from it on; the rounded ones can no longer change",
)
def test_many_columns(hw: Homework) -> None:
    for seed in range(5):
        x, matrix = tokens_like(100, 24, 30 + 2 * seed), randn(6, 24, seed=50 + seed)
        assert_gptq(hw, matrix, x.T @ x, group_scales(matrix, 24))


@check("gptq_columns", mistake="a column has the scale of its group, and a changed number that is too large is clamped")
def test_groups_of_columns(hw: Homework) -> None:
    for seed in range(5):
        x, matrix = tokens_like(100, 24, 60 + 2 * seed), randn(6, 24, seed=70 + seed) * torch.logspace(0, 1, 24)
        assert_gptq(hw, matrix, x.T @ x, group_scales(matrix, 8))


@check(
    "gptq_columns",
    mistake="add damping times the mean of the diagonal to the diagonal: an unused column has no inverse",
)
def test_damping(hw: Homework) -> None:
    x, matrix = tokens_like(100, 16, 80), randn(6, 16, seed=81)
    x[:, 5] = 0
    for damping in (0.01, 0.1, 1.0):
        assert_gptq(hw, matrix, x.T @ x, group_scales(matrix, 16), damping)


class _Factorizations(TorchDispatchMode):
    """Counts operators that invert, factorize or solve."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        self.count += any(part in name for part in ("inv", "cholesky", "solve", "lu_factor", "qr", "eig", "svd", "ldl"))
        return func(*args, **(kwargs or {}))


@check(
    "gptq_columns",
    mistake="factorize once: row i of the upper Cholesky factor of the inverse is what column i needs",
    costs=0.3,
)
def test_few_factorizations(hw: Homework) -> None:
    x, matrix = tokens_like(100, 48, 82), randn(6, 48, seed=84)
    with _Factorizations() as counter:
        hw.gptq_columns(matrix, x.T @ x, group_scales(matrix, 48))
    assert counter.count <= 12, f"{counter.count} matrices are inverted, factorized or solved for 48 columns"


# choose_bits --------------------------------------------------------------------------------------------------------


def rounded(matrix: Tensor, bits: int) -> Tensor:
    """Symmetric integers in groups of 16 columns, dequantized."""
    tiles, largest = matrix.view(len(matrix), -1, 16), 2 ** (bits - 1) - 1
    scale = tiles.abs().amax(2, keepdim=True) / largest
    return ((tiles / scale).round() * scale).view_as(matrix)


class Toy:
    """A residual network of matrices of different sizes and importance, and the loss of its rounded versions."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        wide = torch.randint(1, 7, (count,), generator=generator).tolist()
        self.matrices = []
        for i, times in enumerate(wide):
            down, up = (torch.randn(*shape, generator=generator) for shape in ((32, 16 * times), (16 * times, 32)))
            factor = float(torch.randn((), generator=generator).exp())
            self.matrices.append(down @ up / (16 * times) ** 0.5 * factor / 6 if i % 4 else up * factor / 6)
        self.x = torch.randn(64, 32, generator=generator)
        self.head = torch.randn(10, 32, generator=generator) / 2
        self.sizes = [matrix.numel() * (1 + i % 3) for i, matrix in enumerate(self.matrices)]  # as if some were wider
        self.want = self._logits([32] * count).softmax(1)
        self.calls = 0

    def _logits(self, bits: list[int]) -> Tensor:
        x = self.x
        for matrix, own in zip(self.matrices, bits, strict=True):
            w = matrix if own == 32 else rounded(matrix, own)
            inside = torch.nn.functional.rms_norm(x, (32,)) @ w.T
            x = x + (inside.tanh() if len(w) == 32 else inside.tanh() @ matrix / len(w) ** 0.5)
        return torch.nn.functional.rms_norm(x, (32,)) @ self.head.T

    def loss(self, bits: list[int]) -> float:
        return float(torch.nn.functional.cross_entropy(self._logits(bits).double(), self.want.double()))

    def measure(self, bits: list[int]) -> float:
        bits = [int(own) for own in bits]
        require(len(bits) == len(self.sizes), f"measure takes the bits of {len(self.sizes)} matrices, not {bits}")
        require(set(bits) <= {2, 3, 4, 8}, f"measure takes 2, 3, 4 or 8 bits, not {bits}")
        self.calls += 1
        require(
            self.calls <= 4 * len(self.sizes), f"measure is called more than 4 times for each of {len(bits)} matrices"
        )
        return self.loss(bits)


def size_of(sizes: list[int], bits: list[int]) -> int:
    return sum(size * own for size, own in zip(sizes, bits, strict=True))


def score(hw: Homework, count: int, seed: int, bits_each: float) -> float:
    """Return 0 for the loss of the same bits for all matrices, and 1 for the reference's."""
    toy = Toy(count, seed)
    budget = int(bits_each * sum(toy.sizes))
    got = hw.choose_bits(list(toy.sizes), toy.measure, budget)
    require(
        isinstance(got, list) and len(got) == count, f"return a list with the bits of {count} matrices, not {got!r}"
    )
    require(set(got) <= {2, 3, 4, 8}, f"bits are 2, 3, 4 or 8, not {sorted(set(got) - {2, 3, 4, 8})}")
    used = size_of(toy.sizes, got)
    require(used <= budget, f"your choice takes {used:,} bits, and the budget is {budget:,}")
    same = toy.loss([max(b for b in (2, 3, 4, 8) if b <= bits_each)] * count)
    reference = toy.loss(REFERENCE[count, seed, bits_each])
    return max(-1.0, (same - toy.loss(got)) / (same - reference))


# matrices, seed, and bits of each on average -> what the reference chooses
REFERENCE: dict[tuple[int, int, float], list[int]] = {
    (8, 91, 4.0): [2, 4, 4, 8, 4, 4, 4, 3],
    (10, 92, 3.3): [2, 4, 4, 8, 3, 4, 4, 4, 2, 4],
    (12, 93, 2.5): [4, 2, 2, 4, 2, 2, 3, 3, 3, 3, 2, 2],
    (12, 94, 5.0): [4, 8, 8, 8, 3, 4, 8, 4, 4, 8, 4, 4],
    (10, 95, 3.0): [3, 4, 3, 4, 2, 4, 3, 4, 2, 4],
    (14, 96, 3.5): [8, 4, 4, 8, 4, 4, 8, 4, 2, 4, 4, 3, 2, 3],
}


@check("choose_bits", mistake="with one matrix, the most bits that fit are best")
def test_one_matrix(hw: Homework) -> None:
    for each, want in ((2.0, 2), (3.9, 3), (4.0, 4), (7.9, 4), (8.0, 8), (30.0, 8)):
        toy = Toy(1, 97)
        got = hw.choose_bits(list(toy.sizes), toy.measure, int(each * toy.sizes[0]))
        assert_equal(got, [want], name=f"the bits of one matrix with room for {each} each")


@check("choose_bits", mistake="raise ValueError if the matrices do not fit with 2 bits each")
def test_too_small_a_budget(hw: Homework) -> None:
    toy = Toy(3, 98)
    assert_raises(ValueError, hw.choose_bits, list(toy.sizes), toy.measure, 2 * sum(toy.sizes) - 1)


@check("choose_bits", mistake="your choice loses more than the same bits for all matrices, which also fit")
def test_better_than_one_format(hw: Homework) -> None:
    got = mean_score(hw)
    assert got > 0, f"your mean score is {got:.2f}; the same bits for all score 0"


def mean_score(hw: Homework) -> float:
    return sum(score(hw, *case) for case in REFERENCE) / len(REFERENCE)


@check(
    "choose_bits",
    mistake="spend bits where a matrix lowers the loss most per bit, which you can measure: one matrix at a time",
    costs=0.4,
)
def test_most_of_the_gain(hw: Homework) -> None:
    got = mean_score(hw)
    assert got >= 0.65, f"your mean score is {got:.2f}; what each matrix costs alone is worth more than 0.9"


@check(
    "choose_bits",
    mistake="measure each matrix with each number of bits: how the loss falls from 2 to 8 bits differs",
    costs=0.3,
)
def test_all_of_the_gain(hw: Homework) -> None:
    got = mean_score(hw)
    assert got >= 0.95, f"your mean score is {got:.2f}; the reference scores 1"
