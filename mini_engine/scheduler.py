"""Continuous batching: which tokens of which sequences the next step computes.

A step has a budget of tokens. Sequences that decode take one each; what is left goes to prompts, in chunks if they are
longer (Yu et al. 2022, "Orca", section 3; Agrawal et al. 2024, "Sarathi-Serve", section 4). When the pool runs out of
pages, the newest running sequence gives its pages up and is recomputed later (Kwon et al. 2023, section 4.5).
What is decided, `policy.py` decides; here are the queues and the pages.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from mini_engine.errors import ConfigError, RequestError, check_positive
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import common_prefix
from mini_engine.parts import Parts
from mini_engine.sequence import Sequence


@dataclass(frozen=True)
class Schedule:
    """One step: its sequences, decodes first, and how many new tokens each has.

    Attributes:
        sequences: those of the step.
        num_new: [B] tokens that the step computes of each.
        admitted: those that were waiting before.
        preempted: those that lost their pages for this step, newest first.
        copies: pairs of pages; the first must be copied to the second before the step writes.
    """

    sequences: list[Sequence]
    num_new: list[int]
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Prefix(NamedTuple):
    """The tokens that a waiting sequence need not compute: those at the beginning of another's pages."""

    donor: Sequence | None
    num_tokens: int


class Scheduler:
    """First come, first served, over one pool of pages.

    Nobody starves: sequences run in the order in which they came, only the newest is ever preempted, and a request
    that could not fit into an empty pool is refused at once. So the oldest always gets on, and then is gone.

    Args:
        page_table: the pool; its rows bound the number of running sequences too.
        max_batch_size: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        window: keys that any layer sees at most; pages behind it are given up. None if a layer sees all.
        prefix_sharing: let sequences that begin with the same tokens own the same pages.
        parts: the engine's replaceable parts.

    Attributes:
        waiting: sequences without pages, oldest first; those that were preempted come before the new ones.
        running: sequences with pages, oldest first.
        rows: the row of the page table of each running sequence.
        evicted: tokens of each running sequence whose pages were given up behind its window.

    Raises:
        ConfigError: if a step cannot hold one token of each sequence.
    """

    def __init__(
        self,
        page_table: PageTable,
        *,
        max_batch_size: int,
        max_num_batched_tokens: int,
        window: int | None = None,
        prefix_sharing: bool = False,
        parts: Parts | None = None,
    ) -> None:
        check_positive(max_batch_size=max_batch_size, max_num_batched_tokens=max_num_batched_tokens)
        if max_num_batched_tokens < max_batch_size:
            raise ConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_batch_size ({max_batch_size}): "
                "a step could not decode every sequence; raise the one or lower the other"
            )
        self.page_table = page_table
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.rows: dict[Sequence, int] = {}
        self.evicted: dict[Sequence, int] = {}
        self._max_batch_size = max_batch_size
        self._max_num_batched_tokens = max_num_batched_tokens
        self._window = window
        self._prefix_sharing = prefix_sharing
        self._parts = parts or Parts()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: if it could not run to its end even alone.
        """
        needed = self._pages_needed(sequence.max_len)
        if needed > self.page_table.num_pages:
            raise RequestError(
                f"the request may grow to {sequence.max_len} tokens, which fill {needed} pages of the KV cache, and "
                f"there are {self.page_table.num_pages}; shorten it, lower max_tokens, or give the engine more pages"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Choose the tokens of the next step and reserve their pages. Empty if nothing is waiting or running."""
        num_new: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        pending = [len(s.token_ids) - s.num_computed for s in self.running]
        shares = self._parts.fuse(pending, self._max_num_batched_tokens)
        for sequence, share in zip(list(self.running), shares, strict=True):
            if share and sequence in self.rows and self._reserve(sequence, share, preempted, copies):
                num_new[sequence] = share
        # Whoever came in now would be the first to be preempted again.
        admitted = self._admit(num_new, copies) if not preempted else []
        decodes_first = sorted(num_new.items(), key=lambda item: item[1] > 1)  # stable: otherwise by age
        return Schedule([s for s, _ in decodes_first], [n for _, n in decodes_first], admitted, preempted, copies)

    def preempt_all(self) -> None:
        """Send all running sequences back to wait, after a step that was scheduled and could not be computed."""
        while self.running:
            self._parts.preempt(self.running, self.waiting, self.rows, self.page_table)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or was aborted, waiting or running, and take its pages back."""
        if sequence in self.rows:
            self.page_table.erase(self.rows.pop(sequence))
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.evicted.pop(sequence, None)

    def _get_pages(self, sequence: Sequence, num_new: int) -> list[tuple[int, int]] | None:
        """Make room for the step's tokens of a running sequence; None if the pool has too few free pages.

        Returns:
            Pages to copy: those that it would write to and does not own alone.
        """
        table, row = self.page_table, self.rows[sequence]
        if self._window is not None:
            pages = self._parts.evict_pages(table, row, self.evicted[sequence], sequence.num_computed, self._window)
            self.evicted[sequence] += pages * table.page_size
        first = sequence.num_computed - self.evicted[sequence]
        if not table.reserve(row, first + num_new):
            return None
        return self._parts.copy_on_write(table, row, first, first + num_new) if self._prefix_sharing else []

    def _reserve(
        self, sequence: Sequence, num_new: int, preempted: list[Sequence], copies: list[tuple[int, int]]
    ) -> bool:
        """Get pages for a running sequence, from the newest if need be; False if it was itself the newest."""
        while (copied := self._get_pages(sequence, num_new)) is None:
            preempted.append(self._parts.preempt(self.running, self.waiting, self.rows, self.page_table))
            if preempted[-1] is sequence:
                return False
        copies += copied
        return True

    def _admit(self, num_new: dict[Sequence, int], copies: list[tuple[int, int]]) -> list[Sequence]:
        """Move waiting sequences to the running ones, and say in `num_new` what the step computes of them."""
        table = self.page_table
        budget = self._max_num_batched_tokens - sum(num_new.values())
        free_rows = self._max_batch_size - len(self.running)
        # Leave a page for each that runs to grow into: with none they would soon preempt each other.
        free_pages = table.num_free_pages - len(self.running)
        prefixes = self._prefixes(num_new, free_rows, budget, free_pages)
        candidates = list(islice(self.waiting, len(prefixes)))
        count = self._parts.admit(
            [len(s.token_ids) - p.num_tokens for s, p in zip(candidates, prefixes, strict=True)],
            [self._pages_to_come_in(s, p) for s, p in zip(candidates, prefixes, strict=True)],
            budget=budget,
            free_pages=free_pages,
            free_rows=free_rows,
        )
        for sequence, prefix in zip(candidates[:count], prefixes, strict=False):
            row = self.rows[sequence] = table.allocate()
            if prefix.donor:
                self._parts.share_prefix(table, row, self.rows[prefix.donor], prefix.num_tokens)
            self.running.append(self.waiting.popleft())
            self.evicted[sequence] = 0
            sequence.num_computed = prefix.num_tokens
            num_new[sequence] = min(len(sequence.token_ids) - prefix.num_tokens, budget)
            budget -= num_new[sequence]
            copied = self._get_pages(sequence, num_new[sequence])
            reserved = table.reserve(row, self._most_held(len(sequence.token_ids) - self.evicted[sequence]))
            assert copied is not None and reserved, "admitted without pages"
            copies += copied
        return candidates[:count]

    def _prefixes(self, num_new: dict[Sequence, int], free_rows: int, budget: int, free_pages: int) -> list[Prefix]:
        """What each of the waiting can share with a running sequence or one before it, if all before it come in.

        Ends behind the first for which there is no room: nobody overtakes it.
        """
        candidates = list(islice(self.waiting, free_rows))
        if not self._prefix_sharing:
            return [Prefix(None, 0)] * len(candidates)
        prefixes: list[Prefix] = []
        page_size = self.page_table.page_size
        # Of each donor: tokens whose keys stand in its pages now, and after this step.
        donors = [(s, s.num_computed, s.num_computed + num_new.get(s, 0)) for s in self.running if not self.evicted[s]]
        for sequence in candidates:
            if budget < 1 or free_pages < 1:
                break
            best, best_now = Prefix(None, 0), 0
            for donor, now, after_step in donors:
                # The last token is computed in any case: its logits are wanted.
                tokens = min(
                    common_prefix(sequence.token_ids, donor.token_ids), len(sequence.token_ids) - 1, after_step
                )
                if tokens > now:  # what the step itself computes cannot be copied before it: whole pages only
                    tokens = max(now, tokens // page_size * page_size)
                if tokens > best.num_tokens:
                    best, best_now = Prefix(donor, tokens), min(now, tokens)
            share = min(len(sequence.token_ids) - best.num_tokens, budget)
            budget -= share
            free_pages -= self._pages_to_come_in(sequence, best)
            # One that begins further in than its window gives pages up as it comes in: nobody can begin with them.
            if self._window is None or best.num_tokens < self._window + page_size - 1:
                donors.append((sequence, best_now, best.num_tokens + share))
            prefixes.append(best)
        return prefixes

    def _pages_to_come_in(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free pages that a waiting sequence takes: for all its tokens, but for the whole pages that it shares."""
        shared = prefix.num_tokens // self.page_table.page_size if self._window is None else 0
        return self._pages_needed(len(sequence.token_ids)) - shared

    def _most_held(self, num_tokens: int) -> int:
        """Tokens in pages at one time of a sequence that grows to so many: fewer, if it has a window."""
        if self._window is None:
            return num_tokens
        return min(num_tokens, self._window + self._max_num_batched_tokens + self.page_table.page_size)

    def _pages_needed(self, num_tokens: int) -> int:
        return self.page_table.pages_for(self._most_held(num_tokens))
