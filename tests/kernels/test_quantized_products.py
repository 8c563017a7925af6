"""Products with quantized weights against float64: the order of their numbers here, the kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mini_engine.models.layers import rms_norm
from mini_engine.quantization import FP8, Format, QuantizedTensor, quantize
from tests.kernels.random_tensors import Random

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
CPU, GPU = pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", [CPU, GPU])
FORMATS = {
    **{f"int4, group {group}": Format("int4", 1, group) for group in (32, 64, 128)},
    **{f"int4, group {group}, offsets": Format("int4", 1, group, has_offsets=True) for group in (32, 64, 128)},
    "int4, row": Format("int4"),
    "int4, row, offsets": Format("int4", has_offsets=True),
    "int8, row": Format("int8"),
    "int8, row, offsets": Format("int8", has_offsets=True),
    "int8, group 128": Format("int8", 1, 128),
    "int8, group 32, offsets": Format("int8", 1, 32, has_offsets=True),
    "fp8, row": Format("fp8"),
    "fp8, group 128": Format("fp8", 1, 128),
}
EVERY_FORMAT = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
NAMES = ["int4, group 128, offsets", "int4, group 32, offsets", "int4, row", "int8, row", "fp8, group 128"]
SOME_FORMATS = pytest.mark.parametrize("form", [FORMATS[name] for name in NAMES], ids=NAMES)
EPS = 1e-6


class RandomWeights(Random):
    """Random tensors, and quantized matrices."""

    def weight(self, num_rows: int, num_columns: int, form: Format) -> QuantizedTensor:
        """A quantized matrix. Scales differ by row; those of groups, and offsets, are numbers that bfloat16 has."""
        by_row = torch.logspace(-1, 1, num_rows).to(self.device)[:, None] / num_columns**0.5
        dtype = torch.bfloat16 if form.columns or form.has_offsets else torch.float32
        return quantize(self(num_rows, num_columns).float() * by_row, form, dtype)


def check(got: torch.Tensor, x: torch.Tensor, weight: QuantizedTensor) -> None:
    """Compare a product with float64, with the bound on the errors of weights, of sums, and of one final rounding.

    The numbers of groups are rounded to bfloat16 after their scale. The tensor cores add up 16 products at a time, and
    keep at least 2^-21 of the largest.
    """
    exact, wide, epsilon = weight.dequantize(torch.float64), x.double(), torch.finfo(x.dtype).eps
    want = wide @ exact.T
    grouped = weight.scale.shape[1] > 1 or weight.offset is not None
    error = want.abs() * epsilon + wide.abs() @ exact.abs().T * (epsilon if grouped else x.shape[1] * 2.0**-21 / 16)
    assert torch.isfinite(got).all()
    worst = ((got.double() - want).abs() / error).nan_to_num(0).max().item()
    assert worst <= 1, f"{worst} times the bound"


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare each token, whose numbers have errors relative to its largest ones."""
    assert ((got.double() - want).norm(dim=1) <= 2.0**-6 * want.norm(dim=1)).all()


