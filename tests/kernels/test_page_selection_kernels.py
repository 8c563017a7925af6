"""The kernels of page selection, compared with their references: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mini_engine.attention import page_selection as reference
from mini_engine.attention.page_selection import DecodePages, select_pages
from tests.kernels.random_tensors import Random

pytest.importorskip("triton")
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS = [(6, 2, 16), (9, 3, 64), (4, 4, 32), (16, 1, 16)]


class Step:
    """Decodes over pages in random order, with NaN in every slot and every summary that must not matter."""

    def __init__(
        self, kv_lens: list[int], heads: tuple[int, int, int], page_size: int, device: str, layout: str = "NHD"
    ) -> None:
        num_qo_heads, num_kv_heads, head_dim = heads
        random = Random(len(kv_lens) + page_size, device)
        self.lens = torch.tensor(kv_lens, device=device)
        counts = -(-self.lens // page_size)
        total = int(counts.sum())
        order = torch.randperm(total + 3, generator=random.generator)[:total].int().to(device)
        first = counts.cumsum(0) - counts
        self.pages = DecodePages(order, first, self.lens, page_size, int(counts.max()) + 70)
        self.q = random(len(kv_lens), num_qo_heads + 2, head_dim)[:, 1:-1]  # a part of a longer row
        self.k, self.v = (random(total + 3, page_size, num_kv_heads, head_dim) for _ in range(2))
        self.low, self.high = self.k.amin(dim=1), self.k.amax(dim=1)
        for b, length in enumerate(kv_lens):
            last = order[first[b] + counts[b] - 1].item()
            for x in (self.k, self.v):
                x[last, length - (int(counts[b]) - 1) * page_size :] = torch.nan
            self.low[last] = self.high[last] = torch.nan
        if layout == "HND":
            self.k, self.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (self.k, self.v))


def close(device: str) -> dict[str, float]:
    return {"atol": 3e-2, "rtol": 3e-2} if device == "cuda" else {"atol": 1e-5, "rtol": 1e-5}


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.float() for x in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_bounds_are_those_of_the_reference(device: str, heads: tuple[int, int, int], page_size: int) -> None:
    from mini_engine.kernels.page_selection import bound_scores

    step = Step([1, 70, page_size, 3 * page_size + 1], heads, page_size, device)
    got = bound_scores(step.q, step.low, step.high, step.pages)
    want = reference.bound_scores.__wrapped__(*wide(step.q, step.low, step.high), step.pages)
    torch.testing.assert_close(got, want, **close(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 5, 256, 300, 4100])
def test_the_largest_bounds_are_selected(device: str, width: int) -> None:
    """Of both signs, with infinities, zeros of both signs, tiny numbers, and many equal ones."""
    from mini_engine.kernels.page_selection import select_pages as select

    random = Random(width, device)
    bounds = torch.randn(2, 3, width, generator=random.generator)
    bounds[0] *= 1e-42
    bounds[1, 0] = bounds[1, 0].round()  # -0 and 0 are neighbors, so either may be selected first
    bounds[..., width // 2 :: 7], bounds[..., :1] = -torch.inf, torch.inf
    bounds = bounds.to(device)
    for most in {1, 2, width // 3 + 1, width, width + 9}:
        selected, want = select(bounds, most), reference.select_pages.__wrapped__(bounds, most)
        assert selected.shape == want.shape and bool((selected.diff(dim=-1) > 0).all())
        got, want = (bounds.gather(2, own).sort(dim=-1).values for own in (selected, want))
        torch.testing.assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("page_size", "most"), [(1, 9), (3, 4), (16, 3), (16, 40)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_that_of_the_reference(
    device: str, heads: tuple[int, int, int], page_size: int, most: int, softcap: float | None
) -> None:
    """Requests with more pages than are selected, and with fewer: their other places are in some of the splits."""
    from mini_engine.kernels.page_selection import attend_to_pages

    for layout in ("NHD", "HND"):
        step = Step([1, 210, page_size, 6 * page_size + 1], heads, page_size, device, layout)
        bounds = reference.bound_scores.__wrapped__(*wide(step.q, step.low, step.high), step.pages)
        selected = select_pages(bounds, most)
        options = {"pages": step.pages, "selected": selected, "scale": 0.3, "softcap": softcap}
        got = attend_to_pages(step.q, step.k, step.v, **options)
        want = reference.attend_to_pages.__wrapped__(*wide(step.q, step.k, step.v), **options)
        torch.testing.assert_close(got.float(), want, **close(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 40])
def test_summaries_are_those_of_the_reference(device: str, layout: str, page_size: int) -> None:
    """Of the pages whose last slot is stored, and of no others."""
    from mini_engine.kernels.page_selection import summarize_pages

    random = Random(page_size, device)
    k = random(9, page_size, 3, 16)
    if layout == "HND":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    slots = torch.randperm(9 * page_size, generator=random.generator)[: 6 * page_size].to(device)
    got, want = (torch.full((2, 9, 3, 16), 7.0, device=device, dtype=random.dtype) for _ in range(2))
    summarize_pages(k, *got, slots)
    reference.summarize_pages.__wrapped__(k, *want, slots)
    assert torch.equal(got, want) and bool((got != 7).any())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8, 128), (9, 3, 64), (8, 4, 256)], ids=str)
@pytest.mark.parametrize(("kv_lens", "most"), [([5000], 64), ([30_000, 1, 700, 4096] * 4, 256), ([1] * 64, 4)])
def test_the_kernels_in_shapes_of_models(heads: tuple[int, int, int], kv_lens: list[int], most: int) -> None:
    """From bounds to attention, through the dispatch of the references."""
    step = Step(kv_lens, heads, 16, "cuda")
    bounds = reference.bound_scores(step.q, step.low, step.high, step.pages)
    want = reference.bound_scores.__wrapped__(*wide(step.q, step.low, step.high), step.pages)
    torch.testing.assert_close(bounds, want, atol=5e-2, rtol=2e-2)
    selected = select_pages(bounds, most)
    options = {"pages": step.pages, "selected": selected, "scale": heads[2] ** -0.5}
    got = reference.attend_to_pages(step.q, step.k, step.v, **options)
    want = reference.attend_to_pages.__wrapped__(*wide(step.q, step.k, step.v), **options)
    torch.testing.assert_close(got.float(), want, atol=1e-2, rtol=1e-2)
