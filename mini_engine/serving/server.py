"""Running the server: uvicorn, a socket, and the end on SIGTERM."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from types import FrameType
from typing import TypeVar

import uvicorn

from mini_engine.errors import ConfigError
from mini_engine.llm import TextEngine
from mini_engine.serving.app import create_app
from mini_engine.serving.engine_thread import EngineThread
from mini_engine.serving.options import ServerOptions

T = TypeVar("T")


def built_apart(build: Callable[[], T]) -> T:
    """Call a function on a thread that ends afterwards, and return its result.

    An engine must be built in this way if another thread steps it. OpenMP keeps a pool of threads for each thread that
    has computed something in parallel. With more threads than cores in all pools, libgomp lets them sleep instead of
    spin between two operations, and a decode step, which has hundreds of short ones, takes a third longer. A pool ends
    with its thread.

    Args:
        build: builds an engine. What it raises is raised here.
    """
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(build())
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=run, name="build", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    built = result.result()
    thread.join()
    return built


class Server(uvicorn.Server):
    """A server that refuses new and waiting requests once it has been told to end, and finishes the running ones.

    Args:
        config: of uvicorn.
        thread: the engine.
        on_ready: called with the address that the server listens on.
    """

    def __init__(self, config: uvicorn.Config, thread: EngineThread, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._engine_thread, self._on_ready = thread, on_ready

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; told twice, end at once. (uvicorn's own method would raise the signal again at the end.)"""
        self._engine_thread.drain()
        self.force_exit, self.should_exit = self.should_exit, True


def run_server(engine: TextEngine, model: str, options: ServerOptions, on_ready: Callable[[str], None]) -> None:
    """Serve an engine until SIGTERM or Ctrl-C.

    Args:
        engine: the engine.
        model: its name, unless the options have another.
        options: the server's options.
        on_ready: called with the address once requests are accepted.

    Raises:
        ConfigError: if the address cannot be used.
    """
    thread = EngineThread(engine, options.max_queued_requests, options.max_ttft_seconds)
    app = create_app(thread, options.served_model_name or model, options)
    config = uvicorn.Config(
        app, options.host, options.port, log_level="error", timeout_graceful_shutdown=options.shutdown_seconds
    )
    server = Server(config, thread, on_ready)
    try:
        server.run()
    except SystemExit as error:  # uvicorn has printed why
        raise ConfigError(f"cannot listen on {options.host}:{options.port}; choose another --port") from error
