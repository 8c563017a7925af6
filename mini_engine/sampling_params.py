"""The sampling parameters of a request."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_engine.errors import RequestError
from mini_engine.structured import StructuredOutputsParams

MAX_EDITS = 1024  # tokens of a request whose logits are changed one by one: they have a fixed place on the device
MAX_BAD_WORDS = 256  # bad words of two tokens or more
MAX_BAD_WORD_LEN = 32  # tokens of a bad word

# For each number: its type, a check of its range, and the range in words. NaN fails every comparison.
TOKEN_IDS: tuple[type, Callable[[Any], bool], str] = int, lambda x: 0 <= x < 2**63, "0 to 2**63 - 1"
NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "n": (int, lambda x: x >= 1, "1 or more"),
    "temperature": (float, lambda x: 0 <= x < math.inf, "0 (greedy) or more"),
    "top_k": (int, lambda x: x >= -1, "1 or more, or 0 or -1 (keep all)"),
    "top_p": (float, lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (float, lambda x: 0 <= x <= 1, "between 0 and 1"),
    "repetition_penalty": (float, lambda x: 0 < x < math.inf, "above 0 (1 does nothing)"),
    "presence_penalty": (float, lambda x: -2 <= x <= 2, "between -2 and 2 (0 does nothing)"),
    "frequency_penalty": (float, lambda x: -2 <= x <= 2, "between -2 and 2 (0 does nothing)"),
    "max_tokens": (int, lambda x: x >= 1, "1 or more"),
    "min_tokens": (int, lambda x: x >= 0, "0 or more"),
    "seed": (int, lambda x: -(2**63) <= x < 2**63, "a 64-bit number"),
    "logprobs": (int, lambda x: x >= -1, "0 or more, or -1 (all tokens)"),
    "prompt_logprobs": (int, lambda x: x >= -1, "0 or more, or -1 (all tokens)"),
    "stop_token_ids": TOKEN_IDS,
    "allowed_token_ids": TOKEN_IDS,
    "bad_words_token_ids": TOKEN_IDS,
    "token of logit_bias": TOKEN_IDS,
    "logit_bias": (float, lambda x: x < math.inf, "finite, or -inf to forbid a token"),
}
OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}
SCALARS = tuple(list(NUMBERS)[: list(NUMBERS).index("stop_token_ids")])
FLAGS = "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"
KINDS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class SamplingParams:
    """The options that determine how a request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    Attributes:
        n: number of outputs for the prompt, which is computed once if the prefix cache is on.
        temperature: divides the logits; 0, or close to it, takes the most likely token (greedy).
        top_k: sample only from the k most likely tokens; 0 or -1 samples from all.
        top_p: sample from the smallest set of most likely tokens whose probability reaches top_p.
        min_p: leave out tokens with less than min_p times the largest probability.
        repetition_penalty: above 1 makes tokens of the prompt and of the output so far less likely.
        presence_penalty: subtracted from the logits of tokens that the output has so far.
        frequency_penalty: subtracted from a token's logit once for each time that the output has it so far.
        max_tokens: end after this many tokens; None: as many as the model takes.
        min_tokens: generate this many tokens before the output may end at an end-of-sequence token, a stop token or a
            stop string.
        seed: determines the random numbers, whatever else is in the batch; None or -1 draws a seed. With `n`, each
            output has its own seed, derived from this one.
        stop: end as soon as the text contains one of these strings, which is cut off.
        stop_token_ids: end at any of these tokens, in addition to the model's own end-of-sequence tokens.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        logit_bias: token id to a number that is added to its logit.
        bad_words: texts that the output must not contain.
        bad_words_token_ids: sequences of tokens that the output must not contain. `LLM` makes them of `bad_words`.
        allowed_token_ids: the only tokens that may be sampled; None allows all.
        logprobs: return log probabilities of this many of the likeliest tokens, and of each sampled token; 0: of the
            sampled token alone; -1: of the whole vocabulary. They are those of the model's raw logits.
        prompt_logprobs: the same for the tokens of the prompt, which is then computed even if the prefix cache has it.
        include_stop_str_in_output: keep the stop string that ended the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: turn the tokens into text.
        structured_outputs: what the text must be: JSON of a schema, a regular expression, a grammar, or a choice.

    Raises:
        RequestError: for a value of the wrong type or out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 128
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dictionary has no hash
    bad_words: Sequence[str] | None = ()
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "stop": _strings("stop", self.stop),
            "bad_words": _strings("bad_words", self.bad_words),
            "stop_token_ids": _numbers("stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids),
            "bad_words_token_ids": tuple(
                _numbers("bad_words_token_ids", word)
                for word in _listed("bad_words_token_ids", self.bad_words_token_ids)
            ),
        }
        for name in SCALARS:
            value = getattr(self, name)
            checked[name] = None if name in OPTIONAL and value is None else _number(name, value)
        checked["seed"] = None if checked["seed"] == -1 else checked["seed"]
        checked["top_k"] = max(0, checked["top_k"])
        if self.allowed_token_ids is not None:
            checked["allowed_token_ids"] = _numbers("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers")
            checked["logit_bias"] = {
                _number("token of logit_bias", token): _number("logit_bias", bias)
                for token, bias in self.logit_bias.items()
            }
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_combinations()

    @property
    def depends_on_output(self) -> bool:
        """Whether the output so far changes the logits: penalties, and bad words of several tokens."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties) or any(len(word) > 1 for word in self.bad_words_token_ids or ())

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}); lower it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; give at least one token, or None to allow all")
        if not all(self.bad_words_token_ids):
            raise RequestError("bad_words_token_ids has a word without tokens; leave it out")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                kind = type(self.structured_outputs).__name__
                raise RequestError(f"structured_outputs is a {kind}; give StructuredOutputsParams")
            if self.allowed_token_ids is not None:
                raise RequestError("allowed_token_ids and structured_outputs exclude each other; give one of them")
        if self.stop and not self.detokenize:
            raise RequestError("stop is a search in the text; leave detokenize on, or use stop_token_ids")


@dataclass(frozen=True)
class Admission:
    """A request that has been admitted to a row: plain data, which can be recorded and sent to another process.

    Attributes:
        row: its row of the page table.
        params: its parameters.
        seed: its seed.
        prompt_token_ids: its prompt.
        output_token_ids: its output so far: empty, unless it has been preempted.
        end_token_ids: tokens at which it ends.
        is_masked: whether each of its steps says which tokens it may sample (`StepInput.masks`).
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_token_ids: Sequence[int] | np.ndarray
    output_token_ids: Sequence[int] | np.ndarray = ()
    end_token_ids: Sequence[int] = ()
    is_masked: bool = False


