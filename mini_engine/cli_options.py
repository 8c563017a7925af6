"""Options of commands, made from the dataclasses that hold them: `EngineConfig` and `SamplingParams`.

A command asks for them with the types of its parameters. `EngineOptions` stands for `--model`, `--config`, `--parts`
and one option for each field of `EngineConfig`; `SamplingOptions` stands for one for each field of `SamplingParams`.
The help of an option is the description of its field. An option that is not given has no value and overrides nothing.
"""

import importlib
import inspect
import re
import sys
import time
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape

from mini_engine.config import EngineConfig, read_options
from mini_engine.errors import ConfigError
from mini_engine.sampling_params import SamplingParams
from mini_engine.terminal import TerminalConsole, printable

if TYPE_CHECKING:  # torch and transformers take seconds to import: `--help` should not wait for them
    from mini_engine.llm import LLM
    from mini_engine.parts import Parts

Command = TypeVar("Command", bound=Callable[..., None])
DEFAULT_MODEL = "smollm2-135m-instruct"
SHORT = {"model": ["-m"], "attn_backend": ["-b"], "max_tokens": ["-n"], "temperature": ["-t"]}


@dataclass(frozen=True)
class EngineOptions:
    """What a command runs on.

    Attributes:
        model: embedded name, folder, GGUF file or hub id.
        options: fields of `EngineConfig` that were given, by `--config` or one by one.
        parts: the engine's parts; None for the default ones.
    """

    model: str
    options: dict[str, Any]
    parts: "Parts | None" = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "EngineOptions":
        """Build from the values of the options. Those of the command line override those of `--config`."""
        given = _given(values)
        model, file, parts = given.pop("model"), given.pop("config", None), given.pop("parts", None)
        from_file = {} if file is None else read_options(file)
        return cls(model, from_file | given, None if parts is None else load_parts(parts))

    def load(self, console: TerminalConsole, **defaults: Any) -> "LLM":
        """Load the model, and say which and how.

        Args:
            console: the terminal.
            defaults: the command's own defaults, for options that were not given.

        Raises:
            ConfigError: for impossible options.
            ModelLoadError: if the model cannot be loaded.
        """
        config = EngineConfig.of(defaults | self.options)
        with console.status("loading the model"):
            from mini_engine.llm import LLM
            from mini_engine.observe.metrics import num_parameters

            start = time.perf_counter()
            llm = LLM(self.model, config, parts=self.parts)
        console.print(
            f"[dim]{escape(printable(self.model))}: {num_parameters(llm.model) / 1e6:.0f} M parameters in "
            f"{str(llm.model.dtype).split('.')[-1]} on {llm.model.device}, attention backend {config.attn_backend}, "
            f"loaded in {time.perf_counter() - start:.1f} s[/]"
        )
        if config.attn_backend in ("flex", "flashinfer"):
            console.print("[dim]The first steps compile kernels, which takes up to a minute once.[/]")
        return llm


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters that were given.

    Attributes:
        options: fields of `SamplingParams`.
    """

    options: dict[str, Any]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "SamplingOptions":
        """Build from the values of the options."""
        given = _given(values)
        SamplingParams(**given)  # mistakes are refused before a model is loaded
        return cls(given)

    def params(self, model_defaults: SamplingParams, **defaults: Any) -> SamplingParams:
        """Return the parameters of a request.

        Args:
            model_defaults: what the model recommends.
            defaults: the command's own defaults, which override the model's.
        """
        return replace(model_defaults, **defaults | self.options)


def command(app: typer.Typer) -> Callable[[Command], Command]:
    """Register a function as a command of an app, and return the function as it was.

    In the place of a parameter of type `EngineOptions` or `SamplingOptions`, the command has an option for each field,
    except for fields that another parameter is named after.
    """

    def register(function: Command) -> Command:
        parameters = inspect.signature(function).parameters
        options = {name: _options_of(parameter, parameters) for name, parameter in parameters.items()}

        def run(**values: Any) -> None:
            arguments = {}
            for name, parameter in parameters.items():
                if parameter.annotation in (EngineOptions, SamplingOptions):
                    arguments[name] = parameter.annotation.of({o.name: values[o.name] for o in options[name]})
                else:
                    arguments[name] = values[name]
            function(**arguments)

        run.__signature__ = inspect.Signature([o for own in options.values() for o in own])  # type: ignore[attr-defined]
        app.command(name=function.__name__, help=inspect.getdoc(function))(run)
        return function

    return register


def load_parts(path: str) -> "Parts":
    """Import a `Parts`.

    Args:
        path: "MODULE:OBJECT". The module may be a file of the current folder. The object is a `Parts`, or is called
            without arguments to get one.

    Raises:
        ConfigError: if there is no such object, or the module raises an exception.
    """
    from mini_engine.parts import Parts

    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"--parts is {path!r}; give MODULE:OBJECT, such as my_parts:parts for `parts` in my_parts.py")
    if "" not in sys.path:  # an installed command does not look for modules in the current folder
        sys.path.append("")
    try:
        found = getattr(importlib.import_module(module), name)
        parts = found if isinstance(found, Parts) or not callable(found) else found()
    except Exception as error:  # the module may raise anything
        raise ConfigError(f"cannot load the parts {path!r}: {type(error).__name__}: {error}") from error
    if not isinstance(parts, Parts):
        raise ConfigError(f"{path!r} gives a {type(parts).__name__}; give a mini_engine.Parts, or a function for one")
    return parts


def _options_of(parameter: inspect.Parameter, others: Collection[str]) -> list[inspect.Parameter]:
    """Return the options that stand for a parameter of a command."""
    if parameter.annotation is EngineOptions:
        options = [
            _option("model", str, "Embedded name, folder, GGUF file or hub id.", DEFAULT_MODEL),
            _option("config", Path, "YAML file of the engine's options; those of the command line override it."),
            _option("parts", str, "MODULE:OBJECT, a Parts whose functions replace the engine's own."),
            *_options_of_fields(EngineConfig),
        ]
    elif parameter.annotation is SamplingOptions:
        options = _options_of_fields(SamplingParams)
    else:
        return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    return [option for option in options if option.name not in others]


def _options_of_fields(of: type) -> list[inspect.Parameter]:
    """Return an option for each field of a dataclass, described as in its docstring."""
    described = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(of) or "", re.MULTILINE)
    helps = {name: " ".join(text.split()) for name, text in described}
    hints = typing.get_type_hints(of)
    return [_option(field.name, _option_type(hints[field.name]), helps.get(field.name)) for field in fields(of)]


def _option(name: str, kind: Any, help: str | None, default: Any = None) -> inspect.Parameter:
    names = f"--{name.replace('_', '-')}"
    names += f"/--no-{names[2:]}" if kind is bool else ""
    info = typer.Option(names, *SHORT.get(name, ()), help=help)
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_type(hint: Any) -> Any:
    """Return a type for the command line: of a union the first that has one, of a sequence a list."""
    members = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    listed = [GenericAlias(list, typing.get_args(m)) for m in members if typing.get_origin(m) is Sequence]
    return listed[0] if listed else members[0]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != []}
