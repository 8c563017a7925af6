"""`LLMEngine`: serves requests by continuous batching. Token ids in, token ids out.

A call of `step` launches the next step, then collects the tokens of the previous one. With a pipeline depth of 1, the
default on a GPU, the host schedules and prepares a step while the device computes the previous one; with 0, a step is
collected in the call that launches it. Text belongs to the front end, `llm.py`. Explained in chapter 07.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress

import numpy as np
import torch

from mini_engine.attention.backend import create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.config import EngineConfig
from mini_engine.decode_graphs import graph_sizes
from mini_engine.defaults import resolve, specs_of
from mini_engine.errors import ChunkFileError, ConfigError, RequestError, ScheduleError
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.model_runner import Launched, ModelRunner
from mini_engine.models.base import LanguageModel
from mini_engine.outputs import EngineMetrics, StepReport
from mini_engine.parts import Parts
from mini_engine.request import Context, FinishReason, PinnedPages, Request, check_prompt, end_tokens
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Schedule, Scheduler

logger = logging.getLogger(__name__)
NOTHING = Schedule(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
Sampled = tuple[list[Request], np.ndarray]  # requests, and one token of each
OnStep = Callable[["LLMEngine", StepReport], None]


class LLMEngine:
    """A model that serves requests by continuous batching over a paged KV cache.

    Threads may share an engine: `add_request`, `abort`, `finish` and `step` are mutually exclusive.

    Args:
        model: the model, on its device.
        config: the options.
        eos_token_ids: tokens that end an output.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step, such as `Trace.record`.

    Attributes:
        config: the options, with every default resolved.
        requests: the unfinished requests by their names, in order of arrival. Read them, but do not change them.
        metrics: totals so far.

    Raises:
        ConfigError: for options that this model or this machine does not allow.
        RequestError: if a step of the warm-up fails.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        *,
        eos_token_ids: Collection[int] = (),
        parts: Parts | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.model, self.parts = model, parts or Parts()
        if not isinstance(self.parts, Parts):
            raise ConfigError(f"parts is a {type(parts).__name__}; give a mini_engine.Parts")
        self.config = config = resolve(config, model)
        assert config.num_pages and config.max_model_len and config.pipeline_depth is not None
        specs = specs_of(config, model)
        self.cache = PagedKVCache(
            specs, config.num_pages + 1, config.page_size, model.dtype, model.device, config.kv_layout
        )
        self.backend = create_backend(config.attn_backend, specs, self.cache, self.parts)
        self._runner = ModelRunner(
            model,
            self.backend,
            self.cache,
            config,
            graph_sizes=graph_sizes(config, model.device, self.backend.captures),
            persistent=self._persistent_decode(specs),
            parts=self.parts,
        )
        windows = [spec.window for spec in specs]
        # All layers share one page table, so a page is returned when it has left the widest window.
        self._window = None if None in windows else max(w for w in windows if w is not None)
        self._pinned: set[PinnedPages] = set()
        self.scheduler = self._new_scheduler()
        self._depth = config.pipeline_depth
        self._eos_token_ids = frozenset(eos_token_ids)
        self._on_step: OnStep | None = None
        self.requests: dict[str, Request] = {}
        self._in_flight: deque[Launched] = deque()
        # Requests that must each compute one token in a step of their own, because a step with all of them failed.
        self._suspects: list[Request] = []
        self._finished: list[Request] = []  # not reported yet
        self._to_finish: deque[tuple[Request, FinishReason]] = deque()
        self._is_busy = False  # a step or a transaction is under way
        self._is_recovering = False  # still set if `_recover` was interrupted
        self._arrivals = 0
        self._lock = threading.RLock()
        self.metrics = EngineMetrics()
        if config.warm_up:
            self._warm_up()
        self._on_step = on_step

    # --- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: ListLike[int],
        params: SamplingParams | None = None,
        context: Context = (),
    ) -> Request:
        """Queue a request; it joins the batch as soon as there is room.

        Args:
            request_id: a name that no unfinished request has.
            prompt_token_ids: the prompt.
            params: default `SamplingParams()`.
            context: registered chunks before the prompt, from `ChunkMemory.context`.

        Returns:
            The request. Read it, but do not change it.

        Raises:
            RequestError: if it cannot be served. Other requests are not affected.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(request_id, str):
            raise RequestError(f"the request's name is {request_id!r}; give a string")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}; give SamplingParams")
        if params.stop:
            raise RequestError("the engine's core has no text to search: use LLM for stop strings, or stop_token_ids")
        if not isinstance(prompt_token_ids, ListLike):
            raise RequestError(f"the prompt is a {type(prompt_token_ids).__name__}; give a list of token ids")
        prompt = list(prompt_token_ids)
        assert self.config.max_model_len is not None
        in_front = [token_id for chunk in context for token_id in chunk.token_ids]
        check_prompt(prompt, self.model.config.vocab_size, self.config.max_model_len, len(in_front))
        if context and self.backend.planner is None:
            raise RequestError(
                f"the {self.config.attn_backend} backend attends only to a request's own pages; use "
                'attn_backend="cascade" for requests over chunks'
            )
        prompt = in_front + prompt
        with self.transaction():
            if request_id in self.requests:
                raise RequestError(f"a request named {request_id!r} is unfinished; give each its own name")
            self.check_context(context)
            request = Request(
                request_id,
                prompt,
                params,
                seed=random.getrandbits(63) if params.seed is None else params.seed,
                max_len=min(len(prompt) + params.max_tokens, self.config.max_model_len),
                end_token_ids=end_tokens(params, self._eos_token_ids),
                arrival=self._arrivals,
                context=context,
            )
            self.scheduler.add(request)
            if self._suspects:  # `_recover` queues the request when the suspects are done
                self.scheduler.remove(request)
            self.requests[request_id] = request
            self._arrivals += 1
        return request

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages. Unknown names are ignored, because the request may just have ended."""
        with self.transaction():
            if isinstance(request_id, str) and (request := self.requests.get(request_id)):
                self._end(request, "abort")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request whose text has ended or failed, unless it has ended already; the next report has it.

        The garbage collector may close a stream anywhere, even in the middle of a step of the same thread. Then the
        request ends before the next step.
        """
        self._to_finish.append((request, reason))
        with self._lock:
            if not self._is_busy:
                self._finish_all()

    def tokens_of(self, request: Request, start: int = 0) -> list[int]:
        """Return the known tokens of a request's prompt and output, from a position on."""
        with self._lock:
            return self.scheduler.running.known_tokens(request, start)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.requests)

    @property
    def page_table(self) -> PageTable:
        return self.scheduler.page_table

    # --- pages without a request ---------------------------------------------------------------------------------

    def pin(self, num_pages: int) -> PinnedPages:
        """Take pages out of the pool for keys that many requests attend to. `unpin` returns them.

        Raises:
            RequestError: if these are more than `num_pinnable`.
        """
        with self.transaction():
            pinned = PinnedPages(self.scheduler.pin(num_pages, self.requests.values()))
            self._pinned.add(pinned)
        return pinned

    def unpin(self, pinned: PinnedPages) -> None:
        """Return pinned pages to the pool, unless they have been returned already.

        Raises:
            RequestError: if an unfinished request attends to them.
        """
        with self.transaction():
            if pinned in self.pins_in_use:
                raise RequestError("an unfinished request attends to these pages; wait until it ends, or abort it")
            if pinned in self._pinned:
                self._pinned.remove(pinned)
                self.scheduler.unpin(pinned.pages)

    def check_context(self, context: Context) -> None:
        """Raise RequestError if a chunk's pages have been returned to the pool."""
        if not self._pinned.issuperset(chunk.pinned for chunk in context):
            raise RequestError("a chunk of the request has been unregistered or evicted; register it again")

    @property
    def num_pinnable(self) -> int:
        """Number of pages that `pin` can take while every unfinished request can still run to its end."""
        return self.scheduler.num_pinnable(self.requests.values())

    @property
    def pins_in_use(self) -> set[PinnedPages]:
        """The pinned pages that unfinished requests attend to."""
        return {chunk.pinned for request in self.requests.values() for chunk in request.context}

    def reset_prefix_cache(self) -> None:
        """Forget the keys of ended requests, so that the next request with the same prompt computes it again.

        Raises:
            RequestError: if requests are unfinished.
        """
        with self.transaction():
            if self.requests:
                raise RequestError(f"{len(self.requests)} requests are unfinished; wait until they end, or abort them")
            self._recover()

    # --- before the first request --------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run the most common steps: prompts, including the longest possible one, and decodes of 1, 2, 4, … requests.

        A kernel is compiled when a step first needs it, and some backends compile one for each size of a batch. The
        engine then starts over, so the made-up requests leave no trace in its pages or metrics.

        Raises:
            RequestError: if one of these steps fails.
        """
        config = self.config
        assert config.num_pages and config.max_model_len
        longest = min(config.max_num_batched_tokens, min(config.max_model_len, config.num_pages * config.page_size) - 2)
        most = min(config.max_batch_size, config.num_pages) if longest > 0 else 0
        params = SamplingParams(temperature=1.0, seed=0, max_tokens=2, ignore_eos=True)
        for num_requests, num_tokens in [(1, longest), *((2**i, 1) for i in range(most.bit_length())), (most, 1)]:
            for i in range(num_requests if most else 0):
                self.add_request(f"warm-up {i}", [0] * num_tokens, params)
            while self.has_unfinished:
                for request in self.step().finished:
                    if request.error:
                        raise request.error
        self._runner.capture()
        self._recover()
        self.metrics = EngineMetrics()

    # --- one step ------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Launch the next step and collect the previous one. Without requests it does nothing.

        A request whose computation fails ends with `finish_reason="error"`, and the others go on.

        Raises:
            ScheduleError: if requests wait and the scheduling parts compute none of them.
        """
        with self._lock:
            start = time.perf_counter()
            sampled: list[Sampled] = []
            launched = None
            try:
                self._is_busy = True
                if self._is_recovering:
                    self._recover()
                self._finish_all()
                if self._suspects:
                    self._check_suspect()
                schedule = self._schedule(sampled)
                try:
                    if len(schedule.rows):
                        launched = self._runner.launch(schedule, self.scheduler.running, self.page_table)
                        self._in_flight.append(launched)
                    ahead = self._depth if len(schedule.rows) and not self._suspects else 0
                    while len(self._in_flight) > ahead:
                        sampled.append(self._collect())
                except Exception as error:
                    schedule, launched = replace(NOTHING, preempted=self._isolate(error)), None
            except BaseException:
                self._recover()
                raise
            finally:
                self._is_busy = False
            return self._report(schedule, launched, sampled, start)

    def _schedule(self, sampled: list[Sampled]) -> Schedule:
        metrics, tree = self.metrics, self.scheduler.prefix_tree
        num_evicted = tree.num_evicted if tree else 0
        schedule = self.scheduler.schedule()
        if schedule is None:  # too few free pages; the tokens on the device may end requests
            while self._in_flight:
                sampled.append(self._collect())
            schedule = self.scheduler.schedule()
        assert schedule is not None, "the scheduler waits for tokens, but none is on the device"
        if not len(schedule.rows) and self.requests and not self._in_flight:
            raise ScheduleError(
                f"{len(self.scheduler.waiting)} requests wait, {len(self.scheduler.running)} run, and the scheduling "
                "parts compute none of them: check what your schedule, admit and share_budget return"
            )
        if schedule.admitted:
            metrics.prompt_tokens += sum(len(request.token_ids) for request in schedule.admitted)
            metrics.shared_tokens += schedule.num_shared
        if tree:
            metrics.evicted_pages += tree.num_evicted - num_evicted
        running, planner = self.scheduler.running, self.backend.planner
        if planner is None or len(schedule.rows) < (1 if running.num_contexts else 2):
            return schedule
        # The backend chooses the order of the step's requests, and the shared pages that it reads once.
        rows, num_new, requests = schedule.rows, schedule.num_new, running.requests if running.num_contexts else ()
        order, levels = planner.arrange(
            self.page_table, rows, num_new, running.num_computed[rows], running.admission[rows], requests
        )
        return replace(schedule, rows=rows[order], num_new=num_new[order], levels=levels)

    def _collect(self) -> Sampled:
        """Read the tokens of the oldest launched step, and end the requests that are complete.

        A token is dropped if its request has ended in the meantime.
        """
        launched = self._in_flight[0]
        token_ids = self._runner.collect(launched)
        running = self.scheduler.running
        rows, requests = launched.rows, launched.sampled_by
        live = running.admission[rows] == launched.admissions
        if np.count_nonzero(live) < len(rows):
            rows, token_ids = rows[live], token_ids[live]
            requests = list(compress(requests, live.tolist()))
        self._in_flight.popleft()
        for request in running.requests_of(running.append(rows, token_ids)):
            self._end(request, request.end_of(running.known_tokens(request)) or "length")
        return requests, token_ids

    def _finish_all(self) -> None:
        """End the requests that `finish` has been given."""
        while self._to_finish:
            request, reason = self._to_finish[0]
            with self.transaction():
                if request.finish_reason is None:
                    self._end(request, reason)
            self._to_finish.popleft()

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self.scheduler.remove(request)
        self._finished.append(request)
        self.requests.pop(request.request_id, None)

    def _report(
        self, schedule: Schedule, launched: Launched | None, sampled: list[Sampled], start: float
    ) -> StepReport:
        finished, self._finished = self._finished, []
        try:
            sampled_by, token_ids = sampled[0] if sampled else ([], NOTHING.rows)
            for more_requests, more_token_ids in sampled[1:]:
                sampled_by, token_ids = sampled_by + more_requests, np.append(token_ids, more_token_ids)
            requests, num_computed, batch = [], NOTHING.rows, None
            if launched:
                requests, num_computed, batch = launched.requests, launched.num_computed, launched.batch
            seconds, size = time.perf_counter() - start, self.cache.bytes_per_token
            report = StepReport(
                schedule, requests, num_computed, batch, sampled_by, token_ids, finished, start, seconds, size
            )
            if self._on_step:
                self._on_step(self, report)
            self.metrics.add(report)
        except BaseException:
            self._finished = finished + self._finished  # the next report has them
            raise
        return report

    # --- when a step fails ---------------------------------------------------------------------------------------

    def _isolate(self, error: Exception) -> list[Request]:
        """Start over after an error in a step, and let its requests compute their next tokens one at a time.

        The request that causes the error then fails alone and ends with it, and the others go on.

        Returns:
            The requests that lost their pages.
        """
        logger.warning("a step failed; its requests are computed again, one at a time", exc_info=error)
        self.metrics.failed_steps += 1
        running = self.scheduler.running.requests_of(self.scheduler.running.order)
        if self._suspects:
            suspect = self._suspects[0]
            suspect.error = RequestError(f"computing the request failed: {type(error).__name__}: {error}")
            suspect.error.__cause__ = error
            suspect.finish_reason = "error"
        self._suspects = self._suspects or running
        self._recover()
        return running

    def _check_suspect(self) -> None:
        """Let the next suspect run once the first one has computed a token alone, or has ended."""
        suspect = self._suspects[0]
        if suspect.finish_reason or len(self.tokens_of(suspect)) > len(suspect.token_ids):
            del self._suspects[0]
            self._recover()

    def _recover(self) -> None:
        """Start over with the tokens that the host knows: no page is in use, and every unfinished request waits again.

        While there are suspects, only the first of them is queued.

        Nothing is lost, whatever was interrupted: tokens that `Running.append` has stored are kept, and tokens that
        were still on the device are computed again.
        """
        self._is_recovering = True  # until the last line; a second interrupt or error leaves the rest to the next call
        self._in_flight.clear()
        self._runner.reset()
        scheduler, running = self._new_scheduler(), self.scheduler.running
        for request in list(self.requests.values()):
            request.token_ids = running.known_tokens(request)
            request.finish_reason = request.finish_reason or request.end_of(request.token_ids)
            if request.finish_reason is not None:
                if request not in self._finished:
                    self._finished.append(request)
                self.requests.pop(request.request_id)
        self._suspects = [request for request in self._suspects if request.finish_reason is None]
        scheduler.waiting.update(dict.fromkeys(self._suspects[:1] or self.requests.values()))
        self.scheduler = scheduler
        self._is_recovering = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Exclude other threads, and start over after any interruption other than a refusal."""
        with self._lock:
            was_busy = self._is_busy  # transactions may be nested
            try:
                self._is_busy = True
                if self._is_recovering:
                    self._recover()
                yield
            except (RequestError, ChunkFileError):
                raise
            except BaseException:
                self._recover()
                raise
            finally:
                self._is_busy = was_busy

    def _persistent_decode(self, specs: ListLike[AttentionSpec]) -> PersistentDecode | None:
        if not self.config.persistent_decode:
            return None
        if not PersistentDecode.accepts(self.model, specs, self.cache):
            raise ConfigError(
                "persistent_decode needs a Llama or Qwen3 in bfloat16 on a Hopper GPU, without biases, windows, "
                "soft-caps or an FP8 KV cache, and of sizes that its kernel supports (see PersistentDecode.accepts); "
                "leave it out"
            )
        return PersistentDecode(self.model, self.cache)

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        assert config.num_pages and config.max_model_len
        pages_per_row = -(-config.max_model_len // config.page_size)
        scheduler = Scheduler(
            self.parts.page_table(config.num_pages, config.page_size, config.max_batch_size, pages_per_row),
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window=self._window,
            prefix_sharing=config.prefix_sharing,
            parts=self.parts,
        )
        if self._pinned:
            scheduler.pin_again(np.concatenate([pinned.pages for pinned in self._pinned]))
        return scheduler
