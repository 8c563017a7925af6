"""Grader of chapter 03. Its oracles compute in float64, one row, one name or one nibble at a time."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import torch
from torch import Tensor
from torch.nn import functional as F

from book.grading import (
    Exercise,
    Homework,
    assert_close,
    assert_equal,
    assert_no_loop,
    assert_raises,
    assert_values,
    check,
    lines_run,
)
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.loading import hub
from mini_engine.loading.checkpoint import StoredTensors, load_model, load_tokenizer, open_checkpoint
from mini_engine.loading.gguf import GGUFFile, hf_config, hf_tensors, read_gguf
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import rms_norm
from mini_engine.models.llama import LlamaForCausalLM, LlamaLayer
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.rope import apply_rope, rope_tables

EXERCISES = [
    Exercise(
        "rms_norm",
        points=2,
        minutes=10,
        difficulty=1,
        part="rms_norm",
        hints=(
            "Root, mean, square: read the name from right to left. Along which axis is the mean, and does that axis "
            "stay in the shape, so that the division can broadcast?",
            "x.square().mean(dim=-1, keepdim=True), plus eps, then the root. Compute in a dtype that is wide enough "
            "for the square of a large float16 number: torch.promote_types(x.dtype, torch.float32) names one, and "
            "the weight may be wider still.",
            "wide = x.to(dtype); return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * "
            "weight.to(dtype)).to(x.dtype). Only the last .to may round.",
        ),
    ),
    Exercise(
        "qk_norm",
        points=1,
        minutes=5,
        difficulty=1,
        part="qk_norm",
        hints=(
            "rms_norm takes any number of axes before the last. What is a row here?",
            "A row is one head of one token. Split the head axis at num_qo_heads, because the two parts have "
            "different weights.",
            "torch.cat((rms_norm(q_and_k[:, :num_qo_heads], q_weight, eps), rms_norm(q_and_k[:, num_qo_heads:], "
            "k_weight, eps)), dim=1)",
        ),
    ),
    Exercise(
        "gated_mlp",
        points=1,
        minutes=5,
        difficulty=1,
        part="gated_mlp",
        hints=(
            "Two of the three projections read the same x. One call computes both.",
            "gate_up(x) has 2 I numbers for each token: the first I belong to the gate, the last I to the "
            "up projection. Tensor.chunk splits them.",
            "gate, up = gate_up(x).chunk(2, dim=-1); return down(activation(gate) * up)",
        ),
    ),
    Exercise(
        "decoder_layer",
        points=6,
        minutes=25,
        difficulty=2,
        part="decoder_layer",
        hints=(
            "Write down the shape after every line. Which tensors are [T, heads, D], and which are [T, hidden]? Which "
            "heads does QK-norm touch, and which ones does the rotation touch?",
            "weights.qkv(h).unflatten(1, (-1, spec.head_dim)) has Hq + 2 Hk heads; Tensor.split takes a "
            "tuple of sizes and dim=1. Normalize queries and keys before you rotate them. The output of attend goes "
            "through .flatten(1) before `o`. The second norm reads the sum, not the x that the layer got.",
            "q, k = apply_rope(q_and_k, cos, sin).split((Hq, Hk), dim=1); x = x + weights.o(attend(spec.layer, q, k, "
            "v).flatten(1)); return x + gated_mlp(rms_norm(x, weights.mlp_norm, eps), weights.gate_up, "
            "weights.down, F.silu). Write x = x + ..., never x += ....",
        ),
    ),
    Exercise(
        "load_weights",
        points=4,
        minutes=15,
        difficulty=2,
        hints=(
            "Check first, copy afterwards. What has to be compared, and what does copy_ do when the two shapes differ?",
            "Three things can be wrong: a name on one side only, in either direction, and a shape. `a.keys() ^ "
            "b.keys()` are the names that only one of two dictionaries has. Compare shapes yourself, because copy_ "
            "broadcasts [4] into [3, 4].",
            "if odd := destinations.keys() ^ tensors.keys(): raise ModelLoadError(...); a loop that raises where "
            "tensors[name].shape != destination.shape; then a second loop with destination.copy_(tensors[name]).",
        ),
    ),
    Exercise(
        "gpt2_weights",
        points=3,
        minutes=20,
        difficulty=2,
        part="gpt2_weights",
        hints=(
            "Sort the names into three kinds: leave out, transpose, keep. The shape does not tell the kinds apart: "
            "attn.c_proj.weight is square, and wte.weight is a matrix as well.",
            "str.removeprefix removes a prefix where there is one. Only h.N.attn.bias and h.N.attn.masked_bias are "
            "buffers; h.N.attn.c_attn.bias is a bias. Four tensors of each layer are transposed: the matrices that "
            "are stored as [in, out].",
            "name.endswith(('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')) "
            "finds what to transpose, with .t(); name.endswith(('.attn.bias', '.attn.masked_bias')) finds what to "
            "leave out. Before you store a name, test whether it is there already.",
        ),
    ),
    Exercise(
        "dequantize_q4_1",
        points=5,
        minutes=20,
        difficulty=3,
        challenge=True,
        hints=(
            "Take one block apart on paper first: which bytes hold d, m, and elements 0, 1, 16 and 31?",
            "tensor.view(torch.float16) reads every two adjacent bytes of the last axis as one number, so the first "
            "four bytes of a block become d and m. & 0x0F gives the low half of each byte, >> 4 the high half.",
            "d, m = blocks[:, :4].view(torch.float16).float().split(1, dim=1); q = "
            "torch.cat((blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4), dim=1); return d * q + m",
        ),
    ),
]


def norm_in_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [
        [value / math.sqrt(sum(v * v for v in row) / len(row) + eps) * w for value, w in zip(row, weights, strict=True)]
        for row, weights in ((row, weight.tolist()) for row in x.double().reshape(-1, x.shape[-1]).tolist())
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def assert_norm(
    hw: Homework, x: Tensor, weight: Tensor, eps: float, *, atol: float = 1e-5, check_dtype: bool = False
) -> None:
    # What is expected comes first: an answer that changes x in place must not change the question.
    expected = norm_in_float64(x, weight, eps).to(x.dtype)
    assert_close(hw.rms_norm(x, weight, eps), expected, atol=atol, check_dtype=check_dtype)


def assert_qk_norm(hw: Homework, x: Tensor, q_weight: Tensor, k_weight: Tensor, num_qo_heads: int, eps: float) -> None:
    q, k = norm_in_float64(x[:, :num_qo_heads], q_weight, eps), norm_in_float64(x[:, num_qo_heads:], k_weight, eps)
    expected = torch.cat((q, k), dim=1).float()
    assert_values(hw.qk_norm(x, q_weight, k_weight, num_qo_heads, eps), expected, atol=2e-5)


def assert_rounded_once(got: Tensor, exact: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Rounding once changes a number by at most half of the distance to the next one, which is eps / 2 for 1."""
    bound = torch.finfo(dtype).eps / 2
    assert_close(got, exact.to(dtype), atol=1e-6, rtol=2 * bound)
    error = ((got.double() - exact).abs() / exact.abs().clamp(min=1e-6)).max().item()
    assert error < bound * 1.01, f"the largest relative error is {error:.2g}; rounding once adds at most {bound:.2g}"


