"""`LLM`: text in, text out."""

import random
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from mini_engine.attention.backend import check_backend
from mini_engine.detokenizer import Detokenizer
from mini_engine.errors import ConfigError, MiniEngineError, RequestError
from mini_engine.generate import Step, generate_steps
from mini_engine.models.base import CausalLM
from mini_engine.models.weights import load_model, load_tokenizer, open_checkpoint
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from mini_engine.sequence import FinishReason, Sequence, check_prompt

Prompt = str | ListLike[int]
Message = Mapping[str, str]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class RequestOutput:
    """What became of one request.

    Attributes:
        prompt: as it was given.
        prompt_token_ids: its tokens; empty if it could not be tokenized.
        token_ids: the tokens of the output, an end-of-sequence token included.
        text: the output, without end-of-sequence tokens and without the stop string.
        finish_reason: "stop", "length", or "error".
        error: why the request could not be served, if so.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: MiniEngineError | None = None


@dataclass(frozen=True)
class Piece:
    """What one step gave one request.

    Attributes:
        index: which prompt it belongs to.
        text: new text, possibly empty.
        output: the whole output, once the request has ended.
        step: the step it came from; None for a request that was refused before the first.
    """

    index: int
    text: str
    output: RequestOutput | None
    step: Step | None = field(repr=False)


class LLM:
    """A language model that generates text.

    Args:
        model: "smollm2-135m-instruct" (embedded), a folder, a GGUF file, or the name of a model on the hub.
        dtype: "auto" (the checkpoint's, but float32 on a CPU without bfloat16 instructions) or a name of DTYPES.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        attn_backend: name of the attention backend.
        max_batch_size: requests that run at once; more wait for their turn.
        max_model_len: longest prompt and output together; default the model's own limit.
        parts: the engine's replaceable functions.

    Raises:
        ConfigError: for an option that cannot be.
        ModelLoadError: if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        *,
        dtype: str = "auto",
        device: str = "auto",
        attn_backend: str = "torch",
        max_batch_size: int = 32,
        max_model_len: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        check_backend(attn_backend)
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size is {max_batch_size}; it must be 1 or more")
        where = pick_device(device)
        parts = parts or Parts()
        checkpoint = open_checkpoint(model)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(checkpoint)
        self.model: CausalLM = load_model(checkpoint, parts, pick_dtype(dtype, where, checkpoint.dtype), where)
        self.eos_token_ids = frozenset(checkpoint.eos_token_ids)
        self.max_batch_size = max_batch_size
        self.attn_backend = attn_backend
        self.parts = parts
        longest = self.model.config.max_position_embeddings
        self.max_model_len = longest if max_model_len is None else max_model_len
        if not 2 <= self.max_model_len <= longest:
            raise ConfigError(f"max_model_len is {self.max_model_len}; this model takes 2 to {longest} tokens")

    def generate(
        self, prompts: Prompt | ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Generate one output for each prompt.

        Args:
            prompts: a text or a list of token ids, or several of them.
            params: for all prompts, or one for each; default `SamplingParams()`.

        Returns:
            One output for each prompt, in order. Where several prompts are given, one that cannot be served has
            `finish_reason="error"` and the others are served all the same.

        Raises:
            RequestError: if the only prompt cannot be served, or the numbers of prompts and params differ.
        """
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several: list[Prompt] = [prompts] if alone else list(prompts)  # type: ignore[list-item,arg-type]
        outputs: dict[int, RequestOutput] = {}
        for piece in self.stream_batch(several, params):
            if piece.output:
                outputs[piece.index] = piece.output
                if alone and piece.output.error:
                    raise piece.output.error
        return [outputs[i] for i in range(len(several))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Generate one output and yield its text as it comes, never half a character.

        Raises:
            RequestError: if the prompt cannot be served.
        """
        for piece in self.stream_batch([prompt], params):
            if piece.output and piece.output.error:
                raise piece.output.error
            if piece.text:
                yield piece.text

    def stream_batch(
        self, prompts: ListLike[Prompt], params: SamplingParams | ListLike[SamplingParams] | None = None
    ) -> Iterator[Piece]:
        """Generate one output for each prompt and yield every piece of text as it comes, with the step it came from.

        Raises:
            RequestError: if the numbers of prompts and params differ.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, ListLike) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts but {len(each)} SamplingParams; give one for all, or as many")
        index_of: dict[Sequence, int] = {}
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                index_of[self._sequence(prompt, own)] = index
            except RequestError as error:
                yield Piece(index, "", RequestOutput(prompt, [], [], "", "error", error), None)
        waiting = list(index_of)
        while waiting:
            group, waiting = waiting[: self.max_batch_size], waiting[self.max_batch_size :]
            for step in generate_steps(self.model, group, self.attn_backend, self.parts):
                for sequence, text in step.new_text:
                    index = index_of[sequence]
                    yield Piece(index, text, _output(prompts[index], sequence), step)

    def chat(
        self,
        messages: ListLike[Message],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> RequestOutput:
        """Generate the next message of a conversation.

        Args:
            messages: each with a "role" and a "content".
            params: default `SamplingParams()`.
            chat_template: a Jinja template; default the model's own.

        Raises:
            RequestError: if the conversation cannot be served.
        """
        return self.generate(self.chat_prompt(messages, chat_template=chat_template), params)[0]

    def chat_prompt(self, messages: ListLike[Message], *, chat_template: str | None = None) -> list[int]:
        """Return the tokens that a conversation becomes, up to where the model's answer begins.

        Raises:
            RequestError: if there is no chat template, or it does not take these messages.
        """
        if chat_template is None and not self.tokenizer.chat_template:
            raise RequestError("this model has no chat template; pass chat_template, or use generate with plain text")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], chat_template=chat_template, add_generation_prompt=True, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(f"the chat template does not take these messages: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        token_ids = self.tokenizer.encode(prompt, verbose=False) if isinstance(prompt, str) else list(prompt)
        check_prompt(token_ids, self.model.config.vocab_size, self.max_model_len)
        return Sequence(
            token_ids,
            params,
            seed=random.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            detokenizer=Detokenizer(self.tokenizer, tuple(params.stop)),
        )


def _output(prompt: Prompt, sequence: Sequence) -> RequestOutput | None:
    if sequence.finish_reason is None:
        return None
    prompt_token_ids = sequence.token_ids[: sequence.num_prompt_tokens]
    return RequestOutput(prompt, prompt_token_ids, sequence.output_token_ids, sequence.text, sequence.finish_reason)


def pick_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError if this machine has none such."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but PyTorch sees no GPU here; use device='cpu'")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of that name; "auto" is the checkpoint's where the device computes in it natively.

    Raises:
        ConfigError: if there is no such dtype.
    """
    if name == "auto":
        slow = device.type == "cpu" and checkpoint_dtype != torch.float32 and not _cpu_has_bfloat16()
        return torch.float32 if slow or checkpoint_dtype not in DTYPES.values() else checkpoint_dtype
    if name not in DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; choose auto or one of: {', '.join(DTYPES)}")
    return DTYPES[name]


def _cpu_has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported()
