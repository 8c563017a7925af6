"""A whole decode step in one kernel: its logits, and the keys and values that it stores, are the model's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from book.random_models import random_model
from mini_engine.attention.backend import PlannedCache, create_backend
from mini_engine.attention.state import attention_state
from mini_engine.batch import StepBatch
from mini_engine.decode_graphs import DecodeArrays, pad_decodes
from mini_engine.errors import ConfigError
from mini_engine.kernels.persistent_decode import PersistentDecode
from mini_engine.kv_cache.paged import PagedKVCache, round_kv
from mini_engine.loading.checkpoint import formats_for
from mini_engine.models.base import CausalLM
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.qwen3 import Qwen3Attention
from mini_engine.models.registry import build_model
from mini_engine.models.weights import Projection
from mini_engine.parts import Parts, default_parts
from mini_engine.quantization import Format
from mini_engine.rope import rope_tables
from mini_engine.sampling_params import SamplingParams
from tests.helpers import double_model, make_engine, serve

PAGE, E4M3 = 16, torch.float8_e4m3fn
SHAPES = {
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "intermediate_size": 3072},
    "llama": {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64, "intermediate_size": 8192},
}


def model_of(family: str, device: str = "cuda") -> LlamaForCausalLM:
    from transformers import LlamaConfig, Qwen3Config

    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](
        **SHAPES[family], num_hidden_layers=3, num_key_value_heads=8, vocab_size=5001, rope_theta=10_000.0,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = random_model(config, torch.bfloat16, torch.device(device))
    assert isinstance(model, LlamaForCausalLM)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)  # weights of a norm
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_equals_the_model(family: str, layout: str) -> None:
    """After 1 to 5,000 keys on pages in random order: logits, keys and values within the rounding of bfloat16."""
    model = model_of(family)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (
        PagedKVCache(model.attention_specs, 400, PAGE, torch.bfloat16, "cuda", kv_layout)
        for kv_layout in (layout, "NHD")
    )
    for own, reference in zip(mine.layers, theirs.layers, strict=True):
        for x, y in zip(own, reference, strict=True):
            y.copy_(torch.randn(y.shape, generator=generator))
            x.copy_(y if layout == "NHD" else y.transpose(1, 2))
    assert PersistentDecode.accepts(model, model.attention_specs, mine)
    decode = PersistentDecode(model, mine)
    backend = create_backend("torch", model.attention_specs, theirs, Parts())
    last_token = torch.randint(5001, (3,), generator=generator).cuda()
    for step, length in enumerate((1, 2, 16, 17, 127, 129, 384, 640, 2048, 2049, 5000)):
        batch = StepBatch.build(
            token_ids=[step], num_new=None, kv_lens=[length], page_size=PAGE, device="cuda",
            pages=torch.randperm(400, generator=generator)[: -(-length // PAGE)].numpy(),
            token_source=[step % 4 - 1],
        )  # fmt: skip
        got = decode(batch, last_token)
        backend.plan(batch)
        want = model.compute_logits(model(batch.feed(last_token), batch.positions, backend))
        assert (got - want).norm() < 0.02 * want.norm(), length
        slot = batch.slot_mapping
        for own, reference in zip(mine.layers, theirs.layers, strict=True):
            for x, y in zip(own, reference, strict=True):
                stored = (x if layout == "NHD" else x.transpose(1, 2)).flatten(0, 1)[slot]
                expected = y.flatten(0, 1)[slot]
                assert (stored - expected).norm() < 0.02 * expected.norm(), length


# Each request's number of keys after each of its tokens of the step.
STEPS = {
    "two": [(17,), (640,)],
    "three": [(1,), (2049,), (128,)],
    "five": [(5,), (1000,), (16,), (33,), (384,)],
    "eight": [(1000,)] * 6 + [(9,), (300,)],
    "a short and seven": [(1,), (2,), (16,), (17,), (127,), (129,), (3000,), (384,)],
    "two of a request": [(640, 641)],
    "five of a request": [(15, 16, 17, 18, 19)],
    "eight of two requests": [(510, 511, 512, 513, 514), (100, 101, 102)],
    "eight at the start": [(1, 2, 3, 4, 5, 6, 7, 8)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_of_several_tokens_equals_the_model(family: str, layout: str) -> None:
    """Of requests of different lengths, and consecutive ones of a request, which read each other's new keys."""
    model = model_of(family)
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (
        PagedKVCache(model.attention_specs, 400, PAGE, torch.bfloat16, "cuda", kv_layout)
        for kv_layout in (layout, "NHD")
    )
    decode = PersistentDecode(model, mine)
    assert decode.max_tokens == 8
    backend = create_backend("torch", model.attention_specs, theirs, Parts())
    last_token = torch.randint(5001, (3,), generator=generator).cuda()
    for repetition in range(2):
        for name, requests in STEPS.items():
            for own, reference in zip(mine.layers, theirs.layers, strict=True):
                for x, y in zip(own, reference, strict=True):
                    y.normal_()
                    x.copy_(y if layout == "NHD" else y.transpose(1, 2))
            free, pages = torch.randperm(400, generator=generator), list[Tensor]()
            for lengths in requests:
                of_request, free = free.tensor_split([-(-max(lengths) // PAGE)])
                pages += [of_request[: -(-length // PAGE)] for length in lengths]
            kv_lens = [length for lengths in requests for length in lengths]
            batch = StepBatch.build(
                token_ids=torch.randint(5001, (len(kv_lens),), generator=generator).numpy(), num_new=None,
                kv_lens=kv_lens, pages=torch.cat(pages).numpy(), page_size=PAGE, device="cuda",
                token_source=[(row + repetition) % 4 - 1 for row in range(len(kv_lens))],
            )  # fmt: skip
            got = decode(batch, last_token)
            backend.plan(batch)
            want = model.compute_logits(model(batch.feed(last_token), batch.positions, backend))
            assert ((got - want).norm(dim=-1) < 0.02 * want.norm(dim=-1)).all(), name
            slots = batch.slot_mapping
            for own, reference in zip(mine.layers, theirs.layers, strict=True):
                for x, y in zip(own, reference, strict=True):
                    stored = (x if layout == "NHD" else x.transpose(1, 2)).flatten(0, 1)[slots].flatten(1)
                    expected = y.flatten(0, 1)[slots].flatten(1)
                    assert ((stored - expected).norm(dim=-1) < 0.02 * expected.norm(dim=-1)).all(), name


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 8])
def test_padding_changes_nothing(tokens: int) -> None:
    """Forty steps of one token, alone and with rows of padding."""
    model, last_token = model_of("qwen3"), torch.zeros(1, dtype=torch.int64, device="cuda")
    caches = [PagedKVCache(model.attention_specs, 40, PAGE, torch.bfloat16, "cuda", "NHD") for _ in range(2)]
    for x, y in zip(*(cache.layers for cache in caches), strict=True):
        for own, other in zip(x, y, strict=True):
            own.normal_()
            other.copy_(own)
    kernels, pages = [PersistentDecode(model, cache) for cache in caches], np.arange(38)[::-1]
    for step in range(40):
        length = 560 + step
        arrays: DecodeArrays = {
            "token_ids": np.array([step]), "kv_lens": np.array([length]), "pages": pages[: -(-length // PAGE)],
            "token_source": np.array([-1]), "page_positions": None,
        }  # fmt: skip
        steps = [arrays, pad_decodes(arrays, tokens, 39)]
        alone, padded = (
            kernel(StepBatch.build(**own, num_new=None, page_size=PAGE, device="cuda"), last_token)
            for kernel, own in zip(kernels, steps, strict=True)
        )
        assert padded.isfinite().all() and (alone[0] - padded[0]).norm() < 0.02 * alone.norm(), step


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_over_keys_in_e4m3_equals_the_model(family: str, layout: str) -> None:
    """Each layer has its own scales, and all slots except those of earlier keys are NaN.

    The logits must be those of the model over the keys and values that the kernel has stored. In every layer these must
    be close to the model's. In the last one they must be what `rotate_and_append` stores of the same projection, within
    one step of e4m3.
    """
    from mini_engine.kernels.rotate_and_append import rotate_and_append

    model = model_of(family)
    scales = [
        (0.03 * (layer + 1), 0.02 / (layer + 1)) for layer in range(3)
    ]  # the last layer's values may be too large
    specs = [
        replace(spec, kv_dtype=E4M3, kv_scales=own) for spec, own in zip(model.attention_specs, scales, strict=True)
    ]
    cache = PagedKVCache(specs, 520, PAGE, torch.bfloat16, "cuda", layout)
    # [page, token, head, dimension]; PyTorch has few operations on float8.
    tensors = [[(x if layout == "NHD" else x.transpose(1, 2)).view(torch.uint8) for x in own] for own in cache.layers]
    assert PersistentDecode.accepts(model, specs, cache)
    decode = PersistentDecode(model, cache, specs)

    def attend(at: tuple[Tensor, Tensor], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = []
        for x, new, scale in zip(tensors[layer], (k, v), scales[layer], strict=True):
            stored = x[at].view(E4M3).double()
            expected = round_kv(new[0].double(), scale, E4M3).double()
            assert (stored[-1] - expected).norm() < 0.06 * expected.norm(), f"{layer=}"
            wide.append(stored * scale)
        return attention_state(q.double(), *wide, scale=specs[layer].scale).out.to(q.dtype)

    generator = torch.Generator().manual_seed(0)
    last_token = torch.randint(5001, (3,), generator=generator).cuda()
    for step, length in enumerate((1, 17, 129, 640, 5000, 8000)):
        pages = torch.randperm(520, generator=generator)[: -(-length // PAGE)]
        batch = StepBatch.build(
            token_ids=[step], num_new=None, kv_lens=[length], page_size=PAGE, device="cuda", pages=pages.numpy(),
            token_source=[step % 4 - 1],
        )  # fmt: skip
        key = torch.arange(length)
        at = pages[key // PAGE].cuda(), (key % PAGE).cuda()
        for layer, own in enumerate(tensors):
            for x, scale in zip(own, scales[layer], strict=True):
                x.fill_(0x7F)  # NaN
                earlier = torch.randn(length - 1, *x.shape[2:], device="cuda")
                x[at[0][:-1], at[1][:-1]] = round_kv(earlier, scale, E4M3).view(torch.uint8)
        got = decode(batch, last_token)
        want = model.compute_logits(model(batch.feed(last_token), batch.positions, partial(attend, at)))
        assert got.isfinite().all() and (got - want).norm() < 0.02 * want.norm(), length

        pairs = decode._kernels[1].memory["qkv"].view(torch.int32)[:, ::2]  # without their tags
        attention, again = model.layers[-1].attention, [torch.zeros_like(x) for x in cache.layers[-1]]
        norms = (attention.q_norm, attention.k_norm) if isinstance(attention, Qwen3Attention) else None
        cos, sin = rope_tables(batch.positions, model.inv_freq)
        rotate_and_append(
            pairs.contiguous().view(torch.bfloat16), norms, model.config.norm_eps, cos, sin, (again[0], again[1]),
            layout, batch.slot_mapping, kv_scales=scales[-1],
        )  # fmt: skip
        for x, y in zip(cache.layers[-1], again, strict=True):
            stored, expected = (
                (each if layout == "NHD" else each.transpose(1, 2)).view(torch.uint8)[at[0][-1], at[1][-1]].int()
                for each in (x, y)
            )
            assert expected.any() and (expected & 0x7F < 0x7F).all()
            # Bytes order the numbers of each sign by magnitude; 0 and 0x80 are both zero.
            stored, expected = (torch.where(each < 0x80, each, 0x80 - each) for each in (stored, expected))
            assert (stored - expected).abs().max() <= 1 and (stored == expected).float().mean() > 0.98, length


def quantized(dense: LlamaForCausalLM, formats: dict[str, Format]) -> tuple[LlamaForCausalLM, CausalLM]:
    """The model in these formats, and in float32 with exactly the numbers that the formats store."""
    parts, tensors = default_parts(dense.device), dict(dense.destinations())
    model = build_model(replace(dense.config, formats=formats), parts, torch.bfloat16, dense.device)
    assert isinstance(model, LlamaForCausalLM)
    model.load_weights(tensors)
    untied = replace(dense.config, tie_word_embeddings=False)  # the embeddings are not quantized
    exact = build_model(untied, Parts(), torch.float32, dense.device)
    exact.load_weights(tensors | {"lm_head.weight": dense.embed_tokens})
    matrices = ([own for own in each.modules() if isinstance(own, Projection)] for each in (model, exact))
    with torch.no_grad():
        for own, other in zip(*matrices, strict=True):
            other.weight.copy_(own.dense(torch.float32))
    return model, exact


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "group"), [("fp8", None), *((m, group) for m in ("int4", "int8") for group in (None, 32, 64, 128))]
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_with_quantized_weights_equals_the_dequantized_model(
    family: str, method: str, group: int | None
) -> None:
    """With a scale for each row, or scales and offsets for groups; norms' weights are not one."""
    dense = model_of(family)
    form = Format(method, 1, group, has_offsets=group is not None)
    of_method = formats_for(method, dense)
    formats = {name: own if name == "lm_head" else form for name, own in of_method.items()}
    model, exact = quantized(dense, formats)
    caches = [PagedKVCache(m.attention_specs, 400, PAGE, m.dtype, "cuda", "NHD") for m in (model, exact)]
    generator = torch.Generator().manual_seed(0)
    for own, reference in zip(*(cache.layers for cache in caches), strict=True):
        for x, y in zip(own, reference, strict=True):
            x.copy_(torch.randn(x.shape, generator=generator))
            y.copy_(x)
    assert PersistentDecode.accepts(model, model.attention_specs, caches[0])
    decode = PersistentDecode(model, caches[0])
    backend = create_backend("torch", exact.attention_specs, caches[1], Parts())
    last_token = torch.randint(5001, (3,), generator=generator).cuda()
    for step, length in enumerate((1, 17, 129, 640, 5000, 384)):
        batch = StepBatch.build(
            token_ids=[step], num_new=None, kv_lens=[length], page_size=PAGE, device="cuda",
            pages=torch.randperm(400, generator=generator)[: -(-length // PAGE)].numpy(), token_source=[step % 4 - 1],
        )  # fmt: skip
        got = decode(batch, last_token)
        backend.plan(batch)
        want = exact.compute_logits(exact(batch.feed(last_token), batch.positions, backend))
        assert (got - want).norm() < 0.02 * want.norm(), length
        slot = batch.slot_mapping
        for own, reference in zip(*(cache.layers for cache in caches), strict=True):
            for x, y in zip(own, reference, strict=True):
                stored, expected = (each.flatten(0, 1)[slot].float() for each in (x, y))
                assert (stored - expected).norm() < 0.02 * expected.norm(), length


@pytest.mark.gpu
def test_layers_of_several_formats_are_refused() -> None:
    dense = model_of("qwen3")
    formats = formats_for("int4", dense) | {"model.layers.1.mlp.down_proj": Format("int8")}
    model, _ = quantized(dense, formats)
    cache = PagedKVCache(model.attention_specs, 40, PAGE, torch.bfloat16, "cuda", "NHD")
    assert not PersistentDecode.accepts(model, model.attention_specs, cache)


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_cache_dtype", "fewest"), [("auto", 64), ("fp8", 16)])
def test_an_engine_replays_it_and_gives_nearly_the_same_tokens(kv_cache_dtype: str, fewest: int) -> None:
    """Logits that are close may change places, so tokens agree up to the first such tie; e4m3 has more of them."""
    pytest.importorskip("flashinfer")
    model, params = model_of("qwen3"), SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompts = [[i, 7, 40 + i, 11] * (10 * i + 1) for i in range(4)]
    agreed = 0
    engines = [
        make_engine(
            model, attn_backend="flashinfer", num_pages=200, max_batch_size=2, kv_cache_dtype=kv_cache_dtype,
            persistent_decode=persistent,
        )
        for persistent in (None, False)
    ]  # fmt: skip
    assert [engine.config.persistent_decode for engine in engines] == [True, False]
    for i, prompt in enumerate(prompts):
        got, want = (serve(engine, {0: [(str(i), prompt, params)]})[str(i)] for engine in engines)
        assert len(got) == len(want) == 64
        agreed += next((j for j, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), 64)
    assert agreed > fewest


@pytest.mark.gpu
def test_a_window_is_refused() -> None:
    pytest.importorskip("flashinfer")
    options: dict[str, Any] = {"attn_backend": "flashinfer", "num_pages": 200, "persistent_decode": True}
    with pytest.raises(ConfigError, match="persistent_decode needs a Llama or Qwen3"):
        make_engine(model_of("qwen3"), sliding_window=16, **options)


def simulate_hopper(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "device", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


@pytest.mark.parametrize(
    ("of_layers", "accepted"),
    [
        ([{}] * 3, True),
        ([{"kv_dtype": E4M3}, {"kv_dtype": E4M3, "kv_scales": (0.5, 2.0)}, {"kv_dtype": E4M3}], True),
        ([{"kv_dtype": E4M3}, {}, {"kv_dtype": E4M3}], False),
        ([{"kv_dtype": torch.float8_e5m2}] * 3, False),
        ([{"kv_dtype": E4M3, "window": 16}] * 3, False),
        ([{"softcap": 30.0}] * 3, False),
        ([{}, {}, {"has_sinks": True}], False),
    ],
    ids=str,
)
def test_keys_are_in_bfloat16_or_e4m3_in_all_layers(
    monkeypatch: pytest.MonkeyPatch, of_layers: list[dict[str, Any]], accepted: bool
) -> None:
    """On a simulated Hopper GPU."""
    model, gpu = model_of("qwen3", "cpu"), torch.device("cuda")
    simulate_hopper(monkeypatch, gpu)
    specs = [replace(spec, **own) for spec, own in zip(model.attention_specs, of_layers, strict=True)]
    assert PersistentDecode.accepts(model, specs, PlannedCache(PAGE, "NHD", torch.bfloat16, gpu)) == accepted


@pytest.mark.parametrize(
    ("family", "changes", "accepted"),
    [
        ("Llama", {}, True),
        ("Mistral", {"sliding_window": None}, True),
        ("Mistral", {"sliding_window": 4096}, False),
        ("Qwen2", {}, False),
        ("Gemma3Text", {"layer_types": ["full_attention"] * 3, "hidden_activation": "silu"}, False),
    ],
)
def test_only_layers_of_llama_are_accepted(
    monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], accepted: bool
) -> None:
    """On a simulated Hopper GPU, all in sizes that suit."""
    import transformers

    own = {"num_hidden_layers": 3, "num_key_value_heads": 8, "vocab_size": 101, "tie_word_embeddings": True}
    config = getattr(transformers, f"{family}Config")(**SHAPES["llama"] | own | changes)
    model, gpu = random_model(config, torch.bfloat16, torch.device("cpu")), torch.device("cuda")
    simulate_hopper(monkeypatch, gpu)
    cache = PlannedCache(PAGE, "NHD", torch.bfloat16, gpu)
    assert PersistentDecode.accepts(model, model.attention_specs, cache) == accepted


def test_a_model_that_does_not_suit_is_refused() -> None:
    with pytest.raises(ConfigError, match="persistent_decode needs a Llama or Qwen3"):
        make_engine(double_model("llama"), persistent_decode=True)
