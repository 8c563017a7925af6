"""Several processes that serve one engine: answers reach their own clients, and metrics are added up."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from multiprocessing.connection import Pipe
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from mini_engine import LLM
from mini_engine.errors import MiniEngineError
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import QueueFullError
from mini_engine.serving.engine_client import EngineClient
from mini_engine.serving.engine_loop import EngineLoop
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.start import ClientEnds
from tests.helpers import GREEDY, double_model, in_a_thread, make_text_engine
from tests.serving.conftest import MODEL, served_by_processes
from tests.serving.test_server import until
from tests.serving.test_start import tokens_of

SERVERS = 3


# --- one loop with several clients -----------------------------------------------------------------------------------


@contextmanager
def clients_of_one_loop(count: int, most: int = 100) -> Iterator[list[EngineClient]]:
    engine = make_text_engine(double_model("llama"), num_pages=64)
    pipes = [(Pipe(duplex=False), Pipe(duplex=False)) for _ in range(count)]
    unfinished = RawArray(ctypes.c_long, count)
    loop = EngineLoop(engine, [(for_loop, from_loop) for (for_loop, _), (_, from_loop) in pipes], unfinished)
    running = threading.Thread(target=loop.run, daemon=True)
    running.start()
    front = engine.front()
    yield [
        ClientEnds(front, commands, answers, unfinished, most, number).client()
        for number, ((_, commands), (answers, _)) in enumerate(pipes)
    ]
    running.join(300)
    assert not running.is_alive() and not engine.engine.requests


def test_each_client_gets_its_own_tokens() -> None:
    prompts = [[3 + i, 4, 5 + i] for i in range(12)]
    offline = make_text_engine(double_model("llama"), num_pages=64)
    want = [one.outputs[0].token_ids for one in offline.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)]
    with clients_of_one_loop(SERVERS) as clients:

        async def run() -> None:
            for client in clients:
                client.start()
            streams = [tokens_of(clients[i % SERVERS], prompt, GREEDY) for i, prompt in enumerate(prompts)]
            assert await asyncio.gather(*streams) == want
            for client in clients:
                await client.close()

        in_a_thread(asyncio.run, run())


def test_clients_share_one_limit() -> None:
    """Whichever of them has the outputs. Those of a client that has ended do not count."""
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with clients_of_one_loop(2, most=5) as (first, second):

        async def run() -> None:
            first.start()
            second.start()
            streams = [client.stream([[3, 4, 5]], long, each_step=True) for client in (second, first, first, first)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(QueueFullError, match="4 outputs run or wait, and 5 may"):
                await anext(second.stream([[6, 7]], replace(long, n=2), each_step=True))
            await first.close()
            await anext(second.stream([[6, 7]], replace(long, n=4), each_step=True))
            assert second.num_outputs == 5
            await second.close()

        in_a_thread(asyncio.run, run())


def test_a_client_that_ends_leaves_the_others() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with clients_of_one_loop(2) as clients:
        first, second = clients

        async def run() -> None:
            for client in clients:
                client.start()
            leaving = first.stream([[3, 4, 5]], long, each_step=True)
            await anext(leaving)
            going_on = asyncio.create_task(tokens_of(second, [6, 7], long))
            await first.close()
            with pytest.raises(MiniEngineError):
                async for _ in leaving:
                    pass
            assert len(await going_on) == 100 and second.is_alive and not first.is_alive
            await second.close()

        in_a_thread(asyncio.run, run())


def test_the_number_of_servers() -> None:
    assert ServerOptions(api_server_count=3).num_servers == 3
    assert 1 <= ServerOptions().num_servers <= max(1, (os.cpu_count() or 1) // 8)


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with served_by_processes("--max-batch-size=4", f"--api-server-count={SERVERS}") as running:
        yield running


def metrics_of(address: str) -> dict[str, float]:
    connection = HTTPConnection(urlsplit(address).netloc, timeout=300)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_streams_over_all_processes(process: tuple[subprocess.Popen[str], str], llm: LLM) -> None:
    _, address = process
    prompts = [f"Once upon a time, number {i}" for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    want = [one.outputs[0].text for one in llm.generate(prompts, params)]

    def ask(prompt: str) -> str:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        body: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True}
        return "".join(
            chunk.choices[0].text for chunk in client.completions.create(**body, extra_body={"ignore_eos": True})
        )

    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(ask, prompts)) == want
    for _ in range(2 * SERVERS):  # whichever process answers
        found = metrics_of(address)
        assert found["vllm:request_success_total"] == len(prompts)
        assert found["vllm:generation_tokens_total"] == 12 * len(prompts)
        assert found["vllm:time_to_first_token_seconds_count"] == len(prompts)


def test_the_others_answer_while_the_first_stands_still(process: tuple[subprocess.Popen[str], str]) -> None:
    serving, address = process
    serving.send_signal(signal.SIGSTOP)
    try:
        assert metrics_of(address)["vllm:num_requests_running"] == 0
    finally:
        serving.send_signal(signal.SIGCONT)


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sigterm_ends_all_processes(process: tuple[subprocess.Popen[str], str]) -> None:
    """It comes last: the processes finish what runs."""
    serving, address = process
    children = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
    assert len(children) >= SERVERS  # the engine's and the other servers
    clients = [openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) for _ in range(4)]
    streams = [
        client.completions.create(model=MODEL, prompt="Once", max_tokens=40, stream=True, temperature=0)
        for client in clients
    ]
    begun = [next(iter(stream)) for stream in streams]
    serving.send_signal(signal.SIGTERM)
    for first, stream in zip(begun, streams, strict=True):
        assert [first, *stream][-1].choices[0].finish_reason in ("length", "stop")
    assert serving.wait(120) == 0
    until(lambda: not any(map(is_running, children)))
