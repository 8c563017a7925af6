"""A checkpoint fills every parameter exactly once, or is refused by the name of the tensor at fault."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mini_engine.errors import ModelLoadError
from mini_engine.models.base import CausalLM
from mini_engine.models.config import ModelConfig
from mini_engine.models.gpt2 import gpt2_weights
from mini_engine.models.registry import build_model
from mini_engine.parts import Parts
from tests.models.families import FAMILIES, our_model, their_logits, transformers_config, transformers_model, whole

TOKENS = [3, 4, 5, 6, 7]


def empty_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalLM:
    config = ModelConfig.from_hf(transformers_config(family, **changes).to_dict())
    return build_model(config, Parts(), dtype, "cpu")


def checkpoint(family: str, **changes: Any) -> dict[str, Tensor]:
    """The tensors that transformers would save: tied weights once."""
    theirs = transformers_model(family, **changes)
    tensors = dict(theirs.state_dict())
    if theirs.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


class Lazy(Mapping[str, Tensor]):
    """Tensors that are created when they are looked up; it records which were read and how many are still alive."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.reads = dict.fromkeys(tensors, 0)
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most_alive = 0

    def __getitem__(self, name: str) -> Tensor:
        self.reads[name] += 1
        tensor = self.tensors[name].clone()
        self.alive.add(tensor)
        self.most_alive = max(self.most_alive, len(self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_of_every_parameter_is_filled_once(family: str, tied: bool) -> None:
    model = empty_model(family, tie_word_embeddings=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for destination in model.destinations().values():
            destination += 1
    assert all((parameter == 1).all() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_is_read_once(family: str) -> None:
    tensors = Lazy(checkpoint(family))
    empty_model(family).load_weights(tensors, tensors.tensors)
    first, *rest = tensors.reads.values()
    assert set(rest) == {1}
    assert first >= 1  # the run-time type checker looks at the first tensor too


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_nothing_is_read_if_a_header_is_wrong(family: str) -> None:
    tensors = Lazy(checkpoint(family))
    headers = {name: tensor.to("meta") for name, tensor in tensors.tensors.items()}
    for wrong in (torch.empty(3, device="meta"), headers["model.norm.weight"].to(torch.int8)):
        with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
            empty_model(family).load_weights(tensors, headers | {"model.norm.weight": wrong})
    _, *rest = tensors.reads.values()
    assert set(rest) == {0}  # the run-time type checker looks at the first tensor


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_tensor_is_released_before_the_next_is_read(family: str) -> None:
    """A second copy of all weights would not fit where the model just fits."""
    tensors = Lazy(checkpoint(family))
    empty_model(family).load_weights(tensors)
    assert tensors.most_alive == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_twice_is_loading_once(family: str) -> None:
    theirs = transformers_model(family)
    model = our_model(theirs)
    first = whole(model, [TOKENS])[0]
    model.load_weights(theirs.state_dict())
    assert torch.equal(whole(model, [TOKENS])[0], first)


def test_weights_are_converted_to_the_dtype_of_the_model() -> None:
    model = empty_model("llama", torch.bfloat16)
    model.load_weights(checkpoint("llama"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_tensor_is_named_with_its_shape(family: str) -> None:
    for name, tensor in checkpoint(family).items():
        tensors = checkpoint(family)
        del tensors[name]
        with pytest.raises(ModelLoadError) as error:
            empty_model(family).load_weights(tensors)
        shape = list(gpt2_weights({name: tensor}).popitem()[1].shape) if family == "gpt2" else list(tensor.shape)
        assert f"{name.removeprefix('transformer.')!r}" in str(error.value)
        assert f"shape {shape}" in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(family: str) -> None:
    name = {"gpt2": "transformer.h.1.mlp.c_proj.bias"}.get(family, "model.layers.1.self_attn.o_proj.weight")
    tensors = checkpoint(family)
    right = list(tensors[name].shape)
    for wrong in ([*right[:-1], right[-1] + 1], [*right, 1], [1] * len(right), []):
        with pytest.raises(ModelLoadError) as error:
            empty_model(family).load_weights({**tensors, name: torch.zeros(wrong)})
        assert f"shape {wrong}" in str(error.value) and f"needs {right}" in str(error.value)
        assert name.removeprefix("transformer.") in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_tensor_is_named(family: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no place for 1 of .*extra\.weight"):
        empty_model(family).load_weights({**checkpoint(family), "extra.weight": torch.zeros(3)})


def test_layers_that_the_config_does_not_have_are_not_dropped() -> None:
    with pytest.raises(ModelLoadError, match=r"no place for 9.*model\.layers\.2.*num_hidden_layers"):
        empty_model("llama", num_hidden_layers=2).load_weights(checkpoint("llama"))


def test_biases_that_the_config_does_not_have_are_not_dropped() -> None:
    with pytest.raises(ModelLoadError, match=r"bias.*attention_bias"):
        empty_model("llama").load_weights(checkpoint("llama", attention_bias=True))


def test_quantised_numbers_are_not_taken_for_weights() -> None:
    tensors = checkpoint("llama")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        quantised = tensors["model.norm.weight"].to(dtype)
        with pytest.raises(ModelLoadError, match=r"model\.norm\.weight.*scales"):
            empty_model("llama").load_weights({**tensors, "model.norm.weight": quantised})


@pytest.mark.parametrize("family", FAMILIES)
def test_tied_output_weights_may_be_repeated_but_not_differ(family: str) -> None:
    tensors = checkpoint(family, tie_word_embeddings=True)
    embedding = tensors["transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"]
    empty_model(family, tie_word_embeddings=True).load_weights({**tensors, "lm_head.weight": embedding})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*tie_word_embeddings to false"):
        empty_model(family, tie_word_embeddings=True).load_weights({**tensors, "lm_head.weight": embedding + 1})
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight.*shape \[3\]"):
        empty_model(family, tie_word_embeddings=True).load_weights({**tensors, "lm_head.weight": torch.zeros(3)})


def test_rotary_frequencies_in_old_checkpoints_are_ignored() -> None:
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.zeros(4) for layer in range(3)}
    theirs = transformers_model("llama")
    logits = whole(our_model(theirs, {**theirs.state_dict(), **extra}), [TOKENS])[0]
    torch.testing.assert_close(logits, their_logits(theirs, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("buffers", [True, False])
def test_gpt2_loads_with_and_without_prefix_and_mask_buffers(prefix: str, buffers: bool) -> None:
    theirs = transformers_model("gpt2")
    tensors = {prefix + name.removeprefix("transformer."): tensor for name, tensor in checkpoint("gpt2").items()}
    if buffers:
        for layer in range(3):
            tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
            tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    logits = whole(our_model(theirs, tensors), [TOKENS])[0]
    torch.testing.assert_close(logits, their_logits(theirs, TOKENS), rtol=0, atol=1e-4)


def test_gpt2_with_a_prefix_that_is_skipped_does_not_load() -> None:
    """A weight map that drops what it does not know would leave the model random; it must not "work"."""
    parts = replace(Parts(), gpt2_weights=lambda tensors: {n: t for n, t in tensors.items() if n.startswith("h.")})
    model = build_model(ModelConfig.from_hf(transformers_config("gpt2").to_dict()), parts, torch.float32, "cpu")
    with pytest.raises(ModelLoadError, match=r"no tensor 'wte\.weight'"):
        model.load_weights(checkpoint("gpt2"))


def test_gpt2_square_weights_are_transposed_too() -> None:
    """c_attn would fail because of its shape; the square attn.c_proj would silently load untransposed."""
    weight = torch.arange(16.0).reshape(4, 4)
    assert torch.equal(gpt2_weights({"h.0.attn.c_proj.weight": weight})["h.0.attn.c_proj.weight"], weight.T)


def test_gpt2_tensors_with_and_without_prefix_at_once_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"'wte\.weight' with and without"):
        gpt2_weights({"wte.weight": torch.zeros(2, 2), "transformer.wte.weight": torch.zeros(2, 2)})


def test_a_model_that_does_not_fit_is_a_typed_error_and_changes_nothing() -> None:
    # Together more bytes than a process has addresses: some systems promise memory that they do not have.
    sizes = {"num_hidden_layers": 512, "hidden_size": 2**17, "intermediate_size": 2**17, "head_dim": 128}
    config = ModelConfig.from_hf(transformers_config("llama", **sizes).to_dict())
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM in torch\.float64 cannot be placed on cpu"):
        build_model(config, Parts(), torch.float64, "cpu")
    assert torch.get_default_dtype() == torch.float32


def test_the_reader_s_parts_are_the_ones_that_run() -> None:
    calls = dict.fromkeys(("rms_norm", "qk_norm", "gated_mlp", "apply_rope"), 0)

    def counted(name: str) -> Any:
        part = getattr(Parts(), name)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            calls[name] += 1
            return part(*args, **kwargs)

        return call

    theirs = transformers_model("qwen3")
    model = our_model(theirs, parts=replace(Parts(), **{name: counted(name) for name in calls}))
    whole(model, [TOKENS])
    # Three layers with two norms and one call for the heads', and the last norm; queries and keys rotate in one call.
    assert calls == {"rms_norm": 7, "qk_norm": 3, "gated_mlp": 3, "apply_rope": 3}
