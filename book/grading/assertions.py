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
    A name that is an identifier, such as "flops", is shown as code.
    """
    label = _label(name)
    if isinstance(expected, Mapping):
        _assert_keys(actual, expected, label)
        pairs = [(f'{name}["{key}"]', actual[key], expected[key]) for key in expected]
    elif isinstance(expected, Sequence):
        _assert_length(actual, expected, label)
        pairs = [(f"{name}[{index}]", actual[index], item) for index, item in enumerate(expected)]
    elif isinstance(expected, numbers.Real):
        _assert_number_close(actual, expected, atol, rtol, mistake, label)
        return
    else:
        _assert_tensor_close(actual, expected, atol, rtol, mistake, label, check_dtype)
        return
    for item, left, right in pairs:
        assert_close(left, right, atol=atol, rtol=rtol, mistake=mistake, name=item, check_dtype=check_dtype)


def assert_values(
    actual: Any,
    expected: Any,
    *,
    atol: float = 1e-5,
    rtol: float = 0.0,
    mistake: str | None = None,
    name: str = "your result",
) -> None:
    """Like `assert_close`, with any dtype: for checks of the result, where the dtype is a demand of its own."""
    assert_close(actual, expected, atol=atol, rtol=rtol, mistake=mistake, name=name, check_dtype=False)


def assert_equal(actual: Any, expected: Any, *, mistake: str | None = None, name: str = "your result") -> None:
    """Fails unless both are exactly equal: whole numbers, strings, lists of them, tensors of integers or booleans."""
    label = _label(name)
    if _is_tensor(expected):
        _assert_tensor_close(actual, expected, 0.0, 0.0, mistake, label, True)
        return
    _assert_not_none(actual, expected, label)
    if _is_tensor(actual):
        if not isinstance(expected, numbers.Number) or actual.numel() != 1:
            raise CheckFailed(f"{label}: {_a(actual)}, expected {_a(expected)}", "")
        actual = actual.item()  # a tensor of one number is as good as the number
    if not actual == expected:
        raise CheckFailed(_compared(label, *_two_texts(actual, expected)), mistake)


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
    assert large < 3 * small, f"`{name}` runs {large} lines of Python for 512 items, and {small} for 64"


def _assert_number_close(actual: Any, expected: Any, atol: float, rtol: float, mistake: str | None, label: str) -> None:
    _assert_not_none(actual, expected, label)
    if _is_tensor(actual) and actual.numel() == 1:
        actual = actual.item()  # a tensor of one number is as good as the number
    if not isinstance(actual, numbers.Real):
        raise CheckFailed(f"{label}: {_a(actual)}, expected a number", "")
    value, wanted = float(actual), float(expected)
    same = value == wanted or (math.isnan(value) and math.isnan(wanted))
    if not same and not abs(value - wanted) <= atol + rtol * abs(wanted):
        raise CheckFailed(_compared(label, *_two_numbers(value, wanted)), mistake)


def _assert_tensor_close(
    actual: Any, expected: "Tensor", atol: float, rtol: float, mistake: str | None, label: str, check_dtype: bool
) -> None:
    import torch

    _assert_not_none(actual, expected, label)
    if not isinstance(actual, torch.Tensor):
        raise CheckFailed(f"{label}: {_a(actual)}, expected a tensor of shape {list(expected.shape)}", "")
    if actual.shape != expected.shape:
        raise CheckFailed(f"{label}: shape {list(actual.shape)}, expected {list(expected.shape)}", "")
    if check_dtype and actual.dtype != expected.dtype:
        raise CheckFailed(f"{label}: dtype {_dtype(actual)}, expected {_dtype(expected)}", "")
    left, right = actual.detach().cpu(), expected.detach().cpu()
    nans = left.isnan() & ~right.isnan()
    if nans.any() and left.ndim:
        where = tuple(nans.nonzero()[0].tolist())
        raise CheckFailed(
            f"{label}: NaN in {int(nans.sum())} of {_values(left)}, the first at {_index(where)}", mistake
        )
    wrong = ~torch.isclose(left.double(), right.double(), atol=atol, rtol=rtol, equal_nan=True)
    if not wrong.any():
        return
    difference = (left.double() - right.double()).abs().nan_to_num(math.inf).masked_fill(~wrong, 0.0)
    where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    count = int(wrong.sum())
    got, wanted = _two_numbers(left[where].item(), right[where].item())
    if wrong.numel() == 1:
        raise CheckFailed(_compared(label, got, wanted), mistake)
    raise CheckFailed(
        f"{label}: {count} of {_values(wrong)} {'differs' if count == 1 else 'differ'}, "
        f"the {'first' if right.dtype == torch.bool else 'worst'} at {_index(where)}: {got}, expected {wanted}",
        mistake,
    )


def _assert_not_none(actual: Any, expected: Any, label: str) -> None:
    if actual is None and expected is not None:
        raise CheckFailed(f"{label}: None. Is a `return` missing?", "")


def _assert_length(actual: Any, expected: Sequence[Any], label: str) -> None:
    _assert_not_none(actual, expected, label)
    if not isinstance(actual, Sequence):
        raise CheckFailed(f"{label}: {_a(actual)}, expected {_a(expected)} of length {len(expected)}", "")
    if len(actual) != len(expected):
        raise CheckFailed(f"{label}: length {len(actual)}, expected {len(expected)}", "")


def _assert_keys(actual: Any, expected: Mapping[Any, Any], label: str) -> None:
    _assert_not_none(actual, expected, label)
    if not isinstance(actual, Mapping):
        raise CheckFailed(f"{label}: {_a(actual)}, expected a dictionary", "")
    if missing := [key for key in expected if key not in actual]:
        raise CheckFailed(f"{label}: the key {missing[0]!r} is missing", "")
    if extra := [key for key in actual if key not in expected]:
        raise CheckFailed(f"{label}: the key {extra[0]!r} should not be there", "")


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _a(value: Any) -> str:
    """The kind of a value, for a sentence."""
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _label(name: str) -> str:
    """Begin a message with a name: an identifier as code, a phrase without the comma that ends it."""
    return f"`{name}`" if name.isidentifier() else name.removesuffix(",")


def _compared(label: str, got: str, wanted: str) -> str:
    return f"{label} = {got}, expected {wanted}" if label.startswith("`") else f"{label}: {got}, expected {wanted}"


def _two_numbers(left: float, right: float) -> tuple[str, str]:
    """Show two different numbers with 6 digits, or with as many as tell them apart."""
    if not isinstance(left, float) or not isinstance(right, float):
        return str(left), str(right)
    for digits in range(6, 18):
        texts = [f"{value + 0.0:.{digits}g}" for value in (left, right)]  # + 0.0: -0.0 is shown as 0
        if texts[0] != texts[1]:
            break
    return texts[0], texts[1]


def _two_texts(left: Any, right: Any, most: int = 200) -> tuple[str, str]:
    """Show two different values; of long ones, the part where they begin to differ."""
    texts = repr(left), repr(right)
    if texts[0] == texts[1]:
        return f"{texts[0]} ({type(left).__name__})", f"{texts[1]} ({type(right).__name__})"
    common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = 0 if common < most // 2 else common - most // 2
    cuts = [f"{'…' * bool(start)}{text[start : start + most]}{'…' * (len(text) > start + most)}" for text in texts]
    return cuts[0], cuts[1]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _values(tensor: "Tensor") -> str:
    return f"{tensor.numel()} {'value' if tensor.numel() == 1 else 'values'}"


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]"
