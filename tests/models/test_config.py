"""Reading config.json: transformers' own defaults are the oracle, and junk gets a typed error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.errors import ModelLoadError
from mini_engine.models.config import ModelConfig
from mini_engine.models.registry import FAMILIES as BUILDERS
from mini_engine.rope import Linear, Llama3, RopeConfig
from tests.models.families import FAMILIES, SMALL, transformers_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def minimal(family: str, **changes: Any) -> dict[str, Any]:
    return FAMILIES[family] | {"model_type": family} | changes


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_are_left_out_are_those_of_transformers(family: str) -> None:
    theirs = ModelConfig.from_hf(transformers_config(family).to_dict())
    assert replace(ModelConfig.from_hf(minimal(family)), eos_token_ids=theirs.eos_token_ids) == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_may_state_the_sizes_alone(family: str) -> None:
    """Everything else is as in transformers' configuration without any arguments."""
    full = type(transformers_config(family))().to_dict()
    if family == "deepseek_v2":  # it has no default for how many of its experts compute a token
        full["num_experts_per_tok"] = 6
    sizes = ["n_embd", "n_layer", "n_head", "n_positions", "vocab_size"]
    if family != "gpt2":
        sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        sizes += ["max_position_embeddings", "vocab_size"] + ["num_experts_per_tok"] * (family == "deepseek_v2")
    stated = {"model_type": family} | {name: full[name] for name in sizes}
    if family == "qwen3":
        stated |= {"sliding_window": None}  # as in the files of released models
    assert ModelConfig.from_hf(stated) == ModelConfig.from_hf(full | {"eos_token_id": None})


@pytest.mark.parametrize(
    "rope_type, old, scaling",
    [
        ("default", None, None),
        ("linear", {"type": "linear", "factor": 4}, Linear(4.0)),
        ("llama3", {"rope_type": "llama3", **LLAMA3}, Llama3(8.0, 1.0, 4.0, 32)),
    ],
)
def test_old_and_new_files_give_the_same_rope(
    rope_type: str, old: dict[str, Any] | None, scaling: Linear | Llama3 | None
) -> None:
    new = {**(old or {}), "rope_type": rope_type, "rope_theta": 500000}
    from_old = ModelConfig.from_hf(minimal("llama", rope_theta=500000, rope_scaling=old))
    from_new = ModelConfig.from_hf(minimal("llama", rope_parameters=new))
    assert from_old.rope == from_new.rope == RopeConfig(500000.0, 8, scaling)


def test_llama3_scaling_without_a_length_means_the_longest_sequence() -> None:
    rope = {
        "rope_type": "llama3",
        **LLAMA3,
    }
    del rope["original_max_position_embeddings"]
    config = ModelConfig.from_hf(minimal("llama", rope_scaling=rope))
    assert config.rope is not None
    assert config.rope.scaling == Llama3(8.0, 1.0, 4.0, FAMILIES["llama"]["max_position_embeddings"])


