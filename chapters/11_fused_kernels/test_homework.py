"""Grader of chapter 11. Its oracles are PyTorch in float64, and a watch on what is launched, loaded and stored."""

import random
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from book.grading import Exercise, Homework, assert_close, assert_equal, check, require
from book.grading.assertions import CheckFailed
from book.triton_lab import DEVICE, Watch, watch
from mini_engine.rope import apply_rope

EXERCISES = [
    Exercise(
        "fuse",
        points=3,
        minutes=10,
        difficulty=1,
        hints=(
            "Walk through the kernels in order, and keep a set of the tensors that are on chip. What does the set "
            "change for a read, and what for a write?",
            "A read of a tensor that an earlier kernel has written costs nothing; any other read costs once. Handle "
            "the reads of a kernel before its writes.",
            "for kernel in kernels: add to reads the entries of kernel.reads whose names are not in written, then "
            "update written with kernel.writes. At the end, keep the entries of written that are needed.",
        ),
    ),
    Exercise(
        "add_rms_norm",
        points=4,
        minutes=30,
        difficulty=2,
        hints=(
            "Give each row to one program, which holds the whole row, padded to a power of two. What must the elements "
            "of the padding be?",
            "One program loads x and delta of its row with a mask and other=0.0, converts both to float32, adds them, "
            "stores the sum, and computes tl.sum(row * row, 0). The mean divides by D, not by the padded width.",
            "column = tl.arange(0, WIDTH); at = tl.program_id(0) * D + column; after the sum: factor = tl.rsqrt("
            "tl.sum(row * row, 0) / D + eps); store row * factor * w, converted to total.dtype.element_ty. Launch on "
            "the grid (len(x),) with WIDTH=triton.next_power_of_2(D).",
        ),
    ),
    Exercise(
        "norm_linear",
        points=5,
        minutes=25,
        difficulty=2,
        hints=(
            "Write the product of a normalized row and a row of the weight as a sum. Which factor does not depend on "
            "the column?",
            "In the loop of linear_kernel each program sees all columns of every token anyway. Let it add up their "
            "squares along with the products, multiply the tokens by the norm's weight, and scale at the end.",
            "Before the loop: squares = tl.zeros((TOKENS,), tl.float32). In it: squares += tl.sum(tokens * tokens, 1), "
            "then tokens *= the factors of these columns. After it: total *= tl.rsqrt(squares / K + eps)[:, None].",
        ),
    ),
    Exercise(
        "gate_up_silu",
        points=4,
        minutes=20,
        difficulty=2,
        hints=(
            "An output needs one row of the gate and one of the up projection. Which program should have which rows?",
            "The program of rows r has two sums, for rows r and I + r of the weight. Both use the same tile of the "
            "tokens. The activation follows the loop.",
            "Load the second tile from gate_up + I * K + (the offsets of the first), with the same mask. After the "
            "loop: gate / (1 + tl.exp(-gate)) * up. The grid has cdiv(I, ROWS) programs.",
        ),
    ),
    Exercise(
        "rotate_and_store",
        points=4,
        minutes=45,
        difficulty=3,
        hints=(
            "Start with one program for each token and head. Where does the head begin in qkv? There are three kinds "
            "of heads: where does each kind go, and which kinds rotate?",
            "Load the two halves of the head. Rotate if head < Hq + Hk. The destination is q for the first Hq heads; "
            "otherwise slot = tl.load(slots + token), and KV head h of a slot begins at (slot * Hk + h) * D.",
            "a, b = loads at offsets pair and pair + HALF of (token * (Hq + 2 * Hk) + head) * D. KV head = "
            "(head - Hq) % Hk for keys and values alike; keys while head < Hq + Hk. Mask pair < HALF if D / 2 is "
            "not a power of two.",
        ),
    ),
    Exercise(
        "split_k_linear",
        points=4,
        minutes=40,
        difficulty=3,
        challenge=True,
        hints=(
            "If the programs add to one output, the order of the additions is the order in which the programs run. "
            "Where could each program store its partial sum instead?",
            "A first launch on the grid (blocks, splits) writes partial sums [splits, N] in float32. A second launch "
            "adds them to the residual, in the order of the splits.",
            "columns = cdiv(K, splits); program (block, split) loops from split * columns to min((split + 1) * "
            "columns, K) and masks its tiles with column < that end, not with column < K. The second kernel loops "
            "over range(splits).",
        ),
    ),
]

