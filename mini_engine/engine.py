"""`LLMEngine`: a model that serves requests by continuous batching. Token ids in, token ids out.

It builds the parts of the engine and checks requests. The loop is in `core.py`, and what happens when a step fails in
`recovery.py`. Text belongs to the front end, `llm.py`. Explained in chapter 07.
"""

import gc
import logging
import random
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListLike
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from mini_engine.attention.grouped import create_grouped_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.config import EngineConfig, ResolvedConfig
from mini_engine.core import NOTHING, Core, CoreStep
from mini_engine.defaults import groups_of, measured_pages, resolve, specs_of
from mini_engine.errors import ConfigError, RequestError
from mini_engine.executor import LocalExecutor
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.models.batch_invariant import batch_invariant
from mini_engine.models.transform import prepare_weights
from mini_engine.outputs import EngineMetrics, StepReport
from mini_engine.parts import Parts
from mini_engine.piecewise_graphs import piece_sizes
from mini_engine.recovery import Recovery
from mini_engine.request import Context, FinishReason, Request, check_prompt, end_tokens
from mini_engine.sampling_params import SamplingParams, check_tokens
from mini_engine.scheduler import Scheduler
from mini_engine.speculative.draft_model import DraftModelDrafter
from mini_engine.speculative.drafter import create_drafter
from mini_engine.speculative.speculation import Speculation
from mini_engine.structured import TokenGrammar
from mini_engine.waiting import POLICIES

logger = logging.getLogger(__name__)
OnStep = Callable[["LLMEngine", StepReport], None]