@settings(max_examples=40)
@given(
    st.sampled_from(["int4", "int8"]), st.integers(1, 70), st.integers(1, 9), st.booleans(), st.integers(0, 2**32)
)  # fmt: skip
def test_no_number_is_lost_in_the_order_of_the_tensor_cores(kind, num_rows, sixteens, pairs, seed):
    from mini_engine.kernels.quantized_products import pack, unpack

    num_rows *= 16 if pairs else 1
    low, high = (-8, 8) if kind == "int4" else (-128, 128)
    q = torch.randint(
        low, high, (num_rows, 16 * sixteens), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )
    packed = pack(QuantizedTensor(Format(kind), q, torch.ones(num_rows, 1)), pairs=pairs)
    assert torch.equal(unpack(packed), q)
    assert len(packed.data) == packed.num_strips * -(-16 * sixteens // 64) * (512 if kind == "int4" else 1024)


def bits(data: torch.Tensor, first: int, count: int) -> int:
    """A number of a lane's bytes."""
    return int.from_bytes(bytes(data.tolist()), "little") >> first & (1 << count) - 1


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("lane", [0, 6, 19, 31])
def test_each_lane_has_the_rows_and_columns_that_the_kernel_expects(lane, pairs):
    """As `quantized.cuh` describes it, for the last tile of the second strip."""
    from mini_engine.kernels.quantized_products import pack

    (g, t), generator = divmod(lane, 4), torch.Generator().manual_seed(0)
    q = torch.randint(-8, 8, (32, 128), dtype=torch.int8, generator=generator)
    first, second = (8 + g, 24 + g) if pairs else (16 + g, 24 + g)
    rows = q[[first, second], 64 + 16 * t :][:, :16]
    int8, int4 = (
        pack(QuantizedTensor(Format(kind), q, torch.ones(32, 1)), pairs=pairs).data.view(2, 2, 32, -1)[1, 1, lane]
        for kind in ("int8", "int4")
    )
    for half in range(2):
        for column in range(16):
            four, pair, place = column // 4, column // 2 % 2, column % 2
            byte = bits(int8, 8 * (16 * half + 4 * four + pair + 2 * place), 8)
            assert byte == int(rows[half, column]) % 256
            word, number = column // 8, column // 2 % 4 + 4 * place
            assert bits(int4, 32 * (2 * half + word) + 4 * number, 4) - 8 == int(rows[half, column])


def test_scales_of_groups_lie_beside_each_other_for_the_rows_of_a_strip():
    from mini_engine.kernels.quantized_products import pack

    weight = quantize(torch.randn(40, 128), Format("int4", 1, 32, has_offsets=True), torch.bfloat16)
    scales = pack(weight).scales
    assert scales.shape == (3, 4, 16) and scales.dtype == torch.int32
    pairs = scales.view(torch.bfloat16).view(3, 4, 16, 2).float()
    assert torch.equal(pairs[1, 2, 5], torch.stack((weight.scale[21, 2], weight.offset[21, 2])))
    assert pack(quantize(torch.randn(40, 128), Format("int8"))).scales.shape == (40,)


def test_what_the_kernels_cannot_read_is_refused() -> None:
    from mini_engine.kernels.quantized_products import pack

    matrix = torch.randn(8, 96)
    refused = [
        replace(quantize(matrix, Format("int4")), order=torch.arange(96)),
        quantize(matrix, Format("int4", 1, 24)),
        quantize(matrix, Format("int4", 1, 48)),
        quantize(matrix[:, :72], Format("int8")),
        quantize(matrix, Format("fp8", 8, None)),
    ]
    for weight in refused:
        with pytest.raises(ValueError, match="cannot pack"):
            pack(weight)
    with pytest.raises(ValueError, match="cannot pack"):
        pack(quantize(matrix, Format("int8")), pairs=True)  # 4 rows


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 16, 31, 64])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(11, 576), (70, 1536), (99, 4224)])
def test_the_product(form, num_tokens, num_rows, num_columns):
    from mini_engine.kernels.quantized_products import pack, quantized_linear

    random = RandomWeights(num_columns, "cuda")
    x, weight = random.tokens(num_tokens, num_columns), random.weight(num_rows, num_columns, form)
    check(quantized_linear(x, pack(weight)), x, weight)


@pytest.mark.gpu
@SOME_FORMATS
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 64])
def test_blocks_of_many_strips(form, num_tokens):
    """A block goes on to other strips, and loads them ahead: 9,000 rows are more than all blocks have at first."""
    from mini_engine.kernels.quantized_products import pack, quantized_linear

    random = RandomWeights(num_tokens, "cuda")
    x, weight = random(num_tokens, 1088), random.weight(9000, 1088, form)
    check(quantized_linear(x, pack(weight)), x, weight)


