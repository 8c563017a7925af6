"""The scheduler under random arrivals, endings and aborts: nobody starves, no page leaks, budgets hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine.errors import ConfigError, RequestError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.sampling_params import SamplingParams
from mini_engine.scheduler import Scheduler
from mini_engine.sequence import Sequence
from tests.test_generate import NoText


def make_sequence(prompt_len: int, max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence([1] * prompt_len, params, seed=0, eos_token_ids=(), max_model_len=1000, detokenizer=NoText())


class SchedulerMachine(RuleBasedStateMachine):
    """Steps of an engine that computes nothing but its bookkeeping."""

    @initialize(
        num_pages=st.integers(2, 8), page_size=st.integers(1, 4), batch=st.integers(1, 4), extra=st.integers(0, 6)
    )
    def build(self, num_pages, page_size, batch, extra):
        self.table = PageTable(num_pages, page_size, batch)
        self.scheduler = Scheduler(self.table, max_batch_size=batch, max_num_batched_tokens=batch + extra)
        self.batch, self.budget = batch, batch + extra
        self.arrived: list[Sequence] = []
        self.preemptions = 0

    @rule(prompt_len=st.integers(1, 20), max_tokens=st.integers(1, 10))
    def add(self, prompt_len, max_tokens):
        sequence = make_sequence(prompt_len, max_tokens)
        fits = self.table.pages_for(prompt_len + max_tokens) <= self.table.num_pages
        if fits:
            self.scheduler.add(sequence)
            self.arrived.append(sequence)
        else:
            with pytest.raises(RequestError, match="pages"):
                self.scheduler.add(sequence)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def abort(self, data):
        sequence = data.draw(st.sampled_from(self.arrived))
        self.scheduler.finish(sequence)
        self.arrived.remove(sequence)

    @rule()
    def step(self):
        schedule = self.scheduler.schedule()
        assert bool(schedule.sequences) == bool(self.arrived)
        assert len(set(schedule.sequences)) == len(schedule.sequences) <= self.batch
        assert sum(schedule.num_new) <= self.budget
        assert all(n >= 1 for n in schedule.num_new)
        assert sorted(schedule.num_new, key=lambda n: n > 1) == schedule.num_new
        for sequence in schedule.preempted:
            assert sequence.num_computed == 0 and sequence not in schedule.sequences
        for sequence, num_new in zip(schedule.sequences, schedule.num_new, strict=True):
            sequence.num_computed += num_new
            assert sequence.num_computed <= len(sequence.token_ids)
            held = len(self.table.pages(self.scheduler.rows[sequence]))
            assert held * self.table.page_size >= sequence.num_computed
            if sequence.num_computed == len(sequence.token_ids):
                sequence.append(7)
                if sequence.finish_reason:
                    self.scheduler.finish(sequence)
                    self.arrived.remove(sequence)
        if schedule.sequences:
            oldest = min(schedule.sequences, key=self.age)
            assert all(self.age(oldest) < self.age(s) for s in schedule.preempted)

    def age(self, sequence):
        return self.arrived.index(sequence) if sequence in self.arrived else -1

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

    @invariant()
    def queues_are_by_age_and_pages_are_counted(self):
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert running + waiting == self.arrived
        assert set(self.scheduler.rows) == set(running)
        held = sum(len(self.table.pages(row)) for row in self.scheduler.rows.values())
        assert held + self.table.num_free_pages == self.table.num_pages


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
