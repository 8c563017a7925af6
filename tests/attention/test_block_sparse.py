"""Static block-sparse patterns: FlexAttention and FlashInfer against dense attention with the pattern as its mask."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mini_engine.attention.block_sparse import BlockPattern, plan_flashinfer
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.errors import ConfigError
from tests.attention.stepping import random_qkv

SPEC = AttentionSpec(0, num_qo_heads=4, num_kv_heads=2, head_dim=16, scale=0.3)
PATTERNS = st.builds(BlockPattern, st.sampled_from([1, 4, 16]), st.integers(1, 4), st.none() | st.integers(1, 5))


def dense_mask(pattern: BlockPattern, num_tokens: int) -> Tensor:
    """The pattern by its definition, pair by pair."""
    size, mask = pattern.block_size, torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for query in range(num_tokens):
        for key in range(query + 1):
            mine, other = query // size, key // size
            is_strided = pattern.stride is not None and (other + 1) % pattern.stride == 0
            mask[query, key] = mine - other < pattern.local or other == 0 or is_strided
    return mask


@settings(max_examples=40)
@given(PATTERNS, st.integers(1, 70))
def test_flex_attention_equals_dense_attention_with_the_mask(pattern: BlockPattern, num_tokens: int) -> None:
    """Also where the last block is not full."""
    q, k, v = random_qkv(SPEC, num_tokens, torch.float64, num_tokens)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    got = flex_attention(
        *heads_first, block_mask=pattern.block_mask(num_tokens), scale=SPEC.scale, enable_gqa=True
    )[0].transpose(0, 1)  # fmt: skip
    want = masked_attention(q, k, v, scale=SPEC.scale, mask=dense_mask(pattern, num_tokens))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


@settings(max_examples=20, deadline=None)
@given(PATTERNS, st.integers(1, 5))
def test_no_block_is_visited_in_vain(pattern: BlockPattern, count: int) -> None:
    """The blocks are those that torch finds by evaluating the mask for every pair."""
    n = count * pattern.block_size
    mine = pattern.block_mask(n)
    theirs = create_block_mask(pattern.mask_mod(), 1, 1, n, n, device="cpu", BLOCK_SIZE=pattern.block_size)
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert torch.equal(mine.to_dense()[0, 0].bool(), pattern.visited(n))


@settings(max_examples=30)
@given(PATTERNS, st.integers(1, 5))
def test_a_causal_mask_over_the_gathered_keys_is_the_pattern(pattern: BlockPattern, count: int) -> None:
    """As FlashInfer computes it: a row of blocks is a request, and its blocks are its pages."""
    size = pattern.block_size
    q, k, v = random_qkv(SPEC, count * size, torch.float64, count)
    indptr, indices = pattern.csr(len(q))
    assert indptr.dtype == indices.dtype == torch.int32
    rows = []
    for block, (first, end) in enumerate(pairwise(indptr.tolist())):
        gathered = (x.unflatten(0, (-1, size))[indices[first:end].long()].flatten(0, 1) for x in (k, v))
        keys = torch.arange((end - first) * size)
        own = slice(block * size, (block + 1) * size)
        rows.append(masked_attention(q[own], *gathered, scale=SPEC.scale, mask=attention_mask(keys[-size:], keys)))
    want = masked_attention(q, k, v, scale=SPEC.scale, mask=dense_mask(pattern, len(q)))
    torch.testing.assert_close(torch.cat(rows), want, atol=1e-12, rtol=0)


def test_what_a_pattern_of_128_blocks_visits() -> None:
    """At most 4 local blocks, the first one, and every eighth."""
    visited = BlockPattern(16, local=4, stride=8).visited(2048)
    assert visited[-1].nonzero().flatten().tolist() == [0, *range(7, 124, 8), 124, 125, 126, 127]
    assert visited[2].nonzero().flatten().tolist() == [0, 1, 2]


def test_sizes_are_positive() -> None:
    with pytest.raises(ConfigError, match="local is 0"):
        BlockPattern(16, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4, 64), (16, 8, 128)], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_flashinfer_equals_dense_attention_with_the_mask(heads: tuple[int, int, int], block_size: int) -> None:
    pytest.importorskip("flashinfer")
    spec, pattern = AttentionSpec(0, *heads, heads[2] ** -0.5), BlockPattern(block_size, local=2, stride=3)
    num_tokens = 9 * block_size
    q, k, v = random_qkv(spec, num_tokens, torch.bfloat16, 0, "cuda")
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    got = plan_flashinfer(pattern, num_tokens, spec, torch.bfloat16, workspace).run(q, k, v)
    assert got.dtype == torch.bfloat16
    mask = dense_mask(pattern, num_tokens).to("cuda")
    want = masked_attention(q.float(), k.float(), v.float(), scale=spec.scale, mask=mask)
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
    for wrong in (8, 5 * block_size):
        with pytest.raises(ConfigError, match="blocks of 16 tokens or more"):
            plan_flashinfer(BlockPattern(wrong, 1), num_tokens, spec, torch.bfloat16, workspace)