@pytest.mark.gpu
@SOME_FORMATS
@pytest.mark.parametrize("num_tokens", [1, 3, 12, 40])
def test_a_norm_and_the_activation(form, num_tokens):
    from mini_engine.kernels.quantized_products import gate_up_swiglu, pack, project

    random = RandomWeights(num_tokens, "cuda")
    x, weight, norm_weight = random.tokens(num_tokens, 768), random.weight(2 * 24, 768, form), random(768)
    normed = rms_norm(x.double(), norm_weight.double(), EPS)
    product = normed @ weight.dequantize(torch.float64).T
    assert_close(project(x, pack(weight), EPS, norm_weight), product)
    assert_close(project(x, pack(weight, pairs=True), EPS, norm_weight), product)
    gate, up = product.chunk(2, dim=1)
    assert_close(gate_up_swiglu(x, pack(weight, pairs=True), EPS, norm_weight), F.silu(gate) * up)


@pytest.mark.gpu
@SOME_FORMATS
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_the_product_is_added_in_place(form, num_tokens):
    from mini_engine.kernels.quantized_products import add_product, pack

    random = RandomWeights(num_tokens, "cuda")
    x, weight, residual = random(num_tokens, 640), random.weight(9, 640, form), random(num_tokens, 9)
    want = residual.double() + x.double() @ weight.dequantize(torch.float64).T
    assert add_product(residual, x, pack(weight)) is residual
    assert_close(residual, want)


@pytest.mark.gpu
def test_every_number_of_each_format_is_converted_exactly():
    """FP8 has subnormals and a sign of zero; sums of one number each show how a number is converted."""
    from mini_engine.kernels.quantized_products import pack, quantized_linear

    values = torch.arange(256, dtype=torch.uint8, device="cuda")
    x = torch.eye(64, dtype=torch.bfloat16, device="cuda")
    finite = values.where(values % 128 != 127, 0)  # two of FP8 are no numbers
    for form, q in {
        Format("fp8"): finite.view(FP8), Format("int8"): values.view(torch.int8),
        Format("int4"): (values % 16).to(torch.int8) - 8,
    }.items():  # fmt: skip
        matrix = torch.cat((q.repeat(64).view(256, 64), q[:64].view(1, 64)))  # 257 rows: not for cuBLAS
        weight = QuantizedTensor(form, matrix, torch.ones(257, 1, device="cuda"))
        assert torch.equal(quantized_linear(x, pack(weight)).float(), matrix.float().T.contiguous())


@pytest.mark.gpu
@EVERY_FORMAT
@pytest.mark.parametrize(("num_rows", "num_columns"), [(9, 576), (1000, 1536), (1008, 1536)])
def test_the_matrix_is_that_of_the_format(form, num_rows, num_columns):
    from mini_engine.kernels.quantized_products import dequantize, pack

    weight = RandomWeights(1, "cuda").weight(num_rows, num_columns, form)
    got, want = dequantize(pack(weight)), weight.dequantize(torch.float64)
    assert ((got.double() - want).abs() <= want.abs() * 2.0**-8).all()


@pytest.mark.gpu
@SOME_FORMATS
def test_every_number_of_tokens_has_a_path(form):
    from mini_engine.kernels.quantized_matmul import linear
    from mini_engine.kernels.quantized_products import pack

    random = RandomWeights(2, "cuda")
    weight = random.weight(64, 256, form)
    for num_tokens in (1, 2, 16, 17, 64, 65, 300):
        x, packed = random(num_tokens, 256), pack(weight)
        want = x.double() @ weight.dequantize(torch.float64).T
        tolerance = 0.05 if packed.in_rows else 0.01
        assert (linear(x, packed).double() - want).norm() <= tolerance * want.norm()


@DEVICES
def test_tokens_that_float8_has_keep_their_values(device):
    """The interpreter rounds wrongly to float8, so the numbers here need no rounding. One token is zeros."""
    from mini_engine.kernels.fp8_products import quantize_tokens

    grid = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    grid = grid[grid.isfinite()].to(device)
    x = torch.stack((grid, grid / 64, torch.zeros_like(grid))).to(RandomWeights(0, device).dtype)
    tokens = quantize_tokens(x)
    assert tokens.q.dtype == FP8 and torch.equal(tokens.scale, torch.tensor([1.0, 1 / 64, 1.0], device=device))
    assert torch.equal(tokens.q[:3].float() * tokens.scale[:, None], x.float())


