"""The decodes of a step in one padded call.

A loop over sequences calls a dozen small operators for each, in each layer. Decodes have one query each, and where
their lengths are alike, padding them to the longest costs less than the loop. Explained in chapter 04.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mini_engine.attention.masks import MaskMod
from mini_engine.attention.naive import fused_attention
from mini_engine.batch import AttentionSpec, StepBatch, to_device


def worth_padding(batch: StepBatch, most_keys: int) -> bool:
    """Whether the decodes of a step are several, and so alike in length that padding them costs less than a loop."""
    page_counts = torch.diff(batch.kv_page_indptr)[: batch.num_decodes]
    if batch.num_decodes < 2:
        return False
    longest = int(page_counts.max())
    return longest * batch.page_size <= most_keys and longest * batch.num_decodes <= 2 * int(page_counts.sum())


@dataclass(frozen=True)
class DecodeBatch:
    """The decodes of a step, padded to the longest of them.

    Attributes:
        pages: [D, W] pages of each; its last one is repeated up to the longest sequence's number.
        padding: decode and key of each slot behind a sequence's last key: it may hold anything, NaN too.
        visible: for each window, [D, 1, 1, m] which of the longest sequence's m keys each decode sees.
    """

    pages: Int[Tensor, "D W"]
    padding: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]
    visible: dict[int | None, Bool[Tensor, "D 1 1 m"]]

    @classmethod
    def of(cls, batch: StepBatch, mask_mods: Mapping[int | None, MaskMod]) -> "DecodeBatch":
        """Gather what the step's decodes need, without a loop over them.

        Args:
            batch: a step with decodes.
            mask_mods: for each window, which keys a query sees.
        """
        first = batch.kv_page_indptr.numpy()[: batch.num_decodes, None]
        counts = np.diff(batch.kv_page_indptr.numpy())[: batch.num_decodes, None]
        kv_lens = batch.kv_lens.numpy()[: batch.num_decodes, None]
        column = np.minimum(np.arange(counts.max()), counts - 1)
        held = np.arange(kv_lens.max()) < kv_lens
        rows, keys = np.nonzero(~held)
        moved = to_device(
            {"entry": first + column, "column": column, "held": held, "rows": rows, "keys": keys},
            batch.kv_page_indices.device,
        )
        starts = moved["column"] * batch.page_size
        if batch.page_positions is not None:
            starts = batch.page_positions[moved["entry"]]
        offsets = torch.arange(batch.page_size, device=starts.device)
        positions = (starts[:, :, None] + offsets).flatten(1)[:, : held.shape[1]]
        queries = batch.positions[: batch.num_decodes, None]
        nothing = torch.zeros((), dtype=torch.long, device=starts.device)  # no mask depends on row or head
        visible = {
            window: (moved["held"] & mask_mod(nothing, nothing, queries, positions))[:, None, None]
            for window, mask_mod in mask_mods.items()
        }
        return cls(batch.kv_page_indices[moved["entry"]].long(), (moved["rows"], moved["keys"]), visible)

    def attend(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "D Hq d"],
        k_pages: Float[Tensor, "pages P Hk d"],
        v_pages: Float[Tensor, "pages P Hk d"],
    ) -> Float[Tensor, "D Hq d"]:
        """Attend with one query each; the heads of a group are the rows of their key head, as in `sdpa_attention`."""
        mask = self.visible[spec.window]
        k, v = (x[self.pages].flatten(1, 2)[:, : mask.shape[-1]] for x in (k_pages, v_pages))
        for x in (k, v):
            x[self.padding] = 0
        queries = q.unflatten(1, (spec.num_kv_heads, -1))
        return fused_attention(queries, k.transpose(1, 2), v.transpose(1, 2), scale=spec.scale, mask=mask).flatten(1, 2)
