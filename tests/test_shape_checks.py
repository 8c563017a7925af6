"""The checks of annotations that the tests run under find what they should."""

from dataclasses import dataclass

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.spec import AttentionSpec
from mini_engine.models.layers import rms_norm
from tests.shape_checks import checked


@checked
def first(x: Float[Tensor, "N D"], weight: Float[Tensor, " D"], n: int) -> Float[Tensor, "M D"]:
    return x[: int(n)] * weight


@checked
class Pair:
    @checked
    def __init__(self, rows: Float[Tensor, " N"]) -> None:
        self.rows = rows

    @property
    @checked
    def both(self) -> Float[Tensor, "2 N"]:
        return torch.stack([self.rows] * len(self.rows))


@checked
@dataclass(frozen=True)
class Record:
    ids: Int[Tensor, " N"]
    lens: Int[Tensor, " N"]


def test_a_letter_is_one_number_in_parameters_and_result() -> None:
    assert first(torch.ones(3, 4), torch.ones(4), 2).shape == (2, 4)
    for x, weight, n in [
        (torch.ones(3, 4), torch.ones(3), 2),
        (torch.ones(12), torch.ones(4), 2),
        (torch.ones(3, 4, dtype=torch.int64), torch.ones(4), 2),
        (torch.ones(3, 4), torch.ones(4), "2"),
        (torch.ones(3, 4), None, 2),
    ]:
        with pytest.raises(BeartypeCallHintViolation):
            first(x, weight, n)


def test_a_result_of_the_wrong_shape_is_found() -> None:
    @checked
    def sums(x: Float[Tensor, "N D"], dim: int) -> Float[Tensor, " N"]:
        return x.sum(dim)

    assert sums(torch.ones(3, 4), 1).shape == (3,)
    with pytest.raises(BeartypeCallHintViolation):
        sums(torch.ones(3, 4), 0)


def test_an_alternative_that_does_not_fit_binds_no_letter() -> None:
    @checked
    def rows(x: Float[Tensor, " N"], y: Float[Tensor, "D N"] | Float[Tensor, "N D"], z: Float[Tensor, " D"]) -> int:
        return len(x)

    x, y, z = torch.ones(3), torch.ones(3, 4), torch.ones(4)
    for _ in range(2):  # the second time, the sizes alone are compared
        assert rows(x, y, z) == rows(x, y.T, z) == 3
        with pytest.raises(BeartypeCallHintViolation):
            rows(x, y, x)


def test_the_letters_of_one_call_do_not_bind_another() -> None:
    @checked
    def outer(x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        first(torch.ones(9, 5), torch.ones(5), 1)
        return x

    assert len(outer(torch.ones(2))) == 2 and len(outer(torch.ones(3))) == 3


def test_methods_properties_and_data_classes_are_checked() -> None:
    assert Pair(torch.ones(2)).both.shape == (2, 2)
    with pytest.raises(BeartypeCallHintViolation):
        _ = Pair(torch.ones(3)).both
    with pytest.raises(BeartypeCallHintViolation):
        Record(torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))


def test_the_engine_is_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        rms_norm(torch.ones(3, 4), torch.ones(5), 1e-5)
    with pytest.raises(BeartypeCallHintViolation):
        AttentionSpec(layer="0")  # type: ignore[call-arg, arg-type]
