"""The experiment on latent attention: its predictions, and its rows on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from book import results
from book.grading.chapter import load_module

pytest.importorskip("triton")
EXPERIMENT = "19_mla"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert f"| {27 * 2 * (512 + 64):,} B; MHA {27 * 2 * 16 * (192 + 128):,} B, 8.9 times" in printed
    moved = 64 * 8192 * 576 * 2 + 64 * 16 * (576 + 512) * 2
    assert f"| {moved / 4.44e6:.0f} µs at the bandwidth |" in printed
    pairs = 16 * 1024 * 1025  # twice half of the pairs, for each head
    up = 2 * 1024 * 512 * 16 * 256
    assert f"| {(up + pairs * 320) / 1e9:.2f} GFLOP |" in printed
    assert f"| {(up + pairs * (576 + 512)) / 1e9:.1f} GFLOP, 2.3 times as many |" in printed


def test_rows_of_every_section(tmp_path: Path) -> None:
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    assert result.find("bytes of a token", cache="MLA").value == 3 * (32 + 16) * 4
    assert result.find("decode: a layer", way="torch", requests=3).bound
    whole, absorbed = (result.find("prompt: FLOPs of a layer", form=form) for form in ("un-absorbed", "absorbed"))
    assert whole.value < absorbed.value
    assert result.find("decode: tokens per second", way="torch_padded").value > 0
