"""The decode kernel of latent attention, compared with its reference: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


def check(device: str, kv_lens: list[int], heads: int, page_size: int, num_workers: int, sizes: tuple[int, int]) -> int:
    """Compare a step with its reference; return the number of items of the first request."""
    from mini_engine.kernels.mla_decode import mla_decode, mla_decode_reference, plan_items

    generator = torch.Generator().manual_seed(len(kv_lens) + heads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    counts = -(-np.array(kv_lens, dtype=np.int32) // page_size)
    indptr = np.append(0, counts.cumsum()).astype(np.int32)
    pages = torch.randperm(int(counts.sum()) + 3, generator=generator)[: int(counts.sum())].int()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    entry = tuple(random(len(pages) + 3, page_size, 1, size) for size in sizes)
    for stored in entry:  # slots that no request has written must not matter
        used = torch.zeros(stored.shape[0], page_size, dtype=torch.bool)
        for i, n in enumerate(kv_lens):
            own = pages[indptr[i] : indptr[i + 1]].long()
            used[own] = torch.arange(len(own) * page_size).view(-1, page_size) < n
        stored[~used.to(device)] = torch.nan
    # As the engine computes them: heads before requests, and a part of longer queries.
    q = random(heads, len(kv_lens), sizes[0]).transpose(0, 1), random(len(kv_lens), heads, 7 * 8 + sizes[1])[..., 56:]
    lens, scale = np.array(kv_lens, dtype=np.int32), 0.1
    plan = plan_items(lens, indptr, num_workers)
    assert plan["items"].shape == (max(num_workers, len(kv_lens)), 4)
    moved = {name: torch.from_numpy(array).to(device) for name, array in plan.items()}
    got = mla_decode(q, entry, pages.to(device), **moved, scale=scale)
    again = mla_decode(q, entry, pages.to(device), **moved, scale=scale)
    wide = [tuple(x.float() for x in pair) for pair in (q, entry)]
    want = mla_decode_reference(*wide, pages.to(device), lens, indptr, scale)
    close = {"atol": 2e-2, "rtol": 2e-2} if device == "cuda" else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got.float(), want, **close)
    assert torch.equal(got, again)
    return int(plan["item_indptr"][1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 48])
@pytest.mark.parametrize("heads", [1, 16, 20])
def test_sums_are_those_of_the_reference(device: str, heads: int, page_size: int) -> None:
    assert check(device, [700, 1, 64, 130], heads, page_size, num_workers=9, sizes=(32, 16)) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("kv_lens", [[8192], [8192] * 64, [1, 20_000, 333] * 5, [1] * 256])
@pytest.mark.parametrize("heads", [16, 128])
def test_sums_of_the_shape_of_deepseek_v2(heads: int, kv_lens: list[int]) -> None:
    check("cuda", kv_lens, heads, 64, num_workers=264, sizes=(512, 64))


@settings(max_examples=200)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=20), st.integers(1, 40))
def test_every_key_is_in_one_item(kv_lens: list[int], num_workers: int) -> None:
    from mini_engine.kernels.mla_decode import MOST_SPLITS, TILE, plan_items

    indptr = np.arange(len(kv_lens) + 1, dtype=np.int32) * 7
    plan = plan_items(np.array(kv_lens, dtype=np.int32), indptr, num_workers)
    items, of_request = plan["items"], plan["item_indptr"]
    assert len(items) == max(num_workers, len(kv_lens)) and of_request[-1] <= len(items)
    assert not items[of_request[-1] :].any()
    for i, num_keys in enumerate(kv_lens):
        own = items[of_request[i] : of_request[i + 1]]
        assert 1 <= len(own) <= MOST_SPLITS and (own[:, 0] == i).all() and (own[:, 3] == 7 * i).all()
        assert own[0, 1] == 0 and own[-1, 2] == num_keys and (own[1:, 1] == own[:-1, 2]).all()
        assert (own[:, 1] % TILE == 0).all() and (own[:, 1] < own[:, 2]).all()
