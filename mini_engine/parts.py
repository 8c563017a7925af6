"""The parts of the engine that can be replaced: functions, and the class of the page table.

The engine is built from one `Parts`, passed to its constructors. Replace a part and the engine runs on yours:
`LLM(parts=replace(Parts(), rms_norm=my_rms_norm))`. Parts take and return arrays, and most are called once or twice per
step or layer. The scheduler calls some parts once per request that arrives or is preempted, and the backends in plain
PyTorch call attention once per sequence.
"""

import pkgutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

from mini_engine.attention.block_mask import classify_blocks, physical_blocks, physical_mask
from mini_engine.attention.levels import ChunkLevels, FindLevels, chunk_levels, find_levels
from mini_engine.attention.masks import MaskMod, visible
from mini_engine.attention.naive import sdpa_attention
from mini_engine.attention.split_kv import WorkPlan, plan_work
from mini_engine.attention.state import AttentionState, merge_states
from mini_engine.decode_graphs import DecodeArrays, pad_decodes
from mini_engine.detokenizer import ScanStop, scan_stop
from mini_engine.errors import ConfigError
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.paged import append_kv
from mini_engine.kv_cache.prefix_sharing import Children, copy_on_write, match_prefix
from mini_engine.kv_cache.sliding_window import pages_to_evict
from mini_engine.models.gpt2 import gpt2_weights
from mini_engine.models.layers import gated_mlp, qk_norm, rms_norm
from mini_engine.models.llama import decoder_layer
from mini_engine.ops import layer_parts
from mini_engine.policy import admit, preempt, ready, share_budget
from mini_engine.request import Request, Running
from mini_engine.rope import apply_rope
from mini_engine.sampling import SamplingBatch, sample
from mini_engine.scheduler import Schedule, Scheduler, schedule_step

Counts = Int[np.ndarray, " B"]
LOADING, SCHEDULING, PLANNING, LAYER, SAMPLING = STAGES = (
    "once, when the model is loaded",
    "at the start of every step: which request computes what, and where it is kept",
    "once per step: what each query sees",
    "in every layer, at every step",
    "at the end of every step",
)


def part(default: Any, title: str, chapter: int, stage: str) -> Any:
    """Define a field of `Parts`: its default (which specifies it), its title, its chapter, and when it runs."""
    return field(default=default, metadata={"title": title, "chapter": chapter, "stage": stage})


@dataclass(frozen=True)
class Parts:
    """One field for each replaceable part, in the order in which a step passes through them.

    Where a type says `...`, the parameters are those of the default.
    """

    gpt2_weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = part(gpt2_weights, "Weight map", 3, LOADING)
    schedule: Callable[[Scheduler], Schedule | None] = part(schedule_step, "Scheduling loop", 7, SCHEDULING)
    ready: Callable[[Counts, Counts, Counts, Counts], Bool[np.ndarray, " B"]] = part(
        ready, "Ready requests", 16, SCHEDULING
    )
    share_budget: Callable[[Counts, int], Counts] = part(share_budget, "Token budget", 7, SCHEDULING)
    pages_to_evict: Callable[[Counts, Counts, int, int], Counts] = part(pages_to_evict, "Eviction", 7, SCHEDULING)
    page_table: type[PageTable] = part(PageTable, "Page table", 6, SCHEDULING)
    preempt: Callable[[Running, OrderedDict[Request, None], PageTable], Request] = part(
        preempt, "Preemption", 7, SCHEDULING
    )
    admit: Callable[..., int] = part(admit, "Admission", 7, SCHEDULING)
    match_prefix: Callable[[Children, Int32[np.ndarray, " n"], int], list[int]] = part(
        match_prefix, "Prefix match", 7, SCHEDULING
    )
    copy_on_write: Callable[[PageTable, int, int, int], list[tuple[int, int]]] = part(
        copy_on_write, "Copy on write", 7, SCHEDULING
    )
    mask_mod: Callable[[int | None], MaskMod] = part(visible, "Mask", 5, PLANNING)
    classify_blocks: Callable[..., tuple[Tensor, Tensor]] = part(classify_blocks, "Block classes", 5, PLANNING)
    physical_blocks: Callable[[Tensor, Tensor, int], Tensor] = part(physical_blocks, "Physical blocks", 6, PLANNING)
    physical_mask: Callable[[MaskMod, Tensor, int], MaskMod] = part(physical_mask, "Physical mask", 6, PLANNING)
    plan_work: Callable[..., WorkPlan] = part(plan_work, "Work plan", 8, PLANNING)
    find_levels: FindLevels = part(find_levels, "Level discovery", 9, PLANNING)
    chunk_levels: ChunkLevels = part(chunk_levels, "Levels of chunks", 10, PLANNING)
    pad_decodes: Callable[[DecodeArrays, int, int], DecodeArrays] = part(pad_decodes, "Padding", 12, PLANNING)
    decoder_layer: Callable[..., Tensor] = part(decoder_layer, "Decoder layer", 3, LAYER)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = part(rms_norm, "RMSNorm", 3, LAYER)
    qk_norm: Callable[[Tensor, Tensor, Tensor, int, float], Tensor] = part(qk_norm, "QK-norm", 3, LAYER)
    apply_rope: Callable[..., Tensor] = part(apply_rope, "RoPE", 1, LAYER)
    append_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = part(append_kv, "Cache append", 4, LAYER)
    masked_attention: Callable[..., Tensor] = part(sdpa_attention, "Attention", 1, LAYER)
    merge_states: Callable[[AttentionState, AttentionState], AttentionState] = part(
        merge_states, "State merge", 2, LAYER
    )
    gated_mlp: Callable[[Tensor, Callable, Callable, Callable], Tensor] = part(gated_mlp, "Gated MLP", 3, LAYER)
    sample: Callable[[Tensor, SamplingBatch], Tensor] = part(sample, "Sampler", 4, SAMPLING)
    scan_stop: ScanStop = part(scan_stop, "Stop strings", 4, SAMPLING)

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            if not callable(given):
                raise ConfigError(f"the part {each.name} is {str(given)[:80]}; give a function like the default")
        if not (isinstance(self.page_table, type) and issubclass(self.page_table, PageTable)):
            raise ConfigError(f"the part page_table is {str(self.page_table)[:80]}; give a subclass of PageTable")


def default_parts(device: torch.device) -> Parts:
    """Return the default parts of an engine: on a GPU, with FlashInfer's kernels if it is installed."""
    return replace(Parts(), **layer_parts(device))


def load_parts(path: str) -> Parts:
    """Import a `Parts`.

    Args:
        path: "MODULE:OBJECT". The module may be a file in the current folder. The object is a `Parts`, or a function
            without arguments that returns one.

    Raises:
        ConfigError: if there is no such object, it is not a `Parts`, or the module raises an exception.
    """
    if "" not in sys.path:  # installed commands do not import from the current folder
        sys.path.append("")
    try:
        parts = pkgutil.resolve_name(path)
        parts = parts if isinstance(parts, Parts) else parts()
    except (Exception, SystemExit) as error:  # the module may raise anything
        parts = error
    if not isinstance(parts, Parts):
        raise ConfigError(
            f"cannot load the parts {path!r} ({type(parts).__name__}: {parts}); give MODULE:OBJECT, such as "
            "my_parts:parts for `parts`, a mini_engine.Parts, in my_parts.py"
        )
    return parts
