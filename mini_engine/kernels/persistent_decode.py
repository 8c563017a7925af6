"""A decode step of a few requests as one CUDA kernel: all layers and the LM head.

A single request gives a GPU little work: each weight is multiplied by one vector, so at best a step takes as long as
reading the weights, and the keys and values of the request. A step of many kernels takes longer, partly because few
weights are read while one kernel ends and the next one starts. Here at most one thread block stays on each SM for the
whole step. While it waits for other blocks, it reads ahead as many weights as its buffers hold (the idea of
"megakernels": Spector et al. 2025, "Look Ma, No Bubbles!").

Weights may be quantized. Then a step reads fewer bytes, and the kernel converts the weights to bfloat16 in registers.
Keys and values may be stored in e4m3, which the kernel converts to float16.

The kernel of one token is in `persistent_decode.cu`, and that of two to eight tokens in `persistent_batch.cu`, which
takes weights and keys in bfloat16 only. nvcc compiles them when a model's sizes are first used. Their results must
equal those of the model's own `forward` and `compute_logits`, except for rounding. Chapter 12 explains them.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mini_engine import ops
from mini_engine.attention.backend import CacheFormat
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kernels.nvcc import load_kernel
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.models.transform import prepare_weights
from mini_engine.models.weights import Linear, Projection, QuantizedLinear

COLUMNS = 1024  # columns of a weight in one buffer of the kernel's ring
MAX_SPLITS = 16  # most thread blocks that share the keys of a KV head
KINDS = ("fp8", "int8", "int4", "dense")  # `Kind` and DENSE in the `.cu` files
GROUPS = (32, 64, 128)  # columns that may share a scale
MAX_TOKENS = 8  # most tokens of a step, which are the columns of a tile of the tensor cores
STRIP = 16  # rows of a quantized matrix that the kernel multiplies at once


class _Step(ctypes.Structure):
    """The kernel's arguments: `Step` in the `.cu` files."""

    _pointers: ClassVar = [
        "layers", "embedding", "final_norm", "lm_head", "lm_head_scales", "inv_freq", "token_id", "token_source",
        "last_token", "position", "pages",
    ]  # fmt: skip
    _buffers: ClassVar = [
        "qkv", "splits", "lse", "attention", "after_attention", "activation", "after_mlp", "count", "logits",
    ]  # fmt: skip
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in _pointers),
        *((f"{axis}_stride", ctypes.c_int64) for axis in ("page", "token", "head")),
        *((name, ctypes.c_void_p) for name in _buffers),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("vocab_size", ctypes.c_int),
    ]


class _Kernel:
    """The kernel for one number of tokens, with its arguments.

    Args:
        launch: starts the kernel; given the address of the arguments and a stream, returns a CUDA error or 0.
        arguments: without the arrays of the step.
        memory: what the kernel writes, among them its logits. The arguments point to it.
    """

    def __init__(
        self, launch: Callable[[Any, ctypes.c_void_p], int], arguments: _Step, memory: dict[str, Tensor]
    ) -> None:
        self._launch, self._arguments, self.memory = launch, arguments, memory

    def __call__(self, batch: StepBatch, last_token: Int[Tensor, " rows"]) -> Float[Tensor, "T V"]:
        step = self._arguments
        step.token_id, step.token_source = batch.token_ids.data_ptr(), batch.token_source.data_ptr()
        step.last_token, step.position = last_token.data_ptr(), batch.positions.data_ptr()
        step.pages = batch.kv_page_indices.data_ptr()
        stream = torch.cuda.current_stream(last_token.device).cuda_stream
        if error := self._launch(ctypes.byref(step), ctypes.c_void_p(stream)):
            raise RuntimeError(f"launching the persistent kernel failed with CUDA error {error}")
        return self.memory["logits"]


