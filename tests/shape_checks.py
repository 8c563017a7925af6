"""Beartype and jaxtyping on every function of the engine, at half the cost of jaxtyping's own decorator.

That decorator runs beartype three times per call: on the parameters, and later on the parameters and the result. Here
beartype wraps the function itself, inside a scope in which each axis name has one size. The checks are the same, but a
failure is beartype's error, without jaxtyping's list of axis sizes.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray

_scope = jaxtyping.jaxtyped("context")
_original = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check the functions and data classes of a package, whose modules must not have been imported yet."""
    jaxtyping.jaxtyped = lambda typechecker: checked  # which the import hook looks up
    jaxtyping.install_import_hook(package, "beartype.beartype")


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
        with _scope:
            return typed(*args, **kwargs)

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