class LLMEngine:
    """A model that serves requests by continuous batching over a paged KV cache.

    Threads may share an engine: `add_request`, `abort`, `finish` and `step` are mutually exclusive.

    Args:
        model: the model, on its device.
        config: the options.
        eos_token_ids: tokens that end an output.
        draft_model: guesses tokens, for `speculative_config` with the method "draft_model"; on the same device.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step, such as `Trace.record`.

    Attributes:
        config: the options, with every default resolved.
        cache: the KV cache.
        backend: the attention.
        layer_groups: groups of layers that have page tables of their own. A page of the options is a page of each.
        executor: computes the steps.
        core: schedules them.
        eos_token_ids: see above.
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
        draft_model: LanguageModel | None = None,
        parts: Parts | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self.model, self.parts, self._draft_model = model, parts or Parts(), draft_model
        if not isinstance(self.parts, Parts):
            raise ConfigError(f"parts is a {type(parts).__name__}; give a mini_engine.Parts")
        start = time.perf_counter()
        prepare_weights(model)
        resolved = resolve(config, model)
        _check_draft(config, model, draft_model)
        self.eos_token_ids = frozenset(eos_token_ids)
        self._on_step: OnStep | None = None
        self._arrivals = 0
        self._random = random.Random(config.seed)
        self.metrics = EngineMetrics()
        if resolved.warm_up:
            logger.info("warming up: kernels that are not on this disk yet are compiled, once")
        if config.num_pages is None and model.device.type == "cuda":
            models = [model] if draft_model is None else [model, draft_model]
            resolved = replace(resolved, num_pages=measured_pages(resolved, models, self._run_longest))
        self._build(resolved)
        if self.config.warm_up:
            self._warm_up()
            logger.info("ready after %.1f s", time.perf_counter() - start)
        self._on_step = on_step

    # --- requests ------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: ListLike[int],
        params: SamplingParams | None = None,
        context: Context = (),
        grammar: TokenGrammar | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> Request:
        """Queue a request; it joins the batch as soon as there is room.

        Args:
            request_id: a name that no unfinished request has.
            prompt_token_ids: the prompt.
            params: default `SamplingParams()`.
            context: registered chunks before the prompt, from `ChunkMemory.context`.
            grammar: says which tokens may follow; it belongs to this request alone.
            priority: lower is served first; only with `scheduling_policy="priority"`.
            tenant: the name of the sender, for `scheduling_policy="fair"`.

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
        if params.n > 1:
            raise RequestError(f"n is {params.n}, and the engine's core gives one output: use LLM for several")
        if params.stop:
            raise RequestError("the engine's core has no text to search: use LLM for stop strings, or stop_token_ids")
        if params.structured_outputs and grammar is None:
            raise RequestError("the engine's core has no tokenizer: use LLM for structured_outputs, or give a grammar")
        if params.bad_words and not params.bad_words_token_ids:
            raise RequestError("the engine's core has no tokenizer: use LLM for bad_words, or bad_words_token_ids")
        if not isinstance(priority, int) or isinstance(priority, bool) or not isinstance(tenant, str):
            raise RequestError(f"priority is {priority!r}, tenant is {tenant!r}; give a whole number and a string")
        if priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {priority}, but scheduling_policy is {self.config.scheduling_policy!r}; leave priority "
                'out, or build the engine with scheduling_policy="priority"'
            )
        ends = end_tokens(params, self.eos_token_ids)
        check_tokens(params, self.model.config.vocab_size, ends)
        if not isinstance(prompt_token_ids, ListLike):
            raise RequestError(f"the prompt is a {type(prompt_token_ids).__name__}; give a list of token ids")
        prompt = list(prompt_token_ids)
        in_front = [token_id for chunk in context for token_id in chunk.token_ids]
        check_prompt(prompt, self.model.config.vocab_size, self.config.max_model_len, len(in_front))
        # The pages of a single chunk that has not moved can be read like the request's own.
        prefix = context[0] if len(context) == 1 and context[0].query_offset == 0 else None
        if context and prefix is None and self.backend.planner is None:
            raise RequestError(
                f"the {self.config.attn_backend} backend attends only to a request's own pages; use "
                'attn_backend="cascade" for requests over chunks'
            )
        prompt = in_front + prompt
        with self.transaction():
            if request_id in self.requests:
                raise RequestError(f"a request named {request_id!r} is unfinished; give each its own name")
            request = Request(
                request_id,
                prompt,
                params,
                seed=self._random.getrandbits(63) if params.seed is None else params.seed,
                max_len=min(len(prompt) + (params.max_tokens or self.config.max_model_len), self.config.max_model_len),
                end_token_ids=ends,
                arrival=self._arrivals,
                prefix=prefix,
                context=() if prefix else context,
                grammar=grammar,
                priority=priority,
                tenant=tenant,
            )
            self._recovery.add(request)
            self._arrivals += 1
        return request

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages. Unknown names are ignored, because the request may just have ended."""
        with self.transaction():
            if isinstance(request_id, str) and (request := self.requests.get(request_id)):
                self.core.end(request, "abort")

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request whose text has ended or failed, unless it has ended already; the next report has it."""
        self._recovery.finish(request, reason)

    def tokens_of(self, request: Request, start: int = 0) -> list[int]:
        """Return the known tokens of a request's prompt and output, from a position on."""
        with self._recovery.lock:
            return self.scheduler.running.known_tokens(request, start)

    def transaction(self) -> AbstractContextManager[None]:
        """Exclude other threads, and start over after any interruption other than a refusal."""
        return self._recovery.transaction()

    def reset_prefix_cache(self) -> None:
        """Forget the keys of ended requests, so that the next request with the same prompt computes it again.

        Raises:
            RequestError: if requests are unfinished.
        """
        with self.transaction():
            if self.requests:
                raise RequestError(f"{len(self.requests)} requests are unfinished; wait until they end, or abort them")
            self._recovery.restart()

    @property
    def requests(self) -> dict[str, Request]:
        """The unfinished requests by their names, in order of arrival. Read them, but do not change them."""
        return self.core.requests

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.core.requests)

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def page_table(self) -> PageTable:
        return self.core.scheduler.page_table

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> StepReport:
        """Launch the next step and collect the previous one. Without requests it does nothing.

        A request whose computation fails ends with `finish_reason="error"`, and the others go on.

        Raises:
            ScheduleError: if a scheduling part fails, or computes nothing although requests wait.
        """
        with self._recovery.lock:
            start = time.perf_counter()
            launched = self._recovery.step()
            return self._report(launched, start)

    def _report(self, launched: CoreStep, start: float) -> StepReport:
        core, tree = self.core, self.scheduler.prefix_tree
        finished, core.finished = core.finished, []
        try:
            sampled, core.sampled = core.sampled, []
            sampled_by, token_ids = sampled[0] if sampled else ([], NOTHING.rows)
            for more_requests, more_token_ids in sampled[1:]:
                sampled_by, token_ids = sampled_by + more_requests, np.append(token_ids, more_token_ids)
            report = StepReport(
                launched.schedule, launched.requests, launched.step, sampled_by, token_ids, finished,
                start, time.perf_counter() - start, self.cache.bytes_per_token,
            )  # fmt: skip
            if self._on_step:
                self._on_step(self, report)
            self.metrics.add(report, launched.num_prompt_tokens)
            self.metrics.failed_steps = self._recovery.failed_steps
            self.metrics.evicted_pages = core.num_evicted + (tree.num_evicted if tree else 0)
            if core.speculation is not None:
                self.metrics.num_drafts = core.speculation.num_drafts
                self.metrics.num_draft_tokens = core.speculation.num_guesses
                self.metrics.num_accepted_tokens = core.speculation.num_right
        except BaseException:
            core.finished = finished + core.finished  # the next report has them
            raise
        return report

    def _warm_up(self) -> None:
        """Run the most common steps: the longest prompt, decodes of 1, 2, 4, … requests, and a long common prefix.

        A kernel is compiled when a step first needs it, and some backends compile one for each size of a batch. The
        engine then starts over, so the made-up requests leave no trace in its pages or metrics.

        Raises:
            RequestError: if one of these steps fails.
        """
        config = self.config
        longest = min(config.max_num_batched_tokens, min(config.max_model_len, config.num_pages * config.page_size) - 2)
        most = min(config.max_batch_size, config.num_pages) if longest > 0 else 0
        batches = [(1, longest), *((2**i, 1) for i in range(most.bit_length())), (most, 1), (most, min(longest, 1024))]
        for num_requests, num_tokens in batches:
            self._run_made_up([[0] * num_tokens] * (num_requests if most else 0))
        for executor in self._executors:
            executor.capture()
        self._recovery.restart()
        self.core.num_evicted = 0
        if self.core.speculation is not None:
            speculation = self.core.speculation
            speculation.num_drafts = speculation.num_guesses = speculation.num_right = 0
        self.metrics = EngineMetrics()

    def _run_made_up(self, prompts: ListLike[list[int]]) -> None:
        params = SamplingParams(temperature=1.0, seed=0, max_tokens=2, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            self.add_request(f"warm-up {i}", prompt, params)
        while self.has_unfinished:
            for request in self.step().finished:
                if request.error:
                    raise request.error

    # --- construction --------------------------------------------------------------------------------------------

    def _build(self, config: ResolvedConfig) -> None:
        """Allocate the KV cache, and build what works on it."""
        self.config = config
        self.layer_groups, self._executors = groups_of(config, self.model), list[LocalExecutor]()
        self.executor = self._new_executor(self.model, config)
        self.cache, self.backend = self.executor.cache, self.executor.backend
        self._policy = POLICIES[config.scheduling_policy](config.max_overtakes)
        self.core = Core(self.executor, self._new_scheduler, self.backend.planner, self._new_speculation(config))
        self._recovery = Recovery(self.core, config.pipeline_depth)

    def _new_executor(self, model: LanguageModel, config: ResolvedConfig) -> LocalExecutor:
        specs, groups = specs_of(config, model), groups_of(config, model)
        num_pages = (config.num_pages + 1) * len(groups)  # the last ones hold the padding of CUDA graphs
        tensors = [specs[layer] for layer in groups[0].layers]  # each stores a layer of every group
        cache = PagedKVCache(tensors, num_pages, config.page_size, model.dtype, model.device, config.kv_layout)
        backend = create_grouped_backend(
            config.attn_backend, specs, groups, cache, self.parts, model.sinks, model.up_projections
        )
        executor = LocalExecutor(
            batch_invariant(model) if config.batch_invariant else model,
            backend,
            cache,
            config,
            graph_sizes=config.cuda_graph_batch_sizes,
            persistent=_persistent_decode(model, config, specs, cache),
            piece_sizes=piece_sizes(config, model.device),
            num_layer_groups=len(groups),
            parts=self.parts,
        )
        self._executors.append(executor)
        return executor

    def _new_speculation(self, config: ResolvedConfig) -> Speculation | None:
        speculative, model = config.speculative_config, self._draft_model
        if speculative is None:
            return None
        drafter = create_drafter(speculative) if model is None else self._new_model_drafter(config, model)
        most, can_pipeline = speculative.num_speculative_tokens, config.pipeline_depth > 0
        sizes = config.cuda_graph_batch_sizes
        return Speculation(drafter, most, config.max_batch_size, can_pipeline, most_tokens=sizes[-1] if sizes else None)

    def _new_model_drafter(self, config: ResolvedConfig, model: LanguageModel) -> DraftModelDrafter:
        same = "max_batch_size", "num_pages", "page_size", "kv_layout", "kv_cache_dtype", "max_num_batched_tokens"
        options: dict[str, Any] = {name: getattr(config, name) for name in (*same, "pipeline_depth")}
        options["enforce_eager"] = not config.cuda_graph_batch_sizes
        length = min(config.max_model_len, model.config.max_position_embeddings)
        own = resolve(EngineConfig(**options, max_model_len=length, disable_hybrid_kv_cache_manager=True), model)
        table = PageTable(own.num_pages, own.page_size, own.max_batch_size, -(-length // own.page_size))
        most = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
        return DraftModelDrafter(self._new_executor(model, own), table, most, length, own.max_num_batched_tokens)

    def _run_longest(self, config: ResolvedConfig) -> None:
        """Run a step of the most tokens and the most requests, then free everything; see `measured_pages`."""
        self._build(config)
        most = min(config.max_batch_size, config.num_pages)
        longest = min(config.max_model_len, config.num_pages * config.page_size) - 2
        num_tokens = max(1, min(config.max_num_batched_tokens // most, longest))
        vocab_size = self.model.config.vocab_size
        self._run_made_up([[i % vocab_size] * num_tokens for i in range(most)])  # without a common prefix
        del self.cache, self.backend, self.executor, self._executors, self.core, self._recovery
        self.metrics = EngineMetrics()
        gc.collect()

    def _new_scheduler(self) -> Scheduler:
        config, num_groups = self.config, len(self.layer_groups)
        window, *other_windows = [group.window for group in self.layer_groups]
        pages_per_row = -(-config.max_model_len // config.page_size)
        return Scheduler(
            self.parts.page_table(
                config.num_pages * num_groups, config.page_size, config.max_batch_size, pages_per_row, num_groups
            ),
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            window=window,
            other_windows=[own for own in other_windows if own is not None],
            prefix_sharing=config.enable_prefix_caching,
            outputs_apart=self.backend.outputs_apart,
            policy=self._policy,
            parts=self.parts,
        )


def _persistent_decode(
    model: LanguageModel, config: ResolvedConfig, specs: ListLike[AttentionSpec], cache: PagedKVCache
) -> PersistentDecode | None:
    if not config.persistent_decode:
        return None
    if not PersistentDecode.accepts(model, specs, cache):
        raise ConfigError(
            "persistent_decode needs a Llama or Qwen3 in bfloat16 on a Hopper GPU, without biases, windows, "
            "soft-caps, sinks or budgets of keys, and of sizes that its kernel supports (see "
            "PersistentDecode.accepts); leave it out"
        )
    if 1 not in config.cuda_graph_batch_sizes:
        raise ConfigError(
            "persistent_decode takes the place of the CUDA graph of one request, but none is captured: leave it "
            "out, or leave out enforce_eager and let cuda_graph_batch_sizes begin with 1"
        )
    return PersistentDecode(model, cache, specs)


def _check_draft(config: EngineConfig, model: LanguageModel, draft: LanguageModel | None) -> None:
    """Raise ConfigError if the options ask for a draft model that is not there, or that does not fit the model."""
    wanted = config.speculative_config is not None and config.speculative_config.method == "draft_model"
    if wanted != (draft is not None):
        raise ConfigError(
            'speculative_config with the method "draft_model" and a loaded draft model belong together: use LLM, which '
            "loads it, or give both to LLMEngine"
        )
    if draft is not None and draft.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the draft model has {draft.config.vocab_size} tokens and the model {model.config.vocab_size}: they need "
            "the same tokenizer; choose another draft model"
        )
