"""BlockMasks without evaluating the mask: the blocks of keys that a block of queries visits, and where they are.

`create_block_mask` evaluates `mask_mod` for every pair of a query and a key. For a causal mask or a window, two
comparisons of positions give the same block indices, so the engine builds its BlockMasks from them (`classify_blocks`,
`list_blocks`). Explained in chapter 05.

FlexAttention can read the KV cache's pool of pages as one sequence of keys. For that, the logical block indices of a
sequence become physical ones (`physical_blocks`), and the mask maps a slot of the pool back to a position in the
query's sequence (`first_keys`, `physical_mask`). A block is a page or an equal part of one; a larger block would hold
keys of several sequences. Explained in chapter 06.
"""

from typing import no_type_check

import torch
from jaxtyping import Bool, Int, Int32, Int64
from torch import Tensor

from mini_engine.attention.masks import MaskMod


def classify_blocks(
    first_query: Int[Tensor, "..."],
    last_query: Int[Tensor, "..."],
    first_key: Int[Tensor, "..."],
    last_key: Int[Tensor, "..."],
    window: int | None,
) -> tuple[Bool[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Compare positions of a block of queries with positions of a block of keys. Causal; the arguments broadcast.

    Args:
        first_query: position of the first query.
        last_query: position of the last query.
        first_key: position of the first key.
        last_key: position of the last key.
        window: keys that a query may see, its own included; None for all.

    Returns:
        Whether some query sees some key (the block must be visited), and whether every query sees every key (the
        block is full: nothing in it needs to be masked).
    """
    visited = first_key <= last_query
    full = last_key <= first_query
    if window is not None:
        visited = visited & (first_query - last_key < window)
        full = full & (last_query - first_key < window)
    return visited, full


def list_blocks(chosen: Bool[Tensor, "*lists n"]) -> tuple[Int32[Tensor, "*lists"], Int64[Tensor, "*lists n"]]:
    """Turn a boolean mask over blocks into the counts and indices that `BlockMask.from_kv_blocks` takes.

    Args:
        chosen: [..., n] which of the n blocks are chosen for each list.

    Returns:
        The number of chosen blocks in each list, and [..., n] their indices in order, followed by the other indices.
    """
    return chosen.sum(dim=-1).int(), chosen.logical_not().byte().argsort(dim=-1, stable=True)


def physical_blocks(blocks: Int[Tensor, "B H Q n"], table: Int[Tensor, "B W"], width: int) -> Int32[Tensor, "B H Q m"]:
    """Turn the block indices of a BlockMask from logical to physical.

    Args:
        blocks: [B, H, Q, n] logical block indices of each sequence; padding after those in use is any index below W.
        table: [B, W] the page table: physical index of each logical block.
        width: m, blocks of the pool, the length that FlexAttention requires of each list.

    Returns:
        [B, H, Q, width] the same lists in physical block indices, padded with 0.
    """
    pages = table[:, None, None].expand(*blocks.shape[:3], -1).gather(-1, blocks.long())
    physical = torch.zeros(*blocks.shape[:3], width, dtype=torch.int32, device=blocks.device)
    physical[..., : blocks.shape[-1]] = pages
    return physical


def first_keys(pages: Int[Tensor, "B W"], starts: Int[Tensor, "B W"], num_pages: int) -> Int32[Tensor, "B num_pages"]:
    """Invert the page table: map each page of the pool to the position of its first key in a sequence.

    Args:
        pages: [B, W] pages of each sequence.
        starts: [B, W] position of each page's first key; -1 for padding.
        num_pages: pages of the pool.

    Returns:
        [B, num_pages] position of each page's first key; -1 where the page does not belong to the sequence.
    """
    unowned = torch.full((len(pages), num_pages), -1, dtype=torch.int32, device=pages.device)
    return unowned.scatter_reduce_(1, pages.long(), starts.int(), "amax")


def physical_mask(mask_mod: MaskMod, first_keys: Int32[Tensor, "B num_pages"], page_size: int) -> MaskMod:
    """Turn a mask_mod that takes positions of keys into one that takes slots of the pool.

    Args:
        mask_mod: says which keys a query sees, by their positions in its sequence.
        first_keys: [B, num_pages] position of each page's first key in sequence b; -1 where the page does not
            belong to it.
        page_size: slots of a page.

    Returns:
        A mask_mod whose `kv_idx` is a slot. It hides every page that does not belong to sequence b.
    """

    @no_type_check  # FlexAttention traces this function and cannot trace a type checker around it
    def physical(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        start = first_keys[b, kv_idx // page_size]
        return (start >= 0) & mask_mod(b, h, q_idx, start + kv_idx % page_size)

    return physical