EPS = 1e-6
# The interpreter of Triton 3.7.1 truncates where float32 becomes bfloat16; to float16 it rounds as a GPU does.
SHORT = torch.float16 if DEVICE == "cpu" else torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(DEVICE, dtype)


def assert_result(got: Tensor, want: Tensor, like: Tensor, name: str, mistake: str | None = None) -> None:
    """Compare with an oracle in float64, in the dtype of the inputs."""
    assert isinstance(got, Tensor), f"{name} is a tensor, not {type(got).__name__}"
    assert got.dtype == like.dtype, f"{name} has dtype {got.dtype}, but the inputs have {like.dtype}"
    tolerance = TOLERANCE[like.dtype]
    assert_close(got.double(), want, atol=tolerance, rtol=tolerance, name=name, mistake=mistake)


def assert_rounded_once(got: Tensor, want: Tensor, name: str) -> None:
    """Check that nearly all numbers of a result in 16 bits are the exact ones, rounded."""
    assert got.dtype == SHORT, f"{name} has dtype {got.dtype}, but the inputs have {SHORT}"
    share = float((got != want.to(SHORT)).double().mean())
    assert share < 0.1, f"{share:.0%} of the numbers of {name} differ from the exact ones, rounded once"


def unchanged(run: Callable[..., object], *inputs: Tensor | float) -> Watch:
    """Run and watch, and check that the inputs are unchanged."""
    before = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
    with watch() as found:
        run(*inputs)
    for now, then in zip(inputs, before, strict=True):
        require(not isinstance(now, Tensor) or torch.equal(now, then), "you changed an input")  # type: ignore[arg-type]
    return found


def assert_launches(found: Watch, most: int) -> None:
    names = [launch.kernel for launch in found.launches]
    besides = ", ".join(sorted(set(found.operators)))
    only_fills = set(found.operators) <= {"zeros", "zeros_like", "new_zeros", "zero_", "full", "full_like", "fill_"}
    if besides and only_fills:
        raise CheckFailed(f"PyTorch's {besides} launches a kernel besides yours: allocate with torch.empty", "")
    assert not besides, f"PyTorch computed {besides} besides your kernel"
    launches = f"{len(names)} launches ({', '.join(names)})"
    assert 1 <= len(names) <= most, f"{launches} instead of {'one' if most == 1 else f'at most {most}'}"


def assert_reads(found: Watch, most: int, what: str) -> None:
    """Bytes are counted in the interpreter only."""
    if DEVICE == "cpu":
        assert found.bytes_read <= most, f"your programs read {found.bytes_read:,} bytes; {most:,} are enough: {what}"


# fuse ---------------------------------------------------------------------------------------------------------------


def assert_fused(hw: Homework, kernels: Sequence[tuple[dict, dict]], needed: Collection[str], want: tuple) -> None:
    got = hw.fuse([hw.Kernel(*kernel) for kernel in kernels], needed)
    assert isinstance(got, tuple) and len(got) == 2, f"fuse returns a Kernel, not {got!r}"
    chain = "; ".join(f"{' '.join(reads)} -> {' '.join(writes)}" for reads, writes in kernels)
    chain = f"({chain}; needed: {' '.join(needed)})"
    assert_equal(dict(got[0]), want[0], name=f"what the fused kernel reads {chain}")
    assert_equal(dict(got[1]), want[1], name=f"what the fused kernel writes {chain}")


@check("fuse", mistake="a single kernel must stay as it is")
def test_one_kernel(hw: Homework) -> None:
    assert_fused(hw, [({"a": 4, "b": 2}, {"c": 8})], ["c"], ({"a": 4, "b": 2}, {"c": 8}))


@check("fuse", mistake="do not count an intermediate result: it is neither written nor read")
def test_an_intermediate_result(hw: Homework) -> None:
    assert_fused(hw, [({"a": 4}, {"b": 4}), ({"b": 4}, {"c": 8})], ["c"], ({"a": 4}, {"c": 8}))


@check("fuse", mistake="count an input of two kernels once")
def test_a_shared_input(hw: Homework) -> None:
    kernels = [({"x": 4, "Wk": 9}, {"k": 2}), ({"x": 4, "Wv": 9}, {"v": 2})]
    assert_fused(hw, kernels, ["k", "v"], ({"x": 4, "Wk": 9, "Wv": 9}, {"k": 2, "v": 2}))


