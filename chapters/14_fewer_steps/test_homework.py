"""Grader of chapter 14. Its oracles are plain decoding, a search by strings, and numerical integration."""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from book.grading import Exercise, Homework, assert_close, assert_equal, check, require

EXERCISES = [
    Exercise(
        "in_blocks",
        points=2,
        minutes=15,
        difficulty=1,
        hints=(
            "How many rows of zeros does a batch of 5 need if the product takes 4? And a batch of 8?",
            "-T % rows is what is missing to the next multiple. F.pad adds rows at the end of a matrix.",
            "blocks = F.pad(x, (0, 0, 0, -len(x) % rows)).split(rows); concatenate the products, and keep len(x) rows.",
        ),
    ),
    Exercise(
        "new_tokens",
        points=4,
        minutes=20,
        difficulty=2,
        hints=(
            "Write down what plain decoding gives for the example. Which of the four sampled tokens saw a wrong text?",
            "sampled[0] always counts. sampled[i] counts if the guesses 0 to i - 1 equal the tokens sampled there, and "
            "none of these ended the request.",
            "Start with [sampled[0]]. For each guess: stop if the last token of the list is not the guess, or is the "
            "end token; otherwise append the next sampled token. Cut to room.",
        ),
    ),
    Exercise(
        "ngram_guess",
        points=3,
        minutes=20,
        difficulty=1,
        hints=(
            "For one n, which starts can an earlier occurrence have? Must a token follow it?",
            "Starts are 0 to len(tokens) - n - 1, from the latest. The guess begins at start + n.",
            "for n in range(longest, shortest - 1, -1), for start from len(tokens) - n - 1 down to 0: if "
            "tokens[start:start + n] == tokens[-n:], return tokens[start + n:start + n + most].",
        ),
    ),
    Exercise(
        "acceptances",
        points=6,
        minutes=45,
        difficulty=3,
        hints=(
            "The first and the third are sums over tokens of one expression each. For the second, ask when token i "
            "wins both races.",
            "It wins if E_j > m_ij E_i for all j, with one factor m_ij. Fix E_i = x: what is the probability of that?",
            "m_ij = max(p_j / p_i, q_j / q_i). The integral of exp(-x) times exp(-x m_ij) for all j other than i is "
            "1 / sum_j m_ij, because m_ii = 1. Sum over i.",
        ),
    ),
    Exercise(
        "best_count",
        points=4,
        minutes=20,
        difficulty=2,
        hints=(
            "How many tokens does a step with two guesses give, if each is right with 1/2? List the cases.",
            "1 + right[0] + right[0] right[1] + ...: a guess counts only if all before it are right.",
            "Keep the product of the probabilities, add it to the tokens for each k, and divide by seconds[k] + k "
            "guess_seconds. Compare with >, so that the smallest of equals stays.",
        ),
    ),
    Exercise(
        "choose_count",
        points=5,
        minutes=60,
        difficulty=3,
        challenge=True,
        hints=(
            "Estimate two things from the history: how often the last guesses were right, and what a step with each "
            "number of guesses costs. best_count chooses.",
            "A guess after a wrong one was not checked: a step has tried min(right + 1, count) guesses. Of times, take "
            "the minimum of a few recent ones, because disturbed steps only take longer.",
            "Let the counts fade by 0.9 with each step, so that a change is noticed, and slowly forget bad luck while "
            "you do not guess. Take unknown larger steps to be as fast as the largest known one: they get tried.",
        ),
    ),
]


# in_blocks ----------------------------------------------------------------------------------------------------------


class Spy:
    """A product that refuses another number of rows, and remembers its inputs."""

    def __init__(self, rows: int, matrix: Tensor) -> None:
        self.rows, self.matrix = rows, matrix
        self.seen: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        require(len(x) == self.rows, f"the product gets {len(x)} rows instead of {self.rows}")
        self.seen.append(x.clone())
        return x @ self.matrix


