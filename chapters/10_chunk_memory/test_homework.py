"""Grader of chapter 10. Its oracles are RoPE at the true position, attention with the whole mask, and plain prompts."""

import random
from collections.abc import Sequence as ListLike
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from book.grading import Exercise, Homework, assert_close, assert_equal, assert_raises, check, require
from book.grading.assertions import CheckFailed
from mini_engine.attention.backend import create_backend
from mini_engine.attention.naive import masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import AttentionState
from mini_engine.batch import StepBatch, upload_levels
from mini_engine.errors import ChunkError
from mini_engine.kv_cache.paged import PagedKVCache
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.request import Context, PinnedPages, PlacedChunk
from mini_engine.rope import Linear, RopeConfig, apply_rope, inverse_frequencies, rope_tables

EXERCISES = [
    Exercise(
        "rotate_again",
        points=2,
        minutes=10,
        difficulty=1,
        hints=(
            "A key at position p has been rotated by p times the frequency of each pair. What is missing at the new "
            "position?",
            "The missing angle is offset times the frequency, whatever p was. mini_engine.rope has a function for the "
            "tables of cosines and sines, and one that applies them.",
            "inv_freq = inverse_frequencies(rope) in float32 or, for float64, in float64; then apply_rope(x, "
            "*rope_tables(offsets, inv_freq)).",
        ),
    ),
    Exercise(
        "place_chunks",
        points=3,
        minutes=15,
        difficulty=1,
        hints=(
            "Only distances count. How far is a query at position p of this request from the chunk's first key? At "
            "which position would a query be equally far from the position where that key was computed?",
            "The first key is stored at len(before), and acts as if it were at the chunk's position here. A query at p "
            "must be at a distance of p - position from it, so it moves to p + len(before) - position.",
            "tokens = the tokens of all chunks so far; position = len(tokens); offset = len(chunk.before) - position; "
            "exact = chunk.before == tokens; then tokens += chunk.token_ids.",
        ),
    ),
    Exercise(
        "attend_to_chunks",
        points=4,
        minutes=15,
        difficulty=2,
        hints=(
            "Each chunk is a level of a cascade, and the own keys are the last level. Which level needs a mask?",
            "One attention_state for each chunk, without a mask, of queries that rotate_again has moved by the chunk's "
            "offset; one for the own keys, with q as it is; then merge_states.",
            "The mask of the last level is torch.ones(n, m, dtype=torch.bool).tril(m - n): query i is token m - n + i.",
        ),
    ),
    Exercise(
        "chunk_levels",
        points=7,
        minutes=60,
        difficulty=3,
        part="chunk_levels",
        hints=(
            "The states are merged in any case, so does it matter in which level a request attends to a chunk? Two "
            "requests with the same chunks in different orders can list them in the same order.",
            "Sort each request's chunks by their first page, and the requests by (more than one new token, that list). "
            "Level i holds the i-th chunk of each list, and neighbors with the same chunk there are a group. Write one "
            "level first, for requests with at most one chunk.",
            "starts = the requests whose chunk differs from the one before; qo_indptr = first_token[[*starts, B]]; "
            "kv_page_indptr = cumulative sums of the groups' page counts; kv_last_page_len = (num_keys - 1) "
            "% page_size + 1; query_offsets = np.repeat of each request's own offset, not the group's, by num_new in "
            "the new order.",
        ),
    ),
    Exercise(
        "ChunkStore",
        points=4,
        minutes=30,
        difficulty=2,
        hints=(
            "Which container keeps an order and can move an entry to its end? Why is a set of the chunks in use not "
            "enough?",
            "An OrderedDict from name to pages, least recently used first, and a Counter of uses. In add, first "
            "collect the names to evict, and change the store only when you know that there will be room.",
            "for other in the OrderedDict: stop once free >= num_pages; evict it if its count is 0 and it is not in "
            "keep; free += its pages. Raise ChunkError if free is still too small. begin checks all names first.",
        ),
    ),
    Exercise(
        "recompute",
        points=4,
        minutes=20,
        difficulty=2,
        challenge=True,
        hints=(
            "The model calls attend once in each layer, with the queries, keys and values of the chosen tokens alone. "
            "Which other keys must these queries see, and where are they?",
            "Clone the stored tensors. In attend, write k and v into the chosen rows of the layer's clones, and return "
            "attention of q over all n rows, under a mask of positions.",
            "visible = torch.arange(n) <= chosen[:, None]; model(token_ids[chosen], chosen, attend), where attend "
            "returns masked_attention(q, new_keys[layer], new_values[layer], scale=..., mask=visible).",
        ),
    ),
]

ON_GPU = torch.cuda.is_available() and find_spec("flashinfer") is not None
COMPILING = 300.0  # CPU seconds that FlashInfer may need to compile its kernels
SCALE = 0.4
ROPES = [RopeConfig(10_000.0, 8), RopeConfig(500_000.0, 4, Linear(4.0))]
Lists = ListLike[ListLike[int]]


# What the checks share ----------------------------------------------------------------------------------------------


