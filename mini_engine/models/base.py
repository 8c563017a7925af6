"""The base class of all model families: hidden states of tokens, logits, and weights from a checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mini_engine.attention.mla import UpProjections
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.models.config import ModelConfig, ModelLimits
from mini_engine.models.layers import DecoderLayer, ModelParts, attention_spec, with_prefix
from mini_engine.models.weights import Destination, Linear, Projection, QuantizedLinear, empty_weight, projection
from mini_engine.quantization import QuantizedTensor

Stored = Tensor | QuantizedTensor


class LanguageModel(nn.Module):
    """The model interface that the engine needs: `CausalLM`, and `HFModel` for transformers models.

    Attributes:
        config: the model's limits.
        attention_specs: one for each layer, in order.
        identity: digest of the layers and of the weights as they were loaded; empty before `transform.prepare_weights`.
        kv_scales: (k, v) of layers for which the checkpoint has scales of FP8 keys and values.
    """

    config: ModelLimits
    attention_specs: tuple[AttentionSpec, ...]
    identity: str = ""
    kv_scales: Mapping[int, tuple[float, float]] = MappingProxyType({})

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states, and of keys and values unless a layer's spec sets `kv_dtype`."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def sinks(self) -> Mapping[int, Float[Tensor, " Hq"]]:
        """The sinks of each layer whose spec has `has_sinks`, by layer (`attention.state.with_sinks`)."""
        return {}

    @property
    def up_projections(self) -> Mapping[int, UpProjections]:
        """The matrices of each layer whose spec has `mla`, by layer (`attention.mla`)."""
        return {}

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, whatever their format."""
        quantized = (own for own in self.modules() if isinstance(own, QuantizedLinear))
        return sum(weight.numel() for weight in self.parameters()) + sum(own.num_numbers for own in quantized)

    @abstractmethod
    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        """Run the layers and the final norm.

        Args:
            token_ids: [T] tokens of all sequences, laid end to end.
            positions: [T] position of each token in its own sequence, from 0.
            attend: called once in each layer as `attend(layer, q, k, v)`, or with another entry in place of the keys
                and values; stores the entry, and returns the attention of each query over its own sequence.
        """

    @abstractmethod
    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        """Return one logit per vocabulary entry, in float32 (float64 for a float64 model)."""


