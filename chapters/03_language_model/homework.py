"""Homework of chapter 03: the pieces of a language model, and the weights that fill it.

Four of these functions are parts of the engine. Once their checks are green, `mini-engine generate --homework` runs
the embedded model on your `rms_norm` and your `gated_mlp`. With `--model` it runs a Qwen3 on your `qk_norm` and loads a
GPT-2 with your `gpt2_weights`.

Each function tells what it must do. Write it in place of `raise NotImplementedError`; import what you need, and add
helper functions of your own as you like. Then:

    pytest chapters/03_language_model                   # grade your work
    pytest chapters/03_language_model --hint NAME       # the next of three hints for the exercise NAME
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from mini_engine.attention.spec import Attend, AttentionSpec


def rms_norm(x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*batch D"]:
    """Scale each row of x to a root mean square of one, then multiply it by `weight`.

    A row is the last axis; before it stand any number of axes, or none. The mean of the squares gets `eps` added
    before the root is taken, so that a row of zeros stays zeros. The mean itself is not subtracted.

    Compute in float32, or in the dtype of x or of the weight where that is wider, and round once: to the dtype of x, at
    the very end. The weight has the dtype of x or a wider one. Leave x itself unchanged.

    Example: the squares of the row have the mean 9, so the row is divided by 3.

        >>> x, weight = torch.tensor([1.0, -1.0, 3.0, 5.0]), torch.tensor([3.0, 3.0, 3.0, 6.0])
        >>> rms_norm(x, weight, eps=0.0).tolist()
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
    """Qwen3's norm of queries and keys: `rms_norm` of every head of every token, over its D numbers.

    The first `num_qo_heads` heads are queries and share `q_weight`, all others are keys and share `k_weight`. The fused
    projection gives the heads in this order. Return a new tensor.

    Example: one query head and one key head, of two numbers each; both heads have a root mean square of 5.

        >>> q_and_k = torch.tensor([[[1.0, 7.0], [5.0, 5.0]]])
        >>> qk_norm(q_and_k, torch.tensor([5.0, 5.0]), torch.tensor([1.0, 2.0]), num_qo_heads=1, eps=0.0).tolist()
        [[[1.0, 7.0], [1.0, 2.0]]]
    """
    raise NotImplementedError


