"""An engine that is ready compiles nothing more, and takes as much of the GPU's memory as its options allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from book.random_models import random_model
from mini_engine.config import EngineConfig
from mini_engine.engine import LLMEngine
from mini_engine.kernels.nvcc import load_kernel
from mini_engine.models.base import CausalLM
from mini_engine.sampling_params import SamplingParams
from tests.models.families import transformers_config

pytestmark = pytest.mark.gpu
HEAD_DIMS = {"qwen3": 128, "llama": 64, "gemma2": 256}


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the names of kernels that Triton, nvcc, FlashInfer or torch.compile build or load."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        from triton import knobs

        patch.setattr(knobs.runtime, "jit_cache_hook", lambda *, repr, **others: found.append(f"triton {repr}"))
        try:
            from flashinfer.jit.core import JitSpec
        except ImportError:
            pass
        else:
            load = JitSpec.build_and_load

            def build_and_load(spec: Any, *args: Any, **kwargs: Any) -> Any:
                found.append(f"flashinfer {spec.name}")
                return load(spec, *args, **kwargs)

            patch.setattr(JitSpec, "build_and_load", build_and_load)
        before = load_kernel.cache_info().misses, _graphs()
        yield found
        found += ["nvcc"] * (load_kernel.cache_info().misses - before[0])
        found += ["torch.compile"] * (_graphs() - before[1])


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM"}


def model_of(family: str) -> CausalLM:
    """A model with few layers, of sizes that all kernels take."""
    sizes = {"head_dim": HEAD_DIMS[family], "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32_000}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    config = transformers_config(family, **sizes, architectures=[ARCHITECTURES[family]])
    return random_model(config, torch.bfloat16, torch.device("cuda"))


def test_the_observer_sees_a_kernel_that_is_compiled() -> None:
    from mini_engine.kernels.swiglu import swiglu

    with compilations() as found:
        swiglu(*(torch.zeros(3, size, device="cuda", dtype=torch.float16) for size in (96, 40)), 1e-6)
    assert found


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {}), ("qwen3", {"kv_cache_dtype": "fp8_e4m3"}), ("llama", {}), ("gemma2", {})],
    ids=str,
)
def test_nothing_is_compiled_after_ready(family: str, options: dict[str, Any]) -> None:
    """Prompts of any length, with and without a common prefix, in batches of any size, sampled in any way."""
    engine = LLMEngine(model_of(family), EngineConfig.of({"gpu_memory_utilization": 0.5} | options))
    rng = np.random.default_rng(0)
    stem = rng.integers(0, 32_000, 1024).tolist()
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.1}, {"top_p": 0.9, "presence_penalty": 0.5},
        {"logit_bias": {5: 1.0}, "min_tokens": 3}, {"allowed_token_ids": list(range(100))},
    ]  # fmt: skip
    with compilations() as found:
        for count, shared, longest in [(1, 0, 1), (1, 0, 3000), (3, 700, 40), (60, 1024, 20), (300, 0, 500)]:
            for i in range(count):
                prompt = stem[:shared] + rng.integers(0, 32_000, rng.integers(1, longest + 1)).tolist()
                params = SamplingParams(**ways[i % len(ways)], max_tokens=int(rng.integers(3, 40)), seed=i)
                engine.add_request(f"{count} {i}", prompt, params)
            while engine.has_unfinished:
                for request in engine.step().finished:
                    assert request.error is None
    assert not found


def test_pages_fill_the_memory_that_the_options_allow() -> None:
    model = model_of("qwen3")
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    engine = LLMEngine(model, EngineConfig(gpu_memory_utilization=0.5, max_batch_size=64))
    free, total = torch.cuda.mem_get_info()
    most = engine.config.max_batch_size * -(-engine.config.max_model_len // engine.config.page_size)
    assert engine.config.num_pages <= most
    used = 1 - free / total
    assert used < 0.55 and (used > 0.45 or engine.config.num_pages == most or before / total < 0.5)