# rms_norm -----------------------------------------------------------------------------------------------------------


@check(
    "rms_norm",
    mistake="divide by the root of the mean of the squares without subtracting a mean; multiply by w, not by 1 + w",
)
def test_a_row_whose_rms_is_three(hw: Homework) -> None:
    assert_norm(hw, torch.tensor([[1.0, -1.0, 3.0, 5.0]]), torch.ones(4), 0.0)


@check("rms_norm", mistake="every column has its own weight, and is multiplied by it after the division")
def test_norm_weight(hw: Homework) -> None:
    assert_norm(hw, torch.tensor([[1.0, -1.0, 3.0, 5.0]]), torch.tensor([1.0, 2.0, 0.0, -3.0]), 0.0)


@check("rms_norm", mistake="take the mean along the last axis only: every token (and head) is normalized on its own")
def test_each_row_is_normalized_alone(hw: Homework) -> None:
    for shape in ((3, 4), (3, 2, 4), (4,)):
        assert_norm(hw, 30 * torch.randn(shape), torch.randn(4), 1e-12)


@check("rms_norm", mistake="add the eps that you are given to the mean square, under the root")
def test_eps_is_inside_the_root(hw: Homework) -> None:
    assert_norm(hw, torch.randn(3, 4) / 10, torch.randn(4), 0.5)
    assert_values(hw.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-5), torch.zeros(1, 4))


@check(
    "rms_norm", mistake="the square of 300 overflows in float16: convert to a wider dtype before you square", costs=0.2
)
def test_large_float16_numbers(hw: Homework) -> None:
    x = torch.tensor([[300.0, -600.0, 900.0, 1200.0]], dtype=torch.float16)
    assert_norm(hw, x, torch.ones(4, dtype=torch.float16), 1e-5, atol=1e-3, check_dtype=True)


@check("rms_norm", mistake="compute in float32 up to and including the weight, and round once, at the end", costs=0.2)
def test_norm_of_bfloat16_is_rounded_once(hw: Homework) -> None:
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = norm_in_float64(x, weight, 1e-5)
    assert_rounded_once(hw.rms_norm(x, weight, 1e-5), exact)


@check(
    "rms_norm",
    mistake="the weight may be wider than x: do not round it to the dtype of x before you multiply",
    costs=0.2,
)
def test_a_weight_wider_than_x(hw: Homework) -> None:
    x, weight = torch.randn(16, 64).bfloat16(), 1 + torch.randn(64) / 100
    exact = norm_in_float64(x, weight, 1e-5)
    assert_rounded_once(hw.rms_norm(x, weight, 1e-5), exact)


@check("rms_norm", mistake="with a float64 weight, compute in float64, even if x is float32", costs=0.2)
def test_a_float64_weight(hw: Homework) -> None:
    x, weight = torch.randn(16, 64), torch.randn(64).double()
    exact = norm_in_float64(x, weight, 1e-5)
    assert_rounded_once(hw.rms_norm(x, weight, 1e-5), exact, torch.float32)


@check("rms_norm", mistake="float64 in, float64 out: some step converts to float32", costs=0.2)
def test_norm_of_float64_stays_float64(hw: Homework) -> None:
    assert_norm(hw, torch.randn(3, 5).double(), torch.randn(5).double(), 1e-5, atol=1e-12, check_dtype=True)
    assert_norm(hw, torch.randn(3, 5), torch.randn(5), 1e-5, check_dtype=True)


