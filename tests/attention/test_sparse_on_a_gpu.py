"""The `sparse` backend with its kernels on a GPU: steps, CUDA graphs, and the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mini_engine.attention.backend import create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBuffers, step_memory
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention.greedy import check_greedy
from tests.attention.stepping import decodes, full_cache, recorded, run_in_steps

QWEN3 = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
BF16 = 2e-2  # the kernels accumulate in float32, and round the weights of the softmax and the output to bfloat16


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    pytest.importorskip("flashinfer")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_budget_for_all_pages_changes_nothing(gpu: torch.device, layout: str) -> None:
    """Prompts, chunks and decodes; slots that no token has written hold NaN."""
    specs = (QWEN3, replace(QWEN3, layer=1, key_budget=4096), replace(QWEN3, layer=2, key_budget=4096, softcap=3.0))
    cache = full_cache(specs, 40, 16, torch.bfloat16, device="cuda", layout=layout)
    backend = create_backend("sparse", specs, cache, Parts())
    runs = run_in_steps(backend, specs, [90, 1, 140, 33], [40, 1, 139, 8], range(40), 16, torch.bfloat16, "cuda")
    for _, got, want in runs:
        torch.testing.assert_close(got, want, atol=BF16, rtol=BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_graph_replays_with_new_lengths(gpu: torch.device, layout: str) -> None:
    """Captured over padding, then replayed over other pages: it selects those that the reference selects."""
    specs = (QWEN3, replace(QWEN3, layer=1, key_budget=64), replace(QWEN3, layer=2, key_budget=128, softcap=2.0))
    num_pages, page_size = 200, 16
    mine = PagedKVCache(specs, num_pages, page_size, torch.bfloat16, gpu, layout)
    theirs = PagedKVCache(specs, num_pages, page_size, torch.float64)
    for layer, pairs in enumerate(zip(mine.layers, theirs.layers, strict=True)):
        for stored, wide in zip(*pairs, strict=True):
            values = torch.randn(wide.shape).to(stored.dtype)
            wide.copy_(values)
            stored.copy_(values if layout == "NHD" else values.transpose(1, 2))
        for cache in (mine, theirs):
            for summary, wide in zip(cache.summaries.get(layer, ()), torch.aminmax(pairs[1][0], dim=1), strict=False):
                summary.copy_(wide)
    backend, oracle = create_backend("sparse", specs, mine, Parts()), create_backend("sparse", specs, theirs, Parts())
    inputs = [[torch.zeros(3, n, 128, device=gpu, dtype=torch.bfloat16) for n in (16, 8, 8)] for _ in specs]
    buffers, capacity = StepBuffers(gpu, step_memory(3, 3 * 64, gpu)), 3 * 64
    padding = decodes([1, 1, 1], [num_pages - 1] * 3, page_size, page_capacity=capacity, into=buffers)
    graph, outputs = recorded(backend, padding, inputs)
    for seed, kv_lens in enumerate([[5, 900, 33], [16, 17, 1024], [1, 1, 1], [700, 48, 2]]):
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)).tolist()
        backend.plan(decodes(kv_lens, order, page_size, page_capacity=capacity, into=buffers))
        oracle.plan(decodes(kv_lens, order, page_size))
        for layer in inputs:
            for x in layer:
                x.normal_()
        graph.replay()
        for layer, qkv in enumerate(inputs):
            want = oracle(layer, *(x.cpu().double() for x in qkv))
            torch.testing.assert_close(outputs[layer].cpu().double(), want, atol=BF16, rtol=BF16, msg=f"{kv_lens}")


@pytest.mark.gpu
def test_a_step_waits_for_the_device_nowhere(gpu: torch.device) -> None:
    spec = replace(QWEN3, key_budget=32)
    backend = create_backend("sparse", [spec], PagedKVCache([spec], 7, 16, torch.bfloat16, gpu), Parts())
    q, k, v = (torch.zeros(2, heads, 128, device=gpu, dtype=torch.bfloat16) for heads in (16, 8, 8))
    for page_capacity in (None, 14):
        batch = decodes([50, 40], range(7), 16, device="cuda", page_capacity=page_capacity)
        backend.plan(batch)
        backend(0, q, k, v)
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.plan(batch)
            backend(0, q, k, v)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_layout": "HND"}, {"cuda_graph_batch_sizes": []}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_with_a_large_budget_are_those_of_the_reference(
    gpu: torch.device, family: str, options: dict[str, Any]
) -> None:
    """Through fused layers, which store the keys themselves, and after preemption."""
    config = {"method": "quest", "budget": 400, "num_dense_layers": 1}
    check_greedy(gpu, family, attn_backend="sparse", sparse_attention_config=config, **options)
