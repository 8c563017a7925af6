"""Grader of chapter 06. Its oracles are loops over tokens and pages, and a pool made of plain lists."""

import copy
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from book.grading import (
    Exercise,
    Homework,
    assert_close,
    assert_equal,
    assert_no_loop,
    assert_raises,
    check,
    lines_run,
)
from book.grading.assertions import CheckFailed
from book.guarded_table import GuardedPageTable
from mini_engine.kv_cache import page_table

EXERCISES = [
    Exercise(
        "slots",
        points=1,
        minutes=5,
        difficulty=1,
        hints=(
            "Work out one token by hand: it is at position 9, a page has 4 slots, and the sequence's pages are 2, 0 "
            "and 3. Which page is the token in, and how far from the beginning of that page?",
            "positions // page_size is the index of the page in its row, and positions % page_size is the offset in "
            "the page. A tensor can be indexed with two tensors at once: table[rows, ...] picks one entry for each "
            "token.",
            "pages = table[rows, positions // page_size].long(); pages * page_size + positions % page_size.",
        ),
    ),
    Exercise(
        "PageTable",
        points=6,
        minutes=50,
        difficulty=2,
        part="page_table",
        hints=(
            "Two helpers do most of the work: one takes n free pages from the pool, one removes an owner from each of "
            "some pages. Write down what each does to num_free_pages, _free_pages, refcounts and generation.",
            "take: with num_pages [2, 0, 3], the new pages belong to the rows np.repeat(rows, num_pages) and have the "
            "indices 0, 1, 0, 1, 2 among those of their row. Where in the table is that, if a row has pages already? "
            "replace takes a page before it drops the old one. release is a truncate to nothing, and frees the row.",
            "index = np.arange(total) - np.repeat(num_pages.cumsum() - num_pages, num_pages); table[owner, "
            "counts[owner] + index] = new. Removing owners: refcounts[pages] -= 1; freed = pages[refcounts[pages] == "
            "0]; _free_pages[num_free_pages : num_free_pages + len(freed)] = freed; then raise num_free_pages. Check "
            "that enough pages are free before you change anything, and copy what is a view.",
        ),
    ),
    Exercise(
        "physical_blocks",
        points=3,
        minutes=12,
        difficulty=1,
        part="physical_blocks",
        hints=(
            "Without batch, heads and queries it is one line: table[blocks]. What changes with a batch is in which row "
            "of the table each index is looked up.",
            "Index the table with two tensors: the index of the sequence, shaped so that it broadcasts against "
            "[B, H, Q, n], and the blocks. Then create zeros of the full width and write into their front.",
            "b = torch.arange(len(table))[:, None, None, None]; out = torch.zeros(*blocks.shape[:3], width, "
            "dtype=torch.int32); out[..., : blocks.shape[-1]] = table[b, blocks.long()].",
        ),
    ),
    Exercise(
        "physical_mask",
        points=4,
        minutes=12,
        difficulty=2,
        part="physical_mask",
        hints=(
            "Given a slot: in which page is it, at which offset, and where does that page begin in sequence b? Two of "
            "these add up to the position that mask_mod needs.",
            "start = first_keys[b, kv_idx // page_size]; the position is start + kv_idx % page_size. A start below 0 "
            "hides the slot, whatever mask_mod says of it. 0 is a valid start.",
            "def over_slots(b, h, q_idx, kv_idx): start = ...; return (start >= 0) & mask_mod(b, h, q_idx, start + "
            "kv_idx % page_size). Return that function. Neither `and` nor `if` can be traced.",
        ),
    ),
    Exercise(
        "convert_block_mask",
        points=4,
        minutes=35,
        difficulty=2,
        hints=(
            "Begin with blocks as long as a page. A BlockMask has two arrays of indices, two counts, a block size, a "
            "mask_mod and two lengths: which of them does a new order of pages change? Then let a page be two blocks.",
            "The counts and the block size stay the same. With r blocks in a page, page p consists of the blocks p * r "
            "to p * r + r - 1: build the table of blocks from the table of pages, and give it to physical_blocks. "
            "physical_mask needs first_keys: page j of a row starts at j * page_size, a stale entry at -1.",
            "blocks = (table[:, :, None] * r + torch.arange(r)).flatten(1); column = torch.arange(table.shape[1]); "
            "starts = torch.where(column < counts[:, None], column * page_size, -1); both lists become "
            "physical_blocks(list, blocks, num_pages * r); first_keys takes the pages, not the blocks.",
        ),
    ),
    Exercise(
        "compact",
        points=4,
        minutes=35,
        difficulty=3,
        challenge=True,
        hints=(
            "Count the pages in use, n. How many of them are at n or later? How many of the first n are free? Why are "
            "these two numbers equal? And which method puts a page of your choice into a row?",
            "share does, but only with pages that have an owner. So let the free row own all pages for a while: share "
            "those in use, take the rest. Then no page returns to the pool, whatever you do to the other rows.",
            "moved = np.arange(table.num_pages, dtype=np.int32); moved[old] = new; for each row with pages: pages = "
            "moved[table.pages(row)]; table.truncate(row, 0); table.share(row, pages). At the end release the extra "
            "row.",
        ),
    ),
]


def permutation(num_pages: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(num_pages), num_pages)


