"""The `flashinfer` backend: FlashInfer's kernels on the paged KV cache (Ye et al. 2025).

FlashInfer splits the work in two. `plan` runs on the host once per step: from the lengths of all sequences it decides
which thread block computes which queries over which keys, so that all of them finish at about the same time. `run`
launches one kernel per layer, which reads that plan. Layers of one kind share a plan. `attention/split_kv.py` computes
the same in PyTorch. Explained in chapter 08.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend, AttentionParts, KVCache
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import round_kv

logger = logging.getLogger(__name__)
# For partial results of sequences whose keys are split among several thread blocks; all plans share it.
WORKSPACE_BYTES = 256 * 2**20
# On an H200, FlashAttention-3 is faster than FlashAttention-2 for prompts of hundreds of tokens or more, and slower for
# decodes (experiment 06). It is used if the prompts of a step have this many new tokens on average.
FA3_MIN_TOKENS = 384


class LayerKind(NamedTuple):
    """The fields of AttentionSpec that a plan depends on: layers of one kind share a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    alibi: bool
    kv_dtype: torch.dtype | None
    k_scale: float
    v_scale: float

    @classmethod
    def of(cls, spec: AttentionSpec) -> "LayerKind":
        """Return the kind of a layer.

        Raises:
            ConfigError: if the kernels do not compute this layer's ALiBi.
        """
        if spec.alibi_slopes is not None:
            own = alibi_slopes(spec.num_qo_heads).tolist()
            if spec.softcap is not None or any(abs(a - b) > 1e-6 for a, b in zip(spec.alibi_slopes, own, strict=True)):
                raise ConfigError(
                    "the flashinfer backend supports ALiBi only with the slopes of Press et al. and without a soft-cap,"
                    f" but layer {spec.layer} has other slopes or a soft-cap; use attn_backend='split_kv'"
                )
        return cls(
            spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.softcap,
            spec.alibi_slopes is not None, spec.kv_dtype, *(spec.kv_scales or (1.0, 1.0)),
        )  # fmt: skip


