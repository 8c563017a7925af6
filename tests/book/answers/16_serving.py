"""Right and wrong answers to the homework of chapter 16. They test its grader."""

import json
import queue
import threading
from collections import deque
from itertools import pairwise

import numpy as np

from book.grading import right, solution, wrong
from book.serving_simulator import BUDGET, FIRST_SECONDS, FIXED_SECONDS, TOKEN_SECONDS
from mini_engine.errors import RequestError
from mini_engine.serving.admission import QueueFullError

reference = solution("16_serving")

# event --------------------------------------------------------------------------------------------------------------


@right("event")
def by_an_encoder(value):
    return f"data: {json.JSONEncoder(separators=(',', ':')).encode(value)}\n\n".encode("ascii")


@wrong("event", fails="test_one_event")
def as_text(value):
    return reference.event(value).decode()


@wrong("event", fails="test_one_event")
def without_the_space(value):
    return reference.event(value).replace(b"data: ", b"data:", 1)


@wrong("event", fails="test_one_event")
def without_a_blank_line(value):
    return reference.event(value)[:-1]


@wrong("event", fails="test_one_event")
def with_a_type(value):
    return b"event: message\n" + reference.event(value)


@wrong("event", fails="test_line_feeds")
def with_carriage_returns(value):
    return reference.event(value).replace(b"\n", b"\r\n")


@wrong("event", fails="test_line_breaks")
def indented(value):
    return b"data: " + json.dumps(value, indent=1).encode() + b"\n\n"


