"""Grader of chapter 03. The oracles compute in float64, one head, one name or one nibble at a time."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import torch
from torch import Tensor
from torch.nn import functional as F

from book.grading import Exercise, Homework, assert_close, assert_equal, assert_raises, check
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.loading import hub
from mini_engine.loading.checkpoint import StoredTensors
from mini_engine.loading.gguf import GGUFFile, hf_config, hf_tensors, read_gguf
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.rope import apply_rope

EXERCISES = [
    Exercise(
        "rms_norm",
        points=3,
        minutes=15,
        difficulty=1,
        part="rms_norm",
        hints=(
            "Root, mean, square: read the name from right to left. Over which axis is the mean, and does it stay in "
            "the shape so that the division can broadcast?",
            "x.square().mean(dim=-1, keepdim=True), plus eps, then the root. Do it in a dtype that is wide enough "
            "for the square of a large float16 number: torch.promote_types(x.dtype, torch.float32) names it, and the "
            "weight may be wider still.",
            "wide = x.to(dtype); return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * "
            "weight.to(dtype)).to(x.dtype). Only the last .to may round.",
        ),
    ),
    Exercise(
        "qk_norm",
        points=2,
        minutes=10,
        difficulty=1,
        part="qk_norm",
        hints=(
            "rms_norm takes any number of axes before the last. What is a row here?",
            "A row is one head of one token. Cut the head axis in two, at num_qo_heads: the two parts have different "
            "weights.",
            "torch.cat((rms_norm(q_and_k[:, :num_qo_heads], q_weight, eps), rms_norm(q_and_k[:, num_qo_heads:], "
            "k_weight, eps)), dim=1)",
        ),
    ),
    Exercise(
        "gated_mlp",
        points=3,
        minutes=15,
        difficulty=1,
        part="gated_mlp",
        hints=(
            "Two of the three projections read the same x. They lie in one weight, one above the other.",
            "F.linear(x, gate_up) has 2 I numbers for each token: the first I are the gate, the last I are up. "
            "Tensor.chunk cuts in this way.",
            "gate, up = F.linear(x, gate_up).chunk(2, dim=-1); return F.linear(activation(gate) * up, down)",
        ),
    ),
    Exercise(
        "decoder_layer",
        points=5,
        minutes=35,
        difficulty=2,
        hints=(
            "Write down the shape after every line. Which of them is [T, heads, D], and which is [T, hidden]?",
            "F.linear(normed, weights.qkv).unflatten(1, (-1, spec.head_dim)) has Hq + 2 Hk heads; Tensor.split takes a "
            "list of sizes and dim=1. What attend returns goes through .flatten(1) before `o`. The second norm reads "
            "the sum, not the x that came in.",
            "x = x + F.linear(attend(spec.layer, rotated_q, rotated_k, v).flatten(1), weights.o); return x + "
            "gated_mlp(rms_norm(x, weights.mlp_norm, eps), weights.gate_up, weights.down, F.silu). Write x = x + ..., "
            "never x += ....",
        ),
    ),
    Exercise(
        "gpt2_weights",
        points=4,
        minutes=25,
        difficulty=2,
        part="gpt2_weights",
        hints=(
            "Look at the names one by one and sort them into three kinds: leave out, transpose, keep. The shape does "
            "not tell the kinds apart: attn.c_proj.weight is square, and wte.weight is a matrix too.",
            "str.removeprefix takes the prefix off where there is one. To leave out h.0.attn.bias and keep "
            "h.0.attn.c_attn.bias, compare what follows the layer's number, not the end of the name.",
            "name.endswith(('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight')) is "
            "what to transpose, with .t(); name.endswith(('.attn.bias', '.attn.masked_bias')) is what to leave out. "
            "Before you store a name, ask whether it is there already.",
        ),
    ),
    Exercise(
        "softcapped",
        points=3,
        minutes=15,
        difficulty=1,
        hints=(
            "What would tanh make of a score of -inf? And of a score that is not scaled yet?",
            "The three steps stand in the docstring in their order. Cast first: a bfloat16 logit near 30 has steps of "
            "an eighth.",
            "y = x.to(torch.promote_types(x.dtype, torch.float32)) * scale; if cap is not None: "
            "y = cap * torch.tanh(y / cap); and last y.masked_fill(~mask, -math.inf) where there is a mask.",
        ),
    ),
    Exercise(
        "dequantize_q4_1",
        points=5,
        minutes=40,
        difficulty=3,
        challenge=True,
        hints=(
            "Take one block apart on paper first: which bytes are d, m, and elements 0, 1, 16 and 31?",
            "tensor.view(torch.float16) reads two bytes as one number, and needs them next to each other in memory: "
            "slice, then .contiguous(). & 0x0F gives the low half of each byte, >> 4 the high half.",
            "d, m = blocks[:, :4].contiguous().view(torch.float16).float().split(1, dim=1); q = "
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


def assert_norm(hw: Homework, x: Tensor, weight: Tensor, eps: float, *, atol: float = 1e-5) -> None:
    # What is expected comes first: an answer that changes x in place must not change the question.
    expected = norm_in_float64(x, weight, eps).to(x.dtype)
    assert_close(hw.rms_norm(x, weight, eps), expected, atol=atol)


def assert_qk_norm(hw: Homework, x: Tensor, q_weight: Tensor, k_weight: Tensor, num_qo_heads: int, eps: float) -> None:
    q, k = norm_in_float64(x[:, :num_qo_heads], q_weight, eps), norm_in_float64(x[:, num_qo_heads:], k_weight, eps)
    assert_close(hw.qk_norm(x, q_weight, k_weight, num_qo_heads, eps), torch.cat((q, k), dim=1).float())


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """bfloat16 keeps 8 bits: rounding once is off by at most 2**-8."""
    assert_close(got, exact.bfloat16(), atol=1e-6, rtol=2.0**-7)
    error = ((got.double() - exact).abs() / exact.abs().clamp(min=1e-6)).max()
    assert error < 2.0**-8 * 1.01, f"the largest relative error is {error:.4f}, rounding once makes 0.0039"


# rms_norm -----------------------------------------------------------------------------------------------------------


@check(
    "rms_norm",
    mistake="divide by the root of the mean of the squares, and subtract no mean; multiply by w, not by 1 + w",
)
def test_a_row_whose_rms_is_three(hw: Homework) -> None:
    assert_norm(hw, torch.tensor([[1.0, -1.0, 3.0, 5.0]]), torch.ones(4), 0.0)


@check("rms_norm", mistake="every column has a weight of its own, multiplied after the division")
def test_norm_weight(hw: Homework) -> None:
    assert_norm(hw, torch.tensor([[1.0, -1.0, 3.0, 5.0]]), torch.tensor([1.0, 2.0, 0.0, -3.0]), 0.0)


@check("rms_norm", mistake="the mean is over the last axis alone: every token (and head) has a norm of its own")
def test_each_row_is_normed_alone(hw: Homework) -> None:
    for shape in ((3, 4), (3, 2, 4), (4,)):
        assert_norm(hw, torch.randn(shape), torch.randn(4), 1e-12)


@check("rms_norm", mistake="eps is added to the mean square, inside the root, and not to the root")
def test_eps_is_inside_the_root(hw: Homework) -> None:
    assert_norm(hw, torch.randn(3, 4) / 10, torch.randn(4), 0.5)
    assert_close(hw.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-5), torch.zeros(1, 4))


@check("rms_norm", mistake="the square of 300 is infinite in float16: cast up before you square")
def test_large_float16_numbers(hw: Homework) -> None:
    x = torch.tensor([[300.0, -600.0, 900.0, 1200.0]], dtype=torch.float16)
    assert_norm(hw, x, torch.ones(4, dtype=torch.float16), 1e-5, atol=1e-3)


@check("rms_norm", mistake="compute in float32 up to and including the weight, and round once, at the end")
def test_norm_of_bfloat16_is_rounded_once(hw: Homework) -> None:
    x, weight = torch.randn(16, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = norm_in_float64(x, weight, 1e-5)
    assert_rounded_once(hw.rms_norm(x, weight, 1e-5), exact)


@check("rms_norm", mistake="the weight may be wider than x: do not round it to the dtype of x before you multiply")
def test_a_weight_wider_than_x(hw: Homework) -> None:
    x, weight = torch.randn(16, 64).bfloat16(), 1 + torch.randn(64) / 100
    exact = norm_in_float64(x, weight, 1e-5)
    assert_rounded_once(hw.rms_norm(x, weight, 1e-5), exact)


@check("rms_norm", mistake="float64 in, float64 out: somewhere on the way you cast to float32")
def test_norm_of_float64_stays_float64(hw: Homework) -> None:
    assert_norm(hw, torch.randn(3, 5).double(), torch.randn(5).double(), 1e-5, atol=1e-12)


@check("rms_norm", mistake="you changed x in place: the layer adds its result to that x")
def test_norm_leaves_its_input(hw: Homework) -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    hw.rms_norm(x, torch.randn(4), 1e-5)
    assert_equal(x, before, name="x")


# qk_norm ------------------------------------------------------------------------------------------------------------


@check(
    "qk_norm", mistake="the query head and the key head are two rows for rms_norm, not one, and not left as they are"
)
def test_one_head_of_each(hw: Homework) -> None:
    assert_qk_norm(hw, torch.randn(1, 2, 4), torch.ones(4), torch.ones(4), 1, 1e-5)


@check("qk_norm", mistake="the norm is over the D numbers of one head, not over all heads of a token")
def test_each_head_is_normed_alone(hw: Homework) -> None:
    x, weight = torch.randn(3, 3, 4) * torch.tensor([1.0, 10.0, 100.0])[:, None], torch.randn(4)
    assert_qk_norm(hw, x, weight, weight, 2, 1e-5)


@check(
    "qk_norm",
    mistake="the first num_qo_heads heads are queries and have q_weight, the others are keys and have k_weight",
)
def test_queries_and_keys_have_their_own_weights(hw: Homework) -> None:
    assert_qk_norm(hw, torch.randn(2, 6, 4), torch.randn(4), torch.randn(4), 4, 0.1)


@check("qk_norm", mistake="you wrote into the tensor that you were given: it is a view of the projection's output")
def test_qk_norm_leaves_its_input(hw: Homework) -> None:
    x = torch.randn(2, 3, 4)
    before = x.clone()
    hw.qk_norm(x, torch.randn(4), torch.randn(4), 2, 1e-5)
    assert_equal(x, before, name="q_and_k")


# gated_mlp ----------------------------------------------------------------------------------------------------------


def mlp_in_float64(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    x, gate, up, down = x.double(), gate.double(), up.double(), down.double()
    return (activation(x @ gate.T) * (x @ up.T)) @ down.T


def assert_mlp(hw: Homework, tokens: int, hidden: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
    x, gate, up, down = (torch.randn(*s) for s in ((tokens, hidden), (inner, hidden), (inner, hidden), (hidden, inner)))
    expected = mlp_in_float64(x, gate, up, down, activation).float()
    assert_close(hw.gated_mlp(x, torch.cat((gate, up)), down, activation), expected, atol=1e-4)


@check(
    "gated_mlp", mistake="each weight is [out, in] and stands for x @ W.T: down of the product activation(gate) * up"
)
def test_one_inner_number(hw: Homework) -> None:
    x, gate_up, down = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), torch.tensor([[1.0], [5.0]])
    inner = 3 * 3 / (1 + math.exp(-3))  # gate and up are both 3
    assert_close(hw.gated_mlp(x, gate_up, down, F.silu), torch.tensor([[inner, 5 * inner]]))


@check("gated_mlp", mistake="the activation belongs to the gate, the first I rows; up goes through unchanged")
def test_the_activation_is_on_the_gate(hw: Homework) -> None:
    x, gate_up, down = torch.tensor([[2.0]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.5]])
    assert_close(hw.gated_mlp(x, gate_up, down, F.silu), torch.tensor([[-2 / (1 + math.exp(-2))]]))


@check("gated_mlp", mistake="the gate is the first I rows and up the last I rows: they do not alternate")
def test_gate_and_up_are_two_halves(hw: Homework) -> None:
    assert_mlp(hw, 1, 3, 4, F.silu)


@check("gated_mlp", mistake="call the activation that you are given: SwiGLU passes SiLU, GeGLU passes GELU")
def test_swiglu_and_geglu(hw: Homework) -> None:
    assert_mlp(hw, 3, 5, 4, F.silu)
    assert_mlp(hw, 3, 5, 4, lambda gate: F.gelu(gate, approximate="tanh"))


@check("gated_mlp", mistake="some size goes wrong that the checks before did not try, or the dtype of x is lost")
def test_mlp_sizes_and_dtypes(hw: Homework) -> None:
    for tokens, hidden, inner in ((1, 1, 1), (7, 2, 9), (2, 9, 2), (0, 3, 3)):
        assert_mlp(hw, tokens, hidden, inner, F.silu)
    for dtype, atol in ((torch.float64, 1e-12), (torch.bfloat16, 0.3)):
        x, gate, up, down = (torch.randn(4, 4).to(dtype) for _ in range(4))
        expected = mlp_in_float64(x, gate, up, down, F.silu).to(dtype)
        assert_close(hw.gated_mlp(x, torch.cat((gate, up)), down, F.silu), expected, atol=atol)


# decoder_layer ------------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """A random layer, its weights apart and fused, and what it is called with."""

    hw: Homework
    spec: AttentionSpec
    x: Tensor
    parts: dict[str, Tensor]
    cos: Tensor
    sin: Tensor
    eps: float = 0.1

    def weights(self) -> Any:
        p = self.parts
        return self.hw.LayerWeights(
            p["input_norm"],
            torch.cat((p["q"], p["k"], p["v"])),
            p["o"],
            p["mlp_norm"],
            torch.cat((p["gate"], p["up"])),
            p["down"],
        )

    def expected(self, attend: Callable[..., Tensor]) -> Tensor:
        p, x = self.parts, self.x
        normed = norm_in_float64(x, p["input_norm"], self.eps).float()
        q, k, v = ((normed @ p[name].T).unflatten(1, (-1, self.spec.head_dim)) for name in "qkv")
        out = attend(self.spec.layer, apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v)
        x = x + out.reshape(len(x), -1) @ p["o"].T
        normed = norm_in_float64(x, p["mlp_norm"], self.eps)
        return x + mlp_in_float64(normed, p["gate"], p["up"], p["down"], F.silu).float()

    def answer(self, attend: Callable[..., Tensor]) -> Tensor:
        return self.hw.decoder_layer(self.x, self.weights(), self.cos, self.sin, self.spec, attend, self.eps)

    def check(self, attend: Callable[..., Tensor]) -> None:
        expected = self.expected(attend)
        assert_close(self.answer(attend), expected, atol=1e-4)


def layer(
    hw: Homework,
    tokens: int = 3,
    hidden: int = 5,
    inner: int = 6,
    heads: tuple[int, int] = (1, 1),
    head_dim: int = 4,
    turned: bool = True,
) -> Layer:
    num_qo_heads, num_kv_heads = heads
    rows = {"q": num_qo_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim}
    shapes = {name: (size, hidden) for name, size in rows.items()}
    shapes |= {"o": (hidden, rows["q"]), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    parts = {name: torch.randn(shape) / 2 for name, shape in shapes.items()}
    parts |= {"input_norm": torch.randn(hidden), "mlp_norm": torch.randn(hidden)}
    spec = AttentionSpec(3, 3, num_qo_heads, num_kv_heads, head_dim, scale=head_dim**-0.5)
    angles = torch.randn(tokens, head_dim // 2) * turned
    return Layer(hw, spec, torch.randn(tokens, hidden), parts, angles.cos(), angles.sin())


def attend_nothing(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.zeros_like(q)


def attend_itself(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every token sees itself alone: what comes back is its value."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def attend_to_all_three(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention, but every number of q, k and v has its own effect."""
    return q + k.repeat_interleave(2, dim=1) * v.repeat(1, 2, 1)


