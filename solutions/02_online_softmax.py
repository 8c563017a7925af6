"""Homework of chapter 02: safe softmax, one-pass attention, and states that merge.

One of these functions is a part of the engine. Once its checks pass,
`mini-engine generate --homework --attn-backend chunked` splits every conversation into
tiles of 64 keys and merges their states with your `merge_states`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mini_engine.attention.state import AttentionState

Mask = Bool[Tensor, "n c"]


def softmax_with_lse(
    scores: Float[Tensor, "*rows m"],
) -> tuple[Float[Tensor, "*rows m"], Float[Tensor, " *rows"]]:
    """Compute the softmax over the last axis, and the log-sum-exp (LSE) of each row.

    The LSE is the natural logarithm of the sum of exp(score). Scores near 1000, near
    -1000, or both in different rows must neither overflow nor underflow. A score of
    -inf belongs to a masked key: its weight is 0. A row that is entirely -inf has the
    weights 0 and the LSE -inf. Every row has at least one score.

    Compute in float32 (in float64 for float64 inputs) and return that dtype. Leave
    `scores` unchanged, including its -inf. Build the result from maximum, exp, sum and
    log: do not call softmax, log_softmax, logsumexp or logaddexp.

    Example: two scores whose exponentials are 1 and 3. They sum to 4.

        >>> weights, lse = softmax_with_lse(torch.tensor([0.0, math.log(3)]))
        >>> [round(weight, 4) for weight in weights.tolist()]
        [0.25, 0.75]
        >>> round(lse.exp().item(), 4)
        4.0
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # 0 in place of -inf: a row without visible keys would compute -inf - (-inf).
    largest = _finite(scores.amax(dim=-1, keepdim=True))
    exps = torch.exp(scores - largest)
    total = exps.sum(dim=-1, keepdim=True)
    weights = exps / total.masked_fill(total == 0, 1.0)
    return weights, (largest + total.log()).squeeze(-1)


def online_attention(
    q: Float[Tensor, "n D"],
    tiles: Iterable[tuple[Float[Tensor, "c D"], Float[Tensor, "c D"], Mask]],
    *,
    scale: float,
) -> tuple[Float[Tensor, "n D"], Float[Tensor, " n"]]:
    """Compute attention of one head over KV tiles, in one pass over the tiles.

    A tile is (keys, values, mask): c keys of D components, c values, and a mask that is
    True where a query attends to a key. Tiles differ in length and hold at least one
    key each. Any tile may be masked for some queries or for all, and there may be no
    tiles.

    `tiles` can be iterated only once. The tensors of a tile are valid until you ask for
    the next tile, which reuses their memory. The memory that you keep between tiles
    must not grow with the number of keys.

    The scores are q·k times `scale`. Return the output and the LSE of all visible
    scores (natural logarithm), both in float32 (float64 for float64 inputs), and
    compute in that dtype. A query without visible keys has the output 0 and the LSE
    -inf.

    Example: the scores 0 and log 3 in two tiles. The weights are 1/4 and 3/4, and the
    exponentials sum to 4.

        >>> q, visible = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
        >>> first = torch.tensor([[0.0]]), torch.tensor([[4.0]]), visible
        >>> second = torch.tensor([[math.log(3)]]), torch.tensor([[8.0]]), visible
        >>> out, lse = online_attention(q, iter([first, second]), scale=1.0)
        >>> round(out.item(), 4), round(lse.exp().item(), 4)
        (7.0, 4.0)
    """
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    out = torch.zeros_like(q)
    total = q.new_zeros(len(q))
    largest = q.new_full((len(q),), -math.inf)
    for k, v, mask in tiles:
        scores = (q @ k.to(q.dtype).T * scale).masked_fill(~mask, -math.inf)
        new = torch.maximum(largest, scores.amax(dim=-1))
        exps = torch.exp(scores - _finite(new)[:, None])
        # The sums so far are relative to the old maximum: rescale them to the new one.
        rescale = torch.exp(largest - _finite(new))
        total = rescale * total + exps.sum(dim=-1)
        out = rescale[:, None] * out + exps @ v.to(q.dtype)
        largest = new
    # One division at the end instead of one per tile.
    return out / total.masked_fill(total == 0, 1.0)[:, None], largest + total.log()


