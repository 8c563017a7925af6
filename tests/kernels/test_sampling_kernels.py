"""The sampler's kernels: exact thresholds against the oracle in float64, the reference's tokens, one graph for all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.sampler import Sampler
from mini_engine.sampling_params import Admission, SamplingParams
from tests.sampling_oracle import adjusted, admissions, assert_sampled, kept, rough_logits

pytest.importorskip("triton")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Triton's interpreter on a machine without a GPU, the compiled kernels on one with it."""
    if request.param == "cuda":
        yield "cuda"
        return
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch_once(patch)
        yield "cpu"


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter replace Triton's functions once per launch, not again in every function that it calls."""
    from triton import language
    from triton.runtime import interpreter

    replace, scopes = interpreter._patch_lang, {}

    class Scopes:
        def restore(self) -> None:
            """At the end of a launch."""
            for scope in scopes.values():
                scope.restore()
            scopes.clear()

    def patched(function: Any) -> Scopes:
        visible = [language, language.core]
        names = tuple(m.__name__ for m in function.__globals__.values() if any(m is module for module in visible))
        if names not in scopes:
            scopes[names] = replace(function)
        return Scopes()

    patch.setattr(interpreter, "_patch_lang", patched)


def entered(admitted: Sequence[Admission], vocab_size: int, device: str = "cpu") -> Sampler:
    sampler = Sampler(7, vocab_size, device)
    sampler.enter(admitted)
    return sampler


