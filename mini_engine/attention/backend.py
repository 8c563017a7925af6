"""The interface of an attention backend, and the registry of all backends.

A backend is one way to compute attention over the KV cache. It is built once, from the specs of all layers and the
cache. In each step the engine calls `plan(batch)`, and then the model calls the backend itself once in each layer.
Explained in chapter 04.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import PrefixLevel, StepBatch
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.page_table import PageTable, Rows


@runtime_checkable
class KVCache(Protocol):
    """The KV cache, as a backend sees it.

    Attributes:
        layers: for each KV layer its (k, v), each [pages, *layout].
        page_size: tokens that fit in one page.
        layout: order of a page's axes, "NHD" or "HND".
        dtype: of keys and values, except in layers whose spec sets `kv_dtype`.
        device: where they are.
    """

    layers: list[tuple[Tensor, Tensor]]
    page_size: int
    layout: str
    dtype: torch.dtype
    device: torch.device


@runtime_checkable
class AttentionParts(Protocol):
    """The parts of the engine that backends call; `mini_engine.parts.Parts` has them all."""

    @property
    def masked_attention(self) -> Callable[..., Tensor]: ...
    @property
    def merge_states(self) -> Callable[..., Any]: ...
    @property
    def append_kv(self) -> Callable[..., None]: ...
    @property
    def mask_mod(self) -> Callable[..., Callable[..., Tensor]]: ...
    @property
    def classify_blocks(self) -> Callable[..., tuple[Tensor, Tensor]]: ...
    @property
    def physical_blocks(self) -> Callable[..., Tensor]: ...
    @property
    def physical_mask(self) -> Callable[..., Callable[..., Tensor]]: ...


class StepPlanner(Protocol):
    """Chooses the order of a step's requests and the levels of their common prefixes; see `cascade.LevelPlanner`."""

    def arrange(
        self, page_table: PageTable, rows: Rows, num_new: Rows, num_computed: Rows, admissions: Rows
    ) -> tuple[Rows, tuple[PrefixLevel, ...]]: ...


class AttentionBackend(ABC):
    """One way to compute attention over the KV cache; an `Attend`, so the model calls it directly.

    Args:
        specs: one for each layer of the model, in order.
        cache: where keys and values are kept.
        parts: the engine's replaceable parts.

    Attributes:
        bypasses: names of the parts that the backend does not use, or not everywhere.
        planner: finds the levels of each step; None if the backend does not use levels.
        specs: one for each layer; a layer index selects among them.
        cache: see above.
        parts: see above.
    """

    bypasses: ClassVar[frozenset[str]]
    planner: StepPlanner | None = None

    def __init__(self, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts) -> None:
        self.specs, self.cache, self.parts = tuple(specs), cache, parts

    @abstractmethod
    def plan(self, batch: StepBatch) -> None:
        """Prepare a step on the host. Called once per step, before the first layer."""

    @abstractmethod
    def append(self, layer: int, k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]) -> None:
        """Store the step's keys and values of one layer in the cache."""

    @abstractmethod
    def run(self, layer: int, q: Float[Tensor, "T Hq D"]) -> Float[Tensor, "T Hq D"]:
        """Attend with the step's queries to all keys that each may see, the appended ones included."""

    def __call__(
        self, layer: int, q: Float[Tensor, "T Hq D"], k: Float[Tensor, "T Hk D"], v: Float[Tensor, "T Hk D"]
    ) -> Float[Tensor, "T Hq D"]:
        """Store the keys and values, then attend."""
        self.append(layer, k, v)
        return self.run(layer, q)


class Limit(NamedTuple):
    """A condition on a size.

    Attributes:
        allows: whether a size is accepted on a type of device.
        sentence: the condition in words, for an error message.
        option: an engine option that satisfies it, if there is one.
    """

    allows: Callable[[int, str], bool]
    sentence: str
    option: str | None = None


ANY_SIZE = Limit(lambda size, device_type: True, "")
# The fields of AttentionSpec that a backend must implement if a layer sets them.
FEATURES = frozenset({"window", "softcap", "alibi_slopes", "kv_dtype"})


@dataclass(frozen=True)
class BackendInfo:
    """A backend's class, and what the backend accepts.

    Attributes:
        path: "module:class". The module is imported when the backend is chosen: it may need packages that not every
            machine has.
        layouts: layouts of the KV cache.
        devices: types of devices.
        dtypes: dtypes of keys and values.
        page_sizes: tokens of a page.
        head_dims: sizes of a head.
        features: those of FEATURES that the backend implements.
        on_cuda: what takes the backend's name on a GPU, if that is another class.
    """

    path: str
    layouts: tuple[str, ...] = ("NHD",)
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    page_sizes: Limit = ANY_SIZE
    head_dims: Limit = ANY_SIZE
    features: frozenset[str] = FEATURES
    on_cuda: "BackendInfo | None" = None

    def on(self, device_type: str) -> "BackendInfo":
        """The backend of this name on a type of device."""
        return self.on_cuda if self.on_cuda and device_type == "cuda" else self


