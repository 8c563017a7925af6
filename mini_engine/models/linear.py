"""The linear projection, which accounts for most of a step's memory traffic, FLOPs and time."""

import math
import platform
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 4  # with more rows, oneDNN is faster: the arithmetic intensity is high enough
ONEDNN = torch.backends.mkldnn.is_available()


def is_intel() -> bool:
    """Return whether the CPU is one of Intel's."""
    cpu_info = Path("/proc/cpuinfo")  # on Linux, where `platform` does not know the vendor
    return "GenuineIntel" in (cpu_info.read_text() if cpu_info.exists() else platform.processor())


IS_INTEL = is_intel()


def linear(
    x: Float[Tensor, "T In"], weight: Float[Tensor, "Out In"], bias: Float[Tensor, " Out"] | None = None
) -> Float[Tensor, "T Out"]:
    """Compute `x @ weight.T + bias`.

    `F.linear` is the fastest implementation except in float32 on a CPU. There it calls MKL, which uses only half the
    SIMD width on non-Intel CPUs; oneDNN, which is part of torch, uses all of it. For one or a few rows (the decode of
    one request) both are memory-bandwidth-bound. Then MKL reads the weight with all threads on Intel's CPUs only;
    elsewhere, a batched product with one entry for each block of the weight's rows does.

    Args:
        x: [T, In] the tokens.
        weight: [Out, In].
        bias: [Out] or None.
    """
    if x.is_cuda or x.dtype != torch.float32:  # checks the GPU first: there, each check costs as much as a small kernel
        return F.linear(x, weight, bias)
    if len(x) <= FEW_ROWS and not IS_INTEL:
        blocks = weight.unflatten(0, (math.gcd(weight.shape[0], torch.get_num_threads()), -1))
        out = torch.bmm(blocks, x.T.expand(blocks.shape[0], -1, -1)).flatten(0, 1).T.contiguous()
        return out if bias is None else out + bias
    if len(x) > FEW_ROWS and ONEDNN:  # the operator that torch.compile substitutes for a linear layer on a CPU
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
