"""Chapter 04's contiguous cache."""

import pytest
import torch

from book.contiguous import ContiguousKVCache
from mini_engine.attention.spec import AttentionSpec

SPECS = tuple(AttentionSpec(i, num_qo_heads=6, num_kv_heads=3, head_dim=64, scale=0.125) for i in range(30))


def test_bytes_per_token_of_smollm2():
    cache = ContiguousKVCache(SPECS, num_pages=1, page_size=2, dtype=torch.bfloat16)
    assert cache.bytes_per_token == 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, size, bytes


def test_a_page_is_handed_out_once_until_it_is_freed():
    cache = ContiguousKVCache(SPECS[:1], num_pages=3, page_size=2, dtype=torch.float32)
    pages = [cache.allocate() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    with pytest.raises(IndexError):
        cache.allocate()
    cache.free(pages[1])
    assert cache.allocate() == pages[1]
