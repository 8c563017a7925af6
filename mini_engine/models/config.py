"""Read a model's shape from its `config.json`, and check it before any memory is allocated.

transformers' configuration classes supply each family's names, defaults and types. Everything after that sees one
`ModelConfig`, whose fields carry transformers' names.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from mini_engine.errors import ModelLoadError
from mini_engine.rope import Linear, Llama3, RopeConfig

_gelu_tanh = partial(F.gelu, approximate="tanh")

# The names that a config.json gives to the functions.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}

# The largest sizes that are accepted: several times those of any released model.
_LARGEST = {"vocab_size": 2**22, "hidden_size": 2**17, "intermediate_size": 2**20, "head_dim": 2**12}
_LARGEST |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2**10)
_LARGEST |= dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**30)

_NUMBERS = ("norm_eps", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")

# For each architecture, its model type and its configuration class in transformers.
_FAMILIES = {
    "LlamaForCausalLM": ("llama", "LlamaConfig"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3Config"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2Config"),
    "GPT2LMHeadModel": ("gpt2", "GPT2Config"),
}
_UNSUPPORTED = {
    "quantization_config": "use a checkpoint in float32, float16 or bfloat16, or a GGUF file",
    "mlp_bias": "use a model whose MLP has no biases",
    "use_bidirectional_attention": "use a causal model",
    "add_cross_attention": "use a decoder-only model",
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; an instance is always valid.

    Attributes:
        architecture: the class of the model in transformers, such as `LlamaForCausalLM`.
        vocab_size: vocabulary size in tokens.
        hidden_size: width of a token's vector between layers.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: KV heads of a layer; divides `num_attention_heads`.
        head_dim: size of one head.
        max_position_embeddings: longest sequence, in tokens.
        hidden_act: name of the MLP's activation function, a key of `ACTIVATIONS`.
        norm_eps: added to the variance in each norm.
        tie_word_embeddings: the LM head is the embedding matrix.
        layer_types: for each layer, `full_attention` or `sliding_attention`.
        sliding_window: keys that a query of a sliding layer sees, its own included.
        rope: how positions rotate queries and keys; None if positions are learned.
        attention_bias: the attention's projections have biases.
        query_pre_attn_scalar: Gemma 2 divides the scores by its square root.
        attn_logit_softcapping: Gemma 2's soft-cap on the scores.
        final_logit_softcapping: Gemma 2's soft-cap on the logits.
        scale_attn_weights: GPT-2 divides the scores by the square root of `head_dim`.
        scale_attn_by_inverse_layer_idx: GPT-2 also divides the scores of layer i by i + 1.
        eos_token_ids: the tokens that end a text.

    Raises:
        ModelLoadError: for a value that no model can have.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str
    norm_eps: float
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rope: RopeConfig | None = None
    attention_bias: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf: object) -> ModelConfig:
        """Read the contents of a `config.json`, as written by transformers 5 or an older version.

        Args:
            hf: the parsed JSON, which must be an object.

        Raises:
            ModelLoadError: for an unknown architecture, a value of the wrong type or out of range, or an option that
                this engine does not implement.
        """
        if not isinstance(hf, Mapping):
            raise ModelLoadError(f"config.json holds a {type(hf).__name__}, not an object: is it the right file?")
        architecture = _architecture(hf)
        if architecture not in _FAMILIES:
            raise unknown_architecture(architecture)
        for option, remedy in _UNSUPPORTED.items():
            if hf.get(option) not in (None, False):
                raise ModelLoadError(f"config.json sets {option}, which this engine does not implement: {remedy}")
        config = _transformers_config(_FAMILIES[architecture][1], hf)
        values = config.to_dict()
        values |= {
            ours: values[theirs] for ours, theirs in config.attribute_map.items()
        }  # GPT-2: hidden_size is n_embd
        eos = values["eos_token_id"] if hf.get("eos_token_id") is not None else []
        values |= _of_family(values) | {
            "architecture": architecture,
            "eos_token_ids": tuple(eos) if isinstance(eos, list) else (eos,),
        }
        for name in _NUMBERS:
            if values.get(name) is not None:
                values[name] = _check_positive(name, values[name])
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), largest)
        for name in _NUMBERS:
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise _bad("num_key_value_heads", kv_heads, f"it must divide {heads} query heads")
        if self.hidden_act not in ACTIVATIONS:
            raise _bad("hidden_act", self.hidden_act, f"known are {', '.join(ACTIVATIONS)}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise _bad("layer_types", list(self.layer_types), f"it must name all {self.num_hidden_layers} layers")
        for layer_type in self.layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise _bad("layer_types", layer_type, "known are full_attention and sliding_attention")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise _bad("sliding_window", None, "layer_types has sliding layers, which need a window")
        if self.rope is not None and (self.rope.head_dim != self.head_dim or self.head_dim % 2):
            raise _bad("head_dim", self.head_dim, "RoPE rotates pairs of a whole head, so it must be even")


def unknown_architecture(name: str) -> ModelLoadError:
    """Return the error for an architecture that this engine does not have; it names those that it has."""
    return ModelLoadError(f"unknown architecture {name[:80]!r}: this engine runs {', '.join(_FAMILIES)}")


def _bad(name: str, value: object, remedy: str) -> ModelLoadError:
    return ModelLoadError(f"the model's configuration has {name} = {repr(value)[:80]}: {remedy}")


def _check_whole(name: str, value: object, largest: int) -> None:
    if type(value) is not int or not 1 <= value <= largest:
        raise _bad(name, value, f"it must be a whole number from 1 to {largest}")


def _check_positive(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise _bad(name, value, "it must be a finite number above 0")
    return float(value)  # type: ignore[arg-type]


# --- config.json -----------------------------------------------------------------------------------------------------


def _architecture(hf: Mapping[str, Any]) -> str:
    """Return the class named in the file; a configuration that was never saved with a model has only a model type."""
    architectures = hf.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    by_model_type = {model_type: architecture for architecture, (model_type, _) in _FAMILIES.items()}
    return by_model_type.get(str(hf.get("model_type")), str(hf.get("model_type")))


def _transformers_config(class_name: str, hf: Mapping[str, Any]) -> Any:
    """Build transformers' configuration, which checks the types, from the entries that describe the model."""
    import transformers  # its configuration classes take seconds to import

    for name in ("num_hidden_layers", "n_layer"):  # transformers builds a list with an entry per layer
        if name in hf:
            _check_whole(name, hf[name], _LARGEST["num_hidden_layers"])
    config_class = getattr(transformers, class_name)
    names = (*config_class.__annotations__, "rope_theta", "rope_scaling", "partial_rotary_factor")
    try:
        return config_class(**{name: copy.deepcopy(hf[name]) for name in names if name in hf})
    except Exception as error:  # its validators raise several unrelated types
        raise ModelLoadError(
            f"transformers refuses the model's configuration ({' '.join(str(error).split())[:200]}): "
            "is config.json complete and intact?"
        ) from error


