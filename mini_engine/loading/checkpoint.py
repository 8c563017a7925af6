"""Open a model by name or path, and load its weights and its tokenizer.

A model is opened without reading its weights: `open_checkpoint` checks the files and reads their headers, and
`load_model` compares every shape with the configuration before it copies the tensors into the parameters.

A model folder contains only data. Pickles (`pytorch_model.bin`) are refused, and code (`auto_map`) is never run.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mini_engine import ops
from mini_engine.errors import ModelLoadError, RequestError, WeightFileError
from mini_engine.loading import hub
from mini_engine.loading.gguf import SPLIT, build_tokenizer, end_token_ids, hf_config, hf_formats, hf_tensors, read_gguf
from mini_engine.loading.quantized import read_quantized
from mini_engine.loading.stored import StoredTensors
from mini_engine.loading.untrusted import REMEDY, check_header, check_token_ids, damaged, read_json
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig, token_ids
from mini_engine.models.layers import ModelParts
from mini_engine.models.registry import build_model
from mini_engine.quantization import Format, format_for
from mini_engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, opened and checked, its weights not yet read.

    Attributes:
        path: the folder or the .gguf file.
        config: the shape of the model.
        tensors: the weights under transformers' names; a QuantizedTensor for each module in `formats`.
        dtype: the dtype of the stored weights. If they are quantized: the one that config.json states, or bfloat16.
        eos_token_ids: the tokens that end a text, from every file that names some; the tokenizer may name more.
        default_params: the sampling parameters that generation_config.json recommends; `do_sample: false` becomes
            temperature 0.
        build_tokenizer: builds the tokenizer; call `load_tokenizer`, which turns its failures into typed errors.
        has_tokenizer: False for a folder without a tokenizer, whose model takes and returns only token ids.
        formats: the format of each quantized module, such as "model.layers.0.self_attn.q_proj"; others are dense.
        kv_scales: for each layer, the factors of FP8 keys and values, if the checkpoint has them.
    """

    path: Path
    config: ModelConfig
    tensors: StoredTensors
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams
    build_tokenizer: Callable[[], PreTrainedTokenizerBase]
    has_tokenizer: bool = True
    formats: Mapping[str, Format] = field(default_factory=dict)
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Find a model and check its files; no weights are read.

    Args:
        model: "smollm2-135m-instruct" (the embedded model), a folder with `config.json` and safetensors files, a
            `models--org--name` folder of the Hugging Face cache, a .gguf file or a folder with one, or the id of a
            model on the hub.

    Raises:
        ModelLoadError: if there is no such model, or this engine cannot run it.
        WeightFileError: if one of its files is truncated, damaged or hostile.
    """
    try:
        path = _find(model)
        return _open_gguf(path) if os.path.isfile(path) else _open_folder(path)
    except OSError as error:
        raise _unreadable(model, error) from error


def _find(model: str | Path) -> Path:
    """Return the folder or the .gguf file that a user means."""
    if not isinstance(model, str | Path):
        raise ModelLoadError(f"the model is given as a {type(model).__name__}: give its name or path as a string.")
    if model == hub.EMBEDDED_MODEL:
        return hub.embedded_folder()
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser, it accepts an unknown ~user
    # Unlike Path's methods, those of os.path return False for a path that is too long or contains a null character.
    if os.path.isdir(path / "snapshots") and path.name.startswith("models--"):
        return hub.fetch(path.name.removeprefix("models--").replace("--", "/"), cache=path.parent)
    if os.path.isdir(path) and not os.path.isfile(path / "config.json"):
        files = [file for file in path.glob("*.gguf") if not (split := SPLIT.search(file.name)) or int(split[1]) == 1]
        return files[0] if len(files) == 1 else path
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf"):
        return path
    return hub.fetch(model if isinstance(model, str) else str(path.absolute()))


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a model as transformers' AutoTokenizer does, with its chat template if it has one.

    Raises:
        ModelLoadError: if the model has none, or it is damaged.
    """
    if not checkpoint.has_tokenizer:
        raise ModelLoadError(f"{checkpoint.path} has no tokenizer.json: save one there with transformers.")
    try:
        return checkpoint.build_tokenizer()
    except (ModelLoadError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise anything, down to a Rust panic, which is not an Exception
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelLoadError(f"{checkpoint.path} has no usable tokenizer ({problem}). {REMEDY}") from error


def load_model(
    checkpoint: Checkpoint,
    parts: ModelParts,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
) -> CausalLM:
    """Build the model and fill it with its weights, converted to `dtype` on `device`, without a second copy.

    Args:
        checkpoint: the model on disk.
        parts: the engine's replaceable parts.
        dtype: dtype of what is not quantized.
        device: where the weights are.
        quantization: "fp8", "int8" or "int4": round the matrices of the layers to it, one tensor at a time, and with
            "int8" and "int4" the LM head to INT8; None: as they are stored.

    Raises:
        ModelLoadError: if the weights do not match the configuration, the model does not fit into memory, or its
            weights are quantized already.
    """
    config = checkpoint.config
    if config.moe and (quantization or checkpoint.formats):
        raise ModelLoadError(
            f"{config.architecture} is a mixture of experts, whose weights this engine does not quantize: use a "
            "checkpoint in bfloat16, and leave quantization out; kv_cache_dtype='fp8' works"
        )
    if quantization is None:
        formats = _kept(checkpoint, torch.device(device), dtype)
    elif checkpoint.formats:
        raise ModelLoadError(f"{checkpoint.path} is quantized already: leave quantization={quantization!r} out.")
    else:
        formats = formats_for(quantization, build_model(config, parts, dtype, "meta"))
        _warn_of_slow_steps(formats, torch.device(device), dtype)
    model = build_model(replace(config, formats=formats), parts, dtype, device)
    model.kv_scales = checkpoint.kv_scales
    if checkpoint.path.suffix == ".gguf":
        model.source = "metadata"
    try:
        model.load_weights(checkpoint.tensors, checkpoint.tensors.headers)
    except OSError as error:
        raise _unreadable(checkpoint.path, error) from error
    return model


def _kept(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> dict[str, Format]:
    """The formats of a checkpoint that a kernel of this device multiplies; the other matrices are dequantized."""
    matrices = {name: form for name, form in checkpoint.formats.items() if name != "model.embed_tokens"}
    kept = {name: form for name, form in matrices.items() if ops.multiplies(form, device, dtype)}
    if len(kept) < len(matrices) and dtype.itemsize == 2:  # with a wider dtype, more bytes are what was asked for
        kinds = ", ".join(sorted({form.kind.upper() for name, form in matrices.items() if name not in kept}))
        warnings.warn(
            f"{checkpoint.path}: {len(matrices) - len(kept)} matrices in {kinds} are dequantized, because no kernel "
            f"multiplies them in {str(dtype).removeprefix('torch.')} on {device.type}.",
            stacklevel=4,
        )
    return kept


def _warn_of_slow_steps(formats: Mapping[str, Format], device: torch.device, dtype: torch.dtype) -> None:
    kinds = {form.kind.upper() for form in formats.values() if not ops.multiplies(form, device, dtype)}
    if kinds and dtype.itemsize == 2:  # with a wider dtype, speed is not what was asked for
        warnings.warn(
            f"every step dequantizes the matrices in {', '.join(sorted(kinds))}, because no kernel multiplies them in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}: it will be slow.",
            stacklevel=4,
        )


def formats_for(quantization: str, model: CausalLM) -> dict[str, Format]:
    """Return the formats of a model's matrices for `quantization=...`, by the names of their modules.

    Logits are close to each other, so the LM head keeps eight bits where the layers have four. With FP8 it stays as
    it is, as in other engines.
    """
    matrices = {name: filled for name, filled in model.destinations().items() if len(filled.shape) == 2}
    in_layers = {name: filled for name, filled in matrices.items() if name.startswith(model.layers_name)}
    formats = {name.removesuffix(".weight"): format_for(quantization, own.shape[1]) for name, own in in_layers.items()}
    return formats if quantization == "fp8" else formats | {"lm_head": format_for("int8", model.config.hidden_size)}


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    hf, tokenizer = hf_config(file), partial(build_tokenizer, file)
    largest = max(file.tensors.values(), key=lambda tensor: tensor.end - tensor.begin)
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(largest.type, torch.bfloat16)
    config, tensors = ModelConfig.from_hf(hf), StoredTensors(*hf_tensors(file, hf, keep_quantized=True))
    ends, params, formats = end_token_ids(file), SamplingParams(), hf_formats(file)
    return Checkpoint(path, config, tensors, dtype, ends, params, tokenizer, formats=formats)


def _open_folder(folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json and not exactly one .gguf file: give such a folder or file.")
    hf, generation_file = read_json(folder / "config.json"), folder / "generation_config.json"
    if "auto_map" in hf:
        warnings.warn(f"{folder} contains its own code (auto_map), which is not run.", stacklevel=3)
    config, tensors = ModelConfig.from_hf(hf), _folder_tensors(folder)
    stored = max(tensors.headers.values(), key=Tensor.numel, default=torch.empty(0)).dtype
    dtype = stored if stored in (torch.float16, torch.float32, torch.float64) else torch.bfloat16
    formats: Mapping[str, Format] = {}
    kv_scales: Mapping[int, tuple[float, float]] = {}
    if hf.get("quantization_config") is not None:
        quantized = read_quantized(tensors, hf, folder)
        tensors, formats, kv_scales = quantized.tensors, quantized.formats, quantized.kv_scales
        stated = hf.get("dtype") or hf.get("torch_dtype")
        dtype = {"float32": torch.float32, "float16": torch.float16}.get(str(stated), torch.bfloat16)
    generation = read_json(generation_file) if generation_file.is_file() else {}
    eos = tuple(dict.fromkeys([*token_ids(generation.get("eos_token_id")), *config.eos_token_ids]))
    params, tokenizer = _default_params(folder, generation), partial(_folder_tokenizer, folder, config.vocab_size)
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return Checkpoint(folder, config, tensors, dtype, eos, params, tokenizer, has_tokenizer, formats, kv_scales)


def _folder_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    if folder.parent == hub.cache_folder():  # to choose a class, AutoTokenizer imports for seconds; here it is known
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    check_token_ids(folder, vocab_size)
    path = folder.absolute()  # which cannot be the name of a model on the hub
    return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def _default_params(folder: Path, generation: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    try:
        params = SamplingParams(**{name: generation[name] for name in names if generation.get(name) is not None})
        if not isinstance(do_sample := generation.get("do_sample"), bool | None):
            raise RequestError(f"do_sample is {do_sample!r}; it must be true or false")
    except RequestError as error:
        raise ModelLoadError(f"{folder}/generation_config.json: {str(error)[:200]}") from error
    return replace(params, temperature=0.0) if do_sample is False else params


# --- safetensors -----------------------------------------------------------------------------------------------------


def _folder_tensors(folder: Path) -> StoredTensors:
    files, whole = sorted(folder.glob("*.safetensors")), folder / "model.safetensors"
    if whole not in files and (folder / "model.safetensors.index.json").is_file():
        return open_sharded(folder / "model.safetensors.index.json")
    if whole in files or len(files) == 1:
        return open_safetensors(whole if whole in files else files[0])
    pickles = "; if its weights are pickles, which can run code when they are read, convert them with save_pretrained"
    problem = f"{folder} has {len(files)} safetensors files and no model.safetensors.index.json"
    raise ModelLoadError(f"{problem}: give a folder with model.safetensors, or a .gguf file{pickles}.")


def open_safetensors(path: Path) -> StoredTensors:
    """Open one safetensors file. Its tensors are views of the mapped file, so only the parts that are used are read.

    Raises:
        WeightFileError: if the file is truncated, or its header contradicts itself or the file.
    """
    check_header(path)
    size = path.stat().st_size
    try:
        file = safe_open(path, framework="pt")
        headers = {name: torch.empty_like(file.get_tensor(name), device="meta") for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # SafetensorError, or torch's error if a file of this size cannot be mapped
        raise damaged(path, f"safetensors refuses it ({str(error)[:80]})") from error

    def read(name: str) -> Tensor:
        if path.stat().st_size != size:  # touching a mapped page that no longer exists would kill the process
            raise WeightFileError(f"{path} changed size while it was read: write it again.")
        return file.get_tensor(name)

    return StoredTensors(headers, read)


def open_sharded(index_path: Path) -> StoredTensors:
    """Open a model that is spread over several safetensors files beside its `model.safetensors.index.json`.

    Raises:
        WeightFileError: if the index is damaged, or names a file or a tensor that does not exist.
    """
    files = {path.name: path for path in index_path.parent.glob("*.safetensors")}  # the index cannot point elsewhere
    try:
        shard_of = read_json(index_path)["weight_map"]
        opened = {shard: open_safetensors(files[shard]) for shard in sorted(set(shard_of.values()))}
        headers = {name: opened[shard].headers[name] for name, shard in shard_of.items()}
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"its weight_map must give each tensor a safetensors file in its folder ({str(error)[:80]})"
        raise damaged(index_path, problem) from error
    return StoredTensors(headers, lambda name: opened[shard_of[name]][name])


def _unreadable(path: str | Path, error: OSError) -> WeightFileError:
    return WeightFileError(f"{error.filename or path} cannot be read ({error.strerror}): check that it is readable.")
