"""What users may give as prompts, and what becomes of it: token ids."""

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mini_engine.errors import RequestError
from mini_engine.outputs import Prompt

MAX_CHARACTERS_PER_TOKEN = 64  # of the model's limit; longer texts are refused without being tokenized


def as_prompts(prompts: Prompt | ListLike[Prompt] | None) -> list[Prompt]:
    """Return a prompt, or several of them, as a list of prompts.

    Raises:
        RequestError: if it is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = _listed(prompts)
    if several is None:
        raise RequestError(f"prompts is a {type(prompts).__name__}; give text, token ids, or a list of prompts")
    return [several] if len(several) > 0 and isinstance(several[0], Integral) else list(several)


def unpack(prompt: Prompt) -> Any:
    """Return the text or the token ids of a prompt that is a dictionary, and any other prompt unchanged.

    Raises:
        RequestError: if the dictionary has other keys.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
        raise RequestError(f"a prompt has {', '.join(map(str, prompt))[:80]!r}; give 'prompt' or 'prompt_token_ids'")
    return next(iter(prompt.values()))


def encode(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the tokens of a prompt.

    Args:
        prompt: a text; token ids in a list, an array or a tensor; or a dictionary with one of them.
        tokenizer: the model's.
        max_tokens: the model's limit.
        add_special_tokens: whether the tokenizer adds its own tokens to a text, such as a beginning-of-sequence token.

    Raises:
        RequestError: if it is none of these, if it is longer than any prompt that the model accepts, or if it is a text
            and there is no tokenizer.
    """
    prompt = unpack(prompt)
    if not isinstance(prompt, str):
        numbers = _listed(prompt)
        if numbers is not None and set(map(type, numbers)) <= {int}:  # as nearly always, and several times as fast
            return list(numbers)
        if numbers is None or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
            raise RequestError(f"the prompt is neither text nor a list of token ids: {str(prompt)[:80]}")
        return [int(number) for number in numbers]
    if len(prompt) > max_tokens * MAX_CHARACTERS_PER_TOKEN:
        raise RequestError(f"the prompt has {len(prompt)} characters, too many for {max_tokens} tokens; shorten it")
    tokenizer = needed(tokenizer)
    try:
        prompt.encode()
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False)
    except Exception as error:  # a tokenizer may raise anything
        raise RequestError(f"the prompt cannot be tokenized: {error}") from error


def needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer; raise RequestError if there is none."""
    if tokenizer is None:
        raise RequestError(
            "the model has no tokenizer, which text and stop strings need: give token ids, or write the tokenizer "
            "into the model's folder with save_pretrained"
        )
    return tokenizer


def _listed(value: Any) -> ListLike[Any] | None:
    """Return the items of a list, an array or a tensor; None for anything else."""
    items = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    is_list = isinstance(items, ListLike) and not isinstance(items, str | bytes | bytearray | memoryview)
    return items if is_list else None
