"""`LLM` and `Inference`: text in, text out.

Both are front ends of the engine, which takes and returns token ids. They tokenize prompts, detokenize outputs, and
search the outputs for stop strings. Explained in chapters 04 and 07.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from collections.abc import Sequence as ListLike
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mini_engine.chat_template import Message, render_chat
from mini_engine.config import EngineConfig, ResolvedConfig
from mini_engine.detokenizer import Detokenizer, special_ids
from mini_engine.engine import LLMEngine, OnStep
from mini_engine.errors import ConfigError, RequestError
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.outputs import Piece, Prompt, RequestOutput, StepReport
from mini_engine.parts import Parts, default_parts
from mini_engine.request import Context, Request
from mini_engine.sampling_params import SamplingParams

ContextOf = Callable[[], Context]  # looks up the chunks before a prompt when it is queued
NO_WORDS = Tokenizer(WordLevel({}, unk_token=""))  # decodes every token to the empty text
MAX_CHARACTERS_PER_TOKEN = 64  # of the model's limit; longer texts are refused without being tokenized


@dataclass(eq=False)
class TextRequest:
    """The front end's side of a request.

    Attributes:
        index: index of its prompt.
        prompt: the prompt as given.
        request: the engine's side.
        detokenizer: its text.
        each_step: whether its text is needed in every step, to be shown or searched for stop strings.
        inbox: receives its pieces.
        num_read: number of tokens of prompt and output that the detokenizer has received.
        num_told: number of these tokens that the pieces so far have counted.
        num_shown: characters of the pieces so far.
    """

    index: int
    prompt: Prompt
    request: Request
    detokenizer: Detokenizer
    each_step: bool
    inbox: deque[Piece]
    num_read: int
    num_told: int
    num_shown: int = 0


class TextEngine:
    """Text in, text out, on one engine. Threads may share it: each gets its own outputs.

    Args:
        engine: the engine.
        tokenizer: the model's; without one, prompts are token ids and outputs have no text.
        default_params: parameters of requests that have none.

    Attributes:
        engine: the engine itself, for requests that arrive while others run: `add_request`, then `step`.
        tokenizer: see above.
        default_params: see above.

    Raises:
        ConfigError: if the tokenizer is not one of the `tokenizers` library.
    """

    def __init__(
        self, engine: LLMEngine, tokenizer: PreTrainedTokenizerBase | None, default_params: SamplingParams
    ) -> None:
        self.engine, self.tokenizer, self.default_params = engine, tokenizer, default_params
        backend = NO_WORDS if tokenizer is None else getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"the tokenizer is a {type(tokenizer).__name__}, which cannot decode token by token: load it with "
                "AutoTokenizer.from_pretrained, which returns a fast one"
            )
        self._backend, self._special_ids = backend, special_ids(backend)
        self._texts: dict[Request, TextRequest] = {}
        self._num_finished = engine.metrics.finished
        self._numbers = count()
        self._lock = threading.RLock()

    def generate(
        self,
        prompts: Prompt | ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
        contexts: ListLike[ContextOf] | None = None,
    ) -> list[RequestOutput]:
        """Generate one output for each prompt.

        Args:
            prompts: a text or a list of token ids, or several of them.
            params: for all prompts, or one for each; default `default_params`.
            contexts: the registered chunks before each prompt (see `mini_engine.chunks`); default none.

        Returns:
            One output for each prompt, in order. If several prompts are given, one that cannot be served has
            `finish_reason="error"`, and the others are still served.

        Raises:
            RequestError: if the only prompt cannot be served, or the numbers of prompts, params and contexts differ.
        """
        several, is_one = as_prompts(prompts)
        outputs = {
            piece.index: piece.output
            for piece in self._pieces(several, params, each_step=False, contexts=contexts)
            if piece.output
        }
        if is_one and (error := outputs[0].error):
            raise error
        return [outputs[i] for i in range(len(several))]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, context: ContextOf | None = None
    ) -> Generator[str, None, None]:
        """Generate one output and yield its text as it is generated, never half a character.

        Args:
            prompt: a text or a list of token ids.
            params: default `default_params`.
            context: the registered chunks before the prompt; default none.

        Raises:
            RequestError: if the prompt cannot be served.
        """
        with closing(self.stream_batch([prompt], params, contexts=[context] if context else None)) as pieces:
            for piece in pieces:
                if piece.output and piece.output.error:
                    raise piece.output.error
                if piece.text:
                    yield piece.text

    def stream_batch(
        self,
        prompts: ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
        contexts: ListLike[ContextOf] | None = None,
    ) -> Generator[Piece, None, None]:
        """Generate one output for each prompt and yield the text of each as it is generated.

        Other requests of the engine are served along with these. Closing the generator ends its own requests.

        Args:
            prompts: texts or lists of token ids.
            params: for all prompts, or one for each; default `default_params`.
            contexts: the registered chunks before each prompt; default none.

        Raises:
            RequestError: if the numbers of prompts, params and contexts differ.
        """
        return self._pieces(as_prompts(prompts)[0], params, each_step=True, contexts=contexts)

    def chat(
        self, messages: ListLike[Message], params: SamplingParams | None = None, *, chat_template: str | None = None
    ) -> RequestOutput:
        """Generate the next message of a conversation.

        Args:
            messages: each with a "role" and a "content".
            params: default `default_params`.
            chat_template: a Jinja template; default the model's own.

        Raises:
            RequestError: if the conversation cannot be served.
        """
        return self.generate(self.chat_prompt(messages, chat_template=chat_template), params)[0]

    def chat_prompt(self, messages: ListLike[Message], *, chat_template: str | None = None) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins.

        Raises:
            RequestError: if there is no chat template or no tokenizer, or the template does not take these messages.
        """
        text = render_chat(self._tokenizer(), messages, chat_template)
        return self.tokens_of(text, add_special_tokens=False)

    def tokens_of(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt: a text, or token ids in a list, an array or a tensor.

        Raises:
            RequestError: if it is neither, if it is longer than any prompt that the engine accepts, or if it is a text
                and there is no tokenizer.
        """
        if not isinstance(prompt, str):
            numbers = _listed(prompt)
            if numbers is None or not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
                raise RequestError(f"the prompt is neither text nor a list of token ids: {str(prompt)[:80]}")
            return [int(number) for number in numbers]
        tokenizer, limit = self._tokenizer(), self.engine.config.max_model_len
        assert limit is not None
        if len(prompt) > limit * MAX_CHARACTERS_PER_TOKEN:
            raise RequestError(f"the prompt has {len(prompt)} characters, too many for {limit} tokens; shorten it")
        try:
            prompt.encode()
            return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, verbose=False)
        except Exception as error:  # a tokenizer may raise anything
            raise RequestError(f"the prompt cannot be tokenized: {error}") from error

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError(
                "the model has no tokenizer, which text and stop strings need: give token ids, or write the tokenizer "
                "into the model's folder with save_pretrained"
            )
        return self.tokenizer

    # --- requests ------------------------------------------------------------------------------------------------

    def _pieces(
        self,
        prompts: ListLike[Prompt],
        params: SamplingParams | ListLike[SamplingParams] | None,
        each_step: bool,
        contexts: ListLike[ContextOf] | None = None,
    ) -> Generator[Piece, None, None]:
        of_each = params if isinstance(params, list | tuple) else [params or self.default_params] * len(prompts)
        if not all(isinstance(own, SamplingParams) for own in of_each):
            raise RequestError(f"params is {str(params)[:80]}; give SamplingParams, or a list of them")
        for what, given in {"SamplingParams": of_each, "contexts": contexts}.items():
            if given is not None and len(given) != len(prompts):
                raise RequestError(f"{len(prompts)} prompts but {len(given)} {what}; give one for each prompt")
        inbox: deque[Piece] = deque()
        unfinished: dict[int, TextRequest] = {}
        try:
            for index, (prompt, own) in enumerate(zip(prompts, of_each, strict=True)):
                try:
                    context = contexts[index]() if contexts else ()
                    unfinished[index] = self._add(index, prompt, own, each_step, inbox, context)
                except RequestError as refused:
                    yield Piece(index, "", 0, RequestOutput(prompt, [], [], "", "error", refused), None)
            while unfinished:
                self._step(inbox)
                while inbox:
                    piece = inbox.popleft()
                    if piece.output:
                        del unfinished[piece.index]
                    yield piece
        finally:
            for text in unfinished.values():
                self._texts.pop(text.request, None)
                self.engine.finish(text.request, "abort")

    def _add(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams,
        each_step: bool,
        inbox: deque[Piece],
        context: Context,
    ) -> TextRequest:
        token_ids = self.tokens_of(prompt, add_special_tokens=not context)
        if params.stop:
            self._tokenizer()
        with self._lock:
            name = next(n for i in self._numbers if (n := f"stream {i}") not in self.engine.requests)
            params_without_stop = replace(params, stop=()) if params.stop else params
            request = self.engine.add_request(name, token_ids, params_without_stop, context)
            detokenizer = Detokenizer(self._backend, self._special_ids, params.stop, self.engine.parts.scan_stop)
            each_step, start = each_step or bool(params.stop), len(request.prompt_token_ids)
            text = TextRequest(index, prompt, request, detokenizer, each_step, inbox, start, start)
            self._texts[request] = text
        return text

    def _step(self, inbox: deque[Piece]) -> None:
        """Step the engine, unless another thread's step has filled the inbox meanwhile, and deliver the pieces."""
        with self._lock:
            if inbox:
                return
            report = self.engine.step()
            finished, num_finished = report.finished, self.engine.metrics.finished
            if num_finished != self._num_finished + len(finished):  # another step ended some, or we were interrupted
                finished = [request for request in list(self._texts) if request.finish_reason]
            for request in (*report.sampled_by, *finished):
                text = self._texts.get(request)
                if text and (text.each_step or request.finish_reason):
                    self._deliver(text, report)
            self._num_finished = num_finished

    def _read(self, text: TextRequest) -> None:
        """Detokenize a request's new tokens, and end it at a stop string."""
        request, detokenizer = text.request, text.detokenizer
        try:
            for token_id in self.engine.tokens_of(request, text.num_read):
                if detokenizer.stopped:
                    break
                if token_id not in request.end_token_ids:  # the token that ends the output is not shown
                    detokenizer.push(token_id)
                text.num_read += 1
            # An output that was cut off may end in half a character, which must not be taken for a stop string.
            if request.finish_reason in ("stop", "length") and not detokenizer.stopped:
                detokenizer.finish()
        except Exception as error:  # from the tokenizer; the other requests go on
            failure = RequestError(f"the output cannot be decoded: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.engine.finish(request, "error")
            request.finish_reason, request.error = "error", failure
        if detokenizer.stopped:
            self.engine.finish(request, "stop")

    def _deliver(self, text: TextRequest, report: StepReport) -> None:
        """Put the new text of a request into its inbox, and the whole output if the request has ended.

        A request that ends here, at a stop string, is reported by the next step, which delivers its output.
        """
        request, detokenizer, output = text.request, text.detokenizer, None
        has_ended = request.finish_reason is not None
        self._read(text)
        num_tokens = text.num_read
        if has_ended and request.finish_reason:
            error = request.error
            if detokenizer.stopped and error is None:
                request.finish_reason = "stop"
                request.token_ids = request.token_ids[: text.num_read]
            if request.finish_reason == "abort":
                error = RequestError(f"the request {request.request_id!r} was aborted; send it again if still needed")
            prompt, tokens = request.prompt_token_ids, request.output_token_ids
            output = RequestOutput(text.prompt, prompt, tokens, detokenizer.text, request.finish_reason, error)
            num_tokens = len(request.token_ids)
        shown = detokenizer.text[text.num_shown :]
        piece = Piece(text.index, shown, num_tokens - text.num_told, output, report)
        try:
            text.inbox.append(piece)
        finally:  # even if Ctrl-C was pressed during the call: what has been delivered counts as delivered
            text.num_shown, text.num_told = text.num_shown + len(shown), num_tokens
            if output:
                self._texts.pop(request, None)  # another thread may have closed its stream meanwhile


class LLM(TextEngine):
    """A language model that generates text.

    Args:
        model: "smollm2-135m-instruct" (embedded), a folder, a GGUF file, or the name of a model on the hub.
        config: the options; default `EngineConfig()`.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step.
        options: fields of `EngineConfig`, instead of `config` or overriding it.

    Attributes:
        model: the loaded model.
        given_config: the options as they were given.
        default_params: the sampling parameters that the checkpoint recommends, as in vLLM.

    Raises:
        ConfigError: for impossible options.
        ModelLoadError: if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path = "smollm2-135m-instruct",
        config: EngineConfig | None = None,
        *,
        parts: Parts | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> None:
        config = (config or EngineConfig()).with_options(options)
        device = pick_device(config.device)
        self.given_config, self.parts = config, parts or default_parts(device)
        checkpoint = open_checkpoint(model)
        tokenizer = load_tokenizer(checkpoint) if checkpoint.has_tokenizer else None
        self.model = load_model(checkpoint, self.parts, pick_dtype(config.dtype, device, checkpoint.dtype), device)
        ends = checkpoint.eos_token_ids or [i for i in [getattr(tokenizer, "eos_token_id", None)] if i is not None]
        self.eos_token_ids = frozenset(ends)
        engine = LLMEngine(self.model, config, eos_token_ids=self.eos_token_ids, parts=self.parts, on_step=on_step)
        super().__init__(engine, tokenizer, checkpoint.default_params)

    @property
    def config(self) -> ResolvedConfig:
        """The options, with every default resolved."""
        return self.engine.config

    def with_options(self, *, on_step: OnStep | None = None, **options: Any) -> TextEngine:
        """Build another engine on the same model, with some options changed and its own pages.

        Args:
            on_step: called with the engine and the report of each step.
            options: fields of `EngineConfig` other than dtype and device.

        Raises:
            ConfigError: for impossible options.
        """
        config = self.given_config.with_options(options)
        engine = LLMEngine(self.model, config, eos_token_ids=self.eos_token_ids, parts=self.parts, on_step=on_step)
        return TextEngine(engine, self.tokenizer, self.default_params)


class Inference(TextEngine):
    """Serves a loaded model of transformers by continuous batching over a paged KV cache.

    Args:
        model: any causal language model whose attention goes through transformers' attention interface: Llama, Qwen3,
            Gemma 2, GPT-2 and most others. It is not moved, converted or changed.
        tokenizer: the model's.
        max_batch_size: requests that run at once; others wait.
        max_seq_length: longest prompt and output together; default the model's limit, or the pool's if it is smaller.
        n_pages: pages of the KV cache.
        page_size: tokens per page.
        parts: the engine's replaceable parts.
        on_step: called with the engine and the report of each step.
        options: further fields of `EngineConfig`.

    Attributes:
        default_params: temperature, filters and penalty of the model's own `generate`: greedy unless its generation
            config samples. Its other settings, such as `suppress_tokens`, are not applied.

    Raises:
        ConfigError: for a model that the engine cannot run, or impossible options.
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
        parts: Parts | None = None,
        on_step: OnStep | None = None,
        **options: Any,
    ) -> None:
        from mini_engine.models.hf import HFModel  # takes seconds, which `LLM` does not need

        given = {"max_batch_size": max_batch_size, "max_model_len": max_seq_length, "num_pages": n_pages}
        config = EngineConfig.of({**given, "page_size": page_size, **options})
        adapted, pool = HFModel(model), n_pages * page_size
        if max_seq_length is None:
            config = replace(config, max_model_len=min(adapted.config.max_position_embeddings, pool))
        elif max_seq_length > pool:
            raise ConfigError(
                f"max_seq_length is {max_seq_length}, and {n_pages} pages of {page_size} hold {pool} tokens: one "
                "request could outgrow the whole KV cache; lower max_seq_length or raise n_pages"
            )
        engine = LLMEngine(adapted, config, eos_token_ids=adapted.eos_token_ids, parts=parts, on_step=on_step)
        super().__init__(engine, tokenizer, params_of_generation(getattr(model, "generation_config", None)))


def params_of_generation(config: GenerationConfig | None) -> SamplingParams:
    """Return temperature, filters and penalty of transformers' own `generate`: greedy unless `do_sample` is set."""
    names = ["repetition_penalty"]
    given: dict[str, Any] = {"temperature": 0.0}
    if config is not None and config.do_sample:
        names += ["temperature", "top_k", "top_p", "min_p"]
        given = {"top_k": 50}  # the default of `generate`
    return SamplingParams(**given | {n: value for n in names if (value := getattr(config, n, None)) is not None})


def as_prompts(prompts: Prompt | ListLike[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the prompts as a list, and whether a single prompt was given.

    Raises:
        RequestError: if it is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts], True
    several = _listed(prompts)
    if several is None:
        raise RequestError(f"prompts is a {type(prompts).__name__}; give text, token ids, or a list of prompts")
    is_one = len(several) > 0 and isinstance(several[0], Integral)
    return ([several], True) if is_one else (list(several), False)


def _listed(value: Any) -> ListLike[Any] | None:
    """Return the items of a list, an array or a tensor; None for anything else, and for bytes."""
    items = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    return items if isinstance(items, ListLike) and not isinstance(items, bytes | bytearray | memoryview) else None


def pick_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError if this machine does not have it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but PyTorch sees no GPU here; use device='cpu'")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of that name; "auto" is the checkpoint's where the device computes in it natively."""
    if name != "auto":
        return getattr(torch, name)
    slow = device.type == "cpu" and checkpoint_dtype != torch.float32 and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if slow else checkpoint_dtype
