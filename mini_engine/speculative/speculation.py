"""Speculation in the core: how many guesses a step has, who makes them, and which were right."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int32, Int64

from mini_engine.request import Running
from mini_engine.speculative.cost_model import FIRST_STEPS, Acceptance, StepSeconds, best_counts, expected_right
from mini_engine.speculative.drafter import Drafter, num_accepted

# Steps for which the numbers of guesses stand, while there are guesses and while there are none. Choosing takes the
# host 0.1 to 0.4 ms, as much as half a step of a small model. Without guesses the numbers stand for longer if silent
# guesses show when that changes.
GUESSING, PAUSING, PAUSING_SILENTLY = 4, 16, 256
NEW_REQUESTS = 0.25  # of the requests; with more, the numbers are chosen at once
EVERY = 32  # steps; in the last one there are half as many guesses, so that the time of smaller steps is known, too
# Steps after which some requests have a guess in any case, because guesses may have become right, unless even right
# ones would not pay: first, and after guesses that were all wrong, each time twice as many up to a limit.
EXPLORE, EXPLORE_LATEST = 64, 256
SHARE = 8  # one of so many requests
# Steps after which guesses are made silently: first, and while no step has any, each time twice as many up to a limit.
SILENT, SILENT_LATEST = 8, 64
# What the share of requests for which a guess was found counts after another step; silent guesses stand for all steps
# since the ones before them. After so many steps in a row without any, it is halved, and steps are pipelined again.
HITS_KEPT, MISSES = 0.95, 4
CAUTION = 0.45  # how many standard deviations of a single hit the share is taken to be lower, where it decides


@dataclass(frozen=True)
class SilentGuesses:
    """Guesses that no step computes.

    Attributes:
        rows: rows of the requests.
        admissions: which filled these rows.
        num_known: tokens of each that were known.
        token_ids: guesses of the tokens after these.
        counts: how many of them count.
    """

    rows: Int64[np.ndarray, " B"]
    admissions: Int64[np.ndarray, " B"]
    num_known: Int64[np.ndarray, " B"]
    token_ids: Int32[np.ndarray, "B K"]
    counts: Int64[np.ndarray, " B"]

    def compared(
        self, running: Running
    ) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
        """Return the rows that have the same request, how many of their guesses can be told, and how many are right."""
        live = running.admission[self.rows] == self.admissions
        rows, known, token_ids = self.rows[live], self.num_known[live], self.token_ids[live]
        counts = np.minimum(self.counts[live], running.num_known[rows] - known)
        index = np.minimum(known[:, None] + np.arange(token_ids.shape[1]), running.tokens.shape[1] - 1)
        right = (running.tokens[rows[:, None], index] == token_ids) & (np.arange(index.shape[1]) < counts[:, None])
        return rows, counts, np.logical_and.accumulate(right, axis=1).sum(axis=1, dtype=np.int64)


class Speculation:
    """Asks a drafter for as many guesses as pay, and learns from what becomes of them.

    A guess follows tokens that the host knows. So before a step with guesses, the previous step must have been
    collected, and the device waits for the host. A pipelined step is launched while the previous one runs. Both kinds
    of steps are measured, and guesses are only made if that pays although the steps before them are not pipelined.

    How often guesses are right must be known before it pays to compute them. A search in the text costs the device
    nothing. So while a request has no guesses, some are made *silently*: no step computes them, and they are compared
    with the tokens that are sampled in any case. A draft model's guesses are explored instead, which costs a step.

    Args:
        drafter: guesses tokens.
        num_tokens: most guesses of a request in one step.
        max_rows: rows of the engine.
        can_pipeline: whether steps without guesses may be pipelined.
        clock: seconds.
        most_tokens: most tokens of a step with guesses: no CUDA graph computes a larger one, and launching its kernels
            one by one takes longer than guesses save. None: any number.

    Attributes:
        drafter: see above.
        num_drafts: times that guesses of a request were checked.
        num_guesses: guesses that have been checked.
        num_right: those that were right.
    """

    def __init__(
        self,
        drafter: Drafter,
        num_tokens: int,
        max_rows: int,
        can_pipeline: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        most_tokens: int | None = None,
    ) -> None:
        self._can_pipeline, self._most_tokens, self._max_rows = can_pipeline, most_tokens, max_rows
        self.drafter, self._num_tokens, self._clock = drafter, num_tokens, clock
        self.num_drafts = self.num_guesses = self.num_right = 0
        self._start_over()

    def _start_over(self) -> None:
        self._step_seconds, self._pipelined_seconds = StepSeconds(1.0), StepSeconds(1.0)
        self._guess_seconds, self._hits = StepSeconds(0.0), 1.0
        self._acceptance, self._turn = Acceptance(self._max_rows), 0
        # What was chosen last: guesses for each row and its admission then; whether steps should not be pipelined; and
        # until when the choice stands.
        self._limits, self._chosen_for = np.zeros((2, self._max_rows), dtype=np.int64)
        self._asks, self._stands_until, self._misses = True, 0, 0
        self._num_asked = 0  # rows that `asks` has looked at last
        self._explore_at, self._explore_after = EXPLORE, EXPLORE
        self._could_pay = True  # whether guesses would pay if all were right
        # The admission of each row's last request with guesses.
        self._guessed_for = np.zeros(self._max_rows, dtype=np.int64)
        self._silent: SilentGuesses | None = None
        self._silent_at, self._silent_after = SILENT, SILENT
        self._ended: float | None = None

    def begin_step(self) -> None:
        """A step is going to be scheduled."""
        self._turn += 1
        if self._ended is None:
            self._ended = self._clock()

    def guess(
        self, running: Running, rows: Int64[np.ndarray, " B"], most: Int64[np.ndarray, " B"], num_tokens: int
    ) -> tuple[Int32[np.ndarray, "B K"], Int64[np.ndarray, " B"]]:
        """Guess the next tokens of some rows.

        Args:
            running: the running requests.
            rows: rows all of whose tokens are known.
            most: most guesses of each.
            num_tokens: tokens of the step without guesses.

        Returns:
            Guesses for each row, and how many of them count.
        """
        self._choose(running, rows, num_tokens, self._turn)
        most = np.minimum(most, self._most(len(rows), num_tokens))
        limits = np.minimum(self._limits[rows], most)
        limits[self._chosen_for[rows] != running.admission[rows]] = 0  # a new request waits for the next choice
        if self._explores(self._turn) and self._step_seconds.knows(num_tokens):
            self._explore_at = self._turn + self._explore_after
            self._explore_after = min(2 * self._explore_after, EXPLORE_LATEST)
            some = (self._turn + np.arange(max(len(rows) // SHARE, 1))) % len(rows)
            limits[some] = np.maximum(limits[some], np.minimum(most[some], 1))
        elif self._turn % EVERY == 0:  # half as many
            limits = (limits + np.arange(len(limits)) % 2) // 2
        self._acceptance.enter(rows, running.admission[rows])
        deepest, places = int(limits.max(initial=0)), np.flatnonzero(limits)
        if not deepest:
            self._acceptance.add(rows, limits, limits)
            return np.zeros((len(rows), 0), dtype=np.int32), limits
        asked = rows[places]
        is_known = np.array_equal(self._guessed_for[asked], running.admission[asked])
        self._guessed_for[asked] = running.admission[asked]
        start = self._clock()
        found, num_found = self.drafter.propose(running, asked, limits[places])
        if is_known:  # otherwise a drafter has read the prompt
            self._guess_seconds.add(len(asked), (self._clock() - start) / deepest)
        self._note_hits(num_found)
        self._misses = 0 if num_found.any() else self._misses + 1
        if self._can_pipeline and self._misses >= MISSES:
            self._asks, self._misses, self._limits[rows], self._hits = False, 0, 0, self._hits / 2
            self._stands_until = self._turn + PAUSING
        token_ids, counts = np.zeros((len(rows), found.shape[1]), dtype=np.int32), np.zeros_like(limits)
        token_ids[places], counts[places] = found, num_found
        return token_ids, counts

    def _note_hits(self, num_found: Int64[np.ndarray, " n"], kept: float = HITS_KEPT) -> None:
        self._hits = kept * self._hits + (1 - kept) * np.count_nonzero(num_found) / len(num_found)

    def asks(self, running: Running, rows: Int64[np.ndarray, " B"]) -> bool:
        """Return whether the next step should have guesses, so that it cannot be pipelined.

        Args:
            running: the running requests.
            rows: rows that will decode.
        """
        turn, num_tokens = self._turn + 1, len(rows)
        # Mostly without a look at the rows, because the steps of small models wait for the host.
        if num_tokens != self._num_asked or turn >= self._stands_until:
            self._num_asked = num_tokens
            if num_tokens:
                self._choose(running, rows, num_tokens, turn)
        return num_tokens > 0 and (self._asks or self._explores(turn))

    def _explores(self, turn: int) -> bool:
        """Return whether the step of a turn has some guesses in any case."""
        return self.drafter.scout is None and self._could_pay and turn >= self._explore_at

    def observe(self, running: Running) -> None:
        """Compare silent guesses with the tokens that have become known, and make the next ones.

        Args:
            running: the running requests.
        """
        if self._turn < self._silent_at or (scout := self.drafter.scout) is None:
            return
        if self._silent is not None:
            rows, counts, right = self._silent.compared(running)
            self._acceptance.add(rows, counts, right)
            self._silent = None
            if right.any():
                self._stands_until = self._turn
            return self._wait_longer()
        rows = running.order
        rows = rows[(running.num_known[rows] > running.num_prompt[rows]) & (self._limits[rows] == 0)]
        if not self._could_pay or not len(rows):
            self._silent_at = self._turn + self._silent_after
            return
        self._acceptance.enter(rows, running.admission[rows])
        most = np.minimum(running.max_len[rows] - running.num_known[rows], self._num_tokens)
        token_ids, counts = scout.propose(running, rows, most)
        self._note_hits(counts, HITS_KEPT**self._silent_after)
        if not counts.any():
            return self._wait_longer()
        self._silent_at = self._turn + SILENT  # then these can be compared
        known = running.num_known[rows].copy()
        self._silent = SilentGuesses(rows, running.admission[rows], known, token_ids.copy(), counts)

    def _wait_longer(self) -> None:
        """Make the next silent guesses later, because they cost the host time."""
        self._silent_after = min(2 * self._silent_after, SILENT_LATEST)
        self._silent_at = self._turn + self._silent_after

    def _choose(self, running: Running, rows: Int64[np.ndarray, " B"], num_tokens: int, turn: int) -> None:
        """Choose how many guesses each row has, and whether steps should be pipelined, unless an earlier choice stands.

        Args:
            running: the running requests.
            rows: rows that will decode.
            num_tokens: tokens of a step without guesses.
            turn: the step that has the guesses.
        """
        admissions = running.admission[rows]
        num_new = np.count_nonzero(self._chosen_for[rows] != admissions)
        if turn < self._stands_until and num_new <= NEW_REQUESTS * len(rows):
            return
        self._acceptance.enter(rows, admissions)
        self._chosen_for[rows], self._limits[rows] = admissions, 0
        if num_new:
            self._silent_at = min(self._silent_at, turn + SILENT)
        if not self._step_seconds.knows(num_tokens):  # without measured steps of both kinds, no gain is known
            self._asks, self._stands_until = True, turn + FIRST_STEPS
        elif self._can_pipeline and not self._pipelined_seconds.knows(num_tokens):
            self._asks, self._stands_until = False, turn + FIRST_STEPS
        else:
            limits = self._best(rows, num_tokens, right := self._acceptance.of(rows))
            hits = self._hits - CAUTION * (self._hits * (1 - self._hits)) ** 0.5
            self._asks = self._pays(limits, right, num_tokens, hits)
            if self._asks and limits.any():
                self._limits[rows], self._silent_after = limits, SILENT
            all_right = np.ones(len(rows))
            ideal = self._best(rows, num_tokens, all_right)
            self._could_pay = bool(ideal.any()) and self._pays(ideal, all_right, num_tokens, 1.0)
            pause = PAUSING if self.drafter.scout is None else PAUSING_SILENTLY
            self._stands_until = turn + (GUESSING if self._limits[rows].any() else pause)

    def _pays(
        self, limits: Int64[np.ndarray, " B"], right: Float64[np.ndarray, " B"], num_tokens: int, hits: float
    ) -> bool:
        """Return whether steps with guesses are expected to sample more tokens per second than pipelined steps.

        Args:
            limits: guesses of each row.
            right: probability that a guess of the row is right, if those before it are.
            num_tokens: tokens of a step without guesses.
            hits: share of the rows for which the drafter finds guesses.
        """
        if not self._can_pipeline:
            return True
        gain, count = expected_right(right, limits).sum(), len(limits)
        alone, guessing = self._step_seconds(num_tokens + np.array([0, limits.sum()]))
        drafting = self._guess_seconds(np.array([count])).item() * limits.max(initial=0)
        seconds = alone + drafting + hits * (guessing - alone)
        pipelined = self._pipelined_seconds(np.array([num_tokens])).item()
        return bool(gain and (count + hits * gain) / seconds > count / pipelined)

    def _best(
        self, rows: Int64[np.ndarray, " B"], num_tokens: int, right: Float64[np.ndarray, " B"]
    ) -> Int64[np.ndarray, " B"]:
        """Return the number of guesses of each row that pays most.

        Args:
            rows: rows that will decode.
            num_tokens: tokens of a step without guesses.
            right: probability that a guess of the row is right, if those before it are.
        """
        of_guess = self._guess_seconds(np.array([len(rows)])).item()
        most = np.full(len(rows), self._most(len(rows), num_tokens))
        return best_counts(right, most, num_tokens, self._step_seconds, of_guess)

    def _most(self, num_rows: int, num_tokens: int) -> int:
        """Return the most guesses that each row can have in a step of `num_tokens` without guesses."""
        if self._most_tokens is None:
            return self._num_tokens
        return min(self._num_tokens, max(self._most_tokens - num_tokens, 0) // num_rows)

    def check(
        self,
        running: Running,
        rows: Int64[np.ndarray, " R"],
        sampled: Int[np.ndarray, "R K1"],
        num_guesses: Int64[np.ndarray, " R"],
    ) -> Int64[np.ndarray, " R"]:
        """Return how many guesses of each row are right.

        Args:
            running: the running requests; their guesses follow the known tokens.
            rows: rows of the step.
            sampled: the tokens sampled at the positions of the guesses, and after the last one.
            num_guesses: guesses of each row.
        """
        right = num_accepted(sampled, running.guesses(rows, sampled.shape[1] - 1), num_guesses)
        self._acceptance.add(rows, num_guesses, right)
        self.num_drafts += int(np.count_nonzero(num_guesses))
        self.num_guesses += int(num_guesses.sum())
        self.num_right += int(right.sum())
        if right.any():
            self._explore_after = EXPLORE
        return right

    def end_step(self, collected: Sequence[int], is_pipelined: bool, is_idle: bool) -> None:
        """Learn how long a step has taken, if it can be told from others: one was collected since the last call.

        Args:
            collected: number of tokens of each step that was collected.
            is_pipelined: whether another step had been launched before it was collected.
            is_idle: whether no request is left.
        """
        now = self._clock()
        if len(collected) == 1 and self._ended is not None:
            (self._pipelined_seconds if is_pipelined else self._step_seconds).add(collected[0], now - self._ended)
        self._ended = None if is_idle else now

    def forget(self) -> None:
        """Forget all requests, whose rows are used anew, and all times: those of a warm-up are those of a compiler."""
        self.drafter.forget()
        self._start_over()