@wrong("event", fails="test_other_characters")
def raw_characters(value):
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@wrong("event", fails="test_no_spaces")
def default_separators(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# ServingLoop --------------------------------------------------------------------------------------------------------


@right("ServingLoop")
class WithOneRecordForEach:
    """One record for each request, and a queue of what was asked for."""

    def __init__(self, engine, most):
        self.engine, self.most = engine, most
        self.asked, self.inbox, self.records, self.next = queue.Queue(), deque(), {}, 0

    @property
    def num_unfinished(self):
        return sum(record["state"] in ("asked", "runs") for record in list(self.records.values()))

    def request(self, prompt, params):
        if self.num_unfinished >= self.most:
            raise QueueFullError("full")
        number, self.next = self.next, self.next + 1
        self.records[number] = {"state": "asked", "prompt": prompt, "params": params, "handle": None}
        self.asked.put(number)
        return number

    def leave(self, number):
        record = self.records[number]
        if record["state"] in ("asked", "runs"):
            record["state"] = "left"

    def turn(self):
        out = []
        for record in list(self.records.values()):
            if record["state"] == "left" and record["handle"] is not None:
                self.engine.abort(record["handle"])
                record["handle"] = None
        while not self.asked.empty():
            number = self.asked.get()
            record = self.records[number]
            if record["state"] == "asked":
                try:
                    own = self.engine.submit(record["prompt"], record["params"], self.inbox, index=number)
                    record["handle"], record["state"] = own, "runs"
                except RequestError as error:
                    out.append((number, error))
                    record["state"] = "ended"
        of_engine = {n: record for n, record in self.records.items() if record["handle"] is not None}
        try:
            if of_engine:
                self.engine.step()
        except Exception as error:
            for number, record in of_engine.items():
                self.engine.abort(record["handle"])
                record["handle"] = None
                if record["state"] == "runs":
                    record["state"] = "ended"
                    out.append((number, error))
        pieces, self.inbox = self.inbox, self.inbox
        while pieces:
            piece = pieces.popleft()
            record = self.records[piece.index]
            if record["state"] == "runs":
                out.append((piece.index, piece))
            if piece.output is not None:
                record["handle"] = None
                if record["state"] == "runs":
                    record["state"] = "ended"
        return out


class Loop(reference.ServingLoop):
    """The reference; the wrong answers change one method."""


@wrong("ServingLoop", fails="test_one_request")
class SubmitsAtOnce(Loop):
    def request(self, prompt, params):
        number = super().request(prompt, params)
        self._commands.get()
        self._submit(number, prompt, params)
        return number


@wrong("ServingLoop", fails="test_one_request")
class StepsFirst(Loop):
    """It does what others have asked for after the step."""

    def turn(self):
        waiting = []
        while not self._commands.empty():
            waiting.append(self._commands.get())
        arrived = super().turn()
        for command in waiting:
            command()
        return arrived


@wrong("ServingLoop", fails="test_an_idle_loop")
class StepsAlways(Loop):
    def turn(self):
        idle = not self._handles and self._commands.empty()
        if idle:
            self._engine.step()
        return super().turn()


@wrong("ServingLoop", fails="test_requests_that_arrive_while_others_run")
class OneAfterTheOther(Loop):
    """A request waits until the one before it has ended."""

    def turn(self):
        later = []
        while not self._commands.empty():
            command = self._commands.get()
            if command.func.__name__ == "_submit" and (self._handles or later):
                later.append(command)
            else:
                command()
                if self._handles:
                    break
        while not self._commands.empty():
            later.append(self._commands.get())
        arrived = super().turn()
        for command in later:
            self._commands.put(command)
        return arrived


@wrong("ServingLoop", fails="test_a_client_leaves")
class DisconnectsLeakPages(Loop):
    def leave(self, number):
        self._unfinished.discard(number)


@wrong("ServingLoop", fails="test_a_client_leaves")
class PiecesForThoseWhoLeft(Loop):
    """It forgets to abort, and to look who is still there."""

    def leave(self, number):
        pass


@wrong("ServingLoop", fails="test_early_and_late_leaves")
class ForgetsThoseWhoLeaveAtOnce(Loop):
    """It aborts before it submits."""

    def leave(self, number):
        if number in self._handles:
            self._commands.put(lambda: self._abort(number))
            self._unfinished.discard(number)


@wrong("ServingLoop", fails="test_early_and_late_leaves")
class LeavesTwice(Loop):
    def leave(self, number):
        self._unfinished.remove(number)
        self._commands.put(lambda: self._abort(number))


@wrong("ServingLoop", fails="test_a_client_leaves_during_a_step")
class LooksBeforeTheStep(Loop):
    def turn(self):
        there = set(self._unfinished)
        arrived = super().turn()
        gone = there - self._unfinished
        seen = {number for number, _ in arrived}
        return arrived + [(number, None) for number in gone - seen if number in self._handles]


@wrong("ServingLoop", fails="test_a_full_queue")
class NoBound(Loop):
    def request(self, prompt, params):
        self._most = 10**9
        return super().request(prompt, params)


@wrong("ServingLoop", fails="test_a_full_queue")
class OneTooMany(Loop):
    def __init__(self, engine, most):
        super().__init__(engine, most + 1)


@wrong("ServingLoop", fails="test_a_full_queue")
class CountsOnlyWhatWaits(Loop):
    """Requests that the engine has are not counted."""

    def request(self, prompt, params):
        waiting = len(self._unfinished - self._handles.keys())
        unfinished, self._unfinished = self._unfinished, set(range(-waiting, 0))
        try:
            number = super().request(prompt, params)
        finally:
            self._unfinished = unfinished
        self._unfinished.add(number)
        return number


@wrong("ServingLoop", fails="test_leaving_makes_room")
class RoomAfterTheTurn(Loop):
    """A client that has left counts until the engine has heard of it."""

    def __init__(self, engine, most):
        super().__init__(engine, most)
        self._bound, self._gone = most, set()

    def request(self, prompt, params):
        self._most = self._bound - len(self._gone)
        return super().request(prompt, params)

    def leave(self, number):
        self._gone |= {number} & self._unfinished
        super().leave(number)

    @property
    def num_unfinished(self):
        return len(self._unfinished) + len(self._gone)

    def turn(self):
        self._gone.clear()
        return super().turn()


@wrong("ServingLoop", fails="test_the_engine_refuses")
class RefusalsEndTheLoop(Loop):
    def _submit(self, number, prompt, params):
        self._handles[number] = self._engine.submit(prompt, params, self._inbox, index=number)


@wrong("ServingLoop", fails="test_the_engine_refuses")
class RefusedRequestsStayUnfinished(Loop):
    def turn(self):
        before = set(self._unfinished)
        arrived = super().turn()
        errors = {number for number, what in arrived if isinstance(what, RequestError)}
        self._unfinished |= before & errors
        return arrived


@wrong("ServingLoop", fails="test_a_step_fails")
class FailuresKeepTheirPages(Loop):
    """It forgets the requests of a failed step, and does not abort them."""

    def leave(self, number):
        self._unfinished.discard(number)
        self._commands.put(lambda: Loop._abort(self, number))

    def _abort(self, number):
        del self._handles[number]


@wrong("ServingLoop", fails="test_a_step_fails")
class FailuresGoOut(Loop):
    def turn(self):
        arrived = super().turn()
        for _, what in arrived:
            if isinstance(what, ArithmeticError):
                raise what
        return arrived


@wrong("ServingLoop", fails="test_asking_does_not_wait")
class LockedDuringAStep(Loop):
    """One lock for everything, so a request waits for the step."""

    def __init__(self, engine, most):
        super().__init__(engine, most)
        self._lock = threading.RLock()

    def request(self, prompt, params):
        with self._lock:
            return super().request(prompt, params)

    def turn(self):
        with self._lock:
            return super().turn()


# report -------------------------------------------------------------------------------------------------------------


@right("report")
def in_loops(seen, first, between):
    good = [own for own in seen if not own.failed and own.times]
    gaps = [[b - a for a, b in pairwise(own.times)] for own in good]
    met = 0
    for own, own_gaps in zip(good, gaps, strict=True):
        met += own.times[0] - own.due <= first and not any(gap > between for gap in own_gaps)
    pooled = [gap for own in gaps for gap in own] or [0.0]
    waits = [own.times[0] - own.due for own in good] or [0.0]
    start, end = min(own.due for own in seen), max(own.times[-1] for own in seen if own.times)
    percentiles = [float(np.percentile(values, p)) for values in (waits, pooled) for p in (50, 99)]
    return reference.Report(*percentiles, met / (end - start))


def changed(seen, first, between, change):
    return reference.report([change(own) for own in seen], first, between)


@wrong("report", fails="test_prompt_senders")
def sorted_by_accident(seen, first, between):
    """The TTFT of the first request in the list, and of the last."""
    good = [own for own in seen if not own.failed and own.times]
    waits = [own.times[0] - own.due for own in good] or [0.0]
    return reference.report(seen, first, between)._replace(ttft_p50=waits[0], ttft_p99=waits[-1])


@wrong("report", fails="test_late_senders")
def from_when_it_was_sent(seen, first, between):
    found = changed(seen, first, between, lambda own: own._replace(due=own.sent))
    return found._replace(goodput=reference.report(seen, first, between).goodput)


@wrong("report", fails="test_gaps")
def means_of_requests(seen, first, between):
    good = [own for own in seen if not own.failed and len(own.times) > 1]
    means = [(own.times[-1] - own.times[0]) / (len(own.times) - 1) for own in good] or [0.0]
    p50, p99 = np.percentile(means, (50, 99)).tolist()
    return reference.report(seen, first, between)._replace(itl_p50=p50, itl_p99=p99)


@wrong("report", fails="test_gaps")
def with_the_first_token(seen, first, between):
    good = [own for own in seen if not own.failed and own.times]
    gaps = [gap for own in good for gap in np.diff([own.due, *own.times])]
    p50, p99 = np.percentile(gaps or [0.0], (50, 99)).tolist()
    return reference.report(seen, first, between)._replace(itl_p50=p50, itl_p99=p99)


@wrong("report", fails="test_both_limits")
def only_the_first_token(seen, first, between):
    return reference.report(seen, first, between)._replace(goodput=reference.report(seen, first, 1e9).goodput)


@wrong("report", fails="test_both_limits")
def below_the_limits(seen, first, between):
    return reference.report(seen, first, between)._replace(
        goodput=reference.report(seen, first - 1e-9, between - 1e-9).goodput
    )


@wrong("report", fails="test_a_pause")
def on_average(seen, first, between):
    met = 0
    for own in seen:
        if own.times and not own.failed:
            mean = (own.times[-1] - own.times[0]) / max(len(own.times) - 1, 1)
            met += own.times[0] - own.due <= first and mean <= between
    seconds = max(own.times[-1] for own in seen if own.times) - min(own.due for own in seen)
    return reference.report(seen, first, between)._replace(goodput=met / seconds)


@wrong("report", fails="test_the_seconds")
def since_zero(seen, first, between):
    found = reference.report(seen, first, between)
    end = max(own.times[-1] for own in seen if own.times)
    return found._replace(goodput=found.goodput * (end - min(own.due for own in seen)) / end)


@wrong("report", fails="test_failures")
def failures_counted(seen, first, between):
    return changed(seen, first, between, lambda own: own._replace(failed=False))


@wrong("report", fails="test_failures")
def failures_forgotten(seen, first, between):
    return reference.report([own for own in seen if not own.failed], first, between)


# TokenMasks ---------------------------------------------------------------------------------------------------------


@right("TokenMasks")
class SortedTokens:
    """Tokens in the order of their bytes: each keeps the states of the beginning that it shares with the one before."""

    def __init__(self, automaton, tokens, end_token_ids, state=0, known=None, num_accepted=0):
        self.given = automaton, tokens, end_token_ids
        self.state, self.known, self.num_accepted = state, {} if known is None else known, num_accepted
        ends = set(end_token_ids)
        self.order = sorted((text, i) for i, text in enumerate(tokens) if text and i not in ends)

    def accept(self, token_ids):
        automaton, tokens, ends = self.given
        state = self.state
        for token in token_ids:
            if token in ends or not tokens[token]:
                raise RequestError("not allowed")
            for byte in tokens[token]:
                state = automaton.step(state, byte)
                if state is None:
                    raise RequestError("not allowed")
        self.state, self.num_accepted = state, self.num_accepted + len(token_ids)

    def mask(self):
        if self.state not in self.known:
            self.known[self.state] = self.compute()
        return self.known[self.state].copy()

    def compute(self):
        automaton, tokens, ends = self.given
        words = np.zeros(-(-len(tokens) // 32), dtype=np.uint32)
        before, states = b"", [self.state]
        for text, token in self.order:
            shared = next((i for i, pair in enumerate(zip(text, before, strict=False)) if len(set(pair)) > 1), None)
            shared = min(len(text), len(before)) if shared is None else shared
            states = states[: shared + 1]
            for byte in text[shared:]:
                states.append(None if states[-1] is None else automaton.step(states[-1], byte))
            before = text
            if states[-1] is not None:
                words[token // 32] |= np.uint32(1 << token % 32)
        if self.state in automaton.accepting:
            for token in ends:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)

    def copy(self):
        return SortedTokens.definition(*self.given, self.state, self.known, self.num_accepted)


class Simple(reference.TokenMasks):
    """Token by token, without a trie. The wrong answers change one method."""

    def allows(self, state, text):
        for byte in text:
            state = self._automaton.step(state, byte)
            if state is None:
                return False
        return True

    def may_end(self, state):
        return state in self._automaton.accepting

    def _mask(self, state):
        bits = np.zeros(-(-len(self._tokens) // 32) * 32, dtype=bool)
        for token, text in enumerate(self._tokens):
            bits[token] = self.may_end(state) if token in self._ends else bool(text) and self.allows(state, text)
        return self.pack(bits)

    def pack(self, bits):
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def copy(self):
        copied = object.__new__(type(self))
        copied.__dict__ |= self.__dict__
        return copied


@wrong("TokenMasks", fails="test_the_first_token")
class FirstBytes(Simple):
    def allows(self, state, text):
        return super().allows(state, text[:1])


@wrong("TokenMasks", fails="test_the_first_token")
class WholeMatches(Simple):
    """A token is allowed only if the text then matches."""

    def allows(self, state, text):
        for byte in text:
            state = None if state is None else self._automaton.step(state, byte)
        return state in self._automaton.accepting


@wrong("TokenMasks", fails="test_the_first_token")
class MatchesWithin(Simple):
    """A token is allowed if a beginning of it completes a match."""

    def allows(self, state, text):
        if super().allows(state, text):
            return True
        for byte in text:
            state = self._automaton.step(state, byte)
            if state is None:
                return False
            if state in self._automaton.accepting:
                return True
        return False


@wrong("TokenMasks", fails="test_the_first_token")
class BigEndian(Simple):
    def pack(self, bits):
        return np.packbits(bits).view(">i4").astype(np.int32)


@wrong("TokenMasks", fails="test_the_first_token")
class EmptyTokens(Simple):
    def _mask(self, state):
        bits = np.array([token in self._ends or self.allows(state, text) for token, text in enumerate(self._tokens)])
        bits[list(self._ends)] = self.may_end(state)
        return self.pack(np.resize(np.append(bits, np.zeros(64, bool)), -(-len(bits) // 32) * 32))


@wrong("TokenMasks", fails="test_end_tokens")
class EndsOnlyIfNothingFollows(Simple):
    def may_end(self, state):
        return super().may_end(state) and not self._automaton.moves[state]


@wrong("TokenMasks", fails="test_end_tokens")
class NoEnds(Simple):
    def may_end(self, state):
        return False


@wrong("TokenMasks", fails="test_later_tokens")
class LastByteOnly(Simple):
    def accept(self, token_ids):
        Simple.accept(self, token_ids)
        last = self._tokens[token_ids[-1]][-1:]
        self._state = next((s for m in self._automaton.moves for b, s in m.items() if bytes([b]) == last), 0)


@wrong("TokenMasks", fails="test_refused_tokens")
class HalfAccepted(Simple):
    def accept(self, token_ids):
        for token in token_ids:
            super().accept([token])


@wrong("TokenMasks", fails="test_refused_tokens")
class ValueErrors(Simple):
    def accept(self, token_ids):
        try:
            super().accept(token_ids)
        except RequestError as error:
            raise ValueError(str(error)) from error


@wrong("TokenMasks", fails="test_copies")
class TheSame(Simple):
    def copy(self):
        return self


@wrong("TokenMasks", fails="test_copies")
class TheCachedMask(Simple):
    def mask(self):
        super().mask()
        return self._masks[self._state]


@wrong("TokenMasks", fails="test_copies")
class FromTheStart(Simple):
    def copy(self):
        return reference.TokenMasks(self._automaton, self._tokens, self._ends)


@wrong("TokenMasks", fails="test_shared_beginnings")
class TokenByToken(Simple):
    pass


@wrong("TokenMasks", fails="test_the_same_state_again")
class NothingKept(reference.TokenMasks):
    def mask(self):
        return self._mask(self._state)


# ready --------------------------------------------------------------------------------------------------------------


@right("ready")
def one_by_one(num_scheduled, num_known, max_len, waits):
    rows = zip(num_scheduled, num_known, max_len, waits, strict=True)
    return np.array([s < m and not (w and s != k) for s, k, m, w in rows], dtype=bool)


@wrong("ready", fails="test_finished_requests")
def by_what_is_known(num_scheduled, num_known, max_len, waits):
    return (num_known < max_len) & ((waits == 0) | (num_scheduled == num_known))


@wrong("ready", fails="test_finished_requests")
def one_token_too_many(num_scheduled, num_known, max_len, waits):
    return (num_scheduled <= max_len) & ((waits == 0) | (num_scheduled == num_known))


@wrong("ready", fails="test_free_requests")
def everything_waits(num_scheduled, num_known, max_len, waits):
    return (num_scheduled < max_len) & (num_scheduled == num_known)


@wrong("ready", fails="test_requests_with_a_grammar")
def nothing_waits(num_scheduled, num_known, max_len, waits):
    return num_scheduled < max_len


@wrong("ready", fails="test_requests_with_a_grammar")
def grammars_never(num_scheduled, num_known, max_len, waits):
    return (num_scheduled < max_len) & (waits == 0)


@wrong("ready", fails="test_requests_with_a_grammar")
def the_wrong_way_round(num_scheduled, num_known, max_len, waits):
    return (num_scheduled < max_len) & ((waits == 0) | (num_scheduled != num_known))


@wrong("ready", fails="test_mixed_requests")
def all_wait_for_one(num_scheduled, num_known, max_len, waits):
    waiting = (waits > 0) & (num_scheduled != num_known)
    own = reference.ready(num_scheduled, num_known, max_len, waits)
    return own & ~waiting.any() if len(own) > 2 else own


# SloAdmission -------------------------------------------------------------------------------------------------------


def seconds(left, num_prompt):
    work, decodes = sum(left) + num_prompt, list(left).count(0)
    return -(-work // (BUDGET - decodes)) * (FIXED_SECONDS + TOKEN_SECONDS * decodes) + TOKEN_SECONDS * work


@right("SloAdmission")
class FewerAtOnce:
    """Short prompts first, refusals of the late, and at most eight at once."""

    def decide(self, now, waiting, left, free):
        left, admitted, refused = list(left), [], []
        for own in sorted(waiting, key=lambda own: (own.num_prompt, own.arrival)):
            if now + seconds(left, own.num_prompt) - own.arrival > FIRST_SECONDS:
                refused.append(own.number)
            elif len(admitted) < free and len(left) < 8:
                admitted.append(own.number)
                left.append(own.num_prompt)
        return admitted, refused


@wrong("SloAdmission", fails="test_decisions")
class OnlyTheAdmitted:
    def decide(self, now, waiting, left, free):
        return [own.number for own in waiting[:free]]


@wrong("SloAdmission", fails="test_decisions")
class MoreThanFree:
    def decide(self, now, waiting, left, free):
        return [own.number for own in waiting], []


@wrong("SloAdmission", fails="test_decisions")
class IndicesForNumbers:
    def decide(self, now, waiting, left, free):
        return list(range(min(free, len(waiting)))), list(range(len(waiting), len(waiting) + 1))


@wrong("SloAdmission", fails="test_an_idle_server")
class RefusesHalf:
    def decide(self, now, waiting, left, free):
        return [own.number for own in waiting[:free] if own.number % 2], [
            own.number for own in waiting[:free] if own.number % 2 == 0
        ]


@wrong("SloAdmission", fails="test_better_than_in_order")
class InOrder:
    def decide(self, now, waiting, left, free):
        return [own.number for own in waiting[:free]], []


@wrong("SloAdmission", fails="test_better_than_in_order")
class LongPromptsFirst:
    def decide(self, now, waiting, left, free):
        return [own.number for own in sorted(waiting, key=lambda own: -own.num_prompt)[:free]], []


@wrong("SloAdmission", fails="test_as_good_as_refusing")
class AShortQueue:
    """First come, first served, and no more than two wait."""

    def decide(self, now, waiting, left, free):
        return [own.number for own in waiting[:free]], [own.number for own in waiting[free + 2 :]]


@wrong("SloAdmission", fails="test_as_good_as_refusing")
class RefusesTheHopeless:
    """It refuses only what would be late on an idle server."""

    def decide(self, now, waiting, left, free):
        late = [own.number for own in waiting if now + seconds([], own.num_prompt) - own.arrival > FIRST_SECONDS]
        return [own.number for own in waiting if own.number not in late][:free], late


@wrong("SloAdmission", fails="test_better_than_refusing")
class InOrderWithoutTheLate:
    def decide(self, now, waiting, left, free):
        left, admitted, refused = list(left), [], []
        for own in waiting:
            if now + seconds(left, own.num_prompt) - own.arrival > FIRST_SECONDS:
                refused.append(own.number)
            elif len(admitted) < free:
                admitted.append(own.number)
                left.append(own.num_prompt)
        return admitted, refused
