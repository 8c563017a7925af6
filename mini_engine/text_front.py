"""`TextFront`: what can be done with a text before an engine sees it, in any process."""

from collections.abc import Collection
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerBase

from mini_engine.chat_template import Message, render_chat
from mini_engine.detokenizer import Detokenizer, ScanStop, scan_stop, special_ids
from mini_engine.errors import ConfigError
from mini_engine.outputs import Prompt
from mini_engine.prompts import encode, needed
from mini_engine.request import end_tokens
from mini_engine.sampling_params import SamplingParams, tokenize_bad_words
from mini_engine.text_request import PromptOutputs, TextRequest

NO_WORDS = Tokenizer(WordLevel({}, unk_token=""))  # decodes every token to the empty text


class TextFront:
    """The tokenizer of a model, and what has to be known of an engine that serves it.

    Args:
        tokenizer: the model's; without one, prompts are token ids and outputs have no text.
        default_params: parameters of requests that have none.
        max_model_len: most tokens of a request, prompt and output together.
        max_batch_size: most requests that run at once.
        vocab_size: number of tokens that the model knows.
        eos_token_ids: tokens that end an output.
        scan_stop: finds stop strings.
        trust_chat_template: render the tokenizer's chat template in this process; see `render_chat`.

    Attributes:
        tokenizer: see above.
        default_params: see above.
        max_model_len: see above.
        max_batch_size: see above.
        vocab_size: see above.
        trust_chat_template: see above.

    Raises:
        ConfigError: if the tokenizer is not one of the `tokenizers` library.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        default_params: SamplingParams,
        *,
        max_model_len: int,
        max_batch_size: int,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        scan_stop: ScanStop = scan_stop,
        trust_chat_template: bool = True,
    ) -> None:
        self.tokenizer, self.default_params, self.trust_chat_template = tokenizer, default_params, trust_chat_template
        self.max_model_len, self.max_batch_size, self.vocab_size = max_model_len, max_batch_size, vocab_size
        backend = NO_WORDS if tokenizer is None else getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__}, which cannot decode token by token: load it with "
                "AutoTokenizer.from_pretrained, which returns a fast one"
            )
        self._backend, self._special_ids = backend, special_ids(backend)
        self._eos_token_ids, self._scan_stop = eos_token_ids, scan_stop

    def get_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer, as vLLM's method of this name does."""
        return self.tokenizer

    def tokens_of(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt; see `prompts.encode`."""
        return encode(prompt, self.tokenizer, self.max_model_len, add_special_tokens=add_special_tokens)

    def chat_prompt(
        self, messages: ListLike[Message], *, chat_template: str | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: each with a "role" and a "content".
            chat_template: a Jinja template; default the model's own.
            options: `add_generation_prompt`, `continue_final_message`, `tools` and `chat_template_kwargs`, as in
                `render_chat`.

        Raises:
            RequestError: if there is no chat template or no tokenizer, or the template does not take these messages.
        """
        is_trusted = self.trust_chat_template or chat_template is not None
        text = render_chat(needed(self.tokenizer), messages, chat_template, is_trusted=is_trusted, **options)
        return self.tokens_of(text, add_special_tokens=False)

    def core_params(self, params: SamplingParams) -> list[SamplingParams]:
        """Return the parameters of each of the `n` outputs, without what the engine's core does not do.

        Raises:
            RequestError: if words cannot be tokenized, or there is no tokenizer for them.
        """
        changes: dict[str, Any] = {"n": 1} if params.n > 1 else {}
        if params.stop:
            needed(self.tokenizer)
            # A text has no special tokens, so a stop string that is one becomes a stop token.
            named = self._special_ids & {self._backend.token_to_id(string) for string in params.stop}
            changes |= {"stop": (), "stop_token_ids": (*(params.stop_token_ids or ()), *named)}
        if params.bad_words:
            encode = partial(self.tokens_of, add_special_tokens=False)
            words = tokenize_bad_words(params.bad_words, encode)
            changes["bad_words_token_ids"] = (*words, *params.bad_words_token_ids)
        core = replace(params, **changes) if changes else params
        # The log probabilities of the prompt are those of the first output.
        others = core if core.prompt_logprobs is None else replace(core, prompt_logprobs=None)
        return [core, *(_with_own_seed(others, index) for index in range(1, params.n))]

    def new_text(
        self, owner: PromptOutputs, index: int, core: SamplingParams, prompt_token_ids: list[int], each_step: bool
    ) -> TextRequest:
        """Return the text of one of the outputs of a prompt, before its first token.

        Args:
            owner: the outputs of the prompt.
            index: its number among them.
            core: its parameters in the engine.
            prompt_token_ids: the prompt.
            each_step: its text is needed as it is generated.
        """
        params = owner.params
        backend = self._backend if params.detokenize else NO_WORDS
        detokenizer = None
        if each_step or params.stop:
            detokenizer = Detokenizer(
                backend,
                prompt_token_ids,
                hidden=self._special_ids if params.skip_special_tokens else frozenset(),
                stop=params.stop or (),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                scan_stop=self._scan_stop,
            )
        ends = end_tokens(core, self._eos_token_ids)
        return TextRequest(owner, index, prompt_token_ids, ends, backend, detokenizer)


def _with_own_seed(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None:
        return params
    return replace(params, seed=(params.seed + index + 2**63) % 2**64 - 2**63)  # a signed 64-bit number
