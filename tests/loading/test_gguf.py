"""GGUF files: what the gguf library and transformers say is what is loaded, and hostile files are refused."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading import gguf as our_gguf
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.loading.gguf import (
    FORMATS,
    TENSOR_TYPES,
    BoundedReader,
    build_tokenizer,
    hf_config,
    hf_tensors,
    read_gguf,
    unpack_blocks,
    unpermute,
)
from mini_engine.models.config import ModelConfig
from mini_engine.models.weights import QuantizedLinear, QuantizedRows
from mini_engine.parts import Parts
from mini_engine.quantization import Format, QuantizedTensor
from mini_engine.rope import Linear, Llama3, inverse_frequencies
from mini_engine.sampling_params import SamplingParams
from tests.models.families import their_logits, transformers_model, whole

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
Q = gguf.GGMLQuantizationType
QUANTIZED = sorted(TENSOR_TYPES - {"F32", "F16", "BF16"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


# --- the header ------------------------------------------------------------------------------------------------------


def write_file(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], alignment: int | None = None) -> Path:
    """Write a file with the gguf library. A tensor is an array, or (rows of raw bytes, type)."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            kinds.get(type(value), writer.add_string)(key, value)
    for name, value in tensors.items():
        raw, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


METADATA = {"llama.block_count": 3, "x.float": 1.5, "x.flag": True, "x.text": "naïve 🙂", "x.ints": [1, -2, 3]}
METADATA |= {"x.floats": [0.5, 2.5], "x.strings": ["a", "", "🙂"], "x.flags": [True, False]}


@pytest.mark.parametrize("alignment", [None, 64])
def test_reads_what_the_library_wrote(path: Path, alignment: int | None) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
        "f32": rng.normal(size=(3, 5)).astype(np.float32),
        "f16": rng.normal(size=(7,)).astype(np.float16),
        "deep": rng.normal(size=(2, 3, 4, 5)).astype(np.float32),
    }
    file = read_gguf(write_file(path, METADATA, tensors, alignment))
    alignments = {"general.alignment": 64} if alignment else {}
    assert file.metadata == METADATA | {"general.architecture": "llama"} | alignments
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert file.tensors[name].shape == expected.shape
        assert np.array_equal(file.tensor(name).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantized_type_is_dequantized_as_by_the_library(name: str, path: Path) -> None:
    kind = Q[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    file = read_gguf(write_file(path, {}, {"x": (blocks, kind)}))
    assert file.tensors["x"].shape == (3, 2 * elements) and file.blocks("x").shape == (6, size)
    with np.errstate(invalid="ignore"):  # random scales may be infinite
        assert np.array_equal(file.tensor("x").numpy(), gguf.quants.dequantize(blocks, kind), equal_nan=True)


def test_bfloat16_is_read_exactly(path: Path) -> None:
    values = torch.randn(4, 6).bfloat16()
    file = read_gguf(write_file(path, {}, {"x": (values.view(torch.uint8).numpy(), Q.BF16)}))
    assert torch.equal(file.tensor("x"), values.float())


def test_a_type_that_is_not_supported_is_refused_by_name(path: Path) -> None:
    blocks = np.zeros((1, gguf.GGML_QUANT_SIZES[Q.IQ2_XXS][1]), np.uint8)
    write_file(path, {}, {"x": (blocks, Q.IQ2_XXS)})
    with pytest.raises(ModelLoadError, match=r"IQ2_XXS, not .*Q4_1.*Inference"):
        open_checkpoint(path)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def info(name: bytes = b"x", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def padded(content: bytes, data: bytes = b"") -> bytes:
    return content + bytes(-len(content) % 32) + data


HUGE = 2**63 + 5
LIES: dict[str, bytes] = {
    "empty": b"",
    "another format": b"PK\x03\x04" + bytes(100),
    "three letters": b"GGU",
    "ends after the magic": b"GGUF",
    "version 1": head(0, 0, version=1),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "huge number of pairs": head(0, HUGE),
    "huge number of tensors": head(HUGE, 0),
    "pairs that are not there": head(0, 5),
    "tensors that are not there": head(5, 0),
    "huge key": head(0, 1) + struct.pack("<Q", HUGE),
    "key is not UTF-8": head(0, 1) + pair(b"\xff", 4, bytes(4)),
    "key twice": head(0, 2) + pair(b"a", 4, bytes(4)) * 2,
    "unknown type": head(0, 1) + pair(b"a", 99, bytes(8)),
    "huge string": head(0, 1) + pair(b"a", 8, struct.pack("<Q", HUGE)),
    "huge array of bytes": head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 0, HUGE)),
    "huge array of numbers": head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 12, HUGE)),
    "huge array of strings": head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 8, HUGE)),
    "array of arrays": head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(100)),
    "alignment 0": head(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 0)),
    "alignment 24": head(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 24)),
    "alignment 2^31": head(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 2**31)),
    "alignment is text": head(0, 1) + pair(b"general.alignment", 8, string(b"32")),
    "no dimensions": padded(head(1, 0) + info(dims=()), bytes(64)),
    "huge number of dimensions": head(1, 0) + string(b"x") + struct.pack("<I", 2**32 - 1),
    "a dimension of 0": padded(head(1, 0) + info(dims=(0,)), bytes(64)),
    "huge dimensions": padded(head(1, 0) + info(dims=(2**63, 2**63)), bytes(64)),
    "product overflows to 0": padded(head(1, 0) + info(dims=(2**32, 2**32)), bytes(64)),
    "half a block": padded(head(1, 0) + info(dims=(16,), kind=3), bytes(64)),
    "unknown tensor type": padded(head(1, 0) + info(kind=77), bytes(64)),
    "huge offset": padded(head(1, 0) + info(offset=2**64 - 32), bytes(64)),
    "truncated data": padded(head(1, 0) + info(), bytes(31)),
    "tensor twice": padded(head(2, 0) + info() + info(offset=32), bytes(64)),
}


