"""The description of one step of the engine, from which every attention backend and the sampler read.

The tokens of all requests are one ragged (packed, "varlen") batch in CSR form, unpadded. Explained in chapter 04.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int, Int32, Int64
from torch import Tensor

from mini_engine.transfer import copy_pinned, feed_tokens, to_device

if TYPE_CHECKING:
    from mini_engine.attention.levels import Level


@dataclass(frozen=True, eq=False)
class PrefixLevel:
    """Pages that neighboring requests of a step share, as one level of a cascade (chapter 09).

    Every query of a group sees every key of the group's pages. A group may have no pages. If a level has query offsets,
    its pages are not among the pages of its requests: they hold keys that were computed at other positions (chunk
    memory, chapter 10).

    Attributes:
        kv_last_page_len: [G] host. Keys in the last page of each group, 0 in a group without pages.
        kv_page_indices: [P] pages of all groups.
        qo_indptr: [G+1] host. First token of each group of requests, and T.
        kv_page_indptr: [G+1] host. First entry of each group in `kv_page_indices`.
        query_offsets: [T] offset that is added to a query's position before it meets this level's keys; None if the
            pages belong to the requests.
    """

    kv_last_page_len: Int32[Tensor, " G"]
    kv_page_indices: Int32[Tensor, " P"]
    qo_indptr: Int32[Tensor, " G+1"]
    kv_page_indptr: Int32[Tensor, " G+1"]
    query_offsets: Int[Tensor, " T"] | None = None

    @property
    def padded_groups(self) -> int:
        """The number of groups in a CUDA graph: a power of two, with room for a group of padding."""
        return 1 << len(self.kv_last_page_len).bit_length()


def upload_levels(levels: Sequence["Level"], device: torch.device) -> tuple[PrefixLevel, ...]:
    """Move the pages and the query offsets of a step's levels to a device, in one copy."""
    arrays: dict[str, np.ndarray] = {}
    for i, level in enumerate(levels):
        arrays[f"pages {i}"] = np.asarray(level.kv_page_indices, dtype=np.int32)
        if level.query_offsets is not None:
            arrays[f"offsets {i}"] = np.asarray(level.query_offsets, dtype=np.int32)
    moved = to_device(arrays, device)

    def host(array: np.ndarray) -> Int32[Tensor, " n"]:
        return torch.from_numpy(np.asarray(array, dtype=np.int32))

    return tuple(
        PrefixLevel(
            kv_last_page_len=host(level.kv_last_page_len),
            kv_page_indices=moved[f"pages {i}"],
            qo_indptr=host(level.qo_indptr),
            kv_page_indptr=host(level.kv_page_indptr),
            query_offsets=moved.get(f"offsets {i}"),
        )
        for i, level in enumerate(levels)
    )


