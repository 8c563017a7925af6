"""The core on an executor without a model: any schedule gives each request the tokens that it gets alone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mini_engine.executor import LocalExecutor, Ticket
from mini_engine.sampling_params import SamplingParams
from mini_engine.step_input import SampledTokens, StepInput
from tests.helpers import GREEDY, double_model, make_engine, serve

ROOT = Path(__file__).parent.parent
NUM_SCHEDULES = 2_000  # `python -m tests.random_schedules 10000` takes less than a minute


def test_tokens_do_not_depend_on_the_schedule_in_many_random_schedules() -> None:
    """In a process of its own, where no types are checked at each call."""
    script = [sys.executable, "-m", "tests.random_schedules", str(NUM_SCHEDULES)]
    result = subprocess.run(script, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    schedules, *seen = (int(word) for word in result.stdout.split())
    assert schedules == NUM_SCHEDULES and min(seen) > 30, "some kind of event is rare"


class Recorder:
    """An executor that keeps every step that it passes on."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor, self.steps, self.sampled = executor, list[bytes](), list[SampledTokens]()

    def launch(self, step: StepInput) -> Ticket:
        self.steps.append(pickle.dumps(step))
        return self.executor.launch(step)

    def collect(self, ticket: Ticket) -> SampledTokens:
        sampled = self.executor.collect(ticket)
        self.sampled.append(sampled)
        return sampled

    def reset(self) -> None:
        self.executor.reset()


@pytest.mark.parametrize("attn_backend", ["torch", "torch_padded", "cascade"])
@pytest.mark.parametrize("depth", [0, 1])
def test_recorded_steps_replay_on_another_executor(attn_backend: str, depth: int) -> None:
    """The arrays of a step are all that an executor needs: chunks, shared pages, preemption, penalties, logprobs."""
    model = double_model("qwen3")
    options = {
        "attn_backend": attn_backend, "num_pages": 9, "page_size": 4, "max_batch_size": 3, "pipeline_depth": depth,
        "max_num_batched_tokens": 6, "enable_prefix_caching": True,
    }  # fmt: skip
    engine, other = make_engine(model, **options), make_engine(model, **options)
    engine.core._executor = recorder = Recorder(engine.executor)
    params = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, max_tokens=12, ignore_eos=True)
    stem = list(range(3, 12))
    arrivals = {2 * i: [(str(i), [*stem, 20 + i], replace(params, seed=i))] for i in range(4)}
    arrivals[0].append(("greedy", [7, 8], replace(GREEDY, max_tokens=9, logprobs=2)))
    arrivals[3] = [("prompt", stem, replace(GREEDY, logprobs=0, prompt_logprobs=-1))]
    serve(engine, arrivals)
    assert engine.metrics.preemptions and engine.metrics.shared_tokens
    tickets = [other.executor.launch(pickle.loads(step)) for step in recorder.steps]
    replayed = [other.executor.collect(ticket) for ticket in tickets]
    assert {len(sampled.logprobs) for sampled in replayed} >= {0, 1, 2}
    for got, want in zip(replayed, recorder.sampled, strict=True):
        assert np.array_equal(got.tokens, want.tokens)
        for arrays, recorded in zip(got.logprobs, want.logprobs, strict=True):
            assert np.array_equal(arrays.token_ids, recorded.token_ids)
            assert np.array_equal(arrays.logprobs, recorded.logprobs) and np.array_equal(arrays.ranks, recorded.ranks)
