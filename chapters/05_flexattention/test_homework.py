"""Grader of chapter 05. Its oracles are loops over pairs of query and key."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from book.grading import Exercise, Homework, assert_close, assert_equal, check
from book.grading.assertions import CheckFailed
from book.memory import measure_memory

EXERCISES = [
    Exercise(
        "visible",
        points=1,
        minutes=5,
        difficulty=1,
        part="mask_mod",
        hints=(
            "Chapter 01's attention_mask got all positions at once. Here you compare one query position with one key "
            "position, and broadcasting does the rest.",
            "Return a function of (b, h, q_idx, kv_idx). The distance q_idx - kv_idx is 0 for the query's own key, "
            "negative for the future, and below window inside the window.",
            "if window is None: return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx. Otherwise join two comparisons "
            "with &, each in parentheses: (q_idx >= kv_idx) & (q_idx - kv_idx < window).",
        ),
    ),
    Exercise(
        "packed_prefix_lm",
        points=3,
        minutes=15,
        difficulty=2,
        hints=(
            "Compute two tensors before you define the function: the document of each token, and for each document "
            "the index of the token at which its prefix ends.",
            "torch.repeat_interleave gives each token its document. A pair is visible if both are in the same "
            "document and it is causal or its key is in the prefix. Mind the parentheses.",
            "ids = torch.repeat_interleave(torch.arange(len(prefix_lens)), qo_indptr.diff()); end = qo_indptr[:-1] + "
            "prefix_lens; (ids[q_idx] == ids[kv_idx]) & ((q_idx >= kv_idx) | (kv_idx < end[ids[kv_idx]])).",
        ),
    ),
    Exercise(
        "capped_alibi",
        points=1,
        minutes=5,
        difficulty=1,
        hints=(
            "A score_mod is called for one score, or for many that broadcast. Write the formula for one.",
            "h is a tensor: slopes[h] looks up the slope, whatever the shape of h. Apply the cap first, so that the "
            "ALiBi term is not capped.",
            "lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx)",
        ),
    ),
    Exercise(
        "blocks_of_mask",
        points=4,
        minutes=25,
        difficulty=2,
        hints=(
            "First compute two small bool tables [query blocks, key blocks]: whether a block has a visible pair, and "
            "whether all of its pairs are visible. Then turn each table into counts and indices.",
            "F.pad extends the mask to whole blocks with False. Reshape it to [query blocks, size, key blocks, size]; "
            "any and all over the second and the last axis are the two tables. A block is partial if any of its pairs "
            "is visible but not all are. A stable sort of `not chosen` puts the chosen indices first.",
            "mask = F.pad(mask, (0, -K % size, 0, -Q % size)); pairs = mask.view(rows, size, columns, size); any_ = "
            "pairs.any(3).any(1), all_ the same; for table in (any_ & ~all_, all_): counts = table.sum(-1).int(), "
            "indices = (~table).byte().argsort(dim=-1, stable=True).int().",
        ),
    ),
    Exercise(
        "classify_blocks",
        points=5,
        minutes=20,
        difficulty=2,
        part="classify_blocks",
        hints=(
            "Draw queries 4 to 7 against keys 2 to 5. Which pair has the smallest distance q - k, and which the "
            "largest?",
            "The distances in a block are all integers from first_query - last_key to last_query - first_key. A pair "
            "is visible if its distance is 0 to window - 1. Some pair is visible if the two ranges overlap, and all "
            "are if the first range lies inside the second.",
            "near, far = first_query - last_key, last_query - first_key; visited = (far >= 0) & (near < window); full "
            "= (near >= 0) & (far < window). Without a window, leave out the second comparisons.",
        ),
    ),
    Exercise(
        "blocks_of_documents",
        points=5,
        minutes=45,
        difficulty=3,
        challenge=True,
        hints=(
            "Take one query block. All keys that its queries see in earlier key blocks belong to a single document. "
            "Which one?",
            "Let start(token) be the first token of the document that a token belongs to. A key block is visited if "
            "it does not begin after the last query and does not end before start(first query). It is full if it ends "
            "at or before the first query and begins at or after start(last query).",
            "first = torch.arange(0, T, size); last = first + size - 1; start = lambda token: qo_indptr[torch."
            "searchsorted(qo_indptr, token, right=True) - 1]; compare first and last as a row (keys) with both as a "
            "column (queries). Query blocks with last >= T have no full blocks. List as in blocks_of_mask.",
        ),
    ),
]

Pair = Callable[[int, int], bool]  # whether query i sees key j: the oracles


def called(function: Any, name: str) -> Any:
    if function is None:
        raise CheckFailed(f"{name} returns None: is a `return` missing?", "")
    if not callable(function):
        raise CheckFailed(f"{name} returns a {type(function).__name__}; it should return a function", "")
    return function


def sees(mask_mod: Any, query: int, key: int) -> Tensor:
    zero = torch.tensor(0)
    return mask_mod(zero, zero, torch.tensor(query), torch.tensor(key))


def assert_sees(mask_mod: Any, pairs: Sequence[tuple[int, int]], expected: bool) -> None:
    for query, key in pairs:
        got = sees(mask_mod, query, key)
        assert_equal(got, expected, name=f"whether the query at {query} sees the key at {key}")


def assert_mask(mask_mod: Any, expected: Pair, queries: range, keys: range, name: str = "the mask") -> None:
    """All pairs at once, as tensors that broadcast."""
    zero = torch.zeros(1, 1, dtype=torch.long)
    got = mask_mod(zero, zero, torch.tensor(list(queries))[:, None], torch.tensor(list(keys))[None])
    want = torch.tensor([[expected(q, k) for k in keys] for q in queries])
    assert_equal(got, want, name=name)


def assert_traced(mask_mod: Any, expected: Pair, size: int) -> None:
    """Evaluate a mask_mod at all pairs under vmap, as FlexAttention does: no value can be read."""
    try:
        got = create_mask(mask_mod, 1, 1, size, size, device="cpu")[0, 0]
    except RuntimeError as error:
        raise AssertionError(f"the mask reads values of its arguments: {str(error).splitlines()[0]}") from None
    assert_equal(got, torch.tensor([[expected(q, k) for k in range(size)] for q in range(size)]), name="the mask")


# visible ------------------------------------------------------------------------------------------------------------


def decoder(window: int | None) -> Pair:
    return lambda q, k: k in range(0 if window is None else max(0, q - window + 1), q + 1)


@check(
    "visible",
    mistake="the comparison is strict or reversed, or None is treated as a window: without a window, show all keys "
    "with kv_idx <= q_idx",
)
def test_itself_and_the_past(hw: Homework) -> None:
    mask_mod = called(hw.visible(None), "visible")
    assert_sees(mask_mod, [(0, 0), (3, 3), (3, 1), (900, 0)], True)
    assert_sees(mask_mod, [(0, 1), (1, 3)], False)


@check(
    "visible",
    mistake="the window is ignored or off by one: it includes the query's own key, so with a window of 3, "
    "position 5 sees 3, 4 and 5",
)
def test_a_window_counts_the_query(hw: Homework) -> None:
    mask_mod = called(hw.visible(3), "visible")
    assert_sees(mask_mod, [(5, 5), (5, 4), (5, 3)], True)
    assert_sees(mask_mod, [(5, 2), (5, 1), (5, 0)], False)


@check(
    "visible",
    mistake="you test only distance < window, which is true of later keys as well: also test kv_idx <= q_idx",
)
def test_a_window_hides_the_future(hw: Homework) -> None:
    mask_mod = called(hw.visible(3), "visible")
    assert_sees(mask_mod, [(5, 6), (5, 7), (5, 20)], False)


@check(
    "visible",
    mistake="`and` and .item() need single values, but the arguments are tensors of many positions: join "
    "comparisons with &",
)
def test_many_pairs_at_once(hw: Homework) -> None:
    assert_mask(hw.visible(2), decoder(2), range(5), range(5))


@check(
    "visible",
    mistake="a table of positions ends somewhere, but q_idx and kv_idx can be any positions: compare them instead",
)
def test_any_positions(hw: Homework) -> None:
    assert_mask(hw.visible(None), decoder(None), range(100_000, 100_003), range(99_998, 100_004))
    assert_mask(hw.visible(3), decoder(3), range(100_000, 100_003), range(99_996, 100_004))


@check(
    "visible",
    mistake="your mask reads a value with `if` or .item(), but FlexAttention traces it without values: use "
    "tensor operations only",
)
def test_traced(hw: Homework) -> None:
    assert_traced(hw.visible(None), decoder(None), 4)
    assert_traced(hw.visible(2), decoder(2), 4)


@check("visible", mistake="it fails for another window: compare the printed mask with one that you draw by hand")
def test_random_windows(hw: Homework) -> None:
    for window in (1, 4, 7, 30):
        assert_mask(hw.visible(window), decoder(window), range(20), range(20))


# packed_prefix_lm ---------------------------------------------------------------------------------------------------


def packed(bounds: Sequence[int], prefixes: Sequence[int]) -> Pair:
    owner = [d for d in range(len(prefixes)) for _ in range(bounds[d], bounds[d + 1])]

    def pair(q: int, k: int) -> bool:
        document = owner[k]
        return owner[q] == document and (k <= q or k - bounds[document] < prefixes[document])

    return pair


def assert_packed(
    hw: Homework, bounds: list[int], prefixes: list[int], queries: range | None = None, keys: range | None = None
) -> None:
    mask_mod = called(hw.packed_prefix_lm(torch.tensor(bounds), torch.tensor(prefixes)), "packed_prefix_lm")
    tokens = range(bounds[-1])
    name = f"the mask, for qo_indptr {bounds} and prefix_lens {prefixes},"
    assert_mask(mask_mod, packed(bounds, prefixes), queries or tokens, keys or tokens, name)


@check(
    "packed_prefix_lm",
    mistake="later keys are visible without a prefix, or earlier ones are hidden: show keys with kv_idx <= "
    "q_idx, as in `visible`",
)
def test_a_causal_document(hw: Homework) -> None:
    assert_packed(hw, [0, 4], [0])


@check(
    "packed_prefix_lm",
    mistake="the prefix is ignored, off by one, or hidden from earlier tokens: all tokens of the document see "
    "its first prefix_len tokens",
)
def test_a_prefix(hw: Homework) -> None:
    assert_packed(hw, [0, 5], [3])


@check("packed_prefix_lm", mistake="the batch is treated as one long document: hide the keys of other documents")
def test_two_causal_documents(hw: Homework) -> None:
    assert_packed(hw, [0, 2, 5], [0, 0])


@check(
    "packed_prefix_lm",
    mistake="you count the prefix from the start of the batch: count it from the document's own first token, "
    "qo_indptr[d]",
)
def test_the_prefix_of_a_later_document(hw: Homework) -> None:
    assert_packed(hw, [0, 3, 7], [0, 2], range(3, 7), range(3, 7))


@check(
    "packed_prefix_lm",
    mistake="a prefix is visible to other documents, because & binds tighter than |: write (same document) & "
    "(causal | prefix)",
)
def test_a_prefix_stays_in_its_document(hw: Homework) -> None:
    assert_packed(hw, [0, 3, 6], [2, 2])


@check(
    "packed_prefix_lm", mistake="one prefix length serves all documents: look up the length by the document of the key"
)
def test_each_its_own_prefix(hw: Homework) -> None:
    assert_packed(hw, [0, 4, 8, 12], [1, 4, 2])


@check(
    "packed_prefix_lm",
    mistake="you number only documents that have tokens: count empty ones, too, so that every document keeps its "
    "own index",
)
def test_an_empty_document(hw: Homework) -> None:
    assert_packed(hw, [0, 2, 2, 6], [1, 0, 3])


@check(
    "packed_prefix_lm",
    mistake="your mask reads a value with `if` or .item(), but FlexAttention traces it without values: index "
    "captured tensors instead",
)
def test_traced_with_tensors(hw: Homework) -> None:
    bounds, prefixes = [0, 2, 6], [0, 3]
    mask_mod = hw.packed_prefix_lm(torch.tensor(bounds), torch.tensor(prefixes))
    assert_traced(mask_mod, packed(bounds, prefixes), 6)


@check("packed_prefix_lm", mistake="it fails for another batch: compare with a mask that you draw by hand")
def test_random_documents(hw: Homework) -> None:
    for count in (1, 3, 6):
        lengths = torch.randint(0, 6, (count,)).tolist()
        lengths[-1] += 1
        bounds = [sum(lengths[:i]) for i in range(count + 1)]
        assert_packed(hw, bounds, [int(torch.randint(0, n + 1, ())) for n in lengths])


# capped_alibi -------------------------------------------------------------------------------------------------------


FAR = 1e6  # a cap so high that nothing is capped, in whatever order


def score_of(hw: Homework, slopes: list[float], cap: float, score: float, head: int, query: int, key: int) -> Tensor:
    score_mod = called(hw.capped_alibi(torch.tensor(slopes, dtype=torch.float64), cap), "capped_alibi")
    index = [torch.tensor(i) for i in (0, head, query, key)]
    got = score_mod(torch.tensor(score, dtype=torch.float64), *index)
    if isinstance(got, Tensor) and got.shape:
        message = f"for one pair of one head, score_mod returns a tensor of shape {list(got.shape)}"
        raise CheckFailed(message, "you use the slopes of all heads: pick the slope of head h, slopes[h]")
    return got


def expected_score(slope: float, cap: float, score: float, distance: int) -> float:
    return cap * math.tanh(score / cap) - slope * distance


@check(
    "capped_alibi",
    mistake="you clamp the score, or leave out the factor before tanh: the soft-cap is cap * tanh(score / cap)",
)
def test_the_cap(hw: Homework) -> None:
    for score in (-100.0, -3.0, 0.0, 1.5, 9.0, 40.0):
        got = score_of(hw, [0.0], 5.0, score, 0, 6, 2)
        assert_close(got, expected_score(0.0, 5.0, score, 4), name=f"the score of {score} with cap 5 and slope 0")


@check(
    "capped_alibi",
    mistake="the ALiBi term has the wrong sign or distance: subtract slope * (q_idx - kv_idx), without an "
    "absolute value",
)
def test_the_distance(hw: Homework) -> None:
    for query, key in ((0, 0), (6, 2), (3, 2), (2, 6)):  # a later key, too: a mask may show it
        want = expected_score(0.5, FAR, 0.0, query - key)
        name = f"the score of query {query} and key {key}, 0 before and with slope 0.5"
        assert_close(score_of(hw, [0.5], FAR, 0.0, 0, query, key), want, name=name)


@check(
    "capped_alibi",
    mistake="you use one slope for all heads, or index by b: look up the query head's own slope, slopes[h]",
)
def test_a_slope_for_each_head(hw: Homework) -> None:
    for head, slope in enumerate((0.5, 0.25, 0.125)):
        got = score_of(hw, [0.5, 0.25, 0.125], FAR, 0.0, head, 5, 1)
        assert_close(got, expected_score(slope, FAR, 0.0, 4), name=f"the score of head {head}")


@check(
    "capped_alibi",
    mistake="you cap the ALiBi term together with the score: apply the cap first, then subtract the term",
)
def test_the_order(hw: Homework) -> None:
    got = score_of(hw, [1.0], 5.0, 8.0, 0, 20, 1)
    assert_close(got, expected_score(1.0, 5.0, 8.0, 19), name="a score of 8 at distance 19 with cap 5 and slope 1")


@check(
    "capped_alibi",
    mistake="float() and .item() take a single head, but the arguments are tensors of many: slopes[h] looks up "
    "all slopes at once",
)
def test_all_scores_at_once(hw: Homework) -> None:
    slopes, scores = torch.rand(3, dtype=torch.float64), 9 * torch.randn(2, 3, 4, 5, dtype=torch.float64)
    index = torch.meshgrid(
        *(torch.arange(n) for n in scores.shape),
        indexing="ij",
    )
    got = hw.capped_alibi(slopes, 4.0)(scores, *index)
    want = [
        expected_score(slopes[h].item(), 4.0, scores[b, h, q, k].item(), q - k)
        for b in range(2)
        for h in range(3)
        for q in range(4)
        for k in range(5)
    ]
    assert_close(got, torch.tensor(want, dtype=torch.float64).view(scores.shape), name="the scores")


@check(
    "capped_alibi",
    mistake="your score_mod reads a value with `if`, float() or .item(), but FlexAttention traces it without "
    "values: use tensor operations only",
)
def test_traced_scores(hw: Homework) -> None:
    slopes, scores = torch.rand(2, dtype=torch.float64), 9 * torch.randn(2, 3, 4, dtype=torch.float64)
    mod = hw.capped_alibi(slopes, 4.0)
    for in_dims in ((0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)):
        mod = torch.vmap(mod, in_dims=in_dims)
    try:
        got = mod(scores, torch.tensor(0), *(torch.arange(n) for n in scores.shape))
    except RuntimeError as error:
        raise AssertionError(f"score_mod reads values of its arguments: {str(error).splitlines()[0]}") from None
    want = [
        expected_score(slopes[h].item(), 4.0, scores[h, q, k].item(), q - k)
        for h in range(2)
        for q in range(3)
        for k in range(4)
    ]
    assert_close(got, torch.tensor(want, dtype=torch.float64).view(scores.shape), name="the scores")


# blocks_of_mask -----------------------------------------------------------------------------------------------------

Lists = list[list[int]]  # block indices of each query block


def listed(mask: Tensor, size: int) -> tuple[Lists, Lists]:
    """Partial and full blocks of each query block, by looking at every pair."""
    cells = mask.tolist()
    num_queries, num_keys = mask.shape
    partial: Lists = []
    full: Lists = []
    for top in range(0, num_queries, size):
        partial.append([])
        full.append([])
        for left in range(0, num_keys, size):
            seen = [
                cells[q][k]
                for q in range(top, min(top + size, num_queries))
                for k in range(left, min(left + size, num_keys))
            ]
            if len(seen) == size * size and all(seen):
                full[-1].append(left // size)
            elif any(seen):
                partial[-1].append(left // size)
    return partial, full


def assert_is_blocks(got: Any) -> None:
    if got is None:
        raise CheckFailed("your result is None: is a `return` missing?", "")
    if not isinstance(got, tuple) or len(got) != 4:
        raise CheckFailed(f"your result is a {type(got).__name__}, not Blocks", "")


def assert_blocks(
    got: Any, mask: Tensor, size: int, tail: bool = False, of: str = "", check_dtype: bool = False
) -> None:
    """Compare with a loop. `of` describes the input, for messages."""
    assert_is_blocks(got)
    columns = -(-mask.shape[1] // size)
    shown = "/".join("".join(".x"[cell] for cell in row) for row in mask.int().tolist())
    of = of or (f", for the mask {shown} in blocks of {size}" if mask.numel() <= 64 else f", in blocks of {size}")
    halves = zip(("kv", "full_kv"), (got[:2], got[2:]), listed(mask, size), strict=True)
    for name, (counts, indices), lists in halves:
        want = torch.tensor([len(row) for row in lists], dtype=torch.int32)
        assert_close(counts, want, atol=0, name=f"the tensor {name}_num_blocks{of},", check_dtype=check_dtype)
        # Only shape and dtype; the values are compared list by list.
        blank = torch.zeros(len(lists), columns, dtype=torch.int32)
        name_of_indices = f"the tensor {name}_indices{of},"
        assert_close(torch.zeros_like(indices), blank, atol=0, name=name_of_indices, check_dtype=check_dtype)
        for row, (mine, chosen) in enumerate(zip(indices.tolist(), lists, strict=True)):
            where = f"the first {len(chosen)} entries of {name}_indices[{row}]{of}"
            assert_equal(mine[: len(chosen)], chosen, name=f"the list of {where},")
            rest = [block for block in mine[len(chosen) :] if not 0 <= block < columns]
            if tail and rest:
                raise AssertionError(
                    f"the list {name}_indices[{row}] contains {rest[0]}, which is not a block index{of}"
                )


def drawn(*rows: str) -> Tensor:
    """A mask of rows of x (visible) and . (hidden)."""
    return torch.tensor([[cell == "x" for cell in row] for row in rows])


def assert_drawn(hw: Homework, size: int, *rows: str, tail: bool = False) -> None:
    mask = drawn(*rows)
    before = mask.clone()
    got = hw.blocks_of_mask(mask, size)
    assert torch.equal(mask, before), "your function changed the mask that it was given"
    assert_blocks(got, mask, size, tail)


@check(
    "blocks_of_mask",
    mistake="you do not look at every pair, or you ask for several visible ones: one visible pair makes a block "
    "partial",
)
def test_one_visible_pair(hw: Homework) -> None:
    assert_drawn(hw, 2, "..", "x.")


@check(
    "blocks_of_mask", mistake="a full block is listed as partial, or in both lists: list it among the full blocks only"
)
def test_a_full_block(hw: Homework) -> None:
    assert_drawn(hw, 2, "xx", "xx")


@check(
    "blocks_of_mask",
    mistake="you judge a block by its corners or by its share of visible pairs: it is full only if every pair is "
    "visible",
)
def test_one_hidden_pair(hw: Homework) -> None:
    assert_drawn(hw, 3, "xxx", "x.x", "xxx")
    mask = torch.ones(16, 16, dtype=torch.bool)
    mask[5, 9] = False
    assert_blocks(hw.blocks_of_mask(mask, 16), mask, 16, of=", for one block of 16 by 16 with a hidden pair")


@check(
    "blocks_of_mask",
    mistake="you list every block that is not full as partial: a partial block has at least one visible pair",
)
def test_hidden_blocks(hw: Homework) -> None:
    assert_drawn(hw, 2, "xx..", "x...", "....", "....")


@check(
    "blocks_of_mask",
    mistake="queries and keys are swapped: axis 0 of the mask is queries and axis 1 is keys, and their numbers "
    "may differ",
)
def test_more_keys_than_queries(hw: Homework) -> None:
    assert_drawn(hw, 2, "xx......", "xx......", "x.......", "........")


@check(
    "blocks_of_mask",
    mistake="the indices are not sorted, or stay in their own columns: move them to the front of their list, in "
    "increasing order",
)
def test_order(hw: Homework) -> None:
    assert_drawn(hw, 2, "..x.xx.x", "....xx..", "x.xx..x.", "..xx....")


@check(
    "blocks_of_mask",
    mistake="your sort is not stable: with 17 key blocks or more, it loses the order of equal values; pass stable=True",
)
def test_order_of_many_blocks(hw: Homework) -> None:
    mask = torch.rand(8, 80) < 0.5  # 40 key blocks
    assert_blocks(hw.blocks_of_mask(mask, 2), mask, 2)


@check(
    "blocks_of_mask",
    mistake="you drop blocks that extend past the end of the mask, or pad them with True: pad them with False, "
    "so they are never full",
)
def test_blocks_that_are_cut_off(hw: Homework) -> None:
    assert_drawn(hw, 2, "xxx", "xxx", "xxx")


@check(
    "blocks_of_mask",
    mistake="the entries after the listed ones are not block indices: fill them with valid ones, because the kernel "
    "may load what it does not use",
)
def test_the_padding_of_a_list(hw: Homework) -> None:
    assert_drawn(hw, 2, "....xx", "....xx", tail=True)


@check(
    "blocks_of_mask",
    mistake="counts and indices are int64, which is what sum and argsort return: convert both to int32, "
    "which the kernel reads",
    costs=0.2,
)
def test_blocks_in_int32(hw: Homework) -> None:
    mask = drawn("xx..", "xxx.")
    assert_blocks(hw.blocks_of_mask(mask, 2), mask, 2, check_dtype=True)


@check("blocks_of_mask", mistake="it fails for another mask: list its blocks by hand")
def test_random_masks(hw: Homework) -> None:
    for queries, keys, size in ((1, 1, 1), (3, 5, 1), (9, 14, 3), (16, 16, 4), (5, 3, 8)):
        coarse = torch.rand(-(-queries // size), -(-keys // size)) < 0.4  # some blocks full, some hidden
        mask = coarse.repeat_interleave(size, 0).repeat_interleave(size, 1)[:queries, :keys].clone()
        mask ^= torch.rand(queries, keys) < 0.05
        assert_blocks(hw.blocks_of_mask(mask, size), mask, size, tail=True)


# classify_blocks ----------------------------------------------------------------------------------------------------


def classified(queries: tuple[int, int], keys: tuple[int, int], window: int | None) -> tuple[bool, bool]:
    pairs = [decoder(window)(q, k) for q in range(queries[0], queries[1] + 1) for k in range(keys[0], keys[1] + 1)]
    return any(pairs), all(pairs)


def assert_classified(
    hw: Homework,
    queries: tuple[int, int],
    keys: tuple[int, int],
    window: int | None = None,
    only: tuple[str, ...] = ("visited", "full"),
) -> None:
    got = hw.classify_blocks(*(torch.tensor(x) for x in (*queries, *keys)), window)
    if not isinstance(got, tuple) or len(got) != 2:
        raise CheckFailed("return two tensors: visited and full", "")
    where = f"queries {queries[0]} to {queries[1]}, keys {keys[0]} to {keys[1]}, window {window}"
    for name, mine, want in zip(("visited", "full"), got, classified(queries, keys, window), strict=True):
        if name in only:
            assert_equal(mine, want, name=f"the tensor {name} ({where})")


@check(
    "classify_blocks",
    mistake="a comparison is strict or reversed, or visited and full are swapped: a query sees its own key and "
    "all earlier ones",
)
def test_one_query_one_key(hw: Homework) -> None:
    for key in (3, 5, 6):
        assert_classified(hw, (5, 5), (key, key))


@check(
    "classify_blocks",
    mistake="you decide visited with the wrong pair: compare the last query, which sees the most keys, with the "
    "first key",
)
def test_some_query_sees_some_key(hw: Homework) -> None:
    for first in (0, 4, 6, 7, 8, 12):
        assert_classified(hw, (4, 7), (first, first + 3), only=("visited",))


@check(
    "classify_blocks",
    mistake="you decide full with the wrong pair: compare the first query, which sees the fewest keys, with the "
    "last key",
)
def test_every_query_sees_every_key(hw: Homework) -> None:
    for first in (0, 1, 2, 4, 6, 8):
        assert_classified(hw, (4, 7), (first, first + 3), only=("full",))


@check(
    "classify_blocks",
    mistake="visited ignores the window, is off by one, or uses the last query: the first query reaches back "
    "farthest, window - 1 positions",
)
def test_where_a_window_ends(hw: Homework) -> None:
    for last in (3, 4, 5, 9):
        assert_classified(hw, (8, 11), (last - 1, last), 4, only=("visited",))


@check(
    "classify_blocks",
    mistake="full ignores the window or tests it with the first query: even the last query must reach the "
    "block's first key",
)
def test_full_in_a_window(hw: Homework) -> None:
    for first in (4, 5, 6, 7):
        assert_classified(hw, (8, 9), (first, first + 1), 4, only=("full",))


@check(
    "classify_blocks",
    mistake="with a window, you test only its far end: in a full block, the first query must see the last key as well",
)
def test_full_in_a_window_is_causal(hw: Homework) -> None:
    for first in (8, 9, 10):
        assert_classified(hw, (8, 9), (first, first + 1), 4, only=("full",))


@check(
    "classify_blocks",
    mistake="you test only the corners of a block, and a narrow window can pass between them: compare ranges of "
    "distances instead",
)
def test_a_window_narrower_than_a_block(hw: Homework) -> None:
    assert_classified(hw, (4, 7), (3, 10), 1)
    assert_classified(hw, (10, 20), (8, 13), 2)


@check(
    "classify_blocks",
    mistake="`if` and `and` need a single block, but the four tensors may hold many and broadcast: use & and "
    "other tensor operations",
)
def test_a_table_of_blocks(hw: Homework) -> None:
    first = torch.arange(0, 12, 3)
    for window in (None, 4):
        got = hw.classify_blocks(first[:, None], first[:, None] + 2, first, first + 2, window)
        want = [[classified((q, q + 2), (k, k + 2), window) for k in first.tolist()] for q in first.tolist()]
        for i, name in enumerate(("visited", "full")):
            table = torch.tensor([[cell[i] for cell in row] for row in want])
            assert_equal(got[i], table, name=f"the tensor {name} (a table of blocks, window {window})")
    assert torch.equal(first, torch.arange(0, 12, 3)), "your function changed the positions that it was given"


@check("classify_blocks", mistake="it fails for another block: draw the pairs of the printed one by hand")
def test_random_blocks(hw: Homework) -> None:
    for _ in range(60):
        q, k = torch.randint(0, 12, (2,)).tolist()
        queries, keys = (q, q + int(torch.randint(0, 6, ()))), (k, k + int(torch.randint(0, 6, ())))
        for window in (None, int(torch.randint(1, 9, ()))):
            assert_classified(hw, queries, keys, window)


# blocks_of_documents ------------------------------------------------------------------------------------------------


def assert_documents(hw: Homework, bounds: list[int], size: int, dtype: torch.dtype = torch.int64) -> None:
    pair, rows = packed(bounds, [0] * (len(bounds) - 1)), range(bounds[-1])
    mask = torch.tensor([[pair(q, k) for k in rows] for q in rows])
    got = hw.blocks_of_documents(torch.tensor(bounds, dtype=dtype), size)
    assert_blocks(got, mask, size, of=f", for qo_indptr {bounds} in blocks of {size}")


@check(
    "blocks_of_documents",
    mistake="partial and full blocks are confused: in a single causal document, blocks on the diagonal are partial, "
    "and blocks below it are full",
)
def test_blocks_of_one_document(hw: Homework) -> None:
    assert_documents(hw, [0, 6], 2)


@check(
    "blocks_of_documents",
    mistake="you list all earlier key blocks: begin the list of a query block where its own document begins",
)
def test_documents_of_whole_blocks(hw: Homework) -> None:
    assert_documents(hw, [0, 4, 8], 2)


@check(
    "blocks_of_documents",
    mistake="you look up the document of the last query, but the first query may belong to an earlier document and "
    "reaches back farthest: begin the list where the document of the first query begins",
)
def test_a_document_begins_inside_a_block(hw: Homework) -> None:
    got = hw.blocks_of_documents(torch.tensor([0, 5, 8, 16]), 4)
    assert_is_blocks(got)
    for row, expected in enumerate([[0], [0, 1], [2], [2, 3]]):
        both = [got[i + 1][row, : int(got[i][row])].tolist() for i in (0, 2)]
        name = f"for qo_indptr [0, 5, 8, 16] in blocks of 4, the block indices of query block {row}"
        assert_equal(sorted(both[0] + both[1]), expected, name=name)


@check(
    "blocks_of_documents",
    mistake="you decide full with the first query: even the last query must be in the document of the block's "
    "first key",
)
def test_full_blocks_of_one_document_only(hw: Homework) -> None:
    assert_documents(hw, [0, 7, 12], 2)
    assert_documents(hw, [0, 3, 10], 2)


@check(
    "blocks_of_documents",
    mistake="you keep one document per block, but a block can contain several: look up the document of a token, "
    "not of a block",
)
def test_short_documents(hw: Homework) -> None:
    assert_documents(hw, [0, 1, 2, 3, 8], 4)


@check(
    "blocks_of_documents",
    mistake="you treat the last query block as complete: it extends past the end of the batch, so none of its "
    "blocks is full",
)
def test_the_last_query_block_is_cut_off(hw: Homework) -> None:
    assert_documents(hw, [0, 6], 4)


@check(
    "blocks_of_documents",
    mistake="your search ends at an empty document, which owns no token: of several documents that begin at one "
    "token, take the last",
)
def test_empty_documents(hw: Homework) -> None:
    assert_documents(hw, [0, 0, 4, 4, 4, 9, 9], 2)


@check(
    "blocks_of_documents",
    mistake="your sort is not stable: with 17 key blocks or more, it loses the order of equal values; pass stable=True",
)
def test_the_order_of_many_blocks(hw: Homework) -> None:
    assert_documents(hw, [0, 5, 80], 2)  # 40 key blocks


@check(
    "blocks_of_documents",
    mistake="some tensor has an element for each pair of tokens, or for each token and block: compare the "
    "ends of blocks instead",
    costs=0.4,
)
def test_no_dense_mask(hw: Homework) -> None:
    size, num_blocks = 128, 64
    bounds = torch.tensor([0, 1000, 1001, 5000, size * num_blocks])
    largest = measure_memory(lambda: hw.blocks_of_documents(bounds, size)).largest
    limit = 64 * num_blocks**2  # a bool for each token and block takes twice as much
    assert largest <= limit, f"some operation creates a tensor of {largest:,} bytes for {num_blocks**2:,} blocks"


@check(
    "blocks_of_documents",
    mistake="counts and indices are int64, which is what sum and argsort return: convert both to int32, "
    "which the kernel reads",
    costs=0.2,
)
def test_documents_in_int32(hw: Homework) -> None:
    mask = torch.ones(6, 6).tril().bool()
    assert_blocks(hw.blocks_of_documents(torch.tensor([0, 6]), 2), mask, 2, check_dtype=True)


@check("blocks_of_documents", mistake="it fails for another batch: compare with a mask that you draw by hand")
def test_random_ragged_batches(hw: Homework) -> None:
    for size in (1, 2, 3, 8):
        lengths = [1, *torch.randint(0, 9, (5,)).tolist()]
        assert_documents(hw, [sum(lengths[:i]) for i in range(7)], size, torch.int32)
