"""A server on a free port of this machine, with the embedded model in float32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
import uvicorn

from mini_engine import LLM
from mini_engine.llm import TextEngine
from mini_engine.outputs import StepReport
from mini_engine.serving.app import create_app
from mini_engine.serving.engine_client import EngineClient
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.server import Server
from mini_engine.serving.start import start_thread

MODEL = "smollm2-135m-instruct"


@dataclass(eq=False)
class Served:
    """A running server.

    Attributes:
        address: where it listens, such as http://127.0.0.1:1234.
        engine: what it serves; a thread of this process steps it.
        client: the server's side of it.
    """

    address: str
    engine: TextEngine
    client: EngineClient

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def openai(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client, which does not try again unless asked to."""
        return openai.OpenAI(**{"base_url": f"{self.address}/v1", "api_key": "none", "max_retries": 0} | options)


@contextmanager
def serving(engine: TextEngine, options: ServerOptions | None = None) -> Iterator[Served]:
    """Serve an engine as `run_server` does, but on two threads of this process, which receive no signals."""
    options = replace(options or ServerOptions(), port=0)
    client = start_thread(engine, options)
    ready, addresses = threading.Event(), list[str]()

    def on_ready(address: str) -> None:
        addresses.append(address)
        ready.set()

    app = create_app(client, options.served_model_name or MODEL, options)
    config = uvicorn.Config(app, options.host, 0, log_level="critical", timeout_graceful_shutdown=5)
    server = Server(config, client, on_ready)
    running = threading.Thread(target=server.run)
    running.start()
    try:
        assert ready.wait(300), "the server does not start"
        yield Served(addresses[0], engine, client)
    finally:
        server.should_exit = True
        running.join(300)
        assert not running.is_alive() and not client.is_alive


@contextmanager
def served_by_processes(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `mini-engine serve`, and yield the process and the address."""
    command = [sys.executable, "-m", "mini_engine", "serve", MODEL, "--port=0", "--dtype=float32", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    lines = list[str]()
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            break
    else:
        pytest.fail("".join(lines))
    try:
        yield process, found[1]
    finally:
        process.kill()


@contextmanager
def held(served: Served) -> Iterator[None]:
    """Step the engine once and no further meanwhile, so that what runs does not end before the test has looked."""
    core, goes_on = served.engine.engine, threading.Event()
    step = core.step

    def step_and_wait() -> StepReport:
        report = step()
        goes_on.wait(300)
        return report

    core.step = step_and_wait
    try:
        yield
    finally:
        core.step = step
        goes_on.set()


@pytest.fixture(scope="session")
def llm() -> LLM:
    """For engines of its own, and for offline answers."""
    return LLM(MODEL, dtype="float32", device="cpu", max_batch_size=4, max_model_len=512, enable_prefix_caching=False)


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Served]:
    """A server with default options, for all tests that leave it as it was."""
    with serving(llm.with_options()) as running:
        yield running


@pytest.fixture
def new_server(llm: LLM) -> Callable[..., Any]:
    """Starts another server: `with new_server(options, **engine_options) as served`."""
    return lambda options=None, **changes: serving(llm.with_options(**changes), options)