def at(x: Tensor, positions: Tensor, rope: RopeConfig) -> Tensor:
    """RoPE at some positions."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return apply_rope(x, *rope_tables(positions, inverse_frequencies(rope).to(x.device, dtype)))


def randn(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


# rotate_again -------------------------------------------------------------------------------------------------------


def rotated(
    hw: Homework,
    positions: ListLike[int],
    offsets: ListLike[int],
    rope: RopeConfig = ROPES[0],
    atol: float = 1e-3,
) -> None:
    """Check keys in float64 that are moved against RoPE at the new positions."""
    raw, before = randn(len(positions), 2, rope.head_dim), torch.tensor(positions)
    k, moved = at(raw, before, rope), torch.tensor(offsets)
    given = k.clone()
    got = hw.rotate_again(k, moved, rope)
    require(torch.equal(k, given), "you changed x; the stored keys serve other requests")
    assert_close(got, at(raw, before + moved, rope), atol=atol, name="the moved keys")


@check("rotate_again", mistake="a key from position 0 that moves by o positions must become the key at position o")
def test_from_position_0(hw: Homework) -> None:
    rotated(hw, [0], [3])
    rotated(hw, [0], [0])


@check(
    "rotate_again", mistake="rotate by the angle of the offset alone: the key already has the rotation of its position"
)
def test_from_elsewhere(hw: Homework) -> None:
    rotated(hw, [5], [3])


@check("rotate_again", mistake="a negative offset moves a row toward the front: look at the sign of the angle")
def test_towards_the_front(hw: Homework) -> None:
    rotated(hw, [5], [-3])
    rotated(hw, [5], [-5])


@check("rotate_again", mistake="each row moves by its own offset: do not move all rows by the same one")
def test_an_offset_for_each_row(hw: Homework) -> None:
    rotated(hw, [5, 6, 2, 40], [3, -2, 0, 400])


@check(
    "rotate_again",
    mistake="take the frequencies from inverse_frequencies(rope): theta alone does not give those of a stretched RoPE",
)
def test_a_stretched_rope(hw: Homework) -> None:
    rotated(hw, [5, 6, 2, 40], [3, -2, 0, 400], ROPES[1])


@check("rotate_again", mistake="for float64 keys, compute both the angles and the rotation in float64", costs=0.2)
def test_in_float64(hw: Homework) -> None:
    rotated(hw, [5, 6, 2, 40], [3, -2, 0, 400], atol=1e-9)


@check("rotate_again", mistake="the angles are rounded to the dtype of x: compute them in at least float32", costs=0.2)
def test_in_bfloat16(hw: Homework) -> None:
    raw, offsets = randn(4, 2, 8), torch.tensor([300, 301, -255, 7])
    k = at(raw, torch.tensor([1000, 1001, 1002, 1003]), ROPES[0]).bfloat16()
    got = hw.rotate_again(k, offsets, ROPES[0])
    assert_equal(got.dtype, torch.bfloat16, name="the dtype")
    want = at(k.double(), offsets, ROPES[0])
    assert_close(got.double(), want, atol=0.02, name="the moved keys")
    share = float((got != want.bfloat16()).double().mean())
    if share > 0.1:
        raise CheckFailed(
            f"{share:.0%} of the numbers differ from the exact ones, rounded once",
            "something is rounded before the result: compute the rotation in float32 too, and round once",
        )


# place_chunks -------------------------------------------------------------------------------------------------------


def placed(hw: Homework, chunks: ListLike[tuple[ListLike[int], ListLike[int]]], expected: ListLike[Any]) -> None:
    got = hw.place_chunks([hw.Stored(tuple(own), tuple(before)) for own, before in chunks])
    assert isinstance(got, tuple) and len(got) == 3, "three lists are expected: positions, query offsets, exact or not"
    for name, mine, right in zip(("positions", "query offsets", "exact"), got, expected, strict=True):
        assert_equal(list(mine), list(right), name=f"{name}")


ONE, TWO, THREE = [7, 8, 9], [4, 5], [1, 2, 3, 4]


@check(
    "place_chunks",
    mistake="a chunk computed on its own is exact if it comes first (note that a list never equals a tuple)",
)
def test_one_chunk(hw: Homework) -> None:
    placed(hw, [(ONE, [])], [[0], [0], [True]])
    placed(hw, [], [[], [], []])


@check(
    "place_chunks",
    mistake="the offset is the position at which a chunk was computed minus its position here, not the reverse",
)
def test_two_chunks_on_their_own(hw: Homework) -> None:
    placed(hw, [(ONE, []), (TWO, [])], [[0, 3], [0, -3], [True, False]])
    placed(hw, [(TWO, []), (ONE, [])], [[0, 2], [0, -2], [True, False]])


@check(
    "place_chunks", mistake="a chunk used where it was computed, after the same tokens, has the offset 0 and is exact"
)
def test_a_chain(hw: Homework) -> None:
    chain = [(ONE, []), (TWO, ONE), (THREE, ONE + TWO)]
    placed(hw, chain, [[0, 3, 5], [0, 0, 0], [True] * 3])


@check("place_chunks", mistake="a chunk computed after others moves from where it was computed, not from position 0")
def test_a_chunk_that_moves_forward(hw: Homework) -> None:
    placed(hw, [(TWO, ONE), (ONE, [])], [[0, 2], [3, -2], [False, False]])


@check(
    "place_chunks",
    mistake="the same position is not enough: a chunk must follow the same tokens that it was computed after",
)
def test_other_tokens_in_front(hw: Homework) -> None:
    placed(hw, [([6, 6, 6], []), (TWO, ONE)], [[0, 3], [0, 0], [True, False]])
    placed(hw, [(ONE, [2]), (TWO, ONE)], [[0, 3], [1, 0], [False, True]])


@check(
    "place_chunks", mistake="a chunk after a composed one is exact if the tokens before it are right: compare tokens"
)
def test_after_a_copy(hw: Homework) -> None:
    """A chain of three, of which the middle one is another copy, computed on its own."""
    chain = [(ONE, []), (TWO, []), (THREE, ONE + TWO)]
    placed(hw, chain, [[0, 3, 5], [0, -3, 0], [True, False, True]])


@check("place_chunks", mistake="a chunk may occur twice: each occurrence has its own position and offset")
def test_a_chunk_twice(hw: Homework) -> None:
    placed(hw, [(TWO, []), (TWO, []), (TWO, TWO)], [[0, 2, 4], [0, -2, -2], [True, False, False]])


# attend_to_chunks ---------------------------------------------------------------------------------------------------


def over_chunks(
    hw: Homework,
    lens: ListLike[int],
    computed_at: ListLike[int],
    num_own: int,
    num_new: int,
    order: ListLike[int] | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    shape: tuple[int, int, int] = (4, 2, 8),
    factor: float = 1.0,
) -> tuple[AttentionState, Tensor, Tensor]:
    """The answer for one request, and output and LSE of one softmax over all keys at their true positions."""
    (hq, hk, d), rope = shape, RopeConfig(10_000.0, shape[2])
    total = sum(lens) + num_own
    raw_q, raw_k, v = randn(num_new, hq, d) * factor, randn(total, hk, d), randn(total, hk, d).to(device, dtype)
    starts = np.append(0, np.cumsum(lens)).astype(int).tolist()
    positions = torch.arange(total)
    q, true_k = at(raw_q, positions[total - num_new :], rope), at(raw_k, positions, rope)
    chunks, offsets = [], []
    for i in order if order is not None else range(len(lens)):
        piece = slice(starts[i], starts[i + 1])
        stored_at = torch.arange(lens[i]) + computed_at[i]
        chunks.append((at(raw_k[piece], stored_at, rope).to(device, dtype), v[piece]))
        offsets.append(computed_at[i] - starts[i])
    mine = q.to(device, dtype)
    own = true_k[starts[-1] :].to(device, dtype), v[starts[-1] :]
    given = [x.clone() for pair in [*chunks, own] for x in pair]
    given_q = mine.clone()
    got = hw.attend_to_chunks(mine, chunks, offsets, own, rope=rope, scale=SCALE)
    assert isinstance(got, AttentionState), f"an AttentionState is expected, not {type(got).__name__}"
    after = [x for pair in [*chunks, own] for x in pair]
    require(torch.equal(mine, given_q), "you changed q: rotate into a new tensor")
    require(all(map(torch.equal, given, after)), "you changed stored keys or values, which other requests share")
    mask = torch.ones(num_new, total, dtype=torch.bool).tril(total - num_new)
    q, v = q.to(device), v.double()
    true_k, mask = true_k.to(device), mask.to(device)
    scores = torch.einsum("nhd,mhd->nhm", q, true_k.repeat_interleave(hq // hk, dim=1)) * SCALE
    lse = scores.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)
    return got, masked_attention(q, true_k, v, scale=SCALE, mask=mask), lse


def assert_state(result: tuple[AttentionState, Tensor, Tensor]) -> None:
    got, out, lse = result
    assert_close(got.out, out, atol=1e-9, name="the output")
    assert_close(got.lse, lse, atol=1e-9, name="the LSE", mistake="the output is right, but its LSE is not")


@check(
    "attend_to_chunks",
    mistake="without chunks this is plain causal attention, where the new tokens are the last of the own keys",
)
def test_own_keys_alone(hw: Homework) -> None:
    assert_state(over_chunks(hw, [], [], num_own=5, num_new=1))
    assert_state(over_chunks(hw, [], [], num_own=5, num_new=5))
    assert_state(over_chunks(hw, [], [], num_own=5, num_new=2))


@check(
    "attend_to_chunks",
    mistake="a chunk that has not moved needs no rotation, but its state must be merged with the state of the own keys",
)
def test_a_chunk_in_place(hw: Homework) -> None:
    assert_state(over_chunks(hw, [6], [0], num_own=1, num_new=1))
    assert_state(over_chunks(hw, [6, 3], [0, 6], num_own=4, num_new=3))


@check(
    "attend_to_chunks",
    mistake="exp(LSE) overflows: subtract the larger LSE before you weight two states, as `merge_states` does",
)
def test_large_scores(hw: Homework) -> None:
    assert_state(over_chunks(hw, [6, 3], [0, 6], num_own=4, num_new=3, factor=3000.0))


@check(
    "attend_to_chunks",
    mistake="for a chunk that has moved, rotate the queries by its offset, in the direction of its sign",
)
def test_a_chunk_that_has_moved(hw: Homework) -> None:
    assert_state(over_chunks(hw, [6], [40], num_own=1, num_new=1))


@check(
    "attend_to_chunks",
    mistake="each chunk has its own offset, and the own keys have none: rotate the given queries each time",
)
def test_chunks_with_different_offsets(hw: Homework) -> None:
    assert_state(over_chunks(hw, [6, 3, 5], [0, 0, 0], num_own=4, num_new=1))
    assert_state(over_chunks(hw, [6, 3, 5], [7, 0, 100], num_own=4, num_new=1))


@check("attend_to_chunks", mistake="with several new tokens, only the own keys have a causal mask; chunks have none")
def test_several_new_tokens(hw: Homework) -> None:
    assert_state(over_chunks(hw, [2, 3], [0, 0], num_own=6, num_new=6))
    assert_state(over_chunks(hw, [2, 3], [0, 0], num_own=6, num_new=4))


@check(
    "attend_to_chunks", mistake="chunks may be given in any order: use each chunk's offset, not its place in the list"
)
def test_any_order(hw: Homework) -> None:
    assert_state(over_chunks(hw, [6, 3, 5], [7, 0, 2], num_own=4, num_new=2, order=[2, 0, 1]))


@check(
    "attend_to_chunks",
    mistake="for random chunks, the state differs from one softmax over all keys at their true positions",
)
def test_random_chunks(hw: Homework) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        lens = [rng.randrange(1, 9) for _ in range(rng.randrange(5))]
        own = rng.randrange(1, 6)
        computed_at = [rng.randrange(50) for _ in lens]
        assert_state(over_chunks(hw, lens, computed_at, own, rng.randrange(1, own + 1)))


@check(
    "attend_to_chunks",
    mistake="it is right on the CPU but not on the GPU: look at devices and dtypes",
    seconds=COMPILING,
)
def test_in_bfloat16_on_a_gpu(hw: Homework) -> None:
    if not ON_GPU:
        return
    got, out, _ = over_chunks(
        hw, [64, 100, 33], [0, 0, 5], 40, 40, dtype=torch.bfloat16, device="cuda", shape=(8, 2, 64)
    )
    assert_close(got.out.double(), out, atol=4e-2, rtol=4e-2, name="the output")


# chunk_levels -------------------------------------------------------------------------------------------------------

Own = ListLike[tuple[int, int]]  # the chunks of a request: which one, and its query offset


def pinned_chunks(lens: ListLike[int], size: int, seed: int = 0) -> list[PinnedPages]:
    """Pages for chunks of some lengths, taken at random."""
    counts = [-(-n // size) for n in lens]
    pages = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
    return [PinnedPages(own) for own in np.split(pages, np.cumsum(counts)[:-1])]


def contexts_of(requests: ListLike[Own], lens: ListLike[int], pinned: ListLike[PinnedPages]) -> list[Context]:
    return [tuple(PlacedChunk(pinned[i], [0] * lens[i], offset) for i, offset in own) for own in requests]


def levels_of(
    hw: Homework, requests: ListLike[Own], num_new: ListLike[int], lens: ListLike[int], size: int = 4, seed: int = 0
) -> tuple[list[int], list[list[tuple[int, int]]], int]:
    """Check what each request attends to.

    Returns:
        The order, each request's chunks and offsets as found, and the pages that all groups read.
    """
    pinned = pinned_chunks(lens, size, seed)
    contexts = contexts_of(requests, lens, pinned)
    got = hw.chunk_levels(contexts, np.array(num_new), size)
    assert isinstance(got, tuple) and len(got) == 2, "two results are expected: the order, and a list of levels"
    order, levels = np.asarray(got[0]).tolist(), list(got[1])
    assert sorted(order) == list(range(len(requests))), f"the order is {order}; it should contain each request once"
    assert_equal(len(levels), max(map(len, requests), default=0), name="the number of levels")
    first = np.append(0, np.cumsum([num_new[b] for b in order])).tolist()
    found: list[list[tuple[int, int]]] = [[] for _ in requests]
    reads = 0
    for i, level in enumerate(levels):
        reads += check_level(level, f"level {i}", first)
        qo, page_indptr = level.qo_indptr.tolist(), level.kv_page_indptr.tolist()
        for place, b in enumerate(order):
            group = max(g for g in range(len(qo) - 1) if qo[g] <= first[place])
            pages = level.kv_page_indices[page_indptr[group] : page_indptr[group + 1]].tolist()
            if not pages:
                assert not int(level.kv_last_page_len[group]), (
                    f"level {i}: a group without pages has kv_last_page_len 0"
                )
                continue
            num_keys = (len(pages) - 1) * size + int(level.kv_last_page_len[group])
            which = [c for c, own in enumerate(pinned) if own.pages.tolist() == pages]
            assert which, f"level {i}: a group has the pages {pages}, which are not the pages of one chunk in order"
            assert num_keys == lens[which[0]], (
                f"level {i}: kv_last_page_len gives a chunk {num_keys} keys instead of {lens[which[0]]}"
            )
            offsets = level.query_offsets[first[place] : first[place + 1]].tolist()
            assert len(set(offsets)) == 1, f"level {i}: the tokens of one request have the offsets {offsets}"
            found[b].append((which[0], offsets[0]))
    for b, own in enumerate(requests):
        assert sorted(found[b]) == sorted(own), (
            f"request {b} attends to (chunk, offset) {sorted(found[b])}; it should be {sorted(own)}"
        )
    return order, found, reads


def check_level(level: Any, name: str, first: list[int]) -> int:
    """Check the form of a level; returns how many pages its groups read."""
    qo, indptr = level.qo_indptr.tolist(), level.kv_page_indptr.tolist()
    for what, values in (("qo_indptr", qo), ("kv_page_indptr", indptr)):
        assert values[0] == 0 and values == sorted(values), (
            f"{name}: {what} is {values}; it should begin with 0 and never decrease"
        )
    assert qo[-1] == first[-1], f"{name}: qo_indptr ends with {qo[-1]}, but there are {first[-1]} tokens"
    assert set(qo) <= set(first), (
        f"{name}: a group of qo_indptr {qo} begins inside a request; requests begin at {first}"
    )
    assert len(qo) == len(indptr), f"{name}: qo_indptr and kv_page_indptr have {len(qo)} and {len(indptr)} entries"
    assert len(level.kv_last_page_len) == len(qo) - 1, f"{name}: kv_last_page_len needs one entry for each group"
    assert indptr[-1] == len(level.kv_page_indices), (
        f"{name}: kv_page_indptr should end with the number of pages, {len(level.kv_page_indices)}"
    )
    assert len(level.query_offsets) == qo[-1], f"{name}: query_offsets needs one entry for each token"
    return len(level.kv_page_indices)


@check("chunk_levels", mistake="each chunk of a request goes into one level, with its pages and its offset")
def test_one_request(hw: Homework) -> None:
    levels_of(hw, [[(0, 0)]], [1], [8])
    levels_of(hw, [[(0, 0), (1, -8)]], [1], [8, 4])


@check("chunk_levels", mistake="the last page holds the remaining keys, and a full page holds page_size keys, not 0")
def test_a_last_page_in_part(hw: Homework) -> None:
    for length in (1, 3, 4, 5, 8):
        levels_of(hw, [[(0, 2)]], [1], [length])


@check("chunk_levels", mistake="qo_indptr and query_offsets count tokens, not requests")
def test_several_new_tokens_each(hw: Homework) -> None:
    levels_of(hw, [[(0, 3)], [(1, -2)]], [3, 2], [5, 6])


@check(
    "chunk_levels",
    mistake="a request without a chunk in a level is in a group without pages; without any chunks there are no levels",
)
def test_requests_without_chunks(hw: Homework) -> None:
    levels_of(hw, [[], []], [1, 1], [4])
    levels_of(hw, [[], [(0, 1)], [(0, 1), (1, 2)]], [1, 1, 1], [4, 4])


@check("chunk_levels", mistake="requests with one new token come before all others")
def test_decodes_first(hw: Homework) -> None:
    order, _, _ = levels_of(hw, [[(0, 1)], [(0, 1)], [], [(1, 1)]], [5, 1, 2, 1], [4, 4])
    assert sorted(order[:2]) == [1, 3], f"the order is {order}; requests 1 and 3 have one new token each"


@check("chunk_levels", mistake="make neighbors with the same chunk one group, so that its pages are read once")
def test_sharers_are_one_group(hw: Homework) -> None:
    _, _, reads = levels_of(hw, [[(0, 0)], [(1, 0)], [(0, 0)], [(1, 0)]], [1] * 4, [8, 12])
    assert_equal(reads, 5, name="the number of pages that are read")


@check(
    "chunk_levels",
    mistake="requests may share a chunk at different offsets: an offset belongs to a token, not to a group",
)
def test_sharers_at_different_offsets(hw: Homework) -> None:
    _, _, reads = levels_of(hw, [[(0, 0)], [(0, -5)], [(0, 7)]], [1] * 3, [8])
    assert_equal(reads, 2, name="the number of pages that are read")


@check(
    "chunk_levels",
    mistake="requests with the same chunks in other orders do not share them: levels need not follow positions",
)
def test_another_order_of_the_same_chunks(hw: Homework) -> None:
    for seed in range(4):
        requests = [[(0, 0), (1, -8), (2, -20)], [(2, 0), (0, -4), (1, -12)], [(1, 0), (2, -12), (0, -16)]]
        _, _, reads = levels_of(hw, requests, [1] * 3, [8, 12, 4], seed=seed)
        assert_equal(reads, 6, name="the number of pages that are read")


@check("chunk_levels", mistake="a request that has a chunk twice must attend to it twice, at both offsets")
def test_a_chunk_twice_in_a_request(hw: Homework) -> None:
    levels_of(hw, [[(0, 0), (1, -4), (0, -8)], [(0, 0)]], [1, 1], [4, 4])


@check(
    "chunk_levels",
    mistake="a request in a random step misses a chunk or its offset, or the same chunks are not shared",
)
def test_random_contexts(hw: Homework) -> None:
    for seed in range(80):
        rng = random.Random(seed)
        size, lens = rng.choice([1, 4]), [rng.randrange(1, 10) for _ in range(rng.randrange(1, 5))]
        sets = [rng.sample(range(len(lens)), rng.randrange(len(lens) + 1)) for _ in range(3)]
        requests = []
        for _ in range(rng.randrange(1, 8)):
            own = rng.choice(sets)
            requests.append([(i, rng.randrange(-9, 9)) for i in rng.sample(own, len(own))])
        num_new = [rng.choice([1, 1, 3]) for _ in requests]
        _, _, reads = levels_of(hw, requests, num_new, lens, size, seed)
        groups = {(new > 1, frozenset(i for i, _ in own)) for own, new in zip(requests, num_new, strict=True)}
        most = sum(-(-lens[i] // size) for _, own in groups for i in own)
        assert reads <= most, f"{reads} pages are read; {most} are enough if requests with the same chunks share them"


def planned_step(
    hw: Homework, spec: AttentionSpec, size: int, dtype: torch.dtype, device: str
) -> tuple[StepBatch, PagedKVCache, list[tuple[list[tuple[list[int], int]], int, int]]]:
    """A step over chunks, and for each request its chunks' pages and offsets, its own page, and its new tokens."""
    lens, own_lens, num_new = [size * 2 - 1, size, size * 3 - 2], [3, 2, 4, 1], np.array([1, 1, 3, 1])
    pinned = pinned_chunks(lens, size)
    requests = [[(0, 0), (1, 5)], [(1, -3), (0, 2)], [(2, 1), (0, -9)], []]
    contexts = contexts_of(requests, lens, pinned)
    order, levels = hw.chunk_levels(contexts, num_new, size)
    num_pages = sum(len(own.pages) for own in pinned)
    batch = StepBatch.build(
        token_ids=[0] * int(num_new.sum()),
        num_new=num_new[order],
        kv_lens=[own_lens[b] for b in order],
        pages=[num_pages + b for b in order.tolist()],
        page_size=size,
        page_positions=np.array([sum(lens[i] for i, _ in requests[b]) for b in order.tolist()]),
        levels=upload_levels(levels, torch.device(device)),
        device=device,
    )
    cache = PagedKVCache([spec], num_pages + len(requests), size, dtype, device)
    for x in cache.layers[0]:
        x.copy_(randn(*x.shape))
    kv: list[tuple[list[tuple[list[int], int]], int, int]] = []
    for b in order.tolist():
        slots = [([p * size + j for p in pinned[i].pages for j in range(size)][: lens[i]], o) for i, o in requests[b]]
        kv.append((slots, (num_pages + b) * size + own_lens[b], int(num_new[b])))
    return batch, cache, kv


