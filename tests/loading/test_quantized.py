"""Quantized checkpoints: each layout is packed here, one number after the other, and read back exactly."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading.checkpoint import load_model, open_checkpoint
from mini_engine.loading.compressed_tensors import matching
from mini_engine.loading.quantized import QuantizedCheckpoint, read_quantized
from mini_engine.loading.stored import StoredTensors
from mini_engine.parts import Parts
from mini_engine.quantization import FP8, Format, QuantizedTensor
from tests.models.families import transformers_model

NAME = "model.layers.0.mlp.down_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, Tensor]


def word(numbers: Sequence[int], bits: int) -> int:
    """An int32 that holds unsigned numbers, the first one in its lowest bits."""
    value = 0
    for place, number in enumerate(numbers):
        assert 0 <= number < 2**bits
        value += number << bits * place
    return value - 2**32 if value >= 2**31 else value


def pack(rows: Sequence[Sequence[int]], bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack each row into words; missing numbers at its end are 0. Place i of a word holds number order[i] of its."""
    places, packed = 32 // bits, []
    for row in rows:
        row = [*row, *[0] * (-len(row) % places)]
        chunks = [row[start : start + places] for start in range(0, len(row), places)]
        packed.append([word([chunk[i] for i in order or range(places)], bits) for chunk in chunks])
    return torch.tensor(packed, dtype=torch.int32)


def columns_of(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def read(tensors: Tensors, quantization: dict[str, Any], model_type: str = "llama") -> QuantizedCheckpoint:
    headers = {name: tensor.to("meta") for name, tensor in tensors.items()}
    config = {"model_type": model_type, "quantization_config": quantization}
    return read_quantized(StoredTensors(headers, tensors.__getitem__), config, Path("folder"))


def matrix_of(tensors: Tensors, quantization: dict[str, Any], name: str = NAME) -> tuple[QuantizedTensor, Tensor]:
    """The matrix as it is read, and its values in float64; checks what holds for every matrix."""
    checkpoint = read(tensors, quantization)
    stored, header = checkpoint.tensors[f"{name}.weight"], checkpoint.tensors.headers[f"{name}.weight"]
    assert isinstance(stored, QuantizedTensor) and stored.format == checkpoint.formats[name]
    assert header.is_meta and header.dtype == torch.float32 and header.shape == stored.shape
    assert stored.q.dtype == (FP8 if stored.format.kind == "fp8" else torch.int8) and stored.q.is_contiguous()
    assert stored.scale.dtype == torch.float32 and stored.scale.shape == stored.format.tiles(*stored.shape)
    assert (stored.offset is not None) == stored.format.has_offsets
    if stored.offset is not None:
        assert stored.offset.dtype == torch.float32 and stored.offset.shape == stored.scale.shape
    if stored.format.kind == "int4":
        assert int(stored.q.min()) >= -8 and int(stored.q.max()) <= 7
    return stored, stored.dequantize(torch.float64)


def random_numbers(shape: tuple[int, int], low: int, high: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).tolist()


def random_scales(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).uniform(0.01, 2.0, shape)).to(dtype)


