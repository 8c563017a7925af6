"""The predictions by hand, the rows of each part, and vLLM with the same shape and weights of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module
from mini_engine.errors import ConfigError
from mini_engine.models.layers import rms_norm
from tests.experiments.fake_engine import FakeEngine

EXPERIMENT = "20_mixture_of_experts"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    touched = 128 * (1 - (15 / 16) ** 8)
    assert f"8 tokens: experts touched | {touched:.1f}" in printed
    of_expert, router = 3 * 768 * 2048 * 2, 128 * 2048 * 2
    assert f"8 tokens: a block | {(touched * of_expert + router + 2 * 8 * 2048 * 2) / 1e6:.0f} MB" in printed
    weights = 48 * (8 * of_expert + router + 2 * 2048 * (5120 + 4096)) + 2 * 151_936 * 2048
    assert f"1 requests: a decode step | {weights / 1e9:.1f}" in printed


def test_rows_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": {"cpu": 2}, "ROUNDS": 1, "ROUTED": (1, 8), "TOKENS": {"cpu": (3,)}}.items():
        monkeypatch.setattr(run, name, value)
    for part in run.PARTS:  # parts that are measured later are added
        run.main(["--device", "cpu", "--out", str(tmp_path), "--only", part])
    [result] = results.load(EXPERIMENT, tmp_path)
    assert result.find("experts touched", part="routing", tokens=1).value == 8
    assert 45 < result.find("experts touched", part="routing", tokens=8).value < 57
    assert result.find("time of a block", part="block", tokens=3, method="torch").bound
    for batch in run.BATCHES["cpu"]:
        step = result.find("decode step", part="steps", requests=batch)
        assert step.bound and 0 < step.bound < step.value
        assert result.find("throughput", part="serving", requests=batch, engine="mini_engine").bound


def test_vllm_gets_the_shape_and_draws_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    class Peer(FakeEngine):
        def __init__(self, name, options):
            shapes.append(json.loads((Path(options.model) / "config.json").read_text()))
            super().__init__(name, options)
            self.seconds = 1.0

    monkeypatch.setattr(run, "PeerProcess", Peer)
    monkeypatch.setattr(run, "check_installed", lambda name: None)
    monkeypatch.setattr(FakeEngine, "made", [])
    run.main(["--device", "cpu", "--out", str(tmp_path), "--only", "serving", "--engines", "vllm"])
    [made] = FakeEngine.made
    assert made.options.random_weights and shapes[0]["num_experts_per_tok"] == 2
    [result] = results.load(EXPERIMENT, tmp_path)
    assert {(row.case["engine"], row.case["requests"]) for row in result.rows} == {("vllm", 1), ("vllm", 8)}


def test_a_missing_peer_is_an_error_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vllm"):
        run.main(["--device", "cpu", "--out", str(tmp_path), "--engines", "vllm"])


def test_the_reference_adds_the_block_of_normalized_tokens() -> None:
    model = run.random_model(run.MODELS["cpu"][1], torch.float64, torch.device("cpu"))
    mlp = model.layers[0].mlp
    x, norm = torch.randn(5, 64, dtype=torch.float64), torch.ones(64, dtype=torch.float64)
    want = x + mlp(rms_norm(x, norm, 1e-6))
    assert run.by_reference(x, mlp, 1e-6, norm) is x
    torch.testing.assert_close(x, want)
