"""A limit on the memory that a call may take."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Inside, the process may grow by `num_bytes`; whatever asks for more, in Python or below, fails.

    A reader that trusts a huge number in a file then raises MemoryError or RuntimeError instead of a typed error.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
