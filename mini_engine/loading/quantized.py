"""Read checkpoints with quantized matrices, whatever their layout, into the form of `mini_engine.quantization`.

`quantization_config` in config.json names a method. Each method has its own names for the tensors that make up a matrix
and its own way to pack several numbers into an int32. The headers of these tensors are checked when a checkpoint is
opened. A look-up of a matrix reads its tensors, unpacks them to 8 bits per number, and returns a `QuantizedTensor`.

The files write a number as (q - zero) * scale with an integer zero point; here it is q * scale + offset. Where q is
unsigned, half of its range is subtracted from q and from the zero point, so that q fits into an int8.

Scales of activations (`input_scale`, `activation_scheme`) are accepted and ignored, because this engine keeps
activations in 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int32, UInt8
from torch import Tensor

from mini_engine.errors import ModelLoadError
from mini_engine.loading.compressed_tensors import compressed_matrices, read_kv_scales
from mini_engine.loading.packed import SCALES, USE_ANOTHER, Matrix, Options, Parts, centered, float8, integers, unpack
from mini_engine.loading.stored import StoredTensors
from mini_engine.quantization import FP8, Format, QuantizedTensor

ACTIVATIONS = {"input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale"}
ACTIVATIONS |= {"input_scale_ub"}  # fbgemm's

# Keys that say how a checkpoint was made, or how another library should run it.
OF_GPTQ = {"true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "mse", "act_group_aware", "gptaq"}
OF_GPTQ |= {"dataset", "tokenizer", "batch_size", "model_seqlen", "pad_token_id", "max_input_length", "lm_head"}
OF_GPTQ |= {"model_name_or_path", "model_file_base_name", "block_name_to_quantize", "module_name_preceding_first_block"}
OF_GPTQ |= {"modules_in_block_to_quantize", "cache_block_outputs", "parallel_packing", "use_cuda_fp16", "use_exllama"}
OF_GPTQ |= {"disable_exllama", "exllama_config", "offload_to_disk", "offload_to_disk_path", "pack_impl", "hyb_act"}
OF_AWQ = OF_GPTQ | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse"}


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint in the common form.

    Attributes:
        tensors: under the model's names, a QuantizedTensor for each quantized matrix and a Tensor for all else.
        formats: the format of each quantized module, such as "model.layers.0.self_attn.q_proj"; others are dense.
        kv_scales: for each layer, the factors of its FP8 keys and values; empty if the file has none.
    """

    tensors: StoredTensors
    formats: Mapping[str, Format]
    kv_scales: Mapping[int, tuple[float, float]]


def read_quantized(tensors: StoredTensors, config: Mapping[str, Any], source: Path) -> QuantizedCheckpoint:
    """Give the quantized matrices of a checkpoint the common form. No matrix is read before it is looked up.

    Args:
        tensors: all tensors of the checkpoint under the names in its files. Those that are not part of a quantized
            matrix keep their names, and the model refuses names that it does not know.
        config: the parsed config.json, with a `quantization_config`.
        source: its folder, for messages.

    Raises:
        ModelLoadError: if the method or one of its options is unknown; or if tensors are missing, or their shapes and
            dtypes do not match the options.
        WeightFileError: if a stored shape contradicts its tensors. A look-up raises it if zero points or g_idx
            contradict the options.
    """
    options = Options(config["quantization_config"], f"{source}/config.json: quantization_config")
    method = options.get("quant_method", str, "none")
    if method not in METHODS:
        raise ModelLoadError(f"{options.where} has the unsupported method {method[:80]!r}: {USE_ANOTHER}.")
    if config.get("model_type") == "gpt2":
        raise ModelLoadError(f"{options.where}: GPT-2 stores its matrices transposed; load the original checkpoint.")
    kv_scales = read_kv_scales(options, tensors) if method == "compressed-tensors" else {}
    matrices = {matrix.name: matrix for matrix in METHODS[method](options, Parts(tensors, source))}
    used = {f"{name}.{part}" for name, matrix in matrices.items() for part in {*matrix.parts, *ACTIVATIONS}}
    used |= {f"model.layers.{layer}.self_attn.{name}_scale" for layer in kv_scales for name in "kv"}
    headers = {name: header for name, header in tensors.headers.items() if name not in used}
    by_weight = {f"{name}.weight": matrix for name, matrix in matrices.items()}
    headers |= {name: torch.empty(matrix.shape, device="meta") for name, matrix in by_weight.items()}

    def read(name: str) -> Tensor | QuantizedTensor:
        return by_weight[name].read(by_weight[name]) if name in by_weight else tensors[name]

    formats = {name: matrix.format for name, matrix in matrices.items()}
    return QuantizedCheckpoint(StoredTensors(headers, read), formats, kv_scales)


def _fp8(options: Options, parts: Parts) -> Iterator[Matrix]:
    """FP8 as in DeepSeek's checkpoints: a factor for each block, despite its name weight_scale_inv."""
    options.choice("activation_scheme", "dynamic", "static", default="dynamic")
    options.choice("fmt", "e4m3", default="e4m3")
    options.choice("scale_fmt", "float", "ue8m0", default="float")
    options.choice("expert_dtype", "fp8", default="fp8")
    form = Format("fp8", *options.block("weight_block_size"))
    options.finish()
    for name in _float8_modules(parts, "weight_scale_inv"):
        yield float8(parts, name, form, "weight_scale_inv")


