"""A projection computes the same product however its matrix is stored, and a checkpoint fills it piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mini_engine import LLM
from mini_engine.errors import ConfigError, ModelLoadError
from mini_engine.loading.checkpoint import formats_for
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.models.transform import prepare_weights
from mini_engine.models.weights import Concatenated, Linear, Projection, QuantizedLinear, pack, projection, unpack
from mini_engine.observe.metrics import weight_bytes_per_step
from mini_engine.parts import Parts
from mini_engine.quantization import Format, QuantizedTensor, quantize
from mini_engine.sampling_params import SamplingParams
from tests.helpers import alone, save_tiny_model
from tests.models.families import FAMILIES, transformers_config, transformers_model

ROWS = {"a": 16, "b": 32, "c": 48}
FORMATS = [
    Format("fp8", None, None), Format("fp8"), Format("fp8", 16, 32), Format("int8"), Format("int8", 1, 32),
    Format("int4"), Format("int4", 1, 32), Format("int4", 1, 32, has_offsets=True),
]  # fmt: skip
# Of the largest number of a result. In bfloat16, the scale, the product, the scaled product and the sum with the bias
# are each rounded by at most 2^-9.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def built(form: Format | None, dtype: torch.dtype, bias: bool = False) -> Projection:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return projection({f"x.{name}": form for name in ROWS} if form else {}, "x.", 64, ROWS, bias)
    finally:
        torch.set_default_dtype(before)


def filled(form: Format | None, dtype: torch.dtype, bias: bool = False) -> tuple[Projection, dict[str, Tensor]]:
    own = built(form, dtype, bias)
    tensors = {name: random(*to.shape, seed=len(name) + i) for i, (name, to) in enumerate(own.destinations().items())}
    for name, to in own.destinations().items():
        to.copy_(tensors[name])
    own.prepare(dtype)
    return own, tensors


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", [None, *FORMATS], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 40])
def test_the_product_is_that_of_the_stored_matrix(form: Format | None, dtype: torch.dtype, num_tokens: int) -> None:
    own, tensors = filled(form, dtype, bias=True)
    x = random(num_tokens, 64, seed=9, dtype=dtype)
    matrix = own.dense(torch.float64)
    assert matrix.shape == (96, 64)
    bias = torch.cat([tensors[f"{name}.bias"] for name in ROWS]).to(dtype).double()
    want = x.double() @ matrix.T + bias
    got = own(x)
    assert got.dtype == dtype
    largest = want.abs().max().item() if num_tokens else 1.0
    torch.testing.assert_close(got.double(), want, rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_piece_is_rounded_by_itself(form: Format) -> None:
    own, tensors = filled(form, torch.float64)
    want = [quantize(tensors[f"{name}.weight"], form).dequantize(torch.float64) for name in ROWS]
    torch.testing.assert_close(own.dense(torch.float64), torch.cat(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_quantized_checkpoint_is_stored_as_it_is(form: Format) -> None:
    first, tensors = filled(form, torch.float64)
    second = built(form, torch.float64)
    for name, to in second.destinations().items():
        to.copy_(quantize(tensors[name], form))
    assert torch.equal(first.dense(torch.float64), second.dense(torch.float64))


def test_the_bytes_of_a_format() -> None:
    numbers = 96 * 64
    sizes = {form: filled(form, torch.bfloat16)[0].num_bytes for form in (None, *FORMATS)}
    assert sizes[None] == 2 * numbers
    assert sizes[Format("int8")] == numbers + 4 * 96  # a float32 scale for each row
    assert sizes[Format("int4", 1, 32)] == numbers // 2 + 2 * 96 * 2  # a bfloat16 scale for each group
    assert sizes[Format("int4", 1, 32, has_offsets=True)] == numbers // 2 + 2 * 2 * 96 * 2


def test_formats_that_differ_are_neighbors() -> None:
    """As in a GGUF file that keeps the values of attention in more bits."""
    formats = {"x.a": Format("int4", 1, 32), "x.b": Format("int4", 1, 32)}
    own = projection(formats, "x.", 64, ROWS)
    assert isinstance(own, Concatenated) and list(own.destinations()) == ["a.weight", "b.weight", "c.weight"]
    tensors = {
        name: random(*to.shape, seed=i, dtype=torch.float32) for i, (name, to) in enumerate(own.destinations().items())
    }
    for name, to in own.destinations().items():
        to.copy_(tensors[name])
    x = random(3, 64, dtype=torch.float32)
    torch.testing.assert_close(own(x), x @ own.dense(torch.float32).T)
    assert torch.equal(own.dense(torch.float32)[48:], tensors["c.weight"])


def test_columns_in_another_order() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(4))
    matrix, form = random(96, 64), Format("int4", 1, 32)
    part = quantize(matrix[:, order], form)
    own = built(form, torch.float64)
    for (_, to), rows in zip(own.destinations().items(), range(3), strict=True):
        first = (0, 16, 48)[rows]
        last = first + to.shape[0]
        to.copy_(QuantizedTensor(form, part.q[first:last], part.scale[first:last], None, order))
    x = random(2, 64, seed=8)
    torch.testing.assert_close(own(x), x @ own.dense(torch.float64).T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.dense(torch.float64)[:, order], part.dequantize(torch.float64), rtol=1e-6, atol=1e-7)


def test_orders_that_differ_are_refused() -> None:
    own, form = built(Format("int4", 1, 32), torch.float64), Format("int4", 1, 32)
    first, second, _ = own.destinations().values()
    orders = torch.arange(64), torch.arange(64).flip(0)
    for to, order in zip((first, second), orders, strict=False):
        stored = quantize(random(*to.shape), form)
        given = QuantizedTensor(form, stored.q, stored.scale, None, order)
        if to is first:
            to.copy_(given)
        else:
            with pytest.raises(ModelLoadError, match="desc_act"):
                to.copy_(given)


def test_packing_is_a_bijection() -> None:
    q = torch.randint(-8, 8, (5, 12), dtype=torch.int8)
    assert torch.equal(unpack(pack(q)), q)
    assert pack(torch.tensor([[-8, 7]], dtype=torch.int8)).tolist() == [[0xF0]]


def test_pairs_need_an_even_number_of_columns() -> None:
    with pytest.raises(ModelLoadError, match="INT8"):
        QuantizedLinear(33, {"a": 2}, Format("int4"))


# --- models ----------------------------------------------------------------------------------------------------------


class OneAtATime(Mapping[str, Tensor]):
    """A checkpoint that counts how many of its tensors are alive."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def quantized_model(family: str, method: str, dtype: torch.dtype = torch.float64, **changes: object) -> CausalLM:
    config = ModelConfig.from_hf(transformers_config(family, **changes).to_dict())
    config = replace(config, formats=formats_for(method, build_model(config, Parts(), dtype, "meta")))
    model = build_model(config, Parts(), dtype, "cpu")
    tensors = dict(transformers_model(family, seed=2, dtype=dtype, **changes).state_dict())
    model.load_weights(OneAtATime(tensors))
    return model


