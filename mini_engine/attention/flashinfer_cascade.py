"""The `cascade` backend on a GPU: the `flashinfer` backend with levels of shared pages.

Without levels it is the `flashinfer` backend. With levels, that backend gets the pages that no level holds, and each
level adds one launch over all queries, without a mask, whose state is merged into the output. For levels of chunks the
queries are rotated first. Explained in chapters 09 and 10.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mini_engine.attention.backend import AttentionParts, KVCache
from mini_engine.attention.cascade import QueryRotation, level_planner, own_pages
from mini_engine.attention.flashinfer import FlashInferBackend, LayerKind
from mini_engine.attention.levels import H200_COSTS, CascadeCosts
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import PrefixLevel, StepBatch

CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads per KV head


class FlashInferCascadeBackend(FlashInferBackend):
    """Cascade attention on FlashInfer's kernels.

    Layers with a window or ALiBi are flat, because their kernels count keys from a request's first page.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, on a GPU.
        parts: the engine's replaceable parts.
        costs: determine which levels pay off.
    """

    bypasses: ClassVar[frozenset[str]] = FlashInferBackend.bypasses - {"chunk_levels", "find_levels"}

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        cache: KVCache,
        parts: AttentionParts,
        costs: CascadeCosts = H200_COSTS,
    ) -> None:
        super().__init__(specs, cache, parts)
        self.planner = level_planner(
            [spec for spec, kind in zip(specs, self._kinds, strict=True) if _may_share(kind)],
            cache,
            costs,
            parts,
        )
        # For each kind of layer, the wrappers of the step's levels, and the levels that they were last planned for.
        self._level_wrappers: dict[LayerKind, list[Any]] = {}
        self._planned_levels: dict[tuple, tuple[PrefixLevel, ...]] = {}
        self._rotated = QueryRotation(specs, torch.float32, cache.device)

    def plan(self, batch: StepBatch) -> None:
        """Plan the step and its levels."""
        self._levels = batch.levels
        self._own = own_pages(batch) if self._levels else batch
        super().plan(batch)
        if self._levels:
            self._plan_levels(batch)
            self._copied.record()

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        kind = self._kinds[layer]
        if not (self._levels and _may_share(kind)):
            return super().run(layer, q)
        pages = self.cache.layers[layer]
        out, shared_out = q.new_empty(2, *q.shape)
        lse, shared_lse = q.new_empty(2, *q.shape[:2], dtype=torch.float32)
        for tokens, wrapper in self._planned[kind]:
            wrapper.run(q[tokens], pages, out=out[tokens], lse=lse[tokens], return_lse=True)
        for level in range(len(self._levels)):
            queries, wrapper = self._rotated(self.specs[layer], level, q), self._level_wrappers[kind][level]
            wrapper.run(queries, pages, out=shared_out, lse=shared_lse, return_lse=True)
            # Both logarithms are to base 2, as FlashInfer's merge expects.
            self._flashinfer.merge_state_in_place(out, lse, shared_out, shared_lse)
        return out

    def _plan_decodes(self, batch: StepBatch, count: int, kind: LayerKind, algorithm: str = "decode") -> Any:
        if not (self._levels and _may_share(kind)):
            return super()._plan_decodes(batch, count, kind)
        # Few keys are left for each request. On an H200, CUDA cores read them faster than tensor cores, whose tiles of
        # queries are mostly padding.
        if kind.num_qo_heads // kind.num_kv_heads in CUDA_CORE_GROUPS:
            algorithm = "decode on CUDA cores"
        return super()._plan_decodes(self._own, count, kind, algorithm)

    def _plan_prompts(self, batch: StepBatch, first: int, kind: LayerKind) -> Any:
        return super()._plan_prompts(self._own if _may_share(kind) else batch, first, kind)

    def _plan_levels(self, batch: StepBatch) -> None:
        """Plan every level for each kind of layer that shares pages, unless it is planned already."""
        size = None if batch.page_capacity is None else batch.num_sequences
        key = size, tuple(level.padded_groups if size else 0 for level in self._levels)
        kinds = {kind for kind in self._kinds if _may_share(kind)}
        self._level_wrappers = {
            kind: [self._level_wrapper(kind, index, level, batch) for index, level in enumerate(self._levels)]
            for kind in kinds
        }
        self._rotated.plan(self._levels)
        if self._planned_levels.get(key) is self._levels:
            return
        self._planned_levels[key] = self._levels
        for kind, wrappers in self._level_wrappers.items():
            for level, wrapper in zip(self._levels, wrappers, strict=True):
                padding = level.padded_groups - len(level.kv_last_page_len) if size else 0
                wrapper.plan(
                    pad(level.qo_indptr, (0, padding), value=batch.num_tokens),
                    pad(level.kv_page_indptr, (0, padding), value=len(level.kv_page_indices)),
                    level.kv_page_indices,
                    pad(level.kv_last_page_len, (0, padding)),
                    *kind[:3],
                    batch.page_size,
                    causal=False,
                    **self._options(kind),
                )

    def _level_wrapper(self, kind: LayerKind, index: int, level: PrefixLevel, batch: StepBatch) -> Any:
        """Return the wrapper of a level; in a CUDA graph it plans into memory that the captured kernels read.

        A level has few groups. FlashInfer's FlashAttention-2 splits the keys of each group among many thread blocks;
        its FlashAttention-3 does not.
        """
        prefill = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make = partial(prefill, self._workspace, self.cache.layout, backend="fa2")
        if batch.page_capacity is None:
            return self._wrapper(kind, f"level {index}", make)
        groups = level.padded_groups
        sizes = {"qo_indptr": groups + 1, "paged_kv_indptr": groups + 1, "paged_kv_last_page_len": groups}
        buffers = {f"{name}_buf": size for name, size in (sizes | {"paged_kv_indices": batch.page_capacity}).items()}
        name = f"level {index} of {groups} groups, graph of {batch.num_sequences}"
        return self._wrapper(kind, name, make, buffers)


def _may_share(kind: LayerKind) -> bool:
    return kind.window is None and not kind.alibi
