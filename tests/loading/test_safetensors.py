"""safetensors files: what is read equals what was saved, and a damaged or hostile file is a typed error."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from mini_engine.errors import WeightFileError
from mini_engine.loading import untrusted
from mini_engine.loading.checkpoint import open_safetensors, open_sharded

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.randn(shape) * 20).abs().to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
        max_size=5,
    )
)
def test_any_set_of_tensors_round_trips(path: Path, layout: dict[str, Any]) -> None:
    tensors = {name: random_tensor(dtype, shape) for name, (dtype, shape) in layout.items()}
    path.write_bytes(save(tensors))
    opened = open_safetensors(path)
    assert opened.keys() == tensors.keys()
    for name, expected in tensors.items():
        header = opened.headers[name]
        assert header.is_meta and header.shape == expected.shape and header.dtype == expected.dtype
        assert torch.equal(opened[name].float(), expected.float())


def test_a_tensor_may_have_an_odd_address(path: Path) -> None:
    header = json.dumps({"x": entry()}).encode()
    header += b" " * (1 - len(header) % 2)  # odd
    path.write_bytes(file_of(header, torch.tensor([1.5, -2.0]).numpy().tobytes()))
    assert open_safetensors(path)["x"].tolist() == [1.5, -2.0]


def test_writing_to_a_tensor_does_not_change_the_file(path: Path) -> None:
    save_file({"x": torch.ones(4)}, path)
    open_safetensors(path)["x"].zero_()
    assert load_file(path)["x"].tolist() == [1.0] * 4


def test_opening_reads_no_data(path: Path) -> None:
    """A sparse file of 8 GiB opens, and one of its tensors is read, in less than 64 MiB of resident memory."""
    size = 8 * 2**30
    header = {"big": entry("U8", [size], [0, size]), "small": entry("U8", [3], [size, size + 3])}
    path.write_bytes(file_of(header))
    os.truncate(path, path.stat().st_size + size + 3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened = open_safetensors(path)
    assert opened["small"].tolist() == [0, 0, 0] and opened.headers["big"].shape == (size,)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


def test_a_file_too_large_to_map_is_a_typed_error(path: Path, memory_limit: Any) -> None:
    size = 2**32
    path.write_bytes(file_of({"big": entry("U8", [size], [0, size])}))
    os.truncate(path, path.stat().st_size + size)
    with memory_limit(2**30), pytest.raises(WeightFileError, match="safetensors refuses it"):
        open_safetensors(path)


LIES: dict[str, bytes] = {
    "empty file": b"",
    "half a length": b"\x01\x00",
    "header longer than the file": (2**63).to_bytes(8, "little") + b"{}",
    "not JSON": file_of(b"{nonsense"),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "a list": file_of([]),
    "deep nesting": file_of(b'{"x":' + b"[" * 100_000),
    "a number of many digits": file_of(b'{"x":' + b"1" * 100_000 + b"}"),
    "NaN": file_of(b'{"x": NaN}'),
    "a key twice": file_of(b'{"x":%s,"x":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(16)),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "no description": file_of({"x": 3}),
    "unknown dtype": file_of({"x": entry("F7")}, bytes(8)),
    "dtype is a list": file_of({"x": entry([])}, bytes(8)),  # type: ignore[arg-type]
    "negative dimension": file_of({"x": entry(shape=[-2])}, bytes(8)),
    "two negative dimensions": file_of({"x": entry(shape=[-1, -2])}, bytes(8)),
    "dimension is a bool": file_of({"x": entry(shape=[True, 2])}, bytes(8)),
    "dimension is a fraction": file_of({"x": entry(shape=[2.0])}, bytes(8)),
    "huge dimensions": file_of({"x": entry(shape=[2**40, 2**40])}, bytes(8)),
    "huge empty tensor": file_of({"x": entry(shape=[0, 2**63], offsets=[0, 0])}),
    "shape and bytes differ": file_of({"x": entry(shape=[3])}, bytes(8)),
    "offsets reversed": file_of({"x": entry(offsets=[8, 0])}, bytes(8)),
    "negative offset": file_of({"x": entry(offsets=[-8, 0])}, bytes(8)),
    "three offsets": file_of({"x": entry(offsets=[0, 4, 8])}, bytes(8)),
    "past the end": file_of({"x": entry()}, bytes(7)),
    "bytes left over": file_of({"x": entry()}, bytes(9)),
    "a hole": file_of({"x": entry(), "y": entry(offsets=[12, 20])}, bytes(20)),
    "an overlap": file_of({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)),
    "shared bytes": file_of({"x": entry(), "y": entry()}, bytes(8)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_little_memory(lie: str, path: Path, memory_limit: Any) -> None:
    path.write_bytes(LIES[lie])
    with memory_limit(2**26), pytest.raises(WeightFileError, match="damaged") as caught:
        open_safetensors(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize("shape", [[1] * 100 + [2], [2]])
def test_harmless_oddities_are_read(shape: list[int], path: Path) -> None:
    path.write_bytes(file_of({"x": entry(shape=shape) | {"code": "1"}}, bytes(8)))
    assert open_safetensors(path)["x"].flatten().tolist() == [0.0, 0.0]


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(path: Path) -> None:
    save_file({"x": torch.ones(4)}, path)
    opened = open_safetensors(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(WeightFileError, match="changed size"):
        opened["x"]


def test_a_header_that_is_too_long_is_not_parsed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 100)
    path.write_bytes(file_of({"x" * 200: entry()}, bytes(8)))
    with pytest.raises(WeightFileError, match="than 100 bytes"):
        open_safetensors(path)


VALID = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int16), "c": torch.empty(0, 2)})
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    """The valid file with bytes changed, removed or added, or one value of its header replaced."""
    content = bytearray(VALID)
    kind = draw(st.sampled_from(["flip", "cut", "grow", "field"]))
    if kind == "flip":
        for _ in range(draw(st.integers(1, 4))):
            content[draw(st.integers(0, HEADER_END - 1))] = draw(st.integers(0, 255))
    elif kind == "cut":
        del content[draw(st.integers(0, len(content) - 1)) :]
    elif kind == "grow":
        content += draw(st.binary(min_size=1, max_size=20))
    else:
        header = json.loads(content[8:HEADER_END])
        number = st.one_of(st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 2**31, 2**63 - 1, 2**64]))
        value = draw(st.one_of(number, st.lists(number, max_size=4), st.text(max_size=4), st.none(), st.booleans()))
        header[draw(st.sampled_from(list("abc")))][draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = value
        return file_of(header, bytes(content[HEADER_END:]))
    return bytes(content)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(damaged_files())
def test_a_damaged_file_loads_or_is_refused(path: Path, memory_limit: Any, content: bytes) -> None:
    path.write_bytes(content)
    with memory_limit(2**26), contextlib.suppress(WeightFileError):
        opened = open_safetensors(path)
        assert all(opened[name].shape == header.shape for name, header in opened.headers.items())


def write_shards(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = {f"t{i}": torch.randn(3, i + 1) for i in range(5)}
    weight_map = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index, tensors


def test_shards_read_as_one_model(tmp_path: Path) -> None:
    index, tensors = write_shards(tmp_path)
    opened = open_sharded(index)
    assert opened.keys() == tensors.keys() and all(same(opened[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weight_map": {"t0": "../model-00001-of-00002.safetensors"}}, "each tensor a safetensors file in its folder"),
        ({"weight_map": {"t0": "/etc/passwd"}}, "each tensor a safetensors file in its folder"),
        ({"weight_map": {"t0": "model-00003-of-00002.safetensors"}}, "each tensor a safetensors file in its folder"),
        ({"weight_map": {"t0": "model-00002-of-00002.safetensors"}}, "each tensor a safetensors file in its folder"),
        ({"weight_map": {"t0": 3}}, "weight_map"),
        ({"weight_map": ["t0"]}, "weight_map"),
        ({}, "weight_map"),
        (
            {"weight_map": {f"t{i}": f"{i}.safetensors" for i in range(2000)}},
            "each tensor a safetensors file in its folder",
        ),
        ({"weight_map": {"t0": "x" * 5000}}, "each tensor a safetensors file in its folder"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    index, _ = write_shards(tmp_path)
    index.write_text(json.dumps(change))
    with pytest.raises(WeightFileError, match=problem) as caught:
        open_sharded(index)
    assert len(str(caught.value)) < 500 + len(str(index))
