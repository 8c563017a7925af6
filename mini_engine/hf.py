"""`Inference`: the engine on a model of transformers that you have already loaded.

No modelling code is copied. transformers finds a layer's attention under a name (its `AttentionInterface`); under the
name that is registered here, a layer hands its queries, keys and values to the engine, which stores the keys and
values in its own pages. Everything else, from the embeddings to the logits, is the model's own code.

Your model stays as it was: the engine runs on a second tree of modules, made of the same weights, with a configuration
of its own. You may go on using yours, between the engine's steps too.
"""

import copy
import inspect
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask
from transformers.utils import ModelOutput

from mini_engine.attention.backend import check_backend
from mini_engine.attention.naive import attention_mask
from mini_engine.batch import Attend, AttentionSpec
from mini_engine.engine import LLMEngine
from mini_engine.errors import ConfigError, check_positive
from mini_engine.outputs import Prompt, RequestOutput, StepReport
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams

# Layers hand keyword arguments that they do not know on to their attention: that is how these get there.
LayerAttend = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def _attention(
    module: nn.Module,
    query: Float[Tensor, "1 Hq T D"],
    key: Float[Tensor, "1 Hk T D"],
    value: Float[Tensor, "1 Hk T D"],
    attention_mask: Tensor | None,
    *,
    attend: LayerAttend,
    **_: object,
) -> tuple[Float[Tensor, "1 T Hq D"], None]:
    """What a layer calls in the engine's steps."""
    return attend(module, query, key, value), None


def _probe_attention(
    module: nn.Module,
    query: Float[Tensor, "1 Hq T D"],
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    note: Callable[..., None] | None = None,
    **asked: object,
) -> tuple[Float[Tensor, "1 T Hq D"], None]:
    """What a layer calls once, when the engine is built: it only notes what the layer asks for."""
    if note is None:
        raise _refused("its layers do not hand keyword arguments on to their attention")
    note(module, query, key, value, attention_mask, **asked)
    return torch.zeros_like(query).transpose(1, 2), None


# What attention functions of transformers are given and may ignore.
_HARMLESS = {"position_ids", "is_causal", "dropout"}


# Where the mask takes the probe's tokens to stand: near each other, and so far apart that no window hides from it.
_PLACES = torch.tensor([*range(8), *(2**power for power in range(3, 21))])


