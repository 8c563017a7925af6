"""From a GGUF file to a Hugging Face model: its configuration, the names and layout of its tensors, its tokenizer.

llama.cpp's converter (convert_hf_to_gguf.py) renames every tensor and changes a few. Here each change is undone:

- Llama: the rows of the query and key weights are reordered, because llama.cpp rotates neighbouring pairs (interleaved
  RoPE) where transformers rotates the two halves of a head.
- Gemma 2: norm weights are stored as 1 + w.
- GPT-2: its Conv1D weights are stored transposed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.models.gguf_file import GGUFFile
from mini_engine.models.tensors import LazyTensor
from mini_engine.rope import Llama3, RopeConfig, inverse_frequencies

GATED_MLP_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GATED_MLP_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# For each architecture: the names outside the layers, the name of layer N, and the names inside a layer.
NAMES: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "llama": (GATED_MLP_MODEL, "model.layers", GATED_MLP_LAYER | {"ffn_norm": "post_attention_layernorm"}),
    "qwen3": (
        GATED_MLP_MODEL,
        "model.layers",
        GATED_MLP_LAYER
        | {
            "ffn_norm": "post_attention_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
    ),
    "gemma2": (
        GATED_MLP_MODEL,
        "model.layers",
        GATED_MLP_LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "gpt2": (
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        "transformer.h",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
}

# How text is cut before the merges apply, by the name in "tokenizer.ggml.pre". The first two use GPT-2's expression.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: _split_then_bytes(LLAMA3_SPLIT),
    "qwen2": lambda: _split_then_bytes(LLAMA3_SPLIT.replace("{1,3}", "")),  # one digit at a time
}
CONTROL, USER_DEFINED = 3, 4  # types of tokens
MAX_TOKEN_CHARS = 256


def _require(file: GGUFFile, key: str, kind: type, default: Any = None) -> Any:
    """The metadata value `key`; an integer may stand for a float. Without a default it must be there."""
    value = file.metadata.get(key, default)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        problem = "is missing" if value is None else f"is a {type(value).__name__}, not a {kind.__name__}"
        raise WeightFileError(f"{file.path}: the metadata value {key!r} {problem}: use a complete file for llama.cpp.")
    return value


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` that transformers would write for this model.

    Raises:
        ModelLoadError: the architecture, or a variant of it, is not supported.
        WeightFileError: a value is missing or has the wrong type.
    """
    architecture = _require(file, "general.architecture", str)
    if architecture not in NAMES:
        raise ModelLoadError(
            f"{file.path} holds the architecture {architecture[:80]!r}: use a GGUF file of {', '.join(NAMES)}."
        )

    def read(key: str, kind: type, default: Any = None) -> Any:
        return _require(file, f"{architecture}.{key}", kind, default)

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightFileError(f"{file.path} has no token_embd.weight matrix: use a file with a whole model.")
    hidden, heads = read("embedding_length", int), read("attention.head_count", int)
    if heads < 1:
        raise WeightFileError(f"{file.path}: {architecture}.attention.head_count is {heads}: use an intact file.")
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
    }
    for name in ("bos", "eos"):
        if f"tokenizer.ggml.{name}_token_id" in file.metadata:
            config[f"{name}_token_id"] = _require(file, f"tokenizer.ggml.{name}_token_id", int)
    if architecture == "gpt2":
        return config | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_head": heads,
            "n_layer": read("block_count", int),
            "n_positions": read("context_length", int),
            "n_inner": read("feed_forward_length", int),
            "layer_norm_epsilon": _shortest(read("attention.layer_norm_epsilon", float)),
            "activation_function": "gelu_new",
        }

    head_dim = read("attention.key_length", int, hidden // heads)
    if read("rope.dimension_count", int, head_dim) != head_dim:
        raise ModelLoadError(f"{file.path} rotates a part of each head only: use a model that rotates whole heads.")
    config |= {
        "hidden_size": hidden,
        "intermediate_size": read("feed_forward_length", int),
        "num_hidden_layers": read("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": read("context_length", int),
        "rms_norm_eps": _shortest(read("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(read("rope.freq_base", float, 10000.0)),
        "rope_scaling": _rope_scaling(file, architecture, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if architecture == "llama":
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        }
    if architecture == "qwen3":
        return config | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
    return config | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": read("attention.sliding_window", int, 4096),
        "attn_logit_softcapping": _shortest(read("attn_logit_softcapping", float, 50.0)),
        "final_logit_softcapping": _shortest(read("final_logit_softcapping", float, 30.0)),
        # Not in the file. llama.cpp knows the 27B model, the one that differs, by its number of layers too.
        "query_pre_attn_scalar": hidden // heads if config["num_hidden_layers"] == 46 else head_dim,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, architecture: str, head_dim: int) -> dict[str, Any] | None:
    kind = _require(file, f"{architecture}.rope.scaling.type", str, "none")
    if kind == "linear":
        factor = _require(file, f"{architecture}.rope.scaling.factor", float)
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind != "none":
        raise ModelLoadError(f"{file.path} scales RoPE by {kind[:80]!r}: use a model with none, linear or llama3.")
    if "rope_freqs.weight" not in file.tensors:
        return None
    # Llama 3.1 stores what each frequency is divided by, not the rule; the largest divisor is the rule's factor.
    stored = file.tensor("rope_freqs.weight").double().flatten()
    rule = Llama3(float(stored.max()), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    theta = _shortest(_require(file, f"{architecture}.rope.freq_base", float, 10000.0))
    if 2 * len(stored) == head_dim:
        plain, scaled = (inverse_frequencies(RopeConfig(theta, head_dim, scaling)) for scaling in (None, rule))
        if torch.allclose((plain / scaled).double(), stored, rtol=1e-3):
            return {"rope_type": "llama3"} | asdict(rule)
    raise ModelLoadError(f"{file.path}: its rope_freqs are not those of Llama 3.1: use a model without them.")


def hf_tensors(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """The tensors under transformers' names and in its layout; `config` is `hf_config(file)`.

    Raises:
        WeightFileError: a tensor has a name that its architecture does not know, or too few or too many dimensions.
    """
    architecture = _require(file, "general.architecture", str)
    outside, layer_name, inside = NAMES[architecture]
    result = {}
    for name, info in file.tensors.items():
        if name == "rope_freqs.weight":  # a part of the configuration
            continue
        layer = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
        other = re.fullmatch(r"(\w+)\.(weight|bias)", name)
        if layer and layer[2] in inside:
            part, kind, new_name = layer[2], layer[3], f"{layer_name}.{layer[1]}.{inside[layer[2]]}.{layer[3]}"
        elif other and other[1] in outside:
            part, kind, new_name = other[1], other[2], f"{outside[other[1]]}.{other[2]}"
        else:
            raise WeightFileError(
                f"{file.path}: {architecture} has no tensor {name[:80]!r}: use a file that llama.cpp's converter wrote."
            )
        lazy = LazyTensor(info.shape, file.dtype(name), partial(file.tensor, name))
        if architecture == "llama" and part in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            if heads < 1 or info.shape[0] % (2 * heads):
                raise WeightFileError(f"{file.path}: {info.shape[0]} rows of {name!r} are no {heads} heads: damaged.")
            lazy = _changed(lazy, partial(unpermute, num_heads=heads))
        elif architecture == "gemma2" and part.endswith("norm"):
            lazy = _changed(lazy, lambda weight: weight - 1)
        elif architecture == "gpt2" and layer and kind == "weight" and len(info.shape) == 2:
            lazy = replace(_changed(lazy, lambda weight: weight.T), shape=info.shape[::-1])
        result[new_name] = lazy
    return result


def _changed(lazy: LazyTensor, change: Callable[[Tensor], Tensor]) -> LazyTensor:
    return replace(lazy, read=lambda: change(lazy.read()))


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key weight (or bias) from llama.cpp's order to transformers'.

    Inside a head of size D the file has rows 0, D/2, 1, D/2+1, ...: neighbours are rotated together. transformers
    rotates row i with row i + D/2, so the even rows come first, then the odd ones.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer that the metadata describes, and what transformers' PreTrainedTokenizerFast is told beside it.

    Raises:
        ModelLoadError: a kind of tokenizer that is not supported.
        WeightFileError: a value is missing or has the wrong type.
    """
    kind = _require(file, "tokenizer.ggml.model", str)
    tokens = _require(file, "tokenizer.ggml.tokens", list)
    if any(len(token) > MAX_TOKEN_CHARS for token in tokens) or len(set(tokens)) < len(tokens):
        raise WeightFileError(f"{file.path}: its vocabulary has a token twice or one that is too long: damaged.")
    if kind == "gpt2":
        tokenizer = _byte_level_tokenizer(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece_tokenizer(file, tokens)
    else:
        raise ModelLoadError(f"{file.path} has a tokenizer of kind {kind[:80]!r}: use a file with gpt2 or llama.")

    types = file.metadata.get("tokenizer.ggml.token_type", ())
    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        added = [token for token, type_ in zip(tokens, types, strict=False) if type_ == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])

    config: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for name, key in ids.items():
        if f"tokenizer.ggml.{key}_token_id" in file.metadata:
            token_id = _require(file, f"tokenizer.ggml.{key}_token_id", int)
            if not 0 <= token_id < len(tokens):
                raise WeightFileError(f"{file.path}: its {key} token {token_id} is not in its vocabulary: damaged.")
            config[name] = tokens[token_id]
    if "tokenizer.chat_template" in file.metadata:
        config["chat_template"] = _require(file, "tokenizer.chat_template", str)
    if _require(file, "tokenizer.ggml.add_bos_token", bool, kind == "llama") and "bos_token" in config:
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer, config


def _byte_level_tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = _require(file, "tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"{file.path} cuts text by the rule {pre[:80]!r}: use a file with one of {', '.join(PRE_TOKENIZERS)}, "
            "or the same model as a folder with tokenizer.json."
        )
    merges = _merges(file)
    # Llama 3 takes a whole word that is in its vocabulary even if no merges lead to it.
    model = models.BPE(_vocabulary(tokens), merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_then_bytes(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    pairs = []
    for merge in _require(file, "tokenizer.ggml.merges", list):
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    return pairs


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _sentencepiece_tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Llama 2's and Gemma's: spaces become "▁", and a character outside the vocabulary becomes its bytes."""
    gemma = _require(file, "general.architecture", str).startswith("gemma")
    if gemma:  # its runs of spaces are stored as spaces
        tokens[:] = ["▁" * len(token) if token.isspace() and " " in token else token for token in tokens]
    vocabulary = _vocabulary(tokens)
    if "tokenizer.ggml.merges" in file.metadata:
        merges = _merges(file)
    else:
        # Any two tokens whose concatenation is a token merge. Better scores first; in Gemma's files, earlier ones.
        scores = file.metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
            raise WeightFileError(f"{file.path}: its vocabulary has no scores: use a complete file for llama.cpp.")
        order = (lambda token: vocabulary[token]) if gemma else (lambda token: -float(scores[vocabulary[token]]))
        merges = []
        for token in sorted(tokens, key=order):
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
            merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    unknown = tokens[_require(file, "tokenizer.ggml.unknown_token_id", int, 0)] if tokens else None
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = _require(file, "tokenizer.ggml.add_space_prefix", bool, not gemma)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer
