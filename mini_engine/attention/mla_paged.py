"""Multi-head latent attention over the paged KV cache on a GPU: FlashInfer's kernels, and our own for decodes.

- Prompts without keys in the cache run un-absorbed, on FlashInfer's ragged prefill kernels (heads of 192 and 128).
- Later chunks of a prompt, and prompts whose prefix is cached, run absorbed, on FlashInfer's MLA kernels.
- Decodes run absorbed, on the same kernels (`flashinfer_mla`) or on the project's own (`triton_mla`).

`attention.mla` explains the two forms. Explained in chapter 15.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend, AttentionParts, KVCache
from mini_engine.attention.flashinfer import FA3_MIN_TOKENS, Wrappers
from mini_engine.attention.levels import ranges
from mini_engine.attention.paged import PagedBackend
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch
from mini_engine.transfer import copy_pinned, pack, to_device, unpack

Tokens = slice | Int[Tensor, " tokens"]
Run = Callable[[int, Float[Tensor, "n H D"]], Float[Tensor, "n H V"]]  # takes the layer and its queries


class FlashInferMLABackend(AttentionBackend):
    """FlashInfer's kernels for layers with latents, in pages of layout NHD.

    Every layer has the same sizes, so they share a plan. The kernels mask, normalize and append, so no part of the
    engine's attention is called.
    """

    bypasses: ClassVar[frozenset[str]] = PagedBackend.bypasses
    captures: ClassVar[bool] = True
    takes_single_queries: ClassVar[bool] = True

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        self._spec = specs[0].kind
        assert self._spec.mla is not None, "the registry accepts only layers with latents"
        self._sizes = self._spec.mla
        self._wrappers = Wrappers(cache)
        self._has_fa3 = self._wrappers.flashinfer.utils.is_sm90a_supported(cache.device)
        self._entries = [(latents.squeeze(2), rotated.squeeze(2)) for latents, rotated in cache.layers]
        self._copied = torch.cuda.Event()
        # The pool as the pages of a single sequence, in which a token's position is its slot.
        num_pages = cache.layers[0][0].shape[0]
        self._pool = (
            torch.arange(num_pages, dtype=torch.int32, device=cache.device),
            torch.tensor([0, num_pages], dtype=torch.int32, device=cache.device),
            torch.tensor([cache.page_size], dtype=torch.int32, device=cache.device),
        )

    def plan(self, batch: StepBatch) -> None:
        """Plan the step's decodes, whole prompts and later chunks, without waiting for the GPU."""
        self._slot_mapping, count = batch.slot_mapping, batch.num_decodes
        self._copied.synchronize()  # see `PagedBackend.plan`
        self._planned: list[tuple[Tokens, Run]] = []
        if count:
            self._planned.append((slice(count), self._plan_decodes(batch, count)))
        new, lens = np.diff(batch.qo_indptr.numpy())[count:], batch.kv_lens.numpy()[count:]
        for is_whole in (True, False):
            own = count + np.flatnonzero((new == lens) == is_whole)
            if len(own):
                plan = self._plan_prompts if is_whole else self._plan_chunks
                self._planned.append(plan(batch, own))
        self._copied.record()

    def append(self, layer: int, k: Float[Tensor, "T 1 L"], v: Float[Tensor, "T 1 R"]) -> None:
        if layer == 0:  # here and not in `plan`, so that a CUDA graph records it
            self._slots = self._slot_mapping.int()
            self._sequence_of_token = torch.zeros_like(self._slots)
        self._wrappers.flashinfer.page.append_paged_mla_kv_cache(
            k.squeeze(1), v.squeeze(1), self._sequence_of_token, self._slots, *self._entries[layer], *self._pool
        )

    def run(self, layer: int, q: Float[Tensor, "T H D"]) -> Float[Tensor, "T H V"]:
        if len(self._planned) == 1:
            [(_, run)] = self._planned
            return run(layer, q)
        out = q.new_empty(*q.shape[:2], self._sizes.v_head_dim)
        for tokens, run in self._planned:
            out[tokens] = run(layer, q[tokens])
        return out

    def _plan_decodes(self, batch: StepBatch, count: int) -> Run:
        """Plan the first `count` sequences, which have one query each."""
        arrays = (
            torch.arange(count + 1, dtype=torch.int32),
            batch.kv_page_indptr[: count + 1],
            batch.kv_page_indices,
            batch.kv_lens[:count],
        )
        return self._plan_absorbed(batch, "decodes", arrays, batch.page_capacity)

    def _plan_chunks(self, batch: StepBatch, own: Int[np.ndarray, " n"]) -> tuple[Tokens, Run]:
        """Plan prompts of which the cache holds the first keys."""
        indptr = batch.kv_page_indptr.numpy().astype(np.int64)
        counts = indptr[own + 1] - indptr[own]
        pages = batch.host_page_indices.numpy()[ranges(indptr[own], counts)]
        moved = to_device({"pages": pages, "tokens": _tokens_of(batch, own)}, batch.kv_page_indices.device)
        arrays = (
            _indptr(np.diff(batch.qo_indptr.numpy())[own]),
            _indptr(counts),
            moved["pages"],
            torch.from_numpy(batch.kv_lens.numpy()[own]),
        )
        return moved["tokens"], self._plan_absorbed(batch, "chunks", arrays, None)

    def _plan_absorbed(self, batch: StepBatch, name: str, arrays: tuple[Tensor, ...], page_capacity: int | None) -> Run:
        """Plan some sequences on the MLA kernels.

        Args:
            batch: the step.
            name: name of the wrapper.
            arrays: first query of each sequence, its first page, all pages (on the device), and its number of keys.
            page_capacity: see `StepBatch`; the sequences are those of a CUDA graph unless it is None.
        """
        mla, wrappers = self._wrappers.flashinfer.mla, self._wrappers
        algorithm = "fa3" if self._has_fa3 else "fa2"
        make = partial(mla.BatchMLAPagedAttentionWrapper, wrappers.workspace, backend=algorithm)
        if page_capacity is None:
            wrapper = wrappers.get(self._spec, name, make)
        else:  # it plans into memory that the captured kernels read
            count = len(arrays[3])
            buffers = {"qo_indptr": count + 1, "kv_indptr": count + 1, "kv_indices": page_capacity, "kv_len_arr": count}
            wrapper = wrappers.get(self._spec, f"{name}, graph of {count}", make, buffers)
        wrapper.plan(
            metadata=mla.MLAPlanMetadata.csr(*arrays),
            num_heads=self._spec.num_qo_heads,
            head_dim_ckv=self._sizes.kv_lora_rank,
            head_dim_kpe=self._sizes.qk_rope_head_dim,
            page_size=batch.page_size,
            causal=True,
            sm_scale=self._spec.scale,
            q_data_type=self.cache.dtype,
            kv_data_type=self.cache.dtype,
            query_layout="split",
            kv_cache_layout="split",
        )

        def run(layer: int, q: Float[Tensor, "n H D"]) -> Float[Tensor, "n H V"]:
            up = self.up_projections[layer]
            return up.values_of(wrapper.run(query=up.absorb(q), kv_cache=self._entries[layer]))

        return run

    def _plan_prompts(self, batch: StepBatch, own: Int[np.ndarray, " n"]) -> tuple[Tokens, Run]:
        """Plan prompts without keys in the cache: the step's own latents are all that they attend to."""
        new = np.diff(batch.qo_indptr.numpy())[own]
        tokens = to_device({"tokens": _tokens_of(batch, own)}, batch.positions.device)["tokens"]
        algorithm = "fa3" if self._has_fa3 and new.mean() >= FA3_MIN_TOKENS else "fa2"
        ragged = self._wrappers.flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        make = partial(ragged, self._wrappers.workspace, "NHD", backend=algorithm)
        wrapper, indptr = self._wrappers.get(self._spec, f"prompts, {algorithm}", make), _indptr(new)
        heads = self._spec.num_qo_heads
        wrapper.plan(
            indptr,
            indptr,
            heads,
            heads,
            self._spec.head_dim,
            head_dim_vo=self._sizes.v_head_dim,
            causal=True,
            sm_scale=self._spec.scale,
            q_data_type=self.cache.dtype,
            kv_data_type=self.cache.dtype,
        )
        slots = batch.slot_mapping[tokens]

        def run(layer: int, q: Float[Tensor, "n H D"]) -> Float[Tensor, "n H V"]:
            latents, rotated = (stored.flatten(0, 1)[slots] for stored in self.cache.layers[layer])
            k, v = self.up_projections[layer].expand(latents, rotated)
            return wrapper.run(q, k, v)

        return tokens, run