@check("rms_norm", mistake="you modified x: the layer still adds its result to that tensor")
def test_norm_leaves_its_input(hw: Homework) -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    hw.rms_norm(x, torch.randn(4), 1e-5)
    assert_equal(x, before, name="x")


# qk_norm ------------------------------------------------------------------------------------------------------------


@check("qk_norm", mistake="query heads and KV heads are both normalized, each of them to a root mean square of 1")
def test_one_head_of_each(hw: Homework) -> None:
    assert_qk_norm(hw, 30 * torch.randn(1, 2, 4), torch.ones(4), torch.ones(4), 1, 1e-12)


@check("qk_norm", mistake="normalize over the D numbers of one head, not over all heads of a token")
def test_each_head_is_normalized_alone(hw: Homework) -> None:
    x, weight = torch.randn(3, 3, 4) * torch.tensor([30.0, 300.0, 3000.0])[:, None], torch.randn(4)
    assert_qk_norm(hw, x, weight, weight, 2, 1e-12)


@check(
    "qk_norm", mistake="the first num_qo_heads heads are queries and use q_weight; the others are keys and use k_weight"
)
def test_queries_and_keys_have_their_own_weights(hw: Homework) -> None:
    assert_qk_norm(hw, 30 * torch.randn(2, 6, 4), torch.randn(4), torch.randn(4), 4, 1e-12)


@check("qk_norm", mistake="pass `eps` on to rms_norm, as it was given to you")
def test_eps_of_qk_norm(hw: Homework) -> None:
    assert_qk_norm(hw, torch.randn(2, 3, 4) / 10, torch.randn(4), torch.randn(4), 2, 0.5)


@check(
    "qk_norm",
    mistake="a bfloat16 head is rounded once, after its weight, which may be wider: leave the precision to rms_norm",
    costs=0.2,
)
def test_qk_norm_of_bfloat16_is_rounded_once(hw: Homework) -> None:
    x = torch.randn(16, 3, 64).bfloat16()
    for weight in (torch.randn(64).bfloat16(), 1 + torch.randn(64) / 100):
        exact = norm_in_float64(x, weight, 1e-5)
        assert_rounded_once(hw.qk_norm(x, weight, weight, 2, 1e-5), exact)


@check("qk_norm", mistake="you modified the tensor that you were given: it is a view of the projection's output")
def test_qk_norm_leaves_its_input(hw: Homework) -> None:
    x = torch.randn(2, 3, 4)
    before = x.clone()
    hw.qk_norm(x, torch.randn(4), torch.randn(4), 2, 1e-5)
    assert_equal(x, before, name="q_and_k")


# gated_mlp ----------------------------------------------------------------------------------------------------------


def times(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A projection, as the engine's models have them."""
    return lambda x: F.linear(x, weight)


def mlp_in_float64(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    x, gate, up, down = x.double(), gate.double(), up.double(), down.double()
    return (activation(x @ gate.T) * (x @ up.T)) @ down.T


def assert_mlp(hw: Homework, tokens: int, hidden: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
    x, gate, up, down = (torch.randn(*s) for s in ((tokens, hidden), (inner, hidden), (inner, hidden), (hidden, inner)))
    expected = mlp_in_float64(x, gate, up, down, activation).float()
    assert_values(hw.gated_mlp(x, times(torch.cat((gate, up))), times(down), activation), expected, atol=1e-4)


@check("gated_mlp", mistake="`down` is called with activation(gate) * up")
def test_one_inner_number(hw: Homework) -> None:
    x, gate_up, down = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), torch.tensor([[1.0], [5.0]])
    inner = 3 * 3 / (1 + math.exp(-3))  # gate and up are both 3
    assert_values(hw.gated_mlp(x, times(gate_up), times(down), F.silu), torch.tensor([[inner, 5 * inner]]))


@check("gated_mlp", mistake="apply the activation to the gate, the first I rows; the up projection has none")
def test_the_activation_is_on_the_gate(hw: Homework) -> None:
    x, gate_up, down = torch.tensor([[2.0]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5]])
    assert_values(hw.gated_mlp(x, times(gate_up), times(down), F.silu), torch.tensor([[-2 / (1 + math.exp(-2))]]))


@check("gated_mlp", mistake="the gate has the first I rows and the up projection the last I: they do not alternate")
def test_gate_and_up_are_two_halves(hw: Homework) -> None:
    assert_mlp(hw, 1, 3, 4, F.silu)


@check("gated_mlp", mistake="call the activation that you are given: it is SiLU in SwiGLU and GELU in GeGLU")
def test_swiglu_and_geglu(hw: Homework) -> None:
    assert_mlp(hw, 3, 5, 4, F.silu)
    assert_mlp(hw, 3, 5, 4, lambda gate: F.gelu(gate, approximate="tanh"))


@check("gated_mlp", mistake="it fails for a combination of sizes that the earlier checks did not try")
def test_mlp_sizes(hw: Homework) -> None:
    for tokens, hidden, inner in ((1, 1, 1), (7, 2, 9), (2, 9, 2), (0, 3, 3)):
        assert_mlp(hw, tokens, hidden, inner, F.silu)


@check("gated_mlp", mistake="the dtype of x is lost", costs=0.2)
def test_mlp_dtypes(hw: Homework) -> None:
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.3)):
        x, gate, up, down = (torch.randn(4, 4).to(dtype) for _ in range(4))
        expected = mlp_in_float64(x, gate, up, down, F.silu).to(dtype)
        assert_close(hw.gated_mlp(x, times(torch.cat((gate, up))), times(down), F.silu), expected, atol=atol)


