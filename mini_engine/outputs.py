"""The engine's outputs: the report of a step, the output of a request, and pieces of text as they are generated."""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from mini_engine.errors import MiniEngineError
from mini_engine.logprobs import Logprob
from mini_engine.request import FinishReason, Request
from mini_engine.scheduler import Schedule
from mini_engine.step_input import StepInput

# A text, token ids, or as in vLLM {"prompt": a text} or {"prompt_token_ids": token ids}.
Prompt = str | ListLike[int] | Mapping[str, Any]


@dataclass
class EngineMetrics:
    """Totals since the engine was built.

    Attributes:
        steps: steps that computed something.
        seconds: time spent in `step`.
        computed_tokens: tokens that went through the model, including recomputation after a preemption, and those of
            the chunks that were registered.
        output_tokens: tokens sampled.
        prompt_tokens: tokens of the admitted requests, including the output so far of a preempted request.
        shared_tokens: number of these tokens that were not computed, because the cache already had their keys.
        evicted_pages: pages of ended or preempted requests that were evicted from the prefix tree.
        preemptions: number of times that a request was preempted.
        finished: requests that ended.
        failed_steps: steps that raised an error; their requests were computed again, one at a time.
        num_drafts: times that guesses of a request were checked (speculative decoding).
        num_draft_tokens: these guesses.
        num_accepted_tokens: those of them that were right.
    """

    steps: int = 0
    seconds: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    evicted_pages: int = 0
    preemptions: int = 0
    finished: int = 0
    failed_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of the checked guesses that were right."""
        return self.num_accepted_tokens / max(self.num_draft_tokens, 1)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return self.shared_tokens / max(self.prompt_tokens, 1)

    def add(self, report: "StepReport", num_prompt_tokens: int) -> None:
        """Add a step to the totals.

        Args:
            report: the step.
            num_prompt_tokens: tokens of the requests that it admitted.
        """
        self.prompt_tokens += num_prompt_tokens
        self.shared_tokens += report.schedule.num_shared
        self.steps += report.step is not None
        self.seconds += report.seconds
        self.computed_tokens += report.num_tokens
        self.output_tokens += len(report.token_ids)
        self.preemptions += len(report.schedule.preempted)
        self.finished += len(report.finished)


@dataclass(eq=False)
class StepReport:
    """The report of one call of `LLMEngine.step`.

    With a pipeline depth of 1, the tokens are those of the step launched by the previous call.

    Attributes:
        schedule: the step that was launched.
        requests: [B] its requests, in the order of `schedule.rows`.
        step: the step's arrays; None if nothing was launched.
        sampled_by: [R] requests whose tokens were collected.
        token_ids: [R] those tokens.
        finished: requests that ended since the previous report, whatever the reason.
        start: when the call began, by `time.perf_counter`.
        seconds: its duration.
        bytes_per_token: bytes of one token's keys and values, over all layers of a group (`layer_groups.py`).
    """

    schedule: Schedule
    requests: list[Request]
    step: StepInput | None
    sampled_by: list[Request]
    token_ids: Int[np.ndarray, " R"]
    finished: list[Request]
    start: float
    seconds: float
    bytes_per_token: int

    @property
    def num_tokens(self) -> int:
        """Number of launched tokens, including those of prompts."""
        return self.schedule.num_tokens

    @property
    def is_decode(self) -> bool:
        """Whether every new token of the step has logits that are sampled: one of each request, and its guesses."""
        return self.step is None or int(self.step.num_logits.sum()) == self.num_tokens

    @property
    def has_guesses(self) -> bool:
        """Whether a request had several tokens of which the last ones were guesses."""
        return self.step is not None and int(self.step.num_logits.max()) > 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of the step's requests; layers with a window or a budget read fewer of them."""
        if self.step is None:
            return 0
        num_keys = int(self.step.kv_lens.sum()) + sum(int(own.kv_lens.sum()) for own in self.step.other_groups)
        return num_keys * self.bytes_per_token


@dataclass(frozen=True)
class CompletionOutput:
    """One of the `n` outputs of a request.

    Attributes:
        index: its number among them.
        text: the output, without end-of-sequence tokens and without the stop string, unless the parameters ask for it.
        token_ids: the tokens of the output, including an end-of-sequence token.
        finish_reason: "stop", "length", "abort" or "error".
        logprobs: for each token, its log probability and those of the likeliest tokens, if the parameters ask for them.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, Logprob]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log probability of the output: the sum over its tokens, if the parameters ask for log probabilities."""
        if self.logprobs is None:
            return None
        return sum(of[token_id].logprob for of, token_id in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    """The result of one request, as in vLLM.

    Attributes:
        prompt: the prompt as given.
        prompt_token_ids: its tokens; empty if it could not be tokenized.
        outputs: the outputs, one unless the parameters set `n`.
        error: why the request could not be served; otherwise None.
        prompt_logprobs: the same for each token of the prompt. The first token has None; after chunks, their tokens and
            the first token behind them have None.
        num_cached_tokens: tokens of the prompt that were not computed for its first output, because the cache had their
            keys; None if it was refused. Outputs that differ only in this are equal.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: MiniEngineError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        """Whether the request has ended; always true."""
        return True

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first output."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True)
class Piece:
    """The new text of one of several prompts after one step.

    Attributes:
        index: index of its prompt.
        text: new text, possibly empty.
        num_tokens: new tokens.
        output: the whole output, once the request has ended.
        step: the step that collected the tokens; None for a request that was refused, or if it ran in another process.
        completion: number of the output that the text belongs to, among the `n` of the prompt.
        logprobs: log probabilities of the new tokens, if the parameters ask for them and each step is delivered.
        finish_reason: why the output has ended; None while it goes on.
        first_token: when the first tokens of the output were collected, by `time.perf_counter`.
    """

    index: int
    text: str
    num_tokens: int
    output: RequestOutput | None
    step: StepReport | None = field(repr=False)
    completion: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    first_token: float | None = None