@pytest.mark.gpu
def test_tokens_are_rounded_as_torch_rounds_them():
    from mini_engine.kernels.fp8_products import quantize_tokens

    x = RandomWeights(3, "cuda").tokens(7, 4224)
    tokens = quantize_tokens(x)
    scale = tokens.scale[:, None].double()
    torch.testing.assert_close(scale, x.double().abs().amax(1, keepdim=True) / 448, atol=0, rtol=1e-6)
    error = (tokens.q[:7].double() * scale - x.double()).abs()  # half of the distance: 2^-4 of a number, or 2^-10
    assert (error <= x.double().abs() * 2**-4 * 1.001 + scale * 2**-10).all()


def close_in_fp8(got: torch.Tensor, want: torch.Tensor, roundings: int = 1) -> None:
    """Rounding to e4m3 changes a number by 2^-4 at most, and by 2^-5.3 on average."""
    assert (got.double() - want).norm() <= roundings**0.5 * 2.0**-4.5 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 17, 130])
def test_a_layer_in_fp8(num_tokens):
    """The kernels around the products: norm, scales, residual, and activation."""
    from mini_engine.kernels.fp8_products import apply_scales, multiply, quantize_swiglu, quantize_tokens

    random = RandomWeights(num_tokens, "cuda")
    x, residual, norm_weight = random.tokens(num_tokens, 512), random(num_tokens, 256), random(256)
    first, second = (random.weight(size, columns, Format("fp8")) for size, columns in ((256, 512), (640, 256)))
    product = multiply(quantize_tokens(x), first.q, first.scale.flatten())
    want = residual.double() + x.double() @ first.dequantize(torch.float64).T
    stream = residual.clone()
    normed = quantize_tokens(stream, norm_weight, EPS, added=product)
    close_in_fp8(stream, want)
    close_in_fp8(apply_scales(product, residual.clone()), want)
    want_normed = rms_norm(stream.double(), norm_weight.double(), EPS)
    close_in_fp8(normed.q[:num_tokens].double() * normed.scale.double()[:, None], want_normed)
    gate_up = multiply(normed, second.q, second.scale.flatten())
    gate, up = (want_normed @ second.dequantize(torch.float64).T).chunk(2, dim=1)
    inner = quantize_swiglu(gate_up)
    close_in_fp8(inner.q[:num_tokens].double() * inner.scale.double()[:, None], F.silu(gate) * up, roundings=3)
    close_in_fp8(apply_scales(gate_up), torch.cat((gate, up), 1))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 16])
@SOME_FORMATS
def test_a_graph_of_products_equals_the_parts_again_and_again(form, num_tokens):
    """Products that start before the one in front of them has ended still read its result."""
    from mini_engine.kernels.quantized_products import add_product, gate_up_swiglu, pack

    random = RandomWeights(3, "cuda")
    gate_ups = [pack(quantize(random(6144, 1024).float() / 32, form), pairs=True) for _ in range(6)]
    downs = [pack(quantize(random(1024, 3072).float() / 55, form)) for _ in range(6)]
    start, stream, norm = random(num_tokens, 1024), random(num_tokens, 1024), random(1024)

    def run(wait: bool) -> None:
        stream.copy_(start)
        for gate_up, down in zip(gate_ups, downs, strict=True):
            inner = gate_up_swiglu(stream, gate_up, EPS, norm)
            if wait:
                torch.cuda.synchronize()
            add_product(stream, inner, down)
            if wait:
                torch.cuda.synchronize()

    run(wait=True)
    want, graph = stream.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(wait=False)
    for _ in range(20):
        stream.zero_()
        graph.replay()
        assert torch.equal(stream, want)
