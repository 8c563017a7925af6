"""The matrix products of a decoder layer in a decode step, each with the work after it in the same launch.

In a decode step each product takes a few microseconds, and each kernel between two products one to two more, although
it moves few bytes. Here only attention is left between the products. A thread block keeps its part of the product in
shared memory and finishes the work itself: QK-norm, rotation and the append to the KV cache after the first product,
the gated activation after the third, and the residual after the second and the fourth. The norms' factors are computed
beside the products, from the same tiles; the norms' weights must have been folded into the products
(`LlamaLayer.fold_norms`).

With few tokens, a product has too few tiles to fill all SMs, so up to eight blocks share a tile, each for a part of the
columns (split-K). The blocks form a cluster and exchange their partial sums through shared memory, so no second pass is
needed. With more than 64 tokens, the blocks of different tokens need the same rows of the weight. In the largest
product, two of them form a cluster and copy each row from the L2 cache once (multicast). A kernel can start while the
previous one still runs (programmatic dependent launch), and load its first weights.

The kernels are in `fused_products.cu`. Experiment 09 measures what they gain. Explained in chapter 11.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mini_engine.kernels.nvcc import load_kernel

ROWS, TOKENS = 128, 64  # of a tile
MOST_BLOCKS = 8  # of a cluster, without asking for more
MOST_TOKEN_TILES = 2  # measured on Qwen3-0.6B: with more, the library's products are as fast or faster
MOST_BYTES = 2**19  # of the weight that a block reads


def qkv_append(
    x: Float[Tensor, "T hidden"],
    weight: Float[Tensor, "W hidden"],
    norm_weights: tuple[Float[Tensor, " D"], Float[Tensor, " D"]] | None,
    eps: float,
    cos: Float[Tensor, "T half"],
    sin: Float[Tensor, "T half"],
    pages: tuple[Tensor, Tensor],
    layout: str,
    slot_mapping: Int64[Tensor, " T"],
    *,
    kv_scales: tuple[float, float] | None = None,
    next_waits: bool = True,
) -> Float[Tensor, "T Hq D"]:
    """Compute queries, keys and values of tokens, rotate them, store keys and values, and return the queries.

    The same as `rotate_and_append(linear(x, weight), ..., tokens=x)`, except that the product is not rounded.

    Args:
        x: contiguous bfloat16, not normalized; `hidden` is a multiple of 8.
        weight: contiguous; rows of the queries, keys and values, head by head, with heads of 64 or 128 rows.
        norm_weights: as for `rotate_and_append`, as are `eps`, `pages`, `layout`, `slot_mapping` and `kv_scales`.
        cos: contiguous float32, as is `sin`.
        next_waits: let the next kernel start early, because it reads no key of this step before it waits for this one.
    """
    keys, values = pages
    head_axis, token_axis = (2, 1) if layout == "NHD" else (1, 2)
    num_kv_heads, page_size, head_dim = keys.shape[head_axis], keys.shape[token_axis], keys.shape[3]
    num_q_heads = len(weight) // head_dim - 2 * num_kv_heads
    q = x.new_empty(len(x), num_q_heads, head_dim)
    q_norm, k_norm = (norm.data_ptr() for norm in norm_weights) if norm_weights else (None, None)
    factors = tuple(1 / scale for scale in kv_scales or (1, 1)) if keys.dtype == torch.float8_e4m3fn else (0, 0)
    finish = _QkvAppend(
        q_norm, k_norm, cos.data_ptr(), sin.data_ptr(), slot_mapping.data_ptr(), q.data_ptr(), keys.data_ptr(),
        values.data_ptr(), keys.stride(0), keys.stride(token_axis), keys.stride(head_axis), page_size, num_q_heads,
        num_kv_heads, *factors,
    )  # fmt: skip
    _launch(f"launch_qkv_append_{head_dim}", x, weight, finish, eps=eps, next_waits=next_waits)
    return q


def gate_up_swiglu(
    x: Float[Tensor, "T hidden"], gate_up: Float[Tensor, "I2 hidden"], eps: float
) -> Float[Tensor, "T I"]:
    """Multiply tokens that have not been normalized by gate and up, and apply the norm's factor and SwiGLU.

    Args:
        x: contiguous bfloat16, not normalized; `hidden` is a multiple of 8.
        gate_up: contiguous; the gate's I rows, then the up projection's. I is even.
        eps: epsilon of the norm.
    """
    size = len(gate_up) // 2
    out = x.new_empty(len(x), size)
    # Sharing copies makes this product faster, and the first product of a layer slower.
    _launch("launch_gate_up_swiglu", x, gate_up, _SwiGLU(out.data_ptr(), size), eps=eps, next_half=size, shares=True)
    return out


def add_product(
    residual: Float[Tensor, "T N"], x: Float[Tensor, "T K"], weight: Float[Tensor, "N K"]
) -> Float[Tensor, "T N"]:
    """Add `x @ weight.T` to the residual stream, in place.

    Args:
        residual: contiguous bfloat16, N even; overwritten.
        x: contiguous; K is a multiple of 8.
        weight: contiguous.
    """
    _launch("launch_add_product", x, weight, _AddToResidual(residual.data_ptr(), len(weight)))
    return residual


def suits(matrices: Sequence[Float[Tensor, "N K"]], head_dim: int, num_tokens: int) -> bool:
    """Return whether to use these kernels rather than the library's products and the kernels after them.

    They take Hopper, heads of 64 or 128, and sizes that are multiples of 8. They save a fixed time per product: one
    launch, and the wait for the weights with which a block can fill its ring (64 KB) while the previous kernel runs.
    They lose time per byte, because a block that streams many times what its ring holds reads more slowly than the
    library's kernels. A layer of Qwen3-0.6B, whose blocks read at most 128 KB for 64 tokens, is faster here. A layer
    of Llama-3.1-8B, whose blocks read up to 1 MB, is slower: on an H100, a decode step of one request reads 2.0 TB/s
    here, and 2.6 with the library. Blocks of Llama-3.2-1B read up to 256 KB for 64 tokens, and 512 KB for 128.

    Args:
        matrices: those of a layer.
        head_dim: size of a head.
        num_tokens: tokens of the step.
    """
    device = matrices[0].device
    num_sms = _num_sms(device) if device.type == "cuda" else 0
    return (
        torch.cuda.get_device_capability(device)[0] == 9
        and head_dim in (64, 128)
        and all(w.shape[1] % 8 == 0 for w in matrices)
        and -(-num_tokens // TOKENS) <= MOST_TOKEN_TILES
        and all(block_bytes(len(w), w.shape[1], num_tokens, num_sms) <= MOST_BYTES for w in matrices)
    )


def most_tokens(matrices: Sequence[Float[Tensor, "N K"]], head_dim: int) -> int:
    """Return the largest number of tokens that `suits` accepts."""
    return next((n * TOKENS for n in range(MOST_TOKEN_TILES, 0, -1) if suits(matrices, head_dim, n * TOKENS)), 0)


def block_bytes(num_rows: int, num_columns: int, num_tokens: int, num_sms: int) -> int:
    """Count the bytes of a weight in bfloat16 that one block reads."""
    num_tiles = -(-num_rows // ROWS) * -(-num_tokens // TOKENS)
    return 2 * ROWS * num_columns // num_splits(num_tiles, num_sms)


def num_splits(num_tiles: int, num_sms: int) -> int:
    """Choose how many blocks share a tile: a power of two.

    It is the most for which three blocks for two SMs are enough, and 2 rather than 1 if two blocks for each SM are.
    """
    splits = 1 << max(3 * num_sms // (2 * num_tiles), 1).bit_length() - 1
    return min(MOST_BLOCKS, max(splits, 2 if num_tiles <= num_sms else 1))


def _launch(
    launcher: str,
    x: Tensor,
    weight: Tensor,
    finish: ctypes.Structure,
    *,
    eps: float = 0.0,
    next_half: int | None = None,
    next_waits: bool = True,
    shares: bool = False,
) -> None:
    """Launch one product.

    Args:
        launcher: function of the library.
        x: the tokens.
        weight: the other matrix.
        finish: arguments of the work after the product.
        eps: epsilon of the norms.
        next_half: rows from the first half of a tile to the second; None: the halves are adjacent.
        next_waits: see `qkv_append`.
        shares: whether two blocks of different tokens share the copies of the weight's rows.
    """
    num_tokens, num_columns = x.shape
    num_tiles, token_tiles = -(-len(weight) // ROWS), -(-num_tokens // TOKENS)
    splits = num_splits(num_tiles * token_tiles, _num_sms(x.device))
    arguments = _Arguments(
        num_tokens, len(weight), num_columns, num_tiles, ROWS // 2 if next_half else ROWS, next_half or ROWS // 2,
        splits, 2 if shares and token_tiles > 1 and splits < MOST_BLOCKS else 1, next_waits, eps,
    )  # fmt: skip
    stream = torch.cuda.current_stream(x.device).cuda_stream
    if error := getattr(_library(), launcher)(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(weight.data_ptr()), ctypes.byref(arguments),
        ctypes.byref(finish), ctypes.c_void_p(stream),
    ):  # fmt: skip
        raise RuntimeError(f"{launcher} of the fused products failed with CUDA error {error}")


@cache  # a step launches four products a layer
def _library() -> ctypes.CDLL:
    return load_kernel(Path(__file__).with_suffix(".cu"), ())


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernels."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int) for name in ("num_tokens", "num_rows", "num_columns", "tiles", "next_tile")),
        *((name, ctypes.c_int) for name in ("next_half", "splits", "sharers", "next_may_start")),
        ("eps", ctypes.c_float),
    ]


class _QkvAppend(ctypes.Structure):
    """`QkvAppend` of the kernels."""

    _pointers: ClassVar = ["q_norm", "k_norm", "cos", "sin", "slots", "q", "keys", "values"]
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((name, ctypes.c_int64) for name in ("page_stride", "slot_stride", "head_stride")),
        *((name, ctypes.c_int) for name in ("page_size", "q_heads", "kv_heads")),
        *((name, ctypes.c_float) for name in ("k_factor", "v_factor")),
    ]


class _SwiGLU(ctypes.Structure):
    """`SwiGLU` of the kernels."""

    _fields_: ClassVar = [("out", ctypes.c_void_p), ("size", ctypes.c_int)]


class _AddToResidual(ctypes.Structure):
    """`AddToResidual` of the kernels."""

    _fields_: ClassVar = [("residual", ctypes.c_void_p), ("size", ctypes.c_int)]
