"""A server on a free port of this machine, with the embedded model in float32."""

from __future__ import annotations

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
from mini_engine.serving.app import create_app
from mini_engine.serving.engine_thread import EngineThread
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.server import Server

MODEL = "smollm2-135m-instruct"


@dataclass(eq=False)
class Served:
    """A running server.

    Attributes:
        address: where it listens, such as http://127.0.0.1:1234.
        engine: what it serves; the server's thread steps it.
        thread: that thread.
    """

    address: str
    engine: TextEngine
    thread: EngineThread

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client, which does not try again unless asked to."""
        return openai.OpenAI(**{"base_url": f"{self.address}/v1", "api_key": "none", "max_retries": 0} | options)


@contextmanager
def serving(engine: TextEngine, options: ServerOptions | None = None) -> Iterator[Served]:
    """Serve an engine as `run_server` does, but on a thread, which receives no signals."""
    options = replace(options or ServerOptions(), port=0)
    thread = EngineThread(engine, options.max_queued_requests, options.max_ttft_seconds)
    ready, addresses = threading.Event(), list[str]()

    def on_ready(address: str) -> None:
        addresses.append(address)
        ready.set()

    app = create_app(thread, options.served_model_name or MODEL, options)
    config = uvicorn.Config(app, options.host, 0, log_level="critical", timeout_graceful_shutdown=5)
    server = Server(config, thread, on_ready)
    running = threading.Thread(target=server.run)
    running.start()
    try:
        assert ready.wait(30), "the server does not start"
        yield Served(addresses[0], engine, thread)
    finally:
        server.should_exit = True
        running.join(30)
        assert not running.is_alive() and not thread.is_alive


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
