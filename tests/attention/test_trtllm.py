"""The flashinfer_trtllm backend: its tables, what it refuses, and its kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import backend as backend_module
from mini_engine.attention.backend import create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.torch import TorchBackend
from mini_engine.attention.trtllm import block_tables
from mini_engine.batch import StepBuffers, step_memory
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache, round_kv
from mini_engine.parts import Parts
from tests.attention.greedy import check_greedy
from tests.attention.stepping import (
    KV_SCALES,
    check_equal,
    decodes,
    error_of_narrow_keys,
    full_cache,
    narrow,
    random_step,
    recorded,
    run_in_steps,
)  # fmt: skip

QWEN3 = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)


# --- the table --------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(0, 3))
def test_a_table_has_the_pages_of_each_request_and_then_zeros(rows: list[list[int]], extra: int) -> None:
    """With the lengths of its rows it converts back to CSR, whatever the pages are, page 0 included."""
    indices = np.array([page for row in rows for page in row], dtype=np.int32)
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    table = block_tables(indices, indptr, max(map(len, rows)) + extra)
    assert table.dtype == np.int32 and table.flags.c_contiguous
    assert [row[: len(pages)].tolist() for row, pages in zip(table, rows, strict=True)] == rows
    assert not any(row[len(pages) :].any() for row, pages in zip(table, rows, strict=True))


def test_page_0_is_a_page() -> None:
    table = block_tables(np.array([0, 3, 0, 2], dtype=np.int32), np.array([0, 1, 4], dtype=np.int32), 3)
    assert table.tolist() == [[0, 0, 0], [3, 0, 2]]


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (QWEN3, {"page_size": 8}, "needs pages of 16, 32, 64 or 128 tokens; page_size is 8; set page_size=16 or use"),
        (
            replace(QWEN3, num_qo_heads=64, num_kv_heads=1),
            {},
            "decode kernel that supports none of the model's layers",
        ),
        (replace(QWEN3, head_dim=96), {}, "needs heads of size 64, 128 or 256, not 96; use attn_backend="),
        (replace(QWEN3, softcap=3.0), {}, "decode kernel that supports none of the model's layers"),
        (replace(QWEN3, alibi_slopes=(0.1,) * 16), {}, "ALiBi only with the slopes of Press et al."),
        (QWEN3, {"dtype": torch.float32}, "does not read keys in torch.float32; set dtype='bfloat16' or use"),
        (replace(QWEN3, kv_dtype=torch.float8_e5m2), {}, "does not read keys in torch.float8_e5m2; set kv_cache_dtype"),
        (QWEN3, {"architecture": 8}, "needs a GPU of compute capability 9, 10, 12 (Hopper or Blackwell), not 8; use"),
    ],
)
def test_a_refusal_says_why_and_names_a_way_out(spec: AttentionSpec, options: dict[str, Any], message: str) -> None:
    options = {"page_size": 16, "dtype": torch.bfloat16, "architecture": 9} | options
    cache = PagedKVCache([spec], 1, options["page_size"], options["dtype"])
    cache.device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "find_spec", lambda name: object())
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (options["architecture"], 0))
        with pytest.raises(ConfigError) as refusal:
            create_backend("flashinfer_trtllm", [spec], cache, Parts())
    assert message in str(refusal.value)


# --- the kernels, on a GPU --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    pytest.importorskip("flashinfer")
    return torch.device("cuda")


SHAPES = {
    "llama": (replace(QWEN3, num_qo_heads=9, num_kv_heads=3, head_dim=64, scale=0.125),),
    "qwen3": (QWEN3, replace(QWEN3, layer=1, window=33)),
    "wide": (replace(QWEN3, num_qo_heads=8, num_kv_heads=1, head_dim=256, scale=1 / 16),),
    "gpt2": (replace(QWEN3, num_qo_heads=12, num_kv_heads=12, head_dim=64, scale=0.125),),
}
BF16 = 2e-2  # the kernels accumulate in float32, and round the weights of the softmax and the output to bfloat16
NARROW = 0.08  # relative, over a whole step: on Hopper, XQA rounds queries and weights to e4m3 too


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(st.data())
def test_kernels_equal_the_reference(gpu: torch.device, shape: str, layout: str, data: st.DataObject) -> None:
    """Any mix of decodes and prompts on random pages, compared with the torch backend in float64."""
    # Each shape and page size is a kernel that takes half a minute to compile.
    specs, page_size = SHAPES[shape], data.draw(st.sampled_from([16, 32, 64, 128] if shape == "qwen3" else [16]))
    batch, num_pages = random_step(data, page_size, gaps=False, longest=500, device="cuda")
    mine = PagedKVCache(specs, num_pages, page_size, torch.bfloat16, gpu, layout)
    theirs = PagedKVCache(specs, num_pages, page_size, torch.float64, gpu)
    backend = create_backend("flashinfer_trtllm", specs, mine, Parts())
    check_equal(batch, backend, TorchBackend(specs, theirs, Parts()), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_trtllm"])
@settings(max_examples=6)
@given(st.data())
def test_kernels_read_narrow_keys(gpu: torch.device, name: str, shape: str, layout: str, data: st.DataObject) -> None:
    specs, page_size = SHAPES[shape], data.draw(st.sampled_from([16, 128] if shape == "qwen3" else [16]))
    batch, num_pages = random_step(data, page_size, gaps=False, longest=500, device="cuda")
    mine = PagedKVCache(narrow(specs), num_pages, page_size, torch.bfloat16, gpu, layout)
    theirs = PagedKVCache(specs, num_pages, page_size, torch.float64, gpu)
    backend = create_backend(name, narrow(specs), mine, Parts())
    assert error_of_narrow_keys(batch, backend, TorchBackend(specs, theirs, Parts())) < NARROW


@pytest.mark.gpu
def test_a_long_context_is_split_over_thread_blocks(gpu: torch.device) -> None:
    """Long enough for several blocks per request, whose results are merged through the scratch memory."""
    batch = decodes([9000, 70, 5003], range(1000), 16, device="cuda")
    mine = PagedKVCache([QWEN3], 1000, 16, torch.bfloat16, gpu, "HND")
    theirs = PagedKVCache([QWEN3], 1000, 16, torch.float64, gpu)
    backend = create_backend("flashinfer_trtllm", [QWEN3], mine, Parts())
    for _ in range(3):  # a launch leaves the counters at zero
        check_equal(batch, backend, TorchBackend([QWEN3], theirs, Parts()), BF16)


@pytest.mark.gpu
def test_slots_that_were_never_written_do_not_matter(gpu: torch.device) -> None:
    specs = SHAPES["qwen3"]
    cache = full_cache(specs, 40, 16, torch.bfloat16, device="cuda")
    backend = create_backend("flashinfer_trtllm", specs, cache, Parts())
    runs = run_in_steps(backend, specs, [90, 1, 140, 33], [40, 1, 139, 8], range(40), 16, torch.bfloat16, "cuda")
    for _, got, want in runs:
        torch.testing.assert_close(got, want, atol=BF16, rtol=BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_graph_replays_with_new_lengths(gpu: torch.device, layout: str, is_narrow: bool) -> None:
    """Captured over padding, then replayed over steps of other lengths and pages, page 0 among them."""
    specs, num_pages, page_size = SHAPES["qwen3"], 200, 16
    own = narrow(specs) if is_narrow else specs
    scales = KV_SCALES if is_narrow else (1.0, 1.0)
    mine = PagedKVCache(own, num_pages, page_size, torch.bfloat16, gpu, layout)
    theirs = PagedKVCache(specs, num_pages, page_size, torch.float64, gpu)
    for pairs in zip(mine.layers, theirs.layers, strict=True):
        for stored, wide, scale in zip(*pairs, scales, strict=True):
            values = round_kv(torch.randn_like(wide), scale, stored.dtype)
            wide.copy_(values.to(torch.float64) * scale)
            stored.copy_(values if layout == "NHD" else values.transpose(1, 2))
    backend, oracle = create_backend("flashinfer_trtllm", own, mine, Parts()), TorchBackend(specs, theirs, Parts())
    heads = (QWEN3.num_qo_heads, QWEN3.num_kv_heads, QWEN3.num_kv_heads)
    inputs = [[torch.zeros(3, n, 128, device=gpu, dtype=torch.bfloat16) for n in heads] for _ in specs]
    buffers, capacity = StepBuffers(gpu, step_memory(3, 3 * 64, gpu)), 3 * 64
    padding = decodes([1, 1, 1], [num_pages - 1] * 3, page_size, page_capacity=capacity, into=buffers)
    graph, outputs = recorded(backend, padding, inputs)
    for seed, kv_lens in enumerate([[5, 900, 33], [16, 17, 1024], [1, 1, 1], [700, 48, 2]]):
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)).tolist()
        order.remove(0)
        batch = decodes(kv_lens, [0, *order], page_size, page_capacity=capacity, into=buffers)
        for layer in inputs:
            for x in layer:
                x.normal_()
        backend.plan(batch)
        graph.replay()
        oracle.plan(batch)
        for layer, (q, k, v) in enumerate(inputs):
            stored = [round_kv(x, n, own[0].kv_dtype or x.dtype).double() * n for x, n in zip((k, v), scales)]  # noqa: B905
            want = oracle(layer, q.double(), *stored)
            error = (outputs[layer].double() - want).norm() / want.norm()
            assert error < (NARROW if is_narrow else BF16), f"lengths {kv_lens}, layer {layer}"


@pytest.mark.gpu
def test_a_step_waits_for_the_device_nowhere(gpu: torch.device) -> None:
    backend = create_backend("flashinfer_trtllm", [QWEN3], PagedKVCache([QWEN3], 7, 16, torch.bfloat16, gpu), Parts())
    q, k, v = (torch.zeros(2, heads, 128, device=gpu, dtype=torch.bfloat16) for heads in (16, 8, 8))
    for page_capacity in (None, 14):
        batch = decodes([50, 40], range(7), 16, device="cuda", page_capacity=page_capacity)
        backend.plan(batch)
        backend(0, q, k, v)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.plan(batch)
            backend(0, q, k, v)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"kv_layout": "NHD"}, {"kv_layout": "HND"}, {"cuda_graph_batch_sizes": []}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_greedy_tokens_are_those_of_the_reference(gpu: torch.device, family: str, options: dict[str, Any]) -> None:
    check_greedy(gpu, family, attn_backend="flashinfer_trtllm", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_trtllm"])
def test_an_engine_runs_on_narrow_keys(gpu: torch.device, name: str) -> None:
    check_greedy(gpu, "qwen3", attn_backend=name, kv_cache_dtype="fp8_e4m3", most_lost=0.2, fewer_best=0.4)