def gated_mlp(
    x: Float[Tensor, "T hidden"],
    gate_up: Float[Tensor, "I2 hidden"],
    down: Float[Tensor, "hidden I"],
    activation: Callable[[Tensor], Tensor],
) -> Float[Tensor, "T hidden"]:
    """The gated feed-forward network: down(activation(gate(x)) * up(x)). SwiGLU with SiLU, GeGLU with GELU.

    Args:
        x: the tokens.
        gate_up: two projections in one weight: the first I rows are the gate's, the last I rows up's. A weight W
            is [out, in] and stands for x @ W.T, as in torch.nn.functional.linear.
        down: the projection back to the width of x.
        activation: the non-linearity, applied to the gate alone.

    Returns:
        One row for each token, in the dtype of x.

    Example: I is 1. The gate is x, up is 10 x, and the "activation" adds 1: (2 + 1) * 20 = 60, times 0.5.

        >>> x, gate_up, down = torch.tensor([[2.0]]), torch.tensor([[1.0], [10.0]]), torch.tensor([[0.5]])
        >>> gated_mlp(x, gate_up, down, lambda gate: gate + 1).item()
        30.0
    """
    raise NotImplementedError


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one Llama layer, fused as the engine holds them. Every matrix is [out, in]."""

    input_norm: Float[Tensor, " hidden"]
    qkv: Float[Tensor, "W hidden"]  # W = (Hq + 2 Hk) D: the rows of all query heads, of all key heads, of all values
    o: Float[Tensor, "hidden QD"]  # QD = Hq D
    mlp_norm: Float[Tensor, " hidden"]
    gate_up: Float[Tensor, "I2 hidden"]
    down: Float[Tensor, "hidden I"]


def decoder_layer(
    x: Float[Tensor, "T hidden"],
    weights: LayerWeights,
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    spec: AttentionSpec,
    attend: Attend,
    eps: float,
) -> Float[Tensor, "T hidden"]:
    """One layer of Llama: attention, then the MLP, each on a normed input and added to what came in.

    Norm x with `input_norm` and project it with `qkv`. Cut the result into queries [T, Hq, D], keys and values
    [T, Hk, D]; `spec` has num_qo_heads, num_kv_heads and head_dim. Rotate queries and keys, not values, with
    `mini_engine.rope.apply_rope(heads, cos, sin)`. Call `attend(spec.layer, q, k, v)` once: it returns [T, Hq, D].
    Project its heads, side by side, with `o`, and add the result to x. Then norm the sum with `mlp_norm`, apply
    `gated_mlp` with SiLU, and add that.

    Use your `rms_norm` and `gated_mlp`. Do not change x in place: the caller may still need it.

    Example: all projections are 0, so both halves add nothing and the layer returns what came in.

        >>> zeros, ones = torch.zeros, torch.ones(2)
        >>> weights = LayerWeights(ones, zeros(6, 2), zeros(2, 2), ones, zeros(8, 2), zeros(2, 4))
        >>> spec = AttentionSpec(layer=0, kv_layer=0, num_qo_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> decoder_layer(x, weights, torch.ones(1, 1), zeros(1, 1), spec, lambda layer, q, k, v: v, 1e-6).tolist()
        [[3.0, 4.0]]
    """
    raise NotImplementedError


def gpt2_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPT-2 checkpoint in the form of every other: one set of names, weights as [out, in].

    Three things are peculiar to GPT-2's checkpoints:

    - Some have `transformer.` in front of every name but `lm_head.weight`, some do not. Leave it out.
    - The weights of attn.c_attn, attn.c_proj, mlp.c_fc and mlp.c_proj (in a layer: `h.0.attn.c_attn.weight`, ...) lie
      as [in, out]. Transpose them, without a copy. Biases, norms, `wte.weight`, `wpe.weight` and `lm_head.weight` stay
      as they are.
    - `h.N.attn.bias` and `h.N.attn.masked_bias` hold a causal mask, not weights. Leave them out.
      (`h.N.attn.c_attn.bias` is a real bias.)

    Any other name is kept: the model that is loaded will complain about a name that it does not know.

    Args:
        tensors: the checkpoint under its own names. Do not change it.

    Raises:
        mini_engine.errors.ModelLoadError: two tensors get the same name.

    Example:

        >>> tensors = {"transformer.h.0.mlp.c_fc.weight": torch.zeros(2, 8), "wpe.weight": torch.zeros(9, 2)}
        >>> {name: list(tensor.shape) for name, tensor in gpt2_weights(tensors).items()}
        {'h.0.mlp.c_fc.weight': [8, 2], 'wpe.weight': [9, 2]}
    """
    raise NotImplementedError


def softcapped(
    x: Float[Tensor, "*batch"],
    cap: float | None,
    *,
    scale: float = 1.0,
    mask: Bool[Tensor, "*mask"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Gemma 2's soft-cap, for attention scores and for the final logits alike.

    In this order:
        1. multiply by `scale`;
        2. unless `cap` is None, y becomes cap * tanh(y / cap), which stays within -cap and cap;
        3. where `mask` is False, the result is -inf. The mask may have fewer axes than x, and then broadcasts.

    Scores are `softcapped(q_dot_k, 50.0, scale=..., mask=causal)`, logits `softcapped(logits, 30.0)`.

    Compute in float32 (in float64 for float64 inputs), and return that dtype: a softmax follows.

    Example: the first number is scaled to 1 and hardly changed, the second is scaled to 100 and capped, the third
    is hidden.

        >>> mask = torch.tensor([True, True, False])
        >>> [round(y, 2) for y in softcapped(torch.tensor([2.0, 200.0, 3.0]), 10.0, scale=0.5, mask=mask).tolist()]
        [1.0, 10.0, -inf]
    """
    raise NotImplementedError


def dequantize_q4_1(blocks: UInt8[Tensor, "N 20"]) -> Float[Tensor, "N 32"]:
    """Challenge: the 32 numbers that each Q4_1 block of a GGUF file stands for, in float32.

    A block has 20 bytes:
        bytes 0, 1      the scale d, a little-endian float16;
        bytes 2, 3      the minimum m, a little-endian float16;
        bytes 4 to 19   32 numbers q of four bits: the low half of byte 4 + i is element i, the high half is
                        element i + 16.
    Element q stands for d * q + m. Compute that in float32. Work on all blocks at once: a model has millions.

    Example: d is 0.5 (bytes 0x00 0x38 as float16), m is -3 (0x00 0xC2); the first data byte is 0x21, all others 0.

        >>> block = torch.tensor([[0x00, 0x38, 0x00, 0xC2, 0x21] + [0] * 15], dtype=torch.uint8)
        >>> numbers = dequantize_q4_1(block)
        >>> numbers[0, 0].item(), numbers[0, 16].item(), numbers[0, 1].item()
        (-2.5, -2.0, -3.0)
    """
    raise NotImplementedError
