"""Guesses from earlier text, against a search that reads like its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.request import Running
from mini_engine.speculative.ngram import NgramDrafter


def expected(tokens: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):  # the latest first
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + num_tokens]
    return []


def running_of(texts: list[list[int]]) -> Running:
    running = Running(len(texts) + 1, 40)
    running.tokens[:] = 7  # what earlier requests have left in the rows
    for row, tokens in enumerate(texts):
        running.tokens[row, : len(tokens)] = tokens
        running.num_known[row] = len(tokens)
    return running


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=5),
    st.integers(1, 6), st.integers(1, 3), st.integers(0, 3),
)  # fmt: skip
def test_what_followed_the_last_time_is_guessed(texts, num_tokens, shortest, more):
    drafter = NgramDrafter(shortest + more, shortest)
    rows = np.arange(len(texts))[::-1].copy()
    tokens, counts = drafter.propose(running_of(texts), rows, np.full(len(rows), num_tokens))
    assert tokens.shape == (len(texts), num_tokens)
    for row, own, count in zip(rows, tokens, counts, strict=True):
        assert own[:count].tolist() == expected(texts[row], num_tokens, shortest + more, shortest)
