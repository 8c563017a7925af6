"""Guesses of requests whose output changes the logits not only through the model: penalties, bad words, grammars.

The tokens after the first guess, the second one, and so on are sampled in one step, but each of them from other logits:
a penalty counts the guesses before it, and a grammar has read them. So each guess has a branch, which is a row of the
sampler with a copy of the request's state that has also counted the guesses up to this one. After the step, the branch
of the last right guess is the request's state. Explained in chapter 14.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Int64

from mini_engine.errors import RequestError
from mini_engine.ragged import members
from mini_engine.request import Running

MOST_BRANCHES = 64  # in a step; a branch takes as much memory as a row of the sampler
NOTHING_KEPT = np.zeros((0, 2), dtype=np.int64)
Masks = Sequence[Int32[np.ndarray, " words"]]


class Branches(NamedTuple):
    """The branches of a step, by request.

    Attributes:
        rows: [F] the request's row.
        places: [F] index among the step's rows of logits.
        token_ids: [F, K] guesses of the request.
        counts: [F] how many of them the branch has counted.
        positions: [F] position of the first guess.
        masked: [M] branches of requests with a grammar.
        masks: [M, V / 32] which tokens each of these may sample, see `TokenMasks`.
    """

    rows: Int64[np.ndarray, " F"]
    places: Int64[np.ndarray, " F"]
    token_ids: Int32[np.ndarray, "F K"]
    counts: Int64[np.ndarray, " F"]
    positions: Int64[np.ndarray, " F"]
    masked: Int64[np.ndarray, " M"]
    masks: Int32[np.ndarray, "M words"] | None

    def find(self, rows: Int64[np.ndarray, " n"], counts: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return the branch that has counted so many guesses of each row, or -1."""
        found = (self.rows == rows[:, None]) & (self.counts == counts[:, None])
        return np.where(found.any(axis=1), found.argmax(axis=1), -1)


def possible_guesses(
    running: Running,
    rows: Int64[np.ndarray, " B"],
    token_ids: Int32[np.ndarray, "B K"],
    counts: Int64[np.ndarray, " B"],
) -> tuple[Int64[np.ndarray, " B"], dict[int, Masks]]:
    """Drop guesses that a grammar does not allow, and those from an end token on.

    Args:
        running: the running requests.
        rows: rows all of whose tokens are known.
        token_ids: guesses for each row.
        counts: how many of them count.

    Returns:
        How many are left, and for each row with a grammar and guesses, what may follow each guess.
    """
    counts, masks = counts.copy(), dict[int, Masks]()
    for i in np.flatnonzero((counts > 0) & (running.waits[rows] > 0)).tolist():
        own = _masks_after(running, int(rows[i]), token_ids[i, : counts[i]].tolist())
        counts[i] = len(own)
        if own:
            masks[int(rows[i])] = own
    return counts, masks


def _masks_after(running: Running, row: int, guesses: list[int]) -> Masks:
    """Return what may follow each guess of a row with a grammar, up to the first guess that is not allowed."""
    request, masks = running.requests[row], list[Int32[np.ndarray, " words"]]()
    assert request is not None and request.grammar is not None, f"row {row} has no grammar"
    try:
        read_known(running, row)
        grammar = request.grammar.copy()
        mask = grammar.mask()
        for token in guesses:
            if token in request.end_token_ids or not mask[token // 32] >> (token % 32) & 1:
                break
            grammar.accept([token])
            mask = grammar.mask()
            masks.append(mask)
    except RequestError:  # the step without this guess raises it, if the output has come as far
        pass
    return masks


def read_known(running: Running, row: int) -> None:
    """Let the grammar of a row read the tokens that it has not seen yet.

    Raises:
        RequestError: if they do not follow it.
    """
    request = running.requests[row]
    assert request is not None and request.grammar is not None, f"row {row} waits without a grammar"
    start = int(running.num_prompt[row]) + request.grammar.num_accepted
    request.grammar.accept(running.tokens[row, start : running.num_known[row]].tolist())


def branches_of(
    rows: Int64[np.ndarray, " B"],
    num_logits: Int64[np.ndarray, " B"],
    running: Running,
    masks: Mapping[int, Masks],
) -> Branches | None:
    """Collect the branches of a step; None if it has none.

    Args:
        rows: row of each request.
        num_logits: rows of logits of each: one, and one for each guess.
        running: the running requests; their guesses follow the known tokens.
        masks: from `possible_guesses`.
    """
    is_branched = (num_logits > 1) & (running.branches[rows] > 0)
    if not np.count_nonzero(is_branched):
        return None
    own, first = rows[is_branched], (num_logits.cumsum() - num_logits)[is_branched]
    of, index = members(num_logits[is_branched] - 1)
    masked = np.flatnonzero(running.waits[own[of]])
    return Branches(
        rows=own[of],
        places=first[of] + 1 + index,
        token_ids=running.guesses(own, int(index.max()) + 1)[of],
        counts=index + 1,
        positions=running.num_known[own[of]],
        masked=masked,
        masks=np.stack([masks[int(own[of[f]])][index[f]] for f in masked]) if len(masked) else None,
    )
