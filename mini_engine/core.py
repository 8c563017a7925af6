"""The core of the engine: schedule, launch, count, collect. Token ids in, token ids out, and no device.

A call of `Core.step` launches the next step, then collects the tokens of the previous one. With a pipeline depth of 1,
the default on a GPU, the host schedules and prepares a step while the device computes the previous one; with 0, a step
is collected in the call that launches it. The core is the only writer of the requests' counters. It gives an executor
plain arrays (`StepInput`) and gets plain arrays back (`SampledTokens`). What happens when a step fails is in
`recovery.py`. Explained in chapter 07.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int, Int64

from mini_engine.attention.levels import LevelPlanner
from mini_engine.errors import RequestError, ScheduleError
from mini_engine.logprobs import LogprobRows, keep_logprobs
from mini_engine.request import FinishReason, PinnedPages, Request
from mini_engine.scheduler import Schedule, Scheduler
from mini_engine.speculative.branches import MOST_BRANCHES, Branches, possible_guesses
from mini_engine.speculative.speculation import Speculation
from mini_engine.step_input import Executor, StepInput, build_step_input

NOTHING = Schedule(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
Sampled = tuple[list[Request], Int[np.ndarray, " R"]]  # the request of each token, and the tokens


@dataclass(eq=False)
class Launched:
    """A step that has been launched but not collected.

    Attributes:
        ticket: the executor's.
        rows: [R] rows that sample a token.
        admissions: [R] the admission that filled each of these rows; a later one means that the request has left.
        asked: tokens whose log probabilities the step computes, and the request of each.
        num_tokens: tokens of the step.
        branches: of the step.
    """

    ticket: Any
    rows: Int64[np.ndarray, " R"]
    admissions: Int64[np.ndarray, " R"]
    asked: list[tuple[LogprobRows, list[Request]]]
    num_tokens: int
    branches: Branches | None


@dataclass(eq=False)
class CoreStep:
    """What one call of `Core.step` launched.

    Attributes:
        schedule: the step, in the order in which it was computed.
        requests: [B] its requests.
        step: its arrays; None if nothing was launched.
        num_prompt_tokens: tokens of the admitted requests, including the output so far of preempted ones.
    """

    schedule: Schedule
    requests: list[Request]
    step: StepInput | None
    num_prompt_tokens: int = 0


class Core:
    """Serves requests by continuous batching over the pages of one pool.

    Args:
        executor: computes the steps.
        new_scheduler: builds a scheduler whose pages are all free.
        planner: finds the levels of a step; None if the executor's attention does not use levels.
        speculation: guesses tokens, and decides when steps are not pipelined for that; None: none are guessed.

    Attributes:
        scheduler: the queues, the columns of the running requests, and the page table.
        requests: the unfinished requests by their names, in order of arrival.
        finished: requests that have ended and are not reported yet.
        sampled: tokens that have been collected and are not reported yet.
        pinned: pages that somebody else keeps, such as chunk memory.
        num_evicted: pages that earlier schedulers evicted from their prefix trees.
        speculation: see above.
    """

    def __init__(
        self,
        executor: Executor,
        new_scheduler: Callable[[], Scheduler],
        planner: LevelPlanner | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._executor, self._new_scheduler, self._planner = executor, new_scheduler, planner
        self.speculation = speculation
        self.scheduler = new_scheduler()
        self.requests: dict[str, Request] = {}
        self.finished: list[Request] = []
        self.sampled: list[Sampled] = []
        self.pinned: set[PinnedPages] = set()
        self.num_evicted = 0
        self._in_flight: deque[Launched] = deque()

    def step(self, depth: int) -> CoreStep:
        """Launch the next step, and collect the steps before it except the last `depth`.

        Raises:
            ScheduleError: if a scheduling part fails, or computes nothing although requests wait.
        """
        speculation = self.speculation
        if speculation is not None:
            speculation.begin_step()
        launched, collected = self._launch(self._schedule()), list[int]()
        if launched.step is None or (depth and speculation is not None and self._needs_tokens(launched.step)):
            depth = 0
        is_pipelined = len(self._in_flight) > 1
        while len(self._in_flight) > depth:
            collected.append(self._in_flight[0].num_tokens)
            self._collect()
        if speculation is not None:
            speculation.observe(self.scheduler.running)
            speculation.end_step(collected if launched.step else (), is_pipelined, is_idle=not self.requests)
        return launched

    def _needs_tokens(self, step: StepInput) -> bool:
        """Return whether the tokens of a step must be known before the next one is scheduled."""
        assert self.speculation is not None
        if len(step.token_ids) > len(step.rows) and step.num_logits.max() > 1:  # how many count is not known before
            return True
        return self.speculation.asks(self.scheduler.running, self._in_flight[-1].rows)

    # --- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: if it could not run to its end even on its own, or the pages of its chunks have been returned.
        """
        if not self.pinned.issuperset(chunk.pinned for chunk in request.chunks):
            raise RequestError("a chunk of the request has been unregistered or evicted; register it again")
        self.scheduler.add(request)
        self.requests[request.request_id] = request

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its pages."""
        request.finish_reason = reason
        self.scheduler.remove(request)
        self.finished.append(request)
        self.requests.pop(request.request_id, None)

    def restart(self, suspects: Sequence[Request] = ()) -> None:
        """Start over with the tokens that the host knows: no step is in flight, and every request waits again.

        Nothing is lost, whatever was interrupted: tokens that `Running.append` has stored are kept, and tokens that
        were still on the device are computed again.

        Args:
            suspects: if any of them is unfinished, only the first such request is queued.
        """
        self._in_flight.clear()
        self._executor.reset()
        if self._planner is not None:
            self._planner.forget()
        if self.speculation is not None:
            self.speculation.forget()
        scheduler, running = self._new_scheduler(), self.scheduler.running
        if self.pinned:
            scheduler.pin_again(np.concatenate([pinned.pages for pinned in self.pinned]))
        for request in list(self.requests.values()):
            request.token_ids = running.known_tokens(request)
            request.finish_reason = request.finish_reason or request.end_of(request.token_ids)
            if request.finish_reason is not None:
                if request not in self.finished:
                    self.finished.append(request)
                self.requests.pop(request.request_id)
        first = [request for request in suspects if request.finish_reason is None][:1]
        scheduler.waiting.update(dict.fromkeys(first or self.requests.values()))
        if (tree := self.scheduler.prefix_tree) is not None:
            self.num_evicted += tree.num_evicted
        self.scheduler = scheduler

    # --- pages without a request ---------------------------------------------------------------------------------

    def pin(self, num_pages: int, owner: object) -> PinnedPages:
        """Take pages out of the pool for keys that many requests attend to. `unpin` returns them.

        Raises:
            RequestError: if these are more than `num_pinnable`.
        """
        pinned = PinnedPages(self.scheduler.pin(num_pages, self.requests.values()), owner)
        self.pinned.add(pinned)
        return pinned

    def unpin(self, pinned: PinnedPages) -> None:
        """Return pinned pages to the pool, unless they have been returned already."""
        if pinned in self.pinned:
            self.pinned.remove(pinned)
            self.scheduler.unpin(pinned.pages)

    @property
    def num_pinnable(self) -> int:
        """Number of pages that `pin` can take while every unfinished request can still run to its end."""
        return self.scheduler.num_pinnable(self.requests.values())

    # --- one step ------------------------------------------------------------------------------------------------

    def _schedule(self) -> Schedule:
        schedule = self._ask_scheduler()
        if schedule is None:  # too few free pages; the tokens on the device may end requests
            while self._in_flight:
                self._collect()
            schedule = self._ask_scheduler()
        if schedule is None:
            raise ScheduleError("the part `schedule` waits for tokens, but none is on the device; return a Schedule")
        if not len(schedule.rows) and self.requests and not self._in_flight:
            raise ScheduleError(
                f"{len(self.scheduler.waiting)} requests wait, {len(self.scheduler.running)} run, and the scheduling "
                "parts compute none of them: check what your schedule, admit and share_budget return"
            )
        if self.speculation is not None and not self._in_flight:  # otherwise the last tokens are not known yet
            schedule = self._with_guesses(schedule, self.speculation)
        running, rows = self.scheduler.running, schedule.rows
        if self.scheduler.outputs_apart:  # prompts last, even those of which one token is left
            order = np.argsort(running.num_computed[rows] < running.num_prompt[rows], kind="stable")
            schedule = replace(schedule, rows=rows[order], num_new=schedule.num_new[order])
            rows = schedule.rows
        if self._planner is None or len(rows) < (1 if running.num_contexts else 2):
            return schedule
        # The order of the step's requests, and the pages that are read once for several of them.
        contexts = [request.context for request in running.requests_of(rows)] if running.num_contexts else []
        num_keys = running.num_computed[rows] - running.num_evicted[rows]
        order, levels = self._planner.arrange(
            self.scheduler.page_table, rows, schedule.num_new, num_keys, running.admission[rows], contexts
        )
        return replace(schedule, rows=rows[order], num_new=schedule.num_new[order], levels=levels)

    def _with_guesses(self, schedule: Schedule, speculation: Speculation) -> Schedule:
        """Add guesses to the decodes of a step, as many as there are tokens and pages left."""
        running, rows, left = self.scheduler.running, schedule.rows, self.scheduler.budget - schedule.num_tokens
        num_computed = running.num_computed[rows]
        decodes = (num_computed + 1 == running.num_known[rows]) & (num_computed >= running.num_prompt[rows])
        own = rows[decodes]
        if not len(own):
            return schedule
        room = running.max_len[own] - running.num_known[own] - 1  # a token is sampled after the last guess, too
        most = np.minimum(room, left // len(own))
        if num_branched := np.count_nonzero(is_branched := running.branches[own] > 0):
            most[is_branched] = np.minimum(most[is_branched], MOST_BRANCHES // num_branched)
        token_ids, counts = speculation.guess(running, own, most, schedule.num_tokens)
        counts, masks = possible_guesses(running, own, token_ids, counts)
        if not np.count_nonzero(counts) or not self.scheduler.reserve(own, 1 + counts):
            return schedule
        running.guess(own, token_ids, counts)
        num_new = schedule.num_new.astype(np.int64)
        num_new[decodes] += counts
        order = np.argsort(np.where(num_new == 1, 0, np.where(decodes, 1, 2)), kind="stable")  # prompts last
        return replace(schedule, rows=rows[order], num_new=num_new[order], num_tokens=int(num_new.sum()), masks=masks)

    def _ask_scheduler(self) -> Schedule | None:
        try:
            schedule = self.scheduler.schedule()
        except Exception as error:
            raise ScheduleError(f"a scheduling part failed: {type(error).__name__}: {error}") from error
        if not isinstance(schedule, Schedule | None):
            raise ScheduleError(f"the part `schedule` returned a {type(schedule).__name__}; return a Schedule")
        return schedule

    def _launch(self, schedule: Schedule) -> CoreStep:
        """Launch a step and count its tokens as computed and sampled."""
        if not len(schedule.rows):
            return CoreStep(schedule, [], None)
        running = self.scheduler.running
        step = build_step_input(schedule, running, self.scheduler.page_table, self.scheduler.outputs_apart)
        requests, rows = running.requests_of(step.rows), step.sampling_rows
        num_prompt_tokens = sum(len(request.token_ids) for request in schedule.admitted)
        asked = [(tokens, running.requests_of(tokens.rows)) for tokens in step.logprobs]
        ticket = self._executor.launch(step)
        self._in_flight.append(
            Launched(ticket, rows, running.admission[rows], asked, len(step.token_ids), step.branches)
        )
        running.kept[:] = -1
        running.count(step.rows, step.num_new)
        return CoreStep(schedule, requests, step, num_prompt_tokens)

    def _collect(self) -> None:
        """Read the tokens of the oldest launched step, and end the requests that are complete.

        A token is dropped if its request has ended in the meantime.
        """
        launched, running = self._in_flight[0], self.scheduler.running
        sampled = self._executor.collect(launched.ticket)
        rows, token_ids, counts = launched.rows, sampled.tokens, sampled.counts
        if launched.asked:  # stored before the tokens, so that a known token always has them
            keep_logprobs(launched.asked, sampled.logprobs)
        live = running.admission[rows] == launched.admissions
        if np.count_nonzero(live) < len(rows):
            rows, token_ids, counts = rows[live], token_ids[live], counts[live]
        self._in_flight.popleft()
        requests = running.requests_of(rows)
        if token_ids.shape[1] == 1:
            ended = running.append(rows, token_ids[:, 0])
            self.sampled.append((requests, token_ids[:, 0]))
        else:
            assert self.speculation is not None, "only guesses give a row several tokens"
            right = self.speculation.check(running, rows, token_ids, counts - 1)
            counts, ended = running.append_several(rows, token_ids, right + 1)
            if launched.branches is not None:
                running.kept[rows] = launched.branches.find(rows, counts - 1)
            sampled_by = [own for own, count in zip(requests, counts.tolist(), strict=True) for _ in range(count)]
            self.sampled.append((sampled_by, token_ids[np.arange(token_ids.shape[1]) < counts[:, None]]))
        for request in running.requests_of(ended):
            self.end(request, request.end_of(running.known_tokens(request)) or "length")
