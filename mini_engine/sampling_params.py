"""What a request asks of the sampler."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mini_engine.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Names and meanings are vLLM's.

    Attributes:
        temperature: divides the logits; 0, or next to it, takes the most likely token (greedy).
        top_k: sample from the k most likely tokens only; 0 from all.
        top_p: sample from the smallest set of most likely tokens whose probability reaches top_p.
        min_p: leave out tokens with less than min_p times the largest probability.
        repetition_penalty: above 1 makes tokens of the prompt and of the output so far less likely.
        max_tokens: end after this many tokens.
        seed: makes the output reproducible, whatever else is in the batch; None draws one.
        stop: end as soon as the text contains one of these; it is cut off.
        stop_token_ids: end at one of these tokens, beside the model's own end-of-sequence tokens.
        ignore_eos: do not end at the model's end-of-sequence tokens.

    Raises:
        RequestError: for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 128
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ranges: list[tuple[str, Callable[[float], bool], str]] = [
            ("temperature", lambda x: 0 <= x < math.inf, "0 (greedy) or more"),
            ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("min_p", lambda x: 0 <= x <= 1, "between 0 and 1"),
            ("repetition_penalty", lambda x: 0 < x < math.inf, "above 0 (1 does nothing)"),
        ]
        for name, in_range, wanted in ranges:
            object.__setattr__(self, name, _number(getattr(self, name), name, in_range, wanted))
        _whole(self.top_k, "top_k", 0, "0 (keep all) or more")
        _whole(self.max_tokens, "max_tokens", 1, "1 or more")
        if self.seed is not None:
            _whole(self.seed, "seed", -(2**63), "a whole number of 64 bits")
            if self.seed >= 2**63:
                raise RequestError(f"seed is {_shown(self.seed)}; give a whole number of 64 bits")
        stop = (self.stop,) if isinstance(self.stop, str) else _listed(self.stop, "stop", "a string or several")
        if not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop is {self.stop!r}; give strings that are not empty")
        object.__setattr__(self, "stop", stop)
        ends = _listed(self.stop_token_ids, "stop_token_ids", "a list of token ids")
        for token in ends:
            _whole(token, "stop_token_ids", 0, "token ids, 0 or more")
        object.__setattr__(self, "stop_token_ids", ends)


def _listed(value: object, name: str, wanted: str) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")
    return tuple(value)


def _number(value: object, name: str, in_range: Callable[[float], bool], wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")
    try:
        number = float(value)
    except OverflowError:
        raise RequestError(f"{name} is {_shown(value)}, more than a float can hold; it must be {wanted}") from None
    if not in_range(number):  # NaN fails every comparison, so it is never in range
        raise RequestError(f"{name} is {value!r}; it must be {wanted}")
    return number


def _whole(value: object, name: str, least: int, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {_shown(value)}; it must be {wanted}")


def _shown(value: object) -> str:
    """Format a value for a message. Python refuses to print integers of thousands of digits."""
    is_huge = isinstance(value, int) and abs(value) >= 10**40
    return "an integer of more than 40 digits" if is_huge else repr(value)
