"""The parts of a layer on FlashInfer's kernels: as few launches as possible, each with little host time.

On a GPU a small model is limited by the host, because each call of a PyTorch operator costs several microseconds. Each
function here has the name and signature of the part that is its reference. Shape, dtype and layout alone determine
whether a function launches a kernel or calls its reference.
"""

from collections.abc import Callable

import flashinfer
import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine import rope
from mini_engine.models import layers
from mini_engine.models.config import ACTIVATIONS

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # that the rotation supports
# Each computes activation(gate) * up from the output of the fused projection.
GATED_ACTIVATIONS = {
    ACTIVATIONS["silu"]: flashinfer.silu_and_mul,
    ACTIVATIONS["gelu_pytorch_tanh"]: flashinfer.gelu_tanh_and_mul,
}


def rms_norm(x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*batch D"]:
    """Compute `layers.rms_norm` in one launch, if x is [T, D] or [T, H, D] in the weight's 16-bit dtype."""
    if x.dtype in DTYPES and x.dtype == weight.dtype and x.ndim in (2, 3) and x.stride(-1) == 1:
        return flashinfer.rmsnorm(x, weight, eps)
    return layers.rms_norm(x, weight, eps)


def qk_norm(
    q_and_k: Float[Tensor, "T QK D"],
    q_weight: Float[Tensor, " D"],
    k_weight: Float[Tensor, " D"],
    num_qo_heads: int,
    eps: float,
) -> Float[Tensor, "T QK D"]:
    """Compute `layers.qk_norm` in two launches that read and write the heads in place, without copies."""
    if q_and_k.dtype not in DTYPES or q_and_k.dtype != q_weight.dtype or q_and_k.stride(-1) != 1:
        return layers.qk_norm(q_and_k, q_weight, k_weight, num_qo_heads, eps)
    out = torch.empty_like(q_and_k)
    heads = (num_qo_heads, q_and_k.shape[1] - num_qo_heads)
    for x, weight, normed in zip(q_and_k.split(heads, 1), (q_weight, k_weight), out.split(heads, 1), strict=True):
        flashinfer.rmsnorm(x, weight, eps, out=normed)
    return out


class Rotation:
    """`rope.apply_rope` in one launch for all heads.

    The kernel reads the cosines and sines of a position from one table, and the position of each token from an array.
    Here row t of the table belongs to token t. Both are made in the first layer of a step and kept for the others until
    the rotation changes (Gemma 3), in one tuple, because engines of several threads may share this object.
    """

    def __init__(self) -> None:
        # The functions of `flashinfer` itself take queries and keys as two tensors and return two.
        self._kernels = flashinfer.rope.get_rope_module()
        self._kept: tuple[Tensor | None, Tensor, Tensor] = None, torch.empty(0), torch.empty(0)

    def __call__(
        self,
        x: Float[Tensor, "T H D"],
        cos: Float[Tensor, "T half"],
        sin: Float[Tensor, "T half"],
        *,
        interleaved: bool = False,
    ) -> Float[Tensor, "T H D"]:
        """Rotate; the arguments are the same as for `rope.apply_rope`."""
        if x.dtype not in DTYPES or x.shape[2] not in HEAD_DIMS or cos.dtype != torch.float32 or x.stride(-1) != 1:
            return rope.apply_rope(x, cos, sin, interleaved=interleaved)
        kept = self._kept
        if cos is not kept[0]:
            rows = torch.arange(len(cos), dtype=torch.int32, device=cos.device)
            self._kept = kept = cos, torch.cat((cos, sin), dim=1), rows
        # The kernel takes queries and keys separately. Here they are one tensor, passed as queries without any keys.
        out, no_heads = torch.empty_like(x), x[:, :0]
        self._kernels.apply_rope_pos_ids_cos_sin_cache(x, no_heads, out, no_heads, *kept[1:], interleaved)
        return out


apply_rope = Rotation()


def gated_mlp(
    x: Float[Tensor, "T hidden"],
    gate_up: Callable[[Tensor], Tensor],
    down: Callable[[Tensor], Tensor],
    activation: Callable[[Tensor], Tensor],
) -> Float[Tensor, "T hidden"]:
    """Compute `layers.gated_mlp` with one launch for activation and gating, for SiLU and GELU with tanh."""
    activate_and_multiply = GATED_ACTIVATIONS.get(activation)
    if activate_and_multiply is None or x.dtype not in DTYPES:
        return layers.gated_mlp(x, gate_up, down, activation)
    return down(activate_and_multiply(gate_up(x)))
