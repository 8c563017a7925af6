"""The live view of an engine: a stream of snapshots for as long as a client reads it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator

from mini_engine.errors import MiniEngineError
from mini_engine.llm import TextEngine
from mini_engine.serving.answers import Json
from mini_engine.serving.engine_client import QUIET_SECONDS, EngineClient
from mini_engine.serving.snapshot import Snapshot, take_snapshot

SECONDS_BETWEEN = 0.1


class Speed:
    """The tokens per second over the last second, from the number of tokens at several times."""

    def __init__(self) -> None:
        self._counts = deque[tuple[float, int]]()  # the last one before the second began, and those within it

    def add(self, seconds: float, num_tokens: int) -> float:
        """Add the number of tokens at a time, and return the tokens per second; 0 at first.

        Args:
            seconds: the time, later than before.
            num_tokens: tokens sampled so far.
        """
        self._counts.append((seconds, num_tokens))
        while len(self._counts) > 2 and self._counts[1][0] <= seconds - 1:
            self._counts.popleft()
        first_seconds, first_tokens = self._counts[0]
        elapsed = seconds - first_seconds
        return round((num_tokens - first_tokens) / elapsed, 1) if elapsed else 0.0


def snapshot_of(engine: TextEngine) -> Snapshot:
    """Take a snapshot, where the engine is."""
    return take_snapshot(engine.engine)


async def snapshots(engine: EngineClient) -> AsyncGenerator[Json | None, None]:
    """Yield a snapshot of the engine, and then another one whenever the engine has changed, until the server ends.

    The engine's loop takes a snapshot only when this generator asks for it, at most every `SECONDS_BETWEEN`. After a
    long time without a change, None is yielded.
    """
    speed, last, yielded = Speed(), Json(), time.monotonic()
    while engine.is_alive and not engine.is_draining:
        try:
            snapshot, now = await engine.read(snapshot_of), time.monotonic()
        except MiniEngineError:  # the engine has ended
            return
        value = snapshot.as_json() | {"tokens_per_second": speed.add(now, snapshot.output_tokens)}
        if value != last:
            last, yielded = value, now
            yield value
        elif now - yielded > QUIET_SECONDS:
            yielded = now
            yield None
        await asyncio.sleep(SECONDS_BETWEEN)
