"""Products with quantized weights against float64: in Triton's interpreter here, on a GPU there.

The reference is `QuantizedTensor.dequantize`, with the scales of INT4 groups rounded as `pack` rounds them.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mini_engine.models.layers import rms_norm
from mini_engine.quantization import FP8, Format, QuantizedTensor, quantize, spread

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
CPU, GPU = pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", [CPU, GPU])
PDL = pytest.mark.parametrize(
    ("device", "pdl"),
    [
        pytest.param("cpu", False, marks=INTERPRETED),
        *(pytest.param("cuda", pdl, marks=pytest.mark.gpu) for pdl in (False, True)),
    ],
)
FORMATS = {
    **{f"int4, group {group}": Format("int4", 1, group) for group in (32, 64, 128)},
    **{f"int4, group {group}, offsets": Format("int4", 1, group, has_offsets=True) for group in (32, 64, 128)},
    "int4, row": Format("int4"),
    "int4, row, offsets": Format("int4", has_offsets=True),
    "int8, row": Format("int8"),
    "int8, row, offsets": Format("int8", has_offsets=True),
    "int8, group 128": Format("int8", 1, 128),
    "int8, group 32, offsets": Format("int8", 1, 32, has_offsets=True),
    "fp8, matrix": Format("fp8", None, None),
    "fp8, row": Format("fp8"),
    "fp8, blocks": Format("fp8", 128, 128),
}
EVERY_FORMAT = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
SOME_FORMATS = pytest.mark.parametrize(
    "form", [FORMATS[name] for name in ("int4, group 128, offsets", "int4, row", "int8, row", "fp8, blocks")]
)
EPS = 1e-6


class Random:
    """Tensors in the dtype that a device is tested in, the same for each seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def tokens(self, num_tokens: int, size: int) -> torch.Tensor:
        """Tokens of very different scales."""
        return self(num_tokens, size) * torch.logspace(-3, 2, num_tokens).to(self.device, self.dtype)[:, None]

    def weight(self, num_rows: int, num_columns: int, form: Format, scale: float = 1) -> QuantizedTensor:
        """A quantized matrix. Scales differ by row; those of INT4 groups are numbers that float16 has."""
        by_row = torch.logspace(-1, 1, num_rows).to(self.device)[:, None] * (scale / num_columns**0.5)
        weight = quantize(self(num_rows, num_columns).float() * by_row, form)
        if form.kind != "int4" or weight.scale.shape[1] == 1:
            return weight
        offset = None if weight.offset is None else weight.offset.half().float()
        return replace(weight, scale=weight.scale.half().float(), offset=offset)


def magnitude(weight: QuantizedTensor) -> torch.Tensor:
    """A bound on the numbers that are added up for each weight: n and 8, or n and 128, times the scale."""
    kind = weight.format.kind
    q = (
        weight.q.double().abs()
        if kind == "fp8"
        else torch.full(weight.shape, 15.0 + 8 if kind == "int4" else 255 + 128)
    )
    size = q.to(weight.q.device) * spread(weight.scale.double(), weight.format, weight.shape)
    return size if weight.offset is None else size + spread(weight.offset.double().abs(), weight.format, weight.shape)


def check(got: torch.Tensor, x: torch.Tensor, weight: QuantizedTensor, rounded: bool = False) -> None:
    """Compare a product with float64, with the bound on the error of float32 sums and of one final rounding.

    `rounded`: weights are rounded to x's dtype, too.
    """
    exact, wide, epsilon = weight.dequantize(torch.float64), x.double(), torch.finfo(x.dtype).eps
    want = wide @ exact.T
    error = want.abs() * epsilon + wide.abs() @ magnitude(weight).T * (x.shape[1] * 2.0**-24)
    if rounded:
        error += wide.abs() @ exact.abs().T * epsilon
    assert torch.isfinite(got).all()
    worst = ((got.double() - want).abs() / error).max().item()
    assert worst <= 1, f"{worst} times the bound"


