"""The experiment measures every operator of a layer, each with its own bound."""

from dataclasses import replace
from pathlib import Path

import torch

from book.grading.chapter import load_module
from mini_engine.roofline import Machine, ModelShape, decoder_layer_costs

run = load_module("experiment_00_roofline", Path(__file__).parents[2] / "experiments" / "00_roofline" / "run.py")


def test_every_operator_is_measured_once_in_every_case() -> None:
    shape = ModelShape(16, 2, 4, 2, 8, 24, 50)
    cases = (run.Case("prefill", 1, 5, 5), run.Case("decode", 1, 1, 5), run.Case("decode", 3, 1, 5))
    setting = replace(run.CPU, shape=shape, cases=cases, rotate_bytes=1)
    machine = Machine("a machine", "float32", bandwidth=1e9, flops=1e9)
    rows = run.operator_rows(run.time_operators(setting, torch.device("cpu")), machine)
    operators = [*decoder_layer_costs(shape, 1, 5, 4), "lm_head"]
    assert [row.figure for row in rows] == [*operators, "layer"] * 3
    layers = [row for row in rows if row.figure == "layer"]
    for layer in layers:
        parts = [row for row in rows if row.case == layer.case and row.figure in operators[:-1]]
        assert layer.bound == sum(row.bound for row in parts)
        assert layer.value == sum(row.value for row in parts) > 0


def test_the_better_rates_are_the_bound() -> None:
    one, other = (Machine("a machine", "float32", bandwidth=b, flops=f) for b, f in ((1e9, 5e9), (2e9, 4e9)))
    assert run.faster(one, other) == Machine("a machine", "float32", bandwidth=2e9, flops=5e9)


def test_operands_rotate_through_as_much_memory_as_is_asked() -> None:
    cost = run.Cost(0, 1000)
    made: list[int] = []

    def make():
        made.append(1)
        return lambda: None

    assert len(run.rotating(make, cost, rotate_bytes=20_500)) == len(made) == 21
    made.clear()
    assert len(run.rotating(make, cost, rotate_bytes=1)) == 16
    assert len(made) == 1
