"""The experiment's predictions follow from the shape of the model and the assumed times."""

from __future__ import annotations

from pathlib import Path

from book.grading.chapter import load_module

EXPERIMENT = "12_persistent_layer"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand():
    printed = run.predictions()
    layer, lm_head = 2 * 1024 * (2 * 2048 + 2 * 1024 + 3 * 3072), 2 * 1024 * 151_936
    cache = 28 * 2 * 384 * 8 * 128 * 2
    assert f"| {(28 * layer + lm_head) / 1e9:.2f} GB |" in printed
    assert f"| {(28 * layer + lm_head + cache) / 4.3e6:.0f} µs, " in printed
    assert f"| {28 * 10 + lm_head / 4.3e6:.0f} µs, " in printed  # ten microseconds a layer
    assert f"| {28 * 0.05 + lm_head / 4.3e9:.2f} ms, " in printed  # ten kernels of 5 µs a layer
