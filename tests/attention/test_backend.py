"""The torch backend against naive attention, wherever the pages lie and however the tokens arrive."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.backend import TorchBackend, attend_with, create_backend
from mini_engine.attention.naive import alibi_bias, alibi_slopes, attention_mask, masked_attention
from mini_engine.batch import AttentionSpec, StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.contiguous import ContiguousKVCache
from mini_engine.parts import Parts

SPECS = (
    AttentionSpec(0, 0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=0.3),
    AttentionSpec(1, 1, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=3, softcap=5.0),
    AttentionSpec(2, 2, num_qo_heads=4, num_kv_heads=4, head_dim=8, scale=0.3, alibi_slopes=(0.5, 0.25, 0.1, 0.05)),
)


def expected(spec: AttentionSpec, q, k, v):
    """All of one sequence at once."""
    positions = torch.arange(len(q), device=q.device)
    bias = None
    if spec.alibi_slopes:
        bias = alibi_bias(torch.tensor(spec.alibi_slopes, dtype=q.dtype, device=q.device), positions, positions)
    mask = attention_mask(positions, positions, spec.window)
    return masked_attention(q, k, v, scale=spec.scale, mask=mask, bias=bias, softcap=spec.softcap)


def run_in_steps(lens, cuts, page_size, page_order, key_chunk, dtype, device="cpu", seed=0):
    """Feed sequences through the backend in pieces; return what it gave and what it should have given, per layer."""
    generator = torch.Generator().manual_seed(seed)
    cache = ContiguousKVCache(SPECS, max(page_order) + 1, page_size, dtype, device)
    for pair in cache.layers:
        for tensor in pair:
            tensor.fill_(torch.nan)  # a slot that was never written must never be read
    backend = type("Chunks", (TorchBackend,), {"KEY_CHUNK": key_chunk})(SPECS, cache, Parts())
    attend = attend_with(backend)
    data = [
        [
            tuple(torch.randn(n, h, spec.head_dim, generator=generator, dtype=dtype).to(device) for h in heads)
            for n in lens
        ]
        for spec in SPECS
        for heads in [(spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)]
    ]
    free = list(page_order)
    pages = [[free.pop() for _ in range(-(-n // page_size))] for n in lens]
    got = [[[] for _ in lens] for _ in SPECS]
    done = [0] * len(lens)
    while any(d < n for d, n in zip(done, lens, strict=True)):
        new = [min(cut, n - d) for cut, n, d in zip(cuts, lens, done, strict=True)]
        order = sorted((b for b in range(len(lens)) if new[b]), key=lambda b: new[b] > 1)
        after = [done[b] + new[b] for b in order]
        batch = StepBatch.build(
            token_ids=[0] * sum(new),
            num_new=[new[b] for b in order],
            kv_lens=after,
            pages=[p for b, n in zip(order, after, strict=True) for p in pages[b][: -(-n // page_size)]],
            page_size=page_size,
            device=device,
        )
        backend.plan(batch)
        for layer, spec in enumerate(SPECS):
            rows = [tuple(t[done[b] : done[b] + new[b]] for t in data[layer][b]) for b in order]
            out = attend(spec, *(torch.cat(parts) for parts in zip(*rows, strict=True)))
            for b, piece in zip(order, out.split([new[b] for b in order]), strict=True):
                got[layer][b].append(piece)
        done = [d + n for d, n in zip(done, new, strict=True)]
    for layer, spec in enumerate(SPECS):
        for b in range(len(lens)):
            yield spec, torch.cat(got[layer][b]), expected(spec, *data[layer][b])


@settings(deadline=None, max_examples=20)
@given(st.data())
def test_equals_naive_attention_however_it_is_cut(data):
    lens = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 14), min_size=len(lens), max_size=len(lens)))
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    pages = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens) + 2)))
    key_chunk = data.draw(st.sampled_from([1, 4, 100]))
    for _, got, want in run_in_steps(lens, cuts, page_size, pages, key_chunk, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_keys_whose_pages_were_evicted_are_as_good_as_masked():
    """Dropping the pages that a window no longer reaches changes nothing."""
    spec = SPECS[1]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(12, h, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    cache = ContiguousKVCache(SPECS, 3, 4, torch.float64)
    backend = TorchBackend(SPECS, cache, Parts())
    keys, values = cache.layers[spec.kv_layer]
    keys[2], values[2] = k[4:8], v[4:8]  # page 2 holds positions 4 to 7; 0 to 3 are gone
    batch = StepBatch.build(
        token_ids=[0] * 4, num_new=[4], kv_lens=[8], pages=[2, 0], page_size=4, page_positions=[4, 8]
    )
    backend.plan(batch)
    backend.append(spec, k[8:], v[8:])
    torch.testing.assert_close(backend.run(spec, q[8:]), expected(spec, q, k, v)[8:])


def test_unknown_backend_is_named():
    with pytest.raises(ConfigError, match="choose one of: torch"):
        create_backend("flashatention", SPECS, ContiguousKVCache(SPECS, 1, 1, torch.float32), Parts())


def test_alibi_slopes_of_the_spec_are_those_of_the_paper():
    assert alibi_slopes(8)[0] == 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_equals_naive_attention_on_the_gpu(dtype, atol):
    for _, got, want in run_in_steps([9, 1, 14], [4, 1, 14], 4, [5, 3, 8, 1, 0, 2, 7, 9], 6, dtype, "cuda"):
        torch.testing.assert_close(got, want, atol=atol, rtol=0)