def normalized(x: torch.Tensor, norm_weight: torch.Tensor | None) -> torch.Tensor:
    ones = torch.ones(x.shape[1], dtype=torch.float64, device=x.device)
    return rms_norm(x.double(), ones if norm_weight is None else norm_weight.double(), EPS)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 2e-2 if got.is_cuda else 1e-4
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@settings(max_examples=40)
@given(
    st.sampled_from(["int4", "int8"]), st.integers(1, 5), st.integers(1, 9), st.sampled_from([32, 64, 128, None]),
    st.sampled_from([32, 64, 128]), st.integers(0, 2**32),
)  # fmt: skip
def test_each_column_has_its_own_bits(kind, num_rows, num_groups, group, unit, seed):
    """Where `pack` says column c is: number k of word w of a span, with c = k * words + w."""
    from mini_engine.kernels.quantized_gemv import pack

    columns, (bits, steps) = num_groups * (group or unit), (4, 8) if kind == "int4" else (8, 4)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(low, high, (num_rows, columns), dtype=torch.int8, generator=generator)
    packed = pack(QuantizedTensor(Format(kind, 1, group), q, torch.ones(num_rows, num_groups if group else 1)))
    assert packed.shape == (num_rows, columns) and packed.data.shape == (num_rows, columns // steps)
    span = packed.constants()["SPAN"]
    assert span == next(size for size in (128, 64, 32) if columns % size == 0 and (group or columns) % size == 0)
    column, words = torch.arange(columns), span // steps
    word, k = column // span * words + column % words, column % span // words
    assert len(set(zip(word.tolist(), k.tolist(), strict=True))) == columns
    assert torch.equal((packed.data[:, word] >> bits * k & (2**bits - 1)) + low, q.int())


def test_what_the_kernels_cannot_read_is_refused() -> None:
    from mini_engine.kernels.quantized_gemv import pack

    matrix = torch.randn(4, 96)
    with pytest.raises(ValueError, match="in order"):
        pack(replace(quantize(matrix, Format("int4")), order=torch.arange(96)))
    for form, columns in ((Format("int4", 1, 16), 96), (Format("int4"), 80), (Format("int8"), 72)):
        with pytest.raises(ValueError, match="multiple of"):
            pack(quantize(matrix[:, :columns], form))


@PDL
@EVERY_FORMAT
@pytest.mark.parametrize(("num_tokens", "num_columns"), [(1, 576), (8, 1536), (3, 4224)])
def test_the_product(device, pdl, form, num_tokens, num_columns):
    from mini_engine.kernels.quantized_gemv import pack, quantized_linear

    random = Random(num_columns, device)
    x, weight = random.tokens(num_tokens, num_columns), random.weight(11, num_columns, form)
    check(quantized_linear(x, pack(weight), pdl=pdl), x, weight)


@PDL
@SOME_FORMATS
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_programs_of_many_rows(device, pdl, form, num_tokens, monkeypatch):
    """Blocks of 128 rows share scales, and 149 rows divide neither into those nor into the rows of programs."""
    from mini_engine.kernels import quantized_gemv

    monkeypatch.setattr(quantized_gemv, "PROGRAMS", 1)
    random = Random(num_tokens, device)
    x, weight = random(num_tokens, 384), random.weight(149, 384, form)
    packed = quantized_gemv.pack(weight)
    assert 149 % quantized_gemv.rows_of_program(packed, num_tokens)
    check(quantized_gemv.quantized_linear(x, packed, pdl=pdl), x, weight)


@PDL
@SOME_FORMATS
@pytest.mark.parametrize("has_norm_weight", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_norm_and_the_activation(device, pdl, form, has_norm_weight, num_tokens):
    from mini_engine.kernels.quantized_gemv import gate_up_swiglu, pack, project

    random = Random(num_tokens, device)
    x, weight = random.tokens(num_tokens, 640), random.weight(2 * 9, 640, form)
    norm_weight = random(640) if has_norm_weight else None
    product = normalized(x, norm_weight) @ weight.dequantize(torch.float64).T
    assert_close(project(x, pack(weight), EPS, norm_weight, pdl=pdl), product)
    gate, up = product.chunk(2, dim=1)
    assert_close(gate_up_swiglu(x, pack(weight), EPS, norm_weight, pdl=pdl), F.silu(gate) * up)


@PDL
@SOME_FORMATS
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_the_product_is_added_in_place(device, pdl, form, num_tokens):
    from mini_engine.kernels.quantized_gemv import add_product, pack

    random = Random(num_tokens, device)
    x, weight, residual = random(num_tokens, 640), random.weight(9, 640, form), random(num_tokens, 9)
    want = residual.double() + x.double() @ weight.dequantize(torch.float64).T
    assert add_product(residual, x, pack(weight), pdl=pdl) is residual
    assert_close(residual, want)


@DEVICES
@pytest.mark.parametrize("largest", [1e-18, 1e9])
def test_products_of_subnormals_neither_vanish_nor_overflow(device, largest):
    from mini_engine.kernels.quantized_gemv import pack, quantized_linear

    random = Random(0, device)
    x, weight = random(2, 640) * (largest / 5), random.weight(5, 640, Format("int4", 1, 128))
    check(quantized_linear(x, pack(weight)), x, weight)


@DEVICES
@EVERY_FORMAT
@pytest.mark.parametrize("num_columns", [576, 1536])
def test_the_matrix_is_that_of_the_format(device, form, num_columns):
    from mini_engine.kernels.quantized_gemv import pack
    from mini_engine.kernels.quantized_matmul import dequantize

    random = Random(1, device)
    weight = random.weight(9, num_columns, form)
    got, want = dequantize(pack(weight), random.dtype), weight.dequantize(torch.float64)
    error = want.abs() * torch.finfo(random.dtype).eps + magnitude(weight) * 2.0**-23
    assert ((got.double() - want).abs() <= error).all()


@DEVICES
@EVERY_FORMAT
@pytest.mark.parametrize(("num_tokens", "num_rows", "num_columns"), [(9, 70, 1536), (33, 64, 576), (70, 33, 640)])
def test_tiles(device, form, num_tokens, num_rows, num_columns):
    """1,536 columns are split among programs; 576 columns are four steps and a half."""
    from mini_engine.kernels.quantized_gemv import pack
    from mini_engine.kernels.quantized_matmul import multiply_tiles

    random = Random(num_rows, device)
    x, weight = random.tokens(num_tokens, num_columns), random.weight(num_rows, num_columns, form)
    check(multiply_tiles(x, pack(weight)), x, weight, rounded=True)


@DEVICES
@SOME_FORMATS
def test_every_number_of_tokens_has_a_path(device, form):
    from mini_engine.kernels.quantized_gemv import pack
    from mini_engine.kernels.quantized_matmul import linear

    random = Random(2, device)
    weight = random.weight(16, 256, form)
    for num_tokens in (1, 2, 3, 256, 257):
        x = random(num_tokens, 256)
        check(linear(x, pack(weight)), x, weight, rounded=True)


@DEVICES
def test_tokens_that_float8_has_keep_their_values(device):
    """The interpreter rounds wrongly to float8, so the numbers here need no rounding. One token is zeros."""
    from mini_engine.kernels.quantized_matmul import quantize_tokens

    grid = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    grid = grid[grid.isfinite()].to(device)
    x = torch.stack((grid, grid / 64, torch.zeros_like(grid))).to(Random(0, device).dtype)
    q, scale = quantize_tokens(x)
    assert q.dtype == FP8 and torch.equal(scale, torch.tensor([[1.0], [1 / 64], [1.0]], device=device))
    assert torch.equal(q.float() * scale, x.float())


@pytest.mark.gpu
def test_tokens_are_rounded_as_torch_rounds_them():
    from mini_engine.kernels.quantized_matmul import quantize_tokens

    x = Random(3, "cuda").tokens(7, 4224)
    q, scale = quantize_tokens(x)
    torch.testing.assert_close(scale, x.float().abs().amax(1, keepdim=True) / 448)
    error = (q.double() * scale.double() - x.double()).abs()  # half of the distance: 2^-4 of a number, or 2^-10
    assert (error <= x.double().abs() * 2**-4 * 1.001 + scale * 2**-10).all()


@DEVICES
@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_a_product_in_float8(device, rows, num_tokens):
    from mini_engine.kernels.quantized_matmul import linear_fp8, quantize_tokens

    x = Random(num_tokens, device).tokens(num_tokens, 256).bfloat16()
    weight = Random(9, device).weight(64, 256, Format("fp8", rows, None))
    q, scale = quantize_tokens(x)
    want = (q.double() * scale.double()) @ weight.dequantize(torch.float64).T
    got = linear_fp8(x, weight.q, weight.scale)
    assert got.dtype == torch.bfloat16
    error = (q.double() * scale).abs() @ weight.dequantize(torch.float64).abs().T * 2**-13
    assert ((got.double() - want).abs() <= want.abs() * 2**-7 + error).all()  # bfloat16, rounded twice


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4])
@SOME_FORMATS
def test_a_graph_of_products_equals_the_parts_again_and_again(form, num_tokens):
    """Products that start before the one in front of them has ended still read its result."""
    from mini_engine.kernels.quantized_gemv import add_product, gate_up_swiglu, pack

    pdl = torch.cuda.get_device_capability() >= (9, 0)
    random = Random(3, "cuda")
    gate_ups = [pack(quantize(random(6144, 1024).float() / 32, form)) for _ in range(6)]
    downs = [pack(quantize(random(1024, 3072).float() / 55, form)) for _ in range(6)]
    start, stream = random(num_tokens, 1024), random(num_tokens, 1024)

    def run(pdl: bool) -> None:
        stream.copy_(start)
        for gate_up, down in zip(gate_ups, downs, strict=True):
            add_product(stream, gate_up_swiglu(stream, gate_up, EPS, pdl=pdl), down, pdl=pdl)

    run(False)
    want, graph = stream.clone(), torch.cuda.CUDAGraph()
    run(pdl)
    with torch.cuda.graph(graph):
        run(pdl)
    for _ in range(20):
        stream.zero_()
        graph.replay()
        assert torch.equal(stream, want)


