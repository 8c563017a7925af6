"""Attention of one query per request over the paged KV cache, as one CUDA kernel for Hopper.

A decode step reads every key and value once and computes little with them, so the kernel has to keep the memory busy
from its first to its last microsecond. It does so in four ways. The keys of all requests are one sequence of tiles of
16 keys, which the thread blocks share equally ("stream-K", Osama et al. 2023; for attention "Lean Attention", Sanovar
et al. 2024), so no block is idle while another still works on a long request. The blocks of different KV heads read the
same pages at about the same time. In each block, one warp only copies tiles to shared memory, ahead of the warps that
compute. And it begins while the previous kernel still computes queries and keys of this step, because the keys of
earlier steps do not depend on them. The copies mark their lines as the first to leave the L2 cache, because a step does
not read them again.

The kernel is in `flash_decoding.cu`. Its reference is `attention/torch.py`. Explained in chapter 12.
"""

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from mini_engine.kernels.nvcc import load_kernel

TILE = 16  # keys
FEWEST_TILES = 4  # per range: one for each warp that computes
MOST_SPLITS = 64  # of a request
WARPS = 4  # that compute in each thread block; a power of two
BLOCKS_PER_SM = 2


@dataclass(frozen=True)
class DecodeWork:
    """The kernel's description of a step's decodes, on the device.

    Attributes:
        ranges: [ranges, 8] a range of tiles for a thread block of each KV head, see `share_tiles`.
        requests: [B, 2] each request's number of keys and its first entry in `pages`.
        pages: [P] pages of all requests.
    """

    ranges: Int32[Tensor, "ranges 8"]
    requests: Int32[Tensor, "B 2"]
    pages: Int32[Tensor, " P"]