def over_slots(
    hw: Homework, spec: AttentionSpec, q: Tensor, cache: PagedKVCache, kv: ListLike[Any], size: int
) -> Tensor:
    """Attention of the step by the reference's attend_to_chunks, one request after the other."""
    assert spec.rope is not None
    k, v = (x.flatten(0, 1) for x in cache.layers[0])
    outs, first = [], 0
    for slots, end, num_new in kv:
        own = slice((end - 1) // size * size, end)
        chunks = [(k[index], v[index]) for index, _ in slots]
        offsets = [offset for _, offset in slots]
        mine = q[first : first + num_new]
        state = hw.attend_to_chunks(mine, chunks, offsets, (k[own], v[own]), rope=spec.rope, scale=spec.scale)
        outs.append(state.out)
        first += num_new
    return torch.cat(outs)


@check(
    "chunk_levels",
    mistake="on your levels, the engine's cascade backend differs from attention computed request by request",
)
def test_the_engine_runs_on_it(hw: Homework) -> None:
    spec = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=8, scale=SCALE, rope=RopeConfig(100.0, 8))
    batch, cache, kv = planned_step(hw, spec, 4, torch.float64, "cpu")
    q = randn(len(batch.token_ids), 4, 8)
    backend = create_backend("cascade", [spec], cache, Parts())
    backend.plan(batch)
    assert_close(backend.run(0, q), over_slots(hw, spec, q, cache, kv, 4), atol=1e-9, name="attention over your levels")


