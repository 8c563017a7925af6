"""The fused layer on a GPU: outputs and cache are those of the layer that calls each part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.llama import LlamaForCausalLM, decoder_layer
from mini_engine.parts import default_parts
from tests.helpers import our_model, transformers_model

PAGE = 16


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["flashinfer", "cascade"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_of_fused_layers_equals_one_of_parts(family: str, backend: str, layout: str) -> None:
    """Two decodes behind random keys, a prompt, and a chunk of one."""
    pytest.importorskip("flashinfer")
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, head_dim=64, hidden_size=64)
    parts = default_parts(torch.device("cuda"))
    outputs, caches = [], []
    for own in (parts, replace(parts, decoder_layer=decoder_layer)):
        model = our_model(theirs, parts=own).to("cuda")
        assert isinstance(model, LlamaForCausalLM)
        cache = PagedKVCache(model.attention_specs, 20, PAGE, torch.bfloat16, "cuda", layout)
        generator = torch.Generator("cuda").manual_seed(0)
        for pair in cache.layers:
            for tensor in pair:
                tensor.normal_(generator=generator)
        attend = create_backend(backend, model.attention_specs, cache, own)
        batch = StepBatch.build(
            token_ids=list(range(2, 2 + 1 + 1 + 9 + 20)), num_new=[1, 1, 9, 20], kv_lens=[33, 16, 9, 50],
            pages=[7, 3, 11, 5, 0, 19, 2, 14, 4], page_size=PAGE, device="cuda",
        )  # fmt: skip
        attend.plan(batch)
        with torch.inference_mode():
            outputs.append(model(batch.token_ids, batch.positions, attend))
        caches.append(cache)
    got, want = outputs
    torch.testing.assert_close(got, want, atol=0.03 * float(want.abs().max()), rtol=0)
    for own_pair, other_pair in zip(caches[0].layers, caches[1].layers, strict=True):
        for x, y in zip(own_pair, other_pair, strict=True):
            torch.testing.assert_close(x, y, atol=0.05, rtol=0.02)
