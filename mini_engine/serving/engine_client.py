"""The event loop's side of the engine: requests go to the stepping loop through a pipe, and tokens come back.

Tokens become text when a request takes them. So a client that is behind the engine gets fewer and longer pieces.
"""

from __future__ import annotations

import asyncio
import ctypes
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from mini_engine.errors import MiniEngineError
from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece
from mini_engine.request import check_prompt
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import QueueFullError
from mini_engine.serving.engine_loop import (
    NUMBERS,
    Abort,
    Answer,
    Close,
    Drain,
    End,
    Failed,
    Read,
    Result,
    ShuttingDownError,
    Stepped,
    Submit,
)
from mini_engine.text_front import TextFront
from mini_engine.text_request import PromptOutputs, TextRequest

T = TypeVar("T")
ENDED = "the engine has ended; its process may have printed why"
QUIET_SECONDS = 15.0  # after which a stream without pieces yields an empty list


class Inbox:
    """The outputs of one request that have got tokens which are not text yet.

    Attributes:
        pieces: receives the pieces of its prompts.
        is_quiet: whether nothing has arrived for some time.
    """

    def __init__(self) -> None:
        self.pieces, self.is_quiet = deque[Piece](), False
        self._arrived: dict[TextRequest, None] = {}
        self._error: MiniEngineError | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, text: TextRequest) -> None:
        """Note that an output has got tokens, or its end."""
        self._arrived[text] = None
        self.is_quiet = False
        self.wake()

    def fail(self, error: MiniEngineError) -> None:
        """End the request, after the tokens that have arrived."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        """Let `take` return."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[TextRequest]:
        """Wait for tokens, and return the outputs that have got some; none after a long time.

        Raises:
            MiniEngineError: that ended the request.
        """
        if not self._arrived and self._error is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if not self._arrived and self._error is not None:
            raise self._error
        arrived, self._arrived = list(self._arrived), {}
        return arrived