def _of_family(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a family names differently or leaves out."""
    every_layer = ("full_attention",) * values["num_hidden_layers"]
    if values["model_type"] == "gpt2":
        width, heads, inner = values["hidden_size"], values["num_attention_heads"], values["n_inner"]
        _check_whole("num_attention_heads", heads, _LARGEST["num_attention_heads"])
        if width % heads:
            raise _bad("hidden_size", width, f"it must be a multiple of {heads} heads")
        return {
            "intermediate_size": 4 * width if inner is None else inner,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "hidden_act": values["activation_function"],
            "norm_eps": values["layer_norm_epsilon"],
            "layer_types": every_layer,
            "attention_bias": True,
        }
    gemma2 = values["model_type"] == "gemma2"
    return {
        "hidden_act": values["hidden_activation" if gemma2 else "hidden_act"],
        "norm_eps": values["rms_norm_eps"],
        "layer_types": tuple(values.get("layer_types", every_layer)),
        "rope": _rope(values["rope_parameters"], values["head_dim"]),
    }


def _rope(given: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Read `rope_parameters`, into which transformers moves the `rope_theta` and `rope_scaling` of older files."""
    if any(isinstance(value, Mapping) for value in given.values()):
        raise _bad("rope_parameters", given, "these families rotate every layer alike: give one set of values")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise _bad("partial_rotary_factor", given, "these families rotate whole heads: it must be 1")

    def number(name: str) -> float:
        return _check_positive(name, given.get(name))

    scaling: Linear | Llama3 | None
    match given["rope_type"]:
        case "default":
            scaling = None
        case "linear":
            scaling = Linear(number("factor"))
        case "llama3":
            length = given["original_max_position_embeddings"]
            _check_whole("original_max_position_embeddings", length, _LARGEST["max_position_embeddings"])
            scaling = Llama3(number("factor"), number("low_freq_factor"), number("high_freq_factor"), length)
            if scaling.low_freq_factor >= scaling.high_freq_factor:
                raise _bad("low_freq_factor", scaling.low_freq_factor, "it must be below high_freq_factor")
        case kind:
            raise _bad("rope_type", kind, "known are default, linear and llama3")
    return RopeConfig(number("rope_theta"), head_dim, scaling)