def launch(sampler: Sampler, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Call the kernels, on a CPU as well."""
    from mini_engine.kernels import sampling as kernels

    device = sampler.records.device
    where = torch.tensor(rows, device=device), torch.tensor(positions, device=device)
    return kernels.sample(sampler, logits.to(device), *where).tolist()


def assert_kept(logits: Tensor, one: Admission, device: str) -> None:
    """The kernels' threshold keeps exactly what the oracle keeps."""
    from mini_engine.kernels import sampling as kernels

    vocab_size = logits.shape[-1]
    where = torch.tensor([one.row], device=device), torch.tensor([len(one.prompt_token_ids)], device=device)
    of_kernel, _, thresholds = kernels.adjust_and_filter(
        entered([one], vocab_size, device), logits[None].to(device), *where
    )
    values = adjusted(logits.tolist(), one, one.output_token_ids)
    is_adjusted = list(values) != logits.tolist()
    among, is_clear = kept(values, one)
    if is_clear:
        seen = of_kernel[0].cpu() if is_adjusted else logits.float()
        assert set((seen >= thresholds[0].cpu()).nonzero()[:, 0].tolist()) == among, one.params


@settings(max_examples=12, phases=(Phase.generate,))  # the interpreter is too slow to shrink a failing example
@given(data=st.data(), vocab_size=st.integers(5, 400), dtype=st.sampled_from(DTYPES))
def test_every_mixture_equals_the_oracle(device: str, data: st.DataObject, vocab_size: int, dtype: torch.dtype) -> None:
    admitted = data.draw(admissions(vocab_size, max_rows=3))
    sampler, reference = entered(admitted, vocab_size, device), entered(admitted, vocab_size)
    outputs = {one.row: list(one.output_token_ids) for one in admitted}
    for step in range(2):
        logits = rough_logits(len(admitted), vocab_size, step).to(dtype)
        positions = [len(one.prompt_token_ids) + len(outputs[one.row]) for one in admitted]
        tokens = launch(sampler, logits, [one.row for one in admitted], positions)
        for one, row, position, token in zip(admitted, logits, positions, tokens, strict=True):
            assert_sampled(token, adjusted(row.tolist(), one, outputs[one.row]), one, position)
            outputs[one.row].append(token)
    reference.enter([Admission(**vars(one) | {"output_token_ids": outputs[one.row]}) for one in admitted])
    rows = torch.tensor([one.row for one in admitted])
    penalized = rows[(reference.records[rows, 7] & 1) != 0]
    assert torch.equal(sampler.counts.cpu()[penalized], reference.counts[penalized])


FILTERS = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 20, "top_p": 0.95}, {"top_k": 900}, {"top_k": 1500}, {"top_p": 0.9},
    {"top_p": 0.1}, {"top_p": 0.9999}, {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.5, "min_p": 0.2},
    {"top_p": 0.9, "temperature": 5.0}, {"top_k": 10, "temperature": 1e-4}, {"top_p": 0.9, "temperature": 1e30},
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_filters_keep_exactly_what_the_oracle_keeps(given: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(1500, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype)
    assert_kept(logits, Admission(2, SamplingParams(**given), 1, [0]), device)
    assert_kept(logits, Admission(2, SamplingParams(**given, logit_bias={7: 1.5}), 1, [0]), device)


@pytest.mark.parametrize("given", [{"top_k": 5}, {"top_k": 300, "top_p": 0.5}, {"top_p": 0.7}], ids=str)
def test_ties(given: dict[str, Any], device: str) -> None:
    for levels in (torch.zeros(700), torch.arange(700) % 3.0, (torch.arange(700) % 50).float() - 25):
        assert_kept(levels, Admission(2, SamplingParams(**given), 1, [0]), device)


def test_more_candidates_than_fit_are_searched_in_place(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mini_engine.kernels import sampling as kernels

    monkeypatch.setattr(kernels, "CAPACITY", 64)
    logits = torch.randn(1100, generator=torch.Generator().manual_seed(5))
    for own in ({"top_p": 0.9}, {"top_k": 400}, {"top_k": 400, "logit_bias": {3: 2.0}}):
        assert_kept(logits, Admission(2, SamplingParams(**own), 1, [0]), device)


@pytest.mark.parametrize("num_programs", [1, 3])
def test_rows_are_split_among_programs(num_programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mini_engine.kernels import gumbel_argmax, sampling

    admitted = [
        Admission(row, SamplingParams(**own), 2**40 * row, [5, 4500])
        for row, own in enumerate(({}, {"top_k": 20}, {"logit_bias": {4999: 9.0, 0: 8.0}, "presence_penalty": 1.0}))
    ]
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * 3
    want = launch(entered(admitted, 5000, device), logits, [0, 1, 2], [2, 2, 2])
    for module in (sampling, gumbel_argmax):
        monkeypatch.setattr(module, "NUM_PROGRAMS", num_programs)
    assert launch(entered(admitted, 5000, device), logits, [0, 1, 2], [2, 2, 2]) == want
    for one, row, token in zip(admitted, logits, want, strict=True):
        assert_sampled(token, adjusted(row.tolist(), one, []), one, 2)


@pytest.mark.parametrize(
    "given", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"presence_penalty": 1.0}], ids=str
)
def test_extreme_logits(given: dict[str, Any], device: str) -> None:
    """NaN is never drawn unless there is nothing else, -inf neither; infinite logits and the lowest of ties win."""
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(5))
    logits[0] = torch.nan
    logits[1] = torch.nan
    logits[1, 1234] = 0
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 1077] = -3.0
    logits[4, [700, 1200]] = torch.inf
    logits[5, ::2] = torch.nan
    admitted = [Admission(row, SamplingParams(**given), row, [1]) for row in range(6)]
    tokens = launch(entered(admitted, 1500, device), logits, range(6), [1] * 6)
    assert tokens[:5] == [0, 1234, 0, 1077, 700]
    assert tokens[5] % 2


def test_logits_that_are_not_contiguous(device: str) -> None:
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(5))
    admitted = [Admission(row, SamplingParams(top_k=9, frequency_penalty=0.5), row, [1]) for row in range(3)]
    for view in (logits[:, ::2], logits[:, 3:1100], logits[:1].expand(3, -1)):
        args = ([0, 1, 2], [1, 1, 1])
        want = launch(entered(admitted, view.shape[1], device), view.contiguous(), *args)
        on_device = logits.to(device)
        same = {750: on_device[:, ::2], 1097: on_device[:, 3:1100], 1500: on_device[:1].expand(3, -1)}[view.shape[1]]
        assert launch(entered(admitted, view.shape[1], device), same, *args) == want


