"""Homework of chapter 02: a softmax that cannot overflow, attention in one pass, and attention results that merge.

One of these functions is a part of the engine. Once its checks are green,
`mini-engine generate --homework --attn-backend chunked` cuts every conversation into chunks of 64 keys and puts them
together with your `merge_states`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mini_engine.attention.state import AttentionState


def softmax_with_lse(scores: Float[Tensor, "*rows m"]) -> tuple[Float[Tensor, "*rows m"], Float[Tensor, " *rows"]]:
    """Softmax over the last axis, and the natural logarithm of the sum of exp(score) of each row (its LSE).

    No score may make it overflow or lose everything: rows of scores near 1000, near -1000 or both are fine. A score of
    -inf is a hidden key: its weight is 0. A row of nothing but -inf has the weights 0 and the LSE -inf. There is at
    least one score in a row.

    Compute in float32 (in float64 for float64 inputs) and return that dtype. Leave `scores` unchanged. Build it from
    maximum, exp, sum and log: do not call softmax, log_softmax, logsumexp or logaddexp.

    Example: two scores whose exponentials are 1 and 3. They sum to 4.

        >>> weights, lse = softmax_with_lse(torch.tensor([0.0, math.log(3)]))
        >>> [round(weight, 4) for weight in weights.tolist()], round(lse.exp().item(), 4)
        ([0.25, 0.75], 4.0)
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # 0 in place of -inf: a row without visible keys would otherwise compute -inf - (-inf), which is NaN.
    largest = _finite(scores.amax(dim=-1, keepdim=True))
    exps = torch.exp(scores - largest)
    total = exps.sum(dim=-1, keepdim=True)
    weights = exps / total.masked_fill(total == 0, 1.0)
    return weights, (largest + total.log()).squeeze(-1)


def online_attention(
    q: Float[Tensor, "n D"],
    chunks: Iterable[tuple[Float[Tensor, "c D"], Float[Tensor, "c D"], Bool[Tensor, "n c"]]],
    *,
    scale: float,
) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """Attention of one head over keys that arrive in chunks, in one pass: each chunk is seen once and then gone.

    A chunk is (keys, values, mask): c keys of D numbers, as many values, and True where a query sees a key. Chunks
    differ in length and hold at least one key each. A query may see no key of a chunk, of the first chunks, or of all,
    and there may be no chunk. `chunks` can be iterated once. Its tensors are valid until you ask for the next one: then
    their memory is used again. What you keep between chunks does not grow with the number of keys.

    The scores are q·k times `scale`. Return the output and the LSE of all visible scores (natural logarithm), both in
    float32 (float64 for float64 inputs), which is also what you compute in. A query that sees no key at all has the
    output 0 and the LSE -inf.

    Example: scores 0 and log 3 in two chunks. The weights are 1/4 and 3/4, the exponentials sum to 4.

        >>> q, seen = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
        >>> chunks = [(torch.tensor([[0.0]]), torch.tensor([[4.0]]), seen),
        ...           (torch.tensor([[math.log(3)]]), torch.tensor([[8.0]]), seen)]
        >>> out, lse = online_attention(q, iter(chunks), scale=1.0)
        >>> round(out.item(), 4), round(lse.exp().item(), 4)
        (7.0, 4.0)
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    out = torch.zeros_like(q)
    total = q.new_zeros(len(q))
    largest = q.new_full((len(q),), -math.inf)
    for k, v, mask in chunks:
        scores = (q @ k.to(q.dtype).T * scale).masked_fill(~mask, -math.inf)
        risen = torch.maximum(largest, scores.amax(dim=-1))
        exps = torch.exp(scores - _finite(risen)[:, None])
        # What was summed under the old maximum, expressed under the new one.
        shrink = torch.exp(largest - _finite(risen))
        total = shrink * total + exps.sum(dim=-1)
        out = shrink[:, None] * out + exps @ v.to(q.dtype)
        largest = risen
    # One division at the end, instead of one for each chunk.
    return out / total.masked_fill(total == 0, 1.0)[:, None], largest + total.log()


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    A state holds `out` [n, Hq, D], the attention output over its keys, and `lse` [n, Hq], the natural logarithm of the
    sum of exp(score) over them. Every query and head is merged on its own. A state that saw no key has out 0 and lse
    -inf, for all queries or for some: merging it changes nothing, and two of them make another. An lse may be as
    large as 1000 or as small as -1000. Leave both states unchanged; keep their dtypes.

    Example: exponentials that sum to 4 with the output 6, and exponentials that sum to 8 with the output 3. Of the 12,
    4 belong to the first and 8 to the second: 4/12 · 6 + 8/12 · 3 = 4.

        >>> a = AttentionState(torch.full((1, 1, 1), 6.0), torch.full((1, 1), math.log(4)))
        >>> b = AttentionState(torch.full((1, 1, 1), 3.0), torch.full((1, 1), math.log(8)))
        >>> merged = merge_states(a, b)
        >>> round(merged.out.item(), 4), round(merged.lse.exp().item(), 4)
        (4.0, 12.0)
    """
    lse = torch.logaddexp(a.lse, b.lse)
    weight_a = torch.exp(a.lse - _finite(lse))[..., None].to(a.out.dtype)
    weight_b = torch.exp(b.lse - _finite(lse))[..., None].to(b.out.dtype)
    return AttentionState(weight_a * a.out + weight_b * b.out, lse)