def merge_states(a: AttentionState, b: AttentionState) -> AttentionState:
    """Merge the attention states of two disjoint sets of keys.

    A state holds `out` [n, Hq, D], the attention output over its keys, and `lse`
    [n, Hq], the natural logarithm of the sum of exp(score) over them. Every query and
    head is merged independently. A query without visible keys has out 0 and LSE -inf:
    merging it in changes nothing, and merging two such states gives out 0 and LSE -inf.
    An LSE may be as large as 1000 or as small as -1000, both within one state. `out`
    and `lse` keep their dtypes, which may differ: a bfloat16 `out` can come with a
    float32 `lse`. Leave both states unchanged.

    Example: exponentials that sum to 4 with the output 6, and exponentials that sum to
    8 with the output 3. Of the total of 12, 4 belong to the first state and 8 to the
    second: 4/12 · 6 + 8/12 · 3 = 4.

        >>> a = AttentionState(torch.tensor([[[6.0]]]), torch.tensor([[math.log(4)]]))
        >>> b = AttentionState(torch.tensor([[[3.0]]]), torch.tensor([[math.log(8)]]))
        >>> merged = merge_states(a, b)
        >>> round(merged.out.item(), 4), round(merged.lse.exp().item(), 4)
        (4.0, 12.0)
    """
    lse = torch.logaddexp(a.lse, b.lse)
    share_a = torch.exp(a.lse - _finite(lse))[..., None].to(a.out.dtype)
    share_b = torch.exp(b.lse - _finite(lse))[..., None].to(b.out.dtype)
    return AttentionState(share_a * a.out + share_b * b.out, lse)


def split_kv_decode(
    q: Float[Tensor, "1 Hq D"],
    k: Float[Tensor, "m Hk D"],
    v: Float[Tensor, "m Hk D"],
    *,
    num_splits: int,
    worker: Callable[[Tensor, Tensor, Tensor], AttentionState],
) -> AttentionState:
    """Compute attention of one query with the keys divided among parallel workers.

    `worker(q, k, v)` returns the attention state of q over the keys that it receives,
    and an empty state for no keys. (You call it in a loop; on a GPU each call would be
    a thread block.) Pass every key to exactly one worker. Call at most `num_splits`
    workers, and pass none of them more than ceil(m / num_splits) keys, because the
    longest share determines the run time. m may be smaller than num_splits, and it may
    be 0. You may call merge_states.

    Example: five keys and two workers. All scores are 0, so the output is the mean of
    the values.

        >>> from mini_engine.attention.state import attention_state
        >>> def worker(q, k, v):
        ...     return attention_state(q, k, v, scale=1.0)
        >>> q, k = torch.zeros(1, 1, 1), torch.zeros(5, 1, 1)
        >>> v = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(5, 1, 1)
        >>> state = split_kv_decode(q, k, v, num_splits=2, worker=worker)
        >>> round(state.out.item(), 4)
        3.0
    """
    m = k.shape[0]
    # Multiples of m / num_splits, rounded down: at most ceil(m / num_splits) apart.
    bounds = [m * i // num_splits for i in range(num_splits + 1)]
    states = [worker(q, k[a:b], v[a:b]) for a, b in pairwise(bounds)]
    return reduce(merge_states, states)


def merge_tree(
    states: Sequence[AttentionState],
    merge: Callable[[AttentionState, AttentionState], AttentionState],
) -> AttentionState:
    """Challenge: merge S states in ceil(log2 S) calls of `merge`.

    A call of `merge` is one kernel launch. It merges all rows at once, however many
    there are, and each row independently of the others, so one call can merge many
    pairs of states. All states have the same shapes. There is at least one state, and S
    need not be a power of two. Leave the states unchanged.

    Example: four states with the outputs 1 to 4 and equal LSEs, in two calls.

        >>> from mini_engine.attention.state import merge_states as merge
        >>> calls = []
        >>> def counted(a, b):
        ...     calls.append(a.lse.shape[0])
        ...     return merge(a, b)
        >>> outs = [torch.full((1, 1, 1), float(i)) for i in (1, 2, 3, 4)]
        >>> states = [AttentionState(out, torch.zeros(1, 1)) for out in outs]
        >>> round(merge_tree(states, counted).out.item(), 4), len(calls)
        (2.5, 2)
    """
    n, count = states[0].lse.shape[0], len(states)
    # [S * n, Hq, D]: state i owns the rows from i * n.
    out = torch.cat([state.out for state in states])
    lse = torch.cat([state.lse for state in states])
    while count > 1:
        pairs = count // 2
        half = pairs * n  # the rows of the first state of every pair
        a = AttentionState(out[:half], lse[:half])
        b = AttentionState(out[half : 2 * half], lse[half : 2 * half])
        merged = merge(a, b)
        # If count is odd, the last state waits for the next level.
        out = torch.cat([merged.out, out[2 * half :]])
        lse = torch.cat([merged.lse, lse[2 * half :]])
        count -= pairs
    return AttentionState(out, lse)


def _finite(x: Tensor) -> Tensor:
    """Replace -inf with 0: exp(-inf - 0) is 0, but exp(-inf - (-inf)) is NaN."""
    return x.masked_fill(x == -math.inf, 0.0)