# `load_model` does not quantize experts.
DENSE = [family for family in FAMILIES if family not in ("qwen3_moe", "deepseek_v2")]


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", DENSE)
def test_every_matrix_of_a_model_is_quantized(family: str, method: str) -> None:
    model = quantized_model(family, method)
    found = {name: own for name, own in model.named_modules() if isinstance(own, Projection)}
    dense = {name for name, own in found.items() if isinstance(own, Linear)}
    assert dense == ({"lm_head"} if method == "fp8" else set()) and len(found) == 1 + 4 * 3
    kinds = {own.format.kind for own in model.layers.modules() if isinstance(own, QuantizedLinear)}
    assert kinds == {method}


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", DENSE)
def test_a_quantized_model_is_the_model_of_its_rounded_weights(family: str, method: str) -> None:
    """Against a dense model with the matrices that the quantized one stores."""
    model = quantized_model(family, method)
    config = replace(model.config, formats={})
    dense = build_model(config, Parts(), torch.float64, "cpu")
    tensors = dict(transformers_model(family, seed=2, dtype=torch.float64).state_dict())
    dense.load_weights(tensors)
    for (_, theirs), (_, ours) in zip(dense.named_modules(), model.named_modules(), strict=True):
        if isinstance(theirs, Linear):
            assert isinstance(ours, Projection)
            theirs.weight.copy_(ours.dense(torch.float64))
    prepare_weights(model)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert alone(model, [3, 5, 7], params) == alone(dense, [3, 5, 7], params)


def test_a_tied_head_is_rounded_and_the_embeddings_are_not() -> None:
    tied = quantized_model("llama", "int8", tie_word_embeddings=True)
    assert isinstance(tied.lm_head, QuantizedLinear)
    want = quantize(tied.embed_tokens, Format("int8")).dequantize(torch.float64)
    torch.testing.assert_close(tied.lm_head.dense(torch.float64), want, rtol=1e-6, atol=1e-8)


def test_bytes_and_numbers_of_a_model() -> None:
    dense, int8 = quantized_model("llama", "fp8", torch.bfloat16), quantized_model("llama", "int8", torch.bfloat16)
    assert dense.num_parameters == int8.num_parameters == sum(
        own.numel() for own in transformers_model("llama").parameters()
    )  # fmt: skip
    assert weight_bytes_per_step(int8) < weight_bytes_per_step(dense)


def test_the_option(tmp_path) -> None:
    save_tiny_model(tmp_path, ["a", "b"])
    outputs = {q: LLM(tmp_path, dtype="float64", quantization=q).generate(["a b a"]) for q in (None, "int8")}
    assert all(len(own) == 1 for own in outputs.values())
    with pytest.raises(ConfigError, match="quantization"):
        LLM(tmp_path, quantization="int3")
    with pytest.warns(UserWarning, match="every step dequantizes the matrices in FP8"):  # on a CPU
        LLM(tmp_path, dtype="bfloat16", device="cpu", quantization="fp8")
    llm = LLM(tmp_path)
    with pytest.raises(ConfigError, match="load the model again"):
        llm.with_options(quantization="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 100, 300])
def test_the_product_on_a_gpu(form: Format, num_tokens: int) -> None:
    with torch.device("cuda"):
        own, _ = filled(form, torch.bfloat16)
        matrix = own.dense(torch.float32).double()
        x = random(num_tokens, 64, seed=9, dtype=torch.bfloat16).cuda()
        want = x.double() @ matrix.T
        rounds_tokens = form.kind == "fp8" and form.columns is None  # to e4m3
        assert (own(x).double() - want).norm() <= (2.0**-4.5 if rounds_tokens else 2.0**-8) * want.norm()
