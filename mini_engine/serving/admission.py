"""SLO-aware admission: refuse a request at once if it would wait too long for its first token.

A request's time to first token is the time of the steps up to its own first one. They compute the prompts that are
ahead of it and its own, and, while the batch or the pool is full, as many output tokens as it takes until there is
room. How long steps take, and how long outputs are, is measured while the server runs. A client that is refused early,
and told when to come back, can go elsewhere, and the requests that are admitted meet the objective. Explained in
chapter 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mini_engine.errors import MiniEngineError
from mini_engine.request import Request
from mini_engine.scheduler import Scheduler

FADES = 0.98  # weight of an earlier measurement after a later one
MOST_RETRY_SECONDS = 119  # some clients do not try again at all if they are told to wait for two minutes


class QueueFullError(MiniEngineError):
    """A prompt that was refused because too many wait already.

    Args:
        message: what to tell the client.
        retry_after: seconds after which to try again.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass
class FadingMean:
    """A mean in which later measurements weigh more.

    Attributes:
        weight: of all measurements; 0 if there is none.
        total: the weighted sum.
    """

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float | int) -> None:
        """Add a measurement."""
        self.weight, self.total = FADES * self.weight + 1, FADES * self.total + value

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


class StepTime:
    """Seconds of steps, as a fixed cost and a cost per prompt token.

    Steps that only decode and steps that compute prompts are measured apart, so either kind is known however long ago
    its last step was.
    """

    def __init__(self) -> None:
        self._tokens, self._seconds = (FadingMean(), FadingMean()), (FadingMean(), FadingMean())

    def add(self, num_tokens: int, seconds: float, *, is_decode: bool) -> None:
        """Add a measured step."""
        self._tokens[is_decode].add(num_tokens)
        self._seconds[is_decode].add(seconds)

    @property
    def decode(self) -> float:
        """Seconds of a step that only decodes; 0 if none was measured."""
        return self._seconds[True].mean

    @property
    def per_prompt_token(self) -> float:
        """Seconds that a token of a prompt adds to a step; 0 if none was measured."""
        (tokens, decodes), (seconds, decode) = ([own.mean for own in both] for both in (self._tokens, self._seconds))
        if tokens <= decodes:
            return 0.0
        return max(0.0, seconds - decode) / (tokens - decodes)


class Admission:
    """Predicts the time to first token of requests that arrive, and refuses those for which it is too long.

    Args:
        max_ttft_seconds: longest time to first token.
        max_rows: requests that run at once.
    """

    def __init__(self, max_ttft_seconds: float, max_rows: int) -> None:
        self._most, self._capacity, self._max_rows = max_ttft_seconds, max_rows, max_rows
        self._step, self._output = StepTime(), FadingMean()

    def stepped(self, scheduler: Scheduler, num_tokens: int, seconds: float, *, is_decode: bool) -> None:
        """Measure a step. If tokens were left, the requests that still wait have found no room.

        Args:
            scheduler: the queues.
            num_tokens: tokens of the step.
            seconds: its duration.
            is_decode: whether it computed no prompt.
        """
        if num_tokens:
            self._step.add(num_tokens, seconds, is_decode=is_decode)
        is_full = scheduler.waiting and num_tokens < scheduler.budget
        self._capacity = max(1, len(scheduler.running)) if is_full else self._max_rows

    def ended(self, num_output_tokens: int) -> None:
        """Measure an output."""
        self._output.add(num_output_tokens)

    def check(self, scheduler: Scheduler, request: Request) -> None:
        """Check a waiting request that has just arrived. One that would run in the next step is never refused.

        Raises:
            QueueFullError: if it would wait too long for its first token.
        """
        ahead, num_to_end = self._before(scheduler, request)
        if (ahead or num_to_end) and (seconds := self.predict(scheduler, request)) > self._most:
            wait = min(max(1, math.ceil(seconds - self._most)), MOST_RETRY_SECONDS)
            raise QueueFullError(
                f"the first token would take {seconds:.1f} s, and {self._most:g} s is the limit of this server; send "
                f"the request again in {wait} s",
                wait,
            )

    def predict(self, scheduler: Scheduler, request: Request) -> float:
        """Return the likely seconds until the first token of a waiting request.

        Cached prefixes and requests that arrive later are not considered, and until the first output has ended, outputs
        count as empty.
        """
        running = scheduler.running
        ahead, num_to_end = self._before(scheduler, request)
        pending = running.num_scheduled[running.order] - running.num_computed[running.order]
        num_prompt_tokens = sum(len(own.token_ids) for own in (*ahead, request)) + int(pending[pending > 1].sum())
        num_decodes = num_to_end * self._output.mean / self._capacity  # each of which gives every row a token
        return (1 + num_decodes) * self._step.decode + num_prompt_tokens * self._step.per_prompt_token

    def _before(self, scheduler: Scheduler, request: Request) -> tuple[list[Request], int]:
        """Return the waiting requests ahead of a request, and how many requests must end before it can run."""
        ahead = scheduler.policy.ahead(scheduler.waiting, request)
        return ahead, max(0, len(scheduler.running) + len(ahead) + 1 - self._capacity)
