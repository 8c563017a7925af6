"""Options of `mini-engine bench`. This module does not import torch, so `--help` does not wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mini_engine.errors import ConfigError, check_positive

WORKLOADS = (
    "batches", "throughput", "throughput-top-p", "stream", "long-output", "latency", "latency-top-p", "shared-prefix",
    "long-context", "host",
)  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark: what to measure, and how to print it.

    Attributes:
        workload: "batches" (requests of equal output length), "throughput" (many requests of mixed lengths), "stream"
            (more of them than run at once), "long-output" (fewer, and longer), "latency" (one request),
            "shared-prefix" (requests with a long common prefix), "long-context" (long prompts) or "host" (host time per
            step without a model; only `json` applies to it). "throughput-top-p" and "latency-top-p" sample with top-k
            and top-p. All are smaller on a CPU.
        peer: also measure this engine: "transformers", "transformers-continuous", "vllm" or "sglang". May be given
            several times.
        batch_size: number of requests of "batches". May be given several times.
        prompt_tokens: average tokens of a prompt of "batches"; lengths vary around it.
        max_tokens: tokens of each output of "batches".
        rounds: timed runs of each engine, alternating; the median is reported.
        json: print one JSON object per line instead of a table.
        out: also write the results to this file, in JSON, with date, device and versions.

    Raises:
        ConfigError: for an unknown workload, or a number below 1.
    """

    workload: str = "batches"
    peer: Sequence[str] = ()
    batch_size: Sequence[int] = (1, 8)
    prompt_tokens: int = 64
    max_tokens: int = 64
    rounds: int = 3
    json: bool = False
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ConfigError(f"unknown workload {self.workload!r}; choose one of: {', '.join(WORKLOADS)}")
        for size in self.batch_size:
            check_positive(batch_size=size)
            if size > 2**16:
                raise ConfigError(f"batch_size is {size}; choose at most {2**16} requests")
        check_positive(prompt_tokens=self.prompt_tokens, max_tokens=self.max_tokens, rounds=self.rounds)
