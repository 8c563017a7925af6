"""One launch, compared with the parts that it replaces: in Triton's interpreter here, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from mini_engine.kv_cache.paged import round_kv
from mini_engine.models.layers import qk_norm, rms_norm
from mini_engine.rope import apply_rope

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (5, 1, 16)])
def test_queries_and_cache_are_those_of_the_parts(
    device, layout, normalized, norm, num_qo_heads, num_kv_heads, head_dim
):  # fmt: skip
    """After the product of normalized tokens, and after a product whose norm is still to be applied."""
    from mini_engine.kernels.rotate_and_append import rotate_and_append

    generator = torch.Generator().manual_seed(num_qo_heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    num_tokens, page_size, num_pages = 5, 4, 7
    weight = random((num_qo_heads + 2 * num_kv_heads) * head_dim, 72) / 72**0.5
    tokens = random(num_tokens, 72) * torch.logspace(-3, 2, num_tokens).to(device, dtype)[:, None]  # one needs eps
    ones = torch.ones(72, dtype=torch.float64, device=device)
    product = (rms_norm(tokens.double(), ones, 1e-6) @ weight.double().T).to(dtype)
    qkv = product if normalized else tokens @ weight.T
    weights = (random(head_dim), random(head_dim)) if norm else None
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator).to(device) * 6
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens].to(device)
    page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    pages = random(num_pages, *page, head_dim), random(num_pages, *page, head_dim)
    before = [cache.clone() for cache in pages]

    pdl = device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    behind = {} if normalized else {"tokens": tokens, "pdl": pdl}
    got = rotate_and_append(qkv, weights, 1e-6, cos, sin, pages, layout, slots, **behind)

    heads = product.view(num_tokens, -1, head_dim)
    q_and_k, v = heads[:, : num_qo_heads + num_kv_heads], heads[:, num_qo_heads + num_kv_heads :]
    if weights:
        q_and_k = qk_norm(q_and_k, *weights, num_qo_heads, 1e-6)
    q_and_k = apply_rope(q_and_k, cos, sin)
    close = {"atol": 5e-2, "rtol": 2e-2} if device == "cuda" else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got, q_and_k[:, :num_qo_heads], **close)
    for cache, old, new in zip(pages, before, (q_and_k[:, num_qo_heads:], v), strict=True):
        by_slot = cache if layout == "NHD" else cache.transpose(1, 2)
        want = old if layout == "NHD" else old.transpose(1, 2)
        want = want.clone().flatten(0, 1)
        want[slots] = new
        torch.testing.assert_close(by_slot.flatten(0, 1), want, **close)


@pytest.mark.gpu  # the interpreter does not round to e4m3 like the GPU
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_scales", [None, (0.5, 2.0), (2.0**-9, 0.25)], ids=["none", "two", "too small"])
def test_a_cache_in_e4m3_gets_the_rounded_float32_numbers(layout, kv_scales):
    """They are those of a cache in float32, divided by the scales; the smallest scale makes most keys too large."""
    from mini_engine.kernels.rotate_and_append import rotate_and_append

    generator = torch.Generator().manual_seed(1)
    num_tokens, num_kv_heads, head_dim, page_size = 33, 3, 64, 16
    qkv = torch.randn(num_tokens, 10 * head_dim, generator=generator).to("cuda", torch.bfloat16)
    qkv[4, -1] = torch.nan
    angles = torch.rand(num_tokens, head_dim // 2, generator=generator).to("cuda") * 6
    slots = torch.randperm(7 * page_size, generator=generator)[:num_tokens].to("cuda")
    page = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    stored = []
    for dtype in (torch.float32, torch.float8_e4m3fn):
        stored.append([torch.zeros(7, *page, head_dim, device="cuda").to(dtype) for _ in range(2)])
        rotate_and_append(
            qkv, None, 1e-6, angles.cos(), angles.sin(), tuple(stored[-1]), layout, slots, kv_scales=kv_scales
        )
    for wide, narrow, scale in zip(*stored, kv_scales or (1.0, 1.0), strict=True):
        want = round_kv(wide, scale, torch.float8_e4m3fn)
        torch.testing.assert_close(narrow.float(), want.float(), atol=0, rtol=0, equal_nan=True)
        assert wide.any()
