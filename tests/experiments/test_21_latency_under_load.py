"""The experiment on latency under load: its predictions, and its rows from a small server."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.load import VOCABULARY, Objective
from mini_engine.bench.workloads import Workload
from mini_engine.loading.hub import embedded_folder
from tests.helpers import in_a_thread

EXPERIMENT = "21_latency_under_load"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert "| steps of the long prompt, 256 tokens each | 7 |" in printed  # six of each step's tokens are decodes
    assert "| steps of the long prompt, 64 tokens each | 27 |" in printed


def test_a_text_has_as_many_tokens() -> None:
    texts, tokenizer = run.TextBody.of_model(embedded_folder()), AutoTokenizer.from_pretrained(embedded_folder())
    assert len(texts.words) > 1000

    @given(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=40))
    def check(tokens: list[int]) -> None:
        assert len(tokenizer(texts.text(tokens))["input_ids"]) == len(tokens)

    check()


def test_rows_of_both_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--max-batch-size=4", "--max-model-len=256", "--dtype=float32"
    small = run.Setting(Workload(3, (2, 3), (2, 3)), options, Objective(60.0, 60.0), 1, 90, (32,))
    monkeypatch.setitem(run.SETTINGS, "cpu", small)
    monkeypatch.setattr(run, "LOADS", (0.5,))
    monkeypatch.setattr(run, "ROUNDS", 1)
    monkeypatch.setattr(run, "load_in_a_process", lambda *load: in_a_thread(run._drive, *load))
    run.main(["--device", "cpu", "--out", str(tmp_path), "--engines", "mini_engine", "transformers"])
    [result] = results.load(EXPERIMENT, tmp_path)
    for engine in run.ENGINES:
        case = {"load": 0.5, "engine": engine}
        answered, good = (result.find(figure, **case).value for figure in ("answered", "goodput"))
        assert answered == good > 0
        assert 0 < result.find("TTFT, p50", **case).value <= result.find("TTFT, p99", **case).value
    case = {"tokens of a step": 32}
    assert result.find("longest pause of a stream", **case).value > 0
    assert result.find("TTFT of the long prompt", **case).value > 0
