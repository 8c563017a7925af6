"""Homework of chapter 16: the bytes of a stream, the serving loop, latency as clients
see it, masks of tokens, requests that wait for a token, and admission under an SLO.

`ready` is a part of the engine. Once its checks pass, the command
`mini-engine generate --homework` runs a real model on it.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int, Int32

from book.serving_simulator import (
    BUDGET,
    FIRST_SECONDS,
    FIXED_SECONDS,
    TOKEN_SECONDS,
    Waiting,
)
from mini_engine.errors import RequestError
from mini_engine.serving.admission import QueueFullError


def event(value: Any) -> bytes:
    """Return one server-sent event that carries a value as JSON.

    What must hold, because some client needs it:
        - The event is one line: `data:`, one space, and the JSON, which has no line
          breaks.
        - A blank line ends the event. Lines end in a line feed alone.
        - All bytes are ASCII. Other characters are escaped within the JSON.
        - The JSON has no spaces outside of its strings, because a stream has one event
          for each token.

    Args:
        value: anything that `json` can write.

    Example:

        >>> event({"text": "a b", "index": 0})
        b'data: {"text":"a b","index":0}\\n\\n'
    """
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Piece(Protocol):
    """New text of one request.

    Attributes:
        index: the number of the request.
        output: the whole output in the last piece of a request; None in the others.
    """

    index: int
    output: Any


class Engine(Protocol):
    """What the loop needs of an engine; `mini_engine.LLM` has it."""

    def submit(self, prompt: Any, params: Any, inbox: deque[Any], *, index: int) -> Any:
        """Queue a request, and return a handle for `abort`.

        Each later step puts the request's new pieces, with this index, into the inbox.

        Raises:
            RequestError: if the request cannot be served.
        """

    def abort(self, handle: Any) -> None:
        """End a request now, and free its pages."""

    def step(self) -> None:
        """Run one step for all unfinished requests."""


class ServingLoop:
    """The loop of a server: one thread steps the engine, and others ask and leave.

    `request` and `leave` are called by the server's other threads at any time, and
    `turn` again and again by one thread. What must hold:
        - Only `turn` touches the engine. It first does what the others have asked for
          since the last turn, in the order in which they asked. Then it runs one step,
          unless no request is unfinished.
        - `request` and `leave` never wait for a step.
        - A client that leaves gets no more pieces, and its pages are free after the
          next turn. It may leave before its request has reached the engine, or after
          its request has ended.
        - `request` refuses what would make more than `most` requests unfinished; the
          server answers it with status 429. A request is unfinished until `turn` has
          returned its last piece or its error, or its client has left.
        - If the engine refuses a request with a RequestError, this error is what its
          client gets. Other requests are served as if it had not come.
        - If a step raises an exception, every request of the engine is aborted, and its
          client gets the exception. The loop goes on with new requests.

    Args:
        engine: the engine.
        most: most unfinished requests.

    Example: one request of two steps; a second one is refused meanwhile.

        >>> class Two:  # an engine that answers each request in two steps
        ...     def __init__(self):
        ...         self.left = {}
        ...     def submit(self, prompt, params, inbox, *, index):
        ...         self.inbox, self.left[index] = inbox, 2
        ...         return index
        ...     def abort(self, handle):
        ...         self.left.pop(handle, None)
        ...     def step(self):
        ...         for index in list(self.left):
        ...             self.left[index] -= 1
        ...             output = None if self.left[index] else "text"
        ...             self.inbox.append(SimplePiece(index, output))
        >>> from collections import namedtuple
        >>> SimplePiece = namedtuple("SimplePiece", "index output")
        >>> loop = ServingLoop(Two(), most=1)
        >>> loop.request("a prompt", None)
        0
        >>> try:
        ...     loop.request("another", None)
        ... except QueueFullError:
        ...     print("429")
        429
        >>> loop.turn()
        [(0, SimplePiece(index=0, output=None))]
        >>> loop.turn()
        [(0, SimplePiece(index=0, output='text'))]
        >>> loop.num_unfinished
        0
    """

    def __init__(self, engine: Engine, most: int) -> None:
        self._engine, self._most = engine, most
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._numbers, self._inbox = count(), deque[Any]()
        self._unfinished: set[int] = set()  # of clients that have not left
        self._handles: dict[int, Any] = {}  # only `turn` uses it
        self._refused: list[tuple[int, Any]] = []

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests."""
        return len(self._unfinished)

    def request(self, prompt: Any, params: Any) -> int:
        """Accept a request, and return its number; numbers count from 0.

        Raises:
            QueueFullError: if too many requests are unfinished.
        """
        if len(self._unfinished) >= self._most:
            raise QueueFullError(
                f"{self._most} requests are unfinished; try again later"
            )
        number = next(self._numbers)
        self._unfinished.add(number)
        self._commands.put(partial(self._submit, number, prompt, params))
        return number

    def leave(self, number: int) -> None:
        """Note that the client of a request has left."""
        self._unfinished.discard(number)
        self._commands.put(partial(self._abort, number))

    def turn(self) -> list[tuple[int, Any]]:
        """Take one turn of the loop.

        Returns:
            The new pieces and errors, each with the number of its request, in the order
            in which they came.
        """
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                break
        failure: Exception | None = None
        if self._handles:
            try:
                self._engine.step()
            except Exception as error:
                failure = error
        arrived, self._refused = self._refused, []
        while self._inbox:
            piece = self._inbox.popleft()
            arrived.append((piece.index, piece))
            if piece.output is not None:
                self._handles.pop(piece.index, None)
        if failure is not None:
            arrived += [(number, failure) for number in self._handles]
            for number in list(self._handles):
                self._abort(number)
        # A client that left during the step has its request aborted in the next turn.
        arrived = [(n, what) for n, what in arrived if n in self._unfinished]
        for number, what in arrived:
            if isinstance(what, Exception) or what.output is not None:
                self._unfinished.discard(number)
        return arrived

    def _submit(self, number: int, prompt: Any, params: Any) -> None:
        if number not in self._unfinished:
            return
        try:
            handle = self._engine.submit(prompt, params, self._inbox, index=number)
        except RequestError as error:
            self._refused.append((number, error))
        else:
            self._handles[number] = handle

    def _abort(self, number: int) -> None:
        if number in self._handles:
            self._engine.abort(self._handles.pop(number))