@check(
    "fuse",
    mistake="a result that is needed afterwards is written, but later kernels of the group do not read it from memory",
)
def test_an_intermediate_that_is_needed(hw: Homework) -> None:
    kernels = [({"x": 4, "y": 4}, {"z": 4}), ({"z": 4, "w": 1}, {"n": 4})]
    assert_fused(hw, kernels, ["z", "n"], ({"x": 4, "y": 4, "w": 1}, {"z": 4, "n": 4}))


@check("fuse", mistake="a tensor that is changed in place is read from memory: its first kernel reads before it writes")
def test_in_place(hw: Homework) -> None:
    kernels = [({"x": 4, "y": 4}, {"x": 4}), ({"x": 4, "z": 4}, {"x": 4})]
    assert_fused(hw, kernels, ["x"], ({"x": 4, "y": 4, "z": 4}, {"x": 4}))


@check("fuse", mistake="leave out the writes of a tensor that nothing reads afterwards, inside the group or after it")
def test_a_dead_write(hw: Homework) -> None:
    assert_fused(hw, [({"a": 4}, {"b": 4, "c": 8})], ["c"], ({"a": 4}, {"c": 8}))


@check("fuse", mistake="it fails for a random chain: work out the printed one by hand")
def test_random_chains(hw: Homework) -> None:
    rng, sizes = random.Random(0), {name: 2**i for i, name in enumerate("abcdefgh")}
    for _ in range(100):
        kernels = [
            tuple({name: sizes[name] for name in rng.sample("abcdefgh", rng.randint(1, 3))} for _ in range(2))
            for _ in range(rng.randint(1, 5))
        ]
        needed = rng.sample("abcdefgh", rng.randint(1, 8))
        first_writer = {name: next((i for i, k in enumerate(kernels) if name in k[1]), 99) for name in sizes}
        first_reader = {name: next((i for i, k in enumerate(kernels) if name in k[0]), 100) for name in sizes}
        reads = {n: sizes[n] for n in sizes if first_reader[n] <= first_writer[n] and first_reader[n] < 99}
        writes = {n: sizes[n] for n in sizes if first_writer[n] < 99 and n in needed}
        assert_fused(hw, kernels, needed, (reads, writes))


# add_rms_norm -------------------------------------------------------------------------------------------------------


def assert_add_norm(hw: Homework, rows: int, width: int, dtype: torch.dtype = torch.float32, **options: float) -> None:
    scale, eps = options.get("scale", 1.0), options.get("eps", EPS)
    x, delta = randn(rows, width, dtype=dtype, scale=scale), randn(rows, width, dtype=dtype, scale=scale)
    weight = (torch.rand(width) + 0.5).to(DEVICE, dtype)
    total = x.double() + delta.double()
    got = hw.add_rms_norm(x, delta, weight, eps)
    assert isinstance(got, tuple) and len(got) == 2, "two tensors are expected: the sum, and its norm"
    what = f"for x [{rows}, {width}] in {str(dtype)[6:]}"
    assert_result(got[0], total, x, f"the sum {what}")
    assert_result(got[1], F.rms_norm(total, (width,), weight.double(), eps), x, f"the norm {what}")


@check("add_rms_norm", mistake="it fails for a single row whose width is a power of two: follow the example by hand")
def test_one_row(hw: Homework) -> None:
    assert_add_norm(hw, 1, 64)


@check("add_rms_norm", mistake="each row has its own mean square, and begins D elements after the previous row")
def test_rows(hw: Homework) -> None:
    assert_add_norm(hw, 7, 32)


@check(
    "add_rms_norm",
    mistake="D may be large, or not a power of two: pad it to the next one, mask loads and stores, divide by D, not "
    "by the padded width",
)
def test_any_width(hw: Homework) -> None:
    for width in (1, 3, 37, 200, 5000):
        assert_add_norm(hw, 3, width)


@check("add_rms_norm", mistake="add eps to the mean square, under the root")
def test_eps(hw: Homework) -> None:
    assert_add_norm(hw, 2, 24, eps=0.5)
    assert_add_norm(hw, 2, 24, scale=0.01, eps=1e-2)


