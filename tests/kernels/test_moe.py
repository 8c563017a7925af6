"""A mixture of experts, compared with its reference in float64: in Triton's interpreter here, on a GPU there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from mini_engine.models.config import MoEConfig
from mini_engine.models.layers import rms_norm
from mini_engine.models.moe import MoE, mix_experts, route
from mini_engine.parts import default_parts
from tests.kernels.random_tensors import Random
from tests.models.families import our_model, transformers_model

pytest.importorskip("triton")
# On a GPU machine Triton compiles the kernels, and a compiled kernel accepts no tensors on the CPU.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
DEVICES = pytest.mark.parametrize(
    ("device", "pdl"),
    [
        pytest.param("cpu", False, marks=INTERPRETED),
        *(pytest.param("cuda", pdl, marks=pytest.mark.gpu) for pdl in (False, True)),
    ],
)
EPS = 1e-6
HIDDEN, SIZE = 96, 40


def config(num_experts: int, k: int, normalize: bool = True) -> MoEConfig:
    return MoEConfig(num_experts, k, SIZE, normalize, 1.5, frozenset())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = 4e-2 if got.is_cuda else 1e-4
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def matrices(random: Random, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = random(num_experts, 2 * SIZE, HIDDEN), random(num_experts, HIDDEN, SIZE)
    return gate_up / HIDDEN**0.5, down / SIZE**0.5


@DEVICES
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (12, 3), (128, 8), (5, 5), (3, 1)])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 33, 100])
@pytest.mark.parametrize("tile_tokens", [16, 32])
@pytest.mark.parametrize("normalize", [True, False])
def test_pairs_are_those_of_the_reference_sorted_by_expert(
    device, pdl, num_experts, k, num_tokens, tile_tokens, normalize
):
    from mini_engine.kernels.moe import pair

    random = Random(num_tokens, device)
    logits = random(num_tokens, num_experts).mul(4).round().div(4)  # with ties
    moe = config(num_experts, k, normalize)
    pairs = pair(logits, moe, tile_tokens, pdl=pdl)
    weights, experts = route(logits, moe)
    assert torch.equal(pairs.experts.long(), experts)
    torch.testing.assert_close(pairs.weights, weights)
    by_expert, order = experts.flatten().sort(stable=True)
    if not num_tokens:
        return
    assert torch.equal(pairs.order.long(), order)
    found = []
    for expert, first, end in pairs.tiles[:, : int(pairs.num_tiles)].T.tolist():
        found += [(expert, place) for place in range(first, min(first + tile_tokens, end))]
    assert found == list(zip(by_expert.tolist(), range(num_tokens * k), strict=True))


@DEVICES
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (12, 3), (5, 5)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 17, 70])
def test_the_experts_are_those_of_the_reference(device, pdl, num_experts, k, num_tokens):
    from mini_engine.kernels import moe as kernels

    random, moe = Random(num_tokens + k, device), config(num_experts, k)
    x, logits = random(num_tokens, HIDDEN), random(num_tokens, num_experts)
    gate_up, down = matrices(random, num_experts)
    want = mix_experts(x.double(), logits.double(), gate_up.double(), down.double(), moe, F.silu)
    got = kernels.mix_experts(x, logits, gate_up, down, moe, F.silu)
    assert got.dtype == x.dtype
    close(got, want)


def block(device: str, num_experts: int, k: int, seed: int = 0) -> MoE:
    random, mlp = Random(seed, device), MoE.__new__(MoE)
    torch.nn.Module.__init__(mlp)
    mlp.moe, mlp.activation = config(num_experts, k), F.silu
    mlp.gate_up, mlp.down = (torch.nn.Parameter(own, requires_grad=False) for own in matrices(random, num_experts))
    mlp.router = torch.nn.Module()
    mlp.router.weight = random(num_experts, HIDDEN) / HIDDEN**0.5
    return mlp


@DEVICES
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 6, 40])
def test_experts_of_normalized_tokens_are_added_to_the_residual_stream(device, pdl, num_tokens):
    from mini_engine.kernels.moe import add_experts, router_logits

    mlp, random = block(device, 8, 3), Random(num_tokens, device)
    x = random.tokens(num_tokens, HIDDEN) if num_tokens else random(0, HIDDEN)
    normed = rms_norm(x.double(), torch.ones(HIDDEN, dtype=torch.float64, device=device), EPS)
    logits, _ = router_logits(x, mlp.router.weight, EPS, pdl=pdl)
    torch.testing.assert_close(logits.double(), F.linear(normed, mlp.router.weight.double()), atol=2e-4, rtol=1e-4)
    mixed = mix_experts(normed, logits.double(), mlp.gate_up.double(), mlp.down.double(), mlp.moe, F.silu)
    want = x.double() + mixed
    assert add_experts(x, mlp, EPS, pdl=pdl) is x
    close(x, want)


@DEVICES
def test_all_tokens_may_have_the_same_expert(device, pdl):
    from mini_engine.kernels import moe as kernels

    random, moe = Random(0, device), config(6, 1)
    x, (gate_up, down) = random(150, HIDDEN), matrices(random, 6)
    logits = torch.zeros(150, 6, device=device)
    logits[:, 4] = 1
    want = mix_experts(x.double(), logits.double(), gate_up.double(), down.double(), moe, F.silu)
    close(kernels.mix_experts(x, logits, gate_up, down, moe, F.silu), want)


@DEVICES
def test_logits_that_are_no_numbers_choose_experts_that_exist(device, pdl):
    from mini_engine.kernels.moe import pair

    logits = torch.full((3, 6), float("nan"), device=device)
    logits[1], logits[2, 2] = float("-inf"), float("inf")
    experts = pair(logits, config(6, 4), 16, pdl=pdl).experts
    assert experts.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 1, 3]]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 64, 300])
def test_a_graph_of_layers_has_the_same_bits_again_and_again(num_tokens: int) -> None:
    """Kernels that start before the one in front of them has ended still read its result."""
    from mini_engine.kernels.moe import add_experts

    pdl = torch.cuda.get_device_capability() >= (9, 0)
    layers = [block("cuda", 128, 8, seed) for seed in range(6)]
    start = Random(num_tokens, "cuda")(num_tokens, HIDDEN)
    stream = start.clone()

    def run() -> None:
        stream.copy_(start)
        for mlp in layers:
            add_experts(stream, mlp, EPS, pdl=pdl)

    run()
    once, graph = stream.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        stream.zero_()
        graph.replay()
        assert torch.equal(stream, once)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16, 64, 256, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_sizes_of_a_published_model(num_tokens: int, dtype: torch.dtype) -> None:
    """The largest tiles must fit into an SM. Weights of Qwen3-30B-A3B's shape, but for 16 experts."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    moe = MoEConfig(16, 8, 768, True, 1.0, frozenset())
    gate_up, down = random(16, 1536, 2048) / 2048**0.5, random(16, 2048, 768) / 768**0.5
    x, logits = random(num_tokens, 2048), random(num_tokens, 16)
    got = mix_experts(x, logits, gate_up, down, moe, F.silu)
    want = mix_experts(x.double(), logits.double(), gate_up.double(), down.double(), moe, F.silu)
    error = (got.double() - want).norm() / want.norm()
    assert error < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]


