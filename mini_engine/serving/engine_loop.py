"""The stepping loop of a server: requests come and go between the steps of an engine.

The loop and the HTTP server are two processes, connected by two pipes, because Python runs one thread of a process at a
time. With 256 streams, writing the tokens of a step to their connections takes longer than the step, and the device
would wait. Everything that the loop sends after a step is one message. If one process cannot write as many tokens as
the engine samples, several share the work, each with two pipes of its own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.llm import TextEngine
from mini_engine.outputs import StepReport
from mini_engine.request import FinishReason, Request, TokenLogprobs
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.admission import Admission, QueueFullError
from mini_engine.structured import TokenGrammar
from mini_engine.text_request import Ended

logger = logging.getLogger(__name__)
COMPILING = 4  # grammars that are compiled at the same time
RETRY_SECONDS = 0.01  # until a full pipe is tried again, while no step is computed
NUMBERS = 2**48  # of each client: that of client i begins with i times as many


class ShuttingDownError(MiniEngineError):
    """A prompt that was refused or ended because the server is shutting down."""

    def __init__(self, message: str = "the server is shutting down; send the request to another one") -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Submit:
    """Serve a prompt.

    Attributes:
        number: the number of its first output; the others have the next ones.
        prompt: its tokens.
        params: the parameters of each output, without what the engine's core does not do (`TextFront.core_params`).
        priority: see `LLMEngine.add_request`.
        tenant: see `LLMEngine.add_request`.
    """

    number: int
    prompt: Sequence[int]
    params: Sequence[SamplingParams]
    priority: int
    tenant: str


@dataclass(frozen=True)
class Abort:
    """End the outputs of a prompt, whose client has left. The number is that of the first one."""

    number: int


@dataclass(frozen=True)
class End:
    """End an output whose text has ended, or cannot be decoded.

    Attributes:
        number: of its prompt's first output.
        index: its number among the outputs of the prompt.
        reason: why.
    """

    number: int
    index: int
    reason: FinishReason


@dataclass(frozen=True)
class Read:
    """Call a function with the engine between two steps, and answer with its result under this number."""

    number: int
    function: Callable[[TextEngine], Any]


@dataclass(frozen=True)
class Drain:
    """End the prompts that are not in the batch yet, and those that come after this. The others go on."""


@dataclass(frozen=True)
class Close:
    """End all prompts of a client, which sends nothing after this."""


Command = Submit | Abort | End | Read | Drain | Close


@dataclass(frozen=True)
class Stepped:
    """What a step has added to the outputs.

    Attributes:
        numbers: of the outputs that have got a token, as often as they have got one.
        token_ids: these tokens.
        logprobs: log probabilities of new tokens, for outputs that ask for them.
        ended: outputs that have ended, with these tokens.
    """

    numbers: list[int]
    token_ids: list[int]
    logprobs: list[tuple[int, list[TokenLogprobs]]]
    ended: list[tuple[int, Ended]]


@dataclass(frozen=True)
class Result:
    """What a `Read` has returned."""

    number: int
    value: Any


@dataclass(frozen=True)
class Failed:
    """Why a prompt or a `Read` could not be served."""

    number: int
    error: MiniEngineError


Answer = Stepped | Result | Failed


class Outbox:
    """Sends objects through a pipe without waiting for its reader: what the pipe does not take is kept.

    A thread for it would hold Python's lock several times in a step, and the steps would wait. The reader takes one
    object after another with `pickle.load`.

    Args:
        connection: the pipe's end.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._left = connection, bytearray()
        os.set_blocking(connection.fileno(), False)

    def send(self, value: object) -> None:
        """Send an object after all earlier ones. It is lost if nobody reads any more."""
        self.send_pickled(pickle.dumps(value))

    def send_pickled(self, data: bytes) -> None:
        """Send an object that `pickle.dumps` has returned."""
        self._left += data
        self.flush()

    def flush(self) -> bool:
        """Send what the pipe takes now, and return whether anything is left."""
        try:
            while self._left:
                del self._left[: os.write(self._connection.fileno(), self._left)]
        except BlockingIOError:  # the pipe is full
            return True
        except OSError:  # the other process has ended
            self._left.clear()
        return False

    def close(self) -> None:
        """Close the pipe after everything has been sent."""
        with self._connection:
            os.set_blocking(self._connection.fileno(), True)
            self.flush()


