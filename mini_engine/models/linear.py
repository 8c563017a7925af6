"""The linear projection: most of what a step reads and computes, and so most of its time."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 4  # with more, oneDNN is faster: it computes enough for each weight that it reads
ONEDNN = torch.backends.mkldnn.is_available()


def linear(
    x: Float[Tensor, "T In"], weight: Float[Tensor, "Out In"], bias: Float[Tensor, " Out"] | None = None
) -> Float[Tensor, "T Out"]:
    """`x @ weight.T + bias`.

    `F.linear` is the fastest of its forms except in float32 on a CPU. There it calls MKL, which uses half the width of
    the vector units of a CPU that Intel has not made; oneDNN, which torch has too, uses all of it. For one or a few
    rows (the decode of one request) memory bounds both, and neither reads the weight with all threads. A batch of
    products, one for each block of the weight's rows, does.

    Args:
        x: [T, In] the tokens.
        weight: [Out, In].
        bias: [Out] or None.
    """
    few = len(x) <= FEW_ROWS
    if x.device.type != "cpu" or x.dtype != torch.float32 or not (few or ONEDNN):
        return F.linear(x, weight, bias)
    if not few:
        # The operator that torch.compile puts in the place of a linear layer on a CPU.
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    blocks = weight.unflatten(0, (math.gcd(weight.shape[0], torch.get_num_threads()), -1))
    out = torch.bmm(blocks, x.T.expand(blocks.shape[0], -1, -1)).flatten(0, 1).T.contiguous()
    return out if bias is None else out + bias
