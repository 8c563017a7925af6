"""`TextRequest`: the text of a request of the engine, which itself knows only tokens."""

from collections import deque
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from functools import cache

from tokenizers import Tokenizer

from mini_engine.detokenizer import Detokenizer, context_of, decode_after
from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.logprobs import Decode, Logprob, output_logprobs, prompt_logprobs
from mini_engine.outputs import CompletionOutput, Piece, Prompt, RequestOutput, StepReport
from mini_engine.request import Request
from mini_engine.sampling_params import SamplingParams


@dataclass(eq=False)
class PromptOutputs:
    """The outputs so far of one prompt.

    Attributes:
        index: index of the prompt.
        prompt: the prompt as given.
        params: its parameters as given.
        inbox: receives its pieces.
        requests: its requests, `n` of them.
        outputs: the outputs of those that have ended, by their number.
        error: why one of them failed.
        logprobs: log probabilities of the prompt, once its first request has ended.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    inbox: deque[Piece]
    requests: list[Request] = field(default_factory=list)
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    error: MiniEngineError | None = None
    logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(eq=False)
class TextRequest:
    """The front end's side of a request.

    Attributes:
        owner: its prompt.
        index: its number among the requests of the prompt.
        request: the engine's side.
        backend: the tokenizer; one without words if the output has no text.
        detokenizer: its text, if it is needed in every step, to be shown or searched for stop strings.
        num_told: number of output tokens that the pieces so far have counted.
        num_shown: characters of the pieces so far.
        first_token: when its first tokens were collected, by `time.perf_counter`.
        is_done: its last piece is in the inbox.
    """

    owner: PromptOutputs
    index: int
    request: Request
    backend: Tokenizer
    detokenizer: Detokenizer | None
    num_told: int = 0
    num_shown: int = 0
    first_token: float | None = None
    is_done: bool = False

    @property
    def num_read(self) -> int:
        """Number of tokens of prompt and output that have been read."""
        return len(self.request.prompt_token_ids) + (self.detokenizer.num_tokens if self.detokenizer else 0)

    def read(self, new_tokens: ListLike[int]) -> str:
        """Detokenize the next tokens, and return the text so far.

        A request whose text is not needed in every step is decoded in one call when it has ended.
        """
        request, detokenizer, params = self.request, self.detokenizer, self.owner.params
        shows_end = params.include_stop_str_in_output  # otherwise the token that ends the output is not shown
        if detokenizer is None:
            tokens = request.output_token_ids
            shown = tokens if shows_end or not tokens or tokens[-1] not in request.end_token_ids else tokens[:-1]
            context = context_of(self.backend, request.prompt_token_ids)
            return decode_after(self.backend, context, shown, params.skip_special_tokens)
        for token_id in new_tokens:
            if not detokenizer.stopped:
                detokenizer.push(token_id, is_shown=shows_end or token_id not in request.end_token_ids)
        # An output that was cut off may end in half a character, which must not be taken for a stop string.
        if request.finish_reason in ("stop", "length") and not detokenizer.stopped:
            detokenizer.finish()
        return detokenizer.text

    def logprobs(self, start: int, end: int) -> list[dict[int, Logprob]] | None:
        """Return the log probabilities of tokens `start` to `end - 1` of the output, if the request asks for them."""
        return output_logprobs(self.request, self._decoder(), start, end)

    def _decoder(self) -> Decode:
        has_text = self.backend.get_vocab_size() > 0
        return cache(lambda token: self.backend.decode([token], skip_special_tokens=False) if has_text else None)

    def deliver(self, text: str, report: StepReport, *, has_ended: bool) -> None:
        """Put new text into the inbox, and the whole output if this was the last request of the prompt.

        Args:
            text: the text so far.
            report: the step.
            has_ended: whether the engine has reported the end of the request. One that ends at a stop string is
                reported by the next step.
        """
        owner, request, detokenizer, output = self.owner, self.request, self.detokenizer, None
        num_tokens = detokenizer.num_tokens if detokenizer else len(request.output_token_ids)
        if has_ended and request.finish_reason:
            tokens, error = request.output_token_ids, request.error
            if detokenizer and detokenizer.stopped and error is None:
                request.finish_reason, tokens = "stop", tokens[:num_tokens]
            if request.finish_reason == "abort":
                error = RequestError(f"the request {request.request_id!r} was aborted; send it again if still needed")
            num_tokens, owner.error = len(tokens), owner.error or error
            logprobs, reason = self.logprobs(0, num_tokens), request.finish_reason
            owner.logprobs = prompt_logprobs(request, self._decoder()) or owner.logprobs
            owner.outputs[self.index] = CompletionOutput(self.index, text, tokens, reason, logprobs)
            if len(owner.outputs) == owner.params.n:
                outputs = [owner.outputs[i] for i in range(owner.params.n)]
                output = RequestOutput(
                    owner.prompt, request.prompt_token_ids, outputs, owner.error, owner.logprobs,
                    owner.requests[0].num_cached_tokens,
                )  # fmt: skip
        piece = Piece(
            owner.index, text[self.num_shown :], num_tokens - self.num_told, output, report, self.index,
            logprobs=self.logprobs(self.num_told, num_tokens) if detokenizer else None,
            finish_reason=request.finish_reason if has_ended else None, first_token=self.first_token,
        )  # fmt: skip
        try:
            owner.inbox.append(piece)
        finally:  # even if Ctrl-C was pressed during the call: what has been delivered counts as delivered
            self.num_shown, self.num_told, self.is_done = len(text), num_tokens, has_ended
