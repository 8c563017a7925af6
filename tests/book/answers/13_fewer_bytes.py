"""Right and wrong answers to the homework of chapter 13. They test its grader."""

import numpy as np
import torch

from book.grading import right, solution, wrong

reference = solution("13_fewer_bytes")

# quantize_rows ------------------------------------------------------------------------------------------------------


def rows(matrix, bug=""):
    wide = matrix if bug == "short" else matrix.float()
    largest = wide.abs().amax() if bug == "matrix" else wide.abs().amax(0 if bug == "columns" else 1)
    scale = largest / (128 if bug == "128" else 127)
    if bug != "zeros":
        scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    q = wide / (scale if bug in ("matrix", "columns") else scale[:, None])
    q = (q.trunc() if bug == "trunc" else q.round()).nan_to_num().to(torch.int8)
    scale = scale.float()
    return q, scale.expand(len(matrix)) if bug == "matrix" else scale


@right("quantize_rows")
def in_numpy(matrix):
    wide = matrix.float().numpy()
    largest = np.abs(wide).max(1, keepdims=True)
    scale = np.where(largest > 0, largest, 127) / np.float32(127)
    return torch.from_numpy(np.rint(wide / scale).astype(np.int8)), torch.from_numpy(scale[:, 0].astype(np.float32))


@right("quantize_rows")
def times_127(matrix):
    wide = matrix.float()
    largest = wide.abs().amax(1, keepdim=True)
    largest[largest == 0] = 127
    return (wide * (127 / largest)).round().to(torch.int8), (largest / 127)[:, 0]


@wrong("quantize_rows", fails="test_a_row")
def a_range_of_128(matrix):
    return rows(matrix, "128")


@wrong("quantize_rows", fails="test_a_row")
def truncated(matrix):
    return rows(matrix, "trunc")


@wrong("quantize_rows", fails="test_rows")
def a_scale_for_the_matrix(matrix):
    return rows(matrix, "matrix")


@wrong("quantize_rows", fails="test_a_row_of_zeros")
def zeros_divide_by_zero(matrix):
    return rows(matrix, "zeros")


@wrong("quantize_rows", fails="test_rows_in_bfloat16")
def in_the_dtype_of_the_matrix(matrix):
    return rows(matrix, "short")


@wrong("quantize_rows", fails="test_a_row")
def a_scale_for_each_column(matrix):
    return rows(matrix, "columns")


# quantize_groups ----------------------------------------------------------------------------------------------------


