"""Fixtures that the tests of loading share."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from mini_engine.loading import hub


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The folder of the embedded model, converted on first use."""
    return hub.embedded_folder()


@pytest.fixture(scope="session")
def memory_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Inside `memory_limit(n)` the process may grow by n bytes; whatever asks for more, in Python or below, fails.

    A reader that trusts a huge number in a file then raises MemoryError or RuntimeError instead of a typed error.
    """

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    return limit
