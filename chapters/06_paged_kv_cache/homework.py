"""Homework of chapter 06: a pool of pages, their owners, and masks over slots.

Three exercises are parts of the engine. Once their checks pass, the command
`mini-engine generate --homework` runs a real model on your `PageTable`, your
`physical_blocks`, your `physical_mask`, or all of them.

The docstring of each function says what the function must do. Replace its line
`raise NotImplementedError`. Import what you need, and add helper functions of your own
as you like. Then:

    # grade your work
    pytest chapters/06_paged_kv_cache

    # the next of three hints for the exercise NAME
    pytest chapters/06_paged_kv_cache --hint NAME
"""

import numpy as np
import torch
from jaxtyping import Int, Int32
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mini_engine.attention import block_mask
from mini_engine.attention.masks import MaskMod
from mini_engine.kv_cache import page_table


def slots(
    table: Int[Tensor, "B W"],
    rows: Int[Tensor, " T"],
    positions: Int[Tensor, " T"],
    page_size: int,
) -> Int[Tensor, " T"]:
    """Find the slots in which tokens are stored.

    The pages of the pool are laid end to end: slot = page * page_size + offset in the
    page. Row b of the table lists the pages of one sequence in order of position:
    `table[b, 0]` holds its first page_size tokens, `table[b, 1]` the next ones, and so
    on. Use no Python loop: a step has thousands of tokens.

    Args:
        table: pages of each sequence, of dtype int32.
        rows: the row of each token's sequence.
        positions: each token's position in its sequence, in pages that the row owns.
        page_size: number of slots in a page.

    Returns:
        The slot of each token, of dtype int64, which indexing requires.

    Example: pages of 4. Position 9 is at offset 1 of the sequence's third page.

        >>> table = torch.tensor([[2, 0, 3], [1, 0, 0]], dtype=torch.int32)
        >>> slots(table, torch.tensor([0, 0, 1]), torch.tensor([0, 9, 2]), page_size=4)
        tensor([ 8, 13,  6])
    """
    raise NotImplementedError


class PageTable(page_table.PageTable):
    """The pages of up to `max_rows` requests, over a pool of `num_pages` pages.

    Write the five methods below, which move pages between the pool and the rows.
    Everything else is inherited, such as the constructor, which creates this state:

        table           int32 [max_rows, W]: row b owns the pages table[b, :counts[b]],
                        in order of position; the entries after those are stale
        counts          int64 [max_rows]: number of pages of each row
        refcounts       int32 [num_pages]: number of owners of each page
        generation      int64 [num_pages]: how many times each page has been taken from
                        the pool
        num_free_pages  int: number of pages without an owner
        _free_pages     int32 [num_pages]: _free_pages[:num_free_pages] are these pages,
                        in any order; the entries after them are stale
        _free_rows      list[int]: rows without a request

    The arrays are NumPy's and keep their size. Also inherited: `allocate()` takes a
    row, which then has no pages; `pages(row)` is a view of the row's pages;
    `drop_front(row, num_pages)` returns a row's first pages to the pool and relies on
    the state being as described. Whichever methods are called, in whatever order, three
    invariants hold:
        - refcounts[p] is the number of rows that own page p;
        - a page is free exactly when it has no owner, and is then listed once;
        - generation[p] has grown by one each time that page p was taken from the pool,
          and otherwise never: a page and its generation together identify its contents.

    Example: two requests in a pool of four pages.

        >>> table = PageTable(num_pages=4, page_size=16, max_rows=2)
        >>> a, b = table.allocate(), table.allocate()
        >>> table.take(np.array([a, b]), np.array([2, 1]))
        >>> len(table.pages(a)), len(table.pages(b)), table.num_free_pages
        (2, 1, 1)
        >>> table.release(b)
        >>> b = table.allocate()
        >>> table.share(b, table.pages(a)[:1])
        >>> table.refcounts[table.pages(a)].tolist(), table.num_free_pages
        ([2, 1], 2)
        >>> old, new = table.replace(b, 0)
        >>> old in table.pages(a), new in table.pages(b), table.num_free_pages
        (True, True, 1)
        >>> table.truncate(a, 1)
        >>> len(table.pages(a)), table.num_free_pages, int(table.generation.sum())
        (1, 2, 4)
    """

    def take(
        self,
        rows: Int[np.ndarray, " B"],
        num_pages: Int[np.ndarray, " B"],
    ) -> None:
        """Append `num_pages[b]` free pages to row `rows[b]`, for all rows at once.

        A row's old pages keep their places, because they hold keys; the new ones come
        after them. Use no Python loop over rows or pages: a step may take pages for
        hundreds of requests.

        Args:
            rows: distinct rows.
            num_pages: number of pages for each row, 0 or more.

        Raises:
            IndexError: if fewer pages are free than the rows take together. Then
                nothing has changed.
        """
        raise NotImplementedError

    def share(self, row: int, pages: Int32[np.ndarray, " n"]) -> None:
        """Append pages that other rows own; the row becomes one more owner of each.

        Args:
            row: a row.
            pages: distinct pages in use, in order of position; the row owns none of
                them yet.
        """
        raise NotImplementedError

    def replace(self, row: int, index: int) -> tuple[int, int]:
        """Replace one of a row's pages with a free page, which the row alone owns.

        The row can then write to it without harming other owners, which keep the old
        page. The caller copies the keys and values.

        Args:
            row: a row.
            index: which of its pages.

        Returns:
            The old page and the new one.

        Raises:
            IndexError: if no page is free. Then nothing has changed.
        """
        raise NotImplementedError

    def truncate(self, row: int, num_pages: int) -> None:
        """Remove all but the first `num_pages` pages from a row.

        A row that has no more than that keeps all of its pages. A page returns to the
        pool when its last owner loses it.
        """
        raise NotImplementedError

    def release(self, row: int) -> None:
        """Free a row and drop its pages. Its next request finds a row without pages."""
        raise NotImplementedError


