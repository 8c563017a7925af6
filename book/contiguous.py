"""Chapter 04's KV cache: one page per sequence, as long as the longest sequence may become."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_engine.attention.spec import AttentionSpec


class ContiguousKVCache:
    """Keys and values of up to `num_pages` sequences, each in one page of `page_size` tokens.

    Every page is reserved in full, however much of it the sequence uses. Chapter 06 measures what that wastes, and
    replaces this cache with `mini_engine.kv_cache.paged.PagedKVCache`.

    Args:
        specs: one for each layer of the model.
        num_pages: largest number of sequences.
        page_size: tokens that fit in one page.
        dtype: of keys and values.
        device: where keys and values are stored.

    Attributes:
        layers: for each KV layer the two tensors of its entry, such as (k, v), each [pages, page_size, heads, size].
        layout: "NHD", the order of a page's axes.
    """

    layout = "NHD"

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.page_size, self.dtype, self.device = page_size, dtype, torch.device(device)
        self.layers: list[tuple[Tensor, Tensor]] = []
        for spec in specs:
            k, v = (
                torch.empty((num_pages, page_size, heads, size), dtype=dtype, device=device)
                for heads, size in spec.entry
            )
            self.layers.append((k, v))
        self._free = list(reversed(range(num_pages)))

    def allocate(self) -> int:
        """Take a free page. Raises IndexError if there is none: the caller must count."""
        return self._free.pop()

    def free(self, page: int) -> None:
        """Return a page to the pool."""
        self._free.append(page)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take, over all layers."""
        return sum(t.element_size() * t.shape[2] * t.shape[3] for pair in self.layers for t in pair)