class PersistentDecode:
    """Computes decode steps of a few tokens.

    Each token is the last one of a request, or one of several consecutive tokens of a request, each with its own list
    of pages. A CUDA graph can capture the call. Its replays read the arrays of the step at the same addresses.

    Args:
        model: a model for which `accepts` is true.
        kv_cache: the model's KV cache.
        specs: one for each layer, with the engine's options applied; None: the model's own.

    Attributes:
        max_tokens: most tokens of a step.
    """

    def __init__(
        self, model: LlamaForCausalLM, kv_cache: PagedKVCache, specs: Sequence[AttentionSpec] | None = None
    ) -> None:
        prepare_weights(model)
        self._model, self._cache, self._specs = model, kv_cache, specs or model.attention_specs
        layers = [_pointers(layer, kv_cache, self._specs) for layer in _layers_of(model)]
        self._layers = torch.tensor(layers, dtype=torch.int64, device=model.device)
        self._head, self._head_scales = _stored(model.lm_head)
        _, (_, head_group) = self._formats = [own for own in _formats(model) if own is not None]  # see `accepts`
        if self._head_scales is not None and not head_group:  # the kernel reads the scales of whole strips
            self._head_scales = F.pad(self._head_scales, (0, -len(self._head_scales) % STRIP))
        self._kernels = dict[int, _Kernel]()
        self.max_tokens = _max_tokens(model, self._specs)

    def _constants(self, tokens: int) -> dict[str, int]:
        """The constants of the `.cu` file for a number of tokens."""
        model, config = self._model, self._model.config
        sizes = {
            "LAYERS": len(self._layers), "HIDDEN": config.hidden_size, "Q_HEADS": config.num_attention_heads,
            "KV_HEADS": config.num_key_value_heads, "HEAD_DIM": config.head_dim,
            "INTERMEDIATE": config.intermediate_size, "PAGE_SIZE": self._cache.page_size, "BLOCKS": _num_blocks(model),
        }  # fmt: skip
        if tokens > 1:
            return sizes | {"TOKENS": tokens}
        (layer_kind, layer_group), (head_kind, head_group) = self._formats
        return sizes | {
            "LAYER_KIND": layer_kind, "LAYER_GROUP": layer_group, "HEAD_KIND": head_kind, "HEAD_GROUP": head_group,
            "KV_IS_E4M3": int(self._cache.layers[0][0].dtype == torch.float8_e4m3fn),
        }  # fmt: skip

    def _library(self, tokens: int) -> ctypes.CDLL:
        """Compile the kernel for a number of tokens, unless it has been compiled before."""
        source = Path(__file__).with_name("persistent_decode.cu" if tokens == 1 else "persistent_batch.cu")
        return load_kernel(source, tuple(self._constants(tokens).items()))

    def _kernel(self, tokens: int) -> _Kernel:
        """Load the kernel for a number of tokens, and allocate its memory."""
        model, config, device, keys = self._model, self._model.config, self._model.device, self._cache.layers[0][0]
        q_size = config.num_attention_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_key_value_heads * config.head_dim

        def tagged(*shape: int) -> Tensor:  # pairs of bfloat16, or float32, each with the tag of its writer
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def exchanged(size: int) -> Tensor:  # vectors
            if tokens == 1:
                return tagged(size // 2)
            return torch.full((2, MAX_TOKENS, size // 2), -1, dtype=torch.int32, device=device)  # pairs, without tags

        memory = {
            "qkv": tagged(tokens, qkv_size // 2),
            "splits": tagged(MAX_SPLITS, q_size // 2 if tokens == 1 else q_size),
            "lse": tagged(MAX_SPLITS, config.num_attention_heads),
            "attention": exchanged(q_size),
            "after_attention": exchanged(config.hidden_size),
            "activation": exchanged(config.intermediate_size),
            "after_mlp": exchanged(config.hidden_size),
            "count": torch.zeros(1, dtype=torch.int32, device=device),
            "logits": torch.empty(tokens, config.vocab_size, dtype=torch.float32, device=device),
        }
        token_axis, head_axis = (1, 2) if self._cache.layout == "NHD" else (2, 1)
        arguments = _Step(
            layers=self._layers.data_ptr(),
            embedding=model.embed_tokens.data_ptr(),
            final_norm=model.norm.data_ptr(),
            lm_head=self._head.data_ptr(),
            lm_head_scales=_address(self._head_scales),
            inv_freq=model.inv_freq.data_ptr(),
            page_stride=keys.stride(0),
            token_stride=keys.stride(token_axis),
            head_stride=keys.stride(head_axis),
            scale=self._specs[0].scale,
            eps=config.norm_eps,
            vocab_size=config.vocab_size,
            **{name: tensor.data_ptr() for name, tensor in memory.items()},
        )
        return _Kernel(self._library(tokens).launch_decode_step, arguments, memory)

    @staticmethod
    def accepts(
        model: LanguageModel, specs: Sequence[AttentionSpec], kv_cache: CacheFormat
    ) -> TypeGuard[LlamaForCausalLM]:
        """Whether a kernel supports steps of one token: of a Llama or Qwen3 in bfloat16, on Hopper, of suitable sizes.

        Matrices may be quantized: all matrices of the layers in the same format, and the LM head in any. Keys and
        values are stored in bfloat16 in all layers, or in e4m3 in all layers.

        Args:
            model: the model.
            specs: one for each of its layers, with the engine's options applied.
            kv_cache: the KV cache.
        """
        if not isinstance(model, LlamaForCausalLM) or model.device.type != "cuda" or model.dtype != torch.bfloat16:
            return False
        config = model.config
        row_sizes = (config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size)
        kv_size = 2 * config.num_key_value_heads * config.head_dim
        return (
            torch.cuda.get_device_capability(model.device)[0] == 9
            and len(_layers_of(model)) == len(model.layers)
            and kv_cache.dtype == torch.bfloat16
            and all(size % COLUMNS == 0 for size in row_sizes)
            and max(row_sizes) <= 16 * COLUMNS
            and config.intermediate_size % (2 * _num_blocks(model)) == 0
            and config.head_dim in (64, 128)
            and config.num_attention_heads // config.num_key_value_heads <= 8
            and not config.attention_bias
            and None not in _formats(model)
            and (not config.formats or row_sizes[1] + kv_size >= STRIP * _num_blocks(model))
            and config.hidden_act == "silu"
            and {spec.kv_dtype for spec in specs} in ({None}, {torch.float8_e4m3fn})
            and not any(spec.window or spec.softcap or spec.has_sinks or spec.key_budget for spec in specs)
        )

    def __call__(self, batch: StepBatch, last_token: Int[Tensor, " rows"]) -> Float[Tensor, "T V"]:
        """Compute the logits of a step of up to `max_tokens` tokens, and store their keys and values.

        The next call with as many tokens overwrites the logits.

        Args:
            batch: the step, with one new token for each list of pages.
            last_token: see `StepBatch.feed`.
        """
        if batch.num_tokens not in self._kernels:
            self._kernels[batch.num_tokens] = self._kernel(batch.num_tokens)
        return self._kernels[batch.num_tokens](batch, last_token)


def _max_tokens(model: LlamaForCausalLM, specs: Sequence[AttentionSpec]) -> int:
    """The most tokens of a step. Those of several tokens need formats that `persistent_batch.cu` knows."""
    config, dense = model.config, (KINDS.index("dense"), 0)
    if _formats(model) != (dense, dense) or specs[0].kv_dtype is not None or config.hidden_size > 4 * COLUMNS:
        return 1
    return min(MAX_TOKENS, _num_blocks(model) // config.num_key_value_heads)


def _num_blocks(model: LlamaForCausalLM) -> int:
    """Number of thread blocks: at most one for each SM, and the same number for each KV head."""
    num_sms = torch.cuda.get_device_properties(model.device).multi_processor_count
    return num_sms // model.config.num_key_value_heads * model.config.num_key_value_heads


def _layers_of(model: LlamaForCausalLM) -> list[LlamaLayer]:
    return [layer for layer in model.layers if isinstance(layer, LlamaLayer)]


def _formats(model: LlamaForCausalLM) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The formats of the layers and of the LM head; None for layers of several formats, too."""
    of_layers = {_format_of(own) for layer in _layers_of(model) for own in _matrices(layer)}
    return of_layers.pop() if len(of_layers) == 1 else None, _format_of(model.lm_head)


def _format_of(matrix: Projection) -> tuple[int, int] | None:
    """The kernel's constants for a format: its kind, and the columns that share a scale (0: a row); None if unknown."""
    if isinstance(matrix, Linear):
        return KINDS.index("dense"), 0
    if not isinstance(matrix, QuantizedLinear) or matrix.bias is not None or matrix.order is not None:
        return None
    form = matrix.format
    group = form.columns if form.tiles(1, matrix.in_features)[1] > 1 else 0
    is_known = (group in GROUPS and form.kind != "fp8") or (group == 0 and not form.has_offsets)
    is_packed = matrix.in_features % STRIP == 0 and ops.multiplies(form, matrix.numbers.device, torch.bfloat16)
    if group is None or not is_known or not is_packed:
        return None
    return KINDS.index(form.kind), group


def _matrices(layer: LlamaLayer) -> tuple[Projection, ...]:
    """A layer's matrices, in the order of the kernel's phases."""
    return layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down


def _stored(matrix: Projection) -> tuple[Tensor, Tensor | None]:
    """The numbers of a matrix as the kernel reads them, and its scales if it is quantized."""
    if isinstance(matrix, Linear):
        return matrix.weight, None
    assert isinstance(matrix, QuantizedLinear)
    kernel: Any = matrix.kernel  # `accepts` has refused matrices without one
    return kernel.packed.data, kernel.packed.scales


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pointers(layer: LlamaLayer, kv_cache: PagedKVCache, specs: Sequence[AttentionSpec]) -> list[int]:
    """`Layer` in the `.cu` file: the scales of pages in e4m3, and the addresses of a layer's weights and pages."""
    attention = layer.attention
    norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else (None, None)
    numbers, scales = zip(*map(_stored, _matrices(layer)), strict=True)
    pages = kv_cache.layers[layer.spec.layer]
    tensors = (*numbers, *scales, layer.input_norm, layer.mlp_norm, *norms, *pages)
    return [
        *(_packed_scales(specs[layer.spec.layer]) if pages[0].dtype == torch.float8_e4m3fn else ()),
        *(_address(tensor) for tensor in tensors),
    ]


def _packed_scales(spec: AttentionSpec) -> tuple[int, ...]:
    """`Scaled` in the `.cu` file: the bytes of four float32 numbers, as two integers."""
    k, v = spec.kv_scales or (1.0, 1.0)
    return struct.unpack("2q", struct.pack("4f", k, v, 1 / k, 1 / v))
