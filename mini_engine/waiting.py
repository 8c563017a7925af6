"""Policies of the waiting queue: which waiting request is admitted next.

All unfinished requests stand in one line, by arrival or, with priorities, by priority and then by arrival. The last
running request in line is preempted first. A policy may admit a waiting request that is not the first in line; that
request overtakes the first one. Two requests can be overtaken: the first in line, and the first that was in turn but
needs more pages than are free (head-of-line blocking). Each can be overtaken `max_overtakes` times in its life. Then
the pool is held for it: no other request is admitted until it is.

So no request starves. The first running request in line is never preempted for another, so running requests end, and
the pages of those behind it become free. Then a waiting request that is first in line, and cannot be overtaken any
more, is admitted. With priorities this holds for requests of the best priority; others wait as long as requests of a
better priority keep arriving, which is what a priority means. Explained in chapter 16.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
from jaxtyping import Int

from mini_engine.request import Request, Running

Waiting = OrderedDict[Request, None]
NumCached = Callable[[Request], int]  # tokens of a waiting request whose keys are in cached pages
LOOKAHEAD = 128  # requests that `lpm` compares; SGLang uses fcfs where more wait
MOST_TRIES = 8  # requests that may turn out not to fit in one step; each costs a lookup in the prefix tree
MOST_TENANTS = 1024  # tenants whose counters are kept
INPUT_COST, OUTPUT_COST = 1, 2  # of a token, as in Sheng et al.: an output token costs more time than one of a prompt
DEFAULT_OVERTAKES = {"fcfs": 0, "priority": 0, "lpm": 32, "fair": 32}


class FirstComeFirstServed:
    """Admit requests in order of arrival ("fcfs"). The base of the other policies.

    Args:
        max_overtakes: how often a request can be overtaken; see the module. With 0, a request that does not fit blocks
            all requests behind it.
    """

    def __init__(self, max_overtakes: int = 0) -> None:
        self.max_overtakes = max_overtakes

    def rank(self, request: Request) -> tuple[int, int]:
        """Return a request's place in line; lower is first."""
        return 0, request.arrival

    def order(self, waiting: Waiting, num_cached: NumCached) -> Iterator[Request]:
        """Yield the requests that may be admitted, the next one first.

        Args:
            waiting: the waiting requests in line, at least one.
            num_cached: see `NumCached`.
        """
        yield from list(islice(waiting, LOOKAHEAD))

    def line_up(self, waiting: Waiting, running: Running) -> None:
        """Sort both queues into the line, after requests have arrived, were admitted, or were preempted."""
        if self.max_overtakes:  # otherwise they are sorted already
            self._sort(waiting, running)

    def _sort(self, waiting: Waiting, running: Running) -> None:
        for request in sorted(waiting, key=self.rank):
            waiting.move_to_end(request)
        running.sort(self.rank)

    def candidates(self, waiting: Waiting, num_cached: NumCached) -> Iterator[Request]:
        """Yield the requests to try, one after another; the caller takes those that it admits out of the queue.

        Args:
            waiting: the waiting requests in line.
            num_cached: see `NumCached`.
        """
        untried = self.order(waiting, num_cached)
        blocked: Request | None = None  # the first that was in turn and did not fit
        num_tries = 0
        while waiting and num_tries < MOST_TRIES:
            first = next(iter(waiting))
            held = next((own for own in (first, blocked) if own and own.num_overtaken >= self.max_overtakes), None)
            request = held or next(untried, None)
            if request is None:
                return
            if request not in waiting:
                continue
            yield request
            if request not in waiting:
                for overtaken in {first, blocked or first} - {request}:
                    overtaken.num_overtaken += 1
                blocked = None if blocked is request else blocked
            elif held:
                return
            else:
                blocked, num_tries = blocked or request, num_tries + 1

    def ahead(self, waiting: Waiting, request: Request) -> list[Request]:
        """Return the waiting requests that are likely to be admitted before a waiting request."""
        return [own for own in waiting if self.rank(own) < self.rank(request)]

    def entered(self, request: Request, num_tokens: int) -> None:
        """Note that a request was admitted and has `num_tokens` tokens to compute."""

    def served(self, running: Running, rows: Int[np.ndarray, " n"]) -> None:
        """Note the tokens that some running rows have by now."""


class Priority(FirstComeFirstServed):
    """Admit requests of the lowest `priority` first, and preempt those of the highest ("priority", as in vLLM)."""

    def rank(self, request: Request) -> tuple[int, int]:
        return request.priority, request.arrival

    def line_up(self, waiting: Waiting, running: Running) -> None:
        self._sort(waiting, running)


