"""The parts of the engine that can be replaced: functions, and the class of the page table.

The engine is built from one `Parts`, handed to its constructors. Replace a part and the engine runs on yours:
`LLM(parts=replace(Parts(), rms_norm=my_rms_norm))`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mini_engine.attention.block_mask import classify_blocks
from mini_engine.attention.masks import visible
from mini_engine.attention.naive import sdpa_attention
from mini_engine.attention.state import merge_states
from mini_engine.kv_cache.contiguous import append_kv
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.kv_cache.physical import physical_blocks, physical_mask
from mini_engine.kv_cache.prefix_sharing import copy_on_write, share_prefix
from mini_engine.kv_cache.sliding_window import evict_pages
from mini_engine.models.gpt2 import gpt2_weights
from mini_engine.models.layers import gated_mlp, rms_norm
from mini_engine.policy import admit, fuse, preempt
from mini_engine.rope import apply_rope
from mini_engine.sampling import sample


@dataclass(frozen=True)
class Parts:
    """One field for each replaceable part. The default of each is its specification.

    Attributes:
        masked_attention: attention of one sequence under a mask (chapter 01).
        apply_rope: rotary position embedding (chapter 01).
        merge_states: merges two attention states (chapter 02).
        rms_norm: RMSNorm (chapter 03).
        gated_mlp: gated feed-forward network (chapter 03).
        gpt2_weights: names and layout of GPT-2's checkpoint tensors (chapter 03).
        append_kv: stores keys and values in the cache (chapter 04).
        sample: from logits to tokens (chapter 04).
        mask_mod: which keys a layer's queries see (chapter 05).
        classify_blocks: which blocks of keys are visited, and which need no mask (chapter 05).
        page_table: which page holds which tokens (chapter 06).
        physical_blocks: block numbers, from logical to physical (chapter 06).
        physical_mask: a mask over positions as one over the pool (chapter 06).
        fuse: shares out a step's tokens among decodes and prompts (chapter 07).
        admit: how many of the waiting come in (chapter 07).
        preempt: sends the newest sequence back to wait (chapter 07).
        share_prefix: lets a sequence begin with another's pages (chapter 07).
        copy_on_write: own pages where a sequence writes (chapter 07).
        evict_pages: gives up pages behind a sliding window (chapter 07).
    """

    masked_attention: Callable = sdpa_attention
    apply_rope: Callable = apply_rope
    merge_states: Callable = merge_states
    rms_norm: Callable = rms_norm
    gated_mlp: Callable = gated_mlp
    gpt2_weights: Callable = gpt2_weights
    append_kv: Callable = append_kv
    sample: Callable = sample
    mask_mod: Callable = visible
    classify_blocks: Callable = classify_blocks
    page_table: type[PageTable] = PageTable
    physical_blocks: Callable = physical_blocks
    physical_mask: Callable = physical_mask
    fuse: Callable = fuse
    admit: Callable = admit
    preempt: Callable = preempt
    share_prefix: Callable = share_prefix
    copy_on_write: Callable = copy_on_write
    evict_pages: Callable = evict_pages
