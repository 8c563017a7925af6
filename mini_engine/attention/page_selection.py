"""Page selection: a decode attends only to the pages whose keys may have high scores (Tang et al. 2024, "Quest").

For each page and KV head the cache keeps a *summary*: the smallest and the largest number of each dimension of the
page's keys. For a query q and any key k of the page

    q · k  =  sum_d q_d k_d  <=  sum_d max(q_d low_d, q_d high_d)

because k_d lies between low_d and high_d, so the right side, the *bound*, reaches the score of every key of the page.
It reads two vectors where the scores read one for each key: with pages of 16 tokens, an eighth of the keys' bytes. A
decode computes the bounds of its pages, selects the pages with the largest ones, and attends to their keys.

The query heads of a group share each key that is read, so they share a selection: one for each KV head. The bound of a
page is the maximum over the heads of the group. Their sum finds a little more of the attention, but it loses pages that
a single head needs, such as the page with a number that was mentioned once (experiment 18). Two pages are always
selected. The last one has the query's own key. The first one often gets much weight whatever the query is (an attention
sink, Xiao et al. 2023), more than its bound says.

**When a summary is right.** All pages of a request before the page of the query are full, and the last page is selected
without a look at its summary. So only summaries of full pages are read, and it suffices to compute a page's summary
when a key is stored in the last slot of the page, from all its keys. The keys of a request are stored in order of
position. So whenever a request's page becomes full, its last slot is stored last, or in the same step as the other
slots that change. This holds for prompts in chunks, for rejected guesses (the right tokens are stored in the same slots
again, the last slot included), for copied pages, and for pages that belonged to other requests before.

The functions below run everywhere; on a GPU, the kernels of `kernels/page_selection.py` replace them. Explained in
chapter 15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from mini_engine.attention.backend import KVCache
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.ops import with_kernel


@runtime_checkable
class SummarizedCache(KVCache, Protocol):
    """A KV cache that keeps summaries of its pages.

    Attributes:
        summaries: for each layer with a `key_budget` the smallest and the largest number of each dimension of a page's
            keys, each [pages, Hk, D].
    """

    summaries: dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DecodePages:
    """The pages of the decodes of a step, on the device.

    Attributes:
        pages: pages of all requests, in order.
        first: first entry of each decode in `pages`.
        kv_lens: keys of each decode.
        page_size: keys per page.
        width: no decode has more pages.
    """

    pages: Int32[Tensor, " entries"]
    first: Int64[Tensor, " B"]
    kv_lens: Int64[Tensor, " B"]
    page_size: int
    width: int

    @classmethod
    def of(cls, batch: StepBatch) -> DecodePages:
        """List the pages of a step's decodes, which have one query each. It only launches, so it can be captured.

        A request of a model with page selection keeps all its pages, so the position of a decode's query says how many
        keys it has. The width is the same for all steps that a CUDA graph replays.
        """
        count = batch.num_decodes
        kv_lens = batch.positions[:count] + 1
        counts = (kv_lens + (batch.page_size - 1)) // batch.page_size
        if batch.page_capacity is None:
            width = int(batch.kv_page_indptr[: count + 1].diff().max())
        else:
            width = batch.page_capacity // count
        return cls(batch.kv_page_indices, counts.cumsum(0) - counts, kv_lens, batch.page_size, width)

    def last(self) -> Int64[Tensor, " B"]:
        """Return the index of each decode's last page."""
        return (self.kv_lens - 1) // self.page_size

    def at(self, index: Int64[Tensor, "B Hk n"]) -> Int64[Tensor, "B Hk n"]:
        """Return the pages of each decode at an index; the last page beyond it."""
        index = torch.minimum(index, self.last()[:, None, None])
        return self.pages[self.first[:, None, None] + index].long()


@with_kernel
def summarize_pages(
    k_pages: Float[Tensor, "pages P Hk D"],
    low: Float[Tensor, "pages Hk D"],
    high: Float[Tensor, "pages Hk D"],
    slots: Int64[Tensor, " T"],
) -> None:
    """Compute the summaries of the pages whose last slot is among the slots of a step, in place.

    Args:
        k_pages: keys of one layer, the step's keys included.
        low: smallest number of each dimension of a page's keys.
        high: largest number.
        slots: slot of each token of the step: page * P + offset in the page.
    """
    page_size = k_pages.shape[1]
    filled = slots[slots % page_size == page_size - 1] // page_size
    low[filled], high[filled] = k_pages[filled].amin(dim=1), k_pages[filled].amax(dim=1)