@check(
    "add_rms_norm", mistake="convert to float32 before you add and square, and normalize the sum before it is rounded"
)
def test_add_norm_in_16_bits(hw: Homework) -> None:
    assert_add_norm(hw, 3, 576, SHORT)
    x, delta, weight = randn(8, 512, dtype=SHORT), randn(8, 512, dtype=SHORT), torch.ones(512).to(DEVICE, SHORT)
    factors = (torch.rand(512) + 0.5).to(DEVICE, SHORT)
    want = x.double() + delta.double()
    total, normed = hw.add_rms_norm(x, delta, factors, EPS)
    assert_rounded_once(total, want, "the sum")
    assert_rounded_once(normed, F.rms_norm(want, (512,), factors.double(), EPS), "the norm")
    # The sum of two 40,000s exceeds the range of float16, and its norm is 1.
    large = torch.full((1, 512), 40_000.0).to(DEVICE, SHORT)
    with np.errstate(over="ignore"):
        _, normed = hw.add_rms_norm(large, large.clone(), weight, EPS)
    assert_close(normed.double(), torch.ones_like(large).double(), atol=1e-2, name="the norm of sums of 80,000")
    # Squares of 300 exceed the range of float16.
    large = torch.full((1, 512), 300.0).to(DEVICE, SHORT)
    _, normed = hw.add_rms_norm(large, torch.zeros_like(large), weight, EPS)
    assert_close(normed.double(), torch.ones_like(large).double(), atol=1e-2, name="the norm of a row of 300s")


@check("add_rms_norm", mistake="write both results in one launch, and do not change the inputs")
def test_one_launch_of_the_norm(hw: Homework) -> None:
    x, delta, weight = randn(5, 48), randn(5, 48), randn(48)
    assert_launches(unchanged(hw.add_rms_norm, x, delta, weight, EPS), 1)


@check("add_rms_norm", mistake="load a row once, and keep it in registers between its sum and its norm", costs=0.2)
def test_reads_of_the_norm(hw: Homework) -> None:
    found = unchanged(hw.add_rms_norm, randn(5, 48), randn(5, 48), randn(48), EPS)
    assert_reads(found, 3 * 5 * 48 * 4, "x and delta once, and the weight once for each row")


# norm_linear --------------------------------------------------------------------------------------------------------


def assert_norm_linear(
    hw: Homework, tokens: int, columns: int, rows: int, dtype: torch.dtype = torch.float32, **options: float
) -> None:
    x = randn(tokens, columns, dtype=dtype)
    x = x * torch.logspace(*options.get("span", (0, 0)), tokens)[:, None].to(x)  # type: ignore[misc]
    norm_weight = (torch.rand(columns) + 0.5).to(DEVICE, dtype)
    weight, eps = randn(rows, columns, dtype=dtype, scale=columns**-0.5), options.get("eps", EPS)
    got = hw.norm_linear(x, norm_weight, eps, weight)
    want = F.rms_norm(x.double(), (columns,), norm_weight.double(), eps) @ weight.double().T
    assert_result(got, want, x, f"the product for x [{tokens}, {columns}], weight [{rows}, {columns}]")


@check(
    "norm_linear",
    mistake="it fails for one token and one tile: divide by the root of the mean square, and multiply by norm_weight",
)
def test_one_tile(hw: Homework) -> None:
    assert_norm_linear(hw, 1, 64, 16)


@check("norm_linear", mistake="add up both the squares and the products over all tiles of the columns")
def test_several_tiles(hw: Homework) -> None:
    assert_norm_linear(hw, 1, 256, 16)


@check("norm_linear", mistake="divide the sum of squares by K, and let elements outside x and the weight be 0")
def test_any_shape(hw: Homework) -> None:
    for columns, rows in ((37, 5), (130, 33), (1, 1), (576, 20)):
        assert_norm_linear(hw, 1, columns, rows)


@check("norm_linear", mistake="scale every token by its own norm, not all tokens by the same one")
def test_tokens_of_different_size(hw: Homework) -> None:
    for tokens in (2, 3, 8):
        assert_norm_linear(hw, tokens, 96, 40, span=(-2, 2), eps=1e-12)


@check("norm_linear", mistake="add eps to the mean square here too, although the norm comes after the product")
def test_eps_of_the_product(hw: Homework) -> None:
    assert_norm_linear(hw, 2, 96, 24, eps=0.5)