# In order of preference: an error message names the first one that accepts what another refuses.
BACKENDS = {
    "torch": BackendInfo("mini_engine.attention.torch:TorchBackend"),
    "torch_padded": BackendInfo("mini_engine.attention.torch:PaddedTorchBackend"),
    "chunked": BackendInfo("mini_engine.attention.torch:ChunkedBackend"),
    "flex": BackendInfo(
        "mini_engine.attention.flex:FlexBackend",
        page_sizes=Limit(
            lambda size, device_type: size % 128 == 0 if device_type == "cuda" else size <= 64 or size % 16 == 0,
            "on a GPU pages of 128 tokens or a multiple, on a CPU pages of up to 64 tokens or a multiple of 16",
            option="page_size=128",
        ),
        head_dims=Limit(
            lambda size, device_type: size >= 16 or device_type != "cuda", "heads of size 16 or more on a GPU"
        ),
        features=FEATURES - {"kv_dtype"},
    ),
    "cascade": BackendInfo(
        "mini_engine.attention.cascade:CascadeBackend",
        on_cuda=BackendInfo(
            "mini_engine.attention.flashinfer_cascade:FlashInferCascadeBackend",
            layouts=("NHD", "HND"),
            devices=("cuda",),
            dtypes=(torch.bfloat16, torch.float16),
            head_dims=Limit(lambda size, device_type: size in (64, 128, 256), "heads of size 64, 128 or 256"),
            features=FEATURES - {"kv_dtype"},
        ),
    ),
}


def create_backend(
    name: str, specs: Sequence[AttentionSpec], cache: KVCache, parts: AttentionParts
) -> AttentionBackend:
    """Build a backend.

    Args:
        name: a key of BACKENDS.
        specs: one for each layer of the model.
        cache: where keys and values are kept.
        parts: the engine's replaceable parts.

    Raises:
        ConfigError: if there is no such backend, or the model, the cache or the machine does not suit it.
    """
    check_backend(name)
    check_support(name, specs, cache)
    return _class_of(BACKENDS[name].on(cache.device.type))(specs, cache, parts)


def check_backend(name: str) -> None:
    """Raise ConfigError if there is no backend of that name."""
    if name not in list(BACKENDS):  # compared, not looked up: a name that is not a string may not be hashable
        raise ConfigError(f"unknown attention backend {name!r}; choose one of: {', '.join(BACKENDS)}")


def check_support(name: str, specs: Sequence[AttentionSpec], cache: KVCache) -> None:
    """Raise ConfigError if a backend does not accept a model's layers or the KV cache.

    The message names the option to change, or another backend to use.
    """
    refusal = _refusal(BACKENDS[name], specs, cache)
    if refusal is None:
        return
    reason, option = refusal
    others = [other for other, info in BACKENDS.items() if _refusal(info, specs, cache) is None]
    ways_out = ([f"set {option}"] if option else []) + ([f"use attn_backend={others[0]!r}"] if others else [])
    raise ConfigError(f"the {name} backend {reason}; {' or '.join(ways_out)}")


def bypassed_parts(name: str) -> frozenset[str]:
    """Return the names of the parts that a backend does not use, or not everywhere.

    Raises:
        ConfigError: if there is no such backend.
    """
    check_backend(name)
    return _class_of(BACKENDS[name]).bypasses


def _class_of(info: BackendInfo) -> type[AttentionBackend]:
    module, _, attribute = info.path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _refusal(info: BackendInfo, specs: Sequence[AttentionSpec], cache: KVCache) -> tuple[str, str | None] | None:
    """Why a backend refuses (the predicate of a sentence) and an option that would help; None if it accepts."""
    device_type = cache.device.type
    info = info.on(device_type)
    if device_type not in info.devices:
        return f"does not run on {device_type!r}", f"device={info.devices[0]!r}"
    if cache.layout not in info.layouts:
        return f"reads pages in layout {info.layouts[0]}, not {cache.layout}", f"layout={info.layouts[0]!r}"
    if not info.page_sizes.allows(cache.page_size, device_type):
        return f"needs {info.page_sizes.sentence}; page_size is {cache.page_size}", info.page_sizes.option
    for spec in specs:
        if not info.head_dims.allows(spec.head_dim, device_type):
            return f"needs {info.head_dims.sentence}, not {spec.head_dim}", info.head_dims.option
        for feature in sorted(FEATURES - info.features):
            if getattr(spec, feature) is not None:
                return f"does not implement {feature}, which layer {spec.layer} sets", None
        if (dtype := spec.kv_dtype or cache.dtype) not in info.dtypes:
            return f"does not read keys in {dtype}", "dtype='bfloat16'"
    return None
