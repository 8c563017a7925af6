"""The experiment on scheduling under load: its predictions, and what each knob trades, on small loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.load import Objective
from mini_engine.bench.virtual import StepCost
from tests.helpers import in_a_thread

EXPERIMENT = "24_scheduling_under_load"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")
SETTING = run.SETTINGS["cpu"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SEEDS", 2)
    monkeypatch.setattr(run, "REQUESTS", 120)
    monkeypatch.setattr(run, "recorded_cost", lambda *_: StepCost(0.04, 0.0011))


def found(section: str) -> results.Result:
    return results.new_result(EXPERIMENT, run.MEASURE[section](SETTING, "cpu", None), {"requests": 1}, "cpu")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert "| tokens that the mean request costs its tenant | 112 |" in printed  # (16 + 96) / 2 + 2 (8 + 48) / 2
    assert "| steps of a long prompt, 64 tokens each, beside seven decodes | 18 |" in printed


def test_fewer_tokens_in_a_step_shorten_pauses(few: None) -> None:
    result = found(run.BUDGET)
    pauses = [result.find("ITL, p99", **{"tokens of a step": budget}).value for budget in SETTING.budgets]
    assert pauses == sorted(pauses)


def test_urgent_requests_wait_less_with_priorities(few: None) -> None:
    result = found(run.PRIORITY)
    fcfs, priority = (result.find("TTFT of urgent requests, p99", policy=own).value for own in ("fcfs", "priority"))
    assert priority < fcfs


def test_a_flood_does_not_delay_another_tenant(few: None) -> None:
    result = found(run.FAIRNESS)
    fcfs, fair = (result.find("TTFT of the other tenant, p99", policy=own).value for own in ("fcfs", "fair"))
    assert fair < 0.5 * fcfs


def test_longest_prefix_first_computes_less(few: None) -> None:
    result = found(run.PREFIX)
    fcfs, lpm = (result.find("prompt tokens in cached pages", max_overtakes=own).value for own in (0, "unlimited"))
    assert fcfs < lpm < 1


def test_small_requests_gain_where_they_may_overtake(few: None) -> None:
    result = found(run.BLOCKING)
    none, some = (result.find("TTFT of small requests, p50", max_overtakes=own).value for own in (0, 8))
    assert some < none


def test_a_limit_bounds_the_wait_of_what_is_answered(few: None) -> None:
    result = found(run.ADMISSION)
    case = {"load": 1.5}
    free, limited = (result.find("TTFT, p99", limit=own, **case).value for own in ("none", "2 s"))
    assert limited < free and result.find("refused", limit="2 s", **case).value > 0


def test_bursts_wait_longer(few: None) -> None:
    result = found(run.ARRIVALS)
    poisson, bursts = (result.find("TTFT, p99", load=0.8, arrivals=own).value for own in ("Poisson", "bursts"))
    assert poisson < bursts


def test_a_step_is_timed_and_a_server_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        SETTING, rows=2, prompt=(4, 8), output=(2, 4), long=16, budgets=(16,), objective=Objective(60.0, 60.0),
        step_sizes=(4, 40), options=("--max-batch-size=2", "--dtype=float32"), live_requests=4, rounds=1,
    )  # fmt: skip
    monkeypatch.setitem(run.SETTINGS, "cpu", small)
    monkeypatch.setattr(run, "load_in_a_process", lambda *load: in_a_thread(run._drive, *load))
    run.main(["--device", "cpu", "--out", str(tmp_path), "--only", run.STEPS, run.LIVE])
    [result] = results.load(EXPERIMENT, tmp_path)
    assert run.recorded_cost("cpu", tmp_path)(40) > 0
    assert result.find("goodput", limit="none").value > 0
    assert result.find("refused", limit="60 s").value == 0
