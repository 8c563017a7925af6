"""Log probabilities of tokens: the rows of a step that need them, and the log probabilities that a request collects.

A request collects a token's log probabilities by the token's position. A position that is computed again, after a
preemption or an error, therefore appears once. Steps without such requests skip all of this.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64

from mini_engine.request import Request, TokenLogprobs

Decode = Callable[[int], str | None]


@dataclass(frozen=True, eq=False)
class LogprobRows:
    """Tokens whose log probabilities a step computes, all with the same number of likeliest tokens.

    Attributes:
        num_top: number of the likeliest tokens; -1: the whole vocabulary.
        is_prompt: whether these are tokens of prompts; otherwise the step samples them.
        rows: [L] page-table row of each token's request.
        positions: [L] position of each token, counted from the start of its prompt.
        index: [L] for tokens of prompts, index of the token before each among the step's T tokens; for sampled tokens,
            index among the step's `sampling_rows`.
        token_ids: [L] tokens of prompts; 0 for sampled tokens.
    """

    num_top: int
    is_prompt: bool
    rows: Int64[np.ndarray, " L"]
    positions: Int64[np.ndarray, " L"]
    index: Int64[np.ndarray, " L"]
    token_ids: Int64[np.ndarray, " L"]


@dataclass(frozen=True, eq=False)
class LogprobArrays:
    """Log probabilities of the tokens of `LogprobRows`.

    Attributes:
        token_ids: [L, n + 1] the token, then the n likeliest, in descending order.
        logprobs: [L, n + 1] their log probabilities.
        ranks: [L] rank of the token, from 1.
    """

    token_ids: Int[np.ndarray, "L n1"]
    logprobs: Float[np.ndarray, "L n1"]
    ranks: Int[np.ndarray, " L"]

    @classmethod
    def joined(cls, parts: Sequence[Any]) -> "LogprobArrays":
        """Concatenate `Logprobs` on the host."""
        return cls(*(np.concatenate([getattr(p, name).numpy() for p in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Logprob:
    """The log probability of one token at one position, as in vLLM.

    Attributes:
        logprob: its log probability by the model's raw logits.
        rank: its rank in the vocabulary, from 1.
        decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def lacks_prompt_logprobs(request: Request) -> bool:
    """Whether a request has yet to collect log probabilities of its prompt, whose logits it must therefore compute."""
    last = len(request.prompt_token_ids) - 1
    return request.params.prompt_logprobs is not None and last > _num_placed(request) and last not in request.logprobs


def rows_with_logprobs(
    requests: Iterable[Request],
    rows: Int64[np.ndarray, " B"],
    num_new: Int64[np.ndarray, " B"],
    num_computed: Int64[np.ndarray, " B"],
    num_logits: Int64[np.ndarray, " B"],
) -> tuple[LogprobRows, ...]:
    """Return the tokens whose log probabilities a step computes: sampled tokens, and tokens of prompts.

    Args:
        requests: [B] the requests of the step.
        rows: see `StepInput`, as for the other arrays.
        num_new: [B]
        num_computed: [B]
        num_logits: [B]
    """
    groups: dict[tuple[int, bool], list[tuple[int, int, int, int]]] = defaultdict(list)
    ends, samples = num_new.cumsum(), num_logits.cumsum()
    for b, request in enumerate(requests):
        params, row, end = request.params, int(rows[b]), int(num_computed[b])
        if params.logprobs is not None and num_logits[b]:
            last = int(samples[b]) - 1
            groups[params.logprobs, False] += [(row, end - i, last - i, 0) for i in reversed(range(int(num_logits[b])))]
        if (num_top := params.prompt_logprobs) is not None and lacks_prompt_logprobs(request):
            first, prompt = max(end - int(num_new[b]), _num_placed(request)), request.prompt_token_ids
            groups[num_top, True] += [
                (row, position, int(ends[b]) - end + position - 1, prompt[position])
                for position in range(first + 1, min(end, len(prompt) - 1) + 1)
                if position not in request.logprobs
            ]
    return tuple(
        LogprobRows(*key, *np.array(group, dtype=np.int64).T.copy()) for key, group in sorted(groups.items()) if group
    )


def keep_logprobs(asked: Iterable[tuple[LogprobRows, list[Request]]], found: Iterable[LogprobArrays]) -> None:
    """Store the log probabilities that a step has computed.

    Args:
        asked: for each `LogprobRows` of the step, the request of each of its tokens.
        found: the log probabilities of these tokens.
    """
    for (tokens, requests), arrays in zip(asked, found, strict=True):
        columns = tokens.positions.tolist(), arrays.token_ids, arrays.logprobs, arrays.ranks.tolist()
        for request, position, *of_token in zip(requests, *columns, strict=True):
            request.logprobs[position] = tuple(of_token)


def prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    """Return the log probabilities of each token of a request's prompt; None if the request asks for none.

    The first token has None, because no logits predict it. So have the tokens of chunks and the first token after
    them: the request does not compute the logits of chunks.

    Args:
        request: a request that has ended.
    """
    if request.params.prompt_logprobs is None:
        return None
    return [request.logprobs.get(position) for position in range(len(request.prompt_token_ids))]


def _num_placed(request: Request) -> int:
    """Return the number of tokens of a request's chunks."""
    return sum(len(chunk.token_ids) for chunk in request.chunks)


def readable(of_token: TokenLogprobs, decode: Decode) -> dict[int, Logprob]:
    """Return the log probabilities at one token by token id, the token's own first, as in vLLM.

    Args:
        of_token: those that the request has collected.
        decode: returns the text of a token.
    """
    token_ids, logprobs, own_rank = of_token
    ranks = [own_rank, *range(1, len(token_ids))]
    columns = zip(token_ids.tolist(), logprobs.tolist(), ranks, strict=True)
    return {token_id: Logprob(logprob, rank, decode(token_id)) for token_id, logprob, rank in columns}
