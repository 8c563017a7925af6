"""Every backend against naive attention, wherever pages lie and however tokens arrive; and what backends refuse."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention import backend as backend_module
from mini_engine.attention.backend import BACKENDS, FEATURES, create_backend
from mini_engine.attention.naive import masked_attention
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.attention.stepping import expected, full_cache, random_qkv, run_in_steps

PLAIN = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
WINDOW = replace(PLAIN, layer=1, window=5)
CAPPED = replace(PLAIN, layer=1, window=5, softcap=4.0)
ALIBI = replace(PLAIN, layer=2, num_kv_heads=6, alibi_slopes=(0.5, 0.25, 0.1, 0.05, 0.02, 0.01))
FEATURED = (PLAIN, CAPPED, ALIBI)
# `torch_padded` pads only where no layer has a soft-cap or slopes.
ON_CPU = [name for name, info in BACKENDS.items() if "cpu" in info.devices]
RUNS = [pytest.param(name, FEATURED, id=name) for name in ON_CPU]
RUNS.append(pytest.param("torch_padded", (PLAIN, WINDOW), id="torch_padded, without softcap"))


@pytest.mark.parametrize(("name", "specs"), RUNS)
@settings(deadline=None, max_examples=12)
@given(st.data())
def test_equals_naive_attention_however_it_is_cut(
    name: str, specs: tuple[AttentionSpec, ...], data: st.DataObject
) -> None:
    lens = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 40), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 4) for cut, n in zip(cuts, lens, strict=True)]  # at most five steps
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens) + 2)))
    cache = full_cache(specs, len(page_order), page_size, torch.float64)
    backend = create_backend(name, specs, cache, Parts())
    for _, got, want in run_in_steps(backend, specs, lens, cuts, page_order, page_size, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ON_CPU)
def test_keys_whose_pages_were_evicted_are_as_good_as_masked(name: str) -> None:
    """Dropping the pages that a window no longer reaches changes nothing."""
    q, k, v = random_qkv(CAPPED, 12, torch.float64, 1)
    cache = full_cache(FEATURED, 3, 4, torch.float64)
    backend = create_backend(name, FEATURED, cache, Parts())
    keys, values = cache.layers[1]
    keys[2], values[2] = k[4:8], v[4:8]  # page 2 holds positions 4 to 7; 0 to 3 are gone
    batch = StepBatch.build(
        token_ids=[0] * 4, num_new=[4], kv_lens=[8], pages=[2, 0], page_size=4, page_positions=[4, 8]
    )
    backend.plan(batch)
    backend.append(1, k[8:], v[8:])
    torch.testing.assert_close(backend.run(1, q[8:]), expected(CAPPED, q, k, v)[8:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_window_counts_positions_and_not_keys(name: str) -> None:
    """Two decodes without their middle pages: the first page is outside the window, although only 8 keys are left."""
    spec = replace(PLAIN, window=9)
    cache = full_cache([spec], 4, 4, torch.float64)
    backend = create_backend(name, [spec], cache, Parts())
    _, k, v = random_qkv(spec, 16, torch.float64, 3)
    for pages, new in zip(cache.layers[0], (k, v), strict=True):
        pages.copy_(new.unflatten(0, (4, 4)))
    q, k, v = random_qkv(spec, 2, torch.float64, 4)
    backend.plan(
        StepBatch.build(
            token_ids=[0] * 2, num_new=[1] * 2, kv_lens=[8, 7], pages=[2, 0, 1, 3], page_size=4,
            page_positions=[0, 12, 0, 12],
        )
    )  # fmt: skip
    got = backend(0, q, k, v)
    for b, (page, length) in enumerate([(0, 4), (3, 3)]):
        keys, values = (x[page, :length] for x in cache.layers[0])
        want = masked_attention(q[b : b + 1], keys, values, scale=spec.scale)
        torch.testing.assert_close(got[b : b + 1], want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ON_CPU)
def test_sequences_may_share_pages(name: str) -> None:
    """Two sequences with the same first page, one decoding and one still in its prompt."""
    q, k, v = random_qkv(PLAIN, 7, torch.float64, 2)
    cache = full_cache([PLAIN], 4, 4, torch.float64)
    backend = create_backend(name, [PLAIN], cache, Parts())
    keys, values = cache.layers[0]
    keys[3], values[3] = k[:4], v[:4]
    batch = StepBatch.build(token_ids=[0] * 4, num_new=[1, 3], kv_lens=[5, 7], pages=[3, 1, 3, 0], page_size=4)
    backend.plan(batch)
    got = backend(0, *(torch.cat([x[4:5], x[4:]]) for x in (q, k, v)))
    want = expected(PLAIN, q, k, v)[4:]
    torch.testing.assert_close(got, torch.cat([want[:1], want]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_layer_computes_the_spec_of_the_backend_whatever_the_model_was_built_with(name: str) -> None:
    """Only the backend is given a narrower window."""
    narrow = replace(PLAIN, window=3)
    assert isinstance(create_backend(name, [PLAIN], PagedKVCache([PLAIN], 1, 4, torch.float64), Parts()), Attend)
    backend = create_backend(name, [narrow], full_cache([narrow], 3, 4, torch.float64), Parts())
    for _, got, want in run_in_steps(backend, [narrow], [9], [4], [2, 0, 1], 4, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", [name for name in ON_CPU if "kv_dtype" in BACKENDS[name].features])
def test_keys_stored_in_a_narrower_dtype_are_rounded_once(name: str) -> None:
    spec, lens = replace(PLAIN, kv_dtype=torch.bfloat16), [9, 10]
    cache = PagedKVCache([spec], 6, 4, torch.float64)
    assert {x.dtype for x in cache.layers[0]} == {torch.bfloat16} and cache.bytes_per_token == 2 * 2 * 16 * 2
    backend = create_backend(name, [spec], cache, Parts())
    runs = run_in_steps(backend, [spec], lens, [8, 9], range(6), 4, torch.float64)
    for b, (_, got, _) in enumerate(runs):
        q, k, v = random_qkv(spec, lens[b], torch.float64, b)
        rounded = [x.to(torch.bfloat16).to(torch.float64) for x in (k, v)]
        torch.testing.assert_close(got, expected(spec, q, *rounded), atol=1e-12, rtol=0)


def make(name: str, spec: AttentionSpec = PLAIN, page_size: int = 16, device: str = "cpu", **options: Any) -> object:
    """A backend over a small cache; "meta" and "cuda" caches have that device's name, but no memory on it."""
    cache = PagedKVCache([spec], 1, page_size, options.pop("dtype", torch.float32), **options)
    cache.device = torch.device(device)
    return create_backend(name, [spec], cache, Parts())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "flashatention"}, "unknown attention backend 'flashatention'; choose one of: torch, "),
        ({"name": "flex", "page_size": 331}, "at most 64 or a multiple of 16 on a CPU, not 331; set page_size="),
        ({"name": "flex", "page_size": 331}, "or use attn_backend='torch'"),
        ({"name": "flex", "page_size": 16, "device": "cuda"}, "a CPU, not 16; set page_size=128 or use attn_backend"),
        (
            {"name": "flex", "page_size": 128, "device": "cuda", "spec": replace(PLAIN, head_dim=8)},
            "heads of size 16 or more on a GPU, not 8; use attn_backend='torch'",
        ),
        (
            {"name": "flex", "spec": replace(PLAIN, kv_dtype=torch.float16)},
            "flex backend does not implement kv_dtype, which layer 0 sets; use attn_backend='torch'",
        ),
        (
            {"name": "flex", "spec": replace(PLAIN, has_sinks=True)},
            "flex backend does not implement has_sinks, which layer 0 sets; use attn_backend='torch'",
        ),
        ({"name": "flashinfer"}, "does not run on 'cpu'; set device='cuda' or use attn_backend='torch'"),
        ({"name": "torch", "device": "meta"}, "the torch backend does not run on 'meta'; set device='cpu'"),
        ({"name": "torch", "dtype": torch.float8_e5m2}, "does not read keys in torch.float8_e5m2; set dtype='bfloat"),
    ],
)
def test_a_refusal_says_why_and_names_a_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make(**options)
    assert message in str(refusal.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "find_spec", lambda name: None)
    message = re.escape(
        "needs the package flashinfer (pip install 'mini-engine[flashinfer]'); use attn_backend='torch'"
    )
    with pytest.raises(ConfigError, match=message):
        make("flashinfer", replace(PLAIN, head_dim=64), device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ON_CPU)
