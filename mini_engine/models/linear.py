"""The linear projection: most of what a step reads, and so most of its time."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

FEW_ROWS = 16  # with more, the plain product is as fast: it computes enough for each weight that it reads


def linear(
    x: Float[Tensor, "T In"], weight: Float[Tensor, "Out In"], bias: Float[Tensor, " Out"] | None = None
) -> Float[Tensor, "T Out"]:
    """`x @ weight.T + bias`.

    On a CPU, float32 and a few rows (a decode step), `F.linear` reads the weight with one thread. As a batch of
    products, one for each block of the weight's rows, every thread reads its share of the memory's bandwidth.

    Args:
        x: [T, In] the tokens.
        weight: [Out, In].
        bias: [Out] or None.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.shape[0] > FEW_ROWS:
        return F.linear(x, weight, bias)
    blocks = weight.unflatten(0, (math.gcd(weight.shape[0], torch.get_num_threads()), -1))
    out = torch.bmm(blocks, x.T.expand(blocks.shape[0], -1, -1)).flatten(0, 1).T.contiguous()
    return out if bias is None else out + bias
