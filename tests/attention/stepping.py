"""Sequences fed through a backend in pieces, and the result of naive attention over each whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend
from mini_engine.attention.naive import alibi_bias, attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache, round_kv

KV_SCALES = (0.5, 2.0)  # powers of two: multiplying by them rounds nothing
E4M3 = torch.float8_e4m3fn


def expected(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute naive attention over one whole sequence."""
    positions = torch.arange(len(q), device=q.device)
    bias = None
    if spec.alibi_slopes:
        bias = alibi_bias(torch.tensor(spec.alibi_slopes, dtype=q.dtype, device=q.device), positions, positions)
    mask = attention_mask(positions, positions, spec.window)
    return masked_attention(q, k, v, scale=spec.scale, mask=mask, bias=bias, softcap=spec.softcap)


def random_qkv(spec: AttentionSpec, n: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (spec.num_qo_heads, spec.head_dim), *spec.entry
    return [torch.randn(n, *size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]


def full_cache(
    specs: Sequence[AttentionSpec],
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    value: float = torch.nan,
    device: str = "cpu",
    layout: str = "NHD",
) -> PagedKVCache:
    """A cache in which every slot holds `value`: a slot that was never written must not matter."""
    cache = PagedKVCache(specs, num_pages, page_size, dtype, device, layout)
    for pair in cache.layers:
        for tensor in pair:
            tensor.fill_(value)
    return cache


def random_step(
    data: st.DataObject, page_size: int, *, gaps: bool = True, longest: int = 120, device: str = "cpu"
) -> tuple[StepBatch, int]:
    """A step of a few sequences on random pages, some of which were evicted, and the number of the cache's pages.

    The evicted pages are before the remaining pages and, with `gaps`, also between them.
    """
    count = data.draw(st.integers(1, 5))
    kv_lens = data.draw(st.lists(st.integers(1, longest), min_size=count, max_size=count))
    new = sorted((data.draw(st.integers(1, n)) for n in kv_lens), key=lambda n: n > 1)
    kv_lens = [max(n, m) for n, m in zip(kv_lens, new, strict=True)]
    num_pages = [-(-n // page_size) for n in kv_lens]
    page_positions = None
    if data.draw(st.booleans()):
        page_positions = []
        for pages, n, m in zip(num_pages, kv_lens, new, strict=True):
            # Pages before the first new token's page may have been evicted, so the remaining pages start later.
            hole_at = data.draw(st.integers(0, (n - m) // page_size)) if gaps else 0
            hole = data.draw(st.integers(0, 3)) * page_size
            page_positions += [page * page_size + (hole if page >= hole_at else 0) for page in range(pages)]
    pool = sum(num_pages) + 3
    batch = StepBatch.build(
        token_ids=[0] * sum(new),
        num_new=new,
        kv_lens=kv_lens,
        pages=data.draw(st.permutations(range(pool)))[: sum(num_pages)],
        page_size=page_size,
        page_positions=page_positions,
        device=device,
    )
    return batch, pool


def run_in_steps(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    lens: Sequence[int],
    cuts: Sequence[int],
    page_order: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    oracle: Callable[[AttentionSpec, Tensor, Tensor, Tensor], Tensor] = expected,
) -> Iterator[tuple[AttentionSpec, Tensor, Tensor]]:
    """Feed sequences in pieces; yield the backend's output and the oracle's for each layer and sequence."""
    data = [[random_qkv(spec, n, dtype, b, device) for b, n in enumerate(lens)] for spec in specs]
    free = list(page_order)
    pages = [[free.pop() for _ in range(-(-n // page_size))] for n in lens]
    got: list[list[list[Tensor]]] = [[[] for _ in lens] for _ in specs]
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
        for layer in range(len(specs)):
            rows = [[x[done[b] : done[b] + new[b]] for x in data[layer][b]] for b in order]
            q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
            out = backend(layer, q, k, v)
            for b, piece in zip(order, out.split([new[b] for b in order]), strict=True):
                got[layer][b].append(piece)
        done = [d + n for d, n in zip(done, new, strict=True)]
    for layer, spec in enumerate(specs):
        for b in range(len(lens)):
            yield spec, torch.cat(got[layer][b]), oracle(spec, *data[layer][b])


def check_equal(batch: StepBatch, mine: AttentionBackend, oracle: AttentionBackend, atol: float) -> None:
    """Run one step on equal caches of random keys. The oracle may compute in a wider dtype, and in layout NHD."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    for pairs in zip(mine.cache.layers, oracle.cache.layers, strict=True):
        for own, theirs in zip(*pairs, strict=True):
            values = torch.randn(theirs.shape, generator=generator).to(own.device, own.dtype)
            theirs.copy_(values)
            own.copy_(values if mine.cache.layout == "NHD" else values.transpose(1, 2))
    mine.plan(batch)
    oracle.plan(batch)
    for spec in mine.specs:
        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        qkv = torch.randn(batch.num_tokens, sum(heads), spec.head_dim, generator=generator)
        q, k, v = qkv.to(mine.cache.device, mine.cache.dtype).split(heads, dim=1)
        got, want = mine(spec.layer, q, k, v), oracle(spec.layer, *(x.to(oracle.cache.dtype) for x in (q, k, v)))
        torch.testing.assert_close(got.to(want.dtype), want, atol=atol, rtol=atol)
        for own, theirs in zip(mine.cache.layers[spec.layer], oracle.cache.layers[spec.layer], strict=True):
            stored = own if mine.cache.layout == "NHD" else own.transpose(1, 2)
            assert torch.equal(stored.to(theirs.dtype), theirs)


def decodes(kv_lens: Sequence[int], pages: Sequence[int], page_size: int, **options: Any) -> StepBatch:
    """A step of one token for each request; each gets as many of the pages as it needs."""
    needed = sum(-(-n // page_size) for n in kv_lens)
    return StepBatch.build(
        token_ids=[0] * len(kv_lens), num_new=None, kv_lens=kv_lens, pages=pages[:needed], page_size=page_size,
        **options,
    )  # fmt: skip


def narrow(specs: Sequence[AttentionSpec]) -> tuple[AttentionSpec, ...]:
    """The same layers with their keys and values in e4m3, divided by KV_SCALES."""
    return tuple(replace(spec, kv_dtype=E4M3, kv_scales=KV_SCALES) for spec in specs)


def error_of_narrow_keys(batch: StepBatch, mine: AttentionBackend, oracle: AttentionBackend) -> float:
    """The relative error of a step over e4m3 keys; the oracle has the same keys in its wide dtype."""
    generator = torch.Generator().manual_seed(batch.num_tokens)
    wide, device = oracle.cache.dtype, mine.cache.device
    for pairs in zip(mine.cache.layers, oracle.cache.layers, strict=True):
        for own, theirs, scale in zip(*pairs, KV_SCALES, strict=True):
            values = round_kv(torch.randn(theirs.shape, generator=generator).to(device), scale, E4M3)
            theirs.copy_(values.to(wide) * scale)
            own.copy_(values if mine.cache.layout == "NHD" else values.transpose(1, 2))
    mine.plan(batch)
    oracle.plan(batch)
    lost = total = 0.0
    for spec in mine.specs:
        q, k, v = (
            torch.randn(batch.num_tokens, heads, spec.head_dim, generator=generator).to(device, mine.cache.dtype)
            for heads in (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        rounded = [round_kv(x, scale, E4M3).to(wide) * scale for x, scale in zip((k, v), KV_SCALES, strict=True)]
        got, want = mine(spec.layer, q, k, v), oracle(spec.layer, q.to(wide), *rounded)
        lost, total = lost + float((got.to(wide) - want).square().sum()), total + float(want.square().sum())
        for own, theirs, scale in zip(
            mine.cache.layers[spec.layer], oracle.cache.layers[spec.layer], KV_SCALES, strict=True
        ):
            stored = own if mine.cache.layout == "NHD" else own.transpose(1, 2)
            assert torch.equal(stored.to(wide) * scale, theirs)
    return (lost / total) ** 0.5


def recorded(backend: AttentionBackend, batch: StepBatch, inputs: Sequence[Sequence[Tensor]]) -> tuple[Any, list]:
    """Capture a step as a CUDA graph; return the graph and its outputs."""

    def run() -> list[Tensor]:
        return [backend(layer, *qkv) for layer, qkv in enumerate(inputs)]

    backend.plan(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs
