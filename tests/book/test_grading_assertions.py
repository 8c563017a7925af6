"""The graders' assertions: they pass what is right and name what is wrong, the plainest mistake first."""

import math
from typing import Any

import pytest
import torch

from book.grading import assert_close, assert_equal, assert_raises, assert_values, require
from book.grading.assertions import CheckFailed

ONES = torch.ones(2, 3)
DIFFERS = "your result: 1 of 6 values differs, the worst at [1, 2]:"


def with_value(value: float) -> torch.Tensor:
    tensor = ONES.clone()
    tensor[1, 2] = value
    return tensor


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (ONES + 9e-6, ONES),
        (with_value(math.inf), with_value(math.inf)),
        (with_value(math.nan), with_value(math.nan)),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (torch.tensor(2.0), 2.0),
        (-math.inf, -math.inf),
        (3, 3.0),
        ((ONES, 1.0), [ONES, 1.0]),
        ({"a": ONES}, {"a": ONES}),
        (ONES.requires_grad_(), torch.ones(2, 3)),
        (torch.tensor([True, False]), torch.tensor([True, False])),
    ],
)
def test_what_is_close_passes(actual: Any, expected: Any) -> None:
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (None, ONES, "your result: None. Is a `return` missing?"),
        ([1.0], ONES, "your result: a list, expected a tensor of shape [2, 3]"),
        (ONES.T, ONES, "your result: shape [3, 2], expected [2, 3]"),
        (ONES.double(), ONES, "your result: dtype float64, expected float32"),
        (ONES, 1.0, "your result: a Tensor, expected a number"),
        ("1", 1.0, "your result: a str, expected a number"),
        ((ONES,), (ONES, ONES), "your result: length 1, expected 2"),
        (ONES, (ONES, ONES), "your result: a Tensor, expected a tuple of length 2"),
        ({"a": 1}, {"b": 1}, "your result: the key 'b' is missing"),
        ({"a": 1, "b": 1}, {"b": 1}, "your result: the key 'a' should not be there"),
        ([1], {"b": 1}, "your result: a list, expected a dictionary"),
    ],
)
def test_a_wrong_kind_of_result_speaks_for_itself(actual: Any, expected: Any, message: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        assert_close(actual, expected, mistake="the values")
    assert (str(failure.value), failure.value.mistake) == (message, "")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (with_value(math.nan), ONES, "your result: NaN in 1 of 6 values, the first at [1, 2]"),
        (with_value(1.5), ONES, f"{DIFFERS} 1.5, expected 1"),
        (with_value(math.inf), ONES, f"{DIFFERS} inf, expected 1"),
        (with_value(-math.inf), with_value(math.inf), f"{DIFFERS} -inf, expected inf"),
        (torch.tensor(1.5), torch.tensor(1.0), "your result: 1.5, expected 1"),
        (torch.tensor([True]), torch.tensor([False]), "your result: True, expected False"),
        (math.nan, 1.0, "your result: nan, expected 1"),
        (with_value(-0.0), with_value(-math.inf), f"{DIFFERS} 0, expected -inf"),
        (with_value(1.00002), ONES, f"{DIFFERS} 1.00002, expected 1"),
        (10_000.001, 10_000.0, "your result: 10000.001, expected 10000"),
        (1.1, 1.0, "your result: 1.1, expected 1"),
        (math.inf, 1.0, "your result: inf, expected 1"),
        ((ONES, 2.0), (ONES, 1.0), "your result[1]: 2, expected 1"),
        ({"a": 2}, {"a": 1}, 'your result["a"]: 2, expected 1'),
    ],
)
def test_wrong_values_are_put_down_to_the_mistake(actual: Any, expected: Any, message: str) -> None:
    with pytest.raises(CheckFailed) as failure:
        assert_close(actual, expected, mistake="the values")
    assert (str(failure.value), failure.value.mistake) == (message, "the values")


def test_a_message_that_says_it_all() -> None:
    require(True, "fine")
    with pytest.raises(CheckFailed, match="changed") as failure:
        require(False, "you changed x")
    assert failure.value.mistake == ""


def test_tolerances() -> None:
    assert_close(1.1, 1.0, atol=0.11)
    assert_close(ONES * 1.1, ONES, atol=0, rtol=0.11)
    with pytest.raises(CheckFailed):
        assert_close(ONES * 1.1, ONES, atol=0.09)
    with pytest.raises(CheckFailed):
        assert_close(1.1, 1.0, atol=0, rtol=0.09)
    assert_close(ONES.double(), ONES, check_dtype=False)


def test_a_single_number_has_no_index() -> None:
    for value in (2.0, float("nan")):
        with pytest.raises(CheckFailed, match=f"{value:g}"):
            assert_close(torch.tensor(value), torch.tensor(1.0))


def test_names_appear() -> None:
    with pytest.raises(CheckFailed, match="LSE"):
        assert_close(2.0, 1.0, name="the LSE")
    with pytest.raises(CheckFailed, match="flops"):
        assert_equal(12, 76, name="flops")
    with pytest.raises(CheckFailed, match="6 of 6"):
        assert_close(ONES, 2 * ONES, name="x")


def test_values_may_have_any_dtype() -> None:
    assert_values(ONES.double(), ONES)
    assert_values((ONES.int(), 1.0), (ONES, 1.0))
    with pytest.raises(CheckFailed, match="1 of 6"):
        assert_values(with_value(2.0).double(), ONES)


def test_long_texts_are_shown_where_they_differ() -> None:
    with pytest.raises(CheckFailed) as failure:
        assert_equal("a" * 500 + "b", "a" * 500 + "c")
    got, wanted = str(failure.value).removeprefix("your result: ").split(", expected ")
    assert got.startswith("…aaa") and got.endswith("aab'") and wanted.endswith("aac'")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(3, 3), ([1, "a"], [1, "a"]), (torch.tensor([1, 2]), torch.tensor([1, 2])), (torch.tensor(3), 3)],
)
def test_what_is_equal_passes(actual: Any, expected: Any) -> None:
    assert_equal(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected", "message", "mistake"),
    [
        (3, 4, "your result: 3, expected 4", "off by one"),
        ([1], [1, 2], r"your result: \[1\], expected \[1, 2\]", "off by one"),
        (None, 4, "your result: None", ""),
        (torch.tensor([1, 2]), [1, 2], "your result: a Tensor, expected a list", ""),
        (torch.tensor([1, 3]), torch.tensor([1, 2]), "1 of 2 values differs", "off by one"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1, 2]), "dtype float32, expected int64", ""),
    ],
)
def test_what_is_not_equal_is_shown(actual: Any, expected: Any, message: str, mistake: str) -> None:
    with pytest.raises(CheckFailed, match=message) as failure:
        assert_equal(actual, expected, mistake="off by one")
    assert failure.value.mistake == mistake


def test_a_call_that_should_raise() -> None:
    assert_raises(ValueError, int, "x")
    with pytest.raises(CheckFailed, match="ValueError"):
        assert_raises(ValueError, int, "7")
    with pytest.raises(TypeError):
        assert_raises(ValueError, int, [])
