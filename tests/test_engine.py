"""Continuous batching gives every request the tokens that it gets alone, whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.backend import BACKENDS
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, RequestError, ScheduleError
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.outputs import EngineMetrics, StepReport
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.sampling import SamplingBatch, sample
from mini_engine.sampling_params import SamplingParams
from tests.helpers import (
    GREEDY,
    Arrival,
    alone,
    check_nothing_leaked,
    counting_parts,
    double_model,
    make_engine,
    requests,
    serve,
)
from tests.models.families import FAMILIES, our_model, transformers_model

PROMPTS = [[5, 9, 33], [7], [1, 60, 22, 18, 4, 4, 31, 8, 50], [12, 13]]
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def roomy(family: str = "qwen3", **options) -> LLMEngine:
    return make_engine(double_model(family), **{"num_pages": 24, "page_size": 4, "max_batch_size": 4} | options)


# --- the property ----------------------------------------------------------------------------------------------------


def check_tokens(data: st.DataObject, model: CausalLM, attn_backend: str, most: int, longest: int) -> None:
    """Serve random requests by a random engine, some aborted on the way, and compare each with a run alone."""
    arrivals: dict[int, list[Arrival]] = {}
    all_requests = data.draw(requests(most, longest))
    for request in all_requests:
        arrivals.setdefault(data.draw(st.integers(0, 4)), []).append(request)
    aborts: dict[int, list[str]] = {}
    for name, _, _ in all_requests:
        if data.draw(st.integers(0, 4)) == 0:
            aborts.setdefault(data.draw(st.integers(1, 8)), []).append(name)
    aborted = {name for names in aborts.values() for name in names}
    window = data.draw(st.none() | st.integers(1, 12))
    page_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    needed = max(-(-(len(prompt) + params.max_tokens) // page_size) for _, prompt, params in all_requests)
    max_batch_size = data.draw(st.integers(1, 4))
    engine = make_engine(
        model,
        attn_backend=attn_backend,
        num_pages=needed + data.draw(st.integers(0, 4)),  # so small that preemption happens
        page_size=page_size,
        max_batch_size=max_batch_size,
        max_num_batched_tokens=max_batch_size + data.draw(st.integers(0, 24)),
        sliding_window=window,
        prefix_sharing=data.draw(st.booleans()),
        pipeline_depth=data.draw(st.sampled_from([0, 1])),
    )
    got = serve(engine, arrivals, aborts)
    for name, prompt, params in all_requests:
        want = alone(model, prompt, params, window)
        assert got[name] == (want[: len(got[name])] if name in aborted else want), name


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(FAMILIES)), st.sampled_from(["torch", "torch_padded", "chunked"]))
def test_tokens_do_not_depend_on_the_schedule(data, family, attn_backend):
    """In float64, exactly: arrivals, chunks, pool, pages, shared prefixes, windows, depth, aborts, end tokens."""
    check_tokens(data, double_model(family), attn_backend, most=5, longest=24)


@settings(max_examples=6)
@given(st.data(), st.sampled_from(sorted(FAMILIES)))
def test_tokens_do_not_depend_on_the_schedule_with_flex(data, family):
    check_tokens(data, double_model(family), "flex", most=3, longest=12)
