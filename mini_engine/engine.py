"""`LLMEngine`: requests come and go while it steps."""

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mini_engine.attention.backend import attend_with, create_backend
from mini_engine.batch import SamplingBatch, StepBatch
from mini_engine.detokenizer import Detokenizer
from mini_engine.errors import RequestError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Schedule, Scheduler
from mini_engine.sequence import FinishReason, Sequence, check_prompt


@dataclass(frozen=True)
class EngineOutput:
    """What one step gave one request.

    Attributes:
        request_id: whose it is.
        text: new text, possibly empty.
        token_id: the new token.
        finish_reason: why the request has ended, if it has.
    """

    request_id: str
    text: str
    token_id: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class StepReport:
    """What a step did, for traces and metrics.

    Attributes:
        schedule: its sequences, and who came in or was sent back.
        outputs: one for each sequence that sampled.
        start: when it began, by `time.perf_counter`.
        seconds: how long it took, scheduling included.
    """

    schedule: Schedule
    outputs: list[EngineOutput]
    start: float
    seconds: float


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
        parts: the engine's replaceable functions.
        on_step: called with the engine and the report of each step that computed something, while the requests that
            ended in it still hold their pages. `Trace.record` is one such.

    Attributes:
        request_ids: the name of each unfinished request.

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
        parts: Parts | None = None,
        on_step: Callable[["LLMEngine", StepReport], None] | None = None,
    ) -> None:
        weight = next(model.parameters())
        self.model, self.tokenizer, self.parts = model, tokenizer, parts or Parts()
        self.max_model_len = max_model_len or model.config.max_position_embeddings
        self.page_table = PageTable(num_pages, page_size, max_batch_size)
        self.scheduler = Scheduler(
            self.page_table, max_batch_size=max_batch_size, max_num_batched_tokens=max_num_batched_tokens
        )
        self.cache = PagedKVCache(model.attention_specs, num_pages, page_size, weight.dtype, weight.device)
        self.backend = create_backend(attn_backend, model.attention_specs, self.cache, self.parts)
        self._attend = attend_with(self.backend)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._device = weight.device
        self._on_step = on_step
        self._sequences: dict[str, Sequence] = {}
        self.request_ids: dict[Sequence, str] = {}
        self._seen: dict[Sequence, torch.Tensor] = {}

    def add_request(self, request_id: str, prompt: str | ListLike[int], params: SamplingParams | None = None) -> None:
        """Queue a request; it joins the batch as soon as there is room.

        Args:
            request_id: a name that no unfinished request has.
            prompt: text or token ids.
            params: default `SamplingParams()`.

        Raises:
            RequestError: if it cannot be served. Other requests are not touched.
        """
        if request_id in self._sequences:
            raise RequestError(f"a request named {request_id!r} is still running; give each its own name")
        params = params or SamplingParams()
        token_ids = self.tokenizer.encode(prompt, verbose=False) if isinstance(prompt, str) else list(prompt)
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
            return StepReport(schedule, [], start, time.perf_counter() - start)
        batch = self._batch(schedule)
        self.backend.plan(batch)
        hidden = self.model(batch.token_ids, batch.positions, self._attend)
        for sequence, num_new in zip(schedule.sequences, schedule.num_new, strict=True):
            sequence.num_computed += num_new
        # A sequence in the middle of its prompt has computed fewer tokens than it has, and samples none.
        sampling = [s for s in schedule.sequences if s.num_computed == len(s.token_ids)]
        outputs = self._sample(sampling, hidden[batch.logit_rows]) if sampling else []
        report = StepReport(schedule, outputs, start, time.perf_counter() - start)
        if self._on_step:
            self._on_step(self, report)
        for sequence in sampling:
            if sequence.finish_reason:
                self._forget(sequence)
        return report

    def _batch(self, schedule: Schedule) -> StepBatch:
        sequences = schedule.sequences
        num_new = np.array(schedule.num_new)
        computed = np.array([s.num_computed for s in sequences])
        kv_lens = computed + num_new
        rows = np.array([self.scheduler.rows[s] for s in sequences])
        return StepBatch.build(
            token_ids=[
                token
                for s, n in zip(sequences, schedule.num_new, strict=True)
                for token in s.token_ids[s.num_computed : s.num_computed + n]
            ],
            num_new=num_new,
            kv_lens=kv_lens,
            pages=self.page_table.pages_of(rows, -(-kv_lens // self.page_table.page_size)),
            page_size=self.page_table.page_size,
            samples=kv_lens == np.array([len(s.token_ids) for s in sequences]),
            device=self._device,
        )

    def _sample(self, sequences: list[Sequence], hidden: torch.Tensor) -> list[EngineOutput]:
        logits = self.model.compute_logits(hidden)
        batch = SamplingBatch.build(
            [s.params for s in sequences],
            [s.seed for s in sequences],
            [len(s.token_ids) for s in sequences],
            self._seen_by(sequences),
            self._device,
        )
        outputs = []
        for sequence, token in zip(sequences, self.parts.sample(logits, batch).tolist(), strict=True):
            text = sequence.append(token)
            if sequence in self._seen:
                self._seen[sequence][token] = True
            outputs.append(EngineOutput(self.request_ids[sequence], text, token, sequence.finish_reason))
        return outputs

    def _seen_by(self, sequences: list[Sequence]) -> torch.Tensor | None:
        """The tokens that each row's penalty applies to; None if no row has one."""
        if not any(s in self._seen for s in sequences):
            return None
        nothing = torch.zeros(self.model.config.vocab_size, dtype=torch.bool, device=self._device)
        return torch.stack([self._seen.get(s, nothing) for s in sequences])

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._seen.pop(sequence, None)
        del self._sequences[self.request_ids.pop(sequence)]
