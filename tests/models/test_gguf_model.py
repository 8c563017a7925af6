"""GGUF files written as llama.cpp's converter writes them give the model that transformers holds."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mini_engine.models.gguf_file import read_gguf
from mini_engine.models.gguf_model import build_tokenizer, hf_config, unpermute
from mini_engine.models.weights import load_model, load_tokenizer, open_checkpoint
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.rope import Llama3, inverse_frequencies
from tests.models.families import transformers_model

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gpt2": gguf.MODEL_ARCH.GPT2,
}
Q = gguf.GGMLQuantizationType


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key weights: rows that rotate together become neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    theirs: Any, family: str, path: Path, kind: Q | None = None, rope_freqs: Any = None, **metadata: Any
) -> Path:
    """Write a model of transformers: names by the gguf library, matrices quantised to `kind`."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, family)
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if family == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family in ("qwen3", "gemma2"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)

    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], layers)
    tied = config.tie_word_embeddings
    for name, tensor in theirs.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weight = tensor.float().numpy()
        if family == "llama" and ".q_proj." in name:
            weight = permute(weight, config.num_attention_heads)
        elif family == "llama" and ".k_proj." in name:
            weight = permute(weight, config.num_key_value_heads)
        elif family == "gemma2" and name.endswith("norm.weight"):
            weight = weight + 1
        elif family == "gpt2" and name.endswith(("attn.weight", "proj.weight", "fc.weight")):
            weight = weight.T
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        weight = np.ascontiguousarray(weight)
        if kind is not None and weight.ndim == 2:
            writer.add_tensor(new_name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new_name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("llama", True),
        ("qwen3", False),
        ("qwen3", True),
        ("gemma2", True),
        ("gpt2", False),
        ("gpt2", True),
    ],
)
def test_configuration_and_tensors_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"query_pre_attn_scalar": 16} if family == "gemma2" else {}  # what llama.cpp assumes
    theirs = transformers_model(family, tie_word_embeddings=tied, **changes)
    checkpoint = open_checkpoint(write_gguf(theirs, family, tmp_path / "model.gguf"))
    expected = theirs.config.to_dict() | {"eos_token_id": None, "architectures": [type(theirs).__name__]}
    assert checkpoint.config == ModelConfig.from_hf(expected)
    assert checkpoint.dtype == torch.float32 and checkpoint.eos_token_ids == ()

    weights = theirs.state_dict()
    if tied:
        del weights["lm_head.weight"]
    assert checkpoint.tensors.keys() == weights.keys()
    for name, weight in weights.items():
        # A norm weight of Gemma 2 was stored as 1 + w, which rounds.
        torch.testing.assert_close(checkpoint.tensors[name], weight, rtol=0, atol=2e-7 if family == "gemma2" else 0)
        assert checkpoint.tensors.entries[name].shape == weight.shape  # type: ignore[attr-defined]
    load_model(checkpoint, Parts(), torch.float32)


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0, Q.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantised_weights_are_those_that_transformers_reads(family: str, kind: Q, tmp_path: Path) -> None:
    # transformers 5 does not read the head size from a file and takes 128 for Qwen3.
    changes: dict[str, Any] = {"head_dim": 128} if family == "qwen3" else {}
    theirs = transformers_model(family, hidden_size=64, intermediate_size=64, vocab_size=64, **changes)
    path = write_gguf(theirs, family, tmp_path / "model.gguf", kind, token_list=["x"] * 64)
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    checkpoint = open_checkpoint(path)
    assert checkpoint.dtype == (torch.float16 if kind is Q.F16 else torch.bfloat16)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor.float(), oracle[name]), name


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_unpermute_undoes_the_converter(heads: int, pairs: int, columns: int) -> None:
    weight = torch.randn(heads * 2 * pairs, columns)
    assert torch.equal(unpermute(torch.from_numpy(permute(weight.numpy(), heads)), heads), weight)
    assert torch.equal(unpermute(torch.from_numpy(permute(weight[:, 0].numpy(), heads)), heads), weight[:, 0])


