"""Speculation in the core: how many guesses a step has, who makes them, and which were right."""

import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Int, Int32, Int64

from mini_engine.request import Running
from mini_engine.speculative.cost_model import Acceptance, StepSeconds, best_counts
from mini_engine.speculative.drafter import Drafter, num_accepted

EVERY = 32  # steps; in the last one there are half as many guesses, so that the time of smaller steps is known, too


class Speculation:
    """Asks a drafter for as many guesses as pay, and learns from what becomes of them.

    Args:
        drafter: guesses tokens.
        num_tokens: most guesses of a request in one step.
        max_rows: rows of the engine.
        clock: seconds.

    Attributes:
        num_guesses: guesses that have been checked.
        num_right: those that were right.
    """

    def __init__(
        self, drafter: Drafter, num_tokens: int, max_rows: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._drafter, self._num_tokens, self._clock = drafter, num_tokens, clock
        self._step_seconds, self._guess_seconds = StepSeconds(1.0), StepSeconds(0.0)
        self._acceptance, self._began, self._turn = Acceptance(max_rows), 0.0, 0
        self.num_guesses = self.num_right = 0

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
        is_new = self._acceptance.enter(rows, running.admission[rows])
        of_guess = self._guess_seconds(np.array([len(rows)])).item()
        # Without a measured step that has no guesses, no gain is known.
        most = np.minimum(most, self._num_tokens if self._step_seconds.knows(num_tokens) else 0)
        limits = best_counts(self._acceptance.of(rows), most, num_tokens, self._step_seconds, of_guess)
        self._turn += 1
        if self._turn % EVERY == 0:  # half as many
            limits = (limits + np.arange(len(limits)) % 2) // 2
        deepest = int(limits.max(initial=0))
        if not deepest:
            self._acceptance.add(rows, limits, limits)
            return np.zeros((len(rows), 0), dtype=np.int32), limits
        start = self._clock()
        token_ids, counts = self._drafter.propose(running, rows, limits)
        if not np.count_nonzero(is_new):  # a draft model has to read the prompt first
            self._guess_seconds.add(len(rows), (self._clock() - start) / deepest)
        return token_ids, counts

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
        self.num_guesses += int(num_guesses.sum())
        self.num_right += int(right.sum())
        return right

    def begin_step(self) -> None:
        """A step is going to be launched."""
        self._began = self._clock()

    def end_step(self, num_tokens: int) -> None:
        """Learn how long the step has taken, now that its tokens are there."""
        self._step_seconds.add(num_tokens, self._clock() - self._began)

    def forget(self) -> None:
        """Forget all requests: rows and admissions are numbered anew."""
        self._drafter.forget()
        self._acceptance.forget()
