"""Snapshots of an engine between two steps: its requests, and the owners of the pages of its KV cache.

The server's page draws them. A snapshot is taken with numpy where the engine is, and only when a page asks for it, so a
server without an open page does no extra work.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Int

from mini_engine.engine import LLMEngine
from mini_engine.kv_cache.page_table import PageTable

MAX_CELLS = 4096  # squares that the page draws
MAX_WAITING = 64  # waiting requests that the page names
FREE, CACHED, HELD, OWNED, SHARED = range(5)  # states of a page; a cell of several pages has the highest of them
LETTERS = np.frombuffer(b".chos", dtype=np.uint8)  # one for each state


@dataclass(frozen=True)
class RunningRequest:
    """A request in the batch.

    Attributes:
        name: its name.
        number: its number in the order of arrival.
        row: its row of the page table.
        prompt: tokens of the prompt.
        output: tokens of the output that the host knows.
        computed: tokens of prompt and output with keys and values in the cache, once the launched steps are done.
        num_pages: number of its pages, in all groups of layers.
        cells: cells of these pages. If a cell is a page, they are in order of position, group by group.
    """

    name: str
    number: int
    row: int
    prompt: int
    output: int
    computed: int
    num_pages: int
    cells: list[int]


@dataclass(frozen=True)
class WaitingRequest:
    """A request without pages: a new one, or one that was preempted.

    Attributes:
        name: its name.
        number: its number in the order of arrival.
        prompt: tokens of the prompt.
        output: tokens of the output so far; more than 0 only after a preemption.
    """

    name: str
    number: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Snapshot:
    """An engine between two steps.

    Attributes:
        num_pages: pages of the pool.
        page_size: tokens of a page.
        pages_per_cell: consecutive pages that are drawn as one cell; 1 unless the pool is large.
        cells: one letter for each cell: `.` free, `c` cached in the prefix tree alone, `h` held by a registered chunk,
            `o` owned by one request, `s` shared by several requests.
        filled: tokens in each owned page that is not full, by the page; empty if a cell is several pages.
        num_free: pages without an owner.
        num_cached: pages that only the prefix tree owns.
        num_shared: pages of several requests.
        running: the requests in the batch, oldest first.
        waiting: the first waiting requests, the next one first.
        num_waiting: number of all waiting requests.
        output_tokens: tokens sampled since the engine was built.
        hit_rate: share of the prompt tokens that the cache already had.
        preemptions: preemptions since the engine was built.
    """

    num_pages: int
    page_size: int
    pages_per_cell: int
    cells: str
    filled: dict[int, int]
    num_free: int
    num_cached: int
    num_shared: int
    running: list[RunningRequest]
    waiting: list[WaitingRequest]
    num_waiting: int
    output_tokens: int
    hit_rate: float
    preemptions: int

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as a JSON object."""
        lists = {"running": [vars(own) for own in self.running], "waiting": [vars(own) for own in self.waiting]}
        return vars(self) | lists


def take_snapshot(engine: LLMEngine, max_cells: int = MAX_CELLS) -> Snapshot:
    """Take a snapshot of an engine; call it between two steps.

    Args:
        engine: the engine.
        max_cells: most cells that the pool is drawn as.
    """
    table, scheduler, totals = engine.page_table, engine.scheduler, engine.metrics
    running = scheduler.running
    rows = table.rows_of(running.order)
    counts = table.counts[rows]
    pages = table.pages_of(rows, counts)
    states = _states(table, pages, None if scheduler.prefix_tree is None else scheduler.prefix_tree.pages)
    pages_per_cell = -(-table.num_pages // max_cells)
    filled = dict[int, int]()
    if pages_per_cell == 1:
        num_stored = np.tile(running.num_computed[running.order], table.num_groups) - running.num_evicted[rows]
        tokens = num_stored.repeat(counts) - _index_in_row(counts) * table.page_size
        is_partial = tokens < table.page_size
        filled = dict(zip(pages[is_partial].tolist(), tokens[is_partial].clip(min=0).tolist(), strict=True))
    return Snapshot(
        num_pages=table.num_pages,
        page_size=table.page_size,
        pages_per_cell=pages_per_cell,
        cells=_letters(states, pages_per_cell),
        filled=filled,
        num_free=table.num_free_pages,
        num_cached=int(np.count_nonzero(states == CACHED)),
        num_shared=int(np.count_nonzero(states == SHARED)),
        running=[_running(engine, int(row), pages_per_cell) for row in running.order],
        waiting=[
            WaitingRequest(own.request_id, own.arrival, len(own.prompt_token_ids), len(own.output_token_ids))
            for own in islice(scheduler.waiting, MAX_WAITING)
        ],
        num_waiting=len(scheduler.waiting),
        output_tokens=totals.output_tokens,
        hit_rate=totals.hit_rate,
        preemptions=totals.preemptions,
    )


def _states(
    table: PageTable, pages: Int[np.ndarray, " n"], in_tree: Int[np.ndarray, " m"] | None
) -> Int[np.ndarray, " pages"]:
    """Return the state of each page of the pool, given the pages of all requests and those of the prefix tree."""
    num_requests = np.bincount(pages, minlength=table.num_pages)
    states = np.where(table.refcounts > 0, HELD, FREE)
    if in_tree is not None:
        states[in_tree] = CACHED
    states[num_requests == 1] = OWNED
    states[num_requests > 1] = SHARED
    return states


def _letters(states: Int[np.ndarray, " pages"], pages_per_cell: int) -> str:
    padded = np.pad(states, (0, -len(states) % pages_per_cell))
    return LETTERS[padded.reshape(-1, pages_per_cell).max(axis=1)].tobytes().decode()


def _index_in_row(counts: Int[np.ndarray, " B"]) -> Int[np.ndarray, " n"]:
    """Return the index of each page within its row, for rows with these numbers of pages."""
    return np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)


def _running(engine: LLMEngine, row: int, pages_per_cell: int) -> RunningRequest:
    table, running = engine.page_table, engine.scheduler.running
    rows, request = table.rows_of(np.array([row])), running.requests[row]
    assert request is not None, f"row {row} is empty"
    pages = table.pages_of(rows, table.counts[rows])
    prompt = int(running.num_prompt[row])
    return RunningRequest(
        name=request.request_id,
        number=request.arrival,
        row=row,
        prompt=prompt,
        output=int(running.num_known[row]) - prompt,
        computed=int(running.num_computed[row]),
        num_pages=len(pages),
        cells=(pages if pages_per_cell == 1 else np.unique(pages // pages_per_cell)).tolist(),
    )