@dataclass(eq=False)
class StepBatch:
    """One step of the engine: B requests, T new tokens, no padding.

    The tokens of all requests are laid end to end. Request b owns the tokens `qo_indptr[b]:qo_indptr[b + 1]` of every
    array with T entries, and the pages `kv_page_indices[kv_page_indptr[b]:kv_page_indptr[b + 1]]` of the KV cache. A
    prefill, a chunk of a prefill and a decode differ only in their number of new tokens. Arrays marked "host" stay in
    host memory, where plans are made; the others are on the model's device. All are views of buffers that a later step
    overwrites.

    Attributes:
        token_ids: [T] the tokens to compute.
        positions: [T] position of each token in its request.
        slot_mapping: [T] slot of its key and value: page * page_size + offset in the page.
        token_source: [T] page-table row whose last sampled token is this token, or -1 if `token_ids` has it.
        logit_rows: [R] tokens whose logits are needed.
        sampled_positions: [R] position of the token that each of these rows predicts.
        kv_page_indices: [P] pages of all requests, in order.
        page_positions: [P] position of each page's first key, or None while every request still has all its pages.
        kv_lens: [B] host. Keys of each request, including those of this step.
        qo_indptr: [B+1] host. First token of each request, and T.
        kv_page_indptr: [B+1] host. First entry of each request in `kv_page_indices`, and P.
        host_page_indices: [P] host. A copy of `kv_page_indices`, so that a plan can see whether pages have changed.
        kv_last_page_len: [B] host. Keys in the last page of each request, 1 to page_size.
        num_logits: [B] host. Number of last tokens of each request that need logits: 0 in the middle of a prompt.
        num_decodes: the first `num_decodes` requests are decodes.
        page_size: keys per page.
        num_sources: number of tokens that come from `token_source`.
        has_gaps: whether a request has lost pages between other pages, so its keys are not at adjacent positions.
        levels: prefixes shared by several requests, outermost first: a request's pages begin with its groups' pages, in
            this order. A backend without cascade ignores them. If any request of the step has a context, there is
            instead a level for each chunk of the longest context. Requests after the last group of a level are padding
            (see `decode_graphs.py`) and have no pages in it.
        page_capacity: the most pages that any step with this number of requests can have, if a CUDA graph replays the
            step, whose kernels read lists of pages at fixed addresses. None if no single graph holds the step.
        other_groups: the same step with the pages of the other groups of layers, if there are several (`grouped.py`).
    """

    token_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    slot_mapping: Int[Tensor, " T"]
    token_source: Int[Tensor, " T"]
    logit_rows: Int[Tensor, " R"]
    sampled_positions: Int[Tensor, " R"]
    kv_page_indices: Int32[Tensor, " P"]
    page_positions: Int[Tensor, " P"] | None
    kv_lens: Int32[Tensor, " B"]
    qo_indptr: Int32[Tensor, " B+1"]
    kv_page_indptr: Int32[Tensor, " B+1"]
    host_page_indices: Int32[Tensor, " P"]
    kv_last_page_len: Int32[Tensor, " B"]
    num_logits: Int32[Tensor, " B"]
    num_decodes: int
    page_size: int
    num_sources: int = 0
    has_gaps: bool = False
    levels: tuple[PrefixLevel, ...] = ()
    page_capacity: int | None = field(default=None, repr=False)
    other_groups: tuple["StepBatch", ...] = field(default=(), repr=False)

    @classmethod
    def build(
        cls,
        *,
        token_ids: Sequence[int] | np.ndarray,
        num_new: Sequence[int] | np.ndarray | None,
        kv_lens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
        page_size: int,
        num_logits: Sequence[int] | np.ndarray | None = None,
        token_source: Sequence[int] | np.ndarray | None = None,
        page_positions: Sequence[int] | np.ndarray | None = None,
        num_decodes: int | None = None,
        levels: tuple[PrefixLevel, ...] = (),
        page_capacity: int | None = None,
        device: torch.device | str = "cpu",
        into: "StepBuffers | None" = None,
    ) -> "StepBatch":
        """Derive every array of the step from the few that the scheduler has, without a loop over tokens or requests.

        Args:
            token_ids: [T] new tokens of all requests, request by request, decodes first.
            num_new: [B] number of new tokens of each request, at least 1; None: one each.
            kv_lens: [B] keys in each request's pages after this step, including the new ones.
            pages: [P] pages of all requests in order; request b has `ceil(kv_lens[b] / page_size)` of them.
            page_size: keys per page.
            num_logits: [B] see the class; default 1 each.
            token_source: [T] see the class; default all -1.
            page_positions: [P] see the class; default None.
            num_decodes: see the class; None: the requests with one new token.
            levels: see the class.
            page_capacity: see the class.
            device: the model's device, if `into` is not given.
            into: buffers that receive the arrays; default new ones on `device`, and the call waits for their copy.

        Returns:
            The step.

        Raises:
            ValueError: if the arrays are inconsistent.
        """
        lens = np.asarray(kv_lens, dtype=np.int64)
        num_tokens, num_requests = len(token_ids), len(lens)
        # The last key of each request is in its last page. It is the only new key unless `num_new` says otherwise.
        key_index = lens - ONE
        full_pages, offset = np.divmod(key_index, page_size)
        page_ends, last_page_lens = (full_pages + ONE).cumsum(), offset + ONE
        entry = page_ends - ONE
        if num_new is None:
            new = ONE
            num_decodes = num_requests if num_decodes is None else num_decodes
            _check(num_tokens, len(pages), num_requests, lens, new, page_ends)
        else:
            new = np.asarray(num_new, dtype=np.int64)
            if np.count_nonzero(new < 1):
                raise ValueError("every request of a step needs at least one new token")
            if len(new) != num_requests:
                raise ValueError(f"num_new has {len(new)} entries, but kv_lens has {num_requests}")
            _check(num_tokens, len(pages), int(new.sum()), lens, new, page_ends)
            if num_decodes is None:
                num_decodes = int(np.count_nonzero(new == 1))
                if np.count_nonzero(new[:num_decodes] > 1):
                    raise ValueError("decodes (requests with one new token) must come first")
            key_index = np.arange(num_tokens) + (lens - new.cumsum()).repeat(new)
            page, offset = np.divmod(key_index, page_size)
            entry = (entry - full_pages).repeat(new) + page
        num_rows, logits_of = num_requests, ONE
        if num_logits is not None:
            logits_of = np.asarray(num_logits, dtype=np.int64)
            if np.count_nonzero(logits_of > new):
                raise ValueError("num_logits asks for logits of more tokens than a request has in the step")
            num_rows = int(logits_of.sum())

        buffers = into or StepBuffers(device)
        is_new = buffers.resize(num_tokens, num_requests, num_rows, len(pages))
        ids, positions, slots, sources, logit_rows, predicted = buffers.tokens
        lens_out, qo_indptr, page_indptr, last_page_len, logits_out = buffers.requests
        if is_new or num_new is not None or num_logits is not None:  # otherwise as in the last step of these sizes
            qo_indptr[1:] = np.broadcast_to(new, num_requests).cumsum()
            logits_out[:] = logits_of
            logit_rows[:] = np.arange(num_rows) + (qo_indptr[1:] - logits_out.cumsum()).repeat(logits_out)
        ids[:], buffers.pages[:], positions[:] = token_ids, pages, key_index
        slots[:] = buffers.pages[entry] * np.int64(page_size) + offset
        sources[:] = -1 if token_source is None else token_source
        lens_out[:], page_indptr[1:], last_page_len[:] = lens, page_ends, last_page_lens
        has_gaps, first_keys = False, None
        if page_positions is not None:
            on_host, first_keys = buffers.page_positions()
            on_host[:] = page_positions
            np.add(on_host[entry], offset, out=positions)
            follows = np.diff(on_host) == page_size
            follows[page_indptr[1:-1] - 1] = True  # the first page of a request has no predecessor
            has_gaps = not follows.all()
        # A token's logits are the distribution of the next token.
        np.add(positions[logit_rows], ONE, out=predicted)
        buffers.upload()
        if into is None and buffers.is_on_gpu:  # the memory on the host may be gone before the copy begins
            torch.cuda.current_stream(device).synchronize()
        return cls(
            **buffers.views,
            page_positions=first_keys,
            num_decodes=num_decodes,
            page_size=page_size,
            num_sources=0 if token_source is None else int(np.count_nonzero(sources >= 0)),
            has_gaps=has_gaps,
            levels=levels,
            page_capacity=page_capacity,
            other_groups=(),
        )

    @property
    def num_sequences(self) -> int:
        return self.kv_lens.shape[0]  # `len` of a tensor takes ten times as long

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def feed(self, last_token: Int[Tensor, " rows"]) -> Int[Tensor, " T"]:
        """Return the token ids; those that earlier steps sampled are read on the device.

        Args:
            last_token: [rows] last token that each page-table row sampled.
        """
        if self.page_capacity is None:  # a graph takes the same path in every step
            if not self.num_sources:
                return self.token_ids
            if self.num_sources == self.num_tokens:
                return last_token.index_select(0, self.token_source)
        return feed_tokens(self.token_ids, self.token_source, last_token)


