"""Grader of chapter 16. Its oracles: json, an engine that counts pages, sorted lists, and tokens read one by one."""

import functools
import itertools
import json
import math
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from book.grading import Exercise, Homework, assert_close, assert_equal, assert_raises, check, require
from book.serving_simulator import Client, Waiting, simulate
from mini_engine.bench.load import Arrivals
from mini_engine.errors import RequestError
from mini_engine.serving.admission import QueueFullError

EXERCISES = [
    Exercise(
        "event",
        points=2,
        minutes=8,
        difficulty=1,
        hints=(
            "Start from f'data: {json.dumps(value)}\\n\\n'. Which of the four demands does it miss?",
            "json.dumps escapes other characters by default. Its separators have spaces by default.",
            'b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\\n\\n"',
        ),
    ),
    Exercise(
        "ServingLoop",
        points=7,
        minutes=60,
        difficulty=3,
        hints=(
            "Two sets of requests: those whose clients are there, which `request` and `leave` change, and those that "
            "the engine has, which only `turn` changes. What travels between the two sides?",
            "`request` and `leave` put a function into a SimpleQueue. `turn` empties the queue, calls the functions, "
            "steps the engine if it has requests, and empties the inbox of pieces.",
            "Before you submit, check that the client is still there. Before you return a piece, check it again. A "
            "piece with an output, an error, and `leave` each end a request: drop its handle, and its number from the "
            "unfinished ones.",
        ),
    ),
    Exercise(
        "report",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "Write down for one request that is due at 1, is sent at 3, and gets tokens at 4 and 5: how long did its "
            "user wait for the first token?",
            "times[0] - due, and np.diff(times). Pool the gaps of all requests before you take percentiles.",
            "Leave out failed requests everywhere except in the end of the measurement. A request meets the objective "
            "if its TTFT is at most `first` and its largest gap at most `between`.",
        ),
    ),
    Exercise(
        "TokenMasks",
        points=7,
        minutes=60,
        difficulty=3,
        hints=(
            "For one token it is a loop over its bytes: step the automaton, stop at None. Make that right first, with "
            "the end tokens and the packing, and then save calls.",
            "Tokens that begin alike share steps. Put all tokens into a trie (a node for each beginning) once, in the "
            "constructor, and walk automaton and trie together. Keep the masks that you have computed, by state.",
            "A stack of (node, state), from the root and the current state. For each byte of the node: step; if there "
            "is a state, set the bits of the child's tokens and push the child. np.packbits(bits, bitorder='little')"
            ".view('<i4') packs a multiple of 32 bits.",
        ),
    ),
    Exercise(
        "ready",
        points=3,
        minutes=12,
        difficulty=2,
        part="ready",
        hints=(
            "Which count says that nothing is left to schedule? Which two counts differ while a token is on the "
            "device?",
            "num_scheduled == max_len: done. num_scheduled > num_known: a token is on the device.",
            "(num_scheduled < max_len) & ((waits == 0) | (num_scheduled == num_known))",
        ),
    ),
    Exercise(
        "SloAdmission",
        points=5,
        minutes=75,
        difficulty=3,
        challenge=True,
        hints=(
            "Begin with first come, first served, and refuse each request that can no longer have its first token in "
            "time. When is that certain?",
            "A prompt of n tokens behind w others needs about (n + w) / BUDGET steps. Refuse what comes too late even "
            "so. Then choose which of the rest to serve: one long prompt costs as much as five short ones.",
            "Shortest prompts first; refuse the late; admit only while fewer than about ten run, and while the prompts "
            "that are being computed fit into one step.",
        ),
    ),
]


# event --------------------------------------------------------------------------------------------------------------


def bytes_of(hw: Homework, value: Any) -> bytes:
    got = hw.event(value)
    require(isinstance(got, bytes), f"event returned a {type(got).__name__}; return bytes")
    return got


@check("event", mistake="an event is `data: ` with one space, the JSON, and a blank line")
def test_one_event(hw: Homework) -> None:
    for value in ({"text": "a"}, {}, {"choices": []}, {"n": 1}):
        got = bytes_of(hw, value)
        require(got.startswith(b"data: ") and got[6:7] != b" ", f"{got!r} does not begin with 'data: ' and the JSON")
        lines = got.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        require(lines.endswith(b"\n\n") and not lines.endswith(b"\n\n\n"), f"{got!r} does not end in one blank line")
        assert_equal(json.loads(got[6:]), value, name="the value that a client reads")


@check("event", mistake="lines end in a line feed alone: some clients find no token between carriage returns")
def test_line_feeds(hw: Homework) -> None:
    require(b"\r" not in bytes_of(hw, {"text": "a", "index": 0}), "the event has a carriage return")


