"""The torch backends: all decodes in one padded call, on a cache full of NaN, and one sequence after the other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.attention.masks import visible
from mini_engine.attention.naive import attention_mask, masked_attention, sdpa_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import PaddedDecodes, PaddedTorchBackend, TorchBackend, worth_padding
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention.stepping import full_cache, run_in_steps

FULL = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=0.4)
SPECS = (FULL, replace(FULL, layer=1, window=5))


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
    planned = PaddedDecodes.of(batch, {spec.window: visible(spec.window) for spec in SPECS})
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


def is_padded(kv_lens: list[int], spec: AttentionSpec = FULL) -> bool:
    """Whether the padded backend computes a step's decodes in one call, and plans none of them separately."""
    backend = PaddedTorchBackend([spec], PagedKVCache([spec], 16, 4, torch.float32), Parts())
    backend.plan(decodes(kv_lens, 4, list(range(sum(-(-n // 4) for n in kv_lens)))))
    assert len(backend._sequences) == (len(kv_lens) if backend._decodes is None else 0)
    return backend._decodes is not None


@pytest.mark.parametrize(
    ("kv_lens", "padded"),
    [([5], False), ([5, 9], True), ([1, 1, 40], False), ([16, 16, 16], True), ([3, 3, 30], False)],
)
def test_decodes_of_similar_lengths_are_padded(kv_lens: list[int], padded: bool) -> None:
    assert is_padded(kv_lens) == padded
    assert worth_padding(decodes(kv_lens, 4, list(range(16))), 1000) == padded


def test_decodes_that_padding_does_not_suit_go_through_the_loop() -> None:
    assert not worth_padding(decodes([5, 9], 4, list(range(16))), max_keys=8)
    most = PaddedTorchBackend.MAX_BYTES // (2 * FULL.num_kv_heads * FULL.head_dim * 4) // 4 * 4
    assert is_padded([most, most - 3]) and not is_padded([most, most + 1])
    assert not is_padded([5, 9], replace(FULL, softcap=3.0))
    assert not is_padded([5, 9], replace(FULL, alibi_slopes=(0.5, 0.25, 0.1, 0.05)))


def test_the_reference_calls_masked_attention_for_every_sequence() -> None:
    """The padded backend lists the part as bypassed, and calls it only for prompts."""

    def calls(backend_class: type[TorchBackend]) -> int:
        made = []
        parts = replace(Parts(), masked_attention=lambda *args, **how: made.append(1) or sdpa_attention(*args, **how))
        backend = backend_class([FULL], PagedKVCache([FULL], 16, 4, torch.float32), parts)
        backend.plan(
            StepBatch.build(token_ids=[0] * 5, num_new=[1, 1, 3], kv_lens=[5, 9, 3], pages=range(6), page_size=4)
        )
        backend(0, torch.zeros(5, 4, 8), *torch.zeros(2, 5, 2, 8))
        return len(made)

    assert calls(TorchBackend) == 3 and "masked_attention" not in TorchBackend.bypasses
    assert calls(PaddedTorchBackend) == 1 and "masked_attention" in PaddedTorchBackend.bypasses


@pytest.mark.parametrize("key_chunk", [1, 4, 100])
def test_long_sequences_are_attended_to_in_chunks(key_chunk: int) -> None:
    specs = (FULL, replace(FULL, layer=1, window=5, softcap=4.0))
    backend = type("Chunks", (TorchBackend,), {"KEY_CHUNK": key_chunk})(
        specs, full_cache(specs, 8, 4, torch.float64), Parts()
    )
    for _, got, want in run_in_steps(backend, specs, [14, 9], [6, 1], range(8), 4, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_decodes_of_several_tokens_are_not_padded() -> None:
    """A step that verifies drafted tokens has such decodes."""
    batch = StepBatch.build(
        token_ids=[0] * 7,
        num_new=[3, 2, 2],
        kv_lens=[10, 7, 3],
        pages=[5, 2, 7, 0, 3, 1],
        page_size=4,
        num_decodes=3,
    )
    outs = []
    for backend in (TorchBackend, PaddedTorchBackend):
        cache = PagedKVCache([FULL], 8, 4, torch.float64)
        generator = torch.Generator().manual_seed(0)
        for stored in cache.layers[0]:
            stored.normal_(generator=generator)
        q, k, v = (torch.randn(7, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
        attend = backend([FULL], cache, Parts())
        attend.plan(batch)
        outs.append(attend(0, q, k, v))
    assert batch.num_decodes == 3
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
