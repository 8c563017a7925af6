"""The base class of all model families: tokens to hidden states, hidden states to logits, weights from a checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.errors import ModelLoadError
from mini_engine.models.config import ModelConfig
from mini_engine.models.layers import DecoderLayer, ModelParts, empty_weight, with_prefix
from mini_engine.models.linear import linear


@runtime_checkable
class Limits(Protocol):
    """The fields of a model's configuration that the engine needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


@runtime_checkable
class LanguageModel(Protocol):
    """The model interface that the engine needs: `CausalLM`, and `HFModel` for transformers models.

    The methods are described in `CausalLM`.

    Attributes:
        config: the model's limits.
        attention_specs: one for each layer, in order.
        dtype: of hidden states, and of keys and values unless a layer's spec sets `kv_dtype`.
        device: where the model runs.
    """

    @property
    def config(self) -> Limits: ...

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]: ...

    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]: ...


class CausalLM(nn.Module):
    """A decoder-only language model over a ragged batch of tokens: embeddings, layers, LM head.

    A family adds its layers and `forward`. Build a model with `models.registry.build_model`, which sets dtype and
    device; its parameters have no values before `load_weights`.
    """

    # The names in the checkpoint.
    embedding_name, layers_name, norm_name = "model.embed_tokens.weight", "model.layers", "model.norm.weight"

    layers: nn.ModuleList  # set by the family, of `DecoderLayer`s
    norm: nn.Parameter  # set by the family: the weight of the final norm

    def __init__(self, config: ModelConfig, parts: ModelParts, attention_specs: tuple[AttentionSpec, ...]) -> None:
        super().__init__()
        self.config, self.parts, self.attention_specs = config, parts, attention_specs
        self.embed_tokens = empty_weight(config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else empty_weight(config.vocab_size, config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and the hidden states."""
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed_tokens.device

    @abstractmethod
    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        """Run the layers, the final norm included.

        Args:
            token_ids: [T] tokens of all sequences, one sequence after the other.
            positions: [T] position of each token in its own sequence, from 0.
            attend: called once in each layer as `attend(layer, q, k, v)`; stores the keys and values, and returns the
                attention of each query over its own sequence.
        """

    def destinations(self) -> dict[str, Tensor]:
        """Map the name of each tensor of the checkpoint to the parameter (or rows of a fused one) that it fills."""
        found: dict[str, Tensor] = {self.embedding_name: self.embed_tokens, self.norm_name: self.norm}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= with_prefix(f"{self.layers_name}.{index}.", layer.destinations())
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = self.lm_head
        return found

    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        """Return one logit per vocabulary entry, in float32 (float64 for a float64 model)."""
        logits = linear(hidden, self.lm_head)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor], headers: Mapping[str, Tensor] | None = None) -> None:
        """Fill every parameter from a checkpoint, one tensor after the other.

        Args:
            tensors: the checkpoint under transformers' names; each look-up may read a tensor from a file.
            headers: tensors with the same names, shapes and dtypes that cost nothing to look up, such as tensors on
                the meta device; default `tensors`. All of them are checked before the first tensor is read.

        Raises:
            ModelLoadError: if a tensor is missing, unknown, wrongly shaped, or not of floating point.
        """
        destinations, tied_head = self.destinations(), {}
        headers = tensors if headers is None else headers
        names = dict.fromkeys(headers)  # asking a lazy mapping whether it has a name could read the tensor
        if self.config.tie_word_embeddings:  # a checkpoint may repeat the tied weights
            tied_head["lm_head.weight"] = self.embed_tokens
        missing = [name for name in destinations if name not in names]
        if missing:
            raise ModelLoadError(
                f"the checkpoint has no tensor {missing[0]!r}, which {self.config.architecture} needs with shape "
                f"{list(destinations[missing[0]].shape)} ({len(missing)} are missing in all); its tensors are named "
                f"{_some(list(names))}. Check that config.json and the weights belong together, and that the download "
                "is complete"
            )
        known = destinations.keys() | tied_head.keys()
        # Old checkpoints contain the rotary frequencies, which the engine computes from the configuration.
        unexpected = [name for name in names if name not in known and not name.endswith(".rotary_emb.inv_freq")]
        if unexpected:
            raise ModelLoadError(
                f"{self.config.architecture} has no place for {len(unexpected)} of the checkpoint's tensors: "
                f"{_some(unexpected)}. Check that config.json and the weights belong together: num_hidden_layers, "
                "attention_bias, tie_word_embeddings"
            )
        for name, destination in (destinations | tied_head).items():
            if name in names:
                self._check(name, headers[name], destination)
        for name, destination in destinations.items():
            destination.copy_(tensors[name])
        for name, destination in tied_head.items():
            repeated = tensors[name] if name in names else destination
            if not torch.equal(repeated.to(destination), destination):
                raise ModelLoadError(
                    f"config.json ties the LM head to the embeddings, but {name!r} differs from "
                    f"{self.embedding_name!r}: set tie_word_embeddings to false in config.json"
                )

    def _check(self, name: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape:
            raise ModelLoadError(
                f"tensor {name!r} has shape {list(found.shape)}, but {self.config.architecture} with this config.json "
                f"needs {list(expected.shape)}: check that config.json and the weights belong together"
            )
        if not found.is_floating_point() or found.element_size() < 2:
            raise ModelLoadError(
                f"tensor {name!r} is stored as {found.dtype}, which means nothing without its scales: "
                "use a checkpoint in float32, float16 or bfloat16"
            )


def _some(names: list[str]) -> str:
    """Format the first few names for a message."""
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
