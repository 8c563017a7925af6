"""The grader: what a chapter's `test_homework.py` and the tests of the graders import.

A chapter declares its exercises and checks in `chapters/NN_slug/test_homework.py`:

    from book.grading import Exercise, Homework, assert_close, check

    EXERCISES = [
        Exercise("softmax", points=3, minutes=15, difficulty=1, part=None, hints=("a nudge", "more", "nearly all")),
    ]

    @check("softmax", mistake="you exponentiate before you subtract the maximum")
    def test_large_scores(hw: Homework) -> None:
        assert_close(hw.softmax(torch.tensor([1e4, 0.0])), torch.tensor([1.0, 0.0]), atol=1e-6)

The name of an exercise is the name of the function or class in `homework.py`. Checks run in file order and stop at the
first that fails. Random generators are seeded before each. A check gets 20 seconds of CPU time, or as many as
`@check(..., seconds=30)` says. `hw` holds the submission for the exercise of the check, and the reference for all else
that the solution defines in public: one mistake costs once. When a check fails, the reader sees `mistake`, unless an
assertion found something plainer first: nothing returned, another type, shape or dtype, NaN. `assert_close`,
`assert_equal` and `assert_raises` find these and take a `mistake` of their own for the values. `assert condition,
"message"` works too, and `require(condition, "message")` where the message says it all.

A check of a demand on memory, dtype or time says which share of the points it costs, as in `@check(..., costs=0.2)`.
It runs after the checks of the result, and an answer that is right except for the demand keeps the rest. So the checks
of the result use `assert_values`, which takes any dtype, where the dtype is such a demand.

`solutions/NN_slug.py` holds the reference answers, and `homework.py` is generated from it (`python -m book stubs NN`).
Its module docstring becomes the reader's, so write it to the reader. Exercises lose their bodies; other public
functions, classes, constants and type aliases are given to the reader as they are; names with a leading underscore
stay private to the solution, and of the imports only those that the stub uses are kept.

`tests/book/answers/NN_slug.py` shows that the checks are right: at least one correct answer per exercise, written
differently, and four plausible wrong ones, each with the check that has to find it first:

    @right("softmax")
    def by_logsumexp(scores): ...

    @wrong("softmax", fails="test_large_scores")
    def without_the_maximum(scores): ...

An answer that needs another exercise takes it from `solution("NN_slug")`.
"""

from book.grading.answers import Answer, right, wrong
from book.grading.assertions import (
    assert_close,
    assert_equal,
    assert_no_loop,
    assert_raises,
    assert_values,
    lines_run,
    require,
)
from book.grading.chapter import Chapter, Check, Exercise, check, load_chapter, solution
from book.grading.submission import Homework

__all__ = [
    "Answer",
    "Chapter",
    "Check",
    "Exercise",
    "Homework",
    "assert_close",
    "assert_equal",
    "assert_no_loop",
    "assert_raises",
    "assert_values",
    "check",
    "lines_run",
    "load_chapter",
    "require",
    "right",
    "solution",
    "wrong",
]