@check("event", mistake="the JSON is one line; a line break in a text is escaped")
def test_line_breaks(hw: Homework) -> None:
    for text in ("a\nb", "\n", "a\r\nb", "data: \n\n"):
        got = bytes_of(hw, {"text": text, "rest": [1, 2]})
        require(got.count(b"\n") == 2, f"{got!r} does not have two line feeds")
        assert_equal(json.loads(got[6:])["text"], text, name="the text that a client reads")


@check("event", mistake="all bytes are ASCII: clients that split at any line separator break at a raw U+2028")
def test_other_characters(hw: Homework) -> None:
    for text in ("é", "\u2028", "\u0085", "日本", "😀", "\x00"):
        got = bytes_of(hw, {"text": text})
        require(got.isascii(), f"{got!r} has bytes that are not ASCII")
        assert_equal(json.loads(got[6:])["text"], text, name="the text that a client reads")


@check("event", mistake="json.dumps writes spaces between its items unless told otherwise")
def test_no_spaces(hw: Homework) -> None:
    got = bytes_of(hw, {"text": "a, b: c", "list": [1, {"x": None}]})
    assert_equal(got.count(b" "), 3, name="the number of spaces")


# ServingLoop --------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A piece of the fake engine."""

    index: int
    text: str
    output: str | None