@with_kernel
def bound_scores(
    q: Float[Tensor, "B Hq D"], low: Float[Tensor, "pages Hk D"], high: Float[Tensor, "pages Hk D"], pages: DecodePages
) -> Float[Tensor, "B Hk W"]:
    """Bound the unscaled scores of a decode with the keys of each of its pages from above.

    Args:
        q: one query for each decode.
        low: smallest number of each dimension of a page's keys.
        high: largest number.
        pages: the pages of each decode.

    Returns:
        For each decode and KV head, a bound for each of its pages: no key of the page has a larger score with any query
        head of the group. In float32 (float64 for float64): inf for the first page and the last one, whose summary may
        be out of date, and -inf where a decode has no page.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    index = torch.arange(pages.width, device=q.device).expand(len(q), 1, -1)
    own, last = pages.at(index)[:, 0], pages.last()[:, None, None]
    grouped = q.to(dtype).unflatten(1, (low.shape[1], -1))
    # max(q low, q high) is q high where q is positive, and q low where it is negative.
    bounds = torch.einsum("bhgd,bwhd->bhgw", grouped.clamp(min=0), high[own].to(dtype))
    bounds += torch.einsum("bhgd,bwhd->bhgw", grouped.clamp(max=0), low[own].to(dtype))
    bounds = bounds.amax(dim=2).masked_fill(index > last, -math.inf)
    return bounds.masked_fill((index == 0) | (index == last), math.inf)


@with_kernel
def select_pages(bounds: Float[Tensor, "B Hk W"], most: int) -> Int64[Tensor, "B Hk n"]:
    """Select the pages with the largest bounds, as indices in no particular order.

    A decode with fewer pages selects all of them, and places where it has no page.

    Args:
        bounds: from `bound_scores`.
        most: number of pages to select.
    """
    return bounds.topk(min(most, bounds.shape[-1]), dim=-1, sorted=False).indices


@with_kernel
def attend_to_pages(
    q: Float[Tensor, "B Hq D"],
    k_pages: Float[Tensor, "pages P Hk D"],
    v_pages: Float[Tensor, "pages P Hk D"],
    pages: DecodePages,
    selected: Int64[Tensor, "B Hk n"],
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "B Hq D"]:
    """Compute the attention of each decode to the keys of its selected pages.

    Args:
        q: one query for each decode.
        k_pages: keys of one layer.
        v_pages: its values.
        pages: the pages of each decode.
        selected: for each decode and KV head, indices of the selected pages; indices where a decode has no page are
            ignored.
        scale: factor on the scores.
        softcap: see `AttentionSpec`.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    offsets = torch.arange(pages.page_size, device=q.device)
    positions = (selected[..., None] * pages.page_size + offsets).flatten(2)
    seen = positions < pages.kv_lens[:, None, None]
    heads = torch.arange(k_pages.shape[2], device=q.device)[:, None, None]
    k, v = (x[pages.at(selected)[..., None], offsets, heads].flatten(2, 3).to(dtype) for x in (k_pages, v_pages))
    scores = torch.einsum("bhgd,bhmd->bhgm", q.to(dtype).unflatten(1, (len(heads), -1)), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, :, None], -math.inf).softmax(dim=-1)
    v = v.masked_fill(~seen[..., None], 0)  # a slot that no token has written may hold anything, NaN included
    return torch.einsum("bhgm,bhmd->bhgd", weights, v).flatten(1, 2).to(q.dtype)


class PageSelection:
    """The decodes of the layers with a budget, for any backend that computes everything else.

    Args:
        specs: one for each layer of the model.
        cache: the KV cache.
    """

    def __init__(self, specs: Sequence[AttentionSpec], cache: SummarizedCache) -> None:
        self._specs: Mapping[int, AttentionSpec] = {s.layer: s for s in specs if s.key_budget is not None}
        self._first_layer = min(self._specs, default=None)
        self._summaries = cache.summaries
        self._layers = cache.layers
        if cache.layout == "HND":
            self._layers = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in cache.layers]

    def plan(self, batch: StepBatch) -> None:
        """Keep the step."""
        self._batch = batch

    def summarize(self, layer: int) -> None:
        """Summarize the pages that the step has filled in a layer, after its keys have been stored."""
        summarize_pages(self._layers[layer][0], *self._summaries[layer], self._batch.slot_mapping)

    def attend(self, layer: int, q: Float[Tensor, "B Hq D"]) -> Float[Tensor, "B Hq D"]:
        """Compute the attention of the step's decodes in a layer, in the order of the layers."""
        if layer == self._first_layer:  # here and not in `plan`, so that a CUDA graph records it
            self._pages = DecodePages.of(self._batch)
        spec = self._specs[layer]
        assert spec.key_budget is not None
        selected = select_pages(self.rank(layer, q), spec.key_budget // self._pages.page_size)
        return attend_to_pages(q, *self._layers[layer], self._pages, selected, spec.scale, spec.softcap)

    def rank(self, layer: int, q: Float[Tensor, "B Hq D"]) -> Float[Tensor, "B Hk W"]:
        """Return how much each page of each decode matters; the pages with the largest numbers are selected."""
        return bound_scores(q, *self._summaries[layer], self._pages)
