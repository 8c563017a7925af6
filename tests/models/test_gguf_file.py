"""Our GGUF reader against the gguf library, and against files that lie."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mini_engine.models.gguf_file import TENSOR_TYPES, dequantize, dequantize_q4_1, read_gguf

from mini_engine.errors import WeightFileError
from mini_engine.models import gguf_file
from tests.models.limits import memory_limit

QUANTISED = [name for name in TENSOR_TYPES.values() if name[1] > 1]


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, Any], alignment: int | None = None) -> Path:
    """A file by the gguf library. A tensor is an array, or (rows of raw bytes, type)."""
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("alignment", [None, 64])
def test_reads_what_the_library_wrote(path: Path, alignment: int | None) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {
        "f32": rng.normal(size=(3, 5)).astype(np.float32),
        "f16": rng.normal(size=(7,)).astype(np.float16),
        "deep": rng.normal(size=(2, 3, 4, 5)).astype(np.float32),
    }
    file = read_gguf(write(path, METADATA, tensors, alignment))
    read = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    assert read == METADATA | {"general.architecture": "llama"} | ({"general.alignment": 64} if alignment else {})
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert file.tensors[name].shape == expected.shape and file.dtype(name) == file.tensor(name).dtype
        assert np.array_equal(file.tensor(name).numpy(), expected)


def test_block_sizes_are_those_of_the_library() -> None:
    for number, (name, elements, size) in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (elements, size)


@pytest.mark.parametrize(("name", "elements", "size"), QUANTISED, ids=[kind[0] for kind in QUANTISED])
def test_every_quantised_type_dequantises_as_in_the_library(name: str, elements: int, size: int, path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = np.random.default_rng(1).integers(0, 256, (3, 2 * size), dtype=np.uint8)
    file = read_gguf(write(path, {}, {"x": (blocks, kind)}))
    assert file.tensors["x"].shape == (3, 2 * elements)
    with np.errstate(invalid="ignore"):  # random scales may be infinite
        assert np.array_equal(file.tensor("x").numpy(), gguf.quants.dequantize(blocks, kind), equal_nan=True)


def test_bfloat16_is_read_as_stored(path: Path) -> None:
    values = torch.randn(4, 6).bfloat16()
    raw = values.view(torch.uint8).numpy()
    file = read_gguf(write(path, {}, {"x": (raw, gguf.GGMLQuantizationType.BF16)}))
    assert torch.equal(file.tensor("x"), values)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 4).map(lambda n: 32 * n), elements=st.floats(-100, 100, width=16)))
def test_q4_1_comes_back_within_half_a_step(values: np.ndarray) -> None:
    """Quantised by the library, dequantised by us: off by at most half a step and the rounding of two float16."""
    blocks = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)).view(-1, 20)
    rows = torch.from_numpy(values).view(-1, 32)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    bound = (high - low) / 30 + 2**-10 * (high.abs() + low.abs()) + 1e-5
    assert ((dequantize_q4_1(blocks) - rows).abs() <= bound).all()


def test_q4_1_by_hand() -> None:
    block = np.array([0.5, -1.0], np.float16).tobytes() + bytes([0x21] + [0] * 14 + [0xF0])
    row = dequantize_q4_1(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, 20))[0]
    assert row[0] == 1 * 0.5 - 1 and row[16] == 2 * 0.5 - 1 and row[31] == 15 * 0.5 - 1 and row[1] == -1


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
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "another format": (b"PK\x03\x04" + bytes(100), "no GGUF"),
    "three letters": (b"GGU", "no GGUF"),
    "ends after the magic": (b"GGUF", "announced"),
    "version 1": (head(0, 0, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "huge number of pairs": (head(0, HUGE), "announces"),
    "huge number of tensors": (head(HUGE, 0), "announces"),
    "pairs that are not there": (head(0, 5), "announced"),
    "tensors that are not there": (head(5, 0), "announced"),
    "huge key": (head(0, 1) + struct.pack("<Q", HUGE), "announced"),
    "key is not UTF-8": (head(0, 1) + pair(b"\xff", 4, bytes(4)), "UTF-8"),
    "key twice": (head(0, 2) + pair(b"a", 4, bytes(4)) * 2, "twice"),
    "unknown type": (head(0, 1) + pair(b"a", 99, bytes(8)), "type 99"),
    "huge string": (head(0, 1) + pair(b"a", 8, struct.pack("<Q", HUGE)), "announced"),
    "huge array of bytes": (head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 0, HUGE)), "announced"),
    "huge array of numbers": (head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 12, HUGE)), "announced"),
    "huge array of strings": (head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 8, HUGE)), "array of"),
    "array of arrays": (head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(100)), "array of"),
    "alignment 0": (head(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 0)), "alignment"),
    "alignment 24": (head(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 24)), "alignment"),
    "alignment 2^31": (head(0, 1) + pair(b"general.alignment", 4, struct.pack("<I", 2**31)), "alignment"),
    "alignment is text": (head(0, 1) + pair(b"general.alignment", 8, string(b"32")), "alignment"),
    "no dimensions": (padded(head(1, 0) + info(dims=()), bytes(64)), "0 dimensions"),
    "huge number of dimensions": (head(1, 0) + string(b"x") + struct.pack("<I", 2**32 - 1), "dimensions"),
    "a dimension of 0": (padded(head(1, 0) + info(dims=(0,)), bytes(64)), "shape"),
    "huge dimensions": (padded(head(1, 0) + info(dims=(2**63, 2**63)), bytes(64)), "past the end"),
    "product overflows to 0": (padded(head(1, 0) + info(dims=(2**32, 2**32)), bytes(64)), "past the end"),
    "half a block": (padded(head(1, 0) + info(dims=(16,), kind=3), bytes(64)), "shape"),
    "unknown tensor type": (padded(head(1, 0) + info(kind=77), bytes(64)), "type 77"),
    "huge offset": (padded(head(1, 0) + info(offset=2**64 - 32), bytes(64)), "past the end"),
    "misaligned": (padded(head(1, 0) + info(offset=4), bytes(64)), "misaligned"),
    "truncated data": (padded(head(1, 0) + info(), bytes(31)), "past the end"),
    "tensor twice": (padded(head(2, 0) + info() + info(offset=32), bytes(64)), "twice"),
    "overlap": (padded(head(2, 0) + info(dims=(16,)) + info(b"y", offset=32), bytes(96)), "over another"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_by_name_and_in_little_memory(lie: str, path: Path) -> None:
    content, problem = LIES[lie]
    path.write_bytes(content)
    with memory_limit(2**26), pytest.raises(WeightFileError, match=problem) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500 + len(str(path))


def test_a_header_without_end_is_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 1000)
    path.write_bytes(head(0, 1) + pair(b"a", 9, struct.pack("<IQ", 0, 2000) + bytes(2000)))
    with pytest.raises(WeightFileError, match="more than there are or may be"):
        read_gguf(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match="cannot be read"):
        read_gguf(tmp_path / "none.gguf")


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    q4 = np.random.default_rng(2).integers(0, 256, (2, 20), dtype=np.uint8)
    tensors = {"a": np.ones((2, 4), np.float32), "b": (q4, gguf.GGMLQuantizationType.Q4_1)}
    return write(tmp_path_factory.mktemp("gguf") / "valid.gguf", METADATA, tensors).read_bytes()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_loads_or_is_refused(path: Path, valid: bytes, data: st.DataObject) -> None:
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
    with memory_limit(2**26), contextlib.suppress(WeightFileError):
        file = read_gguf(path)
        for name, tensor in file.tensors.items():
            assert tuple(file.tensor(name).shape) == tensor.shape
            assert tensor.end <= len(content)


def test_dequantize_of_floats_is_a_view() -> None:
    stored = torch.arange(4.0)
    assert dequantize("F32", stored.view(torch.uint8).view(4, 4)).data_ptr() == stored.data_ptr()