FULL, SLIDING = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}, {"rope_type": "default", "rope_theta": 3e4}
OLD = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize(
    "stated",
    [
        OLD | {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": SLIDING}},
        {"rope_parameters": {"full_attention": FULL}, "rope_local_base_freq": 3e4},
        OLD | {"rope_parameters": {"sliding_attention": SLIDING}},
    ],
    ids=["old", "new", "full in the new form", "sliding in the new form"],
)
def test_old_and_new_files_of_gemma3_give_the_same_two_ropes(stated: dict[str, Any]) -> None:
    sizes = SMALL | {"model_type": "gemma3_text", "head_dim": 16}
    config = ModelConfig.from_hf(sizes | stated)
    assert config.rope == RopeConfig(2e6, 16, Linear(8.0)) and config.rope_local == RopeConfig(3e4, 16)
    assert config == ModelConfig.from_hf(transformers.Gemma3TextConfig(**sizes | OLD, eos_token_id=None).to_dict())


def test_gemma3_has_a_full_layer_at_the_end_of_each_period() -> None:
    kinds = ModelConfig.from_hf(SMALL | {"model_type": "gemma3_text", "num_hidden_layers": 13}).layer_types
    assert [layer for layer, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11]


def test_mistral_has_its_window_in_all_layers_or_none() -> None:
    assert ModelConfig.from_hf(minimal("mistral")).layer_types == ("sliding_attention",) * 3
    config = ModelConfig.from_hf(minimal("mistral", sliding_window=None, layer_types=["full_attention"] * 3))
    assert config.layer_types == ("full_attention",) * 3 and config.sliding_window is None


@pytest.mark.parametrize("stated", [None, False, True])
def test_the_biases_of_qwen2_and_mistral_depend_on_no_file(stated: bool | None) -> None:
    assert ModelConfig.from_hf(minimal("qwen2", attention_bias=stated)).attention_bias
    assert not ModelConfig.from_hf(minimal("mistral", attention_bias=stated)).attention_bias


def test_gemma2_alternates_windows_and_null_switches_its_soft_caps_off() -> None:
    config = ModelConfig.from_hf(minimal("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert config.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
    assert config.attn_logit_softcapping is None and config.final_logit_softcapping is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_slides_only_where_it_is_switched_on(family: str) -> None:
    windows = {"sliding_window": 7, "max_window_layers": 2}
    assert ModelConfig.from_hf(minimal(family, **windows)).sliding_window is None
    config = ModelConfig.from_hf(minimal(family, **windows, use_sliding_window=True))
    assert config.sliding_window == 7
    assert config.layer_types == ("full_attention", "full_attention", "sliding_attention")


@pytest.mark.parametrize("given, ids", [(None, ()), (2, (2,)), ([1, 107], (1, 107))])
def test_end_tokens_are_one_or_many(given: object, ids: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(minimal("llama", eos_token_id=given)).eos_token_ids == ids


def test_every_architecture_that_is_read_is_built() -> None:
    read = {ModelConfig.from_hf(minimal(family)).architecture for family in FAMILIES}
    assert read == set(BUILDERS)


BAD = [
    ("llama", {"model_type": "mamba"}, "unknown architecture 'mamba'.*LlamaForCausalLM"),
    ("llama", {"model_type": None}, "unknown architecture"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("gemma3_text", {"model_type": "gemma3"}, "Gemma 3 with images.*gemma-3-1b-it.*Inference"),
    ("gemma3_text", {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma 3 with images"),
    ("llama", {"hidden_size": None}, "hidden_size"),
    ("llama", {"hidden_size": 0}, "hidden_size = 0"),
    ("llama", {"hidden_size": -32}, "hidden_size = -32"),
    ("llama", {"hidden_size": 2**40}, "hidden_size = .* from 1 to"),
    ("llama", {"hidden_size": "32"}, "hidden_size.*32"),
    ("llama", {"hidden_size": True}, "hidden_size.*True"),
    ("llama", {"hidden_size": 33}, "multiple"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("llama", {"num_key_value_heads": 3}, "must divide 4 query heads"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads = 0"),
    ("llama", {"vocab_size": 0}, "vocab_size = 0"),
    ("llama", {"head_dim": 0}, "head_dim = 0"),
    ("llama", {"head_dim": 7}, "even"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    ("llama", {"hidden_act": "sine"}, "hidden_act = 'sine'.*silu"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("llama", {"rms_norm_eps": 0.0}, "norm_eps = 0.0"),
    ("llama", {"rms_norm_eps": float("nan")}, "norm_eps = nan"),
    ("llama", {"rms_norm_eps": 10**400}, "norm_eps"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("llama", {"eos_token_id": 2**63}, "eos_token_id"),
    ("llama", {"rope_theta": -1.0}, "rope_theta = -1.0"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta = inf"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'.*default, linear or llama3"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0"),
    ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor"),
    ("llama", {"rope_scaling": [1, 2]}, "rope_parameters"),
    (
        "qwen3",
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "write these",
    ),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "every layer alike"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": "full_attention"}, "layer_types"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window = None"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window = None"),
    ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types.*all layers of Mistral have the window, or none"),
    ("gemma3_text", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "rope_type = 'dynamic'"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "two rotations.*full_attention"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_scaling.*write these"),
    ("gemma3_text", {"rope_parameters": [1]}, "two rotations"),
    ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "rope_parameters"),
    ("gemma3_text", {"rope_local_base_freq": 0}, "rope_theta = 0"),
    ("gemma3_text", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0.*set it to null"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window = None"),
    ("gemma2", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
    ("gemma2", {"sliding_window": 0}, "sliding_window = 0"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping = 0.0"),
    ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar = -1"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("deepseek_v2", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
    ("deepseek_v2", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7: a token cannot have more than all 6 experts"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy'.*must be greedy"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True: DeepSeek-V2 has False"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': DeepSeek-V2 has softmax"),
    ("deepseek_v2", {"n_shared_experts": None}, "n_shared_experts"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads = 2: it must be 4, the number of query heads"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias = True"),
    ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
    ("deepseek_v2", {"q_lora_rank": "all"}, "q_lora_rank = 'all'"),
    ("deepseek_v2", {"v_head_dim": 21}, "v_head_dim = 21: it must be at most qk_nope_head_dim"),
    ("deepseek_v2", {"qk_rope_head_dim": 7, "v_head_dim": 4}, "even"),
    ("deepseek_v2", {"rope_scaling": {"type": "dynamic"}}, "rope_type = 'dynamic'.*default, linear, llama3 or yarn"),
    ("deepseek_v2", {"rope_scaling": {"type": "yarn"}}, "factor = None"),
    ("deepseek_v2", {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1}}, "beta_slow = 1.0"),
    (
        "deepseek_v2",
        {"rope_scaling": {"type": "yarn", "factor": 4, "truncate": False}},
        "attention_factor and truncate",
    ),
    ("deepseek_v2", {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4}}, "rope_theta = 1.0.*above 1"),
    ("gpt2", {"n_embd": 30}, "multiple of 4 heads"),
    ("gpt2", {"n_layer": None}, "num_hidden_layers = None"),
    ("gpt2", {"n_positions": -1}, "max_position_embeddings = -1"),
    ("gpt2", {"n_inner": 0}, "intermediate_size = 0"),
    ("gpt2", {"activation_function": "mish"}, "mish"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
]


@pytest.mark.parametrize("family, change, message", BAD)
def test_impossible_values_are_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_hf(minimal(family, **change))


def test_a_file_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="list"):
        ModelConfig.from_hf([1])


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_junk_in_any_value_is_read_or_refused_and_nothing_else(data: st.DataObject, family: str) -> None:
    hf = transformers_config(family).to_dict()
    inner = hf["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}
    if family == "gemma3_text":
        hf["rope_parameters"] = {"full_attention": inner, "sliding_attention": data.draw(st.just({}) | JUNK)}
    where = data.draw(st.sampled_from([hf, inner]))
    others = ["architectures", "rope_theta", "rope_scaling", "partial_rotary_factor", "mlp_bias", "layer_types"]
    others += ["rope_local_base_freq", "sliding_window_pattern"]
    for name in data.draw(st.lists(st.sampled_from(sorted(where) + others), min_size=1, max_size=3)):
        where[name] = data.draw(JUNK)
    try:
        config = ModelConfig.from_hf(hf)
    except ModelLoadError:
        return
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.hidden_size > 0 and len(config.layer_types) == config.num_hidden_layers
