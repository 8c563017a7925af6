"""The simulated server: times that follow from its formula, and policies that break its rules."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from book.serving_simulator import (
    BUDGET,
    FIRST_SECONDS,
    FIXED_SECONDS,
    PLACES,
    TOKEN_SECONDS,
    Client,
    Waiting,
    simulate,
)


class InOrder:
    def decide(
        self, now: float, waiting: Sequence[Waiting], left: Sequence[int], free: int
    ) -> tuple[list[int], list[int]]:
        return [own.number for own in waiting[:free]], []


def seconds(*tokens: int) -> float:
    """Seconds of several steps with so many tokens each."""
    return sum(FIXED_SECONDS + TOKEN_SECONDS * own for own in tokens)


def test_one_request_takes_its_chunks_and_its_decodes():
    client = Client(3.0, 2 * BUDGET + 10, 3)
    end = simulate([client], InOrder())
    first = 3.0 + seconds(BUDGET, BUDGET, 10)
    assert client.times == pytest.approx([first, first + seconds(1), first + seconds(1, 1)])
    assert end == client.times[-1]


def test_decodes_come_before_prompts():
    decoding, prompt = Client(0.0, 1, 9), Client(0.001, BUDGET, 2)
    simulate([decoding, prompt], InOrder())
    first = decoding.times[0]
    assert prompt.times[0] == pytest.approx(first + seconds(BUDGET, 2))


def test_an_objective_needs_tokens_in_time():
    met, late, refused = Client(0.0, 8, 2, [FIRST_SECONDS, FIRST_SECONDS]), Client(0.0, 8, 1, [9.0]), Client(0.0, 8, 1)
    assert (met.is_met, late.is_met, refused.is_met) == (True, False, False)


requests = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=30)


@given(requests)
def test_every_token_arrives_once_and_no_step_is_overfull(drawn):
    clients = [Client(*own) for own in sorted(drawn)]
    end = simulate(clients, InOrder())
    together: dict[float, int] = {}
    for client in clients:
        assert len(client.times) == client.num_output and client.times == sorted(set(client.times))
        assert client.times[0] >= client.arrival + seconds(1) - 1e-9
        for time in client.times:
            together[time] = together.get(time, 0) + 1
    assert max(together.values()) <= PLACES and max(together) == end
    work = sum(client.num_prompt + client.num_output - 1 for client in clients)
    assert end >= clients[0].arrival + TOKEN_SECONDS * work + FIXED_SECONDS - 1e-9


class Returns:
    def __init__(self, admitted: list[int], refused: list[int]) -> None:
        self.decision = admitted, refused

    def decide(
        self, now: float, waiting: Sequence[Waiting], left: Sequence[int], free: int
    ) -> tuple[list[int], list[int]]:
        return self.decision


@pytest.mark.parametrize("policy", [Returns([5], []), Returns([0, 0], []), Returns([0], [0]), Returns([], [])])
def test_a_policy_that_breaks_the_rules_is_refused(policy):
    with pytest.raises(ValueError, match="admits"):
        simulate([Client(0.0, 5, 1)], policy)


def test_a_policy_may_let_requests_wait_for_others():
    """With requests still to come, a policy that admits nothing waits for the next arrival."""

    class Pairs(InOrder):
        def decide(self, now, waiting, left, free):
            return super().decide(now, waiting, left, free) if len(waiting) == 2 else ([], [])

    clients = [Client(0.0, 5, 1), Client(4.0, 5, 1)]
    simulate(clients, Pairs())
    assert clients[0].times == clients[1].times == pytest.approx([4.0 + seconds(10)])
