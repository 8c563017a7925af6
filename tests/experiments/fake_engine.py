"""An engine in its own process, as an experiment sees it, that answers at once."""

from __future__ import annotations

from typing import ClassVar

from mini_engine.bench.peer_process import PeerOptions
from mini_engine.bench.workloads import BenchRequest
from mini_engine.errors import PeerError


class FakeEngine:
    """Takes the place of `PeerProcess`, and keeps what it was asked for.

    Attributes:
        made: all engines since the list was replaced.
        fails: names of engines that cannot be loaded.
    """

    made: ClassVar[list[FakeEngine]] = []
    fails: ClassVar[set[str]] = set()
    ready_seconds = 2.0

    def __init__(self, name: str, options: PeerOptions) -> None:
        assert all(other.is_closed for other in self.made)  # each has the device to itself
        self.name, self.options, self.is_closed, self.seconds = name, options, False, 0.0
        self.served: list[list[BenchRequest]] = []
        if name in self.fails:
            raise PeerError(f"the peer {name} exited before it answered")
        self.made.append(self)

    def __call__(self, requests: list[BenchRequest]) -> list[list[int]]:
        self.served.append(requests)
        self.seconds = 1 / len(self.served)
        return [[0] * request.num_outputs for request in requests]

    def close(self) -> None:
        self.is_closed = True
