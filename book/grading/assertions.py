"""Assertions that say what is wrong in words: what was returned first, its values last.

torch is imported only where it is needed: a chapter without tensors is graded without it.
"""

import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


_TOO_COARSE = "the right formula, computed in a dtype of too low precision"


class CheckFailed(AssertionError):
    """A failed check. `mistake` replaces the one of the check: "" where the message itself says it all."""

    def __init__(self, message: str, mistake: str | None = None) -> None:
        super().__init__(message)
        self.mistake = mistake


def assert_close(
    actual: Any,
    expected: Any,
    *,
    atol: float = 1e-5,
    rtol: float = 0.0,
    mistake: str | None = None,
    name: str = "your result",
    check_dtype: bool = True,
) -> None:
    """Fails unless |actual - expected| <= atol + rtol * |expected| everywhere.

    Numbers, tensors, and sequences or mappings of them can be compared. A result of another type, shape or dtype, or
    with NaN where there should be none, is named before any value is compared. `mistake` is the likely reason for
    wrong values; without it, the one of the check is shown. `name` says what is compared, such as "the LSE".
    """
    if isinstance(expected, Mapping):
        _assert_keys(actual, expected, name)
        pairs = [(f'{name}["{key}"]', actual[key], expected[key]) for key in expected]
    elif isinstance(expected, Sequence):
        _assert_length(actual, expected, name)
        pairs = [(f"{name}[{index}]", actual[index], item) for index, item in enumerate(expected)]
    elif isinstance(expected, numbers.Real):
        _assert_number_close(actual, expected, atol, rtol, mistake, name)
        return
    else:
        _assert_tensor_close(actual, expected, atol, rtol, mistake, name, check_dtype)
        return
    for label, left, right in pairs:
        assert_close(left, right, atol=atol, rtol=rtol, mistake=mistake, name=label, check_dtype=check_dtype)


def assert_equal(actual: Any, expected: Any, *, mistake: str | None = None, name: str = "your result") -> None:
    """Fails unless both are exactly equal: whole numbers, strings, lists of them, tensors of integers or booleans."""
    if _is_tensor(expected):
        _assert_tensor_close(actual, expected, 0.0, 0.0, mistake, name, True)
        return
    _assert_not_none(actual, expected, name)
    if _is_tensor(actual):
        if not isinstance(expected, numbers.Number) or actual.numel() != 1:
            raise CheckFailed(f"{name}: {_a(actual)}; expected {_a(expected)}", "")
        actual = actual.item()  # a tensor of one number is as good as the number
    if not actual == expected:
        raise CheckFailed(f"{name}: {_short(actual)}; expected {_short(expected)}", mistake)


def require(condition: object, message: str) -> None:
    """Fail unless a condition holds. The message says it all, so the check's likely mistake is not shown with it."""
    if not condition:
        raise CheckFailed(message, "")


def assert_raises(
    error: type[Exception], function: Callable[..., Any], *args: Any, mistake: str | None = None, **kwargs: Any
) -> None:
    """Fails unless `function(*args, **kwargs)` raises `error`."""
    try:
        value = function(*args, **kwargs)
    except error:
        return
    raise CheckFailed(f"this call should raise {error.__name__}; it returned {_short(value)}", mistake)


def lines_run(function: Callable[..., Any], *args: Any) -> int:
    """Count the lines of Python that a call runs, each time that it runs. Loops inside numpy and torch do not count."""
    count = 0

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


def assert_no_loop(name: str, small: int, large: int) -> None:
    """Fail if `name` runs far more Python for an input that is eight times as large."""
    assert large < 3 * small, f"{name} runs {large} lines of Python for 512 items, and {small} for 64"


