"""From logits to tokens: penalties, filters, and sampling that depends only on a request's own seed.

Sampling adds Gumbel noise to the logits and takes the largest (Gumbel 1954; Maddison et al. 2014, "A* Sampling",
section 2): argmax(logits + g) is distributed as softmax(logits). The noise of a token is a function of only (seed,
position, token id), so a request gets the same noise in any batch, in any row and on any device (counter-based random
numbers: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its logits are the same only up to
rounding, because kernels are not batch-invariant, unless the option `batch_invariant` makes them so.

These are the functions of one step, in plain PyTorch. `sampler.py` keeps what the rows of the page table need from step
to step, and runs the same computation in kernels on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mini_engine.sampling_params import SamplingParams
from mini_engine.transfer import to_device

MIN_TEMPERATURE = 1e-5  # below this, sample greedily: dividing by the temperature could overflow

# The numbers of one request, in the ranges that the sampler computes with: 12 words of 32 bits. `flags` and the counts
# belong to `sampler.py`.
FLOATS = "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
INTEGERS = "top_k", "flags", "num_edits", "num_bad_words"
RECORD_DTYPE = np.dtype([*((n, np.float32) for n in FLOATS), *((n, np.int32) for n in INTEGERS), ("seed", np.int64)])


def sampling_records(params: Sequence[SamplingParams], seeds: Sequence[int] | np.ndarray) -> np.ndarray:
    """Convert sampling parameters to a structured array, once for each request.

    Values above or below the range of float32 become its largest or its smallest positive number. A greedy request gets
    no filters, because every filter keeps the largest logit.

    Args:
        params: parameters of each request.
        seeds: seed of each request, any 64-bit integers.

    Returns:
        [N] records of RECORD_DTYPE.
    """
    records = np.zeros(len(params), dtype=RECORD_DTYPE)
    for name in FLOATS:
        values = np.array([getattr(own, name) for own in params])
        tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
        records[name] = np.where(values > 0, values.clip(tiny, largest), values)
    records["top_k"] = [min(own.top_k, 2**31 - 1) for own in params]
    records["seed"] = seeds
    is_greedy = np.array([own.temperature < MIN_TEMPERATURE for own in params])
    for name, value in {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}.items():
        records[name][is_greedy] = value
    return records


@dataclass(frozen=True)
class SamplingBatch:
    """What the R rows of logits of one step sample with.

    Attributes:
        temperature: [R] divides the logits; 0 takes the largest logit.
        top_k: [R] keep the k largest logits; 0 keeps all.
        top_p: [R] keep the smallest set of largest probabilities that reaches top_p; 1 keeps all.
        min_p: [R] keep tokens with at least min_p times the largest probability; 0 keeps all.
        seeds: [R] seed of each request.
        positions: [R] position of the token to sample.
    """

    temperature: Float[Tensor, " R"]
    top_k: Int[Tensor, " R"]
    top_p: Float[Tensor, " R"]
    min_p: Float[Tensor, " R"]
    seeds: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]

    @classmethod
    def build(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        device: torch.device | str = "cpu",
    ) -> "SamplingBatch":
        """Upload the parameters of some requests.

        Args:
            params: [R] parameters of the request of each row.
            seeds: [R] any 64-bit integers.
            positions: [R] position of the token that each row samples.
            device: device of the logits.
        """
        records = sampling_records(params, seeds)
        columns = {name: records[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        columns |= {"seeds": records["seed"], "positions": np.asarray(positions, dtype=np.int64)}
        return cls(**to_device(columns, torch.device(device)))


def sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    """Choose one token for each row: draw from softmax(logits / temperature) after the filters.

    Args:
        logits: [R, V] logits of the rows that sample, left unchanged; tokens with a logit of -inf are never drawn.
        batch: their parameters.

    Returns:
        [R] token ids, the lowest id if there are ties. A row of NaN logits gives an arbitrary token.
    """
    is_greedy = batch.temperature == 0
    best = logits.argmax(-1)
    if not logits.is_cuda and is_greedy.all():  # on a GPU, the host would have to wait for the answer
        return best
    scaled = logits / torch.where(is_greedy, 1, batch.temperature)[:, None]
    kept = filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p)
    noise = gumbel_noise(batch.seeds, batch.positions, logits.shape[-1])
    return torch.where(is_greedy, best, (kept + noise).argmax(-1))


def filter_logits(
    logits: Float[Tensor, "R V"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
) -> Float[Tensor, "R V"]:
    """Set to -inf the logits that top-k, top-p and min-p remove, in this order.

    Each filter looks only at the tokens that the previous one kept. Every filter keeps all tokens from some logit
    upward, so the three together are one threshold per row. Tokens equal to the threshold are kept.

    Args:
        logits: [R, V], divided by the temperature.
        top_k: [R] 0 keeps all.
        top_p: [R] 1 keeps all (nucleus sampling: Holtzman et al. 2020).
        min_p: [R] 0 keeps all (Nguyen et al. 2024).

    Returns:
        [R, V] the logits of kept tokens, -inf elsewhere. The largest logit is always kept.
    """
    # log(0) = -inf: a min_p of 0 keeps all.
    threshold = logits.amax(-1, keepdim=True) + min_p.log()[:, None]
    is_ranked = (top_k > 0) | (top_p < 1)
    if logits.is_cuda:  # whatever the parameters, the same kernels, without waiting for the device
        ranked = _rank_threshold(logits, top_k, top_p, logits.shape[-1])
        threshold = torch.where(is_ranked[:, None], torch.maximum(threshold, ranked), threshold)
    elif is_ranked.any():  # sort only the rows that need it, and only as far as they need it
        threshold, rows = threshold.clone(), is_ranked.nonzero()[:, 0]
        k = logits.shape[-1] if (top_k[rows] == 0).any() else min(int(top_k.max()), logits.shape[-1])
        ranked = _rank_threshold(logits[rows], top_k[rows], top_p[rows], k)
        threshold[rows] = torch.maximum(threshold[rows], ranked)
    return logits.masked_fill(logits < threshold, -torch.inf)


def _rank_threshold(
    logits: Float[Tensor, "R V"], top_k: Int[Tensor, " R"], top_p: Float[Tensor, " R"], num_sorted: int
) -> Float[Tensor, "R 1"]:
    """Return the smallest logit that top-k and top-p keep, of rows that need at most `num_sorted` logits sorted."""
    best = logits.topk(num_sorted).values
    rank = torch.arange(num_sorted, device=logits.device)
    in_top_k = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    weights = (best - best[:, :1]).exp().masked_fill(~in_top_k, 0)
    cumulative = weights.cumsum(-1)
    # Keep a candidate while the sum before it has not reached top_p of what top-k kept. A top_p of 1 keeps all
    # candidates, even those whose weights are too small to change a float32 sum.
    in_top_p = (cumulative - weights < top_p[:, None] * cumulative[:, -1:]) | (top_p == 1)[:, None]
    last_kept = (in_top_k & in_top_p).sum(-1, keepdim=True).sub(1).clamp(min=0)  # NaN logits keep none
    return best.gather(-1, last_kept)


def penalize(
    logits: Float[Tensor, "R V"],
    in_prompt: Bool[Tensor, "R V"],
    counts: Int[Tensor, "R V"],
    repetition_penalty: Float[Tensor, " R"],
    presence_penalty: Float[Tensor, " R"],
    frequency_penalty: Float[Tensor, " R"],
) -> Float[Tensor, "R V"]:
    """Make tokens that a request already has less likely.

    The repetition penalty (Keskar et al. 2019, "CTRL", section 4.1) divides positive logits and multiplies negative
    ones, so that both decrease. The other two penalties are subtracted.

    Args:
        logits: [R, V], left unchanged.
        in_prompt: [R, V] whether the prompt has the token.
        counts: [R, V] how often the output has it so far.
        repetition_penalty: [R] for tokens of prompt and output; 1 does nothing.
        presence_penalty: [R] for tokens of the output; 0 does nothing.
        frequency_penalty: [R] for each time that the output has the token; 0 does nothing.
    """
    factor, occurs = repetition_penalty[:, None], counts > 0
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_prompt | occurs, repeated, logits)
    return logits - frequency_penalty[:, None] * counts - presence_penalty[:, None] * occurs


def gumbel_noise(seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], vocab_size: int) -> Float[Tensor, "R V"]:
    """Compute standard Gumbel noise for every token, a function of (seed, position, token id).

    Args:
        seeds: [R] any 64-bit integers.
        positions: [R] position of the token to sample.
        vocab_size: V.

    Returns:
        [R, V] float32.
    """
    low, high = (seeds & 0xFFFFFFFF), (seeds >> 32) & 0xFFFFFFFF
    first = mix32(_int32(low) ^ mix32(_int32(high) ^ mix32(_int32(positions))))
    second = mix32(first + 0x3C6EF372)
    # Working in blocks of tokens keeps the intermediate arrays in a CPU's cache: three times faster if V is large.
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=seeds.device)
    blocks = tokens.split(max(1, 2**16 // max(1, len(seeds))))
    return torch.cat([_gumbel(mix32(mix32(block ^ first[:, None]) + second[:, None])) for block in blocks], dim=-1)


def _gumbel(bits: Int32[Tensor, "R block"]) -> Float[Tensor, "R block"]:
    """Turn random bits into standard Gumbel noise."""
    # 31 bits make a uniform number in (0, 1). Small numbers are exact, and -log1p(-u) maps them to the small
    # exponentials that decide the draw, so the noise of likely winners is not rounded.
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
