"""Every engine serves the same requests in full, with the same tokens."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from rich.console import Console
from transformers import ContinuousBatchingConfig

from mini_engine.bench.peers import BLOCK, PEERS, MiniEngine, load_transformers
from mini_engine.bench.run import (
    Comparison,
    Measurement,
    compare,
    comparison_table,
    json_lines,
    measure,
    num_outputs,
    run_bench,
)
from mini_engine.bench.workloads import CPU, GPU, BenchRequest, Workload, batch_of, least_seconds
from mini_engine.errors import ConfigError, RequestError
from mini_engine.llm import LLM
from mini_engine.roofline import Machine
from mini_engine.sampling_params import SamplingParams

FEW = Workload(5, (3, 9), (2, 7))
VOCAB = 49_152


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", device="cpu", num_pages=16, page_size=16)


@pytest.fixture(scope="module")
def theirs():
    return load_transformers("smollm2-135m-instruct", torch.float32, torch.device("cpu"))


def test_the_gpu_workload_is_nano_vllms():
    assert num_outputs(GPU.requests(VOCAB)) == 133_966


@pytest.mark.parametrize("workload", [FEW, CPU, batch_of(1, 5, 3), batch_of(4, 1, 2), batch_of(6, 10, 2)])
def test_requests_are_the_same_every_time_and_within_their_lengths(workload):
    requests = workload.requests(VOCAB)
    assert requests == workload.requests(VOCAB) and len(requests) == workload.num_requests
    for prompt, params in requests:
        assert workload.prompt[0] <= len(prompt) <= workload.prompt[1] and 0 <= min(prompt) <= max(prompt) < VOCAB
        assert workload.output[0] <= params.max_tokens <= workload.output[1] and params.ignore_eos
        assert len(prompt) + params.max_tokens <= workload.longest
    assert all(token < 7 for prompt, _ in workload.requests(7) for token in prompt)


def test_a_batch_varies_around_its_average():
    assert [len(prompt) for prompt, _ in batch_of(1, 64, 8).requests(VOCAB)] == [64]
    lengths = [len(prompt) for prompt, _ in batch_of(200, 64, 8).requests(VOCAB)]
    assert sum(lengths) / 200 == pytest.approx(64, rel=0.1) and min(lengths) < 40 and max(lengths) > 88


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_gives_our_tokens(llm, theirs, peer):
    requests = FEW.requests(VOCAB)
    ours, other = measure([MiniEngine(llm.engine, "ours"), PEERS[peer](theirs, 16)], requests, rounds=1)
    assert (ours.engine, other.engine) == ("ours", peer)
    assert ours.equal == other.equal == 5
    assert ours.rate > 0 and other.rate > 0


def test_a_request_that_is_refused_is_not_measured(llm):
    with pytest.raises(RequestError, match="shorten"):
        MiniEngine(llm.engine).serve([BenchRequest([5] * 9000, SamplingParams())])


@dataclass
class Fake:
    """Answers with one token, but in the first request ends with another."""

    name: str
    last: int
    served: list[int] = field(default_factory=list)

    def serve(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        lengths = [params.max_tokens for _, params in requests]
        self.served.append(sum(lengths))
        return [[7] * (n - 1) + [7 if i else self.last] for i, n in enumerate(lengths)]


def test_what_is_counted_by_hand(monkeypatch):
    """Three requests; the second engine gives another token in one of them, and takes twice the time."""
    requests = FEW.requests(VOCAB)[:3]
    clock = iter([0.0, 2.0, 0.0, 4.0])
    monkeypatch.setattr("mini_engine.bench.run.time.perf_counter", lambda: next(clock))
    servers = [Fake("one", 7), Fake("two", 8)]
    one, two = measure(servers, requests, rounds=1)
    tokens = sum(params.max_tokens for _, params in requests)
    assert (one.rate, two.rate, one.equal, two.equal) == (tokens / 2, tokens / 4, 3, 2)
    assert all(server.served == [2 + 2 + 2, tokens] for server in servers)  # a warm-up, then all of it


COMPARISON = Comparison(
    "bfloat16", "torch", 256, 400.0, "m", [Measurement("mini_engine", 100.0, 256), Measurement("other", 50.0, 2)]
)


def test_the_table_by_hand_fits_eighty_columns():
    long = Comparison("bfloat16", "torch", 256, 9e4, "m", [Measurement("transformers-continuous", 88888.8, 256)])
    out = io.StringIO()
    Console(file=out, width=80).print(comparison_table([COMPARISON, long], "title"))
    rows = [line.split() for line in out.getvalue().splitlines()[2:]]
    assert rows == [
        ["bfloat16", "256", "mini_engine", "100.0", "25%", "256", "of", "256", "1.00x"],
        ["bfloat16", "256", "other", "50.0", "12%", "2", "of", "256", "2.00x"],
        ["bfloat16", "256", "transformers-continuous", "88888.8", "99%", "256", "of", "256", "1.00x"],
    ]


def test_json_has_the_numbers_of_the_table():
    first, second = map(json.loads, json_lines([COMPARISON]))
    assert first | {"engine": "other", "tokens_per_s": 50.0, "equal_requests": 2} == second
    assert (first["engine"], first["bound_tokens_per_s"], first["requests"]) == ("mini_engine", 400.0, 256)


def test_the_bound_counts_prompts_too(llm):
    machine = Machine("a machine", "float32", bandwidth=1e12, flops=1e9)
    params = FEW.requests(VOCAB)[0].params
    short, long = (least_seconds(llm.model.config, machine, [BenchRequest([1] * n, params)], 4) for n in (4, 40))
    assert long > 3 * short


def test_blocks_are_as_long_as_transformers_makes_them():
    """Named `block_size` up to 5.17, `page_size` since: the peer is not told, and its pool is counted in these."""
    config = vars(ContinuousBatchingConfig())
    assert (config.get("page_size") or config["block_size"]) == BLOCK


class Lazy(Fake):
    def serve(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        return [[] for _ in requests]


def test_an_engine_that_drops_tokens_is_not_measured():
    with pytest.raises(AssertionError):
        measure([Fake("fake", 7), Lazy("lazy", 7)], FEW.requests(VOCAB), rounds=1)


def test_no_step_is_counted_for_requests_that_have_ended(llm):
    machine = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)

    def least(*outputs: int) -> float:
        requests = [BenchRequest([1] * 4, SamplingParams(max_tokens=n)) for n in outputs]
        return least_seconds(llm.model.config, machine, requests, 4)

    one, two = least(2) - least(1), least(2, 2) - least(1, 1)
    assert 0 < one < two
    assert least(3, 1) - least(1, 1) < least(3, 3) - least(1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "everything"}, "choose one of: batches, throughput, host"),
        ({"peers": ["nobody"]}, "choose one of"),
        ({"workload": "throughput", "peers": ["nobody"]}, "choose one of"),
        ({"rounds": 0}, "one round"),
        ({"dtypes": []}, "one dtype"),
        ({"dtypes": ["float7"]}, "unknown dtype"),
        ({"batch_sizes": [0]}, "1 or more"),
        ({"batch_sizes": []}, "1 or more"),
        ({"prompt_tokens": 10**9}, "choose fewer prompt tokens"),
        ({"max_tokens": 10**9}, "fewer tokens to generate"),
        ({"batch_sizes": [10**9]}, "max_batch_size"),
    ],
)
def test_mistakes_are_refused_before_any_prompt_is_built(monkeypatch, options, message):
    monkeypatch.setattr(Workload, "requests", lambda *_: pytest.fail("prompts were built"))
    with pytest.raises(ConfigError, match=message):
        run_bench(Console(), **options)


def test_all_engines_in_one_comparison():
    (own,) = compare(
        Console(file=io.StringIO()), [FEW], model="smollm2-135m-instruct",
        options={"attn_backend": "torch", "device": "cpu"}, parts=None, peers=["transformers"],
        dtypes=["float32"], rounds=1,
    )  # fmt: skip
    assert [m.engine for m in own.measured] == ["mini_engine", "transformers"]
    assert (own.dtype, own.num_requests) == ("float32", 5) and own.bound > 0
    assert all(m.equal == 5 for m in own.measured)