def _assert_number_close(actual: Any, expected: Any, atol: float, rtol: float, mistake: str | None, name: str) -> None:
    _assert_not_none(actual, expected, name)
    if _is_tensor(actual) and actual.numel() == 1:
        actual = actual.item()  # a tensor of one number is as good as the number
    if not isinstance(actual, numbers.Real):
        raise CheckFailed(f"{name}: {_a(actual)}; expected a number", "")
    value, wanted = float(actual), float(expected)
    if math.isnan(value) and not math.isnan(wanted):
        raise CheckFailed(f"{name}: NaN; expected {wanted:.6g}", mistake)
    same = value == wanted or (math.isnan(value) and math.isnan(wanted))
    if not same and not abs(value - wanted) <= atol + rtol * abs(wanted):
        allowed = atol + rtol * abs(wanted)
        what, mistake = _compared(f"{value:.6g}", f"{wanted:.6g}", abs(value - wanted), allowed, mistake)
        raise CheckFailed(f"{name}: {what}", mistake)


def _assert_tensor_close(
    actual: Any, expected: "Tensor", atol: float, rtol: float, mistake: str | None, name: str, check_dtype: bool
) -> None:
    import torch

    _assert_not_none(actual, expected, name)
    if not isinstance(actual, torch.Tensor):
        raise CheckFailed(f"{name}: {_a(actual)}; expected a tensor of shape {list(expected.shape)}", "")
    if actual.shape != expected.shape:
        raise CheckFailed(f"{name}: shape {list(actual.shape)}; expected {list(expected.shape)}", "")
    if check_dtype and actual.dtype != expected.dtype:
        raise CheckFailed(f"{name}: dtype {_dtype(actual)}; expected {_dtype(expected)}", "")
    left, right = actual.detach().cpu(), expected.detach().cpu()
    nans = left.isnan() & ~right.isnan()
    if nans.any():
        where = tuple(nans.nonzero()[0].tolist())
        raise CheckFailed(
            f"{name}: NaN in {int(nans.sum())} of {nans.numel()} values, the first at {_index(where)}", mistake
        )
    wrong = ~torch.isclose(left.double(), right.double(), atol=atol, rtol=rtol, equal_nan=True)
    if not wrong.any():
        return
    difference = (left.double() - right.double()).abs().nan_to_num(math.inf).masked_fill(~wrong, 0.0)
    where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    allowed = atol + rtol * abs(float(right[where]))
    what, mistake = _compared(_number(left[where]), _number(right[where]), float(difference[where]), allowed, mistake)
    raise CheckFailed(
        f"{name}: differences in {int(wrong.sum())} of {wrong.numel()} values, the largest at {_index(where)}: {what}",
        mistake,
    )


def _compared(
    actual: str, expected: str, difference: float, allowed: float, mistake: str | None
) -> tuple[str, str | None]:
    """Both numbers in words, and the likely mistake. Numbers that look the same differ in their precision."""
    if actual != expected:
        return f"{actual}; expected {expected}", mistake
    return f"{actual}, off by {difference:.1e}; at most {allowed:.1e} is allowed", _TOO_COARSE


def _assert_not_none(actual: Any, expected: Any, name: str) -> None:
    if actual is None and expected is not None:
        raise CheckFailed(f"{name}: None; is a `return` missing?", "")


def _assert_length(actual: Any, expected: Sequence[Any], name: str) -> None:
    _assert_not_none(actual, expected, name)
    if not isinstance(actual, Sequence):
        raise CheckFailed(f"{name}: {_a(actual)}; expected {_a(expected)} of {len(expected)}", "")
    if len(actual) != len(expected):
        raise CheckFailed(f"{name}: length {len(actual)}; expected {len(expected)}", "")


def _assert_keys(actual: Any, expected: Mapping[Any, Any], name: str) -> None:
    _assert_not_none(actual, expected, name)
    if not isinstance(actual, Mapping):
        raise CheckFailed(f"{name}: {_a(actual)}; expected a dictionary", "")
    if missing := [key for key in expected if key not in actual]:
        raise CheckFailed(f"{name}: the key {_short(missing[0])} is missing", "")
    if extra := [key for key in actual if key not in expected]:
        raise CheckFailed(f"{name}: the key {_short(extra[0])} should not be there", "")


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _a(value: Any) -> str:
    """The kind of a value, for a sentence."""
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _number(value: "Tensor") -> str:
    return f"{value.item():.6g}" if value.is_floating_point() else str(value.item())


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]"
