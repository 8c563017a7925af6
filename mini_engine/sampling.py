"""From logits to tokens: penalty, filters, and sampling that depends only on a request's own seed.

Sampling adds Gumbel noise to the logits and takes the largest (Gumbel 1954; Maddison et al. 2014, "A* Sampling",
section 2): argmax(logits + g) is distributed as softmax(logits). The noise of a token is a function of only (seed,
position, token id), so a request gets the same noise in any batch, in any row and on any device (counter-based random
numbers: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Its logits are the same only up to
rounding: kernels are not batch-invariant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mini_engine.sampling_params import SamplingParams
from mini_engine.transfer import HAS_TRITON, to_device

MIN_TEMPERATURE = 1e-5  # below this, sample greedily: dividing by the temperature could overflow

# The sampling parameters of one request, in the ranges that the sampler computes with.
SAMPLING_DTYPE = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
    ]
)


def sampling_columns(params: Sequence[SamplingParams]) -> np.ndarray:
    """Convert sampling parameters to a structured array, once for each request.

    Values above or below the range of float32 become its largest or its smallest positive number.

    Args:
        params: parameters of each request.

    Returns:
        [N] records of SAMPLING_DTYPE.
    """
    limits = np.finfo(np.float32)
    smallest, largest = float(limits.tiny), float(limits.max)

    def in_range(x: float) -> float:
        return min(max(x, smallest), largest) if x > 0 else 0.0

    records = [
        (
            in_range(p.temperature) if p.temperature >= MIN_TEMPERATURE else 0.0,
            min(p.top_k, 2**31),
            *(in_range(x) for x in (p.top_p, p.min_p, p.repetition_penalty)),
        )
        for p in params
    ]
    return np.array(records, dtype=SAMPLING_DTYPE)


@dataclass(frozen=True)
class FilteredRows:
    """Rows whose filters need the same amount of sorting.

    Attributes:
        rows: [F] their indices in the batch.
        max_candidates: most logits that any of these rows needs sorted: 0 for none, -1 for the whole vocabulary.
    """

    rows: Int[Tensor, " F"]
    max_candidates: int


@dataclass
class SamplingBatch:
    """Sampling parameters of the R rows of logits of one step.

    While the same requests run, only `positions` and `seen` change from one step to the next.

    Attributes:
        temperature: [R] divides the logits; 0 takes the largest logit.
        top_k: [R] keep the k largest logits; 0 keeps all.
        top_p: [R] keep the smallest set of largest probabilities that reaches top_p; 1 keeps all.
        min_p: [R] keep tokens with at least min_p times the largest probability; 0 keeps all.
        repetition_penalty: [R] divides positive and multiplies negative logits of tokens seen before; 1 does nothing.
        seeds: [R] seed of each request.
        positions: [R] position of the token to sample.
        penalized_rows: [P] rows whose repetition penalty is not 1.
        seen: [P, V] for each of `penalized_rows`, the tokens of its prompt and output so far; None if P is 0.
        filters: the rows that some filter changes, in at most three groups; greedy rows are in no group.
        all_greedy: every temperature is 0. A host-side flag: the CPU's sampler skips the noise.
    """

    temperature: Float[Tensor, " R"]
    top_k: Int[Tensor, " R"]
    top_p: Float[Tensor, " R"]
    min_p: Float[Tensor, " R"]
    repetition_penalty: Float[Tensor, " R"]
    seeds: Int[Tensor, " R"]
    positions: Int[Tensor, " R"]
    penalized_rows: Int[Tensor, " P"]
    seen: Bool[Tensor, "P V"] | None
    filters: tuple[FilteredRows, ...]
    all_greedy: bool

    @classmethod
    def build(
        cls,
        columns: np.ndarray,
        seeds: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        seen: Bool[Tensor, "P V"] | None = None,
        device: torch.device | str = "cpu",
    ) -> "SamplingBatch":
        """Upload the rows' parameters and find the rows that need more than a temperature.

        Args:
            columns: [R] records of SAMPLING_DTYPE, from `sampling_columns`.
            seeds: [R] any 64-bit integers.
            positions: [R] position of the token that each row samples.
            seen: see the class.
            device: device of the logits.

        Raises:
            ValueError: if `seen` does not have one row for each row with a repetition penalty.
        """
        temperature, top_k = columns["temperature"], columns["top_k"]
        (penalized_rows,) = np.nonzero(columns["repetition_penalty"] != 1)
        if len(penalized_rows) != (0 if seen is None else len(seen)):
            given = "is None" if seen is None else f"has {len(seen)} rows"
            raise ValueError(f"{len(penalized_rows)} rows have a repetition penalty, but seen {given}")
        arrays = {name: columns[name] for name in SAMPLING_DTYPE.names or ()} | {
            "seeds": np.asarray(seeds, dtype=np.int64),
            "positions": np.asarray(positions, dtype=np.int64),
            "penalized_rows": penalized_rows,
        }
        # Number of largest logits that a row's filters need sorted; -1 for all. Each kind of row is filtered
        # separately.
        candidates = np.where(top_k > 0, top_k, np.where(columns["top_p"] < 1, -1, 0))
        is_filtered = (temperature > 0) & ((candidates != 0) | (columns["min_p"] > 0))
        groups = {
            f"filtered rows, kind {kind}": np.flatnonzero(is_filtered & (np.sign(candidates) == kind))
            for kind in (-1, 0, 1)
        }
        moved = to_device(arrays | groups, torch.device(device))
        return cls(
            **{name: moved[name] for name in arrays},
            seen=seen,
            filters=tuple(
                FilteredRows(moved[name], max_candidates=int(candidates[rows].max()))
                for name, rows in groups.items()
                if len(rows)
            ),
            all_greedy=bool((temperature == 0).all()),
        )


def sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    """Choose one token for each row.

    Args:
        logits: [R, V] logits of the rows that sample.
        batch: their parameters.

    Returns:
        [R] token ids. A row of NaN logits gives an arbitrary token.
    """
    logits = apply_filters(penalize_repetition(logits, batch), batch)
    if logits.is_cuda and logits.dtype != torch.float64 and HAS_TRITON:
        from mini_engine.kernels import gumbel_argmax as kernels

        return kernels.gumbel_argmax(logits, batch.temperature, batch.seeds, batch.positions)
    if batch.all_greedy:
        return logits.argmax(-1)
    return gumbel_argmax(logits, batch.temperature, batch.seeds, batch.positions)


def gumbel_argmax(
    logits: Float[Tensor, "R V"],
    temperature: Float[Tensor, " R"],
    seeds: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """Draw each row's token from softmax(logits / temperature), or take the largest logit at temperature 0.

    This is the reference for the kernel in `kernels/gumbel_argmax.py`.

    Args:
        logits: [R, V]; tokens with a logit of -inf are never drawn.
        temperature: [R] 0 or more.
        seeds: [R] any 64-bit integers.
        positions: [R] position of the token to sample.

    Returns:
        [R] token ids, the lowest id if there are ties.
    """
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1, temperature)[:, None]
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    return torch.where(is_greedy, logits.argmax(-1), (scaled + noise).argmax(-1))


def penalize_repetition(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Float[Tensor, "R V"]:
    """Make tokens seen before less likely, in the rows that ask for it (Keskar et al. 2019, "CTRL", section 4.1).

    Positive logits are divided by the penalty and negative ones multiplied, so that both decrease.

    Args:
        logits: [R, V], left unchanged.
        batch: their parameters.

    Returns:
        [R, V] new logits, at least float32; `logits` itself if no row has a penalty.
    """
    if batch.seen is None:
        return logits
    rows = batch.penalized_rows
    before, factor = logits[rows], batch.repetition_penalty[rows][:, None]
    after = torch.where(batch.seen, torch.where(before > 0, before / factor, before * factor), before)
    return logits.to(after.dtype).index_copy(0, rows, after)


def apply_filters(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Float[Tensor, "R V"]:
    """Set to -inf the logits that each row's filters remove.

    Args:
        logits: [R, V], not yet divided by the temperature; left unchanged.
        batch: their parameters.

    Returns:
        [R, V] new logits; `logits` itself if no row has a filter.
    """
    filtered = logits.clone() if batch.filters else logits
    for group in batch.filters:
        rows = group.rows
        scaled = logits[rows] / batch.temperature[rows][:, None]
        kept = filter_logits(scaled, batch.top_k[rows], batch.top_p[rows], batch.min_p[rows], group.max_candidates)
        filtered[rows] = logits[rows].masked_fill(kept == -torch.inf, -torch.inf)
    return filtered


def filter_logits(
    logits: Float[Tensor, "R V"],
    top_k: Int[Tensor, " R"],
    top_p: Float[Tensor, " R"],
    min_p: Float[Tensor, " R"],
    max_candidates: int,
) -> Float[Tensor, "R V"]:
    """Set to -inf the logits that top-k, top-p and min-p remove, in this order.

    Each filter looks only at the tokens that the previous one kept. Every filter keeps all tokens from some logit
    upward, so the three together are one threshold per row. Tokens equal to the threshold are kept.

    Args:
        logits: [R, V], divided by the temperature.
        top_k: [R] 0 keeps all.
        top_p: [R] 1 keeps all (nucleus sampling: Holtzman et al. 2020).
        min_p: [R] 0 keeps all (Nguyen et al. 2024).
        max_candidates: most logits that any row needs sorted: 0 for none, -1 for the whole vocabulary.

    Returns:
        [R, V] the logits of kept tokens, -inf elsewhere. The largest logit is always kept.
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
        # Keep a candidate while the sum before it has not reached top_p of what top-k kept. A top_p of 1 keeps all
        # candidates, even those whose weights are too small to change a float32 sum.
        in_top_p = (cumulative - weights < top_p[:, None] * cumulative[:, -1:]) | (top_p == 1)[:, None]
        last_kept = (in_top_k & in_top_p).sum(-1, keepdim=True).sub(1).clamp(min=0)  # NaN logits keep none
        filters = ((top_k > 0) | (top_p < 1))[:, None]
        threshold = torch.where(filters, torch.maximum(threshold, best.gather(-1, last_kept)), threshold)
    return logits.masked_fill(logits < threshold, -torch.inf)


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
