"""All decodes in one padded call, against naive attention of each, on a cache full of NaN."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.backend import ChunkedBackend, TorchBackend, create_backend
from mini_engine.attention.decode_batch import DecodeBatch, worth_padding
from mini_engine.attention.masks import visible
from mini_engine.attention.naive import attention_mask, masked_attention, sdpa_attention
from mini_engine.batch import AttentionSpec, StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts

FULL = AttentionSpec(0, 0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=0.4)
SPECS = (FULL, replace(FULL, layer=1, kv_layer=1, window=5))


def decodes(kv_lens: list[int], page_size: int, order: list[int], evicted: list[int] | None = None) -> StepBatch:
    counts = [-(-n // page_size) for n in kv_lens]
    positions = None
    if evicted is not None:
        positions = [(gone + i) * page_size for n, gone in zip(counts, evicted, strict=True) for i in range(n)]
    return StepBatch.build(
        token_ids=[0] * len(kv_lens),
        num_new=[1] * len(kv_lens),
        kv_lens=kv_lens,
        pages=order[: sum(counts)],
        page_size=page_size,
        page_positions=positions,
    )


@given(st.data())
def test_equals_naive_attention_of_each(data: st.DataObject) -> None:
    kv_lens = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    counts = [-(-n // page_size) for n in kv_lens]
    order = data.draw(st.permutations(range(sum(counts) + 2)))
    evicted = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(kv_lens), max_size=len(kv_lens)))
    batch = decodes(kv_lens, page_size, order, evicted)
    generator = torch.Generator().manual_seed(0)
    k_pages, v_pages = torch.full((2, len(order), page_size, 2, 8), torch.nan, dtype=torch.float64)
    q = torch.randn(len(kv_lens), 4, 8, generator=generator, dtype=torch.float64)
    planned = DecodeBatch.of(batch, {spec.window: visible(spec.window) for spec in SPECS})
    first = 0
    keys = []
    for n, count in zip(kv_lens, counts, strict=True):
        k, v = torch.randn(2, n, 2, 8, generator=generator, dtype=torch.float64)
        for i in range(n):
            page = order[first + i // page_size]
            k_pages[page, i % page_size], v_pages[page, i % page_size] = k[i], v[i]
        keys.append((k, v))
        first += count
    for spec in SPECS:
        got = planned.attend(spec, q, k_pages, v_pages)
        for b, (k, v) in enumerate(keys):
            at = torch.arange(len(k))
            mask = attention_mask(at[-1:], at, spec.window)  # eviction shifts queries and keys alike
            want = masked_attention(q[b : b + 1], k, v, scale=spec.scale, mask=mask)
            torch.testing.assert_close(got[b : b + 1], want, atol=1e-12, rtol=0)


def calls_of_one_sequence(backend_class: type[TorchBackend], parts: Parts, kv_lens: list[int]) -> bool:
    """Whether the backend attends to a step's decodes one after the other."""
    cache = PagedKVCache(SPECS, 16, 4, torch.float32)
    backend = backend_class(SPECS, cache, parts)
    backend.plan(decodes(kv_lens, 4, list(range(16))))
    return backend._decodes is None


@pytest.mark.parametrize(
    ("kv_lens", "alone"), [([5], True), ([5, 9], False), ([1, 1, 40], True), ([16, 16, 16], False), ([3, 3, 30], True)]
)
def test_decodes_of_like_lengths_are_padded(kv_lens: list[int], alone: bool) -> None:
    assert calls_of_one_sequence(TorchBackend, Parts(), kv_lens) == alone
    assert worth_padding(decodes(kv_lens, 4, list(range(16))), 1000) == (not alone)


def test_a_reader_s_attention_and_small_chunks_take_one_sequence_at_a_time() -> None:
    own = replace(Parts(), masked_attention=lambda *args, **how: sdpa_attention(*args, **how))
    assert calls_of_one_sequence(TorchBackend, own, [5, 9])
    assert not worth_padding(decodes([5, 9], 4, list(range(16))), ChunkedBackend.KEY_CHUNK // 8)
    capped = [replace(FULL, softcap=3.0)]
    backend = create_backend("torch", capped, PagedKVCache(capped, 16, 4, torch.float32), Parts())
    backend.plan(decodes([5, 9], 4, list(range(16))))
    assert isinstance(backend, TorchBackend) and backend._decodes is None
