"""Snapshots: what the page shows of an engine is what its page table says, and nothing is done while nobody looks."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.engine import LLMEngine
from mini_engine.errors import MiniEngineError
from mini_engine.llm import TextEngine
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving import live
from mini_engine.serving.engine_client import EngineClient
from mini_engine.serving.live import Speed, snapshots
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.snapshot import MAX_WAITING, Snapshot, take_snapshot
from mini_engine.serving.start import start_thread
from tests.helpers import GREEDY, double_model, in_a_thread, make_engine, make_text_engine
from tests.serving.conftest import Served
from tests.serving.test_server import post


def states_of(engine: LLMEngine) -> str:
    """The state of each page, found page by page."""
    table, tree = engine.page_table, engine.scheduler.prefix_tree
    rows = table.rows_of(engine.scheduler.running.order).tolist()
    num_owners = Counter(page for row in rows for page in table.pages(row).tolist())
    cached = set() if tree is None else set(tree.pages.tolist())

    def state(page: int) -> str:
        if num_owners[page]:
            return "s" if num_owners[page] > 1 else "o"
        return "c" if page in cached else "h" if table.refcounts[page] else "."

    return "".join(map(state, range(table.num_pages)))


def check(engine: LLMEngine) -> None:
    """A snapshot says of every request and every page what the engine's own bookkeeping says."""
    snapshot, table, running = take_snapshot(engine), engine.page_table, engine.scheduler.running
    assert [own.row for own in snapshot.running] == running.order.tolist()
    for own in snapshot.running:
        request = running.requests[own.row]
        rows = table.rows_of(np.array([own.row])).tolist()
        assert request is not None and (own.name, own.number) == (request.request_id, request.arrival)
        assert own.cells == [page for row in rows for page in table.pages(row).tolist()]
        assert (own.num_pages, own.computed) == (len(own.cells), running.num_computed[own.row])
        assert own.prompt == len(request.prompt_token_ids)
        assert own.output == len(running.known_tokens(request)) - own.prompt
    assert [own.name for own in snapshot.waiting] == [own.request_id for own in engine.scheduler.waiting][:MAX_WAITING]
    assert snapshot.num_waiting == len(engine.scheduler.waiting)
    assert snapshot.cells == states_of(engine)
    assert snapshot.num_free == snapshot.cells.count(".") == table.num_free_pages
    assert (snapshot.num_cached, snapshot.num_shared) == (snapshot.cells.count("c"), snapshot.cells.count("s"))
    json.dumps(snapshot.as_json())
    if table.num_groups == 1 and engine.config.sliding_window is None:  # all tokens of a request are in its pages
        for own in snapshot.running:
            assert sum(snapshot.filled.get(page, table.page_size) for page in own.cells) == own.computed
    for size in (2, 5, table.num_pages):
        few = take_snapshot(engine, max_cells=-(-table.num_pages // size))
        assert few.filled == {} or few.pages_per_cell == 1
        of_cells = [snapshot.cells[i : i + few.pages_per_cell] for i in range(0, table.num_pages, few.pages_per_cell)]
        assert few.cells == "".join(max(own, key=".chos".index) for own in of_cells)
        for own, whole in zip(few.running, snapshot.running, strict=True):
            assert set(own.cells) == {page // few.pages_per_cell for page in whole.cells}
            assert own.num_pages == whole.num_pages


@settings(max_examples=15)
@given(st.data(), st.sampled_from(["llama", "gemma2"]), st.booleans(), st.integers(0, 1))
def test_a_snapshot_says_what_the_page_table_says(data: st.DataObject, family: str, sharing: bool, depth: int) -> None:
    """Requests arrive, share prefixes, are preempted, leave windows behind, end, and are aborted."""
    prompts = data.draw(st.lists(st.lists(st.integers(3, 4), min_size=1, max_size=20), min_size=1, max_size=7))
    engine = make_engine(
        double_model(family), num_pages=16, page_size=2, max_batch_size=4, pipeline_depth=depth, max_model_len=30,
        enable_prefix_caching=sharing,
    )  # fmt: skip
    check(engine)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{i}", prompt, GREEDY)
        check(engine)
        if data.draw(st.booleans()):
            engine.step()
            check(engine)
    engine.abort(f"{data.draw(st.integers(0, len(prompts) - 1))}")
    while engine.has_unfinished:
        check(engine)
        engine.step()
    check(engine)
    assert set(take_snapshot(engine).cells) <= {".", "c"}


def test_groups_of_layers_have_all_their_pages_in_it() -> None:
    engine = make_engine(double_model("gemma2"), num_pages=40, page_size=2, max_num_batched_tokens=8)
    engine.add_request("long", [5, 6, 7] * 13, SamplingParams(max_tokens=21, ignore_eos=True))
    most = 0
    while engine.has_unfinished:
        engine.step()
        check(engine)
        most = max([most, *(own.num_pages for own in take_snapshot(engine).running)])
    assert engine.page_table.num_groups == 3 and most > -(-59 // 2)  # more pages than one group has


def test_the_speed_is_of_the_last_second() -> None:
    speed = Speed()
    assert speed.add(10.0, 100) == 0
    assert speed.add(10.5, 110) == 20
    assert speed.add(11.0, 130) == 30
    assert speed.add(11.5, 150) == 40  # since 10.5
    assert [speed.add(11.5 + i / 2, 150) for i in (1, 2, 3)] == [20, 0, 0]


# --- the stream -------------------------------------------------------------------------------------------------------


def next_event(answer: http.client.HTTPResponse) -> dict[str, Any]:
    """Read the next event of a stream."""
    while not (line := answer.readline()).startswith(b"data: "):
        assert line in (b"\n", b": ping\n") and line.isascii()
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return event


@pytest.fixture
def events(served: Served) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
    connection.request("GET", "/events")
    yield connection.getresponse()
    connection.close()


def test_events_come_when_something_changes(served: Served, events: http.client.HTTPResponse) -> None:
    assert events.status == 200 and (events.getheader("content-type") or "").startswith("text/event-stream")
    first = next_event(events)
    assert first["running"] == [] and set(first["cells"]) == {"."}
    assert len(first["cells"]) == first["num_pages"] == served.engine.engine.page_table.num_pages
    post(served, "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    while (event := next_event(events))["output_tokens"] < first["output_tokens"] + 3 or event["running"]:
        pass
    assert set(event["cells"]) == {"."}


def test_an_engine_that_rests_sends_pings(
    served: Served, events: http.client.HTTPResponse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_engine.serving.live.QUIET_SECONDS", 0.05)
    event = next_event(events)
    while event["tokens_per_second"]:  # of an earlier test
        event = next_event(events)
    while (line := events.readline()) != b": ping\n":
        assert line == b"\n"


def test_a_client_that_leaves_ends_its_stream(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def watched(engine: EngineClient) -> AsyncGenerator[dict[str, Any] | None, None]:
        try:
            async for snapshot in snapshots(engine):
                yield snapshot
        finally:
            ended.set()

    monkeypatch.setattr("mini_engine.serving.app.snapshots", watched)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    next_event(answer)
    answer.close()
    connection.close()
    assert ended.wait(30)


def test_an_engine_without_clients_of_its_stream_takes_no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Counter[str]()

    def counting(engine: LLMEngine) -> Snapshot:
        taken["snapshots"] += 1
        return take_snapshot(engine)

    monkeypatch.setattr(live, "take_snapshot", counting)

    async def run() -> None:
        client = start_thread(make_text_engine(double_model("llama"), num_pages=8), ServerOptions())
        client.start()
        pieces = [own async for own in client.stream([[3, 4, 5]], GREEDY, each_step=True)]
        assert pieces[-1][-1].output is not None and not taken
        several = snapshots(client)
        first = await anext(several)
        assert first is not None and first["output_tokens"] == GREEDY.max_tokens and taken["snapshots"] == 1
        await several.aclose()
        await client.close()

    in_a_thread(asyncio.run, run())


def test_the_stream_ends_when_the_server_does(new_server: Callable[..., Any]) -> None:
    with new_server() as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=600)
        connection.request("GET", "/events")
        answer = connection.getresponse()
        next_event(answer)
        served.client.drain()
        assert b"data: " not in answer.read()
        connection.close()


def num_steps(engine: TextEngine) -> int:
    return engine.engine.metrics.steps


def impossible(engine: TextEngine) -> float:
    return 1 / 0


def test_a_client_that_leaves_while_a_step_runs_does_no_harm() -> None:
    async def run() -> None:
        client = start_thread(make_text_engine(double_model("llama"), num_pages=8), ServerOptions())
        client.start()
        waiting = asyncio.ensure_future(client.read(num_steps))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(MiniEngineError, match="ZeroDivisionError"):
            await client.read(impossible)
        several = snapshots(client)
        first = await anext(several)
        assert first is not None and first["num_pages"] == 8
        await several.aclose()
        assert client.is_alive
        await client.close()
        assert not client.is_alive and [own async for own in snapshots(client)] == []

    in_a_thread(asyncio.run, run())
