"""The parts of the engine that can be replaced: functions, and the class of the page table.

The engine is built from one `Parts`, passed to its constructors. Replace a part and the engine runs on yours:
`LLM(parts=replace(Parts(), rms_norm=my_rms_norm))`. A part takes and returns arrays, and is called at most once per
step or layer; the scheduler calls some once for each request that arrives or is preempted.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from mini_engine.attention.block_mask import classify_blocks, physical_blocks, physical_mask
from mini_engine.attention.masks import MaskMod, visible
from mini_engine.attention.naive import sdpa_attention
from mini_engine.attention.state import AttentionState, merge_states
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import append_kv
from mini_engine.kv_cache.prefix_sharing import Children, copy_on_write, match_prefix
from mini_engine.kv_cache.sliding_window import pages_to_evict
from mini_engine.models.gpt2 import gpt2_weights
from mini_engine.models.layers import gated_mlp, qk_norm, rms_norm
from mini_engine.policy import admit, preempt, share_budget
from mini_engine.request import Request, Running
from mini_engine.rope import apply_rope
from mini_engine.sampling import SamplingBatch, sample
from mini_engine.scheduler import Schedule, Scheduler, schedule_step


@runtime_checkable
class MaskedAttention(Protocol):
    """Attention of one request under a mask."""

    def __call__(
        self,
        q: Float[Tensor, "n Hq D"],
        k: Float[Tensor, "m Hk D"],
        v: Float[Tensor, "m Hk D"],
        *,
        scale: float,
        mask: Bool[Tensor, "n m"] | None,
        bias: Float[Tensor, "Hq n m"] | None,
        softcap: float | None,
    ) -> Float[Tensor, "n Hq D"]: ...


@runtime_checkable
class ClassifyBlocks(Protocol):
    """Which blocks of keys are visited, and which need no mask."""

    def __call__(
        self,
        first_query: Int[Tensor, "..."],
        last_query: Int[Tensor, "..."],
        first_key: Int[Tensor, "..."],
        last_key: Int[Tensor, "..."],
        window: int | None,
    ) -> tuple[Bool[Tensor, "*shape"], Bool[Tensor, "*shape"]]: ...


@runtime_checkable
class Admit(Protocol):
    """Whether the oldest waiting request is admitted, and with how many tokens."""

    def __call__(self, num_tokens: int, num_pages: int, *, budget: int, free_pages: int, free_rows: int) -> int: ...


@runtime_checkable
class QKNorm(Protocol):
    """The norm of queries and keys, before they are rotated (Qwen3)."""

    def __call__(
        self,
        q_and_k: Float[Tensor, "T QK D"],
        q_weight: Float[Tensor, " D"],
        k_weight: Float[Tensor, " D"],
        num_qo_heads: int,
        eps: float,
    ) -> Float[Tensor, "T QK D"]: ...


@runtime_checkable
class GatedMLP(Protocol):
    """The gated feed-forward network."""

    def __call__(
        self,
        x: Float[Tensor, "T hidden"],
        gate_up: Float[Tensor, "I2 hidden"],
        down: Float[Tensor, "hidden I"],
        activation: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "T hidden"]: ...


AppendKV = Callable[[Tensor, Tensor, Tensor, Tensor, Int[Tensor, " T"]], None]
Counts = Int[np.ndarray, " B"]
LOADING, SCHEDULING, PLANNING, LAYER, SAMPLING = STAGES = (
    "once, when the model is loaded",
    "at the start of every step: which request computes what, and where it is kept",
    "once per step: what each query sees",
    "in every layer, at every step",
    "at the end of every step",
)


def about(title: str, chapter: int, stage: str) -> dict[str, Any]:
    """The metadata of a field of `Parts`."""
    return {"title": title, "chapter": chapter, "stage": stage}


@dataclass(frozen=True)
class Parts:
    """One field for each replaceable part, in the order in which a step passes through them.

    The default of each is its specification. A field's metadata has its title, its chapter, and the stage of a step at
    which it runs.
    """

    gpt2_weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = field(
        default=gpt2_weights, metadata=about("Weight map", 3, LOADING)
    )
    schedule: Callable[[Scheduler], Schedule | None] = field(
        default=schedule_step, metadata=about("Scheduling loop", 7, SCHEDULING)
    )
    share_budget: Callable[[Counts, int], Counts] = field(
        default=share_budget, metadata=about("Token budget", 7, SCHEDULING)
    )
    pages_to_evict: Callable[[Counts, Counts, int, int], Counts] = field(
        default=pages_to_evict, metadata=about("Eviction", 7, SCHEDULING)
    )
    page_table: type[PageTable] = field(default=PageTable, metadata=about("Page table", 6, SCHEDULING))
    preempt: Callable[[Running, OrderedDict[Request, None], PageTable], Request] = field(
        default=preempt, metadata=about("Preemption", 7, SCHEDULING)
    )
    admit: Admit = field(default=admit, metadata=about("Admission", 7, SCHEDULING))
    match_prefix: Callable[[Children, Int32[np.ndarray, " n"], int], list[int]] = field(
        default=match_prefix, metadata=about("Prefix match", 7, SCHEDULING)
    )
    copy_on_write: Callable[[PageTable, int, int, int], list[tuple[int, int]]] = field(
        default=copy_on_write, metadata=about("Copy on write", 7, SCHEDULING)
    )
    mask_mod: Callable[[int | None], MaskMod] = field(default=visible, metadata=about("Mask", 5, PLANNING))
    classify_blocks: ClassifyBlocks = field(default=classify_blocks, metadata=about("Block classes", 5, PLANNING))
    physical_blocks: Callable[[Tensor, Tensor, int], Tensor] = field(
        default=physical_blocks, metadata=about("Physical blocks", 6, PLANNING)
    )
    physical_mask: Callable[[MaskMod, Tensor, int], MaskMod] = field(
        default=physical_mask, metadata=about("Physical mask", 6, PLANNING)
    )
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = field(default=rms_norm, metadata=about("RMSNorm", 3, LAYER))
    qk_norm: QKNorm = field(default=qk_norm, metadata=about("QK-norm", 3, LAYER))
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor] = field(default=apply_rope, metadata=about("RoPE", 1, LAYER))
    append_kv: AppendKV = field(default=append_kv, metadata=about("Cache append", 4, LAYER))
    masked_attention: MaskedAttention = field(default=sdpa_attention, metadata=about("Attention", 1, LAYER))
    merge_states: Callable[[AttentionState, AttentionState], AttentionState] = field(
        default=merge_states, metadata=about("State merge", 2, LAYER)
    )
    gated_mlp: GatedMLP = field(default=gated_mlp, metadata=about("Gated MLP", 3, LAYER))
    sample: Callable[[Tensor, SamplingBatch], Tensor] = field(default=sample, metadata=about("Sampler", 4, SAMPLING))


def default_parts(device: torch.device) -> Parts:
    """Return the parts of an engine whose user gives none: on a GPU, with FlashInfer's kernels if it is installed."""
    if device.type == "cuda" and find_spec("flashinfer"):
        from mini_engine.kernels.fused_ops import gpu_parts

        return gpu_parts()
    return Parts()