@check("norm_linear", mistake="accumulate in float32, and round once", costs=0.3)
def test_norm_linear_in_16_bits(hw: Homework) -> None:
    x, weight = randn(3, 512, dtype=SHORT), randn(48, 512, dtype=SHORT, scale=0.05)
    norm_weight = (torch.rand(512) + 0.5).to(DEVICE, SHORT)
    want = F.rms_norm(x.double(), (512,), norm_weight.double(), EPS) @ weight.double().T
    assert_rounded_once(hw.norm_linear(x, norm_weight, EPS, weight), want, "the product")


@check("norm_linear", mistake="compute norm and product in one launch, and do not write the normalized tokens")
def test_one_launch_of_the_product(hw: Homework) -> None:
    found = unchanged(hw.norm_linear, randn(3, 96), randn(96), EPS, randn(40, 96))
    assert_launches(found, 1)
    if DEVICE == "cpu":
        assert_equal(found.bytes_written, 3 * 40 * 4, name="bytes written")


@check("norm_linear", mistake="do not load the tokens twice, or the weight once for each token", costs=0.3)
def test_reads_of_the_product(hw: Homework) -> None:
    found = unchanged(hw.norm_linear, randn(4, 128), randn(128), EPS, randn(64, 128))
    programs = found.launches[0].programs
    most = (64 * 128 + programs * (4 * 128 + 128)) * 4
    assert_reads(found, most, "the weight once, and in each program the tokens and the norm's weight")


# gate_up_silu -------------------------------------------------------------------------------------------------------