def check_tokens(params: SamplingParams, vocab_size: int, end_token_ids: Iterable[int] = ()) -> None:
    """Check what depends on the model's vocabulary, when a request is added.

    Args:
        params: the request's parameters.
        vocab_size: number of tokens that have a logit.
        end_token_ids: all tokens at which the request ends.

    Raises:
        RequestError: if a token does not exist, or too many tokens are listed for the sampler's tables.
    """
    words = params.bad_words_token_ids
    listed: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": (token for word in words for token in word),
    }
    for name, tokens in listed.items():
        if bad := [token for token in tokens if token >= vocab_size]:
            raise RequestError(f"{name} has token {bad[0]}; the model's tokens are 0 to {vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise RequestError(f"{name} is {getattr(params, name)}; the model has {vocab_size} tokens: use -1 for all")
    single = {word[0] for word in words if len(word) == 1}
    edited = {*(params.logit_bias or ()), *single, *(end_token_ids if params.min_tokens else ())}
    if len(edited) > MAX_EDITS:
        raise RequestError(
            f"logit_bias, bad_words, and the end tokens of min_tokens change {len(edited)} tokens one by one; give at "
            f"most {MAX_EDITS}, and use allowed_token_ids for large sets"
        )
    if sum(len(word) > 1 for word in words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words has more than {MAX_BAD_WORDS} words of two tokens or more; give fewer")
    if any(len(word) > MAX_BAD_WORD_LEN for word in words):
        raise RequestError(f"bad_words has a word of more than {MAX_BAD_WORD_LEN} tokens; give shorter ones")


def tokenize_bad_words(words: Iterable[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Turn bad words into the sequences of tokens that write them, at the start of a text and after a space.

    Args:
        words: the words.
        encode: the tokenizer, without special tokens.

    Returns:
        One or two sequences for each word, as in vLLM: the second, with a space in front, is left out where the
        tokenizer only adds a token for the space, so the first one already matches.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        sequences.append(plain)
        if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            sequences.append(spaced)
    return tuple(word for word in sequences if word)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else _listed(name, value)
    if not all(isinstance(string, str) and string for string in strings):
        raise RequestError(f"{name} is {value!r}; give nonempty strings")
    return strings


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


def _numbers(name: str, values: object) -> tuple[Any, ...]:
    return tuple(_number(name, value) for value in _listed(name, values))


def _number(name: str, value: Any) -> Any:
    """Return a number as its Python type; raise RequestError if it is of another type or out of range."""
    kind, in_range, wanted = NUMBERS[name]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy or PyTorch
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise RequestError(f"{name} is {value!r}, a {type(value).__name__}; it must be {KINDS[kind]}, {wanted}")
    if isinstance(value, int) and abs(value) >= 10**40:  # too large for a float or for Python to print
        raise RequestError(f"{name} is an integer of more than 40 digits; it must be {wanted}")
    if not in_range(value):
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")
    return kind(value)