def attend_causally(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    positions = torch.arange(len(q))
    return masked_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=attention_mask(positions, positions))


@check("decoder_layer", mistake="the attention is whatever attend returns: the layer knows no mask and no softmax")
def test_attention_is_left_to_attend(hw: Homework) -> None:
    calls: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        return attend_itself(layer, q, k, v)

    layer(hw).answer(attend)
    assert calls, "attend was not called"


@check(
    "decoder_layer", mistake="what came in is added back, and the MLP reads the normed x: x + mlp(norm(x)), with SiLU"
)
def test_the_mlp_half(hw: Homework) -> None:
    layer(hw, turned=False).check(attend_nothing)


@check("decoder_layer", mistake="the attention half: values of the normed x, through attend, through o, added to x")
def test_values_pass_through(hw: Homework) -> None:
    model = layer(hw, turned=False)
    model.parts["down"].zero_()
    model.check(attend_itself)


@check("decoder_layer", mistake="the MLP reads the sum, after the attention has been added, with its own norm")
def test_the_mlp_reads_the_sum(hw: Homework) -> None:
    layer(hw, turned=False).check(attend_itself)


@check(
    "decoder_layer",
    mistake="qkv gives all query heads of a token, then its key heads, then its value heads; o takes them side by side",
)
def test_grouped_heads(hw: Homework) -> None:
    model = layer(hw, heads=(4, 2), turned=False)
    seen: dict[str, list[int]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.update(q=list(q.shape), k=list(k.shape), v=list(v.shape))
        return attend_itself(layer, q, k, v)

    model.answer(attend)
    assert_equal(seen, {"q": [3, 4, 4], "k": [3, 2, 4], "v": [3, 2, 4]}, name="what attend gets", mistake="")
    model.check(attend_itself)
    model.check(attend_to_all_three)


@check("decoder_layer", mistake="queries and keys are rotated before attend sees them, values are not")
def test_rotation(hw: Homework) -> None:
    layer(hw, heads=(4, 2)).check(attend_causally)


@check("decoder_layer", mistake="attend gets the index of the layer and is called once: it stores keys and values")
def test_attend_is_called_once(hw: Homework) -> None:
    model, calls = layer(hw, heads=(2, 1)), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        return attend_causally(layer, q, k, v)

    model.answer(attend)
    assert_equal(len(calls), 1, name="the number of calls of attend")
    assert_equal(calls[0], model.spec.layer, name="the layer that attend gets")


@check("decoder_layer", mistake="you changed x in place: the caller may still need it")
def test_the_layer_leaves_its_input(hw: Homework) -> None:
    model = layer(hw)
    before = model.x.clone()
    model.answer(attend_causally)
    assert_equal(model.x, before, name="x")


@check("decoder_layer", mistake="some mixture of sizes goes wrong that the checks before did not try")
def test_layers_of_many_shapes(hw: Homework) -> None:
    for tokens, hidden, inner, heads, head_dim in ((1, 8, 3, (2, 2), 4), (5, 4, 9, (3, 1), 2), (4, 7, 5, (6, 3), 8)):
        layer(hw, tokens, hidden, inner, heads, head_dim).check(attend_causally)


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


@check("gpt2_weights", mistake="take `transformer.` off the front of the names that have it")
def test_the_prefix_goes(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(pick(prefixed(theirs), "ln_f.bias")), pick(ours, "ln_f.bias"), atol=0)


@check("gpt2_weights", mistake="a checkpoint without `transformer.` keeps its names")
def test_names_without_the_prefix_stay(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(pick(theirs, "ln_f.bias", "ln_1.bias")), pick(ours, "ln_f.bias", "ln_1.bias"), atol=0)


@check("gpt2_weights", mistake="c_attn and c_fc lie as [in, out]: transpose them")
def test_wide_projections_are_transposed(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    ends = ("c_attn.weight", "c_fc.weight")
    assert_close(hw.gpt2_weights(pick(theirs, *ends)), pick(ours, *ends), atol=0)


@check("gpt2_weights", mistake="both c_proj are transposed too; attention's is square, so no shape will tell you")
def test_square_projections_are_transposed(hw: Homework) -> None:
    theirs, ours = gpt2_checkpoint()
    assert_close(hw.gpt2_weights(pick(theirs, "c_proj.weight")), pick(ours, "c_proj.weight"), atol=0)


@check(
    "gpt2_weights", mistake="only the four projections are transposed: embeddings, norms and biases stay as they are"
)
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


@check("gpt2_weights", mistake="keep what you do not know: the model refuses it, and the reader learns what is wrong")
def test_unknown_names_are_kept(hw: Homework) -> None:
    for name in ("adapter.weight", "h.0.attn.c_extra.weight"):
        adapter = torch.randn(2, 3)
        assert_close(hw.gpt2_weights({f"transformer.{name}": adapter}), {name: adapter}, atol=0)


@check("gpt2_weights", mistake="two tensors that get the same name are an error: raise ModelLoadError")
def test_the_same_name_twice(hw: Homework) -> None:
    theirs, _ = gpt2_checkpoint(layers=1)
    assert_raises(ModelLoadError, hw.gpt2_weights, theirs | {"transformer.ln_f.bias": torch.zeros(4)})
    assert_raises(ModelLoadError, hw.gpt2_weights, {"transformer.ln_f.bias": torch.zeros(4)} | theirs)


@check("gpt2_weights", mistake="a transposed view is enough: a copy of every weight doubles the memory")
def test_nothing_is_copied(hw: Homework) -> None:
    theirs, _ = gpt2_checkpoint(layers=1)
    before = dict(theirs)
    found = hw.gpt2_weights(theirs)
    copied = [name for name in theirs if found[name].data_ptr() != theirs[name].data_ptr()]
    assert not copied, f"{copied[0]} was copied"
    assert theirs.keys() == before.keys() and all(theirs[n] is t for n, t in before.items()), "you changed `tensors`"


@check("gpt2_weights", mistake="the engine cannot load a checkpoint through your map")
def test_the_engine_loads_through_the_map(hw: Homework) -> None:
    config = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 4, "n_head": 2, "n_layer": 2, "n_positions": 7}
    theirs, ours = gpt2_checkpoint()
    parts = Parts(gpt2_weights=hw.gpt2_weights)
    model = build_model(ModelConfig.from_hf(config | {"tie_word_embeddings": False}), parts, torch.float32, "cpu")
    model.load_weights(prefixed(theirs))
    assert_close(dict(model.destinations()), ours, atol=0)


# softcapped ---------------------------------------------------------------------------------------------------------


@check("softcapped", mistake="the soft-cap is cap * tanh(y / cap): small numbers pass, large ones stay below cap")
def test_one_number(hw: Homework) -> None:
    x = torch.tensor([0.1, 5.0, -50.0, 500.0])
    assert_close(hw.softcapped(x, 5.0), torch.tensor([5 * math.tanh(v / 5) for v in (0.1, 5.0, -50.0, 500.0)]))


@check("softcapped", mistake="without a cap (None) the numbers are only scaled and masked")
def test_no_cap(hw: Homework) -> None:
    x = torch.tensor([1.0, -20.0])
    assert_close(hw.softcapped(x, None), x)
    assert_close(hw.softcapped(x, None, scale=0.5), x / 2)


@check("softcapped", mistake="scale first, cap second: capped and then scaled, the bound is scale * cap")
def test_scale_before_cap(hw: Homework) -> None:
    assert_close(hw.softcapped(torch.tensor([4.0, 80.0]), 2.0, scale=0.25), torch.tensor([2 * math.tanh(0.5), 2.0]))


@check("softcapped", mistake="the mask comes last, and True is visible: tanh makes a visible -cap of a hidden -inf")
def test_mask_after_cap(hw: Homework) -> None:
    mask = torch.tensor([[True, False, False], [True, True, False]])
    expected = torch.tensor(
        [[2 * math.tanh(0.5), -math.inf, -math.inf], [2 * math.tanh(0.5), 2 * math.tanh(1.0), -math.inf]]
    )
    assert_close(hw.softcapped(torch.tensor([[1.0, 2.0, 3.0]] * 2), 2.0, mask=mask), expected)


@check("softcapped", mistake="the mask has fewer axes than the scores, and is the same for every head")
def test_a_mask_for_all_heads(hw: Homework) -> None:
    scores, mask = torch.randn(2, 3, 4, 4), torch.ones(4, 4, dtype=torch.bool).tril()
    exact = [3 * math.tanh(value / 3) for value in scores.double().flatten().tolist()]
    expected = torch.where(mask, torch.tensor(exact).reshape(scores.shape), -math.inf)
    assert_close(hw.softcapped(scores, 3.0, mask=mask), expected)
    assert_close(hw.softcapped(scores, 3.0, mask=mask).exp().isfinite().all(), torch.tensor(True))


@check("softcapped", mistake="cast to float32 first and stay there: bfloat16 logits near the cap become equal")
def test_logits_in_bfloat16(hw: Homework) -> None:
    logits = torch.linspace(20, 60, 9).bfloat16()
    capped = hw.softcapped(logits, 30.0)
    assert_close(capped, torch.tensor([30 * math.tanh(v / 30) for v in logits.tolist()]), atol=1e-4)
    assert (capped.diff() > 0).all(), "the cap keeps the order of the logits"


@check("softcapped", mistake="float64 in, float64 out; and leave x as it is")
def test_capped_float64(hw: Homework) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    before = x.clone()
    expected = torch.tensor([[2 * math.tanh(v * 3 / 2) for v in row] for row in x.tolist()], dtype=torch.float64)
    assert_close(hw.softcapped(x, 2.0, scale=3.0), expected, atol=1e-12)
    assert_equal(x, before, name="x")


# dequantize_q4_1 ----------------------------------------------------------------------------------------------------


def blocks_of(d: float, m: float, data: list[int]) -> Tensor:
    head = torch.tensor([d, m], dtype=torch.float16).view(torch.uint8)
    return torch.cat((head, torch.tensor(data, dtype=torch.uint8)))[None]


def by_gguf(blocks: Tensor) -> Tensor:
    numbers = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_1)
    return torch.from_numpy(numbers).reshape(len(blocks), 32)