@pytest.mark.filterwarnings("ignore:overflow encountered")  # an offset that wraps around
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_little_memory(lie: str, path: Path, memory_limit: Any) -> None:
    path.write_bytes(LIES[lie])
    with memory_limit(2**26), pytest.raises(WeightFileError) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize("limit", ["limit", "num_values"])
def test_a_header_without_end_is_given_up(limit: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 0, 2000) + bytes(2000)))
    read_gguf(path)
    monkeypatch.setattr(BoundedReader, limit, 1000)
    with pytest.raises(WeightFileError, match="what a header may hold"):
        read_gguf(path)


def test_a_sparse_string_of_gigabytes_is_not_read(path: Path) -> None:
    path.write_bytes(head(0, 1) + pair(b"a", 8, struct.pack("<Q", 2**33)))
    os.truncate(path, 2**33 + 1000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightFileError, match="what a header may hold"):
        read_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(path: Path) -> None:
    file = read_gguf(write_file(path, {}, {"x": np.ones((2, 4), np.float32)}))
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(WeightFileError, match="shrank"):
        file.tensor("x")


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    q4 = np.random.default_rng(2).integers(0, 256, (2, 20), dtype=np.uint8)
    tensors = {"a": np.ones((2, 4), np.float32), "b": (q4, Q.Q4_1)}
    return write_file(tmp_path_factory.mktemp("gguf") / "valid.gguf", METADATA, tensors).read_bytes()


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_a_damaged_file_loads_or_is_refused(path: Path, valid: bytes, memory_limit: Any, data: st.DataObject) -> None:
    content = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 9))
        kind = data.draw(st.sampled_from(["flip", "cut", "u32", "u64"]))
        if kind == "flip":
            content[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[max(place, 16) :]
        else:
            size = 4 if kind == "u32" else 8
            number = data.draw(st.sampled_from([0, 1, 3, 255, 2**31, 2**32 - 1]))
            number = number << 32 | number if size == 8 else number
            content[place : place + size] = number.to_bytes(size, "little")
    path.write_bytes(content)
    with memory_limit(2**26), contextlib.suppress(ModelLoadError):
        file = read_gguf(path)
        for name, tensor in file.tensors.items():
            assert tuple(file.tensor(name).shape) == tensor.shape
            assert tensor.end <= len(content)


# --- configuration and weights ---------------------------------------------------------------------------------------


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights: rows that rotate together become neighbors."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    theirs: Any, family: str, path: Path, kind: Q | None = None, rope_freqs: Any = None, **metadata: Any
) -> Path:
    """Write a model of transformers: names by the gguf library, matrices quantized to `kind`."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, family)
    layers = config.num_hidden_layers
    writer.add_block_count(metadata.pop("block_count", layers))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    extra = metadata.pop("extra", None)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(*value if isinstance(value, tuple) else (value,))

    if extra is not None:
        writer.add_tensor(extra, np.zeros((4, 8), np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], layers)
    tied = config.tie_word_embeddings
    for name, tensor in theirs.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weight = tensor.float().numpy()
        if family == "llama" and ".q_proj." in name:
            weight = permute(weight, config.num_attention_heads)
        elif family == "llama" and ".k_proj." in name:
            weight = permute(weight, config.num_key_value_heads)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        weight = np.ascontiguousarray(weight)
        if kind is not None and weight.ndim == 2:
            writer.add_tensor(new_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new_name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_configuration_and_tensors_are_those_of_transformers(family: str, tied: bool, path: Path) -> None:
    theirs = transformers_model(family, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(write_gguf(theirs, family, path))
    expected = theirs.config.to_dict() | {"eos_token_id": None, "architectures": [type(theirs).__name__]}
    assert checkpoint.config == ModelConfig.from_hf(expected)
    assert checkpoint.dtype == torch.float32 and checkpoint.eos_token_ids == ()
    assert checkpoint.default_params == SamplingParams()

    weights = theirs.state_dict()
    if tied:
        del weights["lm_head.weight"]
    assert checkpoint.tensors.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(checkpoint.tensors[name], weight)
        assert checkpoint.tensors.headers[name].shape == weight.shape
    load_model(checkpoint, Parts(), torch.float32)


def test_a_file_of_mistral_is_called_a_llama(path: Path) -> None:
    theirs = transformers_model("mistral", sliding_window=None)
    model = load_model(open_checkpoint(write_gguf(theirs, "llama", path)), Parts(), torch.float32)
    tokens = [3, 4, 5, 60, 7, 8, 9]
    torch.testing.assert_close(whole(model, [tokens])[0], their_logits(theirs, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_quantized_weights_are_those_that_transformers_reads(family: str, kind: Q, tmp_path: Path) -> None:
    # transformers 5 does not read the head size from a file and takes 128 for Qwen3.
    changes: dict[str, Any] = {"head_dim": 128} if family == "qwen3" else {}
    theirs = transformers_model(family, hidden_size=64, intermediate_size=64, vocab_size=64, **changes)
    path = write_gguf(theirs, family, tmp_path / "model.gguf", kind, token_list=["x"] * 64)
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    checkpoint = open_checkpoint(path)
    assert checkpoint.dtype == (torch.float16 if kind is Q.F16 else torch.bfloat16)
    assert checkpoint.formats.keys() == {
        name.removesuffix(".weight") for name, weight in oracle.items() if weight.ndim == 2 and kind is not Q.F16
    }
    headers, dense = hf_tensors(read_gguf(path), hf_config(read_gguf(path)))
    for name, header in headers.items():
        assert torch.equal(dense(name).float(), oracle[name]) and header.shape == oracle[name].shape, name
        kept = checkpoint.tensors[name]
        assert isinstance(kept, QuantizedTensor) == (name.removesuffix(".weight") in checkpoint.formats)
        # The offset of Q4_1 is rounded once more.
        values = kept.dequantize() if isinstance(kept, QuantizedTensor) else kept.float()
        torch.testing.assert_close(values, oracle[name], rtol=0, atol=2**-20 if kind is Q.Q4_1 else 0)


# --- quantized matrices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_unpacked_blocks_are_what_the_library_dequantizes(name: str, path: Path) -> None:
    """All bytes random but the halves, which are finite, of either sign, and sometimes 0."""
    elements, size = gguf.GGML_QUANT_SIZES[Q[name]]
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (6, size), dtype=np.uint8)
    halves = rng.normal(size=(6, 2)).astype(np.float16)
    halves[0] = 0
    stored = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4, "Q4_K": 4}[name]
    blocks[:, :stored] = halves.view(np.uint8)[:, :stored]
    wanted = torch.from_numpy(gguf.quants.dequantize(blocks, Q[name])).double()
    file = read_gguf(write_file(path, {}, {"x": (blocks.reshape(3, -1), Q[name])}))
    matrix = file.quantized("x")
    assert matrix.format == FORMATS[name] == file.tensors["x"].format and matrix.shape == (3, 2 * elements)
    assert matrix.q.dtype == torch.int8 and matrix.scale.shape == (3, elements // 16)
    if matrix.format.kind == "int4":
        assert int(matrix.q.min()) == -8 and int(matrix.q.max()) == 7
    atol = 2**-13 if name == "Q4_K" else 2**-20 if name == "Q4_1" else 0  # their offsets are rounded
    torch.testing.assert_close(matrix.dequantize(torch.float64).reshape(wanted.shape), wanted, rtol=0, atol=atol)


def test_q4_0_keeps_halves_apart_and_the_sign_of_its_scale() -> None:
    """Number i and number i + 16 share a byte; the number of largest magnitude is positive, so the scale is not."""
    numbers = np.arange(32, dtype=np.float32) - 15  # 16 is the largest
    blocks = torch.from_numpy(gguf.quants.quantize(numbers[None], Q.Q4_0))
    q, scale, offset = unpack_blocks(blocks, "Q4_0")
    assert scale.tolist() == [-2.0] and offset is None and q[0, 31] == -8 and q[0, 0] == 7
    assert q[0].tolist() == sorted(q[0].tolist(), reverse=True)
    assert int(blocks[0, 2]) == (q[0, 0] + 8) + 16 * (q[0, 16] + 8)


def pack_q4_k(q: list[int], scales: list[int], minima: list[int], d: float, dmin: float) -> bytes:
    """One block of Q4_K, as ggml's source describes it: 256 numbers, and 6-bit scales and minima of 8 groups."""
    packed = [0] * 12
    for group in range(4):
        packed[group] = scales[group] + (scales[group + 4] // 16) * 64
        packed[group + 4] = minima[group] + (minima[group + 4] // 16) * 64
        packed[group + 8] = scales[group + 4] % 16 + minima[group + 4] % 16 * 16
    octets = [q[64 * pair + i] + 16 * q[64 * pair + 32 + i] for pair in range(4) for i in range(32)]
    return struct.pack("<ee", d, dmin) + bytes(packed) + bytes(octets)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_q4_k_has_two_levels_of_scales(data: st.DataObject) -> None:
    draws = [st.lists(st.integers(0, top), min_size=n, max_size=n) for top, n in ((15, 256), (63, 8), (63, 8))]
    q, scales, minima = (data.draw(draw) for draw in draws)
    block = torch.tensor(list(pack_q4_k(q, scales, minima, 0.5, 0.25)), dtype=torch.uint8)[None]
    found, scale, offset = unpack_blocks(block, "Q4_K")
    assert offset is not None
    wanted = [0.5 * scales[k // 32] * q[k] - 0.25 * minima[k // 32] for k in range(256)]
    assert (found * scale[:, None] + offset[:, None]).flatten().tolist() == wanted
    assert gguf.quants.dequantize(block.numpy(), Q.Q4_K)[0].tolist() == wanted


def test_types_that_are_dequantized_are_named_once(path: Path) -> None:
    theirs = transformers_model("llama", hidden_size=64, intermediate_size=64, vocab_size=64)
    with pytest.warns(UserWarning, match=r"Q5_0 are dequantized; Q4_0, Q4_1, Q4_K, Q8_0 stay") as caught:
        checkpoint = open_checkpoint(write_gguf(theirs, "llama", path, Q.Q5_0))
    assert len(caught) == 1 and checkpoint.formats == {}
    load_model(checkpoint, Parts(), torch.float32)


def test_a_quantized_file_runs_as_its_dequantized_weights(path: Path) -> None:
    theirs = transformers_model("llama", hidden_size=64, intermediate_size=64, vocab_size=64)
    checkpoint = open_checkpoint(write_gguf(theirs, "llama", path, Q.Q8_0))
    assert set(checkpoint.formats.values()) == {Format("int8", 1, 32)} and checkpoint.kv_scales == {}
    for name, parameter in load_model(checkpoint, Parts(), torch.float32).destinations().items():
        torch.testing.assert_close(parameter, theirs.state_dict()[name], rtol=0, atol=0.005)


# --- split files -----------------------------------------------------------------------------------------------------


def split(path: Path, count: int) -> list[Path]:
    """Distribute the tensors of a file; only the first part keeps the metadata, as llama-gguf-split does."""
    whole = read_gguf(path)
    parts = [path.with_name(f"model-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    names = list(whole.tensors)
    for number, part in enumerate(parts):
        metadata = dict(whole.metadata) if number == 0 else {}
        metadata |= {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        metadata.pop("general.architecture", None)
        tensors = {name: whole.tensor(name).numpy() for name in names[number::count]}
        write_file(part, metadata, tensors)
    path.unlink()
    return parts


def test_any_part_of_a_split_file_opens_the_model(path: Path) -> None:
    theirs = transformers_model("llama")
    parts = split(write_gguf(theirs, "llama", path), 3)
    for model in (*parts, path.parent):
        checkpoint = open_checkpoint(model)
        assert checkpoint.tensors.keys() == theirs.state_dict().keys()
        for name, weight in theirs.state_dict().items():
            assert torch.equal(checkpoint.tensors[name], weight)
    load_model(open_checkpoint(parts[1]), Parts(), torch.float32)


def test_parts_that_do_not_belong_together_are_refused(path: Path) -> None:
    theirs = transformers_model("llama")
    parts = split(write_gguf(theirs, "llama", path), 3)
    content = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(WeightFileError, match="part 2 of 3"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"no .*00002-of-00003.gguf: download all 3"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(content)
    write_file(parts[1], {"split.no": 1, "split.count": 3}, {"token_embd.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(WeightFileError, match=r"has its tensor 'token_embd.weight', too"):
        open_checkpoint(parts[0])
    write_file(parts[1], {"split.no": 1, "split.count": 3}, {"blk.0.attn_q.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(WeightFileError, match="tensors, not 30"):
        open_checkpoint(parts[0])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_unpermute_undoes_the_converter(heads: int, pairs: int, columns: int) -> None:
    weight = torch.randn(heads * 2 * pairs, columns)
    assert torch.equal(unpermute(torch.from_numpy(permute(weight.numpy(), heads)), heads), weight)
    assert torch.equal(unpermute(torch.from_numpy(permute(weight[:, 0].numpy(), heads)), heads), weight[:, 0])


def test_scaled_rope_that_is_not_llama_3_is_refused(path: Path) -> None:
    yarn: dict[str, Any] = {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}
    with pytest.raises(ModelLoadError, match="yarn"):
        open_checkpoint(write_gguf(transformers_model("llama"), "llama", path, **yarn))


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"rope_scaling_factor": 4.0}, 4.0),  # without a type, as in llama.cpp
        ({"rope_scaling_factor": 4.0, "rope_scaling_type": gguf.RopeScalingType.LINEAR}, 4.0),
        ({"rope_scaling_factor": 4.0, "rope_scaling_type": gguf.RopeScalingType.NONE}, None),
        ({"rope_scaling_factor": 0.0}, None),
        ({"rope_scaling_factor": 1.0}, None),
        ({"rope_scaling_orig_ctx_len": 64}, None),
    ],
)
def test_a_factor_scales_rope_linearly(metadata: dict[str, Any], factor: float | None, path: Path) -> None:
    rope = open_checkpoint(write_gguf(transformers_model("llama"), "llama", path, **metadata)).config.rope
    assert rope is not None and rope.scaling == (None if factor is None else Linear(factor))


def test_an_old_key_of_the_factor_is_read(path: Path) -> None:
    write_gguf(transformers_model("llama"), "llama", path, uint32=("llama.rope.scale_linear", 2))
    rope = open_checkpoint(path).config.rope
    assert rope is not None and rope.scaling == Linear(2.0)


@pytest.mark.parametrize(
    ("key", "value", "is_harmless"),
    [
        ("llama.expert_count", 8, False),
        ("llama.expert_count", 0, True),
        ("llama.logit_scale", 2, False),
        ("llama.attention.sliding_window", 128, False),
        ("llama.rope.scaling.yarn_log_multiplier", 3, False),
        ("llama.a_key_of_the_future", 1, False),
        ("llama.vocab_size", 61, True),
        ("general.a_key_of_the_future", 1, True),
    ],
)
def test_metadata_that_may_change_the_computation_is_refused(
    key: str, value: int, is_harmless: bool, path: Path
) -> None:
    write_gguf(transformers_model("llama"), "llama", path, uint32=(key, value))
    if is_harmless:
        open_checkpoint(path)
    else:
        with pytest.raises(ModelLoadError, match=r"may change the computation.*Inference") as caught:
            open_checkpoint(path)
        assert key in str(caught.value) and not isinstance(caught.value, WeightFileError)


def test_what_is_not_known_is_not_called_damaged(path: Path) -> None:
    """Experts, a part of a split file under a wrong name, and a file that lacks tensors: nothing says damaged, nothing
    names a folder's files."""
    theirs = transformers_model("llama")
    write_gguf(theirs, "llama", path, extra="blk.0.ffn_gate_exps.weight")
    split = write_gguf(theirs, "llama", path.with_name("split.gguf"), uint16=("split.count", 3))
    partial = write_gguf(theirs, "llama", path.with_name("partial.gguf"), block_count=5)
    for file, message in (
        (path, "ffn_gate_exps.*Inference"),
        (split, r"3 parts.*name-00001-of-00003\.gguf"),
        (partial, "no tensor"),
    ):
        with pytest.raises(ModelLoadError, match=message) as caught:
            load_model(open_checkpoint(file), Parts(), torch.float32)
        assert "damaged" not in str(caught.value) and "config.json" not in str(caught.value)


def test_every_end_of_a_text_is_known(path: Path) -> None:
    tokens = ["<s>", "</s>", "<|eot_id|>", "<|im_end|>", "<|eom_id|>", "<end_of_turn>", *(f"t{i}" for i in range(55))]
    theirs, types = transformers_model("llama"), [3, 3, 3, 1, 1, 3] + [1] * 55
    ids = {"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 4}
    write_gguf(theirs, "llama", path, token_list=tokens, token_types=types, **ids)
    # "<|im_end|>" is an ordinary token here, and no key names "<end_of_turn>".
    assert open_checkpoint(path).eos_token_ids == (1, 2, 4, 5)


def llama3_factors(head_dim: int, theta: float, factor: float, low: float = 1.0) -> np.ndarray:
    """What each frequency is divided by, as llama.cpp's converter computes it."""
    divisors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (4.0 - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_divisors(factor: float, tmp_path: Path) -> None:
    """Long contexts go wrong without it, and no metadata states it: only the tensor rope_freqs has it."""
    theirs = transformers_model(
        "llama", hidden_size=256, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    factors = llama3_factors(64, 500000.0, factor)
    checkpoint = open_checkpoint(write_gguf(theirs, "llama", tmp_path / "model.gguf", rope_freqs=factors))
    rope = checkpoint.config.rope
    assert rope is not None and rope.scaling == Llama3(factor, 1.0, 4.0, 8192)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(inverse_frequencies(rope), plain / torch.from_numpy(factors), rtol=1e-5, atol=0)
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_divisors_of_another_rule_are_refused(tmp_path: Path) -> None:
    theirs = transformers_model("llama", hidden_size=256)
    for factors in (np.linspace(1, 8, 32), np.ones(3)):
        path = write_gguf(theirs, "llama", tmp_path / f"{len(factors)}.gguf", rope_freqs=factors)
        with pytest.raises(ModelLoadError, match="rope_freqs"):
            open_checkpoint(path)


def test_huge_divisors_are_not_read(path: Path) -> None:
    """Their size is compared with the head's before a byte of them is read."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor_info("token_embd.weight", (32, 32), np.dtype("float32"), 32 * 32 * 4)  # type: ignore[arg-type]
    writer.add_tensor_info("rope_freqs.weight", (10**8,), np.dtype("float32"), 4 * 10**8)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 4 * 10**8 + 2**14)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        open_checkpoint(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_a_tensor_of_the_wrong_shape_is_refused_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = transformers_model("llama")
    theirs.config.intermediate_size = 40
    checkpoint = open_checkpoint(write_gguf(theirs, "llama", path))
    read: set[str] = set()
    monkeypatch.setattr(our_gguf.GGUFFile, "tensor", lambda self, name: read.add(name) or torch.zeros(1))
    with pytest.raises(ModelLoadError, match="shape"):
        load_model(checkpoint, Parts(), torch.float32)
    assert read <= {"token_embd.weight"}  # the type checker of the tests looks at a mapping's first value


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "mamba"])
def test_a_family_that_is_not_supported_names_the_folder_instead(family: str, path: Path) -> None:
    write_tokenizer(path, "gpt2", ["a"], [1], architecture=family)
    with pytest.raises(ModelLoadError, match=rf"{family}.*llama or qwen2 or qwen3.*folder with safetensors"):
        open_checkpoint(path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_damaged_metadata_loads_or_is_refused(family: str, tmp_path: Path, data: st.DataObject) -> None:
    """Any metadata value replaced by any other of its size, any name changed by a letter: a model or a typed error."""
    path = tmp_path / "model.gguf"
    if not path.exists():
        path = write_gguf(transformers_model(family, tie_word_embeddings=True), family, path, token_list=["a", "b"])
    content = bytearray(path.read_bytes())
    end = content.find(b"blk.1.")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, end))
        content[place] = data.draw(st.sampled_from([0, 1, 2, 4, 8, 32, 97, 127, 128, 255]))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with contextlib.suppress(ModelLoadError):
        load_model(open_checkpoint(damaged), Parts(), torch.float32)


# --- tokenizer -------------------------------------------------------------------------------------------------------


TEXTS = [
    "Hello world, it's 12345 and we'll see",
    "  two  spaces   7  and\ttabs\n\n\nlines\r\n ",
    "naïve café 日本語 🙂🙃 \u200b\u00a0",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x",
    "½ Ⅻ ²³ ٣٤",
    "CamelCase snake_case DON'T",
    "",
    " ",
]


def write_tokenizer(path: Path, model: str, tokens: list[str], types: list[int], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in metadata.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def our_tokenizer(path: Path) -> Any:
    return build_tokenizer(read_gguf(path))


@pytest.fixture(scope="module")
def vocabulary(embedded: Path) -> tuple[list[str], list[str]]:
    """The first 3,000 tokens of the embedded model, and the merges that lead to them."""
    model = json.loads((embedded / "tokenizer.json").read_text())["model"]
    tokens = list(model["vocab"])[:3000]
    merges = [(left, right) for left, right in model["merges"] if left + right in tokens]
    return tokens, [f"{left} {right}" for left, right in merges]


knows_bos = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers before 5.23 does not see that a GGUF file asks for a BOS token",
)


@knows_bos
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers_are_those_of_transformers(
    pre: str, vocabulary: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    tokens, merges = vocabulary
    types = [3] * 17 + [1] * (len(tokens) - 17)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2}
    path = write_tokenizer(
        tmp_path / "t.gguf", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, add_bos_token=True, **ids
    )
    ours, theirs = our_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids, skip_special_tokens=False).startswith("<|im_start|>")
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"add_eos_token": True}, "without an end token"),
        ({"model": "bert"}, "bert.*folder with safetensors"),
        ({"tokenizer_pre": "unheard-of"}, "unheard-of"),
        ({"tokens": ["a", "a", "b"]}, "twice"),
        ({"eos_token_id": 3}, "eos token 3"),
        ({"model": "llama"}, "kind 'llama'.*folder with safetensors"),
        ({"token_merges": None}, "merges"),
        ({"token_merges": ["a z"]}, "tokenizer"),
        ({"token_merges": ["ab"]}, "tokenizer"),
        ({"chat_template": "{% for"}, None),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_refused(
    change: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": "gpt2", "tokens": ["a", "b", "ab"], "types": [1, 1, 1], "tokenizer_pre": "gpt-2"}
    given |= {"token_merges": ["a b"], "eos_token_id": 2} | change
    path = write_tokenizer(tmp_path / "tokenizer.gguf", **given)
    checkpoint = open_checkpoint(write_gguf(transformers_model("llama"), "llama", tmp_path / "model.gguf"))
    checkpoint = replace(checkpoint, build_tokenizer=lambda: our_tokenizer(path))
    if problem is None:  # a broken template is found when it is used
        assert load_tokenizer(checkpoint).chat_template == "{% for"
    else:
        with pytest.raises(ModelLoadError, match=problem):
            load_tokenizer(checkpoint)


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(transformers_model("llama"), "llama", tmp_path / "model.gguf"))
    with pytest.raises(WeightFileError, match=r"tokenizer\.ggml\.model"):
        load_tokenizer(checkpoint)


def test_a_llama_3_file_without_the_key_begins_with_bos_as_in_llama_cpp(tmp_path: Path) -> None:
    for pre, tokens in {"llama-bpe": ["<bos>", "ab"], "gpt-2": ["ab"]}.items():
        path = write_tokenizer(
            tmp_path / f"{pre}.gguf", "gpt2", ["<bos>", "a", "b", "ab"], [3, 1, 1, 1], tokenizer_pre=pre,
            token_merges=["a b"], bos_token_id=0,
        )  # fmt: skip
        assert our_tokenizer(path).convert_ids_to_tokens(our_tokenizer(path)("ab").input_ids) == tokens


# --- kept quantized --------------------------------------------------------------------------------------------------


def test_a_kernels_format_is_kept_and_another_is_dequantized_with_a_warning(path: Path) -> None:
    """On a CPU in bfloat16: INT4 in groups of 32 has a kernel, INT8 in groups of 32 has none."""
    theirs = transformers_model("llama", hidden_size=64, intermediate_size=64, vocab_size=64)
    kept = open_checkpoint(write_gguf(theirs, "llama", path, Q.Q4_1))
    model = load_model(kept, Parts(), torch.bfloat16)
    matrices = {name: own for name, own in model.named_modules() if isinstance(own, QuantizedLinear)}
    assert len(matrices) == 1 + 4 * 3 and model.config.formats.keys() == kept.formats.keys() - {"model.embed_tokens"}
    for name, to in model.destinations().items():
        if isinstance(to, QuantizedRows):
            want = kept.tensors[name].dequantize()
            first = to.rows.start
            got = to.linear.dense(torch.float32)[first : first + len(want)]
            torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)  # scales are rounded to bfloat16
    with pytest.warns(UserWarning, match="INT8 are dequantized"):
        model = load_model(open_checkpoint(write_gguf(theirs, "llama", path, Q.Q8_0)), Parts(), torch.bfloat16)
    assert not any(isinstance(own, QuantizedLinear) for own in model.modules())


def test_a_quantized_file_is_not_quantized_again(path: Path) -> None:
    theirs = transformers_model("llama", hidden_size=64, intermediate_size=64, vocab_size=64)
    checkpoint = open_checkpoint(write_gguf(theirs, "llama", path, Q.Q8_0))
    with pytest.raises(ModelLoadError, match="quantization='int4'"):
        load_model(checkpoint, Parts(), torch.bfloat16, quantization="int4")
