"""Every engine serves the same requests without options, and each row names its model, engine and workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from book import ledger, results
from book.grading.chapter import load_module
from mini_engine.bench.peer_process import PeerOptions
from mini_engine.bench.workloads import BenchRequest, Workload
from mini_engine.errors import ConfigError
from mini_engine.roofline import Machine

EXPERIMENT = "13_beside_other_engines"
FOLDER = Path(__file__).parents[2] / "experiments" / EXPERIMENT
run = load_module(f"experiment_{EXPERIMENT}", FOLDER / "run.py")

MACHINE = Machine("a machine", "float32", bandwidth=1e12, flops=1e12)
WORKLOADS = {
    "latency": {"cpu": Workload(1, (8, 8), (4, 4))},
    "shared-prefix": {"cpu": Workload(3, (2, 2), (4, 4), shared=32)},
    "long-context": {"cpu": Workload(1, (4096, 4096), (4, 4))},  # longer than the model takes
}


class Engine:
    """An engine that answers at once, and records the requests that it got."""

    made: ClassVar[list[Engine]] = []
    ready_seconds = 2.0

    def __init__(self, name: str, options: PeerOptions) -> None:
        assert all(other.is_closed for other in self.made)  # each has the device to itself
        self.name, self.options, self.served, self.is_closed, self.seconds = name, options, [], False, 0.0
        self.made.append(self)

    def __call__(self, requests: list[BenchRequest]) -> list[list[int]]:
        self.served.append(requests)
        self.seconds = 1 / len(self.served)
        return [[0] * params.max_tokens for _, params in requests]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> results.Result:
    replaced: dict[str, Any] = {
        "NAMED": WORKLOADS, "PeerProcess": Engine, "check_installed": lambda name: None,
        "measure_machine": lambda device, dtype: MACHINE,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run.metadata, "version", lambda name: f"{name} of today")
    monkeypatch.setattr(Engine, "made", [])
    options = ["--device", "cpu", "--out", str(tmp_path), "--change", "a faster kernel"]
    run.main([*options, "--engines", "mini_engine", "vllm"])
    [result] = results.load(EXPERIMENT, tmp_path)
    return result


def test_a_row_for_each_engine_and_workload(recorded: results.Result) -> None:
    rows = [("start until ready", ()), ("throughput", ("latency",)), ("time", ("shared-prefix",))]
    assert [(row.figure, *row.case.values()) for row in recorded.rows] == [
        (figure, "tiny", *workload, engine) for engine in ("mini_engine", "vllm") for figure, workload in rows
    ]
    assert recorded.parameters["vllm"] == "vllm of today"
    for row in recorded.rows:
        if row.spread:
            assert row.value in row.spread and row.spread[0] <= row.spread[1] and row.bound
    assert recorded.rows[1].value == 4 / (1 / 2)  # tokens over the seconds of the faster round


def test_the_ledger_gets_our_rows(recorded: results.Result, tmp_path: Path) -> None:
    entries = ledger.load(tmp_path)
    assert [entry.row for entry in entries] == [row for row in recorded.rows if row.case["engine"] == "mini_engine"]
    assert {entry.change for entry in entries} == {"a faster kernel"}


def test_every_round_has_other_tokens_and_engines_keep_their_defaults(recorded: results.Result) -> None:
    ours, theirs = Engine.made
    for engine in (ours, theirs):
        assert [len(requests) for requests in engine.served] == [1] * run.ROUNDS + [3] * run.ROUNDS
        assert len({tuple(requests[0].prompt) for requests in engine.served}) == 2 * run.ROUNDS
        assert engine.is_closed
    assert ours.served == theirs.served
    assert ours.options == PeerOptions(ours.options.model)
    assert theirs.options == PeerOptions(ours.options.model, max_num_seqs=run.AT_ONCE)


def test_a_missing_peer_is_an_error_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        run.main(["--device", "cpu", "--out", str(tmp_path), "--engines", "vllm"])


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert "4,096 of 4,224 in the prefix" in printed  # 64 own tokens of the prompt, and half of 128 of the output
    assert f"{8 * 32_769 * 2 * 28 * 8 * 128 * 2 / 1e9:.1f} GB of keys and values" in printed
