"""Each launch, compared with the parts that it replaces, in float64; on a GPU of compute capability 9."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_engine.kernels.fused_products import (
    MOST_BLOCKS,
    MOST_BYTES,
    add_product,
    block_bytes,
    gate_up_swiglu,
    num_splits,
    qkv_append,
)
from mini_engine.models.layers import qk_norm, rms_norm
from mini_engine.models.linear import linear
from mini_engine.rope import apply_rope

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9")
NUM_TOKENS = [1, 5, 64, 65, 128, 190, 200, 256]
EPS = 1e-6


class Random:
    """Tensors on the GPU, the same for each seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to("cuda", torch.bfloat16)

    def tokens(self, num_tokens: int, size: int) -> torch.Tensor:
        """Tokens of very different scales; the smallest need the epsilon of the norm."""
        return self(num_tokens, size) * torch.logspace(-3, 2, num_tokens).to("cuda", torch.bfloat16)[:, None]


def normalized(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.double(), torch.ones(x.shape[1], dtype=torch.float64, device=x.device), EPS)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=2e-2)


@given(st.integers(1, 10_000), st.integers(1, 200))
def test_as_many_blocks_share_a_tile_as_fill_the_gpu(num_tiles: int, num_sms: int) -> None:
    splits, most_blocks = num_splits(num_tiles, num_sms), 3 * num_sms / 2
    assert splits in (1, 2, 4, MOST_BLOCKS)
    assert splits == 1 or num_tiles * splits <= (2 * num_sms if splits == 2 else most_blocks)
    assert splits == MOST_BLOCKS or num_tiles * 2 * splits > most_blocks


