"""Measuring: the median of several runs after a warm-up, on a CPU and on a GPU."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from book.units import quantity

# A run shorter than this repeats the function until it is longer, so that the clock's own cost does not count.
_SHORTEST_RUN = 2e-3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call of a function, one entry per run."""

    runs: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.runs)

    @property
    def ms(self) -> float:
        return self.seconds * 1e3

    @property
    def us(self) -> float:
        return self.seconds * 1e6

    def rate(self, work: float) -> float:
        """`work` (bytes, FLOPs, tokens) of one call, per second."""
        return work / self.seconds

    def __repr__(self) -> str:
        fastest, slowest = quantity(min(self.runs), "s"), quantity(max(self.runs), "s")
        return f"{quantity(self.seconds, 's')} (median of {len(self.runs)}, {fastest} to {slowest})"


def measure(fn: Callable[[], object], *, runs: int = 7, warmup: int = 2, device: str = "cpu") -> Timing:
    """Time `fn()`: `warmup` calls that do not count, then `runs` measured runs.

    On a CPU the clock is `time.perf_counter`. On a GPU a pair of CUDA events brackets each run on the current
    stream. Where the host launches kernels more slowly than the device runs them, the device's waits count, too.
    """
    if runs < 1 or warmup < 1:
        raise ValueError(f"runs and warmup must be at least 1, not {runs} and {warmup}")
    once = _cuda_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    calls = max(1, math.ceil(_SHORTEST_RUN / max(min(once(fn, 1) for _ in range(warmup)), 1e-9)))
    return Timing(tuple(once(fn, calls) for _ in range(runs)))


def _cpu_seconds(fn: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def _cuda_seconds(fn: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls
