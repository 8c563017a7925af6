"""FlashInfer's kernels on the paged KV cache (Ye et al. 2025): the prompts of a step, and its decodes.

FlashInfer splits the work in two. `plan` runs on the host once per step: from the lengths of all sequences it decides
which thread block computes which queries over which keys, so that all of them finish at about the same time. `run`
launches one kernel per layer, which reads that plan. Layers of one kind share a plan. `attention/split_kv.py` computes
the same in PyTorch. Explained in chapter 08.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from mini_engine.attention.backend import CacheFormat, KVCache
from mini_engine.attention.spec import AttentionSpec
from mini_engine.batch import StepBatch

logger = logging.getLogger(__name__)
# For partial results of sequences whose keys are split among several thread blocks; all plans share it.
WORKSPACE_BYTES = 256 * 2**20
# On an H200, FlashAttention-3 is faster than FlashAttention-2 for prompts of hundreds of tokens or more, and slower for
# decodes (experiment 06). It is used if the prompts of a step have this many new tokens on average.
FA3_MIN_TOKENS = 384
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # query heads per KV head


class LayerKind(NamedTuple):
    """The fields of AttentionSpec that a plan depends on: layers of one kind share a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    alibi: bool
    kv_dtype: torch.dtype | None
    k_scale: float
    v_scale: float
    has_sinks: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec) -> "LayerKind":
        """Return the kind of a layer."""
        return cls(
            spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.softcap,
            spec.alibi_slopes is not None, spec.kv_dtype, *(spec.kv_scales or (1.0, 1.0)), spec.has_sinks,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def scales(self) -> dict[str, float]:
        """The scales as arguments of `run`. None for keys in the model's dtype: FlashInfer would multiply by 1."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale} if self.kv_dtype else {}

    def may_share(self) -> bool:
        """Return whether such layers may have levels: their kernels need no position of a key."""
        return self.window is None and not self.alibi


class Wrappers:
    """FlashInfer's wrappers over one cache. A wrapper keeps a plan, and runs it in each layer.

    Args:
        cache: the KV cache, on a GPU.

    Attributes:
        flashinfer: the package.
        cache: see above.
        workspace: memory that all wrappers share.
        made: the wrappers, and other objects with the same `run`, by kind of layer and name.
    """

    def __init__(self, cache: KVCache) -> None:
        import flashinfer  # takes seconds, and not every machine has it

        self.flashinfer, self.cache = flashinfer, cache
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self.made: dict[tuple[Hashable, str], Any] = {}

    def get(self, kind: Hashable, name: str, make: Callable[..., Any], buffers: Mapping[str, int] | None = None) -> Any:
        """Return the wrapper of a kind of layer. It is created when needed, because each takes 8 MiB on the GPU.

        Args:
            kind: the kind of layer.
            name: name of the wrapper, unique within its kind.
            make: creates the wrapper.
            buffers: for a CUDA graph, names and sizes of the arrays that `make` takes.
        """
        key = kind, name
        if key not in self.made:
            keys, _ = self.cache.layers[0]
            logger.debug("%s for %s; keys %s %s, %s", name, kind, list(keys.shape), self.cache.layout, keys.dtype)
            arrays = {name: keys.new_empty(size, dtype=torch.int32) for name, size in (buffers or {}).items()}
            self.made[key] = make(use_cuda_graph=True, **arrays) if arrays else make()
        return self.made[key]

    def options(self, kind: LayerKind) -> dict[str, Any]:
        """Return the keyword arguments of all plans. FlashInfer's window does not count the query's own key."""
        return {
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap,
            "sm_scale": kind.scale,
            "pos_encoding_mode": "ALIBI" if kind.alibi else "NONE",
            "q_data_type": self.cache.dtype,
            "kv_data_type": kind.kv_dtype or self.cache.dtype,
        }


class FlashInferPrompts:
    """FlashInfer's prefill kernels for the prompts of a step: FlashAttention-2, or FlashAttention-3 for long ones.

    Args:
        wrappers: FlashInfer's wrappers.
    """

    def __init__(self, wrappers: Wrappers) -> None:
        self._wrappers = wrappers
        self._has_fa3 = wrappers.flashinfer.utils.is_sm90a_supported(wrappers.cache.device)

    def plan(self, batch: StepBatch, first: int, kind: LayerKind) -> Any:
        """Plan the sequences of the step from `first` on; those before it have one token each."""
        mean_tokens = (batch.num_tokens - first) / (batch.num_sequences - first)
        algorithm, wrappers = self._algorithm(kind, mean_tokens), self._wrappers
        prefill = wrappers.flashinfer.BatchPrefillWithPagedKVCacheWrapper
        make = partial(prefill, wrappers.workspace, wrappers.cache.layout, backend=algorithm)
        wrapper = wrappers.get(kind, algorithm, make)
        wrapper.plan(
            batch.qo_indptr[first:] - first,
            batch.kv_page_indptr[first:],
            batch.kv_page_indices,
            batch.kv_last_page_len[first:],
            *kind[:3],
            batch.page_size,
            causal=True,
            **wrappers.options(kind),
        )
        return wrapper

    def _algorithm(self, kind: LayerKind, mean_tokens: float) -> str:
        # FlashInfer's FlashAttention-3 has no ALiBi, and reads narrower keys only with queries of the same dtype.
        use_fa3 = self._has_fa3 and not kind.alibi and not kind.kv_dtype and mean_tokens >= FA3_MIN_TOKENS
        return "fa3" if use_fa3 else "fa2"


class Decodes(ABC):
    """The kernels that compute the decodes of a step for `PagedBackend`: one query for each request.

    Args:
        kinds: the kinds of layers that it will compute.
        wrappers: FlashInfer's wrappers, among which it keeps its own plans.

    Attributes:
        returns_lse: whether the result can be merged with that of levels, or with sinks.
        waits_for_keys: see `AttentionBackend`.
    """

    returns_lse: ClassVar[bool] = True
    waits_for_keys: ClassVar[bool] = True

    def __init__(self, kinds: Sequence[LayerKind], wrappers: Wrappers) -> None:
        self._wrappers = wrappers

    @staticmethod
    def computes(spec: AttentionSpec, cache: CacheFormat) -> bool:
        """Return whether the kernels support a layer."""
        return True

    def begin(self) -> None:  # noqa: B027
        """Begin to plan a step. All copies of earlier plans to the device have ended."""

    @abstractmethod
    def plan(self, batch: StepBatch, count: int, kind: LayerKind, has_levels: bool) -> Any:
        """Plan the first `count` sequences of a step for a kind of layer.

        Args:
            batch: the step; with levels, each request has only the pages that no level holds.
            count: number of decodes.
            kind: the kind of layer.
            has_levels: whether the result is merged with that of levels.

        Returns:
            An object with the `run` of FlashInfer's wrappers.
        """


class FlashInferDecodes(Decodes):
    """FlashInfer's decode kernels, which support every layer whose prompts FlashInfer computes."""

    def plan(self, batch: StepBatch, count: int, kind: LayerKind, has_levels: bool) -> Any:
        """Plan the first `count` sequences of the step, which have one query each.

        On an H200, tensor cores are as fast as CUDA cores for equal lengths, and faster for unequal ones. With levels,
        few keys are left for each request. CUDA cores read these faster than tensor cores, whose tiles of queries are
        mostly padding.
        """
        on_cuda_cores = has_levels and not kind.kv_dtype and kind.group in CUDA_CORE_GROUPS
        algorithm, wrappers = "decode on CUDA cores" if on_cuda_cores else "decode", self._wrappers
        decode = wrappers.flashinfer.BatchDecodeWithPagedKVCacheWrapper
        make = partial(
            decode, wrappers.workspace, wrappers.cache.layout, use_tensor_cores=not on_cuda_cores, backend="fa2"
        )
        if batch.page_capacity is None:
            wrapper = wrappers.get(kind, algorithm, make)
        else:  # in a CUDA graph it plans into memory that the captured kernels read
            sizes = {"indptr": count + 1, "indices": batch.page_capacity, "last_page_len": count}
            buffers = {f"paged_kv_{name}_buffer": size for name, size in sizes.items()}
            wrapper = wrappers.get(kind, f"{algorithm}, graph of {count}", make, buffers)
        wrapper.plan(
            batch.kv_page_indptr[: count + 1],
            batch.kv_page_indices,
            batch.kv_last_page_len[:count],
            *kind[:3],
            batch.page_size,
            **wrappers.options(kind),
        )
        return wrapper
