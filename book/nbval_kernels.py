"""A pytest plugin beside nbval: a kernel that dies while it starts is started again.

Jupyter chooses free ports and hands them to the kernel, which binds them once it has started. If another process
has taken one of them by then, the kernel exits, and every cell of the notebook is an error, whatever is in it.
"""

from collections.abc import Callable
from typing import Any

import nbval.kernel

ATTEMPTS = 3


def start_again(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that starts a kernel: when the kernel dies (RuntimeError), it is tried up to twice more."""

    def start_with_attempts(*arguments: Any, **options: Any) -> Any:
        for _ in range(ATTEMPTS - 1):
            try:
                return start(*arguments, **options)
            except RuntimeError as error:
                print(f"{error}; starting it again")
        return start(*arguments, **options)

    return start_with_attempts


def pytest_configure() -> None:
    """Give nbval the function with more attempts."""
    nbval.kernel.start_new_kernel = start_again(nbval.kernel.start_new_kernel)