@check(
    "chunk_levels",
    mistake="on your levels, FlashInfer's kernels differ from attention computed request by request",
    seconds=COMPILING,
)
def test_flashinfers_kernels_run_on_it(hw: Homework) -> None:
    """In bfloat16 on a GPU: the `cascade` backend with FlashInfer's kernels."""
    if not ON_GPU:
        return
    rope = RopeConfig(10_000.0, 128)
    spec = AttentionSpec(0, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5, rope=rope)
    batch, cache, kv = planned_step(hw, spec, 16, torch.bfloat16, "cuda")
    q = randn(len(batch.token_ids), 16, 128, dtype=torch.bfloat16, device="cuda")
    backend = create_backend("cascade", [spec], cache, Parts())
    backend.plan(batch)
    expected = over_slots(hw, spec, q, cache, kv, 16).to(q.dtype)
    assert_close(backend.run(0, q), expected, atol=3e-2, rtol=3e-2, name="attention over your levels")


@check(
    "chunk_levels",
    mistake="FlashInfer reads pages as 32-bit integers: make kv_page_indices int32, and all other arrays integers",
    costs=0.2,
)
def test_dtypes_of_the_levels(hw: Homework) -> None:
    lens = [8, 4]
    contexts = contexts_of([[(0, 0), (1, -8)], [], [(1, 3)]], lens, pinned_chunks(lens, 4))
    for i, level in enumerate(hw.chunk_levels(contexts, np.array([1, 2, 1]), 4)[1]):
        for name, array in level._asdict().items():
            dtype = np.asarray(array).dtype
            right = dtype == np.int32 if name == "kv_page_indices" else np.issubdtype(dtype, np.integer)
            assert right, f"level {i}: {name} has dtype {dtype}"


