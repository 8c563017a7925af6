"""The weight map of GPT-2: from the names and layout of its checkpoints to those of every other model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from mini_engine.errors import ModelLoadError

_CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def gpt2_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPT-2 checkpoint in the form of every other: one set of names, weights as `[out, in]`.

    Checkpoints name their tensors with or without `transformer.` in front. Their projections were written as a 1 x 1
    convolution (Conv1D) and lie as `[in, out]`: they are transposed here, without a copy. The buffers `attn.bias` and
    `attn.masked_bias` hold a causal mask, not weights, and are left out.

    Args:
        tensors: the checkpoint under its own names; all of it is looked up.

    Returns:
        Names without `transformer.`, weights as `[out, in]`.

    Raises:
        ModelLoadError: two tensors get the same name.
    """
    found: dict[str, Tensor] = {}
    for full_name in tensors:
        name = full_name.removeprefix("transformer.")
        if _MASK_BUFFER.fullmatch(name):
            continue
        if name in found:
            raise ModelLoadError(
                f"the checkpoint has tensor {name!r} with and without 'transformer.': keep one of them"
            )
        tensor = tensors[full_name]
        found[name] = tensor.t() if _CONV1D.fullmatch(name) and tensor.ndim == 2 else tensor
    return found
