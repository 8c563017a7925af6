"""Read checkpoints of the library compressed-tensors (INT4, INT8 and FP8), which LLM Compressor writes.

Its configuration has groups of modules. Each group has a scheme of its own, and patterns that say which modules are in
the group; `ignore` has patterns of modules that stay dense. The LM head is quantized like any other linear module
unless it is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import torch

from mini_engine.errors import ModelLoadError
from mini_engine.loading.packed import SCALES, USE_ANOTHER, Matrix, Options, Parts, centered, float8, integers, unpack
from mini_engine.loading.stored import StoredTensors
from mini_engine.quantization import Format, QuantizedTensor

# The modules that the library quantizes, by the ends of their names, with the names of their classes and base classes.
CLASSES = {"embed_tokens": ("Embedding", "Module"), "lm_head": ("Linear", "Module")}
CLASSES |= {f"{name}_proj": ("Linear", "Module") for name in ("q", "k", "v", "o", "gate", "up", "down")}

STORED_AS: dict[str, tuple[str, ...]] = {"pack-quantized": ("int",), "int-quantized": ("int",)}
STORED_AS |= {"float-quantized": ("float",), "naive-quantized": ("int", "float")}
OF_SPARSITY = frozenset({"registry_requires_subclass", "sparsity_structure", "global_sparsity", "targets", "ignore"})
OF_WEIGHTS = frozenset({"observer", "observer_kwargs", "zp_dtype", "scale_dtype"})  # the tensors have their dtypes


class Scheme(NamedTuple):
    """How a group of modules is stored.

    Attributes:
        form: the format of its matrices.
        is_packed: several numbers share an int32.
        has_packed_zeros: several zero points do.
        is_reordered: there must be a weight_g_idx.
    """

    form: Format
    is_packed: bool
    has_packed_zeros: bool
    is_reordered: bool


def compressed_matrices(options: Options, parts: Parts) -> Iterator[Matrix]:
    """Find and check the quantized matrices of a checkpoint.

    Raises:
        ModelLoadError: if the configuration has unknown options, or tensors do not match it.
        WeightFileError: if a stored shape contradicts its tensors.
    """
    options.known |= {"quantization_status", "global_compression_ratio"}
    if options.values.get("sparsity_config"):
        sparsity = Options(options.get("sparsity_config", dict), f"{options.where}.sparsity_config", OF_SPARSITY)
        sparsity.choice("format", "dense", default="dense")
        sparsity.finish()
    default, schemes = options.get("format", str, "dense"), dict[str, Scheme | None]()
    for group, values in options.get("config_groups", dict).items():
        of_group = Options(values, f"{options.where}.config_groups.{group[:80]}")
        schemes |= dict.fromkeys(_patterns(of_group, "targets"), _scheme(of_group, default))  # the last group counts
    ignored = _patterns(options, "ignore")
    options.finish()
    for name in parts.modules:
        classes = CLASSES.get(name.rpartition(".")[2], ())
        targets = matching(name, classes, list(schemes)) if classes else []
        scheme = schemes[targets[0]] if targets and not matching(name, classes, ignored) else None
        if scheme is not None:
            is_float = scheme.form.kind == "fp8"
            yield float8(parts, name, scheme.form, "weight_scale") if is_float else _integer(parts, name, scheme)


def matching(name: str, classes: tuple[str, ...], patterns: list[str]) -> list[str]:
    """Return the patterns that match a module; the library uses the first.

    A pattern is a whole name, "re:" and a regular expression for the start of a name, or the name of a class. Names
    come before expressions, and expressions before classes. Among expressions the order is alphabetical, whatever
    their order in the file.

    Args:
        name: the module's name.
        classes: the names of its class and its base classes.
        patterns: names and valid expressions.
    """
    ordered = sorted(patterns, key=lambda pattern: ("re:" in pattern, pattern))
    found = [p for p in ordered if (re.match(p[3:], name) if p.startswith("re:") else p == name)]
    return found + [pattern for pattern in ordered if pattern in classes and pattern not in found]


def _patterns(options: Options, key: str) -> list[str]:
    patterns = options.get(key, list, [])
    try:
        for pattern in patterns:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
    except (re.error, AttributeError, RecursionError, OverflowError) as error:
        raise options.bad(key, f"it must be a list of names and regular expressions ({str(error)[:80]})") from error
    return patterns


def _scheme(options: Options, default: str) -> Scheme | None:
    """Read a group of the configuration; None if its weights are dense."""
    stored_as = options.get("format", str, default)
    options.known |= {"weights", "input_activations", "output_activations"}
    if options.values.get("weights") is None:
        options.finish()
        return None
    weights = Options(options.values["weights"], f"{options.where}.weights", OF_WEIGHTS)
    if stored_as not in STORED_AS:
        problem = f"stores weights as {stored_as[:80]!r}, not {', '.join(STORED_AS)}"
        raise ModelLoadError(f"{options.where} {problem}: {USE_ANOTHER}.")
    is_packed = stored_as == "pack-quantized"
    kind = weights.choice("type", *STORED_AS[stored_as], default="int")
    bits = weights.choice("num_bits", *((4, 8) if is_packed else (8,)), default=8)
    is_symmetric = weights.choice("symmetric", *((True,) if kind == "float" else (True, False)), default=True)
    weights.choice("dynamic", False, default=False)
    order = weights.choice("actorder", False, "weight", "static", "group", "dynamic", default=False)
    columns = weights.group("group_size") if weights.values.get("group_size") is not None else 0
    inferred = {0: "tensor", None: "channel"}.get(columns, "group")
    strategy = weights.choice("strategy", "tensor", "channel", "group", "block", default=inferred)
    if (strategy == "group") != bool(columns):
        raise weights.bad("strategy", f"it contradicts group_size = {weights.values.get('group_size')}")
    block = weights.block("block_structure") if strategy == "block" else None
    weights.finish()
    options.finish()
    rows, columns = block or (None if strategy == "tensor" else 1, columns or None)
    form = Format("fp8" if kind == "float" else f"int{bits}", rows, columns, has_offsets=not is_symmetric)
    return Scheme(form, is_packed, is_packed and strategy in ("channel", "group"), order in ("group", "dynamic"))


def _integer(parts: Parts, name: str, scheme: Scheme) -> Matrix:
    """Check the headers of a matrix of integers: weight_packed [N, K * bits / 32] or weight [N, K].

    A word of weight_packed has numbers of one row, but a word of weight_zero_point [N * bits / 32, groups] has the zero
    points of several rows.
    """
    form, of_module, bits = scheme.form, parts.modules[name], scheme.form.bits
    if scheme.is_packed:
        words = parts.check(name, "weight_packed", (None, None), torch.int32)
        parts.check(name, "weight_shape", (2,), torch.int64, torch.int32)
        num_rows, num_columns = parts.read(name, "weight_shape").tolist()
        if num_rows < 1 or num_columns < 1 or (num_rows, ceil(num_columns * bits / 32)) != tuple(words):
            stated = f"states the shape [{num_rows}, {num_columns}]"
            raise parts.damaged(name, f"{stated}, which {list(words)} words of {32 // bits} numbers do not have")
        used = ["weight_packed", "weight_shape", "weight_scale"]
    else:
        num_rows, num_columns = parts.check(name, "weight", (None, None), torch.int8)
        used = ["weight", "weight_scale"]
    tiles = form.tiles(num_rows, num_columns)
    parts.check_tiles(name, "weight_scale", tiles, *SCALES)
    has_zeros, are_packed = form.has_offsets or "weight_zero_point" in of_module, scheme.has_packed_zeros
    if has_zeros and are_packed:
        parts.check(name, "weight_zero_point", (ceil(num_rows * bits / 32), tiles[1]), torch.int32)
    elif has_zeros:
        parts.check_tiles(name, "weight_zero_point", tiles, torch.int8)
    if scheme.is_reordered or "weight_g_idx" in of_module:
        parts.check(name, "weight_g_idx", (num_columns,), torch.int32, torch.int64)
        used.append("weight_g_idx")

    def read(matrix: Matrix) -> QuantizedTensor:
        q, zeros = parts.read(name, used[0]), parts.read(name, "weight_zero_point") if has_zeros else None
        if scheme.is_packed:
            q = centered(unpack(q, bits)[:, :num_columns], bits)
        if zeros is not None:
            zeros = centered(unpack(zeros.T, bits)[:, :num_rows], bits).T if are_packed else zeros.reshape(tiles)
        return integers(parts, matrix, q, parts.read(name, "weight_scale").float().reshape(tiles), zeros)

    return Matrix(name, form, (num_rows, num_columns), (*used, "weight_zero_point"), read)


def read_kv_scales(options: Options, tensors: StoredTensors) -> dict[int, tuple[float, float]]:
    """Read the factors of each layer's FP8 keys and values, if the configuration has a scheme for them.

    Raises:
        ModelLoadError: if the scheme is not FP8 with a factor for all keys, or a factor is missing or impossible.
    """
    if options.values.get("kv_cache_scheme") is None:
        return {}
    where, ignored = f"{options.where}.kv_cache_scheme", OF_WEIGHTS | {"dynamic"}
    scheme = Options(options.get("kv_cache_scheme", dict), where, ignored)
    for key, value in {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}.items():
        scheme.choice(key, value, default=value)
    scheme.finish()
    found: dict[int, tuple[float, float]] = {}
    for name in tensors.headers:
        if layer := re.fullmatch(r"model\.layers\.([0-9]{1,4})\.self_attn\.k_scale", name):
            pair = [name, name.removesuffix("k_scale") + "v_scale"]
            single = [other in tensors.headers and tensors.headers[other].numel() == 1 for other in pair]
            k, v = (float(tensors[other]) for other in pair) if all(single) else (0.0, 0.0)
            if not (0 < k < float("inf") and 0 < v < float("inf")):
                raise ModelLoadError(f"{where}: {name} and v_scale must both have one finite number above 0.")
            found[int(layer[1])] = k, v
    return found
