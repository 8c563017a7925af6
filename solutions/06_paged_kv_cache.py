"""Homework of chapter 06: a pool of pages, who owns them, and masks over slots instead of positions.

Three of these are parts of the engine. Once their checks are green, `mini-engine generate --homework` runs a real model
on your `PageTable`, your `physical_blocks`, your `physical_mask`, or all of them.
"""

from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mini_engine.attention import block_mask
from mini_engine.attention.masks import MaskMod
from mini_engine.kv_cache import page_table


def slots(
    table: Int[Tensor, "B W"], rows: Int[Tensor, " T"], positions: Int[Tensor, " T"], page_size: int
) -> Int[Tensor, " T"]:
    """Find where tokens lie in the pool.

    The pages of the pool lie end to end: slot = page * page_size + offset in the page. Row b of the table holds the
    pages of one sequence in order of position: its first page_size tokens are in `table[b, 0]`, the next ones in
    `table[b, 1]`, and so on. Do it without a loop: a step has thousands of tokens.

    Args:
        table: pages of each sequence, of dtype int32.
        rows: the row of each token's sequence.
        positions: where each token stands in its sequence, in pages that the row owns.
        page_size: slots of a page.

    Returns:
        The slot of each token, of dtype int64.

    Example: pages of 4. Position 9 is offset 1 of the sequence's third page.

        >>> table = torch.tensor([[2, 0, 3], [1, 0, 0]], dtype=torch.int32)
        >>> slots(table, torch.tensor([0, 0, 1]), torch.tensor([0, 9, 2]), page_size=4)
        tensor([ 8, 13,  6])
    """
    # int64 before the product: indexing wants it, and slots of a large pool do not fit in 32 bits.
    return table[rows, positions // page_size].long() * page_size + positions % page_size


class PageTable(page_table.PageTable):
    """The pages of up to `max_sequences` sequences over a pool of `num_pages` pages of `page_size` tokens.

    You write the four methods below. The constructor is inherited and has made this state, which nothing else keeps:

        free_pages: list[int]         pages that nobody owns
        free_rows: list[int]          rows that no sequence has
        refcounts: int32 [num_pages]  owners of each page, a NumPy array like the next two
        table: int32 [max_sequences, num_pages]   row b owns the pages table[b, :counts[b]], in order of position;
                                      what stands behind them is left over from earlier owners
        counts: int64 [max_sequences] pages of each row

    Inherited too, and free to use: `pages(row)`, a view of the row's pages; `pages_for(num_tokens)`, the pages that so
    many tokens fill; `slots(rows, positions)`, as in the first exercise. Other code of the engine raises the counts of
    pages that two rows share, so a page may have more owners than one. Whatever is called in whatever order:
        - the owners that `refcounts` counts are the rows whose pages it is in;
        - every page is either owned or on the free list, once.

    Example: two sequences, pages of 4 tokens, 3 of them.

        >>> table = PageTable(num_pages=3, page_size=4, max_sequences=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.reserve(a, 5), len(table.pages(a)), table.num_free_pages
        (True, 2, 1)
        >>> table.reserve(b, 8), len(table.pages(b)), table.num_free_pages
        (False, 0, 1)
        >>> table.erase(a)
        >>> table.reserve(b, 8), table.num_free_pages
        (True, 1)
    """

    def allocate(self) -> int:
        """Take a free row. It has no pages. Raises IndexError if every row is taken."""
        return self.free_rows.pop()

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make sure that the row has pages for `num_tokens` tokens in all, those that it has already included.

        New pages come after the old ones, which stay where they are: they hold keys. A row that has enough keeps all.

        Returns:
            True; or False if too few pages are free, and then nothing at all has changed.
        """
        have = int(self.counts[row])
        missing = self.pages_for(num_tokens) - have
        if missing > len(self.free_pages):
            return False
        for index in range(have, have + missing):  # empty if missing is negative
            page = self.free_pages.pop()
            self.refcounts[page] = 1
            self.table[row, index] = page
            self.counts[row] += 1
        return True

    def erase(self, row: int) -> None:
        """Give up the row and its pages. A page is free again when its last owner has given it up."""
        for page in self.pages(row).tolist():
            self.refcounts[page] -= 1
            if self.refcounts[page] == 0:
                self.free_pages.append(page)
        self.counts[row] = 0
        self.free_rows.append(row)

    def assign(
        self,
        rows: Int[Tensor, " B"],
        positions: Int[Tensor, "B S"],
        k: Float[Tensor, "B Hk S D"],
        v: Float[Tensor, "B Hk S D"],
        k_cache: Float[Tensor, "1 Hk N D"],
        v_cache: Float[Tensor, "1 Hk N D"],
    ) -> None:
        """Write the keys and values of S tokens of each of B sequences to their slots, in place.

        This is FlexAttention's order of axes: heads come before tokens, in the new keys and in the cache, whose N
        slots are the whole pool. All other slots keep what they hold.

        Args:
            rows: the row of each sequence.
            positions: where each token stands in its sequence, in pages that the row owns.
            k: new keys.
            v: new values.
            k_cache: all keys of one layer.
            v_cache: all values of that layer.
        """
        where = slots(torch.from_numpy(self.table), rows[:, None].expand_as(positions), positions, self.page_size)
        for cache, new in ((k_cache, k), (v_cache, v)):
            # `where` is [B, S], so the left side is [Hk, B, S, D].
            cache[0][:, where] = new.transpose(0, 1)


def physical_blocks(blocks: Int[Tensor, "B H Q n"], table: Int[Tensor, "B W"], width: int) -> Int32[Tensor, "B H Q m"]:
    """Turn the lists of blocks of a BlockMask from logical to physical.

    Block j of a sequence is its j-th page, which is block `table[b, j]` of the pool. The order of a list stays.
    FlexAttention wants each list as long as the pool has blocks, so fill it up with 0.

    Args:
        blocks: for each row of the batch, head and block of queries, the numbers of logical blocks. How many of them
            count is not your concern: what stands behind those is some number below W, and is turned like the others.
        table: the pages of each row's sequence; W pages at most.
        width: m, blocks of the pool, n or more.

    Returns:
        The lists in physical numbers, of dtype int32, which is what the kernel reads.

    Example: the first sequence has its blocks in pages 2, 0 and 3, the second in page 1.

        >>> table = torch.tensor([[2, 0, 3], [1, 0, 0]], dtype=torch.int32)
        >>> physical_blocks(torch.tensor([[[[1, 2]]], [[[0, 0]]]]), table, width=4)
        tensor([[[[0, 3, 0, 0]]],
                [[[1, 1, 0, 0]]]], dtype=torch.int32)
    """
    batch = torch.arange(len(table), device=table.device)[:, None, None, None]
    filled = torch.zeros(*blocks.shape[:3], width, dtype=torch.int32, device=blocks.device)
    filled[..., : blocks.shape[-1]] = table[batch, blocks.long()]
    return filled


# Given: first_keys(pages, starts, num_pages) reads the table backwards. pages [B, W] are those of each row's sequence,
# starts [B, W] the positions of their first keys, -1 for an entry that does not count. It returns [B, num_pages]: the
# position of the first key of each page of the pool, -1 for a page that is not the row's own.
first_keys = block_mask.first_keys


def physical_mask(mask_mod: MaskMod, first_keys: Int[Tensor, "B num_pages"], page_size: int) -> MaskMod:
    """Turn a mask over the positions of keys into one over slots of the pool.

    A mask_mod is a function (b, h, q_idx, kv_idx) of four integer tensors that says whether a query sees a key. In the
    one you get, kv_idx is the position of a key in the sequence of row b. In the one you return, kv_idx is a slot of
    the pool, b, h and q_idx are the same. A slot in a page that is not the row's own is hidden, whatever it holds.

    FlexAttention traces the function, and calls it with single numbers and with whole grids: no `if`, `and` or `or` on
    its tensors.

    Args:
        mask_mod: over positions.
        first_keys: the position of each page's first key in the sequence of row b, -1 for the pages of others. It need
            not be a multiple of page_size.
        page_size: slots of a page.

    Example: two pages of 2 slots. The sequence begins in page 1 and goes on in page 0. Its query stands at position 2.

        >>> mask = physical_mask(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, torch.tensor([[2, 0]]), page_size=2)
        >>> zero = torch.tensor(0)
        >>> mask(zero, zero, torch.tensor(2), torch.arange(4))
        tensor([ True, False,  True,  True])
    """

    @no_type_check  # FlexAttention cannot trace a type checker's wrapper
    def over_slots(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = first_keys[b, kv_idx // page_size]
        # The page decides who is hidden, not the position: -1 + an offset of 1 would be position 0.
        return (start >= 0) & mask_mod(b, h, q_idx, start + kv_idx % page_size)

    return over_slots


def convert_block_mask(
    mask: BlockMask, table: Int[Tensor, "B W"], counts: Int[Tensor, " B"], num_pages: int, page_size: int
) -> BlockMask:
    """Turn a whole BlockMask over each sequence's own keys into one over the pool.

    The lists of partial blocks and of full blocks turn physical, the numbers of blocks in each stay, and the mask_mod
    becomes one over slots. `physical_blocks`, `first_keys` and `physical_mask` do the parts. A mask without lists of
    full blocks (`mask.full_kv_indices` is None) stays without. `BlockMask.from_kv_blocks` makes the result; its
    `seq_lengths` are the queries of the mask (`mask.seq_lengths[0]`) and the slots of the pool.

    Args:
        mask: [B, H, queries, keys of a sequence], its key blocks `mask.BLOCK_SIZE[1]` long.
        table: pages of each row's sequence in order. Behind the first counts[b] stands anything.
        counts: pages of each row.
        num_pages: pages of the pool.
        page_size: slots of a page.

    Raises:
        ValueError: a block of keys is not a page. A larger one would hold keys of several sequences.

    Example: a query that sees six keys, in pages 1 and 0 of four slots: page 1 in full, page 0 in part.

        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> mask = create_block_mask(lambda b, h, q, k: k < 6, 1, 1, 1, 8, device="cpu", BLOCK_SIZE=(1, 4))
        >>> table, counts = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([2])
        >>> turned = convert_block_mask(mask, table, counts, num_pages=3, page_size=4)
        >>> turned.full_kv_num_blocks.item(), turned.full_kv_indices.tolist()
        (1, [[[[1, 0, 0]]]])
        >>> turned.kv_num_blocks.item(), turned.kv_indices[..., :1].tolist(), turned.seq_lengths
        (1, [[[[0]]]], (1, 12))
    """
    if mask.BLOCK_SIZE[1] != page_size:
        raise ValueError(f"the mask has blocks of {mask.BLOCK_SIZE[1]} keys, and a page has {page_size}")
    column = torch.arange(table.shape[1], device=table.device)
    starts = torch.where(column < counts[:, None], column * page_size, -1)
    full = mask.full_kv_indices
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        physical_blocks(mask.kv_indices, table, num_pages),
        mask.full_kv_num_blocks,
        None if full is None else physical_blocks(full, table, num_pages),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=physical_mask(mask.mask_mod, first_keys(table, starts, num_pages), page_size),
        seq_lengths=(mask.seq_lengths[0], num_pages * page_size),
    )


def compact(table: page_table.PageTable) -> list[tuple[int, int]]:
    """Challenge: move pages to the front of the pool, so that the memory behind them can be given back.

    With n pages in use, afterwards these are pages 0 to n - 1 and all others are free. As few pages move as possible:
    one that is among the first n already stays. A page that several rows share moves once, and all of them follow.
    Nothing else changes: each row has as many pages as before, in the same order of position.

    Only the table is yours: change its state (see PageTable), and say what has to be copied. The caller copies the
    keys and values of these pages, in every layer, in the order that you give.

    Returns:
        (old, new) for each page that moves.

    Example: the first of three sequences ends. One page moves into the gap.

        >>> table = page_table.PageTable(num_pages=5, page_size=4, max_sequences=3)
        >>> rows = [table.allocate() for _ in range(3)]
        >>> [table.reserve(row, 4) for row in rows]
        [True, True, True]
        >>> [table.pages(row).tolist() for row in rows], table.erase(rows[0])
        ([[0], [1], [2]], None)
        >>> compact(table), [table.pages(row).tolist() for row in rows[1:]], sorted(table.free_pages)
        ([(2, 0)], [[1], [0]], [2, 3, 4])
    """
    num_used = int((table.refcounts > 0).sum())
    old = num_used + np.flatnonzero(table.refcounts[num_used:])
    new = np.flatnonzero(table.refcounts[:num_used] == 0)  # as many: each page behind leaves one gap in front
    moved = np.arange(table.num_pages)
    moved[old] = new
    for row in range(len(table.counts)):
        pages = table.pages(row)  # a view of the table
        pages[:] = moved[pages]
    table.refcounts[new] = table.refcounts[old]
    table.refcounts[old] = 0
    table.free_pages[:] = reversed(range(num_used, table.num_pages))
    return list(zip(old.tolist(), new.tolist(), strict=True))
