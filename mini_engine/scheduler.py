"""Continuous batching: choose which tokens of which requests the next step computes.

A step has a token budget. Decoding requests take one token each, and what is left goes to prompts, in chunks if they
are longer (Yu et al. 2022, "Orca", section 3; Agrawal et al. 2024, "Sarathi-Serve", section 4). When the pool runs out
of pages, the newest running request is preempted and recomputed later (Kwon et al. 2023, section 4.5). The decisions
are in `policy.py` and, where several requests wait, in `waiting.py`; this module keeps the queues and the page
bookkeeping.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int, Int32

from mini_engine.attention.levels import Level
from mini_engine.errors import RequestError
from mini_engine.kv_cache.grouped_prefix_tree import GroupedPrefixTree, PagesOfGroups
from mini_engine.kv_cache.page_table import Pages, PageTable
from mini_engine.kv_cache.prefix_tree import Place, PrefixTree
from mini_engine.logprobs import lacks_prompt_logprobs
from mini_engine.request import Request, Running
from mini_engine.waiting import FirstComeFirstServed

if TYPE_CHECKING:
    from mini_engine.parts import Parts

Rows = Int[np.ndarray, " B"]
Tokens = Int32[np.ndarray, " n"]
NO_PAGES = np.zeros(0, dtype=np.int32)
EVICTION_BATCHES = 64  # a 64th of the pool is evicted at a time, so that most steps evict nothing


@dataclass(eq=False)
class Schedule:
    """One step: its requests, decodes first, and the number of new tokens of each.

    Attributes:
        rows: [B] row of each request in the page table.
        num_new: [B] tokens of each request that the step computes.
        num_tokens: their sum.
        admitted: requests that were waiting until now.
        preempted: requests that lost their pages for this step, newest first.
        num_shared: tokens of the admitted requests that need not be computed, because they are in shared pages.
        copies: pairs of pages; the first is copied to the second before the step writes.
        levels: prefixes that the requests share; see `StepBatch`.
        masks: for rows with guesses and a grammar, what may follow each guess (`branches.py`).
    """

    rows: Rows
    num_new: Int[np.ndarray, " B"]
    num_tokens: int
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_shared: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    levels: tuple[Level, ...] = ()
    masks: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)


class Scheduler:
    """Continuous batching over one pool of pages; by default first come, first served.

    No request starves: all requests stand in one line, only the last running request in line is ever preempted, and a
    request that could not fit into an empty pool is refused at once. So the first running request always makes progress
    and eventually finishes. By default the line is the order of arrival, and no request overtakes another; what other
    policies guarantee is in `waiting.py`.

    Args:
        page_table: the pool; its rows bound the number of running requests.
        max_model_len: longest prompt and output together.
        max_num_batched_tokens: most tokens in one step, at least one for each row (`EngineConfig` checks it).
        window: most keys that any layer sees; pages that have left it are returned. None if a layer sees all keys.
        other_windows: with several groups of layers (`layer_groups.py`), the windows of the others; then `window` is
            None, the first group's. The page table has the same groups.
        prefix_sharing: let requests that begin with the same tokens share pages, and keep pages for later requests.
        outputs_apart: compute the tokens of a prompt and those of the output always in different sequences, also when
            a preempted request is recomputed, and share only prompts. Then different kernels may compute them, and the
            bits of a token's keys still depend on its own request alone.
        policy: chooses the next waiting request; default first come, first served.
        parts: the engine's replaceable parts.

    Attributes:
        waiting: requests without pages, in line.
        running: the columns of the running requests.
        policy: see above.
        budget: most tokens in one step.
        outputs_apart: see above.
        prefix_tree: pages that requests can share; None without prefix sharing.
        num_pinned: pages of the pool that no request can have.
    """

    def __init__(
        self,
        page_table: PageTable,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        window: int | None,
        other_windows: Sequence[int] = (),
        prefix_sharing: bool,
        outputs_apart: bool = False,
        policy: FirstComeFirstServed | None = None,
        parts: "Parts",
    ) -> None:
        self.policy = policy or FirstComeFirstServed()
        self.page_table, self.budget, self.parts = page_table, max_num_batched_tokens, parts
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.running = Running(page_table.max_rows, max_model_len, page_table.num_groups)
        self.num_pinned = 0
        self.outputs_apart, self._windows = outputs_apart, (window, *other_windows)
        # Row of each group of a request, counted from the row of the first group.
        self._offsets = [group * page_table.max_rows for group in range(page_table.num_groups)]
        windows = zip(self._windows, self._offsets, strict=True)
        self._evicting = [(own, offset) for own, offset in windows if own is not None]  # groups that lose pages
        self.prefix_tree: PrefixTree | None = None
        self._grouped_tree: GroupedPrefixTree | None = None
        if prefix_sharing and other_windows:
            self.prefix_tree = self._grouped_tree = GroupedPrefixTree(page_table, other_windows, parts.match_prefix)
        elif prefix_sharing:
            self.prefix_tree = PrefixTree(page_table, parts.match_prefix)
        # Rows whose prompts are not fully computed, and the place in the tree that each has reached.
        self._inserting: dict[int, Place | None] = {}
        self._looked_up: dict[Request, Tokens] = {}  # tokens of waiting requests that were looked up in the tree
        self._is_sorted = False  # nothing has joined either queue since the last step

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: if it could not run to its end even on its own.
        """
        needed, available = self._most_pages(request), self.page_table.num_pages - self.num_pinned
        if needed > available:
            pinned = f", besides {self.num_pinned} that hold chunks" if self.num_pinned else ""
            groups = self.page_table.num_groups  # a page of the options is a page for each group of layers
            raise RequestError(
                f"the request may grow to {request.max_len} tokens, which fill {-(-needed // groups)} pages of the KV "
                f"cache, but there are only {available // groups}{pinned}; shorten it, lower max_tokens, or raise "
                "num_pages"
            )
        self.waiting[request] = None
        self._is_sorted = False

    def num_pinnable(self, requests: Iterable[Request]) -> int:
        """Count the pages that can be taken out of the pool while every given request can still run to its end."""
        needed = max(map(self._most_pages, requests), default=0)
        num_free = self.page_table.num_free_pages + (self.prefix_tree.num_evictable if self.prefix_tree else 0)
        return min(num_free, self.page_table.num_pages - self.num_pinned - needed)

    def pin(self, num_pages: int, requests: Iterable[Request]) -> Pages:
        """Take pages out of the pool.

        Raises:
            RequestError: if these are more than `num_pinnable` for the unfinished requests.
        """
        if num_pages > (most := self.num_pinnable(requests)):
            raise RequestError(
                f"{num_pages} pages are needed, but the requests can spare only {max(most, 0)} of the "
                f"{self.page_table.num_pages} pages of the KV cache; wait until some have ended, or raise num_pages"
            )
        self._make_room(num_pages)
        self.num_pinned += num_pages
        return self.page_table.claim(num_pages)

    def pin_again(self, pages: Pages) -> None:
        """Take specific pages out of a pool in which all pages are still free."""
        everything = self.page_table.claim(self.page_table.num_pages)
        self.page_table.drop(everything[~np.isin(everything, pages)])
        self.num_pinned = len(pages)

    def unpin(self, pages: Pages) -> None:
        """Return pinned pages to the pool."""
        self.page_table.drop(pages)
        self.num_pinned -= len(pages)

    def schedule(self) -> Schedule | None:
        """Choose the tokens of the next step and take their pages.

        Returns:
            The step, which has no requests if nothing can be computed. None if too few pages are free while sampled
            tokens are still on the device. Collect these tokens first: they may end requests, and a request can only be
            preempted once all its tokens are known.
        """
        if not self._is_sorted:
            self.policy.line_up(self.waiting, self.running)
            self._is_sorted = True
        return self.parts.schedule(self)

    def remove(self, request: Request) -> None:
        """Free the row and the pages of a running request, and take a waiting one out of the queue."""
        row = self.running.row_of(request)
        if row is None:
            self.waiting.pop(request, None)
            self._looked_up.pop(request, None)
            return
        self.policy.served(self.running, np.array([row]))
        self._cache_pages(row)
        self._release_other_groups(row)
        self.running.leave(row)
        self.page_table.release(row)

    # --- the steps of the scheduling loop ------------------------------------------------------------------------

    def pending(self) -> tuple[Rows, Rows]:
        """Return the running rows that have tokens to compute, oldest first, and the number of these tokens.

        A row whose last token is already being sampled has none, nor has one that waits for a token on the device.
        """
        running, rows = self.running, self.running.order
        columns = running.num_scheduled, running.num_known, running.max_len, running.waits
        is_ready = self.parts.ready(*(column[rows] for column in columns))
        if np.count_nonzero(is_ready) < len(rows):
            rows = rows[is_ready]
        num_computed = running.num_computed[rows]
        return rows, self._apart(running.num_scheduled[rows] - num_computed, num_computed, running.num_prompt[rows])

    def reserve(self, rows: Rows, num_new: Rows) -> bool:
        """Take the pages that some running rows need for their new tokens, which the step must compute.

        Pages that have left the window are returned first. If too few pages are free, cached pages are evicted.

        Args:
            rows: [B] running rows.
            num_new: [B] new tokens of each, at least 1.

        Returns:
            False if there are too few pages; then only the pages that have left the window are returned.
        """
        running, table = self.running, self.page_table
        if self._evicting:
            self._evict(rows)
        own, num_tokens = table.rows_of(rows), running.num_computed[rows] + num_new
        if table.num_groups > 1:
            num_tokens = np.tile(num_tokens, table.num_groups)
        if running.has_evicted:
            num_tokens = num_tokens - running.num_evicted[own]
        missing, num_missing = table.missing(own, num_tokens)
        if num_missing:
            if not self._make_room(num_missing):
                return False
            table.take(own, missing)
        if self._inserting:
            for b in np.flatnonzero(np.isin(rows, list(self._inserting))).tolist():
                self._insert_prompt(int(rows[b]), int(num_new[b]))
        return True

    def preempt(self) -> Request:
        """Preempt the last running request in line, by default the newest."""
        row = int(self.running.order[-1])
        self.policy.served(self.running, np.array([row]))
        self._cache_pages(row)
        self._release_other_groups(row)
        self._is_sorted = False
        return self.parts.preempt(self.running, self.waiting, self.page_table)

    def admit(self, budget: int, copies: list[tuple[int, int]]) -> tuple[list[Request], list[int], int]:
        """Admit waiting requests as long as there is room, in the order of the policy.

        Args:
            budget: tokens that the step has left.
            copies: receives the pairs of pages to copy before the step writes.

        Returns:
            The admitted requests, how many tokens the step computes of each, and how many tokens they share.
        """
        table, running = self.page_table, self.running
        admitted, num_new, num_shared = list[Request](), list[int](), 0
        earlier = running.order
        if not table.num_free_rows or budget < 1:
            return admitted, num_new, num_shared
        self.policy.served(running, earlier)
        # The watermark keeps a free page for each running request; otherwise they would soon preempt each other.
        held_back = len(earlier) * table.num_groups
        for request in self.policy.candidates(self.waiting, self.num_cached):
            if not table.num_free_rows or budget < 1:
                break
            num_tokens = len(request.token_ids) - request.context_len
            pages, shared_tokens = self._match(request, earlier)
            own_pages, shared_pages = self._demand(num_tokens, pages, shared_tokens)
            free_pages = table.num_free_pages - held_back
            if own_pages > free_pages and self.prefix_tree is not None:
                # Cached pages can be evicted, except those that the request shares.
                free_pages += self.prefix_tree.num_evictable - self.prefix_tree.num_evictable_of(shared_pages)
            counts = num_tokens - shared_tokens, request.context_len + shared_tokens, len(request.prompt_token_ids)
            [most] = self._apart(*(np.array([count]) for count in counts))
            share = self.parts.admit(
                int(most),
                own_pages,
                budget=budget,
                free_pages=free_pages,
                free_rows=table.num_free_rows,
            )
            if share < 1:
                continue
            del self.waiting[request]
            del self._looked_up[request]
            self._is_sorted = False
            self.policy.entered(request, counts[0])
            self._enter(request, pages, shared_tokens, share, copies)
            admitted.append(request)
            num_new.append(share)
            num_shared += shared_tokens + request.context_len
            budget -= share
        return admitted, num_new, num_shared

    def num_cached(self, request: Request) -> int:
        """Count the tokens of a waiting request whose keys are in cached pages of the first group of layers."""
        tree = None if lacks_prompt_logprobs(request) else self.prefix_tree
        return tree.match_len(self._tokens_of(request), request.cache_key) if tree is not None else 0

    # --- details -------------------------------------------------------------------------------------------------

    def _apart(self, num_new: Rows, num_computed: Rows, num_prompt: Rows) -> Rows:
        """Return how many of their next tokens requests may compute in one step, apart from the budget."""
        if not self.outputs_apart:
            return num_new
        left = num_prompt - num_computed
        return np.minimum(num_new, np.where(left > 0, left, self.page_table.max_rows))

    def _num_sharable(self, rows: Rows) -> Rows:
        """Return how many tokens of some rows other requests may share."""
        running = self.running
        known = running.num_known[rows]
        return np.minimum(known, running.num_prompt[rows]) if self.outputs_apart else known

    def _enter(
        self, request: Request, pages: PagesOfGroups, num_shared: int, num_new: int, copies: list[tuple[int, int]]
    ) -> None:
        """Give an admitted request a row, the pages that it shares, and pages for all other tokens.

        Args:
            request: the request.
            pages: the pages of each group that it shares; see `_match`.
            num_shared: tokens in these pages, as far as they are the request's.
            num_new: tokens that the step computes.
            copies: as for `admit`.
        """
        table, running = self.page_table, self.running
        row = table.allocate()
        running.enter(row, request)
        running.num_computed[row] += num_shared
        if request.num_cached_tokens is None:
            request.num_cached_tokens = int(running.num_computed[row])
        for own, offset in zip(pages, self._offsets, strict=True):
            if len(own):
                table.share(row + offset, own)
            if num_gone := len(pages[0]) - len(own):
                running.num_evicted[row + offset] = num_gone * table.page_size
                running.has_evicted = True
        rows = np.array([row])
        reserved = self.reserve(rows, np.array([num_new]))
        of_groups = table.rows_of(rows)
        num_left = (running.num_known[row] - running.num_evicted[of_groups]).tolist()
        held = [self._tokens_at_most(num, window) for num, window in zip(num_left, self._windows, strict=True)]
        missing, num_missing = table.missing(of_groups, np.array(held))
        is_partial = num_shared % table.page_size > 0  # the request is about to write to the last shared page
        reserved = reserved and self._make_room(num_missing + is_partial * table.num_groups)
        assert reserved, "admitted without pages"
        table.take(of_groups, missing)
        if is_partial:
            for own_row in of_groups.tolist():
                first = int(running.num_computed[row] - running.num_evicted[own_row])
                copies += self.parts.copy_on_write(table, own_row, first, first + num_new)
        if self.prefix_tree is not None:
            self._inserting[row] = None
            self._insert_prompt(row, num_new)

    def _make_room(self, num_pages: int) -> bool:
        """Evict cached pages until `num_pages` pages are free; evict none and return False if there are too few."""
        num_short = num_pages - self.page_table.num_free_pages
        if num_short <= 0:
            return True
        if self.prefix_tree is None or self.prefix_tree.num_evictable < num_short:
            return False
        self.prefix_tree.evict(max(num_short, self.page_table.num_pages // EVICTION_BATCHES))
        return True

    def _insert_prompt(self, row: int, num_new: int) -> None:
        """Insert the pages that a step fills with tokens of a row's prompt, so that they can be shared."""
        place = self._inserting.pop(row)
        num_tokens = int(self.running.num_computed[row]) + num_new
        place = self._insert(row, num_tokens, place)
        if place is not None and num_tokens < self._num_sharable(np.array([row]))[0]:
            self._inserting[row] = place

    def _cache_pages(self, row: int) -> None:
        """Insert all computed pages of a row whose request is about to leave, as far as they can be shared."""
        self._inserting.pop(row, None)
        self._insert(row, int(self.running.num_computed[row]))

    def _insert(self, row: int, num_tokens: int, after: Place | None = None) -> Place | None:
        """Insert a row's pages with its first tokens, unless pages have left the window; return the place reached."""
        running = self.running
        first, request = int(running.context_len[row]), running.requests[row]
        num_tokens = min(num_tokens, int(self._num_sharable(np.array([row]))[0]))
        if self.prefix_tree is None or request is None or running.num_evicted[row] > first:
            return None
        tokens, table = running.tokens[row, first:num_tokens], self.page_table
        if self._grouped_tree is None:
            return self.prefix_tree.insert(tokens, table.pages(row), after, request.cache_key)
        rows = [row + offset for offset in self._offsets]
        pages, num_evicted = [table.pages(own) for own in rows], running.num_evicted[rows] // table.page_size
        return self._grouped_tree.insert_groups(tokens, pages, num_evicted.tolist(), after, request.cache_key)

    def _match(self, request: Request, earlier: Rows) -> tuple[PagesOfGroups, int]:
        """Return the pages that a waiting request can share, and how many of its tokens they hold.

        Args:
            request: a waiting request.
            earlier: rows that were admitted before this step.

        Returns:
            The pages of each group of layers. All end at the same page; a group with a window has only the last ones.
        """
        tokens, prefix = self._tokens_of(request), request.prefix
        table, running = self.page_table, self.running
        tree = None if lacks_prompt_logprobs(request) else self.prefix_tree  # cached pages have no logits
        pages: PagesOfGroups = [NO_PAGES] * table.num_groups
        if tree is not None:
            grouped, key = self._grouped_tree, request.cache_key
            pages = [tree.match(tokens, key)] if grouped is None else grouped.match_groups(tokens, key)
        count, size = len(pages[0]), table.page_size
        if prefix is not None and count * size < len(prefix.token_ids):  # the last page may be partly filled
            return [prefix.pinned.pages], len(prefix.token_ids)
        if tree is None or request.context:
            return pages, count * size
        # A request that has the same pages may have computed more of the same tokens, in a page that is not full yet.
        # Only tokens that earlier steps computed can be copied before this step writes.
        rest = tokens[count * size : (count + 1) * size]
        rows = earlier[running.tokens[earlier, count * size] == rest[0]] if len(rest) else earlier[:0]
        rows = rows[(running.num_evicted[rows] == 0) & (table.counts[rows] > count)]
        for offset in self._offsets[1:]:
            rows = rows[running.num_evicted[rows + offset] <= count * size]
        if count:
            rows = rows[table.table[rows, count - 1] == pages[0][-1]]
        in_page = running.tokens[rows, count * size : count * size + len(rest)]
        equal = np.logical_and.accumulate(in_page == rest[: in_page.shape[1]], axis=1).sum(1)
        known = np.minimum(running.num_computed[rows], self._num_sharable(rows)) - count * size
        equal = np.clip(np.minimum(equal, known), 0, None)
        if equal.max(initial=0) == 0:
            return pages, count * size
        best = int(equal.argmax())
        donors = [int(rows[best]) + offset for offset in self._offsets]
        index = count - running.num_evicted[donors] // size
        partial = table.table[donors, index]
        return [np.append(*both) for both in zip(pages, partial, strict=True)], count * size + int(equal[best])

    def _tokens_of(self, request: Request) -> Tokens:
        """Return the tokens of a waiting request that may be in shared pages."""
        if request not in self._looked_up:
            # The last token is always computed, because its logits are needed.
            end = len(request.token_ids) - 1
            if self.outputs_apart:
                end = min(end, len(request.prompt_token_ids))
            self._looked_up[request] = np.array(request.token_ids[request.context_len : end], dtype=np.int32)
        return self._looked_up[request]

    def _demand(self, num_tokens: int, pages: PagesOfGroups, num_shared: int) -> tuple[int, Int32[np.ndarray, " _"]]:
        """Return how many free pages a request needs at most, and the full pages that it need not have for itself.

        Args:
            num_tokens: its tokens.
            pages: the pages that it can share; see `_match`.
            num_shared: its tokens in these pages.
        """
        if self._windows[0] is not None:  # the pages of a prompt would leave the window at once
            return self._pages_at_most(num_tokens), NO_PAGES
        size, num_pages, shared = self.page_table.page_size, 0, []
        for own, window in zip(pages, self._windows, strict=True):
            num_gone = len(pages[0]) - len(own)
            full = own[: num_shared // size - num_gone]
            held = self._tokens_at_most(num_tokens - num_gone * size, window)
            num_pages += self.page_table.pages_for(held) - len(full)
            shared.append(full)
        return num_pages, np.concatenate(shared)

    def _evict(self, rows: Rows) -> None:
        """Return the pages of some running rows that have left the window of their group of layers."""
        running, table, num_computed = self.running, self.page_table, self.running.num_computed[rows]
        own, counts = [rows + offset for _, offset in self._evicting], []
        for of_group, (window, _) in zip(own, self._evicting, strict=True):
            num_evicted = running.num_evicted[of_group]
            counts.append(self.parts.pages_to_evict(num_computed, num_evicted, window, table.page_size))
        every_row = np.concatenate(own)
        num_pages = np.minimum(np.concatenate(counts), table.counts[every_row])
        if np.count_nonzero(num_pages):
            leaving, num_pages = every_row[num_pages > 0], num_pages[num_pages > 0]
            table.drop_fronts(leaving, num_pages)
            running.num_evicted[leaving] += num_pages * table.page_size
            running.has_evicted = True

    def _release_other_groups(self, row: int) -> None:
        """Return a request's pages in all groups but the first, whose row is released with the request."""
        for offset in self._offsets[1:]:
            self.page_table.truncate(row + offset, 0)

    def _most_pages(self, request: Request) -> int:
        """Return the pages that a request fills at its end, not counting those of chunks."""
        of_prefix = len(request.prefix.token_ids) // self.page_table.page_size if request.prefix else 0
        return self._pages_at_most(request.max_len - request.context_len) - of_prefix

    def _tokens_at_most(self, num_tokens: int, window: int | None) -> int:
        """Return the most tokens that a request of up to `num_tokens` has in pages at once; a window limits them."""
        if window is None:
            return num_tokens
        return min(num_tokens, window + self.budget + self.page_table.page_size)

    def _pages_at_most(self, num_tokens: int) -> int:
        return sum(self.page_table.pages_for(self._tokens_at_most(num_tokens, own)) for own in self._windows)


def schedule_step(scheduler: Scheduler) -> Schedule | None:
    """Choose the next step: running requests first, then waiting ones if no request had to be preempted.

    Args:
        scheduler: the queues and the page table.

    Returns:
        The step; None if pages are short while sampled tokens are still on the device.
    """
    preempted, copies = list[Request](), list[tuple[int, int]]()
    while True:
        rows, num_new = scheduler.pending()
        num_tokens = len(rows)
        if np.count_nonzero(num_new > 1):  # decodes always fit
            num_new = scheduler.parts.share_budget(num_new, scheduler.budget)
            rows, num_new = rows[num_new > 0], num_new[num_new > 0]
            num_tokens = int(num_new.sum())
        if scheduler.reserve(rows, num_new):
            break
        if scheduler.running.has_tokens_in_flight:
            return None
        preempted.append(scheduler.preempt())
    admitted, shares, num_shared = list[Request](), list[int](), 0
    if scheduler.waiting and not preempted:  # a request admitted now would be the first to be preempted again
        admitted, shares, num_shared = scheduler.admit(scheduler.budget - num_tokens, copies)
    if admitted:
        num_tokens += sum(shares)
        rows = np.append(rows, scheduler.running.order[len(scheduler.running) - len(admitted) :])
        num_new = np.append(num_new, shares).astype(np.int64)
    if num_tokens > len(rows):
        order = np.argsort(num_new > 1, kind="stable")  # decodes first, otherwise by age
        rows, num_new = rows[order], num_new[order]
    return Schedule(rows, num_new, num_tokens, admitted, preempted, num_shared, copies)
