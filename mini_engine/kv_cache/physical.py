"""From logical to physical: masks over a sequence's own keys become masks over the whole pool of pages.

FlexAttention can read the pool as one long row of keys. What it needs to know is which of the pool's blocks a query
visits (`physical_blocks`), and where in the query's sequence a slot of the pool stands (`physical_mask`). A block is a
page, or an equal part of one: were it larger, it would hold keys of several sequences. Explained in chapter 06.
"""

from typing import no_type_check

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from mini_engine.attention.masks import MaskMod


def physical_blocks(blocks: Int[Tensor, "B H Q n"], table: Int[Tensor, "B W"], width: int) -> Int32[Tensor, "B H Q m"]:
    """Turn the block numbers of a BlockMask from logical to physical.

    Args:
        blocks: [B, H, Q, n] block numbers in the sequence of each row; what stands behind those in use is any number
            below W.
        table: [B, W] the page table: physical block of each logical one.
        width: m, blocks of the pool, which is how long FlexAttention wants each list to be.

    Returns:
        [B, H, Q, width] the same lists in physical numbers, filled up with 0.
    """
    pages = table[:, None, None].expand(*blocks.shape[:3], -1).gather(-1, blocks.long())
    physical = torch.zeros(*blocks.shape[:3], width, dtype=torch.int32, device=blocks.device)
    physical[..., : blocks.shape[-1]] = pages
    return physical


def first_keys(pages: Int[Tensor, "B W"], starts: Int[Tensor, "B W"], num_pages: int) -> Int32[Tensor, "B num_pages"]:
    """The page table read backwards: from a page to where its keys stand in the sequence.

    Args:
        pages: [B, W] pages of each row's sequence.
        starts: [B, W] position of each page's first key, -1 for a page that only fills up the row.
        num_pages: pages of the pool.

    Returns:
        [B, num_pages] position of each page's first key, -1 where the page is not the sequence's own.
    """
    nobody = torch.full((len(pages), num_pages), -1, dtype=torch.int32, device=pages.device)
    return nobody.scatter_reduce_(1, pages.long(), starts.int(), "amax")


def physical_mask(mask_mod: MaskMod, first_keys: Int32[Tensor, "B num_pages"], page_size: int) -> MaskMod:
    """Turn a mask_mod over positions of keys into one over slots of the pool.

    Args:
        mask_mod: which keys a query sees, by their positions in its own sequence.
        first_keys: [B, num_pages] position of each page's first key in the sequence of row b, -1 where the page is
            not its own.
        page_size: slots of a page.

    Returns:
        A mask_mod whose `kv_idx` is a slot. It hides every page that is not the row's own.
    """

    @no_type_check  # FlexAttention traces it, and cannot trace a checker around it
    def physical(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = first_keys[b, kv_idx // page_size]
        return (start >= 0) & mask_mod(b, h, q_idx, start + kv_idx % page_size)

    return physical