def matrices(*shape: int, seed: int) -> Tensor:
    return torch.randint(1, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def assert_blocks(hw: Homework, count: int, rows: int) -> Spy:
    spy, x = Spy(rows, matrices(3, 2, seed=1)), matrices(count, 3, seed=count)
    before = x.clone()
    got = hw.in_blocks(spy, rows)(x)
    require(torch.equal(x, before), "you changed x")
    assert_close(got, before @ spy.matrix, atol=0.0, rtol=0.0, name="the products")
    return spy


@check("in_blocks", mistake="a full block of rows is one call of the product")
def test_one_block(hw: Homework) -> None:
    assert_blocks(hw, 4, rows=4)
    assert_blocks(hw, 1, rows=1)


@check("in_blocks", mistake="fewer tokens than rows are padded, and the result has one row for each token")
def test_fewer_tokens(hw: Homework) -> None:
    assert_blocks(hw, 1, rows=4)
    assert_blocks(hw, 3, rows=4)


@check("in_blocks", mistake="more tokens than rows are several calls, whose results are in the order of the tokens")
def test_several_blocks(hw: Homework) -> None:
    for count, rows in itertools.product((5, 8, 13), (3, 4)):
        assert_blocks(hw, count, rows)


@check("in_blocks", mistake="rows that are not tokens are zeros, after the tokens, and no block consists of them alone")
def test_padding(hw: Homework) -> None:
    for count, rows in ((1, 4), (8, 4), (9, 4)):
        spy = assert_blocks(hw, count, rows)
        require(len(spy.seen) == -(-count // rows), f"{len(spy.seen)} calls for {count} tokens in blocks of {rows}")
        padding = torch.cat(spy.seen)[count:]
        assert not padding.any(), "the rows that fill the last block are not zeros"


# new_tokens ---------------------------------------------------------------------------------------------------------


def decoded(guesses: list[int], sampled: list[int], end_token: int, room: int) -> list[int]:
    """What plain decoding gives while it can be read from the step: each token follows from the text before it."""
    text: list[int] = []
    while len(text) <= len(guesses) and text == guesses[: len(text)] and len(text) < room and end_token not in text:
        text.append(sampled[len(text)])
    return text


def assert_tokens(hw: Homework, guesses: list[int], sampled: list[int], end_token: int = 0, room: int = 99) -> None:
    got = hw.new_tokens(list(guesses), list(sampled), end_token, room)
    assert_equal(got, decoded(guesses, sampled, end_token, room), name=f"the tokens for {guesses} and {sampled}")


@check("new_tokens", mistake="without a guess, a step gives the one token that it samples")
def test_without_guesses(hw: Homework) -> None:
    assert_tokens(hw, [], [5])


@check("new_tokens", mistake="a right guess gives two tokens: the guess, and the one sampled after it")
def test_one_guess(hw: Homework) -> None:
    assert_tokens(hw, [5], [5, 8])


@check("new_tokens", mistake="at a wrong guess, the token that was sampled in its place counts, and nothing after it")
def test_wrong_guesses(hw: Homework) -> None:
    assert_tokens(hw, [5], [6, 8])
    assert_tokens(hw, [5, 6, 7], [5, 8, 7, 2])
    assert_tokens(hw, [5, 6, 7], [4, 6, 7, 2])


@check("new_tokens", mistake="the first end token is the last token, even where the guesses after it are right")
def test_the_end_token(hw: Homework) -> None:
    assert_tokens(hw, [5, 0, 7], [5, 0, 7, 2])
    assert_tokens(hw, [0, 6], [0, 6, 3])
    assert_tokens(hw, [5, 6], [5, 0, 3])


@check("new_tokens", mistake="a request never gets more than `room` tokens, however many guesses are right")
def test_room(hw: Homework) -> None:
    assert_tokens(hw, [5, 6, 7], [5, 6, 7, 8], room=2)
    assert_tokens(hw, [5, 6, 7], [5, 6, 7, 8], room=1)


@check("new_tokens", mistake="the tokens are those of plain decoding, as far as this step has computed them")
def test_random_steps(hw: Homework) -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        k = int(rng.integers(0, 5))
        sampled = rng.integers(0, 3, k + 1).tolist()
        guesses = [int(t) if rng.random() < 0.8 else int(rng.integers(3)) for t in sampled[:k]]
        assert_tokens(hw, guesses, sampled, room=int(rng.integers(1, 6)))


# ngram_guess --------------------------------------------------------------------------------------------------------


def looked_up(text: str, longest: int, shortest: int, most: int) -> str:
    """The guess for a text of single characters, by a search for strings."""
    for n in range(longest, shortest - 1, -1):
        if n < len(text):
            place = text[:-1].rfind(text[-n:])
            if place >= 0:
                return text[place + n : place + n + most]
    return ""


def assert_guess(hw: Homework, text: str, longest: int = 3, shortest: int = 1, most: int = 4) -> None:
    tokens = [ord(c) for c in text]
    got = hw.ngram_guess(tokens, longest, shortest, most)
    require(isinstance(got, list), f"return a list, not {type(got).__name__}")
    require(tokens == [ord(c) for c in text], "you changed the tokens")
    want = [ord(c) for c in looked_up(text, longest, shortest, most)]
    assert_equal(got, want, name=f"the guess for the characters {text!r}, n from {longest} to {shortest}")


@check("ngram_guess", mistake="the guess is what followed the last n tokens where they occurred before")
def test_one_occurrence(hw: Homework) -> None:
    assert_guess(hw, "abcxyzab", longest=2, shortest=2, most=2)
    assert_guess(hw, "abcd", longest=2, shortest=2)


@check("ngram_guess", mistake="the largest n that occurs counts, though a smaller n occurs later")
def test_the_largest_n(hw: Homework) -> None:
    assert_guess(hw, "abc1zbc2xabc", longest=3)


@check("ngram_guess", mistake="the latest of several occurrences counts, and it may overlap the last n tokens")
def test_the_latest(hw: Homework) -> None:
    assert_guess(hw, "ab1ab2ab", longest=2)
    assert_guess(hw, "xaaaa", longest=3)


@check("ngram_guess", mistake="n runs down to `shortest` and no further, and n tokens of a short text have none before")
def test_the_smallest_n(hw: Homework) -> None:
    assert_guess(hw, "axxb1cb", longest=3, shortest=2)
    assert_guess(hw, "axxb1cb", longest=3, shortest=1)
    for text in ("", "a", "aa"):
        assert_guess(hw, text, longest=5)


@check("ngram_guess", mistake="the guess follows from the definition for any text")
def test_random_texts(hw: Homework) -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        text = "".join(rng.choice(list("abc"), int(rng.integers(1, 16))))
        shortest = int(rng.integers(1, 4))
        assert_guess(hw, text, shortest + int(rng.integers(0, 3)), shortest, int(rng.integers(1, 5)))


# acceptances --------------------------------------------------------------------------------------------------------


def integrated(p: list[float], q: list[float]) -> float:
    """Shared noise, by the trapezoidal rule over the logarithm of the winner's noise."""
    t = np.linspace(-40.0, 5.0, 200_001)
    x, total = np.exp(t), 0.0
    for i, (pi, qi) in enumerate(zip(p, q, strict=True)):
        if pi and qi:
            slopes = sum(max(p[j] / pi, q[j] / qi) for j in range(len(p)) if j != i)
            total += float(np.trapezoid(np.exp(-x * slopes) * np.exp(-x) * x, t))
    return total


def assert_acceptances(hw: Homework, p: list[float], q: list[float], which: range = range(3)) -> None:
    got = hw.acceptances(list(p), list(q))
    require(isinstance(got, tuple) and len(got) == 3, "return a tuple of three probabilities")
    want = sum(a * b for a, b in zip(p, q, strict=True)), integrated(p, q), sum(map(min, p, q))
    names = "noise of its own", "shared noise", "rejection sampling"
    for i in which:
        assert_close(float(got[i]), want[i], atol=2e-5, rtol=0.0, name=f"the acceptance with {names[i]}")


def probabilities(size: int, seed: int) -> list[float]:
    drawn = np.random.default_rng(seed).dirichlet(np.full(size, 0.7))
    return [float(x) for x in drawn]


@check("acceptances", mistake="with noise of its own, a token is chosen by both with probability p_j q_j")
def test_own_noise(hw: Homework) -> None:
    assert_acceptances(hw, [0.25] * 4, [0.25] * 4, range(1))
    assert_acceptances(hw, [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], range(1))


@check("acceptances", mistake="rejection sampling accepts with the sum of q_j min(1, p_j / q_j)")
def test_rejection(hw: Homework) -> None:
    assert_acceptances(hw, [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], range(2, 3))


@check("acceptances", mistake="with equal probabilities and equal noise, both always choose the same token")
def test_equal_probabilities(hw: Homework) -> None:
    assert_acceptances(hw, [0.6, 0.3, 0.1], [0.6, 0.3, 0.1], range(1, 2))


@check("acceptances", mistake="token i wins both races if E_j > E_i max(p_j / p_i, q_j / q_i) for all other j")
def test_shared_noise(hw: Homework) -> None:
    assert_acceptances(hw, [0.5, 0.5], [0.8, 0.2])
    assert_acceptances(hw, [0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    for seed in range(4):
        assert_acceptances(hw, probabilities(6, seed), probabilities(6, seed + 50))


@check("acceptances", mistake="a token with probability 0 in either model is never chosen by both; do not divide by 0")
def test_zeros(hw: Homework) -> None:
    assert_acceptances(hw, [0.5, 0.5, 0.0], [0.0, 0.4, 0.6])
    assert_acceptances(hw, [1.0, 0.0], [0.0, 1.0])


# best_count ---------------------------------------------------------------------------------------------------------


def simulated_rate(right: list[float], seconds: float, guess_seconds: float) -> float:
    """The expected tokens by listing how many guesses can be right."""
    k = len(right)
    tokens = 0.0
    for n in range(k + 1):
        chance = math.prod(right[:n]) * (1 - right[n] if n < k else 1)
        tokens += chance * (n + 1)
    return tokens / (seconds + k * guess_seconds)


def assert_best(hw: Homework, right: list[float], seconds: list[float], guess_seconds: float = 0.0) -> None:
    rates = [simulated_rate(right[:k], seconds[k], guess_seconds) for k in range(len(right) + 1)]
    want = next(k for k, rate in enumerate(rates) if rate > max(rates) - 1e-12)
    got = hw.best_count(list(right), list(seconds), guess_seconds)
    assert_equal(got, want, name=f"the best count for {right} and {seconds}")


@check("best_count", mistake="a guess that is right yields a token; it pays if the step grows by less")
def test_at_most_one_guess(hw: Homework) -> None:
    assert_best(hw, [0.5], [1.0, 1.4])
    assert_best(hw, [0.5], [1.0, 1.6])
    assert_best(hw, [], [1.0])


@check("best_count", mistake="a guess counts only if all guesses before it are right: multiply, do not add")
def test_several_guesses(hw: Homework) -> None:
    assert_best(hw, [0.5] * 4, [1.0, 1.1, 1.3, 1.6, 1.9])
    assert_best(hw, [0.9, 0.1, 0.9, 0.9], [1.0, 1.1, 1.2, 1.3, 1.4])


@check("best_count", mistake="more guesses can pay where fewer do not: compare all numbers")
def test_a_step_in_the_cost(hw: Homework) -> None:
    assert_best(hw, [0.9] * 5, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert_best(hw, [0.8] * 5, [1.0, 1.0, 1.0, 1.9, 1.9, 1.9])


@check("best_count", mistake="each guess takes guess_seconds before the step; equal rates go to the smaller number")
def test_the_drafter(hw: Homework) -> None:
    assert_best(hw, [0.8] * 4, [1.0, 1.0, 1.0, 1.0, 1.0], 0.4)
    assert_best(hw, [0.5, 0.0], [1.0, 1.0, 1.0])
    assert_best(hw, [0.5], [1.0, 1.0], 0.5)


@check("best_count", mistake="the best number follows from the definition for any costs")
def test_random_costs(hw: Homework) -> None:
    rng = np.random.default_rng(9)
    for _ in range(200):
        n = int(rng.integers(0, 7))
        seconds = np.cumsum(rng.random(n + 1) * 0.5) + 0.7
        assert_best(hw, rng.random(n).tolist(), seconds.tolist(), float(rng.random() * 0.2))


# choose_count -------------------------------------------------------------------------------------------------------

MOST, STEPS = 6, 300
TRACES = {  # probability that a guess is right, and the cost of a step, by the number of the step
    1: (lambda t: 0.8, lambda t, k: 1 + 0.03 * k),
    2: (lambda t: 0.3, lambda t, k: 1 + 0.03 * k),
    3: (lambda t: 0.7, lambda t, k: 1 + 0.9 * k),
    4: (lambda t: 0.85 if t < 150 else 0.1, lambda t, k: 1 + 0.12 * k),
    5: (lambda t: 0.65, lambda t, k: 1.0 if k < 4 else 1.9),
    6: (lambda t: 0.75, lambda t, k: 1 + (0.05 if t < 150 else 0.8) * k),
    7: (lambda t: 0.04, lambda t, k: 1 + 0.2 * k),
}
REFERENCE = 0.481  # mean logarithm of the reference's gain


def gain(hw: Homework, seed: int) -> float:
    """The logarithm of the tokens per second of a run, relative to the same run without guesses."""
    right, cost = TRACES[seed]
    rng = np.random.default_rng(seed)
    drawn = rng.random((STEPS, MOST))
    noise = np.exp(0.04 * rng.standard_normal(STEPS)) * np.where(rng.random(STEPS) < 0.05, 3.0, 1.0)
    history: list[tuple[int, int, float]] = []
    tokens, plain = 0, 0.0
    for t in range(STEPS):
        k = hw.choose_count(list(history), MOST)
        require(isinstance(k, int | np.integer) and 0 <= k <= MOST, f"choose an integer from 0 to {MOST}, not {k!r}")
        num_right = [*(drawn[t, : int(k)] < right(t)).tolist(), False].index(False)
        history.append((int(k), num_right, float(cost(t, k) * noise[t])))
        tokens += num_right + 1
        plain += cost(t, 0) * noise[t]
    return math.log(tokens / sum(seconds for *_, seconds in history)) - math.log(STEPS / plain)


def mean_score(hw: Homework) -> float:
    return sum(gain(hw, seed) for seed in TRACES) / len(TRACES) / REFERENCE


@check("choose_count", mistake="without a measured step that has no guesses, you cannot know what a guess costs")
def test_a_plain_case(hw: Homework) -> None:
    for right, cost, want in ((4, 1.1, 4), (0, 3.0, 0)):
        got = hw.choose_count([(0, 0, 1.0), (4, right, cost)] * 10, 4)
        assert_equal(got, want, name=f"the choice after {right} of 4 guesses were right at {cost:.1f} times the cost")


@check("choose_count", mistake="your choices are slower than never guessing")
def test_better_than_never(hw: Homework) -> None:
    got = mean_score(hw)
    assert got > 0.2, f"your mean score is {got:.2f}; never guessing scores 0, and always one guess scores 0.45"


@check(
    "choose_count",
    mistake="no number of guesses is right for all requests: use how often guesses were right, and the times",
    costs=0.4,
)
def test_most_of_the_gain(hw: Homework) -> None:
    got = mean_score(hw)
    assert got >= 0.7, f"your mean score is {got:.2f}; the best constant number scores 0.58"


@check(
    "choose_count",
    mistake="notice changes: let old guesses fade, measure old times again, and stop where a guess costs a whole token",
    costs=0.3,
)
def test_all_of_the_gain(hw: Homework) -> None:
    got = mean_score(hw)
    assert got >= 0.9, f"your mean score is {got:.2f}; the reference scores 1"
