"""Attention states: attention over a subset of the keys, in a form that merges with other subsets.

The output over a set of keys and the logarithm of the sum of their exponentiated scores (LSE) suffice to combine it
with the output over another set (Milakov and Gimelshein 2018; Dao et al. 2022, section 3.1;
Ye et al. 2025, section 2.2). Explained in chapter 02.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mini_engine.attention.naive import attention_scores
from mini_engine.ops import with_kernel


@dataclass(frozen=True)
class AttentionState:
    """Attention of n queries over a set of keys, in a form that merges with other sets.

    Attributes:
        out: attention output over these keys alone, `[n, Hq, D]`; 0 where no key is visible.
        lse: natural logarithm of the sum of exp(score), `[n, Hq]`, float32 (float64 for float64 inputs); -inf where
            no key is visible.
    """

    out: Float[Tensor, "n Hq D"]
    lse: Float[Tensor, "n Hq"]


def attention_state(
    q: Float[Tensor, "n Hq D"],
    k: Float[Tensor, "m Hk D"],
    v: Float[Tensor, "m Hk D"],
    *,
    scale: float,
    mask: Bool[Tensor, "n m"] | None = None,
    bias: Float[Tensor, "Hq n m"] | None = None,
    softcap: float | None = None,
) -> AttentionState:
    """Compute `masked_attention` and its LSE, both in float32 (float64), so that only the final output is rounded.

    The arguments are the same as for `masked_attention`; m may be 0.
    """
    scores = attention_scores(q, k, scale=scale, mask=mask, bias=bias, softcap=softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - _finite(lse)[..., None])
    out = torch.einsum("hgnm,mhd->nhgd", weights, v.to(weights.dtype))
    return AttentionState(out.reshape(q.shape), lse.flatten(0, 1).T)


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """Merge the states of two disjoint sets of keys into the state of their union.

    Each state is weighted in proportion to exp(its lse). Merging is associative and commutative up to rounding, and an
    empty state (lse -inf, out 0) is its identity element.
    """
    lse = torch.logaddexp(a.lse, b.lse)
    weight_a = torch.exp(a.lse - _finite(lse))[..., None].to(a.out.dtype)
    weight_b = torch.exp(b.lse - _finite(lse))[..., None].to(b.out.dtype)
    return AttentionState(weight_a * a.out + weight_b * b.out, lse)


def merge_all(states: Sequence[AttentionState]) -> AttentionState:
    """Merge the states of one or more disjoint sets of keys, in one pass over the stacked states."""
    lses = torch.stack([state.lse for state in states])
    outs = torch.stack([state.out for state in states])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - _finite(lse))[..., None].to(outs.dtype)
    return AttentionState((weights * outs).sum(dim=0), lse)


def with_sinks(state: AttentionState, sinks: Float[Tensor, " Hq"]) -> AttentionState:
    """Merge the state over all keys of a query with the learned sink of each head, once.

    A learned sink is a logit that takes part in the softmax and has no value (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b
    Model Card"): the weights are `softmax([scores, sink])` without the last column, and they sum to less than 1. So a
    sink is the state of a key whose score is the sink and whose value is 0, and merging it scales the output by
    `sigmoid(lse - sink)`. A head can attend to nothing in this way. Models without learned sinks put the remaining
    weight on the first tokens of the text, which StreamingLLM therefore keeps in the cache (Xiao et al. 2023,
    "Efficient streaming language models with attention sinks"). These sink tokens have keys and values, and their
    scores depend on the query. A learned sink is one number for each query head, the same for every query.

    Merge the sinks last. If they were merged with the state of each split of the keys, each split would count them.

    Args:
        state: attention of n queries over all the keys that they see.
        sinks: one logit for each query head, in any dtype; -inf: no sink.
    """
    sinks = sinks.to(state.lse.dtype)
    weight = torch.sigmoid(_finite(state.lse) - sinks)  # without keys the output is 0, whatever its weight
    return AttentionState(weight[..., None].to(state.out.dtype) * state.out, torch.logaddexp(state.lse, sinks))


@with_kernel
def merge_sinks(out: Float[Tensor, "T Hq D"], lse: Float[Tensor, "T Hq"], sinks: Float[Tensor, " Hq"]) -> None:
    """Merge the attention of queries over all their keys with the learned sinks, in place.

    Args:
        out: the output, contiguous.
        lse: base-2 logarithms of the sums of the weights, as FlashInfer's kernels return them.
        sinks: one natural logarithm for each query head.
    """
    out.copy_(with_sinks(AttentionState(out, lse * math.log(2)), sinks).out)


def chunked_attention(
    q: Float[Tensor, "n Hq D"],
    k: Float[Tensor, "m Hk D"],
    v: Float[Tensor, "m Hk D"],
    *,
    scale: float,
    chunk_size: int,
    mask: Bool[Tensor, "n m"] | None = None,
    bias: Float[Tensor, "Hq n m"] | None = None,
    softcap: float | None = None,
    merge: Callable[[AttentionState, AttentionState], AttentionState] = merge_states,
) -> AttentionState:
    """Compute `attention_state` in KV tiles of `chunk_size` keys, so that memory for scores does not grow with m.

    Args:
        chunk_size: keys per tile, at least 1; the last tile may be shorter.
        merge: combines two states; the other arguments are the same as for `masked_attention`.
    """

    def tile(start: int) -> AttentionState:
        keys = slice(start, start + chunk_size)
        own_mask = None if mask is None else mask[:, keys]
        own_bias = None if bias is None else bias[:, :, keys]
        return attention_state(q, k[keys], v[keys], scale=scale, mask=own_mask, bias=own_bias, softcap=softcap)

    return reduce(merge, map(tile, range(0, max(len(k), 1), chunk_size)))


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0: -inf - 0 gives exp(-inf) = 0, but -inf - (-inf) is NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)
