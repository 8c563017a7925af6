"""Guess that the text repeats: what followed the last n tokens the last time that they occurred.

This is prompt lookup (Saxena 2023). It needs no model, and guesses well where an answer copies from its prompt: edits,
summaries, code.
"""

import numpy as np
from jaxtyping import Int32, Int64

from mini_engine.request import Running


class NgramDrafter:
    """Looks for the last n tokens of a request among its earlier ones, with the largest n that occurs there.

    Args:
        longest: largest n.
        shortest: smallest n.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest, self.scout = longest, shortest, self

    def propose(
        self, running: Running, rows: Int64[np.ndarray, " B"], most: Int64[np.ndarray, " B"]
    ) -> tuple[Int32[np.ndarray, "B K"], Int64[np.ndarray, " B"]]:
        """See `Drafter`. The latest earlier occurrence counts, because a text resembles what is near."""
        known, index = running.num_known[rows], np.arange(len(rows))
        tokens = running.tokens[rows, : known.max(initial=0)]
        width = tokens.shape[1]
        # For each place, whether the tokens up to it are the last i + 1 tokens; another token must follow it.
        same = np.arange(width) < (known - 1)[:, None]
        length = np.zeros(same.shape, dtype=np.int16)
        for i in range(min(self._longest, width)):
            same[:, i:] &= tokens[:, : width - i] == tokens[index, known - 1 - i][:, None]
            same[:, :i] = False
            length += same
        length[length < self._shortest] = 0
        place = width - 1 - length[:, ::-1].argmax(axis=1)  # the latest of the longest
        counts = np.where(length[index, place] > 0, np.minimum(known - place - 1, most), 0)
        after = np.minimum(place[:, None] + 1 + np.arange(most.max(initial=0)), width - 1)
        return tokens[index[:, None], after], counts

    def forget(self) -> None:
        """Do nothing: everything is found in the tokens."""
