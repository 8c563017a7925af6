"""Homework of chapter 14: a batch-invariant product, verification, prompt lookup, the
acceptance of three kinds of verification, and how many guesses pay.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


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

    def computed(x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        # -len(x) % rows: what is missing to the next multiple of rows.
        blocks = F.pad(x, (0, 0, 0, -len(x) % rows)).split(rows)
        return torch.cat([product(block) for block in blocks])[: len(x)]

    return computed


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
    tokens = [sampled[0]]
    for i, guess in enumerate(guesses):
        # sampled[i + 1] is right only if everything before it is.
        if tokens[-1] != guess or guess == end_token:
            break
        tokens.append(sampled[i + 1])
    return tokens[:room]


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
    tokens = list(tokens)
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + most]
    return []


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
    own = sum(a * b for a, b in zip(p, q, strict=True))
    rejection = sum(min(a, b) for a, b in zip(p, q, strict=True))
    shared = 0.0
    for pi, qi in zip(p, q, strict=True):
        if pi > 0 and qi > 0:
            # Token i wins both races if E_j > E_i * max(p_j / p_i, q_j / q_i) for all
            # other j. Given E_i = x this has probability exp(-x * sum of the maxima).
            # With the density exp(-x) of E_i, which is the term j = i, the integral is:
            shared += 1 / sum(max(a / pi, b / qi) for a, b in zip(p, q, strict=True))
    return own, shared, rejection


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
    best, most, tokens, so_far = 0, 1 / seconds[0], 1.0, 1.0
    for k, probability in enumerate(right, start=1):
        so_far *= probability
        tokens += so_far
        rate = tokens / (seconds[k] + k * guess_seconds)
        if rate > most:
            best, most = k, rate
    return best


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
    if not history:
        return 0
    right, tried = 1.0, 2.0  # before the first guess: one of two was right
    for count, num_right, _ in history[-60:]:
        fade = 0.9 if count else 0.99  # without guesses, the doubt returns slowly
        checked = min(num_right + 1, count)
        right, tried = right * fade + num_right, tried * fade + checked
    probability = (right + 1) / (tried + 2)
    # The fastest of the last steps with as many guesses; the others were disturbed.
    recent: dict[int, list[float]] = {}
    for count, _, seconds in history[-100:]:
        recent.setdefault(count, []).append(seconds)
    known = {count: min(own[-4:]) for count, own in recent.items()}
    if 0 not in known:  # without it, no gain is known
        return 0
    times = []
    for k in range(most + 1):
        below = max(count for count in known if count <= k)
        above = min((count for count in known if count >= k), default=below)
        share = (k - below) / (above - below) if above > below else 0.0
        # Beyond the largest known count, a step costs no more: so it will be tried.
        times.append(known[below] + share * (known[above] - known[below]))
    return best_count([probability] * most, times, 0.0)