def _probe_mask(*, mask_function: Callable[..., Tensor], **how: Any) -> Bool[Tensor, "1 1 T T"] | None:
    """The mask that a layer wants between tokens at `_PLACES`, never left out for being plainly causal."""

    def spread(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        places = _PLACES.to(q_idx.device)
        return mask_function(b, h, places[q_idx], places[kv_idx])

    return sdpa_mask(mask_function=spread, **how | {"allow_is_causal_skip": False})


# A name without a mask function gets no mask from transformers, and plain attention under such a name is silently not
# causal. For the steps that is what we want: the engine's attention knows each token's sequence and position, and a
# mask would be T x T numbers built for nothing and one wait for the device. The probe wants the mask, to compare it
# with the one that the engine will apply.
_STEP, _PROBE = "mini_engine", "mini_engine_probe"
AttentionInterface.register(_STEP, _attention)
AttentionInterface.register(_PROBE, _probe_attention)
AttentionMaskInterface.register(_PROBE, _probe_mask)


def _refused(why: str) -> ConfigError:
    return ConfigError(f"this model cannot run on the engine's attention: {why}; use the model's own generate() for it")


@dataclass(frozen=True)
class HFConfig:
    """What the engine needs to know of a model's configuration.

    Attributes:
        vocab_size: words that the model can read and write.
        max_position_embeddings: longest sequence, in tokens.
    """

    vocab_size: int
    max_position_embeddings: int


class _GivenHidden(nn.Module):
    """Takes the place of a model's layers: its output, in the form that theirs has, is what it is given."""

    def __init__(self, form: type[ModelOutput]) -> None:
        super().__init__()
        self._form = form

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> ModelOutput:
        return self._form(last_hidden_state=inputs_embeds)


class HFModel(nn.Module):
    """A causal language model of transformers as a `LanguageModel`: flat tokens in, `attend` for attention.

    Args:
        model: the loaded model, in evaluation mode. It is not changed; its weights are shared, not copied.

    Attributes:
        config: the model's limits.
        eos_token_ids: the tokens at which its own `generate` ends.
        attention_specs: one for each layer, as the layers themselves ask for it.

    Raises:
        ConfigError: for a model whose attention cannot be replaced, or does what the engine's cannot.
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
        self.config = HFConfig(text_config.vocab_size, _longest_sequence(text_config))
        # Every module anew, with a configuration of its own; every weight the very same.
        head = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self.body: nn.Module = head.base_model
        self._specs: dict[nn.Module, AttentionSpec] = {}
        self._window: int | None = getattr(text_config, "sliding_window", None)
        _attend_by(head, _PROBE)
        with torch.no_grad():
            output = self._probe(text_config.num_hidden_layers)
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
        """Run the layers, the final norm included. Arguments as those of `CausalLM.forward`."""

        def attend_in(module: nn.Module, *qkv: Float[Tensor, "1 _ T D"]) -> Float[Tensor, "1 T Hq D"]:
            q, k, v = (x[0].transpose(0, 1) for x in qkv)
            return attend(self._specs[module], q, k, v)[None]

        return self._run(token_ids, positions, attend=attend_in).last_hidden_state[0]

    def compute_logits(self, hidden: Float[Tensor, "R hidden"]) -> Float[Tensor, "R vocab"]:
        """One score for each word, by the model's own output layer and whatever it does to logits afterwards."""
        logits = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _probe(self, num_layers: int) -> Any:
        """Let every layer say what its attention computes."""
        num_tokens = min(len(_PLACES), self.config.vocab_size, self.config.max_position_embeddings)
        positions = torch.arange(num_tokens, device=next(self.body.parameters()).device)
        output = self._run(positions, positions, note=self._note)
        if len(self._specs) != num_layers:
            raise _refused(f"only {len(self._specs)} of its {num_layers} layers attend through transformers' interface")
        return output

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
    ) -> None:
        """Write down what a layer asks of its attention, if `AttentionSpec` can say it."""
        layer, num_qo_heads, num_kv_heads, head_dim = len(self._specs), query.shape[1], key.shape[1], query.shape[3]
        scale = head_dim**-0.5 if scaling is None else float(scaling)
        if module in self._specs:
            raise _refused("one of its layers attends more than once in a step")
        if key.shape[3] != head_dim or value.shape != key.shape or num_qo_heads % num_kv_heads:
            shapes = ", ".join(str(list(x.shape[1:])) for x in (query, key, value))
            raise _refused(f"the heads of its queries, keys and values do not match ({shapes})")
        unknown = sorted(n for n, x in others.items() if x is not None and x is not False and n not in _HARMLESS)
        if unknown:
            raise _refused(f"its attention takes {', '.join(unknown)}, which the engine's does not know")
        places = _PLACES[: query.shape[2]].to(query.device)
        # Some layers have their window in the mask alone.
        for window in (sliding_window, self._window):
            visible = attention_mask(places, places, window)
            if mask is not None and mask.dtype == visible.dtype and torch.equal(mask[0, 0], visible):
                break
        else:
            raise _refused("its attention is not causal, or a window is not all that limits it")
        self._specs[module] = AttentionSpec(
            layer, layer, num_qo_heads, num_kv_heads, head_dim, scale, window=window, softcap=softcap
        )

    def _run(self, token_ids: Int[Tensor, " T"], positions: Int[Tensor, " T"], **for_attention: object) -> Any:
        """The tokens as one row. What `for_attention` holds arrives at the attention function of each layer."""
        row = {"input_ids": token_ids[None], "position_ids": positions[None]}
        return self.body(**row, use_cache=False, **for_attention)