# ChunkStore ---------------------------------------------------------------------------------------------------------


def store_of(hw: Homework, max_pages: int, **pages: int) -> Any:
    store = hw.ChunkStore(max_pages)
    for name, num_pages in pages.items():
        assert_equal(store.add(name, num_pages), [], name=f"what add({name!r}) evicts while there is room")
    return store


def assert_store(store: Any, names: ListLike[str], num_pages: int) -> None:
    assert_equal(list(store.names), list(names), name="the names, least recently used first")
    assert_equal(store.num_pages, num_pages, name="num_pages")


@check("ChunkStore", mistake="a new store is empty, and each added chunk takes its pages")
def test_chunks_are_added(hw: Homework) -> None:
    assert_store(store_of(hw, 10), [], 0)
    assert_store(store_of(hw, 10, a=4, b=3), ["a", "b"], 7)
    assert_store(store_of(hw, 10, a=4, b=6), ["a", "b"], 10)


@check("ChunkStore", mistake="evict the least recently used chunk first, and no more chunks than needed")
def test_the_oldest_goes(hw: Homework) -> None:
    store = store_of(hw, 10, a=4, b=3, c=3)
    assert_equal(store.add("d", 4), ["a"], name="what add('d', 4) evicts")
    assert_store(store, ["b", "c", "d"], 10)
    assert_equal(store.add("e", 6), ["b", "c"], name="what add('e', 6) evicts")
    assert_store(store, ["d", "e"], 10)


