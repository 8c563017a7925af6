"""The cost of a run, counted by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from mini_engine.engine import LLMEngine
from mini_engine.models.base import CausalLM
from mini_engine.observe.metrics import Metrics, weight_bytes_per_step
from mini_engine.outputs import CompletionOutput, Piece, RequestOutput, StepReport
from mini_engine.request import Request
from mini_engine.roofline import Machine
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Schedule
from mini_engine.step_input import NO_COPIES, StepInput
from tests.helpers import GREEDY, double_model, make_engine, make_text_engine
from tests.models.families import our_model, transformers_model


def report(num_new: list[int], kv_lens: list[int], seconds: float) -> StepReport:
    """A step of requests, each with one page; a token's keys and values take 100 bytes."""
    lens, rows = np.array(kv_lens), np.arange(len(kv_lens))
    step = StepInput(
        rows=rows, num_new=np.array(num_new), num_logits=np.ones_like(rows), kv_lens=lens, num_computed=lens,
        token_ids=np.zeros(sum(num_new), dtype=np.int32), token_source=None, pages=rows.astype(np.int32),
        page_positions=None, admitted=(), num_decodes=len(rows), copies=NO_COPIES, levels=(),
    )  # fmt: skip
    requests = [
        Request(str(i), [5], SamplingParams(), seed=0, max_len=9, end_token_ids=(), arrival=i) for i in range(len(lens))
    ]
    schedule = Schedule(rows, np.array(num_new), sum(num_new))
    return StepReport(schedule, requests, step, [], np.zeros(0, dtype=np.int64), [], 0.0, seconds, 100)


def rows_of(metrics: Metrics, model: CausalLM, engine: LLMEngine) -> dict[str, str]:
    """What the table shows."""
    out = io.StringIO()
    machine = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
    Console(file=out, width=100).print(metrics.table(model, machine, engine))
    lines = [line.strip("│").split("│") for line in out.getvalue().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in lines}


def test_every_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model(transformers_model("llama", tie_word_embeddings=True))
    clock = iter([10.0, 10.25, 10.5, 11.0, 11.5])
    engine = make_engine(model)
    monkeypatch.setattr("mini_engine.observe.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    prompts, decodes = report([4, 3], [4, 3], 0.5), report([1, 1], [6, 4], 0.25)
    done = RequestOutput("", [5, 6, 7, 8], [CompletionOutput(0, "", [7, 7], "length")])
    refused = RequestOutput("", [], [CompletionOutput(0, "", [], "error")])
    for index, step, output in ((0, prompts, None), (1, prompts, None), (0, decodes, done), (1, decodes, None)):
        metrics.add(Piece(index, "", 1, output, step))
    metrics.add(Piece(2, "", 0, refused, None))
    assert metrics.first_token_seconds == {0: 0.25, 1: 0.5}
    assert metrics.output_token_seconds == {0: 0.75, 1: 1.0}
    assert metrics.summary() == "4 tokens, 8.0 tokens/s, first after 250 ms"
    weights = weight_bytes_per_step(model)
    assert rows_of(metrics, model, engine) == {
        "time to first token (median request)": "375.0 ms",
        "time per output token (median request)": "875.0 ms",
        "prompt tokens": "4",
        "output tokens": "4",
        "preemptions": "0",
        "decode, all requests together": "8.0 tokens/s",
        "weights read per token": f"{weights / 2 / 1e6:.1f} MB",
        "keys and values read per token": "0.00 MB",
        "bytes read per second": f"{(weights + 1000) / 0.25 / 1e9:.1f} GB/s",
        "measured bandwidth of a machine": "1.0 GB/s",
        "share of the bandwidth used": f"{(weights + 1000) / 0.25 / 1e9:.0%}",
    }


def test_the_time_per_output_token_is_the_mean_time_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests of 1, 2 and 4 tokens, whose pieces may hold several tokens or none."""
    clock = iter([0.0, 1.0, 2.0, 3.0, 6.0, 6.5, 14.0])
    monkeypatch.setattr("mini_engine.observe.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics()
    for index, num_tokens in ((0, 1), (1, 1), (2, 1), (1, 1), (2, 1), (0, 0), (2, 2)):
        metrics.add(Piece(index, "", num_tokens, None, None))
    assert metrics.first_token_seconds == {0: 1.0, 1: 2.0, 2: 3.0}
    assert metrics.output_token_seconds == {1: 4.0, 2: 11.0 / 3}


def test_requests_of_one_token_have_no_time_per_output_token() -> None:
    metrics, model = Metrics(), double_model("llama")
    assert not any("token (median" in name for name in rows_of(metrics, model, make_engine(model)))
    metrics.add(Piece(0, "", 1, None, None))
    shown = [name for name in rows_of(metrics, model, make_engine(model)) if "token (median" in name]
    assert shown == ["time to first token (median request)"]


def test_pages_that_run_short_show_in_the_table() -> None:
    """Requests that share a prefix, are preempted, and return; then another evicts their pages."""
    model, metrics = double_model("llama"), Metrics()
    text = make_text_engine(model, num_pages=12, page_size=2, max_batch_size=4, enable_prefix_caching=True)
    prompts = [[5, 9, 33, 7, 8, own] for own in (1, 2, 3)] + [[40 + i for i in range(9)]]
    for piece in text.stream_batch(prompts, replace(GREEDY, max_tokens=10)):
        metrics.add(piece)
    rows, totals = rows_of(metrics, model, text.engine), text.engine.metrics
    assert totals.preemptions > 0 and totals.evicted_pages > 0 and 0 < totals.hit_rate < 1
    assert rows["preemptions"] == str(totals.preemptions)
    assert rows["evicted pages"] == str(totals.evicted_pages)
    assert rows["hit rate"] == f"{totals.shared_tokens / totals.prompt_tokens:.0%}"
    assert rows["output tokens"] == "40"


def test_the_time_of_a_step_that_only_collects_counts() -> None:
    """At depth 1 the last call launches nothing."""
    metrics = Metrics()
    nothing = np.zeros(0, dtype=np.int64)
    last = StepReport(Schedule(nothing, nothing, 0), [], None, [], nothing, [], 0.0, 0.75, 100)
    for step in (report([1], [6], 0.25), last):
        metrics.add(Piece(0, "", 1, None, step))
    assert metrics.decode_rate == 1 / 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_read_as_the_lm_head(tied: bool) -> None:
    model = our_model(transformers_model("llama", dtype=torch.float64, tie_word_embeddings=tied))
    unread = 0 if tied else 61 * 32
    assert weight_bytes_per_step(model) == 8 * (sum(own.numel() for own in model.parameters()) - unread)