def _check_kind(model: PreTrainedModel) -> None:
    """Raise ConfigError for what can be seen from outside that the engine cannot run."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise _refused("it is an encoder with a decoder")
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{type(model).__name__} gives no logits; load the model with AutoModelForCausalLM")
    if model.base_model is model:
        raise _refused("its layers cannot be told from its output layer")
    if model.training:
        raise ConfigError("the model is in training mode, where dropout is random; call model.eval() first")
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if model._is_stateful or kinds:
        raise _refused(f"its layers keep more than keys and values ({', '.join(kinds) or 'a recurrent state'})")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or devices == {torch.device("meta")}:
        places = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the model's weights are spread over {places}; load it onto one device")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise _refused("it takes no position_ids")


def _attend_by(model: PreTrainedModel, name: str) -> None:
    """Let the model's layers call the attention function registered under a name."""
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise _refused("its attention does not go through transformers' attention interface")


def _longest_sequence(config: PreTrainedConfig) -> int:
    """The model's limit, or the length up to which one sequence's rotations do not depend on its neighbours.

    transformers chooses longrope's frequencies for all tokens of a step by the longest of their sequences.
    """
    longest = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(p for p in rope.values() if isinstance(p, dict))):
        if parameters.get("rope_type") == "longrope":
            longest = min(longest, parameters["original_max_position_embeddings"])
    return longest


class Inference:
    """Serves a loaded model of transformers by continuous batching over a paged KV cache.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface: Llama, Qwen3,
            Gemma 2, GPT-2 and most others. It stays where it is, in its dtype, and as it is.
        tokenizer: the model's.
        max_batch_size: most sequences in one step; more wait for their turn.
        max_seq_length: longest prompt and output together; default the model's limit, or the pool's if it is smaller.
        n_pages: pages of the KV cache.
        page_size: tokens of a page.
        attn_backend: name of the attention backend.
        max_num_batched_tokens: most tokens in one step; longer prompts are computed in chunks.
        parts: the engine's replaceable parts.
        on_step: called after each step, as by `LLMEngine`.

    Attributes:
        engine: the engine itself, for requests that come while others run: `add_request`, then `step`.

    Raises:
        ConfigError: for a model that the engine cannot run, or options that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch_size: int = 16,
        max_seq_length: int | None = None,
        n_pages: int = 256,
        page_size: int = 128,
        attn_backend: str = "torch",
        max_num_batched_tokens: int = 2048,
        parts: Parts | None = None,
        on_step: Callable[[LLMEngine, StepReport], None] | None = None,
    ) -> None:
        check_backend(attn_backend)
        check_positive(max_batch_size=max_batch_size, n_pages=n_pages, page_size=page_size)
        pool = n_pages * page_size
        if max_seq_length is not None and max_seq_length > pool:
            raise ConfigError(
                f"max_seq_length is {max_seq_length}, and {n_pages} pages of {page_size} hold {pool} tokens: one "
                "sequence could outgrow the whole KV cache; lower max_seq_length or raise n_pages"
            )
        adapted = HFModel(model)
        longest = adapted.config.max_position_embeddings
        length = min(longest, pool) if max_seq_length is None else max_seq_length
        if not 2 <= length <= longest:
            raise ConfigError(f"max_seq_length is {length}; this model takes 2 to {longest} tokens")
        self.tokenizer = tokenizer
        self.engine = LLMEngine(
            adapted,
            tokenizer,
            adapted.eos_token_ids,
            attn_backend=attn_backend,
            num_pages=n_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            parts=parts,
            on_step=on_step,
        )

    def generate(
        self, prompts: Prompt | ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate one output for each prompt, as `LLM.generate` does.

        Args:
            prompts: a text or a list of token ids, or several of them.
            params: for all prompts, or one for each; default `SamplingParams()`.

        Returns:
            One output for each prompt, in order: `[output.text for output in outputs]` are the texts. Where several
            prompts are given, one that cannot be served has `finish_reason="error"` and the others are served.

        Raises:
            RequestError: if the only prompt cannot be served, or the numbers of prompts and params differ.
        """
        return self.engine.generate(prompts, params)
