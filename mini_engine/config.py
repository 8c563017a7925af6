"""`EngineConfig`: every option of the engine, defined once for Python, configuration files and the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from mini_engine.errors import ConfigError, check_positive

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16", "float64"),
    "device": ("auto", "cpu", "cuda"),
    "kv_layout": ("NHD", "HND"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "prefix_sharing": (False, True),
    "pipeline_depth": (None, 0, 1),
    "warm_up": (False, True),
    "persistent_decode": (False, True),
}
SIZES = ("max_batch_size", "max_model_len", "num_pages", "page_size", "max_num_batched_tokens", "sliding_window")
MAX_CONFIG_BYTES = 2**16
ALIASES = {"max_seq_len": "max_model_len"}
# `compile_backend` of TensorRT-LLM's AutoDeploy, as options of this engine: the default captures CUDA graphs anyway.
COMPILE_BACKENDS: dict[str, dict[str, Any]] = {"torch-cudagraph": {}, "torch-simple": {"cuda_graph_batch_sizes": ()}}
# Options of AutoDeploy that have no meaning here, and what to do instead.
FOREIGN = {"use_pt_cache_backend": "the KV cache has no backend of its own here; leave the option out"}


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine, built by `LLM(**options)`, by `--config FILE` and by the command line.

    Attributes:
        dtype: "auto" (the checkpoint's, but float32 on a CPU without bfloat16 instructions), "float32", "bfloat16",
            "float16" or "float64".
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        attn_backend: name of the attention backend, such as "torch_padded" (the default), "flex" or "flashinfer".
        max_batch_size: requests that run at once; others wait.
        max_model_len: longest prompt and output together; default the model's own limit.
        num_pages: pages of the KV cache; default enough for `max_batch_size` of the longest requests, or as many as
            fit in memory.
        page_size: tokens per page.
        kv_layout: order of a page's axes: "NHD" (tokens, heads, head size) or "HND" (heads first).
        kv_cache_dtype: dtype of keys and values in the cache: "auto" (the model's) or "fp8_e4m3" (half the memory
            of bfloat16; rounded to 4 significant bits).
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks.
        sliding_window: no layer sees farther back than this many keys; default the model's own windows.
        prefix_sharing: let requests that begin with the same tokens share pages, and keep the pages of finished
            requests for later ones until the space is needed.
        pipeline_depth: steps that the host launches ahead of the results that it has read: 0 or 1; default 1 on a GPU
            and 0 on a CPU.
        cuda_graph_batch_sizes: numbers of requests for which a decode step is captured as a CUDA graph. A smaller step
            is padded to the next size; a larger step is launched kernel by kernel. Default 1, 2, 4, multiples of 8 and
            `max_batch_size` on a GPU, if the backend's kernels can be captured, and none on a CPU.
        persistent_decode: compute a decode step of a single request in one custom CUDA kernel, for Llama and Qwen3 in
            bfloat16 on a Hopper GPU. Of the engine's parts it calls only the sampler.
        warm_up: run steps of made-up requests before the first real one, so that no request waits for a common
            kernel to compile.

    Raises:
        ConfigError: for a value that is invalid whatever the model and the machine.
    """

    dtype: str = "auto"
    device: str = "auto"
    attn_backend: str = "torch_padded"
    max_batch_size: int = 32
    max_model_len: int | None = None
    num_pages: int | None = None
    page_size: int = 128
    kv_layout: str = "NHD"
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int = 2048
    sliding_window: int | None = None
    prefix_sharing: bool = False
    pipeline_depth: int | None = None
    cuda_graph_batch_sizes: Sequence[int] | None = None
    persistent_decode: bool = False
    warm_up: bool = False

    def __post_init__(self) -> None:
        from mini_engine.attention.backend import check_backend  # imports torch, which would slow down `--help`

        check_backend(self.attn_backend)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if not any(value == choice and type(value) is type(choice) for choice in choices):  # True is not 1
                raise ConfigError(f"{name} is {value!r}; choose one of: {', '.join(map(str, choices))}")
        check_positive(**{name: getattr(self, name) for name in SIZES})
        sizes = self.cuda_graph_batch_sizes
        if not isinstance(sizes, list | tuple | None):
            raise ConfigError(f"cuda_graph_batch_sizes is {str(sizes)[:80]}; give a list of whole numbers")
        for size in sizes or ():
            check_positive(cuda_graph_batch_sizes=size)
        if sizes is not None:
            object.__setattr__(self, "cuda_graph_batch_sizes", tuple(sorted(set(sizes))))
        for field in fields(self):
            if getattr(self, field.name) is None and field.default is not None:
                raise ConfigError(f"{field.name} has no value; give one, or leave it out for {field.default!r}")
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_batch_size "
                f"({self.max_batch_size}): a step could not decode every request; raise the first or lower the second"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """Build a configuration from options by name.

        Raises:
            ConfigError: for an option that does not exist, or an impossible value.
        """
        return cls().with_options(options)

    def with_options(self, options: Mapping[str, Any]) -> "EngineConfig":
        """Return the configuration with some options changed.

        Raises:
            ConfigError: for an option that does not exist, or an impossible value.
        """
        return replace(self, **_by_field(options))