# slots --------------------------------------------------------------------------------------------------------------


def assert_slots(
    hw: Homework,
    table: list[list[int]],
    rows: list[int],
    positions: list[int],
    page_size: int,
    check_dtype: bool = False,
) -> None:
    want = [table[b][p // page_size] * page_size + p % page_size for b, p in zip(rows, positions, strict=True)]
    got = hw.slots(torch.tensor(table, dtype=torch.int32), torch.tensor(rows), torch.tensor(positions), page_size)
    name = f"the result of slots({table}, rows={rows}, positions={positions}, page_size={page_size})"
    name = name if len(name) < 140 else "the tensor of slots"
    assert_close(got, torch.tensor(want, dtype=torch.int64), atol=0, name=name, check_dtype=check_dtype)


@check("slots", mistake="a slot is page * page_size + offset: the first token of page 2 is not in slot 2")
def test_the_first_token(hw: Homework) -> None:
    assert_slots(hw, [[2]], [0], [0], 4)


@check("slots", mistake="within a page the slots follow the positions")
def test_one_page(hw: Homework) -> None:
    assert_slots(hw, [[2]], [0, 0, 0], [1, 2, 3], 4)


@check("slots", mistake="the offset is the position within the page: it starts over in each page")
def test_the_second_page(hw: Homework) -> None:
    assert_slots(hw, [[0, 1]], [0, 0], [4, 6], 4)


@check("slots", mistake="pages can be anywhere: look up the page of each token; the second need not follow the first")
def test_scattered_pages(hw: Homework) -> None:
    assert_slots(hw, [[2, 0, 3]], [0] * 10, list(range(10)), 4)


@check("slots", mistake="each token's page is in the row of its own sequence")
def test_two_sequences(hw: Homework) -> None:
    assert_slots(hw, [[2, 0, 3], [1, 0, 0]], [1, 0, 1, 0], [2, 9, 0, 4], 4)


@check("slots", mistake="a large pool has more slots than 32 bits can count: make the pages int64 before you multiply")
def test_slots_of_a_large_pool(hw: Homework) -> None:
    assert_slots(hw, [[2**24]], [0], [5], 128)


@check("slots", mistake="return int64: a large pool has more slots than 32 bits can count", costs=0.2)
def test_slots_are_int64(hw: Homework) -> None:
    assert_slots(hw, [[2, 0, 3]], [0, 0], [2, 9], 4, check_dtype=True)


@check("slots", mistake="index the table with all rows and positions at once: no loop over tokens or rows", costs=0.2)
def test_slots_without_a_loop(hw: Homework) -> None:
    table = torch.stack([torch.randperm(8) for _ in range(512)]).int()
    counts = [lines_run(hw.slots, table[:n], torch.arange(n), torch.arange(n) % 32, 4) for n in (64, 512)]
    assert_no_loop("slots", *counts)


@check("slots", mistake="it fails for other page sizes, rows and positions: work out the printed slots by hand")
def test_random_slots(hw: Homework) -> None:
    for seed, page_size in enumerate([1, 2, 3, 16, 128]):
        rng = random.Random(seed)
        table = [permutation(9, seed + b)[:5] for b in range(4)]
        for num_tokens in (1, 2, 30):
            rows = [rng.randrange(4) for _ in range(num_tokens)]
            assert_slots(hw, table, rows, [rng.randrange(5 * page_size) for _ in rows], page_size)


# PageTable ----------------------------------------------------------------------------------------------------------


TAKEN_BACK = "you returned the old page to the pool and took it again: take the new page before you drop the old one"


class Pool:
    """A page table, and beside it what it should hold: a list of pages for each row that is taken."""

    def __init__(self, hw: Homework, num_pages: int, page_size: int, max_rows: int) -> None:
        self.table: page_table.PageTable = hw.PageTable(num_pages, page_size, max_rows)
        self.max_rows = max_rows
        self.rows: dict[int, list[int]] = {}
        self.generation = [0] * num_pages
        self.history: list[str] = []

    @property
    def free(self) -> set[int]:
        return set(range(self.table.num_pages)) - {page for pages in self.rows.values() for page in pages}

    def check(self) -> None:
        """Compare everything that can be read with the lists, whatever happened before."""
        table, after = self.table, f", after {'; '.join(self.history[-6:])}"
        for row, pages in self.rows.items():
            assert_equal(table.pages(row).tolist(), pages, name=f"the list of pages of row {row}{after},")
        owners = Counter(page for pages in self.rows.values() for page in pages)
        counted = {page: int(n) for page, n in enumerate(table.refcounts) if n}
        assert_equal(counted, dict(sorted(owners.items())), name=f"the field refcounts, as {{page: owners}}{after},")
        assert_equal(int(table.num_free_pages), len(self.free), name=f"the field num_free_pages{after},")
        mistake = (
            "generation counts how many times a page was taken from the pool, by take or replace, and nothing else"
        )
        assert_equal(table.generation.tolist(), self.generation, mistake=mistake, name=f"the field generation{after},")
        assert_equal(table.num_free_rows, self.max_rows - len(self.rows), name=f"the number of free rows{after},")
        listed = sorted(table._free_pages[: len(self.free)].tolist())
        assert_equal(listed, sorted(self.free), name=f"the sorted _free_pages[:num_free_pages]{after},")

    def allocate(self) -> int:
        row = self.table.allocate()
        assert row not in self.rows, f"row {row} was handed out twice"
        self.rows[row] = []
        self.history.append(f"allocate() -> {row}")
        return row

    def take(self, num_pages: dict[int, int]) -> None:
        """Take pages for some rows; what they are is up to the table."""
        rows, counts = list(num_pages), list(num_pages.values())
        call = f"take({rows}, {counts})"
        self.history.append(call)
        arguments = np.array(rows, dtype=np.int64), np.array(counts, dtype=np.int64)
        if sum(counts) > len(self.free):
            mistake = "if too few pages are free, take raises IndexError and changes nothing"
            assert_raises(IndexError, self.table.take, *arguments, mistake=mistake)
            return
        free = self.free
        self.table.take(*arguments)
        assert_equal(arguments[1].tolist(), counts, name=f"the argument num_pages, after {call},")
        for row, count in num_pages.items():
            pages = self.table.pages(row).tolist()
            old = self.rows[row]
            assert len(pages) == len(old) + count, (
                f"after {call}, row {row} has {len(pages)} pages, not {len(old) + count}"
            )
            assert_equal(pages[: len(old)], old, name=f"the pages that row {row} had before {call}")
            new = set(pages[len(old) :])
            assert len(new) == count and new <= free, (
                f"the call {call} gave row {row} the pages {pages[len(old) :]}; the free pages were {sorted(free)}"
            )
            free -= new
            self.rows[row] = pages
            for page in new:
                self.generation[page] += 1

    def share(self, row: int, pages: list[int]) -> None:
        self.history.append(f"share({row}, {pages})")
        self.table.share(row, np.array(pages, dtype=np.int32))
        self.rows[row] = self.rows[row] + pages

    def replace(self, row: int, index: int) -> None:
        call = f"replace({row}, {index})"
        self.history.append(call)
        if not self.free:
            mistake = "without a free page, replace raises IndexError and changes nothing: take one before you drop one"
            assert_raises(IndexError, self.table.replace, row, index, mistake=mistake)
            return
        free, old = self.free, self.rows[row][index]
        pair = self.table.replace(row, index)
        assert pair is not None, "replace returns None: is a `return` missing?"
        new = int(self.table.pages(row)[index])
        if new not in free:
            message = f"the call {call} put page {new} there; the free pages were {sorted(free)}"
            raise CheckFailed(message, TAKEN_BACK if new == old else None)
        assert_equal(
            tuple(int(page) for page in pair), (old, new), name=f"the result of {call}, which is (old page, new page),"
        )
        self.rows[row] = [new if i == index else page for i, page in enumerate(self.rows[row])]
        self.generation[new] += 1

    def truncate(self, row: int, num_pages: int) -> None:
        self.history.append(f"truncate({row}, {num_pages})")
        self.table.truncate(row, num_pages)
        self.rows[row] = self.rows[row][:num_pages]

    def drop_front(self, row: int, num_pages: int) -> None:
        self.history.append(f"drop_front({row}, {num_pages})")
        self.table.drop_front(row, num_pages)
        self.rows[row] = self.rows[row][num_pages:]

    def release(self, row: int) -> None:
        self.history.append(f"release({row})")
        self.table.release(row)
        del self.rows[row]


@check("PageTable", mistake="a page that is taken leaves the pool, has one owner, and is appended to the row")
def test_take_one_page(hw: Homework) -> None:
    p = Pool(hw, 4, 2, 2)
    p.take({p.allocate(): 1})
    p.check()


@check("PageTable", mistake="one take gives a row several different pages, one after the other")
def test_take_several_pages(hw: Homework) -> None:
    p = Pool(hw, 5, 2, 2)
    p.take({p.allocate(): 3})
    p.check()


@check("PageTable", mistake="a row's old pages hold keys: they keep their places, and new pages come after them")
def test_growing(hw: Homework) -> None:
    p = Pool(hw, 8, 2, 2)
    a, b = p.allocate(), p.allocate()
    for row, num_pages in [(a, 1), (b, 2), (a, 2), (b, 1), (a, 1)]:
        p.take({row: num_pages})
        p.check()


@check("PageTable", mistake="each row gets as many pages as its own entry of num_pages says, 0 included")
def test_several_rows_at_once(hw: Homework) -> None:
    p = Pool(hw, 20, 2, 4)
    a, b, c, d = (p.allocate() for _ in range(4))
    p.take({a: 1, b: 1})
    p.take({c: 2, a: 3, d: 1})
    p.check()
    p.take({d: 2, b: 0, c: 1, a: 0})
    p.check()
    p.take({a: 0, b: 0})
    p.check()
    p.take({})
    p.check()


@check("PageTable", mistake="the last free page can be taken as well")
def test_the_whole_pool(hw: Homework) -> None:
    p = Pool(hw, 3, 2, 1)
    p.take({p.allocate(): 3})
    p.check()


@check("PageTable", mistake="if too few pages are free, take raises IndexError and nothing has changed")
def test_too_few_pages(hw: Homework) -> None:
    p = Pool(hw, 4, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.take({a: 2})
    for num_pages in ({b: 3}, {a: 1, b: 2}, {b: 9}):
        p.take(num_pages)
        p.check()
    p.take({b: 2})
    p.check()


@check("PageTable", mistake="release returns the row and its pages, and leaves other rows alone")
def test_release(hw: Homework) -> None:
    p = Pool(hw, 5, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.take({a: 2, b: 1})
    p.release(a)
    p.check()


@check("PageTable", mistake="generation counts how many times a page was taken, and must not change otherwise")
def test_generation(hw: Homework) -> None:
    p = Pool(hw, 2, 2, 4)
    for row, num_pages in [(p.allocate(), n) for n in (1, 2, 1, 2)]:
        p.take({row: num_pages})
        p.check()
        p.release(row)
        p.check()


@check("PageTable", mistake="a released row has no pages: the next request finds it empty")
def test_a_row_is_used_again(hw: Homework) -> None:
    p = Pool(hw, 5, 2, 1)
    for num_pages in (2, 1, 5):
        row = p.allocate()
        p.check()
        p.take({row: num_pages})
        p.check()
        p.release(row)
        p.check()


@check("PageTable", mistake="truncate keeps the first num_pages pages of the row and returns those after them")
def test_truncate(hw: Homework) -> None:
    p = Pool(hw, 8, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.take({a: 4, b: 2})
    for num_pages in (3, 1):
        p.truncate(a, num_pages)
        p.check()


@check("PageTable", mistake="a row with fewer than num_pages pages keeps all of them, and gets no others")
def test_nothing_to_truncate(hw: Homework) -> None:
    p = Pool(hw, 8, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.take({a: 3, b: 1})
    for num_pages in (3, 5, 8):
        p.truncate(a, num_pages)
        p.check()


@check("PageTable", mistake="share appends the pages in order, and each gets one more owner")
def test_share(hw: Homework) -> None:
    p = Pool(hw, 8, 2, 4)
    a, b, c, d = (p.allocate() for _ in range(4))
    p.take({a: 3, d: 1})
    for row, pages in [(b, p.rows[a][:2]), (c, p.rows[a]), (d, p.rows[a][1:]), (b, [])]:
        p.share(row, pages)
        p.check()


@check(
    "PageTable", mistake="a page with another owner is not free: it returns to the pool when its last owner loses it"
)
def test_shared_pages_stay(hw: Homework) -> None:
    p = Pool(hw, 8, 2, 4)
    a, b, c = (p.allocate() for _ in range(3))
    p.take({a: 3})
    p.share(b, p.rows[a][:2])
    p.share(c, p.rows[a][:1])
    p.take({b: 2})
    p.truncate(b, 1)
    p.check()
    for row in (a, c, b):
        p.release(row)
        p.check()


@check("PageTable", mistake="replace puts a free page at that index, and returns (old page, new page)")
def test_replace(hw: Homework) -> None:
    p = Pool(hw, 6, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.take({a: 3})
    p.share(b, p.rows[a])
    for index in (1, 0):
        p.replace(b, index)
        p.check()


@check("PageTable", mistake="an old page that has lost its last owner returns to the pool")
def test_replace_an_own_page(hw: Homework) -> None:
    p = Pool(hw, 6, 2, 2)
    a = p.allocate()
    p.take({a: 3})
    for index in (2, 2, 0):
        p.replace(a, index)
        p.check()


@check("PageTable", mistake="without a free page, replace raises IndexError and changes nothing")
def test_replace_without_a_free_page(hw: Homework) -> None:
    p = Pool(hw, 3, 2, 2)
    a, b = p.allocate(), p.allocate()
    p.take({a: 3})
    p.replace(a, 1)
    p.check()
    p.share(b, p.rows[a][:2])
    p.replace(b, 0)
    p.check()


@check("PageTable", mistake="after this sequence of calls an invariant of the class does not hold")
def test_random_operations(hw: Homework) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        p = Pool(hw, rng.randint(1, 12), rng.randint(1, 4), rng.randint(1, 5))
        for _ in range(60):
            filled = [row for row, pages in p.rows.items() if pages]
            action = rng.choice(["allocate", "take", "take", "share", "replace", "truncate", "drop_front", "release"])
            if action == "allocate" and len(p.rows) < p.max_rows:
                p.allocate()
            elif action == "take" and p.rows:
                rows = rng.sample(list(p.rows), rng.randint(1, len(p.rows)))
                p.take({row: rng.randint(0, 4) for row in rows})
            elif action == "share" and filled:
                row, other = rng.choice(list(p.rows)), rng.choice(filled)
                pages = [page for page in p.rows[other] if page not in p.rows[row]]
                p.share(row, pages[: rng.randint(0, 3)])
            elif action == "replace" and filled:
                row = rng.choice(filled)
                p.replace(row, rng.randrange(len(p.rows[row])))
            elif action in ("truncate", "drop_front") and filled:
                row = rng.choice(filled)
                getattr(p, action)(row, rng.randint(0, len(p.rows[row])))
            elif action == "release" and p.rows:
                p.release(rng.choice(list(p.rows)))
            p.check()
        for row in list(p.rows):
            p.release(row)
            p.check()


@check("PageTable", mistake="take assigns the pages of all rows at once: no loop over rows or pages", costs=0.2)
def test_take_without_a_loop(hw: Homework) -> None:
    counts = []
    for num_rows in (64, 512):
        table = hw.PageTable(8 * num_rows, 2, num_rows)
        rows = np.array([table.allocate() for _ in range(num_rows)])
        table.take(rows, np.ones_like(rows))
        counts.append(lines_run(table.take, rows, np.arange(num_rows) % 8))
    assert_no_loop("take", *counts)
    few = hw.PageTable(600, 2, 1)
    rows = np.array([few.allocate()])
    assert_no_loop("take", *(lines_run(few.take, rows, np.array([n])) for n in (64, 512)))


# physical_blocks ----------------------------------------------------------------------------------------------------


def assert_blocks(
    hw: Homework,
    blocks: Tensor,
    table: Tensor,
    width: int,
    front: int | None = None,
    check_dtype: bool = False,
) -> None:
    """Compare with a loop; with `front`, only so many entries of each list."""
    want = torch.zeros(*blocks.shape[:3], width, dtype=torch.int32)
    for b, h, q in np.ndindex(*blocks.shape[:3]):
        for i, block in enumerate(blocks[b, h, q].tolist()):
            want[b, h, q, i] = int(table[b, block])
    got = hw.physical_blocks(blocks, table, width)
    if front is not None and isinstance(got, Tensor) and got.shape[:3] == want.shape[:3]:
        got, want = got[..., :front], want[..., :front]
    assert_close(got, want, atol=0, name="the tensor of physical blocks", check_dtype=check_dtype)


@check("physical_blocks", mistake="block j of the sequence is page table[b, j]: look it up")
def test_one_list(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32), table, 4, front=3)


@check("physical_blocks", mistake="a list keeps its order, and need not contain every block of the sequence")
def test_some_blocks(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3, 5]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[3, 1]]]], dtype=torch.int32), table, 6, front=2)


@check("physical_blocks", mistake="pad each list with zeros up to the width, which is as many as the pool has blocks")
def test_the_width(hw: Homework) -> None:
    table = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[0, 2]]]], dtype=torch.int32), table, 7)
    assert_blocks(hw, torch.tensor([[[[2, 0, 1]]]], dtype=torch.int32), table, 3)


