"""Load the project's CUDA kernels. nvcc compiles a kernel for a model's sizes when it is first used."""

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


@cache
def has_nvcc() -> bool:
    """Return whether PyTorch finds a CUDA toolkit on this machine."""
    from torch.utils.cpp_extension import CUDA_HOME  # takes a second to import

    return CUDA_HOME is not None


@cache
def load_kernel(source: Path, sizes: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile a `.cu` file for Hopper, once, and load it.

    The library is kept on disk, in PyTorch's folder of extensions.

    Args:
        source: the file.
        sizes: name and value of each constant that the file does not define.
    """
    from torch.utils.cpp_extension import get_default_build_root, load  # takes a second to import

    name = "_".join((source.stem, *(str(size) for _, size in sizes)))
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root(), name)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"{name}.so").exists():
        logger.info("compiling %s for this model, once: up to a minute", source.name)
    path = load(
        name=name,
        build_directory=str(folder),
        sources=[str(source)],
        extra_cuda_cflags=[
            "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", *(f"-D{name}={size}" for name, size in sizes),
        ],
        is_python_module=False,
    )  # fmt: skip
    return ctypes.CDLL(path)
