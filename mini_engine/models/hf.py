"""`HFModel`: a loaded transformers model as a `LanguageModel`.

No modeling code is copied. transformers looks up a layer's attention function by name (its `AttentionInterface`). The
function registered here passes a layer's queries, keys and values to the engine's `attend`. Everything else, from the
embeddings to the logits, is the model's own code.

The caller's model is unchanged: the engine runs a second module tree that shares the weights and has its own
configuration. The caller may keep using the model, even between the engine's steps. Explained in chapter 07.
"""

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.utils import ModelOutput

from mini_engine.attention.naive import attention_mask
from mini_engine.attention.spec import Attend, AttentionSpec
from mini_engine.errors import ConfigError
from mini_engine.models.base import LanguageModel
from mini_engine.models.config import ModelLimits

logger = logging.getLogger(__name__)

# Keyword arguments that an attention function of transformers may ignore.
_HARMLESS = {"position_ids", "is_causal", "dropout"}

# Positions that the probe's mask assumes: some adjacent, and some far enough apart to reveal any window.
_PROBE_POSITIONS = torch.tensor([*range(8), *(2**power for power in range(3, 21))])


def _attention(
    module: nn.Module,
    query: Float[Tensor, "1 Hq T D"],
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Callable[..., Float[Tensor, "1 T Hq D"]] | None = None,
    **asked: object,
) -> tuple[Float[Tensor, "1 T Hq D"], None]:
    """The attention function of every layer. Layers pass on keyword arguments that they do not know, like `attend`."""
    if attend is None:
        raise _refused("its layers do not pass keyword arguments on to their attention")
    return attend(module, query, key, value, attention_mask, **asked), None


