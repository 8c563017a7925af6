"""The interface of an attention backend, the registry of all backends, and the choice of one.

A backend is one way to compute attention over the KV cache. It is built once, from the specs of all layers and the
cache. In each step the engine calls `plan(batch)`, and then the model calls the backend itself once in each layer.
Explained in chapter 04.
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mini_engine.attention.mla import UpProjections
from mini_engine.attention.naive import alibi_slopes
from mini_engine.attention.spec import AttentionSpec, MLASizes
from mini_engine.batch import StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kernels.nvcc import has_nvcc


@runtime_checkable
class CacheFormat(Protocol):
    """How a KV cache stores keys and values: all that decides which backends accept it.

    Attributes:
        page_size: tokens that fit in one page.
        layout: order of a page's axes, "NHD" or "HND".
        dtype: dtype of keys and values, except in layers whose spec sets `kv_dtype`.
        device: the device that holds them.
    """

    page_size: int
    layout: str
    dtype: torch.dtype
    device: torch.device


@dataclass
class PlannedCache:
    """The format of a cache that has not been built yet. See `CacheFormat`."""

    page_size: int
    layout: str
    dtype: torch.dtype
    device: torch.device


@runtime_checkable
class KVCache(CacheFormat, Protocol):
    """The KV cache, as a backend sees it.

    Attributes:
        layers: for each KV layer the two tensors of its entry (`AttentionSpec.entry`), each [pages, *layout].
    """

    layers: list[tuple[Tensor, Tensor]]


@runtime_checkable
class AttentionParts(Protocol):
    """The parts of the engine that backends call; `mini_engine.parts.Parts` has them all."""

    def masked_attention(self, *args: Any, **kwargs: Any) -> Tensor: ...
    def merge_states(self, *args: Any) -> Any: ...
    def append_kv(self, *args: Any) -> None: ...
    def mask_mod(self, *args: Any) -> Callable[..., Tensor]: ...
    def classify_blocks(self, *args: Any) -> tuple[Tensor, Tensor]: ...
    def physical_blocks(self, *args: Any) -> Tensor: ...
    def physical_mask(self, *args: Any) -> Callable[..., Tensor]: ...
    def plan_work(self, *args: Any, **kwargs: Any) -> Any: ...
    def find_levels(self, *args: Any) -> Any: ...
    def chunk_levels(self, *args: Any) -> Any: ...


class AttentionBackend(ABC):
    """One way to compute attention over the KV cache; an `Attend`, so the model calls it directly.

    Args:
        specs: one for each layer of the model, in order.
        cache: the KV cache.
        parts: the engine's replaceable parts.

    Attributes:
        bypasses: names of the parts that the backend does not use, or uses only in some cases.
        planner: finds the levels of each step; None if the backend does not use levels.
        takes_stored_keys: whether `run` may follow a kernel that has itself stored the step's keys, at `slot_mapping`.
        slot_mapping: [T] slots of the step's keys and values, for such kernels.
        waits_for_keys: whether a kernel of the backend that starts before the previous one has ended (programmatic
            dependent launch) waits for it before it reads any key that the step stores.
        takes_single_queries: whether each new token of a decode is a sequence of its own in the steps of the backend
            (`StepInput.with_single_queries`).
        captures: whether a CUDA graph can record `append` and `run` of a decode step, and replay them after `plan` of
            another step with the same number of requests.
        captures_steps: the same for other steps: whether a CUDA graph can record a step of any prompts and decodes, and
            replay it after `plan_captured` of another one.
        outputs_apart: see `Scheduler`.
        sinks: [Hq] the sinks of each layer that has them, by layer; `create_backend` sets them.
        up_projections: the matrices of each layer with MLA, by layer; `create_backend` sets them.
        specs: one for each layer; a layer index selects among them.
        cache: see above.
        parts: see above.
    """

    bypasses: ClassVar[frozenset[str]]
    planner: Any = None
    captures: ClassVar[bool] = False
    captures_steps: bool = False
    takes_stored_keys: ClassVar[bool] = False
    slot_mapping: Int[Tensor, " T"]
    waits_for_keys: bool = False
    takes_single_queries: ClassVar[bool] = False
    outputs_apart: ClassVar[bool] = False
    sinks: Mapping[int, Float[Tensor, " Hq"]] = MappingProxyType({})
    up_projections: Mapping[int, UpProjections] = MappingProxyType({})

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        self.specs, self.cache, self.parts = tuple(specs), cache, parts

    @abstractmethod
    def plan(self, batch: StepBatch) -> None:
        """Prepare a step on the host. Called once per step, before the first layer."""

    def can_capture(self, batch: StepBatch, size: int) -> bool:
        """Return whether a graph of so many tokens can compute a step; only asked if `captures_steps`.

        Args:
            batch: the step.
            size: its tokens with padding.
        """
        return False

    def plan_captured(self, batch: StepBatch, slot_mapping: Int[Tensor, " n"]) -> None:
        """Prepare a step as `plan` does, at addresses that are the same for every step padded to n tokens.

        Args:
            batch: the step, without the padding; `can_capture` is true for it.
            slot_mapping: [n] slots of the keys and values, those of the padding at the end.
        """
        raise NotImplementedError

    @abstractmethod
    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk Dv"]) -> None:
        """Store the step's keys and values of one layer in the cache, or with MLA its latents and rotated keys."""

    @abstractmethod
    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq Dv"]:
        """Compute the attention of each query of the step over all keys that it may see, including the new ones."""

    def run_into(self, layer: int, q: Float[Tensor, "T Hq D"], out: Float[Tensor, "T Hq Dv"]) -> None:
        """Compute the result of `run` in memory of the caller.

        Args:
            layer: as for `run`.
            q: the same.
            out: contiguous; overwritten.
        """
        out.copy_(self.run(layer, q))

    def __call__(
        self, layer: int, q: Float[Tensor, "T Hq D"], *entry: Float[Tensor, "T _ _"]
    ) -> Float[Tensor, "T Hq Dv"]:
        """Store the step's entry, such as its keys and values, then attend."""
        self.append(layer, *entry)
        return self.run(layer, q)


