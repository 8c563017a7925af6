"""Continuous batching: which tokens of which sequences the next step computes.

A step has a budget of tokens. Sequences that decode take one each; what is left goes to prompts, in chunks if they are
longer (Yu et al. 2022, "Orca", section 3; Agrawal et al. 2024, "Sarathi-Serve", section 4). When the pool runs out of
pages, the newest running sequence gives its pages up and is recomputed later (Kwon et al. 2023, section 4.5).
"""

from collections import deque
from dataclasses import dataclass, field

from mini_engine.errors import ConfigError, RequestError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.sequence import Sequence


@dataclass(frozen=True)
class Schedule:
    """One step: its sequences, decodes first, and how many new tokens each has.

    Attributes:
        sequences: those of the step.
        num_new: [B] tokens that the step computes of each.
        admitted: those that were waiting before.
        preempted: those that lost their pages for this step, newest first.
    """

    sequences: list[Sequence]
    num_new: list[int]
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served, over one pool of pages.

    Nobody starves: sequences run in the order in which they came, only the newest is ever preempted, and a request
    that could not fit into an empty pool is refused at once. So the oldest always gets on, and then is gone.

    Args:
        page_table: the pool; its rows bound the number of running sequences too.
        max_batch_size: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.

    Attributes:
        waiting: sequences without pages, oldest first; those that were preempted come before the new ones.
        running: sequences with pages, oldest first.
        rows: the row of the page table of each running sequence.

    Raises:
        ConfigError: if a step cannot hold one token of each sequence.
    """

    def __init__(self, page_table: PageTable, *, max_batch_size: int, max_num_batched_tokens: int) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size is {max_batch_size}; it must be 1 or more")
        if max_num_batched_tokens < max_batch_size:
            raise ConfigError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_batch_size ({max_batch_size}): "
                "a step could not decode every sequence; raise the one or lower the other"
            )
        self.page_table = page_table
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.rows: dict[Sequence, int] = {}
        self._max_batch_size = max_batch_size
        self._max_num_batched_tokens = max_num_batched_tokens

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: if it could not run to its end even alone.
        """
        needed = self.page_table.pages_for(sequence.max_len)
        if needed > self.page_table.num_pages:
            raise RequestError(
                f"the request may grow to {sequence.max_len} tokens, which fill {needed} pages of the KV cache, and "
                f"there are {self.page_table.num_pages}; shorten it, lower max_tokens, or give the engine more pages"
            )
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Choose the tokens of the next step and reserve their pages. Empty if nothing is waiting or running."""
        planned: list[tuple[Sequence, int]] = []
        preempted: list[Sequence] = []
        budget = self._max_num_batched_tokens
        for sequence in list(self.running):
            num_new = min(len(sequence.token_ids) - sequence.num_computed, budget)
            if num_new == 0 or sequence not in self.rows:
                continue
            if self._reserve(sequence, sequence.num_computed + num_new, preempted):
                planned.append((sequence, num_new))
                budget -= num_new
        # Whoever came in now would be the first to be preempted again.
        admitted = self._admit(budget) if not preempted else []
        for sequence in admitted:
            num_new = min(len(sequence.token_ids), budget)
            planned.append((sequence, num_new))
            budget -= num_new
        planned.sort(key=lambda item: item[1] > 1)  # stable: decodes first, otherwise by age
        return Schedule([s for s, _ in planned], [n for _, n in planned], admitted, preempted)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or was aborted, waiting or running, and take its pages back."""
        if sequence in self.rows:
            self.page_table.erase(self.rows.pop(sequence))
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _reserve(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> bool:
        """Get pages for a running sequence, from the newest if need be; False if it was itself the newest."""
        while not self.page_table.reserve(self.rows[sequence], num_tokens):
            newest = self.running.pop()
            self.page_table.erase(self.rows.pop(newest))
            newest.num_computed = 0
            self.waiting.appendleft(newest)  # everyone who waits came later
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _admit(self, budget: int) -> list[Sequence]:
        """Move waiting sequences to the running ones, in order, while the pool has pages for all their tokens."""
        admitted = []
        while self.waiting and budget > 0 and len(self.running) < self._max_batch_size:
            sequence = self.waiting[0]
            row = self.page_table.allocate()
            if not self.page_table.reserve(row, len(sequence.token_ids)):
                self.page_table.erase(row)
                break
            self.rows[sequence] = row
            self.running.append(self.waiting.popleft())
            admitted.append(sequence)
            budget -= len(sequence.token_ids)
        return admitted
