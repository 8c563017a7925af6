"""Prometheus metrics of a server, with vLLM's names where vLLM has them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece
from mini_engine.request import FinishReason
from mini_engine.serving.options import METRICS_FOLDER

# OpenMetrics would change the colons of the names, so the text format is sent whatever a client accepts.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
COUNTS = tuple(float(2**i) for i in range(18))


class Metrics:
    """The metrics of one server.

    Args:
        model: the served model's name.
    """

    def __init__(self, model: str) -> None:
        self._registry, self._counts = CollectorRegistry(), _EngineCounts(model)
        self._label = {"model_name": model}

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(**self._label)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, ["model_name"], registry=self._registry).labels(**self._label)

        self.first = histogram("time_to_first_token_seconds", "Time to first token in seconds.", LONG)
        self.between = histogram("inter_token_latency_seconds", "Time between tokens in seconds.", SHORT)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after its first.", SHORT
        )
        self._whole = histogram("e2e_request_latency_seconds", "Time of a whole request in seconds.", LONG)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt.", COUNTS)
        self._output = histogram("request_generation_tokens", "Tokens of a request's output.", COUNTS)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that have been computed.")
        self._ended = Counter(
            "vllm:request_success", "Outputs that have ended.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        for reason in get_args(FinishReason):  # Prometheus sees a count grow only if it has seen it before
            self._ended.labels(**self._label, finished_reason=reason)
        self._registry.register(self._counts)

    def watch(self, num_prompt: int) -> Watch:
        """Return a watch for a request that has just arrived, with a prompt of some tokens."""
        return Watch(self, num_prompt)

    def text(self, counts: dict[str, int | float]) -> bytes:
        """Return all metrics in Prometheus' text format.

        Args:
            counts: of the engine (`engine_counts`).
        """
        self._counts.values, registry = counts, self._registry
        if METRICS_FOLDER in os.environ:  # what all processes have written
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
            registry.register(self._counts)
        return generate_latest(registry)

    def end(self, reason: FinishReason, num_prompt: int, num_output: int, whole: float, decode: float) -> None:
        """Count an output that has ended.

        Args:
            reason: why.
            num_prompt: tokens of its prompt.
            num_output: its tokens.
            whole: seconds since the request arrived.
            decode: seconds since its first token.
        """
        self._whole.observe(whole)
        self._prompt.observe(num_prompt)
        self._output.observe(num_output)
        if num_output > 1:
            self._per_token.observe(decode / (num_output - 1))
        self._ended.labels(**self._label, finished_reason=reason).inc()


@dataclass
class _Output:
    """What has been seen of an output.

    Attributes:
        first: when its first token came.
        last: when its last token so far came.
        num_tokens: its tokens so far.
    """

    first: float
    last: float
    num_tokens: int = 0


class Watch:
    """The times of one request.

    Args:
        metrics: receives them.
        num_prompt: tokens of its prompt.
    """

    def __init__(self, metrics: Metrics, num_prompt: int) -> None:
        self._metrics, self._num_prompt, self._arrived = metrics, num_prompt, time.perf_counter()
        self._outputs: dict[int, _Output] = {}

    def add(self, piece: Piece) -> None:
        """Count new tokens of one of its outputs, which come in one piece if the answer is not a stream."""
        now, num_tokens, metrics = time.perf_counter(), piece.num_tokens, self._metrics
        own = self._outputs.get(piece.completion)
        if own is None:
            first = piece.first_token or now
            own = self._outputs[piece.completion] = _Output(first, first)
            if num_tokens:
                metrics.prompt_tokens.inc(self._num_prompt)
                metrics.first.observe(first - self._arrived)
                num_tokens -= 1
        for _ in range(num_tokens):
            metrics.between.observe((now - own.last) / num_tokens)
        own.num_tokens += piece.num_tokens
        own.last = now if num_tokens else own.last
        if piece.finish_reason is not None:
            end = now - self._arrived, own.last - own.first
            metrics.end(piece.finish_reason, self._num_prompt, own.num_tokens, *end)


GAUGES = {
    "num_requests_running": "Requests in the batch.",
    "num_requests_waiting": "Requests that wait for a place in the batch.",
    "kv_cache_usage_perc": "Share of the pages that requests hold; 1 is all.",
}
COUNTERS = {
    "generation_tokens": "Tokens that were sampled.",
    "num_preemptions": "Preemptions.",
    "prefix_cache_queries": "Tokens of prompts that were looked up in the cache.",
    "prefix_cache_hits": "Those of them that it had.",
    "spec_decode_num_drafts": "Times that guesses of a request were checked.",
    "spec_decode_num_draft_tokens": "Guesses that were checked.",
    "spec_decode_num_accepted_tokens": "Guesses that were right.",
}


def engine_counts(engine: TextEngine) -> dict[str, int | float]:
    """Return the values of `GAUGES` and `COUNTERS`."""
    core, totals = engine.engine, engine.engine.metrics
    table, tree = core.page_table, core.scheduler.prefix_tree
    num_used = table.num_pages - table.num_free_pages - (tree.num_evictable if tree else 0)
    return {
        "num_requests_running": len(core.scheduler.running),
        "num_requests_waiting": len(core.scheduler.waiting),
        "kv_cache_usage_perc": num_used / table.num_pages,
        "generation_tokens": totals.output_tokens,
        "num_preemptions": totals.preemptions,
        "prefix_cache_queries": totals.prompt_tokens,
        "prefix_cache_hits": totals.shared_tokens,
        "spec_decode_num_drafts": totals.num_drafts,
        "spec_decode_num_draft_tokens": totals.num_draft_tokens,
        "spec_decode_num_accepted_tokens": totals.num_accepted_tokens,
    }


class _EngineCounts(Collector):
    """Gauges and counters of the engine.

    Attributes:
        values: of `engine_counts`.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.values: dict[str, int | float] = dict.fromkeys((*GAUGES, *COUNTERS), 0)

    def collect(self) -> Iterator[Metric]:
        for family, several in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, what in several.items():
                metric = family(f"vllm:{name}", what, labels=["model_name"])
                metric.add_metric([self._model], self.values[name])
                yield metric