class FlashInferBackend(AttentionBackend):
    """FlashInfer over the paged cache, on a GPU, for both layouts, with windows, soft-cap and ALiBi.

    Decodes and prompts of a step are planned separately, because the kernels choose one tile size for all queries of a
    plan. The kernels mask, normalize, merge and append, so no part of the engine's attention is called.

    Keys are counted from the first page that a request still has. For windows and ALiBi, which depend only on
    distances, that is right if only the first pages have been evicted, but not if pages are missing in between.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, on a GPU.
        parts: the engine's replaceable parts.

    Attributes:
        slot_mapping: [T] slots of the step's keys and values, for kernels that store them themselves.
        waits_for_keys: whether a kernel that starts before the previous one has ended (programmatic dependent launch)
            waits for it before it reads any key that the step stores.

    Raises:
        ConfigError: for ALiBi slopes other than those of Press et al.
    """

    bypasses: ClassVar[frozenset[str]] = frozenset(
        {
            "append_kv", "chunk_levels", "classify_blocks", "find_levels", "mask_mod", "masked_attention",
            "merge_states", "physical_blocks", "physical_mask", "plan_work",
        }
    )  # fmt: skip
    captures: ClassVar[bool] = True
    waits_for_keys: ClassVar[bool] = True

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        self._kinds = [LayerKind.of(spec) for spec in specs]
        import flashinfer  # takes seconds, and not every machine has it

        self._flashinfer = flashinfer
        self._has_fa3 = flashinfer.utils.is_sm90a_supported(cache.device)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self._wrappers: dict[tuple[LayerKind, str], Any] = {}
        self._copied = torch.cuda.Event()
        # The pool as the pages of a single sequence, in which a token's position is its slot.
        num_pages = cache.layers[0][0].shape[0]
        self._pool = (
            torch.arange(num_pages, dtype=torch.int32, device=cache.device),
            torch.tensor([0, num_pages], dtype=torch.int32, device=cache.device),
            torch.tensor([cache.page_size], dtype=torch.int32, device=cache.device),
        )

    def plan(self, batch: StepBatch) -> None:
        """Plan the step's decodes and its prompts for each kind of layer, without waiting for the GPU.

        Raises:
            ConfigError: if the pages of a request have gaps and a layer has a window or ALiBi.
        """
        if batch.has_gaps and any(kind.window is not None or kind.alibi for kind in self._kinds):
            raise ConfigError(
                "the flashinfer backend counts keys, not positions, but a request has lost pages in between; use "
                "attn_backend='split_kv'"
            )
        self.slot_mapping = batch.slot_mapping
        num_decodes = batch.num_decodes
        if int(batch.qo_indptr[num_decodes]) > num_decodes:  # a decode with several tokens is planned as a prompt
            num_decodes = 0
        # A wrapper copies its plan to the GPU from pinned memory while the host goes on, and reuses that memory for the
        # next plan. The copy was queued before the last step: with a pipeline depth of 1 it has ended by now.
        self._copied.synchronize()
        self._planned: dict[LayerKind, list[tuple[slice, Any]]] = {kind: [] for kind in self._kinds}
        for kind, planned in self._planned.items():
            if num_decodes:
                planned.append((slice(num_decodes), self._plan_decodes(batch, num_decodes, kind)))
            if num_decodes < batch.num_sequences:
                planned.append((slice(num_decodes, None), self._plan_prompts(batch, num_decodes, kind)))
        self._copied.record()

    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        """Store keys and values in one launch, in either layout, straight from the output of the projection."""
        pages, kind = self.cache.layers[layer], self._kinds[layer]
        if kind.kv_dtype:
            k, v = round_kv(k, kind.k_scale, kind.kv_dtype), round_kv(v, kind.v_scale, kind.kv_dtype)
        if layer == 0:  # here and not in `plan`, so that a CUDA graph records it
            self._slots = self.slot_mapping.int()
            self._sequence_of_token = torch.zeros_like(self._slots)
        self._flashinfer.append_paged_kv_cache(
            k, v, self._sequence_of_token, self._slots, pages, *self._pool, kv_layout=self.cache.layout
        )

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        pages, kind = self.cache.layers[layer], self._kinds[layer]
        planned, scales = self._planned[kind], {"k_scale": kind.k_scale, "v_scale": kind.v_scale}
        out = q.new_empty(q.shape)
        if len(planned) == 1:  # views cost host time
            [(_, wrapper)] = planned
            return wrapper.run(q, pages, out=out, **scales)
        for tokens, wrapper in planned:
            wrapper.run(q[tokens], pages, out=out[tokens], **scales)
        return out

    def _plan_decodes(self, batch: StepBatch, count: int, kind: LayerKind, algorithm: str = "decode") -> Any:
        """Plan the first sequences of the step, which have one query each."""
        wrapper = self._decode_wrapper(kind, algorithm, count, batch.page_capacity)
        wrapper.plan(
            batch.kv_page_indptr[: count + 1],
            batch.kv_page_indices,
            batch.kv_last_page_len[:count],
            *kind[:3],
            batch.page_size,
            **self._options(kind),
        )
        return wrapper

    def _plan_prompts(self, batch: StepBatch, first: int, kind: LayerKind) -> Any:
        """Plan the sequences of the step from `first` on; those before it have one token each."""
        mean_tokens = (batch.num_tokens - first) / (batch.num_sequences - first)
        # FlashInfer's FlashAttention-3 has no ALiBi, and reads narrower keys only with queries of the same dtype.
        use_fa3 = self._has_fa3 and not kind.alibi and not kind.kv_dtype and mean_tokens >= FA3_MIN_TOKENS
        algorithm, prefill = "fa3" if use_fa3 else "fa2", self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make = partial(prefill, self._workspace, self.cache.layout, backend=algorithm)
        wrapper = self._wrapper(kind, algorithm, make)
        wrapper.plan(
            batch.qo_indptr[first:] - first,
            batch.kv_page_indptr[first:],
            batch.kv_page_indices,
            batch.kv_last_page_len[first:],
            *kind[:3],
            batch.page_size,
            causal=True,
            **self._options(kind),
        )
        return wrapper

    def _decode_wrapper(self, kind: LayerKind, algorithm: str, count: int, page_capacity: int | None) -> Any:
        """Return FlashInfer's decode wrapper; in a CUDA graph it plans into memory that the captured kernels read.

        On an H200, tensor cores are as fast as CUDA cores for equal lengths, and faster for unequal ones.

        Args:
            kind: the kind of layer.
            algorithm: "decode" on tensor cores, or "decode on CUDA cores".
            count: requests.
            page_capacity: the most pages that they can have in a graph; None without a graph.
        """
        decode, cores = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper, algorithm == "decode"
        make = partial(decode, self._workspace, self.cache.layout, use_tensor_cores=cores, backend="fa2")
        if page_capacity is None:
            return self._wrapper(kind, algorithm, make)
        sizes = {"indptr": count + 1, "indices": page_capacity, "last_page_len": count}
        buffers = {f"paged_kv_{name}_buffer": size for name, size in sizes.items()}
        return self._wrapper(kind, f"{algorithm}, graph of {count}", make, buffers)

    def _wrapper(
        self, kind: LayerKind, algorithm: str, make: Callable[..., Any], buffers: Mapping[str, int] | None = None
    ) -> Any:
        """Return the wrapper of a kind of layer. It is created when needed, because each takes 8 MiB on the GPU.

        Args:
            kind: the kind of layer.
            algorithm: name of the wrapper, unique within its kind.
            make: creates the wrapper.
            buffers: for a CUDA graph, names and sizes of the arrays that `make` takes.
        """
        key = kind, algorithm
        if key not in self._wrappers:
            keys, _ = self.cache.layers[0]
            logger.debug("%s for %s; keys %s %s, %s", algorithm, kind, list(keys.shape), self.cache.layout, keys.dtype)
            arrays = {name: keys.new_empty(size, dtype=torch.int32) for name, size in (buffers or {}).items()}
            self._wrappers[key] = make(use_cuda_graph=True, **arrays) if arrays else make()
        return self._wrappers[key]

    def _options(self, kind: LayerKind) -> dict[str, Any]:
        """Return the keyword arguments of all plans. FlashInfer's window does not count the query's own key."""
        return {
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "sm_scale": kind.scale,
            "pos_encoding_mode": "ALIBI" if kind.alibi else "NONE",
            "q_data_type": self.cache.dtype,
            "kv_data_type": kind.kv_dtype or self.cache.dtype,
        }