class Seen(NamedTuple):
    """What the client of one request saw. Times are in seconds from any common start.

    Attributes:
        due: when the load generator was to send the request.
        sent: when it did, which is later if it had to wait for another answer.
        times: when each token of the output came.
        failed: whether the answer ended in an error, after these tokens.
    """

    due: float
    sent: float
    times: Sequence[float]
    failed: bool = False


class Report(NamedTuple):
    """Latencies in seconds, and goodput in requests per second."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float


def report(seen: Sequence[Seen], first: float, between: float) -> Report:
    """Summarize a measurement under load.

    What must hold:
        - The time to first token counts from the time when the request was due. Users
          do not wait for each other before they come, so a late generator must not hide
          that the server was slow.
        - Inter-token latencies are the times between successive tokens of a request.
          Those of all requests form one distribution.
        - A failed request is in no percentile and does not meet the objective, however
          fast its tokens were.
        - A request meets the objective if its time to first token is at most `first`
          and no time between two of its tokens is more than `between`.
        - Goodput is the number of requests that meet the objective, divided by the time
          from when the first request was due to the last token of any request.
        - Percentiles are those of `np.percentile`; 0 if there are no values.

    Args:
        seen: one entry for each request, in any order; at least one has a token.
        first: most seconds to the first token.
        between: most seconds between two tokens.

    Example: the second request was sent late, and a pause spoils it.

        >>> seen = [Seen(0.0, 0.0, (0.5, 0.6)), Seen(1.0, 1.5, (2.0, 4.0))]
        >>> found = report(seen, first=1.0, between=0.2)
        >>> found.ttft_p50, found.goodput
        (0.75, 0.25)
    """
    good = [own for own in seen if not own.failed and len(own.times)]
    ttft = [own.times[0] - own.due for own in good]
    gaps = [np.diff(own.times) for own in good]
    met = [
        bool(wait <= first and max(own, default=0.0) <= between)
        for wait, own in zip(ttft, gaps, strict=True)
    ]
    end = max(time for own in seen for time in own.times)
    seconds = end - min(own.due for own in seen)
    ttft_p50, ttft_p99 = np.percentile(ttft or [0.0], (50, 99)).tolist()
    itl = np.concatenate(gaps) if gaps else np.zeros(0)
    itl_p50, itl_p99 = np.percentile(itl if len(itl) else [0.0], (50, 99)).tolist()
    return Report(ttft_p50, ttft_p99, itl_p50, itl_p99, sum(met) / seconds)


@dataclass(frozen=True)
class Automaton:
    """A deterministic automaton over bytes, which knows the texts that match a pattern.

    State 0 is the start. From every state, some bytes lead to an accepting state.

    Attributes:
        moves: for each state, the next state for each byte that may follow.
        accepting: the states in which the text matches.
    """

    moves: Sequence[Mapping[int, int]]
    accepting: frozenset[int]

    def step(self, state: int, byte: int) -> int | None:
        """Return the state after one more byte; None if no match begins that way."""
        return self.moves[state].get(byte)


class TokenMasks:
    """Says which tokens may follow in an output that must match a pattern.

    It is a `mini_engine.structured.TokenGrammar`, so the engine can use it. What must
    hold:
        - A token with text is allowed if some match of the pattern begins with the
          accepted tokens' bytes and then the token's bytes.
        - Tokens without bytes are never allowed, except end tokens. End tokens are
          allowed exactly where the bytes so far match, whatever bytes they have.
        - `accept` takes all of its tokens, or none of them and raises a RequestError.
          An end token cannot be accepted.
        - A vocabulary has 100,000 tokens, and many begin alike. For one mask, ask the
          automaton at most once for each different beginning of a token, and for
          another mask of the same state not at all.

    Args:
        automaton: the pattern.
        tokens: the bytes of each token, by its id.
        end_token_ids: tokens that end an output.

    Attributes:
        num_accepted: number of tokens accepted so far.

    Example: the pattern `a|ab+`. The mask of tokens 1, 2, and 4 is 0b10110.

        >>> a_or_ab = Automaton([{97: 1}, {98: 2}, {98: 2}], frozenset({1, 2}))
        >>> masks = TokenMasks(a_or_ab, [b"b", b"a", b"ab", b"ba", b"abb", b""], {5})
        >>> bin(masks.mask()[0])
        '0b10110'
        >>> masks.accept([1])
        >>> bin(masks.mask()[0]), masks.num_accepted
        ('0b100001', 1)
    """

    def __init__(
        self,
        automaton: Automaton,
        tokens: Sequence[bytes],
        end_token_ids: Collection[int],
    ) -> None:
        self.num_accepted, self._state = 0, 0
        self._automaton, self._tokens = automaton, tokens
        self._ends, self._masks = set(end_token_ids), dict[int, np.ndarray]()
        # A trie: each node is a beginning of tokens, with the tokens that end there.
        self._root: tuple[dict[int, Any], list[int]] = ({}, [])
        for token, text in enumerate(tokens):
            if token not in self._ends and text:
                node = self._root
                for byte in text:
                    node = node[0].setdefault(byte, ({}, []))
                node[1].append(token)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the output's next tokens.

        Raises:
            RequestError: if the pattern does not allow them.
        """
        state: int | None = self._state
        for token in token_ids:
            if token in self._ends or not self._tokens[token]:
                raise RequestError(f"token {token} cannot be part of a match")
            for byte in self._tokens[token]:
                state = None if state is None else self._automaton.step(state, byte)
        if state is None:
            raise RequestError("the output does not match the pattern")
        self._state = state
        self.num_accepted += len(token_ids)

    def mask(self) -> Int32[np.ndarray, " words"]:
        """Return which tokens may follow: bit i % 32 of word i // 32 for token i."""
        if self._state not in self._masks:
            self._masks[self._state] = self._mask(self._state)
        return self._masks[self._state].copy()

    def _mask(self, state: int) -> Int32[np.ndarray, " words"]:
        bits = np.zeros(-(-len(self._tokens) // 32) * 32, dtype=bool)
        bits[list(self._ends)] = state in self._automaton.accepting
        reached = [(self._root, state)]
        while reached:
            (children, _), state = reached.pop()
            for byte, child in children.items():
                after = self._automaton.step(state, byte)
                if after is not None:  # otherwise no longer token can match, either
                    bits[child[1]] = True
                    reached.append((child, after))
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def copy(self) -> "TokenMasks":
        """Return an independent copy, for another output."""
        return copy(self)  # the trie and the masks never change, so they are shared


def ready(
    num_scheduled: Int[np.ndarray, " B"],
    num_known: Int[np.ndarray, " B"],
    max_len: Int[np.ndarray, " B"],
    waits: Int[np.ndarray, " B"],
) -> Bool[np.ndarray, " B"]:
    """Decide which running requests have a token that the next step can compute.

    The host launches a step before it has read the tokens of the step before (pipeline
    depth 1). A token that is sampled on the device already counts as scheduled, and the
    next step can compute its keys although the host does not know which token it is.
    What must hold:
        - A request is not ready if its last token has been scheduled: nothing follows
          it.
        - A request whose output follows a grammar is ready only if the host knows all
          its tokens, because the mask of its next token depends on them.
        - Nothing else makes a request wait, and no request waits for another one.

    The scheduler calls this once in every step, so the engine's version has no loop;
    the grader accepts a loop.

    Args:
        num_scheduled: [B] tokens of each request, prompt included, that exist once all
            launched steps are done.
        num_known: [B] those of them whose ids the host knows.
        max_len: [B] most tokens of each request, prompt included.
        waits: [B] 1 if the output follows a grammar, otherwise 0.

    Returns:
        [B] booleans.

    Example: all have a token on the device. The first one decodes on, the second one
    waits for the token, and the third one is complete with it.

        >>> ready(*np.array([[6, 6, 6], [5, 5, 5], [9, 9, 6], [0, 1, 0]]))
        array([ True, False, False])
    """
    is_unfinished = num_scheduled < max_len
    return is_unfinished & ((waits == 0) | (num_known == num_scheduled))


class SloAdmission:
    """Admits and refuses requests so that as many as possible meet an objective.

    It is a `Policy` of `book.serving_simulator`, whose `simulate` calls `decide` before
    each step. Read that file: a formula says how long a step takes, and constants say
    how large the step and the batch may be and what the objective is. A refused request
    does not meet it, but takes no time from others.

    It is scored on arrivals that you do not know. They come in bursts, and are more
    than the server can answer in time: first come, first served scores 0, and the
    reference scores 1.

    Example: an idle server admits what it can answer.

        >>> SloAdmission().decide(0.0, [Waiting(7, 0.0, 50)], [], free=16)
        ([7], [])
    """

    def decide(
        self, now: float, waiting: Sequence[Waiting], left: Sequence[int], free: int
    ) -> tuple[list[int], list[int]]:
        """Decide before a step.

        Args:
            now: in seconds.
            waiting: the requests that wait, oldest first.
            left: for each running request, the tokens of its prompt that are not
                computed yet; 0 while it decodes.
            free: places in the batch; no more are admitted.

        Returns:
            The numbers of the requests that are admitted, the first one first, and of
            those that are refused. The others wait.
        """
        left, admitted, refused = list(left), [], []
        # A short prompt takes little time from the others. Long ones pay for them all.
        for request in sorted(waiting, key=lambda request: request.num_prompt):
            arrives = now + self._seconds(left, request.num_prompt)
            if arrives > request.arrival + FIRST_SECONDS:
                refused.append(request.number)  # and now, so that it can go elsewhere
            elif len(admitted) < free and self._pays(left, request.num_prompt):
                admitted.append(request.number)
                left.append(request.num_prompt)
        return admitted, refused

    @staticmethod
    def _pays(left: Sequence[int], num_prompt: int) -> bool:
        """Whether a prompt is to be computed now, beside those that run."""
        # Each decode takes a token of the step from the prompts. Of two prompts that do
        # not fit into one step, the second one gains nothing by being admitted now.
        return len(left) < 10 and (sum(left) + num_prompt <= BUDGET or not any(left))

    @staticmethod
    def _seconds(left: Sequence[int], num_prompt: int) -> float:
        """Seconds until a prompt is computed, after those that are being computed."""
        decodes, work = left.count(0), sum(left) + num_prompt
        steps = -(-work // (BUDGET - decodes))
        return steps * (FIXED_SECONDS + TOKEN_SECONDS * decodes) + TOKEN_SECONDS * work
