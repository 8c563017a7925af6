"""Check every shape and type annotation of the engine while the tests run, and never a test's own speed."""

import os

import torch
from hypothesis import settings

from tests import shape_checks

# Without a GPU, Triton's interpreter runs the kernels on the CPU. Triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
shape_checks.install("mini_engine")

# A first call imports and warms up; on a shared machine any call may take long. Speed belongs in benchmarks.
settings.register_profile("book", deadline=None)
settings.load_profile("book")
