"""The memory counter, on cases that can be counted by hand."""

import torch

from book.memory import measure_memory


def test_the_peak_counts_what_lives_at_once() -> None:
    def fn() -> torch.Tensor:
        a = torch.zeros(1000)  # 4,000 B
        b = a + 1  # 8,000 B alive
        del a
        return b * 2 + b.sum()  # b, b * 2, the sum of 4 B, and their sum: 12,004 B

    memory = measure_memory(fn)
    assert (memory.peak, memory.largest) == (12_004, 4_000)


def test_inputs_views_and_changes_in_place_cost_nothing() -> None:
    x = torch.zeros(1000)
    assert measure_memory(lambda: x.view(10, 100).T[3:].add_(1)).peak == 0


def test_shapes_without_memory_are_counted() -> None:
    x = torch.empty(200_000, 64, device="meta")
    assert measure_memory(lambda: x @ x.T).largest == 200_000**2 * 4


def test_what_is_freed_can_be_used_again() -> None:
    def fn() -> None:
        for _ in range(5):
            torch.zeros(1000)

    assert measure_memory(fn).peak == 4_000


def test_agrees_with_the_allocator() -> None:
    x = torch.randn(64, 64)

    def fn() -> torch.Tensor:
        return torch.softmax((x @ x.T).masked_fill(x > 0, 0.5), -1) @ x

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fn()
    alive = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    assert measure_memory(fn).peak == peak > 0
