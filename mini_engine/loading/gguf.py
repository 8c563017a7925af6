"""Read GGUF files of Llama and Qwen3 models: configuration, weights and tokenizer under transformers' names.

`gguf.GGUFReader` parses the header, and `gguf.quants` dequantizes the tensors. This module refuses metadata that it
does not know, and undoes the changes of llama.cpp's converter (convert_hf_to_gguf.py): it renamed every tensor, and for
Llama it reordered the rows of the query and key weights, because llama.cpp rotates neighboring pairs (interleaved RoPE)
and transformers rotates the two halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from jaxtyping import Float, UInt8
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading.untrusted import BoundedReader, damaged
from mini_engine.rope import Llama3, RopeConfig, inverse_frequencies

# Names of GGMLQuantizationType. Other types are refused before anything is read.
TENSOR_TYPES = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
FOLDER_INSTEAD = "use the model's folder with safetensors files instead, with LLM or Inference"


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the header's list of tensors.

    Attributes:
        type: name of its type, one of `TENSOR_TYPES`.
        shape: outermost dimension first, as in PyTorch; the file has the opposite order.
        begin: offset of its first byte in the file.
        end: offset one past its last byte.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file: its metadata (numbers, strings, and lists of them) and its tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def blocks(self, name: str) -> UInt8[Tensor, "blocks bytes"]:
        """Read the stored bytes of a tensor, one row per quantization block.

        Raises:
            WeightFileError: if the file has shrunk since its header was read.
        """
        tensor = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, tensor.end - tensor.begin, offset=tensor.begin)
        if len(raw) < tensor.end - tensor.begin:
            raise WeightFileError(f"{self.path} shrank while it was read: download it again.")
        return torch.from_numpy(raw).view(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]][1])

    def tensor(self, name: str) -> Float[Tensor, "*shape"]:
        """Read and dequantize a tensor: its values in its shape, in float32."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(self.blocks(name).numpy(), gguf.GGMLQuantizationType[tensor.type])
        return torch.from_numpy(values).reshape(tensor.shape)

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a metadata value of the given type.

        Raises:
            WeightFileError: if the value has another type, or is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise damaged(self.path, f"its metadata value {key!r} is {repr(value)[:80]}, not of type {kind.__name__}")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the metadata and the list of tensors of a GGUF file; no tensor is read.

    Raises:
        WeightFileError: if the file is not a little-endian GGUF of version 2 or 3, is truncated, or contradicts itself.
        ModelLoadError: if it holds tensors of an unsupported type, or is one part of a split file.
    """
    try:
        with np.errstate(over="ignore"):  # the reader finds sums of offsets that wrap around
            reader = BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except OSError:
        raise
    except Exception as error:  # the library raises whatever numpy or an enumeration raises
        raise damaged(path, f"it cannot be parsed as GGUF of version 2 or 3 ({str(error)[:200]})") from error
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelLoadError(f"{path} is one of {metadata['split.count']} parts: merge by `llama-gguf-split --merge`.")
    tensors: dict[str, GGUFTensor] = {}
    for found in reader.tensors:
        if found.tensor_type.name not in TENSOR_TYPES:
            problem = f"{path}: tensor {found.name[:80]!r} has the type {found.tensor_type.name}"
            raise ModelLoadError(f"{problem}: use a file with {', '.join(sorted(TENSOR_TYPES))}.")
        begin, shape = int(found.data_offset), tuple(found.shape.tolist()[::-1])
        if not shape or 0 in shape:
            raise damaged(path, f"tensor {found.name[:80]!r} has the shape {shape[:8]}")
        tensors[found.name] = GGUFTensor(found.tensor_type.name, shape, begin, begin + int(found.n_bytes))
    return GGUFFile(path, metadata, tensors)


# --- configuration and weights ---------------------------------------------------------------------------------------

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
}
LAYER_NAMES |= {f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")}
LAYER_NAMES |= {f"attn_{name}_norm": f"self_attn.{name}_norm" for name in ("q", "k")}  # Qwen3
LAYER_NAMES |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Metadata under "llama." or "qwen3.": read, without effect, and without effect if it has a certain value. Any other
# key may change what the model computes.
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
READ = {*SIZES.values(), "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"}
READ |= {f"rope.{name}" for name in ("freq_base", "dimension_count", "scaling.type", "scaling.factor", "scale_linear")}
IGNORED = {"vocab_size", "attention.value_length", "tensor_data_layout"}  # the first two are in the tensors' shapes
IGNORED |= {"rope.scaling.original_context_length", "rope.scaling.finetuned"}  # of rules that are refused
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "attention.causal": True}

END_KEYS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
# Tokens at which llama.cpp ends a text, too, whatever the keys say.
END_TEXTS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the `config.json` that transformers would write for this model.

    Raises:
        ModelLoadError: if the architecture, or a variant of it, is not supported.
        WeightFileError: if a value is missing or has the wrong type.
    """
    architecture = file.value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        problem = f"{file.path} holds the architecture {architecture[:80]!r}"
        raise ModelLoadError(f"{problem}, and only {' and '.join(ARCHITECTURES)} are supported: {FOLDER_INSTEAD}.")
    prefix = f"{architecture}."
    given = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key in given.keys() - READ - IGNORED:
        if key not in NEUTRAL or given[key] != NEUTRAL[key]:
            problem = f"{file.path} sets {prefix}{key[:80]} = {repr(given[key])[:80]}, which may change the computation"
            raise ModelLoadError(f"{problem}, and which this engine does not know: {FOLDER_INSTEAD}.")
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path} has no tensor token_embd.weight: use a file with a whole model.")
    config = {name: file.value(prefix + key, int) for name, key in SIZES.items()}
    heads = config["num_attention_heads"]
    head_dim = file.value(prefix + "attention.key_length", int, config["hidden_size"] // max(heads, 1))
    if given.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError(f"{file.path} rotates only part of each head: use a model that rotates whole heads.")
    return config | {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": file.value(prefix + "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(file.value(prefix + "attention.layer_norm_rms_epsilon", float)),
        "rope_theta": (theta := _shortest(file.value(prefix + "rope.freq_base", float, 10000.0))),
        "rope_scaling": _rope_scaling(file, given, theta, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those of the keys, and the control tokens whose text says so."""
    ends = {token_id for key in END_KEYS if type(token_id := file.metadata.get(key)) is int}
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    ends |= {
        i for i, (text, kind) in enumerate(zip(tokens, types, strict=False)) if kind == CONTROL and text in END_TEXTS
    }
    return tuple(sorted(ends))


def _shortest(value: float) -> float:
    """Return the shortest decimal that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, given: Mapping[str, Any], theta: float, head_dim: int) -> dict[str, Any] | None:
    # As in llama.cpp, a factor without a type is linear, and a factor of 0 is 1.
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 0))
    kind = given.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ModelLoadError(f"{file.path} scales RoPE by {repr(kind)[:80]}: {FOLDER_INSTEAD}.")
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is None:
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else None
    # Llama 3.1 files store the divisor of each frequency, not the rule; the largest divisor is the rule's factor.
    if 2 * prod(divisors.shape) == head_dim and factor in (0, 1):
        stored = file.tensor("rope_freqs.weight").double().flatten()
        rule = Llama3(float(stored.max()), 1.0, 4.0, original_max_position_embeddings=8192)
        plain, scaled = (inverse_frequencies(RopeConfig(theta, head_dim, scaling)) for scaling in (None, rule))
        if torch.allclose((plain / scaled).double(), stored, rtol=1e-3):
            return {"rope_type": "llama3"} | asdict(rule)
    raise ModelLoadError(f"{file.path}: its rope_freqs are not those of Llama 3.1: use a model without them.")