@check("physical_blocks", mistake="each sequence has its own row of the table: look its blocks up in row b")
def test_two_tables(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3], [1, 4, 4]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[1, 2]]], [[[0, 1]]]], dtype=torch.int32), table, 5)


@check("physical_blocks", mistake="each head and each block of queries has a list of its own")
def test_heads_and_query_blocks(hw: Homework) -> None:
    table = torch.tensor([permutation(6, b) for b in range(2)], dtype=torch.int32)
    assert_blocks(hw, torch.randint(0, 6, (2, 3, 4, 5), dtype=torch.int32), table, 9)


@check("physical_blocks", mistake="the tensors that you are given must not change")
def test_blocks_are_unchanged(hw: Homework) -> None:
    blocks, table = torch.tensor([[[[2, 1]]]], dtype=torch.int32), torch.tensor([[5, 1, 0]], dtype=torch.int32)
    kept = blocks.clone(), table.clone()
    hw.physical_blocks(blocks, table, 6)
    assert_equal(blocks, kept[0], name="the tensor `blocks` after the call")
    assert_equal(table, kept[1], name="the tensor `table` after the call")


@check("physical_blocks", mistake="sizes of B, H, Q, n, W and width must be free to differ from one another")
def test_random_blocks(hw: Homework) -> None:
    for b, h, q, n, w, width in [(1, 1, 1, 1, 1, 1), (3, 1, 2, 4, 8, 8), (2, 2, 1, 5, 5, 11), (4, 1, 1, 2, 7, 30)]:
        table = torch.tensor([permutation(width, i)[:w] for i in range(b)])
        assert_blocks(hw, torch.randint(0, w, (b, h, q, n)), table, width)