def physical_blocks(
    blocks: Int[Tensor, "B H Q n"],
    table: Int[Tensor, "B W"],
    width: int,
) -> Int32[Tensor, "B H Q m"]:
    """Turn the block indices of a BlockMask from logical to physical.

    Block j of a sequence is block `table[b, j]` of the pool. Each list keeps its order.
    FlexAttention requires lists as long as the pool has blocks, so pad them with 0.

    Args:
        blocks: for each batch index, head and query block, a list of logical block
            indices, all below W. Convert all of them: the padding at the end of a list
            is never read.
        table: the physical blocks of each sequence, at most W of them.
        width: m, the number of blocks in the pool, at least n.

    Returns:
        The lists in physical indices, of dtype int32, which the kernel reads.

    Example: the first sequence has pages 2, 0 and 3, and the second has page 1.

        >>> table = torch.tensor([[2, 0, 3], [1, 0, 0]], dtype=torch.int32)
        >>> physical_blocks(torch.tensor([[[[1, 2]]], [[[0, 0]]]]), table, width=4)
        tensor([[[[0, 3, 0, 0]]],
                [[[1, 1, 0, 0]]]], dtype=torch.int32)
    """
    raise NotImplementedError


# Given: first_keys(pages, starts, num_pages) inverts the page table. pages [B, W] are
# the pages of each sequence and starts [B, W] the positions of their first keys, -1 for
# padding. It returns [B, num_pages]: the position of the first key of each page of the
# pool, -1 for a page that does not belong to the sequence.
first_keys = block_mask.first_keys


def physical_mask(
    mask_mod: MaskMod,
    first_keys: Int[Tensor, "B num_pages"],
    page_size: int,
) -> MaskMod:
    """Turn a mask over positions of keys into one over slots of the pool.

    A mask_mod is a function (b, h, q_idx, kv_idx) of four integer tensors that returns
    whether a query sees a key. In the function that you are given, kv_idx is the
    position of a key in sequence b. In the function that you return, kv_idx is a slot
    of the pool, and b, h and q_idx have the same meaning. Your function hides every
    slot of a page that does not belong to sequence b.

    FlexAttention traces the function and calls it with scalars and with whole grids, so
    use no `if`, `and` or `or` on its tensors.

    Args:
        mask_mod: over positions.
        first_keys: position of each page's first key in sequence b, -1 for a page that
            does not belong to it. It need not be a multiple of page_size.
        page_size: number of slots in a page.

    Example: two pages of 2 slots. The sequence begins in page 1 and continues in page
    0. Its query is at position 2.

        >>> causal = lambda b, h, q_idx, kv_idx: kv_idx <= q_idx
        >>> mask = physical_mask(causal, torch.tensor([[2, 0]]), page_size=2)
        >>> zero = torch.tensor(0)
        >>> mask(zero, zero, torch.tensor(2), torch.arange(4))
        tensor([ True, False,  True,  True])
    """
    raise NotImplementedError


