"""Grader of chapter 06. Its oracles are loops over tokens and pages, and a pool made of plain lists."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from book.grading import Exercise, Homework, assert_close, assert_equal, assert_raises, check
from mini_engine.kv_cache import page_table

EXERCISES = [
    Exercise(
        "slots",
        points=2,
        minutes=10,
        difficulty=1,
        hints=(
            "Take one token by hand: position 9, pages of 4, the sequence's pages are 2, 0, 3. In which of them is it, "
            "and how far from its beginning?",
            "positions // page_size says which page of the row, positions % page_size how far into it. A tensor can be "
            "indexed with two tensors at once: table[rows, ...] picks one entry for each token.",
            "pages = table[rows, positions // page_size].long(); pages * page_size + positions % page_size.",
        ),
    ),
    Exercise(
        "PageTable",
        points=5,
        minutes=40,
        difficulty=2,
        part="page_table",
        hints=(
            "Write down, for each method, what it does to each of the five pieces of state. Every page that leaves the "
            "free list gets an owner and a place in the table; every page that returns has lost its last one.",
            "reserve: missing = self.pages_for(num_tokens) - self.counts[row]. Decide before you take the first page. "
            "erase: count each page of the row down, and only those that reach 0 are free; then the row is, too. "
            "assign: slots() gives a place for each token, and the tokens are the third axis of k, not the first.",
            "reserve: if missing > len(self.free_pages): return False; then missing times: page = free_pages.pop(), "
            "refcounts[page] = 1, table[row, counts[row]] = page, counts[row] += 1. erase: also counts[row] = 0 and "
            "free_rows.append(row). assign: where = self.slots(rows[:, None].expand_as(positions), positions); "
            "k_cache[0][:, where] = k.transpose(0, 1).",
        ),
    ),
    Exercise(
        "physical_blocks",
        points=3,
        minutes=20,
        difficulty=2,
        part="physical_blocks",
        hints=(
            "Without batch, heads and queries it is one line: table[blocks]. What changes with a batch is which row of "
            "the table each number is looked up in.",
            "Index the table with two tensors: the number of the batch row, shaped so that it broadcasts against "
            "[B, H, Q, n], and the blocks. Then make a tensor of zeros of the full width and write into its front.",
            "b = torch.arange(len(table))[:, None, None, None]; out = torch.zeros(*blocks.shape[:3], width, "
            "dtype=torch.int32); out[..., : blocks.shape[-1]] = table[b, blocks.long()].",
        ),
    ),
    Exercise(
        "physical_mask",
        points=4,
        minutes=25,
        difficulty=2,
        part="physical_mask",
        hints=(
            "Given a slot: which page is it in, how far from its beginning, and where does that page begin in the "
            "sequence of row b? The sum of two of these is what mask_mod wants to know.",
            "start = first_keys[b, kv_idx // page_size]; the position is start + kv_idx % page_size. A start below 0 "
            "hides the slot, whatever mask_mod says of it. 0 is a fine start.",
            "def over_slots(b, h, q_idx, kv_idx): start = ...; return (start >= 0) & mask_mod(b, h, q_idx, start + "
            "kv_idx % page_size). Return that function. It must not be an `and`, nor an `if`.",
        ),
    ),
    Exercise(
        "convert_block_mask",
        points=4,
        minutes=25,
        difficulty=2,
        hints=(
            "A BlockMask has two lists of blocks, their two counts, a block size, a mask_mod and two lengths. Which of "
            "them does a new order of pages change?",
            "The counts and the block size stay. Both lists go through physical_blocks, the mask_mod through "
            "physical_mask. For first_keys, the j-th page of a row starts at j * page_size, and entries at counts[b] "
            "or later are no pages: they start at -1.",
            "column = torch.arange(table.shape[1]); starts = torch.where(column < counts[:, None], column * page_size, "
            "-1); BlockMask.from_kv_blocks(mask.kv_num_blocks, physical_blocks(mask.kv_indices, table, num_pages), "
            "mask.full_kv_num_blocks, ..., BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=..., seq_lengths=...).",
        ),
    ),
    Exercise(
        "compact",
        points=4,
        minutes=30,
        difficulty=3,
        challenge=True,
        hints=(
            "Count the pages in use, n. How many of them are at n or behind? How many of the first n are free? Why are "
            "these two numbers equal?",
            "np.flatnonzero(table.refcounts > 0) lists the pages in use. Pair those at n and behind with the gaps "
            "before n. A lookup from old to new number for every page of the pool makes the table easy.",
            "moved = np.arange(table.num_pages); moved[old] = new; for each row: pages = table.pages(row); pages[:] = "
            "moved[pages]. Move the refcounts from old to new, and set free_pages to the pages from n on.",
        ),
    ),
]


def permutation(num_pages: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(num_pages), num_pages)


# slots --------------------------------------------------------------------------------------------------------------


def assert_slots(hw: Homework, table: list[list[int]], rows: list[int], positions: list[int], page_size: int) -> None:
    want = [table[b][p // page_size] * page_size + p % page_size for b, p in zip(rows, positions, strict=True)]
    got = hw.slots(torch.tensor(table, dtype=torch.int32), torch.tensor(rows), torch.tensor(positions), page_size)
    assert_equal(got, torch.tensor(want, dtype=torch.int64), name="the tensor of slots")


@check("slots", mistake="a slot is page * page_size + offset: the first token of page 2 is not in slot 2")
def test_the_first_token(hw: Homework) -> None:
    assert_slots(hw, [[2]], [0], [0], 4)


@check("slots", mistake="within a page the slots follow the positions")
def test_one_page(hw: Homework) -> None:
    assert_slots(hw, [[2]], [0, 0, 0], [1, 2, 3], 4)


@check("slots", mistake="the offset is the position within the page: it starts again with each page")
def test_the_second_page(hw: Homework) -> None:
    assert_slots(hw, [[0, 1]], [0, 0], [4, 6], 4)


@check("slots", mistake="pages lie anywhere: look up the page of each token, and do not go on from the first one")
def test_scattered_pages(hw: Homework) -> None:
    assert_slots(hw, [[2, 0, 3]], [0] * 10, list(range(10)), 4)


@check("slots", mistake="each token's page is in the row of its own sequence")
def test_two_sequences(hw: Homework) -> None:
    assert_slots(hw, [[2, 0, 3], [1, 0, 0]], [1, 0, 1, 0], [2, 9, 0, 4], 4)


@check("slots", mistake="a large pool has more slots than 32 bits can count: make the pages int64 before you multiply")
def test_slots_of_a_large_pool(hw: Homework) -> None:
    assert_slots(hw, [[2**24]], [0], [5], 128)


@check("slots", mistake="some mixture of tokens goes wrong that the checks before did not try")
def test_random_slots(hw: Homework) -> None:
    for seed, page_size in enumerate([1, 2, 3, 16, 128]):
        rng = random.Random(seed)
        table = [permutation(9, seed + b)[:5] for b in range(4)]
        rows = [rng.randrange(4) for _ in range(30)]
        assert_slots(hw, table, rows, [rng.randrange(5 * page_size) for _ in rows], page_size)


# PageTable ----------------------------------------------------------------------------------------------------------


class Pool:
    """What a page table should hold: a list of pages for each row that is taken."""

    def __init__(self, table: page_table.PageTable) -> None:
        self.table = table
        self.rows: dict[int, list[int]] = {}

    def check(self) -> None:
        """The promises of the class, whatever happened before."""
        table = self.table
        for row, pages in self.rows.items():
            assert_equal(table.pages(row).tolist(), pages, name=f"the pages of row {row}")
        owners = Counter(page for pages in self.rows.values() for page in pages)
        counted = {page: int(n) for page, n in enumerate(table.refcounts) if n}
        assert_equal(counted, dict(owners), name="refcounts, as {page: owners}")
        free, used = list(table.free_pages), set(owners)
        assert len(set(free)) == len(free), f"the free list holds a page twice: {free}"
        assert not set(free) & used, f"pages {sorted(set(free) & used)} are owned, and on the free list"
        lost = set(range(table.num_pages)) - set(free) - used
        assert not lost, f"pages {sorted(lost)} have no owner and are not on the free list: they have leaked"
        taken = set(range(len(table.counts))) - set(table.free_rows)
        assert_equal(taken, set(self.rows), name="the rows that are taken")
        assert len(set(table.free_rows)) == len(table.free_rows), f"a row is free twice: {table.free_rows}"

    def allocate(self) -> int:
        row = self.table.allocate()
        assert row is not None, "allocate returns None: is a `return` missing?"
        assert row not in self.rows, f"row {row} was handed out twice"
        self.rows[int(row)] = []
        return int(row)

    def reserve(self, row: int, num_tokens: int) -> bool:
        before = list(self.rows[row])
        missing = max(0, -(-num_tokens // self.table.page_size) - len(before))
        possible = missing <= len(self.table.free_pages)
        got = self.table.reserve(row, num_tokens)
        assert got is not None, "reserve returns None: is a `return` missing?"
        assert_equal(bool(got), possible, name=f"reserve({row}, {num_tokens})")
        pages = self.table.pages(row).tolist()
        wanted = len(before) + (missing if possible else 0)
        assert len(pages) == wanted, f"after reserve({row}, {num_tokens}) the row has {len(pages)} pages, not {wanted}"
        assert_equal(pages[: len(before)], before, name=f"the pages that row {row} had before")
        self.rows[row] = pages
        return possible

    def share(self, row: int, other: int, num_pages: int) -> None:
        """What chapter 07 does: a row without pages begins with those of another."""
        pages = self.rows[other][:num_pages]
        self.table.table[row, :num_pages] = pages
        self.table.counts[row] = num_pages
        for page in pages:
            self.table.refcounts[page] += 1
        self.rows[row] = pages

    def erase(self, row: int) -> None:
        del self.rows[row]
        self.table.erase(row)


def pool(hw: Homework, num_pages: int, page_size: int, max_sequences: int) -> Pool:
    return Pool(hw.PageTable(num_pages, page_size, max_sequences))


@check("PageTable", mistake="allocate takes one row off the free rows and returns it; no row is handed out twice")
def test_rows(hw: Homework) -> None:
    p = pool(hw, 4, 2, 3)
    for _ in range(3):
        p.allocate()
        p.check()
    assert_raises(IndexError, p.table.allocate, mistake="with every row taken, allocate raises IndexError")


@check("PageTable", mistake="a new page leaves the free list, gets one owner, and is the row's first")
def test_one_page_for_one_token(hw: Homework) -> None:
    p = pool(hw, 4, 2, 2)
    p.reserve(p.allocate(), 1)
    p.check()


@check("PageTable", mistake="so many tokens fill num_tokens / page_size pages, rounded up: a full page needs no second")
def test_pages_are_rounded_up(hw: Homework) -> None:
    for num_tokens in (0, 1, 3, 4, 5, 8, 9):
        p = pool(hw, 4, 4, 1)
        p.reserve(p.allocate(), num_tokens)
        p.check()


@check("PageTable", mistake="num_tokens counts all tokens of the row: only the pages that it lacks are new")
def test_growing(hw: Homework) -> None:
    p = pool(hw, 8, 2, 2)
    a, b = p.allocate(), p.allocate()
    for row, num_tokens in [(a, 1), (a, 2), (b, 3), (a, 3), (a, 6), (b, 5)]:
        p.reserve(row, num_tokens)
        p.check()


@check("PageTable", mistake="a row that has enough pages keeps them all, also those that num_tokens does not need")
def test_less_than_it_has(hw: Homework) -> None:
    p = pool(hw, 4, 2, 1)
    row = p.allocate()
    for num_tokens in (6, 2, 0):
        p.reserve(row, num_tokens)
        p.check()


@check("PageTable", mistake="the last free page can be taken, too")
def test_the_whole_pool(hw: Homework) -> None:
    p = pool(hw, 3, 2, 1)
    p.reserve(p.allocate(), 6)
    p.check()


@check("PageTable", mistake="all or nothing: if too few pages are free, reserve returns False and changes nothing")
def test_too_few_pages(hw: Homework) -> None:
    p = pool(hw, 4, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.reserve(a, 5)
    for num_tokens in (3, 9):
        p.reserve(b, num_tokens)
        p.check()
    p.reserve(b, 2)
    p.check()


@check("PageTable", mistake="erase gives back the pages of that row, and the row; those of others stay")
def test_erase(hw: Homework) -> None:
    p = pool(hw, 5, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.reserve(a, 4)
    p.reserve(b, 2)
    p.erase(a)
    p.check()


@check("PageTable", mistake="an erased row has no pages left: whoever gets it next begins without any")
def test_a_row_is_used_again(hw: Homework) -> None:
    p = pool(hw, 5, 2, 1)
    for num_tokens in (4, 3, 10):
        row = p.allocate()
        p.check()
        p.reserve(row, num_tokens)
        p.check()
        p.erase(row)
        p.check()


@check("PageTable", mistake="a page with another owner is not free: count it down, and give it back at 0 alone")
def test_shared_pages(hw: Homework) -> None:
    p = pool(hw, 5, 2, 3)
    a, b, c = p.allocate(), p.allocate(), p.allocate()
    p.reserve(a, 6)
    p.share(b, a, 2)
    p.share(c, a, 1)
    for row in (a, c, b):
        p.erase(row)
        p.check()


@check("PageTable", mistake="some order of operations loses a page or gives it to two owners")
def test_random_operations(hw: Homework) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        p = pool(hw, rng.randint(1, 12), rng.randint(1, 4), rng.randint(1, 5))
        for _ in range(60):
            empty = [row for row, pages in p.rows.items() if not pages]
            filled = [row for row, pages in p.rows.items() if pages]
            action = rng.choice(["allocate", "reserve", "reserve", "share", "erase"])
            if action == "allocate" and len(p.rows) < len(p.table.counts):
                p.allocate()
            elif action == "reserve" and p.rows:
                most = p.table.num_pages * p.table.page_size
                p.reserve(rng.choice(list(p.rows)), rng.randint(0, most + 2))
            elif action == "share" and empty and filled:
                other = rng.choice(filled)
                p.share(rng.choice(empty), other, rng.randint(1, len(p.rows[other])))
            elif action == "erase" and p.rows:
                p.erase(rng.choice(list(p.rows)))
            p.check()
        for row in list(p.rows):
            p.erase(row)
            p.check()


def assert_assigned(
    hw: Homework,
    lens: Sequence[int],
    positions: list[list[int]],
    page_size: int,
    heads: int,
    rows: Sequence[int] | None = None,
) -> None:
    """Assign to sequences that have grown in turns, beside a loop over tokens and heads; by default row b is b's."""
    num_pages = sum(-(-n // page_size) for n in lens) + 1
    rows = list(rows or range(len(lens)))
    table = hw.PageTable(num_pages, page_size, max(rows) + 1)
    while table.free_rows:
        table.allocate()
    for n in range(1, max(lens) + 1):
        for row, length in zip(rows, lens, strict=True):
            table.reserve(row, min(n, length))
    k, v = (torch.randn(len(lens), heads, len(positions[0]), 3) for _ in range(2))
    caches = [torch.randn(1, heads, num_pages * page_size, 3) for _ in range(2)]
    want = [cache.clone() for cache in caches]
    for cache, new in zip(want, (k, v), strict=True):
        for b, row in enumerate(rows):
            for s, position in enumerate(positions[b]):
                slot = int(table.pages(row)[position // page_size]) * page_size + position % page_size
                for head in range(heads):
                    cache[0, head, slot] = new[b, head, s]
    table.assign(torch.tensor(rows), torch.tensor(positions), k, v, *caches)
    assert_close(caches[0], want[0], atol=0, name="k_cache")
    assert_close(caches[1], want[1], atol=0, name="v_cache")


@check("PageTable", mistake="assign writes into the tensors that it is given: keys to k_cache, values to v_cache")
def test_assign_one_token(hw: Homework) -> None:
    assert_assigned(hw, [1], [[0]], page_size=1, heads=1)


@check("PageTable", mistake="assign finds each token's slot through the table: its pages lie anywhere")
def test_assign_across_pages(hw: Homework) -> None:
    assert_assigned(hw, [7], [[1, 2, 3, 4, 6]], page_size=2, heads=1)
    assert_assigned(hw, [5, 6], [[2, 3, 4], [3, 4, 5]], page_size=2, heads=1)


@check("PageTable", mistake="k is [B, heads, tokens, D] and the cache [1, heads, slots, D]: do not mix them up")
def test_assign_heads(hw: Homework) -> None:
    assert_assigned(hw, [5], [[0, 1, 2, 4]], page_size=2, heads=3)
    assert_assigned(hw, [5, 4, 9], [[3, 4], [2, 3], [7, 8]], page_size=2, heads=2)


@check("PageTable", mistake="sequence b is not row b of the table: `rows` says which row is whose")
def test_assign_to_any_rows(hw: Homework) -> None:
    assert_assigned(hw, [5, 4, 9], [[3, 4], [2, 3], [7, 8]], page_size=2, heads=2, rows=[3, 0, 2])


# physical_blocks ----------------------------------------------------------------------------------------------------


def assert_blocks(hw: Homework, blocks: Tensor, table: Tensor, width: int, front: int | None = None) -> None:
    """Compare with a loop; with `front`, only so many entries of each list."""
    want = torch.zeros(*blocks.shape[:3], width, dtype=torch.int32)
    for b, h, q in np.ndindex(*blocks.shape[:3]):
        for i, block in enumerate(blocks[b, h, q].tolist()):
            want[b, h, q, i] = int(table[b, block])
    got = hw.physical_blocks(blocks, table, width)
    if front is not None and isinstance(got, Tensor) and got.shape[:3] == want.shape[:3]:
        got, want = got[..., :front], want[..., :front]
    assert_equal(got, want, name="the tensor of physical blocks")


@check("physical_blocks", mistake="block j of the sequence is page table[b, j]: look it up")
def test_one_list(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32), table, 4, front=3)


@check("physical_blocks", mistake="the order of a list stays, and a list need not hold every block of the sequence")
def test_some_blocks(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3, 5]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[3, 1]]]], dtype=torch.int32), table, 6, front=2)


