"""A stand-in for the package `flashinfer` on machines without a GPU: its functions as its documentation defines them.

It takes the same arguments and computes with naive attention, so the arrays that the engine passes are tested without
the kernels. The kernels themselves are tested on a GPU, in test_flashinfer.py.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mini_engine import rope
from mini_engine.attention.naive import alibi_bias, alibi_slopes, attention_mask, masked_attention
from mini_engine.attention.state import AttentionState, attention_state, merge_all, merge_states
from mini_engine.kernels.flash_decoding import MOST_SPLITS, TILE, DecodeWork, FlashDecoding
from mini_engine.sampling import gumbel_noise


class Wrapper:
    """The common part of the wrappers for decodes and for prompts.

    Attributes:
        plans: number of plans of all wrappers without a mask, which levels use.
    """

    plans: ClassVar[int] = 0
    room: int | None = None  # tokens of a graph

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        self.layout, self.options = kv_layout, options

    def keep(
        self, qo_indptr: Tensor, kv_indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int,
        causal: bool, how: dict,
    ) -> None:  # fmt: skip
        arrays = (qo_indptr, kv_indptr, indices, last_page_len)
        assert {x.dtype for x in arrays} == {torch.int32}
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1 and qo_indptr[0] == 0
        assert last_page_len.min() >= (1 if causal else 0) and last_page_len.max() <= page_size
        if not causal:
            assert how["window_left"] == -1 and how["pos_encoding_mode"] == "NONE"
            Wrapper.plans += 1
        self.arrays = tuple(x.clone() for x in arrays)
        self.page_size, self.causal, self.how = page_size, causal, how

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None = None,
        return_lse: bool = False, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        qo_indptr, kv_indptr, indices, last_page_len = self.arrays
        assert len(q) == qo_indptr[-1] or qo_indptr[-1] < len(q) <= (self.room or 0)
        assert q.dtype == self.how["q_data_type"]
        assert pages[0].dtype == self.how["kv_data_type"] and out.shape == q.shape
        assert (lse is not None and lse.shape == q.shape[:2]) == return_lse
        window = None if self.how["window_left"] == -1 else self.how["window_left"] + 1
        for b, last in enumerate(last_page_len.tolist()):
            tokens = slice(*qo_indptr[b : b + 2].tolist())
            own = indices[slice(*kv_indptr[b : b + 2].tolist())].long()
            kv_len = max(len(own) - 1, 0) * self.page_size + last
            k, v = (x[own] if self.layout == "NHD" else x[own].transpose(1, 2) for x in pages)
            k, v = (x.flatten(0, 1)[:kv_len].to(q.dtype) * n for x, n in ((k, k_scale), (v, v_scale)))
            mask = bias = None
            if self.causal:
                keys = torch.arange(kv_len)
                queries = keys[kv_len - (tokens.stop - tokens.start) :]
                mask = attention_mask(queries, keys, window)
                if self.how["pos_encoding_mode"] == "ALIBI":
                    bias = alibi_bias(alibi_slopes(q.shape[1]), queries, keys)
            state = attention_state(
                q[tokens], k, v, scale=self.how["sm_scale"], mask=mask, bias=bias, softcap=self.how["logits_soft_cap"]
            )
            out[tokens] = state.out.to(out.dtype)
            if lse is not None:
                lse[tokens] = (state.lse / math.log(2)).to(lse.dtype)
        return out if lse is None else (out, lse)


class Decode(Wrapper):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        qo: int,
        kv: int,
        dim: int,
        page_size: int,
        **how: Any,
    ) -> None:
        one_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self.keep(one_each, indptr, indices, last_page_len, page_size, True, how)


class Prefill(Wrapper):
    """The wrapper for prompts, and for levels. For prompts in a CUDA graph, every plan has the same addresses."""

    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, qo: int, kv: int, dim: int,
        page_size: int, *, causal: bool, seq_lens: Tensor | None = None, **how: Any,
    ) -> None:  # fmt: skip
        if seq_lens is None:
            self.keep(qo_indptr, indptr, indices, last_page_len, page_size, causal, how)
            return
        assert self.options["backend"] == "fa3" and self.options["use_cuda_graph"] and causal
        named = {"qo_indptr": qo_indptr, "paged_kv_indptr": indptr, "paged_kv_last_page_len": last_page_len}
        for name, array in named.items():
            buffer = self.options[f"{name}_buf"]
            assert array.dtype == buffer.dtype == torch.int32
            buffer[:] = torch.full_like(buffer, -1)
            buffer[:] = array  # of the same size
        self.options["paged_kv_indices_buf"][: len(indices)] = indices
        assert torch.equal((indptr.diff() - 1).clamp(min=0) * page_size + last_page_len, seq_lens)
        assert (qo_indptr.diff() <= seq_lens).all() or self.room is None
        self.room = self.room or int(qo_indptr[-1])
        assert qo_indptr[-1] <= self.room
        self.page_size, self.causal, self.how, self.total = page_size, causal, how, int(qo_indptr[-1])
        names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
        self.arrays = tuple(self.options[f"{name}_buf"] for name in names)


class Ragged:
    """The wrapper for prompts whose keys are given as tensors, and whose values may have another size."""

    def __init__(self, workspace: Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "NHD" and backend in ("fa2", "fa3")

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, qo: int, kv: int, head_dim_qk: int, *, head_dim_vo: int,
        causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32 and torch.equal(qo_indptr, kv_indptr) and causal
        self.indptr, self.scale, self.sizes = qo_indptr.clone(), sm_scale, (qo, kv, head_dim_qk, head_dim_vo)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert (*q.shape[1:], v.shape[2]) == (self.sizes[0], *self.sizes[2:]) and len(q) == len(k) == self.indptr[-1]
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        outputs = []
        for first, end in pairwise(self.indptr.tolist()):
            positions, values = torch.arange(end - first), F.pad(v[first:end], (0, k.shape[2] - v.shape[2]))
            mask = attention_mask(positions, positions)
            own = masked_attention(q[first:end], k[first:end], values, scale=self.scale, mask=mask)
            outputs.append(own[..., : v.shape[2]])
        return torch.cat(outputs)


class MLA:
    """The wrapper for absorbed latent attention."""

    def __init__(
        self, workspace: Tensor, use_cuda_graph: bool = False, backend: str = "auto", **buffers: Tensor
    ) -> None:
        assert backend in ("fa2", "fa3") and use_cuda_graph == bool(buffers)
        self.buffers = buffers

    def plan(
        self, *, metadata: tuple[Tensor, ...], num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int,
        causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype, query_layout: str,
        kv_cache_layout: str,
    ) -> None:  # fmt: skip
        qo_indptr, kv_indptr, indices, kv_lens = metadata
        assert {x.dtype for x in metadata} == {torch.int32} and query_layout == kv_cache_layout == "split" and causal
        assert torch.equal(-(-kv_lens // page_size), kv_indptr.diff()) and kv_indptr[-1] <= len(indices)
        assert len(qo_indptr) == len(kv_indptr) == len(kv_lens) + 1 and qo_indptr[0] == kv_indptr[0] == 0
        for name, array in zip(("qo_indptr", "kv_indptr", "kv_len_arr"), (qo_indptr, kv_indptr, kv_lens), strict=True):
            assert name not in self.buffers or self.buffers[name].shape == array.shape
        assert len(self.buffers.get("kv_indices", indices)) >= len(indices)
        self.arrays, self.scale = tuple(x.clone() for x in metadata), sm_scale

    def run(self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        qo_indptr, kv_indptr, indices, kv_lens = self.arrays
        q, outputs = torch.cat(query, dim=-1), []
        assert len(q) == qo_indptr[-1] and all(x.stride(-1) == 1 for x in (*query, *kv_cache))
        for b, kv_len in enumerate(kv_lens.tolist()):
            own = indices[kv_indptr[b] : kv_indptr[b + 1]].long()
            keys = torch.cat([x[own].flatten(0, 1)[:kv_len, None] for x in kv_cache], dim=-1)
            tokens = slice(*qo_indptr[b : b + 2].tolist())
            positions = torch.arange(kv_len)
            mask = attention_mask(positions[kv_len - (tokens.stop - tokens.start) :], positions)
            out = masked_attention(q[tokens], keys, keys, scale=self.scale, mask=mask)
            outputs.append(out[..., : query[0].shape[2]])
        return torch.cat(outputs)


def append_paged_mla_kv_cache(
    latents: Tensor, rotated: Tensor, batch_indices: Tensor, positions: Tensor, ckv_cache: Tensor, kpe_cache: Tensor,
    indices: Tensor, indptr: Tensor, last_page_len: Tensor,
) -> None:  # fmt: skip
    assert latents.ndim == rotated.ndim == 2 and ckv_cache.ndim == kpe_cache.ndim == 3
    for token, (b, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(indices[indptr[b] + position // ckv_cache.shape[1]])
        ckv_cache[page, position % ckv_cache.shape[1]] = latents[token]
        kpe_cache[page, position % ckv_cache.shape[1]] = rotated[token]


def merge_state_in_place(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    natural = math.log(2)
    merged = merge_states(AttentionState(out, lse * natural), AttentionState(other, other_lse * natural))
    out.copy_(merged.out)
    lse.copy_(merged.lse / natural)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, *, bmm1_scale: float, bmm2_scale: float, window_left: int, out: Tensor, kv_layout: str,
    backend: str,
) -> Tensor:  # fmt: skip
    page_size = kv_cache[0].shape[1 if kv_layout == "NHD" else 2]
    assert query.is_contiguous() and block_tables.is_contiguous() and not workspace_buffer.any()
    assert block_tables.dtype == seq_lens.dtype == torch.int32 and max_seq_len == block_tables.shape[1] * page_size
    assert type(bmm1_scale) is type(bmm2_scale) is float and backend in ("xqa", "trtllm-gen")
    for b, kv_len in enumerate(seq_lens.tolist()):
        own = block_tables[b, : -(-kv_len // page_size)].long()
        k, v = (x[own] if kv_layout == "NHD" else x[own].transpose(1, 2) for x in kv_cache)
        k, v = (x.flatten(0, 1)[:kv_len].to(query.dtype) for x in (k, v))
        keys = torch.arange(kv_len)
        mask = attention_mask(keys[-1:], keys, None if window_left == -1 else window_left + 1)
        out[b : b + 1] = masked_attention(query[b : b + 1], k, v * bmm2_scale, scale=bmm1_scale, mask=mask)
    return out


class Kernel(FlashDecoding):
    """Our decode kernel in Python: the range that began an item collects the results of the item's other ranges."""

    def __init__(
        self, qo_heads: int, kv_heads: int, head_dim: int, page_size: int, layout: str, dtype: torch.dtype,
        device: torch.device, kv_dtype: torch.dtype | None = None, window: int | None = None,
        softcap: float | None = None, split: int = 0,
    ) -> None:  # fmt: skip
        self.num_ranges, self.kv_dtype, self.window, self.softcap = 3, kv_dtype or dtype, window, softcap
        self.split = split
        self.kv_heads, self.group, self.page_size, self.layout = kv_heads, qo_heads // kv_heads, page_size, layout

    def __call__(
        self, q: Tensor, pages: tuple[Tensor, Tensor], work: DecodeWork, out: Tensor, scale: float, v_scale: float,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert pages[0].dtype == pages[1].dtype == self.kv_dtype
        for head in range(self.kv_heads):
            self._attend(head, q, pages, work, out, scale, v_scale, lse)

    def _attend(
        self, head: int, q: Tensor, pages: tuple[Tensor, Tensor], work: DecodeWork, out: Tensor, scale: float,
        v_scale: float, lse: Tensor | None,
    ) -> None:  # fmt: skip
        parts: dict[int, list[AttentionState]] = {}
        heads = slice(head * self.group, (head + 1) * self.group)
        for index in reversed(range(self.num_ranges)):
            row, tile, left, num_keys, first_page, owner, *_ = work.ranges[index].tolist()
            begins, own = tile, list[AttentionState]()
            while left:
                first = max(num_keys - (self.window or num_keys), 0) // TILE
                count, tiles = min(left, -(-num_keys // TILE) - tile), -(-num_keys // TILE) - first
                if self.split:
                    count = min(count, max(self.split, -(-tiles // MOST_SPLITS)))
                used = work.pages[first_page : first_page + -(-num_keys // self.page_size)].long()
                stored = (x[used] if self.layout == "NHD" else x[used].transpose(1, 2) for x in pages)
                keys = slice(tile * TILE, min(num_keys, (tile + count) * TILE))
                k, v = (x.flatten(0, 1)[keys, head : head + 1].to(q.dtype) for x in stored)
                positions = torch.arange(keys.start, keys.stop)
                mask = attention_mask(torch.tensor([num_keys - 1]), positions, self.window)
                state = attention_state(q[row : row + 1, heads], k, v, scale=scale, mask=mask, softcap=self.softcap)
                own.append(state)
                tile, left = tile + count, left - count
                is_inside = tile < -(-num_keys // TILE)
                if left and is_inside:
                    continue
                if begins > first:
                    parts.setdefault(owner, [])[:0] = own
                else:
                    merged = merge_all([*own, *(parts.pop(index) if is_inside else ())])
                    out[row, heads] = merged.out[0] * v_scale
                    if lse is not None:
                        lse[row, heads] = (merged.lse[0] / math.log(2)).to(lse.dtype)
                row, own = row + 1, []
                if left:
                    num_keys, first_page = work.requests[row].tolist()
                    begins = tile = max(num_keys - (self.window or num_keys), 0) // TILE
        assert not parts


def append_paged_kv_cache(
    k: Tensor, v: Tensor, batch_indices: Tensor, positions: Tensor, pages: tuple[Tensor, Tensor], indices: Tensor,
    indptr: Tensor, last_page_len: Tensor, kv_layout: str,
) -> None:  # fmt: skip
    assert k.dtype == v.dtype == pages[0].dtype  # the kernel does not convert
    page_size = pages[0].shape[1 if kv_layout == "NHD" else 2]
    for token, (b, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(indices[indptr[b] + position // page_size])
        for cache, x in zip(pages, (k, v), strict=True):
            own = cache[page] if kv_layout == "NHD" else cache[page].transpose(0, 1)
            own[position % page_size] = x[token]


def rmsnorm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    return out.copy_(F.rms_norm(x.float(), weight.shape, weight.float(), eps))


def rotate(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos_sin_cache: Tensor, pos_ids: Tensor, interleave: bool
) -> None:
    cos, sin = cos_sin_cache[pos_ids.long()].chunk(2, dim=1)
    for x, out in ((q, q_out), (k, k_out)):
        out.copy_(rope.apply_rope(x, cos, sin, interleaved=interleave))


def activate(function: Any, x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (function(gate) * up).to(x.dtype)


def renorm(probs: Tensor, keep: Tensor) -> Tensor:
    kept = probs.where(keep, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    assert isinstance(top_k, Tensor) and top_k.min() >= 1 and top_k.max() <= probs.shape[1]
    return renorm(probs, probs >= probs.sort(descending=True).values.gather(1, top_k[:, None] - 1))


def top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
    best = probs.sort(descending=True).values
    last = (best.cumsum(-1) - best < top_p[:, None]).sum(-1, keepdim=True) - 1
    return renorm(probs, probs >= best.gather(1, last))


def sampling_from_probs(probs: Tensor, *, seed: Tensor, offset: Tensor) -> Tensor:
    assert seed.dtype == offset.dtype == torch.int64 and seed.shape == offset.shape == probs.shape[:1]
    return (probs.log() + gumbel_noise(seed, offset, probs.shape[1])).argmax(-1).int()


def min_p_sampling_from_probs(probs: Tensor, min_p: Tensor, *, seed: Tensor, offset: Tensor) -> Tensor:
    keep = probs >= min_p[:, None] * probs.amax(-1, keepdim=True)
    return sampling_from_probs(renorm(probs, keep), seed=seed, offset=offset)


class Event:
    """A stand-in for a CUDA event, with nothing to wait for."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch, has_fa3: bool = True, architecture: int = 9) -> ModuleType:
    """Make `import flashinfer` return the stand-in, and let backends be built without a GPU."""
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    module.BatchPrefillWithRaggedKVCacheWrapper = Ragged  # type: ignore[attr-defined]
    metadata = SimpleNamespace(csr=lambda *arrays: arrays)
    module.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=MLA, MLAPlanMetadata=metadata)  # type: ignore
    module.page = SimpleNamespace(append_paged_mla_kv_cache=append_paged_mla_kv_cache)  # type: ignore[attr-defined]
    module.merge_state_in_place = merge_state_in_place  # type: ignore[attr-defined]
    module.append_paged_kv_cache = append_paged_kv_cache  # type: ignore[attr-defined]
    module.decode = SimpleNamespace(  # type: ignore[attr-defined]
        trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache
    )
    module.rmsnorm = rmsnorm  # type: ignore[attr-defined]
    module.silu_and_mul = lambda x: activate(F.silu, x)  # type: ignore[attr-defined]
    module.gelu_tanh_and_mul = lambda x: activate(lambda gate: F.gelu(gate, approximate="tanh"), x)  # type: ignore
    kernels = SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=rotate)
    module.sampling = SimpleNamespace(  # type: ignore[attr-defined]
        softmax=lambda logits, temperature: torch.softmax(logits.float() / temperature[:, None].clamp(min=1e-9), -1),
        top_k_renorm_probs=top_k_renorm_probs,
        top_p_renorm_probs=top_p_renorm_probs,
        sampling_from_probs=sampling_from_probs,
        min_p_sampling_from_probs=min_p_sampling_from_probs,
    )
    module.rope = SimpleNamespace(get_rope_module=lambda: kernels)  # type: ignore[attr-defined]
    module.utils = SimpleNamespace(is_sm90a_supported=lambda device: has_fa3)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (architecture, 0))
    return module
