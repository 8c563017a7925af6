"""Homework of chapter 14: a batch-invariant product, verification, prompt lookup, the
acceptance of three kinds of verification, and how many guesses pay.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/14_fewer_steps

    # the next of three hints for the exercise NAME
    pytest chapters/14_fewer_steps --hint NAME
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def in_blocks(
    product: Callable[[Tensor], Tensor], rows: int
) -> Callable[[Float[Tensor, "T In"]], Float[Tensor, "T Out"]]:
    """Make a batch-invariant function of a product.

    What must hold:
        - The function returns what `product` returns, for any number of tokens T >= 1.
        - Whatever T is, `product` always gets exactly `rows` rows. Those that are not
          tokens are zeros.
        - It is called as few times as possible, and its input x is not changed.

    Args:
        product: computes each row of its result from the same row of its input.
        rows: how many rows it gets.

    Example:

        >>> shapes = []
        >>> def twice(x):
        ...     shapes.append(list(x.shape))
        ...     return 2 * x
        >>> in_blocks(twice, rows=4)(torch.ones(5, 3)).shape, shapes
        (torch.Size([5, 3]), [[4, 3], [4, 3]])
    """
    raise NotImplementedError


def new_tokens(
    guesses: Sequence[int], sampled: Sequence[int], end_token: int, room: int
) -> list[int]:
    """Return the tokens that a request gets from one step of speculative decoding.

    The model has computed the request's last token and all guesses in one step, and
    sampled a token after each of them. What must hold:
        - The request gets the tokens that it would get without guesses, one per step.
        - It gets as many of them as this step allows.
        - It ends with the first end token, and never gets more than `room` tokens.

    Args:
        guesses: k guesses, possibly none.
        sampled: k + 1 tokens. The first is sampled after the request's last token, the
            next one after the first guess, and so on.
        end_token: ends the request.
        room: how many tokens the request may still get, at least 1.

    Example: the second guess is wrong.

        >>> new_tokens([5, 6, 7], [5, 8, 7, 2], end_token=0, room=10)
        [5, 8]
    """
    raise NotImplementedError


def ngram_guess(
    tokens: Sequence[int], longest: int, shortest: int, most: int
) -> list[int]:
    """Guess the next tokens of a text by prompt lookup.

    What must hold:
        - The last n tokens of the text are searched among its earlier ones, and what
          followed there is the guess.
        - The largest n counts for which they occur, from `longest` down to `shortest`.
        - Of several occurrences, the latest counts. It may overlap the last n tokens.
        - There are at most `most` guesses. They end with the text.
        - If nothing is found, the list is empty.

    Args:
        tokens: of the text so far.
        longest: largest n.
        shortest: smallest n, at least 1.
        most: most guesses, at least 1.

    Example: the last three tokens occur nowhere else; the last two do.

        >>> ngram_guess([1, 2, 7, 8, 4, 1, 2], longest=3, shortest=1, most=3)
        [7, 8, 4]
    """
    raise NotImplementedError


def acceptances(p: Sequence[float], q: Sequence[float]) -> tuple[float, float, float]:
    """Return the exact probability that a guess is right, in three ways of checking it.

    The model gives the next token the probabilities p, and the draft model q. Both
    sample by a race: with exponential noise E_j of each token j, the token with the
    least E_j / p_j wins. E_j are independent, with P(E_j > x) = exp(-x).

        1. Exact matching, where each model has noise of its own.
        2. Exact matching, where both models have the same noise.
        3. Rejection sampling: a guess j is accepted with probability min(1, p_j / q_j).

    What must hold:
        - All three are exact up to rounding: no sampling.
        - Probabilities may be 0, and a token with probability 0 is never chosen.

    Args:
        p: probabilities, which sum to 1.
        q: as many of them.

    Example:

        >>> values = acceptances([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
        >>> [round(value, 4) for value in values]
        [0.29, 0.6308, 0.7]
    """
    raise NotImplementedError


def best_count(
    right: Sequence[float], seconds: Sequence[float], guess_seconds: float
) -> int:
    """Return the number of guesses with the most expected tokens per second.

    What must hold:
        - A step with k guesses gives the request 1 token, and one more for each guess
          that is right, if all guesses before it are right, too.
        - It takes seconds[k], and its guesses take guess_seconds each before it.
        - Of equally good numbers, the smallest is returned.

    Args:
        right: [n] probability that each guess is right, if those before it are.
        seconds: [n + 1] time of a step with 0 to n guesses.
        guess_seconds: time that the drafter takes for one guess.

    Example: three guesses are free, and the fourth doubles the step.

        >>> best_count([0.5] * 4, [1.0, 1.0, 1.0, 1.0, 2.0], guess_seconds=0.0)
        3
    """
    raise NotImplementedError


def choose_count(history: Sequence[tuple[int, int, float]], most: int) -> int:
    """Choose how many tokens to guess in the next step, from what earlier steps did.

    You know neither how often guesses are right nor what a step costs, and both may
    change while the request runs. Times are noisy: now and then the machine is busy
    with something else. What must hold:
        - The number is in 0..most.
        - It depends on the arguments only.
        - The tokens per second of the whole run are as high as you can make them. They
          are scored: never guessing scores 0, and the reference scores 1.

    Args:
        history: for each earlier step, the oldest first: how many guesses it had, how
            many of them were right, up to the first wrong one, and its seconds.
        most: most guesses.

    Example: a step with 4 guesses takes hardly longer than one with none, and yields 5
    tokens.

        >>> choose_count([(0, 0, 1.0), (4, 4, 1.1)] * 10, most=4)
        4
    """
    raise NotImplementedError
