"""How many guesses pay: what a step costs by its number of tokens, and how often guesses have been right of late.

A guess makes a step longer whether it is right or not. The gain is uncertain, and it shrinks with each guess, because a
guess counts only if all before it are right. So the best choice is the one with the most expected tokens per second
(SmartSpec, Liu et al. 2024, "Optimizing speculative decoding for serving large language models using goodput"). Both
sides are measured while the engine runs.
"""

from collections import deque

import numpy as np
from jaxtyping import Bool, Float64, Int64

LAST_STEPS = 8  # of each size; the fastest of them counts, because others were disturbed
FIRST_STEPS = 2  # of a size before its time is believed
STEPS_KEPT = 1024  # a size that was not measured for so many steps counts as unknown, and is tried again
# A request is taken to have had so many guesses before its first one, and this share of them was right.
EARLIER_GUESSES, EARLIER_SHARE = 2.0, 0.5
FADES, FADES_UNUSED = 0.97, 0.995  # what earlier guesses count after a step with guesses, and after one without


class StepSeconds:
    """Seconds of a step by its number of tokens, from the last steps of about that size.

    Args:
        unknown: what is returned while nothing has been measured.
    """

    def __init__(self, unknown: float) -> None:
        self._unknown, self._num_steps = unknown, 0
        self._last: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step."""
        size = _size(num_tokens)
        if not self._is_late(size):
            self._last.pop(size, None)
        self._last.setdefault(size, deque(maxlen=LAST_STEPS)).append(seconds)
        self._measured_at[size] = self._num_steps

    def knows(self, num_tokens: int) -> bool:
        """Return whether steps of about this size have been measured of late, and more than once."""
        size = _size(num_tokens)
        return len(self._last.get(size, ())) >= FIRST_STEPS and self._is_late(size)

    def __call__(self, num_tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Estimate steps of any sizes, once per step.

        Between measured sizes the time is interpolated. Beyond the largest one it stays the same, so larger steps are
        tried, and measured.
        """
        self._num_steps += 1
        sizes = sorted(size for size in self._last if self.knows(size))
        if not sizes:
            return np.full(len(num_tokens), self._unknown)
        fastest = np.maximum.accumulate([min(self._last[size]) for size in sizes])  # more tokens do not take less time
        return np.interp(num_tokens, sizes, fastest)

    def _is_late(self, size: int) -> bool:
        return self._num_steps - self._measured_at.get(size, -STEPS_KEPT) < STEPS_KEPT


def _size(num_tokens: int) -> int:
    """Round to four significant bits, so that steps of similar sizes count as one size."""
    shift = max(num_tokens.bit_length() - 4, 0)
    return num_tokens >> shift << shift


class Acceptance:
    """How often the guesses of each row have been right of late.

    Args:
        max_rows: number of rows.
    """

    def __init__(self, max_rows: int) -> None:
        self._admission = np.zeros(max_rows, dtype=np.int64)
        self._right, self._tried = np.zeros((2, max_rows))

    def enter(self, rows: Int64[np.ndarray, " B"], admission: Int64[np.ndarray, " B"]) -> Bool[np.ndarray, " B"]:
        """Return which rows have another request than before, and forget what was counted for them.

        Args:
            rows: rows.
            admission: the admissions that filled them.
        """
        is_new = self._admission[rows] != admission
        self._right[rows[is_new]] = self._tried[rows[is_new]] = 0
        self._admission[rows] = admission
        return is_new

    def of(self, rows: Int64[np.ndarray, " B"]) -> Float64[np.ndarray, " B"]:
        """Return the probability that the next guess of each row is right."""
        return (self._right[rows] + EARLIER_SHARE * EARLIER_GUESSES) / (self._tried[rows] + EARLIER_GUESSES)

    def add(
        self, rows: Int64[np.ndarray, " B"], num_guesses: Int64[np.ndarray, " B"], num_right: Int64[np.ndarray, " B"]
    ) -> None:
        """Count the guesses of a step; those after the first wrong one say nothing.

        Rows without a guess become uncertain again, so a request that had only wrong guesses gets one now and then.
        """
        fades = np.where(num_guesses > 0, FADES, FADES_UNUSED)
        self._right[rows] = self._right[rows] * fades + num_right
        self._tried[rows] = self._tried[rows] * fades + np.minimum(num_right + 1, num_guesses)

    def forget(self) -> None:
        """Forget all rows."""
        self._admission[:] = 0


def best_counts(
    right: Float64[np.ndarray, " B"],
    most: Int64[np.ndarray, " B"],
    num_tokens: int,
    seconds: StepSeconds,
    seconds_of_guess: float,
) -> Int64[np.ndarray, " B"]:
    """Choose the number of guesses of each row with the most expected tokens per second.

    Args:
        right: probability that a guess of the row is right, if those before it are.
        most: most guesses of each row.
        num_tokens: tokens of the step without guesses.
        seconds: of a step.
        seconds_of_guess: what the drafter takes for one more guess of every row.
    """
    index = np.arange(most.max(initial=0))
    # All places for a guess, the most probable first. In a row, the probability falls with each guess, so the first
    # places of all belong to the first guesses of their rows.
    counts = np.where(index < most[:, None], right[:, None] ** (index + 1), -1.0).ravel()
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts >= 0)]
    tokens = len(right) + np.concatenate(([0.0], counts[order].cumsum()))
    deepest = np.concatenate(([0], np.maximum.accumulate(order % max(len(index), 1) + 1)))
    cost = seconds(num_tokens + np.arange(len(tokens))) + seconds_of_guess * deepest
    best = int((tokens / cost).argmax())
    return np.bincount(order[:best] // max(len(index), 1), minlength=len(right))
