"""Grader of chapter 01. The oracles below are loops over Python floats and do not depend on tensor shapes."""

import math
from typing import Any

import torch
from torch import Tensor

from book.grading import Exercise, Homework, assert_close, assert_equal, assert_values, check
from book.memory import measure_memory

EXERCISES = [
    Exercise(
        "masked_attention",
        points=5,
        minutes=30,
        difficulty=2,
        part="masked_attention",
        hints=(
            "Write it for one query head and one KV head first. Then ask: which axis of q holds the heads of a group, "
            "and can that axis be split in two? Does the bias have such an axis too?",
            "Version 3 of the chapter is the core. Where do soft-cap and bias go, and which dtype should every "
            "operand have before the first product? Do not use the mask to find empty rows: a bias can hide keys, too.",
            "Split the head axis of the bias as you split q's. After the softmax, set the weights of all scores "
            "that are -inf to 0, so that no NaN remains in an empty row. Compute in "
            "torch.promote_types(q.dtype, torch.float32), and convert only the output back.",
        ),
    ),
    Exercise(
        "ragged_causal_attention",
        points=3,
        minutes=15,
        difficulty=2,
        hints=(
            "A loop over the sequences is fine. What is the position of the first query of a sequence that has m keys "
            "and n queries?",
            "Its position is m - n: query i attends to the keys 0 to m - n + i. The diagonal of the mask is aligned "
            "with the bottom right corner, not with the top left. A sequence without queries has an empty slice and "
            "needs no special case.",
            "tril takes the number of the diagonal as an argument: tril(m - n) for a mask of n rows and m columns. "
            "Slice q and the output by qo_indptr, and k and v by kv_indptr.",
        ),
    ),
    Exercise(
        "rope_tables",
        points=1,
        minutes=3,
        difficulty=1,
        hints=(
            "What is the angle of a pair of frequency f at position p?",
            "Every position is combined with every frequency, so one of the two tensors needs a new axis.",
            "Multiply positions[:, None], converted to the dtype of inv_freq, by inv_freq. Return the cosine and the "
            "sine of the product.",
        ),
    ),
    Exercise(
        "apply_rope",
        points=4,
        minutes=12,
        difficulty=2,
        part="apply_rope",
        hints=(
            "Split x into two tensors a and b of half the width, so that pair i is (a[i], b[i]). Only the split, and "
            "how the two halves are put back together, depend on the convention.",
            "Half-split: chunk in two, and concatenate. Interleaved: slices with a step of 2, and a stack on a new "
            "last axis that is flattened away. cos and sin have no axis for the heads: give them one.",
            "The rotated halves are a * cos - b * sin and b * cos + a * sin, in new tensors. Convert everything to "
            "torch.promote_types(x.dtype, torch.float32) first, and the result to x.dtype at the end.",
        ),
    ),
    Exercise(
        "attention_cost",
        points=3,
        minutes=12,
        difficulty=2,
        hints=(
            "Count the visible cells of the mask first. The queries are at the last positions: how many keys does the "
            "first of them attend to?",
            "The first query attends to num_keys - num_queries + 1 keys, the next to one more, and the last one to all "
            "of them: sum the series. For the bytes, ask of each of the four tensors how many heads it has.",
            "The visible cells are a rectangle of n * m without a triangle of n * (n - 1) / 2, in integer arithmetic. "
            "q and the output have n rows of num_qo_heads, k and v have m rows of num_kv_heads.",
        ),
    ),
    Exercise(
        "attention_bias",
        points=2,
        minutes=10,
        difficulty=1,
        hints=(
            "Everything is a function of one matrix: the distance between each query and each key.",
            "Decide first which cells are masked, as a Boolean matrix. Multiplying a mask by -inf turns every 0 into "
            "NaN; use masked_fill instead.",
            "Without slopes, use a single slope of 0. Multiply slopes[:, None, None] by the negative distances, "
            "convert to float32, and fill the masked cells with -inf.",
        ),
    ),
    Exercise(
        "convert_rope_weights",
        points=4,
        minutes=25,
        difficulty=3,
        challenge=True,
        hints=(
            "Work with one head of 6 rows numbered 0 to 5 on paper. In which order do "
            "adjacent rows form the pairs (0, 3), (1, 4) and (2, 5)? What undoes that order?",
            "Split the row axis into heads and components, and set aside the components that are not rotated. With "
            "P pairs, the rotated components form a table of 2 rows and P columns in one convention, and of P rows "
            "and 2 columns in the other: one table is the transpose of the other.",
            "weight.unflatten(0, (-1, head_dim)) gives the heads. On its first rotary_dim components: unflatten axis 1 "
            "into (2, -1) for half-split input or (-1, 2) for interleaved input, transpose axes 1 and 2, flatten them. "
            "Then concatenate the rest and flatten the heads again.",
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
    """Compute masked_attention by its specification, one number at a time."""
    group = q.shape[1] // k.shape[1]
    queries, keys = q.double().tolist(), k.double().tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, heads in enumerate(queries):
        for h, query in enumerate(heads):
            scores = []
            for j, key_heads in enumerate(keys):
                score = sum(a * b for a, b in zip(query, key_heads[h // group], strict=True)) * scale
                score = softcap * math.tanh(score / softcap) if softcap is not None else score
                score += float(bias[h, i, j]) if bias is not None else 0.0
                scores.append(score if mask is None or mask[i, j] else -math.inf)
            largest = max(scores, default=-math.inf)
            if largest > -math.inf:
                weights = torch.tensor([math.exp(score - largest) for score in scores], dtype=torch.float64)
                out[i, h] = (weights / weights.sum()) @ v[:, h // group].double()
    return out.to(q.dtype)


def assert_attention(
    hw: Homework,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    atol: float = 1e-5,
    check_dtype: bool = False,
    **options: Any,
) -> None:
    # Compute the expected output first: an answer that changes q in place must not change the question.
    expected = attention_in_floats(q, k, v, scale, **options)
    got = hw.masked_attention(q, k, v, scale=scale, **options)
    assert_close(got, expected, atol=atol, check_dtype=check_dtype)


def ragged_in_floats(q: Tensor, k: Tensor, v: Tensor, qo_lens: list[int], kv_lens: list[int], scale: float) -> Tensor:
    """Compute each query alone with its visible keys."""
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


def call_ragged(
    hw: Homework, q: Tensor, k: Tensor, v: Tensor, qo_lens: list[int], kv_lens: list[int], scale: float = 0.5
) -> Tensor:
    bounds = [torch.tensor([0, *lens]).cumsum(0) for lens in (qo_lens, kv_lens)]
    return hw.ragged_causal_attention(q, k, v, *bounds, scale=scale)


# masked_attention ---------------------------------------------------------------------------------------------------


@check(
    "masked_attention",
    mistake="with a single key the weight is 1, so the output is that key's value, whatever the score",
)
def test_one_query_one_key(hw: Homework) -> None:
    q, k, v = random_qkv(1, 1, 1, 1, 4)
    assert_values(hw.masked_attention(q, k, v, scale=0.5), v)


@check(
    "masked_attention", mistake="the softmax runs over the wrong axis: the weights of one query over all keys sum to 1"
)
def test_one_query_two_keys(hw: Homework) -> None:
    q, v = torch.ones(1, 1, 1), torch.tensor([4.0, 8.0]).view(2, 1, 1)
    k = torch.tensor([0.0, math.log(3.0)]).view(2, 1, 1)
    assert_values(hw.masked_attention(q, k, v, scale=1.0), torch.full((1, 1, 1), 7.0))


@check("masked_attention", mistake="the scores are not multiplied by `scale`: use the argument, not 1/sqrt(D)")
def test_scale(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 1, 1, 4)
    assert_attention(hw, q, k, v, 0.3)


@check("masked_attention", mistake="a head reads another head's keys, or the heads come back in a different order")
def test_heads_are_independent(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 2, 4)
    assert_attention(hw, q, k, v, 0.5)


@check(
    "masked_attention",
    mistake="query head h reads KV head h // G with G = Hq // Hk: adjacent heads share, not every Hk-th",
)
def test_two_heads_share_a_key(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 4, 2, 4)
    assert_attention(hw, q, k, v, 0.5)


@check("masked_attention", mistake="a masked key still has weight, or the mask is inverted: True means visible")
def test_mask(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 1, 4)
    mask = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert_attention(hw, q, k, v, 0.5, mask=mask)


@check("masked_attention", mistake="a query without visible keys gets 0: the softmax of a row of -inf is NaN")
def test_a_query_without_visible_keys(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 2, 1, 4)
    mask = torch.tensor([[False, False, False], [True, True, False]])
    assert_attention(hw, q, k, v, 0.5, mask=mask)


@check(
    "masked_attention",
    mistake="a masked score is -inf, not a large negative number: a visible score may be lower than that",
)
def test_visible_scores_far_below_zero(hw: Homework) -> None:
    q, k = torch.ones(1, 1, 1), torch.tensor([-1e38, 0.0]).view(2, 1, 1)
    v = torch.tensor([3.0, 100.0]).view(2, 1, 1)
    assert_attention(hw, q, k, v, 1.0, mask=torch.tensor([[True, False]]))


@check(
    "masked_attention",
    mistake="the bias is added to the scores, one for each query head: split its head axis like q's",
)
def test_the_bias_has_query_heads(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 4, 2, 4)
    assert_attention(hw, q, k, v, 1.0, bias=torch.randn(4, 2, 3))


@check("masked_attention", mistake="the bias is added to scores that are already scaled: scale first, then add")
def test_bias_is_not_scaled(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 4, 2, 4)
    assert_attention(hw, q, k, v, 0.125, bias=torch.randn(4, 2, 3))


@check("masked_attention", mistake="the soft-cap is softcap * tanh(s / softcap) of the scaled score")
def test_softcap(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 2, 1, 4)
    assert_attention(hw, 4 * q, k, v, 0.5, softcap=1.5)


@check("masked_attention", mistake="the bias is added after the soft-cap: only the scaled q·k is capped")
def test_softcap_before_bias(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 1, 4)
    assert_attention(hw, q, k, v, 0.5, bias=3 * torch.randn(2, 3, 4), softcap=1.5)


@check("masked_attention", mistake="the mask comes after the soft-cap: tanh turns a masked -inf into a finite -softcap")
def test_softcap_before_mask(hw: Homework) -> None:
    q, k, v = random_qkv(3, 4, 2, 1, 4)
    assert_attention(hw, q, k, v, 0.5, mask=torch.ones(3, 4, dtype=torch.bool).tril(1), softcap=1.5)


@check("masked_attention", mistake="a bias of -inf hides keys too: find empty rows by their scores, not by the mask")
def test_a_bias_that_hides_every_key(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 2, 1, 4)
    bias = torch.zeros(2, 2, 3)
    bias[:, 0] = -math.inf
    assert_attention(hw, q, k, v, 0.5, bias=bias)


@check("masked_attention", mistake="mask and bias may together hide all keys of a query: its output is 0 then, too")
def test_mask_and_bias_together_hide_every_key(hw: Homework) -> None:
    q, k, v = random_qkv(2, 3, 2, 1, 4)
    mask, bias = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 2, 3)
    mask[0, 0], bias[:, 0, 1:] = False, -math.inf
    assert_attention(hw, q, k, v, 0.5, mask=mask, bias=bias)


@check(
    "masked_attention", mistake="you change one of the caller's tensors: `*=` and masked_fill_ write into q or the bias"
)
def test_the_inputs_are_unchanged(hw: Homework) -> None:
    mask, bias = torch.ones(3, 4, dtype=torch.bool).tril(1), torch.randn(2, 3, 4)
    inputs = dict(zip("qkv", random_qkv(3, 4, 2, 1, 4), strict=True)) | {"mask": mask, "bias": bias}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    hw.masked_attention(**inputs, scale=0.5, softcap=1.5)
    for name, tensor in inputs.items():
        assert_equal(tensor, before[name], name=name)


@check("masked_attention", mistake="compute in float32 and round once, at the end: bfloat16 keeps 8 bits", costs=0.2)
def test_bfloat16_is_rounded_once(hw: Homework) -> None:
    q, k, v = random_qkv(4, 64, 2, 1, 32, torch.bfloat16)
    for softcap in (None, 8.0):
        exact = attention_in_floats(q.double(), k.double(), v.double(), 0.3, softcap=softcap)
        got = hw.masked_attention(q, k, v, scale=0.3, softcap=softcap)
        assert_close(got, exact.bfloat16(), atol=1e-6, rtol=2.0**-7)
        rounding = (got.double() - exact).abs() / exact.abs()
        assert rounding.max() < 2.0**-8 * 1.01, (
            f"with softcap {softcap}, the largest relative error is {rounding.max():.4f}; a single rounding adds at "
            "most 0.0039"
        )


@check("masked_attention", mistake="the bias stays in float32: in bfloat16, distances above 256 are rounded", costs=0.2)
def test_a_float32_bias_of_bfloat16_queries(hw: Homework) -> None:
    q, k, v = random_qkv(1, 4, 2, 1, 4, torch.bfloat16)
    bias = -torch.tensor([1001.0, 1000.0, 999.0, 1003.0]).expand(2, 1, 4)
    assert_attention(hw, q, k, v, 0.5, bias=bias, atol=0.02)


@check("masked_attention", mistake="float64 in, float64 out: somewhere along the way you cast to float32", costs=0.2)
def test_float64_stays_float64(hw: Homework) -> None:
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        q, k, v = random_qkv(2, 5, 2, 1, 4, dtype)
        bias = torch.randn(2, 2, 5, dtype=dtype)
        assert_attention(hw, q, k, v, 0.5, bias=bias, softcap=1.5, atol=atol, check_dtype=True)


@check(
    "masked_attention",
    mistake="keys or values are copied for every query head; a matmul that broadcasts over the group copies them, too, "
    "but an einsum with a group axis in q alone does not",
    costs=0.2,
)
def test_keys_are_not_copied(hw: Homework) -> None:
    q, k, v = random_qkv(1, 64, 16, 2, 32)
    size = measure_memory(lambda: hw.masked_attention(q, k, v, scale=0.5)).largest // k.nbytes
    assert size <= 2, f"some operation makes a tensor {size} times as large as the keys"


@check("masked_attention", mistake="without any key (m = 0) there is no maximum and no sum; the output is 0")
def test_no_keys(hw: Homework) -> None:
    q, k, v = random_qkv(2, 0, 4, 2, 4)
    assert_attention(hw, q, k, v, 0.5)


@check("masked_attention", mistake="it fails for a combination of sizes and options that earlier checks did not try")
def test_random_cases(hw: Homework) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        n, m, num_kv_heads, group, head_dim = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(5))
        q, k, v = random_qkv(n, m, num_kv_heads * group, num_kv_heads, head_dim)
        mask, bias = torch.rand(n, m) < 0.7, torch.randn(num_kv_heads * group, n, m)
        assert_attention(hw, q, k, v, 0.7, mask=mask, bias=bias, softcap=3.0)


# ragged_causal_attention --------------------------------------------------------------------------------------------


@check("ragged_causal_attention", mistake="a token attends to itself: the diagonal of the mask is visible")
def test_one_token_sees_itself(hw: Homework) -> None:
    q, k, v = random_qkv(1, 1, 2, 1, 4)
    assert_values(call_ragged(hw, q, k, v, [1], [1]), attention_in_floats(q, k, v, 0.5))


@check("ragged_causal_attention", mistake="use the scale that you are given, not 1/sqrt(D)")
def test_scale_of_a_sequence(hw: Homework) -> None:
    q, k, v = random_qkv(2, 2, 2, 1, 4)
    expected = ragged_in_floats(q, k, v, [2], [2], 2.0)
    got = call_ragged(hw, q, k, v, [2], [2], scale=2.0)
    assert_values(got[-1:], expected[-1:], name="the output of the last query")


@check(
    "ragged_causal_attention", mistake="you write into q, which the caller may still need: make a tensor for the output"
)
def test_the_queries_are_unchanged(hw: Homework) -> None:
    q, k, v = random_qkv(2, 2, 2, 1, 4)
    before = q.clone()
    call_ragged(hw, q, k, v, [2], [2])
    assert_equal(q, before, name="q")


@check("ragged_causal_attention", mistake="a query attends to keys after its own position")
def test_no_query_sees_the_future(hw: Homework) -> None:
    q, k, v = random_qkv(4, 4, 2, 1, 4)
    before = call_ragged(hw, q, k, v, [4], [4])
    assert_values(before, ragged_in_floats(q, k, v, [4], [4], 0.5))
    k[-1] += 1.0
    v[-1] += 1.0
    assert_values(call_ragged(hw, q, k, v, [4], [4])[:3], before[:3])


@check(
    "ragged_causal_attention",
    mistake="the queries are the last tokens of the sequence, so the first of n attends to m - n + 1 keys; or k "
    "and v are sliced by qo_indptr",
)
def test_queries_are_the_last_of_the_keys(hw: Homework) -> None:
    q, k, v = random_qkv(2, 5, 2, 1, 4)
    assert_values(call_ragged(hw, q, k, v, [2], [5]), ragged_in_floats(q, k, v, [2], [5], 0.5))


@check("ragged_causal_attention", mistake="a query attends to the keys of another sequence")
def test_sequences_are_independent(hw: Homework) -> None:
    q, k, v = random_qkv(5, 5, 2, 1, 4)
    assert_values(call_ragged(hw, q, k, v, [2, 3], [2, 3]), ragged_in_floats(q, k, v, [2, 3], [2, 3], 0.5))


@check(
    "ragged_causal_attention",
    mistake="queries and keys have separate bounds: qo_indptr for q, kv_indptr for k and v",
)
def test_queries_and_keys_have_their_own_bounds(hw: Homework) -> None:
    q, k, v = random_qkv(4, 9, 2, 1, 4)
    assert_values(call_ragged(hw, q, k, v, [1, 3], [5, 4]), ragged_in_floats(q, k, v, [1, 3], [5, 4], 0.5))


@check(
    "ragged_causal_attention", mistake="a sequence without queries in this step still owns its keys, and has no output"
)
def test_a_sequence_without_queries(hw: Homework) -> None:
    q, k, v = random_qkv(3, 8, 2, 1, 4)
    got = call_ragged(hw, q, k, v, [2, 0, 1], [2, 4, 2])
    assert_values(got, ragged_in_floats(q, k, v, [2, 0, 1], [2, 4, 2], 0.5))


@check("ragged_causal_attention", mistake="the order of the sequences changes their results")
def test_the_order_of_sequences_does_not_matter(hw: Homework) -> None:
    lens = [(3, 7), (1, 9), (4, 4)]
    parts = [random_qkv(n, m, 4, 2, 8) for n, m in lens]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        q, k, v = (torch.cat([parts[b][i] for b in order]) for i in range(3))
        qo_lens, kv_lens = [lens[b][0] for b in order], [lens[b][1] for b in order]
        got = call_ragged(hw, q, k, v, qo_lens, kv_lens)
        assert_values(got, ragged_in_floats(q, k, v, qo_lens, kv_lens, 0.5))


@check(
    "ragged_causal_attention",
    mistake="the output has the dtype of q: float64 and bfloat16 must not become float32",
    costs=0.2,
)
def test_ragged_dtypes(hw: Homework) -> None:
    for dtype, atol in ((torch.bfloat16, 0.02), (torch.float64, 1e-12)):
        q, k, v = random_qkv(3, 6, 2, 1, 4, dtype)
        assert_close(
            call_ragged(hw, q, k, v, [2, 1], [2, 4]), ragged_in_floats(q, k, v, [2, 1], [2, 4], 0.5), atol=atol
        )


@check(
    "ragged_causal_attention",
    mistake="compute the scores of each sequence separately: most of a [T, S] matrix belongs to no sequence",
    costs=0.2,
)
def test_no_scores_between_sequences(hw: Homework) -> None:
    sequences, n, m = 8, 16, 64
    q, k, v = random_qkv(sequences * n, sequences * m, 2, 1, 4)
    largest = measure_memory(lambda: call_ragged(hw, q, k, v, [n] * sequences, [m] * sequences)).largest
    scores = 2 * n * m * 4
    assert largest <= 2 * scores, (  # twice as much: float64 is allowed here
        f"some operation makes a tensor of {largest:,} bytes; the scores of one sequence take {scores:,}"
    )


# rope_tables --------------------------------------------------------------------------------------------------------


@check("rope_tables", mistake="return the cosine first, then the sine: at position 0 they are 1 and 0")
def test_position_zero(hw: Homework) -> None:
    cos, sin = hw.rope_tables(torch.tensor([0]), torch.tensor([math.pi / 2]))
    assert_values(cos, torch.tensor([[1.0]]), atol=1e-6, name="cos")
    assert_values(sin, torch.tensor([[0.0]]), atol=1e-6, name="sin")


@check("rope_tables", mistake="the angle is position times frequency, in radians")
def test_right_angles(hw: Homework) -> None:
    cos, sin = hw.rope_tables(torch.arange(4), torch.tensor([math.pi / 2]))
    assert_values(cos, torch.tensor([[1.0], [0.0], [-1.0], [0.0]]), atol=1e-6, name="cos")
    assert_values(sin, torch.tensor([[0.0], [1.0], [0.0], [-1.0]]), atol=1e-6, name="sin")


@check("rope_tables", mistake="every token needs the angles of all D/2 pairs: [T, D/2], one row per token")
def test_every_position_meets_every_frequency(hw: Homework) -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])
    cos, _ = hw.rope_tables(torch.arange(2), inv_freq)
    assert_values(cos, torch.tensor([[1.0, 1.0, 1.0], [math.cos(1.0), math.cos(0.1), math.cos(0.01)]]), atol=1e-6)


@check("rope_tables", mistake="you count the tokens from 0 instead of reading their positions")
def test_positions_come_in_any_order(hw: Homework) -> None:
    positions, inv_freq = [7, 2, 2, 900], [1.0, 0.03]
    cos, sin = hw.rope_tables(torch.tensor(positions), torch.tensor(inv_freq))
    assert_values(cos, torch.tensor([[math.cos(p * f) for f in inv_freq] for p in positions]), atol=1e-4)
    assert_values(sin, torch.tensor([[math.sin(p * f) for f in inv_freq] for p in positions]), atol=1e-4)


@check("rope_tables", mistake="positions have no upper limit: compute each angle, without a table of fixed length")
def test_large_positions(hw: Homework) -> None:
    inv_freq = torch.tensor([2.0**-20])  # exact in float32, like the angle
    cos, _ = hw.rope_tables(torch.tensor([3_000_000]), inv_freq)
    assert_values(cos, torch.tensor([[math.cos(3_000_000 * 2.0**-20)]]), atol=1e-5)


@check("rope_tables", mistake="compute the angles in the dtype of inv_freq: a narrower one loses precision", costs=0.2)
def test_tables_have_the_precision_of_the_frequencies(hw: Homework) -> None:
    inv_freq = torch.tensor([0.3], dtype=torch.float64)
    cos, _ = hw.rope_tables(torch.tensor([100_003]), inv_freq)
    assert_close(cos, torch.tensor([[math.cos(100_003 * 0.3)]], dtype=torch.float64), atol=1e-9)
    cos, sin = hw.rope_tables(torch.tensor([0]), inv_freq.float())
    assert_close((cos, sin), (torch.ones(1, 1), torch.zeros(1, 1)))


# apply_rope ---------------------------------------------------------------------------------------------------------


def right_angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(tokens, pairs), torch.ones(tokens, pairs)


def rotated_in_floats(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate pair by pair in Python floats."""
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


@check("apply_rope", mistake="an angle of 0 leaves x unchanged: cos and sin are swapped, or components change places")
def test_an_angle_of_zero_changes_nothing(hw: Homework) -> None:
    x = torch.randn(1, 3, 6)
    assert_values(hw.apply_rope(x, torch.ones(1, 3), torch.zeros(1, 3)), x)


def assert_unchanged(hw: Homework, interleaved: bool) -> None:
    x = torch.randn(1, 1, 4)
    before = x.clone()
    hw.apply_rope(x, *right_angles(1, 2), interleaved=interleaved)
    assert_equal(x, before, name="x")


@check("apply_rope", mistake="you change x: the caller may still need it")
def test_the_input_is_unchanged(hw: Homework) -> None:
    assert_unchanged(hw, interleaved=False)


@check(
    "apply_rope", mistake="a right angle rotates (a, b) to (-b, a), and pair i is (x[i], x[i + D/2]): check the signs"
)
def test_a_right_angle_half_split(hw: Homework) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    assert_values(hw.apply_rope(x, *right_angles(1, 2)), torch.tensor([-3.0, -4.0, 1.0, 2.0]).view(1, 1, 4))


@check("apply_rope", mistake="with interleaved=True you change x: the caller may still need it")
def test_the_input_is_unchanged_interleaved(hw: Homework) -> None:
    assert_unchanged(hw, interleaved=True)


@check(
    "apply_rope",
    mistake="with interleaved=True pair i is (x[2i], x[2i + 1]), and the rotated pair goes back to the same places",
)
def test_a_right_angle_interleaved(hw: Homework) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4)
    got = hw.apply_rope(x, *right_angles(1, 2), interleaved=True)
    assert_values(got, torch.tensor([-2.0, 1.0, -4.0, 3.0]).view(1, 1, 4))


@check(
    "apply_rope",
    mistake="each token has its own angles, shared by all its heads: the new axis of cos is the second",
)
def test_tokens_differ_and_heads_agree(hw: Homework) -> None:
    angles = torch.tensor([[0.1, 0.2], [1.0, 2.0], [3.0, 0.5]])
    for interleaved in (False, True):
        x = torch.randn(3, 3, 4)  # as many heads as tokens: a mix-up has a valid shape
        expected = rotated_in_floats(x, angles, interleaved)
        assert_values(hw.apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved), expected)


@check("apply_rope", mistake="compute in float32 and round once, at the end; return the dtype of x", costs=0.2)
def test_rope_of_bfloat16_is_rounded_once(hw: Homework) -> None:
    angles = torch.rand(16, 8) * 6
    for interleaved in (False, True):
        x = torch.randn(16, 2, 16).bfloat16()
        expected = rotated_in_floats(x.double(), angles.double(), interleaved)
        got = hw.apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved)
        assert_close(got, expected.bfloat16(), atol=0.05)
        share = (got == expected.bfloat16()).double().mean()
        assert share > 0.98, f"only {share:.0%} of the components equal the float32 result rounded once"


@check("apply_rope", mistake="float64 in, float64 out: somewhere along the way you cast to float32", costs=0.2)
def test_rope_of_float64_stays_float64(hw: Homework) -> None:
    for dtype, atol in ((torch.float64, 1e-14), (torch.float32, 1e-5)):
        x, angles = torch.randn(2, 1, 4, dtype=dtype), torch.rand(2, 2, dtype=dtype)
        for interleaved in (False, True):
            expected = rotated_in_floats(x, angles, interleaved)
            assert_close(hw.apply_rope(x, angles.cos(), angles.sin(), interleaved=interleaved), expected, atol=atol)


@check("apply_rope", mistake="a score must depend only on the distance between query and key")
def test_scores_depend_on_the_distance_alone(hw: Homework) -> None:
    q, k = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(1, 2, 8, dtype=torch.float64)
    inv_freq = 100.0 ** -torch.linspace(0, 1, 4, dtype=torch.float64)
    for interleaved in (False, True):
        scores = []
        for query, key in ((5, 3), (12, 10), (1002, 1000)):
            rotated = [
                hw.apply_rope(x, (p * inv_freq).cos()[None], (p * inv_freq).sin()[None], interleaved=interleaved)
                for x, p in ((q, query), (k, key))
            ]
            scores.append((rotated[0] * rotated[1]).sum(-1))
        assert_values(scores[1], scores[0], atol=1e-4)
        assert_values(scores[2], scores[0], atol=1e-4)


# attention_cost -----------------------------------------------------------------------------------------------------


@check(
    "attention_cost",
    mistake="a dot product of D components is 2 D FLOPs, and the weighted sum of the values another 2 D",
)
def test_one_pair_is_four_flops_per_component(hw: Homework) -> None:
    flops, _ = hw.attention_cost(1, 1, 1, 1, 64, 2)
    assert_equal(flops, 4 * 64, name="flops")


@check("attention_cost", mistake="every query head has its own scores, even if it shares its keys")
def test_every_query_head_computes(hw: Homework) -> None:
    flops, _ = hw.attention_cost(1, 1, 6, 2, 64, 2)
    assert_equal(flops, 6 * 4 * 64, name="flops")


@check(
    "attention_cost",
    mistake="a causal kernel computes only visible pairs: here the first query has one key",
)
def test_a_prompt_is_a_triangle(hw: Homework) -> None:
    flops, _ = hw.attention_cost(3, 3, 1, 1, 1, 2)
    assert_equal(flops, 4 * (1 + 2 + 3), name="flops")


@check("attention_cost", mistake="the queries are the last positions: all of them attend to the keys of earlier steps")
def test_a_chunk_attends_to_all_earlier_keys(hw: Homework) -> None:
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


@check("attention_cost", mistake="FLOPs and bytes are counts, so return int and keep to integer arithmetic", costs=0.2)
def test_whole_numbers(hw: Homework) -> None:
    for name, number in zip(("flops", "bytes"), hw.attention_cost(3, 7, 4, 2, 8, 2), strict=True):
        assert isinstance(number, int), f"`{name}` is a {type(number).__name__}; it should be an int"


# attention_bias -----------------------------------------------------------------------------------------------------


def bias_in_floats(queries: list[int], keys: list[int], window: int | None, slopes: list[float]) -> Tensor:
    def cell(slope: float, distance: int) -> float:
        return -math.inf if distance < 0 or (window is not None and distance >= window) else -slope * distance

    cells = [[[cell(slope, q - k) for k in keys] for q in queries] for slope in slopes]
    return torch.tensor(cells, dtype=torch.float32)


@check(
    "attention_bias",
    mistake="0 where the key is visible, -inf where it is not (0 times inf is NaN); slopes may be None",
)
def test_causal_bias(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(3), torch.arange(3))
    assert_values(got, bias_in_floats([0, 1, 2], [0, 1, 2], None, [0.0]))


@check(
    "attention_bias", mistake="a window of W keeps W keys, including the query's own: distances of W or more are masked"
)
def test_window_bias(hw: Homework) -> None:
    for window in (1, 2, 4):
        got = hw.attention_bias(torch.arange(4), torch.arange(4), window=window)
        assert_values(got, bias_in_floats([0, 1, 2, 3], [0, 1, 2, 3], window, [0.0]))


@check("attention_bias", mistake="ALiBi lowers the score of a far key: -slope * (query position - key position)")
def test_alibi_bias(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(3), torch.arange(3), slopes=torch.tensor([0.5]))
    assert_values(got, bias_in_floats([0, 1, 2], [0, 1, 2], None, [0.5]))


@check("attention_bias", mistake="each head has its own slope, along the first axis")
def test_each_head_has_its_slope(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(4), torch.arange(4), slopes=torch.tensor([0.5, 0.25, 2.0]))
    assert_values(got, bias_in_floats([0, 1, 2, 3], [0, 1, 2, 3], None, [0.5, 0.25, 2.0]))


@check("attention_bias", mistake="a window still applies when there are slopes")
def test_window_and_slopes(hw: Homework) -> None:
    got = hw.attention_bias(torch.arange(4), torch.arange(4), window=3, slopes=torch.tensor([0.5, 0.25]))
    assert_values(got, bias_in_floats([0, 1, 2, 3], [0, 1, 2, 3], 3, [0.5, 0.25]))


@check("attention_bias", mistake="the distance is between positions, not between row and column numbers")
def test_bias_follows_positions(hw: Homework) -> None:
    got = hw.attention_bias(torch.tensor([7, 8]), torch.tensor([8, 3, 7]), window=4, slopes=torch.tensor([1.0]))
    assert_values(got, bias_in_floats([7, 8], [8, 3, 7], 4, [1.0]))


@check(
    "attention_bias",
    mistake="positions may have gaps and come in any order: use each one, not just the first and a count",
)
def test_positions_with_gaps(hw: Homework) -> None:
    queries, keys = [9, 2, 30], [4, 29, 0, 2]
    slopes = torch.tensor([0.5, 1.0])
    got = hw.attention_bias(torch.tensor(queries), torch.tensor(keys), window=8, slopes=slopes)
    assert_values(got, bias_in_floats(queries, keys, 8, [0.5, 1.0]))


@check("attention_bias", mistake="the bias is float32 whatever the dtype of the slopes", costs=0.2)
def test_bias_of_float64_slopes(hw: Homework) -> None:
    positions, slopes = torch.arange(3), torch.tensor([0.5], dtype=torch.float64)
    for options, slope in (({"slopes": slopes}, 0.5), ({"slopes": slopes.float()}, 0.5), ({}, 0.0)):
        got = hw.attention_bias(positions, positions, **options)
        assert_close(got, bias_in_floats([0, 1, 2], [0, 1, 2], None, [slope]))


@check("attention_bias", mistake="added to the scores, the bias must have the effect of the mask")
def test_bias_replaces_the_mask(hw: Homework) -> None:
    q, k, v = random_qkv(3, 6, 2, 1, 4)
    queries, keys = torch.arange(3, 6), torch.arange(6)
    bias = hw.attention_bias(queries, keys, window=2).expand(2, -1, -1)
    distance = queries[:, None] - keys
    mask = (distance >= 0) & (distance < 2)
    got = hw.masked_attention(q, k, v, scale=0.5, bias=bias)
    assert_values(got, attention_in_floats(q, k, v, 0.5, mask))


# convert_rope_weights -----------------------------------------------------------------------------------------------


def converted_rows(weight: Tensor, head_dim: int, to_interleaved: bool, rotary_dim: int | None = None) -> Tensor:
    """Find the source row of each converted row, one at a time."""
    half = (head_dim if rotary_dim is None else rotary_dim) // 2
    sources = []
    for row in range(len(weight)):
        head, component = divmod(row, head_dim)
        if component < 2 * half and to_interleaved:
            component = component // 2 + half * (component % 2)
        elif component < 2 * half:
            component = 2 * (component % half) + component // half
        sources.append(head * head_dim + component)
    return torch.stack([weight[source] for source in sources])


def assert_converted(hw: Homework, weight: Tensor, head_dim: int, *, check_dtype: bool = False, **options: Any) -> None:
    expected = converted_rows(weight, head_dim, **options)
    got = hw.convert_rope_weights(weight, head_dim=head_dim, **options)
    assert_close(got, expected, atol=0, check_dtype=check_dtype)


@check(
    "convert_rope_weights",
    mistake="converting to interleaved makes rows i and i + D/2 into rows 2i and 2i + 1; check your direction",
)
def test_one_head_to_interleaved(hw: Homework) -> None:
    assert_converted(hw, torch.arange(6.0)[:, None], 6, to_interleaved=True)


@check(
    "convert_rope_weights",
    mistake="converting to half-split does the inverse: rows 2i and 2i + 1 become rows i and i + D/2",
)
def test_one_head_to_half_split(hw: Homework) -> None:
    assert_converted(hw, torch.arange(6.0)[:, None], 6, to_interleaved=False)


@check(
    "convert_rope_weights", mistake="only the rows are reordered: the columns are the components of the hidden state"
)
def test_columns_stay_in_place(hw: Homework) -> None:
    for to_interleaved in (True, False):
        assert_converted(hw, torch.randn(6, 6), 6, to_interleaved=to_interleaved)


@check("convert_rope_weights", mistake="each head is reordered separately: rows never move to another head")
def test_several_heads(hw: Homework) -> None:
    for to_interleaved in (True, False):
        assert_converted(hw, torch.randn(18, 4), 6, to_interleaved=to_interleaved)


@check("convert_rope_weights", mistake="a projection's bias has one axis and is reordered like the rows of its weight")
def test_a_vector(hw: Homework) -> None:
    for to_interleaved in (True, False):
        assert_converted(hw, torch.randn(16), 8, to_interleaved=to_interleaved)


@check(
    "convert_rope_weights",
    mistake="only the first rotary_dim components of a head form pairs, among themselves; the rest stay in place",
)
def test_partial_rotation(hw: Homework) -> None:
    for to_interleaved in (True, False):
        assert_converted(hw, torch.randn(20, 3), 10, to_interleaved=to_interleaved, rotary_dim=6)


@check("convert_rope_weights", mistake="you reorder the caller's weight in place, or return a view of it")
def test_the_weight_is_unchanged(hw: Homework) -> None:
    for head_dim in (6, 2):  # with one pair, no row moves, and a view of the weight has the right values
        weight = torch.randn(12, 4)
        before = weight.clone()
        got = hw.convert_rope_weights(weight, head_dim=head_dim, to_interleaved=True)
        assert_equal(weight, before, name="weight")
        got.zero_()
        assert_equal(weight, before, name="the weight after your result has been set to 0")


@check("convert_rope_weights", mistake="a reordering keeps every bit: do not change the dtype along the way", costs=0.2)
def test_weights_keep_their_dtype(hw: Homework) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert_converted(hw, torch.randn(12, 4).to(dtype), 6, to_interleaved=False, check_dtype=True)


@check(
    "convert_rope_weights", mistake="after the conversion, a model with the other pairing must compute the same scores"
)
def test_scores_are_the_same_in_both_conventions(hw: Homework) -> None:
    x, angles = torch.randn(5, 7, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64) * 6
    weights = [torch.randn(12, 7, dtype=torch.float64) for _ in range(2)]

    def scores(projections: list[Tensor], interleaved: bool) -> Tensor:
        projected = [(x @ weight.T).unflatten(1, (2, 6)) for weight in projections]
        q, k = (rotated_in_floats(heads, angles, interleaved) for heads in projected)
        return torch.einsum("nhd,mhd->hnm", q, k)

    for to_interleaved in (True, False):
        converted = [hw.convert_rope_weights(w, head_dim=6, to_interleaved=to_interleaved).double() for w in weights]
        assert_values(scores(converted, to_interleaved), scores(weights, not to_interleaved), atol=1e-4)
