"""Every policy serves every request in full, and each batches as its name says."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from book import figures, results
from book.grading.chapter import load_module
from mini_engine.roofline import Machine, ModelShape
from tests.models.families import our_model, transformers_model

EXPERIMENT = "04_continuous_batching"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")

WORKLOAD = run.Workload(
    7, 1e6, (5, 10), (4, 8), 40, max_batch_size=2, budgets=(8, 80), attn_backend="torch_padded", page_size=16,
    load_requests=9, load_output=(2, 4),
)  # fmt: skip
REQUESTS = run.arrivals(WORKLOAD, 61)


@pytest.fixture(scope="module")
def model():
    return our_model(transformers_model("qwen3", seed=1))


def test_requests_arrive_in_order_and_are_the_same_every_time():
    assert run.arrivals(WORKLOAD, 61) == REQUESTS != run.arrivals(WORKLOAD, 61, seed=1)
    assert [len(request.prompt) == 40 for request in REQUESTS] == [i == WORKLOAD.long_index for i in range(7)]
    assert all(a.arrival < b.arrival for a, b in pairwise(REQUESTS))
    many = run.arrivals(replace(WORKLOAD, num_requests=2000, rate=5.0), 61)
    assert many[-1].arrival == pytest.approx(2000 / 5, rel=0.1)


@pytest.mark.parametrize("policy", ["static", "continuous", "continuous, chunked"])
def test_every_request_gets_its_tokens_after_it_arrived(model, policy):
    times = run.policies(run.make_engines(model, WORKLOAD), WORKLOAD)[policy](REQUESTS)
    assert [len(own) for own in times] == [request.num_tokens for request in REQUESTS]
    assert all(own == sorted(own) and own[0] > r.arrival for own, r in zip(times, REQUESTS, strict=True))
    for own in times:  # at most two at once
        assert sum(other[0] <= own[0] <= other[-1] for other in times) <= 2


def test_static_batches_follow_one_another(model):
    times = run.serve(run.make_engine(model, REQUESTS, WORKLOAD, 80), REQUESTS, static=True)
    ends: list[float] = []
    for first in sorted({own[0] for own in times}):
        batch = [own for own in times if own[0] == first]
        assert len(batch) <= 2 and all(first > end for end in ends)
        ends = [own[-1] for own in batch]


def test_a_request_joins_while_others_run(model):
    times = run.serve(run.make_engine(model, REQUESTS, WORKLOAD, 80), REQUESTS)
    joined = [a for a in times for b in times if b[0] < a[0] < b[-1]]
    assert joined


def test_chunks_let_others_go_on_beside_a_long_prompt(model):
    def tokens_beside(max_num_batched_tokens: int) -> int:
        """Tokens of other requests between the last one before the long prompt arrived and its own first token."""
        two = [run.Request(0.0, [5, 6], 12), run.Request(0.0, [7] * 40, 2)]
        first, long = run.serve(run.make_engine(model, two, WORKLOAD, max_num_batched_tokens), two)
        return sum(at < long[0] for at in first)

    assert tokens_beside(80) == 0  # both prompts in one step
    assert tokens_beside(8) == 5  # 6 of 40 tokens in the first step, then 7 beside each decode


def test_figures_of_one_policy_by_hand():
    requests = [run.Request(0.0, [1, 2], 3), run.Request(1.0, [1] * 9, 2)]
    times = [[0.5, 0.75, 4.0], [3.5, 4.0]]
    assert run.gap_beside(1, requests, times) == 3.25
    assert run.gaps(times[0]) == [0.25, 3.25]
    workload = replace(WORKLOAD, num_requests=2, rate=1.0, prompt=(2, 2), output=(2, 3), long_prompt=9)
    bound = {"run": 2.0, "decode": 0.1, "median": 0.2, "long": 0.3}
    value = {row.figure: row.value for row in run.rows_of("static", workload, requests, times, bound)}
    assert value["throughput"] == 5 / 4
    assert value["TTFT, median"] == 1.5
    assert value["TTFT of the long prompt"] == value["TTFT, slowest"] == 2.5
    assert value["ITL, median"] == 0.5


def test_the_requests_of_a_load_are_the_same_at_every_rate():
    slow, fast, at_once = (run.arrivals(run.at_load(WORKLOAD, rate), 61) for rate in (0.5, 2.0, math.inf))
    assert [i for i, request in enumerate(slow) if len(request.prompt) == 40] == [2, 7]
    for one, other, third in zip(slow, fast, at_once, strict=True):
        assert replace(one, arrival=0.0) == replace(other, arrival=0.0) == third
        assert one.arrival == pytest.approx(4 * other.arrival)


def test_loads_are_fractions_of_the_capacity():
    """An engine that gives every request its tokens two and three seconds after its arrival."""
    shape = run.ModelShape(16, 2, 4, 2, 8, 24, 50)
    slow = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
    seen = []

    def serve(budget, requests):
        seen.append((budget, requests))
        return [[2.0 + request.arrival, 3.0 + request.arrival] for request in requests]

    [capacity] = run.capacity_ways(shape, WORKLOAD, serve, slow).values()
    [row] = capacity()
    assert row.value == 9 / 3 and seen[0][0] == 80 and {request.arrival for request in seen[0][1]} == {0.0}
    found = [row for way in run.load_ways(shape, WORKLOAD, serve, row.value).values() for row in way()]
    assert [budget for budget, _ in seen[1:]] == [8, 80, 8, 80]
    half, full = seen[1][1], seen[3][1]
    assert half[-1].arrival == pytest.approx(2 * full[-1].arrival)
    assert full == run.arrivals(run.at_load(WORKLOAD, 3.0), shape.vocab_size)
    assert all(row.value == pytest.approx(2.0 if "TTFT" in row.figure else 1.0) for row in found)


def steps_of(times: run.Times) -> list[list[int]]:
    """The step of each token, among the steps that gave one."""
    steps = sorted({at for own in times for at in own})
    return [[steps.index(at) for at in own] for own in times]


def test_a_replay_schedules_like_the_engine(model):
    """Each request gets its tokens in the same order, whatever a step takes; here every request is there at once."""
    some = [replace(request, arrival=0.0) for request in REQUESTS]
    shape, machine = run.model_shape(model.config), Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
    for budget in WORKLOAD.budgets:
        mine = run.replayed(shape, WORKLOAD, some, budget, machine)
        theirs = run.serve(run.make_engine(model, some, WORKLOAD, budget), some)
        assert steps_of(mine) == steps_of(theirs)


def test_quantiles_by_hand():
    assert (
        run.quantile([3, 1, 2], 0.5) == 2 and run.quantile(range(201), 0.99) == 198 and run.quantile([4, 9], 1.0) == 9
    )


def test_no_run_is_faster_than_its_arrivals():
    shape = run.ModelShape(16, 2, 4, 2, 8, 24, 50)
    fast = Machine("a machine", "float32", bandwidth=1e15, flops=1e15)
    assert run.bounds(shape, WORKLOAD, REQUESTS, fast)["run"] == REQUESTS[-1].arrival - REQUESTS[0].arrival
    slow = run.bounds(shape, WORKLOAD, REQUESTS, Machine("a machine", "float32", bandwidth=1e6, flops=1e6))
    assert slow["run"] > sum(r.num_tokens for r in REQUESTS) / 2 * slow["decode"] > 0
    assert slow["long"] > slow["median"]


def test_what_is_recorded_can_be_drawn():
    recorded = results.load(EXPERIMENT)
    assert recorded
    readme = (Path(run.__file__).parent / "README.md").read_text(encoding="utf-8")
    for result in recorded:
        assert figures.to_svg(run.draw_policies(result)).startswith("<svg")
        if any(row.figure == run.CAPACITY for row in result.rows):
            assert figures.to_svg(run.draw_loads(result)).startswith("<svg")
            assert run.load_table(result.rows) in readme


def test_the_readme_predicts_what_run_derives():
    smollm2 = ModelShape(
        hidden_size=576,
        num_layers=30,
        num_qo_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
    )
    predicted = run.prediction(smollm2, run.CPU, run.ASSUMED)
    readme = (Path(run.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = readme.partition("| quantity | predicted |")[2].partition("\n\n")[0].splitlines()[2:]
    assert rows == [f"| {what} | {value} |" for what, value in predicted.items()]
    assert run.load_table(run.load_prediction(smollm2, run.CPU, run.ASSUMED)) in readme