class Sender:
    """Sends objects through a pipe, on a thread of its own, because a full pipe blocks.

    Signal handlers may call `send`, also while it is being called.

    Args:
        connection: the pipe's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, value: object) -> None:
        """Send an object after all earlier ones. It is lost if nobody reads any more."""
        self._pending.put(pickle.dumps(value))

    def close(self) -> None:
        """Close the pipe after everything has been sent."""
        self._pending.put(None)

    def _run(self) -> None:
        with self._connection as connection:
            try:
                while (data := self._pending.get()) is not None:
                    connection.send_bytes(data)
            except OSError:  # the other process has ended
                pass


class EngineClient:
    """Serves requests of an event loop with an engine that steps elsewhere.

    Args:
        front: the engine's tokenizer and limits.
        commands: sends commands to an `EngineLoop`.
        answers: receives its answers.
        unfinished: outputs of each of the loop's clients that are unfinished, which all of them read.
        most: how many these may be. More are refused, because a client that is told at once can go elsewhere, while one
            in an endless queue waits for an answer that it has given up.
        client: which of the loop's clients this is.

    Attributes:
        front: see above.
        is_alive: whether the engine runs.
        is_draining: whether the server is shutting down.
        num_outputs: outputs of this client that are unfinished, waiting or running.
    """

    def __init__(
        self,
        front: TextFront,
        commands: Connection,
        answers: Connection,
        unfinished: ctypes.Array[ctypes.c_long],
        most: int,
        client: int,
    ) -> None:
        self.front, self.is_alive, self.is_draining, self.num_outputs = front, True, False, 0
        self._unfinished, self._most, self._client = unfinished, most, client
        self._commands, self._answers = Sender(commands), answers
        self._next_number = client * NUMBERS
        self._texts: dict[int, tuple[Inbox, TextRequest]] = {}  # of each output
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
    ) -> AsyncGenerator[list[Piece], None]:
        """Serve the prompts of a request, and yield their pieces: one for each output that has got tokens.

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
            raise ShuttingDownError()
        if not self.is_alive:
            raise MiniEngineError(ENDED)
        for prompt in prompts:
            check_prompt(prompt, self.front.vocab_size, self.front.max_model_len)
        several, more = self.front.core_params(params), params.n * len(prompts)
        if (of_all := sum(self._unfinished)) + more > self._most:
            raise QueueFullError(f"{of_all} outputs run or wait, and {self._most} may; send it again later")
        inbox, numbers = Inbox(), self._take_numbers(more)
        firsts, texts = numbers[:: params.n], dict[int, tuple[Inbox, TextRequest]]()
        for index, (first, prompt) in enumerate(zip(firsts, prompts, strict=True)):
            tokens = list(prompt)
            owner = PromptOutputs(index, tokens, params, inbox.pieces)
            for i, core in enumerate(several):
                texts[first + i] = inbox, self.front.new_text(owner, i, core, tokens, each_step)
        self._texts |= texts
        self._count(more)
        unfinished = set(range(len(prompts)))
        try:
            for first, prompt in zip(firsts, prompts, strict=True):
                self._commands.send(Submit(first, prompt, several, priority, tenant))
            while unfinished:
                for text in await inbox.take():
                    text.deliver()
                    if text.must_end is not None and text.ended is None:
                        self._commands.send(End(firsts[text.owner.index], text.index, text.must_end))
                pieces = [inbox.pieces.popleft() for _ in range(len(inbox.pieces))]
                for piece in pieces:
                    if piece.output is not None:
                        unfinished.remove(piece.index)
                        if piece.output.error is not None:
                            raise piece.output.error
                yield pieces
        finally:
            self._count(-more)
            for number in numbers:
                del self._texts[number]
            for index in unfinished:
                self._commands.send(Abort(firsts[index]))

    def _count(self, more: int) -> None:
        self.num_outputs += more
        self._unfinished[self._client] = self.num_outputs

    def _take_numbers(self, count: int) -> range:
        """Return the next numbers, which nothing else has."""
        self._next_number += count
        return range(self._next_number - count, self._next_number)

    async def read(self, function: Callable[[TextEngine], T]) -> T:
        """Call a function with the engine between two steps, where it runs, and return its result.

        Args:
            function: reads the engine and does not change it; a function of a module.
        """
        if not self.is_alive:
            raise MiniEngineError(ENDED)
        [number], result = self._take_numbers(1), self._loop.create_future()
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
        with self._answers as connection, open(connection.fileno(), "rb", closefd=False) as pipe:
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._receive, pickle.load(pipe))
            except (EOFError, OSError, pickle.UnpicklingError):  # the last answer can have been cut off
                self._loop.call_soon_threadsafe(self._end)

    def _receive(self, answer: Answer) -> None:
        """Note what has arrived, unless its client has left."""
        match answer:
            case Stepped():
                self._receive_tokens(answer)
            case Result(number, value):
                if (reading := self._reading.get(number)) is not None and not reading.done():
                    reading.set_result(value)
            case Failed(number, error):
                if (of := self._texts.get(number)) is not None:
                    of[0].fail(error)
                elif (reading := self._reading.get(number)) is not None and not reading.done():
                    reading.set_exception(error)

    def _receive_tokens(self, step: Stepped) -> None:
        now, texts = time.perf_counter(), self._texts
        for number, logprobs in step.logprobs:
            if (of := texts.get(number)) is not None:
                of[1].logprobs += logprobs
        for number, token_id in zip(step.numbers, step.token_ids, strict=True):
            if (of := texts.get(number)) is not None:
                inbox, text = of
                text.token_ids.append(token_id)
                if text.first_token is None:
                    text.first_token = now
                if text.detokenizer is not None:  # otherwise it is decoded when it has ended
                    inbox.put(text)
        for number, ended in step.ended:
            if (of := texts.get(number)) is not None:
                inbox, text = of
                text.ended = ended
                inbox.put(text)

    def _end(self) -> None:
        """The engine's loop has ended, as it was told to or not."""
        self._commands.close()
        self._timer.cancel()
        self.is_alive = False
        for inbox, _ in self._texts.values():
            inbox.fail(MiniEngineError(ENDED))
        for result in self._reading.values():
            if not result.done():
                result.set_exception(MiniEngineError(ENDED))
        self._ended.set()

    def _wake_quiet(self) -> None:
        for inbox in {inbox for inbox, _ in self._texts.values()}:
            if inbox.is_quiet:
                inbox.wake()
            inbox.is_quiet = True
        self._timer = self._loop.call_later(QUIET_SECONDS, self._wake_quiet)
