"""Check every shape and type annotation of the engine while the tests run; never fail a test for being slow."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import shape_checks

# Without a GPU, Triton's interpreter runs the kernels on the CPU. Triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
shape_checks.install("mini_engine")

# A first call imports and warms up; on a shared machine any call may take long. Speed belongs in benchmarks.
settings.register_profile("book", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("book")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that one worker runs: all of the site, which it builds; graders by chapter; others by file."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            chapter = item.callspec.params.get("slug", "") if hasattr(item, "callspec") else ""
            group = "site" if "site" in getattr(item, "fixturenames", ()) else f"{item.path.name} {chapter}"
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name} {group}"))


def pytest_collection_finish() -> None:
    """Exempt everything that exists by now from garbage collection: a worker has loaded millions of objects."""
    gc.freeze()