def split_kv_decode(
    q: Float[Tensor, "1 Hq D"],
    k: Float[Tensor, "m Hk D"],
    v: Float[Tensor, "m Hk D"],
    *,
    num_splits: int,
    worker: Callable[[Tensor, Tensor, Tensor], AttentionState],
) -> AttentionState:
    """Attention of one query over m keys, the keys being divided among `num_splits` workers that run side by side.

    `worker(q, k, v)` returns the attention state of q over the keys that it is given, and an empty state for no keys.
    (Yours is called in a loop; on a GPU each call would be a thread block.) Give every key to exactly one worker. Call
    no more workers than `num_splits`, and give none more than ceil(m / num_splits) keys: the longest share decides
    when all are done. m may be smaller than num_splits, and it may be 0. You may call merge_states.

    Example: five keys and two workers. All scores are 0, so the output is the mean of the values.

        >>> from mini_engine.attention.state import attention_state
        >>> def worker(q, k, v):
        ...     return attention_state(q, k, v, scale=1.0)
        >>> q, k = torch.zeros(1, 1, 1), torch.zeros(5, 1, 1)
        >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(5, 1, 1)
        >>> round(split_kv_decode(q, k, v, num_splits=2, worker=worker).out.item(), 4)
        3.0
    """
    m = k.shape[0]
    # Rounded down, consecutive multiples of m / num_splits lie at most ceil(m / num_splits) apart.
    bounds = [m * i // num_splits for i in range(num_splits + 1)]
    return reduce(merge_states, [worker(q, k[a:b], v[a:b]) for a, b in pairwise(bounds)])


def merge_tree(
    states: Sequence[AttentionState], merge: Callable[[AttentionState, AttentionState], AttentionState]
) -> AttentionState:
    """Challenge: merge S states in ceil(log2 S) calls of `merge`.

    A call of `merge` is one kernel launch, and works on all rows at once, however many there are: rows do not know
    which state they came from. So one call can merge many pairs of states. All states have the same shapes; there
    is at least one, and S need not be a power of two.

    Example: four states with the outputs 1 to 4 and equal weights, in two calls.

        >>> from mini_engine.attention.state import merge_states as merge
        >>> calls = []
        >>> def counted(a, b):
        ...     calls.append(a.lse.shape[0])
        ...     return merge(a, b)
        >>> states = [AttentionState(torch.full((1, 1, 1), float(i)), torch.zeros(1, 1)) for i in (1, 2, 3, 4)]
        >>> round(merge_tree(states, counted).out.item(), 4), len(calls)
        (2.5, 2)
    """
    n, count = states[0].lse.shape[0], len(states)
    out = torch.cat([state.out for state in states])  # [S * n, Hq, D]: state i owns the rows from i * n
    lse = torch.cat([state.lse for state in states])
    while count > 1:
        pairs = count // 2
        a, b, rest = slice(0, pairs * n), slice(pairs * n, 2 * pairs * n), slice(2 * pairs * n, None)
        merged = merge(AttentionState(out[a], lse[a]), AttentionState(out[b], lse[b]))
        # Of an odd number the last state waits for the next level.
        out, lse = torch.cat([merged.out, out[rest]]), torch.cat([merged.lse, lse[rest]])
        count -= pairs
    return AttentionState(out, lse)


def _finite(x: Tensor) -> Tensor:
    """0 in place of -inf: subtracted from -inf it leaves exp(-inf) = 0, where -inf would leave exp(NaN)."""
    return x.masked_fill(x == -math.inf, 0.0)
