"""Beartype and jaxtyping on every function of the engine, at half the cost of jaxtyping's own decorator.

That decorator runs beartype three times per call: on the parameters, and later on the parameters and the result. Here
beartype wraps the function itself, inside a scope in which each axis name has one size. The checks are the same, but a
failure is beartype's error, without jaxtyping's list of axis sizes.

The engine's tests check millions of arrays. An array of a type, dtype and rank that an annotation has accepted before
differs in nothing but its shape, so for those the sizes alone are compared, at a quarter of the cost.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import jaxtyping
import numpy as np
from beartype import beartype
from jaxtyping import AbstractArray
from jaxtyping._array_types import _NamedDim
from jaxtyping._storage import _shape_storage, pop_shape_memo, push_shape_memo
from torch import Tensor

_original = jaxtyping.jaxtyped
_is_instance = type(AbstractArray).__instancecheck__
_axis_names: dict[tuple[type, type, Any, int], tuple[str, ...]] = {}
"""The axes of an annotation that has accepted an array of this type, dtype and rank: names alone, all different."""


def install(package: str) -> None:
    """Check the functions and data classes of a package, whose modules must not have been imported yet."""
    type(AbstractArray).__instancecheck__ = _accepts
    jaxtyping.jaxtyped = lambda typechecker: checked  # which the import hook looks up
    jaxtyping.install_import_hook(package, "beartype.beartype")


def _accepts(annotation: Any, value: Any) -> bool:
    """Compare the sizes of an array's axes with those of the call; the first time, and on a difference, all of it."""
    if not isinstance(value, Tensor | np.ndarray):
        return _is_instance(annotation, value)
    shape = value.shape
    kind = annotation, type(value), value.dtype, len(shape)
    names = _axis_names.get(kind)
    if names is not None:
        calls = getattr(_shape_storage, "memo_stack", None)
        sizes = calls[-1][0] if calls else {}
        for name, size in zip(names, shape, strict=True):
            if sizes.get(name, size) != size:
                break
        else:
            sizes.update(zip(names, shape, strict=True))
            return True
    if not _is_instance(annotation, value):
        return False
    axes = annotation.dims
    if all(type(axis) is _NamedDim and not axis.broadcastable and not axis.treepath for axis in axes):
        names = tuple(axis.name for axis in axes)
        if len(set(names)) == len(names) == len(shape):
            _axis_names[kind] = names
    return True


def checked(definition: Any) -> Any:
    """Return a function, method, property or data class that checks its arguments and its results."""
    if inspect.isclass(definition):
        if dataclasses.is_dataclass(definition) and "__init__" in vars(definition):
            definition.__init__ = checked(definition.__init__)
        return definition
    if isinstance(definition, classmethod | staticmethod):
        return type(definition)(checked(definition.__func__))
    if isinstance(definition, property):
        return property(*(part and checked(part) for part in (definition.fget, definition.fset, definition.fdel)))
    if inspect.isgeneratorfunction(definition):
        return _original(definition, typechecker=beartype)
    return _on_function(definition)


def _on_function(function: Callable) -> Callable:
    hints = {name: _resolved(hint, function.__globals__) for name, hint in function.__annotations__.items()}
    written, function.__annotations__ = function.__annotations__, hints
    try:
        typed = beartype(function)
    finally:
        function.__annotations__ = written
    if not any(map(_has_shape, hints.values())):
        return typed

    @functools.wraps(typed)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        push_shape_memo({})
        try:
            return typed(*args, **kwargs)
        finally:
            pop_shape_memo()

    return scoped


def _resolved(hint: Any, names: dict[str, Any]) -> Any:
    """Evaluate a hint that is written as a string; Any if it has a name that is imported only for type checking."""

    def holder() -> None: ...

    holder.__annotations__ = {"hint": hint}
    try:
        return get_type_hints(holder, names, include_extras=True)["hint"]
    except Exception:
        return Any


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, list | tuple):  # the parameters of a Callable
        return any(map(_has_shape, hint))
    return (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))
