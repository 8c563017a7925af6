"""The prediction by hand, the prompts, and the rows of each method on short outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from book import results
from book.embedded import write_embedded
from book.grading.chapter import load_module
from mini_engine import LLM, SamplingParams

EXPERIMENT = "17_speculation"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_prediction_by_hand() -> None:
    tokens = 1 + 0.9 + 0.81 + 0.729 + 0.6561 + 0.59049 + 0.531441
    assert f"{tokens:.2f} tokens a step" in run.predictions() and f"{tokens / 1.9:.2f}" in run.predictions()


def test_a_prompt_of_copy_ends_with_its_own_beginning() -> None:
    llm = LLM(run.MODEL, num_pages=20)
    for copy, free in zip(run.prompts(llm, run.COPY, 3), run.prompts(llm, run.FREE, 3), strict=True):
        assert len(free) == run.LENGTH and copy[: run.LENGTH] == free and copy[-run.FIRST :] == free[: run.FIRST]


def test_rows_of_each_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LENGTH": 24, "MAX_TOKENS": 12, "ROUNDS": {"cpu": 1}, "BATCHES": {"cpu": (2,)}}.items():
        monkeypatch.setattr(run, name, value)
    run.main(["--device", "cpu", "--out", str(tmp_path)])
    [result] = results.load(EXPERIMENT, tmp_path)
    for workload in (run.COPY, run.FREE):
        for method in run.METHODS["cpu"]:
            case = {"workload": workload, "requests": 2, "method": method}
            per_step = result.find("tokens of a step", **case).value  # the step of the prompts has tokens, too
            assert per_step == 2 if method == "none" else per_step >= 2
            assert result.find("tokens per second", **case).bound
            if method != "none":
                assert 0 <= result.find("equal outputs", **case).value <= 2


def test_other_engines_get_the_same_model(tmp_path: Path) -> None:
    llm = LLM(run.MODEL, dtype="bfloat16", device="cpu", warm_up=False, num_pages=20)
    write_embedded(llm, tmp_path)
    same = LLM(tmp_path, dtype="bfloat16", device="cpu", warm_up=False, num_pages=20)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [prompt] = run.prompts(llm, run.FREE, 1)
    given = {"prompt_token_ids": prompt[:20]}
    assert (
        llm.generate([given], params)[0].outputs[0].token_ids == same.generate([given], params)[0].outputs[0].token_ids
    )
