"""Right and wrong answers, with which the graders themselves are tested."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """An answer to an exercise; it can be called like the function or class that it wraps."""

    exercise: str
    definition: Callable[..., Any]
    fails: str | None = None
    """The first check that must fail; None for a right answer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.definition(*args, **kwargs)


def right(exercise: str) -> Callable[[Callable[..., Any]], Answer]:
    """Marks an answer that is correct but written differently from the reference: it must pass every check."""
    return lambda definition: Answer(exercise, definition)


def wrong(exercise: str, *, fails: str) -> Callable[[Callable[..., Any]], Answer]:
    """Marks a plausible mistake: `fails` names the first check that must fail."""
    return lambda definition: Answer(exercise, definition, fails)
