"""Read a model's shape from its `config.json`, and check it before any memory is allocated.

The rest of the engine uses one `ModelConfig`, whose fields have transformers' names. Values that the file leaves out
get the defaults of transformers' configuration class, which would take three seconds to import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mini_engine.attention.spec import MLASizes
from mini_engine.errors import ModelLoadError
from mini_engine.quantization import Format
from mini_engine.rope import Linear, Llama3, RopeConfig, Yarn

_gelu_tanh = partial(F.gelu, approximate="tanh")

# Activation functions by their names in a config.json.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}

_UNSUPPORTED = {
    "mlp_bias": "use a model whose MLP has no biases",
    "use_bidirectional_attention": "use a causal model",
    "add_cross_attention": "use a decoder-only model",
}

# The values to read for each family, with transformers' defaults. None: the file must state the value, or it follows
# from others.
_COMMON = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))
_COMMON |= dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings"))
_LLAMA = _COMMON | {"hidden_act": "silu", "norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False}
_MISTRAL = _LLAMA | {"num_key_value_heads": 8}
_QWEN2 = _LLAMA | {"num_key_value_heads": 32, "attention_bias": True}
_QWEN3 = _LLAMA | {"num_key_value_heads": 32, "head_dim": 128}
_QWEN3_MOE = _LLAMA | {"num_key_value_heads": 4}
_GEMMA2 = _LLAMA | {"num_key_value_heads": 4, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_DEEPSEEK_V2 = _LLAMA | {"q_lora_rank": 1536}
_GPT2 = _COMMON | {"hidden_act": "gelu_new", "norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": True}
_GPT2 |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}

# Our names of values that have another name in a family's file. None: the family's files do not state the value.
_NORM = {"norm_eps": "rms_norm_eps"}
_OF_GEMMA = _NORM | {"hidden_act": "hidden_activation"}
_FIXED_BIAS = _NORM | {"attention_bias": None}
_OF_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": None, "mscale_all_dim": None}
_OF_DEEPSEEK = _FIXED_BIAS | {"head_dim": None, "num_key_value_heads": None}
_OF_GPT2 = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
_OF_GPT2 |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
_OF_GPT2 |= {"hidden_act": "activation_function", "norm_eps": "layer_norm_epsilon"}

# For each architecture: its model type, the values to read, and the names that differ.
_FAMILIES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, str | None]]] = {
    "LlamaForCausalLM": ("llama", _LLAMA, _NORM),
    "MistralForCausalLM": ("mistral", _MISTRAL, _FIXED_BIAS),
    "Qwen2ForCausalLM": ("qwen2", _QWEN2, _FIXED_BIAS),
    "Qwen3ForCausalLM": ("qwen3", _QWEN3, _NORM),
    "Qwen3MoeForCausalLM": ("qwen3_moe", _QWEN3_MOE, _NORM),
    "Gemma2ForCausalLM": ("gemma2", _GEMMA2, _OF_GEMMA),
    "Gemma3ForCausalLM": ("gemma3_text", _GEMMA3, _OF_GEMMA),
    "DeepseekV2ForCausalLM": ("deepseek_v2", _DEEPSEEK_V2, _OF_DEEPSEEK),
    "GPT2LMHeadModel": ("gpt2", _GPT2, _OF_GPT2),
}

# The checks of each value. The largest sizes are several times those of any released model.
_LARGEST = {"vocab_size": 2**22, "hidden_size": 2**17, "intermediate_size": 2**20, "head_dim": 2**12}
_LARGEST |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2**10)
_LARGEST |= dict.fromkeys(("q_lora_rank", *(field.name for field in fields(MLASizes))), 2**16)
_LARGEST |= dict.fromkeys(("max_position_embeddings", "sliding_window", "original_max_position_embeddings"), 2**30)
_LARGEST |= {"num_experts": 2**10, "num_experts_per_tok": 2**10, "moe_intermediate_size": 2**20}
_NUMBERS = {"norm_eps", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
_NUMBERS |= {"rope_theta", "factor", "low_freq_factor", "high_freq_factor"}
_NUMBERS |= {"routed_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_FLAGS = {"tie_word_embeddings", "attention_bias", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"}
_FLAGS |= {"norm_topk_prob"}
_MAY_BE_NONE = {"attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank", "mscale", "mscale_all_dim"}


@dataclass(frozen=True)
class ModelLimits:
    """The limits of a model that the engine needs to know.

    Attributes:
        vocab_size: vocabulary size in tokens.
        max_position_embeddings: longest sequence, in tokens.
    """

    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts of a model's sparse layers.

    Attributes:
        num_experts: experts of a layer.
        num_experts_per_tok: experts that compute a token.
        moe_intermediate_size: width inside an expert.
        norm_topk_prob: divide the weights of a token's experts by their sum.
        routed_scaling_factor: multiplies these weights.
        sparse_layers: the layers that have experts; the others have a dense MLP.
        shared_intermediate_size: width inside the experts that compute every token, all together; 0: there are none.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    sparse_layers: frozenset[int]
    shared_intermediate_size: int = 0


@dataclass(frozen=True)
class ModelConfig(ModelLimits):
    """The shape of a model.

    Attributes:
        architecture: the class of the model in transformers, such as `LlamaForCausalLM`.
        hidden_size: width of a token's vector between layers.
        intermediate_size: width inside the MLP; for a mixture of experts, that of its dense layers.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: KV heads of a layer; divides `num_attention_heads`.
        head_dim: size of one head.
        hidden_act: name of the MLP's activation function, a key of `ACTIVATIONS`.
        norm_eps: added to the variance in each norm.
        tie_word_embeddings: the LM head is the embedding matrix.
        layer_types: for each layer, `full_attention` or `sliding_attention`.
        sliding_window: keys that a query of a sliding layer sees, its own included.
        rope: rotation of queries and keys by position; None if positions are learned.
        rope_local: Gemma 3's rotation in sliding layers; None: `rope`, as in full layers.
        attention_bias: the attention's projections have biases.
        mla: DeepSeek-V2's sizes of latent attention, in which `head_dim` is the size of queries and keys.
        q_lora_rank: DeepSeek-V2's size of the latent from which queries are computed; None: they have none.
        query_pre_attn_scalar: Gemma divides the scores by its square root.
        attn_logit_softcapping: Gemma 2's soft-cap on the scores.
        final_logit_softcapping: Gemma's soft-cap on the logits.
        scale_attn_weights: GPT-2 divides the scores by the square root of `head_dim`.
        scale_attn_by_inverse_layer_idx: GPT-2 also divides the scores of layer i by i + 1.
        moe: the mixture of experts; None: every layer is dense.
        eos_token_ids: the tokens that end a text.
        formats: the formats of quantized matrices, by the names of their modules; the others are not quantized.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rope: RopeConfig | None = None
    rope_local: RopeConfig | None = None
    attention_bias: bool = False
    mla: MLASizes | None = None
    q_lora_rank: int | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    moe: MoEConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    formats: Mapping[str, Format] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, hf: object) -> ModelConfig:
        """Read and check the contents of a `config.json`, as written by transformers 5 or an older version.

        Args:
            hf: the parsed JSON, which must be an object.

        Raises:
            ModelLoadError: for an unknown architecture, a value of the wrong type or out of range, or an option that
                this engine does not implement.
        """
        if not isinstance(hf, Mapping):
            raise ModelLoadError(f"config.json holds a {type(hf).__name__}, not an object: is it the right file?")
        architecture = _architecture(hf)
        for option, remedy in _UNSUPPORTED.items():
            if hf.get(option) not in (None, False):
                raise ModelLoadError(f"config.json sets {option}, which this engine does not implement: {remedy}")
        model_type, defaults, names = _FAMILIES[architecture]
        keys = {name: names.get(name, name) for name in defaults}
        values = {name: hf.get(key, defaults[name]) if key else defaults[name] for name, key in keys.items()}
        hidden, heads, layers = (
            _checked(name, values[name]) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        if model_type == "deepseek_v2":
            values["mla"] = mla = _latents(hf, heads)
            values["moe"] = _moe_of_deepseek(hf, layers)
            values["head_dim"] = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        if values["head_dim"] is None and hidden % heads:
            raise _bad("hidden_size", hidden, f"it must be a multiple of {heads} heads")
        derived = {"head_dim": hidden // heads, "num_key_value_heads": heads}
        if model_type == "gpt2":
            derived["intermediate_size"] = 4 * hidden
        values |= {name: value for name, value in derived.items() if values[name] is None}
        values = {name: _checked(name, value) for name, value in values.items()}
        if heads % values["num_key_value_heads"]:
            raise _bad("num_key_value_heads", values["num_key_value_heads"], f"it must divide {heads} query heads")
        sizes = values["head_dim"], values["max_position_embeddings"]
        if model_type == "gemma3_text":
            if (cap := values["attn_logit_softcapping"]) is not None:
                raise _bad("attn_logit_softcapping", cap, "Gemma 3 caps no scores: set it to null")
            values["rope"], values["rope_local"] = (_rope(own, *sizes) for own in _ropes_of_gemma3(hf))
        elif model_type == "deepseek_v2":
            values["rope"] = _rope(hf, mla.qk_rope_head_dim, sizes[1], has_yarn=True)
        elif model_type != "gpt2":
            values["rope"] = _rope(hf, *sizes)
        if model_type == "qwen3_moe":
            values["moe"] = _moe_of_qwen3(hf, layers)
        types, window = _windows(hf, model_type, layers)
        end = token_ids(hf.get("eos_token_id"))
        return cls(architecture=architecture, layer_types=types, sliding_window=window, eos_token_ids=end, **values)


def token_ids(value: object) -> tuple[int, ...]:
    """Return the end tokens that a configuration states: none, one or several.

    Raises:
        ModelLoadError: if the value is anything but token ids.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id < 2**63 for token_id in ids):
        raise _bad("eos_token_id", value, "give token ids")
    return tuple(ids)


def _bad(name: str, value: object, remedy: str) -> ModelLoadError:
    return ModelLoadError(f"the model's configuration has {name} = {repr(value)[:80]}: {remedy}")


def _checked(name: str, value: Any) -> Any:
    """Check a value and return it; a value of `_NUMBERS` is returned as a float.

    Raises:
        ModelLoadError: if no model can have this value.
    """
    if value is None and name in _MAY_BE_NONE:
        return None
    if name in _LARGEST and (type(value) is not int or not 1 <= value <= _LARGEST[name]):
        raise _bad(name, value, f"it must be a whole number from 1 to {_LARGEST[name]}")
    if name in _NUMBERS and (type(value) not in (int, float) or not 0 < value <= sys.float_info.max):
        raise _bad(name, value, "it must be a finite number above 0")
    if name in _FLAGS and type(value) is not bool:
        raise _bad(name, value, "it must be true or false")
    if name == "hidden_act" and value not in list(ACTIVATIONS):
        raise _bad(name, value, f"it must be one of {', '.join(ACTIVATIONS)}")
    return float(value) if name in _NUMBERS else value


def _architecture(hf: Mapping[str, Any]) -> str:
    """Return the class named in the file; a configuration that was never saved with a model has only a model type."""
    named, model_type = hf.get("architectures"), str(hf.get("model_type"))
    by_type = {known: architecture for architecture, (known, _, _) in _FAMILIES.items()}
    architecture = str(named[0]) if isinstance(named, list) and named else by_type.get(model_type, model_type)
    if architecture not in _FAMILIES:
        by_transformers = "with AutoModelForCausalLM of transformers and give it to Inference(model, tokenizer)"
        if architecture in ("gemma3", "Gemma3ForConditionalGeneration"):
            raise ModelLoadError(
                f"{architecture} is Gemma 3 with images, which LLM does not compute: use a model without them, such as "
                f"google/gemma-3-1b-it, or load this one {by_transformers}, which runs it on text"
            )
        raise ModelLoadError(
            f"unknown architecture {architecture[:80]!r}: LLM runs {', '.join(_FAMILIES)}; for other causal language "
            f"models, load one {by_transformers}"
        )
    return architecture


def _windows(hf: Mapping[str, Any], model_type: str, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Return the layers' types, and the window of the sliding ones.

    Without `layer_types` they are every other layer of Gemma 2, five of six of Gemma 3, the last layers of Qwen2 and
    Qwen3, and all layers of Mistral and of Qwen3's mixture of experts.
    """
    sliding: Container[int] = ()
    window, types = hf.get("sliding_window", 4096), hf.get("layer_types")
    match model_type:
        case "qwen2" | "qwen3":
            first = _whole(hf, "max_window_layers", 28, at_least=0)
            window, sliding = (window, range(first, layers)) if hf.get("use_sliding_window") else (None, ())
        case "qwen3_moe":
            window, sliding = (window, range(layers)) if hf.get("use_sliding_window") else (None, ())
            types = None  # transformers does not read them
        case "gemma2":
            sliding = range(0, layers, 2)
        case "gemma3_text":
            period = _whole(hf, "sliding_window_pattern", 6, at_least=1)
            sliding = set(range(layers)) - set(range(period - 1, layers, period))
        case "mistral":
            sliding = () if window is None else range(layers)
            if types not in (None, ["full_attention"] * layers if window is None else ["sliding_attention"] * layers):
                raise _bad("layer_types", types, "all layers of Mistral have the window, or none: remove layer_types")
        case _:
            return ("full_attention",) * layers, None
    if types is None:
        types = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise _bad("layer_types", types, f"it must be a list that names all {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise _bad("layer_types", kind, "it must be full_attention or sliding_attention")
    return tuple(types), _checked("sliding_window", window) if "sliding_attention" in types else None


def _whole(hf: Mapping[str, Any], name: str, default: int, at_least: int) -> int:
    value = hf.get(name, default)
    if type(value) is not int or value < at_least:
        raise _bad(name, value, f"it must be a whole number, {at_least} or more")
    return value


def _moe_of_qwen3(hf: Mapping[str, Any], layers: int) -> MoEConfig:
    """Return the experts of a model of Qwen3's kind; values that the file leaves out are transformers' defaults."""
    experts = hf.get("num_experts", hf.get("num_local_experts", 128))  # the name depends on transformers' version
    values = {
        "num_experts": experts,
        "num_experts_per_tok": hf.get("num_experts_per_tok", 8),
        "moe_intermediate_size": hf.get("moe_intermediate_size", 768),
        "norm_topk_prob": hf.get("norm_topk_prob", False),
    }
    values = {name: _checked(name, value) for name, value in values.items()}
    if (chosen := values["num_experts_per_tok"]) > experts:
        raise _bad("num_experts_per_tok", chosen, f"a token cannot have more than all {experts} experts")
    step, dense = _whole(hf, "decoder_sparse_step", 1, at_least=1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise _bad("mlp_only_layers", dense, "it must be a list of layers")
    sparse = frozenset(range(step - 1, layers, step)) - set(dense)
    return MoEConfig(**values, routed_scaling_factor=1.0, sparse_layers=sparse)


def _latents(hf: Mapping[str, Any], heads: int) -> MLASizes:
    """Read the sizes of DeepSeek-V2's attention.

    Raises:
        ModelLoadError: for a size that no model can have, biases, or KV heads.
    """
    defaults = MLASizes(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    sizes = MLASizes(**{name: _checked(name, hf.get(name, value)) for name, value in vars(defaults).items()})
    if sizes.v_head_dim > sizes.qk_nope_head_dim + sizes.qk_rope_head_dim:
        raise _bad("v_head_dim", sizes.v_head_dim, "it must be at most qk_nope_head_dim + qk_rope_head_dim")
    if hf.get("attention_bias"):
        raise _bad("attention_bias", hf["attention_bias"], "use a DeepSeek-V2 without biases")
    if (kv_heads := hf.get("num_key_value_heads")) not in (None, heads):
        raise _bad("num_key_value_heads", kv_heads, f"it must be {heads}, the number of query heads")
    return sizes


def _moe_of_deepseek(hf: Mapping[str, Any], layers: int) -> MoEConfig | None:
    """Return the experts of DeepSeek-V2, which all layers after the first few have.

    Raises:
        ModelLoadError: for values that no model can have, or another choice of experts than those of DeepSeek-V2-Lite.
    """
    dense = _whole(hf, "first_k_dense_replace", 0, at_least=0)
    if dense >= layers:
        return None
    experts = hf.get("n_routed_experts", hf.get("num_experts", 64))  # the name depends on transformers' version
    names = {"num_experts": experts, "num_experts_per_tok": hf.get("num_experts_per_tok")}
    names |= {"moe_intermediate_size": hf.get("moe_intermediate_size", 1407)}
    names |= {"routed_scaling_factor": hf.get("routed_scaling_factor", 1.0)}
    values = {name: _checked(name, value) for name, value in names.items()}
    if (chosen := values["num_experts_per_tok"]) > experts:
        raise _bad("num_experts_per_tok", chosen, f"a token cannot have more than all {experts} experts")
    if (method := hf.get("topk_method", "greedy")) != "greedy":
        raise _bad("topk_method", method, "experts are chosen from all of a layer, so it must be greedy")
    for name, only in (("norm_topk_prob", False), ("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        if (value := hf.get(name, only)) != only:
            raise _bad(name, value, f"DeepSeek-V2 has {only}")
    shared = _whole(hf, "n_shared_experts", 2, at_least=0) * values["moe_intermediate_size"]
    return MoEConfig(
        **values, norm_topk_prob=False, sparse_layers=frozenset(range(dense, layers)), shared_intermediate_size=shared
    )


def _ropes_of_gemma3(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what the files of families with one rotation would state for the full layers, and for the sliding ones."""
    new, names = hf.get("rope_parameters") or {}, ("full_attention", "sliding_attention")
    if not isinstance(new, Mapping) or not new.keys() <= set(names):
        raise _bad("rope_parameters", new, f"Gemma 3 has two rotations: give one set of values for each of {names}")
    full, sliding = ({"rope_parameters": new.get(name)} for name in names)
    thetas = hf.get("rope_theta", 1e6), hf.get("rope_local_base_freq", 1e4)
    return {**hf, **full, "rope_theta": thetas[0]}, {**hf, **sliding, "rope_theta": thetas[1], "rope_scaling": None}


def _rope(hf: Mapping[str, Any], head_dim: int, longest: int, has_yarn: bool = False) -> RopeConfig:
    """Read `rope_parameters`, or the `rope_theta` and `rope_scaling` of files older than transformers 5.

    Args:
        hf: the parsed file.
        head_dim: components of a head that are rotated.
        longest: the default of `original_max_position_embeddings`.
        has_yarn: whether the family implements YaRN.
    """
    new, old = (hf.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for given in (new, old):
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise _bad("rope_parameters", given, "these families rotate every layer alike: give one set of values")
    if new and any(new.get(name) != value for name, value in old.items()):
        raise _bad("rope_scaling", old, "rope_parameters has other values, and only one can hold: write these into it")
    given = new or old
    if head_dim % 2:
        raise _bad("head_dim", head_dim, "RoPE rotates pairs of a whole head, so it must be even")
    defaults = {"rope_theta": hf.get("rope_theta", 10000.0), "rope_type": given.get("type", "default")}
    given = {**defaults, "original_max_position_embeddings": longest, **given}
    if given.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1):
        raise _bad("partial_rotary_factor", given, "these families rotate whole heads: it must be 1")

    def value(name: str) -> Any:
        return _checked(name, given.get(name))

    scaling: Linear | Llama3 | Yarn | None
    match given["rope_type"]:
        case "default":
            scaling = None
        case "linear":
            scaling = Linear(value("factor"))
        case "llama3":
            scaling = Llama3(**{field.name: value(field.name) for field in fields(Llama3)})
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise _bad("low_freq_factor", scaling.low_freq_factor, "it must be below high_freq_factor")
        case "yarn" if has_yarn:
            # As in transformers, a coefficient of 0 is none, and these have defaults.
            given |= {name: given.get(name) or default for name, default in _OF_YARN.items()}
            scaling = Yarn(**{field.name: value(field.name) for field in fields(Yarn)})
            if scaling.beta_slow >= scaling.beta_fast:
                raise _bad("beta_slow", scaling.beta_slow, "it must be below beta_fast")
            if value("rope_theta") <= 1:
                raise _bad("rope_theta", given["rope_theta"], "it must be above 1 for YaRN")
            if given.get("attention_factor") is not None or given.get("truncate", True) is not True:
                raise _bad("rope_parameters", given, "attention_factor and truncate are not implemented: remove them")
        case kind:
            known = "default, linear, llama3 or yarn" if has_yarn else "default, linear or llama3"
            raise _bad("rope_type", kind, f"it must be {known}")
    return RopeConfig(value("rope_theta"), head_dim, scaling)
