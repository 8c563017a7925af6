"""The experiment on page tables for groups of layers: its predictions, and its rows on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.workloads import Workload

EXPERIMENT = "22_hybrid_page_tables"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    of_request = 8192 * 26 * 2 * 4 * 256 * 2
    assert f"| {of_request / 1e6:.0f} MB; in groups {(512 + 257) / 1024:.1%} of it |" in printed
    of_request = (4 * 512 + 24 * 33) / (26 * 512)
    assert f"in groups {of_request:.1%} of it" in printed and f"at most {48 / of_request:.1f}" in printed
    moved = 5.2e9 + 12 * 13 * (8192 + 4096) * 2 * 4 * 256 * 2
    assert f"| {moved / 1e9:.1f} GB, {moved / 4.44e9:.2f} ms, {12 * 4.44e12 / moved:,.0f} tokens/s |" in printed


def test_rows_of_every_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(run.SETTINGS["cpu"], workload=Workload(8, (448, 448), (8, 8)), at_once=3, repetitions=1)
    monkeypatch.setitem(run.SETTINGS, "cpu", small)
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    for model, gain in (("Gemma 2 2B", 1.3), ("Gemma 3 1B", 4.5)):
        one, groups = (result.find("requests at once", model=model, **{"page tables": name}) for name in run.TABLES)
        assert one.value == run.REQUESTS and gain * one.value <= groups.value <= groups.bound
    one, groups = (result.find("engine: requests in a step", **{"page tables": name}) for name in run.TABLES)
    assert 0 < one.value <= groups.value
    assert result.find("engine: output tokens per second", **{"page tables": "one"}).value > 0
