"""What comes out of the engine: of one step, of one request, and piece by piece."""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from mini_engine.errors import MiniEngineError
from mini_engine.scheduler import Schedule
from mini_engine.sequence import FinishReason, Sequence

Prompt = str | ListLike[int]


@dataclass(frozen=True)
class RequestOutput:
    """What became of one request.

    Attributes:
        prompt: as it was given.
        prompt_token_ids: its tokens; empty if it could not be tokenized.
        token_ids: the tokens of the output, an end-of-sequence token included.
        text: the output, without end-of-sequence tokens and without the stop string.
        finish_reason: "stop", "length", or "error".
        error: why the request could not be served, if so.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: MiniEngineError | None = None

    @classmethod
    def of(cls, prompt: Prompt, sequence: Sequence) -> "RequestOutput":
        """The output of a sequence that has ended."""
        assert sequence.finish_reason is not None, "the sequence has not ended"
        prompt_token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
        return cls(prompt, prompt_token_ids, sequence.output_token_ids, sequence.text, sequence.finish_reason)

    @classmethod
    def failed(cls, prompt: Prompt, error: MiniEngineError) -> "RequestOutput":
        """The output of a request that was refused or aborted."""
        return cls(prompt, [], [], "", "error", error)


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
        kv_bytes: bytes of keys and values that attention read.
    """

    schedule: Schedule
    outputs: list[EngineOutput]
    start: float
    seconds: float
    kv_bytes: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed, those of prompts included."""
        return sum(self.schedule.num_new)

    @property
    def is_decode(self) -> bool:
        """Every sequence had one new token."""
        return self.num_tokens == len(self.schedule.sequences)


@dataclass(frozen=True)
class Piece:
    """What one step gave one of several prompts.

    Attributes:
        index: which prompt it belongs to.
        text: new text, possibly empty.
        output: the whole output, once the request has ended.
        step: the step it came from; None for a request that was refused before the first.
    """

    index: int
    text: str
    output: RequestOutput | None
    step: StepReport | None = field(repr=False)