def hf_tensors(file: GGUFFile, config: Mapping[str, Any]) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Return the weights under transformers' names and in its layout.

    Args:
        file: the opened file.
        config: `hf_config(file)`, accepted by `ModelConfig.from_hf`.

    Returns:
        For each name, a tensor of the right shape on the meta device; and a function that reads a tensor by name.

    Raises:
        ModelLoadError: if a tensor has an unknown name.
    """
    stored = {}
    for name in file.tensors:
        parts = re.fullmatch(r"(?:blk\.(\d{1,6})\.)?(\w+)\.(weight|bias)", name)
        names = LAYER_NAMES if parts and parts[1] else MODEL_NAMES
        if parts and parts[2] in names:
            layer = f"model.layers.{parts[1]}." if parts[1] else ""
            stored[f"{layer}{names[parts[2]]}.{parts[3]}"] = name
        elif name != "rope_freqs.weight":  # which is part of the configuration
            problem = f"{file.path} has a tensor {name[:80]!r}, which a {config['model_type']} model does not have"
            raise ModelLoadError(f"{problem}: {FOLDER_INSTEAD}.")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def read(name: str) -> Tensor:
        tensor, part = file.tensor(stored[name]), name.split(".")[-2]
        return unpermute(tensor, heads[part]) if config["model_type"] == "llama" and part in heads else tensor

    return {new: torch.empty(file.tensors[old].shape, device="meta") for new, old in stored.items()}, read


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key weight (or bias) from llama.cpp's order to transformers'.

    Within a head of size D the file has rows 0, D/2, 1, D/2+1, ..., because neighbors are rotated together.
    transformers rotates row i with row i + D/2, so the even rows come first, then the odd ones.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


# --- tokenizer -------------------------------------------------------------------------------------------------------

# How text is split before merging, by the name in "tokenizer.ggml.pre". The first two use GPT-2's expression.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": lambda: _split_then_bytes(LLAMA3_SPLIT),
    "qwen2": lambda: _split_then_bytes(LLAMA3_SPLIT.replace("{1,3}", "")),  # one digit at a time
}
CONTROL, USER_DEFINED = 3, 4  # token types


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Build the byte-level BPE tokenizer that the metadata describes.

    Returns:
        The tokenizer, and the keyword arguments for transformers' PreTrainedTokenizerFast around it.

    Raises:
        ModelLoadError: if the tokenizer is of another kind.
        WeightFileError: if a value is missing or has the wrong type.
    """
    kind, pre = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "")
    ends_itself = file.value("tokenizer.ggml.add_eos_token", bool, False)
    if kind != "gpt2" or pre not in PRE_TOKENIZERS or ends_itself:
        problem = f"{file.path} has a tokenizer of kind {kind[:80]!r} that splits text by the rule {pre[:80]!r}"
        known = f"byte-level BPE ('gpt2') with one of the rules {', '.join(PRE_TOKENIZERS)}, without an end token"
        raise ModelLoadError(f"{problem}, not {known}: use the model's folder with tokenizer.json instead.")
    tokens, merges = file.value("tokenizer.ggml.tokens", list), file.value("tokenizer.ggml.merges", list)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise damaged(file.path, "its vocabulary has a token twice")
    pairs = [merge.partition(" ")[::2] for merge in merges]
    # Llama 3 uses a whole word that is in its vocabulary even if no merges produce it.
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[pre](), decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type", list, [])
    for special, wanted in ((True, CONTROL), (False, USER_DEFINED)):
        added = [token for token, type_ in zip(tokens, types, strict=False) if type_ == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in added])

    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if token_id not in range(len(tokens)):
                raise damaged(file.path, f"its {key} token {repr(token_id)[:80]} is not in its vocabulary")
            options[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in file.metadata:
        options["chat_template"] = file.value("tokenizer.chat_template", str)
    # Llama 3's files leave the key out, and llama.cpp begins their texts with BOS.
    if file.value("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe") and "bos_token" in options:
        bos = options["bos_token"]
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocabulary[bos])])
    return tokenizer, options


def _split_then_bytes(pattern: str) -> PreTokenizer:
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
