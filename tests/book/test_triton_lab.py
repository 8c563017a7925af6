"""What the lab counts of a kernel in Triton's interpreter, and of PyTorch's operators."""

import pytest
import torch

pytest.importorskip("triton")

from book.grading.chapter import solution
from book.triton_lab import DEVICE, Launch, watch

INTERPRETED = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU neither counts bytes nor shuffles programs")


@pytest.fixture
def product():
    x, weight = torch.ones(3, 10, device=DEVICE), torch.ones(20, 10, device=DEVICE)
    return lambda: solution("11_fused_kernels").linear(x, weight)


@INTERPRETED
def test_masked_elements_do_not_count(product):
    with watch() as found:
        product()
    # Two programs: each reads the three tokens, together they read the weight.
    assert found.launches == [Launch("linear_kernel", 2, (2 * 30 + 200) * 4, 60 * 4, (30 + 160) * 4)]
    assert (found.operators, found.num_kernels) == ([], 1)


def test_operators_of_pytorch_count_and_views_do_not(product):
    with watch() as found:
        product()[:, 1].unsqueeze(0) + 1
    assert (found.operators, found.num_kernels) == (["add"], 2)


@INTERPRETED
def test_programs_in_any_order_compute_the_same(product):
    with watch(seed=1) as found:
        shuffled = product()
    assert shuffled.equal(product()) and found.launches[0].programs == 2


def test_nothing_is_counted_afterwards(product):
    with watch() as found:
        pass
    product()
    assert found.num_kernels == 0
