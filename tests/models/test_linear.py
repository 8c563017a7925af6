"""The linear projection equals the plain product, in every form that it takes."""

import pytest
import torch
from torch.nn import functional as F

from mini_engine.models.linear import FEW_ROWS, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("out", [7, 96])
@pytest.mark.parametrize("threads", [1, 2, 6])
def test_equals_the_plain_product(dtype, rows, out, threads):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((rows, 64), (out, 64), (out,)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for b in (None, bias):
            got = linear(x, weight, b)
            assert got.is_contiguous()
            torch.testing.assert_close(got, F.linear(x, weight, b))
    finally:
        torch.set_num_threads(before)
