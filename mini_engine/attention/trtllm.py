"""Decodes on the attention kernels of TensorRT-LLM, which FlashInfer includes, for `PagedBackend`.

These kernels need no plan. They read a dense table of pages and the lengths, and split the keys of a request by their
own rules: XQA on Hopper, trtllm-gen on Blackwell. So a step needs only those two arrays, and a CUDA graph needs them at
fixed addresses. Explained in chapter 12.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from mini_engine.attention.backend import CacheFormat
from mini_engine.attention.flashinfer import Decodes, LayerKind, Wrappers
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.transfer import to_device

logger = logging.getLogger(__name__)
# Counters and partial results. The kernels expect the counters to be zero and reset them; nothing else may write there.
SCRATCH_BYTES = 128 * 2**20


def block_tables(
    page_indices: Int32[np.ndarray, " P"], page_indptr: Int32[np.ndarray, " offsets"], width: int
) -> Int32[np.ndarray, "B width"]:
    """Turn lists of pages from CSR into a dense table, without a loop over requests.

    Rows are padded with page 0, which a kernel can safely read. Page 0 may also belong to a request, so only the
    lengths say where a row ends.

    Args:
        page_indices: [P] pages of all requests, in order.
        page_indptr: [B+1] first entry of each request in `page_indices`, and P.
        width: columns, at least the pages of every request.

    Returns:
        [B, width] the pages of each request, followed by zeros.
    """
    counts = np.diff(page_indptr)
    tables = np.zeros((len(counts), width), dtype=np.int32)
    tables[np.arange(width) < counts[:, None]] = page_indices  # row by row, in the order of CSR
    return tables


@dataclass(frozen=True)
class DecodeTables:
    """The kernels' description of a step's decodes, on the device.

    Attributes:
        pages: [B, width] table of pages; columns after a request's last page may hold any page.
        kv_lens: [B] keys of each request.
    """

    pages: Int32[Tensor, "B width"]
    kv_lens: Int32[Tensor, " B"]


@dataclass
class TRTLLMDecode:
    """The decodes of one kind of layer, with the same `run` as FlashInfer's wrappers.

    Attributes:
        decode: `trtllm_batch_decode_with_kv_cache`, with the arguments that all kinds of layers share.
        kind: the kind of layer.
        page_size: keys per page.
        tables: the step's decodes.
    """

    decode: Callable[..., Tensor]
    kind: LayerKind
    page_size: int
    tables: DecodeTables

    def run(
        self,
        q: Float[Tensor, "B Hq D"],
        pages: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Float[Tensor, "B Hq D"]:
        """Compute the attention of one query per request; the arguments are the same as for the wrappers."""
        tables, kind = self.tables, self.kind
        return self.decode(
            q.contiguous(),  # XQA ignores the strides of the queries
            pages,
            block_tables=tables.pages,
            seq_lens=tables.kv_lens,
            max_seq_len=tables.pages.shape[1] * self.page_size,  # of any request, the same in every replay
            bmm1_scale=kind.scale * k_scale,
            bmm2_scale=v_scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            out=out,
        )


class TRTLLMDecodes(Decodes):
    """TensorRT-LLM's decode kernels, on Hopper and Blackwell.

    The kernels support neither soft-cap nor ALiBi, and return no LSE. They read keys in the model's dtype or in
    float8_e4m3fn. On Blackwell (trtllm-gen) FlashInfer downloads compiled kernels when they are first needed. The
    project's tests run on Hopper.

    Args:
        kinds: the kinds of layers that it computes.
        wrappers: FlashInfer's wrappers, among which it keeps its plans.
    """

    returns_lse: ClassVar[bool] = False
    waits_for_keys: ClassVar[bool] = False  # XQA reads older keys before it waits, and this step may write some of them

    def __init__(self, kinds: Sequence[LayerKind], wrappers: Wrappers) -> None:
        super().__init__(kinds, wrappers)
        cache = wrappers.cache
        major, _ = torch.cuda.get_device_capability(cache.device)
        self._kernel = "trtllm-gen" if major == 10 else "xqa"
        self._decode = partial(
            wrappers.flashinfer.decode.trtllm_batch_decode_with_kv_cache,
            workspace_buffer=torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=cache.device),
            kv_layout=cache.layout,
            backend=self._kernel,
        )
        self._tables: DecodeTables | None = None
        self._graph_tables: dict[int, DecodeTables] = {}

    @staticmethod
    def computes(spec: AttentionSpec, cache: CacheFormat) -> bool:
        """Return whether the kernels support a layer."""
        return spec.group <= 32 and spec.softcap is None and spec.alibi_slopes is None and not spec.has_sinks

    def begin(self) -> None:
        self._tables = None

    def plan(self, batch: StepBatch, count: int, kind: LayerKind, has_levels: bool) -> Any:
        """Upload the tables of the first `count` sequences of the step."""
        if self._tables is None:  # all kinds of layers share them
            self._tables = self._upload(batch, count)
        tables, page_size = self._tables, self._wrappers.cache.page_size

        def make() -> TRTLLMDecode:
            logger.debug("table of pages %s, lengths [%d]", list(tables.pages.shape), count)
            return TRTLLMDecode(self._decode, kind, page_size, tables)

        name = self._kernel if batch.page_capacity is None else f"{self._kernel}, graph of {count}"
        decode = self._wrappers.get(kind, name, make)
        decode.tables = tables
        return decode

    def _upload(self, batch: StepBatch, count: int) -> DecodeTables:
        """Upload the tables of the first sequences of the step; in a CUDA graph, always to the same tensors."""
        device, indptr = self._wrappers.cache.device, batch.kv_page_indptr[: count + 1].numpy()
        width = int(np.diff(indptr).max())
        tables = block_tables(batch.host_page_indices[: indptr[-1]].numpy(), indptr, width)
        arrays = {"pages": tables, "kv_lens": batch.kv_lens[:count].numpy()}
        step = DecodeTables(**to_device(arrays, device))
        if batch.page_capacity is None:
            return step
        if count not in self._graph_tables:
            shapes = (count, batch.page_capacity // count), (count,)
            self._graph_tables[count] = DecodeTables(
                *(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
            )
        fixed = self._graph_tables[count]
        fixed.pages[:, :width].copy_(step.pages)
        fixed.kv_lens.copy_(step.kv_lens)
        return fixed
