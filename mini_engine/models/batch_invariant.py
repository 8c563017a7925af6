"""A batch-invariant version of a model: the bits of a token do not depend on the other tokens of its step.

On a CPU, two kinds of operators are to blame besides attention, whose remedy is `attention/batch_invariant.py`. A
matrix product chooses its kernel, and with it the order of its sums, by the number of rows. An activation function
computes the elements at the end of a tensor, or of a thread's share of it, with other code than those in a full vector.
Norms, softmax, sines and cosines treat each row alike on a CPU, and additions and multiplications are rounded correctly
wherever they are computed. Explained in chapter 14.

With SmolLM2-135M in bfloat16 on one thread of an AMD EPYC that other programs used, too, one request generates about
0.7 times as many tokens per second as with the default options, and 32 requests 0.4 to 0.5 times as many (medians and
maxima of four alternating runs of 24 tokens after prompts of 8).

On a GPU, cuBLAS adds up each element of a product in bfloat16 in the same order for any number of rows, unless it
splits the columns among thread blocks (split-K), for which it needs a workspace. So it gets none. That was measured
(chapter 14), and NVIDIA does not promise it. It does not hold for matrices whose number of rows is no multiple of 8.
Norms, rotation and activations run one program for each token or element.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.errors import ConfigError
from mini_engine.models.base import CausalLM, LanguageModel
from mini_engine.models.gpt2 import GPT2Layer
from mini_engine.models.layers import GatedMLP
from mini_engine.models.linear import linear
from mini_engine.models.moe import MoE
from mini_engine.models.weights import Linear, Projection

# Rows of every product. On an AMD EPYC with one thread, SmolLM2-135M's products of 16 rows take 1.3 times (bfloat16)
# and 2.1 times (float32) as long as those of a single row, and 256 rows in blocks of 16 take 1.8 and 1.7 times as long
# as at once. Blocks of 8 would cost one request less and prompts more, blocks of 32 the opposite.
ROWS = 16
VECTOR = 64  # elements that PyTorch's loop computes at once: two vectors of 32 numbers in 16 bits
GRAIN = 32_768  # elements up to which PyTorch runs an elementwise function in one thread


class InBlocks(nn.Module):
    """A projection that is always computed for ROWS tokens; zeros fill the last block.

    It makes dense and quantized matrices batch-invariant alike: with a fixed number of rows, each has one kernel.
    """

    def __init__(self, product: Projection) -> None:
        super().__init__()
        self.product = product

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        return in_blocks(self.product, x)


def in_blocks(product: Callable[[Tensor], Tensor], x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
    """Compute a product for ROWS tokens at a time; zeros fill the last block."""
    blocks = F.pad(x, (0, 0, 0, -len(x) % ROWS)).split(ROWS)
    return torch.cat([product(block) for block in blocks])[: len(x)]


def linear_in_blocks(x: Float[Tensor, "T In"], weight: Float[Tensor, "Out In"]) -> Float[Tensor, "T Out"]:
    """Compute `linear` in blocks: an expert has another number of tokens in each step."""
    return in_blocks(lambda block: linear(block, weight), x)


def by_row(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an elementwise function for which an element's place in its own row decides the code that computes it.

    Rows that consist of full vectors may share a call if one thread computes it; others are computed one by one.
    """

    def apply(x: Float[Tensor, "T In"]) -> Float[Tensor, "T In"]:
        width = x.shape[1]
        at_once = 1 if width % VECTOR else max(1, GRAIN // width)
        return torch.cat([function(rows) for rows in x.split(at_once)])

    return apply


def batch_invariant(model: LanguageModel) -> LanguageModel:
    """Return a model with the same weights, without a copy of them, that is batch-invariant.

    On a GPU, it is the same model, and cuBLAS has no workspace from now on in the whole process.

    Args:
        model: a model whose weights are prepared (`prepare_weights`). It is not changed.

    Raises:
        ConfigError: if its layers are not the engine's own; on a GPU, if it has experts, or a matrix has no multiple of
            8 rows.
    """
    if not isinstance(model, CausalLM):
        raise ConfigError("batch_invariant needs the engine's own layers, not those of transformers: use LLM")
    if model.device.type == "cuda":
        if model.config.moe:
            raise ConfigError(
                "batch_invariant on a GPU does not compute mixtures of experts, whose kernels depend on the number of "
                "tokens: leave it out, or use device='cpu'"
            )
        odd = [len(own.weight) for own in model.modules() if isinstance(own, Linear) and len(own.weight) % 8]
        if odd:
            raise ConfigError(
                f"batch_invariant on a GPU needs matrices whose number of rows is a multiple of 8, not {odd[0]}, for "
                "which cuBLAS has other kernels; leave it out"
            )
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
        return model
    shared: dict[int, object] = {id(own): own for own in (*model.parameters(), *model.buffers(), model.parts)}
    shared |= {id(own): InBlocks(own) for own in model.modules() if isinstance(own, Projection)}
    twin = copy.deepcopy(model, shared)
    for module in twin.modules():
        if isinstance(module, GatedMLP | GPT2Layer):
            module.activation = by_row(module.activation)
        if isinstance(module, MoE):
            module.activation, module.multiply = by_row(module.activation), linear_in_blocks
    return twin
