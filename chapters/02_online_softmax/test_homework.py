"""Grader of chapter 02. The oracles below compute in Python floats, one number at a time, with all scores at hand."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from book.grading import Exercise, Homework, assert_close, assert_equal, check
from book.memory import measure_memory
from mini_engine.attention.state import AttentionState

EXERCISES = [
    Exercise(
        "softmax_with_lse",
        points=2,
        minutes=12,
        difficulty=1,
        hints=(
            "Subtract the largest score of each row before you exponentiate. How does that change the sum, and how do "
            "you correct for it in the logarithm?",
            "The LSE is the row's maximum plus the logarithm of the sum of the shifted exponentials. In a row that is "
            "entirely -inf the maximum is -inf too, and -inf - (-inf) is NaN: which number can you subtract there?",
            "amax with keepdim=True gives the maxima; replace those that are -inf with 0. Divide the exponentials by "
            "their sum, with sums of 0 replaced by 1. Convert the scores to "
            "torch.promote_types(scores.dtype, torch.float32) before all that.",
        ),
    ),
    Exercise(
        "online_attention",
        points=6,
        minutes=35,
        difficulty=3,
        hints=(
            "Keep three things per query: the running maximum, the sum of exponentials relative to it, and the sum of "
            "values times these exponentials. What happens to the last two when the maximum rises?",
            "When the maximum rises, both sums are rescaled by exp(old - new). Then add the contribution of the tile, "
            "exponentiated relative to the new maximum. Divide once, after the loop.",
            "Start with a maximum of -inf and sums of 0. Until a query has seen a visible key, its maximum is -inf: "
            "subtract 0 instead, both from the scores and from the old maximum, and no NaN appears. At the end, "
            "replace sums of 0 with 1 before you divide; the LSE is the maximum plus the logarithm of the sum.",
        ),
    ),
    Exercise(
        "merge_states",
        points=2,
        minutes=10,
        difficulty=2,
        part="merge_states",
        hints=(
            "merge_v1 of the chapter is nearly right. Which of its subtractions is NaN when both states are empty?",
            "An empty state has exp(lse) = 0, whatever finite number is subtracted from its LSE of -inf.",
            "Where the merged LSE is -inf, subtract 0 instead; the LSE that you return stays -inf. For bfloat16 "
            "outputs, convert the two shares to the dtype of out before you multiply.",
        ),
    ),
    Exercise(
        "split_kv_decode",
        points=3,
        minutes=12,
        difficulty=2,
        hints=(
            "First find num_splits + 1 boundaries between 0 and m. Then you need only a slice per worker and the merge "
            "that you already have.",
            "m * i // num_splits for i from 0 to num_splits are such boundaries: adjacent ones are at most "
            "ceil(m / num_splits) apart, and the last one is m. Where two are equal, a worker receives no keys.",
            "itertools.pairwise turns the boundaries into slices. Collect the states of all workers in a list, and "
            "reduce the list with merge_states.",
        ),
    ),
    Exercise(
        "merge_tree",
        points=4,
        minutes=25,
        difficulty=3,
        challenge=True,
        hints=(
            "merge works row by row. One call on 10 rows can merge two states of 5 rows with two others.",
            "Concatenate all states along their rows. In each level, the first half of the rows is `a` and the second "
            "half is `b`. If the number of states is odd, one of them waits for the next level.",
            "With count states of n rows, pairs = count // 2 can be merged: rows 0 to pairs * n with rows pairs * n to "
            "2 * pairs * n. Append the rows that are left to the result, subtract pairs from count, and repeat.",
        ),
    ),
]


def state_in_floats(scores: list[float], values: list[list[float]]) -> tuple[list[float], float]:
    """Compute output and LSE of one query over the keys whose scores are not -inf."""
    seen = [(s, v) for s, v in zip(scores, values, strict=True) if s > -math.inf]
    if not seen:
        return [0.0] * (len(values[0]) if values else 1), -math.inf
    largest = max(s for s, _ in seen)
    exps = [math.exp(s - largest) for s, _ in seen]
    total = math.fsum(exps)
    columns = zip(*(v for _, v in seen), strict=True)
    out = [math.fsum(e * x for e, x in zip(exps, column, strict=True)) / total for column in columns]
    return out, largest + math.log(total)


def attention_in_floats(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute one head: q [n, D], k and v [m, D], mask [n, m]."""
    rows = []
    for query, seen in zip(q.double().tolist(), mask.tolist(), strict=True):
        scores = [
            math.fsum(a * b for a, b in zip(query, key, strict=True)) * scale if visible else -math.inf
            for key, visible in zip(k.double().tolist(), seen, strict=True)
        ]
        rows.append(state_in_floats(scores, v.double().tolist()))
    out = torch.tensor([row for row, _ in rows], dtype=torch.float64)
    return out.view(q.shape), torch.tensor([lse for _, lse in rows], dtype=torch.float64)


