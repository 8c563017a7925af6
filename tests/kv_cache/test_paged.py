"""The paged cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mini_engine.attention.spec import AttentionSpec
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import MOST_CPU_CACHE_BYTES, PagedKVCache, append_kv, default_num_pages, round_kv

SPEC = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)


@pytest.mark.parametrize(("layout", "shape"), [("NHD", (3, 4, 2, 8)), ("HND", (3, 2, 4, 8))])
def test_a_layout_is_the_order_of_a_page_s_axes(layout: str, shape: tuple[int, ...]) -> None:
    specs = [SPEC, AttentionSpec(1, num_qo_heads=4, num_kv_heads=1, head_dim=8, scale=1.0)]
    cache = PagedKVCache(specs, 3, 4, torch.bfloat16, layout=layout)
    assert [tuple(x.shape) for x in cache.layers[0]] == [shape, shape]
    assert cache.bytes_per_token == 2 * (2 + 1) * 8 * 2


def test_a_layer_may_store_keys_in_a_dtype_of_its_own() -> None:
    specs = [SPEC, replace(SPEC, layer=1, kv_dtype=torch.float8_e4m3fn)]
    cache = PagedKVCache(specs, 3, 4, torch.bfloat16)
    assert [k.dtype for k, _ in cache.layers] == [torch.bfloat16, torch.float8_e4m3fn]
    assert cache.bytes_per_token == 2 * 2 * 8 * (2 + 1)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose NHD or HND"):
        PagedKVCache([SPEC], 3, 4, torch.float32, layout="DHN")


def test_append_writes_the_slots_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = torch.zeros(2, 10, 3, 4)
    k, v = torch.randn(2, 4, 3, 4, generator=generator)
    slots = torch.tensor([7, 0, 9, 3])
    append_kv(k_cache, v_cache, k, v, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        for row, slot in enumerate(slots):
            assert torch.equal(cache[slot], new[row])
        assert cache[[1, 2, 4, 5, 6, 8]].abs().sum() == 0


def test_pages_are_copied_in_order() -> None:
    cache = PagedKVCache([SPEC], 3, 4, torch.float32)
    for pair in cache.layers:
        for x in pair:
            x.copy_(torch.arange(3.0)[:, None, None, None].expand_as(x))
    cache.copy_pages([(0, 1), (1, 2)])
    assert all(not x.any() for pair in cache.layers for x in pair)


def test_pages_by_default_are_as_many_as_can_be_used_or_as_the_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    one_page = 16 * 2 * 2 * 8 * 4  # tokens, keys and values, heads, size, bytes
    pages = partial(default_num_pages, [SPEC], 16, torch.float32, torch.device("cpu"))

    def free(num_bytes: int) -> None:
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2 * num_bytes))

    free(10 * one_page + one_page // 2)
    assert pages(7) == 7 and pages(10**6) == 10
    free(one_page - 1)
    with pytest.raises(ConfigError, match=f"takes {one_page} bytes and {one_page - 1} are free; lower page_size"):
        pages(7)
    free(100 * MOST_CPU_CACHE_BYTES)
    assert pages(10**9) == MOST_CPU_CACHE_BYTES // one_page


def test_keys_beyond_the_range_become_its_largest() -> None:
    x = torch.tensor([0.0, 1.0, -3.1, 448.0, 449.0, 1e9, -1e9, torch.inf]).reshape(-1, 1, 1)
    assert round_kv(x, 1.0, torch.float8_e4m3fn).flatten().tolist() == [0, 1, -3, 448, 448, 448, -448, 448]
    assert round_kv(x, 4.0, torch.float8_e4m3fn).flatten()[:4].tolist() == [0, 0.25, -0.75, 112]
