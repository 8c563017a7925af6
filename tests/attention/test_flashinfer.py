"""The flashinfer backend on a GPU: FlashInfer's kernels, compared with the references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mini_engine.attention.backend import create_backend
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.split_kv import SplitKVBackend
from mini_engine.attention.torch import TorchBackend
from mini_engine.batch import StepBatch
from mini_engine.executor import Ticket
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.parts import Parts, default_parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.step_input import StepInput
from tests.attention.greedy import TINY, check_greedy
from tests.attention.stepping import check_equal, full_cache, random_step, run_in_steps
from tests.helpers import make_engine, serve
from tests.models.families import our_model, transformers_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> torch.device:
    pytest.importorskip("flashinfer")
    return torch.device("cuda")


LLAMA = AttentionSpec(0, num_qo_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
QWEN3 = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
GEMMA2 = AttentionSpec(0, num_qo_heads=8, num_kv_heads=4, head_dim=256, scale=1 / 16, softcap=50.0)
GPT2 = AttentionSpec(0, num_qo_heads=12, num_kv_heads=12, head_dim=64, scale=0.125)
SHAPES = {
    "llama": (LLAMA,),
    "qwen3": (QWEN3, replace(QWEN3, layer=1, window=33)),
    "gemma2": (GEMMA2, replace(GEMMA2, layer=1, window=40)),
    "gpt2": (GPT2,),
    "alibi": (replace(QWEN3, alibi_slopes=tuple(alibi_slopes(16).tolist())),),
}
# The kernels accumulate in float32, and round the weights of the softmax and the output to bfloat16.
BF16 = 2e-2


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(st.data())
def test_kernels_equal_the_references(gpu: torch.device, shape: str, layout: str, data: st.DataObject) -> None:
    """Any mix of decodes and prompts on random pages: the torch backend and our plan of work items in float32."""
    specs, page_size = SHAPES[shape], data.draw(st.sampled_from([1, 16, 128]))
    batch, num_pages = random_step(data, page_size, gaps=False, longest=500, device="cuda")
    for oracle in (TorchBackend, SplitKVBackend):
        mine = PagedKVCache(specs, num_pages, page_size, torch.bfloat16, gpu, layout)
        theirs = PagedKVCache(specs, num_pages, page_size, torch.float32, gpu)
        backend = create_backend("flashinfer", specs, mine, Parts())
        check_equal(batch, backend, oracle(specs, theirs, Parts()), BF16)


@pytest.mark.parametrize("shape", ["qwen3"])
def test_flashattention_3_equals_the_reference(gpu: torch.device, shape: str) -> None:
    specs, new, before = SHAPES[shape], [700, 600], [90, 0]
    kv_lens = [n + m for n, m in zip(new, before, strict=True)]
    counts = [-(-n // 16) for n in kv_lens]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    batch = StepBatch.build(
        token_ids=[0] * sum(new), num_new=new, kv_lens=kv_lens, pages=pages, page_size=16, device="cuda"
    )
    mine = PagedKVCache(specs, sum(counts), 16, torch.bfloat16, gpu)
    theirs = PagedKVCache(specs, sum(counts), 16, torch.float32, gpu)
    backend = PagedBackend(specs, mine, Parts())
    check_equal(batch, backend, TorchBackend(specs, theirs, Parts()), BF16)
    assert {algorithm for _, algorithm in backend.wrappers.made} == {"fa3" if backend._prompts._has_fa3 else "fa2"}


def test_slots_that_were_never_written_do_not_matter(gpu: torch.device) -> None:
    cache = full_cache(SHAPES["qwen3"], 40, 16, torch.bfloat16, device="cuda")
    backend = create_backend("flashinfer", SHAPES["qwen3"], cache, Parts())
    runs = run_in_steps(
        backend, SHAPES["qwen3"], [90, 1, 140, 33], [40, 1, 139, 8], range(40), 16, torch.bfloat16, "cuda"
    )
    for _, got, want in runs:
        torch.testing.assert_close(got, want, atol=BF16, rtol=BF16)


def test_a_step_waits_for_the_device_nowhere(gpu: torch.device) -> None:
    """torch synchronizes neither while the step is planned nor in a layer."""
    spec = QWEN3
    batch = StepBatch.build(
        token_ids=[0] * 21, num_new=[1, 20], kv_lens=[50, 40], pages=range(7), page_size=16, device="cuda"
    )
    backend = create_backend("flashinfer", [spec], PagedKVCache([spec], 7, 16, torch.bfloat16, gpu), default_parts(gpu))
    q, k, v = (torch.zeros(21, heads, 128, device=gpu, dtype=torch.bfloat16) for heads in (16, 8, 8))
    backend.plan(batch)
    backend(0, q, k, v)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan(batch)
        backend(0, q, k, v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_the_engine_launches_steps_without_waiting_for_the_device(
    gpu: torch.device, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when requests have begun or ended, so that the sampler needs the parameters of other rows."""
    theirs = transformers_model("qwen3", seed=2, dtype=torch.bfloat16, **TINY["qwen3"])
    model = our_model(theirs, parts=default_parts(gpu)).to(gpu)
    engine = make_engine(model, parts=model.parts, attn_backend="flashinfer", num_pages=32, max_batch_size=4)
    params = SamplingParams(seed=0, repetition_penalty=penalty, ignore_eos=True)
    requests = [(str(i), list(range(3, 9 + i)), replace(params, max_tokens=3 + 2 * i)) for i in range(4)]
    serve(engine, {0: requests})  # compiles and captures
    launch, num_requests = engine.executor.launch, []

    def without_waiting(step: StepInput) -> Ticket:
        num_requests.append(len(step.rows))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine.executor, "launch", without_waiting)
    serve(engine, {0: requests})
    assert engine.config.pipeline_depth == 1 and set(num_requests) == {1, 2, 3, 4} and not engine.metrics.failed_steps


def test_many_plans_may_be_made_ahead_of_the_device(gpu: torch.device) -> None:
    """A plan must not overwrite the pinned memory of one that the GPU has not copied yet."""
    spec = QWEN3
    cache = PagedKVCache([spec], 200, 16, torch.bfloat16, gpu)
    for x in cache.layers[0]:
        x.normal_()
    backend = create_backend("flashinfer", [spec], cache, Parts())
    generator = torch.Generator().manual_seed(0)
    steps = []
    for count in (1, 7, 3, 12, 5):
        kv_lens = torch.randint(1, 200, (count,), generator=generator).tolist()
        pages = torch.randperm(200, generator=generator)[: sum(-(-n // 16) for n in kv_lens)].tolist()
        steps.append(
            StepBatch.build(
                token_ids=[0] * count, num_new=[1] * count, kv_lens=kv_lens, pages=pages, page_size=16, device="cuda"
            )
        )
    queries = [torch.randn(batch.num_tokens, 16, 128, device=gpu, dtype=torch.bfloat16) for batch in steps]

    def run(wait: bool) -> list[Tensor]:
        outputs = []
        for batch, q in zip(steps, queries, strict=True):
            if not wait:
                torch.cuda._sleep(20_000_000)  # the device falls behind the host
            backend.plan(batch)
            outputs.append(backend.run(0, q))
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return outputs

    for apart, ahead in zip(run(wait=True), run(wait=False), strict=True):
        torch.testing.assert_close(ahead, apart, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", sorted(TINY.keys() - {"deepseek_v2"}))  # its attention has backends of its own
def test_greedy_tokens_are_those_of_the_reference(gpu: torch.device, family: str, kv_layout: str) -> None:
    check_greedy(gpu, family, attn_backend="flashinfer", kv_layout=kv_layout)
