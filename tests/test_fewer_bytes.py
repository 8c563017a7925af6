"""With quantized weights and FP8 keys, tokens still do not depend on what else the engine computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.models.base import CausalLM
from mini_engine.sampling_params import SamplingParams
from tests.helpers import double_model
from tests.models.test_weights import quantized_model

SMALL: dict[str, Any] = {"num_pages": 14, "page_size": 4, "max_num_batched_tokens": 16, "max_batch_size": 4}


def outputs(model: CausalLM, requests: list[tuple[list[int], SamplingParams]], **options: Any) -> list[list[int]]:
    engine = LLMEngine(model, EngineConfig.of({"max_model_len": 48} | options))
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for request in engine.step().finished:
            assert request.error is None
            found[request.request_id] = request.token_ids[len(request.prompt_token_ids) :]
    return [found[str(index)] for index in range(len(requests))]


@pytest.mark.parametrize("method", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_do_not_depend_on_the_schedule(family: str, kv_cache_dtype: str, method: str | None) -> None:
    """Alone, and in a pool so small that requests are preempted, prompts are cut, and prefixes are shared."""
    model = double_model(family) if method is None else quantized_model(family, method)
    rng = np.random.default_rng(1)
    stem = rng.integers(0, 61, 9).tolist()
    requests = [
        (
            (stem if index % 2 else []) + rng.integers(0, 61, rng.integers(1, 14)).tolist(),
            SamplingParams(temperature=0.7 * (index % 3 > 0), max_tokens=9, seed=index, ignore_eos=True),
        )
        for index in range(9)
    ]
    options = {"kv_cache_dtype": kv_cache_dtype, "attn_backend": "torch_padded" if family == "llama" else "torch"}
    together = outputs(model, requests, **options, **SMALL)
    for index, request in enumerate(requests):
        [alone] = outputs(model, [request], **options)
        assert together[index] == alone
