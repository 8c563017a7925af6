"""Absorbed latent attention of one query per request over the paged KV cache, in two Triton kernels.

All heads of a request attend to the same latents (`attention.mla`), so a program loads a tile of latents once, for 16
heads: the heads are the rows of its matrix products, and each latent is used as a key, and again as a value, while it
is on the chip. A step reads 2 (L + R) bytes for each key in bfloat16 and computes 2 (2 L + R) FLOPs with it for each
head: about 30 FLOPs for each byte in DeepSeek-V2-Lite, so the kernel is bound by memory bandwidth.

The keys of all requests are split into two work items for each multiprocessor of the GPU (`plan_items`), so one of them
reads while the other multiplies. The second kernel merges the items of a request in their order (chapter 02), so equal
steps have equal bits. Explained in chapter 15.
"""

import math
from typing import no_type_check

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int32
from torch import Tensor

from mini_engine.attention.naive import masked_attention
from mini_engine.attention.split_kv import smallest_chunk
from mini_engine.ragged import members

TILE, HEADS = 32, 16  # keys and heads of one matrix product
WARPS, STAGES = 4, 2  # so two programs fit into a multiprocessor
LEAST_TILES = 2  # of an item: each item writes and reads a result
MOST_SPLITS = 64  # of a request
MERGED = 16  # results that are merged at once


