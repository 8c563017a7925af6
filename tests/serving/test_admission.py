"""SLO-aware admission: predictions against what then happens in virtual time, and refusals by a real server."""

from __future__ import annotations

import json
import statistics
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.bench import virtual
from mini_engine.bench.load import Arrivals
from mini_engine.bench.virtual import StepCost, VirtualEngine, VirtualRequest
from mini_engine.errors import ConfigError
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import Admission, QueueFullError, StepTime
from mini_engine.serving.options import ServerOptions
from mini_engine.waiting import DEFAULT_OVERTAKES, POLICIES
from tests.helpers import double_model, make_engine
from tests.serving.test_server import is_idle, open_stream, post, until


@given(
    fixed=st.floats(0.001, 1), per_token=st.floats(0, 0.1), decodes=st.lists(st.integers(1, 8), min_size=1),
    prompts=st.lists(st.integers(9, 500), min_size=1),
)  # fmt: skip
def test_the_time_of_steps_is_found_where_it_is_linear(fixed, per_token, decodes, prompts):
    step = StepTime()
    for tokens in decodes:
        step.add(tokens, fixed + per_token * tokens, is_decode=True)
    for tokens in prompts:
        step.add(tokens, fixed + per_token * tokens, is_decode=False)
    for _ in range(1000):  # a phase without prompts does not change what is known of them
        step.add(1, fixed + per_token, is_decode=True)
    assert step.per_prompt_token == pytest.approx(per_token, rel=1e-6, abs=1e-9)
    assert step.decode == pytest.approx(fixed + per_token, rel=1e-3, abs=1e-5)


class Recording(Admission):
    """Refuses nothing, and keeps what it predicts."""

    def __init__(self, predicted: list[float], *args) -> None:
        super().__init__(*args)
        self._predicted = predicted

    def check(self, scheduler, request) -> None:
        self._predicted.append(self.predict(scheduler, request))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_predicted_time_to_first_token_is_what_it_then_takes(policy, monkeypatch):
    """In virtual time, with random prompts and outputs that come in bursts, faster than they are served."""
    predicted = list[float]()
    monkeypatch.setattr(virtual, "Admission", partial(Recording, predicted))
    random = Random(1)
    requests = [
        VirtualRequest(
            at, [random.randrange(1000) for _ in range(random.randint(4, 120))], random.randint(4, 60),
            tenant=random.choice("ab"),
        )
        for at in Arrivals(5.0, 0.25, seed=2).times(300).tolist()
    ]  # fmt: skip
    chosen = POLICIES[policy](DEFAULT_OVERTAKES[policy])
    run = VirtualEngine(StepCost(0.04, 0.001), max_batch_size=8).serve(requests, chosen, 1e9)
    waits = [own.first for own in run.seen[50:]]  # by then, steps and outputs have been measured
    errors = [abs(guess - wait) for guess, wait in zip(predicted[50:], waits, strict=True)]
    middle = statistics.median(waits)
    deviations = [abs(middle - wait) for wait in waits]  # of a guess that knows only the median of the waits
    assert statistics.mean(errors) < 0.6 * statistics.mean(deviations)


def test_a_request_that_would_run_at_once_is_never_refused():
    engine = make_engine(double_model("qwen3"), max_batch_size=2, num_pages=64)
    admission = Admission(1e-9, 2)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for i in range(2):
        request = engine.add_request(f"{i}", [5] * 30, params)
        if i == 0:
            admission.check(engine.scheduler, request)
        report = engine.step()
        admission.stepped(engine.scheduler, report.num_tokens, 1.0, is_decode=report.is_decode)
    waiting = engine.add_request("2", [5] * 30, params)
    with pytest.raises(QueueFullError) as refused:
        admission.check(engine.scheduler, waiting)
    assert 1 <= refused.value.retry_after < 120


def test_a_wait_of_hours_is_told_as_less_than_two_minutes():
    engine = make_engine(double_model("qwen3"), max_batch_size=1, num_pages=64)
    admission = Admission(1.0, 1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.add_request("0", [5] * 30, params)
    for _ in range(2):
        report = engine.step()
        admission.stepped(engine.scheduler, report.num_tokens, 9999.0, is_decode=report.is_decode)
    with pytest.raises(QueueFullError) as refused:
        admission.check(engine.scheduler, engine.add_request("1", [5] * 30, params))
    assert refused.value.retry_after < 120


def test_a_server_refuses_what_would_wait_too_long_and_serves_the_rest(new_server):
    options = ServerOptions(max_ttft_seconds=1e-6)
    with new_server(options, max_batch_size=1) as served:
        body = {"prompt": "Once", "max_tokens": 4, "ignore_eos": True}
        assert post(served, "/v1/completions", body)[0] == 200, "nothing was ahead of it"
        stream = open_stream(served, {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True})
        until(lambda: len(served.engine.engine.scheduler.running) == 1)
        status, headers, answer = post(served, "/v1/completions", body)
        assert status == 429 and 0 < int(headers["retry-after"]) < 120
        assert json.loads(answer)["error"]["code"] == "queue_full"
        stream.close()
        until(lambda: is_idle(served))
        assert post(served, "/v1/completions", body)[0] == 200


def test_without_an_objective_requests_wait(new_server):
    with new_server(ServerOptions(), max_batch_size=1) as served:
        stream = open_stream(served, {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "stream": True})
        until(lambda: len(served.engine.engine.scheduler.running) == 1)
        assert post(served, "/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
        stream.close()


def test_priority_and_user_of_a_request_reach_the_engine(new_server):
    seen = list[tuple[int, str]]()
    with new_server(None, scheduling_policy="priority") as served:
        served.engine.engine._on_step = lambda _, report: seen.extend(
            (request.priority, request.tenant) for request in report.schedule.admitted
        )
        body = {"prompt": "Once", "max_tokens": 1, "priority": -3, "user": "a"}
        assert post(served, "/v1/completions", body)[0] == 200
        assert post(served, "/v1/completions", {"prompt": "Once", "max_tokens": 1, "priority": 0.5})[0] == 400
    assert seen == [(-3, "a")]
    with new_server(None) as served:
        status, _, answer = post(served, "/v1/completions", {"prompt": "Once", "priority": 1})
        assert status == 400 and "scheduling_policy" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_that_is_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match="max_ttft_seconds"):
        ServerOptions(max_ttft_seconds=seconds)