# Rows and columns of the four products of a layer, and for how many tokens the fused products are used, on 132 SMs.
SHAPES = {
    "Qwen3-0.6B": ([(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], 128),
    "Llama-3.2-1B": ([(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)], 128),
    "Llama-3.1-8B": ([(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], 0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_large_matrices_read_too_many_bytes(shape: str) -> None:
    products, most_tokens = SHAPES[shape]
    for num_tokens in (1, 64, 65, 128):
        largest = max(block_bytes(*sizes, num_tokens, 132) for sizes in products)
        assert (largest <= MOST_BYTES) == (num_tokens <= most_tokens)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim", "hidden_size"),
    [(16, 8, 128, 1024), (4, 2, 128, 192), (9, 3, 64, 576), (5, 1, 64, 72)],
)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_queries_and_cache_are_those_of_the_parts(
    layout, norm, num_qo_heads, num_kv_heads, head_dim, hidden_size, num_tokens
):
    random = Random(num_qo_heads)
    page_size, num_pages = 4, 80
    weight = random((num_qo_heads + 2 * num_kv_heads) * head_dim, hidden_size) / hidden_size**0.5
    x = random.tokens(num_tokens, hidden_size)
    weights = (random(head_dim), random(head_dim)) if norm else None
    angles = torch.rand(num_tokens, head_dim // 2, generator=random.generator).to("cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(num_pages * page_size, generator=random.generator)[:num_tokens].to("cuda")
    page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    pages = random(num_pages, *page, head_dim), random(num_pages, *page, head_dim)
    before = [cache.clone() for cache in pages]

    heads = linear(normalized(x), weight.double()).view(num_tokens, -1, head_dim)
    q_and_k, v = heads[:, : num_qo_heads + num_kv_heads], heads[:, num_qo_heads + num_kv_heads :]
    if weights:
        q_and_k = qk_norm(q_and_k, *(own.double() for own in weights), num_qo_heads, EPS)
    q_and_k = apply_rope(q_and_k, cos.double(), sin.double())
    for next_waits in (False, True):
        for cache, old in zip(pages, before, strict=True):
            cache.copy_(old)
        got = qkv_append(x, weight, weights, EPS, cos, sin, pages, layout, slots, next_waits=next_waits)
        assert_close(got, q_and_k[:, :num_qo_heads])
        for cache, old, new in zip(pages, before, (q_and_k[:, num_qo_heads:], v), strict=True):
            by_slot, want = (stored if layout == "NHD" else stored.transpose(1, 2) for stored in (cache, old))
            want = want.clone().flatten(0, 1).double()
            want[slots] = new
            assert_close(by_slot.flatten(0, 1), want)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_scales", [None, (0.5, 2.0), (0.001, 1.5)], ids=["none", "two", "too small"])
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (5, 1, 64), (9, 3, 64)])
@pytest.mark.parametrize("num_tokens", [5, 64, 128])
def test_a_cache_in_e4m3_gets_rounded_keys(layout, kv_scales, num_qo_heads, num_kv_heads, head_dim, num_tokens):
    """The smallest scale makes most keys too large, and they become the largest number of e4m3."""
    random, page_size, num_pages, hidden_size = Random(num_tokens), 4, 40, 192
    weight = random((num_qo_heads + 2 * num_kv_heads) * head_dim, hidden_size) / hidden_size**0.5
    x, scales = random.tokens(num_tokens, hidden_size), kv_scales or (1.0, 1.0)
    angles = torch.rand(num_tokens, head_dim // 2, generator=random.generator).to("cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(num_pages * page_size, generator=random.generator)[:num_tokens].to("cuda")
    page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    pages = tuple(random(num_pages, *page, head_dim).to(torch.float8_e4m3fn) for _ in range(2))
    before = [cache.clone() for cache in pages]
    got = qkv_append(x, weight, None, EPS, cos, sin, pages, layout, slots, kv_scales=kv_scales)

    heads = linear(normalized(x), weight.double()).view(num_tokens, -1, head_dim)
    q_and_k, v = heads[:, : num_qo_heads + num_kv_heads], heads[:, num_qo_heads + num_kv_heads :]
    q_and_k = apply_rope(q_and_k, cos.double(), sin.double())
    assert_close(got, q_and_k[:, :num_qo_heads])
    for cache, old, new, scale in zip(pages, before, (q_and_k[:, num_qo_heads:], v), scales, strict=True):
        by_slot, want = (stored if layout == "NHD" else stored.transpose(1, 2) for stored in (cache, old))
        by_slot, want = (stored.double().flatten(0, 1) for stored in (by_slot, want))
        want[slots] = (new / scale).clamp(-448, 448)
        # Half a step between neighbors is at most 2^-4 of a number, and the product has an error of its own.
        torch.testing.assert_close(by_slot, want, atol=2e-2 / scale, rtol=2**-4 + 1e-2)
        others = torch.ones(len(want), dtype=torch.bool, device="cuda").index_fill(0, slots, False)
        assert torch.equal(by_slot[others], want[others])


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("size", "hidden_size", "scale"), [(3072, 1024, 1), (192, 128, 100), (100, 72, 1)])
def test_the_activation_is_that_of_the_product(num_tokens: int, size: int, hidden_size: int, scale: int) -> None:
    """With a scale of 100 the exponentials of some gates overflow."""
    random = Random(num_tokens)
    x, gate_up = random.tokens(num_tokens, hidden_size), random(2 * size, hidden_size) * (scale / hidden_size**0.5)
    gate, up = linear(normalized(x), gate_up.double()).chunk(2, dim=1)
    assert_close(gate_up_swiglu(x, gate_up, EPS), torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(1024, 3072), (1024, 2048), (4096, 512), (96, 256), (74, 200)])
def test_the_product_is_added_in_place(num_tokens: int, num_rows: int, num_columns: int) -> None:
    random = Random(num_tokens)
    x, weight = random(num_tokens, num_columns), random(num_rows, num_columns) / num_columns**0.5
    residual = random(num_tokens, num_rows)
    want = residual.double() + linear(x.double(), weight.double())
    results = []
    for _ in range(3):
        results.append(residual.clone())
        assert add_product(results[-1], x, weight) is results[-1]
        assert_close(results[-1], want)
    assert all(torch.equal(one, results[0]) for one in results), "the sums of the splits are added in one order"


@pytest.mark.gpu
@ON_HOPPER
def test_a_graph_of_products_equals_the_parts_again_and_again() -> None:
    """Products that start before the one in front of them has ended still read its result."""
    random, num_tokens, hidden_size, size = Random(3), 130, 512, 1024
    gate_ups = [random(2 * size, hidden_size) / hidden_size**0.5 for _ in range(6)]
    downs = [random(hidden_size, size) / size**0.5 for _ in range(6)]
    start, stream = random(num_tokens, hidden_size), random(num_tokens, hidden_size)

    def run() -> None:
        stream.copy_(start)
        for gate_up, down in zip(gate_ups, downs, strict=True):
            add_product(stream, gate_up_swiglu(stream, gate_up, EPS), down)

    run()
    once, graph = stream.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    want = start.double()
    for gate_up, down in zip(gate_ups, downs, strict=True):
        gate, up = linear(normalized(want), gate_up.double()).chunk(2, dim=1)
        want = want + linear(torch.nn.functional.silu(gate) * up, down.double())
    torch.testing.assert_close(once.double(), want, atol=0.1, rtol=0.05)
    for _ in range(20):
        stream.zero_()
        graph.replay()
        assert torch.equal(stream, once)