def groups(matrix, group, bug=""):
    num_rows, num_columns = matrix.shape
    if num_columns % group and bug != "ragged":
        raise ValueError("ragged")
    matrix = matrix[:, : num_columns // group * group]
    tiles = matrix.view(num_rows, -1, group)
    if bug == "strided":
        tiles = matrix.view(num_rows, group, -1).transpose(1, 2)
    low, high = tiles.amin(2), tiles.amax(2)
    if bug == "row":
        low, high = (x.expand(-1, tiles.shape[1]) for x in (low.amin(1, True), high.amax(1, True)))
    if bug != "range":
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / (16 if bug == "16" else 15)
    if bug != "zeros":
        scale = torch.where(scale > 0, scale, 1.0)
    zero = -low / scale
    if bug != "unrounded":
        zero = zero.round()
    q = (tiles / scale[:, :, None]).round() + zero[:, :, None]
    if bug == "unrounded":
        q = ((tiles - low[:, :, None]) / scale[:, :, None]).round()
    if bug == "signed":
        q, zero = q - 8, zero - 8
    if bug != "wraps":
        q = q.clamp(0, 15)
    q = q.nan_to_num().to(torch.int16).to(torch.uint8)
    q = q.transpose(1, 2) if bug == "strided" else q
    return q.reshape(num_rows, -1), scale, zero.nan_to_num().to(torch.int16).to(torch.uint8)


@right("quantize_groups")
def the_zero_point_before_rounding(matrix, group):
    if matrix.shape[1] % group:
        raise ValueError(f"{matrix.shape[1]} columns are no multiple of {group}")
    tiles = matrix.unflatten(1, (-1, group))
    zeros = torch.zeros_like(tiles[:, :, :1])
    with_zero = torch.cat((tiles, zeros), 2)
    low, high = with_zero.aminmax(dim=2, keepdim=True)
    scale = (high - low) / 15
    scale[scale == 0] = 1
    zero = torch.round(low / -scale)
    q = torch.round(tiles / scale + zero).clip(0, 15)
    return q.flatten(1).byte(), scale[:, :, 0], zero[:, :, 0].byte()


@wrong("quantize_groups", fails="test_one_group")
def a_range_of_16_steps(matrix, group):
    return groups(matrix, group, "16")


@wrong("quantize_groups", fails="test_one_group")
def relative_to_the_smallest_number(matrix, group):
    return groups(matrix, group, "unrounded")


@wrong("quantize_groups", fails="test_one_group")
def signed_numbers(matrix, group):
    return groups(matrix, group, "signed")


@wrong("quantize_groups", fails="test_several_groups")
def a_range_for_each_row(matrix, group):
    return groups(matrix, group, "row")


@wrong("quantize_groups", fails="test_several_groups")
def every_other_column(matrix, group):
    return groups(matrix, group, "strided")


@wrong("quantize_groups", fails="test_numbers_of_one_sign")
def a_range_without_zero(matrix, group):
    return groups(matrix, group, "range")


@wrong("quantize_groups", fails="test_the_ends_of_the_range")
def an_end_wraps(matrix, group):
    return groups(matrix, group, "wraps")


@wrong("quantize_groups", fails="test_a_group_of_zeros")
def a_group_of_zeros_divides_by_zero(matrix, group):
    return groups(matrix, group, "zeros")


@wrong("quantize_groups", fails="test_ragged_groups")
def drops_what_is_left(matrix, group):
    return groups(matrix, group, "ragged")


# unpack_awq ---------------------------------------------------------------------------------------------------------

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(qweight, qzeros, scales, order=None, mask=15, zeros=0, tiled=False, transpose=True, strided=False, short=False):
    order = torch.tensor(ORDER).argsort() if order is None else torch.tensor(order)

    def nibbles(words):
        found = (words[:, :, None] >> 4 * order) & mask
        return (found.transpose(1, 2) if strided else found).flatten(1)

    group = len(qweight) // len(qzeros)
    repeated = [nibbles(qzeros) + zeros, scales]
    if tiled:
        zero, scale = (x.repeat(group, 1) for x in repeated)
    else:
        zero, scale = (x.repeat_interleave(group, 0) for x in repeated)
    q = nibbles(qweight) - zero
    matrix = (q.half() * scale).float() if short else q * scale.float()
    return matrix.T if transpose else matrix


@right("unpack_awq")
def nibble_by_nibble(qweight, qzeros, scales):
    def unpacked(words):
        out = torch.empty(len(words), 8 * words.shape[1])
        for i, column in enumerate(ORDER):
            out[:, column::8] = words >> 4 * i & 15
        return out

    inputs = torch.arange(len(qweight)) // (len(qweight) // len(qzeros))
    return ((unpacked(qweight) - unpacked(qzeros)[inputs]) * scales.float()[inputs]).T.contiguous()


@wrong("unpack_awq", fails="test_one_word")
def in_the_order_of_the_docstring(*args):
    return awq(*args, order=ORDER)


@wrong("unpack_awq", fails="test_one_word")
def in_plain_order(*args):
    return awq(*args, order=range(8))


@wrong("unpack_awq", fails="test_one_word")
def not_transposed(*args):
    return awq(*args, transpose=False)


@wrong("unpack_awq", fails="test_the_sign_bit")
def without_a_mask_of_the_highest(qweight, qzeros, scales):
    words = qweight.clone()
    found = awq(qweight, qzeros, scales)
    highest = (words >> 28).float()  # negative for 8 to 15
    scale = scales.float().repeat_interleave(len(qweight) // len(scales), 0)
    zero = awq(qzeros, torch.zeros_like(qzeros), torch.ones_like(scales)).T
    zero = zero.repeat_interleave(len(qweight) // len(qzeros), 0)
    found[7::8] = ((highest - zero[:, 7::8]) * scale[:, 7::8]).T
    return found


@wrong("unpack_awq", fails="test_several_words")
def nibbles_of_a_word_far_apart(*args):
    return awq(*args, strided=True)


@wrong("unpack_awq", fails="test_one_word")
def zero_points_less_one_as_in_gptq(*args):
    return awq(*args, zeros=1)


@wrong("unpack_awq", fails="test_zero_points")
def zero_points_in_plain_order(qweight, qzeros, scales):
    plain = (qzeros[:, :, None] >> 4 * torch.arange(8) & 15).flatten(1)
    group = len(qweight) // len(qzeros)
    q = awq(qweight, torch.zeros_like(qzeros), torch.ones_like(scales)).T
    return ((q - plain.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)).T


@wrong("unpack_awq", fails="test_groups_of_inputs")
def groups_of_every_third_input(*args):
    return awq(*args, tiled=True)


@wrong("unpack_awq", fails="test_float32")
def products_in_float16(*args):
    return awq(*args, short=True)


# e4m3 ---------------------------------------------------------------------------------------------------------------


def by_step(x, mantissa=3, lowest=-6, largest=448.0, ties="even", flush=False):
    exponent = (torch.frexp(x).exponent - 1).clamp(min=lowest)
    step = torch.exp2((exponent - mantissa).double())
    ratio = x.double() / step
    whole = {
        "even": ratio.round(),
        "up": (ratio + 0.5).floor(),
        "away": (ratio.abs() + 0.5).floor().copysign(ratio),
        "trunc": ratio.trunc(),
    }[ties]
    y = (whole * step).float()
    if flush:
        y = torch.where(y.abs() < 2**-6, 0.0, y)
    return y.clamp(-largest, largest)


@right("e4m3")
def by_search(x):
    """The nearest of all numbers, by the middles between them."""
    codes = torch.arange(127)
    e, m = codes // 8, codes % 8
    values = torch.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * torch.exp2((e - 7).float()))
    middles = (values[1:] + values[:-1]) / 2
    magnitude = x.abs().nan_to_num(nan=0.0, posinf=1e9).contiguous()
    below, above = torch.searchsorted(middles, magnitude), torch.searchsorted(middles, magnitude, right=True)
    found = values[torch.where(below % 2 == 0, below, above)]
    return torch.where(x.isnan(), x, found.copysign(x))


@right("e4m3")
def by_the_bits_of_float32(x):
    """Add half of the last kept place, less one if it is even, and cut off the rest."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + (0x7FFFF + (bits >> 20 & 1))) & ~0xFFFFF
    normal = rounded.view(torch.float32)
    small = (x * 512).round() / 512
    y = torch.where(x.abs() < 2**-6, small, normal)
    y = torch.where(x.isinf(), x, y).clamp(-448, 448)
    return torch.where(x.isnan(), x, y)


@right("e4m3")
def by_adding_and_subtracting(x):
    """In float64, the last kept place of x + 1.5 * 2**52 * step is a step."""
    wide = x.double().clamp(-448, 448)
    exponent = torch.frexp(wide).exponent.sub(1).clamp(min=-6)
    magic = 1.5 * torch.exp2((exponent + 49).double())
    return ((wide + magic) - magic).float().copysign(x)


@wrong("e4m3", fails="test_the_nearest_number")
def four_mantissa_bits(x):
    return by_step(x, mantissa=4)


@wrong("e4m3", fails="test_numbers_of_the_format")
def two_mantissa_bits(x):
    return by_step(x, mantissa=2)


@wrong("e4m3", fails="test_the_nearest_number")
def cut_off(x):
    return by_step(x, ties="trunc")


@wrong("e4m3", fails="test_ties")
def ties_up(x):
    return by_step(x, ties="up")


@wrong("e4m3", fails="test_ties")
def ties_away_from_zero(x):
    return by_step(x, ties="away")


@wrong("e4m3", fails="test_subnormals")
def without_subnormals(x):
    return by_step(x, flush=True)


@wrong("e4m3", fails="test_subnormals")
def as_if_exponents_had_no_end(x):
    return by_step(x, lowest=-100)


@wrong("e4m3", fails="test_subnormals")
def with_a_logarithm(x):
    step = torch.exp2(x.abs().log2().floor().clamp(max=8) - 3)
    step = torch.where(x.abs() < 2**-6, 2**-9 * torch.where(x == 0, torch.nan, 1.0), step)
    return ((x / step).round() * step).clamp(-448, 448)


@wrong("e4m3", fails="test_numbers_of_the_format")
def the_largest_is_240(x):
    return by_step(x, largest=240.0)


@wrong("e4m3", fails="test_saturation")
def the_largest_is_480(x):
    return by_step(x, largest=480.0)


@wrong("e4m3", fails="test_saturation")
def infinity_is_not_a_number(x):
    return torch.where(x.isinf(), torch.nan, by_step(x))


@wrong("e4m3", fails="test_any_shape")
def flat(x):
    return by_step(x).flatten()


@wrong("e4m3", fails="test_no_float8_tensor")
def with_float8(x):
    return x.to(torch.float8_e4m3fn).float()


@wrong("e4m3", fails="test_no_loop_over_numbers")
def one_by_one(x):
    out = [reference.e4m3(number) for number in x.flatten()]
    return torch.stack(out).view(x.shape) if out else x.clone()


# gptq_columns -------------------------------------------------------------------------------------------------------


def columns(matrix, hessian, scale, damping=0.01, bug=""):
    n = matrix.shape[1]
    group, left, h = n // scale.shape[1], matrix.double().clone(), hessian.double().clone()
    if bug != "undamped":
        mean = 1.0 if bug == "absolute" else h.diagonal().mean()
        h += damping * mean * torch.eye(n)
    inverse = torch.linalg.pinv(h)
    q = torch.empty(matrix.shape, dtype=torch.int8)
    for i in range(n):
        own = scale[:, 0 if bug == "first scale" else i // group].double()
        column = matrix[:, i] if bug == "original" else left[:, i]
        rounded = (column / own).round()
        q[:, i] = (rounded if bug == "unclamped" else rounded.clamp(-8 if bug == "-8" else -7, 7)).to(torch.int8)
        error = column - q[:, i] * own
        if bug == "in steps":
            error = column / own - q[:, i]
        row = hessian[i].double() if bug == "hessian" else inverse[i]
        change = torch.outer(error / row[i], row)
        if bug == "undivided":
            change = torch.outer(error, row)
        left[:, i + 1 :] -= (-1 if bug == "sign" else 1) * change[:, i + 1 :]
        if bug != "same inverse":
            inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return q


@right("gptq_columns")
def an_inverse_that_shrinks(matrix, hessian, scale, damping=0.01):
    """As optimal brain surgeons did it: after each column, its row and column are eliminated from the inverse."""
    return columns(matrix, hessian, scale, damping)


@right("gptq_columns")
def with_a_triangular_solve(matrix, hessian, scale, damping=0.01):
    """The same order of elimination, by the factor of H with its columns reversed."""
    n = matrix.shape[1]
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(n)
    flipped = torch.linalg.cholesky(h.flip(0, 1)).flip(0, 1)  # upper: h = flipped @ flipped.T
    inverse = torch.linalg.solve_triangular(flipped, torch.eye(n, dtype=torch.float64), upper=True)
    left, q = matrix.double().clone(), torch.empty(matrix.shape, dtype=torch.int8)
    for i, own in enumerate(scale.double().repeat_interleave(n // scale.shape[1], dim=1).T):
        q[:, i] = (left[:, i] / own).round().clamp(-7, 7)
        error = (left[:, i] - q[:, i] * own) / inverse[i, i]
        left -= error[:, None] * inverse[i] * (torch.arange(n) > i)
    return q


@wrong("gptq_columns", fails="test_two_columns")
def to_nearest(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "original")


@wrong("gptq_columns", fails="test_two_columns")
def the_wrong_sign(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "sign")


@wrong("gptq_columns", fails="test_two_columns")
def the_hessian_and_not_its_inverse(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "hessian")


@wrong("gptq_columns", fails="test_two_columns")
def not_divided_by_the_diagonal(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "undivided")


@wrong("gptq_columns", fails="test_columns_that_do_not_interact")
def down_to_minus_8(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale * 0.9, damping, "-8")


@wrong("gptq_columns", fails="test_many_columns")
def one_inverse_for_all_columns(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "same inverse")


@wrong("gptq_columns", fails="test_many_columns")
def errors_in_steps(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "in steps")


@wrong("gptq_columns", fails="test_groups_of_columns")
def the_scale_of_the_first_group(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "first scale")


@wrong("gptq_columns", fails="test_damping")
def without_damping(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "undamped")


@wrong("gptq_columns", fails="test_damping")
def damping_that_knows_no_mean(matrix, hessian, scale, damping=0.01):
    return columns(matrix, hessian, scale, damping, "absolute")


@wrong("gptq_columns", fails="test_few_factorizations")
def an_inverse_for_each_column(matrix, hessian, scale, damping=0.01):
    n = matrix.shape[1]
    left = matrix.double().clone()
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(n)
    q = torch.empty(matrix.shape, dtype=torch.int8)
    for i in range(n):
        own = scale[:, i // (n // scale.shape[1])].double()
        inverse = torch.linalg.inv(h[i:, i:])
        q[:, i] = (left[:, i] / own).round().clamp(-7, 7)
        left[:, i:] -= torch.outer((left[:, i] - q[:, i] * own) / inverse[0, 0], inverse[0])
    return q


# choose_bits --------------------------------------------------------------------------------------------------------

BITS = (2, 3, 4, 8)


def bought(sizes, gain, budget, per_bit=True):
    """Buy bits by gain, one purchase after the other. gain(i, b): what matrix i loses with b bits."""
    bits = [2] * len(sizes)
    left = budget - 2 * sum(sizes)
    if left < 0:
        raise ValueError("too small")
    while True:
        offers = []
        for i, own in enumerate(bits):
            for more in BITS:
                price = (more - own) * sizes[i]
                if more > own and price <= left:
                    worth = gain(i, own) - gain(i, more)
                    offers.append((worth / price if per_bit else worth, i, more, price))
        if not offers:
            return bits
        _, i, bits_now, price = max(offers)
        bits[i] = bits_now
        left -= price


def alone(sizes, measure, measured=(2, 3, 4)):
    def with_one(i, b):
        return [b if k == i else 8 for k in range(len(sizes))]

    table = {(i, b): measure(with_one(i, b)) for i in range(len(sizes)) for b in measured}
    of_none = measure([8] * len(sizes))
    return lambda i, b: table.get((i, b), of_none)


@right("choose_bits")
def the_best_offer_first(sizes, measure, budget):
    return bought(sizes, alone(sizes, measure), budget)


@right("choose_bits")
def with_a_knapsack_of_units(sizes, measure, budget):
    unit = int(np.gcd.reduce(sizes))
    if budget < 2 * sum(sizes):
        raise ValueError("too small")
    loss = alone(sizes, measure)
    room = budget // unit
    best = [(0.0, [])] * (room + 1)
    for i, size in enumerate(sizes):
        now = [(float("inf"), [])] * (room + 1)
        for total in range(room + 1):
            for b in BITS:
                before = total - b * size // unit
                if before >= 0 and best[before][0] + loss(i, b) < now[total][0]:
                    now[total] = (best[before][0] + loss(i, b), [*best[before][1], b])
        best = now
    return best[room][1]


@wrong("choose_bits", fails="test_better_than_one_format")
def the_same_for_all(sizes, measure, budget):
    if budget < 2 * sum(sizes):
        raise ValueError("too small")
    return [max(b for b in BITS if b * sum(sizes) <= budget)] * len(sizes)


@wrong("choose_bits", fails="test_most_of_the_gain")
def small_matrices_first(sizes, measure, budget):
    return bought(sizes, lambda i, b: 1.0 / b, budget)


@wrong("choose_bits", fails="test_better_than_one_format")
def the_gain_and_not_the_gain_per_bit(sizes, measure, budget):
    return bought(sizes, alone(sizes, measure), budget, per_bit=False)


@wrong("choose_bits", fails="test_one_matrix")
def an_exception_for_too_large_a_budget(sizes, measure, budget):
    return bought(sizes, alone(sizes, measure), min(budget, 4 * sum(sizes)))


@wrong("choose_bits", fails="test_too_small_a_budget")
def two_bits_in_any_case(sizes, measure, budget):
    return [2] * len(sizes) if budget < 2 * sum(sizes) else bought(sizes, alone(sizes, measure), budget)


@wrong("choose_bits", fails="test_one_matrix")
def calls_for_each_pair(sizes, measure, budget):
    for _ in range(4 * len(sizes)):
        measure([8] * len(sizes))
    return bought(sizes, alone(sizes, measure), budget)


@wrong("choose_bits", fails="test_better_than_one_format")
def over_the_budget(sizes, measure, budget):
    chosen = bought(sizes, alone(sizes, measure), budget)
    return [8 if b == 4 and len(sizes) > 1 else b for b in chosen]


@wrong("choose_bits", fails="test_all_of_the_gain")
def only_the_loss_of_2_bits(sizes, measure, budget):
    loss = alone(sizes, measure, measured=(2,))
    return bought(sizes, lambda i, b: (loss(i, 2) - loss(i, 8)) * 2.0 ** (2 - b), budget)


@wrong("choose_bits", fails="test_most_of_the_gain")
def with_all_others_at_2_bits(sizes, measure, budget):
    """Where everything is noise, the loss of one matrix cannot be seen."""

    def with_one(i, b):
        return measure([b if k == i else 2 for k in range(len(sizes))])

    table = {(i, b): with_one(i, b) for i in range(len(sizes)) for b in (3, 4, 8)}
    of_all = measure([2] * len(sizes))
    return bought(sizes, lambda i, b: table.get((i, b), of_all), budget)


@wrong("choose_bits", fails="test_most_of_the_gain")
def the_same_order_at_every_step(sizes, measure, budget):
    loss = alone(sizes, measure, measured=(2,))
    bits = [2] * len(sizes)
    if budget < 2 * sum(sizes):
        raise ValueError("too small")
    order = sorted(range(len(sizes)), key=lambda i: (loss(i, 8) - loss(i, 2)) / sizes[i])
    for b in (3, 4, 8):
        for i in order:
            if sum(map(int.__mul__, sizes, [*bits[:i], b, *bits[i + 1 :]])) <= budget:
                bits[i] = b
    return bits