class _Loader(yaml.SafeLoader):
    """Refuses a name that is given twice, as YAML does; PyYAML takes the last value. Also refuses aliases.

    Nested aliases let a file of 300 bytes hold a value that takes gigabytes to print.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                problem="options have no aliases (*name); write the value", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.constructor.ConstructorError(
                        problem=f"{key.value[:40]!r} is given twice", problem_mark=key.start_mark
                    )
                names.add(key.value)
        return super().construct_mapping(node, deep)


def read_options(path: Path) -> dict[str, Any]:
    """Read the options that a YAML file sets, under the names of `EngineConfig`'s fields. The values are not checked.

    A file may also name the `model`, which is not an option of the engine but the first argument of `LLM`.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, or holds anything but options.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes, so it is not a configuration")
    try:
        options = yaml.load(data.decode(), _Loader)
    except Exception as error:  # PyYAML raises anything for a value that does not fit its tag
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict | None) or not all(isinstance(name, str) for name in options or ()):
        raise ConfigError(f"{path} must hold options, one per line, such as `page_size: 16`")
    options = options or {}
    model = {"model": options.pop("model")} if "model" in options else {}
    if not isinstance(model.get("model", ""), str):
        raise ConfigError(f"model is {str(model['model'])[:40]}; give a name or a path")
    return model | _by_field(options)


def _by_field(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names of the fields."""
    known = {field.name for field in fields(EngineConfig)}
    for alias, name in ALIASES.items():
        if alias in options and name in options:
            raise ConfigError(f"{alias} and {name} are two names of one option; give one of them")
    named = {ALIASES.get(name, name): value for name, value in options.items()}
    if "compile_backend" in named:
        compile_backend = named.pop("compile_backend")
        if compile_backend not in list(COMPILE_BACKENDS):  # compared, not looked up: the value may not be hashable
            raise ConfigError(
                f"compile_backend is {str(compile_backend)[:40]!r}; choose one of: {', '.join(COMPILE_BACKENDS)}"
            )
        implied = COMPILE_BACKENDS[compile_backend]
        if clash := sorted(implied.keys() & named.keys()):
            raise ConfigError(f"compile_backend {compile_backend!r} and {clash[0]} contradict each other; give one")
        named |= implied
    for name, advice in FOREIGN.items():
        if name in named:
            raise ConfigError(f"{name} is an option of another engine: {advice}")
    if unknown := sorted(named.keys() - known):
        raise ConfigError(f"unknown option {unknown[0][:40]!r}; the options are: {', '.join(sorted(known))}")
    return named
