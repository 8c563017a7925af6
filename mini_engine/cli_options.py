"""Command-line options, made from the dataclasses that hold them: `EngineConfig`, `SamplingParams`, `BenchOptions`.

A command requests them by the types of its parameters. `EngineOptions` stands for `--model`, `--config`, `--parts` and
one option for each field of `EngineConfig`; `SamplingOptions` stands for one option for each field of `SamplingParams`.
The help of an option is the description of its field. An option that is not given overrides nothing.
"""

import inspect
import pkgutil
import re
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from mini_engine.bench.options import BenchOptions
from mini_engine.config import EngineConfig, read_options
from mini_engine.errors import ConfigError
from mini_engine.sampling_params import SamplingParams
from mini_engine.terminal import show

if TYPE_CHECKING:  # torch and transformers take seconds to import, and `--help` should not wait
    from mini_engine.llm import LLM
    from mini_engine.parts import Parts

Command = TypeVar("Command", bound=Callable[..., None])
DEFAULT_MODEL = "smollm2-135m-instruct"
SHORT = {"model": ["-m"], "attn_backend": ["-b"], "max_tokens": ["-n"], "temperature": ["-t"]}


@dataclass(frozen=True)
class EngineOptions:
    """The model, options and parts that a command runs with.

    Attributes:
        model: embedded name, folder, GGUF file or hub id.
        options: fields of `EngineConfig` that were given, by `--config` or one by one.
        parts: the engine's parts; None for the default ones.
    """

    model: str
    options: dict[str, Any]
    parts: "Parts | None" = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> "EngineOptions":
        """Build from the given options. Those on the command line override those of `--config`."""
        file, parts = given.pop("config", None), given.pop("parts", None)
        options = {"model": DEFAULT_MODEL} | ({} if file is None else read_options(file)) | given
        return cls(options.pop("model"), options, None if parts is None else load_parts(parts))

    def load(self, console: Console, **defaults: Any) -> "LLM":
        """Load the model, and print a line about it.

        Args:
            console: the terminal.
            defaults: the command's own defaults, for options that were not given.

        Raises:
            ConfigError: for impossible options.
            ModelLoadError: if the model cannot be loaded.
        """
        config = EngineConfig.of(defaults | self.options)
        with console.status("loading the model", spinner="line"):  # the default one is not ASCII
            from mini_engine.llm import LLM

            start = time.perf_counter()
            llm = LLM(self.model, config, parts=self.parts)
        seconds, size = time.perf_counter() - start, sum(weight.numel() for weight in llm.model.parameters())
        show(
            console,
            f"{self.model}: {size / 1e6:.0f} M parameters in {str(llm.model.dtype).removeprefix('torch.')} on "
            f"{llm.model.device}, attention backend {llm.config.attn_backend}, loaded in {seconds:.1f} s",
            "dim",
        )
        if llm.config.attn_backend not in ("torch", "torch_padded", "chunked", "split_kv") and not llm.config.warm_up:
            show(console, "The first steps compile kernels, which may take over a minute; they are cached.", "dim")
        return llm


class SamplingOptions(dict[str, Any]):
    """The given fields of `SamplingParams`. Mistakes are refused before a model is loaded."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        SamplingParams(**given)
        super().__init__(given)

    def params(self, model_defaults: SamplingParams, **defaults: Any) -> SamplingParams:
        """Return a request's parameters: options override the command's defaults, which override the model's."""
        return replace(model_defaults, **defaults | self)


