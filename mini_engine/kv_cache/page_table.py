"""Which page of the cache holds which tokens of which sequence.

The KV cache is one pool of equal pages. A sequence owns a row of the table: its pages in order of position, wherever
they lie. Pages are counted by their owners, so that sequences can share what they have in common (vLLM: Kwon et al.
2023, section 4; the interface follows PyTorch's attention-gym and flex-nano-vllm).
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mini_engine.attention.block_mask import first_keys, physical_blocks, physical_mask
from mini_engine.errors import ConfigError, check_positive


class PageTable:
    """The pages of up to `max_sequences` sequences over a pool of `num_pages`.

    Everything here is bookkeeping on the host. A row is a number from `allocate`, good until `erase`.

    Attributes:
        num_pages: pages in the pool.
        page_size: tokens that fit in one page.
        free_pages: pages without an owner, a stack: the page freed last is the likeliest in a cache.
        free_rows: rows without a sequence, a stack.
        refcounts: [num_pages] owners of each page.
        table: [max_sequences, num_pages] row b owns `table[b, :counts[b]]`, in order of position. Behind those is
            whatever was there before: the table is appended to, never rebuilt.
        counts: [max_sequences] pages of each row.

    Raises:
        ConfigError: for a pool without pages, pages without tokens, or a table without rows.
    """

    def __init__(self, num_pages: int, page_size: int, max_sequences: int) -> None:
        check_positive(num_pages=num_pages, page_size=page_size, max_sequences=max_sequences)
        self.num_pages = num_pages
        self.page_size = page_size
        self.free_pages = list(reversed(range(num_pages)))
        self.free_rows = list(reversed(range(max_sequences)))
        self.refcounts = np.zeros(num_pages, dtype=np.int32)
        self.table = np.zeros((max_sequences, num_pages), dtype=np.int32)
        self.counts = np.zeros(max_sequences, dtype=np.int64)

    @property
    def num_free_pages(self) -> int:
        return len(self.free_pages)

    def allocate(self) -> int:
        """Take a row without pages. Raises IndexError if every row is taken: the scheduler counts."""
        return self.free_rows.pop()

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make sure that the row has pages for its first `num_tokens` tokens.

        Returns:
            False if the pool has too few free pages; then nothing has changed.
        """
        missing = self.pages_for(num_tokens) - int(self.counts[row])
        if missing > len(self.free_pages):
            return False
        for _ in range(missing):
            page = self.free_pages.pop()
            self.refcounts[page] = 1
            self.table[row, self.counts[row]] = page
            self.counts[row] += 1
        return True

    def erase(self, row: int) -> None:
        """Give up the row and its pages; a page goes back to the pool when its last owner gives it up."""
        for page in self.pages(row)[::-1].tolist():
            self.release(page)
        self.counts[row] = 0
        self.free_rows.append(row)

    def release(self, page: int) -> None:
        """One owner of a page fewer; without any it is free."""
        self.refcounts[page] -= 1
        if self.refcounts[page] == 0:
            self.free_pages.append(page)

    def pages(self, row: int) -> np.ndarray:
        """The row's pages in order of position: a view, valid until the row changes."""
        return self.table[row, : self.counts[row]]

    def pages_of(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The first `counts[b]` pages of each row, one row after the other, without a loop over rows or pages."""
        longest = int(counts.max(initial=0))
        return self.table[rows, :longest][np.arange(longest) < counts[:, None]]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens fill, the last perhaps in part."""
        return -(-num_tokens // self.page_size)

    def slots(self, rows: Int[Tensor, "*shape"], positions: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Where tokens lie: page * page_size + offset in the page.

        Args:
            rows: row of each token's sequence.
            positions: position of each token in its sequence, within reserved pages.
        """
        table = torch.from_numpy(self.table)
        pages = table[rows.cpu(), (positions // self.page_size).cpu()].long().to(positions.device)
        return pages * self.page_size + positions % self.page_size

    def assign(
        self,
        rows: Int[Tensor, " B"],
        positions: Int[Tensor, "B S"],
        k: Float[Tensor, "B Hk S D"],
        v: Float[Tensor, "B Hk S D"],
        k_cache: Float[Tensor, "1 Hk N D"],
        v_cache: Float[Tensor, "1 Hk N D"],
    ) -> None:
        """Write S tokens of each of B sequences to their slots, in place, in FlexAttention's layout of the cache."""
        slots = self.slots(rows[:, None].expand_as(positions), positions).flatten()
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[0].index_copy_(1, slots, new.transpose(0, 1).flatten(1, 2))

    def assign_prefill_no_paging(
        self,
        rows: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        k: Float[Tensor, "1 Hk T D"],
        v: Float[Tensor, "1 Hk T D"],
        k_cache: Float[Tensor, "1 Hk N D"],
        v_cache: Float[Tensor, "1 Hk N D"],
    ) -> None:
        """Write the T tokens of a flat prefill, those of all sequences one after the other, to their slots, in place.

        The prefill itself attends to `k` and `v` as they are; only later steps read them through the table.
        """
        slots = self.slots(rows, positions)
        for cache, new in ((k_cache, k), (v_cache, v)):
            cache[0].index_copy_(1, slots, new[0])

    def convert_logical_block_mask(self, mask: BlockMask, rows: Int[Tensor, " B"]) -> BlockMask:
        """Turn a BlockMask over each sequence's own keys into one over the whole pool.

        Block j of a sequence becomes block `pages(row)[j]`: the same numbers in a new order, so the mask stays as
        sparse as it was. A block of keys must be a page.

        Args:
            mask: over [B, H, queries, keys of the sequence], its key blocks `page_size` long.
            rows: the row of each of the B sequences.

        Returns:
            A mask over [B, H, queries, num_pages * page_size]. Its mask_mod maps a physical key back to the position
            that it has in the query's own sequence, and hides the pages of all others.

        Raises:
            ConfigError: if a block of keys is not a page.
        """
        q_block, kv_block = mask.BLOCK_SIZE
        if kv_block != self.page_size:
            raise ConfigError(
                f"the mask's key blocks have {kv_block} keys and a page has {self.page_size}; make the mask with "
                f"BLOCK_SIZE=({q_block}, {self.page_size}): otherwise a block would hold keys of several sequences"
            )
        device = mask.kv_indices.device
        index = rows.cpu().numpy()
        counts = self.counts[index, None]
        column = np.arange(int(counts.max(initial=1)))
        starts = torch.from_numpy(np.where(column < counts, column * self.page_size, -1)).to(device)
        table = torch.from_numpy(self.table[index, : len(column)]).to(device)
        mask_mod = physical_mask(mask.mask_mod, first_keys(table, starts, self.num_pages), self.page_size)
        full = mask.full_kv_indices
        return BlockMask.from_kv_blocks(
            mask.kv_num_blocks,
            physical_blocks(mask.kv_indices, table, self.num_pages),
            mask.full_kv_num_blocks,
            None if full is None else physical_blocks(full, table, self.num_pages),
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=(mask.seq_lengths[0], self.num_pages * self.page_size),
        )
