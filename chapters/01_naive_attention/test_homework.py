"""Grader of chapter 01. The oracles below are loops in Python floats: they know nothing of tensors' shapes."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from book.grading import Exercise, Homework, assert_close, assert_equal, check

EXERCISES = [
    Exercise(
        "masked_attention",
        points=5,
        minutes=35,
        difficulty=2,
        part="masked_attention",
        hints=(
            "Write it for one query head and one key head first. Then ask: which axis of q do the heads of a group "
            "lie on, and can it be cut in two?",
            "q.unflatten(1, (Hk, -1)) has the shape [n, Hk, G, D]. torch.einsum('nhgd,mhd->hgnm', ...) multiplies it "
            "with k [m, Hk, D] and copies nothing. The bias needs the same cut of its head axis.",
            "After the four steps: weights = scores.softmax(-1); a row of -inf became NaN, so "
            "weights.masked_fill(scores == -math.inf, 0.0); then einsum('hgnm,mhd->nhgd', weights, v), flatten the two "
            "head axes, and cast to q.dtype. Cast q, k, v and the bias up first: "
            "torch.promote_types(q.dtype, torch.float32).",
        ),
    ),
    Exercise(
        "ragged_causal_attention",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "One loop over the sequences is fine. What is the position of the first query of a sequence that has "
            "m keys and n queries?",
            "Its position is m - n: query i sees the keys 0 to m - n + i. The diagonal of the mask ends in the "
            "bottom right corner, not the top left one. A sequence without queries has an empty slice, and that is "
            "all it needs.",
            "mask = torch.ones(n, m, dtype=torch.bool).tril(m - n), and "
            "out[rows] = masked_attention(q[rows], k[keys], v[keys], scale=scale, mask=mask) for the slices rows and "
            "keys that the two indptr give.",
        ),
    ),
    Exercise(
        "rope_tables",
        points=1,
        minutes=5,
        difficulty=1,
        hints=(
            "Which angle has a pair of frequency f at position p?",
            "Every position meets every frequency: one of the two tensors needs a new axis.",
            "angles = positions[:, None].to(inv_freq.dtype) * inv_freq; return angles.cos(), angles.sin()",
        ),
    ),
    Exercise(
        "apply_rope",
        points=4,
        minutes=25,
        difficulty=2,
        part="apply_rope",
        hints=(
            "Cut x into two tensors a and b of half the width, so that pair i is (a[i], b[i]). Only the cut, and how "
            "the halves go back together, depend on the convention.",
            "Half-split: x.chunk(2, dim=-1) and torch.cat. Interleaved: x[..., 0::2], x[..., 1::2] and "
            "torch.stack(..., dim=-1).flatten(-2). cos and sin have no axis for the heads: give them one.",
            "cos, sin = cos[:, None].float(), sin[:, None].float(); the turned halves are (a * cos - b * sin) and "
            "(b * cos + a * sin); join them and cast to x.dtype. For float64, "
            "torch.promote_types(x.dtype, torch.float32) names the dtype to compute in.",
        ),
    ),
    Exercise(
        "attention_cost",
        points=3,
        minutes=20,
        difficulty=2,
        hints=(
            "Count the True cells of the mask first. The queries are the last ones: how many keys does the first of "
            "them see?",
            "The first query sees num_keys - num_queries + 1 keys, the last one all of them, in steps of one: sum "
            "the series. For the bytes, ask of each tensor which head count it has.",
            "pairs = n * m - n * (n - 1) // 2; flops = 4 * pairs * num_qo_heads * head_dim; numbers = 2 * n * Hq * D "
            "(q and the output) + 2 * m * Hk * D (k and v); bytes = numbers * dtype_bytes.",
        ),
    ),
    Exercise(
        "attention_bias",
        points=4,
        minutes=20,
        difficulty=3,
        challenge=True,
        hints=(
            "Everything is a function of one matrix: the distance of each query from each key.",
            "Decide first which cells are hidden, as a boolean matrix. Multiplying a mask by -inf makes NaN of every "
            "0: use masked_fill instead.",
            "hidden = (distance < 0) | (distance >= window); "
            "(slopes[:, None, None] * -distance).float().masked_fill(hidden, -math.inf), with a single slope of 0 "
            "where none are given.",
        ),
    ),
]


def attention_in_floats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The specification of masked_attention, one number at a time."""
    group = q.shape[1] // k.shape[1]
    queries, keys = q.double().tolist(), k.double().tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, heads in enumerate(queries):
        for h, query in enumerate(heads):
            weights = torch.zeros(len(keys), dtype=torch.float64)
            for j, key_heads in enumerate(keys):
                score = sum(a * b for a, b in zip(query, key_heads[h // group], strict=True)) * scale
                score = softcap * math.tanh(score / softcap) if softcap is not None else score
                score += float(bias[h, i, j]) if bias is not None else 0.0
                weights[j] = math.exp(score) if mask is None or mask[i, j] else 0.0
            if weights.sum() > 0:
                out[i, h] = (weights / weights.sum()) @ v[:, h // group].double()
    return out.to(q.dtype)


def assert_attention(
    hw: Homework, q: Tensor, k: Tensor, v: Tensor, scale: float, *, atol: float = 1e-5, **options: Any
) -> None:
    # What is expected comes first: an answer that changes q in place must not change the question.
    expected = attention_in_floats(q, k, v, scale, **options)
    assert_close(hw.masked_attention(q, k, v, scale=scale, **options), expected, atol=atol)


def ragged_in_floats(q: Tensor, k: Tensor, v: Tensor, qo_lens: list[int], kv_lens: list[int], scale: float) -> Tensor:
    """Each query alone with the keys that it sees."""
    rows, first_query, first_key = [], 0, 0
    for num_queries, num_keys in zip(qo_lens, kv_lens, strict=True):
        for i in range(num_queries):
            seen = slice(first_key, first_key + num_keys - num_queries + i + 1)
            query = q[first_query + i : first_query + i + 1]
            rows.append(attention_in_floats(query, k[seen], v[seen], scale))
        first_query, first_key = first_query + num_queries, first_key + num_keys
    return torch.cat(rows)


def random_qkv(
    n: int, m: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(s, h, head_dim) for s, h in ((n, num_qo_heads), (m, num_kv_heads), (m, num_kv_heads)))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def call_ragged(hw: Homework, q: Tensor, k: Tensor, v: Tensor, qo_lens: list[int], kv_lens: list[int]) -> Tensor:
    bounds = [torch.tensor([0, *lens]).cumsum(0) for lens in (qo_lens, kv_lens)]
    return hw.ragged_causal_attention(q, k, v, *bounds, scale=0.5)


class LargestStorage(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation inside the block has made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return made


# masked_attention ---------------------------------------------------------------------------------------------------


@check(
    "masked_attention", mistake="with one key its weight is 1, so the output is that key's value, whatever the score"
)
def test_one_query_one_key(hw: Homework) -> None:
    q, k, v = random_qkv(1, 1, 1, 1, 4)
    assert_close(hw.masked_attention(q, k, v, scale=0.5), v)


@check(
    "masked_attention", mistake="the softmax runs over the wrong axis: the weights of one query over all keys sum to 1"
)
def test_one_query_two_keys(hw: Homework) -> None:
    q, v = torch.ones(1, 1, 1), torch.tensor([4.0, 8.0]).view(2, 1, 1)
    k = torch.tensor([0.0, math.log(3.0)]).view(2, 1, 1)
    assert_close(hw.masked_attention(q, k, v, scale=1.0), torch.full((1, 1, 1), 7.0))


@check("masked_attention", mistake="the scores are not multiplied by `scale`: use the argument, not 1/sqrt(D)")
def test_scale(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 1, 1, 4)
    assert_attention(hw, q, k, v, 0.3)


@check("masked_attention", mistake="the heads see one another's keys, or come back in another order")
def test_heads_are_independent(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 2, 4)
    assert_attention(hw, q, k, v, 0.5)


@check(
    "masked_attention",
    mistake="query head h reads key head h // G with G = Hq // Hk: neighbours share, not every Hk-th",
)
def test_two_heads_share_a_key(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 4, 2, 4)
    assert_attention(hw, q, k, v, 0.5)


@check("masked_attention", mistake="a hidden key still has weight, or the mask is upside down: True means visible")
def test_mask(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 1, 4)
    mask = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert_attention(hw, q, k, v, 0.5, mask=mask)


@check("masked_attention", mistake="a query that sees no key has to get 0: the softmax of a row of -inf is NaN")
def test_a_query_that_sees_nothing(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 2, 1, 4)
    mask = torch.tensor([[False, False, False], [True, True, False]])
    assert_attention(hw, q, k, v, 0.5, mask=mask)


@check(
    "masked_attention",
    mistake="the bias is added to the scores, one for each query head: cut its head axis like that of q",
)
def test_the_bias_has_query_heads(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 4, 2, 4)
    assert_attention(hw, q, k, v, 1.0, bias=torch.randn(4, 2, 3))


@check("masked_attention", mistake="the bias is added to the scores that are already scaled: scale first, then add")
def test_bias_is_not_scaled(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 4, 2, 4)
    assert_attention(hw, q, k, v, 0.125, bias=torch.randn(4, 2, 3))


@check("masked_attention", mistake="the soft-cap is softcap * tanh(s / softcap) of the scaled score")
def test_softcap(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 2, 1, 4)
    assert_attention(hw, 4 * q, k, v, 0.5, softcap=1.5)


@check(
    "masked_attention",
    mistake="the soft-cap comes before bias and mask: tanh turns a hidden -inf into a visible -softcap",
)
def test_softcap_before_bias_and_mask(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 1, 4)
    mask, bias = torch.ones(3, 4, dtype=torch.bool).tril(1), torch.randn(2, 3, 4)
    assert_attention(hw, q, k, v, 0.5, mask=mask, bias=bias, softcap=1.5)


@check("masked_attention", mistake="compute in float32 and round once, at the end: bfloat16 keeps 8 bits")
def test_bfloat16_is_rounded_once(hw: Homework) -> None:
    q, k, v = random_qkv(4, 64, 2, 1, 32, torch.bfloat16)
    exact = attention_in_floats(q.double(), k.double(), v.double(), 0.5)
    got = hw.masked_attention(q, k, v, scale=0.5)
    assert_close(got, exact.bfloat16(), atol=1e-6, rtol=2.0**-7)
    rounding = (got.double() - exact).abs() / exact.abs()
    assert rounding.max() < 2.0**-8 * 1.01, (
        f"the largest relative error is {rounding.max():.4f}, one rounding is 0.0039"
    )


@check("masked_attention", mistake="float64 in, float64 out: somewhere on the way you cast to float32")
def test_float64_stays_float64(hw: Homework) -> None:
    q, k, v = random_qkv(2, 5, 2, 1, 4, torch.float64)
    bias = torch.randn(2, 2, 5, dtype=torch.float64)
    assert_attention(hw, q, k, v, 0.5, bias=bias, atol=1e-12)


@check(
    "masked_attention", mistake="you copy the keys or values for every query head; give the group an axis of its own"
)
def test_keys_are_not_copied(hw: Homework) -> None:
    q, k, v = random_qkv(1, 64, 16, 2, 32)
    with LargestStorage() as largest:
        hw.masked_attention(q, k, v, scale=0.5)
    size = largest.nbytes // k.nbytes
    assert size <= 2, f"some operation makes a tensor {size} times as large as the keys"


@check("masked_attention", mistake="some mixture of sizes or options goes wrong that the checks before did not try")
def test_random_cases(hw: Homework) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        n, m, num_kv_heads, group, head_dim = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(5))
        q, k, v = random_qkv(n, m, num_kv_heads * group, num_kv_heads, head_dim)
        mask, bias = torch.rand(n, m) < 0.7, torch.randn(num_kv_heads * group, n, m)
        assert_attention(hw, q, k, v, 0.7, mask=mask, bias=bias, softcap=3.0)


# ragged_causal_attention --------------------------------------------------------------------------------------------


@check("ragged_causal_attention", mistake="a token sees itself: the diagonal of the mask belongs to the visible part")
def test_one_token_sees_itself(hw: Homework) -> None:
    q, k, v = random_qkv(1, 1, 2, 1, 4)
    assert_close(call_ragged(hw, q, k, v, [1], [1]), attention_in_floats(q, k, v, 0.5))


@check("ragged_causal_attention", mistake="a query sees keys that come after its own token")
def test_no_query_sees_the_future(hw: Homework) -> None:
    q, k, v = random_qkv(4, 4, 2, 1, 4)
    before = call_ragged(hw, q, k, v, [4], [4])
    assert_close(before, ragged_in_floats(q, k, v, [4], [4], 0.5))
    k[-1] += 1.0
    v[-1] += 1.0
    assert_close(call_ragged(hw, q, k, v, [4], [4])[:3], before[:3])


@check(
    "ragged_causal_attention",
    mistake="the queries are the last tokens of the sequence, so the first of n sees m - n + 1 keys; or k and v are "
    "cut by qo_indptr",
)
def test_queries_are_the_last_of_the_keys(hw: Homework) -> None:
    q, k, v = random_qkv(2, 5, 2, 1, 4)
    assert_close(call_ragged(hw, q, k, v, [2], [5]), ragged_in_floats(q, k, v, [2], [5], 0.5))


@check("ragged_causal_attention", mistake="a query sees the keys of another sequence")
def test_sequences_do_not_see_each_other(hw: Homework) -> None:
    q, k, v = random_qkv(5, 5, 2, 1, 4)
    assert_close(call_ragged(hw, q, k, v, [2, 3], [2, 3]), ragged_in_floats(q, k, v, [2, 3], [2, 3], 0.5))


@check(
    "ragged_causal_attention",
    mistake="queries and keys have bounds of their own: qo_indptr for q, kv_indptr for k and v",
)
def test_queries_and_keys_have_their_own_bounds(hw: Homework) -> None:
    q, k, v = random_qkv(4, 9, 2, 1, 4)
    assert_close(call_ragged(hw, q, k, v, [1, 3], [5, 4]), ragged_in_floats(q, k, v, [1, 3], [5, 4], 0.5))


@check(
    "ragged_causal_attention", mistake="a sequence without queries in this step still owns its keys, and yields no row"
)
def test_a_sequence_without_queries(hw: Homework) -> None:
    q, k, v = random_qkv(3, 8, 2, 1, 4)
    got = call_ragged(hw, q, k, v, [2, 0, 1], [2, 4, 2])
    assert_close(got, ragged_in_floats(q, k, v, [2, 0, 1], [2, 4, 2], 0.5))


@check("ragged_causal_attention", mistake="the order of the sequences changes their results")
def test_neighbours_do_not_matter(hw: Homework) -> None:
    lens = [(3, 7), (1, 9), (4, 4)]
    parts = [random_qkv(n, m, 4, 2, 8) for n, m in lens]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        q, k, v = (torch.cat([parts[b][i] for b in order]) for i in range(3))
        qo_lens, kv_lens = [lens[b][0] for b in order], [lens[b][1] for b in order]
        got = call_ragged(hw, q, k, v, qo_lens, kv_lens)
        assert_close(got, ragged_in_floats(q, k, v, qo_lens, kv_lens, 0.5))


# rope_tables --------------------------------------------------------------------------------------------------------


@check("rope_tables", mistake="the cosine comes first, then the sine, both of position * frequency in radians")
def test_a_right_angle(hw: Homework) -> None:
    cos, sin = hw.rope_tables(torch.tensor([0, 1]), torch.tensor([math.pi / 2]))
    assert_close(cos, torch.tensor([[1.0], [0.0]]), atol=1e-6, name="cos")
    assert_close(sin, torch.tensor([[0.0], [1.0]]), atol=1e-6, name="sin")


@check("rope_tables", mistake="every token needs the angles of all D/2 pairs: [T, D/2], one row per token")
def test_every_position_meets_every_frequency(hw: Homework) -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    cos, _ = hw.rope_tables(torch.arange(2), inv_freq)
    assert_close(cos, torch.tensor([[1.0, 1.0, 1.0], [math.cos(1.0), math.cos(0.1), math.cos(0.01)]]), atol=1e-6)


@check("rope_tables", mistake="you count the tokens from 0 instead of reading their positions")
def test_positions_come_in_any_order(hw: Homework) -> None:
    positions, inv_freq = [7, 2, 2, 900], [1.0, 0.03]
    cos, sin = hw.rope_tables(torch.tensor(positions), torch.tensor(inv_freq))
    assert_close(cos, torch.tensor([[math.cos(p * f) for f in inv_freq] for p in positions]), atol=1e-4)
    assert_close(sin, torch.tensor([[math.sin(p * f) for f in inv_freq] for p in positions]), atol=1e-4)


@check(
    "rope_tables", mistake="the angles are computed in another dtype than that of inv_freq and lose their last digits"
)
def test_tables_have_the_precision_of_the_frequencies(hw: Homework) -> None:
    inv_freq = torch.tensor([0.3], dtype=torch.float64)
    cos, _ = hw.rope_tables(torch.tensor([100_003]), inv_freq)
    assert_close(cos, torch.tensor([[math.cos(100_003 * 0.3)]], dtype=torch.float64), atol=1e-9)


# apply_rope ---------------------------------------------------------------------------------------------------------


def quarter_turns(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(tokens, pairs), torch.ones(tokens, pairs)


def turned_in_floats(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pair by pair in Python floats."""
    out = x.double().clone()
    half = x.shape[-1] // 2
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(half):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                a, b, angle = float(x[t, h, first]), float(x[t, h, second]), float(angles[t, i])
                out[t, h, first] = a * math.cos(angle) - b * math.sin(angle)
                out[t, h, second] = b * math.cos(angle) + a * math.sin(angle)
    return out.to(x.dtype)


@check(
    "apply_rope", mistake="an angle of 0 leaves x as it is: cos and sin are swapped, or the pairs come back elsewhere"
)
def test_an_angle_of_zero_changes_nothing(hw: Homework) -> None:
    x = torch.randn(1, 3, 6)
    assert_close(hw.apply_rope(x, torch.ones(1, 3), torch.zeros(1, 3)), x)


def assert_unchanged(hw: Homework, interleaved: bool) -> None:
    x = torch.randn(1, 1, 4)
    before = x.clone()
    hw.apply_rope(x, *quarter_turns(1, 2), interleaved=interleaved)
    assert_equal(x, before, name="x after the call")


@check("apply_rope", mistake="you turn x in place: the second half is computed from a first that is turned already")
def test_the_input_is_unchanged(hw: Homework) -> None:
    assert_unchanged(hw, interleaved=False)


@check(
    "apply_rope", mistake="a right angle turns (a, b) into (-b, a), pair i being (x[i], x[i + D/2]): look at your signs"
)
def test_a_right_angle_half_split(hw: Homework) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    assert_close(hw.apply_rope(x, *quarter_turns(1, 2)), torch.tensor([-3.0, -4.0, 1.0, 2.0]).view(1, 1, 4))


@check("apply_rope", mistake="with interleaved=True you turn x in place: the caller still needs it")
def test_the_input_is_unchanged_interleaved(hw: Homework) -> None:
    assert_unchanged(hw, interleaved=True)


@check(
    "apply_rope",
    mistake="with interleaved=True pair i is (x[2i], x[2i + 1]), and the result stands where the pair stood",
)
def test_a_right_angle_interleaved(hw: Homework) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    got = hw.apply_rope(x, *quarter_turns(1, 2), interleaved=True)
    assert_close(got, torch.tensor([-2.0, 1.0, -4.0, 3.0]).view(1, 1, 4))


@check(
    "apply_rope",
    mistake="each token has angles of its own, and all its heads share them: the new axis of cos is the second",
)
def test_tokens_turn_and_heads_agree(hw: Homework) -> None:
    angles = torch.tensor([[0.1, 0.2], [1.0, 2.0], [3.0, 0.5]])
    for interleaved in (False, True):
        x = torch.randn(3, 3, 4)  # as many heads as tokens: a mix-up has a valid shape
        expected = turned_in_floats(x, angles, interleaved)
        assert_close(hw.apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved), expected)


@check("apply_rope", mistake="compute in float32 and round once, at the end; return the dtype of x")
def test_rope_of_bfloat16_is_rounded_once(hw: Homework) -> None:
    angles = torch.rand(16, 8) * 6
    for interleaved in (False, True):
        x = torch.randn(16, 2, 16).bfloat16()
        expected = turned_in_floats(x.double(), angles.double(), interleaved)
        got = hw.apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved)
        assert_close(got, expected.bfloat16(), atol=0.05)
        share = (got == expected.bfloat16()).double().mean()
        assert share > 0.98, f"only {share:.0%} of the numbers are those of float32, rounded once"


@check("apply_rope", mistake="float64 in, float64 out: somewhere on the way you cast to float32")
def test_rope_of_float64_stays_float64(hw: Homework) -> None:
    x, angles = torch.randn(2, 1, 4, dtype=torch.float64), torch.rand(2, 2, dtype=torch.float64)
    for interleaved in (False, True):
        expected = turned_in_floats(x, angles, interleaved)
        assert_close(hw.apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved), expected, atol=1e-14)


@check("apply_rope", mistake="a score has to depend on the distance of query and key alone")
def test_scores_depend_on_the_distance_alone(hw: Homework) -> None:
    q, k = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(1, 2, 8, dtype=torch.float64)
    inv_freq = 100.0 ** -torch.linspace(0, 1, 4, dtype=torch.float64)
    for interleaved in (False, True):
        scores = []
        for query, key in ((5, 3), (12, 10), (1002, 1000)):
            turned = [
                hw.apply_rope(x, (p * inv_freq).cos()[None], (p * inv_freq).sin()[None], interleaved=interleaved)
                for x, p in ((q, query), (k, key))
            ]
            scores.append((turned[0] * turned[1]).sum(-1))
        assert_close(scores[1], scores[0], atol=1e-9)
        assert_close(scores[2], scores[0], atol=1e-9)


# attention_cost -----------------------------------------------------------------------------------------------------


@check(
    "attention_cost", mistake="a dot product of D numbers is 2 D FLOPs, and the weighted sum of the values another 2 D"
)
def test_one_pair_is_four_flops_per_number(hw: Homework) -> None:
    flops, _ = hw.attention_cost(1, 1, 1, 1, 64, 2)
    assert_equal(flops, 4 * 64, name="flops")


@check("attention_cost", mistake="every query head has scores of its own, also where it shares its keys")
def test_every_query_head_computes(hw: Homework) -> None:
    flops, _ = hw.attention_cost(1, 1, 6, 2, 64, 2)
    assert_equal(flops, 6 * 4 * 64, name="flops")


@check(
    "attention_cost",
    mistake="a causal kernel computes only what the mask lets through: the first query sees one key here",
)
def test_a_prompt_is_a_triangle(hw: Homework) -> None:
    flops, _ = hw.attention_cost(3, 3, 1, 1, 1, 2)
    assert_equal(flops, 4 * (1 + 2 + 3), name="flops")


@check("attention_cost", mistake="the queries are the last positions: all of them see the keys of earlier steps")
def test_a_chunk_sees_all_earlier_keys(hw: Homework) -> None:
    flops, _ = hw.attention_cost(2, 10, 1, 1, 1, 2)
    assert_equal(flops, 4 * (9 + 10), name="flops")
    flops, _ = hw.attention_cost(1, 10, 1, 1, 1, 2)
    assert_equal(flops, 4 * 10, name="flops")


@check("attention_cost", mistake="four tensors move: q, k and v are read, the output is written; no scores, no mask")
def test_bytes_of_four_tensors(hw: Homework) -> None:
    _, moved = hw.attention_cost(3, 3, 2, 2, 8, 4)
    assert_equal(moved, 4 * (3 * 2 * 8) * 4, name="bytes")


@check("attention_cost", mistake="k and v have the tokens of the whole sequence, q and the output only the new ones")
def test_bytes_of_a_decode(hw: Homework) -> None:
    _, moved = hw.attention_cost(1, 100, 2, 2, 8, 2)
    assert_equal(moved, (2 * 1 * 2 * 8 + 2 * 100 * 2 * 8) * 2, name="bytes")


@check("attention_cost", mistake="k and v have num_kv_heads heads, q and the output num_qo_heads")
def test_bytes_of_grouped_heads(hw: Homework) -> None:
    _, moved = hw.attention_cost(4, 10, 6, 2, 8, 2)
    assert_equal(moved, (2 * 4 * 6 * 8 + 2 * 10 * 2 * 8) * 2, name="bytes")


@check("attention_cost", mistake="FLOPs and bytes are whole numbers: divide with //")
def test_whole_numbers(hw: Homework) -> None:
    for name, number in zip(("flops", "bytes"), hw.attention_cost(3, 7, 4, 2, 8, 2), strict=True):
        assert isinstance(number, int), f"{name} is a {type(number).__name__}; it should be an int"


# attention_bias -----------------------------------------------------------------------------------------------------


def bias_in_floats(queries: list[int], keys: list[int], window: int | None, slopes: list[float]) -> Tensor:
    def cell(slope: float, distance: int) -> float:
        return -math.inf if distance < 0 or (window is not None and distance >= window) else -slope * distance

    return torch.tensor([[[cell(slope, q - k) for k in keys] for q in queries] for slope in slopes])


@check(
    "attention_bias", mistake="0 where the query sees the key, -inf where not (0 times inf is NaN); slopes may be None"
)
def test_causal_bias(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(3), torch.arange(3))
    assert_close(got, bias_in_floats([0, 1, 2], [0, 1, 2], None, [0.0]))


@check(
    "attention_bias", mistake="a window of W leaves W keys, the query's own included: hidden from a distance of W on"
)
def test_window_bias(hw: Homework) -> None:
    for window in (1, 2, 4):
        got = hw.attention_bias(torch.arange(4), torch.arange(4), window=window)
        assert_close(got, bias_in_floats([0, 1, 2, 3], [0, 1, 2, 3], window, [0.0]))


@check("attention_bias", mistake="ALiBi lowers the score of a far key: -slope * (query position - key position)")
def test_alibi_bias(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(3), torch.arange(3), slopes=torch.tensor([0.5]))
    assert_close(got, bias_in_floats([0, 1, 2], [0, 1, 2], None, [0.5]))


@check("attention_bias", mistake="each head has a slope of its own, along the first axis")
def test_each_head_has_its_slope(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(4), torch.arange(4), window=3, slopes=torch.tensor([0.5, 0.25, 2.0]))
    assert_close(got, bias_in_floats([0, 1, 2, 3], [0, 1, 2, 3], 3, [0.5, 0.25, 2.0]))


@check("attention_bias", mistake="you count rows and columns; the distance is between positions")
def test_bias_follows_positions(hw: Homework) -> None:
    got = hw.attention_bias(torch.tensor([7, 8]), torch.tensor([8, 3, 7]), window=4, slopes=torch.tensor([1.0]))
    assert_close(got, bias_in_floats([7, 8], [8, 3, 7], 4, [1.0]))


@check("attention_bias", mistake="added to the scores, the bias has to do what the mask does")
def test_bias_replaces_the_mask(hw: Homework) -> None:
    q, k, v = random_qkv(3, 6, 2, 1, 4)
    queries, keys = torch.arange(3, 6), torch.arange(6)
    bias = hw.attention_bias(queries, keys, window=2).expand(2, -1, -1)
    distance = queries[:, None] - keys
    mask = (distance >= 0) & (distance < 2)
    got = hw.masked_attention(q, k, v, scale=0.5, bias=bias)
    assert_close(got, attention_in_floats(q, k, v, 0.5, mask))
