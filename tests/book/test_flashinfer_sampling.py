"""FlashInfer's samplers: never a filtered token, the right frequencies, the engine's own greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import reload
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mini_engine import ops
from mini_engine.parts import load_parts
from mini_engine.sampling import SamplingBatch, filter_logits, sample
from mini_engine.sampling_params import SamplingParams
from tests.attention import fake_flashinfer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB_SIZE = 1000
FILTERS = (
    SamplingParams(),
    SamplingParams(temperature=0.5, top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(temperature=2.0, min_p=0.1),
    SamplingParams(top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, top_k=3),
    SamplingParams(top_k=10**9),
)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """On a CPU the kernels are those of the stand-in."""
    if request.param == "cuda":
        pytest.importorskip("flashinfer")
        yield "cuda"
        return
    with pytest.MonkeyPatch.context() as patch:
        fake_flashinfer.install(patch)
        yield "cpu"


@pytest.fixture
def sampler(device: str) -> ModuleType:
    from book.kernels import flashinfer_sampling
    from mini_engine.kernels import fused_ops

    reload(fused_ops)  # they may have been imported with the other FlashInfer
    return reload(flashinfer_sampling)


def a_batch(params: list[SamplingParams], device: str, position: int = 7, seed: int = 1) -> SamplingBatch:
    seeds = [seed * 1000 + row for row in range(len(params))]
    return SamplingBatch.build(params, seeds, [position] * len(params), device=device)


def filtered(logits: Tensor, batch: SamplingBatch) -> Tensor:
    scaled = logits / torch.where(batch.temperature == 0, 1, batch.temperature)[:, None]
    return filter_logits(scaled, batch.top_k, batch.top_p, batch.min_p)


def some_logits(num_rows: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_get_the_largest_logit(sampler: ModuleType, device: str, dtype: torch.dtype) -> None:
    params = [SamplingParams(temperature=float(row % 2)) for row in range(64)]
    logits = some_logits(64, device, dtype)
    tokens = sampler.sample(logits, a_batch(params, device))
    assert tokens.dtype == torch.int64 and tokens.shape == (64,)
    assert torch.equal(tokens[::2], logits.argmax(-1)[::2])
    all_greedy = a_batch([SamplingParams(temperature=0.0)] * 64, device)
    assert torch.equal(sampler.sample(logits, all_greedy), logits.argmax(-1))


def test_a_filtered_token_is_never_drawn(sampler: ModuleType, device: str) -> None:
    params = list(FILTERS) * 16
    logits = some_logits(len(params), device)
    # The token at the edge of top-p may be on either side of it: the sums of probabilities are rounded.
    generous = a_batch([SamplingParams(**vars(p) | {"top_p": min(1.0, p.top_p + 1e-4)}) for p in params], device)
    kept = filtered(logits, generous) > -torch.inf
    drawn = set()
    for position in range(50):
        tokens = sampler.sample(logits, a_batch(params, device, position))
        assert kept.gather(1, tokens[:, None]).all()
        drawn.add(tuple(tokens.tolist()))
    assert len(drawn) == 50, "each position has random numbers of its own"


@pytest.mark.parametrize("params", [FILTERS[0], FILTERS[4]], ids=["no filter", "all filters"])
def test_frequencies_are_the_probabilities(sampler: ModuleType, device: str, params: SamplingParams) -> None:
    """Pearson's statistic over the tokens that are expected often enough, and one class for all others."""
    num_rows, positions = 512, range(40)
    logits = (some_logits(1, device) / 2).expand(num_rows, -1).contiguous()
    kept = filtered(logits[:1], a_batch([params], device))
    expected = torch.softmax(kept[0].double(), 0) * num_rows * len(positions)
    counts = torch.zeros_like(expected)
    for position in positions:
        batch = a_batch([params] * num_rows, device, position)
        counts += torch.bincount(sampler.sample(logits, batch), minlength=VOCAB_SIZE)
    often = expected >= 20
    classes = [(counts[often], expected[often])]
    if (rest := expected[~often].sum()) >= 20:
        classes.append((counts[~often].sum()[None], rest[None]))
    statistic = sum(float(((n - m) ** 2 / m).sum()) for n, m in classes)
    freedom = sum(len(n) for n, _ in classes) - 1
    assert freedom >= 5
    # Mean and variance of the chi-square distribution are k and 2 k; the seeds are fixed.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_the_parts_can_be_named(sampler: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_layer_kernels", lambda device: True)
    parts = load_parts("book.kernels.flashinfer_sampling:parts")
    assert parts.sample.__module__ == "book.kernels.flashinfer_sampling"
    assert parts.rms_norm.__module__ == "mini_engine.kernels.fused_ops"


def test_arguments_are_those_of_the_engines_sampler(sampler: ModuleType, device: str) -> None:
    """The stand-in draws by the engine's own noise: whatever the filters, both samplers agree."""
    if device != "cpu":
        pytest.skip("FlashInfer has other random numbers")
    params = list(FILTERS) * 8
    logits = some_logits(len(params), device)
    for position in range(10):
        batch = a_batch(params, device, position)
        assert torch.equal(sampler.sample(logits, batch), sample(logits, batch))


@pytest.mark.gpu
def test_a_graph_draws_anew_in_each_replay(sampler: ModuleType, device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a graph")
    logits, batch = some_logits(32, device), a_batch([SamplingParams()] * 32, device)
    eager: Callable[[], Tensor] = lambda: sampler.sample(logits, batch)  # noqa: E731
    eager()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = eager()
    seen = set()
    for position in range(20):
        batch.positions.fill_(position)
        graph.replay()
        assert torch.equal(tokens, eager())
        seen.add(tuple(tokens.tolist()))
    assert len(seen) == 20
