"""Right and wrong answers to the homework of chapter 14. They test its grader."""

import numpy as np
import torch
from torch.nn import functional as F

from book.grading import right, solution, wrong

reference = solution("14_fewer_steps")

# in_blocks ----------------------------------------------------------------------------------------------------------


@right("in_blocks")
def with_a_buffer(product, rows):
    def computed(x):
        parts = []
        for start in range(0, len(x), rows):
            own = x[start : start + rows]
            buffer = x.new_zeros(rows, x.shape[1])
            buffer[: len(own)] = own
            parts.append(product(buffer)[: len(own)])
        return torch.cat(parts)

    return computed


@wrong("in_blocks", fails="test_fewer_tokens")
def without_padding(product, rows):
    return lambda x: torch.cat([product(block) for block in x.split(rows)])


@wrong("in_blocks", fails="test_fewer_tokens")
def with_the_padding_in_the_result(product, rows):
    return lambda x: torch.cat([product(own) for own in F.pad(x, (0, 0, 0, -len(x) % rows)).split(rows)])


@wrong("in_blocks", fails="test_several_blocks")
def the_first_block_only(product, rows):
    return lambda x: product(F.pad(x[:rows], (0, 0, 0, max(0, rows - len(x)))))[: len(x)]


@wrong("in_blocks", fails="test_one_block")
def one_row_in_each_call(product, rows):
    return lambda x: torch.cat([product(row[None]) for row in x]) if rows > 1 else product(x)


@wrong("in_blocks", fails="test_padding")
def the_last_row_again(product, rows):
    def computed(x):
        own = torch.cat([x, x[-1:].expand(-len(x) % rows, -1)])
        return torch.cat([product(block) for block in own.split(rows)])[: len(x)]

    return computed


@wrong("in_blocks", fails="test_padding")
def always_one_more_block(product, rows):
    def computed(x):
        own = F.pad(x, (0, 0, 0, rows - len(x) % rows))
        return torch.cat([product(block) for block in own.split(rows)])[: len(x)]

    return computed


# new_tokens ---------------------------------------------------------------------------------------------------------


def step(guesses, sampled, end, room, bug=""):
    right = 0
    while right < len(guesses) and guesses[right] == sampled[right]:
        right += 1
    if bug == "any":
        right = sum(a == b for a, b in zip(guesses, sampled, strict=False))
    tokens = list(sampled[: right + (bug != "no bonus")])
    if bug == "at least one":
        tokens = list(sampled[: max(1, right)])
    if end in tokens and bug != "end":
        tokens = tokens[: tokens.index(end) + (bug != "drops the end")]
    return tokens if bug == "room" else tokens[:room]


@right("new_tokens")
def by_counting(guesses, sampled, end_token, room):
    return step(guesses, sampled, end_token, room)


@wrong("new_tokens", fails="test_without_guesses")
def right_guesses_only(*args):
    return step(*args, bug="no bonus")


@wrong("new_tokens", fails="test_one_guess")
def without_the_token_after_them(*args):
    return step(*args, bug="at least one")


@wrong("new_tokens", fails="test_wrong_guesses")
def all_that_agree(*args):
    return step(*args, bug="any")


@wrong("new_tokens", fails="test_wrong_guesses")
def the_guess_and_not_the_sampled_token(guesses, sampled, end_token, room):
    right = len(step(guesses, sampled, end_token, 99)) - 1
    return [*guesses[: right + 1], *sampled[len(guesses) :]][: room if right < len(guesses) else None]


@wrong("new_tokens", fails="test_the_end_token")
def beyond_the_end(*args):
    return step(*args, bug="end")


@wrong("new_tokens", fails="test_the_end_token")
def without_the_end(*args):
    return step(*args, bug="drops the end")


@wrong("new_tokens", fails="test_room")
def more_than_fit(*args):
    return step(*args, bug="room")


# ngram_guess --------------------------------------------------------------------------------------------------------


def lookup(tokens, longest, shortest, most, latest=True, ascending=False, overlap=True, n_min=None):
    sizes = range(longest, (shortest if n_min is None else n_min) - 1, -1)
    for n in reversed(sizes) if ascending else sizes:
        starts = range(len(tokens) - (n if overlap else 2 * n - 1) - 0)
        starts = [s for s in starts if s + n < len(tokens)]
        for start in reversed(starts) if latest else starts:
            if list(tokens[start : start + n]) == list(tokens[-n:]):
                return list(tokens[start + n : start + n + most])
    return []


@right("ngram_guess")
def with_numpy(tokens, longest, shortest, most):
    array = np.array(tokens)
    for n in range(longest, shortest - 1, -1):
        if len(array) > n:
            windows = np.lib.stride_tricks.sliding_window_view(array[:-1], n)
            found = np.flatnonzero((windows == array[-n:]).all(1))
            if len(found):
                return array[found[-1] + n :][:most].tolist()
    return []


@wrong("ngram_guess", fails="test_one_occurrence")
def the_occurrence_itself(tokens, longest, shortest, most):
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start : start + most]
    return []


@wrong("ngram_guess", fails="test_one_occurrence")
def finds_the_end_itself(tokens, longest, shortest, most):
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + most]
    return []


@wrong("ngram_guess", fails="test_the_largest_n")
def the_smallest_n_first(*args):
    return lookup(*args, ascending=True)


@wrong("ngram_guess", fails="test_the_latest")
def the_first_occurrence(*args):
    return lookup(*args, latest=False)


@wrong("ngram_guess", fails="test_the_latest")
def without_overlap(*args):
    return lookup(*args, overlap=False)


@wrong("ngram_guess", fails="test_the_smallest_n")
def down_to_one_token(*args):
    return lookup(*args, n_min=1)


