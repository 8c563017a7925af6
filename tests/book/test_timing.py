"""Measuring, and what a notebook prints about the machine it runs on."""

import time

import pytest
import torch

import book
from book.environment import versions
from book.timing import Timing, measure
from book.units import number, quantity


def test_median_rate_and_units() -> None:
    timing = Timing((0.003, 0.001, 0.002))
    assert (timing.seconds, timing.ms, timing.us) == (0.002, 2.0, 2000.0)
    assert timing.rate(10) == 5000
    assert repr(timing) == "2 ms (median of 3, 1 ms to 3 ms)"


def test_measure_warms_up_and_repeats() -> None:
    calls = []
    timing = measure(lambda: calls.append(1), runs=3, warmup=2)
    assert len(timing.runs) == 3 and min(timing.runs) >= 0
    assert len(calls) >= 5  # so short a function may be called many times in each run


def test_measure_calls_a_slow_function_once_in_each_run() -> None:
    calls = []

    def slow() -> None:
        calls.append(1)
        time.sleep(0.05)

    measure(slow, runs=2, warmup=1)
    assert len(calls) == 3


@pytest.mark.parametrize(("runs", "warmup"), [(0, 1), (1, 0)])
def test_measure_refuses_nothing_to_measure(runs: int, warmup: int) -> None:
    with pytest.raises(ValueError, match="least"):
        measure(lambda: None, runs=runs, warmup=warmup)


@pytest.mark.gpu
def test_measure_on_a_gpu_times_the_device() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    assert measure(lambda: x @ x, device="cuda").seconds > 1e-5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2048, "2,048"),
        (12.5829, "12.6"),
        (9.999, "10.0"),
        (0.9998, "1.00"),
        (0.0123, "0.0123"),
        (123.46, "123"),
        (1234.56, "1,235"),
        (999.9, "1,000"),
        (3.14159e-5, "3.14e-05"),
        (-0.5, "-0.500"),
        (0.0, "0"),
        (float("-inf"), "−∞"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00125, "s", "1.25 ms"),
        (4.3e12, "B/s", "4.30 TB/s"),
        (2e-10, "s", "0.200 ns"),
        (31.52, "tokens/s", "31.5 tokens/s"),
        (1536, "B", "1.54 kB"),
        (0, "s", "0 s"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_setup_prints_versions_and_devices_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    book.setup(seed=3)
    first = torch.rand(2)
    book.setup(seed=3)
    assert torch.equal(first, torch.rand(2))
    printed = capsys.readouterr().out
    assert f"torch {versions()['torch']}" in printed and "cpu: " in printed and "gpu: " in printed


def test_every_exported_name_exists() -> None:
    assert {name for name in book.__all__ if getattr(book, name, None) is None} == set()
    with pytest.raises(AttributeError, match="nothing"):
        _ = book.nothing
