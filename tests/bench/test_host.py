"""The host benchmark steps the real engine, and what it prints is what it measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from mini_engine.attention.backend import BACKENDS
from mini_engine.bench import host
from mini_engine.bench.run import run_bench


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
        contexts.append(int(report.num_computed.max()))
    assert len(engine.scheduler.waiting) == 9
    assert min(contexts) >= 384 and max(contexts) <= 620


def test_json_is_one_line_per_number_of_rows(monkeypatch):
    monkeypatch.setattr(host, "QUEUE", 9)
    out = io.StringIO()
    measured = host.run_host(Console(file=out, width=40), rows=(1, 2), as_json=True)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["rows"] for line in lines] == [1, 2]
    for line, own in zip(lines, measured, strict=True):
        assert line["host_us"] == round(own.host_us, 1) > 0 and line["bound_us"] == (60 if own.rows == 1 else None)
        assert min(line["depth_0"], line["queue"], line["prefix_sharing"]) > 0


def test_the_table_has_each_case_beside_its_bound(monkeypatch):
    monkeypatch.setattr(host, "host_time", lambda rows: host.HostTime(rows, 10.4, 9.0, 11.0, 12.0))
    out = io.StringIO()
    run_bench(Console(file=out, width=80), workload="host")
    rows = [line.strip("│").replace("│", " ").split() for line in out.getvalue().splitlines() if line.startswith("│")]
    assert rows[:4] == [
        ["1", "1", "0", "off", "10", "60"], ["1", "0", "0", "off", "9", "60"], ["1", "1", "10,000", "off", "11", "60"],
        ["1", "1", "0", "on", "12", "60"],
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["1"] * 4 + ["32"] * 4 + ["256"] * 4 and rows[-1][-1] == "300"


def test_the_null_backend_is_not_offered():
    host.make_engine(1)
    assert "null" not in BACKENDS