# acceptances --------------------------------------------------------------------------------------------------------


def three(p, q, shared):
    return sum(a * b for a, b in zip(p, q, strict=True)), shared, sum(map(min, p, q))


@right("acceptances")
def by_matrices(p, q):
    p, q = np.array(p), np.array(q)
    both = (p > 0) & (q > 0)
    factors = np.maximum(p / p[both][:, None], q / q[both][:, None])
    return float(p @ q), float((1 / factors.sum(1)).sum()), float(1 - np.abs(p - q).sum() / 2)


@wrong("acceptances", fails="test_own_noise")
def the_likeliest_token(p, q):
    return max(p) * max(q), reference.acceptances(p, q)[1], sum(map(min, p, q))


@wrong("acceptances", fails="test_rejection")
def the_distance_not_halved(p, q):
    own, shared, _ = reference.acceptances(p, q)
    return own, shared, 1 - sum(abs(a - b) for a, b in zip(p, q, strict=True))


@wrong("acceptances", fails="test_shared_noise")
def as_good_as_rejection(p, q):
    return three(p, q, sum(map(min, p, q)))


@wrong("acceptances", fails="test_shared_noise")
def the_bound(p, q):
    distance = 1 - sum(map(min, p, q))
    return three(p, q, (1 - distance) / (1 + distance))


@wrong("acceptances", fails="test_equal_probabilities")
def as_if_the_races_were_independent(p, q):
    return three(p, q, sum(a * b for a, b in zip(p, q, strict=True)))


@wrong("acceptances", fails="test_zeros")
def divides_by_zero(p, q):
    p, q = np.array(p), np.array(q)
    with np.errstate(all="ignore"):
        factors = np.maximum(p / p[:, None], q / q[:, None])
    return three(p.tolist(), q.tolist(), float((1 / factors.sum(1)).sum()))


# best_count ---------------------------------------------------------------------------------------------------------


def best(right, seconds, guess_seconds, bug=""):
    rates = []
    for k in range(len(right) + 1):
        chances = np.cumprod(right[:k]) if bug != "sum" else np.array(right[:k])
        cost = seconds[k] + (0 if bug == "drafter" else guess_seconds * (k > 0 if bug == "once" else k))
        rates.append((1 + chances.sum()) / cost if bug != "tokens" else chances.sum() / cost)
    if bug == "first peak":
        return next((k for k in range(len(right)) if rates[k + 1] <= rates[k]), len(right))
    if bug == "last":
        return len(rates) - 1 - int(np.argmax(rates[::-1]))
    return int(np.argmax(rates))


@right("best_count")
def by_cumulative_products(right, seconds, guess_seconds):
    tokens = 1 + np.concatenate(([0.0], np.cumprod(right).cumsum()))
    return int((tokens / (np.array(seconds) + guess_seconds * np.arange(len(seconds)))).argmax())


@wrong("best_count", fails="test_several_guesses")
def each_guess_for_itself(*args):
    return best(*args, bug="sum")


@wrong("best_count", fails="test_at_most_one_guess")
def without_the_sampled_token(*args):
    return best(*args, bug="tokens")


@wrong("best_count", fails="test_a_step_in_the_cost")
def up_to_the_first_that_does_not_pay(*args):
    return best(*args, bug="first peak")


@wrong("best_count", fails="test_the_drafter")
def drafts_for_nothing(*args):
    return best(*args, bug="drafter")


@wrong("best_count", fails="test_the_drafter")
def drafts_at_once(*args):
    return best(*args, bug="once")


@wrong("best_count", fails="test_the_drafter")
def the_largest_of_equals(*args):
    return best(*args, bug="last")


# choose_count -------------------------------------------------------------------------------------------------------


@right("choose_count")
def with_windows(history, most):
    """Plain frequencies of the last guesses, medians of the last times, and a line through them."""
    if len(history) < 2:
        return 0
    tried = right = 1.0
    for count, num_right, _ in [own for own in history[-200:] if own[0]][-12:]:
        tried, right = tried + min(num_right + 1, count), right + num_right
    times = {}
    for count, _, seconds in history[-80:]:
        times.setdefault(count, []).append(seconds)
    if 0 not in times:
        return 0
    fastest = {count: min(own[-5:]) for count, own in times.items()}
    probability = min(right / (tried + 0.5), 0.98)
    if not any(count for count, *_ in history[-30:]):
        return 1
    seconds = np.interp(range(most + 1), sorted(fastest), [fastest[count] for count in sorted(fastest)])
    return reference.best_count([probability] * most, seconds.tolist(), 0.0)


@wrong("choose_count", fails="test_a_plain_case")
def always_two(history, most):
    return 2


@wrong("choose_count", fails="test_better_than_never")
def never_in_practice(history, most):
    if len(history) == 20:
        return reference.choose_count(history, most)
    return 0


@wrong("choose_count", fails="test_most_of_the_gain")
def by_acceptance_alone(history, most):
    """More after a step whose guesses were all right, fewer after another."""
    if len(history) == 20:
        return reference.choose_count(history, most)
    k = 2
    for count, num_right, _ in history:
        k = min(most, k + 1) if num_right == count else max(0 if count else 1, k - 1)
    return k


@wrong("choose_count", fails="test_all_of_the_gain")
def never_forgets(history, most):
    if len(history) == 20 or not history:
        return reference.choose_count(history, most)
    known = {}
    for count, _, seconds in history:
        known.setdefault(count, []).append(seconds)
    right = 1.0 + sum(own[1] for own in history)
    tried = 2.0 + sum(min(own[1] + 1, own[0]) for own in history)
    times = np.interp(range(most + 1), sorted(known), [min(known[count]) for count in sorted(known)])
    return reference.best_count([right / tried] * most, times.tolist(), 0.0)
