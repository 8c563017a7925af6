"""Which page of the cache holds which tokens of which sequence.

The KV cache is one pool of equal pages. A sequence owns a row of the table: its pages in order of position, wherever
they lie. Pages are counted by their owners, so that sequences can share what they have in common (vLLM: Kwon et al.
2023, section 4; the interface follows PyTorch's attention-gym and flex-nano-vllm).
"""

from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mini_engine.errors import ConfigError


class PageTable:
    """The pages of up to `max_sequences` sequences over a pool of `num_pages`.

    Everything here is bookkeeping on the host. A row is a number from `allocate`, good until `erase`.

    Attributes:
        num_pages: pages in the pool.
        page_size: tokens that fit in one page.

    Raises:
        ConfigError: for a pool without pages, pages without tokens, or a table without rows.
    """

    def __init__(self, num_pages: int, page_size: int, max_sequences: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size), ("max_sequences", max_sequences)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free_pages = list(reversed(range(num_pages)))  # a stack: the page freed last is the likeliest in a cache
        self._free_rows = list(reversed(range(max_sequences)))
        self._refcounts = np.zeros(num_pages, dtype=np.int32)
        # Row b of the table: its pages, then whatever was there before. Appended to, never rebuilt.
        self._table = np.zeros((max_sequences, num_pages), dtype=np.int32)
        self._counts = np.zeros(max_sequences, dtype=np.int64)

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def allocate(self) -> int:
        """Take a row without pages. Raises IndexError if every row is taken: the scheduler counts."""
        return self._free_rows.pop()

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Make sure that the row has pages for its first `num_tokens` tokens.

        Returns:
            False if the pool has too few free pages; then nothing has changed.
        """
        missing = self.pages_for(num_tokens) - int(self._counts[row])
        if missing > len(self._free_pages):
            return False
        for _ in range(missing):
            page = self._free_pages.pop()
            self._refcounts[page] = 1
            self._table[row, self._counts[row]] = page
            self._counts[row] += 1
        return True

    def share(self, row: int, other: int, num_pages: int) -> None:
        """Let a row without pages begin with the first `num_pages` pages of another: both own them from now on.

        Only full pages should be shared: nobody writes to those again.
        """
        assert self._counts[row] == 0, "only a row without pages can take over those of another"
        assert num_pages <= self._counts[other], "the other row has fewer pages"
        pages = self._table[other, :num_pages]
        self._table[row, :num_pages] = pages
        self._counts[row] = num_pages
        self._refcounts[pages] += 1

    def erase(self, row: int) -> None:
        """Give up the row and its pages; a page goes back to the pool when its last owner gives it up."""
        for page in self.pages(row)[::-1]:
            self._release(int(page))
        self._counts[row] = 0
        self._free_rows.append(row)

    def evict(self, row: int, num_pages: int) -> None:
        """Give up the first `num_pages` pages of a row: a window no longer reaches their tokens."""
        assert num_pages <= self._counts[row], "the row has fewer pages"
        for page in self.pages(row)[:num_pages]:
            self._release(int(page))
        left = int(self._counts[row]) - num_pages
        self._table[row, :left] = self._table[row, num_pages : num_pages + left].copy()
        self._counts[row] = left

    def pages(self, row: int) -> np.ndarray:
        """The row's pages in order of position: a view, valid until the row changes."""
        return self._table[row, : self._counts[row]]

    def pages_of(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The first `counts[b]` pages of each row, one row after the other, without a loop over rows or pages."""
        longest = int(counts.max(initial=0))
        return self._table[rows, :longest][np.arange(longest) < counts[:, None]]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens fill, the last perhaps in part."""
        return -(-num_tokens // self.page_size)

    def slots(self, rows: Int[Tensor, "*shape"], positions: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Where tokens lie: page * page_size + offset in the page.

        Args:
            rows: row of each token's sequence.
            positions: position of each token in its sequence, within reserved pages.
        """
        table = torch.from_numpy(self._table)
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
        table = torch.from_numpy(self._table[rows.cpu().numpy()]).to(device)  # [B, num_pages]

        # For each sequence: which of its blocks a page of the pool is; -1 for the pages of others.
        logical = torch.full((len(rows), self.num_pages), -1, dtype=torch.int32, device=device)
        counts = torch.from_numpy(self._counts[rows.cpu().numpy()]).to(device)
        owned = torch.arange(self.num_pages, device=device) < counts[:, None]
        index = torch.arange(self.num_pages, dtype=torch.int32, device=device).expand_as(table)
        sequence = torch.arange(len(rows), device=device)[:, None].expand_as(table)
        logical[sequence[owned], table[owned].long()] = index[owned]

        def physical(blocks: Tensor) -> Tensor:
            # What lies beyond num_blocks is never read, but has to be a valid index.
            pages = table[:, None, None].expand(*blocks.shape[:3], -1).gather(-1, blocks.long()).to(torch.int32)
            full_width = torch.zeros(*blocks.shape[:3], self.num_pages, dtype=torch.int32, device=device)
            full_width[..., : pages.shape[-1]] = pages
            return full_width

        page_size, mask_mod = self.page_size, mask.mask_mod

        @no_type_check  # FlexAttention traces it, and cannot trace a checker around it
        def physical_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            block = logical[b, kv_idx // page_size]
            position = block * page_size + kv_idx % page_size
            return torch.where(block >= 0, mask_mod(b, h, q_idx, position), False)

        return BlockMask.from_kv_blocks(
            mask.kv_num_blocks,
            physical(mask.kv_indices),
            mask.full_kv_num_blocks,
            None if mask.full_kv_indices is None else physical(mask.full_kv_indices),
            BLOCK_SIZE=mask.BLOCK_SIZE,
            mask_mod=physical_mask_mod,
            seq_lengths=(mask.seq_lengths[0], self.num_pages * self.page_size),
        )

    def _release(self, page: int) -> None:
        self._refcounts[page] -= 1
        if self._refcounts[page] == 0:
            self._free_pages.append(page)