@check("ChunkStore", mistake="beginning a request uses its chunks in order, so they become the most recently used ones")
def test_a_request_uses_its_chunks(hw: Homework) -> None:
    store = store_of(hw, 9, a=3, b=3, c=3)
    store.begin(["b", "a"])
    store.end(["b", "a"])
    assert_store(store, ["c", "b", "a"], 9)
    assert_equal(store.add("d", 4), ["c", "b"], name="what add('d', 4) evicts")


@check("ChunkStore", mistake="adding a chunk that is already in the store only counts as a use")
def test_a_chunk_is_added_again(hw: Homework) -> None:
    store = store_of(hw, 9, a=3, b=3, c=3)
    assert_equal(store.add("a", 3), [], name="what add('a', 3) evicts when a is there")
    assert_store(store, ["b", "c", "a"], 9)


@check("ChunkStore", mistake="a chunk that an unfinished request attends to was evicted")
def test_chunks_in_use_stay(hw: Homework) -> None:
    store = store_of(hw, 9, a=3, b=3, c=3)
    store.begin(["a"])
    store.begin(["b"])
    store.end(["b"])
    store.begin(["c"])
    assert_equal(store.add("d", 3), ["b"], name="what add('d', 3) evicts while requests over a and c run")
    store.end(["a"])
    assert_equal(store.add("e", 3), ["a"], name="what add('e', 3) evicts after the request over a")


