"""Homework of chapter 03: the parts of a language model, and loading its weights.

Five of these functions are parts of the engine. Once their checks pass,
`mini-engine generate --homework` runs the embedded model, a Llama, on your
`decoder_layer`, which calls your `rms_norm` and `gated_mlp`. With `--model` and the
folder or hub id of a Qwen3 it also runs your `qk_norm`, and with a GPT-2 it loads the
checkpoint through your `gpt2_weights`. The last checks of `decoder_layer` and
`dequantize_q4_1` run the embedded model on them.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/03_language_model

    # the next of three hints for the exercise NAME
    pytest chapters/03_language_model --hint NAME
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mini_engine.attention.spec import Attend, AttentionSpec

Projection = Callable[[Float[Tensor, "T In"]], Float[Tensor, "T Out"]]


def rms_norm(
    x: Float[Tensor, "*batch D"],
    weight: Float[Tensor, " D"],
    eps: float,
) -> Float[Tensor, "*batch D"]:
    """Normalize each row of x to a root mean square of 1, then multiply by `weight`.

    A row runs along the last axis of x; any number of axes may precede it, or none.
    `eps` is added to the mean of the squares, so a row of zeros stays zero.

    Compute in float32, or in float64 if x or `weight` is float64. Round once, at the
    end: the result has the dtype of x. `weight` is never narrower than x. Do not modify
    x.

    Example: the mean of the squares is 9, so the row is divided by 3.

        >>> x = torch.tensor([1.0, -1.0, 3.0, 5.0])
        >>> rms_norm(x, torch.tensor([3.0, 3.0, 3.0, 6.0]), eps=0.0).tolist()
        [1.0, -1.0, 3.0, 10.0]
    """
    raise NotImplementedError


def qk_norm(
    q_and_k: Float[Tensor, "T QK D"],
    q_weight: Float[Tensor, " D"],
    k_weight: Float[Tensor, " D"],
    num_qo_heads: int,
    eps: float,
) -> Float[Tensor, "T QK D"]:
    """Apply Qwen3's QK-norm: normalize every head of every token on its own.

    The first `num_qo_heads` heads are queries and share `q_weight`; the others are keys
    and share `k_weight`. The dtypes behave as in `rms_norm`. Return a new tensor.

    Example: one query head and one KV head; both have a root mean square of 5.

        >>> q_and_k = torch.tensor([[[1.0, 7.0], [5.0, 5.0]]])
        >>> fives, k_weight = torch.tensor([5.0, 5.0]), torch.tensor([1.0, 2.0])
        >>> qk_norm(q_and_k, fives, k_weight, num_qo_heads=1, eps=0.0).tolist()
        [[[1.0, 7.0], [1.0, 2.0]]]
    """
    raise NotImplementedError


def gated_mlp(
    x: Float[Tensor, "T hidden"],
    gate_up: Projection,
    down: Projection,
    activation: Callable[[Tensor], Tensor],
) -> Float[Tensor, "T hidden"]:
    """Compute the gated MLP of the chapter with the gate and up projections fused.

    A projection is called with tokens, and multiplies them by its weight. How it stores
    the weight is its own affair: chapter 13 stores fewer bytes.

    Args:
        x: one row for each token.
        gate_up: projects [T, hidden] to [T, 2 I]: for each token the I numbers of the
            gate projection, then the I numbers of the up projection.
        down: projects [T, I] back to [T, hidden].
        activation: the nonlinearity, applied to the output of the gate projection.

    Returns:
        One row for each token, in the dtype of x.

    Example: I is 1, the gate is x, up is 10 x, and the "activation" adds 1.

        >>> gate_up = lambda x: x @ torch.tensor([[1.0, 10.0]])
        >>> down, plus_1 = lambda inner: inner * 0.5, lambda gate: gate + 1
        >>> gated_mlp(torch.tensor([[2.0]]), gate_up, down, plus_1).item()  # 3 * 20 / 2
        30.0
    """
    raise NotImplementedError


@dataclass(frozen=True)
class LayerWeights:
    """The norms and the projections of one Llama or Qwen3 layer, fused."""

    input_norm: Float[Tensor, " hidden"]
    # From [T, hidden] to [T, (Hq + 2 Hk) D]: for each token its query heads, then the
    # keys of all KV heads, then their values.
    qkv: Projection
    o: Projection  # from [T, Hq D] to [T, hidden]
    mlp_norm: Float[Tensor, " hidden"]
    gate_up: Projection  # see gated_mlp
    down: Projection
    # The weights of QK-norm: both are None in a Llama, and neither is in a Qwen3.
    q_norm: Float[Tensor, " D"] | None = None
    k_norm: Float[Tensor, " D"] | None = None


def decoder_layer(
    x: Float[Tensor, "T hidden"],
    weights: LayerWeights,
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    spec: AttentionSpec,
    attend: Attend,
    eps: float,
) -> Float[Tensor, "T hidden"]:
    """Run one decoder layer of Llama or Qwen3 on the tokens of a step.

    The chapter draws the layer and its shapes. This version differs from the chapter's
    `llama` in two ways: the weights are fused, as the engine holds them, and if
    `weights.q_norm` and `weights.k_norm` are given, queries and keys pass through
    QK-norm where Qwen3 has it. The nonlinearity of the MLP is SiLU.

    Use your `rms_norm`, `qk_norm` and `gated_mlp`, and
    `mini_engine.rope.apply_rope(heads, cos, sin)`. Call `attend(spec.layer, q, k, v)`
    exactly once, because it stores keys and values. It takes q as [T, Hq, D] and k and
    v as [T, Hk, D], scales the scores itself, and returns [T, Hq, D]. Do not modify x.

    Args:
        x: the residual stream before the layer.
        weights: the norms and projections of the layer.
        cos: cosines of the rotation of each token.
        sin: sines of the rotation of each token.
        spec: has `layer`, `num_qo_heads`, `num_kv_heads` and `head_dim`.
        attend: computes attention.
        eps: for every norm.

    Returns:
        The residual stream after the layer.

    Example: all projections are 0, so nothing is added to the residual stream.

        >>> ones, x = torch.ones(2), torch.tensor([[3.0, 4.0]])
        >>> def zeros(size): return lambda x: torch.zeros(len(x), size)
        >>> mlp = ones, zeros(8), zeros(2)
        >>> weights = LayerWeights(ones, zeros(6), zeros(2), *mlp)
        >>> spec = AttentionSpec(0, 1, 1, head_dim=2, scale=1.0)
        >>> rotation = torch.ones(1, 1), torch.zeros(1, 1)
        >>> values = lambda layer, q, k, v: v
        >>> decoder_layer(x, weights, *rotation, spec, values, 1e-6).tolist()
        [[3.0, 4.0]]
    """
    raise NotImplementedError


def load_weights(
    destinations: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> None:
    """Fill a model from a checkpoint: every tensor once, by name, or nothing at all.

    `destinations` maps each name that the checkpoint must have to the tensor that it
    fills, which may be some rows of a fused weight. Values are converted to the dtype
    of their destination.

    If the checkpoint does not fit the model exactly, raise ModelLoadError with a
    message that names one of the wrong tensors, and leave every destination as it was.
    The engine must never run a model that is only partly loaded.

    Args:
        destinations: the model's tensors by their names in the checkpoint.
        tensors: the checkpoint.

    Raises:
        mini_engine.errors.ModelLoadError: if a tensor is missing, is one that the model
            does not have, or differs in shape from its destination.

    Example: two projections that are fused in the model.

        >>> fused = torch.zeros(3, 1)
        >>> destinations = {"q": fused[:2], "k": fused[2:]}
        >>> q, k = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])
        >>> load_weights(destinations, {"k": k, "q": q})
        >>> fused.flatten().tolist()
        [1.0, 2.0, 3.0]
    """
    raise NotImplementedError


def gpt2_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a GPT-2 checkpoint to the form of the other families.

    In the result, no name has the prefix `transformer.`, every matrix is [out, in], and
    nothing but weights and biases is left. The chapter prints such a checkpoint and
    describes its peculiarities.

    A tensor whose name GPT-2 does not have is passed on unchanged, under its name
    without the prefix: the loader will report it. Transposing must not copy a tensor.
    Do not modify `tensors`.

    Args:
        tensors: the checkpoint. Layer N has h.N.ln_1, h.N.ln_2, h.N.attn.c_attn,
            h.N.attn.c_proj, h.N.mlp.c_fc and h.N.mlp.c_proj, each with a weight and a
            bias, and perhaps the buffers h.N.attn.bias and h.N.attn.masked_bias, which
            hold a causal mask. Outside the layers there are wte.weight, wpe.weight,
            ln_f.weight, ln_f.bias and perhaps lm_head.weight. Any name may have the
            prefix.

    Raises:
        mini_engine.errors.ModelLoadError: if two tensors would get the same name.

    Example:

        >>> fc, wpe = torch.zeros(2, 8), torch.zeros(9, 2)
        >>> tensors = {"transformer.h.0.mlp.c_fc.weight": fc, "wpe.weight": wpe}
        >>> {name: list(t.shape) for name, t in gpt2_weights(tensors).items()}
        {'h.0.mlp.c_fc.weight': [8, 2], 'wpe.weight': [9, 2]}
    """
    raise NotImplementedError


def dequantize_q4_1(blocks: UInt8[Tensor, "N 20"]) -> Float[Tensor, "N 32"]:
    """Challenge: decode blocks of the GGUF type Q4_1 into float32.

    A block of 20 bytes holds 32 numbers:
        bytes 0 and 1: the scale d, a little-endian float16;
        bytes 2 and 3: the minimum m, a little-endian float16;
        bytes 4 to 19: 32 values q of four bits each. The low half of byte 4 + i is
            element i, and the high half is element i + 16.
    Each element is d * q + m, computed in float32. A model has millions of blocks:
    decode them together, without a Python loop over blocks.

    Example: d is 0.5 (bytes 0x00 0x38), m is -3 (0x00 0xC2), byte 4 is 0x21.

        >>> head = [0x00, 0x38, 0x00, 0xC2]
        >>> block = torch.tensor([head + [0x21] + [0] * 15], dtype=torch.uint8)
        >>> numbers = dequantize_q4_1(block)
        >>> numbers[0, 0].item(), numbers[0, 16].item(), numbers[0, 1].item()
        (-2.5, -2.0, -3.0)
    """
    raise NotImplementedError