def test_padding_changes_no_row(device: str) -> None:
    one = Admission(3, SamplingParams(top_k=5, presence_penalty=1.0), 4, [1])
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    alone, padded = entered([one], 300, device), entered([one], 300, device)
    want = launch(alone, logits[:1], [3], [1])
    assert launch(padded, logits, [3, padded.padding_row, padded.padding_row], [1, 0, 0])[:1] == want
    assert torch.equal(alone.counts, padded.counts)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mini_engine.kernels import gumbel_argmax, sampling

FLOATS = {"adjusted", "maxima", "sums", "candidates", "thresholds", "best_scores"}
INTS = {"row_stride", "vocab_size", "num_blocks", "num_maxima", "num_splits"}
LONGS = {"rows", "positions", "tokens"}
CONSTANTS = {
    "CHUNKS": 8, "BLOCKS": sampling.BLOCKS, "MAX_BLOCKS": 2048, "EXACT_BITS": 16, "CAPACITY": sampling.CAPACITY,
    "FEW": sampling.FEW, "LISTED": sampling.LISTED, "TILE": sampling.TILE,
    "BLOCKS_PER_SPLIT": 16, "MAXIMA": 4, "FAST_LOG": True, "MAX_SPLITS": 512,
}
for kernel, block, num_warps in [
    (sampling._adjust_and_summarize, 128, 4), (sampling._find_thresholds, 128, 8),
    (gumbel_argmax._argmax_of_splits, 512, 1), (gumbel_argmax._argmax_of_rows, 512, 1),
]:
    constants = CONSTANTS | {"BLOCK": block}
    constants = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    types = {
        name: "*fp32" if name in FLOATS else "i32" if name in INTS else "*i64" if name in LONGS
        else {"logits": "*bf16", "counts": "*i16"}.get(name, "constexpr" if name.isupper() else "*i32")
        for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["cubin"]
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
def test_a_large_vocabulary(rows: int, dtype: torch.dtype) -> None:
    vocab_size = 151_936
    logits = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    for own in (*FILTERS, {}, {"temperature": 0.0}, {"presence_penalty": 1.0, "logit_bias": {5: 30.0}, "top_k": 9}):
        admitted = [Admission(row, SamplingParams(**own), 2**40 * row, [1]) for row in range(rows)]
        tokens = launch(entered(admitted, vocab_size, "cuda"), logits, range(rows), [1] * rows)
        for one, row, token in zip(admitted, logits, tokens, strict=True):
            assert_sampled(token, adjusted(row.tolist(), one, []), one, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_graph_serves_every_mixture_of_parameters(dtype: torch.dtype) -> None:
    """The rows' tables change between replays, and counts accumulate inside the graph."""
    vocab_size, size = 5000, 6
    sampler, eager = Sampler(7, vocab_size, "cuda"), Sampler(7, vocab_size, "cuda")
    logits = torch.zeros(size, vocab_size, dtype=dtype, device="cuda")
    rows = torch.full((size,), sampler.padding_row, device="cuda")
    positions = torch.zeros(size, dtype=torch.int64, device="cuda")
    sampler.sample(logits, rows, positions)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.sample(logits, rows, positions)
    mixtures: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.1, "logit_bias": {7: 9.0}},
        {"temperature": 0.0, "frequency_penalty": 2.0}, {"allowed_token_ids": [1, 2, 4999]},
        {"min_tokens": 3, "temperature": 0.0}, {"temperature": 0.0, "bad_words_token_ids": [[3], [4, 4]]},
        {"repetition_penalty": 1.5, "top_k": 2},
    ]  # fmt: skip
    random = torch.Generator().manual_seed(3)
    for start in range(len(mixtures)):
        own = [mixtures[(start + row) % len(mixtures)] for row in range(4)]
        admitted = [Admission(row, SamplingParams(**given), row, [1, 2], (), [3]) for row, given in enumerate(own)]
        sampler.enter(admitted)
        eager.enter(admitted)
        rows[:4] = torch.arange(4)
        for step in range(4):
            logits.copy_((torch.randn(1, vocab_size, generator=random) * 3).expand(size, -1).clone())
            positions[:4] = 2 + step
            graph.replay()
            assert tokens[:4].tolist() == eager.sample(logits[:4], rows[:4], positions[:4]).tolist()
            assert torch.equal(sampler.counts[:4], eager.counts[:4])
