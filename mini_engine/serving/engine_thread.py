"""The stepping loop of a server: one thread steps the engine, and requests come and go between its steps.

Only this thread touches the engine, so a step needs no lock. The event loop hands it prompts through a queue, and it
hands back the pieces of all prompts after each step, in one call.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import Admission, QueueFullError
from mini_engine.structured import TokenGrammar
from mini_engine.text_request import PromptOutputs

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ShuttingDownError(MiniEngineError):
    """A prompt that was refused or ended because the server is shutting down."""


@dataclass(eq=False)
class Stream:
    """A prompt that the server has accepted and whose last piece it has not delivered.

    Attributes:
        number: the index of its pieces.
        prompt: its tokens.
        params: its parameters.
        each_step: whether text is delivered as it is generated.
        grammar: of structured outputs.
        priority: see `LLMEngine.add_request`.
        tenant: see `LLMEngine.add_request`.
        arrived: its pieces, or the error that ended it; belongs to the event loop.
    """

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    each_step: bool
    grammar: TokenGrammar | None
    priority: int
    tenant: str
    arrived: asyncio.Queue[Piece | MiniEngineError]


class EngineThread:
    """Steps an engine on a thread of its own, for prompts that arrive on an event loop.

    Args:
        engine: the engine; nothing else may step it.
        max_queued: outputs that may wait for a place in the batch. More are refused, because a client that is told at
            once can go elsewhere, while one in an endless queue waits for an answer that it has given up.
        max_ttft_seconds: longest time to first token that a prompt may be predicted to have; None: any.
    """

    def __init__(self, engine: TextEngine, max_queued: int, max_ttft_seconds: float | None = None) -> None:
        self.engine = engine
        rows = engine.engine.config.max_batch_size
        self._admission = None if max_ttft_seconds is None else Admission(max_ttft_seconds, rows)
        self._most = rows + max_queued
        self._numbers, self._inbox = count(), deque[Piece]()
        self._streams: dict[int, Stream] = {}  # of the event loop
        self._submitted: dict[int, PromptOutputs] = {}  # of the thread
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_closing = self._is_draining = False

    # --- on the event loop ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; call it on the event loop that will use `stream`."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._is_draining

    @property
    def num_outputs(self) -> int:
        """Number of outputs that are unfinished, waiting or running."""
        return sum(stream.params.n for stream in self._streams.values())

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        grammar: TokenGrammar | None = None,
        *,
        each_step: bool,
        priority: int = 0,
        tenant: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """Serve a prompt, and yield its pieces; the last one has the output. Closing the generator ends the request.

        Args:
            prompt: its tokens.
            params: its parameters.
            grammar: of `TextEngine.compile`, which takes too long for this thread.
            each_step: yield text as it is generated, and not only when it has ended.
            priority: see `LLMEngine.add_request`.
            tenant: see `LLMEngine.add_request`.

        Raises:
            QueueFullError: if too many wait, or it would wait too long for its first token.
            ShuttingDownError: if the server is shutting down.
            RequestError: if the prompt cannot be served.
        """
        if self._is_draining:
            raise ShuttingDownError("the server is shutting down; send the request to another one")
        if self.num_outputs + params.n > self._most:
            raise QueueFullError(f"{self.num_outputs} outputs run or wait, and {self._most} may; send it again later")
        stream = Stream(next(self._numbers), prompt, params, each_step, grammar, priority, tenant, asyncio.Queue())
        self._streams[stream.number] = stream
        self._commands.put(lambda: self._submit(stream))
        try:
            while True:
                piece = await stream.arrived.get()
                if isinstance(piece, MiniEngineError):
                    raise piece
                yield piece
                if piece.output is not None:
                    return
        finally:
            del self._streams[stream.number]
            self._commands.put(lambda: self._abort(stream.number))

    async def read(self, read: Callable[[TextEngine], T]) -> T:
        """Call a function with the engine between two steps, on the thread, and return its result.

        Args:
            read: reads the engine and does not change it.
        """
        result = Future[T]()
        self._commands.put(lambda: self._read(read, result))
        return await asyncio.wrap_future(result)

    def drain(self) -> None:
        """Refuse new prompts, and end those that are not in the batch yet. The others go on."""
        self._is_draining = True
        self._commands.put(self._refuse_waiting)

    def close(self) -> None:
        """End everything, and wait for the thread."""
        self._is_closing = self._is_draining = True
        self._commands.put(lambda: None)
        self._thread.join()

    def _deliver(self, arrived: Sequence[tuple[int, Piece | MiniEngineError]]) -> None:
        for number, piece in arrived:
            if (stream := self._streams.get(number)) is not None:  # otherwise the client has left
                stream.arrived.put_nowait(piece)

    # --- on the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            self._take_commands(wait=not self._submitted)
            if not self._submitted:
                continue
            start = time.perf_counter()
            try:
                report, core = self.engine.step(), self.engine.engine
                if self._admission is not None:
                    seconds = time.perf_counter() - start
                    self._admission.stepped(core.scheduler, report.num_tokens, seconds, is_decode=report.is_decode)
            except Exception as error:  # failed requests do not raise, so none can go on: a replaced part, or a bug
                logger.exception("a step failed")
                self._fail_all(MiniEngineError(f"the engine failed: {type(error).__name__}: {error}"))
            self._hand_over()
        self._fail_all(ShuttingDownError("the server is shutting down; send the request to another one"))

    def _take_commands(self, wait: bool) -> None:
        while True:
            try:
                self._commands.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _submit(self, stream: Stream) -> None:
        try:
            submitted = self.engine.submit(
                stream.prompt, stream.params, self._inbox,
                index=stream.number, grammar=stream.grammar, each_step=stream.each_step,
                priority=stream.priority, tenant=stream.tenant,
            )  # fmt: skip
            if self._admission is not None:
                try:
                    self._admission.check(self.engine.engine.scheduler, submitted.requests[0])
                except QueueFullError:
                    self.engine.abort(submitted)
                    raise
            self._submitted[stream.number] = submitted
        except (RequestError, QueueFullError) as error:
            self._send([(stream.number, error)])

    def _abort(self, number: int) -> None:
        if (submitted := self._submitted.pop(number, None)) is not None:
            self.engine.abort(submitted)

    def _read(self, read: Callable[[TextEngine], T], result: Future[T]) -> None:
        if not result.set_running_or_notify_cancel():  # the client has left
            return
        try:
            result.set_result(read(self.engine))
        except Exception as error:
            result.set_exception(error)

    def _refuse_waiting(self) -> None:
        waiting = self.engine.engine.scheduler.waiting
        for number, submitted in list(self._submitted.items()):
            if all(request in waiting for request in submitted.requests):
                self._abort(number)
                self._send([(number, ShuttingDownError("the server is shutting down; send the request to another"))])

    def _fail_all(self, error: MiniEngineError) -> None:
        for number in list(self._submitted):
            self._abort(number)
            self._send([(number, error)])

    def _hand_over(self) -> None:
        arrived: list[tuple[int, Piece | MiniEngineError]] = []
        while self._inbox:
            piece = self._inbox.popleft()
            arrived.append((piece.index, piece))
            if piece.output is not None:
                self._submitted.pop(piece.index, None)
                if self._admission is not None:
                    for output in piece.output.outputs:
                        self._admission.ended(len(output.token_ids))
        if arrived:
            self._send(arrived)

    def _send(self, arrived: Sequence[tuple[int, Piece | MiniEngineError]]) -> None:
        assert self._loop is not None, "start the thread on the event loop first"
        self._loop.call_soon_threadsafe(self._deliver, arrived)
