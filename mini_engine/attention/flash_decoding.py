"""The `flash_decoding` backend: decodes on the project's own kernel for Hopper, prompts on FlashInfer.

The kernel supports plain layers: heads of size 64 or 128, up to 8 query heads for each KV head, keys in the model's
dtype, and no window, soft-cap or ALiBi. In other layers FlashInfer computes the decodes, too. Explained in chapter 12.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mini_engine.attention.backend import AttentionParts, KVCache
from mini_engine.attention.flashinfer import FlashInferBackend, LayerKind
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.kernels.flash_decoding import DecodeWork, FlashDecoding, last_keys_are_new, share_tiles
from mini_engine.transfer import copy_pinned, pack, to_device, unpack

logger = logging.getLogger(__name__)


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
        self, q: Float[Tensor, "B Hq D"], pages: tuple[Tensor, Tensor], *, out: Tensor, k_scale: float, v_scale: float
    ) -> Float[Tensor, "B Hq D"]:
        """Compute the attention of one query per request; the arguments are the same as for the wrappers."""
        self.kernel(q, pages, self.work, out, self.kind.scale * k_scale, v_scale)
        return out


class FlashDecodingBackend(FlashInferBackend):
    """Our own decode kernel over the paged cache, on Hopper, for both layouts; everything else as in FlashInferBackend.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, on a GPU.
        parts: the engine's replaceable parts.
    """

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        heads = {kind[:3] for kind in self._kinds if self._computes(kind)}
        self._kernels = {
            sizes: FlashDecoding(*sizes, cache.page_size, cache.layout, cache.dtype, cache.device) for sizes in heads
        }
        self._graph_memory: dict[tuple[int, int], UInt8[Tensor, " bytes"]] = {}
        self._being_copied: list[UInt8[Tensor, " bytes"]] = []

    def plan(self, batch: StepBatch) -> None:
        """Share the keys of the decodes among the kernel's thread blocks, and plan the prompts.

        Raises:
            ConfigError: if the pages of a request have gaps and a layer has a window or ALiBi.
        """
        self._work: dict[int, DecodeWork] = {}  # by the number of ranges
        copied = len(self._being_copied)
        super().plan(batch)  # waits until the last plan has been copied
        del self._being_copied[:copied]

    def _computes(self, kind: LayerKind) -> bool:
        """Return whether the kernel supports a kind of layer."""
        return (
            kind.head_dim in (64, 128)
            and kind.num_qo_heads // kind.num_kv_heads <= 8
            and kind.kv_dtype in (None, self.cache.dtype)
            and kind.window is None
            and kind.softcap is None
            and not kind.alibi
        )

    def _plan_decodes(self, batch: StepBatch, count: int, kind: LayerKind, algorithm: str = "decode") -> Any:
        if not self._computes(kind):
            return super()._plan_decodes(batch, count, kind, algorithm)
        kernel = self._kernels[kind[:3]]
        if kernel.num_ranges not in self._work:  # shared by kinds of layers with the same number of ranges
            self._work[kernel.num_ranges] = self._upload(batch, count, kernel.num_ranges)
        work = self._work[kernel.num_ranges]
        name = "flash decoding" if batch.page_capacity is None else f"flash decoding, graph of {count}"
        decode = self._wrapper(kind, name, lambda: PlannedDecode(kernel, kind, work))
        decode.work = work
        return decode

    def _upload(self, batch: StepBatch, count: int, num_ranges: int) -> DecodeWork:
        """Divide the first sequences of the step into ranges; in a CUDA graph, always at the same addresses."""
        indptr = batch.kv_page_indptr[: count + 1].numpy()
        last_is_new = count == batch.num_sequences and last_keys_are_new(
            batch.host_page_indices.numpy(), indptr, self.cache.layers[0][0].shape[0]
        )
        arrays = share_tiles(batch.kv_lens[:count].numpy(), indptr, num_ranges, last_is_new)
        device = self.cache.device
        if batch.page_capacity is None:
            return DecodeWork(**to_device(arrays, device), pages=batch.kv_page_indices)
        packed = pack(arrays, pin_memory=device.type == "cuda")
        key = count, num_ranges
        if key not in self._graph_memory:
            self._graph_memory[key] = torch.empty_like(packed, device=device)
        memory = self._graph_memory[key]
        copy_pinned(memory, packed)
        self._being_copied.append(packed)
        # The pages of a graph's steps are at the same address, too, see `StepBuffers`.
        return DecodeWork(**unpack(memory, arrays), pages=batch.kv_page_indices)
