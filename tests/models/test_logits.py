"""Logits are those of transformers, for every family, every variant, and sequences packed side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.attention.spec import AttentionSpec
from mini_engine.models import gemma3, llama
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import gated_mlp, rms_norm
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from mini_engine.rope import Linear, RopeConfig, rope_tables
from tests.models.families import FAMILIES, our_model, their_logits, transformers_config, transformers_model, whole

TOLERANCE = 1e-4
SEQUENCES = [[3, 4, 5, 60, 7, 8, 9, 10, 11, 12, 0], [1], [5, 6, 7, 8] * 5]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
YARN |= {"original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"head_dim": 12}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rms_norm_eps": 0.1}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 100.0}}),
    ("mistral", {"sliding_window": None, "head_dim": 12}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": True}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    ("qwen3_moe", {"num_experts_per_tok": 6, "hidden_act": "gelu"}),
    ("gemma2", {"tie_word_embeddings": True}),
    ("gemma2", {"sliding_window": 1}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("gemma3_text", {"tie_word_embeddings": True, "attention_bias": True}),
    ("gemma3_text", {"final_logit_softcapping": 1.5}),
    ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    ("gemma3_text", {"layer_types": ["full_attention"] * 3, "rope_scaling": LLAMA3}),
    ("deepseek_v2", {"first_k_dense_replace": 3}),
    ("deepseek_v2", {"first_k_dense_replace": 0, "routed_scaling_factor": 2.5}),
    ("deepseek_v2", {"q_lora_rank": 20}),
    ("deepseek_v2", {"tie_word_embeddings": True, "v_head_dim": 20}),
    ("deepseek_v2", {"q_lora_rank": 20, "rms_norm_eps": 0.1}),
    ("deepseek_v2", {"rope_parameters": YARN}),
    ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 1.3}}),
    ("deepseek_v2", {"rope_parameters": {**YARN, "mscale": 0, "mscale_all_dim": 0}}),
    ("deepseek_v2", {"rope_parameters": {**YARN, "beta_fast": 4.0, "beta_slow": 0.1, "rope_theta": 100.0}}),
    ("gpt2", {"tie_word_embeddings": True}),
    ("gpt2", {"n_inner": 40, "activation_function": "relu"}),
    ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
]


def assert_equal_logits(theirs: Any, sequences: list[list[int]]) -> None:
    for logits, tokens in zip(whole(our_model(theirs), sequences), sequences, strict=True):
        torch.testing.assert_close(logits, their_logits(theirs, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family, changes", [(family, {}) for family in FAMILIES if family != "llama"] + VARIANTS)
def test_packed_sequences_have_the_logits_of_transformers(family: str, changes: dict[str, Any]) -> None:
    assert_equal_logits(transformers_model(family, **changes), SEQUENCES)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)), seed=st.integers(0, 99))
def test_random_shapes_have_the_logits_of_transformers(data: st.DataObject, family: str, seed: int) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    kv_heads, group, head_dim = draw(1, 3), draw(1, 3), 2 * draw(1, 6)
    tied = data.draw(st.booleans())
    changes: dict[str, Any] = {"vocab_size": draw(5, 40), "tie_word_embeddings": tied}
    if family == "gpt2":
        changes |= {"n_head": kv_heads, "n_embd": kv_heads * head_dim, "n_layer": draw(1, 3), "n_inner": draw(1, 30)}
    elif family == "deepseek_v2":
        heads = kv_heads * group
        changes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * draw(1, 8)}
        # transformers wants the rotated parts at an even offset.
        changes |= {"kv_lora_rank": 2 * draw(1, 15), "q_lora_rank": data.draw(st.none() | st.integers(1, 30))}
        changes |= {"qk_nope_head_dim": 2 * draw(1, 6), "qk_rope_head_dim": head_dim}
        changes |= {"v_head_dim": draw(1, changes["qk_nope_head_dim"] + head_dim), "intermediate_size": draw(1, 30)}
        changes |= {"num_hidden_layers": draw(1, 3)}
    else:
        # transformers wants a hidden size that its heads divide, even where head_dim is given.
        changes |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        changes |= {"hidden_size": kv_heads * group * draw(1, 8), "intermediate_size": draw(1, 30)}
        changes |= {"num_hidden_layers": draw(1, 3), "attention_bias": data.draw(st.booleans())}
    if family.startswith("gemma"):
        changes |= {"sliding_window": draw(1, 9), "query_pre_attn_scalar": draw(1, 40)}
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    tokens = torch.randint(changes["vocab_size"], (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    theirs = transformers_model(family, seed, **changes)
    assert_equal_logits(theirs, [part.tolist() for part in tokens.split(lengths)])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_keeps_its_dtype_and_stays_close_to_float32(family: str) -> None:
    theirs = transformers_model(family, tie_word_embeddings=True)
    exact = whole(our_model(theirs), SEQUENCES)
    model = our_model(theirs.to(torch.bfloat16))
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    for logits, reference in zip(whole(model, SEQUENCES), exact, strict=True):
        assert logits.dtype == torch.float32
        # bfloat16 has 8 significant bits: each rounding is off by up to 0.4 percent, and there are a few dozen.
        assert (logits - reference).norm() < 0.05 * reference.norm()


@pytest.mark.parametrize("family, norms_in_a_layer", [("gemma2", 4), ("gemma3_text", 6)])
def test_gemma_adds_its_one_to_the_norm_before_rounding(family: str, norms_in_a_layer: int) -> None:
    """In bfloat16, 1 + 0.003 is 1: the norms must be kept in float32."""
    theirs = transformers_model(family)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if name.endswith("norm.weight"):
                weight.fill_(0.003)
    model = our_model(theirs.to(torch.bfloat16))
    norms = [weight for name, weight in model.destinations().items() if name.endswith("norm.weight")]
    assert len(norms) == norms_in_a_layer * 3 + 1
    for weight in norms:
        torch.testing.assert_close(weight, torch.full(weight.shape, 1.003), rtol=0, atol=1e-4)


def test_attention_is_described_by_the_specs() -> None:
    config = ModelConfig.from_hf(transformers_config("gemma2", attn_logit_softcapping=2.0).to_dict())
    model = build_model(config, Parts(), torch.float32, "cpu")
    common = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "scale": 24**-0.5, "softcap": 2.0}
    common["rope"] = RopeConfig(theta=10000.0, head_dim=16)
    assert model.attention_specs == (
        AttentionSpec(layer=0, window=5, **common),
        AttentionSpec(layer=1, window=None, **common),
        AttentionSpec(layer=2, window=5, **common),
    )


def test_the_layers_of_gemma3_have_the_rotation_of_their_type() -> None:
    model = our_model(transformers_model("gemma3_text"))
    local, everywhere = RopeConfig(5.0, head_dim=16), RopeConfig(50.0, head_dim=16, scaling=Linear(4.0))
    assert [(spec.window, spec.rope) for spec in model.attention_specs] == [(5, local), (5, local), (None, everywhere)]


@pytest.mark.parametrize("family, num_rotations", [("llama", 1), ("gemma2", 1), ("gemma3_text", 2)])
def test_cosines_are_computed_once_per_step_for_each_rotation(
    family: str, num_rotations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = our_model(transformers_model(family)), []
    for module in (llama, gemma3):
        monkeypatch.setattr(module, "rope_tables", lambda *args: calls.append(args) or rope_tables(*args))
    whole(model, SEQUENCES)
    assert len(calls) == num_rotations < len(model.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rms_norm_equals_its_formula(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 8, dtype=dtype), torch.randn(8, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    exact = x.to(wide) / (x.to(wide).square().mean(-1, keepdim=True) + 0.5).sqrt() * weight.to(wide)
    normed = rms_norm(x, weight, 0.5)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, exact.to(dtype))


def test_gated_mlp_equals_three_separate_products() -> None:
    x, gate, up, down = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)
    ours = gated_mlp(x, lambda x: x @ torch.cat((gate, up)).T, lambda inner: inner @ down.T, torch.sigmoid)
    torch.testing.assert_close(ours, (torch.sigmoid(x @ gate.T) * (x @ up.T)) @ down.T)
