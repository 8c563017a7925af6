"""Read GGUF files of Llama, Qwen2 and Qwen3 models: configuration, weights and tokenizer under transformers' names.

`gguf.GGUFReader` parses the header, and `gguf.quants` dequantizes the tensors. This module refuses metadata that it
does not know, and undoes the changes of llama.cpp's converter (convert_hf_to_gguf.py): it renamed every tensor, and for
Llama it reordered the rows of the query and key weights, because llama.cpp rotates neighboring pairs (interleaved RoPE)
and transformers rotates the two halves of a head.

Matrices of the types Q4_0, Q4_1, Q8_0 and Q4_K can be kept quantized. A model may be split into several files.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from jaxtyping import Float, Int8, UInt8
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading.untrusted import damaged
from mini_engine.models.config import ModelConfig
from mini_engine.quantization import Format, QuantizedTensor
from mini_engine.rope import Llama3, RopeConfig, inverse_frequencies

# Names of GGMLQuantizationType. Other types are refused before anything is read.
TENSOR_TYPES = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}

# The types whose numbers are q * scale + offset for each 32 columns of a row, with q of 4 or 8 bits.
FORMATS = {"Q8_0": Format("int8", 1, 32), "Q4_0": Format("int4", 1, 32)}
FORMATS |= dict.fromkeys(("Q4_1", "Q4_K"), Format("int4", 1, 32, has_offsets=True))

SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")  # the number of a part, from 1, and the number of all parts


class BoundedReader(gguf.GGUFReader):
    """A `GGUFReader` that never reads past the file or the limits on a header.

    The library reads every value through `_get` and trusts the counts and lengths in the file, so all checks are here.
    A big-endian file, which the library would read, has absurd counts here and is refused.

    Attributes:
        limit: the end of what may be read, in bytes.
        num_values: how many values may still be read.
    """

    limit, num_values = 64 * 2**20, 2**21  # for the header; twice those of the largest vocabularies

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> np.ndarray:
        self.num_values -= 1
        if int(offset) + np.dtype(dtype).itemsize * int(count) > min(self.limit, self.data.size) or self.num_values < 0:
            raise ValueError(f"{count} values at byte {offset} are past the end of the file or what a header may hold")
        return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _build_tensors(self, start_offs: Any, fields: list[gguf.ReaderField]) -> None:
        self.limit = self.data.size  # the header ends here; tensors may be anywhere after it
        super()._build_tensors(start_offs, fields)


class GGUFTensor(NamedTuple):
    """One entry of the header's list of tensors.

    Attributes:
        type: name of its type, one of `TENSOR_TYPES`.
        shape: outermost dimension first, as in PyTorch; the file has the opposite order.
        begin: offset of its first byte in the file.
        end: offset one past its last byte.
        path: the file.
    """

    type: str
    shape: tuple[int, ...]
    begin: int
    end: int
    path: Path

    @property
    def format(self) -> Format | None:
        """The format that a matrix keeps if it stays quantized; None if it is dequantized or never was quantized."""
        return FORMATS.get(self.type) if len(self.shape) == 2 else None


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file: its metadata (numbers, strings, and lists of them) and its tensors.

    Attributes:
        path: the file, or any part of a split one.
        metadata: of the file, or of the first part.
        tensors: of all parts.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def blocks(self, name: str) -> UInt8[Tensor, "blocks bytes"]:
        """Read the stored bytes of a tensor, one row per quantization block.

        Raises:
            WeightFileError: if the file has shrunk since its header was read.
        """
        tensor = self.tensors[name]
        raw = np.fromfile(tensor.path, np.uint8, tensor.end - tensor.begin, offset=tensor.begin)
        if len(raw) < tensor.end - tensor.begin:
            raise WeightFileError(f"{tensor.path} shrank while it was read: download it again.")
        return torch.from_numpy(raw.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type]][1]))

    def tensor(self, name: str) -> Float[Tensor, "*shape"]:
        """Read and dequantize a tensor: its values in its shape, in float32."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(self.blocks(name).numpy(), gguf.GGMLQuantizationType[tensor.type])
        return torch.from_numpy(values).reshape(tensor.shape)

    def quantized(self, name: str) -> QuantizedTensor:
        """Read a matrix that has a format, without dequantizing it."""
        tensor = self.tensors[name]
        assert tensor.format is not None
        q, scale, offset = unpack_blocks(self.blocks(name), tensor.type)
        groups = (tensor.shape[0], -1)
        offset = None if offset is None else offset.reshape(groups)
        return QuantizedTensor(tensor.format, q.reshape(tensor.shape), scale.reshape(groups), offset)

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a metadata value of the given type.

        Raises:
            WeightFileError: if the value has another type, or is missing and there is no default.
        """
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise damaged(self.path, f"its metadata value {key!r} is {repr(value)[:80]}, not of type {kind.__name__}")
        return value


def unpack_blocks(
    blocks: UInt8[Tensor, "blocks bytes"], kind: str
) -> tuple[Int8[Tensor, "groups 32"], Float[Tensor, " groups"], Float[Tensor, " groups"] | None]:
    """Unpack numbers, a scale and an offset for each group of 32 numbers.

    The first half of a group is in the low four bits of its bytes, and the second half in the high four. In Q4_K, which
    has 8 groups in a block, it is so for each two groups. q is stored unsigned in the types of four bits; 8 is
    subtracted here, and 8 scales are added to the offset.

    Args:
        blocks: the stored bytes of a matrix.
        kind: a type in `FORMATS`.
    """

    def halves(first: int, last: int) -> Float[Tensor, "blocks numbers"]:  # of 16 bits
        return blocks[:, first:last].view(torch.float16).float()

    def nibbles(octets: Tensor, size: int) -> Int8[Tensor, "groups 32"]:
        octets = octets.unflatten(1, (-1, size))
        return torch.cat((octets & 15, octets >> 4), dim=2).reshape(-1, 32).to(torch.int8) - 8

    match kind:
        case "Q8_0":
            return blocks[:, 2:].view(torch.int8), halves(0, 2).flatten(), None
        case "Q4_0":
            return nibbles(blocks[:, 2:], 16), halves(0, 2).flatten(), None
        case "Q4_1":
            scale, low = halves(0, 4).unbind(1)
            return nibbles(blocks[:, 4:], 16), scale, low + 8 * scale
        case _:  # Q4_K: scales and minima of 6 bits in units of two numbers; the high bits of the last four lie apart
            units, packed = halves(0, 4), blocks[:, 4:16]
            first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
            scales = torch.cat((first & 63, low & 15 | first >> 6 << 4), dim=1)
            minima = torch.cat((second & 63, low >> 4 | second >> 6 << 4), dim=1)
            scale, low = (units[:, :1] * scales).flatten(), (units[:, 1:] * minima).flatten()
            return nibbles(blocks[:, 16:], 32), scale, 8 * scale - low


def unsupported(path: Path, problem: str) -> ModelLoadError:
    """Return the error for a model that this module does not know."""
    return ModelLoadError(f"{path} {problem}: use the model's folder with safetensors files, with LLM or Inference.")


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the metadata and the list of tensors of a GGUF file; no tensor is read.

    Args:
        path: the file, or any part of a split one (`name-00001-of-00003.gguf`), with all parts in its folder.

    Raises:
        WeightFileError: if the file is not a little-endian GGUF of version 2 or 3, is truncated, or contradicts itself.
        ModelLoadError: if it holds tensors of an unsupported type, or a part is missing.
    """
    first = _read_header(path)
    count, split = first.metadata.get("split.count", 1), SPLIT.search(path.name)
    if count in (0, 1):
        return first
    if split is None or int(split[2]) != count:
        name = f"name-00001-of-{repr(count)[:10]:0>5}.gguf"
        raise ModelLoadError(f"{path} is one of {repr(count)[:80]} parts: give all parts their names, such as {name}.")
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for number in range(1, count + 1):
        part_path = path.with_name(f"{path.name[: split.start()]}-{number:05}-of-{split[2]}.gguf")
        if not part_path.is_file():
            raise ModelLoadError(f"{path} needs its other parts, but there is no {part_path}: download all {count}.")
        part = first if part_path == path else _read_header(part_path)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number - 1, count):
            raise damaged(part_path, f"its metadata does not call it part {number} of {count}")
        if twice := tensors.keys() & part.tensors.keys():
            raise damaged(part_path, f"another part has its tensor {min(twice)[:80]!r}, too")
        metadata, tensors = metadata or part.metadata, tensors | dict(part.tensors)
    if metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        problem = f"all parts have {len(tensors)} tensors, not {repr(metadata['split.tensors.count'])[:80]}"
        raise damaged(path, problem)
    return GGUFFile(path, metadata, tensors)