class CausalLM(LanguageModel):
    """A decoder-only language model over a ragged batch of tokens: embeddings, layers, LM head.

    A family adds the class of its layers and `forward`. Build a model with `models.registry.build_model`, which sets
    dtype and device; its parameters have no values before `load_weights`.
    """

    # The names in the checkpoint.
    embedding_name, layers_name, norm_name = "model.embed_tokens.weight", "model.layers", "model.norm.weight"
    layer_class: type[DecoderLayer]
    source = "config.json"  # where the configuration comes from, for messages

    def __init__(self, config: ModelConfig, parts: ModelParts) -> None:
        super().__init__()
        self.config: ModelConfig = config
        self.parts = parts
        self.embed_tokens = empty_weight(config.vocab_size, config.hidden_size)
        head = {"lm_head": config.vocab_size}
        self.lm_head: Projection
        if config.tie_word_embeddings and "lm_head" not in config.formats:
            self.lm_head = Linear(config.hidden_size, head, weight=self.embed_tokens)
        else:
            self.lm_head = projection(config.formats, "", config.hidden_size, head)
        scale = (config.query_pre_attn_scalar or config.head_dim) ** -0.5 if config.scale_attn_weights else 1.0
        if config.rope is not None:
            scale *= config.rope.score_factor
        by_layer = config.scale_attn_by_inverse_layer_idx
        self.attention_specs = tuple(
            attention_spec(config, layer, scale / (layer + 1) if by_layer else scale)
            for layer in range(config.num_hidden_layers)
        )
        self.layers = nn.ModuleList(self.build_layer(config, spec, parts) for spec in self.attention_specs)
        self.norm = empty_weight(config.hidden_size)

    def build_layer(self, config: ModelConfig, spec: AttentionSpec, parts: ModelParts) -> DecoderLayer:
        """Build a layer, for families whose layers differ in more than their `spec`."""
        return self.layer_class(config, spec, parts)

    def destinations_of(self, names: Container[str]) -> dict[str, Destination]:
        """Return `destinations` for a checkpoint with these names, for families with several forms of checkpoints."""
        return self.destinations()

    def destinations(self) -> dict[str, Destination]:
        """Map the name of each tensor of the checkpoint to the parameter (or rows of a fused one) that it fills."""
        found: dict[str, Destination] = {self.embedding_name: self.embed_tokens, self.norm_name: self.norm}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= with_prefix(f"{self.layers_name}.{index}.", layer.destinations())
        if not self.config.tie_word_embeddings:
            found |= self.lm_head.destinations()
        return found

    def embed(self, token_ids: Int[Tensor, " T"]) -> Float[Tensor, "T hidden"]:
        """Look up the embedding of each token."""
        return F.embedding(token_ids, self.embed_tokens)

    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        if isinstance(self.lm_head, Linear) and hidden.is_cuda and hidden.dtype.itemsize == 2:
            return torch.mm(hidden, self.lm_head.weight.T, out_dtype=torch.float32)  # keep the sums in float32
        logits = self.lm_head(hidden)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Stored], headers: Mapping[str, Tensor] | None = None) -> None:
        """Fill every parameter from a checkpoint, one tensor at a time.

        Args:
            tensors: the checkpoint under transformers' names, its matrices quantized or not; each look-up may read a
                tensor from a file.
            headers: tensors with the same names, shapes and dtypes that cost nothing to look up, such as tensors on
                the meta device; default `tensors`. All of them are checked before the first tensor is read.

        Raises:
            ModelLoadError: if a tensor is missing or unknown, or has the wrong shape or no floating-point dtype.
        """
        self.identity = ""
        shapes: Mapping[str, Any] = tensors if headers is None else headers
        destinations = self.destinations_of(shapes)
        architecture, remedy = self.config.architecture, f"check that {self.source} and the weights belong together"
        # Old checkpoints contain the rotary frequencies, which the engine computes from the configuration.
        found = dict.fromkeys(name for name in shapes if not name.endswith(".rotary_emb.inv_freq"))
        if missing := [name for name in destinations if name not in found]:
            need = f"{architecture} needs with shape {list(destinations[missing[0]].shape)}"
            has = ", ".join(repr(name[:80]) for name in list(found)[:3])
            raise ModelLoadError(f"the checkpoint has no tensor {missing[0]!r}, which {need}, but {has}...: {remedy}")
        known = {"lm_head.weight": self.embed_tokens} | destinations  # a checkpoint may repeat tied weights
        if unexpected := [name for name in found if name not in known]:
            raise ModelLoadError(
                f"{architecture} has no place for {len(unexpected)} of the checkpoint's tensors, such as "
                f"{unexpected[0][:80]!r}: {remedy} (num_hidden_layers, attention_bias, tie_word_embeddings)"
            )
        for name in found:
            _check(name, shapes[name], list(known[name].shape), f"{architecture} with this {self.source}", remedy)
        for name, destination in destinations.items():
            _fill(destination, tensors[name])
        if self.config.tie_word_embeddings and not isinstance(self.lm_head, Linear):
            self.lm_head.destinations()["lm_head.weight"].copy_(self.embed_tokens)
        for name in found.keys() - destinations.keys():
            if not torch.equal(_dense(tensors[name]).to(self.embed_tokens), self.embed_tokens):
                raise ModelLoadError(
                    f"{self.source} ties the LM head to the embeddings, but {name!r} differs from "
                    f"{self.embedding_name!r}: set tie_word_embeddings to false in {self.source}"
                )


def _fill(destination: Destination, stored: Stored) -> None:
    destination.copy_(_dense(stored) if isinstance(destination, Tensor) else stored)


def _dense(stored: Stored) -> Tensor:
    return stored.dequantize() if isinstance(stored, QuantizedTensor) else stored


def _check(name: str, tensor: Tensor, shape: list[int], model: str, remedy: str) -> None:
    if list(tensor.shape) != shape:
        found = f"tensor {name!r} has shape {list(tensor.shape)}"
        raise ModelLoadError(f"{found}, but {model} needs {shape}: {remedy}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelLoadError(
            f"tensor {name!r} is stored as {tensor.dtype}, which means nothing without its scales: "
            "use a checkpoint in float32, float16 or bfloat16"
        )
