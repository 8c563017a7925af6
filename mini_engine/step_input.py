"""`StepInput`: everything that the device needs to know about a step, as plain numpy arrays.

The core writes one for each step, and an executor reads it. So a list of them can be recorded and replayed on another
executor, or sent to another process. Explained in chapter 07.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Int64

from mini_engine.attention.levels import Level
from mini_engine.kv_cache.page_table import PageTable, Rows
from mini_engine.logprobs import LogprobArrays, LogprobRows, rows_with_logprobs
from mini_engine.ragged import members
from mini_engine.request import Request, Running
from mini_engine.sampling_params import Admission
from mini_engine.scheduler import Schedule
from mini_engine.speculative.branches import NOTHING_KEPT, Branches, branches_of, read_known

NO_COPIES = np.zeros((0, 2), dtype=np.int32)


class GroupPages(NamedTuple):
    """The pages of a step's requests in one group of layers (`layer_groups.py`).

    Attributes:
        kv_lens: [B] keys of each request in its pages after the step.
        pages: [P] pages of all requests, in order of position.
        page_positions: [P] position of each page's first key; None while every request has all its pages.
    """

    kv_lens: Int64[np.ndarray, " B"]
    pages: Int32[np.ndarray, " P"]
    page_positions: Int64[np.ndarray, " P"] | None


class TokenMasks(NamedTuple):
    """The tokens that some rows may sample.

    Attributes:
        rows: [M] the rows.
        masks: [M, V / 32] bit i % 32 of word i / 32 for token i.
    """

    rows: Int64[np.ndarray, " M"]
    masks: Int32[np.ndarray, "M words"]


@dataclass(frozen=True, eq=False)
class StepInput:
    """One step: B requests, T new tokens in all, decodes first.

    Attributes:
        rows: [B] row of each request.
        num_new: [B] number of its new tokens.
        num_logits: [B] number of its last tokens from whose logits it samples: 0 in the middle of a prompt.
        kv_lens: [B] keys in its pages after the step.
        num_computed: [B] its tokens whose keys exist after the step, including those that are in no page of its own.
        token_ids: [T] the new tokens, request by request.
        token_source: [T] row whose last sampled token is this token, or -1 if `token_ids` has it; None: all -1.
        pages: [P] pages of all requests, in order of position.
        page_positions: [P] position of each page's first key; None while every request has all its pages.
        admitted: what the sampler needs to know of the requests that were admitted for this step.
        num_decodes: number of requests at the start that decode: each of their new tokens may be computed as a sequence
            of its own.
        copies: [C, 2] pairs of pages; the first is copied to the second before the step writes.
        levels: prefixes and chunks that requests share; see `StepBatch`. The same object while they are unchanged.
        logprobs: tokens whose log probabilities the step computes; empty if no request asks for them.
        masks: the tokens that rows with a grammar may sample; None if there are no such rows.
        other_groups: the pages in the other groups of layers, if there are several; those above are the first group's.
        branches: what the sampler needs for guesses of requests with penalties or a grammar; None if there are none.
        kept: [K, 2] rows, and the branch of the last step that is the state of each row's sampler now.
    """

    rows: Int64[np.ndarray, " B"]
    num_new: Int64[np.ndarray, " B"]
    num_logits: Int64[np.ndarray, " B"]
    kv_lens: Int64[np.ndarray, " B"]
    num_computed: Int64[np.ndarray, " B"]
    token_ids: Int32[np.ndarray, " T"]
    token_source: Int64[np.ndarray, " T"] | None
    pages: Int32[np.ndarray, " P"]
    page_positions: Int64[np.ndarray, " P"] | None
    admitted: tuple[Admission, ...]
    num_decodes: int
    copies: Int[np.ndarray, "C 2"]
    levels: tuple[Level, ...]
    logprobs: tuple[LogprobRows, ...] = ()
    masks: TokenMasks | None = None
    other_groups: tuple[GroupPages, ...] = ()
    branches: Branches | None = None
    kept: Int64[np.ndarray, "K 2"] = field(default_factory=lambda: NOTHING_KEPT)

    @property
    def groups(self) -> tuple[GroupPages, ...]:
        """The pages in each group of layers."""
        return (GroupPages(self.kv_lens, self.pages, self.page_positions), *self.other_groups)

    @property
    def sampling_rows(self) -> Int64[np.ndarray, " R"]:
        """The rows that sample a token."""
        return self.rows if np.count_nonzero(self.num_logits) == len(self.rows) else self.rows[self.num_logits > 0]

    @property
    def logit_owners(self) -> Int64[np.ndarray, " L"]:
        """The row of each sampled token: a row that checks guesses samples several."""
        return self.sampling_rows if self.num_logits.max(initial=0) <= 1 else self.rows.repeat(self.num_logits)

    @property
    def is_decode(self) -> bool:
        """Whether every request decodes and samples a token after each new one."""
        return self.num_decodes == len(self.rows) and len(self.token_ids) == int(self.num_logits.sum())

    def with_single_queries(self, page_size: int) -> "StepInput":
        """Return the same step with each new token of its decodes as a sequence of its own, over the same pages.

        So kernels for one query per sequence compute guesses, too. The order of the tokens does not change.

        Args:
            page_size: keys per page.
        """
        decodes = np.arange(len(self.rows)) < self.num_decodes
        if not np.count_nonzero(self.num_new[decodes] > 1):
            return self
        counts = np.where(decodes, self.num_new, 1)
        of, index = members(counts)
        later, is_single = counts[of] - 1 - index, decodes[of]  # tokens after it that the same request decodes

        def repeated(group: GroupPages) -> GroupPages:
            kv_lens, of_request = group.kv_lens[of] - later, -(-group.kv_lens // page_size)
            of_page, page = members(-(-kv_lens // page_size))
            entries = (of_request.cumsum() - of_request)[of][of_page] + page
            positions = None if group.page_positions is None else group.page_positions[entries]
            return GroupPages(kv_lens, group.pages[entries], positions)

        first, *others = map(repeated, self.groups)
        return replace(
            self,
            rows=self.rows[of],
            num_new=np.where(is_single, 1, self.num_new[of]),
            num_logits=np.where(is_single, later < self.num_logits[of], self.num_logits[of]),
            **first._asdict(),
            num_computed=self.num_computed[of] - later,
            num_decodes=int(np.count_nonzero(is_single)),
            other_groups=tuple(others),
        )


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The tokens of a step, for each of its `sampling_rows`.

    Attributes:
        tokens: [R, K] the sampled tokens; the entries of row r after the first `counts[r]` are arbitrary.
        counts: [R] number of tokens of each row.
        logprobs: log probabilities for each of the step's `logprobs`.
    """

    tokens: Int64[np.ndarray, "R K"]
    counts: Int64[np.ndarray, " R"]
    logprobs: tuple[LogprobArrays, ...] = ()


