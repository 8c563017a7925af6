"""A run with chunks, preemptions, a late request and an abort, recorded at both pipeline depths."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest

from mini_engine.observe.trace import Trace
from mini_engine.sampling_params import SamplingParams
from tests.helpers import WORDS, double_model, make_engine

PROMPTS = {"a": [5, 9, 33], "b": [7, 8], "c": [1, 60, 22, 18, 4], "d": [3] * 9, "gone": [4, 4]}
OUTPUT = 12
PAGE_SIZE, NUM_PAGES = 2, 12


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        trace: the recording.
        prompts: tokens of each request; "gone" is aborted.
        answers: what the engine sampled.
        depth: the engine's pipeline depth.
        num_outputs: tokens of each answer.
    """

    trace: Trace
    prompts: dict[str, list[int]]
    answers: dict[str, list[int]]
    depth: int
    num_outputs: int = OUTPUT


@pytest.fixture(scope="module", params=[0, 1], ids=["depth 0", "depth 1"])
def run(request: pytest.FixtureRequest) -> Run:
    trace = Trace(WORDS)
    engine = make_engine(
        double_model("llama"), num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_batch_size=4, max_num_batched_tokens=7,
        pipeline_depth=request.param, on_step=trace.record,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    engine.step()  # without requests: nothing to record
    for name, prompt in PROMPTS.items():
        if name != "d":
            engine.add_request(name, prompt, params)
    answers: dict[str, list[int]] = defaultdict(list)
    while engine.has_unfinished:
        report = engine.step()
        for sampled_by, token_id in zip(report.sampled_by, report.token_ids.tolist(), strict=True):
            answers[sampled_by.request_id].append(token_id)
        if len(trace.steps) == 3:
            engine.add_request("d", PROMPTS["d"], params)
        if len(trace.steps) == 5:
            engine.abort("gone")
    return Run(trace, PROMPTS, dict(answers), request.param)
