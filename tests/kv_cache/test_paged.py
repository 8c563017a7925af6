"""The paged cache in both layouts."""

from __future__ import annotations

import pytest
import torch

from mini_engine.batch import AttentionSpec
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache

SPEC = AttentionSpec(0, 0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)


def test_both_layouts_hold_the_same_in_another_order() -> None:
    k, v = torch.randn(2, 5, 2, 8)
    slots = torch.tensor([7, 0, 9, 3, 2])
    nhd, hnd = (PagedKVCache([SPEC], 3, 4, torch.float32, layout=layout) for layout in ("NHD", "HND"))
    for cache in (nhd, hnd):
        cache.update(0, k, v, slots)
    for by_token, by_head, new in zip(nhd.layers[0], hnd.layers[0], (k, v), strict=True):
        assert torch.equal(by_token.flatten(0, 1)[slots], new)
        assert torch.equal(by_token.transpose(1, 2), by_head)
        assert by_token.flatten(0, 1)[[1, 4, 5, 6, 8, 10, 11]].count_nonzero() == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_token_takes_its_keys_and_its_values(layout: str) -> None:
    specs = [SPEC, AttentionSpec(1, 1, num_qo_heads=4, num_kv_heads=1, head_dim=8, scale=1.0)]
    assert PagedKVCache(specs, 3, 4, torch.bfloat16, layout=layout).bytes_per_token == 2 * (2 + 1) * 8 * 2


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose NHD or HND"):
        PagedKVCache([SPEC], 3, 4, torch.float32, layout="DHN")
