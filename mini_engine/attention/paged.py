"""Attention over the paged KV cache on a GPU, composed of three choices that do not exclude each other.

- Prompts run on FlashInfer's kernels (chapter 08).
- Decodes run on the kernels of an object that the backend is given: FlashInfer's, TensorRT-LLM's, or the project's own
  (chapter 12).
- Prefixes that requests share may be levels of a cascade, which are read once for all sharers (chapter 09).

A kernel may support only some kinds of layers, and one that returns no LSE cannot be merged with levels. FlashInfer
computes what the other kernels do not.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.backend import AttentionBackend, AttentionParts, KVCache
from mini_engine.attention.captured import MOST_PROMPTS, MOST_TOKENS, CapturedDecodes, CapturedPrompts
from mini_engine.attention.cascade import own_pages
from mini_engine.attention.flashinfer import Decodes, FlashInferDecodes, FlashInferPrompts, LayerKind, Wrappers
from mini_engine.attention.flashinfer_cascade import FlashInferLevels
from mini_engine.attention.levels import H200_COSTS, CascadeCosts
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import merge_sinks
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.paged import round_kv


class PagedBackend(AttentionBackend):
    """FlashInfer's kernels over the paged cache, with a choice of decode kernels, and with levels or without.

    It reads both layouts, and supports windows, soft-cap, ALiBi, sinks and float8 keys. Decodes and prompts of a step
    are planned separately, because FlashInfer's kernels choose one tile size for all queries of a plan. The kernels
    mask, normalize, merge and append, so no part of the engine's attention is called.

    Keys are counted from the first page that a request still has. For windows and ALiBi, which depend only on
    distances, that is right if only the first pages have been evicted, but not if pages are missing in between. Layers
    with a window or ALiBi have no levels.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache, on a GPU.
        parts: the engine's replaceable parts.
        decodes: class of the decode kernels.
        levels: whether to use the levels of a step.
        costs: determine which levels pay off.

    Attributes:
        prompts: class of the prompts' kernels.
        captures_prompts: whether a CUDA graph may record the prompts' kernels, too.
        wrappers: FlashInfer's wrappers, and the plans of other kernels.
    """

    bypasses: ClassVar[frozenset[str]] = frozenset(
        {
            "append_kv", "chunk_levels", "classify_blocks", "find_levels", "mask_mod", "masked_attention",
            "merge_states", "physical_blocks", "physical_mask", "plan_work",
        }
    )  # fmt: skip
    captures: ClassVar[bool] = True
    takes_stored_keys: ClassVar[bool] = True
    takes_single_queries: ClassVar[bool] = True
    prompts: ClassVar[type[FlashInferPrompts]] = FlashInferPrompts
    captures_prompts: ClassVar[bool] = True

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        cache: KVCache,
        parts: AttentionParts,
        *,
        decodes: type[Decodes] = FlashInferDecodes,
        levels: bool = False,
        costs: CascadeCosts = H200_COSTS,
    ) -> None:
        super().__init__(specs, cache, parts)
        self._kinds = [LayerKind.of(spec) for spec in specs]
        self.wrappers = Wrappers(cache)
        self._prompts, self._captured = self.prompts(self.wrappers), CapturedPrompts(self.wrappers)
        self._fallback: Decodes = FlashInferDecodes(self._kinds, self.wrappers)
        able = [kind for kind, spec in zip(self._kinds, specs, strict=True) if decodes.computes(spec, cache)]
        self._decodes, self._able = decodes(able, self.wrappers), frozenset(able)
        self.waits_for_keys = decodes.waits_for_keys
        self._levels = FlashInferLevels(specs, self.wrappers, costs, parts) if levels else None
        if self._levels:
            self.planner = self._levels.planner
            self.bypasses = self.bypasses - {"chunk_levels", "find_levels"}  # type: ignore[misc]
        self.captures_steps = self.captures_prompts and all(
            kind in able
            and not kind.has_sinks
            and issubclass(decodes, CapturedDecodes)
            and self._captured.supports(kind)
            for kind in self._kinds
        )
        self._copied = torch.cuda.Event()
        # The pool as the pages of a single sequence, in which a token's position is its slot.
        num_pages = cache.layers[0][0].shape[0]
        self._pool = (
            torch.arange(num_pages, dtype=torch.int32, device=cache.device),
            torch.tensor([0, num_pages], dtype=torch.int32, device=cache.device),
            torch.tensor([cache.page_size], dtype=torch.int32, device=cache.device),
        )

    def plan(self, batch: StepBatch) -> None:
        """Plan the step's decodes, its prompts and its levels for each kind of layer, without waiting for the GPU.

        Raises:
            ConfigError: if the pages of a request have gaps and a layer has a window or ALiBi.
        """
        if batch.has_gaps and not all(map(LayerKind.may_share, self._kinds)):
            raise ConfigError(
                "the kernels count keys, not positions, but a request has lost pages in between; use "
                "attn_backend='split_kv'"
            )
        self.slot_mapping = batch.slot_mapping
        count = batch.num_decodes
        levels = batch.levels if self._levels else ()
        own = own_pages(batch) if levels else batch
        # A wrapper copies its plan to the GPU from pinned memory while the host goes on, and reuses that memory for the
        # next plan. The copy was queued before the last step: with a pipeline depth of 1 it has ended by now.
        self._copied.synchronize()
        self._decodes.begin()
        # The kinds of layers whose output is merged with that of levels.
        self._merged = frozenset(filter(LayerKind.may_share, self._kinds if levels else ()))
        self._planned = {
            kind: self._plan_kind(own if kind in self._merged else batch, count, kind)
            for kind in dict.fromkeys(self._kinds)
        }
        if self._levels and levels:
            self._levels.plan(batch, levels, self._merged)
        self._copied.record()

    def can_capture(self, batch: StepBatch, size: int) -> bool:
        return (
            size <= MOST_TOKENS
            and batch.num_sequences - batch.num_decodes <= MOST_PROMPTS
            and len(batch.host_page_indices) <= self.cache.layers[0][0].shape[0]
            and not batch.has_gaps
            and not (self._levels and batch.levels)
        )

    def plan_captured(self, batch: StepBatch, slot_mapping: Int[Tensor, " n"]) -> None:
        assert isinstance(self._decodes, CapturedDecodes), "see `captures_steps`"
        self._copied.synchronize()  # see `plan`
        self._decodes.begin()
        self.slot_mapping, self._merged = slot_mapping, frozenset()
        count, size, everything = batch.num_decodes, len(slot_mapping), slice(None)
        self._planned = {
            kind: [
                (everything, self._decodes.plan_captured(batch, count, kind, size)),
                (everything, self._captured.plan(batch, count, kind)),
            ]
            for kind in dict.fromkeys(self._kinds)
        }
        self._copied.record()

    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        """Store keys and values in one launch, in either layout, straight from the output of the projection."""
        pages, kind = self.cache.layers[layer], self._kinds[layer]
        if kind.kv_dtype:
            k, v = round_kv(k, kind.k_scale, kind.kv_dtype), round_kv(v, kind.v_scale, kind.kv_dtype)
        if layer == 0:  # here and not in `plan`, so that a CUDA graph records it
            self._slots = self.slot_mapping.int()
            self._sequence_of_token = torch.zeros_like(self._slots)
        self.wrappers.flashinfer.append_paged_kv_cache(
            k, v, self._sequence_of_token, self._slots, pages, *self._pool, kv_layout=self.cache.layout
        )

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        out = q.new_empty(q.shape)
        self.run_into(layer, q, out)
        return out

    def run_into(self, layer: int, q: Float[Tensor, "T Hq D"], out: Float[Tensor, "T Hq D"]) -> None:
        pages, kind = self.cache.layers[layer], self._kinds[layer]
        planned, scales = self._planned[kind], kind.scales
        has_levels = self._levels is not None and kind in self._merged
        if has_levels or kind.has_sinks:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            for tokens, wrapper in planned:
                wrapper.run(q[tokens], pages, out=out[tokens], lse=lse[tokens], return_lse=True, **scales)
            if self._levels is not None and has_levels:
                self._levels.merge(self.specs[layer], kind, q, out, lse)
            if kind.has_sinks:  # last, so that they count once
                merge_sinks(out, lse, self.sinks[layer])
        elif len(planned) == 1:  # views cost host time
            [(_, wrapper)] = planned
            wrapper.run(q, pages, out=out, **scales)
        else:
            for tokens, wrapper in planned:
                wrapper.run(q[tokens], pages, out=out[tokens], **scales)

    def _plan_kind(self, batch: StepBatch, count: int, kind: LayerKind) -> list[tuple[slice, Any]]:
        """Plan a kind of layer: its tokens, and what computes them."""
        planned: list[tuple[slice, Any]] = []
        has_levels = kind in self._merged
        if count:
            can = kind in self._able and (self._decodes.returns_lse or not (has_levels or kind.has_sinks))
            decodes = self._decodes if can else self._fallback
            planned.append((slice(count), decodes.plan(batch, count, kind, has_levels)))
        if count < batch.num_sequences:
            planned.append((slice(count, None), self._prompts.plan(batch, count, kind)))
        return planned
