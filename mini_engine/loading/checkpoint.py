"""Open a model by name or path, and load its weights and its tokenizer.

A model is opened without reading its weights: `open_checkpoint` checks the files and reads their headers, and
`load_model` compares every shape with the configuration before it copies the tensors into the parameters.

A model folder contains only data, and none of it is trusted. Pickles (`pytorch_model.bin`) are refused, code
(`auto_map`) is never run, and no file outside the folder is opened, whatever a link, an index or a configuration says.
transformers never reads the folder itself: its tokenizer is built from contents that were read and checked here.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mini_engine.errors import ModelLoadError, RequestError, WeightFileError
from mini_engine.loading import hub
from mini_engine.loading.gguf import build_tokenizer, hf_config, hf_tensors, read_gguf
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig, token_ids
from mini_engine.models.layers import ModelParts
from mini_engine.models.registry import build_model
from mini_engine.sampling_params import SamplingParams

# Real configurations and safetensors headers are below 1 MiB, and parsing them takes up to thirty times their size.
MAX_JSON_BYTES = 8 * 2**20
MAX_TOKENIZER_BYTES = 64 * 2**20  # the largest tokenizer.json, Gemma 3's, has 33 MB

SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint; each look-up reads one from its file, and nothing is kept.

    So a model that copies one tensor at a time into its parameters never needs memory for a second copy of the model.

    Attributes:
        headers: for each name, a tensor on the meta device with the shape that the file's header states, and with its
            dtype (float32 for GGUF, whose tensors are dequantized when they are read).
    """

    def __init__(self, headers: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self.headers, self._read = headers, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.headers  # the inherited method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, opened and checked, its weights not yet read.

    Attributes:
        path: the folder or the .gguf file.
        config: the shape of the model.
        tensors: the weights under transformers' names.
        dtype: the dtype of the stored weights; bfloat16 if they are quantized.
        eos_token_ids: the tokens that end a text, from generation_config.json, else from config.json; empty if neither
            states any.
        default_params: the sampling parameters that generation_config.json recommends; `do_sample: false` becomes
            temperature 0.
        build_tokenizer: builds the tokenizer; call `load_tokenizer`, which turns its failures into typed errors.
        has_tokenizer: False for a folder without tokenizer.json, whose model takes and returns only token ids.
    """

    path: Path
    config: ModelConfig
    tensors: StoredTensors
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams
    build_tokenizer: Callable[[], PreTrainedTokenizerBase]
    has_tokenizer: bool = True


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Find a model and check its files; no weights are read.

    Args:
        model: "smollm2-135m-instruct" (the embedded model), a folder with `config.json` and safetensors files, a
            `models--org--name` folder of the Hugging Face cache, a .gguf file, or the id of a model on the hub.

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
    if os.path.isdir(path / "snapshots") and not os.path.isfile(path / "config.json"):
        if snapshot := hub.snapshot_folder(path):
            return snapshot
        raise ModelLoadError(f"{path} has no complete snapshot: give the folder of one inside {path}/snapshots")
    if os.path.isdir(path) or (os.path.isfile(path) and path.suffix == ".gguf"):
        return path
    if isinstance(model, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and len(model) <= 200:
        return hub.fetch(model)
    known = f"{hub.EMBEDDED_MODEL}, a folder with config.json and safetensors, a .gguf file, or a hub id like org/name"
    raise ModelLoadError(f"There is no model {_short(str(model))}: give {known}.")


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a model, with its chat template if it has one.

    Raises:
        ModelLoadError: if the model has none, or it is damaged.
    """
    try:
        return checkpoint.build_tokenizer()
    except ModelLoadError:
        raise
    except BaseException as error:  # the libraries raise anything, down to a Rust panic, which is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise _damaged(checkpoint.path, f"it has no usable tokenizer ({problem})") from error


def load_model(
    checkpoint: Checkpoint, parts: ModelParts, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> CausalLM:
    """Build the model and fill it with its weights, converted to `dtype` on `device`, without a second copy.

    Raises:
        ModelLoadError: if the weights do not match the configuration, or the model does not fit into memory.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ModelLoadError(
            f"{checkpoint.path} stores its weights as {dtype}, which means nothing without their scales: "
            "use a checkpoint in float32, float16 or bfloat16"
        )
    model = build_model(checkpoint.config, parts, dtype, device)
    try:
        model.load_weights(checkpoint.tensors, checkpoint.tensors.headers)
    except OSError as error:
        raise _unreadable(checkpoint.path, error) from error
    return model


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = hf_config(file)
    ends = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    eos = tuple(token_id for token_id in ends if type(token_id) is int)

    def tokenizer() -> PreTrainedTokenizerBase:
        built, options = build_tokenizer(file)
        return PreTrainedTokenizerFast(tokenizer_object=built, **options)

    largest = max(file.tensors.values(), key=lambda tensor: tensor.end - tensor.begin)
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(largest.type, torch.bfloat16)
    tensors = StoredTensors(*hf_tensors(file, config))
    return Checkpoint(path, ModelConfig.from_hf(config), tensors, dtype, eos, SamplingParams(), tokenizer)


def _open_folder(folder: Path) -> Checkpoint:
    files = _files_inside(folder)
    if "config.json" not in files:
        raise ModelLoadError(f"{folder} has no config.json: give the folder of a model that transformers has saved.")
    hf = read_json(files["config.json"])
    tensors = _folder_tensors(folder, files)
    if "auto_map" in hf:
        warnings.warn(f"{folder} contains its own code (auto_map), which is not run.", stacklevel=3)
    config = ModelConfig.from_hf(hf)
    generation = read_json(files["generation_config.json"]) if "generation_config.json" in files else {}
    eos = token_ids(generation.get("eos_token_id")) or config.eos_token_ids
    dtype = max(tensors.headers.values(), key=Tensor.numel, default=torch.empty(0)).dtype
    tokenizer = partial(_folder_tokenizer, folder, files)
    default_params, has_tokenizer = _default_params(folder, generation), "tokenizer.json" in files
    return Checkpoint(folder, config, tensors, dtype, eos, default_params, tokenizer, has_tokenizer)


def _files_inside(folder: Path) -> dict[str, Path]:
    """Return the files of a model folder by name; nothing else is opened. Links that lead out of it are refused.

    In the Hugging Face cache every file of a snapshot is a link into the `blobs` folder beside `snapshots`.
    """
    root = Path(os.path.realpath(folder))
    in_cache = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    allowed = [root, root.parent.parent / "blobs"] if in_cache else [root]
    for path in folder.iterdir():
        if not any(Path(os.path.realpath(path)).is_relative_to(inside) for inside in allowed):
            raise WeightFileError(f"{_short(str(path))} links out of its folder: put the file itself there.")
    return {path.name: path for path in folder.iterdir() if os.path.isfile(path)}


# --- JSON ------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        WeightFileError: if the file is too large, is not UTF-8 or JSON, is nested too deeply, or is not an object.
    """
    try:
        parsed = json.loads(_read_bytes(path, MAX_JSON_BYTES).decode())
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _damaged(path, f"its JSON cannot be parsed ({str(error)[:100]})") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, f"its JSON is a {type(parsed).__name__}, not an object")
    return parsed


def _read_bytes(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise _damaged(path, f"it has more than {limit} bytes")
    return content


def _default_params(folder: Path, generation: Mapping[str, Any]) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    do_sample = generation.get("do_sample")
    try:
        if not isinstance(do_sample, bool | None):
            raise RequestError(f"do_sample is {_short(do_sample)}; it must be true or false")
        params = SamplingParams(**given)
    except RequestError as error:
        raise ModelLoadError(f"{folder}/generation_config.json: {str(error)[:200]}") from error
    return replace(params, temperature=0.0) if do_sample is False else params


# --- safetensors -----------------------------------------------------------------------------------------------------


def _folder_tensors(folder: Path, files: Mapping[str, Path]) -> StoredTensors:
    safetensors = {name: path for name, path in files.items() if name.endswith(".safetensors")}
    if "model.safetensors" in safetensors:
        return open_safetensors(safetensors["model.safetensors"])
    if "model.safetensors.index.json" in files:
        return open_sharded(files["model.safetensors.index.json"], safetensors)
    if len(safetensors) == 1:
        return open_safetensors(*safetensors.values())
    if safetensors:
        raise ModelLoadError(f"{folder} has several safetensors files, but no model.safetensors.index.json: add it.")
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    if pickles:
        problem = f"{folder} has its weights in {_short(pickles[0])}, a pickle, which can run code when it is read"
        raise ModelLoadError(f"{problem}: if you trust its source, convert it to safetensors with save_pretrained.")
    raise ModelLoadError(f"{folder} has no safetensors file: give a folder with model.safetensors, or a .gguf file.")


def open_safetensors(path: Path) -> StoredTensors:
    """Open one safetensors file. Its tensors are views of the mapped file, so only the parts that are used are read.

    Raises:
        WeightFileError: if the file is truncated, or its header contradicts itself or the file.
    """
    size = path.stat().st_size
    with path.open("rb") as raw:
        if int.from_bytes(raw.read(8), "little") > min(size, MAX_JSON_BYTES):
            raise _damaged(path, f"its header is longer than the file, or than {MAX_JSON_BYTES} bytes")
    try:
        file = safe_open(path, framework="pt")
        headers = {name: torch.empty_like(file.get_tensor(name), device="meta") for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # SafetensorError, or torch's error if a file of this size cannot be mapped
        raise _damaged(path, f"safetensors refuses it ({_short(str(error))})") from error

    def read(name: str) -> Tensor:
        if path.stat().st_size != size:  # touching a mapped page that no longer exists would kill the process
            raise WeightFileError(f"{path} changed size while it was read: write it again.")
        return file.get_tensor(name)

    return StoredTensors(headers, read)


def open_sharded(index_path: Path, shard_path: Mapping[str, Path]) -> StoredTensors:
    """Open a model that is spread over several safetensors files.

    Args:
        index_path: `model.safetensors.index.json`, whose "weight_map" maps tensor names to file names.
        shard_path: the checked path of each file name; any other name is refused, so that an index cannot point
            outside its folder.

    Raises:
        WeightFileError: if the index is damaged, or names a file or a tensor that does not exist.
    """
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise _damaged(index_path, 'its "weight_map" does not map tensor names to file names')
    opened: dict[str, StoredTensors] = {}
    for name, shard in weight_map.items():
        if shard not in shard_path:
            problem = f"{index_path} names {_short(shard)}, which is no safetensors file in its folder"
            raise WeightFileError(f"{problem}: add the file, or get the model from a source you trust.")
        if shard not in opened:
            opened[shard] = open_safetensors(shard_path[shard])
        if name not in opened[shard]:
            raise _damaged(index_path, f"tensor {_short(name)} is not in {_short(shard)}")
    headers = {name: opened[shard].headers[name] for name, shard in weight_map.items()}
    return StoredTensors(headers, lambda name: opened[weight_map[name]][name])


def _short(value: Any) -> str:
    """Quote a value from a file or a caller, cut to a length that fits into a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unreadable(path: str | Path, error: OSError) -> WeightFileError:
    return WeightFileError(f"{error.filename or path} cannot be read ({error.strerror}): check that it is readable.")


def _damaged(path: Path, problem: str) -> WeightFileError:
    folder = path if path.is_dir() else path.parent
    remedy = "Download or write it again."
    if os.path.isfile(folder / hub.MANIFEST):  # this engine wrote the folder
        remedy = f"Delete the folder {folder}; the next start converts the model again."
    return WeightFileError(f"{path} is damaged: {problem}. {remedy}")


# --- tokenizer -------------------------------------------------------------------------------------------------------


def _folder_tokenizer(folder: Path, files: Mapping[str, Path]) -> PreTrainedTokenizerBase:
    """Build the tokenizer of tokenizer.json, with the special tokens and the chat template that other files name."""
    if "tokenizer.json" not in files:
        remedy = "load the tokenizer with transformers, and save it there with save_pretrained"
        raise ModelLoadError(f"{folder} has no tokenizer.json: {remedy}.")
    names = ("special_tokens_map.json", "tokenizer_config.json")
    special, settings = (read_json(files[name]) if name in files else {} for name in names)
    tokens = {name: value for name, value in (special | settings).items() if name in SPECIAL_TOKENS and value}
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()}
    template = settings.get("chat_template")
    if "chat_template.jinja" in files:
        template = _read_bytes(files["chat_template.jinja"], MAX_JSON_BYTES).decode()
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    backend = Tokenizer.from_buffer(_read_bytes(files["tokenizer.json"], MAX_TOKENIZER_BYTES))
    # As in transformers, a token that these files name is special, and so has no text, whatever tokenizer.json says.
    named = [added for added in backend.get_added_tokens_decoder().values() if added.content in tokens.values()]
    for added in named:
        added.special = True
    backend.add_special_tokens(named)
    # No name_or_path: for a large vocabulary, transformers would ask the hub about a model of that name.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=template,
        clean_up_tokenization_spaces=settings.get("clean_up_tokenization_spaces") is True,
        **tokens,
    )
