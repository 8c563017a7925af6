"""Padded steps compute what the model computes: on a CPU the padding, and on a GPU captured pieces and whole steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.backend import create_backend
from mini_engine.batch import StepBatch
from mini_engine.config import EngineConfig
from mini_engine.defaults import resolve
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import LanguageModel
from mini_engine.models.transform import bind_layers
from mini_engine.parts import Parts, default_parts
from mini_engine.piecewise_graphs import SIZES, PiecewiseGraphs, piece_sizes
from mini_engine.step_graphs import StepGraphs
from tests.helpers import GREEDY, adapted_model, double_model, make_engine, serve
from tests.models.families import FAMILIES, our_model, transformers_model

PAGE = 16
PADDING_PAGE = 19


def test_pieces_are_captured_where_decodes_are() -> None:
    model = double_model("llama")

    def sizes(device: str, **options: Any) -> list[int]:
        return list(piece_sizes(resolve(EngineConfig(**options), model), torch.device(device)))

    graphs = {"cuda_graph_batch_sizes": [1, 2]}
    assert sizes("cuda", **graphs, max_num_batched_tokens=16_384) == list(SIZES)
    assert sizes("cuda", **graphs, max_num_batched_tokens=200) == [64, 128, 192, 256]
    assert sizes("cuda", **graphs, max_num_batched_tokens=64) == [64]
    assert sizes("cuda", enforce_eager=True) == sizes("cpu", **graphs) == []


class Recorder(PiecewiseGraphs):
    """Counts the steps by their tokens, with and without padding."""

    steps: list[tuple[int, int]]

    def run(self, size: int, token_ids: torch.Tensor, *arrays: torch.Tensor) -> torch.Tensor:
        self.steps.append((len(token_ids), size))
        return super().run(size, token_ids, *arrays)


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Engines on a CPU pad steps of up to 20 tokens."""
    monkeypatch.setattr("mini_engine.engine.piece_sizes", lambda config, device: (3, 8, 20))
    monkeypatch.setattr("mini_engine.executor.PiecewiseGraphs", Recorder)
    Recorder.steps = []
    yield Recorder.steps


@pytest.mark.parametrize("family", [*FAMILIES, "hf"])
@pytest.mark.parametrize("attn_backend", ["torch", "batch_invariant"])
def test_padded_steps_sample_the_same_tokens(
    family: str, attn_backend: str, few_sizes: list[tuple[int, int]], request: pytest.FixtureRequest
) -> None:
    """Prompts of many lengths, whole and in chunks, beside decodes, in pages that requests share."""
    if family == "deepseek_v2" and attn_backend != "torch":
        pytest.skip("it computes no latents")
    model = adapted_model("qwen3") if family == "hf" else double_model(family)
    options = {"attn_backend": attn_backend, "page_size": 4, "max_num_batched_tokens": 24, "max_batch_size": 4}
    prompts = [[(7 * i + j * j) % 61 for j in range(n)] for i, n in enumerate((3, 19, 1, 30, 8, 40, 2))]
    prompts.append([*prompts[5][:24], 9])
    arrivals = {3 * i: [(str(i), prompt, GREEDY)] for i, prompt in enumerate(prompts)}
    padded = serve(make_engine(model, enable_prefix_caching=True, **options), arrivals)
    assert {size for _, size in few_sizes} == {3, 8, 20} and any(own < size for own, size in few_sizes)
    request.getfixturevalue("monkeypatch").undo()
    assert padded == serve(make_engine(model, enable_prefix_caching=True, **options), arrivals)


# --- on a GPU --------------------------------------------------------------------------------------------------------


