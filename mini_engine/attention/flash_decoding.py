"""Decodes on the project's own kernel for Hopper, for `PagedBackend`.

The kernel supports heads of size 64, 128 or 256, up to 8 query heads for each KV head, keys in the model's dtype or in
e4m3, sliding windows, and soft-cap, but no ALiBi. It is compiled for each combination that a model needs. Explained in
chapter 12.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mini_engine.attention.backend import CacheFormat
from mini_engine.attention.captured import CapturedDecodes
from mini_engine.attention.flashinfer import LayerKind, Wrappers
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kernels.flash_decoding import DecodeWork, FlashDecoding, last_keys_are_new, share_tiles
from mini_engine.transfer import copy_pinned, pack, to_device, unpack


@dataclass
class PlannedDecode:
    """The decodes of one kind of layer, with the same `run` as FlashInfer's wrappers.

    Attributes:
        kernel: the kernel for these heads.
        kind: the kind of layer.
        work: the step's decodes.
    """

    kernel: FlashDecoding
    kind: LayerKind
    work: DecodeWork

    def run(
        self,
        q: Float[Tensor, "B Hq D"],
        pages: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Float[Tensor, "B Hq D"]:
        """Compute the attention of one query per request; the arguments are the same as for the wrappers."""
        self.kernel(q, pages, self.work, out, self.kind.scale * k_scale, v_scale, lse)
        return out


class FlashDecodes(CapturedDecodes):
    """Our own decode kernel.

    Args:
        kinds: the kinds of layers that it computes.
        wrappers: FlashInfer's wrappers, among which it keeps its plans.

    Attributes:
        split: see `share_tiles`.
    """

    split: ClassVar[int] = 0

    def __init__(self, kinds: Sequence[LayerKind], wrappers: Wrappers) -> None:
        super().__init__(kinds, wrappers)
        cache = wrappers.cache
        self._kernels: dict[tuple[Any, ...], FlashDecoding] = {}
        for kind in kinds:
            if _variant(kind) not in self._kernels:
                self._kernels[_variant(kind)] = FlashDecoding(
                    *kind[:3], cache.page_size, cache.layout, cache.dtype, cache.device, kind.kv_dtype, kind.window,
                    kind.softcap, self.split,
                )  # fmt: skip
        self._work: dict[tuple[int | None, ...], DecodeWork] = {}
        self._graph_memory: dict[tuple[int, int, int | None, bool], UInt8[Tensor, " bytes"]] = {}
        self._being_copied: list[UInt8[Tensor, " bytes"]] = []
        # Of captured steps with prompts: what their decodes are, and the pages of these.
        self._step_memory: dict[tuple[int, int, int | None], UInt8[Tensor, " bytes"]] = {}
        self._pages = torch.empty(0, dtype=torch.int32)

    @staticmethod
    def computes(spec: AttentionSpec, cache: CacheFormat) -> bool:
        """Return whether the kernel supports a layer."""
        return (
            spec.head_dim in (64, 128, 256)
            and spec.group <= 8
            and spec.kv_dtype in (None, cache.dtype, torch.float8_e4m3fn)
            and spec.alibi_slopes is None
        )

    def begin(self) -> None:
        self._work.clear()
        self._being_copied.clear()

    def plan(self, batch: StepBatch, count: int, kind: LayerKind, has_levels: bool) -> Any:
        """Share the keys of the first `count` sequences among the kernel's thread blocks."""
        kernel = self._kernels[_variant(kind)]
        key = kernel.num_ranges, kind.window, has_levels
        if key not in self._work:  # shared by kinds of layers with the same number of ranges and the same window
            self._work[key] = self._upload(batch, count, *key)
        work = self._work[key]
        name = "flash decoding" if batch.page_capacity is None else f"flash decoding, graph of {count}"
        decode = self._wrappers.get(kind, name, lambda: PlannedDecode(kernel, kind, work))
        decode.work = work
        return decode

    def plan_captured(self, batch: StepBatch, count: int, kind: LayerKind, size: int) -> Any:
        """Share the keys among the thread blocks, whose number does not depend on the count."""
        kernel = self._kernels[_variant(kind)]
        key = kernel.num_ranges, kind.window, size
        if key not in self._work:
            self._work[key] = self._upload_captured(batch, count, *key)
        work = self._work[key]
        name = f"flash decoding, graph of {size} tokens"
        decode = self._wrappers.get(kind, name, lambda: PlannedDecode(kernel, kind, work))
        decode.work = work
        return decode

    def _upload_captured(
        self, batch: StepBatch, count: int, num_ranges: int, window: int | None, size: int
    ) -> DecodeWork:
        """Divide the first sequences of a step into ranges, with room for as many sequences as tokens."""
        cache, indptr = self._wrappers.cache, batch.kv_page_indptr[: count + 1].numpy()
        arrays = {"ranges": np.zeros((num_ranges, 8), np.int32), "requests": np.zeros((size, 2), np.int32)}
        if count:
            shared = share_tiles(batch.kv_lens[:count].numpy(), indptr, num_ranges, False, window, self.split)
            arrays["ranges"], arrays["requests"][:count] = shared["ranges"], shared["requests"]
        packed = pack(arrays, pin_memory=cache.device.type == "cuda")
        key = size, num_ranges, window
        if key not in self._step_memory:
            self._step_memory[key] = torch.empty(len(packed), dtype=torch.uint8, device=cache.device)
        if not len(self._pages):
            self._pages = torch.empty(cache.layers[0][0].shape[0], dtype=torch.int32, device=cache.device)
        copy_pinned(self._step_memory[key], packed)
        self._being_copied.append(packed)
        self._pages[: indptr[-1]] = batch.kv_page_indices[: indptr[-1]]
        return DecodeWork(**unpack(self._step_memory[key], arrays), pages=self._pages)

    def _upload(
        self, batch: StepBatch, count: int, num_ranges: int, window: int | None, has_levels: bool
    ) -> DecodeWork:
        """Divide the first sequences of the step into ranges; in a CUDA graph, always at the same addresses."""
        cache, indptr = self._wrappers.cache, batch.kv_page_indptr[: count + 1].numpy()
        last_is_new = count == batch.num_sequences and last_keys_are_new(
            batch.host_page_indices.numpy(), indptr, cache.layers[0][0].shape[0]
        )
        arrays = share_tiles(batch.kv_lens[:count].numpy(), indptr, num_ranges, last_is_new, window, self.split)
        if batch.page_capacity is None:
            return DecodeWork(**to_device(arrays, cache.device), pages=batch.kv_page_indices)
        # The pages of a graph's steps are at the same address, too (`StepBuffers`), except those that levels leave.
        if has_levels:
            arrays["pages"] = batch.host_page_indices.numpy()
        packed = pack(arrays, pin_memory=cache.device.type == "cuda")
        key = count, num_ranges, window, has_levels
        if key not in self._graph_memory:
            room = 4 * batch.page_capacity if has_levels else 0
            self._graph_memory[key] = torch.empty(len(packed) + room, dtype=torch.uint8, device=cache.device)
        memory = self._graph_memory[key][: len(packed)]
        copy_pinned(memory, packed)
        self._being_copied.append(packed)
        return DecodeWork(**{"pages": batch.kv_page_indices} | unpack(memory, arrays))


def _variant(kind: LayerKind) -> tuple[Any, ...]:
    """Return what a kernel is built for. Layers that differ only in their scales share a kernel."""
    return (*kind[:3], kind.kv_dtype, kind.window, kind.softcap)
