"""Guess that the text repeats: what most often followed the longest suffix of the text that occurred before.

This is suffix decoding (Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975) over the prompt and output of each
request. Compared to prompt lookup (`ngram.py`), the match has no fixed length, so a longer match is found whenever
there is one; the number of guesses grows with the match, because a longer match is better evidence; and of several
continuations the most frequent one is guessed. Two parts of the paper are left out: the trees of earlier requests'
outputs, and the score that compares the continuations of all matching suffixes.
"""

import numpy as np
from jaxtyping import Int32, Int64

from mini_engine.request import Running
from mini_engine.speculative.ngram import NgramDrafter

SCOUTED = 4  # longest suffix that the scout looks for, unless the shortest is longer


class SuffixAutomaton:
    """Suffix automaton of a growing text: which sequences occur in it, how often, and where they occurred last.

    A state stands for sequences that end at the same positions of the text. They are suffixes of one another, one for
    each length from `length[link] + 1` to `length`, and `link` is the state of the next shorter suffix, which ends at
    more positions. The root, state 0, is the empty sequence. A text of n tokens has at most 2 n states (Blumer et
    al. 1985, "The smallest automaton recognizing the subwords of a text").

    A new token adds an occurrence of each suffix of the text. In a text that repeats itself, the number of their states
    grows with the text, so only sequences of up to `longest` + 1 tokens are counted: a suffix, and the token after it.
    Then `append` takes amortized O(1) time for the states and at most `longest` + 1 increments. The latest occurrence
    is kept rather than the first, because a text resembles what is near; the increments update it, too.

    Args:
        longest: longest suffix that is compared with the text, in tokens.

    Attributes:
        num_tokens: number of tokens of the text.
    """

    def __init__(self, longest: int) -> None:
        self.num_tokens, self._longest = 0, longest
        # One entry for each state. `_after`: the states after one more token. `_end`: number of tokens up to the end of
        # the latest occurrence.
        self._after, self._link, self._length = [dict[int, int]()], [-1], [0]
        self._count, self._end = [0], [0]
        self._whole = 0  # the state of the whole text
        self._suffix, self._suffix_length = 0, 0  # of the last `longest` tokens, or of all

    def append(self, token: int) -> None:
        """Extend the text by a token."""
        self.num_tokens += 1
        after, link, length, count = self._after, self._link, self._length, self._count
        new, state = self._add(self.num_tokens, {}, 0, 0), self._whole
        while state >= 0 and token not in after[state]:  # suffixes that the token follows for the first time
            after[state][token] = new
            state = link[state]
        if state >= 0:
            known = after[state][token]
            if length[known] > length[state] + 1:  # only the shorter sequences of `known` end here, too: split it
                split = self._add(length[state] + 1, after[known].copy(), link[known], count[known])
                link[known] = split
                while state >= 0 and after[state].get(token) == known:
                    after[state][token] = split
                    state = link[state]
                known = split
            link[new] = known
        self._whole = new
        suffix = state = after[self._suffix][token]
        while state:
            count[state] += 1
            self._end[state] = self.num_tokens
            state = link[state]
        self._suffix, self._suffix_length = self._shorten(suffix, self._suffix_length + 1)

    def guess(self, most: int, shortest: int, factor: float) -> list[int]:
        """Guess how the text goes on.

        A guess is the most frequent token after the longest suffix, of the text and the guesses before it, that occurs
        in the text with a token after it, among suffixes of `shortest` to `longest` tokens. Of equally frequent tokens,
        the one that occurred there last is guessed.

        Args:
            most: most guesses.
            shortest: shortest suffix, in tokens, at least 1.
            factor: most guesses for each token of the first suffix.

        Returns:
            The guesses; none if no suffix occurs earlier.
        """
        guesses: list[int] = []
        state, length = self._followed(self._suffix, self._suffix_length)
        most = int(min(most, factor * length))
        while length >= shortest and len(guesses) < most:
            after = self._after[state]
            token = max(after, key=lambda token: (self._count[after[token]], self._end[after[token]]))
            guesses.append(token)
            state, length = self._followed(*self._shorten(after[token], length + 1))
        return guesses

    def _add(self, length: int, after: dict[int, int], link: int, count: int) -> int:
        """Add a state, and return its number."""
        self._after.append(after)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._end.append(0)
        return len(self._after) - 1

    def _shorten(self, state: int, length: int) -> tuple[int, int]:
        """Return the state and length of the last `longest` tokens of a sequence, given by its state and length."""
        length = min(length, self._longest)
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def _followed(self, state: int, length: int) -> tuple[int, int]:
        """Return the state and length of the longest suffix of a sequence that occurs with a token after it."""
        while state and not self._after[state]:
            state = self._link[state]
            length = self._length[state]
        return state, length


class SuffixDrafter:
    """Guesses with a suffix automaton for each running request, which is extended by the tokens of each step.

    The automata are Python lists and dictionaries. Measured on one CPU core with texts of 32,000 tokens, a token takes
    3 to 11 microseconds and about half a kilobyte, so the first guesses after such a prompt take 0.1 to 0.4 s.

    Args:
        longest: longest suffix that is compared with the text, in tokens.
        shortest: shortest suffix, in tokens, at least 1.
        factor: most guesses for each token of the first suffix.

    Attributes:
        scout: prompt lookup. A text in which it finds nothing needs no automaton.
    """

    def __init__(self, longest: int, shortest: int, factor: float) -> None:
        self._longest, self._shortest, self._factor = longest, shortest, factor
        self.scout = NgramDrafter(max(min(longest, SCOUTED), shortest), shortest)
        self._automata: dict[int, SuffixAutomaton] = {}  # by the admission of the request

    def propose(
        self, running: Running, rows: Int64[np.ndarray, " B"], most: Int64[np.ndarray, " B"]
    ) -> tuple[Int32[np.ndarray, "B K"], Int64[np.ndarray, " B"]]:
        """See `Drafter` and `SuffixAutomaton.guess`. Drops the automata of requests that no longer run."""
        admitted = set(running.admission.tolist())
        self._automata = {admission: own for admission, own in self._automata.items() if admission in admitted}
        tokens = np.zeros((len(rows), most.max(initial=0)), dtype=np.int32)
        counts = np.zeros(len(rows), dtype=np.int64)
        for i, (row, admission) in enumerate(zip(rows.tolist(), running.admission[rows].tolist(), strict=True)):
            if admission not in self._automata:
                self._automata[admission] = SuffixAutomaton(self._longest)
            automaton = self._automata[admission]
            for token in running.tokens[row, automaton.num_tokens : running.num_known[row]].tolist():
                automaton.append(token)
            guesses = automaton.guess(int(most[i]), self._shortest, self._factor)
            tokens[i, : len(guesses)], counts[i] = guesses, len(guesses)
        return tokens, counts

    def forget(self) -> None:
        """See `Drafter`. Drops all automata."""
        self._automata.clear()