@runtime_checkable
class Executor(Protocol):
    """Computes steps in the order in which they are launched."""

    def launch(self, step: StepInput) -> Any:
        """Start a step without waiting for it, and return a ticket for `collect`."""

    def collect(self, ticket: Any) -> SampledTokens:
        """Wait for a launched step and return its tokens."""

    def reset(self) -> None:
        """Wait until nothing runs any more, then forget the rows of earlier steps."""


def build_step_input(
    schedule: Schedule, running: Running, page_table: PageTable, outputs_apart: bool = False
) -> StepInput:
    """Collect the arrays of a step, without a loop over its requests, except those with a grammar.

    Args:
        schedule: the step, with at least one request.
        running: the columns of the running requests.
        page_table: their pages.
        outputs_apart: see `Scheduler`.

    Raises:
        RequestError: if an output does not follow its grammar.
    """
    # A part of the scheduler may count in smaller integers.
    rows, num_new = (array.astype(np.int64, copy=False) for array in (schedule.rows, schedule.num_new))
    num_computed = running.num_computed[rows] + num_new
    token_rows, positions = rows, num_computed - 1
    if schedule.num_tokens > len(rows):
        token_rows = rows.repeat(num_new)
        positions = np.arange(schedule.num_tokens) + (num_computed - num_new.cumsum()).repeat(num_new)
    # Tokens that the host does not know yet; guesses come after those.
    on_device = (positions >= running.num_known[token_rows]) & (positions < running.num_scheduled[token_rows])
    own = pages_of(rows, num_computed, running, page_table)
    others = [
        pages_of(rows + group * page_table.max_rows, num_computed, running, page_table)
        for group in range(1, page_table.num_groups)
    ]
    # A request in the middle of its prompt has uncomputed tokens left, and samples none. Otherwise a token is sampled
    # after the last one and after each guess.
    num_logits = np.maximum(num_computed - running.num_scheduled[rows] + 1, 0)
    if outputs_apart:
        decodes = num_computed - num_new >= running.num_prompt[rows]
    else:
        decodes = (num_new == 1) | (num_logits == num_new)
    logprobs: tuple[LogprobRows, ...] = ()
    if running.num_asking:
        logprobs = rows_with_logprobs(running.requests_of(rows), rows, num_new, num_computed, num_logits)
    masks = masks_of(rows[(num_logits > 0) & (running.waits[rows] > 0)], running) if running.num_waiting else None
    kept = np.flatnonzero(running.kept >= 0)
    return StepInput(
        rows=rows,
        num_new=num_new,
        num_logits=num_logits,
        kv_lens=own.kv_lens,
        num_computed=num_computed,
        token_ids=running.tokens[token_rows, positions],
        token_source=np.where(on_device, token_rows, -1) if np.count_nonzero(on_device) else None,
        pages=own.pages,
        page_positions=own.page_positions,
        admitted=tuple(admission_of(request, running) for request in schedule.admitted),
        num_decodes=len(rows) if decodes.all() else int(decodes.argmin()),
        copies=np.array(schedule.copies, dtype=np.int32) if schedule.copies else NO_COPIES,
        levels=schedule.levels,
        logprobs=logprobs,
        masks=masks,
        other_groups=tuple(others),
        branches=branches_of(rows, num_logits, running, schedule.masks),
        kept=np.stack([kept, running.kept[kept]], axis=1) if len(kept) else NOTHING_KEPT,
    )


