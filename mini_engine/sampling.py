"""From logits to tokens: filters, and sampling that depends on a request's own seed alone.

Sampling adds Gumbel noise to the logits and takes the largest (Gumbel 1954; Maddison et al. 2014, "A* Sampling",
section 2): argmax(logits + g) is distributed as softmax(logits). The noise of a token is a function of
(seed, position, token id) and of nothing else, so neither the batch nor the row nor the device has a say in it
(counter-based random numbers: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mini_engine.batch import SamplingBatch


def sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    """Choose one token for each row.

    Args:
        logits: [R, V] of the rows that sample.
        batch: their parameters.

    Returns:
        [R] token ids.
    """
    if batch.seen is not None:
        logits = penalize_repetition(logits, batch.seen, batch.repetition_penalty)
    greedy = logits.argmax(-1)
    if batch.all_greedy:
        return greedy
    scaled = logits / torch.where(batch.temperature > 0, batch.temperature, 1)[:, None]
    filtered = filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p, batch.max_candidates)
    noise = gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])
    return torch.where(batch.temperature > 0, (filtered + noise).argmax(-1), greedy)


def penalize_repetition(
    logits: Float[Tensor, "R V"], seen: Bool[Tensor, "R V"], penalty: Float[Tensor, " R"]
) -> Float[Tensor, "R V"]:
    """Make tokens seen before less likely (Keskar et al. 2019, "CTRL", section 4.1, with the sign taken care of).

    Args:
        logits: [R, V].
        seen: [R, V] tokens of the prompt and of the output so far.
        penalty: [R] divides logits above 0 and multiplies those below.
    """
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def filter_logits(
    logits: Float[Tensor, "R V"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
    max_candidates: int,
) -> Float[Tensor, "R V"]:
    """Set to -inf what top-k, top-p and min-p leave out, in this order, each among what the one before kept.

    Every filter keeps the tokens from some logit upwards, so all three together are one threshold for each row.
    Tokens equal to the threshold stay.

    Args:
        logits: [R, V], divided by the temperature.
        top_k: [R] 0 keeps all.
        top_p: [R] 1 keeps all (nucleus sampling: Holtzman et al. 2020).
        min_p: [R] 0 keeps all (Nguyen et al. 2024).
        max_candidates: the largest k that any row needs sorted: 0 for none, -1 for the whole vocabulary.

    Returns:
        [R, V] the logits kept, -inf elsewhere; the largest is always kept.
    """
    # log(0) = -inf: a min_p of 0 keeps all.
    threshold = logits.amax(-1, keepdim=True) + min_p.log()[:, None]
    if max_candidates:
        vocab_size = logits.shape[-1]
        k = vocab_size if max_candidates == -1 else min(max_candidates, vocab_size)
        best = logits.topk(k).values
        rank = torch.arange(k, device=logits.device)
        in_top_k = (rank < top_k[:, None]) | (top_k == 0)[:, None]
        weights = (best - best[:, :1]).exp().masked_fill(~in_top_k, 0)
        cumulative = weights.cumsum(-1)
        # A candidate stays while those before it have not reached top_p of what top-k kept. A top_p of 1 keeps all, the
        # last ones too, whose weights are lost when they are added to the others'.
        in_top_p = (cumulative - weights < top_p[:, None] * cumulative[:, -1:]) | (top_p == 1)[:, None]
        last_kept = (in_top_k & in_top_p).sum(-1, keepdim=True).sub(1).clamp(min=0)  # of NaN logits none is kept
        filters = ((top_k > 0) | (top_p < 1))[:, None]
        threshold = torch.where(filters, torch.maximum(threshold, best.gather(-1, last_kept)), threshold)
    return logits.masked_fill(logits < threshold, -torch.inf)


def gumbel_noise(seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], vocab_size: int) -> Float[Tensor, "R V"]:
    """Standard Gumbel noise for every token, a function of (seed, position, token id).

    Args:
        seeds: [R] any 64-bit integers.
        positions: [R] position of the token that is to be sampled.
        vocab_size: V.

    Returns:
        [R, V] float32.
    """
    low, high = (seeds & 0xFFFFFFFF), (seeds >> 32) & 0xFFFFFFFF
    first = mix32(_int32(low) ^ mix32(_int32(high) ^ mix32(_int32(positions))))
    second = mix32(first + 0x3C6EF372)
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    bits = mix32(mix32(tokens ^ first[:, None]) + second[:, None])
    # 31 bits, as a uniform number in (0, 1). Its small values are the exact ones, and -log1p(-u) turns them into
    # the small exponentials that win the race, so the tail that decides is not rounded.
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2**-31
    return -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24)))


def mix32(x: Int32[Tensor, "*shape"]) -> Int32[Tensor, "*shape"]:
    """Scramble 32-bit integers so that each input bit changes half of the output bits.

    Two multiplications and three shifts: the constants are "lowbias32" of Wellons (2018, "Prospecting for hash
    functions"). Multiplication wraps around on every device; the masks make the shifts logical.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975  # 0x846ca68b as a signed number
    return x ^ ((x >> 16) & 0xFFFF)


def _int32(x: Int[Tensor, " R"]) -> Int32[Tensor, " R"]:
    """Keep the low 32 bits."""
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)
