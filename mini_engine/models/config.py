"""What a model is made of, read from its `config.json` and checked before any memory is taken.

Fields carry the names that transformers uses, so that a `config.json` can be read beside them. Each family reads its
own names and defaults (`_llama`, `_qwen3`, `_gemma2`, `_gpt2`); everything after that sees one `ModelConfig`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

# The largest sizes that are believed: several times those of any released model.
_LARGEST = {
    "vocab_size": 2**22,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**10,
    "num_key_value_heads": 2**10,
    "head_dim": 2**12,
    "max_position_embeddings": 2**30,
    "sliding_window": 2**30,
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, valid once it exists.

    Attributes:
        architecture: the class of the model in transformers, such as `LlamaForCausalLM`.
        vocab_size: words that the model can read and write.
        hidden_size: width of a token's vector between layers.
        intermediate_size: width inside the MLP.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: key and value heads of a layer; divides `num_attention_heads`.
        head_dim: size of one head.
        max_position_embeddings: longest sequence, in tokens.
        hidden_act: name of the MLP's non-linearity, a key of `ACTIVATIONS`.
        norm_eps: added to the variance in each norm.
        tie_word_embeddings: the output weights are the embeddings.
        layer_types: for each layer, `full_attention` or `sliding_attention`.
        sliding_window: keys that a query of a sliding layer may see, its own included.
        rope: how positions rotate queries and keys; None where positions are learned.
        attention_bias: the attention's projections have biases.
        query_pre_attn_scalar: Gemma 2 divides the scores by its square root.
        attn_logit_softcapping: Gemma 2's soft-cap on the scores.
        final_logit_softcapping: Gemma 2's soft-cap on the logits.
        scale_attn_weights: GPT-2 divides the scores by the square root of `head_dim`.
        scale_attn_by_inverse_layer_idx: GPT-2 divides the scores of layer i by i + 1 as well.
        eos_token_ids: the tokens that end a text.

    Raises:
        ModelLoadError: a value that no model can have.
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
        """Read the contents of a `config.json`, as written by transformers 5 or an older one.

        Args:
            hf: what the JSON file holds: an object.

        Raises:
            ModelLoadError: an architecture that is not known, a value that is missing or impossible, or an option
                that this engine does not implement.
        """
        if not isinstance(hf, Mapping):
            raise ModelLoadError(f"config.json holds a {type(hf).__name__}, not an object: is it the right file?")
        architecture = _architecture(hf)
        if architecture not in _READERS:
            raise unknown_architecture(architecture)
        for option, wanted in _UNSUPPORTED.items():
            if hf.get(option) not in (None, False):
                raise ModelLoadError(f"config.json sets {option}, which this engine does not implement: {wanted}")
        return cls(architecture=architecture, eos_token_ids=_token_ids(hf), **_READERS[architecture](hf))

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), largest)
        for name in ("norm_eps", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise _bad(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"it must divide {self.num_attention_heads} query heads",
            )
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
    """The error for an architecture that this engine does not have; it names those that it has."""
    return ModelLoadError(f"unknown architecture {name!r}: this engine runs {', '.join(_READERS)}")


def _bad(name: str, value: object, remedy: str) -> ModelLoadError:
    return ModelLoadError(f"the model's configuration has {name} = {value!r}: {remedy}")


def _check_whole(name: str, value: object, largest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise _bad(name, value, f"it must be a whole number from 1 to {largest}")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise _bad(name, value, "it must be a finite number above 0")


# --- config.json -----------------------------------------------------------------------------------------------------

_UNSUPPORTED = {
    "quantization_config": "use a checkpoint in float32, float16 or bfloat16, or a GGUF file",
    "mlp_bias": "use a model whose MLP has no biases",
    "use_bidirectional_attention": "use a causal model",
    "add_cross_attention": "use a decoder-only model",
}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def _architecture(hf: Mapping[str, Any]) -> str:
    """The class named in the file; where there is none (a config that was never saved with a model), by model type."""
    architectures = hf.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    model_type = str(hf.get("model_type"))
    return _BY_MODEL_TYPE.get(model_type, model_type)


def _token_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
    ids = hf.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise _bad("eos_token_id", token_id, "it must be a token id or a list of token ids")
    return tuple(ids)


def _get(hf: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A value of the file; null counts as absent. Without a default the value is required."""
    value = hf.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json has no {name!r}: is it complete, and is it of this model?")
    return value


def _whole(hf: Mapping[str, Any], name: str, default: int | None = None, *, field: str = "") -> int:
    value = _get(hf, name, default)
    _check_whole(name, value, _LARGEST[field or name])
    return value


def _number(hf: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _get(hf, name, default)
    _check_positive(name, value)
    return float(value)


def _optional_number(hf: Mapping[str, Any], name: str, default: float) -> float | None:
    """A number that null switches off; only a file that does not name it has the default."""
    return None if name in hf and hf[name] is None else _number(hf, name, default)


def _flag(hf: Mapping[str, Any], name: str, default: bool) -> bool:
    value = _get(hf, name, default)
    if not isinstance(value, bool):
        raise _bad(name, value, "it must be true or false")
    return value


def _sizes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What Llama, Qwen3 and Gemma 2 write alike."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        **{name: _whole(hf, name) for name in (*names, "max_position_embeddings")},
        "norm_eps": _number(hf, "rms_norm_eps", 1e-6),
        "attention_bias": _flag(hf, "attention_bias", False),
    }