class Steps:
    """A model on a GPU with a cache, whose steps are computed from pieces or kernel by kernel.

    Args:
        model: the model.
        attn_backend: its attention.
        sizes: those of the pieces.
    """

    graphs: ClassVar[type[PiecewiseGraphs]] = PiecewiseGraphs

    def __init__(self, model: LanguageModel, attn_backend: str, sizes: tuple[int, ...]) -> None:
        specs = model.attention_specs
        self.cache = PagedKVCache(specs, PADDING_PAGE + 1, PAGE, model.dtype, "cuda")
        generator = torch.Generator("cuda").manual_seed(0)
        for pages in (x for pair in self.cache.layers for x in pair):
            pages.copy_(torch.randn(pages.shape, generator=generator, device="cuda"))
        self.backend = create_backend(attn_backend, specs, self.cache, default_parts(model.device))
        self.forward = bind_layers(model, self.backend)
        self.pieces = self.graphs(
            sizes, lambda backend: bind_layers(model, backend), self.backend, padding_slot=PADDING_PAGE * PAGE,
            dtype=model.dtype, device=model.device,
        )  # fmt: skip

    @torch.inference_mode()
    def hidden(self, num_new: list[int], kv_lens: list[int], size: int | None) -> list[torch.Tensor]:
        """Compute a step, and return its hidden states and all keys and values but those of the padding."""
        pages = [7, 3, 11, 5, 0, 18, 2, 14, 4, 9, 16, 1, 6, 8, 10, 12, 13, 15, 17]
        batch = StepBatch.build(
            token_ids=[2 + i % 50 for i in range(sum(num_new))], num_new=num_new, kv_lens=kv_lens, page_size=PAGE,
            pages=pages[: sum(-(-n // PAGE) for n in kv_lens)], num_decodes=sum(new == 1 for new in num_new),
            device="cuda",
        )  # fmt: skip
        if isinstance(self.pieces, StepGraphs) and size is not None:
            assert self.backend.can_capture(batch, size)
            self.pieces.plan(size, batch)
        else:
            self.backend.plan(batch)
        if size is None:
            hidden = self.forward(batch.token_ids, batch.positions)
        else:
            hidden = self.pieces.run(size, batch.token_ids, batch.positions, batch.slot_mapping)
        keys = [x[:PADDING_PAGE].clone() for pair in self.cache.layers for x in pair]
        return [hidden.clone(), *keys]


@pytest.mark.gpu
@pytest.mark.parametrize("attn_backend", ["flash_decoding", "cascade", "flashinfer", "batch_invariant"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_captured_pieces_compute_the_layers(family: str, attn_backend: str) -> None:
    """Without padding, they launch the same kernels, so all bits are equal; padding changes rounding alone."""
    pytest.importorskip("flashinfer")
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, head_dim=128, hidden_size=64)
    model = our_model(copy.deepcopy(theirs), parts=default_parts(torch.device("cuda"))).to("cuda")
    steps, by_kernel = (Steps(model, attn_backend, (64, 128)) for _ in range(2))
    for num_new, kv_lens in (([1, 1, 9, 53], [33, 16, 9, 83]), ([64], [64]), ([1, 1, 62, 64], [40, 7, 62, 70])):
        size = sum(num_new)
        got, want = steps.hidden(num_new, kv_lens, size), by_kernel.hidden(num_new, kv_lens, None)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), size
    for num_new, kv_lens in (([1, 1, 9, 20], [34, 17, 9, 60]), ([1, 70], [17, 70]), ([5], [12]), ([1], [30])):
        size = steps.pieces.size_for(sum(num_new))
        got, want = steps.hidden(num_new, kv_lens, size), by_kernel.hidden(num_new, kv_lens, None)
        for a, b in zip(got, want, strict=True):
            if family == "qwen3_moe":  # rounding may let a router choose another expert
                assert torch.isfinite(a).all()
            else:
                assert (a.double() - b.double()).norm() < 0.02 * b.double().norm(), size


@pytest.mark.gpu
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 2**31))
def test_requests_get_the_same_tokens_from_pieces(lengths: list[int], seed: int) -> None:
    """In a batch-invariant engine: prompts that arrive one after another, beside the decodes of the earlier ones."""
    pytest.importorskip("flashinfer")
    changes = {"head_dim": 128, "hidden_size": 64, "max_position_embeddings": 512, "vocab_size": 64}
    theirs = transformers_model("qwen3", seed=2, dtype=torch.bfloat16, **changes)
    model = our_model(theirs, parts=default_parts(torch.device("cuda"))).to("cuda")
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]
    arrivals = {2 * i: [(str(i), prompt, GREEDY)] for i, prompt in enumerate(prompts)}
    outputs = []
    for is_eager in (False, True):
        engine = make_engine(
            model, default_parts(torch.device("cuda")), attn_backend="auto", batch_invariant=True,
            enforce_eager=is_eager, max_num_batched_tokens=256, max_batch_size=8,
        )  # fmt: skip
        outputs.append(serve(engine, arrivals))
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_captured_pieces_whose_layers_store_nothing(family: str) -> None:
    """Keys and values are stored between two pieces."""
    pytest.importorskip("flashinfer")
    changes: dict[str, Any] = {"n_embd": 512} if family == "gpt2" else {"hidden_size": 512, "head_dim": 128}
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, **changes)
    model = our_model(theirs, parts=Parts()).to("cuda")
    steps, by_kernel = (Steps(model, "flashinfer", (64,)) for _ in range(2))
    for num_new, kv_lens in (([1, 1, 9, 53], [33, 16, 9, 83]), ([64], [64])):
        got, want = steps.hidden(num_new, kv_lens, 64), by_kernel.hidden(num_new, kv_lens, None)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class WholeSteps(Steps):
    graphs = StepGraphs