def expected(q: Sequence[Sequence[int]], zeros: Any, scales: Tensor, group: Callable[[int], int]) -> Tensor:
    """(q - zero) * scale in float64; `zeros` and `scales` are [N, groups], `group` gives the group of a column."""
    rows = []
    for n, row in enumerate(q):
        rows.append([(v - zeros[n][group(k)]) * float(scales[n, group(k)]) for k, v in enumerate(row)])
    return torch.tensor(rows, dtype=torch.float64)


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def compressed(stored_as: str = "pack-quantized", weights: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    group = {"targets": ["Linear"], "weights": given | (weights or {}), "input_activations": None}
    base = {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"group_0": group}}
    return base | {"quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None} | options


def packed_tensors(q: Any, zeros: Any, scales: Tensor, bits: int, name: str = NAME) -> Tensors:
    half = 2 ** (bits - 1)
    tensors = {"weight_packed": pack([[v + half for v in row] for row in q], bits), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor([len(q), len(q[0])])
    if zeros is not None:  # the words of a column of zero points belong to neighboring rows
        tensors["weight_zero_point"] = pack([[v + half for v in c] for c in columns_of(zeros)], bits).T.contiguous()
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 12) | st.none(),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_packed_integers(
    bits: int, rows: int, columns: int, group: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    half, size = 2 ** (bits - 1), group or columns
    groups = -(-columns // size)
    q = random_numbers((rows, columns), -half, half - 1, seed=1)
    zeros = None if symmetric else random_numbers((rows, groups), -half, half - 1, seed=2)
    scales = random_scales((rows, groups), dtype, seed=3)
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    weights: dict[str, Any] = {"num_bits": bits, "symmetric": symmetric} | strategy
    stored, matrix = matrix_of(packed_tensors(q, zeros, scales, bits), compressed(weights=weights))
    assert stored.format == Format(f"int{bits}", 1, group, not symmetric)
    wanted = expected(q, zeros or [[0] * groups] * rows, scales, lambda k: k // size)
    if symmetric or dtype != torch.float32:  # the product of a zero point and a scale of 16 bits is exact
        assert torch.equal(matrix, wanted)
    else:
        torch.testing.assert_close(matrix, wanted, rtol=0, atol=2**-16)  # half a unit in the last place of 256


def test_the_words_of_the_format() -> None:
    """The numbers -8..3 of a row are the words 0x76543210 and 0x0000ba98; weight_shape says that the rest is none."""
    words = torch.tensor([[0x76543210, 0x0000BA98]], dtype=torch.int32)
    tensors = {f"{NAME}.weight_packed": words, f"{NAME}.weight_scale": torch.ones(1, 1)}
    tensors[f"{NAME}.weight_shape"] = torch.tensor([1, 12])
    _, matrix = matrix_of(tensors, compressed(weights={"strategy": "channel", "group_size": -1}))
    assert matrix.tolist() == [list(range(-8, 4))]


def test_zero_points_are_packed_along_the_other_axis() -> None:
    """Eight rows with the zero points -8..-1: one word for each group."""
    tensors = packed_tensors([[0] * 4] * 8, None, torch.ones(8, 2), bits=4)
    tensors[f"{NAME}.weight_zero_point"] = torch.tensor([[0x76543210, 0x01234567]], dtype=torch.int32)
    _, matrix = matrix_of(tensors, compressed(weights={"symmetric": False, "group_size": 2}))
    assert matrix[:, 0].tolist() == list(range(8, 0, -1)) and matrix[:, 2].tolist() == list(range(1, 9))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("stored_as", ["int-quantized", "naive-quantized"])
def test_integers_of_8_bits_that_are_not_packed(stored_as: str, symmetric: bool) -> None:
    """The scales of activations are dropped."""
    q, scales = random_numbers((6, 10), -128, 127, seed=4), random_scales((6, 1), torch.bfloat16, seed=5)
    zeros = [[0]] * 6 if symmetric else random_numbers((6, 1), -128, 127, seed=6)
    parts = {"weight": torch.tensor(q, dtype=torch.int8), "weight_scale": scales, "input_scale": torch.ones(1)}
    if not symmetric:
        parts["weight_zero_point"] = torch.tensor(zeros, dtype=torch.int8)
    tensors = {f"{NAME}.{part}": tensor for part, tensor in parts.items()} | {f"{NAME}.bias": torch.ones(6)}
    options = compressed(stored_as, {"num_bits": 8, "symmetric": symmetric, "strategy": "channel", "group_size": None})
    stored, matrix = matrix_of(tensors, options)
    assert stored.format == Format("int8", 1, None, not symmetric)
    assert torch.equal(matrix, expected(q, zeros, scales, lambda k: 0))
    assert read(tensors, options).tensors.keys() == {f"{NAME}.weight", f"{NAME}.bias"}


def random_float8(rows: int, columns: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(7).normal(0, 50, (rows, columns))).to(FP8)


def blockwise(weight: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    wanted = weight.double()
    for n, k in itertools.product(range(weight.shape[0]), range(weight.shape[1])):
        wanted[n, k] *= scales.double()[n // rows, k // columns]
    return wanted


@pytest.mark.parametrize(
    ("strategy", "shape", "tile"),
    [
        ({"strategy": "tensor"}, (1,), (None, None)),
        ({"strategy": "channel"}, (7, 1), (1, None)),
        ({"strategy": "block", "block_structure": [3, 4]}, (3, 3), (3, 4)),
        ({"strategy": "block", "block_structure": "4x8"}, (2, 2), (4, 8)),
        ({"strategy": None}, (1,), (None, None)),
    ],
)
@pytest.mark.parametrize("stored_as", ["float-quantized", "naive-quantized"])
def test_float8_of_compressed_tensors(stored_as: str, strategy: Any, shape: Any, tile: Any) -> None:
    weight, scales = random_float8(7, 10), random_scales(shape, torch.bfloat16, seed=8)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scales, f"{NAME}.input_scale": torch.ones(1)}
    options = compressed(stored_as, {"num_bits": 8, "type": "float", "group_size": None} | strategy)
    stored, matrix = matrix_of(tensors, options)
    assert stored.format == Format("fp8", *tile)
    rows, columns = tile[0] or 7, tile[1] or 10
    assert torch.equal(matrix, blockwise(weight, scales.reshape(stored.scale.shape), rows, columns))


def test_columns_in_another_order_are_sorted_by_group() -> None:
    groups = [1, 0, 1, 0, 2, 2, 0, 1, 2]
    q, scales = random_numbers((4, 9), -8, 7, seed=9), random_scales((4, 3), torch.float32, seed=10)
    tensors = packed_tensors(q, None, scales, bits=4) | {f"{NAME}.weight_g_idx": torch.tensor(groups)}
    stored, matrix = matrix_of(tensors, compressed(weights={"group_size": 3, "actorder": "group"}))
    assert stored.order is not None and stored.order.tolist() == [1, 3, 6, 0, 2, 7, 4, 5, 8]
    assert torch.equal(matrix, expected(q, [[0] * 3] * 4, scales, groups.__getitem__))


LINEAR, NONE = ("Linear", "Module"), dict[str, str]()
ATTENTION, MLP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("patterns", "name", "first"),
    [
        (["Linear", "re:.*mlp.*", MLP], MLP, MLP),  # names before expressions before classes
        (["Linear", "re:.*mlp.*"], MLP, "re:.*mlp.*"),
        (["re:.*up_proj.*", "re:.*mlp.*"], MLP, "re:.*mlp.*"),  # alphabetical, whatever the order in the file
        (["re:.*mlp.*", "re:.*up_proj.*"], MLP, "re:.*mlp.*"),
        (["re:.*mlp.*", "re:.*down_proj.*"], NAME, "re:.*down_proj.*"),
        (["re:model"], MLP, "re:model"),  # anchored at the start only
        (["re:mlp", "up_proj", "model.layers.0.mlp", "LlamaMLP", "linear"], MLP, None),
        (["Linear"], "lm_head", "Linear"),
        (["Module", "Linear"], MLP, "Linear"),
    ],
)
def test_the_pattern_that_counts(patterns: list[str], name: str, first: str | None) -> None:
    assert matching(name, LINEAR, patterns)[:1] == ([] if first is None else [first])


def two_groups(patterns: dict[str, int], ignore: Sequence[str] = ()) -> dict[str, Any]:
    """Groups of INT4 or INT8 with a scale for each row; for each pattern, its number of bits."""
    groups = {}
    for index, (pattern, bits) in enumerate(patterns.items()):
        groups[f"group_{index}"] = copy.deepcopy(compressed()["config_groups"]["group_0"]) | {"targets": [pattern]}
        groups[f"group_{index}"]["weights"] |= {"num_bits": bits, "strategy": "channel", "group_size": None}
        groups[f"group_{index}"]["format"] = "pack-quantized"
    return compressed("mixed-precision", config_groups=groups, ignore=list(ignore))


def rows_of_bits(**names: int) -> Tensors:
    q = [[1, -2, 3, -4], [5, 6, -7, 0]]
    found: Tensors = {}
    for name, bits in names.items():
        found |= packed_tensors(q, None, torch.ones(2, 1), bits, name)
    return found


@pytest.mark.parametrize("is_reversed", [False, True])
def test_two_groups_have_their_own_formats(is_reversed: bool) -> None:
    """In either order of the groups, the expression that comes first in the alphabet counts."""
    patterns = {"re:.*mlp.*": 4, "re:.*up_proj.*": 8, "Linear": 8}
    options = two_groups(dict(reversed(patterns.items())) if is_reversed else patterns)
    tensors = rows_of_bits(**{MLP: 4, ATTENTION: 8})
    for name, bits in ((MLP, 4), (ATTENTION, 8)):
        stored, matrix = matrix_of(tensors, options, name)
        assert stored.format.bits == bits and matrix.tolist() == [[1, -2, 3, -4], [5, 6, -7, 0]]


def test_the_lm_head_is_quantized_unless_it_is_ignored() -> None:
    tensors = rows_of_bits(lm_head=4)
    assert read(tensors, two_groups({"Linear": 4})).formats.keys() == {"lm_head"}
    kept = read(tensors, two_groups({"Linear": 4}, ignore=["lm_head"]))
    assert not kept.formats and kept.tensors.keys() == tensors.keys()  # which no model accepts
    dense = {"lm_head.weight": torch.ones(2, 4), "model.norm.weight": torch.ones(4)}
    with pytest.raises(ModelLoadError, match=r"no tensor lm_head\.weight_packed.*ignored modules"):
        read(dense, two_groups({"Linear": 4}))
    assert read(dense, two_groups({"re:.*": 4}, ignore=["Linear"])).tensors.keys() == dense.keys()


def test_a_group_of_activations_leaves_weights_dense() -> None:
    options = two_groups({"Linear": 4, "LlamaAttention": 8})
    options["config_groups"]["group_1"]["weights"] = None
    options["config_groups"]["group_1"]["input_activations"] = {"num_bits": 8, "type": "float"}
    assert read(rows_of_bits(**{MLP: 4}), options).formats.keys() == {MLP}


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "minmax"}


def test_factors_of_keys_and_values() -> None:
    scales = {f"model.layers.{layer}.self_attn.{x}_scale": torch.tensor([layer + y]) for layer in (0, 10) for x, y in
              (("k", 0.5), ("v", 0.25))}  # fmt: skip
    found = read(rows_of_bits(**{MLP: 4}) | scales, two_groups({"Linear": 4}) | {"kv_cache_scheme": KV})
    assert found.kv_scales == {0: (0.5, 0.25), 10: (10.5, 10.25)} and found.tensors.keys() == {f"{MLP}.weight"}
    assert not read(rows_of_bits(**{MLP: 4}), two_groups({"Linear": 4}) | {"kv_cache_scheme": KV}).kv_scales
    unasked = read(rows_of_bits(**{MLP: 4}) | scales, two_groups({"Linear": 4}))
    assert not unasked.kv_scales and scales.keys() < unasked.tensors.keys()
    first = {name: scales[name] for name in list(scales)[:1]}
    for wrong in (first, scales | {next(iter(scales)): torch.zeros(1)}, scales | {next(iter(scales)): torch.ones(2)}):
        with pytest.raises(ModelLoadError, match="k_scale and v_scale must both"):
            read(wrong, two_groups({"Linear": 4}) | {"kv_cache_scheme": KV})


# --- FP8 -------------------------------------------------------------------------------------------------------------

DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [4, 3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [(8, 6), (9, 7), (6, 4), (3, 2)])
def test_blocks_of_deepseek_may_be_ragged(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """6 rows have two scales, for 4 rows and for 2: no 3 rows each, as rows / scales would say."""
    grid = (-(-shape[0] // 4), -(-shape[1] // 3))
    weight, scales = random_float8(*shape), (2.0 ** torch.randint(-9, 3, grid)).to(dtype)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scales, "model.norm.weight": torch.ones(3)}
    options = DEEPSEEK | {"scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}
    stored, matrix = matrix_of(tensors, options)
    assert stored.format == Format("fp8", 4, 3) and torch.equal(matrix, blockwise(weight, scales, 4, 3))


@pytest.mark.parametrize("shape", [(5, 1), (5,)])
def test_fbgemm_has_a_factor_for_each_row(shape: tuple[int, ...]) -> None:
    weight, scales = random_float8(5, 6), random_scales(shape, torch.float32, seed=11)
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale": scales, f"{NAME}.input_scale_ub": torch.ones(1)}
    options = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    stored, matrix = matrix_of(tensors, options)
    assert stored.format == Format("fp8") and torch.equal(matrix, blockwise(weight, scales.reshape(5, 1), 1, 6))
    assert read(tensors, options).tensors.keys() == {f"{NAME}.weight"}


# --- GPTQ and AWQ ----------------------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 4, "desc_act": False, "sym": False, "lm_head": False}
GPTQ |= {"checkpoint_format": "gptq", "true_sequential": True, "damp_percent": 0.01, "dynamic": None}


def gptq_tensors(q: Any, zeros: Any, scales: Tensor, g_idx: Any = None, bits: int = 4, less: int = 1) -> Tensors:
    """Pack q [N, K] along K and zeros [N, groups], less 1 for version 1, along N; scales are [N, groups]."""
    qzeros = [[(zero - less) % 2**bits for zero in column] for column in columns_of(zeros)]
    parts = {"qweight": pack(q, bits).T.contiguous(), "qzeros": pack(qzeros, bits), "scales": scales.T.contiguous()}
    if g_idx is not None:
        parts["g_idx"] = torch.tensor(g_idx, dtype=torch.int32)
    return {f"{NAME}.{part}": tensor for part, tensor in parts.items()}


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([4, 8]), st.integers(1, 10), st.integers(1, 4), st.integers(1, 12) | st.just(-1), st.booleans(),
    st.sampled_from(["none", "plain", "shuffled"]), st.booleans(),
)  # fmt: skip
def test_gptq(bits: int, rows: int, words: int, group: int, is_v1: bool, g_idx: str, symmetric: bool) -> None:
    columns = words * 32 // bits
    size = columns if group == -1 else group
    groups, index = -(-columns // size), [k // size for k in range(columns)]
    if g_idx == "shuffled":
        index = np.random.default_rng(12).permutation(index).tolist()
    q, half = random_numbers((rows, columns), 0, 2**bits - 1, seed=13), 2 ** (bits - 1)
    zeros = [[half] * groups] * rows if symmetric else random_numbers((rows, groups), 0, 2**bits - 1, seed=14)
    scales = random_scales((rows, groups), torch.float16, seed=15)
    tensors = gptq_tensors(q, zeros, scales, None if g_idx == "none" else index, bits, less=int(is_v1))
    version = {"checkpoint_format": "gptq" if is_v1 else "gptq_v2"}
    stored, matrix = matrix_of(tensors, GPTQ | {"bits": bits, "group_size": group, "sym": symmetric} | version)
    assert stored.format == Format(f"int{bits}", 1, None if group == -1 else group, not symmetric)
    assert (stored.order is None) == (index == sorted(index))
    assert torch.equal(matrix, expected(q, zeros, scales, index.__getitem__))


def test_a_zero_point_of_0_is_stored_as_15() -> None:
    """And its neighbors are what they are: the carry of 15 + 1 stays in its own four bits."""
    tensors = gptq_tensors([[0, 1, 2, 15] * 2] * 8, [[0], [15], [1], [8], [0], [0], [9], [7]], torch.ones(8, 1))
    assert int(tensors[f"{NAME}.qzeros"]) & 0xFFFFFFFF == 0x68FF70EF
    _, matrix = matrix_of(tensors, GPTQ | {"group_size": 8})
    assert matrix[:, 0].tolist() == [0, -15, -1, -8, 0, 0, -9, -7] and matrix[0].tolist() == [0, 1, 2, 15] * 2


@pytest.mark.parametrize(
    ("label", "zero"),
    [
        ({"checkpoint_format": "gptq"}, 8),
        ({"checkpoint_format": "gptq_v2"}, 7),
        ({"checkpoint_format": None, "format": "gptq_v2"}, 7),
        ({"checkpoint_format": None, "format": "gptq"}, 8),
        ({"checkpoint_format": None}, 8),
        ({"checkpoint_format": "gptq_v2", "format": "gptq"}, 7),
    ],
)
def test_the_label_tells_the_version(label: dict[str, Any], zero: int) -> None:
    tensors = gptq_tensors([[0] * 8] * 8, [[8]] * 8, torch.ones(8, 1))
    _, matrix = matrix_of(tensors, GPTQ | {"group_size": 8} | label)
    assert matrix.unique().tolist() == [-zero]


def test_a_wrong_label_of_symmetric_weights_is_noticed() -> None:
    tensors = gptq_tensors([[0] * 8] * 8, [[8]] * 8, torch.ones(8, 1), less=0)
    with pytest.raises(WeightFileError, match=r"down_proj has zero points.*symmetric.*version"):
        matrix_of(tensors, GPTQ | {"group_size": 8, "sym": True})


def test_g_idx_counts_whatever_desc_act_says() -> None:
    index = [0, 1] * 4
    tensors = gptq_tensors([list(range(8))] * 8, [[0, 0]] * 8, torch.tensor([[1.0, 16.0]] * 8), index)
    for flag in (True, False):
        _, matrix = matrix_of(tensors, GPTQ | {"desc_act": flag})
        assert matrix[0].tolist() == [0, 16, 2, 48, 4, 80, 6, 112]
    del tensors[f"{NAME}.g_idx"]
    with pytest.raises(ModelLoadError, match=r"no tensor .*g_idx"):
        read(tensors, GPTQ | {"desc_act": True})
    for unequal in ([0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2], [-1] * 8):
        tensors[f"{NAME}.g_idx"] = torch.tensor(unequal, dtype=torch.int32)
        with pytest.raises(WeightFileError, match=r"g_idx.*4 columns each"):
            matrix_of(tensors, GPTQ)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 4, "zero_point": True, "version": "gemm"}


def awq_tensors(q: Any, zeros: Any, scales: Tensor) -> Tensors:
    """Pack q [N, K] and zeros [N, groups] along N."""
    parts = {"qweight": pack(columns_of(q), 4, AWQ_ORDER), "scales": scales.T.contiguous()}
    if zeros is not None:
        parts["qzeros"] = pack(columns_of(zeros), 4, AWQ_ORDER)
    return {f"{NAME}.{part}": tensor for part, tensor in parts.items()}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 12) | st.just(-1), st.booleans())
def test_awq(words: int, columns: int, group: int, has_zeros: bool) -> None:
    size, rows = columns if group == -1 else group, 8 * words
    groups = -(-columns // size)
    q, scales = random_numbers((rows, columns), 0, 15, seed=16), random_scales((rows, groups), torch.float16, seed=17)
    zeros = random_numbers((rows, groups), 0, 15, seed=18) if has_zeros else [[8] * groups] * rows
    options = AWQ | {"group_size": group, "zero_point": has_zeros}
    for stored_zeros in [zeros] if has_zeros else [zeros, None]:
        stored, matrix = matrix_of(awq_tensors(q, stored_zeros, scales), options)
        assert stored.format == Format("int4", 1, None if group == -1 else group, has_zeros)
        assert torch.equal(matrix, expected(q, zeros, scales, lambda k: k // size))


def test_the_order_of_awq() -> None:
    """The lowest bits of a word belong to column 0, the next to column 2."""
    tensors = {f"{NAME}.qweight": torch.tensor([[0x76543210]], dtype=torch.int32)}
    tensors |= {f"{NAME}.qzeros": torch.zeros(1, 1, dtype=torch.int32), f"{NAME}.scales": torch.ones(1, 8)}
    _, matrix = matrix_of(tensors, {"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "zero_point": True})
    assert matrix[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["bitsandbytes", "quanto", "hqq", "torchao", "modelopt", "mxfp4", "eetq", "aqlm", ""]
)
def test_an_unknown_method_is_refused_by_name(method: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"method '{method}'.*quantization=\"int8\".*AWQ"):
        read({f"{NAME}.weight": torch.ones(2, 2)}, {"quant_method": method})


FLOAT = {"num_bits": 8, "type": "float", "group_size": None, "strategy": "channel"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "method 'none'"),
        ([], "must be an object"),
        ({"quant_method": 3}, "quant_method = 3"),
        (compressed(weights={"num_bits": 3}), "num_bits = 3.*4 or 8.*int8"),
        (compressed("nvfp4-pack-quantized"), "nvfp4.*int8"),
        (compressed("mxfp4-pack-quantized"), "mxfp4.*int8"),
        (compressed("mxfp8-quantized"), "mxfp8.*int8"),
        (compressed("marlin-24"), "marlin-24.*int8"),
        (compressed("dense"), "'dense'"),
        (compressed("mixed-precision"), "mixed-precision"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.*sparse-24"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config.*does not know"),
        (compressed(config_groups={"W8A8": ["Linear"]}), "W8A8.*object"),
        (compressed(weights={"strategy": "tensor_group", "group_size": 16}), "tensor_group"),
        (compressed(weights={"group_size": 0}), "group_size = 0"),
        (compressed(weights={"group_size": None}), "contradicts group_size"),
        (compressed(weights={"strategy": "channel"}), "contradicts group_size"),
        (compressed(weights={"dynamic": True}), "dynamic"),
        (compressed(weights={"actorder": "sideways"}), "actorder"),
        (compressed(weights={"of_the_future": 1}), "of_the_future"),
        (compressed("float-quantized", FLOAT | {"symmetric": False}), "symmetric"),
        (compressed("float-quantized", FLOAT | {"strategy": "block"}), "block_structure"),
        (compressed("float-quantized", {"group_size": None, "strategy": "channel"}), "type = 'int'"),
        (compressed(ignore=["re:("]), "ignore.*regular expressions"),
        (compressed(ignore=[3]), "ignore"),
        (compressed(kv_cache_scheme=KV | {"type": "int"}), "kv_cache_scheme has type = 'int'"),
        (compressed(kv_cache_scheme=KV | {"strategy": "attn_head"}), "attn_head"),
        ({k: v for k, v in DEEPSEEK.items() if k != "weight_block_size"}, r"weight_block_size = None.*\[128, 128\]"),
        (DEEPSEEK | {"weight_block_size": [128]}, "weight_block_size"),
        (DEEPSEEK | {"fmt": "e5m2"}, "e5m2"),
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"bits": True}, "bits = True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"checkpoint_format": None, "format": "gptq_p"}, "gptq_p"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic.*does not know"),
        (GPTQ | {"group_size": "4"}, "group_size"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"bits": 8}, "bits = 8"),
    ],
)
def test_options_that_are_not_understood_are_refused(options: Any, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem) as caught:
        read({f"{NAME}.weight": torch.ones(2, 2)}, options)
    assert "quantization_config" in str(caught.value) and not isinstance(caught.value, WeightFileError)


def test_a_quantized_gpt2_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="GPT-2"):
        read({}, GPTQ, "gpt2")


ONES = torch.ones(8, 2)
INT4 = packed_tensors([[1] * 8] * 8, [[0, 0]] * 8, ONES, bits=4)
EXAMPLES: dict[str, tuple[Tensors, Any]] = {
    "packed": (INT4, compressed(weights={"group_size": 4, "symmetric": False})),
    "int8": (
        {f"{NAME}.weight": torch.ones(8, 8, dtype=torch.int8), f"{NAME}.weight_scale": torch.ones(8, 1)},
        compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "group_size": None}),
    ),
    "float8": (
        {f"{NAME}.weight": random_float8(8, 8), f"{NAME}.weight_scale": torch.ones(8, 1)},
        compressed("float-quantized", FLOAT, kv_cache_scheme=KV),
    ),
    "fp8": ({f"{NAME}.weight": random_float8(8, 8), f"{NAME}.weight_scale_inv": torch.ones(2, 3)}, DEEPSEEK),
    "gptq": (gptq_tensors([[1] * 8] * 8, [[8, 8]] * 8, ONES, [0, 1] * 4), GPTQ),
    "awq": (awq_tensors([[1] * 8] * 8, [[8, 8]] * 8, ONES), AWQ),
}