def _derived_head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise _bad("hidden_size", hidden_size, f"it must be a multiple of {num_heads} heads, or head_dim must be given")
    return hidden_size // num_heads


def _llama(hf: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _sizes(hf)
    heads = sizes["num_attention_heads"]
    derived = _derived_head_dim(sizes["hidden_size"], heads) if hf.get("head_dim") is None else None
    head_dim = _whole(hf, "head_dim", derived)
    return sizes | {
        "num_key_value_heads": _whole(hf, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "hidden_act": _activation(hf, "hidden_act", "silu"),
        "tie_word_embeddings": _flag(hf, "tie_word_embeddings", False),
        "layer_types": ("full_attention",) * sizes["num_hidden_layers"],
        "rope": _rope(hf, head_dim),
    }


def _qwen3(hf: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _sizes(hf)
    head_dim = _whole(hf, "head_dim", 128)
    layers = sizes["num_hidden_layers"]
    window = _whole(hf, "sliding_window", 4096) if _flag(hf, "use_sliding_window", False) else None
    full_layers = layers if window is None else _get(hf, "max_window_layers", 28)
    if not isinstance(full_layers, int):
        raise _bad("max_window_layers", full_layers, "it must be a whole number")
    kinds = ["full_attention" if layer < full_layers else "sliding_attention" for layer in range(layers)]
    return sizes | {
        "num_key_value_heads": _whole(hf, "num_key_value_heads", sizes["num_attention_heads"]),
        "head_dim": head_dim,
        "hidden_act": _activation(hf, "hidden_act", "silu"),
        "tie_word_embeddings": _flag(hf, "tie_word_embeddings", False),
        "layer_types": _layer_types(hf, kinds),
        "sliding_window": window,
        "rope": _rope(hf, head_dim),
    }


def _gemma2(hf: Mapping[str, Any]) -> dict[str, Any]:
    sizes = _sizes(hf)
    head_dim = _whole(hf, "head_dim", 256)
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes["num_hidden_layers"])]
    return sizes | {
        "num_key_value_heads": _whole(hf, "num_key_value_heads", 4),
        "head_dim": head_dim,
        "hidden_act": _activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        "tie_word_embeddings": _flag(hf, "tie_word_embeddings", True),
        "layer_types": _layer_types(hf, kinds),
        "sliding_window": _whole(hf, "sliding_window", 4096),
        "rope": _rope(hf, head_dim),
        "query_pre_attn_scalar": _number(hf, "query_pre_attn_scalar", 256.0),
        "attn_logit_softcapping": _optional_number(hf, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _optional_number(hf, "final_logit_softcapping", 30.0),
    }


def _gpt2(hf: Mapping[str, Any]) -> dict[str, Any]:
    hidden_size = _whole(hf, "n_embd", field="hidden_size")
    heads = _whole(hf, "n_head", field="num_attention_heads")
    layers = _whole(hf, "n_layer", field="num_hidden_layers")
    return {
        "vocab_size": _whole(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _whole(hf, "n_inner", 4 * hidden_size, field="intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _derived_head_dim(hidden_size, heads),
        "max_position_embeddings": _whole(hf, "n_positions", field="max_position_embeddings"),
        "hidden_act": _activation(hf, "activation_function", "gelu_new"),
        "norm_eps": _number(hf, "layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": _flag(hf, "tie_word_embeddings", True),
        "layer_types": ("full_attention",) * layers,
        "attention_bias": True,
        "scale_attn_weights": _flag(hf, "scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": _flag(hf, "scale_attn_by_inverse_layer_idx", False),
    }


_READERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "GPT2LMHeadModel": _gpt2,
}


def _activation(hf: Mapping[str, Any], name: str, default: str) -> str:
    value = _get(hf, name, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise _bad(name, value, f"known are {', '.join(ACTIVATIONS)}")
    return value


def _layer_types(hf: Mapping[str, Any], default: list[str]) -> tuple[str, ...]:
    kinds = _get(hf, "layer_types", default)
    if not isinstance(kinds, (list, tuple)) or not all(isinstance(kind, str) for kind in kinds):
        raise _bad("layer_types", kinds, "it must be a list with the type of each layer")
    return tuple(kinds)


def _rope(hf: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters` with everything in it; before, `rope_theta` and `rope_scaling`."""
    given = _get(hf, "rope_parameters", {}) or _get(hf, "rope_scaling", {})
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise _bad("rope_parameters", given, "these families rotate every layer alike: give one set of values")
    theta = _number(given, "rope_theta", _number(hf, "rope_theta", 10000.0))
    if _get(given, "partial_rotary_factor", _get(hf, "partial_rotary_factor", 1.0)) != 1.0:
        raise _bad("partial_rotary_factor", given, "these families rotate whole heads: it must be 1")
    kind = _get(given, "rope_type", _get(given, "type", "default"))
    scaling: Linear | Llama3 | None
    match kind:
        case "default":
            scaling = None
        case "linear":
            scaling = Linear(_number(given, "factor"))
        case "llama3":
            low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
            if low >= high:
                raise _bad("low_freq_factor", low, f"it must be below high_freq_factor = {high}")
            longest = _whole(hf, "max_position_embeddings")
            length = _whole(given, "original_max_position_embeddings", longest, field="max_position_embeddings")
            scaling = Llama3(_number(given, "factor"), low, high, length)
        case _:
            raise _bad("rope_type", kind, "known are default, linear and llama3")
    return RopeConfig(theta, head_dim, scaling)
