"""Levels of shared pages on FlashInfer's kernels, for `PagedBackend`.

Each level adds one launch over all queries, without a mask, whose state is merged into the output of the requests' own
pages. For levels of chunks the queries are rotated first. Explained in chapters 09 and 10.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mini_engine.attention.backend import AttentionParts
from mini_engine.attention.cascade import QueryRotation, level_planner
from mini_engine.attention.flashinfer import LayerKind, Wrappers
from mini_engine.attention.levels import CascadeCosts
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import PrefixLevel, StepBatch


class FlashInferLevels:
    """The levels of a step, for the kinds of layers that may share pages.

    Args:
        specs: one for each layer of the model, in order.
        wrappers: FlashInfer's wrappers.
        costs: determine which levels pay off.
        parts: the engine's replaceable parts.

    Attributes:
        planner: finds the levels of each step; None if no layer may share pages.
    """

    def __init__(
        self, specs: Sequence[AttentionSpec], wrappers: Wrappers, costs: CascadeCosts, parts: AttentionParts
    ) -> None:
        self._wrappers, cache = wrappers, wrappers.cache
        self.planner = level_planner([s for s in specs if LayerKind.of(s).may_share()], cache, costs, parts)
        # For each kind of layer, the wrappers of the step's levels.
        self._of_kind: dict[LayerKind, list[Any]] = {}
        self._planned: dict[tuple[LayerKind, str], PrefixLevel] = {}  # what each wrapper was last planned for
        self._rotated = QueryRotation(specs, torch.float32, cache.device)

    def plan(self, batch: StepBatch, levels: tuple[PrefixLevel, ...], kinds: Collection[LayerKind]) -> None:
        """Plan every level for each kind of layer, unless it is planned already."""
        self._rotated.plan(levels)
        self._of_kind = {
            kind: [self._plan_level(kind, index, level, batch) for index, level in enumerate(levels)] for kind in kinds
        }

    def merge(
        self,
        spec: AttentionSpec,
        kind: LayerKind,
        q: Float[Tensor, "T Hq D"],
        out: Float[Tensor, "T Hq D"],
        lse: Float[Tensor, "T Hq"],
    ) -> None:
        """Merge the attention of the queries over every level into `out` and `lse`, in place.

        All logarithms are to base 2, as FlashInfer's kernels return them.
        """
        pages = self._wrappers.cache.layers[spec.layer]
        shared_out, shared_lse = out.new_empty(out.shape), lse.new_empty(lse.shape)
        for index, wrapper in enumerate(self._of_kind[kind]):
            queries = self._rotated(spec, index, q)
            wrapper.run(queries, pages, out=shared_out, lse=shared_lse, return_lse=True, **kind.scales)
            self._wrappers.flashinfer.merge_state_in_place(out, lse, shared_out, shared_lse)

    def _plan_level(self, kind: LayerKind, index: int, level: PrefixLevel, batch: StepBatch) -> Any:
        """Plan a level and return its wrapper; in a CUDA graph it plans into memory that the captured kernels read.

        A level has few groups. FlashInfer's FlashAttention-2 splits the keys of each group among many thread blocks;
        its FlashAttention-3 does not.
        """
        prefill = self._wrappers.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make = partial(prefill, self._wrappers.workspace, self._wrappers.cache.layout, backend="fa2")
        name, padding, buffers = f"level {index}", 0, {}
        if batch.page_capacity is not None:
            groups = level.padded_groups
            padding = groups - len(level.kv_last_page_len)
            name = f"level {index} of {groups} groups, graph of {batch.num_sequences}"
            sizes = {"qo_indptr": groups + 1, "paged_kv_indptr": groups + 1, "paged_kv_last_page_len": groups}
            buffers = {f"{key}_buf": size for key, size in (sizes | {"paged_kv_indices": batch.page_capacity}).items()}
        wrapper = self._wrappers.get(kind, name, make, buffers)
        if self._planned.get((kind, name)) is not level:
            wrapper.plan(
                pad(level.qo_indptr, (0, padding), value=batch.num_tokens),
                pad(level.kv_page_indptr, (0, padding), value=len(level.kv_page_indices)),
                level.kv_page_indices,
                pad(level.kv_last_page_len, (0, padding)),
                *kind[:3],
                batch.page_size,
                causal=False,
                **self._wrappers.options(kind),
            )
            self._planned[kind, name] = level
        return wrapper
