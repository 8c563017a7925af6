"""The number of guesses: the best choice for known costs, and no loss where guesses are wrong."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.request import Running
from mini_engine.speculative.cost_model import (
    FIRST_STEPS,
    STEPS_KEPT,
    Acceptance,
    StepSeconds,
    best_counts,
    expected_right,
)
from mini_engine.speculative.speculation import Speculation


def seconds_of(table: dict[int, float]) -> StepSeconds:
    seconds = StepSeconds(1.0)
    for num_tokens, value in table.items():
        for _ in range(FIRST_STEPS):
            seconds.add(num_tokens, value)
    return seconds


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.dictionaries(st.integers(1, 12), st.floats(0.1, 10.0), max_size=4),
    st.integers(0, 3),
)
def test_no_other_choice_gives_more_tokens_per_second(right, most, table, others):
    seconds, num_rows, most = seconds_of(table), len(right), np.array(most[: len(right)])
    num_tokens = num_rows + others

    def rate(counts):
        tokens = sum(p**i for p, k in zip(right, counts, strict=True) for i in range(k + 1))
        return tokens / seconds(np.array([num_tokens + sum(counts)])).item()

    best = best_counts(np.array(right), most, num_tokens, seconds, 0.0)
    assert (best >= 0).all() and (best <= most).all()
    assert rate(best.tolist()) >= max(rate(c) for c in product(*(range(k + 1) for k in most))) * (1 - 1e-9)


@given(st.floats(0.0, 1.0), st.integers(0, 6), st.floats(0.0, 5.0), st.floats(1.0, 3.0))
def test_what_the_drafter_takes_counts(right, most, of_guess, two):
    seconds = seconds_of({1: 1.0, 2: two, 8: 3 * two})
    (best,) = best_counts(np.array([right]), np.array([most]), 1, seconds, of_guess)
    rates = [
        sum(right**i for i in range(k + 1)) / (seconds(np.array([1 + k])).item() + k * of_guess)
        for k in range(most + 1)
    ]
    assert rates[best] >= max(rates) * (1 - 1e-9)


@given(st.floats(0.0, 1.0) | st.floats(0.0, 1e-6).map(lambda wrong: 1 - wrong), st.integers(0, 8))
def test_guesses_count_as_long_as_all_before_them_are_right(right: float, count: int) -> None:
    (expected,) = expected_right(np.array([right]), np.array([count]))
    assert expected == pytest.approx(sum(right**i for i in range(1, count + 1)), rel=1e-6)


def test_times_are_medians_of_late_and_grow_with_the_step() -> None:
    seconds = seconds_of({4: 2.0, 16: 4.0})
    for _ in range(FIRST_STEPS):
        seconds.add(16, 3.0)
        seconds.add(8, 1.0)
    seconds.add(12, 1e9)  # once is not enough
    assert seconds(np.array([1, 4, 8, 12, 16, 99])).tolist() == [2.0, 2.0, 2.0, 2.75, 3.5, 3.5]
    seconds.add(16, 1e9)
    assert seconds(np.array([16])).tolist() == [4.0], "a step that was disturbed"
    for _ in range(STEPS_KEPT):
        seconds.add(4, 5.0)
        seconds(np.array([4]))
    assert seconds(np.array([4, 16])).tolist() == [5.0, 5.0]  # what was measured for 16 is too old


def test_another_request_in_a_row_starts_with_the_share_of_all() -> None:
    acceptance, rows = Acceptance(3), np.array([2, 0])
    acceptance.enter(rows, np.array([5, 6]))
    assert acceptance.of(rows).tolist() == [0.5, 0.5]
    for _ in range(20):
        acceptance.add(rows, np.array([3, 3]), np.array([3, 0]))
    high, low = acceptance.of(rows)
    assert high > 0.9 and low < 0.15
    acceptance.enter(rows, np.array([7, 6]))
    share, same = acceptance.of(rows)
    assert same == low and 0.65 < share < 0.8  # 60 of 80
    for _ in range(2000):
        acceptance.add(rows, np.array([0, 0]), np.array([0, 0]))
    assert abs(acceptance.of(rows)[1] - share) < 0.01, "a request without guesses is tried again"


class Simulated:
    """A drafter whose guesses are right with a given probability, and a clock that a step's time advances."""

    scout = None

    def __init__(self, right: float, seed: int) -> None:
        self.right, self.now, self.random = right, 0.0, np.random.default_rng(seed)

    def clock(self) -> float:
        return self.now

    def propose(self, running, rows, most):
        return np.zeros((len(rows), most.max()), dtype=np.int32), most

    def forget(self) -> None:
        pass


# Milliseconds of a step by its number of tokens: like a GPU, flat at first, and like a CPU, linear from the start.
COSTS = {"flat, then linear": lambda n: 1 + 0.002 * n + max(0, n - 128) * 0.01, "linear": lambda n: 1 + 0.3 * n}


