"""Grader of chapter 08. Its oracles are loops over sequences, tokens and keys, and on a GPU FlashInfer's kernels."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from book.grading import (
    Exercise,
    Homework,
    assert_close,
    assert_equal,
    assert_no_loop,
    check,
    lines_run,
    require,
)
from book.grading.assertions import CheckFailed
from mini_engine.attention.naive import masked_attention
from mini_engine.attention.split_kv import WorkPlan
from mini_engine.attention.state import AttentionState, attention_state

EXERCISES = [
    Exercise(
        "csr_from_table",
        points=2,
        minutes=12,
        difficulty=1,
        hints=(
            "Three questions, one for each array: how many pages does each sequence have, which entries of the table "
            "are those, and how many keys are in the last of them?",
            "counts = -(-kv_lens // page_size) rounds up. indptr is their cumulative sum with a 0 in front. A mask "
            "[B, W] that is True for the entries in use picks them row after row. All pages but the last are full.",
            "used = np.arange(table.shape[1]) < counts[:, None]; indices = table[used]; last_page_len = kv_lens - "
            "np.maximum(counts - 1, 0) * page_size. Then convert the dtypes.",
        ),
    ),
    Exercise(
        "table_from_csr",
        points=1,
        minutes=8,
        difficulty=1,
        hints=(
            "np.diff(indptr) is the number of pages of each sequence. Which entries of the table do they fill?",
            "A mask can be written through as well as read through: table[mask] = indices fills row after row.",
            "counts = np.diff(indptr); table = np.zeros((len(counts), counts.max()), dtype=np.int32); "
            "table[np.arange(table.shape[1]) < counts[:, None]] = indices. For kv_lens, solve the formula of "
            "last_page_len in the last hint for csr_from_table.",
        ),
    ),
    Exercise(
        "append_positions",
        points=3,
        minutes=15,
        difficulty=2,
        hints=(
            "Take one new token. Its sequence has kv_lens[b] keys already, and the token is the i-th new one of that "
            "sequence. What is its position? In which of its sequence's pages is that?",
            "np.repeat(np.arange(B), np.diff(qo_indptr)) is batch_indices. With it as an index, qo_indptr, kv_lens and "
            "kv_indptr give a number for each token. last_page_len counts the new keys too.",
            "positions = np.arange(T) - qo_indptr[batch_indices] + kv_lens[batch_indices]; page = "
            "kv_indices[kv_indptr[batch_indices] + positions // page_size]; last_page_len = (kv_lens + num_new - 1) % "
            "page_size + 1. Make the pages int64 before you multiply.",
        ),
    ),
    Exercise(
        "smallest_chunk",
        points=2,
        minutes=12,
        difficulty=2,
        hints=(
            "How many chunks does a tile of n keys make at size c? If c fits, does c + 1?",
            "n keys make -(-n // c) chunks, and never more at a larger c. So all sizes that fit come after all that do "
            "not, and a binary search finds the border.",
            "low, high = least, max(least, num_keys.max()); while low < high: middle = (low + high) // 2; if there are "
            "too many chunks at middle, low = middle + 1, else high = middle. Return low.",
        ),
    ),
    Exercise(
        "plan_work",
        points=6,
        minutes=50,
        difficulty=3,
        part="plan_work",
        hints=(
            "Two steps of the same kind: sequences are cut into tiles, then tiles into chunks. In each, n things are "
            "cut into counts[i] pieces, and every piece needs i and its index among the pieces of i. Write that as a "
            "function of counts first.",
            "groups = np.repeat(np.arange(len(counts)), counts), and the index is np.arange(len(groups)) minus the "
            "number of pieces before the group. A token t of sequence b is at position t - qo_indptr[b + 1] + "
            "kv_lens[b]; the keys of a tile end after its last query, and begin where the window of its first query "
            "does.",
            "For tiles: first = qo_indptr[seq] + index * tile_len; end = np.minimum(first + tile_len, qo_indptr[seq + "
            "1]); shift = kv_lens[seq] - qo_indptr[seq + 1]; end_keys = end + shift; first_keys = np.maximum(first + "
            "shift + 1 - window, 0), or 0. For items, with c = smallest_chunk(end_keys - first_keys, num_workers, "
            "least_keys): the same again with -(-(end_keys - first_keys) // c) as counts.",
        ),
    ),
    Exercise(
        "split_kv_decode",
        points=4,
        minutes=30,
        difficulty=2,
        hints=(
            "Write it for one item first: its positions are first_keys to end_keys - 1 of one sequence. In which page "
            "is each, and at which offset?",
            "pages = kv_indices[kv_indptr[sequence] + positions // page_size]; k_pages[pages, positions % page_size] "
            "is [m, Hk, D]. The items of tile t are item_indptr[t] to item_indptr[t + 1] - 1: merge their states.",
            "for first, end in pairwise(plan.item_indptr.tolist()): states = [one for each item]; merged = "
            "reduce(merge_states, states) belongs to row plan.first_tokens[first] of q. At the end concatenate out "
            "and lse in the order of the rows.",
        ),
    ),
    Exercise(
        "cut_evenly",
        points=4,
        minutes=30,
        difficulty=3,
        challenge=True,
        hints=(
            "Lay the keys of all tiles end to end on a line. Where does each worker's share end on it? Where does each "
            "tile end?",
            "Both kinds of ends are cuts, and an item is what lies between two neighboring cuts. tiles + W ends, of "
            "which the last two coincide, make at most tiles + W - 1 items. total * np.arange(1, W + 1) // W are "
            "shares that differ by one key at most.",
            "ends = num_keys.cumsum(); shares = ends[-1] * np.arange(1, W + 1) // W; cuts = np.unique of 0, ends and "
            "shares; first, end = cuts[:-1], cuts[1:]; tiles = np.searchsorted(ends, first, side='right'), workers "
            "likewise in shares. Last, count the keys from the beginning of their tile.",
        ),
    ),
]

Lists = list[list[int]]
ON_GPU = torch.cuda.is_available() and find_spec("flashinfer") is not None
COMPILING = 300.0  # CPU seconds that FlashInfer may need to compile its kernels


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def assert_array(actual: Any, expected: Sequence[Any], dtype: str, *, name: str) -> None:
    """Compare an array of integers with a list, and its dtype if `dtype` names one."""
    got = torch.from_numpy(actual) if isinstance(actual, np.ndarray) else actual
    want = torch.tensor(expected, dtype=getattr(torch, dtype) if dtype != "any" else torch.int64)
    if dtype == "any" and isinstance(got, Tensor) and not got.is_floating_point():
        got = got.long()
    is_array = got is None or isinstance(got, Tensor)
    require(is_array, f"{name} is a {type(actual).__name__}; it should be a NumPy array")
    assert_equal(got, want, name=name if len(name) < 160 else f"{name[:150]}…")


def assert_tuple(actual: Any, names: Sequence[str], what: str) -> None:
    require(actual is not None, f"{what} returns None: is a `return` missing?")
    got = f"a tuple of {len(actual)}" if isinstance(actual, tuple) else f"a {type(actual).__name__}"
    require(got == f"a tuple of {len(names)}", f"{what} returns {got}; it should be a tuple: {', '.join(names)}")


def paged_lists(kv_lens: Sequence[int], page_size: int, seed: int) -> Lists:
    """Pages of sequences of these lengths, in random order."""
    counts = [-(-n // page_size) for n in kv_lens]
    pages = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
    return [[pages.pop() for _ in range(count)] for count in counts]


def indptr_of(lists: Sequence[Sequence[int]]) -> list[int]:
    out = [0]
    for entries in lists:
        out.append(out[-1] + len(entries))
    return out


def last_lens(kv_lens: Sequence[int], page_size: int) -> list[int]:
    lens = []
    for n in kv_lens:
        while n > page_size:
            n -= page_size
        lens.append(n)
    return lens


# csr_from_table -----------------------------------------------------------------------------------------------------


def assert_csr(
    hw: Homework, pages: Lists, kv_lens: Sequence[int], page_size: int, stale: int = 77, dtype: str = "any"
) -> None:
    width = max(len(own) for own in pages) + 1
    table = np.array([own + [stale] * (width - len(own)) for own in pages], dtype=np.int32)
    what = f"csr_from_table({table.tolist()}, {list(kv_lens)}, {page_size})"
    got = hw.csr_from_table(table, int32(kv_lens), page_size)
    names = ["indptr", "indices", "last_page_len"]
    assert_tuple(got, names, what)
    want = indptr_of(pages), [page for own in pages for page in own], last_lens(kv_lens, page_size)
    for name, array, expected in zip(names, got, want, strict=True):
        assert_array(array, expected, dtype, name=f"{name} of {what}")


@check(
    "csr_from_table",
    mistake="you count keys instead of pages, leave out the leading 0 of indptr, or find valid entries by their "
    "values: 3 keys are one page of 4 with 3 keys in it",
)
def test_one_page(hw: Homework) -> None:
    assert_csr(hw, [[5]], [3], 4)


@check(
    "csr_from_table",
    mistake="you take 8 % 4 keys for the last page, or 8 // 4 + 1 for the pages: 8 keys fill exactly two pages of 4",
)
def test_a_full_last_page(hw: Homework) -> None:
    assert_csr(hw, [[5, 2]], [8], 4)


@check(
    "csr_from_table",
    mistake="you take the entries column by column, or do not add up the counts: list the pages row by row, and make "
    "indptr a running total",
)
def test_three_sequences(hw: Homework) -> None:
    assert_csr(hw, [[2, 0, 3], [1], [7, 6]], [10, 4, 5], 4)


@check(
    "csr_from_table",
    mistake="you find valid entries by their values: page 0 is valid and stale entries hold any number, so go by "
    "kv_lens",
)
def test_page_0_and_stale_entries(hw: Homework) -> None:
    assert_csr(hw, [[0], [3, 0], [4]], [2, 6, 1], 4, stale=0)
    assert_csr(hw, [[0], [3, 0], [4]], [2, 6, 1], 4, stale=3)


@check(
    "csr_from_table",
    mistake="a sequence without keys gets a page or a full last page: give it no page and a last_page_len of 0",
)
def test_a_sequence_without_keys(hw: Homework) -> None:
    assert_csr(hw, [[2], [], [1, 4]], [3, 0, 8], 4)


@check(
    "csr_from_table",
    mistake="you loop over sequences or pages: select the entries of all rows with one mask",
    costs=0.2,
)
def test_csr_without_a_loop(hw: Homework) -> None:
    table = np.zeros((512, 20), dtype=np.int32)
    counts = [lines_run(hw.csr_from_table, table[:n], np.full(n, 70, dtype=np.int32), 4) for n in (64, 512)]
    assert_no_loop("csr_from_table", *counts)


@check("csr_from_table", mistake="it fails for random lengths and page sizes: work out the printed example by hand")
def test_random_tables(hw: Homework) -> None:
    for seed, page_size in enumerate([1, 2, 3, 16, 128]):
        kv_lens = [random.Random(seed * 10 + b).randrange(5 * page_size + 1) for b in range(5)] + [page_size]
        assert_csr(hw, paged_lists(kv_lens, page_size, seed), kv_lens, page_size)


@check(
    "csr_from_table",
    mistake="an array has another dtype, such as int64: FlashInfer reads 32-bit integers, so return all three as int32",
    costs=0.2,
)
def test_csr_in_int32(hw: Homework) -> None:
    assert_csr(hw, [[2, 0, 3], [1]], [10, 4], 4, dtype="int32")


@check(
    "csr_from_table",
    seconds=COMPILING,
    mistake="on your GPU, FlashInfer computes other lengths from your arrays: check indptr and last_page_len",
)
def test_lengths_on_the_gpu(hw: Homework) -> None:
    if not ON_GPU:
        return
    from flashinfer import get_seq_lens

    kv_lens, page_size = [10, 4, 33, 16, 1], 16
    pages = paged_lists(kv_lens, page_size, seed=0)
    table = int32([[*own, 0, 0, 0][:3] for own in pages])
    indptr, _, last_page_len = (torch.from_numpy(x).cuda() for x in hw.csr_from_table(table, int32(kv_lens), page_size))
    assert_array(get_seq_lens(indptr, last_page_len, page_size).cpu(), kv_lens, "int32", name="get_seq_lens(...)")


# table_from_csr -----------------------------------------------------------------------------------------------------


def assert_table(hw: Homework, pages: Lists, kv_lens: Sequence[int], page_size: int, dtype: str = "any") -> None:
    indices = [page for own in pages for page in own]
    arrays = indptr_of(pages), indices, last_lens(kv_lens, page_size)
    what = f"table_from_csr({', '.join(map(str, arrays))}, {page_size})"
    got = hw.table_from_csr(*(int32(array) for array in arrays), page_size)
    assert_tuple(got, ["table", "kv_lens"], what)
    width = max(len(own) for own in pages)
    assert_array(got[0], [own + [0] * (width - len(own)) for own in pages], dtype, name=f"the table of {what}")
    assert_array(got[1], list(kv_lens), dtype, name=f"kv_lens of {what}")


@check(
    "table_from_csr",
    mistake="you make a column too many, or count every page as full: two pages are two columns, and hold page_size + "
    "last_page_len keys",
)
def test_back_to_one_row(hw: Homework) -> None:
    assert_table(hw, [[5, 2]], [6], 4)


@check(
    "table_from_csr",
    mistake="you pad with a number other than 0, or put pages into the wrong row: give each row its own pages, then "
    "zeros",
)
def test_back_to_rows(hw: Homework) -> None:
    assert_table(hw, [[1], [2, 0, 3], [7, 6]], [4, 10, 5], 4)


@check(
    "table_from_csr",
    mistake="for a sequence without pages, pages - 1 is negative, and so is its length: use at least 0",
)
def test_back_to_an_empty_row(hw: Homework) -> None:
    assert_table(hw, [[2], [], [1, 4]], [3, 0, 8], 4)


@check(
    "table_from_csr",
    mistake="you loop over sequences or pages: write the entries of all rows through one mask",
    costs=0.2,
)
def test_table_without_a_loop(hw: Homework) -> None:
    counts = []
    for n in (64, 512):
        indptr = np.arange(n + 1, dtype=np.int32) * 3
        arrays = indptr, np.zeros(3 * n, dtype=np.int32), np.ones(n, dtype=np.int32)
        counts.append(lines_run(hw.table_from_csr, *arrays, 4))
    assert_no_loop("table_from_csr", *counts)


@check("table_from_csr", mistake="it fails for random lengths and page sizes: work out the printed example by hand")
def test_random_csr(hw: Homework) -> None:
    for seed, page_size in enumerate([1, 2, 3, 16, 128]):
        kv_lens = [random.Random(seed * 10 + b).randrange(5 * page_size + 1) for b in range(5)] + [page_size]
        assert_table(hw, paged_lists(kv_lens, page_size, seed), kv_lens, page_size)


@check(
    "table_from_csr",
    mistake="the table or the lengths have another dtype, such as int64: return both as int32",
    costs=0.2,
)
def test_table_in_int32(hw: Homework) -> None:
    assert_table(hw, [[2, 0, 3], [1]], [10, 4], 4, dtype="int32")


# append_positions ---------------------------------------------------------------------------------------------------

APPENDED = ["batch_indices", "positions", "slot_mapping", "last_page_len"]


def append_arrays(num_new: Sequence[int], before: Sequence[int], pages: Lists) -> tuple[np.ndarray, ...]:
    qo_indptr = indptr_of([range(n) for n in num_new])
    return int32(qo_indptr), int32(before), int32(indptr_of(pages)), int32([page for own in pages for page in own])


def assert_append(
    hw: Homework,
    num_new: Sequence[int],
    before: Sequence[int],
    pages: Lists,
    page_size: int,
    dtypes: Sequence[str] = ("any",) * 4,
) -> None:
    arrays = append_arrays(num_new, before, pages)
    what = f"append_positions({', '.join(str(x.tolist()) for x in arrays)}, {page_size})"
    got = hw.append_positions(*arrays, page_size)
    assert_tuple(got, APPENDED, what)
    tokens = [(b, before[b] + i) for b in range(len(pages)) for i in range(num_new[b])]
    after = [n + new for n, new in zip(before, num_new, strict=True)]
    want = (
        [b for b, _ in tokens],
        [position for _, position in tokens],
        [pages[b][position // page_size] * page_size + position % page_size for b, position in tokens],
        last_lens(after, page_size),
    )
    for name, array, expected, dtype in zip(APPENDED, got, want, dtypes, strict=True):
        assert_array(array, expected, dtype, name=f"{name} of {what}")


@check(
    "append_positions",
    mistake="you number the new key from the wrong place, or leave it out of last_page_len: after 3 keys it has "
    "position 3, and fills its page of 4",
)
def test_one_decode(hw: Homework) -> None:
    assert_append(hw, [1], [3], [[2]], 4)


@check(
    "append_positions",
    mistake="you let last_page_len grow past the page, or put the key into the full page: the fifth key begins the "
    "second page, so last_page_len is 1",
)
def test_a_decode_on_a_new_page(hw: Homework) -> None:
    assert_append(hw, [1], [4], [[2, 5]], 4)


@check(
    "append_positions",
    mistake="you put all new tokens into the last page, or at one position: start at position 0, and fill the pages "
    "in the order of the list",
)
def test_a_prompt(hw: Homework) -> None:
    assert_append(hw, [10], [0], [[3, 0, 2]], 4)


@check(
    "append_positions",
    mistake="you count over the whole step, or use the pages of another sequence: look up each token's own sequence "
    "with batch_indices",
)
def test_a_mixed_step(hw: Homework) -> None:
    assert_append(hw, [1, 1, 5, 3], [7, 12, 0, 6], [[4, 9], [1, 0, 2, 8], [5, 6], [3, 7, 10]], 4)


@check(
    "append_positions",
    mistake="page * page_size overflows in int32, because a large pool has more slots: make the pages int64 before "
    "you multiply",
)
def test_a_large_pool(hw: Homework) -> None:
    assert_append(hw, [2], [5], [[2**24]], 128)


@check(
    "append_positions",
    mistake="an array has the wrong dtype: return slot_mapping as int64, because a large pool has many slots, and the "
    "others as int32",
    costs=0.2,
)
def test_append_dtypes(hw: Homework) -> None:
    assert_append(hw, [2, 1], [3, 0], [[2, 5], [1]], 4, dtypes=("int32", "int32", "int64", "int32"))


@check("append_positions", mistake="you loop over sequences or tokens: look up all tokens at once", costs=0.2)
def test_append_without_a_loop(hw: Homework) -> None:
    counts = []
    for n in (64, 512):
        step = append_arrays([2] * n, [3] * n, [[2 * b, 2 * b + 1] for b in range(n)])
        counts.append(lines_run(hw.append_positions, *step, 4))
    assert_no_loop("append_positions", *counts)


@check("append_positions", mistake="it fails for random steps: work out the printed example by hand")
def test_random_steps(hw: Homework) -> None:
    for seed, page_size in enumerate([1, 2, 3, 16, 128]):
        rng = random.Random(seed)
        before = [rng.randrange(4 * page_size) for _ in range(6)]
        num_new = [rng.randint(1, 2 * page_size) for _ in before]
        after = [n + new for n, new in zip(before, num_new, strict=True)]
        assert_append(hw, num_new, before, paged_lists(after, page_size, seed), page_size)


@check(
    "append_positions",
    seconds=COMPILING,
    mistake="on your GPU, append_paged_kv_cache stores the new keys in other slots than yours: check the positions "
    "and pages",
)
def test_append_on_the_gpu(hw: Homework) -> None:
    if not ON_GPU:
        return
    from flashinfer import append_paged_kv_cache, get_batch_indices_positions

    num_new, before, page_size = [1, 1, 5, 30], [7, 16, 0, 6], 16
    after = [n + new for n, new in zip(before, num_new, strict=True)]
    pages = paged_lists(after, page_size, seed=1)
    arrays = append_arrays(num_new, before, pages)
    found = [torch.from_numpy(x).cuda() for x in hw.append_positions(*arrays, page_size)]
    qo_indptr, _, kv_indptr, kv_indices = (torch.from_numpy(x).cuda() for x in arrays)
    theirs = get_batch_indices_positions(qo_indptr, torch.tensor(after, dtype=torch.int32, device="cuda"), sum(num_new))
    for name, mine, want in zip(APPENDED, found, theirs, strict=False):
        assert_equal(mine, want, name=f"{name}, beside FlashInfer's")
    k, v = torch.randn(2, sum(num_new), 2, 64, device="cuda", dtype=torch.bfloat16)
    k_pages, v_pages = torch.zeros(2, sum(map(len, pages)) + 3, page_size, 2, 64, device="cuda", dtype=torch.bfloat16)
    append_paged_kv_cache(k, v, found[0], found[1], (k_pages, v_pages), kv_indices, kv_indptr, found[3])
    for stored, new, name in ((k_pages, k, "keys"), (v_pages, v, "values")):
        assert_equal(stored.flatten(0, 1)[found[2]].float(), new.float(), name=f"the {name} in your slots")


# smallest_chunk -----------------------------------------------------------------------------------------------------


def smallest_by_trying(num_keys: Sequence[int], num_workers: int, least: int) -> int:
    sizes = range(least, max(least, *num_keys) + 1)
    return next((c for c in sizes if sum(-(-n // c) for n in num_keys) <= num_workers), sizes[-1])


def assert_chunk(hw: Homework, num_keys: Sequence[int], num_workers: int, least: int = 1) -> None:
    got = hw.smallest_chunk(np.array(num_keys), num_workers, least)
    name = f"smallest_chunk({list(num_keys)}, {num_workers}, {least})"
    require(not isinstance(got, float | np.floating), f"{name} is the float {got}; it should be an int")
    assert_equal(got, smallest_by_trying(num_keys, num_workers, least), name=name)


@check(
    "smallest_chunk",
    mistake="you round the size down, or make it larger than necessary: 12 keys for 4 workers take chunks of 3, 13 "
    "keys chunks of 4",
)
def test_one_tile(hw: Homework) -> None:
    for n in (12, 13, 15, 16, 3):
        assert_chunk(hw, [n], 4)


@check(
    "smallest_chunk",
    mistake="you divide the sum of all keys: no chunk holds keys of two tiles, so round up the number of chunks tile "
    "by tile",
)
def test_several_tiles(hw: Homework) -> None:
    assert_chunk(hw, [100, 20], 4)
    assert_chunk(hw, [4000, 90, 80, 70], 8)
    assert_chunk(hw, [5, 5, 5], 4)


@check(
    "smallest_chunk",
    mistake="no size makes few enough chunks here, because there are more tiles than workers: return the number of "
    "keys of the longest tile, not the mean",
)
def test_more_tiles_than_workers(hw: Homework) -> None:
    assert_chunk(hw, [30, 10, 20, 5], 3)


@check(
    "smallest_chunk",
    mistake="you ignore `least`, or cap it at the longest tile: never return a smaller size, even if all tiles have "
    "fewer keys",
)
def test_least(hw: Homework) -> None:
    assert_chunk(hw, [100, 20], 50, least=16)
    assert_chunk(hw, [10, 5], 50, least=16)
    assert_chunk(hw, [10, 5], 1, least=16)


@check(
    "smallest_chunk",
    mistake="you try one size after the other: halve the range of sizes instead, because a tile may have millions of "
    "keys",
    costs=0.4,
)
def test_many_keys(hw: Homework) -> None:
    lines = [lines_run(hw.smallest_chunk, np.array([n, 1, 1, 1]), 4) for n in (1_000, 16_000)]
    assert lines[1] < 3 * lines[0], f"{lines[1]} lines of Python run for tiles of 16,000 keys, {lines[0]} for 1,000"
    got = hw.smallest_chunk(np.full(1000, 30_000_000), 2000)
    assert_equal(got, 15_000_000, name="smallest_chunk of 1,000 tiles of 30 million keys and 2,000 workers")


@check(
    "smallest_chunk", mistake="your search is off by one: your size makes too many chunks, or a smaller size would do"
)
def test_random_chunks(hw: Homework) -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_keys = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
        assert_chunk(hw, num_keys, rng.randint(1, 20), rng.randint(1, 9))


# plan_work ----------------------------------------------------------------------------------------------------------

ARRAYS = [field.name for field in fields(WorkPlan) if field.name != "chunk_size"]


def planned_in_loops(
    num_new: Sequence[int], kv_lens: Sequence[int], num_workers: int, tile_len: int, least: int, window: int | None
) -> dict[str, Any]:
    """The plan as the docstring defines it: which keys a tile needs is found query by query."""
    tiles, token = [], 0
    for b, (new, kv_len) in enumerate(zip(num_new, kv_lens, strict=True)):
        for first in range(0, new, tile_len):
            end = min(first + tile_len, new)
            positions = range(kv_len - new + first, kv_len - new + end)
            seen = {key for p in positions for key in range(0 if window is None else max(0, p + 1 - window), p + 1)}
            tiles.append((b, token + first, token + end, min(seen), max(seen) + 1))
        token += new
    chunk = smallest_by_trying([end - first for *_, first, end in tiles], num_workers, least)
    items, item_indptr = [], [0]
    for b, first, end, first_key, end_key in tiles:
        items += [(b, first, end, key, min(key + chunk, end_key)) for key in range(first_key, end_key, chunk)]
        item_indptr.append(len(items))
    return dict(zip(["chunk_size", *ARRAYS], [chunk, *map(list, zip(*items, strict=True)), item_indptr], strict=True))


def assert_plan(
    hw: Homework,
    num_new: Sequence[int],
    kv_lens: Sequence[int],
    num_workers: int,
    *,
    tile_len: int = 16,
    least: int = 1,
    window: int | None = None,
    only: Sequence[str] = ("chunk_size", *ARRAYS),
) -> None:
    qo_indptr = int32(indptr_of([range(n) for n in num_new]))
    options = {"tile_len": tile_len, "least_keys": least, "window": window}
    arrays = qo_indptr.copy(), int32(kv_lens)
    plan = hw.plan_work(*arrays, num_workers, **options)
    same = np.array_equal(arrays[0], qo_indptr) and np.array_equal(arrays[1], kv_lens)
    require(same, "you changed qo_indptr or kv_lens, which the engine reads after you")
    options_said = ", ".join(f"{name}={value}" for name, value in options.items())
    what = f"plan_work({qo_indptr.tolist()}, {list(kv_lens)}, {num_workers}, {options_said})"
    require(plan is not None, f"{what} returns None: is a `return` missing?")
    require(isinstance(plan, WorkPlan), f"{what} returns a {type(plan).__name__}; it should be a WorkPlan")
    want = planned_in_loops(num_new, kv_lens, num_workers, tile_len, least, window)
    for name in only:
        if name == "chunk_size":
            assert_equal(plan.chunk_size, want[name], name=f"chunk_size of {what}")
        else:
            array = getattr(plan, name)
            kind = type(array).__name__
            require(isinstance(array, np.ndarray), f"{name} of {what} is a {kind}; it should be a NumPy array")
            # As an assertion of its own, so that the mistake of the check is shown as well.
            if array.ndim == 1:
                assert len(array) == len(want[name]), (
                    f"{name} of {what} has {len(array)} entries; it should have {len(want[name])}"
                )
            assert_array(array, want[name], "any", name=f"{name} of {what}")


@check(
    "plan_work",
    mistake="an end is wrong, or item_indptr has counts instead of a running total: one worker and 10 keys make one "
    "item, query 0 with keys 0 to 9, and item_indptr [0, 1]",
)
def test_one_item(hw: Homework) -> None:
    assert_plan(hw, [1], [10], 1)


@check(
    "plan_work",
    mistake="you do not split, or the items overlap: 40 keys for 4 workers are 4 items of 10 for the same query, and "
    "each begins where the previous one ends",
)
def test_one_sequence_is_split(hw: Homework) -> None:
    assert_plan(hw, [1], [40], 4)


@check(
    "plan_work",
    mistake="you let the last chunk of a tile end at a multiple of chunk_size: cut it off where the tile's keys end",
)
def test_the_last_chunk_is_shorter(hw: Homework) -> None:
    assert_plan(hw, [1], [41], 4)


@check(
    "plan_work",
    mistake="you split every tile, or take the mean load as the size: find one size for all tiles, which here splits "
    "only the long sequence",
)
def test_only_the_long_one_is_split(hw: Homework) -> None:
    assert_plan(hw, [1, 1, 1, 1], [90, 4000, 80, 70], 8)


@check(
    "plan_work",
    mistake="your chunk size is not the smallest that fits: with two workers for each tile, the largest load is at "
    "most twice the mean",
)
def test_the_largest_load(hw: Homework) -> None:
    rng = random.Random(1)
    for _ in range(50):
        kv_lens = [int(10 ** rng.uniform(0, 4)) for _ in range(rng.randint(1, 12))]
        num_workers = rng.randint(2, 5) * len(kv_lens)
        plan = hw.plan_work(np.arange(len(kv_lens) + 1), int32(kv_lens), num_workers, tile_len=1)
        loads = np.asarray(plan.end_keys) - np.asarray(plan.first_keys)
        mean = sum(kv_lens) / num_workers
        said = f"{kv_lens} keys for {num_workers} workers"
        assert len(loads) <= num_workers, f"{len(loads)} items of {said}"
        assert loads.max() <= 2 * mean + 1, f"an item of {loads.max()} keys, of {said}: the mean load is {mean:.1f}"


@check(
    "plan_work",
    mistake="you lose a sequence's last queries, or a tile spans two sequences: cut each sequence separately, and let "
    "its last tile be shorter",
)
def test_tiles_of_queries(hw: Homework) -> None:
    assert_plan(
        hw, [1, 7, 4], [9, 7, 4], 1, tile_len=3, only=["sequences", "first_tokens", "end_tokens", "item_indptr"]
    )


@check(
    "plan_work",
    mistake="you give a tile all keys of its sequence, or leave out the last query's own key: the keys of a tile end "
    "with that key",
)
def test_causal_tiles(hw: Homework) -> None:
    assert_plan(hw, [7], [7], 1, tile_len=3)


@check(
    "plan_work",
    mistake="you let a sequence's queries begin at position 0: they are the last of its keys, so add the keys that "
    "were there before",
)
def test_keys_before_the_step(hw: Homework) -> None:
    assert_plan(hw, [1, 5], [30, 25], 2, tile_len=2)
    assert_plan(hw, [1, 5], [30, 25], 12, tile_len=2)


@check(
    "plan_work",
    mistake="you ignore least_keys: pass it to smallest_chunk, so only the last chunk of a tile may be smaller",
)
def test_least_keys(hw: Homework) -> None:
    assert_plan(hw, [1, 1], [100, 20], 50, least=16)


IN_WINDOWS = [([1], [5000], 16, 100), ([1, 6], [5000, 40], 4, 10), ([6], [6], 2, 4)]


@check(
    "plan_work",
    mistake="you ignore the window, count it from the tile's last query, or leave out the own key: the first query "
    "sees W keys, its own included",
)
def test_a_window(hw: Homework) -> None:
    """Compare the keys of whole tiles, however they are cut into chunks."""
    for num_new, kv_lens, tile_len, window in IN_WINDOWS:
        want = planned_in_loops(num_new, kv_lens, 4, tile_len, 1, window)
        qo_indptr = indptr_of([range(n) for n in num_new])
        plan = hw.plan_work(int32(qo_indptr), int32(kv_lens), 4, tile_len=tile_len, window=window)
        what = f"plan_work({qo_indptr}, {kv_lens}, 4, tile_len={tile_len}, window={window})"
        for b, (first, end) in enumerate(pairwise(want["item_indptr"])):
            mine = slice(*np.asarray(plan.item_indptr)[b : b + 2].tolist())
            keys = int(np.min(plan.first_keys[mine])), int(np.max(plan.end_keys[mine]))
            expected = want["first_keys"][first], want["end_keys"][end - 1]
            assert_equal(keys, expected, name=f"(first key, end) of tile {b} of {what}")


@check("plan_work", mistake="you start chunks at multiples of chunk_size: count them from the tile's first key")
def test_chunks_in_a_window(hw: Homework) -> None:
    for num_new, kv_lens, tile_len, window in IN_WINDOWS:
        assert_plan(hw, num_new, kv_lens, 4, tile_len=tile_len, window=window)


@check("plan_work", mistake="you loop over sequences, tiles or items: let numpy number tiles and items", costs=0.2)
def test_plan_without_a_loop(hw: Homework) -> None:
    counts = []
    for n in (64, 512):
        kv_lens = np.full(n, 200, dtype=np.int32)
        counts.append(
            lines_run(lambda n=n, kv_lens=kv_lens: hw.plan_work(np.arange(n + 1), kv_lens, 4 * n, tile_len=1))
        )
    few, many = counts
    # A loop over tiles in one line is short beside the rest of a plan, so compare the difference.
    assert many - few < (512 - 64) / 2, f"plan_work runs {many} lines of Python for 512 tiles, and {few} for 64"


@check("plan_work", mistake="it fails for random steps: work out the printed example by hand")
def test_random_plans(hw: Homework) -> None:
    rng = random.Random(0)
    for _ in range(150):
        kv_lens = [rng.randint(1, 90) for _ in range(rng.randint(1, 5))]
        num_new = [rng.choice([1, rng.randint(1, n)]) for n in kv_lens]
        window = rng.choice([None, rng.randint(1, 40)])
        options = {"tile_len": rng.randint(1, 20), "least": rng.randint(1, 12), "window": window}
        assert_plan(hw, num_new, kv_lens, rng.randint(1, 30), **options)


@check(
    "plan_work",
    seconds=COMPILING,
    mistake="on your GPU, the split_kv backend disagrees with FlashInfer when it runs your plan",
)
def test_plan_on_the_gpu(hw: Homework) -> None:
    if not ON_GPU:
        return
    from mini_engine.attention.backend import create_backend
    from mini_engine.attention.spec import AttentionSpec
    from mini_engine.batch import StepBatch
    from mini_engine.kv_cache.paged import PagedKVCache
    from mini_engine.parts import Parts

    specs = [
        AttentionSpec(i, num_qo_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5, window=window)
        for i, window in enumerate((None, 100))
    ]
    num_new, kv_lens = [1, 1, 1, 40, 200], [1, 900, 5000, 90, 200]
    pages = paged_lists(kv_lens, 16, seed=0)
    batch = StepBatch.build(
        token_ids=[0] * sum(num_new),
        num_new=num_new,
        kv_lens=kv_lens,
        pages=[page for own in pages for page in own],
        page_size=16,
        device="cuda",
    )
    cache = PagedKVCache(specs, sum(map(len, pages)) + 3, 16, torch.bfloat16, "cuda")
    for k_and_v in cache.layers:
        for x in k_and_v:
            x.normal_()
    q = torch.randn(batch.num_tokens, 16, 128, device="cuda", dtype=torch.bfloat16)
    mine = create_backend("split_kv", specs, cache, replace(Parts(), plan_work=hw.plan_work))
    theirs = create_backend("flashinfer", specs, cache, Parts())
    for backend in (mine, theirs):
        backend.plan(batch)
    for layer in range(2):
        got, want = mine.run(layer, q), theirs.run(layer, q)
        assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2, name=f"layer {layer} beside FlashInfer's")


# split_kv_decode ----------------------------------------------------------------------------------------------------


class Decodes:
    """Decodes over a paged cache in float64. Slots that hold no key are NaN, as in memory that was never written."""

    def __init__(self, kv_lens: Sequence[int], page_size: int, heads: tuple[int, int] = (4, 2), seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        (q_heads, kv_heads), dim = heads, 8

        def random_normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.kv_lens, self.page_size = list(kv_lens), page_size
        self.q = random_normal(len(kv_lens), q_heads, dim)
        self.k, self.v = ([random_normal(n, kv_heads, dim) for n in kv_lens] for _ in range(2))
        pages = paged_lists(kv_lens, page_size, seed)
        self.indptr, self.indices = int32(indptr_of(pages)), int32([page for own in pages for page in own])
        shape = len(self.indices) + 3, page_size, kv_heads, dim
        self.k_pages, self.v_pages = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))
        for b, own in enumerate(pages):
            for p in range(kv_lens[b]):
                page, offset = own[p // page_size], p % page_size
                self.k_pages[page, offset], self.v_pages[page, offset] = self.k[b][p], self.v[b][p]
        self.loads: list[int] = []

    def worker(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
        assert q.shape == (1, *self.q.shape[1:]), f"a worker gets one query, [1, Hq, D], not {list(q.shape)}"
        assert k.shape == v.shape and k.ndim == 3, f"a worker gets keys [m, Hk, D], not {list(k.shape)}"
        self.loads.append(len(k))
        return attention_state(q, k, v, scale=0.3)

    def run(self, hw: Homework, plan: WorkPlan, first_key: int = 0, exact: bool = False, atol: float = 1e-5) -> None:
        """Compare with attention over the keys from `first_key` on; `exact` demands float64 in precision and dtype."""
        pages = self.k_pages, self.v_pages, self.indptr, self.indices
        got = hw.split_kv_decode(self.q, *pages, plan, self.worker)
        said = f"decodes of {self.kv_lens} keys, pages of {self.page_size}, {len(plan.sequences)} items"
        kind = type(got).__name__
        require(isinstance(got, AttentionState), f"split_kv_decode should return an AttentionState, not {kind}")
        precision = {"atol": 1e-10 if exact else atol, "check_dtype": exact}
        for b in range(len(self.q)):
            q, k, v = self.q[b : b + 1], self.k[b][first_key:], self.v[b][first_key:]
            want = masked_attention(q, k, v, scale=0.3)
            name = f"out[{b}] of {said}"
            assert len(got.out) == len(self.q), f"out has {len(got.out)} rows for {len(self.q)} queries"
            assert_close(got.out[b : b + 1], want, name=name, **precision)
            lse = attention_state(q, k, v, scale=0.3).lse
            assert_close(got.lse[b : b + 1], lse, name=f"lse[{b}] of {said}", **precision)


def decode_plan(kv_lens: Sequence[int], chunk: int, order: Sequence[int] | None = None, first_key: int = 0) -> WorkPlan:
    """A plan in chunks of one size, with the tiles in a given order; keys before `first_key` are in no item."""
    items, item_indptr = [], [0]
    for b in order or range(len(kv_lens)):
        items += [(b, b, b + 1, key, min(key + chunk, kv_lens[b])) for key in range(first_key, kv_lens[b], chunk)]
        item_indptr.append(len(items))
    return WorkPlan(chunk, *np.array(items).T, np.array(item_indptr))


@check(
    "split_kv_decode",
    mistake="you read the slots after the last key, only the first page, or change the worker's state: gather the "
    "keys of the item and call worker once",
)
def test_one_item_each(hw: Homework) -> None:
    Decodes([3], 4).run(hw, decode_plan([3], 4))
    Decodes([10], 4).run(hw, decode_plan([10], 99))


@check(
    "split_kv_decode",
    mistake="you read the pages of the first sequence for every item: begin where kv_indptr says that the item's "
    "sequence begins",
)
def test_two_sequences_of_pages(hw: Homework) -> None:
    Decodes([10, 3], 4).run(hw, decode_plan([10, 3], 99))


@check(
    "split_kv_decode",
    mistake="you average the states, or keep only one: merge the states of all items of a tile by their LSEs",
)
def test_items_are_merged(hw: Homework) -> None:
    Decodes([12], 4).run(hw, decode_plan([12], 8))
    Decodes([30], 4).run(hw, decode_plan([30], 4))


@check(
    "split_kv_decode",
    mistake="you begin or end with whole pages: a range of keys may begin and end inside a page, so find page and "
    "offset of each position",
)
def test_ranges_inside_pages(hw: Homework) -> None:
    Decodes([30], 8).run(hw, decode_plan([30], 5))
    Decodes([7], 16).run(hw, decode_plan([7], 2))


@check(
    "split_kv_decode",
    mistake="you call worker once for several items, or with keys of other items: call it once for each item, with "
    "the keys of that item alone",
)
def test_a_worker_gets_its_own_keys(hw: Homework) -> None:
    decodes, plan = Decodes([30, 2, 17], 4), decode_plan([30, 2, 17], 6)
    decodes.run(hw, plan)
    want = sorted((plan.end_keys - plan.first_keys).tolist())
    assert_equal(sorted(decodes.loads), want, name="keys of each call of worker, sorted,")


@check(
    "split_kv_decode",
    mistake="you gather more keys than the item has: pages of other keys may have been evicted, and their entries in "
    "kv_indices may be any number",
)
def test_pages_of_other_keys(hw: Homework) -> None:
    decodes = Decodes([30], 4)
    decodes.indices[:3] = 10**6  # keys 0 to 11; the window begins at key 13
    decodes.run(hw, decode_plan([30], 5, first_key=13), first_key=13)


@check(
    "split_kv_decode",
    mistake="you take tile t for query t: first_tokens says which query a tile belongs to, and item_indptr where its "
    "items are",
)
def test_tiles_in_another_order(hw: Homework) -> None:
    kv_lens = [9, 30, 2, 17]
    Decodes(kv_lens, 4).run(hw, decode_plan(kv_lens, 99, order=[1, 3, 0, 2]))
    Decodes(kv_lens, 4).run(hw, decode_plan(kv_lens, 6, order=[1, 3, 0, 2]))


@check(
    "split_kv_decode",
    mistake="it fails for random batches: compare a single sequence with masked_attention over its keys",
)
def test_random_decodes(hw: Homework) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        kv_lens = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
        decodes = Decodes(kv_lens, rng.choice([1, 3, 16]), rng.choice([(4, 2), (3, 3), (6, 1)]), seed)
        decodes.run(hw, decode_plan(kv_lens, rng.randint(1, 30), rng.sample(range(len(kv_lens)), len(kv_lens))))


@check(
    "split_kv_decode",
    mistake="exp(LSE) overflows: subtract the larger LSE before you weight two states, as `merge_states` does",
)
def test_large_scores(hw: Homework) -> None:
    decodes = Decodes([30], 4)
    decodes.q *= 1000
    decodes.run(hw, decode_plan([30], 4), atol=1e-3)


@check(
    "split_kv_decode",
    mistake="you convert the states, or create a tensor in another dtype, such as float32: keep the dtype that worker "
    "returns, here float64",
    costs=0.2,
)
def test_the_dtype_of_the_workers(hw: Homework) -> None:
    Decodes([12, 5], 4).run(hw, decode_plan([12, 5], 3), exact=True)


@check(
    "split_kv_decode", seconds=COMPILING, mistake="on your GPU, your result differs from that of FlashInfer's decode"
)
def test_decode_on_the_gpu(hw: Homework) -> None:
    if not ON_GPU:
        return
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    kv_lens, page_size = [1, 900, 33, 5000], 16
    pages = paged_lists(kv_lens, page_size, seed=0)
    indptr, indices = int32(indptr_of(pages)), int32([page for own in pages for page in own])
    q = torch.randn(4, 16, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, len(indices) + 3, page_size, 8, 128, device="cuda", dtype=torch.bfloat16)

    def worker(q: Tensor, k: Tensor, v: Tensor) -> AttentionState:
        return attention_state(q.float(), k.float(), v.float(), scale=128**-0.5)

    mine = hw.split_kv_decode(q, k, v, indptr, indices, decode_plan(kv_lens, 400), worker)
    workspace = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.from_numpy(indptr),
        torch.from_numpy(indices).cuda(),
        torch.from_numpy(int32(last_lens(kv_lens, page_size))),
        16, 8, 128, page_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    assert_close(mine.out, out.float(), atol=2e-2, rtol=2e-2, name="out beside FlashInfer's")
    base_2 = mine.lse / np.log(2)  # FlashInfer's LSE is a logarithm to base 2
    assert_close(base_2, lse, atol=2e-2, rtol=2e-2, name="the LSE in base 2 beside FlashInfer's")


# cut_evenly ---------------------------------------------------------------------------------------------------------

CUT = ["workers", "tiles", "first_keys", "end_keys"]


def assert_cut(hw: Homework, num_keys: Sequence[int], num_workers: int, step: Callable[[str], bool]) -> None:
    """Check what `step` names: "keys", "loads", "items"."""
    got = hw.cut_evenly(np.array(num_keys), num_workers)
    what = f"cut_evenly({list(num_keys)}, {num_workers})"
    assert_tuple(got, CUT, what)
    lengths = {np.asarray(array).shape for array in got}
    assert len(lengths) == 1 and len(*lengths) == 1, f"{what} returns arrays of shapes {lengths}; all are [N]"
    items = list(zip(*(np.asarray(array).tolist() for array in got), strict=True))
    held: Lists = [[0] * n for n in num_keys]
    loads = [0] * num_workers
    for worker, tile, first, end in items:
        assert 0 <= tile < len(num_keys) and 0 <= first < end <= num_keys[tile], (
            f"{what}: an item has first_keys {first} and end_keys {end} of tile {tile}; no item is empty, and end_keys "
            "is at most the number of the tile's keys"
        )
        assert 0 <= worker < num_workers, f"{what}: an item for worker {worker}"
        loads[worker] += end - first
        for key in range(first, end):
            held[tile][key] += 1
    if step("keys"):
        for tile, counts in enumerate(held):
            assert set(counts) == {1}, (
                f"{what}: keys of tile {tile} are in {sorted(set(counts))} items instead of exactly one"
            )
    if step("loads"):
        assert max(loads) - min(loads) <= 1, f"{what}: the loads of the workers are {loads}"
    if step("items"):
        most = len(num_keys) + num_workers - 1
        assert len(items) <= most, f"{what} has {len(items)} items; {most} are enough"


def everything(step: str) -> bool:
    return True


@check(
    "cut_evenly",
    mistake="you count keys over all tiles, or include the key at end_keys: one worker computes every tile as a "
    "whole, from 0 to its number of keys",
)
def test_one_worker(hw: Homework) -> None:
    assert_cut(hw, [5], 1, everything)
    assert_cut(hw, [5, 3, 8], 1, everything)


@check(
    "cut_evenly",
    mistake="you let an item span two tiles, or drop what does not fit: cut at the end of each tile too, so that each "
    "key is in exactly one item",
)
def test_every_key_once(hw: Homework) -> None:
    for num_keys in ([12], [8, 4], [7, 1, 30, 2]):
        for num_workers in (2, 3, 5):
            assert_cut(hw, num_keys, num_workers, lambda step: step == "keys")


@check(
    "cut_evenly",
    mistake="you give the last worker the rest, or round every share up: loads differ by one key at most, as 3, 3, 2 "
    "and 2 for 10 keys",
)
def test_even_loads(hw: Homework) -> None:
    for num_keys in ([12], [10], [8, 4], [7, 1, 30, 2], [100, 1, 1]):
        for num_workers in (2, 3, 4, 7):
            assert_cut(hw, num_keys, num_workers, lambda step: step == "loads")


@check(
    "cut_evenly",
    mistake="you cut where neither a tile nor a worker's share ends: let a worker continue with the next tile where "
    "its tile ends",
)
def test_few_items(hw: Homework) -> None:
    for num_keys in ([12], [8, 4], [7, 1, 30, 2], [3, 3, 3, 3]):
        for num_workers in (2, 3, 4, 7):
            assert_cut(hw, num_keys, num_workers, everything)


@check(
    "cut_evenly",
    mistake="you keep cuts that coincide, which makes empty items: with fewer keys than workers, some workers have no "
    "item",
)
def test_fewer_keys_than_workers(hw: Homework) -> None:
    assert_cut(hw, [1, 1], 5, everything)
    assert_cut(hw, [2], 3, everything)


@check(
    "cut_evenly",
    mistake="you loop over keys, which takes too long for millions of them: compute where to cut instead",
    costs=0.2,
)
def test_millions_of_keys(hw: Homework) -> None:
    lines = [lines_run(hw.cut_evenly, np.full(4, n), 6) for n in (1_000, 16_000)]
    assert lines[1] < 3 * lines[0], f"{lines[1]} lines of Python run for tiles of 16,000 keys, {lines[0]} for 1,000"
    workers, _, first, end = (np.asarray(array) for array in hw.cut_evenly(np.full(400, 1_000_000), 264))
    loads = np.bincount(workers, weights=end - first, minlength=264)
    if loads.sum() != 400_000_000 or loads.max() - loads.min() > 1:
        raise CheckFailed(
            f"400 tiles of a million keys: the 264 workers have {loads.min():.0f} to {loads.max():.0f} keys",
            "a product such as all keys times the number of workers may overflow int32",
        )


@check("cut_evenly", mistake="it fails for random tiles and numbers of workers: work out the printed example by hand")
def test_random_cuts(hw: Homework) -> None:
    rng = random.Random(0)
    for _ in range(100):
        assert_cut(hw, [rng.randint(1, 40) for _ in range(rng.randint(1, 6))], rng.randint(1, 20), everything)
