"""The ways of the experiment compute one layer over the same keys, and its bounds follow from bytes and FLOPs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.workloads import GPU, Workload, least_seconds, num_outputs
from mini_engine.roofline import Machine
from tests.models.families import our_model, transformers_model

EXPERIMENT = "06_flashinfer_vs_flex"
FOLDER = Path(__file__).parents[2] / "experiments" / EXPERIMENT
run = load_module(f"experiment_{EXPERIMENT}", FOLDER / "run.py")

MACHINE = Machine("a machine", "float32", bandwidth=1e15, flops=1e15)
SETTING = replace(
    run.SETTINGS["cpu"], heads=(4, 2, 16), decodes=((1, 20), (3, 33)), prefills=((2, 17),),
    backends=("torch", "torch_padded"), repetitions=2, most_bytes=1e4,
)  # fmt: skip
GPU_SETTING = run.SETTINGS["cuda"]
CASES = pytest.mark.parametrize("case", [run.Case(1, 40, 1), run.Case(3, 33, 1), run.Case(2, 17, 17)], ids=str)
WAYS = {"flex", "flashinfer", "fa2 by hand", "fa3 by hand", "sdpa"}


def test_the_script_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setitem(run.SETTINGS, "cpu", SETTING)
    monkeypatch.setattr(run, "measure_machine", lambda device, dtype: MACHINE)
    readme = (FOLDER / "README.md").read_bytes()
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    assert (FOLDER / "README.md").read_bytes() == readme
    assert {(row.figure, row.case["way"], row.case["requests"], row.case["keys"]) for row in result.rows} == {
        (f"{section}: rate", way, *case)
        for section, cases in (("decode", SETTING.decodes), ("prefill", SETTING.prefills))
        for case in cases
        for way in ("torch", "torch_padded", "sdpa")
    }
    assert all(row.spread[0] <= row.value <= row.spread[1] and 0 < row.share_of_bound < 1 for row in result.rows)


@CASES
def test_the_cost_of_a_case_by_hand(case):
    q_heads, kv_heads, head_dim = SETTING.heads
    cost = case.cost(SETTING.heads, torch.float32)
    pairs = sum(range(case.keys - case.queries + 1, case.keys + 1))
    assert cost.flops == case.requests * 4 * q_heads * head_dim * pairs
    assert cost.bytes == case.requests * 4 * 2 * head_dim * (q_heads * case.queries + kv_heads * case.keys)


@CASES
def test_the_backends_compute_the_same_layers(case, monkeypatch):
    monkeypatch.setattr(run, "run_layers", lambda backend, q, n: [backend.run(layer, q) for layer in range(n)])
    outputs = dict(run.backend_runs(case, SETTING, torch.device("cpu"), 16))
    assert len(outputs["torch"]) == run.layers_of(case, SETTING)
    assert all(out.shape == (case.requests * case.queries, 4, 16) for out in outputs["torch"])
    torch.testing.assert_close(outputs["torch"], outputs["torch_padded"])


@pytest.mark.parametrize(("most_bytes", "layers"), [(1e4, 2), (1e5, 6), (1e9, 28)])
def test_layers_fill_the_bytes_but_are_2_to_28(most_bytes, layers):
    assert run.layers_of(run.Case(1, 64, 1), replace(SETTING, most_bytes=most_bytes)) == layers


# --- the workloads ----------------------------------------------------------------------------------------------------

TINY = {
    "throughput": Workload(4, (3, 9), (2, 7)),
    "shared-prefix": Workload(3, (2, 4), (3, 3), shared=20),
    "long-context": Workload(2, (30, 30), (4, 4)),
}


@pytest.fixture(scope="module")
def model():
    return our_model(transformers_model("qwen3", seed=1))


def test_rows_of_the_workloads(model, monkeypatch):
    monkeypatch.setattr(run, "WORKLOADS", TINY)
    monkeypatch.setattr(run, "LONG_CONTEXT", TINY["long-context"])
    rows = run.engine_rows(model, SETTING, MACHINE, list(TINY), SETTING.backends, repetitions=1)
    found = results.new_result(EXPERIMENT, rows, {}, "cpu")
    assert len(rows) == 2 * (len(TINY) + 1)
    for name, workload in TINY.items():
        requests = workload.requests(61)
        least = least_seconds(model.config, MACHINE, requests, 4, workload.shared)
        for backend in SETTING.backends:
            case = {"workload": name, "engine": f"mini_engine, {backend}"}
            if workload.shared:
                assert found.find("time", **case).bound == least
            else:
                assert found.find("throughput", **case).bound == num_outputs(requests) / least
    assert found.find("decode: KV bandwidth", engine="mini_engine, torch").bound == MACHINE.bandwidth


def test_the_bytes_of_a_served_workload_by_hand(model):
    """Each of the 3 decode steps of 2 requests reads all keys before it; the pool holds all requests at once."""
    workload = TINY["long-context"]
    engine = run.make_engine(model, "torch", workload, prefix_sharing=False)
    served = run.serve(engine, workload, 61)
    assert engine.metrics.preemptions == 0 and engine.metrics.output_tokens == num_outputs(workload.requests(61))
    assert served.kv_bytes == sum(2 * (30 + done) for done in (1, 2, 3)) * engine.cache.bytes_per_token
    assert 0 < served.decode_seconds < served.seconds


def test_backends_that_compute_the_same_agree(model):
    rows = run.agreement_rows(model, [[3, 4, 5] * 9, [7, 8]], ["torch_padded"], 12)
    assert [(row.figure, row.value) for row in rows] == [
        ("greedy tokens before the first difference", 1.0), ("equal greedy outputs", 1.0),
    ]  # fmt: skip


def test_paragraphs_are_prose_of_several_chapters():
    found = run.paragraphs(24)
    assert len(set(found)) == 24 and all(len(text) > 300 and "```" not in text for text in found)


@pytest.mark.parametrize("name", ["throughput", "long-context"])
def test_the_predicted_steps_are_those_of_the_engine(model, name):
    requests, step_tokens = TINY[name].requests(61), 10
    config = replace(run.make_engine(model, "torch", TINY[name], False).config, max_num_batched_tokens=step_tokens)
    engine = run.LLMEngine(model, config)
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert run.num_steps(requests, step_tokens) == steps


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=results.load(EXPERIMENT), ids=lambda result: result.device)
def recorded(request):
    return request.param


def test_the_recorded_cases_are_those_of_the_script(recorded):
    for section, cases in (("decode", GPU_SETTING.decodes), ("prefill", GPU_SETTING.prefills)):
        rows = [row for row in recorded.rows if row.figure == f"{section}: rate"]
        expected = [(way, *case) for way in WAYS for case in cases]
        assert sorted(tuple(row.case.values()) for row in rows) == sorted(expected)
    served = [
        (row.case["workload"], row.case["engine"]) for row in recorded.rows if row.figure in ("throughput", "time")
    ]
    expected = {(w, f"mini_engine, {b}") for w in run.WORKLOADS for b in run.ENGINES}
    assert sorted(served) == sorted(expected)


def test_recorded_bounds_are_the_machines_rates(recorded):
    """Kernels that took turns have the same bound; sections that ran later measured the machine again."""
    for figure in ("decode: rate", "prefill: rate"):
        assert len({row.bound for row in recorded.rows if row.figure == figure}) == 1
    bandwidths = [row.bound for row in recorded.rows if row.unit == "B/s"]
    assert max(bandwidths) < 1.03 * min(bandwidths)
    # The bandwidth is that of a sum, which a kernel can exceed by a percent or two.
    assert all(row.share_of_bound < 1.03 for row in recorded.rows if row.bound is not None)


def test_the_predictions_of_the_readme_follow_from_the_cases():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    requests = GPU.requests(10_001)
    steps = run.num_steps(requests, run.STEP_TOKENS)
    assert f"takes {steps:,} steps for {num_outputs(requests):,} tokens" in readme
    for requests, keys in GPU_SETTING.decodes:
        cost = run.Case(requests, keys, 1).cost(GPU_SETTING.heads, GPU_SETTING.dtype)
        assert cost.flops / cost.bytes == pytest.approx(2, rel=0.01)
    one = run.Case(1, 512, 1).cost(GPU_SETTING.heads, GPU_SETTING.dtype)
    assert round(one.bytes / 1e6) == 2 and one.bytes / 4.33e12 == pytest.approx(0.5e-6, rel=0.05)