@check("physical_blocks", mistake="the kernel reads block indices as int32: return the lists in that dtype", costs=0.2)
def test_blocks_are_int32(hw: Homework) -> None:
    table = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    assert_blocks(hw, torch.tensor([[[[0, 1, 2]]]], dtype=torch.int32), table, 4, check_dtype=True)


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
    name = f"the mask over slots for first_keys={first_keys}, page_size={page_size}"
    assert_equal(grid, want, name=name)


@check("physical_mask", mistake="return a function that can be traced: no `if`, `and`, `or` or `not` on its tensors")
def test_it_can_be_traced(hw: Homework) -> None:
    got = hw.physical_mask(causal, torch.tensor([[0, -1]], dtype=torch.int32), 4)
    assert callable(got), "physical_mask returns a function of (b, h, q_idx, kv_idx), not its value"
    create_mask(got, 1, 1, 4, 8, device="cpu")


@check("physical_mask", mistake="0 is a valid start: only a start of -1 hides a page")
def test_the_page_that_starts_at_0(hw: Homework) -> None:
    assert_mask(hw, everything, [[0]], 4, queries=4)


@check("physical_mask", mistake="pass mask_mod the position of the key: the start of its page plus slot % page_size")
def test_one_page_in_place(hw: Homework) -> None:
    assert_mask(hw, causal, [[0]], 4, queries=4)