def num_workers(device: torch.device) -> int:
    """Return how many work items run at the same time on a GPU."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def plan_items(
    kv_lens: Int32[np.ndarray, " B"], page_indptr: Int32[np.ndarray, " offsets"], num_workers: int
) -> dict[str, np.ndarray]:
    """Split the keys of a step into work items of equal length, without a loop over requests.

    Args:
        kv_lens: keys of each request.
        page_indptr: [B+1] first entry of each request in the list of pages.
        num_workers: items that run at the same time; there are more only if there are more requests.

    Returns:
        `items`, [max(num_workers, B), 4]: each item's request, first key, one past its last key, and first entry of
        the request in the list of pages; unused items have no keys. `item_indptr`, [B+1]: first item of each request.
    """
    num_tiles = -(-kv_lens // TILE)
    least = max(LEAST_TILES, -(-int(num_tiles.max()) // MOST_SPLITS))
    size = smallest_chunk(num_tiles, num_workers, least)
    counts = -(-num_tiles // size)
    requests, index = members(counts)
    first = index * size * TILE
    items = np.zeros((max(num_workers, len(kv_lens)), 4), dtype=np.int32)
    items[: len(requests)] = np.stack(
        (requests, first, np.minimum(first + size * TILE, kv_lens[requests]), page_indptr[requests]), axis=1
    )
    return {"items": items, "item_indptr": np.append(0, counts.cumsum()).astype(np.int32)}


def mla_decode(
    q: tuple[Float[Tensor, "B H L"], Float[Tensor, "B H R"]],
    entry: tuple[Float[Tensor, "pages P 1 L"], Float[Tensor, "pages P 1 R"]],
    pages: Int32[Tensor, " entries"],
    items: Int32[Tensor, "N 4"],
    item_indptr: Int32[Tensor, " offsets"],
    scale: float,
) -> Float[Tensor, "B H L"]:
    """Compute the weighted sum of latents of each query.

    Args:
        q: queries over latents, and their rotated part; any strides, as long as the last dimension is contiguous.
        entry: the layer's latents and rotated keys in the cache. L and R are powers of two, 16 or more.
        pages: pages of all requests.
        items: from `plan_items`.
        item_indptr: the same.
        scale: factor on the scores.

    Returns:
        The sums in the dtype of `q`; products are accumulated in float32.
    """
    (queries, rotated_q), (latents, rotated) = q, entry
    (num_requests, heads, rank), rope_dim = queries.shape, rotated_q.shape[2]
    partial = queries.new_empty(len(items), heads, rank, dtype=torch.float32)
    lse = queries.new_empty(len(items), heads, dtype=torch.float32)
    _attend[len(items), triton.cdiv(heads, HEADS)](
        queries, *queries.stride()[:2], rotated_q, *rotated_q.stride()[:2], latents, rotated, pages, items, partial,
        lse, scale * math.log2(math.e), heads, PAGE=latents.shape[1], RANK=rank, ROPE=rope_dim, HEADS=HEADS, TILE=TILE,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    out = queries.new_empty(num_requests, heads, rank)
    _merge[num_requests, heads](partial, lse, item_indptr, out, heads, RANK=rank, MERGED=MERGED, SPLITS=MOST_SPLITS)
    return out


def mla_decode_reference(
    q: tuple[Float[Tensor, "B H L"], Float[Tensor, "B H R"]],
    entry: tuple[Float[Tensor, "pages P 1 L"], Float[Tensor, "pages P 1 R"]],
    pages: Int[Tensor, " entries"],
    kv_lens: Int[np.ndarray, " B"],
    page_indptr: Int[np.ndarray, " offsets"],
    scale: float,
) -> Float[Tensor, "B H L"]:
    """Compute `mla_decode` in plain PyTorch, one request after another."""
    outputs = []
    for i, num_keys in enumerate(kv_lens.tolist()):
        own = pages[page_indptr[i] : page_indptr[i + 1]].long()
        keys = torch.cat([stored[own].flatten(0, 1)[:num_keys] for stored in entry], dim=-1)
        query = torch.cat([x[i : i + 1] for x in q], dim=-1)
        outputs.append(masked_attention(query, keys, keys, scale=scale)[..., : q[0].shape[2]])
    return torch.cat(outputs)


@no_type_check
@triton.jit
def _attend(
    q, q_row, q_head, rotated_q, rotated_row, rotated_head, latents, rotated, pages, items, out, lse, scale, num_heads,
    PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row = tl.load(items + item * 4).to(tl.int64)
    first, end, first_page = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = (head < num_heads)[:, None]
    column, rope_column = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    query = tl.load(q + row * q_row + head[:, None] * q_head + column, mask=is_head, other=0.0)
    rotated_query = tl.load(
        rotated_q + row * rotated_row + head[:, None] * rotated_head + rope_column, mask=is_head, other=0.0
    )
    # Relative to the running maximum, in units of log2: the sum of the weights, and the weighted sum of the latents.
    most = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, RANK), tl.float32)
    for start in range(first, end, TILE):
        key = start + tl.arange(0, TILE)
        is_key = key < end
        page = tl.load(pages + first_page + key // PAGE, mask=is_key, other=0).to(tl.int64)
        slot = (page * PAGE + key % PAGE)[:, None]
        latent = tl.load(latents + slot * RANK + column, mask=is_key[:, None], other=0.0)
        rotated_key = tl.load(rotated + slot * ROPE + rope_column, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(rotated_query, tl.trans(rotated_key), scores, input_precision="ieee")
        scores = tl.where(is_key[None, :], scores * scale, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        factor, weights = tl.exp2(most - new_most), tl.exp2(scores - new_most[:, None])
        total = total * factor + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(latent.dtype), latent, mixed * factor[:, None], input_precision="ieee")
        most = new_most
    if first < end:
        at = item.to(tl.int64) * num_heads + head
        tl.store(out + at[:, None] * RANK + column, mixed / total[:, None], mask=is_head)
        tl.store(lse + at, most + tl.log2(total), mask=head < num_heads)


@no_type_check
@triton.jit
def _merge(
    partial, lse, item_indptr, out, num_heads, RANK: tl.constexpr, MERGED: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    request, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(item_indptr + request), tl.load(item_indptr + request + 1)
    every, column = first + tl.arange(0, SPLITS), tl.arange(0, RANK)
    lses = tl.load(lse + every.to(tl.int64) * num_heads + head, mask=every < end, other=float("-inf"))
    most = tl.max(lses, 0)
    total = tl.sum(tl.exp2(lses - most), 0)
    mixed = tl.zeros((RANK,), tl.float32)
    for start in range(first, end, MERGED):
        item = start + tl.arange(0, MERGED)
        at = item.to(tl.int64) * num_heads + head
        weight = tl.exp2(tl.load(lse + at, mask=item < end, other=float("-inf")) - most) / total
        own = tl.load(partial + at[:, None] * RANK + column[None, :], mask=(item < end)[:, None], other=0.0)
        mixed += tl.sum(weight[:, None] * own, 0)
    to = out + (request.to(tl.int64) * num_heads + head) * RANK + column
    tl.store(to, mixed.to(out.dtype.element_ty))