@dataclass
class FakeEngine:
    """Answers a prompt, which is a text, with one letter a step. A running request holds two pages.

    Only `turn` may call it.
    """

    pages: int = 100
    running: dict[int, list[Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    in_turn: bool = False
    fails: bool = False
    on_step: Any = None

    def touch(self, what: str) -> None:
        require(self.in_turn, f"{what.split()[0]} was called outside of turn")
        self.calls.append(what)

    def submit(self, prompt: str, params: Any, inbox: deque, *, index: int) -> object:
        self.touch(f"submit {index}")
        if prompt == "refuse":
            raise RequestError("the prompt is refused")
        handle = object()
        self.running[id(handle)] = [handle, index, prompt, 0, inbox]
        self.pages -= 2
        return handle

    def abort(self, handle: Any) -> None:
        self.touch("abort")
        require(id(handle) in self.running or handle.__class__ is object, "abort takes what submit returned")
        if self.running.pop(id(handle), None) is not None:
            self.pages += 2

    def step(self) -> None:
        self.touch("step")
        if self.on_step is not None:
            self.on_step()
        if self.fails:
            raise ArithmeticError("the step failed")
        for key, (_, index, prompt, done, inbox) in list(self.running.items()):
            has_ended = done + 1 == len(prompt)
            inbox.append(Part(index, prompt[done], prompt if has_ended else None))
            self.running[key][3] += 1
            if has_ended:
                del self.running[key]
                self.pages += 2


@dataclass
class Served:
    """A loop of the submission over a fake engine."""

    hw: Homework
    most: int = 100
    engine: FakeEngine = field(default_factory=FakeEngine)

    def __post_init__(self) -> None:
        self.loop = self.hw.ServingLoop(self.engine, self.most)

    def turn(self) -> list[tuple[int, Any]]:
        self.engine.in_turn = True
        try:
            got = self.loop.turn()
        finally:
            self.engine.in_turn = False
        require(isinstance(got, list), f"turn returned a {type(got).__name__}; return a list")
        return got

    def turns(self, count: int = 12) -> dict[int, str]:
        """The texts that arrive in some turns."""
        texts: dict[int, str] = {}
        for number, piece in itertools.chain.from_iterable(self.turn() for _ in range(count)):
            require(isinstance(piece, Part), f"request {number} got {piece!r} in place of a piece")
            assert_equal(number, piece.index, name="the number beside a piece")
            texts[number] = texts.get(number, "") + piece.text
        return texts


@check("ServingLoop", mistake="turn submits what was asked for, steps once, and returns the pieces")
def test_one_request(hw: Homework) -> None:
    served = Served(hw)
    assert_equal(served.loop.request("abc", None), 0, name="the number of the first request")
    assert_equal([served.turn() for _ in range(3)], [[(0, Part(0, c, "abc" if c == "c" else None))] for c in "abc"],
                 name="what three turns return")  # fmt: skip
    assert_equal(served.engine.calls, ["submit 0", "step", "step", "step"], name="the calls of the engine")


@check("ServingLoop", mistake="a turn steps only if a request is unfinished: an idle server computes nothing")
def test_an_idle_loop(hw: Homework) -> None:
    served = Served(hw)
    assert_equal(served.turn(), [], name="what an idle turn returns")
    served.loop.request("ab", None)
    served.turns(5)
    assert_equal(served.engine.calls.count("step"), 2, name="the number of steps for an output of two tokens")


@check("ServingLoop", mistake="requests join between steps, and each gets its own pieces")
def test_requests_that_arrive_while_others_run(hw: Homework) -> None:
    served = Served(hw)
    served.loop.request("abcdef", None)
    first = served.turns(2)
    served.loop.request("xyz", None)
    served.loop.request("u", None)
    assert_equal(first, {0: "ab"}, name="the text of two turns")
    assert_equal(served.turns(), {0: "cdef", 1: "xyz", 2: "u"}, name="the texts of later turns")
    submits = [call for call in served.engine.calls if call != "step"]
    assert_equal(submits, ["submit 0", "submit 1", "submit 2"], name="the requests of the engine, in order")
    assert_equal(served.engine.calls.count("step"), 6, name="the number of steps for six tokens, two and three beside")


@check("ServingLoop", mistake="a client that leaves gets no more pieces, and its pages are free after the next turn")
def test_a_client_leaves(hw: Homework) -> None:
    served = Served(hw)
    served.loop.request("a" * 9, None)
    served.loop.request("b" * 9, None)
    served.turns(2)
    served.loop.leave(0)
    got = served.turns(1)
    assert_equal(got, {1: "b"}, name="what arrives after request 0 has left")
    assert_equal(served.engine.pages, 98, name="the free pages after the next turn")
    assert_equal(served.turns(), {1: "b" * 6}, name="what arrives later")
    assert_equal(served.engine.pages, 100, name="the free pages at the end")


@check("ServingLoop", mistake="a client may leave before its request has reached the engine, or after its last piece")
def test_early_and_late_leaves(hw: Homework) -> None:
    served = Served(hw)
    served.loop.request("aaa", None)
    served.loop.leave(0)
    assert_equal(served.turns(), {}, name="what arrives for a client that left at once")
    assert_equal(served.engine.pages, 100, name="the free pages after a client left at once")
    number = served.loop.request("b", None)
    assert_equal(served.turns(2), {number: "b"}, name="the next request's text")
    for _ in range(2):
        served.loop.leave(number)
        served.turn()
    assert_equal(served.loop.num_unfinished, 0, name="num_unfinished after a client has left twice")


@check("ServingLoop", mistake="a client may also leave during a step, whose pieces then have no reader")
def test_a_client_leaves_during_a_step(hw: Homework) -> None:
    served = Served(hw)
    served.loop.request("abc", None)
    served.loop.request("xyz", None)
    served.turn()
    served.engine.on_step = lambda: served.loop.leave(0)
    assert_equal([number for number, _ in served.turn()], [1], name="the requests with pieces of that step")
    served.engine.on_step = None
    served.turn()
    assert_equal(served.engine.pages, 100, name="the free pages one turn later")


@check("ServingLoop", mistake="requests are refused while as many as `most` are unfinished, waiting ones included")
def test_a_full_queue(hw: Homework) -> None:
    served = Served(hw, most=2)
    for _ in range(2):
        served.loop.request("ab", None)
    assert_equal(served.loop.num_unfinished, 2, name="num_unfinished")
    assert_raises(QueueFullError, served.loop.request, "c", None)
    served.turn()
    assert_raises(QueueFullError, served.loop.request, "c", None)
    served.turn()  # both have ended
    number = served.loop.request("d", None)
    assert_equal(served.turns(), {number: "d"}, name="what arrives for a request after the first two have ended")


@check("ServingLoop", mistake="a client that has left makes room, and a refused request takes none")
def test_leaving_makes_room(hw: Homework) -> None:
    served = Served(hw, most=1)
    for _ in range(3):
        number = served.loop.request("abc", None)
        assert_raises(QueueFullError, served.loop.request, "c", None)
        served.turn()
        served.loop.leave(number)
        assert_equal(served.loop.num_unfinished, 0, name="num_unfinished after the client has left")
        served.loop.leave(number)
    served.loop.request("x", None)
    assert_raises(QueueFullError, served.loop.request, "c", None)


@check("ServingLoop", mistake="the engine's RequestError goes to the client of the request, and to no other")
def test_the_engine_refuses(hw: Homework) -> None:
    served = Served(hw)
    served.loop.request("ab", None)
    served.loop.request("refuse", None)
    served.loop.request("cd", None)
    got = served.turn()
    errors = [(number, type(what)) for number, what in got if isinstance(what, Exception)]
    assert_equal(errors, [(1, RequestError)], name="the errors of the first turn")
    assert_equal({n: what.text for n, what in got if isinstance(what, Part)}, {0: "a", 2: "c"}, name="the other pieces")
    assert_equal(served.turns(), {0: "b", 2: "d"}, name="the pieces of later turns")
    assert_equal(served.loop.num_unfinished, 0, name="num_unfinished at the end")


@check("ServingLoop", mistake="a step that fails ends its requests with the error, and the loop goes on")
def test_a_step_fails(hw: Homework) -> None:
    served = Served(hw)
    for text in ("abc", "xyz"):
        served.loop.request(text, None)
    served.turn()
    served.engine.fails = True
    got = served.turn()
    errors = [(number, type(what)) for number, what in got]
    assert_equal(sorted(errors), [(0, ArithmeticError), (1, ArithmeticError)], name="what the clients get")
    assert_equal(served.engine.pages, 100, name="the free pages after the failure")
    served.engine.fails = False
    number = served.loop.request("uv", None)
    assert_equal(served.turns(), {number: "uv"}, name="what a later request gets")
    assert_equal(served.loop.num_unfinished, 0, name="num_unfinished at the end")


@check("ServingLoop", mistake="requests and leaves may come from other threads at any time, during a step, too")
def test_random_traffic(hw: Homework) -> None:
    rng = random.Random(3)
    for _ in range(60):
        served = Served(hw, most=rng.randint(1, 6))
        wanted: dict[int, str] = {}
        got: dict[int, str] = {}
        left: set[int] = set()

        def act(served: Served = served, wanted: dict = wanted, left: set = left, got: dict = got) -> None:
            if rng.random() < 0.6:
                text = "".join(rng.choices("abc", k=rng.randint(1, 6)))
                unfinished = [n for n in wanted if n not in left and got.get(n) != wanted[n]]
                try:
                    wanted[served.loop.request(text, None)] = text
                except QueueFullError:
                    require(len(unfinished) >= served.most, "a request was refused although there was room")
                else:
                    require(len(unfinished) < served.most, "a request was accepted although there was no room")
            elif wanted and rng.random() < 0.5:
                number = rng.choice(list(wanted))
                served.loop.leave(number)
                left.add(number)

        served.engine.on_step = act
        for _ in range(25):
            act()
            before = set(left)
            for number, piece in served.turn():
                require(number not in before, f"request {number} got a piece after its client had left")
                got[number] = got.get(number, "") + piece.text
        served.engine.on_step = None
        for number, piece in itertools.chain.from_iterable(served.turn() for _ in range(9)):
            got[number] = got.get(number, "") + piece.text
        for number, text in wanted.items():
            if number not in left:
                assert_equal(got.get(number), text, name=f"the text of request {number}")
        assert_equal(served.engine.pages, 100, name="the free pages at the end")
        assert_equal(served.loop.num_unfinished, 0, name="num_unfinished at the end")


@check("ServingLoop", mistake="a client may ask while a step runs, and does not wait for its end")
def test_asking_does_not_wait(hw: Homework) -> None:
    served = Served(hw)
    served.loop.request("ab", None)
    answered: list[int] = []

    def ask_from_another_thread() -> None:
        asking = threading.Thread(target=lambda: answered.append(served.loop.request("c", None)), daemon=True)
        asking.start()
        asking.join(10)
        require(answered, "request waited for the step to end")

    served.engine.on_step = ask_from_another_thread
    served.turn()
    served.engine.on_step = None
    assert_equal(served.turns(), {0: "b", 1: "c"}, name="what arrives after a request during a step")


# report -------------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """By its definition: linear interpolation between the sorted values."""
    ordered = sorted(values) or [0.0]
    at = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(at)], ordered[math.ceil(at)]
    return low + (high - low) * (at - math.floor(at))


def expected(seen: Sequence[Any], first: float, between: float) -> dict[str, float]:
    waits, gaps, met = [], [], 0
    for own in seen:
        if own.failed or not own.times:
            continue
        waits.append(own.times[0] - own.due)
        own_gaps = [b - a for a, b in itertools.pairwise(own.times)]
        gaps += own_gaps
        met += waits[-1] <= first and all(gap <= between for gap in own_gaps)
    span = max(t for own in seen for t in own.times) - min(own.due for own in seen)
    names = {"ttft_p50": (waits, 50), "ttft_p99": (waits, 99), "itl_p50": (gaps, 50), "itl_p99": (gaps, 99)}
    return {name: percentile(*of) for name, of in names.items()} | {"goodput": met / span}


def assert_report(hw: Homework, seen: list[Any], first: float, between: float, only: Sequence[str] = ()) -> None:
    got, want = hw.report(list(seen), first, between), expected(seen, first, between)
    for name in only or want:
        require(hasattr(got, name), f"report returned a {type(got).__name__}; return a Report")
        assert_close(float(getattr(got, name)), want[name], atol=1e-9, name=name)


def request_of(hw: Homework, due: float, wait: float, gaps: Sequence[float], late: float = 0.0, failed: bool = False):
    times = tuple((due + wait + np.cumsum([0.0, *gaps])).tolist())
    return hw.Seen(due, due + late, times, failed)


@check("report", mistake="the time to first token is the first token's time minus when the request was due")
def test_prompt_senders(hw: Homework) -> None:
    seen = [request_of(hw, i * 0.5, 0.2 + 0.01 * i, [0.1] * 3) for i in range(7)]
    assert_report(hw, seen, 9.0, 9.0, ("ttft_p50", "ttft_p99"))
    assert_report(hw, seen[::-1], 9.0, 9.0, ("ttft_p50", "ttft_p99"))


@check("report", mistake="a late generator hides the wait: count from when the request was due, not from `sent`")
def test_late_senders(hw: Homework) -> None:
    seen = [request_of(hw, i * 0.5, 0.2 + 0.1 * i, [0.1] * 3, late=0.1 * i) for i in range(7)]
    assert_report(hw, seen, 9.0, 9.0, ("ttft_p50", "ttft_p99"))


@check("report", mistake="inter-token latencies of all requests form one distribution, not one mean for each")
def test_gaps(hw: Homework) -> None:
    seen = [request_of(hw, 0, 0.2, [0.1] * 20), request_of(hw, 0, 0.2, [0.3, 0.4]), request_of(hw, 0, 0.2, [])]
    assert_report(hw, seen, 9.0, 9.0, ("itl_p50", "itl_p99"))
    assert_report(hw, [request_of(hw, 0, 0.2, [])], 9.0, 9.0, ("itl_p50", "itl_p99"))


@check("report", mistake="both parts of the objective count, and a value equal to its limit meets it")
def test_both_limits(hw: Homework) -> None:
    seen = [
        hw.Seen(0.0, 0.0, (1.0, 1.5)), hw.Seen(0.0, 0.0, (1.25, 1.5)), hw.Seen(0.0, 0.0, (0.5, 1.25)),
        hw.Seen(0.0, 0.0, (0.5, 0.75)), hw.Seen(0.0, 0.0, (0.25,)),
    ]  # fmt: skip
    assert_report(hw, seen, 1.0, 0.5, ("goodput",))


@check("report", mistake="one long pause misses the objective, even if the mean of the request is small")
def test_a_pause(hw: Homework) -> None:
    seen = [request_of(hw, 0, 0.2, [0.02] * 50 + [1.5] + [0.02] * 50), request_of(hw, 1.0, 0.2, [0.15] * 20)]
    assert_report(hw, seen, 1.0, 0.2, ("goodput",))


@check("report", mistake="goodput is per second, from the first due time to the last token of any request")
def test_the_seconds(hw: Homework) -> None:
    seen = [request_of(hw, 30.0, 0.2, [0.1] * 10), request_of(hw, 10.0, 0.5, [0.1]), request_of(hw, 20.0, 0.2, [40.0])]
    assert_report(hw, seen, 1.0, 0.2, ("goodput",))


@check("report", mistake="a failed request is in no percentile and does not meet the objective")
def test_failures(hw: Homework) -> None:
    fast = [request_of(hw, 0.1 * i, 0.01, [0.01], failed=True) for i in range(5)]
    seen = [*fast, hw.Seen(3.0, 3.0, (), True), request_of(hw, 1.0, 0.5, [0.1, 0.2])]
    assert_report(hw, seen, 1.0, 0.3)


@check("report", mistake="the report follows from the definitions for any requests")
def test_random_requests(hw: Homework) -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        seen = [
            request_of(
                hw, float(rng.uniform(0, 9)), float(rng.exponential(0.4)),
                rng.exponential(0.1, rng.integers(0, 9)).tolist(), float(rng.uniform()), bool(rng.random() < 0.2),
            )
            for _ in range(rng.integers(1, 12))
        ]  # fmt: skip
        assert_report(hw, seen, 0.5, 0.2)


# TokenMasks ---------------------------------------------------------------------------------------------------------

# Patterns as automata: (ab)+, a|ab+, [0-9]{1,3}(\.[0-9])?, "yes"|"no", é as two bytes any number of times.
DIGITS = range(48, 58)
PATTERNS = {
    "(ab)+": ([{97: 1}, {98: 2}, {97: 1}], {2}),
    "a|ab+": ([{97: 1}, {98: 2}, {98: 2}], {1, 2}),
    r"[0-9]{1,3}(\.[0-9])?": (
        [dict.fromkeys(DIGITS, 1), {**dict.fromkeys(DIGITS, 2), 46: 4}, {**dict.fromkeys(DIGITS, 3), 46: 4}, {46: 4},
         dict.fromkeys(DIGITS, 5), {}],
        {1, 2, 3, 5},
    ),
    "yes|no": ([{121: 1, 110: 3}, {101: 2}, {115: 4}, {111: 4}, {}], {4}),
    "é*": ([{0xC3: 1}, {0xA9: 0}], {0}),
}  # fmt: skip
TOKENS = [
    b"a", b"b", b"ab", b"ba", b"abab", b"abb", b"1", b"12", b"123", b"1234", b"12.", b".5", b"0", b"y", b"ye", b"yes",
    b"no", b"n", b"o", b"yesno", "é".encode(), b"\xc3", b"\xa9", b"\xa9\xc3", b"<end>", b"", b"", b"s", b"es", b"12.5",
    b".", b"5", b"bab", b"aba", b"<stop>", b"abababab",
]  # fmt: skip
ENDS = {24, 34}


@dataclass
class Counting:
    """An automaton that counts how often it is asked."""

    moves: list[dict[int, int]]
    accepting: frozenset[int]
    asked: int = 0

    def step(self, state: int, byte: int) -> int | None:
        self.asked += 1
        return self.moves[state].get(byte)


def automaton(name: str) -> Counting:
    moves, accepting = PATTERNS[name]
    return Counting([dict(own) for own in moves], frozenset(accepting))


def run(moves: Sequence[dict[int, int]], text: bytes) -> int | None:
    state: int | None = 0
    for byte in text:
        state = None if state is None else moves[state].get(byte)
    return state


def allowed(name: str, text: bytes, tokens: Sequence[bytes] = TOKENS, ends: set[int] = ENDS) -> list[int]:
    """Token by token, from the start of the text."""
    moves, accepting = PATTERNS[name]
    own = [i for i, token in enumerate(tokens) if i not in ends and token and run(moves, text + token) is not None]
    return sorted(own + (sorted(ends) if run(moves, text) in accepting else []))


def bits(hw: Homework, masks: Any, count: int = len(TOKENS)) -> list[int]:
    mask = masks.mask()
    require(isinstance(mask, np.ndarray), f"mask returned a {type(mask).__name__}; return an array")
    require(mask.dtype == np.int32 and mask.shape == (-(-count // 32),),
            f"mask returned {mask.dtype}{list(mask.shape)}; return int32[{-(-count // 32)}]")  # fmt: skip
    return [i for i in range(len(mask) * 32) if mask.view(np.uint32)[i // 32] >> (i % 32) & 1]


def assert_mask(hw: Homework, name: str, accepted: Sequence[int] = ()) -> Any:
    masks = hw.TokenMasks(automaton(name), list(TOKENS), set(ENDS))
    for token in accepted:
        masks.accept([token])
    text = b"".join(TOKENS[token] for token in accepted)
    assert_equal(bits(hw, masks), allowed(name, text), name=f"the tokens allowed by {name} after {text!r}")
    assert_equal(masks.num_accepted, len(accepted), name="num_accepted")
    return masks


@check("TokenMasks", mistake="a token is allowed if the automaton can read all its bytes, and not only the first one")
def test_the_first_token(hw: Homework) -> None:
    for name in PATTERNS:
        if name != "é*":  # whose empty text matches
            assert_mask(hw, name)


@check("TokenMasks", mistake="end tokens are allowed exactly where the bytes so far match")
def test_end_tokens(hw: Homework) -> None:
    assert_mask(hw, "yes|no", [15])
    assert_mask(hw, "yes|no", [14])
    assert_mask(hw, "é*")
    assert_mask(hw, "a|ab+", [0])


@check("TokenMasks", mistake="the state moves on with every accepted byte, also within a character")
def test_later_tokens(hw: Homework) -> None:
    for name, accepted in {
        "(ab)+": [[2], [0], [0, 1], [4, 2], [33], [33, 1]], "a|ab+": [[2], [5, 1, 1]], "é*": [[20], [21], [21, 23]],
        r"[0-9]{1,3}(\.[0-9])?": [[6], [7, 6], [8], [10], [10, 31], [7, 30]], "yes|no": [[13], [13, 28], [17, 18]],
    }.items():  # fmt: skip
        for own in accepted:
            assert_mask(hw, name, own)


@check("TokenMasks", mistake="accept raises a RequestError and takes nothing if one of its tokens is not allowed")
def test_refused_tokens(hw: Homework) -> None:
    for name, wrong in (("(ab)+", [2, 3]), ("(ab)+", [1]), ("yes|no", [15, 24]), ("yes|no", [25]), ("a|ab+", [2, 0])):
        masks = hw.TokenMasks(automaton(name), list(TOKENS), set(ENDS))
        assert_raises(RequestError, masks.accept, wrong)
        assert_equal(masks.num_accepted, 0, name="num_accepted after a refusal")
        assert_equal(bits(hw, masks), allowed(name, b""), name=f"the tokens allowed by {name} after a refusal")


@check("TokenMasks", mistake="a copy goes on by itself, and a caller may write into a mask")
def test_copies(hw: Homework) -> None:
    masks = assert_mask(hw, "(ab)+", [0])
    copied = masks.copy()
    copied.accept([1])
    assert_equal(bits(hw, masks), allowed("(ab)+", b"a"), name="the original after its copy has moved on")
    assert_equal(bits(hw, copied), allowed("(ab)+", b"ab"), name="the copy's tokens")
    assert_equal((masks.num_accepted, copied.num_accepted), (1, 2), name="num_accepted of both")
    masks.mask()[:] = 0
    assert_equal(bits(hw, masks), allowed("(ab)+", b"a"), name="a mask after its caller has overwritten the last one")


@check("TokenMasks", mistake="each mask follows from the pattern, on any walk through it")
def test_random_walks(hw: Homework) -> None:
    rng = random.Random(6)
    for name in PATTERNS:
        for _ in range(20):
            masks, text, steps = hw.TokenMasks(automaton(name), list(TOKENS), set(ENDS)), b"", 0
            while steps < 8 and (choices := [t for t in allowed(name, text) if t not in ENDS]):
                assert_equal(bits(hw, masks), allowed(name, text), name=f"the tokens allowed by {name} after {text!r}")
                token = rng.choice(choices)
                masks.accept([token])
                text, steps = text + TOKENS[token], steps + 1


@check("TokenMasks", mistake="tokens that begin alike share the automaton's steps: put them into a trie", costs=0.3)
def test_shared_beginnings(hw: Homework) -> None:
    texts = [b"ab" * 20 + bytes([97, 98][: i % 3]) + bytes([i]) for i in range(200)]
    beginnings = {text[:i] for text in texts for i in range(1, len(text) + 1)}
    counting = automaton("(ab)+")
    masks = hw.TokenMasks(counting, [*texts, b""], {200})
    masks.mask()
    require(
        counting.asked <= len(beginnings),
        f"{counting.asked:,} steps of the automaton for one mask; the tokens have {len(beginnings):,} beginnings",
    )


@check("TokenMasks", mistake="keep the masks of the states that you have met", costs=0.2)
def test_the_same_state_again(hw: Homework) -> None:
    counting = automaton("(ab)+")
    masks = hw.TokenMasks(counting, list(TOKENS), set(ENDS))
    masks.accept([2])
    masks.mask()
    masks.accept([2])
    asked = counting.asked
    masks.mask()
    require(counting.asked == asked, f"{counting.asked - asked} steps of the automaton for a mask that was known")


# ready --------------------------------------------------------------------------------------------------------------


def assert_ready(hw: Homework, rows: Sequence[tuple[int, int, int, int]]) -> None:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(4)]
    before = [column.copy() for column in columns]
    got = hw.ready(*columns)
    require(all(map(np.array_equal, before, columns)), "you changed an argument")
    want = []
    for scheduled, known, longest, waits in rows:
        if scheduled >= longest or (waits and known < scheduled):
            want.append(False)
        else:
            want.append(True)
    require(np.shape(got) == (len(rows),), f"ready returned the shape {list(np.shape(got))}, expected [{len(rows)}]")
    require(np.asarray(got).dtype == bool, f"ready returned {np.asarray(got).dtype}; return booleans")
    assert_equal(np.asarray(got).tolist(), want, name=f"ready for (num_scheduled, num_known, max_len, waits) {rows}")


@check("ready", mistake="a request whose last token has been scheduled has nothing left")
def test_finished_requests(hw: Homework) -> None:
    assert_ready(hw, [(5, 5, 9, 0), (9, 9, 9, 0), (8, 8, 9, 0)])
    assert_ready(hw, [(9, 8, 9, 0), (9, 8, 9, 1), (9, 9, 9, 1)])


@check("ready", mistake="a request without a grammar does not wait for the token on the device")
def test_free_requests(hw: Homework) -> None:
    assert_ready(hw, [(6, 5, 9, 0), (6, 6, 9, 0), (2, 1, 9, 0)])


@check("ready", mistake="a request with a grammar waits while one of its tokens is on the device, and only then")
def test_requests_with_a_grammar(hw: Homework) -> None:
    assert_ready(hw, [(6, 5, 9, 1), (6, 6, 9, 1)])
    assert_ready(hw, [(6, 6, 9, 1)])


@check("ready", mistake="no request waits for another one")
def test_mixed_requests(hw: Homework) -> None:
    assert_ready(hw, [(6, 5, 9, 0), (6, 5, 9, 1), (6, 6, 9, 1), (9, 9, 9, 0)])
    assert_ready(hw, [(6, 5, 9, 1), (4, 3, 9, 0)])
    assert_ready(hw, [])


@check("ready", mistake="each request is decided by its own four numbers")
def test_random_rows(hw: Homework) -> None:
    rng = np.random.default_rng(7)
    for _ in range(200):
        rows = []
        for _ in range(int(rng.integers(0, 9))):
            scheduled = int(rng.integers(1, 12))
            known = scheduled - int(rng.integers(0, min(2, scheduled)))
            rows.append((scheduled, known, scheduled + int(rng.integers(0, 3)), int(rng.integers(0, 2))))
        assert_ready(hw, rows)


# SloAdmission -------------------------------------------------------------------------------------------------------


class InOrder:
    """First come, first served."""

    def decide(
        self, now: float, waiting: Sequence[Waiting], left: Sequence[int], free: int
    ) -> tuple[list[int], list[int]]:
        return [request.number for request in waiting[:free]], []


def arrivals(seed: int, rate: float) -> list[Client]:
    rng = np.random.default_rng(seed)
    times = Arrivals(rate, 0.2, seed).times(250)
    lengths = rng.lognormal(np.log([[90], [16]]), 0.9, (2, 250)).clip([[8], [2]], [[800], [64]]).astype(int)
    return [Client(float(time), int(p), int(o)) for time, p, o in zip(times, *lengths, strict=True)]


HIDDEN = ((101, 3.0), (102, 4.0), (103, 5.0))


def met(policy: Any) -> float:
    """The share of requests that meet the objective."""
    shares = []
    for seed, rate in HIDDEN:
        clients = arrivals(seed, rate)
        simulate(clients, policy())
        shares.append(sum(client.is_met for client in clients) / len(clients))
    return sum(shares) / len(shares)


REFERENCE = 0.768


@functools.cache
def of_in_order() -> float:
    return met(InOrder)


def score(hw: Homework) -> float:
    return (met(hw.SloAdmission) - of_in_order()) / (REFERENCE - of_in_order())


def decisions(hw: Homework) -> Iterator[tuple[Any, ...]]:
    policy = hw.SloAdmission()
    for left in ([], [0], [100, 0, 0], [0] * 15):
        for count in (0, 1, 5):
            waiting = [Waiting(i, 10 + 0.1 * i, 20 + 30 * i) for i in range(count)]
            yield waiting, 16 - len(left), policy.decide(10.5, waiting, list(left), 16 - len(left))


@check("SloAdmission", mistake="decide returns two lists of numbers of waiting requests, at most `free` in the first")
def test_decisions(hw: Homework) -> None:
    for waiting, free, got in decisions(hw):
        require(isinstance(got, tuple) and len(got) == 2, "decide returns a pair: the admitted and the refused numbers")
        admitted, refused = map(list, got)
        chosen = admitted + refused
        require(len(admitted) <= free, f"decide admitted {len(admitted)} requests with {free} free places")
        require(len(set(chosen)) == len(chosen), f"decide named a request twice: {chosen}")
        require(set(chosen) <= {request.number for request in waiting}, f"decide named {chosen} of {waiting}")


@check("SloAdmission", mistake="an idle server has no reason to let a short request wait, or to refuse it")
def test_an_idle_server(hw: Homework) -> None:
    clients = [Client(10.0 * i, 50, 5) for i in range(4)]
    simulate(clients, hw.SloAdmission())
    require(all(client.is_met for client in clients), "requests that came one by one did not meet the objective")


@check("SloAdmission", mistake="you meet the objective hardly more often than first come, first served", seconds=60)
def test_better_than_in_order(hw: Homework) -> None:
    got = score(hw)
    assert got > 0.15, f"your score is {got:.2f}; first come, first served scores 0"


@check("SloAdmission", mistake="refuse requests that cannot have their first token in time", costs=0.4, seconds=60)
def test_as_good_as_refusing(hw: Homework) -> None:
    got = score(hw)
    assert got >= 0.68, f"your score is {got:.2f}; refusing what comes too late, behind those that run, scores 0.72"


@check("SloAdmission", mistake="short prompts first, and fewer of them at once", costs=0.3, seconds=60)
def test_better_than_refusing(hw: Homework) -> None:
    got = score(hw)
    assert got >= 0.92, f"your score is {got:.2f}; the reference scores 1"
