"""`TextFront`: what can be done with a text before an engine sees it, in any process."""

from collections.abc import Sequence as ListLike
from typing import Any

from transformers import PreTrainedTokenizerBase

from mini_engine.chat_template import Message, render_chat
from mini_engine.outputs import Prompt
from mini_engine.prompts import encode, needed
from mini_engine.sampling_params import SamplingParams


class TextFront:
    """The tokenizer of a model, and the limits of an engine that serves it.

    Args:
        tokenizer: the model's; without one, prompts are token ids and outputs have no text.
        default_params: parameters of requests that have none.
        max_model_len: most tokens of a request, prompt and output together.
        max_batch_size: most requests that run at once.
        trust_chat_template: render the tokenizer's chat template in this process; see `render_chat`.

    Attributes:
        tokenizer: see above.
        default_params: see above.
        max_model_len: see above.
        max_batch_size: see above.
        trust_chat_template: see above.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        default_params: SamplingParams,
        *,
        max_model_len: int,
        max_batch_size: int,
        trust_chat_template: bool = True,
    ) -> None:
        self.tokenizer, self.default_params, self.trust_chat_template = tokenizer, default_params, trust_chat_template
        self.max_model_len, self.max_batch_size = max_model_len, max_batch_size

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