def share_tiles(
    kv_lens: Int32[np.ndarray, " B"],
    page_indptr: Int32[np.ndarray, " offsets"],
    num_ranges: int,
    last_is_new: bool = False,
    window: int | None = None,
    split: int = 0,
) -> dict[str, np.ndarray]:
    """Divide the keys of a step into equal ranges, without a loop over requests or ranges.

    The tiles are numbered by request, then by position. A range can begin and end anywhere in a request.

    Args:
        kv_lens: [B] keys of each request, at least 1.
        page_indptr: [B+1] first entry of each request in the list of pages, and P.
        num_ranges: the most ranges.
        last_is_new: whether all keys but the last one of each request were stored in earlier steps, so that the kernel
            can copy them before the previous kernel has ended.
        window: number of keys, the last ones, that are attended to; None: all. Tiles before the window are in no range.
        split: tiles of a split, whose length depends on the request alone; longer requests have longer splits, so that
            none has more than MOST_SPLITS. Ranges consist of whole splits. 0: there are none.

    Returns:
        `requests`: [B, 2] see `DecodeWork`. `ranges`: [num_ranges, 8] for each range

        - request and tile of its first tile, and its number of tiles, which without splits differs by at most one
          between ranges with tiles; a range without tiles has zeros;
        - keys and first page of that request;
        - the range that has the first tile of that request, or of its window;
        - the range that has the last tile of the request that this range ends with;
        - `last_is_new`.
    """
    requests = np.stack((kv_lens, page_indptr[:-1]), axis=1).astype(np.int32)
    skipped = np.maximum(kv_lens.astype(np.int64) - window, 0) // TILE if window else np.zeros(len(kv_lens), np.int64)
    tiles = -(-kv_lens.astype(np.int64) // TILE) - skipped
    ends = np.cumsum(tiles)
    total = int(ends[-1])
    count = min(num_ranges, max(total // FEWEST_TILES, 1))
    bounds = np.arange(count + 1) * total // count
    if split:  # the nearest ends of splits
        row = np.searchsorted(ends, bounds[:-1], side="right")
        begin, size = (ends - tiles)[row], np.maximum(split, -(-tiles // MOST_SPLITS))[row]
        nearest = (bounds[:-1] - begin + size // 2) // size * size
        bounds = np.unique(np.append(begin + np.minimum(nearest, tiles[row]), total))
        count = len(bounds) - 1
    first, last = bounds[:-1], bounds[1:] - 1
    row, last_row = (np.searchsorted(ends, tile, side="right") for tile in (first, last))
    begin = (ends - tiles)[row]
    owner, final = (np.searchsorted(bounds, tile, side="right") - 1 for tile in (begin, ends[last_row] - 1))
    ranges = np.zeros((num_ranges, 8), dtype=np.int32)
    tile = first - begin + skipped[row]
    ranges[:count, :7] = np.stack((row, tile, last + 1 - first, *requests[row].T, owner, final), axis=1)
    ranges[:count, 7] = last_is_new
    return {"ranges": ranges, "requests": requests}


def last_keys_are_new(
    pages: Int32[np.ndarray, " P"], page_indptr: Int32[np.ndarray, " offsets"], num_pages: int
) -> bool:
    """Return whether a step of decodes stores keys that only the last tile of a request has: its own last key.

    A step stores one key in the last page of each request. A request that has just been admitted may share such a page
    with the request that fills it in the same step.

    Args:
        pages: [P] pages of all requests, in order.
        page_indptr: [B+1] first entry of each request in `pages`, and P.
        num_pages: pages of the cache.
    """
    is_written = np.zeros(num_pages, dtype=np.bool_)
    last = pages[page_indptr[1:] - 1]
    is_written[last] = True
    return bool(np.count_nonzero(is_written[pages]) == len(last))


class _Arguments(ctypes.Structure):
    """`Arguments` of the kernel."""

    _pointers: ClassVar = ["q", "out", "ranges", "requests", "pages", "partials", "lse", "arrived", "out_lse"]
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in _pointers),
        ("q_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("cap_scale", ctypes.c_float),
        ("kv_heads", ctypes.c_int),
    ]


class FlashDecoding:
    """The kernel for layers with the same heads. Its calls share memory, so they must run on one stream.

    Args:
        num_qo_heads: query heads, up to 8 for each KV head.
        num_kv_heads: KV heads.
        head_dim: 64, 128 or 256.
        page_size: keys per page, a multiple of 16.
        layout: order of a page's axes, "NHD" or "HND".
        dtype: dtype of queries and outputs: bfloat16 or float16.
        device: a GPU of compute capability 9.
        kv_dtype: dtype of keys and values: `dtype` (or None) or float8_e4m3fn.
        window: see `AttentionSpec`, as is `softcap`. The work of each step must have the same window.
        softcap: see above.
        split: see `share_tiles`; the work of each step must have the same. With splits, the result of a request has the
            same bits whatever other requests the step has.

    Attributes:
        num_ranges: number of ranges for `share_tiles`; each range has one thread block for each KV head.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        layout: str,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        window: int | None = None,
        softcap: float | None = None,
        split: int = 0,
    ) -> None:
        group = num_qo_heads // num_kv_heads
        # The states of more queries leave no room for a second block.
        blocks_per_sm = BLOCKS_PER_SM if group * head_dim <= 1024 else 1
        sizes = {
            "HEAD_DIM": head_dim, "GROUP": group, "PAGE_SIZE": page_size, "IS_BF16": int(dtype == torch.bfloat16),
            "IS_E4M3": int(kv_dtype == torch.float8_e4m3fn), "WINDOW": window or 0, "SOFTCAP": int(softcap is not None),
            "WARPS": WARPS, "BLOCKS_PER_SM": blocks_per_sm, "SPLIT": split,
        }  # fmt: skip
        library = load_kernel(Path(__file__).with_suffix(".cu"), tuple(sizes.items()))
        self._prepare, self._launch = library.prepare_flash_decoding, library.launch_flash_decoding
        num_blocks = blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count
        # Blocks wait for others that have later ranges of the same head, so all must fit on the GPU at the same time.
        self.num_ranges = max(num_blocks // num_kv_heads, 1)
        rows = self.num_ranges * num_kv_heads
        self._softcap = softcap
        self._axes = (0, 1, 2) if layout == "NHD" else (0, 2, 1)  # pages, tokens, heads
        num_parts = rows * (MOST_SPLITS if split else 1)
        self._partials = torch.empty(num_parts, group * (head_dim + 1), device=device)
        self._arrived = torch.zeros(rows, dtype=torch.int32, device=device)
        self._arguments = _Arguments(
            partials=self._partials.data_ptr(),
            lse=self._partials.data_ptr() + num_parts * group * head_dim * self._partials.itemsize,
            arrived=self._arrived.data_ptr(),
            kv_heads=num_kv_heads,
        )
        self._maps: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = {}

    def __call__(
        self,
        q: Float[Tensor, "B Hq D"],
        pages: tuple[Tensor, Tensor],
        work: DecodeWork,
        out: Float[Tensor, "B Hq D"],
        scale: float,
        v_scale: float = 1.0,
        lse: Float[Tensor, "B Hq"] | None = None,
    ) -> None:
        """Compute the attention of one query per request, in one launch that a CUDA graph can record.

        Args:
            q: [B, Hq, D] queries; the heads of a request are adjacent in memory.
            pages: keys and values of the layer, each [pages, *layout].
            work: the step's decodes.
            out: [B, Hq, D] contiguous; overwritten.
            scale: factor on the scores.
            v_scale: factor on the values.
            lse: [B, Hq] float32, contiguous; receives the base-2 logarithm of the sum of each query's weights.

        Raises:
            RuntimeError: if CUDA refuses the cache or the launch.
        """
        arguments = self._arguments
        arguments.q, arguments.q_stride, arguments.out = q.data_ptr(), q.stride(0), out.data_ptr()
        arguments.ranges, arguments.requests = work.ranges.data_ptr(), work.requests.data_ptr()
        arguments.pages, arguments.out_lse = work.pages.data_ptr(), None if lse is None else lse.data_ptr()
        arguments.scale, arguments.v_scale = (self._softcap or scale) * math.log2(math.e), v_scale
        if self._softcap:
            arguments.cap_scale = 2 * math.log2(math.e) * scale / self._softcap
        # `torch.cuda.current_stream` would make an object for each layer.
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(q.get_device()))
        if error := self._launch(self._maps_of(*pages), ctypes.byref(arguments), self.num_ranges, stream):
            raise RuntimeError(f"launching the flash-decoding kernel failed with CUDA error {error}")

    def _maps_of(self, keys: Tensor, values: Tensor) -> "ctypes.Array[ctypes.c_char]":
        """Return the maps with which TMA copies a layer's tiles; created when the layer is first computed."""
        address = keys.data_ptr(), values.data_ptr()
        if address not in self._maps:
            pages, _, heads = self._axes
            maps = ctypes.create_string_buffer(256)
            sizes = (ctypes.c_int64 * 2)(keys.shape[pages], keys.shape[heads])
            strides = (ctypes.c_int64 * 3)(*(keys.stride(axis) for axis in self._axes))
            if error := self._prepare(maps, *map(ctypes.c_void_p, address), sizes, strides):
                raise RuntimeError(f"mapping the KV cache for the flash-decoding kernel failed with CUDA error {error}")
            self._maps[address] = maps
        return self._maps[address]
