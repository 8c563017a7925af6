"""The prediction by hand, the prompts, and the rows of each method on short outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from book import results
from book.grading.chapter import load_module
from mini_engine import LLM

EXPERIMENT = "17_speculation"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_prediction_by_hand() -> None:
    tokens = 1 + 0.9 + 0.81 + 0.729 + 0.6561 + 0.59049 + 0.531441
    assert f"{tokens:.2f} tokens a step" in run.predictions() and f"{tokens / 1.9:.2f}" in run.predictions()


def test_a_prompt_of_copy_ends_with_its_own_beginning() -> None:
    llm = LLM(run.MODEL, num_pages=20)
    for copy, free in zip(run.prompts(llm, run.COPY, 3), run.prompts(llm, run.FREE, 3), strict=True):
        whole, piece = copy["prompt_token_ids"], free["prompt_token_ids"]
        assert len(piece) == run.LENGTH and whole[: run.LENGTH] == piece and whole[-run.FIRST :] == piece[: run.FIRST]


def test_rows_of_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTH": 24, "MAX_TOKENS": 12, "ROUNDS": 1, "BATCHES": {"cpu": (2,)}}.items():
        monkeypatch.setattr(run, name, value)
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    for workload in (run.COPY, run.FREE):
        for method in run.METHODS:
            case = {"workload": workload, "requests": 2, "method": method}
            per_step = result.find("tokens of a step", **case).value  # the step of the prompts has tokens, too
            assert per_step == 2 if method == "none" else per_step >= 2
            assert result.find("tokens per second", **case).bound
            if method != "none":
                assert 0 <= result.find("equal outputs", **case).value <= 2