TOKEN_ROWS = "token_ids", "positions", "slot_mapping", "token_source", "logit_rows", "sampled_positions"
REQUEST_ROWS = "kv_lens", "qo_indptr", "kv_page_indptr", "kv_last_page_len", "num_logits"
ONE = np.ones(1, dtype=np.int64)  # numpy adds it faster than a Python number, which it has to convert
ALIGNMENT = 2  # 8-byte numbers: each array starts at a multiple of 16 bytes, for the vector loads of kernels


class StepBuffers:
    """Memory for the arrays of one step: a pinned buffer on the host, and a buffer on the device filled by one copy.

    On a CPU both are the same memory and nothing is copied. The host must not write a step's arrays before the previous
    ones have been copied, so an engine whose host runs ahead of the device alternates between several `StepBuffers`.
    They may share the memory on the device, where copies and kernels run one after another. The views of the memory are
    reused while the sizes of the steps are unchanged: making them costs more than filling them.

    Args:
        device: the model's device.
        memory: memory on the device, from `step_memory`: every step of the same sizes is then at the same addresses. By
            default the buffers have their own, and larger memory as soon as a step needs it.

    Attributes:
        tokens: host. The arrays of TOKEN_ROWS, [T] or [R].
        pages: [P] host. `kv_page_indices`.
        requests: host. The arrays of REQUEST_ROWS, [B] or [B+1].
        views: the fields of a `StepBatch` that are views of this memory.
    """

    tokens: list[Int64[np.ndarray, " _"]]
    pages: Int32[np.ndarray, " P"]
    requests: list[Int32[np.ndarray, " _"]]
    views: dict[str, Tensor]

    def __init__(self, device: torch.device | str, memory: Int64[Tensor, " size"] | None = None) -> None:
        self._device, self._memory = torch.device(device), memory
        self._allocate(0 if memory is None else len(memory))

    def forget(self) -> None:
        """Keep nothing of the last step, which may have been interrupted."""
        self._sizes = -1, -1, -1

    def resize(self, num_tokens: int, num_requests: int, num_rows: int, num_pages: int) -> bool:
        """Begin a step of this size. Views of the previous one are overwritten from now on.

        Returns:
            Whether the number of tokens, requests or rows of logits has changed.
        """
        stride, sizes = _stride(num_tokens), (num_tokens, num_requests, num_rows)
        self._used = _first_position(num_tokens, num_pages)
        if (needed := self._used + num_pages) > len(self._on_host):
            self._allocate(2 * needed)
        if is_new := self._sizes != sizes:
            self._sizes, self._num_pages = sizes, -1
            lengths = [num_tokens] * 4 + [num_rows] * 2
            spans = [slice(i * stride, i * stride + length) for i, length in enumerate(lengths)]
            self.tokens = [self._on_host.numpy()[span] for span in spans]
            self.requests = [np.zeros(num_requests + more, dtype=np.int32) for more in (0, 1, 1, 0, 0)]
            self.views = {name: self._on_device[span] for name, span in zip(TOKEN_ROWS, spans, strict=True)}
            self.views |= zip(REQUEST_ROWS, map(torch.from_numpy, self.requests), strict=True)
        if self._num_pages != num_pages:
            self._num_pages, span = num_pages, slice(12 * stride, 12 * stride + num_pages)
            self.pages = self._host_pages[span]
            self.views["host_page_indices"] = torch.from_numpy(self.pages)
            self.views["kv_page_indices"] = self._device_pages[span]
        return is_new

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def page_positions(self) -> tuple[Int64[np.ndarray, " P"], Int64[Tensor, " P"]]:
        """Return the memory of `page_positions`, on the host and on the device; without this call, none is copied."""
        span = slice(self._used, self._used + self._num_pages)
        self._used = span.stop
        return self._on_host.numpy()[span], self._on_device[span]

    def upload(self) -> None:
        """Start copying the arrays to the device."""
        if self.is_on_gpu:
            copy_pinned(self._on_device[: self._used], self._on_host[: self._used])

    def _allocate(self, size: int) -> None:
        if self._memory is not None and size > len(self._memory):
            raise ValueError(f"the step needs {size} numbers, but its memory on the device has {len(self._memory)}")
        self.forget()
        on_device = on_host = (
            torch.empty(size, dtype=torch.int64, device=self._device) if self._memory is None else self._memory
        )
        if self.is_on_gpu:
            on_host = torch.empty(size, dtype=torch.int64, pin_memory=True)
        host_pages, device_pages = on_host.numpy().view(np.int32), on_device.view(torch.int32)
        # One assignment without a call, so that an error or an interrupt leaves all of the old memory or none of it.
        self._on_device, self._on_host, self._host_pages, self._device_pages = (
            on_device, on_host, host_pages, device_pages
        )  # fmt: skip


