"""The experiment on latency under load: its predictions, and its rows from a small server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from book import results
from book.grading.chapter import load_module
from mini_engine.bench.load import VOCABULARY, Objective, Seen, token_body
from mini_engine.bench.workloads import BenchRequest, Workload
from mini_engine.errors import ConfigError
from mini_engine.loading.hub import embedded_folder
from mini_engine.roofline import Machine
from mini_engine.sampling_params import SamplingParams
from tests.experiments.fake_engine import FakeEngine
from tests.helpers import in_a_thread

EXPERIMENT = "21_latency_under_load"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")


def test_the_predictions_by_hand() -> None:
    printed = run.predictions()
    assert "| steps of the long prompt, 256 tokens each | 7 |" in printed  # six of each step's tokens are decodes
    assert "| steps of the long prompt, 64 tokens each | 27 |" in printed
    # A step reads 1.19 GB of weights, and of each request on average the keys and values of 512 tokens, 0.059 GB.
    assert round((1.19 + 256 * 0.059) / (1.19 + 0.059)) == 13  # and the prompts take a little, too
    assert "| time of 256 requests over that of one, bound of an H200 | 14.2 |" in printed


def test_words_are_the_tokens_that_they_are_said_to_be() -> None:
    words, tokenizer = run.Words.of_model(embedded_folder()), AutoTokenizer.from_pretrained(embedded_folder())
    assert len(words.of_token) > 1000

    @given(st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=40))
    def check(prompt: list[int]) -> None:
        [request] = words.spelled([BenchRequest(prompt, SamplingParams(max_tokens=1))])
        assert tokenizer(words.text_body(request)["prompt"])["input_ids"] == request.prompt
        assert len(request.prompt) == len(prompt)

    check()


class ClientsOfAThread:
    def __init__(self, count: int) -> None:
        pass

    def drive(self, address: str, requests: Any, arrivals: Any, body_of: Any = token_body) -> list[Seen]:
        at = run.At(tuple(arrivals.times(len(requests)).tolist()))
        return in_a_thread(run._drive, address, requests, at, body_of, time.perf_counter())

    def close(self) -> None:
        pass


def test_rows_of_all_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--max-batch-size=4", "--max-model-len=256", "--dtype=float32"
    small = run.Setting(
        Workload(3, (2, 3), (2, 3)), options, Objective(60.0, 60.0), 1, 96, 90, (32,), Workload(2, (2, 3), (2, 3)), 2,
        1, 2, (Workload(2, (4, 4), (3, 3)),),
    )  # fmt: skip
    monkeypatch.setitem(run.SETTINGS, "cpu", small)
    monkeypatch.setattr(run, "LOADS", (0.5,))
    monkeypatch.setattr(run, "ROUNDS", 1)
    monkeypatch.setattr(run, "Clients", ClientsOfAThread)
    run.main(["--device", "cpu", "--out", str(tmp_path), "--engines", "mini_engine", "transformers"])
    [result] = results.load(EXPERIMENT, tmp_path)
    for engine in ("mini_engine", "transformers"):
        case = {"load": 0.5, "engine": engine}
        answered, good = (result.find(figure, **case).value for figure in ("answered", "goodput"))
        assert answered == good > 0
        assert 0 < result.find("TTFT, p50", **case).value <= result.find("TTFT, p99", **case).value
    limited = {"tokens of a step": 32, "load": 0.8, "section": "chunks"}
    assert 0 < result.find("ITL, p50", **limited).value <= result.find("ITL, p99", **limited).value
    case = {"tokens of a step": 32}
    capacity = result.find("capacity", **case)
    assert capacity.value == capacity.bound and capacity.value > 0  # of the first limit
    assert result.find("longest pause of a stream", **case).value > 0
    assert result.find("TTFT of the long prompt", **case).value > 0
    ways = [result.find("throughput", section="overhead", way=way) for way in ("the engine alone", "its server")]
    assert ways[1].value > 0 and ways[1].bound == ways[0].value
    row = result.find("throughput", section="pareto", **{"batch size": 2})
    assert row.value > 0 and row.bound is not None


def test_each_engine_serves_every_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(run, "PeerProcess", FakeEngine)
    monkeypatch.setattr(run, "check_installed", lambda name: None)
    machine = Machine("a machine", "float32", bandwidth=1e12, flops=1e12)
    monkeypatch.setattr(run, "measure_machine", lambda device, dtype: machine)
    options = ["--device", "cpu", "--out", str(tmp_path), "--only", "pareto", "--engines", "mini_engine", "vllm"]
    run.main(options)
    [result] = results.load(EXPERIMENT, tmp_path)
    assert [(row.case["engine"], row.case["batch size"]) for row in result.rows] == [
        (engine, count) for engine in ("mini_engine", "vllm") for count in (1, 2, 4, 8, 16)
    ]
    ours, theirs = FakeEngine.made
    assert ours.options == theirs.options and ours.options.max_num_seqs == 16
    assert ours.served == theirs.served
    prompts = [tuple(own.prompt[:16]) for served in ours.served for own in served]  # a page of the prefix cache
    assert len(set(prompts)) == len(prompts)
    for row in result.rows:  # the fake's call number i takes 1 / i s; the first of four warms up
        count = row.case["batch size"]
        last = 4 * (1 + (1, 2, 4, 8, 16).index(count))
        assert row.value == pytest.approx(count * 64 * (last - 1))
        assert row.spread == pytest.approx((count * 64 * (last - 2), count * 64 * last))
        assert row.bound is not None


@pytest.mark.parametrize(
    ("section", "engine"), [("overhead", "vllm"), ("chunks", "vllm"), ("stall", "vllm"), ("pareto", "transformers")]
)
def test_an_engine_that_a_section_cannot_measure_is_refused(section: str, engine: str) -> None:
    with pytest.raises(SystemExit) as refused:
        run.main(["--device", "cpu", "--only", section, "--engines", engine])
    assert refused.value.code == 2


def test_an_engine_that_is_not_installed_is_refused_before_work_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PeerProcess", None)
    with pytest.raises(ConfigError, match="vllm"):
        run.main(["--device", "cpu", "--only", "pareto", "--engines", "vllm"])
