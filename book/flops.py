"""Count FLOPs with PyTorch's own counter, extended by the one operator of the engine for which it has no formula."""

import math
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode


def _linear_pointwise_flops(x: torch.Size, weight: torch.Size, *args: object, **kwargs: object) -> int:
    return 2 * math.prod(x) * weight[0]


def count_flops(run: Callable[[], object]) -> int:
    """Count the FLOPs of the matrix products and attention kernels that one call of `run` executes.

    `FlopCounterMode` counts 0 for an operator that it does not know, without a warning. One of them is oneDNN's linear
    layer, which `mini_engine.models.linear` calls in float32 on a CPU, so its formula is added here.

    Args:
        run: called once, without arguments.

    Returns:
        The FLOPs, where a multiplication and an addition are two.
    """
    formulas = {}
    if torch.backends.mkldnn.is_available():  # elsewhere the operator does not exist, and nothing can call it
        formulas[torch.ops.mkldnn._linear_pointwise] = _linear_pointwise_flops
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return counter.get_total_flops()
