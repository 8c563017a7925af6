"""Every engine serves the same requests in full, with the same tokens."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import ContinuousBatchingConfig

from book import results
from mini_engine.bench import run as module
from mini_engine.bench.options import WORKLOADS, BenchOptions
from mini_engine.bench.peers import BLOCK, PEERS, load_transformers, serve_mini_engine
from mini_engine.bench.run import TABLE, compare, config_for, measure, run_bench
from mini_engine.bench.workloads import (
    CPU,
    GPU,
    NAMED,
    SHARED_PREFIX,
    BenchRequest,
    Workload,
    batch_of,
    least_seconds,
    model_shape,
    num_outputs,
    with_other_tokens,
)
from mini_engine.cli_options import EngineOptions
from mini_engine.errors import ConfigError, RequestError
from mini_engine.llm import LLM
from mini_engine.models.config import ModelConfig
from mini_engine.roofline import Machine, device_name
from mini_engine.sampling_params import SamplingParams
from tests.models.families import transformers_config

FEW = Workload(5, (3, 9), (2, 7))
VOCAB = 49_152
MODEL = "smollm2-135m-instruct"
ARCHITECTURES = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"]},
    "gpt2": {"architectures": ["GPT2LMHeadModel"]},
}


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", device="cpu", num_pages=16, page_size=16)


@pytest.fixture(scope="module")
def theirs():
    return load_transformers(MODEL, torch.float32, torch.device("cpu"))


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


def test_other_tokens_share_what_the_tokens_shared_and_nothing_with_them():
    requests = Workload(4, (3, 9), (2, 7), shared=6).requests(61)
    shifted = with_other_tokens(requests, 3)
    assert [own.params for own in shifted] == [own.params for own in requests]
    assert len({tuple(own.prompt[:6]) for own in shifted}) == 1
    assert all(0 <= token < 61 for own in shifted for token in own.prompt)
    for one, other in zip(requests, shifted, strict=True):
        assert len(one.prompt) == len(other.prompt)
        assert all(a != b for a, b in zip(one.prompt, other.prompt, strict=True))


def test_every_workload_with_a_name_is_an_option_and_fits_its_model():
    assert ("batches", *NAMED, "host") == WORKLOADS
    for devices in NAMED.values():
        assert devices["cpu"].longest <= 8192 and devices["cuda"].longest <= 40_960  # the embedded model, Qwen3-0.6B


def test_the_options_that_a_workload_asks_for_are_defaults():
    config = config_for({"device": "cpu"}, [SHARED_PREFIX])
    assert (config.max_batch_size, config.max_model_len, config.enable_prefix_caching) == (64, 4096 + 64 + 128, True)
    config = config_for({"enable_prefix_caching": False, "max_batch_size": 8, "device": "cpu"}, [SHARED_PREFIX])
    assert (config.max_batch_size, config.enable_prefix_caching) == (8, False)
    assert config_for({"device": "cpu"}, [GPU]).enable_prefix_caching is False


def test_a_batch_varies_around_its_average():
    assert [len(prompt) for prompt, _ in batch_of(1, 64, 8).requests(VOCAB)] == [64]
    lengths = [len(prompt) for prompt, _ in batch_of(200, 64, 8).requests(VOCAB)]
    assert sum(lengths) / 200 == pytest.approx(64, rel=0.1) and min(lengths) < 40 and max(lengths) > 88


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_gives_our_tokens(llm, theirs, peer):
    requests = FEW.requests(VOCAB)
    serve = {"ours": partial(serve_mini_engine, llm.engine), peer: partial(PEERS[peer], theirs, 16)}
    ours, other = measure(serve, requests, rounds=1)
    assert (ours.engine, other.engine) == ("ours", peer)
    assert ours.equal == other.equal == 5
    assert ours.rate > 0 and other.rate > 0


def test_every_peer_samples_with_the_filters_of_the_workload(llm, theirs):
    """With a temperature, and only the likeliest token left, every engine's tokens are the greedy ones."""
    requests = FEW.requests(VOCAB)
    greedy = serve_mini_engine(llm.engine, requests)
    filtered = [BenchRequest(prompt, replace(params, temperature=1.0, top_k=1)) for prompt, params in requests]
    for serve in (partial(serve_mini_engine, llm.engine), *(partial(peer, theirs, 16) for peer in PEERS.values())):
        assert serve(filtered) == greedy


def test_a_request_that_is_refused_is_not_measured(llm):
    with pytest.raises(RequestError, match="shorten"):
        serve_mini_engine(llm.engine, [BenchRequest([5] * 9000, SamplingParams())])