def tokens_per_second(
    right: float, num_rows: int, cost, num_guesses: int | None, num_steps: int = 3000, depth: int = 0
) -> float:
    """Simulate requests without end; `num_guesses` fixes the number of guesses, None lets the model choose.

    With a pipeline, a step that the host has not prepared during the previous one takes a fifth longer.
    """
    simulated, rows = Simulated(right, seed=1), np.arange(num_rows)
    speculation, host = Speculation(simulated, 4, num_rows, depth > 0, simulated.clock), 0.2 * depth
    running = Running(num_rows, 8)
    running.admission[rows] = 1
    tokens = in_flight = 0
    for _ in range(num_steps):
        counts = np.full(num_rows, num_guesses or 0)
        speculation.begin_step()
        if num_guesses is None and not in_flight:
            _, counts = speculation.guess(running, rows, np.full(num_rows, 4), num_rows)
        sampled = (simulated.random.random((num_rows, counts.max() + 1)) >= right).astype(np.int64)  # 0 is right
        if counts.max():
            tokens += int(speculation.check(running, rows, sampled, counts).sum())
        tokens += num_rows
        of_step, alone = num_rows + int(counts.sum()), cost(num_rows)
        if counts.max() or not depth or speculation.asks(running, rows):
            simulated.now += in_flight * alone + cost(of_step) + host * alone
            speculation.end_step([num_rows] * in_flight + [of_step], bool(in_flight), False)
            in_flight = 0
        else:
            simulated.now += in_flight * alone
            speculation.end_step([num_rows] * in_flight, bool(in_flight), False)
            in_flight = 1
    return tokens / simulated.now


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
@pytest.mark.parametrize("depth", [0, 1])
def test_wrong_guesses_cost_at_most_two_percent(num_rows: int, cost, depth: int) -> None:
    steps = 3000 if num_rows < 64 else 1500
    none = num_rows / cost(num_rows)
    assert tokens_per_second(0.0, num_rows, cost, None, steps, depth) > 0.98 * none


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize(("num_rows", "right"), [(1, 0.8), (8, 0.8), (1, 0.3), (64, 0.9), (8, 1.0), (64, 1.0)])
@pytest.mark.parametrize("depth", [0, 1])
def test_it_finds_the_best_number_of_guesses(num_rows: int, right: float, cost, depth: int) -> None:
    alone = [tokens_per_second(right, num_rows, cost, k, 400) / (1 + 0.2 * depth) for k in range(1, 5)]
    best = max(num_rows / cost(num_rows), *alone)
    assert tokens_per_second(right, num_rows, cost, None, 1500, depth) > 0.9 * best


def test_guesses_that_are_not_found_leave_the_steps_pipelined() -> None:
    """The drafter has nothing to offer, and that is found out only after the pipeline has been emptied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Simulated, "propose", lambda self, running, rows, most: (np.zeros((len(rows), 0), np.int32), 0 * most)
        )
        cost = COSTS["flat, then linear"]
        assert tokens_per_second(0.9, 8, cost, None, 3000, 1) > 0.98 * 8 / cost(8)


def test_a_restart_forgets_times() -> None:
    """Those of a warm-up include compilers."""
    simulated, rows = Simulated(1.0, seed=1), np.arange(8)
    speculation = Speculation(simulated, 4, 8, clock=simulated.clock)
    running = Running(8, 8)
    guesses = []
    for cost in (lambda num_tokens: 100.0 * num_tokens, lambda num_tokens: 1.0):
        running.admission[rows] += 1
        for _ in range(20):
            speculation.begin_step()
            _, counts = speculation.guess(running, rows, np.full(8, 4), 8)
            if counts.any():
                speculation.check(running, rows, np.zeros((8, counts.max() + 1), dtype=np.int64), counts)
            simulated.now += cost(8 + counts.sum())
            speculation.end_step([8 + int(counts.sum())], False, False)
        guesses.append(counts.sum())
        speculation.forget()
    assert guesses[1] == 32 and speculation.num_right > 0


def test_right_guesses_that_would_not_pay_are_not_tried() -> None:
    """A step that takes as long for each token as for the first one gains nothing from a guess."""
    rate = tokens_per_second(1.0, 64, lambda n: n, None, num_steps=3000, depth=1)
    assert rate > 0.997


def test_a_drafter_is_asked_for_those_rows_that_get_guesses() -> None:
    class Drafter(Simulated):
        asked = np.zeros(64, dtype=np.int64)

        def propose(self, running, rows, most):
            assert most.all()
            self.asked[rows] += 1
            return super().propose(running, rows, most)

    drafter, rows = Drafter(0.0, seed=1), np.arange(64)
    speculation = Speculation(drafter, 4, 64, False, drafter.clock)
    running = Running(64, 8)
    running.admission[rows] = 1
    for _ in range(500):
        speculation.begin_step()
        _, counts = speculation.guess(running, rows, np.full(64, 4), 64)
        assert counts[drafter.asked == 0].sum() == 0
        if counts.max():
            speculation.check(running, rows, np.ones((64, counts.max() + 1), dtype=np.int64), counts)
        drafter.now += 0.001 * (64 + counts.sum())
        speculation.end_step([64 + int(counts.sum())], False, False)
    assert drafter.asked.min() < drafter.asked.max()
