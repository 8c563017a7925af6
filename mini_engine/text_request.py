"""`TextRequest`: the text of a request of the engine, which itself knows only tokens."""

from collections import deque
from dataclasses import dataclass, field
from functools import cache

from tokenizers import Tokenizer

from mini_engine.detokenizer import Detokenizer, context_of, decode_after
from mini_engine.errors import MiniEngineError, RequestError
from mini_engine.logprobs import Decode, Logprob, prompt_logprobs, readable
from mini_engine.outputs import CompletionOutput, Piece, Prompt, RequestOutput, StepReport
from mini_engine.request import FinishReason, Request, TokenLogprobs
from mini_engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Ended:
    """How a request of the engine has ended: plain data, which can be sent to another process.

    Attributes:
        reason: why.
        error: what is told to its sender, if it was not served.
        num_cached_tokens: see `Request`.
        prompt_logprobs: of each token of the prompt, if the request asks for them.
    """

    reason: FinishReason
    error: MiniEngineError | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @classmethod
    def of(cls, request: Request) -> "Ended":
        """Describe the end of a request."""
        assert request.finish_reason is not None
        error = request.error
        if request.finish_reason == "abort":
            error = RequestError(f"the request {request.request_id!r} was aborted; send it again if still needed")
        return cls(request.finish_reason, error, request.num_cached_tokens, prompt_logprobs(request))


@dataclass(eq=False)
class PromptOutputs:
    """The outputs so far of one prompt.

    Attributes:
        index: index of the prompt.
        prompt: the prompt as given.
        params: its parameters as given.
        inbox: receives its pieces.
        requests: its requests, if the engine is in this process.
        outputs: the outputs of its requests that have ended, by their number.
        error: why one of them failed.
        logprobs: log probabilities of the prompt, once its first request has ended.
        num_cached_tokens: of its first request, once that has ended.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    inbox: deque[Piece]
    requests: list[Request] = field(default_factory=list)
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    error: MiniEngineError | None = None
    logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


@dataclass(eq=False)
class TextRequest:
    """The text of one request. It gets the request's tokens from the engine, in this process or another one.

    Attributes:
        owner: its prompt.
        index: its number among the requests of the prompt.
        prompt_token_ids: the prompt, with the tokens of chunks before it.
        end_token_ids: tokens at which the engine ends the output.
        backend: the tokenizer; one without words if the output has no text.
        detokenizer: its text, if it is needed in every step, to be shown or searched for stop strings.
        token_ids: tokens of the output that have arrived.
        logprobs: log probabilities of these tokens, if the parameters ask for them.
        ended: how the request has ended in the engine, if it has.
        failure: why the text cannot be decoded.
        num_told: number of output tokens that the pieces so far have counted.
        num_shown: characters of the pieces so far.
        first_token: when its first tokens were collected, by `time.perf_counter`.
        is_done: its last piece is in the inbox.
    """

    owner: PromptOutputs
    index: int
    prompt_token_ids: list[int]
    end_token_ids: tuple[int, ...]
    backend: Tokenizer
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: Ended | None = None
    failure: RequestError | None = None
    num_told: int = 0
    num_shown: int = 0
    first_token: float | None = None
    is_done: bool = False

    @property
    def must_end(self) -> FinishReason | None:
        """Why the engine has to end the request, which would go on there; None if it need not."""
        if self.failure is not None:
            return "error"
        return "stop" if self.detokenizer is not None and self.detokenizer.stopped else None

    def deliver(self, step: StepReport | None = None) -> None:
        """Detokenize what has arrived, and put the new text into the inbox.

        If the request has ended and was the last one of its prompt, the piece has the whole output.

        Args:
            step: the step that collected the tokens, if it is known.
        """
        text, ended, detokenizer = self._read(), self.ended, self.detokenizer
        num_tokens = len(self.token_ids) if detokenizer is None else detokenizer.num_tokens
        reason, output = None, None
        if ended is not None:
            is_stopped = self.must_end == "stop" and ended.reason != "error"
            reason = "stop" if is_stopped else "error" if self.failure else ended.reason
            num_tokens = num_tokens if is_stopped else len(self.token_ids)
            output = self._end(text, num_tokens, reason, None if is_stopped else self.failure or ended.error)
        piece = Piece(
            self.owner.index, text[self.num_shown :], num_tokens - self.num_told, output, step, self.index,
            logprobs=None if detokenizer is None else self._readable(self.num_told, num_tokens),
            finish_reason=reason, first_token=self.first_token,
        )  # fmt: skip
        try:
            self.owner.inbox.append(piece)
        finally:  # even if Ctrl-C was pressed during the call: what has been delivered counts as delivered
            self.num_shown, self.num_told, self.is_done = len(text), num_tokens, ended is not None

    def _read(self) -> str:
        """Detokenize what has arrived, and return the text so far.

        A request whose text is not needed in every step is decoded in one call when it has ended.
        """
        try:
            return self._decoded()
        except Exception as error:  # from the tokenizer; the other requests go on
            self.failure = RequestError(f"the output cannot be decoded: {type(error).__name__}: {error}")
            self.failure.__cause__ = error
            return self.detokenizer.text if self.detokenizer else ""

    def _decoded(self) -> str:
        tokens, detokenizer, params = self.token_ids, self.detokenizer, self.owner.params
        shows_end = params.include_stop_str_in_output  # otherwise the token that ends the output is not shown
        if detokenizer is None:
            shown = tokens if shows_end or not tokens or tokens[-1] not in self.end_token_ids else tokens[:-1]
            context = context_of(self.backend, self.prompt_token_ids)
            return decode_after(self.backend, context, shown, params.skip_special_tokens)
        for token_id in tokens[detokenizer.num_tokens :]:
            if not detokenizer.stopped:
                detokenizer.push(token_id, is_shown=shows_end or token_id not in self.end_token_ids)
        # An output that was cut off may end in half a character, which must not be taken for a stop string.
        if self.ended is not None and self.ended.reason in ("stop", "length") and not detokenizer.stopped:
            detokenizer.finish()
        return detokenizer.text

    def _end(
        self, text: str, num_tokens: int, reason: FinishReason, error: MiniEngineError | None
    ) -> RequestOutput | None:
        """Add this output to those of the prompt, and return them all if it is the last one."""
        owner, ended = self.owner, self.ended
        assert ended is not None
        owner.error = owner.error or error
        tokens, logprobs = self.token_ids[:num_tokens], self._readable(0, num_tokens)
        owner.outputs[self.index] = CompletionOutput(self.index, text, tokens, reason, logprobs)
        if ended.prompt_logprobs is not None:
            decode = self._decoder()
            owner.logprobs = [None if of is None else readable(of, decode) for of in ended.prompt_logprobs]
        if self.index == 0:
            owner.num_cached_tokens = ended.num_cached_tokens
        if len(owner.outputs) < owner.params.n:
            return None
        outputs = [owner.outputs[i] for i in range(owner.params.n)]
        return RequestOutput(
            owner.prompt, self.prompt_token_ids, outputs, owner.error, owner.logprobs, owner.num_cached_tokens
        )

    def _readable(self, start: int, end: int) -> list[dict[int, Logprob]] | None:
        """Return the log probabilities of tokens `start` to `end - 1` of the output, if the request asks for them."""
        if self.owner.params.logprobs is None:
            return None
        decode = self._decoder()
        return [readable(of_token, decode) for of_token in self.logprobs[start:end]]

    def _decoder(self) -> Decode:
        has_text = self.backend.get_vocab_size() > 0
        return cache(lambda token: self.backend.decode([token], skip_special_tokens=False) if has_text else None)
