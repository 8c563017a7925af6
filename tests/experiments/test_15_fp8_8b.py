"""Each engine serves the workload with the formats of its row, and the YAML is one that the engine takes."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest

from book import results
from book.grading.chapter import load_module
from mini_engine.cli_options import Engine, EngineOptions
from mini_engine.config import EngineConfig
from mini_engine.errors import ConfigError, PeerError
from mini_engine.roofline import Machine
from mini_engine.terminal import make_console
from tests.experiments.fake_engine import FakeEngine

EXPERIMENT = "15_fp8_8b"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")

# What the file says, under the engine's own names.
OPTIONS = {
    "model": "nvidia/Llama-3.1-8B-Instruct-FP8", "attn_backend": "flashinfer_trtllm", "enforce_eager": False,
    "cuda_graph_batch_sizes": [1, 2, 4, 8, 16, 32], "max_batch_size": 32, "max_model_len": 2048,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("book.serving.PeerProcess", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(FakeEngine, "fails", set())
    monkeypatch.setattr(run, "check_installed", lambda name: None)
    monkeypatch.setattr(run, "measure_machine", lambda *_: Machine("a machine", "float32", bandwidth=1e12, flops=1e15))


def recorded(folder: Path, *options: str) -> results.Result:
    run.main(["--device", "cpu", "--out", str(folder), *options])
    [result] = results.load(EXPERIMENT, folder)
    return result


def test_a_row_for_each_engine_format_and_workload(tmp_path: Path) -> None:
    result = recorded(tmp_path)
    few, many = run.FEW, run.MANY
    assert [(row.case["keys"], row.case["engine"], row.case.get("workload")) for row in result.rows] == [
        *[("float32", engine, workload) for engine in ("mini_engine", "vllm") for workload in (None, few)],
        *[("float32", "mini_engine, YAML", workload) for workload in (None, few)],
        *[("FP8", engine, workload) for engine in ("mini_engine", "vllm") for workload in (None, few, many)],
        *[("FP8", "mini_engine, YAML", workload) for workload in (None, few)],
    ]
    for row in result.rows:
        assert row.case["weights"] == "FP8"
        if row.figure == "throughput":
            assert row.spread and row.value == row.spread[1] and row.bound
    first = result.find("throughput", keys="FP8", engine="vllm", workload=few)
    assert first.value == 4 * 16 / (1 / 2)  # tokens over the seconds of the faster round
    assert first.bound == result.find("throughput", keys="FP8", engine="mini_engine", workload=few).bound
    wide = result.find("throughput", keys="float32", engine="vllm", workload=few)
    assert wide.bound and first.bound and wide.bound < first.bound


def test_engines_get_formats_and_nothing_else_but_our_limit_or_the_file(tmp_path: Path) -> None:
    recorded(tmp_path, "--keys", "fp8")
    ours, theirs, with_file = (engine.options for engine in FakeEngine.made)
    assert [engine.name for engine in FakeEngine.made] == ["mini_engine", "vllm", "mini_engine"]
    assert {own.quantization for own in (ours, theirs, with_file)} == {"fp8"}
    assert {own.kv_cache_dtype for own in (ours, theirs, with_file)} == {"fp8"}
    assert (ours.max_num_seqs, theirs.max_num_seqs, with_file.max_num_seqs) == (None, run.AT_ONCE, None)
    assert (ours.config, theirs.config, with_file.config) == (None, None, str(run.YAML))
    first, second = FakeEngine.made[:2]
    assert first.served == second.served
    assert len({tuple(requests[0].prompt) for requests in first.served}) == 2 * run.ROUNDS  # each round has others


def test_what_is_measured_later_is_added(tmp_path: Path) -> None:
    recorded(tmp_path, "--keys", "fp8", "--engines", "mini_engine")
    recorded(tmp_path, "--keys", "fp8", "--engines", "vllm", "--workloads", run.FEW, "--rounds", "1")
    result = recorded(tmp_path, "--keys", "bfloat16", "--engines", "vllm")
    found = [(row.case["keys"], row.case["engine"], row.case.get("workload")) for row in result.rows]
    assert found == [
        *[("FP8", "mini_engine", workload) for workload in (None, run.FEW, run.MANY)],
        *[("FP8", "vllm", workload) for workload in (None, run.FEW)],
        *[("float32", "vllm", workload) for workload in (None, run.FEW)],
    ]


def test_an_engine_that_fails_costs_no_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "fails", {"vllm"})
    with pytest.raises(PeerError, match="vllm"):
        recorded(tmp_path)
    [result] = results.load(EXPERIMENT, tmp_path)
    assert {row.case["engine"] for row in result.rows} == {"mini_engine", "mini_engine, YAML"}
    assert {row.case["keys"] for row in result.rows} == {"float32", "FP8"}


def test_weights_can_be_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    recorded(tmp_path, "--keys", "fp8", "--engines", "mini_engine", "--checkpoints", str(kept))
    assert json.loads((kept / "tiny" / "config.json").read_text())["hidden_size"] == 32
    monkeypatch.setattr("book.random_models.write_checkpoint", None)  # it is not called again
    recorded(tmp_path, "--keys", "fp8", "--engines", "mini_engine", "--checkpoints", str(kept))
    assert {Path(engine.options.model) for engine in FakeEngine.made} == {kept / "tiny"}


def test_the_command_line_takes_the_file() -> None:
    made = typing.get_args(typing.get_args(Engine)[0])[0]  # the class of a command's options
    engine = EngineOptions.of(made(config=run.YAML), make_console())
    assert {"model": engine.model, **engine.options} == OPTIONS
    config = EngineConfig.of(engine.options)
    assert (config.max_batch_size, config.max_model_len) == (32, run.WORKLOADS["cuda"][run.FEW].longest)


def test_a_missing_peer_is_an_error_before_a_model_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="vllm"):
        run.main(["--device", "cpu", "--out", str(tmp_path), "--engines", "vllm"])


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    keys = 64 * 1536 * 2 * 32 * 8 * 128  # in the middle of the outputs
    assert f"{keys / 1e9:.2f} GB of keys and values" in printed and f"{2 * keys / 1e9:.1f} GB of keys" in printed
    layer = 6144 * 4096 + 4096 * 4096 + 28_672 * 4096 + 4096 * 14_336
    scales = 4 * (6144 + 4096 + 28_672 + 4096)
    head = 2 * 128_256 * 4096
    assert f"{(32 * (layer + scales) + head) / 1e9:.2f} GB, of which {head / 1e9:.2f} GB" in printed
