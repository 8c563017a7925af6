"""FlashInfer's samplers in place of the engine's own: `--parts book.kernels.flashinfer_sampling:parts`.

They sample from probabilities rather than logits: softmax, a renormalization for each filter, then one uniform number
per row, looked up in the cumulative sum. Top-k and top-p find their thresholds without sorting.

These samplers are not the default, because FlashInfer's random numbers also depend on the row of the batch (it is
Philox's subsequence). With the engine's own sampler, a request's draw depends only on its seed and position. With this
one, the same request draws different tokens in a different row, so its text depends on the rest of the batch.
"""

from dataclasses import replace

import flashinfer
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.parts import Parts, default_parts
from mini_engine.sampling import SamplingBatch


def parts() -> Parts:
    """Return the engine's parts for a GPU with the sampler of this module."""
    return replace(default_parts(torch.device("cuda")), sample=sample)


def sample(logits: Float[Tensor, "R V"], batch: SamplingBatch) -> Int[Tensor, " R"]:
    """Choose one token for each row, as `sampling.sample` does but with other random numbers.

    Args:
        logits: [R, V] on a GPU.
        batch: their parameters. A row's draw depends on its seed, its position and its index in the batch.

    Returns:
        [R] token ids; greedy rows take the largest logit.
    """
    best = logits.argmax(-1)
    kernels, random = flashinfer.sampling, {"seed": batch.seeds, "offset": batch.positions}
    probs = kernels.softmax(logits, batch.temperature)  # a temperature of 0 gives a uniform distribution
    vocab_size = logits.shape[1]
    # A tensor even if all rows agree: for a number, FlashInfer takes a path that needs minutes to compile.
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocab_size).clamp(max=vocab_size)
    probs = kernels.top_k_renorm_probs(probs, top_k)
    # Rounding could drop tokens of rows without top-p.
    nucleus = kernels.top_p_renorm_probs(probs, batch.top_p)
    probs = torch.where((batch.top_p < 1)[:, None], nucleus, probs)
    tokens = kernels.min_p_sampling_from_probs(probs, batch.min_p, **random)
    return torch.where(batch.temperature == 0, best, tokens)