@check("dequantize_q4_1", mistake="with all q at 0, every number is the minimum m, bytes 2 and 3 as one float16")
def test_the_minimum(hw: Homework) -> None:
    assert_close(hw.dequantize_q4_1(blocks_of(0.5, -3.0, [0] * 16)), torch.full((1, 32), -3.0))


@check(
    "dequantize_q4_1", mistake="a number is d * q + m, with d from bytes 0 and 1; q counts from 0 to 15 and has no sign"
)
def test_the_scale(hw: Homework) -> None:
    assert_close(hw.dequantize_q4_1(blocks_of(0.5, -3.0, [0xFF] * 16)), torch.full((1, 32), 4.5))
    assert_close(hw.dequantize_q4_1(blocks_of(0.25, 1.0, [0x99] * 16)), torch.full((1, 32), 3.25))


@check(
    "dequantize_q4_1", mistake="the low half of byte i is element i, the high half element i + 16: not 2i and 2i + 1"
)
def test_where_the_halves_go(hw: Homework) -> None:
    data = [i | (15 - i) << 4 for i in range(16)]
    expected = torch.tensor([[*range(16), *range(15, -1, -1)]], dtype=torch.float32)
    assert_close(hw.dequantize_q4_1(blocks_of(1.0, 0.0, data)), expected)


