"""Page selection: bounds, summaries, and attention to the selected pages, on the paths of a CPU and of a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention import flashinfer as flashinfer_module
from mini_engine.attention.backend import BACKENDS, AttentionBackend, PlannedCache, choose_backend, create_backend
from mini_engine.attention.naive import masked_attention
from mini_engine.attention.page_selection import DecodePages, bound_scores, select_pages, summarize_pages
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.config import EngineConfig
from mini_engine.defaults import resolve, specs_of
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from tests.attention import fake_flashinfer
from tests.attention.stepping import decodes, expected, full_cache, random_qkv, run_in_steps
from tests.helpers import alone, double_model, let_all_guesses_pay, make_engine, serve

DENSE = AttentionSpec(0, num_qo_heads=6, num_kv_heads=2, head_dim=16, scale=0.3)
SPARSE = replace(DENSE, layer=1, key_budget=1000)
CAPPED = replace(SPARSE, layer=2, softcap=2.0)
SPECS = (DENSE, SPARSE, CAPPED)
NAMES = ["sparse", "sparse_paged_on_cpu"]


@pytest.fixture(autouse=True, scope="module")
def fake() -> Iterator[None]:
    """Naive attention stands in for FlashInfer, and the backend of a GPU accepts a cache on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        patch.setattr(flashinfer_module, "WORKSPACE_BYTES", 64)
        info = BACKENDS["sparse"].on_cuda
        assert info is not None
        on_cpu = replace(info, devices=("cpu",), dtypes=(torch.float64,), package=None, sizes=lambda spec, cache: None)
        patch.setitem(BACKENDS, "sparse_paged_on_cpu", on_cpu)
        yield


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(st.data())
def test_a_budget_for_all_pages_changes_nothing(name: str, data: st.DataObject) -> None:
    """Prompts, chunks, and decodes of requests of different lengths, which select all their pages and nothing else."""
    lens = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 40), min_size=len(lens), max_size=len(lens)))
    cuts = [max(cut, n // 6) for cut, n in zip(cuts, lens, strict=True)]
    page_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    page_order = data.draw(st.permutations(range(sum(-(-n // page_size) for n in lens) + 2)))
    cache = full_cache(SPECS, len(page_order), page_size, torch.float64)
    backend = create_backend(name, SPECS, cache, Parts())
    for _, got, want in run_in_steps(backend, SPECS, lens, cuts, page_order, page_size, torch.float64):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def selected_attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, page_size: int) -> Tensor:
    """The attention of the last query, by the definition: all pages but those of the largest bounds are masked.

    The heads of a group see the same pages; the first page and the last are always among them.
    """
    assert spec.key_budget is not None
    out, last = [], (len(k) - 1) // page_size
    for head in range(spec.num_qo_heads):
        own = head // spec.group
        group = q[-1, own * spec.group : (own + 1) * spec.group]
        bounds = {}
        for page in range(1, last):
            keys = k[page * page_size : (page + 1) * page_size, own]
            low, high = keys.min(0).values, keys.max(0).values
            bounds[page] = float(torch.maximum(group * low, group * high).sum(-1).max())
        best = sorted(bounds, key=lambda page: -bounds[page])[: spec.key_budget // page_size - 2]
        mask = torch.zeros(1, len(k), dtype=torch.bool)
        for page in (0, *best, last):
            mask[:, page * page_size : (page + 1) * page_size] = True
        one = slice(head, head + 1), slice(own, own + 1)
        out.append(
            masked_attention(q[-1:, one[0]], k[:, one[1]], v[:, one[1]], scale=spec.scale, mask=mask,
                             softcap=spec.softcap)
        )  # fmt: skip
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@settings(max_examples=15)
@given(st.data())
def test_decodes_attend_to_the_pages_with_the_largest_bounds(layout: str, data: st.DataObject) -> None:
    """Against an oracle that masks all other keys, beside a prompt, which attends to all keys."""
    page_size = data.draw(st.sampled_from([1, 4, 5]))
    kv_lens = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    budget = page_size * data.draw(st.integers(2, 5))
    specs = (DENSE, replace(SPARSE, key_budget=budget), replace(CAPPED, key_budget=budget))
    counts = [-(-n // page_size) for n in (*kv_lens, 9)]
    order = data.draw(st.permutations(range(sum(counts) + 2)))
    pages = [order[sum(counts[:b]) : sum(counts[: b + 1])] for b in range(len(counts))]
    names = NAMES if layout == "NHD" else NAMES[1:]
    for name in names:
        cache = full_cache(specs, len(order), page_size, torch.float64, layout=layout)
        backend = create_backend(name, specs, cache, Parts())
        inputs = [[random_qkv(spec, n, torch.float64, b) for b, n in enumerate((*kv_lens, 9))] for spec in specs]
        run(backend, inputs, [n - 1 for n in kv_lens], pages, page_size, skip=[0] * len(kv_lens))
        out = run(
            backend, [own[:-1] for own in inputs], [1] * len(kv_lens), pages, page_size,
            skip=[n - 1 for n in kv_lens], prompt=[own[-1] for own in inputs],
        )  # fmt: skip
        for spec, layer, own in zip(specs, out, inputs, strict=True):
            for b, (q, k, v) in enumerate(own[:-1]):
                want = expected(spec, q, k, v)[-1:]
                if spec.key_budget:
                    want = selected_attention(spec, q, k, v, page_size)
                torch.testing.assert_close(layer[b : b + 1], want, atol=1e-12, rtol=0)
            torch.testing.assert_close(layer[len(kv_lens) :], expected(spec, *own[-1]), atol=1e-12, rtol=0)


def run(
    backend: AttentionBackend, inputs: list[list[list[Tensor]]], num_new: list[int], pages: list[list[int]],
    page_size: int, skip: list[int], prompt: list[list[Tensor]] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run a step of some tokens of each request after those before, and a prompt; return the output of each layer."""
    own = [b for b, n in enumerate(num_new) if n]
    new, lens = [num_new[b] for b in own], [skip[b] + num_new[b] for b in own]
    used = [page for b, n in zip(own, lens, strict=True) for page in pages[b][: -(-n // page_size)]]
    if prompt is not None:
        new, lens, used = [*new, len(prompt[0][0])], [*lens, len(prompt[0][0])], [*used, *pages[len(num_new)]]
    if not new:
        return []
    backend.plan(
        StepBatch.build(
            token_ids=[0] * sum(new), num_new=new, kv_lens=lens, pages=used, page_size=page_size,
            num_decodes=len(own) if prompt is not None else 0,
        )
    )  # fmt: skip
    out = []
    for layer, requests in enumerate(inputs):
        rows = [[x[skip[b] : skip[b] + num_new[b]] for x in requests[b]] for b in own]
        rows += [prompt[layer]] if prompt is not None else []
        out.append(backend(layer, *(torch.cat(parts) for parts in zip(*rows, strict=True))))
    return out


def test_a_selection_belongs_to_a_kv_head() -> None:
    """Each KV head has one page that its query likes, and attends to it, to the first page and to the last."""
    spec = replace(DENSE, num_qo_heads=2, key_budget=3, scale=1.0)
    cache = PagedKVCache([spec], 4, 1, torch.float64)
    backend = create_backend("sparse", [spec], cache, Parts())
    k, v = torch.zeros(4, 2, 16, dtype=torch.float64), torch.zeros(4, 2, 16, dtype=torch.float64)
    v[:, :, 0] = torch.arange(4.0)[:, None]
    k[1, 0, 0] = k[2, 1, 0] = 50.0
    backend.plan(StepBatch.build(token_ids=[0] * 3, num_new=[3], kv_lens=[3], pages=range(3), page_size=1))
    backend(0, torch.zeros_like(k[:3]), k[:3], v[:3])
    backend.plan(decodes([4], range(4), 1))
    q = torch.zeros(1, 2, 16, dtype=torch.float64)
    q[..., 0] = 1.0
    assert torch.allclose(backend(0, q, k[3:], v[3:])[0, :, 0], torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_a_page_counts_as_for_the_head_of_the_group_that_needs_it_most() -> None:
    """The first page and the last are always selected. Page 2 matters to both heads, and page 1 more to one of them."""
    low = high = torch.tensor([[[0.0, 0.0]], [[5.0, -3.0]], [[3.0, 3.0]], [[0.0, 0.0]]])
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    pages = DecodePages(torch.arange(4).int(), torch.tensor([0]), torch.tensor([4]), page_size=1, width=5)
    bounds = bound_scores(q, low, high, pages)
    assert bounds.tolist() == [[[torch.inf, 5.0, 3.0, torch.inf, -torch.inf]]]
    assert set(select_pages(bounds, 3).flatten().tolist()) == {0, 1, 3}


# --- summaries -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.01, 1.0, 100.0]))
def test_a_bound_reaches_every_score_of_its_page(seed: int, page_size: int, count: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    k_pages = size * torch.randn(count, page_size, 2, 16, generator=generator, dtype=torch.float64)
    q = torch.randn(1, 6, 16, generator=generator, dtype=torch.float64)
    low, high = torch.zeros(2, count, 2, 16, dtype=torch.float64)
    summarize_pages(k_pages, low, high, torch.arange(count * page_size))
    pages = DecodePages(
        torch.arange(count).int(), torch.tensor([0]), torch.tensor([count * page_size]), page_size, count
    )
    bounds = bound_scores(q, low, high, pages)
    scores = torch.einsum("hgd,cphd->hcgp", q[0].unflatten(0, (2, 3)), k_pages).amax(dim=(2, 3))
    assert bool((bounds[0] >= scores - 1e-11 * size).all())
    if page_size == 1:  # then the bound is the score itself
        torch.testing.assert_close(bounds[0, :, 1:-1], scores[:, 1:-1], atol=1e-11 * size, rtol=0)


class Requests:
    """Requests whose keys are stored, rejected, shared and copied as the engine does it, with all their keys."""

    def __init__(self, page_size: int) -> None:
        self.cache = PagedKVCache([replace(SPARSE, layer=0)], 40, page_size, torch.float64)
        self.table = PageTable(40, page_size, 4)
        self.backend = create_backend("sparse", [replace(SPARSE, layer=0)], self.cache, Parts())
        self.keys: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(page_size)

    def append(self, row: int, num_new: int) -> None:
        """Store keys after those of a request, in its own copies of pages that it shares."""
        before = len(self.keys[row])
        self.table.take(np.array([row]), self.table.missing(np.array([row]), np.array([before + num_new]))[0])
        self.cache.copy_pages(Parts().copy_on_write(self.table, row, before, before + num_new))
        q, k, v = (torch.randn(num_new, n, 16, generator=self.generator, dtype=torch.float64) for n in (6, 2, 2))
        self.keys[row] = torch.cat((self.keys[row], k))
        page_size, pages = self.table.page_size, self.table.pages(row)[: -(-(before + num_new) // self.table.page_size)]
        self.backend.plan(
            StepBatch.build(
                token_ids=[0] * num_new, num_new=[num_new], kv_lens=[before + num_new], pages=pages,
                page_size=page_size, num_decodes=0,
            )
        )  # fmt: skip
        self.backend(0, q, k, v)

    def check(self) -> None:
        """The summaries of all full pages are those of the request's keys."""
        low, high = self.cache.summaries[0]
        for row, keys in self.keys.items():
            full = len(keys) // self.table.page_size
            pages = torch.from_numpy(self.table.pages(row)[:full]).long()
            in_pages = keys[: full * self.table.page_size].unflatten(0, (full, -1)) if full else keys[:0, None]
            assert torch.equal(low[pages], in_pages.amin(dim=1))
            assert torch.equal(high[pages], in_pages.amax(dim=1))


@settings(max_examples=40)
@given(st.data())
def test_summaries_of_full_pages_are_right_whatever_has_happened(data: st.DataObject) -> None:
    """Prompts in chunks, rejected guesses, shared prefixes with copies on write, and pages of earlier requests."""
    requests = Requests(data.draw(st.sampled_from([1, 3, 4])))
    table, size = requests.table, requests.table.page_size
    for _ in range(data.draw(st.integers(1, 14))):
        action = data.draw(st.sampled_from(["enter", "append", "reject", "leave"]))
        rows = sorted(requests.keys)
        if action == "enter" and table.num_free_rows:
            row, keys = table.allocate(), torch.zeros(0, 2, 16, dtype=torch.float64)
            if rows and data.draw(st.booleans()):  # begins with tokens of another request, up to any of them
                donor = data.draw(st.sampled_from(rows))
                shared = data.draw(st.integers(0, len(requests.keys[donor])))
                table.share(row, table.pages(donor)[: -(-shared // size)])
                keys = requests.keys[donor][:shared]
            requests.keys[row] = keys
            requests.append(row, data.draw(st.integers(1, 7)))
        elif rows and action == "append":
            requests.append(data.draw(st.sampled_from(rows)), data.draw(st.integers(1, 7)))
        elif rows and action == "reject":  # the pages of rejected guesses stay, and may go back
            row = data.draw(st.sampled_from(rows))
            kept = data.draw(st.integers(max(0, len(requests.keys[row]) - 5), len(requests.keys[row])))
            requests.keys[row] = requests.keys[row][:kept]
            if data.draw(st.booleans()):
                table.truncate(row, -(-kept // size))
        elif rows:
            row = data.draw(st.sampled_from(rows))
            del requests.keys[row]
            table.release(row)
        requests.check()


def test_summaries_are_copied_and_counted_with_their_pages() -> None:
    specs = (DENSE, SPARSE)
    cache = PagedKVCache(specs, 3, 4, torch.float32)
    low, high = cache.summaries[1]
    assert cache.summaries.keys() == {1} and low.shape == high.shape == (3, 2, 16)
    low[0], high[0] = -1.0, 1.0
    cache.copy_pages([(0, 1), (1, 2)])
    assert bool((low == -1).all()) and bool((high == 1).all())
    assert cache.bytes_per_token == 2 * 2 * 2 * 16 * 4


# --- the engine ------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = {f"{n}": [3 + (i * i * (n + 1)) % 50 for i in range(9 + 7 * n)] for n in range(5)}
QUEST = {"method": "quest", "budget": 12, "num_dense_layers": 1}


def engine_of(name: str, **options: Any) -> Any:
    given = {"sparse_attention_config": QUEST, "page_size": 4, "max_model_len": 80, **options}
    return make_engine(double_model("llama"), attn_backend=name, **given)


@pytest.mark.parametrize("name", NAMES)
def test_a_large_budget_gives_the_tokens_of_dense_attention(name: str) -> None:
    engine = engine_of(name, sparse_attention_config=QUEST | {"budget": 80}, num_pages=60)
    outputs = serve(engine, {0: [(n, prompt, PARAMS) for n, prompt in PROMPTS.items()]})
    assert outputs == {n: alone(double_model("llama"), prompt, PARAMS) for n, prompt in PROMPTS.items()}


def tokens_alone(**options: Any) -> dict[str, list[int]]:
    engine = engine_of("sparse", max_batch_size=1, num_pages=60, **options)
    return {n: serve(engine, {0: [(n, prompt, PARAMS)]})[n] for n, prompt in PROMPTS.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8, 16)], ids=["eager", "graphs"])
@pytest.mark.parametrize("guesses", [False, True])
def test_tokens_do_not_depend_on_the_schedule(name: str, sizes: tuple[int, ...], guesses: bool) -> None:
    """In chunks, in a batch, after preemption, over shared pages, and with guesses: a token selects the same pages."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1} if guesses else None
    engine = engine_of(
        name, num_pages=26, max_batch_size=4, max_num_batched_tokens=13, enable_prefix_caching=True,
        cuda_graph_batch_sizes=sizes, speculative_config=config,
    )  # fmt: skip
    let_all_guesses_pay(engine)
    outputs = serve(engine, {0: [(n, prompt, PARAMS) for n, prompt in PROMPTS.items()]})
    assert engine.metrics.preemptions > 0 and bool(engine.metrics.num_accepted_tokens) == guesses
    assert outputs == tokens_alone()
    assert outputs != {n: alone(double_model("llama"), prompt, PARAMS) for n, prompt in PROMPTS.items()}


# --- options ---------------------------------------------------------------------------------------------------------


def test_layers_with_a_budget() -> None:
    model = double_model("llama")
    config = EngineConfig.of({"sparse_attention_config": {"method": "quest", "budget": 64, "num_dense_layers": 1}})
    assert [spec.key_budget for spec in specs_of(config, model)] == [None] + [64] * (len(model.attention_specs) - 1)
    resolved = resolve(config, model)
    assert (resolved.attn_backend, resolved.page_size) == ("sparse", 16)


def test_the_backend_that_selects_pages_is_chosen_for_layers_with_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_engine.attention.backend.find_spec", lambda name: name)
    spec, gpu = replace(SPARSE, head_dim=64), torch.device("cuda")
    assert choose_backend([spec], None, "NHD", torch.bfloat16, gpu)[0] == "sparse"
    assert choose_backend([replace(spec, key_budget=None)], None, "NHD", torch.bfloat16, gpu)[0] != "sparse"
    refusal = (
        BACKENDS["sparse"]
        .on("cuda")
        .refusal([replace(spec, num_qo_heads=34)], PlannedCache(16, "NHD", torch.bfloat16, gpu))
    )
    assert refusal is not None and "at most 16 query heads" in refusal[0]
    for name in BACKENDS.keys() - {*NAMES}:
        cache = PlannedCache(16, "NHD", torch.float32, torch.device("cpu"))
        assert BACKENDS[name].on("cpu").refusal([SPARSE], cache) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse_attention_config": {"method": "window", "budget": 9}}, "method 'window'; choose from: quest"),
        ({"sparse_attention_config": {"method": "quest"}}, 'a dictionary like {"method": "quest", "budget": 4096}'),
        ({"sparse_attention_config": {"method": "quest", "budget": 0}}, "budget is 0; give a whole number"),
        ({"sparse_attention_config": {"method": "quest", "budget": True}}, "budget is True"),
        ({"sparse_attention_config": QUEST | {"num_dense_layers": -1}}, "num_dense_layers is -1"),
        ({"sparse_attention_config": QUEST | {"pages": 3}}, "has no 'pages'; it has method, budget, num_dense_layers"),
        ({"sparse_attention_config": QUEST | {"num_dense_layers": 99}}, "changes none of the .* layers"),
        ({"sparse_attention_config": QUEST, "sliding_window": 8}, "changes none of the .* layers"),
        ({"sparse_attention_config": QUEST, "page_size": 8}, "set a budget of 16 keys or more"),
        ({"sparse_attention_config": QUEST, "attn_backend": "torch"}, "does not implement key_budget.*'sparse'"),
        ({"sparse_attention_config": QUEST, "kv_cache_dtype": "fp8_e4m3"}, "a layer with kv_dtype"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"attn_backend": "sparse", "page_size": 4, **options}
    with pytest.raises(ConfigError, match=message):
        make_engine(double_model("llama"), **given)