def _read_header(path: Path) -> GGUFFile:
    try:
        reader = BoundedReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except OSError:
        raise
    except Exception as error:  # the library raises whatever numpy or an enumeration raises
        raise damaged(path, f"it cannot be parsed as GGUF of version 2 or 3 ({str(error)[:200]})") from error
    tensors: dict[str, GGUFTensor] = {}
    for found in reader.tensors:
        if (kind := found.tensor_type.name) not in TENSOR_TYPES:
            raise unsupported(path, f"has a tensor of type {kind}, not {', '.join(sorted(TENSOR_TYPES))}")
        begin, shape = int(found.data_offset), tuple(found.shape.tolist()[::-1])
        if not shape or 0 in shape:
            raise damaged(path, f"tensor {found.name[:80]!r} has the shape {shape[:8]}")
        tensors[found.name] = GGUFTensor(kind, shape, begin, begin + int(found.n_bytes), path)
    return GGUFFile(path, metadata, tensors)


# --- configuration and weights ---------------------------------------------------------------------------------------

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NAMES |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
NAMES |= {f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")}
NAMES |= {f"attn_{name}_norm": f"self_attn.{name}_norm" for name in ("q", "k")}  # Qwen3
NAMES |= {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
# By the names in the files, in which Mistral is a llama, too.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Metadata under the architecture's name: read, without effect, and without effect if it has a certain value. Any other
# key may change what the model computes.
NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
READ = {*NUMBERS.values(), "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}
IGNORED = {"vocab_size", "attention.value_length", "tensor_data_layout"}  # the first two are in the tensors' shapes
IGNORED |= {"rope.scaling.original_context_length", "rope.scaling.finetuned"}  # of rules that are refused
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "attention.causal": True}

CONTROL, USER_DEFINED = 3, 4  # token types
# Tokens at which llama.cpp ends a text, too, whatever the keys say.
END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>")
END_TOKENS = {(text, CONTROL) for text in END_TEXTS}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the `config.json` that transformers would write for this model.

    Raises:
        ModelLoadError: if the architecture, or a variant of it, is not supported, or a value is missing or impossible.
    """
    architecture = file.value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise unsupported(file.path, f"is of architecture {architecture[:80]!r}, not {' or '.join(ARCHITECTURES)}")
    prefix = f"{architecture}."
    given = {"rope.freq_base": 10000.0}
    given |= {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    for key in given.keys() - READ - IGNORED:
        if given[key] != NEUTRAL.get(key):
            change = f"sets {prefix}{key[:80]} = {repr(given[key])[:80]}"
            raise unsupported(file.path, f"{change}, which may change the computation in an unknown way")
    if "token_embd.weight" not in file.tensors:
        raise unsupported(file.path, "has no tensor token_embd.weight")
    config = {name: _shortest(given.get(key)) for name, key in NUMBERS.items()} | {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    shape = ModelConfig.from_hf(config)
    if given.get("rope.dimension_count", shape.head_dim) != shape.head_dim:
        raise unsupported(file.path, "rotates only part of each head")
    config |= {"num_key_value_heads": shape.num_key_value_heads, "head_dim": shape.head_dim}
    theta = float(config["rope_theta"])  # which a file may store as a whole number
    return config | {"rope_scaling": _rope_scaling(file, given, RopeConfig(theta, shape.head_dim))}


def _shortest(value: Any) -> Any:
    """Return for a float32 the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those that the metadata names, and the control tokens in END_TEXTS."""
    tokens, types = (file.value(f"tokenizer.ggml.{name}", list, []) for name in ("tokens", "token_type"))
    named = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [i for i, token in enumerate(zip(tokens, types, strict=False)) if token in END_TOKENS]
    return tuple(sorted({*ends, *(token_id for token_id in named if type(token_id) is int)}))


def _rope_scaling(file: GGUFFile, given: Mapping[str, Any], rope: RopeConfig) -> dict[str, Any] | None:
    # As in llama.cpp, a factor without a type is linear, and a factor of 0 is 1.
    factor = given.get("rope.scaling.factor", given.get("rope.scale_linear", 0))
    kind = given.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise unsupported(file.path, f"scales RoPE by {repr(kind)[:80]}")
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is None:
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else None
    # Llama 3.1 files store the divisor of each frequency, not the rule; the largest divisor is the rule's factor.
    if 2 * prod(divisors.shape) == rope.head_dim and factor in (0, 1):
        stored = file.tensor("rope_freqs.weight").double().flatten()
        rule = Llama3(float(stored.max()), 1.0, 4.0, original_max_position_embeddings=8192)
        plain, scaled = (inverse_frequencies(replace(rope, scaling=scaling)) for scaling in (None, rule))
        if torch.allclose((plain / scaled).double(), stored, rtol=1e-3):
            return {"rope_type": "llama3"} | asdict(rule)
    raise unsupported(file.path, "has rope_freqs that are not those of Llama 3.1")


def hf_names(file: GGUFFile) -> dict[str, str]:
    """Return for each of transformers' names of the weights the name in the file.

    Raises:
        ModelLoadError: if a tensor has an unknown name.
    """
    stored = {}
    for name in file.tensors:
        stem, _, part = name.rpartition(".")
        layer, _, short = stem.rpartition(".")
        if short in NAMES:
            stored[f"{layer}.{NAMES[short]}.{part}".removeprefix(".").replace("blk.", "model.layers.")] = name
        elif name != "rope_freqs.weight":  # which is part of the configuration
            architecture = file.value("general.architecture", str)
            raise unsupported(file.path, f"has a tensor {name[:80]!r}, unknown in a {architecture} model")
    return stored


def hf_formats(file: GGUFFile) -> dict[str, Format]:
    """Return the format of each module whose matrix can stay quantized, by transformers' names.

    Warns about matrices of other quantized types, which are dequantized.
    """
    formats, dense = {}, set()
    for name, stored in hf_names(file).items():
        tensor = file.tensors[stored]
        if tensor.format is not None:
            formats[name.removesuffix(".weight")] = tensor.format
        elif tensor.type.startswith("Q"):
            dense.add(tensor.type)
    if dense:
        kinds = f"{', '.join(sorted(dense))} are dequantized; {', '.join(sorted(FORMATS))} stay quantized"
        warnings.warn(f"{file.path}: matrices of the types {kinds}.", stacklevel=4)
    return formats


def hf_tensors(
    file: GGUFFile, config: Mapping[str, Any], *, keep_quantized: bool = False
) -> tuple[dict[str, Tensor], Callable[[str], Any]]:
    """Return the weights under transformers' names and in its layout.

    Args:
        file: the opened file.
        config: `hf_config(file)`, accepted by `ModelConfig.from_hf`.
        keep_quantized: the weights of `hf_formats(file)` are returned as QuantizedTensor.

    Returns:
        For each name, a tensor of the right shape on the meta device; and a function that reads a tensor by name.

    Raises:
        ModelLoadError: if a tensor has an unknown name.
    """
    stored = hf_names(file)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def read(name: str) -> Tensor | QuantizedTensor:
        part = name.split(".")[-2]
        num_heads = heads.get(part) if config["model_type"] == "llama" else None
        if not keep_quantized or file.tensors[stored[name]].format is None:
            tensor = file.tensor(stored[name])
            return tensor if num_heads is None else unpermute(tensor, num_heads)
        matrix = file.quantized(stored[name])
        if num_heads is None:
            return matrix
        q, scale = (unpermute(rows, num_heads) for rows in (matrix.q, matrix.scale))
        offset = None if matrix.offset is None else unpermute(matrix.offset, num_heads)
        return replace(matrix, q=q, scale=scale, offset=offset)

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
BYTES, GPT2 = (ByteLevel(add_prefix_space=False, use_regex=is_gpt2) for is_gpt2 in (False, True))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": GPT2,
    "smollm": Sequence([Digits(individual_digits=True), GPT2]),
    "llama-bpe": Sequence([Split(Regex(LLAMA3_SPLIT), "isolated"), BYTES]),
    "qwen2": Sequence([Split(Regex(LLAMA3_SPLIT.replace("{1,3}", "")), "isolated"), BYTES]),  # one digit at a time
}
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer that the metadata describes.

    Raises:
        ModelLoadError: if the tokenizer is of another kind.
        WeightFileError: if a value is missing or has the wrong type.
    """
    kind, pre = file.value("tokenizer.ggml.model", str), file.value("tokenizer.ggml.pre", str, "")
    ends_itself = file.value("tokenizer.ggml.add_eos_token", bool, False)
    if kind != "gpt2" or pre not in PRE_TOKENIZERS or ends_itself:
        known = f"'gpt2' with one of the rules {', '.join(PRE_TOKENIZERS)} and without an end token"
        raise unsupported(file.path, f"has a tokenizer of kind {kind[:80]!r} with the rule {pre[:80]!r}, not {known}")
    tokens, merges = file.value("tokenizer.ggml.tokens", list), file.value("tokenizer.ggml.merges", list)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise damaged(file.path, "its vocabulary has a token twice")
    # Llama 3 uses a whole word that is in its vocabulary even if no merges produce it.
    pairs, is_llama3 = [merge.partition(" ")[::2] for merge in merges], pre == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=is_llama3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[pre], decoders.ByteLevel()
    types = zip(tokens, file.value("tokenizer.ggml.token_type", list, []), strict=False)
    added = [(token, type_ == CONTROL) for token, type_ in types if type_ in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special) for token, is_special in added])
    options: dict[str, Any] = {}
    for name, key in SPECIAL.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            if token_id not in range(len(tokens)):
                raise damaged(file.path, f"its {key} token {repr(token_id)[:80]} is not in its vocabulary")
            options[name] = tokens[token_id]
    bos, template = options.get("bos_token"), file.value("tokenizer.chat_template", str, "")
    # Llama 3's files leave the key out, and llama.cpp begins their texts with BOS.
    if bos is not None and file.value("tokenizer.ggml.add_bos_token", bool, is_llama3):
        tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], special_tokens=[(bos, vocabulary[bos])])
    options |= {"clean_up_tokenization_spaces": False, "chat_template": template or None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