COMPILE = """
import re
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mini_engine.kernels import quantized_gemv as gemv, quantized_matmul as matmul

TYPES = {"int4": "*i32", "int8": "*i32", "fp8": "*fp8e4nv"}
INTEGERS = {"num_tokens", "num_rows", "halves", "steps_of_split"}

def ptx(kernel, weight, warps, types=(), **sizes):
    sizes = weight.constants() | sizes
    constants = {(i,): sizes[name] for i, name in enumerate(kernel.arg_names) if name in sizes}
    types = {"data": TYPES[weight.kind], "scale": "*fp16", "offset": "*fp16", "eps": "fp32"} | dict(types)
    types = {
        name: "constexpr" if name in sizes else types.get(name, "i32" if name in INTEGERS else "*bf16")
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name][0] == "*"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "launch_pdl": sizes.get("PDL", False)}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]

for columns, gate_up in ((4096, True), (14336, False)):
    for kind in TYPES:
        dtype = torch.float8_e4m3fn if kind == "fp8" else torch.int32
        data = torch.empty(4096, columns // gemv.NUMBERS_OF_WORD[kind], dtype=dtype, device="meta")
        weight = gemv.PackedWeight(kind, data, None, None, (1, 128))
        rows, warps = gemv.rows_of_program(weight, 4), gemv.num_warps(weight)
        text = ptx(gemv._gemv, weight, warps, TOKENS=4, ROWS=rows, GATE_UP=gate_up, ADD=not gate_up, PDL=True)
        assert ".local" not in text and not re.search(r"(fma|mul|add)\\.(rn\\.)?ftz", text)
        # A program loads all its weights before it waits, 16 bytes at once.
        before = text.split("griddepcontrol.wait")[0]
        bytes_loaded = len(re.findall(r"ld\\.global\\.v4\\.b32", before)) * 16 * 32 * warps
        of_rows = rows * data.shape[1] * data.element_size()
        assert of_rows <= bytes_loaded < 1.2 * of_rows, (columns, kind, bytes_loaded)
        assert "ld.shared" not in before and "st.shared" not in before
        if columns == 4096:
            matmul_ptx = ptx(matmul._multiply_tiles, weight, 4, {"sums": "*fp32"}, TOKENS=16, ROWS=64, STEP=128)
            assert "wgmma.mma_async.sync.aligned.m64n16k16" in matmul_ptx
            ptx(matmul._dequantize, weight, 4, ROWS=4)
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)