def assert_gated(
    hw: Homework, tokens: int, columns: int, inner: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> None:
    x, weight = randn(tokens, columns, dtype=dtype), randn(2 * inner, columns, dtype=dtype, scale=columns**-0.5)
    x = x * scale
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    what = f"x [{tokens}, {columns}], gate_up [{2 * inner}, {columns}]"
    assert_result(hw.gate_up_silu(x, weight), F.silu(gate) * up, x, f"the result for {what}")


@check("gate_up_silu", mistake="silu(gate) = gate / (1 + exp(-gate)), and the gate's rows come first")
def test_one_tile_each(hw: Homework) -> None:
    assert_gated(hw, 1, 64, 16)


@check("gate_up_silu", mistake="the activation is not linear: apply it to complete sums, after all tiles")
def test_several_tiles_each(hw: Homework) -> None:
    assert_gated(hw, 1, 256, 32)


@check(
    "gate_up_silu", mistake="exp(gate) overflows for a large gate, and inf / inf is NaN: divide gate by 1 + exp(-gate)"
)
def test_large_gates(hw: Homework) -> None:
    with np.errstate(over="ignore"):  # exp(-gate) overflows too, and gate / inf is 0, as it should be
        assert_gated(hw, 1, 256, 32, scale=100.0)


@check(
    "gate_up_silu",
    mistake="gate and up have I rows each: mask both at I, so that the gate does not read rows of the up projection",
)
def test_any_inner_size(hw: Homework) -> None:
    for columns, inner in ((37, 5), (130, 33), (1, 1)):
        assert_gated(hw, 1, columns, inner)


@check("gate_up_silu", mistake="each of several tokens must have its own row of the result")
def test_several_tokens(hw: Homework) -> None:
    for tokens in (2, 3, 8):
        assert_gated(hw, tokens, 70, 40)


@check("gate_up_silu", mistake="multiply gate and up in float32, before anything is rounded", costs=0.3)
def test_gated_in_16_bits(hw: Homework) -> None:
    x, weight = randn(3, 256, dtype=SHORT), randn(2 * 40, 256, dtype=SHORT, scale=0.1)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    assert_rounded_once(hw.gate_up_silu(x, weight), F.silu(gate) * up, "the result")


@check("gate_up_silu", mistake="compute products and activation in one launch")
def test_one_launch_of_the_gate(hw: Homework) -> None:
    found = unchanged(hw.gate_up_silu, randn(3, 96), randn(80, 96))
    assert_launches(found, 1)
    if DEVICE == "cpu":
        assert_equal(found.bytes_written, 3 * 40 * 4, name="bytes written")


@check("gate_up_silu", mistake="the weight was read more than once", costs=0.3)
def test_reads_of_the_gate(hw: Homework) -> None:
    found = unchanged(hw.gate_up_silu, randn(4, 128), randn(128, 128))
    most = (128 * 128 + found.launches[0].programs * 2 * 4 * 128) * 4
    assert_reads(found, most, "the weight once, and in each program the tokens for both products")


# rotate_and_store ---------------------------------------------------------------------------------------------------


def assert_rotated(
    hw: Homework,
    slots: Sequence[int],
    heads: tuple[int, int] = (2, 1),
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    mistake: str | None = None,
) -> None:
    num_q, num_kv = heads
    num_pages, page_size, num_tokens = 5, 4, len(slots)
    qkv = randn(num_tokens, (num_q + 2 * num_kv) * head_dim, dtype=dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    pages = [randn(num_pages, page_size, num_kv, head_dim, dtype=dtype) for _ in range(2)]
    want = [x.double() for x in pages]
    q, k, v = qkv.double().unflatten(1, (-1, head_dim)).split((num_q, num_kv, num_kv), dim=1)
    q, k = (apply_rope(x, cos.double(), sin.double()) for x in (q, k))
    for token, slot in enumerate(slots):
        for page, x in zip(want, (k, v), strict=True):
            page[slot // page_size, slot % page_size] = x[token]
    got = hw.rotate_and_store(qkv, cos, sin, *pages, torch.tensor(slots, dtype=torch.int64, device=DEVICE))
    what = f"of {num_tokens} tokens, {num_q} query heads and {num_kv} KV heads of {head_dim}, slots {list(slots)}"
    assert_result(got, q, qkv, f"queries {what}", mistake)
    assert_result(pages[0], want[0], qkv, f"the pages of keys {what}", mistake)
    assert_result(pages[1], want[1], qkv, f"the pages of values {what}", mistake)


@check(
    "rotate_and_store", mistake="it fails for one token in slot 0: pairs are (j, j + D/2), and values are not rotated"
)
def test_one_token(hw: Homework) -> None:
    assert_rotated(hw, [0])


@check("rotate_and_store", mistake="a slot is page * S + offset, and a slot holds all KV heads of its token")
def test_a_slot(hw: Homework) -> None:
    assert_rotated(hw, [13])
    assert_rotated(hw, [13], heads=(4, 2))


@check("rotate_and_store", mistake="each token has its own slot and its own row of cos and sin")
def test_tokens_in_any_slots(hw: Homework) -> None:
    assert_rotated(hw, [7, 2, 19, 3], heads=(4, 2))


@check("rotate_and_store", mistake="it fails for other numbers of heads: queries come first, then keys, then values")
def test_numbers_of_heads(hw: Homework) -> None:
    for heads in ((1, 1), (9, 3), (3, 3), (8, 1)):
        assert_rotated(hw, [4, 11], heads=heads)


@check(
    "rotate_and_store", mistake="D / 2 may be any number: pad it to the next power of two, and mask loads and stores"
)
def test_head_sizes(hw: Homework) -> None:
    for head_dim in (2, 12, 20, 64, 256):
        assert_rotated(hw, [4, 11], head_dim=head_dim)


@check("rotate_and_store", mistake="rotate in float32 and round once", costs=0.2)
def test_rotated_in_16_bits(hw: Homework) -> None:
    qkv, angles = randn(20, 3 * 64, dtype=SHORT), torch.rand(20, 32) * 6
    pages = [torch.zeros(5, 4, 1, 64, dtype=SHORT, device=DEVICE) for _ in range(2)]
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    got = hw.rotate_and_store(qkv, cos, sin, *pages, torch.arange(20, device=DEVICE))
    want = apply_rope(qkv.double().unflatten(1, (-1, 64))[:, :2], cos.double(), sin.double())
    assert_rounded_once(got, want[:, :1], "the queries")
    assert_rounded_once(pages[0].flatten(0, 1), want[:, 1:], "the keys")


@check("rotate_and_store", mistake="rotate and store in one launch")
def test_one_launch_of_the_rotation(hw: Homework) -> None:
    qkv, angles = randn(3, 4 * 8), torch.rand(3, 4, device=DEVICE)
    pages = [randn(5, 4, 1, 8) for _ in range(2)]
    slots = torch.tensor([3, 9, 4], device=DEVICE)
    with watch() as found:
        hw.rotate_and_store(qkv, angles.cos(), angles.sin(), *pages, slots)
    found.operators = [name for name in found.operators if name not in ("cos", "sin")]
    assert_launches(found, 1)


# split_k_linear -----------------------------------------------------------------------------------------------------


def assert_split(
    hw: Homework, columns: int, rows: int, splits: Sequence[int], dtype: torch.dtype = torch.float32
) -> None:
    x, residual = randn(columns, dtype=dtype), randn(rows, dtype=dtype)
    weight = randn(rows, columns, dtype=dtype, scale=columns**-0.5)
    want = residual.double() + weight.double() @ x.double()
    for number in splits:
        got = hw.split_k_linear(x, weight, residual.clone(), number)
        assert_result(got, want, x, f"the result for weight [{rows}, {columns}] in {number} splits")


@check("split_k_linear", mistake="with one split, the result is the residual plus the whole product")
def test_one_split(hw: Homework) -> None:
    assert_split(hw, 64, 16, [1])
    assert_split(hw, 300, 40, [1])


@check("split_k_linear", mistake="each column belongs to exactly one split, even if the splits are not whole tiles")
def test_splits(hw: Homework) -> None:
    assert_split(hw, 256, 16, [2, 4])
    assert_split(hw, 300, 16, [2, 3, 7])


@check("split_k_linear", mistake="the number of rows is not a multiple of your block: mask loads and stores")
def test_any_rows(hw: Homework) -> None:
    assert_split(hw, 130, 5, [1, 3])
    assert_split(hw, 130, 33, [1, 3])


@check("split_k_linear", mistake="with more splits than columns, some splits have no columns and must add nothing")
def test_more_splits_than_columns(hw: Homework) -> None:
    assert_split(hw, 3, 5, [4, 8])
    assert_split(hw, 9, 5, [8])


@check("split_k_linear", mistake="add the residual once, and do not change the inputs")
def test_the_inputs_stay(hw: Homework) -> None:
    unchanged(lambda *inputs: hw.split_k_linear(*inputs, 3), randn(96), randn(40, 96), randn(40))
    assert_split(hw, 96, 40, [3], SHORT)


@check(
    "split_k_linear",
    mistake="the order in which programs run changed the result: do not add partial sums in order of arrival",
)
def test_the_same_bits_in_any_order(hw: Homework) -> None:
    x, weight, residual = randn(700), randn(20, 700), randn(20)
    first = hw.split_k_linear(x, weight, residual, 7)
    for seed in range(6):
        with watch(seed):
            again = hw.split_k_linear(x, weight, residual, 7)
        assert torch.equal(first, again), f"run {seed + 2}: results differ by {float((first - again).abs().max()):.0e}"


@check("split_k_linear", mistake="each split of each block of 16 rows needs its own program, in at most two launches")
def test_programs_of_the_splits(hw: Homework) -> None:
    found = unchanged(lambda *inputs: hw.split_k_linear(*inputs, 5), randn(320), randn(64, 320), randn(64))
    assert_launches(found, 2)
    if DEVICE == "cpu":
        programs = found.launches[0].programs
        assert programs >= 4 * 5, f"the first launch has {programs} programs for 4 blocks of 16 rows in 5 splits"


@check("split_k_linear", mistake="the columns are divided unevenly: no part needs more than cdiv(K, splits)")
def test_parts_of_about_the_same_size(hw: Homework) -> None:
    """With one row, a program reads its columns of the weight and of x, and perhaps all partial sums."""
    found = unchanged(lambda *inputs: hw.split_k_linear(*inputs, 64), randn(4095), randn(1, 4095), randn(1))
    if DEVICE == "cpu":
        columns = found.launches[0].most_read // 8
        assert columns <= 64 + 32 + 8, f"one of 64 parts of 4,095 columns has about {columns} columns"


@check("split_k_linear", mistake="keep partial sums in float32, and round the result once", costs=0.3)
def test_split_k_in_16_bits(hw: Homework) -> None:
    x, residual, weight = randn(512, dtype=SHORT), randn(256, dtype=SHORT), randn(256, 512, dtype=SHORT, scale=0.05)
    want = residual.double() + weight.double() @ x.double()
    assert_rounded_once(hw.split_k_linear(x, weight, residual, 4), want, "the result")


@check("split_k_linear", mistake="the weight was read more than once", costs=0.3)
def test_reads_of_the_splits(hw: Homework) -> None:
    found = unchanged(lambda *inputs: hw.split_k_linear(*inputs, 4), randn(256), randn(64, 256), randn(64))
    programs = max(found.launches[0].programs, 64)  # a block may have fewer than 16 rows
    most = (64 * 256 + programs * (256 // 4 + 4) + 2 * 4 * 64 + 64) * 4  # 4: a counter of arrivals, for example
    assert_reads(found, most, "the weight once, in each program its part of x, and the partial sums")
