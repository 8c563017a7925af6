"""Flat and cascade attend over the same keys, and the fit of the cost model finds the coefficients behind its times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from book import results
from book.grading.chapter import load_module
from mini_engine.attention.cascade import own_pages
from mini_engine.attention.levels import H200_COSTS, CascadeCosts
from mini_engine.attention.spec import AttentionSpec
from mini_engine.bench.workloads import SHARED_PREFIX
from mini_engine.roofline import Machine

EXPERIMENT = "07_cascade_vs_flat"
FOLDER = Path(__file__).parents[2] / "experiments" / EXPERIMENT
run = load_module(f"experiment_{EXPERIMENT}", FOLDER / "run.py")
fit = load_module(f"experiment_{EXPERIMENT}_fit", FOLDER / "fit.py")

CASES = run.Case(3, 32, 10), run.Case(5, 48, 16)
SETTING = replace(run.SETTINGS["cpu"], cases=CASES, heads=(4, 2, 16), repetitions=2)
MACHINE = Machine("a machine", "float32", bandwidth=1e12, flops=1e12)


# --- the measurement --------------------------------------------------------------------------------------------------


def test_the_script_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setitem(run.SETTINGS, "cpu", SETTING)
    monkeypatch.setattr(run, "measure_machine", lambda device, dtype: MACHINE)
    readme = (FOLDER / "README.md").read_bytes()
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    assert (FOLDER / "README.md").read_bytes() == readme
    [result] = results.load(EXPERIMENT, tmp_path)
    assert [tuple(row.case.values()) for row in result.rows] == [
        (way, case.requests, case.shared, case.own) for case in CASES for way in (run.FLAT, run.CASCADE)
    ]
    for row in result.rows:
        keys = row.case["shared"] + row.case["requests"] * row.case["own"]
        assert row.bound == keys * 2 * 2 * 16 * 4 / 1e12
        assert row.spread[0] <= row.value <= row.spread[1]
    kind = fit.Kind.of(result)
    assert (kind.spec.num_qo_heads, kind.spec.num_kv_heads, kind.spec.head_dim) == SETTING.heads
    assert (kind.page_size, kind.dtype) == (16, torch.float32)
    assert fit.measured_bandwidth(result, kind) == pytest.approx(1e12)
    times = fit.Times.of(result, 16)
    assert (times.requests.tolist(), times.shared.tolist(), times.own.tolist()) == ([3, 5], [2, 3], [1, 1])
    assert times.flat.tolist() == [result.find("attention of a layer", way="flat", requests=n).value for n in (3, 5)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_level_holds_the_prefix_of_all_requests(case):
    step = run.Step(case, SETTING, torch.device("cpu"), page_size=16)
    [level], own = step.cascade.levels, own_pages(step.cascade)
    pages = step.flat.kv_page_indices.view(case.requests, -1)
    shared = case.shared // 16
    assert level.qo_indptr.tolist() == [0, case.requests] and step.flat.levels == ()
    assert all(level.kv_page_indices.tolist() == row for row in pages[:, :shared].tolist())
    assert own.kv_page_indices.tolist() == pages[:, shared:].flatten().tolist()
    assert len(set(own.kv_page_indices.tolist())) == own.kv_page_indices.numel(), "own pages are not shared"
    assert step.flat.kv_lens.tolist() == [case.shared + case.own] * case.requests


# --- the fit ----------------------------------------------------------------------------------------------------------

BFLOAT16 = fit.Kind(AttentionSpec(0, 16, 8, 128, 128**-0.5), 16, torch.bfloat16)
GRID = np.array([(n, shared, own) for n in (8, 16, 64, 256, 512) for shared in (64, 256, 1024) for own in (8, 16)])


def synthetic(costs: CascadeCosts, grid: np.ndarray = GRID, launch: float = 30e-6) -> fit.Times:
    """Return times without noise: cascade's as `fit_compute` models them, flat's as the planner predicts the saving."""
    requests, shared, own = grid.T
    layer = BFLOAT16.costs(costs)
    page = BFLOAT16.amounts.reread_seconds / costs.bandwidth
    cascade = launch + requests * own * page + np.maximum(shared * page, requests * shared * layer.compute_seconds)
    saved = (requests - 1) * shared * (layer.reread_seconds - layer.compute_seconds)
    flat = cascade + saved - costs.level_seconds - requests * layer.merge_seconds
    return fit.Times(requests, shared, own, flat, cascade)


rates = st.floats(0.5, 2)


@settings(max_examples=40)
@given(rates, rates, rates, st.floats(0, 20))
def test_the_fit_recovers_the_coefficients_behind_synthetic_times(reread, flops, bandwidth, level):
    costs = CascadeCosts(10e12 * reread, 300e12 * flops, 4e12 * bandwidth, level * 1e-6)
    found = fit.fit(synthetic(costs), BFLOAT16.amounts, costs.bandwidth)
    assert found.reread_bandwidth == pytest.approx(costs.reread_bandwidth, rel=1e-6)
    assert found.flops == pytest.approx(costs.flops, rel=1e-6)
    assert found.level_seconds == pytest.approx(costs.level_seconds, rel=1e-6, abs=1e-12)
    assert found.bandwidth == costs.bandwidth


@settings(max_examples=20)
@given(st.integers(0, 999), st.integers(0, len(GRID) - 1))
def test_noise_and_a_missing_case_change_the_coefficients_little(seed, missing):
    times = synthetic(H200_COSTS)
    noise = 1 + 0.01 * np.random.default_rng(seed).uniform(-1, 1, (2, len(GRID)))
    noisy = replace(times, flat=times.flat * noise[0], cascade=times.cascade * noise[1]).without(missing)
    found = fit.fit(noisy, BFLOAT16.amounts, H200_COSTS.bandwidth)
    for name in ("reread_bandwidth", "flops"):
        assert getattr(found, name) == pytest.approx(getattr(H200_COSTS, name), rel=0.05)
    assert found.level_seconds == pytest.approx(H200_COSTS.level_seconds, abs=1e-6)


@given(st.integers(0, 9999), st.integers(1, 4), st.integers(4, 9))
def test_least_squares_is_optimal_and_never_negative(seed, terms, values):
    """By the conditions of Karush, Kuhn and Tucker: no coefficient above 0 has a slope, and none at 0 a falling one."""
    rng = np.random.default_rng(seed)
    columns, target, scale = rng.normal(size=(terms, values)), rng.normal(size=values), rng.uniform(0.5, 2, values)
    found, error = fit.least_squares(list(columns), target, scale)
    residual = (found @ columns - target) / scale
    slope = columns @ (residual / scale)
    assert error == pytest.approx(residual @ residual)
    assert (found >= 0).all() and (slope[found == 0] > -1e-9).all() and np.allclose(slope[found > 0], 0, atol=1e-9)


def test_times_that_do_not_identify_a_coefficient_are_refused():
    with pytest.raises(ValueError, match="flops"):
        fit.fit(synthetic(H200_COSTS, GRID[GRID[:, 0] <= 16]), BFLOAT16.amounts, H200_COSTS.bandwidth)
    times = synthetic(H200_COSTS)
    slower = replace(times, flat=np.maximum(1e-6, times.cascade - times.avoided * 1e-9))
    with pytest.raises(ValueError, match="reread_bandwidth"):
        fit.fit(slower, BFLOAT16.amounts, H200_COSTS.bandwidth)


def test_the_planner_decides_by_the_sign_of_its_prediction():
    times = synthetic(H200_COSTS)
    for level_seconds in (0.0, 5e-6, 40e-6, 1.0):
        costs = BFLOAT16.costs(replace(H200_COSTS, level_seconds=level_seconds))
        signs = ["cascade" if saved > 0 else "flat" for saved in fit.predicted(times, costs)]
        assert fit.decisions(times, costs) == signs
    assert fit.predicted(times, BFLOAT16.costs(H200_COSTS)) == pytest.approx(times.saved, abs=1e-12)


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return results.read(fit.RECORDED)


def test_the_recorded_cases_are_those_of_the_script(recorded):
    layers = [tuple(row.case.values()) for row in recorded.rows if row.figure == "attention of a layer"]
    ways = (run.FLAT, run.CASCADE, run.WRAPPER, run.BY_HAND)
    cases = run.SETTINGS["cuda"].cases
    assert sorted(layers) == sorted((way, c.requests, c.shared, c.own) for c in cases for way in ways)
    for figure in ("time", "device busy"):
        engines = [row.case["engine"] for row in recorded.rows if row.figure == figure]
        assert engines == [f"mini_engine, {name}" for name in run.ENGINES]


def test_no_recorded_time_beats_its_bound(recorded):
    assert all(row.share_of_bound < 1 for row in recorded.rows if row.share_of_bound is not None)


def test_the_predictions_of_the_readme_follow_from_the_workload(recorded):
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    requests, shared, own = SHARED_PREFIX.num_requests, SHARED_PREFIX.shared, 128
    flat, levels = requests * (shared + own), shared + requests * own
    assert f"For B = {requests}, S = {shared:,} and U = {own}\n  that is {flat:,} against {levels:,} keys" in readme
    assert f"a factor of {flat / levels:.0f}." in readme
    page_bytes = fit.Kind.of(recorded).amounts.reread_seconds
    assert f"{shared // 16 * page_bytes / 1e6:.0f} MB" in readme


def test_the_readme_shows_the_fit_of_the_recorded_times(recorded):
    shown = (FOLDER / "README.md").read_text(encoding="utf-8").partition(fit.MARKS[0])[2].partition(fit.MARKS[1])[0]
    assert shown.strip() == "\n\n".join(table.markdown() for table in fit.tables(recorded))


def test_the_engines_defaults_are_close_to_the_fit_and_decide_as_well(recorded):
    kind = fit.Kind.of(recorded)
    times = fit.Times.of(recorded, kind.page_size)
    fitted = fit.fit(times, kind.amounts, fit.measured_bandwidth(recorded, kind))
    for name in fit.UNITS:
        assert getattr(H200_COSTS, name) == pytest.approx(getattr(fitted, name), rel=0.1), name
    faster = ["cascade" if saved > 0 else "flat" for saved in times.saved]
    right = [
        sum(a == b for a, b in zip(fit.decisions(times, kind.costs(costs)), faster, strict=True))
        for costs in (H200_COSTS, fitted)
    ]
    assert right[0] >= right[1]


def test_another_file_is_printed_and_the_readme_left_alone(recorded, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    file = tmp_path / "results" / "other.json"
    file.write_text(json.dumps(json.loads(fit.RECORDED.read_text())))
    readme = (FOLDER / "README.md").read_bytes()
    fit.main([str(file)])
    out = capsys.readouterr().out
    assert (FOLDER / "README.md").read_bytes() == readme
    assert all(repr(table) in out for table in fit.tables(recorded))