@check("ChunkStore", mistake="a chunk of two requests is still in use when the first one has ended: count its uses")
def test_two_requests_over_a_chunk(hw: Homework) -> None:
    store = store_of(hw, 6, a=3, b=3)
    for names in (["a"], ["a"], ["b"]):
        store.begin(names)
    store.end(["b"])
    store.end(["a"])
    assert_equal(store.add("c", 3), ["b"], name="what add('c', 3) evicts while one of two requests over a runs")
    store.end(["a"])
    store.begin(["c", "c"])
    store.end(["c", "c"])
    assert_equal(store.add("d", 6), ["a", "c"], name="what add('d', 6) evicts when all requests have ended")


@check("ChunkStore", mistake="a chunk in `keep` was evicted, although the new chunk is computed after it")
def test_chunks_to_keep(hw: Homework) -> None:
    store = store_of(hw, 9, a=3, b=3, c=3)
    assert_equal(store.add("d", 3, keep=["a"]), ["b"], name="what add('d', 3, keep=['a']) evicts")
    assert_equal(store.add("e", 3), ["a"], name="what add('e', 3) evicts")


@check("ChunkStore", mistake="if there is no room, or a request names an unknown chunk, nothing may change")
def test_a_refusal_changes_nothing(hw: Homework) -> None:
    store = store_of(hw, 9, a=3, b=3, c=3)
    store.begin(["c"])
    assert_raises(ChunkError, store.add, "d", 7)
    assert_raises(ChunkError, store.add, "d", 10)
    assert_raises(ChunkError, store.add, "d", 4, keep=["a"])
    assert_store(store, ["a", "b", "c"], 9)
    assert_raises(KeyError, store.begin, ["a", "x"])
    assert_store(store, ["a", "b", "c"], 9)
    assert_equal(store.add("d", 3), ["a"], name="what add('d', 3) evicts after a request over a was refused")


@check("ChunkStore", mistake="in a random sequence of calls, the evicted chunks or the order of use are wrong")
def test_a_random_life_of_chunks(hw: Homework) -> None:
    """The oracle keeps a time of last use for each chunk, and the list of running requests."""
    for seed in range(40):
        rng, store, most = random.Random(seed), hw.ChunkStore(12), 12
        pages: dict[str, int] = {}
        last: dict[str, int] = {}
        running: list[list[str]] = []
        clock = 0
        sizes = {name: rng.randrange(1, 6) for name in "abcdefgh"}
        for _ in range(40):
            action = rng.random()
            if action < 0.5:
                name = rng.choice("abcdefgh")
                keep = rng.sample(sorted(pages), min(len(pages), rng.randrange(2)))
                in_use = {x for names in running for x in names} | set(keep)
                free, expected = most - sum(pages.values()), list[str]()
                for other in sorted(set(pages) - in_use, key=lambda x: last[x]):
                    if free < sizes[name] and name not in pages:
                        expected.append(other)
                        free += pages[other]
                if name not in pages and free < sizes[name]:
                    assert_raises(ChunkError, store.add, name, sizes[name], keep)
                else:
                    assert_equal(store.add(name, sizes[name], keep), expected, name=f"what add({name!r}) evicts")
                    for other in expected:
                        del pages[other]
                    pages[name], clock = sizes[name], clock + 1
                    last[name] = clock
            elif action < 0.8 and pages:
                names = rng.choices(sorted(pages), k=rng.randrange(1, 5))
                store.begin(list(names))
                running.append(names)
                for name in names:
                    clock += 1
                    last[name] = clock
            elif running:
                store.end(running.pop(rng.randrange(len(running))))
            assert_store(store, sorted(pages, key=lambda x: last[x]), sum(pages.values()))


