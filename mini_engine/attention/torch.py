"""Backends in plain PyTorch: a reference, and a faster backend for batches of decodes on a CPU.

`TorchBackend` attends to one sequence after the other. Every other backend is tested against it.
`PaddedTorchBackend` computes a step's decodes in one padded call. Explained in chapter 04.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.backend import AttentionBackend, AttentionParts, KVCache
from mini_engine.attention.masks import MaskMod
from mini_engine.attention.mla import absorbed_attention, unabsorbed_attention
from mini_engine.attention.naive import alibi_bias, fused_attention
from mini_engine.attention.spec import AttentionSpec
from mini_engine.attention.state import AttentionState, chunked_attention, with_sinks
from mini_engine.batch import StepBatch
from mini_engine.kv_cache.paged import round_kv
from mini_engine.transfer import to_device


@dataclass(frozen=True)
class SequencePlan:
    """The queries of one sequence of a step and the keys of that sequence, ready for attention.

    Attributes:
        tokens: the queries, as rows of the step's tokens.
        slots: slots of the keys in the pool; a slice if they are consecutive, which makes a view instead of a copy.
        query_positions: [n] position of each query.
        key_positions: [m] position of each key.
        masks: for each window of the model's layers, [n, m] the keys that each query sees; None: all.
    """

    tokens: slice
    slots: slice | Int[Tensor, " m"]
    query_positions: Int[Tensor, " n"]
    key_positions: Int[Tensor, " m"]
    masks: dict[int | None, Bool[Tensor, "n m"] | None]


class TorchBackend(AttentionBackend):
    """The reference: gather the keys of each sequence and attend to them, one sequence at a time.

    It runs anywhere, in any dtype, with every feature of AttentionSpec. It does not read keys in blocks, so it bypasses
    the parts that handle blocks. Layers with sinks need the LSE, which `masked_attention` does not return, so their
    attention is computed as states.
    """

    bypasses: ClassVar[frozenset[str]] = frozenset(
        {"chunk_levels", "classify_blocks", "find_levels", "physical_blocks", "physical_mask", "plan_work"}
    )

    # The keys of longer sequences are processed in KV tiles of this many, which bounds the size of the score matrix.
    KEY_CHUNK = 8192

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        windows = {spec.window for spec in specs}
        self._mask_mods: dict[int | None, MaskMod] = {window: parts.mask_mod(window) for window in windows}

    def plan(self, batch: StepBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        self._sequences = self._plan_sequences(batch, range(batch.num_sequences))

    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk Dv"]) -> None:
        spec, slots = self.specs[layer], tuple(pages.flatten(0, 1) for pages in self.cache.layers[layer])
        if spec.kv_dtype is not None:
            scales = spec.kv_scales or (1.0, 1.0)
            k, v = (round_kv(x, scale, spec.kv_dtype) for x, scale in zip((k, v), scales, strict=True))
        if k.dtype.itemsize == 1:  # on a CPU, PyTorch copies rows of bytes, but none of float8
            slots, k, v = tuple(x.view(torch.uint8) for x in slots), k.view(torch.uint8), v.view(torch.uint8)
        self.parts.append_kv(*slots, k, v, self._slot_mapping)

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq Dv"]:
        spec = self.specs[layer]
        out = q.new_empty(*q.shape[:2], spec.value_dim)
        for sequence in self._sequences:
            out[sequence.tokens] = self._attend(spec, sequence, q[sequence.tokens])
        return out

    def _attend(
        self, spec: AttentionSpec, sequence: SequencePlan, q: Float[Tensor, "n Hq D"]
    ) -> Float[Tensor, "n Hq Dv"]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = _options(spec, sequence, q)
            if spec.has_sinks or len(k) > self.KEY_CHUNK:
                return self._merge_sinks(spec, self._in_tiles(q, k, v, options)).out.to(q.dtype)
            return self.parts.masked_attention(q, k, v, **options)

        entry = self._gather(spec, sequence, q.dtype)
        if spec.mla is None:
            return attend(q, *entry)
        is_whole = 1 < len(q) == len(sequence.key_positions)  # a prompt without keys in the cache before it
        form = unabsorbed_attention if is_whole else absorbed_attention
        return form(self.up_projections[spec.layer], q, *entry, attend)

    def _merge_sinks(self, spec: AttentionSpec, state: AttentionState) -> AttentionState:
        """Merge the state over all keys with the sinks, if the layer has any."""
        return with_sinks(state, self.sinks[spec.layer]) if spec.has_sinks else state

    def _state(self, spec: AttentionSpec, sequence: SequencePlan, q: Float[Tensor, "n Hq D"]) -> AttentionState:
        return self._in_tiles(q, *self._gather(spec, sequence, q.dtype), _options(spec, sequence, q))

    def _in_tiles(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> AttentionState:
        return chunked_attention(q, k, v, chunk_size=self.KEY_CHUNK, merge=self.parts.merge_states, **options)

    def _gather(
        self, spec: AttentionSpec, sequence: SequencePlan, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "m Hk D"], Float[Tensor, "m Hk Dv"]]:
        """Read a sequence's keys and values, or with MLA its latents and rotated keys, from their pages."""
        k, v = (pages.flatten(0, 1)[sequence.slots] for pages in self.cache.layers[spec.layer])
        return widened(spec, k, v, dtype)

    def _plan_sequences(self, batch: StepBatch, sequences: range) -> list[SequencePlan]:
        """Plan some sequences of a step, one at a time."""
        first_token, first_page = batch.qo_indptr.tolist(), batch.kv_page_indptr.tolist()
        kv_lens = batch.kv_lens.tolist()
        count_up = torch.arange(max(kv_lens), device=batch.positions.device)
        nothing = torch.zeros((), dtype=torch.long, device=batch.positions.device)  # no mask depends on row or head
        plans = []
        for b in sequences:
            tokens, entries = slice(*first_token[b : b + 2]), slice(*first_page[b : b + 2])
            query_positions, key_positions = batch.positions[tokens], count_up[: kv_lens[b]]
            if batch.page_positions is not None:
                key_positions = keys_of_pages(batch.page_positions[entries], batch.page_size, kv_lens[b])
            is_decode = tokens.stop - tokens.start == 1
            num_visible = kv_lens[b] if batch.page_positions is None else math.inf  # pages may be missing in between
            masks = {
                window: None
                if is_decode and (window is None or num_visible <= window)
                else mask_mod(nothing, nothing, query_positions[:, None], key_positions)
                for window, mask_mod in self._mask_mods.items()
            }
            slots = _slots(batch, entries, kv_lens[b])
            plans.append(SequencePlan(tokens, slots, query_positions, key_positions, masks))
        return plans


