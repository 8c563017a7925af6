"""What the notebooks and the graders use. The engine itself is `mini_engine`; it never imports this package.

The names below are loaded when first used, so that `import book` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from book import figures, timing, units
    from book.display import Table, mermaid, show
    from book.environment import device_name, setup, versions
    from book.experiment import on_gpu
    from book.flops import count_flops
    from book.predictions import compare, predict
    from book.results import recorded, so_far
    from book.timing import measure

_MODULES = ("figures", "timing", "units")
_HOMES = {
    "compare": "predictions",
    "count_flops": "flops",
    "device_name": "environment",
    "measure": "timing",
    "mermaid": "display",
    "on_gpu": "experiment",
    "predict": "predictions",
    "recorded": "results",
    "setup": "environment",
    "show": "display",
    "so_far": "results",
    "Table": "display",
    "versions": "environment",
}

__all__ = [
    "Table",
    "compare",
    "count_flops",
    "device_name",
    "figures",
    "measure",
    "mermaid",
    "on_gpu",
    "predict",
    "recorded",
    "setup",
    "show",
    "so_far",
    "timing",
    "units",
    "versions",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"book.{name}")
    if name in _HOMES:
        return getattr(import_module(f"book.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'book' has no attribute {name!r}")