# recompute ----------------------------------------------------------------------------------------------------------


@cache
def tiny_model() -> CausalLM:
    """Three layers of random weights in float64."""
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50, "hidden_size": 32}
    shape |= {"intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config = ModelConfig.from_hf(shape | {"hidden_act": "silu", "tie_word_embeddings": True})
    model = build_model(config, Parts(), torch.float64, "cpu")
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return model


@torch.inference_mode()
def cached(token_ids: Tensor, positions: Tensor, visible: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of some tokens in each layer, where token i sees the tokens of `visible[i]`."""
    keys, values = [], []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k.clone())
        values.append(v.clone())
        return masked_attention(q, k, v, scale=tiny_model().attention_specs[layer].scale, mask=visible)

    tiny_model()(token_ids, positions, attend)
    return keys, values


def recomputed(hw: Homework, lens: ListLike[int], chosen: ListLike[int]) -> None:
    """Chunks of some lengths, each computed on its own, of which some tokens are computed again.

    The oracle is one run over all tokens and, after them, the chosen ones a second time. In it, the tokens of the first
    pass see what they saw before, and the repeated tokens see one another in place of their first copies.
    """
    n, index = sum(lens), torch.tensor(chosen, dtype=torch.long)
    owner = torch.from_numpy(np.repeat(np.arange(len(lens)), lens))
    positions = torch.arange(n)
    token_ids = positions * 7 % 50
    causal = positions <= positions[:, None]
    composed = causal & (owner == owner[:, None])
    keys, values = cached(token_ids, positions, composed)
    given = [x.clone() for x in [*keys, *values]]
    got = hw.recompute(tiny_model(), token_ids, keys, values, index)
    require(all(map(torch.equal, given, [*keys, *values])), "you changed keys or values that belong to the caller")
    assert isinstance(got, tuple) and len(got) == 2, "two lists are expected: keys and values of each layer"
    again = causal[index].clone()
    again[:, index] = False
    rows = torch.cat([composed, torch.zeros(n, len(index), dtype=torch.bool)], dim=1)
    mask = torch.cat([rows, torch.cat([again, causal[index][:, index]], dim=1)])
    right = cached(torch.cat([token_ids, token_ids[index]]), torch.cat([positions, index]), mask)
    for name, mine, theirs in zip(("keys", "values"), got, right, strict=True):
        assert_equal(len(mine), 3, name=f"the number of layers of the {name}")
        for layer in range(3):
            expected = theirs[layer][:n].clone()
            expected[index] = theirs[layer][n:]
            assert_close(mine[layer], expected, atol=1e-9, name=f"the {name} of layer {layer}")


@check("recompute", mistake="with no token chosen, keys and values must be unchanged")
def test_nothing_is_chosen(hw: Homework) -> None:
    recomputed(hw, [4, 3], [])


@check(
    "recompute",
    mistake="with all tokens chosen, the result must be that of a plain prompt: look at the mask and the scale",
)
def test_all_are_chosen(hw: Homework) -> None:
    recomputed(hw, [4, 3, 5], list(range(12)))


@check("recompute", mistake="with all tokens after the first chunk chosen, the result must be that of a plain prompt")
def test_all_behind_the_first_chunk(hw: Homework) -> None:
    recomputed(hw, [4, 3, 5], list(range(4, 12)))


@check("recompute", mistake="a chosen token must see the stored keys before it, and run at its own position")
def test_the_last_token(hw: Homework) -> None:
    recomputed(hw, [4, 3, 5], [11])


@check("recompute", mistake="a chosen token must see all tokens up to itself, and no later one")
def test_one_token_in_the_middle(hw: Homework) -> None:
    recomputed(hw, [4, 3, 5], [5])


@check("recompute", mistake="a chosen token must see the new keys of the tokens chosen before it, from the same layer")
def test_several_tokens(hw: Homework) -> None:
    recomputed(hw, [4, 3, 5], [4, 7, 8, 11])


@check("recompute", mistake="for random chunks and choices, the result differs from one run under the full mask")
def test_random_choices(hw: Homework) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        lens = [rng.randrange(1, 8) for _ in range(rng.randrange(1, 5))]
        recomputed(hw, lens, sorted(rng.sample(range(sum(lens)), rng.randrange(sum(lens)))))


@check("recompute", mistake="run the chosen tokens through the model in one call, without any other tokens", costs=0.3)
def test_the_chosen_run_together_and_alone(hw: Homework) -> None:
    counts = []

    def count(model: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        counts.append(len(args[0] if args else options["token_ids"]))

    handle = tiny_model().register_forward_pre_hook(count, with_kwargs=True)
    try:
        keys, values = cached(torch.arange(12), torch.arange(12), torch.ones(12, 12).tril().bool())
        counts.clear()
        hw.recompute(tiny_model(), torch.arange(12), keys, values, torch.tensor([4, 7, 8, 11]))
    finally:
        handle.remove()
    assert_equal(counts, [4], name="tokens in each call of the model, where 4 of 12 are chosen")