class ChunkedBackend(TorchBackend):
    """The reference with KV tiles so small that almost every sequence needs `merge_states` (chapter 02)."""

    KEY_CHUNK = 64


class PaddedTorchBackend(TorchBackend):
    """Computes prompts as the reference does, and the decodes of a step in one call, padded to the longest decode.

    A loop over sequences calls a dozen small operators for each sequence in each layer. A decode has one query, so
    padding costs less than the loop if the decodes are short and have similar lengths. The padded call copies the keys
    of all decodes before it reads them, while the loop copies and reads one sequence after the other. With 8 or 32
    decodes of one and a half times `MAX_BYTES` in SmolLM2-135M's shape, the loop is 1.4 to 2.4 times as fast (AMD EPYC,
    2 threads). A likely reason is that the copy of one sequence stays in a core's cache. Decodes go through the loop,
    too, if a layer has a soft-cap, ALiBi slopes or MLA, which the padded call does not implement.

    The padded call does not use `masked_attention`, so that part is listed as bypassed although prompts use it.
    """

    bypasses: ClassVar[frozenset[str]] = TorchBackend.bypasses | {"masked_attention"}

    MAX_BYTES = 2**20  # keys and values of one decode in one layer, up to which decodes are padded

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        super().__init__(specs, cache, parts)
        bytes_per_key = max(spec.entry_size for spec in specs) * cache.dtype.itemsize
        self._max_keys = self.MAX_BYTES // bytes_per_key
        self._may_pad = all(spec.softcap is spec.alibi_slopes is spec.mla is None for spec in specs)

    def plan(self, batch: StepBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        self._decodes, num_padded = None, 0
        if self._may_pad and worth_padding(batch, self._max_keys):
            self._decodes, num_padded = PaddedDecodes.of(batch, self._mask_mods), batch.num_decodes
        self._sequences = self._plan_sequences(batch, range(num_padded, batch.num_sequences))

    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq Dv"]:
        out = super().run(layer, q)
        if self._decodes is not None:
            spec, count = self.specs[layer], len(self._decodes.pages)
            sinks = self.sinks[spec.layer] if spec.has_sinks else None
            out[:count] = self._decodes.attend(spec, q[:count], *self.cache.layers[spec.layer], sinks)
        return out


def worth_padding(batch: StepBatch, max_keys: int) -> bool:
    """Return whether to pad a step's decodes: at least two, of one token each, and padding at most doubles the pages.

    Args:
        batch: the step.
        max_keys: longest sequence to pad to.
    """
    page_counts = torch.diff(batch.kv_page_indptr)[: batch.num_decodes]
    if batch.num_decodes < 2 or int(batch.qo_indptr[batch.num_decodes]) > batch.num_decodes:
        return False
    longest = int(page_counts.max())
    return longest * batch.page_size <= max_keys and longest * batch.num_decodes <= 2 * int(page_counts.sum())


@dataclass(frozen=True)
class PaddedDecodes:
    """The decodes of a step, each padded to the longest of them.

    Attributes:
        pages: [D, W] pages of each decode; its last page is repeated up to the longest decode's count.
        padding: decode and key index of each slot after a sequence's last key. Such a slot may hold anything, NaN
            included.
        visible: for each window, [D, 1, 1, m] which of the longest sequence's m keys each decode sees.
    """

    pages: Int[Tensor, "D W"]
    padding: tuple[Int[Tensor, " n"], Int[Tensor, " n"]]
    visible: dict[int | None, Bool[Tensor, "D 1 1 m"]]

    @classmethod
    def of(cls, batch: StepBatch, mask_mods: Mapping[int | None, MaskMod]) -> "PaddedDecodes":
        """Pad the decodes of a step, without a loop over them.

        Args:
            batch: a step with decodes.
            mask_mods: for each window, which keys a query sees.
        """
        first_pages = batch.kv_page_indptr.numpy()[: batch.num_decodes + 1, None]
        kv_lens = batch.kv_lens.numpy()[: batch.num_decodes, None]
        longest, device = int(kv_lens.max()), batch.kv_page_indices.device
        entries = first_pages[:-1] + np.arange(-(-longest // batch.page_size))
        held = np.arange(longest) < kv_lens
        moved = to_device(
            {
                "entries": np.minimum(entries, first_pages[1:] - 1),
                "held": held,
                "padding": np.stack(np.nonzero(~held)),
            },
            device,
        )
        key_positions = torch.arange(longest, device=device)[None]
        if batch.page_positions is not None:
            starts, offsets = batch.page_positions[moved["entries"]], torch.arange(batch.page_size, device=device)
            key_positions = (starts[:, :, None] + offsets).flatten(1)[:, :longest]
        nothing = torch.zeros((), dtype=torch.long, device=device)  # no mask depends on row or head
        visible = {}
        for window, mask_mod in mask_mods.items():
            mask = moved["held"]
            if window is not None:
                mask = mask & mask_mod(nothing, nothing, batch.positions[: batch.num_decodes, None], key_positions)
            visible[window] = mask[:, None, None]
        padded_decode, padded_key = moved["padding"]
        return cls(batch.kv_page_indices[moved["entries"]].long(), (padded_decode, padded_key), visible)

    def attend(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "D Hq d"],
        k_pages: Float[Tensor, "pages P Hk d"],
        v_pages: Float[Tensor, "pages P Hk d"],
        sinks: Float[Tensor, " Hq"] | None = None,
    ) -> Float[Tensor, "D Hq d"]:
        """Compute attention; the heads of a group are the rows of their KV head, as in `sdpa_attention`."""
        mask = self.visible[spec.window]
        keys = slice(mask.shape[-1])  # a page may be longer than every sequence (chapter 04)
        k, v = (x[:, keys][self.pages].flatten(1, 2)[:, keys] for x in (k_pages, v_pages))
        k, v = widened(spec, k, v, q.dtype)
        for x in (k, v):
            x[self.padding] = 0
        if sinks is not None:  # one more key, whose score is 0 plus the sink, and whose value is 0
            k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
            of_heads = len(q), spec.num_kv_heads, spec.group, -1
            mask = torch.cat((mask.expand(of_heads), sinks.to(q.dtype).view(of_heads[1:]).expand(of_heads)), dim=-1)
        queries = q.unflatten(1, (spec.num_kv_heads, -1))
        return fused_attention(queries, k.transpose(1, 2), v.transpose(1, 2), scale=spec.scale, mask=mask).flatten(1, 2)


def widened(spec: AttentionSpec, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert stored keys and values to the dtype of the queries, and multiply them by their scales."""
    k, v = k.to(dtype), v.to(dtype)
    return (k * spec.kv_scales[0], v * spec.kv_scales[1]) if spec.kv_scales else (k, v)


def _options(spec: AttentionSpec, sequence: SequencePlan, q: Float[Tensor, "n Hq D"]) -> dict[str, Any]:
    """Return the keyword arguments of `masked_attention`."""
    bias = None
    if spec.alibi_slopes is not None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        slopes = torch.tensor(spec.alibi_slopes, dtype=dtype, device=q.device)
        bias = alibi_bias(slopes, sequence.query_positions, sequence.key_positions)
    return {"scale": spec.scale, "mask": sequence.masks[spec.window], "bias": bias, "softcap": spec.softcap}


def keys_of_pages(starts: Int[Tensor, " pages"], page_size: int, num_keys: int) -> Int[Tensor, " m"]:
    """List the slots or the positions of the first keys in some pages, counting up from the start of each page."""
    return (starts[:, None] + torch.arange(page_size, device=starts.device)).flatten()[:num_keys]


def _slots(batch: StepBatch, entries: slice, num_keys: int) -> slice | Int[Tensor, " m"]:
    """Return slots of the first keys in some pages of `kv_page_indices`: a slice if the pages are consecutive."""
    pages = batch.host_page_indices.numpy()[entries]
    if (np.diff(pages) == 1).all():
        first = int(pages[0]) * batch.page_size
        return slice(first, first + num_keys)
    return keys_of_pages(batch.kv_page_indices[entries].long() * batch.page_size, batch.page_size, num_keys)
