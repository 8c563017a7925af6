"""The rows of each mode on small workloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.workloads import Workload

EXPERIMENT = "16_batch_invariance"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_prediction_by_hand() -> None:
    assert f"{1 / (0.75 * 1.02 + 0.25):.3f} of the default" in run.predictions()


def test_rows_of_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Workload(2, (4, 8), (3, 5))
    monkeypatch.setattr(run, "WORKLOADS", {"cpu": {"throughput": small, "prompts": Workload(2, (8, 8), (1, 1))}})
    monkeypatch.setattr(run, "EQUAL", {"cpu": small})
    monkeypatch.setattr(run, "ROUNDS", {"cpu": 1})
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    for mode in run.MODES:
        for workload in ("throughput", "prompts"):
            assert result.find("tokens per second", engine="mini_engine", mode=mode, workload=workload).bound
    assert result.find("equal outputs", engine="mini_engine", mode="batch-invariant").value == 2
