"""Guesses of suffix decoding, against a search that reads like its definition."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.request import Running
from mini_engine.speculative.suffix import SuffixAutomaton, SuffixDrafter
from tests.helpers import GREEDY, double_model, let_all_guesses_pay, make_engine, make_request
from tests.speculative.test_ngram import running_of

ROOT = Path(__file__).parent.parent.parent
NUM_SCHEDULES = 1500  # `python -m tests.random_schedules 10000 suffix` takes a minute
texts = st.integers(1, 3).flatmap(lambda words: st.lists(st.integers(1, words), min_size=1, max_size=40))
limits = st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.4, 1.0, 2.5]))  # most, shortest, factor


def occurrences(text: list[int], suffix: list[int]) -> list[int]:
    """The positions of the tokens that follow a sequence."""
    n = len(suffix)
    return [start + n for start in range(len(text) - n) if text[start : start + n] == suffix]


def expected(text: list[int], longest: int, most: int, shortest: int, factor: float) -> list[int]:
    guesses: list[int] = []
    while len(guesses) < most:
        end = text + guesses
        suffixes = [end[len(end) - n :] for n in range(min(longest, len(end)), -1, -1)]
        suffix = next((own for own in suffixes if occurrences(text, own)), [])
        if not guesses:
            most = int(min(most, factor * len(suffix)))
        if len(suffix) < shortest or not most:
            break
        followers = [text[i] for i in occurrences(text, suffix)]
        latest_first = list(dict.fromkeys(reversed(followers)))
        guesses.append(max(latest_first, key=followers.count))
    return guesses


def automaton_of(text: list[int], longest: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(longest)
    for token in text:
        automaton.append(token)
    return automaton


@given(texts, st.integers(1, 8), limits)
def test_the_most_frequent_token_after_the_longest_suffix_is_guessed(text, longest, limits):
    """After every token of a text that grows."""
    automaton = SuffixAutomaton(longest)
    assert automaton.guess(*limits) == []
    for i, token in enumerate(text, start=1):
        automaton.append(token)
        assert automaton.guess(*limits) == expected(text[:i], longest, *limits)


@given(texts, st.integers(1, 8))
def test_the_states_are_the_sets_of_end_positions(text, longest):
    """So sequences occur as often, and last, where the state that they lead to says."""
    automaton = automaton_of(text, longest)
    ends: dict[tuple[int, ...], list[int]] = {}
    for end in range(1, len(text) + 1):
        for start in range(end):
            ends.setdefault(tuple(text[start:end]), []).append(end)
    states = {}
    for sequence, positions in ends.items():
        state = 0
        for token in sequence:
            state = automaton._after[state][token]
        assert states.setdefault(state, positions) == positions
        if len(sequence) <= longest + 1:
            assert (automaton._count[state], automaton._end[state]) == (len(positions), positions[-1])
    assert len(states) + 1 == len(automaton._after) <= 2 * len(text)
    assert len({tuple(positions) for positions in states.values()}) == len(states)


@given(st.data(), st.integers(1, 8), limits)
def test_rows_are_guessed_from_their_own_requests(data, longest, limits):
    """Rows get tokens, leave, change their requests, and are left out of calls; the engine starts over."""
    most, shortest, factor = limits
    drafter, running = SuffixDrafter(longest, shortest, factor), Running(4, 40)
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 9)) == 0:
            drafter.forget()
            running = Running(4, 40)
        for row in range(4):
            if running.requests[row] is not None and data.draw(st.integers(0, 3)) == 0:
                running.leave(row)
            if running.requests[row] is None and data.draw(st.booleans()):
                running.enter(row, make_request(data.draw(texts), max_tokens=1))
            elif running.requests[row] is not None:
                for token in data.draw(st.lists(st.integers(1, 3), max_size=40 - int(running.num_known[row]))):
                    running.append(np.array([row]), np.array([token]))
        chosen = [row for row in running.order.tolist() if data.draw(st.booleans())]
        tokens, counts = drafter.propose(running, np.array(chosen, dtype=np.int64), np.full(len(chosen), most))
        assert tokens.shape == (len(chosen), most if chosen else 0)
        for row, own, count in zip(chosen, tokens, counts, strict=True):
            known = running.tokens[row, : running.num_known[row]].tolist()
            assert own[:count].tolist() == expected(known, longest, *limits)
        assert drafter._automata.keys() <= set(running.admission[running.order].tolist())


def test_tokens_are_appended_once(monkeypatch) -> None:
    appended = []
    append = SuffixAutomaton.append
    monkeypatch.setattr(SuffixAutomaton, "append", lambda own, token: (appended.append(token), append(own, token)))
    running, drafter = running_of([[1, 2, 3]]), SuffixDrafter(8, 1, 1.0)
    for token in (4, 5):
        drafter.propose(running, np.array([0]), np.array([4]))
        running.append(np.array([0]), np.array([token]))
    drafter.propose(running, np.array([0]), np.array([4]))
    assert appended == [1, 2, 3, 4, 5]


def test_a_text_that_repeats_itself_takes_linear_time() -> None:
    """If all suffixes were counted, 20,000 equal tokens would take 200 million increments."""
    automaton = automaton_of([5] * 20_000, longest=24)
    assert automaton.guess(30, 2, 1.0) == [5] * 24 and max(automaton._count) == 20_000


def test_the_drafter_forgets_when_the_core_starts_over() -> None:
    config = {"method": "suffix", "suffix_min_length": 1}
    engine = make_engine(double_model("llama"), pipeline_depth=0, num_pages=20, speculative_config=config)
    engine.add_request("a", [5, 6, 7, 5, 6], GREEDY)
    let_all_guesses_pay(engine)
    for _ in range(5):  # the first ones without guesses, to know what a step takes
        engine.step()
    drafter = engine.core.speculation.drafter
    assert isinstance(drafter, SuffixDrafter) and len(drafter._automata) == 1
    engine.core.restart()
    assert not drafter._automata


def test_tokens_do_not_depend_on_the_schedule_in_random_schedules() -> None:
    """In a process of its own, where no types are checked at each call."""
    script = [sys.executable, "-m", "tests.random_schedules", str(NUM_SCHEDULES), "suffix"]
    result = subprocess.run(script, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    schedules, preemptions, shared, _, right_guesses, _ = (int(word) for word in result.stdout.split())
    assert schedules == NUM_SCHEDULES and min(preemptions, shared, right_guesses) > 30
