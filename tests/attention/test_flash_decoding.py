"""The flash_decoding backend: how its work is shared out, what it refuses, and its kernel on a GPU."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import backend as backend_module
from mini_engine.attention.backend import create_backend
from mini_engine.attention.flash_decoding import PlannedDecode
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import attention_state
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBuffers, step_memory
from mini_engine.errors import ConfigError
from mini_engine.kernels.flash_decoding import FEWEST_TILES, MOST_SPLITS, TILE, last_keys_are_new, share_tiles
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention.greedy import check_greedy
from tests.attention.stepping import (
    check_equal,
    decodes,
    error_of_narrow_keys,
    full_cache,
    narrow,
    recorded,
    run_in_steps,
)

QWEN3 = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)


# --- the shares -------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=20), st.sampled_from([16, 32, 128]), st.integers(1, 150),
    st.none() | st.integers(1, 420), st.sampled_from([0, 0, 1, 4, 16]),
)  # fmt: skip
def test_ranges_cover_every_tile_once_and_know_who_shares_an_item(
    lens: list[int], page_size: int, num_ranges: int, window: int | None, split: int
) -> None:
    """With a window, every tile that it reaches; with splits, ranges begin where a split begins."""
    kv_lens = np.array(lens, dtype=np.int32)
    indptr = np.cumsum([0, *-(-kv_lens // page_size)], dtype=np.int32)
    work = share_tiles(kv_lens, indptr, num_ranges, window=window, split=split)
    assert work["ranges"].dtype == work["requests"].dtype == np.int32 and work["ranges"].shape == (num_ranges, 8)
    assert work["requests"].tolist() == [[n, first] for n, first in zip(lens, indptr[:-1].tolist(), strict=True)]
    begins = [0 if window is None else max(n - window, 0) // TILE for n in lens]
    tiles = [(row, tile) for row, n in enumerate(lens) for tile in range(begins[row], -(-n // TILE))]
    shares = work["ranges"][:, 2]
    used = shares[shares > 0]
    assert used.sum() == len(tiles)
    if split:
        sizes = [max(split, -(-(-(-n // TILE) - begin) // MOST_SPLITS)) for n, begin in zip(lens, begins, strict=True)]
        assert all((tile - begins[row]) % sizes[row] == 0 for row, tile in work["ranges"][: len(used), :2].tolist())
        share = len(tiles) / min(num_ranges, max(len(tiles) // FEWEST_TILES, 1))
        assert used.max() <= share + max(sizes)
    else:
        assert used.max() - used.min() <= 1 and (len(used) == 1 or used.min() >= FEWEST_TILES)
    assert not work["ranges"][len(used) :].any()  # the ranges without tiles are the last ones
    range_of, position = {}, 0
    for index, count in enumerate(used.tolist()):
        range_of |= dict.fromkeys(tiles[position : position + count], index)
        position += count
    position = 0
    for index, values in enumerate(work["ranges"][: len(used)].tolist()):
        row, tile, count, num_keys, first_page, owner, final, _ = values
        assert (row, tile) == tiles[position]
        assert (num_keys, first_page) == (lens[row], indptr[row])
        assert owner == range_of[row, begins[row]]
        position += count
        row, _ = tiles[position - 1]
        assert final == range_of[row, -(-lens[row] // TILE) - 1]
        assert index <= final < len(used)


@given(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=6, unique=True), min_size=1, max_size=8), st.data())
def test_a_step_whose_requests_read_a_page_that_another_one_fills_is_found(
    tables: list[list[int]], data: st.DataObject
) -> None:
    """The last page of each request is the one that it fills; only the padding's requests share theirs."""
    fills = [table[-1] for table in tables]
    reads_new = any(page in fills for table in tables for page in table[:-1])
    indptr = np.cumsum([0, *map(len, tables)], dtype=np.int32)
    pages = np.concatenate(tables).astype(np.int32)
    assert last_keys_are_new(pages, indptr, num_pages=9) is not reads_new
    last_is_new = data.draw(st.booleans())
    ranges = share_tiles(16 * np.diff(indptr), indptr, 4, last_is_new)["ranges"]
    assert (ranges[ranges[:, 2] > 0, 7] == last_is_new).all()


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=50), st.none() | st.integers(1, 2000), st.sampled_from([0, 16])
)
def test_a_range_has_one_request_at_most_that_it_began_and_others_continue(
    lens: list[int], window: int | None, split: int
) -> None:
    """One counter for each range is then enough, and one place for the results of an item that it continues."""
    kv_lens = np.array(lens, dtype=np.int32)
    indptr = np.cumsum([0, *-(-kv_lens // 16)], dtype=np.int32)
    ranges = share_tiles(kv_lens, indptr, 33, window=window, split=split)["ranges"]
    used = ranges[ranges[:, 2] > 0, 5:7].tolist()
    continues = Counter(owner for index, (owner, _) in enumerate(used) if owner != index)
    for index, (owner, final) in enumerate(used):
        assert owner <= index
        if owner == index or continues[index]:
            assert continues[index] == final - index


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (QWEN3, {"page_size": 8}, "needs a page_size that is a multiple of 16, not 8; set page_size=16 or use"),
        (replace(QWEN3, head_dim=96), {}, "needs heads of size 64, 128 or 256, not 96; use attn_backend="),
        (QWEN3, {"has_nvcc": False}, "needs nvcc of the CUDA toolkit to compile its kernel; use attn_backend="),
        (replace(QWEN3, num_kv_heads=1), {}, "has a decode kernel that supports none of the model's layers; use"),
        (QWEN3, {"dtype": torch.float32}, "does not read keys in torch.float32; set dtype='bfloat16' or use"),
        (QWEN3, {"architecture": 10}, "needs a GPU of compute capability 9 (Hopper), not 10; use attn_backend="),
    ],
)
def test_a_refusal_says_why_and_names_a_way_out(spec: AttentionSpec, options: dict[str, Any], message: str) -> None:
    options = {"page_size": 16, "dtype": torch.bfloat16, "architecture": 9} | options
    cache = PagedKVCache([spec], 1, options["page_size"], options["dtype"])
    cache.device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "find_spec", lambda name: object())
        patch.setattr(backend_module, "has_nvcc", lambda: options.get("has_nvcc", True))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (options["architecture"], 0))
        with pytest.raises(ConfigError) as refusal:
            create_backend("flash_decoding", [spec], cache, Parts())
    assert message in str(refusal.value)