def random_scores(num_states: int, n: int, heads: int, seed: int) -> Tensor:
    """Make scores [n, heads, 3 * num_states] of very different sizes, some masked: state i holds the keys from 3i."""
    generator = torch.Generator().manual_seed(seed)
    scores = 5 * torch.randn(n, heads, 3 * num_states, generator=generator, dtype=torch.float64)
    hidden = torch.rand(scores.shape, generator=generator) < 0.4
    return scores.masked_fill(hidden, -math.inf)


def state_over(scores: Tensor, values: Tensor, dtype: torch.dtype = torch.float64) -> AttentionState:
    """Compute the state of [n, heads] queries over keys with scores [n, heads, keys] and values [keys, D]."""
    rows = [[state_in_floats(row, values.tolist()) for row in heads] for heads in scores.tolist()]
    out = torch.tensor([[out for out, _ in heads] for heads in rows], dtype=dtype)
    return AttentionState(out, torch.tensor([[lse for _, lse in heads] for heads in rows], dtype=dtype))


def random_states(num_states: int, n: int, heads: int, dim: int, seed: int) -> tuple[list[AttentionState], Any]:
    """Make states over disjoint keys, and the state over all of them."""
    scores = random_scores(num_states, n, heads, seed)
    values = torch.randn(3 * num_states, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = [slice(3 * i, 3 * i + 3) for i in range(num_states)]
    return [state_over(scores[..., part], values[part]) for part in parts], state_over(scores, values)


def small_state(out: float, lse: float) -> AttentionState:
    return AttentionState(torch.full((1, 1, 1), out), torch.full((1, 1), lse))


def flat(*states: AttentionState) -> Tensor:
    """Concatenate all elements of some states."""
    return torch.cat([x.flatten() for state in states for x in (state.out, state.lse)])


def assert_state(got: Any, expected: AttentionState, *, atol: float = 1e-5, check_dtype: bool = False) -> None:
    assert got is not None, "your result: None. Is a `return` missing?"
    assert isinstance(got, AttentionState), f"your result: a {type(got).__name__}, expected an AttentionState"
    assert_close(got.lse, expected.lse, atol=atol, name="the LSE", check_dtype=check_dtype)
    assert_close(got.out, expected.out, atol=atol, name="the output", check_dtype=check_dtype)


def assert_pair(got: Any, out: Tensor, lse: Tensor, *, atol: float = 1e-5, check_dtype: bool = False) -> None:
    assert got is not None, "your result: None. Is a `return` missing?"
    assert isinstance(got, tuple) and len(got) == 2, "return the two tensors as a tuple"
    assert_close(got[0], out, atol=atol, name="the first result", check_dtype=check_dtype)
    assert_close(got[1], lse, atol=atol, name="the LSE", check_dtype=check_dtype)


class Called(TorchFunctionMode):
    """Record the names of torch's functions that are called inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


# softmax_with_lse ---------------------------------------------------------------------------------------------------


def assert_softmax(hw: Homework, scores: Tensor, *, atol: float = 1e-6, check_dtype: bool = False) -> None:
    dtype = torch.promote_types(scores.dtype, torch.float32)
    rows, lses = [], []
    for row in scores.double().flatten(0, -2).tolist():
        _, lse = state_in_floats(row, [[0.0]] * len(row))
        lses.append(lse)
        rows.append([math.exp(s - lse) if s > -math.inf else 0.0 for s in row])
    weights = torch.tensor(rows, dtype=dtype).view(scores.shape)
    lse = torch.tensor(lses, dtype=dtype).view(scores.shape[:-1])
    assert_pair(hw.softmax_with_lse(scores), weights, lse, atol=atol, check_dtype=check_dtype)


@check("softmax_with_lse", mistake="a weight is exp(score) over the row's sum; the LSE is the natural log of that sum")
def test_two_scores(hw: Homework) -> None:
    assert_softmax(hw, torch.tensor([[0.0, -math.log(3.0)]]))


@check(
    "softmax_with_lse", mistake="the sum was taken after the maximum was subtracted: add the maximum to its logarithm"
)
def test_lse_holds_the_maximum(hw: Homework) -> None:
    assert_softmax(hw, torch.tensor([[3.0, 2.0, 2.0]]))


@check(
    "softmax_with_lse", mistake="exp of a large score is infinite: subtract the row's maximum before you exponentiate"
)
def test_large_scores(hw: Homework) -> None:
    for scores in ([1000.0, 1001.0], [-1000.0, -1001.0]):
        assert_softmax(hw, torch.tensor([scores]), atol=1e-4)


@check(
    "softmax_with_lse", mistake="every row needs its own maximum: relative to another row's, its exponentials underflow"
)
def test_each_row_has_its_own_maximum(hw: Homework) -> None:
    assert_softmax(hw, torch.tensor([[[300.0, 301.0, 299.0]], [[-300.0, -302.0, -301.0]]]), atol=1e-4)


@check("softmax_with_lse", mistake="a score of -inf is a masked key: its weight is 0, and the others sum to 1")
def test_hidden_scores(hw: Homework) -> None:
    assert_softmax(hw, torch.tensor([[-math.inf, 0.0, 1.0], [2.0, -math.inf, -math.inf]]))


@check(
    "softmax_with_lse", mistake="in a row of -inf, -inf - (-inf) and 0/0 are NaN; its weights are 0 and its LSE is -inf"
)
def test_a_row_without_visible_keys(hw: Homework) -> None:
    assert_softmax(hw, torch.tensor([[-math.inf, -math.inf], [0.0, 1.0]]))


@check("softmax_with_lse", mistake="you change the caller's scores in place, for example where they are -inf")
def test_scores_are_unchanged(hw: Homework) -> None:
    scores = torch.randn(3, 4)
    scores[0, 1], scores[2] = -math.inf, -math.inf
    before = scores.clone()
    hw.softmax_with_lse(scores)
    assert_equal(scores, before, name="the tensor `scores` after the call")


@check(
    "softmax_with_lse",
    mistake="convert to float32 first: a bfloat16 sum stalls at 256, a float16 sum overflows at 65,504",
    costs=0.2,
)
def test_half_precision_is_computed_in_float32(hw: Homework) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert_softmax(hw, torch.randn(2, 1000).to(dtype), atol=1e-5, check_dtype=True)


@check("softmax_with_lse", mistake="float64 in, float64 out: somewhere along the way you cast to float32", costs=0.2)
def test_softmax_of_float64(hw: Homework) -> None:
    assert_softmax(hw, torch.randn(2, 5, dtype=torch.float64), atol=1e-12, check_dtype=True)


@check("softmax_with_lse", mistake="build it from maximum, exp, sum and log: online softmax needs these pieces")
def test_the_pieces_are_your_own(hw: Homework) -> None:
    with Called() as called:
        hw.softmax_with_lse(torch.randn(2, 3))
    ready = called.names & {"softmax", "_softmax", "log_softmax", "softmin", "logsumexp", "logaddexp", "logcumsumexp"}
    assert not ready, f"you call {', '.join(sorted(ready))}"


@check(
    "softmax_with_lse", mistake="it fails for a combination of shapes and magnitudes that earlier checks did not try"
)
def test_random_rows(hw: Homework) -> None:
    for shape in ((1, 1), (4, 7), (2, 3, 5)):
        for size in (1.0, 30.0, 400.0):
            scores = size * torch.randn(shape)
            assert_softmax(hw, scores.masked_fill(torch.rand(shape) < 0.3, -math.inf), atol=1e-3)


# online_attention ---------------------------------------------------------------------------------------------------

Tile = tuple[Tensor, Tensor, Tensor]


def cut(k: Tensor, v: Tensor, mask: Tensor, lens: list[int]) -> list[Tile]:
    return list(zip(k.split(lens), v.split(lens), mask.split(lens, dim=1), strict=True))


def reused_memory(tiles: list[Tile]) -> Iterator[Tile]:
    """Yield each tile once, and fill it with NaN when the next one is requested."""
    for k, v, mask in tiles:
        handed = k.clone(), v.clone(), mask.clone()
        yield handed
        handed[0].fill_(math.nan)
        handed[1].fill_(math.nan)
        handed[2].fill_(True)


def assert_online(
    hw: Homework,
    q: Tensor,
    tiles: list[Tile],
    scale: float,
    *,
    once: bool = False,
    atol: float = 1e-5,
    check_dtype: bool = False,
) -> None:
    k, v, mask = (
        torch.cat([c[0] for c in tiles]),
        torch.cat([c[1] for c in tiles]),
        torch.cat([c[2] for c in tiles], 1),
    )
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = (x.to(dtype) for x in attention_in_floats(q, k, v, mask, scale))
    got = hw.online_attention(q, reused_memory(tiles) if once else tiles, scale=scale)
    assert_pair(got, out, lse, atol=atol, check_dtype=check_dtype)


def tiles_with_scores(*tiles: list[float]) -> list[Tile]:
    """Make tiles for the query 1: a key is its own score, and the value of key i is 2 ** i."""
    k = torch.tensor([score for tile in tiles for score in tile])[:, None]
    v = 2.0 ** torch.arange(len(k))[:, None]
    return cut(k, v, torch.ones(1, len(k), dtype=torch.bool), [len(tile) for tile in tiles])


@check(
    "online_attention",
    mistake="with a single visible key (mask True), the output is its value and the LSE its score times `scale`",
)
def test_one_key(hw: Homework) -> None:
    assert_online(hw, torch.full((1, 1), 3.0), tiles_with_scores([0.7]), 0.5)


@check(
    "online_attention",
    mistake="within one tile, the weights are the softmax of q·k times `scale`, and they multiply the values",
)
def test_one_tile(hw: Homework) -> None:
    assert_online(hw, torch.full((1, 1), 3.0), tiles_with_scores([0.3, 0.1, -0.4]), 0.5)


@check("online_attention", mistake="the sums continue from tile to tile, and are divided once, after the last")
def test_the_maximum_comes_first(hw: Homework) -> None:
    assert_online(hw, torch.ones(1, 1), tiles_with_scores([2.0], [1.0], [0.0]), 1.0)


@check(
    "online_attention",
    mistake="when the maximum rises, rescale the sum and the output so far by exp(old maximum - new maximum)",
)
def test_the_maximum_rises(hw: Homework) -> None:
    scores = [[math.log(1.0)], [math.log(3.0)], [math.log(2.0)], [math.log(6.0)]]
    assert_online(hw, torch.ones(1, 1), tiles_with_scores(*scores), 1.0)


@check("online_attention", mistake="a tile of small scores must not lower the maximum: keep the larger of old and new")
def test_the_maximum_never_falls(hw: Homework) -> None:
    assert_online(hw, torch.ones(1, 1), tiles_with_scores([100.0, 99.0], [-100.0], [99.5]), 1.0, atol=1e-4)


@check("online_attention", mistake="exp of a large score is infinite: subtract the running maximum first")
def test_scores_near_1000(hw: Homework) -> None:
    assert_online(hw, torch.ones(1, 1), tiles_with_scores([1000.0], [1001.0, 999.0], [1002.0]), 1.0, atol=1e-3)


@check("online_attention", mistake="start with a maximum of -inf: relative to 0, exponentials of low scores underflow")
def test_scores_below_zero(hw: Homework) -> None:
    assert_online(hw, torch.ones(1, 1), tiles_with_scores([-100.0], [-100.0, -100.0]), 1.0, atol=1e-4)


@check("online_attention", mistake="every query has its own maximum and its own sum")
def test_queries_are_independent(hw: Homework) -> None:
    k, v = torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([[1.0], [2.0], [4.0]])
    tiles = cut(k, v, torch.ones(2, 3, dtype=torch.bool), [1, 2])
    assert_online(hw, torch.tensor([[100.0], [-100.0]]), tiles, 1.0, atol=1e-4)


@check("online_attention", mistake="a masked key has no weight: True means visible")
def test_masked_keys(hw: Homework) -> None:
    q, k, v = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 4)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 1]], dtype=torch.bool)
    assert_online(hw, q, cut(k, v, mask, [2, 3]), 0.5)


@check(
    "online_attention",
    mistake="before its first visible key a query's maximum is still -inf, and -inf - (-inf) is NaN: shift by 0 there",
)
def test_the_first_tile_is_masked(hw: Homework) -> None:
    q, k, v = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 4)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    assert_online(hw, q, cut(k, v, mask, [2, 3]), 0.5)


@check("online_attention", mistake="a query without visible keys has the output 0, not 0/0, and the LSE -inf")
def test_a_query_without_visible_keys(hw: Homework) -> None:
    q, k, v = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3, 4)
    mask = torch.tensor([[0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    assert_online(hw, q, cut(k, v, mask, [1, 2]), 0.5)
    assert_pair(hw.online_attention(q, iter([]), scale=0.5), torch.zeros(2, 4), torch.full((2,), -math.inf))


@check("online_attention", mistake="a tile without any visible key is skipped, but the tiles after it still count")
def test_a_tile_that_is_masked_for_all(hw: Homework) -> None:
    q, k, v = torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 4)
    for first, second in ((0, 0), (1, 0)):
        columns = [first, first, second, second, 1, 1]
        mask = torch.tensor([columns, columns], dtype=torch.bool)
        assert_online(hw, q, cut(k, v, mask, [2, 2, 2]), 0.5)


@check(
    "online_attention",
    mistake="a masked score is -inf, not a large negative number, because a visible score may be lower; or the "
    "maximum includes hidden scores",
)
def test_visible_scores_far_below_zero(hw: Homework) -> None:
    k, v = torch.tensor([[-1e38], [0.0], [0.0]]), torch.tensor([[3.0], [100.0], [100.0]])
    mask = torch.tensor([[True, False, False]])
    for lens in ([2, 1], [1, 2]):
        assert_online(hw, torch.ones(1, 1), cut(k, v, mask, lens), 1.0)


@check("online_attention", mistake="you iterate over the tiles twice: the second time, the iterator is exhausted")
def test_one_pass(hw: Homework) -> None:
    q, k, v = torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 4)
    tiles = cut(k, v, torch.rand(2, 6) < 0.8, [2, 1, 3])
    out, lse = attention_in_floats(q, k, v, torch.cat([c[2] for c in tiles], 1), 0.5)
    assert_pair(hw.online_attention(q, iter(tiles), scale=0.5), out.float(), lse.float())


@check("online_attention", mistake="you keep tiles for later: their memory is reused when you ask for the next one")
def test_tiles_are_valid_until_the_next(hw: Homework) -> None:
    q, k, v = torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 4)
    assert_online(hw, q, cut(k, v, torch.rand(2, 6) < 0.8, [2, 1, 3]), 0.5, once=True)


@check("online_attention", mistake="what you keep between tiles grows with the number of keys", costs=0.4)
def test_memory_does_not_grow(hw: Homework) -> None:
    q, peaks = torch.randn(2, 8), []
    for num_tiles in (4, 64):
        k, v = torch.randn(8 * num_tiles, 8), torch.randn(8 * num_tiles, 8)
        tiles = list(reused_memory(cut(k, v, torch.ones(2, 8 * num_tiles, dtype=torch.bool), [8] * num_tiles)))
        peaks.append(measure_memory(lambda tiles=tiles: hw.online_attention(q, iter(tiles), scale=0.5)).peak)
    few, many = peaks
    assert many <= few, f"with 4 tiles your tensors take up to {few:,} bytes at once, with 64 tiles {many:,}"


@check("online_attention", mistake="compute and return float32: convert bfloat16 tiles when they arrive", costs=0.2)
def test_bfloat16_tiles(hw: Homework) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (torch.randn(n, 8).to(dtype) for n in (2, 60, 60))
        assert_online(hw, q, cut(k, v, torch.ones(2, 60, dtype=torch.bool), [7] * 8 + [4]), 0.3, check_dtype=True)


@check("online_attention", mistake="float64 in, float64 out: somewhere along the way you cast to float32", costs=0.2)
def test_float64_tiles(hw: Homework) -> None:
    q, k, v = (torch.randn(n, 4, dtype=torch.float64) for n in (2, 7, 7))
    tiles = cut(k, v, torch.ones(2, 7, dtype=torch.bool), [3, 4])
    assert_online(hw, q, tiles, 0.5, atol=1e-12, check_dtype=True)
    out, lse = torch.zeros_like(q), torch.full((2,), -math.inf, dtype=torch.float64)
    assert_pair(hw.online_attention(q, iter([]), scale=0.5), out, lse, check_dtype=True)


@check("online_attention", mistake="the boundaries between tiles change the result")
def test_the_tile_size_does_not_matter(hw: Homework) -> None:
    generator = torch.Generator().manual_seed(2)
    for lens in ([12], [1] * 12, [5, 1, 6], [2, 9, 1]):
        q, k, v = (torch.randn(n, 4, generator=generator) for n in (3, 12, 12))
        mask = torch.rand(3, 12, generator=generator) < 0.6
        assert_online(hw, 4 * q, cut(k, v, mask, lens), 0.7, once=True)


# merge_states -------------------------------------------------------------------------------------------------------


@check(
    "merge_states", mistake="two states with equal LSEs give the mean of their outputs and twice the sum: LSE + log 2"
)
def test_equal_shares(hw: Homework) -> None:
    assert_state(hw.merge_states(small_state(2.0, 0.5), small_state(4.0, 0.5)), small_state(3.0, 0.5 + math.log(2.0)))


@check(
    "merge_states", mistake="a state is weighted by its share of exp(lse), with natural logarithms: here 4/12 and 8/12"
)
def test_shares_of_the_sum(hw: Homework) -> None:
    got = hw.merge_states(small_state(6.0, math.log(4.0)), small_state(3.0, math.log(8.0)))
    assert_state(got, small_state(4.0, math.log(12.0)))


@check("merge_states", mistake="exp of an LSE overflows: subtract the larger of the two first, or use logaddexp")
def test_lse_near_1000(hw: Homework) -> None:
    for lse in (1000.0, -1000.0):
        got = hw.merge_states(small_state(6.0, lse), small_state(3.0, lse + math.log(2.0)))
        assert_state(got, small_state(4.0, lse + math.log(3.0)), atol=1e-3)


@check("merge_states", mistake="every query and head has its own two shares: the new axis is the last, lse[..., None]")
def test_each_query_and_head_on_its_own(hw: Homework) -> None:
    scores = torch.randn(3, 3, 6, dtype=torch.float64)  # equal sizes: mixed-up axes have valid shapes
    values = torch.randn(6, 3, dtype=torch.float64)
    a, b = (state_over(scores[..., part], values[part], torch.float32) for part in (slice(0, 2), slice(2, 6)))
    assert_state(hw.merge_states(a, b), state_over(scores, values, torch.float32))


@check(
    "merge_states", mistake="each query and head has its own maximum: relative to another row's, exponentials underflow"
)
def test_rows_of_very_different_lse(hw: Homework) -> None:
    a = AttentionState(torch.tensor([[[6.0], [6.0]], [[6.0], [6.0]]]), torch.tensor([[1000.0, -1000.0], [0.0, -900.0]]))
    b = AttentionState(a.out / 2, a.lse + math.log(2.0))
    expected = AttentionState(a.out * 2 / 3, a.lse + math.log(3.0))
    assert_state(hw.merge_states(a, b), expected, atol=1e-3)


@check("merge_states", mistake="an empty state (out 0, LSE -inf) changes nothing, on either side")
def test_an_empty_state(hw: Homework) -> None:
    state = small_state(5.0, 2.0)
    assert_state(hw.merge_states(state, small_state(0.0, -math.inf)), state)
    assert_state(hw.merge_states(small_state(0.0, -math.inf), state), state)


@check(
    "merge_states", mistake="for two empty states -inf - (-inf) is NaN; the result is empty again: out 0 and LSE -inf"
)
def test_two_empty_states(hw: Homework) -> None:
    empty = small_state(0.0, -math.inf)
    assert_state(hw.merge_states(empty, empty), empty)


@check(
    "merge_states", mistake="some queries are empty on one side, some on both, some on neither: treat each separately"
)
def test_some_queries_are_empty(hw: Homework) -> None:
    scores = torch.zeros(4, 1, 2, dtype=torch.float64)
    scores[0], scores[1, 0, 0], scores[2, 0, 1] = -math.inf, -math.inf, -math.inf
    values = torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    a, b = (state_over(scores[..., i : i + 1], values[i : i + 1]) for i in (0, 1))
    assert_state(hw.merge_states(a, b), state_over(scores, values))


@check("merge_states", mistake="you change one of the states in place: the caller may merge it again")
def test_states_are_unchanged(hw: Homework) -> None:
    (a, b), _ = random_states(2, 2, 2, 3, seed=1)
    before = flat(a, b).clone()
    hw.merge_states(a, b)
    assert_equal(flat(a, b), before, name="the states after the call")


@check(
    "merge_states",
    mistake="out and lse keep their dtypes: float64 for exact tests, and bfloat16 outputs with a float32 LSE",
    costs=0.2,
)
def test_dtypes_of_a_state(hw: Homework) -> None:
    (a, b), whole = random_states(2, 2, 2, 3, seed=3)
    assert_state(hw.merge_states(a, b), whole, atol=1e-12, check_dtype=True)
    for dtype in (torch.bfloat16, torch.float32):
        narrow = [AttentionState(x.out.to(dtype), x.lse.float()) for x in (a, b)]
        expected = AttentionState(whole.out.to(dtype), whole.lse.float())
        assert_state(hw.merge_states(*narrow), expected, atol=0.05, check_dtype=True)


@check("merge_states", mistake="the order of the merges changes the result")
def test_any_order_any_brackets(hw: Homework) -> None:
    for seed in range(10):
        (a, b, c, d), whole = random_states(4, 2, 2, 3, seed)
        merge = hw.merge_states
        for got in (merge(merge(merge(a, b), c), d), merge(merge(a, b), merge(c, d)), merge(d, merge(merge(b, c), a))):
            assert_state(got, whole, atol=1e-5)


# split_kv_decode ----------------------------------------------------------------------------------------------------


class Workers:
    """Return attention states, and record the keys of each worker. Key j is j, and its score is scores[j]."""

    def __init__(self, m: int, heads: int = 1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(1, 2 * heads, 4, generator=generator)
        self.k = torch.arange(m).float()[:, None, None].repeat(1, heads, 4)
        self.v = torch.randn(m, heads, 4, generator=generator)
        self.scores = 3 * torch.randn(2 * heads, m, generator=generator)
        self.shares: list[list[int]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
        assert q.shape == self.q.shape and torch.equal(q, self.q), "each worker receives the whole query, unchanged"
        assert k.shape == v.shape and k.shape[1:] == self.k.shape[1:], (
            "a worker receives as many values as keys, with all heads"
        )
        keys = k[:, 0, 0].int().tolist()
        assert torch.equal(v, self.v[keys]), "the keys of a worker do not belong to its values"
        self.shares.append(keys)
        return self.state(keys)

    def state(self, keys: list[int]) -> AttentionState:
        heads = [
            state_in_floats(scores[keys].double().tolist(), self.v[keys, h // 2].double().tolist())
            for h, scores in enumerate(self.scores)
        ]
        out = torch.tensor([[out if keys else [0.0] * 4 for out, _ in heads]])
        return AttentionState(out, torch.tensor([[lse for _, lse in heads]]))


def decode(hw: Homework, m: int, num_splits: int, *, heads: int = 1, seed: int = 0) -> Workers:
    """Call the submission and check that every key was used once and that the result is attention over all keys."""
    workers = Workers(m, heads, seed)
    got = hw.split_kv_decode(workers.q, workers.k, workers.v, num_splits=num_splits, worker=workers)
    used = sorted(key for share in workers.shares for key in share)
    assert used == list(range(m)), f"with {m} keys in {num_splits} splits the workers received {used}"
    assert_state(got, workers.state(list(range(m))))
    return workers


@check("split_kv_decode", mistake="one worker receives all keys, and its state is the result")
def test_one_worker(hw: Homework) -> None:
    decode(hw, 6, 1)


@check("split_kv_decode", mistake="two workers receive half of the keys each, and their states merge by their LSEs")
def test_two_workers(hw: Homework) -> None:
    workers = decode(hw, 6, 2)
    sizes = [len(share) for share in workers.shares]
    assert sizes == [3, 3], f"the workers received {sizes} keys"


@check("split_kv_decode", mistake="the number of keys is not a multiple of num_splits: some key is lost or used twice")
def test_uneven_splits(hw: Homework) -> None:
    decode(hw, 11, 4)


@check("split_kv_decode", mistake="the splits are uneven: the longest share determines the run time")
def test_no_share_is_too_long(hw: Homework) -> None:
    for m, num_splits in ((11, 4), (10, 4), (95, 16)):
        longest = max(len(share) for share in decode(hw, m, num_splits).shares)
        limit = math.ceil(m / num_splits)
        assert longest <= limit, (
            f"{m} keys, {num_splits} splits: a worker received {longest}; at most {limit} are allowed"
        )


@check(
    "split_kv_decode", mistake="you call more than num_splits workers; ceil(m / num_splits) keys for each are enough"
)
def test_no_more_workers_than_splits(hw: Homework) -> None:
    for m, num_splits in ((11, 4), (9, 2), (95, 16)):
        calls = len(decode(hw, m, num_splits).shares)
        assert calls <= num_splits, f"{m} keys, {num_splits} splits: you called {calls} workers"


@check(
    "split_kv_decode",
    mistake="with few keys some workers receive none: m // num_splits may be 0, or a share begins past the end",
)
def test_more_splits_than_keys(hw: Homework) -> None:
    for m, num_splits in ((17, 16), (3, 8), (1, 132)):
        calls = len(decode(hw, m, num_splits).shares)
        assert calls <= num_splits, f"{m} keys, {num_splits} splits: you called {calls} workers"


@check("split_kv_decode", mistake="without any key the result is the empty state: out 0, LSE -inf")
def test_no_keys(hw: Homework) -> None:
    decode(hw, 0, 3)


@check("split_kv_decode", mistake="the number of splits changes the result")
def test_the_number_of_splits_does_not_matter(hw: Homework) -> None:
    for num_splits in (1, 2, 3, 5, 7, 16, 40):
        workers = decode(hw, 37, num_splits, heads=3, seed=num_splits)
        assert len(workers.shares) <= num_splits


# merge_tree ---------------------------------------------------------------------------------------------------------


class CountedMerge:
    """The reference merge, with a count of its calls."""

    def __init__(self, hw: Homework) -> None:
        self.merge, self.calls = hw.merge_states, 0

    def __call__(self, a: AttentionState, b: AttentionState) -> AttentionState:
        assert a.lse.shape == b.lse.shape, (
            f"merge received {a.lse.shape[0]} rows on one side and {b.lse.shape[0]} on the other"
        )
        self.calls += 1
        return self.merge(a, b)


def assert_tree(hw: Homework, num_states: int, *, n: int = 2, heads: int = 2, seed: int = 0) -> None:
    states, whole = random_states(num_states, n, heads, 3, seed)
    assert_state(hw.merge_tree(states, CountedMerge(hw)), whole, atol=1e-10)


@check("merge_tree", mistake="a single state is the result, without a merge")
def test_one_state(hw: Homework) -> None:
    assert_tree(hw, 1)


@check("merge_tree", mistake="two states: one call of merge")
def test_two_states(hw: Homework) -> None:
    assert_tree(hw, 2)


@check("merge_tree", mistake="with four states of two queries each, the rows of different queries are mixed up")
def test_rows_stay_apart(hw: Homework) -> None:
    assert_tree(hw, 4)


@check("merge_tree", mistake="with an odd number of states, a level leaves one over, which is lost or merged twice")
def test_odd_numbers(hw: Homework) -> None:
    for num_states in (3, 5, 7, 11):
        assert_tree(hw, num_states, seed=num_states)


@check("merge_tree", mistake="S states take ceil(log2 S) calls: one call merges all pairs of a level")
def test_logarithmic_number_of_calls(hw: Homework) -> None:
    for num_states in (2, 3, 4, 5, 8, 9, 100):
        states, _ = random_states(num_states, 1, 1, 1, seed=0)
        merge = CountedMerge(hw)
        hw.merge_tree(states, merge)
        wanted = math.ceil(math.log2(num_states))
        assert merge.calls == wanted, f"{num_states} states took {merge.calls} calls; {wanted} are enough"


@check("merge_tree", mistake="you write into one of the states: the caller may merge them again")
def test_the_states_stay_as_they_are(hw: Homework) -> None:
    states, _ = random_states(5, 2, 2, 3, seed=4)
    before = flat(*states).clone()
    hw.merge_tree(states, CountedMerge(hw))
    assert_equal(flat(*states), before, name="the states after the call")


@check("merge_tree", mistake="the order of the states, or an empty one among them, changes the result")
def test_any_order_of_states(hw: Homework) -> None:
    states, whole = random_states(13, 3, 2, 3, seed=5)
    empty = AttentionState(torch.zeros_like(whole.out), torch.full_like(whole.lse, -math.inf))
    for order in (states, states[::-1], [empty, *states[5:], empty, *states[:5]], [empty] * 3 + states):
        assert_state(hw.merge_tree(order, CountedMerge(hw)), whole, atol=1e-10)
