"""The predictions by hand, the bits of a format with its scales, and the rows of a GPU on small shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from mini_engine.quantization import Format
from mini_engine.roofline import Machine
from tests.experiments.fake_engine import FakeEngine
from tests.models.families import our_model, transformers_model

EXPERIMENT = "14_fewer_bytes"
METHODS = ("fp8", "int8", "int4")
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    layer = 960 * 576 + 576 * 576 + 3072 * 576  # in groups of 64
    down = 576 * 1536  # in groups of 128
    head = 49_152 * 576
    printed = run.predictions()
    assert f"{2 * (30 * (layer + down) + head) / 1e6:.0f} MB" in printed
    assert f"{(30 * (layer * 4.5 + down * 4.25) / 8 + head) / 1e6:.1f} MB" in printed


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (None, 16.0), (Format("int4", 1, 16), 5.0), (Format("int4", 1, 16, True), 6.0),
        (Format("int8", None, None), pytest.approx(8.0, abs=0.03)),
    ],
)  # fmt: skip
def test_the_bits_of_a_number(form: Format | None, bits: float) -> None:
    assert run.bits(our_model(transformers_model("llama")), form) == bits


def test_rounding_changes_the_layers_alone() -> None:
    theirs = transformers_model("llama")
    model, before = our_model(theirs), our_model(theirs)
    run.round_layers(model, Format("int4", 1, 16))
    assert torch.equal(model.embed_tokens, before.embed_tokens) and torch.equal(model.norm, before.norm)
    ours, theirs = model.layers[0].attention.qkv.weight, before.layers[0].attention.qkv.weight
    assert not torch.equal(ours, theirs) and (ours - theirs).abs().max() < theirs.abs().max() / 7


MACHINE = Machine("a machine", "float32", bandwidth=1e12, flops=1e15)


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("book.serving.PeerProcess", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(run, "check_installed", lambda name: None)
    monkeypatch.setattr(run, "measure_machine", lambda *_: MACHINE)


def recorded(folder: Path, *options: str) -> results.Result:
    run.main(["--device", "cpu", "--out", str(folder), *options])
    [result] = results.load(EXPERIMENT, folder)
    return result


def test_products_of_each_matrix_and_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr(run, "TOKENS", (1, 3))
    result = recorded(tmp_path, "--only", "products")
    assert [tuple(row.case.values()) for row in result.rows] == [
        (f"{rows} x {columns}", name, tokens)
        for rows, columns in run.SHAPES["cpu"]
        for name in run.METHODS
        for tokens in (1, 3)
    ]
    rows, columns = run.SHAPES["cpu"][0]
    bound = result.find("product", matrix=f"{rows} x {columns}", format="FP8", tokens=3).bound
    assert bound == pytest.approx((rows * columns + 4 * rows + 2 * 3 * (rows + columns)) / 1e12)


def test_products_of_one_format() -> None:
    rows, wrong = run.product_rows(torch.device("cpu"), MACHINE, 32, 64, ["FP8 keys", "INT8"])
    assert not wrong and {row.case["format"] for row in rows} == {"INT8"} and len(rows) == len(run.TOKENS)


def test_a_product_that_is_wrong_has_no_row_and_costs_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "measure_machine", lambda *_: MACHINE)
    monkeypatch.setattr("mini_engine.models.weights.linear", lambda x, weight, bias: x.new_zeros(len(x), len(weight)))
    with pytest.raises(SystemExit, match=r"FP8, 64 x 128, 256 tokens: the error is 1\.000"):
        recorded(tmp_path, "--only", "products", "--formats", "FP8", "INT8")
    [result] = results.load(EXPERIMENT, tmp_path)
    assert {row.case["format"] for row in result.rows} == {"INT8"}


def test_copies_have_the_same_numbers_and_fill_more_than_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BYTES_OF_COPIES", {"cpu": 20_000})
    copies = run.copies_of(torch.randn(32, 64), "int8")
    assert sum(copy.num_bytes for copy in copies[:-1]) < 20_000 <= sum(copy.num_bytes for copy in copies)
    assert len({copy.numbers.data_ptr() for copy in copies}) == len(copies)
    assert all(torch.equal(copy.numbers, copies[0].numbers) for copy in copies)


def test_engines_serve_in_every_format_that_they_have(fake_engines: None, tmp_path: Path) -> None:
    result = recorded(tmp_path, "--only", "speed", "--models", "tiny")
    served = [tuple(row.case.values())[1:] for row in result.rows if row.figure == "throughput"]
    wide, narrow = ("float32", "float32"), ("float32", "FP8")
    assert served == [
        (*wide, "mini_engine", "latency"), (*wide, "mini_engine", "throughput"),
        (*narrow, "mini_engine", "throughput"),
        *((name, "float32", "mini_engine", "latency") for name in ("FP8", "INT8", "INT4")),
        (*wide, "vllm", "latency"), (*wide, "vllm", "throughput"), (*narrow, "vllm", "throughput"),
        ("FP8", "float32", "vllm", "latency"),
    ]  # fmt: skip
    asked = [(own.name, own.options.quantization, own.options.kv_cache_dtype) for own in FakeEngine.made]
    assert asked[:5] == [
        ("mini_engine", None, None), ("mini_engine", None, "fp8"), *(("mini_engine", own, None) for own in METHODS),
    ]  # fmt: skip
    assert {own.options.max_num_seqs for own in FakeEngine.made[5:]} == {run.AT_ONCE}
    bounds = [row.bound for row in result.rows if row.case.get("workload") == "latency"][:4]
    assert bounds[0] < bounds[1] < bounds[2] < bounds[3]  # fewer bytes, and FP8 leaves the LM head as it is


def test_a_part_is_measured_later(fake_engines: None, tmp_path: Path) -> None:
    speed = "--only", "speed", "--models", "tiny"
    recorded(tmp_path, *speed, "--engines", "mini_engine", "--formats", "INT4")
    result = recorded(tmp_path, *speed, "--engines", "vllm", "--formats", "FP8 keys", "--rounds", "1")
    assert [own.options.quantization for own in FakeEngine.made] == ["int4", None]
    assert [row.case["engine"] for row in result.rows] == ["mini_engine"] * 2 + ["vllm"] * 2


def test_the_predictions_of_a_gpu_by_hand() -> None:
    layers = 28 * (4096 * 1024 + 1024 * 2048 + 6144 * 1024 + 1024 * 3072)
    head, of_rows = 151_936 * 1024, 4 * 151_936
    printed = run.predictions()
    assert f"Qwen3-0.6B, INT4: weights of a token | {(layers * 4.25 / 8 + head + of_rows) / 1e6:.0f} MB" in printed
    assert "INT4: tokens whose arithmetic takes as long as reading a matrix | 43 |" in printed
