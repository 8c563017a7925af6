"""The fused layer on a GPU: outputs and cache are those of the layer that calls each part."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.llama import LlamaForCausalLM, PreNormLayer, decoder_layer
from mini_engine.models.transform import bind_layers
from mini_engine.parts import Parts, default_parts
from tests.attention.stepping import KV_SCALES, narrow
from tests.models.families import our_model, transformers_model, whole

PAGE = 16


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_folding_the_norms_changes_no_layer(family: str) -> None:
    model = our_model(transformers_model(family, seed=2, dtype=torch.float64))
    (want,) = whole(model, [[5, 9, 33, 4, 60]])
    for _ in range(2):  # the second time does nothing
        for layer in model.layers:
            assert isinstance(layer, PreNormLayer)
            layer.fold_norms()
            assert (layer.input_norm == 1).all() and (layer.mlp_norm == 1).all()
    torch.testing.assert_close(whole(model, [[5, 9, 33, 4, 60]])[0], want)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("backend", "is_narrow"), [("flashinfer", False), ("cascade", False), ("cascade", True), ("flash_decoding", True)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
# On Hopper: six launches, five, whose thread blocks have all tokens or 64 of them, and seven.
@pytest.mark.parametrize("chunk", [0, 20, 60, 130], ids=["3 tokens", "31 tokens", "71 tokens", "141 tokens"])
def test_fused_layers_are_as_exact_as_their_parts(
    family: str, backend: str, is_narrow: bool, layout: str, chunk: int
) -> None:
    """Two decodes after random keys, a prompt, and a chunk; both in bfloat16, compared with the model in float64.

    The keys and values of both may be in e4m3. Later layers amplify that rounding, so no bound holds for the error that
    it causes: the model that rounds them in float64, too, has it as well.
    """
    num_new, kv_lens = ([1, 1, 9, chunk], [33, 16, 9, 30 + chunk]) if chunk else ([1, 1, 1], [33, 16, 9])
    pytest.importorskip("flashinfer")
    sizes = {"head_dim": 64, "hidden_size": 64}
    if family == "qwen3_moe":  # a token of every expert, because rounding may let a router choose another one
        sizes |= {"num_experts_per_tok": 6}
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, **sizes)
    fused = default_parts(torch.device("cuda"))

    def by_parts(*args: object) -> torch.Tensor:
        return decoder_layer(*args)

    ways = {
        "fused": (theirs, fused, backend, layout),
        "parts": (theirs, replace(fused, decoder_layer=by_parts), backend, layout),
        "exact": (copy.deepcopy(theirs).double(), Parts(), "torch", "NHD"),
        "rounded": (copy.deepcopy(theirs).double(), Parts(), "torch", "NHD"),
    }
    outputs: dict[str, list[torch.Tensor]] = {}
    for name, (source, parts, attention, kv_layout) in ways.items():
        model = our_model(source, parts=parts).to("cuda")
        assert isinstance(model, LlamaForCausalLM)
        specs, scales = model.attention_specs, (1.0, 1.0)
        if is_narrow and name != "exact":
            specs, scales = narrow(specs), KV_SCALES
        cache = PagedKVCache(specs, 20, PAGE, model.dtype, "cuda", kv_layout)
        generator = torch.Generator("cuda").manual_seed(0)
        in_order = [x if kv_layout == "NHD" else x.transpose(1, 2) for pair in cache.layers for x in pair]
        for pages, scale in zip(in_order, scales * len(specs), strict=True):
            values = torch.randn(pages.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            pages.copy_((values / scale).to(pages.dtype))
        attend = create_backend(attention, specs, cache, parts)
        batch = StepBatch.build(
            token_ids=[2 + i % 50 for i in range(sum(num_new))],
            num_new=num_new,
            kv_lens=kv_lens,
            pages=[7, 3, 11, 5, 0, 19, 2, 14, 4, 9, 16, 1, 6, 8, 10, 12][: sum(-(-n // PAGE) for n in kv_lens)],
            page_size=PAGE,
            device="cuda",
        )
        attend.plan(batch)
        with torch.inference_mode():
            hidden = bind_layers(model, attend)(batch.token_ids, batch.positions)
        outputs[name] = [hidden, *(x.double() * n for x, n in zip(in_order, scales * len(specs), strict=True))]
    for got, other, want, rounded in zip(*outputs.values(), strict=True):
        error, usual = ((x.double() - want).norm() / want.norm() for x in (got, other))
        assert error < 1.5 * usual
        assert all(1.5 * (x.double() - rounded).norm() / rounded.norm() < 0.2 for x in (got, other))
