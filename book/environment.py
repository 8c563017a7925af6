"""The first code cell of every chapter: versions, device, threads, seeds, and the style of the figures."""

import os
import platform
from importlib import metadata

_PACKAGES = ("torch", "transformers", "triton", "flashinfer-python")


def versions() -> dict[str, str]:
    """Python's version and those of the packages that results depend on, where they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str | None = None) -> str:
    """The name of `device` ("cpu", "cuda", "cuda:1"); None means the GPU where there is one."""
    import torch

    from mini_engine import roofline

    return roofline.device_name(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def setup(seed: int = 0, threads: int | None = None) -> None:
    """Prepare a notebook and print what it runs on.

    Seeds torch, fixes the number of CPU threads where one is given, makes torch print plain decimals, silences
    progress bars (they would be saved as noise), sets the style of the figures, and lets the notebook show each
    `StepBatch` as a table.
    """
    # transformers and huggingface_hub read these when they are first imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch

    from book import batch_html, figures

    batch_html.register()
    torch.manual_seed(seed)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_printoptions(precision=4, sci_mode=False, linewidth=100)
    figures.use_style()
    print(", ".join(f"{package} {version}" for package, version in versions().items()))
    print(f"cpu: {device_name('cpu')}")
    print(
        f"gpu: {device_name('cuda')}" if torch.cuda.is_available() else "gpu: none (recorded results stand in for it)"
    )
