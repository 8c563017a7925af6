"""Each launch, compared with what it replaces: in Triton's interpreter here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from mini_engine.models.layers import qk_norm, rms_norm
from mini_engine.models.linear import linear
from mini_engine.rope import apply_rope

pytest.importorskip("triton")

from mini_engine.kernels.fused_products import ProductTile, add_product, gate_up_swiglu, qkv_append
from mini_engine.kernels.swiglu import swiglu_reference

HAS_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not HAS_PDL, reason="needs a GPU of compute capability 9.0 or higher")]
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=HOPPER)]
NUM_TOKENS = [1, 5, 64, 65, 256]
EPS = 1e-6


class Random:
    """Tensors on a device, the same for each seed."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def tokens(self, num_tokens: int, size: int) -> torch.Tensor:
        """Tokens of very different scales; the smallest need the epsilon of the norm."""
        scales = torch.logspace(-3, 2, num_tokens).to(self.device, self.dtype)
        return self(num_tokens, size) * scales[:, None]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 5e-2 if got.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim", "hidden_size"), [(4, 2, 128, 192), (9, 3, 64, 72), (5, 1, 32, 64)]
)
@pytest.mark.parametrize("num_tokens", [5, 65])
def test_queries_and_cache_are_those_of_the_parts(
    device, layout, norm, num_qo_heads, num_kv_heads, head_dim, hidden_size, num_tokens
):  # fmt: skip
    random = Random(device, num_qo_heads)
    page_size, num_pages = 4, 18
    weight = random((num_qo_heads + 2 * num_kv_heads) * head_dim, hidden_size) / hidden_size**0.5
    x = random.tokens(num_tokens, hidden_size)
    weights = (random(head_dim), random(head_dim)) if norm else None
    angles = torch.rand(num_tokens, head_dim // 2, generator=random.generator).to(device) * 6
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(num_pages * page_size, generator=random.generator)[:num_tokens].to(device)
    page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    pages = random(num_pages, *page, head_dim), random(num_pages, *page, head_dim)
    before = [cache.clone() for cache in pages]
    for pdl in (False, True) if device == "cuda" else (False,):
        got = qkv_append(x, weight, weights, EPS, cos, sin, pages, layout, slots, pdl=pdl, next_waits=pdl)

        ones = torch.ones(hidden_size, dtype=torch.float64, device=device)
        product = linear(rms_norm(x.double(), ones, EPS), weight.double())
        heads = product.to(random.dtype).view(num_tokens, -1, head_dim)
        q_and_k, v = heads[:, : num_qo_heads + num_kv_heads], heads[:, num_qo_heads + num_kv_heads :]
        if weights:
            q_and_k = qk_norm(q_and_k, *weights, num_qo_heads, EPS)
        q_and_k = apply_rope(q_and_k, cos, sin)
        assert_close(got, q_and_k[:, :num_qo_heads])
        for cache, old, new in zip(pages, before, (q_and_k[:, num_qo_heads:], v), strict=True):
            by_slot, want = (pages if layout == "NHD" else pages.transpose(1, 2) for pages in (cache, old))
            want = want.clone().flatten(0, 1)
            want[slots] = new
            assert_close(by_slot.flatten(0, 1), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("size", "hidden_size"), [(192, 128), (100, 72)])
def test_the_activation_is_that_of_the_product(device: str, num_tokens: int, size: int, hidden_size: int) -> None:
    random = Random(device, num_tokens)
    x, gate_up = random.tokens(num_tokens, hidden_size), random(2 * size, hidden_size) / hidden_size**0.5
    want = swiglu_reference(linear(x.double(), gate_up.double()), x.double(), EPS)
    for pdl in (False, True) if device == "cuda" else (False,):
        assert_close(gate_up_swiglu(x, gate_up, EPS, pdl=pdl), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(96, 256), (72, 200)])
def test_the_product_is_added_in_place(device: str, num_tokens: int, num_rows: int, num_columns: int) -> None:
    random = Random(device, num_tokens)
    x, weight = random(num_tokens, num_columns), random(num_rows, num_columns) / num_columns**0.5
    residual = random(num_tokens, num_rows)
    want = residual.double() + linear(x.double(), weight.double())
    for pdl in (False, True) if device == "cuda" else (False,):
        got = residual.clone()
        assert add_product(got, x, weight, pdl=pdl) is got
        assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tile", [ProductTile(64, 16, 64, 2), ProductTile(128, 32, 32, 3, num_warps=8)], ids=str)
def test_the_tile_changes_no_result(device: str, tile: ProductTile) -> None:
    random = Random(device, 0)
    x, weight, residual = random(70, 192), random(80, 192) / 192**0.5, random(70, 80)
    want = residual.double() + linear(x.double(), weight.double())
    assert_close(add_product(residual.clone(), x, weight, tile=tile), want)
    want = swiglu_reference(linear(x.double(), weight.double()), x.double(), EPS)
    assert_close(gate_up_swiglu(x, weight, EPS, tile=tile), want)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    random = Random(device, 1)
    x, weight, residual = random(130, 128), random(64, 128), random(130, 64)
    for some in (slice(0, 1), slice(3, 70), slice(64, 130)):
        assert torch.equal(
            add_product(residual[some].clone(), x[some], weight), add_product(residual.clone(), x, weight)[some]
        )
        assert torch.equal(gate_up_swiglu(x[some], weight, EPS), gate_up_swiglu(x, weight, EPS)[some])
