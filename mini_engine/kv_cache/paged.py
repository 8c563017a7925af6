"""The paged KV cache: one pool of pages for all sequences, in each layer. Explained in chapters 04 and 06."""

import resource
from collections.abc import Sequence

import numpy as np
import psutil
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mini_engine.attention.spec import AttentionSpec
from mini_engine.errors import ConfigError

# Most bytes of the default cache on a CPU.
MOST_CPU_CACHE_BYTES = 2 * 2**30


class PagedKVCache:
    """What tokens store in all layers (`AttentionSpec.entry`), in pages that a `PageTable` assigns.

    Args:
        specs: one for each layer of the model, or of its first group of layers (`layer_groups.py`).
        num_pages: pages in the pool.
        page_size: tokens that fit in one page.
        dtype: dtype of keys and values, except in layers whose spec sets `kv_dtype`.
        device: device that stores keys and values.
        layout: order of a page's axes: "NHD" is [page_size, heads, head_dim], "HND" [heads, page_size, head_dim].

    Attributes:
        layers: for each of these layers the two tensors of its entry, such as (k, v), each [pages, *layout].
        summaries: for each layer with a `key_budget` the smallest and the largest number of each dimension of a page's
            keys, each [pages, Hk, D] (`attention.page_selection`).
        bytes_per_token: bytes that one token stores, over these layers.

    Raises:
        ConfigError: for an unknown layout, or a cache that does not fit into memory.
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
        needed, free = num_pages * page_bytes(specs, page_size, dtype), free_memory(torch.device(device))
        if needed > free:
            raise ConfigError(
                f"a KV cache of {num_pages} pages of {page_size} tokens takes {needed} bytes and {free} are free; "
                "lower num_pages or page_size"
            )
        self.num_pages, self.page_size, self.layout = num_pages, page_size, layout
        self.dtype, self.device = dtype, torch.device(device)
        self.layers: list[tuple[Tensor, Tensor]] = []
        for spec in specs:
            k, v = (
                _zeros(
                    (num_pages, page_size, heads, size) if layout == "NHD" else (num_pages, heads, page_size, size),
                    spec.kv_dtype or dtype,
                    self.device,
                )
                for heads, size in spec.entry
            )
            self.layers.append((k, v))
        self.summaries: dict[int, tuple[Tensor, Tensor]] = {}
        for spec in specs:
            if spec.key_budget is not None:
                low, high = (_zeros((num_pages, *spec.entry[0]), dtype, self.device) for _ in range(2))
                self.summaries[spec.layer] = low, high
        self.bytes_per_token = sum(_token_bytes(spec, dtype) for spec in specs)

    def copy_pages(self, pairs: Sequence[Sequence[int]]) -> None:
        """Copy whole pages and their summaries, in every layer.

        Args:
            pairs: (source, destination) pages, copied in order: a destination may be a later pair's source.
        """
        for source, destination in pairs:
            for pair in (*self.layers, *self.summaries.values()):
                for cache in pair:
                    cache[destination] = cache[source]


def append_kv(
    k_cache: Shaped[Tensor, "slots Hk D"],
    v_cache: Shaped[Tensor, "slots Hk Dv"],
    k: Shaped[Tensor, "T Hk D"],
    v: Shaped[Tensor, "T Hk Dv"],
    slot_mapping: Int[Tensor, " T"],
) -> None:
    """Store each token's key and value in its slot, in place.

    Args:
        k_cache: [slots, Hk, D] keys of one layer, the pages laid end to end: slot = page * page_size + offset.
        v_cache: [slots, Hk, Dv] its values.
        k: [T, Hk, D] new keys.
        v: [T, Hk, Dv] new values.
        slot_mapping: [T] slot of each token; no two are equal.
    """
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)


def round_kv(x: Float[Tensor, "*shape"], scale: float, dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Round x / scale to a narrower dtype. Values beyond its range become its largest number; `to` alone gives NaN.

    Args:
        x: keys or values.
        scale: factor by which stored numbers are multiplied when they are read.
        dtype: dtype of the cache, such as float8_e4m3fn, whose largest number is 448.
    """
    limit = torch.finfo(dtype).max
    return (x if scale == 1 else x / scale).clamp(-limit, limit).to(dtype)


def default_num_pages(
    specs: Sequence[AttentionSpec], page_size: int, dtype: torch.dtype, device: torch.device, most: int,
    share: float = 0.9,
) -> int:  # fmt: skip
    """Return the default number of pages of the KV cache: as many as can be used, or as fit into the free memory.

    Args:
        specs: one for each layer of the model.
        page_size: tokens per page.
        dtype: the model's.
        device: the model's device.
        most: pages that can be used at all.
        share: share of a GPU's memory that may be in use.

    Raises:
        ConfigError: if there is no room for a single page.
    """
    of_page, free = page_bytes(specs, page_size, dtype), free_memory(device)
    room = min(free // 2, MOST_CPU_CACHE_BYTES)
    if device.type == "cuda":
        room = free - int((1 - share) * torch.cuda.mem_get_info(device)[1])
    if room < of_page:
        raise ConfigError(f"a page of the KV cache takes {of_page} bytes and {room} are free; lower page_size")
    return min(most, room // of_page)


def page_bytes(specs: Sequence[AttentionSpec], page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page over all layers, with its summaries."""
    summarized = [spec for spec in specs if spec.key_budget is not None]
    of_summaries = sum(2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in summarized)
    return page_size * sum(_token_bytes(spec, dtype) for spec in specs) + of_summaries


def _token_bytes(spec: AttentionSpec, dtype: torch.dtype) -> int:
    return spec.entry_size * (spec.kv_dtype or dtype).itemsize


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch's allocator
        return torch.cuda.mem_get_info(device)[0] + cached
    free, (limit, _) = psutil.virtual_memory().available, resource.getrlimit(resource.RLIMIT_AS)
    return free if limit == resource.RLIM_INFINITY else max(0, min(free, limit - psutil.Process().memory_info().vms))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU the system gives NumPy memory that takes no space before it is written."""
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)).view(dtype)
