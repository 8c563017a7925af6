"""`EngineConfig`: every option of the engine, defined once for Python, configuration files and the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from mini_engine.attention.sparse_config import SparseAttentionConfig
from mini_engine.errors import ConfigError, check_positive
from mini_engine.speculative.config import SpeculativeConfig

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16", "float64"),
    "device": ("auto", "cpu", "cuda"),
    "quantization": (None, "fp8", "int8", "int4"),
    "kv_layout": ("NHD", "HND"),
    "kv_cache_dtype": ("auto", "fp8_e4m3"),
    "enable_prefix_caching": (False, True),
    "disable_hybrid_kv_cache_manager": (False, True),
    "pipeline_depth": (None, 0, 1),
    "enforce_eager": (False, True),
    "batch_invariant": (False, True),
    "persistent_decode": (None, False, True),
    "warm_up": (None, False, True),
    "scheduling_policy": ("fcfs", "priority", "lpm", "fair"),
}
SIZES = ("max_batch_size", "max_model_len", "num_pages", "page_size", "max_num_batched_tokens", "sliding_window")
# The names that vLLM and TensorRT-LLM's AutoDeploy have for these options, and for their values.
ALIASES = {
    "max_seq_len": "max_model_len",
    "max_num_seqs": "max_batch_size",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_pages",
    "attention_backend": "attn_backend",
    "cudagraph_capture_sizes": "cuda_graph_batch_sizes",
    "compile_backend": "enforce_eager",
}
VALUES: dict[str, dict[str, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "compile_backend": {"torch-cudagraph": False, "torch-simple": True},
}
# Options that have options of their own.
GROUPS: dict[str, Any] = {"speculative_config": SpeculativeConfig, "sparse_attention_config": SparseAttentionConfig}
# Options of vLLM that have no meaning here, and the values that ask for nothing that this engine lacks.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (None, True),
    "trust_remote_code": (False,),
    "disable_log_stats": (False, True),
}


@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine, built by `LLM(**options)`, by `--config FILE` and by the command line.

    The names that vLLM has for these options are accepted, too (`max_num_seqs`, `block_size`, ...).

    Attributes:
        dtype: "auto" (the checkpoint's, but float32 on a CPU without bfloat16 instructions), "float32", "bfloat16",
            "float16" or "float64".
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        quantization: round the weights of the layers while they are loaded, to "fp8", "int8", or "int4"; "int8" and
            "int4" also round the LM head, to INT8. Default as they are stored, which may be quantized, too.
        attn_backend: name of the attention backend, such as "flashinfer" or "flex"; "auto" chooses the fastest that
            accepts the model and the machine.
        max_batch_size: requests that run at once; others wait. Default 256 on a GPU and 32 on a CPU.
        max_model_len: longest prompt and output together; default the model's own limit.
        num_pages: pages of the KV cache; default as many as `max_batch_size` of the longest requests can use, or as fit
            in memory.
        gpu_memory_utilization: share of the GPU's memory that the engine may use, for weights, KV cache and steps.
        page_size: tokens per page; default 16 on FlashInfer's backends and on `sparse`, 64 for MLA and 128 on others.
        kv_layout: order of a page's axes: "NHD" (tokens, heads, head size) or "HND" (heads first).
        kv_cache_dtype: dtype of keys and values in the cache: "auto" (the model's) or "fp8_e4m3" (half the memory
            of bfloat16; rounded to 4 significant bits).
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks. Default 2,048 on a CPU
            and for `mini-engine serve`, otherwise 16,384.
        sliding_window: no layer sees farther back than this many keys; default the model's own windows.
        enable_prefix_caching: let requests that begin with the same tokens share pages, and keep the pages of finished
            requests for later ones until the space is needed.
        disable_hybrid_kv_cache_manager: keep one page table for all layers, even if some have a sliding window and
            others see all keys. By default such models have a page table for each group of layers, so that pages that
            have left a window are free (`layer_groups.py`).
        pipeline_depth: steps that the host launches ahead of the results that it has read: 0 or 1; default 1 on a GPU
            and 0 on a CPU.
        cuda_graph_batch_sizes: numbers of requests for which a decode step is captured as a CUDA graph. A smaller step
            is padded to the next size. All other steps of up to 2,048 tokens are then launched in pieces, which are
            CUDA graphs, too, and larger ones kernel by kernel. Default 1, 2, 4, multiples of 8 and `max_batch_size` on
            a GPU, if the backend's kernels can be captured, and none on a CPU.
        enforce_eager: launch every step kernel by kernel, without CUDA graphs.
        persistent_decode: compute a decode step of a few requests in one custom CUDA kernel, for Llama and Qwen3 in
            bfloat16 on a Hopper GPU: of a single request with weights quantized or not, and with either
            `kv_cache_dtype`, and of up to eight requests with weights and keys in bfloat16. Of the engine's parts it
            calls only the sampler. Default: where it is possible.
        warm_up: run steps of made-up requests before the first real one, so that no request waits for a common
            kernel to compile. Default on a GPU.
        batch_invariant: make the logits of a request equal bit for bit whatever other requests are in its steps, and
            however its prompt is split. On a GPU (Hopper) it needs dense weights and keys in 16 bits, and no sliding
            windows, and cuBLAS has no workspace in the whole process. Requests share only prompts. What it costs is in
            experiment 16.
        scheduling_policy: which waiting request is admitted next: "fcfs" (first come, first served), "priority"
            (the one of the lowest `priority`, as in vLLM), "lpm" (the one with the longest cached prefix, as in
            SGLang), or "fair" (one of the tenant that was served the fewest tokens).
        max_overtakes: how often another request may be admitted before the first in line. Then no other request is
            admitted until it is, so no request starves. With 0, a request that needs more pages than are free blocks
            all others. Default 0 for "fcfs" and "priority" and 32 for "lpm" and "fair".
        seed: makes the seeds of requests that have none reproducible; default different ones in each run.
        speculative_config: guess tokens and check several in one step, for example `{"method": "ngram",
            "num_speculative_tokens": 4}`; see `SpeculativeConfig`. Default: do not.
        sparse_attention_config: let decodes attend only to the pages of keys that may matter, for example `{"method":
            "quest", "budget": 4096}`; see `SparseAttentionConfig`. Default: attend to all keys.

    Raises:
        ConfigError: for a value that is invalid whatever the model and the machine.
    """

    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    attn_backend: str = "auto"
    max_batch_size: int | None = None
    max_model_len: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    page_size: int | None = None
    kv_layout: str = "NHD"
    kv_cache_dtype: str = "auto"
    max_num_batched_tokens: int | None = None
    sliding_window: int | None = None
    enable_prefix_caching: bool = True
    disable_hybrid_kv_cache_manager: bool = False
    pipeline_depth: int | None = None
    cuda_graph_batch_sizes: Sequence[int] | None = None
    enforce_eager: bool = False
    persistent_decode: bool | None = None
    warm_up: bool | None = None
    batch_invariant: bool = False
    scheduling_policy: str = "fcfs"
    max_overtakes: int | None = None
    seed: int | None = None
    speculative_config: SpeculativeConfig | None = None
    sparse_attention_config: SparseAttentionConfig | None = None

    def __post_init__(self) -> None:
        from mini_engine.attention.backend import check_backend  # imports torch, which would slow down `--help`

        if self.attn_backend != "auto":
            check_backend(self.attn_backend)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if not any(value == choice and type(value) is type(choice) for choice in choices):  # True is not 1
                raise ConfigError(f"{name} is {str(value)[:80]!r}; choose one of: {', '.join(map(str, choices))}")
        check_positive(**{name: getattr(self, name) for name in SIZES})
        share, seed, sizes = self.gpu_memory_utilization, self.seed, self.cuda_graph_batch_sizes
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {str(share)[:80]}; give a number above 0 and up to 1")
        if not isinstance(seed, int | None) or isinstance(seed, bool):
            raise ConfigError(f"seed is {str(seed)[:80]!r}; give a whole number")
        if not isinstance(sizes, list | tuple | None):
            raise ConfigError(f"cuda_graph_batch_sizes is {str(sizes)[:80]}; give a list of whole numbers")
        most = self.max_overtakes
        if most is not None and (type(most) is not int or not 0 <= most <= 10**9):
            raise ConfigError(f"max_overtakes is {str(most)[:80]!r}; give a whole number from 0 to 10**9")
        for size in sizes or ():
            check_positive(cuda_graph_batch_sizes=size)
        if sizes is not None:
            object.__setattr__(self, "cuda_graph_batch_sizes", tuple(sorted(set(sizes))))
        if sizes and self.enforce_eager:
            raise ConfigError("enforce_eager and cuda_graph_batch_sizes contradict each other; give one of them")
        tokens, requests = self.max_num_batched_tokens, self.max_batch_size
        if tokens is not None and requests is not None and tokens < requests:
            raise ConfigError(
                f"max_num_batched_tokens is {tokens}, less than max_batch_size ({requests}): a step could not decode "
                "every request; raise the first or lower the second"
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


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The options of an engine with every default resolved, by `defaults.resolve`. See `EngineConfig`."""

    max_batch_size: int
    max_model_len: int
    num_pages: int
    page_size: int
    max_num_batched_tokens: int
    pipeline_depth: int
    cuda_graph_batch_sizes: Sequence[int]
    max_overtakes: int
    persistent_decode: bool
    warm_up: bool


def read_options(path: Path) -> dict[str, Any]:
    """Read the options that a YAML file sets, under the names of `EngineConfig`'s fields. The values are not checked.

    A file may also name the `model`, which is not an option of the engine but the first argument of `LLM`.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, or holds anything but options.
    """
    try:
        options = yaml.safe_load(path.read_text("utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or a bad number
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())[:200]}; give a YAML file") from error
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ConfigError(f"{path} must hold options, one per line, such as `page_size: 16`")
    model = {"model": options.pop("model")} if "model" in options else {}
    if not isinstance(model.get("model", ""), str):
        raise ConfigError(f"model is {str(model['model'])[:40]}; give a name or a path")
    return model | _by_field(options)


def _by_field(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under the names and with the values of the fields."""
    known, named = [field.name for field in fields(EngineConfig)], dict[str, Any]()
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if given in NEUTRAL:
            if value not in NEUTRAL[given]:
                allowed = " or ".join(map(str, NEUTRAL[given]))
                raise ConfigError(f"{given} is {str(value)[:40]!r}, but this engine has only {allowed}; leave it out")
            continue
        if name not in known:
            near = get_close_matches(given[:40], [*known, *ALIASES], 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown option {given[:40]!r}; {hint}")
        if name in named:
            raise ConfigError(f"{given} is another name of {name}, which is given, too; give one of them")
        values = VALUES.get(given, {})
        if given in ALIASES and values and value not in list(values):
            raise ConfigError(f"{given} is {str(value)[:40]!r}; choose one of: {', '.join(values)}")
        if name in GROUPS and not isinstance(value, GROUPS[name] | None):
            value = GROUPS[name].of(value)
        named[name] = values.get(value, value) if isinstance(value, str) else value
    return named
