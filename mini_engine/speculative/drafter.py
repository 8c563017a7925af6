"""Drafters guess the next tokens of running requests, and the model checks all guesses of a request in one step.

A step costs about the same for one token of a request as for a few, as long as it reads the same weights. So the core
appends the guesses to the request's tokens, computes them together, and samples after each of them. The token that is
sampled at a position depends on the seed, the position, and the tokens before it, not on how it is computed. So a guess
is right if it equals the token that is sampled at its position; then the tokens after it count, too, up to the first
wrong guess. Whatever a drafter guesses, a request gets the tokens that it gets without one, exactly in float64, and in
other dtypes as far as the logits of a token round alike with one token in the step and with several (Leviathan et al.
2023, "Fast inference from transformers via speculative decoding", with shared randomness instead of their test).
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64

from mini_engine.request import Running
from mini_engine.speculative.config import SpeculativeConfig


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens. What it guesses changes how fast a request is, and nothing else.

    Attributes:
        scout: guesses in its place as long as no step computes the guesses. It searches the known tokens, so a guess
            costs the device nothing, and the host little. None: guesses are always computed.
    """

    @property
    def scout(self) -> "Drafter | None": ...

    def propose(
        self, running: Running, rows: Int64[np.ndarray, " B"], most: Int64[np.ndarray, " B"]
    ) -> tuple[Int32[np.ndarray, "B K"], Int64[np.ndarray, " B"]]:
        """Guess the next tokens of some rows, all of whose tokens are known.

        Args:
            running: the running requests.
            rows: rows of some of them.
            most: most guesses for each, no more than fit between its known tokens and its last one.

        Returns:
            Guesses for each row, and how many of them count, which may be none.
        """

    def forget(self) -> None:
        """Forget all requests: rows and admissions are numbered anew."""


def num_accepted(
    sampled: Int[np.ndarray, "R K1"], drafted: Int[np.ndarray, "R K"], num_drafted: Int[np.ndarray, " R"]
) -> Int64[np.ndarray, " R"]:
    """Count the right guesses of each row: those before the first one that differs from the sampled token.

    Args:
        sampled: the tokens sampled at the position of each guess, and at the next one.
        drafted: the guesses.
        num_drafted: how many of them count.
    """
    right = (sampled[:, :-1] == drafted) & (np.arange(drafted.shape[1]) < num_drafted[:, None])
    return np.logical_and.accumulate(right, axis=1).sum(axis=1, dtype=np.int64)


def create_drafter(config: SpeculativeConfig) -> Drafter:
    """Build the drafter of a method that needs no model."""
    from mini_engine.speculative.ngram import NgramDrafter
    from mini_engine.speculative.suffix import SuffixDrafter

    options = config.options
    if config.method == "suffix":
        longest, factor = options["suffix_decoding_max_tree_depth"], options["suffix_decoding_max_spec_factor"]
        return SuffixDrafter(longest, options["suffix_min_length"], factor)
    return NgramDrafter(options["prompt_lookup_max"], options["prompt_lookup_min"])