def convert_block_mask(
    mask: BlockMask,
    table: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    num_pages: int,
    page_size: int,
) -> BlockMask:
    """Turn a whole BlockMask over each sequence's own keys into one over the pool.

    A block of keys is a page or an equal part of one: a mask with blocks of 16 keys can
    be converted for pages of 16 or of 64. The result visits as many blocks as the mask
    does, in the same order, and shows and hides the same keys, wherever their pages
    are. Its keys are all slots of the pool. `BlockMask.from_kv_blocks` builds it.

    Args:
        mask: [B, H, queries, keys of a sequence]. It may lack lists of full blocks
            (`mask.full_kv_indices` is None), and then the result lacks them, too. It
            covers whole pages: a multiple of page_size keys, at most W * page_size,
            where W is at most num_pages. No list contains a block beyond the pages of
            its sequence, except as padding.
        table: pages of each sequence in order. The entries after the first counts[b]
            are stale.
        counts: number of pages of each sequence.
        num_pages: number of pages in the pool.
        page_size: number of slots in a page.

    Raises:
        ValueError: if a page cannot be divided into whole blocks, because a larger
            block would hold keys of several sequences.

    Example: a query that sees six keys, in pages 1 and 0 of four slots. Page 1 is full
    and page 0 is partial.

        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> six, shape = lambda b, h, q, k: k < 6, (1, 1, 1, 8)
        >>> mask = create_block_mask(six, *shape, device="cpu", BLOCK_SIZE=(1, 4))
        >>> table, counts = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([2])
        >>> physical = convert_block_mask(mask, table, counts, num_pages=3, page_size=4)
        >>> physical.full_kv_num_blocks.item(), physical.full_kv_indices[..., 0].item()
        (1, 1)
        >>> physical.kv_num_blocks.item(), physical.kv_indices[..., 0].item()
        (1, 0)
        >>> physical.seq_lengths
        (1, 12)

    The same mask in blocks of two keys, which are halves of pages: blocks 2 and 3 are
    page 1, and blocks 0 and 1 are page 0.

        >>> mask = create_block_mask(six, *shape, device="cpu", BLOCK_SIZE=(1, 2))
        >>> physical = convert_block_mask(mask, table, counts, num_pages=3, page_size=4)
        >>> physical.full_kv_num_blocks.item()
        3
        >>> physical.full_kv_indices[0, 0, 0, :3].tolist()
        [2, 3, 0]
    """
    raise NotImplementedError


def compact(table: page_table.PageTable) -> list[tuple[int, int]]:
    """Challenge: move pages to the front of the pool, to give back memory at its end.

    If n pages are in use before the call, pages 0 to n - 1 are in use after it, and all
    others are free. As few pages as possible move: a page that is already among the
    first n stays. A page that several rows share moves once, and all its owners follow.
    Nothing else changes: each row has as many pages as before, in the same order of
    position.

    Change the table through its methods only (`allocate`, `take`, `share`, `replace`,
    `drop_front`, `truncate`, `release`), and read its arrays as you like. At least one
    row is free, and a row can hold the whole pool.

    The caller copies the keys and values of the pages that move, in every layer, in the
    order of your list.

    Returns:
        (old, new) for each page that moves.

    Example: the first of three requests ends. One page moves into the gap.

        >>> table = page_table.PageTable(num_pages=5, page_size=4, max_rows=3)
        >>> rows = [table.allocate() for _ in range(3)]
        >>> table.take(np.array(rows), np.array([1, 1, 1]))
        >>> [table.pages(row).tolist() for row in rows]
        [[0], [1], [2]]
        >>> table.release(rows[0])
        >>> compact(table)
        [(2, 0)]
        >>> [table.pages(row).tolist() for row in rows[1:]], table.num_free_pages
        ([[1], [0]], 3)
    """
    raise NotImplementedError
