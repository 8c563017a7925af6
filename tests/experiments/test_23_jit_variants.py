"""The experiment on variants: its predictions, and each variant's Python functions beside its oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from book import results
from book.grading.chapter import load_module

EXPERIMENT = "23_jit_variants"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert f"| {4 * 16 * 128 * (4096 * 4097 // 2) / 1e9:.1f} GFLOP |" in printed
    seen = sum(min(place + 1, 1024) + (min(4, place - 1023) if place >= 1024 else 0) for place in range(4096))
    assert f"| {seen / (4096 * 4097 // 2):.0%} |" in printed


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_every_variant_has_its_rows_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setitem(run.SHAPES, "cpu", run.Shape(192, 4, 2, 16, 24, torch.float32))
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    errors = [row.value for row in result.rows if row.unit == "absolute"]
    assert len(errors) == 5 and max(errors) < 1e-5
    causal, windowed = (result.find("run time", variant=name).bound for name in ("causal", "window and sinks"))
    assert windowed < causal


def test_the_struct_in_c_has_what_flashinfer_reads() -> None:
    """Each brace of a template must be doubled; a KeyError would come on a GPU only."""
    for variant in run.variants(run.SHAPES["cuda"], torch.device("cpu")):
        source = run.SOURCE.format(name="Variant", transform=variant.transform, mask=variant.mask or "return true;")
        assert source.count("{") == source.count("}") and variant.transform in source
        assert all(f"params.{name}[" in source for name, _ in variant.tensors)
