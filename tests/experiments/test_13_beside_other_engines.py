"""Every engine serves the same requests, and each row names its engine and workload."""

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
}


class Peer:
    """A peer that answers at once, and records the requests that it got."""

    made: ClassVar[list[Peer]] = []

    def __init__(self, name: str, options: PeerOptions) -> None:
        self.options, self.served, self.is_closed = options, [], False
        self.made.append(self)

    def __call__(self, requests: list[BenchRequest]) -> list[list[int]]:
        self.served.append(requests)
        return [[0] * params.max_tokens for _, params in requests]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> results.Result:
    replaced: dict[str, Any] = {
        "NAMED": WORKLOADS, "PeerProcess": Peer, "check_installed": lambda name: None,
        "measure_machine": lambda device, dtype: MACHINE,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run.metadata, "version", lambda name: f"{name} of today")
    monkeypatch.setattr(Peer, "made", [])
    run.main(["--device", "cpu", "--out", str(tmp_path), "--peers", "vllm", "--change", "a faster kernel"])
    [result] = results.load(EXPERIMENT, tmp_path)
    return result


def test_a_row_for_each_engine_and_workload(recorded: results.Result) -> None:
    assert [(row.figure, *row.case.values()) for row in recorded.rows] == [
        ("throughput", "latency", "mini_engine, torch"),
        ("throughput", "latency", "vllm"),
        ("time", "shared-prefix", "mini_engine, torch"),
        ("time", "shared-prefix", "vllm"),
    ]
    assert recorded.parameters["vllm"] == "vllm of today"
    for row in recorded.rows:
        low, high = row.spread
        assert low <= row.value <= high and row.bound > 0


def test_the_ledger_gets_our_rows(recorded: results.Result, tmp_path: Path) -> None:
    entries = ledger.load(tmp_path)
    assert [entry.row for entry in entries] == [row for row in recorded.rows if row.case["engine"] != "vllm"]
    assert {entry.change for entry in entries} == {"a faster kernel"}


def test_a_peer_serves_every_round_and_has_room_for_the_largest_workload(recorded: results.Result) -> None:
    [peer] = Peer.made
    # A whole round, a warm-up and three rounds of each workload, all with different tokens.
    assert [len(requests) for requests in peer.served] == [1] * 5 + [3] * 5
    assert len({tuple(requests[0].prompt) for requests in peer.served}) == 10
    longest = max(len(prompt) + params.max_tokens for requests in peer.served for prompt, params in requests)
    assert peer.options.max_model_len >= longest and peer.options.cache_tokens >= 3 * longest
    assert peer.is_closed


def test_caches_that_do_not_fit_are_an_error_before_a_peer_is_loaded() -> None:
    run.check_room(32 * 10**9, 2, 79 * 10**9)
    with pytest.raises(ConfigError, match="96 GB"):
        run.check_room(32 * 10**9, 3, 79 * 10**9)


def test_a_missing_peer_is_an_error_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        run.main(["--device", "cpu", "--out", str(tmp_path), "--peers", "vllm"])


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert "4,096 of 4,224 in the prefix" in printed  # 64 own tokens of the prompt, and half of 128 of the output
    assert f"{8 * 32_769 * 2 * 28 * 8 * 128 * 2 / 1e9:.1f} GB of keys and values" in printed