@pytest.mark.parametrize(
    ("layout", "part"),
    [(layout, name.rpartition(".")[2]) for layout, (tensors, _) in EXAMPLES.items() for name in tensors],
)
def test_each_tensor_is_checked_by_its_header(layout: str, part: str) -> None:
    """A missing tensor, another dtype or another shape is refused before any tensor but weight_shape is read."""
    tensors, options = EXAMPLES[layout]
    matrix_of(tensors, options)
    name = f"{NAME}.{part}"
    changes: list[Tensor | None] = [tensors[name].to(torch.int16), tensors[name][None], tensors[name][:0]]
    for change in [*changes, None] if part not in ("qweight", "g_idx") else changes:
        wrong = {**tensors, name: change} if change is not None else {k: v for k, v in tensors.items() if k != name}
        headers = {key: tensor.to("meta") for key, tensor in wrong.items()}
        shape = StoredTensors(headers, lambda key: {f"{NAME}.weight_shape": tensors[key]}[key])
        with pytest.raises(ModelLoadError, match=part):
            read_quantized(shape, {"quantization_config": options}, Path("folder"))


def test_a_wrong_group_size_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"weight_scale is .*\[8, 2\].*\[8, 4\].*group"):
        read(INT4, compressed(weights={"group_size": 2, "symmetric": False}))
    with pytest.raises(ModelLoadError, match=r"qzeros.*\[2, 1\].*\[1, 1\]"):
        read(EXAMPLES["gptq"][0], GPTQ | {"group_size": 8})


