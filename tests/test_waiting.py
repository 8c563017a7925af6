"""The policies of the waiting queue: whom they serve first, whom they hold the pool for, and that tokens stay equal.

`test_scheduler.py` checks with random operations that no request starves, whatever the policy.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.errors import ConfigError, RequestError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.parts import Parts
from mini_engine.request import Request
from mini_engine.scheduler import Schedule, Scheduler
from mini_engine.waiting import MOST_TENANTS, OUTPUT_COST, POLICIES, Fair, FirstComeFirstServed, LongestPrefix, Priority
from tests.helpers import GREEDY, alone, check_nothing_leaked, double_model, make_engine, make_request, make_text_engine

LONGEST = 200


class Station:
    """A scheduler whose requests sample the token 1, at depth 0."""

    def __init__(self, policy: FirstComeFirstServed, num_pages: int = 20, batch: int = 4, budget: int = 64) -> None:
        self.table = PageTable(num_pages, 4, batch)
        self.scheduler = Scheduler(
            self.table, max_model_len=LONGEST, max_num_batched_tokens=budget, window=None,
            prefix_sharing=isinstance(policy, LongestPrefix), policy=policy, parts=Parts(),
        )  # fmt: skip
        self.arrivals = 0
        self.admitted: list[int] = []  # arrivals, in order of admission

    def add(self, prompt: list[int], max_tokens: int, priority: int = 0, tenant: str = "") -> Request:
        request = make_request(prompt, max_tokens, self.arrivals)
        request.priority, request.tenant = priority, tenant
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self) -> Schedule:
        schedule, running = self.scheduler.schedule(), self.scheduler.running
        assert schedule is not None
        self.admitted += [request.arrival for request in schedule.admitted]
        rows = schedule.rows
        running.num_computed[rows] += schedule.num_new
        sampling = rows[running.num_computed[rows] == running.num_scheduled[rows]]
        running.num_scheduled[sampling] += 1
        for request in running.requests_of(running.append(sampling, np.ones(len(sampling), dtype=np.int64))):
            self.scheduler.remove(request)
        return schedule

    def serve_all(self) -> list[int]:
        while self.scheduler.waiting or len(self.scheduler.running):
            self.step()
        return self.admitted


def test_priority_serves_lower_numbers_first_and_ties_by_arrival():
    station = Station(Priority(), batch=1)
    for priority in (0, 5, -1, 0, 5, -1):
        station.add([7] * 4, 2, priority)
    assert station.serve_all() == [2, 5, 0, 3, 1, 4]


def test_of_running_requests_the_last_in_line_is_preempted_first():
    station = Station(Priority(), num_pages=6)
    first = station.add([7] * 8, 9, priority=1)
    station.step()
    second, third = station.add([7] * 4, 9, priority=0), station.add([7] * 4, 9, priority=0)
    preempted: list[Request] = []
    while station.scheduler.waiting or len(station.scheduler.running):
        preempted += station.step().preempted
    assert preempted[0] is first, "it is older, but of the worst priority"
    assert all(len(request.token_ids) == request.max_len for request in (first, second, third))


def test_a_preempted_request_waits_behind_a_better_one_that_arrived_meanwhile():
    station = Station(Priority(), num_pages=4)
    low, lower = station.add([7] * 4, 12, priority=1), station.add([7] * 4, 8, priority=2)
    while lower not in station.scheduler.waiting or station.scheduler.running.row_of(low) is None:
        station.step()
    station.add([7] * 4, 2, priority=0)
    assert station.serve_all()[2:4] == [2, 1]


@pytest.mark.parametrize("max_overtakes", [0, 1, 3])
def test_small_requests_pass_a_large_one_a_bounded_number_of_times(max_overtakes: int):
    station = Station(FirstComeFirstServed(max_overtakes), num_pages=12)
    station.add([7] * 24, 12)
    station.step()
    large = station.add([7] * 40, 2)
    for _ in range(8):
        station.add([7] * 3, 1)
    station.step()
    assert station.admitted == [0, *range(2, 2 + min(max_overtakes, 3))]
    order = station.serve_all()
    assert order.index(1) == 1 + max_overtakes and large.num_overtaken == max_overtakes


def test_while_the_pool_is_held_no_other_request_is_admitted_although_pages_are_free():
    station = Station(FirstComeFirstServed(1), num_pages=10)
    station.add([7] * 24, 12)
    station.step()
    station.add([7] * 30, 2)
    for _ in range(4):
        station.add([7] * 3, 1)
    for _ in range(5):
        station.step()
    assert station.admitted == [0, 2] and station.table.num_free_pages > 1 and station.table.num_free_rows > 1


def test_the_longest_cached_prefix_goes_first_until_the_first_in_line_was_overtaken_often_enough():
    for max_overtakes, want in ((0, [0, 1, 2, 3, 4]), (2, [0, 2, 3, 1, 4]), (9, [0, 2, 3, 4, 1])):
        station = Station(LongestPrefix(max_overtakes), num_pages=60, batch=1)
        station.add([7] * 16, 1)
        station.serve_all()
        station.add([8] * 16, 1)
        station.add([7] * 16 + [1] * 5, 1)
        station.add([7] * 16 + [2] * 5, 1)
        station.add([7] * 8 + [3] * 9, 1)
        assert station.serve_all() == want


def test_looking_for_the_longest_prefix_does_not_mark_pages_as_used():
    station = Station(LongestPrefix(9), num_pages=60, batch=1)
    for token in (7, 8):
        station.add([token] * 16, 1)
    station.serve_all()
    tree = station.scheduler.prefix_tree
    assert tree is not None
    before = [node.pages.tolist() for node in tree._by_use]
    assert station.scheduler.num_cached(make_request([7] * 16 + [9], 1, 9)) == 16
    assert [node.pages.tolist() for node in tree._by_use] == before


# --- fairness --------------------------------------------------------------------------------------------------------


def served_tokens(station: Station, requests: list[Request]) -> Counter[str]:
    """Virtual tokens of each tenant, counted from the requests themselves."""
    served = Counter[str]()
    for request in requests:
        known = station.scheduler.running.known_tokens(request)
        if request.arrival in station.admitted:
            num_prompt = len(request.prompt_token_ids)
            served[request.tenant] += num_prompt + OUTPUT_COST * (len(known) - num_prompt)
    return served


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 4), num_pages=st.integers(6, 30))
def test_backlogged_tenants_are_served_alike(seed: int, batch: int, num_pages: int):
    """Sheng et al., theorem 4.4: their counters differ by a bound that does not depend on the time."""
    random = Random(seed)
    policy = Fair(10**9)
    station = Station(policy, num_pages, batch)
    requests = list[Request]()
    sizes = {"a": (1, 6), "b": (8, 20), "c": (3, 3)}
    for _ in range(random.randint(20, 60)):
        for tenant, (low, high) in sizes.items():
            waiting = sum(own.tenant == tenant for own in station.scheduler.waiting)
            # "a" floods, and no step takes all requests of another: a tenant without any would be lifted.
            for _ in range((12 if tenant == "a" else batch + 1) - waiting):
                prompt = [random.randrange(100) for _ in range(random.randint(low, min(high, 4 * num_pages - 4)))]
                requests.append(station.add(prompt, random.randint(1, 4), tenant=tenant))
        station.step()
        policy.served(station.scheduler.running, station.scheduler.running.order)
        served = served_tokens(station, requests)
        assert served == +Counter(policy.counters), "the counters are what was served"
        # A request of each tenant in the batch may be ahead of the others, and outputs come after the admission.
        most = 2 * max(20, (20 + OUTPUT_COST * 4) * batch)
        assert max(served.values()) - min(served[tenant] for tenant in sizes) <= most


def test_a_tenant_that_returns_has_saved_up_nothing():
    """While "b" is away, "a" is served; then both are served alike, and not "b" alone until it has caught up."""
    policy = Fair(10**9)
    station = Station(policy, batch=1)
    for _ in range(20):
        station.add([7] * 8, 2, tenant="a")
    for _ in range(10):
        station.step()
    before = station.arrivals
    for _ in range(10):
        station.add([7] * 8, 2, tenant="b")
    station.admitted.clear()
    order = ["b" if arrival >= before else "a" for arrival in station.serve_all()]
    assert abs(order[:12].count("a") - 6) <= 1


def test_preemption_costs_a_tenant_nothing():
    policy = Fair(10**9)
    station = Station(policy, num_pages=7, batch=4)
    requests = [station.add([7] * 4, 12, tenant=tenant) for tenant in "abab"]
    num_preempted = 0
    while station.scheduler.waiting or len(station.scheduler.running):
        num_preempted += len(station.step().preempted)
    assert num_preempted > 0
    assert policy.counters == served_tokens(station, requests) == {"a": 2 * 28, "b": 2 * 28}


def test_the_counters_of_tenants_that_come_once_are_forgotten():
    policy = Fair(32)
    station = Station(policy, batch=1)
    for i in range(3 * MOST_TENANTS):
        station.add([7], 1, tenant=f"tenant {i}")
        station.step()
    assert len(policy.counters) <= MOST_TENANTS + 1


def test_who_is_ahead_of_a_waiting_request():
    waiting = {}
    for name, policy in POLICIES.items():
        station = Station(policy(4), batch=1)
        station.add([7] * 8, 1, tenant="a", priority=1)
        station.step()
        for tenant, priority in (("a", 1), ("a", 0), ("a", 1), ("b", 0), ("b", 1)):
            last = station.add([7] * 8, 1, priority, tenant)
        waiting[name] = [own.arrival for own in policy(4).ahead(station.scheduler.waiting, last)]
    assert waiting == {"fcfs": [1, 2, 3, 4], "priority": [1, 2, 3, 4], "lpm": [1, 2, 3, 4], "fair": [1, 2, 4]}


# --- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_overtakes", [0, 2])
def test_tokens_do_not_depend_on_the_policy(policy: str, max_overtakes: int):
    """In float64, with a pool so small that requests are preempted and pages are evicted, and several outputs."""
    model = double_model("qwen3")
    engine = make_text_engine(
        model, scheduling_policy=policy, max_overtakes=max_overtakes, num_pages=8, page_size=4, max_batch_size=4,
        max_num_batched_tokens=8, enable_prefix_caching=True,
    )  # fmt: skip
    random = Random(0)
    prompts = [[5] * random.randint(1, 8) + [random.randrange(3, 60) for _ in range(8)] for _ in range(12)]
    priority = [random.randint(-1, 1) for _ in prompts] if policy == "priority" else None
    tenant = [random.choice("ab") for _ in prompts]
    outputs = engine.generate(prompts, GREEDY, priority=priority, tenant=tenant)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == alone(model, prompt, GREEDY)
    assert engine.engine.metrics.preemptions > 0 and engine.engine.metrics.shared_tokens > 0
    check_nothing_leaked(engine.engine)


def test_priorities_reach_the_queue():
    engine = make_text_engine(double_model("qwen3"), scheduling_policy="priority", max_batch_size=1, num_pages=40)
    ended = list[str]()
    engine.engine._on_step = lambda _, report: ended.extend(own.request_id for own in report.finished)
    engine.generate([[5, 6], [7, 8], [9, 10]], GREEDY, priority=[2, 1, 0])
    assert ended == ["stream 2", "stream 1", "stream 0"]


def test_wrong_priorities_and_tenants_are_refused():
    engine = make_text_engine(double_model("qwen3"))
    with pytest.raises(RequestError, match="scheduling_policy"):
        engine.generate([[5]], GREEDY, priority=[1])
    for wrong in ({"priority": [0, 0]}, {"tenant": ["a", "b"]}, {"tenant": "a"}):
        with pytest.raises(RequestError):
            engine.generate([[5]], GREEDY, **wrong)
    assert len(engine.generate([[5]], GREEDY, priority=[0], tenant=["a"])) == 1


def test_the_default_bound_depends_on_the_policy():
    model = double_model("qwen3")
    bounds = {name: make_engine(model, scheduling_policy=name).config.max_overtakes for name in POLICIES}
    assert bounds == {"fcfs": 0, "priority": 0, "lpm": 32, "fair": 32}
    assert make_engine(model, max_overtakes=3).scheduler.policy.max_overtakes == 3
    with pytest.raises(ConfigError, match="max_overtakes"):
        make_engine(model, max_overtakes=-1)
