"""Masks and score modifications: functions with FlexAttention's signatures.

A `mask_mod(b, h, q_idx, kv_idx)` returns True where a query sees a key; a `score_mod(score, b, h, q_idx, kv_idx)`
returns the score to use (Dong et al. 2024, "FlexAttention: A Programming Model for Generating Optimized Attention
Kernels"). b is the index in the batch, h the query head, q_idx and kv_idx the positions of query and key; all are
integer tensors that broadcast. Masks compose with `and_masks` and `or_masks`, scores with `compose_scores`. The
compiler traces these functions. It cannot trace a type checker's wrapper, so they are lambdas or `no_type_check`.
Explained in chapter 05.
"""

from collections.abc import Callable
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@no_type_check
def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query sees the keys at or before its own position (Vaswani et al. 2017, section 3.2.3)."""
    return q_idx >= kv_idx


def sliding_window(window: int) -> MaskMod:
    """Return the causal mask limited to a window (Child et al. 2019; Beltagy et al. 2020).

    Args:
        window: keys that a query may see, its own included (the convention of transformers).
    """
    return and_masks(causal, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window)


def visible(window: int | None) -> MaskMod:
    """Return the mask of an engine's layer: causal, with a window if the layer has one.

    Args:
        window: keys that a query may see, its own included; None for all.
    """
    return causal if window is None else sliding_window(window)


def attention_sinks(window: int, num_sinks: int) -> MaskMod:
    """Return a sliding window plus the first keys of the sequence, the sinks (Xiao et al. 2023, section 3.2).

    Args:
        window: keys that a query may see in its window, its own included.
        num_sinks: number of first keys that every later query sees.
    """

    sinks = and_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < num_sinks)
    return or_masks(sliding_window(window), sinks)


def prefix_lm(prefix_len: int) -> MaskMod:
    """Return `causal`, except that every query sees the first keys (Raffel et al. 2020, section 3.2.1).

    Args:
        prefix_len: number of first keys, which every query sees.
    """

    return or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx < prefix_len)


def document(ids: Int[Tensor, " T"]) -> MaskMod:
    """Return a mask that shows each query its own document, in a batch that packs several into one sequence.

    Args:
        ids: [T] document of each token (see `document_ids`).
    """

    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def document_ids(indptr: Int[Tensor, " n"]) -> Int[Tensor, " T"]:
    """Number the documents of a ragged batch: one document index for each token.

    Args:
        indptr: [n] first token of each of the n - 1 documents, then T: the `qo_indptr` of a step.
    """
    return torch.repeat_interleave(torch.arange(len(indptr) - 1, device=indptr.device), indptr.diff())


def alibi(slopes: Float[Tensor, " H"]) -> ScoreMod:
    """Subtract `slope * distance` from the score (Press et al. 2021, section 3).

    Args:
        slopes: [H] slope of each query head.
    """

    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)


def soft_cap(cap: float) -> ScoreMod:
    """Keep the score between -cap and cap: `cap * tanh(score / cap)` (Gemma Team 2024, "Gemma 2", section 2).

    Args:
        cap: the bound that scores approach, above 0.
    """

    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def compose_scores(*score_mods: ScoreMod) -> ScoreMod:
    """Combine score_mods into one that applies them in order; without any, the score is unchanged."""

    @no_type_check
    def composed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for score_mod in score_mods:
            score = score_mod(score, b, h, q_idx, kv_idx)
        return score

    return composed