# decoder_layer ------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """A random layer: its weights, separate and fused, and the arguments of its call."""

    hw: Homework
    spec: AttentionSpec
    x: Tensor
    parts: dict[str, Tensor]
    cos: Tensor
    sin: Tensor
    eps: float = 1e-12  # too small to matter: a wrong eps has a check of its own

    def weights(self) -> Any:
        p = self.parts
        return self.hw.LayerWeights(
            p["input_norm"],
            times(torch.cat((p["q"], p["k"], p["v"]))),
            times(p["o"]),
            p["mlp_norm"],
            times(torch.cat((p["gate"], p["up"]))),
            times(p["down"]),
            p.get("q_norm"),
            p.get("k_norm"),
        )

    def expected(self, attend: Callable[..., Tensor]) -> Tensor:
        p, x = self.parts, self.x
        h = norm_in_float64(x, p["input_norm"], self.eps).float()
        q, k, v = ((h @ p[name].T).unflatten(1, (-1, self.spec.head_dim)) for name in "qkv")
        if "q_norm" in p:
            q, k = (norm_in_float64(each, p[name], self.eps).float() for each, name in ((q, "q_norm"), (k, "k_norm")))
        out = attend(self.spec.layer, apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v)
        x = x + out.reshape(len(x), -1) @ p["o"].T
        h = norm_in_float64(x, p["mlp_norm"], self.eps)
        return x + mlp_in_float64(h, p["gate"], p["up"], p["down"], F.silu).float()

    def answer(self, attend: Callable[..., Tensor]) -> Tensor:
        return self.hw.decoder_layer(self.x, self.weights(), self.cos, self.sin, self.spec, attend, self.eps)

    def check(self, attend: Callable[..., Tensor]) -> None:
        expected = self.expected(attend)
        assert_close(self.answer(attend), expected, atol=2e-4)


