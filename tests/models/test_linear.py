"""The linear projection equals the plain product, in every form that it takes."""

import pytest
import torch
from torch.nn import functional as F

from mini_engine.models.linear import FEW_ROWS, is_intel, linear


@pytest.fixture(params=[False, True], ids=["other", "Intel"], autouse=True)
def either_vendor(request, monkeypatch):
    """The choices on an Intel CPU and on another one."""
    monkeypatch.setattr("mini_engine.models.linear.IS_INTEL", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, FEW_ROWS, FEW_ROWS + 1, 40])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, FEW_ROWS + 1])
def test_rows_and_weights_may_be_views(dtype, rows):
    """Products of slices and transposes are those of their values, whatever lies between them in memory."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 2 * rows, generator=generator).to(dtype)[:, ::2].T
    weight = torch.randn(64, 96, generator=generator).to(dtype).T[8:32]
    torch.testing.assert_close(linear(x, weight), F.linear(x.contiguous(), weight.contiguous()))


@pytest.mark.parametrize(("vendor", "is_intels"), [("GenuineIntel", True), ("AuthenticAMD", False)])
@pytest.mark.parametrize("on_linux", [True, False])
def test_the_vendor(monkeypatch, tmp_path, vendor, is_intels, on_linux):
    """From the kernel's list of processors, or on Windows from the processor's description."""
    cpu_info = tmp_path / "cpuinfo"
    if on_linux:
        cpu_info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr("mini_engine.models.linear.Path", lambda path: cpu_info)
    monkeypatch.setattr("platform.processor", lambda: "" if on_linux else f"Family 6 Model 167 Stepping 1, {vendor}")
    assert is_intel() == is_intels


def test_without_onednn(monkeypatch):
    """Some builds of torch do not have it."""
    monkeypatch.setattr("mini_engine.models.linear.ONEDNN", False)
    x, weight = torch.ones(FEW_ROWS + 1, 8), torch.ones(3, 8)
    assert torch.equal(linear(x, weight), torch.full((FEW_ROWS + 1, 3), 8.0))
