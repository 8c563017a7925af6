"""The experiment compares the same decode steps in all ways, and its arithmetic on traces holds for traces by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the experiment draws with matplotlib")

from book import figures, results
from book.grading.chapter import load_module
from book.random_models import random_model
from mini_engine.bench.workloads import Workload
from mini_engine.roofline import Machine

EXPERIMENT = "10_cuda_graphs_and_overlap"
FOLDER = Path(__file__).parents[2] / "experiments" / EXPERIMENT
run = load_module(f"experiment_{EXPERIMENT}", FOLDER / "run.py")

OPTIONS = replace(run.OPTIONS["cpu"], repetitions=2)
MACHINE = Machine("a machine", "float32", bandwidth=1e12, flops=1e12)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_model(OPTIONS.shape, OPTIONS.dtype, CPU)


def test_the_script_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setitem(run.OPTIONS, "cpu", OPTIONS)
    monkeypatch.setattr(run, "measure_machine", lambda device, dtype: MACHINE)
    readme = (FOLDER / "README.md").read_bytes()
    run.main(["--device", "cpu", "--out", str(tmp_path), "--only", "steps"])
    run.main(["--device", "cpu", "--out", str(tmp_path), "--only", "padding", "prompts", "idle", "engine"])
    assert (FOLDER / "README.md").read_bytes() == readme
    [result] = results.load(EXPERIMENT, tmp_path)
    steps = [row for row in result.rows if row.figure == "step"]
    ways = [(launch, depth) for launch in ("kernel by kernel", "graph") for depth in (0, 1)]
    assert [tuple(row.case.values()) for row in steps] == [(*way, n) for n in OPTIONS.batch_sizes for way in ways]
    padded = [row for row in result.rows if row.figure == "padded step"]
    assert [row.case["rows of the graph"] for row in padded] == [3, 4, 4]
    mixed = [row for row in result.rows if row.figure == "step with a prompt"]
    assert [row.case["launch"] for row in mixed] == ["kernel by kernel", "pieces"]
    assert all(row.spread[0] <= row.value <= row.spread[1] and row.bound > 0 for row in steps + padded + mixed)
    assert len(result.rows) == len(steps) + len(padded) + len(mixed)


def test_a_steady_decode_stays_steady_and_gives_the_same_tokens_in_all_ways(model):
    running = run.decodes(model, OPTIONS, 3, {way: (way.sizes(3), way.depth) for way in run.WAYS})
    run.in_turns(running, OPTIONS)
    tokens = []
    for decode in running.values():
        report = decode.engine.step()
        assert report.is_decode and len(report.requests) == 3
        tokens.append([list(decode.engine.tokens_of(request, 0)) for request in report.requests])
    for other in tokens[1:]:
        for one, same in zip(tokens[0], other, strict=True):
            length = min(len(one), len(same))  # at depth 1 the last token is not known yet
            assert length > OPTIONS.prompt and one[:length] == same[:length]


def test_too_few_pages_for_all_steps_are_noticed(model):
    decode = run.SteadyDecode(model, OPTIONS, 1, (), 0, 2)
    with pytest.raises(AssertionError, match="ended"):
        decode.seconds(40)


def test_gaps_by_hand():
    """Two kernels overlap, one follows after 2 µs, one after 10."""
    device = [[0.0, 4.0], [3.0, 6.0], [8.0, 10.0], [20.0, 30.0]]
    found = run.Profiled(1.0, 4.0, 1.0, [[0.0, 9.0]], device)
    assert found.gaps == [2.0, 10.0]
    assert (found.idle(), found.idle(5.0)) == (12 / 30, 10 / 30)
    assert run.merged(device, 5.0) == [[0.0, 10.0], [20.0, 30.0]]


def timeline(launch: str, requests: int) -> dict:
    steps = [[100.0 * i, 100.0 * i + 90] for i in range(12)]
    case = {"launch": launch, "depth": 1, "requests": requests}
    return {**case, "seconds_per_step": 1e-4, "idle": 0.25, "steps": steps, "device": [[a + 5, b] for a, b in steps]}


def test_timelines_are_drawn_into_the_readme(tmp_path):
    (tmp_path / "README.md").write_text(f"# Title\n\n{run.IMAGES}\nold\n{run.END_OF_IMAGES}\n\nend\n")
    (tmp_path / "timelines").mkdir()
    runs = [timeline(launch, requests) for requests in (1, 256) for launch in ("graph", "kernel by kernel")]
    recording = {"device": "a GPU", "date": "2026-11-22", "versions": {}, "runs": runs}
    (tmp_path / "timelines" / "a-gpu.json").write_text(json.dumps(recording))
    run.draw_recorded(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "old" not in text and "kernel by kernel at depth 1 25.0%" in text and text.endswith("end\n")
    for image in ("timeline_1.svg", "timeline_256.svg"):
        assert f"]({image})" in text and (tmp_path / image).read_text().startswith("<svg")


def test_what_is_recorded_can_be_drawn():
    for file in (FOLDER / "timelines").glob("*.json"):
        recording = json.loads(file.read_text())
        assert figures.to_svg(run.draw(recording["runs"][:2])).startswith("<svg")


def test_rows_of_starts_by_hand():
    rows = run.start_rows([{"imports": 2.0, "first token": 1.0}, {"imports": 4.0, "first token": 3.0}])
    found = {row.case["stage"]: (row.value, row.spread) for row in rows}
    assert found == {
        "imports": (3.0, (2.0, 4.0)), "first token": (2.0, (1.0, 3.0)), "start to first token": (5.0, (3.0, 7.0)),
    }  # fmt: skip


def test_the_predictions_by_hand():
    shape = run.ModelShape(8, 2, 2, 1, 4, 16, 100)
    own, padded = (run.padded_seconds(shape, 3, rows, 10, 2) for rows in (3, 5))
    # Memory-bound: a row reads and writes activations, and its own key and value; the three requests have 9 keys more.
    assert 0 < padded - own < 0.5 * own
    assert run.padded_seconds(shape, 3, 3, 11, 2) - own == pytest.approx(2 * 3 * 2 * 4 * 2 / run.ASSUMED.bandwidth)
    assert run.share_in_full_steps(Workload(run.MANY_REQUESTS, (1, 1), (4, 4)), 10) == 0
    assert run.share_in_full_steps(Workload(run.MANY_REQUESTS + 1, (1, 1), (4, 4)), 10) == 1
    assert "| capture of 35 graphs | 567 ms |" in run.predictions()  # 35 sizes, twice 270 launches of 30 µs


@pytest.mark.gpu
def test_a_profile_on_a_gpu_sees_fewer_launches_with_a_graph():
    device = torch.device("cuda")
    options = replace(OPTIONS, dtype=torch.bfloat16, attn_backend="flashinfer", shape=run.OPTIONS["cuda"].shape)
    own = random_model(options.shape, options.dtype, device)
    plain, graph = (run.profiled(run.SteadyDecode(own, options, 2, sizes, 1, 40), 5) for sizes in ((), (2,)))
    assert graph.launches < plain.launches / 4 and graph.kernels > 100 and plain.launches > 100
    for found in (plain, graph):
        assert len(found.steps) == 5 and found.busy > 0 and 0 <= found.idle(run.GAP) <= found.idle() < 1