# The fields of AttentionSpec that a backend must implement if a layer sets them.
FEATURES = frozenset({"window", "softcap", "alibi_slopes", "kv_dtype", "kv_scales", "has_sinks", "mla", "key_budget"})
WIDE = torch.float32, torch.bfloat16, torch.float16, torch.float64
DEEPSEEK_V2 = MLASizes(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
Refusal = tuple[str, str | None]  # why (the predicate of a sentence), and an engine option that would help


@dataclass(frozen=True)
class BackendInfo:
    """A backend's class, and what the backend accepts.

    Attributes:
        path: "module:class". The module is imported when the backend is chosen, because it may need packages that not
            every machine has.
        layouts: layouts of the KV cache.
        devices: types of devices.
        dtypes: dtypes of the model.
        kv_dtypes: dtypes other than the model's in which keys and values may be stored.
        architectures: major compute capabilities of the GPUs that it runs on; None: any.
        features: the FEATURES that the backend implements.
        sizes: returns why it refuses a layer or the size of the cache's pages, or None.
        package: a package that must be installed, also the name of the engine's extra that installs it.
        page_size: the default page size.
        decodes: "module:class" of the kernels that compute the decodes of a `PagedBackend`; None for other backends.
        levels: whether a `PagedBackend` computes shared prefixes once, as levels of a cascade.
        on_cuda: the backend of the same name on a GPU, if it is another class.
    """

    path: str
    layouts: tuple[str, ...] = ("NHD",)
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = WIDE
    kv_dtypes: tuple[torch.dtype, ...] = WIDE
    architectures: tuple[int, ...] | None = None
    features: frozenset[str] = FEATURES - {"kv_scales", "has_sinks", "mla", "key_budget"}
    sizes: Callable[[AttentionSpec, CacheFormat], Refusal | None] = lambda spec, cache: None
    package: str | None = None
    page_size: int = 128
    decodes: str | None = None
    levels: bool = False
    on_cuda: "BackendInfo | None" = None

    def on(self, device_type: str) -> "BackendInfo":
        """Return the backend of this name on a type of device."""
        return self.on_cuda if self.on_cuda and device_type == "cuda" else self

    def refusal(self, specs: Sequence[AttentionSpec], cache: CacheFormat) -> Refusal | None:
        """Return why the backend does not accept the layers, the cache or the machine; None if it does."""
        if cache.device.type not in self.devices:
            return f"does not run on {cache.device.type!r}", f"device={self.devices[0]!r}"
        if self.package and find_spec(self.package) is None:
            return f"needs the package {self.package} (pip install 'mini-engine[{self.package}]')", None
        if self.architectures:
            major, _ = torch.cuda.get_device_capability(cache.device)
            if major not in self.architectures:
                wanted = ", ".join(map(str, self.architectures))
                names = "Hopper" if self.architectures == (9,) else "Hopper or Blackwell"
                return f"needs a GPU of compute capability {wanted} ({names}), not {major}", None
        if cache.layout not in self.layouts:
            return f"reads pages in layout {self.layouts[0]}, not {cache.layout}", f"kv_layout={self.layouts[0]!r}"
        for spec in specs:
            if refusal := self.sizes(spec, cache):
                return refusal
            for feature in sorted(FEATURES - self.features):
                if getattr(spec, feature) != getattr(AttentionSpec, feature):  # the class holds the default
                    return f"does not implement {feature}, which layer {spec.layer} sets", None
            if spec.kv_dtype not in (None, cache.dtype, *self.kv_dtypes):
                return f"does not read keys in {spec.kv_dtype}", "kv_cache_dtype='auto'"
            if cache.dtype not in self.dtypes:
                return f"does not read keys in {cache.dtype}", "dtype='bfloat16'"
        if self.decodes and not any(pkgutil.resolve_name(self.decodes).computes(spec, cache) for spec in specs):
            return (
                "has a decode kernel that supports none of the model's layers",
                None,
            )
        return None

    def create(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> AttentionBackend:
        """Build the backend."""
        backend = pkgutil.resolve_name(self.path)
        if self.decodes is None:
            return backend(specs, cache, parts)
        return backend(specs, cache, parts, decodes=pkgutil.resolve_name(self.decodes), levels=self.levels)


def _flex_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    on_gpu, size = cache.device.type == "cuda", cache.page_size
    if on_gpu and find_spec("triton") is None:
        return "needs the package triton, which comes with PyTorch for CUDA", None
    if size % 128 if on_gpu else size > 64 and size % 16:
        pages = "a page_size that is a multiple of 128 on a GPU, and at most 64 or a multiple of 16 on a CPU"
        return f"needs {pages}, not {size}", "page_size=128"
    if on_gpu and spec.head_dim < 16:
        return f"needs heads of size 16 or more on a GPU, not {spec.head_dim}", None
    return None


def _flashinfer_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if spec.head_dim not in (64, 128, 256):
        return f"needs heads of size 64, 128 or 256, not {spec.head_dim}", None
    if slopes := spec.alibi_slopes:
        differ = any(abs(a - b) > 1e-6 for a, b in zip(slopes, alibi_slopes(len(slopes)).tolist(), strict=True))
        if differ or spec.softcap is not None:
            return f"has ALiBi only with the slopes of Press et al. and no soft-cap, unlike layer {spec.layer}", None
    return None


def _mla_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if spec.mla is None:
        return f"computes only multi-head latent attention, unlike layer {spec.layer}", None
    if spec.mla != DEEPSEEK_V2:
        return f"needs the sizes of DeepSeek-V2 ({DEEPSEEK_V2}), not {spec.mla}", None
    if 128 % spec.num_qo_heads:  # otherwise a query's heads would be in two of FlashInfer's tiles
        return f"needs a number of heads that divides 128, not {spec.num_qo_heads}", None
    return None


def _trtllm_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if cache.page_size not in (16, 32, 64, 128):
        return f"needs pages of 16, 32, 64 or 128 tokens; page_size is {cache.page_size}", "page_size=16"
    return _flashinfer_sizes(spec, cache)  # FlashInfer computes the prompts


def _flash_decoding_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if cache.page_size % 16:
        return f"needs a page_size that is a multiple of 16, not {cache.page_size}", "page_size=16"
    if not has_nvcc():
        return "needs nvcc of the CUDA toolkit to compile its kernel", None
    return _flashinfer_sizes(spec, cache)  # FlashInfer computes the prompts


def _batch_invariant_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if spec.group > 8:
        return f"needs at most 8 query heads for each KV head, not {spec.group}", None
    return _flash_decoding_sizes(spec, cache)


def _sparse_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if spec.key_budget is None:
        return None
    if spec.key_budget < 2 * cache.page_size:
        needed = f"a budget of {2 * cache.page_size} keys or more"
        return (
            f"always selects the first page and the last, so it cannot keep a budget of {spec.key_budget} keys",
            needed,
        )
    for feature in ("window", "alibi_slopes", "kv_dtype", "has_sinks"):
        if getattr(spec, feature) not in (None, False):
            return (
                f"selects no pages in a layer with {feature}, such as layer {spec.layer}",
                "sparse_attention_config=None",
            )
    return None


def _sparse_paged_sizes(spec: AttentionSpec, cache: CacheFormat) -> Refusal | None:
    if spec.key_budget is not None and spec.group > 16:
        needed = "sparse_attention_config=None"
        return f"selects pages for at most 16 query heads for each KV head on a GPU, not {spec.group}", needed
    return _sparse_sizes(spec, cache) or _flashinfer_sizes(spec, cache)


TORCH = BackendInfo(
    "mini_engine.attention.torch:TorchBackend",
    kv_dtypes=(*WIDE, torch.float8_e4m3fn),
    features=FEATURES - {"key_budget"},
)
# Its subclasses that plan the keys of a step in their own way compute no MLA.
TILED = replace(TORCH, features=TORCH.features - {"mla"})
# Prompts and decodes on FlashInfer. The backends made from it differ in the decode kernel, and in whether they have
# levels. A decode kernel may compute only some layers; FlashInfer computes the others.
FLASHINFER = BackendInfo(
    "mini_engine.attention.paged:PagedBackend",
    layouts=("NHD", "HND"),
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    kv_dtypes=(torch.float8_e4m3fn,),
    features=FEATURES - {"mla", "key_budget"},
    sizes=_flashinfer_sizes,
    package="flashinfer",
    page_size=16,
    decodes="mini_engine.attention.flashinfer:FlashInferDecodes",
)
# XQA runs on Hopper (9) and on Blackwell in workstations (12), trtllm-gen on Blackwell in data centers (10).
TRTLLM = replace(
    FLASHINFER,
    decodes="mini_engine.attention.trtllm:TRTLLMDecodes",
    architectures=(9, 10, 12),
    sizes=_trtllm_sizes,
)
FLASH_DECODING = replace(
    FLASHINFER,
    decodes="mini_engine.attention.flash_decoding:FlashDecodes",
    architectures=(9,),
    sizes=_flash_decoding_sizes,
)
# Layers with latents: prompts on FlashInfer, and decodes on FlashInfer or on our own kernel.
FLASHINFER_MLA = BackendInfo(
    "mini_engine.attention.mla_paged:FlashInferMLABackend",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    kv_dtypes=(),
    features=frozenset({"mla"}),
    sizes=_mla_sizes,
    package="flashinfer",
    page_size=64,
)

# In order of preference: if a backend refuses, the error message names the first one that does not.
BACKENDS = {
    "torch": TORCH,
    "torch_padded": replace(TORCH, path="mini_engine.attention.torch:PaddedTorchBackend"),
    "chunked": replace(TORCH, path="mini_engine.attention.torch:ChunkedBackend"),
    "batch_invariant": replace(
        TILED,
        path="mini_engine.attention.batch_invariant:BatchInvariantBackend",
        on_cuda=replace(
            FLASH_DECODING,
            path="mini_engine.attention.batch_invariant_paged:BatchInvariantPagedBackend",
            decodes="mini_engine.attention.batch_invariant_paged:SplitDecodes",
            kv_dtypes=(),
            features=frozenset({"softcap"}),
            sizes=_batch_invariant_sizes,
        ),
    ),
    "flex": BackendInfo(
        "mini_engine.attention.flex:FlexBackend",
        sizes=_flex_sizes,
        kv_dtypes=(),
        # For the sinks it would have to return the LSE, and torch compiles no kernel for CPUs that does.
        features=FEATURES - {"kv_dtype", "kv_scales", "has_sinks", "mla", "key_budget"},
    ),
    "flashinfer": FLASHINFER,
    "flashinfer_trtllm": TRTLLM,
    "flash_decoding": FLASH_DECODING,
    "split_kv": replace(TILED, path="mini_engine.attention.split_kv:SplitKVBackend"),
    "cascade": replace(
        TILED, path="mini_engine.attention.cascade:CascadeBackend", on_cuda=replace(FLASHINFER, levels=True)
    ),
    "flashinfer_trtllm+cascade": replace(TRTLLM, levels=True),
    "flash_decoding+cascade": replace(FLASH_DECODING, levels=True),
    "flashinfer_mla": FLASHINFER_MLA,
    "triton_mla": replace(FLASHINFER_MLA, path="mini_engine.attention.mla_paged:TritonMLABackend"),
    "sparse": replace(
        TORCH,
        path="mini_engine.attention.sparse:SparseBackend",
        features=FEATURES - {"mla"},
        sizes=_sparse_sizes,
        page_size=16,
        on_cuda=replace(
            FLASHINFER,
            path="mini_engine.attention.sparse_paged:SparsePagedBackend",
            features=FLASHINFER.features | {"key_budget"},
            sizes=_sparse_paged_sizes,
        ),
    ),
}
# What `attn_backend="auto"` chooses from, best first (experiments 06, 07, 11 and 19).
AUTO = {
    "cuda": ("flash_decoding+cascade", "cascade", "flashinfer_mla", "flex", "torch", "sparse"),
    "cpu": ("torch_padded", "sparse"),
}


def choose_backend(
    specs: Sequence[AttentionSpec], page_size: int | None, layout: str, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """Choose the best backend for a model and a machine.

    Args:
        specs: one for each layer of the model.
        page_size: the page size that the options ask for; None: each backend's default.
        layout: order of a page's axes.
        dtype: the model's.
        device: the model's device.

    Returns:
        The name, and why the choice fell on it.

    Raises:
        ConfigError: if no backend accepts the model and the options.
    """
    refused: list[str] = []
    for name in AUTO[device.type]:
        info = BACKENDS[name].on(device.type)
        refusal = info.refusal(specs, PlannedCache(page_size or info.page_size, layout, dtype, device))
        if refusal is None:
            return name, "; ".join(refused) or "the first choice on this device"
        refused.append(f"{name} {refusal[0]}")
    raise ConfigError(f"no attention backend accepts these options: {'; '.join(refused)}")


def create_backend(
    name: str,
    specs: Sequence[AttentionSpec],
    cache: KVCache,
    parts: AttentionParts,
    sinks: Mapping[int, Float[Tensor, " Hq"]] = AttentionBackend.sinks,
    up_projections: Mapping[int, UpProjections] = AttentionBackend.up_projections,
) -> AttentionBackend:
    """Build a backend.

    Args:
        name: a key of BACKENDS.
        specs: one for each layer of the model.
        cache: the KV cache.
        parts: the engine's replaceable parts.
        sinks: the sinks of each layer that has them, by layer (`LanguageModel.sinks`).
        up_projections: the matrices of each layer with MLA, by layer (`LanguageModel.up_projections`).

    Raises:
        ConfigError: if there is no such backend, it does not support the model, the cache or the machine, or the sinks
            or the matrices are not those of the specs.
    """
    check_layers(name, specs, cache, sinks, up_projections)
    backend = BACKENDS[name].on(cache.device.type).create(specs, cache, parts)
    backend.sinks, backend.up_projections = sinks, up_projections
    return backend


def check_layers(
    name: str,
    specs: Sequence[AttentionSpec],
    cache: CacheFormat,
    sinks: Mapping[int, Float[Tensor, " Hq"]],
    up_projections: Mapping[int, UpProjections],
) -> None:
    """Raise ConfigError if a backend cannot be built for some layers; see `create_backend`."""
    check_backend(name)
    info = {other: info.on(cache.device.type) for other, info in BACKENDS.items()}
    if refusal := info[name].refusal(specs, cache):
        reason, option = refusal
        others = [other for other in info if not info[other].refusal(specs, cache)]
        ways_out = ([f"set {option}"] if option else []) + [f"use attn_backend={other!r}" for other in others[:1]]
        raise ConfigError(f"the {name} backend {reason}; {' or '.join(ways_out)}")
    expected = {spec.layer: (spec.num_qo_heads,) for spec in specs if spec.has_sinks}
    if expected != (given := {layer: tuple(own.shape) for layer, own in sinks.items()}):
        raise ConfigError(f"the specs need sinks of the shapes {expected} by layer, not {given}; give model.sinks")
    latent = {spec.layer for spec in specs if spec.mla is not None}
    if latent != up_projections.keys():
        raise ConfigError(
            f"the specs need the up-projections of the layers {sorted(latent)}, not {sorted(up_projections)}; give "
            "model.up_projections"
        )


def check_backend(name: str) -> None:
    """Raise ConfigError if there is no backend of that name."""
    if name not in list(BACKENDS):  # compared, not looked up: a name that is not a string may not be hashable
        raise ConfigError(f"unknown attention backend {name!r}; choose one of: {', '.join(BACKENDS)}")