def step_memory(num_tokens: int, num_pages: int, device: torch.device | str) -> Int64[Tensor, " size"]:
    """Allocate memory that holds any step of up to this many tokens and pages."""
    return torch.empty(_first_position(num_tokens, num_pages) + num_pages, dtype=torch.int64, device=device)


def _first_position(num_tokens: int, num_pages: int) -> int:
    """Return where the page positions of a step begin: after its tokens, and its pages, two to a number."""
    return 6 * _stride(num_tokens) + -(-num_pages // (2 * ALIGNMENT)) * ALIGNMENT


def _stride(num_tokens: int) -> int:
    return -(-num_tokens // ALIGNMENT) * ALIGNMENT


def _check(
    num_tokens: int, num_pages: int, num_new: int, lens: np.ndarray, new: np.ndarray, page_ends: np.ndarray
) -> None:
    if len(lens) == 0:
        raise ValueError("a step needs at least one request")
    if np.count_nonzero(lens < new):
        raise ValueError("a request has more new tokens than keys after the step")
    if num_tokens != num_new:
        raise ValueError(f"{num_tokens} tokens given, num_new adds up to {num_new}")
    if num_pages != page_ends[-1]:
        raise ValueError(f"{num_pages} pages given, kv_lens needs {page_ends[-1]}")
