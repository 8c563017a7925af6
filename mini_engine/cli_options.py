"""Command-line options made from the dataclasses that hold them: `EngineConfig`, `SamplingParams`,
`BenchOptions`, `ServerOptions`.

Cyclopts makes an option of each field of a dataclass. The help of an option is the description of its field, and an
option that is not given overrides nothing.
"""

import inspect
import time
import typing
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import docstring_parser
from cyclopts import Parameter, Token
from rich.console import Console

from mini_engine.bench.options import BenchOptions
from mini_engine.config import ALIASES, EngineConfig, read_options
from mini_engine.errors import ConfigError
from mini_engine.sampling_params import SamplingParams
from mini_engine.serving.options import ServerOptions
from mini_engine.terminal import make_console, show

if TYPE_CHECKING:  # torch and transformers take seconds to import, and `--help` should not wait
    from mini_engine.llm import LLM
    from mini_engine.parts import Parts

DEFAULT_MODEL = "smollm2-135m-instruct"
EXAMPLES = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a library at night.",
    "Name three uses of a paperclip.",
)
# Few pages, so that requests are preempted, and few tokens in a step, so that prompts are computed in chunks.
SMALL_POOL: dict[str, Any] = {
    "num_pages": 36, "page_size": 8, "max_num_batched_tokens": 64, "enable_prefix_caching": False,
}  # fmt: skip
SHORT = {"model": "-m", "attn_backend": "-b", "max_tokens": "-n", "temperature": "-t"}
# Fields that are of no use on a command line, whose values cannot be written there, or whose name another field has.
NO_OPTIONS = {"n", "logprobs", "prompt_logprobs", "logit_bias", "bad_words_token_ids", "detokenize"}
LEFT_OUT = {(EngineConfig, "seed"), *((SamplingParams, name) for name in NO_OPTIONS)}


@dataclass(frozen=True)
class Source:
    """Where the engine comes from.

    Attributes:
        model: embedded name, folder, GGUF file or hub id; default smollm2-135m-instruct.
        config: YAML file of the engine's options; options on the command line override it.
        parts: MODULE:OBJECT, a Parts whose functions replace the engine's own.
        homework: run on your own finished parts of the engine.
    """

    model: str | None = None
    config: Path | None = None
    parts: str | None = None
    homework: bool = False


def options_of(*classes: type) -> Any:
    """Return the type of a command's parameter that has an option for each field, and None for those not given."""
    made: list[tuple[str, Any, Any]] = []
    for cls in classes:
        described = {p.arg_name: p.description for p in docstring_parser.parse(inspect.getdoc(cls) or "").params}
        for name, kind in typing.get_type_hints(cls).items():
            others = [f"--{alias.replace('_', '-')}" for alias, field in ALIASES.items() if field == name]
            names = [*(others if kind is not bool else ()), *filter(None, [SHORT.get(name)])]
            option = Parameter(alias=names, help=described.get(name), negative_iterable=())
            if kind in (int, int | None):
                option = Parameter.combine(option, Parameter(converter=_whole_number))
            if (cls, name) not in LEFT_OUT:
                made.append((name, Annotated[kind | None, option], None))
    return Annotated[make_dataclass("Options", made, namespace={"__module__": __name__}) | None, Parameter(name="*")]


def _whole_number(kind: Any, tokens: Sequence[Token]) -> int:
    """Convert an argument; the library's own conversion rounds 1.5 to a whole number."""
    return int(tokens[0].value)


def given(options: Any) -> dict[str, Any]:
    """Return the options that were given, by name."""
    return {name: value for name, value in vars(options).items() if value is not None} if options else {}


if TYPE_CHECKING:
    Engine = Any
    Sampling = Any
    Bench = Any
    Server = Any
else:
    Engine, Sampling = options_of(Source, EngineConfig), options_of(SamplingParams)
    Bench, Server = options_of(BenchOptions), options_of(ServerOptions)


def with_file(named: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Add the options of the file `--config`, which override the defaults, to those that override them.

    Raises:
        ConfigError: if the file is none.
    """
    own = dict(named)
    file = own.pop("config", None)
    return {"model": DEFAULT_MODEL} | defaults | ({} if file is None else read_options(file)) | own


@dataclass(frozen=True)
class EngineOptions:
    """The model, options and parts that a command runs with.

    Attributes:
        model: embedded name, folder, GGUF file or hub id.
        options: fields of `EngineConfig` that were given, by `--config` or one by one.
        parts: the engine's parts; None for the default ones.
        homework: the book's module for `--homework`; None without that option.
    """

    model: str
    options: dict[str, Any]
    parts: "Parts | None" = None
    homework: ModuleType | None = None

    @classmethod
    def of(cls, options: Engine, console: Console, **defaults: Any) -> "EngineOptions":
        """Build from the command line, whose options override those of `--config`, which override the defaults.

        Raises:
            ConfigError: for impossible options, or if the book is not there, which `--homework` needs.
        """
        return cls.of_named(with_file(given(options), **defaults), console)

    @classmethod
    def of_named(cls, options: dict[str, Any], console: Console) -> "EngineOptions":
        """Build from the options of `with_file`. Raises what `of` raises."""
        named = dict(options)
        parts, with_homework = (named.pop(name, None) for name in ("parts", "homework"))
        if parts is not None:
            from mini_engine.parts import load_parts

            parts = load_parts(parts)
        made = cls(named.pop("model"), named, parts)
        if not with_homework:
            return made
        try:
            from book import homework
        except ModuleNotFoundError as error:
            raise ConfigError(f"--homework needs the book ({error}): run it in a copy of the repository") from error
        return homework.with_homework(console, replace(made, homework=homework))

    def load(self, console: Console, sampling: Sampling = None, **defaults: Any) -> "tuple[LLM, SamplingParams]":
        """Load the model, print a line about it, and return it with the parameters of its requests.

        Args:
            console: the terminal.
            sampling: options, which override the command's defaults, which override the model's.
            defaults: the command's own sampling parameters.

        Raises:
            ConfigError: for impossible options.
            ModelLoadError: if the model cannot be loaded.
            RequestError: for sampling parameters out of range.
        """
        config, own = EngineConfig.of(self.options), defaults | given(sampling)
        SamplingParams(**own)  # refuses a mistake before the model is loaded
        with console.status("loading the model", spinner="line"):  # the default one is not ASCII
            from mini_engine.llm import LLM

            start = time.perf_counter()
            llm = LLM(self.model, config, parts=self.parts)
        seconds, model = time.perf_counter() - start, llm.model
        dtype, size = str(model.dtype).removeprefix("torch."), model.num_parameters
        how = f", {llm.config.quantization} weights" if llm.config.quantization else ""
        line = f"{self.model}: {size / 1e6:.0f} M parameters in {dtype}{how} on {model.device}, attention backend "
        show(console, line + f"{llm.config.attn_backend}, loaded in {seconds:.1f} s", "dim")
        return llm, replace(llm.default_params, **own)


def load_served(named: dict[str, Any]) -> "LLM":
    """Load a model to be served with the options of `with_file`, in any process, and print a line about it."""
    from mini_engine.defaults import served_step_tokens

    console = make_console()
    own = EngineOptions.of_named(named, console)
    config = EngineConfig.of(own.options)
    if config.max_num_batched_tokens is None:
        own = replace(own, options=own.options | {"max_num_batched_tokens": served_step_tokens(config)})
    return own.load(console)[0]
