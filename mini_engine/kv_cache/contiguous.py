"""The simplest KV cache: one page per sequence, as long as the longest sequence may become."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.batch import AttentionSpec


class ContiguousKVCache:
    """Keys and values of up to `num_pages` sequences, each in one page of `page_size` tokens.

    Every page is reserved in full, whatever the sequence uses of it. Chapter 06 measures what that wastes.

    Attributes:
        layers: for each KV layer its (k, v), each [pages, page_size, num_kv_heads, head_dim] (layout "NHD").
        page_size: tokens that fit in one page.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        by_kv_layer = {spec.kv_layer: spec for spec in specs}
        self.layers: list[tuple[Tensor, Tensor]] = []
        for index in range(len(by_kv_layer)):
            spec = by_kv_layer[index]
            shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
            pair = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            self.layers.append((pair[0], pair[1]))
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))

    def allocate(self) -> int:
        """Take a free page. Raises IndexError if there is none: the caller counts."""
        return self._free.pop()

    def free(self, page: int) -> None:
        """Give a page back."""
        self._free.append(page)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's keys and values take, over all layers."""
        return sum(t.element_size() * t.shape[2] * t.shape[3] for pair in self.layers for t in pair)


def append_kv(
    k_cache: Float[Tensor, "slots Hk D"],
    v_cache: Float[Tensor, "slots Hk D"],
    k: Float[Tensor, "T Hk D"],
    v: Float[Tensor, "T Hk D"],
    slot_mapping: Int[Tensor, " T"],
) -> None:
    """Store each token's key and value in its slot, in place.

    Args:
        k_cache: [slots, Hk, D] keys of one layer, the pages laid end to end: slot = page * page_size + offset.
        v_cache: [slots, Hk, D] its values.
        k: [T, Hk, D] new keys.
        v: [T, Hk, D] new values.
        slot_mapping: [T] the slot of each; no two are equal.
    """
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)
