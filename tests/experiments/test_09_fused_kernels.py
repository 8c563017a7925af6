"""All rungs compute the same layer, their costs follow from the shapes, and kernels are found in a profile."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from book.random_models import random_model
from mini_engine.attention.paged import PagedBackend
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Cost, Machine
from tests.attention import fake_flashinfer

EXPERIMENT = "09_fused_kernels"
FOLDER = Path(__file__).parents[2] / "experiments" / EXPERIMENT
run = load_module(f"experiment_{EXPERIMENT}", FOLDER / "run.py")
rungs = sys.modules["rungs"]

CPU = torch.device("cpu")
MACHINE = Machine("a machine", "float32", bandwidth=1e15, flops=1e15)
QWEN3 = rungs.shape_of(ModelConfig.from_hf(run.QWEN3_0_6B.to_dict()))
TOKENS = pytest.mark.parametrize("num_tokens", [1, 8, 256])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = random_model(run.TINY, torch.float32, CPU)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Stand-ins for what only a GPU machine has; the kernels themselves run in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there the script itself runs")
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr("book.kernels.tiles.PROGRAMS", 4)  # the interpreter takes milliseconds for each
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for module in (run, rungs):
        monkeypatch.setattr(module, "create_backend", lambda name, *arguments: PagedBackend(*arguments))


def test_the_script_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "measure_machine", lambda device, dtype: MACHINE)
    monkeypatch.setattr(run, "RUNGS", [rung for rung in run.RUNGS if rung.name != "torch.compile"])
    readme = (FOLDER / "README.md").read_bytes()
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    assert (FOLDER / "README.md").read_bytes() == readme
    for rung in ("separate projections", "packed projections"):
        for num_tokens in run.SETTINGS["cpu"].tokens:
            found = {f: result.find(f, rung=rung, tokens=num_tokens) for f in ("layer: time", "layer: predicted time")}
            assert all(0 < row.share_of_bound < 1 for row in found.values())
            assert 0 < result.find("layer: bytes", rung=rung, tokens=num_tokens).share_of_bound < 1
    assert len([row for row in result.rows if row.figure == "weights: time of a layer"]) == 2 * 2 * 2


def test_all_rungs_compute_the_same_layers(model, without_a_gpu):
    """In float32 on a CPU."""
    step = rungs.make_step(model, "flashinfer", 3, 20, CPU)
    with torch.inference_mode():
        outputs = {
            rung.name: run.through_layers(rung.make(CPU), model, step)()
            for rung in run.RUNGS
            if rung.name != "torch.compile"  # tests/kernels/test_compiled.py
        }
    want = outputs["separate projections"]
    for out in outputs.values():
        torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


def test_rows_of_the_products(model, without_a_gpu, monkeypatch):
    """Each product and all of them together, in both ways, layer by layer."""
    calls = []
    weights = [torch.zeros(4, 8), torch.ones(4, 8)]

    def product(name):
        return run.Product(
            weights, lambda weight: calls.append((name, "library", weight)), lambda w: calls.append((name, "ours", w))
        )

    monkeypatch.setattr(run, "PRODUCT_TOKENS", (2,))
    monkeypatch.setattr(run, "products_of", lambda model, step: {"a": product("a"), "b": product("b")})
    setting = replace(run.SETTINGS["cpu"], repetitions=1)
    with torch.inference_mode():
        rows = run.product_rows(model, setting, MACHINE, CPU)
    cases = [(row.case["product"], row.case["tokens"], row.case["way"]) for row in rows]
    assert cases == [(name, 2, way) for name in ("a", "b", "all four") for way in ("followed", "finished")]
    assert rows[4].bound == rows[0].bound + rows[2].bound > 0
    assert {way for _, way, _ in calls[:2]} == {"library"} and {way for _, way, _ in calls} == {"library", "ours"}
    assert [(name, bool(w.any())) for name, _, w in calls[-4:]] == [
        ("a", False),
        ("b", False),
        ("a", True),
        ("b", True),
    ]


def test_a_rung_that_computes_something_else_is_refused():
    x = torch.ones(3)
    run.check_equal({"right": lambda: x, "right too": lambda: x * 1.01})
    with pytest.raises(ValueError, match="wrong"):
        run.check_equal({"right": lambda: x, "wrong": lambda: x * 1.2})


@TOKENS
def test_costs_of_the_kernels_by_hand(num_tokens):
    costs = rungs.kernel_costs(QWEN3, num_tokens, 384, 2)
    assert {name for rung in run.RUNGS for name in rung.kernels} <= set(costs)
    assert sum(costs[name].flops for name in "qkv") == costs["qkv"].flops == 2 * num_tokens * 1024 * 4096
    assert costs["norm+qkv"].bytes == 2 * (num_tokens * 1024 + 1024 + 4096 * 1024 + num_tokens * 4096)
    assert costs["norm+gate_up+silu"].bytes == 2 * (num_tokens * 1024 + 1024 + 6144 * 1024 + num_tokens * 3072)
    assert costs["down+residual"].bytes == 2 * (num_tokens * 3072 + 3072 * 1024 + 2 * num_tokens * 1024)


@TOKENS
def test_every_rung_moves_fewer_bytes_than_the_one_it_improves_and_more_than_the_least(num_tokens):
    costs, least = rungs.kernel_costs(QWEN3, num_tokens, 384, 2), rungs.least_cost(QWEN3, num_tokens, 384, 2)
    moved = {rung.name: sum(costs[name].bytes for name in rung.kernels) for rung in run.RUNGS}
    ladder = [name for name in moved if name not in ("and started early", "torch.compile")]
    # Packing itself moves no fewer bytes: it adds a copy of queries and keys, and reads each token fewer times.
    assert moved[ladder[1]] > moved[ladder[2]] > moved[ladder[3]] > moved[ladder[4]] > least.bytes
    assert moved["torch.compile"] > least.bytes


@TOKENS
def test_the_least_cost_by_hand(num_tokens):
    weights = 1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    rest = num_tokens * (384 * 2 * 8 * 128 + 2 * 1024)
    assert rungs.least_cost(QWEN3, num_tokens, 384, 2).bytes == 2 * (weights + rest)


def test_the_prediction_counts_bounds_and_late_launches():
    machine = Machine("a machine", "bfloat16", bandwidth=1e9, flops=1e9)
    costs = {"a": Cost(0, 2e9), "b": Cost(3e9, 0)}
    rung = rungs.Rung("any", lambda device: None, ("a", "b", "b"), num_early=1)
    assert run.predicted_seconds(rung, costs, machine, 0.5) == 2 + 3 + 3 + 2 * 0.5


def test_the_readme_has_the_table_of_predictions():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for table in (run.prediction(run.SETTINGS["cuda"]), run.products_prediction(run.SETTINGS["cuda"])):
        assert table.markdown() in readme
    assert all(f"*{rung.name}*" in readme for rung in run.RUNGS)


def test_kernels_are_summed_by_place_and_what_finishes_another_joins_it():
    layer = [("norm", 1.0), ("gemm", 2.0), ("splitKreduce_kernel", 3.0), ("gemm", 4.0)]
    assert run.by_place(layer * 3, 3) == [("norm", 3.0), ("gemm", 15.0), ("gemm", 12.0)]
    assert run.by_place([*layer, ("extra", 1.0)], 3) == []
    assert run.by_name(layer) == [("norm", 1.0), ("gemm", 6.0), ("splitKreduce_kernel", 3.0)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
         "vectorized_elementwise_kernel"),
        ("_norm_linear_kernel", "_norm_linear_kernel"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
    ],
)  # fmt: skip
def test_short_names(name, short):
    assert run.short_name(name) == short


def test_tiles_fit_registers_and_tensor_cores():
    pytest.importorskip("triton")
    for num_columns in (1024, 2048, 3072):
        one, eight = (run.tiles_to_try(n, num_columns, True) for n in (1, 8))
        assert all(tile.rows * tile.columns <= 16_384 for tile in one) and len(one) > 5
        assert all(tile.rows >= 16 and tile.columns >= 16 for tile in eight)
        assert len(set(one)) == len(one) and len(set(eight)) == len(eight)
    assert all(tile.splits == 1 for n in (1, 8) for tile in run.tiles_to_try(n, 1024, False))


# --- what is recorded -------------------------------------------------------------------------------------------------


RECORDED = pytest.mark.parametrize("recorded", results.load(EXPERIMENT), ids=lambda result: result.device)


def test_every_section_that_the_readings_cite_is_recorded():
    figures = {row.figure for recorded in results.load(EXPERIMENT) for row in recorded.rows}
    assert {"layer: time", "product: time"} <= figures


@RECORDED
def test_no_recorded_row_beats_its_bound(recorded):
    assert all(row.share_of_bound is None or row.share_of_bound < 1.03 for row in recorded.rows)


@RECORDED
def test_the_recorded_products_are_those_of_the_script(recorded):
    cases = {tuple(row.case.values()) for row in recorded.rows if row.figure == "product: time"}
    products = "qkv", "o", "gate_up", "down", "all four"
    expected = {(name, n, way) for name in products for n in run.PRODUCT_TOKENS for way in ("followed", "finished")}
    assert cases in (set(), expected)


@RECORDED
def test_the_recorded_rungs_are_those_of_the_script(recorded):
    setting = run.SETTINGS["cuda"]
    expected = {
        (rung.name, n, launched)
        for rung in run.RUNGS
        for n in setting.tokens
        if n <= rung.most_tokens
        for launched in (run.GRAPH, run.PYTHON)
    }
    assert {tuple(row.case.values()) for row in recorded.rows if row.figure == "layer: time"} in (set(), expected)