@pytest.mark.gpu
@pytest.mark.parametrize("attn_backend", ["flash_decoding", "batch_invariant"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_captured_steps_compute_the_layers(family: str, attn_backend: str) -> None:
    """One graph computes steps of many prompts and decodes, and of either alone."""
    pytest.importorskip("flashinfer")
    theirs = transformers_model(family, seed=2, dtype=torch.bfloat16, head_dim=128, hidden_size=64)
    model = our_model(copy.deepcopy(theirs), parts=default_parts(torch.device("cuda"))).to("cuda")
    whole, by_kernel = (steps(model, attn_backend, (64, 128)) for steps in (WholeSteps, Steps))
    assert whole.backend.captures_steps
    for num_new, kv_lens in (
        ([1, 1, 9, 53], [33, 16, 9, 83]), ([64], [64]), ([1, 1, 62, 64], [40, 7, 62, 70]), ([1, 70], [17, 70]),
        ([1, 1, 9, 20], [34, 17, 9, 60]), ([5], [12]), ([1], [30]), ([1] * 9, [17, 3, 33, 40, 2, 16, 1, 5, 20]),
        ([3, 4, 5, 6, 7, 8], [3, 20, 5, 33, 7, 40]), ([1, 40], [60, 200]),
    ):  # fmt: skip
        size = whole.pieces.size_for(sum(num_new))
        got, want = whole.hidden(num_new, kv_lens, size), by_kernel.hidden(num_new, kv_lens, None)
        for a, b in zip(got, want, strict=True):
            assert torch.isfinite(a).all()
            if family != "qwen3_moe":  # rounding may let a router choose another expert
                assert (a.double() - b.double()).norm() < 0.02 * b.double().norm(), (num_new, kv_lens)


class StepRecorder(StepGraphs):
    sizes_run: ClassVar[list[int]] = []

    def run(self, size: int, *arrays: torch.Tensor) -> torch.Tensor:
        self.sizes_run.append(size)
        return super().run(size, *arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_requests_get_the_same_tokens_from_captured_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch-invariant engine, with the pipeline: prompts that arrive beside the decodes of earlier ones."""
    pytest.importorskip("flashinfer")
    monkeypatch.setattr("mini_engine.executor.StepGraphs", StepRecorder)
    changes = {"head_dim": 128, "hidden_size": 64, "max_position_embeddings": 512, "vocab_size": 64}
    theirs = transformers_model("qwen3", seed=2, dtype=torch.bfloat16, **changes)
    model = our_model(theirs, parts=default_parts(torch.device("cuda"))).to("cuda")
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (40,), generator=generator).tolist()
    prompts = [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]
    arrivals: dict[int, list[Any]] = {}
    for i, prompt in enumerate(prompts):
        arrivals.setdefault(2 * (i // 5), []).append((str(i), prompt, GREEDY))
    outputs = []
    for is_eager in (False, True):
        StepRecorder.sizes_run.clear()
        engine = make_engine(
            model, default_parts(torch.device("cuda")), attn_backend="auto", batch_invariant=True,
            enforce_eager=is_eager, max_num_batched_tokens=512, max_batch_size=16,
        )  # fmt: skip
        outputs.append(serve(engine, arrivals))
        assert bool(StepRecorder.sizes_run) != is_eager
    assert outputs[0] == outputs[1]


@pytest.mark.gpu
def test_a_pool_with_fewer_tokens_than_a_graph() -> None:
    """The graphs of 1,024 tokens are captured although the pages hold 80."""
    pytest.importorskip("flashinfer")
    theirs = transformers_model("qwen3", seed=2, dtype=torch.bfloat16, head_dim=128, hidden_size=64, vocab_size=64)
    model = our_model(theirs, parts=default_parts(torch.device("cuda"))).to("cuda")
    outputs = []
    for is_eager in (False, True):
        engine = make_engine(
            model, default_parts(torch.device("cuda")), attn_backend="auto", batch_invariant=True, warm_up=True,
            enforce_eager=is_eager, num_pages=5, page_size=16, max_num_batched_tokens=1024, max_batch_size=4,
        )  # fmt: skip
        outputs.append(serve(engine, {0: [("a", [3, 4, 5] * 9, GREEDY), ("b", [6, 7], GREEDY)]}))
    assert outputs[0] == outputs[1]
