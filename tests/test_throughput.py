"""Every engine serves the same requests in full, with the same tokens."""

import io
from collections.abc import Sequence

import pytest
import torch
from rich.console import Console
from transformers import ContinuousBatchingConfig

from mini_engine.bench import load_transformers
from mini_engine.errors import ConfigError
from mini_engine.llm import LLM
from mini_engine.roofline import Machine
from mini_engine.throughput import (
    BLOCK,
    GPU,
    PEERS,
    Request,
    Serve,
    Workload,
    _table,
    least_seconds,
    measure,
    run_throughput,
    serve,
)

FEW = Workload(5, (3, 9), (2, 7), temperature=0.0)


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", device="cpu", num_pages=16)


@pytest.fixture(scope="module")
def theirs():
    return load_transformers("smollm2-135m-instruct", torch.float32, torch.device("cpu"))


def test_the_gpu_workload_is_nano_vllms():
    assert sum(params.max_tokens for _, params in GPU.requests()) == 133_966


def test_requests_are_the_same_every_time_and_within_their_lengths():
    requests = FEW.requests()
    assert requests == FEW.requests()
    assert len(requests) == 5
    assert len({len(prompt) for prompt, _ in requests}) > 1
    for prompt, params in requests:
        assert 3 <= len(prompt) <= 9 and 2 <= params.max_tokens <= 7 and params.ignore_eos


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_gives_our_tokens(llm, theirs, peer):
    requests = FEW.requests()
    ours, other = measure({"ours": serve(llm.engine), peer: PEERS[peer](theirs, 16)}, requests, rounds=1)
    assert (ours.engine, other.engine) == ("ours", peer)
    assert ours.equal == other.equal == 5
    assert ours.rate > 0 and other.rate > 0


def test_what_is_counted_by_hand(monkeypatch):
    """Three requests; the second engine writes another token in one of them, and takes twice the time."""
    requests = FEW.requests()[:3]
    seen: dict[str, list[int]] = {"one": [], "two": []}

    def answer(name: str, other: int) -> Serve:
        def run(given: Sequence[Request]) -> list[list[int]]:
            lengths = [params.max_tokens for _, params in given]
            seen[name].append(sum(lengths))
            return [[7] * (n - 1) + [7 if i else other] for i, n in enumerate(lengths)]

        return run

    clock = iter([0.0, 2.0, 0.0, 4.0])
    monkeypatch.setattr("mini_engine.bench.time.perf_counter", lambda: next(clock))
    one, two = measure({"one": answer("one", 7), "two": answer("two", 8)}, requests, rounds=1)
    tokens = sum(params.max_tokens for _, params in requests)
    assert (one.rate, two.rate, one.equal, two.equal) == (tokens / 2, tokens / 4, 3, 2)
    assert seen == {"one": [2 + 2 + 2, tokens], "two": [2 + 2 + 2, tokens]}  # a warm-up, then all of it
    out = io.StringIO()
    Console(file=out, width=80).print(_table([one, two], one.rate * 4, 3, "title"))
    first, second = (line for line in out.getvalue().splitlines() if " of 3" in line)
    assert "25%" in first and "3 of 3" in first and "1.00x" in first
    assert "12%" in second and "2 of 3" in second and "2.00x" in second


def test_the_bound_counts_prompts_too(llm):
    machine = Machine("a machine", "float32", bandwidth=1e12, flops=1e9)
    params = FEW.requests()[0][1]
    short, long = (least_seconds(llm.model.config, machine, [([1] * n, params)], 4) for n in (4, 40))
    assert long > 3 * short


def test_blocks_are_as_long_as_transformers_makes_them():
    """Named `block_size` up to 5.17, `page_size` since: the peer is not told, and its pool is counted in these."""
    config = vars(ContinuousBatchingConfig())
    assert (config.get("page_size") or config["block_size"]) == BLOCK


def test_an_engine_that_drops_tokens_is_not_measured(llm):
    with pytest.raises(AssertionError):
        measure({"ours": serve(llm.engine), "lazy": lambda requests: [[] for _ in requests]}, FEW.requests(), rounds=1)


def test_no_step_is_counted_for_requests_that_have_ended(llm):
    machine = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)

    def least(*outputs: int) -> float:
        requests = FEW.requests()[: len(outputs)]
        return least_seconds(
            llm.model.config,
            machine,
            [([1] * 4, params.__class__(max_tokens=n)) for (_, params), n in zip(requests, outputs, strict=True)],
            4,
        )

    one, two = least(2) - least(1), least(2, 2) - least(1, 1)
    assert 0 < one < two
    assert least(3, 1) - least(1, 1) < least(3, 3) - least(1, 1)


def test_mistakes_are_refused_before_any_work():
    options = {"model": "smollm2-135m-instruct", "attn_backend": "torch", "device": "cpu", "dtypes": ["float32"]}
    with pytest.raises(ConfigError, match="choose one of"):
        run_throughput(Console(), **options, peers=["nobody"], rounds=1)
    with pytest.raises(ConfigError, match="rounds"):
        run_throughput(Console(), **options, peers=[], rounds=0)


def test_the_table_fits_eighty_columns():
    out = io.StringIO()
    run_throughput(
        Console(file=out, width=80),
        model="smollm2-135m-instruct",
        attn_backend="torch",
        device="cpu",
        peers=list(PEERS),
        dtypes=["bfloat16"],
        rounds=1,
        workload=FEW,
    )
    for words in ("transformers-continuous", "of the bound", "5 of 5", "1.00x"):
        assert words in out.getvalue()