@pytest.mark.gpu
def test_an_engine_without_options_replays_graphs_of_these_kernels() -> None:
    """The persistent kernel refuses the model, and graphs compute the same tokens as launches one by one."""
    pytest.importorskip("flashinfer")
    from mini_engine import SamplingParams
    from mini_engine.config import EngineConfig
    from mini_engine.engine import LLMEngine
    from mini_engine.models.base import LanguageModel

    device = torch.device("cuda")
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128, "moe_intermediate_size": 128}
    theirs = transformers_model("qwen3_moe", seed=2, dtype=torch.bfloat16, mlp_only_layers=[1], **sizes)
    model: LanguageModel = our_model(theirs, parts=default_parts(device)).to(device)
    outputs = []
    for eager in (True, False):
        config = EngineConfig.of({"max_batch_size": 8, "enforce_eager": eager})
        engine = LLMEngine(model, config, parts=default_parts(device))
        assert not engine.config.persistent_decode and bool(engine.config.cuda_graph_batch_sizes) != eager
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        added = [engine.add_request(str(i), [3 + i, 7, 9, 4], params) for i in range(8)]  # a graph has this size
        while engine.has_unfinished:
            engine.step()
        outputs.append([request.output_token_ids for request in added])
    assert outputs[0] == outputs[1]


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mini_engine.kernels import moe

FLOATS = {"logits", "factors", "weights"}
INTEGERS = {"experts", "counts", "order", "tiles", "num_tiles"}
SCALARS = {"num_tokens", "num_experts", "most_tiles", "num_blocks"}


def build(kernel, num_warps=4, num_stages=3, **sizes):
    def kind(name):
        if name in sizes:
            return "constexpr"
        if name in FLOATS | INTEGERS | {"slots"}:
            return "*fp32" if name in FLOATS else "*i8" if name == "slots" else "*i32"
        return "i32" if name in SCALARS else "fp32" if name in ("eps", "scale") else "*bf16"

    constants = {(i,): sizes[name] for i, name in enumerate(kernel.arg_names) if name in sizes}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if kind(name)[0] == "*"}
    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, constants, aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": True}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "griddepcontrol.wait" in compiled.asm["ptx"] and compiled.metadata.shared <= 232448, compiled.metadata
    if VERBOSE:
        print(kernel.__name__, sizes, compiled.metadata.shared, "wgmma" in compiled.asm["ptx"], flush=True)
    return compiled


VERBOSE = __name__ != "__main__"
HIDDEN = {"HIDDEN": 2048, "PDL": True}
for tokens, experts, columns in ((16, 16, 512), (64, 128, 64)):
    build(moe._logits, TOKENS=tokens, EXPERTS=experts, COLUMNS=columns, num_stages=4, **HIDDEN)
build(moe._logits_vectors, TOKENS=4, ROWS=1, **HIDDEN)
for many in (False, True):
    sizes = {"K": 8, "BLOCK": 32, "EXPERTS": 128, "TILE_TOKENS": 16, "PDL": True}
    build(moe._route, NORMALIZE=True, MANY=many, OTHERS=4, **sizes)
build(moe._route, NORMALIZE=True, MANY=False, OTHERS=128, **sizes | {"BLOCK": 1})
build(moe._place, **sizes)
for tokens in moe.SHAPES:
    for kernel, shape, of_kernel in (
        (moe._gate_up_tiles, moe.SHAPES[tokens], {"K": 8, "HAS_FACTORS": True}),
        (moe._down_tiles, moe.DOWN_SHAPES[tokens], {}),
    ):
        program = moe._program(shape, 768, torch.bfloat16, True)
        program.pop("launch_pdl")
        build(kernel, TOKENS=tokens, HIDDEN=2048, SIZE=768, **of_kernel, **program)
build(moe._add_slots, K=8, COLUMNS=1024, ADD=True, **HIDDEN)
build(moe._gate_up_vectors, K=8, SIZE=768, ROWS=2, HAS_FACTORS=True, **HIDDEN)
build(moe._down_vectors, K=8, SIZE=768, ROWS=2, ADD=True, **HIDDEN)
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter accepts more than the compiler, which needs no GPU."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)
