"""One request as the engine sees it: its tokens so far, its text, and whether it has ended."""

import operator
from collections.abc import Collection
from collections.abc import Sequence as ListLike
from typing import Literal

from transformers import PreTrainedTokenizerBase

from mini_engine.detokenizer import Detokenizer
from mini_engine.errors import RequestError
from mini_engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]


class Sequence:
    """The tokens of one request, prompt and output.

    Attributes:
        token_ids: prompt and output so far.
        num_prompt_tokens: how many of them are the prompt.
        num_computed: how many of them have their keys and values in the cache.
        params: what the request asked for.
        seed: the request's own seed, drawn if `params` has none.
        finish_reason: None while it runs; "stop" at an end-of-sequence token or stop string, "length" at a limit.
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: Collection[int],
        max_model_len: int,
        detokenizer: Detokenizer,
    ) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed = 0
        self.params = params
        self.seed = seed
        self.finish_reason: FinishReason | None = None
        self.max_len = min(len(prompt_token_ids) + params.max_tokens, max_model_len)
        self._end_tokens = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._detokenizer = detokenizer

    def append(self, token_id: int) -> str:
        """Add a sampled token and return the text that it lets through, all that is left if it is the last."""
        self.token_ids.append(token_id)
        if token_id in self._end_tokens:
            self.finish_reason = "stop"
            return self._detokenizer.finish()
        shown = self._detokenizer.push(token_id)
        if self._detokenizer.stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.max_len:
            self.finish_reason = "length"
            shown += self._detokenizer.finish()
            if self._detokenizer.stopped:  # the stop string was complete, in what had been held back
                self.finish_reason = "stop"
        return shown

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def text(self) -> str:
        """The output that can be shown so far."""
        return self._detokenizer.text


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str | ListLike[int], add_special_tokens: bool = True
) -> list[int]:
    """The tokens of a prompt, which is text or has them already; numbers of numpy and torch are numbers, too.

    Raises:
        RequestError: if it is neither, or text with half a character in it.
    """
    try:
        if isinstance(prompt, str):
            prompt.encode()
            return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False)
        return [operator.index(token) for token in prompt]
    except (TypeError, UnicodeError) as error:
        raise RequestError(f"the prompt is neither valid text nor a list of token ids: {error}") from error


def check_prompt(token_ids: ListLike[int], vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError for a prompt that the model cannot take."""
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token")
    if not all(isinstance(t, int) and 0 <= t < vocab_size for t in token_ids):
        raise RequestError(f"the prompt has token ids outside 0 to {vocab_size - 1}; use this model's tokenizer")
    if len(token_ids) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens and the model takes {max_model_len}, output included; "
            "shorten it, or raise max_model_len if the model allows more"
        )