@check(
    "physical_mask", mistake="the position of a key is the start of its page plus the offset in the page, not the slot"
)
def test_swapped_pages(hw: Homework) -> None:
    assert_mask(hw, causal, [[3, 0]], 3, queries=6)


@check(
    "physical_mask", mistake="hide every slot of a page whose first_keys is -1; test that value and not the position"
)
def test_pages_of_others(hw: Homework) -> None:
    assert_mask(hw, everything, [[0, -1, 4]], 4, queries=2)
    assert_mask(hw, causal, [[-1, 4, -1, 0]], 4, queries=8)


@check("physical_mask", mistake="each sequence has its own pages: look them up in row b of first_keys")
def test_two_rows(hw: Homework) -> None:
    assert_mask(hw, causal, [[2, 0, -1, 4], [-1, -1, 0, -1]], 2, queries=6)


@check("physical_mask", mistake="pass b, h and q_idx to mask_mod as they are: a mask may depend on all of them")
def test_masks_of_all_kinds(hw: Homework) -> None:
    def odd(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & ((kv_idx + h + 2 * b) % 3 > 0)

    assert_mask(hw, odd, [[4, 0, -1, 8], [-1, 4, 0, -1]], 4, queries=9, heads=2)


@check(
    "physical_mask",
    mistake="first_keys are positions of keys, not block indices: they need not be multiples of page_size",
)
def test_starts_that_are_no_multiples(hw: Homework) -> None:
    assert_mask(hw, causal, [[5, -1, 9, 1]], 4, queries=12)  # the first token was evicted


@check(
    "physical_mask", mistake="the mask must be right wherever pages are: follow one slot of the printed pages by hand"
)
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
    hw: Homework,
    lens: Sequence[int],
    page_size: int,
    num_pages: int,
    seed: int = 0,
    window: int | None = None,
    parts: int = 1,
    spare: int = 0,
) -> Converted:
    """A logical mask of the last three queries of each sequence, the submission's physical one, and all pages.

    A page is `parts` blocks. Mask and table have room for `spare` pages more than the longest sequence has.
    """
    last = torch.tensor(lens) - 1

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        query = last[b] - 2 + q_idx
        visible = (kv_idx <= query) & (kv_idx <= last[b])
        return visible if window is None else visible & (query - kv_idx < window)

    width = max(-(-n // page_size) for n in lens) + spare
    size = (2, page_size // parts)
    logical = create_block_mask(mask_mod, len(lens), 1, 3, width * page_size, device="cpu", BLOCK_SIZE=size)
    unused = permutation(num_pages, seed)
    pages = [[unused.pop() for _ in range(-(-n // page_size))] for n in lens]
    # Stale entries are any pages: a row's own first page, for one.
    table = torch.tensor([own + [own[0]] * (width - len(own)) for own in pages], dtype=torch.int32)
    counts = torch.tensor([len(own) for own in pages])
    got = hw.convert_block_mask(logical, table, counts, num_pages, page_size)
    assert got is not None, "convert_block_mask returns None: is a `return` missing?"
    assert isinstance(got, BlockMask), f"convert_block_mask returns a {type(got).__name__}, not a BlockMask"
    return logical, got, pages


def assert_lists(logical: BlockMask, got: BlockMask, pages: list[list[int]], kind: str, parts: int = 1) -> None:
    """Compare the lists of one kind, "" or "full_", with a loop."""
    counts_name, indices_name = f"{kind}kv_num_blocks", f"{kind}kv_indices"
    wanted, turned = (getattr(mask, counts_name) for mask in (logical, got))
    assert turned is not None, f"the result has no {counts_name}"
    assert_equal(turned, wanted, name=f"the tensor {counts_name}")
    old, new = getattr(logical, indices_name), getattr(got, indices_name)
    for b, h, q in np.ndindex(*wanted.shape):
        n = int(wanted[b, h, q])
        want = [pages[b][block // parts] * parts + block % parts for block in old[b, h, q, :n].tolist()]
        name = f"the list {indices_name}[{b}, {h}, {q}, :{n}], for logical blocks {old[b, h, q, :n].tolist()}"
        assert_equal(new[b, h, q, :n].tolist(), want, name=f"{name} of a sequence in pages {pages[b]},")


BLOCK_SIZE_STAYS = "the result has the block size of the mask: its blocks are in other places and have the same size"


@check("convert_block_mask", mistake="the mask covers the queries that it had, and all slots of the pool as keys")
def test_the_lengths(hw: Homework) -> None:
    _, got, _ = convert(hw, [6, 3], page_size=4, num_pages=5)
    assert_equal(tuple(got.seq_lengths), (3, 20), name="the field seq_lengths")
    assert_equal(tuple(got.BLOCK_SIZE), (2, 4), mistake=BLOCK_SIZE_STAYS, name="the field BLOCK_SIZE")


@check("convert_block_mask", mistake="look the indices of partial blocks up in the table; their counts are unchanged")
def test_partial_blocks(hw: Homework) -> None:
    assert_lists(*convert(hw, [6, 3, 9], page_size=4, num_pages=8), "")


@check("convert_block_mask", mistake="full blocks have lists of their own, which must be converted, too")
def test_full_blocks(hw: Homework) -> None:
    assert_lists(*convert(hw, [6, 3, 14], page_size=4, num_pages=9), "full_")


def assert_mask_mod(hw: Homework, lens: list[int]) -> None:
    """Compare the mask over slots with the one over positions, for three sequences in pages of 4."""
    for seed in range(3):
        logical, got, pages = convert(hw, lens, page_size=4, num_pages=8, seed=seed)
        want = torch.zeros(3, 1, 3, 32, dtype=torch.bool)
        dense = create_mask(logical.mask_mod, 3, 1, 3, 12, device="cpu")
        for b, own in enumerate(pages):
            for index, page in enumerate(own):
                want[b, :, :, page * 4 : page * 4 + 4] = dense[b, :, :, index * 4 : index * 4 + 4]
        assert_equal(create_mask(got.mask_mod, 3, 1, 3, 32, device="cpu"), want, name="the mask over slots")


@check(
    "convert_block_mask",
    mistake="mask_mod must be one over slots that hides the pages of other sequences; page j of a sequence starts at "
    "position j * page_size",
)
def test_the_mask_mod(hw: Homework) -> None:
    assert_mask_mod(hw, [6, 8, 7])  # two pages each, so no entry of the table is stale


@check(
    "convert_block_mask",
    mistake="the entries of the table after the first counts[b] are stale, not pages of the sequence: they start at -1",
)
def test_stale_entries(hw: Homework) -> None:
    assert_mask_mod(hw, [6, 8, 9])


@check(
    "convert_block_mask",
    mistake="the mask may cover more keys than any row has pages for: its padding may name blocks beyond them",
)
def test_a_wide_mask(hw: Homework) -> None:
    converted = convert(hw, [6, 3], page_size=4, num_pages=9, spare=3)
    assert_lists(*converted, "")
    assert_lists(*converted, "full_")


@check("convert_block_mask", mistake="with r blocks in a page, block j of a sequence is block j % r of its page j // r")
def test_parts_of_pages(hw: Homework) -> None:
    for parts in (2, 4):
        converted = convert(hw, [6, 3, 14], page_size=4, num_pages=9, parts=parts)
        assert_equal(tuple(converted[1].seq_lengths), (3, 36), name="the field seq_lengths")
        assert_lists(*converted, "", parts)
        assert_lists(*converted, "full_", parts)
        got = tuple(converted[1].BLOCK_SIZE)
        assert_equal(got, (2, 4 // parts), mistake=BLOCK_SIZE_STAYS, name=f"BLOCK_SIZE, with {parts} blocks in a page,")


@check(
    "convert_block_mask",
    mistake="the mask over slots depends on pages, not on blocks: pass page_size, whatever the block size is",
)
def test_the_mask_mod_of_parts(hw: Homework) -> None:
    _, whole, _ = convert(hw, [6, 8, 9], page_size=4, num_pages=8)
    _, got, _ = convert(hw, [6, 8, 9], page_size=4, num_pages=8, parts=2)
    want = create_mask(whole.mask_mod, 3, 1, 3, 32, device="cpu")
    assert_equal(create_mask(got.mask_mod, 3, 1, 3, 32, device="cpu"), want, name="the mask over slots")


@check("convert_block_mask", mistake="raise ValueError if page_size is not a multiple of the mask's block of keys")
def test_blocks_divide_pages(hw: Homework) -> None:
    table, counts = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32), torch.tensor([4])
    for block, page_size in [(8, 4), (3, 4), (4, 6)]:
        logical = create_block_mask(causal, 1, 1, 1, 12, device="cpu", BLOCK_SIZE=(1, block))
        assert_raises(ValueError, hw.convert_block_mask, logical, table, counts, 4, page_size)


@check("convert_block_mask", mistake="a mask without lists of full blocks stays without them")
def test_no_full_blocks(hw: Homework) -> None:
    logical = create_block_mask(causal, 1, 1, 1, 8, device="cpu", BLOCK_SIZE=(1, 4))
    only_partial = BlockMask.from_kv_blocks(
        logical.kv_num_blocks, logical.kv_indices, BLOCK_SIZE=(1, 4), mask_mod=causal, seq_lengths=(1, 8)
    )
    table, counts = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([2])
    got = hw.convert_block_mask(only_partial, table, counts, 3, 4)
    assert got.full_kv_indices is None and got.full_kv_num_blocks is None, "the result lists full blocks"


@check("convert_block_mask", mistake="the result of attention must not depend on where the pages are")
def test_attention_wherever_pages_are(hw: Homework) -> None:
    lens, page_size, num_pages = [6, 11, 3], 4, 9
    q, k, v = torch.randn(3, 2, 3, 8), torch.randn(3, 2, 12, 8), torch.randn(3, 2, 12, 8)
    for seed, window, parts in [(0, None, 1), (1, None, 2), (2, 5, 1), (3, 5, 4)]:
        logical, physical, pages = convert(hw, lens, page_size, num_pages, seed, window, parts)
        k_pool, v_pool = torch.randn(2, 1, 2, num_pages * page_size, 8)
        for b, own in enumerate(pages):
            for index, page in enumerate(own):
                at = slice(index * page_size, (index + 1) * page_size)
                there = slice(page * page_size, (page + 1) * page_size)
                k_pool[0, :, there], v_pool[0, :, there] = k[b, :, at], v[b, :, at]
        want = flex_attention(q, k, v, block_mask=logical)
        got = flex_attention(q, k_pool.expand(3, -1, -1, -1), v_pool.expand(3, -1, -1, -1), block_mask=physical)
        assert_close(got, want, name="attention over the pool")


# compact ------------------------------------------------------------------------------------------------------------


def in_use(num_pages: int, rows: dict[int, list[int]], guarded: bool = False) -> tuple[page_table.PageTable, list[int]]:
    """A page table whose rows own these pages: row i of the dictionary is the i-th of the rows returned.

    All pages have been taken before, by requests that have ended since.
    """
    table = (GuardedPageTable if guarded else page_table.PageTable)(num_pages, 2, num_pages + 7)
    earlier = [table.allocate() for _ in range(num_pages)]
    table.take(np.array(earlier), np.ones(num_pages, dtype=np.int64))
    row_of = {int(table.pages(row)[0]): row for row in earlier}
    owners = [table.allocate() for _ in rows]
    for row, pages in zip(owners, rows.values(), strict=True):
        table.share(row, np.array(pages, dtype=np.int32))
    for page in permutation(num_pages, 0):
        table.release(row_of[page])
    return table, owners


def assert_compact(hw: Homework, num_pages: int, rows: dict[int, list[int]], guarded: bool = False) -> None:
    table, owners = in_use(num_pages, rows, guarded)
    generation, free_rows = table.generation.copy(), table.num_free_rows
    content = [f"keys of page {page}" for page in range(num_pages)]
    read = [[content[page] for page in pages] for pages in rows.values()]
    used = sorted({page for pages in rows.values() for page in pages})
    before = f", with {num_pages} pages and rows {list(rows.values())} before"
    pairs = hw.compact(table)
    assert pairs is not None, "compact returns None: is a `return` missing?"
    mistake = "every row that you allocate must be released"
    assert_equal(table.num_free_rows, free_rows, mistake=mistake, name=f"the number of free rows{before},")
    for old, new in pairs:
        content[new] = content[old]
    n = len(used)
    after = [table.pages(row).tolist() for row in owners]
    assert_equal(
        sorted({page for pages in after for page in pages}), list(range(n)), name=f"the list of pages in use{before},"
    )
    for keys, pages in zip(read, after, strict=True):
        assert_equal(
            [content[page] for page in pages], keys, name=f"what a row reads after the copies {pairs}{before},"
        )
    moving = sum(page >= n for page in used)
    assert len(pairs) == moving, f"{len(pairs)} pages move, and only {moving} are after the first {n}{before}"
    counted = Counter(page for pages in after for page in pages)
    assert_equal(
        table.refcounts.tolist(), [counted[page] for page in range(num_pages)], name=f"the field refcounts{before},"
    )
    assert_equal(table.num_free_pages, num_pages - n, name=f"the field num_free_pages{before},")
    for _, new in pairs:
        assert table.generation[new] > generation[new], f"the generation of page {new} is unchanged{before}"
    probe = copy.deepcopy(table)
    row = probe.allocate()
    probe.take(np.array([row]), np.array([num_pages - n]))
    assert_equal(sorted(probe.pages(row).tolist()), list(range(n, num_pages)), name=f"the list of free pages{before},")


@check("compact", mistake="pages that are among the first n stay where they are, and nothing changes")
def test_nothing_to_move(hw: Homework) -> None:
    assert_compact(hw, 4, {0: [0, 1]})
    assert_compact(hw, 3, {})
    assert_compact(hw, 3, {0: [], 1: [0, 1, 2]})


@check("compact", mistake="a page after the first n moves into the gap; its row gets the new page; return (old, new)")
def test_one_gap(hw: Homework) -> None:
    assert_compact(hw, 5, {1: [0], 2: [2]})
    assert_compact(hw, 9, {0: [0, 1], 1: [4]})


@check("compact", mistake="a row keeps its pages in order of position, wherever they have moved")
def test_order_of_positions(hw: Homework) -> None:
    assert_compact(hw, 9, {0: [7, 1, 5], 2: [8, 0]})


@check("compact", mistake="only pages after the first n move: renumbering all of them copies too much")
def test_as_few_as_possible(hw: Homework) -> None:
    assert_compact(hw, 8, {0: [6, 2], 3: [1, 3]})


@check("compact", mistake="a page with several owners moves once, and all its owners follow")
def test_shared_pages_move_once(hw: Homework) -> None:
    assert_compact(hw, 9, {0: [8, 7, 1], 1: [8, 7], 4: [8, 3]})


@check("compact", mistake="change the table through its methods: here its arrays are read-only")
def test_through_the_methods(hw: Homework) -> None:
    assert_compact(hw, 9, {0: [8, 7, 1], 1: [8, 7], 4: [6, 3]}, guarded=True)


@check("compact", mistake="follow the printed pages by hand: which of them should have moved, and where to?")
def test_random_pools(hw: Homework) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        num_pages = rng.randint(1, 20)
        pages = permutation(num_pages, seed)[: rng.randint(0, num_pages)]
        rows: dict[int, list[int]] = {}
        for row in range(4):
            shared = rng.choice(list(rows.values()))[: rng.randint(0, 3)] if rows else []
            rows[row] = shared + [pages.pop() for _ in range(min(len(pages), rng.randint(0, 6)))]
        assert_compact(hw, num_pages, rows)
