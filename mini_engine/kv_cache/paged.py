"""The paged KV cache: one pool of pages for all sequences, for each layer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.batch import AttentionSpec
from mini_engine.errors import ConfigError


class PagedKVCache:
    """Keys and values of all layers, in pages that a `PageTable` hands out.

    Args:
        specs: one for each layer of the model.
        num_pages: pages in the pool.
        page_size: tokens that fit in one page.
        dtype: of keys and values.
        device: where they are.
        layout: order of a page's axes: "NHD" is [page_size, heads, head_dim], "HND" [heads, page_size, head_dim].

    Attributes:
        layers: for each KV layer its (k, v), each [pages, *layout].

    Raises:
        ConfigError: for an unknown layout.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str = "NHD",
    ) -> None:
        if layout not in ("NHD", "HND"):
            raise ConfigError(f"unknown layout {layout!r} of the KV cache; choose NHD or HND")
        by_kv_layer = {spec.kv_layer: spec for spec in specs}
        self.layers: list[tuple[Tensor, Tensor]] = []
        for index in range(len(by_kv_layer)):
            spec = by_kv_layer[index]
            page = (page_size, spec.num_kv_heads) if layout == "NHD" else (spec.num_kv_heads, page_size)
            shape = (num_pages, *page, spec.head_dim)
            self.layers.append(
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.layout = layout

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take, over all layers."""
        return sum(t[0].nbytes for pair in self.layers for t in pair) // self.page_size

    def update(
        self,
        kv_layer: int,
        k: Float[Tensor, "T Hk D"],
        v: Float[Tensor, "T Hk D"],
        slot_mapping: Int[Tensor, " T"],
    ) -> None:
        """Store the keys and values of T tokens of one layer in their slots, in either layout.

        Args:
            kv_layer: which layer of the cache.
            k: [T, Hk, D] keys.
            v: [T, Hk, D] values.
            slot_mapping: [T] page * page_size + offset in the page; no two are equal.
        """
        pages, offsets = slot_mapping // self.page_size, slot_mapping % self.page_size
        for cache, new in zip(self.layers[kv_layer], (k, v), strict=True):
            if self.layout == "NHD":
                cache[pages, offsets] = new
            else:
                cache[pages, :, offsets] = new

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, in every layer.

        Args:
            pairs: (from, to) of each, in order: one may copy what another has just copied.
        """
        for old, new in pairs:
            for k_and_v in self.layers:
                for cache in k_and_v:
                    cache[new] = cache[old]
