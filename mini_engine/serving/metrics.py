"""Prometheus metrics of a server, with vLLM's names where vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mini_engine.llm import TextEngine
from mini_engine.outputs import Piece

# OpenMetrics would change the colons of the names, so the text format is sent whatever a client accepts.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class Metrics:
    """The metrics of one server.

    Args:
        engine: the engine, whose counts are read when they are asked for.
        model: the served model's name.
    """

    def __init__(self, engine: TextEngine, model: str) -> None:
        self._engine, self._registry = engine, CollectorRegistry()
        self._label = {"model_name": model}

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(**self._label)

        self._first = histogram("time_to_first_token_seconds", "Time to first token in seconds.", LONG)
        self._between = histogram("inter_token_latency_seconds", "Time between tokens in seconds.", SHORT)
        self._whole = histogram("e2e_request_latency_seconds", "Time of a whole request in seconds.", LONG)
        self._ended = Counter(
            "vllm:request_success", "Outputs that have ended.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._registry.register(_EngineCounts(engine, model))

    def watch(self) -> Watch:
        """Return a watch for a request that has just arrived."""
        return Watch(self)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def add(self, piece: Piece, since_arrival: float, since_last: float | None) -> None:
        """Count new tokens of an output.

        Args:
            piece: the tokens.
            since_arrival: seconds since the request arrived.
            since_last: seconds since the last token of this output; None if these are the first.
        """
        if since_last is None:
            self._first.observe(since_arrival)
        else:
            for _ in range(piece.num_tokens):
                self._between.observe(since_last / piece.num_tokens)
        if piece.finish_reason is not None:
            self._whole.observe(since_arrival)
            self._ended.labels(**self._label, finished_reason=piece.finish_reason).inc()


class Watch:
    """The times of one request.

    Args:
        metrics: receives them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._arrived = metrics, time.perf_counter()
        self._last: dict[int, float] = {}  # time of the last token of each output

    def add(self, piece: Piece) -> None:
        """Count new tokens of one of its outputs."""
        now, last = time.perf_counter(), self._last.get(piece.completion)
        if piece.num_tokens or piece.finish_reason is not None:
            self._metrics.add(piece, now - self._arrived, None if last is None else now - last)
            self._last[piece.completion] = now


class _EngineCounts(Collector):
    """Gauges and counters that are read from the engine."""

    def __init__(self, engine: TextEngine, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        core, totals = self._engine.engine, self._engine.engine.metrics
        table, tree = core.page_table, core.scheduler.prefix_tree
        num_used = table.num_pages - table.num_free_pages - (tree.num_evictable if tree else 0)
        gauges = {
            "num_requests_running": ("Requests in the batch.", len(core.scheduler.running)),
            "num_requests_waiting": ("Requests that wait for a place in the batch.", len(core.scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the pages that requests hold; 1 is all.", num_used / table.num_pages),
        }
        counters = {
            "prompt_tokens": ("Tokens of prompts.", totals.prompt_tokens),
            "generation_tokens": ("Tokens that were sampled.", totals.output_tokens),
            "num_preemptions": ("Preemptions.", totals.preemptions),
            "prefix_cache_queries": ("Tokens of prompts that were looked up in the cache.", totals.prompt_tokens),
            "prefix_cache_hits": ("Those of them that it had.", totals.shared_tokens),
            "spec_decode_num_draft_tokens": ("Guesses that were checked.", totals.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Guesses that were right.", totals.num_accepted_tokens),
        }
        for family, several in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (what, value) in several.items():
                metric = family(f"vllm:{name}", what, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric
