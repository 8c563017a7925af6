"""The contiguous cache."""

import pytest
import torch

from mini_engine.batch import AttentionSpec
from mini_engine.kv_cache.contiguous import ContiguousKVCache, append_kv

SPECS = tuple(AttentionSpec(i, i, num_qo_heads=6, num_kv_heads=3, head_dim=64, scale=0.125) for i in range(30))


def test_bytes_per_token_of_smollm2():
    cache = ContiguousKVCache(SPECS, num_pages=1, page_size=2, dtype=torch.bfloat16)
    assert cache.bytes_per_token == 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, size, bytes


def test_pages_are_handed_out_once_until_they_come_back():
    cache = ContiguousKVCache(SPECS[:1], num_pages=3, page_size=2, dtype=torch.float32)
    pages = [cache.allocate() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    with pytest.raises(IndexError):
        cache.allocate()
    cache.free(pages[1])
    assert cache.allocate() == pages[1]


def test_append_writes_the_slots_and_nothing_else():
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.zeros(2, 10, 3, 4)
    k, v = torch.randn(2, 4, 3, 4, generator=generator)
    slots = torch.tensor([7, 0, 9, 3])
    append_kv(k_cache, v_cache, k, v, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        for row, slot in enumerate(slots):
            assert torch.equal(cache[slot], new[row])
        assert cache[[1, 2, 4, 5, 6, 8]].abs().sum() == 0
