"""Static block-sparse patterns: which blocks of keys a block of queries attends to, whatever they hold.

Page selection (`page_selection`) chooses the keys for each query. A static pattern chooses them by position alone, so
it costs nothing to evaluate, and suits models that were trained with it. `BlockPattern` combines three patterns: local
blocks (Beltagy et al. 2020, "Longformer"), global tokens at the start (Zaheer et al. 2020, "BigBird"), and blocks at
regular distances (Child et al. 2019, "Sparse Transformers"). Blocks of queries and of keys have the same size, and the
mask is causal, so only the blocks on the diagonal are partly masked.

The pattern comes in the forms that kernels read: a `BlockMask` for FlexAttention, and CSR indices for FlashInfer's
block-sparse kernels, in which a row of blocks is a request and a block is a page. It is a tool to measure with; no
backend of the engine uses it. Explained in chapter 15.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Int32, UInt8
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks

from mini_engine.attention.block_mask import list_blocks
from mini_engine.attention.masks import MaskMod, causal
from mini_engine.attention.spec import AttentionSpec
from mini_engine.errors import ConfigError, check_positive


@dataclass(frozen=True)
class BlockPattern:
    """Local blocks, the first block, and every `stride`-th block.

    Attributes:
        block_size: queries, and keys, of a block.
        local: number of blocks that a query sees up to its own.
        stride: a query also sees the blocks `stride - 1`, `2 stride - 1`, and so on; None: it does not.

    Raises:
        ConfigError: for a size that is not a positive integer.
    """

    block_size: int
    local: int
    stride: int | None = None

    def __post_init__(self) -> None:
        check_positive(block_size=self.block_size, local=self.local, stride=self.stride)

    @no_type_check  # FlexAttention traces this function, see masks.py
    def sees_block(self, q_block: Tensor, kv_block: Tensor) -> Tensor:
        """Return whether queries of one block see keys of another, for block indices that broadcast."""
        seen = (q_block - kv_block < self.local) | (kv_block == 0)
        if self.stride is not None:
            seen = seen | (kv_block % self.stride == self.stride - 1)
        return seen & (kv_block <= q_block)

    def mask_mod(self) -> MaskMod:
        """Return the pattern as a mask of positions, which defines it."""
        size = self.block_size
        return and_masks(causal, lambda b, h, q_idx, kv_idx: self.sees_block(q_idx // size, kv_idx // size))

    def visited(self, num_tokens: int, device: torch.device | str = "cpu") -> Bool[Tensor, "blocks blocks"]:
        """Return which blocks of keys each block of queries visits."""
        block = torch.arange(-(-num_tokens // self.block_size), device=device)
        return self.sees_block(block[:, None], block)

    def block_mask(self, num_tokens: int, device: torch.device | str = "cpu") -> BlockMask:
        """Return the pattern for FlexAttention. The blocks on the diagonal are partial, and the others are full."""
        visited = self.visited(num_tokens, device)[None, None]
        diagonal = torch.eye(visited.shape[-1], dtype=torch.bool, device=device)
        (partial_count, partial), (full_count, full) = list_blocks(visited & diagonal), list_blocks(visited & ~diagonal)
        return BlockMask.from_kv_blocks(
            partial_count,
            partial.int(),
            full_count,
            full.int(),
            BLOCK_SIZE=self.block_size,
            mask_mod=self.mask_mod(),
            seq_lengths=(num_tokens, num_tokens),
        )

    def csr(self, num_tokens: int) -> tuple[Int32[Tensor, " indptr"], Int32[Tensor, " blocks"]]:
        """Return the first entry of each row of blocks, and the indices of all visited blocks.

        The indices of a row are in order, so the block on the diagonal is the row's last one.
        """
        visited = self.visited(num_tokens)
        indptr = torch.nn.functional.pad(visited.sum(dim=1).cumsum(0), (1, 0))
        return indptr.int(), visited.nonzero()[:, 1].int()


def plan_flashinfer(
    pattern: BlockPattern, num_tokens: int, spec: AttentionSpec, dtype: torch.dtype, workspace: UInt8[Tensor, " bytes"]
) -> Any:
    """Plan FlashInfer's block-sparse attention for one sequence on a GPU.

    FlashInfer's causal mask counts the keys that a row of blocks gathers, not their positions. The two agree here,
    because the last gathered block is the one on the diagonal.

    Args:
        pattern: the pattern; FlashInfer needs 16 or more queries in a block, or it computes without the causal mask.
        num_tokens: length of the sequence, a multiple of the block size.
        spec: the layer, without window, soft-cap, slopes or sinks.
        dtype: dtype of queries, keys, values and output.
        workspace: memory on the GPU for FlashInfer, 128 MiB.

    Returns:
        A wrapper. Its `run(q, k, v)` takes queries [T, Hq, D], keys [T, Hk, D] and values [T, Hk, D].

    Raises:
        ConfigError: for blocks or lengths that FlashInfer does not support.
    """
    import flashinfer  # takes seconds, and not every machine has it

    if pattern.block_size < 16 or num_tokens % pattern.block_size:
        raise ConfigError(
            f"FlashInfer's block-sparse attention needs blocks of 16 tokens or more that divide the {num_tokens} "
            f"tokens, not {pattern.block_size}; use FlexAttention with `block_mask`"
        )
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace)
    indptr, indices = (array.to(workspace.device) for array in pattern.csr(num_tokens))
    wrapper.plan(
        indptr,
        indices,
        num_tokens,
        num_tokens,
        pattern.block_size,
        pattern.block_size,
        spec.num_qo_heads,
        spec.num_kv_heads,
        spec.head_dim,
        causal=True,
        sm_scale=spec.scale,
        q_data_type=dtype,
        kv_data_type=dtype,
        o_data_type=dtype,
    )
    return wrapper
