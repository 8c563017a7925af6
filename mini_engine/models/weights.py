"""From a name or a path to a model: which files belong to it, what they say, and the weights inside them.

A model is opened without reading its weights. `load_model` then reads one tensor after the other, straight from the
mapped file into the parameter that it fills.

What a folder contains is data. Pickles (`pytorch_model.bin`) are refused, code (`auto_map`) is never run, and no file
outside the folder is opened, whatever an index or a link in it says.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.models import hub
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.gguf_file import FLOATS, GGUFFile, read_gguf
from mini_engine.models.gguf_model import build_tokenizer, hf_config, hf_tensors
from mini_engine.models.layers import ModelParts
from mini_engine.models.registry import build_model
from mini_engine.models.safetensors_file import open_safetensors, open_sharded, read_json
from mini_engine.models.tensors import LazyTensor, LazyTensors


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, opened and checked, its weights not yet read.

    Attributes:
        path: the folder or the .gguf file.
        config: the shape of the model.
        tensors: the weights under Hugging Face's names; each look-up reads one from the file.
        dtype: the dtype that the model is stored in; bfloat16 for a quantised one.
        eos_token_ids: the tokens that end a text, from the generation configuration, else from the configuration,
            else from the tokenizer.
        build_tokenizer: makes the tokenizer; call `load_tokenizer`, which turns failures into typed errors.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    build_tokenizer: Callable[[], PreTrainedTokenizerBase]


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Find a model and check its files; no weights are read.

    Args:
        model: "smollm2-135m-instruct" (the embedded model), a folder with `config.json` and safetensors files, a
            `models--org--name` folder of the Hugging Face cache, a .gguf file, or the id of a model on the hub.

    Raises:
        ModelLoadError: there is no such model, or it is one that this engine cannot run.
        WeightFileError: one of its files is truncated, damaged or hostile.
    """
    if str(model) == hub.EMBEDDED_MODEL:
        return _open_folder(hub.embedded_folder())
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file, but no .gguf file: give the folder that it lies in.")
        return _open_gguf(path)
    if path.is_dir():
        if (path / "snapshots").is_dir():
            snapshot = hub.snapshot_folder(path)
            if snapshot is None:
                raise ModelLoadError(f"{path} has no complete snapshot: give the folder of one inside {path}/snapshots")
            path = snapshot
        return _open_folder(path)
    if isinstance(model, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        return _open_folder(hub.fetch(model))
    raise ModelLoadError(
        f"There is no model {str(model)!r}: give {hub.EMBEDDED_MODEL}, a folder with config.json and safetensors, "
        "a .gguf file, or a hub id such as org/name."
    )


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its chat template if it has one.

    Raises:
        ModelLoadError: the model has none, or it is damaged.
    """
    try:
        return checkpoint.build_tokenizer()
    except ModelLoadError:
        raise
    except BaseException as error:  # the libraries raise anything, down to a Rust panic, which is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"{checkpoint.path} has no usable tokenizer ({reason}): add an intact tokenizer.json and "
            "tokenizer_config.json of the model."
        ) from error


def load_model(
    checkpoint: Checkpoint, parts: ModelParts, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> CausalLM:
    """Build the model and fill it with its weights, converted to `dtype` on `device`; one copy of them is held.

    Raises:
        ModelLoadError: the weights do not fit the configuration, or the memory.
    """
    model = build_model(checkpoint.config, parts, dtype, device)
    model.load_weights(checkpoint.tensors)
    return model


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    hf = hf_config(file)
    eos = tuple(
        token_id
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if type(token_id := file.metadata.get(key)) is int
    )
    tensors = LazyTensors(hf_tensors(file, hf))
    quantised = any(info.type not in FLOATS for info in file.tensors.values())
    dtype = torch.bfloat16 if quantised else tensors.dtype
    return Checkpoint(path, ModelConfig.from_hf(hf), tensors, dtype, eos, lambda: _gguf_tokenizer(file))


def _gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    tokenizer, options = build_tokenizer(file)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def _open_folder(folder: Path) -> Checkpoint:
    files = _files_inside(folder)
    if "config.json" not in files:
        raise ModelLoadError(f"{folder} has no config.json: give the folder of a model that transformers has saved.")
    hf = read_json(files["config.json"])
    tensors = LazyTensors(_folder_tensors(folder, files))
    if "auto_map" in hf:
        warnings.warn(f"{folder} comes with code of its own (auto_map): it is not run.", stacklevel=3)
    config = ModelConfig.from_hf(hf)
    generation = read_json(files["generation_config.json"]) if "generation_config.json" in files else {}
    eos = _token_ids(folder, generation.get("eos_token_id")) or config.eos_token_ids
    checkpoint = Checkpoint(folder, config, tensors, tensors.dtype, eos, lambda: _folder_tokenizer(folder, files))
    if eos or not _has_tokenizer(files):
        return checkpoint
    with suppress(ModelLoadError):  # a model can run on token ids alone; who wants text gets the error
        eos = _token_ids(folder, load_tokenizer(checkpoint).eos_token_id)
    return replace(checkpoint, eos_token_ids=eos)


def _files_inside(folder: Path) -> dict[str, Path]:
    """The files of a model folder by name. A link that leads out of the folder is refused.

    In the Hugging Face cache every file of a snapshot is a link into the `blobs` folder beside `snapshots`.
    """
    root = folder.resolve()
    in_cache = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    allowed = [root, root.parent.parent / "blobs"] if in_cache else [root]
    files = {}
    for path in sorted(folder.iterdir()):
        target = path.resolve()
        if not target.is_file():
            continue
        if not any(target.is_relative_to(place) for place in allowed):
            raise WeightFileError(f"{path} is a link out of its folder: put the file itself there.")
        files[path.name] = path
    return files


def _folder_tensors(folder: Path, files: Mapping[str, Path]) -> dict[str, LazyTensor]:
    safetensors = {name: path for name, path in files.items() if name.endswith(".safetensors")}
    if "model.safetensors" in safetensors:
        return open_safetensors(safetensors["model.safetensors"])
    if "model.safetensors.index.json" in files:
        return open_sharded(files["model.safetensors.index.json"], safetensors)
    if len(safetensors) == 1:
        return open_safetensors(*safetensors.values())
    if safetensors:
        raise ModelLoadError(
            f"{folder} has {len(safetensors)} safetensors files, but no model.safetensors.index.json: add it."
        )
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    if pickles:
        raise ModelLoadError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is read: "
            "convert it to safetensors where you trust it (transformers' save_pretrained writes them)."
        )
    raise ModelLoadError(f"{folder} has no safetensors file: give a folder with model.safetensors, or a .gguf file.")


def _token_ids(folder: Path, value: Any) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise WeightFileError(f"{folder}/generation_config.json: eos_token_id is {str(value)[:80]}, no token ids.")
    return tuple(ids)


def _has_tokenizer(files: Mapping[str, Path]) -> bool:
    return bool(files.keys() & {"tokenizer.json", "tokenizer.model", "vocab.json"})


def _folder_tokenizer(folder: Path, files: Mapping[str, Path]) -> PreTrainedTokenizerBase:
    if not _has_tokenizer(files):
        raise ModelLoadError(f"{folder} has no tokenizer: add its tokenizer.json and tokenizer_config.json.")
    settings = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    generic = settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    if generic and "tokenizer.json" in files:
        # The class that AutoTokenizer would take, without the seconds that it needs to find it.
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer  # takes a second

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
