"""Two texts to measure and to calibrate models on: prose of this book's odd and even chapters, as it was at one time.

They are files of their own, because a result that depends on a text must not change when a chapter is edited.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from book.paths import repository_root
from mini_engine.attention.naive import attention_mask, sdpa_attention
from mini_engine.models.base import LanguageModel


def text(name: str) -> str:
    """Return the text "evaluation" or "calibration"."""
    return (repository_root() / "book" / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def chunks(token_ids: list[int], length: int) -> Int[Tensor, "S L"]:
    """Cut a text into sequences of equal length; what is left at the end is dropped."""
    count = len(token_ids) // length
    return torch.tensor(token_ids[: count * length]).view(count, length)


class Packed:
    """Causal attention within sequences of equal length that lie end to end: an `attend` without a cache.

    Args:
        model: gives the layers' specs.
        length: tokens of each sequence.
    """

    def __init__(self, model: LanguageModel, length: int) -> None:
        self._specs, self._length = model.attention_specs, length

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "T Hq D"]:
        spec = self._specs[layer]
        own = zip(*(tensor.split(self._length) for tensor in (q, k, v)), strict=True)
        mask = attention_mask(torch.arange(self._length), torch.arange(self._length), spec.window)
        return torch.cat([sdpa_attention(*each, scale=spec.scale, mask=mask, softcap=spec.softcap) for each in own])


@torch.inference_mode()
def perplexity(model: LanguageModel, sequences: Int[Tensor, "S L"]) -> float:
    """Return the exponential of the mean loss over all tokens but the first of each sequence."""
    count, length = sequences.shape
    losses = []
    for batch in sequences.split(4):  # logits of all tokens would need much memory
        positions = torch.arange(length).repeat(len(batch))
        logits = model.compute_logits(model(batch.flatten(), positions, Packed(model, length)))
        of_next = logits.view(len(batch), length, -1)[:, :-1].flatten(0, 1)
        losses.append(F.cross_entropy(of_next, batch[:, 1:].flatten(), reduction="sum"))
    return float(torch.stack(losses).sum().div(count * (length - 1)).exp())
