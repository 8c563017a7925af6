"""`batch_invariant` on a GPU: its operators, its attention, and the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.backend import create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts
from tests.test_batch_invariance import equal_bits

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parent.parent
# Of Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B: those of few rows and many columns are where cuBLAS splits the columns.
SHAPES = [(1024, 3072), (1024, 2048), (4096, 1024), (2048, 8192), (4096, 4096), (4096, 14336), (28672, 4096)]
COUNTS = (1, 2, 7, 8, 9, 16, 31, 64, 65, 100, 128, 200, 256, 1000, 2048)


@pytest.fixture(autouse=True)
def _no_workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch keeps a workspace for each stream, so that of earlier tests, and then this one, must go."""
    pytest.importorskip("flashinfer")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    torch._C._cuda_clearCublasWorkspaces()
    yield
    torch._C._cuda_clearCublasWorkspaces()


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def check_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every row has the same bits in batches of any size."""
    whole = function(x)
    for count in COUNTS:
        assert equal_bits(function(x[:count]).cpu(), whole[:count].cpu()), count


@pytest.mark.parametrize(("out", "columns"), SHAPES)
def test_products(out: int, columns: int) -> None:
    weight, residual = random_rows(out, columns, seed=1), random_rows(2048, out, seed=2)
    x = random_rows(2048, columns)
    check_rows(lambda rows: torch.nn.functional.linear(rows, weight), x)
    check_rows(lambda rows: residual[: len(rows)].clone().addmm_(rows, weight.T), x)
    check_rows(lambda rows: torch.mm(rows, weight.T, out_dtype=torch.float32), x)


@pytest.mark.parametrize(("heads", "hidden", "head_dim"), [(32, 1024, 128), (48, 2048, 64), (48, 4096, 128)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_the_kernels_between_the_products(heads: int, hidden: int, head_dim: int, has_norms: bool) -> None:
    import flashinfer

    from mini_engine.kernels.rotate_and_append import rotate_and_append
    from mini_engine.kernels.step_start import rope_tables
    from mini_engine.kernels.swiglu import swiglu

    inv_freq, slots = torch.rand(head_dim // 2, device="cuda"), torch.arange(2048, device="cuda")
    cos, sin = rope_tables(slots, inv_freq)
    tokens = random_rows(2048, hidden, seed=3)
    norms = (random_rows(head_dim, seed=4), random_rows(head_dim, seed=5)) if has_norms else None
    keys, values = (torch.zeros(128, 16, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def rotated(x: Tensor) -> Tensor:
        count, own = len(x), slots[: len(x)]
        q = rotate_and_append(
            x, norms, 1e-6, cos[:count], sin[:count], (keys, values), "NHD", own, tokens=tokens[:count], heads=16
        )
        stored = (own.flatten(0, 1)[:count].flatten(1) for own in (keys, values))
        return torch.cat([q.flatten(1), *stored], dim=1)

    check_rows(rotated, random_rows(2048, heads * head_dim))
    check_rows(lambda x: swiglu(x, tokens[: len(x)], 1e-6), random_rows(2048, 6 * hidden))
    check_rows(lambda x: flashinfer.rmsnorm(x, tokens[0], 1e-6), tokens)
    check_rows(lambda x: torch.cat(rope_tables(x, inv_freq), dim=1), slots)


def sequences(spec: AttentionSpec, lens: list[int], num_new: list[int], own: int, pages: list[int]) -> Tensor:
    """The attention of sequence `own`, whose keys and queries are the same in any company and in any pages."""
    cache = PagedKVCache([spec], len(pages), 16, torch.bfloat16, torch.device("cuda"))
    backend = create_backend("batch_invariant", [spec], cache, Parts())
    first = 0
    for row, length in enumerate(lens):
        count = -(-length // 16)
        held = torch.tensor(pages[first : first + count], device="cuda")
        for seed, x in enumerate(cache.layers[0]):
            x[held] = random_rows(count, *x.shape[1:], seed=100 * (row if row != own else 99) + seed)
        first += count
    batch = StepBatch.build(
        token_ids=[0] * sum(num_new), num_new=num_new, kv_lens=lens, pages=pages, page_size=16,
        num_decodes=sum(new == 1 for new in num_new), device="cuda",
    )  # fmt: skip
    q = [
        random_rows(new, spec.num_qo_heads, spec.head_dim, seed=7 if row == own else 8)
        for row, new in enumerate(num_new)
    ]
    backend.plan(batch)
    start = sum(num_new[:own])
    return backend.run(0, torch.cat(q))[start : start + num_new[own]].cpu()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5000), st.lists(st.integers(1, 3000), max_size=40), st.sampled_from([(64, 4), (128, 2)]), st.data()
)
def test_a_decode_in_company(length: int, others: list[int], heads: tuple[int, int], data: st.DataObject) -> None:
    spec = AttentionSpec(0, 8, 8 // heads[1], heads[0], 0.1)
    place = data.draw(st.integers(0, len(others)))
    lens = [*others[:place], length, *others[place:]]
    count = sum(-(-n // 16) for n in lens)
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    alone = sequences(spec, [length], [1], 0, list(range(-(-length // 16))))
    assert equal_bits(sequences(spec, lens, [1] * len(lens), place, pages), alone)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3000), st.lists(st.integers(1, 2000), max_size=6), st.sampled_from([(64, 4), (128, 2)]), st.data()
)
def test_the_last_tokens_of_a_prompt(
    length: int, others: list[int], heads: tuple[int, int], data: st.DataObject
) -> None:
    """A chunk has the bits of the whole prompt, in any company."""
    spec = AttentionSpec(0, 8, 8 // heads[1], heads[0], 0.1)
    cache_pages = list(range(-(-length // 16)))
    whole = sequences_of_prompt(spec, length, length, [], cache_pages)
    chunk = data.draw(st.integers(1, length))
    count = sum(-(-n // 16) for n in (length, *others))
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist()
    assert equal_bits(sequences_of_prompt(spec, length, chunk, others, pages), whole[-chunk:])


def sequences_of_prompt(spec: AttentionSpec, length: int, chunk: int, others: list[int], pages: list[int]) -> Tensor:
    """The attention of the last tokens of a prompt, beside other prompts, which are computed whole."""
    cache = PagedKVCache([spec], len(pages), 16, torch.bfloat16, torch.device("cuda"))
    backend = create_backend("batch_invariant", [spec], cache, Parts())
    held = torch.tensor(pages[: -(-length // 16)], device="cuda")
    for seed, x in enumerate(cache.layers[0]):
        x.normal_()
        x[held] = random_rows(len(held), *x.shape[1:], seed=seed)
    batch = StepBatch.build(
        token_ids=[0] * (chunk + sum(others)), num_new=[chunk, *others], kv_lens=[length, *others], pages=pages,
        page_size=16, num_decodes=0, device="cuda",
    )  # fmt: skip
    backend.plan(batch)
    q = random_rows(length, spec.num_qo_heads, spec.head_dim, seed=7)[length - chunk :]
    rest = random_rows(sum(others), spec.num_qo_heads, spec.head_dim, seed=8)
    return backend.run(0, torch.cat((q, rest)))[:chunk].cpu()


def test_logits_do_not_depend_on_the_schedule() -> None:
    """In bfloat16, bit for bit; `python -m tests.invariant_schedules 10000 0 cuda` serves more schedules."""
    script = [sys.executable, "-m", "tests.invariant_schedules", "40", "0", "cuda"]
    result = subprocess.run(script, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    schedules, preemptions, shared_tokens, guesses, _ = (int(word) for word in result.stdout.split())
    assert schedules == 40 and min(preemptions, shared_tokens, guesses) > 0
