"""Running the server: uvicorn, a socket, and the end on SIGTERM."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FrameType

import uvicorn

from mini_engine.errors import ConfigError
from mini_engine.serving.app import create_app
from mini_engine.serving.engine_client import EngineClient
from mini_engine.serving.options import ServerOptions


class Server(uvicorn.Server):
    """A server that refuses new and waiting requests once it has been told to end, and finishes the running ones.

    Args:
        config: of uvicorn.
        engine: the engine.
        on_ready: called with the address that the server listens on.
    """

    def __init__(self, config: uvicorn.Config, engine: EngineClient, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._engine, self._on_ready = engine, on_ready

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; told twice, end at once. (uvicorn's own method would raise the signal again at the end.)"""
        self._engine.drain()
        self.force_exit, self.should_exit = self.should_exit, True


def run_server(engine: EngineClient, model: str, options: ServerOptions, on_ready: Callable[[str], None]) -> None:
    """Serve an engine until SIGTERM or Ctrl-C.

    Args:
        engine: the engine.
        model: its name, unless the options have another.
        options: the server's options.
        on_ready: called with the address once requests are accepted.

    Raises:
        ConfigError: if the address cannot be used.
    """
    app = create_app(engine, options.served_model_name or model, options)
    config = uvicorn.Config(
        app, options.host, options.port, log_level="error", timeout_graceful_shutdown=options.shutdown_seconds
    )
    server = Server(config, engine, on_ready)
    gc.freeze()  # see `start_process`
    try:
        server.run()
    except SystemExit as error:  # uvicorn has printed why
        raise ConfigError(f"cannot listen on {options.host}:{options.port}; choose another --port") from error
