"""Every engine of the experiment serves every request, and its figures follow from what was measured."""

from functools import partial
from pathlib import Path

import pytest
from torch.nn import functional as F

from book.grading.chapter import load_module
from mini_engine.bench.peers import PEERS
from mini_engine.bench.run import Measurement
from mini_engine.bench.workloads import Workload
from mini_engine.roofline import Machine
from tests.models.families import our_model, transformers_model

EXPERIMENT = "05_throughput"
run = load_module(f"experiment_{EXPERIMENT}", Path(__file__).parents[2] / "experiments" / EXPERIMENT / "run.py")

FEW = Workload(4, (3, 9), (2, 7))


@pytest.fixture(scope="module")
def requests():
    return FEW.requests(vocab_size=61)


def test_engines_and_peers_give_the_same_tokens(requests):
    theirs = transformers_model("qwen3", seed=1)
    measured = run.compare(our_model(theirs), theirs, run.Comparison(FEW, ("torch",)), requests, rounds=1)
    assert [own.engine for own in measured] == ["mini_engine, torch", "mini_engine, torch, F.linear", *PEERS]
    assert all(own.equal == len(requests) and own.rate > 0 for own in measured)


def test_f_linear_replaces_every_product(requests, monkeypatch):
    ours, calls = our_model(transformers_model("qwen3", seed=1)), []
    monkeypatch.setattr(run.weights, "linear", lambda *args: calls.append(args) or F.linear(*args))
    engine = partial(run.serve_mini_engine, run.make_engine(ours, "torch", requests))
    expected, own_calls = engine(requests), len(calls)
    assert run.with_f_linear(engine)(requests) == expected
    assert own_calls > 0 and len(calls) == own_calls


def test_the_pool_holds_all_requests_to_their_ends(requests):
    engine = run.make_engine(our_model(transformers_model("qwen3", seed=1)), "torch", requests)
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished:
        assert not engine.step().schedule.preempted


def test_rows_by_hand(requests):
    config = our_model(transformers_model("qwen3", seed=1)).config
    machine = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
    measured = [
        Measurement("mini_engine, flex", 30.0, 4, (29.0, 31.0)),
        Measurement("transformers", 12.0, 3, (12.0, 12.0)),
    ]
    ours, theirs, ratio, equal = run.rows_of(measured, config, machine, requests, "few")
    assert (ours.value, theirs.value, ratio.value, equal.value, equal.bound) == (30.0, 12.0, 2.5, 3, 4)
    assert ours.bound == theirs.bound > 0
    assert (ours.spread, theirs.spread) == ((29.0, 31.0), (12.0, 12.0))
    assert ours.case == {"workload": "few", "engine": "mini_engine, flex", "dtype": "float32"}


def test_a_tokens_flops_are_two_for_each_weight():
    model = our_model(transformers_model("qwen3", seed=1))
    weights = {name: own.numel() for name, own in model.named_parameters() if own.ndim == 2}
    products = sum(size for name, size in weights.items() if "layers." in name)
    vocab = model.config.vocab_size * model.config.hidden_size
    assert run.flops_of_a_token(run.model_shape(model.config)) == (2 * products, 2 * vocab)


def test_transformers_serves_only_where_it_is_asked_to(requests):
    theirs = transformers_model("qwen3", seed=1)
    measured = run.compare(our_model(theirs), theirs, run.Comparison(FEW, ("torch",), peers=False), requests, rounds=1)
    assert {own.engine for own in measured}.isdisjoint(PEERS)
