"""The counter against formulas, for every kernel that the engine's linear projection may choose."""

import pytest
import torch

from book.flops import count_flops
from mini_engine.models.linear import FEW_ROWS, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 64])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("is_intel_cpu", [False, True])
def test_every_kernel_of_a_linear_projection_is_counted(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, inference: bool, is_intel_cpu: bool
) -> None:
    monkeypatch.setattr("mini_engine.models.linear.IS_INTEL", is_intel_cpu)
    x, weight = torch.ones(rows, 12, dtype=dtype), torch.ones(20, 12, dtype=dtype)
    with torch.inference_mode(inference):
        assert count_flops(lambda: linear(x, weight)) == 2 * rows * 12 * 20
        assert count_flops(lambda: [linear(x, weight), x @ weight.T]) == 4 * rows * 12 * 20