def test_linear_scaling_is_read_and_another_is_refused(tmp_path: Path) -> None:
    theirs = transformers_model("llama")
    linear: dict[str, Any] = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    config = hf_config(read_gguf(write_gguf(theirs, "llama", tmp_path / "a.gguf", **linear)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn: dict[str, Any] = {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}
    with pytest.raises(ModelLoadError, match="yarn"):
        open_checkpoint(write_gguf(theirs, "llama", tmp_path / "b.gguf", **yarn))


def llama3_factors(head_dim: int, theta: float, factor: float, low: float = 1.0) -> np.ndarray:
    """What each frequency is divided by, as llama.cpp's converter computes it."""
    divisors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / low:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - low) / (4.0 - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_recovered_from_its_divisors(factor: float, tmp_path: Path) -> None:
    """Long contexts go wrong without it, and no metadata says it: only the tensor rope_freqs does."""
    theirs = transformers_model(
        "llama", hidden_size=256, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}
    )
    factors = llama3_factors(64, 500000.0, factor)
    checkpoint = open_checkpoint(write_gguf(theirs, "llama", tmp_path / "model.gguf", rope_freqs=factors))
    rope = checkpoint.config.rope
    assert rope is not None and rope.scaling == Llama3(factor, 1.0, 4.0, 8192)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(inverse_frequencies(rope), plain / torch.from_numpy(factors), rtol=1e-5, atol=0)
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_divisors_of_another_rule_are_refused(tmp_path: Path) -> None:
    theirs = transformers_model("llama", hidden_size=256)
    for factors in (np.linspace(1, 8, 32), np.ones(3)):
        path = write_gguf(theirs, "llama", tmp_path / f"{len(factors)}.gguf", rope_freqs=factors)
        with pytest.raises(ModelLoadError, match="rope_freqs"):
            open_checkpoint(path)


TEXTS = [
    "Hello world, it's 12345 and we'll see",
    "  two  spaces   7  and\ttabs\n\n\nlines\r\n ",
    "naïve café 日本語 🙂🙃 \u200b\u00a0",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x",
    "½ Ⅻ ²³ ٣٤",
    "CamelCase snake_case DON'T",
    "",
    " ",
]


def write_tokenizer(path: Path, model: str, tokens: list[str], types: list[int], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in metadata.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def our_tokenizer(path: Path) -> Any:
    tokenizer, options = build_tokenizer(read_gguf(path))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


@pytest.fixture(scope="module")
def vocabulary(embedded: Path) -> tuple[list[str], list[str]]:
    """The first 3,000 tokens of the embedded model, and the merges that lead to them."""
    model = json.loads((embedded / "tokenizer.json").read_text())["model"]
    tokens = list(model["vocab"])[:3000]
    merges = [(left, right) for left, right in model["merges"] if left + right in tokens]
    return tokens, [f"{left} {right}" for left, right in merges]


knows_bos = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers before 5.23 does not see that a GGUF file asks for a BOS token",
)


@knows_bos
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_byte_level_tokenizers_are_those_of_transformers(
    pre: str, vocabulary: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    tokens, merges = vocabulary
    types = [3] * 17 + [1] * (len(tokens) - 17)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "pad_token_id": 2}
    path = write_tokenizer(
        tmp_path / "t.gguf", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, add_bos_token=True, **ids
    )
    ours, theirs = our_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids, skip_special_tokens=False).startswith("<|im_start|>")
    assert ours.special_tokens_map == theirs.special_tokens_map


@knows_bos
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_sentencepiece_tokenizers_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    pieces = [
        "▁",
        "▁t",
        "he",
        "▁the",
        "l",
        "o",
        "ll",
        "llo",
        "▁he",
        "▁hello",
        "w",
        "r",
        "ld",
        "wor",
        "▁world",
        "h",
        "e",
    ]
    pieces += ["t", "d", "or", "▁wor", "s", "a", "n", "é", "日", "▁▁" if architecture == "llama" else "  "]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    path = write_tokenizer(
        tmp_path / "t.gguf", "llama", tokens, types, token_scores=scores, architecture=architecture, **ids
    )
    ours, theirs = our_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ["hello the world", "the  hello", "café 日本 🙂", "world</s>", "tell", "hello\nthe"]:
        assert ours(text).input_ids == theirs(text).input_ids, text
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids), text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model": "bert"}, "bert"),
        ({"tokenizer_pre": "unheard-of"}, "unheard-of"),
        ({"tokens": ["a", "a", "b"]}, "twice"),
        ({"tokens": ["a", "b", "c" * 1000]}, "too long"),
        ({"eos_token_id": 3}, "eos token 3"),
        ({"model": "llama", "token_merges": None}, "scores"),
        ({"token_merges": ["a z"]}, "tokenizer"),
        ({"token_merges": ["ab"]}, "tokenizer"),
        ({"chat_template": "{% for"}, None),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(change: dict[str, Any], problem: str | None, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": "gpt2", "tokens": ["a", "b", "ab"], "types": [1, 1, 1], "tokenizer_pre": "gpt-2"}
    given |= {"token_merges": ["a b"], "eos_token_id": 2} | change
    path = write_tokenizer(tmp_path / "tokenizer.gguf", **given)
    checkpoint = open_checkpoint(write_gguf(transformers_model("llama"), "llama", tmp_path / "model.gguf"))
    checkpoint = replace(checkpoint, build_tokenizer=lambda: our_tokenizer(path))
    if problem is None:  # a broken template is found when it is used
        assert load_tokenizer(checkpoint).chat_template == "{% for"
    else:
        with pytest.raises(ModelLoadError, match=problem):
            load_tokenizer(checkpoint)


def test_a_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(transformers_model("llama"), "llama", tmp_path / "model.gguf"))
    with pytest.raises(WeightFileError, match=r"tokenizer\.ggml\.model"):
        load_tokenizer(checkpoint)


def test_an_unknown_architecture_names_those_that_run(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.gguf", "gpt2", ["a"], [1], architecture="mamba")
    with pytest.raises(ModelLoadError, match=r"mamba.*llama, qwen3, gemma2, gpt2"):
        open_checkpoint(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_damaged_metadata_loads_or_is_refused(family: str, tmp_path: Path, data: st.DataObject) -> None:
    """Any metadata value replaced by any other of its size, any name changed by a letter: a model or a typed error."""
    path = tmp_path / "model.gguf"
    if not path.exists():
        path = write_gguf(transformers_model(family, tie_word_embeddings=True), family, path, token_list=["a", "b"])
    content = bytearray(path.read_bytes())
    end = content.find(b"blk.1.")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, end))
        content[place] = data.draw(st.sampled_from([0, 1, 2, 4, 8, 32, 97, 127, 128, 255]))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    with contextlib.suppress(ModelLoadError):
        load_model(open_checkpoint(damaged), Parts(), torch.float32)
