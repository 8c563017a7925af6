"""`LLMEngine`: requests come and go while it steps."""

import random
import time
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as ListLike
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mini_engine.attention.backend import AttentionBackend, attend_with, create_backend
from mini_engine.batch import Attend, AttentionSpec, StepBatch
from mini_engine.detokenizer import Detokenizer
from mini_engine.errors import ConfigError, RequestError, check_positive
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.outputs import EngineOutput, Piece, Prompt, RequestOutput, StepReport
from mini_engine.parts import Parts
from mini_engine.sampling import SamplingBatch, sampling_columns
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Schedule, Scheduler
from mini_engine.sequence import Sequence, check_prompt, prompt_tokens


@dataclass
class EngineMetrics:
    """What an engine has done since it was made.

    Attributes:
        steps: steps that computed something.
        seconds: their time.
        computed_tokens: tokens that went through the model, those computed again after a preemption included.
        output_tokens: tokens sampled.
        shared_tokens: tokens that were not computed because another sequence's pages held them.
        preemptions: how often a sequence lost its pages.
        finished: requests that came to their end.
    """

    steps: int = 0
    seconds: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    finished: int = 0


class LLMEngine:
    """A model that serves requests by continuous batching over a paged KV cache.

    Args:
        model: the model.
        tokenizer: turns its tokens into text.
        eos_token_ids: tokens that end an output.
        attn_backend: name of the attention backend.
        num_pages: pages of the KV cache.
        page_size: tokens of a page.
        max_batch_size: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks.
        max_model_len: longest prompt and output together; default the model's own limit.
        sliding_window: lets no layer see further back than this many keys, so that a sequence of any length holds few
            pages; default the model's own windows.
        prefix_sharing: let requests that begin with the same tokens share pages.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step that computed something, while the requests that
            ended in it still hold their pages. `Trace.record` is one such.

    Attributes:
        request_ids: the name of each unfinished request.
        metrics: what the engine has done so far.

    Raises:
        ConfigError: for options that cannot be.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: ListLike[int] | frozenset[int],
        *,
        attn_backend: str = "torch",
        num_pages: int,
        page_size: int = 16,
        max_batch_size: int = 32,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        sliding_window: int | None = None,
        prefix_sharing: bool = False,
        parts: Parts | None = None,
        on_step: Callable[["LLMEngine", StepReport], None] | None = None,
    ) -> None:
        check_positive(
            num_pages=num_pages, page_size=page_size, max_batch_size=max_batch_size, sliding_window=sliding_window
        )
        weight = next(model.parameters())
        specs = _within(sliding_window, model.attention_specs)
        windows = [spec.window for spec in specs]
        self.model, self.tokenizer, self.parts = model, tokenizer, parts or Parts()
        longest = model.config.max_position_embeddings
        check_positive(max_model_len=max_model_len)
        self.max_model_len = longest if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= longest:
            raise ConfigError(f"max_model_len is {self.max_model_len}; this model takes 2 to {longest} tokens")
        self.page_table = self.parts.page_table(num_pages, page_size, max_batch_size)
        self.scheduler = Scheduler(
            self.page_table,
            max_batch_size=max_batch_size,
            max_num_batched_tokens=max_num_batched_tokens,
            # All layers share one page table: a page goes when the widest window has passed it.
            window=None if None in windows else max(w for w in windows if w is not None),
            prefix_sharing=prefix_sharing,
            parts=self.parts,
        )
        self.cache = PagedKVCache(specs, num_pages, page_size, weight.dtype, weight.device)
        self.backend = create_backend(attn_backend, specs, self.cache, self.parts)
        self._attend = attend_with(self.backend) if sliding_window is None else _attend_as(specs, self.backend)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = weight.device
        self._on_step = on_step
        self._sequences: dict[str, Sequence] = {}
        self._seen: dict[Sequence, torch.Tensor] = {}
        # What `stream_batch` has not handed over yet, by request.
        self._inboxes: dict[Sequence, deque[tuple[EngineOutput, StepReport]]] = {}
        self._numbers = count()
        self.request_ids: dict[Sequence, str] = {}
        self.metrics = EngineMetrics()

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> Sequence:
        """Queue a request; it joins the batch as soon as there is room.

        Args:
            request_id: a name that no unfinished request has.
            prompt: text or token ids.
            params: default `SamplingParams()`.

        Returns:
            The request as the engine sees it; read it, and leave it as it is.

        Raises:
            RequestError: if it cannot be served. Other requests are not touched.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"the request's name is {request_id!r}; give a string")
        if request_id in self._sequences:
            raise RequestError(f"a request named {request_id!r} is still running; give each its own name")
        params = params or SamplingParams()
        token_ids = prompt_tokens(self.tokenizer, prompt)
        check_prompt(token_ids, self.model.config.vocab_size, self.max_model_len)
        sequence = Sequence(
            token_ids,
            params,
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.max_model_len,
            detokenizer=Detokenizer(self.tokenizer, tuple(params.stop)),
        )
        self.scheduler.add(sequence)
        self._sequences[request_id] = sequence
        self.request_ids[sequence] = request_id
        if params.repetition_penalty != 1:
            seen = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, device=self._device)
            seen[torch.tensor(token_ids, device=self._device)] = True
            self._seen[sequence] = seen
        return sequence

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages. Unknown or finished ids are ignored: it may just have ended."""
        if request_id in self._sequences:
            self._forget(self._sequences[request_id])

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._sequences)

    @torch.inference_mode()
    def step(self) -> StepReport:
        """Compute one step. Without requests it does nothing."""
        start = time.perf_counter()
        schedule = self.scheduler.schedule()
        if not schedule.sequences:
            return StepReport(schedule, [], start, time.perf_counter() - start, kv_bytes=0)
        shared_tokens = sum(s.num_computed for s in schedule.admitted)
        try:
            if schedule.copies:
                self.cache.copy_pages(schedule.copies)
            batch = self._batch(schedule)
            self.backend.plan(batch)
            hidden = self.model(batch.token_ids, batch.positions, self._attend)
            for sequence, num_new in zip(schedule.sequences, schedule.num_new, strict=True):
                sequence.num_computed += num_new
            # A sequence in the middle of its prompt has computed fewer tokens than it has, and samples none.
            sampling = [s for s in schedule.sequences if s.num_computed == len(s.token_ids)]
            outputs = self._sample(sampling, hidden[batch.logit_rows]) if sampling else []
            kv_bytes = int(batch.kv_lens.sum()) * self.cache.bytes_per_token
            report = StepReport(schedule, outputs, start, time.perf_counter() - start, kv_bytes)
            self._count(report, shared_tokens)
        except BaseException:
            # Interrupted, or out of memory. Some began with pages that this step should have filled: all begin anew,
            # with the tokens that they have.
            for sequence in schedule.sequences:
                if sequence.finish_reason:
                    self._forget(sequence)
            self.scheduler.preempt_all()
            raise
        try:
            if self._on_step:
                self._on_step(self, report)
        finally:  # what was sampled counts, whatever becomes of the report
            for sequence, output in zip(sampling, outputs, strict=True):
                if sequence in self._inboxes:
                    self._inboxes[sequence].append((output, report))
                if output.finish_reason:
                    self._forget(sequence)
        return report

    def stream_batch(
        self, prompts: ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> Generator[Piece, None, None]:
        """Generate one output for each prompt and yield every piece of text as it comes, with the step it came from.

        Requests that others have added are served along with these. Closing the generator ends its own.

        Raises:
            RequestError: if the numbers of prompts and params differ.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, ListLike) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one for all, or as many")
        open_requests: dict[Sequence, tuple[int, str]] = {}
        try:
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                name = next(n for i in self._numbers if (n := f"stream {i}") not in self._sequences)
                try:
                    sequence = self.add_request(name, prompt, own)
                except RequestError as refused:
                    yield Piece(index, "", RequestOutput.failed(prompt, refused), None)
                else:
                    open_requests[sequence] = index, name
                    self._inboxes[sequence] = deque()
            while open_requests:
                if not any(self._inboxes[sequence] for sequence in open_requests):
                    self.step()
                for sequence, (index, name) in list(open_requests.items()):
                    ended = sequence not in self.request_ids
                    inbox = self._inboxes[sequence]
                    if ended:  # its last pieces are in the inbox, unless somebody aborted it
                        del open_requests[sequence], self._inboxes[sequence]
                    while inbox:
                        output, step = inbox.popleft()
                        whole = RequestOutput.of(prompts[index], sequence) if output.finish_reason else None
                        yield Piece(index, output.text, whole, step)
                    if ended and sequence.finish_reason is None:
                        error = RequestError(f"the request {name!r} was aborted; send it again if it is still wanted")
                        yield Piece(index, "", RequestOutput.failed(prompts[index], error), None)
        finally:
            for sequence in open_requests:
                self._forget(sequence)
                self._inboxes.pop(sequence, None)

    def generate(
        self, prompts: Prompt | ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate one output for each prompt.

        Args:
            prompts: a text or a list of token ids, or several of them.
            params: for all prompts, or one for each; default `SamplingParams()`.

        Returns:
            One output for each prompt, in order. Where several prompts are given, one that cannot be served has
            `finish_reason="error"` and the others are served all the same.

        Raises:
            RequestError: if the only prompt cannot be served, or the numbers of prompts and params differ.
        """
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        several: list[Prompt] = [prompts] if alone else list(prompts)  # type: ignore[list-item,arg-type]
        outputs = {piece.index: piece.output for piece in self.stream_batch(several, params) if piece.output}
        if alone and (error := outputs[0].error):
            raise error
        return [outputs[i] for i in range(len(several))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[str, None, None]:
        """Generate one output and yield its text as it comes, never half a character.

        Raises:
            RequestError: if the prompt cannot be served.
        """
        with closing(self.stream_batch([prompt], params)) as pieces:
            for piece in pieces:
                if piece.output and piece.output.error:
                    raise piece.output.error
                if piece.text:
                    yield piece.text

    def _batch(self, schedule: Schedule) -> StepBatch:
        sequences, page_size = schedule.sequences, self.page_table.page_size
        num_new = np.array(schedule.num_new)
        computed = np.array([s.num_computed for s in sequences])
        evicted = np.array([self.scheduler.evicted[s] for s in sequences])
        kv_lens = computed + num_new - evicted
        page_counts = -(-kv_lens // page_size)
        page_positions = None
        if evicted.any():
            first_page = np.repeat(np.cumsum(page_counts) - page_counts, page_counts)
            page_positions = np.repeat(evicted, page_counts) + (np.arange(len(first_page)) - first_page) * page_size
        rows = np.array([self.scheduler.rows[s] for s in sequences])
        return StepBatch.build(
            token_ids=[
                token
                for s, n in zip(sequences, schedule.num_new, strict=True)
                for token in s.token_ids[s.num_computed : s.num_computed + n]
            ],
            num_new=num_new,
            kv_lens=kv_lens,
            pages=self.page_table.pages_of(rows, page_counts),
            page_size=page_size,
            page_positions=page_positions,
            samples=computed + num_new == np.array([len(s.token_ids) for s in sequences]),
            device=self._device,
        )

    def _sample(self, sequences: list[Sequence], hidden: torch.Tensor) -> list[EngineOutput]:
        logits = self.model.compute_logits(hidden)
        columns = sampling_columns([s.params for s in sequences])
        penalized = np.flatnonzero(columns["repetition_penalty"] != 1)
        batch = SamplingBatch.build(
            columns,
            [s.seed for s in sequences],
            [len(s.token_ids) for s in sequences],
            torch.stack([self._seen[sequences[i]] for i in penalized]) if len(penalized) else None,
            self._device,
        )
        outputs = []
        for sequence, token in zip(sequences, self.parts.sample(logits, batch).tolist(), strict=True):
            text = sequence.append(token)
            if sequence in self._seen:
                self._seen[sequence][token] = True
            outputs.append(EngineOutput(self.request_ids[sequence], text, token, sequence.finish_reason))
        return outputs

    def _count(self, report: StepReport, shared_tokens: int) -> None:
        metrics = self.metrics
        metrics.steps += 1
        metrics.seconds += report.seconds
        metrics.computed_tokens += report.num_tokens
        metrics.output_tokens += len(report.outputs)
        metrics.shared_tokens += shared_tokens
        metrics.preemptions += len(report.schedule.preempted)
        metrics.finished += sum(output.finish_reason is not None for output in report.outputs)

    def _forget(self, sequence: Sequence) -> None:
        """End a request, unless that has been done already."""
        if sequence not in self.request_ids:
            return
        self.scheduler.finish(sequence)
        self._seen.pop(sequence, None)
        del self._sequences[self.request_ids.pop(sequence)]


def _within(window: int | None, specs: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
    """The same layers, none with a window wider than this."""
    if window is None:
        return specs
    return tuple(replace(spec, window=min(window, spec.window or window)) for spec in specs)


def _attend_as(specs: tuple[AttentionSpec, ...], backend: AttentionBackend) -> Attend:
    """What a model calls whose layers shall attend as `specs` say, not as they themselves do."""
    attend = attend_with(backend)

    def attend_narrowly(
        spec: AttentionSpec, q: Float[Tensor, "T Hq D"], k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]
    ) -> Float[Tensor, "T Hq D"]:
        return attend(specs[spec.layer], q, k, v)

    return attend_narrowly
