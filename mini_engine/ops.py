"""Which implementation of an operation runs on which device: the one place that decides.

Each operation has a reference in PyTorch, which specifies it and runs everywhere. The tables below name what replaces
the reference on a GPU, as "module:object", because a kernel's module needs a package that not every machine has. For
attention, the registry of `attention/backend.py` is such a table. What a user replaces with a part of their own is
never replaced here.
"""

import pkgutil
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn import functional as F

from mini_engine.kernels.nvcc import has_nvcc
from mini_engine.quantization import Format

P = ParamSpec("P")
T = TypeVar("T")


class Kernel(NamedTuple):
    """What replaces a reference on a GPU.

    Attributes:
        path: "module:object"; it takes the reference's arguments.
        accepts: whether it takes these arguments; default if the first one is on a GPU.
    """

    path: str
    accepts: Callable[..., bool] = lambda first, *others, **named: first.is_cuda


MOST_SELECTABLE = 2**14  # pages of a request whose bounds one program can hold
# Once per step. Triton comes with PyTorch for CUDA, not with PyTorch for CPUs.
HAS_TRITON = find_spec("triton") is not None
STEP_KERNELS = {
    "feed_tokens": Kernel("mini_engine.kernels.step_start:feed_tokens"),
    "rope_tables": Kernel(
        "mini_engine.kernels.step_start:rope_tables",
        lambda positions, inv_freq: positions.is_cuda and inv_freq.dtype == torch.float32,
    ),
    "copy_pinned": Kernel(
        "mini_engine.kernels.pinned_copy:copy_small",
        lambda destination, source: destination.is_cuda or source.is_cuda,
    ),
    "keep_tokens": Kernel("mini_engine.kernels.pinned_copy:keep_tokens"),
    "merge_sinks": Kernel("mini_engine.kernels.sinks:merge_sinks"),  # once per layer, as the next ones
    "summarize_pages": Kernel("mini_engine.kernels.page_selection:summarize_pages"),
    "bound_scores": Kernel("mini_engine.kernels.page_selection:bound_scores"),
    "select_pages": Kernel(
        "mini_engine.kernels.page_selection:select_pages",
        lambda bounds, most: bounds.is_cuda and bounds.dtype == torch.float32 and bounds.shape[-1] <= MOST_SELECTABLE,
    ),
    "attend_to_pages": Kernel("mini_engine.kernels.page_selection:attend_to_pages"),
    "mix_experts": Kernel(
        "mini_engine.kernels.moe:mix_experts",
        lambda x, logits, gate_up, down, moe, activation, *others: (
            x.is_cuda and x.dtype != torch.float64 and activation is F.silu
        ),
    ),
}
SAMPLING = "mini_engine.kernels.sampling"  # a module: everything from the logits to the tokens

# In every layer, with FlashInfer: parts of the engine, and a whole layer over a backend that takes stored keys.
LAYER_PARTS = {
    "rms_norm": "mini_engine.kernels.fused_ops:rms_norm",
    "qk_norm": "mini_engine.kernels.fused_ops:qk_norm",
    "apply_rope": "mini_engine.kernels.fused_ops:apply_rope",
    "gated_mlp": "mini_engine.kernels.fused_ops:gated_mlp",
}
# Products of a few tokens with a quantized weight, by the type of its device.
QUANTIZED = {
    "cpu": "mini_engine.kernels.quantized_cpu:kernel_for",
    "cuda": "mini_engine.kernels.quantized_matmul:kernel_for",
}
FUSED_LAYER = "mini_engine.kernels.fused_layer:AdaptiveFusedLayer"
BATCH_INVARIANT_LAYER = "mini_engine.kernels.fused_layer:FusedLayer"
QUANTIZED_LAYER = "mini_engine.kernels.quantized_layer:QuantizedLayer"
PACKED_LAYERS = "mini_engine.kernels.quantized_layer:computes"


def with_kernel(reference: Callable[P, T]) -> Callable[P, T]:
    """Decorate a reference: calls that its entry in `STEP_KERNELS` accepts go to the kernel."""
    path, accepts = STEP_KERNELS[reference.__name__]
    if not HAS_TRITON:
        return reference

    @wraps(reference)
    def choose(*args: P.args, **kwargs: P.kwargs) -> T:
        return (load(path) if accepts(*args, **kwargs) else reference)(*args, **kwargs)

    return choose


def sampling_kernels(logits: torch.Tensor) -> Any | None:
    """Return the module of kernels that sample from these logits; None where the reference does."""
    return load(SAMPLING) if HAS_TRITON and logits.is_cuda and logits.dtype != torch.float64 else None


def layer_parts(device: torch.device) -> dict[str, Any]:
    """Return the kernels that replace parts of the engine on a device, by the names of the parts."""
    return {name: load(path) for name, path in LAYER_PARTS.items()} if has_layer_kernels(device) else {}


def multiplies(form: Format, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel multiplies tokens of this dtype by matrices of this format.

    Without one, a step would dequantize the matrix, which reads and writes more bytes than a dense matrix has.
    """
    if device.type == "cuda":
        return dtype == torch.bfloat16 and (form.columns or 16) % 16 == 0 and runs_hopper_kernels(device)
    if dtype != torch.bfloat16:
        return False
    return form.columns is None if form.kind == "int8" else form.kind == "int4" and form.columns in (32, 64, 128, 256)


def quantized_kernel(weight: Any, dtype: torch.dtype) -> Any | None:
    """Return the kernel that multiplies tokens of a dtype by a loaded `QuantizedLinear`; None where there is none."""
    device = weight.numbers.device
    return load(QUANTIZED[device.type])(weight) if multiplies(weight.format, device, dtype) else None


def runs_hopper_kernels(device: torch.device) -> bool:
    """Return whether the project's CUDA kernels compile for a device: a GPU of compute capability 9 and nvcc."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9 and has_nvcc()


def has_layer_kernels(device: torch.device) -> bool:
    """Return whether the kernels of `LAYER_PARTS` and `FUSED_LAYER` run on a device."""
    return device.type == "cuda" and find_spec("flashinfer") is not None


@cache  # a step calls several of them
def load(path: str) -> Any:
    """Import an object, given as "module:object", or a module."""
    return pkgutil.resolve_name(path)