def layer(
    hw: Homework,
    tokens: int = 3,
    hidden: int = 5,
    inner: int = 6,
    heads: tuple[int, int] = (1, 1),
    head_dim: int = 4,
    rotated: bool = True,
    qk_norm: bool = False,
) -> Layer:
    num_qo_heads, num_kv_heads = heads
    rows = {"q": num_qo_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    shapes = {name: (size, hidden) for name, size in rows.items()}
    shapes |= {"o": (hidden, rows["q"]), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    parts = {name: torch.randn(shape) / 2 for name, shape in shapes.items()}
    parts |= {"input_norm": torch.randn(hidden), "mlp_norm": torch.randn(hidden)}
    if qk_norm:
        parts |= {"q_norm": torch.randn(head_dim), "k_norm": torch.randn(head_dim)}
    spec = AttentionSpec(3, num_qo_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)
    angles = torch.randn(tokens, head_dim // 2) * rotated
    return Layer(hw, spec, 3 * torch.randn(tokens, hidden), parts, angles.cos(), angles.sin())


def attend_nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


def attend_itself(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees only itself: its output is its value."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def attend_to_all_three(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention, but every number of q, k and v has an effect of its own."""
    return q + k.repeat_interleave(2, dim=1) * v.repeat(1, 2, 1)


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(len(q))
    return masked_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=attention_mask(positions, positions))


@check("decoder_layer", mistake="the head size is spec.head_dim, which need not be hidden / heads")
def test_the_head_size(hw: Homework) -> None:
    seen: set[int] = set()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.add(q.shape[-1])
        return torch.zeros_like(q)

    layer(hw, hidden=8, heads=(4, 4), head_dim=6).answer(attend)  # 8 / 4 is 2
    assert seen <= {6}, f"spec.head_dim is 6, and attend gets heads of {', '.join(map(str, seen))}"


@check("decoder_layer", mistake="leave attention to attend: the layer itself has no mask and no softmax")
def test_attention_is_left_to_attend(hw: Homework) -> None:
    calls: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        return attend_itself(layer, q, k, v)

    layer(hw).answer(attend)
    assert calls, "attend was not called"


@check(
    "decoder_layer", mistake="where attention adds nothing, the result is x + mlp(norm(x)), with `mlp_norm` and SiLU"
)
def test_the_mlp_half(hw: Homework) -> None:
    layer(hw, rotated=False).check(attend_nothing)


@check("decoder_layer", mistake="the values come from the normalized x, go through attend and `o`, and are added to x")
def test_values_pass_through(hw: Homework) -> None:
    model = layer(hw, rotated=False)
    model.parts["down"].zero_()
    model.check(attend_itself)


@check("decoder_layer", mistake="the MLP reads the sum, after attention has been added to x, through `mlp_norm`")
def test_the_mlp_reads_the_sum(hw: Homework) -> None:
    layer(hw, rotated=False).check(attend_itself)


@check("decoder_layer", mistake="pass q to attend as it comes from the projection: attend scales the scores itself")
def test_attend_scales(hw: Homework) -> None:
    model, seen = layer(hw, rotated=False), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(q)
        return attend_itself(layer, q, k, v)

    model.expected(attend)
    model.answer(attend)
    assert_values(seen[1], seen[0], atol=2e-4, name="the tensor q that attend gets")


@check(
    "decoder_layer",
    mistake="qkv has the rows of all query heads, then the keys of all KV heads, then their values; the heads of one "
    "token enter `o` side by side",
)
def test_grouped_heads(hw: Homework) -> None:
    model = layer(hw, heads=(4, 2), rotated=False)
    seen: dict[str, list[int]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.update(q=list(q.shape), k=list(k.shape), v=list(v.shape))
        return attend_itself(layer, q, k, v)

    model.answer(attend)
    assert_equal(seen, {"q": [3, 4, 4], "k": [3, 2, 4], "v": [3, 2, 4]}, name="what attend gets", mistake="")
    model.check(attend_itself)
    model.check(attend_to_all_three)


@check(
    "decoder_layer",
    mistake="rotate queries and keys before attend sees them, with half-split pairs, as `apply_rope` does by default, "
    "and leave the values alone",
)
def test_rotation(hw: Homework) -> None:
    layer(hw, heads=(4, 2)).check(attend_causally)


@check("decoder_layer", mistake="with q_norm and k_norm, queries and keys pass through qk_norm, each with its weight")
def test_qk_norm_in_the_layer(hw: Homework) -> None:
    layer(hw, heads=(4, 2), rotated=False, qk_norm=True).check(attend_to_all_three)


@check(
    "decoder_layer", mistake="QK-norm comes before the rotation: a pair is rotated after its two weights are applied"
)
def test_qk_norm_comes_before_the_rotation(hw: Homework) -> None:
    layer(hw, heads=(4, 2), qk_norm=True).check(attend_causally)


@check("decoder_layer", mistake="every norm of the layer uses the eps that you are given")
def test_eps_of_the_layer(hw: Homework) -> None:
    model = layer(hw, heads=(4, 2), qk_norm=True)
    model.eps = 0.5
    model.check(attend_causally)


@check("decoder_layer", mistake="call attend exactly once, with spec.layer: it stores keys and values at every call")
def test_attend_is_called_once(hw: Homework) -> None:
    model, calls = layer(hw, heads=(2, 1)), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        return attend_causally(layer, q, k, v)

    model.answer(attend)
    assert_equal(len(calls), 1, name="the number of calls of attend")
    assert_equal(calls[0], model.spec.layer, name="the layer that attend gets")


@check("decoder_layer", mistake="you modified x: the caller may still need it")
def test_the_layer_leaves_its_input(hw: Homework) -> None:
    model = layer(hw)
    before = model.x.clone()
    model.answer(attend_causally)
    assert_equal(model.x, before, name="x")


@check("decoder_layer", mistake="it fails for a combination of sizes that the earlier checks did not try")
def test_layers_of_many_shapes(hw: Homework) -> None:
    for tokens, hidden, inner, heads, head_dim in ((1, 8, 3, (2, 2), 4), (5, 4, 9, (3, 1), 2), (4, 7, 5, (6, 3), 8)):
        layer(hw, tokens, hidden, inner, heads, head_dim).check(attend_causally)


@check("decoder_layer", mistake="30 of your layers in a row do not give the embedded model's answer", seconds=60)
def test_the_embedded_model_on_this_layer(hw: Homework) -> None:
    checkpoint = open_checkpoint("smollm2-135m-instruct")
    model = load_model(checkpoint, Parts(), torch.float32)
    tokenizer = load_tokenizer(checkpoint)
    ids = torch.tensor(tokenizer("The capital of France is").input_ids)
    assert isinstance(model, LlamaForCausalLM)
    with torch.inference_mode():
        x = model.embed(ids)
        cos, sin = rope_tables(torch.arange(len(ids)), model.inv_freq)
        for each in model.layers:
            attention, mlp = each.attention, each.mlp
            projections = attention.qkv, attention.o, each.mlp_norm, mlp.gate_up, mlp.down
            weights = hw.LayerWeights(each.input_norm, *projections)
            x = hw.decoder_layer(x, weights, cos, sin, each.spec, attend_causally, each.eps)
        best = model.compute_logits(rms_norm(x[-1:], model.norm, model.config.norm_eps)).argmax(-1)
    assert_equal(tokenizer.decode(best), " Paris", name="what follows 'The capital of France is'")


# load_weights -------------------------------------------------------------------------------------------------------


def tiny_model(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """A fused weight of two tensors and a norm: destinations, a checkpoint, and the fused weight."""
    fused, norm = torch.full((5, 3), 7.0, dtype=dtype), torch.full((3,), 7.0, dtype=dtype)
    tensors = {"norm": torch.randn(3), "k": torch.randn(2, 3), "q": torch.randn(3, 3)}
    return {"q": fused[:3], "k": fused[3:], "norm": norm}, tensors, fused


def assert_refused(hw: Homework, tensors: Mapping[str, Tensor], name: str) -> None:
    destinations, _, fused = tiny_model()
    try:
        hw.load_weights(destinations, tensors)
    except ModelLoadError as error:
        assert name in str(error), f"the message does not name the tensor {name!r}: {error}"
    else:
        raise AssertionError(f"this checkpoint should be refused with a ModelLoadError that names {name!r}")
    for place, tensor in (("the fused weight", fused), ("the norm", destinations["norm"])):
        name = f"{place}, which should be as it was before the call"
        assert_close(tensor, torch.full_like(tensor, 7.0), atol=0, name=name, mistake=CHECK_FIRST)


CHECK_FIRST = "you copied some tensors before you found the wrong one: check all of them first, then copy"


@check("load_weights", mistake="look tensors up by name, and write into the destination that you are given")
def test_every_tensor_is_copied(hw: Homework) -> None:
    destinations, tensors, fused = tiny_model()
    hw.load_weights(destinations, dict(tensors))
    assert_close(fused, torch.cat((tensors["q"], tensors["k"])), atol=0, name="the fused weight")
    assert_close(destinations["norm"], tensors["norm"], atol=0, name="the norm")


@check("load_weights", mistake="a destination keeps its dtype: the values are converted to it")
def test_values_are_converted(hw: Homework) -> None:
    destinations, tensors, fused = tiny_model(torch.bfloat16)
    hw.load_weights(destinations, dict(tensors))
    assert_close(fused, torch.cat((tensors["q"], tensors["k"])).bfloat16(), atol=0, name="the fused weight")


@check("load_weights", mistake="a tensor that the checkpoint lacks leaves a part of the model unfilled: raise")
def test_a_missing_tensor(hw: Homework) -> None:
    _, tensors, _ = tiny_model()
    for name in tensors:
        assert_refused(hw, {other: t for other, t in tensors.items() if other != name}, name)


@check("load_weights", mistake="a tensor that the model does not have means that the two do not match: raise")
def test_an_unknown_tensor(hw: Homework) -> None:
    _, tensors, _ = tiny_model()
    assert_refused(hw, tensors | {"k.bias": torch.zeros(2)}, "k.bias")


@check("load_weights", mistake="a tensor of a different shape must be refused, even if copy_ accepts it")
def test_a_wrong_shape(hw: Homework) -> None:
    _, tensors, _ = tiny_model()
    assert_refused(hw, tensors | {"k": torch.zeros(4, 3)}, "k")


@check("load_weights", mistake="copy_ broadcasts, and reshape and .T make shapes fit: compare the shapes yourself")
def test_a_shape_that_could_be_made_to_fit(hw: Homework) -> None:
    _, tensors, _ = tiny_model()
    for wrong in (
        torch.ones(3),
        torch.ones(1, 3),
        torch.ones(2, 1),
        torch.ones(3, 2),
        torch.ones(6),
        torch.ones(1, 2, 3),
    ):
        assert_refused(hw, tensors | {"k": wrong}, "k")


@check("load_weights", mistake="you modified the checkpoint: other models may be loaded from it")
def test_the_checkpoint_is_unchanged(hw: Homework) -> None:
    destinations, tensors, _ = tiny_model()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    hw.load_weights(destinations, tensors)
    assert_close(tensors, before, atol=0, name="the checkpoint")


@check("load_weights", mistake="the engine's Llama is not filled the way its own loader fills it")
def test_a_model_of_the_engine(hw: Homework) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 11}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    config = ModelConfig.from_hf({"model_type": "llama", "tie_word_embeddings": False} | sizes | heads)
    model = build_model(config, Parts(), torch.float32, "cpu")
    tensors = {name: torch.randn(place.shape) for name, place in model.destinations().items()}
    hw.load_weights(model.destinations(), dict(reversed(tensors.items())))
    assert_close(dict(model.destinations()), tensors, atol=0)
    layer = model.layers[1]
    assert isinstance(layer, LlamaLayer)
    rows = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert_close(layer.attention.qkv.weight.data, torch.cat(rows), atol=0, name="the fused qkv of layer 1")


# gpt2_weights -------------------------------------------------------------------------------------------------------

CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def gpt2_checkpoint(layers: int = 2, hidden: int = 4) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint without prefix, and what the map has to make of it."""
    ours = {
        "wte.weight": torch.randn(9, hidden),
        "wpe.weight": torch.randn(7, hidden),
        "ln_f.weight": torch.randn(hidden),
    }
    ours |= {"ln_f.bias": torch.randn(hidden), "lm_head.weight": torch.randn(9, hidden)}
    for i in range(layers):
        widths = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
        for name, (out, into) in widths.items():
            ours[f"h.{i}.{name}.weight"] = torch.randn(out * hidden, into * hidden)
            ours[f"h.{i}.{name}.bias"] = torch.randn(out * hidden)
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            ours[f"h.{i}.{name}"] = torch.randn(hidden)
    theirs = {n: w.T.contiguous() if n.removesuffix(".weight").endswith(CONV1D) else w for n, w in ours.items()}
    return theirs, ours


def prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name if name.startswith("lm_head") else f"transformer.{name}": t for name, t in tensors.items()}


def pick(tensors: Mapping[str, Tensor], *ends: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.endswith(ends)}


@check("gpt2_weights", mistake="remove `transformer.` from the beginning of the names that have it")
def test_the_prefix_goes(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(pick(prefixed(theirs), "ln_f.bias")), pick(ours, "ln_f.bias"), atol=0)


@check("gpt2_weights", mistake="a checkpoint without `transformer.` keeps its names")
def test_names_without_the_prefix_stay(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(pick(theirs, "ln_f.bias", "ln_1.bias")), pick(ours, "ln_f.bias", "ln_1.bias"), atol=0)


@check("gpt2_weights", mistake="c_attn and c_fc are stored as [in, out]: transpose them")
def test_wide_projections_are_transposed(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    ends = ("c_attn.weight", "c_fc.weight")
    assert_close(hw.gpt2_weights(pick(theirs, *ends)), pick(ours, *ends), atol=0)


@check(
    "gpt2_weights",
    mistake="both c_proj matrices are transposed as well; attention's is square, so its shape does not tell you",
)
def test_square_projections_are_transposed(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(pick(theirs, "c_proj.weight")), pick(ours, "c_proj.weight"), atol=0)


@check(
    "gpt2_weights",
    mistake="leave out only the two mask buffers: h.N.attn.c_attn.bias is a bias, although it also ends with attn.bias",
)
def test_no_weight_or_bias_is_lost(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    found = hw.gpt2_weights(theirs)
    missing = [name for name in ours if name not in found]
    assert not missing, f"{missing[0]} is missing in your result"


@check("gpt2_weights", mistake="only the four projections are transposed: embeddings, norms and biases are unchanged")
def test_everything_else_stays(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(theirs), ours, atol=0)
    assert_close(hw.gpt2_weights(prefixed(theirs)), ours, atol=0)


@check("gpt2_weights", mistake="leave out h.N.attn.bias and h.N.attn.masked_bias, which hold a mask, and nothing else")
def test_mask_buffers_are_left_out(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint(layers=12, hidden=2)
    buffers = {f"h.{i}.attn.bias": torch.ones(1, 1, 7, 7).tril() for i in range(12)}
    buffers |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(12)}
    assert_close(hw.gpt2_weights(theirs | buffers), ours, atol=0)
    assert_close(hw.gpt2_weights(prefixed(theirs | buffers)), ours, atol=0)


@check("gpt2_weights", mistake="you modified `tensors`, which is the caller's: build a dictionary of your own")
def test_the_callers_dictionary_stays(hw: Homework) -> None:
    theirs, _ = gpt2_checkpoint(layers=1)
    tensors = theirs | {"h.0.attn.bias": torch.ones(1, 1, 7, 7).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    for given in (tensors, prefixed(tensors)):
        before = dict(given)
        hw.gpt2_weights(given)
        assert_equal(sorted(given), sorted(before), name="the names in `tensors` after the call")
        assert all(given[name] is tensor for name, tensor in before.items()), "another tensor is in its place"


def assert_passed_on(hw: Homework, name: str, tensor: Tensor) -> None:
    found = hw.gpt2_weights({f"transformer.{name}": tensor})
    assert list(found) == [name], f"the name transformer.{name} became {', '.join(found) or 'nothing'}"
    assert_close(found[name], tensor, atol=0, name=f"the tensor {name}")


@check(
    "gpt2_weights",
    mistake="a tensor that GPT-2 does not have is passed on unchanged, even if its name ends with c_proj.weight or "
    "contains `transformer.` further on, and even if it has the shape of a buffer",
)
def test_unknown_names_are_kept(hw: Homework) -> None:
    names = ["adapter.weight", "h.0.attn.c_extra.weight", "h.0.transformer.weight"]
    for name in [*names, "h.0.crossattention.c_proj.weight"]:  # which GPT-2 has only with an encoder beside it
        assert_passed_on(hw, name, torch.randn(3, 3))
    for tensor in (torch.randn(1, 1, 2, 2), torch.tensor(0.5)):  # the shapes of the buffers, under another name
        assert_passed_on(hw, "adapter.gate", tensor)


@check("gpt2_weights", mistake="if two tensors get the same name, raise ModelLoadError")
def test_the_same_name_twice(hw: Homework) -> None:
    theirs, _ = gpt2_checkpoint(layers=1)
    for again in (torch.zeros(4), theirs["ln_f.bias"].clone(), theirs["ln_f.bias"]):  # equal or not
        assert_raises(ModelLoadError, hw.gpt2_weights, theirs | {"transformer.ln_f.bias": again})
        assert_raises(ModelLoadError, hw.gpt2_weights, {"transformer.ln_f.bias": again} | theirs)
    masks = {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 7, 7) for prefix in ("", "transformer.")}
    assert_close(hw.gpt2_weights(masks), {}, mistake="mask buffers get no name, so two of them are not an error")


@check("gpt2_weights", mistake="a transposed view is enough: copying every weight doubles the memory", costs=0.2)
def test_nothing_is_copied(hw: Homework) -> None:
    theirs, _ = gpt2_checkpoint(layers=1)
    found = hw.gpt2_weights(dict(theirs))
    copied = [name for name in theirs if found[name].data_ptr() != theirs[name].data_ptr()]
    assert not copied, f"{copied[0]} was copied"


@check("gpt2_weights", mistake="the engine cannot load a checkpoint through your map")
def test_the_engine_loads_through_the_map(hw: Homework) -> None:
    config = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_head": 2, "n_layer": 2, "n_positions": 7}
    theirs, ours = gpt2_checkpoint()
    parts = Parts(gpt2_weights=hw.gpt2_weights)
    model = build_model(ModelConfig.from_hf(config | {"tie_word_embeddings": False}), parts, torch.float32, "cpu")
    model.load_weights(prefixed(theirs))
    assert_close(dict(model.destinations()), ours, atol=0)


# dequantize_q4_1 ----------------------------------------------------------------------------------------------------


def blocks_of(d: float, m: float, data: list[int]) -> Tensor:
    head = torch.tensor([d, m], dtype=torch.float16).view(torch.uint8)
    return torch.cat((head, torch.tensor(data, dtype=torch.uint8)))[None]


def by_gguf(blocks: Tensor) -> Tensor:
    numbers = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_1)
    return torch.from_numpy(numbers).reshape(len(blocks), 32)


@check("dequantize_q4_1", mistake="where q is 0 the number is the minimum m, which is bytes 2 and 3 as one float16")
def test_the_minimum(hw: Homework) -> None:
    assert_values(hw.dequantize_q4_1(blocks_of(0.5, -3.0, [0] * 16)), torch.full((1, 32), -3.0))


@check("dequantize_q4_1", mistake="a number is d * q + m, with d from bytes 0 and 1; q is unsigned, between 0 and 15")
def test_the_scale(hw: Homework) -> None:
    assert_values(hw.dequantize_q4_1(blocks_of(0.5, -3.0, [0xFF] * 16)), torch.full((1, 32), 4.5))
    assert_values(hw.dequantize_q4_1(blocks_of(0.25, 1.0, [0x99] * 16)), torch.full((1, 32), 3.25))


@check(
    "dequantize_q4_1",
    mistake="the low half of byte i is element i and the high half is element i + 16, not 2i and 2i + 1",
)
def test_where_the_halves_go(hw: Homework) -> None:
    data = [i | (15 - i) << 4 for i in range(16)]
    expected = torch.tensor([[*range(16), *range(15, -1, -1)]], dtype=torch.float32)
    assert_values(hw.dequantize_q4_1(blocks_of(1.0, 0.0, data)), expected)


@check(
    "dequantize_q4_1",
    mistake="decode all blocks together: a Python loop over millions of blocks takes minutes",
    costs=0.2,
)
def test_without_a_loop(hw: Homework) -> None:
    small, large = (lines_run(hw.dequantize_q4_1, torch.zeros(n, 20, dtype=torch.uint8)) for n in (64, 512))
    assert_no_loop("dequantize_q4_1", small, large)


@check("dequantize_q4_1", mistake="every block has its own d and m")
def test_each_block_has_its_scale(hw: Homework) -> None:
    blocks = torch.cat(
        [blocks_of(d, m, [0x10 * i for i in range(16)]) for d, m in ((1.0, 0.0), (2.0, -7.0), (0.125, 3.0))]
    )
    assert_values(hw.dequantize_q4_1(blocks), by_gguf(blocks))


def random_blocks() -> Tensor:
    d, m = (torch.rand(300) / 50).tolist(), (torch.randn(300) / 20).tolist()
    data = torch.randint(256, (300, 16)).tolist()
    return torch.cat([blocks_of(scale, minimum, row) for scale, minimum, row in zip(d, m, data, strict=True)])


@check(
    "dequantize_q4_1", mistake="it fails for a combination of scale, minimum and values that earlier checks did not try"
)
def test_random_blocks(hw: Homework) -> None:
    blocks = random_blocks()
    before = blocks.clone()
    expected = by_gguf(blocks)
    assert_values(hw.dequantize_q4_1(blocks), expected, atol=5e-3)  # a half precision may compute d * q + m
    assert_equal(blocks, before, name="blocks", mistake="you modified the blocks: they are the caller's file")


@check("dequantize_q4_1", mistake="compute d * q + m in float32: float16 and bfloat16 round it", costs=0.2)
def test_computed_in_float32(hw: Homework) -> None:
    blocks = random_blocks()
    assert_close(hw.dequantize_q4_1(blocks), by_gguf(blocks), atol=1e-7)


@cache
def embedded_file() -> GGUFFile:
    return read_gguf(hub.embedded_gguf())


@cache
def by_the_engine(name: str) -> Tensor:
    return embedded_file().tensor(name)


class ReadersFile(GGUFFile):
    """The embedded GGUF file. Its Q4_1 tensors go through the answer; Q8_0 and float32 through the engine, once."""

    dequantize: Callable[[Tensor], Tensor]

    def tensor(self, name: str) -> Tensor:
        if self.tensors[name].type != "Q4_1":
            return by_the_engine(name)
        return type(self).dequantize(self.blocks(name)).reshape(self.tensors[name].shape)


@check(
    "dequantize_q4_1",
    mistake="with your numbers as weights, the embedded model does not write its answer",
    seconds=60,
    costs=0.2,  # the numbers are right; with a loop over blocks this check would run out of time
)
def test_the_embedded_model_writes_a_word(hw: Homework) -> None:
    opened = embedded_file()
    reader = type("OnAnswer", (ReadersFile,), {"dequantize": staticmethod(hw.dequantize_q4_1)})
    file = reader(opened.path, opened.metadata, opened.tensors)
    config = hf_config(file)
    model = build_model(ModelConfig.from_hf(config), Parts(), torch.float32, "cpu")
    model.load_weights(StoredTensors(*hf_tensors(file, config)))
    words = file.metadata["tokenizer.ggml.tokens"]
    tokens = [words.index(word) for word in ("The", "Ġcapital", "Ġof", "ĠFrance", "Ġis")]
    for _ in range(2):
        with torch.inference_mode():
            hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend_causally)
            tokens.append(int(model.compute_logits(hidden[-1:]).argmax()))
    assert_equal(words[tokens[-2]] + words[tokens[-1]], "ĠParis.", name="what follows 'The capital of France is'")
