"""A page table for graders: its arrays are read-only outside of its own methods."""

from collections.abc import Callable
from typing import Any

from mini_engine.kv_cache.page_table import PageTable

WRITING = ("take", "claim", "share", "replace", "drop_front", "drop_fronts", "truncate", "release", "retain", "drop")
"""The methods of a page table that write to its arrays."""


class GuardedPageTable(PageTable):
    """A page table whose arrays only its own methods can change; a write from outside raises ValueError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock(True)

    def _lock(self, locked: bool) -> bool:
        """Make the arrays read-only or writable, and return whether they were read-only."""
        was_locked = not self.counts.flags.writeable
        for array in (self.table, self.counts, self.refcounts, self.generation, self._free_pages):
            array.flags.writeable = not locked
        return was_locked


def _unlocked(name: str) -> Callable[..., Any]:
    method = getattr(PageTable, name)

    def call(self: GuardedPageTable, *args: Any) -> Any:
        was_locked = self._lock(False)
        try:
            return method(self, *args)
        finally:
            self._lock(was_locked)  # as before, because methods call each other

    return call


for _name in WRITING:
    setattr(GuardedPageTable, _name, _unlocked(_name))