@check("dequantize_q4_1", mistake="every block has its own d and m")
def test_each_block_has_its_scale(hw: Homework) -> None:
    blocks = torch.cat(
        [blocks_of(d, m, [0x10 * i for i in range(16)]) for d, m in ((1.0, 0.0), (2.0, -7.0), (0.1, 3.0))]
    )
    assert_close(hw.dequantize_q4_1(blocks), by_gguf(blocks))


@check("dequantize_q4_1", mistake="compute in float32: float16 and bfloat16 round d * q + m")
def test_random_blocks(hw: Homework) -> None:
    d, m = torch.rand(300) / 50, torch.randn(300) / 20
    data = torch.randint(256, (300, 16)).tolist()
    blocks = torch.cat(
        [blocks_of(scale, minimum, row) for scale, minimum, row in zip(d.tolist(), m.tolist(), data, strict=True)]
    )
    before = blocks.clone()
    assert_close(hw.dequantize_q4_1(blocks), by_gguf(blocks), atol=1e-7)
    assert_equal(blocks, before, name="blocks")


class ReadersFile(GGUFFile):
    """A GGUF file whose Q4_1 tensors go through the answer; Q8_0 and float32 through the engine."""

    dequantize: Callable[[Tensor], Tensor]

    def tensor(self, name: str) -> Tensor:
        if self.tensors[name].type != "Q4_1":
            return super().tensor(name)
        return type(self).dequantize(self.blocks(name)).reshape(self.tensors[name].shape)


@check(
    "dequantize_q4_1",
    mistake="the model does not write its sentence on your numbers; or they took too long: no loop over blocks",
    seconds=60,
)
def test_the_embedded_model_writes_a_word(hw: Homework) -> None:
    opened = read_gguf(hub.embedded_gguf())
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
