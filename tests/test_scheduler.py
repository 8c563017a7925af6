"""The scheduler under random arrivals, endings and aborts: nobody starves, no page leaks, budgets hold."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine.errors import ConfigError, RequestError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.prefix_sharing import common_prefix
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence
from tests.test_generate import NoText


def make_sequence(prompt: int | list[int], max_tokens: int) -> Sequence:
    """A sequence with this prompt, or with one of so many ones."""
    token_ids = [1] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(token_ids, params, seed=0, eos_token_ids=(), max_model_len=1000, detokenizer=NoText())


class WipedPageTable(PageTable):
    """Tells the test which pages nobody owns any more."""

    def release(self, page: int) -> None:
        super().release(page)
        if self.refcounts[page] == 0:
            self.wipe(page)

    def wipe(self, page: int) -> None:
        for slot in range(page * self.page_size, (page + 1) * self.page_size):
            self.cache.pop(slot, None)

    cache: dict[int, tuple[int, ...]]  # what a slot's key was computed from: its token and all tokens before it


class SchedulerMachine(RuleBasedStateMachine):
    """Steps of an engine that computes nothing, but knows of every slot which key stands there."""

    @initialize(
        num_pages=st.integers(2, 24),
        page_size=st.integers(1, 4),
        batch=st.integers(1, 4),
        extra=st.integers(0, 40),
        window=st.none() | st.integers(1, 6),
        prefix_sharing=st.booleans(),
    )
    def build(self, num_pages, page_size, batch, extra, window, prefix_sharing):
        self.table = WipedPageTable(num_pages, page_size, batch)
        self.cache = self.table.cache = {}
        self.scheduler = Scheduler(
            self.table,
            max_batch_size=batch,
            max_num_batched_tokens=batch + extra,
            window=window,
            prefix_sharing=prefix_sharing,
        )
        self.batch, self.budget, self.window = batch, batch + extra, window
        self.arrived: list[Sequence] = []
        self.prompts: list[list[int]] = [[]]

    @rule(data=st.data(), max_tokens=st.integers(1, 10))
    def add(self, data, max_tokens):
        before = data.draw(st.sampled_from(self.prompts))
        prompt = before[: data.draw(st.integers(0, len(before)))]
        prompt = prompt + data.draw(st.lists(st.integers(0, 2), min_size=not prompt, max_size=max(20 - len(prompt), 1)))
        self.arrive(prompt, max_tokens)

    def arrive(self, prompt, max_tokens):
        sequence = make_sequence(prompt, max_tokens)
        pages = self.table.pages_for(len(prompt) + max_tokens)
        if pages <= self.table.num_pages:
            self.scheduler.add(sequence)
            self.arrived.append(sequence)
            self.prompts.append(prompt)
        elif self.window is None:
            with pytest.raises(RequestError, match=f"fill {pages} pages"):
                self.scheduler.add(sequence)

    def leave(self, sequence):
        self.scheduler.finish(sequence)
        self.arrived.remove(sequence)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def abort(self, data):
        self.leave(data.draw(st.sampled_from(self.arrived)))

    @rule()
    def step(self):
        decoding = [s for s in self.scheduler.running if len(s.token_ids) - s.num_computed == 1]
        waiting = list(self.scheduler.waiting)
        schedule = self.scheduler.schedule()
        assert bool(schedule.sequences) == bool(self.arrived)
        assert len(set(schedule.sequences)) == len(schedule.sequences) <= self.batch
        assert sum(schedule.num_new) <= self.budget
        assert all(n >= 1 for n in schedule.num_new)
        assert sorted(schedule.num_new, key=lambda n: n > 1) == schedule.num_new
        assert set(decoding) <= {*schedule.sequences, *schedule.preempted}, "a decode had to wait"
        assert schedule.admitted == waiting[: len(schedule.admitted)]
        for sequence in schedule.preempted:
            assert sequence.num_computed == 0 and sequence not in schedule.sequences
        if schedule.sequences:
            oldest = min(schedule.sequences, key=self.arrived.index)
            assert all(self.arrived.index(oldest) < self.arrived.index(s) for s in schedule.preempted)
        self.compute(schedule)
        for sequence in schedule.sequences:
            if sequence.num_computed == len(sequence.token_ids):
                sequence.append(sum(sequence.token_ids) % 3)  # equal prompts go on equally
                if sequence.finish_reason:
                    self.leave(sequence)

    def compute(self, schedule):
        """Copy and write what the schedule says, then look at every key that a query would see."""
        size = self.table.page_size
        for old, new in schedule.copies:
            for offset in range(size):
                self.cache.pop(new * size + offset, None)
                if old * size + offset in self.cache:
                    self.cache[new * size + offset] = self.cache[old * size + offset]
        writers: dict[int, Sequence] = {}
        for sequence, num_new in zip(schedule.sequences, schedule.num_new, strict=True):
            for position in range(sequence.num_computed, sequence.num_computed + num_new):
                slot = self.slot(sequence, position)
                self.cache[slot] = tuple(sequence.token_ids[: position + 1])
                assert writers.setdefault(slot // size, sequence) is sequence, "two sequences write to one page"
        for page in writers:
            # Others may own it at once only if it is full after this step: then nobody writes to it again.
            full = all(page * size + offset in self.cache for offset in range(size))
            assert self.table.refcounts[page] == 1 or full, "a page that is still written to has several owners"
        for sequence, num_new in zip(schedule.sequences, schedule.num_new, strict=True):
            for query in range(sequence.num_computed, sequence.num_computed + num_new):
                first = 0 if self.window is None else max(0, query - self.window + 1)
                for key in range(first, query + 1):
                    assert self.cache.get(self.slot(sequence, key)) == tuple(sequence.token_ids[: key + 1])
            sequence.num_computed += num_new
            assert sequence.num_computed <= len(sequence.token_ids)

    def slot(self, sequence, position):
        """Where a token lies; its page must not have been given up."""
        size, index = self.table.page_size, position - self.scheduler.evicted[sequence]
        assert index >= 0, "a visible page was evicted"
        return int(self.table.pages(self.scheduler.rows[sequence])[index // size]) * size + index % size

    @rule()
    def everyone_ends(self):
        """Nobody starves: with no new arrivals all end, in at most the steps that one at a time would take."""
        most = sum(2 * s.max_len for s in self.arrived) + 1
        for _ in range(most):
            if not self.arrived:
                break
            self.step()
        assert not self.arrived
        assert self.table.num_free_pages == self.table.num_pages
        assert not self.scheduler.evicted and not self.scheduler.rows

    @invariant()
    def queues_are_by_age_and_pages_are_counted(self):
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert running + waiting == self.arrived
        assert set(self.scheduler.rows) == set(running)
        pages = [self.table.pages(self.scheduler.rows[s]).tolist() for s in running]
        owners = np.bincount([page for held in pages for page in held], minlength=self.table.num_pages)
        assert self.table.refcounts.tolist() == owners.tolist()
        assert sorted(self.table.free_pages) == np.flatnonzero(owners == 0).tolist()
        if self.window is not None:
            most = (self.window + self.budget) // self.table.page_size + 2
            assert all(len(held) <= most for held in pages)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("prefix_sharing", [False, True])
@pytest.mark.parametrize("windows", [[None], [1, 2, 3, 5, 8]], ids=["no window", "windows"])
def test_dense_traffic_in_a_tight_pool(windows, prefix_sharing):
    """What the machine meets too rarely: many that share and are preempted, return, and share again."""
    met = Counter()
    for seed in range(60):
        random = Random(seed)
        machine = SchedulerMachine()
        machine.build(
            num_pages=random.randint(4, 14),
            page_size=random.randint(1, 4),
            batch=random.randint(2, 4),
            extra=random.randint(0, 24),
            window=random.choice(windows),
            prefix_sharing=prefix_sharing,
        )
        schedule_of = machine.scheduler.schedule

        def schedule(schedule_of=schedule_of):
            scheduled = schedule_of()
            met["preempted"] += len(scheduled.preempted)
            met["copied"] += len(scheduled.copies)
            met["shared"] += sum(s.num_computed > 0 for s in scheduled.admitted)
            met["returned"] += sum(len(s.token_ids) > s.num_prompt_tokens for s in scheduled.admitted)
            return scheduled

        machine.scheduler.schedule = schedule
        for _ in range(40):
            while len(machine.arrived) < 6 and random.random() < 0.6:
                stem = random.choice(machine.prompts[-4:])
                prompt = stem[: random.choice([len(stem), random.randint(0, len(stem))])]
                prompt = prompt + [random.randint(0, 2) for _ in range(random.randint(not prompt, 8))]
                machine.arrive(prompt[:24], random.randint(1, 12))
            if machine.arrived and random.random() < 0.05:
                machine.leave(random.choice(machine.arrived))
            machine.step()
            machine.queues_are_by_age_and_pages_are_counted()
            met["evicted"] += any(machine.scheduler.evicted.values())
        machine.everyone_ends()
    assert met["preempted"] > 10 and met["returned"] > 5
    assert (met["shared"] > 50 and met["copied"] > 20) if prefix_sharing else met["shared"] == met["copied"] == 0
    assert met["evicted"] == 0 if windows == [None] else met["evicted"] > 50


def test_a_long_prompt_does_not_stop_the_decodes():
    scheduler = Scheduler(PageTable(100, 4, 4), max_batch_size=4, max_num_batched_tokens=8)
    first, long = make_sequence(3, 20), make_sequence(40, 5)
    scheduler.add(first)
    schedule = scheduler.schedule()
    assert (schedule.sequences, schedule.num_new) == ([first], [3])
    first.num_computed = 3
    first.append(7)
    scheduler.add(long)
    for chunk in range(3):
        schedule = scheduler.schedule()
        assert (schedule.sequences, schedule.num_new) == ([first, long], [1, 7])
        first.num_computed += 1
        first.append(7)
        long.num_computed += 7
        assert long.num_computed == 7 * (chunk + 1)


def test_a_budget_too_small_for_the_batch_is_refused():
    with pytest.raises(ConfigError, match="raise the one or lower the other"):
        Scheduler(PageTable(4, 4, 4), max_batch_size=4, max_num_batched_tokens=3)


def test_a_sequence_that_begins_behind_its_window_is_no_donor():
    """All come in at once: the second begins with 16 tokens of the first, and evicts most of their pages at once."""
    machine = SchedulerMachine()
    machine.build(num_pages=60, page_size=2, batch=4, extra=96, window=3, prefix_sharing=True)
    for common, own in ((16, 4), (26, 4), (26, 5)):
        sequence = make_sequence([0] * 16 + [1] * (common - 16) + [2] * own, 5)
        machine.scheduler.add(sequence)
        machine.arrived.append(sequence)
    machine.step()
    assert [s.num_computed for s in machine.arrived] == [20, 30, 31]
    machine.everyone_ends()


def test_equal_prompts_that_arrive_together_share_what_the_first_computes_in_that_step():
    table = PageTable(20, 4, 3)
    scheduler = Scheduler(table, max_batch_size=3, max_num_batched_tokens=64, prefix_sharing=True)
    sequences = [make_sequence(list(range(10)), 4) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    schedule = scheduler.schedule()
    assert dict(zip(schedule.sequences, schedule.num_new, strict=True)) == dict(zip(sequences, (10, 2, 2), strict=True))
    first, *others = (table.pages(scheduler.rows[s]).tolist() for s in sequences)
    assert all(pages[:2] == first[:2] and pages[2] != first[2] for pages in others)
    assert schedule.copies == []  # what the step itself computes cannot be copied before it
    assert table.refcounts[first].tolist() == [3, 3, 1]


def test_a_free_page_is_left_for_each_that_runs():
    scheduler = Scheduler(PageTable(4, 4, 4), max_batch_size=4, max_num_batched_tokens=64)
    running = make_sequence(8, 4)
    scheduler.add(running)
    scheduler.schedule()
    running.num_computed = 8
    running.append(7)
    scheduler.add(make_sequence(4, 4))
    assert not scheduler.schedule().admitted


def test_a_prompt_comes_in_with_pages_for_all_of_it():
    table = PageTable(8, 4, 4)
    scheduler = Scheduler(table, max_batch_size=4, max_num_batched_tokens=8)
    for _ in range(2):
        scheduler.add(make_sequence(24, 4))
    schedule = scheduler.schedule()
    assert len(schedule.admitted) == 1 and schedule.num_new == [8] and table.num_free_pages == 2
    schedule.sequences[0].num_computed = 8
    assert not scheduler.schedule().admitted


def test_pages_that_are_shared_take_no_room():
    scheduler = Scheduler(PageTable(8, 4, 4), max_batch_size=4, max_num_batched_tokens=64, prefix_sharing=True)
    for _ in range(2):
        scheduler.add(make_sequence(list(range(21)), 3))
    assert len(scheduler.schedule().admitted) == 2


def test_of_several_donors_the_one_with_most_in_common_is_taken():
    scheduler = Scheduler(PageTable(20, 4, 4), max_batch_size=4, max_num_batched_tokens=64, prefix_sharing=True)
    sequences = [make_sequence(prompt, 4) for prompt in ([1] * 12, [1] * 4 + [2] * 8, [1] * 13)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    assert sequences[2].num_computed == 12


def test_nobody_is_compared_while_there_is_no_room(monkeypatch):
    compared = []
    monkeypatch.setattr("mini_engine.scheduler.common_prefix", lambda a, b: compared.append(1) or common_prefix(a, b))
    scheduler = Scheduler(PageTable(12, 4, 64), max_batch_size=64, max_num_batched_tokens=64, prefix_sharing=True)
    for _ in range(40):
        scheduler.add(make_sequence(list(range(9)), 4))
    admitted = len(scheduler.schedule().admitted)
    # Each with those before it, and one more, for which there was no room.
    assert admitted > 2 and len(compared) <= (admitted + 1) * admitted // 2
    compared.clear()
    for sequence in scheduler.running:
        sequence.num_computed = 9
        sequence.token_ids.append(1)
    assert not scheduler.schedule().admitted and len(compared) <= admitted


def test_a_prefix_that_ends_inside_a_page_is_copied():
    table = PageTable(20, 4, 3)
    scheduler = Scheduler(table, max_batch_size=3, max_num_batched_tokens=64, prefix_sharing=True)
    donor, sharer = make_sequence([5] * 7, 4), make_sequence([5] * 7, 4)
    scheduler.add(donor)
    scheduler.schedule()
    donor.num_computed = 7
    donor.append(6)
    scheduler.add(sharer)
    schedule = scheduler.schedule()
    assert sharer.num_computed == 6  # the last token's logits are wanted
    (old, new), *more = schedule.copies
    assert not more
    assert table.pages(scheduler.rows[donor]).tolist()[1] == old
    assert table.pages(scheduler.rows[sharer]).tolist() == [table.pages(scheduler.rows[donor])[0], new]
    scheduler.finish(donor)
    assert table.refcounts.sum() == 2
    scheduler.finish(sharer)
    assert table.num_free_pages == 20


def test_without_prefix_sharing_nothing_is_shared():
    table = PageTable(20, 4, 3)
    scheduler = Scheduler(table, max_batch_size=3, max_num_batched_tokens=64)
    for _ in range(3):
        scheduler.add(make_sequence([5] * 7, 4))
    assert scheduler.schedule().num_new == [7, 7, 7]
    assert table.refcounts.max() == 1


@pytest.mark.parametrize("max_batch_size", [0, -1])
def test_a_batch_without_sequences_is_refused(max_batch_size):
    with pytest.raises(ConfigError, match="max_batch_size is"):
        Scheduler(PageTable(4, 4, 4), max_batch_size=max_batch_size, max_num_batched_tokens=3)
