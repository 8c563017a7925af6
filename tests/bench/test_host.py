"""The host benchmark steps the real engine, and what it prints is what it measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mini_engine.attention.backend import BACKENDS
from mini_engine.bench import host
from mini_engine.bench.options import BenchOptions
from mini_engine.bench.run import run_bench
from mini_engine.cli_options import EngineOptions


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("sharing", [False, True])
def test_every_timed_step_decodes_all_rows_while_the_queue_waits(depth, sharing):
    engine = host.make_engine(4, pipeline_depth=depth, num_waiting=9, prefix_sharing=sharing)
    assert engine.metrics.shared_tokens == (3 * host.SHARED_TOKENS if sharing else 0)
    contexts = []
    for _ in range(host.WARM_UP_STEPS + host.TIMED_STEPS):
        report = engine.step()
        assert report.is_decode and len(report.requests) == 4
        assert not report.schedule.admitted and not report.schedule.preempted and not report.finished
        contexts.append(int(report.step.num_computed.max()))
    assert len(engine.scheduler.waiting) == 9
    assert min(contexts) >= 384 and max(contexts) <= 620


def test_json_is_one_line_per_number_of_rows(monkeypatch):
    monkeypatch.setattr(host, "ROWS", (1, 2))
    monkeypatch.setattr(host, "CASES", host.CASES | {"queue_of_10000_us": {"num_waiting": 9}})
    out = io.StringIO()
    run_bench(Console(file=out, width=40), EngineOptions("", {}), BenchOptions(workload="host", json=True))
    first, second = map(json.loads, out.getvalue().splitlines())
    assert list(first) == ["rows", *host.CASES, "bound_us"]
    assert (first["rows"], first["bound_us"], second["rows"], second["bound_us"]) == (1, 60, 2, None)
    assert min(first[name] for name in host.CASES) > 0


def test_the_null_backend_is_not_offered():
    host.make_engine(1)
    assert "null" not in BACKENDS
