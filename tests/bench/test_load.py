"""The load generator: arrivals, measures, and streams of a real server and of broken ones."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine import SamplingParams
from mini_engine.bench.load import Arrivals, Objective, Report, Seen, drive, main
from mini_engine.bench.workloads import BenchRequest
from mini_engine.errors import PeerError
from tests.helpers import in_a_thread
from tests.serving.conftest import Served, llm, served

__all__ = ["llm", "served"]  # fixtures


@given(rate=st.floats(0.1, 100), burstiness=st.floats(0.2, 5), seed=st.integers(0, 99))
def test_arrivals_are_in_order_and_repeatable(rate: float, burstiness: float, seed: int) -> None:
    arrivals = Arrivals(rate, burstiness, seed)
    times = arrivals.times(50)
    assert times[0] == 0 and (np.diff(times) >= 0).all() and np.array_equal(times, arrivals.times(50))
    assert np.array_equal(times[:10], arrivals.times(10))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_and_the_spread_of_arrivals(burstiness: float) -> None:
    gaps = np.diff(Arrivals(8.0, burstiness, 3).times(20_000))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert not Arrivals(math.inf).times(9).any()


def test_what_clients_see() -> None:
    seen = [Seen(0.0, [1.0, 1.1, 1.4]), Seen(1.0, [1.5, 1.6]), Seen(2.0, [], "refused"), Seen(0.5, [2.0])]
    report = Report.of(seen, Objective(first=1.0, between=0.15))
    assert (report.num_requests, report.num_failed, report.seconds) == (3, 1, 2.0)
    assert report.tokens_per_second == 3.0 and report.goodput == 0.5  # only the second meets both
    assert report.first[0] == 1.0 and report.between[0] == pytest.approx(0.1)
    assert report.longest_gap[2] == pytest.approx(0.3, abs=0.01)
    with pytest.raises(PeerError, match="refused"):
        Report.of([Seen(0.0, [], "refused")], Objective(1.0, 1.0))


def test_a_load_on_a_server(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--rate 20 --num-requests 6 --prompt 4 8 --output 3 5"
    in_a_thread(main, ["--address", served.address, *load.split()])
    report = json.loads(capsys.readouterr().out)
    assert (report["num_requests"], report["num_failed"]) == (6, 0)
    assert report["tokens_per_second"] > 0 and all(report["first"])


def test_every_token_has_a_time(served: Served) -> None:
    requests = [BenchRequest([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=n)) for n in (1, 4)]
    seen = in_a_thread(asyncio.run, drive(served.address, requests, Arrivals(math.inf)))
    assert all(own.error is None for own in seen)
    assert all(own.times == sorted(own.times) and len(own.times) <= n for own, n in zip(seen, (1, 4), strict=True))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b'HTTP/1.1 200 OK\r\n\r\n1c\r\ndata: {"error": {"a": "b"}}\n\n\r\n0\r\n\r\n',
        b"HTTP/1.1 200 OK\r\n\r\nff\r\ndata: cut",
    ],
)
def test_broken_answers_are_failures(answer: bytes, closing_server: Callable[[bytes], str]) -> None:
    request = BenchRequest([5], SamplingParams(max_tokens=2))
    [seen] = in_a_thread(asyncio.run, drive(closing_server(answer), [request], Arrivals(math.inf)))
    assert seen.error is not None


@pytest.fixture
def closing_server() -> Callable[[bytes], str]:
    """Starts a server that gives one client an answer and ends the connection; its address."""

    def start(answer: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            connection, _ = listening.accept()
            with listening, connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    return start
