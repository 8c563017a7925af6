"""Guess that the text repeats: what followed the last n tokens the last time that they occurred.

This is prompt lookup (Saxena 2023). It needs no model, and guesses well where an answer copies from its prompt: edits,
summaries, code.
"""

import numpy as np
from jaxtyping import Int32, Int64

from mini_engine.request import Running


class NgramDrafter:
    """Looks for the last n tokens of a request among its earlier ones, the largest n first.

    Args:
        longest: largest n.
        shortest: smallest n.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)

    def propose(
        self, running: Running, rows: Int64[np.ndarray, " B"], most: Int64[np.ndarray, " B"]
    ) -> tuple[Int32[np.ndarray, "B K"], Int64[np.ndarray, " B"]]:
        """See `Drafter`. The latest earlier occurrence counts, because a text resembles what is near."""
        known = running.num_known[rows]
        tokens = running.tokens[rows, : known.max(initial=0)]
        start = np.zeros_like(known)  # of the guesses; 0: not found
        for n in self._sizes:
            places = tokens.shape[1] - n  # of an occurrence that another token follows
            missing = np.flatnonzero((start == 0) & (known > n))
            if places < 1 or not len(missing):
                continue
            of_missing, last = tokens[missing], known[missing]
            found = np.arange(places) < (last - n)[:, None]
            for i in range(n):
                found &= of_missing[:, i : i + places] == of_missing[np.arange(len(missing)), last - n + i][:, None]
            place = places - 1 - found[:, ::-1].argmax(axis=1)
            start[missing] = np.where(found.any(axis=1), place + n, 0)
        counts = np.where(start > 0, np.minimum(known - start, most), 0)
        index = np.minimum(start[:, None] + np.arange(most.max(initial=0)), tokens.shape[1] - 1)
        return tokens[np.arange(len(rows))[:, None], index], counts

    def forget(self) -> None:
        """Do nothing: everything is found in the tokens."""