class EngineLoop:
    """Steps an engine for prompts that arrive through a pipe. Only tokens leave it; the other side makes them text.

    Args:
        engine: the engine; nothing else may step it.
        pipes: of each client, what receives its commands and what sends its answers. When all commands have ended, so
            does the loop.
        unfinished: see `EngineClient`. A client that has ended has none.
        max_ttft_seconds: longest time to first token that a prompt may be predicted to have; None: any.
    """

    def __init__(
        self,
        engine: TextEngine,
        pipes: Sequence[tuple[Connection, Connection]],
        unfinished: ctypes.Array[ctypes.c_long],
        max_ttft_seconds: float | None = None,
    ) -> None:
        self.engine, self._core, self._unfinished = engine, engine.engine, unfinished
        self._is_draining = False
        rows = engine.max_batch_size
        self._admission = None if max_ttft_seconds is None else Admission(max_ttft_seconds, rows)
        self._prompts: dict[int, list[Request]] = {}  # of each unfinished prompt
        self._numbers: dict[Request, tuple[int, int]] = {}  # of each unfinished output, and of its prompt
        self._num_told: dict[Request, int] = {}  # tokens with log probabilities that have been sent
        self._compiling: dict[int, Submit] = {}  # prompts whose grammar is being compiled
        self._compilers = ThreadPoolExecutor(COMPILING)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers = {client: Outbox(answers) for client, (_, answers) in enumerate(pipes)}  # of clients that go on
        for client, (commands, _) in enumerate(pipes):
            threading.Thread(target=self._listen, args=(client, commands), daemon=True).start()

    def run(self) -> None:
        """Step the engine whenever there is work, until all clients have ended."""
        while self._answers:
            self._take_commands(wait=not self._numbers)
            if not self._numbers:
                continue
            start = time.perf_counter()
            try:
                report = self._core.step()
            except Exception as error:  # failed requests do not raise, so none can go on: a replaced part, or a bug
                logger.exception("a step failed")
                for client in self._answers:
                    self._fail(client, MiniEngineError(f"the engine failed: {type(error).__name__}: {error}"))
                continue
            if self._admission is not None:
                seconds = time.perf_counter() - start
                self._admission.stepped(self._core.scheduler, report.num_tokens, seconds, is_decode=report.is_decode)
            self._hand_over(report)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    # --- commands ------------------------------------------------------------------------------------------------

    def _listen(self, client: int, connection: Connection) -> None:
        with connection:
            try:
                while not isinstance(command := connection.recv(), Close):
                    self._commands.put(lambda command=command: self._obey(command))  # type: ignore[misc]
            except (EOFError, OSError):  # the client's process has ended
                pass
        self._commands.put(lambda: self._close(client))

    def _take_commands(self, wait: bool) -> None:
        while True:
            has_answers = any([outbox.flush() for outbox in self._answers.values()])
            try:
                self._commands.get(wait, RETRY_SECONDS if has_answers else None)()
            except queue.Empty:
                return
            wait = False

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(number) if self._is_draining:  # the client has looked before the server began to end
                self._send(number, Failed(number, ShuttingDownError()))
            case Submit(number, params=[params, *_]) if params.structured_outputs is not None:
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
            case End():
                self._end(command)
            case Read():
                self._read(command)
            case Drain():
                self._is_draining = True
                self._refuse_waiting()

    def _submit_compiled(self, number: int, compiled: Future[TokenGrammar | None]) -> None:
        command = self._compiling.pop(number, None)
        if command is None:  # the client has left
            return
        if (error := compiled.exception()) is not None:
            self._send(number, Failed(number, as_sent(error)))
        else:
            self._submit(command, compiled.result())

    def _submit(self, command: Submit, grammar: TokenGrammar | None) -> None:
        first, requests = command.number, list[Request]()
        self._prompts[first] = requests
        try:
            for number, params in enumerate(command.params, first):
                own = grammar.copy() if grammar else None
                request = self._core.add_request(
                    f"request {number}", command.prompt, params, (), own,
                    priority=command.priority, tenant=command.tenant,
                )  # fmt: skip
                requests.append(request)
                self._numbers[request] = number, first
            if self._admission is not None:
                self._admission.check(self._core.scheduler, requests[0])
        except (RequestError, QueueFullError) as error:
            self._abort(first)
            self._send(first, Failed(first, error))

    def _abort(self, prompt: int) -> None:
        for request in self._prompts.pop(prompt, ()):
            if self._numbers.pop(request, None) is not None:
                self._core.finish(request, "abort")

    def _end(self, command: End) -> None:
        requests = self._prompts.get(command.number, [])
        if requests and (request := requests[command.index]) in self._numbers:  # otherwise it has ended meanwhile
            self._core.finish(request, command.reason)
            self._send(command.number, Stepped([], [], [], [self._end_of(request)]))

    def _read(self, command: Read) -> None:
        try:
            self._send(command.number, Result(command.number, command.function(self.engine)))
        except Exception as error:
            self._send(command.number, Failed(command.number, as_sent(error)))

    def _refuse_waiting(self) -> None:
        error = ShuttingDownError()
        waiting = self._core.scheduler.waiting
        for number, requests in list(self._prompts.items()):
            if all(request in waiting for request in requests):
                self._abort(number)
                self._send(number, Failed(number, error))
        for number in list(self._compiling):
            del self._compiling[number]
            self._send(number, Failed(number, error))

    def _close(self, client: int) -> None:
        """End the prompts of a client, and its pipe."""
        self._fail(client, ShuttingDownError())
        self._unfinished[client] = 0
        self._answers.pop(client).close()

    # --- answers -------------------------------------------------------------------------------------------------

    def _send(self, number: int, answer: Answer) -> None:
        """Send an answer to the client that a number belongs to, unless it has ended."""
        if (outbox := self._answers.get(number // NUMBERS)) is not None:
            outbox.send(answer)

    def _fail(self, client: int, error: MiniEngineError) -> None:
        """End the prompts of a client."""
        for number in [number for number in (*self._prompts, *self._compiling) if number // NUMBERS == client]:
            self._abort(number)
            self._compiling.pop(number, None)
            self._send(number, Failed(number, error))

    def _hand_over(self, report: StepReport) -> None:
        """Send what a step has collected to all clients, each of which knows which outputs are its own."""
        nobody = -1, -1  # an output that has ended
        numbers = [self._numbers.get(request, nobody)[0] for request in report.sampled_by]
        logprobs = self._logprobs(report) if self._core.scheduler.running.num_asking or report.finished else []
        ended = [self._end_of(request) for request in report.finished if request in self._numbers]
        if numbers or ended:
            data = pickle.dumps(Stepped(numbers, report.token_ids.tolist(), logprobs, ended))
            for outbox in self._answers.values():
                outbox.send_pickled(data)

    def _logprobs(self, report: StepReport) -> list[tuple[int, list[TokenLogprobs]]]:
        """Return the log probabilities of the tokens of a report, of requests that ask for them."""
        counts = Counter(request for request in report.sampled_by if request.params.logprobs is not None)
        found = []
        for request, more in counts.items():
            if request in self._numbers:
                told = self._num_told.get(request, 0)
                start = len(request.prompt_token_ids) + told
                found.append((self._numbers[request][0], [request.logprobs[start + i] for i in range(more)]))
                self._num_told[request] = told + more
        return found

    def _end_of(self, request: Request) -> tuple[int, Ended]:
        """Forget an output that has ended, and return what is sent about it."""
        number, prompt = self._numbers.pop(request)
        self._num_told.pop(request, None)
        if not any(other in self._numbers for other in self._prompts[prompt]):
            del self._prompts[prompt]
        if self._admission is not None:
            self._admission.ended(len(request.output_token_ids))
        return number, Ended.of(request)


def as_sent(error: BaseException) -> MiniEngineError:
    """Return an error that another process can build from its message."""
    return error if isinstance(error, MiniEngineError) else MiniEngineError(f"{type(error).__name__}: {error}")
