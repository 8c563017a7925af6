"""Plans at fixed addresses, for a CUDA graph that computes steps of any prompts and decodes (`step_graphs.py`).

A graph launches the same kernels with the same arguments in every replay. So its kernels must have the same number of
thread blocks whatever the lengths, and read from memory what each block computes. FlashInfer's FlashAttention-3 does,
and so does our own decode kernel.
"""

from abc import abstractmethod
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor

from mini_engine.attention.flashinfer import Decodes, LayerKind, Wrappers
from mini_engine.batch import StepBatch

MOST_PROMPTS, MOST_TOKENS = 32, 2048  # of a step that a graph computes
ZERO = np.zeros(1, dtype=np.int32)


class CapturedDecodes(Decodes):
    """Kernels that compute the decodes of a step, also as a part of a graph of any steps."""

    @abstractmethod
    def plan_captured(self, batch: StepBatch, count: int, kind: LayerKind, size: int) -> Any:
        """Plan as `plan` does, for a graph of `size` tokens, which is replayed for any count.

        The queries that `run` takes are those of the whole step.
        """


class CapturedPrompts:
    """FlashInfer's FlashAttention-3 for the prompts of captured steps.

    Args:
        wrappers: FlashInfer's wrappers.
    """

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers
        self._has_fa3 = wrappers.flashinfer.utils.is_sm90a_supported(wrappers.cache.device)

    def supports(self, kind: LayerKind) -> bool:
        """Return whether the kernel computes a kind of layer; see `FlashInferPrompts`."""
        return self._has_fa3 and not kind.alibi and not kind.kv_dtype

    def plan(self, batch: StepBatch, first: int, kind: LayerKind) -> Any:
        """Plan the sequences of a step from `first` on. The queries that `run` takes are those of the whole step."""
        wrappers, name = self._wrappers, "fa3, graph"
        is_new = (kind, name) not in wrappers.made
        prefill = wrappers.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make = partial(prefill, wrappers.workspace, wrappers.cache.layout, backend="fa3")
        buffers = {
            "qo_indptr_buf": MOST_PROMPTS + 1, "paged_kv_indptr_buf": MOST_PROMPTS + 1,
            "paged_kv_last_page_len_buf": MOST_PROMPTS, "paged_kv_indices_buf": wrappers.cache.layers[0][0].shape[0],
        }  # fmt: skip
        wrapper = wrappers.get(kind, name, make, buffers)
        pages = batch.kv_page_indptr[first:].numpy()
        indices = batch.kv_page_indices[pages[0] :]
        if is_new:  # the first plan determines for how many tokens there is room
            self._plan(wrapper, kind, batch.page_size, indices[:0], np.array([0, MOST_TOKENS]), *([ZERO] * 3))
        self._plan(
            wrapper, kind, batch.page_size, indices, batch.qo_indptr[first:].numpy(), pages - pages[0],
            batch.kv_last_page_len[first:].numpy(), batch.kv_lens[first:].numpy(),
        )  # fmt: skip
        return wrapper

    def _plan(
        self, wrapper: Any, kind: LayerKind, page_size: int, indices: Int32[Tensor, " P"],
        qo_indptr: np.ndarray, kv_indptr: np.ndarray, last_page_len: np.ndarray, kv_lens: np.ndarray,
    ) -> None:  # fmt: skip
        """Plan with empty prompts at the end, from pinned memory, because other copies may wait for the device."""
        on_gpu = self._wrappers.cache.device.type == "cuda"
        rows = torch.zeros(4, MOST_PROMPTS + 1, dtype=torch.int32, pin_memory=on_gpu)
        arrays, ends = (qo_indptr, kv_indptr, last_page_len, kv_lens), (qo_indptr[-1], kv_indptr[-1], 0, 0)
        for row, own, end in zip(rows.numpy(), arrays, ends, strict=True):
            row[: len(own)], row[len(own) :] = own, end
        qo, kv, last, lens = rows
        wrapper.plan(
            qo, kv, indices, last[:-1], *kind[:3], page_size, causal=True, seq_lens=lens[:-1],
            **self._wrappers.options(kind),
        )  # fmt: skip
