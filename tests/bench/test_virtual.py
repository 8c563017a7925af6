"""Serving in virtual time: its clock by hand, its model of a step, and a real engine that takes the same steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.bench.virtual import StepCost, VirtualEngine, VirtualRequest
from mini_engine.sampling_params import SamplingParams
from mini_engine.waiting import POLICIES
from tests.helpers import double_model, make_engine

COST = StepCost(0.5, 0.01)


@given(fixed=st.floats(1e-4, 1), per_token=st.floats(1e-6, 0.1), sizes=st.sets(st.integers(1, 2000), min_size=2))
def test_the_cost_of_a_step_is_found_where_it_is_linear(fixed, per_token, sizes):
    tokens = np.array(sorted(sizes))
    found = StepCost.fit(tokens, fixed + per_token * tokens)
    for size in (1, 500, 5000):
        assert found(size) == pytest.approx(fixed + per_token * size, rel=1e-3)


def test_the_clock_by_hand():
    """Two requests share the second and third step; the last one arrives at an idle engine."""
    requests = [VirtualRequest(0.0, [5] * 10, 3), VirtualRequest(0.1, [6] * 4, 2), VirtualRequest(9.0, [7], 1)]
    run = VirtualEngine(COST).serve(requests)
    first = 0.5 + 0.1
    second = first + 0.5 + 0.05
    third = second + 0.5 + 0.02
    assert run.seen[0].times == pytest.approx([first, second, third])
    assert run.seen[1].times == pytest.approx([second, third])
    assert run.seen[2].times == pytest.approx([9.0 + 0.51])
    assert (run.num_steps, run.num_computed) == (4, 10 + 1 + 4 + 2 + 1)


@settings(deadline=None, max_examples=12)
@given(data=st.data(), policy=st.sampled_from(list(POLICIES)), max_overtakes=st.integers(0, 4))
def test_a_real_engine_takes_the_same_steps(data, policy, max_overtakes):
    """All arrive at once, so its order of tokens does not depend on how long its steps take."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=8))
    requests = [
        VirtualRequest(0.0, [5 + i] * prompt, output, 0, "ab"[i % 2]) for i, (prompt, output) in enumerate(sizes)
    ]
    options = {"num_pages": 12, "page_size": 4, "max_batch_size": 3, "max_num_batched_tokens": 16}
    run = VirtualEngine(COST, **options).serve(requests, POLICIES[policy](max_overtakes))
    engine = make_engine(
        double_model("qwen3"), pipeline_depth=0, scheduling_policy=policy, max_overtakes=max_overtakes, **options
    )
    for i, own in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=own.num_outputs, ignore_eos=True)
        engine.add_request(f"{i}", own.prompt, params, tenant=own.tenant)
    now, times = 0.0, {f"{i}": list[float]() for i in range(len(requests))}
    while engine.has_unfinished:
        report = engine.step()
        now += COST(report.num_tokens)
        for request in report.sampled_by:
            times[request.request_id].append(now)
    assert list(times.values()) == [own.times for own in run.seen]
    assert engine.metrics.computed_tokens == run.num_computed


def test_a_refused_request_has_an_error_and_the_others_are_served():
    requests = [VirtualRequest(float(i), [5] * 20, 10) for i in range(60)]
    free = VirtualEngine(COST, max_batch_size=2).serve(requests)
    limited = VirtualEngine(COST, max_batch_size=2).serve(requests, max_ttft_seconds=8.0)
    refused = [own.error is not None for own in limited.seen]
    assert not any(own.error for own in free.seen) and 0 < sum(refused) < 60
    assert all(len(own.times) == 10 * (own.error is None) for own in limited.seen)
    longest = max(own.first for own in limited.seen if own.error is None)
    assert longest < 0.5 * max(own.first for own in free.seen)