def test_a_stored_shape_that_contradicts_the_words_is_refused() -> None:
    for wrong in ([8, 9], [7, 8], [8, 0], [-8, 8], [2**62, 2**62]):
        tensors = INT4 | {f"{NAME}.weight_shape": torch.tensor(wrong)}
        with pytest.raises(WeightFileError, match="states the shape"):
            read(tensors, EXAMPLES["packed"][1])


def test_zero_points_of_a_symmetric_format_are_refused() -> None:
    options = compressed(weights={"group_size": 4})
    matrix_of(INT4, options)  # all are 0
    tensors = INT4 | {f"{NAME}.weight_zero_point": INT4[f"{NAME}.weight_zero_point"] + 1}
    with pytest.raises(WeightFileError, match=r"zero points.*symmetric"):
        matrix_of(tensors, options)
    with pytest.raises(WeightFileError, match=r"zero points.*symmetric"):
        matrix_of(awq_tensors([[1] * 8] * 8, [[0, 0]] * 8, ONES), AWQ | {"zero_point": False})


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), layout=st.sampled_from(sorted(EXAMPLES)))
def test_junk_in_any_option_is_read_or_refused_and_nothing_else(data: st.DataObject, layout: str) -> None:
    tensors, options = EXAMPLES[layout]
    options = copy.deepcopy(options)
    for _ in range(data.draw(st.integers(1, 2))):
        where = options
        while nested := [key for key, value in where.items() if isinstance(value, dict)]:
            if data.draw(st.booleans()):
                break
            where = where[data.draw(st.sampled_from(nested))]
        where[data.draw(st.sampled_from([*where, "unknown"]))] = data.draw(JUNK)
    with contextlib.suppress(ModelLoadError):
        found = read(tensors, options)
        assert all(found.tensors[name].shape == header.shape for name, header in found.tensors.headers.items())