@check("physical_blocks", mistake="behind the list stand zeros, up to the width: as many as the pool has blocks")
def test_the_width(hw: Homework) -> None:
    table = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[0, 2]]]], dtype=torch.int32), table, 7)
    assert_blocks(hw, torch.tensor([[[[2, 0, 1]]]], dtype=torch.int32), table, 3)


@check("physical_blocks", mistake="each row of the batch has its own row of the table")
def test_two_tables(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3], [1, 4, 4]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[1, 2]]], [[[0, 1]]]], dtype=torch.int32), table, 5)


@check("physical_blocks", mistake="every head and every block of queries has a list of its own")
def test_heads_and_query_blocks(hw: Homework) -> None:
    table = torch.tensor([permutation(6, b) for b in range(2)], dtype=torch.int32)
    assert_blocks(hw, torch.randint(0, 6, (2, 3, 4, 5), dtype=torch.int32), table, 9)


@check("physical_blocks", mistake="the tensors that you are given do not change")
def test_blocks_are_unchanged(hw: Homework) -> None:
    blocks, table = torch.tensor([[[[2, 1]]]], dtype=torch.int32), torch.tensor([[5, 1, 0]], dtype=torch.int32)
    kept = blocks.clone(), table.clone()
    hw.physical_blocks(blocks, table, 6)
    assert_equal(blocks, kept[0], name="blocks, afterwards")
    assert_equal(table, kept[1], name="table, afterwards")