def pages_of(rows: Rows, num_computed: Rows, running: Running, page_table: PageTable) -> GroupPages:
    """Collect the pages of a step's requests in a group of layers.

    Args:
        rows: [B] the requests' rows of the page table in this group.
        num_computed: [B] their tokens whose keys exist after the step.
        running: the columns of the running requests.
        page_table: their pages.
    """
    size, kv_lens, page_positions = page_table.page_size, num_computed, None
    if running.has_evicted:
        kv_lens = num_computed - running.num_evicted[rows]
    page_counts = (kv_lens + (size - 1)) // size
    if running.has_evicted and np.count_nonzero(kv_lens < num_computed):
        index = np.arange(page_counts.sum()) - (page_counts.cumsum() - page_counts).repeat(page_counts)
        page_positions = (num_computed - kv_lens).repeat(page_counts) + index * size
    pages = page_table.pages_of(rows, page_counts)
    # The pages of one row are a view, which the next step changes.
    return GroupPages(kv_lens, pages.copy() if len(rows) == 1 else pages, page_positions)


def masks_of(rows: Rows, running: Running) -> TokenMasks | None:
    """Let the grammars of some rows read the tokens that they have not seen yet, and return what may follow.

    Args:
        rows: rows with a grammar, all of whose tokens are known.
        running: the columns of the running requests.
    """
    masks = []
    for row, request in zip(rows.tolist(), running.requests_of(rows), strict=True):
        read_known(running, row)
        assert request.grammar is not None
        masks.append(request.grammar.mask())
    return TokenMasks(rows, np.stack(masks)) if masks else None


def admission_of(request: Request, running: Running) -> Admission:
    """Return what the sampler needs to know of a running request."""
    row, num_prompt = running.row_of(request), len(request.prompt_token_ids)
    assert row is not None, "admitted without a row"
    output = running.tokens[row, num_prompt : running.num_known[row]].copy()
    return Admission(
        row, request.params, request.seed, request.prompt_token_ids, output, request.end_token_ids,
        is_masked=request.grammar is not None,
    )  # fmt: skip
