"""The parts of the engine that can be replaced, each a plain function.

The engine is built from one `Parts`, handed to its constructors. Replace a part and the engine runs on yours:
`LLM(parts=replace(Parts(), rms_norm=my_rms_norm))`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mini_engine.attention.naive import sdpa_attention
from mini_engine.attention.state import merge_states
from mini_engine.kv_cache.contiguous import append_kv
from mini_engine.models.gpt2_weights import gpt2_weights
from mini_engine.models.layers import gated_mlp, rms_norm
from mini_engine.rope import apply_rope
from mini_engine.sampling import sample


@dataclass(frozen=True)
class Parts:
    """One function for each replaceable part. The default of each is its specification.

    Attributes:
        masked_attention: attention of one sequence under a mask (chapter 01).
        apply_rope: rotary position embedding (chapter 01).
        merge_states: merges two attention states (chapter 02).
        rms_norm: RMSNorm (chapter 03).
        gated_mlp: gated feed-forward network (chapter 03).
        gpt2_weights: names and layout of GPT-2's checkpoint tensors (chapter 03).
        append_kv: stores keys and values in the cache (chapter 04).
        sample: from logits to tokens (chapter 04).
    """

    masked_attention: Callable = sdpa_attention
    apply_rope: Callable = apply_rope
    merge_states: Callable = merge_states
    rms_norm: Callable = rms_norm
    gated_mlp: Callable = gated_mlp
    gpt2_weights: Callable = gpt2_weights
    append_kv: Callable = append_kv
    sample: Callable = sample
