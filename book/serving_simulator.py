"""A server in virtual time: requests arrive, a policy admits or refuses them, and a formula says how long a step takes.

Nothing is measured, so the same requests and the same policy give the same times on every machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mini_engine.policy import share_budget

FIXED_SECONDS, TOKEN_SECONDS = 0.045, 0.00116  # of a step, and of each token in it: the embedded model on two CPU cores
BUDGET, PLACES = 128, 16  # most tokens of a step, and most running requests
FIRST_SECONDS, BETWEEN_SECONDS = 2.0, 0.15  # the objective: to the first token, and to each further one on average


@dataclass(frozen=True)
class Waiting:
    """A request that waits, as a policy sees it. How long its output will be, nobody knows.

    Attributes:
        number: names the request.
        arrival: when it arrived, in seconds.
        num_prompt: tokens of its prompt.
    """

    number: int
    arrival: float
    num_prompt: int


class Policy(Protocol):
    """Decides which waiting requests are admitted, and which are refused."""

    def decide(
        self, now: float, waiting: Sequence[Waiting], left: Sequence[int], free: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Decide before a step.

        Args:
            now: in seconds.
            waiting: the requests that wait, oldest first.
            left: for each running request, the tokens of its prompt that are not computed yet; 0 while it decodes.
            free: places in the batch; no more are admitted.

        Returns:
            The numbers of the requests that are admitted, in this order, and of those that are refused.
        """
        ...


@dataclass
class Client:
    """One request and what its client sees.

    Attributes:
        arrival: when it arrives, in seconds.
        num_prompt: tokens of its prompt.
        num_output: tokens of its output.
        times: when each token of the output came.
        refused: when it was refused; None if it was not.
    """

    arrival: float
    num_prompt: int
    num_output: int
    times: list[float] = field(default_factory=list)
    refused: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether it got its tokens within the objective."""
        if not self.times:
            return False
        mean = (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)
        return self.times[0] - self.arrival <= FIRST_SECONDS and mean <= BETWEEN_SECONDS


def simulate(clients: Sequence[Client], policy: Policy, *, budget: int = BUDGET, places: int = PLACES) -> float:
    """Serve the clients, and return the time of the end. What they see is written into them.

    Args:
        clients: in order of arrival; each is served once.
        policy: admits and refuses.
        budget: most tokens of a step.
        places: most running requests.

    Raises:
        ValueError: if the policy admits too many requests, or one that does not wait, or serves none although it could.
    """
    coming, waiting = deque(enumerate(clients)), dict[int, Client]()
    left = dict[int, int]()  # prompt tokens of each running request that are not computed, in order of admission
    now = 0.0
    while coming or waiting or left:
        if not waiting and not left:
            now = max(now, coming[0][1].arrival)
        while coming and coming[0][1].arrival <= now:
            number, client = coming.popleft()
            waiting[number] = client
        views = [Waiting(number, client.arrival, client.num_prompt) for number, client in waiting.items()]
        free = places - len(left)
        admitted, refused = policy.decide(now, views, list(left.values()), free)
        chosen = [*admitted, *refused]
        if len(admitted) > free or len(set(chosen)) < len(chosen) or not set(chosen) <= waiting.keys():
            raise ValueError(f"of {list(waiting)} and with {free} free places, it admits {admitted}, refuses {refused}")
        for number in refused:
            waiting.pop(number).refused = now
        left |= {number: waiting.pop(number).num_prompt for number in admitted}
        if not left:
            if waiting and not coming:
                raise ValueError("requests wait and none runs, but the policy neither admits nor refuses any")
            now = max(now, coming[0][1].arrival) if coming else now
            continue
        # A running request's next token is a decode; a prompt counts as one only if it is longer than a token.
        shares = share_budget(np.array([max(own, 1) for own in left.values()]), budget).tolist()
        now += FIXED_SECONDS + TOKEN_SECONDS * sum(shares)
        for (number, own), share in zip(list(left.items()), shares, strict=True):
            left[number] = max(own - share, 0)
            if share and not left[number]:
                clients[number].times.append(now)
                if len(clients[number].times) == clients[number].num_output:
                    del left[number]
    return now
