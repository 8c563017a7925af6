"""The predictions by hand, and the bits of a format with its scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from book.grading.chapter import load_module
from mini_engine.quantization import Format
from tests.models.families import our_model, transformers_model

EXPERIMENT = "14_fewer_bytes"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    layer = 960 * 576 + 576 * 576 + 3072 * 576  # in groups of 64
    down = 576 * 1536  # in groups of 128
    head = 49_152 * 576
    printed = run.predictions()
    assert f"{2 * (30 * (layer + down) + head) / 1e6:.0f} MB" in printed
    assert f"{(30 * (layer * 4.5 + down * 4.25) / 8 + head) / 1e6:.1f} MB" in printed


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (None, 16.0), (Format("int4", 1, 16), 5.0), (Format("int4", 1, 16, True), 6.0),
        (Format("int8", None, None), pytest.approx(8.0, abs=0.03)),
    ],
)  # fmt: skip
def test_the_bits_of_a_number(form: Format | None, bits: float) -> None:
    assert run.bits(our_model(transformers_model("llama")), form) == bits


def test_rounding_changes_the_layers_alone() -> None:
    theirs = transformers_model("llama")
    model, before = our_model(theirs), our_model(theirs)
    run.round_layers(model, Format("int4", 1, 16))
    assert torch.equal(model.embed_tokens, before.embed_tokens) and torch.equal(model.norm, before.norm)
    ours, theirs = model.layers[0].attention.qkv.weight, before.layers[0].attention.qkv.weight
    assert not torch.equal(ours, theirs) and (ours - theirs).abs().max() < theirs.abs().max() / 7