def _probe_mask(*, mask_function: Callable[..., Tensor], **how: Any) -> Bool[Tensor, "1 1 T T"] | None:
    """Build a layer's mask between tokens at `_PROBE_POSITIONS`, even if it is plainly causal."""

    def spread(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        positions = _PROBE_POSITIONS.to(q_idx.device)
        return mask_function(b, h, positions[q_idx], positions[kv_idx])

    return sdpa_mask(mask_function=spread, **how | {"allow_is_causal_skip": False})


# transformers builds no mask for a name without a mask function, so ordinary attention under such a name is silently
# not causal. The engine's steps need no mask: its attention knows each token's sequence and position, and building a
# mask would cost T x T numbers and a wait for the device. The probe compares the mask with the one the engine applies.
_STEP, _PROBE = "mini_engine", "mini_engine_probe"
AttentionInterface.register(_STEP, _attention)
AttentionInterface.register(_PROBE, _attention)
AttentionMaskInterface.register(_PROBE, _probe_mask)


def _refused(why: str, remedy: str = "use the model's own generate() for it") -> ConfigError:
    return ConfigError(f"this model cannot run on the engine's attention: {why}; {remedy}")


class _GivenHidden(nn.Module):
    """Stand in for the decoder layers: return `inputs_embeds` unchanged as `last_hidden_state`.

    The model's own LM head can then be applied to given hidden states.
    """

    def __init__(self, form: type[ModelOutput]) -> None:
        super().__init__()
        self._form = form

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> ModelOutput:
        return self._form(last_hidden_state=inputs_embeds)


class HFModel(LanguageModel):
    """A causal language model of transformers as a `LanguageModel`: ragged tokens in, `attend` for attention.

    Args:
        model: the loaded model, in evaluation mode. It is not changed; its weights are shared, not copied.

    Attributes:
        eos_token_ids: tokens at which the model's own `generate` ends.
        limit: why sequences are shorter than the checkpoint allows; empty if they are not.
        attention_specs: one for each layer, recorded from a probe run.

    Raises:
        ConfigError: if the model's attention cannot be replaced, or needs a feature that the engine does not have.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"the model is a {type(model).__name__}; give it as AutoModelForCausalLM.from_pretrained returns it, "
                "before torch.compile or an adapter wraps it"
            )
        _check_kind(model)
        end = model.generation_config.eos_token_id if model.generation_config else None
        self.eos_token_ids = frozenset([end] if isinstance(end, int) else end or ())
        text_config = model.config.get_text_config()
        longest = _longest_sequence(text_config)
        self.config = ModelLimits(text_config.vocab_size, longest)
        self.limit = ""
        if longest < text_config.max_position_embeddings:
            self.limit = (
                f"sequences end at {longest} tokens, not at {text_config.max_position_embeddings} as the model's own: "
                "transformers chooses the frequencies of longrope by the longest sequence of a batch, so longer ones "
                "would change their neighbors"
            )
            logger.warning("%s", self.limit)
        # Copy every module and the configuration, and share every weight.
        head = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self.body: nn.Module = head.base_model
        self._specs: dict[nn.Module, AttentionSpec] = {}
        self._window: int | None = getattr(text_config, "sliding_window", None)
        # Run a few tokens through the model and record the attention of every layer.
        num_tokens = min(len(_PROBE_POSITIONS), self.config.vocab_size, self.config.max_position_embeddings)
        positions = torch.arange(num_tokens, device=self.device)
        with torch.no_grad():
            _attend_by(head, _PROBE)
            output = self._run(positions, positions, self._note)
            if len(self._specs) != text_config.num_hidden_layers:
                layers = f"{len(self._specs)} of its {text_config.num_hidden_layers} layers"
                raise _refused(f"only {layers} attend through transformers' interface")
            _attend_by(head, _STEP)
            setattr(head, head.base_model_prefix, _GivenHidden(type(output)))
            self.head: nn.Module = head
            try:
                self.compute_logits(output.last_hidden_state[0])
            except (AttributeError, TypeError) as error:
                raise _refused(f"its logits cannot be computed apart from its layers ({error})") from error
        self.attention_specs = tuple(self._specs.values())

    def forward(
        self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Attend
    ) -> Float[Tensor, "T hidden"]:
        def attend_in(module: nn.Module, *tensors: Tensor | None, **_: object) -> Float[Tensor, "1 T Hq D"]:
            q, k, v = (x[0].transpose(0, 1) for x in tensors[:3] if x is not None)
            return attend(self._specs[module].layer, q, k, v)[None]

        return self._run(token_ids, positions, attend_in).last_hidden_state[0]

    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        """Apply the model's own LM head, including any changes that it makes to the logits."""
        logits = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _run(self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], attend: Callable[..., Tensor]) -> Any:
        """Run the tokens as one sequence, with `attend` as the attention of every layer."""
        return self.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attend=attend)

    def _note(
        self,
        module: nn.Module,
        query: Float[Tensor, "1 Hq T D"],
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: object,
    ) -> Float[Tensor, "1 T Hq D"]:
        """Record a layer's attention as an `AttentionSpec`, or refuse it."""
        layer, num_qo_heads, num_kv_heads, head_dim = len(self._specs), query.shape[1], key.shape[1], query.shape[3]
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        if module in self._specs:
            raise _refused("one of its layers attends more than once in a step")
        if key.shape[3] != head_dim or value.shape != key.shape or num_qo_heads % num_kv_heads:
            shapes = ", ".join(str(list(x.shape[1:])) for x in (query, key, value))
            raise _refused(f"the heads of its queries, keys and values do not match ({shapes})")
        unknown = sorted(n for n, x in others.items() if x is not None and x is not False and n not in _HARMLESS)
        if unknown:
            raise _refused(f"its attention takes {', '.join(unknown)}, which the engine's attention does not implement")
        positions = _PROBE_POSITIONS[: query.shape[2]].to(query.device)
        # Some layers express their window only in the mask.
        for window in (sliding_window, self._window):
            visible = attention_mask(positions, positions, window)
            if mask is not None and mask.dtype == visible.dtype and torch.equal(mask[0, 0], visible):
                break
        else:
            raise _refused("its attention is not causal, or its mask is not that of a sliding window")
        self._specs[module] = AttentionSpec(
            layer, num_qo_heads, num_kv_heads, head_dim, scale, window=window, softcap=softcap
        )
        return torch.zeros_like(query).transpose(1, 2)


def _check_kind(model: PreTrainedModel) -> None:
    """Raise ConfigError if the model's class or configuration shows that the engine cannot run it."""
    if model.config.is_encoder_decoder:
        raise _refused("it is an encoder-decoder model")
    if model.get_output_embeddings() is None:
        raise _refused(f"{type(model).__name__} gives no logits", "load the model with AutoModelForCausalLM")
    if model.base_model is model:
        raise _refused("its layers cannot be told from its output layer")
    if model.training:
        raise _refused("it is in training mode, where dropout is random", "call model.eval() first")
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    kinds = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if model._is_stateful or kinds:
        raise _refused(f"its layers keep more than keys and values ({', '.join(kinds) or 'a recurrent state'})")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or devices == {"meta"}:
        raise _refused(f"its weights are on {' and '.join(sorted(devices))}", "load it onto one device")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise _refused("it takes no position_ids")


def _attend_by(model: PreTrainedModel, name: str) -> None:
    """Make the model's layers call the attention function registered under a name."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _refused("its attention does not go through transformers' attention interface")


def _longest_sequence(config: PreTrainedConfig) -> int:
    """Return the model's limit, or the length up to which rotations do not depend on the rest of the batch.

    transformers chooses longrope's frequencies for all tokens of a step from the longest sequence.
    """
    longest = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if parameters.get("rope_type") == "longrope":
            longest = min(longest, parameters["original_max_position_embeddings"])
    return longest
