"""Serving in virtual time: the engine's own scheduler, and a clock that a model of the step time moves.

Nothing is computed, so an hour of load takes seconds, and the result is the same on every machine: the way to compare
scheduling policies. The clients' times have the types of `mini_engine/bench/load.py`. Explained in chapter 16.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from mini_engine.bench.load import Seen
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.serving.admission import Admission, QueueFullError
from mini_engine.waiting import FirstComeFirstServed


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: a fixed cost (the weights are read once) and a cost per token. Keys cost nothing.

    Attributes:
        fixed: seconds of a step, however few tokens it has.
        per_token: seconds that each token adds.
    """

    fixed: float
    per_token: float

    def __call__(self, num_tokens: int) -> float:
        return self.fixed + self.per_token * num_tokens

    @classmethod
    def fit(cls, num_tokens: Int[np.ndarray, " n"], seconds: Float[np.ndarray, " n"]) -> StepCost:
        """Fit measured steps by least squares of the relative errors: short steps count as much as long ones."""
        columns = np.stack([np.ones(len(num_tokens)), num_tokens], axis=1) / seconds[:, None]
        (fixed, per_token), *_ = np.linalg.lstsq(columns, np.ones(len(seconds)), rcond=None)
        return cls(float(fixed), float(per_token))


@dataclass(frozen=True)
class VirtualRequest:
    """A request that arrives at a time.

    Attributes:
        arrival: seconds since the start.
        prompt: its tokens.
        num_outputs: tokens of its output.
        priority: see `LLMEngine.add_request`.
        tenant: see `LLMEngine.add_request`.
    """

    arrival: float
    prompt: list[int]
    num_outputs: int
    priority: int = 0
    tenant: str = ""


@dataclass
class VirtualRun:
    """What happened.

    Attributes:
        seen: what the client of each request saw, in the order of the requests.
        num_steps: steps.
        num_computed: tokens that the steps computed.
        num_shared: prompt tokens that were in cached pages.
        num_preempted: preemptions.
    """

    seen: list[Seen] = field(default_factory=list)
    num_steps: int = 0
    num_computed: int = 0
    num_shared: int = 0
    num_preempted: int = 0


@dataclass(frozen=True)
class VirtualEngine:
    """An engine without a model.

    Attributes:
        cost: of a step.
        num_pages: pages of the pool.
        page_size: tokens of a page.
        max_batch_size: requests that run at once.
        max_num_batched_tokens: most tokens of a step.
        prefix_sharing: keep pages for later requests.
    """

    cost: StepCost
    num_pages: int = 1024
    page_size: int = 16
    max_batch_size: int = 8
    max_num_batched_tokens: int = 2048
    prefix_sharing: bool = False

    def serve(
        self,
        requests: Sequence[VirtualRequest],
        policy: FirstComeFirstServed | None = None,
        max_ttft_seconds: float | None = None,
    ) -> VirtualRun:
        """Serve requests, and return what their clients saw.

        Args:
            requests: in order of arrival.
            policy: of the waiting queue; default first come, first served.
            max_ttft_seconds: refuse requests for which a longer time to first token is predicted.
        """
        longest = max(len(own.prompt) + own.num_outputs for own in requests)
        scheduler = Scheduler(
            PageTable(self.num_pages, self.page_size, self.max_batch_size, -(-longest // self.page_size)),
            max_model_len=longest,
            max_num_batched_tokens=self.max_num_batched_tokens,
            window=None,
            prefix_sharing=self.prefix_sharing,
            policy=policy,
            parts=Parts(),
        )
        admission = None if max_ttft_seconds is None else Admission(max_ttft_seconds, self.max_batch_size)
        run, now, coming, running = VirtualRun(), 0.0, deque(requests), scheduler.running
        while coming or scheduler.waiting or len(running):
            if not scheduler.waiting and not len(running):
                now = max(now, coming[0].arrival)
            while coming and coming[0].arrival <= now:
                _arrive(scheduler, admission, coming.popleft(), run)
            schedule = scheduler.schedule()
            assert schedule is not None, "no token is on a device"
            if not len(schedule.rows):  # all that came were refused
                continue
            seconds = self.cost(schedule.num_tokens)
            now += seconds
            run.num_steps += 1
            run.num_computed += schedule.num_tokens
            run.num_shared += schedule.num_shared
            run.num_preempted += len(schedule.preempted)
            is_decode = schedule.num_tokens == len(schedule.rows)
            running.count(schedule.rows, schedule.num_new)
            sampling = schedule.rows[running.num_scheduled[schedule.rows] > running.num_known[schedule.rows]]
            for request in running.requests_of(sampling):
                run.seen[request.arrival].times.append(now)
            for request in running.requests_of(running.append(sampling, np.zeros(len(sampling), dtype=np.int64))):
                scheduler.remove(request)
                if admission is not None:
                    admission.ended(len(request.output_token_ids))
            if admission is not None:
                admission.stepped(scheduler, schedule.num_tokens, seconds, is_decode=is_decode)
        return run


def _arrive(scheduler: Scheduler, admission: Admission | None, coming: VirtualRequest, run: VirtualRun) -> None:
    """Queue a request, unless it is refused."""
    params, number = SamplingParams(temperature=0.0, max_tokens=coming.num_outputs), len(run.seen)
    request = Request(
        f"{number}", coming.prompt, params, 0, len(coming.prompt) + coming.num_outputs, (), number,
        priority=coming.priority, tenant=coming.tenant,
    )  # fmt: skip
    run.seen.append(Seen(coming.arrival))
    scheduler.add(request)
    try:
        if admission is not None:
            admission.check(scheduler, request)
    except QueueFullError as error:
        scheduler.remove(request)
        run.seen[-1].error = str(error)
