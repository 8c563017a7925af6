"""The scheduler under random arrivals, ends and aborts: no request starves, no page leaks, budgets hold."""

from collections import Counter, deque
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mini_engine.errors import RequestError
from mini_engine.kv_cache.grouped_prefix_tree import GroupedPrefixTree
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.scheduler import Schedule, Scheduler
from mini_engine.waiting import POLICIES, FirstComeFirstServed
from tests.helpers import make_request

END = 2  # of the tokens 0, 1 and 2, the one that ends some requests
LONGEST = 48


def make_scheduler(
    table: PageTable,
    budget: int = 64,
    window: int | None = None,
    prefix_sharing: bool = False,
    other_windows: Sequence[int] = (),
    policy: FirstComeFirstServed | None = None,
) -> Scheduler:
    return Scheduler(
        table,
        max_model_len=LONGEST,
        max_num_batched_tokens=budget,
        window=window,
        other_windows=other_windows,
        prefix_sharing=prefix_sharing,
        policy=policy,
        parts=Parts(),
    )


def turns() -> st.SearchStrategy[tuple[int, str]]:
    """Priorities and tenants."""
    return st.tuples(st.integers(-1, 1), st.sampled_from("ab"))


class SchedulerMachine(RuleBasedStateMachine):
    """Steps of an engine without a model. Every slot records the tokens that its key was computed from.

    `texts` has the tokens of each request, including those still on the device; a token is a function of all tokens
    before it. The host learns the tokens of a step when it is collected, up to `depth` launches later.
    """

    @initialize(
        num_pages=st.integers(2, 24),
        page_size=st.integers(1, 4),
        batch=st.integers(1, 4),
        extra=st.integers(0, 40),
        windows=st.tuples(st.none() | st.integers(1, 6)) | st.tuples(st.none(), st.integers(1, 6), st.integers(1, 6)),
        prefix_sharing=st.booleans(),
        depth=st.integers(0, 1),
        policy=st.just("fcfs") | st.sampled_from(list(POLICIES)),
        max_overtakes=st.integers(0, 4),
    )
    def build(self, num_pages, page_size, batch, extra, windows, prefix_sharing, depth, policy="fcfs", max_overtakes=0):
        num_groups = len(windows)
        self.table = PageTable(num_groups * num_pages, page_size, batch, num_groups=num_groups)
        self.policy = POLICIES[policy](max_overtakes)
        self.scheduler = make_scheduler(self.table, batch + extra, windows[0], prefix_sharing, windows[1:], self.policy)
        self.has_priorities, self.max_overtakes = policy == "priority", max_overtakes
        self.overtaken: Counter[Request] = Counter()
        self.batch, self.budget, self.windows, self.depth = batch, batch + extra, windows, depth
        self.slots: dict[int, tuple[int, ...]] = {}  # what each key was computed from: its token and all before it
        self.in_flight: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()
        self.texts: dict[Request, list[int]] = {}
        self.unfinished: list[Request] = []  # in order of arrival
        self.prompts: list[list[int]] = [[]]
        self.met: Counter[str] = Counter()

    # --- requests ----------------------------------------------------------------------------------------------------

    @rule(data=st.data(), max_tokens=st.integers(1, 10), has_end=st.booleans(), turn=turns())
    def add(self, data, max_tokens, has_end, turn):
        before = data.draw(st.sampled_from(self.prompts))
        prompt = before[: data.draw(st.integers(0, len(before)))]
        prompt = prompt + data.draw(st.lists(st.integers(0, 2), min_size=not prompt, max_size=max(20 - len(prompt), 1)))
        self.arrive(prompt, max_tokens, has_end, *turn)

    def arrive(self, prompt, max_tokens, has_end=False, priority=0, tenant=""):
        request = make_request(prompt, max_tokens, len(self.texts), (END,) if has_end else ())
        request.priority, request.tenant = priority, tenant
        pages = self.table.pages_for(len(prompt) + max_tokens)
        if pages * len(self.windows) <= self.table.num_pages:
            self.scheduler.add(request)
            self.unfinished.append(request)
            self.unfinished.sort(key=self.rank)
            self.texts[request] = list(prompt)
            self.prompts.append(prompt)
        elif self.windows == (None,):
            with pytest.raises(RequestError, match=f"fill {pages} pages"):
                self.scheduler.add(request)

    def rank(self, request):
        """The place in line, which this test knows by itself."""
        return request.priority if self.has_priorities else 0, request.arrival

    def leave(self, request):
        self.scheduler.remove(request)
        self.unfinished.remove(request)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.unfinished))
        self.leave(request)
        self.scheduler.remove(request)  # nothing is left to remove

    # --- one step ----------------------------------------------------------------------------------------------------

    @rule()
    def step(self):
        before = self.before()
        schedule = self.scheduler.schedule()
        if schedule is None:
            assert self.scheduler.running.has_tokens_in_flight
            self.met["drained"] += 1
            while self.in_flight:
                self.collect()
            before = self.before()
            schedule = self.scheduler.schedule()
            assert schedule is not None, "no token is on the device any more"
        self.check_decisions(schedule, *before)
        if len(schedule.rows):
            self.launch(schedule)
        while len(self.in_flight) > (self.depth if len(schedule.rows) else 0):
            self.collect()

    def before(self) -> tuple[list[Request], list[Request], dict[Request, int]]:
        """Running and waiting requests, and how many tokens each running one has to compute."""
        running = self.scheduler.running
        rows = {request: int(running.row_of(request)) for request in running.requests_of(running.order)}
        requests = sorted(rows, key=self.rank)
        pending = {
            request: int(running.num_scheduled[row] - running.num_computed[row])
            for request in requests
            if running.num_scheduled[row := rows[request]] < request.max_len
        }
        return requests, sorted(self.scheduler.waiting, key=self.rank), pending

    def check_decisions(self, schedule: Schedule, was_running, waiting, pending):
        running = self.scheduler.running
        work = dict(zip(running.requests_of(schedule.rows), schedule.num_new.tolist(), strict=True))
        shares = list(work.values())
        assert schedule.num_tokens == sum(shares) <= self.budget
        assert len(work) == len(schedule.rows) <= self.batch
        assert all(share >= 1 for share in shares)
        assert sorted(shares, key=lambda n: n > 1) == shares, "decodes come first"
        kept = was_running[: len(was_running) - len(schedule.preempted)]
        assert was_running == kept + schedule.preempted[::-1], "the last in line are preempted, the last one first"
        self.check_line(schedule.admitted, waiting)
        assert not (schedule.admitted and schedule.preempted)
        assert running.requests_of(running.order) == kept + schedule.admitted
        for request in kept:
            if request in pending:
                assert work.get(request, 0) <= pending[request]
                assert pending[request] > 1 or work[request] == 1, "a decode had to wait"
            else:
                assert request not in work, "its last token is being sampled already"
        first = next((request for request in was_running if request in pending), None)
        assert first is None or first in work, "the first running request in line makes no progress"
        blocked = any(request not in pending for request in was_running)  # by a request that ends when collected
        assert work or blocked or not self.unfinished, "no request makes progress"
        oldest = next((request for request in self.unfinished if request in pending or request in waiting), None)
        # Until enough of those behind it have ended, or while it may be overtaken.
        can_wait = oldest in waiting and (first is not None or (schedule.admitted and self.max_overtakes > 0))
        assert oldest is None or oldest in work or blocked or can_wait, "the first request makes no progress"
        self.met["preempted"] += len(schedule.preempted)
        self.met["copied"] += len(schedule.copies)
        self.met["shared"] += schedule.num_shared
        self.met["returned"] += sum(len(request.output_token_ids) > 0 for request in schedule.admitted)
        self.met["evicted"] += int(running.num_evicted[self.table.rows_of(schedule.rows)].any())

    def check_line(self, admitted, waiting):
        """The first waiting request in line is overtaken `max_overtakes` times in its life, and no more."""
        waiting = list(waiting)
        for request in admitted:
            if waiting[0] is not request:
                self.overtaken[waiting[0]] += 1
                self.met["overtaken"] += 1
                assert self.overtaken[waiting[0]] <= self.max_overtakes
            waiting.remove(request)

    def launch(self, schedule: Schedule):
        """Copy and write what the schedule says, look at every key that a query would see, and sample."""
        running, size = self.scheduler.running, self.table.page_size
        for old, new in schedule.copies:
            for offset in range(size):
                self.slots[new * size + offset] = self.slots.get(old * size + offset, ())
        work = list(zip(schedule.rows.tolist(), schedule.num_new.tolist(), strict=True))
        writer: dict[int, int] = {}
        for row, num_new in work:
            text = self.texts[running.requests[row]]
            assert running.known_tokens(running.requests[row]) == text[: running.num_known[row]]
            for position in range(running.num_computed[row], running.num_computed[row] + num_new):
                for own in self.rows_of(row):
                    slot = self.slot(own, position)
                    self.slots[slot] = tuple(text[: position + 1])
                    assert writer.setdefault(slot // size, own) == own, "two requests or groups write to one page"
        for page, own in writer.items():
            # A page may have other owners at once only if it is full after this step: it is not written to again.
            row = own % self.batch
            filled = running.num_computed[row] + dict(work)[row] - running.num_evicted[own]
            full = self.table.pages(own)[: filled // size]
            assert self.table.refcounts[page] == 1 or page in full, "a page that is written to has several owners"
        sampled = []
        for row, num_new in work:
            text = self.texts[running.requests[row]]
            end = int(running.num_computed[row]) + num_new
            for query in range(end - num_new, end):
                for own, window in zip(self.rows_of(row), self.windows, strict=True):
                    for key in range(0 if window is None else max(0, query - window + 1), query + 1):
                        wrong = self.slots[self.slot(own, key)] != tuple(text[: key + 1])
                        assert not wrong, "a key is not the request's own"
            running.num_computed[row] = end
            if end == running.num_scheduled[row]:
                text.append((sum(text) + len(text) // 3) % 3)
                running.num_scheduled[row] += 1
                sampled.append((row, int(running.admission[row]), text[-1]))
        self.in_flight.append(tuple(np.array(column, dtype=np.int64) for column in zip(*sampled, strict=True)) or NONE)

    def rows_of(self, row: int) -> list[int]:
        """The rows of the page table that a request has, one for each group of layers."""
        return self.table.rows_of(np.array([row])).tolist()

    def slot(self, row: int, position: int) -> int:
        """The slot of a token in a row of the page table; its page must not have been released."""
        running, size = self.scheduler.running, self.table.page_size
        index = position - int(running.num_evicted[row])
        assert index >= 0, "a visible page was evicted"
        return int(self.table.pages(row)[index // size]) * size + index % size

    def collect(self):
        running = self.scheduler.running
        rows, admissions, tokens = self.in_flight.popleft()
        live = running.admission[rows] == admissions
        self.met["dropped"] += int((~live).sum())
        rows = rows[live]
        for request in running.requests_of(running.append(rows, tokens[live])):
            self.leave(request)
            text = self.texts[request]
            assert request.token_ids == text[: len(request.token_ids)]
            assert request.end_of(request.token_ids) and len(text) - len(request.token_ids) <= self.depth

    @rule()
    def all_end(self):
        """Without new arrivals all requests end, in at most as many steps as they take one at a time.

        A request that is overtaken may be preempted for each request that overtakes it.
        """
        num_times = 1 + self.max_overtakes * len(self.unfinished)
        for _ in range(num_times * sum(2 * request.max_len + 2 for request in self.unfinished)):
            if self.unfinished:
                self.step()
        assert not self.unfinished
        tree, size = self.scheduler.prefix_tree, self.table.page_size
        if tree is not None:
            for page in tree.pages.tolist():  # each is found by what its keys were computed from
                text = np.array(self.slots[(page + 1) * size - 1], dtype=np.int32)
                last = int(tree.match(text)[-1])
                beside = tree._beside[:, last] if isinstance(tree, GroupedPrefixTree) else []
                assert page == last or page in beside
            self.met["cached"] += len(tree.pages)
            tree.evict(self.table.num_pages)
        assert self.table.num_free_pages == self.table.num_pages and self.table.num_free_rows == self.batch

    @invariant()
    def counts_and_pages_agree(self):
        running = self.scheduler.running
        rows = running.order
        requests = running.requests_of(rows) + list(self.scheduler.waiting)
        assert sorted(requests, key=self.rank) == self.unfinished
        assert requests == self.unfinished or self.max_overtakes or self.has_priorities
        assert len(self.in_flight) <= self.depth
        flying = running.num_scheduled[rows] - running.num_known[rows]
        assert ((flying >= 0) & (flying <= self.depth)).all()
        assert (running.num_computed[rows] <= running.num_scheduled[rows]).all()
        assert (running.num_scheduled[rows] <= running.max_len[rows]).all()
        held = [[self.table.pages(own).tolist() for own in self.rows_of(row)] for row in rows.tolist()]
        assert all((running.num_evicted[self.rows_of(row)] <= running.num_computed[row]).all() for row in rows)
        pages = [own for of_groups in held for own in of_groups]
        owners = np.bincount([page for held in pages for page in held], minlength=self.table.num_pages)
        if self.scheduler.prefix_tree is not None:
            owners[self.scheduler.prefix_tree.pages] += 1
        assert self.table.refcounts.tolist() == owners.tolist()
        for of_groups in held:
            for own, window in zip(of_groups, self.windows, strict=True):
                assert window is None or len(own) <= (window + self.budget) // self.table.page_size + 2


NONE = (np.zeros(0, dtype=np.int64),) * 3
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_starves_in_a_tight_pool_whatever_the_policy(policy):
    """Arrivals never end, and some requests need the whole pool; each is still served."""
    met = Counter()
    for seed in range(12):
        random = Random(seed)
        machine = SchedulerMachine()
        machine.build(
            num_pages=6, page_size=2, batch=4, extra=12, windows=(None,), prefix_sharing=seed % 2 > 0,
            depth=seed // 2 % 2, policy=policy, max_overtakes=seed % 4,
        )  # fmt: skip
        large = None
        for i in range(120):
            if i == 20:  # behind others, of which there is no end
                machine.arrive([0] * 9, 3, False, 0, "a")
                large = max(machine.texts, key=lambda request: request.arrival)
            while len(machine.unfinished) < 7:
                tenant = random.choice("ab")
                machine.arrive([random.randint(0, 2)] * random.randint(1, 4), random.randint(1, 5), False, 0, tenant)
            machine.step()
            machine.counts_and_pages_agree()
        assert large is not None and len(large.token_ids) == large.max_len, "the large request starves"
        machine.all_end()
        met += machine.met
    assert (met["overtaken"] > 20) and met["preempted"] > 2


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prefix_sharing", [False, True])
@pytest.mark.parametrize(
    "windows",
    [[(None,)], [(1,), (2,), (3,), (5,), (8,)], [(None, 1), (None, 3), (None, 8), (None, 2, 5)]],
    ids=["no window", "windows", "groups"],
)
def test_dense_traffic_in_a_tight_pool(windows, prefix_sharing, depth):
    """Traffic that the machine rarely draws: many requests share, are preempted, return, and share again."""
    met = Counter()
    for seed in range(20):
        random = Random(seed)
        machine = SchedulerMachine()
        machine.build(
            num_pages=random.randint(4, 9),
            page_size=random.randint(1, 4),
            batch=random.randint(2, 6),
            extra=random.randint(0, 8),
            windows=random.choice(windows),
            prefix_sharing=prefix_sharing,
            depth=depth,
        )
        for _ in range(40):
            while len(machine.unfinished) < 6 and random.random() < 0.6:
                stem = random.choice(machine.prompts[-4:])
                prompt = stem[: random.choice([len(stem), random.randint(0, len(stem))])]
                prompt = prompt + [random.randint(0, 2) for _ in range(random.randint(not prompt, 8))]
                machine.arrive(prompt[:24], random.randint(1, 12), random.random() < 0.3)
            if machine.unfinished and random.random() < 0.05:
                machine.leave(random.choice(machine.unfinished))
            machine.step()
            machine.counts_and_pages_agree()
        machine.all_end()
        met += machine.met
    assert met["preempted"] > 2 and met["returned"] > 2
    assert (met["shared"] > 20 and met["copied"] > 2) if prefix_sharing else met["shared"] == met["copied"] == 0
    assert met["evicted"] == 0 if windows == [(None,)] else met["evicted"] > 20
    assert (met["dropped"] > 4 and met["drained"] > 2) if depth else met["dropped"] == met["drained"] == 0


# --- by hand ---------------------------------------------------------------------------------------------------------


def run(scheduler: Scheduler, token: int = 1) -> list[tuple[int, int]]:
    """Compute one step at depth 0, where every sampled token is the same; return each request's number and share."""
    schedule, running = scheduler.schedule(), scheduler.running
    requests = running.requests_of(schedule.rows)
    compute(scheduler, schedule, token)
    return [(request.arrival, n) for request, n in zip(requests, schedule.num_new.tolist(), strict=True)]


def compute(scheduler: Scheduler, schedule: Schedule, token: int = 1) -> None:
    """Count a step as computed and collected."""
    running, rows = scheduler.running, schedule.rows
    running.num_computed[rows] += schedule.num_new
    sampling = rows[running.num_computed[rows] == running.num_scheduled[rows]]
    running.num_scheduled[sampling] += 1
    for request in running.requests_of(running.append(sampling, np.full(len(sampling), token, dtype=np.int64))):
        scheduler.remove(request)


def pages_of(scheduler: Scheduler, request: Request) -> list[int]:
    return scheduler.page_table.pages(scheduler.running.row_of(request)).tolist()


def test_a_long_prompt_does_not_stop_the_decodes():
    scheduler = make_scheduler(PageTable(100, 4, 4), budget=8)
    scheduler.add(make_request([1] * 3, 20, 0))
    assert run(scheduler) == [(0, 3)]
    scheduler.add(make_request([1] * 40, 5, 1))
    assert [run(scheduler) for _ in range(6)] == [[(0, 1), (1, 7)]] * 5 + [[(0, 1), (1, 5)]]


def test_a_request_that_is_behind_its_window_cannot_be_shared_from():
    """All arrive at once: the second begins with 16 tokens of the first, and evicts most of their pages at once."""
    machine = SchedulerMachine()
    machine.build(num_pages=60, page_size=2, batch=4, extra=96, windows=(3,), prefix_sharing=True, depth=0)
    for common, own in ((16, 4), (26, 4), (26, 5)):
        machine.arrive([0] * 16 + [1] * (common - 16) + [2] * own, 5)
    machine.step()
    running = machine.scheduler.running
    assert running.num_computed[running.order].tolist() == [20, 30, 31]
    machine.all_end()


def test_equal_prompts_that_arrive_together_share_what_the_first_computes_in_that_step():
    scheduler = make_scheduler(PageTable(20, 4, 3), prefix_sharing=True)
    requests = [make_request(list(range(10)), 4, i) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    schedule = scheduler.schedule()
    assert schedule.num_new.tolist() == [10, 2, 2] and schedule.num_shared == 16
    first, *others = (pages_of(scheduler, request) for request in requests)
    assert all(pages[:2] == first[:2] and pages[2] != first[2] for pages in others)
    assert schedule.copies == []  # what the step itself computes cannot be copied before it
    assert scheduler.page_table.refcounts[first].tolist() == [4, 4, 1]  # the prefix tree is the fourth owner


def test_a_free_page_is_left_for_each_running_request():
    scheduler = make_scheduler(PageTable(4, 4, 4))
    scheduler.add(make_request([1] * 8, 4, 0))
    run(scheduler)
    scheduler.add(make_request([1] * 8, 4, 1))
    assert run(scheduler) == [(0, 1)]  # its third page leaves one free page, which is held back for it


def test_a_request_is_admitted_with_pages_for_its_whole_prompt():
    table = PageTable(8, 4, 4)
    scheduler = make_scheduler(table, budget=8)
    for i in range(2):
        scheduler.add(make_request([1] * 24, 4, i))
    assert run(scheduler) == [(0, 8)] and table.num_free_pages == 2
    assert run(scheduler) == [(0, 8)]


def test_shared_pages_need_no_room():
    scheduler = make_scheduler(PageTable(8, 4, 4), prefix_sharing=True)
    for i in range(2):
        scheduler.add(make_request(list(range(21)), 3, i))
    assert len(scheduler.schedule().admitted) == 2


def test_the_request_with_most_tokens_in_common_is_shared_from():
    scheduler = make_scheduler(PageTable(20, 4, 4), prefix_sharing=True)
    for i, prompt in enumerate(([1] * 12, [1] * 4 + [2] * 8, [1] * 13)):
        scheduler.add(make_request(prompt, 4, i))
    assert scheduler.schedule().num_shared == 4 + 12


def test_a_prefix_that_ends_inside_a_page_is_copied():
    table = PageTable(20, 4, 3)
    scheduler = make_scheduler(table, prefix_sharing=True)
    first, second = make_request([5] * 7, 4, 0), make_request([5] * 7, 4, 1)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    schedule = scheduler.schedule()
    assert schedule.num_shared == 6  # the last token is computed in any case, for its logits
    ((old, new),) = schedule.copies
    assert old == pages_of(scheduler, first)[1]
    assert pages_of(scheduler, second) == [pages_of(scheduler, first)[0], new]
    scheduler.remove(first)
    assert table.refcounts[pages_of(scheduler, second)].tolist() == [2, 1] and table.num_free_pages == 18
    scheduler.remove(second)
    assert table.num_free_pages == 19 and scheduler.prefix_tree.num_evictable == 1


def serve_alone(scheduler: Scheduler, prompt: list[int], max_tokens: int, arrival: int) -> Schedule:
    """Run one request to its end, whose output is all 1, and return its first step."""
    request = make_request(prompt, max_tokens, arrival)
    scheduler.add(request)
    steps = []
    while len(request.token_ids) < request.max_len:
        steps.append(scheduler.schedule())
        compute(scheduler, steps[-1])
    return steps[0]


def test_the_next_turn_of_a_chat_shares_the_answer_before_it():
    scheduler = make_scheduler(PageTable(20, 4, 3), prefix_sharing=True)
    assert serve_alone(scheduler, [5] * 6, 5, 0).num_shared == 0  # 11 tokens; the last one is not computed
    assert serve_alone(scheduler, [5] * 6 + [1] * 5 + [6] * 3, 4, 1).num_shared == 8
    assert serve_alone(scheduler, [5] * 6 + [2] * 4, 1, 2).num_shared == 4


@pytest.mark.parametrize("is_running", [False, True])
def test_of_a_cached_prompt_that_fills_its_pages_the_last_token_is_computed(is_running):
    """From the page of a running request all but that token is copied; otherwise the last page is computed again."""
    scheduler = make_scheduler(PageTable(20, 4, 3), prefix_sharing=True)
    scheduler.add(make_request([5] * 8, 4 if is_running else 1, 0))
    compute(scheduler, scheduler.schedule())
    assert len(scheduler.running) == is_running
    scheduler.add(make_request([5] * 8, 4, 1))
    schedule = scheduler.schedule()
    assert schedule.num_shared == (7 if is_running else 4) and len(schedule.copies) == is_running
    assert schedule.num_new.tolist() == ([1, 1] if is_running else [4])


def test_cached_pages_are_evicted_before_a_request_is_preempted_or_has_to_wait():
    table = PageTable(8, 4, 4)
    scheduler = make_scheduler(table, prefix_sharing=True)
    serve_alone(scheduler, [5] * 28, 1, 0)
    assert table.num_free_pages == 1 and scheduler.prefix_tree.num_evictable == 7
    scheduler.add(make_request([6] * 12, 5, 1))
    scheduler.add(make_request([7] * 8, 9, 2))
    schedule = scheduler.schedule()
    assert len(schedule.admitted) == 2
    while len(scheduler.running) == 2:
        compute(scheduler, schedule)
        schedule = scheduler.schedule()
        assert not schedule.preempted
    assert scheduler.prefix_tree.num_evicted == 7 and table.num_free_pages == 0


def test_a_preempted_request_finds_its_pages_again_when_it_returns():
    table = PageTable(6, 4, 4)
    scheduler = make_scheduler(table, prefix_sharing=True)
    first, second = make_request([5] * 11, 6, 0), make_request([6] * 11, 6, 1)
    scheduler.add(first)
    scheduler.add(second)
    schedules = [scheduler.schedule()]
    while not schedules[-1].preempted:
        compute(scheduler, schedules[-1])
        schedules.append(scheduler.schedule())
    assert schedules[-1].preempted == [second] and schedules[-1].num_shared == 0
    assert scheduler.prefix_tree.num_evicted == 1  # its last page, which the first request needs
    while not schedules[-1].admitted:
        compute(scheduler, schedules[-1])
        schedules.append(scheduler.schedule())
    assert schedules[-1].admitted == [second] and schedules[-1].num_shared == 8
    assert pages_of(scheduler, second)[:2] == scheduler.prefix_tree.match(np.full(8, 6, dtype=np.int32)).tolist()


def test_a_prompt_in_chunks_is_shared_as_far_as_it_is_computed():
    scheduler = make_scheduler(PageTable(40, 4, 3), budget=10, prefix_sharing=True)
    scheduler.add(make_request([5] * 30, 4, 0))
    shared = []
    for i in range(4):
        scheduler.add(make_request([5] * 30, 4, i + 1))
        schedule = scheduler.schedule()
        shared.append(len(scheduler.prefix_tree.pages))
        compute(scheduler, schedule)
    assert shared == [2, 5, 7, 7]


def test_without_prefix_sharing_nothing_is_shared():
    table = PageTable(20, 4, 3)
    scheduler = make_scheduler(table)
    for i in range(3):
        scheduler.add(make_request([5] * 7, 4, i))
    assert run(scheduler) == [(0, 7), (1, 7), (2, 7)]
    assert table.refcounts.max() == 1


def test_a_request_is_preempted_only_when_all_its_tokens_are_known():
    """Two decodes in a full pool at depth 1: nothing is scheduled before the tokens on the device are collected."""
    machine = SchedulerMachine()
    machine.build(num_pages=4, page_size=2, batch=2, extra=8, windows=(None,), prefix_sharing=False, depth=1)
    machine.arrive([1, 1, 1], 4)
    machine.arrive([0], 6)
    machine.all_end()
    assert machine.met["drained"] > 0 and machine.met["preempted"] > 0
