"""Load the project's CUDA kernels. nvcc compiles a kernel for a model's sizes when it is first used."""

import ctypes
from functools import cache
from pathlib import Path


@cache
def has_nvcc() -> bool:
    """Return whether PyTorch finds a CUDA toolkit on this machine."""
    from torch.utils.cpp_extension import CUDA_HOME  # takes a second to import

    return CUDA_HOME is not None


@cache
def load_kernel(source: Path, sizes: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Compile a `.cu` file for Hopper, once, and load it. The library is kept on disk.

    Args:
        source: the file.
        sizes: name and value of each constant that the file does not define.
    """
    from torch.utils.cpp_extension import load  # takes a second to import

    path = load(
        name="_".join((source.stem, *(str(size) for _, size in sizes))),
        sources=[str(source)],
        extra_cuda_cflags=[
            "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", *(f"-D{name}={size}" for name, size in sizes),
        ],
        is_python_module=False,
    )  # fmt: skip
    return ctypes.CDLL(path)
