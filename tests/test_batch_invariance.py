"""`batch_invariant`: a request's logits have the same bits, whatever other requests are in its steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mini_engine import LLM, SamplingParams
from mini_engine.attention.backend import create_backend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.config import EngineConfig
from mini_engine.defaults import resolve
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.batch_invariant import InBlocks, batch_invariant, by_row
from mini_engine.models.config import ACTIVATIONS
from mini_engine.models.layers import rms_norm
from mini_engine.models.weights import Linear, Projection, QuantizedLinear, QuantizedRows
from mini_engine.parts import Parts
from mini_engine.quantization import Format
from tests.helpers import adapted_model, double_model, make_engine
from tests.invariant_schedules import model_of

ROOT = Path(__file__).parent.parent
NUM_SCHEDULES = 10  # of each dtype; `python -m tests.invariant_schedules 1000` takes about 15 minutes
DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])
WIDTHS = st.integers(1, 200).map(lambda n: 8 * n)
ROWS = st.integers(1, 64)
FORMATS = {"int8": Format("int8", 1, None), "int4": Format("int4", 1, 32), "fp8": Format("fp8", 1, None)}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike `torch.equal`, tell 0 from -0, and find NaN equal to itself."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def changed_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Count the rows of a batch whose bits are not those of the row alone."""
    together = function(x)
    return sum(not equal_bits(together[i : i + 1], function(x[i : i + 1])) for i in range(len(x)))


def random_rows(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))).to(dtype)


def random_linear(columns: int, rows: int, dtype: torch.dtype, seed: int = 1, *, bias: bool = False) -> Linear:
    product = Linear(columns, {"proj": rows}, bias=bias)
    weight = torch.nn.Parameter(random_rows(rows, columns, dtype, seed), requires_grad=False)
    product.weight = weight
    if bias:
        product.bias = torch.nn.Parameter(random_rows(1, rows, dtype, seed)[0], requires_grad=False)
    return product


# --- operators -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(ROWS, WIDTHS, st.integers(1, 200), DTYPES, st.integers(0, 2**31), st.booleans(), st.integers(1, 2))
def test_a_product_in_blocks(num_rows, columns, rows, dtype, seed, bias, threads):
    torch.set_num_threads(threads)
    product = random_linear(columns, rows, dtype, seed, bias=bias)
    x = random_rows(num_rows, columns, dtype, seed + 1)
    assert changed_rows(InBlocks(product), x) == 0
    # In any order, a sum of n products differs from the exact one by at most n roundings of the sum of their sizes.
    sizes = (x.double().abs() @ product.weight.double().abs().T) + (product.bias.double().abs() if bias else 0)
    of_sum = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # bfloat16 is summed in float32
    difference = (InBlocks(product)(x).double() - product(x).double()).abs()
    assert (difference <= 2 * columns * of_sum * sizes + 2 * torch.finfo(dtype).eps * product(x).double().abs()).all()


@settings(max_examples=20, deadline=None)
@given(ROWS, st.sampled_from([64, 256, 1536]), st.sampled_from(sorted(FORMATS)), st.integers(1, 2))
def test_a_product_with_a_quantized_matrix_in_blocks(num_rows, columns, kind, threads):
    torch.set_num_threads(threads)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    product = QuantizedLinear(columns, {"proj": 64}, FORMATS[kind])
    torch.set_default_dtype(before)
    QuantizedRows(product, 0, 64).copy_(random_rows(64, columns, torch.float32))
    product.prepare(torch.bfloat16)
    assert changed_rows(InBlocks(product), random_rows(num_rows, columns, torch.bfloat16)) == 0


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(1, 5000), DTYPES, st.sampled_from(sorted(ACTIVATIONS)), st.integers(1, 2), st.booleans())
def test_an_activation_by_row(num_rows, width, dtype, name, threads, is_half):
    """Of a tensor of its own, and of the first half of each row, as `gated_mlp` has it."""
    torch.set_num_threads(threads)
    x = random_rows(num_rows, 2 * width, dtype)[:, :width] if is_half else random_rows(num_rows, width, dtype)
    assert changed_rows(by_row(ACTIVATIONS[name]), x) == 0
    torch.testing.assert_close(by_row(ACTIVATIONS[name])(x), ACTIVATIONS[name](x))


UNCHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: rms_norm(x, torch.ones(x.shape[1], dtype=x.dtype), 1e-5),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "log_softmax": lambda x: x.log_softmax(-1),
    "tanh": torch.tanh, "cos": torch.cos, "sin": torch.sin, "exp": torch.exp,
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 5000), DTYPES, st.sampled_from(sorted(UNCHANGED)), st.integers(1, 2))
def test_operators_that_are_left_as_they_are(num_rows, width, dtype, name, threads):
    torch.set_num_threads(threads)
    assert changed_rows(UNCHANGED[name], random_rows(num_rows, width, dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_ordinary_product_is_found_to_change(dtype):
    """The check can fail; on a processor whose kernels happen to be invariant there is nothing to see."""
    product = random_linear(4096, 4096 if dtype == torch.bfloat16 else 256, dtype)
    x = random_rows(64, 4096, dtype)
    if changed_rows(product, x) == 0:
        pytest.skip("on this processor, a row of an ordinary product has the same bits in a batch")
    assert changed_rows(InBlocks(product), x) == 0


@pytest.mark.parametrize(("name", "dtype"), [("silu", torch.float32), ("gelu_new", torch.bfloat16)])
def test_the_ordinary_activation_is_found_to_change(name, dtype):
    x = random_rows(64, 1000, dtype)
    if changed_rows(ACTIVATIONS[name], x) == 0:
        pytest.skip("on this processor, an ordinary activation has the same bits at the end of a tensor")
    assert changed_rows(by_row(ACTIVATIONS[name]), x) == 0


# --- attention -------------------------------------------------------------------------------------------------------


def attend_in_chunks(name: str, spec: AttentionSpec, qkv: tuple[Tensor, Tensor, Tensor], chunks: list[int]) -> Tensor:
    """The attention of one sequence, computed in steps of some tokens, with another sequence beside it."""
    q, k, v = qkv
    cache = PagedKVCache([spec], 30, 16, q.dtype)
    for x in (*cache.layers[0],):
        x.fill_(torch.nan)  # what a page holds beyond a sequence's keys must not matter
    sinks = {0: torch.linspace(-3, 3, spec.num_qo_heads, dtype=q.dtype)} if spec.has_sinks else {}
    backend = create_backend(name, [spec], cache, Parts(), sinks)
    out, done = [], 0
    for chunk in chunks:
        end = done + chunk
        pages = [2 * i + 1 for i in range(-(-end // 16))]
        backend.plan(
            StepBatch.build(token_ids=[0] * (chunk + 1), num_new=[1, chunk], kv_lens=[1, end], pages=[0, *pages],
                            page_size=16)
            if len(chunks) > 1 else
            StepBatch.build(token_ids=[0] * chunk, num_new=[chunk], kv_lens=[end], pages=pages, page_size=16)
        )  # fmt: skip
        rows = slice(done, end)
        own = tuple(torch.cat((x[:1], x[rows])) if len(chunks) > 1 else x[rows] for x in (q, k, v))
        out.append(backend(0, *own)[-chunk:])
        done = end
    return torch.cat(out)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=5), DTYPES, st.data(), st.integers(1, 2))
def test_attention_of_a_prompt_in_chunks(chunks, dtype, data, threads):
    """Every query has the bits that it has in the whole prompt, decodes (chunks of one) included."""
    torch.set_num_threads(threads)
    slopes = data.draw(st.sampled_from([None, (0.5, 0.25, 0.1, 0.01)]))
    softcap, window = data.draw(st.sampled_from([None, 5.0])), data.draw(st.none() | st.integers(1, 40))
    spec = AttentionSpec(
        0, 4, 2, 16, 0.25, window=window, softcap=softcap, alibi_slopes=slopes, has_sinks=data.draw(st.booleans())
    )
    heads = {"q": 4, "k": 2, "v": 2}
    qkv = tuple(
        random_rows(sum(chunks), 16 * n, dtype, seed).unflatten(1, (n, 16)) for seed, n in enumerate(heads.values())
    )
    whole = attend_in_chunks("batch_invariant", spec, qkv, [sum(chunks)])
    assert equal_bits(attend_in_chunks("batch_invariant", spec, qkv, chunks), whole)


def test_ordinary_attention_is_found_to_change():
    spec = AttentionSpec(0, 4, 2, 16, 0.25)
    qkv = tuple(random_rows(60, 16 * n, torch.float32, n).unflatten(1, (n, 16)) for n in (4, 2, 2))
    whole, parts = (attend_in_chunks("torch", spec, qkv, chunks) for chunks in ([60], [33, 1, 1, 25]))
    if equal_bits(whole, parts):
        pytest.skip("on this processor, ordinary attention has the same bits in a chunk")
    assert equal_bits(*(attend_in_chunks("batch_invariant", spec, qkv, chunks) for chunks in ([60], [33, 1, 1, 25])))


# --- the engine ------------------------------------------------------------------------------------------------------


@cache
def served() -> list[int]:
    """What random schedules held, in a process of their own, where no types are checked at each call."""
    script = [sys.executable, "-m", "tests.invariant_schedules", str(NUM_SCHEDULES)]
    env = os.environ | {"PYTHONHASHSEED": "0", "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return [int(word) for word in result.stdout.split()]


def test_logits_do_not_depend_on_the_schedule():
    """In bfloat16 and float32, bit for bit."""
    schedules, preemptions, shared_tokens, guesses, _ = served()
    assert schedules == NUM_SCHEDULES and min(preemptions, shared_tokens, guesses) > 0


def test_without_the_option_the_schedule_changes_bits():
    """The property above can fail. Not even float64 is enough: its tokens are equal, and its bits are not."""
    if not served()[-1]:
        pytest.skip("on this processor, ordinary operators have the same bits in these schedules")


def test_the_embedded_model_in_bfloat16():
    llm = LLM(dtype="bfloat16", device="cpu", batch_invariant=True, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, ignore_eos=True)
    prompts = ["The capital of France is", "Once", "A list of prime numbers: 2, 3, 5, 7,", "Hello, my name is"]
    prompts += [f"{word} " * 6 for word in ("red", "green", "blue")]
    together = llm.generate(prompts, params)
    for prompt, output in zip(prompts[:3], together, strict=False):
        [alone] = llm.generate(prompt, params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].logprobs == alone.outputs[0].logprobs


# --- the option ------------------------------------------------------------------------------------------------------


def test_the_copy_shares_its_weights_and_leaves_the_model_as_it_was():
    model = model_of("qwen3", "float32")
    engine = make_engine(model, attn_backend="auto", batch_invariant=True)
    twin = engine.executor.model
    assert engine.config.attn_backend == "batch_invariant"
    own = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in twin.parameters()} == own
    assert twin.parts is model.parts
    assert not any(isinstance(module, InBlocks) for module in model.modules())
    blocks = [module.product for module in twin.modules() if isinstance(module, InBlocks)]
    assert set(map(id, blocks)) == {id(module) for module in model.modules() if isinstance(module, Projection)}


def test_refusals():
    with pytest.raises(ConfigError, match="leave out attn_backend='torch'"):
        make_engine(double_model("llama"), attn_backend="torch", batch_invariant=True)
    with pytest.raises(ConfigError, match="the engine's own layers, not those of transformers"):
        make_engine(adapted_model("llama"), attn_backend="auto", batch_invariant=True)
    on_gpu = copy(double_model("llama"))
    on_gpu.__class__ = type("OnGPU", (type(on_gpu),), {"device": torch.device("cuda")})
    with pytest.raises(ConfigError, match="not batch-invariant: leave out persistent_decode"):
        resolve(EngineConfig(batch_invariant=True, persistent_decode=True), on_gpu)
    with pytest.raises(ConfigError, match="a multiple of 8, not 61"):  # the vocabulary
        batch_invariant(on_gpu)
    on_gpu.config = replace(on_gpu.config, formats={"down_proj": Format("int8", 1, None)})
    with pytest.raises(ConfigError, match="not quantized on a GPU"):
        resolve(EngineConfig(batch_invariant=True), on_gpu)