def test_a_layout_that_the_backend_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the {name} backend reads pages in layout NHD, not HND; set kv_layout='NHD"):
        make(name, layout="HND")


@pytest.mark.parametrize("name", ON_CPU)
def test_bypassed_parts_exist_and_others_are_called(name: str) -> None:
    calls = []
    parts = replace(Parts(), append_kv=lambda *args: calls.append(len(args)))
    backend = create_backend(name, [PLAIN], PagedKVCache([PLAIN], 1, 16, torch.float32), parts)
    assert backend.bypasses < {field.name for field in fields(Parts)}
    _, k, v = random_qkv(PLAIN, 1, torch.float32, 0)
    backend.plan(StepBatch.build(token_ids=[0], num_new=[1], kv_lens=[1], pages=[0], page_size=16))
    backend.append(0, k, v)
    assert calls == [5]


def test_features_are_fields_of_the_spec_that_may_be_unset() -> None:
    assert not any(getattr(PLAIN, feature) for feature in FEATURES)
    assert FEATURES | {"rope"} == {field.name for field in fields(AttentionSpec) if field.default is not MISSING}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("name", "specs"), [("torch", FEATURED), ("torch_padded", (PLAIN, WINDOW))])
def test_equals_naive_attention_on_the_gpu(
    name: str, specs: tuple[AttentionSpec, ...], dtype: torch.dtype, atol: float
) -> None:
    cache = full_cache(specs, 10, 4, dtype, device="cuda")
    backend = create_backend(name, specs, cache, Parts())
    lens, cuts, page_order = [9, 1, 14, 8], [4, 1, 13, 7], [5, 3, 8, 1, 0, 2, 7, 9, 6, 4]
    for _, got, want in run_in_steps(backend, specs, lens, cuts, page_order, 4, dtype, "cuda"):
        torch.testing.assert_close(got, want, atol=atol, rtol=0)
