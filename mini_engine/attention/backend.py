"""Attention backends: how each method reads the one description of a step.

A backend is built once with the specs of all layers. Then, for each step, `plan(batch)` once, and for each layer
`append(spec, k, v)` and `run(spec, q)`. The model sees `attend`, which is the last two.
"""

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Protocol, TypedDict, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mini_engine.attention.decode_batch import DecodeBatch, worth_padding
from mini_engine.attention.naive import alibi_bias, sdpa_attention
from mini_engine.attention.state import chunked_attention
from mini_engine.batch import Attend, AttentionSpec, StepBatch
from mini_engine.errors import ConfigError
from mini_engine.parts import Parts


@runtime_checkable
class KVCache(Protocol):
    """What a backend needs of a KV cache."""

    layers: list[tuple[Tensor, Tensor]]
    page_size: int


@runtime_checkable
class AttentionBackend(Protocol):
    """One way to compute attention over the KV cache.

    Attributes:
        bypasses: names of the parts that it has no use for.
    """

    bypasses: ClassVar[frozenset[str]]

    def plan(self, batch: StepBatch) -> None:
        """Prepare a step on the host. Called once per step, before the first layer."""
        ...

    def append(self, spec: AttentionSpec, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        """Store the step's keys and values of one layer in the cache."""
        ...

    def run(self, spec: AttentionSpec, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        """Attend with the step's queries to all keys that each may see, the appended ones included."""
        ...


def attend_with(backend: AttentionBackend) -> Attend:
    """Return what a model calls: store the keys, then attend."""

    def attend(
        spec: AttentionSpec, q: Float[Tensor, "T Hq D"], k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]
    ) -> Float[Tensor, "T Hq D"]:
        backend.append(spec, k, v)
        return backend.run(spec, q)

    return attend


# Backends are imported when they are asked for: some need packages that not every machine has.
BACKENDS = {
    "torch": "mini_engine.attention.backend:TorchBackend",
    "chunked": "mini_engine.attention.backend:ChunkedBackend",
    "flex": "mini_engine.attention.flex:FlexBackend",
}


def create_backend(name: str, specs: Sequence[AttentionSpec], cache: KVCache, parts: Parts) -> AttentionBackend:
    """Build the backend of that name.

    Args:
        name: a key of BACKENDS.
        specs: one for each layer of the model.
        cache: where keys and values are kept.
        parts: the engine's replaceable parts.

    Raises:
        ConfigError: if there is no such backend.
    """
    return _backend(name)(specs, cache, parts)


def bypassed_parts(name: str) -> frozenset[str]:
    """The parts of the engine that the backend of that name has no use for.

    Raises:
        ConfigError: if there is no such backend.
    """
    return _backend(name).bypasses


def _backend(name: str) -> Any:
    check_backend(name)
    module, _, attribute = BACKENDS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def check_backend(name: str) -> None:
    """Raise ConfigError if there is no backend of that name."""
    if name not in list(BACKENDS):  # compared, not looked up: a name that is no string may have no hash
        raise ConfigError(f"unknown attention backend {name!r}; choose one of: {', '.join(BACKENDS)}")


class _How(TypedDict):
    """The keyword arguments that all forms of attention share."""

    scale: float
    mask: Bool[Tensor, "n m"] | None
    bias: Float[Tensor, "Hq n m"] | None
    softcap: float | None


class TorchBackend:
    """Plain PyTorch: gather each sequence's keys and attend to them, one sequence at a time.

    The reference for all other backends. It runs anywhere, in any dtype, with every feature of AttentionSpec. It knows
    no blocks of keys, so the parts that deal with those are bypassed. Decodes of similar lengths are attended to in one
    padded call (`DecodeBatch`), unless `masked_attention` is the reader's, which takes one sequence at a time.
    """

    bypasses: ClassVar[frozenset[str]] = frozenset({"classify_blocks", "physical_blocks", "physical_mask"})

    # Longer sequences are attended to in chunks of this many keys, which bounds the score matrix.
    KEY_CHUNK = 8192

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: Parts) -> None:
        self._pages = cache.layers
        self._layers = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in cache.layers]
        self._windows = {spec.window for spec in specs}
        self._parts = parts
        plain = all(spec.softcap is None and spec.alibi_slopes is None for spec in specs)
        self._may_batch = plain and parts.masked_attention is sdpa_attention

    def plan(self, batch: StepBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        bounds = batch.qo_indptr.tolist()
        self._rows = [slice(a, b) for a, b in pairwise(bounds)]
        self._keys = _key_index(batch)
        self._query_positions = [batch.positions[rows] for rows in self._rows]
        self._key_positions = _key_positions(batch)
        self._masks = {window: self._visible(batch, window) for window in self._windows}
        self._decodes = None
        if self._may_batch and worth_padding(batch, self.KEY_CHUNK):
            self._decodes = DecodeBatch.of(batch, {window: self._parts.mask_mod(window) for window in self._windows})

    def _visible(self, batch: StepBatch, window: int | None) -> list[Bool[Tensor, "n m"] | None]:
        """Masks of all sequences for one kind of layer; None where a query sees every key."""
        mask_mod = self._parts.mask_mod(window)
        nothing = torch.zeros((), dtype=torch.long, device=batch.positions.device)  # no mask depends on row or head
        masks: list[Tensor | None] = []
        for rows, queries, keys, kv_len in zip(
            self._rows, self._query_positions, self._key_positions, batch.kv_lens.tolist(), strict=True
        ):
            sees_all = rows.stop - rows.start == 1 and (window is None or kv_len <= window)
            masks.append(None if sees_all else mask_mod(nothing, nothing, queries[:, None], keys))
        return masks

    def append(self, spec: AttentionSpec, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        k_cache, v_cache = self._layers[spec.kv_layer]
        self._parts.append_kv(k_cache, v_cache, k, v, self._slot_mapping)

    def run(self, spec: AttentionSpec, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        k_pages, v_pages = self._pages[spec.kv_layer]
        out = torch.empty_like(q)
        first = 0
        if self._decodes is not None:
            first = len(self._decodes.pages)
            out[:first] = self._decodes.attend(spec, q[:first], k_pages, v_pages)
        for b in range(first, len(self._rows)):
            rows, (pages, kv_len) = self._rows[b], self._keys[b]
            k, v = (x[pages].flatten(0, 1)[:kv_len] for x in (k_pages, v_pages))
            bias = None
            if spec.alibi_slopes is not None:
                slopes = torch.tensor(
                    spec.alibi_slopes, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
                )
                bias = alibi_bias(slopes, self._query_positions[b], self._key_positions[b])
            how = _How(scale=spec.scale, mask=self._masks[spec.window][b], bias=bias, softcap=spec.softcap)
            if len(k) <= self.KEY_CHUNK:
                out[rows] = self._parts.masked_attention(q[rows], k, v, **how)
            else:
                merge = self._parts.merge_states
                out[rows] = chunked_attention(q[rows], k, v, chunk_size=self.KEY_CHUNK, merge=merge, **how).out
        return out


class ChunkedBackend(TorchBackend):
    """The torch backend with chunks so small that every conversation goes through `merge_states` (chapter 02)."""

    KEY_CHUNK = 64


def _key_index(batch: StepBatch) -> list[tuple[slice | Tensor, int]]:
    """The pages of each sequence and its number of keys. Pages that follow one another are a slice: no gather then."""
    lens = batch.kv_lens.tolist()
    each = batch.kv_page_indices.split(torch.diff(batch.kv_page_indptr).tolist())
    if not batch.kv_page_indices.is_cpu:
        return list(zip(each, lens, strict=True))
    index: list[tuple[slice | Tensor, int]] = []
    for pages, kv_len in zip(each, lens, strict=True):
        first, count = int(pages[0]), len(pages)
        in_a_row = count == 1 or bool((pages.diff() == 1).all())
        index.append((slice(first, first + count) if in_a_row else pages, kv_len))
    return index


def _key_positions(batch: StepBatch) -> list[Tensor]:
    """Positions of the keys of each sequence."""
    device = batch.positions.device
    if batch.page_positions is None:
        longest = torch.arange(int(batch.kv_lens.max()), device=device)
        return [longest[:n] for n in batch.kv_lens.tolist()]
    offsets = torch.arange(batch.page_size, device=device)
    first = batch.page_positions.split(torch.diff(batch.kv_page_indptr).tolist())
    return [(f[:, None] + offsets).flatten()[:n] for f, n in zip(first, batch.kv_lens.tolist(), strict=True)]
