"""What a run cost, counted by hand."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from mini_engine.metrics import Metrics, num_parameters, weight_bytes_per_step
from mini_engine.outputs import Piece, RequestOutput, StepReport
from mini_engine.roofline import Machine
from mini_engine.scheduler import Schedule
from tests.models.families import our_model, transformers_model
from tests.test_scheduler import make_sequence


def report(num_new: list[int], seconds: float, kv_bytes: int) -> StepReport:
    """A step of sequences that have computed five tokens before, or none if they compute several now."""
    sequences = [make_sequence(5 if n == 1 else n, 9) for n in num_new]
    for sequence in sequences:
        sequence.num_computed = 5
    return StepReport(Schedule(sequences, num_new, [], [], []), [], 0.0, seconds, kv_bytes)


def test_every_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model(transformers_model("llama", tie_word_embeddings=True))
    clock = iter([10.0, 10.25, 10.5, 11.0, 11.5])
    monkeypatch.setattr("mini_engine.metrics.time.perf_counter", lambda: next(clock))
    metrics = Metrics(model)
    prompts, decodes = report([4, 3], 0.5, 999), report([1, 1], 0.25, 1000)
    for index, step in ((0, prompts), (1, prompts), (0, decodes), (1, decodes)):
        metrics.add(Piece(index, "", None, step))
    assert metrics.first_token_seconds == {0: 0.25, 1: 0.5}
    metrics.add(Piece(0, "", RequestOutput("", [5], [7], "", "length"), None))
    assert metrics.progress(2) == "1 of 2 requests done, 4 tokens, 8 tokens/s"
    out = io.StringIO()
    Console(file=out, width=100).print(metrics.table(Machine("a machine", "float32", bandwidth=1e9, flops=1e9)))
    rows = dict(
        [cell.strip() for cell in line.strip("│").split("│")] for line in out.getvalue().splitlines() if "│" in line
    )
    weights = weight_bytes_per_step(model)
    assert rows == {
        "time to first token (median request)": "500 ms",
        "prompt tokens": "7",
        "output tokens": "4",
        "decode, all requests together": "8.0 tokens/s",
        "weights read per token": f"{weights / 2 / 1e6:.1f} MB",
        "keys and values read per token": "0.00 MB",
        "bytes read per second": f"{(weights + 1000) / 0.25 / 1e9:.1f} GB/s",
        "measured bandwidth of a machine": "1.0 GB/s",
        "share of the bandwidth used": f"{(weights + 1000) / 0.25 / 1e9:.0%}",
    }


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_read_as_output_weights(tied: bool) -> None:
    model = our_model(transformers_model("llama", dtype=torch.float64, tie_word_embeddings=tied))
    unread = 0 if tied else 61 * 32
    assert weight_bytes_per_step(model) == 8 * (num_parameters(model) - unread)