@dataclass
class Fake:
    """Answers with the same token throughout, but ends the first request with `last`."""

    last: int
    served: list[int] = field(default_factory=list)

    def __call__(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        lengths = [params.max_tokens for _, params in requests]
        self.served.append(sum(lengths))
        return [[7] * (n - 1) + [7 if i else self.last] for i, n in enumerate(lengths)]


def test_what_is_counted_by_hand(monkeypatch):
    """Three requests; the second engine gives another token in one of them, and takes twice the time."""
    requests = FEW.requests(VOCAB)[:3]
    clock = iter([0.0, 2.0, 0.0, 4.0])
    monkeypatch.setattr("mini_engine.bench.run.time.perf_counter", lambda: next(clock))
    servers = {"one": Fake(7), "two": Fake(8)}
    one, two = measure(servers, requests, rounds=1)
    tokens = sum(params.max_tokens for _, params in requests)
    assert (one.rate, two.rate, one.equal, two.equal) == (tokens / 2, tokens / 4, 3, 2)
    assert all(server.served == [2 + 2 + 2, tokens] for server in servers.values())  # a warm-up, then all of it


def test_every_second_round_is_in_reverse_order():
    served: list[str] = []

    def server(name: str) -> Callable[[Sequence[BenchRequest]], list[list[int]]]:
        return lambda requests: served.append(name) or [[7] * params.max_tokens for _, params in requests]

    measured = measure({name: server(name) for name in "ab"}, FEW.requests(VOCAB)[:1], rounds=3)
    assert "".join(served) == "ab" + "ab" + "ba" + "ab"  # the warm-up first
    assert [own.engine for own in measured] == ["a", "b"]


ROW = {
    "dtype": "bfloat16", "attn_backend": "torch", "requests": 256, "engine": "transformers-continuous",
    "seconds": 123.4, "tokens_per_s": 88888, "min_tokens_per_s": 88000, "max_tokens_per_s": 89000,
    "bound_tokens_per_s": 90000,
    "share_of_bound": 0.99, "equal": 256, "ratio": 1.25,
}  # fmt: skip


def printed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    monkeypatch.setattr(module, "compare", lambda *_: [ROW, ROW | {"equal": None}])
    out = io.StringIO()
    run_bench(Console(file=out, width=80), EngineOptions("a model", {"device": "cpu"}), BenchOptions(**options))
    return out.getvalue()


def test_the_table_has_the_values_of_the_rows_and_fits_eighty_columns(monkeypatch):
    first, second = (line.split() for line in printed(monkeypatch).splitlines()[-2:])
    assert first == [str(ROW[name]) for name in TABLE] and second == first[:-1]
    assert TABLE[-1] == "equal" and ROW.keys() - set(TABLE) == {"dtype", "attn_backend", "ratio"}


def test_json_is_one_row_per_line(monkeypatch):
    assert list(map(json.loads, printed(monkeypatch, json=True).splitlines())) == [ROW, ROW | {"equal": None}]


def test_the_file_is_one_that_the_book_reads(monkeypatch, tmp_path):
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    printed(monkeypatch, workload="latency", out=folder / "a.json", rounds=5)
    read = results.read(folder / "a.json")
    assert read.device == device_name("cpu") and read.versions["torch"] == metadata.version("torch")
    assert read.parameters == {"model": "a model", "rounds": 5, "device": "cpu"}
    rate, seconds = read.rows[:2]
    assert rate.case["workload"] == "latency" and (rate.value, rate.spread) == (88888, [88000, 89000])
    assert rate.share_of_bound == pytest.approx(seconds.share_of_bound)
    assert seconds.spread[0] < seconds.value == 123.4 < seconds.spread[1]


def test_a_file_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        printed(monkeypatch, out=tmp_path / "nowhere" / "a.json")


def test_a_file_that_cannot_be_written_costs_no_measurement(monkeypatch, tmp_path):
    out, options = io.StringIO(), EngineOptions("a model", {"device": "cpu"})
    monkeypatch.setattr(module, "compare", lambda *_: [ROW])
    with pytest.raises(ConfigError, match="cannot write"):
        run_bench(Console(file=out), options, BenchOptions(json=True, out=tmp_path / "nowhere" / "a.json"))
    assert json.loads(out.getvalue()) == ROW


def test_a_name_cannot_change_the_table_or_the_file(monkeypatch, tmp_path):
    """Brackets are not markup, control characters are not sent, and a path need not be UTF-8."""
    monkeypatch.setattr(module, "compare", lambda *_: [ROW])
    out, file = io.StringIO(), tmp_path / "a.json"
    options = EngineOptions("a [/b] \x1b[2J \udcff", {"device": "cpu"})
    run_bench(Console(file=out, width=80), options, BenchOptions(out=file))
    assert "a [/b]" in out.getvalue() and "\x1b" not in out.getvalue()
    assert json.loads(file.read_text())["parameters"]["model"] == options.model


def test_slow_rates_are_recorded_to_four_digits(monkeypatch, tmp_path):
    rates = {name: module.rounded(1 / seconds) for name, seconds in (("tokens_per_s", 27), ("min_tokens_per_s", 28))}
    slow = ROW | rates | {"max_tokens_per_s": module.rounded(1 / 26), "bound_tokens_per_s": 0.5, "seconds": 27.0}
    monkeypatch.setattr(module, "compare", lambda *_: [slow])
    run_bench(Console(file=io.StringIO()), EngineOptions("a model", {}), BenchOptions(out=tmp_path / "a.json"))
    seconds = json.loads((tmp_path / "a.json").read_text())["rows"][1]
    assert seconds["bound"] == pytest.approx(2, rel=1e-3) and seconds["spread"] == pytest.approx([26, 28], rel=1e-3)


def test_the_file_has_the_lengths_of_a_batch(monkeypatch, tmp_path):
    printed(monkeypatch, out=tmp_path / "a.json", prompt_tokens=5, max_tokens=7)
    parameters = json.loads((tmp_path / "a.json").read_text())["parameters"]
    assert (parameters["prompt_tokens"], parameters["max_tokens"]) == (5, 7)


def test_no_workload_shares_a_prefix_with_an_earlier_one(monkeypatch):
    measured = []

    def measure(serve, requests, rounds):
        measured.extend(with_other_tokens(requests, one) for one in range(1, rounds + 1))
        return [module.Measurement(name, 1.0, 0, (1.0, 1.0)) for name in serve]

    monkeypatch.setattr(module, "measure", measure)
    options = EngineOptions(MODEL, {"attn_backend": "torch", "device": "cpu", "dtype": "float32"})
    compare(Console(file=io.StringIO()), options, [batch_of(2, 20, 2), batch_of(3, 20, 2)], rounds=2)
    begins = [{tuple(prompt[:4]) for prompt, _ in requests} for requests in measured]
    assert len(begins) == 4 and len(set.union(*begins)) == sum(map(len, begins))


def test_a_peer_reads_no_gguf_file(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").touch()
    checkpoint = replace(module.open_checkpoint(MODEL), path=tmp_path / "model.gguf")
    monkeypatch.setattr(module, "open_checkpoint", lambda name: checkpoint)
    with pytest.raises(ConfigError, match="give a folder, or leave out --peer"):
        compare(Console(), EngineOptions("model.gguf", {}), [FEW], ["transformers"])


def test_a_limit_below_the_longest_request_is_refused():
    with pytest.raises(ConfigError, match="max_model_len is 12, but a prompt and its output may have 16 tokens"):
        compare(Console(), EngineOptions(MODEL, {"max_model_len": 12, "device": "cpu"}), [FEW])


def test_the_bound_knows_gates_and_windows():
    def shape(family):
        return model_shape(ModelConfig.from_hf(transformers_config(family).to_dict() | ARCHITECTURES[family]))

    assert shape("llama").gated and not shape("gpt2").gated
    assert (shape("llama").windowed_layers, shape("gemma2").windowed_layers, shape("gemma2").window) == (0, 2, 5)


def test_the_bound_counts_prompts_too(llm):
    machine = Machine("a machine", "float32", bandwidth=1e12, flops=1e9)
    params = FEW.requests(VOCAB)[0].params
    short, long = (least_seconds(llm.model.config, machine, [BenchRequest([1] * n, params)], 4) for n in (4, 40))
    assert long > 3 * short


def test_blocks_are_as_long_as_transformers_makes_them():
    """The option is `block_size` up to 5.17 and `page_size` since, so the peer keeps the default, which this checks."""
    config = vars(ContinuousBatchingConfig())
    assert (config.get("page_size") or config["block_size"]) == BLOCK


def test_an_engine_that_drops_tokens_is_not_measured():
    with pytest.raises(AssertionError):
        measure({"fake": Fake(7), "lazy": lambda requests: [[] for _ in requests]}, FEW.requests(VOCAB), rounds=1)


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
        ({"workload": "everything"}, "choose one of: batches, .*, host"),
        ({"peer": ["nobody"]}, "choose one of"),
        ({"workload": "throughput", "peer": ["nobody"]}, "choose one of"),
        ({"peer": ["vllm"]}, "not installed in this Python environment"),
        ({"rounds": 0}, "rounds is 0"),
        ({"batch_size": [0]}, "batch_size is 0"),
        ({"prompt_tokens": -1}, "prompt_tokens is -1"),
        ({"prompt_tokens": 10**9}, "choose fewer prompt tokens"),
        ({"max_tokens": 10**9}, "fewer tokens to generate"),
        ({"batch_size": [10**9]}, "batch_size"),
    ],
)
def test_mistakes_are_refused_before_any_prompt_is_built(monkeypatch, options, message):
    monkeypatch.setattr(Workload, "requests", lambda *_: pytest.fail("prompts were built"))
    with pytest.raises(ConfigError, match=message):
        run_bench(Console(), EngineOptions(MODEL, {}), BenchOptions(**options))


def test_all_engines_in_one_comparison():
    options = EngineOptions(MODEL, {"attn_backend": "torch", "device": "cpu", "dtype": "float32"})
    ours, theirs = compare(Console(file=io.StringIO()), options, [FEW], ["transformers"], rounds=1)
    assert (ours["engine"], theirs["engine"]) == ("mini_engine", "transformers")
    assert ours["dtype"] == "float32" and ours["requests"] == ours["equal"] == theirs["equal"] == 5
    assert ours["ratio"] == 1.0 and theirs["ratio"] > 0 and ours["bound_tokens_per_s"] > 0
