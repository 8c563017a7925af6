"""The stepping loop of a server: requests come and go between the steps of an engine.

The loop and the HTTP server are two processes, connected by two pipes, because Python runs one thread of a process at a
time. With 256 streams, writing the tokens of a step to their connections takes longer than the step, and the device
would wait. Everything that the loop sends after a step is one message.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import Admission, QueueFullError
from mini_engine.structured import TokenGrammar
from mini_engine.text_request import PromptOutputs

logger = logging.getLogger(__name__)
COMPILING = 4  # grammars that are compiled at the same time


class ShuttingDownError(MiniEngineError):
    """A prompt that was refused or ended because the server is shutting down."""


@dataclass(frozen=True)
class Submit:
    """Serve a prompt.

    Attributes:
        number: the index of its pieces.
        prompt: its tokens.
        params: its parameters.
        each_step: whether text is delivered as it is generated.
        priority: see `LLMEngine.add_request`.
        tenant: see `LLMEngine.add_request`.
    """

    number: int
    prompt: Sequence[int]
    params: SamplingParams
    each_step: bool
    priority: int
    tenant: str


@dataclass(frozen=True)
class Abort:
    """End a prompt whose client has left."""

    number: int


@dataclass(frozen=True)
class Read:
    """Call a function with the engine between two steps, and answer with its result under this number."""

    number: int
    function: Callable[[TextEngine], Any]


@dataclass(frozen=True)
class Drain:
    """End the prompts that are not in the batch yet. The others go on."""


@dataclass(frozen=True)
class Close:
    """End everything."""


@dataclass(frozen=True)
class Result:
    """What a `Read` has returned."""

    value: Any


Command = Submit | Abort | Read | Drain | Close
Answer = tuple[int, Piece | Result | MiniEngineError]  # with the number of the command


class Sender:
    """Sends objects through a pipe, on a thread of its own, because a full pipe blocks.

    Args:
        connection: the pipe's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pending: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, value: object) -> None:
        """Send an object after all earlier ones. It is lost if nobody reads any more."""
        self._pending.put(pickle.dumps(value))

    def close(self) -> None:
        """Close the pipe after everything has been sent."""
        self._pending.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._connection as connection:
            try:
                while (data := self._pending.get()) is not None:
                    connection.send_bytes(data)
            except OSError:  # the other process has ended
                pass


class EngineLoop:
    """Steps an engine for prompts that arrive through a pipe.

    Args:
        engine: the engine; nothing else may step it.
        commands: receives commands; its end ends the loop.
        answers: sends lists of answers.
        max_ttft_seconds: longest time to first token that a prompt may be predicted to have; None: any.
    """

    def __init__(
        self, engine: TextEngine, commands: Connection, answers: Connection, max_ttft_seconds: float | None = None
    ) -> None:
        self.engine = engine
        rows = engine.max_batch_size
        self._admission = None if max_ttft_seconds is None else Admission(max_ttft_seconds, rows)
        self._inbox, self._is_closing = deque[Piece](), False
        self._submitted: dict[int, PromptOutputs] = {}
        self._compiling: dict[int, Submit] = {}  # prompts whose grammar is being compiled
        self._compilers = ThreadPoolExecutor(COMPILING)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers = Sender(answers)
        threading.Thread(target=self._listen, args=(commands,), daemon=True).start()

    def run(self) -> None:
        """Step the engine whenever there is work, until `Close` or the end of the commands."""
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
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._answers.close()

    # --- commands ------------------------------------------------------------------------------------------------

    def _listen(self, connection: Connection) -> None:
        with connection:
            try:
                while True:
                    command = connection.recv()
                    self._commands.put(lambda command=command: self._obey(command))  # type: ignore[misc]
            except (EOFError, OSError):  # the server has ended
                self._commands.put(lambda: self._obey(Close()))

    def _take_commands(self, wait: bool) -> None:
        while True:
            try:
                self._commands.get(block=wait)()
            except queue.Empty:
                return
            wait = False

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(number, params=params) if params.structured_outputs is not None:
                self._compiling[number] = command
                compiling = self._compilers.submit(self.engine.compile, params)
                compiling.add_done_callback(
                    lambda done: self._commands.put(lambda: self._submit_compiled(number, done))
                )
            case Submit():
                self._submit(command, None)
            case Abort(number):
                self._compiling.pop(number, None)
                self._abort(number)
            case Read():
                self._read(command)
            case Drain():
                self._refuse_waiting()
            case Close():
                self._is_closing = True

    def _submit_compiled(self, number: int, compiled: Future[TokenGrammar | None]) -> None:
        command = self._compiling.pop(number, None)
        if command is None:  # the client has left
            return
        if (error := compiled.exception()) is not None:
            self._answer([(number, as_sent(error))])
        else:
            self._submit(command, compiled.result())

    def _submit(self, command: Submit, grammar: TokenGrammar | None) -> None:
        try:
            submitted = self.engine.submit(
                command.prompt, command.params, self._inbox,
                index=command.number, grammar=grammar, each_step=command.each_step,
                priority=command.priority, tenant=command.tenant,
            )  # fmt: skip
            if self._admission is not None:
                try:
                    self._admission.check(self.engine.engine.scheduler, submitted.requests[0])
                except QueueFullError:
                    self.engine.abort(submitted)
                    raise
            self._submitted[command.number] = submitted
        except (RequestError, QueueFullError) as error:
            self._answer([(command.number, error)])

    def _abort(self, number: int) -> None:
        if (submitted := self._submitted.pop(number, None)) is not None:
            self.engine.abort(submitted)

    def _read(self, command: Read) -> None:
        try:
            self._answer([(command.number, Result(command.function(self.engine)))])
        except Exception as error:
            self._answer([(command.number, as_sent(error))])

    def _refuse_waiting(self) -> None:
        error = ShuttingDownError("the server is shutting down; send the request to another one")
        waiting = self.engine.engine.scheduler.waiting
        for number, submitted in list(self._submitted.items()):
            if all(request in waiting for request in submitted.requests):
                self._abort(number)
                self._answer([(number, error)])
        for number in list(self._compiling):
            del self._compiling[number]
            self._answer([(number, error)])

    # --- answers -------------------------------------------------------------------------------------------------

    def _fail_all(self, error: MiniEngineError) -> None:
        for number in [*self._submitted, *self._compiling]:
            self._abort(number)
            self._answer([(number, error)])
        self._compiling.clear()

    def _hand_over(self) -> None:
        arrived: list[Answer] = []
        while self._inbox:
            piece = self._inbox.popleft()
            arrived.append((piece.index, piece))
            if piece.output is not None:
                self._submitted.pop(piece.index, None)
                if self._admission is not None:
                    for output in piece.output.outputs:
                        self._admission.ended(len(output.token_ids))
        if arrived:
            self._answer(arrived)

    def _answer(self, answers: Sequence[Answer]) -> None:
        self._answers.send(answers)


def as_sent(error: BaseException) -> MiniEngineError:
    """Return an error that another process can build from its message."""
    return error if isinstance(error, MiniEngineError) else MiniEngineError(f"{type(error).__name__}: {error}")
