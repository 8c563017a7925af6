"""What one step of the engine computes, described once for every attention method."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, UInt8
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention computes. Known when the model is built, and fixed from then on.

    Attributes:
        layer: index of the layer in the model.
        kv_layer: index of the layer of the KV cache that it reads and writes.
        num_qo_heads: query (and output) heads.
        num_kv_heads: key and value heads; divides `num_qo_heads` (grouped-query attention).
        head_dim: size of one head.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window: number of keys that a query may see, its own included; None sees all before it.
        softcap: if set, a score s becomes `softcap * tanh(s / softcap)` (Gemma 2).
        alibi_slopes: one slope for each query head; adds `-slope * distance` to the scores (Press et al. 2021).
    """

    layer: int
    kv_layer: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None


@runtime_checkable
class Attend(Protocol):
    """What a model calls for attention: the only thing it knows about keys and values."""

    def __call__(
        self,
        spec: AttentionSpec,
        q: Float[Tensor, "T Hq D"],
        k: Float[Tensor, "T Hk D"],
        v: Float[Tensor, "T Hk D"],
    ) -> Float[Tensor, "T Hq D"]: ...


@dataclass(frozen=True)
class StepBatch:
    """One step of the engine: B sequences, T new tokens, no padding.

    The tokens of all sequences lie one after the other. Sequence b owns the rows
    `qo_indptr[b]:qo_indptr[b + 1]` of everything that has T rows, and the pages
    `kv_page_indices[kv_page_indptr[b]:kv_page_indptr[b + 1]]` of the KV cache. A decode is a sequence with one
    new token, a prefill one with many, a chunk of a prefill one with some: nothing else tells them apart.
    Arrays marked "host" stay in the host's memory, where a plan is made; the others live on the model's device.

    Attributes:
        token_ids: [T] the tokens to compute.
        positions: [T] where each stands in its sequence.
        slot_mapping: [T] where its key and value go: page * page_size + offset in the page.
        token_source: [T] row of the previous step's samples that is this token, or -1 if `token_ids` has it.
        logit_rows: [R] rows whose logits are needed: the last token of each sequence that samples.
        kv_page_indices: [P] pages of all sequences, in order.
        page_positions: [P] position of each page's first key, or None while every sequence still has all its pages.
        kv_lens: [B] host. Keys of each sequence once this step's are stored.
        qo_indptr: [B+1] host. First row of each sequence, and T.
        kv_page_indptr: [B+1] host. First entry of each sequence in `kv_page_indices`, and P.
        host_page_indices: [P] host. `kv_page_indices` once more: a plan can tell whether pages have changed since
            the last step, and need not wait for the device.
        kv_last_page_len: [B] host. Keys in the last page of each sequence, 1 to page_size.
        num_decodes: the first `num_decodes` sequences have one new token each.
        page_size: keys that fit in one page.
    """

    token_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    slot_mapping: Int[Tensor, " T"]
    token_source: Int[Tensor, " T"]
    logit_rows: Int[Tensor, " R"]
    kv_page_indices: Int32[Tensor, " P"]
    page_positions: Int[Tensor, " P"] | None
    kv_lens: Int32[Tensor, " B"]
    qo_indptr: Int32[Tensor, " B+1"]
    kv_page_indptr: Int32[Tensor, " B+1"]
    host_page_indices: Int32[Tensor, " P"]
    kv_last_page_len: Int32[Tensor, " B"]
    num_decodes: int
    page_size: int

    @classmethod
    def build(
        cls,
        *,
        token_ids: Sequence[int] | np.ndarray,
        num_new: Sequence[int] | np.ndarray,
        kv_lens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
        page_size: int,
        samples: Sequence[bool] | np.ndarray | None = None,
        token_source: Sequence[int] | np.ndarray | None = None,
        page_positions: Sequence[int] | np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> "StepBatch":
        """Derive every array of the step from the few that a scheduler knows, without a loop over tokens.

        Args:
            token_ids: [T] new tokens of all sequences, one sequence after the other, decodes first.
            num_new: [B] how many of them each sequence has, at least 1.
            kv_lens: [B] keys of each sequence that will stand in its pages after this step, the new ones included.
            pages: [P] pages of all sequences in order; sequence b has `ceil(kv_lens[b] / page_size)` of them.
            page_size: keys that fit in one page.
            samples: [B] whether a sequence needs the logits of its last token; default all.
            token_source: [T] see the class; default all -1.
            page_positions: [P] see the class; default None.
            device: where the model runs.

        Raises:
            ValueError: if the arrays contradict each other.
        """
        ids, new, lens = (np.asarray(x, dtype=np.int64) for x in (token_ids, num_new, kv_lens))
        page_ids = np.asarray(pages, dtype=np.int64)
        page_counts = -(-lens // page_size)
        _require(len(new) == len(lens) > 0, f"num_new has {len(new)} sequences, kv_lens {len(lens)}")
        _require(bool((new >= 1).all()), "every sequence of a step needs at least one new token")
        _require(bool((lens >= new).all()), "a sequence has more new tokens than keys after the step")
        _require(len(ids) == int(new.sum()), f"{len(ids)} tokens given, num_new adds up to {new.sum()}")
        _require(
            len(page_ids) == int(page_counts.sum()), f"{len(page_ids)} pages given, kv_lens needs {page_counts.sum()}"
        )
        num_decodes = int(np.argmax(new > 1)) if (new > 1).any() else len(new)
        _require(bool((new[num_decodes:] > 1).all()) or num_decodes == len(new), "decodes must come first")

        qo_indptr = np.concatenate([[0], np.cumsum(new)])
        page_indptr = np.concatenate([[0], np.cumsum(page_counts)])
        # Index of each new key among the keys of its sequence: the new ones are the last.
        key_index = np.arange(len(ids)) + np.repeat(lens - qo_indptr[1:], new)
        entry = np.repeat(page_indptr[:-1], new) + key_index // page_size
        first = np.asarray(page_positions, dtype=np.int64) if page_positions is not None else None
        last_rows = qo_indptr[1:] - 1
        on_device = {
            "token_ids": ids,
            "positions": key_index if first is None else first[entry] + key_index % page_size,
            "slot_mapping": page_ids[entry] * page_size + key_index % page_size,
            "token_source": np.full(len(ids), -1) if token_source is None else np.asarray(token_source, np.int64),
            "logit_rows": last_rows if samples is None else last_rows[np.asarray(samples, dtype=bool)],
            "kv_page_indices": page_ids.astype(np.int32),
        }
        if first is not None:
            on_device["page_positions"] = first
        moved = to_device(on_device, torch.device(device))
        return cls(
            token_ids=moved["token_ids"],
            positions=moved["positions"],
            slot_mapping=moved["slot_mapping"],
            token_source=moved["token_source"],
            logit_rows=moved["logit_rows"],
            kv_page_indices=moved["kv_page_indices"],
            page_positions=moved.get("page_positions"),
            qo_indptr=_host(qo_indptr),
            kv_lens=_host(lens),
            kv_page_indptr=_host(page_indptr),
            host_page_indices=_host(page_ids),
            kv_last_page_len=_host((lens - 1) % page_size + 1),
            num_decodes=num_decodes,
            page_size=page_size,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def feed(self, samples: Int[Tensor, " S"]) -> "StepBatch":
        """Return the batch with the tokens that the previous step sampled, taken on the device.

        Args:
            samples: [S] tokens that the previous step sampled; `token_source` says which row feeds which token.
        """
        fed = torch.where(self.token_source >= 0, samples[self.token_source.clamp(min=0)], self.token_ids)
        return replace(self, token_ids=fed)

    def _repr_html_(self) -> str:
        from mini_engine.batch_html import render

        return render(self)


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Move many small arrays to a device in one copy: on a GPU each copy costs about 10 µs, however small.

    Args:
        arrays: name to array; kept alive by the tensors returned when `device` is the CPU.
        device: where to.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return unpack(pack(arrays, pin_memory=True).to(device, non_blocking=True), arrays)


def pack(arrays: dict[str, np.ndarray], pin_memory: bool) -> UInt8[Tensor, " bytes"]:
    """Lay arrays end to end, each beginning at a multiple of 8 bytes.

    Args:
        arrays: name to array, of any shapes.
        pin_memory: in memory that the GPU can read while the host goes on.
    """
    packed = torch.zeros(sum(_padded(array) for array in arrays.values()), dtype=torch.uint8, pin_memory=pin_memory)
    start = 0
    for array in arrays.values():
        packed[start : start + array.nbytes] = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        start += _padded(array)
    return packed


def unpack(packed: UInt8[Tensor, " bytes"], arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Views of what `pack` laid out, wherever that is now.

    Args:
        packed: the result of `pack`, moved.
        arrays: those that were packed, for their shapes and dtypes.
    """
    views, start = {}, 0
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views[name] = packed[start : start + array.nbytes].view(dtype).view(array.shape)
        start += _padded(array)
    return views


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // 8) * 8


def _host(array: np.ndarray) -> Int32[Tensor, " n"]:
    return torch.from_numpy(array.astype(np.int32))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
