"""Running the server: uvicorn, a socket, several processes that share it, and the end on SIGTERM."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.context import SpawnProcess
from types import FrameType

import uvicorn

from mini_engine.errors import ConfigError
from mini_engine.serving.app import create_app
from mini_engine.serving.engine_client import EngineClient
from mini_engine.serving.options import ServerOptions
from mini_engine.serving.start import ClientEnds


class Server(uvicorn.Server):
    """A server that refuses new and waiting requests once it has been told to end, and finishes the running ones.

    Args:
        config: of uvicorn.
        engine: the engine.
        on_ready: called with the address that the server listens on.
        others: processes that serve the same address, which end with this one.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: EngineClient,
        on_ready: Callable[[str], None],
        others: Sequence[SpawnProcess] = (),
    ) -> None:
        super().__init__(config)
        self._engine, self._on_ready, self._others = engine, on_ready, others

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; told twice, end at once. (uvicorn's own method would raise the signal again at the end.)"""
        self._engine.drain()
        self.force_exit, self.should_exit = self.should_exit, True
        for process in self._others:
            process.terminate()


def run_server(
    clients: Sequence[ClientEnds], model: str, options: ServerOptions, on_ready: Callable[[str], None]
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C.

    Args:
        clients: of the engine, one for each process that serves requests; this process is the first.
        model: its name, unless the options have another.
        options: the server's options.
        on_ready: called with the address once requests are accepted.

    Raises:
        ConfigError: if the address cannot be used.
    """
    own, *others = clients
    engine = own.client()
    config = _config(engine, model, options)
    try:
        listening, processes = config.bind_socket() if others else None, list[SpawnProcess]()
        if listening:
            start = partial(_start, model=model, options=options, listening=listening)
            with ThreadPoolExecutor() as pool:  # a start returns only when the process has imported what it needs
                processes += pool.map(start, others)
        server = Server(config, engine, on_ready, processes)
        gc.freeze()  # see `start_process`
        server.run(sockets=[listening] if listening else None)
    except SystemExit as error:  # uvicorn has printed why
        raise ConfigError(f"cannot listen on {options.host}:{options.port}; choose another --port") from error
    for process in processes:
        process.join()


def _config(engine: EngineClient, model: str, options: ServerOptions) -> uvicorn.Config:
    app = create_app(engine, options.served_model_name or model, options)
    return uvicorn.Config(
        app, options.host, options.port, log_level="error", timeout_graceful_shutdown=options.shutdown_seconds
    )


def _start(ends: ClientEnds, model: str, options: ServerOptions, listening: socket.socket) -> SpawnProcess:
    """Start another process that serves what it accepts from a socket."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_serve, args=(ends, model, options, listening), name=f"server {ends.number}", daemon=True
    )
    process.start()
    ends.commands.close()
    ends.answers.close()
    return process


def _serve(ends: ClientEnds, model: str, options: ServerOptions, listening: socket.socket) -> None:
    """What another process does, until the first one tells it to end, or has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = ends.client()
    server = _Other(_config(engine, model, options), engine, lambda address: None)
    first = multiprocessing.parent_process()
    assert first is not None

    def end_with_the_first() -> None:
        first.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_the_first, daemon=True).start()
    gc.freeze()
    server.run(sockets=[listening])


class _Other(Server):
    """A server in another process. Ctrl-C reaches all processes of a terminal, but the first one decides."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGINT:
            super().handle_exit(sig, frame)
