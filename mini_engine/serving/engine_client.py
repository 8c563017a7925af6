"""The event loop's side of the engine: requests go to the stepping loop through a pipe, and pieces come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from mini_engine.errors import MiniEngineError
from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import QueueFullError
from mini_engine.serving.engine_loop import Abort, Answer, Close, Drain, Read, Result, Sender, ShuttingDownError, Submit
from mini_engine.text_front import TextFront

T = TypeVar("T")
ENDED = "the engine has ended; its process may have printed why"
QUIET_SECONDS = 15.0  # after which a stream without pieces yields an empty list


Pieces = list[tuple[int, Piece]]  # each with the index of its prompt in the request


class Inbox:
    """What has arrived for one request and has not been taken."""

    def __init__(self) -> None:
        self.is_quiet = False
        self._arrived: Pieces = []
        self._error: MiniEngineError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, index: int, piece: Piece) -> None:
        """Add a piece of a prompt."""
        self._arrived.append((index, piece))
        self.is_quiet = False
        self.wake()

    def fail(self, error: MiniEngineError) -> None:
        """End the request, after the pieces that have arrived."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        """Let `take` return."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> Pieces:
        """Wait for pieces, and return all that have arrived; none after a long time.

        Raises:
            MiniEngineError: that ended the request.
        """
        if not self._arrived and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._arrived and self._error is not None:
            raise self._error
        arrived, self._arrived = self._arrived, []
        return joined(arrived)


def joined(pieces: Pieces) -> Pieces:
    """Join the pieces of each output, so that a client that is behind the engine gets fewer and longer ones."""
    if len(pieces) < 2:
        return pieces
    found: dict[tuple[int, int], Piece] = {}
    for index, piece in pieces:
        key = index, piece.completion
        found[key] = found[key].followed_by(piece) if key in found else piece
    return [(index, piece) for (index, _), piece in found.items()]


class EngineClient:
    """Serves requests of an event loop with an engine that steps elsewhere.

    Args:
        front: the engine's tokenizer and limits.
        commands: sends commands to an `EngineLoop`.
        answers: receives its answers.
        max_queued: outputs that may wait for a place in the batch. More are refused, because a client that is told at
            once can go elsewhere, while one in an endless queue waits for an answer that it has given up.

    Attributes:
        front: see above.
        is_alive: whether the engine runs.
        is_draining: whether the server is shutting down.
        num_outputs: outputs that are unfinished, waiting or running.
    """

    def __init__(self, front: TextFront, commands: Connection, answers: Connection, max_queued: int) -> None:
        self.front, self.is_alive, self.is_draining, self.num_outputs = front, True, False, 0
        self._most = front.max_batch_size + max_queued
        self._commands, self._answers = Sender(commands), answers
        self._numbers = count()
        self._inboxes: dict[int, tuple[Inbox, int]] = {}  # of each prompt, with its number in its request
        self._reading: dict[int, asyncio.Future[Any]] = {}

    def start(self) -> None:
        """Begin to receive; call it on the event loop that will use `stream`."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        self._timer = self._loop.call_later(QUIET_SECONDS, self._wake_quiet)

    async def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        each_step: bool,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncGenerator[Pieces, None]:
        """Serve the prompts of a request, and yield their pieces, all that have arrived at a time.

        The last piece of a prompt has its output. An empty list means that nothing has arrived for some time. Closing
        the generator ends the request.

        Args:
            prompts: the tokens of each.
            params: their parameters.
            each_step: yield text as it is generated, and not only when it has ended.
            priority: see `LLMEngine.add_request`.
            tenant: see `LLMEngine.add_request`.

        Raises:
            QueueFullError: if too many wait, or it would wait too long for its first token.
            ShuttingDownError: if the server is shutting down.
            RequestError: if a prompt cannot be served.
            MiniEngineError: if the engine has ended.
        """
        if self.is_draining:
            raise ShuttingDownError("the server is shutting down; send the request to another one")
        if not self.is_alive:
            raise MiniEngineError(ENDED)
        more = params.n * len(prompts)
        if self.num_outputs + more > self._most:
            raise QueueFullError(f"{self.num_outputs} outputs run or wait, and {self._most} may; send it again later")
        self.num_outputs += more
        inbox, numbers = Inbox(), [next(self._numbers) for _ in prompts]
        self._inboxes.update({number: (inbox, i) for i, number in enumerate(numbers)})
        left = len(prompts)
        try:
            for number, prompt in zip(numbers, prompts, strict=True):
                self._commands.send(Submit(number, prompt, params, each_step, priority, tenant))
            while left:
                pieces = await inbox.take()
                for _, piece in pieces:
                    if piece.output is not None:
                        left -= 1
                        if piece.output.error is not None:
                            raise piece.output.error
                yield pieces
        finally:
            self.num_outputs -= more
            for number in numbers:
                del self._inboxes[number]
                if left:
                    self._commands.send(Abort(number))

    async def read(self, function: Callable[[TextEngine], T]) -> T:
        """Call a function with the engine between two steps, where it runs, and return its result.

        Args:
            function: reads the engine and does not change it; a function of a module.
        """
        if not self.is_alive:
            raise MiniEngineError(ENDED)
        number, result = next(self._numbers), self._loop.create_future()
        self._reading[number] = result
        self._commands.send(Read(number, function))
        try:
            return await result
        finally:
            self._reading.pop(number, None)

    def drain(self) -> None:
        """Refuse new prompts, and end those that are not in the batch yet. The others go on."""
        self.is_draining = True
        self._commands.send(Drain())

    async def close(self) -> None:
        """End everything, and wait for the engine's loop."""
        self.is_draining = True
        self._commands.send(Close())
        await self._ended.wait()

    def _listen(self) -> None:
        """Receive answers, on a thread of its own, because half a message would block the event loop."""
        with self._answers as connection:
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._receive, connection.recv())
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._end)

    def _receive(self, answers: Sequence[Answer]) -> None:
        for number, value in answers:
            if isinstance(value, Result):
                if (result := self._reading.get(number)) is not None and not result.done():
                    result.set_result(value.value)
            elif (of := self._inboxes.get(number)) is not None:
                inbox, index = of
                if isinstance(value, Piece):
                    inbox.put(index, value)
                else:
                    inbox.fail(value)
            elif (result := self._reading.get(number)) is not None and not result.done():
                assert isinstance(value, MiniEngineError)
                result.set_exception(value)
            # Otherwise the client has left.

    def _end(self) -> None:
        """The engine's loop has ended, as it was told to or not."""
        self._commands.close()
        self._timer.cancel()
        self.is_alive = False
        for inbox, _ in self._inboxes.values():
            inbox.fail(MiniEngineError(ENDED))
        for result in self._reading.values():
            if not result.done():
                result.set_exception(MiniEngineError(ENDED))
        self._ended.set()

    def _wake_quiet(self) -> None:
        for inbox, _ in self._inboxes.values():
            if inbox.is_quiet:
                inbox.wake()
            inbox.is_quiet = True
        self._timer = self._loop.call_later(QUIET_SECONDS, self._wake_quiet)
