"""What one step of the engine computes, described once for every attention method and for the sampler.

The tokens of all requests are one ragged (packed, "varlen") batch in CSR form, unpadded. Explained in chapter 04.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Int32, Int64, UInt8
from torch import Tensor


@dataclass(frozen=True)
class PrefixLevel:
    """Pages that neighboring requests of a step share, as one level of a cascade (chapter 09).

    Every query of a group sees every key of the group's pages. A group may have no pages.

    Attributes:
        kv_last_page_len: [G] host. Keys in the last page of each group, 0 in a group without pages.
        kv_page_indices: [P] pages of all groups.
        qo_indptr: [G+1] host. First token of each group of requests, and T.
        kv_page_indptr: [G+1] host. First entry of each group in `kv_page_indices`.
        query_offsets: [T] what is added to a query's position before it meets this level's keys; None for nothing.
    """

    kv_last_page_len: Int32[Tensor, " G"]
    kv_page_indices: Int32[Tensor, " P"]
    qo_indptr: Int32[Tensor, " G+1"]
    kv_page_indptr: Int32[Tensor, " G+1"]
    query_offsets: Int[Tensor, " T"] | None = None


@dataclass(frozen=True)
class StepBatch:
    """One step of the engine: B requests, T new tokens, no padding.

    The tokens of all requests follow one another. Request b owns the tokens `qo_indptr[b]:qo_indptr[b + 1]` of every
    array with T entries, and the pages `kv_page_indices[kv_page_indptr[b]:kv_page_indptr[b + 1]]` of the KV cache. A
    prefill, a chunk of one and a decode differ in their number of new tokens only. Arrays marked "host" stay in the
    host's memory, where a plan is made; the others are on the model's device. All are views of buffers that a later
    step overwrites.

    Attributes:
        token_ids: [T] the tokens to compute.
        positions: [T] position of each token in its request.
        slot_mapping: [T] where its key and value go: page * page_size + offset in the page.
        token_source: [T] page-table row whose last sampled token is this token, or -1 if `token_ids` has it.
        logit_rows: [R] tokens whose logits are needed.
        sampled_positions: [R] position of the token that each of them predicts.
        kv_page_indices: [P] pages of all requests, in order.
        page_positions: [P] position of each page's first key, or None while every request still has all its pages.
        kv_lens: [B] host. Keys of each request once this step's are stored.
        qo_indptr: [B+1] host. First token of each request, and T.
        kv_page_indptr: [B+1] host. First entry of each request in `kv_page_indices`, and P.
        host_page_indices: [P] host. `kv_page_indices` once more, so that a plan can see whether pages have changed.
        kv_last_page_len: [B] host. Keys in the last page of each request, 1 to page_size.
        num_logits: [B] host. For how many of its last tokens each request needs logits: 0 in the middle of a prompt.
        num_decodes: the first `num_decodes` requests are decodes: they have at most `max_decode_tokens` new tokens.
        page_size: keys per page.
        has_sources: whether any token comes from `token_source`.
        levels: prefixes shared by several requests, outermost first: a request's pages begin with its groups' pages, in
            this order. A backend without cascade ignores them.
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
    has_sources: bool = False
    levels: tuple[PrefixLevel, ...] = ()

    @classmethod
    def build(
        cls,
        *,
        token_ids: Sequence[int] | np.ndarray,
        num_new: Sequence[int] | np.ndarray,
        kv_lens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
        page_size: int,
        num_logits: Sequence[int] | np.ndarray | None = None,
        token_source: Sequence[int] | np.ndarray | None = None,
        page_positions: Sequence[int] | np.ndarray | None = None,
        max_decode_tokens: int = 1,
        levels: tuple[PrefixLevel, ...] = (),
        device: torch.device | str = "cpu",
        into: "StepBuffers | None" = None,
    ) -> "StepBatch":
        """Derive every array of the step from the few that a scheduler knows, without a loop over tokens or requests.

        Args:
            token_ids: [T] new tokens of all requests, one request after the other, decodes first.
            num_new: [B] how many of them each request has, at least 1.
            kv_lens: [B] keys in each request's pages after this step, the new ones included.
            pages: [P] pages of all requests in order; request b has `ceil(kv_lens[b] / page_size)` of them.
            page_size: keys per page.
            num_logits: [B] see the class; default 1 each.
            token_source: [T] see the class; default all -1.
            page_positions: [P] see the class; default None.
            max_decode_tokens: most new tokens of a decode: 1, and more where drafted tokens are verified.
            levels: see the class.
            device: where the model runs, if `into` is not given.
            into: buffers that receive the arrays; default new ones on `device`.

        Raises:
            ValueError: if the arrays contradict each other.
        """
        new, lens = np.asarray(num_new, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
        num_tokens, num_pages, num_requests = len(token_ids), len(pages), len(new)
        if not num_requests == len(lens) > 0:
            raise ValueError(f"num_new has {num_requests} requests, kv_lens {len(lens)}")
        one_token_each = num_tokens == num_requests == np.count_nonzero(new == 1)
        qo_indptr = np.arange(num_requests + 1) if one_token_each else _indptr(new)
        page_indptr = _indptr(-(-lens // page_size))
        _check(num_tokens, num_pages, new, lens, qo_indptr, page_indptr)
        last = qo_indptr[1:] - 1
        if one_token_each:  # the last key of each request
            num_decodes = num_requests
            key_index, first_page = lens - 1, page_indptr[:-1]
        else:  # the new keys are the last ones of each request
            num_decodes = int(np.count_nonzero(new <= max_decode_tokens))
            if new[:num_decodes].max(initial=0) > max_decode_tokens:
                raise ValueError("decodes must come first")
            key_index = np.arange(num_tokens) + np.repeat(lens - qo_indptr[1:], new)
            first_page = np.repeat(page_indptr[:-1], new)
        if num_logits is None:
            logits_of, logit_rows = new if one_token_each else np.ones_like(new), last
        else:
            logits_of = np.asarray(num_logits, dtype=np.int64)
            if np.count_nonzero(logits_of > new):
                raise ValueError("num_logits asks for logits of more tokens than a request has in the step")
            ends = logits_of.cumsum()
            logit_rows = np.arange(ends[-1]) + np.repeat(last + 1 - ends, logits_of)
        page_index = key_index // page_size
        offset = key_index - page_index * page_size
        entry = first_page + page_index

        buffers = into or StepBuffers(device)
        tokens, host_pages, host_first = buffers.reset(num_tokens, num_pages)
        host_pages[:] = pages
        positions = key_index
        if page_positions is not None:
            host_first[:] = page_positions
            positions = host_first[entry] + offset
        tokens[TOKEN_IDS] = token_ids
        tokens[POSITIONS] = positions
        tokens[SLOTS] = host_pages[entry].astype(np.int64) * page_size + offset
        tokens[SOURCES] = -1 if token_source is None else token_source
        tokens[LOGIT_ROWS, : len(logit_rows)] = logit_rows
        # A row of logits is the distribution of the token behind the one that it belongs to.
        tokens[SAMPLED_POSITIONS, : len(logit_rows)] = positions[logit_rows] + 1
        on_device, device_pages = buffers.upload()
        of_logits = on_device[LOGIT_ROWS:]
        if len(logit_rows) < num_tokens:
            of_logits = tuple(array[: len(logit_rows)] for array in of_logits)
        return cls(
            token_ids=on_device[TOKEN_IDS],
            positions=on_device[POSITIONS],
            slot_mapping=on_device[SLOTS],
            token_source=on_device[SOURCES],
            logit_rows=of_logits[0],
            sampled_positions=of_logits[1],
            kv_page_indices=device_pages,
            page_positions=None if page_positions is None else buffers.page_positions(),
            kv_lens=_host(lens),
            qo_indptr=_host(qo_indptr),
            kv_page_indptr=_host(page_indptr),
            host_page_indices=torch.from_numpy(host_pages),
            kv_last_page_len=_host((lens - 1) % page_size + 1),
            num_logits=_host(logits_of),
            num_decodes=num_decodes,
            page_size=page_size,
            has_sources=token_source is not None,
            levels=levels,
        )

    @property
    def num_sequences(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def feed(self, last_token: Int[Tensor, " rows"]) -> Int[Tensor, " T"]:
        """Return the token ids, with those that earlier steps sampled read on the device.

        Args:
            last_token: [rows] last token that each page-table row sampled.
        """
        if not self.has_sources:
            return self.token_ids
        return torch.where(self.token_source >= 0, last_token[self.token_source.clamp(min=0)], self.token_ids)


# Rows of the array that holds everything with one entry per token.
TOKEN_IDS, POSITIONS, SLOTS, SOURCES, LOGIT_ROWS, SAMPLED_POSITIONS = range(6)
ALIGNMENT = 2  # 8-byte numbers: each array starts at a multiple of 16 bytes, for the vector loads of kernels


class StepBuffers:
    """Memory for the arrays of one step: pinned on the host, and on the device, filled by one copy.

    On a CPU both are the same memory and nothing is copied. The host may write a step's arrays only when the device has
    read the previous ones, so an engine whose host runs ahead of the device alternates between several buffers.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._device_name = device
        self._tokens: tuple[Tensor, ...] = ()
        self._allocate(0)

    def reset(
        self, num_tokens: int, num_pages: int
    ) -> tuple[Int64[np.ndarray, "6 T"], Int32[np.ndarray, " P"], Int64[np.ndarray, " P"]]:
        """Begin a step. Views of the previous one are overwritten from now on.

        Returns:
            Arrays on the host, to be filled: what there is of each token, the pages, and the position of each page.
        """
        stride = -(-num_tokens // ALIGNMENT) * ALIGNMENT
        first_page = (SAMPLED_POSITIONS + 1) * stride
        first_position = first_page + -(-num_pages // (2 * ALIGNMENT)) * ALIGNMENT
        self._used = first_position + num_pages
        if self._used > len(self._host):
            self._allocate(2 * self._used)
        self._layout = stride, num_tokens, first_page, first_position, num_pages
        tokens = self._numpy[:first_page].reshape(-1, stride)[:, :num_tokens]
        pages = self._numpy[first_page:first_position].view(np.int32)[:num_pages]
        return tokens, pages, self._numpy[first_position : self._used]

    def upload(self) -> tuple[tuple[Int64[Tensor, " T"], ...], Int32[Tensor, " P"]]:
        """Start copying the arrays to the device, and return the rows of the first and the pages there."""
        if self._on_gpu:
            self._on_device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        stride, num_tokens, first_page, _, num_pages = self._layout
        if len(self._tokens[0]) != num_tokens:  # in a steady decode the views stay the same
            tokens = self._on_device.as_strided((SAMPLED_POSITIONS + 1, num_tokens), (stride, 1))
            self._tokens = tokens.unbind()
        pages = self._device_int32[2 * first_page : 2 * first_page + num_pages]
        return self._tokens, pages

    def page_positions(self) -> Int64[Tensor, " P"]:
        """The position of each page, on the device."""
        first_position, num_pages = self._layout[3:]
        return self._on_device[first_position : first_position + num_pages]

    def _allocate(self, size: int) -> None:
        self._host: Int64[Tensor, " size"] = torch.empty(size, dtype=torch.int64, pin_memory=self._on_gpu)
        self._numpy = self._host.numpy()
        self._on_device = torch.empty_like(self._host, device=self._device_name) if self._on_gpu else self._host
        self._device_int32 = self._on_device.view(torch.int32)
        self._tokens = (self._on_device[:0],)


def _check(
    num_tokens: int, num_pages: int, new: np.ndarray, lens: np.ndarray, qo_indptr: np.ndarray, page_indptr: np.ndarray
) -> None:
    if np.count_nonzero((new < 1) | (lens < new)):
        if new.min() < 1:
            raise ValueError("every request of a step needs at least one new token")
        raise ValueError("a request has more new tokens than keys after the step")
    if num_tokens != qo_indptr[-1]:
        raise ValueError(f"{num_tokens} tokens given, num_new adds up to {qo_indptr[-1]}")
    if num_pages != page_indptr[-1]:
        raise ValueError(f"{num_pages} pages given, kv_lens needs {page_indptr[-1]}")


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
    """Concatenate arrays, each starting at a multiple of 8 bytes.

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
    """Return views of the arrays that `pack` concatenated, on whatever device they are now.

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


def _indptr(lengths: np.ndarray) -> Int64[np.ndarray, " n"]:
    """Where each of some parts of these lengths begins, and the end."""
    indptr = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return indptr


def _host(array: np.ndarray) -> Int32[Tensor, " n"]:
    return torch.from_numpy(array.astype(np.int32))


def _padded(array: np.ndarray) -> int:
    return -(-array.nbytes // 8) * 8