class LongestPrefix(FirstComeFirstServed):
    """Admit requests with the most tokens in cached pages first ("lpm", Zheng et al. 2024, "SGLang", section 3).

    Requests with a common prefix then run one after another, before the pages of the prefix are evicted.
    """

    def order(self, waiting: Waiting, num_cached: NumCached) -> Iterator[Request]:
        yield from sorted(islice(waiting, LOOKAHEAD), key=lambda request: -num_cached(request))


class Fair(FirstComeFirstServed):
    """Admit requests of the tenant that was served least first ("fair", Sheng et al. 2024, "Fairness in Serving LLMs").

    Each tenant has a virtual token counter. The tokens of a prompt count when it is admitted, except those in cached
    pages; the tokens of an output count twice, as they come. A tenant that had no request in the queue is lifted to the
    lowest counter in the queue, so that it cannot save up service while it is idle.

    Attributes:
        counters: virtual tokens of each tenant.
    """

    def __init__(self, max_overtakes: int = 0) -> None:
        super().__init__(max_overtakes)
        self.counters: dict[str, int] = {}
        self._num_waiting: dict[str, int] = {}  # requests of each tenant in the queue, as of its last reading
        self._last = ""  # the tenant whose request was admitted last

    def order(self, waiting: Waiting, num_cached: NumCached) -> Iterator[Request]:
        queues = dict[str, deque[Request]]()
        for request in waiting:
            queues.setdefault(request.tenant, deque()).append(request)
        self._lift(queues)
        self._num_waiting = {tenant: len(queue) for tenant, queue in queues.items()}
        return self._in_turn(queues)

    def ahead(self, waiting: Waiting, request: Request) -> list[Request]:
        """Return the requests that come before it if prompts alone are counted."""
        floor = min((self.counters.get(tenant, 0) for tenant in self._num_waiting), default=self._level)
        turns, counters = dict[Request, int](), dict[str, int]()
        for own in waiting:
            known = self.counters.get(own.tenant, floor)
            turns[own] = counters.get(own.tenant, known if own.tenant in self._num_waiting else max(known, floor))
            counters[own.tenant] = turns[own] + INPUT_COST * len(own.prompt_token_ids)
        mine = turns[request], request.arrival
        return [own for own in waiting if (turns[own], own.arrival) < mine]

    def entered(self, request: Request, num_tokens: int) -> None:
        self._last = tenant = request.tenant
        if not request.num_charged:  # otherwise it was preempted, which costs its tenant nothing
            self.counters[tenant] = self.counters.get(tenant, self._level) + INPUT_COST * num_tokens
            request.num_charged = len(request.token_ids)
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) - 1
        if self._num_waiting[tenant] <= 0:
            del self._num_waiting[tenant]

    def served(self, running: Running, rows: Int[np.ndarray, " n"]) -> None:
        for request, num_known in zip(running.requests_of(rows), running.num_known[rows].tolist(), strict=True):
            if num_new := num_known - request.num_charged:
                known = self.counters.get(request.tenant, self._level)
                self.counters[request.tenant] = known + OUTPUT_COST * num_new
                request.num_charged = num_known

    @property
    def _level(self) -> int:
        return self.counters.get(self._last, 0)

    def _in_turn(self, queues: dict[str, deque[Request]]) -> Iterator[Request]:
        while queues:
            tenant = min(queues, key=lambda own: (self.counters[own], self.rank(queues[own][0])))
            request = queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
            yield request

    def _lift(self, queues: dict[str, deque[Request]]) -> None:
        """Lift the counters of tenants that are new in the queue, and forget the lowest ones if there are too many."""
        old = [self.counters[tenant] for tenant in queues if tenant in self._num_waiting]
        floor = min(old, default=self._level)
        for tenant in queues.keys() - self._num_waiting.keys():
            self.counters[tenant] = max(self.counters.get(tenant, 0), floor)
        if len(self.counters) > MOST_TENANTS:
            idle = sorted(self.counters.keys() - queues.keys() - {self._last}, key=self.counters.__getitem__)
            for tenant in idle[: len(self.counters) - MOST_TENANTS // 2]:
                del self.counters[tenant]


POLICIES: dict[str, type[FirstComeFirstServed]] = {
    "fcfs": FirstComeFirstServed, "priority": Priority, "lpm": LongestPrefix, "fair": Fair,
}  # fmt: skip
