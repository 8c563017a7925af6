"""The options of a server; apart from the server, so that the command line need not import it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from mini_engine.errors import ConfigError, check_positive

METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # an environment variable of prometheus_client
MOST_SERVERS, CORES_OF_SERVER = 4, 8  # by default


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    Attributes:
        host: address to listen on; the default can be reached from this machine alone.
        port: port to listen on; 0 takes a free one.
        api_key: clients must send it as their bearer token; default none.
        chat_template: Jinja file to use instead of the model's chat template.
        served_model_name: name of the model for clients; default the model's own.
        api_server_count: processes that parse requests and write answers; they share the address. Default one for every
            eight cores, at least one and at most four.
        max_queued_requests: outputs that may wait for a place in the batch; more are refused with status 429.
        max_ttft_seconds: a request is refused with status 429 if its first token would take longer, as predicted from
            the tokens queued before it and the time of earlier steps; default none is refused for that.
        max_body_bytes: longest body of a request.
        shutdown_seconds: time in which running requests may end after SIGTERM.

    Raises:
        ConfigError: for a number out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    chat_template: Path | None = None
    served_model_name: str | None = None
    api_server_count: int | None = None
    max_queued_requests: int = 1024
    max_ttft_seconds: float | None = None
    max_body_bytes: int = 16 << 20
    shutdown_seconds: int = 30

    def __post_init__(self) -> None:
        check_positive(
            max_body_bytes=self.max_body_bytes, shutdown_seconds=self.shutdown_seconds,
            api_server_count=self.api_server_count,
        )  # fmt: skip
        for name, value, most in (("port", self.port, 65535), ("max_queued_requests", self.max_queued_requests, 10**9)):
            if not 0 <= value <= most:
                raise ConfigError(f"{name} is {value}; it must be 0 to {most}")
        if self.max_ttft_seconds is not None and not 0 < self.max_ttft_seconds < math.inf:
            raise ConfigError(f"max_ttft_seconds is {self.max_ttft_seconds}; give a number of seconds above 0")
        if self.api_key == "":
            raise ConfigError("api_key is empty; leave it out if clients need none")

    @property
    def num_servers(self) -> int:
        """Number of processes that serve requests."""
        if self.api_server_count is not None:
            return self.api_server_count
        return max(1, min(MOST_SERVERS, (os.cpu_count() or 1) // CORES_OF_SERVER))