# --- folders ---------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, quantization: Any, change: Callable[[str, Tensor], Tensors], **config: Any) -> Any:
    """Save a tiny model, with `change(module, weight)` in place of each matrix of a layer."""
    theirs = transformers_model("llama")
    theirs.save_pretrained(folder)
    tensors: Tensors = {}
    for name, tensor in theirs.state_dict().items():
        tensors |= change(name.removesuffix(".weight"), tensor) if "_proj" in name else {name: tensor.contiguous()}
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content |= {"quantization_config": quantization, "dtype": "bfloat16"} | config
    (folder / "config.json").write_text(json.dumps(content))
    return theirs


def to_rows_of_float8(module: str, weight: Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{module}.weight": (weight / scale).to(FP8), f"{module}.weight_scale": scale}


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": None}, torch.bfloat16),
        ({"dtype": 3}, torch.bfloat16),
    ],
)
def test_a_folder_opens_with_its_formats(stated: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = write_folder(tmp_path, compressed("float-quantized", FLOAT), to_rows_of_float8, **stated)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype == dtype and checkpoint.kv_scales == {}
    assert checkpoint.tensors.keys() == theirs.state_dict().keys()
    assert checkpoint.formats == {
        name.removesuffix(".weight"): Format("fp8") for name in checkpoint.tensors if "_proj" in name
    }
    ours = load_model(checkpoint, Parts(), torch.float32)
    for name, parameter in ours.destinations().items():
        torch.testing.assert_close(parameter, theirs.state_dict()[name], rtol=2**-4, atol=2e-3)


def test_a_dense_folder_has_no_formats(tmp_path: Path) -> None:
    write_folder(tmp_path, None, lambda module, weight: {f"{module}.weight": weight.contiguous()})
    assert open_checkpoint(tmp_path).formats == {} and open_checkpoint(tmp_path).dtype == torch.float32


def test_tensors_that_nothing_explains_are_refused(tmp_path: Path) -> None:
    """Scales of a module that the configuration leaves dense are not dropped."""
    options = compressed("float-quantized", FLOAT, ignore=["re:.*layers.2.*", "lm_head"])
    write_folder(tmp_path, options, to_rows_of_float8)
    with pytest.raises(ModelLoadError, match=r"no place for 7.*weight_scale"):
        load_model(open_checkpoint(tmp_path), Parts(), torch.float32)


def test_a_look_up_reads_the_tensors_of_one_matrix() -> None:
    tensors = rows_of_bits(**{MLP: 4, ATTENTION: 4})
    reads: list[str] = []
    headers = {name: tensor.to("meta") for name, tensor in tensors.items()}
    stored = StoredTensors(headers, lambda name: reads.append(name) or tensors[name])  # type: ignore[func-returns-value]
    found = read_quantized(stored, {"quantization_config": two_groups({"Linear": 4})}, Path("folder"))
    assert all(name.endswith("weight_shape") for name in reads)
    reads.clear()
    found.tensors[f"{MLP}.weight"]
    assert sorted(reads) == [f"{MLP}.weight_packed", f"{MLP}.weight_scale"]
