"""Every policy serves every request in full, and each batches as its name says."""

from itertools import pairwise
from pathlib import Path

import pytest

from book import figures, results
from book.grading.chapter import load_module
from mini_engine.roofline import Machine, ModelShape
from tests.models.families import our_model, transformers_model

EXPERIMENT = "04_continuous_batching"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")

WORKLOAD = run.Workload(7, 1e6, (5, 10), (4, 8), 40, max_batch_size=2, chunk=8)
REQUESTS = run.arrivals(WORKLOAD, 61)


@pytest.fixture(scope="module")
def model():
    return our_model(transformers_model("qwen3", seed=1))


def test_requests_arrive_in_order_and_are_the_same_every_time():
    assert run.arrivals(WORKLOAD, 61) == REQUESTS != run.arrivals(WORKLOAD, 61, seed=1)
    assert [len(request.prompt) == 40 for request in REQUESTS] == [i == WORKLOAD.long_index for i in range(7)]
    assert all(a.arrival < b.arrival for a, b in pairwise(REQUESTS))
    many = run.arrivals(run.Workload(2000, 5.0, (5, 10), (4, 8), 40, 2, 8), 61)
    assert many[-1].arrival == pytest.approx(2000 / 5, rel=0.1)


@pytest.mark.parametrize("policy", run.policies(WORKLOAD))
def test_every_request_gets_its_tokens_after_it_arrived(model, policy):
    times = run.policies(WORKLOAD)[policy](model, REQUESTS)
    assert [len(own) for own in times] == [request.num_tokens for request in REQUESTS]
    assert all(own == sorted(own) and own[0] > r.arrival for own, r in zip(times, REQUESTS, strict=True))
    for own in times:  # at most two at once
        assert sum(other[0] <= own[0] <= other[-1] for other in times) <= 2


def test_static_batches_follow_one_another(model):
    times = run.serve_static(model, REQUESTS, 2)
    ends: list[float] = []
    for first in sorted({own[0] for own in times}):
        batch = [own for own in times if own[0] == first]
        assert all(first > end for end in ends)
        ends = [own[-1] for own in batch]


def test_a_request_joins_while_others_run(model):
    times = run.serve_continuous(model, REQUESTS, 2, 80)
    joined = [a for a in times for b in times if b[0] < a[0] < b[-1]]
    assert joined


def test_chunks_let_others_go_on_beside_a_long_prompt(model):
    def tokens_beside(max_num_batched_tokens: int) -> int:
        """Tokens of others between the last token before the long prompt came in and its own first."""
        two = [run.Request(0.0, [5, 6], 12), run.Request(0.0, [7] * 40, 2)]
        first, long = run.serve_continuous(model, two, 2, max_num_batched_tokens)
        return sum(at < long[0] for at in first)

    assert tokens_beside(80) == 0  # both prompts in one step
    assert tokens_beside(8) == 5  # 6 of 40 tokens in the first step, then 7 beside each decode


def test_figures_of_one_policy_by_hand():
    requests = [run.Request(0.0, [1, 2], 3), run.Request(1.0, [1] * 9, 2)]
    times = [[0.5, 0.75, 4.0], [3.5, 4.0]]
    assert run.gap_beside(1, requests, times) == 3.25
    assert run.gaps(times[0]) == [0.25, 3.25]
    workload = run.Workload(2, 1.0, (2, 2), (2, 3), 9, 2, 4)
    bound = {"run": 2.0, "decode": 0.1, "median": 0.2, "long": 0.3}
    value = {row.figure: row.value for row in run.rows_of("static", workload, requests, times, bound)}
    assert value["throughput"] == 5 / 4
    assert value["first token, median"] == 1.5
    assert value["first token of the long prompt"] == value["first token, slowest"] == 2.5
    assert value["between tokens, median"] == 0.5


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
    for result in recorded:
        assert figures.to_svg(run.draw_policies(result)).startswith("<svg")


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
