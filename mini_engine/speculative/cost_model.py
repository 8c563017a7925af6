"""How many guesses pay: what a step costs by its number of tokens, and how often guesses have been right of late.

A guess makes a step longer whether it is right or not. The gain is uncertain, and it shrinks with each guess, because a
guess counts only if all before it are right. So the best choice is the one with the most expected tokens per second
(SmartSpec, Liu et al. 2024, "Optimizing speculative decoding for serving large language models using goodput"). Both
sides are measured while the engine runs.
"""

from collections import deque
from itertools import accumulate
from statistics import median

import numpy as np
from jaxtyping import Float64, Int64

# Of each size. Their median counts. The fastest would flatter steps with guesses, which wait for the host, and the host
# is disturbed more often than the device.
LAST_STEPS = 8
FIRST_STEPS = 2  # of a size before its time is believed
NEAR = 1.5  # the time of a size is believed if sizes up to so many times as large or as small were measured
STEPS_KEPT = 1024  # a size that was not measured in so many measurements counts as unknown, and is tried again
# A request is taken to have had so many guesses before its first one. The share of them that was right is that of all
# requests of late, which is at first taken from so many guesses.
EARLIER_GUESSES, FIRST_GUESSES, FIRST_SHARE = 2.0, 4.0, 0.5
# What earlier guesses count after a step with guesses, and after one without; and, in the share of all requests, after
# another guess.
FADES, FADES_UNUSED, FADES_OF_ALL = 0.97, 0.995, 0.99


class StepSeconds:
    """Seconds of a step by its number of tokens, from the last steps of about that size.

    Args:
        unknown: what is returned while nothing has been measured.
    """

    def __init__(self, unknown: float) -> None:
        self._unknown, self._num_steps = unknown, 0
        self._last: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._curve: tuple[list[int], list[float]] | None = None  # sizes and seconds, until another step is measured

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step."""
        size = _size(num_tokens)
        self._num_steps += 1
        if not self._is_late(size):
            self._last[size] = deque(maxlen=LAST_STEPS)
        self._last[size].append(seconds)
        self._measured_at[size], self._curve = self._num_steps, None

    def knows(self, num_tokens: int) -> bool:
        """Return whether steps of about this size have been measured of late, and more than once."""
        return any(
            max(size, num_tokens) <= NEAR * min(size, num_tokens) and self._is_measured(size) for size in self._last
        )

    def __call__(self, num_tokens: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Estimate steps of any sizes.

        Between measured sizes the time is interpolated. Beyond the largest one it stays the same, so larger steps are
        tried, and measured.
        """
        if self._curve is None:
            sizes = sorted(size for size in self._last if self._is_measured(size))
            medians = [median(self._last[size]) for size in sizes]
            self._curve = sizes, list(accumulate(medians, max))  # more tokens do not take less time
        if not self._curve[0]:
            return np.full(len(num_tokens), self._unknown)
        return np.interp(num_tokens, *self._curve)

    def _is_measured(self, size: int) -> bool:
        return len(self._last[size]) >= FIRST_STEPS and self._is_late(size)

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
        self._all_right, self._all_tried = FIRST_SHARE * FIRST_GUESSES, FIRST_GUESSES

    def enter(self, rows: Int64[np.ndarray, " B"], admission: Int64[np.ndarray, " B"]) -> None:
        """Forget what was counted for those rows that have another request than before.

        Args:
            rows: rows.
            admission: the admissions that filled them.
        """
        is_new = self._admission[rows] != admission
        self._right[rows[is_new]] = self._tried[rows[is_new]] = 0
        self._admission[rows] = admission

    def of(self, rows: Int64[np.ndarray, " B"]) -> Float64[np.ndarray, " B"]:
        """Return the probability that the next guess of each row is right."""
        share = self._all_right / self._all_tried
        return (self._right[rows] + share * EARLIER_GUESSES) / (self._tried[rows] + EARLIER_GUESSES)

    def add(
        self, rows: Int64[np.ndarray, " B"], num_guesses: Int64[np.ndarray, " B"], num_right: Int64[np.ndarray, " B"]
    ) -> None:
        """Count the guesses of a step; those after the first wrong one say nothing.

        Rows without a guess become uncertain again.
        """
        tried = np.minimum(num_right + 1, num_guesses)
        fade = FADES_OF_ALL ** tried.sum()
        self._all_right = fade * self._all_right + num_right.sum()
        self._all_tried = fade * self._all_tried + tried.sum()
        fades = np.where(num_guesses > 0, FADES, FADES_UNUSED)
        self._right[rows] = self._right[rows] * fades + num_right
        self._tried[rows] = self._tried[rows] * fades + tried


def expected_right(right: Float64[np.ndarray, " B"], counts: Int64[np.ndarray, " B"]) -> Float64[np.ndarray, " B"]:
    """Return how many of each row's guesses are expected to count: those before the first wrong one.

    Args:
        right: probability that a guess of the row is right, if those before it are.
        counts: guesses of each row.
    """
    wrong = np.maximum(1 - right, 1e-9)
    return np.where(wrong > 1e-9, right * (1 - right**counts) / wrong, counts)  # near 1, rounding would hide the gain


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