def _fbgemm(options: Options, parts: Parts) -> Iterator[Matrix]:
    """FP8 of fbgemm: a factor for each row, weight_scale [N, 1] or [N]."""
    options.known.add("activation_scale_ub")
    options.finish()
    for name in _float8_modules(parts, "weight_scale"):
        yield float8(parts, name, Format("fp8"), "weight_scale")


def _float8_modules(parts: Parts, scale: str) -> list[str]:
    """Return the modules with float8 weights or a scale, so that neither is taken without the other."""
    found = parts.modules.items()
    return [name for name, part in found if scale in part or ("weight" in part and part["weight"].dtype == FP8)]


def _gptq(options: Options, parts: Parts) -> Iterator[Matrix]:
    """GPTQ: qweight [K * bits / 32, N] is packed along K, and qzeros [groups, N * bits / 32] along N.

    Version 1 stores zero points less 1, modulo 2^bits. g_idx [K] is the group of each column, in any order.
    """
    options.known |= OF_GPTQ
    bits, group = options.choice("bits", 4, 8), options.group("group_size")
    version = options.choice("format", "gptq", "gptq_v2", default="gptq")
    version = options.choice("checkpoint_format", "gptq", "gptq_v2", default=version)
    options.choice("pack_dtype", "int32", default="int32")
    is_reordered = options.get("desc_act", bool, False)
    form = Format(f"int{bits}", 1, group, has_offsets=not options.get("sym", bool, False))
    options.finish()

    def read(matrix: Matrix) -> QuantizedTensor:
        qweight, qzeros, scales = (parts.read(matrix.name, part) for part in ("qweight", "qzeros", "scales"))
        zeros = unpack(qzeros, bits)[:, : matrix.shape[0]].T
        if version == "gptq":
            zeros = (zeros + 1) & (2**bits - 1)
        q = centered(unpack(qweight.T, bits), bits)
        return integers(parts, matrix, q, scales.T.float(), centered(zeros, bits))

    for name in (name for name, part in parts.modules.items() if "qweight" in part):
        words, num_rows = parts.check(name, "qweight", (None, None), torch.int32)
        shape = (num_rows, words * 32 // bits)
        num_groups = form.tiles(*shape)[1]
        parts.check(name, "qzeros", (num_groups, ceil(num_rows * bits / 32)), torch.int32)
        parts.check(name, "scales", (num_groups, num_rows), *SCALES)
        if "g_idx" in parts.modules[name] or is_reordered:  # g_idx counts, whatever desc_act says
            parts.check(name, "g_idx", (shape[1],), torch.int32, torch.int64)
            yield Matrix(name, form, shape, ("qweight", "qzeros", "scales", "g_idx"), read)
        else:
            yield Matrix(name, form, shape, ("qweight", "qzeros", "scales"), read)


def unpack_awq(words: Int32[Tensor, "R W"]) -> UInt8[Tensor, "C R"]:
    """Unpack 4-bit numbers and transpose: number i of a word belongs to column 0, 2, 4, 6, 1, 3, 5, 7."""
    return unpack(words, 4).unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1).T


def _awq(options: Options, parts: Parts) -> Iterator[Matrix]:
    """AWQ: qweight [K, N / 8] and qzeros [groups, N / 8] are packed along N."""
    options.known |= OF_AWQ
    options.choice("bits" if "bits" in options.values else "w_bit", 4)
    group = options.group("group_size" if "group_size" in options.values else "q_group_size")
    for key in ("version", "format", "checkpoint_format"):
        options.choice(key, "gemm", "GEMM", default="gemm")
    options.choice("pack_dtype", "int32", default="int32")
    form = Format("int4", 1, group, has_offsets=options.get("zero_point", bool, True))
    options.finish()

    def read(matrix: Matrix) -> QuantizedTensor:
        qweight, scales = (parts.read(matrix.name, part) for part in ("qweight", "scales"))
        zeros = unpack_awq(parts.read(matrix.name, "qzeros")) if "qzeros" in matrix.parts else None
        zeros = None if zeros is None else centered(zeros, 4)
        return integers(parts, matrix, centered(unpack_awq(qweight), 4), scales.T.float(), zeros)

    for name in (name for name, part in parts.modules.items() if "qweight" in part):
        num_columns, words = parts.check(name, "qweight", (None, None), torch.int32)
        shape = (words * 8, num_columns)
        num_groups = form.tiles(*shape)[1]
        parts.check(name, "scales", (num_groups, words * 8), *SCALES)
        if form.has_offsets or "qzeros" in parts.modules[name]:
            parts.check(name, "qzeros", (num_groups, words), torch.int32)
            yield Matrix(name, form, shape, ("qweight", "scales", "qzeros"), read)
        else:
            yield Matrix(name, form, shape, ("qweight", "scales"), read)


METHODS: Mapping[str, Callable[[Options, Parts], Iterator[Matrix]]] = {
    "compressed-tensors": compressed_matrices,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
}