# --- the kernel, on a GPU ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    pytest.importorskip("flashinfer")
    return torch.device("cuda")


BF16 = 2e-2  # the kernel accumulates in float32, and rounds the weights of the softmax and the output to bfloat16


def check_kernel(
    spec: AttentionSpec,
    kv_lens: list[int],
    *,
    page_size: int = 16,
    layout: str = "HND",
    dtype: torch.dtype,
    times: int = 2,
    name: str = "flash_decoding",
) -> None:
    """Compare one step of decodes with the torch backend in float64, on pages in random order."""
    device = torch.device("cuda")
    num_pages = sum(-(-n // page_size) for n in kv_lens) + 1
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(len(kv_lens))).tolist()
    batch = decodes(kv_lens, pages, page_size, device="cuda")
    mine = PagedKVCache([spec], num_pages, page_size, dtype, device, layout)
    theirs = PagedKVCache([spec], num_pages, page_size, torch.float64, device)
    backend = create_backend(name, [spec], mine, Parts())
    for _ in range(times):  # a launch leaves the counters at zero
        check_equal(batch, backend, TorchBackend([spec], theirs, Parts()), BF16)
    assert all(isinstance(wrapper, PlannedDecode) for wrapper in backend.wrappers.made.values())  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernel_equals_the_reference(
    gpu: torch.device, head_dim: int, group: int, layout: str, dtype: torch.dtype
) -> None:
    spec = replace(QWEN3, num_qo_heads=3 * group, num_kv_heads=3, head_dim=head_dim, scale=head_dim**-0.5)
    for kv_lens in ([1], [16], [17, 1, 64, 65], [300, 15, 31, 32, 33, 2, 900]):
        check_kernel(spec, kv_lens, layout=layout, dtype=dtype)


def check_narrow(
    spec: AttentionSpec,
    kv_lens: list[int],
    *,
    page_size: int = 16,
    layout: str = "HND",
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compare one step over keys in e4m3 with the torch backend in float64 over the same keys.

    The error is that of the softmax weights in float16 and of the rounded output, because e4m3 fits into float16.
    """
    device = torch.device("cuda")
    num_pages = sum(-(-n // page_size) for n in kv_lens) + 1
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(len(kv_lens))).tolist()
    batch, specs = decodes(kv_lens, pages, page_size, device="cuda"), narrow([spec])
    mine = PagedKVCache(specs, num_pages, page_size, dtype, device, layout)
    theirs = PagedKVCache([spec], num_pages, page_size, torch.float64, device)
    backend = create_backend("flash_decoding", specs, mine, Parts())
    for _ in range(2):
        assert error_of_narrow_keys(batch, backend, TorchBackend([spec], theirs, Parts())) < 5e-3
    assert all(isinstance(wrapper, PlannedDecode) for wrapper in backend.wrappers.made.values())  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 4), (64, 8), (128, 1), (128, 2), (128, 8)])
def test_keys_in_e4m3(gpu: torch.device, head_dim: int, group: int, layout: str, dtype: torch.dtype) -> None:
    spec = replace(QWEN3, num_qo_heads=3 * group, num_kv_heads=3, head_dim=head_dim, scale=head_dim**-0.5)
    for kv_lens in ([1], [16], [17, 1, 64, 65], [300, 15, 31, 32, 33, 2, 900]):
        check_narrow(spec, kv_lens, layout=layout, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 128])
@settings(max_examples=12)
@given(layout=st.sampled_from(["NHD", "HND"]), kv_lens=st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_any_mix_of_lengths_in_e4m3(gpu: torch.device, page_size: int, layout: str, kv_lens: list[int]) -> None:
    check_narrow(QWEN3, kv_lens, page_size=page_size, layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kv_lens", [[20_000], [9000, 70, 5003], [140] * 256, list(range(1, 301)), [1] * 299 + [8000]],
    ids=["one", "three", "equal", "rising", "skewed"],
)  # fmt: skip
def test_many_requests_and_long_ones_in_e4m3(gpu: torch.device, kv_lens: list[int]) -> None:
    check_narrow(QWEN3, kv_lens)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 32, 128])
@settings(max_examples=12)
@given(layout=st.sampled_from(["NHD", "HND"]), kv_lens=st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_any_mix_of_lengths(gpu: torch.device, page_size: int, layout: str, kv_lens: list[int]) -> None:
    check_kernel(QWEN3, kv_lens, page_size=page_size, layout=layout, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kv_lens", [[20_000], [9000, 70, 5003], [140] * 256, list(range(1, 301)), [1] * 300, [1] * 299 + [8000]],
    ids=["one", "three", "equal", "rising", "short", "skewed"],
)  # fmt: skip
def test_many_requests_and_long_ones(gpu: torch.device, kv_lens: list[int]) -> None:
    """Requests that many thread blocks share, and thread blocks that many requests share."""
    check_kernel(QWEN3, kv_lens, dtype=torch.bfloat16, times=3)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_splits_of_a_fixed_size(gpu: torch.device, head_dim: int, group: int) -> None:
    """Requests of one split, of several, of longer ones, and splits of a request in several ranges."""
    spec = replace(QWEN3, num_qo_heads=3 * group, num_kv_heads=3, head_dim=head_dim, scale=head_dim**-0.5)
    for kv_lens in ([1], [256], [257, 1, 512, 2000], [20_000], [9000, 70, 5003], [700] * 256, [1] * 299 + [8000]):
        check_kernel(spec, kv_lens, dtype=torch.bfloat16, name="batch_invariant")


# The layers of Gemma 2, and others with one of its features. The soft-cap is so low that it changes the scores a lot.
GEMMA = replace(QWEN3, num_qo_heads=8, num_kv_heads=4, head_dim=256, scale=256**-0.5, softcap=1.5)
SPECIAL = {
    "window": replace(QWEN3, window=100),
    "window of one key": replace(QWEN3, window=1),
    "soft-cap": replace(QWEN3, softcap=1.5),
    "heads of 256": replace(GEMMA, softcap=None),
    "heads of 256, group of 4": replace(GEMMA, num_qo_heads=16),
    "heads of 256, group of 8": replace(GEMMA, num_qo_heads=32, window=70),
    "Gemma 2": replace(GEMMA, window=300),
}


@pytest.mark.gpu
@pytest.mark.parametrize("is_narrow", [False, True], ids=["bfloat16", "e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", SPECIAL)
def test_windows_soft_caps_and_large_heads(gpu: torch.device, name: str, layout: str, is_narrow: bool) -> None:
    for kv_lens in ([1], [17, 1, 64, 65], [300, 15, 99, 100, 101, 33, 2, 900], [9000, 70, 5003], [140] * 256):
        if is_narrow:
            check_narrow(SPECIAL[name], kv_lens, layout=layout)
        else:
            check_kernel(SPECIAL[name], kv_lens, layout=layout, dtype=torch.bfloat16)


@pytest.mark.gpu
@settings(max_examples=25)
@given(
    st.sampled_from([1, 16, 33, 100, 128]), st.sampled_from([16, 32, 128]),
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
)  # fmt: skip
def test_any_mix_of_lengths_with_a_window(gpu: torch.device, window: int, page_size: int, kv_lens: list[int]) -> None:
    check_kernel(replace(QWEN3, window=window), kv_lens, page_size=page_size, dtype=torch.bfloat16)


@pytest.mark.gpu
def test_keys_before_the_window_are_not_read(gpu: torch.device) -> None:
    """Tiles before it may hold anything, as in pages that another request has overwritten."""
    spec, kv_lens = replace(QWEN3, window=40), [300, 33, 170]
    outputs = []
    for value in (0.0, torch.nan):
        cache = full_cache([spec], 40, 16, torch.bfloat16, value, "cuda")
        batch, first = decodes(kv_lens, range(40), 16, device="cuda"), 0
        for n in kv_lens:
            begin = max(n - 40, 0) // 16  # pages have the size of tiles
            for x, seed in zip(cache.layers[0], (1, 2), strict=True):
                pages = x[first + begin : first + -(-n // 16)]
                pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(seed + n)))
            first += -(-n // 16)
        backend = create_backend("flash_decoding", [spec], cache, Parts())
        backend.plan(batch)
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (
            torch.randn(3, heads, 128, generator=generator, device=gpu).bfloat16() for heads in (16, 8, 8)
        )  # fmt: skip
        outputs.append(backend(0, q, k, v))
    assert torch.equal(*outputs) and outputs[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lens", [[1], [17, 1, 64, 65], [9000, 70, 5003], [140] * 256], ids=len)
def test_the_lse_is_the_reference(gpu: torch.device, kv_lens: list[int]) -> None:
    """To base 2, also of requests that many thread blocks share; the output is the same with and without it."""
    counts = [-(-n // 16) for n in kv_lens]
    batch = decodes(kv_lens, list(range(sum(counts))), 16, device="cuda")
    cache = PagedKVCache([QWEN3], sum(counts), 16, torch.bfloat16, gpu)
    for x in cache.layers[0]:
        x.normal_()
    backend = create_backend("flash_decoding", [QWEN3], cache, Parts())
    backend.plan(batch)
    q = torch.randn(len(kv_lens), 16, 128, device=gpu).bfloat16()
    [[(_, decode)]] = backend._planned.values()  # type: ignore[attr-defined]
    lse, scales = torch.full(q.shape[:2], torch.nan, device=gpu), {"k_scale": 1.0, "v_scale": 2.0}
    out = decode.run(q, cache.layers[0], out=torch.empty_like(q), lse=lse, return_lse=True, **scales)
    assert torch.equal(out, decode.run(q, cache.layers[0], out=torch.empty_like(q), **scales))
    first = 0
    for b, (n, count) in enumerate(zip(kv_lens, counts, strict=True)):
        k, v = (x[first : first + count].flatten(0, 1)[:n].double() for x in cache.layers[0])
        state = attention_state(q[b : b + 1].double(), k, v, scale=QWEN3.scale)
        torch.testing.assert_close(lse[b].double(), state.lse[0] / math.log(2), atol=2e-3, rtol=1e-3)
        first += count


@pytest.mark.gpu
def test_slots_that_were_never_written_do_not_matter(gpu: torch.device) -> None:
    specs = (QWEN3, replace(QWEN3, layer=1, num_qo_heads=24))
    cache = full_cache(specs, 40, 16, torch.bfloat16, device="cuda")
    backend = create_backend("flash_decoding", specs, cache, Parts())
    runs = run_in_steps(backend, specs, [90, 1, 140, 33], [40, 1, 139, 8], range(40), 16, torch.bfloat16, "cuda")
    for _, got, want in runs:
        torch.testing.assert_close(got, want, atol=BF16, rtol=BF16)


@pytest.mark.gpu
def test_unwritten_slots_in_e4m3_do_not_matter(gpu: torch.device) -> None:
    """Their bytes are NaN. The tolerance is that of keys and values with four significant bits."""
    specs = narrow((QWEN3, replace(QWEN3, layer=1, head_dim=64, num_qo_heads=24)))
    cache = full_cache(specs, 10, 16, torch.bfloat16, device="cuda")
    backend = create_backend("flash_decoding", specs, cache, Parts())
    for _, got, want in run_in_steps(backend, specs, [40, 1, 33, 18], [1] * 4, range(10), 16, torch.bfloat16, "cuda"):
        torch.testing.assert_close(got, want, atol=0.15, rtol=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_graph_replays_with_new_lengths(gpu: torch.device, layout: str) -> None:
    """Captured over padding, then replayed over steps of other lengths and pages.

    One layer has a window, one has its keys in e4m3, and one has slopes, so it is FlashInfer's.
    """
    slopes = tuple(alibi_slopes(16).tolist())
    specs = (
        QWEN3, replace(QWEN3, layer=1, window=33), replace(QWEN3, layer=2, softcap=2.0, kv_dtype=torch.float8_e4m3fn),
        replace(QWEN3, layer=3, alibi_slopes=slopes),
    )  # fmt: skip
    num_pages, page_size = 200, 16
    mine = PagedKVCache(specs, num_pages, page_size, torch.bfloat16, gpu, layout)
    theirs = PagedKVCache([replace(spec, kv_dtype=None) for spec in specs], num_pages, page_size, torch.float64, gpu)
    for pairs in zip(mine.layers, theirs.layers, strict=True):
        for stored, wide in zip(*pairs, strict=True):
            values = torch.randn(wide.shape, device=gpu).to(stored.dtype)
            wide.copy_(values)
            stored.copy_(values if layout == "NHD" else values.transpose(1, 2))
    backend = create_backend("flash_decoding", specs, mine, Parts())
    oracle = TorchBackend([replace(spec, kv_dtype=None) for spec in specs], theirs, Parts())
    heads = (QWEN3.num_qo_heads, QWEN3.num_kv_heads, QWEN3.num_kv_heads)
    inputs = [[torch.zeros(3, n, 128, device=gpu, dtype=torch.bfloat16) for n in heads] for _ in specs]
    buffers, capacity = StepBuffers(gpu, step_memory(3, 3 * 64, gpu)), 3 * 64
    padding = decodes([1, 1, 1], [num_pages - 1] * 3, page_size, page_capacity=capacity, into=buffers)
    graph, outputs = recorded(backend, padding, inputs)
    for seed, kv_lens in enumerate([[5, 900, 33], [16, 17, 1024], [1, 1, 1], [700, 48, 2]]):
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)).tolist()
        batch = decodes(kv_lens, order, page_size, page_capacity=capacity, into=buffers)
        for layer in inputs:
            for x in layer:
                x.normal_()
        backend.plan(batch)
        graph.replay()
        oracle.plan(batch)
        for layer, qkv in enumerate(inputs):
            q, *kv = qkv
            stored = (x.to(mine.layers[layer][0].dtype).double() for x in kv)  # 448 is far away
            want = oracle(layer, q.double(), *stored)
            torch.testing.assert_close(outputs[layer].double(), want, atol=BF16, rtol=BF16, msg=f"lengths {kv_lens}")


@pytest.mark.gpu
def test_a_step_waits_for_the_device_nowhere(gpu: torch.device) -> None:
    backend = create_backend("flash_decoding", [QWEN3], PagedKVCache([QWEN3], 7, 16, torch.bfloat16, gpu), Parts())
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
@pytest.mark.parametrize(
    "options", [{"kv_layout": "NHD"}, {"kv_layout": "HND"}, {"cuda_graph_batch_sizes": []}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_greedy_tokens_are_those_of_the_reference(gpu: torch.device, family: str, options: dict[str, Any]) -> None:
    check_greedy(gpu, family, attn_backend="flash_decoding", **options)