def command(app: typer.Typer) -> Callable[[Command], Command]:
    """Register a function as a command of an app, and return the function unchanged.

    Instead of a parameter of a type in `GROUPS`, the command has the options of that group.
    """

    def register(function: Command) -> Command:
        parameters = inspect.signature(function).parameters
        groups = {name: GROUPS[p.annotation] for name, p in parameters.items() if p.annotation in GROUPS}
        own = [p.replace(kind=p.KEYWORD_ONLY) for name, p in parameters.items() if name not in groups]

        def run(**values: Any) -> None:
            arguments = {parameter.name: values[parameter.name] for parameter in own}
            for name, (build, options) in groups.items():
                given = {option.name: values[option.name] for option in options}
                arguments[name] = build({n: value for n, value in given.items() if value is not None and value != []})
            function(**arguments)

        options = [option for _, options in groups.values() for option in options]
        run.__signature__ = inspect.Signature(options + own)  # type: ignore[attr-defined]
        app.command(name=function.__name__, help=inspect.getdoc(function))(run)
        return function

    return register


def load_parts(path: str) -> "Parts":
    """Import a `Parts`.

    Args:
        path: "MODULE:OBJECT". The module may be a file in the current folder. The object is a `Parts`, or a function
            without arguments that returns one.

    Raises:
        ConfigError: if there is no such object, it is not a `Parts`, or the module raises an exception.
    """
    from mini_engine.parts import Parts

    if "" not in sys.path:  # installed commands do not import from the current folder
        sys.path.append("")
    try:
        parts = pkgutil.resolve_name(path)
        parts = parts() if callable(parts) and not isinstance(parts, Parts) else parts
    except (Exception, SystemExit) as error:  # the module may raise anything
        raise ConfigError(
            f"cannot load the parts {path!r}: {type(error).__name__}: {error}; give MODULE:OBJECT, such as "
            "my_parts:parts for `parts` in my_parts.py"
        ) from error
    if not isinstance(parts, Parts):
        raise ConfigError(
            f"{path!r} is a {type(parts).__name__}; give MODULE:OBJECT, where the object is a mini_engine.Parts"
        )
    return parts


# Fields that are of no use on a command line, or whose values cannot be written there.
NO_OPTIONS = {"n", "logprobs", "prompt_logprobs", "logit_bias", "bad_words_token_ids", "detokenize"}


def _options_of(cls: type) -> list[inspect.Parameter]:
    """Return an option for each field of a dataclass, described as in its docstring."""
    described = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    helps = {name: " ".join(text.split()) for name, text in described}
    hints = typing.get_type_hints(cls)
    return [
        _option(field.name, _option_type(hints[field.name]), helps.get(field.name))
        for field in fields(cls)
        if field.name not in NO_OPTIONS
    ]


def _option(name: str, kind: Any, help: str | None) -> inspect.Parameter:
    names = f"--{name.replace('_', '-')}"
    names += f"/--no-{names[2:]}" if kind is bool else ""
    annotation = Annotated[kind | None, typer.Option(names, *SHORT.get(name, ()), help=help)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option_type(hint: Any) -> Any:
    """Return a type for the command line: a list if a sequence is allowed, otherwise the first member of a union."""
    members = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    listed = [GenericAlias(list, typing.get_args(m)) for m in members if typing.get_origin(m) is Sequence]
    return listed[0] if listed else members[0]


# For each type of a command's parameter: how to build the value from the given options, and the options.
GROUPS: dict[Any, tuple[Callable[[dict[str, Any]], Any], list[inspect.Parameter]]] = {
    EngineOptions: (
        EngineOptions.of,
        [
            _option("model", str, f"Embedded name, folder, GGUF file or hub id; default {DEFAULT_MODEL}."),
            _option("config", Path, "YAML file of the engine's options; options on the command line override it."),
            _option("parts", str, "MODULE:OBJECT, a Parts whose functions replace the engine's own."),
            *(option for option in _options_of(EngineConfig) if option.name != "seed"),  # SamplingParams has one
        ],
    ),
    # A command prints one answer for each prompt.
    SamplingOptions: (SamplingOptions, [option for option in _options_of(SamplingParams) if option.name != "n"]),
    BenchOptions: (lambda given: BenchOptions(**given), _options_of(BenchOptions)),
}
