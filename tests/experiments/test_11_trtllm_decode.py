"""The ways of the experiment attend to the same keys, and its bounds and predictions follow from the cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.workloads import Workload, least_seconds, num_outputs
from mini_engine.roofline import Machine
from tests.models.families import our_model, transformers_model

EXPERIMENT = "11_trtllm_decode"
FOLDER = Path(__file__).parents[2] / "experiments" / EXPERIMENT
run = load_module(f"experiment_{EXPERIMENT}", FOLDER / "run.py")

CPU = torch.device("cpu")
MACHINE = Machine("a machine", "float32", bandwidth=1e15, flops=1e15)
SETTING = replace(run.SETTINGS["cpu"], repetitions=2, most_bytes=1e4)
GPU_SETTING = run.SETTINGS["cuda"]


def test_the_script_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setitem(run.SETTINGS, "cpu", SETTING)
    monkeypatch.setattr(run, "measure_machine", lambda device, dtype: MACHINE)
    readme = (FOLDER / "README.md").read_bytes()
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    assert (FOLDER / "README.md").read_bytes() == readme
    decodes = [row for row in result.rows if row.figure == "decode: a layer"]
    assert {tuple(row.case.values()) for row in decodes} == {
        (way, "NHD", dtype, case.requests, case.keys)
        for way in SETTING.backends
        for dtype in ("float32", "bfloat16")
        for case in SETTING.cases
    }
    assert all(row.spread[0] <= row.value <= row.spread[1] and 0 < row.share_of_bound < 1 for row in decodes)
    assert {row.case["file"] for row in result.rows if row.figure == "lines of code"} == set(run.FILES)


@pytest.mark.parametrize("kv_dtype", SETTING.kv_dtypes)
def test_the_backends_compute_the_same_layers(kv_dtype):
    case = run.Case(3, 20, 60)
    outputs = []
    for _, backend in run.planned_backends(case, SETTING, "NHD", kv_dtype, CPU):
        torch.manual_seed(0)
        outputs.append(run.run_layers(backend, case, SETTING, CPU)())
    assert len(outputs) == 2 and len(outputs[0]) == run.layers_of(case, SETTING, kv_dtype)
    torch.testing.assert_close(*outputs)


def test_the_bytes_of_a_case_by_hand():
    case = run.Case(3, 20, 60)
    keys = int(case.kv_lens.sum())
    assert len(case.kv_lens) == 3 and case.kv_lens.min() >= 20 and case.kv_lens.max() <= 60
    assert np.array_equal(case.kv_lens, case.kv_lens)
    assert case.bytes_per_layer(SETTING, torch.float32) == 16 * 4 * (2 * 2 * keys + 2 * 3 * 4)
    assert case.bytes_per_layer(SETTING, torch.bfloat16) == 16 * (2 * 2 * keys * 2 + 2 * 3 * 4 * 4)
    assert (case.keys, run.Case(1, 64, 64).keys) == ("20 to 60", "64")


def test_rows_of_the_workloads(monkeypatch):
    model = our_model(transformers_model("qwen3", seed=1))
    workload = Workload(4, (3, 9), (2, 7))
    monkeypatch.setattr(run, "WORKLOADS", {"throughput": workload})
    rows = run.engine_rows(model, SETTING, MACHINE, ["throughput"], repetitions=1)
    requests = workload.requests(61)
    assert [row.case["engine"] for row in rows] == [f"mini_engine, {way}" for way in SETTING.backends]
    least = least_seconds(model.config, MACHINE, requests, 4)
    assert all(row.bound == num_outputs(requests) / least for row in rows)


def test_the_predictions_of_the_readme_follow_from_the_cases():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    case = run.Case(256, 1024, 1024)
    assert case in GPU_SETTING.cases and "1.07 GB" in readme
    assert case.kv_bytes_per_layer(GPU_SETTING, torch.bfloat16) == 2 * 256 * 1024 * 8 * 128 * 2
    assert [run.xqa_splits(requests, GPU_SETTING.heads[1]) for requests in (1, 8, 9, 256)] == [16, 2, 1, 1]
    assert "1.07 GB" in run.predictions() and "16 for one request, 2 for 8, 1 from 9" in run.predictions()
    assert max(case.requests * case.longest for case in run.EQUAL) == 2**21