class TritonMLABackend(FlashInferMLABackend):
    """FlashInfer's kernels for prompts, and our own for decodes (`kernels.mla_decode`)."""

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        self._graph_memory: dict[int, UInt8[Tensor, " bytes"]] = {}
        self._being_copied: UInt8[Tensor, " bytes"] | None = None

    def _plan_decodes(self, batch: StepBatch, count: int) -> Run:
        from mini_engine.kernels.mla_decode import mla_decode, num_workers, plan_items  # Triton comes with CUDA

        device = self.cache.device
        indptr = batch.kv_page_indptr.numpy()[: count + 1]
        arrays = plan_items(batch.kv_lens.numpy()[:count], indptr, num_workers(device))
        if batch.page_capacity is None:
            work = to_device(arrays, device)
        else:  # in a CUDA graph, always at the same addresses; the pages are, too (`StepBuffers`)
            self._being_copied = packed = pack(arrays, pin_memory=device.type == "cuda")
            if count not in self._graph_memory:
                self._graph_memory[count] = torch.empty(len(packed), dtype=torch.uint8, device=device)
            copy_pinned(self._graph_memory[count], packed)
            work = unpack(self._graph_memory[count], arrays)
        pages, scale = batch.kv_page_indices, self._spec.scale

        def run(layer: int, q: Float[Tensor, "n H D"]) -> Float[Tensor, "n H V"]:
            up = self.up_projections[layer]
            return up.values_of(mla_decode(up.absorb(q), self.cache.layers[layer], pages, **work, scale=scale))

        return run


def _tokens_of(batch: StepBatch, own: Int[np.ndarray, " n"]) -> Int[np.ndarray, " tokens"]:
    """List the tokens of some sequences."""
    starts = batch.qo_indptr.numpy().astype(np.int64)
    return ranges(starts[own], starts[own + 1] - starts[own])


def _indptr(counts: Int[np.ndarray, " n"]) -> Int32[Tensor, " offsets"]:
    return torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int32))
