"""The sampling parameters of a request."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mini_engine.errors import RequestError

# For each number: its type, a check of its range, and the range in words. NaN fails every comparison.
NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "n": (int, lambda x: x >= 1, "1 or more"),
    "temperature": (float, lambda x: 0 <= x < math.inf, "0 (greedy) or more"),
    "top_k": (int, lambda x: x >= 0, "0 (keep all) or more"),
    "top_p": (float, lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (float, lambda x: 0 <= x <= 1, "between 0 and 1"),
    "repetition_penalty": (float, lambda x: 0 < x < math.inf, "above 0 (1 does nothing)"),
    "max_tokens": (int, lambda x: x >= 1, "1 or more"),
    "seed": (int, lambda x: -(2**63) <= x < 2**63, "a 64-bit whole number"),
    "stop_token_ids": (int, lambda x: 0 <= x < 2**63, "token ids, 0 to 2**63 - 1"),
}


@dataclass(frozen=True)
class SamplingParams:
    """The options that determine how a request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    Attributes:
        n: number of outputs for the prompt, which is computed once if the prefix cache is on.
        temperature: divides the logits; 0, or close to it, takes the most likely token (greedy).
        top_k: sample only from the k most likely tokens; 0 samples from all.
        top_p: sample from the smallest set of most likely tokens whose probability reaches top_p.
        min_p: leave out tokens with less than min_p times the largest probability.
        repetition_penalty: above 1 makes tokens of the prompt and of the output so far less likely.
        max_tokens: end after this many tokens; None ends only at the longest sequence.
        seed: determines the random numbers, whatever else is in the batch; None or -1 draws a seed. With `n`, each
            output has its own seed, derived from this one.
        stop: end as soon as the text contains one of these strings, which is cut off.
        stop_token_ids: end at any of these tokens, in addition to the model's own end-of-sequence tokens.
        include_stop_str_in_output: do not cut the stop string off.
        skip_special_tokens: leave special tokens out of the text.
        ignore_eos: do not end at the model's end-of-sequence tokens.

    Raises:
        RequestError: for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 128
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop or ())
        if not all(isinstance(string, str) and string for string in stop):
            raise RequestError(f"stop is {self.stop!r}; give nonempty strings")
        ends = _listed("stop_token_ids", self.stop_token_ids)
        checked: dict[str, Any] = {"stop": stop, "stop_token_ids": tuple(_number("stop_token_ids", x) for x in ends)}
        for name in NUMBERS.keys() - {"stop_token_ids"}:
            value = getattr(self, name)
            checked[name] = None if name in ("seed", "max_tokens") and value is None else _number(name, value)
        if checked["seed"] == -1:  # as in vLLM
            checked["seed"] = None
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _listed(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; it must be a list")
    return tuple(value)


def _number(name: str, value: Any) -> float | int:
    """Return a number as its type; raise RequestError if it is of another type or out of range."""
    kind, in_range, wanted = NUMBERS[name]
    if isinstance(value, int) and abs(value) >= 10**40:  # too large for a float or for Python to print
        raise RequestError(f"{name} is an integer of more than 40 digits; it must be {wanted}")
    if isinstance(value, bool) or not isinstance(value, int | kind) or not in_range(value):
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")
    return kind(value)