@check("physical_blocks", mistake="some shape goes wrong that the checks before did not try")
def test_random_blocks(hw: Homework) -> None:
    for b, h, q, n, w, width in [(1, 1, 1, 1, 1, 1), (3, 1, 2, 4, 8, 8), (2, 2, 1, 5, 5, 11), (4, 1, 1, 2, 7, 30)]:
        table = torch.tensor([permutation(width, i)[:w] for i in range(b)])
        assert_blocks(hw, torch.randint(0, w, (b, h, q, n)), table, width)


# physical_mask ------------------------------------------------------------------------------------------------------


def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= -1


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def assert_mask(
    hw: Homework,
    mask_mod: Callable,
    first_keys: list[list[int]],
    page_size: int,
    queries: int,
    heads: int = 1,
) -> None:
    """Compare with a loop over single tokens."""
    batch, num_slots = len(first_keys), len(first_keys[0]) * page_size
    want = torch.zeros(batch, heads, queries, num_slots, dtype=torch.bool)
    for b, h, q, slot in np.ndindex(*want.shape):
        start = first_keys[b][slot // page_size]
        if start >= 0:
            index = (torch.tensor(i) for i in (b, h, q, start + slot % page_size))
            want[b, h, q, slot] = mask_mod(*index)
    got = hw.physical_mask(mask_mod, torch.tensor(first_keys, dtype=torch.int32), page_size)
    grid = create_mask(got, batch, heads, queries, num_slots, device="cpu")
    assert_equal(grid, want, name="the mask over slots")


@check("physical_mask", mistake="return a function that can be traced: no `if`, `and`, `or`, `not` on its tensors")
def test_it_can_be_traced(hw: Homework) -> None:
    got = hw.physical_mask(causal, torch.tensor([[0, -1]], dtype=torch.int32), 4)
    assert callable(got), "physical_mask returns a function of (b, h, q_idx, kv_idx), not its value"
    create_mask(got, 1, 1, 4, 8, device="cpu")


@check("physical_mask", mistake="in a sequence of one page, page 0, slots are positions: nothing changes")
def test_one_page_in_place(hw: Homework) -> None:
    assert_mask(hw, causal, [[0]], 4, queries=4)


@check("physical_mask", mistake="the position of a key is the start of its page plus the offset in the page")
def test_swapped_pages(hw: Homework) -> None:
    assert_mask(hw, causal, [[3, 0]], 3, queries=6)


@check("physical_mask", mistake="a page of another sequence is hidden, and what hides it is its start of -1 alone")
def test_pages_of_others(hw: Homework) -> None:
    assert_mask(hw, everything, [[0, -1, 4]], 4, queries=2)
    assert_mask(hw, causal, [[-1, 4, -1, 0]], 4, queries=8)


@check("physical_mask", mistake="each row of the batch has its own pages: look them up in row b")
def test_two_rows(hw: Homework) -> None:
    assert_mask(hw, causal, [[2, 0, -1, 4], [-1, -1, 0, -1]], 2, queries=6)


@check("physical_mask", mistake="b, h and q_idx go to mask_mod as they are: a mask may depend on all of them")
def test_masks_of_all_kinds(hw: Homework) -> None:
    def odd(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((kv_idx + h + 2 * b) % 3 > 0)

    assert_mask(hw, odd, [[4, 0, -1, 8], [-1, 4, 0, -1]], 4, queries=9, heads=2)


@check("physical_mask", mistake="first_keys are positions of keys, not numbers of blocks")
def test_starts_that_are_no_multiples(hw: Homework) -> None:
    assert_mask(hw, causal, [[5, -1, 9, 1]], 4, queries=12)  # the first token is gone


@check("physical_mask", mistake="some placement of pages goes wrong that the checks before did not try")
def test_random_placements(hw: Homework) -> None:
    for seed, page_size in enumerate([1, 2, 3, 5]):
        rng = random.Random(seed)
        pages = permutation(7, seed)
        cut = rng.randint(1, 6)
        first_keys = [[-1] * 7, [-1] * 7]
        for b, own in enumerate((pages[:cut], pages[cut:])):
            for index, page in enumerate(own):
                first_keys[b][page] = index * page_size
        assert_mask(hw, causal, first_keys, page_size, queries=7)


# convert_block_mask -------------------------------------------------------------------------------------------------

Converted = tuple[BlockMask, BlockMask, list[list[int]]]


def convert(
    hw: Homework, lens: Sequence[int], page_size: int, num_pages: int, seed: int = 0, window: int | None = None
) -> Converted:
    """A logical mask of the last three queries of each sequence, the submission's physical one, and all pages."""
    last = torch.tensor(lens) - 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query = last[b] - 2 + q_idx
        visible = (kv_idx <= query) & (kv_idx <= last[b])
        return visible if window is None else visible & (query - kv_idx < window)

    width = max(-(-n // page_size) for n in lens)
    logical = create_block_mask(mask_mod, len(lens), 1, 3, width * page_size, device="cpu", BLOCK_SIZE=(2, page_size))
    spare = permutation(num_pages, seed)
    pages = [[spare.pop() for _ in range(-(-n // page_size))] for n in lens]
    # Behind a row's own pages stand other numbers: its own first page, for one.
    table = torch.tensor([own + [own[0]] * (width - len(own)) for own in pages], dtype=torch.int32)
    counts = torch.tensor([len(own) for own in pages])
    got = hw.convert_block_mask(logical, table, counts, num_pages, page_size)
    assert got is not None, "convert_block_mask returns None: is a `return` missing?"
    assert isinstance(got, BlockMask), f"convert_block_mask returns a {type(got).__name__}, not a BlockMask"
    return logical, got, pages


def assert_lists(logical: BlockMask, got: BlockMask, pages: list[list[int]], names: tuple[str, str]) -> None:
    counts_name, indices_name = names
    wanted, turned = (getattr(mask, counts_name) for mask in (logical, got))
    assert_equal(turned, wanted, name=counts_name)
    old, new = getattr(logical, indices_name), getattr(got, indices_name)
    for b, h, q in np.ndindex(*wanted.shape):
        n = int(wanted[b, h, q])
        want = [pages[b][block] for block in old[b, h, q, :n].tolist()]
        assert_equal(new[b, h, q, :n].tolist(), want, name=f"{indices_name}[{b}, {h}, {q}, :{n}]")


@check("convert_block_mask", mistake="the mask covers the queries that it had, and all slots of the pool as keys")
def test_the_lengths(hw: Homework) -> None:
    _, got, _ = convert(hw, [6, 3], page_size=4, num_pages=5)
    assert_equal(tuple(got.seq_lengths), (3, 20), name="seq_lengths")
    assert_equal(tuple(got.BLOCK_SIZE), (2, 4), name="BLOCK_SIZE")


@check("convert_block_mask", mistake="partial blocks: their numbers are turned into pages, how many there are stays")
def test_partial_blocks(hw: Homework) -> None:
    assert_lists(*convert(hw, [6, 3, 9], page_size=4, num_pages=8), ("kv_num_blocks", "kv_indices"))


@check("convert_block_mask", mistake="full blocks are listed apart, and have to be turned, too")
def test_full_blocks(hw: Homework) -> None:
    assert_lists(*convert(hw, [6, 3, 14], page_size=4, num_pages=9), ("full_kv_num_blocks", "full_kv_indices"))


@check("convert_block_mask", mistake="the mask_mod has to be one over slots, in which the pages of others are hidden")
def test_the_mask_mod(hw: Homework) -> None:
    for seed in range(3):
        logical, got, pages = convert(hw, [6, 8, 9], page_size=4, num_pages=8, seed=seed)
        want = torch.zeros(3, 1, 3, 32, dtype=torch.bool)
        dense = create_mask(logical.mask_mod, 3, 1, 3, 12, device="cpu")
        for b, own in enumerate(pages):
            for index, page in enumerate(own):
                want[b, :, :, page * 4 : page * 4 + 4] = dense[b, :, :, index * 4 : index * 4 + 4]
        assert_equal(create_mask(got.mask_mod, 3, 1, 3, 32, device="cpu"), want, name="the mask over slots")


@check("convert_block_mask", mistake="a block of keys that is not a page holds keys of several sequences: ValueError")
def test_blocks_are_pages(hw: Homework) -> None:
    logical = create_block_mask(causal, 1, 1, 1, 16, device="cpu", BLOCK_SIZE=(1, 8))
    table, counts = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), torch.tensor([4])
    for page_size in (4, 16):
        assert_raises(ValueError, hw.convert_block_mask, logical, table, counts, 4, page_size)


@check("convert_block_mask", mistake="a mask without lists of full blocks stays without")
def test_no_full_blocks(hw: Homework) -> None:
    logical = create_block_mask(causal, 1, 1, 1, 8, device="cpu", BLOCK_SIZE=(1, 4))
    only_partial = BlockMask.from_kv_blocks(
        logical.kv_num_blocks, logical.kv_indices, BLOCK_SIZE=(1, 4), mask_mod=causal, seq_lengths=(1, 8)
    )
    table, counts = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([2])
    got = hw.convert_block_mask(only_partial, table, counts, 3, 4)
    assert got.full_kv_indices is None and got.full_kv_num_blocks is None, "the result lists full blocks"


@check("convert_block_mask", mistake="where pages landed changes the result of attention, and it must not")
def test_attention_wherever_pages_are(hw: Homework) -> None:
    lens, page_size, num_pages = [6, 11, 3], 4, 9
    q, k, v = torch.randn(3, 2, 3, 8), torch.randn(3, 2, 12, 8), torch.randn(3, 2, 12, 8)
    for seed, window in [(0, None), (1, None), (2, 5), (3, 5)]:
        logical, physical, pages = convert(hw, lens, page_size, num_pages, seed, window)
        k_pool, v_pool = torch.randn(2, 1, 2, num_pages * page_size, 8)
        for b, own in enumerate(pages):
            for index, page in enumerate(own):
                at, there = (
                    slice(index * page_size, (index + 1) * page_size),
                    slice(page * page_size, (page + 1) * page_size),
                )
                k_pool[0, :, there], v_pool[0, :, there] = k[b, :, at], v[b, :, at]
        want = flex_attention(q, k, v, block_mask=logical)
        got = flex_attention(q, k_pool.expand(3, -1, -1, -1), v_pool.expand(3, -1, -1, -1), block_mask=physical)
        assert_close(got, want, name="attention over the pool")


# compact ------------------------------------------------------------------------------------------------------------


def in_use(num_pages: int, rows: dict[int, list[int]], max_sequences: int = 6) -> page_table.PageTable:
    """A page table whose rows own these pages."""
    table = page_table.PageTable(num_pages, 2, max_sequences)
    for row, pages in rows.items():
        table.table[row, : len(pages)] = pages
        table.counts[row] = len(pages)
        np.add.at(table.refcounts, np.array(pages, dtype=np.int64), 1)
    table.free_pages[:] = [page for page in permutation(num_pages, 0) if table.refcounts[page] == 0]
    table.free_rows[:] = [row for row in range(max_sequences) if row not in rows]
    return table


def assert_compact(hw: Homework, num_pages: int, rows: dict[int, list[int]]) -> None:
    table = in_use(num_pages, rows)
    content = [f"keys of page {page}" for page in range(num_pages)]
    read = {row: [content[page] for page in pages] for row, pages in rows.items()}
    used = sorted({page for pages in rows.values() for page in pages})
    pairs = hw.compact(table)
    assert pairs is not None, "compact returns None: is a `return` missing?"
    for old, new in pairs:
        content[new] = content[old]
    n = len(used)
    now = {page for row in rows for page in table.pages(row).tolist()}
    assert_equal(sorted(now), list(range(n)), name="the pages in use, afterwards")
    for row, keys in read.items():
        got = [content[page] for page in table.pages(row).tolist()]
        assert_equal(got, keys, name=f"what row {row} reads after the copies")
    moving = sum(page >= n for page in used)
    assert len(pairs) == moving, f"{len(pairs)} pages move; {moving} are behind the first {n}, and only these have to"
    owners = Counter(page for row in rows for page in table.pages(row).tolist())
    assert_equal(table.refcounts.tolist(), [owners[p] for p in range(num_pages)], name="refcounts, afterwards")
    assert_equal(sorted(table.free_pages), list(range(n, num_pages)), name="the free pages, sorted")
    assert_equal(table.num_pages, num_pages, name="num_pages")


@check("compact", mistake="pages that are the first ones already stay where they are")
def test_nothing_to_move(hw: Homework) -> None:
    assert_compact(hw, 4, {0: [0, 1]})
    assert_compact(hw, 3, {})


@check("compact", mistake="a page from behind moves into the gap: row, owners, free list change; pairs are (old, new)")
def test_one_gap(hw: Homework) -> None:
    assert_compact(hw, 5, {1: [0], 2: [2]})


@check("compact", mistake="a row keeps its pages in order of position, wherever they have moved")
def test_order_of_positions(hw: Homework) -> None:
    assert_compact(hw, 9, {0: [7, 1, 5], 2: [8, 0]})


@check("compact", mistake="only pages behind the first n move: to renumber all of them copies too much")
def test_as_few_as_possible(hw: Homework) -> None:
    assert_compact(hw, 8, {0: [6, 2], 3: [1, 3]})


@check("compact", mistake="a page with several owners moves once: all of them follow, and its count goes with it")
def test_shared_pages_move_once(hw: Homework) -> None:
    assert_compact(hw, 9, {0: [8, 7, 1], 1: [8, 7], 4: [8, 3]})


@check("compact", mistake="some pool goes wrong that the checks before did not try")
def test_random_pools(hw: Homework) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        num_pages = rng.randint(1, 20)
        pages = permutation(num_pages, seed)[: rng.randint(0, num_pages)]
        rows: dict[int, list[int]] = {}
        for row in rng.sample(range(6), 4):
            shared = rng.choice(list(rows.values()))[: rng.randint(0, 3)] if rows else []
            own = [pages.pop() for _ in range(min(len(pages), rng.randint(0, 6)))]
            rows[row] = shared + own
        assert_compact(hw, num_pages, rows)
